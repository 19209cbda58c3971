"""Settings that `trireme check --tune` tries for each launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trireme.kernels.chips.chip import Chip
from trireme.kernels.chips.tiles import KNOWN

# LARGE: what check --tune tries where shared memory is large; ALL: on every chip. Settings with the same depth of a
# step have the same order of sums: in attention the depth is the keys of fwd and dq, the queries of dkv.
LARGE: dict[str, tuple[tuple[int, ...], ...]] = {
    "attention_fwd 64": ((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2)),
    "attention_fwd 128": ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3)),
    "attention_fwd 256": ((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2)),
    "attention_dq 64": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2)),
    "attention_dq 128": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)),
    "attention_dq 256": ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
    "attention_dkv 64": ((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (32, 128, 8, 3)),
    "attention_dkv 128": ((32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 3), (64, 128, 8, 2)),
    "attention_dkv 256": ((32, 64, 8, 2), (32, 64, 8, 1), (32, 128, 8, 1)),
    "grouped_mm": ((128, 64, 128, 8, 3), (128, 64, 128, 8, 4), (128, 32, 128, 8, 4), (64, 64, 128, 4, 4)),
    "grouped_add": ((64, 128, 128, 8, 3), (32, 128, 128, 8, 3), (64, 128, 64, 4, 3)),
}
ALL: dict[str, tuple[tuple[int, ...], ...]] = {
    "rows_bwd": ((8, 2), (16, 1), (16, 2), (8, 4)),
    "cross_entropy": ((4096, 8, 8), (4096, 16, 4), (8192, 32, 2)),
    "cross_entropy wide": ((8192, 32, 2), (8192, 32, 1), (4096, 8, 8), (4096, 16, 4)),
    "quantize": ((64, 128, 8), (128, 128, 8), (64, 64, 4)),
    "quantize both": ((64, 128, 8), (128, 128, 8), (64, 64, 4)),
    "gated_codes": ((64, 64, 8), (64, 64, 4), (64, 128, 8)),
    "block_scaled": (
        (128, 128, 128, 8, 8, 3),
        (128, 128, 128, 8, 8, 2),
        (128, 64, 128, 8, 4, 3),
        (64, 128, 128, 8, 4, 3),
    ),
}


def tried(here: Chip) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The settings that check --tune tries on a chip, by name of the launch; without launches that it does not use."""
    if here.large:
        found = dict(LARGE)
    else:
        found = {name: tuple(tuple(k.tile) for k in known if k.shared <= here.shared) for name, known in KNOWN.items()}
    missing = {"grouped_mm", "grouped_add"} if here.arch == 90 else set()  # of its own: launch.py, hopper.py
    missing |= {"quantize", "quantize both", "gated_codes"} if here.arch < 89 else set()
    missing |= {"block_scaled"} if here.arch // 10 != 12 else set()
    return {name: settings for name, settings in (found | ALL).items() if name not in missing}


def misfit(here: Chip, settings: Mapping[str, Sequence[int]]) -> str:
    """Why these are no settings for a chip, or ""."""
    known = tried(here)
    for name, setting in settings.items():
        if name not in known:
            return f"{name!r} is not a launch of this GPU"
        if tuple(setting) not in known[name]:
            return f"{name!r} is not launched with {list(setting)}"
    return ""

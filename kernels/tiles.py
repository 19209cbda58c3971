"""A GPU's chip, and one table of launches in bf16: the settings of each in 227 KiB of shared memory, and in 99 KiB.

The first is used unless `trireme check --tune` found another to be faster on the GPU at hand; it tries all. Those of
Hopper were measured on an H200, where those of heads of 512 spill and are faster all the same; those of 99 KiB were
compiled for sm_86, sm_89 and sm_120 with 16 bytes of spills at most, never measured. Settings with the same depth of
a step have the same order of sums: in attention the depth is the keys of fwd and dq, the queries of dkv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

# from the CUDA C programming guide, "Compute capabilities"
KIB = 1 << 10
SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB of a program, by compute capability
USUAL = 99  # of every other chip since Ampere, RTX 30 to 50 among them
WARPS = {80: 64, 87: 48, 90: 64, 100: 64, 103: 64}  # of a multiprocessor; else 48
L2 = 50 << 20  # of an H100


class Chip(NamedTuple):
    arch: int  # compute capability: 90 for sm_90; 0 in the interpreter
    sms: int  # multiprocessors
    l2: int = L2  # bytes

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program can have."""
        return SHARED.get(self.arch, USUAL) * KIB

    @property
    def large(self) -> bool:
        """Whether it is Hopper or B200: launches were measured on Hopper, and B200 has as much shared memory."""
        return self.shared > 200 * KIB

    @property
    def warps(self) -> int:
        """Warps of a multiprocessor."""
        return WARPS.get(self.arch, 48)


# of tensors without memory: the GPU that is planned for
described = Chip(89, 128, 72 << 20)


@cache
def chip(device: torch.device) -> Chip:
    if device.type == "meta":
        return described
    if device.type != "cuda":
        return Chip(0, 2)
    p = torch.cuda.get_device_properties(device)
    return Chip(10 * p.major + p.minor, p.multi_processor_count, p.L2_cache_size)


# ---------------------------------------------------------------- settings

Setting = tuple[int, ...]


class Tile(NamedTuple):
    """A launch of attention: rows of queries, of keys, warps, pipeline stages."""

    q: int
    k: int
    warps: int
    stages: int


class Grouped(NamedTuple):
    """A grouped GEMM's launch, with warps and stages of the software pipeline.

    Of a product: a tile of the result has `rows` by `b`, and `a` is the depth of a step. Of a matrix's gradient: a tile
    has `a` by `b`, and `rows` is the depth of a step.
    """

    rows: int
    a: int
    b: int
    warps: int
    stages: int


ONE_PASS = 86, 89, 120, 121  # chips that may compute attention's backward in one pass, and the setting that does not
TWO_PASSES = (0, 0, 0, 0)

# launch, of attention with the widest head -> (settings in 227 KiB, settings in 99 KiB); fmt: off
TABLE: dict[str, tuple[tuple[Setting, ...], tuple[Setting, ...]]] = {
    "attention_fwd 64": (
        ((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2)),
        ((128, 32, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
    ),
    "attention_fwd 128": (
        ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3)),
        ((64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)),
    ),
    "attention_fwd 192": (
        ((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2)),
        ((64, 32, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2)),
    ),
    "attention_fwd 256": (
        ((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2)),
        ((64, 32, 8, 2), (64, 16, 4, 2), (64, 64, 8, 1)),
    ),
    "attention_fwd 512": (
        ((64, 32, 8, 2), (64, 64, 8, 1), (64, 16, 8, 2)),
        ((64, 16, 8, 1), (32, 16, 8, 2), (32, 32, 8, 1)),
    ),
    "attention_dq 64": (
        ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2)),
        ((64, 32, 4, 3), (128, 32, 8, 2), (64, 32, 4, 2), (128, 64, 8, 2)),
    ),
    "attention_dq 128": (
        ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)),
        ((128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 4, 3)),
    ),
    "attention_dq 192": (
        ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
        ((64, 16, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
    ),
    "attention_dq 256": (
        ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
        ((64, 16, 8, 2), (64, 32, 8, 1), (64, 16, 4, 2), (32, 32, 4, 1)),
    ),
    "attention_dq 512": (((64, 16, 8, 2), (64, 32, 8, 1), (32, 16, 8, 2)), ((32, 16, 8, 2), (32, 16, 8, 1))),
    "attention_dkv 64": (
        ((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (32, 128, 8, 3)),
        ((32, 64, 4, 2), (32, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 3)),
    ),
    "attention_dkv 96": (((32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 3)), ((32, 64, 8, 2), (32, 64, 4, 2))),
    "attention_dkv 128": (
        ((32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 3), (64, 128, 8, 2)),
        ((64, 64, 8, 2), (32, 64, 8, 2), (32, 128, 8, 2), (16, 64, 4, 2)),
    ),
    "attention_dkv 192": (((32, 64, 8, 2), (32, 64, 8, 1), (32, 128, 8, 1)), ((32, 32, 8, 2), (16, 64, 8, 2))),
    "attention_dkv 256": (
        ((32, 64, 8, 2), (32, 64, 8, 1), (32, 128, 8, 1)),
        ((32, 32, 8, 2), (32, 32, 8, 1), (16, 64, 8, 1), (16, 32, 8, 2), (16, 64, 8, 2)),
    ),
    "attention_dkv 512": (((32, 32, 8, 2), (32, 32, 8, 1), (16, 32, 8, 2)), ((16, 32, 8, 2),)),
    "one_pass 64": ((TWO_PASSES,), (TWO_PASSES, (64, 128, 8, 1), (32, 64, 4, 1))),
    "one_pass 128": ((TWO_PASSES,), (TWO_PASSES, (32, 128, 8, 1), (16, 128, 8, 1))),
    "grouped_mm": (
        ((128, 64, 128, 8, 3), (128, 64, 128, 8, 4), (128, 32, 128, 8, 4), (64, 64, 128, 4, 4)),
        ((128, 32, 128, 8, 4), (128, 32, 128, 8, 3), (128, 64, 128, 8, 3), (64, 32, 128, 4, 4), (64, 64, 128, 4, 3)),
    ),
    "grouped_add": (
        ((64, 128, 128, 8, 3), (32, 128, 128, 8, 3), (64, 128, 64, 4, 3)),
        ((32, 128, 128, 8, 3), (64, 128, 128, 8, 3), (32, 64, 128, 4, 3), (64, 128, 64, 4, 2)),
    ),
    "rows_bwd": (((16, 1), (8, 2), (16, 2), (8, 4)), ((8, 2), (16, 1), (16, 2), (8, 4))),
    "cross_entropy": (((4096, 8, 8), (4096, 16, 4), (8192, 32, 2)),) * 2,
    "cross_entropy wide": (((8192, 32, 2), (8192, 32, 1), (4096, 8, 8), (4096, 16, 4)),) * 2,
    "quantize": (((64, 128, 8), (128, 128, 8), (64, 64, 4)),) * 2,
    "quantize both": (((128, 128, 8), (64, 128, 8), (64, 64, 4)), ((64, 128, 8), (128, 128, 8), (64, 64, 4))),
    "gated_codes": (((64, 64, 8), (64, 64, 4), (64, 128, 8)),) * 2,
    "block_scaled": (((128, 128, 128, 8, 8, 3), (128, 128, 128, 8, 8, 2), (128, 64, 128, 8, 4, 3)),) * 2,
}
# fmt: on
EXCEPTIONS = {  # chip -> launches whose first setting is another there
    # 255 registers and 64 and 120 bytes of spills with the usual ones
    12: {"attention_fwd 64": (128, 64, 8, 2), "attention_fwd 192": (64, 16, 8, 2)},
}


def settings(gpu: Chip, name: str) -> tuple[Setting, ...]:
    """The settings of a launch on a chip, the usual one first."""
    row = TABLE[name][not gpu.large]
    first = EXCEPTIONS.get(gpu.arch // 10, {}).get(name)
    return row if first is None else (first, *(setting for setting in row if setting != first))


def tried(gpu: Chip) -> dict[str, tuple[Setting, ...]]:
    """The settings that check --tune tries on a chip, by name of the launch; without launches that it does not use."""
    missing = {"grouped_mm", "grouped_add"} if gpu.arch == 90 else set()  # of its own: launch.py, hopper.py
    missing |= {"quantize", "quantize both", "gated_codes"} if gpu.arch < 89 else set()
    missing |= {"one_pass 64", "one_pass 128"} if gpu.arch not in ONE_PASS else set()
    missing |= {"block_scaled"} if gpu.arch // 10 != 12 else set()
    return {name: settings(gpu, name) for name in TABLE if name not in missing}


def misfit(gpu: Chip, chosen: Mapping[str, Sequence[int]]) -> str:
    """Why these are no settings for a chip, or ""."""
    options = tried(gpu)
    for name, setting in chosen.items():
        if name not in options:
            return f"{name!r} is not a launch of this GPU"
        if tuple(setting) not in options[name]:
            return f"{name!r} is not launched with {list(setting)}"
    return ""

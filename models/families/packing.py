"""Packings: matrices in fewer bits, as files have them; a row for each. No torch.

A matrix lies in a file as several parts, its codes and their scales. A frozen one keeps its parts wherever it is stored
and is decoded on the GPU next to its GEMMs (models/packed.py); a trained one is decoded once, as it is read.
Legend: R output features, C input features; E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trireme.models.families.keys import InputError, Keys

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A tensor of a packed matrix."""

    suffix: str  # in memory, behind the matrix's name
    stored: str  # in files, behind the matrix's name
    dtypes: tuple[str, ...]  # that it may have in files; of a matrix that is read, or planned, the first


@dataclass(frozen=True)
class Packing:
    """How matrices are packed."""

    word: str  # for the user
    method: str  # quant_method in config.json
    code: Literal["e2m1"]  # of a number: how models/packed.py decodes them
    parts: tuple[Part, ...]  # codes first
    block: tuple[int, int]  # rows and columns of codes that share a scale
    wanted: str  # dtypes and shapes of the parts, for the user
    globs: tuple[str, ...]  # over names in memory: what releases have packed
    turned: bool = False  # decoded, a matrix is (in, out), where its parts are (out, in)

    def part_of(self, name: str) -> Part | None:
        """Of a tensor in memory."""
        return next((part for part in self.parts if name.endswith(part.suffix)), None)

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Of the parts of a matrix, given its shape as a file would have it decoded."""
        *lead, inside, outside = shape
        scales = (*lead, outside, inside // self.block[1])
        return (*scales, self.block[1] // 2), scales

    def decoded(self, codes: Shape) -> Shape | None:
        """The inverse of `shapes`, given that of the codes; None where they can have no such shape."""
        if len(codes) != 4:
            return None
        experts, outside, groups, _ = codes
        return (experts, groups * self.block[1], outside)


MXFP4 = Packing(  # as gpt-oss has its experts: two numbers in a byte, 32 with a power of two
    "MXFP4",
    "mxfp4",
    "e2m1",
    (Part("_blocks", "_blocks", ("U8",)), Part("_scales", "_scales", ("U8",))),
    block=(1, 32),
    wanted="U8 [E, out, in / 32, 16] and U8 [E, out, in / 32]",
    globs=("*.experts.gate_up_proj", "*.experts.down_proj"),
    turned=True,
)
PACKINGS = (MXFP4,)
SUFFIXES = tuple(part.suffix for packing in PACKINGS for part in packing.parts)


def packing_of(keys: Keys, accepted: tuple[str, ...]) -> Packing | None:
    """What "quantization_config" says. `accepted`: methods of the family. Raises InputError on others."""
    found = keys.raw.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    for packing in PACKINGS:
        if method == packing.method and method in accepted:
            return packing
    named = isinstance(method, str) and method.isprintable() and len(method) < 60
    how = f"in {method}" if named else "in a way that it does not name"
    raise InputError(
        f'{keys.where}: "quantization_config" says that weights are quantized {how}, which is not supported. '
        "Take the release in BF16, or convert it."
    )

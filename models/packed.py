"""Packed matrices (models/families/packing.py): decoding, and what no sound file holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from trireme.kernels import ops
from trireme.models.families.packing import Packing, Part

LARGEST_SCALE = 252  # of MXFP4: times 6 it is finite


def decode(packing: Packing, parts: Sequence[Tensor], out: Tensor) -> None:
    """Fills out, a matrix or one for each expert, by its parts, of Packing.shapes."""
    if packing.code == "e2m1":
        blocks, scales = parts
        ops.mxfp4_decode(blocks, scales, out)


def damage(packing: Packing, part: Part, values: np.ndarray) -> str:
    """What is wrong with some of a part's values; "" for nothing."""
    if part is packing.parts[0] or values.max(initial=0) <= LARGEST_SCALE:
        return ""
    return "scales by more than 2^125"

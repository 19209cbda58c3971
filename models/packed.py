"""Packed matrices (models/families/packing.py): decoding, checks of their values.

Legend: E experts; M matrices of R x C numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.families.packing import Packing, Part

DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32}  # others are bytes
LARGEST_CODE = 448.0  # of E4M3
# Largest exponent of a scale, so that it times the largest number is finite, by code; of the scale of E4M3 scales.
LARGEST = {"e2m1": 125, "fp4": 125, "e4m3": 118, "nf4": 126, "int4": 123}
LARGEST_FACTOR = 116
Stored = tuple[np.ndarray, str, tuple[int, ...]]  # a part: bytes, dtype, shape


def decode(packing: Packing, parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Decodes one or several matrices into `out`, given their parts in the order of packing.parts; returns them.

    gpt-oss stores experts (out, in) and reads them (in, out): they are decoded in their own order, a view of `out`.
    """
    codes, scales = parts[:2]
    third = parts[2] if len(parts) > 2 else None
    flat = lambda t, like: t.view(-1, *like.shape[-2:])
    if packing.code == "e2m1":
        ops.fp4_decode(codes.flatten(2), scales, None, in_file_order(out).mT)
        return in_file_order(out)
    if packing.code == "nf4":
        n = prod(codes.shape[:-2])
        ops.nf4_decode(codes.view(n, -1), scales.view(n, -1), out.view(n, -1))
    elif packing.code == "fp4":
        matrices = out.view(-1, codes.shape[-2], 2 * codes.shape[-1])
        factor = None if third is None else third.view(-1)
        codes = codes.view(torch.uint8)
        ops.fp4_decode(flat(codes, codes), flat(scales.view(torch.uint8), scales), factor, matrices, packing.divides)
    elif packing.code == "int4":
        matrices = out.view(-1, codes.shape[-2], 8 * codes.shape[-1])
        zeros = None if third is None else flat(third, third)
        ops.int4_decode(flat(codes, codes), flat(scales, scales), zeros, matrices, packing.block[1])
    else:
        ops.e4m3_decode(flat(codes.view(torch.uint8), codes), flat(scales, scales), flat(out, codes), packing.block)
    return out


def in_file_order(out: Tensor) -> Tensor:
    """(E, in, out) over the memory of `out`, of that shape, in which each expert lies (out, in)."""
    return out.view(out.shape[0], out.shape[2], out.shape[1]).mT


def matrix_view(packing: Packing | None, name: str, views: Mapping[str, Tensor]) -> Tensor:
    """A matrix, or those of experts; if its parts are among `views` it was decoded, and is as `decode` returned it."""
    decoded = packing is not None and packing.code == "e2m1" and name + packing.parts[0].suffix in views
    return in_file_order(views[name]) if decoded else views[name]


def decoded(
    packing: Packing, parts: Sequence[Stored], shape: tuple[int, ...], dtype: str, device: torch.device | str
) -> Tensor:
    """A matrix of this shape, decoded on a device in dtype F32 or BF16."""
    tensors = [torch.from_numpy(raw).view(DTYPE.get(kind, torch.uint8)).view(dims) for raw, kind, dims in parts]
    return decode(packing, [t.to(device) for t in tensors], torch.empty(shape, dtype=DTYPE[dtype], device=device))


def damage(packing: Packing, part: Part, values: np.ndarray) -> str:
    """What is wrong with values of a part that no sound file has, bf16 as uint16; "" if nothing is."""
    index = packing.parts.index(part)
    e4m3 = (packing.code, index, len(packing.parts)) in (("e4m3", 0, 2), ("fp4", 1, 3))
    if e4m3 or index == 0:
        return "holds NaN" if e4m3 and ((values & 127) == 127).any() else ""
    if index == 2:
        return _damage_of_third(packing, values)
    limit = LARGEST[packing.code]
    if values.dtype == np.uint8:
        wrong = values.max(initial=0) > limit + 127
    elif values.dtype == np.uint16:
        wrong = (values & 0x7FFF).max(initial=0) > (limit + 127) << 7
    else:
        wrong = not (np.abs(values.astype(np.float32, copy=False)) <= 2.0**limit).all()  # NaN is not
    return f"scales by more than 2^{limit}" if wrong else ""


def _damage_of_third(packing: Packing, values: np.ndarray) -> str:
    """As `damage`, of zero points, which may be any, or of the scale of the scales."""
    if packing.code == "int4":
        return ""
    low, high = (2.0**-LARGEST_FACTOR, np.inf) if packing.divides else (0, 2.0**LARGEST_FACTOR)
    right = (np.isfinite(values) & (low <= np.abs(values)) & (np.abs(values) <= high)).all()
    return "" if right else f"scales by more than 2^{LARGEST_FACTOR}"

"""Encodes matrices in a packing (models/families/packing.py), with the rounding of the library that defines it.

NF4 as bitsandbytes; fp8 in blocks as transformers, by row and tensor as compressed-tensors; MXFP4 by section 6.3 of OCP
Microscaling Formats 1.0; NVFP4 and int4 as compressed-tensors.

Legend: M matrices of R x C numbers; S x T blocks of B x K numbers; G groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trireme.kernels.packed.reference import GROUP, NF4
from trireme.models.families.packing import WHOLE, Packing
from trireme.models.packed import DTYPE, LARGEST_CODE, LARGEST_FACTOR

MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes of E2M1
LARGEST_E2M1, LEVELS = 6.0, 15  # of int4: differences of its codes
SMALLEST = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7, "F8_E4M3": 2.0**-3}  # in place of a scale of 0, by dtype
BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}  # of dtypes that numpy has not


def needs_extent(packing: Packing) -> bool:
    """Whether a matrix has a scale that depends on its largest magnitude."""
    return len(packing.parts) == 3 and packing.code == "fp4" or packing.block[0] == WHOLE


def encode(packing: Packing, values: np.ndarray, extent: float = 0.0) -> tuple[np.ndarray, ...]:
    """The parts, flat, in the order of packing.parts, of fp32 values: a matrix (R, C), or several (M, R, C).

    They may be some rows of a matrix if these are whole blocks; `extent`, the largest magnitude of all of it, is read
    if `needs_extent`. gpt-oss's experts are (M, in, out), whole ones. bf16 is given as uint16, E4M3 as uint8.
    """
    x = torch.from_numpy(values)
    return arrays(encoded(packing, x.view(-1, *x.shape[-2:]), torch.tensor([extent])))


def encoded(packing: Packing, x: Tensor, extent: Tensor) -> tuple[Tensor, ...]:
    """The parts of x (M, R, C) fp32, as `encode`, of shapes that have their numbers in order. extent (M,) fp32."""
    return {"nf4": _nf4, "fp4": _fp4, "e2m1": _e2m1, "e4m3": _e4m3, "int4": _int4}[packing.code](packing, x, extent)


def divided(x: Tensor, divisor: float) -> Tensor:
    """x / divisor as on a CPU: on a GPU torch multiplies by the reciprocal of a number, which may be a bit off."""
    return x / x.new_full((), divisor)


def arrays(parts: Iterable[Tensor]) -> tuple[np.ndarray, ...]:
    """Parts, flat, as `encode` gives them."""
    flat = (part.contiguous().view(-1).cpu() for part in parts)
    return tuple(part.view(BITS.get(part.dtype, part.dtype)).numpy() for part in flat)


@cache
def _middles(device: torch.device) -> Tensor:
    return ((NF4[1:] + NF4[:-1]) / 2).to(device)


def _nf4(packing: Packing, x: Tensor, extent: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG001
    groups = pad(x.flatten(1), (0, -x[0].numel() % GROUP)).view(len(x), -1, GROUP)
    amax = groups.abs().amax(2, keepdim=True)
    codes = torch.bucketize(groups * (1 / amax).nan_to_num(), _middles(x.device))
    pairs = codes.flatten(1)[:, : x[0].numel()].to(torch.uint8).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], amax


def _e2m1(packing: Packing, x: Tensor, extent: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG001
    return _mxfp4(x.mT.contiguous(), packing.block[1])


def _fp4(packing: Packing, x: Tensor, extent: Tensor) -> tuple[Tensor, ...]:
    if len(packing.parts) == 2:
        return _mxfp4(x, packing.block[1])
    groups = x.unflatten(2, (-1, packing.block[1]))  # (M, R, G, group)
    factor = nvfp4_factor(extent).view(-1, 1, 1, 1)
    scales = divided(groups.abs().amax(3, keepdim=True), LARGEST_E2M1) * factor
    scales = scales.clamp(max=LARGEST_CODE).to(torch.float8_e4m3fn)
    fp32 = scales.float()
    scales = fp32.where(fp32 > 0, SMALLEST["F8_E4M3"]).to(scales.dtype)
    codes = _in_e2m1(groups / (scales.float() / factor))
    return codes, scales, factor if packing.divides else 1 / factor


def nvfp4_factor(extent: Tensor) -> Tensor:
    """What the scales of matrices with these largest magnitudes are multiplied by, (M,) fp32."""
    factor = (LARGEST_CODE * LARGEST_E2M1 / extent.double()).clamp(max=2.0**LARGEST_FACTOR)
    return factor.float().where(extent > 0, 1.0)


def _mxfp4(x: Tensor, group: int) -> tuple[Tensor, ...]:
    """The exponent of a group's scale is that of its largest magnitude less that of 6, the largest number."""
    groups = x.unflatten(2, (-1, group))
    amax = groups.abs().amax(3, keepdim=True)
    power = torch.where(amax > 0, torch.frexp(amax).exponent + (127 - 3), 0).clamp(0, 254)
    scales = torch.where(amax.isfinite(), power, 255).to(torch.uint8)  # 255: NaN
    return _in_e2m1(groups * ((254 - power).int() << 23).view(torch.float32)), scales  # by bits: exact on a GPU, too


def _in_e2m1(scaled: Tensor) -> Tensor:
    """Two codes in a byte, the even one in the low bits: nearest, ties to even, larger magnitudes to 6."""
    codes, numbers = torch.signbit(scaled).to(torch.uint8) * 8, scaled.abs()
    for i, middle in enumerate(MIDDLES):
        codes += numbers >= middle if i % 2 else numbers > middle
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def _e4m3(packing: Packing, x: Tensor, extent: Tensor) -> tuple[Tensor, ...]:
    R, C = x.shape[1:]
    B, K = min(packing.block[0], R), min(packing.block[1], C)
    blocks = pad(x, (0, -C % K, 0, -R % B)).unflatten(2, (-1, K)).unflatten(1, (-1, B))  # (M, S, B, T, K)
    amax = blocks.abs().amax((2, 4), keepdim=True)
    factor, inverse, stored = e4m3_scales(packing, amax, extent.view(-1, 1, 1, 1, 1))
    scaled = blocks * factor if inverse else blocks / factor
    codes = scaled.clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(3).flatten(1, 2)[:, :R, :C], stored


def e4m3_scales(packing: Packing, amax: Tensor, extent: Tensor) -> tuple[Tensor, bool, Tensor]:
    """(what the numbers of a block are divided by, or if True multiplied by, fp32; the scale that is stored), given the
    largest magnitude of each block and of each matrix.
    """
    dtype = packing.parts[1].dtypes[0]
    if packing.block[0] == WHOLE:
        amax = extent.where(extent > 0, amax)
    if dtype in ("U8", "F8_E8M0"):
        power = torch.ceil(torch.log2(divided(amax, LARGEST_CODE).where(amax > 0, 1.0))).clamp(min=-126)
        return torch.exp2(power), False, (power + 127).to(torch.uint8)
    if packing.parts[1].stored == "_scale_inv" and dtype == "F32":  # transformers multiplies by the inverse
        inverse = LARGEST_CODE / amax
        inverse = inverse.where(inverse.isfinite(), 1.0)  # also of numbers of which the inverse is none
        return inverse, True, 1 / inverse
    stored = divided(amax, LARGEST_CODE).where(amax > 0, 1.0).to(DTYPE[dtype])
    stored = stored.where(stored != 0, SMALLEST[dtype])
    return stored.float(), False, stored


def _int4(packing: Packing, x: Tensor, extent: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG001
    dtype, zeros = packing.parts[1].dtypes[0], len(packing.parts) == 3
    groups = x.unflatten(2, (-1, min(packing.block[1], x.shape[2])))  # (M, R, G, group)
    low, high = groups.amin(3, keepdim=True).clamp(max=0), groups.amax(3, keepdim=True).clamp(min=0)
    steps = divided(high - low, LEVELS) if zeros else divided(torch.maximum(-low, high), LEVELS / 2)
    scales = steps.to(DTYPE[dtype])
    scales = scales.where(scales != 0, SMALLEST[dtype])
    offset = -8 - low / steps.where(steps != 0, 1.0)
    zero = offset.clamp(-8, 7).round() if zeros else torch.zeros_like(low)
    codes = ((groups / scales.float() + zero).round().clamp(-8, 7) + 8).flatten(2)
    parts = _in_words(codes.unflatten(2, (-1, 8))), scales
    if not zeros:
        return parts
    rows = pad((zero[..., 0] + 8).mT, (0, -x.shape[1] % 8))  # (M, G, rows), eight in a word
    return (*parts, _in_words(rows.unflatten(2, (-1, 8))).mT)


def _in_words(numbers: Tensor) -> Tensor:
    """Eight numbers of the last dimension in an int32, the first in the lowest bits."""
    return (numbers.long() << 4 * torch.arange(8, device=numbers.device)).sum(-1).to(torch.int32)

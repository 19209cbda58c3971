"""AdamW with moments of 16 or 8 bits, in plain torch: the formats, and the update that host_adamw.py runs in C++.

16 bits: bf16. 8 bits: a code is the leading bits of an fp32 value (exponent and 3 bits of the fraction) less a floor
that 256 elements share: bits(value) = (floor + code) << 20, and code 0 is zero. m has a sign bit, and codes that reach
16 octaves below the block's largest value; those of v reach 32, so its square root 16: where v is too small, m is, too.
With evenly spaced steps a small v would be rounded to zero, and m divided by eps alone.

Values are rounded stochastically, because beta2 moves v by less than one step. The noise is a hash of seed, step and
element, so it does not depend on the placement. v > 0 never becomes zero. The update itself uses unrounded moments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.optimizer import reference
from trireme.kernels.reference import hash32

BLOCK = 256  # elements by floor
M_CODES, V_CODES = 127, 255  # largest codes: m has a sign
SIGNED = True, False  # m, v
_SHIFT = 20  # keeps 3 of fp32's 23 fraction bits


def noise_key(seed: int, step: int) -> int:
    """The key of a step: hash32(key + an element's index) is the noise of that element."""
    return hash32(hash32(seed) + step)


def _noise(like: Tensor, key: int, first: int) -> tuple[Tensor, Tensor]:
    """Integers in [0, 2^16), int32, for m and v."""
    index = torch.arange(first, first + len(like), dtype=torch.int64, device=like.device)
    drawn = hash32(index + key)
    return (drawn & 0xFFFF).int(), (drawn >> 16).int()


def round_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """fp32 to bf16, rounded stochastically by noise in [0, 2^16): the expected value is x."""
    return ((reference.bits_of(x) + noise) >> 16).to(torch.int16).view(torch.bfloat16)


def _spread(floor: Tensor, n: int) -> Tensor:
    return floor.int().repeat_interleave(BLOCK)[:n]


def decode8(code: Tensor, floor: Tensor, signed: bool) -> Tensor:
    """uint8 codes (n,), int16 floors (blocks,) -> fp32 (n,)."""
    step = code.int() & (M_CODES if signed else V_CODES)
    bits = torch.where(step > 0, (step + _spread(floor, len(code))) << _SHIFT, 0)
    sign = (code.int() >> 7) << 31 if signed else 0
    return (bits | sign).view(torch.float32)


def encode8(x: Tensor, noise: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes (n,) uint8, floors (blocks,) int16) of x (n,) fp32, rounded stochastically by noise in [0, 2^16).

    The inverse of decode8. Where not `signed`, x >= 0, and only zero becomes code 0.
    """
    n, codes = len(x), M_CODES if signed else V_CODES
    raw = reference.bits_of(x)
    bits = raw & 0x7FFFFFFF
    padded = torch.nn.functional.pad(bits, (0, -n % BLOCK)).view(-(-n // BLOCK), BLOCK)
    top = padded.amax(1) if n else padded.new_zeros(0)
    floor = ((top >> _SHIFT) + 1 - codes).clamp(min=0)  # + 1: the largest may round up
    code = (((bits + (noise << 4)) >> _SHIFT) - _spread(floor, n)).clamp(min=0)
    if signed:
        code |= (raw >> 31) & 0x80
    else:
        code = torch.where(bits > 0, code.clamp(min=1), 0)
    return code.to(torch.uint8), floor.to(torch.int16)


def adamw_(w_: Tensor, lo_: Tensor | None, *tensors: Tensor, step: int, seed: int = 0, first: int = 0, **hyper) -> None:
    """reference.adamw_ with moments of any format.

    tensors: m_ and v_, fp32 or bf16 (n,), or uint8 (n,), each before its int16 floors (blocks,), all zero at first;
    then the gradient and clip. A unit may be updated in parts: `first` is the index in the unit of the tensors' first
    element, a multiple of 256 where there are floors.
    """
    *stored, grad, clip = tensors
    halves = stored[: len(stored) // 2], stored[len(stored) // 2 :]
    m, v = (decode8(t[0], t[1], s) if len(t) == 2 else t[0].float() for t, s in zip(halves, SIGNED, strict=True))
    reference.adamw_(w_, lo_, m, v, grad, clip, step=step, **hyper)
    if stored[0].dtype == torch.float32:
        return
    noises = _noise(m, noise_key(seed, step), first)
    for half, x, noise, signed in zip(halves, (m, v), noises, SIGNED, strict=True):
        rounded = encode8(x, noise, signed) if len(half) == 2 else (round_bf16(x, noise),)
        for target, values in zip(half, rounded, strict=True):
            target.copy_(values)

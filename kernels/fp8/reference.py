"""fp8 in plain torch, with the names and signatures of the launchers: reference for tests, and CPU path.

A quantized tensor is codes, which are values in E4M3, and their scale. E4M3 is used for everything, gradients too: with
a scale of its own, a tensor of a micro-batch seldom needs the range of E5M2, and always the bit of the fraction that
E5M2 lacks. Scaling brings the largest finite value to (224, 448] by a power of two, so that it is exact and only the
code is rounded. Values that are not finite become NaN and do not count for the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels.reference import MAXIMA, Act, act_bwd_, raise_maximum_

E4M3 = torch.float8_e4m3fn
PAD = 16  # the inner dimension of a GEMM is a multiple of it
LEAST = 126  # the finest scale is 2^-126: its inverse is normal, too


class Quantized(NamedTuple):
    """A quantized tensor x (N, D), approximately codes times scale."""

    scale: Tensor  # (1,) fp32, a power of two
    rows: Tensor | None  # (N, D) E4M3
    columns: Tensor | None  # (D, N rounded up to a multiple of PAD) E4M3: transposed, padded with zeros


def new_maxima(like: Tensor) -> Tensor:
    """(MAXIMA,) int32 zeros, in which norm_fwd and act_fwd leave what `quantize` needs to know of their result."""
    return torch.zeros(MAXIMA, dtype=torch.int32, device=like.device)


def quantize(
    x: Tensor, rows: bool = True, columns: bool = False, out: Quantized | None = None, maxima: Tensor | None = None
) -> Quantized:
    """Quantizes x (N, D) to E4M3, rounded to nearest even: in rows, in columns (transposed), or both.

    With `out` its scale and its tensors of these orders are filled. `maxima`: those that were left by the op that
    computed x; without them they are computed here.
    """
    values = x.float()
    if maxima is None:
        raise_maximum_(maxima := new_maxima(x), x)
    power = power_of(maxima.amax().view(1).view(torch.float32))
    codes = codes_of(values, power)
    result = Quantized(power2(-power), codes if rows else None, _turned(codes) if columns else None)
    if out is None:
        return result
    for target, value in zip(out, result, strict=True):
        if target is not None and value is not None:
            target.view(torch.uint8).copy_(value.view(torch.uint8))
    return out


def _turned(codes: Tensor) -> Tensor:
    """Codes (N, D) as the columns of Quantized."""
    return torch.nn.functional.pad(codes.view(torch.uint8).T, (0, -len(codes) % PAD)).contiguous().view(E4M3)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes (N, D) E4M3, scales (N,) fp32) of x (N, D), each row scaled by its own largest value."""
    values = x.float()
    power = power_of(torch.where(values.isfinite(), values.abs(), 0.0).amax(1))
    return codes_of(values, power[:, None]), power2(-power)


def quantize_experts(w: Tensor) -> tuple[Tensor, Tensor]:
    """(codes (E, B, A) E4M3, scales (E,) fp32) of w (E, A, B), each matrix scaled by its own largest value."""
    values = w.float()
    power = power_of(torch.where(values.isfinite(), values.abs(), 0.0).amax((1, 2)))
    codes = codes_of(values, power[:, None, None])
    return codes.view(torch.uint8).mT.contiguous().view(E4M3), power2(-power)


def turn(rows: Tensor, out: Tensor) -> Tensor:
    """Fills out (D, N) with codes (N, D), transposed; both E4M3."""
    out.view(torch.uint8).copy_(rows.view(torch.uint8).T)
    return out


def power_of(amax: Tensor) -> Tensor:
    """Exponents, int32, of the powers of two that values are multiplied by, given their largest finite magnitudes."""
    bits = amax.view(torch.int32)
    power = 135 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).int()  # largest value: to (224, 448]
    return power.clamp(max=LEAST)


def codes_of(values: Tensor, power: Tensor) -> Tensor:
    """fp32 values times 2^power in E4M3."""
    return torch.where(values.isfinite(), values * power2(power), float("nan")).to(E4M3)


def power2(power: Tensor) -> Tensor:
    """2^power, fp32, exactly."""
    return ((power + 127) << 23).view(torch.float32)


def fp8_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Fills out (M, N) with a @ b.T * scale_a * scale_b + bias (N,), given a (M, K), b (N, K) E4M3; summed in fp32.

    All but bias are aligned to 16 bytes, as cuBLASLt requires.
    """
    assert all(t.data_ptr() % 16 == 0 for t in (a, scale_a, b, scale_b, out))
    product = torch.mm(a.float(), b.float().T).mul_(scale_a * scale_b)
    return out.copy_(product if bias is None else product.add_(bias.float()))


def fp8_add_(out_: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> None:
    """Adds the result of fp8_matmul, without bias, to out_ (M, N).

    The sum is rounded to the dtype of out_. An implementation may round the product to it before, as this one does.
    """
    out_.add_(fp8_matmul(a, scale_a, b, scale_b, torch.empty_like(out_)))


def act_codes_bwd(dy: Tensor, h: Tensor, act: Act, columns: bool = True) -> tuple[Quantized, Quantized]:
    """The results of act_bwd_, quantized: (gradient of h (N, 2F), forward's result (N, F)).

    With `columns` the first in both orders, the second in columns; otherwise the first in rows, the second not at all.
    """
    y, dh = dy.clone(), h.clone()
    act_bwd_(y, dh, act)
    return quantize(dh, True, columns), quantize(y, False, columns)

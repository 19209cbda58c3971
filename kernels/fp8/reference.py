"""fp8 in plain torch, with the names and signatures of the launchers: reference for tests, and CPU path.

E4M3 for everything, gradients too: with a scale of its own, a micro-batch's tensor seldom needs E5M2's range, and
always its missing bit. A scale is the power of two that brings the largest finite value to (224, 448], so that scaling
is exact and only the code is rounded. What is not finite becomes NaN, and no other value's scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels.reference import geglu_bwd, geglu_fwd, rmsnorm_fwd, rope_, swiglu_bwd, swiglu_fwd

E4M3 = torch.float8_e4m3fn
PAD = 16  # the inner dimension of a GEMM is a multiple of it
LEAST = 126  # the finest scale is 2^-126: its inverse is normal, too


class Quantized(NamedTuple):
    """x (N, D) is about codes times scale."""

    scale: Tensor  # (1,) fp32, a power of two
    rows: Tensor | None  # (N, D) E4M3
    columns: Tensor | None  # (D, N up to a multiple of PAD) E4M3: transposed, zeros behind


def quantize(x: Tensor, rows: bool = True, columns: bool = False, out: Quantized | None = None) -> Quantized:
    """x (N, D) in E4M3, rounded to nearest even, in either order or both; in `out` if given, of it these orders."""
    values = x.float()
    power = power_of(torch.where(values.isfinite(), values.abs(), 0.0).amax().view(1))
    codes = codes_of(values, power)
    turned = torch.nn.functional.pad(codes.view(torch.uint8).T, (0, -len(x) % PAD)).contiguous().view(E4M3)
    found = Quantized(power2(-power), codes if rows else None, turned if columns else None)
    if out is None:
        return found
    for there, value in zip(out, found, strict=True):
        if there is not None and value is not None:
            there.view(torch.uint8).copy_(value.view(torch.uint8))
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes (N, D) E4M3, scales (N,) fp32) of x (N, D), each row by its own largest value."""
    values = x.float()
    power = power_of(torch.where(values.isfinite(), values.abs(), 0.0).amax(1))
    return codes_of(values, power[:, None]), power2(-power)


def quantize_experts(w: Tensor) -> tuple[Tensor, Tensor]:
    """(codes (E, B, A) E4M3, scales (E,) fp32) of w (E, A, B), each matrix by its own largest value."""
    values = w.float()
    power = power_of(torch.where(values.isfinite(), values.abs(), 0.0).amax((1, 2)))
    codes = codes_of(values, power[:, None, None])
    return codes.view(torch.uint8).mT.contiguous().view(E4M3), power2(-power)


def turn(rows: Tensor, out: Tensor) -> Tensor:
    """Fills out (D, N) with codes (N, D) in the other order."""
    out.view(torch.uint8).copy_(rows.view(torch.uint8).T)
    return out


def power_of(most: Tensor) -> Tensor:
    """log2, int32, of what values are multiplied with, given the largest finite ones' magnitudes, fp32."""
    bits = most.view(torch.int32)
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
    found = torch.mm(a.float(), b.float().T).mul_(scale_a * scale_b)
    return out.copy_(found if bias is None else found.add_(bias.float()))


def fp8_add_(out_: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> None:
    """Adds a @ b.T * scale_a * scale_b to out_ (M, N), as fp8_matmul, rounded after the sum, or before it, too."""
    out_.add_(fp8_matmul(a, scale_a, b, scale_b, torch.empty_like(out_)))


def rmsnorm_codes(
    x: Tensor, weight: Tensor, eps: float, rows: bool = True, columns: bool = False
) -> tuple[Quantized, Tensor]:
    """(y of rmsnorm_fwd(x, weight, eps), quantized in either order or both; rstd (N,) fp32)."""
    y, rstd = rmsnorm_fwd(x, weight, eps)
    return quantize(y, rows, columns), rstd


def rotated_codes(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, turned: int, columns: bool = True
) -> Quantized:
    """x (N, D), quantized in rows or both orders, its first `turned` heads rotated back by halves.

    Heads are as wide as cos and sin (P, half) fp32 together; positions (N,).
    """
    heads = x.clone().view(len(x), -1, 2 * cos.shape[1])
    rope_(heads[:, :turned], cos, sin, positions, inverse=True)
    return quantize(heads.view(x.shape), True, columns)


def swiglu_codes_fwd(gate_up: Tensor) -> Quantized:
    """Rows of swiglu_fwd(gate_up), quantized; gate_up (N, 2F)."""
    return quantize(swiglu_fwd(gate_up))


def swiglu_codes_bwd(dy: Tensor, gate_up: Tensor, columns: bool = True) -> tuple[Quantized, Quantized]:
    """swiglu_bwd, quantized: d_gate_up (N, 2F) in both orders, the activation's columns; or the first's rows alone."""
    return _codes_bwd(*swiglu_bwd(dy, gate_up), columns)


def geglu_codes_fwd(gate_up: Tensor) -> Quantized:
    """As swiglu_codes_fwd, of geglu_fwd."""
    return quantize(geglu_fwd(gate_up))


def geglu_codes_bwd(dy: Tensor, gate_up: Tensor, columns: bool = True) -> tuple[Quantized, Quantized]:
    """As swiglu_codes_bwd, of geglu_bwd."""
    return _codes_bwd(*geglu_bwd(dy, gate_up), columns)


def _codes_bwd(d_gate_up: Tensor, act: Tensor, columns: bool) -> tuple[Quantized, Quantized]:
    return quantize(d_gate_up, True, columns), quantize(act, False, columns)

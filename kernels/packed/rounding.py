"""fp32 matrices rounded to a packing and decoded again, in one launch: bitwise what encoding and decoding give.

Nothing packed is written. Formats, scales and legends: nf4.py, fp4.py, int4.py, e4m3.py, and models/encoding.py, whose
formulas these are.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.packed.e4m3 import tile, tiling
from trireme.kernels.packed.reference import GROUP, NF4

BLOCK = 2048  # numbers of a program; not measured
INTEGER = tl.constexpr(12582912.0)  # added and subtracted it rounds fp32 below 2^22 to integers, ties to even


@triton.jit
def _e4m3(b_x):
    """The nearest E4M3 number, ties to even, of fp32 within +-448."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_m = b_bits & 0x7FFFFFFF
    b_large = ((b_m + 0x7FFFF + ((b_m >> 20) & 1)) >> 20 << 20).to(tl.float32, bitcast=True)
    b_small = ((b_m.to(tl.float32, bitcast=True) * 512.0 + INTEGER) - INTEGER) * 0.001953125  # below 2^-6
    b_y = tl.where(b_m < 121 << 23, b_small, b_large)
    return (b_y.to(tl.int32, bitcast=True) | (b_bits >> 31 << 31)).to(tl.float32, bitcast=True)  # -0 too


@triton.jit
def _groups(p_x, L: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """(matrix, numbers of some groups (BLOCK / GROUP, GROUP), their offsets, mask)."""
    n_blocks: tl.constexpr = (L + BLOCK - 1) // BLOCK
    i_m, i_b = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    o_g, o_k = tl.arange(0, BLOCK // GROUP), tl.arange(0, GROUP)
    o = i_b * BLOCK + o_g[:, None] * GROUP + o_k[None, :]
    return i_m, tl.load(p_x + i_m * L + o, o < L, 0.0), i_m * L + o, o < L


@launcher
@triton.jit
def _fp4_round(p_x, p_all, p_out, L: tl.constexpr, GROUP: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    i_m, b_x, o, mask = _groups(p_x, L, GROUP, BLOCK)
    b_most = tl.max(tl.abs(b_x), 1)[:, None]
    if p_all is not None:
        b_all = tl.load(p_all + i_m)
        b_scale = _e4m3(tl.minimum(tl.div_rn(b_most, 6.0) * b_all, 448.0))
        b_scale = tl.where(b_scale > 0, b_scale, 0.125)
        b_own = tl.div_rn(b_scale, b_all)
        b_y = tl.div_rn(b_x, b_own)
        b_scale = b_own if DIVIDE else b_scale * tl.div_rn(1.0, b_all)
    else:
        b_power = tl.maximum((b_most.to(tl.int32, bitcast=True) >> 23) - 2, 0)
        b_y = b_x * ((254 - b_power) << 23).to(tl.float32, bitcast=True)
        b_scale = tl.where(b_power == 0, 1 << 22, b_power << 23).to(tl.float32, bitcast=True)
    b_m = tl.abs(b_y)
    b_n = tl.where(b_m > 0.25, 0.5, 0.0) + tl.where(b_m >= 0.75, 0.5, 0.0) + tl.where(b_m > 1.25, 0.5, 0.0)
    b_n += tl.where(b_m >= 1.75, 0.5, 0.0) + tl.where(b_m > 2.5, 1.0, 0.0) + tl.where(b_m >= 3.5, 1.0, 0.0)
    b_n += tl.where(b_m > 5.0, 2.0, 0.0)
    b_bits = b_n.to(tl.int32, bitcast=True) | (b_x.to(tl.int32, bitcast=True) >> 31 << 31)
    tl.store(p_out + o, (b_bits.to(tl.float32, bitcast=True) * b_scale).to(p_out.dtype.element_ty), mask)


def fp4_round(x: Tensor, of_all: Tensor | None, out: Tensor, group: int, divide: bool = False) -> None:
    """Rounds x (M, R, C) fp32 to E2M1 with a scale for each group of columns: powers of two, or with `of_all` (M,) fp32
    E4M3, multiplied by it before they are rounded; a decoder divides by it, or multiplies by its reciprocal.
    """
    M, L = _check(x, out, group)
    _fp4_round[(M * cdiv(L, BLOCK),)](x, of_all, out, L, group, divide, BLOCK, num_warps=4)


@launcher
@triton.jit
def _nf4_round(p_x, p_table, p_out, L: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    _, b_x, o, mask = _groups(p_x, L, GROUP, BLOCK)
    b_most = tl.max(tl.abs(b_x), 1)[:, None]
    b_y = b_x * tl.where(b_most > 0, tl.minimum(tl.div_rn(1.0, b_most), 3.4028234663852886e38), 0.0)
    b_code = tl.zeros_like(b_y).to(tl.int32)
    for i in tl.static_range(15):
        b_code += (b_y > tl.load(p_table + 16 + i)).to(tl.int32)
    tl.store(p_out + o, (tl.load(p_table + b_code) * b_most).to(p_out.dtype.element_ty), mask)


@cache
def _table(device: torch.device) -> Tensor:
    """The numbers, and the middles between them."""
    return torch.cat([NF4, (NF4[1:] + NF4[:-1]) / 2]).to(device)


def nf4_round(x: Tensor, out: Tensor) -> None:
    """Rounds x (M, R, C) fp32 to NF4."""
    M, L = _check(x, out, GROUP)
    _nf4_round[(M * cdiv(L, BLOCK),)](x, _table(x.device), out, L, GROUP, BLOCK, num_warps=4)


@launcher
@triton.jit
def _int4_round(
    p_x, p_like, p_out, L: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous()
    _, b_x, o, mask = _groups(p_x, L, GROUP, BLOCK)
    b_low, b_high = tl.minimum(tl.min(b_x, 1), 0.0)[:, None], tl.maximum(tl.max(b_x, 1), 0.0)[:, None]
    b_wide = tl.div_rn(b_high - b_low, 15.0) if ZEROS else tl.div_rn(tl.maximum(-b_low, b_high), 7.5)
    b_scale = b_wide.to(p_like.dtype.element_ty).to(tl.float32)
    b_scale = tl.where(b_scale != 0, b_scale, LEAST)
    b_zero = tl.zeros_like(b_low)
    if ZEROS:
        b_least = -8.0 - tl.div_rn(b_low, tl.where(b_wide != 0, b_wide, 1.0))
        b_zero = (tl.minimum(tl.maximum(b_least, -8.0), 7.0) + INTEGER) - INTEGER
    b_code = tl.minimum(tl.maximum(tl.div_rn(b_x, b_scale) + b_zero, -8.0), 7.0)
    b_code = (b_code + INTEGER) - INTEGER
    tl.store(p_out + o, ((b_code - b_zero) * b_scale).to(p_out.dtype.element_ty), mask)


def int4_round(x: Tensor, like: Tensor, out: Tensor, group: int, zeros: bool, least: float) -> None:
    """Rounds x (M, R, C) fp32 to integers of 4 bits with a scale for each group of columns in the dtype of `like`, and
    zero points if `zeros`. least: the scale of a group of zeros.
    """
    M, L = _check(x, out, group)
    _int4_round[(M * cdiv(L, BLOCK),)](x, like, out, L, group, zeros, least, BLOCK, num_warps=4)


@launcher
@triton.jit
def _e4m3_round(
    p_x, p_by, p_scales, p_out, R: tl.constexpr, C: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MULTIPLY: tl.constexpr,
):  # fmt: skip
    await_previous()
    o, mask, o_s, m_r = tile(R, C, B, K, ROWS, COLUMNS)
    b_by = tl.load(p_by + o_s, m_r, 1.0)[:, None]
    b_scale = tl.load(p_scales + o_s, m_r, 1.0)[:, None]
    b_x = tl.load(p_x + o, mask, 0.0)
    b_x = b_x * b_by if MULTIPLY else tl.div_rn(b_x, b_by)
    b_x = _e4m3(tl.minimum(tl.maximum(b_x, -448.0), 448.0)) * b_scale
    tl.store(p_out + o, b_x.to(p_out.dtype.element_ty), mask)


def e4m3_round(
    x: Tensor, by: Tensor, scales: Tensor, out: Tensor, block: tuple[int, int], multiply: bool = False
) -> None:
    """Rounds fp32 x (M, R, C), divided or multiplied by its block's `by` (M, S, T), to E4M3; times scales (M, S, T)."""
    assert by.shape == scales.shape
    assert out.shape == x.shape
    assert all(t.is_contiguous() for t in (x, by, scales, out))
    grid, sizes = tiling(out, scales, block)
    _e4m3_round[grid](x, by, scales, out, *sizes, multiply, num_warps=4)


def _check(x: Tensor, out: Tensor, group: int) -> tuple[int, int]:
    """(matrices, numbers of each), of groups that lie one after another."""
    assert x.shape == out.shape
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert group <= BLOCK
    assert group & (group - 1) == 0
    return len(x), x[0].numel()

"""Matrices, plus their adapters, rounded to a packing and decoded again, in one launch: bitwise what encoding and
decoding give.

Nothing packed is written. Formats, scales and legends: nf4.py, fp4.py, int4.py, e4m3.py, and models/encoding.py, whose
formulas these are.
"""

from __future__ import annotations

from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.packed.e4m3 import tile, tiling
from trireme.kernels.packed.nf4 import table
from trireme.kernels.packed.reference import GROUP, Adapters

ROWS, COLUMNS = 16, 128  # of a program over groups; not measured
LARGEST_GROUP = 256
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
def _product(
    p_left, p_right, i_m, i_r, i_c, R: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr, N: tl.constexpr,
    HEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of left^T right, fp32."""
    o_r, o_c = i_r * ROWS + tl.arange(0, ROWS), i_c * COLUMNS + tl.arange(0, COLUMNS)
    p_left += i_m // N * (RANK * N * HEIGHT) + i_m % N * HEIGHT
    p_right += i_m // N * (RANK * C)
    b_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i_k in range(0, RANK, 16):
        o_k = i_k + tl.arange(0, 16)
        b_left = tl.load(p_left + o_k[None, :] * (N * HEIGHT) + o_r[:, None], (o_r < R)[:, None] & (o_k < RANK), 0.0)
        b_right = tl.load(p_right + o_k[:, None] * C + o_c, (o_k < RANK)[:, None] & (o_c < C), 0.0)
        b_sum = tl.dot(b_left, b_right, b_sum, input_precision="ieee")
    return b_sum


@triton.jit
def _groups(
    p_x, p_left, p_right, SCALE, R: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr, N: tl.constexpr,
    HEIGHT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(matrix, sums of a tile by groups (ROWS * COLUMNS / GROUP, GROUP) fp32, their offsets, mask)."""
    n_columns: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    n_rows: tl.constexpr = (R + ROWS - 1) // ROWS
    n_groups: tl.constexpr = COLUMNS // GROUP  # of a row
    i_m = (tl.program_id(0) // (n_columns * n_rows)).to(tl.int64)
    i_r, i_c = tl.program_id(0) // n_columns % n_rows, tl.program_id(0) % n_columns
    o_g, o_k = tl.arange(0, ROWS * n_groups)[:, None], tl.arange(0, GROUP)[None, :]
    o_r, o_c = i_r * ROWS + o_g // n_groups, i_c * COLUMNS + o_g % n_groups * GROUP + o_k
    o, mask = (i_m * R + o_r) * C + o_c, (o_r < R) & (o_c < C)
    b_x = tl.load(p_x + o, mask, 0.0).to(tl.float32)
    if p_left is not None:
        b_sum = _product(p_left, p_right, i_m, i_r, i_c, R, C, RANK, N, HEIGHT, ROWS, COLUMNS)
        b_x += SCALE * tl.reshape(b_sum, (ROWS * n_groups, GROUP))
    return i_m, b_x, o, mask


@launcher
@triton.jit
def _fp4_round(
    p_x, p_left, p_right, SCALE, p_all, p_out, R: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr, N: tl.constexpr,
    HEIGHT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_m, b_x, o, mask = _groups(p_x, p_left, p_right, SCALE, R, C, RANK, N, HEIGHT, GROUP, ROWS, COLUMNS)
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


def fp4_round(
    x: Tensor, adapters: Adapters | None, of_all: Tensor | None, out: Tensor, group: int, divide: bool = False
) -> None:
    """Rounds x (M, R, C), which may be `out`, plus adapters to E2M1 with a scale for each group of columns: powers of
    two, or with `of_all` (M,) fp32 E4M3, multiplied by it before they are rounded; a decoder divides by it, or
    multiplies by its reciprocal.
    """
    grid, sums, sizes = _arguments(x, adapters, out, group)
    _fp4_round[grid](x, *sums, of_all, out, *sizes, divide, num_warps=4)


@launcher
@triton.jit
def _nf4_round(
    p_x, p_left, p_right, SCALE, p_table, p_out, R: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr, N: tl.constexpr,
    HEIGHT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    await_previous()
    _, b_x, o, mask = _groups(p_x, p_left, p_right, SCALE, R, C, RANK, N, HEIGHT, GROUP, ROWS, COLUMNS)
    b_most = tl.max(tl.abs(b_x), 1)[:, None]
    b_y = b_x * tl.where(b_most > 0, tl.minimum(tl.div_rn(1.0, b_most), 3.4028234663852886e38), 0.0)
    b_code = tl.zeros_like(b_y).to(tl.int32)
    for i in tl.static_range(15):
        b_code += (b_y > tl.load(p_table + 16 + i)).to(tl.int32)
    tl.store(p_out + o, (tl.load(p_table + b_code) * b_most).to(p_out.dtype.element_ty), mask)


def nf4_round(x: Tensor, adapters: Adapters | None, out: Tensor) -> None:
    """Rounds x (M, R, C) fp32 plus adapters to NF4."""
    grid, sums, sizes = _arguments(x, adapters, out, GROUP)
    _nf4_round[grid](x, *sums, table(x.device), out, *sizes, num_warps=4)


@launcher
@triton.jit
def _int4_round(
    p_x, p_left, p_right, SCALE, p_like, p_out, R: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr, N: tl.constexpr,
    HEIGHT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ZEROS: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    await_previous()
    _, b_x, o, mask = _groups(p_x, p_left, p_right, SCALE, R, C, RANK, N, HEIGHT, GROUP, ROWS, COLUMNS)
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


def int4_round(
    x: Tensor, adapters: Adapters | None, like: Tensor, out: Tensor, group: int, zeros: bool, zero_scale: float
) -> None:
    """Rounds x (M, R, C) fp32 plus adapters to integers of 4 bits with a scale for each group of columns in the dtype
    of `like`, and zero points if `zeros`. zero_scale: that of a group of zeros.
    """
    grid, sums, sizes = _arguments(x, adapters, out, group)
    _int4_round[grid](x, *sums, like, out, *sizes, zeros, zero_scale, num_warps=4)


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
    x: Tensor, factors: Tensor, scales: Tensor, out: Tensor, block: tuple[int, int], multiply: bool = False
) -> None:
    """Rounds fp32 x (M, R, C), divided or multiplied by factors (M, S, T) of blocks to E4M3, times scales (M, S, T)."""
    assert factors.shape == scales.shape
    assert out.shape == x.shape
    assert all(t.is_contiguous() for t in (x, factors, scales, out))
    grid, sizes = tiling(out, scales, block)
    _e4m3_round[grid](x, factors, scales, out, *sizes, multiply, num_warps=4)


def _arguments(
    x: Tensor, adapters: Adapters | None, out: Tensor, group: int
) -> tuple[tuple[int, ...], tuple, tuple[int, ...]]:
    """(grid, adapters and their scale, sizes and tile) of a launch over groups of columns."""
    M, R, C = x.shape
    assert x.shape == out.shape
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert C % group == 0
    assert group <= LARGEST_GROUP
    assert group & (group - 1) == 0
    columns = max(COLUMNS, group)
    grid = (M * cdiv(R, ROWS) * cdiv(C, columns),)
    if adapters is None:
        return grid, (None, None, 0.0), (R, C, 0, 1, R, group, ROWS, columns)
    left, right, scale, matrices, height = adapters
    rank = right.shape[1]
    assert right.is_contiguous()
    assert left.stride(2) == 1
    assert left.dtype == right.dtype
    sizes = (R, C, rank, matrices, height, group, ROWS, columns)
    return grid, (left, right, float(scale)), sizes

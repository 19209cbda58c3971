"""E4M3 with a scale for each block of a matrix, decoded into the compute dtype: fp32 products, rounded once.

A number is a sign, 4 bits of exponent with a bias of 7 and 3 of mantissa. It is decoded by integer operations, as chips
before Ada have no conversion. A scale is fp32, fp16, bf16, or a byte: the exponent of a power of two, its bias 127.
Legend: M matrices of R x C numbers, in blocks of B x K, of which the last ones may be short: S x T scales each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher

ROWS, COLUMNS = 32, 128  # of a program; not measured


@triton.jit
def number(b_byte):
    """The fp32 value of an E4M3 code that is held in int32."""
    b_m = b_byte & 127
    b_large = ((b_m << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    b_x = tl.where(b_m < 8, b_m.to(tl.float32) * 0.001953125, b_large)  # below 2^-6 in steps of 2^-9
    b_x = tl.where(b_m == 127, float("nan"), b_x)
    return (b_x.to(tl.int32, bitcast=True) | ((b_byte & 128) << 24)).to(tl.float32, bitcast=True)  # -0 too


@triton.jit
def tile(R: tl.constexpr, C: tl.constexpr, B: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's (offsets of numbers, their mask, offsets of its rows' scales, mask of rows); COLUMNS divides K."""
    n_columns: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    n_rows: tl.constexpr = (R + ROWS - 1) // ROWS
    S: tl.constexpr = (R + B - 1) // B
    T: tl.constexpr = (C + K - 1) // K
    i_m = (tl.program_id(0) // (n_columns * n_rows)).to(tl.int64)
    i_r, i_c = tl.program_id(0) // n_columns % n_rows, tl.program_id(0) % n_columns
    o_r, o_c = i_r * ROWS + tl.arange(0, ROWS), i_c * COLUMNS + tl.arange(0, COLUMNS)
    mask = (o_r < R)[:, None] & (o_c < C)[None, :]
    return (i_m * R + o_r)[:, None] * C + o_c[None, :], mask, (i_m * S + o_r // B) * T + i_c * COLUMNS // K, o_r < R


def tiling(out: Tensor, scales: Tensor, block: tuple[int, int]) -> tuple[tuple[int], tuple[int, ...]]:
    """(grid, constants of `tile`) for a matrix in each of out (M, R, C), with scales (M, S, T) of blocks."""
    M, R, C = out.shape
    assert scales.shape == (M, cdiv(R, block[0]), cdiv(C, block[1]))
    columns = min(COLUMNS, block[1] & -block[1])  # the largest power of two that divides it
    return (M * cdiv(R, ROWS) * cdiv(C, columns),), (R, C, *block, ROWS, columns)


@launcher
@triton.jit
def _e4m3_decode(
    p_codes, p_scales, p_out, R: tl.constexpr, C: tl.constexpr, B: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    await_previous()
    o, mask, o_s, m_r = tile(R, C, B, K, ROWS, COLUMNS)
    if BYTES:
        b_power = tl.load(p_scales + o_s, m_r, 0).to(tl.int32)
        b_scale = tl.where(b_power == 0, 1 << 22, b_power << 23).to(tl.float32, bitcast=True)  # 2^-127 has no exponent
    else:
        b_scale = tl.load(p_scales + o_s, m_r, 0.0).to(tl.float32)
    b_x = number(tl.load(p_codes + o, mask, 0).to(tl.int32)) * b_scale[:, None]
    tl.store(p_out + o, b_x.to(p_out.dtype.element_ty), mask)


def e4m3_decode(codes: Tensor, scales: Tensor, out: Tensor, block: tuple[int, int]) -> None:
    """As reference.e4m3_decode, all contiguous."""
    assert out.shape == codes.shape
    assert codes.dtype == torch.uint8
    assert all(t.is_contiguous() for t in (codes, scales, out))
    grid, sizes = tiling(out, scales, block)
    _e4m3_decode[grid](codes, scales, out, *sizes, scales.dtype == torch.uint8, num_warps=4)

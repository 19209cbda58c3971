"""GELU (Hendrycks & Gimpel 2016), by tanh as in GPT-2 or exact, after a bias; relu squared; the gradient of a bias.

    gelu(x) = x * s,  s = sigmoid(2 k (x + c x^3))       (1 + tanh(u)) / 2 = sigmoid(2 u)
    gelu'(x) = s + x * s * (1 - s) * 2 k (1 + 3 c x^2)
    exact: s = (1 + erf(x / sqrt(2))) / 2,  gelu'(x) = s + x * exp(-x^2 / 2) / sqrt(2 pi)
    relu2(x) = max(x, 0)^2,  relu2'(x) = 2 max(x, 0)

Legend: N tokens, F hidden width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.column_sum import add_rows
from trireme.kernels.launch import cdiv, column_splits
from trireme.kernels.launcher import await_previous, launcher

FWD_ROWS, FWD_COLUMNS = 4, 512  # tile of the forward: rows share the bias
BLOCK = 2048  # values by program of relu squared
ROWS, BIAS_ROWS, COLUMNS = 8, 32, 128  # tiles of backward, of the bias gradient alone


@triton.jit
def gelu_tanh(x):
    """(gelu(x), gelu'(x)), fp32."""
    s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
    return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
def gelu_erf(x):
    """(gelu(x), gelu'(x)) of the exact GELU, fp32."""
    s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    return x * s, s + x * tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)


@triton.jit
def _gelu(x, EXACT: tl.constexpr):
    return gelu_erf(x) if EXACT else gelu_tanh(x)


@launcher
@triton.jit(do_not_specialize=["N"])
def _gelu_bias_fwd(
    p_h, p_bias, p_y, N, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr
):
    await_previous()
    BLOCKS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    i_row = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_f = (tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)  # neighbours adjacent in memory
    mask = (i_row < N)[:, None] & (o_f < F)[None, :]
    o = i_row[:, None] * F + o_f[None, :]
    b_bias = tl.load(p_bias + o_f, o_f < F, 0.0).to(tl.float32)[None, :]
    b_x = tl.load(p_h + o, mask, 0.0).to(tl.float32) + b_bias
    tl.store(p_y + o, _gelu(b_x, EXACT)[0].to(p_y.dtype.element_ty), mask)


@launcher
@triton.jit(do_not_specialize=["N"])
def _gelu_bias_bwd(
    p_dy,
    p_h,
    p_bias,
    p_dh,
    p_y,
    p_parts,
    N,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    await_previous()
    o_f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i_part = tl.program_id(1)
    b_bias = tl.load(p_bias + o_f, o_f < F, 0.0).to(tl.float32)[None, :]
    b_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i_tile in range(i_part, tl.cdiv(N, ROWS), tl.num_programs(1)):
        i_row = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (i_row < N)[:, None] & (o_f < F)[None, :]
        o = i_row[:, None] * F + o_f[None, :]
        b_value, b_slope = _gelu(tl.load(p_h + o, mask, 0.0).to(tl.float32) + b_bias, EXACT)
        b_dh = tl.load(p_dy + o, mask, 0.0).to(tl.float32) * b_slope
        b_sum += b_dh
        tl.store(p_dh + o, b_dh.to(p_dh.dtype.element_ty), mask)
        tl.store(p_y + o, b_value.to(p_y.dtype.element_ty), mask)
    tl.store(p_parts + i_part * F + o_f, tl.sum(b_sum, 0), o_f < F)


@launcher
@triton.jit(do_not_specialize=["N"])
def _bias_bwd(p_dy, p_parts, N, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    await_previous()
    o_f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i_part = tl.program_id(1)
    b_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i_tile in range(i_part, tl.cdiv(N, ROWS), tl.num_programs(1)):
        i_row = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (i_row < N)[:, None] & (o_f < F)[None, :]
        b_sum += tl.load(p_dy + i_row[:, None] * F + o_f[None, :], mask, 0.0).to(tl.float32)
    tl.store(p_parts + i_part * F + o_f, tl.sum(b_sum, 0), o_f < F)


@triton.jit
def relu2(x):
    """(relu(x) squared, its derivative), fp32; NaN stays."""
    r = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return r * r, 2.0 * r


@launcher
@triton.jit
def _relu2_fwd(p_h, p_y, F: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    o_f = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)  # neighbours adjacent in memory
    o = (tl.program_id(0) // BLOCKS).to(tl.int64) * F + o_f
    b_x = tl.load(p_h + o, o_f < F, 0.0).to(tl.float32)
    tl.store(p_y + o, relu2(b_x)[0].to(p_y.dtype.element_ty), o_f < F)


@launcher
@triton.jit
def _relu2_bwd(p_dy, p_h, p_dh, p_y, F: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    o_f = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    o = (tl.program_id(0) // BLOCKS).to(tl.int64) * F + o_f
    b_value, b_slope = relu2(tl.load(p_h + o, o_f < F, 0.0).to(tl.float32))
    b_dy = tl.load(p_dy + o, o_f < F, 0.0).to(tl.float32)
    tl.store(p_dh + o, (b_dy * b_slope).to(p_dh.dtype.element_ty), o_f < F)
    tl.store(p_y + o, b_value.to(p_y.dtype.element_ty), o_f < F)


def gelu_bias_fwd(h: Tensor, bias: Tensor, exact: bool = False) -> Tensor:
    """As reference.gelu_bias_fwd, contiguous."""
    N, F = h.shape
    assert h.is_contiguous()
    assert bias.shape == (F,)
    y = torch.empty_like(h)
    grid = (cdiv(N, FWD_ROWS) * cdiv(F, FWD_COLUMNS),)
    _gelu_bias_fwd[grid](h, bias, y, N, F, FWD_ROWS, FWD_COLUMNS, exact, num_warps=4)
    return y


def gelu_bias_bwd(dy: Tensor, h: Tensor, bias: Tensor, dbias_: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    """As reference.gelu_bias_bwd, contiguous."""
    N, F = h.shape
    assert dy.shape == h.shape
    assert dy.is_contiguous()
    assert h.is_contiguous()
    assert bias.shape == dbias_.shape == (F,)
    dh, y = torch.empty_like(h), torch.empty_like(h)
    grid = _column_grid(h, ROWS)
    parts = torch.empty((grid[1], F), dtype=torch.float32, device=h.device)
    _gelu_bias_bwd[grid](dy, h, bias, dh, y, parts, N, F, ROWS, COLUMNS, exact, num_warps=4)
    add_rows(dbias_, parts)
    return dh, y


def relu2_fwd(h: Tensor) -> Tensor:
    """As reference.relu2_fwd, contiguous."""
    N, F = h.shape
    assert h.is_contiguous()
    y = torch.empty_like(h)
    _relu2_fwd[(N * cdiv(F, BLOCK),)](h, y, F, BLOCK, num_warps=4)
    return y


def relu2_bwd(dy: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.relu2_bwd, contiguous."""
    N, F = h.shape
    assert dy.shape == h.shape
    assert dy.is_contiguous()
    assert h.is_contiguous()
    dh, y = torch.empty_like(h), torch.empty_like(h)
    _relu2_bwd[(N * cdiv(F, BLOCK),)](dy, h, dh, y, F, BLOCK, num_warps=4)
    return dh, y


def bias_bwd_(dbias_: Tensor, dy: Tensor) -> None:
    """As reference.bias_bwd_, contiguous."""
    N, F = dy.shape
    assert dy.is_contiguous()
    assert dbias_.shape == (F,)
    grid = _column_grid(dy, BIAS_ROWS)
    parts = torch.empty((grid[1], F), dtype=torch.float32, device=dy.device)
    _bias_bwd[grid](dy, parts, N, F, BIAS_ROWS, COLUMNS, num_warps=8)
    add_rows(dbias_, parts)


def _column_grid(h: Tensor, rows: int) -> tuple[int, int]:
    """(column blocks, programs by block)."""
    N, F = h.shape
    blocks = cdiv(F, COLUMNS)
    return blocks, column_splits(h.device, blocks, cdiv(N, rows))

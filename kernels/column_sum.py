"""Sums over partial rows: the last part of the weight and bias gradients of norms and elementwise kernels.

Each program of such a kernel leaves one row of partial sums in fp32. They are added here in a fixed order, so that
results repeat bitwise. Legend: P partial rows, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv, column_splits
from trireme.kernels.launcher import await_previous, launcher

BLOCK_P, BLOCK_D = 64, 16


@launcher
@triton.jit(do_not_specialize=["P"])
def _add_rows(p_out, p_parts, p_out2, p_parts2, P, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    await_previous()
    if tl.program_id(1) == 1:
        p_out, p_parts = p_out2, p_parts2
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_p = tl.arange(0, BLOCK_P)
    m_d = o_d < D
    b_sum = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for i_p in range(0, P, BLOCK_P):
        mask = (i_p + o_p < P)[:, None] & m_d[None, :]
        b_sum += tl.load(p_parts + (i_p + o_p)[:, None] * D + o_d[None, :], mask, 0.0)
    b_out = tl.load(p_out + o_d, m_d).to(tl.float32) + tl.sum(b_sum, 0)
    tl.store(p_out + o_d, b_out.to(p_out.dtype.element_ty), m_d)


def add_rows(out_: Tensor, parts: Tensor, out2_: Tensor | None = None, parts2: Tensor | None = None) -> None:
    """Adds the sum of parts (P, D) fp32 over its rows to out_ (D,), rounded once.

    A second pair of the same shapes, out2_ of the dtype of out_, is summed by the same launch.
    """
    P, D = parts.shape
    assert all(t.is_contiguous() for t in (out_, parts))
    assert parts.dtype == torch.float32
    pairs = 1 if out2_ is None else 2
    if out2_ is None or parts2 is None:
        out2_, parts2 = out_, parts
    assert out_.shape == out2_.shape == (D,)
    assert out2_.dtype == out_.dtype
    assert parts2.shape == parts.shape
    _add_rows[(cdiv(D, BLOCK_D), pairs)](out_, parts, out2_, parts2, P, D, BLOCK_P, BLOCK_D, num_warps=8)


ROWS, COLUMNS = 32, 128  # tile of a bias's gradient


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


def bias_bwd_(dbias_: Tensor, dy: Tensor) -> None:
    """As reference.bias_bwd_, contiguous."""
    N, F = dy.shape
    assert dy.is_contiguous()
    assert dbias_.shape == (F,)
    blocks = cdiv(F, COLUMNS)
    grid = blocks, column_splits(dy.device, blocks, cdiv(N, ROWS))
    parts = torch.empty((grid[1], F), dtype=torch.float32, device=dy.device)
    _bias_bwd[grid](dy, parts, N, F, ROWS, COLUMNS, num_warps=8)
    add_rows(dbias_, parts)

"""Grouped products: rows sorted by expert, each times its expert's matrix; and the gradients of the matrices.

A program finds the expert and the rows of its tile from the experts' first rows, which the host never reads: there are
as many programs as any sizes of groups may need. A tile of a gradient belongs to one program, which adds its expert's
rows in order: no atomics, and every sum has one order.
Legend: E experts, N tokens, P sorted rows, A width that is summed over, B width of the result, CHOSEN rows of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.experts.reference import Order
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

TOGETHER = tl.constexpr(8)  # rows of tiles that go through all columns: what they share stays in L2


@triton.jit
def _place_of(i, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row, column) of tile i of ROWS x COLUMNS."""
    first = i // (TOGETHER * COLUMNS) * TOGETHER
    rows = tl.minimum(ROWS - first, TOGETHER)
    i %= TOGETHER * COLUMNS
    return first + i % rows, i // rows


@triton.jit
def _find_tile(p_starts, i_tile, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, one behind the last row) of a tile of ROWS; where there is no such tile, expert >= E."""
    o_e = tl.arange(0, BLOCK_E)
    b_start = tl.load(p_starts + o_e, o_e < E, 0)
    b_stop = tl.load(p_starts + o_e + 1, o_e < E, 0)
    b_tiles = (b_stop - b_start + ROWS - 1) // ROWS
    b_done = tl.cumsum(b_tiles, 0) <= i_tile
    i_e = tl.sum(b_done.to(tl.int32), 0)
    first = (i_tile - tl.sum(tl.where(b_done, b_tiles, 0), 0)) * ROWS
    b_here = o_e == i_e
    return i_e, first + tl.sum(tl.where(b_here, b_start, 0), 0), tl.sum(tl.where(b_here, b_stop, 0), 0)


@triton.jit
def _find_rows(p_pair, o_row, m_row, CHOSEN: tl.constexpr):
    """Rows of the operand, int64: the sorted rows themselves, or their tokens."""
    if CHOSEN > 0:
        o_row = tl.load(p_pair + o_row, m_row, 0) // CHOSEN
    return o_row.to(tl.int64)


@launcher
@triton.jit
def _grouped_mm(
    p_x,
    p_w,
    p_y,
    p_pair,
    p_starts,
    p_bias,
    E: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    w_a: tl.constexpr,
    w_b: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    await_previous()
    i_tile, i_b = _place_of(tl.program_id(0), 1 << 30, (B + BLOCK_B - 1) // BLOCK_B)
    i_e, first, stop = _find_tile(p_starts, i_tile, E, BLOCK_E, ROWS)
    if i_e >= E:
        return
    o_row = first + tl.arange(0, ROWS)
    o_a = tl.arange(0, BLOCK_A)
    o_b = i_b * BLOCK_B + tl.arange(0, BLOCK_B)
    m_row, m_b = (o_row < stop)[:, None], (o_b < B)[None, :]
    p_x += _find_rows(p_pair, o_row, o_row < stop, CHOSEN)[:, None] * A + o_a[None, :]
    p_w += i_e.to(tl.int64) * A * B + o_a[:, None] * w_a + o_b[None, :] * w_b
    b_y = tl.zeros((ROWS, BLOCK_B), tl.float32)
    for i_a in range(0, A, BLOCK_A):
        if A % BLOCK_A == 0:
            b_x, b_w = tl.load(p_x, m_row, 0.0), tl.load(p_w, m_b, 0.0)
        else:
            m_a = o_a < A - i_a
            b_x, b_w = tl.load(p_x, m_row & m_a[None, :], 0.0), tl.load(p_w, m_a[:, None] & m_b, 0.0)
        b_y = tl.dot(b_x, b_w, b_y, input_precision="ieee")
        p_x += BLOCK_A
        p_w += BLOCK_A * w_a
    if p_bias is not None:
        b_y += tl.load(p_bias + i_e.to(tl.int64) * B + o_b, o_b < B, 0.0).to(tl.float32)[None, :]
    p_y += o_row.to(tl.int64)[:, None] * B + o_b[None, :]
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), m_row & m_b)


@launcher
@triton.jit
def _grouped_add(
    p_dw,
    p_a,
    p_b,
    p_pair,
    p_starts,
    A: tl.constexpr,
    B: tl.constexpr,
    CHOSEN_A: tl.constexpr,
    CHOSEN_B: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    await_previous()
    TILES_A: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    TILES_B: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    i_e = tl.program_id(0) // (TILES_A * TILES_B)
    i_a, i_b = _place_of(tl.program_id(0) % (TILES_A * TILES_B), TILES_A, TILES_B)
    start, stop = tl.load(p_starts + i_e), tl.load(p_starts + i_e + 1)
    if start == stop:
        return
    o_r = tl.arange(0, ROWS)
    o_a = i_a * BLOCK_A + tl.arange(0, BLOCK_A)
    o_b = i_b * BLOCK_B + tl.arange(0, BLOCK_B)
    m_a, m_b = (o_a < A)[None, :], (o_b < B)[None, :]
    b_sum = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for i_row in range(start, stop, ROWS):
        o_row = i_row + o_r
        m_row = o_row < stop
        p_x = p_a + _find_rows(p_pair, o_row, m_row, CHOSEN_A)[:, None] * A + o_a[None, :]
        p_y = p_b + _find_rows(p_pair, o_row, m_row, CHOSEN_B)[:, None] * B + o_b[None, :]
        b_x = tl.load(p_x, m_row[:, None] & m_a, 0.0)
        b_y = tl.load(p_y, m_row[:, None] & m_b, 0.0)
        b_sum = tl.dot(tl.trans(b_x), b_y, b_sum, input_precision="ieee")
    p_dw += i_e.to(tl.int64) * A * B + o_a[:, None] * B + o_b[None, :]
    mask = (o_a < A)[:, None] & m_b
    b_sum += tl.load(p_dw, mask, 0.0).to(tl.float32)
    tl.store(p_dw, b_sum.to(p_dw.dtype.element_ty), mask)


def grouped_mm(
    x: Tensor, w: Tensor, order: Order, k: int = 0, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """As reference.grouped_mm: x contiguous, w (E, A, B) or a view of (E, B, A), contiguous."""
    (P,), (E, A, B) = order.pair.shape, w.shape
    assert x.shape == (P // k if k else P, A)
    assert x.is_contiguous()
    assert w.stride() in ((A * B, B, 1), (A * B, 1, A))
    assert w.dtype == x.dtype
    assert bias is None or (bias.shape == (E, B) and bias.is_contiguous())
    y = torch.empty((P, B), dtype=x.dtype, device=x.device) if out is None else out
    assert y.shape == (P, B)
    assert y.is_contiguous()
    t = launch.grouped_mm(x.device, x.dtype)
    tiles = cdiv(P // t.rows + min(E, P), TOGETHER.value) * TOGETHER.value  # no sizes of groups need more
    _grouped_mm[(tiles * cdiv(B, t.b),)](
        x, w, y, order.pair, order.starts, bias, E, A, B, *w.stride()[1:], k, t.rows, t.a, t.b, power2(E),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


def grouped_add_(dw_: Tensor, a: Tensor, b: Tensor, order: Order, k_a: int = 0, k_b: int = 0) -> None:
    """As reference.grouped_add_: a, b contiguous, dw_ (E, A, B) or a view of (E, B, A), contiguous."""
    if not dw_.is_contiguous():
        dw_, a, b, k_a, k_b = dw_.transpose(1, 2), b, a, k_b, k_a
    (P,), (E, A, B) = order.pair.shape, dw_.shape
    assert a.shape == (P // k_a if k_a else P, A)
    assert b.shape == (P // k_b if k_b else P, B)
    assert all(t.is_contiguous() for t in (dw_, a, b))
    assert a.dtype == b.dtype
    t = launch.grouped_add(a.device, a.dtype)
    _grouped_add[(E * cdiv(A, t.a) * cdiv(B, t.b),)](
        dw_, a, b, order.pair, order.starts, A, B, k_a, k_b, t.rows, t.a, t.b,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip

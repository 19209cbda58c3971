"""Grouped GEMMs: rows sorted by expert, each multiplied by its expert's weights.

A program finds the expert and the rows of its tile from the experts' first rows (Order.starts), which the CPU never
reads. So the grid has as many programs as any distribution of the rows may need; those without a tile return at once.
In fp8 the sums of products of codes are multiplied by the scales of their row and expert.
Legend: E experts, N tokens, P sorted rows, A width that is summed over, B width of the result, CHOSEN rows of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.compiler import tl, triton
from trireme.kernels.experts.reference import Order, Scales
from trireme.kernels.fp8.block_scaled import fp8_dot
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

LIBRARY = 90, 100  # chips on which torch._grouped_mm is a kernel; elsewhere it loops over experts on the host
TOGETHER = tl.constexpr(8)  # rows of tiles that go through all columns together: what they share stays in L2


@triton.jit
def place_of(i, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row, column) of the i-th tile of ROWS x COLUMNS: TOGETHER rows at a time, columns outermost among these."""
    first = i // (TOGETHER * COLUMNS) * TOGETHER
    rows = tl.minimum(ROWS - first, TOGETHER)
    i %= TOGETHER * COLUMNS
    return first + i % rows, i // rows


@triton.jit
def _find_tile(p_starts, i_tile, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row of a tile of ROWS, row behind the expert's last); expert >= E where there is no such tile."""
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
def find_rows(p_pair, o_row, m_row, CHOSEN: tl.constexpr):
    """Row numbers of an operand, int64, for sorted rows o_row: the same, or with CHOSEN > 0 those of their tokens."""
    if CHOSEN > 0:
        o_row = tl.load(p_pair + o_row, m_row, 0) // CHOSEN
    return o_row.to(tl.int64)


@launcher
@triton.jit
def _grouped_mm(
    p_x, p_w, p_y, p_pair, p_starts, p_bias, p_scale_x, p_scale_w, E: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    w_a: tl.constexpr, w_b: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SCALED: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_tile, i_b = place_of(tl.program_id(0), 1 << 30, (B + BLOCK_B - 1) // BLOCK_B)
    i_e, first, stop = _find_tile(p_starts, i_tile, E, BLOCK_E, ROWS)
    if i_e >= E:
        return
    o_row = first + tl.arange(0, ROWS)
    o_a = tl.arange(0, BLOCK_A)
    o_b = i_b * BLOCK_B + tl.arange(0, BLOCK_B)
    m_row, m_b = (o_row < stop)[:, None], (o_b < B)[None, :]
    o_x = find_rows(p_pair, o_row, o_row < stop, CHOSEN)
    p_x += o_x[:, None] * A + o_a[None, :]
    p_w += i_e.to(tl.int64) * A * B + o_a[:, None] * w_a + o_b[None, :] * w_b
    b_y = tl.zeros((ROWS, BLOCK_B), tl.float32)
    for i_a in range(0, A, BLOCK_A):
        if A % BLOCK_A == 0:
            b_x, b_w = tl.load(p_x, m_row, 0.0), tl.load(p_w, m_b, 0.0)
        else:
            m_a = o_a < A - i_a
            b_x, b_w = tl.load(p_x, m_row & m_a[None, :], 0.0), tl.load(p_w, m_a[:, None] & m_b, 0.0)
        if BLOCK_SCALED:
            b_y = fp8_dot(b_x, b_w, b_y)
        elif p_scale_x is not None:  # Hopper's sums of codes lose bits: each step's is added in fp32
            b_y = tl.dot(b_x, b_w, b_y, max_num_imprecise_acc=BLOCK_A)
        else:
            b_y = tl.dot(b_x, b_w, b_y, input_precision="ieee")
        p_x += BLOCK_A
        p_w += BLOCK_A * w_a
    if p_scale_x is not None:
        b_y *= (tl.load(p_scale_x + o_x, o_row < stop, 0.0) * tl.load(p_scale_w + i_e))[:, None]
    if p_bias is not None:
        b_y += tl.load(p_bias + i_e.to(tl.int64) * B + o_b, o_b < B, 0.0).to(tl.float32)[None, :]
    p_y += o_row.to(tl.int64)[:, None] * B + o_b[None, :]
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), m_row & m_b)


def grouped_mm(
    x: Tensor,
    w: Tensor,
    order: Order,
    k: int = 0,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """As reference.grouped_mm. x is contiguous, as is w (E, A, B) or the (E, B, A) that it is a view of.

    A GEMM with k = 0 and without bias and `out` is left to torch._grouped_mm where by_library; both are bitwise
    identical. With `scales` w must be the view, because tensor cores read codes along the width that is summed over.
    """
    (P,), (E, A, B) = order.pair.shape, w.shape
    assert x.shape == (P // k if k else P, A)
    assert w.stride() in ((A * B, B, 1), (A * B, 1, A))
    assert w.dtype == x.dtype
    assert bias is None or (bias.shape == (E, B) and bias.is_contiguous())
    if scales is not None:
        assert out is not None
        assert w.stride() == (A * B, 1, A)
        assert scales[0].shape == x.shape[:1]
        assert scales[1].shape == (E,)
    if k == 0 and out is None and bias is None and by_library(x, w):
        return torch._grouped_mm(x, w, offs=order.starts[1:])
    y = torch.empty((P, B), dtype=x.dtype, device=x.device) if out is None else out
    assert y.shape == (P, B)
    assert all(t.is_contiguous() for t in (x, y))
    t = launch.grouped_mm(x.device, x.dtype, B)
    tiles = cdiv(P // t.rows + min(E, P), TOGETHER.value) * TOGETHER.value  # no sizes of groups need more
    block_scaled = scales is not None and launch.chip(x.device).arch // 10 == 12
    _grouped_mm[(tiles * cdiv(B, t.b),)](
        x, w, y, order.pair, order.starts, bias, *(scales or (None, None)), E, A, B, *w.stride()[1:], k,
        t.rows, t.a, t.b, power2(E), block_scaled, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


def by_library(x: Tensor, w: Tensor) -> bool:
    """Whether torch._grouped_mm computes x times w: in bf16, rows aligned to 16 bytes, at most 1,023 experts.

    Narrow matrices, as those of adapters, gain nothing by it.
    """
    E, A, B = w.shape
    return (
        launch.chip(x.device).arch in LIBRARY
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and A % 8 == B % 8 == 0
        and min(A, B) >= 256
        and E < 1024
        and (x.data_ptr() | w.data_ptr()) % 16 == 0
    )

"""Sums of sorted rows by token.

    out = residual + sum over slots of weight * row

Legend: N tokens, CHOSEN (k) slots of each, P sorted rows, D width, I hidden width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.experts.reference import Order
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

BLOCK = 1024  # values of a row that one program takes at a time


@launcher
@triton.jit
def _combine(
    p_rows, p_row, p_weights, p_residual, p_out, p_carry, p_among, EXPERTS: tl.constexpr, D: tl.constexpr,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With p_among (EXPERTS + 1,), first rows of neighbouring experts, only rows of these experts are added."""
    await_previous()
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    i_n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_d = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    b_sum = tl.zeros((BLOCK,), tl.float32)
    if p_carry is not None:
        b_sum += tl.load(p_carry + i_n * D + o_d, m_d, 0.0)
    first, last = 0, 0
    if p_among is not None:
        first, last = tl.load(p_among), tl.load(p_among + EXPERTS)
    for i_k in range(CHOSEN):
        i_row = tl.load(p_row + i_n * CHOSEN + i_k).to(tl.int64)
        m_row = m_d
        if p_among is not None:
            o_row = i_row + tl.zeros((BLOCK,), tl.int64)  # blocks: the interpreter has no mask of one value
            m_row = m_d & (o_row >= first) & (o_row < last)
        b_row = tl.load(p_rows + i_row * D + o_d, m_row, 0.0).to(tl.float32)
        if p_weights is not None:
            b_row *= tl.load(p_weights + i_n * CHOSEN + i_k)
        b_sum += b_row
    if p_residual is not None:
        b_sum += tl.load(p_residual + i_n * D + o_d, m_d, 0.0).to(tl.float32)
    tl.store(p_out + i_n * D + o_d, b_sum.to(p_out.dtype.element_ty), m_d)


def combine(
    rows: Tensor,
    order: Order,
    k: int,
    weights: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    carry: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """As reference.combine, all contiguous."""
    P, D = rows.shape
    assert P % k == 0
    assert weights is None or (weights.shape == (P // k, k) and weights.dtype == torch.float32)
    assert weights is None or weights.is_contiguous()
    assert residual is None or (residual.shape == (P // k, D) and residual.is_contiguous())
    out = torch.empty((P // k, D), dtype=rows.dtype, device=rows.device) if out is None else out
    assert out.shape == (P // k, D)
    assert all(t.is_contiguous() for t in (rows, out))
    assert carry is None or (carry.shape == out.shape and carry.dtype == torch.float32 and carry.is_contiguous())
    block, experts = min(BLOCK, power2(D)), 0 if starts is None else len(starts) - 1
    inputs = rows, order.row, weights, residual, out, carry, starts
    _combine[(P // k * cdiv(D, block),)](*inputs, experts, D, k, block, num_warps=4)
    return out

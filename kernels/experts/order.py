"""Pairs (token, slot) sorted by expert on the GPU: a stable counting sort, without a transfer to the CPU.

Each block counts its pairs of each expert; each expert's counts are added up over the blocks. A pair's place is then
the first row of its expert, plus the expert's pairs in earlier blocks, plus those before it in its own block.
Legend: P pairs, E experts, BLOCK pairs of a program.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.experts.reference import Order
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

BLOCK, SCAN = 64, 1024  # pairs of a program; blocks that an expert adds up at once


@launcher
@triton.jit(do_not_specialize=["P", "BLOCKS"])
def _count(p_experts, p_counts, P, BLOCKS, E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """Fills counts (E, BLOCKS): the pairs of each expert in each block."""
    await_previous()
    i_block = tl.program_id(0)
    o_p, o_e = i_block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    b_expert = tl.load(p_experts + o_p, o_p < P, E)
    b_count = tl.sum((b_expert[:, None] == o_e[None, :]).to(tl.int32), 0)
    tl.store(p_counts + o_e.to(tl.int64) * BLOCKS + i_block, b_count, o_e < E)


@launcher
@triton.jit(do_not_specialize=["BLOCKS"])
def _scan(p_counts, p_totals, BLOCKS, SCAN: tl.constexpr):
    """Replaces each expert's counts by the sums of those before them; stores its total in totals (E,)."""
    await_previous()
    i_e = tl.program_id(0)
    p_counts += i_e.to(tl.int64) * BLOCKS
    o_b = tl.arange(0, SCAN)
    total = tl.full((), 0, tl.int32)
    for i_b in range(0, BLOCKS, SCAN):
        m_b = i_b + o_b < BLOCKS
        b_count = tl.load(p_counts + i_b + o_b, m_b, 0)
        tl.store(p_counts + i_b + o_b, total + tl.cumsum(b_count, 0) - b_count, m_b)
        total += tl.sum(b_count, 0)
    tl.store(p_totals + i_e, total)


@launcher
@triton.jit(do_not_specialize=["P", "BLOCKS"])
def _place(
    p_experts, p_counts, p_totals, p_pair, p_row, p_starts, P, BLOCKS, E: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_block = tl.program_id(0)
    o_i, o_e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    o_p = i_block * BLOCK + o_i
    m_p = o_p < P
    b_expert = tl.load(p_experts + o_p, m_p, E)
    b_other = tl.load(p_experts + i_block * BLOCK + o_i, i_block * BLOCK + o_i < P, E)  # along the other axis
    b_total = tl.load(p_totals + o_e, o_e < E, 0)
    b_start = tl.sum(tl.where(o_e[None, :] < b_expert[:, None], b_total[None, :], 0), 1)
    b_before = (b_other[None, :] == b_expert[:, None]) & (o_i[None, :] < o_i[:, None])
    b_row = b_start + tl.load(p_counts + b_expert.to(tl.int64) * BLOCKS + i_block, m_p, 0)
    b_row += tl.sum(b_before.to(tl.int32), 1)
    tl.store(p_row + o_p, b_row, m_p)
    tl.store(p_pair + b_row, o_p, m_p)
    if i_block == 0:
        tl.store(p_starts + 1 + o_e, tl.cumsum(b_total, 0), o_e < E)
        tl.store(p_starts, 0)


def sort_pairs(experts: Tensor, n_experts: int) -> Order:
    """As reference.sort_pairs, experts contiguous. Temporary memory: 4 E (P / 64 + 1) bytes."""
    P, device = experts.numel(), experts.device
    assert experts.dtype == torch.int32
    assert experts.is_contiguous()
    assert 0 < P < 1 << 31
    blocks, block_e = cdiv(P, BLOCK), power2(n_experts)
    empty = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)
    counts, totals = empty(n_experts, blocks), empty(n_experts)
    order = Order(empty(P), empty(P), empty(n_experts + 1))
    _count[(blocks,)](experts, counts, P, blocks, n_experts, BLOCK, block_e, num_warps=8)
    _scan[(n_experts,)](counts, totals, blocks, SCAN, num_warps=4)
    _place[(blocks,)](
        experts, counts, totals, order.pair, order.row, order.starts, P, blocks, n_experts, BLOCK, block_e, num_warps=8
    )
    return order

"""Embedding: rows gathered by token, and their gradients summed per token in a fixed order.

The backward sorts the tokens once; the program at the first place of a run of equal tokens sums the whole run.
Legend: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import launcher

ROWS = 8  # rows of a run that are read at once


@launcher
@triton.jit
def _embedding_fwd(p_ids, p_w, p_out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    i_v = tl.load(p_ids + i_n)
    tl.store(p_out + i_n * D + o_d, tl.load(p_w + i_v * D + o_d, o_d < D), o_d < D)


@launcher
@triton.jit(do_not_specialize=["N"])
def _embedding_bwd(p_dw, p_dy, p_sorted, p_order, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(0)
    i_v = tl.load(p_sorted + i).to(tl.int64)
    if i > 0:
        if tl.load(p_sorted + i - 1).to(tl.int64) == i_v:
            return
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_sum = tl.zeros((BLOCK_D,), tl.float32)
    o_i = i + tl.arange(0, ROWS)
    b_token = tl.load(p_sorted + o_i, o_i < N, -1)
    b_n = tl.load(p_order + o_i, o_i < N, 0)
    more = True
    while more:
        m_run = b_token == i_v
        b_dy = tl.load(p_dy + b_n[:, None] * D + o_d[None, :], m_run[:, None] & m_d[None, :], 0.0)
        more = tl.sum(m_run.to(tl.int32), 0) == ROWS
        o_i += ROWS  # the next places are read before these rows arrive: a run costs one latency a turn, not three
        b_token = tl.load(p_sorted + o_i, o_i < N, -1)
        b_n = tl.load(p_order + o_i, o_i < N, 0)
        b_sum += tl.sum(b_dy.to(tl.float32), 0)
    p_dw += i_v * D + o_d
    b_dw = tl.load(p_dw, m_d).to(tl.float32) + b_sum
    tl.store(p_dw, b_dw.to(p_dw.dtype.element_ty), m_d)


def embedding_fwd(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """As reference.embedding_fwd. All arguments contiguous."""
    (N,), D = ids.shape, weight.shape[1]
    out = torch.empty((N, D), dtype=weight.dtype, device=weight.device) if out is None else out
    assert ids.dtype == torch.int64 and weight.is_contiguous() and out.shape == (N, D) and out.is_contiguous()
    block = min(1024, power2(D))
    _embedding_fwd[(N, cdiv(D, block))](ids, weight, out, D, block, num_warps=4)
    return out


def embedding_bwd_(dweight_: Tensor, dy: Tensor, ids: Tensor) -> None:
    """As reference.embedding_bwd_. All arguments contiguous."""
    N, D = dy.shape
    assert ids.shape == (N,) and dy.is_contiguous() and dweight_.is_contiguous() and dweight_.shape[1] == D
    tokens, order = torch.sort(ids.to(torch.int32), stable=True)  # half the radix passes of int64
    block = min(4096, power2(D))
    warps = max(4, block // 256)
    _embedding_bwd[(N, cdiv(D, block))](dweight_, dy, tokens, order, N, D, ROWS, block, num_warps=warps)

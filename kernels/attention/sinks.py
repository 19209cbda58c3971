"""Attention sinks: one learned score per head that takes part in the softmax and is then dropped (gpt-oss).

    lse' = log(exp(lse) + exp(sink)),  out' = out exp(lse - lse');  dsink = -sum of rows' exp(sink - lse') <dout, out'>

Attention's backward is as it was, given out' and lse'. Legend: N tokens, H heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.column_sum import add_rows
from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

ROWS, LSE_ROWS = 64, 1024  # tokens of a program


@triton.jit
def _with_sink(b_lse, sink):
    sink = sink.to(tl.float32)
    b_top = tl.maximum(b_lse, sink)
    return b_top + tl.log(tl.exp(b_lse - b_top) + tl.exp(sink - b_top))


@launcher
@triton.jit(do_not_specialize=["N"])
def _sinks_out(p_out, p_lse, p_sinks, N, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """lse stays: several threads read a row's, and one of them would write it before the others have read."""
    await_previous()
    i_h = tl.program_id(0) % H
    o_n = tl.program_id(0) // H * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    m_n = o_n < N
    b_lse = tl.load(p_lse + i_h.to(tl.int64) * N + o_n, m_n, 0.0)
    b_new = _with_sink(b_lse, tl.load(p_sinks + i_h))
    p_out += (o_n.to(tl.int64) * H + i_h)[:, None] * D + o_d[None, :]
    mask = m_n[:, None] & (o_d < D)[None, :]
    b_out = tl.load(p_out, mask, 0.0).to(tl.float32) * tl.exp(b_lse - b_new)[:, None]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask)


@launcher
@triton.jit(do_not_specialize=["N"])
def _sinks_lse(p_lse, p_sinks, N, H: tl.constexpr, ROWS: tl.constexpr):
    await_previous()
    i_h = tl.program_id(0) % H
    o_n = tl.program_id(0) // H * ROWS + tl.arange(0, ROWS)
    p_row = p_lse + i_h.to(tl.int64) * N + o_n
    b_lse = tl.load(p_row, o_n < N, 0.0)
    tl.store(p_row, _with_sink(b_lse, tl.load(p_sinks + i_h)), o_n < N)


@launcher
@triton.jit(do_not_specialize=["N"])
def _sinks_bwd(
    p_dout, p_out, p_lse, p_sinks, p_parts, N, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """parts (programs / H, H): sums over the rows of a program."""
    await_previous()
    i_h = tl.program_id(0) % H
    o_n = tl.program_id(0) // H * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    m_n = o_n < N
    o = (o_n.to(tl.int64) * H + i_h)[:, None] * D + o_d[None, :]
    mask = m_n[:, None] & (o_d < D)[None, :]
    b_dot = tl.sum(tl.load(p_dout + o, mask, 0.0).to(tl.float32) * tl.load(p_out + o, mask, 0.0).to(tl.float32), 1)
    b_lse = tl.load(p_lse + i_h.to(tl.int64) * N + o_n, m_n, float("inf"))
    b_share = tl.exp(tl.load(p_sinks + i_h).to(tl.float32) - b_lse)
    tl.store(p_parts + tl.program_id(0), -tl.sum(b_share * b_dot, 0))


def sinks_fwd_(out_: Tensor, lse_: Tensor, sinks: Tensor) -> None:
    """As reference.sinks_fwd_, all contiguous."""
    N, H, d = out_.shape
    assert lse_.shape == (H, N)
    assert sinks.shape == (H,)
    assert all(t.is_contiguous() for t in (out_, lse_, sinks))
    _sinks_out[(cdiv(N, ROWS) * H,)](out_, lse_, sinks, N, H, d, ROWS, power2(d), num_warps=4)
    _sinks_lse[(cdiv(N, LSE_ROWS) * H,)](lse_, sinks, N, H, LSE_ROWS, num_warps=4)


def sinks_bwd_(dsinks_: Tensor, dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """As reference.sinks_bwd_, all contiguous."""
    N, H, d = out.shape
    assert dout.shape == out.shape
    assert lse.shape == (H, N)
    assert all(t.is_contiguous() for t in (dsinks_, dout, out, lse, sinks))
    blocks = cdiv(N, ROWS)
    parts = torch.empty((blocks, H), dtype=torch.float32, device=out.device)
    _sinks_bwd[(blocks * H,)](dout, out, lse, sinks, parts, N, H, d, ROWS, power2(d), num_warps=4)
    add_rows(dsinks_, parts)

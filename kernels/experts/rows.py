"""Operations on sorted rows: activations, whose backward also gives the gradient of the weights, and sums by token.

    out = residual + sum over slots of weight * row;  d_weight = <d_act, act>, d_act = dy down^T before the weight

Legend: N tokens, CHOSEN (k) slots of each, P sorted rows, D width, I hidden width of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.experts.reference import Order
from trireme.kernels.gelu import relu2
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.swiglu import silu

BLOCK = 1024  # values of a row that one program takes at a time


@launcher
@triton.jit
def _combine(
    p_rows,
    p_row,
    p_weights,
    p_residual,
    p_out,
    p_carry,
    p_among,
    EXPERTS: tl.constexpr,
    D: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


@triton.jit
def _clamped(b_gate_up, limit, BLOCK: tl.constexpr):
    """As reference._glu with a limit, of interleaved gate and up, (2 BLOCK,)."""
    b_gate, b_up = tl.split(tl.reshape(b_gate_up.to(tl.float32), (BLOCK, 2)))
    b_low = tl.minimum(b_gate, limit)
    b_s = tl.sigmoid(1.702 * b_low)
    b_slope = tl.where(b_gate <= limit, b_s * (1.0 + 1.702 * b_low * (1.0 - b_s)), 0.0)
    b_passes = ((b_up <= limit) & (b_up >= -limit)).to(tl.float32)
    return b_low * b_s, b_slope, b_passes, tl.minimum(tl.maximum(b_up, -limit), limit) + 1.0


@launcher
@triton.jit
def _clamped_swiglu_fwd(p_gate_up, p_y, limit, F: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    i_row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = (tl.program_id(0) % BLOCKS) * BLOCK
    o_i = 2 * first + tl.arange(0, 2 * BLOCK)
    b_value, _, _, b_up = _clamped(tl.load(p_gate_up + i_row * 2 * F + o_i, o_i < 2 * F, 0.0), limit, BLOCK)
    o_f = first + tl.arange(0, BLOCK)
    tl.store(p_y + i_row * F + o_f, (b_value * b_up).to(p_y.dtype.element_ty), o_f < F)


@launcher
@triton.jit
def _routed_bwd(
    p_d_act,
    p_h,
    p_weights,
    p_pair,
    p_dh,
    p_act,
    p_dweights,
    limit,
    I: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of h are gate and up (2I) if GATED, interleaved if also CLAMPED; otherwise the input of relu2 (I)."""
    await_previous()
    i_row = tl.program_id(0).to(tl.int64)
    i_pair = tl.load(p_pair + i_row)
    weight = tl.load(p_weights + i_pair)
    dtype = p_act.dtype.element_ty
    b_dot = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, I, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        m_i = o_i < I
        b_d = tl.load(p_d_act + i_row * I + o_i, m_i, 0.0).to(tl.float32)
        if CLAMPED:
            o = i_row * 2 * I + 2 * i + tl.arange(0, 2 * BLOCK)
            m_o = 2 * i + tl.arange(0, 2 * BLOCK) < 2 * I
            b_value, b_slope, b_passes, b_up = _clamped(tl.load(p_h + o, m_o, 0.0), limit, BLOCK)
            b_act = b_value * b_up
        elif GATED:
            o = i_row * 2 * I + o_i
            b_up = tl.load(p_h + o + I, m_i, 0.0).to(tl.float32)
            b_value, b_slope = silu(tl.load(p_h + o, m_i, 0.0).to(tl.float32))
            b_act = b_value * b_up
        else:
            b_act, b_slope = relu2(tl.load(p_h + i_row * I + o_i, m_i, 0.0).to(tl.float32))
        b_dot += b_d * b_act
        b_d *= weight
        if CLAMPED:
            b_both = tl.join(b_d * b_up * b_slope, b_d * b_value * b_passes)
            tl.store(p_dh + o, tl.reshape(b_both, (2 * BLOCK,)).to(dtype), m_o)
        elif GATED:
            tl.store(p_dh + o, (b_d * b_up * b_slope).to(dtype), m_i)
            tl.store(p_dh + o + I, (b_d * b_value).to(dtype), m_i)
        else:
            tl.store(p_dh + i_row * I + o_i, (b_d * b_slope).to(dtype), m_i)
        tl.store(p_act + i_row * I + o_i, (weight * b_act).to(dtype), m_i)
    tl.store(p_dweights + i_pair, tl.sum(b_dot, 0))


def combine(
    rows: Tensor,
    order: Order,
    k: int,
    weights: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    carry: Tensor | None = None,
    among: Tensor | None = None,
) -> Tensor:
    """As reference.combine, all contiguous."""
    P, D = rows.shape
    assert P % k == 0
    assert rows.is_contiguous()
    assert weights is None or (weights.shape == (P // k, k) and weights.dtype == torch.float32)
    assert weights is None or weights.is_contiguous()
    assert residual is None or (residual.shape == (P // k, D) and residual.is_contiguous())
    out = torch.empty((P // k, D), dtype=rows.dtype, device=rows.device) if out is None else out
    assert out.shape == (P // k, D)
    assert out.is_contiguous()
    assert carry is None or (carry.shape == out.shape and carry.dtype == torch.float32 and carry.is_contiguous())
    block, experts = min(BLOCK, power2(D)), 0 if among is None else len(among) - 1
    given = rows, order.row, weights, residual, out, carry, among
    _combine[(P // k * cdiv(D, block),)](*given, experts, D, k, block, num_warps=4)
    return out


def clamped_swiglu_fwd(gate_up: Tensor, limit: float) -> Tensor:
    """As reference.clamped_swiglu_fwd, contiguous."""
    N, F = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    y = torch.empty((N, F), dtype=gate_up.dtype, device=gate_up.device)
    block = min(BLOCK, power2(F))
    _clamped_swiglu_fwd[(N * cdiv(F, block),)](gate_up, y, float(limit), F, block, num_warps=4)
    return y


def routed_swiglu_bwd(
    d_act: Tensor, gate_up: Tensor, weights: Tensor, order: Order, limit: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.routed_swiglu_bwd, all contiguous."""
    return _checked_bwd(d_act, gate_up, weights, order, True, limit)


def routed_relu2_bwd(d_act: Tensor, h: Tensor, weights: Tensor, order: Order) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.routed_relu2_bwd, all contiguous."""
    return _checked_bwd(d_act, h, weights, order, False, 0.0)


def _checked_bwd(
    d_act: Tensor, h: Tensor, weights: Tensor, order: Order, gated: bool, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    P, I = d_act.shape
    assert h.shape == (P, 2 * I if gated else I)
    assert weights.numel() == P
    assert weights.dtype == torch.float32
    assert all(t.is_contiguous() for t in (d_act, h, weights))
    dh, act, dweights = torch.empty_like(h), torch.empty_like(d_act), torch.empty_like(weights)
    given = d_act, h, weights, order.pair, dh, act, dweights, float(limit)
    block = min(BLOCK, power2(I))
    _routed_bwd[(P,)](*given, I, gated, limit > 0, block, num_warps=4)
    return dh, act, dweights

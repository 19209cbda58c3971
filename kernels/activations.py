"""Activations of MLPs and experts: one forward and one backward for all of them.

    y = f(h + b),  or of gated units f(gate) * up of one packed buffer; silu, gelu by tanh or exact, relu2
    clamped: (clamp(up) + 1) * g * sigmoid(1.702 g), g = min(gate, limit), gate and up interleaved (gpt-oss)

Backward consumes what forward read: h becomes its gradient, dy becomes y, each element by the thread that read it. Of
experts y is multiplied by a row's weight, whose gradient is the row's <dy, y> before the weight.
Legend: N rows, F hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.column_sum import add_rows
from trireme.kernels.compiler import tl, triton
from trireme.kernels.experts.reference import Order
from trireme.kernels.fp8.quantize import raise_maximum
from trireme.kernels.launch import cdiv, column_splits, power2
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.reference import Act

BLOCK, ROUTED = 2048, 1024  # values of a program; of a row that a program with weights takes at a time
ROWS, COLUMNS = 8, 128  # tile of the backward with a bias, whose gradient is summed by columns


@triton.jit
def silu(x):
    """(silu(x), silu'(x)), fp32."""
    s = tl.sigmoid(x)
    return x * s, s * (1.0 + x * (1.0 - s))


@triton.jit
def gelu(x):
    """(gelu(x), gelu'(x)) by tanh, fp32."""
    s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
    return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
def exact_gelu(x):
    s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
    return x * s, s + x * tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)


@triton.jit
def relu2(x):
    """(relu(x) squared, its derivative), fp32; NaN stays."""
    r = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return r * r, 2.0 * r


FUNCTIONS = {"silu": silu, "gelu": gelu, "exact gelu": exact_gelu, "relu2": relu2}


@triton.jit
def _clamped(b_gate_up, limit, BLOCK: tl.constexpr):
    """(activation of the gate, its derivative, whether up passes, up + 1) of interleaved gate and up, (2 BLOCK,)."""
    b_gate, b_up = tl.split(tl.reshape(b_gate_up.to(tl.float32), (BLOCK, 2)))
    b_low = tl.minimum(b_gate, limit)
    b_s = tl.sigmoid(1.702 * b_low)
    b_slope = tl.where(b_gate <= limit, b_s * (1.0 + 1.702 * b_low * (1.0 - b_s)), 0.0)
    b_passes = ((b_up <= limit) & (b_up >= -limit)).to(tl.float32)
    return b_low * b_s, b_slope, b_passes, tl.minimum(tl.maximum(b_up, -limit), limit) + 1.0


@launcher
@triton.jit
def _act_fwd(
    p_h, p_bias, p_y, p_most, limit, f: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous()
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    i_n, first = (tl.program_id(0) // BLOCKS).to(tl.int64), (tl.program_id(0) % BLOCKS) * BLOCK
    o_f = first + tl.arange(0, BLOCK)  # neighbours adjacent in memory
    if CLAMPED:
        o = 2 * first + tl.arange(0, 2 * BLOCK)
        b_value, _, _, b_up = _clamped(tl.load(p_h + i_n * 2 * F + o, o < 2 * F, 0.0), limit, BLOCK)
        b_y = b_value * b_up
    elif GATED:
        p_gate = p_h + i_n * 2 * F + o_f
        b_gate = tl.load(p_gate, o_f < F, 0.0).to(tl.float32)
        b_up = tl.load(p_gate + F, o_f < F, 0.0).to(tl.float32)
        b_y = f(b_gate)[0] * b_up
    else:
        b_x = tl.load(p_h + i_n * F + o_f, o_f < F, 0.0).to(tl.float32)
        if p_bias is not None:
            b_x += tl.load(p_bias + o_f, o_f < F, 0.0).to(tl.float32)
        b_y = f(b_x)[0]
    b_y = b_y.to(p_y.dtype.element_ty)
    tl.store(p_y + i_n * F + o_f, b_y, o_f < F)
    if p_most is not None:
        raise_maximum(p_most, tl.where(o_f < F, b_y.to(tl.float32), 0.0))


@triton.jit
def _piece(
    p_dy, p_h, i_n, first, weight, limit, f: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward of BLOCK values of a row, in place; returns dy * y before the weight."""
    o_f = first + tl.arange(0, BLOCK)
    p_d = p_dy + i_n * F + o_f
    b_d = tl.load(p_d, o_f < F, 0.0).to(tl.float32)
    dtype = p_h.dtype.element_ty
    if CLAMPED:
        o = i_n * 2 * F + 2 * first + tl.arange(0, 2 * BLOCK)
        m_o = 2 * first + tl.arange(0, 2 * BLOCK) < 2 * F
        b_value, b_slope, b_passes, b_up = _clamped(tl.load(p_h + o, m_o, 0.0), limit, BLOCK)
        b_y = b_value * b_up
    elif GATED:
        o = i_n * 2 * F + o_f
        b_value, b_slope = f(tl.load(p_h + o, o_f < F, 0.0).to(tl.float32))
        b_up = tl.load(p_h + o + F, o_f < F, 0.0).to(tl.float32)
        b_y = b_value * b_up
    else:
        o = i_n * F + o_f
        b_y, b_slope = f(tl.load(p_h + o, o_f < F, 0.0).to(tl.float32))
    b_dot = b_d * b_y
    if WEIGHTED:
        b_d *= weight
        b_y *= weight
    if CLAMPED:
        b_both = tl.join(b_d * b_up * b_slope, b_d * b_value * b_passes)
        tl.store(p_h + o, tl.reshape(b_both, (2 * BLOCK,)).to(dtype), m_o)
    elif GATED:
        tl.store(p_h + o, (b_d * b_up * b_slope).to(dtype), o_f < F)
        tl.store(p_h + o + F, (b_d * b_value).to(dtype), o_f < F)
    else:
        tl.store(p_h + o, (b_d * b_slope).to(dtype), o_f < F)
    tl.store(p_d, b_y.to(dtype), o_f < F)
    return b_dot


@launcher
@triton.jit
def _act_bwd(
    p_dy, p_h, p_weights, p_pair, p_dweights, limit, f: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous()
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    if p_weights is None:
        i_n, first = (tl.program_id(0) // BLOCKS).to(tl.int64), (tl.program_id(0) % BLOCKS) * BLOCK
        _piece(p_dy, p_h, i_n, first, 1.0, limit, f, F, GATED, CLAMPED, False, BLOCK)
    else:  # a program has a row, for the gradient of its weight
        i_n = tl.program_id(0).to(tl.int64)
        i_pair = tl.load(p_pair + i_n)
        weight = tl.load(p_weights + i_pair)
        b_dot = tl.zeros((BLOCK,), tl.float32)
        for i in range(0, F, BLOCK):
            b_dot += _piece(p_dy, p_h, i_n, i, weight, limit, f, F, GATED, CLAMPED, True, BLOCK)
        tl.store(p_dweights + i_pair, tl.sum(b_dot, 0))


@launcher
@triton.jit(do_not_specialize=["N"])
def _biased_bwd(
    p_dy, p_h, p_bias, p_parts, N, f: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    await_previous()
    o_f, i_part = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    b_bias = tl.load(p_bias + o_f, o_f < F, 0.0).to(tl.float32)[None, :]
    b_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i_tile in range(i_part, tl.cdiv(N, ROWS), tl.num_programs(1)):
        i_row = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (i_row < N)[:, None] & (o_f < F)[None, :]
        o = i_row[:, None] * F + o_f[None, :]
        b_value, b_slope = f(tl.load(p_h + o, mask, 0.0).to(tl.float32) + b_bias)
        b_dh = tl.load(p_dy + o, mask, 0.0).to(tl.float32) * b_slope
        b_sum += b_dh
        tl.store(p_h + o, b_dh.to(p_h.dtype.element_ty), mask)
        tl.store(p_dy + o, b_value.to(p_h.dtype.element_ty), mask)
    tl.store(p_parts + i_part * F + o_f, tl.sum(b_sum, 0), o_f < F)


def act_fwd(h: Tensor, act: Act, bias: Tensor | None = None, maxima_: Tensor | None = None) -> Tensor:
    """As reference.act_fwd, contiguous."""
    N, F = h.shape[0], h.shape[1] // (2 if act.gated else 1)
    assert h.is_contiguous()
    y = torch.empty((N, F), dtype=h.dtype, device=h.device)
    block = min(ROUTED, power2(F)) if act.limit else BLOCK
    f = FUNCTIONS[act.name]
    grid = (N * cdiv(F, block),)
    _act_fwd[grid](h, bias, y, maxima_, float(act.limit), f, F, act.gated, act.limit > 0, block, num_warps=4)
    return y


def act_bwd_(
    dy_: Tensor, h_: Tensor, act: Act, bias: Tensor | None = None, dbias_: Tensor | None = None,
    weights: Tensor | None = None, order: Order | None = None,
) -> Tensor | None:  # fmt: skip
    """As reference.act_bwd_, contiguous."""
    N, F = dy_.shape
    assert h_.shape == (N, F * (2 if act.gated else 1))
    assert all(t.is_contiguous() for t in (dy_, h_))
    f = FUNCTIONS[act.name]
    if bias is not None and dbias_ is not None:
        blocks = cdiv(F, COLUMNS)
        grid = blocks, column_splits(h_.device, blocks, cdiv(N, ROWS))
        parts = torch.empty((grid[1], F), dtype=torch.float32, device=h_.device)
        _biased_bwd[grid](dy_, h_, bias, parts, N, f, F, ROWS, COLUMNS, num_warps=4)
        add_rows(dbias_, parts)
        return None
    constants = float(act.limit), f, F, act.gated, act.limit > 0
    if weights is None or order is None:
        _act_bwd[(N * cdiv(F, BLOCK),)](dy_, h_, None, None, None, *constants, BLOCK, num_warps=4)
        return None
    assert weights.dtype == torch.float32
    dweights = torch.empty_like(weights)
    _act_bwd[(N,)](dy_, h_, weights, order.pair, dweights, *constants, min(ROUTED, power2(F)), num_warps=4)
    return dweights

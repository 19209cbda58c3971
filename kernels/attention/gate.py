"""A gate on a mixer's result (reference.py): y = x * f(gate), f sigmoid or softplus of attention, silu of a recurrence.

Legend: N tokens, H heads, D their width. EACH: whether each of D features has a gate, not each head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.activations import silu
from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

BLOCK = 2048  # values of a program


@triton.jit
def sigmoid(x):
    """(sigmoid(x), sigmoid'(x)), fp32."""
    s = tl.sigmoid(x)
    return s, s * (1.0 - s)


@triton.jit
def softplus(x):
    """(log(1 + exp(x)), its derivative), fp32."""
    b_e = tl.exp(-tl.abs(x))
    b_log = tl.where(b_e < 4e-3, b_e * (1.0 - 0.5 * b_e), tl.log(1.0 + b_e))  # errors below 2e-5
    return tl.maximum(x, 0.0) + b_log, tl.sigmoid(x)


FUNCTIONS = {"sigmoid": sigmoid, "silu": silu, "softplus": softplus}


@launcher
@triton.jit(do_not_specialize=["N"])
def _gate_fwd(
    p_x, p_gate, p_y, N, gate_n, gate_h, act: tl.constexpr, EACH: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_row, o_d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    mask = (i_row < N * H)[:, None] & (o_d < D)[None, :]
    o = i_row[:, None] * D + o_d[None, :]
    o_gate = (i_row // H * gate_n + i_row % H * gate_h)[:, None] + o_d[None, :] * EACH
    b_s = act(tl.load(p_gate + o_gate, mask, 0.0).to(tl.float32))[0]
    b_y = tl.load(p_x + o, mask, 0.0).to(tl.float32) * b_s
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask)


@launcher
@triton.jit(do_not_specialize=["N"])
def _gate_bwd(
    p_dy, p_x, p_gate, p_dx, p_dgate, N, gate_n, gate_h, dgate_n, dgate_h, act: tl.constexpr, EACH: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_row, o_d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    i_n, i_h = i_row // H, i_row % H
    mask = (i_row < N * H)[:, None] & (o_d < D)[None, :]
    o = i_row[:, None] * D + o_d[None, :]
    o_gate = (i_n * gate_n + i_h * gate_h)[:, None] + o_d[None, :] * EACH
    b_z = tl.load(p_gate + o_gate, mask, 0.0).to(tl.float32)
    b_s, b_slope = act(b_z)
    b_dy = tl.load(p_dy + o, mask, 0.0).to(tl.float32)
    b_dgate = b_dy * tl.load(p_x + o, mask, 0.0).to(tl.float32) * b_slope
    tl.store(p_dx + o, (b_dy * b_s).to(p_dx.dtype.element_ty), mask)
    p_g = p_dgate + i_n * dgate_n + i_h * dgate_h
    if EACH:
        tl.store(p_g[:, None] + o_d[None, :], b_dgate.to(p_dgate.dtype.element_ty), mask)
    else:
        tl.store(p_g, tl.sum(b_dgate, 1).to(p_dgate.dtype.element_ty), i_row < N * H)


def gate_fwd(x: Tensor, gate: Tensor, act: str) -> Tensor:
    """As reference.gate_fwd."""
    N, H, D = x.shape
    _check(x, gate)
    y, rows = torch.empty_like(x), max(1, BLOCK // power2(D))
    _gate_fwd[(cdiv(N * H, rows),)](
        x, gate, y, N, *gate.stride()[:2], FUNCTIONS[act], int(gate.shape[2] == D), H, D, rows, power2(D), num_warps=4
    )
    return y


def gate_bwd(dy: Tensor, x: Tensor, gate: Tensor, dgate: Tensor, act: str) -> Tensor:
    """As reference.gate_bwd; dy is contiguous."""
    N, H, D = x.shape
    _check(x, gate)
    _check(dy, dgate)
    dx, rows = torch.empty_like(x), max(1, BLOCK // power2(D))
    strides = (*gate.stride()[:2], *dgate.stride()[:2])
    _gate_bwd[(cdiv(N * H, rows),)](
        dy, x, gate, dx, dgate, N, *strides, FUNCTIONS[act], int(gate.shape[2] == D), H, D, rows, power2(D), num_warps=4
    )
    return dx


def _check(x: Tensor, gate: Tensor) -> None:
    assert x.is_contiguous()
    assert gate.shape[:2] == x.shape[:2]
    assert gate.shape[2] in (1, x.shape[2])
    assert gate.stride(2) == 1

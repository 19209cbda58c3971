"""Gated linear units (Shazeer 2020): SwiGLU and GeGLU over one packed (gate, up) buffer.

    y = act(gate) * up;  dgate = dy * up * act'(gate),  dup = dy * act(gate)

Legend: N tokens, F hidden width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.gelu import gelu_tanh
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher

BLOCK = 2048  # values by program


@triton.jit
def silu(x):
    """(silu(x), silu'(x)), fp32."""
    s = tl.sigmoid(x)
    return x * s, s * (1.0 + x * (1.0 - s))


@launcher
@triton.jit
def _glu_fwd(p_gate_up, p_y, act: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    i_n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_f = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)  # neighbours adjacent in memory
    p_gate = p_gate_up + i_n * 2 * F + o_f
    b_gate = tl.load(p_gate, o_f < F, 0.0).to(tl.float32)
    b_up = tl.load(p_gate + F, o_f < F, 0.0).to(tl.float32)
    tl.store(p_y + i_n * F + o_f, (act(b_gate)[0] * b_up).to(p_y.dtype.element_ty), o_f < F)


@launcher
@triton.jit
def _glu_bwd(p_dy, p_gate_up, p_d_gate_up, p_y, act: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    i_n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_f = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    o = i_n * 2 * F + o_f
    b_gate = tl.load(p_gate_up + o, o_f < F, 0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + o + F, o_f < F, 0.0).to(tl.float32)
    b_dy = tl.load(p_dy + i_n * F + o_f, o_f < F, 0.0).to(tl.float32)
    b_value, b_slope = act(b_gate)
    dtype = p_y.dtype.element_ty
    tl.store(p_d_gate_up + o, (b_dy * b_up * b_slope).to(dtype), o_f < F)
    tl.store(p_d_gate_up + o + F, (b_dy * b_value).to(dtype), o_f < F)
    tl.store(p_y + i_n * F + o_f, (b_value * b_up).to(dtype), o_f < F)


def swiglu_fwd(gate_up: Tensor) -> Tensor:
    """As reference.swiglu_fwd, contiguous."""
    return _fwd(silu, gate_up)


def swiglu_bwd(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.swiglu_bwd, contiguous."""
    return _bwd(silu, dy, gate_up)


def geglu_fwd(gate_up: Tensor) -> Tensor:
    """As reference.geglu_fwd, contiguous."""
    return _fwd(gelu_tanh, gate_up)


def geglu_bwd(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.geglu_bwd, contiguous."""
    return _bwd(gelu_tanh, dy, gate_up)


def _fwd(act, gate_up: Tensor) -> Tensor:
    N, F2 = gate_up.shape
    F = F2 // 2
    assert gate_up.is_contiguous()
    assert F2 % 2 == 0
    y = torch.empty((N, F), dtype=gate_up.dtype, device=gate_up.device)
    _glu_fwd[(N * cdiv(F, BLOCK),)](gate_up, y, act, F, BLOCK, num_warps=4)
    return y


def _bwd(act, dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    N, F = dy.shape
    assert gate_up.shape == (N, 2 * F)
    assert gate_up.is_contiguous()
    assert dy.is_contiguous()
    d_gate_up, y = torch.empty_like(gate_up), torch.empty_like(dy)
    _glu_bwd[(N * cdiv(F, BLOCK),)](dy, gate_up, d_gate_up, y, act, F, BLOCK, num_warps=4)
    return d_gate_up, y

"""Backward of gated units (activations.py) with quantized results: nothing is written to memory in bf16.

Two passes over the inputs: first the largest values, of results rounded to bf16; then the codes, bitwise identical to
those of `quantize` after the plain kernel. Legend: N tokens, F hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.activations import FUNCTIONS
from trireme.kernels.compiler import tl, triton
from trireme.kernels.fp8.quantize import codes_of, power_of
from trireme.kernels.fp8.reference import E4M3, LEAST, PAD, Quantized
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.reference import Act

BLOCK, STAGES = 1024, 3  # values at a time of a partial maximum
FINITE = {torch.bfloat16: 2.0**128 - 2.0**119, torch.float32: float("inf")}  # the least that is rounded to infinity


@triton.jit
def _backward(p_dy, p_gate_up, o_y, o, mask, act: tl.constexpr, F: tl.constexpr):
    """(gradients of gate and up, activation), fp32."""
    b_gate = tl.load(p_gate_up + o, mask, 0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + o + F, mask, 0.0).to(tl.float32)
    b_dy = tl.load(p_dy + o_y, mask, 0.0).to(tl.float32)
    b_value, b_slope = act(b_gate)
    return b_dy * b_up * b_slope, b_dy * b_value, b_value * b_up


@triton.jit
def _codes(b_x, power, dtype: tl.constexpr):
    """Codes of b_x (fp32) rounded to `dtype` first, as if it had been stored."""
    return codes_of(b_x.to(dtype).to(tl.float32), power)


@triton.jit
def _larger(b_most, b_x, FINITE: tl.constexpr):
    """max(b_most, |b_x|); NaN may count. With FINITE values that are NaN, infinite or rounded to infinity do not."""
    b_x = tl.abs(b_x)
    if FINITE is not None:
        b_x = tl.where(b_x < FINITE, b_x, 0.0)
    return tl.maximum(b_most, b_x)


@triton.jit
def _largest(
    p_dy, p_gate_up, N, act: tl.constexpr, F: tl.constexpr, FINITE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Largest magnitudes of (gradients of gate and up, activation) in this program's blocks, not rounded."""
    BLOCKS: tl.constexpr = (F + BLOCK - 1) // BLOCK
    b_most = tl.zeros((BLOCK,), tl.float32)
    b_most_up = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(tl.program_id(0), N * BLOCKS, tl.num_programs(0), num_stages=STAGES):
        i_n, o_f = tl.cast(i // BLOCKS, tl.int64), (i % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        b_dgate, b_dup, b_y = _backward(p_dy, p_gate_up, i_n * F + o_f, i_n * 2 * F + o_f, o_f < F, act, F)
        b_most_up = _larger(_larger(b_most_up, b_dgate, FINITE), b_dup, FINITE)
        b_most = _larger(b_most, b_y, FINITE)
    return tl.max(b_most_up, 0), tl.max(b_most, 0)


@launcher
@triton.jit(do_not_specialize=["N"])
def _glu_maxima(
    p_dy, p_gate_up, p_most_up, p_most, N, act: tl.constexpr, F: tl.constexpr, FINITE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    await_previous()
    dtype: tl.constexpr = p_gate_up.dtype.element_ty
    most_up, most = _largest(p_dy, p_gate_up, N, act, F, None, BLOCK, STAGES)
    if not (tl.maximum(most_up, most) < FINITE):  # rare: a look at each value takes longer
        most_up, most = _largest(p_dy, p_gate_up, N, act, F, FINITE, BLOCK, STAGES)
    tl.store(p_most + tl.program_id(0), most.to(dtype).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(p_most_up + tl.program_id(0), most_up.to(dtype).to(tl.float32).to(tl.int32, bitcast=True))


@launcher
@triton.jit(do_not_specialize=["N", "CHUNKS", "P"])
def _glu_codes_bwd(
    p_dy, p_gate_up, p_most_up, p_most, p_scale_up, p_scale, p_rows, p_up_columns, p_columns, N, CHUNKS, P,
    act: tl.constexpr, F: tl.constexpr, PAD: tl.constexpr, LEAST: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    await_previous()
    BLOCKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    o_n = (i // BLOCKS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_f = (i % BLOCKS) * BLOCK_F + tl.arange(0, BLOCK_F)
    m_f = o_f < F
    mask = (o_n < N)[:, None] & m_f[None, :]
    o = o_n[:, None] * 2 * F + o_f[None, :]
    b_dgate, b_dup, b_y = _backward(p_dy, p_gate_up, o_n[:, None] * F + o_f[None, :], o, mask, act, F)
    power = power_of(p_most_up, p_scale_up, P, i == 0, LEAST, BLOCK_P)
    dtype: tl.constexpr = p_dy.dtype.element_ty
    b_gates, b_ups = _codes(b_dgate, power, dtype), _codes(b_dup, power, dtype)
    tl.store(p_rows + o, b_gates, mask)
    tl.store(p_rows + o + F, b_ups, mask)
    if COLUMNS:
        o_t = o_f[:, None].to(tl.int64) * (CHUNKS * PAD) + o_n[None, :]
        turned = m_f[:, None] & (o_n < CHUNKS * PAD)[None, :]
        tl.store(p_up_columns + o_t, tl.trans(b_gates), turned)
        tl.store(p_up_columns + o_t + (CHUNKS * PAD).to(tl.int64) * F, tl.trans(b_ups), turned)
        power = power_of(p_most, p_scale, P, i == 0, LEAST, BLOCK_P)
        tl.store(p_columns + o_t, tl.trans(_codes(b_y, power, dtype)), turned)


def act_codes_bwd(dy: Tensor, h: Tensor, act: Act, columns: bool = True) -> tuple[Quantized, Quantized]:
    """As reference.act_codes_bwd, contiguous."""
    f = FUNCTIONS[act.name]
    N, F = dy.shape
    assert h.shape == (N, 2 * F)
    assert all(t.is_contiguous() for t in (h, dy))
    assert F % PAD == 0
    device, chunks, tile = dy.device, cdiv(N, PAD), launch.gated_codes(dy.device)
    programs = launch.maxima(device, N * cdiv(F, BLOCK))
    maxima_up, maxima = torch.empty((2, programs), dtype=torch.int32, device=device).unbind()
    scale_up, scale = torch.empty(1, device=device), torch.empty(1, device=device)
    sizes = (N, f, F, FINITE[h.dtype], BLOCK, STAGES)
    _glu_maxima[(programs,)](dy, h, maxima_up, maxima, *sizes, num_warps=4)
    new = lambda *shape: torch.empty(shape if columns else 0, dtype=E4M3, device=device)
    rows = torch.empty((N, 2 * F), dtype=E4M3, device=device)
    up_columns, act_columns = new(2 * F, chunks * PAD), new(F, chunks * PAD)
    grid = (cdiv(chunks * PAD, tile.rows) * cdiv(F, tile.columns),)
    tensors = (dy, h, maxima_up, maxima, scale_up, scale, rows, up_columns, act_columns)
    blocks = tile.rows, tile.columns, launch.power2(programs)
    _glu_codes_bwd[grid](*tensors, N, chunks, programs, f, F, PAD, LEAST, columns, *blocks, num_warps=tile.warps)
    if not columns:
        return Quantized(scale_up, rows, None), Quantized(scale, None, None)
    return Quantized(scale_up, rows, up_columns), Quantized(scale, None, act_columns)

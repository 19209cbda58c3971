"""AdamW (Loshchilov & Hutter 2019) and the gradient norm on the GPU, each in one pass over memory.

Results are bitwise equal to those of reference.py: each IEEE fp32 operation is rounded by itself, none are fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.optimizer import reference

NAN_BITS = tl.constexpr(reference.NAN_BITS)
BLOCK = 1024
HALVINGS, LANE_ROWS = 10, 64  # blocks of reference.grad_finish


@launcher
@triton.jit(do_not_specialize=["n_decay"])
def _adamw(
    p_w, p_lo, p_m, p_v, p_grad, p_clip, n, n_decay, step_size, beta1, one_beta1, beta2, one_beta2, inv_sqrt_bias2, eps,
    decay, SPLIT: tl.constexpr, WEIGHTS: tl.constexpr, MOMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous()
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < n
    b_g = tl.load(p_grad + o, mask, 0.0).to(tl.float32) * tl.load(p_clip)
    if SPLIT:
        b_hi = tl.load(p_w + o, mask, 0.0).to(tl.int16, bitcast=True).to(tl.int32)
        b_w = ((b_hi << 16) + tl.load(p_lo + o, mask, 0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        b_w = tl.load(p_w + o, mask, 0.0)
    b_w = tl.where(o < n_decay, b_w * decay, b_w)
    b_m = beta1 * tl.load(p_m + o, mask, 0.0) + one_beta1 * b_g
    b_v = beta2 * tl.load(p_v + o, mask, 0.0) + one_beta2 * (b_g * b_g)
    b_w -= tl.div_rn(step_size * b_m, tl.sqrt_rn(b_v) * inv_sqrt_bias2 + eps)
    if MOMENTS:
        tl.store(p_m + o, b_m, mask)
        tl.store(p_v + o, b_v, mask)
    if WEIGHTS:
        if SPLIT:
            b_bits = tl.where(b_w == b_w, b_w.to(tl.int32, bitcast=True), NAN_BITS)
            b_hi = (b_bits + 0x8000) >> 16
            tl.store(p_w + o, b_hi.to(tl.int16).to(tl.bfloat16, bitcast=True), mask)
            tl.store(p_lo + o, (b_bits - (b_hi << 16)).to(tl.int16), mask)
        else:
            tl.store(p_w + o, b_w, mask)


@triton.jit
def _halve(x, HALVINGS: tl.constexpr):
    """The sum of 2^HALVINGS values: the second half is added to the first, repeatedly, so the order is fixed."""
    for i in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (2, 1 << (HALVINGS - 1 - i))), 0)
    return x


@launcher
@triton.jit
def _sum_squares(
    p_x, p_out, p_sums, n, ROUND: tl.constexpr, HALVINGS: tl.constexpr, LANE_ROWS: tl.constexpr, UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    await_previous()
    LANES: tl.constexpr = 1 << HALVINGS
    o = tl.program_id(0).to(tl.int64) * (LANES * LANE_ROWS) + tl.arange(0, LANES)
    b_sum = tl.zeros((LANES,), tl.float32)
    for _ in tl.range(0, LANE_ROWS, loop_unroll_factor=UNROLL, num_stages=STAGES):
        b_x = tl.load(p_x + o, o < n, 0.0)
        if ROUND:
            b_x = b_x.to(p_out.dtype.element_ty)
            tl.store(p_out + o, b_x, o < n)
        b_x = b_x.to(tl.float32)
        b_sum += b_x * b_x
        o += LANES
    tl.store(p_sums + tl.program_id(0) + tl.arange(0, 1), _halve(b_sum, HALVINGS))


@launcher
@triton.jit(do_not_specialize=["n_blocks"])
def _sum_blocks(p_sums, p_total, n_blocks, HALVINGS: tl.constexpr):
    await_previous()
    o = tl.arange(0, 1 << HALVINGS)
    b_total = _halve(tl.load(p_sums + o, o < n_blocks, 0.0).to(tl.float64), HALVINGS)
    tl.store(p_total + tl.arange(0, 1), b_total.to(tl.float32))


def adamw_(
    w_: Tensor,
    lo_: Tensor | None,
    m_: Tensor,
    v_: Tensor,
    grad: Tensor,
    clip: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    n_decay: int,
    step: int,
    part: str = "all",
) -> None:
    """As reference.adamw_, bitwise equal to it. All tensors are contiguous."""
    n = w_.numel()
    assert m_.numel() == v_.numel() == grad.numel() == n
    assert clip.numel() == 1
    assert w_.dtype == (torch.float32 if lo_ is None else torch.bfloat16)
    assert m_.dtype == v_.dtype == torch.float32
    assert all(t.is_contiguous() for t in (w_, m_, v_, grad))
    assert lo_ is None or lo_.dtype == torch.int16
    _adamw[(cdiv(n, BLOCK),)](
        w_, lo_, m_, v_, grad, clip, n, n_decay, lr / (1 - beta1**step), beta1, 1 - beta1, beta2, 1 - beta2,
        1 / (1 - beta2**step) ** 0.5, eps, 1 - lr * weight_decay, lo_ is not None,
        part != "moments", part != "weights", BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def grad_finish(grad: Tensor, out: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    """As reference.grad_finish, bitwise equal to it. All tensors are contiguous."""
    assert grad.is_contiguous()
    assert out is None or (out.is_contiguous() and out.numel() == grad.numel())
    n = grad.numel()
    n_blocks = cdiv(n, LANE_ROWS << HALVINGS)
    sums = torch.empty(n_blocks, dtype=torch.float32, device=grad.device)
    unroll, stages, warps = (8, 1, 16) if out is None else (1, 8, 4)  # reading only; writing too
    _sum_squares[(n_blocks,)](
        grad, out, sums, n, out is not None, HALVINGS, LANE_ROWS, unroll, stages,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    total = torch.empty(1, dtype=torch.float32, device=grad.device) if total is None else total
    _sum_blocks[(1,)](sums, total, n_blocks, (n_blocks - 1).bit_length(), num_warps=4)
    return total

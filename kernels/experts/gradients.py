"""Gradients of the experts' weights: grouped GEMMs over each expert's rows, added to the sum of earlier micro-batches.

A tile of a gradient belongs to one program, which adds its expert's rows in order. So there are no atomics, and every
sum has one order. Legend: matmuls.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.compiler import tl, triton
from trireme.kernels.experts.matmuls import find_rows, place_of
from trireme.kernels.experts.reference import Order
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher


@launcher
@triton.jit
def _grouped_add(
    p_dw, p_a, p_b, p_pair, p_starts, A: tl.constexpr, B: tl.constexpr, CHOSEN_A: tl.constexpr, CHOSEN_B: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    await_previous()
    TILES_A: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    TILES_B: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    i_e = tl.program_id(0) // (TILES_A * TILES_B)
    i_a, i_b = place_of(tl.program_id(0) % (TILES_A * TILES_B), TILES_A, TILES_B)
    start, stop = tl.load(p_starts + i_e), tl.load(p_starts + i_e + 1)
    if start == stop:
        return
    o_r = tl.arange(0, ROWS)
    o_a = i_a * BLOCK_A + tl.arange(0, BLOCK_A)
    o_b = i_b * BLOCK_B + tl.arange(0, BLOCK_B)
    m_a, m_b = (o_a < A)[None, :], (o_b < B)[None, :]
    b_sum = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for i_row in range(start, stop, ROWS):
        o_row = i_row + o_r
        m_row = o_row < stop
        p_x = p_a + find_rows(p_pair, o_row, m_row, CHOSEN_A)[:, None] * A + o_a[None, :]
        p_y = p_b + find_rows(p_pair, o_row, m_row, CHOSEN_B)[:, None] * B + o_b[None, :]
        b_x = tl.load(p_x, m_row[:, None] & m_a, 0.0)
        b_y = tl.load(p_y, m_row[:, None] & m_b, 0.0)
        b_sum = tl.dot(tl.trans(b_x), b_y, b_sum, input_precision="ieee")
    p_dw += i_e.to(tl.int64) * A * B + o_a[:, None] * B + o_b[None, :]
    mask = (o_a < A)[:, None] & m_b
    b_sum += tl.load(p_dw, mask, 0.0).to(tl.float32)
    tl.store(p_dw, b_sum.to(p_dw.dtype.element_ty), mask)


def grouped_add_(dw_: Tensor, a: Tensor, b: Tensor, order: Order, k_a: int = 0, k_b: int = 0) -> None:
    """As reference.grouped_add_. a and b are contiguous, as is dw_ (E, A, B) or the (E, B, A) that it is a view of."""
    if not dw_.is_contiguous():
        dw_, a, b, k_a, k_b = dw_.transpose(1, 2), b, a, k_b, k_a
    (P,), (E, A, B) = order.pair.shape, dw_.shape
    assert a.shape == (P // k_a if k_a else P, A)
    assert b.shape == (P // k_b if k_b else P, B)
    assert all(t.is_contiguous() for t in (dw_, a, b))
    assert a.dtype == b.dtype
    if not order.sliced and suits_hopper(dw_, a, b, k_a, k_b):  # it reads rows behind an expert's last
        from trireme.kernels.experts import hopper  # late: experimental parts of Triton

        hopper.add_(dw_, a, b, order, k_a, k_b)
        return
    t = launch.grouped_add(a.device, a.dtype)
    _grouped_add[(E * cdiv(A, t.a) * cdiv(B, t.b),)](
        dw_, a, b, order.pair, order.starts, A, B, k_a, k_b, t.rows, t.a, t.b, num_warps=t.warps, num_stages=t.stages
    )


def suits_hopper(dw_: Tensor, a: Tensor, b: Tensor, k_a: int, k_b: int) -> bool:
    """Whether hopper.add_ takes these: on sm_90, a and b in bf16, one of them sorted, rows aligned to 16 bytes."""
    return (
        launch.chip(a.device).arch == 90
        and a.dtype == torch.bfloat16
        and dw_.dtype in (torch.bfloat16, torch.float32)
        and a.shape[1] % 8 == b.shape[1] % 8 == 0
        and not (k_a and k_b)
        and (dw_.data_ptr() | a.data_ptr() | b.data_ptr()) % 16 == 0
    )

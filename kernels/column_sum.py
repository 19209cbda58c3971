"""Sums over partial rows: the last part of the weight and bias gradients of norms and elementwise kernels.

Each program of such a kernel leaves one row of partial sums in fp32. They are added here in a fixed order, so that
results repeat bitwise. Legend: P partial rows, D columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher

BLOCK_P, BLOCK_D = 64, 16


@launcher
@triton.jit(do_not_specialize=["P"])
def _add_rows(p_out, p_parts, p_out2, p_parts2, P, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    await_previous()
    if tl.program_id(1) == 1:
        p_out, p_parts = p_out2, p_parts2
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_p = tl.arange(0, BLOCK_P)
    m_d = o_d < D
    b_sum = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for i_p in range(0, P, BLOCK_P):
        mask = (i_p + o_p < P)[:, None] & m_d[None, :]
        b_sum += tl.load(p_parts + (i_p + o_p)[:, None] * D + o_d[None, :], mask, 0.0)
    b_out = tl.load(p_out + o_d, m_d).to(tl.float32) + tl.sum(b_sum, 0)
    tl.store(p_out + o_d, b_out.to(p_out.dtype.element_ty), m_d)


def add_rows(out_: Tensor, parts: Tensor, out2_: Tensor | None = None, parts2: Tensor | None = None) -> None:
    """Adds the sum of parts (P, D) fp32 over its rows to out_ (D,), rounded once.

    A second pair of the same shapes, out2_ of the dtype of out_, is summed by the same launch.
    """
    P, D = parts.shape
    assert out_.shape == (D,)
    assert out_.is_contiguous()
    assert parts.is_contiguous()
    assert parts.dtype == torch.float32
    pairs = 1 if out2_ is None else 2
    if out2_ is None or parts2 is None:
        out2_, parts2 = out_, parts
    assert out2_.shape == (D,)
    assert out2_.dtype == out_.dtype
    assert parts2.shape == parts.shape
    _add_rows[(cdiv(D, BLOCK_D), pairs)](out_, parts, out2_, parts2, P, D, BLOCK_P, BLOCK_D, num_warps=8)

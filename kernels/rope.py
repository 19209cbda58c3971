"""Rotary position embedding (Su et al. 2021), in place, in the half-split convention of LLaMA or over neighbours.

    (a, b) -> (a cos - b sin, b cos + a sin), halves or neighbours in a head; the inverse rotates by -angle

Legend: N tokens, H heads.
"""

from __future__ import annotations

from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher


@triton.jit
def turned(b_a, b_b, b_cos, b_sin):
    """The rotated pair. tl.fma fixes which product is fused with the addition, so that all kernels give equal bits.

    Zeros keep their signs.
    """
    return tl.fma(b_a, b_cos, b_b * b_sin * -1.0), tl.fma(b_a, b_sin, b_b * b_cos)


@launcher
@triton.jit
def _rope(
    p_x, p_cos, p_sin, p_positions, x_n, x_h, H: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, INVERSE: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
):  # fmt: skip
    await_previous()
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    i_n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_h = (tl.program_id(0) % BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)  # neighbours adjacent in memory
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HALF
    mask = (o_h < H)[:, None] & m_d[None, :]
    i_position = tl.load(p_positions + i_n).to(tl.int64)
    b_cos = tl.load(p_cos + i_position * HALF + o_d, m_d, 0.0)[None, :]
    b_sin = tl.load(p_sin + i_position * HALF + o_d, m_d, 0.0)[None, :]
    if INVERSE:
        b_sin = -b_sin
    p_a = p_x + i_n * x_n + o_h[:, None] * x_h + o_d[None, :] * STEP
    b_a = tl.load(p_a, mask, 0.0).to(tl.float32)
    b_b = tl.load(p_a + GAP, mask, 0.0).to(tl.float32)
    b_a, b_b = turned(b_a, b_b, b_cos, b_sin)
    tl.store(p_a, b_a.to(p_x.dtype.element_ty), mask)
    tl.store(p_a + GAP, b_b.to(p_x.dtype.element_ty), mask)


def rope_(x_: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False, pairs: bool = False) -> None:
    """As reference.rope_; heads, cos and sin contiguous."""
    N, H, d = x_.shape
    half = d // 2
    assert x_.stride(2) == 1
    assert d % 2 == 0
    assert positions.shape == (N,)
    assert cos.shape[1] == sin.shape[1] == half
    assert all(t.is_contiguous() for t in (cos, sin))
    block_d = power2(half)
    block_h = min(power2(H), max(1, 1024 // block_d))
    grid = (N * cdiv(H, block_h),)
    strides, apart = (x_.stride(0), x_.stride(1)), (2, 1) if pairs else (1, half)
    _rope[grid](x_, cos, sin, positions, *strides, H, half, block_h, block_d, inverse, *apart, num_warps=4)

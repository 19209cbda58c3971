"""Soft caps of scores and logits (Gemma 2): y = cap * tanh(x / cap), and dy/dx = 1 - (y / cap)^2.

For kernels that compute exponentials in base 2: their x and y are multiplied by log2(e).
"""

from __future__ import annotations

from trireme.kernels.compiler import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def soft_cap(b_x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), x and the result in base 2; x itself where CAP is 0."""
    if CAP > 0.0:
        b_t = b_x * (LN2 / CAP)
        b_2 = b_t * b_t
        b_small = b_t * (1.0 + b_2 * (-0.33333333 + b_2 * (0.13333333 + b_2 * (-0.05396825 + b_2 * 0.02186949))))
        b_tanh = 1.0 - 2.0 / (tl.exp2(b_x * (2.0 / CAP)) + 1.0)
        b_x = CAP * LOG2E * tl.where(tl.abs(b_t) < 0.25, b_small, b_tanh)
    return b_x


@triton.jit
def cap_slope(b_y, CAP: tl.constexpr):
    """The derivative of soft_cap, given its result."""
    b_t = b_y * (LN2 / CAP)
    return 1.0 - b_t * b_t

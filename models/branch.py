"""The end of a sub-layer: a linear layer, optionally a norm and a factor, added to the sub-layer's input.

    out = x + scale * norm(inner @ weight + bias)

Legend: shapes.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.linear import Linear, Operand, add_linear_, linear
from trireme.models.norm import Norm, norm, norm_backward


def copies(before: Norm | None, after: Norm | None, w: Linear) -> bool:
    """Whether the norm before a sub-layer copies x to `out`, so that the GEMM of w can add to it. Never in fp8."""
    return before is not None and before.copies and after is None and not w.fp8


def add_branch(
    factor: float,
    eps: float,
    x: Tensor,
    inner: Operand,
    w: Linear,
    before: Norm | None,
    after: Norm | None,
    out: Tensor,
    matmul: Tensor | None = None,
) -> None:
    """Fills out (N, D), which may be x; with a norm `after` also `matmul` (N, D), its input, if given.

    If `copies`, out must already hold x.
    """
    if after is not None:
        add_matmul(factor, eps, x, linear(inner, w, matmul, x.dtype), after, out)
    elif copies(before, after, w):
        add_linear_(out, inner, w, factor)
    else:
        torch.add(x, linear(inner, w, dtype=x.dtype), alpha=factor, out=out)


def add_matmul(factor: float, eps: float, x: Tensor, matmul: Tensor, after: Norm, out: Tensor) -> None:
    """Fills out as add_branch with a norm `after`, given the norm's input `matmul` (N, D)."""
    y, _ = norm(matmul, after, eps)
    torch.add(x, y, alpha=factor, out=out)


def branch_backward(
    factor: float,
    eps: float,
    dy: Tensor,
    inner: Operand,
    w: Linear,
    after: Norm | None,
    g_after: Norm | None,
    matmul: Tensor | None,
) -> Tensor:
    """Gradient (N, D) of the linear layer's result, given dy (N, D). Recomputes `matmul` if it is needed and None."""
    if factor != 1.0:
        dy = dy * factor
    if after is None or g_after is None:
        return dy
    matmul = linear(inner, w, dtype=dy.dtype) if matmul is None else matmul
    _, stats = norm(matmul, after, eps)
    return norm_backward(dy, matmul, after, stats, g_after)

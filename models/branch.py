"""The end of a sub-layer: a linear layer, optionally a norm and a factor, added to the sub-layer's input.

    out = x + factor * norm(inner @ weight + bias)

Legend: shapes.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.models.linear import Linear, Operand, add_linear_, linear
from trireme.models.norm import Norm, norm, norm_backward
from trireme.models.reader import Reader


class Branch(NamedTuple):
    """Weights of a sub-layer's end, or their gradients."""

    linear: Linear  # (inner, D)
    norm: Norm | None  # behind it
    factor: float
    copies: bool  # the norm before the sub-layer copies x to `out`, so that the GEMM can add to it; never in fp8


def branch(read: Reader, name: str, post: str, factor: float, before: Norm | None) -> Branch:
    """The Branch of these names, of a sub-layer with a norm `before`."""
    layer, norm = read.linear(name), read.norm(post, read.layer.post_eps)
    return Branch(layer, norm, factor, before is not None and before.copies and norm is None and not layer.fp8)


def add_branch(w: Branch, x: Tensor, inner: Operand, out: Tensor, matmul: Tensor | None = None) -> Tensor | None:
    """Fills out (N, D), which may be x, and returns the input of the norm (N, D), in `matmul` if given.

    If w.copies, out must already hold x.
    """
    if w.norm is not None:
        matmul = linear(inner, w.linear, matmul, x.dtype)
        add_normed(w.norm, w.factor, x, matmul, out)
        return matmul
    if w.copies:
        add_linear_(out, inner, w.linear, w.factor)
    else:
        torch.add(x, linear(inner, w.linear, dtype=x.dtype), alpha=w.factor, out=out)
    return None


def branch_backward(
    w: Branch, g: Branch, dy: Tensor, inner: Operand | None = None, matmul: Tensor | None = None
) -> Tensor:
    """Gradient (N, D) of the linear layer's result, given dy (N, D), and with a norm `inner` or `matmul`."""
    if w.norm is None:
        return dy if w.factor == 1.0 else dy * w.factor
    if matmul is None:
        assert inner is not None
        matmul = linear(inner, w.linear, dtype=dy.dtype)
    return normed_backward(w.norm, g.norm, w.factor, dy, matmul)


def add_normed(w: Norm, factor: float, x: Tensor, y: Tensor, out: Tensor) -> None:
    """Fills out (N, D) with x + factor * norm(y)."""
    torch.add(x, norm(y, w)[0], alpha=factor, out=out)


def normed_backward(w: Norm, g: Norm | None, factor: float, dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of y (N, D) of add_normed, given dy (N, D); adds to g."""
    return norm_backward(dy if factor == 1.0 else dy * factor, y, w, norm(y, w)[1], g)

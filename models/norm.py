"""A norm over the width: RMSNorm, or LayerNorm where it has a bias."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.linear import (
    Gradient,
    Linear,
    Operand,
    add_gradients_,
    if_trained,
    linear_backward,
    trained,
)


class Norm(NamedTuple):
    """A norm's weights, or their gradients."""

    weight: Tensor  # (D,)
    eps: float
    bias: Tensor | None = None  # (D,) of a LayerNorm
    add_one: bool = False  # multiplies by 1 + weight

    @property
    def copies(self) -> bool:
        """Whether a sub-layer's output starts as the copy of its input that this norm makes."""
        return self.bias is None

    @property
    def kind(self) -> ops.NormKind:
        return ops.NormKind(add_one=self.add_one, centred=self.bias is not None)


Stats = ops.NormStats


def norm(
    x: Tensor, w: Norm | None, copy: Tensor | None = None, maxima_: Tensor | None = None
) -> tuple[Tensor, Stats | None]:
    """(normed x (N, D), statistics), or (x, None) without a norm. Copies x to `copy`, if given.

    maxima_: ops.new_maxima, for quantizing the result.
    """
    if w is None:
        return x, None
    copy = None if copy is None or copy is x else copy[:, None]
    y, stats = ops.norm_fwd(x[:, None], w.weight, w.eps, w.kind, w.bias, None, copy, maxima_)
    return y[:, 0], stats


def bare_norm(width: int, eps: float, like: Tensor) -> Norm:
    """A norm that has no weights: ones (width,), fp32, or fp64 as `like`."""
    dtype = torch.float32 if like.dtype != torch.float64 else like.dtype
    return Norm(torch.ones(width, dtype=dtype, device=like.device), eps)


def norm_for(
    layer: Linear,
    x: Tensor,
    w: Norm | None,
    copy: Tensor | None = None,
    forward: bool = True,
    backward: bool = False,
) -> tuple[Operand, Stats | None]:
    """As norm, with the result in the form in which `layer` reads it: as codes if it takes_codes.

    Codes are in rows for `forward`, in columns for `backward` (the gradient of the layer's weight), both made at once;
    for neither the result is not read.
    """
    if not layer.takes_codes or not (forward or backward):
        return norm(x, w, copy)
    maxima = None if w is None else ops.new_maxima(x)
    y, stats = norm(x, w, copy, maxima)
    return ops.quantize(y, forward, backward, maxima=maxima), stats


def norm_backward(
    dy: Tensor,
    x: Tensor,
    w: Norm | None,
    stats: Stats | None,
    g: Norm | None,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of x (N, D), plus dresidual (N, D), in `out` if given; adds those of the weights to g."""
    if w is None or stats is None:
        return dy if dresidual is None else torch.add(dy, dresidual, out=out)
    dx = torch.empty_like(x) if out is None else out
    dweight, dbias = (None if t is None else if_trained(t) for t in ((g.weight, g.bias) if g else (None, None)))
    rows = None if dresidual is None else dresidual[:, None]
    gradients = dweight, dbias, None, None, rows
    ops.norm_bwd(dy[:, None], x[:, None], w.weight, stats, w.kind, dx[:, None], *gradients)
    return dx


def normed_linear_backward(
    w: tuple[Norm | None, Linear], g: tuple[Norm | None, Linear], x: Tensor, d: Gradient, dy: Tensor, dx: Tensor
) -> None:
    """Fills dx (N, D): the gradient of x through a norm and the linear layer that reads it, plus dy. Adds to g.

    `d`: the gradient of the layer's output. The norm is computed again.
    """
    (before, layer), (g_before, g_layer) = w, g
    y, stats = norm_for(layer, x, before, forward=False, backward=trained(g_layer.weight))
    add_gradients_(g_layer, layer, y, d)
    del y
    norm_backward(linear_backward(d, layer), x, before, stats, g_before, dy, dx)

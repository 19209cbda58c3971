"""A norm over the width: RMSNorm, or LayerNorm where it has a bias."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.linear import (
    Linear,
    Operand,
    Upstream,
    add_gradients_,
    if_trained,
    linear_backward,
    or_scratch,
    trained,
)


class Norm(NamedTuple):
    """A norm's weights, or their gradients."""

    weight: Tensor  # (D,)
    bias: Tensor | None = None  # (D,) of a LayerNorm
    add_one: bool = False  # multiplies by 1 + weight

    @property
    def copies(self) -> bool:
        """Whether `norm` can copy its input, which only the kernel of RMSNorm does."""
        return self.bias is None

    @property
    def factor(self) -> Tensor:
        """What features are multiplied by: (D,), fp32 where 1 is added."""
        return 1 + self.weight.float() if self.add_one else self.weight


class Stats(NamedTuple):
    """Statistics of each token, for backward."""

    rstd: Tensor  # (N,) fp32
    mean: Tensor | None = None  # LayerNorm: (N,) fp32


def norm(x: Tensor, w: Norm | None, eps: float, copy: Tensor | None = None) -> tuple[Tensor, Stats | None]:
    """(normed x (N, D), statistics), or (x, None) without a norm. RMSNorm copies x to `copy`, if given."""
    if w is None:
        return x, None
    if w.bias is None:
        y, rstd = ops.rmsnorm_fwd(x, w.factor, eps, None if copy is x else copy)
        return y, Stats(rstd)
    y, mean, rstd = ops.layernorm_fwd(x, w.weight, w.bias, eps)
    return y, Stats(rstd, mean)


def norm_for(
    layer: Linear,
    x: Tensor,
    w: Norm | None,
    eps: float,
    copy: Tensor | None = None,
    forward: bool = True,
    backward: bool = False,
) -> tuple[Operand, Stats | None]:
    """As norm, with the result in the form in which `layer` reads it: as codes if it takes_codes.

    Codes are in rows for `forward`, in columns for `backward` (the gradient of the layer's weight), both made at once;
    for neither the result is not read. An RMSNorm that copies nothing writes codes alone; of others y is quantized.
    """
    if layer.takes_codes and w is not None and w.bias is None and copy is None:
        codes, rstd = ops.rmsnorm_codes(x, w.factor, eps, forward, backward)
        return codes, Stats(rstd)
    y, stats = norm(x, w, eps, copy)
    return ops.quantize(y, forward, backward) if layer.takes_codes and (forward or backward) else y, stats


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
    if w is None or g is None or stats is None:
        return dy if dresidual is None else torch.add(dy, dresidual, out=out)
    if g.bias is None or w.bias is None or stats.mean is None:
        return ops.rmsnorm_bwd(dy, x, w.factor, stats.rstd, if_trained(g.weight), dresidual, out)
    dweight, dbias = or_scratch(g.weight, w.weight), or_scratch(g.bias, w.bias)
    return ops.layernorm_bwd(dy, x, w.weight, stats.mean, stats.rstd, dweight, dbias, dresidual, out)


def normed_linear_backward(
    w: tuple[Norm | None, Linear],
    g: tuple[Norm | None, Linear],
    eps: float,
    x: Tensor,
    d: Upstream,
    dy: Tensor,
    dx: Tensor,
) -> None:
    """Fills dx (N, D): the gradient of x through a norm and the linear layer that reads it, plus dy. Adds to g.

    `d`: the gradient of the layer's output. The norm is computed again.
    """
    (before, layer), (g_before, g_layer) = w, g
    y, stats = norm_for(layer, x, before, eps, forward=False, backward=trained(g_layer.weight))
    add_gradients_(g_layer, layer, y, d)
    del y  # workspace._around_mixer
    norm_backward(linear_backward(d, layer), x, before, stats, g_before, dy, dx)

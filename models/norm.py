"""A norm over the width: RMSNorm, or LayerNorm where it has a bias. Legend: N tokens, D width."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trireme.kernels import ops


class Norm(NamedTuple):
    """A norm's weights, or their gradients."""

    weight: Tensor  # (D,)
    bias: Tensor | None = None  # (D,) of a LayerNorm

    @property
    def copies(self) -> bool:
        """Whether `norm` fills its argument `copy`: RMSNorm's kernel does, LayerNorm's does not."""
        return self.bias is None


class Stats(NamedTuple):
    """A norm's statistics of each token, for its backward."""

    rstd: Tensor  # (N,) fp32
    mean: Tensor | None = None  # (N,) fp32, of a LayerNorm


def norm(x: Tensor, w: Norm, eps: float, copy: Tensor | None = None) -> tuple[Tensor, Stats]:
    """(y (N, D), statistics for norm_backward). RMSNorm also copies x into `copy`, unless they are one tensor."""
    if w.bias is None:
        y, rstd, _ = ops.rmsnorm_fwd(x, w.weight, eps, out=None if copy is x else copy)
        return y, Stats(rstd)
    y, mean, rstd, _ = ops.layernorm_fwd(x, w.weight, w.bias, eps)
    return y, Stats(rstd, mean)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    w: Norm,
    stats: Stats,
    g: Norm,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of x (N, D), plus dresidual, in `out` where given; those of the weights are added to g."""
    if g.bias is None or stats.mean is None:
        return ops.rmsnorm_bwd(dy, x, w.weight, stats.rstd, g.weight, dresidual, out)
    return ops.layernorm_bwd(dy, x, w.weight, stats.mean, stats.rstd, g.weight, g.bias, dresidual, out)

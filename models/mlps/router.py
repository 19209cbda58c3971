"""The router of a mixture: which experts process each token, with which weights; forward and backward.

    w, e = route(y @ router), y the experts' input, or the residual by a norm of the router's own

Legend: N tokens, D width, E experts, k of them for each token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.families.experts import Experts
from trireme.models.linear import Linear, add_gradients_, linear, product_in_fp32, trained, upstream
from trireme.models.norm import Norm
from trireme.models.reader import Reader
from trireme.models.rows import Pass


class RouterWeights(NamedTuple):
    """Weights of a router, or their gradients: empty where a tensor is frozen."""

    spec: Experts
    linear: Linear  # (D, E)
    correction: Tensor | None  # (E,) fp32, frozen
    norm: Norm | None  # then it reads the residual
    expert_scale: Tensor | None  # (E,)


class Routes(NamedTuple):
    """Which experts process each token."""

    logits: Tensor  # (N, E), in fp32 with Experts.fp32 or a correction
    weights: Tensor  # (N, k) fp32
    experts: Tensor  # (N, k) int32
    order: ops.Order
    plain: Tensor | None = None  # weights without expert_scale


def rule(spec: Experts) -> ops.Rule:
    """How the router's logits become weights."""
    groups = spec.groups, spec.kept, spec.two
    return ops.Rule(spec.chosen, spec.renormalise, spec.sigmoid, spec.scale, *groups, spec.raw)


def weights(read: Reader, spec: Experts) -> RouterWeights:
    names = read.layer.mlp_names
    layer, correction = read.linear(names.router, router=True), read.get(names.correction)
    if not names.router_scale:
        return RouterWeights(spec, layer, correction, None, None)
    norm = Norm(read[names.router_scale], read.layer.eps)
    return RouterWeights(spec, layer, correction, norm, read[names.expert_scale])


def route(w: RouterWeights, y: Tensor) -> Routes:
    """The routes of normalised tokens y (N, D). They are never saved: backward computes them again."""
    fp32 = w.spec.fp32 or w.correction is not None
    logits = product_in_fp32(y, w.linear.weight) if fp32 else linear(y, w.linear)
    logits = logits if w.spec.score_scale == 1.0 else logits * w.spec.score_scale
    plain, experts = ops.route_fwd(logits, rule(w.spec), w.correction)
    weights = plain if w.expert_scale is None else plain * w.expert_scale.float()[experts.long()]
    return Routes(logits, weights, experts, ops.sort_pairs(experts, logits.shape[1]), plain)


def backward(p: Pass, w: RouterWeights, g: RouterWeights, routes: Routes, d_weights: Tensor, y: Tensor) -> Tensor:
    """The gradient (N, E) of y @ router, given that of the weights (N, k) fp32; adds to g. y: what `route` read."""
    spec = w.spec
    if w.expert_scale is not None and g.expert_scale is not None and routes.plain is not None:
        chosen = routes.experts.long()
        if trained(g.expert_scale):
            d_scale = d_weights * routes.plain
            g.expert_scale.add_(
                torch.zeros_like(routes.logits, dtype=d_scale.dtype).scatter_(1, chosen, d_scale).sum(0)
            )
        d_weights = d_weights * w.expert_scale.float()[chosen]
    balance = None if p.rows.load is None else p.rows.load.balance()
    d_logits = ops.route_bwd(d_weights, routes.logits, routes.experts, rule(spec), balance).to(y.dtype)
    d_logits = d_logits if spec.score_scale == 1.0 else d_logits * spec.score_scale
    add_gradients_(g.linear, w.linear, y, upstream(d_logits, w.linear, g.linear))
    return d_logits

"""The MLP sub-layer as a mixture of experts: forward and backward over named saved tensors.

    out = x + sum over a token's k experts e of w_e * ((silu(gate) * up) @ down_e),  (gate, up) = norm(x) @ up_e
    w, e = route(norm(x) @ router)

Without a gate an expert is act(y @ up_e) @ down_e. With latents experts read y = norm(x) @ latent_in, (N, L), and
their weighted sum is multiplied by latent_out. A shared expert (Mlp.shared) may be added.

GEMMs run over N k rows sorted by expert; the outputs of a token's experts are added in ascending order of expert. GEMMs
of forward and of the gradients of rows may be in fp8. Gradients of matrices are not: tensor cores read codes along the
width that is summed over, which there are the sorted rows, so codes would have to be written a second time, transposed.

A layer's experts may be computed slice by slice, each slice with its own weights. The tensors that pass from one slice
to the next are `passed` (shapes.passed_shapes).

Saved are x (by the caller); gate_up (N k, 2I), or fc (N k, I), in sorted order, unless experts come in slices; the
tensors of the shared expert; with latents latent_sum (N, L).
Legend: N tokens, D width, E experts, k of them for each token, I hidden width of each, L width of latents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.branch import add_matmul, branch_backward
from trireme.models.families.experts import Experts
from trireme.models.layers import shared_of
from trireme.models.linear import (
    Linear,
    add_gradients_,
    add_matmul_,
    linear,
    linear_backward,
    product_in_fp32,
    trained,
    upstream,
)
from trireme.models.lora import Stacked
from trireme.models.mlps import mlp
from trireme.models.norm import Norm, Stats, norm, norm_backward
from trireme.models.packed import whole
from trireme.models.reader import Reader
from trireme.models.rows import Pass
from trireme.models.sizes import narrow
from trireme.models.sizes.groups import DOWN, GATE_UP, expert_shape, up_name
from trireme.models.sizes.narrow import experts_in_fp8
from trireme.models.sliced import Sliced, Stack, grouped_mm


class Slice(NamedTuple):
    """The experts [first, last) of the `of` experts of a layer."""

    first: int
    last: int
    of: int


class ExpertWeights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen. `up`, `down`: of `part` alone."""

    norm: Norm | None
    router: Linear  # (D, E)
    up: Stack  # (E, D, 2I), gate first or, with a limit, interleaved, or (E, D, I); perhaps a transposed view
    down: Stack  # (E, I, D), likewise; with latents L in place of D
    shared: mlp.MlpWeights | None = None
    up_bias: Tensor | None = None  # (E, 2I)
    down_bias: Tensor | None = None  # (E, D)
    correction: Tensor | None = None  # (E,) fp32, frozen
    up_adapters: Stacked | None = None
    down_adapters: Stacked | None = None
    latent_in: Linear | None = None  # (D, L)
    latent_out: Linear | None = None  # (L, D)
    post: Norm | None = None  # behind the sum
    router_norm: Norm | None = None  # then the router reads the residual
    expert_scale: Tensor | None = None  # (E,)
    fp8: bool = False  # whether GEMMs with `up` and `down` are in fp8, but for their gradients; set by `of_part`
    part: Slice | None = None  # None: all experts

    @property
    def begins(self) -> bool:
        return self.part is None or self.part.first == 0

    @property
    def ends(self) -> bool:
        return self.part is None or self.part.last == self.part.of

    def of_part(self, fp8: bool = False) -> ExpertWeights:
        """These weights with biases and adapters of the experts of `part` alone, and with this `fp8`."""
        if self.part is None:
            return self._replace(fp8=fp8)
        at = slice(self.part.first, self.part.last)
        up_bias, down_bias = (None if bias is None else bias[at] for bias in (self.up_bias, self.down_bias))
        up, down = (w and w._replace(a=w.a[at], b=w.b[at]) for w in (self.up_adapters, self.down_adapters))
        return self._replace(up_bias=up_bias, down_bias=down_bias, up_adapters=up, down_adapters=down, fp8=fp8)


Passed = dict[str, Tensor]  # by the names of shapes.passed_shapes


class Routes(NamedTuple):
    """Which experts process each token."""

    logits: Tensor  # (N, E), in fp32 with Experts.fp32 or a correction
    weights: Tensor  # (N, k) fp32
    experts: Tensor  # (N, k) int32
    order: ops.Order
    plain: Tensor | None = None  # weights without expert_scale


def rule(spec: Experts) -> ops.Rule:
    """How the router's logits become weights."""
    of_groups = spec.groups, spec.kept, spec.two
    return ops.Rule(spec.chosen, spec.renormalise, spec.sigmoid, spec.scale, *of_groups, spec.raw)


def weights(read: Reader, spec: Experts) -> ExpertWeights:
    names, router_norm, expert_scale = read.layer.mlp_names, None, None
    of_shared = mlp.weights(read, one) if (one := shared_of(spec)) else None
    (up, up_bias), (down, down_bias) = (_stack(read, spec, matrix) for matrix in (GATE_UP, DOWN))
    up_adapters, down_adapters = (read.stacked(f"{names.experts}.{matrix}") for matrix in (GATE_UP, DOWN))
    post = read.norm(names.post_experts if len(read.layer.mlps) > 1 else names.post)
    if names.router_scale:
        router_norm, expert_scale = Norm(read[names.router_scale]), read[names.expert_scale]
    latent_in, latent_out = (read.linear(name) if spec.latent else None for name in (names.latent_in, names.latent_out))
    return ExpertWeights(
        read.norm(names.norm_experts or names.norm), read.linear(names.router, router=True), up, down, of_shared,
        up_bias, down_bias, read.get(names.correction), up_adapters, down_adapters, latent_in, latent_out, post,
        router_norm, expert_scale,
    )  # fmt: skip


def _stack(read: Reader, spec: Experts, matrix: str) -> tuple[Stack, Tensor | None]:
    """(matrices (E, in, out), biases (E, out)) of a layer's experts."""
    names, packing = read.layer.mlp_names, read.cfg.packing
    name = f"{names.experts}.{matrix}"
    bias = read.get(f"{name}_bias")
    if bias is not None and trained(bias):
        bias = bias.view(spec.count, -1)
    if name in read.views:
        matrices = whole(packing, name, read.views)
        return matrices if names.experts_in_out else matrices.mT, bias
    assert packing is not None
    packing = packing.of(name)
    parts = tuple(read[name + part.suffix] for part in packing.parts)
    out_in, at_once = not names.experts_in_out, narrow.at_once(read.cfg)
    return Sliced(packing, parts, expert_shape(read.layer, matrix), out_in, at_once), bias


def forward(
    p: Pass, spec: Experts, w: ExpertWeights, x: Tensor, out: Tensor, onto: Tensor, passed: Passed | None = None
) -> None:
    """Fills out (N, D) with onto + the branch of x, and every tensor of p.saved; a slice before the last `passed`, not
    out. `out` may be x or `onto`.
    """
    rows, saved = p.rows, p.saved
    y, _ = norm(x, w.norm, p.layer.eps)
    if w.ends and w.post is None:
        onto = _add_shared(p, spec, w, y, out, onto)
    routes = _routes(spec, w, _read(p, w, x, y)[0], passed)
    if rows.load is not None and w.begins:
        rows.load.add(p.number, routes.order, routes.logits)
    at, order, k = w.of_part(experts_in_fp8(p.cfg, p.layer, len(x))), _within(routes.order, w.part), rule(spec).k
    z = y if w.latent_in is None else linear(y, w.latent_in)
    gate_up = _up(at, z, order, k, saved.get(up_name(spec)))
    del z
    act = _activation(spec, gate_up)
    del gate_up
    if w.post is not None:
        total = _total(p, spec, at, act, y, routes)
        add_matmul(spec.factor, p.layer.post_eps, onto, total, w.post, out)
        return
    del y
    if w.latent_out is None:
        _sum(at, act, routes.weights, order, k, onto if w.ends else None, *_sums(w, order, passed, out))
        return
    total = _sum(at, act, routes.weights, order, k, None, saved.get("latent_sum"))
    del act
    torch.add(onto, linear(total, w.latent_out), out=out)


def _read(p: Pass, w: ExpertWeights, x: Tensor, y: Tensor) -> tuple[Tensor, Stats | None]:
    """What the router reads: y, or x by its own norm."""
    return (y, None) if w.router_norm is None else norm(x, w.router_norm, p.layer.eps)


def _sum(w: ExpertWeights, act: Tensor, weights: Tensor, order: ops.Order, k: int, *into: Tensor | None) -> Tensor:
    """Each token's weighted sum, (N, D) or (N, L); `into`: residual, out, carry and among of ops.combine."""
    ranked = grouped_mm(act, w.down, order, bias=w.down_bias, fp8=w.fp8, adapters=w.down_adapters)
    if w.down_adapters is not None:
        w.down_adapters.add_(ranked, act, order)
    return ops.combine(ranked, order, k, weights, *into)


def _total(p: Pass, spec: Experts, w: ExpertWeights, act: Tensor, y: Tensor, routes: Routes) -> Tensor:
    """The input of the norm behind the experts, (N, D): their sum, with the shared one's result; saved if it can be."""
    beside = None if w.shared is None else torch.zeros_like(y)
    if beside is not None:
        _add_shared(p, spec, w, y, beside, beside)
    return _sum(w, act, routes.weights, routes.order, spec.chosen, beside, p.saved.get("mlp_branch"))


def _add_shared(p: Pass, spec: Experts, w: ExpertWeights, y: Tensor, out: Tensor, onto: Tensor) -> Tensor:
    """Fills out (N, D) with onto + what a shared expert adds, and returns it; onto where there is none."""
    one = shared_of(spec)
    if one is None or w.shared is None:
        return onto
    mlp.forward(p, one, w.shared, y, out, onto)
    return out


def _activation(spec: Experts, gate_up: Tensor) -> Tensor:
    return ops.act_fwd(gate_up, ops.Act(spec.act, spec.gated, spec.limit))


def _activation_backward(
    spec: Experts, d_act: Tensor, gate_up: Tensor, routes: Routes
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate_up (P, 2I), weighted activation (P, I), gradient of the weights (N, k) fp32)."""
    act = ops.Act(spec.act, spec.gated, spec.limit)
    d_weights = ops.act_bwd_(d_act, gate_up, act, weights=routes.weights, order=routes.order)
    assert d_weights is not None
    return gate_up, d_act, d_weights


def _routes(spec: Experts, w: ExpertWeights, y: Tensor, passed: Passed | None) -> Routes:
    """The routes of y (N, D): found by the first slice, read from `passed` by others, which have no logits."""
    if passed is None or w.begins:
        routes = route(spec, w, y)
        if passed is not None:
            passed["weights"].copy_(routes.weights)
            passed["experts"].copy_(routes.experts)
        return routes
    experts = passed["experts"]
    return Routes(y[:0], passed["weights"], experts, ops.sort_pairs(experts, spec.count))


def _within(order: ops.Order, part: Slice | None) -> ops.Order:
    """`order` with the starts of a slice's experts alone."""
    return order if part is None else order._replace(starts=order.starts[part.first : part.last + 1], sliced=True)


def _sums(
    w: ExpertWeights, order: ops.Order, passed: Passed | None, out: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The arguments (out, carry, among) of ops.combine."""
    if w.part is None or passed is None:
        return out, None, None
    return out if w.ends else passed["sum"], None if w.begins else passed["sum"], order.starts


def _up(w: ExpertWeights, y: Tensor, order: ops.Order, k: int, out: Tensor | None = None) -> Tensor:
    gate_up = grouped_mm(y, w.up, order, k, out, w.up_bias, fp8=w.fp8, adapters=w.up_adapters)
    if w.up_adapters is not None:
        w.up_adapters.add_(gate_up, y, order, k)
    return gate_up


def route(spec: Experts, w: ExpertWeights, y: Tensor) -> Routes:
    """The routes of normalised tokens y (N, D). They are never saved: backward computes them again."""
    fp32 = spec.fp32 or w.correction is not None
    logits = product_in_fp32(y, w.router.weight) if fp32 else linear(y, w.router)
    logits = logits if spec.score_scale == 1.0 else logits * spec.score_scale
    plain, experts = ops.route_fwd(logits, rule(spec), w.correction)
    weights = plain if w.expert_scale is None else plain * w.expert_scale.float()[experts.long()]
    return Routes(logits, weights, experts, ops.sort_pairs(experts, logits.shape[1]), plain)


def backward(
    p: Pass,
    spec: Experts,
    w: ExpertWeights,
    g: ExpertWeights,
    x: Tensor,
    dy: Tensor,
    dx: Tensor | None,
    onto: Tensor,
    passed: Passed | None = None,
) -> Tensor:
    """onto + the gradient of x (N, D), in `dx` if given; adds to g, given dy (N, D). Recomputes what is not in p.saved.

    A saved gate_up or fc is overwritten by its gradient. Of a slice before the last, `passed` is filled, and the result
    is the sum of gradients so far.
    """
    saved = p.saved
    y, stats = norm(x, w.norm, p.layer.eps)
    read, read_stats = _read(p, w, x, y)
    routes = route(spec, w, read) if w.ends else _routes(spec, w, read, passed)
    whole, whole_g = w, g
    w, g = w.of_part(experts_in_fp8(p.cfg, p.layer, len(x))), g._replace(part=w.part).of_part()
    order, k = _within(routes.order, w.part), rule(spec).k
    z = y if w.latent_in is None else linear(y, w.latent_in)
    gate_up = saved[up_name(spec)] if up_name(spec) in saved else _up(w, z, order, k)
    d_sum = _latent_out_backward(p, spec, w, g, routes, gate_up, dy)
    if w.post is not None:
        total = saved.get("mlp_branch")
        total = _total(p, spec, w, _activation(spec, gate_up), y, routes) if total is None else total
        dy = d_sum = branch_backward(spec.factor, p.layer.post_eps, dy, total, w.router, w.post, g.post, total)
        del total
    d_act, d_down = _down_backward(w, order, k, d_sum)
    d_gate_up, act, d_weights = _activation_backward(spec, d_act, gate_up, routes._replace(order=order))
    del gate_up, d_act
    if isinstance(g.down, Tensor) and trained(g.down):
        ops.grouped_add_(g.down, act, d_sum, order, 0, k)
    if d_down is not None:
        _adapter_gradients_(w.down_adapters, g.down_adapters, act, d_down, d_sum, order, k_dy=k)
    del act
    if w.up_bias is not None and g.up_bias is not None and trained(g.up_bias):
        ones = d_gate_up.new_ones((len(d_gate_up), 1))
        ops.grouped_add_(g.up_bias[:, None], ones, d_gate_up, order)
    del d_sum
    d_rows = _up_backward(w, g, order, k, z, d_gate_up)
    del z, d_gate_up
    d_norm = ops.combine(d_rows, order, k, None, None, *_sums(w, order, passed, None))
    del d_rows
    d_weights = _of_all(w, routes, d_weights, passed)
    if not w.ends:
        return d_norm
    _down_bias_gradients_(whole, whole_g, routes, d_weights, dy)
    if w.latent_in is not None and g.latent_in is not None:
        d_in = upstream(d_norm, w.latent_in, g.latent_in)
        add_gradients_(g.latent_in, w.latent_in, y, d_in)
        d_norm = linear_backward(d_in, w.latent_in)
        del d_in
    d_logits = _router_backward(p, spec, w, g, routes, d_weights, read)
    if w.router_norm is None:
        d_norm.addmm_(d_logits, w.router.weight.T)
    if (one := shared_of(spec)) and w.shared is not None and g.shared is not None:
        mlp.backward(p, one, w.shared, g.shared, y, dy, d_norm, d_norm)
    del y
    dx = norm_backward(d_norm, x, w.norm, stats, g.norm, onto, dx)
    if w.router_norm is not None:
        dx = norm_backward(torch.mm(d_logits, w.router.weight.T), x, w.router_norm, read_stats, g.router_norm, dx, dx)
    return dx


def _router_backward(
    p: Pass, spec: Experts, w: ExpertWeights, g: ExpertWeights, routes: Routes, d_weights: Tensor, read: Tensor
) -> Tensor:
    """The gradient of the logits, as the router's product gives them, (N, E); adds to g. read: the router's input."""
    if w.expert_scale is not None and g.expert_scale is not None and routes.plain is not None:
        chosen = routes.experts.long()
        if trained(g.expert_scale):
            d_scale = d_weights * routes.plain
            g.expert_scale.add_(
                torch.zeros_like(routes.logits, dtype=d_scale.dtype).scatter_(1, chosen, d_scale).sum(0)
            )
        d_weights = d_weights * w.expert_scale.float()[chosen]
    balance = None if p.rows.load is None else p.rows.load.balance()
    d_logits = ops.route_bwd(d_weights, routes.logits, routes.experts, rule(spec), balance).to(read.dtype)
    d_logits = d_logits if spec.score_scale == 1.0 else d_logits * spec.score_scale
    add_gradients_(g.router, w.router, read, d_logits)
    return d_logits


def _latent_out_backward(
    p: Pass, spec: Experts, w: ExpertWeights, g: ExpertWeights, routes: Routes, gate_up: Tensor, dy: Tensor
) -> Tensor:
    """The gradient of each token's weighted sum: dy, or with latents (N, L)."""
    if w.latent_out is None or g.latent_out is None:
        return dy
    d_out = upstream(dy, w.latent_out, g.latent_out)
    total = p.saved.get("latent_sum")
    if total is None:
        total = _sum(w, _activation(spec, gate_up), routes.weights, routes.order, rule(spec).k)
    add_gradients_(g.latent_out, w.latent_out, total, d_out)
    return linear_backward(d_out, w.latent_out)


def _down_backward(w: ExpertWeights, order: ops.Order, k: int, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """(gradient of the activation (P, I), before the weights; with adapters of `down` that of x A^T (P, R))."""
    d_act = grouped_mm(dy, w.down, order, k, back=True, fp8=w.fp8, adapters=w.down_adapters)
    if w.down_adapters is None:
        return d_act, None
    d_down = w.down_adapters.down_gradient(dy, order, k)
    w.down_adapters.add_backward_(d_act, d_down, order)
    return d_act, d_down


def _up_backward(w: ExpertWeights, g: ExpertWeights, order: ops.Order, k: int, z: Tensor, d_gate_up: Tensor) -> Tensor:
    """The gradient of what experts read, by sorted row (P, D) or (P, L); adds to g."""
    if isinstance(g.up, Tensor) and trained(g.up):
        ops.grouped_add_(g.up, z, d_gate_up, order, k)
    d_rows = grouped_mm(d_gate_up, w.up, order, back=True, fp8=w.fp8, adapters=w.up_adapters)
    if w.up_adapters is not None:
        d_up = w.up_adapters.down_gradient(d_gate_up, order)
        _adapter_gradients_(w.up_adapters, g.up_adapters, z, d_up, d_gate_up, order, k)
        w.up_adapters.add_backward_(d_rows, d_up, order)
    return d_rows


def _adapter_gradients_(
    w: Stacked | None, g: Stacked | None, x: Tensor, dh: Tensor, dy: Tensor, order: ops.Order, k: int = 0, k_dy: int = 0
) -> None:
    """Adds to g, given x, the gradient dh (P, R) of x A^T, and dy. x is by token if k > 0, dy if k_dy > 0."""
    if w is not None and g is not None:
        ops.grouped_add_(g.a, dh, x, order, 0, k)
        ops.grouped_add_(g.b, w.down(x, order, k).mul_(w.scale), dy, order, 0, k_dy)


def _of_all(w: ExpertWeights, routes: Routes, d_weights: Tensor, passed: Passed | None) -> Tensor:
    """The gradients of weights (N, k) of this slice's experts, merged with those of the slices before."""
    if w.part is None or passed is None:
        return d_weights
    mine = (routes.experts >= w.part.first) & (routes.experts < w.part.last)
    return torch.where(mine, d_weights, d_weights if w.begins else passed["d_weights"], out=passed["d_weights"])


def _down_bias_gradients_(w: ExpertWeights, g: ExpertWeights, routes: Routes, d_weights_: Tensor, dy: Tensor) -> None:
    """Adds the gradient of the bias of `down` to g, and the bias's part of the weights' gradient to d_weights_."""
    if w.down_bias is not None:
        chosen = routes.experts.long()
        d_weights_ += torch.mm(dy, w.down_bias.T).float().gather(1, chosen)
        if g.down_bias is not None and trained(g.down_bias):
            by_expert = torch.zeros_like(routes.logits).scatter_(1, chosen, routes.weights.to(dy.dtype))
            add_matmul_(g.down_bias, by_expert, dy)

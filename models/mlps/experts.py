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
from trireme.models.branch import add_normed, normed_backward
from trireme.models.families.experts import Experts
from trireme.models.layers import shared_of
from trireme.models.linear import Linear, add_gradients_, add_matmul_, linear, linear_backward, trained, upstream
from trireme.models.mlps import mlp, router
from trireme.models.mlps.grouped import Grouped, Slice, grouped, grouped_backward, grouped_gradients_, grouped_linear
from trireme.models.mlps.router import RouterWeights, Routes, route
from trireme.models.norm import Norm, Stats, norm, norm_backward
from trireme.models.reader import Reader
from trireme.models.rows import Pass
from trireme.models.sizes.groups import DOWN, GATE_UP, up_name
from trireme.models.sizes.narrow import experts_in_fp8


class ExpertWeights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen. `up`, `down`: of `part` alone."""

    spec: Experts
    norm: Norm | None
    router: RouterWeights
    up: Grouped  # (E, D, 2I), gate first or, with a limit, interleaved, or (E, D, I)
    down: Grouped  # (E, I, D); with latents L in place of D
    shared: mlp.MlpWeights | None
    latent_in: Linear | None  # (D, L)
    latent_out: Linear | None  # (L, D)
    post: Norm | None  # behind the sum
    part: Slice | None = None  # None: all experts

    @property
    def begins(self) -> bool:
        return self.part is None or self.part.first == 0

    @property
    def ends(self) -> bool:
        return self.part is None or self.part.last == self.part.total

    def sliced(self, part: Slice | None, fp8: bool = False) -> ExpertWeights:
        """These weights with biases and adapters of the experts of `part` alone, and with GEMMs in fp8 or not."""
        return self._replace(up=self.up.sliced(part, fp8), down=self.down.sliced(part, fp8), part=part)


Passed = dict[str, Tensor]  # by the names of shapes.passed_shapes


def weights(read: Reader, spec: Experts) -> ExpertWeights:
    names = read.layer.mlp_names
    shared_mlp = mlp.weights(read, shared) if (shared := shared_of(spec)) else None
    post = read.norm(names.post_experts if len(read.layer.mlps) > 1 else names.post, read.layer.post_eps)
    latent_in, latent_out = (read.linear(name) if spec.latent else None for name in (names.latent_in, names.latent_out))
    return ExpertWeights(
        spec, read.norm(names.norm_experts or names.norm), router.weights(read, spec), grouped(read, GATE_UP),
        grouped(read, DOWN), shared_mlp, latent_in, latent_out, post,
    )  # fmt: skip


def forward(p: Pass, w: ExpertWeights, x: Tensor, out: Tensor, onto: Tensor, passed: Passed | None = None) -> None:
    """Fills out (N, D) with onto + the branch of x, and every tensor of p.saved; a slice before the last `passed`, not
    out. `out` may be x or `onto`.
    """
    load, saved, k = p.rows.load, p.saved, w.spec.chosen
    y, _ = norm(x, w.norm)
    if w.ends and w.post is None:
        onto = _add_shared(p, w, y, out, onto)
    routes = _routes(w, _router_input(w, x, y)[0], passed)
    if load is not None and w.begins:
        load.add(p.number, routes.order, routes.logits)
    w_part, order = w.sliced(w.part, experts_in_fp8(p.cfg, p.layer, len(x))), _slice_order(routes.order, w.part)
    z = y if w.latent_in is None else linear(y, w.latent_in)
    gate_up = grouped_linear(z, w_part.up, order, k, saved.get(up_name(w.spec)))
    del z
    act = ops.act_fwd(gate_up, _act(w.spec))
    del gate_up
    if w.post is not None:
        add_normed(w.post, w.spec.factor, onto, _total(p, w_part, act, y, routes), out)
        return
    del y
    if w.latent_out is None:
        _sum(w_part, act, routes.weights, order, onto if w.ends else None, *_sums(w, order, passed, out))
        return
    total = _sum(w_part, act, routes.weights, order, None, saved.get("latent_sum"))
    del act
    torch.add(onto, linear(total, w.latent_out), out=out)


def _router_input(w: ExpertWeights, x: Tensor, y: Tensor) -> tuple[Tensor, Stats | None]:
    """What the router reads: y, or x by its own norm."""
    return (y, None) if w.router.norm is None else norm(x, w.router.norm)


def _sum(w: ExpertWeights, act: Tensor, weights: Tensor, order: ops.Order, *buffers: Tensor | None) -> Tensor:
    """Each token's weighted sum, (N, D) or (N, L); `buffers`: residual, out, carry and starts of ops.combine."""
    return ops.combine(grouped_linear(act, w.down, order), order, w.spec.chosen, weights, *buffers)


def _total(p: Pass, w: ExpertWeights, act: Tensor, y: Tensor, routes: Routes) -> Tensor:
    """The input of the norm behind the experts, (N, D): their sum, with the shared one's result; saved if it can be."""
    shared = None if w.shared is None else torch.zeros_like(y)
    if shared is not None:
        _add_shared(p, w, y, shared, shared)
    return _sum(w, act, routes.weights, routes.order, shared, p.saved.get("mlp_branch"))


def _add_shared(p: Pass, w: ExpertWeights, y: Tensor, out: Tensor, onto: Tensor) -> Tensor:
    """Fills out (N, D) with onto + what a shared expert adds, and returns it; onto where there is none."""
    if w.shared is None:
        return onto
    mlp.forward(p, w.shared, y, out, onto)
    return out


def _act(spec: Experts) -> ops.Act:
    return ops.Act(spec.act, spec.gated, spec.limit)


def _routes(w: ExpertWeights, y: Tensor, passed: Passed | None) -> Routes:
    """The routes of y (N, D): found by the first slice, read from `passed` by others, which have no logits."""
    if passed is None or w.begins:
        routes = route(w.router, y)
        if passed is not None:
            passed["weights"].copy_(routes.weights)
            passed["experts"].copy_(routes.experts)
        return routes
    experts = passed["experts"]
    return Routes(y[:0], passed["weights"], experts, ops.sort_pairs(experts, w.spec.count))


def _slice_order(order: ops.Order, part: Slice | None) -> ops.Order:
    """`order` with the starts of a slice's experts alone."""
    return order if part is None else order._replace(starts=order.starts[part.first : part.last + 1], sliced=True)


def _sums(
    w: ExpertWeights, order: ops.Order, passed: Passed | None, out: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The arguments (out, carry, starts) of ops.combine."""
    if w.part is None or passed is None:
        return out, None, None
    return out if w.ends else passed["sum"], None if w.begins else passed["sum"], order.starts


def backward(
    p: Pass,
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
    spec, name = w.spec, up_name(w.spec)
    y, stats = norm(x, w.norm)
    read, read_stats = _router_input(w, x, y)
    routes = route(w.router, read) if w.ends else _routes(w, read, passed)
    full_w, full_g = w, g
    w, g = w.sliced(w.part, experts_in_fp8(p.cfg, p.layer, len(x))), g.sliced(w.part)
    order, k = _slice_order(routes.order, w.part), spec.chosen
    z = y if w.latent_in is None else linear(y, w.latent_in)
    gate_up = p.saved[name] if name in p.saved else grouped_linear(z, w.up, order, k)
    d_sum = _sum_backward(p, w, g, routes, gate_up, y, dy)
    dy = d_sum if w.post is not None else dy
    d_act, d_down = grouped_backward(d_sum, w.down, order, k)
    d_weights = ops.act_bwd_(d_act, gate_up, _act(spec), weights=routes.weights, order=order)
    assert d_weights is not None
    act, d_gate_up = d_act, gate_up  # in their memory
    del d_act, gate_up
    grouped_gradients_(g.down, w.down, act, d_sum, d_down, order, k_dy=k)
    del act, d_sum, d_down
    d_rows, d_up = grouped_backward(d_gate_up, w.up, order)
    grouped_gradients_(g.up, w.up, z, d_gate_up, d_up, order, k)
    del z, d_gate_up, d_up
    d_norm = ops.combine(d_rows, order, k, None, None, *_sums(w, order, passed, None))
    del d_rows
    d_weights = _merge_d_weights(w, routes, d_weights, passed)
    if not w.ends:
        return d_norm
    _down_bias_gradients_(full_w.down, full_g.down, routes, d_weights, dy)
    if w.latent_in is not None and g.latent_in is not None:
        d_in = upstream(d_norm, w.latent_in, g.latent_in)
        add_gradients_(g.latent_in, w.latent_in, y, d_in)
        d_norm = linear_backward(d_in, w.latent_in)
        del d_in
    d_logits = router.backward(p, w.router, g.router, routes, d_weights, read)
    if w.router.norm is None:
        d_norm.addmm_(d_logits, w.router.linear.weight.T)
    if w.shared is not None and g.shared is not None:
        mlp.backward(p, w.shared, g.shared, y, dy, d_norm, d_norm)
    del y
    dx = norm_backward(d_norm, x, w.norm, stats, g.norm, onto, dx)
    if w.router.norm is not None:
        d_read = torch.mm(d_logits, w.router.linear.weight.T)
        dx = norm_backward(d_read, x, w.router.norm, read_stats, g.router.norm, dx, dx)
    return dx


def _sum_backward(
    p: Pass, w: ExpertWeights, g: ExpertWeights, routes: Routes, gate_up: Tensor, y: Tensor, dy: Tensor
) -> Tensor:
    """The gradient of each token's weighted sum: dy, that of the norm behind it, or with latents (N, L); adds to g."""
    act = lambda: ops.act_fwd(gate_up, _act(w.spec))
    if w.post is not None:
        total = p.saved.get("mlp_branch")
        total = _total(p, w, act(), y, routes) if total is None else total
        return normed_backward(w.post, g.post, w.spec.factor, dy, total)
    if w.latent_out is None or g.latent_out is None:
        return dy
    d_out = upstream(dy, w.latent_out, g.latent_out)
    total = p.saved.get("latent_sum")
    total = _sum(w, act(), routes.weights, routes.order) if total is None else total
    add_gradients_(g.latent_out, w.latent_out, total, d_out)
    return linear_backward(d_out, w.latent_out)


def _merge_d_weights(w: ExpertWeights, routes: Routes, d_weights: Tensor, passed: Passed | None) -> Tensor:
    """The gradients of weights (N, k) of this slice's experts, merged with those of the slices before."""
    if w.part is None or passed is None:
        return d_weights
    mask = (routes.experts >= w.part.first) & (routes.experts < w.part.last)
    return torch.where(mask, d_weights, d_weights if w.begins else passed["d_weights"], out=passed["d_weights"])


def _down_bias_gradients_(w: Grouped, g: Grouped, routes: Routes, d_weights_: Tensor, dy: Tensor) -> None:
    """Adds the gradient of the bias of `down` to g, and the bias's part of the weights' gradient to d_weights_."""
    if w.bias is not None:
        chosen = routes.experts.long()
        d_weights_ += torch.mm(dy, w.bias.T).float().gather(1, chosen)
        if g.bias is not None and trained(g.bias):
            by_expert = torch.zeros_like(routes.logits).scatter_(1, chosen, routes.weights.to(dy.dtype))
            add_matmul_(g.bias, by_expert, dy)

"""The MLP sub-layer of a block: explicit forward and backward over named saved tensors.

    out = x + (silu(gate) * up) @ down, (gate, up) = norm(x) @ gate_up        cfg.gated; gelu if not own.act == "silu"
    out = x + gelu(norm(x) @ fc) @ down                                       otherwise; with cfg.relu2 relu squared

gate is multiplied by own.gate_scale. branch.py describes a norm behind `down` and a factor. Saved are x (by the
caller), gate_up (N, 2F) or fc (N, F) without its bias, and where a norm follows `down` its input mlp_branch (N, D).
Legend: N tokens, D width, F hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.branch import add_branch, branch_backward, copies
from trireme.models.families.experts import Experts
from trireme.models.layers import Mlp
from trireme.models.linear import (
    Gradient,
    Linear,
    Operand,
    Upstream,
    add_gradients_,
    linear,
    linear_backward,
    or_scratch,
    trained,
    turned_alone,
    upstream,
)
from trireme.models.norm import Norm, norm_backward, norm_for
from trireme.models.rows import Pass
from trireme.models.sizes.shapes import up_name


class Weights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen."""

    norm: Norm | None
    up: Linear  # (D, 2F), gate first, or (D, F)
    down: Linear  # (F, D)
    post: Norm | None = None
    gelu_bias: Tensor | None = None  # (F,): bias of fc, added by the activation's kernel


def forward(p: Pass, w: Weights, x: Tensor, out: Tensor, onto: Tensor | None = None) -> None:
    """Fills out (N, D), which may be x, and every tensor of p.saved; the others are temporaries.

    The result is added to x, or with cfg.parallel to what `out` holds already: x with what attention adds to it.
    """
    layer, own = p.layer, p.mlp
    copy = out if copies(w.norm, w.post, w.down) and not layer.parallel and onto is None else None
    y, _ = norm_for(w.up, x, w.norm, layer.eps, copy)
    up = _project(own, w, y, p.saved.get(up_name(own)), x.dtype)
    del y  # workspace._block_workspace
    act = _activation(own, up, w)
    del up  # workspace._block_workspace
    onto = (out if layer.parallel else x) if onto is None else onto
    add_branch(own.factor, layer.eps, onto, act, w.down, w.norm, w.post, out, p.saved.get("mlp_branch"))


def backward(
    p: Pass, w: Weights, g: Weights, x: Tensor, dy: Tensor, dx: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """The gradient of x (N, D), in `dx` if given; adds to g, given dy (N, D). Recomputes what is not in p.saved."""
    own, saved = p.mlp, p.saved
    again = up_name(own) not in saved
    y, stats = norm_for(w.up, x, w.norm, p.layer.eps, forward=again, backward=trained(g.up.weight))
    up = _project(own, w, y, None, x.dtype) if again else saved[up_name(own)]
    y = turned_alone(y)
    d_down = upstream(_branch_backward(p, w, g, dy, up), w.down, g.down)
    dup, act = _activation_backward(own, linear_backward(d_down, w.down), up, w, g)
    del up  # workspace._block_workspace
    add_gradients_(g.down, w.down, act, d_down)
    del act, d_down  # workspace._block_workspace
    d_up = upstream(dup, w.up, g.up)
    del dup  # workspace._block_workspace
    add_gradients_(g.up, w.up, y, d_up)
    del y  # workspace._block_workspace
    d_norm = linear_backward(d_up, w.up)
    del d_up  # workspace._block_workspace
    return norm_backward(d_norm, x, w.norm, stats, g.norm, dy if onto is None else onto, dx)


def act_of(own: Mlp | Experts) -> ops.Act:
    return ops.Act(own.act, own.gated, own.limit if isinstance(own, Experts) else 0.0)


def _project(own: Mlp, w: Weights, y: Operand, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    up = linear(y, w.up, out, dtype)
    _scale_gate_(own, up)
    return up


def _scale_gate_(own: Mlp, up_: Tensor) -> None:
    if own.gate_scale != 1.0:
        up_[:, : own.width].mul_(own.gate_scale)


def _branch_backward(p: Pass, w: Weights, g: Weights, dy: Tensor, up: Tensor) -> Tensor:
    matmul = p.saved.get("mlp_branch")
    again = w.post is not None and matmul is None
    act: Operand = _activation(p.mlp, up, w) if again else up  # unread unless recomputing
    return branch_backward(p.mlp.factor, p.layer.eps, dy, act, w.down, w.post, g.post, matmul)


def _activation(own: Mlp, up: Tensor, w: Weights) -> Operand:
    if own.gated and w.down.takes_codes:
        act = ops.act_fwd(up, act_of(own), most_=(most := ops.new_maxima(up)))
        return ops.quantize(act, most=most)
    return ops.act_fwd(up, act_of(own), w.gelu_bias)


def _activation_backward(own: Mlp, d_act: Tensor, up: Tensor, w: Weights, g: Weights) -> tuple[Upstream, Operand]:
    """(gradient of the first layer's result, the activation that `down` reads), in the memory of `up` and d_act."""
    plain = w.up.bias is None and own.gate_scale == 1.0
    if own.gated and w.down.takes_codes and w.up.takes_codes and plain:
        columns = trained(g.up.weight) or trained(g.down.weight)
        codes, act = ops.act_codes_bwd(d_act, up, act_of(own), columns)
        return Gradient(codes, d_act.dtype), act
    dbias = None if w.gelu_bias is None or g.gelu_bias is None else or_scratch(g.gelu_bias, w.gelu_bias)
    ops.act_bwd_(d_act, up, act_of(own), w.gelu_bias, dbias)
    _scale_gate_(own, up)
    return up, d_act

"""The MLP sub-layer of a block: explicit forward and backward over named saved tensors.

    out = x + (act(gate) * up) @ down, (gate, up) = norm(x) @ gate_up         if Mlp.gated
    out = x + act(norm(x) @ fc) @ down                                        otherwise

gate is multiplied by Mlp.gate_scale. branch.py describes a norm behind `down` and a factor. An expert that processes
every token (Mlp.shared) has no norm: what it adds is s * (... @ down), s = sigmoid(x @ its gate), or the factor. Saved
are x (by the caller), gate_up (N, 2F) or fc (N, F) without its bias, of a shared expert shared_up (N, 2F) or (N, F),
and where a norm follows `down` its input mlp_branch (N, D).
Legend: N tokens, D width, F hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.branch import Branch, add_branch, branch, branch_backward
from trireme.models.layers import Mlp
from trireme.models.linear import (
    Gradient,
    Linear,
    Operand,
    add_gradients_,
    add_matmul_,
    columns_alone,
    linear,
    linear_backward,
    or_scratch,
    trained,
    upstream,
)
from trireme.models.norm import Norm, norm_backward, norm_for
from trireme.models.reader import Reader
from trireme.models.rows import Pass
from trireme.models.sizes.groups import up_name


class MlpWeights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen."""

    spec: Mlp
    norm: Norm | None
    up: Linear  # (D, 2F), gate first, or (D, F)
    down: Branch  # (F, D)
    gelu_bias: Tensor | None = None  # (F,): bias of fc, added by the activation's kernel
    gate: Tensor | None = None  # (1, D) of a shared expert


def weights(read: Reader, spec: Mlp) -> MlpWeights:
    names, first = read.layer.mlp_names, read.linear(*read.layer.mlp_names.up)
    if spec.shared:
        down = branch(read, names.down, "", spec.factor, None)
        return MlpWeights(spec, None, first, down, gate=read.get(f"{names.shared_gate}.weight"))
    norm = read.norm(names.norm)
    down = branch(read, names.down, names.post_mlp or names.post, spec.factor, norm)
    if spec.first_bias or not spec.bias:
        return MlpWeights(spec, norm, first, down)
    return MlpWeights(spec, norm, first._replace(bias=None), down, gelu_bias=first.bias)


def forward(p: Pass, w: MlpWeights, x: Tensor, out: Tensor, onto: Tensor) -> None:
    """Fills out (N, D) with onto + the branch of x, and every tensor of p.saved; the others are temporaries.

    `out` may be x or `onto`.
    """
    y, _ = norm_for(w.up, x, w.norm, out if onto is x and w.down.copies else None)
    up = _project(w, y, p.saved.get(up_name(w.spec)), x.dtype)
    del y
    act = _activation(w, up)
    del up
    if w.spec.shared:
        ops.combine(linear(act, w.down.linear, dtype=x.dtype), _order(x), 1, _shares(w, x), onto, out)
        return
    add_branch(w.down, onto, act, out, p.saved.get("mlp_branch"))


def backward(p: Pass, w: MlpWeights, g: MlpWeights, x: Tensor, dy: Tensor, dx: Tensor | None, onto: Tensor) -> Tensor:
    """onto + the gradient of x (N, D), in `dx` if given; adds to g, given dy (N, D). Recomputes what is not in p.saved.

    A saved gate_up, fc or shared_up is overwritten by its gradient, and so is `onto` by that of a shared expert's gate.
    """
    name, down = up_name(w.spec), w.down.linear
    recompute = name not in p.saved
    y, stats = norm_for(w.up, x, w.norm, forward=recompute, backward=trained(g.up.weight))
    up = _project(w, y, None, x.dtype) if recompute else p.saved[name]
    y = columns_alone(y)
    shares = _shares(w, x) if w.spec.shared else None
    d_down = upstream(_branch_backward(p, w, g, dy, up), down, g.down.linear)
    dup, act, d_shares = _activation_backward(w, g, linear_backward(d_down, down), up, shares)
    del up
    add_gradients_(g.down.linear, down, act, d_down)
    del act, d_down
    d_up = upstream(dup, w.up, g.up)
    del dup
    add_gradients_(g.up, w.up, y, d_up)
    del y
    if shares is not None and d_shares is not None:
        _gate_backward_(w, g, x, shares, d_shares, onto)
    d_norm = linear_backward(d_up, w.up)
    del d_up
    return norm_backward(d_norm, x, w.norm, stats, g.norm, onto, dx)


def _shares(w: MlpWeights, x: Tensor) -> Tensor:
    """What a shared expert's result is multiplied by, of each token, (N, 1) fp32."""
    if w.gate is None:
        return torch.full((len(x), 1), w.down.factor, dtype=torch.float32, device=x.device)
    return torch.sigmoid(torch.mm(x, w.gate.T).float())


def _order(x: Tensor) -> ops.Order:
    """An Order of rows that are in the order of their tokens, one each."""
    rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
    return ops.Order(rows, rows, rows[:0])


def _gate_backward_(w: MlpWeights, g: MlpWeights, x: Tensor, shares: Tensor, d_shares: Tensor, dx_: Tensor) -> None:
    """Adds the gradients of a shared expert's gate to g and dx_ (N, D), given its shares and their gradients (N, 1)."""
    if w.gate is None or g.gate is None:
        return
    d_gate = (d_shares * shares * (1 - shares)).to(x.dtype)
    if trained(g.gate):
        add_matmul_(g.gate, d_gate, x)
    dx_.addmm_(d_gate, w.gate)


def _act(spec: Mlp) -> ops.Act:
    return ops.Act(spec.act, spec.gated, 0.0)


def _project(w: MlpWeights, y: Operand, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    up = linear(y, w.up, out, dtype)
    _scale_gate_(w.spec, up)
    return up


def _scale_gate_(spec: Mlp, up_: Tensor) -> None:
    if spec.gate_scale != 1.0:
        up_[:, : spec.width].mul_(spec.gate_scale)


def _branch_backward(p: Pass, w: MlpWeights, g: MlpWeights, dy: Tensor, up: Tensor) -> Tensor:
    if w.spec.shared:
        return dy
    matmul = p.saved.get("mlp_branch")
    act = _activation(w, up) if w.down.norm is not None and matmul is None else None
    return branch_backward(w.down, g.down, dy, act, matmul)


def _activation(w: MlpWeights, up: Tensor) -> Operand:
    if w.spec.gated and w.down.linear.takes_codes:
        act = ops.act_fwd(up, _act(w.spec), maxima_=(maxima := ops.new_maxima(up)))
        return ops.quantize(act, maxima=maxima)
    return ops.act_fwd(up, _act(w.spec), w.gelu_bias)


def _activation_backward(
    w: MlpWeights, g: MlpWeights, d_act: Tensor, up: Tensor, shares: Tensor | None
) -> tuple[Tensor | Gradient, Operand, Tensor | None]:
    """(gradient of the first layer's result, the activation that `down` reads), in the memory of `up` and d_act.

    And the gradient of a shared expert's shares, by which that activation is multiplied.
    """
    spec = w.spec
    plain = w.up.bias is None and spec.gate_scale == 1.0 and shares is None
    if spec.gated and w.down.linear.takes_codes and w.up.takes_codes and plain:
        columns = trained(g.up.weight) or trained(g.down.linear.weight)
        codes, act = ops.act_codes_bwd(d_act, up, _act(spec), columns)
        return Gradient(d_act.dtype, None, codes), act, None
    dbias = None if w.gelu_bias is None or g.gelu_bias is None else or_scratch(g.gelu_bias, w.gelu_bias)
    order = None if shares is None else _order(up)
    d_shares = ops.act_bwd_(d_act, up, _act(spec), w.gelu_bias, dbias, shares, order)
    _scale_gate_(spec, up)
    return up, d_act, d_shares

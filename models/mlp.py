"""The MLP sub-layer of a block: explicit forward and backward over named saved tensors.

    out = x + (silu(gate) * up) @ down, (gate, up) = norm(x) @ gate_up        cfg.gated; gelu if not cfg.silu
    out = x + gelu(norm(x) @ fc) @ down                                       otherwise; with cfg.relu2 relu squared

gate is multiplied by cfg.gate_scale. branch.py describes a norm behind `down` and a factor. Saved are x (by the
caller), gate_up (N, 2F) or fc (N, F) without its bias, and where a norm follows `down` its input mlp_branch (N, D).
Legend: N tokens, D width, F hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.branch import add_branch, branch_backward, copies
from trireme.models.config import ModelConfig
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


def forward(p: Pass, w: Weights, x: Tensor, out: Tensor) -> None:
    """Fills out (N, D), which may be x, and every tensor of p.saved; the others are temporaries.

    The result is added to x, or with cfg.parallel to what `out` holds already: x with what attention adds to it.
    """
    cfg = p.cfg
    copy = out if copies(w.norm, w.post, w.down) and not cfg.parallel else None
    y, _ = norm_for(w.up, x, w.norm, cfg.eps, copy)
    up = _project(cfg, w, y, p.saved.get(up_name(cfg)), x.dtype)
    del y  # workspace._block_workspace
    act = _activation(cfg, up, w)
    del up  # workspace._block_workspace
    add_branch(cfg, out if cfg.parallel else x, act, w.down, w.norm, w.post, out, p.saved.get("mlp_branch"))


def backward(p: Pass, w: Weights, g: Weights, x: Tensor, dy: Tensor, dx: Tensor | None = None) -> Tensor:
    """The gradient of x (N, D), in `dx` if given; adds to g, given dy (N, D). Recomputes what is not in p.saved."""
    cfg, saved = p.cfg, p.saved
    again = up_name(cfg) not in saved
    y, stats = norm_for(w.up, x, w.norm, cfg.eps, forward=again, backward=trained(g.up.weight))
    up = _project(cfg, w, y, None, x.dtype) if again else saved[up_name(cfg)]
    y = turned_alone(y)
    d_down = upstream(_branch_backward(p, w, g, dy, up), w.down, g.down)
    dup, act = _activation_backward(cfg, linear_backward(d_down, w.down), up, w, g)
    del up  # workspace._block_workspace
    add_gradients_(g.down, w.down, act, d_down)
    del act, d_down  # workspace._block_workspace
    d_up = upstream(dup, w.up, g.up)
    del dup  # workspace._block_workspace
    add_gradients_(g.up, w.up, y, d_up)
    del y  # workspace._block_workspace
    d_norm = linear_backward(d_up, w.up)
    del d_up  # workspace._block_workspace
    return norm_backward(d_norm, x, w.norm, stats, g.norm, dy, dx)


def _project(cfg: ModelConfig, w: Weights, y: Operand, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    up = linear(y, w.up, out, dtype)
    _scale_gate_(cfg, up)
    return up


def _scale_gate_(cfg: ModelConfig, up_: Tensor) -> None:
    if cfg.gate_scale != 1.0:
        up_[:, : cfg.ffn].mul_(cfg.gate_scale)


def _branch_backward(p: Pass, w: Weights, g: Weights, dy: Tensor, up: Tensor) -> Tensor:
    matmul = p.saved.get("mlp_branch")
    again = w.post is not None and matmul is None
    act: Operand = _activation(p.cfg, up, w) if again else up  # unread unless recomputing
    return branch_backward(p.cfg, dy, act, w.down, w.post, g.post, matmul)


def _activation(cfg: ModelConfig, up: Tensor, w: Weights) -> Operand:
    if w.gelu_bias is not None:
        return ops.gelu_bias_fwd(up, w.gelu_bias, cfg.exact_gelu)
    if cfg.relu2:
        return ops.relu2_fwd(up)
    if w.down.takes_codes:
        return ops.swiglu_codes_fwd(up) if cfg.silu else ops.geglu_codes_fwd(up)
    return ops.swiglu_fwd(up) if cfg.silu else ops.geglu_fwd(up)


def _activation_backward(
    cfg: ModelConfig, d_act: Tensor, up: Tensor, w: Weights, g: Weights
) -> tuple[Upstream, Operand]:
    """(gradient of the first layer's result, the activation that `down` reads)."""
    if w.gelu_bias is not None and g.gelu_bias is not None:
        return ops.gelu_bias_bwd(d_act, up, w.gelu_bias, or_scratch(g.gelu_bias, w.gelu_bias), cfg.exact_gelu)
    if cfg.relu2:
        return ops.relu2_bwd(d_act, up)
    if w.down.takes_codes and w.up.takes_codes and w.up.bias is None and cfg.gate_scale == 1.0:
        columns = trained(g.up.weight) or trained(g.down.weight)
        codes, act = (ops.swiglu_codes_bwd if cfg.silu else ops.geglu_codes_bwd)(d_act, up, columns)
        return Gradient(codes, d_act.dtype), act
    found = (ops.swiglu_bwd if cfg.silu else ops.geglu_bwd)(d_act, up)
    _scale_gate_(cfg, found[0])
    return found

"""The attention sub-layer of a block: explicit forward and backward over named saved tensors.

    out = x + attention(norm(x) @ qkv) @ o        (branch.py: optionally with a norm behind o, and a factor)

Saved are x (by the caller), qkv (N, (H + 2K) d), attn_out (N, H e) with lse (H, N) fp32, and where a norm follows o its
input attn_branch (N, D). With cfg.rotated_first the q and k in qkv are already rotated. With cfg.latent qkv holds the
latents (N, cfg.qkv_width) of latent.py, and values have a width e of their own; otherwise e is d. Legend: shapes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models import latent
from trireme.models.branch import add_branch, add_matmul, branch_backward, copies
from trireme.models.layers import Attention, Layer
from trireme.models.linear import (
    Linear,
    add_gradients_,
    if_trained,
    linear,
    linear_backward,
    trained,
    upstream,
)
from trireme.models.norm import Norm, Stats, norm_for, normed_linear_backward
from trireme.models.rows import Pass, rotate_

# signature of ops.attention_fwd
Attend = Callable[[Tensor, Tensor, Tensor, ops.Docs, float, int, "Tensor | None", float], tuple[Tensor, Tensor]]


class Weights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen."""

    norm: Norm | None
    qkv: Linear  # (D, (H + 2K) d)
    o: Linear  # (H e, D)
    post: Norm | None = None
    q_norm: Norm | None = None  # (d,), or (H d,) over all heads
    k_norm: Norm | None = None
    sinks: Tensor | None = None  # (H,)
    latent: latent.Weights | None = None


class _Heads(NamedTuple):
    q: Tensor  # (N, H, d)
    k: Tensor  # (N, K, d)
    v: Tensor  # (N, K, e)
    q_stats: Stats | None = None
    k_stats: Stats | None = None
    gate: Tensor | None = None  # (N, H, d), of the result
    v_stats: Stats | None = None


class Result(NamedTuple):
    """What backward needs of forward."""

    qkv: Tensor  # (N, cfg.qkv_width)
    heads: _Heads
    out: Tensor  # (N, H e)
    lse: Tensor  # (H, N) fp32
    branch: Tensor | None  # (N, D), the argument of a norm behind o, if saved or made


def forward(p: Pass, w: Weights, x: Tensor, out: Tensor, attend: Attend | None = None) -> None:
    """Fills out (N, D), which may be x, and every tensor of p.saved; the others are temporaries.

    If branch.copies, the norm copies x to `out`, and the GEMM of o adds to it there.
    """
    copy = out if copies(w.norm, w.post, w.o) else None
    qkv = _project(p, w, x, p.saved.get("qkv"), copy)
    attn_out, lse = _attend(p, w, _heads(p, w, qkv), p.saved.get("attn_out"), attend)
    if "lse" in p.saved:
        p.saved["lse"].copy_(lse)
    if p.attention.gate:
        attn_out = _gated(attn_out, _gate(p.attention, qkv))
    del qkv, lse  # workspace._block_workspace
    add_branch(p.attention.factor, p.layer.eps, x, attn_out, w.o, w.norm, w.post, out, p.saved.get("attn_branch"))


def backward(
    p: Pass,
    w: Weights,
    g: Weights,
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    recalled: list[Result] | None = None,
    dresid: Tensor | None = None,
) -> None:
    """Fills dx (N, D) and adds to g, given dy (N, D); recomputes what is not in p.saved.

    `recalled` may hold the Result of `residual`, which is taken from it. dx includes the gradient through the residual
    connection: dy, or `dresid` if given.
    """
    result = recalled.pop() if recalled else recall(p, w, x)
    dqkv = _backward_to_qkv(p, w, g, result, dy)
    del result  # workspace._block_workspace
    d_qkv = upstream(dqkv, w.qkv, g.qkv)
    del dqkv  # workspace._around_mixer
    normed_linear_backward(
        (w.norm, w.qkv), (g.norm, g.qkv), p.layer.eps, x, d_qkv, dy if dresid is None else dresid, dx
    )


def recall(p: Pass, w: Weights, x: Tensor) -> Result:
    """The tensors of forward that backward needs, saved or recomputed."""
    saved = p.saved
    qkv = saved["qkv"] if "qkv" in saved else _project(p, w, x)
    heads, branch = _heads(p, w, qkv), saved.get("attn_branch")
    if "attn_out" in saved and "lse" in saved:
        return Result(qkv, heads, saved["attn_out"], saved["lse"], branch)
    return Result(qkv, heads, *_attend(p, w, heads), branch)


def residual(p: Pass, w: Weights, x: Tensor) -> tuple[Tensor, Result]:
    """Recomputes forward: (its `out` (N, D), the Result that backward needs)."""
    result = recall(p, w, x)
    attn_out = _gated(result.out, result.heads.gate)
    out = x.clone() if copies(w.norm, w.post, w.o) else torch.empty_like(x)
    if w.post is None:
        add_branch(p.attention.factor, p.layer.eps, x, attn_out, w.o, w.norm, w.post, out)
        return out, result
    branch = linear(attn_out, w.o) if result.branch is None else result.branch
    add_matmul(p.attention.factor, p.layer.eps, x, branch, w.post, out)
    return out, result._replace(branch=branch)


def _backward_to_qkv(p: Pass, w: Weights, g: Weights, result: Result, dy: Tensor) -> Tensor:
    """Gradient of qkv (N, cfg.qkv_width)."""
    own, docs = p.attention, p.rows.docs
    inner = _gated(result.out, result.heads.gate)
    d_branch = branch_backward(own.factor, p.layer.eps, dy, inner, w.o, w.post, g.post, result.branch)
    d_o = upstream(d_branch, w.o, g.o)
    del d_branch
    add_gradients_(g.o, w.o, inner, d_o)
    del inner  # workspace._around_mixer
    q, k, v, q_stats, k_stats, gate, v_stats = result.heads
    dout, out = (t.unflatten(1, (own.heads, -1)) for t in (linear_backward(d_o, w.o), result.out))
    del d_o  # workspace._block_workspace
    if w.sinks is not None and g.sinks is not None and trained(g.sinks):
        ops.sinks_bwd_(g.sinks, dout, out, result.lse, w.sinks)
    dqkv = torch.empty_like(result.qkv)
    scale, window, cap = own.scale, own.window, own.cap
    if w.latent is not None and g.latent is not None:
        d = latent.gradients(own, dqkv)
        ops.attention_bwd(dout, q, k, v, out, result.lse, docs, scale, d.q, d.k, d.v, window, cap)
        del dout  # workspace._latent_moments
        latent.backward(p, w.latent, g.latent, result.qkv, d, dqkv)
        return dqkv
    dq, dk, dv = _split(p.layer, dqkv)
    dv = torch.empty_like(v) if own.values == "keys" else dv
    placed = dq
    if gate is not None:  # kernels take heads that are neighbours
        dout = ops.gate_bwd(dout, out, gate, _gate(own, dqkv), "sigmoid")
        dq = torch.empty_like(q)
    ops.attention_bwd(dout, q, k, v, out, result.lse, docs, scale, dq, dk, dv, window, cap)
    if not own.rotated_first and gate is None:
        _rotate_(p, dqkv, inverse=True)
    elif not own.rotated_first and p.turn:  # dq is not in dqkv
        rotate_(dq, p.turn.query, p.rows, inverse=True)
        rotate_(dk, p.turn.key, p.rows, inverse=True)
    q, k, v = _split(p.layer, result.qkv)  # before the norms
    _head_norm_backward_(dq, q, w.q_norm, q_stats, g.q_norm, placed)
    _head_norm_backward_(dk, k, w.k_norm, k_stats, g.k_norm)
    if v_stats is not None:
        ops.norm_bwd(dv, v, _ones(own, v), v_stats, ops.RMS, dv)
    if own.values == "keys":
        dk.add_(dv)
    if own.rotated_first:
        _rotate_(p, dqkv, inverse=True)
    return dqkv


def _project(p: Pass, w: Weights, x: Tensor, out: Tensor | None = None, copy: Tensor | None = None) -> Tensor:
    y, _ = norm_for(w.qkv, x, w.norm, p.layer.eps, copy)
    qkv = linear(y, w.qkv, out, x.dtype)
    if p.attention.latent is not None:
        latent.rotate_made_(p, qkv)
    elif p.attention.rotated_first:
        _rotate_(p, qkv)
    return qkv


def _heads(p: Pass, w: Weights, qkv: Tensor) -> _Heads:
    own, eps = p.attention, p.layer.eps
    if w.latent is not None:
        return _Heads(*latent.heads(p, w.latent, qkv))
    q, k, v = _split(p.layer, qkv)
    v_stats = None
    if own.values != "own":
        v, v_stats = ops.norm_fwd(v, _ones(own, v), eps)
    if w.q_norm is None or w.k_norm is None:
        return _Heads(q, k, v)
    q, q_stats = _head_norm(q, w.q_norm, eps)
    k, k_stats = _head_norm(k, w.k_norm, eps)
    if not own.rotated_first and p.turn:
        rotate_(q, p.turn.query, p.rows)
        rotate_(k, p.turn.key, p.rows)
    return _Heads(q, k, v, q_stats, k_stats, _gate(own, qkv) if own.gate else None, v_stats)


def _ones(own: Attention, like: Tensor) -> Tensor:
    """The weights of a norm that has none."""
    return torch.ones(
        own.value_dim, dtype=torch.float32 if like.dtype != torch.float64 else like.dtype, device=like.device
    )


def _gate(own: Attention, qkv: Tensor) -> Tensor:
    """The gates in qkv, a view (N, H, d): each head has its gate behind its query."""
    heads = qkv[:, : 2 * own.q_width].view(len(qkv), own.heads, 2 * own.dim)
    return heads[..., own.dim :]


def _gated(out: Tensor, gate: Tensor | None) -> Tensor:
    """The result of attention (N, H d), times sigmoid(gate) if there is one."""
    return out if gate is None else ops.gate_fwd(out.view(gate.shape), gate, "sigmoid").view(out.shape)


def _head_norm(x: Tensor, w: Norm, eps: float) -> tuple[Tensor, Stats]:
    """(normed x (N, heads, d), statistics), each head by itself, or all together if the weight is (heads d,)."""
    y, stats = ops.norm_fwd(x.view(len(x), -1, len(w.weight)), w.weight, eps, w.kind)
    return y.view(x.shape), stats


def _head_norm_backward_(
    d_: Tensor, x: Tensor, w: Norm | None, stats: Stats | None, g: Norm | None, into: Tensor | None = None
) -> None:
    """Replaces d_ (N, heads, d), the gradient of the norm's result, by that of x, or stores it in `into` if given."""
    if w is not None and stats is not None and g is not None:
        d_, x, into = (t.view(len(x), -1, len(w.weight)) for t in (d_, x, d_ if into is None else into))
        ops.norm_bwd(d_, x, w.weight, stats, w.kind, into, if_trained(g.weight))


def _attend(
    p: Pass, w: Weights, heads: _Heads, out: Tensor | None = None, attend: Attend | None = None
) -> tuple[Tensor, Tensor]:
    own, attend = p.attention, attend or ops.attention_fwd
    q, k, v = heads[:3]
    out = None if out is None else out.unflatten(1, (own.heads, -1))
    out, lse = attend(q, k, v, p.rows.docs, own.scale, own.window, out, own.cap)
    if w.sinks is not None:
        ops.sinks_fwd_(out, lse, w.sinks)
    return out.view(q.shape[0], -1), lse


def _split(layer: Layer, qkv: Tensor) -> list[Tensor]:
    """Views: q (N, H, d), k and v (N, K, d)."""
    own = layer.attention
    assert own is not None
    if layer.names.by_head:
        return list(qkv.view(qkv.shape[0], own.heads, 3, own.dim).unbind(2))
    heads = qkv.view(qkv.shape[0], -1, own.dim)
    if own.gate:
        q, k, v = heads.split((2 * own.heads, own.kv_heads, own.kv_heads), 1)
        return [q.unflatten(1, (own.heads, 2))[:, :, 0], k, v]
    if own.values == "keys":
        q, k = heads.split((own.heads, own.kv_heads), 1)
        return [q, k, k]
    return list(heads.split((own.heads, own.kv_heads, own.kv_heads), 1))


def _rotate_(p: Pass, qkv_: Tensor, inverse: bool = False) -> None:
    """Rotates q and k, in one pass if they are neighbours and share a table."""
    own, turn = p.attention, p.turn
    if turn is None:
        return
    if turn.query is turn.key and not p.layer.names.by_head:
        heads = qkv_.view(qkv_.shape[0], -1, own.dim)[:, : own.heads + own.kv_heads]
        rotate_(heads, turn.key, p.rows, inverse)
    else:
        q, k, _ = _split(p.layer, qkv_)
        rotate_(q, turn.query, p.rows, inverse)
        rotate_(k, turn.key, p.rows, inverse)

"""The attention sub-layer of a block: explicit forward and backward over named saved tensors.

    out = x + attention(norm(x) @ qkv) @ o        (branch.py: optionally with a norm behind o, and a factor)

Saved are x (by the caller), qkv (N, (H + 2K) d), attn_out (N, H e) with lse (H, N) fp32, and where a norm follows o its
input attn_branch (N, D). If Attention.rotated_first, q and k in qkv are already rotated. With latents qkv holds
those of latent.py, (N, Attention.qkv_width). Values have a width e, perhaps of their own. The result may be gated: by
gates of each feature behind each query, or by a matrix of their own, or of each head. Legend: shapes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
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
from trireme.models.mixers import latent
from trireme.models.norm import Norm, Stats, bare_weight, norm_for, normed_linear_backward
from trireme.models.reader import Reader
from trireme.models.rows import Pass, rotate_

# signature of ops.attention_fwd
Attend = Callable[[Tensor, Tensor, Tensor, ops.Docs, float, int, "Tensor | None", float], tuple[Tensor, Tensor]]


class AttentionWeights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen."""

    norm: Norm | None
    qkv: Linear  # (D, (H + 2K) d)
    o: Linear  # (H e, D)
    post: Norm | None = None
    q_norm: Norm | None = None  # (d,), or (H d,) over all heads
    k_norm: Norm | None = None
    sinks: Tensor | None = None  # (H,)
    latent: latent.LatentWeights | None = None


class _Heads(NamedTuple):
    q: Tensor  # (N, H, d)
    k: Tensor  # (N, K, d)
    v: Tensor  # (N, K, e)
    q_stats: Stats | None = None
    k_stats: Stats | None = None
    gate: Tensor | None = None  # (N, H, e), or (N, H, 1), of the result
    v_stats: Stats | None = None


class AttentionResult(NamedTuple):
    """What backward needs of forward."""

    qkv: Tensor  # (N, Attention.qkv_width)
    heads: _Heads
    out: Tensor  # (N, H e)
    lse: Tensor  # (H, N) fp32
    branch: Tensor | None  # (N, D), the argument of a norm behind o, if saved or made


def weights(read: Reader, spec: Attention) -> AttentionWeights:
    names = read.layer.mixer_names
    inner = latent.weights(read, spec.latent) if spec.latent else None
    return AttentionWeights(
        read.norm(names.norm), read.linear(*names.qkv), read.linear(names.o), read.norm(names.post),
        None if inner else read.norm(names.q_norm), None if inner else read.norm(names.k_norm), read.get(names.sinks),
        inner,
    )  # fmt: skip


def forward(
    p: Pass, spec: Attention, w: AttentionWeights, x: Tensor, out: Tensor, onto: Tensor, attend: Attend | None = None
) -> None:
    """Fills out (N, D) with onto + the branch of x, and every tensor of p.saved; the others are temporaries.

    `out` may be x or `onto`. If branch.copies, the norm copies x to `out`, and the GEMM of o adds to it there.
    """
    copy = out if onto is x and copies(w.norm, w.post, w.o) else None
    qkv = _project(p, spec, w, x, p.saved.get("qkv"), copy)
    attn_out, lse = _attend(p, spec, w, _heads(p, spec, w, qkv), p.saved.get("attn_out"), attend)
    if "lse" in p.saved:
        p.saved["lse"].copy_(lse)
    if spec.gate:
        attn_out = _gated(spec, attn_out, _gate(spec, qkv))
    del qkv, lse
    add_branch(spec.factor, p.layer.post_eps, onto, attn_out, w.o, w.norm, w.post, out, p.saved.get("attn_branch"))


def backward(
    p: Pass,
    spec: Attention,
    w: AttentionWeights,
    g: AttentionWeights,
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    onto: Tensor,
    results: list[AttentionResult],
) -> None:
    """Fills dx (N, D) with onto + the gradient of x, given dy (N, D), and adds to g.

    The first of `results`, that of `residual`, is taken from the list; without any, what is not in p.saved is
    computed again.
    """
    result = results.pop(0) if results else recall(p, spec, w, x)
    dqkv = _backward_to_qkv(p, spec, w, g, result, dy)
    del result
    d_qkv = upstream(dqkv, w.qkv, g.qkv)
    del dqkv
    normed_linear_backward((w.norm, w.qkv), (g.norm, g.qkv), p.layer.eps, x, d_qkv, onto, dx)


def recall(p: Pass, spec: Attention, w: AttentionWeights, x: Tensor) -> AttentionResult:
    """The tensors of forward that backward needs, saved or recomputed."""
    saved = p.saved
    qkv = saved["qkv"] if "qkv" in saved else _project(p, spec, w, x)
    heads, branch = _heads(p, spec, w, qkv), saved.get("attn_branch")
    if "attn_out" in saved and "lse" in saved:
        return AttentionResult(qkv, heads, saved["attn_out"], saved["lse"], branch)
    return AttentionResult(qkv, heads, *_attend(p, spec, w, heads), branch)


def residual(p: Pass, spec: Attention, w: AttentionWeights, x: Tensor, out: Tensor, onto: Tensor) -> AttentionResult:
    """Computes forward again: fills out (N, D), returns what backward needs."""
    result = recall(p, spec, w, x)
    attn_out = _gated(spec, result.out, result.heads.gate)
    if w.post is None:
        if onto is x and copies(w.norm, w.post, w.o):
            out.copy_(x)
        add_branch(spec.factor, p.layer.post_eps, onto, attn_out, w.o, w.norm, w.post, out)
        return result
    branch = linear(attn_out, w.o) if result.branch is None else result.branch
    add_matmul(spec.factor, p.layer.post_eps, onto, branch, w.post, out)
    return result._replace(branch=branch)


def _backward_to_qkv(
    p: Pass, spec: Attention, w: AttentionWeights, g: AttentionWeights, result: AttentionResult, dy: Tensor
) -> Tensor:
    """Gradient of qkv (N, Attention.qkv_width)."""
    inner = _gated(spec, result.out, result.heads.gate)
    d_branch = branch_backward(spec.factor, p.layer.post_eps, dy, inner, w.o, w.post, g.post, result.branch)
    d_o = upstream(d_branch, w.o, g.o)
    del d_branch
    add_gradients_(g.o, w.o, inner, d_o)
    del inner
    dout, out = (t.unflatten(1, (spec.heads, -1)) for t in (linear_backward(d_o, w.o), result.out))
    del d_o
    if w.sinks is not None and g.sinks is not None and trained(g.sinks):
        ops.sinks_bwd_(g.sinks, dout, out, result.lse, w.sinks)
    dqkv = torch.empty_like(result.qkv)
    if w.latent is not None and g.latent is not None:
        d = latent.gradients(spec, dqkv)
        _attend_backward(p, spec, dout, out, result, (d.q, d.k, d.v))
        del dout
        latent.backward(p, spec, w.latent, g.latent, result.qkv, d, dqkv)
        return dqkv
    dq, dk, dv = _split(p.layer, spec, dqkv)
    dv = torch.empty_like(dv) if spec.values == "keys" else dv
    placed = dq
    if result.heads.gate is not None:
        dout = ops.gate_bwd(dout, out, result.heads.gate, _gate(spec, dqkv), spec.gate_act)
    if spec.gate == "queries":  # kernels take heads that are neighbours
        dq = torch.empty(dq.shape, dtype=dq.dtype, device=dq.device)
    _attend_backward(p, spec, dout, out, result, (dq, dk, dv))
    rotation = p.rows.rotation(spec)
    if not spec.rotated_first and placed is dq:
        _rotate_(p, spec, dqkv, inverse=True)
    elif not spec.rotated_first and rotation:  # dq is not in dqkv
        rotate_(dq, rotation.query, p.rows, inverse=True)
        rotate_(dk, rotation.key, p.rows, inverse=True)
    q, k, v = _split(p.layer, spec, result.qkv)  # before the norms
    q_norm, k_norm = _norms(spec, w, q)
    _head_norm_backward_(dq, q, q_norm, result.heads.q_stats, g.q_norm, placed)
    _head_norm_backward_(dk, k, k_norm, result.heads.k_stats, g.k_norm)
    if result.heads.v_stats is not None:
        ops.norm_bwd(dv, v, bare_weight(spec.value_dim, v), result.heads.v_stats, ops.RMS, dv)
    if spec.values == "keys":
        dk.add_(dv)
    if spec.rotated_first:
        _rotate_(p, spec, dqkv, inverse=True)
    return dqkv


def _attend_backward(
    p: Pass, spec: Attention, dout: Tensor, out: Tensor, result: AttentionResult, d: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fills d, the gradients of queries, keys and values."""
    q, k, v = result.heads[:3]
    ops.attention_bwd(dout, q, k, v, out, result.lse, p.rows.docs, spec.scale, *d, spec.window, spec.cap)


def _project(
    p: Pass, spec: Attention, w: AttentionWeights, x: Tensor, out: Tensor | None = None, copy: Tensor | None = None
) -> Tensor:
    y, _ = norm_for(w.qkv, x, w.norm, p.layer.eps, copy)
    qkv = linear(y, w.qkv, out, x.dtype)
    if spec.latent is not None:
        latent.rotate_made_(p, spec, qkv)
    elif spec.rotated_first:
        _rotate_(p, spec, qkv)
    return qkv


def _heads(p: Pass, spec: Attention, w: AttentionWeights, qkv: Tensor) -> _Heads:
    eps, rotation = p.layer.eps, p.rows.rotation(spec)
    if w.latent is not None:
        return _Heads(*latent.heads(p, spec, w.latent, qkv))
    q, k, v = _split(p.layer, spec, qkv)
    gate, v_stats = _gate(spec, qkv) if spec.gate else None, None
    if spec.values != "own":
        v, v_stats = ops.norm_fwd(v, bare_weight(spec.value_dim, v), eps)
    q_norm, k_norm = _norms(spec, w, q)
    if q_norm is None or k_norm is None:
        return _Heads(q, k, v, gate=gate)
    q, q_stats = _head_norm(q, q_norm, eps)
    k, k_stats = _head_norm(k, k_norm, eps)
    if not spec.rotated_first and rotation:
        rotate_(q, rotation.query, p.rows)
        rotate_(k, rotation.key, p.rows)
    return _Heads(q, k, v, q_stats, k_stats, gate, v_stats)


def _norms(spec: Attention, w: AttentionWeights, like: Tensor) -> tuple[Norm | None, Norm | None]:
    """The norms of queries and keys."""
    bare = Norm(bare_weight(spec.dim, like)) if spec.norm == "bare" else None
    return bare or w.q_norm, bare or w.k_norm


def _gate(spec: Attention, qkv: Tensor) -> Tensor:
    """The gates in qkv, a view (N, H, e), or (N, H, 1) of one for each head."""
    if spec.gate == "queries":
        return qkv[:, : spec.parts[0]].unflatten(1, (spec.heads, -1))[..., spec.dim :]
    return qkv[:, -spec.parts[-1] :].unflatten(1, (spec.heads, -1))


def _gated(spec: Attention, out: Tensor, gate: Tensor | None) -> Tensor:
    """The result of attention (N, H e), times what its gate, if there is one, becomes."""
    return out if gate is None else ops.gate_fwd(out.unflatten(1, (spec.heads, -1)), gate, spec.gate_act).flatten(1)


def _head_norm(x: Tensor, w: Norm, eps: float) -> tuple[Tensor, Stats]:
    """(normed x (N, heads, d), statistics), each head by itself, or all together if the weight is (heads d,)."""
    y, stats = ops.norm_fwd(x.view(len(x), -1, len(w.weight)), w.weight, eps, w.kind)
    return y.view(x.shape), stats


def _head_norm_backward_(
    d_: Tensor, x: Tensor, w: Norm | None, stats: Stats | None, g: Norm | None, into: Tensor | None = None
) -> None:
    """Replaces d_ (N, heads, d), the gradient of the norm's result, by that of x, or stores it in `into` if given."""
    if w is not None and stats is not None:
        d_, x, into = (t.view(len(x), -1, len(w.weight)) for t in (d_, x, d_ if into is None else into))
        ops.norm_bwd(d_, x, w.weight, stats, w.kind, into, if_trained(g.weight) if g else None)


def _attend(
    p: Pass,
    spec: Attention,
    w: AttentionWeights,
    heads: _Heads,
    out: Tensor | None = None,
    attend: Attend | None = None,
) -> tuple[Tensor, Tensor]:
    (q, k, v), attend = heads[:3], attend or ops.attention_fwd
    out = None if out is None else out.unflatten(1, (spec.heads, -1))
    out, lse = attend(q, k, v, p.rows.docs, spec.scale, spec.window, out, spec.cap)
    if w.sinks is not None:
        ops.sinks_fwd_(out, lse, w.sinks)
    return out.view(q.shape[0], -1), lse


def _split(layer: Layer, spec: Attention, qkv: Tensor) -> list[Tensor]:
    """Views: q (N, H, d), k (N, K, d) and v (N, K, e)."""
    if layer.mixer_names.by_head:
        return list(qkv.view(qkv.shape[0], spec.heads, 3, spec.dim).unbind(2))
    q, *others = qkv.split(spec.parts, 1)
    k, v = (others[i].unflatten(1, (spec.kv_heads, -1)) for i in (0, spec.values != "keys"))
    return [q.unflatten(1, (spec.heads, -1))[..., : spec.dim], k, v]


def _rotate_(p: Pass, spec: Attention, qkv_: Tensor, inverse: bool = False) -> None:
    """Rotates q and k, in one pass if they are neighbours and share a table."""
    rotation = p.rows.rotation(spec)
    if rotation is None:
        return
    if rotation.query is rotation.key and not p.layer.mixer_names.by_head:
        heads = qkv_[:, : spec.q_width + spec.kv_width].unflatten(1, (-1, spec.dim))
        rotate_(heads, rotation.key, p.rows, inverse)
    else:
        q, k, _ = _split(p.layer, spec, qkv_)
        rotate_(q, rotation.query, p.rows, inverse)
        rotate_(k, rotation.key, p.rows, inverse)

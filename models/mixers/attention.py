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
from trireme.models.branch import Branch, add_branch, add_normed, branch, branch_backward
from trireme.models.layers import Attention
from trireme.models.linear import Linear, add_gradients_, if_trained, linear, linear_backward, trained, upstream
from trireme.models.mixers import latent
from trireme.models.norm import Norm, Stats, bare_norm, norm_for, normed_linear_backward
from trireme.models.reader import Reader
from trireme.models.rows import Pass, rotate_

# signature of ops.attention_fwd
Attend = Callable[[Tensor, Tensor, Tensor, ops.Docs, float, int, "Tensor | None", float], tuple[Tensor, Tensor]]


class AttentionWeights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen."""

    spec: Attention
    norm: Norm | None
    qkv: Linear  # (D, (H + 2K) d)
    o: Branch  # (H e, D)
    q_norm: Norm | None  # (d,), or (H d,) over all heads
    k_norm: Norm | None
    sinks: Tensor | None  # (H,)
    latent: latent.LatentWeights | None


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
    names, before = read.layer.mixer_names, read.norm(read.layer.mixer_names.norm)
    inner = latent.weights(read, spec, spec.latent) if spec.latent else None
    q_norm, k_norm = (None if inner else read.norm(name) for name in (names.q_norm, names.k_norm))
    o = branch(read, names.o, names.post, spec.factor, before)
    return AttentionWeights(spec, before, read.linear(*names.qkv), o, q_norm, k_norm, read.get(names.sinks), inner)


def forward(p: Pass, w: AttentionWeights, x: Tensor, out: Tensor, onto: Tensor, attend: Attend | None = None) -> None:
    """Fills out (N, D) with onto + the branch of x, and every tensor of p.saved; the others are temporaries.

    `out` may be x or `onto`. If w.o.copies, the norm copies x to `out`, and the GEMM of o adds to it there.
    """
    qkv = _project(p, w, x, p.saved.get("qkv"), out if onto is x and w.o.copies else None)
    attn_out, lse = _attend(p, w, _heads(p, w, qkv), p.saved.get("attn_out"), attend)
    if "lse" in p.saved:
        p.saved["lse"].copy_(lse)
    if w.spec.gate:
        attn_out = _gated(w.spec, attn_out, _gate(w.spec, qkv))
    del qkv, lse
    add_branch(w.o, onto, attn_out, out, p.saved.get("attn_branch"))


def backward(
    p: Pass,
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
    result = results.pop(0) if results else recall(p, w, x)
    dqkv = _backward_to_qkv(p, w, g, result, dy)
    del result
    d_qkv = upstream(dqkv, w.qkv, g.qkv)
    del dqkv
    normed_linear_backward((w.norm, w.qkv), (g.norm, g.qkv), x, d_qkv, onto, dx)


def recall(p: Pass, w: AttentionWeights, x: Tensor) -> AttentionResult:
    """The tensors of forward that backward needs, saved or recomputed."""
    saved = p.saved
    qkv = saved["qkv"] if "qkv" in saved else _project(p, w, x)
    heads, branch = _heads(p, w, qkv), saved.get("attn_branch")
    if "attn_out" in saved and "lse" in saved:
        return AttentionResult(qkv, heads, saved["attn_out"], saved["lse"], branch)
    return AttentionResult(qkv, heads, *_attend(p, w, heads), branch)


def residual(p: Pass, w: AttentionWeights, x: Tensor, out: Tensor, onto: Tensor) -> AttentionResult:
    """Computes forward again: fills out (N, D), returns what backward needs."""
    result = recall(p, w, x)
    if w.o.norm is not None and result.branch is not None:
        add_normed(w.o.norm, w.o.factor, onto, result.branch, out)
        return result
    attn_out = _gated(w.spec, result.out, result.heads.gate)
    if onto is x and w.o.copies:
        out.copy_(x)
    return result._replace(branch=add_branch(w.o, onto, attn_out, out))


def _backward_to_qkv(p: Pass, w: AttentionWeights, g: AttentionWeights, result: AttentionResult, dy: Tensor) -> Tensor:
    """Gradient of qkv (N, Attention.qkv_width)."""
    spec, heads = w.spec, result.heads
    inner = _gated(spec, result.out, heads.gate)
    d_branch = branch_backward(w.o, g.o, dy, inner, result.branch)
    d_o = upstream(d_branch, w.o.linear, g.o.linear)
    del d_branch
    add_gradients_(g.o.linear, w.o.linear, inner, d_o)
    del inner
    dout, out = (t.unflatten(1, (spec.heads, -1)) for t in (linear_backward(d_o, w.o.linear), result.out))
    del d_o
    if w.sinks is not None and g.sinks is not None and trained(g.sinks):
        ops.sinks_bwd_(g.sinks, dout, out, result.lse, w.sinks)
    dqkv = torch.empty_like(result.qkv)
    if w.latent is not None and g.latent is not None:
        d = latent.gradients(w.latent, dqkv)
        _attend_backward(p, spec, dout, out, result, (d.q, d.k, d.v))
        del dout
        latent.backward(p, w.latent, g.latent, result.qkv, d, dqkv)
        return dqkv
    dq, dk, dv = _split(p, spec, dqkv)
    dv = torch.empty_like(dv) if spec.values == "keys" else dv
    placed = dq
    if heads.gate is not None:
        dout = ops.gate_bwd(dout, out, heads.gate, _gate(spec, dqkv), spec.gate_act)
    if spec.gate == "queries":  # kernels take heads that are neighbours
        dq = torch.empty(dq.shape, dtype=dq.dtype, device=dq.device)
    _attend_backward(p, spec, dout, out, result, (dq, dk, dv))
    if not spec.rotated_first and placed is dq:
        _rotate_(p, spec, dqkv, inverse=True)
    elif not spec.rotated_first:  # dq is not in dqkv
        _rotate_each_(p, spec, dq, dk, inverse=True)
    q, k, v = _split(p, spec, result.qkv)  # before the norms
    q_norm, k_norm, v_norm = _norms(p, w, q)
    _head_norm_backward_(dq, q, q_norm, heads.q_stats, g.q_norm, placed)
    _head_norm_backward_(dk, k, k_norm, heads.k_stats, g.k_norm)
    _head_norm_backward_(dv, v, v_norm, heads.v_stats)
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


def _project(p: Pass, w: AttentionWeights, x: Tensor, out: Tensor | None = None, copy: Tensor | None = None) -> Tensor:
    y, _ = norm_for(w.qkv, x, w.norm, copy)
    qkv = linear(y, w.qkv, out, x.dtype)
    if w.latent is not None:
        latent.rotate_saved_(p, w.latent, qkv)
    elif w.spec.rotated_first:
        _rotate_(p, w.spec, qkv)
    return qkv


def _heads(p: Pass, w: AttentionWeights, qkv: Tensor) -> _Heads:
    spec = w.spec
    if w.latent is not None:
        return _Heads(*latent.heads(p, w.latent, qkv))
    q, k, v = _split(p, spec, qkv)
    gate = _gate(spec, qkv) if spec.gate else None
    q_norm, k_norm, v_norm = _norms(p, w, q)
    v, v_stats = _head_norm(v, v_norm)
    q, q_stats = _head_norm(q, q_norm)
    k, k_stats = _head_norm(k, k_norm)
    if not spec.rotated_first:
        _rotate_each_(p, spec, q, k)
    return _Heads(q, k, v, q_stats, k_stats, gate, v_stats)


def _norms(p: Pass, w: AttentionWeights, like: Tensor) -> tuple[Norm | None, Norm | None, Norm | None]:
    """The norms of queries, keys and values."""
    spec, eps = w.spec, p.layer.eps
    bare = bare_norm(spec.dim, eps, like) if spec.norm == "bare" else None
    return bare or w.q_norm, bare or w.k_norm, None if spec.values == "own" else bare_norm(spec.value_dim, eps, like)


def _gate(spec: Attention, qkv: Tensor) -> Tensor:
    """The gates in qkv, a view (N, H, e), or (N, H, 1) of one for each head."""
    if spec.gate == "queries":
        return qkv[:, : spec.parts[0]].unflatten(1, (spec.heads, -1))[..., spec.dim :]
    return qkv[:, -spec.parts[-1] :].unflatten(1, (spec.heads, -1))


def _gated(spec: Attention, out: Tensor, gate: Tensor | None) -> Tensor:
    """The result of attention (N, H e), times what its gate, if there is one, becomes."""
    return out if gate is None else ops.gate_fwd(out.unflatten(1, (spec.heads, -1)), gate, spec.gate_act).flatten(1)


def _head_norm(x: Tensor, w: Norm | None) -> tuple[Tensor, Stats | None]:
    """(normed x (N, heads, d), statistics), each head by itself, or all together if the weight is (heads d,).

    (x, None) without a norm.
    """
    if w is None:
        return x, None
    y, stats = ops.norm_fwd(x.view(len(x), -1, len(w.weight)), w.weight, w.eps, w.kind)
    return y.view(x.shape), stats


def _head_norm_backward_(
    d_: Tensor, x: Tensor, w: Norm | None, stats: Stats | None, g: Norm | None = None, out: Tensor | None = None
) -> None:
    """Replaces d_ (N, heads, d), the gradient of the norm's result, by that of x, or stores it in `out` if given."""
    if w is not None and stats is not None:
        d_, x, out = (t.view(len(x), -1, len(w.weight)) for t in (d_, x, d_ if out is None else out))
        ops.norm_bwd(d_, x, w.weight, stats, w.kind, out, if_trained(g.weight) if g else None)


def _attend(
    p: Pass, w: AttentionWeights, heads: _Heads, out: Tensor | None = None, attend: Attend | None = None
) -> tuple[Tensor, Tensor]:
    (q, k, v), spec, attend = heads[:3], w.spec, attend or ops.attention_fwd
    out = None if out is None else out.unflatten(1, (spec.heads, -1))
    out, lse = attend(q, k, v, p.rows.docs, spec.scale, spec.window, out, spec.cap)
    if w.sinks is not None:
        ops.sinks_fwd_(out, lse, w.sinks)
    return out.view(q.shape[0], -1), lse


def _split(p: Pass, spec: Attention, qkv: Tensor) -> list[Tensor]:
    """Views: q (N, H, d), k (N, K, d) and v (N, K, e)."""
    if p.layer.mixer_names.by_head:
        return list(qkv.view(qkv.shape[0], spec.heads, 3, spec.dim).unbind(2))
    q, *kv = qkv.split(spec.parts, 1)
    k, v = (kv[i].unflatten(1, (spec.kv_heads, -1)) for i in (0, spec.values != "keys"))
    return [q.unflatten(1, (spec.heads, -1))[..., : spec.dim], k, v]


def _rotate_(p: Pass, spec: Attention, qkv_: Tensor, inverse: bool = False) -> None:
    """Rotates q and k, in one pass if they are neighbours and share a table."""
    rotation = p.rows.rotation(spec)
    if rotation and rotation.query is rotation.key and not p.layer.mixer_names.by_head:
        heads = qkv_[:, : spec.q_width + spec.kv_width].unflatten(1, (-1, spec.dim))
        rotate_(heads, rotation.key, p.rows, inverse)
    elif rotation:
        q, k, _ = _split(p, spec, qkv_)
        _rotate_each_(p, spec, q, k, inverse)


def _rotate_each_(p: Pass, spec: Attention, q_: Tensor, k_: Tensor, inverse: bool = False) -> None:
    if rotation := p.rows.rotation(spec):
        rotate_(q_, rotation.query, p.rows, inverse)
        rotate_(k_, rotation.key, p.rows, inverse)

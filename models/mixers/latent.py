"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): heads from latents, and gradients back.

    [q' | c' | s] = norm(x) @ qkv,   q = rope(norm(q') @ q_b),   [k_n | v] = norm(c') @ kv_b,   k = [k_n | rope(s)]

s is the rotated part of the keys, one for all heads. Without q_b the queries are q'. attention.py saves qkv with s
rotated; backward computes queries, keys and values from it again.
Legend: N tokens, H heads, d width of queries and keys, of which the first n features are not rotated, e width of
values, R rank of the latent of keys and values, Q of that of queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.models.families.latent import Latent
from trireme.models.layers import Attention
from trireme.models.linear import Linear, add_gradients_, linear, linear_backward, upstream
from trireme.models.norm import Norm, norm, norm_backward
from trireme.models.reader import Reader
from trireme.models.rows import Pass, rotate_

EPS = 1e-6  # of the latents' norms, whatever config.json says of the others


class LatentWeights(NamedTuple):
    """Weights that make heads from latents, or their gradients."""

    spec: Attention
    latent: Latent
    kv_norm: Norm  # (R,)
    kv_b: Linear  # (R, H (n + e)), by head keys, then values
    q_norm: Norm | None = None  # (Q,)
    q_b: Linear | None = None  # (Q, H d)


class LatentGradients(NamedTuple):
    """Buffers for the gradients of heads, which attention's backward fills."""

    q: Tensor  # (N, H, d)
    k: Tensor  # (N, H, d)
    v: Tensor  # (N, H, e), a view of kv
    kv: Tensor  # (N, H, n + e)


def weights(read: Reader, spec: Attention, latent: Latent) -> LatentWeights:
    names = read.layer.mixer_names
    before = read.norm(names.k_norm, EPS)
    assert before is not None
    queries = (read.norm(names.q_norm, EPS), read.linear(names.q_b)) if latent.q_rank else ()
    return LatentWeights(spec, latent, before, read.linear(names.kv_b), *queries)


def rotate_saved_(p: Pass, w: LatentWeights, qkv_: Tensor, inverse: bool = False) -> None:
    """Rotates the parts of qkv (N, Q + R + d - n) that are saved rotated: s, and queries that have no latent."""
    first, _, shared = _split(w, qkv_)
    rotation = p.rows.rotation(w.spec)
    rotate_(shared[:, None], rotation and rotation.key, p.rows, inverse)
    if not w.latent.q_rank:
        _rotate_queries_(p, w, first.unflatten(1, (w.spec.heads, -1)), inverse)


def heads(p: Pass, w: LatentWeights, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q (N, H, d), k (N, H, d), v (N, H, e)), rotated, from a qkv that rotate_saved_ has rotated."""
    first, latent, shared = _split(w, qkv)
    n, by_head = w.latent.nope, (w.spec.heads, -1)
    if w.q_b is None:
        q = first.unflatten(1, by_head)
    else:
        q = linear(norm(first, w.q_norm)[0], w.q_b).unflatten(1, by_head)
        _rotate_queries_(p, w, q)
    kv = linear(norm(latent, w.kv_norm)[0], w.kv_b).unflatten(1, by_head)
    k = q.new_empty(q.shape)
    k[..., :n] = kv[..., :n]
    k[..., n:] = shared[:, None]
    return q, k, kv[..., n:]


def gradients(w: LatentWeights, dqkv: Tensor) -> LatentGradients:
    """Allocates LatentGradients. Where queries have no latent, theirs is a view of dqkv."""
    N, H, d, latent = len(dqkv), w.spec.heads, w.spec.dim, w.latent
    q = dqkv.new_empty((N, H, d)) if latent.q_rank else _split(w, dqkv)[0].unflatten(1, (H, d))
    kv = dqkv.new_empty((N, H, latent.nope + latent.value))
    return LatentGradients(q, dqkv.new_empty((N, H, d)), kv[..., latent.nope :], kv)


def backward(p: Pass, w: LatentWeights, g: LatentWeights, qkv: Tensor, d: LatentGradients, dqkv: Tensor) -> None:
    """Fills dqkv, the gradient of qkv before rotate_saved_, given those of heads, d; adds to g."""
    first, latent, _ = _split(w, qkv)
    d_first, d_latent, d_shared = _split(w, dqkv)
    n = w.latent.nope
    d_q, d_k, _, d_kv = d
    d_kv[..., :n] = d_k[..., :n]
    torch.sum(d_k[..., n:], 1, out=d_shared)
    del d_k, d
    _latent_backward(latent, w.kv_norm, g.kv_norm, w.kv_b, g.kv_b, d_kv.flatten(1), d_latent)
    if w.q_b is not None and g.q_b is not None:
        _rotate_queries_(p, w, d_q, inverse=True)
        _latent_backward(first, w.q_norm, g.q_norm, w.q_b, g.q_b, d_q.flatten(1), d_first)
    rotate_saved_(p, w, dqkv, inverse=True)


def _split(w: LatentWeights, qkv: Tensor) -> list[Tensor]:
    """Views of qkv: queries or their latent (N, Q), the latent of keys and values (N, R), s (N, d - n)."""
    return list(qkv.split((w.latent.q_rank or w.spec.q_width, w.latent.kv_rank, w.latent.rope), 1))


def _rotate_queries_(p: Pass, w: LatentWeights, q_: Tensor, inverse: bool = False) -> None:
    """Rotates q_ (N, H, d) behind its first n features, which are scaled where queries are scaled by position."""
    n, rotation = w.latent.nope, p.rows.rotation(w.spec)
    if rotation:
        rotate_(q_[..., n:], rotation.query, p.rows, inverse)
        rotate_(q_[..., :n], rotation.nope, p.rows, inverse)


def _latent_backward(
    x: Tensor, before: Norm | None, g_before: Norm | None, w: Linear, g: Linear, dy: Tensor, dx: Tensor
) -> None:
    """Fills dx (N, R), adds to g_before and g, given dy of norm(x) @ w."""
    y, stats = norm(x, before)
    d = upstream(dy, w, g)
    add_gradients_(g, w, y, d)
    del y
    norm_backward(linear_backward(d, w), x, before, stats, g_before, out=dx)

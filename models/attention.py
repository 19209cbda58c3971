"""The attention half of a block, forward and backward as explicit functions over named saved tensors.

    out = x + attention(norm(x) @ qkv) @ o

Legend: N tokens, D width, H query heads, K key/value heads, d head width. Saved: x (the caller's), qkv (N, (H + 2K) d),
attn_out (N, H d), lse (H, N) fp32; attn_out is of use only together with lse. With query/key norms qkv is kept as
projected; without, q and k in it are rotated already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.config import ModelConfig
from trireme.models.linear import Linear, add_branch, add_gradients_, linear, linear_backward
from trireme.models.norm import Norm, norm, norm_backward
from trireme.models.rows import Rows

# ops.attention_fwd, or what stands in for it: a generator's sees a cache too
Attend = Callable[[Tensor, Tensor, Tensor, ops.Docs, float, int, "Tensor | None"], tuple[Tensor, Tensor]]


class Weights(NamedTuple):
    """The half's weights, or their gradients."""

    norm: Norm
    qkv: Linear  # (D, (H + 2K) d)
    o: Linear  # (H d, D)
    q_norm: Tensor | None = None  # (d,)
    k_norm: Tensor | None = None


class _Heads(NamedTuple):
    """Inputs of attention, and the statistics of the norms of q and k."""

    q: Tensor  # (N, H, d)
    k: Tensor  # (N, K, d)
    v: Tensor  # (N, K, d)
    q_rstd: Tensor | None = None  # (N, H) fp32
    k_rstd: Tensor | None = None


class Result(NamedTuple):
    """What backward needs of forward."""

    qkv: Tensor  # (N, (H + 2K) d)
    heads: _Heads
    out: Tensor  # (N, H d)
    lse: Tensor  # (H, N) fp32


def forward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    attend: Attend = ops.attention_fwd,
) -> None:
    """Fills out (N, D), which may be x, and every tensor of `saved`; names that are not in it become temporaries.

    An RMSNorm copies x into `out` as it reads it, and the output projection is added there in place.
    """
    qkv = _project(cfg, w, x, rows, saved.get("qkv"), copy=out)
    attn_out, lse = _attend(cfg, layer, _heads(cfg, w, qkv, rows), rows, saved.get("attn_out"), attend)
    if "lse" in saved:
        saved["lse"].copy_(lse)
    del qkv, lse  # shapes._block_workspace
    add_branch(x, attn_out, w.o, out, copied=w.norm.copies)


def backward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    g: Weights,
    x: Tensor,
    saved: dict[str, Tensor],
    dy: Tensor,
    rows: Rows,
    dx: Tensor,
) -> None:
    """Fills dx (N, D) and adds to the gradients g, given dy (N, D). What is not in `saved` is recomputed."""
    dqkv = backward_to_qkv(cfg, layer, w, g, recall(cfg, layer, w, x, saved, rows), dy, rows)
    backward_to_x(cfg, w, g, x, dqkv, dy, dx)


def recall(cfg: ModelConfig, layer: int, w: Weights, x: Tensor, saved: dict[str, Tensor], rows: Rows) -> Result:
    """Forward's tensors, saved or computed again."""
    qkv = saved["qkv"] if "qkv" in saved else _project(cfg, w, x, rows)
    heads = _heads(cfg, w, qkv, rows)
    if "attn_out" in saved and "lse" in saved:
        return Result(qkv, heads, saved["attn_out"], saved["lse"])
    return Result(qkv, heads, *_attend(cfg, layer, heads, rows))


def residual(w: Weights, x: Tensor, attn_out: Tensor) -> Tensor:
    """Forward's `out` (N, D) once more, from its attn_out."""
    out = x.clone() if w.norm.copies else torch.empty_like(x)
    add_branch(x, attn_out, w.o, out, copied=w.norm.copies)
    return out


def backward_to_qkv(
    cfg: ModelConfig, layer: int, w: Weights, g: Weights, result: Result, dy: Tensor, rows: Rows
) -> Tensor:
    """Gradient of the projected qkv, packed as it is: (N, (H + 2K) d)."""
    add_gradients_(g.o, result.out, dy)
    q, k, v, q_rstd, k_rstd = result.heads
    dout, out = linear_backward(dy, w.o).view(q.shape), result.out.view(q.shape)
    dqkv = torch.empty_like(result.qkv)
    dq, dk, dv = _split(cfg, dqkv)
    scale, window = cfg.layer_scale(layer), cfg.layer_window(layer)
    ops.attention_bwd(dout, q, k, v, out, result.lse, rows.docs, scale, dq, dk, dv, window)
    _rotate_(cfg, dqkv, rows, inverse=True)
    q, k, _ = _split(cfg, result.qkv)  # before the norms, if any
    _head_norm_backward_(dq, q, w.q_norm, q_rstd, g.q_norm)
    _head_norm_backward_(dk, k, w.k_norm, k_rstd, g.k_norm)
    return dqkv


def backward_to_x(cfg: ModelConfig, w: Weights, g: Weights, x: Tensor, dqkv: Tensor, dy: Tensor, dx: Tensor) -> None:
    """Fills dx (N, D): the gradient of x through qkv, plus dy."""
    y, stats = norm(x, w.norm, cfg.eps)
    add_gradients_(g.qkv, y, dqkv)
    del y  # shapes._block_workspace
    norm_backward(linear_backward(dqkv, w.qkv), x, w.norm, stats, g.norm, dy, dx)


def _project(
    cfg: ModelConfig, w: Weights, x: Tensor, rows: Rows, out: Tensor | None = None, copy: Tensor | None = None
) -> Tensor:
    """qkv (N, (H + 2K) d) as it is saved."""
    y, _ = norm(x, w.norm, cfg.eps, copy)
    qkv = linear(y, w.qkv, out)
    if not cfg.qk_norm:
        _rotate_(cfg, qkv, rows)
    return qkv


def _heads(cfg: ModelConfig, w: Weights, qkv: Tensor, rows: Rows) -> _Heads:
    q, k, v = _split(cfg, qkv)
    if w.q_norm is None or w.k_norm is None:
        return _Heads(q, k, v)
    q, q_rstd = ops.head_rmsnorm_fwd(q, w.q_norm, cfg.eps)
    k, k_rstd = ops.head_rmsnorm_fwd(k, w.k_norm, cfg.eps)
    for heads in (q, k):
        _rope_(heads, rows)
    return _Heads(q, k, v, q_rstd, k_rstd)


def _head_norm_backward_(d_: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor | None, dweight_: Tensor | None) -> None:
    """The gradient d_ (N, heads, d) behind a norm of each head becomes that of x, before it; none without a norm."""
    if w is not None and rstd is not None and dweight_ is not None:
        ops.head_rmsnorm_bwd(d_, x, w, rstd, dweight_, d_)


def _attend(
    cfg: ModelConfig,
    layer: int,
    heads: _Heads,
    rows: Rows,
    out: Tensor | None = None,
    attend: Attend = ops.attention_fwd,
) -> tuple[Tensor, Tensor]:
    """(attn_out (N, H d), lse (H, N))."""
    q, k, v = heads[:3]
    out = None if out is None else out.view(q.shape)
    out, lse = attend(q, k, v, rows.docs, cfg.layer_scale(layer), cfg.layer_window(layer), out)
    return out.view(q.shape[0], -1), lse


def _split(cfg: ModelConfig, qkv: Tensor) -> list[Tensor]:
    """Views of q (N, H, d), k and v (N, K, d) in a packed qkv."""
    heads = qkv.view(qkv.shape[0], -1, cfg.head_dim)
    return list(heads.split((cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads), 1))


def _rotate_(cfg: ModelConfig, qkv_: Tensor, rows: Rows, inverse: bool = False) -> None:
    """Rotates the q and k heads of a packed qkv in one pass."""
    _rope_(qkv_.view(qkv_.shape[0], -1, cfg.head_dim)[:, : cfg.n_heads + cfg.n_kv_heads], rows, inverse)


def _rope_(heads_: Tensor, rows: Rows, inverse: bool = False) -> None:
    """Rotates heads_ (N, heads, d), unless positions are learned."""
    if rows.cos is not None and rows.sin is not None:
        ops.rope_(heads_, rows.cos, rows.sin, rows.docs.positions, inverse)

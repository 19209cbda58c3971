"""A block of the LLaMA family and its halves, forward and backward as explicit functions over named saved tensors.

    resid = x + attention(norm1(x)) @ o          out = resid + swiglu(norm2(resid) @ gate_up) @ down

Legend: N tokens, D width, H query heads, K key/value heads, d head width, F hidden width. Weights are (out, in). Saved:
x (the caller's), qkv (N, (H + 2K) d), attn_out (N, H d), lse (H, N) fp32, resid (N, D), gate_up (N, 2F). With
query/key norms (Qwen3) qkv is kept as projected; without, q and k in it are rotated already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.config import ModelConfig
from trireme.models.linear import add_linear_, add_product_, fuse, linear
from trireme.models.rows import Rows
from trireme.models.shapes import layer_prefix


class Weights(NamedTuple):
    """A block's weights, or their gradients. What the architecture, or half a block, lacks is None."""

    norm1: Tensor | None  # (D,)
    qkv: Tensor | None  # ((H + 2K) d, D)
    o: Tensor | None  # (D, H d)
    norm2: Tensor | None  # (D,)
    gate_up: Tensor | None  # (2F, D)
    down: Tensor | None  # (D, F)
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    q_norm: Tensor | None  # (d,)
    k_norm: Tensor | None


def weights(cfg: ModelConfig, layer: int, views: dict[str, Tensor]) -> Weights:
    """Weights over `views`, a unit's tensors by Hugging Face name, laid out as shapes.weight_groups says."""
    prefix = layer_prefix(cfg, layer)
    qkv = [f"self_attn.{name}_proj." for name in "qkv"]
    gate_up = ["mlp.gate_proj.", "mlp.up_proj."]

    def get(name: str) -> Tensor | None:
        return views.get(prefix + name)

    def fused(names: list[str], what: str) -> Tensor | None:
        return fuse(*(views[prefix + name + what] for name in names)) if prefix + names[0] + what in views else None

    return Weights(
        norm1=get("input_layernorm.weight"),
        qkv=fused(qkv, "weight"),
        o=get("self_attn.o_proj.weight"),
        norm2=get("post_attention_layernorm.weight"),
        gate_up=fused(gate_up, "weight"),
        down=get("mlp.down_proj.weight"),
        qkv_bias=fused(qkv, "bias"),
        o_bias=get("self_attn.o_proj.bias"),
        gate_up_bias=fused(gate_up, "bias"),
        down_bias=get("mlp.down_proj.bias"),
        q_norm=get("self_attn.q_norm.weight"),
        k_norm=get("self_attn.k_norm.weight"),
    )


class _Heads(NamedTuple):
    """What attention sees, and what the way back through the norms of q and k needs."""

    q: Tensor  # (N, H, d)
    k: Tensor  # (N, K, d)
    v: Tensor  # (N, K, d)
    q_rstd: Tensor | None = None  # (N, H) fp32
    k_rstd: Tensor | None = None


class _Attention(NamedTuple):
    """The attention half of the block, as backward needs it."""

    qkv: Tensor  # (N, (H + 2K) d)
    heads: _Heads
    out: Tensor  # (N, H d)
    lse: Tensor  # (H, N) fp32


def _split(cfg: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q (N, H, d), k and v (N, K, d) in a packed qkv."""
    heads = qkv.view(qkv.shape[0], -1, cfg.head_dim)
    return heads.split((cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads), 1)


def _rotate_(cfg: ModelConfig, qkv_: Tensor, rows: Rows, inverse: bool = False) -> None:
    """Rotates the q and k heads of a packed qkv in one pass."""
    heads = qkv_.view(qkv_.shape[0], -1, cfg.head_dim)[:, : cfg.n_heads + cfg.n_kv_heads]
    ops.rope_(heads, rows.cos, rows.sin, rows.docs.positions, inverse)


def _qkv(
    cfg: ModelConfig, w: Weights, x: Tensor, rows: Rows, out: Tensor | None = None, copy: Tensor | None = None
) -> Tensor:
    y, _, _ = ops.rmsnorm_fwd(x, w.norm1, cfg.eps, out=copy)
    qkv = linear(y, w.qkv.T, w.qkv_bias, out)
    if not cfg.qk_norm:
        _rotate_(cfg, qkv, rows)
    return qkv


def _heads(cfg: ModelConfig, w: Weights, qkv: Tensor, rows: Rows) -> _Heads:
    q, k, v = _split(cfg, qkv)
    if not cfg.qk_norm:
        return _Heads(q, k, v)
    q, q_rstd = ops.head_rmsnorm_fwd(q, w.q_norm, cfg.eps)
    k, k_rstd = ops.head_rmsnorm_fwd(k, w.k_norm, cfg.eps)
    ops.rope_(q, rows.cos, rows.sin, rows.docs.positions)
    ops.rope_(k, rows.cos, rows.sin, rows.docs.positions)
    return _Heads(q, k, v, q_rstd, k_rstd)


def _attend(cfg: ModelConfig, layer: int, heads: _Heads, rows: Rows, out: Tensor | None = None, attention=None):
    """(attn_out (N, H d), lse (H, N))."""
    q, k, v = heads[:3]
    out = None if out is None else out.view(q.shape)
    out, lse = (attention or ops.attention_fwd)(
        q, k, v, rows.docs, cfg.layer_scale(layer), cfg.layer_window(layer), out
    )
    return out.view(q.shape[0], -1), lse


def forward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    attention: Callable | None = None,
) -> None:
    """Fills out (N, D) and every tensor of `saved`; names that are not in it become temporaries. x (N, D) is read.

    `attention` may stand in for ops.attention_fwd: a generator's, which sees a cache too.
    """
    resid = attention_forward(cfg, layer, w, x, rows, saved, saved.get("resid", out), attention)
    mlp_forward(cfg, layer, w, resid, rows, saved, out)


def attention_forward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    attention: Callable | None = None,
) -> Tensor:
    """The first half, as forward; returns `out`. The norm copies x there, and what is to be added is added to it."""
    qkv = _qkv(cfg, w, x, rows, saved.get("qkv"), out)
    attn_out, lse = _attend(cfg, layer, _heads(cfg, w, qkv, rows), rows, saved.get("attn_out"), attention)
    if "lse" in saved:
        saved["lse"].copy_(lse)
    del qkv, lse
    return add_linear_(out, attn_out, w.o.T, w.o_bias)


def mlp_forward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    attention: Callable | None = None,
) -> None:
    """The second half, as forward; x (N, D) is what the first has made, and may be `out`."""
    y, _, _ = ops.rmsnorm_fwd(x, w.norm2, cfg.eps, out=None if x is out else out)
    gate_up = linear(y, w.gate_up.T, w.gate_up_bias, saved.get("gate_up"))
    del y
    act = ops.swiglu_fwd(gate_up)
    del gate_up
    add_linear_(out, act, w.down.T, w.down_bias)


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
    attention = None
    if "resid" in saved:
        resid = saved["resid"]
    else:
        attention = _rebuild_attention(cfg, layer, w, x, saved, rows)
        resid = add_linear_(x.clone(), attention.out, w.o.T, w.o_bias)
    dresid = mlp_backward(cfg, layer, w, g, resid, saved, dy, rows)
    del resid
    attention = attention or _rebuild_attention(cfg, layer, w, x, saved, rows)
    dqkv = _attention_backward(cfg, layer, w, g, attention, dresid, rows)
    del attention
    _qkv_backward(cfg, w, g, x, dqkv, dresid, dx)


def attention_backward(
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
    """The first half, as backward; dy (N, D) is the gradient of what it has made."""
    attention = _rebuild_attention(cfg, layer, w, x, saved, rows)
    dqkv = _attention_backward(cfg, layer, w, g, attention, dy, rows)
    del attention
    _qkv_backward(cfg, w, g, x, dqkv, dy, dx)


def mlp_backward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    g: Weights,
    x: Tensor,
    saved: dict[str, Tensor],
    dy: Tensor,
    rows: Rows,
    dx: Tensor | None = None,
) -> Tensor:
    """The second half, as backward; returns the gradient of x (N, D), in `dx` where given: through the MLP, plus dy."""
    y, rstd, _ = ops.rmsnorm_fwd(x, w.norm2, cfg.eps)
    gate_up = saved["gate_up"] if "gate_up" in saved else linear(y, w.gate_up.T, w.gate_up_bias)
    d_gate_up, act = ops.swiglu_bwd(torch.mm(dy, w.down), gate_up)
    del gate_up
    add_product_(g.down, dy, act)
    del act
    add_product_(g.gate_up, d_gate_up, y)
    if cfg.mlp_bias:
        ops.bias_bwd_(g.down_bias, dy)
        ops.bias_bwd_(g.gate_up_bias, d_gate_up)
    del y
    d_norm = torch.mm(d_gate_up, w.gate_up)
    del d_gate_up
    return ops.rmsnorm_bwd(d_norm, x, w.norm2, rstd, g.norm2, dy, dx)


def _rebuild_attention(
    cfg: ModelConfig, layer: int, w: Weights, x: Tensor, saved: dict[str, Tensor], rows: Rows
) -> _Attention:
    """The attention half, saved or computed again as forward does."""
    qkv = saved["qkv"] if "qkv" in saved else _qkv(cfg, w, x, rows)
    heads = _heads(cfg, w, qkv, rows)
    if "attn_out" in saved and "lse" in saved:
        return _Attention(qkv, heads, saved["attn_out"], saved["lse"])
    return _Attention(qkv, heads, *_attend(cfg, layer, heads, rows))


def _attention_backward(
    cfg: ModelConfig, layer: int, w: Weights, g: Weights, attention: _Attention, dresid: Tensor, rows: Rows
) -> Tensor:
    """Gradient of the projected qkv, packed as it is: (N, (H + 2K) d)."""
    add_product_(g.o, dresid, attention.out)
    if cfg.o_bias:
        ops.bias_bwd_(g.o_bias, dresid)
    q, k, v, q_rstd, k_rstd = attention.heads
    dout, out = torch.mm(dresid, w.o).view(q.shape), attention.out.view(q.shape)
    dqkv = torch.empty_like(attention.qkv)
    dq, dk, dv = _split(cfg, dqkv)
    scale, window = cfg.layer_scale(layer), cfg.layer_window(layer)
    ops.attention_bwd(dout, q, k, v, out, attention.lse, rows.docs, scale, dq, dk, dv, window)
    _rotate_(cfg, dqkv, rows, inverse=True)
    if cfg.qk_norm:
        q, k, _ = _split(cfg, attention.qkv)  # before the norms
        ops.head_rmsnorm_bwd(dq, q, w.q_norm, q_rstd, g.q_norm, dq)
        ops.head_rmsnorm_bwd(dk, k, w.k_norm, k_rstd, g.k_norm, dk)
    return dqkv


def _qkv_backward(
    cfg: ModelConfig, w: Weights, g: Weights, x: Tensor, dqkv: Tensor, dresid: Tensor, dx: Tensor
) -> None:
    """Fills dx (N, D): the gradient of x through qkv, plus dresid."""
    y, rstd, _ = ops.rmsnorm_fwd(x, w.norm1, cfg.eps)
    add_product_(g.qkv, dqkv, y)
    if cfg.qkv_bias:
        ops.bias_bwd_(g.qkv_bias, dqkv)
    del y
    dy = torch.mm(dqkv, w.qkv)
    ops.rmsnorm_bwd(dy, x, w.norm1, rstd, g.norm1, dresid, dx)


FORWARD = {"block": forward, "attention": attention_forward, "mlp": mlp_forward}
BACKWARD = {"block": backward, "attention": attention_backward, "mlp": mlp_backward}

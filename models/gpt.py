"""A GPT-2 block and its halves, forward and backward as explicit functions over named saved tensors.

    resid = x + attention(norm1(x)) @ c_proj         out = resid + gelu(norm2(resid) @ fc) @ proj        (+ biases)

Legend: N tokens, D width, H heads, d head width, F hidden width. Weights are (in, out). Saved: x (the caller's),
qkv (N, 3D), attn_out (N, D), lse (H, N) fp32, resid (N, D), fc (N, F), the last without its bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.config import ModelConfig
from trireme.models.linear import add_product_, linear, linear_add
from trireme.models.rows import Rows
from trireme.models.shapes import layer_prefix


class Weights(NamedTuple):
    """A block's weights, or their gradients. What half a block lacks is None."""

    norm1: Tensor | None  # (D,)
    norm1_bias: Tensor | None
    qkv: Tensor | None  # (D, 3D)
    qkv_bias: Tensor | None
    o: Tensor | None  # (D, D)
    o_bias: Tensor | None
    norm2: Tensor | None  # (D,)
    norm2_bias: Tensor | None
    fc: Tensor | None  # (D, F)
    fc_bias: Tensor | None
    proj: Tensor | None  # (F, D)
    proj_bias: Tensor | None


_NAMES = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")  # in the order of Weights


def weights(cfg: ModelConfig, layer: int, views: dict[str, Tensor]) -> Weights:
    """Weights over `views`, a unit's tensors by Hugging Face name."""
    prefix = layer_prefix(cfg, layer)
    return Weights(*(views.get(f"{prefix}{name}.{part}") for name in _NAMES for part in ("weight", "bias")))


class _Attention(NamedTuple):
    """The attention half of the block, as backward needs it."""

    qkv: Tensor  # (N, 3D)
    out: Tensor  # (N, D)
    lse: Tensor  # (H, N) fp32


def _heads(cfg: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k, v, each (N, H, d), in a packed qkv."""
    return qkv.view(qkv.shape[0], 3, cfg.n_heads, cfg.head_dim).unbind(1)


def _qkv(cfg: ModelConfig, w: Weights, x: Tensor, out: Tensor | None = None) -> Tensor:
    y, _, _, _ = ops.layernorm_fwd(x, w.norm1, w.norm1_bias, cfg.eps)
    return linear(y, w.qkv, w.qkv_bias, out)


def _attend(cfg: ModelConfig, layer: int, qkv: Tensor, rows: Rows, out: Tensor | None = None, attention=None):
    """(attn_out (N, D), lse (H, N))."""
    q, k, v = _heads(cfg, qkv)
    out = None if out is None else out.view(q.shape)
    out, lse = (attention or ops.attention_fwd)(q, k, v, rows.docs, cfg.layer_scale(layer), 0, out)
    return out.view(qkv.shape[0], -1), lse


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
    resid = attention_forward(cfg, layer, w, x, rows, saved, saved.get("resid"), attention)
    mlp_forward(cfg, layer, w, resid, rows, saved, out)


def attention_forward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor | None,
    attention: Callable | None = None,
) -> Tensor:
    """The first half, as forward; returns its result (N, D), in `out` where given."""
    qkv = _qkv(cfg, w, x, saved.get("qkv"))
    attn_out, lse = _attend(cfg, layer, qkv, rows, saved.get("attn_out"), attention)
    if "lse" in saved:
        saved["lse"].copy_(lse)
    del qkv, lse
    return linear_add(attn_out, w.o, w.o_bias, x, out)


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
    """The second half, as forward; x (N, D) is what the first has made."""
    y, _, _, _ = ops.layernorm_fwd(x, w.norm2, w.norm2_bias, cfg.eps)
    fc = linear(y, w.fc, None, saved.get("fc"))
    del y
    act = ops.gelu_bias_fwd(fc, w.fc_bias)
    del fc
    linear_add(act, w.proj, w.proj_bias, x, out)


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
        resid = linear_add(attention.out, w.o, w.o_bias, x)
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
    y, mean, rstd, _ = ops.layernorm_fwd(x, w.norm2, w.norm2_bias, cfg.eps)
    fc = saved["fc"] if "fc" in saved else linear(y, w.fc, None)
    d_fc, act = ops.gelu_bias_bwd(torch.mm(dy, w.proj.T), fc, w.fc_bias, g.fc_bias)
    del fc
    add_product_(g.proj, act, dy)
    ops.bias_bwd_(g.proj_bias, dy)
    del act
    add_product_(g.fc, y, d_fc)
    del y
    d_norm = torch.mm(d_fc, w.fc.T)
    del d_fc
    return ops.layernorm_bwd(d_norm, x, w.norm2, mean, rstd, g.norm2, g.norm2_bias, dy, dx)


def _rebuild_attention(
    cfg: ModelConfig, layer: int, w: Weights, x: Tensor, saved: dict[str, Tensor], rows: Rows
) -> _Attention:
    """The attention half, saved or computed again as forward does."""
    qkv = saved["qkv"] if "qkv" in saved else _qkv(cfg, w, x)
    if "attn_out" in saved and "lse" in saved:
        return _Attention(qkv, saved["attn_out"], saved["lse"])
    return _Attention(qkv, *_attend(cfg, layer, qkv, rows))


def _attention_backward(
    cfg: ModelConfig, layer: int, w: Weights, g: Weights, attention: _Attention, dresid: Tensor, rows: Rows
) -> Tensor:
    """Gradient of qkv, packed as it is: (N, 3D)."""
    add_product_(g.o, attention.out, dresid)
    ops.bias_bwd_(g.o_bias, dresid)
    q, k, v = _heads(cfg, attention.qkv)
    dout, out = torch.mm(dresid, w.o.T).view(q.shape), attention.out.view(q.shape)
    dqkv = torch.empty_like(attention.qkv)
    scale = cfg.layer_scale(layer)
    ops.attention_bwd(dout, q, k, v, out, attention.lse, rows.docs, scale, *_heads(cfg, dqkv))
    return dqkv


def _qkv_backward(
    cfg: ModelConfig, w: Weights, g: Weights, x: Tensor, dqkv: Tensor, dresid: Tensor, dx: Tensor
) -> None:
    """Fills dx (N, D): the gradient of x through qkv, plus dresid."""
    y, mean, rstd, _ = ops.layernorm_fwd(x, w.norm1, w.norm1_bias, cfg.eps)
    add_product_(g.qkv, y, dqkv)
    ops.bias_bwd_(g.qkv_bias, dqkv)
    del y
    dy = torch.mm(dqkv, w.qkv.T)
    ops.layernorm_bwd(dy, x, w.norm1, mean, rstd, g.norm1, g.norm1_bias, dresid, dx)


FORWARD = {"block": forward, "attention": attention_forward, "mlp": mlp_forward}
BACKWARD = {"block": backward, "attention": attention_backward, "mlp": mlp_backward}

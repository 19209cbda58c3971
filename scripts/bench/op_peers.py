"""Other implementations of the ops: torch's and Liger's.

Functions take an op's arguments and return name -> (callable, its share of the op's work).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trireme.kernels import ops

Peers = dict[str, tuple[Callable, float]]


def compiled(op: str, args: tuple, kwargs: dict) -> Peers:
    """The reference under torch.compile, or FlexAttention."""
    if op == "attention_fwd":
        return {"FlexAttention": (flex_attention(*args)[0], 1.0)}
    if op == "attention_bwd":
        dout, q, k, v, _, _, docs, scale, *_ = args
        return {"FlexAttention": (flex_attention(q, k, v, docs, scale, dout)[1], 1.0)}
    if op in ("adamw_", "embedding_bwd_", "linear_cross_entropy", "grouped_mm", "grouped_add_"):  # host loops
        return {}
    plain = getattr(ops, op).__wrapped__
    if op == "grad_finish" and len(args) == 1:  # in any order
        plain = lambda x: x.float().square().sum()
    plain = torch.compile(plain, dynamic=False)
    return {"torch.compile": (lambda: plain(*args, **kwargs), 1.0)}


def liger(op: str, args: tuple, kwargs: dict) -> Peers:
    try:
        make = _LIGER[op]
        return {"Liger": make(*args, **kwargs)}
    except (ImportError, KeyError):
        return {}


def _norm_fwd(x, w, eps, kind=None, bias=None, gate=None, copy=None):
    from liger_kernel.ops import layer_norm, rms_norm

    if gate is not None or copy is not None or x.shape[1] > 1:
        raise KeyError("Liger has no such norm")
    if bias is not None:
        return partial(layer_norm.layer_norm_forward, x[:, 0], w, bias, eps), 1.0
    return partial(rms_norm.rms_norm_forward, x[:, 0], w, eps, 0.0, "llama", None), 1.0


def _norm_bwd(dy, x, w, stats, kind, dx, dw, db=None, gate=None, dgate=None, dresidual=None):
    from liger_kernel.ops import fused_add_rms_norm, layer_norm, rms_norm

    if gate is not None or x.shape[1] > 1 or (db is not None and dresidual is not None):
        raise KeyError("Liger has no such norm")
    dy, h = dy[:, 0], x[:, 0]
    if db is not None:
        mean, rstd = stats.mean[:, 0], stats.rstd[:, 0]
        return partial(layer_norm.layer_norm_backward, dy, h, w, torch.zeros_like(w), mean, rstd), 1.0
    if dresidual is None:
        _, h, rstd, block, warps, mode = rms_norm.rms_norm_forward(h, w, 1e-5, 0.0, "llama", None)
        return partial(rms_norm.rms_norm_backward, dy, h, w, rstd, 0.0, mode, block, warps, False, None), 1.0
    _, s, rstd, *settings, mode = fused_add_rms_norm.fused_add_rms_norm_forward(h, h, w, 1e-5, 0.0, "llama")
    run = fused_add_rms_norm.fused_add_rms_norm_backward
    return partial(run, dy, dresidual[:, 0], s, w, rstd, 0.0, mode, *settings, False), 1.0


def _gated_unit(act):
    from liger_kernel.ops import geglu, swiglu

    if not act.gated or act.limit or act.name not in ("silu", "gelu"):
        raise KeyError("Liger has no such activation")
    return (swiglu, "swiglu") if act.name == "silu" else (geglu, "geglu")


def _act_fwd(h, act, bias=None):
    module, name = _gated_unit(act)
    gate, up = (t.contiguous() for t in h.chunk(2, 1))
    return partial(getattr(module, f"{name}_forward"), gate, up), 1.0


def _act_bwd(dy, h, act, bias=None, dbias=None, weights=None, order=None):
    module, name = _gated_unit(act)
    if weights is not None:
        raise KeyError("Liger has no weights of rows")
    gate, up = (t.contiguous() for t in h.chunk(2, 1))  # overwritten; does not recompute the activation
    return partial(getattr(module, f"{name}_backward"), gate, up, dy), 5 / 6


def _rope(x, cos, sin, positions):
    from liger_kernel.ops import rope

    q, k = (t[None].transpose(1, 2) for t in (x[:, :32].contiguous(), x[:, 32:].contiguous()))
    wide = [torch.cat((t, t), 1) for t in (cos, sin)]
    return partial(rope.rope_forward, q, k, *wide), 1.0


def _linear_cross_entropy(x, w, labels, rows, scale, dw, dx, chunk, taught=None):
    from liger_kernel.ops import fused_linear_cross_entropy as module

    def run():  # computes gradients itself, with autograd off
        with torch.no_grad():
            module.fused_linear_cross_entropy_forward(x, w, labels)

    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return run, 1.0


_LIGER = {
    "norm_fwd": _norm_fwd,
    "norm_bwd": _norm_bwd,
    "act_fwd": _act_fwd,
    "act_bwd_": _act_bwd,
    "rope_": _rope,
    "linear_cross_entropy": _linear_cross_entropy,
}


# ---------------------------------------------------------------- attention


def dense_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, batch: int, scale: float) -> tuple[Peers, Peers]:
    """torch's cuDNN and FlashAttention-2, (forward, backward), on documents of one length."""
    group = q.shape[1] // k.shape[1]
    view = lambda t: t.unflatten(0, (batch, -1)).transpose(1, 2)
    q, dout = view(q), view(dout)
    k, v = (view(t.repeat_interleave(group, 1)) for t in (k, v))
    fwd: Peers = {}
    bwd: Peers = {}
    aten = torch.ops.aten
    try:
        run = partial(aten._scaled_dot_product_cudnn_attention, q, k, v, None, True, 0.0, True, False, scale=scale)
        o, lse, cq, ck, mq, mk, seed, offset, _ = run()
        grad = partial(
            aten._scaled_dot_product_cudnn_attention_backward,
            dout, q, k, v, o, lse, seed, offset, None, cq, ck, mq, mk, 0.0, True, scale=scale,
        )  # fmt: skip
        grad()
        fwd["cuDNN"], bwd["cuDNN"] = (run, 1.0), (grad, 1.0)
    except RuntimeError:  # no such kernel for this chip or head width
        pass
    try:
        run = partial(aten._scaled_dot_product_flash_attention, q, k, v, 0.0, True, False, scale=scale)
        o, lse, cq, ck, mq, mk, seed, offset, _ = run()
        grad = partial(
            aten._scaled_dot_product_flash_attention_backward,
            dout, q, k, v, o, lse, cq, ck, mq, mk, 0.0, True, seed, offset, scale=scale,
        )  # fmt: skip
        grad()
        fwd["FlashAttention-2"], bwd["FlashAttention-2"] = (run, 1.0), (grad, 1.0)
    except RuntimeError:
        pass
    return fwd, bwd


def flex_attention(q: Tensor, k: Tensor, v: Tensor, docs, scale: float, dout: Tensor | None = None):
    """FlexAttention's (forward, backward), causal in packed documents; without dout None."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    N = q.shape[0]
    document = torch.repeat_interleave(torch.arange(len(docs.lengths)), torch.tensor(docs.lengths)).to(q.device)
    visible = lambda b, h, i, j: (i >= j) & (document[i] == document[j])
    mask = create_block_mask(visible, None, None, N, N, device=q.device, _compile=True)
    leaves = [t.transpose(0, 1)[None].detach().requires_grad_(dout is not None) for t in (q, k, v)]
    call = torch.compile(partial(flex_attention, block_mask=mask, scale=scale, enable_gqa=True), dynamic=False)
    out = call(*leaves)
    if dout is None:
        return partial(call, *leaves), None
    return None, partial(torch.autograd.grad, out, leaves, dout.transpose(0, 1)[None], retain_graph=True)


# ---------------------------------------------------------------- experts


def grouped_product(x: Tensor, w: Tensor, order: ops.Order, k: int) -> Peers:
    """torch's grouped GEMM of sorted rows, without and with the gather of rows by token; one matrix for all rows.

    Without a gather also our kernel, since the op may call torch's.
    """
    tokens, ends = order.pair // max(k, 1), order.starts[1:].clone()
    rows = x[tokens] if k else x
    peers: Peers = {
        "grouped": (lambda: torch._grouped_mm(rows, w, offs=ends), 1.0),
        "one matrix": (lambda: torch.mm(rows, w[0]), 1.0),
    }
    if k:
        peers["with gather"] = (lambda: torch._grouped_mm(x.index_select(0, tokens), w, offs=ends), 1.0)
    else:
        y = torch.empty(len(x), w.shape[2], dtype=x.dtype, device=x.device)
        peers["our kernel"] = (lambda: ops.grouped_mm(x, w, order, out=y), 1.0)
    return peers


def grouped_gradient(dw: Tensor, a: Tensor, b: Tensor, order: ops.Order, k_a: int, k_b: int) -> Peers:
    """torch's, in bf16 and not added to a sum, of sorted rows; one matrix for all rows."""
    ends = order.starts[1:].clone()
    a, b = (x[order.pair // k] if k else x for x, k in ((a, k_a), (b, k_b)))
    return {
        "grouped": (lambda: torch._grouped_mm(a.T, b, offs=ends), 1.0),
        "one matrix": (lambda: torch.mm(a.T, b), 1.0),
    }

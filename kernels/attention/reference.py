"""Attention in plain torch, with the names and signatures of the launchers: reference for tests, and CPU path.

Legend: N packed tokens, T tokens of a document, H query heads, K key/value heads, d width of queries and keys,
e of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.attention.docs import Docs
from trireme.kernels.reference import add_, silu, soft_cap, upcast


def _scores(q: Tensor, k: Tensor, scale: float, window: int, cap: float) -> Tensor:
    """Masked, (H, T, T), of a document's q and k (T, H, d)."""
    s = soft_cap(torch.einsum("qhd,khd->hqk", q, k) * scale, cap)
    t = torch.arange(q.shape[0], device=q.device)
    dist = t[:, None] - t[None, :]
    hidden = (dist < 0) if window == 0 else (dist < 0) | (dist >= window)
    return s.masked_fill_(hidden, float("-inf"))


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    docs: Docs,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention by document. q (N, H, d); k (N, K, d), v (N, K, e), K divides H; tokens may be strided.

    `window` > 0: a token sees itself and the window - 1 before it. `cap` > 0: scores s are cap * tanh(s / cap).
    Returns (out (N, H, e), lse (H, N) fp32, natural log).
    """
    N, H, _ = q.shape
    group = H // k.shape[1]
    out = q.new_empty((N, H, v.shape[2])) if out is None else out
    lse = torch.empty((H, N), dtype=upcast(q).dtype, device=q.device)
    start = 0
    for length in docs.lengths:
        rows = slice(start, start + length)
        kf, vf = (upcast(t[rows]).repeat_interleave(group, 1) for t in (k, v))
        s = _scores(upcast(q[rows]), kf, scale, window, cap)
        lse[:, rows] = torch.logsumexp(s, -1)
        out[rows] = torch.einsum("hqk,khd->qhd", torch.exp(s - lse[:, rows, None]), vf).to(out.dtype)
        start += length
    return out, lse


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    docs: Docs,
    scale: float,
    dq_: Tensor,
    dk_: Tensor,
    dv_: Tensor,
    window: int = 0,
    cap: float = 0.0,
) -> None:
    """Writes dq_ (N, H, d), dk_ (N, K, d) and dv_ (N, K, e), perhaps strided."""
    group = q.shape[1] // k.shape[1]
    start = 0
    for length in docs.lengths:
        rows = slice(start, start + length)
        qf, dof = upcast(q[rows]), upcast(dout[rows])
        kf, vf = (upcast(t[rows]).repeat_interleave(group, 1) for t in (k, v))
        s = _scores(qf, kf, scale, window, cap)
        p = torch.exp(s - lse[:, rows, None])
        delta = (dof * upcast(out[rows])).sum(-1).T[..., None]  # (H, T, 1)
        ds = p * (torch.einsum("qhd,khd->hqk", dof, vf) - delta) * scale
        ds = ds * (1 - (s / cap).clamp(min=-1) ** 2) if cap else ds  # -1: hidden
        sum_group = lambda t: t.unflatten(1, (-1, group)).sum(2)
        dq_[rows] = torch.einsum("hqk,khd->qhd", ds, kf).to(dq_.dtype)
        dk_[rows] = sum_group(torch.einsum("hqk,qhd->khd", ds, qf)).to(dk_.dtype)
        dv_[rows] = sum_group(torch.einsum("hqk,qhd->khd", p, dof)).to(dv_.dtype)
        start += length


def sinks_fwd_(out_: Tensor, lse_: Tensor, sinks: Tensor) -> None:
    """Adds a score to each head's softmax, sinks (H,), in place: to lse_ (H, N) fp32, and from out_ (N, H, d)."""
    total = torch.logaddexp(lse_, upcast(sinks)[:, None].to(lse_.dtype))
    out_.copy_(upcast(out_) * torch.exp(lse_ - total).T[..., None])
    lse_.copy_(total)


def sinks_bwd_(dsinks_: Tensor, dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """dsinks_ (H,) is added to, given the gradient of `out` (N, H, d) after sinks_fwd_, and lse (H, N) after it."""
    share = torch.exp(upcast(sinks)[:, None] - lse)
    add_(dsinks_, -(share * (upcast(dout) * upcast(out)).sum(-1).T).sum(1))


def gate_fwd(x: Tensor, gate: Tensor, act: str) -> Tensor:
    """x * f(gate), f "sigmoid", "silu" or "softplus"; x (N, H, d) contiguous.

    The gate is (N, H, d), or (N, H, 1) of heads; its rows and heads may be strided.
    """
    return (upcast(x) * _gating(upcast(gate), act)[0]).to(x.dtype)


def gate_bwd(dy: Tensor, x: Tensor, gate: Tensor, dgate: Tensor, act: str) -> Tensor:
    """Gradient of x (N, H, d); fills dgate, which may be strided as the gate."""
    (f, slope), d = _gating(upcast(gate), act), upcast(dy)
    dgate.copy_((d * upcast(x) * slope).sum_to_size(dgate.shape))
    return (d * f).to(x.dtype)


def _gating(z: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """(f(z), its derivative)."""
    s = torch.sigmoid(z)
    if act == "softplus":
        return torch.nn.functional.softplus(z), s
    return (s, s * (1 - s)) if act == "sigmoid" else silu(z)

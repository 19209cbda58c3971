"""Linear recurrences over packed documents in plain torch: reference for tests, and CPU path.

By head, with a state S (d, e) that is zero before each document's first token:

    S <- exp(g) S;  delta = beta (v - S^T k), or without the delta rule beta v;  S <- S + k delta^T;  o = S^T q + skip v

Computed by chunks (Yang et al. 2024, arXiv:2406.06484 and 2412.06464; Dao and Gu 2024, arXiv:2405.21060).
Legend: N packed tokens, K heads of q and k (value head j uses j // (H / K)), H of values, d and e their widths, n
chunks of C tokens of a document; G sums of g from a chunk's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from trireme.kernels.attention.docs import Docs
from trireme.kernels.reference import add_, upcast

CHUNK = 64


class _Local(NamedTuple):
    """What depends on one chunk only; all (H, n, C, .)."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # (H, n, C, 1); so G
    G: Tensor
    gamma: Tensor  # exp(G_i - G_j), i >= j
    P: Tensor  # q k^T * gamma
    A: Tensor | None  # strictly lower beta k k^T * gamma; with the delta rule, as T and W
    T: Tensor | None  # (1 + A)^-1
    U: Tensor
    W: Tensor | None


def scan_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    docs: Docs,
    delta: bool,
    skip: Tensor | None = None,
    out: Tensor | None = None,
    final: Tensor | None = None,
) -> Tensor:
    """The outputs o (N, H, e), in `out` if given.

    q, k (N, K, d), v (N, H, e), g <= 0 and beta (N, H) fp32, skip (H,).

    `delta`: with the delta rule. Fills `final` (documents, H, d, e) fp32, if given, with the states behind each
    document's last token. Rows of q, k and v may be strided.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    for i, rows in enumerate(_documents(docs)):
        local = _local(q[rows], k[rows], v[rows], g[rows], beta[rows], delta)
        states, D, S = _walk(local)
        o = _rows(local.P @ D + (local.G.exp() * local.q) @ states, rows)
        if skip is not None:
            o = o + upcast(skip)[:, None] * upcast(v[rows])
        out[rows] = o.to(out.dtype)
        if final is not None:
            final[i] = S
    return out


def scan_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    docs: Docs,
    delta: bool,
    skip: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fills dq, dk (N, K, d) and dv (N, H, e), whose rows may be strided. Returns dg, dbeta (N, H) fp32, dskip (H,)."""
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    for rows in _documents(docs):
        local = _local(q[rows], k[rows], v[rows], g[rows], beta[rows], delta)
        gradients = _backward(local, _chunks(dout[rows], v.shape[1]))
        d_q, d_k, d_v, d_g, d_beta = (_rows(t, rows) for t in gradients)
        for t, gradient in ((dq, d_q), (dk, d_k)):
            t[rows] = gradient.unflatten(1, (t.shape[1], -1)).sum(2).to(t.dtype)
        dv[rows] = (d_v if skip is None else d_v + upcast(skip)[:, None] * upcast(dout[rows])).to(dv.dtype)
        dg[rows], dbeta[rows] = d_g[..., 0], d_beta[..., 0]
    return dg, dbeta, None if skip is None else (upcast(dout) * upcast(v)).sum((0, 2))


def _documents(docs: Docs) -> Iterator[slice]:
    start = 0
    for length in docs.lengths:
        yield slice(start, start + length)
        start += length


def _chunks(t: Tensor, heads: int) -> Tensor:
    """(H, n, C, .) of a document's (T, heads, .): heads are repeated to H, the last chunk is padded with zeros."""
    t = upcast(t).repeat_interleave(heads // t.shape[1], 1).transpose(0, 1)
    return pad(t, (0, 0, 0, -t.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))


def _rows(t: Tensor, rows: slice) -> Tensor:
    """(T, H, .) of a document from (H, n, C, .): the inverse of _chunks."""
    return t.flatten(1, 2)[:, : rows.stop - rows.start].transpose(0, 1)


def _local(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, delta: bool) -> _Local:
    H = v.shape[1]
    q, k, v, g, beta = (_chunks(t, H) for t in (q, k, v, g[..., None], beta[..., None]))
    G = g.cumsum(2)
    mask = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    gamma = (G - G.mT).masked_fill(~mask, float("-inf")).exp()
    P = q @ k.mT * gamma
    if not delta:
        return _Local(q, k, v, beta, G, gamma, P, None, None, beta * v, None)
    A = (beta * (k @ k.mT) * gamma).tril(-1)
    eye = torch.eye(CHUNK, dtype=A.dtype, device=A.device)
    T = torch.linalg.solve_triangular(A + eye, eye.expand_as(A), upper=False, unitriangular=True)
    return _Local(q, k, v, beta, G, gamma, P, A, T, T @ (beta * v), T @ (beta * G.exp() * k))


def _walk(local: _Local) -> tuple[Tensor, Tensor, Tensor]:
    """(states before the chunks (H, n, d, e), D (H, n, C, e), the state behind the last chunk (H, d, e))."""
    S = local.q.new_zeros(len(local.q), local.k.shape[-1], local.v.shape[-1])
    states, deltas = [], []
    last = local.G[:, :, -1:]
    decayed = (last - local.G).exp() * local.k
    for c in range(local.q.shape[1]):
        states.append(S)
        deltas.append(local.U[:, c] if local.W is None else local.U[:, c] - local.W[:, c] @ S)
        S = last[:, c].exp() * S + decayed[:, c].mT @ deltas[-1]
    return torch.stack(states, 1), torch.stack(deltas, 1), S


def _backward(local: _Local, dO: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta, (H, n, C, .)."""
    q, k, v, beta, G, gamma, P, A, T, _, W = local
    S, D, _ = _walk(local)
    last, before = G[:, :, -1:], G.exp()
    fall = (last - G).exp()
    dS, ahead, dD = torch.zeros_like(S[:, 0]), [], []
    for c in reversed(range(q.shape[1])):
        ahead.append(dS)
        dD.append(P[:, c].mT @ dO[:, c] + (fall * k)[:, c] @ dS)
        dS = last[:, c].exp() * dS + (before * q)[:, c].mT @ dO[:, c]
        if W is not None:
            dS = dS - W[:, c].mT @ dD[-1]
    dSn, dDn = torch.stack(ahead[::-1], 1), torch.stack(dD[::-1], 1)
    dP = (dO @ D.mT).tril()
    dq_state, dk_state = before * (dO @ S.mT), fall * (D @ dSn.mT)
    dX = dDn if T is None else T.mT @ dDn
    dq = dP * gamma @ k + dq_state
    dk = (dP * gamma).mT @ q + dk_state
    dbeta = (dX * v).sum(-1, keepdim=True)
    turns = dP * P
    leaving = (dk_state * k).sum(-1, keepdim=True)
    dG = (dq_state * q).sum(-1, keepdim=True) - leaving
    if A is not None:
        dA, dY = -(dX @ D.mT).tril(-1), -dX @ S.mT
        R = dA * beta * gamma
        diagonal = (before * dY * k).sum(-1, keepdim=True)
        dk = dk + R @ k + R.mT @ k + beta * before * dY
        dbeta = dbeta + (dA * (k @ k.mT) * gamma).sum(-1, keepdim=True) + diagonal
        dG = dG + beta * diagonal
        turns = turns + dA * A
    dG = dG + turns.sum(-1, keepdim=True) - turns.sum(-2, keepdim=True).mT
    dG[:, :, -1:] += leaving.sum(2, keepdim=True) + last.exp() * (S * dSn).sum((-1, -2), keepdim=True)
    dg = dG.flip(2).cumsum(2).flip(2)
    return dq, dk, beta * dX, dg, dbeta


# ---------------------------------------------------------------- around the scan


def decay_fwd(
    a: Tensor, A_log: Tensor, dt_bias: Tensor, low: float = 0.0, high: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """(g, dt) (N, H) fp32: dt = softplus(a + dt_bias) within [low, high], g = -exp(A_log) dt. a (N, H)."""
    dt = softplus(upcast(a) + upcast(dt_bias)).clamp(low, high)
    return -upcast(A_log).exp() * dt, dt


def decay_bwd(
    dg: Tensor,
    ddt: Tensor | None,
    a: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    dA_log_: Tensor,
    ddt_bias_: Tensor,
    low: float = 0.0,
    high: float = float("inf"),
) -> Tensor:
    """Gradient of a (N, H) in its dtype, given those of g and dt; adds to dA_log_ and ddt_bias_ (H,)."""
    g, dt = decay_fwd(a, A_log, dt_bias, low, high)
    add_(dA_log_, (dg * g).sum(0))
    d = -upcast(A_log).exp() * dg
    d = (d if ddt is None else d + ddt) * torch.sigmoid(upcast(a) + upcast(dt_bias))
    d = d.masked_fill((dt <= low) | (dt >= high), 0.0) if low or high < float("inf") else d
    add_(ddt_bias_, d.sum(0))
    return d.to(a.dtype)


def conv_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, docs: Docs) -> Tensor:
    """silu of each channel's causal convolution within its document, (N, C); x (N, C), weight (C, taps), bias (C,).

    The last tap is multiplied by the token itself. Rows of x may be strided.
    """
    return silu(_conv(x, weight, bias, docs)).to(x.dtype)


def conv_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    docs: Docs,
    dweight_: Tensor,
    dbias_: Tensor | None,
    dx: Tensor,
) -> None:
    """Fills dx (N, C), whose rows may be strided; adds to dweight_ and dbias_."""
    pre = _conv(x, weight, bias, docs)
    s = torch.sigmoid(pre)
    d = upcast(dy) * s * (1 + pre * (1 - s))
    total, sums = torch.zeros_like(d), []
    for lag in reversed(range(weight.shape[1])):
        mask = (docs.positions >= lag)[:, None]
        sums.append((d * _shifted(upcast(x), lag) * mask).sum(0))
        total += _shifted(d * mask * upcast(weight)[:, -1 - lag], -lag)
    add_(dweight_, torch.stack(sums, 1))
    if dbias_ is not None:
        add_(dbias_, d.sum(0))
    dx.copy_(total)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, docs: Docs) -> Tensor:
    xf, added = upcast(x), 0.0 if bias is None else upcast(bias)
    for lag in reversed(range(weight.shape[1])):
        added = added + _shifted(xf, lag) * (docs.positions >= lag)[:, None] * upcast(weight)[:, -1 - lag]
    assert isinstance(added, Tensor)
    return added


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Rows moved down by `shift` (up if negative): row t is row t - shift of x, or zero."""
    if not shift:
        return x
    shifted = torch.zeros_like(x)
    if shift > 0:
        shifted[shift:] = x[:-shift]
    else:
        shifted[:shift] = x[-shift:]
    return shifted

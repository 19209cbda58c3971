"""Launchers of the scan's kernels (outputs.py; chunks.py, gradients.py), with the signatures of reference.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.attention.docs import Docs
from trireme.kernels.launch import cdiv
from trireme.kernels.scan import chunks, gradients, outputs

LOCAL = 32  # columns of keys that a program of outputs._local multiplies at once


class _Scan(NamedTuple):
    """Arguments of scan_fwd and scan_bwd that all kernels share."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    docs: Docs
    delta: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(K, H, D, E)."""
        return self.k.shape[1], self.v.shape[1], self.k.shape[2], self.v.shape[2]


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
    """As reference.scan_fwd; out is contiguous."""
    a = _checked(_Scan(q, k, v, g, beta, docs, delta), skip)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    assert out.is_contiguous()
    assert final is None or (final.dtype == torch.float32 and final.is_contiguous())
    K, H, D, E = a.shape
    set_ = launch.scan(q.device, D, E, q.element_size())
    tiles = docs.query_tiles[set_.rows]
    P = q.new_empty((len(q), H, set_.rows))
    T = torch.empty_like(P) if delta else None
    outputs._local[(len(tiles) * H,)](
        q, k, g, beta, tiles, T, P, q.stride(0), k.stride(0),
        K, H, D, set_.rows, LOCAL, chunks.BLOCK, delta, set_.precision,
        num_warps=1 if q.element_size() == 2 else 4, num_stages=1,
    )  # fmt: skip
    outputs._forward[(len(docs.lengths) * H * cdiv(E, set_.outputs),)](
        q, k, v, g, beta, docs.cu_seqlens, T, P, skip, out, final, q.stride(0), k.stride(0), v.stride(0),
        K, H, D, E, set_.rows, set_.width, set_.outputs, delta, skip is not None, final is not None, set_.precision,
        num_warps=set_.warps, num_stages=1,
    )  # fmt: skip
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
    """As reference.scan_bwd; dout is contiguous. Heads that share q and k are summed in order."""
    a = _checked(_Scan(q, k, v, g, beta, docs, delta), skip)
    assert dout.is_contiguous()
    K, H, D, E = a.shape
    set_ = launch.scan(q.device, D, E, q.element_size())
    local = _local(a)
    states = _walk(a, local)
    d_states, d_delta = torch.empty_like(states), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    gradients._walk_back[(len(docs.lengths) * H * cdiv(E, set_.columns),)](
        dout, q, k, g, docs.cu_seqlens, local.W, d_delta, d_states, q.stride(0), k.stride(0),
        K, H, D, E, set_.rows, set_.width, set_.columns, delta, set_.precision,
        num_warps=set_.warps, num_stages=set_.stages,
    )  # fmt: skip
    tiles = docs.query_tiles[set_.rows]
    each = [t if K == H else torch.empty((len(t), H, D), dtype=t.dtype, device=t.device) for t in (dq, dk)]
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    d_skip = torch.empty((len(tiles), H), dtype=torch.float32, device=g.device) if skip is not None else None
    gradients._gradients[(len(tiles) * H,)](
        dout, q, k, v, g, beta, tiles, local.T, local.D, d_delta, states, d_states, skip, *each, dv, dg, dbeta, d_skip,
        q.stride(0), k.stride(0), v.stride(0), each[0].stride(0), each[1].stride(0), dv.stride(0),
        K, H, D, E, set_.rows, set_.width, set_.wide_columns, delta, skip is not None, set_.precision,
        num_warps=set_.wide_warps, num_stages=1,
    )  # fmt: skip
    for own, heads in zip((dq, dk), each, strict=True):
        if own is not heads:
            torch.sum(heads.unflatten(1, (K, -1)), 2, out=own)  # in fp32, rounded once
    return dg, dbeta, None if d_skip is None else d_skip.sum(0)


class _Local(NamedTuple):
    """What chunks._prepare computes; None without the delta rule."""

    T: Tensor | None  # (N, H, C)
    D: Tensor | None  # (N, H, E): U before `_walk`, D after it
    W: Tensor | None  # (N, H, D)


def _checked(a: _Scan, skip: Tensor | None) -> _Scan:
    K, H, _, E = a.shape
    N = len(a.q)
    assert H % K == 0
    assert a.q.shape == a.k.shape
    assert a.g.shape == a.beta.shape == (N, H)
    assert a.v.shape == (N, H, E)
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in (a.g, a.beta))
    assert all(t.dtype == a.q.dtype and t.stride()[1:] == (t.shape[2], 1) for t in (a.q, a.k, a.v))
    assert skip is None or skip.shape == (H,)
    return a


def _local(a: _Scan) -> _Local:
    if not a.delta:
        return _Local(None, None, None)
    K, H, D, E = a.shape
    set_ = launch.scan(a.q.device, D, E, a.q.element_size())
    made = _Local(*(a.q.new_empty((len(a.q), H, width)) for width in (set_.rows, E, D)))
    tiles = a.docs.query_tiles[set_.rows]
    chunks._prepare[(len(tiles) * H,)](
        a.k, a.v, a.g, a.beta, tiles, *made, a.k.stride(0), a.v.stride(0),
        K, H, D, E, set_.rows, set_.width, set_.columns, chunks.BLOCK, set_.precision,
        num_warps=set_.warps, num_stages=set_.stages,
    )  # fmt: skip
    return made


def _walk(a: _Scan, local: _Local) -> Tensor:
    """The states before chunks, (slots, H, D, E), by chunks._walk, which replaces U in local.D by D."""
    K, H, D, E = a.shape
    set_ = launch.scan(a.q.device, D, E, a.q.element_size())
    states = a.q.new_empty((cdiv(len(a.q), set_.rows), H, D, E))
    chunks._walk[(len(a.docs.lengths) * H * cdiv(E, set_.columns),)](
        a.k, a.v, a.g, a.beta, a.docs.cu_seqlens, local.D, local.W, states, a.k.stride(0), a.v.stride(0),
        K, H, D, E, set_.rows, set_.width, set_.columns, a.delta, set_.precision,
        num_warps=set_.warps, num_stages=set_.stages,
    )  # fmt: skip
    return states

"""Launchers of the scan's kernels (forward.py, backward.py), with the signatures of reference.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.attention.docs import Docs
from trireme.kernels.launch import cdiv
from trireme.kernels.scan import backward, forward

LOCAL = 32  # columns of keys that a program of forward._local multiplies at once
BLOCK = 16  # rows that it inverts one by one
# Of kernels that go through documents. Their sums are operands in registers: of 64 rows 8 warps of an H100 have another
# layout in each product, which Triton 3.6 gets wrong; 2 warps have no room for a state of 256 keys.
WARPS = 4


class _Inputs(NamedTuple):
    """Arguments of scan_fwd and scan_bwd that all kernels share."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    docs: Docs

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(K, H, D, E)."""
        return self.k.shape[1], self.v.shape[1], self.k.shape[2], self.v.shape[2]

    @property
    def settings(self) -> launch.Scan:
        return launch.scan(self.q.device, *self.shape[2:], self.q.element_size())


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
    a = _checked(_Inputs(q, k, v, g, beta, docs), skip)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    assert out.is_contiguous()
    assert final is None or (final.dtype == torch.float32 and final.is_contiguous())
    T, P = _local(a, delta)
    _forward(a, T, P, skip, out, final, None, None)
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
    a = _checked(_Inputs(q, k, v, g, beta, docs), skip)
    assert dout.is_contiguous()
    (K, H, D, E), set_ = a.shape, a.settings
    T, P = _local(a, delta)
    deltas = torch.empty(v.shape, dtype=v.dtype, device=v.device) if delta else None
    states = q.new_empty((cdiv(len(q), set_.rows), H, E, D))
    _forward(a, T, P, None, None, None, deltas, states)
    d_states, d_deltas = torch.empty_like(states), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    backward._walk_back[(len(docs.lengths) * H * cdiv(E, set_.columns),)](
        dout, q, k, g, beta, docs.cu_seqlens, T, P, d_deltas, d_states, q.stride(0), k.stride(0),
        K, H, D, E, set_.rows, set_.width, set_.columns, set_.precision, num_warps=WARPS, num_stages=set_.stages,
    )  # fmt: skip
    del T, P
    tiles = docs.query_tiles[set_.rows]
    full = [t if K == H else torch.empty((len(t), H, D), dtype=t.dtype, device=t.device) for t in (dq, dk)]
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    d_skip = torch.empty((len(tiles), H), dtype=torch.float32, device=g.device) if skip is not None else None
    backward._gradients[(len(tiles) * H,)](
        dout, q, k, v, g, beta, tiles, deltas, d_deltas, states, d_states, skip, *full, dv, dg, dbeta, d_skip,
        q.stride(0), k.stride(0), v.stride(0), full[0].stride(0), full[1].stride(0), dv.stride(0),
        K, H, D, E, set_.rows, set_.keys, set_.values, set_.precision, num_warps=set_.warps, num_stages=1,
    )  # fmt: skip
    for narrow, heads in zip((dq, dk), full, strict=True):
        if narrow is not heads:
            torch.sum(heads.unflatten(1, (K, -1)), 2, out=narrow)  # in fp32, rounded once
    return dg, dbeta, None if d_skip is None else d_skip.sum(0)


def _checked(a: _Inputs, skip: Tensor | None) -> _Inputs:
    (N, K), (H, E) = a.k.shape[:2], a.v.shape[1:]
    assert H % K == 0
    assert a.q.shape == a.k.shape
    assert a.g.shape == a.beta.shape == (N, H)
    assert a.v.shape == (N, H, E)
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in (a.g, a.beta))
    assert all(t.dtype == a.q.dtype and t.stride()[1:] == (t.shape[2], 1) for t in (a.q, a.k, a.v))
    assert skip is None or skip.shape == (H,)
    return a


def _local(a: _Inputs, delta: bool) -> tuple[Tensor | None, Tensor]:
    """(T of chunks with the delta rule, P), both (N, H, C)."""
    (K, H, D, _), set_, tiles = a.shape, a.settings, a.docs.query_tiles[a.settings.rows]
    P = a.q.new_empty((len(a.q), H, set_.rows))
    T = torch.empty_like(P) if delta else None
    forward._local[(len(tiles) * H,)](
        a.q, a.k, a.g, a.beta, tiles, T, P, a.q.stride(0), a.k.stride(0),
        K, H, D, set_.rows, LOCAL, BLOCK, set_.precision, num_warps=1 if a.q.element_size() == 2 else 4, num_stages=1,
    )  # fmt: skip
    return T, P


def _forward(
    a: _Inputs,
    T: Tensor | None,
    P: Tensor,
    skip: Tensor | None,
    out: Tensor | None,
    final: Tensor | None,
    deltas: Tensor | None,
    states: Tensor | None,
) -> None:
    """Fills those of out, final, deltas (N, H, E) and states (slots, H, E, D) that are given."""
    (K, H, D, E), set_ = a.shape, a.settings
    forward._forward[(len(a.docs.lengths) * H * cdiv(E, set_.columns),)](
        a.q, a.k, a.v, a.g, a.beta, a.docs.cu_seqlens, T, P, skip, out, final, deltas, states,
        a.q.stride(0), a.k.stride(0), a.v.stride(0), K, H, D, E, set_.rows, set_.width, set_.columns, set_.precision,
        num_warps=WARPS, num_stages=1,
    )  # fmt: skip

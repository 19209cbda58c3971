"""Causal flash attention (Dao 2023) over packed documents, grouped queries, optional sliding window.

A program owns a tile of rows (docs.py), every sum has one owner: results repeat bit by bit. Triton (fwd.py, bwd.py),
Gluon on Hopper (hopper.py) or cuDNN for dense forwards, where measured faster (docs/dev/kernels.md); of soft-capped
scores Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.attention import bwd as triton_bwd
from trireme.kernels.attention import cudnn as attention_cudnn
from trireme.kernels.attention import fwd as triton_fwd
from trireme.kernels.attention.docs import Docs

if TYPE_CHECKING:
    from trireme.kernels.attention.ampere_bwd import OnePass


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
    """As reference.attention_fwd; heads contiguous, tokens and heads may be strided."""
    N, H, d = q.shape
    widths = d, v.shape[2]
    _check(q, k, v, scale)
    if not cap and d == v.shape[2] and attention_cudnn.suits(q, docs, window):
        return attention_cudnn.attention_fwd(q, k, v, docs, scale, out)
    out = q.new_empty((N, H, v.shape[2])) if out is None else out
    assert out.shape == (N, H, v.shape[2])
    lse = torch.empty((H, N), dtype=torch.float32, device=q.device)
    if _counted(q, widths):
        return out, lse
    types, strides = (q.dtype, out.dtype), (q.stride(), k.stride(), v.stride(), out.stride())
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    forward = _forward(q.device, types, H, k.shape[1], widths, window, strides, aligned, cap)
    tiles = docs.query_tiles[forward.rows]
    forward.run(len(tiles) * H, (q, k, v, out, lse, tiles), (N, scale))
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
    """As reference.attention_bwd; strides as attention_fwd."""
    N, H, d = q.shape
    K, widths = k.shape[1], (d, v.shape[2])
    _check(q, k, v, scale)
    assert dout.shape == out.shape == (N, H, v.shape[2])
    assert (dq_.shape, dk_.shape, dv_.shape) == (q.shape, k.shape, v.shape)
    assert lse.shape == (H, N)
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    if _counted(q, widths):
        return
    tensors = dout, q, k, v, out, dq_, dk_, dv_
    types, strides = tuple([t.dtype for t in tensors]), tuple([t.stride() for t in tensors])
    aligned = (dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    backward = _backward(q.device, types, H, K, widths, window, strides, aligned, cap)
    sums = []  # of one pass, where memory is counted
    if q.is_meta and not cap and launch.one_pass(q.device, q.dtype, widths):
        sums.append(torch.empty((N, H, d), dtype=torch.float32, device=q.device))
    backward.run(dout, q, k, v, out, lse, docs, scale, dq_, dk_, dv_)


def _counted(q: Tensor, widths: tuple[int, int]) -> bool:
    """Whether q has no memory and heads of widths that a CPU alone computes: what a model on it takes is counted."""
    return q.is_meta and not all(8 <= width <= launch.widest_head(q.dtype) for width in widths)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    assert k.shape[:2] == v.shape[:2]
    assert k.shape[0] == q.shape[0]
    assert k.shape[2] == q.shape[2]
    assert scale > 0
    assert q.dtype == k.dtype == v.dtype


@launch.settings_cache
def _forward(
    device, types, H: int, K: int, widths: tuple[int, int], window: int, strides, aligned: bool, cap: float
) -> triton_fwd.Forward:
    """types of (q, out), widths of (keys, values), strides of (q, k, v, out)."""
    d, e = widths
    assert H % K == 0
    assert all(8 <= width <= launch.widest_head(types[0]) for width in widths)
    assert all(s[2] == 1 for s in strides)
    if aligned and not cap and _suits_hopper(device, types[0], widths, strides[:3]):
        from trireme.kernels.attention import hopper_fwd  # late: experimental parts of Triton

        return hopper_fwd.plan(H, K, d, e, window, strides)
    return triton_fwd.plan(device, types[0], H, K, d, e, window, strides, cap)


@launch.settings_cache
def _backward(
    device, types, H: int, K: int, widths: tuple[int, int], window: int, strides, aligned: bool, cap: float
) -> triton_bwd.Backward | OnePass:
    """As _forward; types and strides of (dout, q, k, v, out, dq, dk, dv). Of tensors without memory two passes."""
    d, e = widths
    assert H % K == 0
    assert all(8 <= width <= launch.widest_head(types[1]) for width in widths)
    assert all(s[2] == 1 for s in strides)
    if aligned and not cap and _suits_hopper(device, types[1], widths, strides[:4]):
        from trireme.kernels.attention import hopper_bwd  # late: experimental parts of Triton

        return hopper_bwd.plan(H, K, d, e, window, strides)
    tile = launch.one_pass(device, types[1], widths)
    if tile and aligned and not cap and device.type != "meta" and _are_wide(strides):
        from trireme.kernels.attention import ampere_bwd  # late: experimental parts of Triton

        return ampere_bwd.plan(tile, H, K, d, window, strides)
    return triton_bwd.plan(device, types[1], H, K, d, e, window, strides, cap)


def _suits_hopper(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], strides) -> bool:
    """Whether Hopper's kernels take heads of keys and values of these widths, at strides that are 16-byte aligned."""
    return (
        launch.chip(device).arch == 90
        and dtype == torch.bfloat16
        and all(32 < d <= 256 and d % 8 == 0 for d in widths)
        and _are_wide(strides)
    )


def _are_wide(strides) -> bool:
    """Whether rows can be copied 16 bytes at a time by kernels in Gluon, whose tiles have offsets in int32."""
    return all(n % 16 == 0 and n < 1 << 24 for n in triton_fwd.flat(strides))

"""Causal flash attention (Dao 2023) over packed documents, grouped queries, optional sliding window.

One program owns one tile of rows that docs.py lists, heaviest first, and every sum has one owner: results repeat bit
by bit. Three implementations stand behind the two functions: Triton everywhere (attention_fwd.py, attention_bwd.py),
cuDNN for dense forwards on Hopper, Gluon for Hopper's backward; each where it was measured faster (docs/kernels.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels import attention_bwd as triton_bwd
from trireme.kernels import attention_cudnn, attention_hopper
from trireme.kernels import attention_fwd as triton_fwd
from trireme.kernels.docs import Docs


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, docs: Docs, scale: float, window: int = 0, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.attention_fwd. Each head's d values lie together; tokens and heads may be strided."""
    N, H, d = q.shape
    _check(q, k, v, scale)
    if attention_cudnn.suits(q, docs, window):
        return attention_cudnn.attention_fwd(q, k, v, docs, scale, out)
    out = torch.empty((N, H, d), dtype=q.dtype, device=q.device) if out is None else out
    assert out.shape == q.shape and out.stride(2) == 1
    lse = torch.empty((H, N), dtype=torch.float32, device=q.device)
    triton_fwd.attention_fwd(q, k, v, docs, scale, window, out, lse)
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
) -> None:
    """As reference.attention_bwd. Each head's d values lie together; tokens and heads may be strided."""
    N, H, _ = q.shape
    _check(q, k, v, scale)
    assert dout.shape == out.shape == dq_.shape == q.shape and dk_.shape == dv_.shape == k.shape
    assert dout.stride(2) == out.stride(2) == dq_.stride(2) == dk_.stride(2) == dv_.stride(2) == 1
    assert lse.shape == (H, N) and lse.is_contiguous()
    if attention_hopper.suits(window, q, k, v, dout):
        attention_hopper.attention_bwd(dout, q, k, v, out, lse, docs, scale, dq_, dk_, dv_)
    else:
        triton_bwd.attention_bwd(dout, q, k, v, out, lse, docs, scale, dq_, dk_, dv_, window)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    N, H, d = q.shape
    assert k.shape == v.shape == (N, k.shape[1], d) and H % k.shape[1] == 0 and 8 <= d <= 256 and scale > 0
    assert q.dtype == k.dtype == v.dtype and q.stride(2) == k.stride(2) == v.stride(2) == 1

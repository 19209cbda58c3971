"""The forward of dense attention by torch's cuDNN: documents of one length, on Hopper.

For heads above 64, 1.2 to 2 times as fast as Triton (docs/dev/kernels.md), bitwise. Its backward does not repeat above
1,024 tokens, even in deterministic mode: ours serves. It plans new shapes slowly: only multiples of 1,024 tokens.
Legend: B documents of S tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.attention.docs import Docs
from trireme.kernels.launch import chip


def suits(q: Tensor, docs: Docs, window: int) -> bool:
    """Whether cuDNN is faster."""
    length, d = docs.lengths[0], q.shape[2]
    return (
        64 < d <= 256
        and d % 8 == 0
        and window == 0
        and length % 1024 == 0
        and chip(q.device).arch == 90
        and q.dtype == torch.bfloat16
        and docs.lengths.count(length) == len(docs.lengths)
    )


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, docs: Docs, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.attention_fwd; torch's launcher takes no `out`."""
    B = len(docs.lengths)
    heads_first = [t.unflatten(0, (B, -1)).transpose(1, 2) for t in (q, k, v)]  # (B, heads, S, d), strided
    result, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, compute_log_sumexp=True, is_causal=True, scale=scale
    )
    result = result.transpose(1, 2).flatten(0, 1)  # (N, H, d), a view: cuDNN keeps its inputs' order
    if out is not None:
        result = out.copy_(result)
    return result, lse.view(B, q.shape[1], -1).transpose(0, 1).reshape(q.shape[1], -1)

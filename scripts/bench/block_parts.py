"""A GPU's FLOP/s under lasting load: a matrix product, and the parts of a block.

A chip lowers its clock within a second of full load: no step reaches the rate of a product after a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trireme.engine.planner.probe import timed
from trireme.kernels import ops
from trireme.models.config import ModelConfig
from trireme.models.sizes import costs, narrow, shapes

Call = Callable[[], object]
LONG = 1.0  # seconds until the clock settles, and timed


def held(calls: Sequence[Call], flops: float, device: torch.device) -> float:
    """FLOP/s of `calls` in a loop, with the clock settled."""

    def repeat(times: int) -> None:
        for _ in range(times):
            for call in calls:
                call()

    repeat(1)
    n = max(1, round(LONG / min(timed(partial(repeat, 1), device) for _ in range(3))))
    repeat(n)
    return n * flops / timed(partial(repeat, n), device)


def product_rate(device: torch.device) -> float:
    """Of an 8192^3 product in bf16."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return held([partial(torch.mm, a, b, out=out)], 2 * 8192**3, device)


def parts_rate(cfg: ModelConfig, tokens: int, seq: int, device: torch.device) -> float:
    """Of a block's products by cuBLAS and attention by cuDNN, forward and backward, `tokens` in documents of `seq`.

    FLOPs are counted like those of tasks.
    """
    forward, backward = products(cfg, tokens, device)
    calls = [*forward, *backward, *_attention(cfg, tokens // seq, seq, device)]
    pairs = costs.attended_pairs([seq] * (tokens // seq), cfg.window)
    flops = costs.forward_flops(cfg, 1, tokens, pairs) + costs.backward_flops(cfg, 1, tokens, pairs)
    return held(calls, flops, device)


def products(cfg: ModelConfig, tokens: int, device: torch.device | str) -> tuple[list[Call], list[Call]]:
    """(forward, backward) products of a block's matrices, of codes where in fp8; a group (q, k, v; gate, up) as one.

    Frozen ones have no gradient.
    """
    forward: list[Call] = []
    backward: list[Call] = []
    for group in shapes.weight_groups(cfg, 1):
        matrices = [shape for _, shape in group if len(shape) == 2]
        if not matrices:
            continue
        rows, columns = sum(shape[0] for shape in matrices), matrices[0][1]
        w, x, dy = (torch.randn(*shape, dtype=torch.bfloat16, device=device)
                    for shape in ((rows, columns), (tokens, columns), (tokens, rows)))  # fmt: skip
        y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
        if narrow.in_fp8(cfg, rows, columns):
            w8, x8, dy8 = (ops.quantize(t, columns=True) for t in (w, x, dy))
            calls = [
                partial(ops.product, x8.rows, x8.scale, w8.rows, w8.scale, y),
                partial(ops.product, dy8.rows, dy8.scale, w8.columns, w8.scale, dx),
                partial(ops.product, dy8.columns, dy8.scale, x8.columns, x8.scale, dw),
            ]
        else:
            pairs = (x, w.T, y), (dy, w, dx), (dy.T, x, dw)
            calls = [partial(torch.mm, a, b, out=out) for a, b, out in pairs]
        forward.append(calls[0])
        backward += calls[1:2] if shapes.is_frozen(cfg, group) else calls[1:]
    return forward, backward


def _attention(cfg: ModelConfig, documents: int, seq: int, device: torch.device) -> list[Call]:
    """cuDNN's forward and backward."""
    q, k, v = (torch.randn(documents, heads, seq, cfg.head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
               for heads in (cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads))  # fmt: skip
    dy = torch.randn_like(q)

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=cfg.n_heads != cfg.n_kv_heads)

    y = forward()
    return [forward, lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)]

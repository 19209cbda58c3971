"""The cases of ops.py: every op in LLaMA-3-8B and LLaMA-2-13B blocks, and in mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import op_peers
import torch
from torch import Tensor

from trireme.kernels import ops

BF16 = torch.bfloat16
DEVICE = "cuda"
PACKED = (1890, 57, 423, 1201, 88, 640, 312, 1024, 17, 733, 205, 999, 131, 350, 122)  # 15 documents, 8,192 tokens


class Case(NamedTuple):
    """A call of `op`; `work`: bytes, or FLOPs where `flops`."""

    label: str
    op: str
    args: tuple
    work: float
    kwargs: dict = {}
    flops: bool = False
    peers: Callable[[], op_peers.Peers] = dict  # of torch itself
    bound: float = 5e-3


def randn(*shape: int, dtype=BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def norms() -> Iterator[Case]:
    for N, D in ((8192, 4096), (8192, 5120)):
        x, dy, r, dr = (randn(N, D) for _ in range(4))
        w, b, shape, size = randn(D), randn(D), f"{N}x{D}", 2 * N * D
        dw, db = torch.zeros(2, D, device=DEVICE)
        _, rstd, _ = ops.rmsnorm_fwd(x, w, 1e-5)
        yield Case(shape, "rmsnorm_fwd", (x, w, 1e-5), 2 * size)
        yield Case(f"{shape} + residual", "rmsnorm_fwd", (x, w, 1e-5, r), 4 * size)
        yield Case(shape, "rmsnorm_bwd", (dy, x, w, rstd, dw), 3 * size)
        yield Case(f"{shape} + residual", "rmsnorm_bwd", (dy, x, w, rstd, dw, dr), 4 * size)
        _, mean, rstd, _ = ops.layernorm_fwd(x, w, b, 1e-5)
        yield Case(shape, "layernorm_fwd", (x, w, b, 1e-5), 2 * size)
        yield Case(f"{shape} + residual", "layernorm_fwd", (x, w, b, 1e-5, r), 4 * size)
        yield Case(shape, "layernorm_bwd", (dy, x, w, mean, rstd, dw, db), 3 * size)
        yield Case(f"{shape} + residual", "layernorm_bwd", (dy, x, w, mean, rstd, dw, db, dr), 4 * size)
    N, H, d = 8192, 40, 128
    x, w, dw, dy = randn(N, 6144).view(N, 48, d)[:, :H], randn(d), torch.zeros(d, device=DEVICE), randn(N, H, d)
    _, rstd = ops.head_rmsnorm_fwd(x, w, 1e-6)
    yield Case(f"{N}x{H}x{d}", "head_rmsnorm_fwd", (x, w, 1e-6), 4 * N * H * d)
    yield Case(f"{N}x{H}x{d}", "head_rmsnorm_bwd", (dy, x, w, rstd, dw, torch.empty_like(dy)), 6 * N * H * d)


def activations() -> Iterator[Case]:
    N, F = 8192, 14336
    gate_up, dy, shape, size = randn(N, 2 * F), randn(N, F), f"{N}x{F}", 2 * N * F
    for name in ("swiglu", "geglu"):
        yield Case(shape, f"{name}_fwd", (gate_up,), 3 * size)
        yield Case(shape, f"{name}_bwd", (dy, gate_up), 6 * size)
    F = 20480
    h, dy, b, db, shape, size = randn(N, F), randn(N, F), randn(F), torch.zeros(F, device=DEVICE), f"{N}x{F}", 2 * N * F
    yield Case(shape, "gelu_bias_fwd", (h, b), 2 * size)
    yield Case(shape, "gelu_bias_bwd", (dy, h, b, db), 4 * size)
    yield Case(shape, "bias_bwd_", (db, dy), size)
    yield Case(shape, "relu2_fwd", (h,), 2 * size)
    yield Case(shape, "relu2_bwd", (dy, h), 4 * size)
    H, d = 40, 128
    x, docs = randn(N, 6144).view(N, 48, d)[:, :H], ops.make_docs([N], DEVICE)
    cos, sin = ops.rope_table(1e4 ** (-torch.arange(0, d, 2, device=DEVICE) / d), N)
    yield Case(f"{N}x{H}x{d} of 48", "rope_", (x, cos, sin, docs.positions), 4 * N * H * d)


def ends() -> Iterator[Case]:
    N, D, V = 8192, 4096, 128256
    dy, dw = randn(N, D), torch.zeros(V, D, device=DEVICE, dtype=BF16)
    ids = (V * torch.rand(N, device=DEVICE) ** 4).long()
    rows = len(torch.unique(ids))
    yield Case(f"{N}x{D}", "embedding_fwd", (ids, dw), 4 * N * D)
    peers = lambda: {"index_add": (lambda: dw.index_add_(0, ids, dy), 1.0)}
    yield Case(f"{N}x{D}, {rows} tokens", "embedding_bwd_", (dw, dy, ids), 2 * N * D + 4 * rows * D, peers=peers)
    n = 218_112_000  # parameters of a LLaMA-3-8B block
    g32, g16, out = randn(n, dtype=torch.float32), randn(n), torch.empty(n, device=DEVICE, dtype=BF16)
    yield Case("bf16", "grad_finish", (g16,), 2 * n)
    yield Case("fp32 to bf16", "grad_finish", (g32, out), 6 * n)
    m, v, w32 = torch.zeros(2, n, device=DEVICE).unbind() + (g32.clone(),)
    clip = torch.ones(1, device=DEVICE)
    options = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, n_decay=n - 8192, step=10)
    w, lo = ops.split_master(w32)
    yield Case("split master, bf16 gradient", "adamw_", (w, lo, m, v, g16, clip), 26 * n, options)
    fused = dict(lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
    adamw = lambda: torch._fused_adamw_([w32], [g32], [m], [v], [], [clip], **fused)
    peers = lambda: {"torch fused": (adamw, 1.0)}
    yield Case("fp32", "adamw_", (w32, None, m, v, g32, clip), 28 * n, options, peers=peers)


def loss() -> Iterator[Case]:
    for N, D, V in ((8192, 4096, 128256), (8192, 5120, 32000)):
        x, w = randn(N, D), randn(V, D) * 0.02
        labels, rows = torch.randint(V, (N,), device=DEVICE), torch.arange(N, device=DEVICE)
        for chunk in (8192, 4096, 2048):
            for dtype in (BF16, torch.float32):
                dw = torch.zeros(V, D, device=DEVICE, dtype=dtype)
                args = (x, w, labels, rows, 1 / N, dw, torch.empty_like(x), chunk)
                label = f"{N}x{D}x{V} by {chunk}, dw {dtype}".replace("torch.", "")
                yield Case(label, "linear_cross_entropy", args, 6 * N * D * V, flops=True)


def fp8() -> Iterator[Case]:
    """Quantization of a block's tensors, which reads them twice; GEMMs, compared with bf16."""
    for N, D in ((8192, 4096), (8192, 14336), (8192, 28672)):
        x = randn(N, D)
        for rows, columns in ((True, False), (False, True), (True, True)):
            written = (rows + columns) * N * D
            yield Case(
                f"{N}x{D} {'rows' * rows} {'columns' * columns}", "quantize", (x, rows, columns), 4 * N * D + written
            )
    N, F = 8192, 14336
    gate_up, dy = randn(N, 2 * F), randn(N, F)
    plain = {"written in bf16": (lambda: ops.quantize(ops.swiglu_fwd(gate_up)), 1.0)}
    yield Case(f"{N}x{F}", "swiglu_codes_fwd", (gate_up,), 9 * N * F, peers=lambda: plain)
    apart = lambda: [
        ops.quantize(t, rows, True) for t, rows in zip(ops.swiglu_bwd(dy, gate_up), (True, False), strict=True)
    ]
    yield Case(
        f"{N}x{F}", "swiglu_codes_bwd", (dy, gate_up), 17 * N * F, peers=lambda: {"written in bf16": (apart, 1.0)}
    )
    for M, K, N in ((8192, 8192, 8192), (8192, 4096, 28672), (8192, 14336, 4096), (4096, 8192, 14336)):
        x, w = randn(M, K), randn(N, K)
        a, b = ops.quantize(x), ops.quantize(w)
        for dtype in (BF16, torch.float32):
            out = torch.empty(M, N, device=DEVICE, dtype=dtype)
            peers = lambda x=x, w=w: {"in bf16": (lambda: torch.mm(x, w.T), 1.0)}
            args = (a.rows, a.scale, b.rows, b.scale, out)
            yield Case(f"{M}x{K}x{N} to {dtype}", "product", args, 2 * M * K * N, flops=True, peers=peers)


class Attention(NamedTuple):
    """Inputs and gradients, packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dout: Tensor
    docs: ops.Docs
    scale: float


def attention_inputs(lengths, H, K, d) -> Attention:
    N = sum(lengths)
    parts = [t for _ in range(2) for t in randn(N, (H + 2 * K) * d).view(N, H + 2 * K, d).split([H, K, K], 1)]
    return Attention(*parts, randn(N, H, d), ops.make_docs(lengths, DEVICE), d**-0.5)


def attention() -> Iterator[Case]:
    shapes = [([8192], 32, 8, 128), ([4096] * 2, 32, 8, 128), ([1024] * 8, 32, 8, 128), (PACKED, 32, 8, 128)]
    shapes += [([4096] * 2, 32, 32, 64), ([4096] * 2, 40, 40, 80), ([4096] * 2, 32, 32, 96), ([4096] * 2, 16, 8, 256)]
    for lengths, H, K, d in shapes:
        a = attention_inputs(lengths, H, K, d)
        flops = 4 * d * H * sum(n * (n + 1) // 2 for n in lengths)  # of attended pairs
        equal = len(set(lengths)) == 1
        label = f"d{d} {H}/{K} " + (f"{len(lengths)}x{lengths[0]}" if equal else f"{len(lengths)} documents")
        out, lse = ops.attention_fwd(a.q, a.k, a.v, a.docs, a.scale)
        dense = cache(partial(dense_peers, a)) if equal else lambda: ({}, {})
        peers = lambda: dense()[0]  # noqa: B023
        yield Case(label, "attention_fwd", (a.q, a.k, a.v, a.docs, a.scale), flops, flops=True, peers=peers)
        args = (a.dout, a.q, a.k, a.v, out, lse, a.docs, a.scale, a.dq, a.dk, a.dv)
        peers = lambda: dense()[1]  # noqa: B023
        yield Case(label, "attention_bwd", args, 2.5 * flops, flops=True, peers=peers)


def dense_peers(a: Attention) -> tuple[op_peers.Peers, op_peers.Peers]:
    return op_peers.dense_attention(a.q, a.k, a.v, a.dout, len(a.docs.lengths), a.scale)


class Mixture(NamedTuple):
    """Experts, chosen ones, width, hidden width of each."""

    E: int
    k: int
    D: int
    I: int


MIXTURES = {
    "Qwen3-30B": Mixture(128, 8, 2048, 768),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880),
    "gpt-oss-120b": Mixture(128, 4, 2880, 2880),
    "Mixtral": Mixture(8, 2, 4096, 14336),
}


def experts() -> Iterator[Case]:
    """Of 32,768 tokens with random logits of the router."""
    for name, (E, k, D, I) in MIXTURES.items():
        N, rule = 32768, ops.Rule(k)
        P, logits = N * k, randn(N, E)
        weights, chosen = ops.route_fwd(logits, rule)
        order = ops.sort_pairs(chosen, E)
        if name == "Qwen3-30B":
            yield from routing(name, logits, weights, chosen, rule)
            yield from sorted_rows(name, order, weights, D, I)
        x, d_gate_up, act = randn(N, D), randn(P, 2 * I), randn(P, I)
        up, down = (randn(E, 2 * I, D) * D**-0.5).mT, (randn(E, D, I) * I**-0.5).mT
        products = (("up", x, up, k), ("down", act, down, 0), ("d_act", x, down.mT, k), ("d_rows", d_gate_up, up.mT, 0))
        for label, a, w, by_token in products:
            peers = partial(op_peers.grouped_product, a, w, order, by_token)
            args, flops = (a, w, order, by_token), 2 * P * w.shape[1] * w.shape[2]
            yield Case(f"{name} {label}", "grouped_mm", args, flops, flops=True, peers=peers)
        for label, w, a, b, k_a, k_b in (("up", up, x, d_gate_up, k, 0), ("down", down, act, x, 0, k)):
            dw = torch.zeros_like(w, dtype=torch.float32)
            peers = partial(op_peers.grouped_gradient, dw, a, b, order, k_a, k_b)
            args, flops = (dw, a, b, order, k_a, k_b), 2 * P * w.shape[1] * w.shape[2]
            yield Case(f"{name} {label}", "grouped_add_", args, flops, flops=True, peers=peers)


def routing(name: str, logits: Tensor, weights: Tensor, chosen: Tensor, rule: ops.Rule) -> Iterator[Case]:
    (N, E), P = logits.shape, chosen.numel()
    yield Case(name, "route_fwd", (logits, rule), 2 * N * E + 8 * P)
    yield Case(name, "route_bwd", (torch.randn_like(weights), logits, chosen, rule), 4 * N * E + 8 * P)
    yield Case(name, "sort_pairs", (chosen, E), 12 * P)


def sorted_rows(name: str, order: ops.Order, weights: Tensor, D: int, I: int) -> Iterator[Case]:
    (N, k), P = weights.shape, weights.numel()
    rows, d_act, gate_up = randn(P, D), randn(P, I), randn(P, 2 * I)
    yield Case(f"{name} forward", "combine", (rows, order, k, weights, randn(N, D)), 2 * D * (P + 2 * N))
    yield Case(f"{name} backward", "combine", (rows, order, k), 2 * D * (P + N))
    yield Case(name, "routed_swiglu_bwd", (d_act, gate_up, weights, order), 12 * P * I)


GROUPS = {
    "norms": norms,
    "activations": activations,
    "ends": ends,
    "loss": loss,
    "attention": attention,
    "fp8": fp8,
    "experts": experts,
}

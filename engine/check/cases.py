"""Calls of every kernel with the shapes of common models: blocks of LLaMA-3-8B and LLaMA-2-13B, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops

BF16 = torch.bfloat16
PACKED = (1890, 57, 423, 1201, 88, 640, 312, 1024, 17, 733, 205, 999, 131, 350, 122)  # 15 documents, 8,192 tokens


class Case(NamedTuple):
    """A call of `op`. `work`: its bytes, or FLOPs if `flops`. `bound`: of the relative error."""

    label: str
    op: str
    args: tuple[Any, ...]
    work: float
    kwargs: Mapping[str, Any] = {}
    flops: bool = False
    bound: float = 5e-3


MIXTURES = {  # numbers of experts and of chosen ones, width, and hidden width of each expert
    "Qwen3-30B": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "Mixtral": (8, 2, 4096, 14336),
}
# Lengths of documents, heads, heads of keys, their width.
ATTENTION = (
    ([8192], 32, 8, 128), ([4096] * 2, 32, 8, 128), ([1024] * 8, 32, 8, 128), (PACKED, 32, 8, 128),
    ([4096] * 2, 32, 32, 64), ([4096] * 2, 40, 40, 80), ([4096] * 2, 32, 32, 96), ([4096] * 2, 16, 8, 256),
    ([4096] * 2, 16, 2, 512),
)  # fmt: skip
PRODUCTS = ((8192, 8192, 8192), (8192, 4096, 28672), (8192, 14336, 4096), (4096, 8192, 14336))


@dataclass(frozen=True)
class Shapes:
    """The shapes of LLaMA-3-8B and others; there are smaller ones for small GPUs and for tests."""

    device: str = "cuda"
    N: int = 8192  # tokens
    widths: tuple[int, ...] = (4096, 5120, 16384)
    F: int = 14336  # of a gated MLP; of another 20480
    plain: int = 20480
    heads: tuple[int, int, int] = (40, 48, 128)  # rotated, all in a row, their width
    heads_of: tuple[tuple[int, int], ...] = ((4096, 128256), (5120, 32000))  # width and vocabulary
    chunks: tuple[int, ...] = (8192, 4096, 2048)
    block: int = 218_112_000  # parameters of a LLaMA-3-8B block
    attention: tuple[tuple[Any, int, int, int], ...] = ATTENTION
    latent: tuple[tuple[Any, int, int, int, int], ...] = ()  # as attention, and the width of values
    matmuls: tuple[tuple[int, int, int], ...] = PRODUCTS
    quantized: tuple[int, ...] = (4096, 14336, 28672)
    mixtures: Mapping[str, tuple[int, int, int, int]] = field(default_factory=lambda: MIXTURES)
    mixed: int = 32768  # tokens of a mixture
    tuned: tuple[int, ...] = (900, 57, 1091)  # lengths of documents in the attention that check --tune times
    scan: tuple[int, int, int] = (16, 32, 128)  # heads of keys, of values, their width, as Qwen3.5 has them
    mamba: tuple[int, int, int, int] = (8, 64, 128, 64)  # groups, heads, states, their width, as Nemotron 3 has them

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=dtype)


def norms(s: Shapes) -> Iterator[Case]:
    N, randn = s.N, s.randn
    kinds = ("", ops.RMS), (" LayerNorm", ops.NormKind(centred=True))
    for D in s.widths:
        x, dy, dr, copy, dx = (randn(N, 1, D) for _ in range(5))
        w, b, shape, size = randn(D), randn(D), f"{N}x{D}", 2 * N * D
        dw, db = s.zeros(2, D)
        yield Case(f"{shape} + copy", "norm_fwd", (x, w, 1e-5, ops.RMS, None, None, copy), 3 * size)
        for name, kind in kinds:
            inputs = x, w, 1e-5, kind, b if kind.centred else None
            backward = dy, x, w, ops.norm_fwd(*inputs)[1], kind, dx, dw, db if kind.centred else None
            yield Case(f"{shape}{name}", "norm_fwd", inputs, 2 * size)
            yield Case(f"{shape}{name}", "norm_bwd", backward, 3 * size)
            yield Case(f"{shape}{name} + residual", "norm_bwd", backward, 4 * size, dict(dresidual=dr))
    H, total, d = s.heads
    x, w, dw, dy = randn(N, total * d).view(N, total, d)[:, :H], randn(d), s.zeros(d), randn(N, H, d)
    _, stats = ops.norm_fwd(x, w, 1e-6)
    yield Case(f"{N}x{H}x{d}", "norm_fwd", (x, w, 1e-6), 4 * N * H * d)
    yield Case(f"{N}x{H}x{d}", "norm_bwd", (dy, x, w, stats, ops.RMS, torch.empty_like(dy), dw), 6 * N * H * d)


def activations(s: Shapes) -> Iterator[Case]:
    N, F, randn = s.N, s.F, s.randn
    h, dy, shape, size = randn(N, 2 * F), randn(N, F), f"{N}x{F}", 2 * N * F
    for name in ("silu", "gelu"):
        yield Case(f"{shape} {name}", "act_fwd", (h, ops.Act(name)), 3 * size)
        yield Case(f"{shape} {name}", "act_bwd_", (dy, h, ops.Act(name)), 6 * size)
    yield Case(f"{shape} clamped", "act_fwd", (h, ops.Act(limit=7.0)), 3 * size)
    F = s.plain
    h, dy, b, db, shape, size = randn(N, F), randn(N, F), randn(F), s.zeros(F), f"{N}x{F}", 2 * N * F
    gelu, relu2 = ops.Act("gelu", False), ops.Act("relu2", False)
    yield Case(f"{shape} gelu + bias", "act_fwd", (h, gelu, b), 2 * size)
    yield Case(f"{shape} gelu + bias", "act_bwd_", (dy, h, gelu, b, db), 4 * size)
    yield Case(shape, "bias_bwd_", (db, dy), size)
    yield Case(f"{shape} relu2", "act_fwd", (h, relu2), 2 * size)
    yield Case(f"{shape} relu2", "act_bwd_", (dy, h, relu2), 4 * size)
    H, total, d = s.heads
    x, docs = randn(N, total * d).view(N, total, d)[:, :H], ops.make_docs([N], s.device)
    cos, sin = ops.rope_table(1e4 ** (-torch.arange(0, d, 2, device=s.device) / d), N)
    yield Case(f"{N}x{H}x{d} of {total}", "rope_", (x, cos, sin, docs.positions), 4 * N * H * d)


def ends(s: Shapes) -> Iterator[Case]:
    N, (D, V), randn = s.N, s.heads_of[0], s.randn
    dy, dw = randn(N, D), s.zeros(V, D, dtype=BF16)
    ids = (V * torch.rand(N, device=s.device) ** 4).long()
    rows = len(torch.unique(ids))
    yield Case(f"{N}x{D}", "embedding_fwd", (ids, dw), 4 * N * D)
    yield Case(f"{N}x{D}, {rows} tokens", "embedding_bwd_", (dw, dy, ids), 2 * N * D + 4 * rows * D)
    yield Case(f"{N}x{D}", "add_noise_", (dy, torch.rand(N, device=s.device), 7, 0), 4 * N * D)
    yield Case(f"{N}x{D}", "dropout", (dy, 0.1, 7, 0), 4 * N * D)
    n = s.block
    g32, g16, out = randn(n, dtype=torch.float32), randn(n), s.zeros(n, dtype=BF16)
    yield Case("bf16", "grad_finish", (g16,), 2 * n)
    yield Case("fp32 to bf16", "grad_finish", (g32, out), 6 * n)
    m, v, w32 = (*s.zeros(2, n).unbind(), g32.clone())
    clip = torch.ones(1, device=s.device)
    options = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, n_decay=n - min(8192, n // 2), step=10)
    w, lo = ops.split_master(w32)
    yield Case("split master, bf16 gradient", "adamw_", (w, lo, m, v, g16, clip), 26 * n, options)
    yield Case("fp32", "adamw_", (w32, None, m, v, g32, clip), 28 * n, options)


def loss(s: Shapes) -> Iterator[Case]:
    N = s.N
    for D, V in s.heads_of:
        x, w = s.randn(N, D), s.randn(V, D) * 0.02
        labels, rows = torch.randint(V, (N,), device=s.device), torch.arange(N, device=s.device)
        for chunk in s.chunks:
            for dtype in (BF16, torch.float32):
                args = (x, w, labels, rows, 1 / N, s.zeros(V, D, dtype=dtype), torch.empty_like(x), chunk)
                label = f"{N}x{D}x{V} by {chunk}, dw {dtype}".replace("torch.", "")
                yield Case(label, "linear_cross_entropy", args, 6 * N * D * V, flops=True)
        K = min(32, V // 2)
        ids = (labels[:, None] + torch.arange(K, device=s.device) * (V // K)) % V
        logps = torch.log_softmax(s.randn(N, K + 1, dtype=torch.float32), 1)
        taught = ops.Taught(ids.int(), logps[:, :K].contiguous(), logps[:, K].contiguous(), 0.5, 2.0)
        inputs = (x, w, labels, rows, 1 / N, s.zeros(V, D), torch.empty_like(x), s.chunks[0])
        label = f"{N}x{D}x{V}, {K} of a teacher"
        yield Case(label, "linear_cross_entropy", inputs, 6 * N * D * V, dict(taught=taught), True)


def fp8(s: Shapes) -> Iterator[Case]:
    """Quantization of a block's tensors, and GEMMs."""
    N, F, randn = s.N, s.F, s.randn
    for D in s.quantized:
        x = randn(N, D)
        for rows, columns in ((True, False), (False, True), (True, True)):
            written_bytes = (rows + columns) * N * D
            label = f"{N}x{D} {'rows' * rows} {'columns' * columns}"
            yield Case(label, "quantize", (x, rows, columns), 4 * N * D + written_bytes)
    codes = ops.quantize(randn(N, F)).rows
    assert codes is not None
    yield Case(f"{N}x{F}", "turn", (codes, torch.empty(F, N, dtype=codes.dtype, device=s.device)), 2 * N * F)
    gate_up, dy = randn(N, 2 * F), randn(N, F)
    for name in ("silu", "gelu"):
        yield Case(f"{N}x{F} {name}", "act_codes_bwd", (dy, gate_up, ops.Act(name)), 17 * N * F)
    for M, K, O in s.matmuls:
        a, b = ops.quantize(randn(M, K)), ops.quantize(randn(O, K))
        for dtype in (BF16, torch.float32):
            args = (a.rows, a.scale, b.rows, b.scale, s.zeros(M, O, dtype=dtype))
            yield Case(f"{M}x{K}x{O} to {dtype}", "fp8_matmul", args, 2 * M * K * O, flops=True)
            add_args = (s.zeros(M, O, dtype=dtype), *args[:4])
            yield Case(f"{M}x{K}x{O} to {dtype}", "fp8_add_", add_args, 2 * M * K * O, flops=True)
    yield from fp8_experts(s)


def fp8_experts(s: Shapes) -> Iterator[Case]:
    """As `experts`, with fp8 codes: GEMMs of forward and of the gradients of rows."""
    for name, (E, k, D, I) in s.mixtures.items():
        P, chosen = s.mixed * k, ops.route_fwd(s.randn(s.mixed, E), ops.Rule(k))[1]
        order = ops.sort_pairs(chosen, E)
        for label, rows, A, B, by_token in (
            ("up", s.mixed, D, 2 * I, k),
            ("down", P, I, D, 0),
            ("d_act", s.mixed, D, I, k),
            ("d_rows", P, 2 * I, D, 0),
        ):
            x, w = s.randn(rows, A), (s.randn(E, A, B) * A**-0.5).mT.contiguous().mT
            if label == "up":
                yield Case(f"{name} {label}", "quantize_rows", (x,), 3 * rows * A)
                yield Case(f"{name} {label}", "quantize_experts", (w,), 5 * w.numel())
                yield Case(f"{name} {label} turned", "quantize_experts", (w.contiguous(),), 5 * w.numel())
            (codes, scale), (matrices, scales) = ops.quantize_rows(x), ops.quantize_experts(w)
            del x, w
            args = (codes, matrices.mT, order, by_token, s.zeros(P, B, dtype=BF16), None, (scale, scales))
            yield Case(f"{name} {label} in fp8", "grouped_mm", args, 2 * P * A * B, flops=True)


class Attention(NamedTuple):
    """Inputs and gradients of attention, packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dout: Tensor
    docs: ops.Docs
    scale: float


def attention_inputs(lengths: Any, H: int, K: int, d: int, s: Shapes = Shapes(), e: int = 0) -> Attention:
    """`e`: width of values, if it is not the width d of queries and keys."""
    N = sum(lengths)
    if e:
        q, dq, k, dk, v, dv = (s.randn(N, n, width) for n, width in ((H, d), (K, d), (K, e)) for _ in range(2))
        return Attention(q, k, v, dq, dk, dv, s.randn(N, H, e), ops.make_docs(lengths, s.device), d**-0.5)
    inputs, gradients = (s.randn(N, (H + 2 * K) * d).view(N, H + 2 * K, d).split([H, K, K], 1) for _ in range(2))
    (q, k, v), (dq, dk, dv) = inputs, gradients
    return Attention(q, k, v, dq, dk, dv, s.randn(N, H, d), ops.make_docs(lengths, s.device), d**-0.5)


def passes(label: str, a: Attention, window: int = 0) -> Iterator[Case]:
    """Forward and backward. `window`: tokens that a query sees; 0: all before it."""
    (_, H, d), e = a.q.shape, a.v.shape[2]
    pairs = H * sum(n * (n + 1) // 2 for n in a.docs.lengths)  # attended, without a window
    inputs = (a.q, a.k, a.v, a.docs, a.scale, window)
    yield Case(label, "attention_fwd", inputs, 2 * (d + e) * pairs, flops=True)
    out, lse = ops.attention_fwd(*inputs)
    args = (a.dout, a.q, a.k, a.v, out, lse, a.docs, a.scale, a.dq, a.dk, a.dv, window)
    yield Case(label, "attention_bwd", args, 2 * (3 * d + 2 * e) * pairs, flops=True)


def attention(s: Shapes) -> Iterator[Case]:
    for lengths, H, K, d, e in (*s.latent, *((*case, case[3]) for case in s.attention)):
        a = attention_inputs(lengths, H, K, d, s, e if e != d else 0)
        equal = len(set(lengths)) == 1
        label = f"d{d}{f'+{e}' if e != d else ''} {H}/{K} " + (
            f"{len(lengths)}x{lengths[0]}" if equal else f"{len(lengths)} documents"
        )
        yield from passes(label, a)
    size, sinks = 2 * a.q.numel(), s.randn(H, dtype=torch.float32)  # of the last
    out, lse = ops.attention_fwd(a.q, a.k, a.v, a.docs, a.scale)
    yield Case(label, "sinks_fwd_", (out, lse, sinks), 2 * size)
    yield Case(label, "sinks_bwd_", (s.zeros(H), a.dout, out, lse, sinks), 2 * size)


def experts(s: Shapes) -> Iterator[Case]:
    """Routing and GEMMs of experts, for tokens with random router logits."""
    yield from routing(s)
    for name, (E, k, D, I) in s.mixtures.items():
        N, P = s.mixed, s.mixed * k
        order = ops.sort_pairs(ops.route_fwd(s.randn(N, E), ops.Rule(k))[1], E)
        x, d_gate_up, act = s.randn(N, D), s.randn(P, 2 * I), s.randn(P, I)
        up, down = (s.randn(E, 2 * I, D) * D**-0.5).mT, (s.randn(E, D, I) * I**-0.5).mT
        matmuls = (("up", x, up, k), ("down", act, down, 0), ("d_act", x, down.mT, k), ("d_rows", d_gate_up, up.mT, 0))
        for label, a, w, by_token in matmuls:
            flops = 2 * P * w.shape[1] * w.shape[2]
            yield Case(f"{name} {label}", "grouped_mm", (a, w, order, by_token), flops, flops=True)
        for label, w, a, b, k_a, k_b in (("up", up, x, d_gate_up, k, 0), ("down", down, act, x, 0, k)):
            args = (torch.zeros_like(w, dtype=torch.float32), a, b, order, k_a, k_b)
            flops = 2 * P * w.shape[1] * w.shape[2]
            yield Case(f"{name} {label}", "grouped_add_", args, flops, flops=True)


def routing(s: Shapes) -> Iterator[Case]:
    """Of the first mixture: routing, and sums and activations of the rows that are sorted by expert."""
    name, (E, k, D, I) = next(iter(s.mixtures.items()))
    N, P, rule, logits = s.mixed, s.mixed * k, ops.Rule(k), s.randn(s.mixed, E)
    weights, chosen = ops.route_fwd(logits, rule)
    yield Case(name, "route_fwd", (logits, rule), 2 * N * E + 8 * P)
    yield Case(name, "route_bwd", (torch.randn_like(weights), logits, chosen, rule), 4 * N * E + 8 * P)
    yield Case(name, "sort_pairs", (chosen, E), 12 * P)
    order, rows, d_act, gate_up = ops.sort_pairs(chosen, E), s.randn(P, D), s.randn(P, I), s.randn(P, 2 * I)
    yield Case(f"{name} forward", "combine", (rows, order, k, weights, s.randn(N, D)), 2 * D * (P + 2 * N))
    yield Case(f"{name} backward", "combine", (rows, order, k), 2 * D * (P + N))
    yield Case(f"{name} silu", "act_bwd_", (d_act, gate_up, ops.Act(), None, None, weights, order), 12 * P * I)
    relu2 = ops.Act("relu2", False)
    yield Case(f"{name} relu2", "act_bwd_", (d_act, s.randn(P, I), relu2, None, None, weights, order), 8 * P * I)


def packed(s: Shapes) -> Iterator[Case]:
    """The experts of a layer in each packing."""
    name, (E, _, D, I) = next(iter(s.mixtures.items()))
    draw = lambda low, high, *shape: torch.randint(low, high, shape, dtype=torch.uint8, device=s.device)
    nbytes = lambda *parts: sum(t.numel() * t.element_size() for t in parts)
    scales = s.randn(E, -(-I // 128), -(-D // 128), dtype=torch.float32)
    codes, decoded = draw(0, 127, E, I, D), torch.zeros(E, I, D, dtype=BF16, device=s.device)  # 127: NaN
    yield Case(name, "e4m3_decode", (codes, scales, decoded, (128, 128)), nbytes(codes, scales, decoded))
    parts = draw(0, 256, E, I * D // 2), s.randn(E, -(-I * D // 64), dtype=torch.float32)
    yield Case(name, "nf4_decode", (*parts, decoded.view(E, -1)), nbytes(*parts, decoded))
    codes, factor = draw(0, 256, E, I, D // 2), s.randn(E, dtype=torch.float32)
    for group, global_scale in ((32, None), (16, factor)):
        scales = draw(110, 127, E, I, D // group)
        yield Case(name, "fp4_decode", (codes, scales, global_scale, decoded), nbytes(codes, scales, decoded))
    words = torch.randint(-(1 << 31), 1 << 31, (E, I, D // 8), dtype=torch.int32, device=s.device)
    scales = s.randn(E, I, D // 32)
    yield Case(name, "int4_decode", (words, scales, None, decoded, 32), nbytes(words, scales, decoded))


def scans(s: Shapes) -> Iterator[Case]:
    """A gated delta rule with the operations around it, and the gate of an attention's output."""
    N, (K, H, d), docs = s.N, s.scan, ops.make_docs([s.N], s.device)
    label, values = f"{N}x{H}x{d}", 2 * N * H * d
    yield from recurrence(label, s, (K, H, d, d), True)
    C = (2 * K + H) * d
    x, dx, w = s.randn(N, C), s.randn(N, C), s.randn(C, 4)
    yield Case(f"{N}x{C}", "conv_fwd", (x, w, None, docs), 4 * x.numel())
    yield Case(f"{N}x{C}", "conv_bwd", (dx, x, w, None, docs, s.zeros(C, 4), None, torch.zeros_like(x)), 6 * x.numel())
    v, dy, gate, out = (s.randn(N, H, d) for _ in range(4))
    yield from gated_norm(label, dy, v, gate, s.randn(d), s.zeros(d), False)
    for act in ("sigmoid", "silu"):
        yield Case(f"{label} {act}", "gate_fwd", (v, gate, act), 3 * values)
        yield Case(f"{label} {act}", "gate_bwd", (dy, v, gate, out, act), 5 * values)
    K, H, d, e = s.mamba  # Mamba2's recurrence has no delta rule, its norm is of groups of heads
    yield from recurrence(f"{N}x{H}x{e}, states of {d}", s, s.mamba, False)
    x, dy, gate = (s.randn(N, K, H * e // K) for _ in range(3))
    w, dw = s.randn(*x.shape[1:]), s.zeros(*x.shape[1:])
    yield from gated_norm(f"{N}x{K}x{x.shape[2]}, gate first", dy, x, gate, w, dw, True)


def recurrence(label: str, s: Shapes, shape: tuple[int, int, int, int], delta: bool) -> Iterator[Case]:
    """`shape`: heads of keys and of values, their widths. Without a delta rule each head's input is added, too."""
    N, (K, H, d, e), docs = s.N, shape, ops.make_docs([s.N], s.device)
    q, k = (torch.nn.functional.normalize(s.randn(N, K, d).float(), dim=-1).to(BF16) for _ in range(2))
    v, dy, skip = s.randn(N, H, e), s.randn(N, H, e), None if delta else s.randn(H)
    inputs = (q, k, v, -torch.rand(N, H, device=s.device), torch.rand(N, H, device=s.device), docs, delta, skip)
    size = 2 * q.numel() + 2 * v.numel()
    yield Case(label, "scan_fwd", inputs, 2 * size, bound=1e-2)
    yield Case(label, "scan_bwd", (dy, *inputs, *map(torch.zeros_like, (q, k, v))), 4 * size, bound=1e-2)


def gated_norm(label: str, dy: Tensor, x: Tensor, gate: Tensor, w: Tensor, dw: Tensor, first: bool) -> Iterator[Case]:
    kind, size = ops.NormKind(gate_first=first), 2 * x.numel()
    _, stats = ops.norm_fwd(x, w, 1e-6, kind, gate=gate)
    yield Case(label, "norm_fwd", (x, w, 1e-6, kind, None, gate), 3 * size)
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    yield Case(label, "norm_bwd", (dy, x, w, stats, kind, dx, dw, None, gate, dgate), 5 * size)


GROUPS: dict[str, Callable[[Shapes], Iterator[Case]]] = {
    "norms": norms,
    "activations": activations,
    "ends": ends,
    "loss": loss,
    "attention": attention,
    "fp8": fp8,
    "experts": experts,
    "packed": packed,
    "scans": scans,
}
EXACT = (torch.int32, torch.float8_e4m3fn)
COMPARED = (BF16, torch.float32, *EXACT)  # not a split master's low halves


def error(case: Case) -> float:
    """The largest relative error of results and written arguments, compared with the reference implementation."""
    op = getattr(ops, case.op)
    differences = [
        [t.float() if t.dtype in EXACT else t for t in _run(case, fn) if t.dtype in COMPARED]
        for fn in (op, op.__wrapped__)
    ]
    norm = lambda t: float(torch.linalg.vector_norm(t, dtype=torch.float64))
    return max(norm(a.float() - b.float()) / max(norm(b), 1e-30) for a, b in zip(*differences, strict=True))


def repeats(case: Case, runs: int) -> bool:
    """Whether `runs` calls give bitwise equal results."""
    first = bits(case)
    return all(equal(first, bits(case)) for _ in range(runs - 1))


def bits(case: Case) -> list[Tensor]:
    """The bytes of all results, and of the arguments after the call."""
    return [t.contiguous().view(-1).view(torch.uint8) for t in _run(case, getattr(ops, case.op))]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _run(case: Case, op: Callable[..., Any]) -> list[Tensor]:
    """Results, and arguments after the call. The case's own arguments are not changed."""
    copies = [a.clone() if torch.is_tensor(a) else a for a in case.args]
    results = op(*copies, **case.kwargs)
    return [t for t in (*_flat(results), *copies) if torch.is_tensor(t)]


def _flat(results: Any) -> list[Any]:
    """All results of an op in one list."""
    return [t for part in results for t in _flat(part)] if isinstance(results, tuple) else [results]

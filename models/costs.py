"""What computing with a unit costs: FLOPs, and temporaries on the GPU. No torch.

Legend: N tokens, D width, F hidden width, V vocabulary. `pairs`: (query, key) pairs that one layer attends to
(attended_pairs). FLOPs count two per multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from trireme.models.config import ModelConfig
from trireme.models.shapes import (
    DOWN,
    GATE_UP,
    adapts_experts,
    chosen,
    in_fp8,
    is_frozen,
    kind,
    output_name,
    quantised_each,
    saved_shapes,
    seen,
    trained_parts,
    up_name,
    up_width,
    weight_groups,
)

KNOWN = 4096  # counts that are kept: a step asks for each of its tasks

# ---------------------------------------------------------------- FLOPs

TILE = 128  # rows of a tile of grouped products


def attended_pairs(lengths: Iterable[int], window: int = 0) -> int:
    """(query, key) pairs of causal attention within documents of these lengths; window 0: none."""

    def pairs(n: int) -> int:
        full = min(n, window) if window else n
        return full * (full + 1) // 2 + (n - full) * window

    return sum(map(pairs, lengths))


def layer_pairs(cfg: ModelConfig, lengths: Iterable[int]) -> int:
    """Attended pairs of a layer: the mean over layers."""
    if not cfg.window:
        return attended_pairs(lengths)
    lengths, windows = list(lengths), [cfg.layer_window(i) for i in range(cfg.n_layers)]
    return sum(attended_pairs(lengths, window) * windows.count(window) for window in set(windows)) // cfg.n_layers


def _linear_layers(cfg: ModelConfig, kind: str) -> dict[str, tuple[int, int]]:
    """(in, out) features of a block's linear layers, by the name of their product; without a router and its experts."""
    found = {}
    if kind != "mlp":
        found["qkv"] = cfg.width, cfg.qkv_width
        found["attn_branch" if cfg.names.post1 else "resid"] = cfg.q_width, cfg.width
    if kind != "attention" and cfg.experts is None:
        found[up_name(cfg)] = cfg.width, up_width(cfg)
        found["mlp_branch" if cfg.names.post2 else "out"] = cfg.ffn, cfg.width
    elif kind != "attention" and cfg.experts and cfg.experts.shared:
        found |= {"shared_up": (cfg.width, 2 * cfg.experts.shared), "shared": (cfg.experts.shared, cfg.width)}
    return found


@lru_cache(KNOWN)
def _linear_params(cfg: ModelConfig, kind: str = "block") -> dict[str, int]:
    """Elements of a block's matrices that a token is multiplied with, by the name of their product."""
    cfg, kind = seen(cfg, kind)
    found = {name: inside * outside for name, (inside, outside) in _linear_layers(cfg, kind).items()}
    if kind != "attention" and cfg.experts:
        found[up_name(cfg)] = chosen(cfg) * cfg.width * up_width(cfg)
        found["mlp_branch" if cfg.names.post2 else "out"] = hidden_width(cfg) * cfg.width
        found["router"] = (cfg.experts.count + cfg.experts.shared_gate) * cfg.width
    return found


def hidden_width(cfg: ModelConfig) -> int:
    """Features of a token's activation in the MLP."""
    return cfg.experts.chosen * cfg.experts.width if cfg.experts else cfg.ffn


def attention_flops(cfg: ModelConfig, pairs: int) -> int:
    """Forward of one layer's attention: scores and weighted values."""
    return 4 * pairs * cfg.q_width


@lru_cache(KNOWN)
def _adapter_params(cfg: ModelConfig, u: int) -> int:
    """Elements of adapters that a token is multiplied with."""
    adapters = [(n, prod(s)) for part in trained_parts(cfg, u) for g in part for n, s in g if ".lora_" in n]
    of_experts = sum(size for name, size in adapters if adapts_experts(name))
    all_experts = cfg.experts.count if cfg.experts else 1
    return sum(size for _, size in adapters) - of_experts + of_experts * chosen(cfg) // all_experts


@lru_cache(KNOWN)
def _trained_params(cfg: ModelConfig, u: int) -> int:
    """Elements of a unit's trained matrices, without adapters; of experts those of a token."""
    groups = [group for group in weight_groups(cfg, u) if len(group[0][1]) > 1 and not is_frozen(cfg, group)]
    used = lambda shape: prod(shape) if len(shape) == 2 else chosen(cfg) * prod(shape[1:])
    return sum(used(shape) for group in groups for _, shape in group)


@lru_cache(KNOWN)
def _expert_bias_params(cfg: ModelConfig, u: int) -> int:
    """Elements that a token is multiplied with for the gradients of experts' biases."""
    if cfg.experts is None or not cfg.experts.bias:
        return 0
    trained = {name.rsplit(".", 1)[1] for part in trained_parts(cfg, u) for group in part for name, _ in group}
    down = cfg.experts.count * cfg.width
    up = chosen(cfg) * up_width(cfg)
    return down * (1 + (f"{DOWN}_bias" in trained)) + up * (f"{GATE_UP}_bias" in trained)


def forward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """Forward of a unit. For the head, `tokens` are the labels."""
    cfg, what = seen(cfg, kind(cfg, u))
    if what == "embed":
        return 0
    if what == "head":
        return 2 * tokens * cfg.vocab * cfg.width
    attention = attention_flops(cfg, pairs) if what != "mlp" else 0
    return 2 * tokens * (sum(_linear_params(cfg, what).values()) + _adapter_params(cfg, u)) + attention


def backward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """Backward of a unit, nothing recomputed: two products for each of forward's, one if frozen; attention five for
    two.
    """
    cfg, what = seen(cfg, kind(cfg, u))
    if what in ("embed", "head"):
        frozen = is_frozen(cfg, [(output_name(cfg), ())])
        return (1 if frozen else 2) * forward_flops(cfg, u, tokens, pairs)
    attention = attention_flops(cfg, pairs) if what != "mlp" else 0
    products = sum(_linear_params(cfg, what).values()) + _trained_params(cfg, u) + 2 * _adapter_params(cfg, u)
    products += _expert_bias_params(cfg, u) if what != "attention" else 0
    return 2 * tokens * products + attention * 5 // 2


def recompute_flops(cfg: ModelConfig, kept: frozenset[str], tokens: int, pairs: int, kind: str = "block") -> int:
    """What backward adds to rebuild saved_shapes not in `kept`."""
    missing = saved_shapes(cfg, tokens, kind).keys() - kept
    again = missing | {"router"}  # never saved
    linear = sum(n for name, n in _linear_params(cfg, kind).items() if name in again)
    attention = attention_flops(cfg, pairs) if missing & {"attn_out", "lse"} else 0
    return 2 * tokens * linear + attention


class Grouped(NamedTuple):
    """FLOPs of a unit's work that are experts' products, with the rows that their tiles pad."""

    forward: float = 0.0
    backward: float = 0.0  # gradients of rows
    gradients: float = 0.0  # of matrices
    rebuilt: float = 0.0  # of forward, in backward


def grouped_work(cfg: ModelConfig, u: int, kept: frozenset[str], tokens: int) -> Grouped:
    """Of a unit that backward finds `kept` of. A tile of TILE rows is of one expert: half of its last is empty."""
    cfg, what = seen(cfg, kind(cfg, u))
    if cfg.experts is None or what not in ("block", "mlp"):
        return Grouped()
    rows = cfg.experts.chosen * tokens + cfg.experts.count * TILE / 2
    up, down = (2 * rows * n for n in (cfg.width * up_width(cfg), cfg.experts.width * cfg.width))
    trained = {name.rpartition(".")[2] for part in trained_parts(cfg, u) for group in part for name, _ in group}
    gradients = up * (GATE_UP in trained) + down * (DOWN in trained)
    return Grouped(up + down, up + down, gradients, up * (up_name(cfg) not in kept))


_quantised_each = lru_cache(KNOWN)(quantised_each)


class InFp8(NamedTuple):
    """What of a micro-batch's work is done in fp8: FLOPs, and bytes that quantisation and sums of slices move."""

    forward: int = 0
    backward: int = 0
    rebuilt: int = 0  # of forward, in backward
    forward_bytes: int = 0
    backward_bytes: int = 0
    rebuilt_bytes: int = 0


def in_fp8_work(cfg: ModelConfig, u: int, kept: frozenset[str], tokens: int) -> InFp8:
    """Of a block or half block; all of a unit's matrices count as trained if one is."""
    what, N, trained = kind(cfg, u), tokens, _trained_params(cfg, u) > 0
    missing, each = saved_shapes(cfg, 1, what).keys() - kept, _quantised_each(cfg, u)
    cfg, what = seen(cfg, what)
    sizes = _linear_layers(cfg, what)
    found = {name: (a, b) for name, (a, b) in sizes.items() if in_fp8(cfg, a, b)}
    again = {name: size for name, size in found.items() if name in missing}
    flops = lambda sizes: 2 * N * sum(a * b for a, b in sizes.values())
    # Read twice, written once: x; behind, dy in both orders; a slice written and read. Matrices: Geometry.decode_bytes,
    # or where each product quantises them as x.
    moved = lambda sizes: sum(5 * (N * a + each * a * b) for a, b in sizes.values())
    behind = sum(
        (5 + trained) * N * b + trained * (5 * N * a + 8 * a * b) + 5 * each * a * b for a, b in found.values()
    )
    made = N * cfg.ffn if cfg.gated and "out" in found and cfg.lora is None else 0  # codes of gated units: not in bf16
    both, written = (1 + trained) * flops(found), moved(found) - 2 * made
    return InFp8(flops(found), both, flops(again), written, behind - 12 * made, moved(again))


def model_flops(cfg: ModelConfig, tokens: int, pairs: int) -> int:
    """FLOPs of a training step as MFU counts them: three times forward's matrices and attention, no recomputation.

    That is 6 a token and matrix parameter (output matrix included, embedding not), 4 if frozen, and 12 a pair and query
    feature by layer.
    """
    inner = range(1, cfg.n_units - 1)
    matrices = sum(sum(_linear_params(cfg, kind(cfg, u)).values()) for u in inner) + cfg.vocab * cfg.width
    if not cfg.frozen and cfg.lora is None:
        return 6 * tokens * matrices + 3 * cfg.n_layers * attention_flops(cfg, pairs)
    trained = sum(_trained_params(cfg, u) + 3 * _adapter_params(cfg, u) for u in inner)
    trained += cfg.vocab * cfg.width * (not is_frozen(cfg, [(output_name(cfg), ())]))
    return 2 * tokens * (2 * matrices + trained) + 3 * cfg.n_layers * attention_flops(cfg, pairs)


# ---------------------------------------------------------------- memory

LOSS_CHUNK = 2048  # rows of logits; default of linear_cross_entropy
SLICE = 1 << 25  # bytes of an fp8 product on its way to a gradient's sum
PROGRAMS = 1024  # most rows of fp32 partial sums in a norm's backward
SLACK = 1 << 20


def workspace_bytes(cfg: ModelConfig, u: int, tokens: int, itemsize: int, grad_itemsize: int | None = None) -> int:
    """Upper bound of a unit's temporaries on the GPU, forward or backward, with nothing saved.

    Item sizes of compute dtype and gradients (default: the same). Excludes the caller's tensors (x, dy, dx, weights,
    gradients, saved) and cuBLAS's workspace.
    """
    if u == 0:
        extra = tokens * cfg.width * itemsize * (cfg.rope is None or cfg.embed_scale != 1.0)
        sums = (tokens // 8 + 8) * cfg.width  # sorted ids; fp32 sums of frequent ones
        return extra + sums + 80 * tokens + SLACK
    partials = 2 * 4 * cfg.width * min(PROGRAMS, tokens) + SLACK
    if u == cfg.n_units - 1:
        return _head_workspace(cfg, tokens, itemsize, grad_itemsize or itemsize) + partials
    sizes = _Sizes(tokens, itemsize, grad_itemsize or itemsize, quantised_each(cfg, u))
    return _block_workspace(cfg, kind(cfg, u), sizes) + partials


def slice_rows(columns: int, itemsize: int) -> int:
    """Rows of a matrix's gradient that are added at once in fp8."""
    return max(128, SLICE // (columns * itemsize) // 128 * 128)


class _Sizes(NamedTuple):
    tokens: int
    item: int  # bytes of a value
    grad: int  # of a gradient's
    each: bool  # shapes.quantised_each


class _Codes(NamedTuple):
    """Bytes that a linear layer's products take in fp8 (linear.py); in bf16 only `held`."""

    x: int = 0  # codes of x, and of the matrix
    matrix: int = 0  # where each product makes them
    dy: int = 0  # codes of dy, in both orders
    add: int = 0  # codes of x, and a slice of the gradient
    held: int = 0  # what backward's products read of dy


def _codes(cfg: ModelConfig, sizes: _Sizes, inside: int, outside: int, keeps: bool = False) -> _Codes:
    """Of `inside` features to `outside`. `keeps`: biases or adapters read dy too."""
    N, dy = sizes.tokens, sizes.tokens * outside * sizes.item
    if not in_fp8(cfg, inside, outside):
        return _Codes(held=dy)
    padded, matrix = 0 if cfg.frozen == ("*",) else -(-N // 16) * 16, inside * outside * sizes.each
    rows, columns = (inside, outside) if cfg.names.in_out else (outside, inside)
    part = min(rows, slice_rows(columns, sizes.grad)) * columns * sizes.grad
    codes = (N + padded) * outside
    held = codes + (keeps or cfg.lora is not None) * dy
    return _Codes(N * inside + matrix, matrix, codes, (padded > 0) * (padded * inside + part), held)


def _block_workspace(cfg: ModelConfig, kind: str, sizes: _Sizes) -> int:
    """The fullest moment: a sum of live tensors. Each `del` that it counts on names it."""
    cfg, kind = seen(cfg, kind)
    tokens, itemsize, *_ = sizes
    x, tile = tokens * cfg.width * itemsize, min(tokens, cfg.mlp_rows)  # block.mlp_forward
    y, row = tile * cfg.width * itemsize, tokens * 4  # one fp32 a token
    # branch.branch_backward: scaled dy; product, norm, gradient; the other half's product
    behind = (y if kind == "mlp" else x) * ((cfg.branch_scale != 1.0) + 4 * bool(cfg.names.post1))
    mlp_forward, mlp_backward = _mlp_moments(cfg, sizes._replace(tokens=tile))
    result, attention = _attention_moments(cfg, sizes)
    dresid = x if tile < tokens else 0
    resid, before = (0, 0) if cfg.parallel else (x, result + x)
    moments = {
        "attention": attention,
        "mlp": [*mlp_forward, *mlp_backward],
        "block": [
            *(resid + moment for moment in mlp_forward),
            *(before + dresid + moment for moment in mlp_backward),  # block.backward: resid
            *(x + moment for moment in attention),  # block.backward: dresid
            x + x + x,
        ],
    }
    rank = 3 * cfg.lora.rank if cfg.lora else 0  # fused adapters
    return max(moments[kind]) + behind + 4 * row + 3 * tokens * rank * itemsize


def _attention_moments(cfg: ModelConfig, sizes: _Sizes) -> tuple[int, list[int]]:
    """(bytes of attention.Result, the half's moments)."""
    tokens, itemsize, *_ = sizes
    x, attn, qkv = (tokens * width * itemsize for width in (cfg.width, cfg.q_width, cfg.qkv_width))
    lse = cfg.n_heads * tokens * 4
    normed = tokens * (cfg.q_width + cfg.kv_width) * itemsize + 2 * lse if cfg.qk_norm else 0  # normed q, k
    result = qkv + normed + attn + lse
    first = _codes(cfg, sizes, cfg.width, cfg.qkv_width, cfg.qkv_bias)
    last = _codes(cfg, sizes, cfg.q_width, cfg.width)  # dy is the caller's
    product = x * (last.x > 0)  # added to what there is
    return result, [
        x + first.x + qkv,  # attention._project
        attn + last.x + product,  # add_branch
        result + last.x + product,  # attention.residual: beside it `out`
        result + last.dy + last.add,  # attention.backward_to_qkv
        result + last.dy + last.matrix + attn,
        result + attn + qkv + lse,  # dout, dqkv, row sums of dout * out
        qkv + first.dy,
        first.held + x + first.add,  # attention.backward_to_x: d_qkv; y or its gradient
        first.held + first.matrix + x,
    ]


def _mlp_moments(cfg: ModelConfig, sizes: _Sizes) -> tuple[list[int], list[int]]:
    """Of forward, of backward."""
    tile, itemsize, *_ = sizes
    y, act = (tile * width * itemsize for width in (cfg.width, hidden_width(cfg)))
    up = tile * chosen(cfg) * up_width(cfg) * itemsize
    activation = 2 * (up + act)  # mlp.backward: activation, argument, their gradients
    if cfg.experts:
        routes, wide = _routes_bytes(cfg, tile, itemsize), chosen(cfg) * y
        forward = [routes + y + up, routes + up + act, routes + act + wide]
        backward = [routes + y + activation, routes + y + up + wide, routes + y + wide + y]
        forward.append(y + routes + tile * 8 * cfg.experts.count)  # rows.Load.add: y, softmax in fp32
        if cfg.lora and cfg.lora.adapts(cfg.names.experts):  # lora.Stacked: products before they are added
            thin = routes + 5 * tile * chosen(cfg) * cfg.lora.rank * itemsize
            forward += [thin + y + 2 * up, thin + act + 2 * wide]
            backward += [thin + y + max(activation, 2 * up), thin + y + up + 2 * wide]
        if s := cfg.experts.shared:
            first, last = _codes(cfg, sizes, cfg.width, 2 * s), _codes(cfg, sizes, s, cfg.width)
            shared, codes = tile * s * itemsize, max(first.dy, last.dy) + max(first.add, last.add, first.x)
            forward.append(2 * y + 3 * shared + first.x + last.x)  # shared.forward: y, shared_up, act
            backward.append(routes + 2 * y + max(6 * shared, 2 * shared + y) + codes)  # y, d_norm
        return forward, backward
    first = _codes(cfg, sizes, cfg.width, up_width(cfg), cfg.mlp_bias and cfg.gated)
    turned = 0 if cfg.frozen == ("*",) else -(-tile // 16) * 16 * cfg.ffn
    last = _codes(cfg, sizes, cfg.ffn, cfg.width)  # dy is the caller's
    inner, active = act, [y + last.dy + activation, y + last.dy + last.add + up + act, y + up + first.dy]
    if cfg.gated and last.x and cfg.lora is None:
        inner = 0  # codes, counted in last.x
        if first.x and not cfg.mlp_bias:
            active = [y + last.dy + up + act + first.dy + turned, y + last.dy + first.dy + last.add]
    return [y + first.x + up, up + act, inner + last.x + y * (last.x > 0)], [
        y + first.x + up,
        *active,
        y + last.dy + last.matrix + up + act,
        y + first.held + first.add,
        first.held + first.matrix + y,  # then y or d_norm
        y + up + y,
        y + up + (inner + last.x + y) * bool(cfg.names.post2),  # the argument of the norm behind, again
    ]


def _routes_bytes(cfg: ModelConfig, tokens: int, itemsize: int) -> int:
    """experts.Routes with the gradients of logits and weights, and what sorting takes."""
    assert cfg.experts is not None
    own = cfg.experts
    logits = (8 + itemsize if own.sigmoid else 2 * itemsize) * own.count  # and their gradient
    logits += own.bias * (2 * itemsize * own.count + own.chosen * (itemsize + 8))  # experts._bias_gradients_
    sorting = own.chosen * (20 + own.count // 16 + 1)
    return tokens * (logits + sorting) + 8 * own.count


def _head_workspace(cfg: ModelConfig, tokens: int, itemsize: int, grad_itemsize: int) -> int:
    """Norm's result, a chunk's logits and rows, fp32 sums for narrower gradients where it is trained."""
    chunk, output = min(tokens, LOSS_CHUNK), (output_name(cfg), (cfg.vocab, cfg.width))
    summed = grad_itemsize < 4 and tokens > chunk and not is_frozen(cfg, [output])
    sums = 4 * cfg.vocab * cfg.width * summed
    return (tokens + 2 * chunk) * cfg.width * itemsize + chunk * cfg.vocab * itemsize + sums + 32 * tokens

"""Names and shapes of weights and saved tensors, and what computing with them costs. No torch.

Legend: N tokens, D width, H query heads, K key/value heads, d head width, F hidden width, V vocabulary. `pairs`:
(query, key) pairs that one layer attends to (attended_pairs). FLOPs count two per multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from math import prod

from trireme.models.config import InputError, Lora, ModelConfig
from trireme.models.names import adapter_names

Group = list[tuple[str, tuple[int, ...]]]  # neighbours in memory: a fused operand
HALVES = ("attention", "mlp")


def unit_names(cfg: ModelConfig) -> list[str]:
    """In order, for file names and log lines."""
    short = {"block": "block", "attention": "attn", "mlp": "mlp"}
    inner = (f"{short[kind(cfg, u)]}{layer(cfg, u):03d}" for u in range(1, cfg.n_units - 1))
    return ["embed", *inner, "head"]


def kind(cfg: ModelConfig, u: int) -> str:
    """ "embed", "block", "attention", "mlp" or "head"."""
    if u in (0, cfg.n_units - 1):
        return "head" if u else "embed"
    return HALVES[(u - 1) % 2] if cfg.halves else "block"


def inner_kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """Unit kinds of a block, in order."""
    return HALVES if cfg.halves else ("block",)


def layer(cfg: ModelConfig, u: int) -> int:
    return (u - 1) // len(inner_kinds(cfg))


# ---------------------------------------------------------------- weights


def embedding_name(cfg: ModelConfig) -> str:
    """Token embedding (V, D)."""
    return f"{cfg.names.embed}.weight"


def output_name(cfg: ModelConfig) -> str:
    """Output matrix (V, D); the token embedding if tied."""
    return embedding_name(cfg) if cfg.tied else f"{cfg.names.output}.weight"


def weight_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """A unit's (Hugging Face name, shape), grouped for storage.layout.pack."""
    return [group for part in weight_parts(cfg, u) for group in part]


def weight_parts(cfg: ModelConfig, u: int) -> list[list[Group]]:
    """weight_groups by part: a block's are its attention and MLP."""
    what = kind(cfg, u)
    if what == "embed":
        return [_embed_groups(cfg)]
    if what == "head":
        return [_head_groups(cfg)]
    prefix = cfg.names.prefix(layer(cfg, u))
    parts = {"attention": _attention_groups(cfg), "mlp": _mlp_groups(cfg)}
    mine = parts.values() if what == "block" else [parts[what]]
    return [[[(prefix + name, shape) for name, shape in group] for group in groups] for groups in mine]


def trained_parts(cfg: ModelConfig, u: int) -> list[list[Group]]:
    """Without the frozen, with adapters."""
    lora = cfg.lora if 0 < u < cfg.n_units - 1 else None
    return [
        [group for group in part if not is_frozen(cfg, group)] + (_adapter_groups(cfg, lora, part) if lora else [])
        for part in weight_parts(cfg, u)
    ]


def frozen_groups(cfg: ModelConfig, u: int) -> list[Group]:
    return [group for group in weight_groups(cfg, u) if is_frozen(cfg, group)]


def is_frozen(cfg: ModelConfig, group: Group) -> bool:
    """Whether cfg.frozen matches. Raises InputError where it matches only some tensors: they are one product."""
    found = [any(fnmatchcase(name, pattern) for pattern in cfg.frozen) for name, _ in group]
    if any(found) and not all(found):
        raise InputError(f"{', '.join(name for name, _ in group)} are one product here: freeze all of them, or none.")
    return all(found)


def _adapter_groups(cfg: ModelConfig, lora: Lora, groups: list[Group]) -> list[Group]:
    """Of each product every A (rank, in), neighbours, and every B (out, rank)."""
    found: list[Group] = []
    for group in groups:
        matrices = [(name.removesuffix(".weight"), shape) for name, shape in group if len(shape) == 2]
        adapted = [(adapter_names(module), shape) for module, shape in matrices if lora.adapts(module)]
        rows, columns = (1, 0) if cfg.names.in_out else (0, 1)
        if adapted:
            found.append([(a, (lora.rank, shape[columns])) for (a, _), shape in adapted])
            found.append([(b, (shape[rows], lora.rank)) for (_, b), shape in adapted])
    return found


def features(cfg: ModelConfig, names: tuple[str, ...]) -> tuple[int, ...]:
    """Features of each matrix of a product, by names within a block."""
    own = cfg.names
    if names == own.qkv:
        return (cfg.qkv_width,) if len(names) == 1 else (cfg.q_width, cfg.kv_width, cfg.kv_width)
    if names == own.up:
        return (up_width(cfg),) if len(names) == 1 else (cfg.ffn, cfg.ffn)
    return (cfg.width,)


def _embed_groups(cfg: ModelConfig) -> list[Group]:
    tokens: Group = [(embedding_name(cfg), (cfg.vocab, cfg.width))]
    positions: Group = [(f"{cfg.names.positions}.weight", (cfg.max_positions, cfg.width))]
    return [tokens, positions] if cfg.rope is None else [tokens]


def _head_groups(cfg: ModelConfig) -> list[Group]:
    output: list[Group] = [] if cfg.tied else [[(output_name(cfg), (cfg.vocab, cfg.width))]]
    return output + _norm(cfg, cfg.names.final_norm)


def _norm(cfg: ModelConfig, *names: str) -> list[Group]:
    """Over the width; "" is none."""
    return [group for name in names if name for group in _one_norm(cfg, name)]


def _one_norm(cfg: ModelConfig, name: str) -> list[Group]:
    weight: Group = [(f"{name}.weight", (cfg.width,))]
    return [weight, [(f"{name}.bias", (cfg.width,))]] if cfg.family.layer_norm else [weight]


def _matrix(cfg: ModelConfig, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Group:
    """Neighbours, each of `rows` features."""
    return [
        (f"{name}.weight", (columns, n) if cfg.names.in_out else (n, columns))
        for name, n in zip(names, rows, strict=True)
    ]


def _bias(names: tuple[str, ...], rows: tuple[int, ...]) -> Group:
    return [(f"{name}.bias", (n,)) for name, n in zip(names, rows, strict=True)]


def _attention_groups(cfg: ModelConfig) -> list[Group]:
    names, D = cfg.names, cfg.width
    rows = features(cfg, names.qkv)
    groups = [
        _matrix(cfg, names.qkv, rows, D),
        _matrix(cfg, (names.o,), (D,), cfg.q_width),
        *_norm(cfg, names.norm1, names.post1),
    ]
    if cfg.qk_norm:
        wide = cfg.family.qk_norm == "width"
        widths = (cfg.q_width, cfg.kv_width) if wide else (cfg.head_dim, cfg.head_dim)
        groups += [[(f"{n}.weight", (d,))] for n, d in zip((names.q_norm, names.k_norm), widths, strict=True)]
    if cfg.qkv_bias:
        groups.append(_bias(names.qkv, rows))
    if cfg.o_bias:
        groups.append(_bias((names.o,), (D,)))
    return groups


def _mlp_groups(cfg: ModelConfig) -> list[Group]:
    names, D = cfg.names, cfg.width
    rows = features(cfg, names.up)
    groups = [
        _matrix(cfg, names.up, rows, D),
        _matrix(cfg, (names.down,), (D,), cfg.ffn),
        *_norm(cfg, names.norm2, names.post2),
    ]
    if cfg.mlp_bias:
        groups += [_bias(names.up, rows), _bias((names.down,), (D,))]
    return groups


def parameters(cfg: ModelConfig, u: int | None = None) -> int:
    """Of a unit, or of the model."""
    units = range(cfg.n_units) if u is None else [u]
    return sum(prod(shape) for i in units for group in weight_groups(cfg, i) for _, shape in group)


# ---------------------------------------------------------------- saved tensors


def up_name(cfg: ModelConfig) -> str:
    """The MLP's first product."""
    return "gate_up" if cfg.gated else "fc"


def up_width(cfg: ModelConfig) -> int:
    """Features of the MLP's first product."""
    return 2 * cfg.ffn if cfg.gated else cfg.ffn


def saved_shapes(cfg: ModelConfig, tokens: int, kind: str = "block") -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, "compute" or "F32") of what a block's forward can save beside its input.

    Any subset gives the same bits; attn_out and lse only serve together.
    """
    N = tokens
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    if kind != "mlp":
        found["qkv"] = (N, cfg.qkv_width), "compute"
        found["attn_out"] = (N, cfg.q_width), "compute"
        found["lse"] = (cfg.n_heads, N), "F32"
        if cfg.names.post1:
            found["attn_branch"] = (N, cfg.width), "compute"
    if kind == "block":
        found["resid"] = (N, cfg.width), "compute"
    if kind != "attention":
        found[up_name(cfg)] = (N, up_width(cfg)), "compute"
        if cfg.names.post2:
            found["mlp_branch"] = (N, cfg.width), "compute"
    return found


def saved_bytes(cfg: ModelConfig, tokens: int, itemsize: int, kind: str = "block") -> dict[str, int]:
    """name -> bytes of saved_shapes, `itemsize` per compute element."""
    shapes = saved_shapes(cfg, tokens, kind)
    return {name: prod(shape) * (4 if dtype == "F32" else itemsize) for name, (shape, dtype) in shapes.items()}


# ---------------------------------------------------------------- FLOPs


def attended_pairs(lengths: Iterable[int], window: int = 0) -> int:
    """Causal, within documents of these lengths; window 0: none."""

    def pairs(n: int) -> int:
        full = min(n, window) if window else n
        return full * (full + 1) // 2 + (n - full) * window

    return sum(map(pairs, lengths))


def layer_pairs(cfg: ModelConfig, lengths: Iterable[int]) -> int:
    """Attended pairs, mean over layers."""
    if not cfg.window:
        return attended_pairs(lengths)
    lengths, windows = list(lengths), [cfg.layer_window(i) for i in range(cfg.n_layers)]
    return sum(attended_pairs(lengths, window) * windows.count(window) for window in set(windows)) // cfg.n_layers


def _linear_params(cfg: ModelConfig, kind: str = "block") -> dict[str, int]:
    """Elements, by product."""
    found = {}
    if kind != "mlp":
        found["qkv"] = cfg.width * cfg.qkv_width
        found["attn_branch" if cfg.names.post1 else "resid"] = cfg.q_width * cfg.width
    if kind != "attention":
        found[up_name(cfg)] = cfg.width * up_width(cfg)
        found["mlp_branch" if cfg.names.post2 else "out"] = cfg.ffn * cfg.width
    return found


def attention_flops(cfg: ModelConfig, pairs: int) -> int:
    """One layer's forward: scores and weighted values."""
    return 4 * pairs * cfg.q_width


def _adapter_params(cfg: ModelConfig, u: int) -> int:
    return sum(prod(shape) for part in trained_parts(cfg, u) for g in part for name, shape in g if ".lora_" in name)


def _trained_params(cfg: ModelConfig, u: int) -> int:
    """Of matrices, without adapters."""
    groups = [group for group in weight_groups(cfg, u) if len(group[0][1]) == 2 and not is_frozen(cfg, group)]
    return sum(prod(shape) for group in groups for _, shape in group)


def forward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """Of a unit. For the head, `tokens` are the labels."""
    what = kind(cfg, u)
    if what == "embed":
        return 0
    if what == "head":
        return 2 * tokens * cfg.vocab * cfg.width
    attention = attention_flops(cfg, pairs) if what != "mlp" else 0
    return 2 * tokens * (sum(_linear_params(cfg, what).values()) + _adapter_params(cfg, u)) + attention


def backward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """Without recomputation: two products for each of forward's, one if frozen; attention five for two."""
    what = kind(cfg, u)
    if what in ("embed", "head"):
        frozen = is_frozen(cfg, [(output_name(cfg), ())])
        return (1 if frozen else 2) * forward_flops(cfg, u, tokens, pairs)
    attention = attention_flops(cfg, pairs) if what != "mlp" else 0
    products = sum(_linear_params(cfg, what).values()) + _trained_params(cfg, u) + 2 * _adapter_params(cfg, u)
    return 2 * tokens * products + attention * 5 // 2


def recompute_flops(cfg: ModelConfig, kept: frozenset[str], tokens: int, pairs: int, kind: str = "block") -> int:
    """To rebuild saved_shapes not in `kept`."""
    missing = saved_shapes(cfg, tokens, kind).keys() - kept
    linear = sum(n for name, n in _linear_params(cfg).items() if name in missing)
    attention = attention_flops(cfg, pairs) if missing & {"attn_out", "lse"} else 0
    return 2 * tokens * linear + attention


def model_flops(cfg: ModelConfig, tokens: int, pairs: int) -> int:
    """FLOPs of a training step as MFU counts them: three times forward's matrices and attention, no recomputation.

    That is 6 a token and matrix parameter (output matrix included, embedding not), 4 if frozen, and 12 a pair and query
    feature by layer.
    """
    matrices = cfg.n_layers * sum(_linear_params(cfg).values()) + cfg.vocab * cfg.width
    if not cfg.frozen and cfg.lora is None:
        return 6 * tokens * matrices + 3 * cfg.n_layers * attention_flops(cfg, pairs)
    inner = range(1, cfg.n_units - 1)
    trained = sum(_trained_params(cfg, u) + 3 * _adapter_params(cfg, u) for u in inner)
    trained += cfg.vocab * cfg.width * (not is_frozen(cfg, [(output_name(cfg), ())]))
    return 2 * tokens * (2 * matrices + trained) + 3 * cfg.n_layers * attention_flops(cfg, pairs)


# ---------------------------------------------------------------- memory

LOSS_CHUNK = 2048  # rows of logits; default of linear_cross_entropy
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
    return _block_workspace(cfg, kind(cfg, u), tokens, itemsize) + partials


def _block_workspace(cfg: ModelConfig, kind: str, tokens: int, itemsize: int) -> int:
    """The fullest moment: a sum of live tensors. Each `del` that it counts on names it."""
    x, attn, qkv = (tokens * width * itemsize for width in (cfg.width, cfg.q_width, cfg.qkv_width))
    act = tokens * cfg.ffn * itemsize
    up = tokens * up_width(cfg) * itemsize
    row = tokens * 4  # one fp32 a token
    lse = cfg.n_heads * row
    # branch.branch_backward: scaled dy; product, norm, gradient; the other half's product
    behind = x * ((cfg.branch_scale != 1.0) + 4 * bool(cfg.names.post1))
    normed = tokens * (cfg.q_width + cfg.kv_width) * itemsize + 2 * lse if cfg.qk_norm else 0  # normed q, k
    result = qkv + normed + attn + lse  # attention.Result
    to_qkv = attn + qkv + lse  # attention.backward_to_qkv: dout, dqkv, row sums of dout * out
    activation = 2 * (up + act)  # mlp.backward: activation, argument, their gradients
    moments = {
        "attention": (
            x + qkv,  # attention._project
            result + to_qkv,
            qkv + x,  # attention.backward_to_x: dqkv; y or its gradient
        ),
        "mlp": (x + activation, x + up + x),  # mlp.backward: y; then d_up, y or d_norm
        "block": (
            x + x + up,  # mlp.forward: resid, y, up
            x + up + act,
            result + x + x + activation,  # block.backward: resid; mlp.backward: y
            result + x + x + up + x,
            result + x + to_qkv,  # block.backward: dresid
            x + qkv + x,
            x + x + x,
        ),
    }
    rank = 3 * cfg.lora.rank if cfg.lora else 0  # fused adapters
    return max(moments[kind]) + behind + 4 * row + 3 * tokens * rank * itemsize


def _head_workspace(cfg: ModelConfig, tokens: int, itemsize: int, grad_itemsize: int) -> int:
    """Norm's result, a chunk's logits and rows, fp32 sums for narrower gradients."""
    chunk = min(tokens, LOSS_CHUNK)
    sums = 4 * cfg.vocab * cfg.width if grad_itemsize < 4 and tokens > chunk else 0
    return (tokens + 2 * chunk) * cfg.width * itemsize + chunk * cfg.vocab * itemsize + sums + 32 * tokens

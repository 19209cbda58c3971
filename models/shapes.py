"""Names and shapes of weights and saved tensors, and what computing with them costs. No torch.

Legend: N tokens, D width, H query heads, K key/value heads, d head width, F hidden width, V vocabulary. A unit u is the
embedding (0), a block or, where cfg.halves, one of its halves (1..n_units - 2), or the head (n_units - 1). `pairs`
counts the (query, key) pairs that one layer attends to, as attended_pairs gives it. FLOPs count two per multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from trireme.models.config import ModelConfig

Group = list[tuple[str, tuple[int, ...]]]  # neighbours in memory: a fused operand
HALVES = ("attention", "mlp")


def unit_names(cfg: ModelConfig) -> list[str]:
    """Names of the units in order, fit for file names and log lines."""
    short = {"block": "block", "attention": "attn", "mlp": "mlp"}
    inner = (f"{short[kind(cfg, u)]}{layer(cfg, u):03d}" for u in range(1, cfg.n_units - 1))
    return ["embed", *inner, "head"]


def kind(cfg: ModelConfig, u: int) -> str:
    """What unit u is: "embed", "block", "attention", "mlp" or "head"."""
    if u in (0, cfg.n_units - 1):
        return "head" if u else "embed"
    return HALVES[(u - 1) % 2] if cfg.halves else "block"


def inner_kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """The kinds of the units between embedding and head, in the order in which they make a block."""
    return HALVES if cfg.halves else ("block",)


def layer(cfg: ModelConfig, u: int) -> int:
    """The layer that unit u, a block or half of one, is of."""
    return (u - 1) // len(inner_kinds(cfg))


# ---------------------------------------------------------------- weights


def layer_prefix(cfg: ModelConfig, layer: int) -> str:
    """What the Hugging Face names of a block's tensors begin with."""
    return f"transformer.h.{layer}." if cfg.is_gpt else f"model.layers.{layer}."


def embedding_name(cfg: ModelConfig) -> str:
    """Name of the token embedding (V, D)."""
    return "transformer.wte.weight" if cfg.is_gpt else "model.embed_tokens.weight"


def output_name(cfg: ModelConfig) -> str:
    """Name of the output matrix (V, D): the token embedding where they are tied."""
    return embedding_name(cfg) if cfg.tied else "lm_head.weight"


def weight_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """(name, shape) of a unit's tensors by their Hugging Face names, grouped for storage.layout.pack."""
    return [group for part in weight_parts(cfg, u) for group in part]


def weight_parts(cfg: ModelConfig, u: int) -> list[list[Group]]:
    """A unit's weight_groups by the parts of the unit: a block's are its attention and its MLP."""
    if u == 0:
        return [_embed_groups(cfg)]
    if u == cfg.n_units - 1:
        return [_head_groups(cfg)]
    prefix = layer_prefix(cfg, layer(cfg, u))
    parts = dict(zip(HALVES, _gpt_parts(cfg) if cfg.is_gpt else _llama_parts(cfg), strict=True))
    mine = [parts[kind(cfg, u)]] if cfg.halves else parts.values()
    return [[[(prefix + name, shape) for name, shape in group] for group in groups] for groups in mine]


def _embed_groups(cfg: ModelConfig) -> list[Group]:
    tokens: Group = [(embedding_name(cfg), (cfg.vocab, cfg.width))]
    return [tokens, [("transformer.wpe.weight", (cfg.max_positions, cfg.width))]] if cfg.is_gpt else [tokens]


def _head_groups(cfg: ModelConfig) -> list[Group]:
    output = [] if cfg.tied else [[(output_name(cfg), (cfg.vocab, cfg.width))]]
    if not cfg.is_gpt:
        return [*output, [("model.norm.weight", (cfg.width,))]]
    return [*output, [("transformer.ln_f.weight", (cfg.width,))], [("transformer.ln_f.bias", (cfg.width,))]]


def _llama_parts(cfg: ModelConfig) -> tuple[list[Group], list[Group]]:
    D, F, Q, KV = cfg.width, cfg.ffn, cfg.q_width, cfg.kv_width
    qkv = [("self_attn.q_proj", Q), ("self_attn.k_proj", KV), ("self_attn.v_proj", KV)]
    gate_up = [("mlp.gate_proj", F), ("mlp.up_proj", F)]
    attention: list[Group] = [
        [(f"{name}.weight", (rows, D)) for name, rows in qkv],
        [("self_attn.o_proj.weight", (D, Q))],
        [("input_layernorm.weight", (D,))],
    ]
    mlp: list[Group] = [
        [(f"{name}.weight", (rows, D)) for name, rows in gate_up],
        [("mlp.down_proj.weight", (D, F))],
        [("post_attention_layernorm.weight", (D,))],
    ]
    if cfg.qk_norm:
        attention += [[("self_attn.q_norm.weight", (cfg.head_dim,))], [("self_attn.k_norm.weight", (cfg.head_dim,))]]
    if cfg.qkv_bias:
        attention.append([(f"{name}.bias", (rows,)) for name, rows in qkv])
    if cfg.o_bias:
        attention.append([("self_attn.o_proj.bias", (D,))])
    if cfg.mlp_bias:
        mlp += [[(f"{name}.bias", (rows,)) for name, rows in gate_up], [("mlp.down_proj.bias", (D,))]]
    return attention, mlp


def _gpt_parts(cfg: ModelConfig) -> tuple[list[Group], list[Group]]:
    """GPT-2's linear layers are stored (in, out)."""
    D, F = cfg.width, cfg.ffn

    def part(norm: str, linear: dict[str, tuple[int, int]]) -> list[Group]:
        matrices: list[Group] = [[(f"{name}.weight", shape)] for name, shape in linear.items()]
        biases: list[Group] = [[(f"{name}.bias", shape[1:])] for name, shape in linear.items()]
        return [*matrices, [(f"{norm}.weight", (D,))], [(f"{norm}.bias", (D,))], *biases]

    attention = part("ln_1", {"attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D)})
    return attention, part("ln_2", {"mlp.c_fc": (D, F), "mlp.c_proj": (F, D)})


def parameters(cfg: ModelConfig, u: int | None = None) -> int:
    """Number of parameters of a unit, or of the model."""
    units = range(cfg.n_units) if u is None else [u]
    return sum(prod(shape) for i in units for group in weight_groups(cfg, i) for _, shape in group)


# ---------------------------------------------------------------- saved tensors


def saved_shapes(cfg: ModelConfig, tokens: int, kind: str = "block") -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, "compute" or "F32") of what a block's forward can save for its backward, besides its input x.

    Any subset may be kept; backward recomputes the rest, and the gradients are the same to the bit. Of the halves each
    has its own; `resid`, which lies between them, is the input of the second.
    """
    N, found = tokens, {}
    if kind != "mlp":
        found["qkv"] = (N, cfg.qkv_width), "compute"
        found["attn_out"] = (N, cfg.q_width), "compute"
        found["lse"] = (cfg.n_heads, N), "F32"
    if kind == "block":
        found["resid"] = (N, cfg.width), "compute"
    if kind != "attention":
        found["fc" if cfg.is_gpt else "gate_up"] = (N, cfg.ffn if cfg.is_gpt else 2 * cfg.ffn), "compute"
    return found


def saved_bytes(cfg: ModelConfig, tokens: int, itemsize: int, kind: str = "block") -> dict[str, int]:
    """name -> bytes of each tensor of saved_shapes, with `itemsize` bytes an element of the compute dtype."""
    shapes = saved_shapes(cfg, tokens, kind)
    return {name: prod(shape) * (4 if dtype == "F32" else itemsize) for name, (shape, dtype) in shapes.items()}


# ---------------------------------------------------------------- FLOPs


def attended_pairs(lengths: Iterable[int], window: int = 0) -> int:
    """(query, key) pairs of causal attention within documents of these lengths, with a sliding window or none (0)."""

    def pairs(n: int) -> int:
        full = min(n, window) if window else n
        return full * (full + 1) // 2 + (n - full) * window

    return sum(map(pairs, lengths))


def _linear_params(cfg: ModelConfig, kind: str = "block") -> dict[str, int]:
    """Elements of the matrices of a block or half of one, by what their product makes."""
    found = {}
    if kind != "mlp":
        found["qkv"], found["resid"] = cfg.width * cfg.qkv_width, cfg.q_width * cfg.width
    if kind != "attention":
        found["fc" if cfg.is_gpt else "gate_up"] = cfg.width * (1 if cfg.is_gpt else 2) * cfg.ffn
        found["out"] = cfg.ffn * cfg.width
    return found


def attention_flops(cfg: ModelConfig, pairs: int) -> int:
    """One layer's attention, forward: scores and weighted values."""
    return 4 * pairs * cfg.q_width


def forward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """Forward of a unit. In the head `tokens` are those with a label; its forward makes the loss alone."""
    what = kind(cfg, u)
    if what == "embed":
        return 0
    if what == "head":
        return 2 * tokens * cfg.vocab * cfg.width
    attention = attention_flops(cfg, pairs) if what != "mlp" else 0
    return 2 * tokens * sum(_linear_params(cfg, what).values()) + attention


def backward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """Backward of a unit without recomputation: two products for each of forward's, in attention five for two."""
    what = kind(cfg, u)
    if what in ("embed", "head"):
        return 2 * forward_flops(cfg, u, tokens, pairs)
    attention = attention_flops(cfg, pairs) if what != "mlp" else 0
    return 4 * tokens * sum(_linear_params(cfg, what).values()) + attention * 5 // 2


def recompute_flops(cfg: ModelConfig, kept: frozenset[str], tokens: int, pairs: int, kind: str = "block") -> int:
    """What the backward of a block or half of one adds to rebuild those of its saved_shapes not in `kept`."""
    missing = saved_shapes(cfg, tokens, kind).keys() - kept
    linear = sum(n for name, n in _linear_params(cfg).items() if name in missing)
    attention = attention_flops(cfg, pairs) if missing & {"attn_out", "lse"} else 0
    return 2 * tokens * linear + attention


def model_flops(cfg: ModelConfig, tokens: int, pairs: int) -> int:
    """FLOPs of a training step as MFU counts them: three times forward, of matrices and attention; no recomputation.

    That is 6 a token and matrix parameter (the output matrix counts, looking up an embedding does not), and 12 a pair
    and query feature in each layer.
    """
    matrices = cfg.n_layers * sum(_linear_params(cfg).values()) + cfg.vocab * cfg.width
    return 6 * tokens * matrices + 3 * cfg.n_layers * attention_flops(cfg, pairs)


# ---------------------------------------------------------------- memory

LOSS_CHUNK = 2048  # rows of logits at a time: the default of linear_cross_entropy
PROGRAMS = 1024  # rows of fp32 partial sums that a norm's backward holds, at most
SLACK = 1 << 20  # small things


def workspace_bytes(cfg: ModelConfig, u: int, tokens: int, itemsize: int, grad_itemsize: int | None = None) -> int:
    """Upper bound of a unit's temporaries on the GPU, forward or backward, with nothing saved.

    `itemsize` is of the compute dtype, `grad_itemsize` of the gradients (default: the same). What the caller owns (x,
    dy, dx, weights, gradients, saved tensors) is not counted, nor is cuBLAS's workspace.
    """
    if u == 0:
        sums = (tokens // 8 + 8) * cfg.width  # the gradient sorts the ids; fp32 sums of those that are frequent
        return (tokens * cfg.width * itemsize if cfg.is_gpt else 0) + sums + 80 * tokens + SLACK
    partials = 2 * 4 * cfg.width * min(PROGRAMS, tokens) + SLACK
    if u == cfg.n_units - 1:
        return _head_workspace(cfg, tokens, itemsize, grad_itemsize or itemsize) + partials
    return _block_workspace(cfg, kind(cfg, u), tokens, itemsize) + partials


def _block_workspace(cfg: ModelConfig, kind: str, tokens: int, itemsize: int) -> int:
    """The fullest of the moments in llama.py and gpt.py, each the sum of what is alive there."""
    x, attn, qkv = (tokens * width * itemsize for width in (cfg.width, cfg.q_width, cfg.qkv_width))
    act = tokens * cfg.ffn * itemsize
    up = act if cfg.is_gpt else 2 * act
    row = tokens * 4  # one fp32 number a token
    lse = cfg.n_heads * row
    normed = (
        tokens * (cfg.q_width + cfg.kv_width) * itemsize + 2 * lse if cfg.qk_norm else 0
    )  # q and k after their norms
    attention = qkv + normed + attn + lse
    moments = {
        "attention": (
            x + qkv,
            attention + attn + qkv + lse,  # backward: dout, dqkv, the row sums of dout * out
            qkv + x,
        ),
        "mlp": (x + 2 * (up + act), x + up + x),  # backward: norm2, both sides of the activation
        "block": (
            x + x + up,  # resid, norm2, its product
            x + up + act,
            attention + x + x + 2 * (up + act),  # backward, both sides of the activation
            attention + x + x + up + x,
            attention + x + attn + qkv + lse,  # dresid, dout, dqkv, the row sums of dout * out
            x + qkv + x,
            x + x + x,
        ),
    }
    return max(moments[kind]) + 4 * row


def _head_workspace(cfg: ModelConfig, tokens: int, itemsize: int, grad_itemsize: int) -> int:
    """The norm's result, one chunk of logits with the rows that make it; fp32 sums where the gradient is narrower."""
    chunk = min(tokens, LOSS_CHUNK)
    sums = 4 * cfg.vocab * cfg.width if grad_itemsize < 4 and tokens > chunk else 0
    return (tokens + 2 * chunk) * cfg.width * itemsize + chunk * cfg.vocab * itemsize + sums + 32 * tokens

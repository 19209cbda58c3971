"""What computing with a unit costs: FLOPs, and temporaries on the GPU. No torch.

Legend: N tokens, D width, F hidden width, V vocabulary. `pairs`: (query, key) pairs that one layer attends to
(attended_pairs). FLOPs count two per multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from trireme.models.config import ModelConfig
from trireme.models.shapes import (
    DOWN,
    GATE_UP,
    chosen,
    is_frozen,
    kind,
    output_name,
    saved_shapes,
    trained_parts,
    up_name,
    up_width,
    weight_groups,
)

# ---------------------------------------------------------------- FLOPs


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


def _linear_params(cfg: ModelConfig, kind: str = "block") -> dict[str, int]:
    """Elements of a block's matrices that a token is multiplied with, by the name of their product."""
    found = {}
    if kind != "mlp":
        found["qkv"] = cfg.width * cfg.qkv_width
        found["attn_branch" if cfg.names.post1 else "resid"] = cfg.q_width * cfg.width
    if kind != "attention":
        found[up_name(cfg)] = chosen(cfg) * cfg.width * up_width(cfg)
        found["mlp_branch" if cfg.names.post2 else "out"] = hidden_width(cfg) * cfg.width
        if cfg.experts:
            found["router"] = (cfg.experts.count + cfg.experts.shared_gate) * cfg.width
            found["shared_up"], found["shared"] = (n * cfg.experts.shared * cfg.width for n in (2, 1))
    return found


def hidden_width(cfg: ModelConfig) -> int:
    """Features of a token's activation in the MLP."""
    return cfg.experts.chosen * cfg.experts.width if cfg.experts else cfg.ffn


def attention_flops(cfg: ModelConfig, pairs: int) -> int:
    """Forward of one layer's attention: scores and weighted values."""
    return 4 * pairs * cfg.q_width


def _adapter_params(cfg: ModelConfig, u: int) -> int:
    return sum(prod(shape) for part in trained_parts(cfg, u) for g in part for name, shape in g if ".lora_" in name)


def _trained_params(cfg: ModelConfig, u: int) -> int:
    """Elements of a unit's trained matrices, without adapters; of experts those of a token."""
    groups = [group for group in weight_groups(cfg, u) if len(group[0][1]) > 1 and not is_frozen(cfg, group)]
    used = lambda shape: prod(shape) if len(shape) == 2 else chosen(cfg) * prod(shape[1:])
    return sum(used(shape) for group in groups for _, shape in group)


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
    what = kind(cfg, u)
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
    what = kind(cfg, u)
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
    tile = min(tokens, cfg.mlp_rows)  # block.mlp_forward
    y, act = (tile * width * itemsize for width in (cfg.width, hidden_width(cfg)))
    up = tile * chosen(cfg) * up_width(cfg) * itemsize
    row = tokens * 4  # one fp32 a token
    lse = cfg.n_heads * row
    # branch.branch_backward: scaled dy; product, norm, gradient; the other half's product
    behind = (y if kind == "mlp" else x) * ((cfg.branch_scale != 1.0) + 4 * bool(cfg.names.post1))
    normed = tokens * (cfg.q_width + cfg.kv_width) * itemsize + 2 * lse if cfg.qk_norm else 0  # normed q, k
    result = qkv + normed + attn + lse  # attention.Result
    to_qkv = attn + qkv + lse  # attention.backward_to_qkv: dout, dqkv, row sums of dout * out
    activation = 2 * (up + act)  # mlp.backward: activation, argument, their gradients
    mlp_forward, mlp_backward = [y + up, up + act], [y + activation, y + up + y]  # y; then d_up, y or d_norm
    if cfg.experts:
        routes, wide = _routes_bytes(cfg, tile, itemsize), chosen(cfg) * y
        mlp_forward = [routes + y + up, routes + up + act, routes + act + wide]
        mlp_backward = [routes + y + activation, routes + y + up + wide, routes + y + wide + y]
        shared = tile * cfg.experts.shared * itemsize
        mlp_forward.append(y + 3 * shared)  # shared.forward: y, shared_up, act
        mlp_forward.append(y + routes + tile * 8 * cfg.experts.count)  # rows.Load.add: y, softmax in fp32
        mlp_backward.append(routes + 2 * y + max(6 * shared, 2 * shared + y))  # y, d_norm
    dresid = x if tile < tokens else 0
    resid, before = (0, 0) if cfg.parallel else (x, result + x)
    moments = {
        "attention": (
            x + qkv,  # attention._project
            result + to_qkv,
            qkv + x,  # attention.backward_to_x: dqkv; y or its gradient
        ),
        "mlp": (*mlp_forward, *mlp_backward),
        "block": (
            *(resid + moment for moment in mlp_forward),
            *(before + dresid + moment for moment in mlp_backward),  # block.backward: resid
            result + x + to_qkv,  # block.backward: dresid
            x + qkv + x,
            x + x + x,
        ),
    }
    rank = 3 * cfg.lora.rank if cfg.lora else 0  # fused adapters
    return max(moments[kind]) + behind + 4 * row + 3 * tokens * rank * itemsize


def _routes_bytes(cfg: ModelConfig, tokens: int, itemsize: int) -> int:
    """experts.Routes with the gradients of logits and weights, and what sorting takes."""
    assert cfg.experts is not None
    own = cfg.experts
    logits = 2 * itemsize * own.count  # and their gradient
    logits += own.bias * (2 * itemsize * own.count + own.chosen * (itemsize + 8))  # experts._bias_gradients_
    sorting = own.chosen * (20 + own.count // 16 + 1)
    return tokens * (logits + sorting) + 8 * own.count


def _head_workspace(cfg: ModelConfig, tokens: int, itemsize: int, grad_itemsize: int) -> int:
    """Norm's result, a chunk's logits and rows, fp32 sums for narrower gradients."""
    chunk = min(tokens, LOSS_CHUNK)
    sums = 4 * cfg.vocab * cfg.width if grad_itemsize < 4 and tokens > chunk else 0
    return (tokens + 2 * chunk) * cfg.width * itemsize + chunk * cfg.vocab * itemsize + sums + 32 * tokens

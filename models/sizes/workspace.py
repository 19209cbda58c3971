"""GPU workspace of a unit: an upper bound of the bytes of temporaries in forward and backward. No torch.

Each function lists the moments at which most temporaries exist, as sums of bytes; the workspace is the largest of them.
Each `del` in the code described on which a sum depends has a comment that names the function here. Legend: N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from trireme.models.config import ModelConfig
from trireme.models.layers import Layer
from trireme.models.sizes import shapes
from trireme.models.sizes.narrow import at_once, experts_in_fp8, in_fp8, norms_make_codes, quantized_each, slice_bytes
from trireme.models.sizes.shapes import (
    is_frozen,
    output_name,
    unit,
)

LOSS_CHUNK = 2048  # rows of logits; default of linear_cross_entropy
SCORE_ROWS = 512  # documents that a score head reads at once
ROWS_OF_SCANS = 32  # of a chunk, as kernels/launch.py has it
GEMM = 1 << 25  # bytes of an fp8 matmul that adds, as kernels/fp8/cublaslt.py has it; at most its result's
PROGRAMS = 1024  # most rows of fp32 partial sums in a norm's backward
SLACK = 1 << 20


def workspace_bytes(cfg: ModelConfig, u: int, tokens: int, itemsize: int, grad_itemsize: int | None = None) -> int:
    """Upper bound of a unit's temporaries on the GPU, forward or backward, with nothing saved.

    Item sizes of compute dtype and gradients (default: the same). Excludes the caller's tensors (x, dy, dx, weights,
    gradients, saved) and cuBLAS's workspace.
    """
    if u == 0:
        extra = tokens * cfg.width * itemsize * (cfg.learned or cfg.embed_scale != 1.0)
        sums = (tokens // 8 + 8) * cfg.width  # sorted ids; fp32 sums of frequent ones
        return extra + sums + 80 * tokens + SLACK
    partials = 2 * 4 * cfg.width * min(PROGRAMS, tokens) + SLACK
    if u == cfg.n_units - 1:
        return _head_workspace(cfg, tokens, itemsize, grad_itemsize or itemsize) + partials
    sizes = _Sizes(tokens, itemsize, grad_itemsize or itemsize, quantized_each(cfg, u))
    return (
        _block_workspace(_View(cfg, unit(cfg, u)), unit(cfg, u).what, sizes) + slice_bytes(cfg, u, itemsize) + partials
    )


def rows_of_loss(cfg: ModelConfig, tokens: int, grad_itemsize: int) -> int:
    """Rows of logits at a time: all where they take less memory than an fp32 sum of the matrix's gradient would."""
    summed = grad_itemsize < 4 and not is_frozen(cfg, [(output_name(cfg), (cfg.vocab, cfg.width))])
    return tokens if summed and tokens <= LOSS_CHUNK + 2 * cfg.width else min(tokens, LOSS_CHUNK)


class _View:
    """A layer by the names that the sums below were written with."""

    def __init__(self, cfg: ModelConfig, layer: Layer):
        own, mlp = layer.attention, layer.mlp or layer.experts
        self.cfg, self.layer, self.names, self.width, self.parallel = (
            cfg,
            layer,
            layer.names,
            layer.width,
            layer.parallel,
        )
        self.experts, self.scan, self.latent = layer.experts, layer.scan, own.latent if own else None
        self.scanning, self.both = own is None and layer.scan is not None, own is not None and layer.scan is not None
        if own:
            self.n_heads, self.q_width, self.kv_width, self.attn_width = (
                own.heads,
                own.q_width,
                own.kv_width,
                own.out_width,
            )
            self.qkv_width, self.qk_norm, self.attention_gate, self.qkv_bias = (
                own.qkv_width,
                own.norm,
                own.gate,
                own.bias,
            )
        self.q_width = own.q_width if own else 0
        self.ffn = layer.mlp.width if layer.mlp else 0
        self.mlp_bias, self.gate_scale = (layer.mlp.bias, layer.mlp.gate_scale) if layer.mlp else (False, 1.0)
        self.gated, self.relu2 = (mlp.gated, mlp.act == "relu2") if mlp else (True, False)
        self.factors = [part.factor for part in (*layer.mixers, *layer.mlps)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cfg, name)


chosen = lambda v: shapes.chosen(v.layer.mlp or v.layer.experts)
up_width = lambda v: shapes.up_width(v.layer.mlp or v.layer.experts)
hidden_width = lambda v: shapes.hidden_width(v.layer.mlp or v.layer.experts)
expert_input = lambda v: shapes.expert_input(v.layer)
is_sliced = lambda v: shapes.is_sliced(v.cfg, v.layer)


class _Sizes(NamedTuple):
    tokens: int
    item: int  # bytes of a value
    grad: int  # of a gradient's
    each: bool  # narrow.quantized_each


class _Codes(NamedTuple):
    """Bytes of temporaries of a linear layer's matmuls in fp8 (linear.py); in bf16 all but `held` are 0."""

    x: int = 0  # codes of x, and of the matrix
    matrix: int = 0  # where each matmul makes them
    dy: int = 0  # codes of dy, in both orders
    add: int = 0  # codes of x, and the matmul's workspace
    held: int = 0  # what backward's matmuls read of dy
    columns: int = 0  # codes of x that the gradient reads


def _codes(cfg: Any, sizes: _Sizes, inside: int, outside: int, keeps: bool = False) -> _Codes:
    """Those of a layer from `inside` to `outside` features. `keeps`: biases or adapters read dy itself, too."""
    N, dy = sizes.tokens, sizes.tokens * outside * sizes.item
    if not in_fp8(cfg, inside, outside):
        return _Codes(held=dy)
    padded, matrix = 0 if cfg.frozen == ("*",) else -(-N // 16) * 16, inside * outside * sizes.each
    part = min(GEMM, inside * outside * sizes.grad)
    codes = (N + padded) * outside
    held = codes + (keeps or cfg.lora is not None) * dy
    columns = padded * inside
    return _Codes(N * inside + matrix, matrix, codes, (padded > 0) * (columns + part), held, columns)


def _normed(cfg: Any, before: str, first: _Codes, last: _Codes, y: int) -> tuple[int, int]:
    """Bytes of the result, y bytes in bf16, of the norm `before` a sub-layer of these linear layers (norm.norm_for).

    (those while the first layer is computed, those while its codes are made): in fp8 codes are all that remains, and
    those of an RMSNorm without a copy of its input all that is made. Without a norm it is the input of the sub-layer.
    """
    if not first.x or cfg.lora is not None:
        return y, 0
    return 0, 0 if before == "" or (last.x > 0 and norms_make_codes(cfg)) else y


def _block_workspace(cfg: Any, kind: str, sizes: _Sizes) -> int:
    """The largest sum of live tensors in a block or sub-layer."""
    tokens, itemsize, *_ = sizes
    x, tile = tokens * cfg.width * itemsize, min(tokens, cfg.mlp_rows)  # block.mlp_forward
    y, row = tile * cfg.width * itemsize, tokens * 4  # one fp32 a token
    # branch.branch_backward: scaled dy; matmul, norm, gradient; the other sub-layer's matmul
    scaled = any(factor != 1.0 for layer in cfg.layers for factor in _View(cfg.cfg, layer).factors)
    behind = (y if kind == "mlp" else x) * (scaled + 4 * bool(cfg.names.post1 or cfg.names.post2))
    mlp_forward, mlp_backward = _mlp_moments(cfg, sizes._replace(tokens=tile)) if cfg.layer.mlps else ([0], [0])
    mixes = _scan_moments if cfg.scanning else _attention_moments
    result, attention = mixes(cfg, sizes) if cfg.layer.mixers else (0, [0])
    within = attention  # of a block
    if cfg.both:
        second, scan = _scan_moments(cfg, sizes)
        within = [*(second + moment for moment in attention), *(result + moment for moment in scan)]  # both.backward
        result, attention = result + second, attention + scan
    dresid = x if tile < tokens else 0
    resid, before = (0, 0) if cfg.parallel else (x, result + x)
    moments = {
        "attention": attention,
        "mlp": [*mlp_forward, *mlp_backward],
        "block": [
            *(resid + moment for moment in mlp_forward),
            *(before + dresid + moment for moment in mlp_backward),  # block.backward: resid
            *(x + moment for moment in within),  # block.backward: dresid
            x + x + x,
        ],
    }
    rank = 3 * cfg.lora.rank if cfg.lora else 0  # fused adapters
    dropped = 0  # lora.dropped: a matmul's input, or the gradient of that
    if cfg.lora and cfg.lora.dropout:
        mixed = cfg.scan.value_width if cfg.scan and cfg.scanning else cfg.q_width
        mixed = max(mixed, cfg.scan.value_width) if cfg.scan and cfg.both else mixed
        mixed = max(mixed, cfg.latent.q_rank, cfg.latent.kv_rank) if cfg.latent else mixed
        dropped = itemsize * max(
            tokens * max(cfg.width, mixed) * (kind != "mlp"), tile * max(cfg.width, cfg.ffn) * (kind != "attention")
        )
    return max(moments[kind]) + behind + 4 * row + 3 * tokens * rank * itemsize + dropped


def _around_mixer(
    cfg: Any, sizes: _Sizes, first: _Codes, last: _Codes, widths: tuple[int, int], result: int, gated: int
) -> list[int]:
    """Moments of the two linear layers of attention or a recurrence: its projection, and the one behind it.

    `widths`: features of the projection, and of what the last layer reads. `result`: bytes of the mixer's Result;
    `gated`: of what the last layer reads in addition.
    """
    x, projected, inner = (sizes.tokens * width * sizes.item for width in (cfg.width, *widths))
    y, made = _normed(cfg, cfg.names.norm1, first, last, x)
    matmul = x * (last.x > 0)  # added to what there is; dy of the last layer is the caller's
    return [
        y + first.x + projected,  # attention._project, scan._project
        made + first.x,
        inner + last.x + matmul,  # add_branch
        result + gated + last.x + matmul,  # attention.residual, scan.residual: and `out`
        result + gated + last.dy + last.add,  # attention._backward_to_qkv, scan._backward_to_mixed
        result + last.dy + last.matrix + inner,
        projected + first.dy,
        first.held + made + first.columns,  # norm.normed_linear_backward
        first.held + y + first.add,  # y or its gradient
        first.held + first.matrix + x,
    ]


def _attention_moments(cfg: Any, sizes: _Sizes) -> tuple[int, list[int]]:
    """(bytes of attention.Result, moments of attention)."""
    if cfg.latent:
        return _latent_moments(cfg, sizes)
    tokens, itemsize, *_ = sizes
    attn, qkv = (tokens * width * itemsize for width in (cfg.q_width, cfg.qkv_width))
    lse = cfg.n_heads * tokens * 4
    normed = tokens * (cfg.q_width + cfg.kv_width) * itemsize + 2 * lse if cfg.qk_norm else 0  # normed q, k
    result, gated = qkv + normed + attn + lse, attn * cfg.attention_gate
    first = _codes(cfg, sizes, cfg.width, cfg.qkv_width, cfg.qkv_bias)
    last = _codes(cfg, sizes, cfg.q_width, cfg.width)
    matmul = tokens * cfg.width * itemsize * (last.x > 0)
    return result, [
        *_around_mixer(cfg, sizes, first, last, (cfg.qkv_width, cfg.q_width), result, gated),
        qkv * cfg.attention_gate + gated + attn + last.x + matmul,  # add_branch
        result + attn + qkv + lse + gated,  # dout, dqkv, row sums of dout * out; dout before the gate, or dq
    ]


def _latent_moments(cfg: Any, sizes: _Sizes) -> tuple[int, list[int]]:
    """_attention_moments of latent attention (latent.py)."""
    own, (tokens, itemsize, *_) = cfg.latent, sizes
    assert own is not None
    of = lambda width: tokens * width * itemsize
    attn, qkv, heads = (of(width) for width in (cfg.attn_width, cfg.qkv_width, cfg.q_width))
    kv, lse = of(cfg.n_heads * (own.nope + own.value)), cfg.n_heads * tokens * 4
    q = heads if own.q_rank else 0
    result = qkv + q + heads + kv + attn + lse
    d_heads = result + qkv + q + kv  # and in attention's backward those of keys
    first = _codes(cfg, sizes, cfg.width, cfg.qkv_width, cfg.qkv_bias)
    last = _codes(cfg, sizes, cfg.attn_width, cfg.width)
    moments = [
        *_around_mixer(cfg, sizes, first, last, (cfg.qkv_width, cfg.attn_width), result, 0),
        result,
        d_heads + heads + attn + lse,  # dout, row sums of dout * out
        d_heads + heads + tokens * own.rope * max(itemsize, 4),  # latent.backward: the keys' shared part
    ]
    matrices = [(own.q_rank, cfg.q_width, q), (own.kv_rank, cfg.n_heads * (own.nope + own.value), kv)]  # q_b, kv_b
    for rank, outside, made in matrices[not own.q_rank :]:
        codes = _codes(cfg, sizes, rank, outside)
        moments += [
            qkv + q + of(rank) + codes.x + made,  # latent.heads
            d_heads
            + 2 * of(rank)
            + max(codes.dy, codes.held - made)
            + max(codes.add, codes.matrix),  # _latent_backward
        ]
    return result, moments


def _scan_moments(cfg: Any, sizes: _Sizes) -> tuple[int, list[int]]:
    """(bytes of scan.Result, moments of a recurrence)."""
    own, (N, item, *_) = cfg.scan, sizes
    assert own is not None
    mixed, value, channels = (N * width * item for width in (own.mixed_width, own.value_width, own.channels))
    first, last = _codes(cfg, sizes, cfg.width, own.mixed_width), _codes(cfg, sizes, own.value_width, cfg.width)
    turned = mixed * cfg.names.mixed_by_head  # in its file's order
    keys = 2 * N * own.key_heads * (own.key_dim * item + 4) * own.delta  # q and k by length
    read = channels + keys + 8 * 4 * N * own.heads  # scan.Inputs, and what makes the numbers a head
    deltas = N * own.heads * own.value_dim * item * own.delta
    states = -(-N // ROWS_OF_SCANS) * own.heads * own.key_dim * own.value_dim * item
    each = 2 * N * own.heads * own.key_dim * item * (own.heads > own.key_heads)
    inside = N * own.heads * ROWS_OF_SCANS * item * (1 + own.delta)  # P and T of chunks
    result = mixed + value
    return result, [
        *_around_mixer(cfg, sizes, first, last, (own.mixed_width, own.value_width), result, value),
        result + read + inside,  # scan_fwd
        result + value,  # scan._gated
        result + mixed + 2 * value,  # gated_norm_bwd
        result + mixed + value + read + channels + deltas + value + 2 * states + max(inside, each),  # scan_bwd
        result + mixed + turned,
    ]


def _mlp_moments(cfg: Any, sizes: _Sizes) -> tuple[list[int], list[int]]:
    """(moments of forward, of backward)."""
    tile, itemsize, *_ = sizes
    y, act = (tile * width * itemsize for width in (cfg.width, hidden_width(cfg)))
    up = tile * chosen(cfg) * up_width(cfg) * itemsize
    activation = 2 * (up + act)  # mlp.backward: activation, argument, their gradients
    if cfg.experts:
        return _expert_moments(cfg, sizes)
    first = _codes(cfg, sizes, cfg.width, up_width(cfg), cfg.mlp_bias and (cfg.gated or cfg.relu2))
    turned = 0 if cfg.frozen == ("*",) else -(-tile // 16) * 16 * cfg.ffn
    last = _codes(cfg, sizes, cfg.ffn, cfg.width)  # dy is the caller's
    normed, made = _normed(cfg, cfg.names.norm2, first, last, y)
    kept = normed if normed else first.columns  # of the norm, through backward
    inner, active = act, [kept + last.dy + activation, kept + last.dy + last.add + up + act, kept + up + first.dy]
    if cfg.gated and last.x and cfg.lora is None:
        inner = 0  # codes, counted in last.x
        if first.x and not cfg.mlp_bias and cfg.gate_scale == 1.0:
            active = [kept + last.dy + up + act + first.dy + turned, kept + last.dy + first.dy + last.add]
    return [normed + first.x + up, made + first.x, up + act, inner + last.x + y * (last.x > 0)], [
        kept + first.x + up,
        made + first.x + first.columns,
        *active,
        kept + last.dy + last.matrix + up + act,
        normed + first.held + first.add,
        first.held + first.matrix + y,  # then y or d_norm
        kept + up + y,
        kept + up + (inner + last.x + y) * bool(cfg.names.post2),  # the argument of the norm behind, again
    ]


def _expert_moments(cfg: Any, sizes: _Sizes) -> tuple[list[int], list[int]]:
    """_mlp_moments of experts. z is what they read, y or a latent; their outputs have the same width."""
    own, (tile, itemsize, *_) = cfg.experts, sizes
    assert own is not None
    widths = cfg.width, hidden_width(cfg), own.latent, chosen(cfg) * up_width(cfg), chosen(cfg) * expert_input(cfg)
    y, act, z, up, wide = (tile * width * itemsize for width in widths)
    routes, activation = _routes_bytes(cfg, tile, itemsize), 2 * (up + act)
    codes = _expert_codes(cfg, tile)
    forward = [routes + y + z + up + codes.up, routes + up + act, routes + act + wide + z + codes.down]
    backward = [routes + y + 2 * z + activation, routes + y + z + up + wide + codes.d_up]
    backward += [routes + y + 2 * z + up + act + codes.d_down, routes + y + wide + (z or y)]
    forward.append(y + routes + tile * 8 * own.count)  # rows.Load.add: y, softmax in fp32
    if is_sliced(cfg):
        backward = [moment + 12 * tile * chosen(cfg) for moment in backward]  # experts._of_all, routes passed on
    if cfg.lora and cfg.lora.adapts(cfg.names.experts):  # lora.Stacked: matmuls before they are added
        thin = routes + 5 * tile * chosen(cfg) * cfg.lora.rank * itemsize
        forward += [thin + y + z + 2 * up, thin + act + 2 * wide]
        backward += [thin + y + 2 * z + max(activation, 2 * up), thin + y + z + up + 2 * wide]
    if z:
        first, last = _codes(cfg, sizes, cfg.width, own.latent), _codes(cfg, sizes, own.latent, cfg.width)
        most = max(first.x, last.x, first.dy, last.dy) + max(first.add, last.add, first.matrix, last.matrix)
        forward.append(routes + y + z + most)
        again = routes + y + z + up + act + wide  # experts._sum
        backward += [again + z + most, again + codes.down, routes + 2 * y + 2 * z + most]
    if s := own.shared:
        matrices = 1 + cfg.gated
        first, last = _codes(cfg, sizes, cfg.width, matrices * s), _codes(cfg, sizes, s, cfg.width)
        part = first.add - first.columns  # shared.backward: codes of y are held
        shared, made = tile * s * itemsize, max(first.dy, last.dy) + first.columns + max(part, last.add, first.x)
        forward.append(2 * y + (1 + matrices) * shared + first.x + last.x)  # shared.forward: y, shared_up, act
        most = max(2 * (1 + matrices) * shared, matrices * shared + y)
        backward.append(routes + 2 * y + most + made)  # y, d_norm
    return forward, backward


class _ExpertCodes(NamedTuple):
    """Bytes that each grouped matmul in fp8 takes: codes and scales of its rows and matrices."""

    up: int = 0
    down: int = 0
    d_up: int = 0  # gradients of their rows
    d_down: int = 0


def _expert_codes(cfg: Any, tokens: int) -> _ExpertCodes:
    if cfg.experts is None or not experts_in_fp8(cfg.cfg, cfg.layer, tokens):
        return _ExpertCodes()
    inner, up, I, k = expert_input(cfg), up_width(cfg), cfg.experts.width, cfg.experts.chosen
    rows = lambda n, width: n * (width + 4)
    of_up, of_down = (at_once(cfg) * (inner * width + 4) for width in (up, I))
    return _ExpertCodes(
        rows(tokens, inner) + of_up,
        rows(tokens * k, I) + of_down,
        rows(tokens * k, up) + of_up,
        rows(tokens, inner) + of_down,
    )


def _routes_bytes(cfg: Any, tokens: int, itemsize: int) -> int:
    """Bytes of experts.Routes with the gradients of logits and weights, and of sorting."""
    assert cfg.experts is not None
    own = cfg.experts
    logits = (8 + itemsize if own.fp32 or cfg.names.correction else 2 * itemsize) * own.count  # and their gradient
    logits += own.bias * (2 * itemsize * own.count + own.chosen * (itemsize + 8))  # experts._down_bias_gradients_
    sorting = own.chosen * (20 + own.count // 16 + 1)
    return tokens * (logits + sorting) + 8 * own.count


def _head_workspace(cfg: Any, tokens: int, itemsize: int, grad_itemsize: int) -> int:
    """The norm's result, a chunk's logits and rows, and fp32 sums for narrower gradients of a trained matrix.

    With a score head: rows, their norm and the gradients of both; in fp32 norm, its gradient, scores, matrix and sum.
    """
    if cfg.scores:
        rows, matrix = min(tokens, SCORE_ROWS), 4 * cfg.scores * cfg.width
        return rows * (cfg.width * (4 * itemsize + 8) + 32 * cfg.scores) + 3 * matrix + 45 * tokens
    chunk, output = rows_of_loss(cfg, tokens, grad_itemsize), (output_name(cfg), (cfg.vocab, cfg.width))
    summed = grad_itemsize < 4 and tokens > chunk and not is_frozen(cfg, [output])
    sums = 4 * cfg.vocab * cfg.width * summed
    k = cfg.teaching.k if cfg.teaching else 0  # of a teacher: ids, logits and gradients of its tokens; parts of losses
    taught = chunk * k * (12 + itemsize) + 32 * tokens * (k > 0)
    return (tokens + 2 * chunk) * cfg.width * itemsize + chunk * cfg.vocab * itemsize + sums + 45 * tokens + taught

"""The cost of computing a unit: FLOPs, and bytes that quantization moves. No torch.

Legend: N tokens. `pairs`: (query, key) pairs that one layer attends to (attended_pairs). FLOPs count two per
multiply-add.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import lru_cache
from math import prod
from typing import NamedTuple

from trireme.models.config import ModelConfig
from trireme.models.families.scans import Scan
from trireme.models.layers import Attention, Layer, Mlp
from trireme.models.sizes.narrow import experts_in_fp8, in_fp8, norms_make_codes, quantized_each
from trireme.models.sizes.shapes import (
    DOWN,
    GATE_UP,
    adapts_experts,
    expert_input,
    hidden_width,
    is_frozen,
    is_sliced,
    output_name,
    saved_of,
    saved_shapes,
    trained_parts,
    unit,
    up_name,
    up_width,
    weight_groups,
)

ATTENDED, SCANNED = frozenset({"attn_out", "lse"}), frozenset({"scan_out"})  # that attention or a recurrence makes
MIXED = ATTENDED | SCANNED
KNOWN = 4096  # counts that are kept: a step asks for each of its tasks
NEVER_SAVED = {"router", "latent", "q_b", "kv_b"}  # matmuls that backward always repeats
BESIDE = "resid of scan"  # the second of two matmuls that make `resid`
AT_ONCE = {"gate_up", "fc", "shared_up"}  # matmuls whose input backward has until their gradient
CHUNK = 64  # tokens of a chunk of a recurrence
TILE = 128  # rows of a tile of grouped matmuls


def attended_pairs(lengths: Iterable[int], window: int = 0) -> int:
    """(query, key) pairs of causal attention within documents of these lengths; window 0: none."""

    def pairs(n: int) -> int:
        full = min(n, window) if window else n
        return full * (full + 1) // 2 + (n - full) * window

    return sum(map(pairs, lengths))


def layer_pairs(cfg: ModelConfig, lengths: Iterable[int]) -> int:
    """The mean number of attended pairs of a layer."""
    lengths, windows = list(lengths), [own.attention.window if own.attention else 0 for own in cfg.layers]
    return sum(attended_pairs(lengths, window) * windows.count(window) for window in set(windows)) // cfg.n_layers


def _linear_layers(layer: Layer) -> dict[str, tuple[int, int]]:
    """(in, out) features of a layer's matmuls, by the name of what they make; without a router and its experts."""
    found, D, names = dict[str, tuple[int, int]](), layer.width, layer.names
    for own in layer.mixers:
        if isinstance(own, Scan):
            found["mixed"] = D, own.mixed_width
            found["resid" if layer.mixers[0] is own else BESIDE] = own.value_width, D
            continue
        found["qkv"] = D, own.qkv_width
        found["attn_branch" if names.post1 else "resid"] = own.out_width, D
        if own.latent:
            found["kv_b"] = own.latent.kv_rank, own.heads * (own.latent.nope + own.latent.value)
        if own.latent and own.latent.q_rank:
            found["q_b"] = own.latent.q_rank, own.q_width
    for mlp in layer.mlps:
        if isinstance(mlp, Mlp):
            found[up_name(mlp)] = D, up_width(mlp)
            found["mlp_branch" if names.post2 else "out"] = mlp.width, D
            continue
        if mlp.shared:
            found |= {"shared_up": (D, (1 + mlp.gated) * mlp.shared), "shared": (mlp.shared, D)}
        if mlp.latent:
            found |= {"latent": (D, mlp.latent), "out": (mlp.latent, D)}
    return found


@lru_cache(KNOWN)
def _linear_params(layer: Layer) -> dict[str, int]:
    """Elements of a layer's matrices that a token is multiplied with, by the name of their matmul."""
    found = {name: inside * outside for name, (inside, outside) in _linear_layers(layer).items()}
    if own := layer.experts:
        inner = expert_input(layer)
        found[up_name(own)] = own.chosen * inner * up_width(own)
        last = "latent_sum" if own.latent else "mlp_branch" if layer.names.post2 else "out"
        found[last] = hidden_width(own) * inner
        found["router"] = (own.count + own.shared_gate) * layer.width
    return found


def attention_flops(own: Attention, pairs: int) -> int:
    """FLOPs of one layer's attention in forward: scores and weighted values."""
    return 2 * pairs * (own.q_width + own.out_width)


def attention_backward_flops(own: Attention, pairs: int) -> int:
    """FLOPs of its backward: scores and their gradient, and the gradients of queries, keys and values."""
    return 2 * pairs * (3 * own.q_width + 2 * own.out_width)


def recurrence_flops(own: Scan, tokens: int) -> int:
    """FLOPs of one layer's recurrence in forward, by chunks of CHUNK tokens."""
    within = own.key_dim + own.value_dim  # a token's products within a chunk
    states = 2 * own.key_dim * own.value_dim  # with the state: outputs, the next
    if own.delta:  # with an inverse, and deltas
        within += 2 * own.key_dim + own.value_dim + CHUNK
        states += own.key_dim * own.value_dim
    return 2 * tokens * own.heads * (CHUNK * within + states)


def scan_flops(own: Scan, tokens: int) -> int:
    """FLOPs of one layer's recurrence and its convolution in forward."""
    return recurrence_flops(own, tokens) + 2 * tokens * own.channels * own.taps


def scan_backward_flops(own: Scan, tokens: int) -> int:
    """FLOPs of their backward, which has five matrix multiplications for two of forward's."""
    return scan_flops(own, tokens) * 5 // 2


def mixer_flops(layer: Layer, tokens: int, pairs: int, made: Set[str] = MIXED) -> int:
    """FLOPs of a unit's attention and recurrence in forward, without GEMMs: of those that make a tensor in `made`."""
    attention = attention_flops(layer.attention, pairs) if layer.attention and made & ATTENDED else 0
    return attention + (scan_flops(layer.scan, tokens) if layer.scan and made & SCANNED else 0)


def mixer_backward_flops(layer: Layer, tokens: int, pairs: int) -> int:
    """FLOPs of a unit's attention and recurrence in backward, without GEMMs."""
    attention = attention_backward_flops(layer.attention, pairs) if layer.attention else 0
    return attention + (scan_backward_flops(layer.scan, tokens) if layer.scan else 0)


@lru_cache(KNOWN)
def _adapter_params(cfg: ModelConfig, u: int) -> int:
    """Elements of adapters that a token is multiplied with."""
    adapters = [(n, prod(s)) for part in trained_parts(cfg, u) for g in part for n, s in g if ".lora_" in n]
    of_experts, own = sum(size for name, size in adapters if adapts_experts(name)), unit(cfg, u).experts
    return sum(size for _, size in adapters) - of_experts + (of_experts * own.chosen // own.count if own else 0)


@lru_cache(KNOWN)
def _trained_params(cfg: ModelConfig, u: int) -> int:
    """Elements of a unit's trained matrices, without adapters; of experts those of a token."""
    groups = [group for group in weight_groups(cfg, u) if len(group[0][1]) > 1 and not is_frozen(cfg, group)]
    conv, own = f".{unit(cfg, u).names.conv}.weight", unit(cfg, u).experts  # conv: in mixer_flops
    groups = [group for group in groups if not group[0][0].endswith(conv)]
    used = lambda shape: prod(shape) if len(shape) == 2 or own is None else own.chosen * prod(shape[1:])
    return sum(used(shape) for group in groups for _, shape in group)


@lru_cache(KNOWN)
def _expert_bias_params(cfg: ModelConfig, u: int) -> int:
    """Elements that a token is multiplied with for the gradients of experts' biases."""
    own = unit(cfg, u).experts
    if own is None or not own.bias:
        return 0
    trained = {name.rsplit(".", 1)[1] for part in trained_parts(cfg, u) for group in part for name, _ in group}
    down, up = own.count * cfg.width, own.chosen * up_width(own)
    return down * (1 + (f"{DOWN}_bias" in trained)) + up * (f"{GATE_UP}_bias" in trained)


@lru_cache(KNOWN)
def forward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """FLOPs of a unit in forward. For the head, `tokens` is the number of labels."""
    if u == 0:
        return 0
    if u == cfg.n_units - 1:
        return 2 * tokens * cfg.outputs * cfg.width
    own = unit(cfg, u)
    return 2 * tokens * (sum(_linear_params(own).values()) + _adapter_params(cfg, u)) + mixer_flops(own, tokens, pairs)


@lru_cache(KNOWN)
def backward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """FLOPs of a unit in backward if nothing is recomputed.

    Two matmuls for each of forward's, one if it is frozen; attention has five for two.
    """
    if u in (0, cfg.n_units - 1):
        frozen = is_frozen(cfg, [(output_name(cfg), ())])
        return (1 if frozen else 2) * forward_flops(cfg, u, tokens, pairs)
    own = unit(cfg, u)
    matmuls = sum(_linear_params(own).values()) + _trained_params(cfg, u) + 2 * _adapter_params(cfg, u)
    return 2 * tokens * (matmuls + _expert_bias_params(cfg, u)) + mixer_backward_flops(own, tokens, pairs)


def _again(missing: Set[str]) -> Set[str]:
    """Matmuls that backward repeats where these saved tensors are missing."""
    return missing | NEVER_SAVED | ({BESIDE} if "resid" in missing else set())


@lru_cache(KNOWN)
def recompute_flops(cfg: ModelConfig, kept: frozenset[str], tokens: int, pairs: int, kind: str = "block") -> int:
    """FLOPs that backward adds to recompute the saved_shapes that are not in `kept`."""
    layer = cfg.kind(kind)
    missing = saved_shapes(cfg, tokens, kind).keys() - kept
    sliced = is_sliced(cfg, layer) and not layer.mixers and layer.experts
    again = _again(missing) | ({up_name(sliced)} if sliced else set())
    linear = sum(n for name, n in _linear_params(layer).items() if name in again)
    if sliced:
        linear += sliced.count * cfg.width  # the last slice routes again, for logits
    return 2 * tokens * linear + mixer_flops(layer, tokens, pairs, missing)


class Grouped(NamedTuple):
    """FLOPs of a unit's grouped GEMMs of experts, with the rows by which tiles are padded."""

    forward: float = 0.0
    backward: float = 0.0  # gradients of rows
    gradients: float = 0.0  # of matrices
    rebuilt: float = 0.0  # of forward, in backward
    fp8: bool = False  # all but gradients


def grouped_work(cfg: ModelConfig, u: int, kept: frozenset[str], tokens: int) -> Grouped:
    """Grouped of unit u, of which backward finds the tensors `kept`.

    A tile of TILE rows belongs to one expert, so on average half of an expert's last tile is empty.
    """
    own = unit(cfg, u).experts if 0 < u < cfg.n_units - 1 else None
    if own is None:
        return Grouped()
    rows = own.chosen * tokens + own.count * TILE / 2
    up, down = (2 * rows * expert_input(unit(cfg, u)) * n for n in (up_width(own), own.width))
    trained = {name.rpartition(".")[2] for part in trained_parts(cfg, u) for group in part for name, _ in group}
    gradients = up * (GATE_UP in trained) + down * (DOWN in trained)
    fp8 = experts_in_fp8(cfg, unit(cfg, u), tokens)
    return Grouped(up + down, up + down, gradients, up * (up_name(own) not in kept), fp8)


_quantized_each = lru_cache(KNOWN)(quantized_each)


class InFp8(NamedTuple):
    """The part of a micro-batch's work that is in fp8: FLOPs, and bytes that quantization moves."""

    forward: int = 0
    backward: int = 0
    rebuilt: int = 0  # of forward, in backward
    forward_bytes: int = 0
    backward_bytes: int = 0
    rebuilt_bytes: int = 0


def in_fp8_work(cfg: ModelConfig, u: int, kept: frozenset[str], tokens: int) -> InFp8:
    """InFp8 of a block or sub-layer. All matrices of a unit count as trained if one is."""
    layer, N, trained = unit(cfg, u), tokens, _trained_params(cfg, u) > 0
    missing, each = saved_of(cfg, layer, 1).keys() - kept, _quantized_each(cfg, u)
    sizes, mlp = _linear_layers(layer), layer.mlp or layer.experts
    found = {name: (a, b) for name, (a, b) in sizes.items() if in_fp8(cfg, a, b)}
    again = {name: size for name, size in found.items() if name in _again(missing)}
    flops = lambda sizes: 2 * N * sum(a * b for a, b in sizes.values())
    # Read twice, written once: x; behind, dy in both orders. Matrices: Geometry.decode_bytes, or where each matmul
    # quantizes them as x. A norm's codes: 5 bytes where it moves 4 without them.
    before = dict.fromkeys(("qkv", "mixed"), layer.names.norm1)
    before |= {up_name(mlp): layer.names.norm2} if mlp else {}
    of_x = lambda name, a: (1 if norms_make_codes(cfg) and before.get(name) else 5) * N * a
    moved = lambda sizes: sum(of_x(name, a) + 5 * each * a * b for name, (a, b) in sizes.items())
    behind = sum((5 + trained) * N * b + trained * of_x(name, a) + 5 * each * a * b for name, (a, b) in found.items())
    gated = layer.mlp is not None and layer.mlp.gated and "out" in found and cfg.lora is None
    made = N * layer.mlp.width if gated and layer.mlp else 0  # codes of gated units: not in bf16
    both, written = (1 + trained) * flops(found), moved(found) - 2 * made
    # What the gradient reads as well is quantized for both at once: it is written once more.
    shared = sum(a for name, (a, _) in again.items() if name in AT_ONCE and of_x(name, a) > N * a) * trained
    own = InFp8(flops(found), both, flops(again), written, behind - 12 * made, moved(again) - 4 * N * shared)
    return InFp8(*(a + b for a, b in zip(own, _experts_in_fp8(cfg, layer, kept, tokens), strict=True)))


def _experts_in_fp8(cfg: ModelConfig, layer: Layer, kept: frozenset[str], N: int) -> InFp8:
    """InFp8 of grouped GEMMs: rows are read and written once; each tile of tokens reads all matrices twice."""
    own, inner = layer.experts, expert_input(layer)
    if own is None or not experts_in_fp8(cfg, layer, N):
        return InFp8()
    up, down = (inner * width for width in (up_width(own), own.width))
    matrix, rows = 5 * own.count * -(-N // cfg.mlp_rows), lambda *widths: 3 * N * sum(widths)
    flops, again = 2 * N * own.chosen * (up + down), up_name(own) not in kept
    forward = rows(inner, own.chosen * own.width) + matrix * (up + down)
    backward = rows(inner, own.chosen * up_width(own)) + matrix * (up + down)
    rebuilt = rows(inner) + matrix * up
    return InFp8(flops, flops, again * 2 * N * own.chosen * up, forward, backward, again * rebuilt)


def model_flops(cfg: ModelConfig, tokens: int, pairs: int) -> int:
    """FLOPs of a training step as MFU counts them: three times forward's matrices and attention, no recomputation.

    That is 6 a token and matrix parameter (output matrix included, embedding not), 4 if frozen, and 12 a pair and query
    feature by layer.
    """
    inner = range(1, cfg.n_units - 1)
    output = 0 if cfg.scores else cfg.vocab * cfg.width  # a score head reads a token of each document
    matrices = sum(sum(_linear_params(unit(cfg, u)).values()) for u in inner) + output
    mixed = sum(mixer_flops(own, tokens, pairs) for own in cfg.layers)
    if not cfg.frozen and cfg.lora is None:
        return 6 * tokens * matrices + 3 * mixed
    trained = sum(_trained_params(cfg, u) + 3 * _adapter_params(cfg, u) for u in inner)
    trained += output * (not is_frozen(cfg, [(output_name(cfg), ())]))
    return 2 * tokens * (2 * matrices + trained) + 3 * mixed

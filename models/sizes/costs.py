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
from trireme.models.sizes.narrow import experts_in_fp8, in_fp8, norms_make_codes, quantized_each
from trireme.models.sizes.shapes import (
    DOWN,
    GATE_UP,
    adapts_experts,
    chosen,
    expert_input,
    hidden_width,
    is_frozen,
    is_sliced,
    kind,
    output_name,
    saved_shapes,
    seen,
    trained_parts,
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
    """The mean number of attended pairs of a layer with attention."""
    if not cfg.window:
        return attended_pairs(lengths)
    lengths, windows = list(lengths), [cfg.layer_window(i) for i in range(cfg.n_layers)]
    return sum(attended_pairs(lengths, window) * windows.count(window) for window in set(windows)) // cfg.n_layers


def _linear_layers(cfg: ModelConfig, kind: str) -> dict[str, tuple[int, int]]:
    """(in, out) features of a block's linear layers, by the name of their matmul; without a router and its experts."""
    found = {}
    if kind != "mlp" and (cfg.scanning or cfg.both):
        assert cfg.scan is not None
        found["mixed"] = cfg.width, cfg.scan.mixed_width
        found[BESIDE if cfg.both else "resid"] = cfg.scan.value_width, cfg.width
    if kind != "mlp" and not cfg.scanning:
        found["qkv"] = cfg.width, cfg.qkv_width
        found["attn_branch" if cfg.names.post1 else "resid"] = cfg.attn_width, cfg.width
        if cfg.latent:
            found["kv_b"] = cfg.latent.kv_rank, cfg.n_heads * (cfg.latent.nope + cfg.latent.value)
        if cfg.latent and cfg.latent.q_rank:
            found["q_b"] = cfg.latent.q_rank, cfg.q_width
    if kind != "attention" and cfg.experts is None:
        found[up_name(cfg)] = cfg.width, up_width(cfg)
        found["mlp_branch" if cfg.names.post2 else "out"] = cfg.ffn, cfg.width
    elif kind != "attention" and cfg.experts and cfg.experts.shared:
        shared = cfg.experts.shared
        found |= {"shared_up": (cfg.width, (1 + cfg.gated) * shared), "shared": (shared, cfg.width)}
    if kind != "attention" and cfg.experts and (own := cfg.experts.latent):
        found |= {"latent": (cfg.width, own), "out": (own, cfg.width)}
    return found


@lru_cache(KNOWN)
def _linear_params(cfg: ModelConfig, kind: str) -> dict[str, int]:
    """Elements of a block's matrices that a token is multiplied with, by the name of their matmul."""
    cfg, kind = seen(cfg, kind)
    found = {name: inside * outside for name, (inside, outside) in _linear_layers(cfg, kind).items()}
    if kind != "attention" and cfg.experts:
        inner = expert_input(cfg)
        found[up_name(cfg)] = chosen(cfg) * inner * up_width(cfg)
        last = "latent_sum" if cfg.experts.latent else "mlp_branch" if cfg.names.post2 else "out"
        found[last] = hidden_width(cfg) * inner
        found["router"] = (cfg.experts.count + cfg.experts.shared_gate) * cfg.width
    return found


def attention_flops(cfg: ModelConfig, pairs: int) -> int:
    """FLOPs of one layer's attention in forward: scores and weighted values."""
    return 2 * pairs * (cfg.q_width + cfg.attn_width)


def attention_backward_flops(cfg: ModelConfig, pairs: int) -> int:
    """FLOPs of its backward: scores and their gradient, and the gradients of queries, keys and values."""
    return 2 * pairs * (3 * cfg.q_width + 2 * cfg.attn_width)


def recurrence_flops(own: Scan, tokens: int) -> int:
    """FLOPs of one layer's recurrence in forward, by chunks of CHUNK tokens."""
    within = own.key_dim + own.value_dim  # a token's products within a chunk
    states = 2 * own.key_dim * own.value_dim  # with the state: outputs, the next
    if own.delta:  # with an inverse, and deltas
        within += 2 * own.key_dim + own.value_dim + CHUNK
        states += own.key_dim * own.value_dim
    return 2 * tokens * own.heads * (CHUNK * within + states)


def scan_flops(cfg: ModelConfig, tokens: int) -> int:
    """FLOPs of one layer's recurrence and its convolution in forward."""
    own = cfg.scan
    assert own is not None
    return recurrence_flops(own, tokens) + 2 * tokens * own.channels * own.taps


def scan_backward_flops(cfg: ModelConfig, tokens: int) -> int:
    """FLOPs of their backward, which has five matrix multiplications for two of forward's."""
    return scan_flops(cfg, tokens) * 5 // 2


def mixer_flops(cfg: ModelConfig, kind: str, tokens: int, pairs: int, made: Set[str] = MIXED) -> int:
    """FLOPs of a unit's attention and recurrence in forward, without GEMMs: of those that make a tensor in `made`."""
    cfg, kind = seen(cfg, kind)
    if kind not in ("block", "attention"):
        return 0
    attention = attention_flops(cfg, pairs) if not cfg.scanning and made & ATTENDED else 0
    return attention + (scan_flops(cfg, tokens) if (cfg.scanning or cfg.both) and made & SCANNED else 0)


def mixer_backward_flops(cfg: ModelConfig, kind: str, tokens: int, pairs: int) -> int:
    """FLOPs of a unit's attention and recurrence in backward, without GEMMs."""
    cfg, kind = seen(cfg, kind)
    if kind not in ("block", "attention"):
        return 0
    attention = 0 if cfg.scanning else attention_backward_flops(cfg, pairs)
    return attention + (scan_backward_flops(cfg, tokens) if cfg.scanning or cfg.both else 0)


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
    conv = f".{cfg.names.conv}.weight"  # in mixer_flops
    groups = [group for group in groups if not group[0][0].endswith(conv)]
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


@lru_cache(KNOWN)
def forward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """FLOPs of a unit in forward. For the head, `tokens` is the number of labels."""
    attention = mixer_flops(cfg, kind(cfg, u), tokens, pairs)
    cfg, what = seen(cfg, kind(cfg, u))
    if what == "embed":
        return 0
    if what == "head":
        return 2 * tokens * cfg.outputs * cfg.width
    return 2 * tokens * (sum(_linear_params(cfg, what).values()) + _adapter_params(cfg, u)) + attention


@lru_cache(KNOWN)
def backward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> int:
    """FLOPs of a unit in backward if nothing is recomputed.

    Two matmuls for each of forward's, one if it is frozen; attention has five for two.
    """
    attention = mixer_backward_flops(cfg, kind(cfg, u), tokens, pairs)
    cfg, what = seen(cfg, kind(cfg, u))
    if what in ("embed", "head"):
        frozen = is_frozen(cfg, [(output_name(cfg), ())])
        return (1 if frozen else 2) * forward_flops(cfg, u, tokens, pairs)
    matmuls = sum(_linear_params(cfg, what).values()) + _trained_params(cfg, u) + 2 * _adapter_params(cfg, u)
    matmuls += _expert_bias_params(cfg, u) if what != "attention" else 0
    return 2 * tokens * matmuls + attention


def _again(missing: Set[str]) -> Set[str]:
    """Matmuls that backward repeats where these saved tensors are missing."""
    return missing | NEVER_SAVED | ({BESIDE} if "resid" in missing else set())


@lru_cache(KNOWN)
def recompute_flops(cfg: ModelConfig, kept: frozenset[str], tokens: int, pairs: int, kind: str = "block") -> int:
    """FLOPs that backward adds to recompute the saved_shapes that are not in `kept`."""
    cfg, kind = seen(cfg, kind)
    missing = saved_shapes(cfg, tokens, kind).keys() - kept
    sliced = is_sliced(cfg) and kind == "mlp"
    again = _again(missing) | ({up_name(cfg)} if sliced else set())
    linear = sum(n for name, n in _linear_params(cfg, kind).items() if name in again)
    if sliced and cfg.experts:
        linear += cfg.experts.count * cfg.width  # the last slice routes again, for logits
    attention = mixer_flops(cfg, kind, tokens, pairs, missing)
    return 2 * tokens * linear + attention


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
    cfg, what = seen(cfg, kind(cfg, u))
    if cfg.experts is None or what not in ("block", "mlp"):
        return Grouped()
    rows = cfg.experts.chosen * tokens + cfg.experts.count * TILE / 2
    up, down = (2 * rows * expert_input(cfg) * n for n in (up_width(cfg), cfg.experts.width))
    trained = {name.rpartition(".")[2] for part in trained_parts(cfg, u) for group in part for name, _ in group}
    gradients = up * (GATE_UP in trained) + down * (DOWN in trained)
    return Grouped(up + down, up + down, gradients, up * (up_name(cfg) not in kept), experts_in_fp8(cfg, tokens))


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
    what, N, trained = kind(cfg, u), tokens, _trained_params(cfg, u) > 0
    missing, each = saved_shapes(cfg, 1, what).keys() - kept, _quantized_each(cfg, u)
    cfg, what = seen(cfg, what)
    sizes = _linear_layers(cfg, what)
    found = {name: (a, b) for name, (a, b) in sizes.items() if in_fp8(cfg, a, b)}
    again = {name: size for name, size in found.items() if name in _again(missing)}
    flops = lambda sizes: 2 * N * sum(a * b for a, b in sizes.values())
    # Read twice, written once: x; behind, dy in both orders. Matrices: Geometry.decode_bytes, or where each matmul
    # quantizes them as x. A norm's codes: 5 bytes where it moves 4 without them.
    before = dict.fromkeys(("qkv", "mixed"), cfg.names.norm1) | {up_name(cfg): cfg.names.norm2}
    of_x = lambda name, a: (1 if norms_make_codes(cfg) and before.get(name) else 5) * N * a
    moved = lambda sizes: sum(of_x(name, a) + 5 * each * a * b for name, (a, b) in sizes.items())
    behind = sum((5 + trained) * N * b + trained * of_x(name, a) + 5 * each * a * b for name, (a, b) in found.items())
    made = N * cfg.ffn if cfg.gated and "out" in found and cfg.lora is None else 0  # codes of gated units: not in bf16
    both, written = (1 + trained) * flops(found), moved(found) - 2 * made
    # What the gradient reads as well is quantized for both at once: it is written once more.
    shared = sum(a for name, (a, _) in again.items() if name in AT_ONCE and of_x(name, a) > N * a) * trained
    own = InFp8(flops(found), both, flops(again), written, behind - 12 * made, moved(again) - 4 * N * shared)
    if what not in ("block", "mlp"):
        return own
    return InFp8(*(a + b for a, b in zip(own, _experts_in_fp8(cfg, kept, tokens), strict=True)))


def _experts_in_fp8(cfg: ModelConfig, kept: frozenset[str], N: int) -> InFp8:
    """InFp8 of grouped GEMMs: rows are read and written once; each tile of tokens reads all matrices twice."""
    if cfg.experts is None or not experts_in_fp8(cfg, N):
        return InFp8()
    own, inner = cfg.experts, expert_input(cfg)
    up, down = (inner * width for width in (up_width(cfg), own.width))
    matrix, rows = 5 * own.count * -(-N // cfg.mlp_rows), lambda *widths: 3 * N * sum(widths)
    flops, again = 2 * N * own.chosen * (up + down), up_name(cfg) not in kept
    forward = rows(inner, own.chosen * own.width) + matrix * (up + down)
    backward = rows(inner, own.chosen * up_width(cfg)) + matrix * (up + down)
    rebuilt = rows(inner) + matrix * up
    return InFp8(flops, flops, again * 2 * N * own.chosen * up, forward, backward, again * rebuilt)


def model_flops(cfg: ModelConfig, tokens: int, pairs: int) -> int:
    """FLOPs of a training step as MFU counts them: three times forward's matrices and attention, no recomputation.

    That is 6 a token and matrix parameter (output matrix included, embedding not), 4 if frozen, and 12 a pair and query
    feature by layer.
    """
    inner = range(1, cfg.n_units - 1)
    output = 0 if cfg.scores else cfg.vocab * cfg.width  # a score head reads a token of each document
    matrices = sum(sum(_linear_params(cfg, kind(cfg, u)).values()) for u in inner) + output
    mixed = cfg.attending * attention_flops(cfg, pairs)
    mixed += cfg.recurring * scan_flops(cfg, tokens) if cfg.scan else 0
    if not cfg.frozen and cfg.lora is None:
        return 6 * tokens * matrices + 3 * mixed
    trained = sum(_trained_params(cfg, u) + 3 * _adapter_params(cfg, u) for u in inner)
    trained += output * (not is_frozen(cfg, [(output_name(cfg), ())]))
    return 2 * tokens * (2 * matrices + trained) + 3 * mixed

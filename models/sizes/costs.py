"""FLOPs that are known by formula: of attention, of recurrences, and of a step as MFU counts them. No torch.

Legend: N tokens. `pairs`: (query, key) pairs that one layer attends to (attended_pairs). FLOPs count two per
multiply-add. What a pass of this program takes is measured (measure.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from trireme.models.config import ModelConfig
from trireme.models.families.scans import Scan
from trireme.models.layers import Layer
from trireme.models.sizes.shapes import adapts_experts, is_frozen, output_name, trained_parts, unit, weight_groups

CHUNK = 64  # tokens of a chunk of a recurrence
HEADS = (128, 256, 512)  # widths of attention's heads that its speed is known for; others count as the next wider


def attended_pairs(lengths: Iterable[int], window: int = 0) -> int:
    """(query, key) pairs of causal attention within documents of these lengths; window 0: none."""

    def pairs(n: int) -> int:
        full = min(n, window) if window else n
        return full * (full + 1) // 2 + (n - full) * window

    return sum(map(pairs, lengths))


def layer_pairs(layers: Sequence[Layer], lengths: Sequence[int]) -> int:
    """The mean number of attended pairs of one of `layers`."""
    windows = [layer.attention.window if layer.attention else 0 for layer in layers]
    return sum(attended_pairs(lengths, window) * windows.count(window) for window in set(windows)) // len(windows)


def recurrence_flops(spec: Scan, tokens: int) -> int:
    """FLOPs of one layer's recurrence in forward, by chunks of CHUNK tokens."""
    inner = spec.key_dim + spec.value_dim  # a token's products within a chunk
    states = 2 * spec.key_dim * spec.value_dim  # with the state: outputs, the next
    if spec.delta:  # with an inverse, and deltas
        inner += 2 * spec.key_dim + spec.value_dim + CHUNK
        states += spec.key_dim * spec.value_dim
    return 2 * tokens * spec.heads * (CHUNK * inner + states)


def mixer_flops(layer: Layer, tokens: int, pairs: int) -> int:
    """FLOPs of a layer's scores and weighted values, recurrence and convolution in forward; no linear layers."""
    flops = 0
    if spec := layer.attention:
        flops += 2 * pairs * (spec.q_width + spec.out_width)
    if scan := layer.scan:
        flops += recurrence_flops(scan, tokens) + 2 * tokens * scan.channels * scan.taps
    return flops


@lru_cache(4096)
def _multiplied(cfg: ModelConfig, u: int) -> tuple[int, int]:
    """(elements of matrices that a token is multiplied with in forward, in the gradients of trained ones and back).

    Of experts those of a token's. Adapters count three times among the latter, as their products in a step.
    """
    layer = unit(cfg, u)
    conv = f".{layer.mixer_names.conv}.weight"  # not a matrix
    share = lambda name, shape: (
        layer.experts.chosen / layer.experts.count
        if layer.experts and (len(shape) > 2 or adapts_experts(name)) else 1
    )  # fmt: skip
    count = lambda group: sum(
        round(prod(shape) * share(name, shape)) for name, shape in group if len(shape) > 1 and not name.endswith(conv)
    )
    total = sum(count(group) for group in weight_groups(cfg, u))
    trained = [group for part in trained_parts(cfg, u) for group in part]
    return total, sum(count(group) * (3 if ".lora_" in group[0][0] else 1) for group in trained)


def model_flops(cfg: ModelConfig, tokens: int, pairs: int) -> int:
    """FLOPs of a training step as MFU counts them: three times forward's matrices and attention, no recomputation.

    That is 6 a token and matrix parameter (output matrix included, embedding not), 4 if frozen, and 12 a pair and query
    feature by layer.
    """
    output = 0 if cfg.scores else cfg.vocab * cfg.width  # a score head reads a token of each document
    multiplied = [_multiplied(cfg, u) for u in range(1, cfg.n_units - 1)]
    matrices = sum(total for total, _ in multiplied) + output
    trained = sum(n for _, n in multiplied) + output * (not is_frozen(cfg, [(output_name(cfg), ())]))
    return 2 * tokens * (2 * matrices + trained) + 3 * sum(mixer_flops(layer, tokens, pairs) for layer in cfg.layers)

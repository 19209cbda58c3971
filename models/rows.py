"""A micro-batch's packed tokens: documents, positions, rotation tables; the arguments of a pass over a layer.

Legend: N packed tokens, P positions, E experts, k of them for each token, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.config import InputError, ModelConfig
from trireme.models.families.latent import Latent
from trireme.models.families.rope import Rope
from trireme.models.layers import Attention, Layer
from trireme.models.lora import Dropout, part_key


class Table(NamedTuple):
    """Angles of a rotation by position; made once and used for the whole run."""

    cos: Tensor  # (P, r/2) fp32, P >= longest document, r rotated features
    sin: Tensor
    pairs: bool = False  # of neighbours, not halves


class Rotation(NamedTuple):
    """The tables of a rope."""

    query: Table
    key: Table  # the same, unless queries are scaled by position
    nope: Table | None = None  # of latent attention's queries: scales those features that are not rotated


Tables = dict[Rope, Rotation]  # of each rope that a layer has


class Load(NamedTuple):
    """The tokens of each expert in a step, and a loss that balances them (Fedus et al. 2022, arXiv:2101.03961).

    The loss is weight * E * <f, P> (section 2.2), where f (E,) is how often each expert is chosen and P (E,) the
    softmax of the logits, both as means over layers and tokens of the step. Each GPU has its own Load, which counts the
    layers of this GPU alone until `pool_`.
    """

    counts: Tensor  # (layers, E) int64; zero of dense layers
    scores: Tensor  # (layers, E) fp64, sums of the softmax where there is a weight: hosts add theirs in parts
    rows: int  # layers with experts times tokens of the step
    weight: float  # 0: no loss
    counted: bool = True  # False for the micro-batch that a host without data computes

    def add(self, layer: int, order: ops.Order, logits: Tensor) -> None:
        """Counts a micro-batch of a layer, in forward; logits (N, E)."""
        if not self.counted:
            return
        self.counts[layer] += order.starts[1:] - order.starts[:-1]
        if self.weight:
            self.scores[layer] += torch.softmax(logits.float(), -1).sum(0)

    def in_ram(self) -> tuple[Tensor, Tensor]:
        """Copies of counts and scores."""
        return self.counts.to("cpu", copy=True), self.scores.to("cpu", copy=True)

    def pool_(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Replaces counts and scores by their sums over all GPUs or hosts, given `in_ram` of each."""
        for total, parts in zip((self.counts, self.scores), zip(*copies, strict=True), strict=True):
            total.copy_(torch.stack(parts).sum(0))

    def balance(self) -> Tensor | None:
        """The gradient (E,) fp32 of the loss by a token's softmax; valid after forward has ended on all GPUs, hosts."""
        if not (self.weight and self.counted):
            return None
        return self.counts.sum(0).float() * (self.weight * self.counts.shape[1] / self.rows**2)

    def loss(self) -> float:
        """The loss without its weight: k where the load is balanced."""
        chosen, scores = (t.double().sum(0) / self.rows for t in (self.counts, self.scores))
        return float(self.counts.shape[1] * (chosen @ scores))


def make_load(cfg: ModelConfig, tokens: int, weight: float, device: torch.device | str) -> Load | None:
    """An empty Load for a step of so many tokens; None without experts."""
    if cfg.experts is None:
        return None
    shape, n_layers = (cfg.n_layers, cfg.experts.count), sum(layer.experts is not None for layer in cfg.layers)
    counts, scores = (torch.zeros(shape, dtype=dtype, device=device) for dtype in (torch.int64, torch.float64))
    return Load(counts, scores, n_layers * tokens, weight)


class Noise(NamedTuple):
    """NEFTune's noise on the embeddings of a training step (Jain et al. 2023, arXiv:2310.05914)."""

    scale: Tensor  # (N,) fp32: alpha / sqrt(tokens of the document * D)
    key: int  # a hash of the seed and the step
    first: int  # tokens of the step before this micro-batch, so that noise does not depend on how a step is divided


def neftune(cfg: ModelConfig, lengths: Sequence[int], alpha: float, key: int, first: int) -> Noise:
    """Noise for documents of these lengths, in RAM; times cfg.embed_scale unless the embedding's module includes it.

    Raises InputError if a norm is between the embedding and the place of the noise.
    """
    if cfg.layers[0].entry:
        raise InputError(f"--neftune adds noise behind the embedding's norm, which {cfg.model_type} has: leave it out.")
    factor = alpha if cfg.family.embed_root else alpha * cfg.embed_scale
    n = torch.tensor(lengths, dtype=torch.int64)
    return Noise(torch.repeat_interleave((factor / (n * cfg.width).double().sqrt()).float(), n), key, first)


class Rows(NamedTuple):
    """N packed tokens of a micro-batch."""

    docs: ops.Docs
    tables: Tables
    load: Load | None = None  # of a step in training
    noise: Noise | None = None  # likewise
    dropout: Dropout | None = None  # likewise, of adapters
    angles: Tensor | None = None  # (N,) int32 rows of the tables; None: positions in the documents

    def rotation(self, spec: Attention) -> Rotation | None:
        """The tables of a mixer's queries and keys; None without rope."""
        return None if spec.rope is None else self.tables[spec.rope]

    def in_layer(self, layer: int) -> Rows:
        """These rows with dropout masks of this layer's own."""
        if self.dropout is None:
            return self
        return self._replace(dropout=self.dropout._replace(key=self.dropout.key ^ part_key(f"layer {layer}")))


class Pass(NamedTuple):
    """The arguments that all parts of a layer's forward or backward share."""

    cfg: ModelConfig
    layer: Layer  # this one, or half of it
    number: int
    rows: Rows
    saved: dict[str, Tensor]  # forward fills them, backward recomputes what is not there


def rotate_(heads_: Tensor, table: Table | None, rows: Rows, inverse: bool = False) -> None:
    """Rotates the first features of heads_ (N, heads, d), as many as the table has; none without a table."""
    if table is not None:
        angles = rows.docs.positions if rows.angles is None else rows.angles
        ops.rope_(heads_[..., : 2 * table.cos.shape[1]], table.cos, table.sin, angles, inverse, table.pairs)


def make_rows(lengths: Sequence[int], tables: Tables, device: torch.device | str) -> Rows:
    """Rows of packed documents of these lengths (tokens)."""
    return Rows(ops.make_docs(lengths, device), tables)


def rope_tables(cfg: ModelConfig, length: int, device: torch.device | str) -> Tables:
    """Tables for positions below `length`, made once for a run, since longrope chooses frequencies by length."""
    return {spec.rope: _rotation(spec.rope, spec.latent, length, device) for spec in cfg.attentions if spec.rope}


def _rotation(rope: Rope, latent: Latent | None, length: int, device: torch.device | str) -> Rotation:
    def table(scale: Tensor | float = 1.0) -> Table:
        pair = ops.rope_table(_inv_freq(rope, rope.width, length), length, rope.attention_factor)
        cos, sin = ((t * scale).to(device) for t in pair)
        return Table(cos, sin, rope.pairs)

    key = table()
    if not rope.query_beta or length <= rope.original_positions:
        return Rotation(key, key)
    scale, nope = _query_scale(rope, length), None
    if latent is not None:
        cos = scale.expand(-1, latent.nope // 2).contiguous().to(device)
        nope = Table(cos, torch.zeros_like(cos))
    return Rotation(table(scale), key, nope)


def _query_scale(rope: Rope, length: int) -> Tensor:
    """Llama 4's factor of queries by position, (length, 1) fp32: it grows with the position in the document."""
    contexts = torch.floor(torch.arange(length) / rope.original_positions)
    return (1 + rope.query_beta * torch.log(1 + contexts))[:, None]


def _inv_freq(rope: Rope, width: int, length: int) -> Tensor:
    """The angle per position of each pair of features, (width/2,) fp32, by the kind of rope."""
    freq = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if rope.kind == "proportional":  # a part of the pairs turn, with the exponents of the whole width
        turning = torch.arange(width // 2) < int(rope.share * width // 2)
        return torch.where(turning, 1.0 / freq, 0.0) / rope.factor
    if rope.kind == "linear":
        return 1.0 / freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(1.0 / freq, rope)
    if rope.kind == "yarn":
        return _yarn(freq, rope)
    if rope.kind == "longrope":
        factors = rope.long_factors if length > rope.original_positions else rope.short_factors
        return 1.0 / (torch.tensor(factors) * freq)
    return 1.0 / freq


def _yarn(freq: Tensor, rope: Rope) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2), given theta^(2i/d).

    Features with few turns in the original context are interpolated by `factor`, those with many are kept.
    """
    width = 2 * len(freq)

    def feature(turns: float) -> float:
        return width * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    share = 1 - ((torch.arange(len(freq), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * freq) * (1 - share) + 1.0 / freq * share


def _llama3(inv_freq: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones are kept, those between are blended."""
    turns = rope.original_positions * inv_freq / (2 * math.pi)  # in the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0, 1)
    return share * inv_freq + (1 - share) * inv_freq / rope.factor

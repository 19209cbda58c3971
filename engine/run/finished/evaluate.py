"""`trireme eval FOLDER --data FILE`: loss of a finished model on each file, perplexity or accuracy."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from trireme.engine.amounts import compact, count
from trireme.engine.build import documents_of, in_ram, placed
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import DataOptions, Dataset, MicroBatch, load_dataset
from trireme.engine.data.formats.pairs import Kind
from trireme.engine.memory import DTYPE
from trireme.engine.run.finished.layers import Layers, device_and_dtype, load_layers
from trireme.engine.run.finished.model import Opened, open_model
from trireme.engine.run.job import shelf
from trireme.engine.run.output.log import perplexity
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.headed import pad_in
from trireme.models import head, model
from trireme.models.config import InputError, ModelConfig, read_raw
from trireme.models.losses.preferences import Preference, compare, joined
from trireme.models.rows import Tables, rope_tables
from trireme.models.sizes import shapes, workspace

AT_ONCE = 1 << 13  # tokens of a micro-batch, unless a sequence is longer
WAITING = 1 << 30  # bytes of activations between layers, where each pass reads the model's files


class Found(NamedTuple):
    total: float  # of the labels' losses
    labels: int
    tokens: int
    sequences: int
    correct: float | None = None  # labels that no other token was likelier than, where counted
    kind: Kind = ""  # of a score head: "rewards", whose labels are pairs, or "classes"
    margins: float = 0.0  # sum of what rewards differ by

    def plus(self, other: Found) -> Found:
        labels, tokens = self.labels + other.labels, self.tokens + other.tokens
        correct = None if self.correct is None or other.correct is None else self.correct + other.correct
        counts = labels, tokens, self.sequences + other.sequences
        return Found(self.total + other.total, *counts, correct, other.kind, self.margins + other.margins)

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else self.correct / max(1, self.labels)

    @property
    def loss(self) -> float:
        """The mean."""
        return self.total / max(1, self.labels)

    def __str__(self) -> str:
        of = f"{compact(self.labels)} trained tokens of {compact(self.tokens)}, {count(self.sequences, 'sequence')}"
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.4f}"
        if self.kind:
            margin, noun = ("", "row") if self.kind == "classes" else (f", margin {self.margin:.4g}", "pair")
            some = f"{count(self.labels, noun)} of {compact(self.tokens)} tokens"
            return f"loss {self.loss:.4f}{accuracy}{margin}, on {some}"
        return f"loss {self.loss:.4f}, perplexity {perplexity(self.loss)}{accuracy}, on {of}"

    @property
    def margin(self) -> float:
        return self.margins / max(1, self.labels)

    def described(self) -> dict[str, float]:
        if self.kind:
            margin, rows = ({"margin": self.margin}, "pairs") if self.kind == "rewards" else ({}, "rows")
            return {
                "loss": self.loss,
                "accuracy": self.accuracy or 0.0,
                **margin,
                rows: self.labels,
                "tokens": self.tokens,
            }
        found = {"loss": self.loss, "perplexity": math.exp(min(self.loss, 700.0))}
        found |= {} if self.accuracy is None else {"accuracy": self.accuracy}
        return found | {"trained_tokens": self.labels, "tokens": self.tokens, "sequences": self.sequences}


def evaluate(given: argparse.Namespace) -> int:
    """Returns the exit code. Raises InputError, CheckpointError, DoesNotFit, StoreError."""
    out, all_ = Screen(), Found(0.0, 0, 0, 0, 0.0)
    for name, found in zip(given.data, losses(given, Screen(sys.stderr)), strict=True):
        out.say(f"eval     {name}: {found}")
        all_ = all_.plus(found)
    if len(given.data) > 1:
        out.say(f"eval     all {len(given.data)} files: {all_}")
    return 0


class Ready(NamedTuple):
    """Data that was read, and the layers to compute with."""

    opened: Opened
    layers: Layers
    sources: list[Dataset]
    rows: int  # at once
    seq_len: int
    dtype: torch.dtype
    waiting: int  # tokens that share a pass, at least a micro-batch's
    below: int  # ids that likeliest tokens may have


def losses(given: argparse.Namespace, screen: Screen) -> Iterator[Found]:
    """Of each file. Raises as `evaluate`."""
    ready = open_and_load(given, screen, scores=True)
    try:
        for data in ready.sources:
            yield loss_on(ready.layers, data, ready.rows, ready.seq_len, ready.dtype, ready.waiting, screen)
    finally:
        ready.layers.close()


def open_and_load(given: argparse.Namespace, screen: Screen, logits: int = 0, scores: bool = False) -> Ready:
    """`logits`: rows of them in fp32 that a pass needs. `scores`: the model may have a score head.

    Raises as `evaluate`.
    """
    opened, codec = open_model(given, screen)
    if not scores:
        opened.refuse_head("it has no log-probabilities of tokens; `eval` says how good it is")
    cfg = opened.cfg
    seq_len = given.seq_len or min(2048, cfg.max_positions)
    if seq_len > cfg.max_positions:
        raise InputError(f"--seq-len {seq_len}: the model has {cfg.max_positions} positions. Lower it.")
    sources = [_read(name, codec, opened, given, seq_len, screen) for name in given.data]
    return load_for_data(given, opened, sources, seq_len, logits, cfg.vocab, screen)


def load_for_data(
    given: argparse.Namespace,
    opened: Opened,
    sources: list[Dataset],
    seq_len: int,
    logits: int,
    below: int,
    screen: Screen,
) -> Ready:
    """Reads the data and loads the layers. Raises as `evaluate`."""
    cfg, place = opened.cfg, device_and_dtype(given, opened)
    rows, dtype = rows_of(place[0], seq_len), DTYPE[place[1]]
    room = needs(cfg, rows * seq_len, dtype.itemsize) + 3 * 4 * logits * cfg.vocab
    layers = load_layers(given, opened, place, room, "a pass", screen)
    waiting = WAITING // (cfg.width * dtype.itemsize) if layers.pass_s else 0
    return Ready(opened, layers, sources, rows, seq_len, dtype, waiting, min(below, cfg.vocab))


def rows_of(device: torch.device, seq_len: int) -> int:
    """Sequences of a micro-batch."""
    return max(1, AT_ONCE // seq_len) if device.type == "cuda" else 1


def _read(name: str, codec: Codec, opened: Opened, given: argparse.Namespace, seq_len: int, screen: Screen) -> Dataset:
    """A source, and what the report says of it. Raises InputError."""
    began = time.monotonic()
    options = DataOptions(
        seq_len=seq_len, map=given.map, long=given.long, skip_bad=given.skip_bad, vocab_size=opened.cfg.vocab,
        media=opened.cfg.media, shelf=shelf(),
    )  # fmt: skip
    if opened.cfg.scores:
        pad = pad_in(read_raw(opened.base), codec.facts.pad)
        options = replace(options, kind=opened.kind, labels=opened.labels, pad=pad)
    far = lambda file, position, size: screen.far(f"reading {file}", position, size, began)
    data = load_dataset([name], codec, options, far)
    screen.clear()
    for i, line in enumerate(data.report.lines()):
        screen.say(f"{'' if i else 'data':9}{line}")
    return data


def needs(cfg: ModelConfig, tokens: int, itemsize: int) -> int:
    """Upper bound of the bytes that a pass of one micro-batch needs besides weights."""
    kinds = {shapes.kind(cfg, u): u for u in range(cfg.n_units)}
    temporaries = max(workspace.workspace_bytes(cfg, u, tokens, itemsize) for u in kinds.values())
    return temporaries + 3 * tokens * (cfg.width * itemsize + 64) + 16 * tokens * cfg.head_dim


def loss_on(
    layers: Layers, data: Dataset, rows: int, seq_len: int, dtype: torch.dtype, waiting: int, screen: Screen
) -> Found:
    """The result over all of `data`, with `rows` sequences a micro-batch. `waiting`: tokens that share a pass, at least
    those of a micro-batch.
    """
    tables = rope_tables(layers.cfg, seq_len, layers.device)
    found = Found(0.0, 0, 0, data.n_sequences, 0.0, layers.opened.kind)
    if data.kind == "rewards":
        return _rewards_on(layers, data, rows, tables, dtype, waiting, screen, found)
    correct = torch.zeros(1, dtype=torch.float64, device=layers.device)
    with screen.working("evaluating", data.tokens, "tokens") as more:
        for group in grouped(data.batches(rows), waiting):
            loss = sum(float(losses.double().sum()) for losses in _pass(layers, group, tables, dtype, correct))
            tokens = sum(len(mb.ids) for mb in group)
            labels = found.labels + sum(mb.trained for mb in group)
            found = found._replace(total=found.total + loss, labels=labels, tokens=found.tokens + tokens)
            more(tokens)
    return found._replace(correct=float(correct))


def _rewards_on(
    layers: Layers,
    data: Dataset,
    rows: int,
    tables: Tables,
    dtype: torch.dtype,
    waiting: int,
    screen: Screen,
    found: Found,
) -> Found:
    """As loss_on, of pairs."""
    with screen.working("evaluating", data.tokens, "tokens") as more:
        for group in grouped(data.batches(rows), waiting):
            docs = [docs for mb in group if (docs := documents_of(mb))]
            losses = _pass(layers, group, tables, dtype)
            scores = [of.sums(each.cpu().numpy()) for of, each in zip(docs, losses, strict=True)]
            made = compare(Preference("reward"), joined(docs), np.concatenate(scores))
            differ = made.rewards[::2] - made.rewards[1::2]
            tokens = sum(len(mb.ids) for mb in group)
            more(tokens)
            part = Found(float(made.losses.sum()), len(differ), tokens, 0, float((differ > 0).sum()), found.kind)
            found = found.plus(part._replace(margins=float(differ.sum())))
    return found


def grouped(batches: Iterator[MicroBatch], tokens: int) -> Iterator[list[MicroBatch]]:
    group: list[MicroBatch] = []
    for mb in batches:
        if group and sum(len(each.ids) for each in group) + len(mb.ids) > tokens:
            yield group
            group = []
        group.append(mb)
    if group:
        yield group


def _pass(
    layers: Layers,
    group: Sequence[MicroBatch],
    tables: Tables,
    dtype: torch.dtype,
    correct_: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Losses of the group's micro-batches, (N,) each; `correct_` as of head_loss."""
    found: list[torch.Tensor] = []

    def take(_: int, w: Any, embed: Any, x: torch.Tensor, mb: Any) -> None:
        found.append(losses_of(layers.cfg, w, embed, x, mb, correct_))

    forward(layers, group, tables, dtype, take)
    return found


Take = Callable[[int, Any, Any, torch.Tensor, Any], None]  # (micro-batch, head, embedding, its input, what it is of)


def forward(layers: Layers, group: Sequence[MicroBatch], tables: Tables, dtype: torch.dtype, take: Take) -> None:
    """A pass over all layers. `take` is called with each micro-batch's input of the head."""
    cfg, device = layers.cfg, layers.device
    inputs = [placed(in_ram(cfg, mb), [(tables, device)]).on(0) for mb in group]
    empty = lambda mb: torch.empty((len(mb.ids), cfg.width), dtype=dtype, device=device)
    xs, embed = list[torch.Tensor](), None
    for u, w in layers.units():
        embed = w if u == 0 else embed
        for b, mb in enumerate(inputs):
            if u == 0:
                xs.append(empty(mb))
                head.embed_forward(w, mb.ids, mb.rows, xs[b])
            elif u < cfg.n_units - 1:
                out = empty(mb)
                model.forward(cfg, u, w, xs[b], mb.rows, {}, out)
                xs[b] = out
            else:
                take(b, w, embed, xs[b], mb)


def losses_of(
    cfg: ModelConfig, w: Any, embed: Any, x: torch.Tensor, mb: Any, correct_: torch.Tensor | None = None
) -> torch.Tensor:
    """The losses of tokens, (N,) fp32. `correct_`: as of head_loss."""
    top = head.with_output(cfg, w, embed)
    return head.head_loss(cfg, top, x, mb.labels, mb.loss_rows, 1.0, correct_=correct_)

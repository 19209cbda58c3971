"""`trireme eval FOLDER --data FILE`: loss of a finished model on each file; perplexity, accuracy or margins."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trireme.engine.build import documents_of, in_ram, placed
from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.dataset import Dataset, MicroBatch, load_dataset
from trireme.engine.data.prepare import DataOptions, Kind
from trireme.engine.memory import DTYPE
from trireme.engine.run.begin.method import described, kind_of_data, preference_of
from trireme.engine.run.finished.found import Found, Judged
from trireme.engine.run.finished.layers import Layers, device_and_dtype, load_layers
from trireme.engine.run.finished.model import Opened, open_folder, open_model, say_left_out
from trireme.engine.run.finished.options import OF_METHODS
from trireme.engine.run.hub.fetch import folder_of
from trireme.engine.run.job import shared_tokens
from trireme.engine.run.options import Options
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.headed import pad_in
from trireme.engine.tuning.peft_config import CONFIG
from trireme.models import head, model
from trireme.models.config import InputError, ModelConfig, read_raw
from trireme.models.losses.preferences import COMPARED, Documents, Preference, joined
from trireme.models.rows import Tables, rope_tables
from trireme.models.sizes import shapes, workspace

AT_ONCE = 1 << 13  # tokens of a micro-batch, unless a sequence is longer
WAITING = 1 << 30  # bytes of activations between layers, where each pass reads the model's files


def evaluate(given: argparse.Namespace) -> int:
    """Returns the exit code. Raises InputError, CheckpointError, DoesNotFit, StoreError."""
    out, all_ = Screen(), list[Any]()
    for name, found in zip(given.data, losses(given, Screen(sys.stderr)), strict=True):
        out.say(f"eval     {name}: {found}")
        all_.append(found)
    if len(given.data) > 1:
        out.say(f"eval     all {len(given.data)} files: {reduce(lambda one, other: one.plus(other), all_)}")
    return 0


class Ready(NamedTuple):
    """The layers, loaded to compute with them on data."""

    layers: Layers
    rows: int  # sequences of a micro-batch
    seq_len: int
    dtype: torch.dtype
    tables: Tables
    waiting: int  # tokens that share a pass, at least a micro-batch's
    below: int  # ids that most likely tokens may have


def losses(given: argparse.Namespace, screen: Screen) -> Iterator[Found | Judged]:
    """The loss of each file. Raises as `evaluate`."""
    options = Options(**{name: getattr(given, name) for name in OF_METHODS})
    of = preference_of(options)
    if not of and given.label_smoothing is not None:  # in training it is also of the cross-entropy
        what = "--label-smoothing is for --method dpo or simpo: texts are evaluated without it"
        raise InputError(f"{what}. Leave it out.")
    if given.reference and not (of and of.compares):
        raise InputError(f"--reference is for --method {', '.join(COMPARED)}. Leave it out.")
    reference = given.reference and folder_of(given.reference, screen)
    if reference and not Path(reference).is_dir():  # before the data is read
        raise InputError(f"--reference {reference}: no such folder. Name the model before training.")
    opened, sources, seq_len = open_and_read(given, screen, True, kind_of_data(options))
    if opened.kind == "rewards":
        of = Preference("reward")
    if of and of.compares:
        sources = _with_reference(given, reference, opened, sources, seq_len, screen)
    ready = load_for_data(given, opened, sources[0].options.room, 0, opened.cfg.vocab, screen)
    if of and not opened.kind:
        screen.say(f"method   {described(of)}")
    try:
        for data in sources:
            if of:
                docs, logps = _logps(ready, data, "evaluating", screen)
                yield Judged(of, docs, logps, data.tokens)
            else:
                yield loss_on(ready, data, screen)
    finally:
        ready.layers.close()


def open_and_read(
    given: argparse.Namespace, screen: Screen, scores: bool, kind: Kind = ""
) -> tuple[Opened, list[Dataset], int]:
    """The model, the data for it, and --seq-len. `scores`: it may have a score head. `kind`: by --method.

    Raises as `evaluate`.
    """
    opened = open_model(given, screen)
    codec_of = opened.codec_if_any if scores else opened.codec  # scores name their tokenizer
    codec = codec_of(given.tokenizer, given.chat_template)
    if not scores:
        opened.refuse_head("it has no log-probabilities of tokens; `eval` says how good it is")
    say_left_out(opened.run, given, "data is read", screen.warn)
    if kind:
        opened.refuse_head(f"leave --method {given.method} out, `eval` sees what it is")
    cfg, kind = opened.cfg, kind or opened.kind
    seq_len = given.seq_len or min(2048, cfg.max_positions)
    if seq_len > cfg.max_positions:
        raise InputError(f"--seq-len {seq_len}: the model has {cfg.max_positions} positions. Lower it.")
    return opened, [_read(name, codec, opened, given, seq_len, kind, screen) for name in given.data], seq_len


def load_for_data(
    given: argparse.Namespace, opened: Opened, seq_len: int, logits: int, below: int, screen: Screen
) -> Ready:
    """Loads the layers, to compute with them on data that was read for `seq_len`. `below`: as in Ready. `logits`: rows
    of fp32 logits that a pass needs. Raises as `evaluate`.
    """
    cfg, place = opened.cfg, device_and_dtype(given, opened)
    rows, dtype = rows_of(place[0], seq_len), DTYPE[place[1]]
    room = needs(cfg, rows * seq_len, dtype.itemsize) + 3 * 4 * logits * cfg.vocab
    layers = load_layers(given, opened, place, room, "a pass", screen)
    waiting = WAITING // (cfg.width * dtype.itemsize) if layers.pass_s else 0
    tables = rope_tables(layers.cfg, seq_len, layers.device)
    return Ready(layers, rows, seq_len, dtype, tables, waiting, min(below, cfg.vocab))


def rows_of(device: torch.device, seq_len: int) -> int:
    """Number of sequences of a micro-batch."""
    return max(1, AT_ONCE // seq_len) if device.type == "cuda" else 1


def _read(
    name: str, codec: Codec | None, opened: Opened, given: argparse.Namespace, seq_len: int, kind: Kind, screen: Screen
) -> Dataset:
    """A source of data, and its lines of the report. Raises InputError."""
    began = time.monotonic()
    options = DataOptions(
        seq_len=seq_len, map=given.map, long=given.long, skip_bad=given.skip_bad, vocab_size=opened.cfg.vocab,
        media=opened.cfg.media, shared=shared_tokens(), kind=kind, system=given.system,
        variables=json.loads(given.chat_template_kwargs or "{}"),
    )  # fmt: skip
    if opened.cfg.scores:
        pad = pad_in(read_raw(opened.base), codec.facts.pad if codec else None)
        options = replace(options, labels=opened.labels, pad=pad)
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
    return temporaries + 3 * tokens * (cfg.width * itemsize + 64) + 16 * tokens * cfg.widest_head


def loss_on(ready: Ready, data: Dataset, screen: Screen) -> Found:
    """The result over all of `data`."""
    layers = ready.layers
    found = Found(0.0, 0, 0, data.n_sequences, 0.0, bool(layers.opened.kind), 0.0 if data.weighted else None)
    correct = torch.zeros(1, dtype=torch.float64, device=layers.device)
    with screen.working("evaluating", data.tokens, "tokens") as more:
        for group in grouped(data.batches(ready.rows), ready.waiting):
            loss = sum(float(losses.double().sum()) for losses in _pass(ready, group, correct))
            weight = sum(in_ram(layers.cfg, mb).weight for mb in group) if data.weighted else None
            counts = sum(mb.trained for mb in group), sum(len(mb.ids) for mb in group)
            found = found.plus(Found(loss, *counts, 0, 0.0, found.classes, weight))
            more(counts[1])
    return found._replace(correct=float(correct))


# ---------------------------------------------------------------- answers that are compared


def _logps(ready: Ready, data: Dataset, what: str, screen: Screen) -> tuple[Documents, np.ndarray]:
    """Of all documents of `data`, in order: what they are, and the logps, (documents,), that `compare` takes."""
    docs, logps = list[Documents](), list[np.ndarray]()
    with screen.working(what, data.tokens, "tokens") as more:
        for group in grouped(data.batches(ready.rows), ready.waiting):
            of = [each for mb in group if (each := documents_of(mb))]
            losses = _pass(ready, group)
            docs += of
            logps += [each.sums(found.cpu().numpy()) for each, found in zip(of, losses, strict=True)]
            more(sum(len(mb.ids) for mb in group))
    return joined(docs), np.concatenate(logps)


def _with_reference(
    given: argparse.Namespace,
    reference: str | None,
    opened: Opened,
    sources: list[Dataset],
    seq_len: int,
    screen: Screen,
) -> list[Dataset]:
    """The data with log-probabilities of `reference`, the folder of --reference, else of what the run began with.

    Raises as `evaluate`.
    """
    path, kept = Path(given.folder), opened.run
    began = reference or kept.get("adapter") or (str(opened.base) if opened.adapter else kept.get("model"))
    if not began or not Path(began).is_dir():
        which = f"{began}, which is not a folder here" if began else f"which {path} does not name"
        raise InputError(f"--method {given.method} compares with the model before training, {which}: --reference DIR.")
    base = str(opened.base) if (Path(began) / CONFIG).is_file() and opened.adapter else ""
    before = open_folder(began, base, screen.warn, kept.get("rope_factor"))
    before.refuse_head("it is no --reference of preferences")
    if before.cfg.vocab < opened.cfg.vocab or before.cfg.max_positions < seq_len:
        what = f"{before.cfg.vocab:,} tokens and {before.cfg.max_positions:,} positions, too few for this model's data"
        raise InputError(f"--reference {began} has {what}. Name what the model was trained from.")
    if reference and (codec := load_codec(before.tokenizer, "plain")):
        _refuse_other_tokens(reference, codec, sources)
    screen.say(f"compared with {began}:")
    ready = load_for_data(given, before, sources[0].options.room, 0, before.cfg.vocab, screen)
    try:
        return [replace(data, reference=_logps(ready, data, "the reference", screen)[1]) for data in sources]
    finally:
        ready.layers.close()


def _refuse_other_tokens(reference: str, codec: Codec, sources: Sequence[Dataset]) -> None:
    """Raises InputError if an id in the data is another token to the reference, by its `codec`.

    Both models read the same ids. So that it would cut up a text in another way does not matter, nor does a reserved
    token that has got a name in one of them: neither name has another id in the other.
    """
    of_data = sources[0].codec
    ours, theirs = (each.tokens() if each else {} for each in (of_data, codec))
    names, other = ({i: token for token, i in ids.items()} for ids in (ours, theirs))
    used = {int(i) for data in sources for mb in data.batches(1) for i in np.unique(mb.ids)}
    for i in sorted(used & names.keys() & other.keys()):
        if names[i] != other[i] and (names[i] in theirs or other[i] in ours):
            what = f"token {i} is {other[i]!r} there, and {names[i]!r} in the data"
            raise InputError(
                f"--reference {reference} has another tokenizer: {what}. Name what the model was trained from."
            )


def grouped(batches: Iterator[MicroBatch], tokens: int) -> Iterator[list[MicroBatch]]:
    group: list[MicroBatch] = []
    for mb in batches:
        if group and sum(len(each.ids) for each in group) + len(mb.ids) > tokens:
            yield group
            group = []
        group.append(mb)
    if group:
        yield group


def _pass(ready: Ready, group: Sequence[MicroBatch], correct_: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Losses of the tokens of each micro-batch in the group, (N,) fp32 each, times the weights of rows; `correct_`: as
    in head_loss.
    """
    found: list[torch.Tensor] = []

    def take(_: int, w: Any, embed: Any, x: torch.Tensor, mb: Any) -> None:
        losses = losses_of(ready.layers.cfg, w, embed, x, mb, correct_)
        found.append(losses if mb.factors is None else losses * mb.factors)

    forward(ready, group, take)
    return found


Take = Callable[[int, Any, Any, torch.Tensor, Any], None]  # (micro-batch, head, embedding, its input, what it is of)


def forward(ready: Ready, group: Sequence[MicroBatch], take: Take) -> None:
    """A pass over all layers. `take` is called with each micro-batch's input of the head."""
    layers, cfg, device = ready.layers, ready.layers.cfg, ready.layers.device
    inputs = [placed(in_ram(cfg, mb), [(ready.tables, device)]).on(0) for mb in group]
    empty = lambda mb: torch.empty((len(mb.ids), cfg.width), dtype=ready.dtype, device=device)
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
    """The loss of each token, (N,) fp32; `correct_`: as in head_loss."""
    top = head.with_output(cfg, w, embed)
    return head.head_loss(cfg, top, x, mb.labels, mb.loss_rows, 1.0, factors=mb.factors, correct_=correct_)

"""`trireme score FOLDER --data FILE --out DIR`: writes a model's log-probabilities of data to files.

DIR/scores.json names model, vocabulary and data, its files of tokens by key with their numbers of documents.
DIR/000/part-00000.safetensors and so on are of the first --data, in order:

    document  (n,) I64   index of the document in the order of reading; a long one may be in several pieces
    start     (n,) I64   position of the piece's first token in the document
    length    (n,) I64   number of tokens of the piece
    trained   (n,) I64   number of labels: trained tokens, except the piece's first
    logp      (n,) F64   sum of their log-probabilities

and with --top-k K, of all M labels of these pieces one after another:

    label     (M,) I32   the labels
    ids       (M, K) I32  the K most likely tokens
    logps     (M, K) F16  their log-probabilities
    rest      (M,) F32   logarithm of the probability of all others

A part's metadata has `key`, equal in all of a source, `first`, its first micro-batch, `batches`, how many it holds, and
`sum`, the checksum of these and of its tensors. The same command continues after the parts that are complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trireme.engine.amounts import count
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset, MicroBatch
from trireme.engine.data.taught import FORMAT, NAMES, part_sum, places_of
from trireme.engine.run.finished import evaluate
from trireme.engine.run.finished.evaluate import Ready
from trireme.engine.run.finished.found import Found
from trireme.engine.run.finished.model import Opened
from trireme.engine.run.output.folder import locked
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.base import stamps
from trireme.models import head
from trireme.models.config import InputError
from trireme.storage.files import partial_of, replace_synced
from trireme.storage.untrusted import parse_json, read_small

PART = 1 << 26  # bytes of a part, about


def score(given: argparse.Namespace) -> int:
    """Runs the command; returns the exit code. Raises InputError, CheckpointError, DoesNotFit, StoreError."""
    out, say = Screen(), Screen(sys.stderr)
    folder = Path(given.out)
    opened, sources, seq_len = evaluate.open_and_read(given, say, False)
    busy = f"--out {folder}: another process writes scores there. Wait for its end, or name another folder."
    with ExitStack() as stack:
        stack.enter_context(locked(folder, busy))
        names = _names(folder, given, opened, sources)
        vocab, logits = opened.cfg.vocab, head.TOP_CHUNK if given.top_k else 0
        ready = evaluate.load_for_data(given, opened, seq_len, logits, vocab, say)
        stack.callback(ready.layers.close)
        replace_synced(folder / NAMES, json.dumps(names, indent=1).encode())  # first: with it the folder is known
        all_ = Found(0.0, 0, 0, 0)
        for i, (name, data) in enumerate(zip(given.data, sources, strict=True)):
            found = score_source(ready, data, folder / f"{i:03}", given.top_k or 0, say)
            out.say(f"score    {name}: {found}")
            all_ = all_.plus(found)
    if len(given.data) > 1:
        out.say(f"score    all {len(given.data)} files: {all_}")
    out.say(f"output   {folder}/: {count(len(list(folder.glob('*/*.safetensors'))), 'part')}, scores.json")
    return 0


def _names(folder: Path, given: argparse.Namespace, opened: Opened, sources: Sequence[Dataset]) -> dict[str, Any]:
    """The content of scores.json. Raises InputError if the folder has scores of something else, or other files."""
    codec = sources[0].codec
    assert codec is not None
    named = list(zip(given.data, sources, strict=True))
    said = described(Path(given.folder), min(given.top_k or 0, opened.cfg.vocab), codec, named)
    path = folder / NAMES
    try:
        before = parse_json(read_small(path, links=True), "file") if path.is_file() else said
    except ValueError:
        before = None
    if before != said:
        raise InputError(f"--out {folder} holds scores of another model or of other data. Name another folder.")
    if not path.is_file() and {*folder.iterdir()} - {partial_of(path)}:
        raise InputError(f"--out {folder} is not empty. Name another folder.")
    return said


def described(model: Path, k: int, codec: Codec, sources: Sequence[tuple[str, Dataset]]) -> dict[str, Any]:
    """The content of scores.json."""
    said = {"format": FORMAT, "model": str(model.resolve()), "tokenizer": codec.vocabulary()}
    files = [{file.meta["key"]: file.n_documents for file in data.files} for _, data in sources]
    each = [{"data": name, "folder": f"{i:03}", "files": files[i]} for i, (name, _) in enumerate(sources)]
    return said | {"top_k": k, "sources": each}


# ---------------------------------------------------------------- a source


@dataclass
class Part:
    """Scores that are not written yet."""

    first: int  # micro-batch
    pieces: list[dict[str, np.ndarray]] = field(default_factory=list)  # of micro-batches
    nbytes: int = 0

    def add(self, scores: dict[str, np.ndarray]) -> None:
        self.pieces.append(scores)
        self.nbytes += sum(each.nbytes for each in scores.values())

    def write(self, path: Path, key: str) -> None:
        tensors = {name: np.concatenate([each[name] for each in self.pieces]) for name in self.pieces[0]}
        said = {"format": FORMAT, "key": key, "first": str(self.first), "batches": str(len(self.pieces))}
        replace_synced(path, save(tensors, said | {"sum": part_sum(said, tensors)}))
        self.first, self.pieces, self.nbytes = self.first + len(self.pieces), [], 0


def score_source(ready: Ready, data: Dataset, folder: Path, k: int, screen: Screen, most: int = PART) -> Found:
    """Writes the parts that are missing; returns the loss of all. Raises InputError, StoreError."""
    layers = ready.layers
    key = key_of(layers.opened, data, layers.device.type, ready.dtype, ready.rows, ready.seq_len, k, ready.below)
    folder.mkdir(parents=True, exist_ok=True)
    parts, done, found = _written_parts(folder, key, data.n_sequences)
    batches, waiting, at = data.batches(ready.rows), Part(done), 0  # at: pieces before
    with screen.working("scoring", data.tokens, "tokens") as more:
        for mb in islice(batches, done):
            at += len(mb.lengths)
            more(len(mb.ids))
        for group in evaluate.grouped(batches, ready.waiting):
            for scores in _scores(ready, data, group, at, k):
                waiting.add(scores)
                found = _with(found, scores)
            at += sum(len(mb.lengths) for mb in group)
            more(sum(len(mb.ids) for mb in group))
            if waiting.nbytes >= most:
                waiting.write(folder / f"part-{parts:05}.safetensors", key)
                parts += 1
        if waiting.pieces:
            waiting.write(folder / f"part-{parts:05}.safetensors", key)
    return found


def _with(found: Found, scores: Any) -> Found:
    total, labels, tokens = (scores[name].sum() for name in ("logp", "trained", "length"))
    return found.plus(Found(-float(total), int(labels), int(tokens), 0))


def _written_parts(folder: Path, key: str, sequences: int) -> tuple[int, int, Found]:
    """(number of parts, micro-batches in them, their loss). Raises InputError if they are of something else."""
    parts, done, found = 0, 0, Found(0.0, 0, 0, sequences)
    while (path := folder / f"part-{parts:05}.safetensors").is_file():
        try:
            with safe_open(path, "numpy") as file:
                said = file.metadata() or {}
                names = file.keys() if said.get("key") == key else ()
                scores = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, TypeError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}). Remove it and those behind it.") from None
        if said.get("key") != key:
            raise InputError(f"{path} is of another model, of other data or options. Name another --out.")
        if "sum" not in said:
            raise InputError(f"{path} is of an older version, without a checksum. Remove it and those behind it.")
        if said.get("first") != str(done) or said.get("sum") != part_sum(said, scores):
            raise InputError(f"{path} is damaged, or has another's name. Remove it and those behind it.")
        parts, done, found = parts + 1, done + int(said["batches"]), _with(found, scores)
    return parts, done, found


def key_of(
    opened: Opened, data: Dataset, device: str, dtype: torch.dtype, rows: int, seq_len: int, k: int, below: int
) -> str:
    """The key of the weights (by paths, sizes and times of their files), the data, and all that decides the numbers.

    Paths are absolute, since config.yaml has the teacher's absolute path while a command may have a relative one.
    """
    found = stamps(opened.source) | (stamps(opened.adapter.source) if opened.adapter else {})
    files = {str(path.parent.resolve() / path.name): stamp for path, stamp in found.items()}
    said = [files, data.fingerprint, str(dtype), rows, seq_len, k, device]
    said += [below] if below < opened.cfg.vocab else []
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]


def _scores(ready: Ready, data: Dataset, group: Sequence[MicroBatch], at: int, k: int) -> list[dict[str, np.ndarray]]:
    """The tensors of a part, of each micro-batch. `at`: the number of the first piece."""
    cfg, found = ready.layers.cfg, list[dict[str, np.ndarray]]()

    def take(b: int, w: Any, embed: Any, x: torch.Tensor, mb: Any) -> None:
        labels, lengths = group[b].labels, np.array(group[b].lengths, np.int64)
        starts, first = np.cumsum(lengths) - lengths, at + sum(len(before.lengths) for before in group[:b])
        places = places_of(data.files, data.pieces[first : first + len(lengths)])
        losses = evaluate.losses_of(cfg, w, embed, x, mb).cpu().numpy().astype(np.float64)
        scores = {
            "document": places[:, 0].copy(),
            "start": places[:, 1].copy(),
            "length": lengths,
            "trained": np.add.reduceat((labels >= 0).astype(np.int64), starts),
            "logp": -np.add.reduceat(losses, starts),
        }
        if k:
            most = ready.below
            top = head.head_top(cfg, head.with_output(cfg, w, embed), x, mb.loss_rows, min(k, most), most)
            ids, logps, rest = (each.cpu().numpy() for each in top)
            lowest = np.finfo(np.float16).min
            scores |= {"label": labels[labels >= 0].astype(np.int32), "ids": ids.astype(np.int32)}
            scores |= {"logps": np.maximum(logps, lowest).astype(np.float16), "rest": rest.astype(np.float32)}
        found.append(scores)

    evaluate.forward(ready, group, take)
    return found

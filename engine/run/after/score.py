"""`trireme score FOLDER --data FILE --out DIR`: what a finished model says of each row, in files.

A classifier's labels and a reward model's rewards are rows of DIR/000.jsonl and so on, one file for each --data:
{"row": 0, "label": "play", "probability": 0.93, "probabilities": {...}} or {"row": 0, "reward": 1.25}.

Of a language model DIR/scores.json names model, vocabulary and data; DIR/000/part-00000.safetensors and so on have:

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
`sum`, the checksum of these and of its tensors. The same command computes the parts that are not there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trireme.engine.amounts import count
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset
from trireme.engine.data.taught import FORMAT, NAMES, document_places, part_sum
from trireme.engine.layers import head_losses
from trireme.engine.run import screen
from trireme.engine.run.after import opened
from trireme.engine.run.after.opened import Finished
from trireme.engine.run.evaluate import Evaluator
from trireme.engine.run.options import Options, Score
from trireme.engine.tuning.base import stamps
from trireme.models import head
from trireme.models.config import InputError
from trireme.models.losses.micro_batch import MicroBatch
from trireme.storage.files import replace_synced

PART = 1 << 26  # bytes of a part, at most about
LONGEST = 256  # micro-batches of a part
LEAST_F16 = np.finfo(np.float16).min
PartTables = dict[str, np.ndarray]  # as a part's


def run(o: Score) -> None:
    """The command. Results go to standard output, all other lines to standard error."""
    if not o.data or not o.out:
        raise InputError("score needs --data FILE and --out DIR.")
    folder = Path(o.out)
    with screen.to(sys.stderr):
        f = opened.open_finished(o.folder, o.model)
        o = opened.with_defaults(f, o)
        codec = f.codec(o)
        if f.cfg.scores:
            lines = [*_write_answers(f, o, codec, folder)]
        else:
            sources = {name: opened.read_as_run(f, o, codec, name, "") for name in o.data}
            lines = _write_scores(f, o, folder, sources, o.top_k, f.cfg.vocab)
    for line in lines:
        screen.say(f"score    {line}")
    screen.say(f"output   {folder}/: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def teach(folder: Path, teacher: Path, sources: Mapping[str, Dataset], k: int, below: int, options: Options) -> None:
    """The teacher's pass before a run: the k most likely tokens among ids less than `below`, of sources by name, into
    `folder`. A pass that was killed goes on. Raises InputError, CheckpointError, DoesNotFit, StoreError.
    """
    f = opened.open_finished(str(teacher))
    f.refuse_scores("it is no teacher")
    for data in sources.values():
        data.check_model(f.cfg.vocab, f.cfg.max_positions, f"--teacher {teacher}")
    _write_scores(f, options, folder, sources, k, below)


# ---------------------------------------------------------------- labels and rewards


def _write_answers(f: Finished, o: Score, codec: Codec | None, folder: Path) -> Iterator[str]:
    """Writes a label or a reward for each row; yields a line for each file. Raises InputError if one is there."""
    files = {folder / f"{i:03}.jsonl": name for i, name in enumerate(o.data)}
    if existing := next((path for path in files if path.exists()), None):
        raise InputError(f"{existing} is there already. Name another folder.")
    sources = [opened.read_as_run(f, o, codec, name, "classes", labelled=False) for name in o.data]
    folder.mkdir(parents=True, exist_ok=True)
    with opened.computing(f, o, sources[0].options.room) as e:
        for (path, name), data in zip(files.items(), sources, strict=True):
            records, bad = _records(f, e, data), sum(file.meta["bad"] for file in data.files)
            replace_synced(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())
            yield f"{name}: {count(len(records), 'row')}{', numbered without bad ones' if bad else ''}"


def _records(f: Finished, e: Evaluator, data: Dataset) -> list[dict[str, Any]]:
    """What the model says of each row, in their order."""
    scores, records = list[torch.Tensor](), list[dict[str, Any]]()

    def take(_: int, packed: Any, top: Any, x: torch.Tensor) -> None:
        y, _stats = head.final_norm(f.cfg, top, x[packed.loss_rows])
        scores.append((y.float() @ top.matrix.float().T).cpu())  # (documents, labels)

    with screen.working("scoring", data.tokens, "tokens") as scored:
        for mb in data.batches(e.rows):
            e.read_head([mb], take)
            scored(len(mb.ids))
    rows = document_places(data.files, data.pieces)[:, 0].tolist()
    for row, values in sorted(zip(rows, torch.cat(scores).double(), strict=True), key=lambda pair: pair[0]):
        if f.cfg.scores == 1:
            records.append({"row": row, "reward": float(values)})
        else:
            chances = values.softmax(0).tolist()
            answer = {"label": f.labels[chances.index(max(chances))], "probability": max(chances)}
            records.append({"row": row, **answer, "probabilities": dict(zip(f.labels, chances, strict=True))})
    return records


# ---------------------------------------------------------------- log-probabilities


def _write_scores(
    f: Finished, o: Score | Options, folder: Path, sources: Mapping[str, Dataset], k: int, below: int
) -> list[str]:
    """Writes the parts that are not there of sources by name; returns a line for each. The k most likely tokens are
    among ids less than `below`. Raises InputError if the folder holds other scores.
    """
    first, lines = next(iter(sources.values())), list[str]()
    below = min(below, f.cfg.vocab, first.codec.facts.vocab_size if first.codec else below)  # no padded rows of output
    k, vocabulary, seq_len = min(k, below), first.codec.vocabulary() if first.codec else "", first.options.room
    content = {"format": FORMAT, "model": str(Path(f.name).resolve()), "tokenizer": vocabulary, "top_k": k}
    files = [{file.meta["key"]: file.n_documents for file in data.files} for data in sources.values()]
    listed = [{"data": name, "folder": f"{i:03}", "files": files[i]} for i, name in enumerate(sources)]
    path, claim = folder / NAMES, json.dumps(content | {"sources": listed}, indent=1).encode()
    if path.exists() and path.read_bytes() != claim:
        raise InputError(f"{path} is of another model, data or options. Name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    replace_synced(path, claim)
    with opened.computing(f, o, seq_len) as e:
        for i, (name, data) in enumerate(sources.items()):
            total, labels = ScorePass(f, e, data, folder / f"{i:03}", k, below).write()
            lines.append(f"{name}: loss {-total / max(1, labels):.4f} of {count(labels, 'label')}")
    return lines


@dataclass(frozen=True)
class ScorePass:
    """A pass over a source of data."""

    f: Finished
    e: Evaluator
    data: Dataset
    folder: Path
    k: int  # most likely tokens
    below: int  # among ids less than this

    def write(self) -> tuple[float, int]:
        """Writes the parts that are not there; returns (sum of log-probabilities, number of labels) of all."""
        self.folder.mkdir(exist_ok=True)
        token = 4 + 6 * self.k  # bytes
        n = max(1, min(LONGEST, PART // (token * self.e.rows * self.e.seq_len)))  # micro-batches of a part
        batches, first, position, total, labels = self.data.batches(self.e.rows), 0, 0, 0.0, 0
        with screen.working("scoring", self.data.tokens, "tokens") as scored:
            while group := list(islice(batches, n)):
                path = self.folder / f"part-{first // n:05}.safetensors"
                tables = self._read(path, first) or self._write(path, group, first, position)
                first, position = first + len(group), position + sum(len(mb.lengths) for mb in group)
                total, labels = total + float(tables["logp"].sum()), labels + int(tables["trained"].sum())
                scored(sum(len(mb.ids) for mb in group))
        return total, labels

    @cached_property
    def key(self) -> str:
        """The key of the weights (by paths, sizes and times of their files), the data, and all that decides numbers."""
        files = stamps(self.f.source) | (stamps(self.f.adapter.source) if self.f.adapter else {})
        weights = {str(path.parent.resolve() / path.name): stamp for path, stamp in files.items()}
        e, device = self.e, self.e.e.queues.devices[0].type
        decides = [weights, self.data.fingerprint, e.e.plan.dtype, e.rows, e.seq_len, self.k, device, self.below]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:24]

    def _read(self, path: Path, first: int) -> PartTables:
        """A part that begins with the micro-batch `first`; {} if it is not there, or damaged. Raises InputError."""
        metadata, tables = dict[str, str](), PartTables()
        with suppress(SafetensorError, TypeError, ValueError, OSError), safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        if not tables or metadata.get("sum") != part_sum(metadata, tables):
            return {}
        if metadata.get("key") != self.key or metadata.get("first") != str(first):
            raise InputError(f"{path} is of another model, of other data or options. Name another --out.")
        return tables

    def _write(self, path: Path, group: Sequence[MicroBatch], first: int, position: int) -> PartTables:
        """Computes a part and writes it. `position`: the number of its first piece."""
        parts = dict[int, PartTables]()
        starts = np.cumsum([position, *(len(mb.lengths) for mb in group)]).tolist()

        def take(b: int, packed: Any, top: Any, x: torch.Tensor) -> None:
            parts[b] = self._tables(group[b], starts[b], packed, top, x)

        self.e.read_head(group, take)
        tables = {name: np.concatenate([parts[i][name] for i in range(len(group))]) for name in parts[0]}
        metadata = {"format": FORMAT, "key": self.key, "first": str(first), "batches": str(len(group))}
        replace_synced(path, save(tables, metadata | {"sum": part_sum(metadata, tables)}))
        return tables

    def _tables(self, mb: MicroBatch, position: int, packed: Any, top: Any, x: torch.Tensor) -> PartTables:
        """The tables of a micro-batch, whose first piece has the number `position`."""
        cfg, labels, lengths = self.e.e.cfg, mb.labels, np.array(mb.lengths, np.int64)
        starts = np.cumsum(lengths) - lengths
        places = document_places(self.data.files, self.data.pieces[position : position + len(lengths)])
        losses = head_losses(cfg, packed._replace(factors=None), top, x).cpu().numpy().astype(np.float64)
        tables = {"document": places[:, 0].copy(), "start": places[:, 1].copy(), "length": lengths}
        tables["trained"] = np.add.reduceat((labels >= 0).astype(np.int64), starts)
        tables["logp"] = -np.add.reduceat(losses, starts)
        if self.k:
            tops = head.head_top(cfg, top, x, packed.loss_rows, self.k, self.below)
            ids, logps, rest = (t.cpu().numpy() for t in tops)
            tables |= {"label": labels[labels >= 0].astype(np.int32), "ids": ids.astype(np.int32)}
            tables |= {"logps": np.maximum(logps, LEAST_F16).astype(np.float16), "rest": rest.astype(np.float32)}
        return tables

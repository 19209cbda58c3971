"""`trireme score FOLDER --data FILE --out DIR`: what a finished model says of each row, in files.

A classifier's labels and a reward model's rewards are rows of DIR/000.jsonl and so on, one file for each --data:
{"row": 0, "label": "play", "probability": 0.93, "probabilities": {...}} or {"row": 0, "reward": 1.25}.

Of a language model DIR/scores.json names model, vocabulary and data; DIR/000/part-00000.safetensors and so on have, in
order:

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

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trireme.engine.amounts import count
from trireme.engine.build import in_ram
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset
from trireme.engine.data.find import Rows, find
from trireme.engine.data.read import BadRow
from trireme.engine.data.taught import FORMAT, NAMES, part_sum, places_of
from trireme.engine.layers import head_losses
from trireme.engine.run import screen
from trireme.engine.run.after.opened import Finished, computing, open_finished, read_rows, rows_of, with_defaults
from trireme.engine.run.evaluate import Evaluator
from trireme.engine.run.options import Options, Score
from trireme.engine.step import forward
from trireme.engine.tuning.base import stamps
from trireme.models import head
from trireme.models.config import InputError, ModelConfig
from trireme.storage.files import as_store_error, replace_synced
from trireme.storage.temporary import Temporary
from trireme.storage.untrusted import parse_json, read_small

PART = 1 << 26  # bytes of a part, about


def run(o: Score) -> int:
    """The command. Results go to standard output, all other lines to standard error."""
    if not o.data or not o.out:
        raise InputError("score needs --data FILE and --out DIR.")
    folder = Path(o.out)
    with screen.to(sys.stderr):
        f = open_finished(o.folder, o.model)
        o = with_defaults(f, o)
        codec = f.codec(o)
        if f.cfg.scores:
            lines = list(_classified(f, o, codec, folder))
        else:
            sources = {f"{i:03}": read_rows(f, o, codec, name, "") for i, name in enumerate(o.data)}
            with computing(f, o, rows := rows_of(o, o.seq_len or _seq_len(sources)), _seq_len(sources)) as e:
                assert e.rows == rows
                names = dict(zip(sources, o.data, strict=True))
                lines = list(_written(f, e, folder, sources, names, min(o.top_k, f.cfg.vocab), f.cfg.vocab))
    for line in lines:
        screen.say(f"score    {line}")
    screen.say(f"output   {folder}/: {', '.join(sorted({path.name for path in folder.iterdir()}))}")
    return 0


def write(folder: Path, teacher: Path, sources: Mapping[str, Dataset], k: int, below: int, options: Options) -> None:
    """The teacher's pass before a run: the k most likely tokens among ids less than `below`, of sources by name, into
    `folder`. A pass that was killed goes on. Raises InputError, CheckpointError, DoesNotFit, StoreError.
    """
    f = open_finished(str(teacher))
    f.refuse_scores("it is no teacher")
    seq_len = _seq_len(sources)
    for data in sources.values():
        data.check_model(f.cfg.vocab, f.cfg.max_positions, f"--teacher {teacher}")
    with computing(f, options, rows_of(options, seq_len), seq_len) as e:
        names = {name: name for name in sources}
        for _ in _written(f, e, folder, sources, names, min(k, below, f.cfg.vocab), min(below, f.cfg.vocab)):
            pass


def _seq_len(sources: Mapping[str, Dataset]) -> int:
    return next(iter(sources.values())).options.room


# ---------------------------------------------------------------- labels and rewards


def _classified(f: Finished, o: Score, codec: Codec, folder: Path) -> Iterator[str]:
    """Writes a row for each row of the data; yields a line for each file."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(o.data):
        with labelled(name, f.labels) as path:
            data = read_rows(f, o, codec, name, "classes", str(path))
        seq_len, numbers, at = data.options.room, list[np.ndarray](), 0
        with (
            computing(f, o, rows_of(o, seq_len), seq_len) as e,
            screen.working("scoring", data.tokens, "tokens") as told,
        ):
            for mb in data.batches(e.rows):
                rows = places_of(data.files, data.pieces[at : at + len(mb.lengths)])[:, 0]
                at += len(mb.lengths)
                take = partial(_take_scores, e.e.cfg, rows, numbers)
                for task in forward(e.e, [e.inputs(in_ram(e.e.cfg, mb))], take):
                    task.wait()
                told(len(mb.ids))
        table = np.concatenate(numbers)
        records = [_record(int(row), scores, f) for row, *scores in table[table[:, 0].argsort(kind="stable")].tolist()]
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        replace_synced(folder / f"{i:03}.jsonl", lines.encode())
        if f.cfg.scores == 1:
            yield f"{name}: {count(len(records), 'row')}, mean reward {table[:, 1].mean():.4f}"
        else:
            most = [record["label"] for record in records]
            yield f"{name}: {', '.join(f'{label} {most.count(label)}' for label in f.labels)}"


def _take_scores(
    cfg: ModelConfig, rows: np.ndarray, numbers_: list[np.ndarray], _: int, packed: Any, top: Any, x: torch.Tensor
) -> None:
    """Adds (row, scores of its last token), (documents, 1 + labels), of a micro-batch."""
    y, _stats = head.final_norm(cfg, top, x[packed.loss_rows])
    scores = y.float() @ top.matrix.float().T
    numbers_.append(np.concatenate([rows[:, None], scores.cpu().numpy()], axis=1))


def _record(row: int, scores: Sequence[float], f: Finished) -> dict[str, Any]:
    if f.cfg.scores == 1:
        return {"row": row, "reward": scores[0]}
    chances = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    best = max(range(len(chances)), key=chances.__getitem__)
    every = dict(zip(f.labels, chances, strict=True))
    return {"row": row, "label": f.labels[best], "probability": chances[best], "probabilities": every}


@contextmanager
def labelled(name: str, labels: Sequence[str]) -> Iterator[Path]:
    """A file with the rows of `name`, each with a label, which reading rows of a score head needs."""
    with Temporary("trireme-rows-") as folder:
        path = folder / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for source in find(name).files:
                for row in Rows(source.files):
                    if isinstance(row.value, BadRow):
                        raise InputError(f"{name} line {row.number}: {row.value}")
                    value = {key: v for key, v in row.value.items() if key not in ("label", "labels")}
                    file.write(json.dumps(value | {"label": labels[0]}, ensure_ascii=False, default=str) + "\n")
        yield path


# ---------------------------------------------------------------- log-probabilities


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


def _written(
    f: Finished,
    e: Evaluator,
    folder: Path,
    sources: Mapping[str, Dataset],
    names: Mapping[str, str],
    k: int,
    below: int,
) -> Iterator[str]:
    """Writes the parts that are missing; yields a line for each source. `names`: of the sources' folders."""
    codec = next(iter(sources.values())).codec
    assert codec is not None
    said = {"format": FORMAT, "model": str(Path(f.name).resolve()), "tokenizer": codec.vocabulary(), "top_k": k}
    files = {name: {file.meta["key"]: file.n_documents for file in data.files} for name, data in sources.items()}
    said["sources"] = [{"data": names[name], "folder": name, "files": files[name]} for name in sources]
    path = folder / NAMES
    if folder.is_dir() and any(folder.iterdir()):
        try:
            same = parse_json(read_small(path, links=True), "file") == said
        except (OSError, ValueError):
            same = False
        if not same:
            raise InputError(f"{folder} holds scores of another model or data, or other files. Name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise as_store_error(error, folder) from error
    replace_synced(path, json.dumps(said, indent=1).encode())  # first: with it the folder is known
    for name, data in sources.items():
        total, labels = _score(f, e, data, folder / name, k, below)
        yield f"{names[name]}: loss {-total / max(1, labels):.4f} of {count(labels, 'label')}"


def _score(f: Finished, e: Evaluator, data: Dataset, folder: Path, k: int, below: int) -> tuple[float, int]:
    """Writes the parts that are missing; returns (sum of log-probabilities, number of labels) of all."""
    folder.mkdir(exist_ok=True)
    key = _key(f, e, data, k, below)
    parts, done, total, labels = _parts(folder, key)
    batches, waiting, at = data.batches(e.rows), Part(done), 0  # at: pieces before
    with screen.working("scoring", data.tokens, "tokens") as told:
        for mb in islice(batches, done):
            at += len(mb.lengths)
            told(len(mb.ids))
        while group := list(islice(batches, e.n_micro)):
            for scores in _of_group(e, data, group, at, k, below):
                waiting.add(scores)
                total, labels = total + float(scores["logp"].sum()), labels + int(scores["trained"].sum())
            at += sum(len(mb.lengths) for mb in group)
            told(sum(len(mb.ids) for mb in group))
            if waiting.nbytes >= PART:
                waiting.write(folder / f"part-{parts:05}.safetensors", key)
                parts += 1
        if waiting.pieces:
            waiting.write(folder / f"part-{parts:05}.safetensors", key)
    return total, labels


def _parts(folder: Path, key: str) -> tuple[int, int, float, int]:
    """(number of parts, micro-batches in them, their sum of log-probabilities, their labels). Raises InputError."""
    parts, done, total, labels = 0, 0, 0.0, 0
    while (path := folder / f"part-{parts:05}.safetensors").is_file():
        try:
            with safe_open(path, "numpy") as file:
                said = file.metadata() or {}
                scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        except (SafetensorError, TypeError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}). Remove it and those behind it.") from None
        if said.get("key") != key:
            raise InputError(f"{path} is of another model, of other data or options. Name another --out.")
        if said.get("first") != str(done) or said.get("sum") != part_sum(said, scores):
            raise InputError(f"{path} is damaged, or has another's name. Remove it and those behind it.")
        parts, done = parts + 1, done + int(said["batches"])
        total, labels = total + float(scores["logp"].sum()), labels + int(scores["trained"].sum())
    return parts, done, total, labels


def _key(f: Finished, e: Evaluator, data: Dataset, k: int, below: int) -> str:
    """The key of the weights (by paths, sizes and times of their files), the data, and all that decides the numbers."""
    files = stamps(f.source) | (stamps(f.adapter.source) if f.adapter else {})
    weights = {str(path.parent.resolve() / path.name): stamp for path, stamp in files.items()}
    device = e.e.queues.devices[0].type
    decides = [weights, data.fingerprint, e.e.plan.dtype, e.rows, e.seq_len, k, device, below]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:24]


def _of_group(
    e: Evaluator, data: Dataset, group: Sequence[Any], at: int, k: int, below: int
) -> list[dict[str, np.ndarray]]:
    """The tensors of a part, of each micro-batch. `at`: the number of the first piece."""
    cfg, results = e.e.cfg, [dict[str, np.ndarray]()] * len(group)

    def take(b: int, packed: Any, top: Any, x: torch.Tensor) -> None:
        labels, lengths = group[b].labels, np.array(group[b].lengths, np.int64)
        starts, first = np.cumsum(lengths) - lengths, at + sum(len(before.lengths) for before in group[:b])
        places = places_of(data.files, data.pieces[first : first + len(lengths)])
        losses = head_losses(cfg, packed._replace(factors=None), top, x).cpu().numpy().astype(np.float64)
        scores = {
            "document": places[:, 0].copy(),
            "start": places[:, 1].copy(),
            "length": lengths,
            "trained": np.add.reduceat((labels >= 0).astype(np.int64), starts),
            "logp": -np.add.reduceat(losses, starts),
        }
        if k:
            ids, logps, rest = (t.cpu().numpy() for t in head.head_top(cfg, top, x, packed.loss_rows, k, below))
            lowest = np.finfo(np.float16).min
            scores |= {"label": labels[labels >= 0].astype(np.int32), "ids": ids.astype(np.int32)}
            scores |= {"logps": np.maximum(logps, lowest).astype(np.float16), "rest": rest.astype(np.float32)}
        results[b] = scores

    for task in forward(e.e, [e.inputs(in_ram(cfg, mb)) for mb in group], take):
        task.wait()
    return results

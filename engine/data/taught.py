"""A teacher's output for data: the files of `trireme score --top-k K`, and the teacher's rows for the pieces of a run.

The command that scores describes the files. They are mapped; rows are read with their micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trireme.engine.data.tokens import TokenFile
from trireme.models.config import InputError
from trireme.storage.headers import CheckpointError, read_header
from trireme.storage.untrusted import checksum, complaint, parse_json, read_small, why

if TYPE_CHECKING:
    from trireme.engine.data.dataset import Dataset

FORMAT = "trireme scores 2"
NAMES = "scores.json"
PLACE = 16  # bytes of RAM for a piece
_SOURCE = {"data": str, "folder": str, "files": {str: int}}  # documents of each file of tokens, by its key
_SHAPE = {"format": str, "model": str, "tokenizer": str, "top_k": int, "sources": [_SOURCE]}
_DTYPES = {"I32": np.int32, "F16": np.float16, "F32": np.float32, "I64": np.int64, "F64": np.float64}
_BITS = 48  # of a place in a file


class Taught(NamedTuple):
    """A teacher's most likely tokens and probabilities for M labels."""

    ids: np.ndarray  # (M, K) int32: its most likely tokens
    logps: np.ndarray  # (M, K) float16: their log-probabilities
    rest: np.ndarray  # (M,) float32: logarithm of the probability of all others


@dataclass(frozen=True)
class ScoreIndex:
    """The content of scores.json: the model, tokenizer and data that scores are of."""

    folder: Path
    model: str
    tokenizer: str  # vocabulary, as of Codec
    k: int
    sources: tuple[dict[str, Any], ...]  # as _SOURCE


def is_scores(path: str | Path) -> bool:
    """Whether a folder has scores."""
    return (Path(path) / NAMES).is_file()


def read_index(folder: str | Path) -> ScoreIndex:
    """Reads scores.json. Raises InputError if the scores cannot teach."""
    path = Path(folder) / NAMES
    try:
        content: dict[str, Any] = parse_json(read_small(path), "file")
        fault = complaint(content, _SHAPE)
    except (OSError, ValueError) as error:
        content, fault = {}, f": {why(error)}"
    if fault or content["format"] != FORMAT or not content["top_k"]:
        form = f"its content{fault}" if fault else f"expected {FORMAT!r} with top-k tokens, which distillation needs"
        raise InputError(f"{path} cannot be used: {form}. Score the data again, with --top-k 64.")
    return ScoreIndex(Path(folder), content["model"], content["tokenizer"], content["top_k"], tuple(content["sources"]))


# ---------------------------------------------------------------- files


class _Part(NamedTuple):
    """A file of scores, mapped, and the key of what it is of."""

    key: str
    tables: dict[str, np.ndarray]


def part_sum(metadata: Mapping[str, str], tables: Mapping[str, np.ndarray]) -> str:
    """The checksum of a file of scores."""
    form = {name: (str(table.dtype), table.shape) for name, table in sorted(tables.items())}
    named = [*(metadata.get(name) for name in ("format", "key", "first", "batches")), form]
    return checksum([json.dumps(named).encode(), *(tables[name].reshape(-1).view(np.uint8).data for name in form)])


def _parts(folder: Path, k: int, vocab: int) -> list[_Part]:
    """The files of a source. Raises InputError."""
    result = list[_Part]()
    while (path := folder / f"part-{len(result):05}.safetensors").is_file():
        try:
            result.append(_read_part(path, k, vocab))
        except (CheckpointError, ValueError) as error:
            raise InputError(f"{path}: {error}. Score the data again.") from None
    return result


def _read_part(path: Path, k: int, vocab: int) -> _Part:
    """Maps a file. Raises CheckpointError, or ValueError if it is not what was written, or has other tokens than the
    model.
    """
    header = read_header(path)
    tables = {
        t.name: np.memmap(path, _DTYPES[t.dtype], "r", header.data + t.offset, t.shape)
        if t.nbytes
        else np.zeros(t.shape, _DTYPES[t.dtype])
        for t in header.layout.tensors
        if t.dtype in _DTYPES
    }
    form = {name: (table.dtype, table.shape[1:]) for name, table in tables.items()}
    expected: dict[str, Any] = dict.fromkeys(("document", "start", "trained"), (np.int64, ()))
    expected |= {"label": (np.int32, ()), "rest": (np.float32, ())}
    expected |= {"ids": (np.int32, (k,)), "logps": (np.float16, (k,))}
    fault = "" if expected.items() <= form.items() else f"is not a file of scores with {k} tokens per label"
    if not fault and part_sum(header.metadata, tables) != header.metadata.get("sum"):
        fault = "is damaged: it does not have its checksum"
    elif not fault and len(ids := tables["ids"]) and not 0 <= ids.min() <= ids.max() < vocab:
        fault = f"has token id {ids.max()}, the model's vocabulary is {vocab}"
    if fault:
        raise ValueError(fault)
    return _Part(header.metadata.get("key", ""), tables)


# ---------------------------------------------------------------- rows of a run


@dataclass(frozen=True)
class Teacher:
    """The teacher's rows for the pieces of a data set. RAM holds PLACE bytes for each piece."""

    parts: tuple[Taught, ...]  # mapped
    part: np.ndarray  # (pieces,) int32
    first: np.ndarray  # (pieces,) int64: row of its first label
    count: np.ndarray  # (pieces,) int32: labels
    key: str  # of what the scores are of

    def of(self, pieces: np.ndarray) -> Taught:
        """The teacher's output for these pieces' labels, one after another."""
        places = zip(*(table[pieces].tolist() for table in (self.part, self.first, self.count)), strict=True)
        rows = [[table[first : first + n] for table in self.parts[part]] for part, first, n in places]
        return Taught(*(np.concatenate(tables) for tables in zip(*rows, strict=True)))


def document_places(files: Sequence[TokenFile], pieces: np.ndarray) -> np.ndarray:
    """(pieces, 2) int64: the number of a piece's document among those of all files, and its first token in it."""
    first = np.cumsum([0, *(file.n_documents for file in files)])
    result = np.zeros((len(pieces), 2), np.int64)
    for i, file in enumerate(files):
        of_file = pieces["file"] == i
        number = file.documents_at(pieces["start"][of_file])
        result[of_file] = np.stack([first[i] + number, pieces["start"][of_file] - file.offsets[number]], 1)
    return result


def taught_by(names: ScoreIndex, data: Dataset, vocab: int) -> Teacher:
    """The teacher's rows for each piece: those of the scored piece that begins at the same token. Raises InputError if
    a piece has none, or other labels.
    """
    numbers = {file.meta["key"]: i for i, file in reversed([*enumerate(data.files)])}
    parts, places, rows = list[_Part](), [np.full(1, -1)], [np.zeros((1, 3), np.int64)]
    for source in names.sources:
        begins = [np.full(n, -1) for n in source["files"].values()]  # places of documents
        for i, (key, n) in enumerate(source["files"].items()):
            if key in numbers and data.files[numbers[key]].n_documents == n:
                begins[i] = (numbers[key] << _BITS) + data.files[numbers[key]].offsets[:-1]
        first = np.concatenate([*begins, [-1]])
        for part in _parts(names.folder / source["folder"], names.k, vocab):
            document, trained = part.tables["document"], np.array(part.tables["trained"])
            begin = first[np.clip(document, -1, len(first) - 1)]
            places.append(np.where(begin < 0, -1, begin + part.tables["start"]))
            rows.append(np.stack([np.full(len(begin), len(parts)), np.cumsum(trained) - trained, trained], 1))
            parts.append(part)
    place = np.concatenate(places)
    order = np.argsort(place, kind="stable")
    file = np.array([numbers[file.meta["key"]] for file in data.files])[data.pieces["file"]]
    wanted = (file << _BITS) + data.pieces["start"]
    index = order[np.searchsorted(place[order], wanted).clip(max=len(order) - 1)]
    match, row, counts = place[index] == wanted, np.concatenate(rows)[index], np.zeros(len(index), np.int32)
    for i, ((part, first, n), labels) in enumerate(zip(row.tolist(), data.labels(), strict=True)):
        counts[i] = len(labels)
        match[i] &= len(labels) <= n and np.array_equal(
            parts[part].tables["label"][first : first + len(labels)], labels
        )
    if not match.all():
        raise InputError(
            f"{names.folder} lacks {int((~match).sum()):,} of the data's {len(match):,} documents or parts of them, as "
            f"read here. Score the same files, all rows, also of --val, with --top-k {names.k} and the same tokenizer, "
            "chat template, columns, --seq-len and --long."
        )
    mapped = tuple(Taught(part.tables["ids"], part.tables["logps"], part.tables["rest"]) for part in parts)
    key = "-".join(dict.fromkeys(parts[i].key for i in np.unique(row[:, 0])))
    return Teacher(mapped, row[:, 0].astype(np.int32), row[:, 1].copy(), counts, key)

"""A teacher's output for data: the files of `trireme score --top-k K`, and the teacher's rows for the pieces of a run.

The command that scores describes the files. They are mapped; rows are read with their micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from trireme.engine.data.tokens import TokenFile
from trireme.models.config import InputError
from trireme.storage.headers import CheckpointError, Header, read_header
from trireme.storage.untrusted import checksum, complaint, parse_json, read_small, why

FORMAT = "trireme scores 2"
NAMES = "scores.json"
SAID = {"format": str, "model": str, "tokenizer": str, "top_k": int, "sources": list}
SOURCE = {"data": str, "folder": str, "files": dict}
DTYPES = {"I32": np.int32, "F16": np.float16, "F32": np.float32, "I64": np.int64, "F64": np.float64}
TABLES = ("document", "start", "length", "trained")
NEAR = 0.02  # that shares may miss 1 by
BITS = 48  # of a place in a file
PLACE = 16  # bytes


class Taught(NamedTuple):
    """A teacher's most likely tokens and probabilities for M labels."""

    ids: np.ndarray  # (M, K) int32: its most likely tokens
    logps: np.ndarray  # (M, K) float16: their log-probabilities
    rest: np.ndarray  # (M,) float32: logarithm of the probability of all others


@dataclass(frozen=True)
class Names:
    """The content of scores.json: the model, tokenizer and data that scores are of."""

    folder: Path
    model: str
    tokenizer: str  # vocabulary, as of Codec
    k: int
    sources: tuple[dict[str, Any], ...]  # as SOURCE; files: documents of each file of tokens, by its key


def is_scores(path: str | Path) -> bool:
    """Whether a folder has scores."""
    return (Path(path) / NAMES).is_file()


def read_names(folder: str | Path) -> Names:
    """Reads scores.json. Raises InputError if the scores cannot teach."""
    path = Path(folder) / NAMES
    try:
        said = parse_json(read_small(path), "file")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {why(error)}.") from None
    if said.get("format") == "trireme scores 1":
        raise InputError(f"{path} is of an older version, which did not write the tokenizer. Score the data again.")
    wrong = complaint(said, SAID) or next((w for each in said["sources"] if (w := complaint(each, SOURCE))), "")
    if not wrong and any(type(n) is not int or n < 0 for each in said["sources"] for n in each["files"].values()):
        wrong = ".files has no numbers of documents"
    if not wrong and said["format"] != FORMAT:
        wrong = f".format is not {FORMAT!r}"
    if wrong:
        raise InputError(f"{path}: its content{wrong}. Score the data again.")
    if said["top_k"] < 1:
        raise InputError(f"{folder} has no top-k tokens, which distillation needs. Score the data with --top-k 64.")
    return Names(Path(folder), said["model"], said["tokenizer"], said["top_k"], tuple(said["sources"]))


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class Part:
    """A file of scores, mapped."""

    path: Path
    header: Header

    @classmethod
    def open(cls, path: Path, k: int) -> Part:
        """Opens a file. Raises InputError."""
        try:
            header = read_header(path)
        except CheckpointError as error:
            raise InputError(f"{path} cannot be read ({error}). Score the data again.") from None
        result = {t.name: (t.dtype, *t.shape) for t in header.layout.tensors}
        n, m = (result.get(name, ("", 0))[1] for name in ("document", "label"))
        wanted: dict[str, tuple[Any, ...]] = dict.fromkeys(TABLES, ("I64", n))
        wanted |= {"label": ("I32", m), "rest": ("F32", m), "ids": ("I32", m, k), "logps": ("F16", m, k)}
        if any(result.get(name) != form for name, form in wanted.items()) or not {f[0] for f in result.values()} <= {
            *DTYPES
        }:
            raise InputError(f"{path} is not a file of scores with {k} tokens per label. Score the data again.")
        return cls(path, header)

    @property
    def key(self) -> str:
        return self.header.metadata.get("key", "")

    def check(self) -> None:
        """Raises InputError if the content is not what was written."""
        tables = {t.name: self.table(t.name) for t in self.header.layout.tensors}
        if part_sum(self.header.metadata, tables) != self.header.metadata.get("sum"):
            raise InputError(f"{self.path} is damaged: it does not have its checksum. Score the data again.")

    def table(self, name: str) -> np.ndarray:
        t = next(t for t in self.header.layout.tensors if t.name == name)
        if not t.nbytes:
            return np.zeros(t.shape, DTYPES[t.dtype])
        return np.memmap(self.path, DTYPES[t.dtype], "r", self.header.data + t.offset, t.shape)


def part_sum(metadata: Mapping[str, str], tables: Mapping[str, np.ndarray]) -> str:
    """The checksum of a file of scores."""
    form = {name: (str(table.dtype), table.shape) for name, table in sorted(tables.items())}
    named = [*(metadata.get(name) for name in ("format", "key", "first", "batches")), form]
    return checksum([json.dumps(named).encode(), *(tables[name].reshape(-1).view(np.uint8).data for name in form)])


def parts_of(folder: Path, k: int) -> list[Part]:
    """The files of a source. Raises InputError."""
    result = list[Part]()
    while (path := folder / f"part-{len(result):05}.safetensors").is_file():
        result.append(Part.open(path, k))
        result[-1].check()
    if len({part.key for part in result}) > 1:
        raise InputError(f"{folder} holds parts of several models or data sets. Score the data again.")
    return result


# ---------------------------------------------------------------- rows of a run


@dataclass(frozen=True)
class Teacher:
    """The teacher's rows for the pieces of a data set. RAM holds PLACE bytes for each piece."""

    parts: tuple[tuple[Path, np.ndarray, np.ndarray, np.ndarray], ...]  # as Taught, mapped
    part: np.ndarray  # (pieces,) int32
    first: np.ndarray  # (pieces,) int64: row of its first label
    count: np.ndarray  # (pieces,) int32: labels
    vocab: int
    key: str  # of what the scores are of

    def of(self, pieces: np.ndarray) -> Taught:
        """The teacher's output for these pieces' labels, one after another. Raises InputError if the files have
        changed.
        """
        result = [Taught(*(t[a : a + n] for t in self.parts[p][1:])) for p, a, n in self._places(pieces)]
        ids, logps, rest = (np.concatenate(tables) for tables in zip(*result, strict=True))
        shares = np.exp(logps.astype(np.float32)).sum(1) + np.exp(rest)
        apart = (np.diff(np.sort(ids, 1), axis=1) > 0).all()
        if len(ids) and not (apart and ids.min() >= 0 and ids.max() < self.vocab and (abs(shares - 1) < NEAR).all()):
            paths = sorted({str(self.parts[p][0]) for p, *_ in self._places(pieces)})
            raise InputError(
                f"{paths[0]} is damaged: the probabilities of a token are not a distribution. Score the data again."
            )
        return Taught(ids, logps, rest)

    def _places(self, pieces: np.ndarray) -> list[tuple[int, int, int]]:
        return list(zip(*(table[pieces].tolist() for table in (self.part, self.first, self.count)), strict=True))


class Scored(Protocol):
    """A Dataset, which scores are looked up for."""

    @property
    def files(self) -> Sequence[TokenFile]: ...
    @property
    def pieces(self) -> np.ndarray: ...  # (pieces,) PIECE
    def labels(self) -> Iterable[np.ndarray]: ...  # of each piece, int32


def places_of(files: Sequence[TokenFile], pieces: np.ndarray) -> np.ndarray:
    """(pieces, 2) int64: the number of a piece's document among those of all files, and its first token in it."""
    first = np.cumsum([0, *(len(file.offsets) - 1 for file in files)])
    result = np.zeros((len(pieces), 2), np.int64)
    for i, file in enumerate(files):
        mine = pieces["file"] == i
        number = np.searchsorted(file.offsets, pieces["start"][mine], "right") - 1
        result[mine] = np.stack([first[i] + number, pieces["start"][mine] - file.offsets[number]], 1)
    return result


def taught_by(names: Names, data: Scored, vocab: int) -> Teacher:
    """The teacher's rows for each piece: those of the scored piece that begins at the same token. Raises InputError."""
    known = {file.meta["key"]: i for i, file in reversed(list(enumerate(data.files)))}
    parts, places, rows = list[Part](), [np.zeros(0, np.int64)], [np.zeros((0, 3), np.int64)]
    for source in names.sources:
        keys, counts = list(source["files"]), list(source["files"].values())
        first = np.cumsum([0, *counts])
        for part in parts_of(names.folder / source["folder"], names.k):
            document, start, _, trained = (np.array(part.table(name)) for name in TABLES)
            at = np.full(len(document), -1, np.int64)
            for j, key in enumerate(keys):
                if key in known and counts[j] == len(data.files[known[key]].offsets) - 1:
                    mine = (document >= first[j]) & (document < first[j + 1])
                    offsets = data.files[known[key]].offsets
                    at[mine] = (known[key] << BITS) + offsets[document[mine] - first[j]] + start[mine]
            places.append(at)
            ends = np.cumsum(trained)
            rows.append(np.stack([np.full(len(at), len(parts)), ends - trained, trained], 1))
            if (trained < 0).any() or (ends[-1] if len(ends) else 0) != len(part.table("label")):
                raise InputError(
                    f"{part.path} is damaged: its labels are not those of its documents. Score them again."
                )
            parts.append(part)
    every = {file.meta["key"] for source in names.sources for file in data.files if file.meta["key"] in source["files"]}
    if missing := [file for file in data.files if file.meta["key"] not in every]:
        raise InputError(
            f"{names.folder} has no scores of {missing[0].meta['name']}, as this run reads it: with this tokenizer, "
            f"chat template and columns. Score it so, with --top-k {names.k}."
        )
    return _matched(names, data, vocab, known, parts, np.concatenate(places), np.concatenate(rows))


def _matched(
    names: Names,
    data: Scored,
    vocab: int,
    known: dict[str, int],
    parts: list[Part],
    places: np.ndarray,
    rows: np.ndarray,
) -> Teacher:
    """Raises InputError if a piece has no scores, or its labels differ."""
    order = np.argsort(places, kind="stable")
    same = np.array([known[file.meta["key"]] for file in data.files], np.int64)
    wanted = (same[data.pieces["file"]] << BITS) + data.pieces["start"]
    at = np.searchsorted(places[order], wanted).clip(max=max(0, len(order) - 1))
    there = places[order][at] == wanted if len(order) else np.zeros(len(wanted), bool)
    if not there.all():
        raise InputError(
            f"{names.folder} lacks {int((~there).sum()):,} of the data's {len(there):,} documents or parts of them. "
            "Score the same files, all rows, with the same --seq-len and --long; of --val too."
        )
    result = rows[order][at]
    counts, tables = np.zeros(len(result), np.int32), [part.table("label") for part in parts]
    for i, ((part, first, n), labels) in enumerate(zip(result.tolist(), data.labels(), strict=True)):
        counts[i] = len(labels)
        if len(labels) > n or not np.array_equal(tables[part][first : first + len(labels)], labels):
            raise InputError(
                f"{parts[part].path} has {n} labels of a document that has {len(labels)} here, or others: it was made "
                "of other data. Score the data again, with a --seq-len that is not smaller."
            )
    mapped = tuple((p.path, p.table("ids"), p.table("logps"), p.table("rest")) for p in parts)
    key = "-".join(dict.fromkeys(parts[i].key for i in np.unique(result[:, 0])))
    return Teacher(mapped, result[:, 0].astype(np.int32), result[:, 1].copy(), counts, vocab, key)

"""The data of a run: files to tokens, tokens to packed sequences, sequences to micro-batches.

    dataset = load_dataset(["chats.jsonl"], load_codec(checkpoint), DataOptions(seq_len=4096, val="0.02"))
    for micro_batch in dataset.step(i, batch_size=16, micro_batch=2): ...

A step is a pure function of (data, options, i). Tokens are on disk; in memory there are a few numbers per document.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trireme.engine.amounts import compact, count
from trireme.engine.data import documents
from trireme.engine.data.answers import labels_in, parse_map
from trireme.engine.data.codec import Codec
from trireme.engine.data.documents import is_text
from trireme.engine.data.find import DataFile, FileRows, Sources, find, spool
from trireme.engine.data.prepare import DataOptions, OnRead, Preparation
from trireme.engine.data.summary import FileReport, Report, example_text, notes_on, row_lines
from trireme.engine.data.tables import class_names
from trireme.engine.data.taught import Teacher
from trireme.engine.data.tokens import TokenFile, tidy, unpack_tokens
from trireme.models.config import InputError
from trireme.models.losses.micro_batch import IGNORED, MicroBatch
from trireme.storage.temporary import Temporary

SAMPLED = 256  # pieces


@dataclass(frozen=True)
class Dataset:
    """The data of a run, tokenized and packed."""

    files: tuple[TokenFile, ...]
    pieces: np.ndarray  # (pieces,) PIECE, grouped by sequence
    rows: np.ndarray  # (sequences + 1,) int64: sequence r is pieces[rows[r]:rows[r + 1]]
    options: DataOptions
    codec: Codec | None
    report: Report
    held_out: Dataset | None = None
    general: Dataset | None = None  # what one may forget
    scratch: Temporary | None = field(default=None, repr=False)  # removed with this object
    reference: np.ndarray | None = field(default=None, repr=False)  # (pieces,) float64, as a MicroBatch's
    teacher: Teacher | None = field(default=None, repr=False)  # what it says of each piece

    @property
    def n_sequences(self) -> int:
        return len(self.rows) - 1

    @property
    def is_text(self) -> bool:
        return all(map(is_text, self.files))

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.pieces["length"].sum())

    @property
    def memory(self) -> int:
        """Bytes of RAM of the tables, and of the order of sequences in two epochs."""
        datasets = [data for data in (self, self.held_out, self.general) if data]
        files = {id(file): 4 * file.offsets.nbytes for data in datasets for file in data.files}
        return sum(files.values()) + sum(data.pieces.nbytes + 3 * data.rows.nbytes for data in datasets)

    @property
    def document(self) -> int:
        """The length of a document that has this data's mean number of attended tokens."""
        lengths = self.pieces["length"].astype(float)
        return round((lengths**2).sum() / lengths.sum())

    def check_model(self, vocab: int, positions: int, name: str) -> None:
        """Raises InputError if a model has too few tokens or positions for this data."""
        for data in filter(None, (self, self.held_out, self.general)):
            tokens = max(file.meta["max_id"] for file in data.files) + 1
            longest = int(data.pieces["length"].max())
            for size, need, noun, way_out in (
                (vocab, tokens, "tokens", "name its own --tokenizer FOLDER, or resize its embeddings in transformers"),
                (positions, longest, "positions", f"lower --seq-len to {positions}"),
            ):
                if need > size:
                    raise InputError(f"{name} has {size:,} {noun}, the data needs {need:,}: {way_out}.")

    @cached_property
    def trained(self) -> float:
        """The share of tokens that are trained, of a sample."""
        _, labels = self._read(self.pieces[:: max(1, len(self.pieces) // SAMPLED)])
        return float((labels >= 0).mean())

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal micro-batches."""
        keys = "".join(file.meta["key"] for file in self.files)
        columns = [self.rows, *(self.pieces[name] for name in ("file", "start", "length", "goes_on"))]  # weights: keys
        sums = [zlib.crc32(column.tobytes()) for column in columns]
        return f"{zlib.crc32(f'{keys} {sums} {self.options.seed}'.encode()):08x}"

    def steps_per_epoch(self, batch_size: int) -> int:
        """Steps of an epoch. The last one may be smaller."""
        return math.ceil(self.n_sequences / batch_size)

    def step(self, i: int, batch_size: int, micro_batch: int) -> list[MicroBatch]:
        """The micro-batches of step i, counted from 0 over all epochs; each of at most `micro_batch` sequences."""
        epoch, at = divmod(i, self.steps_per_epoch(batch_size))
        order = self._order(epoch)[at * batch_size : (at + 1) * batch_size]
        return [self._gather(order[k : k + micro_batch]) for k in range(0, len(order), micro_batch)]

    def batches(self, micro_batch: int, most: int | None = None) -> Iterator[MicroBatch]:
        """Yields every sequence once, or `most` of them drawn by the seed, in a fixed order."""
        rows = np.arange(self.n_sequences)
        if most is not None and most < len(rows):
            rows = np.sort(self._order(0)[:most])
        for k in range(0, len(rows), micro_batch):
            yield self._gather(rows[k : k + micro_batch])

    def labels(self) -> Iterator[np.ndarray]:
        """Yields for each piece, int32, its trained tokens but the first."""
        for i in range(0, len(self.pieces), SAMPLED):
            pieces = self.pieces[i : i + SAMPLED]
            _, labels = self._read(pieces)
            yield from (piece[piece >= 0] for piece in np.split(labels, np.cumsum(pieces["length"])[:-1]))

    def example(self, k: int = 0, marks: str = "[]") -> str:
        """The beginning of document k as text, with the trained part between two marks."""
        pieces = np.lexsort((self.pieces["start"], self.pieces["file"]))
        if self.options.paired:
            pieces = pieces[pieces % 2 == 0]  # a pair's pieces are side by side
        piece = pieces[k % len(pieces)]
        shown = self._shown(piece, marks)
        if self.options.kind == "classes" and self.options.labels:
            label = self.options.labels[int(self._values(self.pieces[[piece]])[0])]
            return f"{shown} -> {marks[0]}{label}{marks[1]}"
        if not self.options.paired:
            return shown
        second = "" if self.options.kind == "labels" else f"\nbad:  {self._shown(piece + 1, marks)}"
        return f"{'bad' if self.pieces['weight'][piece] < 0 else 'good'}: {shown}{second}"

    def _shown(self, piece: int, marks: str) -> str:
        ids, labels = self._read(self.pieces[[piece]])
        return example_text(ids, np.append(False, labels[:-1] >= 0), self.codec, marks)  # labels are of the next tokens

    def _order(self, epoch: int) -> np.ndarray:
        return documents.shuffled(self.n_sequences, self.options.seed, epoch)

    def _gather(self, rows: np.ndarray) -> MicroBatch:
        indices = np.concatenate([np.arange(self.rows[r], self.rows[r + 1]) for r in rows])
        pieces, reference = self.pieces[indices], None
        if self.options.kind == "rewards":
            reference = self._values(pieces)
        elif self.options.paired:
            reference = np.zeros(len(indices)) if self.reference is None else self.reference[indices]
        weighted = self.options.paired or any((file.weights != 1).any() for file in self.files)
        weights = pieces["weight"].copy() if weighted else None
        taught = self.teacher.of(indices) if self.teacher else None
        return MicroBatch(*self._read(pieces), tuple(pieces["length"].tolist()), weights, reference, taught)

    def _read(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) of the pieces, one after another, each (N,) int32."""
        goes_on = pieces["goes_on"].astype(bool)
        starts, lengths = pieces["start"].astype(np.int64), pieces["length"] + goes_on.astype(np.int64)
        places = zip(pieces["file"].tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
        stored = [self.files[file].read(start, stop) for file, start, stop in places]
        ids, trained = unpack_tokens(np.concatenate(stored))
        labels = np.append(np.where(trained[1:], ids[1:], IGNORED), IGNORED).astype(np.int32)
        last = np.cumsum(lengths) - 1
        labels[last] = IGNORED
        if self.options.scored:
            classes = self._values(pieces) if self.options.kind == "classes" else 0
            labels[:] = IGNORED
            labels[score_places(ids, lengths, self.options.pad)] = classes
        mask = np.ones(len(ids), bool)
        mask[last[goes_on]] = False  # the token after a piece is a label alone
        return ids[mask], labels[mask]

    def _values(self, pieces: np.ndarray) -> np.ndarray:
        """What rows say as a number, classes or margins: (pieces,) float64."""
        result = np.zeros(len(pieces))
        for i, file in enumerate(self.files):
            of_file = pieces["file"] == i
            result[of_file] = file.values[file.documents_at(pieces["start"][of_file])]
        return result


def score_places(ids: np.ndarray, lengths: np.ndarray, pad: int | None) -> np.ndarray:
    """The token of each document that a score head reads: the last one that is not `pad`, else the first.

    This is how transformers finds it, whose batches end with padding. ids: of documents with these lengths, one after
    another.
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(ids))
    return np.maximum(np.maximum.reduceat(np.where(ids == (-1 if pad is None else pad), -1, places), starts), starts)


# ---------------------------------------------------------------- loading


def load_dataset(
    sources: Sequence[str], codec: Codec | None, options: DataOptions, progress: OnRead = lambda *_: None
) -> Dataset:
    """Reads, tokenizes (or finds in the cache), holds out, cuts and packs.

    sources: `path`, `path:weight`, or `-`; a path is a file, a folder or a pattern. Raises InputError; OSError if the
    cache cannot be written.
    """
    scratch = Temporary("trireme-tokens-") if options.cache is None else None
    folder = scratch.path if scratch else Path(options.cache or "")
    preparation = Preparation(options, codec, parse_map(options.map), options.shared or folder, progress)
    (train, val, notes), share = _find_all(sources, options.val, folder)
    general_files = find(options.general).files if options.general else []
    files, val_files, other_files = (tuple(map(preparation.tokens, named)) for named in (train, val, general_files))
    tidy(preparation.folder, {file.meta["key"] for file in (*files, *val_files, *other_files)})
    nowhere = set.intersection(*(set(file.meta["absent"]) for file in files))
    if nowhere and not options.inherited:
        raise InputError(f"--map names {', '.join(map(repr, sorted(nowhere)))}, a column that no row has. Correct it.")
    whole = lambda named, files: _lay_out(named, files, documents.documents_of(files, options.kind), codec, options)
    general = whole(general_files, other_files) if general_files else None
    rows, held_out, drawn = documents.documents_of(files, options.kind), None, ""
    if val:
        held_out = whole(val, val_files)
        keys = {file.meta["key"] for file in files}
        if shared := [str(source) for source, file in zip(val, val_files, strict=True) if file.meta["key"] in keys]:
            notes.append(f"trained on and held out, so eval_loss is not that of unseen data: {', '.join(shared)}")
    elif share:
        before, text = len(rows), all(map(is_text, files))
        rows, unseen = documents.hold_out(rows, share, options.seed, options.seq_len * text)
        held_out = _lay_out([replace(source, weight=1.0) for source in train], files, unseen, codec, options)
        parts = f"{compact(int(unseen['length'].sum()))} tokens, drawn from all texts,"
        drawn = parts if len(rows) + len(unseen) != before else count(len(unseen), "row")
    dataset = _lay_out(train, files, rows, codec, options)
    if held_out and drawn:
        notes += [f"of the rows held out: {line}" for line in held_out.report.losses()]
    notes += notes_on(files, codec, preparation.renames, options)
    report = replace(dataset.report, held_out=drawn, notes=tuple(notes))
    dataset = replace(dataset, report=report, held_out=held_out, general=general, scratch=scratch)
    if options.vocab_size is not None:
        dataset.check_model(options.vocab_size, options.seq_len, "the model")
    return dataset


def _find_all(names: Sequence[str], val: str | None, folder: Path) -> tuple[Sources, float]:
    """(what to train on and what is held out, the share of rows to hold out). `folder`: for standard input."""
    sources = [Sources([spool(sys.stdin.buffer, folder)], [], []) if name == "-" else find(name) for name in names]
    files, by_name, notes = ([x for part in parts for x in part] for parts in zip(*sources, strict=True))
    share, held_out = parse_val(val)
    if by_name:
        listed = ", ".join(dict.fromkeys(map(str, by_name)))
        notes.append(f"{listed}: not read, as --val is given" if val else f"held out, by its name: {listed}")
    return Sources(files, held_out if val else by_name, notes), share


def find_labels(sources: Sequence[str], map: str | None) -> tuple[str, ...]:
    """The classes of rows, as answers.labels_in finds them. Raises InputError."""
    if "-" in sources:
        raise InputError("--data -: rows that are read once cannot tell which classes there are. Give --labels A,B.")
    files, renames = [file for text in sources for file in find(text).files], parse_map(map)
    column = next((theirs for theirs, ours in renames.items() if ours == "label"), "label")
    named = next(filter(None, (class_names(path, column) for file in files for path in file.files)), ())
    return labels_in((row.value for file in files for row in FileRows(file.files)), renames, named)


def parse_val(val: str | None) -> tuple[float, list[DataFile]]:
    """--val as (share, files), of which one is empty. Of a folder, the files that are named as validation data, if
    any. Raises InputError.
    """
    if not val:
        return 0.0, []
    try:
        share = float(val)
    except ValueError:
        result = find(val)
        return 0.0, result.held_out or result.files
    if not 0 <= share < 1:
        raise InputError(f"--val {val}: expected a share of the rows below 1, such as 0.02, or a file.")
    return share, []


def _lay_out(
    named: Sequence[DataFile], files: tuple[TokenFile, ...], rows: np.ndarray, codec: Codec | None, options: DataOptions
) -> Dataset:
    """Cuts and packs `rows`, which are (n, documents of a row) DOCUMENT. Raises InputError."""
    weighed = documents.weigh(rows, [source.weight for source in named], options.seed)
    fitted = documents.fit(weighed, files, options.seq_len, options.long)
    reports = tuple(
        FileReport(str(source), source.weight, file.meta, i in weighed["file"][:, 0])
        for i, (source, file) in enumerate(zip(named, files, strict=True))
    )
    report = Report(reports, row_lines(rows, options), replace(fitted, pieces=fitted.pieces[:0]), options, 0, 0.0)
    if not len(fitted.pieces):
        file, start, length, *_ = rows[0, 0].tolist()
        ids, trained = unpack_tokens(files[file].read(start, start + min(length, 60)))
        raise InputError(
            f"no row of {len(rows):,} is left: {'; '.join(report.losses()) or 'their weight leaves none'}. "
            f"The first row begins: {example_text(ids, trained, codec)}"
        )
    pieces, bounds = documents.pack_rows(fitted.pieces, options.room, options.pack, options.scored)
    n = len(bounds) - 1
    filled = float(pieces["length"].sum()) / (n * options.room)
    return Dataset(files, pieces, bounds, options, codec, replace(report, sequences=n, used=filled))

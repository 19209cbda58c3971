"""The data of a run: files to tokens, tokens to packed rows, rows to micro-batches.

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
from numpy.lib.recfunctions import repack_fields

from trireme.engine.amounts import compact, count
from trireme.engine.data import documents, pack, pairs
from trireme.engine.data.cache import Shelf, TokenFile, decode
from trireme.engine.data.codec import Codec
from trireme.engine.data.files.folders import Found, find_data
from trireme.engine.data.files.scores import Taught, Teacher
from trireme.engine.data.files.sources import DataFile, Reader, spool
from trireme.engine.data.formats.classes import labels_in
from trireme.engine.data.formats.formats import parse_map
from trireme.engine.data.prepare import DataOptions, Progress, Reading, tokenize
from trireme.engine.data.report import Counts, FileReport, Report, example_text, notes_on
from trireme.models.config import InputError
from trireme.storage.temporary import Temporary

IGNORED = -100  # label of an untrained token
SAMPLED = 256  # pieces


@dataclass(frozen=True)
class MicroBatch:
    """Documents back to back, without padding."""

    ids: np.ndarray  # (N,) int32
    # (N,) int32: the token after ids[t] in its document if trained, else IGNORED. Where documents are scored: their
    # class, or of pairs 0, at the token that is.
    labels: np.ndarray
    lengths: tuple[int, ...]  # of documents; sum N
    weights: np.ndarray | None = None  # (documents,) float64; None: 1. Of kto's undesirable answers below 0
    # (documents,) float64, of pairs: log-probabilities by the reference, or 0; of rewards margins, at their first
    reference: np.ndarray | None = None
    taught: Taught | None = None  # of its labels, in their order

    @property
    def trained(self) -> int:
        """Number of labels."""
        return int((self.labels >= 0).sum())


@dataclass(frozen=True)
class Dataset:
    """The data of a run, tokenized and packed."""

    files: tuple[TokenFile, ...]
    pieces: np.ndarray  # (pieces,) PIECE, grouped by row
    rows: np.ndarray  # (rows + 1,) int64: row r is pieces[rows[r]:rows[r + 1]]
    options: DataOptions
    codec: Codec | None
    report: Report
    held_out: Dataset | None = None
    left_out: int = 0  # rows without a label
    scratch: Temporary | None = field(default=None, repr=False)  # removed with this object
    reference: np.ndarray | None = field(default=None, repr=False)  # (pieces,) float64, as a MicroBatch's
    teacher: Teacher | None = field(default=None, repr=False)  # what it says of each piece

    @property
    def n_sequences(self) -> int:
        """The number of packed rows."""
        return len(self.rows) - 1

    @property
    def is_text(self) -> bool:
        return all(file.meta["format"] == "text" for file in self.files)

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.pieces["length"].sum())

    def nbytes(self, shelf: Shelf | None = None) -> int:
        """Bytes on disk, each file counted once, without those on the shelf."""
        files = (*self.files, *(self.held_out.files if self.held_out else ()))
        ours = [file for file in files if not (shelf and file.path.is_relative_to(shelf.folder))]
        return sum({file.meta["key"]: file.meta["bytes"] for file in ours}.values())

    @property
    def memory(self) -> int:
        """Bytes of RAM of the tables, and of the order of rows in two epochs."""
        both = (self, *([self.held_out] if self.held_out else []))
        files = {id(file): file.offsets.nbytes + file.trained.nbytes for data in both for file in data.files}
        return sum(files.values()) + sum(data.pieces.nbytes + 3 * data.rows.nbytes for data in both)

    @property
    def document(self) -> int:
        """The length of a document that has this data's mean number of attended tokens."""
        lengths = self.pieces["length"].astype(float)
        return round((lengths**2).sum() / lengths.sum())

    @cached_property
    def trained(self) -> float:
        """The share of tokens that are trained; if rows were cut, that of a sample, since answers come last."""
        if self.options.scored:
            return len(self.pieces) / self.tokens
        counts = self.report.counts
        if counts.tokens == self.tokens:
            return counts.trained / counts.tokens
        _, labels = self._read(self.pieces[:: max(1, len(self.pieces) // SAMPLED)])
        return float((labels >= 0).mean())

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal micro-batches."""
        keys = "".join(file.meta["key"] for file in self.files)
        pieces = repack_fields(self.pieces[["file", "start", "length", "goes_on"]])  # weights go with the key
        layout = [zlib.crc32(array.tobytes()) for array in (pieces, self.rows)]
        return f"{zlib.crc32(f'{keys} {layout} {self.options.seed}'.encode()):08x}"

    def steps_per_epoch(self, batch_size: int) -> int:
        """Steps of an epoch. The last one may be smaller."""
        return math.ceil(self.n_sequences / batch_size)

    def step(self, i: int, batch_size: int, micro_batch: int) -> list[MicroBatch]:
        """The micro-batches of step i, counted from 0 over all epochs; each of at most `micro_batch` rows."""
        epoch, at = divmod(i, self.steps_per_epoch(batch_size))
        order = self._order(epoch)[at * batch_size : (at + 1) * batch_size]
        return [self._gather(order[k : k + micro_batch]) for k in range(0, len(order), micro_batch)]

    def batches(self, micro_batch: int, most: int | None = None) -> Iterator[MicroBatch]:
        """Yields every row once, or `most` rows drawn by the seed, in a fixed order."""
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
            yield from (each[each >= 0] for each in np.split(labels, np.cumsum(pieces["length"])[:-1]))

    def describe_held_out(self) -> list[str]:
        """The report of held-out files."""
        return self.held_out.report.lines() if self.held_out and not self.report.held_out else []

    def example(self, k: int = 0) -> str:
        """The beginning of document k as text, with the trained part in [..]."""
        in_order = np.lexsort((self.pieces["start"], self.pieces["file"]))
        if self.options.kind == "classes":
            piece = in_order[k % len(in_order)]
            return f"{self._shown(piece)} -> {self.options.labels[int(self._values(self.pieces[[piece]])[0])]}"
        if not self.options.paired:
            return self._shown(in_order[k % len(in_order)])
        first = in_order[2 * k % len(in_order)]  # a pair's pieces are side by side
        good = "bad" if self.pieces["weight"][first] < 0 else "good"
        second = "" if self.options.kind == "labels" else f"\n         bad:  {self._shown(first + 1)}"
        return f"{good}: {self._shown(first)}{second}"

    def _shown(self, piece: int) -> str:
        ids, labels = self._read(self.pieces[[piece]])
        shifted = np.concatenate([[False], labels[:-1] >= 0])  # labels are those of the next tokens
        learned = labels >= 0 if self.options.scored else shifted
        return example_text(ids, learned, self.codec)

    def _order(self, epoch: int) -> np.ndarray:
        return pack.shuffled(self.n_sequences, self.options.seed, epoch)

    @property
    def weighted(self) -> bool:
        return self.options.paired or any(file.own_weights is not None for file in self.files)

    def _gather(self, rows: np.ndarray) -> MicroBatch:
        at = np.concatenate([np.arange(self.rows[r], self.rows[r + 1]) for r in rows])
        pieces, reference = self.pieces[at], None
        if self.options.kind == "rewards":
            reference = self._values(pieces)
        elif self.options.paired:
            reference = np.zeros(len(at)) if self.reference is None else self.reference[at]
        weights = pieces["weight"].copy() if self.weighted else None
        taught = self.teacher.of(at) if self.teacher else None
        return MicroBatch(*self._read(pieces), tuple(pieces["length"].tolist()), weights, reference, taught)

    def _read(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) of the pieces, one after another, each (N,) int32."""
        goes_on = pieces["goes_on"].astype(bool)
        starts, lengths = pieces["start"].astype(np.int64), pieces["length"] + goes_on.astype(np.int64)
        places = zip(pieces["file"].tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
        stored = [self.files[file].read(start, stop) for file, start, stop in places]
        alike = [np.concatenate(stored)] if len({block.dtype for block in stored}) == 1 else stored
        ids, trained = (np.concatenate(parts) for parts in zip(*map(decode, alike), strict=True))
        labels = np.append(np.where(trained[1:], ids[1:], IGNORED), IGNORED).astype(np.int32)
        last = np.cumsum(lengths) - 1
        labels[last] = IGNORED
        if self.options.scored:
            classes = self._values(pieces) if self.options.kind == "classes" else 0
            labels[:] = IGNORED
            labels[pairs.scored(ids, lengths, self.options.pad)] = classes
        mine = np.ones(len(ids), bool)
        mine[last[goes_on]] = False  # the token after a piece is a label alone
        return ids[mine], labels[mine]

    def _values(self, pieces: np.ndarray) -> np.ndarray:
        """What rows say as a number, classes or margins: (pieces,) float64."""
        found = np.zeros(len(pieces))
        for i, file in enumerate(self.files):
            mine = pieces["file"] == i
            found[mine] = file.values_at(pieces["start"][mine])
        return found


def load_dataset(
    sources: Sequence[str], codec: Codec | None, options: DataOptions, progress: Progress | None = None
) -> Dataset:
    """Reads, tokenizes (or finds in the cache), holds out, cuts and packs.

    sources: `path`, `path:weight`, or `-`; a path is a file, a folder or a pattern. Raises InputError; OSError if the
    cache cannot be written.
    """
    scratch = Temporary("trireme-tokens-") if options.cache is None else None
    folder = scratch.path if scratch else Path(options.cache or "")
    reading = Reading(options, codec, parse_map(options.map), folder)
    found = [_named(text, folder) for text in sources]
    given = [file for each in found for file in each.files]
    notes = [note for each in found for note in each.notes]
    share, val_given = parse_val(options.val)
    if own := [file for each in found for file in each.held]:
        names = ", ".join(dict.fromkeys(map(str, own)))
        notes.append(f"{names}: not read, as --val is given" if options.val else f"held out, by its name: {names}")
        val_given = val_given if options.val else own
    files = tuple(tokenize(source, reading, progress) for source in given)
    if nowhere := set.intersection(*(set(file.meta["absent"]) for file in files)):
        raise InputError(f"--map names {', '.join(map(repr, sorted(nowhere)))}, a column that no row has. Correct it.")
    each = 2 if options.paired else 1  # documents of a row
    rows = documents.first_of_each(documents.all_documents(files)[::each], options.max_samples)
    used, all_rows = len(rows), sum(file.n_documents for file in files) // each
    held_out, apart = None, ""
    if val_given:
        val_files = tuple(tokenize(source, reading, progress) for source in val_given)
        held_out = _lay_out(val_given, val_files, documents.all_documents(val_files)[::each], codec, options)
        if both := {file.meta["key"] for file in files} & {file.meta["key"] for file in val_files}:
            same = next(
                str(source) for source, file in zip(val_given, val_files, strict=True) if file.meta["key"] in both
            )
            notes.append(f"{same} is trained on and held out: eval_loss does not measure the loss on unseen data")
    elif share:
        is_text = all(file.meta["format"] == "text" for file in files)
        rows, kept = documents.hold_out(rows, share, options.seed, is_text)
        held_out = _lay_out([replace(source, weight=1.0) for source in given], files, kept, codec, options)
        parted = len(rows) == used  # the end of the longest
        apart = f"its last {compact(int(kept['length'].sum()))} tokens" if parted else count(len(kept), "row")
    train = _lay_out(given, files, rows, codec, options)
    notes += _notes_on_options(files, options)
    if used < all_rows:
        notes.append(f"--max-samples {options.max_samples:,}: {used:,} of {all_rows:,} rows")
    if held_out and apart:
        notes += [f"of the rows held out: {line}" for line in held_out.report.losses()]
    notes += notes_on(files, codec, reading.renames, options.scored)
    report = replace(train.report, held_out=apart, notes=tuple(notes))
    return replace(train, report=report, held_out=held_out, scratch=scratch)


def _notes_on_options(files: Sequence[TokenFile], options: DataOptions) -> list[str]:
    """Notes on options that some rows have no use for, and on weights of rows."""
    asked = {"--system": options.system, "--chat-template-kwargs": options.variables}
    others = not all(file.meta["chats"] for file in files)
    notes = [f"{flag} is for conversations, and not used in other rows" for flag, v in asked.items() if v and others]
    if weights := [file.own_weights for file in files if file.own_weights is not None]:
        sizes = np.abs(np.concatenate(weights))
        if (sizes != 1).any():
            notes.append(f"rows count by their column 'weight', {sizes.min():g} to {sizes.max():g}")
    return notes


def find_labels(sources: Sequence[str], map: str | None) -> tuple[str, ...]:
    """The classes that rows name, as classes.labels_in finds them. Raises InputError."""
    if "-" in sources:
        raise InputError("--data -: rows that are read once cannot tell which classes there are. Give --labels A,B.")
    files = [file for text in sources for file in find_data(text).files]
    return labels_in((row.value for file in files for row in Reader(file, None).rows()), parse_map(map))


def _named(text: str, folder: Path) -> Found:
    return Found([spool(sys.stdin.buffer, folder)], [], []) if text == "-" else find_data(text)


def parse_val(val: str | None) -> tuple[float, list[DataFile]]:
    """--val as (share, files), of which one is empty. Of a folder, the files that are named as validation data, if
    any.
    """
    if not val:
        return 0.0, []
    try:
        share = float(val)
    except ValueError:
        found = find_data(val)
        return 0.0, found.held or found.files
    if not 0 <= share < 1:
        raise InputError(f"--val {val}: expected a share of the rows below 1, such as 0.02, or a file.")
    return share, []


def _lay_out(
    given: Sequence[DataFile],
    files: tuple[TokenFile, ...],
    rows: np.ndarray,
    codec: Codec | None,
    options: DataOptions,
) -> Dataset:
    """Cuts and packs `rows`, which are DOCUMENT."""
    if not rows["trained"].any():
        start, length = int(rows["start"][0]), int(rows["length"][0])
        ids, trained = decode(files[rows["file"][0]].read(start, start + min(length, 60)))
        raise InputError(
            f"no row of {len(rows):,} has a trained token after masking: no text is marked as the assistant's. "
            f"The first row begins: {example_text(ids, trained, codec)}"
        )
    weighed = documents.weigh(rows, [source.weight for source in given], options.seed)
    if unused := set(rows["file"]) - set(weighed["file"]):
        source = given[min(unused)]
        raise InputError(f"{source}:{source.weight:g}: the weight leaves none of its rows. Raise it.")
    if options.paired:
        fitted = pairs.fit(pairs.both(weighed, files), files, options.seq_len, options.long)
    else:
        if options.scored and options.long == "split":
            raise InputError("--long split: a row has one class, and is read as a whole. Take cut, drop or error.")
        fitted = documents.fit(weighed, files, options.seq_len, options.long)
    pieces = fitted.pieces
    if not len(pieces):
        texts = all(file.meta["format"] == "text" for file in files)
        why = "" if texts else ", or answer only after it"
        raise InputError(f"no row is left: all are longer than --seq-len {options.seq_len}{why}.")
    if options.paired:
        order, packed = pairs.packed(pieces, options.seq_len, options.pack)
    else:
        lengths = pieces["length"]
        order, packed = pack.best_fit(lengths, options.seq_len) if options.pack else pack.one_per_row(len(pieces))
    pieces, bounds = (pieces[order], packed) if options.scored else documents.with_labels(pieces[order], packed)
    n = len(bounds) - 1
    used = float(pieces["length"].sum()) / (n * options.seq_len)
    fitted = replace(fitted, pieces=pieces[:0])
    counts = Counts.of(pairs.both(rows, files))._replace(rows=len(rows)) if options.paired else Counts.of(rows)
    report = Report(_file_reports(given, files), counts, fitted, options, n, used)
    return Dataset(files, pieces, bounds, options, codec, report, left_out=len(packed) - len(bounds))


def _file_reports(given: Sequence[DataFile], files: Sequence[TokenFile]) -> tuple[FileReport, ...]:
    meta = [file.meta for file in files]
    return tuple(
        FileReport(str(source), m["rows"], m["bad"], m["first_bad"], m["format"], source.weight, tuple(m["unused"]))
        for source, m in zip(given, meta, strict=True)
    )

"""The data of a run: files to tokens, tokens to packed rows, rows to micro-batches.

    dataset = load_dataset(["chats.jsonl"], load_codec(checkpoint), DataOptions(seq_len=4096, val="0.02"))
    for micro_batch in dataset.step(i, batch_size=16, micro_batch=2): ...

A step is a pure function of (data, options, i), so resuming needs nothing but i. Tokens lie in a cache on disk; what is
held in memory is a few numbers a document.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trireme.engine.data import documents, pack
from trireme.engine.data.cache import TokenFile
from trireme.engine.data.codec import Codec
from trireme.engine.data.formats import parse_map
from trireme.engine.data.prepare import Progress, Reading, tokenize
from trireme.engine.data.report import FileReport, Report, example_text, notes_on
from trireme.engine.data.sources import DataFile, parse_data_file, spool
from trireme.models.config import InputError
from trireme.storage.temporary import Temporary

IGNORED = -100  # the label of a token that is not trained


@dataclass(frozen=True)
class MicroBatch:
    """What the device computes at once: documents back to back, without padding."""

    ids: np.ndarray  # (N,) int32
    labels: np.ndarray  # (N,) int32: the token after ids[t] in its document where it is trained, else IGNORED
    lengths: tuple[int, ...]  # tokens of each document; sum N

    @property
    def trained(self) -> int:
        """How many labels count."""
        return int((self.labels >= 0).sum())


@dataclass(frozen=True)
class DataOptions:
    """How data is read. What is None is chosen from the data."""

    seq_len: int = 2048  # tokens of a row, at most
    val: str | None = None  # a share of the rows to hold out (0.02), or a file
    map: str | None = None  # prompt=question,completion=answer
    long: str | None = None  # documents that are longer: cut, drop, split, error; None: split text, cut the rest
    pack: bool = True  # several documents a row
    skip_bad: bool = False
    seed: int = 42
    vocab_size: int | None = None  # of the model; ids beyond are an error
    cache: Path | None = None  # folder for tokens; None: a temporary one


@dataclass(frozen=True)
class Dataset:
    """Rows of tokens in an order that the seed decides. Made by load_dataset."""

    files: tuple[TokenFile, ...]
    pieces: np.ndarray  # (pieces,) documents.PIECE, grouped by row
    rows: np.ndarray  # (rows + 1,) int64: row r is pieces[rows[r]:rows[r + 1]]
    seed: int
    codec: Codec | None
    report: Report
    held_out: Dataset | None = None  # the evaluation data
    scratch: Temporary | None = field(default=None, repr=False)  # lives as long as the data

    @property
    def n_sequences(self) -> int:
        """Packed rows: what --batch-size counts."""
        return len(self.rows) - 1

    @property
    def is_text(self) -> bool:
        """Whether all of it is running text (one epoch is usual) rather than chats or completions (three)."""
        return all(file.meta["format"] == "text" for file in self.files)

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.pieces["length"].sum())

    @property
    def nbytes(self) -> int:
        """Of the tokens on disk: a file that is given twice, or of which a share is held out, is there once."""
        files = (*self.files, *(self.held_out.files if self.held_out else ()))
        return sum({file.meta["key"]: file.meta["bytes"] for file in files}.values())

    @property
    def document(self) -> int:
        """Tokens of a usual document: in one of this length a token attends to as many as it does here on average."""
        lengths = self.pieces["length"].astype(float)
        return round((lengths**2).sum() / lengths.sum())

    @property
    def trained(self) -> float:
        """Share of the tokens that are learned, before anything is cut."""
        rows = self.report.rows
        return float(rows["trained"].sum() / rows["length"].sum())

    @property
    def fingerprint(self) -> str:
        """Of all that decides every step: equal fingerprints give equal micro-batches."""
        keys = "".join(file.meta["key"] for file in self.files)
        layout = [zlib.crc32(array.tobytes()) for array in (self.pieces, self.rows)]
        return f"{zlib.crc32(f'{keys} {layout} {self.seed}'.encode()):08x}"

    def steps_per_epoch(self, batch_size: int) -> int:
        """Optimizer steps that see every row once; the last may be smaller."""
        return math.ceil(self.n_sequences / batch_size)

    def step(self, i: int, batch_size: int, micro_batch: int) -> list[MicroBatch]:
        """The micro-batches of step i, counted from 0 over all epochs, of `micro_batch` rows or fewer."""
        epoch, at = divmod(i, self.steps_per_epoch(batch_size))
        order = self._order(epoch)[at * batch_size : (at + 1) * batch_size]
        return [self._gather(order[k : k + micro_batch]) for k in range(0, len(order), micro_batch)]

    def batches(self, micro_batch: int, most: int | None = None) -> Iterator[MicroBatch]:
        """Every row once, or `most` rows drawn by the seed, in an order that never changes: for evaluation."""
        rows = np.arange(self.n_sequences)
        if most is not None and most < len(rows):
            rows = np.sort(self._order(0)[:most])
        for k in range(0, len(rows), micro_batch):
            yield self._gather(rows[k : k + micro_batch])

    def describe_held_out(self) -> list[str]:
        """The same of held-out files; a share of the rows is in the data report."""
        return self.held_out.report.lines() if self.held_out and not self.report.held_out else []

    def example(self, k: int = 0) -> str:
        """Document k of the files, decoded; what is trained on stands in [..]."""
        in_order = np.lexsort((self.pieces["start"], self.pieces["file"]))
        ids, labels = self._piece(self.pieces[in_order[k % len(in_order)]])
        learned = np.concatenate([[False], labels[:-1] >= 0])  # a label says what its token is followed by
        return example_text(ids, learned, self.codec)

    def _order(self, epoch: int) -> np.ndarray:
        return pack.shuffled(self.n_sequences, self.seed, epoch)

    def _piece(self, piece: np.void) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) of a piece, each (length,) int32."""
        start, length = int(piece["start"]), int(piece["length"])
        ids, trained = self.files[piece["file"]].read(start, start + length + bool(piece["goes_on"]))
        labels = np.full(length, IGNORED, np.int32)
        n = len(ids) - 1
        labels[:n] = np.where(trained[1:], ids[1:], IGNORED)
        return ids[:length], labels

    def _gather(self, rows: np.ndarray) -> MicroBatch:
        pieces = np.concatenate([self.pieces[self.rows[r] : self.rows[r + 1]] for r in rows])
        parts = [self._piece(piece) for piece in pieces]
        ids = np.concatenate([ids for ids, _ in parts])
        labels = np.concatenate([labels for _, labels in parts])
        return MicroBatch(ids, labels, tuple(int(n) for n in pieces["length"]))


def load_dataset(
    sources: Sequence[str], codec: Codec | None, options: DataOptions, progress: Progress | None = None
) -> Dataset:
    """Reads, tokenizes (or finds in the cache), holds out, cuts and packs.

    sources: `path`, `path:weight`, or `-`, standard input. InputError says what is wrong with the data.
    OSError where the cache cannot be written.
    """
    scratch = Temporary("trireme-tokens-") if options.cache is None else None
    reading = Reading(
        codec,
        parse_map(options.map),
        options.skip_bad,
        options.vocab_size,
        scratch.path if scratch else Path(options.cache or ""),
    )
    given = [spool(sys.stdin.buffer, reading.folder) if text == "-" else parse_data_file(text) for text in sources]
    share, val_given = _parse_val(options.val)
    files = tuple(tokenize(source, reading, progress) for source in given)
    rows = documents.all_documents(files)
    held_out, n_held = None, 0
    if val_given:
        val_files = tuple(tokenize(source, reading, progress) for source in val_given)
        held_out = _lay_out(val_given, val_files, documents.all_documents(val_files), codec, options)
    elif share:
        is_text = all(file.meta["format"] == "text" for file in files)
        rows, kept = documents.hold_out(rows, share, options.seed, is_text)
        held_out, n_held = _lay_out([DataFile(s.path) for s in given], files, kept, codec, options), len(kept)
    train = _lay_out(given, files, rows, codec, options)
    lost = [f"of the rows held out: {line}" for line in held_out.report.losses()] if held_out and n_held else []
    report = replace(train.report, held_out=n_held, notes=(*lost, *notes_on(files, codec)))
    return replace(train, report=report, held_out=held_out, scratch=scratch)


def _parse_val(val: str | None) -> tuple[float, list[DataFile]]:
    """--val as (share, files), one of which is empty."""
    if not val:
        return 0.0, []
    try:
        share = float(val)
    except ValueError:
        return 0.0, [parse_data_file(val)]
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
    """Cuts and packs the documents `rows` of `files`."""
    if not rows["trained"].any():
        start, length = int(rows["start"][0]), int(rows["length"][0])
        ids, trained = files[rows["file"][0]].read(start, start + min(length, 60))
        raise InputError(
            f"no row of {len(rows):,} has a trained token after masking: no text is marked as the assistant's. "
            f"The first row begins: {example_text(ids, trained, codec)}"
        )
    weighed = documents.weigh(rows, [source.weight for source in given], options.seed)
    if unused := set(rows["file"]) - set(weighed["file"]):
        source = given[min(unused)]
        raise InputError(f"{source.path}:{source.weight:g}: the weight leaves none of its rows. Raise it.")
    fitted = documents.fit(weighed, files, options.seq_len, options.long)
    pieces = fitted.pieces
    if not len(pieces):
        raise InputError(f"no row is left: all are longer than --seq-len {options.seq_len}, or answer only after it.")
    lengths = pieces["length"]
    order, starts = pack.best_fit(lengths, options.seq_len) if options.pack else pack.one_per_row(len(pieces))
    n = len(starts) - 1
    used = float(lengths.sum()) / (n * options.seq_len)
    report = Report(_file_reports(given, files), rows, fitted, options.seq_len, n, used, options.pack)
    return Dataset(files, pieces[order], starts, options.seed, codec, report)


def _file_reports(given: Sequence[DataFile], files: Sequence[TokenFile]) -> tuple[FileReport, ...]:
    meta = [file.meta for file in files]
    return tuple(
        FileReport(
            str(source.path), m["rows"], m["bad"], m["first_bad"], m["format"], source.weight, tuple(m["unused"])
        )
        for source, m in zip(given, meta, strict=True)
    )

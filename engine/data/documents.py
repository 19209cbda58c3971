"""Documents as tables of numbers: held out, weighted, cut or split, packed into sequences of a fixed length.

Rows are (n, documents of a row), so that pairs need no functions of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trireme.engine.data.tokens import TokenFile, unpack_tokens
from trireme.models.config import InputError

# Tokens [start, start + length) of a file, `trained` of them learned.
DOCUMENT = np.dtype([("file", "<u2"), ("start", "<i8"), ("length", "<i8"), ("trained", "<i8"), ("weight", "<f8")])

# Part of a document. `goes_on`: the token after it is its last label.
PIECE = np.dtype([("file", "<u2"), ("start", "<i8"), ("length", "<i4"), ("goes_on", "?"), ("weight", "<f8")])

_HOLD_OUT, _WEIGH = 1 << 32, 1 << 33  # random keys, other than epoch numbers
_FEW = 8  # documents; fewer are no sample, and parts of all are held out


def documents_of(files: Sequence[TokenFile], kind: str) -> np.ndarray:
    """All rows in order, (n, documents of a row) DOCUMENT. Counterparts of labelled answers are behind all answers."""
    tables = []
    for i, file in enumerate(files):
        table = np.zeros(file.n_documents, DOCUMENT)
        table["file"], table["start"] = i, file.offsets[:-1]
        table["length"], table["trained"], table["weight"] = file.lengths, file.trained, file.weights
        paired = kind in ("pairs", "rewards")
        tables.append(table.reshape(2, -1).T if kind == "labels" else table.reshape(-1, 2 if paired else 1))
    return np.concatenate(tables)


def counterparts(prompts: np.ndarray, name: str) -> np.ndarray:
    """For each answer of a file the number of one of another prompt, by hashes (n,). InputError: all are of one."""
    n, order = len(prompts), np.argsort(prompts, kind="stable")
    first, stop = (np.searchsorted(prompts[order], prompts[order], side) for side in ("left", "right"))  # of a prompt
    n_others = n - (stop - first)
    if not n_others.all():
        raise InputError(f"{name} has one prompt alone; --method kto compares answers of several prompts of a file.")
    result = np.empty(n, np.int64)
    result[order] = order[(stop + (np.arange(n) - first) % n_others) % n]
    return result


def hold_out(rows: np.ndarray, share: float, seed: int, text_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, held out). `text_len`: of running text --seq-len, else 0; of a few long texts, parts of that length are
    held out, which are drawn from all of them.
    """
    lengths, size = rows["length"][:, 0], int(rows["length"].max())
    if text_len and round(share * len(rows)) < _FEW:
        size = min(text_len, int(share * lengths.sum() / 4))  # a few parts, also of a short text
    document, start, length = cut_points(lengths, max(size, 1))
    n = max(1, round(share * len(document)))
    if n >= len(document) or (size < 2 and text_len):
        raise InputError(
            f"--val {share:g} of {len(rows):,} rows leaves nothing to train on, or to hold out. Give a file."
        )
    chosen = np.zeros(len(document), bool)
    chosen[shuffled(len(document), seed, _HOLD_OUT)[:n]] = True
    first = np.flatnonzero(chosen | (np.diff(document * 2 + chosen, prepend=-1) != 0))  # others stay together
    parts = rows[document[first]]
    parts["start"][:, 0] += start[first]
    parts["length"][:, 0] = np.add.reduceat(length, first)
    parts["trained"] = np.minimum(parts["trained"], parts["length"])
    return parts[~chosen[first]], parts[chosen[first]]


def weigh(rows: np.ndarray, weights: Sequence[float], seed: int) -> np.ndarray:
    """The rows, each of file f repeated weights[f] times; for the fractional part the seed selects rows."""
    repeats = np.zeros(len(rows), np.int64)
    for i, weight in enumerate(weights):
        of_file = np.flatnonzero(rows["file"][:, 0] == i)
        repeats[of_file] = int(weight)
        repeats[of_file[shuffled(len(of_file), seed, _WEIGH + i)[: round((weight % 1) * len(of_file))]]] += 1
    return np.repeat(rows, repeats, axis=0)


@dataclass(frozen=True)
class Fitted:
    """Pieces, and numbers of rows that did not fit."""

    pieces: np.ndarray  # (n, documents of a row) PIECE
    rows: int  # before
    longer: int = 0
    split: int = 0
    dropped: int = 0
    lost: int = 0  # that have nothing to learn within the limit
    unlearnable: int = 0  # that have nothing to learn at all
    alike: int = 0  # pairs that nothing tells apart
    longest: int = 0  # tokens of a document


def fit(rows: np.ndarray, files: Sequence[TokenFile], seq_len: int, long: str | None) -> Fitted:
    """Fits documents into seq_len tokens each. `long`: as of DataOptions. Raises InputError."""
    n, width = len(rows), rows.shape[1]
    rows = rows[(rows["trained"] > 0).all(1)]
    unlearnable, longest = n - len(rows), int(rows["length"].max(initial=0))
    longer: np.ndarray = np.asarray((rows["length"] > seq_len).any(1))
    n_longer = int(longer.sum())
    if long == "error" and n_longer:
        summary = f"{n_longer:,} rows have more than --seq-len {seq_len} tokens, the longest {longest:,}"
        raise InputError(f"{summary}. Give a larger --seq-len, or --long cut or drop.")
    if long == "drop":
        rows, longer = rows[~longer], longer[~longer]
    text = np.array([is_text(file) for file in files])[rows["file"][:, 0]]
    split = longer & ((long == "split") | (text & (long is None))) & (width == 1)  # pairs are compared as wholes
    documents, splits = rows.reshape(-1), np.repeat(split, width)
    lengths = np.where(splits, documents["length"], documents["length"].clip(max=seq_len))
    document, start, length = cut_points(lengths, seq_len)
    pieces = np.zeros(len(document), PIECE)
    pieces["file"], pieces["weight"] = documents["file"][document], documents["weight"][document]
    pieces["start"], pieces["length"] = documents["start"][document] + start, length
    pieces["goes_on"] = splits[document] & (start + length < documents["length"][document])
    keep = np.ones(len(pieces), bool)
    for i in np.flatnonzero(np.repeat(longer & ~text, width)[document]):
        file, first, n_tokens, goes_on, _ = pieces[i].tolist()
        keep[i] = unpack_tokens(files[file].read(first + 1, first + n_tokens + goes_on))[1].any()
    complete: np.ndarray = np.asarray(keep.reshape(-1, width).all(1))
    lost, n_split = int((~complete & ~split[document[::width] // width]).sum()), int(split.sum())
    dropped = n_longer if long == "drop" else 0
    fitted, alike = pieces.reshape(-1, width)[complete], 0
    if width > 1:
        tokens = lambda piece: files[piece["file"]].read(int(piece["start"]), int(piece["start"] + piece["length"]))
        alike = sum(np.array_equal(tokens(a), tokens(b)) for a, b in fitted if a["length"] == b["length"])
    return Fitted(fitted, n, n_longer, n_split, dropped, lost, unlearnable, alike, longest)


def is_text(file: TokenFile) -> bool:
    """Whether all its rows are running text."""
    return [*file.meta["forms"]] == ["text"]


def pack_rows(pieces: np.ndarray, room: int, together: bool, scored: bool) -> tuple[np.ndarray, np.ndarray]:
    """(pieces (m,) in the order of sequences, bounds (sequences + 1,)).

    pieces (n, documents of a row). `together`: several rows in a sequence of `room` tokens. A text may end in a piece
    of one token, which has no label: a sequence of such pieces is left out after packing, so that others do not depend
    on it.
    """
    width, lengths = pieces.shape[1], pieces["length"].sum(1, dtype=np.int64)
    order, bounds = best_fit(lengths, room) if together else (np.arange(len(lengths)), np.arange(len(lengths) + 1))
    flat, bounds = pieces[order].reshape(-1), width * bounds
    has_label = np.ones(len(flat), bool) if scored else flat["length"] + flat["goes_on"] > 1
    keep = np.add.reduceat(has_label, bounds[:-1], dtype=np.int64) > 0
    counts = np.diff(bounds)
    starts = np.concatenate([[0], np.cumsum(counts[keep])]).astype(np.int64)
    return flat[np.repeat(keep, counts)], starts


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the longest documents first, each into the fullest row that has room. Deterministic.

    lengths (n,), from 1 to capacity. Returns (order (n,) int64, starts (rows + 1,) int64): row r has
    order[starts[r]:starts[r + 1]].
    """
    assert len(lengths)
    assert lengths.min() >= 1
    assert lengths.max() <= capacity
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    open_rows: dict[int, list[int]] = defaultdict(list)  # by room left, the last is taken first
    row_of, rooms, n_rows = np.empty(len(lengths), np.int64), 0, 0  # bit r of rooms: open_rows[r] is filled
    for document, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        fitting = rooms >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            row = open_rows[room].pop()
            rooms ^= (not open_rows[room]) << room
        else:
            row, n_rows = n_rows, n_rows + 1
        row_of[document] = row
        if left := room - length:
            open_rows[left].append(row)
            rooms |= 1 << left
    order = np.argsort(row_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=n_rows))])
    return order.astype(np.int64), starts.astype(np.int64)


def cut_points(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents into windows of seq_len tokens, the last one shorter; an empty document has none.

    lengths (n,). Returns (document (m,), start (m,) within it, length (m,)).
    """
    windows = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), windows)
    first = np.repeat(np.cumsum(windows) - windows, windows)
    start = (np.arange(len(document)) - first) * seq_len
    return document, start, np.minimum(lengths[document] - start, seq_len)


@lru_cache(maxsize=2)  # one for an epoch's steps
def shuffled(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n), int64, read-only, the same on every machine and with every numpy."""
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(n)
    order = np.argsort(raw, kind="stable")
    order.flags.writeable = False
    return order

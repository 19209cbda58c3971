"""Selects documents: trained or held out, weighted, long ones cut or split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trireme.engine.data.cache import TokenFile, decode
from trireme.engine.data.pack import cut_points, shuffled
from trireme.models.config import InputError

# Tokens [start, start + length) of a file, `trained` of them learned.
DOCUMENT = np.dtype([("file", "<u2"), ("start", "<i8"), ("length", "<i8"), ("trained", "<i8"), ("weight", "<f8")])

# Part of a document. `goes_on`: the token after it is its last label.
PIECE = np.dtype([("file", "<u2"), ("start", "<i8"), ("length", "<i4"), ("goes_on", "?"), ("weight", "<f8")])


def all_documents(files: Sequence[TokenFile]) -> np.ndarray:
    """All documents in order, (n,) DOCUMENT."""
    tables = []
    for i, file in enumerate(files):
        table = np.zeros(file.n_documents, DOCUMENT)
        table["file"], table["start"] = i, file.offsets[:-1]
        table["length"], table["trained"], table["weight"] = file.lengths, file.trained, file.weights
        tables.append(table)
    return np.concatenate(tables)


def first_of_each(documents: np.ndarray, most: int | None) -> np.ndarray:
    """The first documents of each file, at most `most`."""
    if most is None or not len(documents):
        return documents
    starts = np.flatnonzero(np.diff(documents["file"], prepend=-1))
    return documents[
        np.concatenate([np.arange(a, b)[:most] for a, b in zip(starts, [*starts[1:], len(documents)], strict=True)])
    ]


def hold_out(documents: np.ndarray, share: float, seed: int, is_text: bool) -> tuple[np.ndarray, np.ndarray]:
    """(train, held out). If there are too few documents of text, the end of the longest is held out."""
    n = round(share * len(documents))
    if n == 0 and is_text:
        return _part_the_longest(documents, share)
    n = max(n, 1)
    if n >= len(documents):
        raise InputError(
            f"--val {share:g} of {len(documents):,} rows leaves nothing to train on. Give a smaller share, or a file."
        )
    chosen = np.zeros(len(documents), bool)
    chosen[shuffled(len(documents), seed, _HOLD_OUT)[:n]] = True
    return documents[~chosen], documents[chosen]


_HOLD_OUT, _WEIGH = 1 << 32, 1 << 33  # random keys, other than epoch numbers


def _part_the_longest(documents: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    longest = int(documents["length"].argmax())
    n = int(share * documents["length"].sum())
    head, tail = documents.copy(), documents[longest : longest + 1].copy()
    if not 2 <= n <= tail["length"][0] - 2:
        raise InputError(f"--val {share:g}: the text is too short to hold out a part of it. Give a file.")
    head["length"][longest] -= n
    head["trained"][longest] -= n
    tail["start"] += head["length"][longest]
    tail["length"], tail["trained"] = n, n - 1  # not its first token
    return head, tail


def weigh(documents: np.ndarray, weights: Sequence[float], seed: int) -> np.ndarray:
    """The documents, each of file f repeated weights[f] times; for the fractional part the seed selects documents."""
    if all(weight == 1 for weight in weights):
        return documents
    parts = []
    for i, weight in enumerate(weights):
        mine = documents[documents["file"] == i]
        extra = np.sort(shuffled(len(mine), seed, _WEIGH + i)[: round((weight % 1) * len(mine))])
        parts += [mine] * int(weight) + [mine[extra]]
    return np.concatenate(parts)


@dataclass(frozen=True)
class Fitted:
    """Pieces, and numbers of documents that did not fit."""

    pieces: np.ndarray  # (n,) PIECE
    longer: int = 0
    cut: int = 0
    split: int = 0
    dropped: int = 0
    unlearnable: int = 0  # documents without a trained token left
    alike: int = 0  # pairs that nothing tells apart


def fit(documents: np.ndarray, files: Sequence[TokenFile], seq_len: int, long: str | None) -> Fitted:
    """Fits documents into seq_len tokens. `long`: as of DataOptions."""
    learnable = documents["trained"] > 0
    unlearnable = int((~learnable).sum())
    documents = documents[learnable]
    longer = documents["length"] > seq_len
    if long == "error" and longer.any():
        raise InputError(
            f"{int(longer.sum()):,} rows have more than --seq-len {seq_len} tokens, "
            f"the longest {documents['length'].max():,}. "
            "Give a larger --seq-len, or --long cut, drop or split."
        )
    n_longer = dropped = int(longer.sum())
    if long == "drop":
        documents, longer = documents[~longer], longer[~longer]
    else:
        dropped = 0
    text = np.array([file.meta["format"] == "text" for file in files])[documents["file"]]
    split = longer & ((long == "split") | (text & (long is None)))
    pieces, document = _pieces(documents, split, seq_len)
    keep = np.ones(len(pieces), bool)
    for i in np.flatnonzero((longer & ~text)[document]):
        keep[i] = learns(pieces[i], files)
    lost = int((~split[document] & ~keep).sum())
    n_split = int(split.sum())
    return Fitted(pieces[keep], n_longer, n_longer - dropped - n_split - lost, n_split, dropped, unlearnable + lost)


def with_labels(pieces: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pieces and bounds of the rows that have a label: a text may end in a piece of one token, which has none.

    Called after packing, so that other rows do not depend on it.
    """
    labels = pieces["length"] + pieces["goes_on"] > 1
    keep = np.add.reduceat(labels, rows[:-1], dtype=np.int64) > 0
    if keep.all():
        return pieces, rows
    counts = np.diff(rows)
    return pieces[np.repeat(keep, counts)], np.concatenate([[0], np.cumsum(counts[keep])]).astype(rows.dtype)


def _pieces(documents: np.ndarray, split: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(pieces, the document of each): windows of the documents if `split`, else their beginnings."""
    document, start, length = cut_points(
        np.where(split, documents["length"], documents["length"].clip(max=seq_len)), seq_len
    )
    pieces = np.zeros(len(document), PIECE)
    pieces["file"] = documents["file"][document]
    pieces["start"] = documents["start"][document] + start
    pieces["length"], pieces["weight"] = length, documents["weight"][document]
    pieces["goes_on"] = split[document] & (start + length < documents["length"][document])
    return pieces, document


def learns(piece: np.void, files: Sequence[TokenFile]) -> bool:
    """Whether any token of a piece is trained."""
    start = int(piece["start"])
    stop = start + int(piece["length"]) + bool(piece["goes_on"])
    _, trained = decode(files[piece["file"]].read(start + 1, stop))
    return bool(trained.any())

"""Pairs of documents that a step compares: written one after the other, cut and packed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trireme.engine.data import pack
from trireme.engine.data.cache import TokenFile, TokenWriter
from trireme.engine.data.documents import PIECE, Fitted, learns
from trireme.engine.data.encode import Encoded
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.pairs import Kind
from trireme.models.config import InputError

# ---------------------------------------------------------------- written


@dataclass
class PairWriter:
    """Takes the answers of rows in order and writes pairs: the two answers of a row, or an answer and its counterpart.

    The counterpart of a labelled answer is its prompt with the answer of the row before (for the first row: of the
    next), as kto measures its KL.
    """

    kind: Kind
    writer: TokenWriter
    waiting: list[tuple[Encoded | BadRow, float]] = field(default_factory=list)
    last: Encoded | None = None  # labelled

    def add(self, made: Encoded | BadRow, weight: float, value: float = 0.0) -> BadRow | None:
        """What is wrong with the row, once though it has two answers; or None. `value`: of an answer."""
        if isinstance(made, Encoded) and not made.trained.any():
            made = BadRow("an answer has no token to learn")
        if self.kind == "labels":
            if isinstance(made, BadRow):
                return made
            self._labelled(made, weight)
            return None
        self.waiting.append((made, weight))
        if len(self.waiting) < 2:
            return None
        both, self.waiting = self.waiting, []
        if fault := next((each for each, _ in both if isinstance(each, BadRow)), None):
            return fault
        for each, weight in both:
            assert isinstance(each, Encoded)
            self.writer.add(each.ids, each.trained, weight=weight, value=value)
            value = 0.0  # a margin is of a pair's first
        return None

    def _labelled(self, made: Encoded, weight: float) -> None:
        if self.last is None and not self.waiting:
            self.waiting.append((made, weight))
            return
        for first, its_weight in self.waiting:
            assert isinstance(first, Encoded)
            self._put(first, made, its_weight)
            self.last = first
        self.waiting = []
        assert self.last is not None
        self._put(made, self.last, weight)
        self.last = made

    def _put(self, made: Encoded, other: Encoded, weight: float) -> None:
        self.writer.add(made.ids, made.trained, weight=weight)
        mine, theirs = int(made.trained.argmax()), int(other.trained.argmax())
        trained = np.concatenate([np.zeros(mine, bool), other.trained[theirs:]])
        self.writer.add(np.concatenate([made.ids[:mine], other.ids[theirs:]]), trained, weight=weight)

    def finish(self) -> None:
        """Raises InputError if an answer has no counterpart."""
        if self.waiting:
            raise InputError("--method kto compares each answer with that of another row, and there is one row alone.")


def scored(ids: np.ndarray, lengths: np.ndarray, pad: int | None) -> np.ndarray:
    """The token of each document that a score head reads: the last one that is not `pad`, else the first.

    This is how transformers finds it, whose batches end with padding. ids: of documents with these lengths, one after
    another.
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(ids))
    return np.maximum(np.maximum.reduceat(np.where(ids == (-1 if pad is None else pad), -1, places), starts), starts)


# ---------------------------------------------------------------- laid out


def both(firsts: np.ndarray, files: Sequence[TokenFile]) -> np.ndarray:
    """(2n,) DOCUMENT: the first document of each pair, from `firsts` (n,), and its second, which follows it."""
    found = np.repeat(firsts, 2)
    seconds = found[1::2]
    for i, file in enumerate(files):
        mine = firsts["file"] == i
        at = np.searchsorted(file.offsets, firsts["start"][mine]) + 1
        rows = seconds[mine]
        rows["start"], rows["length"], rows["trained"] = file.offsets[at], file.lengths[at], file.trained[at]
        seconds[mine] = rows
    return found


def fit(documents: np.ndarray, files: Sequence[TokenFile], seq_len: int, long: str | None) -> Fitted:
    """Fits pairs, (2n,) DOCUMENT, into seq_len tokens: the ends of answers are cut, those of the longer one first.
    Counts pairs.
    """
    if long == "split":
        raise InputError("--long split: a pair's documents are compared as wholes. Take cut, drop or error.")
    lengths = documents["length"].reshape(-1, 2)
    longer = lengths.sum(1) > seq_len
    if long == "error" and longer.any():
        raise InputError(
            f"{int(longer.sum()):,} pairs have more than --seq-len {seq_len} tokens, the longest "
            f"{lengths.sum(1).max():,}. Give a larger --seq-len, or --long cut or drop."
        )
    limits = np.maximum(seq_len // 2, seq_len - lengths[:, ::-1])
    pieces = np.zeros(len(documents), PIECE)
    for name in ("file", "start", "weight"):
        pieces[name] = documents[name]
    pieces["length"] = np.minimum(lengths, limits).reshape(-1)
    keep = ~longer if long == "drop" else np.ones(len(lengths), bool)
    dropped = int((~keep).sum())
    for i in np.flatnonzero(longer & keep):
        keep[i] = all(learns(piece, files) for piece in pieces[2 * i : 2 * i + 2])
    lost = int((~keep).sum()) - dropped
    kept = pieces[np.repeat(keep, 2)]
    cut = int((longer & keep).sum())
    return Fitted(kept, int(longer.sum()), cut, dropped=dropped, unlearnable=lost, alike=_alike(kept, files))


def _alike(pieces: np.ndarray, files: Sequence[TokenFile]) -> int:
    """The number of pairs, (2n,) PIECE, whose two documents are equal."""
    pairs = pieces.reshape(-1, 2)
    text = lambda piece: files[piece["file"]].read(int(piece["start"]), int(piece["start"] + piece["length"]))
    same = np.flatnonzero(pairs["length"][:, 0] == pairs["length"][:, 1])
    return sum(np.array_equal(text(good), text(bad)) for good, bad in pairs[same])


def packed(pieces: np.ndarray, seq_len: int, together: bool) -> tuple[np.ndarray, np.ndarray]:
    """As pack.best_fit, with each pair in one row; without `together`, one pair a row."""
    lengths = pieces["length"].reshape(-1, 2).sum(1)
    order, rows = pack.best_fit(lengths, seq_len) if together else pack.one_per_row(len(lengths))
    return (2 * order[:, None] + np.arange(2)).reshape(-1), 2 * rows

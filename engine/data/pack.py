"""Packing: documents in rows of a fixed length."""

from __future__ import annotations

from array import array
from collections import defaultdict
from functools import lru_cache

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the longest documents first, each into the fullest row that has room. Deterministic.

    lengths (n,), from 1 to capacity. Returns (order (n,) int64, starts (rows + 1,) int64): row r has
    order[starts[r]:starts[r + 1]].
    """
    assert len(lengths)
    assert lengths.min() >= 1
    assert lengths.max() <= capacity
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    filled = np.empty(len(lengths), np.int64)  # rows, in that order
    open_rows: dict[int, array[int]] = defaultdict(lambda: array("q"))  # by room left, the last is taken first
    rooms = 0  # bit r: open_rows[r] is filled
    n_rows = at = 0
    for length, many in zip(*(part[::-1].tolist() for part in np.unique(lengths, return_counts=True)), strict=True):
        end = at + many
        while at < end:  # rows of one room, each as full as these documents make it
            fitting = rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = room // length  # documents a row
            wanted = -(-(end - at) // each)
            if fitting:
                there = open_rows[room]
                taken = np.frombuffer(there[-wanted:], np.int64)[::-1]
                del there[-wanted:]
                rooms ^= (not there) << room
            else:
                taken = np.arange(n_rows, n_rows + wanted)
                n_rows += wanted
            n = min(end - at, each * len(taken))
            filled[at : at + n] = np.repeat(taken, each)[:n]
            at += n
            last = n - each * (len(taken) - 1)  # documents of the last row
            for rows, left in ((taken[:-1], room - each * length), (taken[-1:], room - last * length)):
                if left and len(rows):
                    open_rows[left].frombytes(rows.tobytes())
                    rooms |= 1 << left
    row_of = np.empty(len(lengths), np.int64)
    row_of[by_length] = filled
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


def one_per_row(n: int) -> tuple[np.ndarray, np.ndarray]:
    """As best_fit, with one document in each row."""
    return np.arange(n, dtype=np.int64), np.arange(n + 1, dtype=np.int64)


@lru_cache(maxsize=2)  # one for an epoch's steps
def shuffled(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n), int64, read-only, the same on every machine and with every numpy."""
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(n)
    order = np.argsort(raw, kind="stable")
    order.flags.writeable = False
    return order

"""Packing: documents in rows of a fixed length."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the longest first, into the fullest row that takes it. Deterministic.

    lengths (n,), in 1..capacity. Returns (order (n,) int64, starts (rows + 1,) int64): row r holds
    order[starts[r]:starts[r + 1]].
    """
    assert len(lengths)
    assert lengths.min() >= 1
    assert lengths.max() <= capacity
    row_of = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by room left
    rooms = 0  # bit r: open_rows[r] is filled
    n_rows = 0
    for i in np.argsort(-lengths.astype(np.int64), kind="stable"):
        length = int(lengths[i])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, n_rows
            n_rows += 1
        row_of[i] = row
        if room > length:
            open_rows[room - length].append(row)
            rooms |= 1 << (room - length)
    order = np.argsort(row_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=n_rows))])
    return order.astype(np.int64), starts.astype(np.int64)


def cut_points(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows of seq_len tokens, the last shorter; an empty document has none.

    lengths (n,). Returns (document (m,), start (m,) within it, length (m,)).
    """
    windows = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), windows)
    first = np.repeat(np.cumsum(windows) - windows, windows)
    start = (np.arange(len(document)) - first) * seq_len
    return document, start, np.minimum(lengths[document] - start, seq_len)


def one_per_row(n: int) -> tuple[np.ndarray, np.ndarray]:
    """As best_fit, a document a row."""
    return np.arange(n, dtype=np.int64), np.arange(n + 1, dtype=np.int64)


@lru_cache(maxsize=2)  # one for an epoch's steps
def shuffled(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n), int64, read-only, equal on every machine and numpy."""
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(n)
    order = np.argsort(raw, kind="stable")
    order.flags.writeable = False
    return order

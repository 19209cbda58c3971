"""A micro-batch as data gives it, in numpy: tokens with labels, documents with weights. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trireme.models.losses.preferences import Documents

IGNORED = -100  # label of an untrained token
Taught = tuple[np.ndarray, np.ndarray, np.ndarray]  # as head.Shares


@dataclass(frozen=True)
class MicroBatch:
    """N tokens of documents back to back, without padding."""

    ids: np.ndarray  # (N,) int32
    # (N,) int32: the token after ids[t] in its document if trained, else IGNORED. Where documents are scored: their
    # class, or of pairs 0, at the token that is.
    labels: np.ndarray
    lengths: Sequence[int]  # of documents; sum N
    weights: np.ndarray | None = None  # (documents,) float64; None: 1. Of kto's undesirable answers below 0
    # (documents,) float64, of pairs: log-probabilities by the reference, or 0; of rewards margins, at their first
    reference: np.ndarray | None = None
    taught: Taught | None = None  # of its labels, in their order

    @property
    def trained(self) -> int:
        """Number of labels."""
        return int((self.labels >= 0).sum())

    @property
    def documents(self) -> Documents | None:
        """The documents of preference pairs; None for other data."""
        if self.reference is None or self.weights is None:
            return None
        lengths = np.array(self.lengths, np.int64)
        trained = np.add.reduceat((self.labels >= 0).astype(np.int64), np.cumsum(lengths) - lengths)
        return Documents(lengths, trained, self.weights, self.reference)

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Of labelled answers: the answers, and their counterparts, whose KL is only read forward."""
        starts, ends = np.cumsum((0, *self.lengths[:-1])), np.cumsum(self.lengths)
        halves = []
        for first in (0, 1):
            index = np.concatenate([np.arange(*span) for span in zip(starts[first::2], ends[first::2], strict=True)])
            weights, reference = (None if t is None else t[first::2] for t in (self.weights, self.reference))
            halves.append(MicroBatch(self.ids[index], self.labels[index], self.lengths[first::2], weights, reference))
        return halves[0], halves[1]

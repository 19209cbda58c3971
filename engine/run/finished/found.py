"""Results of an evaluation: loss, with perplexity or accuracy; for preferences accuracy and margin."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from trireme.engine.amounts import compact, count
from trireme.engine.run.output.log import perplexity
from trireme.models.losses.preferences import Documents, Preference, compare, joined


class Found(NamedTuple):
    total: float  # of the labels' losses, each times the weight of its row
    labels: int
    tokens: int
    sequences: int
    correct: float | None = None  # labels, by weight, that no other token was likelier than, where counted
    classes: bool = False  # of a classifier: a label is a row's
    weight: float | None = None  # of the labels; None: 1 each

    def plus(self, other: Found) -> Found:
        labels, tokens = self.labels + other.labels, self.tokens + other.tokens
        correct = None if self.correct is None or other.correct is None else self.correct + other.correct
        weight = None if self.weight is None and other.weight is None else self.weighed + other.weighed
        counts = labels, tokens, self.sequences + other.sequences
        return Found(self.total + other.total, *counts, correct, other.classes, weight)

    @property
    def weighed(self) -> float:
        return self.labels if self.weight is None else self.weight

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else self.correct / (self.weighed or 1)

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.total / (self.weighed or 1)

    def __str__(self) -> str:
        of = f"{compact(self.labels)} trained tokens of {compact(self.tokens)}, {count(self.sequences, 'sequence')}"
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.4f}"
        if self.classes:
            return f"loss {self.loss:.4f}{accuracy}, on {count(self.labels, 'row')} of {compact(self.tokens)} tokens"
        return f"loss {self.loss:.4f}, perplexity {perplexity(self.loss)}{accuracy}, on {of}"

    def described(self) -> dict[str, float]:
        if self.classes:
            said = {"loss": self.loss, "accuracy": self.accuracy or 0.0}
            return said | {"rows": self.labels, "tokens": self.tokens}
        found = {"loss": self.loss, "perplexity": math.exp(min(self.loss, 700.0))}
        found |= {} if self.accuracy is None else {"accuracy": self.accuracy}
        return found | {"trained_tokens": self.labels, "tokens": self.tokens, "sequences": self.sequences}


class Judged(NamedTuple):
    """Of answers that are compared: pairs, or the labelled answers of kto."""

    of: Preference
    docs: Documents
    logps: np.ndarray  # (2P,) float64, as of `compare`
    tokens: int

    def plus(self, other: Judged) -> Judged:
        logps = np.concatenate([self.logps, other.logps])
        return Judged(self.of, joined([self.docs, other.docs]), logps, self.tokens + other.tokens)

    @property
    def answers(self) -> str:
        return "pairs" if self.of.method != "kto" else "answers"

    def __str__(self) -> str:
        made = self.described()
        said = [f"loss {made['loss']:.4f}"]
        said += [f"accuracy {made[name]:.4f}" for name in ("accuracy", "rewards/accuracies") if name in made]
        said += [f"margin {made[name]:.4g}" for name in ("margin", "rewards/margins") if name in made]
        said += [f"kl {made['kl']:.4g}"] if "kl" in made else []
        many = count(len(self.logps) // 2, self.answers[:-1])
        return f"{', '.join(said)}, on {many} of {compact(self.tokens)} tokens"

    def described(self) -> dict[str, float]:
        """The values by their names in a run's log."""
        made = compare(self.of, self.docs, self.logps)
        counts = {self.answers: len(self.logps) // 2, "tokens": self.tokens}
        return {"loss": made.loss} | made.metrics() | counts

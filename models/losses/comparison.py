"""Comparison of a step's documents for preference losses, between the head's losses and their gradients.

The head's losses give log-probabilities of documents; `compare` makes losses of pairs from them, whose derivatives are
the factors of the tokens' losses in backward. A pair is in one micro-batch, so its factors need no other; of kto they
need the KL divergence of the step, which a pass without gradients over their counterparts measures before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trireme.models.losses.preferences import Documents, Preference, compare, joined

Gather = Callable[[Sequence[Tensor]], object]  # given a list of tensors by host, fills those of the other hosts


@dataclass
class Comparison:
    """A step's comparison, on the CPU in fp64: its sums are equal on every host and placement."""

    preference: Preference
    docs: Sequence[Sequence[Documents]]  # of each host's micro-batches
    host: int = 0  # this one
    kl: float | None = None  # of kto
    logps: dict[int, np.ndarray] = field(default_factory=dict)  # by micro-batch of this host
    metrics: dict[str, float] = field(default_factory=dict)

    def factors(self, b: int, losses: Tensor) -> Tensor:
        """(N,) fp32 of micro-batch b's losses by token, which are (N,) fp32; zero on a host without documents."""
        if not (batches := self.docs[self.host]):
            return torch.zeros_like(losses)
        trained = slice(None, None, 2 if self.preference.method == "kto" else 1)  # of kto's pairs the answers
        docs = batches[b].chosen(trained)
        self._keep(b, trained, docs, losses)
        slopes = compare(self.preference, batches[b], self.logps[b], self.kl).slopes[trained]
        return torch.from_numpy(np.repeat(-slopes, docs.lengths).astype(np.float32)).to(losses.device)

    def measure(self, losses: Sequence[Tensor], gather: Gather) -> None:
        """Sets `kl`, from losses of the counterparts of all answers, before the step."""
        counterparts = slice(1, None, 2)
        for b, (docs, token_losses) in enumerate(zip(self.docs[self.host], losses, strict=False)):
            self._keep(b, counterparts, docs.chosen(counterparts), token_losses)
        self.kl = compare(self.preference, *self._all(gather)).kl

    def _keep(self, b: int, selection: slice, docs: Documents, losses: Tensor) -> None:
        """Sets logps of some documents of micro-batch b from the losses of their tokens."""
        self.logps.setdefault(b, np.zeros(len(self.docs[self.host][b].lengths)))
        self.logps[b][selection] = docs.sums(losses.cpu().numpy())

    def conclude(self, gather: Gather) -> list[Tensor]:
        """Fills `metrics`. Returns on host 0 the pairs' losses times their weights, (P,) float64."""
        compared = compare(self.preference, *self._all(gather), self.kl)
        self.metrics = compared.metrics()
        return [] if self.host else [torch.from_numpy(compared.weights * compared.losses)]

    def _all(self, gather: Gather) -> tuple[Documents, np.ndarray]:
        logps = [torch.empty(sum(len(docs.lengths) for docs in batches), dtype=torch.float64) for batches in self.docs]
        if self.logps:
            logps[self.host] = torch.from_numpy(np.concatenate([self.logps[b] for b in sorted(self.logps)]))
        gather(logps)
        return joined([docs for batches in self.docs for docs in batches]), torch.cat(logps).numpy()

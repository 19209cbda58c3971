"""Comparison of a step's documents for preference losses, between the head's losses and their gradients.

The head's losses give log-probabilities of documents; `compare` makes losses of pairs from them, whose derivatives are
the factors of the tokens' losses in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trireme.models.losses.preferences import Compared, Documents, Preference, compare, joined


@dataclass
class Comparison:
    """A step's comparison, computed by `run` on the CPU in fp64: its sums are equal on every host and placement."""

    of: Preference
    docs: Sequence[Sequence[Documents]]  # of each host's micro-batches
    host: int = 0  # this one
    factors: list[Tensor] = field(default_factory=list)  # of each micro-batch, (N,) fp32 of the tokens' losses
    losses: list[Tensor] = field(default_factory=list)  # on host 0 one: (P,) float64, times the pairs' weights
    compared: Compared | None = None

    def run(self, losses: Sequence[Tensor], gather: Callable[[Sequence[Tensor]], object]) -> None:
        """Fills `factors`, `losses` and `compared`.

        `losses`: (N,) fp32 by token of each of this host's micro-batches, or of one without documents if it has none.
        `gather` is given a list of tensors by host, and fills those of the other hosts.
        """
        device, own, every = losses[0].device, self.docs[self.host], [each for of in self.docs for each in of]
        logps = [torch.empty(sum(len(each.lengths) for each in of), dtype=torch.float64) for of in self.docs]
        if own:
            each = [docs.sums(of.cpu().numpy()) for docs, of in zip(own, losses, strict=True)]
            logps[self.host] = torch.from_numpy(np.concatenate(each))
        gather(logps)
        found = self.compared = compare(self.of, joined(every), torch.cat(logps).numpy())
        self.losses[:] = [torch.from_numpy(found.weights * found.losses).to(device)] if not self.host else []
        first = sum(len(each) for each in logps[: self.host])
        self.factors[:] = [torch.zeros_like(each) for each in losses] if not own else []
        for docs, of in zip(own, losses[: len(own)], strict=True):  # a host without documents has losses
            slopes = found.slopes[first : first + len(docs.lengths)]
            self.factors.append(torch.from_numpy(np.repeat(-slopes, docs.lengths).astype(np.float32)).to(of.device))
            first += len(docs.lengths)

    @property
    def metrics(self) -> dict[str, float]:
        return self.compared.metrics() if self.compared else {}

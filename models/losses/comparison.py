"""The comparison of a step's documents, between the head's losses and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trireme.models.losses.preferences import Compared, Documents, Preference, compare, joined


@dataclass
class Comparison:
    """`run` fills it, on the CPU in fp64: the same sums wherever the losses are."""

    of: Preference
    factors: list[Tensor] = field(default_factory=list)  # of each micro-batch, (N,) fp32 of the tokens' losses
    losses: list[Tensor] = field(default_factory=list)  # one: (P,) float64, times the pairs' weights
    compared: Compared | None = None

    def run(self, docs: Sequence[Documents], losses: Sequence[Tensor]) -> None:
        """Of all micro-batches. losses: of each (N,) fp32 by token."""
        device = losses[0].device
        logps = [each.sums(of.cpu().numpy()) for each, of in zip(docs, losses, strict=True)]
        found = self.compared = compare(self.of, joined(docs), np.concatenate(logps))
        slopes = np.split(found.slopes, np.cumsum([len(each.lengths) for each in docs])[:-1])
        factors = [np.repeat(-s, each.lengths).astype(np.float32) for s, each in zip(slopes, docs, strict=True)]
        self.factors[:] = [torch.from_numpy(each).to(device) for each in factors]
        self.losses[:] = [torch.from_numpy(found.weights * found.losses).to(device)]

    @property
    def metrics(self) -> dict[str, float]:
        return self.compared.metrics() if self.compared else {}

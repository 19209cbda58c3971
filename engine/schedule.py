"""The learning rate over a run."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, peak: float, schedule: str, warmup: int) -> float:
    """The rate of `step` (from 1) of `total`: linear from 0 over `warmup` steps, then cosine to 10 % of the peak,
    linear to 0, or constant."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, total - warmup)
    if schedule == "cosine":
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))
    if schedule == "linear":
        return peak * max(0.0, 1 - done)
    return peak

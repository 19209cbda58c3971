"""Learning rates."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, peak: float, schedule: str, warmup: int) -> float:
    """The rate of `step` (from 1): linear from 0 over `warmup`; then constant, cosine to 10 %, or linear to 0 in step
    total + 1 (transformers).
    """
    if step <= warmup:
        return peak * step / warmup
    left = max(1, total - warmup)
    if schedule == "cosine":
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / left))))
    if schedule == "linear":
        return peak * max(0.0, 1 - (step - warmup - 1) / left)
    return peak

"""Samples from the model as it is being trained, through the engine's own weight stream."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from trireme.engine.data import Dataset
from trireme.engine.generate import generate
from trireme.engine.memory import DTYPE, views
from trireme.engine.step import Engine, approach
from trireme.engine.tokens import Tokenizer
from trireme.models import model

LEAD = 8  # tokens of running text that serve as a prompt


def prompts(data: Dataset, count: int) -> list[list[int]]:
    """Beginnings of the first documents: what comes before the first trained token, or a few words of running text."""
    found: list[list[int]] = []
    for mb in data.batches(1):
        for ids, labels in zip(*(np.split(a, np.cumsum(mb.lengths)[:-1]) for a in (mb.ids, mb.labels)), strict=True):
            trained = np.flatnonzero(labels >= 0)
            if len(trained):
                found.append(ids[: max(LEAD, int(trained[0]) + 1)].tolist())
            if len(found) == count:
                return found
    return found


def sample(
    e: Engine, tokenizer: Tokenizer, given: list[list[int]], max_new: int = 48, until: float = math.inf
) -> list[tuple[str, bool]]:
    """(text, whether it ended by itself) that greedily follows each prompt. Applies updates that are due.

    `until`: the moment, by time.monotonic, after which no further token is begun.
    """
    fetch, eos = _fetcher(e), frozenset([tokenizer.eos]) if tokenizer.eos is not None else frozenset()
    late = lambda: time.monotonic() > until  # noqa: E731
    options = dict(eos=eos, device=e.memory.device, dtype=DTYPE[e.plan.dtype], enough=late)
    out = generate(e.cfg, fetch, given, max_new, **options)
    return [(tokenizer.decode(ids), bool(ids) and ids[-1] in eos) for ids in out]


def _fetcher(e: Engine):
    """What generate asks unit u's weights of: get, read, release; the next unit is on its way meanwhile."""

    @contextmanager
    def fetch(u: int) -> Iterator:
        approach(e, u)
        held = e.weights.get(u)
        if e.plan.window > 1:
            approach(e, u + 1)
        e.lanes.run("compute", f"wait for {e.geo.names[u]}", lambda: None, held.ready)
        yield model.weights(e.cfg, u, views(e.geo.weights[u], held.buffer))
        done = e.lanes.run("compute", f"read {e.geo.names[u]}", lambda: None)
        e.weights.release(u, done)

    return fetch

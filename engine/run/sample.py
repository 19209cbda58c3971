"""Samples from the model in training, through the engine's weight stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from trireme.engine.buffers import workspace
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset
from trireme.engine.lanes import numbered
from trireme.engine.memory import DTYPE
from trireme.engine.planner.rule import largest
from trireme.engine.step import Engine, forward_units
from trireme.models import model
from trireme.models.generate import generate, needs

LEAD = 8  # tokens of a prompt from running text
FIRST = 100  # sequences searched for prompts
MAX_NEW = 48  # tokens after a prompt
LONGEST = 60.0  # seconds for samples: each token is a pass over all weights
NO_ROOM = "(no sample: beside the plan's buffers there is no memory for one)"


class Sample(NamedTuple):
    """A fitted prompt, its continuation, whether the model ended it."""

    prompt: str
    text: str
    ended: bool


def prompts(data: Dataset, count: int) -> list[list[int]]:
    """Up to `count` different prompts (token ids): a document's tokens before the first trained one, LEAD at least."""
    found: list[list[int]] = []
    for mb in islice(data.batches(1), FIRST):
        for ids, labels in zip(*(np.split(a, np.cumsum(mb.lengths)[:-1]) for a in (mb.ids, mb.labels)), strict=True):
            trained = np.flatnonzero(labels >= 0)
            prompt = ids[: max(LEAD, int(trained[0]) + 1)].tolist() if len(trained) else []
            if prompt and prompt not in found:
                found.append(prompt)
            if len(found) == count:
                return found
    return found


def fitted(e: Engine, given: list[list[int]], max_new: int = MAX_NEW) -> list[list[int]]:
    """The prompts' ends, as long as memory, a step's free workspace included, allows."""
    room = e.memory.gpu_limit - e.memory.used("gpu") + workspace(e.geo, e.plan)
    most = max(map(len, given), default=0)
    most = min(most, e.cfg.max_positions - 1) if e.cfg.rope is None else most
    itemsize = DTYPE[e.plan.dtype].itemsize
    length = largest(most, lambda n: needs(e.cfg, len(given), n, max_new, itemsize) <= room)
    return [prompt[max(0, len(prompt) - length) :] for prompt in given]


def sample(
    e: Engine,
    codec: Codec,
    given: list[list[int]],
    max_new: int = MAX_NEW,
    enough: Callable[[], bool] = lambda: False,
) -> list[Sample]:
    """Greedy continuations of prompts, fitted. Applies due updates. Ends once `enough()`. Out of memory: NO_ROOM."""
    given = fitted(e, given, max_new)
    shown = [codec.decode(ids) for ids in given]
    none = [Sample(prompt, NO_ROOM, True) for prompt in shown]
    if not all(given):
        return none
    eos = frozenset([codec.facts.eos]) if codec.facts.eos is not None else frozenset()
    places, dtype = [e.lanes.devices[e.gpu(u)] for u in range(e.cfg.n_units)], DTYPE[e.plan.dtype]
    try:
        out = generate(e.cfg, lambda: _one_pass(e), given, max_new, eos=eos, places=places, dtype=dtype, enough=enough)
    except torch.OutOfMemoryError:
        _let_go(e)
        return none
    ended = [bool(ids) and ids[-1] in eos for ids in out]
    return [Sample(*each) for each in zip(shown, map(codec.decode, out), ended, strict=True)]


def _one_pass(e: Engine) -> Iterator[tuple[int, Any]]:
    """Units in order, with prefetched weights."""
    for u in forward_units(e):
        held = e.weights.get(u)
        lane = numbered("compute", e.gpu(u))
        arrived = e.lanes.run(lane, "other", f"wait for {e.geo.names[u]}", lambda: None, held.ready)
        if e.plan.gpus > 1:
            arrived.wait()  # another thread's lane
        yield u, model.weights(e.cfg, u, e.weights.tensors(u, held))
        done = e.lanes.run(lane, "other", f"read {e.geo.names[u]}", lambda: None)
        e.weights.release_in_forward(u, done, train=False)
    if e.cfg.tied:
        e.weights.release(0, done)


def _let_go(e: Engine) -> None:
    """Releases a broken-off pass's units."""
    on_their_way = [task for held in e.weights.held for task in held.ready]
    for gpu in range(e.plan.gpus):  # each after the one before: the last is over when all are
        done = e.lanes.run(numbered("compute", gpu), "other", "break off the sample", lambda: None, on_their_way)
        on_their_way = [done]
    e.weights.release_all(done)

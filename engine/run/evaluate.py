"""Evaluation by the engine: the loss of a data set, log-probabilities, samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from operator import add
from typing import Any

import numpy as np
import torch

from trireme.engine.buffers import workspace
from trireme.engine.build import Engine, Inputs, InRam, collate, host_share, shares, to_devices
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset
from trireme.engine.hosts.group import world
from trireme.engine.layers import Take
from trireme.engine.memory import DTYPE
from trireme.engine.planner.rule import largest
from trireme.engine.queues.names import numbered
from trireme.engine.run import screen
from trireme.engine.step import evaluate, forward, metrics_of, stream_layers
from trireme.models.generate import generate, needs
from trireme.models.losses.micro_batch import MicroBatch
from trireme.models.losses.preferences import Documents, Preference, compare, joined
from trireme.models.rows import Load, rope_tables

LEAD, FIRST, MAX_NEW = 8, 100, 48  # tokens of a prompt from running text; sequences searched for prompts; new tokens
LONGEST = 60.0  # seconds for samples: each token is a pass over all weights
Stopped = Callable[[], bool]


@dataclass
class Evaluator:
    """Forward passes of an engine over data."""

    e: Engine
    rows: int  # sequences of a micro-batch
    seq_len: int  # tokens of a document, at most
    n_micro: int = 0  # micro-batches together, of all hosts; 0: those of the plan

    def __post_init__(self) -> None:
        self.places = [(rope_tables(self.e.cfg, self.seq_len, device), device) for device in self.e.queues.devices]
        self.n_micro = self.n_micro or self.e.plan.n_micro

    def inputs(
        self, step: Sequence[InRam], loads: Sequence[Load | None] = (), correct: torch.Tensor | None = None
    ) -> list[Inputs]:
        """This host's micro-batches of those of all hosts, on its GPUs."""
        return [to_devices(mb, self.places, loads, correct) for mb in host_share(step, world().host, world().hosts)]

    def read_head(self, batches: Sequence[MicroBatch], take: Take) -> None:
        """Computes micro-batches on one host. The head's input of each goes to `take`, with its index."""
        for first in range(0, len(batches), self.n_micro):
            group = [collate(self.e.cfg, mb) for mb in batches[first : first + self.n_micro]]
            for task in forward(self.e, self.inputs(group), lambda b, *tensors, a=first: take(a + b, *tensors)):
                task.wait()

    def counter(self, preference: Preference | None) -> torch.Tensor | None:
        """Where the head counts labels that were the most likely token; None for losses without that count."""
        if preference or self.e.cfg.teaching:
            return None
        return torch.zeros(1, dtype=torch.float64, device=self.e.queues.devices[self.e.gpu(self.e.geo.head)])

    def losses(
        self,
        what: str,
        data: Sequence[Dataset],
        stopped: Stopped,
        rows: int | None = None,
        correct: torch.Tensor | None = None,
        parts: list[torch.Tensor] | None = None,
    ) -> Iterator[tuple[list[InRam], list[torch.Tensor]]]:
        """Yields micro-batches that are computed together, of all hosts, and the losses of this host's. `parts`: gets
        the parts of losses that have several.
        """
        tokens = sum(part.tokens if rows is None else part.tokens * rows // part.n_sequences for part in data)
        batches = chain.from_iterable(part.batches(self.rows, rows) for part in data)
        with screen.working(what, tokens, "tokens") as progressed:
            while not world().any(stopped()) and (group := list(islice(batches, self.n_micro))):
                step = [collate(self.e.cfg, mb) for mb in group]
                yield step, evaluate(self.e, self.inputs(step, correct=correct), parts)
                progressed(sum(mb.tokens for mb in step))

    def loss(
        self, data: Dataset, preference: Preference | None, rows: int | None = None, stopped: Stopped = lambda: False
    ) -> tuple[float, dict[str, float]]:
        """The mean loss of labels, or of pairs, with other figures. `rows`: how many are read; None: all."""
        total, weight, trained, correct = 0.0, 0.0, 0, self.counter(preference)
        docs, logps, parts = list[Documents](), list[float](), list[torch.Tensor]()
        for step, losses in self.losses("evaluating", [data], stopped, rows, correct, parts):
            if preference:
                docs += [mb.of_docs for mb in step if mb.of_docs]
                logps += logps_in_order(step, losses)
            sums = [float(loss.double().sum()) for loss in losses]
            total += reduce(add, world().numbers(sums, self.e.plan.n_micro))
            weight, trained = weight + sum(mb.weight for mb in step), trained + sum(mb.trained for mb in step)
        counted = {"rows": trained} if self.e.cfg.scores else {}
        if preference and docs:
            compared = compare(preference, joined(docs), np.array(logps))
            return compared.loss, compared.metrics() | counted
        metrics = metrics_of(parts, weight) if parts and weight else {}
        if correct is not None:
            metrics["accuracy"] = sum(world().values(float(correct))) / (weight or 1)
        return total / (weight or 1), metrics | counted

    def logps(self, data: Sequence[Dataset], stopped: Stopped = lambda: False) -> list[float]:
        """Log-probabilities of all documents, in order; fewer if `stopped()`."""
        steps = self.losses("the reference", data, stopped)
        return [logp for step, losses in steps for logp in logps_in_order(step, losses)]

    def samples(self, data: Dataset, codec: Codec | None, n: int, stopped: Stopped) -> list[tuple[str, str, bool]]:
        """Beginnings of `n` documents, as long as memory allows, each with its greedy continuation, and whether the
        model ended it; none if memory runs out.
        """
        if codec is None or self.e.cfg.scores or not n or stopped() or world().host:
            return []
        end, out = time.monotonic() + LONGEST, list[list[int]]()
        enough = lambda: time.monotonic() > end or stopped()
        eos = frozenset([codec.facts.eos]) if codec.facts.eos is not None else frozenset[int]()
        starts = fitted(self.e, prompts(data, n))
        with screen.clock().at("samples"), suppress(torch.OutOfMemoryError):
            out = continued(self.e, starts, MAX_NEW, eos, stop=enough) if all(starts) else []
        shown = zip(map(codec.decode, starts[: len(out)]), out, strict=True)
        return [(prompt, codec.decode(ids), bool(ids) and ids[-1] in eos) for prompt, ids in shown]


def documents_by_host(step: Sequence[InRam]) -> list[list[Documents]]:
    """The documents of each host's micro-batches."""
    return [[mb.of_docs for mb in share if mb.of_docs] for share in shares(step, world().hosts)]


def logps_in_order(step: Sequence[InRam], losses: Sequence[torch.Tensor]) -> list[float]:
    """The log-probabilities of the documents of a step, from the losses of all hosts' micro-batches."""
    group, docs = world(), documents_by_host(step)
    pairs = zip(docs[group.host], losses, strict=False)
    logps = [logp for mb, x in pairs for logp in mb.sums(x.cpu().numpy())]
    return group.numbers(logps, sum(len(mb.lengths) for share in docs for mb in share))


# ---------------------------------------------------------------- samples


def prompts(data: Dataset, n: int) -> list[list[int]]:
    """Up to `n` different prompts as ids: a document's tokens before its first trained one, at least LEAD."""
    chosen: list[list[int]] = []
    for mb in islice(data.batches(1), FIRST):
        for ids, labels in zip(*(np.split(a, np.cumsum(mb.lengths)[:-1]) for a in (mb.ids, mb.labels)), strict=True):
            trained = np.flatnonzero(labels >= 0)
            prompt = ids[: max(LEAD, int(trained[0]) + 1)].tolist() if len(trained) else []
            if prompt and prompt not in chosen:
                chosen.append(prompt)
            if len(chosen) == n:
                return chosen
    return chosen


def fitted(e: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """The ends of the prompts, as long as the memory allows, with the workspace of a step, which is free."""
    m, gpus = e.memory, range(e.plan.gpus)
    room = min(m.limits.gpu_bytes(gpu) - m.used_bytes("gpu", gpu) + workspace(e.geo, e.plan, gpu) for gpu in gpus)
    longest = max(map(len, prompts), default=0)
    longest = min(longest, e.cfg.max_positions - 1) if not e.cfg.rotates or e.cfg.indexed else longest
    itemsize = DTYPE[e.plan.dtype].itemsize
    length = largest(longest, lambda n: needs(e.cfg, len(prompts), n, MAX_NEW, itemsize) <= room)
    return [prompt[max(0, len(prompt) - length) :] for prompt in prompts]


def continued(
    e: Engine, prompts: Sequence[Sequence[int]], room: int | Sequence[int], eos: frozenset[int], **how: Any
) -> list[list[int]]:
    """New tokens of each prompt, up to its `room` or one of `eos`. `how`, errors: as of models.generate."""
    places = [e.queues.devices[e.gpu(u)] for u in range(e.cfg.n_units)]
    try:
        return generate(
            e.cfg, lambda: stream_layers(e), prompts, room, eos=eos, places=places, dtype=DTYPE[e.plan.dtype], **how
        )
    except BaseException:  # frees the layers of this pass
        in_flight = [task for layer in e.weights.loaded for task in layer.ready]
        for gpu in range(e.plan.gpus):  # each after the one before: the last is over when all are
            queue = numbered("compute", gpu)
            in_flight = [e.queues.run(queue, "other", "break off the sample", lambda: None, in_flight)]
        e.weights.cancel(in_flight[0])
        raise

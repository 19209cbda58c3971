"""Evaluation: loss on the held-out data, samples through the engine's weight stream, the best so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import islice
from operator import add
from typing import NamedTuple

import numpy as np
import torch

from trireme.engine.buffers import workspace
from trireme.engine.build import Engine, Inputs, InRam, in_ram, placed
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset
from trireme.engine.memory import DTYPE
from trireme.engine.planner.rule import largest
from trireme.engine.queues.names import numbered
from trireme.engine.run.begin.reference import in_order
from trireme.engine.run.live import Live
from trireme.engine.run.output.records import Record
from trireme.engine.run.signals import Stop
from trireme.engine.step import evaluate, metrics_of, stream_layers
from trireme.models.generate import generate, needs
from trireme.models.losses.preferences import Documents, compare, joined
from trireme.models.rows import Load, rope_tables

LEAD = 8  # tokens of a prompt from running text
FIRST = 100  # sequences searched for prompts
MAX_NEW = 48  # tokens after a prompt
LONGEST = 60.0  # seconds for samples: each token is a pass over all weights
NO_ROOM = "(no sample: the plan's buffers leave no memory for one)"


class Sample(NamedTuple):
    """A prompt as it was fitted, its continuation, and whether the model ended it."""

    prompt: str
    text: str
    ended: bool


def prompts(data: Dataset, count: int) -> list[list[int]]:
    """Up to `count` different prompts as token ids: the tokens of a document before its first trained one, at least
    LEAD.
    """
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
    """The ends of the prompts, as long as the memory allows, with the workspace of a step, which is free."""
    room = e.memory.limits.gpu - e.memory.used("gpu") + workspace(e.geo, e.plan)
    most = max(map(len, given), default=0)
    most = min(most, e.cfg.max_positions - 1) if e.cfg.rope is None or e.cfg.indexed else most
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
    """Greedy continuations of the prompts, which are fitted first. Applies updates that are due.

    Stops when `enough()` is true. Gives NO_ROOM if memory runs out.
    """
    given = fitted(e, given, max_new)
    shown = [codec.decode(ids) for ids in given]
    none = [Sample(prompt, NO_ROOM, True) for prompt in shown]
    if not all(given):
        return none
    eos = frozenset([codec.facts.eos]) if codec.facts.eos is not None else frozenset()
    places, dtype = [e.queues.devices[e.gpu(u)] for u in range(e.cfg.n_units)], DTYPE[e.plan.dtype]
    try:
        out = generate(
            e.cfg, lambda: stream_layers(e), given, max_new, eos=eos, places=places, dtype=dtype, enough=enough
        )
    except torch.OutOfMemoryError:
        _let_go(e)
        return none
    ended = [bool(ids) and ids[-1] in eos for ids in out]
    return [Sample(*each) for each in zip(shown, map(codec.decode, out), ended, strict=True)]


def _let_go(e: Engine) -> None:
    """Releases the layers of a pass that was ended early."""
    in_flight = [task for held in e.weights.held for task in held.ready]
    for gpu in range(e.plan.gpus):  # each after the one before: the last is over when all are
        done = e.queues.run(numbered("compute", gpu), "other", "break off the sample", lambda: None, in_flight)
        in_flight = [done]
    e.weights.break_off(done)


# ---------------------------------------------------------------- evaluations


class Evaluation:
    """Evaluations of a run: the loss on held-out data, a sample, the best weights so far."""

    def __init__(self, live: Live, stop: Stop):
        self.live, self.stop = live, stop
        self.ended = time.monotonic()  # of the last one
        job = live.job
        self.places = [(rope_tables(job.cfg, job.seq_len, device), device) for device in live.queues.devices]

    def inputs(self, mb: InRam, loads: Sequence[Load | None] = (), correct: torch.Tensor | None = None) -> Inputs:
        return placed(mb, self.places, loads, correct)

    def counter(self) -> torch.Tensor | None:
        """Where the head counts, on its GPU, labels that were the most likely token; None for losses without that
        count.
        """
        engine = self.live.engine
        if self.live.preference or engine.cfg.teaching:
            return None
        return torch.zeros(1, dtype=torch.float64, device=engine.queues.devices[engine.gpu(engine.geo.head)])

    @property
    def is_enough(self) -> bool:
        """Whether --patience has been used up."""
        patience = self.live.job.options.patience
        return patience is not None and self.live.progress.worse >= patience

    def run_if_due(self, final: bool = False) -> None:
        """Evaluates before training, every --eval-every and at the end, unless the run stops."""
        job, done = self.live.job, self.live.progress
        seconds = time.monotonic() - self.ended
        due = final or done.step == 0 or job.options.eval_every.due(done.step, job.total_steps, seconds)
        due = self.live.group.first(due)
        if due and job.data.held_out and done.evaluated != done.step and not self.stop.leaving:
            with self.live.clock.at("evaluations"):
                self._run(job.data.held_out)

    def _run(self, held_out: Dataset) -> None:
        """Evaluates. If the run is asked to stop meanwhile, the result is dropped: the resumed run evaluates again."""
        live, done = self.live, self.live.progress
        began = time.monotonic()
        with live.watched("evaluation"):
            loss, metrics = self._loss(held_out)
        samples = self.samples(1)
        if self.stop.leaving:
            return
        record: Record = {"step": done.step, "epoch": epoch(live), "eval_loss": loss}
        record |= {f"eval_{name}": round(value, 6) for name, value in metrics.items()}
        record |= {"eval_time_s": round(time.monotonic() - began, 3), "wall_time": round(time.time(), 3)}
        with live.watched("log"):
            live.log.eval(record | ({"sample": samples[0].text} if samples else {}))
        done.worse = 0 if loss < done.lowest else done.worse + 1
        if not done.step:
            done.start = loss
        elif loss < (math.inf if done.best is None else done.best):
            done.best, done.best_step = loss, done.step
            live.keep_best()
        self.ended, done.evaluated = time.monotonic(), done.step

    def _loss(self, held_out: Dataset) -> tuple[float, dict[str, float]]:
        """The mean loss of labels, or of pairs with their metrics."""
        live, job, total, count, correct = self.live, self.live.job, 0.0, 0.0, self.counter()
        rows_read = 0
        docs, logps, parts = list[Documents](), list[float](), list[torch.Tensor]()
        rows = live.progress.eval_rows
        batches = held_out.batches(job.micro_rows, rows)
        tokens = held_out.tokens if rows is None else held_out.tokens * rows // held_out.n_sequences
        with live.screen.working("evaluating", tokens, "tokens") as more:
            while (group := list(islice(batches, job.n_micro))) and not self.stop.leaving:
                step = [in_ram(job.cfg, mb) for mb in group]
                losses = evaluate(live.engine, [self.inputs(mb, correct=correct) for mb in live.dealt(step)], parts)
                if live.preference:
                    every = live.documents(step)
                    docs += (added := [each for of in every for each in of])
                    logps += in_order(every, losses, live.group, sum(len(each.lengths) for each in added))
                own = [float(each.double().sum()) for each in losses]
                total += reduce(add, live.group.numbers(own, job.plan.n_micro))
                count += sum(mb.weight for mb in step)
                rows_read += sum(mb.trained for mb in step)
                more(sum(mb.tokens for mb in step))
        if live.preference and docs:
            found = compare(live.preference, joined(docs), np.array(logps))
            return found.loss, found.metrics() | ({"rows": rows_read} if job.cfg.scores else {})
        metrics = metrics_of(parts, count) if parts and count else {}
        if correct is not None:
            metrics["accuracy"] = sum(live.group.values(float(correct))) / (count or 1)
        if job.cfg.scores:
            metrics["rows"] = rows_read
        return total / (count or 1), metrics

    def samples(self, count: int) -> list[Sample]:
        """Greedy continuations of the beginnings of `count` documents, held-out ones if there are any."""
        job = self.live.job
        if job.codec is None or job.cfg.scores or not count or self.stop.leaving or self.live.group.host:
            return []
        end = time.monotonic() + LONGEST
        enough = lambda: time.monotonic() > end or self.stop.leaving
        with self.live.clock.at("samples"), self.live.watched("samples"):
            return sample(self.live.engine, job.codec, prompts(job.data.held_out or job.data, count), enough=enough)


def epoch(live: Live) -> float:
    """Passes over the data so far."""
    return round(live.progress.step / live.job.data.steps_per_epoch(live.job.options.batch_size), 4)


def load_record(load: Load) -> Record:
    """The largest share of a layer's tokens that one expert has, experts without a token, the balance loss if it has a
    weight.
    """
    counts = load.counts[load.counts.any(1)]  # dense layers count nothing
    shares = counts / counts.sum(1, keepdim=True)
    found: Record = {"expert_share": round(float(shares.max()), 4), "experts_idle": int((counts == 0).sum())}
    return found | ({"router_aux": round(load.loss(), 6)} if load.weight else {})

"""Evaluation by the engine: the loss of a data set, the reference of preferences, samples; of a run and of a finished
model.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, islice
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from trireme.engine.amounts import count, seconds
from trireme.engine.buffers import workspace
from trireme.engine.build import Engine, Inputs, InRam, dealt, in_ram, placed, shares
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset, MicroBatch
from trireme.engine.hosts.group import here
from trireme.engine.memory import DTYPE
from trireme.engine.planner.host import computed_by
from trireme.engine.planner.rule import largest
from trireme.engine.queues.names import numbered
from trireme.engine.run import folder, screen
from trireme.engine.run.job import Job
from trireme.engine.step import evaluate, metrics_of, stream_layers
from trireme.kernels.private import cache_folder
from trireme.models.config import InputError
from trireme.models.generate import generate, needs
from trireme.models.losses.preferences import Documents, Preference, compare, joined
from trireme.models.rows import Load, rope_tables
from trireme.storage.files import replace_synced

if TYPE_CHECKING:
    from trireme.engine.run.state import Training

LEAD, FIRST, MAX_NEW = 8, 100, 48  # tokens of a prompt from running text; sequences searched for prompts; new tokens
LONGEST = 60.0  # seconds for samples: each token is a pass over all weights
KEPT_EVERY = 20.0  # seconds between writes of what is known of the reference
CACHED = 50  # runs whose reference is in the user's cache
NO_ROOM = "(no sample: the plan's buffers leave no memory for one)"
Stopped = Callable[[], bool]
Keep = Callable[[np.ndarray], None]


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

    def inputs(self, mb: InRam, loads: Sequence[Load | None] = (), correct: torch.Tensor | None = None) -> Inputs:
        return placed(mb, self.places, loads, correct)

    def counter(self, preference: Preference | None) -> torch.Tensor | None:
        """Where the head counts labels that were the most likely token; None for losses without that count."""
        if preference or self.e.cfg.teaching:
            return None
        return torch.zeros(1, dtype=torch.float64, device=self.e.queues.devices[self.e.gpu(self.e.geo.head)])

    def groups(self, batches: Iterator[MicroBatch], stopped: Stopped) -> Iterator[list[InRam]]:
        """The micro-batches that are computed together, of all hosts."""
        while not here().any(stopped()) and (group := list(islice(batches, self.n_micro))):
            yield [in_ram(self.e.cfg, mb) for mb in group]

    def own(self, step: Sequence[InRam], correct: torch.Tensor | None = None) -> list[Inputs]:
        """This host's micro-batches."""
        return [self.inputs(mb, correct=correct) for mb in dealt(step, here().host, here().hosts)]

    def loss(
        self, data: Dataset, preference: Preference | None, rows: int | None = None, stopped: Stopped = lambda: False
    ) -> tuple[float, dict[str, float]]:
        """The mean loss of labels, or of pairs, with other figures. `rows`: how many are read; None: all."""
        total, weight, trained, correct = 0.0, 0.0, 0, self.counter(preference)
        docs, logps, parts = list[Documents](), list[float](), list[torch.Tensor]()
        tokens = data.tokens if rows is None else data.tokens * rows // data.n_sequences
        with screen.working("evaluating", tokens, "tokens") as more:
            for step in self.groups(data.batches(self.rows, rows), stopped):
                losses = evaluate(self.e, self.own(step, correct), parts)
                if preference:
                    docs += [mb.of_docs for mb in step if mb.of_docs]
                    logps += in_order(step, losses)
                own = [float(each.double().sum()) for each in losses]
                total += reduce(add, here().numbers(own, self.e.plan.n_micro))
                weight, trained = weight + sum(mb.weight for mb in step), trained + sum(mb.trained for mb in step)
                more(sum(mb.tokens for mb in step))
        counted = {"rows": trained} if self.e.cfg.scores else {}
        if preference and docs:
            compared = compare(preference, joined(docs), np.array(logps))
            return compared.loss, compared.metrics() | counted
        metrics = metrics_of(parts, weight) if parts and weight else {}
        if correct is not None:
            metrics["accuracy"] = sum(here().values(float(correct))) / (weight or 1)
        return total / (weight or 1), metrics | counted

    def logps(self, data: Sequence[Dataset], known: np.ndarray, keep: Keep, stopped: Stopped) -> np.ndarray:
        """Log-probabilities of all documents, (documents,) float64. `known`: those of the first ones. `keep` gets what
        is known every KEPT_EVERY seconds.
        """
        parts, at, kept = [known], 0, time.monotonic()
        batches = chain.from_iterable(part.batches(self.rows) for part in data)
        with screen.working("the reference", sum(part.tokens for part in data), "tokens") as more:
            for step in self.groups(batches, stopped):
                if at >= len(known):
                    parts.append(np.array(in_order(step, evaluate(self.e, self.own(step)))))
                at += sum(len(mb.of_docs.lengths) for mb in step if mb.of_docs)
                more(sum(mb.tokens for mb in step))
                if time.monotonic() - kept > KEPT_EVERY:
                    keep(np.concatenate(parts))
                    kept = time.monotonic()
        return np.concatenate(parts)

    def samples(self, data: Dataset, codec: Codec | None, n: int, stopped: Stopped) -> list[Sample]:
        """Greedy continuations of the beginnings of `n` documents."""
        if codec is None or self.e.cfg.scores or not n or stopped() or here().host:
            return []
        end = time.monotonic() + LONGEST
        with screen.clock().at("samples"):
            return sample(self.e, codec, prompts(data, n), enough=lambda: time.monotonic() > end or stopped())


def documents(step: Sequence[InRam]) -> list[list[Documents]]:
    """The documents of each host's micro-batches."""
    return [[mb.of_docs for mb in share if mb.of_docs] for share in shares(step, here().hosts)]


def in_order(step: Sequence[InRam], losses: Sequence[torch.Tensor]) -> list[float]:
    """The log-probabilities of the documents of a step, from the losses of all hosts' micro-batches."""
    group, docs = here(), documents(step)
    pairs = zip(docs[group.host], losses, strict=False)
    own = [logp for of, x in pairs for logp in of.sums(x.cpu().numpy())]
    return group.numbers(own, sum(len(of.lengths) for share in docs for of in share))


# ---------------------------------------------------------------- the reference: the model before training


def with_reference(run: Training, stopped: Stopped) -> None:
    """Gives the run's data the log-probabilities of the model before training, if the method compares with them.

    They are those of .run/reference.npz or of the user's cache, else computed by the engine, which has that model or is
    given it. A pass that was ended goes on behind what is known. Raises InputError, StoreError; KeyboardInterrupt if
    `stopped()`.
    """
    job, cache, writes = run.job, cache_folder(), not here().host
    if job.preference is None or not job.preference.compares:
        return
    data = [job.data, *([job.data.held_out] if job.data.held_out else [])]
    total = sum(len(part.pieces) for part in data)
    key = run.fixed.reference or here().texts(_key(job, run.sums))[0]
    places = [run.folder.run / folder.REFERENCE, *([cache / "reference" / f"{key}.npz"] if cache else [])]
    known = max((_read(place, key) for place in places), key=len)
    known = np.array(json.loads(here().texts(json.dumps(known.tolist()))[0]), dtype=np.float64)
    if len(known) != total:
        if run.begun:
            screen.say("reference lost: it is computed again from the checkpoint")
            run.load_checkpoint(stopped)
            if _key(job, run.sums) != key:
                was = "the checkpoint is not what the run began with"
                raise InputError(f"{places[0]} is lost, and {was}. Restore one of them, or start again.")
        began, known = time.monotonic(), known if len(known) < total else np.zeros(0)
        keep = lambda logps: _write(places[0], key, logps) if writes else None
        with screen.clock().at("reference"), run.watched("the reference"):
            known = Evaluator(run.engine, job.rows, job.options.seq_len or 0, job.n_micro).logps(
                data, known, keep, stopped
            )
        keep(known)
        if len(known) < total:
            raise KeyboardInterrupt
        pairs = count(total // 2, "answer" if job.data.options.kind == "labels" else "pair")
        screen.say(f"compared {pairs}: the reference took {seconds(time.monotonic() - began)}")
    for place in places if writes else ():
        if len(_read(place, key)) != total:
            _write(place, key, known)
    n, held = len(job.data.pieces), job.data.held_out
    read = replace(job.data, reference=known[:n], held_out=held and replace(held, reference=known[n:]))
    run.job, run.fixed = replace(job, read=read), replace(run.fixed, reference=key)


def _key(job: Job, sums: Mapping[str, str]) -> str:
    """The key of the weights, the data, and all that decides roundings. `sums`: checksums of all weights."""
    own = job.fixed(None)
    decides: dict[str, Any] = {"weights": dict(sorted(sums.items())), "dtype": job.plan.dtype, "fp8": job.cfg.fp8}
    decides |= {"rows": job.rows, "together": job.n_micro, "by": computed_by(job.device), "launches": job.launches}
    decides |= {"model": own.config, "data": own.data}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:24]


def _read(path: Path, key: str) -> np.ndarray:
    """What is known of the reference, (documents,) float64; its zip has a checksum of it."""
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error), np.load(path) as stored:
        if str(stored["key"]) == key and stored["logps"].dtype == np.float64:
            return stored["logps"]
    return np.zeros(0)


def _write(path: Path, key: str, logps: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, logps=logps, key=key)
    if path.name == folder.REFERENCE:
        replace_synced(path, content.getvalue())
        return
    with suppress(OSError):  # the cache
        path.parent.mkdir(exist_ok=True, parents=True)
        replace_synced(path, content.getvalue())
        for old in sorted(path.parent.glob("*.npz"), key=lambda each: each.stat().st_mtime)[:-CACHED]:
            old.unlink(missing_ok=True)


# ---------------------------------------------------------------- samples


class Sample(NamedTuple):
    """A prompt as it was fitted, its continuation, and whether the model ended it."""

    prompt: str
    text: str
    ended: bool


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


def fitted(e: Engine, asked: list[list[int]], max_new: int = MAX_NEW) -> list[list[int]]:
    """The ends of the prompts, as long as the memory allows, with the workspace of a step, which is free."""
    room = e.memory.limits.gpu - e.memory.used("gpu") + workspace(e.geo, e.plan)
    most = max(map(len, asked), default=0)
    most = min(most, e.cfg.max_positions - 1) if not e.cfg.rotates or e.cfg.indexed else most
    itemsize = DTYPE[e.plan.dtype].itemsize
    length = largest(most, lambda n: needs(e.cfg, len(asked), n, max_new, itemsize) <= room)
    return [prompt[max(0, len(prompt) - length) :] for prompt in asked]


def sample(
    e: Engine, codec: Codec, asked: list[list[int]], max_new: int = MAX_NEW, enough: Stopped = lambda: False
) -> list[Sample]:
    """Greedy continuations of the prompts, which are fitted first. Stops when `enough()`; NO_ROOM if memory runs
    out.
    """
    asked = fitted(e, asked, max_new)
    shown = [codec.decode(ids) for ids in asked]
    eos = frozenset([codec.facts.eos]) if codec.facts.eos is not None else frozenset[int]()
    places, dtype = [e.queues.devices[e.gpu(u)] for u in range(e.cfg.n_units)], DTYPE[e.plan.dtype]
    layers, out = lambda: stream_layers(e), None
    with suppress(torch.OutOfMemoryError):
        if all(asked):
            out = generate(e.cfg, layers, asked, max_new, eos=eos, places=places, dtype=dtype, enough=enough)
    if out is None:
        let_go(e)
        return [Sample(prompt, NO_ROOM, True) for prompt in shown]
    return [Sample(p, codec.decode(ids), bool(ids) and ids[-1] in eos) for p, ids in zip(shown, out, strict=True)]


def let_go(e: Engine) -> None:
    """Releases the layers of a pass that was ended early."""
    in_flight = [task for held in e.weights.held for task in held.ready]
    for gpu in range(e.plan.gpus):  # each after the one before: the last is over when all are
        in_flight = [e.queues.run(numbered("compute", gpu), "other", "break off the sample", lambda: None, in_flight)]
    e.weights.break_off(in_flight[0])

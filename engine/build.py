"""Builds an engine from a plan, and makes the inputs of its steps."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from trireme.engine.activations import ActivationSwap, InUse
from trireme.engine.buffers import each_usage, workspace
from trireme.engine.geometry import Geometry
from trireme.engine.gradients import Gradients, SharedGradients, Wire
from trireme.engine.memory import Buffer, Memory, Pool
from trireme.engine.optimizer import Optimizer
from trireme.engine.placement import BaseFiles, Placement, Scratch, Store
from trireme.engine.plan import Limits, Plan
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Kind, Queues, Task
from trireme.engine.updates import AdamW
from trireme.engine.weights import UnitWeights, WeightStream
from trireme.kernels import ops
from trireme.models.config import InputError, ModelConfig
from trireme.models.head import Shares
from trireme.models.lora import Dropout
from trireme.models.losses.micro_batch import MicroBatch
from trireme.models.losses.preferences import Documents
from trireme.models.rows import Load, Noise, Rows, Tables
from trireme.models.sizes import costs, narrow

Value = TypeVar("Value")


# What a task reads or writes: it comes after `ready`, and `attach` is called with it.
Use = UnitWeights | InUse | Buffer


@dataclass
class Engine:
    """The parts of a training step, made by `build`."""

    cfg: ModelConfig
    geo: Geometry
    plan: Plan
    queues: Queues
    memory: Memory
    placement: Placement
    weights: WeightStream
    activations: ActivationSwap
    gradients: Gradients
    optimizer: Optimizer
    # Of buffers, by layer and address; buffers never move.
    views: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Ends the queues and the threads of updates, frees scratch space and memory."""
        self.queues.close()
        self.optimizer.close()
        self.views.clear()
        self.placement.scratch.close()
        if self.placement.files is not None:
            self.placement.files.close()
        self.memory.close()

    def compute(
        self,
        kind: Kind,
        u: int,
        fn: Callable[[], object],
        uses: Sequence[Use],
        flops: Callable[[], float] = int,
        name: str = "",
    ) -> Task:
        """Queues `fn` on the GPU of unit u, after all uses are ready; returns its task. `flops` is asked for if traced.

        Calls `attach` of each use with the task, in their order: that is the order in which copies from the GPU are
        queued.
        """
        after, name = [task for use in uses for task in use.ready], name or self.geo.names[u]
        queue = numbered("compute", self.gpu(u))
        task = self.queues.run(queue, kind, name, fn, after, flops=flops() if self.queues.tracing else 0)
        for use in uses:
            use.attach(task)
        return task

    def gpu(self, u: int) -> int:
        """The GPU that computes with unit u."""
        return self.plan.units[u].gpu


def build(
    cfg: ModelConfig,
    plan: Plan,
    limits: Limits,
    queues: Queues,
    *,
    adamw: AdamW | None = None,
    store: Store | None = None,
    scratch: Scratch | None = None,
    files: BaseFiles | None = None,
    wire: Wire | None = None,
    make_pool: Callable[[str, Sequence[Tensor]], Pool] = Pool,
    pinned: bool = True,
) -> Engine:
    """Allocates all buffers of the plan. Exchange.load or between.load_from_store fills them. Raises DoesNotFit.

    `make_pool`: as of Memory. `pinned`: register RAM with CUDA, which makes copies several times faster.
    """
    if cfg.tied and plan.units[0].gpu != plan.units[-1].gpu:
        raise InputError("plan: the embedding and the head share a matrix, and are on two GPUs")
    assert plan.slices == 1 or narrow.may_be_sliced(cfg), "slices are of frozen experts"
    assert len(queues.devices) == plan.gpus, "queues for other GPUs than the plan's"
    geo, memory = Geometry.of(cfg, plan), Memory(queues.devices, limits, queues.simulated, make_pool, pinned)
    if plan.accumulate and geo.ties_gradient:
        raise InputError("plan: accumulate changes the order in which the gradient of a tied embedding is summed")
    for gpu in range(plan.gpus):
        memory.reserve("gpu", "workspace", workspace(geo, plan, gpu), gpu=gpu)
    if not queues.simulated:
        memory.preallocate(each_usage(geo, plan)[0])
    placement = Placement(geo, plan, memory, queues, store, scratch or Scratch(), files)
    weights, swap = WeightStream(placement), ActivationSwap(placement)
    gradients = Gradients(placement) if plan.hosts == 1 else SharedGradients(placement, wire)
    optimizer = Optimizer(placement, weights, gradients, adamw or AdamW())
    return Engine(geo.cfg, geo, plan, queues, memory, placement, weights, swap, gradients, optimizer)


# ---------------------------------------------------------------- inputs of a step


class Packed(NamedTuple):
    """The N packed tokens of a micro-batch, on one device."""

    ids: Tensor  # (N,) int64
    labels: Tensor  # (N,) int64: the next token, -100 for none
    loss_rows: Tensor  # (M,) int64: rows with a label
    rows: Rows
    factors: Tensor | None = None  # (N,) fp32, of the tokens' losses; None: 1
    shares: Shares | None = None  # of a teacher
    correct: Tensor | None = None  # (1,) fp64: the loss adds the labels, by their factors, that were the likeliest


@dataclass(frozen=True)
class Inputs:
    """A micro-batch: its sizes, and its tensors on each GPU. A simulation has the sizes alone."""

    tokens: int  # N
    trained: int  # M
    pairs: int  # (query, key) pairs in a layer's attention
    packed: tuple[Packed, ...] = ()  # on each GPU
    docs: Documents | None = None  # in RAM
    kl: Inputs | None = None  # of kto: the answers' counterparts, which are only read forward

    def on(self, gpu: int) -> Packed:
        """The tensors on a GPU."""
        assert self.packed, "a simulation has no tensors"
        return self.packed[gpu]


def make_inputs(
    cfg: ModelConfig,
    micro_batch: MicroBatch,
    places: Sequence[tuple[Tables, torch.device | str]],
    split_kl: bool = False,
) -> Inputs:
    """A micro-batch on each of the places: (tables from rope_tables, device). `split_kl`: as of in_ram."""
    return to_devices(collate(cfg, micro_batch, split_kl=split_kl), places)


class InRam(NamedTuple):
    """A micro-batch as tensors in RAM, before it is copied to GPUs."""

    tokens: int
    trained: int
    pairs: int
    ids: Tensor  # (N,) int64
    labels: Tensor  # (N,) int64
    loss_rows: Tensor  # (M,) int64
    docs: ops.Laid
    idle: bool = False  # of a host without any
    noise: Noise | None = None
    of_docs: Documents | None = None
    factors: Tensor | None = None  # (N,) fp32: weights of documents
    shares: Shares | None = None
    dropout: Dropout | None = None
    kl: InRam | None = None  # as of Inputs

    @property
    def weight(self) -> float:
        """The sum of the weights of its labels or, of preferences, of its pairs."""
        if self.of_docs is not None:
            return float(self.of_docs.pairs.sum())
        return self.trained if self.factors is None else float(self.factors[self.loss_rows].double().sum())


def collate(
    cfg: ModelConfig, micro_batch: MicroBatch, pinned: bool = False, noise: Noise | None = None, split_kl: bool = False
) -> InRam:
    """Makes the tensors of a micro-batch in RAM. `pinned`: in pinned memory, so that copies to a GPU are
    asynchronous. `split_kl`: for training with kto, of the answers alone, with their counterparts as `kl`.
    """
    if split_kl:
        answers, counterparts = (collate(cfg, half, pinned) for half in micro_batch.halves())
        return answers._replace(of_docs=micro_batch.documents, kl=counterparts, noise=noise)
    pin = Tensor.pin_memory if pinned else lambda tensor: tensor
    arrays = micro_batch.ids, micro_batch.labels, np.flatnonzero(micro_batch.labels >= 0)
    ids, labels, loss_rows = (pin(torch.from_numpy(array.astype(np.int64))) for array in arrays)
    docs, weights = ops.lay_docs(micro_batch.lengths), micro_batch.weights
    docs = docs._replace(content=pin(docs.content))
    of_docs, factors = micro_batch.documents, None
    if weights is not None and of_docs is None:
        factors = pin(torch.from_numpy(np.repeat(weights, micro_batch.lengths).astype(np.float32)))
    shares = Shares(*(pin(torch.from_numpy(array)) for array in micro_batch.taught)) if micro_batch.taught else None
    noise = noise and noise._replace(scale=pin(noise.scale))
    pairs = costs.layer_pairs(cfg.layers, micro_batch.lengths)
    return InRam(
        len(labels), len(loss_rows), pairs, ids, labels, loss_rows, docs, False, noise, of_docs, factors, shares
    )


def with_dropout(cfg: ModelConfig, batch: list[InRam], seed: int, step: int) -> list[InRam]:
    """A step's micro-batches with the dropout of adapters, if they have any.

    What is dropped depends on the seed, the step (from 0), the token's place in the step and the matrix alone.
    """
    if cfg.lora is None or not cfg.lora.dropout:
        return batch
    key, first, dropped = zlib.crc32(f"lora_dropout {seed} {step}".encode()) >> 1, 0, list[InRam]()
    for mb in batch:
        dropped.append(mb._replace(dropout=Dropout(cfg.lora.dropout, key, first)))
        first += mb.tokens
    return dropped


def host_share(batch: Sequence[InRam], host: int, hosts: int) -> Sequence[InRam]:
    """One host's micro-batches of a step, consecutive ones. A host without any gets one without labels, which adds
    zeros.
    """
    first = batch[0]
    no_label = torch.full_like(first.labels, -100)
    unlabelled = first._replace(trained=0, labels=no_label, loss_rows=first.loss_rows[:0], idle=True, factors=None)
    return shares(batch, hosts)[host] or [unlabelled._replace(of_docs=None, kl=None)]


def shares(batch: Sequence[InRam], hosts: int) -> list[Sequence[InRam]]:
    """The micro-batches of a step for each host."""
    n = len(batch)
    return [batch[n * host // hosts : n * (host + 1) // hosts] for host in range(hosts)]


def to_devices(
    mb: InRam,
    places: Sequence[tuple[Tables, torch.device | str]],
    loads: Sequence[Load | None] = (),
    correct: Tensor | None = None,
) -> Inputs:
    """As `make_inputs`, from tensors in RAM. `loads`: of each device, from make_load, in training. `correct`: as of
    Packed.
    """
    packed = []
    for (tables, device), load in zip(places, loads or [None] * len(places), strict=True):
        move = partial(Tensor.to, device=device, non_blocking=True)
        ids, labels, loss_rows = map(move, (mb.ids, mb.labels, mb.loss_rows))
        counts = load and load._replace(counted=not mb.idle)
        noise = mb.noise and mb.noise._replace(scale=move(mb.noise.scale))
        factors = None if mb.factors is None else move(mb.factors)
        shares = mb.shares and Shares(*map(move, mb.shares))
        rows = Rows(ops.place_docs(mb.docs, device), tables, counts, noise, mb.dropout)
        packed.append(Packed(ids, labels, loss_rows, rows, factors, shares, correct))
    kl = to_devices(mb.kl, places) if mb.kl else None
    return Inputs(mb.tokens, mb.trained, mb.pairs, tuple(packed), mb.of_docs, kl)


def prefetch(make: Callable[[int], Value], numbers: Iterable[int]) -> Generator[Value, None, None]:
    """Yields make(n) of each number, made in a thread: the next one while the current one is in use. Raises what `make`
    raised.
    """
    thread, coming = ThreadPoolExecutor(1, "ahead"), deque[Future[Value]]()
    try:
        for n in numbers:
            coming.append(thread.submit(make, n))
            if len(coming) > 1:
                yield coming.popleft().result()
        for last in coming:
            yield last.result()
    finally:
        thread.shutdown(cancel_futures=True)

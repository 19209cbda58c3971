"""One training step, from top to bottom. Read this file first.

A step computes all micro-batches of a layer, then the next layer; layers.py has the tasks. Where the plan has all
weights on the GPU, each micro-batch may instead pass through all layers and back before the next one: its activations
alone take less memory. A step waits once, for loss and gradient norm after backward. Weights and activations are copied
to the GPU in the order that `expect` was given, and their buffers are freed after the last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trireme.engine.buffers import read_by_loss
from trireme.engine.build import Engine, Inputs, Packed
from trireme.engine.layers import (
    Take,
    TakeGradients,
    backward_block,
    backward_embedding,
    forward_block,
    forward_embedding,
    head_losses,
    loss,
    take_head,
    weights_of,
)
from trireme.engine.memory import NOTHING
from trireme.engine.optimizer import StepStats
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Task
from trireme.engine.weights import UnitWeights
from trireme.models.config import InputError
from trireme.models.head import HeadWeights
from trireme.models.losses.comparison import Comparison
from trireme.models.losses.preferences import Documents, Preference
from trireme.models.rows import Load

# ---------------------------------------------------------------- the step


def train_step(
    e: Engine,
    batch: Sequence[Inputs],
    step: int,
    lr: float,
    trained: float | None = None,
    preference: Preference | None = None,
    docs: Sequence[Sequence[Documents]] | None = None,
) -> StepStats:
    """One step: forward, backward and update. `step` counts from 1.

    `trained`: the number of labels on all hosts, or the sum of their weights; with `preference`, the sum of the pairs'
    weights; None: the labels of `batch`. `docs`: the documents of each host's micro-batches; None: those of `batch`.

    In mode `forward` the update runs during the next call, ahead of each layer's forward, or in `e.optimizer.flush()`.
    Raises InputError if no token has a label: the loss has no mean.
    """
    trained = sum(mb.trained for mb in batch) if trained is None else trained
    docs = docs or [[mb.docs for mb in batch if mb.docs]]
    comparison = Comparison(preference, docs, e.plan.host) if preference else None
    if not trained:
        raise InputError(f"step {step}: none of its tokens has a label. Leave rows without labels out of the data.")
    if comparison and comparison.preference.method == "kto":
        measure = partial(comparison.measure, evaluate(e, [mb.kl for mb in batch if mb.kl]), e.gradients.all_gather)
        e.queues.run(numbered("compute", e.gpu(e.geo.head)), "other", "divergence", measure)
    losses, parts = [NOTHING] * len(batch), list[Tensor]()
    add = _adding(e, losses, 1 / trained, comparison, parts)
    for first, together in _passes(e, batch):
        _forward(e, first, together, train=True)
        if not first:
            e.optimizer.begin(step, lr)
        last = first + len(together) == len(batch)
        _head(e, first, together, add, last)
        _pool_load(e, together)
        _backward(e, first, together, last)
    if comparison:
        _conclude(e, comparison, losses)
    stats = e.optimizer.conclude(losses, trained)
    e.optimizer.read_ahead()
    if parts:
        return replace(stats, metrics=metrics_of(parts, trained))
    return replace(stats, metrics=comparison.metrics) if comparison else stats


def metrics_of(parts: Sequence[Tensor], trained: float) -> dict[str, float]:
    """Means over labels of the two parts of a teacher's loss. `parts`: (2,) sums of each micro-batch."""
    ce, kl = torch.stack([part.cpu() for part in parts]).sum(0).tolist()
    return {"ce": ce / trained, "kl": kl / trained}


def forward(e: Engine, batch: Sequence[Inputs], take: Take) -> list[Task]:
    """A pass without gradients: what it is for is what `take` does with the head's input. Runs updates that are due."""
    tasks = list[Task]()
    for first, together in _passes(e, batch):
        _forward(e, first, together, train=False)
        with e.weights.of_losses() as w:
            tasks += [take_head(e, b, w, mb, take) for b, mb in enumerate(together, first)]
    return tasks


def evaluate(e: Engine, batch: Sequence[Inputs], parts: list[Tensor] | None = None) -> list[Tensor]:
    """The losses (N,) of each micro-batch, zero for tokens without a label. Runs updates that are due.

    `parts`: with a teacher, the sums of the two parts of each micro-batch's losses are appended, (2,) fp64.
    """
    losses = [NOTHING] * len(batch)

    def take(b: int, packed: Packed, top: HeadWeights, x: Tensor) -> None:
        losses[b] = head_losses(e.cfg, packed, top, x, parts=parts)

    tasks = forward(e, batch, take)
    if e.plan.gpus > 1 and not e.queues.simulated:
        for task in tasks:
            task.wait()  # threads of their own make the losses
    return losses


def stream_layers(e: Engine) -> Iterator[tuple[int, Any]]:
    """Yields (unit, weights) of all layers in order, prefetched, for a caller that computes with them: to sample a
    token.

    Runs updates that are due.
    """
    _expect(e)
    for u in range(e.geo.head):
        for part in e.weights.parts(u):
            yield from _streamed(e, [part])
    with e.weights.of_losses() as w:
        yield from _streamed(e, list(w.values()))


def _streamed(e: Engine, parts: Sequence[UnitWeights]) -> Iterator[tuple[int, Any]]:
    """Yields the first of `parts`, which are used together, and frees all of them after it."""
    part = parts[0]
    queue, layer_bytes = numbered("compute", e.gpu(part.u)), e.geo.weights[part.u].span + e.geo.base[part.u].span
    arrived = e.queues.run(queue, "other", f"wait for {e.geo.names[part.u]}", lambda: None, part.ready)
    if e.plan.gpus > 1 and not e.queues.simulated:
        arrived.wait()  # another thread's queue
    yield part.u, weights_of(e, part)
    nbytes = layer_bytes if part.layer is None else e.geo.base[part.v].span
    task = e.queues.run(queue, "token", part.name, lambda: None, nbytes=nbytes)  # what the caller read
    for unit in parts:
        unit.attach(task)


# ---------------------------------------------------------------- forward


def _passes(e: Engine, batch: Sequence[Inputs]) -> Iterator[tuple[int, Sequence[Inputs]]]:
    """Yields the micro-batches of each pass over the layers, with the number of the first. A host without any has a
    pass, too: updates are due before it.
    """
    for first in range(0, max(1, len(batch)), e.plan.pass_size):
        yield first, batch[first : first + e.plan.pass_size]


def _forward(e: Engine, first: int, batch: Sequence[Inputs], train: bool) -> None:
    """Forward of all layers but the head; the head's weights are prefetched. `first`: the first one's number."""
    _expect(e)
    e.activations.expect_forward(len(batch))
    for u in range(e.geo.head):
        for part in e.weights.parts(u):
            for b, mb in enumerate(batch, first):
                if u == 0:
                    forward_embedding(e, b, part, mb, train)
                else:
                    forward_block(e, u, b, part, mb, train)


def _expect(e: Engine) -> None:
    """Begins the pass of weights for a forward pass, with updates that are due. A tied embedding is used two times."""
    e.weights.expect([*range(e.geo.head), *read_by_loss(e.geo)], before=e.optimizer.update_before_forward)


# ---------------------------------------------------------------- the head


def _adding(
    e: Engine, losses: list[Tensor], scale: float, comparison: Comparison | None, parts: list[Tensor]
) -> TakeGradients:
    """What fills the losses of a micro-batch, and adds the head's gradients of `scale` times their sum.

    With `comparison` they are of tokens, and `_conclude` replaces them.
    """

    def add(b: int, packed: Packed, top: HeadWeights, x: Tensor, head_grads: HeadWeights, dx: Tensor) -> None:
        if comparison:  # losses without gradients give the factors of those with
            plain = head_losses(e.cfg, packed._replace(factors=None), top, x)
            packed = packed._replace(factors=comparison.factors(b, plain), correct=None)
        losses[b] = head_losses(e.cfg, packed, top, x, scale, head_grads, dx, parts)

    return add


def _head(e: Engine, first: int, batch: Sequence[Inputs], add: TakeGradients, last: bool) -> None:
    """Losses, and the head's gradients, which are whole after the `last` pass."""
    with e.weights.of_losses() as w:
        for b, mb in enumerate(batch, first):
            loss(e, b, w, mb, add)
    if last:
        e.optimizer.finish(e.geo.head)
        for v in read_by_loss(e.geo)[1:]:
            e.gradients.defer(v)


def _conclude(e: Engine, comparison: Comparison, losses: list[Tensor]) -> None:
    """Queues what replaces the losses of tokens by those of pairs. It waits for all hosts, and so comes after all that
    another host waits for.
    """

    def conclude() -> None:
        losses[:] = [loss.to(losses[0].device) for loss in comparison.conclude(e.gradients.all_gather)]

    e.queues.run(numbered("compute", e.gpu(e.geo.head)), "other", "comparison", conclude)


def _pool_load(e: Engine, batch: Sequence[Inputs]) -> None:
    """Adds up the load of experts on all GPUs and hosts: the gradient of the balance loss needs it."""
    if e.cfg.experts is None or e.plan.gpus == e.plan.hosts == 1:
        return

    def run(gpu: int, fn: Callable[[Load], Any], after: Sequence[Task] = ()) -> Task:
        def with_load() -> Any:
            load = batch[0].on(gpu).rows.load
            return None if load is None or not (load.weight or e.plan.gpus > 1) else fn(load)

        return e.queues.run(numbered("compute", gpu), "other", "load", with_load, after)

    def sum_loads(load: Load) -> list[tuple[Tensor, Tensor]]:
        loads = [task.wait() for task in counted]
        return e.gradients.sum_over_hosts(loads) if load.weight else loads

    counted = [run(gpu, lambda load: load.in_ram()) for gpu in range(e.plan.gpus)]
    total = run(0, sum_loads, counted)
    for gpu in range(e.plan.gpus):
        run(gpu, lambda load: load.pool_(total.wait()), (total,))


# ---------------------------------------------------------------- backward


def _backward(e: Engine, first: int, batch: Sequence[Inputs], last: bool) -> None:
    """Backward of all blocks and of the embedding. After the `last` pass gradients are whole."""
    blocks = range(e.geo.head - 1, 0, -1)
    e.weights.expect(blocks)
    e.activations.expect_backward(len(batch))
    for u in blocks:
        for part in e.weights.parts(u, backward=True):
            for b, mb in enumerate(batch, first):
                backward_block(e, u, b, part, mb)
        if last:
            e.optimizer.finish(u)
    for b, mb in enumerate(batch, first):
        backward_embedding(e, b, mb)
    if last:
        e.optimizer.finish(0)

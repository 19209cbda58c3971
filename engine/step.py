"""One training step, top to bottom. Read this file first.

Vertical order: for each unit all micro-batches, then the next unit; so weights, gradients and optimizer state cross
each link once a step, whatever the number of micro-batches. Units move by three verbs: prefetch, get, release. Whatever
takes time is a task on a lane; nothing here waits, but for the loss and the gradient norm when backward has ended.
The same code runs for real, inline and in simulation: only what is inside the functions given to `run` touches data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trireme.engine.activations import ActivationSwap
from trireme.engine.geometry import Geometry
from trireme.engine.gradients import Gradients
from trireme.engine.homes import Homes
from trireme.engine.lanes import InlineLanes, Task
from trireme.engine.memory import Memory, OnGpu, flat, views
from trireme.engine.optimizer import Optimizer, StepStats
from trireme.engine.plan import Plan
from trireme.engine.weights import WeightStream
from trireme.models import head, model, shapes
from trireme.models.config import ModelConfig
from trireme.models.rows import Rows
from trireme.storage.devices import Device
from trireme.storage.scratch import Scratch


@dataclass(frozen=True)
class Inputs:
    """A micro-batch on the device: N packed tokens. In a simulation the tensors are None."""

    ids: Tensor | None  # (N,) int64
    labels: Tensor | None  # (N,) int64: the token after each, -100 where none counts
    loss_rows: Tensor | None  # (M,) int64: where a label counts
    rows: Rows | None
    tokens: int  # N
    trained: int  # M
    pairs: int  # (query, key) pairs that one layer attends to


@dataclass
class Engine:
    """What a step works on; made by build.py."""

    cfg: ModelConfig
    geo: Geometry
    plan: Plan
    lanes: InlineLanes  # or what has its methods: RealLanes, SimulatedLanes
    memory: Memory
    homes: Homes
    weights: WeightStream
    activations: ActivationSwap
    gradients: Gradients
    optimizer: Optimizer

    def claim_scratch(self, devices: Sequence[Device]) -> None:
        """Takes the room that swapped activations and waiting gradients need of the drives. Raises StoreError."""
        nbytes = self.activations.scratch_bytes + self.gradients.scratch_bytes
        if nbytes:
            self.activations.scratch = self.gradients.scratch = Scratch(devices, nbytes)

    def close(self) -> None:
        """Ends the optimizer's threads, and gives the scratch space and the memory back. The lanes are the caller's."""
        self.optimizer.close()
        if self.activations.scratch is not None:
            self.activations.scratch.close()
        self.memory.close()

    def run(self, name: str, fn, after: Sequence[Task], flops: float) -> Task:
        """Hands `fn` to the compute lane."""
        return self.lanes.run("compute", name, fn, after, flops=flops)


def train_step(e: Engine, batch: Sequence[Inputs], step: int, lr: float) -> StepStats:
    """Forward, backward and, as the plan's mode says, the update of one step over all its micro-batches.

    In mode `forward` the update is due when this returns, and runs in the next call, ahead of each unit's forward;
    `e.optimizer.flush()` runs it at once. `step` counts from 1. Returns the step's statistics.
    """
    trained = sum(mb.trained for mb in batch)
    _forward(e, batch, train=True)
    e.optimizer.begin(step, lr)
    losses = _head(e, batch, 1 / trained)
    _backward(e, batch)
    stats = e.optimizer.conclude(losses, trained)
    e.optimizer.read_ahead()
    return stats


def evaluate(e: Engine, batch: Sequence[Inputs]) -> list[Tensor]:
    """Each micro-batch's losses (N,), zero where no label counts. Any update that is due runs on the way."""
    _forward(e, batch, train=False)
    return _head(e, batch, None)


# ---------------------------------------------------------------- forward


def _forward(e: Engine, batch: Sequence[Inputs], train: bool) -> None:
    """Forward through the embedding and the blocks; each unit's pending update and its weights run ahead of it."""
    ahead = min(e.plan.ahead, e.geo.head - 1)  # the two ends share a slot: the last waits until the first is through
    e.optimizer.begin_updates()
    for u in range(ahead):
        update_and_prefetch(e, u)
    for u in range(e.geo.head):
        update_and_prefetch(e, u + ahead)
        w = e.weights.get(u)
        for b, mb in enumerate(batch):
            _prefetch_between(e, batch, "x", u, b)
            out = e.activations.open(u + 1, b, "x")
            done = _forward_embedding(e, w, mb, out) if u == 0 else _forward_block(e, u, b, w, mb, out, train)
            e.activations.send(u + 1, b, "x", mb.tokens, done)
        e.weights.release(u, done, keep=e.weights.kept_for_turn(u, train))
    update_and_prefetch(e, e.geo.head)  # with a window of 1 it has not been fetched ahead


def update_and_prefetch(e: Engine, u: int) -> None:
    """Hands over unit u's update, if one is due, and starts its weights on their way: its forward comes soon."""
    if u <= e.geo.head:
        e.optimizer.update(u)
        e.optimizer.run_ahead()
        e.weights.prefetch(u)


def _prefetch_between(e: Engine, batch: Sequence[Inputs], part: str, u: int, b: int) -> None:
    """Where what units leave for each other waits outside the GPU: fetches it from micro-batch b of unit u on.

    `part`: "x", which forward takes to the next unit, or its gradient "dx", which backward takes to the one before.
    """
    if e.plan.between == "gpu":
        return
    n = len(batch)
    for i in range(b, b + min(e.plan.swap_slots, n)):
        v = u + i // n if part == "x" else u - i // n
        if 0 < v <= e.geo.head:
            e.activations.prefetch(v, i % n, part, batch[i % n].tokens)


def _forward_embedding(e: Engine, w: OnGpu, mb: Inputs, out: OnGpu) -> Task:
    def forward():
        head.embed_forward(_weights(e, 0, w), mb.ids, mb.rows, _rows(e, out.buffer, mb))

    return e.run("forward embed", forward, (*w.ready, *out.ready), flops=0)


def _forward_block(e: Engine, u: int, b: int, w: OnGpu, mb: Inputs, out: OnGpu, train: bool) -> Task:
    swap = e.activations
    x = swap.get(u, b, "x")
    spans = {part: swap.open(u, b, part) for part in swap.parts(u)} if train else {}

    def forward():
        saved = swap.saved(u, mb.tokens, spans)
        model.forward(e.cfg, u, _weights(e, u, w), _rows(e, x.buffer, mb), mb.rows, saved, _rows(e, out.buffer, mb))

    before = [t for span in (x, out, *spans.values()) for t in span.ready]
    flops = shapes.forward_flops(e.cfg, u, mb.tokens, mb.pairs)
    done = e.run(f"forward {e.geo.names[u]}", forward, (*w.ready, *before), flops)
    for part in spans:
        swap.send(u, b, part, mb.tokens, done)
        if part != "gpu":
            swap.release(u, b, part, done)
    if not train or e.plan.units[u].x != "gpu":
        swap.release(u, b, "x", done)
    return done


# ---------------------------------------------------------------- the head


def _head(e: Engine, batch: Sequence[Inputs], scale: float | None) -> list[Tensor]:
    """Each micro-batch's losses and, unless `scale` is None, the head's gradients of scale * the sum of the losses."""
    u, tied, train = e.geo.head, e.cfg.tied, scale is not None
    losses: list[Tensor] = []
    held = {v: e.weights.get(v) for v in ((u, 0) if tied else (u,))}
    grads = {v: e.gradients.get(v) for v in held} if train else {}
    for b, mb in enumerate(batch):
        _prefetch_between(e, batch, "x", u, b)
        x = e.activations.get(u, b, "x")
        dx = e.activations.open(u, b, "dx") if train else None
        before = [t for span in (*held.values(), x) for t in span.ready] + [zeroed for _, zeroed in grads.values()]

        def loss(mb=mb, x=x, dx=dx):
            w = {v: _weights(e, v, h) for v, h in held.items()}
            g = {v: model.weights(e.cfg, v, tensors) for v, (tensors, _) in grads.items()}
            w_out = model.output_matrix(e.cfg, w.get(0), w[u])
            g_out = model.output_matrix(e.cfg, g.get(0), g[u]) if train else None
            out = _rows(e, dx.buffer, mb) if train else None
            args = (mb.labels, mb.loss_rows, scale or 1.0, g.get(u), g_out, out)
            losses.append(head.head_loss(e.cfg, w[u], w_out, _rows(e, x.buffer, mb), *args))

        flops = (3 if train else 1) * shapes.forward_flops(e.cfg, u, mb.trained, mb.pairs)
        done = e.run("loss", loss, (*before, *(dx.ready if dx else ())), flops)
        e.activations.release(u, b, "x", done)
        if train:
            e.activations.send(u, b, "dx", mb.tokens, done)
    for v in held:
        e.weights.release(v, done)
    if train:
        e.optimizer.finish(u, done)
    return losses


# ---------------------------------------------------------------- backward


def _backward(e: Engine, batch: Sequence[Inputs]) -> None:
    """Backward through the blocks and the embedding; each gradient goes to the optimizer when its unit is through."""
    order = [(u, b) for u in range(e.geo.head - 1, 0, -1) for b in range(len(batch))]
    ahead = e.plan.ahead
    reach = e.plan.swap_slots - 1  # micro-batches whose activations are fetched ahead
    for u, b in order[:reach]:
        _prefetch_saved(e, u, b, batch[b])
    for i, (u, b) in enumerate(order):
        if b == 0:
            for v in range(u, max(0, u - ahead - 1), -1):
                e.weights.prefetch(v)
            w, (grads, zeroed) = e.weights.get(u), e.gradients.get(u)
        if i + reach < len(order):
            _prefetch_saved(e, *order[i + reach], batch[order[i + reach][1]])
        _prefetch_between(e, batch, "dx", u + 1, b)
        done = _backward_block(e, u, b, w, grads, zeroed, batch[b])
        if b == len(batch) - 1:
            e.weights.release(u, done)
            e.optimizer.finish(u, done)
    _backward_embedding(e, batch)


def _prefetch_saved(e: Engine, u: int, b: int, mb: Inputs) -> None:
    for part in ("x", *e.activations.parts(u)):
        e.activations.prefetch(u, b, part, mb.tokens)


def _backward_block(e: Engine, u: int, b: int, w: OnGpu, grads, zeroed: Task, mb: Inputs) -> Task:
    swap = e.activations
    x, dy = swap.get(u, b, "x"), swap.get(u + 1, b, "dx")
    spans = {part: swap.get(u, b, part) for part in swap.parts(u)}
    dx = swap.open(u, b, "dx")

    def backward():
        saved = swap.saved(u, mb.tokens, spans)
        g = model.weights(e.cfg, u, grads)
        tensors = (_rows(e, x.buffer, mb), saved, _rows(e, dy.buffer, mb), mb.rows, _rows(e, dx.buffer, mb))
        model.backward(e.cfg, u, _weights(e, u, w), g, *tensors)

    before = [t for span in (w, x, dy, *spans.values(), dx) for t in span.ready] + [zeroed]
    kept = frozenset(name for name, _ in e.plan.units[u].saved)
    flops = shapes.backward_flops(e.cfg, u, mb.tokens, mb.pairs)
    flops += shapes.recompute_flops(e.cfg, kept, mb.tokens, mb.pairs, e.geo.kinds[u])
    done = e.run(f"backward {e.geo.names[u]}", backward, before, flops)
    for part in ("x", *spans):
        swap.release(u, b, part, done)
    swap.release(u + 1, b, "dx", done)
    swap.send(u, b, "dx", mb.tokens, done)
    return done


def _backward_embedding(e: Engine, batch: Sequence[Inputs]) -> None:
    grads, zeroed = e.gradients.get(0)
    for b, mb in enumerate(batch):
        _prefetch_between(e, batch, "dx", 1, b)
        dy = e.activations.get(1, b, "dx")

        def backward(mb=mb, dy=dy):
            g = model.weights(e.cfg, 0, grads)
            head.embed_backward(g, _rows(e, dy.buffer, mb), mb.ids, mb.rows)

        done = e.run("backward embed", backward, (zeroed, *dy.ready), flops=0)
        e.activations.release(1, b, "dx", done)
    e.optimizer.finish(0, done)


def _weights(e: Engine, u: int, held: OnGpu):
    """Unit u's weights by the names that its block uses."""
    return model.weights(e.cfg, u, views(e.geo.weights[u], held.buffer))


def _rows(e: Engine, buffer: Tensor, mb: Inputs) -> Tensor:
    """The first N rows of a span of activations, (N, D)."""
    return flat(buffer, e.plan.dtype, mb.tokens * e.cfg.width).view(mb.tokens, e.cfg.width)

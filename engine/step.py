"""One training step, top to bottom. Read this file first.

All micro-batches of a unit, then the next unit. The only wait is for loss and gradient norm, after backward. Only
functions given to `run` touch data: a simulation runs the same code.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from trireme.engine.activations import Activation, ActivationSwap
from trireme.engine.geometry import Geometry
from trireme.engine.gradients import Gradient, Gradients
from trireme.engine.homes import Homes
from trireme.engine.lanes.names import numbered
from trireme.engine.lanes.task import Kind, Lanes, Task
from trireme.engine.memory import NOTHING, Memory, OnGpu, flat
from trireme.engine.optimizer import Optimizer, StepStats
from trireme.engine.plan import Plan
from trireme.engine.weights import UnitStream, Weights
from trireme.models import head, model
from trireme.models.config import InputError, ModelConfig
from trireme.models.rows import Load, Rows
from trireme.models.sizes import costs
from trireme.storage.devices import Device
from trireme.storage.scratch import Scratch


class Packed(NamedTuple):
    """N packed tokens on the device."""

    ids: Tensor  # (N,) int64
    labels: Tensor  # (N,) int64: the next token, -100 for none
    loss_rows: Tensor  # (M,) int64: rows with a label
    rows: Rows


@dataclass(frozen=True)
class Inputs:
    """A simulation has sizes alone."""

    tokens: int  # N
    trained: int  # M
    pairs: int  # (query, key) pairs in a layer's attention
    packed: tuple[Packed, ...] = ()  # on each GPU

    @property
    def on_device(self) -> Packed:
        """On the only GPU."""
        assert len(self.packed) == 1, "a simulation has no tensors, several GPUs have theirs"
        return self.packed[0]

    def on(self, gpu: int) -> Packed:
        assert self.packed, "a simulation has no tensors"
        return self.packed[gpu]


@dataclass
class Engine:
    """Made by build.py."""

    cfg: ModelConfig
    geo: Geometry
    plan: Plan
    lanes: Lanes
    memory: Memory
    homes: Homes
    weights: UnitStream
    activations: ActivationSwap
    gradients: Gradients
    optimizer: Optimizer
    views: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)  # of slots, by unit and address

    def claim_scratch(self, devices: Sequence[Device]) -> None:
        """Takes scratch space for frozen weights, activations and gradients. Raises StoreError."""
        nbytes = self.homes.base_bytes + self.activations.scratch_bytes + self.gradients.scratch_bytes
        if nbytes:
            scratch = Scratch(devices, nbytes)
            self.homes.scratch = self.activations.scratch = self.gradients.scratch = scratch

    def close(self) -> None:
        """Ends threads; frees scratch space and memory. The lanes are the caller's."""
        self.optimizer.close()
        self.views.clear()
        if self.activations.scratch is not None:
            self.activations.scratch.close()
        if self.homes.files is not None:
            self.homes.files.close()
        self.memory.close()

    def compute(self, kind: Kind, u: int, fn: Callable[[], object], after: Sequence[Task], flops: float = 0) -> Task:
        return self.lanes.run(numbered("compute", self.gpu(u)), kind, self.geo.names[u], fn, after, flops=flops)

    def gpu(self, u: int) -> int:
        return self.plan.units[u].gpu


Item = TypeVar("Item")


def look_ahead(items: Iterable[Item], reach: int, start: Callable[[Item], object]) -> Iterator[Item]:
    """Yields the items in order, each started `reach` items before its turn."""
    coming: deque[Item] = deque()
    for item in items:
        start(item)
        coming.append(item)
        if len(coming) > reach:
            yield coming.popleft()
    yield from coming


def units_ahead(e: Engine, units: Sequence[int], most: int, start: Callable[[int], object]) -> Iterator[int]:
    """Yields the units, each started when its GPU has a slot: with one GPU, and at most, `most` before its turn."""
    started, ahead = 0, Counter[int]()
    for i, u in enumerate(units):
        while started < len(units) and started <= i + most and ahead[e.gpu(units[started])] <= e.plan.ahead:
            ahead[e.gpu(units[started])] += 1
            start(units[started])
            started += 1
        yield u
        ahead[e.gpu(u)] -= 1


@dataclass
class Route:
    """A pass: its units in order and, within each, the micro-batches.

    `units` starts weights ahead, each of `fetched` the activations of one micro-batch.
    """

    batch: Sequence[Inputs]
    units: Iterator[int]
    fetched: Sequence[Iterator[object]]

    def micro_batches(self) -> Iterator[tuple[int, Inputs]]:
        """The current unit's, with activations on the GPU or on their way."""
        for b, mb in enumerate(self.batch):
            for places in self.fetched:
                next(places)
            yield b, mb


# ---------------------------------------------------------------- the step


def train_step(e: Engine, batch: Sequence[Inputs], step: int, lr: float, trained: int | None = None) -> StepStats:
    """Forward, backward and update; `step` counts from 1. `trained`: labels of all hosts, if several.

    In mode `forward` the next call runs the update, ahead of each unit's forward, or `e.optimizer.flush()` does.
    Raises InputError where no token has a label: there is no mean of the loss.
    """
    trained = sum(mb.trained for mb in batch) if trained is None else trained
    if not trained:
        raise InputError(f"step {step}: none of its tokens has a label. Leave rows without labels out of the data.")
    route = _forward(e, batch, train=True)
    e.optimizer.begin(step, lr)
    losses, _ = _head(e, route, 1 / trained)
    _pool_load(e, batch)
    _backward(e, batch)
    stats = e.optimizer.conclude(losses, trained)
    e.optimizer.read_ahead()
    return stats


def evaluate(e: Engine, batch: Sequence[Inputs]) -> list[Tensor]:
    """Each micro-batch's losses (N,), zero without a label. Runs updates that are due."""
    losses, done = _head(e, _forward(e, batch, train=False), None)
    if e.plan.gpus > 1 and not e.lanes.simulated:
        done.wait()  # a thread of its own makes them
    return losses


# ---------------------------------------------------------------- forward


def forward_units(e: Engine) -> Iterator[int]:
    """Units in forward order; starts due updates and weights ahead."""

    def start(u: int) -> None:
        e.optimizer.update(u)
        e.optimizer.run_ahead()
        e.weights.prefetch(u)

    return units_ahead(e, range(e.geo.n_units), e.geo.head - 1, start)  # the ends share a slot: the head waits


def _forward(e: Engine, batch: Sequence[Inputs], train: bool) -> Route:
    """Returns the route at the head."""
    e.optimizer.run_ahead()
    route = Route(batch, forward_units(e), _outputs(e, batch, e.activations.x, range(e.geo.n_units)))
    for u in route.units:
        if u == e.geo.head:
            break
        w = e.weights.get(u)
        for b, mb in route.micro_batches():
            target = e.activations.x(u + 1, b)
            out = e.activations.open(target)
            done = forward_embedding(e, w, mb, out) if u == 0 else forward_block(e, u, b, w, mb, out, train)
            e.activations.send(target, mb.tokens, done, backward=train)
        e.weights.release_in_forward(u, done, train)
    return route


def _outputs(
    e: Engine, batch: Sequence[Inputs], of: Callable[[int, int], Activation], units: Iterable[int]
) -> list[Iterator[tuple[int, int]]]:
    """Prefetches of units' outputs that leave the GPU before the next unit."""
    if e.plan.between == "gpu":
        return []

    def fetch(place: tuple[int, int]) -> None:
        u, b = place
        if u > 0:  # the embedding's input is token ids
            e.activations.prefetch([of(u, b)], batch[b].tokens, e.activations.hop_in)

    return [look_ahead(product(units, range(len(batch))), min(e.plan.swap_slots, len(batch)) - 1, fetch)]


def forward_embedding(e: Engine, w: Weights, mb: Inputs, out: OnGpu) -> Task:
    def forward() -> None:
        ids, rows = mb.on(e.gpu(0)).ids, mb.on(e.gpu(0)).rows
        head.embed_forward(weights_of(e, 0, w), ids, rows, _rows(e, out, mb))

    return e.compute("forward", 0, forward, (*w.ready, *out.ready))


def forward_block(e: Engine, u: int, b: int, w: Weights, mb: Inputs, out: OnGpu, train: bool) -> Task:
    swap, source = e.activations, e.activations.x(u, b)
    x = swap.get(source)
    spans = {saved: swap.open(saved) for saved in swap.saved(u, b)} if train else {}

    def forward() -> None:
        saved, rows = swap.tensors(spans, mb.tokens), mb.on(e.gpu(u)).rows
        model.forward(e.cfg, u, weights_of(e, u, w), _rows(e, x, mb), rows, saved, _rows(e, out, mb))

    ready = _ready(w, x, out, *spans.values())
    done = e.compute("forward", u, forward, ready, costs.forward_flops(e.cfg, u, mb.tokens, mb.pairs))
    for saved in spans:
        swap.send(saved, mb.tokens, done)
    if not train or source.tier != "gpu":
        swap.release(source, done)
    return done


# ---------------------------------------------------------------- the head


def _head(e: Engine, route: Route, scale: float | None) -> tuple[list[Tensor], Task]:
    """Each micro-batch's losses, the last task. Unless `scale` is None the head's gradients of scale * their sum."""
    u, train = e.geo.head, scale is not None
    read = (u, 0) if e.cfg.tied else (u,)  # units that the loss reads
    w = {v: e.weights.get(v) for v in read}
    g = {v: e.gradients.get(v) for v in read} if train else {}
    losses = [NOTHING] * len(route.batch)
    for b, mb in route.micro_batches():
        done = loss(e, b, w, g, mb, scale or 1.0, losses)
    for v in read:
        e.weights.release(v, done)
    if train:
        e.optimizer.finish(u, done)
        for v in read[1:]:
            e.gradients.set_aside(v, done)
    return losses, done


def loss(
    e: Engine,
    b: int,
    w: Mapping[int, Weights],
    g: Mapping[int, Gradient],
    mb: Inputs,
    scale: float,
    losses: list[Tensor],
) -> Task:
    """Sets micro-batch b's losses; with `g` adds gradients too."""
    u, swap = e.geo.head, e.activations
    source, target = swap.x(u, b), swap.dx(u, b)
    x = swap.get(source)
    dx = swap.open(target) if g else None

    def add() -> None:
        tops = {v: weights_of(e, v, held) for v, held in w.items()}
        grads = {v: _gradients(e, v, gradient) for v, gradient in g.items()}
        w_out = model.output_matrix(e.cfg, tops.get(0), tops[u])
        g_out = model.output_matrix(e.cfg, grads.get(0), grads[u]) if g else None
        labels, rows, out = mb.on(e.gpu(u)).labels, mb.on(e.gpu(u)).loss_rows, _rows(e, dx, mb) if dx else None
        given = (tops[u], w_out, _rows(e, x, mb), labels, rows)
        losses[b] = head.head_loss(e.cfg, *given, scale, grads.get(u), g_out, out)

    ready = _ready(*w.values(), x, *g.values())
    flops = costs.forward_flops(e.cfg, u, mb.trained, mb.pairs)
    flops += costs.backward_flops(e.cfg, u, mb.trained, mb.pairs) if g else 0
    done = e.compute("loss", u, add, (*ready, *(dx.ready if dx else ())), flops)
    swap.release(source, done)
    if g:
        swap.send(target, mb.tokens, done)
    return done


def _pool_load(e: Engine, batch: Sequence[Inputs]) -> None:
    """Tells every GPU the load of experts on all, and on all hosts, which gradients of its balance need."""
    if e.cfg.experts is None or e.plan.gpus == e.plan.hosts == 1:
        return

    def run(gpu: int, fn: Callable[[Load], Any], after: Sequence[Task] = ()) -> Task:
        def with_load() -> Any:
            load = batch[0].on(gpu).rows.load
            return None if load is None or not (load.weight or e.plan.gpus > 1) else fn(load)

        return e.lanes.run(numbered("compute", gpu), "other", "load", with_load, after)

    def of_hosts(load: Load) -> list[tuple[Tensor, Tensor]]:
        here = [task.wait() for task in told]
        return e.gradients.over_hosts(here) if load.weight else here

    told = [run(gpu, lambda load: load.in_ram()) for gpu in range(e.plan.gpus)]
    every = run(0, of_hosts, told)
    for gpu in range(e.plan.gpus):
        run(gpu, lambda load: load.pool_(every.wait()), (every,))


# ---------------------------------------------------------------- backward


def _backward(e: Engine, batch: Sequence[Inputs]) -> None:
    swap, blocks = e.activations, range(e.geo.head - 1, 0, -1)

    def fetch(place: tuple[int, int]) -> None:
        u, b = place
        if u > 0:
            swap.prefetch([swap.x(u, b), *swap.saved(u, b)], batch[b].tokens)

    saved = look_ahead(product((*blocks, 0), range(len(batch))), e.plan.swap_slots - 1, fetch)
    fetched = (saved, *_outputs(e, batch, swap.dx, (e.geo.head, *blocks)))
    route = Route(batch, units_ahead(e, blocks, e.geo.n_units, e.weights.prefetch), fetched)
    for u in route.units:
        w, gradient = e.weights.get(u, backward=True), e.gradients.get(u)
        for b, mb in route.micro_batches():
            done = backward_block(e, u, b, w, gradient, mb)
        e.weights.release(u, done)
        e.optimizer.finish(u, done)
    _backward_embedding(e, route)


def backward_block(e: Engine, u: int, b: int, w: Weights, gradient: Gradient, mb: Inputs) -> Task:
    swap, above = e.activations, e.activations.dx(u + 1, b)
    source, target = swap.x(u, b), swap.dx(u, b)
    x, dy = swap.get(source), swap.get(above)
    spans = {saved: swap.get(saved) for saved in swap.saved(u, b)}
    dx = swap.open(target)

    def backward() -> None:
        saved, g = swap.tensors(spans, mb.tokens), _gradients(e, u, gradient)
        rows = mb.on(e.gpu(u)).rows
        tensors = (_rows(e, x, mb), saved, _rows(e, dy, mb), rows, _rows(e, dx, mb))
        model.backward(e.cfg, u, weights_of(e, u, w), g, *tensors)

    ready = _ready(w, x, dy, *spans.values(), dx, gradient)
    kept = frozenset(name for name, _ in e.plan.units[u].saved)
    flops = costs.backward_flops(e.cfg, u, mb.tokens, mb.pairs)
    flops += costs.recompute_flops(e.cfg, kept, mb.tokens, mb.pairs, e.geo.kinds[u])
    done = e.compute("backward", u, backward, ready, flops)
    for used in (source, *spans, above):
        swap.release(used, done)
    swap.send(target, mb.tokens, done)
    return done


def _backward_embedding(e: Engine, route: Route) -> None:
    gradient = e.gradients.get(0)
    for b, mb in route.micro_batches():
        done = backward_embedding(e, b, gradient, mb)
    e.optimizer.finish(0, done)


def backward_embedding(e: Engine, b: int, gradient: Gradient, mb: Inputs) -> Task:
    above = e.activations.dx(1, b)
    dy = e.activations.get(above)

    def backward() -> None:
        g = _gradients(e, 0, gradient)
        head.embed_backward(g, _rows(e, dy, mb), mb.on(e.gpu(0)).ids, mb.on(e.gpu(0)).rows)

    done = e.compute("backward", 0, backward, (*gradient.ready, *dy.ready))
    e.activations.release(above, done)
    return done


# ---------------------------------------------------------------- tensors


def _ready(*used: OnGpu | Weights | Gradient) -> list[Task]:
    """Tasks that their readers and writers come after."""
    return [task for one in used for task in one.ready]


def weights_of(e: Engine, u: int, held: Weights) -> Any:
    """Unit u's weights by the block's names, as model.weights."""
    key = u, held.trained.buffer.data_ptr(), held.frozen.buffer.data_ptr()
    if key not in e.views:
        e.views[key] = model.weights(e.cfg, u, e.weights.tensors(u, held))
    return e.views[key]


def _gradients(e: Engine, u: int, held: Gradient) -> Any:
    """As `weights_of`, of its gradients."""
    key = u, held.buffer.data_ptr()
    if key not in e.views:
        e.views[key] = model.gradients(e.cfg, u, e.gradients.tensors(u, held))
    return e.views[key]


def _rows(e: Engine, span: OnGpu, mb: Inputs) -> Tensor:
    """A span's first N rows, (N, D)."""
    return flat(span.buffer, e.plan.dtype, mb.tokens * e.cfg.width).view(mb.tokens, e.cfg.width)

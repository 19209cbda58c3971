"""Weights on the GPU: expect the units of a pass, get one, release it.

They are stored there, or come from RAM or the SSD to a buffer of a pool, ahead of their use; a resident copy is a pool
of one. Buffers keep their content while they are free, so that backward begins with what forward used last:
STRONGHOLD's window and, the order being known, Belady's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from torch import Tensor

from trireme.engine.buffers import What
from trireme.engine.geometry import Geometry
from trireme.engine.memory import Buffer, Pool, Prefetch, views
from trireme.engine.placement import Entry, Placement
from trireme.engine.plan import Plan
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Queues, Task
from trireme.models import model

# ---------------------------------------------------------------- one layer's trained or frozen weights


class OnGpu:
    """Weights stored on their GPU, or none. Readers come after `ready`."""

    may_come = True

    def __init__(self, tensor: Tensor):
        self.here: Buffer | None = Buffer(tensor)
        self.ready: tuple[Task, ...] = ()

    def fetch(self) -> None:
        """They are there."""

    def get(self) -> Buffer:
        self.fetch()
        assert self.here is not None
        return self.here

    def release(self, after: Sequence[Task]) -> None:
        """They stay."""

    def publish(self, done: Task) -> None:
        """After `done` they are new."""
        self.ready = (done,)

    def settle(self) -> None:
        """They are where they are stored."""


class InRam(OnGpu):
    """Weights stored in RAM. After `updated` they are current there."""

    def __init__(self, name: str, placement: Placement, entry: Entry, pool: Pool, gpu: int):
        self.name, self.placement, self.entry, self.pool, self.gpu = name, placement, entry, pool, gpu
        self.nbytes = placement.layout(entry).span
        self.here = None  # while in use
        self.ready = ()
        self.updated: tuple[Task, ...] = ()

    @property
    def may_come(self) -> bool:  # type: ignore[override]
        return self.here is not None or self.pool.is_free

    def fetch(self) -> None:
        if self.here is not None:
            return
        self.here = self.pool.acquire(self.name, self)
        if self.here.content is not self:
            self.here.content, self.ready = self, (self._copy_up(self.here),)

    def release(self, after: Sequence[Task]) -> None:
        """The last reader is `after`."""
        here, self.here = self.get(), None
        here.free((*self.ready, *after, *self.updated))

    def publish(self, done: Task) -> None:
        assert self.here is None, "a layer in use was updated"
        self.updated = (done,)
        self.pool.forget(self)

    def _copy_up(self, here: Buffer) -> Task:
        return self._copy(self._stored(), self.updated, here)

    def _copy(self, source: Tensor, come: Sequence[Task], here: Buffer) -> Task:
        pieces = self.placement.pieces(self.entry)

        def up() -> None:
            for first, offset, n in pieces:
                here.tensor[offset : offset + n].copy_(source[first : first + n], non_blocking=True)

        label, queue = self.placement.label(self.entry), numbered("h2d", self.gpu)
        return self.placement.queues.run(queue, "weights", label, up, (*here.ready, *come), nbytes=self.nbytes)

    def _stored(self) -> Tensor:
        stored = self.placement.stored(self.entry)
        assert stored is not None
        return stored

    # ------------------------------------------------ updates

    def take(self) -> Buffer:
        """The weights in RAM, to be updated after `ready`."""
        taken = Buffer(self._stored())
        taken.ready = self.updated
        return taken

    def put(self, taken: Buffer, done: Task) -> None:  # noqa: ARG002 (of the SSD)
        """After `done` those of `take` are new."""
        self.publish(done)

    def write_back(self, done: Task) -> None:
        """After `done` those on the GPU are new: copies them to RAM."""
        here, stored = self.get(), self._stored()

        def down() -> None:
            stored[: self.nbytes].copy_(here.tensor[: self.nbytes], non_blocking=True)

        queue = numbered("update_out", self.gpu)
        self.ready = (done,)
        self.updated = (self.placement.queues.run(queue, "weights", self.name, down, (done,), nbytes=self.nbytes),)


class OnSsd(InRam):
    """Weights stored on the SSD, which pass through a staging buffer in RAM."""

    def __init__(self, name: str, placement: Placement, entry: Entry, pool: Pool, gpu: int, staging: Pool):
        super().__init__(name, placement, entry, pool, gpu)
        self.staging = staging
        self.fresh: Buffer | None = None  # new weights that are still in RAM

    def _copy_up(self, here: Buffer) -> Task:
        source, self.fresh = self.fresh or self._read(self.placement.label(self.entry)), None
        done = self._copy(source.tensor, source.ready, here)
        source.free((done, *self.updated))
        return done

    def _read(self, owner: str) -> Buffer:
        buffer = self.staging.acquire(owner)
        ready = (*buffer.ready, *self.updated)
        buffer.ready = (self.placement.read_weights(self.entry, buffer.tensor, ready),)
        return buffer

    def take(self) -> Buffer:
        return self._read(f"{self.name} update")

    def put(self, taken: Buffer, done: Task) -> None:
        self.publish(done)
        self.updated = (self.placement.write_weights(self.entry.u, taken.tensor, (done,)),)
        taken.ready, self.fresh = (done,), taken

    def settle(self) -> None:
        """Frees the staging buffer of new weights, to be read again."""
        if self.fresh is not None:
            self.fresh.free(self.updated)
            self.fresh = None


# ---------------------------------------------------------------- all of a layer's


class LayerWeights:
    """A layer's trained and frozen weights, and what a pass makes of both."""

    def __init__(self, u: int, trained: OnGpu, frozen: OnGpu):
        self.u, self.trained, self.frozen = u, trained, frozen
        self.decoded: Buffer | None = None
        self.before: Callable[[int], None] | None = None  # called before they come
        self.last: tuple[Task, ...] = ()  # reader

    @property
    def may_come(self) -> bool:
        return self.trained.may_come and self.frozen.may_come

    def fetch(self) -> None:
        if self.before is not None:
            self.before(self.u)
        self.trained.fetch()
        self.frozen.fetch()

    @property
    def ready(self) -> tuple[Task, ...]:
        return (*self.trained.ready, *self.frozen.ready, *(self.decoded.ready if self.decoded else ()))

    def done(self, task: Task) -> None:
        self.last = (task,)


class WeightStream:
    """The weights of all layers."""

    def __init__(self, geo: Geometry, plan: Plan, placement: Placement, queues: Queues):
        self.geo, self.plan, self.placement, self.queues = geo, plan, placement, queues
        self.for_decoded = placement.gpu_pools("decoded")
        trained, frozen = self._stored("weights", "weights pool"), self._stored("base", "base pool")
        self.layers = [LayerWeights(u, *both) for u, both in enumerate(zip(trained, frozen, strict=True))]
        self.coming = Prefetch()
        self.in_use: dict[int, LayerWeights] = {}

    def _stored(self, kind: Literal["weights", "base"], pool: What) -> Iterable[OnGpu]:
        placement, geo = self.placement, self.geo
        pools = [placement.pools("gpu", pool, gpu) for gpu in range(self.plan.gpus)]
        staging = placement.pools("host", pool)
        for u, unit in enumerate(self.plan.units):
            entry, name, size, gpu = Entry(kind, u), geo.names[u], geo.size_class(u), unit.gpu
            tier, layouts = placement.tier(entry), geo.weights if kind == "weights" else geo.base
            if tier == "gpu" or not layouts[u].tensors:
                yield OnGpu((placement.weights if kind == "weights" else placement.base)[u])
                continue
            resident = kind == "weights" and unit.resident
            to = placement.pool("gpu", "weights", name, gpu) if resident else pools[gpu][size]
            if tier == "host":
                yield InRam(name, placement, entry, to, gpu)
            else:
                yield OnSsd(name, placement, entry, to, gpu, staging[size])

    # ------------------------------------------------ a pass

    def expect(self, units: Iterable[int], before: Callable[[int], None] | None = None) -> None:
        """A pass uses `units` in this order: each comes when its pool has a buffer, after `before(u)`."""
        layers = [self.layers[u] for u in units]
        for layer in layers:
            layer.before = before
        self.coming.expect(layers)

    def get(self, u: int, backward: bool = False) -> LayerWeights:
        """Layer u's weights on its GPU, until `release`; readers come after `ready`."""
        layer = self.layers[u]
        layer.trained.get()
        layer.frozen.get()
        if layer.decoded is None and self.geo.decoded[u].tensors:
            layer.decoded = self._decode(layer, backward)
        self.in_use[u] = layer
        return layer

    def release(self, u: int) -> None:
        """Frees layer u's buffers after its last reader."""
        layer = self.in_use.pop(u)
        if layer.decoded is not None:
            layer.decoded.free((*layer.decoded.ready, *layer.last))
            layer.decoded = None
        layer.trained.release(layer.last)
        layer.frozen.release(layer.last)
        layer.last = ()
        self.coming.go_on()

    def break_off(self, after: Task) -> None:
        """Ends a pass: releases all that came, after `after`."""
        self.coming.break_off()
        for layer in self.held:
            self.in_use[layer.u] = layer
            layer.done(after)
        for u in list(self.in_use):
            self.release(u)

    @property
    def held(self) -> list[LayerWeights]:
        """Layers in use, or with buffers of pools."""
        pooled = lambda part: isinstance(part, InRam) and part.here is not None
        return [
            layer for layer in self.layers if layer.u in self.in_use or pooled(layer.trained) or pooled(layer.frozen)
        ]

    def _decode(self, layer: LayerWeights, backward: bool) -> Buffer:
        u, geo, gpu = layer.u, self.geo, self.plan.units[layer.u].gpu
        decoded, nbytes = self.for_decoded[gpu].acquire(geo.names[u]), geo.decode_bytes[u][backward]
        if not nbytes:  # this pass reads frozen codes as they lie
            return decoded
        trained, frozen = layer.trained.get(), layer.frozen.get()

        def decode() -> None:
            given = views(geo.weights[u], trained.tensor) | views(geo.base[u], frozen.tensor)
            model.make_codes(geo.cfg, u, given, views(geo.decoded[u], decoded.tensor), backward)

        after = (*(layer.trained.ready if geo.quantised[u] else ()), *layer.frozen.ready, *decoded.ready)
        queue = numbered("compute", gpu)
        decoded.ready = (self.queues.run(queue, "decode", geo.names[u], decode, after, nbytes=nbytes),)
        return decoded

    def tensors(self, layer: LayerWeights) -> dict[str, Tensor]:
        """By name, of a layer in use."""
        geo, u = self.geo, layer.u
        found = views(geo.weights[u], layer.trained.get().tensor) | views(geo.base[u], layer.frozen.get().tensor)
        return found | (views(geo.decoded[u], layer.decoded.tensor) if layer.decoded is not None else {})

    # ------------------------------------------------ updates

    def in_ram(self, u: int) -> InRam:
        """Layer u's trained weights, stored in RAM or on the SSD."""
        trained = self.layers[u].trained
        assert isinstance(trained, InRam)
        return trained

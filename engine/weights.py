"""Weights on the GPU: a pass says in which order it uses layers, then takes one after the other.

Weights are stored on the GPU, or copied from RAM or the SSD to a buffer of a pool ahead of their use. After the last
use in a pass the buffer is free, and keeps its content until it is needed for other weights, so that backward begins
with the layers that forward used last. This is the window of STRONGHOLD and, since the order is known, Belady's optimal
replacement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from trireme.engine.buffers import What, read_by_loss
from trireme.engine.geometry import Geometry
from trireme.engine.home import Home
from trireme.engine.memory import Buffer, Fetched, Pool, Prefetch, views
from trireme.engine.placement import Entry, Piece, Placement
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Task
from trireme.models import model

# ---------------------------------------------------------------- one layer's trained or frozen weights


class OnGpu:
    """Weights stored on their GPU, or no weights. Tasks that read them come after `ready`."""

    may_come = True

    def __init__(self, tensor: Tensor):
        self.here: Buffer | None = Buffer(tensor)
        self.ready: tuple[Task, ...] = ()

    def fetch(self) -> None:
        """Nothing to do: they are on the GPU."""

    def get(self) -> Buffer:
        """The buffer with the weights."""
        self.fetch()
        assert self.here is not None
        return self.here

    def release(self, after: Sequence[Task]) -> None:
        """To be called after the last use in a pass; here nothing to do."""

    def publish(self, done: Task) -> None:
        """To be called with the task that updates them."""
        self.ready = (done,)

    def settle(self) -> None:
        """Nothing to do: new weights are where they are stored."""


class Streamed(OnGpu):
    """Weights stored elsewhere, and copied to a buffer of a pool."""

    def __init__(self, home: Home, pool: Pool, gpu: int, pieces: Sequence[Piece]):
        self.home, self.pool, self.gpu, self.pieces = home, pool, gpu, pieces
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.here = None  # while in use
        self.ready = ()
        self.fresh: Buffer | None = None  # new weights of the SSD that are still in RAM

    @property
    def may_come(self) -> bool:  # type: ignore[override]
        return self.here is not None or self.pool.is_free

    def fetch(self) -> None:
        if self.here is not None:
            return
        self.here = self.pool.acquire(self.home.label, self)
        if self.here.content is not self:
            self.here.content, self.ready = self, (self._load(self.here),)

    def _load(self, here: Buffer) -> Task:
        written = self.home.last if self.fresh else ()
        source, self.fresh = self.fresh or self.home.bring(), None

        def up() -> None:
            for first, offset, n in self.pieces:
                here.tensor[offset : offset + n].copy_(source.tensor[first : first + n], non_blocking=True)

        ready, queue = (*here.ready, *source.ready), numbered("h2d", self.gpu)
        task = self.home.queues.run(queue, "weights", self.home.label, up, ready, nbytes=self.nbytes)
        source.free((task, *written))
        return task

    def release(self, after: Sequence[Task]) -> None:
        """Frees the buffer on the GPU. `after`: the tasks that read it last."""
        here, self.here = self.get(), None
        here.free((*self.ready, *after, *self.home.last))

    # ------------------------------------------------ updates

    def take(self) -> Buffer:
        """The weights in RAM, to be updated after `ready`."""
        return self.home.bring()

    def put(self, taken: Buffer, done: Task) -> None:
        """To be called with what `take` returned and the task that updates it."""
        assert self.here is None, "a layer in use was updated"
        self.pool.forget(self)
        self.home.write(taken, (done,))
        self.fresh = taken if taken.pool else None

    def settle(self) -> None:
        """Frees the staging buffer that holds new weights; the next use reads them from the SSD."""
        if self.fresh is not None:
            self.fresh.free(self.home.last)
            self.fresh = None

    def write_back(self, done: Task) -> None:
        """Copies weights that `done` updates on the GPU to RAM."""
        here = self.get()
        here.ready = (done,)
        self.ready = (done,)
        self.home.store(numbered("update_out", self.gpu), here, self.nbytes)


def pooled(part: OnGpu) -> bool:
    """Whether the weights have a buffer of a pool now."""
    return isinstance(part, Streamed) and part.here is not None


# ---------------------------------------------------------------- all of a layer's


class UnitWeights:
    """A layer's trained and frozen weights, and `decoded`, what a pass makes of them. `parts` compute with them."""

    def __init__(self, u: int, name: str, trained: OnGpu, frozen: OnGpu):
        self.u, self.name, self.trained, self.frozen = u, name, trained, frozen
        self.parts: list[LayerPart] = []
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

    def tensors(self, geo: Geometry) -> dict[str, Tensor]:
        """The weights by name, while in use."""
        named = views(geo.weights[self.u], self.trained.get().tensor) | views(
            geo.base[self.u], self.frozen.get().tensor
        )
        return named | (views(geo.decoded[self.u], self.decoded.tensor) if self.decoded is not None else {})


class LayerPart:
    """What a task computes with: a layer's weights, and of experts that come in slices one `slice`."""

    def __init__(self, layer: UnitWeights, geo: Geometry, v: int | None = None, of_slice: OnGpu | None = None):
        """`v`: the slice's number as a unit of frozen weights; None: the layer has no slices."""
        self.layer, self.u, self.v, self.slice = layer, layer.u, layer.u if v is None else v, of_slice
        self.name = layer.name if v is None else geo.base_names[v]
        self.experts = None if v is None else geo.slice_at(v).experts
        self.share = 1.0 if v is None else geo.share_of_slice(v)  # of the layer's work
        numbers = geo.slices_of[layer.u]
        self.begins, self.ends = v in (None, *numbers[:1]), v in (None, *numbers[-1:])
        self.last: tuple[Task, ...] = ()  # reader

    @property
    def may_come(self) -> bool:
        return self.slice is None or self.slice.may_come

    def fetch(self) -> None:
        if self.slice is not None:
            self.slice.fetch()

    @property
    def stored(self) -> tuple[OnGpu, ...]:
        return (self.layer.trained, self.layer.frozen, *((self.slice,) if self.slice else ()))

    @property
    def ready(self) -> tuple[Task, ...]:
        return (*self.layer.ready, *(self.slice.ready if self.slice else ()))

    def done(self, task: Task) -> None:
        self.last = self.layer.last = (task,)

    def tensors(self, geo: Geometry) -> dict[str, Tensor]:
        """The weights by name, while in use."""
        return self.layer.tensors(geo) | (views(geo.base[self.v], self.slice.get().tensor) if self.slice else {})

    def release(self, after: Sequence[Task]) -> None:
        if self.slice is not None:
            self.slice.release(after)


class WeightStream:
    """The weights of all layers, and the passes over them."""

    def __init__(self, placement: Placement):
        self.placement, self.geo, self.plan, self.queues = placement, placement.geo, placement.plan, placement.queues
        self.for_decoded = placement.gpu_pools("decoded")
        trained, frozen = list(self._stored("weights", "weights pool")), list(self._stored("base", "base pool"))
        self.layers = [UnitWeights(u, name, trained[u], frozen[u]) for u, name in enumerate(self.geo.names)]
        for layer, numbers in zip(self.layers, self.geo.slices_of, strict=True):
            layer.parts = [LayerPart(layer, self.geo, v, frozen[v]) for v in numbers] or [LayerPart(layer, self.geo)]
        self.coming = Prefetch()
        self.uses: deque[int] = deque()  # of layers to come in this pass
        self.in_use: set[int] = set()  # layers

    def _stored(self, kind: Literal["weights", "base"], pool: What) -> Iterable[OnGpu]:
        """The weights of each unit, by where the plan stores them."""
        placement, geo = self.placement, self.geo
        pools = [placement.pools("gpu", pool, gpu) for gpu in range(self.plan.gpus)]
        staging = placement.pools("ram", pool)
        layouts = geo.weights if kind == "weights" else geo.base
        for u in range(len(layouts)):
            unit = self.plan.units[geo.unit_of(u)]
            entry, size, gpu = Entry(kind, u), geo.size_class(u), unit.gpu
            tier = placement.tier(entry)
            if tier == "gpu" or not layouts[u].tensors:
                yield OnGpu((placement.weights if kind == "weights" else placement.base)[u])
                continue
            home = placement.home(entry, staging[size] if tier == "ssd" else None)
            yield Streamed(home, pools[gpu][size], gpu, placement.pieces(entry))

    # ------------------------------------------------ a pass

    def expect(self, units: Iterable[int], before: Callable[[int], None] | None = None) -> None:
        """Begins a pass that uses `units` in this order. Copies start as buffers are free, each after a call of
        `before(u)`. The copies to a GPU do not wait for those to another, unless state is read from the SSD: its
        records are read ahead in the order of updates, which `before` starts.
        """
        self.uses = deque(units)
        layers = [self.layers[u] for u in self.uses]
        for layer in layers:
            layer.before = before
        in_order = before is not None and any(unit.state == "ssd" for unit in self.plan.distinct.values())
        coming = list[tuple[int, Fetched]]()
        for layer in layers:
            items: list[Fetched] = [layer, *layer.parts]
            coming += [(0 if in_order else self.plan.units[layer.u].gpu, item) for item in items]
        self.coming.expect(coming)

    def parts(self, u: int, backward: bool = False) -> Iterator[LayerPart]:
        """Yields what layer u is computed with, one part after the other; frees each after use."""
        for part in self._begin(u, backward).parts:
            part.fetch()
            yield part
            part.release(part.last)
            self.coming.go_on()
        self._end(u)

    @contextmanager
    def of_losses(self) -> Iterator[dict[int, LayerPart]]:
        """A context with what a loss reads, by unit."""
        read = read_by_loss(self.geo)
        yield {v: self._begin(v).parts[0] for v in read}
        for v in read:
            self._end(v)

    def _begin(self, u: int, backward: bool = False) -> UnitWeights:
        """Takes layer u into use: waits for nothing, but starts its copy and its decoding."""
        layer = self.layers[u]
        if u in self.uses:
            self.uses.remove(u)
        layer.trained.get()
        layer.frozen.get()
        if layer.decoded is None and self.geo.decoded[u].tensors:
            layer.decoded = self._decode(layer, backward)
        self.in_use.add(u)
        return layer

    def _end(self, u: int) -> None:
        """Frees layer u's buffers after its last reader, unless the pass uses the layer again."""
        if u not in self.uses:
            self._release(u)

    def _release(self, u: int) -> None:
        layer = self.layers[u]
        self.in_use.discard(u)
        for part in layer.parts:
            if part.slice is not None and pooled(part.slice):  # of a pass that was broken off
                part.release(layer.last)
        if layer.decoded is not None:
            layer.decoded.free((*layer.decoded.ready, *layer.last))
            layer.decoded = None
        layer.trained.release(layer.last)
        layer.frozen.release(layer.last)
        layer.last = ()
        self.coming.go_on()

    def break_off(self, after: Task) -> None:
        """Ends a pass early: frees all its buffers after `after`."""
        self.coming.break_off()
        self.uses.clear()
        for layer in self.loaded:
            layer.last = (after,)
            self._release(layer.u)

    @property
    def loaded(self) -> list[UnitWeights]:
        """The layers that are in use or have buffers of pools."""
        of = lambda layer: (weights for part in layer.parts for weights in part.stored)
        return [layer for layer in self.layers if layer.u in self.in_use or any(map(pooled, of(layer)))]

    def _decode(self, layer: UnitWeights, backward: bool) -> Buffer:
        """Takes a buffer and queues what makes a pass's codes and decoded matrices, if it needs any."""
        u, geo, gpu = layer.u, self.geo, self.plan.units[layer.u].gpu
        decoded, nbytes = self.for_decoded[gpu].acquire(geo.names[u]), geo.decode_bytes[u][backward]
        if not nbytes:  # this pass reads frozen codes as they lie
            return decoded
        trained, frozen = layer.trained.get(), layer.frozen.get()

        def decode() -> None:
            tensors = views(geo.weights[u], trained.tensor) | views(geo.base[u], frozen.tensor)
            model.make_codes(geo.cfg, u, tensors, views(geo.decoded[u], decoded.tensor), backward)

        after = (*(layer.trained.ready if geo.quantized[u] else ()), *layer.frozen.ready, *decoded.ready)
        queue = numbered("compute", gpu)
        decoded.ready = (self.queues.run(queue, "decode", geo.names[u], decode, after, nbytes=nbytes),)
        return decoded

    # ------------------------------------------------ updates

    def in_ram(self, u: int) -> Streamed:
        """The trained weights of layer u, which are stored in RAM or on the SSD."""
        trained = self.layers[u].trained
        assert isinstance(trained, Streamed)
        return trained

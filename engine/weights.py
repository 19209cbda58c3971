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

from trireme.engine.buffers import Role, read_by_loss
from trireme.engine.geometry import Geometry
from trireme.engine.home import Home
from trireme.engine.memory import Buffer, Pool, Prefetch, views
from trireme.engine.placement import Entry, Piece, Placement
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Task
from trireme.models import model

# ---------------------------------------------------------------- what is stored and copied as one


class Weights:
    """A unit's trained or frozen weights: stored on its GPU, or elsewhere and copied to a buffer of a pool. Tasks that
    read them come after `ready`.
    """

    def __init__(self, home: Home, pool: Pool | None = None, gpu: int = 0, pieces: Sequence[Piece] = ()):
        """`home`: without a pool, on the GPU that computes with them, or empty. `pieces`: as a read of them lies."""
        self.home, self.pool, self.gpu, self.pieces = home, pool, gpu, pieces
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.buffer = None if pool else home.bring()  # of a pool: while in use
        self.ready: tuple[Task, ...] = ()
        self.fresh: Buffer | None = None  # new weights of the SSD that are still in RAM

    @property
    def can_fetch(self) -> bool:
        return self.buffer is not None or self.pool is None or self.pool.is_free

    @property
    def pooled(self) -> bool:
        """Whether they have a buffer of a pool now."""
        return self.pool is not None and self.buffer is not None

    def fetch(self) -> None:
        if self.buffer is not None or self.pool is None:
            return
        self.buffer = self.pool.acquire(self.home.label, self)
        if self.buffer.content is not self:
            self.buffer.content, self.ready = self, (self._load(self.buffer),)

    def _load(self, buffer: Buffer) -> Task:
        written = self.home.last if self.fresh else ()
        source, self.fresh = self.fresh or self.home.bring(), None

        def up() -> None:
            for first, offset, n in self.pieces:
                buffer.tensor[offset : offset + n].copy_(source.tensor[first : first + n], non_blocking=True)

        after, queue = (*buffer.ready, *source.ready), numbered("h2d", self.gpu)
        task = self.home.queues.run(queue, "weights", self.home.label, up, after, nbytes=self.nbytes)
        source.free((task, *written))
        return task

    def get(self) -> Buffer:
        """The buffer on the GPU."""
        self.fetch()
        assert self.buffer is not None
        return self.buffer

    def release(self, after: Sequence[Task]) -> None:
        """Frees a pool's buffer. `after`: the tasks of a pass that read it last."""
        if self.pool is not None:
            buffer, self.buffer = self.get(), None
            buffer.free((*self.ready, *after, *self.home.last))

    # ------------------------------------------------ updates

    def updated_on_gpu(self, task: Task) -> None:
        """They are updated on the GPU, where they are stored, or to be copied back."""
        self.ready = (task,)
        if self.pool is not None:
            buffer = self.get()
            buffer.ready = (task,)
            self.home.store(numbered("update_out", self.gpu), buffer, self.nbytes)

    def updated_in_ram(self, buffer: Buffer, task: Task) -> None:
        """They are updated in the buffer in RAM that `home.bring` gave."""
        assert self.buffer is None, "a layer in use was updated"
        assert self.pool is not None
        self.pool.forget(self)
        self.home.write(buffer, (task,))
        self.fresh = buffer if buffer.pool else None

    def settle(self) -> None:
        """Frees the staging buffer that holds new weights; the next use reads them from the SSD."""
        if self.fresh is not None:
            self.fresh.free(self.home.last)
            self.fresh = None


# ---------------------------------------------------------------- what a task computes with


class UnitWeights:
    """What a task computes with: a layer's trained and frozen weights, and `decoded`, what a pass makes of them. Of
    experts that come in slices, one slice with `layer`, the layer's other weights.
    """

    def __init__(self, geo: Geometry, v: int, weights: Sequence[Weights], layer: UnitWeights | None = None):
        """`v`: the layer's number or, as a unit of frozen weights, the slice's. `weights`: trained and frozen ones, or
        those of the slice.
        """
        self.u, self.v, self.weights, self.layer = geo.unit_of(v), v, weights, layer
        self.name = geo.names[v] if layer is None else geo.base_names[v]
        self.experts = None if layer is None else geo.experts_of(v)
        self.share = 1.0 if layer is None else geo.share_of_slice(v)  # of the layer's work
        numbers = geo.slices_of[self.u]
        self.begins, self.ends = layer is None or v == numbers[0], layer is None or v == numbers[-1]
        self.slices: list[UnitWeights] = []  # of a layer
        self.decoded: Buffer | None = None
        self.before: Callable[[int], None] | None = None  # called before they come
        self.last: tuple[Task, ...] = ()  # reader

    @property
    def trained(self) -> Weights:
        return self.weights[0]

    @property
    def can_fetch(self) -> bool:
        return all(weights.can_fetch for weights in self.weights)

    def fetch(self) -> None:
        if self.before is not None:
            self.before(self.u)
        for weights in self.weights:
            weights.fetch()

    @property
    def stored(self) -> tuple[Weights, ...]:
        """All that it reads, with those of `layer`."""
        return (*(self.layer.weights if self.layer else ()), *self.weights)

    @property
    def ready(self) -> tuple[Task, ...]:
        ready = self.layer.ready if self.layer else ()
        for weights in self.weights:
            ready += weights.ready
        return ready + (self.decoded.ready if self.decoded else ())

    def attach(self, task: Task) -> None:
        self.last = (task,)
        if self.layer is not None:
            self.layer.last = self.last

    def release(self, after: Sequence[Task]) -> None:
        for weights in self.weights:
            weights.release(after)

    def tensors(self, geo: Geometry) -> dict[str, Tensor]:
        """The weights by name, while in use."""
        layouts = (geo.weights[self.u], geo.base[self.u]) if self.layer is None else (geo.base[self.v],)
        named = self.layer.tensors(geo) if self.layer else {}
        for layout, weights in zip(layouts, self.weights, strict=True):
            named |= views(layout, weights.get().tensor)
        return named | (views(geo.decoded[self.u], self.decoded.tensor) if self.decoded else {})


class WeightStream:
    """The weights of all layers, and the passes over them."""

    def __init__(self, placement: Placement):
        self.placement, self.geo, self.plan, self.queues = placement, placement.geo, placement.plan, placement.queues
        self.decoded_pools = placement.gpu_pools("decoded")
        trained, frozen = list(self._stored("weights", "weights pool")), list(self._stored("base", "base pool"))
        self.layers = [UnitWeights(self.geo, u, (trained[u], frozen[u])) for u in range(self.geo.n_units)]
        for layer, numbers in zip(self.layers, self.geo.slices_of, strict=True):
            layer.slices = [UnitWeights(self.geo, v, (frozen[v],), layer) for v in numbers]
        self.prefetch = Prefetch()
        self.uses: deque[int] = deque()  # of layers to come in this pass
        self.in_use: set[int] = set()  # layers

    def _stored(self, kind: Literal["weights", "base"], role: Role) -> Iterable[Weights]:
        """The weights of each unit, by where the plan stores them."""
        placement, geo = self.placement, self.geo
        pools = [placement.pools("gpu", role, gpu) for gpu in range(self.plan.gpus)]
        staging = placement.pools("ram", role)
        buffers, layouts = (placement.weights, geo.weights) if kind == "weights" else (placement.base, geo.base)
        for u, layout in enumerate(layouts):
            entry, size, gpu = Entry(kind, u), geo.size_class(u), self.plan.units[geo.unit_of(u)].gpu
            tier = placement.tier(entry)
            if tier == "gpu" or not layout.tensors:
                yield Weights(Home(self.queues, "weights", placement.label(entry), Buffer(buffers[u])))
                continue
            home = placement.home(entry, staging[size] if tier == "ssd" else None)
            yield Weights(home, pools[gpu][size], gpu, placement.pieces(entry))

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
        items = list[tuple[int, UnitWeights]]()
        for layer in layers:
            gpu = 0 if in_order else self.plan.units[layer.u].gpu
            items += [(gpu, unit) for unit in (layer, *layer.slices)]
        self.prefetch.expect(items)

    def parts(self, u: int, backward: bool = False) -> Iterator[UnitWeights]:
        """Yields what layer u is computed with: its slices, each freed after use, or all of it."""
        layer = self._begin(u, backward)
        for part in layer.slices:
            part.fetch()
            yield part
            part.release(part.last)
            self.prefetch.advance()
        if not layer.slices:
            yield layer
        self._end(u)

    @contextmanager
    def of_losses(self) -> Iterator[dict[int, UnitWeights]]:
        """A context with what a loss reads, by unit."""
        read = read_by_loss(self.geo)
        yield {v: self._begin(v) for v in read}
        for v in read:
            self._end(v)

    def _begin(self, u: int, backward: bool = False) -> UnitWeights:
        """Takes layer u into use: waits for nothing, but starts its copy and its decoding."""
        layer = self.layers[u]
        if u in self.uses:
            self.uses.remove(u)
        for weights in layer.weights:
            weights.fetch()
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
        for part in layer.slices:
            if part.weights[0].pooled:  # of a pass that was broken off
                part.release(layer.last)
        if layer.decoded is not None:
            layer.decoded.free((*layer.decoded.ready, *layer.last))
            layer.decoded = None
        layer.release(layer.last)
        layer.last = ()
        self.prefetch.advance()

    def cancel(self, after: Task) -> None:
        """Ends a pass early: frees all its buffers after `after`."""
        self.prefetch.cancel()
        self.uses.clear()
        for layer in self.loaded:
            layer.last = (after,)
            self._release(layer.u)

    @property
    def loaded(self) -> list[UnitWeights]:
        """The layers that are in use or have buffers of pools."""
        pooled = lambda layer: any(weights.pooled for unit in (layer, *layer.slices) for weights in unit.weights)
        return [layer for layer in self.layers if layer.u in self.in_use or pooled(layer)]

    def _decode(self, layer: UnitWeights, backward: bool) -> Buffer:
        """Takes a buffer and queues what makes a pass's codes and decoded matrices, if it needs any."""
        u, geo, gpu = layer.u, self.geo, self.plan.units[layer.u].gpu
        decoded, nbytes = self.decoded_pools[gpu].acquire(geo.names[u]), geo.decode_bytes[u][backward]
        if not nbytes:  # this pass reads frozen codes as they lie
            return decoded
        trained, frozen = layer.weights
        codes, packed = trained.get().tensor, frozen.get().tensor

        def decode() -> None:
            tensors = views(geo.weights[u], codes) | views(geo.base[u], packed)
            model.make_codes(geo.cfg, u, tensors, views(geo.decoded[u], decoded.tensor), backward)

        after = (*(trained.ready if geo.quantized[u] else ()), *frozen.ready, *decoded.ready)
        queue = numbered("compute", gpu)
        decoded.ready = (self.queues.run(queue, "decode", geo.names[u], decode, after, nbytes=nbytes),)
        return decoded

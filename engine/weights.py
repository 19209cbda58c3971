"""Weights on their way to the GPU: prefetch, get, release.

They stay there (at home, or a copy refreshed once a step) or pass through a ring. The last units of forward keep their
slots for backward: STRONGHOLD's window and, the order being known, Belady's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from trireme.engine.geometry import Geometry
from trireme.engine.homes import Entry, Homes
from trireme.engine.lanes.names import numbered
from trireme.engine.lanes.task import Lanes, Task
from trireme.engine.memory import NOTHING, OnGpu, Slot, views
from trireme.engine.plan import Plan, Tier
from trireme.models import model


class WeightStream:
    """Trained or frozen weights of all units. After the task `updated[u]` the home of u is current."""

    def __init__(self, kind: Literal["weights", "base"], geo: Geometry, plan: Plan, homes: Homes, lanes: Lanes):
        self.kind, self.geo, self.plan, self.homes, self.lanes = kind, geo, plan, homes, lanes
        self.layouts, self.buffers = (geo.weights, homes.weights) if kind == "weights" else (geo.base, homes.base)
        ring = "weight ring" if kind == "weights" else "base ring"
        self.gpu_rings = [homes.rings("gpu", ring, gpu) for gpu in range(plan.gpus)]
        self.host_rings = homes.rings("host", ring)
        self.updated: dict[int, Task] = {}
        self.fresh: dict[int, tuple[Slot, Task]] = {}  # SSD-home weights still in a host slot
        units = range(geo.n_units)
        self.tiers: list[Tier] = [homes.tier(Entry(kind, u)) for u in units]
        self.streamed = [
            self.tiers[u] != "gpu" and not self._resident(u) and bool(self.layouts[u].tensors) for u in units
        ]
        self.stale = {u for u in units if self._resident(u)}  # copies to refresh
        self.refreshed: dict[int, Task] = {}  # their last refreshes
        self.held: dict[int, OnGpu] = {}

    def prefetch(self, u: int) -> None:
        """Starts unit u's transfer, unless there or under way."""
        if u in self.held:
            return
        if self._resident(u):
            held = OnGpu(self.homes.copies[u], (self.refreshed[u],) if u in self.refreshed else ())
        elif self.streamed[u]:
            slot = self.gpu_rings[self._gpu(u)][self.geo.size_class(u)].acquire(self.geo.names[u])
            held = OnGpu(slot.buffer, slot.ready, slot)
        else:
            held = OnGpu(self.buffers[u], self._ready(u))
        self.held[u] = held
        if self.streamed[u] or u in self.stale:
            self._copy_up(u, held)

    def get(self, u: int) -> OnGpu:
        """Unit u's weights; readers come after `ready`."""
        self.prefetch(u)
        return self.held[u]

    def release(self, u: int, *after: Task, keep: bool = False) -> None:
        """Unit u is free after `after`; `keep` holds its slot for backward."""
        held = self.held[u]
        held.ready = (*held.ready, *after)
        if not keep:
            del self.held[u]
            if held.slot is not None:
                held.slot.ring.release(held.slot, (*held.ready, *self._ready(u)))

    def kept_for_turn(self, u: int, train: bool) -> bool:
        """Whether unit u stays for backward, or tied for the head."""
        if u == 0 or not train:
            return u == 0 and self.geo.cfg.tied
        if not self.streamed[u]:
            return True
        ring = self._gpu(u), self.geo.size_class(u)
        later = (v for v in range(u + 1, self.geo.n_units) if (self._gpu(v), self.geo.size_class(v)) == ring)
        return sum(map(self.streamed.__getitem__, later)) < len(self.gpu_rings[ring[0]][ring[1]].slots)

    def _gpu(self, u: int) -> int:
        return self.plan.units[u].gpu

    def _resident(self, u: int) -> bool:
        return self.kind == "weights" and self.plan.units[u].resident and bool(self.layouts[u].tensors)

    # ------------------------------------------------ updates

    def for_update(self, u: int) -> tuple[Tensor, Slot | None, tuple[Task, ...]]:
        """(unit u's weights in RAM, their slot if at home on the SSD, tasks to wait for)."""
        if self.plan.units[u].weights == "host":
            return self.homes.weights[u], None, self._ready(u)
        slot = self.host_rings[self.geo.size_class(u)].acquire(f"{self.geo.names[u]} update")
        return slot.buffer, slot, (self._read(u, slot.buffer, (*slot.ready, *self._ready(u))),)

    def _read(self, u: int, buffer: Tensor, after: Sequence[Task]) -> Task:
        return self.homes.read_weights(Entry(self.kind, u), buffer, after)

    def updated_in_ram(self, u: int, done: Task, slot: Slot | None) -> None:
        """`done` updates the weights of `for_update`; the next prefetch reads their slot."""
        self.publish(u, done)
        if slot is not None:
            self.updated[u] = self.homes.write_weights(u, slot.buffer, (done,))
            self.fresh[u] = slot, done

    def publish(self, u: int, done: Task) -> None:
        """After `done` the home of u holds new weights."""
        assert u not in self.held or self.plan.units[u].weights == "gpu", "a unit in use was updated"
        self.held.pop(u, None)
        if self._resident(u):
            self.stale.add(u)
        self.updated[u] = done

    def write_back(self, u: int, done: Task) -> None:
        """Copies unit u home from the GPU after its update."""
        held = self.held[u]
        held.ready = (done,)
        self.updated[u] = self._copy_down(u, held.buffer, self.homes.weights[u], (done,))

    def _copy_down(self, u: int, source: Tensor, target: Tensor, after: Sequence[Task]) -> Task:
        nbytes = self.geo.weights[u].span

        def down() -> None:
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

        lane = numbered("d2h", self._gpu(u))
        return self.lanes.run(lane, "weights", self.geo.names[u], down, after, nbytes=nbytes)

    def drop(self, u: int) -> None:
        """Releases a unit that came for its update alone."""
        held = self.held.pop(u, None)
        if held is not None and held.slot is not None:
            held.slot.ring.release(held.slot, (*held.ready, self.updated[u]))

    def settle(self) -> None:
        """Releases host slots of fresh weights, to be read again."""
        for u, (slot, _) in self.fresh.items():
            slot.ring.release(slot, (self.updated[u],))
        self.fresh.clear()

    def _ready(self, u: int) -> tuple[Task, ...]:
        return (self.updated[u],) if u in self.updated else ()

    def _copy_up(self, u: int, to: OnGpu) -> None:
        """Copies unit u from home to the GPU, from the SSD through a host slot."""
        entry, nbytes = Entry(self.kind, u), self.layouts[u].span
        name, pieces = self.homes.label(entry), self.homes.pieces(entry)
        slot = None
        if self.tiers[u] == "host":
            source, come = self.buffers[u], self._ready(u)
        elif u in self.fresh:
            slot, task = self.fresh.pop(u)
            source, come = slot.buffer, (task,)
        else:
            slot = self.host_rings[self.geo.size_class(u)].acquire(name)
            source = slot.buffer
            come = (self._read(u, source, (*slot.ready, *self._ready(u))),)

        def up() -> None:
            for first, offset, n in pieces:
                to.buffer[offset : offset + n].copy_(source[first : first + n], non_blocking=True)

        lane = numbered("h2d", self._gpu(u))
        to.ready = (self.lanes.run(lane, "weights", name, up, (*to.ready, *come), nbytes=nbytes),)
        if to.slot is None:
            self.stale.discard(u)
            self.refreshed[u] = to.ready[0]
        if slot is not None:
            slot.ring.release(slot, (*to.ready, *self._ready(u)))


class Weights(NamedTuple):
    trained: OnGpu
    frozen: OnGpu
    decoded: OnGpu  # what a pass makes of both

    @property
    def ready(self) -> tuple[Task, ...]:
        return (*self.trained.ready, *self.frozen.ready, *self.decoded.ready)


class UnitStream:
    """Both streams as one, and what each pass makes of them once, by the lane that computes."""

    def __init__(self, geo: Geometry, plan: Plan, homes: Homes, lanes: Lanes):
        self.geo, self.plan, self.lanes = geo, plan, lanes
        self.rings = homes.gpu_rings("decoded")
        self.decoded: dict[int, OnGpu] = {}
        self.trained = WeightStream("weights", geo, plan, homes, lanes)
        self.frozen = WeightStream("base", geo, plan, homes, lanes)
        self._streams = (self.trained, self.frozen)

    def prefetch(self, u: int) -> None:
        for stream in self._streams:
            stream.prefetch(u)

    def get(self, u: int, backward: bool = False) -> Weights:
        trained, frozen = self.trained.get(u), self.frozen.get(u)
        if u not in self.decoded and self.geo.decoded[u].tensors:
            self.decoded[u] = self._decode(u, trained, frozen, backward)
        return Weights(trained, frozen, self.decoded.get(u, OnGpu(NOTHING, ())))

    def _decode(self, u: int, trained: OnGpu, frozen: OnGpu, backward: bool) -> OnGpu:
        gpu, geo = self.plan.units[u].gpu, self.geo
        slot, nbytes = self.rings[gpu].acquire(geo.names[u]), geo.decode_bytes[u][backward]
        if not nbytes:  # this pass reads frozen codes as they lie
            return OnGpu(slot.buffer, slot.ready, slot)

        def decode() -> None:
            given = views(geo.weights[u], trained.buffer) | views(geo.base[u], frozen.buffer)
            model.make_codes(geo.cfg, u, given, views(geo.decoded[u], slot.buffer), backward)

        after = (*(trained.ready if geo.quantised[u] else ()), *frozen.ready, *slot.ready)
        done = self.lanes.run(numbered("compute", gpu), "decode", geo.names[u], decode, after, nbytes=nbytes)
        return OnGpu(slot.buffer, (done,), slot)

    def tensors(self, u: int, held: Weights) -> dict[str, Tensor]:
        geo, (trained, frozen, decoded) = self.geo, held
        found = views(geo.weights[u], trained.buffer) | views(geo.base[u], frozen.buffer)
        return found | views(geo.decoded[u], decoded.buffer)

    def release(self, u: int, *after: Task) -> None:
        self._release_decoded(u, *after)
        for stream in self._streams:
            stream.release(u, *after)

    def _release_decoded(self, u: int, *after: Task) -> None:
        held = self.decoded.pop(u, None)
        if held is not None and held.slot is not None:
            held.slot.ring.release(held.slot, (*held.ready, *after))

    def release_in_forward(self, u: int, after: Task, train: bool) -> None:
        """As release, but keeps the units of `kept_for_turn`, packed."""
        self._release_decoded(u, after)
        for stream in self._streams:
            stream.release(u, after, keep=stream.kept_for_turn(u, train))

    def release_all(self, after: Task) -> None:
        for u in list(self.decoded):
            self._release_decoded(u, after)
        for stream in self._streams:
            for u in list(stream.held):
                stream.release(u, after)

    @property
    def held(self) -> list[OnGpu]:
        streams = [held for stream in self._streams for held in stream.held.values()]
        return streams + list(self.decoded.values())

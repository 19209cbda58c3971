"""Weights on their way to the GPU: prefetch, get, release, in the order of the step.

A unit's weights lie on the GPU for good (home there, or a resident copy refreshed once a step), or pass through a ring
of slots. The units that forward uses last stay in their slots for backward (STRONGHOLD's window; the order of use
is known, so this is Belady's choice too).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from trireme.engine.geometry import Geometry
from trireme.engine.homes import Homes
from trireme.engine.lanes import InlineLanes, Task
from trireme.engine.memory import OnGpu, Ring, Slot
from trireme.engine.plan import Plan


@dataclass
class WeightStream:
    """Brings each unit's weights to the GPU. After the task `updated[u]` the home of u holds current weights."""

    geo: Geometry
    plan: Plan
    homes: Homes
    lanes: InlineLanes  # or what has its methods: RealLanes, SimulatedLanes
    gpu_rings: dict[str, Ring]  # by size class
    host_rings: dict[str, Ring]
    updated: dict[int, Task] = field(default_factory=dict)
    fresh: dict[int, tuple[Slot, Task]] = field(default_factory=dict)  # SSD-home weights still in a host slot
    stale: set[int] = field(default_factory=set)  # resident copies older than their home
    held: dict[int, OnGpu] = field(default_factory=dict)

    def __post_init__(self):
        self.stale = {u for u, unit in enumerate(self.plan.units) if unit.resident}

    def prefetch(self, u: int) -> None:
        """Starts unit u on its way to the GPU; nothing where it is there or on its way already."""
        if u in self.held:
            return
        unit = self.plan.units[u]
        if unit.weights == "gpu":
            self.held[u] = OnGpu(self.homes.weights[u], self._ready(u))
        elif unit.resident:
            buffer, ready = self.homes.resident[u], ()
            if u in self.stale:
                ready = (self._copy_up(u, buffer, ()),)
                self.stale.discard(u)
            self.held[u] = OnGpu(buffer, ready)
        else:
            slot = self.gpu_rings[self.geo.size_class(u)].acquire(self.geo.names[u])
            self.held[u] = OnGpu(slot.buffer, (self._copy_up(u, slot.buffer, slot.ready),), slot)

    def get(self, u: int) -> OnGpu:
        """Unit u's weights; whoever reads them is ordered after `ready`."""
        self.prefetch(u)
        return self.held[u]

    def release(self, u: int, after: Task, keep: bool = False) -> None:
        """Unit u is not needed once `after` is over; with `keep` its slot is held for backward."""
        held = self.held[u]
        held.ready = (*held.ready, after)
        if keep:
            return
        del self.held[u]
        if held.slot is not None:
            held.slot.ring.release(held.slot, (after, *self._ready(u)))

    def kept_for_turn(self, u: int, train: bool) -> bool:
        """Whether unit u, released in forward, stays: for backward, or a tied embedding for the head."""
        if u == 0 or not train:
            return u == 0 and self.geo.cfg.tied
        if self.plan.units[u].weights == "gpu" or self.plan.units[u].resident:
            return True
        kind = self.geo.size_class(u)
        later = sum(
            1
            for v in range(u + 1, self.geo.n_units)
            if self.geo.size_class(v) == kind
            and self.plan.units[v].weights != "gpu"
            and not self.plan.units[v].resident
        )
        return later < len(self.gpu_rings[kind].slots)

    def publish(self, u: int, task: Task, slot: Slot | None = None, written: Task | None = None) -> None:
        """The optimizer's word: after `task` the home of u (or, with `slot`, this host slot) holds new weights."""
        assert u not in self.held or self.plan.units[u].weights == "gpu", "a unit in use was updated"
        self.held.pop(u, None)
        self.updated[u] = written or task
        if slot is not None:
            self.fresh[u] = (slot, task)
        if self.plan.units[u].resident:
            self.stale.add(u)

    def refreshed(self, u: int, ready: Task, home: Task) -> None:
        """Unit u was updated where it lies on the GPU, by the task `ready`; `home` brings its home up to date."""
        self.held[u].ready = (ready,)
        self.updated[u] = home

    def drop(self, u: int) -> None:
        """Lets go of a unit that was brought to the GPU for its update alone."""
        held = self.held.pop(u)
        held.slot.ring.release(held.slot, (*held.ready, self.updated[u]))

    def settle(self) -> None:
        """Lets go of the host slots that still hold fresh SSD-home weights; they are read back when next needed."""
        for u, (slot, _) in self.fresh.items():
            slot.ring.release(slot, (self.updated[u],))
        self.fresh.clear()

    def _ready(self, u: int) -> tuple[Task, ...]:
        return (self.updated[u],) if u in self.updated else ()

    def _copy_up(self, u: int, target: Tensor | None, ready: tuple[Task, ...]) -> Task:
        """Copies unit u from its home to `target` on the GPU; through a host slot where the home is the SSD."""
        name, nbytes = self.geo.names[u], self.geo.weights[u].span
        slot = None
        if self.plan.units[u].weights == "host":
            source, come = self.homes.weights[u], self._ready(u)
        elif u in self.fresh:
            slot, task = self.fresh.pop(u)
            source, come = slot.buffer, (task,)
        else:
            slot = self.host_rings[self.geo.size_class(u)].acquire(name)
            source = slot.buffer
            come = (self.homes.read_weights(u, source, (*slot.ready, *self._ready(u))),)

        def copy():
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

        task = self.lanes.run("h2d", f"weights {name}", copy, after=(*ready, *come), nbytes=nbytes)
        if slot is not None:
            slot.ring.release(slot, (task, *self._ready(u)))
        return task

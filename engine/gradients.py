"""Gradients, from backward to their update.

They are summed over the micro-batches on the GPU, in fp32 where there are several. Unless updated there, a gradient
leaves in the compute dtype, piece by piece: little of it lies on the GPU twice. Where RAM cannot hold all until the
norm is known, those with SSD-home state wait on the SSD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.engine.geometry import Geometry, Stretch, extent
from trireme.engine.homes import Homes, Scratch
from trireme.engine.lanes.names import numbered
from trireme.engine.lanes.task import Lanes, Task
from trireme.engine.memory import NOTHING, Slot, flat, memory_of, views
from trireme.engine.plan import Plan
from trireme.kernels import ops
from trireme.storage.layout import ITEMSIZE, round_up


class Gradient(NamedTuple):
    """A unit's accumulator; additions come after `ready`."""

    buffer: Tensor
    ready: tuple[Task, ...]


class Gradients:
    """Accumulators and, in `landed`, gradients due for updates."""

    def __init__(
        self, geo: Geometry, plan: Plan, homes: Homes, lanes: Lanes, scratch: Scratch | None = None, first: int = 0
    ):
        """`scratch`: for gradients on the SSD, from byte `first` on."""
        self.geo, self.plan, self.homes, self.lanes, self.scratch = geo, plan, homes, lanes, scratch
        self.wide = geo.gradients if plan.sums_wide else geo.weights  # of the accumulators
        self.accumulators, self.tied = homes.gpu_rings("gradient"), homes.gpu_rings("gradient embed")
        self.out = homes.gpu_rings("gradient out")  # rounded
        self.landings, self.back = homes.rings("host", "gradient"), homes.ring("host", "gradient ring")
        self.holding: dict[int, Slot] = {}  # accumulators in use, by unit
        self.landed: dict[int, tuple[Slot | None, Task]] = {}  # by unit: its slot in RAM or None, its arrival
        self.offset: dict[int, int] = {}  # in the scratch space
        self.written: dict[int, Task] = {}  # last write there
        self.read: dict[int, Task] = {}  # last read
        self.scratch_bytes = 0
        for u in range(geo.n_units):
            if plan.spilled(u):
                self.offset[u] = first + self.scratch_bytes
                self.scratch_bytes += geo.weights[u].span
        if not lanes.simulated:
            sums = (torch.zeros(geo.first_stretch[-1], device=device) for device in lanes.devices)
            self.sums = list(sums)  # of squares by stretch, by GPU: each its units'

    def get(self, u: int) -> Gradient:
        """Unit u's accumulator, zero at first."""
        if not self.geo.numel[u]:
            return Gradient(NOTHING, ())
        if u not in self.holding:
            self._begin(u)
        slot = self.holding[u]
        return Gradient(slot.buffer, slot.ready)

    def tensors(self, u: int, gradient: Gradient) -> dict[str, Tensor]:
        return views(self.wide[u], gradient.buffer) if self.geo.numel[u] else {}

    def _begin(self, u: int) -> None:
        """Takes unit u's accumulator, zero."""
        slot, nbytes = self._accumulator(u), self.wide[u].span

        def zero() -> None:
            slot.buffer[:nbytes].zero_()

        lane = numbered("compute", self.plan.units[u].gpu)
        slot.ready = (self.lanes.run(lane, "zero", self.geo.names[u], zero, slot.ready, nbytes=nbytes),)

    def _accumulator(self, u: int) -> Slot:
        rings = self.tied if u == 0 and self.geo.cfg.tied else self.accumulators
        self.holding[u] = rings[self.plan.units[u].gpu].acquire(self.geo.names[u])
        return self.holding[u]

    def finish(self, u: int, after: Task) -> None:
        """Rounds unit u's gradient, whole after `after`, sums its squares, sends it to its update."""
        if not self.geo.numel[u]:
            return
        accumulator, name = self.holding.pop(u), self.geo.names[u]
        if self.plan.units[u].state == "gpu":
            (whole,) = self.geo.pieces(u, self.geo.numel[u])
            task = self._round(u, whole, accumulator, self.homes.gradients[u], (after,))
            self.landed[u] = (None, task)
        else:
            host = self.landings[self.geo.size_class(u)].acquire(name)
            task, landed = self._leave(u, accumulator, host, after)
            self.landed[u] = (host, landed)
            if u in self.offset:
                self.landed[u] = (None, self._spill(u, host, landed))
        accumulator.ring.release(accumulator, (task,))

    def drop(self, u: int, after: Task) -> None:
        """Forgets unit u's sum, in use until `after`."""
        if u in self.holding:
            accumulator = self.holding.pop(u)
            accumulator.ring.release(accumulator, (after,))

    def set_aside(self, u: int, after: Task) -> None:
        """Unit u's sum goes on later; until `after` it has the head's part."""

    def _leave(self, u: int, accumulator: Slot, host: Slot, after: Task) -> tuple[Task, Task]:
        """Rounds unit u's gradient piece by piece into `host`: (last read of the accumulator, arrival)."""
        for piece in self.geo.pieces(u, self.plan.piece):
            out = self.out[self.plan.units[u].gpu].acquire(self.geo.names[u])
            task = self._round(u, piece, accumulator, out.buffer, (after, *out.ready))
            landed = self._land(u, piece, out, host, task)
            out.ring.release(out, (landed,))
        return task, landed  # first in, first out: the last piece lands last

    def shared(self, u: int, hi: Tensor, updated: Task) -> Task:  # noqa: ARG002 (of several hosts)
        """The task after which unit u's weights in RAM are updated, other hosts' share of them too."""
        return updated

    def over_hosts(self, loads: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Loads of experts of all hosts, given those of this one's GPUs."""
        return loads

    def totals(self, loss: Callable[[Tensor], Tensor], gpu: int, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """A step's (sum of losses, gradient norm), fp64 on a GPU. `loss` adds to a sum; `others` as of `norm`."""
        norm = self.norm(gpu, others)
        return loss(torch.zeros_like(norm)), norm

    def _round(self, u: int, piece: Sequence[Stretch], accumulator: Slot, out: Tensor, after: Sequence[Task]) -> Task:
        """Rounds a piece and sums its squares by stretch."""
        (first, n), place = extent(piece), self.geo.first_stretch[u]
        gpu = self.plan.units[u].gpu

        def finish() -> None:
            wide = flat(accumulator.buffer, self.wide[u].tensors[0].dtype, first + n)
            narrow = flat(out, self.geo.dtype, n)
            for start, stop, i in piece:
                total = self.sums[gpu][place + i : place + i + 1]
                ops.grad_finish(wide[start:stop], out=narrow[start - first : stop - first], total=total)

        nbytes = 3 * n * ITEMSIZE[self.geo.dtype]
        return self.lanes.run(numbered("compute", gpu), "finish", self.geo.names[u], finish, after, nbytes=nbytes)

    def _land(self, u: int, piece: Sequence[Stretch], out: Slot, host: Slot, rounded: Task) -> Task:
        """Copies a rounded piece to RAM."""
        size = ITEMSIZE[self.geo.dtype]
        first, nbytes = (size * n for n in extent(piece))

        def land() -> None:
            host.buffer[first : first + nbytes].copy_(out.buffer[:nbytes], non_blocking=True)

        lane = numbered("d2h", self.plan.units[u].gpu)
        return self.lanes.run(lane, "gradient", self.geo.names[u], land, (rounded, *host.ready), nbytes=nbytes)

    def _spill(self, u: int, host: Slot, landed: Task) -> Task:
        """Writes unit u's gradient to the SSD, frees its slot."""
        nbytes, before = self.geo.weights[u].span, (self.read[u],) if u in self.read else ()

        def write() -> None:
            self._ssd.write(self.offset[u], memory_of(host.buffer, nbytes)).result()

        task = self.lanes.run("state_write", "gradient", self.geo.names[u], write, (landed, *before), nbytes=nbytes)
        host.ring.release(host, (task,))
        self.written[u] = task
        return task

    @property
    def _ssd(self) -> Scratch:
        assert self.scratch is not None, "gradients wait on the SSD, and no scratch space was claimed"
        return self.scratch

    def fetch(self, u: int, a: int, b: int) -> tuple[Slot, int]:
        """Elements a..b from the SSD: (slot in RAM, their first byte there)."""
        size, slot = ITEMSIZE[self.geo.dtype], self.back.acquire(f"{self.geo.names[u]} gradient {a}")
        first, end = a * size // 4096 * 4096, round_up(b * size)

        def read() -> None:
            self._ssd.read(self.offset[u] + first, memory_of(slot.buffer, end - first)).result()

        ready = (*slot.ready, self.written[u])
        self.read[u] = self.lanes.run("state_read", "gradient", self.geo.names[u], read, ready, nbytes=end - first)
        slot.ready = (self.read[u],)
        return slot, a * size - first

    def norm(self, gpu: int, others: Sequence[Tensor]) -> Tensor:
        """A step's global norm, fp64 on a GPU; `others`: sums of the others, in RAM."""
        sums = self.sums[gpu]
        for other in others:
            sums = sums + other.to(sums.device)  # each zero elsewhere: one GPU's to the bit
        return sums.double().sum().sqrt()

    def discard(self) -> None:
        """Drops waiting gradients: the step is skipped."""
        for slot, task in self.landed.values():
            if slot is not None:
                slot.ring.release(slot, (task,))
        self.landed.clear()

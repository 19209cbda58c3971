"""Gradients from backward to their update.

They are summed over a step's micro-batches on the GPU, in fp32 if there are several. A gradient that is not updated on
that GPU is rounded to the compute dtype and copied to RAM piece by piece, so that little of it takes GPU memory twice.
If RAM cannot hold all gradients until their norm is known, those of units with state on the SSD are written to the SSD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.engine.geometry import Stretch, extent
from trireme.engine.home import DriveHome, Home
from trireme.engine.memory import NOTHING, Buffer, flat, views
from trireme.engine.placement import Placement, Scratched
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Task
from trireme.kernels import ops
from trireme.storage.layout import ITEMSIZE, round_up


class Elements(NamedTuple):
    """Some elements of a gradient, valid after its `ready`. `buffer`: to be freed after the last task that reads
    them.
    """

    tensor: Tensor
    buffer: Buffer | None = None


class Landed:
    """A gradient that waits for its update: on its GPU, in RAM or in the scratch space on the SSD. Valid after
    `ready`.
    """

    def __init__(self, home: Home, ready: tuple[Task, ...], itemsize: int, first: int = 0):
        """`first`: its first element. Elements before it are updated by other hosts."""
        self.home, self.ready, self.itemsize, self.first = home, ready, itemsize, first

    def part(self, a: int, b: int) -> Elements:
        """Elements [a, b); from the SSD whole blocks of the drive are read."""
        start, stop = ((i - self.first) * self.itemsize for i in (a, b))
        if not isinstance(self.home, DriveHome):
            return Elements(self.home.place.tensor[start:stop])
        begin, end = start // 4096 * 4096, round_up(stop)
        here = self.home.bring(part=(begin, end))
        return Elements(here.tensor[start - begin : stop - begin], here)

    def free(self, after: Sequence[Task]) -> None:
        """Gives its buffer back; its space on the SSD is its own."""
        if not isinstance(self.home, DriveHome):
            self.home.place.free(after)


class Gradients:
    """The sums of a step's gradients, and in `landed` the gradients that wait for their updates, by unit."""

    def __init__(self, placement: Placement):
        self.geo, self.plan, self.queues = geo, plan, queues = placement.geo, placement.plan, placement.queues
        self.wide = geo.gradients if plan.sums_wide else geo.weights  # of the accumulators
        self.accumulators, self.tied = placement.gpu_pools("sum"), placement.gpu_pools("sum of embedding")
        self.out = placement.gpu_pools("rounded pool")  # rounded
        self.landings, back = placement.pools("host", "gradient"), placement.pool("host", "gradient pool")
        self.holding: dict[int, Buffer] = {}  # accumulators in use, by unit
        self.landed: dict[int, Landed] = {}
        self.itemsize = ITEMSIZE[geo.dtype]
        units = range(geo.n_units)
        self.on_gpu = [Buffer(placement.of(u, "gpu", "rounded")) for u in units]  # of layers that are updated there
        on_drive = lambda u: Scratched(placement.space, geo.weights[u].span, later=True)
        made = lambda u: DriveHome(queues, "gradient", geo.names[u], back, on_drive(u), "state")
        self.on_ssd = {u: made(u) for u in units if plan.spilled(u)}
        if not queues.simulated:
            sums = (torch.zeros(geo.first_stretch[-1], device=device) for device in queues.devices)
            self.sums = list(sums)  # of squares by stretch, by GPU: each its units'

    def get(self, u: int) -> Buffer:
        """The buffer of unit u's sum, zero before the first addition."""
        if not self.geo.numel[u]:
            return Buffer(NOTHING)
        if u not in self.holding:
            self._begin(u)
        return self.holding[u]

    def tensors(self, u: int, gradient: Buffer) -> dict[str, Tensor]:
        """Views of a sum, by name."""
        return views(self.wide[u], gradient.tensor) if self.geo.numel[u] else {}

    def _begin(self, u: int) -> None:
        """Takes a buffer for unit u's sum, and sets it to zero."""
        buffer, nbytes = self._accumulator(u), self.wide[u].span

        def zero() -> None:
            buffer.tensor[:nbytes].zero_()

        queue = numbered("compute", self.plan.units[u].gpu)
        buffer.ready = (self.queues.run(queue, "zero", self.geo.names[u], zero, buffer.ready, nbytes=nbytes),)

    def _accumulator(self, u: int) -> Buffer:
        pools = self.tied if u == 0 and self.geo.cfg.tied else self.accumulators
        self.holding[u] = pools[self.plan.units[u].gpu].acquire(self.geo.names[u])
        return self.holding[u]

    def finish(self, u: int) -> None:
        """Ends unit u's sum: rounds it, sums its squares for the norm, and brings it to where it is updated."""
        if not self.geo.numel[u]:
            return
        accumulator, name = self.holding.pop(u), self.geo.names[u]
        if self.plan.units[u].state == "gpu":
            (whole,) = self.geo.pieces(u, self.geo.numel[u])
            task = self._round(u, whole, accumulator, self.on_gpu[u].tensor, accumulator.ready)
            self._land_in(u, self.on_gpu[u], task)
        else:
            host = self.landings[self.geo.size_class(u)].acquire(name)
            task, landed = self._leave(u, accumulator, host)
            if u in self.on_ssd:
                self.on_ssd[u].keep(host, (landed,))
                self.landed[u] = Landed(self.on_ssd[u], (), self.itemsize)
            else:
                self._land_in(u, host, landed)
        accumulator.free((task,))

    def _land_in(self, u: int, buffer: Buffer, ready: Task, first: int = 0) -> None:
        self.landed[u] = Landed(
            Home(self.queues, "gradient", self.geo.names[u], buffer), (ready,), self.itemsize, first
        )

    def set_aside(self, u: int) -> None:
        """Unit u's sum has the head's part, and is continued later in backward. With one host there is nothing to
        do.
        """

    def _leave(self, u: int, accumulator: Buffer, host: Buffer) -> tuple[Task, Task]:
        """Rounds unit u's gradient and copies it to `host`, piece by piece; (last read of the sum, last copy)."""
        for piece in self.geo.pieces(u, self.plan.piece):
            out = self.out[self.plan.units[u].gpu].acquire(self.geo.names[u])
            task = self._round(u, piece, accumulator, out.tensor, (*accumulator.ready, *out.ready))
            landed = self._land(u, piece, out, host, task)
            out.free((landed,))
        return task, landed  # first in, first out: the last piece lands last

    def shared(self, u: int, hi: Tensor, updated: Task) -> Task:  # noqa: ARG002 (of several hosts)
        """The task after which unit u's weights `hi` in RAM are updated; with several hosts, by all of them."""
        return updated

    def over_hosts(self, loads: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """The load of experts on all hosts, given that on each GPU of this host."""
        return loads

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Fills the parts of other hosts in a list by host, in RAM. With one host there are none."""

    def totals(self, loss: Callable[[Tensor], Tensor], gpu: int, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(sum of losses, gradient norm) of a step, fp64 on a GPU.

        `loss`: adds the losses to its argument. `others`: as of `norm`.
        """
        norm = self.norm(gpu, others)
        return loss(torch.zeros_like(norm)), norm

    def _round(self, u: int, piece: Sequence[Stretch], accumulator: Buffer, out: Tensor, after: Sequence[Task]) -> Task:
        """Rounds a piece to the compute dtype and sums its squares, by stretch."""
        (first, n), place = extent(piece), self.geo.first_stretch[u]
        gpu = self.plan.units[u].gpu

        def finish() -> None:
            wide = flat(accumulator.tensor, self.wide[u].tensors[0].dtype, first + n)
            narrow = flat(out, self.geo.dtype, n)
            for start, stop, i in piece:
                total = self.sums[gpu][place + i : place + i + 1]
                ops.grad_finish(wide[start:stop], out=narrow[start - first : stop - first], total=total)

        nbytes = 3 * n * self.itemsize
        return self.queues.run(numbered("compute", gpu), "finish", self.geo.names[u], finish, after, nbytes=nbytes)

    def _land(self, u: int, piece: Sequence[Stretch], out: Buffer, host: Buffer, rounded: Task) -> Task:
        """Copies a rounded piece to RAM."""
        first, nbytes = (self.itemsize * n for n in extent(piece))

        def land() -> None:
            host.tensor[first : first + nbytes].copy_(out.tensor[:nbytes], non_blocking=True)

        queue = numbered("d2h", self.plan.units[u].gpu)
        return self.queues.run(queue, "gradient", self.geo.names[u], land, (rounded, *host.ready), nbytes=nbytes)

    def norm(self, gpu: int, others: Sequence[Tensor]) -> Tensor:
        """The gradient norm of the step, fp64 on a GPU. `others`: sums of squares on the other GPUs, in RAM."""
        sums = self.sums[gpu]
        for other in others:
            sums = sums + other.to(sums.device)  # each zero elsewhere: one GPU's to the bit
        return sums.double().sum().sqrt()

    def discard(self) -> None:
        """Frees the gradients that wait for updates: the step is skipped."""
        for gradient in self.landed.values():
            gradient.free(gradient.ready)
        self.landed.clear()

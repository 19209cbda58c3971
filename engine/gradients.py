"""Gradients from backward to their update.

They are summed over a step's micro-batches on the GPU, in fp32 if there are several. A gradient that is not updated on
that GPU is rounded to the compute dtype and copied to RAM piece by piece, so that little of it takes GPU memory twice.
If RAM cannot hold all gradients until their norm is known, those of units with state on the SSD are written to the SSD.

Several hosts have some of a step's micro-batches each, and a share of the optimizer state. A sum goes from host to
host: each adds its micro-batches to the sum of the host before, so the order of additions, and every result, is bitwise
that of one host. The last host rounds the gradient and sends each host its share; the host updates that share (as in
ZeRO, Rajbhandari et al. 2020) and sends the new weights to all others. Sums have queues of their own, so that a host
which waits for its share does not delay them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from trireme.engine.geometry import Stretch, extent
from trireme.engine.home import DriveHome, Home
from trireme.engine.memory import NOTHING, Buffer, flat, views
from trireme.engine.placement import Placement, in_scratch
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Task
from trireme.kernels import ops
from trireme.storage.layout import ITEMSIZE


class Gradients:
    """The sums of a step's gradients, and by unit the gradients in `landed`, which wait for their updates on their GPU,
    in RAM or in the scratch space on the SSD: whole or, with several hosts, this host's share.
    """

    def __init__(self, placement: Placement):
        self.geo, self.plan, self.queues = geo, plan, queues = placement.geo, placement.plan, placement.queues
        self.layouts = geo.gradients if plan.sums_wide else geo.weights  # of the accumulators
        self.accumulators, self.tied = placement.gpu_pools("sum"), placement.gpu_pools("sum of embedding")
        self.out = placement.gpu_pools("rounded pool")  # rounded
        self.landings, pool = placement.pools("ram", "gradient"), placement.pool("ram", "gradient pool")
        self.in_use: dict[int, Buffer] = {}  # accumulators, by unit
        self.landed: dict[int, Home] = {}
        self.itemsize = ITEMSIZE[geo.dtype]
        units = range(geo.n_units)
        # Without pools, where sums last from pass to pass.
        self.lasting = [Buffer(placement.buffer(u, "gpu", "sum")) for u in units] if plan.accumulate else []
        self.on_gpu = [Buffer(placement.buffer(u, "gpu", "rounded")) for u in units]  # of layers that are updated there
        on_drive = lambda u: in_scratch(placement.scratch, geo.weights[u].span, later=True)
        drive_home = lambda u: DriveHome(queues, "gradient", geo.names[u], pool, on_drive(u), "state")
        self.on_ssd = {u: drive_home(u) for u in units if plan.spilled(u)}
        if not queues.simulated:
            sums = (torch.zeros(geo.first_stretch[-1], device=device) for device in queues.devices)
            self.sums = list(sums)  # of squares by stretch, by GPU: each its units'

    def get(self, u: int) -> Buffer:
        """The buffer of unit u's sum, zero before the first addition."""
        if not self.geo.numel[u]:
            return Buffer(NOTHING)
        if u not in self.in_use:
            self._begin(u)
        return self.in_use[u]

    def tensors(self, u: int, gradient: Buffer) -> dict[str, Tensor]:
        """Views of a sum, by name."""
        return views(self.layouts[u], gradient.tensor) if self.geo.numel[u] else {}

    def _begin(self, u: int) -> None:
        """Takes a buffer for unit u's sum, and sets it to zero."""
        buffer, nbytes = self._accumulator(u), self.layouts[u].span

        def zero() -> None:
            buffer.tensor[:nbytes].zero_()

        queue = numbered("compute", self.plan.units[u].gpu)
        buffer.ready = (self.queues.run(queue, "zero", self.geo.names[u], zero, buffer.ready, nbytes=nbytes),)

    def _accumulator(self, u: int) -> Buffer:
        pools = self.tied if u == 0 and self.geo.cfg.tied else self.accumulators
        gpu, name = self.plan.units[u].gpu, self.geo.names[u]
        self.in_use[u] = self.lasting[u] if self.lasting else pools[gpu].acquire(name)
        return self.in_use[u]

    def finish(self, u: int) -> None:
        """Ends unit u's sum: rounds it, sums its squares for the norm, and brings it to where it is updated."""
        if not self.geo.numel[u]:
            return
        accumulator, name = self.in_use.pop(u), self.geo.names[u]
        if self.plan.units[u].state == "gpu":
            (piece,) = self.geo.pieces(u, self.geo.numel[u])
            task = self._round(u, piece, accumulator, self.on_gpu[u].tensor, accumulator.ready)
            self._land_in(u, self.on_gpu[u], task)
        else:
            landing = self.landings[self.geo.size_class(u)].acquire(name)
            task, landed = self._copy_out(u, accumulator, landing)
            if u in self.on_ssd:
                self.on_ssd[u].keep(landing, (landed,))
                self.landed[u] = self.on_ssd[u]
            else:
                self._land_in(u, landing, landed)
        accumulator.free((task,))

    def _land_in(self, u: int, buffer: Buffer, task: Task) -> None:
        buffer.ready = (task,)
        self.landed[u] = Home(self.queues, "gradient", self.geo.names[u], buffer)

    def defer(self, u: int) -> None:
        """Unit u's sum has the head's part, and is continued later in backward. With one host there is nothing to
        do.
        """

    def _copy_out(self, u: int, accumulator: Buffer, landing: Buffer) -> tuple[Task, Task]:
        """Rounds unit u's gradient and copies it to `landing`, piece by piece; (last read of the sum, last copy)."""
        for piece in self.geo.pieces(u, self.plan.piece):
            out = self.out[self.plan.units[u].gpu].acquire(self.geo.names[u])
            task = self._round(u, piece, accumulator, out.tensor, (*accumulator.ready, *out.ready))
            landed = self._land(u, piece, out, landing, task)
            out.free((landed,))
        return task, landed  # first in, first out: the last piece lands last

    def share_weights(self, u: int, hi: Tensor, updated: Task) -> Task:  # noqa: ARG002 (of several hosts)
        """The task after which unit u's weights `hi` in RAM are updated; with several hosts, by all of them."""
        return updated

    def sum_over_hosts(self, loads: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """The load of experts on all hosts, given that on each GPU of this host."""
        return loads

    def all_gather(self, parts: Sequence[Tensor]) -> None:
        """Fills the parts of other hosts in a list by host, in RAM. With one host there are none."""

    def totals(self, loss: Callable[[Tensor], Tensor], gpu: int, peer_sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(sum of losses, gradient norm) of a step, fp64 on a GPU.

        `loss`: adds the losses to its argument. `peer_sums`: as of `norm`.
        """
        norm = self.norm(gpu, peer_sums)
        return loss(torch.zeros_like(norm)), norm

    def _round(self, u: int, piece: Sequence[Stretch], accumulator: Buffer, out: Tensor, after: Sequence[Task]) -> Task:
        """Rounds a piece to the compute dtype and sums its squares, by stretch."""
        (first, n), place = extent(piece), self.geo.first_stretch[u]
        gpu = self.plan.units[u].gpu

        def finish() -> None:
            gradient = flat(accumulator.tensor, self.layouts[u].tensors[0].dtype, first + n)
            rounded = flat(out, self.geo.dtype, n)
            for start, stop, i in piece:
                total = self.sums[gpu][place + i : place + i + 1]
                ops.grad_finish(gradient[start:stop], out=rounded[start - first : stop - first], total=total)

        nbytes = 3 * n * self.itemsize
        return self.queues.run(numbered("compute", gpu), "finish", self.geo.names[u], finish, after, nbytes=nbytes)

    def _land(self, u: int, piece: Sequence[Stretch], out: Buffer, landing: Buffer, rounded: Task) -> Task:
        """Copies a rounded piece to RAM."""
        first, nbytes = (self.itemsize * n for n in extent(piece))

        def land() -> None:
            landing.tensor[first : first + nbytes].copy_(out.tensor[:nbytes], non_blocking=True)

        queue = numbered("d2h", self.plan.units[u].gpu)
        return self.queues.run(queue, "gradient", self.geo.names[u], land, (rounded, *landing.ready), nbytes=nbytes)

    def norm(self, gpu: int, peer_sums: Sequence[Tensor]) -> Tensor:
        """The gradient norm of the step, fp64 on a GPU. `peer_sums`: sums of squares on the other GPUs, in RAM."""
        sums = self.sums[gpu]
        for part in peer_sums:
            sums = sums + part.to(sums.device)  # each zero elsewhere: bitwise as on one GPU
        return sums.double().sum().sqrt()

    def discard(self) -> None:
        """Frees the gradients that wait for updates: the step is skipped."""
        for gradient in self.landed.values():
            gradient.free(gradient.ready)
        self.landed.clear()


# ---------------------------------------------------------------- of several hosts


class Wire(Protocol):
    """Moves tensors in RAM between hosts, for each queue in the order of the calls. A call returns when they have
    arrived.
    """

    def send(self, queue: str, host: int, tensor: Tensor) -> None: ...

    def receive(self, queue: str, host: int, tensor: Tensor) -> None: ...

    def scatter(self, queue: str, root: int, parts: Sequence[Tensor]) -> None:
        """Sends each host its part from host `root`. On other hosts only the own part is filled, the rest is not
        used.
        """
        ...

    def all_gather(self, queue: str, parts: Sequence[Tensor]) -> None:
        """Sends the own part to all other hosts and fills theirs."""
        ...


class SharedGradients(Gradients):
    """Gradients of several hosts."""

    def __init__(self, placement: Placement, wire: Wire | None):
        """`wire`: None in a simulation."""
        super().__init__(placement)
        geo = self.geo
        self._wire = wire
        self.incoming, self.outgoing = placement.pool("ram", "sums", "in"), placement.pool("ram", "sums", "out")
        self.unit_landings = placement.pools("ram", "whole gradient")
        order = [geo.head, *[0] * geo.cfg.tied, *range(geo.head - 1, -1, -1)]  # of backward
        self.following = dict(pairwise(u for u in order if geo.numel[u]))
        self.deferred: set[int] = set()  # units with sums at the next host, to come back

    @property
    def wire(self) -> Wire:
        assert self._wire is not None, "a simulation has no wire"
        return self._wire

    def get(self, u: int) -> Buffer:
        """As of Gradients. Also begins the sum of the next unit, which is received during this unit's additions."""
        gradient, following = super().get(u), self.following.get(u)
        if following is not None and following not in self.in_use and u not in self.deferred:
            self._begin(following)
        return gradient

    def _begin(self, u: int) -> None:
        """Receives unit u's sum from the host before; on the first host the sum begins with zeros."""
        if self.plan.host == 0 and u not in self.deferred:
            super()._begin(u)
            return
        previous = (self.plan.host - 1) % self.plan.hosts
        gpu, name, copies = self.plan.units[u].gpu, self.geo.names[u], list[Task]()
        buffer = self._accumulator(u)
        for first, n in map(extent, self.geo.pieces(u, self.plan.sum_piece)):
            piece = self.incoming.acquire(name)

            def receive(piece: Buffer = piece, n: int = n) -> None:
                self.wire.receive("sum_in", previous, flat(piece.tensor, "F32", n))

            def up(piece: Buffer = piece, first: int = first, n: int = n) -> None:
                buffer.tensor[4 * first : 4 * (first + n)].copy_(piece.tensor[: 4 * n], non_blocking=True)

            received = self.queues.run("sum_in", "gradient", name, receive, piece.ready, nbytes=4 * n)
            after = (received, *buffer.ready)
            copies.append(self.queues.run(numbered("sum_up", gpu), "gradient", name, up, after, nbytes=4 * n))
            piece.free(copies[-1:])
        buffer.ready = tuple(copies[-1:])  # first in, first out: the last piece arrives last

    def finish(self, u: int) -> None:
        """Sends unit u's sum to the next host; the last host rounds it and sends the shares. Receives this host's
        share.
        """
        if not self.geo.numel[u]:
            return
        self.deferred.discard(u)
        accumulator, name, kind = self.in_use.pop(u), self.geo.names[u], self.geo.size_class(u)
        shares, size = self.geo.shares(u, self.plan.record), self.itemsize
        share = shares[self.plan.host]
        landing = self.landings[kind].acquire(name) if share.stop > share.start else None
        gradient = self.unit_landings[kind].acquire(name) if self.plan.last_host else None
        if gradient is None:
            last, landed = self._send_sum(u, accumulator), None
        else:
            last, landed = self._copy_out(u, accumulator, gradient)
        accumulator.free((last,))

        def scatter() -> None:
            parts = [NOTHING] * self.plan.hosts
            if gradient is not None:
                parts = [gradient.tensor[s.start * size : s.stop * size] for s in shares]
            if landing is not None:
                part = landing.tensor[: (share.stop - share.start) * size]
                if gradient is not None:
                    part.copy_(parts[self.plan.host])
                parts[self.plan.host] = part
            self.wire.scatter("net", self.plan.hosts - 1, parts)

        nbytes = size * (self.geo.numel[u] if gradient is not None else share.stop - share.start)
        after = (*([landed] if landed else ()), *(landing.ready if landing else ()))
        scattered = self.queues.run("net", "gradient", name, scatter, after, nbytes=nbytes)
        if gradient is not None:
            gradient.free((scattered,))
        self._land_in(u, landing or Buffer(NOTHING), scattered)

    def defer(self, u: int) -> None:
        """Sends the sum to the next host. It comes back to the first host, which continues it."""
        if self.geo.numel[u]:
            accumulator = self.in_use.pop(u)
            accumulator.free((self._send_sum(u, accumulator),))
            self.deferred.add(u)

    def _send_sum(self, u: int, accumulator: Buffer) -> Task:
        """Sends unit u's sum to the next host, in pieces; returns the task that reads the sum last."""
        gpu, name = self.plan.units[u].gpu, self.geo.names[u]
        for first, n in map(extent, self.geo.pieces(u, self.plan.sum_piece)):
            piece = self.outgoing.acquire(name)

            def down(piece: Buffer = piece, first: int = first, n: int = n) -> None:
                piece.tensor[: 4 * n].copy_(accumulator.tensor[4 * first : 4 * (first + n)], non_blocking=True)

            def send(piece: Buffer = piece, n: int = n) -> None:
                self.wire.send("sum_out", (self.plan.host + 1) % self.plan.hosts, flat(piece.tensor, "F32", n))

            after = (*accumulator.ready, *piece.ready)
            copied = self.queues.run(numbered("sum_down", gpu), "gradient", name, down, after, nbytes=4 * n)
            sent = self.queues.run("sum_out", "gradient", name, send, (copied,), nbytes=4 * n)
            piece.free((sent,))
        return copied

    def share_weights(self, u: int, hi: Tensor, updated: Task) -> Task:
        shares, nbytes = self.geo.shares(u, self.plan.record), self.geo.weights[u].span

        def gather() -> None:
            self.wire.all_gather("net", [hi[s.start * self.itemsize : s.stop * self.itemsize] for s in shares])

        return self.queues.run("net", "weights", self.geo.names[u], gather, (updated,), nbytes=nbytes)

    def sum_over_hosts(self, loads: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        sums = torch.stack([torch.stack(values).sum(0).double() for values in zip(*loads, strict=True)])
        parts = [torch.empty_like(sums) for _ in range(self.plan.hosts)]
        parts[self.plan.host] = sums
        self.wire.all_gather("statistics", parts)
        counts, scores = torch.stack(parts).sum(0)
        return [(counts, scores)]

    def all_gather(self, parts: Sequence[Tensor]) -> None:
        self.wire.all_gather("statistics", parts)

    def totals(self, loss: Callable[[Tensor], Tensor], gpu: int, peer_sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """As of Gradients. The loss is summed from host to host; the last host has the norm, and sends both to all."""
        sums, wire, host = torch.zeros(2, dtype=torch.float64), self.wire, self.plan.host
        if host:
            wire.receive("statistics", host - 1, sums[:1])
        sums[:1] = loss(sums[0].to(self.sums[gpu].device)).cpu()
        if not self.plan.last_host:
            wire.send("statistics", host + 1, sums[:1])
        else:
            sums[1:] = self.norm(gpu, peer_sums).cpu()
        wire.scatter("statistics", self.plan.hosts - 1, [sums] * self.plan.hosts)
        loss_, norm = sums.to(self.sums[gpu].device)
        return loss_, norm

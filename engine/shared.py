"""Gradients and weights of several hosts, each with some of a step's micro-batches and a share of the optimizer state.

A gradient sum goes from host to host: each adds its micro-batches to the sum of the host before, so the order of
additions, and every result, is bitwise that of one host. The last host rounds the gradient and sends each host its
share; the host updates that share (as in ZeRO, Rajbhandari et al. 2020) and sends the new weights to all others. Sums
have queues of their own, so that a host which waits for its share does not delay them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from trireme.engine.geometry import extent
from trireme.engine.gradients import Gradients
from trireme.engine.memory import NOTHING, Buffer, flat
from trireme.engine.placement import Placement
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Task


class Wire(Protocol):
    """Moves tensors in RAM between hosts, for each queue in the order of the calls. A call returns when they have
    arrived.
    """

    def send(self, queue: str, host: int, what: Tensor) -> None: ...

    def receive(self, queue: str, host: int, what: Tensor) -> None: ...

    def deal(self, queue: str, root: int, parts: Sequence[Tensor]) -> None:
        """Sends each host its part from host `root`. On other hosts only the own part is filled, the rest is not
        used.
        """
        ...

    def gather(self, queue: str, parts: Sequence[Tensor]) -> None:
        """Sends the own part to all other hosts and fills theirs."""
        ...


class SharedGradients(Gradients):
    """Gradients of several hosts."""

    def __init__(self, placement: Placement, wire: Wire | None):
        """`wire`: None in a simulation."""
        super().__init__(placement)
        geo = self.geo
        self._wire = wire
        self.into, self.onward = placement.pool("host", "sums", "in"), placement.pool("host", "sums", "out")
        self.whole = placement.pools("host", "whole gradient")
        order = [geo.head, *[0] * geo.cfg.tied, *range(geo.head - 1, -1, -1)]  # of backward
        self.following = dict(pairwise(u for u in order if geo.numel[u]))
        self.aside: set[int] = set()  # units with sums at the next host, to come back

    @property
    def wire(self) -> Wire:
        assert self._wire is not None, "a simulation has no wire"
        return self._wire

    def get(self, u: int) -> Buffer:
        """As of Gradients. Also begins the sum of the next unit, which is received during this unit's additions."""
        gradient, following = super().get(u), self.following.get(u)
        if following is not None and following not in self.holding and u not in self.aside:
            self._begin(following)
        return gradient

    def _begin(self, u: int) -> None:
        """Receives unit u's sum from the host before; on the first host the sum begins with zeros."""
        if self.plan.host == 0 and u not in self.aside:
            super()._begin(u)
            return
        before = (self.plan.host - 1) % self.plan.hosts
        gpu, name, come = self.plan.units[u].gpu, self.geo.names[u], list[Task]()
        buffer = self._accumulator(u)
        for first, n in map(extent, self.geo.pieces(u, self.plan.sum_piece)):
            piece = self.into.acquire(name)

            def receive(piece: Buffer = piece, n: int = n) -> None:
                self.wire.receive("sum_in", before, flat(piece.tensor, "F32", n))

            def up(piece: Buffer = piece, first: int = first, n: int = n) -> None:
                buffer.tensor[4 * first : 4 * (first + n)].copy_(piece.tensor[: 4 * n], non_blocking=True)

            here = self.queues.run("sum_in", "gradient", name, receive, piece.ready, nbytes=4 * n)
            ready = (here, *buffer.ready)
            come.append(self.queues.run(numbered("sum_up", gpu), "gradient", name, up, ready, nbytes=4 * n))
            piece.free(come[-1:])
        buffer.ready = tuple(come[-1:])  # first in, first out: the last piece arrives last

    def finish(self, u: int) -> None:
        """Sends unit u's sum to the next host; the last host rounds it and sends the shares. Receives this host's
        share.
        """
        if not self.geo.numel[u]:
            return
        self.aside.discard(u)
        accumulator, name, kind = self.holding.pop(u), self.geo.names[u], self.geo.size_class(u)
        shares, size = self.geo.shares(u, self.plan.record), self.itemsize
        own = shares[self.plan.host]
        mine = self.landings[kind].acquire(name) if own.stop > own.start else None
        whole = self.whole[kind].acquire(name) if self.plan.last_host else None
        if whole is None:
            last, landed = self._pass_on(u, accumulator), None
        else:
            last, landed = self._leave(u, accumulator, whole)
        accumulator.free((last,))

        def deal() -> None:
            parts = [NOTHING] * self.plan.hosts
            if whole is not None:
                parts = [whole.tensor[s.start * size : s.stop * size] for s in shares]
            if mine is not None:
                here = mine.tensor[: (own.stop - own.start) * size]
                if whole is not None:
                    here.copy_(parts[self.plan.host])
                parts[self.plan.host] = here
            self.wire.deal("net", self.plan.hosts - 1, parts)

        nbytes = size * (self.geo.numel[u] if whole is not None else own.stop - own.start)
        ready = (*([landed] if landed else ()), *(mine.ready if mine else ()))
        dealt = self.queues.run("net", "gradient", name, deal, ready, nbytes=nbytes)
        if whole is not None:
            whole.free((dealt,))
        self._land_in(u, mine or Buffer(NOTHING), dealt, own.start)

    def set_aside(self, u: int) -> None:
        """Sends the sum to the next host. It comes back to the first host, which continues it."""
        if self.geo.numel[u]:
            accumulator = self.holding.pop(u)
            accumulator.free((self._pass_on(u, accumulator),))
            self.aside.add(u)

    def _pass_on(self, u: int, accumulator: Buffer) -> Task:
        """Sends unit u's sum to the next host, in pieces; returns the task that reads the sum last."""
        gpu, name = self.plan.units[u].gpu, self.geo.names[u]
        for first, n in map(extent, self.geo.pieces(u, self.plan.sum_piece)):
            piece = self.onward.acquire(name)

            def down(piece: Buffer = piece, first: int = first, n: int = n) -> None:
                piece.tensor[: 4 * n].copy_(accumulator.tensor[4 * first : 4 * (first + n)], non_blocking=True)

            def send(piece: Buffer = piece, n: int = n) -> None:
                self.wire.send("sum_out", (self.plan.host + 1) % self.plan.hosts, flat(piece.tensor, "F32", n))

            ready = (*accumulator.ready, *piece.ready)
            left = self.queues.run(numbered("sum_down", gpu), "gradient", name, down, ready, nbytes=4 * n)
            gone = self.queues.run("sum_out", "gradient", name, send, (left,), nbytes=4 * n)
            piece.free((gone,))
        return left

    def shared(self, u: int, hi: Tensor, updated: Task) -> Task:
        shares, nbytes = self.geo.shares(u, self.plan.record), self.geo.weights[u].span

        def gather() -> None:
            self.wire.gather("net", [hi[s.start * self.itemsize : s.stop * self.itemsize] for s in shares])

        return self.queues.run("net", "weights", self.geo.names[u], gather, (updated,), nbytes=nbytes)

    def over_hosts(self, loads: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        own = torch.stack([torch.stack(of_all).sum(0).double() for of_all in zip(*loads, strict=True)])
        parts = [torch.empty_like(own) for _ in range(self.plan.hosts)]
        parts[self.plan.host] = own
        self.wire.gather("statistics", parts)
        counts, scores = torch.stack(parts).sum(0)
        return [(counts, scores)]

    def gather(self, parts: Sequence[Tensor]) -> None:
        self.wire.gather("statistics", parts)

    def totals(self, loss: Callable[[Tensor], Tensor], gpu: int, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """As of Gradients. The loss is summed from host to host; the last host has the norm, and sends both to all."""
        found, wire, host = torch.zeros(2, dtype=torch.float64), self.wire, self.plan.host
        if host:
            wire.receive("statistics", host - 1, found[:1])
        found[:1] = loss(found[0].to(self.sums[gpu].device)).cpu()
        if not self.plan.last_host:
            wire.send("statistics", host + 1, found[:1])
        else:
            found[1:] = self.norm(gpu, others).cpu()
        wire.deal("statistics", self.plan.hosts - 1, [found] * self.plan.hosts)
        loss_, norm = found.to(self.sums[gpu].device)
        return loss_, norm

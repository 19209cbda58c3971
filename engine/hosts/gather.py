"""fp32 masters for the host that exports: it requests the low halves of other hosts' records one at a time.

A request is a unit and the record's first element, the answer its low halves. So RAM holds no more than one record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trireme.engine.between import Reader
from trireme.engine.gradients import Wire
from trireme.engine.placement import Entry

CONTROL = "control"  # the queue of the run's own thread
EXPORTS = 0
END = -1


class Gatherer(Reader):
    """On the host that exports: reads the records of all hosts."""

    def __init__(self, reader: Reader, wire: Wire):
        """`reader`: reads this host's records."""
        super().__init__(reader.placement)
        self.reader, self.wire = reader, wire
        self._received = torch.empty(0, dtype=torch.uint8)

    def read(self, entry: Entry, *parts: str) -> Tensor:
        return self.reader.read(entry, *parts)

    def low(self, u: int, a: int, b: int) -> Tensor:
        host = self.placement.geo.owner(u, a, self.placement.plan.record)
        if host == self.placement.plan.host:
            return self.reader.low(u, a, b)
        if len(self._received) < 2 * (b - a):
            self._received = torch.empty(2 * (b - a), dtype=torch.uint8)
        self.wire.send(CONTROL, host, torch.tensor([u, a]))
        self.wire.receive(CONTROL, host, self._received[: 2 * (b - a)])
        return self._received[: 2 * (b - a)]


@contextmanager
def masters(reader: Reader, wire: Wire | None) -> Iterator[Reader | None]:
    """Called on all hosts at once, with idle queues: yields a reader on the host that exports, None on others, which
    answer requests until it has no more.

    `reader`: reads this host's share. Raises LostHost.
    """
    plan, geo, request = reader.placement.plan, reader.placement.geo, torch.tensor([END, END])
    if wire is None:
        yield reader
    elif plan.host == EXPORTS:
        yield Gatherer(reader, wire)
        for host in range(plan.hosts):
            if host != EXPORTS:
                wire.send(CONTROL, host, request)
    else:
        wire.receive(CONTROL, EXPORTS, request)
        while (unit := request.tolist())[0] != END:
            u, a = unit
            wire.send(CONTROL, EXPORTS, reader.low(u, a, dict(geo.records(u, plan.record))[a]))
            wire.receive(CONTROL, EXPORTS, request)
        yield None

"""Tensors between hosts, over gloo: a process group for each queue, so that queues do not wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from trireme.engine.hosts.watch import LostHost
from trireme.engine.shared import BETWEEN

LINES = ("net", "sum", "statistics")  # a group each; `sum_in` and `sum_out` are two ends of one


@contextmanager
def answered() -> Iterator[None]:
    """Turns gloo's errors into LostHost."""
    try:
        yield
    except RuntimeError as error:
        raise LostHost(f"another host does not answer: {str(error).splitlines()[0]}") from error


class Wire:
    """The Wire of engine/shared.py. Raises LostHost."""

    def __init__(self, host: int, groups: Mapping[str, dist.ProcessGroup]):
        self.host, self._groups = host, groups
        self.waits = False  # the run's own thread does, for another host

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """As `answered`, of what the run's own thread calls."""
        self.waits = True
        try:
            with answered():
                yield
        finally:
            self.waits = False

    def _group(self, queue: str) -> dist.ProcessGroup:
        return self._groups[queue.partition("_")[0]]

    def send(self, queue: str, host: int, what: Tensor) -> None:
        with self.waiting() if queue == BETWEEN else answered():
            dist.send(what, host, group=self._group(queue))

    def receive(self, queue: str, host: int, what: Tensor) -> None:
        with self.waiting() if queue == BETWEEN else answered():
            dist.recv(what, host, group=self._group(queue))

    def exchange(self, queue: str, to: int, source: int, block: Tensor) -> None:
        """Sends `block` to one host while receiving as much from another."""
        group = self._group(queue)
        with answered():
            came = dist.irecv(block.clone(), source, group=group)
            _wait([came, dist.isend(block, to, group=group)])

    def deal(self, queue: str, root: int, parts: Sequence[Tensor]) -> None:
        group, own = self._group(queue), parts[self.host]
        with answered():
            if self.host == root:
                others = [(host, part) for host, part in enumerate(parts) if host != root and part.numel()]
                _wait([dist.isend(part, host, group=group) for host, part in others])
            elif own.numel():
                dist.recv(own, root, group=group)

    def gather(self, queue: str, parts: Sequence[Tensor]) -> None:
        group, own = self._group(queue), parts[self.host]
        others = [(host, part) for host, part in enumerate(parts) if host != self.host]
        with answered():
            coming = [dist.irecv(part, host, group=group) for host, part in others if part.numel()]
            going = [dist.isend(own, host, group=group) for host, _ in others if own.numel()]
            _wait([*coming, *going])


def _wait(under_way: Iterable[dist.Work | None]) -> None:
    for work in under_way:
        assert work is not None
        work.wait()

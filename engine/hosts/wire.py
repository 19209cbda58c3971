"""Tensors between hosts: one connection for each queue, so that queues do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from trireme.engine.hosts.channel import Channel, Forged
from trireme.engine.hosts.watch import LostHost
from trireme.engine.shared import BETWEEN

SENDERS = 4  # threads of a line that send while its own receives


def data(what: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in RAM."""
    assert what.is_contiguous()
    assert what.device.type == "cpu"
    array: Any = what.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@contextmanager
def answered(host: int) -> Iterator[None]:
    """A context in which errors of a connection become LostHost."""
    try:
        yield
    except Forged as error:
        raise LostHost(f"what came from host {host} was changed in transit: {error}") from error
    except OSError as error:
        raise LostHost(f"host {host} does not answer: {error.strerror or error}") from error


class Wire:
    """Implements the Wire of engine/shared.py. Methods raise LostHost."""

    def __init__(self, host: int, lines: Mapping[str, Mapping[int, Channel]]):
        """`lines`: connections by line and host. `sum_in` and `sum_out` are the two ends of one connection."""
        self.host, self._lines = host, lines
        self.waits = False  # the run's own thread does, for another host
        self._senders = {line: ThreadPoolExecutor(SENDERS, f"to hosts, {line}") for line in lines}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context around what the run's own thread calls."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def send(self, queue: str, host: int, what: Tensor) -> None:
        self._alone(queue, lambda: self._send(queue, host, what))

    def receive(self, queue: str, host: int, what: Tensor) -> None:
        self._alone(queue, lambda: self._receive(queue, host, what))

    def _alone(self, queue: str, act: Callable[[], None]) -> None:
        if queue == BETWEEN:
            with self.waiting():
                act()
        else:
            act()

    def _channel(self, queue: str, host: int) -> Channel:
        return self._lines[queue.partition("_")[0]][host]

    def _send(self, queue: str, host: int, what: Tensor) -> None:
        with answered(host):
            self._channel(queue, host).send(data(what))

    def _receive(self, queue: str, host: int, what: Tensor) -> None:
        with answered(host):
            self._channel(queue, host).receive(data(what))

    def _sending(self, queue: str, host: int, what: Tensor) -> Future[None]:
        return self._senders[queue.partition("_")[0]].submit(self._send, queue, host, what)

    def exchange(self, queue: str, to: int, source: int, block: Tensor) -> None:
        """Sends `block` to one host while receiving as many bytes from another."""
        came, going = torch.empty_like(block), self._sending(queue, to, block)
        self._receive(queue, source, came)
        going.result()

    def deal(self, queue: str, root: int, parts: Sequence[Tensor]) -> None:
        if self.host == root:
            going = [self._sending(queue, host, part) for host, part in self._others(parts) if part.numel()]
            for sent in going:
                sent.result()
        elif parts[self.host].numel():
            self._receive(queue, root, parts[self.host])

    def gather(self, queue: str, parts: Sequence[Tensor]) -> None:
        """All hosts receive in the order of hosts. So there is always a host that all others receive from, and none
        waits in a circle.
        """
        own, others = parts[self.host], self._others(parts)
        going = [self._sending(queue, host, own) for host, _ in others if own.numel()]
        for host, part in others:
            if part.numel():
                self._receive(queue, host, part)
        for sent in going:
            sent.result()

    def _others(self, parts: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        return [(host, part) for host, part in enumerate(parts) if host != self.host]

    def cut(self) -> None:
        """Ends all calls that wait for a host."""
        for line, channels in self._lines.items():
            for channel in channels.values() if line != "watch" else ():
                with suppress(OSError):
                    channel.close()

    def close(self) -> None:
        """Closes all connections."""
        self.cut()
        for senders in self._senders.values():
            senders.shutdown()
        for channels in self._lines.values():
            for channel in channels.values():
                channel.socket.close()

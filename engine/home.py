"""Bytes with a home: in RAM, in a GPU's memory or on the drives. They are loaded to a buffer, and stored from one.

A home on the drives is reached through a buffer in RAM of a pool. What a home does is queued; `last` are the tasks that
its next one comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from trireme.engine.memory import Buffer, Pool, queue_copy
from trireme.engine.queues.task import Kind, Queues, Task
from trireme.storage.layout import ALIGN, round_up


class OnDrive(NamedTuple):
    """Bytes on the drives: shards of the store or scratch space (placement.py). A part None is all of them; what parts
    are besides depends on the place.
    """

    nbytes: Callable[[Any], int]  # of a part
    read: Callable[[Tensor, Any], object]  # fills a buffer in RAM with as much as it holds, each part at its offset
    write: Callable[[Tensor, Any], object]


class Home:
    """Bytes in memory: the home is their buffer."""

    def __init__(self, queues: Queues, kind: Kind, label: str, place: Buffer):
        self.queues, self.kind, self.label, self.place = queues, kind, label, place

    @property
    def last(self) -> tuple[Task, ...]:
        """The tasks that read or wrote it last: the next writer comes after them."""
        return self.place.ready

    @property
    def ready(self) -> tuple[Task, ...]:
        """The tasks that write the bytes which `part` gives; a buffer that it brings has its own."""
        return self.place.ready

    def load(self, queue: str, target: Buffer, nbytes: int) -> Task:
        """Copies the first `nbytes` to a buffer; returns the task that writes it last."""
        source = self.bring(nbytes)
        task = queue_copy(self.queues, queue, self.kind, self.label, source, target, nbytes)
        source.free((task,))
        return task

    def store(self, queue: str, source: Buffer, nbytes: int) -> Task:
        """Copies the first `nbytes` of a buffer here; returns the task that reads it last."""
        buffer = self.acquire()
        task = queue_copy(self.queues, queue, self.kind, self.label, source, buffer, nbytes)
        self.keep(buffer, (task,), nbytes)
        return task

    def part(self, a: int, b: int) -> tuple[Tensor, Buffer | None]:
        """Bytes [a, b), and the buffer that they were brought to, which is to be freed after their last reader."""
        return self.place.tensor[a:b], None

    def free(self, after: Sequence[Task]) -> None:
        """Gives a buffer of a pool back after the tasks that read it last: the bytes are not needed any more."""
        self.place.free(after)

    # ------------------------------------------------ by way of RAM

    def acquire(self) -> Buffer:
        """A buffer to put the bytes in, for `keep`."""
        return self.place

    def bring(self, nbytes: int | None = None, part: object = None) -> Buffer:  # noqa: ARG002 (of a drive)
        """A buffer with the bytes, valid after its `ready`; to be freed after their last reader. Of a drive, with a
        `part` only that, where it lies in the whole.
        """
        return self.place

    def keep(self, buffer: Buffer, after: Sequence[Task], nbytes: int | None = None, part: object = None) -> None:
        """The bytes in a buffer of `bring` or `acquire` are new after these tasks; frees the buffer."""
        self.write(buffer, after, nbytes, part)
        buffer.free(self.last)

    def write(self, buffer: Buffer, after: Sequence[Task], nbytes: int | None = None, part: object = None) -> None:  # noqa: ARG002
        """As `keep`, but the buffer stays the caller's."""
        buffer.ready = tuple(after)


class DriveHome(Home):
    """Bytes on the drives, by way of a pool in RAM."""

    def __init__(self, queues: Queues, kind: Kind, label: str, pool: Pool, drive: OnDrive, queue: str = "ssd"):
        """`queue`: "ssd", or "state" for what no task waits for yet."""
        self.queues, self.kind, self.label, self.pool, self.drive, self.queue = queues, kind, label, pool, drive, queue
        self._last: tuple[Task, ...] = ()

    @property
    def last(self) -> tuple[Task, ...]:
        return self._last

    @property
    def ready(self) -> tuple[Task, ...]:
        return ()

    def part(self, a: int, b: int) -> tuple[Tensor, Buffer | None]:
        begin, end = a // ALIGN * ALIGN, round_up(b)  # whole blocks of the drive
        buffer = self.bring(part=(begin, end))
        return buffer.tensor[a - begin : b - begin], buffer

    def free(self, after: Sequence[Task]) -> None:
        """Nothing to do: the space on the drives is its own."""

    def acquire(self) -> Buffer:
        return self.pool.acquire(self.label)

    def bring(self, nbytes: int | None = None, part: object = None) -> Buffer:
        buffer, drive, n = self.acquire(), self.drive, nbytes
        nbytes = drive.nbytes(part) if nbytes is None else nbytes
        read = lambda: drive.read(buffer.tensor[:n], part)
        buffer.ready = self._last = (self._run("read", read, (*buffer.ready, *self.last), nbytes),)
        return buffer

    def load(self, queue: str, target: Buffer, nbytes: int) -> Task:
        task = super().load(queue, target, nbytes)
        self._last = (task,)
        return task

    def write(self, buffer: Buffer, after: Sequence[Task], nbytes: int | None = None, part: object = None) -> None:
        drive, n, nbytes = self.drive, nbytes, self.drive.nbytes(part) if nbytes is None else nbytes
        write = lambda: drive.write(buffer.tensor[:n], part)
        self._last = (self._run("write", write, (*after, *self.last), nbytes),)
        buffer.ready = tuple(after)

    def _run(self, access: str, io: Callable[[], object], after: Sequence[Task], nbytes: int) -> Task:
        return self.queues.run(f"{self.queue}_{access}", self.kind, self.label, io, after, nbytes=nbytes)

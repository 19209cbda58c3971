"""State between steps: reads and writes weights and optimizer state where they are stored; saves and loads
snapshots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import cycle

from torch import Tensor

from trireme.engine.buffers import Role
from trireme.engine.memory import NOTHING
from trireme.engine.placement import Entry, Placement, Progress, Stored, finish, silent
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Task

READ_AHEAD = 4  # entries read at once


class Reader:
    """Reads entries between steps, through a step's queues.

    The staging buffer keeps what was read last, so there may be no update while a Reader is in use.
    """

    def __init__(self, placement: Placement):
        self.placement, self.updates = placement, placement.updates
        # By shard: its bytes of the staging buffer, its read and the tasks that use it; latest last.
        self._staged: dict[str, tuple[range, tuple[Task, ...]]] = {}

    def read(self, entry: Entry, *parts: str) -> Tensor:
        """The bytes of an entry: its buffer in RAM, or a copy in the staging buffer. Raises StoreError.

        `parts`: of a record, only these, at their offsets (Geometry.state_parts). A copy is valid until another is read
        to the same bytes; weights and low halves have different places. In a simulation the tensor is empty.
        """
        buffer, reads = self.bring(entry, *parts)
        for task in () if self.placement.queues.simulated else reads:
            task.wait()
        return buffer

    def bring(self, entry: Entry, *parts: str) -> tuple[Tensor, tuple[Task, ...]]:
        """As `read`, without waiting: the bytes are valid after the tasks that are returned."""
        placement = self.placement
        assert not placement.in_place(entry), "frozen weights are in the user's files"
        assert placement.updates == self.updates, "the bytes that were read have been updated"
        buffer = placement.in_ram(entry)
        if buffer is not None:
            return buffer, ()
        shards, (begin, buffer) = placement.shards_of(entry, *parts), _place(placement, entry)
        name, place = shards[0].name, range(begin + shards[0].first, begin + shards[-1].first + shards[-1].layout.span)
        _, tasks = self._staged.pop(name, (place, ()))
        if not tasks:
            names = [n for n, (span, _) in self._staged.items() if span.start < place.stop and place.start < span.stop]
            after = [task for n in names for task in self._staged.pop(n)[1]]
            tasks = (_fetch(placement, entry, shards, buffer, after),)
        self._staged[name] = place, tasks
        return buffer, tasks

    def hold_until(self, task: Task) -> None:
        """The bytes brought last may be overwritten after `task`, too."""
        if self._staged:
            name, (place, tasks) = self._staged.popitem()
            self._staged[name] = place, (*tasks, task)

    def low(self, u: int, a: int, b: int) -> Tensor:
        """The low halves of the fp32 masters of unit u's elements [a, b), which are one record, as bytes."""
        entry = Entry("state", u, self.placement.geo.records(u, self.placement.plan.record).index((a, b)))
        lo = self.placement.layout(entry)["lo"]
        return self.read(entry, "low")[lo.offset : lo.offset + lo.nbytes]


def _fetch(placement: Placement, entry: Entry, shards: Sequence[Stored], buffer: Tensor, after: Sequence[Task]) -> Task:
    """Queues a copy of an entry's shards to RAM: from a GPU, or from the SSD with a check of their checksums."""
    if (stored := placement.stored(entry)) is None:
        queue, copy = f"{entry.queue}_read", partial(placement.move, "verify", shards, buffer)
    else:
        queue, copy = numbered("d2h", placement.plan.units[entry.u].gpu), partial(_down, stored, shards, buffer)
    nbytes = sum(shard.layout.span for shard in shards)
    return placement.queues.run(queue, entry.content, placement.label(entry), copy, after, nbytes)


def _down(stored: Tensor, shards: Sequence[Stored], buffer: Tensor) -> None:
    for part in (slice(shard.first, shard.first + shard.layout.span) for shard in shards):
        buffer[part].copy_(stored[part], non_blocking=True)


@contextmanager
def writing(placement: Placement, entry: Entry) -> Iterator[Tensor]:
    """A context with a buffer in RAM for an entry's bytes, between steps, which are stored at its end. Raises
    StoreError.
    """
    stored, buffer = placement.stored(entry), placement.in_ram(entry)
    buffer = _place(placement, entry)[1] if buffer is None else buffer
    yield buffer
    if buffer is stored or placement.in_place(entry):
        return
    if stored is None:
        placement.move("write", placement.shards_of(entry), buffer)
    else:
        stored[: len(buffer)].copy_(buffer)


def _place(placement: Placement, entry: Entry) -> tuple[int, Tensor]:
    """(first byte, buffer) within the staging buffer in RAM for an entry that is not stored in RAM: records lie at its
    end, weights at its beginning.
    """
    staging, span = next(iter(placement.many("ram", "staging")), NOTHING), placement.layout(entry).span
    begin = placement.staging - span if entry.kind == "state" else 0
    return begin, staging[begin : begin + span]


def save_to_store(placement: Placement, progress: Progress = silent) -> None:
    """Writes what is stored on GPUs or in RAM to its shards in the store. Raises StoreError."""
    reader, written = Reader(placement), list[tuple[Entry, Task]]()
    for entry in placement.entries(everything=False):
        buffer, reads = reader.bring(entry)
        shards = placement.shards_of(entry)
        write = partial(placement.move, "write", shards, buffer)
        nbytes = sum(shard.layout.span for shard in shards)
        task = placement.queues.run(f"{entry.queue}_write", entry.content, placement.label(entry), write, reads, nbytes)
        written.append((entry, task))
        reader.hold_until(task)
    for entry, task in () if placement.queues.simulated else written:
        task.wait()
        progress(placement.layout(entry).span)


def load_from_store(placement: Placement, progress: Progress) -> None:
    """Reads and verifies what is stored on GPUs or in RAM; also verifies what stays on the SSD.

    Raises StoreError, and Damaged, a StoreError, for a wrong checksum. Also on errors, of `progress` too, nothing is in
    flight afterwards.
    """
    placement.blank = False
    pending: deque[tuple[Entry, Tensor, list[Future[None]]]] = deque()

    def arrive() -> None:
        entry, buffer, futures = pending.popleft()
        finish(futures)
        stored, span = placement.stored(entry), placement.layout(entry).span
        if stored is not None and stored is not buffer:
            stored[:span].copy_(buffer[:span])
        progress(span)

    try:
        for entry, buffer in _places(placement):
            while len(pending) == READ_AHEAD or any(buffer is target for _, target, _ in pending):
                arrive()
            pending.append((entry, buffer, placement.start("verify", placement.shards_of(entry), buffer)))
        while pending:
            arrive()
    finally:
        wait([future for _, _, futures in pending for future in futures])


def _places(placement: Placement) -> Iterator[tuple[Entry, Tensor]]:
    """Each entry with a buffer in RAM to read it to: its own, or in turn those of a pool, or the staging buffer."""
    turns: dict[tuple[Role, str], Iterator[Tensor]] = {}
    for entry in placement.entries():
        stored = placement.in_ram(entry)
        if stored is not None:
            yield entry, stored
            continue
        key: tuple[Role, str] = ("staging", "")
        if placement.tier(entry) == "ssd":
            key = ("state pool", "") if entry.kind == "state" else ("weights pool", placement.geo.size_class(entry.u))
        yield entry, next(turns.setdefault(key, cycle(placement.many("ram", *key))))

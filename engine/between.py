"""State between steps: entries are read and written wherever they are stored, saved to the store or loaded from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import cycle

from torch import Tensor

from trireme.engine.buffers import What
from trireme.engine.memory import NOTHING
from trireme.engine.placement import Entry, Placement, Progress, finish, silent
from trireme.engine.queues.task import Task

READ_AHEAD = 4  # entries read at once


@dataclass
class Staged:
    """Bytes of staging that hold what was read, after `tasks`, its readers in queues among them."""

    first: int
    last: int
    tasks: tuple[Task, ...]


class Reader:
    """Reads entries between steps, by a step's queues. Staging keeps what was read: what is stored may not change."""

    def __init__(self, placement: Placement):
        self.placement = placement
        self._staged: dict[str, Staged] = {}  # by shard; the last one read is last

    def read(self, entry: Entry, *parts: str) -> Tensor:
        """The entry's stored in RAM, or a copy, of `parts` at their offsets. Raises StoreError.

        A copy stays until another takes its place in staging: low halves take no weights' place, and weights none of
        theirs. A simulation has no bytes.
        """
        buffer, ready = self.bring(entry, *parts)
        for task in () if self.placement.queues.simulated else ready:
            task.wait()
        return buffer

    def bring(self, entry: Entry, *parts: str) -> tuple[Tensor, tuple[Task, ...]]:
        """As `read`, but the bytes are there after these tasks."""
        placement = self.placement
        assert not placement.in_place(entry)
        buffer = placement.in_ram(entry)
        if buffer is not None:
            return buffer, ()
        shards, (begin, buffer) = placement.shards_of(entry, *parts), _place(placement, entry)
        name, first, last = shards[0].name, begin + shards[0].first, begin + shards[-1].first + shards[-1].layout.span
        if (there := self._staged.pop(name, None)) is None:
            over = [name for name, staged in self._staged.items() if staged.first < last and first < staged.last]
            after = [task for name in over for task in self._staged.pop(name).tasks]
            there = Staged(first, last, (placement.fetch(entry, buffer, after, *parts),))
        self._staged[name] = there
        return buffer, there.tasks

    def used(self, task: Task) -> None:
        """What was read last is free after it."""
        if self._staged:
            next(reversed(self._staged.values())).tasks += (task,)

    def low(self, u: int, a: int, b: int) -> Tensor:
        """The low halves of the record of elements a..b, as `read` gives them."""
        entry = Entry("state", u, self.placement.geo.records(u, self.placement.plan.record).index((a, b)))
        lo = self.placement.layout(entry)["lo"]
        return self.read(entry, "low")[lo.offset : lo.offset + lo.nbytes]


class Writer:
    """A context with an entry's buffer, between steps: its stored in RAM, or staging, copied stored on exit."""

    def __init__(self, placement: Placement, entry: Entry):
        self.placement, self.entry, self.stored = placement, entry, placement.stored(entry)
        in_ram = placement.in_ram(entry)
        self.buffer = staging(placement, entry) if in_ram is None else in_ram

    def __enter__(self) -> Tensor:
        return self.buffer

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None or self.buffer is self.stored or self.placement.in_place(self.entry):
            return
        if self.stored is None:
            self.placement.move(
                self.placement.transfer(self.entry, "write"), self.placement.shards_of(self.entry), self.buffer
            )
        else:
            self.stored[: len(self.buffer)].copy_(self.buffer)


def staging(placement: Placement, entry: Entry) -> Tensor:
    """The host buffer for entries away from RAM."""
    return next(iter(placement.many("host", "staging")), NOTHING)[: placement.layout(entry).span]


def _place(placement: Placement, entry: Entry) -> tuple[int, Tensor]:
    """(first byte in staging, the buffer there) of what is read: records at its end, all else at its begin."""
    whole, span = next(iter(placement.many("host", "staging")), NOTHING), placement.layout(entry).span
    begin = placement.staging - span if entry.kind == "state" else 0
    return begin, whole[begin : begin + span]


def save_to_store(placement: Placement, progress: Progress = silent) -> None:
    """Writes what is on the GPU or in RAM to its shards, by a step's queues. Raises StoreError."""
    reader, written = Reader(placement), list[tuple[Entry, Task]]()
    for entry in placement.entries(everything=False):
        written.append((entry, placement.write(entry, *reader.bring(entry))))
        reader.used(written[-1][1])
    for entry, task in () if placement.queues.simulated else written:
        task.wait()
        progress(placement.layout(entry).span)


def load_from_store(placement: Placement, progress: Progress = silent, everything: bool = True) -> None:
    """Reads and verifies what is on the GPU or in RAM; with `everything` verifies the rest too.

    Raises StoreError, Damaged among them. On errors, of `progress` too, nothing is in flight.
    """
    placement.blank = False
    coming: deque[tuple[Entry, Tensor, list[Future[None]]]] = deque()

    def arrive() -> None:
        entry, buffer, moving = coming.popleft()
        finish(moving)
        stored, span = placement.stored(entry), placement.layout(entry).span
        if stored is not None and stored is not buffer:
            stored[:span].copy_(buffer[:span])
        progress(span)

    try:
        for entry, buffer in _places(placement, everything):
            while len(coming) == READ_AHEAD or any(buffer is taken for _, taken, _ in coming):
                arrive()
            coming.append((entry, buffer, placement.start(placement.ssd.verify, placement.shards_of(entry), buffer)))
        while coming:
            arrive()
    finally:
        wait([future for _, _, moving in coming for future in moving])


def _places(placement: Placement, everything: bool) -> Iterator[tuple[Entry, Tensor]]:
    """Each entry with a buffer in RAM: its stored, a ring's slot or staging."""
    turns: dict[tuple[What, str], Iterator[Tensor]] = {}
    for entry in placement.entries(everything):
        stored = placement.in_ram(entry)
        if stored is not None:
            yield entry, stored
            continue
        key: tuple[What, str] = ("staging", "")
        if placement.tier(entry) == "ssd":
            key = ("state pool", "") if entry.kind == "state" else ("weights pool", placement.geo.size_class(entry.u))
        yield entry, next(turns.setdefault(key, cycle(placement.many("host", *key))))

"""State between steps: entries are read and written wherever they are stored, saved to the store or loaded from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from itertools import cycle

from torch import Tensor

from trireme.engine.buffers import What
from trireme.engine.homes import Entry, Homes, Progress, finish, silent
from trireme.engine.memory import NOTHING

READ_AHEAD = 4  # entries read at once


class Reader:
    """Reads entries between steps. Staging keeps the last: homes may not change meanwhile."""

    def __init__(self, homes: Homes):
        self.homes, self._staged = homes, ""

    def read(self, entry: Entry, *parts: str) -> Tensor:
        """The entry's home in RAM, or a copy until the next read, of `parts` at their offsets. Raises StoreError."""
        homes = self.homes
        assert not homes.in_place(entry)
        buffer = homes.in_ram(entry)
        if buffer is not None:
            return buffer
        home, shards = homes.home(entry), homes.shards_of(entry, *parts)
        buffer = staging(homes, entry)
        if shards[0].name != self._staged:
            self._staged = ""
            if home is None:
                homes.move(homes.transfer(entry, "verify"), shards, buffer)
            else:
                buffer.copy_(home[: len(buffer)])
            self._staged = shards[0].name
        return buffer

    def low(self, u: int, a: int, b: int) -> Tensor:
        """The low halves of the record of elements a..b, as `read` gives them."""
        entry = Entry("state", u, self.homes.geo.records(u, self.homes.plan.record).index((a, b)))
        lo = self.homes.layout(entry)["lo"]
        return self.read(entry, "low")[lo.offset : lo.offset + lo.nbytes]


class Writer:
    """A context with an entry's buffer, between steps: its home in RAM, or staging, copied home on exit."""

    def __init__(self, homes: Homes, entry: Entry):
        self.homes, self.entry, self.home = homes, entry, homes.home(entry)
        in_ram = homes.in_ram(entry)
        self.buffer = staging(homes, entry) if in_ram is None else in_ram

    def __enter__(self) -> Tensor:
        return self.buffer

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None or self.buffer is self.home or self.homes.in_place(self.entry):
            return
        if self.home is None:
            self.homes.move(self.homes.transfer(self.entry, "write"), self.homes.shards_of(self.entry), self.buffer)
        else:
            self.home[: len(self.buffer)].copy_(self.buffer)


def staging(homes: Homes, entry: Entry) -> Tensor:
    """The host buffer for entries away from RAM."""
    return next(iter(homes.many("host", "staging")), NOTHING)[: homes.layout(entry).span]


def save_to_store(homes: Homes, progress: Progress = silent) -> None:
    """Writes what is on the GPU or in RAM to its shards."""
    reader = Reader(homes)
    for entry in homes.entries(everything=False):
        homes.move(homes.ssd.write, homes.shards_of(entry), reader.read(entry))
        progress(homes.layout(entry).span)


def load_from_store(homes: Homes, progress: Progress = silent, everything: bool = True) -> None:
    """Reads and verifies what is on the GPU or in RAM; with `everything` verifies the rest too.

    Raises StoreError, Damaged among them. On errors, of `progress` too, nothing is in flight.
    """
    homes.blank = False
    coming: deque[tuple[Entry, Tensor, list[Future[None]]]] = deque()

    def arrive() -> None:
        entry, buffer, moving = coming.popleft()
        finish(moving)
        home, span = homes.home(entry), homes.layout(entry).span
        if home is not None and home is not buffer:
            home[:span].copy_(buffer[:span])
        progress(span)

    try:
        for entry, buffer in _places(homes, everything):
            while len(coming) == READ_AHEAD or any(buffer is taken for _, taken, _ in coming):
                arrive()
            coming.append((entry, buffer, homes.start(homes.ssd.verify, homes.shards_of(entry), buffer)))
        while coming:
            arrive()
    finally:
        wait([future for _, _, moving in coming for future in moving])


def _places(homes: Homes, everything: bool) -> Iterator[tuple[Entry, Tensor]]:
    """Each entry with a buffer in RAM: its home, a ring's slot or staging."""
    turns: dict[tuple[What, str], Iterator[Tensor]] = {}
    for entry in homes.entries(everything):
        home = homes.in_ram(entry)
        if home is not None:
            yield entry, home
            continue
        key: tuple[What, str] = ("staging", "")
        if homes.tier(entry) == "ssd":
            key = ("state pool", "") if entry.kind == "state" else ("weights pool", homes.geo.size_class(entry.u))
        yield entry, next(turns.setdefault(key, cycle(homes.many("host", *key))))

"""Homes: where each unit's weights and optimizer state live between uses, and the way there and back.

A home is a buffer on the GPU, a buffer in RAM, or a shard of the store on the SSD. Optimizer state is kept in records
of equal size, so that the ring it streams through has equal slots whatever the size of a unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import cycle

from torch import Tensor

from trireme.engine.buffers import ENDS, buffers
from trireme.engine.geometry import Geometry
from trireme.engine.lanes import Task
from trireme.engine.memory import Memory, Ring, memory_of
from trireme.engine.plan import Plan
from trireme.models.shapes import HALVES
from trireme.storage.layout import Layout

Progress = Callable[[int], None]  # hears of so many bytes more
Piece = tuple[str, int, int]  # "weights" or "state", unit, record of its state

READ_AHEAD = 4  # pieces under way at once when all are read


def silent(nbytes: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class Shard:
    """A span of the store by name, and where it begins in a buffer that holds the whole piece."""

    name: str
    first: int  # byte
    layout: Layout


class Homes:
    """All buffers of the plan, made at once, and the store where the SSD is home to something (else None)."""

    def __init__(self, geo: Geometry, plan: Plan, memory: Memory, lanes, store=None):
        self.geo, self.plan, self.memory, self.lanes, self.store = geo, plan, memory, lanes, store
        self._made: dict[tuple[str, str], list[Tensor | None]] = {}
        for b in buffers(geo, plan):
            self._made[b.tier, b.key] = memory.alloc(b.tier, b.key, b.nbytes, b.count)
        self.staged: str | None = None  # the shard whose bytes the staging buffer holds for another use
        self.weights: list[Tensor | None] = []
        self.resident: list[Tensor | None] = []
        self.state: list[list[Tensor | None]] = []
        self.gradients: list[Tensor | None] = []
        for u, name in enumerate(geo.names):
            unit = plan.units[u]
            self.weights.append(self.one(unit.weights, f"weights {name}"))
            self.resident.append(self.one("gpu", f"weights {name}"))
            self.state.append(self._split_records(u, self.one(unit.state, f"state {name}")))
            self.gradients.append(self.one("gpu", f"gradient out {name}"))

    def one(self, tier: str, key: str) -> Tensor | None:
        """The single buffer of that name, or None where the plan has none (or in a simulation)."""
        return self._made.get((tier, key), [None])[0]

    def many(self, tier: str, key: str) -> list[Tensor | None]:
        """The equal buffers of that name."""
        return self._made.get((tier, key), [])

    def ring(self, tier: str, key: str) -> Ring:
        """A ring over the buffers of that name."""
        ring = Ring(f"{tier} {key}", self.many(tier, key), self.memory.poison)
        self.memory.rings.append(ring)
        return ring

    def rings(self, tier: str, prefix: str) -> dict[str, Ring]:
        """Rings by size class."""
        return {kind: self.ring(tier, f"{prefix} {kind}") for kind in ("block", *HALVES, *ENDS)}

    def _split_records(self, u: int, buffer: Tensor | None) -> list[Tensor | None]:
        parts, start = [], 0
        for a, b in self.geo.records(u, self.plan.record):
            span = self.geo.state_layout(b - a).span
            parts.append(None if buffer is None else buffer[start : start + span])
            start += span
        return parts

    # ------------------------------------------------ traffic with the store

    def read_weights(self, u: int, buffer: Tensor, after: Sequence[Task]) -> Task:
        return self._io("ssd_read", self.shards_of("weights", u), buffer, after)

    def write_weights(self, u: int, buffer: Tensor, after: Sequence[Task]) -> Task:
        return self._io("ssd_write", self.shards_of("weights", u), buffer, after)

    def read_state(self, u: int, r: int, buffer: Tensor, after: Sequence[Task], *parts: str) -> Task:
        """Reads a record, or some parts of it (Geometry.state_parts), to where they are in the whole."""
        return self._io("state_read", self.shards_of("state", u, r, *parts), buffer, after)

    def write_state(self, u: int, r: int, buffer: Tensor, after: Sequence[Task], *parts: str) -> Task:
        """Writes a record, or some parts of it."""
        return self._io("state_write", self.shards_of("state", u, r, *parts), buffer, after)

    def shards_of(self, kind: str, u: int, r: int = 0, *parts: str) -> list[Shard]:
        """What a unit's weights, or one of its records of state or some parts of it, consist of in the store."""
        if kind == "weights":
            return [Shard(f"weights-{u:05d}", 0, self.geo.weights[u])]
        a, b = self.geo.records(u, self.plan.record)[r]
        found = self.geo.state_parts(b - a)
        return [Shard(f"{part}-{u:05d}-{r:04d}", *found[part]) for part in parts or found]

    def record_layout(self, u: int, r: int) -> Layout:
        a, b = self.geo.records(u, self.plan.record)[r]
        return self.geo.state_layout(b - a)

    def _io(self, lane: str, shards: Sequence[Shard], buffer: Tensor, after: Sequence[Task]) -> Task:
        nbytes, way = sum(shard.layout.span for shard in shards), lane.rpartition("_")[2]
        return self.lanes.run(lane, shards[0].name, lambda: self.move(way, shards, buffer), after, nbytes=nbytes)

    def move(self, way: str, shards: Sequence[Shard], buffer: Tensor) -> None:
        """Reads, verifies or writes shards, from or to their places in `buffer`. Then, also after an error, nothing is
        in flight: the buffer is free, and may go.
        """
        _over(self.begin(way, shards, buffer))

    def begin(self, way: str, shards: Sequence[Shard], buffer: Tensor) -> list[Future]:
        """What `move` waits for. After an error nothing is in flight."""
        move, moving = getattr(self.store, way), []
        try:
            for s in shards:
                moving.append(move(s.name, memory_of(buffer[s.first :], s.layout.span)))
        except BaseException:
            wait(moving)
            raise
        return moving

    # ------------------------------------------------ all of it, for a snapshot

    def shards(self) -> Iterable[tuple[str, Layout]]:
        """(name, layout) of every shard that a snapshot of this run consists of."""
        return ((shard.name, shard.layout) for piece in self._pieces() for shard in self.shards_of(*piece))

    def save_to_store(self, progress: Progress = silent) -> None:
        """Writes every piece whose home is the GPU or RAM into its shards, so that the store is whole."""
        for piece in self._pieces(everything=False):
            with Staged(self, *piece, write=False) as buffer:
                self.move("write", self.shards_of(*piece), buffer)
            progress(self._span(*piece))

    def load_from_store(self, progress: Progress = silent, everything: bool = True) -> None:
        """Reads every piece whose home is the GPU or RAM from its shards: the way back of save_to_store. All bytes are
        compared with their checksums; with `everything` also those that stay on the SSD.

        Raises StoreError, Damaged among them. After that, and where `progress` raises, nothing is in flight.
        """
        coming: deque[tuple[Piece, Tensor, list[Future]]] = deque()

        def arrive() -> None:
            piece, buffer, moving = coming.popleft()
            _over(moving)
            home, span = self._home(*piece), self._span(*piece)
            if home is not None and home is not buffer:
                home[:span].copy_(buffer[:span])
            progress(span)

        self.staged = None
        try:
            for piece, buffer in self._places(everything):
                while len(coming) == READ_AHEAD or any(buffer is taken for _, taken, _ in coming):
                    arrive()
                coming.append((piece, buffer, self.begin("verify", self.shards_of(*piece), buffer)))
            while coming:
                arrive()
        finally:
            wait([future for _, _, moving in coming for future in moving])

    def _places(self, everything: bool) -> Iterable[tuple[Piece, Tensor]]:
        """Each piece, and where in RAM it is read to: its home there, or a buffer that it passes through in a step."""
        turns: dict[str, Iterator[Tensor]] = {}
        for kind, u, r in self._pieces(everything):
            home = self._home(kind, u, r)
            if home is not None and home.device.type == "cpu":
                yield (kind, u, r), home
                continue
            key = "state ring" if kind == "state" else f"weight ring {self.geo.size_class(u)}"
            key = key if home is None else "staging"
            yield (kind, u, r), next(turns.setdefault(key, cycle(self.many("host", key))))

    def nbytes(self, everything: bool = True) -> int:
        """Bytes of everything, or of what has its home on the GPU or in RAM: what a snapshot writes."""
        return sum(self._span(*piece) for piece in self._pieces(everything))

    def _home(self, kind: str, u: int, r: int) -> Tensor | None:
        return self.weights[u] if kind == "weights" else self.state[u][r]

    def _span(self, kind: str, u: int, r: int) -> int:
        return (self.geo.weights[u] if kind == "weights" else self.record_layout(u, r)).span

    def _pieces(self, everything: bool = True) -> Iterable[Piece]:
        """Every piece, or those whose home is the GPU or RAM."""
        for u, unit in enumerate(self.plan.units):
            if everything or unit.weights != "ssd":
                yield "weights", u, 0
            if everything or unit.state != "ssd":
                yield from (("state", u, r) for r in range(len(self.state[u])))


def _over(moving: Sequence[Future]) -> None:
    """Waits for all of them; the first error is raised."""
    wait(moving)
    for future in moving:
        future.result()


class Staged:
    """A piece of state, or some parts of one, as a host buffer for the time of a `with`: the home in RAM, else a copy.

    On entry the piece is there to be read (unless it is about to be written whole: `write`); with `write` it is in its
    home on exit. With `reuse` the copy that the last one left may serve again, for many tensors of a piece in a row.
    Used between steps, when all lanes are idle.
    """

    def __init__(self, homes: Homes, kind: str, u: int, r: int = 0, *parts: str, write=True, reuse=False):
        self.homes, self.write, self.reuse = homes, write, reuse
        unit = homes.plan.units[u]
        self.tier = unit.weights if kind == "weights" else unit.state
        self.home = homes.weights[u] if kind == "weights" else homes.state[u][r]
        self.shards = homes.shards_of(kind, u, r, *parts)
        self.span = self.shards[-1].first + self.shards[-1].layout.span

    def __enter__(self) -> Tensor:
        if self.home is not None and self.home.device.type == "cpu":
            self.buffer = self.home
            return self.buffer
        name = self.shards[0].name
        self.buffer = self.homes.one("host", "staging")[: self.span]
        staged, self.homes.staged = self.homes.staged, name if self.reuse else None
        if not self.write and not (self.reuse and staged == name):
            if self.tier == "gpu":
                self.buffer.copy_(self.home[: self.span])
            else:
                self.homes.move("verify", self.shards, self.buffer)
        return self.buffer

    def __exit__(self, kind, error, trace) -> None:
        if error is None and self.write and self.buffer is not self.home:
            if self.tier == "gpu":
                self.home[: self.span].copy_(self.buffer)
            else:
                self.homes.move("write", self.shards, self.buffer)
        self.buffer = None

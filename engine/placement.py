"""Where weights and optimizer state are stored between uses, and the transfers to and from there.

Records of state have equal sizes: one ring serves units of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from trireme.engine.buffers import ENDS, What, buffers
from trireme.engine.geometry import SLICE, Geometry
from trireme.engine.memory import NOTHING, Memory, Pool, memory_of
from trireme.engine.plan import Plan, Tier
from trireme.engine.queues.names import LATER, READS, numbered
from trireme.engine.queues.task import Kind, Queues, Task
from trireme.models.sizes.shapes import HALVES
from trireme.storage.devices import Device
from trireme.storage.layout import Layout
from trireme.storage.scratch import Scratch as OnDrives

Progress = Callable[[int], None]  # (bytes just moved)
Transfer = Callable[[str, memoryview], "Future[None]"]  # (shard's name, bytes)
Way = Literal["read", "verify", "write"]


def silent(nbytes: int) -> None:
    """No progress."""


class Store(Protocol):
    """Shards on the SSD, by name."""

    def read(self, name: str, buffer: memoryview, later: bool = False) -> Future[None]:
        """`later`: no task waits for it yet; requests of others go first."""
        ...

    def verify(self, name: str, buffer: memoryview) -> Future[None]:
        """Reads and compares with the checksum."""
        ...

    def write(self, name: str, buffer: memoryview, later: bool = False) -> Future[None]: ...


class Scratch(Protocol):
    """Bytes by offset on the SSD, for one run."""

    def read(self, offset: int, buffer: memoryview, later: bool = False) -> Future[None]:
        """`later` as of Store."""
        ...

    def write(self, offset: int, buffer: memoryview, later: bool = False) -> Future[None]: ...

    def close(self) -> None: ...


class Space:
    """Scratch space on the SSD: parts are reserved while the engine is built, then all is claimed at once."""

    def __init__(self, scratch: Scratch | None = None):
        self.scratch, self.nbytes = scratch, 0

    def reserve(self, nbytes: int) -> int:
        """The offset of a part."""
        self.nbytes += nbytes
        return self.nbytes - nbytes

    def claim(self, devices: Sequence[Device]) -> None:
        """Raises StoreError."""
        if self.nbytes:
            self.scratch = OnDrives(devices, self.nbytes)

    def claimed(self) -> Scratch:
        assert self.scratch is not None, "the plan uses scratch space on the SSD, and none was claimed"
        return self.scratch

    def read(self, offset: int, buffer: memoryview, later: bool = False) -> None:
        self.claimed().read(offset, buffer, later).result()

    def write(self, offset: int, buffer: memoryview, later: bool = False) -> None:
        self.claimed().write(offset, buffer, later).result()

    def close(self) -> None:
        if self.scratch is not None:
            self.scratch.close()


class Piece(NamedTuple):
    """Bytes of a tensor: where a buffer in RAM has them, where the layout wants them."""

    first: int
    offset: int
    nbytes: int


class BaseFiles(Protocol):
    """Frozen weights in the user's checkpoint."""

    def read(self, u: int, buffer: memoryview) -> Future[None]: ...

    def pieces(self, u: int) -> Sequence[Piece]:
        """Of unit u, as `read` leaves it."""
        ...

    def close(self) -> None: ...


class Entry(NamedTuple):
    """A unit's trained or frozen (`base`) weights, also of a slice of experts, or record `r` of its state."""

    kind: Literal["weights", "base", "state"]
    u: int
    r: int = 0


@dataclass(frozen=True)
class Stored:
    """A shard, and its first byte in its entry's buffer."""

    entry: Entry
    name: str
    first: int
    layout: Layout


def stored(geo: Geometry, record: int, entry: Entry, *parts: str) -> list[Stored]:
    """The shards of an entry, or of these parts of a record (Geometry.state_parts); their names are any host's."""
    if entry.kind != "state":
        return [Stored(entry, f"{entry.kind}-{entry.u:05d}", 0, _by_names(geo, entry))]
    a, b = geo.records(entry.u, record)[entry.r]
    found, r = geo.state_parts(b - a), a // record  # of all hosts' records
    return [Stored(entry, f"{part}-{entry.u:05d}-{r:04d}", *found[part]) for part in parts or found]


def entries(geo: Geometry, record: int) -> Iterator[Entry]:
    """Trained weights and state, unit by unit."""
    for u in range(geo.n_units):
        if geo.numel[u]:
            yield Entry("weights", u)
        yield from (Entry("state", u, r) for r in range(len(geo.records(u, record))))


def _by_names(geo: Geometry, entry: Entry) -> Layout:
    return (geo.stored if entry.kind == "weights" else geo.stored_base)[entry.u]


class Placement:
    """The plan's buffers, made at once, and the store."""

    def __init__(
        self,
        geo: Geometry,
        plan: Plan,
        memory: Memory,
        queues: Queues,
        store: Store | None = None,
        space: Space | None = None,
        files: BaseFiles | None = None,
    ):
        """`files`: of frozen weights on the SSD; without them, they are copied to the scratch space."""
        self.geo, self.plan, self.memory, self.queues = geo, plan, memory, queues
        self.store, self.space, self.files = store, space or Space(), files
        self.blank = True  # buffers in RAM are as the system gives memory: zero
        based = range(len(geo.base))
        tiers = [plan.units[geo.unit_of(v)].base for v in based]
        copied = [v for v in based if tiers[v] == "ssd" and files is None]
        self.base_offset = {u: self.space.reserve(geo.base[u].span) for u in copied}  # in the scratch space
        planned = list(buffers(geo, plan))
        self._made = {
            (b.tier, b.what, b.of, b.gpu): memory.alloc(b.tier, b.name, b.nbytes, b.count, b.gpu) for b in planned
        }
        self.staging = sum(b.nbytes for b in planned if b.what == "staging")
        units = range(geo.n_units)
        self.weights = [self.of(u, plan.units[u].weights, "weights") for u in units]
        self.base = [self.of(v, tiers[v], "base") for v in based]
        self.state = [self._split_records(u, self.of(u, plan.units[u].state, "state")) for u in units]
        self.gradients = [self.of(u, "gpu", "rounded") for u in units]

    def of(self, u: int, tier: Tier, what: What) -> Tensor:
        """Unit u's buffer; empty if absent or simulated."""
        name = self.geo.base_names[u] if what == "base" else self.geo.names[u]
        return next(iter(self.many(tier, what, name, self.plan.units[self.geo.unit_of(u)].gpu)), NOTHING)

    def many(self, tier: Tier, what: What, of: str = "", gpu: int = 0) -> list[Tensor]:
        """Equal buffers in RAM or of a GPU, as in buffers.py; none where the plan needs none."""
        return self._made.get((tier, what, of, gpu if tier == "gpu" else 0), [])

    def pool(self, tier: Tier, what: What, of: str = "", gpu: int = 0, part: slice | None = None) -> Pool:
        """A new pool of equal buffers, or of a part of them."""
        tensors = self.many(tier, what, of, gpu)
        pool = Pool(
            f"{numbered(tier, gpu)} {what} {of}".rstrip(), tensors[part] if part else tensors, self.memory.poison
        )
        self.memory.pools.append(pool)
        return pool

    def gpu_pools(self, what: What, of: str = "") -> list[Pool]:
        """A pool of each GPU."""
        return [self.pool("gpu", what, of, gpu) for gpu in range(self.plan.gpus)]

    def pools(self, tier: Tier, what: What, gpu: int = 0) -> dict[str, Pool]:
        """Pools by size class."""
        return {kind: self.pool(tier, what, kind, gpu) for kind in ("block", *HALVES, SLICE, *ENDS)}

    def _split_records(self, u: int, buffer: Tensor) -> list[Tensor]:
        records, start = [], 0
        for a, b in self.geo.records(u, self.plan.record):
            span = self.geo.state_layout(b - a).span
            records.append(buffer[start : start + span])
            start += span
        return records

    # ------------------------------------------------ entries

    def tier(self, entry: Entry) -> Tier:
        unit = self.plan.units[self.geo.unit_of(entry.u)]
        return {"weights": unit.weights, "base": unit.base, "state": unit.state}[entry.kind]

    def stored(self, entry: Entry) -> Tensor | None:
        """Its buffer; None on the SSD."""
        if self.tier(entry) == "ssd":
            return None
        if entry.kind == "state":
            return self.state[entry.u][entry.r]
        return (self.weights if entry.kind == "weights" else self.base)[entry.u]

    def in_ram(self, entry: Entry) -> Tensor | None:
        """Its buffer if the CPU can address it; in a simulation not that of a GPU."""
        stored = self.stored(entry)
        away = stored is None or stored.device.type != "cpu" or (self.queues.simulated and self.tier(entry) == "gpu")
        return None if away else stored

    def in_place(self, entry: Entry) -> bool:
        """Whether an entry is read from the user's checkpoint, and written nowhere."""
        return entry.kind == "base" and self.files is not None and self.tier(entry) == "ssd"

    def pieces(self, entry: Entry) -> Sequence[Piece]:
        """Of an entry in a host slot."""
        if self.files is not None and self.in_place(entry):
            return self.files.pieces(entry.u)
        return (Piece(0, 0, self.layout(entry).span),)

    def shards_of(self, entry: Entry, *parts: str) -> list[Stored]:
        """Of an entry, or of these parts of a record (Geometry.state_parts)."""
        return stored(self.geo, self.plan.record, entry, *parts)

    def layout(self, entry: Entry) -> Layout:
        """Of the entry's bytes, weights by a checkpoint's names."""
        if entry.kind != "state":
            return _by_names(self.geo, entry)
        a, b = self.geo.records(entry.u, self.plan.record)[entry.r]
        return self.geo.state_layout(b - a)

    def entries(self, everything: bool = True) -> Iterator[Entry]:
        """A snapshot's entries, or those on the GPU or in RAM; frozen weights come from the checkpoint."""
        return (e for e in entries(self.geo, self.plan.record) if everything or self.tier(e) != "ssd")

    def nbytes(self, everything: bool = True) -> int:
        """Bytes of `entries`."""
        return sum(self.layout(entry).span for entry in self.entries(everything))

    @property
    def frozen_bytes(self) -> int:
        return sum(layout.span for layout in self.geo.base)

    def shards(self) -> Iterator[Stored]:
        """All shards of a snapshot."""
        return (shard for entry in self.entries() for shard in self.shards_of(entry))

    # ------------------------------------------------ traffic in a step

    def read_weights(self, entry: Entry, buffer: Tensor, after: Sequence[Task]) -> Task:
        files, nbytes = self.files, self.layout(entry).span
        if files is None or not self.in_place(entry):
            return self._io("ssd_read", "weights", self.label(entry), self.shards_of(entry), buffer, after)

        def io() -> None:
            files.read(entry.u, memory_of(buffer, self.geo.base_room[entry.u])).result()

        return self.queues.run("ssd_read", "weights", self.label(entry), io, after, nbytes=nbytes)

    def label(self, entry: Entry) -> str:
        """Label of its tasks."""
        return f"{self.geo.base_names[entry.u]} base" if entry.kind == "base" else self.geo.names[entry.u]

    def write_weights(self, u: int, buffer: Tensor, after: Sequence[Task]) -> Task:
        return self._io("ssd_write", "weights", self.geo.names[u], self.shards_of(Entry("weights", u)), buffer, after)

    def read_state(self, u: int, r: int, buffer: Tensor, after: Sequence[Task], *parts: str) -> Task:
        """Reads a record or these parts, to their offsets."""
        shards = self.shards_of(Entry("state", u, r), *parts)
        return self._io("state_read", "state", " ".join((self.geo.names[u], str(r), *parts)), shards, buffer, after)

    def write_state(self, u: int, r: int, buffer: Tensor, after: Sequence[Task], *parts: str) -> Task:
        """Writes a record or these parts."""
        shards = self.shards_of(Entry("state", u, r), *parts)
        return self._io("state_write", "state", " ".join((self.geo.names[u], str(r), *parts)), shards, buffer, after)

    def write(self, entry: Entry, buffer: Tensor, after: Sequence[Task]) -> Task:
        """Writes weights or a record."""
        given = buffer, after
        return (
            self.write_state(entry.u, entry.r, *given) if entry.kind == "state" else self.write_weights(entry.u, *given)
        )

    def fetch(self, entry: Entry, buffer: Tensor, after: Sequence[Task], *parts: str) -> Task:
        """Brings to RAM, between steps, these parts of what is on a GPU, or on the SSD, compared with checksums."""
        stored, shards, state = self.stored(entry), self.shards_of(entry, *parts), entry.kind == "state"
        nbytes = sum(shard.layout.span for shard in shards)

        def io() -> None:
            if stored is None:
                self.move(self.transfer(entry, "verify"), shards, buffer)
                return
            for part in (slice(shard.first, shard.first + shard.layout.span) for shard in shards):
                buffer[part].copy_(stored[part], non_blocking=True)

        queue = "state_read" if state else "ssd_read"
        if stored is not None:
            queue = numbered("d2h", self.plan.units[self.geo.unit_of(entry.u)].gpu)
        return self.queues.run(queue, "state" if state else "weights", self.label(entry), io, after, nbytes=nbytes)

    def _io(
        self, queue: str, kind: Kind, of: str, shards: Sequence[Stored], buffer: Tensor, after: Sequence[Task]
    ) -> Task:
        def io() -> None:
            way: Way = "read" if queue in READS else "write"
            self.move(self.transfer(shards[0].entry, way, later=queue in LATER), shards, buffer)

        return self.queues.run(queue, kind, of, io, after, nbytes=sum(shard.layout.span for shard in shards))

    @property
    def ssd(self) -> Store:
        assert self.store is not None, "the plan uses the SSD, and the engine was built without a store"
        return self.store

    def transfer(self, entry: Entry, way: Way, later: bool = False) -> Transfer:
        """The method that moves an entry's shards: the store's or, for frozen weights, the scratch space's.

        `later`: no task waits for it yet.
        """
        if entry.kind != "base":
            if way == "verify":
                return self.ssd.verify
            return partial(self.ssd.write if way == "write" else self.ssd.read, later=later)
        scratch, offset = self.space.claimed(), self.base_offset[entry.u]
        return lambda _, buffer: (scratch.write if way == "write" else scratch.read)(offset, buffer)

    def move(self, transfer: Transfer, shards: Sequence[Stored], buffer: Tensor) -> None:
        """Moves shards from or to their offsets in `buffer`. Even on errors nothing is in flight afterwards."""
        finish(self.start(transfer, shards, buffer))

    def start(self, transfer: Transfer, shards: Sequence[Stored], buffer: Tensor) -> list[Future[None]]:
        """Begins as `move`; on errors nothing is in flight."""
        moving: list[Future[None]] = []
        try:
            for s in shards:
                moving.append(transfer(s.name, memory_of(buffer[s.first :], s.layout.span)))
        except BaseException:
            wait(moving)
            raise
        return moving


def finish(moving: Iterable[Future[None]]) -> None:
    """Waits for all; raises the first error."""
    moving = list(moving)
    wait(moving)
    for future in moving:
        future.result()

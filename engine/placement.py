"""Where weights and optimizer state are stored between uses, and the transfers to and from there.

Optimizer state is divided in records of equal size, so one pool of buffers serves units of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from trireme.engine.buffers import ENDS, Role, buffers
from trireme.engine.geometry import SLICE, Geometry
from trireme.engine.home import DriveHome, Home, OnDrive
from trireme.engine.memory import NOTHING, Buffer, Memory, Pool, memory_of
from trireme.engine.plan import Plan, Tier
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Kind, Queues
from trireme.models.sizes.shapes import HALVES
from trireme.storage.layout import Layout
from trireme.storage.scratch import Scratch
from trireme.storage.store import Store

Progress = Callable[[int], None]  # (bytes just moved)
Access = Literal["read", "verify", "write"]


def silent(nbytes: int) -> None:
    """A Progress that shows nothing."""


def in_scratch(scratch: Scratch, nbytes: int, later: bool = False) -> OnDrive:
    """Reserves bytes in the scratch space. A part is (first byte, end). `later`: no task waits for them yet."""
    offset = scratch.reserve(nbytes)

    def place(buffer: Tensor, part: tuple[int, int] | None) -> tuple[int, memoryview]:
        first, end = part or (0, nbytes)
        return offset + first, memory_of(buffer, min(len(buffer), end - first))

    return OnDrive(
        lambda part: part[1] - part[0] if part else nbytes,
        lambda buffer, part: scratch.read(*place(buffer, part), later).result(),
        lambda buffer, part: scratch.write(*place(buffer, part), later).result(),
    )


class Piece(NamedTuple):
    """Some bytes of a tensor: their first byte in a buffer as it is read, and their offset in the layout."""

    first: int
    offset: int
    nbytes: int


class BaseFiles(Protocol):
    """Frozen weights that are read from the user's checkpoint."""

    def read(self, u: int, buffer: memoryview) -> Future[None]: ...

    def pieces(self, u: int) -> Sequence[Piece]:
        """Where `read` puts the bytes of unit u."""
        ...

    def close(self) -> None: ...


class Entry(NamedTuple):
    """What is stored as one: the trained (`weights`) or frozen (`base`) weights of a unit, or record `r` of its state.

    The unit of a `base` entry may be a slice of experts.
    """

    kind: Literal["weights", "base", "state"]
    u: int
    r: int = 0

    @property
    def content(self) -> Kind:
        """The kind of tasks that move it."""
        return "state" if self.kind == "state" else "weights"

    @property
    def queue(self) -> str:
        """The queue of its reads and writes, without their direction."""
        return "state" if self.kind == "state" else "ssd"


@dataclass(frozen=True)
class Stored:
    """A shard of an entry, and its first byte in the entry's buffer."""

    entry: Entry
    name: str
    first: int
    layout: Layout


def stored(geo: Geometry, record: int, entry: Entry, *parts: str) -> list[Stored]:
    """The shards of an entry. `parts`: of a record only these (Geometry.state_parts). Names are the same on all
    hosts.
    """
    if entry.kind != "state":
        return [Stored(entry, f"{entry.kind}-{entry.u:05d}", 0, _by_names(geo, entry))]
    a, b = geo.records(entry.u, record)[entry.r]
    layouts, r = geo.state_parts(b - a), a // record  # of all hosts' records
    return [Stored(entry, f"{part}-{entry.u:05d}-{r:04d}", *layouts[part]) for part in parts or layouts]


def entries(geo: Geometry, record: int) -> Iterator[Entry]:
    """The entries of a snapshot: trained weights and state, unit by unit."""
    for u in range(geo.n_units):
        if geo.weights[u].tensors:
            yield Entry("weights", u)
        yield from (Entry("state", u, r) for r in range(len(geo.records(u, record))))


def _by_names(geo: Geometry, entry: Entry) -> Layout:
    """The layout of weights by the names that tensors have in a checkpoint."""
    return (geo.stored if entry.kind == "weights" else geo.stored_base)[entry.u]


class Placement:
    """All buffers of a plan, allocated at once, and what reads and writes entries where the plan stores them."""

    def __init__(
        self,
        geo: Geometry,
        plan: Plan,
        memory: Memory,
        queues: Queues,
        store: Store | None,
        scratch: Scratch,
        files: BaseFiles | None,
    ):
        """`files`: reads frozen weights on the SSD from the checkpoint; None: they are copied to the scratch space."""
        self.geo, self.plan, self.memory, self.queues = geo, plan, memory, queues
        self.store, self.scratch, self.files = store, scratch, files
        self.blank = True  # buffers in RAM are as the system gives memory: zero
        self.updates = 0  # handed over so far
        base_units = range(len(geo.base))
        tiers = [plan.units[geo.unit_of(v)].base for v in base_units]
        copied = [v for v in base_units if tiers[v] == "ssd" and files is None]
        self.base_offset = {u: scratch.reserve(geo.base[u].span) for u in copied}  # in the scratch space
        planned = list(buffers(geo, plan))
        self._buffers = {
            (b.tier, b.role, b.key, b.gpu): memory.alloc(b.tier, b.name, b.nbytes, b.count, b.gpu) for b in planned
        }
        self.staging = sum(b.nbytes for b in planned if b.role == "staging")
        units = range(geo.n_units)
        self.weights = [self.buffer(u, plan.units[u].weights, "weights") for u in units]
        self.base = [self.buffer(v, tiers[v], "base") for v in base_units]
        self.state = [self._split_records(u, self.buffer(u, plan.units[u].state, "state")) for u in units]

    def buffer(self, u: int, tier: Tier, role: Role) -> Tensor:
        """Unit u's buffer, on its GPU; empty if the plan has none, and in a simulation."""
        name = self.geo.base_names[u] if role == "base" else self.geo.names[u]
        gpu = self.plan.units[self.geo.unit_of(u)].gpu
        return next(iter(self.many(tier, role, name, gpu)), NOTHING)

    def many(self, tier: Tier, role: Role, key: str = "", gpu: int = 0) -> list[Tensor]:
        """Equal buffers, by the fields of buffers.Buffers; empty if the plan has none."""
        return self._buffers.get((tier, role, key, gpu if tier == "gpu" else 0), [])

    def pool(self, tier: Tier, role: Role, key: str = "", gpu: int = 0, part: slice | None = None) -> Pool:
        """A new pool of equal buffers. `part`: of only some of them."""
        tensors = self.many(tier, role, key, gpu)
        pool = self.memory.make_pool(f"{numbered(tier, gpu)} {role} {key}".rstrip(), tensors[part] if part else tensors)
        self.memory.pools.append(pool)
        return pool

    def gpu_pools(self, role: Role, key: str = "") -> list[Pool]:
        """A pool on each GPU."""
        return [self.pool("gpu", role, key, gpu) for gpu in range(self.plan.gpus)]

    def pools(self, tier: Tier, role: Role, gpu: int = 0) -> dict[str, Pool]:
        """Pools by size class."""
        return {kind: self.pool(tier, role, kind, gpu) for kind in ("block", *HALVES, SLICE, *ENDS)}

    def _split_records(self, u: int, buffer: Tensor) -> list[Tensor]:
        records, start = [], 0
        for a, b in self.geo.records(u, self.plan.record):
            span = self.geo.state_layout(b - a).span
            records.append(buffer[start : start + span])
            start += span
        return records

    # ------------------------------------------------ entries

    def tier(self, entry: Entry) -> Tier:
        """Where the plan stores an entry."""
        unit = self.plan.units[self.geo.unit_of(entry.u)]
        return {"weights": unit.weights, "base": unit.base, "state": unit.state}[entry.kind]

    def stored(self, entry: Entry) -> Tensor | None:
        """The buffer in which an entry is stored; None on the SSD."""
        if self.tier(entry) == "ssd":
            return None
        if entry.kind == "state":
            return self.state[entry.u][entry.r]
        return (self.weights if entry.kind == "weights" else self.base)[entry.u]

    def in_ram(self, entry: Entry) -> Tensor | None:
        """The buffer in which an entry is stored if the CPU can address it, else None."""
        stored = self.stored(entry)
        remote = stored is None or stored.device.type != "cpu" or (self.queues.simulated and self.tier(entry) == "gpu")
        return None if remote else stored

    def in_place(self, entry: Entry) -> bool:
        """Whether an entry is read from the user's checkpoint and never written."""
        return entry.kind == "base" and self.files is not None and self.tier(entry) == "ssd"

    def pieces(self, entry: Entry) -> Sequence[Piece]:
        """Where a read to a buffer in RAM puts the bytes of an entry."""
        if self.files is not None and self.in_place(entry):
            return self.files.pieces(entry.u)
        return (Piece(0, 0, self.layout(entry).span),)

    def shards_of(self, entry: Entry, *parts: str) -> list[Stored]:
        """The shards of an entry. `parts`: of a record only these (Geometry.state_parts)."""
        return stored(self.geo, self.plan.record, entry, *parts)

    def layout(self, entry: Entry) -> Layout:
        """The layout of an entry's bytes. Weights have the names of a checkpoint."""
        if entry.kind != "state":
            return _by_names(self.geo, entry)
        a, b = self.geo.records(entry.u, self.plan.record)[entry.r]
        return self.geo.state_layout(b - a)

    def entries(self, everything: bool = True) -> Iterator[Entry]:
        """The entries of a snapshot; without `everything` only those on GPUs or in RAM. Frozen weights are none of
        them.
        """
        return (e for e in entries(self.geo, self.plan.record) if everything or self.tier(e) != "ssd")

    def nbytes(self, everything: bool = True) -> int:
        """Bytes of `entries`."""
        return sum(self.layout(entry).span for entry in self.entries(everything))

    @property
    def frozen_bytes(self) -> int:
        return sum(layout.span for layout in self.geo.base)

    def shards(self) -> Iterator[Stored]:
        """The shards of a snapshot."""
        return (shard for entry in self.entries() for shard in self.shards_of(entry))

    # ------------------------------------------------ traffic in a step

    def home(self, entry: Entry, pool: Pool | None = None) -> Home:
        """Where the plan stores an entry. `pool`: of buffers in RAM to reach the SSD by."""
        label, kind, queue = self.label(entry), entry.content, entry.queue
        if pool is None:
            stored = self.stored(entry)
            assert stored is not None, f"{label} is on the SSD"
            return Home(self.queues, kind, label, Buffer(stored))
        drive = self._in_checkpoint(entry, self.files) if self.files and self.in_place(entry) else self._in_store(entry)
        return DriveHome(self.queues, kind, label, pool, drive, queue)

    def _in_store(self, entry: Entry) -> OnDrive:
        """An entry's shards; of a record, a part is the names of its parts (Geometry.state_parts)."""
        shards = cache(lambda part: self.shards_of(entry, *part or ()))

        def move(access: Access, buffer: Tensor, part: tuple[str, ...] | None) -> None:
            self.move(access, shards(part), buffer)

        nbytes = cache(lambda part: sum(shard.layout.span for shard in shards(part)))
        return OnDrive(nbytes, partial(move, "read"), partial(move, "write"))

    def _in_checkpoint(self, entry: Entry, files: BaseFiles) -> OnDrive:
        """Frozen weights in the user's files, which are never written."""
        span, room = self.layout(entry).span, self.geo.base_room[entry.u]
        read = lambda buffer, _: files.read(entry.u, memory_of(buffer, room)).result()
        return OnDrive(lambda _: span, read, _refuse)

    def label(self, entry: Entry) -> str:
        """The name of an entry in the names of its tasks."""
        if entry.kind == "base":
            return f"{self.geo.base_names[entry.u]} base"
        return self.geo.names[entry.u] + (f" {entry.r}" if entry.kind == "state" else "")

    def move(self, access: Access, shards: Sequence[Stored], buffer: Tensor) -> None:
        """As `start`, and waits. Also after an error nothing is in flight."""
        finish(self.start(access, shards, buffer))

    def start(self, access: Access, shards: Sequence[Stored], buffer: Tensor) -> list[Future[None]]:
        """Starts to move shards from or to their offsets in `buffer`; those of frozen weights are in the scratch space.
        State comes later than weights, as no task waits for it. After an error nothing is in flight.
        """
        futures: list[Future[None]] = []
        try:
            for s in shards:
                futures.append(self._start(access, s, memory_of(buffer[s.first :], s.layout.span)))
        except BaseException:
            wait(futures)
            raise
        return futures

    def _start(self, access: Access, shard: Stored, memory: memoryview) -> Future[None]:
        if shard.entry.kind == "base":
            move = self.scratch.write if access == "write" else self.scratch.read
            return move(self.base_offset[shard.entry.u], memory)
        assert self.store is not None, "the plan uses the SSD, and the engine was built without a store"
        request = {"read": self.store.read, "verify": self.store.verify, "write": self.store.write}[access]
        return request(shard.name, memory, shard.entry.kind == "state")


def _refuse(buffer: Tensor, part: object) -> None:  # noqa: ARG001
    raise AssertionError("the user's checkpoint is never written")


def finish(futures: Iterable[Future[None]]) -> None:
    """Waits for all futures, then raises the first error."""
    futures = list(futures)
    wait(futures)
    for future in futures:
        future.result()

"""Memory of a step: buffers allocated before the first step, pools of equal buffers, prefetching, hard limits.

Buffers in RAM are anonymous mappings, on 2 MiB pages where the system grants them, registered with CUDA and aligned for
O_DIRECT. torch's pinned allocator would round sizes up to powers of two, and never give memory back.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import get_ident
from typing import Protocol

import torch
from torch import Tensor

from trireme.engine.amounts import gib
from trireme.engine.plan import DoesNotFit, Limits
from trireme.engine.queues.task import Kind, Queues, Task
from trireme.storage.layout import Layout, round_up

DTYPE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # bits
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
HUGE_PAGE = 2 << 20
NOTHING = torch.empty(0, dtype=torch.uint8)  # absent or simulated


def views(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    """Tensors of a layout as views of a flat uint8 buffer, by name."""
    return {t.name: buffer[t.offset : t.offset + t.nbytes].view(DTYPE[t.dtype]).view(t.shape) for t in layout.tensors}


def flat(buffer: Tensor, dtype: str, numel: int) -> Tensor:
    """The first `numel` elements of a uint8 buffer, flat."""
    real = DTYPE[dtype]
    return buffer[: numel * real.itemsize].view(real)


def memory_of(buffer: Tensor, nbytes: int) -> memoryview:
    """The first `nbytes` of a buffer in RAM, writable. It keeps the memory alive."""
    return memoryview(buffer[:nbytes].numpy().data)


class Buffer:
    """A range of bytes: of a pool, owned between `acquire` and `free`, or, without a pool, of one user for good.

    The next task that writes it has to come after `ready`. `content`: what a pool's buffer holds, also after it was
    freed.
    """

    __slots__ = ("tensor", "ready", "pool", "owner", "content")

    def __init__(self, tensor: Tensor, pool: Pool | None = None):
        self.tensor, self.pool = tensor, pool
        self.ready: tuple[Task, ...] = ()
        self.owner: str | None = None
        self.content: object | None = None

    def attach(self, task: Task) -> None:
        """As a task's use: the next task that uses it comes after `task`."""
        self.ready = (task,)

    def hold_until(self, task: Task) -> None:
        """The next task that writes it comes after `task`, too."""
        self.ready = (*self.ready, task)

    def free(self, after: Sequence[Task]) -> None:
        """Gives the buffer back: the next task that writes it comes after `after`."""
        if self.pool is None:
            self.ready = tuple(after)
        else:
            self.pool.free(self, after)


def queue_copy(queues: Queues, queue: str, kind: Kind, label: str, source: Buffer, target: Buffer, nbytes: int) -> Task:
    """Queues a copy of the first `nbytes` of a buffer to another; returns its task."""

    def copy() -> None:
        target.tensor[:nbytes].copy_(source.tensor[:nbytes], non_blocking=True)

    return queues.run(queue, kind, label, copy, (*source.ready, *target.ready), nbytes=nbytes)


class Pool:
    """Equal buffers, acquired in the order in which they were freed, by one thread in program order.

    `acquire` never blocks: the buffer's next writer comes after the tasks of its last owner. If no buffer is free, the
    plan is wrong, and `acquire` raises instead of hanging. A free buffer keeps its content until it is acquired for
    other content, or the content is forgotten.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]):
        self.name, self.thread = name, get_ident()
        self.buffers = [Buffer(tensor, self) for tensor in tensors]
        self._free = list(self.buffers)

    @property
    def is_free(self) -> bool:
        """Whether there is a buffer to acquire."""
        return bool(self._free)

    @property
    def owned(self) -> int:
        return len(self.buffers) - len(self._free)

    def acquire(self, owner: str, content: object | None = None) -> Buffer:
        """Returns the free buffer that holds `content`, else the one that was freed first. Raises RuntimeError if none
        is free.
        """
        assert get_ident() == self.thread, f"pool {self.name}: {owner} acquires a buffer in another thread"
        if not self._free:
            owners = ", ".join(str(b.owner) for b in self.buffers)
            raise RuntimeError(
                f"pool {self.name}: {owner} needs a buffer and all {len(self.buffers)} are owned ({owners})"
            )
        places = (i for i, b in enumerate(self._free) if b.content is content)
        buffer = self._free.pop(0 if content is None else next(places, 0))
        if buffer.content is not content:
            self.empty(buffer)
        buffer.owner = owner
        return buffer

    def free(self, buffer: Buffer, after: Sequence[Task]) -> None:
        assert buffer.owner is not None, f"pool {self.name}: a buffer freed twice"
        buffer.owner, buffer.ready = None, tuple(after)
        if buffer.content is None:
            self.empty(buffer)
        self._free.append(buffer)

    def forget(self, content: object) -> None:
        """To be called when `content` has changed: no buffer holds it any more."""
        for buffer in self._free:
            if buffer.content is content:
                self.empty(buffer)

    def empty(self, buffer: Buffer) -> None:
        """The buffer holds nothing any more. Tests fill it with NaN here."""
        buffer.content = None


class Fetched(Protocol):
    """What is copied to the GPU before it is used."""

    @property
    def can_fetch(self) -> bool:
        """Whether there is a buffer for it now."""
        ...

    def fetch(self) -> None:
        """Starts the copy, unless it is there or in flight."""
        ...


class Prefetch:
    """Transfers to GPUs in the order of their use, each as soon as it may come; a GPU's do not wait for another's."""

    def __init__(self) -> None:
        # Of each GPU that has some left, with numbers in the order of all.
        self.queues: list[deque[tuple[int, Fetched]]] = []

    def expect(self, items: Iterable[tuple[int, Fetched]]) -> None:
        """`items`: each with its GPU."""
        assert not self.queues, "what the last pass expects was not used"
        queues = dict[int, deque[tuple[int, Fetched]]]()
        for number, (gpu, item) in enumerate(items):
            queues.setdefault(gpu, deque()).append((number, item))
        self.queues = list(queues.values())
        self.advance()

    def advance(self) -> None:
        """To be called when a buffer was freed."""
        while self.queues and (startable := [queue for queue in self.queues if queue[0][1].can_fetch]):
            first = min(startable, key=lambda queue: queue[0][0])
            _, item = first.popleft()
            if not first:
                self.queues = [queue for queue in self.queues if queue]
            item.fetch()

    def cancel(self) -> None:
        self.queues.clear()


@dataclass(eq=False)
class Memory:
    """Allocates named buffers under limits. On the CPU the tier "gpu" is in RAM, too.

    `simulated`: only counts them. `make_pool`: makes pools, of a name and buffers.
    """

    devices: Sequence[torch.device]  # GPUs
    limits: Limits
    simulated: bool = False
    make_pool: Callable[[str, Sequence[Tensor]], Pool] = Pool
    pinned: bool = True  # register RAM; False after a refusal
    refused: int = 0  # bytes not registered
    table: list[tuple[str, str, int, int, int]] = field(default_factory=list)  # tier, name, bytes each, count, GPU
    allocated: Counter[tuple[str, int]] = field(default_factory=Counter)  # bytes by tier and GPU
    pools: list[Pool] = field(default_factory=list)
    _maps: list[mmap.mmap] = field(default_factory=list)
    _pins: list[weakref.finalize[..., Memory]] = field(default_factory=list)

    def used_bytes(self, tier: str, gpu: int | None = None) -> int:
        """Bytes taken in "ram", or in "gpu": of one GPU, or of the one that has taken most."""
        gpus = range(len(self.devices)) if gpu is None else (gpu,)
        return max(self.allocated[tier, gpu] for gpu in gpus)

    def reserve(self, tier: str, name: str, nbytes: int, count: int = 1, gpu: int = 0) -> None:
        """Counts buffers against a tier's limit without allocating them. Raises DoesNotFit."""
        if nbytes * count == 0:
            return
        limit = self.limits.gpu_bytes(gpu) if tier == "gpu" else self.limits.ram
        total = self.used_bytes(tier, gpu) + nbytes * count
        if total > limit:
            option, memory = ("--gpu-memory", "GPU memory") if tier == "gpu" else ("--ram", "RAM")
            raise DoesNotFit(
                f"{name} needs {gib(nbytes * count)} of {memory}, {gib(limit - self.used_bytes(tier, gpu))} "
                f"of the limit of {gib(limit)} is left. Raise {option} or lower --seq-len or --micro-batch."
            )
        self.table.append((tier, name, nbytes, count, gpu))
        self.allocated[tier, gpu] += nbytes * count

    def preallocate(self, sizes: Sequence[int]) -> None:
        """Has torch take what a plan needs of each GPU in one piece, which buffers and temporaries are then cut from:
        none of it is lost to the rounding of segments, and little to fragments. A refusal is no error.
        """
        torch.cuda.empty_cache()  # what probes left
        for device, nbytes in zip(self.devices, sizes, strict=True):
            with suppress(torch.OutOfMemoryError):
                torch.empty(nbytes * (device.type == "cuda"), dtype=torch.uint8, device=device)

    def alloc(self, tier: str, name: str, nbytes: int, count: int = 1, gpu: int = 0) -> list[Tensor]:
        """Allocates uint8 buffers of `nbytes`, rounded up to 4,096, and in RAM page-aligned. Raises DoesNotFit."""
        nbytes = round_up(nbytes)
        self.reserve(tier, name, nbytes, count, gpu)
        if self.simulated or nbytes == 0:
            return [NOTHING] * count
        cuda = self.devices[0].type == "cuda"
        if cuda and tier == "gpu":
            return list(torch.empty(nbytes * count, dtype=torch.uint8, device=self.devices[gpu]).split(nbytes))
        return list(self._ram_slab(nbytes * count, pin=cuda).split(nbytes))

    def _ram_slab(self, nbytes: int, pin: bool) -> Tensor:
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: no huge ones
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        skip = -base % HUGE_PAGE
        huge_bytes = nbytes // HUGE_PAGE * HUGE_PAGE  # one more would exceed the limit
        _advise(mapping, "MADV_NOHUGEPAGE", 0, len(mapping))
        _advise(mapping, "MADV_HUGEPAGE", skip, huge_bytes)
        _advise(mapping, "MADV_DONTFORK", 0, len(mapping))
        address = base + skip
        if pin and (self.pinned or self.refused):
            self.pinned = self.pinned and _register(address, nbytes, self.devices[0])
            if self.pinned:  # unregister before any way out frees the memory
                self._pins.append(weakref.finalize(self, _unregister, address))
            else:
                self.refused += nbytes
        self._maps.append(mapping)
        return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=skip)

    def owned(self) -> int:
        """The number of pools' buffers in use; zero between steps."""
        return sum(pool.owned for pool in self.pools)

    def close(self) -> None:
        """Unregisters memory from CUDA; it is freed with its last view."""
        for unregister in self._pins:
            unregister()
        self._maps.clear()


def _advise(mapping: mmap.mmap, advice: str, start: int, length: int) -> None:
    """Advises the kernel about a mapping. If it refuses, copies are slower."""
    if hasattr(mmap, advice) and length:
        try:
            mapping.madvise(getattr(mmap, advice), start, length)
        except OSError:
            return


def _register(address: int, nbytes: int, device: torch.device) -> bool:
    """Registers memory with CUDA; returns False if CUDA refuses.

    RLIMIT_MEMLOCK does not limit it. WSL2's driver has a limit that only a refusal shows.
    """
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA keeps the error for the next call: take it here
        torch.zeros(1, device=device)
    return False


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)

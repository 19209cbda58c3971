"""The only allocator of the step: exact buffers made before the first step, rings of equal slots, hard limits.

Host buffers are anonymous mappings on 2 MiB pages where the system grants them, registered with CUDA for copies at the
full rate of the bus, and handed to O_DIRECT as they are. (torch's pinned allocator rounds up to powers of two and never
gives back.)
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trireme.engine.amounts import gib
from trireme.engine.lanes import Task
from trireme.engine.plan import DoesNotFit
from trireme.storage.layout import Layout, round_up

DTYPE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
HUGE_PAGE = 2 << 20
NOTHING = torch.empty(0, dtype=torch.uint8)  # stands for a buffer that the plan does not have, and in a simulation


def views(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    """The tensors of `layout` as views of a flat uint8 buffer, by name."""
    return {t.name: buffer[t.offset : t.offset + t.nbytes].view(DTYPE[t.dtype]).view(t.shape) for t in layout.tensors}


def flat(buffer: Tensor, dtype: str, numel: int) -> Tensor:
    """The first `numel` elements of a uint8 buffer as a flat tensor."""
    real = DTYPE[dtype]
    return buffer[: numel * real.itemsize].view(real)


def memory_of(buffer: Tensor, nbytes: int) -> memoryview:
    """The first `nbytes` of a host buffer as a writable memoryview, which keeps the memory alive."""
    return memoryview(buffer[:nbytes].numpy().data)


class Slot:
    """One buffer of a ring, owned from acquire to release. `ready`: tasks that its next writer comes after."""

    __slots__ = ("ring", "buffer", "owner", "ready")

    def __init__(self, ring: Ring, buffer: Tensor):
        self.ring, self.buffer = ring, buffer
        self.owner: str | None = None
        self.ready: tuple[Task, ...] = ()


Poison = Callable[[Slot], Task]  # fills a released slot with NaN (tests)


@dataclass
class OnGpu:
    """Bytes on the GPU: their buffer, the tasks that readers and writers come after, and the slot if it is a ring's."""

    buffer: Tensor
    ready: tuple[Task, ...]
    slot: Slot | None = None


class Ring:
    """Equal slots, handed out first released first.

    Acquire and release happen in program order on one thread and never block: an acquired slot carries the tasks that
    its last owner had in flight, and its first writer comes after them. No free slot means a wrong plan: an error at
    once, in a simulation too, instead of a hang.
    """

    def __init__(self, name: str, buffers: Sequence[Tensor], poison: Poison | None = None):
        self.name, self.poison = name, poison
        self.free = [Slot(self, b) for b in buffers]
        self.slots = list(self.free)

    def acquire(self, owner: str) -> Slot:
        """A free slot, now owned by `owner`."""
        if not self.free:
            owners = ", ".join(str(s.owner) for s in self.slots)
            raise RuntimeError(f"ring {self.name}: {owner} needs a slot and all {len(self.slots)} are owned ({owners})")
        slot = self.free.pop(0)
        slot.owner = owner
        return slot

    def release(self, slot: Slot, after: Sequence[Task] = ()) -> None:
        """Gives the slot back; its next writer waits for the tasks `after`."""
        assert slot.ring is self, f"ring {self.name}: a slot of ring {slot.ring.name}"
        assert slot.owner is not None, f"ring {self.name}: a slot released twice"
        slot.owner, slot.ready = None, tuple(after)
        if self.poison is not None:
            slot.ready = (self.poison(slot),)
        self.free.append(slot)

    @property
    def owned(self) -> int:
        return len(self.slots) - len(self.free)


@dataclass(eq=False)
class Memory:
    """Allocates named buffers in the gpu and host tiers under hard limits in bytes. On the CPU both tiers are RAM.

    `simulated`: counts alone. `poison` is called with every released slot.
    """

    device: torch.device
    gpu_limit: int
    ram_limit: int
    simulated: bool = False
    poison: Poison | None = None
    pinned: bool = True  # whether host memory is to be registered with CUDA: no more once that was refused
    refused: int = 0  # bytes of host memory that CUDA did not register, although they were to be
    table: list[tuple[str, str, int, int]] = field(default_factory=list)  # tier, name, bytes each, count
    rings: list[Ring] = field(default_factory=list)
    _maps: list[mmap.mmap] = field(default_factory=list)
    _pins: list[weakref.finalize[..., Memory]] = field(default_factory=list)

    def used(self, tier: str) -> int:
        """Bytes reserved or allocated so far in `tier` ("gpu" or "host")."""
        return sum(each * count for t, _, each, count in self.table if t == tier)

    def reserve(self, tier: str, name: str, nbytes: int, count: int = 1) -> None:
        """Counts `count` buffers of `nbytes` against the tier's limit. Raises DoesNotFit with the numbers."""
        if nbytes * count == 0:
            return
        limit = self.gpu_limit if tier == "gpu" else self.ram_limit
        total = self.used(tier) + nbytes * count
        if total > limit:
            option, where = ("--gpu-memory", "GPU memory") if tier == "gpu" else ("--ram", "RAM")
            raise DoesNotFit(
                f"{name} needs {gib(nbytes * count)} of {where}, {gib(limit - self.used(tier))} of the limit of "
                f"{gib(limit)} is left. Raise {option} or lower --seq-len or --micro-batch."
            )
        self.table.append((tier, name, nbytes, count))

    def alloc(self, tier: str, name: str, nbytes: int, count: int = 1) -> list[Tensor]:
        """`count` page-aligned uint8 buffers of `nbytes` (rounded up to 4,096) each."""
        nbytes = round_up(nbytes)
        self.reserve(tier, name, nbytes, count)
        if self.simulated or nbytes == 0:
            return [NOTHING] * count
        on_gpu = tier == "gpu" and self.device.type == "cuda"
        slab = self._gpu_slab(nbytes * count) if on_gpu else self._host_slab(nbytes * count, pin=tier == "host")
        return list(slab.split(nbytes))

    def _gpu_slab(self, nbytes: int) -> Tensor:
        slab = torch.empty(nbytes + 4096, dtype=torch.uint8, device=self.device)
        skip = -slab.data_ptr() % 4096
        return slab[skip : skip + nbytes]

    def _host_slab(self, nbytes: int, pin: bool) -> Tensor:
        room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: no huge pages
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        skip = -base % HUGE_PAGE
        whole = nbytes // HUGE_PAGE * HUGE_PAGE  # a huge page for the rest would take more than was asked for
        _advise(room, "MADV_NOHUGEPAGE", 0, len(room))
        _advise(room, "MADV_HUGEPAGE", skip, whole)
        _advise(room, "MADV_DONTFORK", 0, len(room))
        address = base + skip
        if pin and (self.pinned or self.refused) and self.device.type == "cuda":
            self.pinned = self.pinned and _register(address, nbytes, self.device)
            if self.pinned:  # CUDA must forget the pages before they go, however the memory is let go of
                self._pins.append(weakref.finalize(self, _unregister, address))
            else:
                self.refused += nbytes
        self._maps.append(room)
        return torch.frombuffer(room, dtype=torch.uint8, count=nbytes, offset=skip)

    def describe(self) -> list[str]:
        """The table of all buffers, one line each, and the totals against the limits."""
        lines = [f"{'tier':5} {'buffer':32} {'count':>6} {'each':>11} {'total':>11}"]
        for tier, name, each, count in self.table:
            lines.append(f"{tier:5} {name:32} {count:6} {gib(each):>11} {gib(each * count):>11}")
        for tier, limit in (("gpu", self.gpu_limit), ("host", self.ram_limit)):
            lines.append(f"{tier:5} {'total (limit)':32} {'':6} {gib(self.used(tier)):>11} {gib(limit):>11}")
        return lines

    def owned(self) -> int:
        """Slots that have an owner; zero between steps."""
        return sum(r.owned for r in self.rings)

    def close(self) -> None:
        """Unregisters the pinned mappings; the memory goes when the last view of it does."""
        for unregister in self._pins:
            unregister()
        self._maps.clear()


def _advise(room: mmap.mmap, advice: str, start: int, length: int) -> None:
    """Advice only: where the kernel does not take it, nothing changes but speed."""
    if hasattr(mmap, advice) and length:
        try:
            room.madvise(getattr(mmap, advice), start, length)
        except OSError:
            return


def _register(address: int, nbytes: int, device: torch.device) -> bool:
    """Pins host memory for CUDA; False where the driver refuses.

    RLIMIT_MEMLOCK does not bind it. Under WSL2 the driver has a limit of its own, which nothing tells but a refusal.
    """
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    with suppress(
        RuntimeError
    ):  # CUDA keeps the error for the next call: take it here, so that no later one reports it
        torch.zeros(1, device=device)
    return False


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)

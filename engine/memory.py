"""Memory of a step: exact buffers made before it, rings of equal slots, hard limits.

Host buffers are mappings on 2 MiB pages where granted, registered with CUDA, ready for O_DIRECT: torch's pinned
allocator rounds up to powers of two and never gives back.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trireme.engine.amounts import gib
from trireme.engine.lanes.names import numbered
from trireme.engine.lanes.task import Task
from trireme.engine.plan import DoesNotFit
from trireme.storage.layout import Layout, round_up

DTYPE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
HUGE_PAGE = 2 << 20
NOTHING = torch.empty(0, dtype=torch.uint8)  # absent or simulated


def views(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    """Views of a flat uint8 buffer by name."""
    return {t.name: buffer[t.offset : t.offset + t.nbytes].view(DTYPE[t.dtype]).view(t.shape) for t in layout.tensors}


def flat(buffer: Tensor, dtype: str, numel: int) -> Tensor:
    """A uint8 buffer's first `numel` elements, flat."""
    real = DTYPE[dtype]
    return buffer[: numel * real.itemsize].view(real)


def memory_of(buffer: Tensor, nbytes: int) -> memoryview:
    """A host buffer's first `nbytes`, writable; keeps the memory alive."""
    return memoryview(buffer[:nbytes].numpy().data)


class Slot:
    """A ring's buffer, owned from acquire to release; its next writer comes after `ready`."""

    __slots__ = ("ring", "buffer", "owner", "ready")

    def __init__(self, ring: Ring, buffer: Tensor):
        self.ring, self.buffer = ring, buffer
        self.owner: str | None = None
        self.ready: tuple[Task, ...] = ()


Poison = Callable[[Slot], Task]  # fills a released slot with NaN (tests)


@dataclass
class OnGpu:
    """Bytes on the GPU; readers and writers come after `ready`."""

    buffer: Tensor
    ready: tuple[Task, ...]
    slot: Slot | None = None


class Ring:
    """Equal slots, handed out in order of release, by one thread in program order.

    Never blocks: a slot's next writer comes after its last owner's tasks. No free slot is an error instead of a hang:
    the plan is wrong.
    """

    def __init__(self, name: str, buffers: Sequence[Tensor], poison: Poison | None = None):
        self.name, self.poison = name, poison
        self.free = [Slot(self, b) for b in buffers]
        self.slots = list(self.free)

    def acquire(self, owner: str) -> Slot:
        """Raises RuntimeError without a free slot."""
        if not self.free:
            owners = ", ".join(str(s.owner) for s in self.slots)
            raise RuntimeError(f"ring {self.name}: {owner} needs a slot and all {len(self.slots)} are owned ({owners})")
        slot = self.free.pop(0)
        slot.owner = owner
        return slot

    def release(self, slot: Slot, after: Sequence[Task] = ()) -> None:
        """Frees the slot; its next writer comes after `after`."""
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
    """Named buffers under limits in bytes, of each GPU and of RAM. On the CPU both tiers are RAM.

    `simulated`: counts alone. `poison`: called with released slots.
    """

    device: torch.device
    gpu_limit: int
    ram_limit: int
    simulated: bool = False
    poison: Poison | None = None
    pinned: bool = True  # register host memory; False after a refusal
    refused: int = 0  # bytes not registered
    others: Sequence[torch.device] = ()  # GPUs behind `device`
    table: list[tuple[str, str, int, int, int]] = field(default_factory=list)  # tier, name, bytes each, count, GPU
    rings: list[Ring] = field(default_factory=list)
    _maps: list[mmap.mmap] = field(default_factory=list)
    _pins: list[weakref.finalize[..., Memory]] = field(default_factory=list)

    def used(self, tier: str, gpu: int | None = None) -> int:
        """Bytes taken in "host", or in "gpu" of one or of the fullest."""
        taken = Counter(dict.fromkeys(range(1 + len(self.others)), 0))
        for t, _, each, count, g in self.table:
            taken[g] += each * count * (t == tier)
        return taken[gpu] if gpu is not None else max(taken.values())

    def reserve(self, tier: str, name: str, nbytes: int, count: int = 1, gpu: int = 0) -> None:
        """Counts buffers against the tier's limit. Raises DoesNotFit."""
        if nbytes * count == 0:
            return
        limit = self.gpu_limit if tier == "gpu" else self.ram_limit
        total = self.used(tier, gpu) + nbytes * count
        if total > limit:
            option, where = ("--gpu-memory", "GPU memory") if tier == "gpu" else ("--ram", "RAM")
            raise DoesNotFit(
                f"{name} needs {gib(nbytes * count)} of {where}, {gib(limit - self.used(tier, gpu))} of the limit of "
                f"{gib(limit)} is left. Raise {option} or lower --seq-len or --micro-batch."
            )
        self.table.append((tier, name, nbytes, count, gpu))

    def alloc(self, tier: str, name: str, nbytes: int, count: int = 1, gpu: int = 0) -> list[Tensor]:
        """Page-aligned uint8 buffers of `nbytes`, rounded up to 4,096. Raises DoesNotFit."""
        nbytes = round_up(nbytes)
        self.reserve(tier, name, nbytes, count, gpu)
        if self.simulated or nbytes == 0:
            return [NOTHING] * count
        cuda = tier == "gpu" and self.device.type == "cuda"
        slab = self._gpu_slab(nbytes * count, gpu) if cuda else self._host_slab(nbytes * count, pin=tier == "host")
        return list(slab.split(nbytes))

    def _gpu_slab(self, nbytes: int, gpu: int) -> Tensor:
        slab = torch.empty(nbytes + 4096, dtype=torch.uint8, device=(self.device, *self.others)[gpu])
        skip = -slab.data_ptr() % 4096
        return slab[skip : skip + nbytes]

    def _host_slab(self, nbytes: int, pin: bool) -> Tensor:
        room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: no huge pages
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        skip = -base % HUGE_PAGE
        whole = nbytes // HUGE_PAGE * HUGE_PAGE  # one more would exceed the limit
        _advise(room, "MADV_NOHUGEPAGE", 0, len(room))
        _advise(room, "MADV_HUGEPAGE", skip, whole)
        _advise(room, "MADV_DONTFORK", 0, len(room))
        address = base + skip
        if pin and (self.pinned or self.refused) and self.device.type == "cuda":
            self.pinned = self.pinned and _register(address, nbytes, self.device)
            if self.pinned:  # unregister before any way out frees the memory
                self._pins.append(weakref.finalize(self, _unregister, address))
            else:
                self.refused += nbytes
        self._maps.append(room)
        return torch.frombuffer(room, dtype=torch.uint8, count=nbytes, offset=skip)

    def describe(self) -> list[str]:
        lines = [f"{'tier':5} {'buffer':32} {'count':>6} {'each':>11} {'total':>11}"]
        for tier, name, each, count, gpu in self.table:
            lines.append(f"{numbered(tier, gpu):5} {name:32} {count:6} {gib(each):>11} {gib(each * count):>11}")
        for tier, limit in (("gpu", self.gpu_limit), ("host", self.ram_limit)):
            lines.append(f"{tier:5} {'total (limit)':32} {'':6} {gib(self.used(tier)):>11} {gib(limit):>11}")
        return lines

    def owned(self) -> int:
        """Slots in use; zero between steps."""
        return sum(r.owned for r in self.rings)

    def close(self) -> None:
        """The memory goes with its last view."""
        for unregister in self._pins:
            unregister()
        self._maps.clear()


def _advise(room: mmap.mmap, advice: str, start: int, length: int) -> None:
    """Refusals cost speed alone."""
    if hasattr(mmap, advice) and length:
        try:
            room.madvise(getattr(mmap, advice), start, length)
        except OSError:
            return


def _register(address: int, nbytes: int, device: torch.device) -> bool:
    """Pins host memory; False on a refusal.

    RLIMIT_MEMLOCK does not bind it. WSL2's driver has a limit that only a refusal tells.
    """
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA keeps the error for the next call: take it here
        torch.zeros(1, device=device)
    return False


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)

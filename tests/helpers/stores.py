"""Stores with two weights and one state, on drives that fail when told to, or in memory."""

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from trireme.storage.aio import IO, arena
from trireme.storage.devices import Device, is_direct
from trireme.storage.layout import Layout, pack, sequential
from trireme.storage.scratch import Scratch
from trireme.storage.store import Store

K = 1024
WEIGHTS = pack([[("q", (64, 64)), ("k", (64, 64))], [("up", (96, 64))], [("odd", (33, 7))], [("norm", (65,))]], "BF16")
STATE = sequential([("lo", "I16", (20_001,)), ("m", "F32", (20_001,)), ("v", "F32", (20_001,))])
LAYOUTS = {"block-0": WEIGHTS, "block-1": pack([[("z", (64, 64))], [("y", (9,))]], "BF16"), "block-0.adam": STATE}


class MemoryIO(IO):
    """Files as bytearrays in memory, for tests. `fault(piece)` may wait, raise OSError, or return how much to move."""

    def __init__(self, fault=lambda piece: None, **limits):
        self.fault, self.contents = fault, {}  # contents by path
        super().__init__(**limits)

    def _move(self, piece):
        limit = self.fault(piece)
        data = self.contents.setdefault(piece.file.path, bytearray())
        begin, end = piece.offset, piece.offset + (len(piece.view) if limit is None else limit)
        if piece.write:
            data.extend(bytes(max(0, end - len(data))))
            data[begin:end] = piece.view[: end - begin]
            return end - begin
        found = data[begin:end]
        piece.view[: len(found)] = found
        return len(found)


class OneDrive(Scratch):
    """Store and scratch space of an engine on one slow drive, a piece at a time: requests wait, by class."""

    def __init__(self):
        super().__init__()
        self.io = MemoryIO(lambda piece: time.sleep(1e-5), block=4 * K, depth=1, mixed=1)

    def read(self, at: str | int, buffer: memoryview, later: bool = False) -> Future:
        return self.io.read(*self._place(at), buffer, later=later)

    def write(self, at: str | int, buffer: memoryview, later: bool = False) -> Future:
        return self.io.write(*self._place(at), buffer, later=later)

    verify = read

    def _place(self, at: str | int) -> tuple[SimpleNamespace, int]:
        name, offset = (at, 0) if isinstance(at, str) else ("scratch", at)
        return SimpleNamespace(path=name, direct=False), offset

    def close(self) -> None:
        self.io.close()


class FaultyIO(IO):
    """Real files; `fault(piece)` may raise or wait before each piece is moved."""

    def __init__(self, fault=lambda piece: None, **limits):
        self.fault = fault
        super().__init__(**{"block": 16 * K, "depth": 4, "mixed": 2, **limits})

    def _move(self, piece):
        self.fault(piece)
        return super()._move(piece)


def devices(folder: Path, count: int = 1, **kwargs) -> list[Device]:
    made = []
    for k in range(count):
        path = folder / f"d{k}"
        path.mkdir(exist_ok=True)
        made.append(Device(path, FaultyIO(**kwargs), is_direct(path), 1.0 + k))
    return made


def content(layout: Layout, seed: int) -> memoryview:
    buffer = arena(layout.span)
    np.frombuffer(buffer, np.uint8)[: layout.nbytes] = np.random.default_rng(seed).integers(
        0, 256, layout.nbytes, np.uint8
    )
    return buffer


def create(folder: Path, count: int = 1, keep: int = 1, auxiliary: Path | None = None, **kwargs) -> Store:
    store = Store.create(devices(folder, count, **kwargs), keep, auxiliary)
    for name, layout in LAYOUTS.items():
        store.add(name, layout, weights="adam" not in name)
    return store


def write_all(store: Store, seed: int) -> None:
    buffers = {name: content(shard.layout, seed) for name, shard in store.shards.items()}
    for request in [store.write(name, buffer) for name, buffer in buffers.items()]:
        request.result(60)


def holds(store: Store, seed: int) -> bool:
    for name, shard in store.shards.items():
        got = arena(shard.layout.span)
        store.read(name, got).result(60)
        if got[: shard.layout.nbytes] != content(shard.layout, seed)[: shard.layout.nbytes]:
            return False
    return True


def flip(path: Path, at: int) -> None:
    """Changes a bit of a file's byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)

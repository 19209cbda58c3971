"""What streaming to a real drive leaves in memory."""

import ctypes
import mmap
from pathlib import Path

import pytest

from trireme.storage.aio import IO, address_of, arena
from trireme.storage.devices import Device, is_direct
from trireme.storage.layout import sequential
from trireme.storage.store import Store


def resident(path: Path) -> int:
    """Pages of a file in the page cache."""
    libc, size = ctypes.CDLL(None), path.stat().st_size
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), size) as area:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(address_of(area)), ctypes.c_size_t(size), pages) == 0
        return sum(p & 1 for p in pages)


def test_streaming_leaves_nothing_in_memory(tmp_path):
    """The page cache holds nothing of what was streamed, and the process no more than its buffers."""
    if not is_direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    layout = sequential([("m", "F32", (1 << 20,))])
    with Store.create([Device(tmp_path, IO(1 << 20, 4, 2), True)]) as store:
        buffers = [arena(layout.span) for _ in range(2)]

        def stream():
            for i in range(8):
                store.write(f"u{i}", buffers[i % 2]).result()
                store.read(f"u{i}", buffers[i % 2]).result()

        for i in range(8):
            store.add(f"u{i}", layout)
        stream()
        statm = Path("/proc/self/statm")
        before = int(statm.read_text().split()[1])
        for _ in range(3):
            stream()
        store.commit(1, {})
        assert (int(statm.read_text().split()[1]) - before) * mmap.PAGESIZE < 4 << 20
        assert sum(map(resident, (tmp_path / "files").iterdir())) == 0

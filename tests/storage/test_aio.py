"""Requests move their bytes, check every result, end every future exactly once, and take turns by class."""

import errno
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from stores import MemoryIO

from trireme.storage.aio import (
    BOUND,
    CLASSES,
    HUGE_PAGE,
    IO,
    READ,
    READ_AHEAD,
    WRITE,
    WRITE_BACK,
    File,
    Piece,
    address_of,
    arena,
)
from trireme.storage.devices import is_direct, open_device
from trireme.storage.files import StoreError
from trireme.storage.layout import sequential
from trireme.storage.store import Store

K = 1024
LIMITS = {"block": 16 * K, "depth": 3, "mixed": 2}


def noise(nbytes: int, seed: int = 0) -> memoryview:
    buffer = arena(nbytes)
    np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return buffer


@pytest.fixture(params=[IO, MemoryIO])
def io(request):
    made = request.param(**LIMITS)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path):
    opened = File(tmp_path / "f", is_direct(tmp_path), 512 * K)
    yield opened
    opened.close()


def test_conformance(io: IO, file: File):
    """What is written is read back, at any size and place, many requests at once, both directions together."""
    sizes = [4 * K, 16 * K, 20 * K, 100 * K, 128 * K]
    offsets = [0, 4 * K, 32 * K, 64 * K, 256 * K]
    written = [noise(n, i) for i, n in enumerate(sizes)]
    for request in [io.write(file, at, b) for at, b in zip(offsets, written, strict=True)]:
        assert request.result(60) is None
    read = [arena(n) for n in sizes]
    both = [io.read(file, at, b) for at, b in zip(offsets, read, strict=True)]
    both.append(io.write(file, 400 * K, written[0]))
    for request in both:
        request.result(60)
    assert [bytes(b) for b in read] == [bytes(b) for b in written]


def test_reading_beyond_the_end_is_an_error_unless_it_is_not_needed(io: IO, file: File):
    data = noise(64 * K)
    io.write(file, 0, data).result(60)
    end = 40 * K + 100
    os.ftruncate(file.fd, end)
    if isinstance(io, MemoryIO):
        del io.contents[file.path][end:]
    out = arena(64 * K)
    io.read(file, 0, out, need=end).result(60)
    assert out[:end] == data[:end]
    with pytest.raises(StoreError, match="65536.*/f'") as e:
        io.read(file, 0, out).result(60)
    assert e.value.errno == errno.EIO
    io.read(file, 0, out[: 32 * K]).result(60)  # and the next request is served


def test_a_closed_descriptor_is_an_error_with_name_and_offset(io: IO, tmp_path):
    if isinstance(io, MemoryIO):
        pytest.skip("files in memory have no descriptor")
    file = File(tmp_path / "g", is_direct(tmp_path), 64 * K)
    file.close()
    file.fd = 1 << 20
    with pytest.raises(StoreError, match="16384 bytes.*g") as e:
        io.read(file, 0, arena(64 * K)).result(60)
    assert e.value.errno == errno.EBADF


def test_close_waits_and_refuses_afterwards(io: IO, file: File):
    requests = [io.write(file, 0, noise(256 * K)) for _ in range(4)]
    io.close()
    assert all(r.done() for r in requests)
    for r in requests:
        assert r.exception() is None or r.exception().errno == errno.ECANCELED
    with pytest.raises(StoreError, match="closed"):
        io.read(file, 0, arena(4 * K)).result(60)


@pytest.mark.grid
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENODEV])
def test_a_fault_ends_the_request_and_nothing_else(file: File, number):
    """The future fails once nothing of it is in flight; pieces that had not begun never begin; a retry succeeds."""
    flying, begun, sick = [0], [], [True]
    lock = threading.Lock()

    def fault(piece: Piece):
        with lock:
            flying[0] += 1
            begun.append(piece.offset)
        time.sleep(0.005)
        with lock:
            flying[0] -= 1
        if sick[0] and piece.offset == 16 * K:
            raise OSError(number, os.strerror(number))

    io = MemoryIO(fault, **LIMITS)
    data = noise(512 * K)
    request, other = io.write(file, 0, data), io.write(file, 512 * K, data)
    with pytest.raises(StoreError, match="writing 16384 bytes at 16384") as e:
        request.result(60)
    assert e.value.errno == number
    assert e.value.filename == file.path
    other.result(60)
    assert len([o for o in begun if o < 512 * K]) < 8
    sick[0] = False
    io.write(file, 0, data).result(60)
    out = arena(512 * K)
    io.read(file, 0, out).result(60)
    assert out == data
    io.close()


def test_short_transfers_are_completed(file: File):
    random = np.random.default_rng(0)

    def fault(piece: Piece):
        return min(len(piece.view), 4 * K * int(random.integers(1, 5)))

    io = MemoryIO(fault, **LIMITS)
    data, out = noise(256 * K), arena(256 * K)
    io.write(file, 0, data).result(60)
    io.read(file, 0, out).result(60)
    assert out == data
    io.close()


@pytest.mark.parametrize("moved", [0, 100])
def test_a_write_that_makes_no_progress_is_an_error(file: File, moved):
    io = MemoryIO(lambda piece: moved, **LIMITS)
    file.direct = True
    with pytest.raises(StoreError, match=f"writing stops at byte {moved}"):
        io.write(file, 0, noise(16 * K)).result(60)
    io.close()


def test_the_depth_is_never_exceeded(file: File):
    most, now, lock = [0, 0, 0], [0, 0], threading.Lock()

    def fault(piece: Piece):
        with lock:
            now[piece.write] += 1
            most[piece.write] = max(most[piece.write], now[piece.write])
            if all(now):
                most[2] = max(most[2], sum(now))
        time.sleep(0.001)
        with lock:
            now[piece.write] -= 1

    io = MemoryIO(fault, **LIMITS)
    data = noise(512 * K)
    io.write(file, 0, data).result(60)
    assert most[1] == LIMITS["depth"]
    for request in [io.write(file, 512 * K, data), io.read(file, 0, arena(512 * K))]:
        request.result(60)
    assert most[0] <= LIMITS["depth"]
    assert most[2] <= LIMITS["depth"] + LIMITS["mixed"]
    io.close()


def test_a_small_request_does_not_wait_for_a_large_one(file: File):
    """Requests take turns: of one piece in flight at a time, the small one is the third at the latest."""
    begun, asked = [], threading.Event()

    def fault(piece: Piece):
        begun.append(piece.offset)
        assert asked.wait(60)

    io = MemoryIO(fault, block=16 * K, depth=1, mixed=1)
    large, small = io.write(file, 0, noise(256 * K)), io.write(file, 512 * K, noise(16 * K))
    asked.set()
    small.result(60)
    large.result(60)
    assert begun.index(512 * K) <= 2
    assert sorted(begun) == [*range(0, 256 * K, 16 * K), 512 * K]
    io.close()


class SlowDrive(IO):
    """A drive that does what the test says, piece by piece; `begun` has classes in the order of their start."""

    def __init__(self, **limits):
        super().__init__(**limits)
        self.begun, self.flying = [], []

    def _start(self, piece):
        self.flying.append(piece)
        self.begun.append(piece.request.rank)

    def end_one(self):
        piece = self.flying.pop(0)
        self._finish(piece, len(piece.view))
        self._pump()


def test_what_is_waited_for_goes_first_and_nothing_starves(file: File):
    """Classes end in their order, each waiting one has a piece after BOUND others, each piece is moved once."""
    io, n = SlowDrive(block=4 * K, depth=1, mixed=1), 2 * BOUND + 4
    calls = [(io.write, True), (io.write, False), (io.read, True), (io.read, False)]
    requests = [move(file, 0, arena(n * 4 * K), later=later) for move, later in calls]
    while io.flying:
        io.end_one()
    assert all(request.done() for request in requests)
    assert sorted(io.begun) == sorted(n * list(CLASSES))
    assert io.begun[:9] == [WRITE_BACK, READ_AHEAD] + 7 * [READ]  # the first two were in flight
    ends = [max(i for i, rank in enumerate(io.begun) if rank == each) for each in CLASSES]
    assert ends == sorted(ends)
    assert ends[READ] <= n * (1 + 3 / BOUND) + 2  # three classes have one piece after BOUND
    for rank in CLASSES[1:]:
        places = [i for i, each in enumerate(io.begun) if each == rank]
        assert max(b - a for a, b in pairwise(places)) <= BOUND + len(CLASSES)
    io.close()


def test_a_read_that_is_waited_for_has_the_drive_beside_writes(file: File):
    """Writes in flight stay; no more than `mixed` of them are there when reads have to wait."""
    io = SlowDrive(block=4 * K, depth=4, mixed=2)
    io.write(file, 0, arena(40 * K))
    assert io.begun == 4 * [WRITE]
    io.read(file, 0, arena(16 * K))
    assert io.begun[4:] == 2 * [READ]
    for _ in range(4):
        io.end_one()
    assert io.begun[6:8] == 2 * [READ]
    assert sum(piece.write for piece in io.flying) <= 2
    while io.flying:
        io.end_one()
    io.close()


def test_arena_is_aligned_and_zero():
    buffer = arena(5000)
    assert len(buffer) == 8192
    assert address_of(buffer) % HUGE_PAGE == 0
    assert not any(buffer)


def test_arena_is_not_copied_into_children():
    program = "import os; from trireme.storage.aio import arena, address_of; import ctypes\n" + (
        "a = arena(4096); a[0] = 1; p = os.fork()\n"
        "if p == 0: ctypes.string_at(address_of(a), 1)\n"
        "raise SystemExit(os.WTERMSIG(os.waitpid(p, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 11  # the child has no such memory


def test_file_creation_claims_the_space_and_refuses_to_overwrite(tmp_path):
    file = File(tmp_path / "f", False, 100 * K)
    assert os.fstat(file.fd).st_size == 100 * K
    assert os.fstat(file.fd).st_blocks * 512 >= 100 * K
    with pytest.raises(StoreError, match="File exists"):
        File(tmp_path / "f", False, 100 * K)
    file.close()


def test_an_allocation_that_does_not_fit_leaves_nothing(tmp_path):
    with pytest.raises(StoreError, match=r"allocating \d+ bytes"):
        File(tmp_path / "f", False, 1 << 50)
    assert not (tmp_path / "f").exists()


def run_limited(program: str) -> None:
    """Runs a program of its own, because it changes the limits of its process."""
    head = "import resource, tempfile\nfrom pathlib import Path\nfrom trireme.storage.aio import *\n"
    subprocess.run([sys.executable, "-c", head + program], check=True, timeout=60)


def test_descriptors_are_raised_to_the_hard_limit_then_named():
    run_limited("""
from trireme.storage.files import StoreError
from trireme.storage.layout import sequential
from trireme.storage.store import Store
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 40))
folder, files = Path(tempfile.mkdtemp()), []
try:
    while len(files) < 100:
        files.append(File(folder / str(len(files)), False, 4096))
except StoreError as e:
    assert e.errno == 24 and 30 < len(files) < 40, (e, len(files))
else:
    raise SystemExit("no error")
for i, file in enumerate(files):
    file.close()
    (folder / str(i)).unlink()
folder.rmdir()
""")


def test_no_o_direct_falls_back_to_buffered_files():
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or is_direct(shm):
        pytest.skip("no writable tmpfs at /dev/shm")
    folder = shm / f"trireme-{os.getpid()}"
    said = []
    device = open_device(folder, say=said.append)
    try:
        assert not device.direct
        assert "no O_DIRECT" in said[0]
        file = File(folder / "f", device.direct, 64 * K)
        data, out = noise(64 * K), arena(64 * K)
        device.io.write(file, 0, data).result(60)
        device.io.read(file, 0, out).result(60)
        assert out == data
        file.close()
    finally:
        device.io.close()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_speeds_are_those_of_the_folders_in_any_order(tmp_path):
    folders, layout = [tmp_path / "a", tmp_path / "b"], sequential([("m", "F32", (1024,))])
    with Store.create(folders, speeds=[1.0, 3.0]) as store:
        store.add("u", layout)
        store.write("u", arena(layout.span)).result()
        store.commit(1, {})
    with Store.open(folders[::-1], speeds=[3.0, 1.0]) as store:
        assert [(device.path, device.speed) for device in store.devices] == [(folders[0], 1.0), (folders[1], 3.0)]


def test_open_device_leaves_nothing(tmp_path):
    device = open_device(tmp_path / "new", 3.0)
    assert device.speed == 3.0
    assert not list((tmp_path / "new").iterdir())
    device.io.close()


def test_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(StoreError, match="/proc"):
        open_device("/proc/trireme")

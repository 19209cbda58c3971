"""Scratch bytes: dealt over devices by their speeds, read as they were written, gone when closed."""

import os

import numpy as np
import pytest

from trireme.storage import scratch
from trireme.storage.aio import IO, arena
from trireme.storage.devices import Device
from trireme.storage.scratch import Scratch

K = 1 << 10


@pytest.fixture
def devices(tmp_path):
    made = []
    for name, speed in (("a", 1e9), ("b", 3e9), ("c", 1e9)):
        (tmp_path / name).mkdir()
        made.append(Device(tmp_path / name, IO(block=16 * K), False, speed))
    yield made
    for device in made:
        device.io.close()


def claimed(devices, nbytes):
    s = Scratch()
    assert s.reserve(nbytes) == 0
    s.claim(devices)
    return s


@pytest.mark.grid("3")
@pytest.mark.parametrize("count", [1, 3])
def test_what_was_written_is_read(devices, count):
    """Spans that begin and end anywhere, side by side, each with its own bytes; no byte on two places."""
    random, total = np.random.default_rng(count), (2 * count - 1) * scratch.STRIPE + 3000 * K
    (devices[0].path / "scratch").write_text("of a run that was killed before its file had lost its name")
    s = claimed(devices[:count], total)
    assert sum(os.fstat(file.fd).st_size for file in s.files) == total  # before anything is written
    edges = [0, *sorted(random.choice(np.arange(1, total // 4096), 12, replace=False) * 4096), total]
    spans = {}
    for a, b in zip(edges, edges[1:], strict=False):
        spans[int(a)] = buffer = arena(int(b - a))
        np.frombuffer(buffer, np.uint8)[:] = random.integers(0, 256, len(buffer))
    for writing in [s.write(a, buffer) for a, buffer in spans.items()]:
        writing.result(60)
    for a, buffer in spans.items():
        out = arena(len(buffer))
        s.read(a, out).result(60)
        assert out == buffer
    assert sum(os.fstat(file.fd).st_size for file in s.files) == total
    assert not any(list(device.path.iterdir()) for device in devices), "whoever is killed leaves nothing"
    files = [file.fd for file in s.files]
    s.close()
    for fd in files:  # its space is free
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_faster_devices_hold_more_and_take_turns(devices):
    s = claimed(devices, 100 * scratch.STRIPE)
    assert s.turns == (1, 0, 1, 2, 1)
    sizes = [os.fstat(file.fd).st_size // scratch.STRIPE for file in s.files]
    assert sizes == [20, 60, 20]
    s.close()


def test_a_device_without_a_share_holds_nothing(devices):
    """Of less than a stripe."""
    s, buffer = claimed(devices, 64 * K), arena(64 * K)
    s.write(0, buffer).result(60)
    s.read(0, arena(64 * K)).result(60)
    assert sorted(os.fstat(file.fd).st_size for file in s.files) == [0, 0, 64 * K]
    s.close()


def test_without_room_on_one_device_nothing_is_left(devices):
    devices[2].path.rmdir()
    for those, nbytes in ((devices, 10 * scratch.STRIPE), (devices[:1], 1 << 50)):
        with pytest.raises(OSError, match=str(those[-1].path)):
            claimed(those, nbytes)
    assert not any(list(device.path.iterdir()) for device in devices[:2])

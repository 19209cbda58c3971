"""Several real drives, each with a speed limit of its own, and what streaming leaves in memory."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from trireme.storage.aio import address_of, arena
from trireme.storage.devices import Device, is_direct
from trireme.storage.kernel_aio import KernelIO
from trireme.storage.layout import sequential
from trireme.storage.store import Store

# A program of its own, because the limit applies to a process: argv: control group, folders and rates as JSON.
STREAM = """
import json, os, sys, time
from pathlib import Path
open(sys.argv[1], "w").write(str(os.getpid()))
from trireme.storage.aio import arena
from trireme.storage.devices import Device, is_direct
from trireme.storage.kernel_aio import KernelIO
from trireme.storage.layout import sequential
from trireme.storage.store import Store

made = [Device(Path(p), KernelIO(1 << 20, 8, 4), is_direct(Path(p)), r, r) for p, r in json.loads(sys.argv[2])]
layout = sequential([("m", "F32", (2 << 20,)), ("v", "F32", (2 << 20,))])
result = {}
with Store.create(made) as store:
    for i in range(3):
        store.add(str(i), layout)
    buffers = [arena(layout.span) for _ in range(3)]
    for kind, operation in ("first", store.write), ("write", store.write), ("read", store.read):
        requests, start = [], time.monotonic()
        for i in range(3 if kind == "first" else 9):
            if i >= 2:
                requests[i - 2].result()
            requests.append(operation(str(i % 3), buffers[i % 3]))
        for request in requests:
            request.result()
        result[kind] = len(requests) * layout.nbytes / (time.monotonic() - start)
print(json.dumps(result))
"""


def run(*command) -> str:
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"no {command[0]}")
    if done.returncode:
        pytest.skip(f"{command[0]} is not allowed here: {done.stderr.strip()}")
    return done.stdout.strip()


def control_group(stack: ExitStack) -> tuple[Path, bool]:
    """A control group that can limit drives, and whether it is of version 2."""
    for root, marker in (
        (Path("/sys/fs/cgroup/blkio"), "blkio.throttle.read_bps_device"),
        (Path("/sys/fs/cgroup"), ""),
    ):
        group = root / f"trireme-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        stack.callback(group.rmdir)
        if marker and (group / marker).exists():
            return group, False
        if (group / "io.max").exists():
            return group, True
    pytest.skip("no control group here can limit a drive's speed")


@pytest.mark.parametrize("rates", [(50e6, 50e6), (60e6, 20e6), (40e6, 10e6, 30e6, 20e6)])
def test_throttled_drives_add_up(tmp_path, rates):
    """Loop devices limited by the kernel: reading and writing reach 0.9 of the sum of the limits."""
    with ExitStack() as stack:
        group, unified = control_group(stack)
        folders = []
        for k, rate in enumerate(rates):
            image, folder = tmp_path / f"image{k}", tmp_path / f"d{k}"
            folder.mkdir()
            image.touch()
            os.truncate(image, 200 << 20)
            run("mkfs.ext4", "-q", image)
            loop = run("losetup", "-f", "--show", image)
            stack.callback(run, "losetup", "-d", loop)
            run("mount", loop, folder)
            stack.callback(run, "umount", folder)
            number, bps = (Path("/sys/block") / Path(loop).name / "dev").read_text().strip(), int(rate)
            if unified:
                (group / "io.max").write_text(f"{number} rbps={bps} wbps={bps}")
            else:
                for way in ("read", "write"):
                    (group / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {bps}")
            folders.append((str(folder), rate))
        command = [sys.executable, "-c", STREAM, str(group / "cgroup.procs"), json.dumps(folders)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        speeds = json.loads(done.stdout)
        for kind in ("read", "write"):
            # the kernel lets a little more than the limit through at first
            assert 0.9 * sum(rates) <= speeds[kind] <= 1.3 * sum(rates), (kind, speeds, sum(rates))


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
    with Store.create([Device(tmp_path, KernelIO(1 << 20, 4, 2), True)]) as store:
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

"""Speed of a drive, of the store on it, and their ratio: reading, writing, and both at once as the optimizer does.

    python scripts/bench/drives.py --dir /nvme/tmp --json out.json

The ceiling is the fastest transfer of blocks between the store's files and the same memory, over several block sizes,
depths and ways. Both are timed in rounds, since speed drifts; ratios are medians over rounds. The folder under --dir is
removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

from trireme.storage.aio import File, arena
from trireme.storage.devices import is_direct
from trireme.storage.files import check_space
from trireme.storage.kernel_aio import KernelIO
from trireme.storage.layout import ALIGN, sequential
from trireme.storage.store import Store

MIB = 1 << 20
KINDS = ("read", "write", "mixed")
CEILING = [(w, b * MIB, depth) for w in ("threads", "kernel aio") for b in (4, 16, 64) for depth in (1, 2, 4, 8)]
AHEAD = 2  # units in flight each way, as in the engine


class Raw:
    """The ceiling: threads or kernel AIO."""

    def __init__(self, folder: Path, slots: list[memoryview]):
        """`folder`: a store's files, two versions of each unit and spares. `slots`: buffers of a unit."""
        direct = is_direct(folder)
        self.files = [File(path, direct) for path in sorted(folder.glob("*.safetensors"))]
        self.slots, self.passes = slots, 0

    def run(self, kind: str, way: str, block: int, depth: int, share: float = 1.0) -> float:
        """Bytes/s over `share` of half the files, `depth` blocks in flight each way; mixed writes the other half."""
        self.passes += 1
        half = int(len(self.files) // 2 * share)
        queues = []
        for write in (False, True):
            files = self.files[(self.passes + write) % 2 :: 2][:half]
            slots = self.slots if kind != "mixed" else self.slots[write::2]
            queues.append(
                [piece for i, file in enumerate(files) for piece in self._pieces(file, slots[i % len(slots)], block)]
            )
        directions = {"read": [False], "write": [True], "mixed": [False, True]}[kind]
        start = time.perf_counter()
        if way == "threads":
            self._threads(directions, queues, depth)
        else:
            self._kernel(directions, queues, block, depth)
        seconds = time.perf_counter() - start
        return sum(len(view) for write in directions for _, _, view in queues[write]) / seconds

    @staticmethod
    def _pieces(file: File, slot: memoryview, block: int) -> list[tuple[File, int, memoryview]]:
        """Blocks after the header."""
        return [(file, ALIGN + at, slot[at : at + block]) for at in range(0, len(slot), block)]

    def _threads(self, directions: list[bool], queues: list[list], depth: int) -> None:
        def work(write: bool, k: int) -> None:
            call = os.pwritev if write else os.preadv
            for file, at, view in queues[write][k::depth]:
                if call(file.fd, [view], at) != len(view):
                    raise OSError(f"short transfer at {at} of {file.path}")

        with ThreadPoolExecutor(2 * depth) as pool:
            for job in [pool.submit(work, write, k) for write in directions for k in range(depth)]:
                job.result()

    def _kernel(self, directions: list[bool], queues: list[list], block: int, depth: int) -> None:
        io, waiting = KernelIO(block, depth, depth), []
        for i in range(len(queues[0])):
            for write in directions:
                if i >= depth:
                    waiting[len(waiting) - depth * len(directions)].result()
                waiting.append((io.write if write else io.read)(*queues[write][i]))
        for request in waiting:
            request.result()
        io.close()


class Ours:
    def __init__(self, dirs: list[Path], nbytes: int, unit: int):
        layout = sequential([("state", "U8", (unit,))])
        self.store, self.unit = Store.create(dirs), layout.span
        for device in self.store.devices:
            print(device)
        self.names = [f"unit-{i:03d}" for i in range(max(4, nbytes // unit))]
        for name in self.names:
            self.store.add(name, layout)
        self.store.reserve()
        self.slots = [noise(layout.span, i) for i in range(2 * AHEAD)]
        for _ in range(2):  # versions
            self.run("write")

    def run(self, kind: str) -> float:
        """Bytes/s of a pass over all units; mixed reads unit i while it writes unit i - AHEAD."""
        reads: list[Future] = []
        writes: list[Future] = []
        start = time.perf_counter()
        for i, name in enumerate(self.names):
            slot = self.slots[i % len(self.slots)]
            if kind == "mixed":
                if i >= 2 * AHEAD:
                    writes[i - 2 * AHEAD].result()  # the slot is free
                reads.append(self.store.read(name, slot))
                if i >= AHEAD:
                    self._write_back(i - AHEAD, reads, writes)
            else:
                requests, call = (reads, self.store.read) if kind == "read" else (writes, self.store.write)
                if i >= AHEAD:
                    requests[i - AHEAD].result()
                requests.append(call(name, slot))
        if kind == "mixed":
            for i in range(len(self.names) - AHEAD, len(self.names)):
                self._write_back(i, reads, writes)
        for request in reads + writes:
            request.result()
        return (2 if kind == "mixed" else 1) * len(self.names) * self.unit / (time.perf_counter() - start)

    def _write_back(self, i: int, reads: list[Future], writes: list[Future]) -> None:
        reads[i].result()
        writes.append(self.store.write(self.names[i], self.slots[i % len(self.slots)]))


def noise(nbytes: int, seed: int) -> memoryview:
    """Random bytes: drives may compress."""
    buffer = arena(nbytes)
    words = np.frombuffer(buffer, np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), np.uint64)
    return buffer


def measure(dirs: list[Path], nbytes: int, unit: int, rounds: int) -> dict:
    """In GB/s. The ceiling is of the first folder's drive."""
    ours = Ours([d / "store" for d in dirs], nbytes, unit)
    raw = Raw(dirs[0] / "store" / "files", ours.slots)
    best = {kind: max(CEILING, key=lambda c, k=kind: raw.run(k, *c, share=0.25)) for kind in KINDS}
    ceiling, speed = ({kind: [] for kind in KINDS} for _ in range(2))
    cpu = dict.fromkeys(KINDS, 0.0)
    for _ in range(rounds):
        for kind in KINDS:
            ceiling[kind].append(raw.run(kind, *best[kind]) / 1e9)
            start = time.process_time()
            speed[kind].append(ours.run(kind) / 1e9)
            cpu[kind] += time.process_time() - start
    transferred = {kind: rounds * len(ours.names) * ours.unit * (1 + (kind == "mixed")) / 1e9 for kind in KINDS}
    pairs = {kind: zip(speed[kind], ceiling[kind], strict=True) for kind in KINDS}
    report = {
        "ceiling": {kind: median(ceiling[kind]) for kind in KINDS},
        "store": {kind: median(speed[kind]) for kind in KINDS},
        "ratio": {kind: median(x / y for x, y in pairs[kind]) for kind in KINDS},
        "cpu_s_per_gb": {kind: cpu[kind] / transferred[kind] for kind in KINDS},
        "ceiling_way_block_depth": best,
        "rounds": {"ceiling": ceiling, "store": speed},
        "bytes": len(ours.names) * ours.unit,
        "unit_bytes": ours.unit,
        "back_end": [str(device.io) for device in ours.store.devices],
    }
    ours.store.close()
    for file in raw.files:
        file.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", required=True, help="folder, or several with commas, each on a drive of its own")
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("--gb", type=float, default=4, help="size of the state; larger than the drive's cache")
    parser.add_argument("--unit-mb", type=float, default=200, help="size of one unit")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    dirs, nbytes = [], int(args.gb * 1e9)
    try:
        for d in args.dir.split(","):
            Path(d).mkdir(parents=True, exist_ok=True)
            dirs.append(Path(tempfile.mkdtemp(prefix="bench-", dir=d)))
        check_space(dirs[0], 3 * nbytes, "the benchmark")
        report = measure(dirs, nbytes, int(args.unit_mb * 1e6), args.rounds)
    finally:
        for d in dirs:
            shutil.rmtree(d)
    print(f"{'GB/s':20}" + "".join(f"{kind:>10}" for kind in KINDS))
    for row in ("ceiling", "store", "ratio", "cpu_s_per_gb"):
        print(f"{row:20}" + "".join(f"{report[row][kind]:10.3f}" for kind in KINDS))
    print(f"{report['bytes'] / 1e9:.1f} GB of state, {args.rounds} passes of each kind, by {report['back_end']}")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

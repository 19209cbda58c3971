"""The speed of this machine, measured once, in under a minute.

Results are JSON in the user's cache folder, one file for processor and GPU, one a drive; deleting one measures again.
A drive's trial file is unlinked before it is written: it is gone however this process ends. Twelve seconds do not fill
a fast cache of a drive of one's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.memory import DTYPE, Memory, views
from trireme.engine.planner.host import gpu_state, on_battery
from trireme.engine.planner.predict import KERNELS, WITHIN
from trireme.engine.planner.sizes import llama
from trireme.engine.queues.cgroups import cores, update_threads
from trireme.engine.queues.real import RealQueues
from trireme.engine.queues.task import Task
from trireme.kernels import ops
from trireme.kernels.host_adamw import Workers
from trireme.kernels.moments import BLOCK
from trireme.kernels.private import cache_folder
from trireme.models import model
from trireme.models.config import Scan
from trireme.models.rows import make_rows, rope_tables
from trireme.models.sizes import shapes
from trireme.models.sizes.costs import recurrence_flops
from trireme.storage.aio import arena
from trireme.storage.devices import open_device
from trireme.storage.layout import pack
from trireme.storage.scratch import Scratch
from trireme.storage.temporary import HIDDEN, Temporary

VERSION = 11  # of what is measured
CHUNK, DEPTH = 64 << 20, 3  # bytes of a drive's request, requests in flight each way
COPY, AHEAD = 256 << 20, 6  # bytes of a copy at most, copies queued
LOTS, UPDATED = 4, 16  # of parameters in turn, beyond a cache; bytes of one, at most
PHASE = 0.4  # seconds of a flow
AGREE = 0.1  # change of a drive's rate between two turns that is noise
# In a virtual drive's path in sysfs, or its model: virtio, Xen, Hyper-V, QEMU, clouds' network drives.
LENT = ("/virtio", "/vbd-", "/vmbus", "/VMBUS", "QEMU", "Virtual", "Elastic Block Store", "nvme_card-pd", "Persistent")
STARTS, BLOCKS = 200, 10  # of a kernel or task in a turn; of a small block
SCANNED = (2048,) * 4  # tokens of each document of a recurrence
BOOKS = 6  # times that of a task's hand-over: all of the engine's bookkeeping, and events (5 without)
LASTING = 0.8  # of the rate of pinning half a gigabyte, for tens of them: 0.6 and 0.9 on hosts of H200s
TURNS = 6  # the first warms up, the fastest counts
NARROW = 3  # turns of updates with 8-bit moments, the fastest counts: 5 to 12 G parameters/s in four turns of an hour


def kept(
    identity: dict[str, Any], measure: Callable[[], dict[str, float]], anew: bool = False
) -> tuple[dict[str, float], str]:
    """(rates, measured or, unless `anew`, kept for this identity; how they are known, in words)."""
    found = None if anew else remembered(identity)
    if found is not None:
        return found, "measured before"
    start = time.monotonic()
    rates = measure()
    remember(identity, rates)
    return rates, f"measured, {time.monotonic() - start:.0f} s"


def remembered(identity: dict[str, Any]) -> dict[str, float] | None:
    """What was last remembered for this identity."""
    path, identity = _place(identity)
    try:
        found = json.loads(path.read_text()) if path else {}
        if found["identity"] == identity:
            return {name: float(value) for name, value in found["rates"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # missing or foreign
    return None


def remember(identity: dict[str, Any], rates: dict[str, float]) -> None:
    """A folder that cannot be written costs time alone."""
    path, identity = _place(identity)
    if path:
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps({"identity": identity, "rates": rates}, indent=1))
            part.replace(path)


def forget(identity: dict[str, Any]) -> None:
    """Has the next run measure anew."""
    path, _ = _place(identity)
    if path:
        with contextlib.suppress(OSError):
            path.unlink()


def _place(identity: dict[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """(the file of an identity, if there is a folder; the identity as of this VERSION)."""
    folder, identity = cache_folder(), identity | {"version": VERSION}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return folder and folder / f"machine-{name}.json", identity


# ---------------------------------------------------------------- processor and GPU


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matmul on random data: the base of MFU."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    for _ in range(2):
        a @ b
    return 2 * n**3 * 5 / timed(lambda: [a @ b for _ in range(5)], device)


def fp8_rate(device: torch.device) -> float:
    """FLOP/s of a large square matmul in fp8, codes made before."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (ops.quantize(torch.randn(n, n, device=device, dtype=torch.bfloat16)) for _ in range(2))
    assert a.rows is not None
    assert b.rows is not None
    out = torch.empty(n, n, device=device, dtype=torch.bfloat16)
    once = partial(ops.fp8_matmul, a.rows, a.scale, b.rows, b.scale, out)
    for _ in range(2):
        once()
    return 2 * n**3 * 5 / timed(lambda: [once() for _ in range(5)], device)


def scan_shares(
    device: torch.device, dtype: torch.dtype, own: Scan, matmul: float, lengths: Sequence[int] = SCANNED
) -> dict[str, float]:
    """Shares of `matmul`, FLOP/s, that a recurrence of random numbers reaches, forward and backward."""
    N, K, H, d, e = sum(lengths), own.key_heads, own.heads, own.key_dim, own.value_dim
    q, k = (normalize(torch.randn(N, K, d, device=device), dim=-1).to(dtype) for _ in range(2))
    v, dy = (torch.randn(N, H, e, device=device).to(dtype) for _ in range(2))
    g, beta, docs = -torch.rand(N, H, device=device), torch.rand(N, H, device=device), ops.make_docs(lengths, device)
    into = [torch.empty_like(t) for t in (q, k, v)]
    passes = {
        "scan": lambda: ops.scan_fwd(q, k, v, g, beta, docs, own.delta),
        "scan_backward": lambda: ops.scan_bwd(dy, q, k, v, g, beta, docs, own.delta, None, *into),
    }
    seconds = {name: min(timed(run, device) for _ in range(TURNS)) for name, run in passes.items()}
    flops = recurrence_flops(own, N)
    return {"scan": flops / seconds["scan"] / matmul, "scan_backward": 2.5 * flops / seconds["scan_backward"] / matmul}


def processor(device: torch.device, dtype: str) -> dict[str, Any]:
    """Identity for `kept`: chips, software, and what their speed depends on at present."""
    now = {"now": gpu_state(device), "battery": on_battery()} if device.type == "cuda" else {}
    return chips(device, dtype) | now


def chips(device: torch.device, dtype: str) -> dict[str, Any]:
    """Identity of the processor and the GPU, with the software that runs on them."""
    found = {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "ram": _first("/proc/meminfo", "MemTotal"),
        "cores": cores(),
        "torch": torch.__version__,
        "dtype": dtype,
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "driver": _first("/proc/driver/nvidia/version", "NVRM")}
    return found


def _first(path: str, key: str) -> str:
    """The first line of a file that begins with `key`, or ""."""
    try:
        return next((line for line in Path(path).read_text().splitlines() if line.startswith(key)), "").strip()
    except OSError:
        return ""


def processor_rates(device: torch.device, dtype: str, ram: int = 1 << 40) -> dict[str, float]:
    """Rates by name, without matmul and drives, in about five seconds and, on a GPU, half of `ram` bytes."""
    found = {"copy": _copy_rate(device), "task": BOOKS * task_seconds()}
    with Workers(update_threads()) as workers:
        if device.type == "cuda":
            n, nbytes = trial_sizes(ram)
            found |= _bus(device, _update(workers, dtype, n, LOTS), n, nbytes)
            narrow = _update(workers, dtype, n, LOTS, bits=8)
            found["adam8"] = n * max(_calls(narrow) for _ in range(NARROW))
            found["host"] = max(start_seconds(device), launch_seconds(block_seconds(device), found["task"]))
        else:
            update, n = _update(workers, dtype, 1 << 22), 1 << 22
            adam = n / min(timed(update, device) for _ in range(3))
            narrow = _update(workers, dtype, n, bits=8)
            found["adam8"] = n / min(timed(narrow, device) for _ in range(3))
            found |= {"h2d": found["copy"] / 2, "d2h": found["copy"] / 2, "dram": found["copy"], "adam": adam}
    return found | {"dram": max(found["dram"], ADAM_BYTES * found["adam"])}


def trial_sizes(ram: int) -> tuple[int, int]:
    """(parameters of each of LOTS updates, bytes of each of two copies) that take half of `ram` bytes at most."""
    power = lambda n: 1 << max(n, 1).bit_length() - 1
    return min(1 << 25, power(ram // (4 * LOTS * UPDATED))), min(COPY, power(ram // 8))


def _copy_rate(device: torch.device) -> float:
    """Bytes/s read plus written."""
    n = 256 << 20 if device.type == "cuda" else 64 << 20  # beyond caches
    a, b = (torch.ones(n, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * n / min(timed(lambda: b.copy_(a), device) for _ in range(3))


def start_seconds(device: torch.device) -> float:
    """Seconds of the host to start a kernel."""
    x, w = torch.ones(8, 128, dtype=torch.bfloat16, device=device), torch.ones(128, dtype=torch.bfloat16, device=device)
    calls = lambda: [ops.rmsnorm_fwd(x, w, 1e-5) for _ in range(STARTS)]
    return min(timed(calls, device) for _ in range(TURNS)) / STARTS


def block_seconds(device: torch.device) -> float:
    """Seconds of the host for the launches of a block so small that a GPU waits for them, forward and backward."""
    cfg = llama(128, 1, 2, 256)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layout = pack(shapes.weight_groups(cfg, 1), "BF16" if dtype == torch.bfloat16 else "F32")
    made = (views(layout, torch.zeros(layout.span, dtype=torch.uint8, device=device)) for _ in range(2))
    w, g = model.weights(cfg, 1, next(made)), model.gradients(cfg, 1, next(made))
    rows = make_rows([64], rope_tables(cfg, 64, device), device)
    x, dy, out, dx = torch.ones(4, 64, cfg.width, dtype=dtype, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            model.forward(cfg, 1, w, x, rows, {}, out)
            model.backward(cfg, 1, w, g, x, {}, dy, rows, dx)

    compute(1)
    return min(timed(partial(compute, BLOCKS), device) for _ in range(TURNS)) / BLOCKS


def launch_seconds(block: float, task: float) -> float:
    """`Rates.host` by which a block takes so long, given the interpreter's seconds for a task."""
    within = task * (WITHIN["forward"] + WITHIN["backward"])
    return (block - within) / (KERNELS["forward"] + KERNELS["backward"])


def task_seconds() -> float:
    """Seconds of the interpreter for a task without work, a quarter of them on another queue."""
    queues, took = RealQueues(), []
    try:
        for _ in range(TURNS):
            begun, after = time.process_time(), tuple[Task, ...]()
            for i in range(STARTS):
                task = queues.run("compute", "other", "probe", lambda: None, after)
                after = (task if i % 3 else queues.run("update", "other", "probe", lambda: None, (task,)),)
            queues.drain()
            took.append((time.process_time() - begun) / (STARTS + len(range(0, STARTS, 3))))
    finally:
        queues.close()
    return min(took)


def _update(workers: Workers, dtype: str, n: int, lots: int = 1, bits: int = 32) -> Callable[[], object]:
    """An AdamW update of n parameters as steps run it, of another lot each call: out of cache."""
    w, grad = (torch.ones(lots, n, dtype=DTYPE[dtype]) for _ in range(2))
    lo = torch.zeros(lots, n, dtype=torch.int16) if dtype == "BF16" else (None,) * lots
    kind = torch.uint8 if bits == 8 else torch.float32
    moments = [torch.zeros(lots, n, dtype=kind), torch.ones(lots, n, dtype=kind)]
    if bits == 8:
        floors = torch.zeros(2, lots, -(-n // BLOCK), dtype=torch.int16)
        moments = [moments[0], floors[0], moments[1], floors[1]]
    hyper: dict[str, Any] = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, n_decay=0, step=1)
    run, more = (workers.adamw8_, {"seed": 0}) if bits == 8 else (workers.adamw_, {})
    lot, clip = cycle(zip(w, lo, *moments, grad, strict=True)), torch.ones(1)
    return lambda: run(*next(lot), clip, **hyper, **more)


def _calls(work: Callable[[], object]) -> float:
    """Calls a second, in a PHASE."""
    work()
    count, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < PHASE or not count:
        work()
        count += 1
    return count / took


def peer_rates(devices: Sequence[torch.device]) -> dict[str, float]:
    """Bytes/s of copies from each GPU to the next, all at once, of the slowest.

    Zero where a GPU has no access to another's memory, or where a copy arrives wrong, as behind some IOMMUs.
    """
    ways = list(zip(devices, [*devices[1:], devices[0]], strict=True))
    if not all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        return {"peer": 0.0}
    sources = [torch.randint(256, (COPY,), dtype=torch.uint8, device=a) for a in devices]
    targets = [torch.zeros(COPY, dtype=torch.uint8, device=b) for _, b in ways]
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
        if not torch.equal(target.cpu(), source.cpu()):
            return {"peer": 0.0}

    streams = [(torch.cuda.Stream(a), torch.cuda.Stream(b)) for a, b in ways]  # torch orders a copy behind both

    def once() -> float:
        start = time.perf_counter()
        for _ in range(AHEAD):
            for source, target, (leaves, arrives) in zip(sources, targets, streams, strict=True):
                with torch.cuda.stream(arrives), torch.cuda.stream(leaves):
                    target.copy_(source, non_blocking=True)
        for both in streams:
            for stream in both:
                stream.synchronize()
        return time.perf_counter() - start

    return {"peer": AHEAD * COPY / min(once() for _ in range(3))}


def several_rates(devices: Sequence[torch.device], ram: int) -> dict[str, float]:
    """`peer_rates`, and bytes/s from RAM to all GPUs at once and back, in total, with half of `ram` bytes."""
    nbytes = trial_sizes(ram // len(devices))[1]
    buses = [_Bus(device, nbytes) for device in devices]

    def once(way: int) -> float:
        start = time.perf_counter()
        for _ in range(AHEAD):
            for bus in buses:
                bus.copy(way)
        for bus in buses:
            bus.streams[way].synchronize()
        return time.perf_counter() - start

    moved = len(buses) * AHEAD * nbytes
    try:
        found = {name: moved / min(once(way) for _ in range(3)) for way, name in enumerate(("up_all", "down_all"))}
    finally:
        for bus in buses:
            bus.memory.close()
    return found | peer_rates(devices)


class _Bus:
    def __init__(self, device: torch.device, nbytes: int):
        """Copies of `nbytes`."""
        self.memory, self.nbytes = Memory(device, 1 << 40, 1 << 40), nbytes  # torch never gives its pinned memory back
        self.gpu, start = self.memory.alloc("gpu", "probe", nbytes, 2), time.perf_counter()
        self.host = self.memory.alloc("host", "probe", nbytes, 2)
        self.pin = 2 * nbytes / (time.perf_counter() - start)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(self, way: int) -> torch.cuda.Event:
        """Starts a copy to (0) or from (1) the GPU."""
        to, source = (tier[way] for tier in ((self.gpu, self.host) if way == 0 else (self.host, self.gpu)))
        assert to is not None
        assert source is not None
        with torch.cuda.stream(self.streams[way]):
            to.copy_(source, non_blocking=True)
            return self.streams[way].record_event(torch.cuda.Event(enable_timing=True))

    def flow(self, work: Callable[[], object], *ways: int) -> tuple[float, ...]:
        """Calls of `work` a second and bytes/s of each way, all at once."""
        copies, calls, start = [[self.copy(way)] for way in ways], 0, time.perf_counter()
        while (took := time.perf_counter() - start) < PHASE or not all(done[1].query() for done in copies):
            for way, done in zip(ways, copies, strict=True):
                while len(done) < AHEAD or done[-AHEAD].query():  # `work` may outlast copies
                    done.append(self.copy(way))
            work()
            calls += 1
        copies = [[event for event in done if event.query()] for done in copies]
        for stream in self.streams:
            stream.synchronize()
        return calls / took, *(1e3 * self.nbytes * (len(done) - 1) / done[0].elapsed_time(done[-1]) for done in copies)


def _bus(device: torch.device, update: Callable[[], object], n: int, nbytes: int) -> dict[str, float]:
    """Bus and CPU updates, of n parameters, alone and at once."""
    bus, idle = _Bus(device, nbytes), lambda: time.sleep(1e-3)
    flow = bus.flow
    flow(idle, 0, 1)
    (_, up), (_, down), (_, *both) = flow(idle, 0), flow(idle, 1), flow(idle, 0, 1)
    (alone,), (_, reading), (crowded, *copied) = flow(update), flow(update, 0), flow(update, 0, 1)
    bus.memory.close()
    lost = max(0.01, 1 - crowded / alone)  # share of the updates' time
    return {
        "pin": LASTING * bus.pin,
        "h2d": up,
        "d2h": down,
        "duplex": min(1.0, both[0] / up, both[1] / down),
        "adam": n * alone,
        "concurrent": 1.0,
        "reading": min(1.0, reading / up),
        "dram": sum(copied) / lost,
    }


def timed(fn: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call and its work on the GPU."""
    start = _now(device)
    fn()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------- drives


def drive(folder: Path) -> dict[str, Any]:
    """Identity of the drive under `folder`."""
    return {"device": folder.stat().st_dev, "model": _model(folder), "bytes": shutil.disk_usage(folder).total}


def _block(folder: Path) -> Path:
    number = folder.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")


def _model(folder: Path) -> str:
    block = _block(folder)
    models = [f for f in (block / "device/model", block / "../device/model") if f.exists()]
    return models[0].read_text().strip() if models else ""


def is_virtual(folder: Path) -> bool:
    """Whether a cloud or a hypervisor lends the drive: bursts and caches make its first seconds too fast."""
    return any(name in f"{_block(folder).resolve()} {_model(folder)}" for name in LENT)


def settled(rate: Callable[[], float], believed: bool) -> float:
    """A rate; unless `believed`, of the last of up to TURNS turns, ended by two in a row that agree within AGREE."""
    now = rate()
    for _ in range(0 if believed else TURNS - 1):
        before, now = now, rate()
        if abs(now - before) <= AGREE * before:
            break
    return now


def drive_rates(folder: Path, seconds: float = 4.0, most: int = 4 << 30, patient: bool = False) -> dict[str, float]:
    """ssd_read, ssd_write, ssd_free (bytes/s, alone) and `mixed` of the drive under `folder`, in 3 x `seconds`.

    A virtual drive's rates, or if `patient` any drive's, are measured until they stay. Raises OSError where there is no
    room or no right to write.
    """
    nbytes = min(most, shutil.disk_usage(folder).free // 8) // (2 * CHUNK) * 2 * CHUNK
    believed, written = not (patient or is_virtual(folder)), 0
    with Temporary(HIDDEN, folder) as own:
        device = open_device(own)  # as the store does
        scratch = Scratch([device], max(nbytes, 2 * CHUNK))

        def writing() -> float:
            nonlocal written
            ((rate, moved),) = _flow(seconds, _Way(scratch.write, 0, nbytes))
            written = max(written, moved)
            return rate

        try:
            write = settled(writing, believed)
            read = settled(lambda: _flow(seconds, _Way(scratch.read, 0, min(nbytes, written)))[0][0], believed)
            half = nbytes // 2
            both = _flow(seconds, _Way(scratch.read, 0, half), _Way(scratch.write, half, nbytes))
        finally:
            device.io.close()  # first: an error leaves requests in flight
            freeing = timed(scratch.close, torch.device("cpu"))
    mixed = both[0][0] / read + both[1][0] / write
    return {"ssd_read": read, "ssd_write": write, "ssd_free": min(nbytes, written) / freeing, "mixed": mixed}


class _Way(NamedTuple):
    """Requests round the bytes [first, last) of a scratch file."""

    move: Callable[[int, memoryview], Future[None]]
    first: int
    last: int

    def after(self, at: int) -> int:
        return at + CHUNK if at + 2 * CHUNK <= self.last else self.first


def _flow(seconds: float, *ways: _Way) -> list[tuple[float, int]]:
    """(bytes/s, bytes) of each way."""
    at, moved = [way.first for way in ways], [0] * len(ways)
    flying: deque[tuple[int, memoryview, Future[None]]] = deque()
    start = time.perf_counter()

    def go(k: int, buffer: memoryview) -> None:
        flying.append((k, buffer, ways[k].move(at[k], buffer)))
        at[k] = ways[k].after(at[k])

    for k in list(range(len(ways))) * DEPTH:
        go(k, arena(CHUNK))
    while flying:
        k, buffer, future = flying.popleft()
        future.result()
        moved[k] += CHUNK
        if time.perf_counter() - start < seconds:
            go(k, buffer)
    took = time.perf_counter() - start
    return [(nbytes / took, nbytes) for nbytes in moved]

"""How fast this machine is: measured once, in well under a minute, and known again while the machine is the same.

What was measured is kept as JSON in the user's cache folder, one file for processor and GPU, one for each drive;
deleting a file measures again. A drive is tried with a file that has lost its name by the time it is written, so it
is gone however this process ends. Twelve seconds do not fill a consumer drive's fast cache; the first steps of a run
tell the rest.
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
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.memory import DTYPE, Memory, flat, views
from trireme.kernels import ops
from trireme.kernels.host_adamw import Workers
from trireme.kernels.private import cache_folder
from trireme.models import head, model, shapes
from trireme.models.config import ModelConfig
from trireme.models.rows import make_rows, rope_tables
from trireme.storage.aio import arena
from trireme.storage.devices import open_device
from trireme.storage.layout import pack
from trireme.storage.scratch import Scratch
from trireme.storage.temporary import HIDDEN, Temporary

VERSION = 5  # of what is measured
CHUNK, DEPTH = 64 << 20, 3  # bytes of a request to a drive, requests of a kind in flight
COPY, AHEAD = 256 << 20, 6  # bytes of a copy to and from a GPU, and copies that wait for their turn
PHASE = 0.4  # seconds in which copies and updates go on beside each other
STARTS = 200  # of a kernel, by which one is timed
TURNS, SECONDS = 6, 1.5  # in which a computation is timed: at most so many; after so long no third begins


def kept(identity: dict, measure: Callable[[], dict[str, float]]) -> tuple[dict[str, float], str]:
    """(what `measure` finds, or found before on what has the same identity; how it is known, in words)."""
    folder, identity = cache_folder(), identity | {"version": VERSION}
    name = f"machine-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]}.json"
    try:
        found = json.loads((folder / name).read_text()) if folder else {}
        if found["identity"] == identity:
            return {name: float(value) for name, value in found["rates"].items()}, "measured before"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nothing there, or not ours: measured anew
    start = time.monotonic()
    rates = measure()
    if folder:
        part = folder / f"{name}.{os.getpid()}"
        with contextlib.suppress(OSError):  # full, or read-only: the next run measures again
            part.write_text(json.dumps({"identity": identity, "rates": rates}, indent=1))
            os.replace(part, folder / name)
    return rates, f"measured, {time.monotonic() - start:.0f} s"


# ---------------------------------------------------------------- processor and GPU


def processor(device: torch.device, dtype: str) -> dict:
    """What the rates of processor and GPU depend on."""
    found = {"cpu": _first("/proc/cpuinfo", "model name"), "ram": _first("/proc/meminfo", "MemTotal"),
             "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "dtype": dtype}  # fmt: skip
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "driver": _first("/proc/driver/nvidia/version", "NVRM")}
    return found


def _first(path: str, key: str) -> str:
    """The first line of a file that begins with `key`; nothing where there is none."""
    try:
        return next((line for line in Path(path).read_text().splitlines() if line.startswith(key)), "").strip()
    except OSError:
        return ""


def processor_rates(device: torch.device, dtype: str) -> dict[str, float]:
    """Rates by their names in rates.py, all but the matrix product's and a drive's, in about five seconds."""
    found = {"copy": _copy_rate(device)}
    with Workers() as workers:
        if device.type == "cuda":
            found |= _bus(device, _update(workers, dtype, 1 << 25, lots=4), 1 << 25)
            found["host"] = start_seconds(device)
        else:
            update, n = _update(workers, dtype, 1 << 22), 1 << 22
            found |= {"h2d": found["copy"] / 2, "d2h": found["copy"] / 2, "dram": found["copy"],
                      "adam": n / min(timed(update, device) for _ in range(3))}  # fmt: skip
    return found | {"dram": max(found["dram"], ADAM_BYTES * found["adam"])}


def _copy_rate(device: torch.device) -> float:
    """Bytes/s read plus written by a large copy within the device's memory."""
    n = 256 << 20 if device.type == "cuda" else 64 << 20  # more than caches hold
    a, b = (torch.ones(n, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * n / min(timed(lambda: b.copy_(a), device) for _ in range(3))


def start_seconds(device: torch.device) -> float:
    """Seconds that the host takes to start a kernel, which works for less than that."""
    x, w = torch.ones(8, 128, dtype=torch.bfloat16, device=device), torch.ones(128, dtype=torch.bfloat16, device=device)
    return _seconds((lambda: [ops.rmsnorm_fwd(x, w, 1e-5) for _ in range(STARTS)],), device)[0] / STARTS


def _update(workers: Workers, dtype: str, n: int, lots: int = 1) -> Callable[[], object]:
    """An AdamW update of n parameters by all of the CPU's workers: of another lot with each call, out of cache."""
    w, grad = (torch.ones(lots, n, dtype=DTYPE[dtype]) for _ in range(2))
    lo = torch.zeros(lots, n, dtype=torch.int16) if dtype == "BF16" else [None] * lots
    m, v, clip = torch.zeros(lots, n), torch.ones(lots, n), torch.ones(1)
    hyper = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, n_decay=0, step=1)
    lot = cycle(zip(w, lo, m, v, grad, strict=True))
    return lambda: workers.adamw_(*next(lot), clip, **hyper)


def _bus(device: torch.device, update: Callable[[], object], n: int) -> dict[str, float]:
    """The bus, an update of n parameters on the CPU, and what each keeps beside the other, as in a step."""
    memory = Memory(device, 1 << 40, 1 << 40)  # torch's own pinned memory would never be given back
    gpu, start = memory.alloc("gpu", "probe", COPY, 2), time.perf_counter()
    host = memory.alloc("host", "probe", COPY, 2)
    pin = 2 * COPY / (time.perf_counter() - start)
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(way: int) -> torch.cuda.Event:
        with torch.cuda.stream(streams[way]):
            (gpu if way == 0 else host)[way].copy_((host if way == 0 else gpu)[way], non_blocking=True)
            return streams[way].record_event(torch.cuda.Event(enable_timing=True))

    def flow(work: Callable[[], object], *ways: int) -> tuple[float, ...]:
        """Calls of `work` a second, and bytes a second that each of `ways` copies, while all of it goes on."""
        copies, calls, start = [[copy(way)] for way in ways], 0, time.perf_counter()
        while (took := time.perf_counter() - start) < PHASE or not all(done[1].query() for done in copies):
            for way, done in zip(ways, copies, strict=True):
                while len(done) < AHEAD or done[-AHEAD].query():  # a call may take as long as some copies
                    done.append(copy(way))
            work()
            calls += 1
        copies = [[event for event in done if event.query()] for done in copies]
        for stream in streams:
            stream.synchronize()
        return calls / took, *(1e3 * COPY * (len(done) - 1) / done[0].elapsed_time(done[-1]) for done in copies)

    idle = lambda: time.sleep(1e-3)
    flow(idle, 0, 1)
    (_, up), (_, down), (_, *both) = flow(idle, 0), flow(idle, 1), flow(idle, 0, 1)
    (alone,), (_, reading), (crowded, *copied) = flow(update), flow(update, 0), flow(update, 0, 1)
    memory.close()
    lost = max(0.01, 1 - crowded / alone)  # of the updates' time, to what is copied meanwhile
    return {"pin": pin, "h2d": up, "d2h": down, "duplex": min(1.0, both[0] / up, both[1] / down), "adam": n * alone,
            "beside": 1.0, "reading": min(1.0, reading / up), "dram": sum(copied) / lost}  # fmt: skip


def timed(fn: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call and of the GPU's work that it starts."""
    start = _now(device)
    fn()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def block_seconds(
    cfg: ModelConfig, dtype: str, device: torch.device, lengths: Sequence[int], kept: Sequence[str] = (), u: int = 1
) -> tuple[float, ...]:
    """Seconds of forward and backward of unit u, a block or half of one, over documents of these lengths, which saves
    `kept`.
    """
    n, real = sum(lengths), DTYPE[dtype]
    w, g = (model.weights(cfg, u, unit) for unit in _unit(cfg, u, dtype, device))
    x, y, dy, dx = (torch.randn(n, cfg.width, dtype=real, device=device) for _ in range(4))
    saved = {name: torch.empty(shape, dtype=torch.float32 if of == "F32" else real, device=device)
             for name, (shape, of) in shapes.saved_shapes(cfg, n).items() if name in kept}  # fmt: skip
    rows = make_rows(lengths, rope_tables(cfg, max(lengths), device), device)
    forward = lambda: model.forward(cfg, u, w, x, rows, saved, y)
    backward = lambda: model.backward(cfg, u, w, g, x, saved, dy, rows, dx)
    return _seconds((forward, backward), device)


def loss_seconds(cfg: ModelConfig, dtype: str, device: torch.device, tokens: int, learned: int) -> float:
    """Seconds of the head on so many tokens, of which `learned` have a label: the loss and all its gradients."""
    cfg, real = replace(cfg, tied=False), DTYPE[dtype]
    w, g = (model.weights(cfg, cfg.n_units - 1, unit) for unit in _unit(cfg, cfg.n_units - 1, dtype, device))
    x, dx = (torch.randn(tokens, cfg.width, dtype=real, device=device) for _ in range(2))
    labels, rows = torch.zeros(tokens, dtype=torch.int64, device=device), torch.arange(learned, device=device)
    loss = lambda: head.head_loss(cfg, w, w.output, x, labels, rows, 1.0, g, g.output, dx)
    return _seconds((loss,), device)[0]


def finish_seconds(device: torch.device, n: int) -> float:
    """Seconds of making an fp32 gradient of n elements ready for its update."""
    wide, out = (torch.ones(n, device=device) for _ in range(2))
    return _seconds((lambda: ops.grad_finish(wide, out=out),), device)[0]


def _unit(cfg: ModelConfig, u: int, dtype: str, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A unit's weights, drawn at random, and zeros for its gradients, by tensor name."""
    layout = pack(shapes.weight_groups(cfg, u), dtype)
    buffers = [torch.zeros(layout.span, dtype=torch.uint8, device=device) for _ in range(2)]
    flat(buffers[0], dtype, layout.nbytes // DTYPE[dtype].itemsize).normal_(std=0.02)
    return views(layout, buffers[0]), views(layout, buffers[1])


def _seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> tuple[float, ...]:
    """The least time of each of `calls`, made in turn: the first turn warms up, and others may be using the CPU."""
    turns: list[list[float]] = []
    while len(turns) < 2 or (len(turns) < TURNS and sum(map(sum, turns)) < SECONDS):
        turns.append([timed(call, device) for call in calls])
    return tuple(map(min, zip(*turns, strict=True)))


# ---------------------------------------------------------------- drives


def drive(folder: Path) -> dict:
    """What tells one drive from another."""
    number = folder.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    models = [f for f in (block / "device/model", block / "../device/model") if f.exists()]
    return {"device": number, "model": models[0].read_text().strip() if models else "",
            "bytes": shutil.disk_usage(folder).total}  # fmt: skip


def drive_rates(folder: Path, seconds: float = 4.0, most: int = 4 << 30) -> dict[str, float]:
    """Bytes/s that the drive under `folder` reads and writes, each alone, and `mixed`, the share that is left of both
    when they happen at once. Takes three times `seconds`. Raises OSError where there is no room or no right to try.
    """
    nbytes = min(most, shutil.disk_usage(folder).free // 8) // (2 * CHUNK) * 2 * CHUNK
    with Temporary(HIDDEN, folder) as own:
        device = open_device(own)  # tried out, as the store's own is
        scratch = Scratch([device], max(nbytes, 2 * CHUNK))
        try:
            written, took = _flow(scratch, {"write": (0, nbytes)}, seconds)
            write = written["write"] / took
            moved, took = _flow(scratch, {"read": (0, min(nbytes, written["write"]))}, seconds)
            read = moved["read"] / took
            moved, took = _flow(scratch, {"read": (0, nbytes // 2), "write": (nbytes // 2, nbytes)}, seconds)
        finally:
            device.io.close()  # first: after an error something may be in flight
            scratch.close()
    return {"ssd_read": read, "ssd_write": write, "mixed": (moved["read"] / read + moved["write"] / write) / took}


def _flow(scratch: Scratch, ways: dict[str, tuple[int, int]], seconds: float) -> tuple[dict[str, int], float]:
    """(bytes moved each way, seconds): each way goes round its part of the file, some requests in flight at a time."""
    at, moved = {way: first for way, (first, _) in ways.items()}, dict.fromkeys(ways, 0)
    start, flying = time.perf_counter(), deque()

    def go(way: str, buffer) -> None:
        flying.append((getattr(scratch, way)(at[way], buffer), way, buffer))
        first, last = ways[way]
        at[way] = at[way] + CHUNK if at[way] + 2 * CHUNK <= last else first

    for _ in range(DEPTH):
        for way in ways:
            go(way, arena(CHUNK))
    while flying:
        future, way, buffer = flying.popleft()
        future.result()
        moved[way] += CHUNK
        if time.perf_counter() - start < seconds:
            go(way, buffer)
    return moved, time.perf_counter() - start

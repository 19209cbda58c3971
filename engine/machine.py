"""What this machine has: memory that the run may use, and how fast the device multiplies."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trireme.engine.memory import DTYPE
from trireme.engine.rates import DRIVES, SHARED, Machine, Rates
from trireme.kernels.host_adamw import Workers
from trireme.models.config import InputError

RAM_SHARE = 0.85  # of what this process may use
GPU_RESERVE = 512 << 20  # bytes for kernels loaded late, library workspaces and fragmentation


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises InputError where cuda is asked for and missing."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device. Leave it out to train on the CPU.")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def available_ram() -> int:
    """Bytes that this process may still take: what is available, within every cgroup limit above it."""
    found = [_meminfo("MemAvailable")]
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            ceiling = int((_CGROUP / limit).read_text())
            taken = int((_CGROUP / used).read_text()) - _reclaimable(_CGROUP / stat)
            found.append(ceiling - taken)
        except (OSError, ValueError):  # no such limit here ("max" is none)
            continue
    return max(0, min(found))


_CGROUP = Path("/sys/fs/cgroup")


def _reclaimable(stat: Path) -> int:
    """Page cache that a cgroup counts as used, in bytes."""
    for line in stat.read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limits(device: torch.device, gpu_memory: int | None, ram: int | None) -> dict[str, int]:
    """Bytes that the plan may use in gpu and host. What is given is a hard limit; else what is free, less a reserve.

    On a CUDA device the GPU's limit counts the driver's context too. On the CPU the gpu tier is RAM of its own limit.
    """
    free = available_ram()
    host = ram if ram is not None else int(free * RAM_SHARE)
    if device.type != "cuda":
        gpu = gpu_memory if gpu_memory is not None else host // 2
        return {"gpu": gpu, "host": host if ram is not None or gpu_memory is not None else host - gpu}
    torch.zeros(1, device=device)  # makes the context, so that its size is seen
    gpu_free, total = torch.cuda.mem_get_info(device)
    context = min(total - gpu_free, 1 << 30)
    limit = gpu_free if gpu_memory is None else min(gpu_free, gpu_memory - context)
    if limit <= GPU_RESERVE:
        raise InputError(
            f"--gpu-memory: the driver's context and a reserve alone take {context + GPU_RESERVE >> 20} MiB."
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return {"gpu": limit - GPU_RESERVE, "host": host}


def memory_in_use(device: torch.device) -> tuple[float, float]:
    """(peak GiB of the GPU allocator, peak GiB of this process's resident memory)."""
    gpu = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return gpu / 2**30, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product on random data: what MFU is measured against."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    repeats = 5
    for _ in range(2):
        a @ b
    start = _now(device)
    for _ in range(repeats):
        a @ b
    return 2 * n**3 * repeats / (_now(device) - start)


def this_machine(device: torch.device, dtype: str, limits: dict[str, int], folders: Sequence[str]) -> Machine:
    """This machine and its rates, measured in a few seconds. Nothing is written, so a drive is taken to be a usual one.

    `folders`: where the store is to be. On the CPU both tiers are RAM, and copies between them are CPU copies.
    """
    places = [next(p for p in (Path(f), *Path(f).absolute().parents) if p.exists()) for f in folders]
    disks = {place.stat().st_dev: shutil.disk_usage(place).free for place in places}
    drive, cuda = DRIVES["gen4"], device.type == "cuda"
    adam = _adam_rate(dtype, 1 << 25 if cuda else 1 << 22)
    copy = _copy_rate(device, device)
    up, down = (
        (_copy_rate(torch.device("cpu"), device), _copy_rate(device, torch.device("cpu"))) if cuda else (copy,) * 2
    )
    dram = max(28 * adam * SHARED, 0.0 if cuda else copy)
    rates = Rates(
        matmul_rate(device, DTYPE[dtype]), copy, up, down, adam, dram,
        ssd_read=len(disks) * drive.read, ssd_write=len(disks) * drive.write,
    )  # fmt: skip
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {len(os.sched_getaffinity(0))} cores"
    room = sum(disks.values())
    drives = f"{room / 1e9:,.0f} GB of disk free (speed of {len(disks)} {drive.name}{'s' * (len(disks) > 1)} assumed)"
    return Machine(name, limits["gpu"], limits["host"], rates, room, drives=drives)


def _copy_rate(source: torch.device, target: torch.device) -> float:
    """Bytes/s of a large copy: pinned between CPU and GPU; read plus written within one memory."""
    nbytes = 64 << 20 if "cuda" in (source.type, target.type) else 16 << 20
    make = lambda d, other: torch.ones(nbytes, dtype=torch.uint8, device=d, pin_memory=d.type != other.type)  # noqa: E731
    a = make(source, target) if source.type == "cpu" else torch.ones(nbytes, dtype=torch.uint8, device=source)
    b = make(target, source) if target.type == "cpu" else torch.ones(nbytes, dtype=torch.uint8, device=target)
    device = source if source.type == "cuda" else target
    best = min(_timed(lambda: b.copy_(a, non_blocking=True), device) for _ in range(3))
    return nbytes * (2 if source.type == target.type else 1) / best


def _adam_rate(dtype: str, n: int) -> float:
    """Parameters/s of the update on all of the CPU's workers, out of cache."""
    w, grad = torch.ones(n, dtype=DTYPE[dtype]), torch.ones(n, dtype=DTYPE[dtype])
    lo = torch.zeros(n, dtype=torch.int16) if dtype == "BF16" else None
    m, v, clip = torch.zeros(n), torch.ones(n), torch.ones(1)
    hyper = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, n_decay=0, step=1)
    with Workers() as workers:
        update = lambda: workers.adamw_(w, lo, m, v, grad, clip, **hyper)  # noqa: E731
        return n / min(_timed(update, torch.device("cpu")) for _ in range(3))


def _timed(fn: Callable[[], object], device: torch.device) -> float:
    start = _now(device)
    fn()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()

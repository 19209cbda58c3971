"""What this process may use of the machine: a device, memory within every limit set on it, and drives."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from trireme.engine.plan import Limits
from trireme.engine.planner.rates import CODE
from trireme.models.config import InputError
from trireme.storage.files import existing

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
    for group, limit, used in _memory_groups():
        try:
            found.append(int((group / limit).read_text()) - int((group / used).read_text()) + _reclaimable(group))
        except (OSError, ValueError):  # no such limit here ("max" is none)
            continue
    return max(0, min(found))


_CGROUP, _GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _memory_groups() -> Iterator[tuple[Path, str, str]]:
    """(folder, name of its limit, name of what it uses) of this process's memory cgroup and all above it, of either
    version. In a container the outer part of the path may not be there to be seen; its own limit is the root's.
    """
    for line in _GROUPS.read_text().splitlines() if _GROUPS.exists() else ["0::/", "1:memory:/"]:
        number, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            if number == "0":
                yield _CGROUP / group, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                yield _CGROUP / "memory" / group, "memory.limit_in_bytes", "memory.usage_in_bytes"


def _reclaimable(group: Path) -> int:
    """Page cache that a cgroup counts as used, in bytes; version 1 gives the sum over the groups below it apart."""
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limits(device: torch.device, gpu_memory: int | None, ram: int | None) -> Limits:
    """Bytes that the plan may use. What is given is a hard limit; else what is free, less a reserve.

    On a CUDA device the GPU's limit counts the driver's context too. On the CPU the gpu tier is RAM as well: half of
    it, unless it is given a limit of its own.
    """
    host = ram if ram is not None else int(available_ram() * RAM_SHARE)
    if device.type != "cuda":
        return Limits(host // 2, host - host // 2) if gpu_memory is None else Limits(gpu_memory, host)
    torch.zeros(1, device=device)  # makes the context, so that its size is seen
    free, total = torch.cuda.mem_get_info(device)
    context = min(total - free, 1 << 30)
    limit = free if gpu_memory is None else min(free, gpu_memory - context)
    if limit <= GPU_RESERVE:
        raise InputError(
            f"--gpu-memory: the driver's context and a reserve alone take {context + GPU_RESERVE >> 20} MiB."
        )
    return Limits(limit - GPU_RESERVE, max(0, host - CODE))


def hold_to(limits: Limits, device: torch.device) -> None:
    """From now on torch refuses to allocate more of a CUDA device than the limit and the reserve beside it."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limits.gpu + GPU_RESERVE) / total), device)


def memory_in_use(device: torch.device) -> tuple[float, float]:
    """(peak GiB of the GPU allocator, peak GiB of this process's resident memory)."""
    gpu = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return gpu / 2**30, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def drive_of(folder: str | Path) -> int:
    """The number of the device that the folder is or will be on."""
    return existing(folder).stat().st_dev


def places_of(folders: Sequence[str | Path]) -> list[Path]:
    """One existing folder on each of the drives that the folders are or will be on."""
    return list({drive_of(folder): existing(folder) for folder in folders}.values())

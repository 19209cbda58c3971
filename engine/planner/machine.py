"""What this machine has: a device, memory that the run may use, and how fast all of it is."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trireme.engine.memory import DTYPE
from trireme.engine.plan import Plan
from trireme.engine.planner import probe
from trireme.engine.planner.predict import PASSES, Batch, unit_seconds
from trireme.engine.planner.rates import CODE, DRIVES, ENDURANCE, GB, Machine, rates_of
from trireme.models import shapes
from trireme.models.config import InputError, ModelConfig
from trireme.storage.files import existing

RAM_SHARE = 0.85  # of what this process may use
TRIED_SECONDS, TRIED_TOKENS = 1.0, 512  # of a block on which it is timed: about so long, but so many tokens
TRIED_VOCAB, TRIED_GRADIENT = 1 << 14, 1 << 24  # most rows of the output matrix, and parameters, that are timed
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


def memory_limits(device: torch.device, gpu_memory: int | None, ram: int | None) -> dict[str, int]:
    """Bytes that the plan may use in gpu and host. What is given is a hard limit; else what is free, less a reserve.

    On a CUDA device the GPU's limit counts the driver's context too. On the CPU the gpu tier is RAM as well: half of
    it, unless it is given a limit of its own.
    """
    free = available_ram()
    host = ram if ram is not None else int(free * RAM_SHARE)
    if device.type != "cuda":
        if gpu_memory is not None:
            return {"gpu": gpu_memory, "host": host}
        return {"gpu": host // 2, "host": host - host // 2}
    torch.zeros(1, device=device)  # makes the context, so that its size is seen
    gpu_free, total = torch.cuda.mem_get_info(device)
    context = min(total - gpu_free, 1 << 30)
    limit = gpu_free if gpu_memory is None else min(gpu_free, gpu_memory - context)
    if limit <= GPU_RESERVE:
        raise InputError(
            f"--gpu-memory: the driver's context and a reserve alone take {context + GPU_RESERVE >> 20} MiB."
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return {"gpu": limit - GPU_RESERVE, "host": max(0, host - CODE)}


def memory_in_use(device: torch.device) -> tuple[float, float]:
    """(peak GiB of the GPU allocator, peak GiB of this process's resident memory)."""
    gpu = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return gpu / 2**30, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product on random data: what MFU is measured against."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    for _ in range(2):
        a @ b
    return 2 * n**3 * 5 / probe.timed(lambda: [a @ b for _ in range(5)], device)


def this_machine(device: torch.device, dtype: str, limits: dict[str, int], folders: Sequence[str]) -> Machine:
    """This machine and its rates, measured in a few seconds or before. Its drives are taken to be usual ones.

    `folders`: where the store is to be. On the CPU both tiers are RAM, and copies between them are CPU copies.
    """
    cuda = device.type == "cuda"
    measure = lambda: {"matmul": matmul_rate(device, DTYPE[dtype])} | probe.processor_rates(device, dtype)
    found, how = probe.kept(probe.processor(device, dtype), measure) if cuda else (measure(), "measured")
    places, usual = _places(folders), DRIVES["gen4"]
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {len(os.sched_getaffinity(0))} cores"
    disks, count = [shutil.disk_usage(place) for place in places], len(places)
    room, worn = sum(disk.free for disk in disks), ENDURANCE * sum(disk.total for disk in disks)
    rates = rates_of(found | {"ssd_read": count * usual.read, "ssd_write": count * usual.write})
    drives = f"{room / GB:,.0f} GB of disk free (speed of {count} {usual.name}{'s' * (count > 1)} assumed)"
    return Machine(name, limits["gpu"], limits["host"], rates, room, worn, drives, how)


def as_planned(machine: Machine, cfg: ModelConfig, plan: Plan, batch: Batch, device: torch.device) -> Machine:
    """The machine with what the CPU's computations reach in a step by this plan: blocks and the head are timed.

    On a CPU all depends on shapes: how long documents are, how many labels count, what is saved, what its caches hold.
    So what is timed is what is predicted: a micro-batch of usual documents, or a part of it where that takes long.
    Not on a GPU. For the moments of a test it holds a clock that it cannot hold in a run: on an H200 predictions by a
    timed block were 10 to 18 % too fast, those by the shares in rates.py within 7 %. The first steps correct them.
    """
    if device.type == "cuda":
        return machine
    cfg = replace(plan.cut(cfg), vocab=min(cfg.vocab, TRIED_VOCAB))  # the loss takes as long as the vocabulary is large
    batch, names = _tried(cfg, plan, machine, batch), shapes.unit_names(cfg)
    known = unit_seconds(cfg, plan, machine.rates, batch)
    n = min(TRIED_GRADIENT, max(shapes.parameters(cfg, u) for u in range(cfg.n_units)))
    finish = 3 * 4 * n * PASSES["finish"] / machine.rates.copy
    said = {"forward": 0.0, "backward": 0.0, "loss": known["loss", names[-1]], "finish": finish}
    took = said | {"loss": probe.loss_seconds(cfg, plan.dtype, device, batch.tokens, batch.learned),
                   "finish": probe.finish_seconds(device, n)}  # fmt: skip
    for (_, kept), units in _alike(cfg, plan).items():
        each = probe.block_seconds(cfg, plan.dtype, device, batch.lengths, kept, units[0])
        for kind, seconds in zip(("forward", "backward"), each, strict=True):
            said[kind] += len(units) * known[kind, names[units[0]]]
            took[kind] += len(units) * seconds
    shares = {kind: getattr(machine.rates, kind) * said[kind] / took[kind] for kind in said}
    return replace(machine, rates=replace(machine.rates, **shares))


def _tried(cfg: ModelConfig, plan: Plan, machine: Machine, batch: Batch) -> Batch:
    """A micro-batch, or as much of it as a block should be through with in TRIED_SECONDS."""
    seconds = unit_seconds(cfg, plan, machine.rates, batch)
    name = shapes.unit_names(cfg)[1]
    share = TRIED_SECONDS / (seconds["forward", name] + seconds["backward", name])
    tokens = min(batch.tokens, max(TRIED_TOKENS, int(share * batch.tokens)))
    return replace(batch, tokens=tokens, seq_len=min(batch.seq_len, tokens))


def _alike(cfg: ModelConfig, plan: Plan) -> dict[tuple[str, tuple[str, ...]], list[int]]:
    """Kind and what is saved -> the blocks, or halves of blocks, of that kind that save that."""
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for u, unit in enumerate(plan.units[1:-1], 1):
        found.setdefault((shapes.kind(cfg, u), tuple(name for name, _ in unit.saved)), []).append(u)
    return found


def with_drives(machine: Machine, folders: Sequence[str]) -> Machine:
    """The machine with the measured rates of the drives under `folders`; as it was where they cannot be tried."""
    try:
        tried = [probe.kept(probe.drive(place), lambda place=place: probe.drive_rates(place))
                 for place in _places(folders)]  # fmt: skip
    except OSError:
        return machine
    read, write = (sum(found[name] for found, _ in tried) for name in ("ssd_read", "ssd_write"))
    rates = replace(machine.rates, ssd_read=read, ssd_write=write, mixed=min(found["mixed"] for found, _ in tried))
    each = f"read {read / GB:.1f}, write {write / GB:.1f} GB/s" + f", {rates.mixed:.2f} of it both at once"
    return replace(machine, rates=rates, drives=f"{machine.ssd / GB:,.0f} GB of disk free, {each} ({tried[0][1]})")


def drive(folder: str | Path) -> int:
    """The number of the device that the folder is or will be on."""
    return existing(folder).stat().st_dev


def _places(folders: Sequence[str]) -> list[Path]:
    """One existing folder on each of the drives that the folders are or will be on."""
    return list({drive(folder): existing(folder) for folder in folders}.values())

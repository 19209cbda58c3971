"""What this process may use of the machine: GPUs, memory within all limits, drives."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import gib
from trireme.engine.plan import MOST_GPUS, DoesNotFit, Limits
from trireme.engine.planner.rates import CODE, RAM_SHARE, Machine
from trireme.engine.queues.cgroups import groups
from trireme.models.config import InputError, ModelConfig
from trireme.storage.files import existing
from trireme.storage.layout import round_up

TEMPORARIES = 256 << 20  # RAM of plain torch in a step, and of libraries
MEMINFO, STATM = Path("/proc/meminfo"), Path("/proc/self/statm")
DRIVERS = Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1")  # there with a GPU of NVIDIA
GPU_RESERVE = 512 << 20  # late kernels, library workspaces, fragmentation
ALIKE = 1 << 30  # equal GPUs whose free memory differs by less have the least of it


def choose_device(wanted: str, drivers: Sequence[Path] = DRIVERS) -> torch.device:
    """The device that --device asks for. Warns where a file of `drivers` is there, but torch sees no GPU.

    Raises InputError if there is no CUDA GPU, or it is AMD's or has no bf16.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device. Leave it out to train on the CPU.")
    if wanted == "cpu" or not torch.cuda.is_available():
        if wanted != "cpu" and any(path.exists() for path in drivers) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            reason = "needs a newer NVIDIA driver" if torch.version.cuda else "is built without CUDA: install another"
            warnings.warn(f"the GPU is not used: torch {torch.__version__} sees none. It {reason}", stacklevel=2)
        return torch.device("cpu")
    if torch.version.hip:
        raise InputError(
            "this torch is for AMD GPUs (ROCm), the kernels are for NVIDIA GPUs. Install another, or --device cpu."
        )
    if torch.cuda.get_device_capability()[0] < 8:  # before Ampere
        raise InputError(
            f"{torch.cuda.get_device_name()} has no bf16, which training on a GPU needs. Add --device cpu."
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_gpus(wanted: str | int, device: torch.device) -> int:
    """The number of GPUs, of which `device` is the first. On a CPU they are emulated. Raises InputError."""
    if device.type != "cuda":
        gpus = 1 if wanted == "all" else int(wanted)
        if gpus > MOST_GPUS:
            raise InputError(f"--gpus {gpus}: at most {MOST_GPUS}.")
        return gpus
    visible = torch.cuda.device_count() - (device.index or 0)
    gpus = visible if wanted == "all" else int(wanted)
    if gpus > visible:
        raise InputError(f"--gpus {gpus}: torch sees {visible}. Lower it, or look at CUDA_VISIBLE_DEVICES.")
    return gpus


def check_kernels(cfg: ModelConfig, dtype: str, device: torch.device, assumed: Machine | None) -> None:
    """Raises InputError if no kernel of a GPU computes the model, or none can be compiled. `assumed`: of --assume."""
    if device.type != "cuda":
        return
    from trireme.kernels.launch import widest_head  # late: Triton takes a second
    from trireme.kernels.launcher import driver_error

    size = widest_head(torch.float32 if dtype == "fp32" else torch.bfloat16)
    if cfg.widest_head > size:
        raise InputError(f"the model has heads of {cfg.widest_head}, a GPU computes heads of {size}. Add --device cpu.")
    if cfg.fp8 and (assumed.rates.fp8 == 0 if assumed else torch.cuda.get_device_capability(device) < (8, 9)):
        raise InputError("--dtype fp8: this GPU multiplies no fp8; Ada, Hopper and newer do. Leave it out.")
    if not assumed and (why := driver_error()):
        raise InputError(f"Triton compiles no kernel here ({why.rstrip('.')}). Install gcc and python3-dev.")


def are_equal(device: torch.device, gpus: int) -> bool:
    """Whether the GPUs give bitwise equal results."""
    return len(set(map(model_of, gpus_from(device, gpus)))) == 1


def model_of(device: torch.device) -> str:
    """What tells GPUs apart that give other results."""
    if device.type != "cuda":
        return "the CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.multi_processor_count} multiprocessors)"


def computed_by(device: torch.device) -> str:
    """What results depend on besides the plan: versions of libraries, and the kind of GPU."""
    parts = [f"torch {torch.__version__}", model_of(device)]
    if device.type == "cuda":
        parts.insert(1, f"triton {version('triton')}")
    return ", ".join(parts)


class Counters:
    """What NVML reports of GPUs; nothing without its library, with an old one, or if it does not know one of them."""

    def __init__(self, uuids: Sequence[str], library: str = "libnvidia-ml.so.1"):
        """`uuids`: without "GPU-", as torch gives them."""
        handles, self.handles = [ctypes.c_void_p() for _ in uuids], list[ctypes.c_void_p]()
        with suppress(OSError, AttributeError):
            self.nvml = ctypes.CDLL(library)
            names = [f"GPU-{uuid}".encode() for uuid in uuids]
            failed = self.nvml.nvmlInit_v2() or self._each("nvmlDeviceGetHandleByUUID", names, handles)
            self.handles = [] if failed else handles

    def read(self, function: str, number: type[ctypes.c_uint | ctypes.c_ulonglong] = ctypes.c_uint) -> list[int]:
        """A number of each GPU; empty if one of them does not report it."""
        numbers = [number() for _ in self.handles]
        with suppress(AttributeError):
            return [] if self._each(function, self.handles, numbers) else [result.value for result in numbers]
        return []

    def _each(self, function: str, gpus: Sequence[bytes | ctypes.c_void_p], results: Sequence[Any]) -> bool:
        """Calls a function for each GPU; whether one of the calls fails. Raises AttributeError if there is none."""
        return any(self.nvml[function](gpu, ctypes.byref(out)) for gpu, out in zip(gpus, results, strict=True))

    def joules(self) -> float:
        """The energy that the GPUs have used since their drivers were loaded; NaN if they do not count it."""
        millijoules = self.read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
        return sum(millijoules) / 1e3 if millijoules else math.nan


def counters(device: torch.device, gpus: int = 1) -> Counters:
    """Those of the GPUs from `device`; of a CPU none."""
    devices = gpus_from(device, gpus) if device.type == "cuda" else []
    return Counters([str(torch.cuda.get_device_properties(gpu).uuid).removeprefix("GPU-") for gpu in devices])


# Functions of NVML, which ask for (link, limits), by what they say; the generation is the best of card and slot.
_ASKED = {
    "lanes": "nvmlDeviceGetCurrPcieLinkWidth",
    "generation": "nvmlDeviceGetMaxPcieLinkGeneration",
    "generation now": "nvmlDeviceGetCurrPcieLinkGeneration",
    "lanes of the card": "nvmlDeviceGetMaxPcieLinkWidth",
    "milliwatts": "nvmlDeviceGetEnforcedPowerLimit",
}
LASTING = ("lanes", "generation", "milliwatts")  # an idle link slows down


def gpu_now(device: torch.device) -> dict[str, int]:
    """What NVML reports of a GPU's link and power limit, by the names of _ASKED; without what it does not report."""
    counted = counters(device)
    return {name: numbers[0] for name, function in _ASKED.items() if (numbers := counted.read(function))}


def available_ram() -> int:
    """Bytes of RAM that this process may still take within its control groups; beyond memory.high it would
    be slowed down.
    """
    room = [_unused_ram()]
    for group, limit, usage in ((group, *files) for group, v in groups("memory") for files in MEMORY[v]):
        try:
            room.append(int((group / limit).read_text()) - int((group / usage).read_text()) + _reclaimable(group))
        except (OSError, ValueError):  # no file, or no limit: "max"
            continue
    return max(0, min(room))


# Files of a cgroup's limits and of its use, by version.
MEMORY = {
    1: [("memory.limit_in_bytes", "memory.usage_in_bytes")],
    2: [("memory.max", "memory.current"), ("memory.high", "memory.current")],
}


def _reclaimable(group: Path) -> int:
    """Bytes of page cache that a group counts as used. "total_" of version 1 includes the groups below."""
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def _unused_ram() -> int:
    """Bytes of RAM that the kernel says are available; all RAM if it does not say."""
    with suppress(OSError):  # a container may hide it
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limits(device: torch.device, gpu_memory: int | None, ram: int | None, gpus: int = 1) -> Limits:
    """Bytes that a plan may use: the given limits, else free memory, less a reserve. Raises InputError, DoesNotFit.

    `gpu_memory`: of each GPU, with the driver's context. `ram`: of this process. On the CPU the tier "gpu" is half of
    the RAM; if both are given, they are the tiers. If other processes use a GPU, it has a limit of its own.
    """
    if device.type != "cuda" and gpu_memory is not None:
        host = int(available_ram() * RAM_SHARE) if ram is None else ram
        return Limits(gpu_memory, host, gpus, free_ram=ram is None)
    if device.type != "cuda":
        host = _left_by_the_process(ram, TEMPORARIES)
        return Limits(host // 2 // gpus, host - host // 2, gpus, free_ram=ram is None)
    free = [_free(gpu, gpu_memory) for gpu in gpus_from(device, gpus)]
    limit, context = min(free)
    if limit <= GPU_RESERVE:
        subject = f"the GPU has {gib(limit)} free" if gpu_memory is None else "--gpu-memory"
        raise InputError(f"{subject}: the driver's context and a reserve alone take {context + GPU_RESERVE >> 20} MiB.")
    less: tuple[int, ...] = ()
    largest = max(room for room, _ in free)
    if not are_equal(device, gpus) or largest - limit >= ALIKE:
        limit, less = largest, tuple(largest - room for room, _ in free)
    host = _left_by_the_process(ram, CODE)
    return Limits(limit - GPU_RESERVE, host, gpus, all_free=gpu_memory is None, free_ram=ram is None, less=less)


def gpus_from(device: torch.device, gpus: int) -> list[torch.device]:
    """`device` and the GPUs after it; emulated GPUs are all the same device."""
    indices = range(1, gpus) if device.type == "cuda" else ()
    return [device, *(torch.device("cuda", (device.index or 0) + gpu) for gpu in indices)]


def _free(device: torch.device, gpu_memory: int | None) -> tuple[int, int]:
    """(usable bytes of a GPU, those of the driver's context)"""
    torch.zeros(1, device=device)  # makes the context
    free, total = torch.cuda.mem_get_info(device)
    context = min(total - free, 1 << 30)
    return free if gpu_memory is None else min(free, gpu_memory - context), context


def _left_by_the_process(ram: int | None, later: int) -> int:
    """Bytes of RAM for the plan: of the limit, what the process does not hold and will not take `later`. Raises
    DoesNotFit.
    """
    if ram is None:
        return max(0, int(available_ram() * RAM_SHARE) - later)
    held = resident() + later
    if ram <= held:
        raise DoesNotFit(f"--ram {gib(ram)}: Python and its libraries alone take {gib(held)} of RAM. Raise it.")
    return ram - held


def resident() -> int:
    """Bytes of RAM that this process holds, rounded up so that plans repeat."""
    try:
        nbytes = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: what it held at most
        nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return round_up(nbytes, 64 << 20)


def limit_torch(limits: Limits, device: torch.device) -> None:
    """Makes torch refuse CUDA memory beyond the limit and its reserve."""
    for gpu, place in enumerate(gpus_from(device, limits.gpus)) if device.type == "cuda" else ():
        total = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limits.gpu_bytes(gpu) + GPU_RESERVE) / total), place)


def memory_in_use(device: torch.device, gpus: int = 1) -> tuple[float, float]:
    """(GiB of the allocator on the fullest GPU, GiB of RAM of the process), both at their peak."""
    cuda = device.type == "cuda"
    gpu = max(map(torch.cuda.max_memory_reserved, gpus_from(device, gpus))) if cuda else 0
    return gpu / 2**30, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def drive_of(folder: str | Path) -> int:
    """The device number of a folder, which need not exist."""
    return existing(folder).stat().st_dev


def one_per_drive(folders: Sequence[str | Path]) -> list[Path]:
    """One existing folder on each of the drives."""
    return list({drive_of(folder): existing(folder) for folder in folders}.values())

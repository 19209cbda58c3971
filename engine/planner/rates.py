"""The rates of a machine, as measured or for `--assume`, and data of known drives. Imports no torch.

Numbers are from data sheets or, where marked "measured", from this project's benchmarks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from trireme.engine.amounts import gib, natural, positive, size
from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.plan import MOST_GPUS, Limits
from trireme.engine.planner.gpus import GPUS, Gpu, bus_of, find_gpu
from trireme.models.config import InputError

T = TypeVar("T")
GB, TB = 10**9, 10**12


@dataclass(frozen=True)
class Rates:
    """The sustained rate of each resource without others: FLOP/s, bytes/s, parameters/s, or seconds."""

    matmul: float  # FLOP/s of a large square GEMM in the compute dtype on random data
    copy: float  # bytes/s of GPU memory, read plus written
    h2d: float  # bytes/s from RAM to a GPU
    d2h: float  # bytes/s from a GPU to RAM
    adam: float  # AdamW on the CPU with fp32 moments, parameters/s
    dram: float  # bytes/s of RAM: an update moves ADAM_BYTES a parameter, a copied byte delays it by 1 / dram seconds
    adam8: float = 0.0  # with 8-bit moments; 0: as `adam`
    spare: float = 0.0  # bytes/s of copies that do not delay updates; set by `with_moments`
    ssd_read: float = 0.0  # bytes/s of all drives, with full caches and without writes
    ssd_write: float = 0.0  # bytes/s of all drives, with full caches and without reads
    duplex: float = 0.92  # share of h2d and d2h left when both are busy
    reading: float = 0.82  # of h2d during CPU updates: 0.64 to 0.94 in 15 runs on Xeons; d2h kept 0.92 or more
    concurrent: float = 0.88  # of adam in a step, where it was not measured out of caches and during copies
    gap: float = 3e-6  # seconds of the GPU between two kernels
    launch_overhead: float = 0.0  # seconds of the CPU to launch a kernel; 0: the CPU computes itself
    task: float = 0.0  # seconds of the interpreter to issue and run a task, without kernels and copies
    latency: float = 5e-5  # seconds to pass a task to another queue
    pin: float = 3e9  # bytes/s at which RAM is pinned
    mixed: float = 1.0  # share of ssd_read and ssd_write left when both happen
    fp8: float = 0.0  # FLOP/s of a large fp8 matmul, sums in fp32; 0: none
    peer: float = 0.0  # bytes/s from a GPU's memory to another's, each way; 0: no peer access
    up_all: float = 0.0  # bytes/s from RAM to all GPUs at once, in total; 0: that of each times their number
    down_all: float = 0.0  # from all GPUs to RAM
    net: float = 1.25e9  # bytes/s from a host to another; 10 Gb/s where not measured
    # Share of `matmul`: a block's matmuls. Medians of task times on an H200, LLaMA shapes of 1.3B to 13B.
    gemm: float = 0.865
    gemm_fp8: float = 0.84  # of `fp8`
    # Grouped GEMMs of experts (kernels/experts) without the padding of tiles, and gradients of their matrices: tasks of
    # gpt-oss, Qwen3-30B, Mixtral, DeepSeek-V3 and Granite on an H200 take 0.95 to 1.1 times as long.
    grouped: float = 0.75
    grouped_fp8: float = 0.50  # of `fp8`: 0.44 to 0.59, on an H100
    grouped_add: float = 0.60
    # Recurrences, measured where a model has them. Of Qwen3.5-9B and Granite 4, documents of 1,024 tokens, on an H200.
    scan: float = 0.11
    scan_backward: float = 0.045
    # Share of these that tasks reach; corrected in a run.
    forward: float = 1.0
    backward: float = 1.0
    loss: float = 1.0
    finish: float = 1.0  # a gradient's norm and rounding

    @property
    def has_drive(self) -> bool:
        return bool(self.ssd_read and self.ssd_write)

    def with_moments(self, bits: int) -> Rates:
        """These rates with `adam` and `spare` for moments of this many bits.

        Updates with 32-bit moments are taken to use all of RAM's bandwidth; the delay by copies was measured with them.
        Both moments are read and written: with 8 bits that is 4 bytes a parameter, not 16.
        """
        adam = self.adam8 if bits == 8 and self.adam8 else self.adam
        bandwidth = (ADAM_BYTES - 4 * (32 - bits) / 8) * adam
        return replace(self, adam=adam, spare=max(0.0, ADAM_BYTES * self.adam - bandwidth))

    def times(self, share: float, names: tuple[str, ...]) -> Rates:
        """These rates with those of `names` multiplied by `share`."""
        return replace(self, **{name: getattr(self, name) * share for name in names})


# Shares of `matmul` that attention reaches in long documents, forward and backward, by width of heads (costs.HEADS), on
# an H200: of 128 in steps, of 512 alone, 8 x 2,048 tokens; 256 is taken to be as 128.
ATTENTION = {128: (0.76, 0.50), 256: (0.76, 0.50), 512: (0.25, 0.11)}

COMPUTATION = ("forward", "backward", "loss", "finish")


@dataclass(frozen=True)
class Drive:
    """An NVMe drive: sustained bytes/s, capacity in bytes, and bytes that it is rated to be written."""

    name: str
    read: float
    write: float
    capacity: int
    endurance: float


# Samsung 990 Pro 2 TB: reads 7.45 GB/s, writes 6.9, 1.4 with its fast cache full; 1,200 TB. Intel P5510: one drive
# write a day for 5 years.
DRIVES = {
    "gen4": Drive("consumer PCIe 4 drive", 7.0 * GB, 1.4 * GB, 2 * TB, 1200 * TB),
    "p5510": Drive("Intel P5510", 6.5 * GB, 3.4 * GB, 3840 * GB, 7000 * TB),
}
ENDURANCE = 600  # warranted writes over capacity of a consumer drive (1,200 TB of 2 TB)

SHARED = 1.05  # dram over what AdamW alone takes of it, in measured steps bound by it
LAUNCH_OVERHEAD = 1.3e-5  # seconds: 1.1e-5 to 1.7e-5 measured on Xeons
CONSUMER_DRAM = 70 * GB  # two channels of DDR5-5600: 89.6 GB/s on paper
CORE_ADAM = 0.6e9  # parameters/s of a core's AdamW: 0.62 on Xeons, 0.55 to 0.75 on Zen 4
CODE = 700 << 20  # bytes of RAM for code that is loaded and compiled with a GPU in first steps, samples, exports
GPU_OVERHEAD = 5 << 28  # bytes of an assumed GPU for the driver's context and kernels that are loaded later
DRIVE_SHARE = 0.95  # share of a drive that a plan may fill: the rest is for its file system, and keeps writes fast
RAM_SHARE = 0.85  # share of the available RAM that a plan may use


def rates_of(measured: Mapping[str, float]) -> Rates:
    """Rates from measured numbers by name. `matmul` and `adam` are required; zero and infinity count as missing.

    On a CPU there is no PCIe: a copy reads and writes RAM.
    """
    names = {f.name for f in fields(Rates)}
    rates = {k: v for k, v in measured.items() if k in names and v and math.isfinite(v)}
    dram = rates.setdefault("dram", ADAM_BYTES * rates["adam"] * SHARED)
    rates.setdefault("copy", GPUS["h200"].copy if "h2d" in rates else dram)
    bus: dict[str, Any] = {"h2d": dram / 2, "d2h": dram / 2}
    return Rates(**bus | rates)


SHEETS = "by data sheets"


@dataclass(frozen=True)
class Machine:
    """Memory, drives and rates that a plan is made for."""

    name: str  # of the GPU
    gpu: int  # bytes
    ram: int
    rates: Rates
    ssd: int = 0  # bytes of all drives that are free
    reserve: int = 0  # of these, to be left free
    endurance: float = 0.0  # bytes of warranted writes
    drives: str = "no SSD"
    how: str = SHEETS  # where the rates are from
    gpus: int = 1
    less: tuple[int, ...] = ()  # bytes by which each GPU has less than `gpu`, if they are unequal
    mixed: bool = False  # GPUs of several kinds: all are taken to be as fast as the slowest

    def first(self, gpus: int, gpu_memory: int | None = None) -> Machine:
        """The machine with `gpus` GPUs, its first ones or more of the same kind, of at most `gpu_memory` bytes each."""
        memory = gpu_memory or self.gpu
        less = tuple(max(0, memory - self.gpu + less) for less in self.less[:gpus])
        return replace(self, gpu=memory, gpus=gpus, less=less)

    @property
    def limits(self) -> Limits:
        """Bytes that a plan may use, as host.memory_limits gives them."""
        return Limits(self.gpu - GPU_OVERHEAD, int(self.ram * RAM_SHARE), self.gpus, less=self.less)

    def describe(self, on_gpu: bool = True) -> str:
        """A line with its parts and their speeds. Without a GPU both tiers are RAM, and there is no PCIe."""
        r = self.rates
        total = f" | RAM {gib(self.gpus * self.gpu - sum(self.less) + self.ram, 0)}"
        of_gpus = " and ".join(gib(self.gpu - less, 0) for less in self.less) or gib(self.gpu, 0)
        memory = f", {of_gpus} | RAM {gib(self.ram, 0)}" if on_gpu else total
        peer = f", GPU to GPU {r.peer / GB:.0f}" * (r.peer > 0)
        bus = f"PCIe {r.h2d / GB:.0f} GB/s{peer} | " if on_gpu else ""
        equal = self.gpus > 1 and not self.mixed
        several = f"{self.gpus} x " if on_gpu else f"{self.gpus} emulated GPUs on "
        return (
            f"{several * equal}{self.name}{memory}, {r.dram / GB:.0f} GB/s | {self.drives} | {bus}"
            f"CPU AdamW {r.adam / GB:.1f} G parameters/s ({self.how})"
        )


def machine(
    gpu: Gpu,
    ram: int,
    drive: Drive | None = None,
    drives: int = 1,
    dram: float = CONSUMER_DRAM,
    cores: float = math.inf,
) -> Machine:
    """A machine from its parts. `dram`: bytes/s of RAM, which AdamW reaches with enough cores."""
    adam = min(dram / ADAM_BYTES, cores * CORE_ADAM)
    rates = Rates(gpu.matmul, gpu.copy, gpu.bus, gpu.bus, adam, dram, launch_overhead=LAUNCH_OVERHEAD, fp8=gpu.fp8)
    plain = Machine(gpu.name, gpu.memory, ram, rates)
    if drive is None:
        return plain
    say = f"{drives} x {drive.capacity / TB:g} TB, read {drive.read / GB:g}, write {drive.write / GB:g} GB/s each"
    rates = replace(rates, ssd_read=drives * drive.read, ssd_write=drives * drive.write)
    ssd, endurance = drives * drive.capacity, drives * drive.endurance
    return replace(plain, rates=rates, ssd=ssd, reserve=reserved(ssd), endurance=endurance, drives=say)


def reserved(nbytes: int) -> int:
    """Bytes of a drive of this size that stay free."""
    return round((1 - DRIVE_SHARE) * nbytes)


PARTS = ("gpu", "ram", "ssd", "dram", "bus", "peer", "tflops", "cores")  # that --assume names
LIKE = "gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5"


def assume(text: str) -> Machine:
    """The machine of `gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5,dram=70,bus=x8,tflops=150,cores=16`. Raises InputError.

    `gpu=2xrtx4090`: two; `gpu=rtx4090+rtx3090`: unequal ones; `gpu=24GiB`: an RTX 4090 of that memory. `ssd` without
    @READ/WRITE (GB/s a drive): DRIVES["gen4"]. `dram`: GB/s of RAM. `bus`: lanes or GB/s of each GPU. `tflops`: TFLOP/s
    of a bf16 matrix multiplication. `cores`: those that update on the CPU. `peer`: GB/s each way of peer copies between
    GPUs.
    """
    words = [part.split("=", 1) for part in text.replace(" ", "").split(",")]
    texts = {word[0]: word[-1] for word in words if len(word) == 2}
    try:
        if not {"gpu", "ram"} <= texts.keys() <= set(PARTS) or len(texts) != len(words):
            raise ValueError(f"write it like {LIKE}, with gpu and ram at least; parts are {'=, '.join(PARTS)}=")
        parsed = unequal([_of_equal_gpus({**texts, "gpu": name}) for name in texts["gpu"].split("+")])
        if parsed.gpus > MOST_GPUS:
            raise ValueError(f"{parsed.gpus} GPUs are too many; a run has at most {MOST_GPUS}")
        peer = _read(texts, "peer", positive) * GB if "peer" in texts else 0.0
    except ValueError as error:
        raise InputError(f"--assume {text}: {error}.") from None
    return replace(parsed, rates=replace(parsed.rates, peer=peer))


def unequal(parts: Sequence[Machine]) -> Machine:
    """The machine with the GPUs of all `parts`, which have all else in common. Raises ValueError."""
    of_gpus = [part for part in parts for _ in range(part.gpus)]
    if len(parts) == 1:
        return parts[0]
    if len({part.ram for part in parts}) > 1 or len({part.rates.dram for part in parts}) > 1:
        raise ValueError("a GPU that shares the CPU's memory cannot be one of several")
    largest, slowest = max(part.gpu for part in of_gpus), min(of_gpus, key=lambda part: part.rates.matmul)
    less, name = tuple(largest - part.gpu for part in of_gpus), " + ".join(part.name for part in of_gpus)
    return replace(slowest, name=name, gpu=largest, gpus=len(of_gpus), less=less, mixed=True)


def _of_equal_gpus(texts: Mapping[str, str]) -> Machine:
    """With equal GPUs. Raises ValueError."""
    several = re.fullmatch(r"(\d{1,2})x(.+)", texts["gpu"])
    gpus, name = (natural(several[1]), several[2]) if several else (1, texts["gpu"])
    gpu = find_gpu(name, _read(texts, "tflops", positive) if "tflops" in texts else 0.0)
    ram = _read(texts, "ram", size)
    if "bus" in texts:
        gpu = replace(gpu, bus=bus_of(gpu, texts["bus"]))
    dram: float = CONSUMER_DRAM
    if gpu.unified:
        if ram >= gpu.memory:
            raise ValueError(f"the {gpu.name} has one memory of {gib(gpu.memory, 0)}; ram= is the CPU's part of it")
        gpu, dram = replace(gpu, memory=gpu.memory - ram), gpu.copy
    dram = _read(texts, "dram", positive) * GB if "dram" in texts else dram
    cores = _read(texts, "cores", positive) if "cores" in texts else math.inf
    drive, drives = _read(texts, "ssd", _drives) if "ssd" in texts else (None, 0)
    return replace(machine(gpu, ram, drive, drives, dram, cores=cores), gpus=gpus)


def _read(texts: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T:
    """A part as `parse` reads it. Raises ValueError, which names the part."""
    try:
        return parse(texts[name])
    except ValueError as error:
        raise ValueError(f"{name}={texts[name]}: {error}") from None


def _drives(text: str) -> tuple[Drive, int]:
    """The drives of `ssd=`, and their number. Raises ValueError."""
    match = re.fullmatch(r"(?:(\d+)x)?([^@]+?)(?:@([\d.]+)/([\d.]+))?", text)
    if not match:
        raise ValueError(f"{text!r} is not drives; write them like 2x2TB@7/5")
    capacity, like = size(match[2]), DRIVES["gen4"]
    read, write = (_speed(match[3]), _speed(match[4])) if match[3] else (like.read, like.write)
    return Drive("drive", read, write, capacity, ENDURANCE * capacity), natural(match[1] or "1")


def _speed(text: str) -> float:
    """Bytes/s of a number in GB/s or, from 100 on, MB/s, as on boxes of drives."""
    value = positive(text)
    return value * GB if value < 100 else value * GB / 1000

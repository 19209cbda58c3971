"""How fast a machine is, as numbers that a plan can be judged by: known GPUs and drives, or `--assume`. No torch.

`Rates` says what a machine reaches in the long run, not what its data sheet promises. Figures of parts come from their
makers' data sheets and, where marked "measured", from this project's benchmarks; what a computation reaches of them
was measured task by task on an H200 and is the same for every part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from trireme.engine.amounts import gib, positive, size, whole
from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.plan import Limits
from trireme.engine.planner.gpus import GPUS, Gpu, find_gpu
from trireme.models.config import InputError

GB, TB = 10**9, 10**12


@dataclass(frozen=True)
class Rates:
    """What each resource reaches, one at a time: FLOP/s, bytes/s, parameters/s, seconds.

    `matmul` is what a large square matrix product of the compute dtype reaches on random data. `dram` is what the CPU's
    memory gives to all its users together: an AdamW update moves ADAM_BYTES of it a parameter, and each byte that is
    copied meanwhile delays it by 1 / dram seconds. A drive reads or writes, not both: `ssd_read` and `ssd_write` are
    each alone, of all drives together, past any fast cache.
    """

    matmul: float
    copy: float  # GPU memory, read plus written
    h2d: float
    d2h: float
    adam: float  # fp32 AdamW on the CPU, parameters/s, nothing else using its memory
    dram: float
    ssd_read: float = 0.0
    ssd_write: float = 0.0
    duplex: float = 0.92  # share of h2d and d2h that is left when both directions are busy
    # Share of h2d that is left while the CPU updates: 0.64 to 0.94 in 15 runs on Xeons, where d2h kept 0.92 or more: it
    # is reading that updates delay. And of adam in a step, where it was not measured out of all caches beside copies.
    reading: float = 0.82
    beside: float = 0.88
    launch: float = 3e-6  # of a kernel: the gap before it
    host: float = 0.0  # seconds of the host to start a kernel: what small blocks wait for
    latency: float = 5e-5  # of handing a task to another lane
    pin: float = 3e9  # bytes of RAM that are made ready for copies to and from a GPU, before the first step
    mixed: float = 1.0  # share of ssd_read and ssd_write that is left while a drive does both
    # Share of `matmul` that a block's matrix products reach, and attention over long documents (d 128). Medians of task
    # times on an H200 over LLaMA shapes of 1.3B to 13B, and attention's own benchmark.
    gemm: float = 0.885
    attention: float = 0.76
    attention_backward: float = 0.50
    # Share of all these that tasks reach, by their names: timed on a CPU, and corrected in a run.
    forward: float = 1.0
    backward: float = 1.0
    loss: float = 1.0
    finish: float = 1.0  # of a gradient: its norm and its rounding

    def times(self, share: float, names: tuple[str, ...]) -> Rates:
        """These rates with those of `names` multiplied by `share`."""
        return replace(self, **{name: getattr(self, name) * share for name in names})


COMPUTATION = ("forward", "backward", "loss", "finish")


@dataclass(frozen=True)
class Drive:
    """One NVMe drive: what it reads and writes for hours, its capacity, and what its maker lets be written to it."""

    name: str
    read: float
    write: float
    capacity: int
    endurance: float  # bytes


# A consumer drive of generation 4 (Samsung 990 Pro 2 TB: 7.45 read, 6.9 written at first, 1.4 once its fast cache is
# full, 1,200 TB) and a data-centre drive (Intel P5510 3.84 TB: 6.5 read, 3.4 written, 1 drive write a day for 5 years).
DRIVES = {
    "gen4": Drive("consumer PCIe 4 drive", 7.0 * GB, 1.4 * GB, 2 * TB, 1200 * TB),
    "p5510": Drive("Intel P5510", 6.5 * GB, 3.4 * GB, 3840 * GB, 7000 * TB),
}
ENDURANCE = 600  # bytes that may be written for each byte of a consumer drive's capacity (1,200 TB of 2 TB)

# What the CPU's memory gives to all its users over what AdamW alone takes of it; from measured steps that it binds.
SHARED = 1.05
HOST = 1.3e-5  # seconds to start a kernel: 1.1e-5 to 1.7e-5 measured on Xeons
CONSUMER_DRAM = 70 * GB  # two channels of DDR5-5600: 89.6 GB/s on paper
CODE = 600 << 20  # bytes of RAM that code loaded and compiled during the first steps on a GPU takes
GPU_RESERVE, RAM_SHARE = 5 << 28, 0.85  # bytes for the driver's context and late kernels; share of RAM to be used


def rates_of(measured: Mapping[str, float]) -> Rates:
    """Rates from measured numbers by their names here; what is infinite or missing was not measured.

    `matmul` and `adam` are needed. Without a bus (on a CPU) copies are the CPU's own, which read and write what they
    move; without a drive there is none.
    """
    known = {f.name for f in fields(Rates)}
    found = {k: v for k, v in measured.items() if k in known and v and math.isfinite(v)}
    dram = found.setdefault("dram", ADAM_BYTES * found["adam"] * SHARED)
    found.setdefault("copy", GPUS["h200"].copy if "h2d" in found else dram)
    return Rates(**{"h2d": dram / 2, "d2h": dram / 2} | found)


@dataclass(frozen=True)
class Machine:
    """A machine to plan for: what it holds and how fast it is."""

    name: str  # of the GPU
    gpu: int  # bytes
    ram: int
    rates: Rates
    ssd: int = 0  # bytes of all drives together
    endurance: float = 0.0  # bytes that may be written to them
    drives: str = "no SSD"
    how: str = ""  # its rates are known

    @property
    def limits(self) -> Limits:
        """Bytes that a plan may use, as memory_limits gives them for a real machine."""
        return Limits(self.gpu - GPU_RESERVE, int(self.ram * RAM_SHARE))

    def describe(self) -> str:
        r = self.rates
        return (
            f"{self.name}, {gib(self.gpu, 0)} | RAM {gib(self.ram, 0)}, {r.dram / GB:.0f} GB/s | "
            f"{self.drives} | bus {r.h2d / GB:.0f} GB/s | CPU AdamW {r.adam / GB:.1f} G parameters/s"
            f"{f' ({self.how})' * bool(self.how)}"
        )


def machine(
    gpu: Gpu, ram: int, drive: Drive | None = None, drives: int = 1, dram: float = CONSUMER_DRAM, name: str = ""
) -> Machine:
    """A machine from its parts. `dram`: bytes/s of the CPU's memory, of which AdamW reaches what it needs."""
    rates = Rates(gpu.matmul, gpu.copy, gpu.bus, gpu.bus, adam=dram / ADAM_BYTES, dram=dram, host=HOST)
    made = Machine(name or gpu.name, gpu.memory, ram, rates)
    if drive is None:
        return made
    drives_say = (
        f"{drives} x {drive.capacity / TB:g} TB, read {drive.read / GB:g}, write {drive.write / GB:g} GB/s each"
    )
    rates = replace(rates, ssd_read=drives * drive.read, ssd_write=drives * drive.write)
    return replace(
        made, rates=rates, ssd=drives * drive.capacity, endurance=drives * drive.endurance, drives=drives_say
    )


def assume(text: str) -> Machine:
    """The machine that `gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5,dram=70` says; dram is in GB/s. Raises InputError.

    `gpu` may be a size, which is an RTX 4090's speed with that much memory. `ssd` without @READ/WRITE (GB/s of one
    drive) is consumer drives whose fast cache is full.
    """
    given = dict(part.split("=", 1) for part in text.replace(" ", "").split(",") if "=" in part)
    unknown = given.keys() - {"gpu", "ram", "ssd", "dram"}
    if unknown or not {"gpu", "ram"} <= given.keys() or len(given) != len(text.split(",")):
        raise InputError(f"--assume {text}: write it like gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5 (gpu and ram at least).")
    try:
        drive, drives = _drives(given["ssd"]) if "ssd" in given else (None, 0)
        dram = positive(given.get("dram", str(CONSUMER_DRAM / GB))) * GB
        return machine(find_gpu(given["gpu"]), size(given["ram"]), drive, drives, dram)
    except ValueError as error:
        raise InputError(f"--assume {text}: {error}.") from None


def _drives(text: str) -> tuple[Drive, int]:
    match = re.fullmatch(r"(?:(\d+)x)?([^@]+?)(?:@([\d.]+)/([\d.]+))?", text)
    if not match:
        raise ValueError(f"{text!r} is not drives; write them like 2x2TB@7/5")
    capacity, like = size(match[2]), DRIVES["gen4"]
    read, write = (_speed(match[3]), _speed(match[4])) if match[3] else (like.read, like.write)
    if not capacity:
        raise ValueError(f"{text!r}: a drive of no capacity")
    return Drive("drive", read, write, capacity, ENDURANCE * capacity), whole(match[1] or "1")


def _speed(text: str) -> float:
    """Bytes a second of a number in GB/s; from 100 on in MB/s, as boxes of drives print it."""
    value = positive(text)
    return value * GB if value < 100 else value * GB / 1000

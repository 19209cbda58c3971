"""Checks of software, cores and RAM, with the rate of CPU AdamW."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping

import torch

from trireme.engine.amounts import gib
from trireme.engine.check.row import Row, versions
from trireme.engine.planner.host import available_ram
from trireme.engine.planner.rates import CORE_ADAM, GB
from trireme.engine.queues.cgroups import cores, update_threads
from trireme.kernels.optimizer.host_adamw import why_slow

LITTLE_RAM = 16 << 30
MANY = 6  # cores, which together ask for all that RAM gives


def is_wsl() -> bool:
    return "microsoft" in platform.release().lower()


def software() -> Iterator[Row]:
    yield versions()
    reason = why_slow()
    advice = "repair that: AdamW on the CPU is several times slower without it" if reason else ""
    yield Row("software", "C++ compiler", reason or "compiles AdamW for this CPU", advice)


def host(rates: Mapping[str, float]) -> Iterator[Row]:
    """Yields rows. `rates`: from processor.processor_rates."""
    installed, usable = os.cpu_count() or 1, cores()
    quota = f"; {update_threads()} update" if usable < installed else ""
    few = "raise the container's CPU limit or the affinity, if updates limit steps" if usable < installed / 2 else ""
    yield Row("host", "cores", f"{usable:g} of {installed} may be used{quota}", few)
    free, total = available_ram(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    low = "" if free >= LITTLE_RAM else "free some: what RAM has no room for goes to the SSD"
    yield Row("host", "RAM that is free", f"{gib(free, 1)} of {gib(total, 1)}", low)
    if is_wsl():
        yield Row("host", "WSL2", "memory of the virtual machine", "raise memory= in .wslconfig, if RAM is short")
    dram, adam = rates["dram"], rates["adam"]
    slow = "one memory channel in use, or busy programs? Fill all channels" if dram < 20 * GB and usable >= MANY else ""
    yield Row("host", "RAM bandwidth", f"{dram / GB:.0f} GB/s", slow)
    low = "close other programs, or look at the CPU's power mode" if adam < 0.4 * CORE_ADAM * update_threads() else ""
    low = low if adam < dram / 100 else ""  # else RAM limits it
    yield Row("host", "AdamW on the CPU", f"{adam / 1e9:.2f} G parameters/s", low)


def torch_device() -> torch.device | None:
    """The first GPU, if kernels run on it."""
    usable = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability()[0] >= 8
    return torch.device("cuda", torch.cuda.current_device()) if usable else None

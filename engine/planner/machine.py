"""This machine as the planner's Machine: its memory, drives and measured rates."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import percent
from trireme.engine.memory import DTYPE
from trireme.engine.plan import Limits
from trireme.engine.planner.host import are_equal, gpus_from, one_per_drive
from trireme.engine.planner.probe import cache, compute, copies, drive, processor
from trireme.engine.planner.rates import DRIVES, ENDURANCE, GB, Machine, Rates, rates_of, reserved
from trireme.models.config import Scan
from trireme.storage.files import existing

EQUAL = 0.8  # drives that differ by less in speed are taken for equal
NOTICED = 0.9  # a sustained rate of a drive below this share of its measured rate is printed


def this_machine(
    device: torch.device,
    dtype: str,
    limits: Limits,
    folders: Sequence[str | Path],
    fp8: bool = False,
    scan: Scan | None = None,
) -> Machine:
    """This machine, with rates that are measured or read from the cache. The drives of `folders` are assumed to have
    the rates of a usual drive; `with_drives` measures them.
    """
    cuda = device.type == "cuda"
    measure = partial(_alone, device, dtype, limits)
    measured, origin = cache.look_up(cache.chips_now(device, dtype), measure) if cuda else (measure(), "measured")
    if fp8:
        quick = lambda: {"fp8": compute.fp8_rate(device)}
        measured |= cache.look_up(cache.chips_now(device, "FP8"), quick)[0] if cuda else quick()
    if scan and cuda:  # a CPU takes seconds
        shares = lambda: compute.scan_shares(device, DTYPE[dtype], scan, measured["matmul"])
        shape = {"scan": [scan.key_heads, scan.heads, scan.key_dim, scan.value_dim, scan.delta]}
        measured |= cache.look_up(cache.chips_now(device, dtype) | shape, shares)[0]
    if cuda and limits.gpus > 1:
        several = {"gpus": limits.gpus, **cache.chips_now(device, "copies of several GPUs")}
        measured |= cache.look_up(several, lambda: copies.several_rates(gpus_from(device, limits.gpus), limits.ram))[0]
    mixed = cuda and not are_equal(device, limits.gpus)
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {len(os.sched_getaffinity(0))} cores"
    if mixed:  # all are taken to be as fast as the slowest
        gpus = gpus_from(device, limits.gpus)
        of_gpus = [cache.look_up(cache.chips_now(gpu, dtype), partial(_alone, gpu, dtype, limits))[0] for gpu in gpus]
        measured |= min(of_gpus, key=lambda rates: rates["matmul"])
        name = " + ".join(map(torch.cuda.get_device_name, gpus))
    places, usual = one_per_drive(folders), DRIVES["gen4"]
    disks, count = [shutil.disk_usage(place) for place in places], len(places)
    room, worn = sum(disk.free for disk in disks), ENDURANCE * sum(disk.total for disk in disks)
    rates = rates_of(measured | {"ssd_read": count * usual.read, "ssd_write": count * usual.write})
    drives = f"{room / GB:,.0f} GB of disk free (speed of {count} {usual.name}{'s' * (count > 1)} assumed)"
    reserve = sum(reserved(disk.total) for disk in disks)
    return Machine(
        name, limits.gpu, limits.ram, rates, room, reserve, worn, drives, origin, limits.gpus, limits.less, mixed
    )


def _alone(device: torch.device, dtype: str, limits: Limits) -> dict[str, float]:
    """The rates of one GPU and of the processor."""
    return {"matmul": compute.matmul_rate(device, DTYPE[dtype])} | processor.processor_rates(device, dtype, limits.ram)


def with_drives(machine: Machine, folders: Sequence[str | Path], anew: bool = False) -> Machine:
    """`machine` with the rates of the drives of `folders`, from the cache or, with `anew`, measured again; unchanged if
    the drives cannot be measured.

    A probe ends before a drive's cache is full, so the rates are at most those that the drives sustained for minutes in
    an earlier run.
    """
    try:
        places = one_per_drive(folders)
        tried = [cache.look_up(drive.identity(place), partial(drive.drive_rates, place), anew) for place in places]
    except OSError:
        return machine
    read, write = (sum(stored[name] for stored, _ in tried) for name in ("ssd_read", "ssd_write"))
    mixed, sustained = min(stored["mixed"] for stored, _ in tried), min(_held(place) for place in places)
    rates = replace(machine.rates, ssd_read=sustained * read, ssd_write=sustained * write, mixed=mixed)
    speeds = f"read {rates.ssd_read / GB:.1f}, write {rates.ssd_write / GB:.1f} GB/s, together {mixed:.2f} of that"
    origin = tried[0][1] + f"; a run kept up {percent(sustained)} of that" * (sustained < NOTICED)
    return replace(machine, rates=rates, drives=f"{machine.ssd / GB:,.0f} GB of disk free, {speeds} ({origin})")


def drive_speeds(folders: Sequence[str | Path]) -> list[float]:
    """Bytes/s that the drive of each folder reads and writes back, as measured for plans; files are striped by them.
    All are 1 if one was not measured, or if the slowest has EQUAL of the fastest one's speed.
    """
    places = [existing(folder) for folder in folders]
    rates = [cache.remembered(drive.identity(place)) for place in places]
    speeds = [2 / (1 / r["ssd_read"] + 1 / r["ssd_write"]) * _held(p) for p, r in zip(places, rates, strict=True) if r]
    measured = len(speeds) == len(places) > 0
    return speeds if measured and min(speeds) < EQUAL * max(speeds) else [1.0] * len(places)


def note_pinned(device: torch.device, nbytes: int) -> None:
    """Stores how many bytes CUDA pinned before it refused more, as on WSL2, for the next run."""
    cache.remember(cache.chips(device, "") | {"what": "pinned"}, {"bytes": nbytes})


def pinnable(device: torch.device) -> float:
    """Bytes of RAM that CUDA pins; infinite unless an earlier run was refused more."""
    stored = cache.remembered(cache.chips(device, "") | {"what": "pinned"})
    return stored["bytes"] if stored else math.inf


def note_drives(rates: Rates, folders: Sequence[str | Path]) -> None:
    """Stores the rates that the drives sustain in steps, as a share of the measured ones, for the next run."""
    stored = {place: cache.remembered(drive.identity(place)) for place in one_per_drive(folders)}
    measured = sum(r["ssd_read"] for r in stored.values() if r)
    for place in stored if all(stored.values()) else ():
        cache.remember(_sustained(place), {"share": rates.ssd_read / measured})


def _held(place: Path) -> float:
    return min(1.0, (cache.remembered(_sustained(place)) or {"share": 1.0})["share"])


def _sustained(place: Path) -> dict[str, Any]:
    return drive.identity(place) | {"what": "sustained"}

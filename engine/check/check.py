"""`trireme check`: what this machine has, how fast it is, and what to change. Leaves nothing on the drives.

It takes two minutes at most, of which drives take 30 seconds, and kernels 40.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from trireme.engine.check import gpu, host, tune, tuned
from trireme.engine.check.drives import drives
from trireme.engine.check.row import WIDTHS, Row, changes, for_issue
from trireme.engine.check.steps import steps
from trireme.engine.planner.host import memory_limits
from trireme.engine.planner.probe import compute, processor
from trireme.engine.planner.rates import rates_of
from trireme.models.config import InputError
from trireme.storage.temporary import HIDDEN, Temporary

WHOLE = 105.0  # seconds, after which no step begins


def check(folders: Mapping[str, Path], say: Callable[[str], None], tuning: bool = False) -> list[Row]:
    """Prints a line for each part, what to change, and what to report. `folders`: on drives, by the names given.

    `tuning`: instead tries launch settings of each kernel and keeps those that are faster. Raises OSError if a drive
    fails.
    """
    rows = list[Row]()
    for row in _rows(folders, time.monotonic() + WHOLE, tuning):
        rows.append(row)
        say(row.line())
    for i, line in enumerate(changes(rows)):
        say(f"{'change' if i == 0 else '':{2 + WIDTHS[0]}}{line}")
    for line in for_issue(rows):
        say(line)
    return rows


def _rows(folders: Mapping[str, Path], end: float, tuning: bool) -> Iterator[Row]:
    gpu_device = host.torch_device()
    yield from host.software()
    if tuning:  # takes some minutes, most of them for compilation
        yield from tune.rows(gpu_device, gpu.CHECKED, gpu.call_seconds) if gpu_device else [gpu.no_gpu()]
        return
    dtype = "BF16" if gpu_device else "F32"
    device = gpu_device or torch.device("cpu")
    speeds = {"matmul": compute.matmul_rate(device, torch.bfloat16 if gpu_device else torch.float32)}
    speeds |= processor.processor_rates(device, dtype, memory_limits(device, None, None).ram)
    yield from host.host(speeds)
    if gpu_device is None:
        yield gpu.no_gpu()
    else:
        yield from gpu.gpu(gpu_device, speeds)
    drive_speeds = dict[Path, dict[str, float]]()  # rates of drives
    yield from drives(folders, drive_speeds)
    if gpu_device is not None:
        fp8 = torch.cuda.get_device_capability(gpu_device) >= (8, 9)
        with tuned.in_use(tuned.stored(gpu_device)):
            yield from gpu.kernels(gpu.CHECKED, gpu.call_seconds, speeds, fp8)
        torch.cuda.empty_cache()
    folder, rates = next(iter(drive_speeds.items()), (None, {}))
    yield from steps(device, memory_limits(device, None, None), rates_of(speeds | rates), folder, end)


def folders_of(paths: Iterable[str]) -> dict[str, Path]:
    """The folders, by the names given. Raises InputError."""
    for name in paths:
        if not Path(name).is_dir():
            raise InputError(f"--store {name}: there is no such folder. Name one on the drive to check.")
        try:
            with Temporary(HIDDEN, name):
                pass
        except OSError as error:
            raise InputError(f"--store {name} cannot be written to ({error.strerror}). Name another folder.") from None
    return {name: Path(name) for name in paths}

"""The rates of a processor with its GPU or without one: updates on the CPU, copies, starts of kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.memory import DTYPE
from trireme.engine.planner.probe.compute import copy_rate, timed
from trireme.engine.planner.probe.copies import LOTS, PHASE, bus_rates, trial_sizes
from trireme.engine.planner.probe.starts import BOOKS, block_seconds, launch_seconds, start_seconds, task_seconds
from trireme.engine.queues.cgroups import update_threads
from trireme.kernels.optimizer.host_adamw import Workers
from trireme.kernels.optimizer.moments import BLOCK

NARROW = 3  # turns of updates with 8-bit moments, the fastest counts: 5 to 12 G parameters/s in four turns of an hour


def processor_rates(device: torch.device, dtype: str, ram: int = 1 << 40) -> dict[str, float]:
    """Measures all fields of `Rates` but matmul and those of drives and several GPUs, in about five seconds.

    Takes, with a GPU, at most half of `ram` bytes. `dtype`: of weights, BF16 or F32.
    """
    rates = {"copy": copy_rate(device), "task": BOOKS * task_seconds()}
    with Workers(update_threads()) as workers:
        if device.type == "cuda":
            n, nbytes = trial_sizes(ram)
            rates |= bus_rates(device, _update(workers, dtype, n, LOTS), n, nbytes)
            narrow = _update(workers, dtype, n, LOTS, bits=8)
            rates["adam8"] = n * max(_calls(narrow) for _ in range(NARROW))
            rates["launch_overhead"] = max(start_seconds(device), launch_seconds(block_seconds(device), rates["task"]))
        else:
            update, n = _update(workers, dtype, 1 << 22), 1 << 22
            adam = n / min(timed(update, device) for _ in range(3))
            narrow = _update(workers, dtype, n, bits=8)
            rates["adam8"] = n / min(timed(narrow, device) for _ in range(3))
            rates |= {"h2d": rates["copy"] / 2, "d2h": rates["copy"] / 2, "dram": rates["copy"], "adam": adam}
    return rates | {"dram": max(rates["dram"], ADAM_BYTES * rates["adam"])}


def _update(workers: Workers, dtype: str, n: int, lots: int = 1, bits: int = 32) -> Callable[[], object]:
    """Returns a function that updates n parameters by AdamW as a step does, in each call the next of `lots`."""
    w, grad = (torch.ones(lots, n, dtype=DTYPE[dtype]) for _ in range(2))
    lo = torch.zeros(lots, n, dtype=torch.int16) if dtype == "BF16" else (None,) * lots
    kind = torch.uint8 if bits == 8 else torch.float32
    moments = [torch.zeros(lots, n, dtype=kind), torch.ones(lots, n, dtype=kind)]
    if bits == 8:
        floors = torch.zeros(2, lots, -(-n // BLOCK), dtype=torch.int16)
        moments = [moments[0], floors[0], moments[1], floors[1]]
    hyper: dict[str, Any] = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, n_decay=0, step=1)
    lot, clip = cycle(zip(w, lo, *moments, grad, strict=True)), torch.ones(1)
    return lambda: workers.adamw_(*next(lot), clip, **hyper)


def _calls(work: Callable[[], object]) -> float:
    """Calls of `work` a second, over PHASE seconds."""
    work()
    count, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < PHASE or not count:
        work()
        count += 1
    return count / took

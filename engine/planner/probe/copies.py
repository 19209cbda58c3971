"""Copies between RAM and GPUs, and from GPU to GPU: alone, at once, and during updates on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from trireme.engine.memory import Memory
from trireme.engine.plan import Limits

COPY, AHEAD = 256 << 20, 6  # bytes of a copy at most, copies queued
PHASE = 0.4  # seconds of a flow
LOTS, UPDATED = 4, 16  # of parameters in turn, beyond a cache; bytes of one, at most
LASTING = 0.8  # of the rate of pinning half a gigabyte, for tens of them: 0.6 and 0.9 on hosts of H200s


def trial_sizes(ram: int) -> tuple[int, int]:
    """Sizes of a trial that takes at most half of `ram` bytes: parameters of each of LOTS updates, bytes of a copy."""
    power = lambda n: 1 << max(n, 1).bit_length() - 1
    return min(1 << 25, power(ram // (4 * LOTS * UPDATED))), min(COPY, power(ram // 8))


class _Bus:
    """Copies of `nbytes` between pinned RAM and a GPU, each direction on its own stream."""

    def __init__(self, device: torch.device, nbytes: int):
        self.nbytes = nbytes
        self.memory = Memory([device], Limits(1 << 40, 1 << 40))  # torch never gives its pinned memory back
        self.gpu, start = self.memory.alloc("gpu", "probe", nbytes, 2), time.perf_counter()
        self.host = self.memory.alloc("ram", "probe", nbytes, 2)
        self.pin = 2 * nbytes / (time.perf_counter() - start)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(self, direction: int) -> torch.cuda.Event:
        """Starts a copy to the GPU (direction 0) or from it (direction 1). The event happens when it is over."""
        to, source = (tier[direction] for tier in ((self.gpu, self.host) if direction == 0 else (self.host, self.gpu)))
        with torch.cuda.stream(self.streams[direction]):
            to.copy_(source, non_blocking=True)
            return self.streams[direction].record_event(torch.cuda.Event(enable_timing=True))

    def flow(self, work: Callable[[], object], *directions: int) -> tuple[float, ...]:
        """Runs `work` over and over for PHASE seconds while copies in `directions` run.

        Returns calls of `work` a second, then bytes/s in each direction.
        """
        copies, calls, start = [[self.copy(direction)] for direction in directions], 0, time.perf_counter()
        while (took := time.perf_counter() - start) < PHASE or not all(ends[1].query() for ends in copies):
            for direction, ends in zip(directions, copies, strict=True):
                while len(ends) < AHEAD or ends[-AHEAD].query():  # `work` may outlast copies
                    ends.append(self.copy(direction))
            work()
            calls += 1
        copies = [[event for event in ends if event.query()] for ends in copies]
        for stream in self.streams:
            stream.synchronize()
        return calls / took, *(1e3 * self.nbytes * (len(ends) - 1) / ends[0].elapsed_time(ends[-1]) for ends in copies)


def bus_rates(device: torch.device, update: Callable[[], object], n: int, nbytes: int) -> dict[str, float]:
    """Rates of copies over PCIe and of CPU updates, `update` of n parameters, alone and at once.

    Keys: pin, h2d, d2h, dram in bytes/s; adam in parameters/s; duplex, reading, concurrent as shares. `Rates`
    describes them.
    """
    bus, idle = _Bus(device, nbytes), lambda: time.sleep(1e-3)
    flow = bus.flow
    flow(idle, 0, 1)
    (_, up), (_, down), (_, *together) = flow(idle, 0), flow(idle, 1), flow(idle, 0, 1)
    (alone,), (_, reading), (crowded, *copied) = flow(update), flow(update, 0), flow(update, 0, 1)
    bus.memory.close()
    lost = max(0.01, 1 - crowded / alone)  # share of the updates' time
    return {
        "pin": LASTING * bus.pin,
        "h2d": up,
        "d2h": down,
        "duplex": min(1.0, together[0] / up, together[1] / down),
        "adam": n * alone,
        "concurrent": 1.0,
        "reading": min(1.0, reading / up),
        "dram": sum(copied) / lost,
    }


def several_rates(devices: Sequence[torch.device], ram: int) -> dict[str, float]:
    """Returns `peer_rates`, and up_all and down_all: bytes/s from RAM to all GPUs at once and back, in total.

    Takes at most half of `ram` bytes.
    """
    nbytes = trial_sizes(ram // len(devices))[1]
    buses = [_Bus(device, nbytes) for device in devices]

    def once(k: int) -> float:
        start = time.perf_counter()
        for _ in range(AHEAD):
            for bus in buses:
                bus.copy(k)
        for bus in buses:
            bus.streams[k].synchronize()
        return time.perf_counter() - start

    moved = len(buses) * AHEAD * nbytes
    try:
        rates = {name: moved / min(once(k) for _ in range(3)) for k, name in enumerate(("up_all", "down_all"))}
    finally:
        for bus in buses:
            bus.memory.close()
    return rates | peer_rates(devices)


def peer_rates(devices: Sequence[torch.device]) -> dict[str, float]:
    """Copies from each GPU to the next, all at once; returns bytes/s of the slowest as `peer`.

    It is 0 if a GPU has no access to another's memory, or if a copy arrives wrong, as behind some IOMMUs.
    """
    pairs = list(zip(devices, [*devices[1:], devices[0]], strict=True))
    if not all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        return {"peer": 0.0}
    sources = [torch.randint(256, (COPY,), dtype=torch.uint8, device=a) for a in devices]
    targets = [torch.zeros(COPY, dtype=torch.uint8, device=b) for _, b in pairs]
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
        if not torch.equal(target.cpu(), source.cpu()):
            return {"peer": 0.0}

    streams = [(torch.cuda.Stream(a), torch.cuda.Stream(b)) for a, b in pairs]  # torch orders a copy behind both

    def once() -> float:
        start = time.perf_counter()
        for _ in range(AHEAD):
            for source, target, (leaves, arrives) in zip(sources, targets, streams, strict=True):
                with torch.cuda.stream(arrives), torch.cuda.stream(leaves):
                    target.copy_(source, non_blocking=True)
        for pair in streams:
            for stream in pair:
                stream.synchronize()
        return time.perf_counter() - start

    return {"peer": AHEAD * COPY / min(once() for _ in range(3))}

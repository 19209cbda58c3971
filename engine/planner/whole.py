"""The parts of a run: seconds foretold and spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

from trireme.engine.plan import Tier
from trireme.engine.planner.forecast import Forecast
from trireme.engine.planner.predict import KERNELS, unit_seconds
from trireme.engine.planner.rates import DRIVES

Part = Literal["start", "steps", "evaluations", "samples", "snapshots", "export"]
PARTS: tuple[Part, ...] = get_args(Part)
Times = Mapping[Part, float]  # seconds
LOSS_FORWARD = 1 / 3  # of the loss's three products


@dataclass(frozen=True)
class Events:
    """What a run does beside its steps."""

    evaluations: int = 0
    held_out: int = 0  # sequences of each
    exports: int = 1  # the result, the best so far
    snapshots: int = 0
    tokens: int = 0  # sampled


def foretold(f: Forecast, steps: int, events: Events) -> dict[Part, float]:
    """Seconds of each part. All but the steps' are floors: bytes and FLOPs over rates."""
    twice = 1 / _write(f) + 1 / _read(f)  # written and read back
    read = max(f.files.export, f.frozen)
    return {
        "start": read / _read(f) + f.pinning_s(),
        "steps": steps * f.step.step_s,
        "evaluations": events.evaluations * evaluation_s(f, events.held_out),
        "samples": events.tokens * token_s(f),
        "snapshots": events.snapshots * unsaved(f) / _write(f),
        "export": (events.exports * f.files.export + f.files.merged) * twice,
    }


def _read(f: Forecast) -> float:
    """Bytes/s of the drives, or of a usual one."""
    return f.machine.rates.ssd_read or DRIVES["gen4"].read


def _write(f: Forecast) -> float:
    return f.machine.rates.ssd_write or DRIVES["gen4"].write


def unsaved(f: Forecast) -> int:
    """Bytes that a snapshot writes, and does not link."""
    geo, plan = f.geo, f.plan
    weights = sum(geo.weights[u].span for u, unit in enumerate(plan.units) if unit.weights != "ssd")
    return weights + sum(geo.state_span(u, plan.record) for u, unit in enumerate(plan.units) if unit.state != "ssd")


def evaluation_s(f: Forecast, sequences: int) -> float:
    """Seconds of a forward pass, in groups of a step's sequences."""
    if not sequences:
        return 0.0
    work = replace(f.work, sequences=min(sequences, f.work.sequences))
    batch = work.batch(f.plan)
    known = unit_seconds(f.cfg, f.plan, f.machine.rates, batch)
    forward = sum(seconds for (kind, _), seconds in known.items() if kind == "forward")
    loss = LOSS_FORWARD * sum(seconds for (kind, _), seconds in known.items() if kind == "loss")
    group = max(batch.n_micro * (forward + loss), *_streamed(f).values())
    return sequences / work.sequences * group


def token_s(f: Forecast) -> float:
    """Of a sampled token: weights read once, kernels started."""
    rates, resident = f.machine.rates, sum(nbytes for tier, nbytes in _homes(f) if tier == "gpu")
    started = KERNELS["forward"] * f.cfg.n_layers * max(rates.host, rates.launch)
    return max(resident / rates.copy + sum(_streamed(f).values()), started)


def _streamed(f: Forecast) -> dict[str, float]:
    """Seconds to bring all weights once."""
    up = sum(nbytes for tier, nbytes in _homes(f) if tier != "gpu")
    read = sum(nbytes for tier, nbytes in _homes(f) if tier == "ssd")
    return {"h2d": up / f.machine.rates.h2d, "ssd": read / _read(f)}


def _homes(f: Forecast) -> Iterator[tuple[Tier, int]]:
    """(tier, bytes) of trained and frozen weights, by the tier that a pass takes them from."""
    for u, unit in enumerate(f.plan.units):
        yield "gpu" if unit.resident else unit.weights, f.geo.weights[u].span
        yield unit.base, f.geo.base[u].span


class Clock:
    """Seconds spent in each part, and the `whole`."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self.now, self.began = now, now()
        self.spent: dict[Part, float] = dict.fromkeys(PARTS, 0.0)

    @property
    def whole(self) -> float:
        return self.now() - self.began

    @contextmanager
    def at(self, part: Part) -> Iterator[None]:
        """Counts the time within, without inner parts."""
        began, counted = self.now(), sum(self.spent.values())
        try:
            yield
        finally:
            within = sum(self.spent.values()) - counted
            self.spent[part] += self.now() - began - within

"""What to change: options and hardware that make a run faster, and what fits where a run does not.

Options that cost nothing come before hardware.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from trireme.engine.amounts import gb, percent, seconds, whole_gib
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.choose import first_plan
from trireme.engine.planner.forecast import Forecast
from trireme.engine.planner.gpus import sheet_fp8_rate
from trireme.engine.planner.rates import DRIVE_SHARE, RAM_SHARE, TB
from trireme.engine.planner.rule import Wanted, record_size
from trireme.models.config import ModelConfig
from trireme.models.sizes import shapes

WORTH_SAYING = 1.1  # a change with at least this gain in tokens/s is printed
MOST = 3  # changes that are printed
ENDLESS = 1 << 40  # sequences
COSTS = {  # of an option in loss, as measured
    "--base nf4": "it costs some loss: docs/packed.md",
    "--dtype fp8": "99.5M parameters ended with 1.5 % more loss, within noise: docs/dev/kernels.md",
}

Models = Mapping[str, ModelConfig]  # an option, such as "--base nf4", and the model that the run has with it
Candidate = tuple[str, Forecast, Callable[[], Forecast]]  # a change, a run with its ceiling, the run as planned for it


class Change(NamedTuple):
    """A change that makes a run faster, and its step."""

    what: str  # an option, or hardware
    gain: float  # in tokens a second
    step_s: float

    def line(self) -> str:
        """What it gains, and what it costs in loss if that was measured."""
        cost = f"; {COSTS[self.what]}" if self.what in COSTS else ""
        return f"{self.what}: {self.gain:.1f} times the tokens/s ({seconds(self.step_s)} a step){cost}"


def faster(f: Forecast, models: Models | None = None, sequences: int = ENDLESS, resumes: bool = False) -> list[Change]:
    """Up to MOST changes that give more tokens per second: options first, of each kind the best first. Each is planned
    and simulated, unless computation alone excludes it.

    `sequences`: those of the data. `resumes`: --adam-bits and --dtype are chosen already.
    """
    options = _gains(f, _options(f, models or {}, sequences, resumes))
    return [*options, *(_gains(f, _hardware(f)) if len(options) < MOST else ())][:MOST]


def _gains(f: Forecast, candidates: Iterator[Candidate]) -> list[Change]:
    """The changes that are worth saying, the best first."""
    changes = []
    for name, run, make in candidates:
        with suppress(DoesNotFit):
            if run.ceiling >= WORTH_SAYING * f.speed and fits_drives(changed := make()):
                gain = changed.speed / f.speed
                step_s = changed.work.tokens / f.work.tokens * f.step.step_s / gain
                changes.append(Change(name, gain, step_s))
    return sorted((change for change in changes if change.gain >= WORTH_SAYING), key=lambda change: -change.gain)


def _options(f: Forecast, models: Models, sequences: int, resumes: bool) -> Iterator[Candidate]:
    cfg, rates = f.cfg, f.machine.rates
    rates = replace(rates, fp8=rates.fp8 or sheet_fp8_rate(f.machine.name, rates.matmul))
    other = cfg.fp8 or cfg.packing or f.plan.dtype != "BF16"  # than multiplications of bf16
    if rates.fp8 and f.step.bound == "compute" and not (other or resumes):
        in_fp8 = replace(f, cfg=replace(cfg, fp8=True), machine=replace(f.machine, rates=rates))
        yield "--dtype fp8", in_fp8, in_fp8.again
    for option, light in models.items():
        yield option, (lighter := replace(f, cfg=light)), lighter.again
    if f.plan.adam_bits == 32 and not resumes:
        yield "--adam-bits 8", f, lambda: f.in_8_bits
    doubled = 2 * f.work.sequences
    if doubled <= sequences:
        larger = replace(f, work=replace(f.work, sequences=doubled))
        yield f"--batch-size {doubled}", f, lambda: larger.again(n_micro=2 * f.plan.n_micro)


def _hardware(f: Forecast) -> Iterator[Candidate]:
    m, r, limits, busy, step_s = f.machine, f.machine.rates, f.limits, f.step.busy, f.step.step_s
    pays = lambda halved: step_s >= WORTH_SAYING * (step_s - halved / 2)  # if these seconds are halved
    yield "twice the RAM", f, lambda: f.again(replace(limits, ram=2 * limits.ram))
    if any(unit.state == "ssd" for unit in f.plan.units) and pays(busy["ssd"]):
        drives = replace(m, ssd=2 * m.ssd, reserve=2 * m.reserve, rates=r.times(2, ("ssd_read", "ssd_write")))
        yield "twice the drives", f, replace(f, machine=drives).again
    yield "a GPU with twice the memory", f, lambda: f.again(replace(limits, gpu=2 * limits.gpu))
    if pays(busy["compute"] + busy["update"]):
        quick = replace(f, machine=replace(m, rates=r.times(2, ("matmul", "fp8", "copy"))))
        yield "a GPU twice as fast", quick, quick.again


# ---------------------------------------------------------------- what fits


def fits_drives(f: Forecast) -> bool:
    """Whether the drives hold what the run writes; without a drive, whether the plan needs none."""
    return f.disk() <= f.room if f.has_drive else not f.plan.uses_ssd


def check_drive(f: Forecast) -> None:
    """Raises DoesNotFit, with advice, unless `fits_drives`."""
    if fits_drives(f):
        return
    room, need = f.room, f.disk()
    if not f.has_drive:
        ram = _enough_ram(f)
        raise DoesNotFit(
            f"weights and optimizer state need {whole_gib(ram)} of RAM, the limit is {whole_gib(f.limits.ram)} and "
            f"there is no SSD. Add ssd={math.ceil(need / DRIVE_SHARE / TB)}TB, or raise ram to "
            f"{whole_gib(math.ceil(ram / RAM_SHARE))} (--ram {whole_gib(ram)} of it)."
        )
    raise DoesNotFit(
        f"the store and the export need {gb(need)}, {gb(need - room)} more than the drives take: "
        f"{percent(1 - DRIVE_SHARE)} of them stays free. Raise ssd to {math.ceil(need / DRIVE_SHARE / TB)}TB."
    )


def _enough_ram(f: Forecast) -> int:
    """Bytes of RAM, in whole GiB above the limit, with which no drive is needed."""
    wanted, parameters = Wanted.like(f.plan, f.work), shapes.parameters(f.cfg)
    larger = lambda ram: replace(wanted, record=max(wanted.record, record_size(parameters, ram)))
    enough = lambda ram: not first_plan(f.cfg, replace(f.limits, ram=ram), larger(ram), drive=False).uses_ssd
    low = max(f.limits.ram, 1 << 30)  # too little
    while not enough(2 * low):
        low *= 2
    sizes = range(f.limits.ram, 2 * low + (1 << 30), 1 << 30)
    return sizes[bisect_left(sizes, True, 1 + (low - f.limits.ram >> 30), len(sizes) - 1, key=enough)]

"""The plan of a job: read from --plan, or chosen for model, data and machine, also of a resumed run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trireme.engine.amounts import rounded_up
from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import MODES, DoesNotFit, Limits, Mode, Plan
from trireme.engine.planner.advice import check_drive
from trireme.engine.planner.choose import choose, first_plan
from trireme.engine.planner.forecast import Files, Forecast, Work
from trireme.engine.planner.host import TEMPORARIES
from trireme.engine.planner.machine import with_drives
from trireme.engine.planner.rates import RAM_SHARE, Machine
from trireme.engine.planner.rule import Wanted, all_cuts, cuts, shortage, simple_plan, sizes_of
from trireme.engine.run import screen
from trireme.engine.run.options import Options
from trireme.engine.run.record import Fixed
from trireme.models.config import InputError, ModelConfig
from trireme.models.sizes import narrow, shapes

DTYPES = {"bf16": "BF16", "fp32": "F32", "fp8": "BF16"}  # of all but the matmuls
RECORDS = 1.03  # margin of RAM to ask for: more RAM brings larger records
MICRO_TOKENS = {True: 16384, False: 4096}  # by on_cuda: larger micro-batches are no faster


def misfit(plan: Plan, cfg: ModelConfig) -> str:
    """Why a plan does not suit the model; "" if it does."""
    if len(plan.units) != plan.cut(cfg).n_units or plan.halves and cfg.whole:
        return "the plan is for another model"
    if plan.slices > 1 and not narrow.may_be_sliced(cfg):
        return "the plan has slices of frozen experts, and the model trains its experts or has none"
    geo = Geometry.of(cfg, plan)
    for u, unit in enumerate(plan.units):
        unknown = {name for name, _ in unit.saved} - set(geo.saved_names(geo.kinds[u]) if 0 < u < geo.head else ())
        if unknown:
            return f"unit {u} saves {unknown.pop()!r}, which it does not have"
    return ""


@dataclass(frozen=True)
class Planner:
    """What decides a plan before the data is read."""

    options: Options
    cfg: ModelConfig
    room: int  # tokens of a sequence of a micro-batch: of pairs two documents
    on_cuda: bool
    limits: Limits
    fixed: Fixed | None
    hosts: int

    @cached_property
    def user_plan(self) -> Plan | None:
        """The plan of --plan. Raises InputError if it does not suit the model, the run or the device."""
        if not self.options.plan:
            return None
        plan = replace(Plan.load(Path(self.options.plan)), hosts=self.hosts, host=self.hosts - 1)
        self._check_plan(next(self._objections(plan), ""))
        return plan

    def _objections(self, plan: Plan) -> Iterator[str]:
        """Why a plan does not suit."""
        o, rows = self.options, plan.tokens // self.room
        yield from filter(None, [misfit(plan, self.cfg)])
        wanted = {"gpus": self.limits.gpus, "dtype": DTYPES.get(o.dtype), "adam_bits": o.adam_bits}
        wanted |= {"mode": None if o.optimizer_mode == "auto" else o.optimizer_mode}
        for name, value in (wanted | (self.fixed.kept if self.fixed else {})).items():
            if value not in (None, getattr(plan, name)):
                yield f"{name} is {value}, the plan has {getattr(plan, name)}"
        if plan.tokens % self.room or (isinstance(o.micro_batch, int) and min(o.micro_batch, o.batch_size) != rows):
            yield "it is for another --seq-len or --micro-batch"
        if plan.mode == "backward" and o.max_grad_norm:
            yield "its mode backward updates before the norm is known. Add --max-grad-norm 0"
        if self.on_cuda and not plan.runs_on_cuda:
            yield f"no CUDA kernel updates {plan.adam_bits}-bit moments: the update has to be on the CPU"

    def _check_plan(self, wrong: str) -> None:
        if wrong:
            raise InputError(f"{self.options.plan}: {wrong}. Change it, or leave --plan out.")

    def _check_memory(self, plan: Plan, limits: Limits) -> None:
        """Raises DoesNotFit if the plan needs more than the limits."""
        geo = Geometry.of(self.cfg, plan)
        if not fits(geo, plan, limits):
            raise DoesNotFit(f"{self.options.plan}: the plan needs {shortage(geo, plan, limits)}. Leave --plan out.")

    @property
    def dtype(self) -> str:
        """The dtype of weights, BF16 or F32."""
        if self.fixed:
            return self.fixed.plan.dtype
        return (
            self.user_plan.dtype
            if self.user_plan
            else DTYPES.get(self.options.dtype, "BF16" if self.on_cuda else "F32")
        )

    @property
    def _one_memory(self) -> bool:
        """Whether both tiers are in RAM, so that they may be divided in any proportion."""
        return not (self.on_cuda or self.options.gpu_memory or self.user_plan)

    def refuse_early(self) -> None:
        """Raises DoesNotFit if not even steps of one sequence fit: then no data can help."""
        if self.user_plan:
            self._check_memory(self.user_plan, self.limits)
            return
        smallest = lambda n: simple_plan(self.cfg, self.limits_for(n), self.wanted(n))
        try:
            smallest(1)
        except DoesNotFit:
            smallest(self.options.batch_size)  # its error says what a usual step needs
            raise

    def limits_for(self, sequences: int) -> Limits:
        """The limits. On a CPU RAM is divided otherwise if half of it is too small for a tier. Raises DoesNotFit."""
        if not self._one_memory:
            return self.limits
        wanted, refused = self.wanted(sequences), list[Limits]()
        for cut in cuts(self.cfg, wanted):
            try:
                simple_plan(self.cfg, self.limits, replace(wanted, cuts=[cut]))
            except DoesNotFit as error:
                need = replace(self.limits, gpu=error.need["gpu"], ram=error.need["ram"])
                refused.append(need)
                if (spare := self.limits.both - need.both) >= 0:
                    return replace(need, gpu=need.gpu + spare // 2 // need.gpus, ram=need.ram + spare - spare // 2)
            else:
                return self.limits
        least = min(need.both for need in refused)
        enough = rounded_up((least * RECORDS + TEMPORARIES) / RAM_SHARE)
        way = f"Free some RAM, {enough} are enough, or raise the limit of its control group or `ulimit -v`"
        if self.options.ram or self.options.assume:
            way = f"Raise --ram by {rounded_up((least - self.limits.both) * RECORDS)}"
        need_and_limit = f"{rounded_up(least)} of RAM; the limit is {rounded_up(self.limits.both)}"
        raise DoesNotFit(f"even the smallest plan needs {need_and_limit}. {way}, or lower --seq-len or --batch-size.")

    def search(
        self, work: Work, files: Files, limits: Limits, machine: Machine, stores: Sequence[Path], by_rule: bool
    ) -> tuple[Plan, Machine]:
        """Chooses the plan; also returns the machine, whose drives were measured if the plan may use them.

        `limits`: of limits_for. `stores`: folders on drives. `by_rule`: without a search. Raises InputError,
        DoesNotFit.
        """
        o, wanted = self.options, self.wanted(work.sequences)
        wanted = replace(wanted, document=work.document, trained=work.trained, compared=work.compared)
        if self.user_plan:
            self._check_memory(self.user_plan, limits)  # the data has taken its part
            needed = math.ceil(work.sequences / (self.user_plan.tokens // self.room) / self.hosts)
            if needed > self.user_plan.n_micro:
                self._check_plan(f"a step is {needed} micro-batches, the plan has room for {self.user_plan.n_micro}")
            return self.user_plan, machine
        first = first_plan(self.cfg, limits, wanted, drive=not o.assume or bool(machine.ssd))
        if o.assume:
            check_drive(Forecast(self.cfg, first, machine, limits, work, files))
        if not self.on_cuda or by_rule:
            return first, machine
        if first.uses("ssd") and not o.assume:
            with screen.clock().at("probe"):  # anew for a resumed run: drives change
                machine = with_drives(machine, stores, anew=self.fixed is not None)
        begun = self.fixed.plan if self.fixed else None
        if begun and (begun.mode != first.mode or not begun.runs_on_cuda):
            begun = None
        choice = choose(self.cfg, limits, machine.rates, wanted, begun)
        return choice.plan, machine

    def wanted(self, sequences: int) -> Wanted:
        """What a plan is wanted for, with steps of `sequences`. Raises InputError."""
        o, fixed, gpus, hosts = self.options, self.fixed, self.limits.gpus, self.hosts
        sequences = math.ceil(sequences / hosts)  # of each
        begun: Mode = fixed.plan.mode if fixed else "backward"
        auto: Mode = "forward" if o.max_grad_norm or hosts > 1 else begun
        mode = next((mode for mode in MODES if mode == o.optimizer_mode), auto)
        if fixed:
            size = fixed.plan.tokens, fixed.plan.n_micro
            same = self.dtype, mode, fixed.plan.record, fixed.plan.adam_bits
            cuts = all_cuts(self.cfg, gpus == hosts == 1, (fixed.plan.halves,))
            return Wanted((size,), *same, cuts=cuts, on_cuda=self.on_cuda, gpus=gpus, hosts=hosts)
        most = max(1, MICRO_TOKENS[self.on_cuda] // self.room)
        if gpus > 1:
            most = max(1, min(most, sequences // gpus))  # fewer micro-batches would leave GPUs idle
        if isinstance(o.micro_batch, int):
            rows = [min(sequences, o.micro_batch)]
        else:
            rows = sorted({min(sequences, most >> k) for k in range(20) if most >> k}, reverse=True)
        sizes = sizes_of(rows, sequences, self.room)
        record = record_size(shapes.parameters(self.cfg), self.limits.ram)
        if hosts > 1:  # shares are whole records
            quarter = shapes.parameters(self.cfg) // self.cfg.n_units // (4 * hosts) // 4096 * 4096
            record = min(record, max(1 << 12, quarter))
        return Wanted(sizes, self.dtype, mode, record, o.adam_bits or 32, on_cuda=self.on_cuda, gpus=gpus, hosts=hosts)


def record_size(parameters: int, ram: int) -> int:
    """Parameters of a record: many, so that drives are fast, but few compared with RAM."""
    return max(min(1 << 24, ram // 1024), min(parameters // 256, ram // 256), 1 << 12) // 4096 * 4096

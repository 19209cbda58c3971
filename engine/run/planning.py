"""The machine and the plan of a job, which is read from --plan or chosen, also of a resumed run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import count, rounded_up
from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.hosts.group import world
from trireme.engine.plan import DoesNotFit, Limits, Mode, Plan
from trireme.engine.planner.advice import check_drive
from trireme.engine.planner.choose import choose, first_plan
from trireme.engine.planner.forecast import Files, Forecast, RunWork
from trireme.engine.planner.host import check_kernels, choose_device, choose_gpus, memory_limits, model_of
from trireme.engine.planner.machine import pinnable, with_drives
from trireme.engine.planner.rates import Machine, assume
from trireme.engine.planner.rule import Wanted, all_cuts, record_size, shortage, simple_plan, sizes_of
from trireme.engine.run import screen
from trireme.engine.run.options import Options
from trireme.engine.run.record import Fixed
from trireme.models.config import InputError, ModelConfig
from trireme.models.sizes import shapes

DTYPES = {"bf16": "BF16", "fp32": "F32", "fp8": "BF16"}  # of all but the matmuls
RECORDS = 1.03  # margin of RAM to ask for: more RAM brings larger records
INVARIANT = ("tokens", "n_micro", "dtype", "record", "adam_bits", "halves")  # of a resumed run's plan
MICRO_TOKENS = {True: 16384, False: 4096}  # by on_cuda: larger micro-batches are no faster


@dataclass(frozen=True)
class Planner:
    """What decides a plan before the data is read."""

    options: Options
    cfg: ModelConfig
    room: int  # tokens of a sequence of a micro-batch: of pairs two documents
    on_cuda: bool
    limits: Limits
    fixed: Fixed | None

    @cached_property
    def user_plan(self) -> Plan | None:
        """The plan of --plan, on the last host. Raises InputError."""
        if not self.options.plan:
            return None
        return replace(Plan.load(Path(self.options.plan)), hosts=world().hosts, host=world().hosts - 1)

    def _faults(self, plan: Plan, work: RunWork, limits: Limits) -> Iterator[str]:
        """Why the plan of --plan does not suit the model, the run or the device."""
        wanted = {"gpus": limits.gpus, "mode": self._mode, "dtype": DTYPES.get(self.options.dtype)}
        wanted |= {"adam_bits": self.options.adam_bits}
        wanted |= {name: getattr(self.fixed.plan, name) for name in INVARIANT} if self.fixed else {}
        for name, value in wanted.items():
            if value not in (None, planned := getattr(plan, name)):
                yield f"{name} is {value}, the plan has {planned}"
        if len(plan.units) != plan.cut(self.cfg).n_units or plan.tokens % self.room:
            yield "it is for another model or --seq-len"
        if plan.accumulate and self.options.router_aux:
            yield "its micro-batches do not pass together, as --router-aux needs"
        if self.on_cuda and not plan.runs_on_cuda:
            yield f"no CUDA kernel updates {plan.adam_bits}-bit moments"
        if math.ceil(work.sequences / (plan.tokens // self.room) / plan.hosts) > plan.n_micro:
            yield "it is for a smaller --batch-size"
        if not fits(geo := Geometry.of(self.cfg, plan), plan, limits):
            yield f"it needs {shortage(geo, plan, limits)}"

    @property
    def _mode(self) -> Mode | None:
        """When AdamW updates, if it must wait until the gradients' norm is known; None: any."""
        return "forward" if self.options.max_grad_norm or world().hosts > 1 else None

    @property
    def dtype(self) -> str:
        """The dtype of weights, BF16 or F32."""
        plan = self.fixed.plan if self.fixed else self.user_plan
        return plan.dtype if plan else DTYPES.get(self.options.dtype, "BF16" if self.on_cuda else "F32")

    def limits_for(self, sequences: int) -> Limits:
        """The limits. On a CPU, where both tiers are in RAM, it is divided otherwise if half of it is too small for a
        tier. Raises DoesNotFit.
        """
        if not (self.on_cuda or self.options.gpu_memory or self.user_plan):
            try:
                simple_plan(self.cfg, self.limits, self.wanted(sequences))
            except DoesNotFit as error:
                need = replace(self.limits, gpu=error.need["gpu"], ram=error.need["ram"])
                if (room := self.limits.total - need.total) < 0:
                    text = f"even the smallest plan needs {rounded_up(need.total)} of RAM, {rounded_up(-room)} too much"
                    advice = f"Raise --ram by {rounded_up(-room * RECORDS)}" if self.options.ram else "Free some"
                    lower = f"lower --seq-len{' or --batch-size' * (sequences > 1)}"
                    raise DoesNotFit(f"{text}. {advice}, or {lower}.") from None
                return replace(need, gpu=need.gpu + room // 2 // need.gpus, ram=need.ram + room - room // 2)
        return self.limits

    def search(
        self, work: RunWork, files: Files, limits: Limits, machine: Machine, stores: Sequence[Path], by_rule: bool
    ) -> tuple[Plan, Machine]:
        """Chooses the plan; also returns the machine, whose drives were measured if the plan may use them.

        `limits`: of limits_for. `stores`: on drives. `by_rule`: no search, no drives. Raises InputError, DoesNotFit.
        """
        o, wanted = self.options, self.wanted(work.sequences)
        wanted = replace(wanted, document=work.document, trained=work.trained, compared=work.compared)
        if plan := self.user_plan:
            if wrong := next(self._faults(plan, work, limits), ""):
                raise InputError(f"--plan {o.plan}: {wrong}. Leave it out.")
            return plan, machine
        first = first_plan(self.cfg, limits, wanted, drive=not o.assume or bool(machine.ssd))
        if not self.on_cuda or by_rule:
            return first, machine
        if o.assume:
            check_drive(Forecast(self.cfg, first, machine, limits, work, files))
        elif first.uses_ssd:
            with screen.clock().at("probe"):  # anew for a resumed run: drives change
                machine = with_drives(machine, stores, anew=self.fixed is not None)
        before = self.fixed.plan if self.fixed else None
        same = before and before.mode == first.mode and before.runs_on_cuda
        return choose(self.cfg, limits, machine.rates, wanted, before if same else None).plan, machine

    def wanted(self, sequences: int) -> Wanted:
        """What a plan is wanted for, with steps of `sequences`. Raises InputError."""
        o, gpus, hosts, before = self.options, self.limits.gpus, world().hosts, self.fixed.plan if self.fixed else None
        sequences = math.ceil(sequences / hosts)  # of each
        mode = self._mode or (before.mode if before else "backward")
        device: dict[str, Any] = dict(on_cuda=self.on_cuda, gpus=gpus, hosts=hosts, accumulate=not o.router_aux)
        if before:
            halves = all_cuts(self.cfg, gpus == hosts == 1, (before.halves,))
            size, same = (before.tokens, before.n_micro), (before.record, before.adam_bits)
            return Wanted((size,), before.dtype, mode, *same, cuts=halves, **device)
        limit = max(1, MICRO_TOKENS[self.on_cuda] // self.room)
        if gpus > 1:
            limit = max(1, min(limit, sequences // gpus))  # fewer micro-batches would leave GPUs idle
        rows = sorted({min(sequences, limit >> k) for k in range(20) if limit >> k}, reverse=True)
        if isinstance(o.micro_batch, int):
            rows = [min(sequences, o.micro_batch)]
        record = record_size(shapes.parameters(self.cfg), self.limits.ram)
        if hosts > 1:  # shares are whole records
            quarter = shapes.parameters(self.cfg) // self.cfg.n_units // (4 * hosts) // 4096 * 4096
            record = min(record, max(1 << 12, quarter))
        return Wanted(sizes_of(rows, sequences, self.room), self.dtype, mode, record, o.adam_bits or 32, **device)


# ---------------------------------------------------------------- the machine


def computer(o: Options, cfg: ModelConfig) -> tuple[torch.device, Limits, Machine | None]:
    """The device, usable memory, and the machine of --assume if there is one. Raises InputError, DoesNotFit."""
    if o.assume:
        device, assumed = torch.device("cuda"), assume(o.assume)
        gpus = assumed.gpus if o.gpus in ("all", 1) else int(o.gpus)
        assumed = assumed.first(gpus, o.gpu_memory)
        limits = replace(assumed.limits, ram=o.ram or assumed.limits.ram, all_free=o.gpu_memory is None)
    else:
        device, assumed = choose_device(o.device), None
        limits = memory_limits(device, o.gpu_memory, o.ram, choose_gpus(o.gpus, device))
        if device.type == "cuda" and o.ram is None:
            limits = replace(limits, ram=int(min(limits.ram, pinnable(device))))
        if (group := world()).hosts > 1:  # those that every host has; hosts on one machine share its RAM
            same = {"--device": model_of(device), "--gpus": limits.gpus}
            group.agree("GPUs", same, "Use equal ones, which round equally, as many on each")
            smallest = min(group.values(limits.gpu - max(limits.less, default=0)))
            ram = min(group.values(limits.ram if o.ram else limits.ram // group.local_hosts))
            limits = replace(limits, gpu=int(smallest), ram=int(ram), less=())
    if limits.gpus > cfg.n_layers:
        raise InputError(f"--gpus {limits.gpus}: the model has {count(cfg.n_layers, 'block')}. Take as many at most.")
    check_kernels(cfg, o.dtype, device, assumed)
    return device, limits, assumed

"""The plan of a job: kept from the run that is resumed, read from a file, or found for the model, data and machine.

Options that contradict it are refused. No torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from trireme.engine.amounts import rounded_up
from trireme.engine.buffers import usage
from trireme.engine.data.dataset import Dataset
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Plan
from trireme.engine.planner.choose import choose
from trireme.engine.planner.forecast import Forecast, check_drive
from trireme.engine.planner.machine import with_drives
from trireme.engine.planner.rates import Machine
from trireme.engine.planner.rule import simple_plan
from trireme.engine.run.options import Options
from trireme.models import shapes
from trireme.models.config import InputError, ModelConfig
from trireme.storage.checkpoint import Source

DTYPES = {"bf16": "BF16", "fp32": "F32"}
CUT = ("tokens", "n_micro", "dtype", "record", "adam_bits", "halves")  # of a plan, that a run keeps to its end
MARGIN = 1.03  # for the larger records of state that more RAM brings
MICRO_TOKENS = {True: 16384, False: 4096}  # on a GPU or not: beyond this a larger micro-batch is no faster


def check_resumed(options: Options, like: dict) -> None:
    """Raises InputError where the options contradict the cut of the run that is resumed."""
    if not {"halves", "batch_size", "model"} <= like.keys():
        raise InputError(f"--resume {options.resume}: begun by an older version, which cut its files otherwise.")
    asked = {"--batch-size": (options.batch_size, like["batch_size"])}
    if options.seq_len is not None:
        asked["--seq-len"] = options.seq_len, like["tokens"] // like["rows"]
    if options.dtype != "auto":
        asked["--dtype"] = options.dtype, next(name for name, dtype in DTYPES.items() if dtype == like["dtype"])
    if not options.plan:  # which says these
        asked["--adam-bits"] = options.adam_bits, like["adam_bits"]
        if options.micro_batch != "auto":
            most = like["rows"] if like["n_micro"] == 1 else options.micro_batch  # of a whole step there is no more
            asked["--micro-batch"] = min(options.micro_batch, most), like["rows"]
    for flag, (now, before) in asked.items():
        if now != before:
            raise InputError(f"{flag} {now}: the run began with {before}, which cannot change. Leave it out.")


def identity(cfg: ModelConfig, source: Source) -> dict[str, dict]:
    """What a run knows its model by: the numbers of its config, and dtype and shape of every tensor in its files."""
    numbers = {name: value for name, value in asdict(cfg).items() if name not in ("rope", "halves")}
    numbers |= {f"rope.{name}": value for name, value in asdict(cfg.rope).items()} if cfg.rope else {}
    return {"config": numbers, "tensors": {name: [t.dtype, *t.shape] for name, t in source.tensors.items()}}


def check_model(options: Options, like: dict, cfg: ModelConfig, source: Source) -> None:
    """Raises InputError where the model is not the one that the resumed run was begun with."""
    for kind, now in identity(cfg, source).items():
        before = like["model"][kind]
        for name in [*before, *now]:
            if now.get(name) != before.get(name):
                here, then = (json.dumps(found[name]) if name in found else "missing" for found in (now, before))
                raise InputError(
                    f"--resume {options.resume}: {name} of {options.model} is {here}, the run began with {then}. "
                    "Name the checkpoint that it began with, as it was."
                )


def given_plan(options: Options, cfg: ModelConfig, seq_len: int, like: dict | None, on_cuda: bool) -> Plan | None:
    """The plan that was given; InputError where it is not for this model, this run or this device."""
    if not options.plan:
        return None
    plan = Plan.load(Path(options.plan))
    if len(plan.units) != plan.cut(cfg).n_units or plan.tokens % seq_len:
        raise InputError(f"{options.plan}: the plan is for another model or --seq-len")
    if options.dtype != "auto" and DTYPES[options.dtype] != plan.dtype:
        raise InputError(f"{options.plan}: the plan computes in {plan.dtype}. Leave --dtype out, or change the plan.")
    if on_cuda and not plan.runs_on_cuda:
        raise InputError(
            f"{options.plan}: no CUDA kernel updates {plan.adam_bits}-bit moments. Give every unit a state in host or "
            "ssd and the update cpu, or set adam_bits to 32."
        )
    geo = Geometry.of(cfg, plan)
    for u, unit in enumerate(plan.units):
        unknown = {name for name, _ in unit.saved} - set(geo.saved_names(geo.kinds[u]) if 0 < u < geo.head else ())
        if unknown:
            raise InputError(f"{options.plan}: unit {u} saves {unknown.pop()!r}, which it does not have")
    for key in CUT if like else ():
        if getattr(plan, key) != like[key]:
            raise InputError(f"{options.plan}: the run began with {key} {like[key]}, the plan has {getattr(plan, key)}")
    return plan


def check_memory(options: Options, cfg: ModelConfig, plan: Plan, limits: dict[str, int]) -> None:
    """Raises DoesNotFit where the plan that was given takes more than there is."""
    need = usage(Geometry.of(cfg, plan), plan)
    if any(need[tier] > limits[tier] for tier in need):
        numbers = [f"{rounded_up(need[t])} of {what}, the limit is {rounded_up(limits[t])}"
                   for t, what in (("gpu", "GPU memory"), ("host", "RAM")) if need[t] > limits[t]]  # fmt: skip
        raise DoesNotFit(f"{options.plan}: the plan needs {' and '.join(numbers)}. Change it, or leave it out.")


def check_step(options: Options, plan: Plan, sequences: int, seq_len: int) -> None:
    """Raises InputError where a step of so many sequences has more micro-batches than the plan that was given."""
    rows = plan.tokens // seq_len
    needed = math.ceil(sequences / rows)
    if needed > plan.n_micro:
        raise InputError(
            f"{options.plan}: a step of {sequences} sequences is {needed} micro-batches of {rows}, the plan has room "
            f"for {plan.n_micro}. Raise its n_micro, or lower --batch-size."
        )


@dataclass(frozen=True)
class Planner:
    """What a plan is made for, as far as it is known before the data is read. `limits`: bytes of gpu and host.

    `like`: the cut of a run that is resumed (see job.cut), which its plan keeps.
    """

    options: Options
    cfg: ModelConfig
    seq_len: int
    on_cuda: bool
    limits: dict[str, int]
    like: dict | None

    @cached_property
    def given(self) -> Plan | None:
        """The plan of --plan. Raises InputError."""
        return given_plan(self.options, self.cfg, self.seq_len, self.like, self.on_cuda)

    @property
    def dtype(self) -> str:
        """What to compute in: BF16 or F32."""
        if self.like or self.given:
            return self.like["dtype"] if self.like else self.given.dtype
        return DTYPES.get(self.options.dtype, "BF16" if self.on_cuda else "F32")

    @property
    def _one_memory(self) -> bool:
        """Whether both tiers are RAM, and how much of it is whose is open."""
        return not (self.on_cuda or self.options.gpu_memory or self.given)

    def refuse_early(self) -> None:
        """Raises DoesNotFit where not even steps of one sequence fit: then the data need not be read.

        How many there are is not known yet, and a step has no more than all of them.
        """
        if self.given:
            return check_memory(self.options, self.cfg, self.given, self.limits)
        try:
            self._smallest_plan(1)
        except DoesNotFit:
            self._smallest_plan(self.options.batch_size)  # which says what a usual step needs
            raise

    def _smallest_plan(self, sequences: int) -> None:
        if self._one_memory:
            self.limits_for(sequences)
        else:
            simple_plan(self.cfg, self.limits, **self._rule(sequences))

    def limits_for(self, sequences: int) -> dict[str, int]:
        """`limits`; where both tiers are RAM, and halves of it do not do, a cut by which a plan fits.

        For steps of so many sequences. Raises DoesNotFit.
        """
        if not self._one_memory:
            return self.limits
        rule = self._rule(sequences)
        room, refused = sum(self.limits.values()), []
        for halves in (False, True) if rule["halves"] is None else (rule["halves"],):
            need = self._lacking(rule | {"halves": halves})
            if need is None:
                return self.limits
            spare = room - sum(need.values())
            if spare >= 0:
                return {"gpu": need["gpu"] + spare // 2, "host": need["host"] + spare - spare // 2}
            refused.append(need)
        need = min(refused, key=lambda need: sum(need.values()))
        smaller = {"--seq-len": [(1, n) for _, n in rule["batch_tokens"]],
                   "--batch-size": [(tokens, 1) for tokens, _ in rule["batch_tokens"]]}  # fmt: skip
        lacking = {option: self._lacking(rule | {"batch_tokens": sizes}) for option, sizes in smaller.items()}
        lower = [option for option, lack in lacking.items() if lack is None or sum(lack.values()) <= room]
        out = f", or lower {' or '.join(lower)}" if lower else ""
        raise DoesNotFit(
            f"even the smallest plan needs {rounded_up(sum(need.values()))} of RAM, {rounded_up(need['gpu'])} of it to "
            f"compute in; the limit is {rounded_up(room)}. "
            f"Raise --ram by {rounded_up((sum(need.values()) - room) * MARGIN)}{out}."
        )

    def _lacking(self, rule: dict) -> dict[str, int] | None:
        """Bytes that the smallest plan needs in each tier where none fits; None where one does."""
        try:
            simple_plan(self.cfg, self.limits, **rule)
        except DoesNotFit as error:
            return error.need
        return None

    def find(
        self, data: Dataset, sequences: int, limits: dict[str, int], machine: Machine, export: int
    ) -> tuple[Plan, tuple[str, ...], Machine]:
        """(the plan, why it is so, the machine, with its drives measured where the plan may use them).

        For steps of so many sequences, within `limits`, of limits_for. `export`: bytes of the checkpoint that is
        written. Raises InputError, DoesNotFit.
        """
        o, rule = self.options, self._rule(sequences)
        if self.given:
            check_step(o, self.given, sequences, self.seq_len)
            return self.given, (f"read from {o.plan}",), machine
        first = simple_plan(self.cfg, limits, **rule)
        if o.assume:
            writes = dict(export=export, best=data.held_out is not None)
            made = Forecast(self.cfg, first, machine, limits, self.seq_len, 1, 1, o.keep, **writes)
            check_drive(made)
        if not self.on_cuda:
            return first, (), machine
        if first.uses("ssd") and not o.assume:
            machine = with_drives(machine, o.store or (o.out,))
        begun = Plan.of(self.like["plan"]) if self.like and "plan" in self.like else None
        begun = begun if begun and begun.mode == first.mode and begun.runs_on_cuda else None
        choice = choose(self.cfg, limits, machine.rates, data.document, begun, trained=data.trained, **rule)
        return choice.plan, choice.because, machine

    def _rule(self, sequences: int) -> dict:
        """What simple_plan is told for steps of so many sequences. Raises InputError."""
        o, like = self.options, self.like
        if like is None:
            most = max(1, MICRO_TOKENS[self.on_cuda] // self.seq_len)
            if o.micro_batch == "auto":
                rows = sorted({min(sequences, most >> k) for k in range(20) if most >> k}, reverse=True)
            else:
                rows = [min(sequences, o.micro_batch)]
            candidates = [(r * self.seq_len, math.ceil(sequences / r)) for r in rows]
            record = record_size(shapes.parameters(self.cfg), self.limits["host"])
        else:
            candidates, record = [(like["tokens"], like["n_micro"])], like["record"]
        mode = o.optimizer_mode
        if mode == "auto":
            mode = "forward" if o.max_grad_norm else "backward"
        if mode == "backward" and o.max_grad_norm:
            raise InputError("--optimizer-mode backward updates before the norm is known. Add --max-grad-norm 0.")
        bits, halves = (like["adam_bits"], like["halves"]) if like else (o.adam_bits, None)
        return dict(
            batch_tokens=candidates, dtype=self.dtype, mode=mode, record=record, adam_bits=bits,
            on_cuda=self.on_cuda, halves=halves,
        )  # fmt: skip


def record_size(parameters: int, ram: int) -> int:
    """Parameters of an optimizer record: large enough for the drive and for few files, small beside the RAM."""
    return max(min(1 << 24, ram // 1024), min(parameters // 256, ram // 256), 1 << 12) // 4096 * 4096

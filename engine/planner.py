"""The plan of a job: the one that was given, or a fast one for its model, its data, its machine and its limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from trireme.engine.choose import choose
from trireme.engine.data import Dataset
from trireme.engine.forecast import Forecast, check_drive
from trireme.engine.machine import with_drives
from trireme.engine.options import Options
from trireme.engine.plan import DoesNotFit, Plan
from trireme.engine.rates import Machine
from trireme.engine.rule import amount, simple_plan
from trireme.engine.settled import DTYPES, check_memory, check_step, given_plan
from trireme.models import shapes
from trireme.models.config import InputError, ModelConfig

MARGIN = 1.03  # for the larger records of state that more RAM brings
MICRO_TOKENS = {True: 16384, False: 4096}  # on a GPU or not: beyond this a larger micro-batch is no faster


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
            f"even the smallest plan needs {amount(sum(need.values()))} of RAM, {amount(need['gpu'])} of it to compute "
            f"in; the limit is {amount(room)}. Raise --ram by {amount((sum(need.values()) - room) * MARGIN)}{out}."
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

"""Estimates of a run: memory by tier, disk space, time, and changes that would make it faster."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from trireme.engine.amounts import gb, percent, whole_gib
from trireme.engine.buffers import GROUP, GROUPS, buffers, each_usage, fullest, scratch, usage, workspace
from trireme.engine.geometry import Geometry
from trireme.engine.plan import TIERS, DoesNotFit, Limits, Plan, Tier
from trireme.engine.planner.choose import choose, first_plan
from trireme.engine.planner.predict import Batch, Prediction, lengths_of, predict
from trireme.engine.planner.rates import DRIVE_SHARE, RAM_SHARE, TB, Machine
from trireme.engine.planner.rule import Wanted
from trireme.models.config import ModelConfig
from trireme.models.sizes import costs, narrow, shapes
from trireme.storage.layout import ITEMSIZE
from trireme.storage.shards import IN_FLIGHT

BEST = "best so far"  # row of the memory table: the copy of the best weights
WORTH_SAYING = 1.1  # a change with at least this gain in tokens/s is printed
ENDLESS = 1 << 40  # sequences


@dataclass(frozen=True)
class Work:
    """What a run computes: its steps, their sequences and tokens, evaluations."""

    seq_len: int
    sequences: int  # of a step
    steps: int
    used: float = 1.0  # share of a sequence with tokens
    document: int = 0  # tokens of a usual document; 0: seq_len
    trained: float = 1.0  # share of tokens with a label
    compared: bool = False  # as Batch
    evaluations: int = 0  # of the run
    held_out: int = 0  # tokens of an evaluation

    @property
    def tokens(self) -> int:
        return max(1, round(self.sequences * self.seq_len * self.used))

    def batch(self, plan: Plan) -> Batch:
        n_micro = min(plan.n_micro, math.ceil(self.sequences * self.seq_len / plan.tokens / plan.hosts))
        tokens = math.ceil(self.tokens / plan.hosts / n_micro)
        return Batch(tokens, self.document or self.seq_len, n_micro, self.trained, self.compared)


@dataclass(frozen=True)
class Files:
    """Bytes on the drives in addition to training state, and snapshots kept."""

    export: int = 0  # the written checkpoint; 0: weights in the compute dtype
    merged: int = 0  # the written model with its adapters in it
    copied: str = "the checkpoint's, or a copy"  # why they take space on the SSD; "": read from the checkpoint
    best: bool = False  # a checkpoint of the best weights is written in addition to the last
    exact: bool = False  # the checkpoint is written from fp32 masters
    tokens: int = 0  # the tokenized data
    held: int = 0  # bytes of these files and of the state that the run has on the drives already
    keep: int = 1
    apart: int = 0  # checkpoints of single steps
    read: int = 0  # to quantize a base, or to check and load one


class Change(NamedTuple):
    """A change of options that makes a run faster, and its step."""

    what: str
    gain: float  # in tokens a second
    step_s: float


@dataclass(frozen=True)
class Forecast:
    """The estimates of a run with a plan."""

    cfg: ModelConfig
    plan: Plan
    machine: Machine
    limits: Limits
    work: Work
    files: Files = field(default_factory=Files)

    @cached_property
    def geo(self) -> Geometry:
        return Geometry.of(self.cfg, self.plan)

    @cached_property
    def step(self) -> Prediction:
        return self._predict(roughly=False)

    @property
    def roughly(self) -> Prediction:
        """The step as searches predict it: micro-batches as one. It moves the same bytes, and is known already."""
        return self._predict(roughly=True)

    def _predict(self, roughly: bool) -> Prediction:
        return predict(self.cfg, self.plan, self.machine.rates, self.work.batch(self.plan), roughly)

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of a step: three times the FLOPs of forward, without recomputation, per second."""
        work = self.work
        pairs = costs.layer_pairs(self.cfg, lengths_of(work.tokens, work.document or work.seq_len))
        return costs.model_flops(self.cfg, work.tokens, pairs) / self.step.step_s / 1e12

    def pinning_s(self) -> float:
        """Seconds to pin RAM before the first step."""
        return usage(self.geo, self.plan)["host"] / self.machine.rates.pin

    # ------------------------------------------------ memory and disk

    @property
    def fullest(self) -> int:
        """The GPU with the fewest bytes left."""
        return fullest(each_usage(self.geo, self.plan)[0], self.limits)

    def memory(self, all_gpus: bool = False) -> dict[str, dict[Tier, int]]:
        """Bytes by row of the table and by tier: of the fullest GPU, or with `all_gpus` of all."""
        geo, plan = self.geo, self.plan
        made, counted = buffers(geo, plan), range(plan.gpus) if all_gpus else [self.fullest]
        held: dict[str, dict[Tier, int]] = {row: dict.fromkeys(TIERS, 0) for row in GROUPS}
        held["workspace"]["gpu"] = sum(workspace(geo, plan, gpu) for gpu in counted)
        for b in made:
            held[GROUP[b.what]][b.tier] += b.nbytes * b.count * (b.tier != "gpu" or b.gpu in counted)
        for u, unit in enumerate(plan.units):
            held["weights"]["ssd"] += geo.weights[u].span * (unit.weights == "ssd")
            held["weights"]["ssd"] += geo.base_bytes[u] * (unit.base == "ssd")
            held["optimizer state"]["ssd"] += geo.state_span(u, plan.record) * (unit.state == "ssd")
        held["activations"]["ssd"], held["gradients"]["ssd"] = scratch(geo, plan)
        return held | ({BEST: {"gpu": 0, "host": self.kept, "ssd": 0}} if self.kept else {})

    @property
    def kept(self) -> int:
        """Bytes of RAM for a copy of the best weights; 0 if the plan leaves no room for it."""
        if not self.files.best:
            return 0
        geo, need, low = self.geo, usage(self.geo, self.plan), 2 * (self.files.exact and self.plan.dtype == "BF16")
        nbytes = sum(w.span * bool(n) + low * n for w, n in zip(geo.weights, geo.numel, strict=True))
        room = self.limits.host - need["host"]
        if not self.machine.rates.host:  # a CPU: both tiers are RAM
            room += self.plan.gpus * (self.limits.gpu - need["gpu"])
        return nbytes if nbytes <= room else 0

    @property
    def frozen_read(self) -> int:
        """Bytes that are read to load frozen weights; those that are quantized to fp8 are read twice."""
        if self.files.read:
            return self.files.read
        codes = (t.nbytes for layout in self.geo.base for t in layout.tensors if t.name.endswith(narrow.ROWS))
        return sum(self.geo.base_bytes) + (2 * ITEMSIZE[self.plan.dtype] - 1) * sum(codes)

    @property
    def frozen_on_ssd(self) -> int:
        return sum(self.geo.base_bytes[u] for u, unit in enumerate(self.plan.units) if unit.base == "ssd")

    def stored(self) -> int:
        """Bytes of a snapshot: weights and optimizer state."""
        geo = self.geo
        return sum(geo.weights[u].span + geo.state_span(u, self.plan.record) for u in range(geo.n_units))

    def disk_parts(self) -> dict[str, int]:
        """Bytes on the drives at their maximum, by what takes them."""
        stored, files = self.stored(), self.files
        export = files.export or shapes.parameters(self.cfg) * ITEMSIZE[self.plan.dtype]
        return {
            "store": stored,
            "snapshots": files.keep * stored,
            "spares": spares(self.geo, self.plan),
            "export": export + files.merged,
            "best": 2 * export * files.best,  # and the one that the last snapshot names
            "apart": export * files.apart,
            "tokens": files.tokens,
            "frozen": self.frozen_on_ssd * bool(files.copied),
            "scratch": sum(scratch(self.geo, self.plan)),
        }

    def disk(self) -> int:
        return sum(self.disk_parts().values())

    @property
    def room(self) -> int:
        """Bytes of the drives that the run may use, including those that it uses already; 0 without a drive. A reserve
        stays free if steps write state to the drives.
        """
        reserve = self.machine.reserve if self.plan.uses("ssd") else 0
        return max(0, self.machine.ssd - reserve) + self.files.held

    # ------------------------------------------------ changes

    def faster(self, sequences: int = ENDLESS, bits_open: bool = True) -> list[Change]:
        """Up to three changes that give more tokens per second, the best first. Each is planned and simulated.

        `sequences`: those of the data. `bits_open`: --adam-bits can still be chosen.
        """
        now, better = self.work.tokens / self.roughly.step_s, []
        for what, change in self._changes(sequences, bits_open):
            try:
                changed = change()
                check_drive(changed)
            except DoesNotFit:
                continue
            gain = changed.work.tokens / changed.roughly.step_s / now
            if gain >= WORTH_SAYING:
                better.append(Change(what, gain, changed.work.tokens / self.work.tokens * self.step.step_s / gain))
        return sorted(better, key=lambda change: -change.gain)[:3]

    def _changes(self, sequences: int, bits_open: bool) -> Iterable[tuple[str, Callable[[], Forecast]]]:
        m, r, p, limits = self.machine, self.machine.rates, self.plan, self.limits
        if p.adam_bits == 32 and bits_open:
            yield "--adam-bits 8", lambda: self.in_8_bits
        doubled = 2 * self.work.sequences
        if doubled <= sequences:
            more = replace(self.work, sequences=doubled)
            yield f"--batch-size {doubled}", lambda: replace(self.again(n_micro=2 * p.n_micro), work=more)
        yield "twice the RAM", lambda: self.again(replace(limits, host=2 * limits.host))
        if any(u.state == "ssd" for u in p.units):
            rates = r.times(2, ("ssd_read", "ssd_write"))
            drives = replace(m, ssd=2 * m.ssd, reserve=2 * m.reserve, rates=rates)
            yield "twice the drives", lambda: replace(self, machine=drives).again()
        yield "a GPU with twice the memory", lambda: self.again(replace(limits, gpu=2 * limits.gpu))
        quick = replace(m, rates=r.times(2, ("matmul", "fp8", "copy")))
        yield "a GPU twice as fast", lambda: replace(self, machine=quick).again()

    @cached_property
    def in_8_bits(self) -> Forecast:
        """With moments of 8 bits. Raises DoesNotFit."""
        return self.again(adam_bits=8)

    def again(self, limits: Limits | None = None, adam_bits: int = 0, n_micro: int = 0) -> Forecast:
        """The estimates with other limits, moments or micro-batches, planned anew. Raises DoesNotFit."""
        p, limits = self.plan, limits or self.limits
        wanted = Wanted.like(replace(p, n_micro=n_micro or p.n_micro), self.work.batch(p))
        wanted = replace(wanted, adam_bits=adam_bits or p.adam_bits)
        choice = choose(self.cfg, limits, self.machine.rates, wanted)
        return replace(self, plan=choice.plan, limits=limits)


def check_drive(f: Forecast) -> None:
    """Raises DoesNotFit if the plan needs a drive and there is none, or more than the drives hold."""
    plan, room, need, drive = f.plan, f.room, f.disk(), f.machine.ssd + f.files.held > 0
    if plan.uses("ssd") and not drive:
        wanted = Wanted.like(plan, f.work.batch(plan))

        def enough(ram: int) -> bool:
            return not first_plan(f.cfg, replace(f.limits, host=ram), wanted, drive=False).uses("ssd")

        steps = range(f.limits.host, 1 << 60, 1 << 30)
        ram = steps[bisect_left(steps, True, key=enough)]
        raise DoesNotFit(
            f"weights and optimizer state need {whole_gib(ram)} of RAM, the limit is {whole_gib(f.limits.host)} and "
            f"there is no SSD. Add ssd={math.ceil(need / DRIVE_SHARE / TB)}TB, or raise ram to "
            f"{whole_gib(math.ceil(ram / RAM_SHARE))} (--ram {whole_gib(ram)} of it)."
        )
    if drive and need > room:
        raise DoesNotFit(
            f"the store and the export need {gb(need)}, {gb(need - room)} more than the drives take: "
            f"{percent(1 - DRIVE_SHARE)} of them stays free. Raise ssd to {math.ceil(need / DRIVE_SHARE / TB)}TB."
        )


def spares(geo: Geometry, plan: Plan) -> int:
    """Bytes of the store's spare files, as Store.reserve allocates them."""
    if not plan.stored_on_ssd:
        return 0
    sizes = {layout.span for layout in geo.weights}
    sizes |= {geo.state_layout(n).span for u in range(geo.n_units) for n in geo.record_sizes(u, plan.record)}
    return IN_FLIGHT * sum(sizes)

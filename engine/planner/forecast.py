"""Estimates of a run with a plan: its step, what each memory holds, and what is on the drives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from trireme.engine.buffers import GROUP, GROUPS, buffers, each_usage, fullest, workspace
from trireme.engine.geometry import Geometry
from trireme.engine.plan import TIERS, Limits, Plan, Tier
from trireme.engine.planner.choose import nearby
from trireme.engine.planner.predict import Batch, Prediction, least_seconds, lengths_of, predict, scratch_bytes
from trireme.engine.planner.rates import Machine
from trireme.engine.planner.rule import Wanted, saving_last
from trireme.models.config import ModelConfig
from trireme.models.sizes import costs, narrow, shapes
from trireme.storage.layout import ITEMSIZE
from trireme.storage.shards import IN_FLIGHT


@dataclass(frozen=True)
class RunWork:
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
    accumulate: bool = True  # as Wanted

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
    existing: int = 0  # bytes of these files and of the state that the run has on the drives already
    keep: int = 1
    step_exports: int = 0  # checkpoints of single steps
    read: int = 0  # to quantize a base, or to check and load one


@dataclass(frozen=True)
class Forecast:
    """The estimates of a run with a plan."""

    cfg: ModelConfig
    plan: Plan
    machine: Machine
    limits: Limits
    work: RunWork
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
    def speed(self) -> float:
        """Tokens per second, as searches predict it."""
        return self.work.tokens / self.roughly.step_s

    @cached_property
    def ceiling(self) -> float:
        """Tokens per second that no plan with these micro-batches exceeds: GPUs compute all the time, nothing twice."""
        every = saving_last(self.geo, self.plan, self.geo.n_units - 2)
        return self.work.tokens / least_seconds(self.geo.cfg, every, self.machine.rates, self.work.batch(self.plan))

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of a step: three times the FLOPs of forward, without recomputation, per second."""
        work = self.work
        pairs = costs.layer_pairs(self.cfg.layers, lengths_of(work.tokens, work.document or work.seq_len))
        return costs.model_flops(self.cfg, work.tokens, pairs) / self.step.step_s / 1e12

    @cached_property
    def in_8_bits(self) -> Forecast:
        """With moments of 8 bits. Raises DoesNotFit."""
        return self.again(adam_bits=8)

    def again(self, limits: Limits | None = None, adam_bits: int = 0, n_micro: int = 0) -> Forecast:
        """The estimates with other limits, moments or micro-batches, with a plan near this one (`nearby`). Raises
        DoesNotFit.
        """
        p, limits = self.plan, limits or self.limits
        wanted = Wanted.like(replace(p, n_micro=n_micro or p.n_micro), self.work)
        wanted = replace(wanted, adam_bits=adam_bits or p.adam_bits)
        return replace(self, plan=nearby(self.cfg, limits, self.machine.rates, wanted, p), limits=limits)

    # ------------------------------------------------ memory and disk

    @property
    def fullest(self) -> int:
        """The GPU with the fewest bytes left."""
        return fullest(each_usage(self.geo, self.plan)[0], self.limits)

    def memory(self, all_gpus: bool = False) -> dict[str, dict[Tier, int]]:
        """Bytes by row of the table and by tier: of the fullest GPU, or with `all_gpus` of all."""
        geo, plan = self.geo, self.plan
        counted: Sequence[int] = range(plan.gpus) if all_gpus else [self.fullest]
        rows: dict[str, dict[Tier, int]] = {row: dict.fromkeys(TIERS, 0) for row in GROUPS}
        rows["workspace"]["gpu"] = sum(workspace(geo, plan, gpu) for gpu in counted)
        for b in buffers(geo, plan):
            rows[GROUP[b.role]][b.tier] += b.nbytes * b.count * (b.tier != "gpu" or b.gpu in counted)
        for u, unit in enumerate(plan.units):
            rows["weights"]["ssd"] += geo.weights[u].span * (unit.weights == "ssd")
            rows["optimizer state"]["ssd"] += geo.state_span(u, plan.record) * (unit.state == "ssd")
            rows["gradients"]["ssd"] += geo.weights[u].span * plan.spilled(u)
        rows["activations"]["ssd"] = self.scratch - rows["gradients"]["ssd"]
        rows["weights"]["ssd"] += self.frozen_on_ssd
        return rows

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

    @cached_property
    def scratch(self) -> int:
        """Bytes of activations and gradients on the SSD."""
        return scratch_bytes(self.cfg, self.plan)

    @property
    def stored_weights(self) -> int:
        """Bytes of all weights in the compute dtype."""
        return sum(layout.span for layout in self.geo.weights) + sum(self.geo.base_bytes)

    def stored(self) -> int:
        """Bytes of a snapshot: weights and optimizer state."""
        geo = self.geo
        return sum(geo.weights[u].span + geo.state_span(u, self.plan.record) for u in range(geo.n_units))

    def unsaved(self) -> int:
        """Bytes of a snapshot that are not on the drives before it."""
        rows = self.memory()
        return self.stored() - rows["optimizer state"]["ssd"] - rows["weights"]["ssd"] + self.frozen_on_ssd

    def disk_parts(self) -> dict[str, int]:
        """Bytes on the drives at their maximum, by what takes them."""
        stored, files = self.stored(), self.files
        export = files.export or shapes.parameters(self.cfg) * ITEMSIZE[self.plan.dtype]
        return {
            "store": stored,
            "snapshots": files.keep * stored,
            "spares": self._spares(),
            "export": export + files.merged,
            "best": 2 * export * files.best,  # and the one that the last snapshot names
            "step_exports": export * files.step_exports,
            "frozen": self.frozen_on_ssd * bool(files.copied),
            "scratch": self.scratch,
        }

    def disk(self) -> int:
        return sum(self.disk_parts().values())

    def _spares(self) -> int:
        """Bytes of the store's spare files, as Store.reserve allocates them."""
        geo, plan = self.geo, self.plan
        if not plan.stored_on_ssd:
            return 0
        sizes = {layout.span for layout in geo.weights}
        sizes |= {geo.state_layout(b - a).span for u in range(geo.n_units) for a, b in geo.records(u, plan.record)}
        return IN_FLIGHT * sum(sizes)

    @property
    def has_drive(self) -> bool:
        return self.machine.ssd + self.files.existing > 0

    @property
    def room(self) -> int:
        """Bytes of the drives that the run may use, including those that it uses already; 0 without a drive. A reserve
        stays free if steps write state to the drives.
        """
        reserve = self.machine.reserve if self.plan.uses_ssd else 0
        return max(0, self.machine.ssd - reserve) + self.files.existing

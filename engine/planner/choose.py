"""Searches for the fastest plan: one decision after another, each by simulating the step with its alternatives.

The search starts from the rule's plan (rule.py), so what it returns is never estimated to be slower. Everything that it
simulates fits. Plans differ in roundings only if they differ in the processor of updates or in the size of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from trireme.engine.amounts import gib
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan, Shares
from trireme.engine.planner.decisions import DECISIONS, finer, swapped
from trireme.engine.planner.predict import Prediction, no_collection
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import Cut, Strategy, Wanted, cuts, simple_plan, sliced
from trireme.engine.planner.search import Search, updated_as
from trireme.models.config import ModelConfig
from trireme.models.sizes import narrow

SLICES = 4  # number of slices of a layer's frozen experts that is tried for a better overlap
WITHOUT_A_DRIVE = Strategy(states=1.0), Strategy("ram", states=1.0), Strategy("ram", states=1.0, updates=0.0)


@dataclass(frozen=True)
class Choice:
    """A plan and its estimated step (`predict` with `roughly`)."""

    plan: Plan
    step: Prediction

    @property
    def per_token(self) -> float:
        """Seconds."""
        return self.step.step_s / (self.plan.tokens * self.plan.n_micro)


@no_collection()
def choose(cfg: ModelConfig, limits: Limits, rates: Rates, wanted: Wanted, begun: Plan | None = None) -> Choice:
    """Returns the plan with the lowest estimated cost. Deterministic. Raises DoesNotFit.

    `begun`: the plan of the run that is resumed; updates stay on the processors of that plan if that fits.
    """
    wanted = replace(wanted, peers=wanted.gpus > 1 and rates.peer > 0)
    first = first_plan(cfg, limits, wanted, rates.has_drive)
    if first.uses("ssd") and not rates.has_drive:
        raise DoesNotFit(
            f"RAM of {gib(limits.ram, 1)} and GPU memory of {gib(limits.gpu, 1)} do not hold everything, and "
            "there is no drive for the rest."
        )
    choices = []
    for way in _ways(cfg, limits, wanted, first, begun is not None):
        with suppress(DoesNotFit):
            plan = first_plan(cfg, limits, way, rates.has_drive)
            if rates.has_drive or not plan.uses("ssd"):
                choices.append(_descend(Search(Geometry.of(cfg, plan), limits, rates, way, plan, begun)))
    return min(choices, key=lambda choice: choice.per_token)


@no_collection()
def rebalance(cfg: ModelConfig, limits: Limits, rates: Rates, wanted: Wanted, plan: Plan) -> Choice:
    """Returns `plan`, of a run under way, with those saved tensors that are fastest at these rates (Fuyou, section
    4.5). Weights, state, inputs and the sizes of all else stay as they are.
    """
    s = Search(Geometry.of(cfg, plan), limits, rates, wanted, plan)
    s.simulate(plan)
    for decision in (swapped, finer):
        for other in decision(s, s.best):
            if s.fits(other):
                s.simulate(other)
    return Choice(s.best, s.steps[s.best])


def _ways(cfg: ModelConfig, limits: Limits, wanted: Wanted, first: Plan, begun: bool) -> Iterator[Wanted]:
    """What is decided before all else, each way with a search of its own: a layer's frozen experts whole or in slices,
    layers dealt to GPUs in turn or in proportion to their free memory.
    """
    same, tried = Cut.of(first), cuts(cfg, wanted)
    streamed = any(unit.base != "gpu" for unit in first.units) and first.gpus == first.hosts == 1
    may = first.halves and first.slices == 1 and streamed and narrow.may_be_sliced(cfg) and not begun
    of = [same, *([sliced(cfg, SLICES)] if may and sliced(cfg, SLICES) in tried else [])]
    rooms = [limits.of(gpu) for gpu in range(wanted.gpus)]
    shares = [None, Shares(tuple(map(float, rooms)), rooms.index(max(rooms)))]
    for cut, share in product(of, shares if limits.less else shares[:1]):
        yield replace(wanted, cuts=(cut,), shares=share)


def first_plan(cfg: ModelConfig, limits: Limits, wanted: Wanted, drive: bool) -> Plan:
    """The rule's plan. If it needs the SSD and there is no `drive`: a plan without the SSD, which fills the GPU with
    optimizer state before activations, if one fits; otherwise the rule's plan. Raises DoesNotFit.
    """
    first = simple_plan(cfg, limits, wanted)
    if drive or not first.uses("ssd"):
        return first
    others = (simple_plan(cfg, limits, wanted, strategy) for strategy in WITHOUT_A_DRIVE)
    return next((plan for plan in others if not plan.uses("ssd")), first)


def _descend(s: Search) -> Choice:
    starts: list[Plan | None] = [s.first]
    if s.begun is not None:
        s.begun = s.begun.dealt(s.wanted.gpus, s.geo.cfg.tied, s.wanted.peers, s.wanted.shares)
        starts = [updated_as(s.first, s.begun), s.begun, s.first]
    start = next(plan for plan in starts if plan is not None and s.fits(plan))
    s.simulate(start)
    for decision in DECISIONS:
        s.decide(decision)
    assert s.costs[s.best] <= s.costs[start]
    return Choice(s.best, s.steps[s.best])

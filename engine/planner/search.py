"""The plans that a search has simulated, and what its decisions (decisions.py) ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.predict import Batch, Prediction, predict
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import Strategy, Wanted, longer_pieces, simple_plan
from trireme.engine.planner.swaps import Move, moves

WEAR = 0.5  # a plan's cost includes this share of the seconds of writing activations to the SSD, for the drive's wear


@dataclass
class Search:
    """The plans that were simulated. All of them fit."""

    geo: Geometry
    limits: Limits
    rates: Rates
    wanted: Wanted
    first: Plan  # the rule's
    begun: Plan | None = None
    steps: dict[Plan, Prediction] = field(default_factory=dict)
    costs: dict[Plan, float] = field(default_factory=dict)

    def simulate(self, plan: Plan) -> None:
        if plan not in self.steps:
            assert self.fits(plan), "a plan that does not fit is not simulated"
            self.steps[plan] = predict(self.geo.cfg, plan, self.rates, self.batch(plan), roughly=True)
            self.costs[plan] = self._cost(plan)

    def _cost(self, plan: Plan) -> float:
        """Estimated seconds per token, plus WEAR."""
        step = self.steps[plan]
        wear = WEAR * step.swapped / self.rates.ssd_write if step.swapped else 0.0
        return (step.step_s + wear) / (plan.tokens * plan.n_micro)

    def batch(self, plan: Plan) -> Batch:
        return Batch(plan.tokens, self.wanted.document, plan.n_micro, self.wanted.trained, self.wanted.compared)

    @property
    def best(self) -> Plan:
        return min(self.costs, key=self.costs.__getitem__)

    def fits(self, plan: Plan) -> bool:
        return fits(self.geo, plan, self.limits) and (self.rates.has_drive or not plan.uses("ssd"))

    def decide(self, decision: Decision) -> None:
        """Simulates the alternatives to the best plan that fit. Their gradient pieces are as long as memory allows.

        The decision gets the plan with the rule's short pieces: longer ones take memory that an alternative may need.
        """
        best = self.best
        for plan in decision(self, replace(best, piece=min(best.piece, self.first.piece))):
            resumed = plan if self.begun is None else updated_as(plan, self.begun)
            if resumed is not None and self.fits(resumed):
                self.simulate(longer_pieces(self.geo, resumed, self.limits))

    def moves(self, plan: Plan) -> Sequence[Move]:
        return moves(self.geo, self.batch(plan), self.rates)

    def rule(self, strategy: Strategy, size: tuple[int, int], limits: Limits | None = None) -> Iterator[Plan]:
        """The rule's plan with a strategy and a size of micro-batches, if it fits."""
        with suppress(DoesNotFit):
            yield simple_plan(self.geo.cfg, limits or self.limits, replace(self.wanted, sizes=(size,)), strategy)

    def sizes(self, tokens: int) -> Sequence[tuple[int, int]]:
        """(tokens, number) of micro-batches: this one, and the next smaller and larger ones."""
        at = next(i for i, (most, _) in enumerate(self.wanted.sizes) if most <= tokens)
        return self.wanted.sizes[max(0, at - 1) : at + 2]


Decision = Callable[[Search, Plan], Iterable[Plan]]  # alternatives to a plan


def updated_as(plan: Plan, begun: Plan) -> Plan | None:
    """`plan` with each unit's update on the processor of `begun`; None if the placement of `plan` does not allow it."""
    units = []
    for unit, other in zip(plan.units, begun.units, strict=True):
        on_gpu = other.state == "gpu" or other.update == "gpu"
        streamed = on_gpu and unit.state != "gpu"
        if unit.state == "gpu" and not on_gpu:
            return None
        if streamed and ((unit.weights, unit.state) != ("ram", "ram") or plan.mode == "backward"):
            return None
        units.append(replace(unit, gpu=other.gpu, update="gpu" if streamed else "cpu"))
    return replace(plan, units=tuple(units))

"""What a search tries: plans of the rule, and moves, which save tensors instead of recomputing them; what it has found.

Which tensors are swapped rather than recomputed: the most seconds of recomputation per byte first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import NamedTuple

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan, SavedTier
from trireme.engine.planner.predict import STEADY, Batch, Prediction, least_seconds, predict, rebuilt_seconds
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import Strategy, Wanted, evenly, largest_fitting, longer_pieces, simple_plan
from trireme.models.sizes import shapes
from trireme.storage.layout import ITEMSIZE

JITTER = 1.5  # of the interpreter's time for many small kernels: a GPU that waits for it is slower than estimated
WEAR = 0.5  # a plan's cost includes this share of the seconds of writing activations to the SSD, for the drive's wear


@dataclass
class Search:
    """The plans that were simulated. All of them fit."""

    geo: Geometry
    limits: Limits
    rates: Rates
    wanted: Wanted
    first: Plan  # the rule's
    resumed: Plan | None = None
    steps: dict[Plan, Prediction] = field(default_factory=dict)
    costs: dict[Plan, float] = field(default_factory=dict)  # estimated seconds per token, plus WEAR

    def simulate(self, plan: Plan) -> None:
        if plan not in self.steps:
            assert self.fits(plan), "a plan that does not fit is not simulated"
            slower = dict(launch_overhead=JITTER * self.rates.launch_overhead, task=JITTER * self.rates.task)
            rates = replace(self.rates, **slower) if plan.accumulate else self.rates
            step = predict(self.geo.cfg, plan, rates, self.batch(plan), roughly=True)
            wear = WEAR * step.swapped / self.rates.ssd_write if step.swapped else 0.0
            self.steps[plan], self.costs[plan] = step, (step.step_s + wear) / (plan.tokens * plan.n_micro)

    def batch(self, plan: Plan) -> Batch:
        return Batch(plan.tokens, self.wanted.document, plan.n_micro, self.wanted.trained, self.wanted.compared)

    @property
    def best(self) -> Plan:
        return min(self.costs, key=self.costs.__getitem__)

    def fits(self, plan: Plan) -> bool:
        return fits(self.geo, plan, self.limits) and (self.rates.has_drive or not plan.uses_ssd)

    def may_be_best(self, plan: Plan) -> bool:
        """False if its computation alone takes longer than the best plan's step."""
        bound = least_seconds(self.geo.cfg, plan, self.rates, self.batch(plan)) / (plan.tokens * plan.n_micro)
        return bound <= (1 + STEADY) * self.costs[self.best]

    def decide(self, decision: Decision) -> None:
        """Simulates the alternatives to the best plan that fit. Their gradient pieces are as long as memory allows.

        The decision gets the plan with the rule's short pieces: longer ones take memory that an alternative may need.
        """
        best = self.best
        for plan in decision(self, replace(best, piece=min(best.piece, self.first.piece))):
            updated = plan if self.resumed is None else updated_as(plan, self.resumed)
            if updated is not None and self.fits(updated) and self.may_be_best(updated):
                self.simulate(longer_pieces(self.geo, updated, self.limits))

    def moves(self, plan: Plan) -> Sequence[Move]:
        return moves(self.geo, self.batch(plan), self.rates)

    def rule(self, strategy: Strategy, size: tuple[int, int], limits: Limits | None = None) -> Iterator[Plan]:
        """The rule's plan with a strategy and a size of micro-batches, if it fits."""
        with suppress(DoesNotFit):
            yield simple_plan(self.geo.cfg, limits or self.limits, replace(self.wanted, sizes=(size,)), strategy)

    def sizes(self, tokens: int) -> Sequence[tuple[int, int]]:
        """(tokens, number) of micro-batches: this one, and the next smaller and larger ones."""
        index = next(i for i, (larger, _) in enumerate(self.wanted.sizes) if larger <= tokens)
        return self.wanted.sizes[max(0, index - 1) : index + 2]


Decision = Callable[[Search, Plan], Iterable[Plan]]  # alternatives to a plan


def updated_as(plan: Plan, resumed: Plan) -> Plan | None:
    """`plan` with each unit's update on the processor of `resumed`; None if its own placement does not allow it."""
    units = []
    for unit, before in zip(plan.units, resumed.units, strict=True):
        on_gpu = before.state == "gpu" or before.update == "gpu"
        streamed = on_gpu and unit.state != "gpu"
        if unit.state == "gpu" and not on_gpu:
            return None
        if streamed and ((unit.weights, unit.state) != ("ram", "ram") or plan.mode == "backward"):
            return None
        units.append(replace(unit, gpu=before.gpu, update="gpu" if streamed else "cpu"))
    return replace(plan, units=tuple(units))


# ---------------------------------------------------------------- moves


class Move(NamedTuple):
    """A step towards saving everything of a kind of unit: more tensors are saved, and fewer are recomputed."""

    kind: str  # of unit: block, attention, mlp
    names: tuple[str, ...]  # all tensors that are saved after this move
    nbytes: int  # additional bytes, for the tokens of a micro-batch
    seconds: float  # of recomputation that it avoids, for a micro-batch


def moves(geo: Geometry, batch: Batch, rates: Rates) -> list[Move]:
    """The moves from saving nothing to saving everything, sorted by seconds per byte, highest first.

    For each kind of unit the sets of saved tensors are those on the lower convex hull of (bytes, seconds of
    recomputation): the next one is always the steepest (Fuyou, equation 12; MPress, table III). Of equally steep ones
    it is the smallest that keeps what is saved already, else the largest.
    """
    steps, itemsize = [], ITEMSIZE[geo.dtype]
    for kind in geo.inner_kinds:
        u, nbytes = geo.kinds.index(kind), shapes.saved_bytes(geo.cfg, batch.tokens, itemsize, kind)
        sets = chain.from_iterable(combinations(nbytes, count) for count in range(len(nbytes) + 1))
        again = lambda names, u=u: rebuilt_seconds(geo.cfg, u, frozenset(names), itemsize, rates, batch)
        costs = {names: (sum(nbytes[n] for n in names), again(names)) for names in sets}
        saved: tuple[str, ...] = ()
        while True:
            size, seconds = costs[saved]
            steep = {n: (seconds - s) / (b - size) for n, (b, s) in costs.items() if b > size and s < seconds}
            if not steep:
                break
            best = [names for names in steep if steep[names] >= (1 - 1e-6) * max(steep.values())]
            keep = [names for names in best if set(names) >= set(saved)]
            sizes = {names: costs[names][0] for names in best}
            saved = min(keep, key=sizes.__getitem__) if keep else max(best, key=sizes.__getitem__)
            steps.append(Move(kind, saved, costs[saved][0] - size, seconds - costs[saved][1]))
    # Rounded: rounding errors would change the order.
    return sorted(steps, key=lambda move: -float(f"{move.seconds / move.nbytes:.6g}"))


def count_moves(geo: Geometry, steps: Sequence[Move]) -> int:
    """Moves of all units."""
    return sum(geo.kinds.count(move.kind) for move in steps)


def with_most_on_gpu(
    geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], counts: Mapping[SavedTier, int]
) -> Plan:
    """`with_moves` of `counts`, and of as many more as fit on the GPU."""
    moved = lambda n: with_moves(geo, plan, steps, {**counts, "gpu": n})
    return largest_fitting(geo, limits, count_moves(geo, steps), moved)


def with_moves(
    geo: Geometry,
    plan: Plan,
    steps: Sequence[Move],
    counts: Mapping[SavedTier, int],
    only: Container[int] | None = None,
) -> Plan:
    """`plan` that saves the tensors of the first moves, as many in each tier as `counts` has, in its order.

    Each move counts once for each unit of its kind. Where only some units make it, or some to a tier, they are at even
    distances. `only`: other units stay as they are.
    """
    left = dict(counts)
    saved: dict[int, dict[str, SavedTier]] = {u: {} for u in range(1, geo.head) if only is None or u in only}
    for move in steps:
        units = [u for u in saved if geo.kinds[u] == move.kind]
        units = sorted(evenly(units, min(sum(left.values()), len(units))))
        for tier in left:
            chosen = evenly(units, min(left[tier], len(units)))
            left[tier] -= len(chosen)
            for u in chosen:
                saved[u] = {name: saved[u].get(name, tier) for name in move.names}
            units = [u for u in units if u not in chosen]
    return plan.saving({u: tuple(names.items()) for u, names in saved.items()})

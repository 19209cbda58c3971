"""The fastest plan that a short search around the plain rule finds, and why.

The rule (rule.py) fills the GPU, then RAM, then the SSD, and recomputes what it does not keep. It cannot weigh time:
whether activations are better swapped to RAM or the SSD than recomputed; whether GPU memory serves better as a home of
state, weights, inputs or saved tensors; where updates run; how wide the window of weights and how large a micro-batch
should be. Variants that fit (variants.py) are ranked by a floor in closed form and simulated while one could still be
faster than the best so far; then windows, slots and updates are varied around the best. The rule's plan is the first of
them, so the choice is never predicted to be slower. Of all decisions only where updates run and the size of a
micro-batch can change a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from trireme.engine.amounts import gib
from trireme.engine.buffers import fits
from trireme.engine.geometry import PART_BYTES, Geometry
from trireme.engine.lanes import LANES
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner import variants
from trireme.engine.planner.predict import FEW, Batch, Prediction, predict, together, unit_seconds
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.reasons import reasons
from trireme.engine.planner.rule import Lean, Wanted, longer_pieces, simple_plan
from trireme.engine.planner.simulate import drive_seconds, lane_seconds
from trireme.engine.planner.variants import LEANS, updated_alike
from trireme.models.config import ModelConfig

WEAR = 1.05  # how many times faster a plan has to be that swaps activations to the SSD, which wears it
HOPEFUL = 0.995  # of the best so far: a plan whose floor is above that is not simulated
REFINED = 4  # of the best plans, around which others are tried
# Units times micro-batches of all simulations together, so that planning takes seconds whatever the model; at least so
# many simulations.
WORK, LEAST = 8000, 3


@dataclass(frozen=True)
class Choice:
    """A plan, its step as predicted `roughly`, and a sentence for each decision, with its numbers."""

    plan: Plan
    found: Prediction
    because: tuple[str, ...]


def choose(
    cfg: ModelConfig,
    limits: Limits,
    rates: Rates,
    wanted: Wanted,
    begun: Plan | None = None,
    leans: Sequence[Lean] = LEANS,
) -> Choice:
    """The fastest of the variants of simple_plan(cfg, limits, wanted). Deterministic. Raises DoesNotFit.

    `begun`: the plan of a run that has begun; where updates run then stays as it is, if that fits. `leans`: fewer of
    them are quicker.
    """
    first = simple_plan(cfg, limits, wanted)
    if first.uses("ssd") and not has_drive(rates):
        raise DoesNotFit(
            f"RAM of {gib(limits.host, 1)} and GPU memory of {gib(limits.gpu, 1)} do not hold everything, and there is "
            "no drive for the rest."
        )
    wanted = replace(wanted, halves=first.halves)
    trials = Trials(Geometry.of(cfg, first), rates, wanted)
    before = trials.simulate(first)
    plans = _candidates(trials.geo, limits, rates, first, wanted, begun, leans)
    if begun and (alike := _as_begun(trials.geo, limits, plans, begun)):
        plans = alike
        trials.found.clear()  # `first` may update units elsewhere
        trials.simulate(plans[0])
    most = max(LEAST, WORK // (trials.geo.n_units * max(FEW, first.n_micro // together(first.n_micro))))
    _by_floors(trials, limits, plans, most)
    _around_the_best(trials, limits, first.piece, most, updates=begun is None)
    best = trials.best()
    because = reasons(trials.geo, first, before, best, trials.found[best])
    if begun and updated_alike(best, begun) != best:
        because += ("updates cannot run where they ran when the run began; roundings may differ from there on",)
    return Choice(best, trials.found[best], because)


def has_drive(rates: Rates) -> bool:
    """Whether there is a drive to read and to write."""
    return bool(rates.ssd_read and rates.ssd_write)


# ---------------------------------------------------------------- the search


@dataclass
class Trials:
    """The plans simulated so far, and what each costs."""

    geo: Geometry
    rates: Rates
    wanted: Wanted
    found: dict[Plan, Prediction] = field(default_factory=dict)

    def simulate(self, plan: Plan) -> Prediction:
        self.found[plan] = predict(self.geo.cfg, plan, self.rates, self._batch(plan), roughly=True)
        return self.found[plan]

    def cost(self, plan: Plan) -> float:
        """Seconds a token of a simulated plan, with a charge for wear."""
        return self._per_token(plan, self.found[plan].step_s)

    def floor(self, plan: Plan) -> float:
        """What a plan costs at least."""
        return self._per_token(plan, max(floors(self.geo, plan, self.rates, self._batch(plan)).values()))

    def best(self) -> Plan:
        return min(self.found, key=self.cost)

    def _batch(self, plan: Plan) -> Batch:
        return Batch(plan.tokens, self.wanted.document, plan.n_micro, self.wanted.trained)

    def _per_token(self, plan: Plan, seconds: float) -> float:
        wear = WEAR if any(unit.names("ssd") for unit in plan.units) else 1.0
        return wear * seconds / (plan.tokens * plan.n_micro)


def _candidates(
    geo: Geometry,
    limits: Limits,
    rates: Rates,
    first: Plan,
    wanted: Wanted,
    begun: Plan | None,
    leans: Sequence[Lean],
) -> list[Plan]:
    """The plans that may be simulated, each once."""
    plans = dict.fromkeys(variants.variants(geo, limits, first, wanted, leans))
    if first.uses("ssd") and not begun:  # a run that has begun has set aside what it needs of the drive
        plans |= dict.fromkeys(variants.through_the_drive(geo, limits, first, wanted))
    return [plan for plan in plans if has_drive(rates) or not plan.uses("ssd")]


def _as_begun(geo: Geometry, limits: Limits, plans: Iterable[Plan], begun: Plan) -> list[Plan]:
    """`begun` and each of `plans` with updates where they are in `begun`, those that fit."""
    alike = [begun, *(updated_alike(plan, begun) for plan in plans)]
    return [plan for plan in alike if plan is not None and fits(geo, plan, limits)]


def _by_floors(trials: Trials, limits: Limits, plans: Sequence[Plan], most: int) -> None:
    """Simulates plans in the order of their floors, while the next could still be faster than the best so far."""
    for floor, i in sorted((trials.floor(plan), i) for i, plan in enumerate(plans))[: most + 1]:
        if floor >= HOPEFUL * trials.cost(trials.best()):
            break
        plan = longer_pieces(trials.geo, plans[i], limits)
        if plan not in trials.found and len(trials.found) <= most:
            trials.simulate(plan)


def _around_the_best(trials: Trials, limits: Limits, piece: int, most: int, updates: bool) -> None:
    """Varies one decision after another of the best plans, each time from the best that the one before has led to."""
    geo = trials.geo
    decisions: list[Callable[[Plan], Iterable[Plan]]] = [
        lambda plan: variants.windows(geo, plan, limits, piece),
        lambda plan: variants.swap_slots(geo, plan, limits, piece),
        variants.late_moments,
    ]
    if updates:
        decisions.append(lambda plan: variants.updates(geo, plan, limits, piece))
    for rank, base in enumerate(sorted(trials.found, key=trials.cost)[:REFINED]):
        best = base
        for decide in decisions:
            for plan in decide(best):
                if plan not in trials.found and (rank == 0 or len(trials.found) < most):
                    trials.simulate(plan)
                if plan in trials.found:
                    best = min(best, plan, key=trials.cost)


# ---------------------------------------------------------------- a floor in closed form


@dataclass
class Traffic:
    """Bytes that each lane moves in forward and in backward, and that drives read and write."""

    forward: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    backward: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    read: int = 0
    written: int = 0


def floors(geo: Geometry, plan: Plan, rates: Rates, batch: Batch) -> dict[str, float]:
    """Seconds that each resource needs at least for a step of this plan, if it were never kept waiting.

    "passes" is the sum of both passes, each as long as the slowest lane in it. What is swapped leaves in forward and
    comes back in backward; updates that wait for the norm all run in forward.
    """
    seconds = unit_seconds(geo.cfg, plan, rates, batch)
    forward = plan.n_micro * sum(s for (kind, _), s in seconds.items() if kind == "forward")
    compute = plan.n_micro * sum(seconds.values())
    moved = Traffic()
    for u in range(geo.n_units):
        _activations(geo, plan, u, moved)
        _weights_and_state(geo, plan, u, moved)
    up, down = lane_seconds(moved.forward, rates), lane_seconds(moved.backward, rates)
    passes = max(forward, *up.values()) + max(compute - forward, down["h2d"], down["d2h"])
    lanes = {lane: up[lane] + down[lane] for lane in up}
    return {"compute": compute, "ssd": drive_seconds(moved.read, moved.written, rates), "passes": passes, **lanes}


def _activations(geo: Geometry, plan: Plan, u: int, moved: Traffic) -> None:
    """Adds unit u's saved tensors and its input, of all micro-batches."""
    unit, n = plan.units[u], plan.n_micro
    saved = n * geo.saved_layout(unit.names("host") + unit.names("ssd"), plan.tokens).span
    x, away = n * geo.x_bytes(plan.tokens) * (u > 0), unit.x != "gpu"
    moved.forward["d2h"] += saved + x * away
    moved.backward["h2d"] += saved + x * away
    if plan.between == "host":  # inputs come back for forward too; gradients leave and come back
        moved.forward["h2d"] += x * away
        moved.backward["d2h"] += x
        moved.backward["h2d"] += x
    swapped = n * geo.saved_layout(unit.names("ssd"), plan.tokens).span + x * (unit.x == "ssd")
    moved.read += swapped + x * (unit.x == "ssd" and plan.between == "host")
    moved.written += swapped


def _weights_and_state(geo: Geometry, plan: Plan, u: int, moved: Traffic) -> None:
    """Adds unit u's weights, gradient and optimizer state."""
    unit, numel = plan.units[u], geo.numel[u]
    weights, state = geo.weights[u].span, geo.state_span(u, plan.record)
    spilled, late = weights * plan.spilled(u), unit.state in plan.late_moments
    moved.forward["h2d"] += weights * (unit.weights != "gpu")
    moved.backward["d2h"] += weights * (unit.state != "gpu")
    if unit.update == "gpu":
        moved.forward["h2d"] += state + weights
        moved.forward["d2h"] += state + weights
    elif unit.state != "gpu":
        updates = moved.backward if plan.mode == "backward" else moved.forward
        updates["cpu"] += numel * PART_BYTES["weights" if late else "all"]
        moved.backward["cpu"] += numel * PART_BYTES["moments"] * late
    on_ssd = state * (unit.state == "ssd") + weights * (unit.weights == "ssd") + spilled
    again = 8 * numel + spilled if unit.state == "ssd" and late else 0  # the moments' own turn, under backward
    moved.read += on_ssd + again
    moved.written += on_ssd

"""Searches for the fastest plan, starting from the plan of a rule (rule.py), and gives the reasons for the choice.

1. Variants of the rule's plan (variants.py) are ranked by a lower bound of their time (`lower_bounds`).
2. They are simulated (predict.py) in this order, as long as a bound is below the best simulated time.
3. Single decisions of the best plans are varied: windows, buffers, swapped tensors, updates.

The rule's plan is among the candidates, so the estimate of the chosen plan is never slower than that of the rule's.
Plans differ in roundings only if they differ in the processor of updates or in the size of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from trireme.engine.amounts import gib
from trireme.engine.buffers import fits, read_by_loss
from trireme.engine.geometry import PART_BYTES, Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan, Shares
from trireme.engine.planner import variants
from trireme.engine.planner.predict import (
    MIN_GROUPS,
    Batch,
    Prediction,
    merge_factor,
    no_collection,
    predict,
    unit_seconds,
)
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.reasons import reasons
from trireme.engine.planner.rule import Cut, Strategy, Wanted, cuts, longer_pieces, simple_plan, sliced
from trireme.engine.planner.simulate import drive_seconds, queue_seconds
from trireme.engine.planner.variants import STRATEGIES, Move, moves, updated_alike
from trireme.engine.queues.names import QUEUES, numbered
from trireme.models.config import ModelConfig
from trireme.models.sizes import costs, narrow

WEAR = 0.5  # a plan's cost includes this share of the seconds of writing activations to the SSD, for the drive's wear
WORTH_SIMULATING = 0.995  # a plan is simulated if its lower bound is below this share of the best time
SLICES = 4  # number of slices of a layer's frozen experts that is tried for a better overlap
REFINED = 4  # number of best plans whose decisions are varied
WITHOUT_A_DRIVE = Strategy(states=1.0), Strategy("host", states=1.0), Strategy("host", states=1.0, updates=0.0)
# WORK: units x simulated micro-batches in all simulations of the variants, twice as many for several GPUs; LEAST:
# simulations at least. Varying the best plans takes as many simulations again.
WORK, LEAST = 8000, 3


@dataclass(frozen=True)
class Choice:
    """A plan, its estimated step (`predict` with `roughly`), and one sentence for each decision."""

    plan: Plan
    found: Prediction
    because: tuple[str, ...]

    @property
    def per_token(self) -> float:
        """Seconds."""
        return self.found.step_s / (self.plan.tokens * self.plan.n_micro)


@dataclass(frozen=True)
class Search:
    """The arguments of `choose`."""

    cfg: ModelConfig
    limits: Limits
    rates: Rates
    wanted: Wanted
    begun: Plan | None
    strategies: Sequence[Strategy]
    refined: int


@no_collection()
def choose(
    cfg: ModelConfig,
    limits: Limits,
    rates: Rates,
    wanted: Wanted,
    begun: Plan | None = None,
    strategies: Sequence[Strategy] = STRATEGIES,
    refined: int = REFINED,
) -> Choice:
    """Returns the plan with the lowest estimated cost. Deterministic. Raises DoesNotFit.

    `begun`: the plan of the run that is continued; updates stay on the processors of that plan if that fits.
    `strategies`, `refined`: fewer make the search shorter.

    Layers are divided among unequal GPUs by speed or by memory, and among equal GPUs with unequal free memory in turn
    or by memory; the faster of the two is returned.
    """
    search = Search(cfg, limits, rates, wanted, begun, strategies, refined)
    if not rates.others and not limits.less:
        return _choose(search)
    found, refused = list[Choice](), list[DoesNotFit]()
    for shares in ways_to_share(cfg, limits, rates, wanted):
        try:
            found.append(_choose(replace(search, wanted=replace(wanted, shares=shares))))
        except DoesNotFit as error:
            refused.append(error)
    if not found:
        raise refused[0]
    best = min(found, key=lambda choice: choice.per_token)
    return replace(best, because=(*best.because, _divided(best.plan, rates)))


def _divided(plan: Plan, rates: Rates) -> str:
    units = Counter(unit.gpu for unit in plan.units)
    listed = ", ".join(f"{units[gpu]} of GPU {gpu}" for gpu in range(plan.gpus))
    of = f"({listed}, of {len(plan.units)} layers)"
    if not rates.others:
        return f"one GPU has less free memory than another {of}"
    return f"GPUs are unequal {of}: roundings depend on which computes what"


def ways_to_share(cfg: ModelConfig, limits: Limits, rates: Rates, wanted: Wanted) -> list[Shares | None]:
    """Ways to divide the blocks among GPUs; None is in turn.

    Unequal GPUs: in proportion to FLOP/s, with the head's work on the fastest GPU, or in proportion to memory.
    Equal GPUs: in turn, or in proportion to memory, with the head on the GPU with the most memory.
    """
    speeds, rooms = ([of(gpu) for gpu in range(wanted.gpus)] for of in (lambda g: rates.of(g).matmul, limits.of))
    fastest = max(range(wanted.gpus), key=lambda gpu: (speeds[gpu], rooms[gpu]))
    by_memory = Shares(tuple(map(float, rooms)), fastest)
    if not rates.others:
        return [None, by_memory]
    tokens = wanted.document
    work = [costs.forward_flops(cfg, u, tokens, tokens * tokens // 2) for u in range(1, cfg.n_units)]
    total, rest = cfg.n_layers * sum(work) / sum(work[:-1]), cfg.n_layers * work[-1] / sum(work[:-1])
    by_speed = [max(1.0, total * speed / sum(speeds) - rest * (gpu == fastest)) for gpu, speed in enumerate(speeds)]
    return [Shares(tuple(by_speed), fastest), by_memory]


def _choose(s: Search) -> Choice:
    wanted, drive = replace(s.wanted, peers=s.wanted.gpus > 1 and s.rates.peer > 0), s.rates.has_drive
    first = first_plan(s.cfg, s.limits, wanted, drive)
    s = replace(s, wanted=wanted, begun=s.begun and s.begun.dealt(wanted.gpus, s.cfg.tied, wanted.peers, wanted.shares))
    if first.uses("ssd") and not drive:
        raise DoesNotFit(
            f"RAM of {gib(s.limits.host, 1)} and GPU memory of {gib(s.limits.gpu, 1)} do not hold everything, and "
            "there is no drive for the rest."
        )
    sliced = None if s.begun else _sliced(s, first, drive)
    if sliced is None:
        return _search(s, first)
    other = _search(s, sliced)
    if first.window == 1:  # slow: the experts of a layer leave no memory to prefetch the next layer
        simulated = Trials(Geometry.of(s.cfg, first), s.rates, wanted).simulate(first)
        if other.per_token < Choice(first, simulated, ()).per_token:
            return other
    found = _search(s, first)
    return other if other.per_token < WORTH_SIMULATING * found.per_token else found


def _sliced(s: Search, first: Plan, drive: bool) -> Plan | None:
    """The rule's plan with frozen experts in slices, if `first` has none and they may overlap better, else None: frozen
    experts are streamed to one GPU, on which whole blocks do not fit.
    """
    streamed = any(unit.base != "gpu" for unit in first.units)
    alone = first.gpus == first.hosts == 1
    if not (first.halves and first.slices == 1 and alone and streamed and narrow.may_be_sliced(s.cfg)):
        return None
    if (cut := sliced(s.cfg, SLICES)) not in cuts(s.cfg, s.wanted):
        return None
    with suppress(DoesNotFit):
        plan = first_plan(s.cfg, s.limits, replace(s.wanted, cuts=(cut,)), drive)
        return plan if drive or not plan.uses("ssd") else None
    return None


def _search(s: Search, first: Plan) -> Choice:
    """`choose` among plans that divide layers into units as `first` does."""
    wanted, limits, begun = replace(s.wanted, cuts=(Cut.of(first),)), s.limits, s.begun
    trials = Trials(Geometry.of(s.cfg, first), s.rates, wanted)
    before, steps = trials.simulate(first), moves(trials.geo, trials.batch(first), s.rates)
    plans = _candidates(trials, s, first, steps)
    if begun:  # and plans with updates on the processors of `begun`
        alike = (begun, *(updated_alike(plan, begun) for plan in plans))
        if fitting := [plan for plan in alike if plan is not None and fits(trials.geo, plan, limits)]:
            plans = fitting
            trials.found.clear()  # `first` may update units elsewhere
            trials.simulate(plans[0])
    groups = max(MIN_GROUPS, first.n_micro // merge_factor(first.n_micro, wanted.gpus))
    most = max(LEAST, min(2, wanted.gpus) * WORK // (trials.geo.n_units * groups))
    _by_lower_bounds(trials, limits, plans, most)
    most *= 2 if wanted.gpus == 1 else 3  # several GPUs have more decisions
    _around_the_best(trials, _decisions(trials, limits, first.piece, steps, begun is None), most, s.refined)
    best = trials.best()
    because = reasons(trials.geo, first, before, best, trials.found[best], wanted.peers)
    if begun and updated_alike(best, begun) != best:
        because += ("updates cannot run where they ran when the run began; roundings may differ from there on",)
    return Choice(best, trials.found[best], because)


def first_plan(cfg: ModelConfig, limits: Limits, wanted: Wanted, drive: bool) -> Plan:
    """The rule's plan. If it needs the SSD and there is no `drive`: a plan without the SSD, which fills the GPU with
    optimizer state before activations, if one fits; otherwise the rule's plan. Raises DoesNotFit.
    """
    first = simple_plan(cfg, limits, wanted)
    if drive or not first.uses("ssd"):
        return first
    others = (simple_plan(cfg, limits, wanted, strategy) for strategy in WITHOUT_A_DRIVE)
    return next((plan for plan in others if not plan.uses("ssd")), first)


# ---------------------------------------------------------------- the search


@dataclass
class Trials:
    """The plans that were simulated, with their estimates."""

    geo: Geometry
    rates: Rates
    wanted: Wanted
    found: dict[Plan, Prediction] = field(default_factory=dict)

    def simulate(self, plan: Plan) -> Prediction:
        self.found[plan] = predict(self.geo.cfg, plan, self.rates, self.batch(plan), roughly=True)
        return self.found[plan]

    def cost(self, plan: Plan) -> float:
        """Estimated seconds per token, plus WEAR."""
        return self._per_token(plan, self.found[plan].step_s)

    def lower_bound(self, plan: Plan) -> float:
        """A lower bound of `cost`."""
        return self._per_token(plan, max(lower_bounds(self.geo, plan, self.rates, self.batch(plan)).values()))

    def best(self) -> Plan:
        return min(self.found, key=self.cost)

    def batch(self, plan: Plan) -> Batch:
        return Batch(plan.tokens, self.wanted.document, plan.n_micro, self.wanted.trained, self.wanted.compared)

    def _per_token(self, plan: Plan, seconds: float) -> float:
        moved = Traffic()
        for u, unit in enumerate(plan.units):
            if unit.x == "ssd" or unit.names("ssd"):  # most plans write no activations: skip the computation
                _activations(self.geo, plan, u, moved)
        wear = WEAR * moved.written / self.rates.ssd_write if moved.written else 0.0
        return (seconds + wear) / (plan.tokens * plan.n_micro)


def _candidates(trials: Trials, s: Search, first: Plan, steps: Sequence[Move]) -> list[Plan]:
    """The variants of `first` that fit. They use the SSD only if there is a drive."""
    geo, wanted, limits, drive = trials.geo, trials.wanted, s.limits, s.rates.has_drive
    plans = dict.fromkeys(variants.variants(geo, limits, first, wanted, steps, s.strategies))
    if first.uses("ssd") and not s.begun and not geo.cfg.lora:  # a running run has allocated its scratch files
        plans |= dict.fromkeys(variants.through_the_drive(geo, limits, first, wanted, steps))
    return [plan for plan in plans if drive or not plan.uses("ssd")]


def _by_lower_bounds(trials: Trials, limits: Limits, plans: Sequence[Plan], most: int) -> None:
    """Simulates at most `most` of `plans` in the order of their lower bounds, as long as one may be the best."""
    for bound, i in sorted((trials.lower_bound(plan), i) for i, plan in enumerate(plans))[: most + 1]:
        if bound >= WORTH_SIMULATING * trials.cost(trials.best()):
            break
        plan = longer_pieces(trials.geo, plans[i], limits)
        if plan not in trials.found and len(trials.found) <= most:
            trials.simulate(plan)


def _decisions(
    trials: Trials, limits: Limits, piece: int, steps: Sequence[Move], updates: bool
) -> list[Callable[[Plan], Iterable[Plan]]]:
    """Functions that vary one decision of a plan, in the order in which they are tried.

    `piece`: the rule's length of gradient pieces; `updates`: updates may move between CPU and GPU.
    """
    geo, wanted = trials.geo, trials.wanted
    short = lambda change: partial(variants.with_short_pieces, geo, limits, piece, change)
    decisions: list[Callable[[Plan], Iterable[Plan]]] = [
        lambda plan: variants.other_swaps(geo, plan, limits, steps),
        short(variants.windows),
        short(lambda plan: variants.swap_slots(geo, plan, limits)),
        variants.late_moments,
        lambda plan: variants.fewer_writes(geo, plan, limits) if wanted.free else (),
    ]
    if wanted.peers:
        decisions.insert(0, short(lambda plan: variants.between(geo, plan)))
    lending = [short(lambda plan: variants.in_peers(geo, plan, limits, steps))] * wanted.lends
    decisions += lending
    sums = any(geo.numel[v] for v in read_by_loss(geo))
    if wanted.gpus > 1 and not trials.rates.others and (wanted.peers or not sums):  # unequal GPUs round differently
        decisions.append(short(lambda plan: variants.divided_losses(geo, plan, limits)))
        decisions += lending  # in the memory that divided losses leave
    if wanted.gpus > 1 and wanted.free:
        states = wanted.gpu_updates and updates
        decisions.append(short(lambda plan: variants.fuller(geo, plan, limits, states)))
    if updates and wanted.on_cuda and wanted.gpu_updates and wanted.mode == "forward":
        decisions.append(short(lambda plan: variants.updates(geo, plan, limits)))
    return decisions


def _around_the_best(
    trials: Trials, decisions: Sequence[Callable[[Plan], Iterable[Plan]]], most: int, refined: int
) -> None:
    """Varies one decision after another of the `refined` best plans, and simulates the results, those of the best plan
    always, those of the others until there are `most` simulations.
    """
    for rank, base in enumerate(sorted(trials.found, key=trials.cost)[:refined]):
        best = base
        for decide in decisions:
            for plan in decide(best):
                if plan not in trials.found and (rank == 0 or len(trials.found) < most):
                    trials.simulate(plan)
                if plan in trials.found:
                    best = min(best, plan, key=trials.cost)


# ---------------------------------------------------------------- a lower bound in closed form


@dataclass
class Traffic:
    """Bytes that each queue moves in forward and in backward, and bytes of the drives in a step."""

    forward: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0.0))
    backward: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0.0))
    read: int = 0
    written: int = 0


def lower_bounds(geo: Geometry, plan: Plan, rates: Rates, batch: Batch) -> dict[str, float]:
    """Lower bounds of a step's time in seconds: for each resource, the time that it needs without waiting.

    "passes" is the sum of forward and backward, each as long as its slowest queue. Activations are swapped out in
    forward and read back in backward; updates that need the gradient norm run in forward. Computation and PCIe
    transfers are assumed to be divided evenly among several GPUs.
    """
    rates = rates.with_moments(plan.adam_bits)
    each = [unit_seconds(geo.cfg, plan, rates.of(gpu), batch) for gpu in range(plan.gpus if rates.others else 1)]
    # By all GPUs, times their number.
    seconds = {key: len(each) / sum(1 / found[key] for found in each) for key in each[0]}
    forward = plan.n_micro * sum(s for (kind, _), s in seconds.items() if kind == "forward") / plan.gpus
    decode = [sum(way) / rates.copy for way in zip(*geo.decode_bytes, strict=True)]  # in forward and in backward
    forward += decode[0]
    compute = plan.n_micro * sum(seconds.values()) / plan.gpus + sum(decode)
    moved = Traffic()
    for u in range(geo.n_units):
        _activations(geo, plan, u, moved)
        _weights_and_state(geo, plan, u, moved)
        _base(geo, plan, u, moved)
    for way, half in product(("h2d", "d2h"), (moved.forward, moved.backward)):
        half.update(dict.fromkeys((numbered(way, gpu) for gpu in range(plan.gpus)), half[way] / plan.gpus))
    up, down = queue_seconds(moved.forward, rates), queue_seconds(moved.backward, rates)
    passes = max(forward, *up.values()) + max(compute - forward, down["h2d"], down["d2h"])
    queues = {queue: up[queue] + down[queue] for queue in up}
    ssd = drive_seconds(moved.read, moved.written, rates)
    copied = plan.gpus * sum(half[way] for half in (moved.forward, moved.backward) for way in ("h2d", "d2h"))
    return {"compute": compute, "ssd": ssd, "dram": copied / rates.dram, "passes": passes, **queues}


def _activations(geo: Geometry, plan: Plan, u: int, moved: Traffic) -> None:
    """Adds the bytes of unit u's saved tensors and input to `moved`."""
    unit, n = plan.units[u], plan.n_micro
    saved = n * geo.saved_layout(u, unit.names("host") + unit.names("ssd"), plan.tokens).span
    x, away = n * geo.x_bytes(plan.tokens) * (u > 0), unit.x != "gpu"
    moved.forward["d2h"] += saved + x * away
    moved.backward["h2d"] += saved + x * away
    hops = away or unit.gpu != plan.units[u - 1].gpu
    if plan.between == "host":  # inputs return in forward too; gradients leave and return
        moved.forward["d2h"] += x * (hops and not away)
        moved.forward["h2d"] += x * hops
        moved.backward["d2h"] += x
        moved.backward["h2d"] += x
    swapped = n * geo.saved_layout(u, unit.names("ssd"), plan.tokens).span + x * (unit.x == "ssd")
    moved.read += swapped + x * (unit.x == "ssd" and plan.between == "host")
    moved.written += swapped


def _base(geo: Geometry, plan: Plan, u: int, moved: Traffic) -> None:
    """Adds the bytes of unit u's frozen weights; those that the previous pass left on the GPU are not copied."""
    tier, nbytes = plan.units[u].base, geo.base_bytes[u]
    first, again = not _stays(geo, plan, u), 0 < u < geo.head - _window(plan)
    moved.forward["h2d"] += nbytes * (tier != "gpu") * first
    moved.backward["h2d"] += nbytes * (tier != "gpu") * again
    moved.read += nbytes * (tier == "ssd") * (first + again)


def _window(plan: Plan) -> int:
    """Number of units whose weights are on the GPUs at once."""
    return plan.buffers * plan.gpus


def _stays(geo: Geometry, plan: Plan, u: int) -> bool:
    """Whether the weights of unit u may still be on the GPU, unchanged, when forward begins."""
    return u <= _window(plan) or u == geo.head


def _weights_and_state(geo: Geometry, plan: Plan, u: int, moved: Traffic) -> None:
    """Adds the bytes of unit u's weights, gradient and optimizer state."""
    unit, numel = plan.units[u], geo.numel[u]
    weights, state = geo.weights[u].span, geo.state_span(u, plan.record)
    spilled = weights * plan.spilled(u)
    late = ("gpu" if unit.update == "gpu" else unit.state) in plan.late_moments and unit.state != "gpu"
    changed_outside = unit.weights != "gpu" and not (unit.update == "gpu" and _stays(geo, plan, u))
    moved.forward["h2d"] += weights * changed_outside
    moved.backward["d2h"] += weights * (unit.state != "gpu")
    if unit.update == "gpu":
        moved.forward["h2d"] += state + weights
        moved.forward["d2h"] += (2 * numel * (geo.dtype == "BF16") if late else state) + weights
        moved.backward["cpu"] += numel * PART_BYTES["moments"] * late
    elif unit.state != "gpu":
        updates = moved.backward if plan.mode == "backward" else moved.forward
        updates["cpu"] += numel * PART_BYTES["weights" if late else "all"]
        moved.backward["cpu"] += numel * PART_BYTES["moments"] * late
    on_ssd = state * (unit.state == "ssd") + weights * (unit.weights == "ssd") + spilled
    again = 8 * numel + spilled if unit.state == "ssd" and late else 0  # moments under backward
    moved.read += on_ssd + again
    moved.written += on_ssd

"""Searches for the fastest plan: one decision after another, each by simulating the step with its alternatives.

The search starts from the rule's plan (rule.py), so what it returns is never estimated to be slower. Everything that it
simulates fits. Plans differ in roundings only if they differ in the processor of updates or in the size of a
micro-batch.

A decision yields alternatives to a plan and knows nothing of their costs: what a mechanism of the engine costs is known
to the simulation, so a new one needs one more decision. It may yield plans that do not fit, which the search leaves
out. None of them iterates over a set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from trireme.engine.amounts import gib
from trireme.engine.buffers import each_usage, fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan, SavedTier, Tier
from trireme.engine.planner import rule, search
from trireme.engine.planner.predict import Prediction, no_collection
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import Cut, Strategy, Wanted
from trireme.engine.planner.search import Decision, Move, Search
from trireme.models.config import ModelConfig
from trireme.models.sizes import narrow

SLICES = 4  # number of slices of a layer's frozen experts that is tried for a better overlap
WITHOUT_A_DRIVE = Strategy(states=1.0), Strategy("ram", states=1.0), Strategy("ram", states=1.0, updates=0.0)
INPUTS: tuple[Tier, ...] = "gpu", "ram"  # tiers of inputs of blocks
PARTS = (1.0, 0.6, 0.3, 0.1, 0.0)  # of the moves that fit in RAM
FINE = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
FINER = (0.8, 0.9, 1.1, 1.2)  # of the moves of the best plan
DRIVE_RAM = 0.85  # share of the RAM that state may take in plans that swap activations through RAM to the SSD
UPDATES = (0.0, 0.15, 0.3, 0.45, 0.6)  # shares of RAM-stored units updated on the GPU
LATE: tuple[tuple[Tier, ...], ...] = ((), ("ram",), ("ram", "ssd"), ("gpu", "ram"), ("gpu", "ram", "ssd"))


@dataclass(frozen=True)
class Choice:
    """A plan and its estimated step (`predict` with `roughly`)."""

    plan: Plan
    step: Prediction
    moved: bool = False  # an update is on another processor than in the run that is resumed

    @property
    def per_token(self) -> float:
        """Seconds."""
        return self.step.step_s / (self.plan.tokens * self.plan.n_micro)


@no_collection()
def choose(cfg: ModelConfig, limits: Limits, rates: Rates, wanted: Wanted, resumed: Plan | None = None) -> Choice:
    """Returns the plan with the lowest estimated cost. Deterministic. Raises DoesNotFit.

    `resumed`: the plan of the run that is resumed; updates stay on the processors of that plan if that fits.
    """
    wanted = replace(wanted, peers=wanted.gpus > 1 and rates.peer > 0)
    first = _first(cfg, limits, wanted, rates)
    choices = []
    for variant in _variants(cfg, limits, wanted, first, resumed):
        with suppress(DoesNotFit):
            plan = first_plan(cfg, limits, variant, rates.has_drive)
            if rates.has_drive or not plan.uses_ssd:
                choices.append(_descend(Search(Geometry.of(cfg, plan), limits, rates, variant, plan, resumed)))
    return min(choices, key=lambda choice: (choice.moved, choice.per_token))


@no_collection()
def nearby(cfg: ModelConfig, limits: Limits, rates: Rates, wanted: Wanted, plan: Plan) -> Plan:
    """A plan for another machine or step, by a quarter of a search's simulations: the best of the rule's, of `plan`
    with more in RAM, and of those with inputs and state elsewhere. `choose` may find a faster one. Raises DoesNotFit.
    """
    wanted = replace(wanted, peers=wanted.gpus > 1 and rates.peer > 0, cuts=(Cut.of(plan),))
    first = _first(cfg, limits, wanted, rates)
    s = Search(Geometry.of(cfg, first), limits, rates, wanted, first)
    late = plan.late_moments if wanted.adam_bits == 32 else ()
    same = replace(plan, n_micro=first.n_micro, adam_bits=first.adam_bits, late_moments=late, host=first.host)
    for start in (first, rule.fill_ram(s.geo, same, limits) if s.fits(same) else first):
        s.simulate(rule.longer_pieces(s.geo, start, limits))
    s.decide(partial(placements, parts=(1.0,)))
    return s.best


def _variants(cfg: ModelConfig, limits: Limits, wanted: Wanted, first: Plan, resumed: Plan | None) -> Iterator[Wanted]:
    """What is decided before all else, each way with a search of its own: a layer's frozen experts whole or in slices,
    or as in the run that is resumed; layers dealt to GPUs in turn or in proportion to their free memory.
    """
    streamed = any(unit.base != "gpu" for unit in first.units) and first.gpus == first.hosts == 1
    sliceable = first.halves and first.slices == 1 and streamed and narrow.may_be_sliced(cfg)
    alternatives, tried = [rule.sliced(cfg, SLICES)] if sliceable else [], rule.cuts(cfg, wanted)
    alternatives += [Cut.of(resumed)] if resumed else []
    divisions = dict.fromkeys([Cut.of(first), *(cut for cut in alternatives if cut in tried)])
    rooms = tuple(float(limits.gpu_bytes(gpu)) for gpu in range(wanted.gpus))
    for cut, share in product(divisions, ((), rooms) if limits.less else ((),)):
        yield replace(wanted, cuts=(cut,), shares=share)


def first_plan(cfg: ModelConfig, limits: Limits, wanted: Wanted, drive: bool) -> Plan:
    """The rule's plan. If it needs the SSD and there is no `drive`: a plan without the SSD, which fills the GPU with
    optimizer state before activations, if one fits; otherwise the rule's plan. Raises DoesNotFit.
    """
    first = rule.simple_plan(cfg, limits, wanted)
    if drive or not first.uses_ssd:
        return first
    without_drive = (rule.simple_plan(cfg, limits, wanted, strategy) for strategy in WITHOUT_A_DRIVE)
    return next((plan for plan in without_drive if not plan.uses_ssd), first)


def _first(cfg: ModelConfig, limits: Limits, wanted: Wanted, rates: Rates) -> Plan:
    """`first_plan` on this machine. Raises DoesNotFit."""
    first = first_plan(cfg, limits, wanted, rates.has_drive)
    if first.uses_ssd and not rates.has_drive:
        raise DoesNotFit(f"RAM of {gib(limits.ram, 1)} is too small, and there is no drive.")
    return first


def _descend(s: Search) -> Choice:
    starts: list[Plan | None] = [s.first, replace(s.first, late_moments=LATE[-1] if s.first.late_moments else ())]
    if s.resumed is not None:
        s.resumed = s.resumed.on_gpus(s.wanted.gpus, s.geo.cfg.tied, s.wanted.peers, s.wanted.shares)
        starts = [search.updated_as(s.first, s.resumed), s.resumed if Cut.of(s.resumed) == Cut.of(s.first) else None]
    usable = [plan for plan in starts if plan is not None and s.fits(plan)]
    for start in usable or [s.first]:
        s.simulate(start)
    for decision in DECISIONS:
        s.decide(decision)
    return Choice(s.best, s.steps[s.best], moved=not usable)


# ---------------------------------------------------------------- decisions


def sizes(s: Search, plan: Plan) -> Iterable[Plan]:
    """Micro-batches of other sizes; inputs of blocks on the GPU or in RAM; state on the GPU before activations or
    not.
    """
    states = (0.0,) if s.geo.cfg.lora else (0.0, 1.0)
    for size, x, state in product(s.sizes(plan.tokens), INPUTS, states):
        yield from s.rule(Strategy(x, state), size)


def placements(s: Search, plan: Plan, parts: Sequence[float] = (1.0, 0.5)) -> Iterable[Plan]:
    """Inputs and state as in `sizes`, each with `parts` of the saved tensors that fit in RAM there."""
    streams = any(unit.update == "gpu" for unit in plan.units)
    for x, state in product(INPUTS, (0.0, 1.0)) if s.geo.cfg.lora is None else ():
        for variant in s.rule(Strategy(x, state, updates=rule.GPU_UPDATES * streams), (plan.tokens, plan.n_micro)):
            yield from swapped(s, replace(variant, late_moments=plan.late_moments, piece=plan.piece), parts)


def late(s: Search, plan: Plan) -> Iterable[Plan]:
    """Other tiers whose moments are written during backward, apart from the weights."""
    tiers: set[Tier] = {unit.state for unit in plan.units if unit.update == "cpu"} - {"gpu"}
    tiers |= {"gpu"} if any(unit.update == "gpu" for unit in plan.units) else set()
    tried = {frozenset(tiers.intersection(plan.late_moments))}
    for moments in LATE if plan.mode == "forward" and plan.adam_bits == 32 and s.wanted.on_cuda else ():
        if (late_tiers := frozenset(tiers.intersection(moments))) not in tried:
            tried.add(late_tiers)
            yield replace(plan, late_moments=moments)


def accumulated(s: Search, plan: Plan) -> Iterable[Plan]:
    """Micro-batches one after the other, so that more of what one saves fits."""
    for low in rule.one_by_one(s.geo, s.limits, s.wanted, plan):
        yield from swapped(s, low, FINE)


def _swappable(s: Search, plan: Plan, limits: Limits | None = None) -> tuple[Plan, Sequence[Move], int]:
    """(`plan` that saves nothing, its moves, how many of them fit in RAM)."""
    plain, steps = plan.changed(range(s.geo.n_units), saved=()), s.moves(plan)
    good = lambda n: fits(s.geo, search.with_moves(s.geo, plain, steps, {"ram": n}), limits or s.limits)
    return plain, steps, rule.largest(search.count_moves(s.geo, steps), good)


def swapped(s: Search, plan: Plan, parts: Sequence[float] = PARTS) -> Iterable[Plan]:
    """Saved tensors in RAM instead of recomputed, as many as fit and fewer, and more of them on the GPU."""
    plain, steps, room = _swappable(s, plan)
    for n in dict.fromkeys(round(part * room) for part in parts):
        yield search.with_most_on_gpu(s.geo, plain, s.limits, steps, {"ram": n})


def finer(s: Search, plan: Plan) -> Iterable[Plan]:
    """A few more or fewer of them."""
    if not any(unit.names("ram") for unit in plan.units) or any(unit.names("ssd") for unit in plan.units):
        return
    plain, steps, room = _swappable(s, plan)
    moved = [move for unit, kind in zip(plan.units, s.geo.kinds, strict=True)
             for move in steps if move.kind == kind and set(move.names) <= set(unit.names("ram"))]  # fmt: skip
    for n in dict.fromkeys(min(room, round(part * len(moved))) for part in FINER):
        yield search.with_most_on_gpu(s.geo, plain, s.limits, steps, {"ram": n})


def driven(s: Search, plan: Plan) -> Iterable[Plan]:
    """More saved tensors than RAM holds, the rest on the SSD, with less state in RAM (Fuyou, section 4.4): of use only
    if recomputation takes the time.
    """
    bound = s.steps[s.best].bound
    if bound != "compute" or not plan.uses_ssd or s.resumed or s.geo.cfg.lora:  # a run has its scratch files
        return
    less = replace(s.limits, ram=int(DRIVE_RAM * s.limits.ram))
    for size, strategy in product(s.sizes(plan.tokens), (Strategy("ram", 0.0, updates=0.0), Strategy("ram"))):
        for low in s.rule(strategy, size, less):
            plain, steps, room = _swappable(s, low, less)
            n = 0
            for move in steps:
                n += s.geo.kinds.count(move.kind)
                for in_ram in dict.fromkeys((room, 0)) if n > room else ():
                    counts: dict[SavedTier, int] = {"ram": in_ram, "ssd": n - in_ram}
                    full = search.with_most_on_gpu(s.geo, plain, less, steps, counts)
                    yield rule.fill_ram(s.geo, full, s.limits) if s.wanted.free else full


def base(s: Search, plan: Plan) -> Iterable[Plan]:
    """RAM first for the frozen weights of adapters, or first for activations."""
    for x in INPUTS if s.geo.cfg.lora else ():
        for variant in s.rule(Strategy(x), (plan.tokens, plan.n_micro)):
            in_ram = [u for u, unit in enumerate(variant.units) if unit.base == "ram" and s.geo.base_bytes[u]]
            moves_base = s.wanted.free and s.rates.has_drive and in_ram
            for low in (variant, variant.changed(in_ram, base="ssd")) if moves_base else (variant,):
                for full in (low, *swapped(s, low)):
                    yield rule.fill_ram(s.geo, full, s.limits) if s.wanted.free else full


def share(s: Search, plan: Plan) -> Iterable[Plan]:
    """Other shares of units that are updated on the GPU. If it has no room to stream their state through, swapped
    tensors are recomputed, or one unit's state is moved to RAM.
    """
    if s.resumed or not (s.wanted.on_cuda and s.wanted.gpu_updates and plan.mode == "forward"):
        return
    swapping = [u for u, unit in enumerate(plan.units) if unit.names("ram")]
    on_gpu = [u for u, unit in enumerate(plan.units) if unit.state == "gpu"]
    rooms = plan, plan.changed(swapping, saved=()), plan.changed(on_gpu[-1:], weights="ram", state="ram")
    for part in UPDATES:
        tried = ((room, rule.share_updates(s.geo, room, s.limits, part)) for room in rooms)
        yield next((shared for room, shared in tried if shared != room), plan)


def lent(s: Search, plan: Plan) -> Iterable[Plan]:
    """Saved tensors of the other GPUs' units in the memory of the GPU with the most of it free (MPress, section 3)."""
    if not s.wanted.peers:
        return
    taken = each_usage(s.geo, plan)[0]
    peer = max(range(plan.gpus), key=lambda gpu: s.limits.gpu_bytes(gpu) - taken[gpu])
    units = [u for u, unit in enumerate(plan.units) if unit.gpu != peer and 0 < u < s.geo.head]
    plain, steps = plan.changed(units, saved=(), peer=peer), s.moves(plan)
    moved = lambda n: search.with_moves(s.geo, plain, steps, {"peer": n}, only=units)
    yield moved(rule.largest(search.count_moves(s.geo, steps), lambda n: fits(s.geo, moved(n), s.limits)))


def fuller(s: Search, plan: Plan) -> Iterable[Plan]:
    """Each of several GPUs filled with frozen weights, or with state, of its units: the rule stops at the first full
    one.
    """
    if plan.gpus == 1 or not s.wanted.free:
        return
    for kind, to in (("base", {"base": "gpu"}), ("state", {"weights": "gpu", "state": "gpu", "update": "cpu"})):
        full = plan
        for gpu in range(plan.gpus) if kind == "base" or (s.wanted.gpu_updates and not s.resumed) else ():
            left = [u for u, unit in enumerate(plan.units) if unit.gpu == gpu and vars(unit)[kind] != "gpu"]
            full = rule.of_first(s.geo, full, s.limits, left, **to)
        yield full


DECISIONS: tuple[Decision, ...] = (
    sizes, placements, late, swapped, driven, base, lent, fuller, share, late, finer, accumulated, finer,
)  # fmt: skip

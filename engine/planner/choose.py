"""The fastest plan that a short search around the plain rule finds, and why.

The rule (rule.py) fills the GPU, then RAM, then the SSD, and recomputes what it does not keep. What it cannot weigh is
time: whether activations should rather travel to RAM or the SSD and back than be computed again, whether GPU memory
serves better as a home of states, of weights, of inputs or of what blocks save, where updates run, how wide the window
of weights and how large a micro-batch should be. Here variants that fit are made without a look at the rates, ranked by
a floor in closed form, and simulated for as long as one could still be faster than the best so far; then the window of
weights, the slots that activations travel through, and when and where updates run are varied around the best. The
rule's plan is the first of them, so the choice is never predicted to be slower. Of all that a plan decides, only where
updates run and the size of a micro-batch can change a rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from trireme.engine.buffers import fits
from trireme.engine.geometry import PART_BYTES, Geometry
from trireme.engine.plan import DoesNotFit, Plan
from trireme.engine.planner.predict import FEW, Batch, Prediction, predict, together, unit_seconds
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.reasons import reasons
from trireme.engine.planner.rule import Lean, fill_ram, largest, longer_pieces, share_updates, simple_plan, spread
from trireme.engine.planner.simulate import drive_seconds, lane_seconds
from trireme.models import shapes
from trireme.models.config import ModelConfig

MICRO_BATCHES = 2  # sizes tried, from the rule's down
SHARES = (1.0, 0.5, 0.2)  # of the blocks whose activations there is room for outside the GPU
DRIVE_LEAN, DRIVE_RAM = Lean("host", 0.0, updates=0.0), 0.85  # where the SSD takes them; RAM has slots on their way
LEANS = (
    *(Lean(x, states) for states in (None, 1.0, 0.0) for x in ("gpu", "host")),
    *(Lean(x, states, updates=0.0) for states in (1.0, 0.0) for x in ("gpu", "host")),
    *(Lean(x, resident=True, updates=0.0) for x in ("gpu", "host")),
)
UPDATES = (0.0, 0.15, 0.3, 0.45, 0.6)  # shares of the units at home in RAM that are updated on the GPU
WINDOWS = (2, 3, 4)
SLOTS = (2, 3, 4)  # that activations on their way pass through: bursts of them are waited for less where there are more
LATE = ((), ("host",), ("host", "ssd"))  # tiers whose moments are written under backward
WEAR = 1.05  # how many times faster a plan has to be that sends activations to the SSD, which wears it
WORTH = 0.995  # of the best so far: what cannot fall below it is not simulated
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
    limits: dict[str, int],
    rates: Rates,
    seq_len: int,
    like: Plan | None = None,
    leans: Sequence[Lean] = LEANS,
    trained: float = 1.0,
    **rule,
) -> Choice:
    """The fastest of the variants of simple_plan(cfg, limits, **rule). Deterministic. Raises DoesNotFit.

    `seq_len`: tokens of a usual document. `like`: the plan of a run that has begun. Where updates run then stays as it
    is, if that fits. `leans`: fewer of them are quicker. `trained`: share of the tokens whose label counts.
    """
    first, drive = simple_plan(cfg, limits, **rule), rates.ssd_read and rates.ssd_write
    if first.uses("ssd") and not drive:
        raise DoesNotFit(
            f"RAM of {limits['host'] / 2**30:.1f} GiB and GPU memory of {limits['gpu'] / 2**30:.1f} GiB do not hold "
            "everything, and there is no drive for the rest."
        )
    geo, rule = Geometry.of(cfg, first), rule | {"halves": first.halves}
    batch = lambda plan: Batch(plan.tokens, seq_len, plan.n_micro, trained)
    simulate = lambda plan: predict(cfg, plan, rates, batch(plan), roughly=True)
    before = simulate(first)
    plans = dict.fromkeys(_variants(geo, limits, first, rule, seq_len, leans))
    if first.uses("ssd") and not like:  # a run that has begun has set aside what it needs of the drive
        plans |= dict.fromkeys(_through_the_drive(geo, limits, first, rule, seq_len))
    plans, simulated = [plan for plan in plans if drive or not plan.uses("ssd")], {first: before}
    if like and (alike := [p for p in (like, *(pinned(p, like) for p in plans)) if p and fits(geo, p, limits)]):
        plans, simulated = alike, {alike[0]: simulate(alike[0])}
    wear = lambda plan: WEAR if any(unit.names("ssd") for unit in plan.units) else 1.0
    per_token = lambda plan, seconds: wear(plan) * seconds / (plan.tokens * plan.n_micro)
    floor = lambda plan: per_token(plan, max(floors(geo, plan, rates, seq_len, trained).values()))
    taken = lambda plan: per_token(plan, simulated[plan].step_s)
    most = max(LEAST, WORK // (geo.n_units * max(FEW, first.n_micro // together(first.n_micro))))
    # By their floors, for as long as the next could still be faster than the best so far.
    for least, i in sorted((floor(plan), i) for i, plan in enumerate(plans))[: most + 1]:
        if least >= WORTH * min(map(taken, simulated)):
            break
        if (plan := longer_pieces(geo, plans[i], limits)) not in simulated and len(simulated) <= most:
            simulated[plan] = simulate(plan)
    # Around the best of them: one decision after another, each from the best that the one before has led to.
    for rank, base in enumerate(sorted(simulated, key=taken)[:REFINED]):
        for vary in (_windows, _slots, _late, *(() if like else (_updates,))):
            for plan in vary(geo, base, limits, first.piece):
                if plan not in simulated and (rank == 0 or len(simulated) < most):
                    simulated[plan] = simulate(plan)
                base = min((p for p in (base, plan) if p in simulated), key=taken)
    best = min(simulated, key=taken)
    because = reasons(geo, first, before, best, simulated[best])
    if like and pinned(best, like) != best:
        because += ("updates cannot run where they ran when the run began; roundings may differ from there on",)
    return Choice(best, simulated[best], because)


def _variants(
    geo: Geometry, limits: dict[str, int], first: Plan, rule: dict, seq_len: int, leans: Sequence[Lean]
) -> Iterable[Plan]:
    """Plans that fit, the rule's first: its micro-batch and others, each way to lean, activations in RAM."""
    for size in _sizes(first, rule):
        for lean in leans:
            try:
                plan = simple_plan(geo.cfg, limits, **{**rule, "batch_tokens": [size]}, lean=lean)
            except DoesNotFit:
                continue
            yield plan
            yield from _swapping(geo, plan, limits, seq_len)


def _sizes(first: Plan, rule: dict) -> list[tuple[int, int]]:
    """The micro-batches that are tried: the rule's, smaller ones, and a larger one, for which fewer slots may do."""
    sizes = rule["batch_tokens"]
    at = next(i for i, (tokens, _) in enumerate(sizes) if tokens <= first.tokens)
    return sizes[max(0, at - 1) : at + MICRO_BATCHES]


# ---------------------------------------------------------------- plans around a plan

# What needs room takes it from pieces of gradients that are longer than `piece`, which then grow again.


def _windows(geo: Geometry, plan: Plan, limits: dict[str, int], piece: int) -> Iterable[Plan]:
    """Other windows of weights."""
    for window in WINDOWS:
        wider = replace(plan, window=window, piece=min(plan.piece, piece))
        if window != plan.window and fits(geo, wider, limits):
            yield longer_pieces(geo, wider, limits)


def _slots(geo: Geometry, plan: Plan, limits: dict[str, int], piece: int) -> Iterable[Plan]:
    """Other numbers of slots for activations that travel; where need be with fewer blocks kept on the GPU."""
    away = any(unit.x != "gpu" or unit.names("host") or unit.names("ssd") for unit in plan.units)
    kept = [u for u, unit in enumerate(plan.units) if unit.names("gpu")]
    for slots in SLOTS if away or plan.between == "host" else ():
        deeper = replace(plan, swap_slots=slots, piece=min(plan.piece, piece))
        some = lambda k, deeper=deeper: deeper.changed(kept[: len(kept) - k], saved=())
        deeper = some(largest(len(kept), lambda k: fits(geo, some(k), limits)))  # noqa: B023
        if slots != plan.swap_slots and fits(geo, deeper, limits):
            yield longer_pieces(geo, deeper, limits)


def _late(geo: Geometry, plan: Plan, limits: dict[str, int], piece: int) -> Iterable[Plan]:
    """Moments written under backward, or not."""
    tiers = {unit.state for unit in plan.units if unit.update == "cpu"}
    tried = [tiers.intersection(plan.late_moments)]
    for late in LATE if plan.mode == "forward" and plan.adam_bits == 32 else ():
        if tiers.intersection(late) not in tried:
            tried.append(tiers.intersection(late))
            yield replace(plan, late_moments=late)


def _updates(geo: Geometry, plan: Plan, limits: dict[str, int], piece: int) -> Iterable[Plan]:
    """Other shares of the updates on the GPU."""
    if any(unit.update == "gpu" for unit in plan.units):
        short = replace(plan, piece=min(plan.piece, piece))
        for other in dict.fromkeys(share_updates(geo, short, limits, share) for share in UPDATES):
            yield longer_pieces(geo, other, limits)


def pinned(plan: Plan, like: Plan) -> Plan | None:
    """`plan` with every unit updated by the processor that updates it in `like`; None where its homes forbid that."""
    units = []
    for unit, other in zip(plan.units, like.units, strict=True):
        on_gpu = other.state == "gpu" or other.update == "gpu"
        streamed = on_gpu and unit.state != "gpu"
        if unit.state == "gpu" and not on_gpu:
            return None
        if streamed and ((unit.weights, unit.state) != ("host", "host") or plan.mode == "backward"):
            return None
        units.append(replace(unit, update="gpu" if streamed else "cpu", resident=unit.resident and not streamed))
    return replace(plan, units=tuple(units))


# ---------------------------------------------------------------- activations


def front(cfg: ModelConfig, seq_len: int) -> list[tuple[str, ...]]:
    """Sets of a block's saved tensors that no other set beats in both bytes and recomputation, thinned to two."""
    pairs, kinds = shapes.attended_pairs([seq_len], cfg.window), shapes.inner_kinds(cfg)
    nbytes = {name: size for kind in kinds for name, size in shapes.saved_bytes(cfg, seq_len, 2, kind).items()}
    rebuilt = lambda names: sum(shapes.recompute_flops(cfg, frozenset(names), seq_len, pairs, kind) for kind in kinds)
    found = []
    for size in range(1, len(nbytes) + 1):
        for names in combinations(nbytes, size):
            found.append((sum(nbytes[n] for n in names), rebuilt(names), names))
    kept, least = [], rebuilt(())
    for _, again, names in sorted(found):
        if again < least:
            kept.append(names)
            least = again
    return [kept[len(kept) // 2], kept[-1]] if len(kept) > 2 else kept


def _swapping(geo: Geometry, plan: Plan, limits: dict[str, int], seq_len: int, tier: str = "host") -> Iterable[Plan]:
    """Variants that send saved tensors of some blocks to `tier`; as many of the last as fit stay on the GPU."""
    n = geo.cfg.n_layers
    plain = plan.changed(range(geo.n_units), saved=())
    for names in front(geo.cfg, seq_len):
        with_ = lambda k, j, names=names: swapped(geo, plain, names, k, j, tier)
        room = largest(n, lambda k: fits(geo, with_(k, 0), limits))  # noqa: B023
        for k in dict.fromkeys(int(room * share) for share in SHARES):
            if k:
                yield with_(k, largest(n, lambda j: fits(geo, with_(k, j), limits)))  # noqa: B023


def _through_the_drive(geo: Geometry, limits: dict[str, int], first: Plan, rule: dict, seq_len: int) -> Iterable[Plan]:
    """Variants that send saved tensors of some blocks to the SSD (Fuyou, section 4.4): worth it where it is fast."""
    less = limits | {"host": int(DRIVE_RAM * limits["host"])}
    for size in _sizes(first, rule):
        try:
            plan = simple_plan(geo.cfg, less, **{**rule, "batch_tokens": [size]}, lean=DRIVE_LEAN)
        except DoesNotFit:
            continue
        for swapping in _swapping(geo, plan, limits, seq_len, "ssd"):
            yield fill_ram(geo, swapping, limits) if rule.get("homes", "auto") == "auto" else swapping


def swapped(geo: Geometry, plan: Plan, names: Sequence[str], k: int, keep: int, tier: str = "host") -> Plan:
    """`plan` with `names` of k evenly spread blocks in `tier`, everything of the last `keep` blocks on the GPU."""
    n = geo.cfg.n_layers
    away = spread(max(n - keep, 0), min(k, n - keep))
    for kind in shapes.inner_kinds(geo.cfg):
        layers = [(u, shapes.layer(geo.cfg, u)) for u in range(1, geo.head) if geo.kinds[u] == kind]
        everything, some = geo.saved_names(kind), [name for name in geo.saved_names(kind) if name in names]
        plan = plan.changed({u for u, i in layers if i >= n - keep}, saved=tuple((name, "gpu") for name in everything))
        plan = plan.changed({u for u, i in layers if i in away}, saved=tuple((name, tier) for name in some))
    return plan


# ---------------------------------------------------------------- a floor in closed form


def floors(geo: Geometry, plan: Plan, rates: Rates, seq_len: int, trained: float = 1.0) -> dict[str, float]:
    """Seconds that each resource needs at least for a step of this plan, if it were never kept waiting.

    `halves`: each half of a step waits for the slowest of its own. What is swapped leaves in forward and comes back in
    backward; where updates wait for the norm, all of them run in forward.
    """
    seconds = unit_seconds(geo.cfg, plan, rates, Batch(plan.tokens, seq_len, plan.n_micro, trained))
    forward = plan.n_micro * sum(s for (kind, _), s in seconds.items() if kind == "forward")
    compute = plan.n_micro * sum(seconds.values())
    up, down = Counter(), Counter()  # bytes of each lane in forward and in backward
    updates, read, written = down if plan.mode == "backward" else up, 0, 0
    for u, unit in enumerate(plan.units):
        weights, state = geo.weights[u].span, geo.state_span(u, plan.record)
        saved = plan.n_micro * geo.saved_layout(unit.names("host") + unit.names("ssd"), plan.tokens).span
        x, away = plan.n_micro * geo.x_bytes(plan.tokens) * (u > 0), unit.x != "gpu"
        up["d2h"] += saved + x * away
        down["h2d"] += saved + x * away
        if plan.between == "host":  # inputs come back for forward too; gradients leave and come back
            up["h2d"] += x * away
            down["d2h"] += x
            down["h2d"] += x
        up["h2d"] += weights * (unit.weights != "gpu")
        down["d2h"] += weights * (unit.state != "gpu")
        late = unit.state in plan.late_moments
        if unit.update == "gpu":
            up["h2d"] += state + weights
            up["d2h"] += state + weights
        elif unit.state != "gpu":
            updates["cpu"] += geo.numel[u] * PART_BYTES["weights" if late else "all"]
            down["cpu"] += geo.numel[u] * PART_BYTES["moments"] * late
        moved = (state if unit.state == "ssd" else 0) + (weights if unit.weights == "ssd" else 0)
        scratch = plan.n_micro * geo.saved_layout(unit.names("ssd"), plan.tokens).span + x * (unit.x == "ssd")
        scratch += weights * plan.spilled(u)
        again = 8 * geo.numel[u] + weights * plan.spilled(u) if unit.state == "ssd" and late else 0  # under backward
        read += moved + again + scratch + x * (unit.x == "ssd" and plan.between == "host")
        written += moved + scratch
    first, second = lane_seconds(up, rates), lane_seconds(down, rates)
    halves = max(forward, *first.values()) + max(compute - forward, second["h2d"], second["d2h"])
    lanes = {lane: first[lane] + second[lane] for lane in first}
    return {"compute": compute, "ssd": drive_seconds(read, written, rates), "halves": halves, **lanes}

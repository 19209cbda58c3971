"""Variants of a plan: other micro-batches, placements, swapped activations, windows, buffers, updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan, Tier
from trireme.engine.planner.rule import (
    Lean,
    Wanted,
    fill_ram,
    furthest,
    largest,
    longer_pieces,
    share_updates,
    simple_plan,
    spread,
)
from trireme.models.config import ModelConfig
from trireme.models.sizes import costs, shapes

MICRO_BATCHES = 2  # sizes tried, from the rule's down
SHARES = (1.0, 0.5, 0.2)  # of the blocks with room outside the GPU
DRIVE_LEAN, DRIVE_RAM = Lean("host", 0.0, updates=0.0), 0.85  # with activations on the SSD; their ring is in RAM
LEANS = (
    *(Lean(x, states) for states in (None, 1.0, 0.0) for x in ("gpu", "host")),
    *(Lean(x, states, updates=0.0) for states in (1.0, 0.0) for x in ("gpu", "host")),
    *(Lean(x, resident=True, updates=0.0) for x in ("gpu", "host")),
)
BASE_RAM = (1.0, 0.7, 0.4, 0.0)  # shares of the frozen units in RAM that activations leave there
UPDATES = (0.0, 0.15, 0.3, 0.45, 0.6)  # shares of RAM-home units updated on the GPU
WINDOWS = (2, 3, 4)
SLOTS = (2, 3, 4)  # of swap rings; more absorb bursts
LATE: tuple[tuple[Tier, ...], ...] = ((), ("host",), ("host", "ssd"))  # late moments


def variants(
    geo: Geometry, limits: Limits, first: Plan, wanted: Wanted, leans: Sequence[Lean] = LEANS
) -> Iterable[Plan]:
    """Plans that fit: micro-batches, leans, saved tensors recomputed or in RAM."""
    if geo.cfg.lora:
        yield from _beside_a_base(geo, limits, first, wanted)
        return
    for size in sizes(first, wanted):
        for lean in leans:
            try:
                plan = simple_plan(geo.cfg, limits, replace(wanted, sizes=(size,)), lean)
            except DoesNotFit:
                continue
            yield plan
            yield from swaps(geo, plan, limits, wanted.document)


def _beside_a_base(geo: Geometry, limits: Limits, first: Plan, wanted: Wanted) -> Iterable[Plan]:
    """As variants, of adapters: RAM is shared between their base and activations."""
    inputs: tuple[Tier, ...] = ("gpu", "host")
    for size, x, share in product(sizes(first, wanted), inputs, BASE_RAM):
        try:
            plan = simple_plan(geo.cfg, limits, replace(wanted, sizes=(size,)), Lean(x))
        except DoesNotFit:
            continue
        in_ram = [u for u, unit in enumerate(plan.units) if unit.base == "host"]
        kept = {in_ram[i] for i in spread(len(in_ram), int(share * len(in_ram)))}
        low = plan.changed(set(in_ram) - kept, base="ssd") if wanted.free else plan
        for variant in (low, *swaps(geo, low, limits, wanted.document)):
            yield fill_ram(geo, variant, limits) if wanted.free else variant


def through_the_drive(geo: Geometry, limits: Limits, first: Plan, wanted: Wanted) -> Iterable[Plan]:
    """Plans with saved tensors of some blocks on the SSD (Fuyou, section 4.4)."""
    less = replace(limits, host=int(DRIVE_RAM * limits.host))
    for size in sizes(first, wanted):
        try:
            plan = simple_plan(geo.cfg, less, replace(wanted, sizes=(size,)), DRIVE_LEAN)
        except DoesNotFit:
            continue
        for swapping in swaps(geo, plan, limits, wanted.document, "ssd"):
            yield fill_ram(geo, swapping, limits) if wanted.free else swapping


def sizes(first: Plan, wanted: Wanted) -> tuple[tuple[int, int], ...]:
    """The rule's, smaller ones, and a larger one: fewer slots may make it fit."""
    at = next(i for i, (tokens, _) in enumerate(wanted.sizes) if tokens <= first.tokens)
    return wanted.sizes[max(0, at - 1) : at + MICRO_BATCHES]


# ---------------------------------------------------------------- one decision changed

# Gradient pieces longer than `piece` give way, then grow into the room left.


def windows(geo: Geometry, plan: Plan, limits: Limits, piece: int) -> Iterable[Plan]:
    for window in WINDOWS:
        wider = replace(plan, window=window, piece=min(plan.piece, piece))
        if window != plan.window and fits(geo, wider, limits):
            yield longer_pieces(geo, wider, limits)


def swap_slots(geo: Geometry, plan: Plan, limits: Limits, piece: int) -> Iterable[Plan]:
    """Other numbers of slots, with fewer blocks kept on the GPU if need be."""
    away = any(unit.x != "gpu" or unit.names("host") or unit.names("ssd") for unit in plan.units)
    if not away and plan.between != "host":
        return
    kept = [u for u, unit in enumerate(plan.units) if unit.names("gpu")]
    for slots in SLOTS:
        if slots == plan.swap_slots:
            continue
        deeper = _with_slots(geo, plan, limits, slots, min(plan.piece, piece), kept)
        if fits(geo, deeper, limits):
            yield longer_pieces(geo, deeper, limits)


def _with_slots(geo: Geometry, plan: Plan, limits: Limits, slots: int, piece: int, kept: Sequence[int]) -> Plan:
    deeper = replace(plan, swap_slots=slots, piece=piece)
    return furthest(geo, limits, len(kept), lambda k: deeper.changed(kept[: len(kept) - k], saved=()))


def late_moments(plan: Plan) -> Iterable[Plan]:
    tiers = {unit.state for unit in plan.units if unit.update == "cpu"}
    tried = [tiers.intersection(plan.late_moments)]
    for late in LATE if plan.mode == "forward" and plan.adam_bits == 32 else ():
        if tiers.intersection(late) not in tried:
            tried.append(tiers.intersection(late))
            yield replace(plan, late_moments=late)


def updates(geo: Geometry, plan: Plan, limits: Limits, piece: int) -> Iterable[Plan]:
    if any(unit.update == "gpu" for unit in plan.units):
        short = replace(plan, piece=min(plan.piece, piece))
        for other in dict.fromkeys(share_updates(geo, short, limits, share) for share in UPDATES):
            yield longer_pieces(geo, other, limits)


def updated_alike(plan: Plan, begun: Plan) -> Plan | None:
    """`plan` with updates on the processors of `begun`; None if its homes forbid that."""
    units = []
    for unit, other in zip(plan.units, begun.units, strict=True):
        on_gpu = other.state == "gpu" or other.update == "gpu"
        streamed = on_gpu and unit.state != "gpu"
        if unit.state == "gpu" and not on_gpu:
            return None
        if streamed and ((unit.weights, unit.state) != ("host", "host") or plan.mode == "backward"):
            return None
        units.append(replace(unit, update="gpu" if streamed else "cpu", resident=unit.resident and not streamed))
    return replace(plan, units=tuple(units))


# ---------------------------------------------------------------- activations


def front(cfg: ModelConfig, document: int) -> list[tuple[str, ...]]:
    """Two sets of saved tensors at most, none beaten in both bytes and recomputation."""
    pairs, kinds = costs.layer_pairs(cfg, [document]), shapes.inner_kinds(cfg)
    nbytes = {name: size for kind in kinds for name, size in shapes.saved_bytes(cfg, document, 2, kind).items()}
    rebuilt = lambda names: sum(costs.recompute_flops(cfg, frozenset(names), document, pairs, kind) for kind in kinds)
    found = sorted(
        (sum(nbytes[name] for name in names), rebuilt(names), names)
        for count in range(1, len(nbytes) + 1)
        for names in combinations(nbytes, count)
    )
    kept, least = [], rebuilt(())
    for _, again, names in found:
        if again < least:
            kept.append(names)
            least = again
    return [kept[len(kept) // 2], kept[-1]] if len(kept) > 2 else kept


def swaps(geo: Geometry, plan: Plan, limits: Limits, document: int, tier: Tier = "host") -> Iterable[Plan]:
    """Plans with saved tensors of some blocks in `tier`, of the last on the GPU."""
    plain = plan.changed(range(geo.n_units), saved=())
    for names in front(geo.cfg, document):
        room = most_swapped(geo, plain, limits, names, tier)
        for k in dict.fromkeys(int(room * share) for share in SHARES):
            if k:
                yield most_kept(geo, plain, limits, names, k, tier)


def most_swapped(geo: Geometry, plan: Plan, limits: Limits, names: Sequence[str], tier: Tier) -> int:
    """How many blocks can have `names` in `tier`."""
    return largest(geo.cfg.n_layers, lambda k: fits(geo, swapped(geo, plan, names, k, 0, tier), limits))


def most_kept(geo: Geometry, plan: Plan, limits: Limits, names: Sequence[str], k: int, tier: Tier = "host") -> Plan:
    """`swapped` with the largest `keep`."""
    return furthest(geo, limits, geo.cfg.n_layers, lambda keep: swapped(geo, plan, names, k, keep, tier))


def swapped(geo: Geometry, plan: Plan, names: Sequence[str], k: int, keep: int, tier: Tier = "host") -> Plan:
    """`plan` with `names` of k blocks in `tier`, everything of the last `keep` on the GPU."""
    n = geo.cfg.n_layers
    away = spread(max(n - keep, 0), min(k, n - keep))
    for kind in geo.inner_kinds:
        layers = [(u, shapes.layer(geo.cfg, u)) for u in range(1, geo.head) if geo.kinds[u] == kind]
        everything, some = geo.saved_names(kind), [name for name in geo.saved_names(kind) if name in names]
        plan = plan.changed({u for u, i in layers if i >= n - keep}, saved=tuple((name, "gpu") for name in everything))
        plan = plan.changed({u for u, i in layers if i in away}, saved=tuple((name, tier) for name in some))
    return plan

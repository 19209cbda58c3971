"""Variants of a plan: other micro-batches, placements, swapped activations, windows, buffers, updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from typing import Any, NamedTuple

from trireme.engine.buffers import each_usage, fits, fullest
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan, SavedTier, Tier, UnitPlan
from trireme.engine.planner.predict import Batch, rebuilt_seconds
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import (
    Lean,
    Wanted,
    fill_ram,
    furthest,
    largest,
    longer_pieces,
    of_first,
    share_updates,
    simple_plan,
    some,
    spread,
)
from trireme.models.sizes import shapes
from trireme.storage.layout import ITEMSIZE

MICRO_BATCHES = 2  # sizes tried, from the rule's down
SHARES = (1.0, 0.5, 0.2)  # of the moves that RAM has room for
PARTS = 8  # of them, tried around a good plan
DRIVE_LEANS = Lean("host", 0.0, updates=0.0), Lean(), Lean("host")
DRIVE_RAM = 0.85  # for state, where it gives way to activations
LEANS = (
    *(Lean(x, states) for states in (None, 1.0, 0.0) for x in ("gpu", "host")),
    *(Lean(x, states, updates=0.0) for states in (1.0, 0.0) for x in ("gpu", "host")),
    *(Lean(x, resident=True, updates=0.0) for x in ("gpu", "host")),
)
BASE_RAM = (1.0, 0.7, 0.4, 0.0)  # shares of the frozen units in RAM that activations leave there
UPDATES = (0.0, 0.15, 0.3, 0.45, 0.6)  # shares of RAM-stored units updated on the GPU
WINDOWS = (2, 3, 4)
SLOTS = (2, 3, 4)  # of swap rings; more absorb bursts
FROZEN: dict[str, Any] = {"base": "gpu"}
STATE: dict[str, Any] = {"weights": "gpu", "state": "gpu", "update": "cpu", "resident": False}
LATE: tuple[tuple[Tier, ...], ...] = ((), ("host",), ("host", "ssd"), ("gpu", "host"), ("gpu", "host", "ssd"))


def variants(
    geo: Geometry, limits: Limits, first: Plan, wanted: Wanted, steps: Sequence[Move], leans: Sequence[Lean] = LEANS
) -> Iterable[Plan]:
    """Plans that fit: micro-batches, leans, saved tensors recomputed or in RAM."""
    if geo.cfg.lora:
        yield from _with_a_base(geo, limits, first, wanted, steps)
        return
    for plan in _plans(geo, limits, wanted, product(sizes(first, wanted), leans)):
        yield plan
        yield from swaps(geo, plan, limits, steps)


def _plans(
    geo: Geometry, limits: Limits, wanted: Wanted, ways: Iterable[tuple[tuple[int, int], Lean]]
) -> Iterable[Plan]:
    """The rule's plans by (size, lean) that fit, each once."""
    found = dict[Plan, None]()
    for size, lean in ways:
        with suppress(DoesNotFit):
            found[simple_plan(geo.cfg, limits, replace(wanted, sizes=(size,)), lean)] = None
    return found


def _with_a_base(geo: Geometry, limits: Limits, first: Plan, wanted: Wanted, steps: Sequence[Move]) -> Iterable[Plan]:
    """As variants, of adapters: RAM is shared between their base and activations."""
    inputs = Lean("gpu"), Lean("host")
    for plan, share in product(_plans(geo, limits, wanted, product(sizes(first, wanted), inputs)), BASE_RAM):
        in_ram = [u for u, unit in enumerate(plan.units) if unit.base == "host"]
        kept = some(in_ram, int(share * len(in_ram)))
        low = plan.changed(set(in_ram) - kept, base="ssd") if wanted.free else plan
        for variant in (low, *swaps(geo, low, limits, steps)):
            yield fill_ram(geo, variant, limits) if wanted.free else variant


def through_the_drive(
    geo: Geometry, limits: Limits, first: Plan, wanted: Wanted, steps: Sequence[Move]
) -> Iterable[Plan]:
    """Plans with less state in RAM, for saved tensors there and then on the SSD (Fuyou, section 4.4)."""
    less = replace(limits, host=int(DRIVE_RAM * limits.host))
    for plan in _plans(geo, less, wanted, product(sizes(first, wanted), DRIVE_LEANS)):
        for swapping in swaps(geo, plan, limits, steps, drive=True):
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
    away = any(unit.x != "gpu" or any(tier != "gpu" for _, tier in unit.saved) for unit in plan.units)
    if not away and plan.between != "host":
        return
    kept = [u for u, unit in enumerate(plan.units) if unit.names("gpu")]
    for slots in SLOTS:
        if slots == plan.swap_slots:
            continue
        deeper = _with_less_kept(geo, replace(plan, swap_slots=slots, piece=min(plan.piece, piece)), limits, kept)
        if fits(geo, deeper, limits):
            yield longer_pieces(geo, deeper, limits)


def fewer_writes(geo: Geometry, plan: Plan, limits: Limits) -> Iterable[Plan]:
    """One buffer in RAM for weights from the SSD: its room takes inputs of blocks that are written there."""
    away = [u for u, unit in enumerate(plan.units) if unit.x == "ssd"]
    if away and plan.host_window > 1:
        yield of_first(geo, replace(plan, host_window=1), limits, away, x="host")


def _with_less_kept(geo: Geometry, plan: Plan, limits: Limits, kept: Sequence[int]) -> Plan:
    """`plan` that saves no more of the first of `kept`, as few as need be."""
    return furthest(geo, limits, len(kept), lambda k: plan.changed(kept[: len(kept) - k], saved=()))


def between(geo: Geometry, plan: Plan, limits: Limits, piece: int) -> Iterable[Plan]:
    """What is between layers through RAM rather than by peer copies, or the other way."""
    head = plan.units[geo.head]
    if plan.between == "gpu":
        x: Tier = "host" if head.x == "gpu" else head.x
        other = replace(plan, between="host").changed({geo.head}, x=x)
    else:
        other = replace(plan, between="gpu").changed({geo.head}, x="gpu")
    other = replace(other, piece=min(plan.piece, piece))
    if fits(geo, other, limits):
        yield longer_pieces(geo, other, limits)


def divided_losses(geo: Geometry, plan: Plan, limits: Limits, piece: int) -> Iterable[Plan]:
    """The losses of micro-batches on all GPUs in turn, on all but that of the last block, which is ready last, on all
    but the head's, which may be full; or a quarter of them on another GPU than the head's, where the head is small.

    With fewer blocks kept on the GPU if need be.
    """
    if plan.hosts > 1 or plan.n_micro == 1 or geo.cfg.scores:  # a score head takes no time
        return
    home, last = plan.units[geo.head].gpu, plan.units[geo.head - 1].gpu
    turn = tuple((home + i) % plan.gpus for i in range(plan.gpus))
    others = [tuple(gpu for gpu in turn if gpu != out) for out in (last, home) if plan.gpus > 2]
    kept = [u for u, unit in enumerate(plan.units) if unit.names("gpu") or unit.lent]
    few = home, turn[1], home, home
    for losses in dict.fromkeys((turn, (*turn[1:], home), *others, few)):
        if losses != plan.losses:
            short = replace(plan, losses=losses, piece=min(plan.piece, piece))
            room = _with_less_kept(geo, short, limits, kept)
            if fits(geo, room, limits):
                yield longer_pieces(geo, room, limits)


def late_moments(plan: Plan) -> Iterable[Plan]:
    tiers: set[Tier] = {unit.state for unit in plan.units if unit.update == "cpu"} - {"gpu"}
    tiers |= {"gpu"} if any(unit.update == "gpu" for unit in plan.units) else set()
    tried = [tiers.intersection(plan.late_moments)]
    for late in LATE if plan.mode == "forward" and plan.adam_bits == 32 else ():
        if tiers.intersection(late) not in tried:
            tried.append(tiers.intersection(late))
            yield replace(plan, late_moments=late)


def updates(geo: Geometry, plan: Plan, limits: Limits, piece: int) -> Iterable[Plan]:
    """Other shares of units updated on the GPU, with their moments late or not; also of a plan that has none.

    Where their state has no room in the buffers of the GPU, swapped tensors are recomputed, or a unit's state goes
    back to RAM.
    """
    if any(unit.update == "cpu" and unit.state == unit.weights == "host" for unit in plan.units):
        others: tuple[Tier, ...] = tuple(tier for tier in plan.late_moments if tier != "gpu")
        both: tuple[Tier, ...] = ("gpu", *others)
        late = [others, both] if others else [others]
        shorts = [replace(plan, piece=min(plan.piece, piece), late_moments=tiers) for tiers in late]
        for other in dict.fromkeys(_shared(geo, *each) for each in product(shorts, (limits,), UPDATES)):
            yield longer_pieces(geo, other, limits)


def _shared(geo: Geometry, plan: Plan, limits: Limits, share: float) -> Plan:
    swapping = [u for u, unit in enumerate(plan.units) if unit.names("host")]
    on_gpu = [u for u, unit in enumerate(plan.units) if unit.state == "gpu"]
    fewer = plan.changed(swapping, saved=()), plan.changed(on_gpu[-1:], weights="host", state="host")
    tried = ((room, share_updates(geo, room, limits, share)) for room in (plan, *fewer))
    return next((shared for room, shared in tried if shared != room), plan)


def updated_alike(plan: Plan, begun: Plan) -> Plan | None:
    """`plan` with updates on the processors of `begun`; None if its placement forbids that."""
    units = []
    for unit, other in zip(plan.units, begun.units, strict=True):
        on_gpu = other.state == "gpu" or other.update == "gpu"
        streamed = on_gpu and unit.state != "gpu"
        if unit.state == "gpu" and not on_gpu:
            return None
        if streamed and ((unit.weights, unit.state) != ("host", "host") or plan.mode == "backward"):
            return None
        units.append(
            replace(unit, gpu=other.gpu, update="gpu" if streamed else "cpu", resident=unit.resident and not streamed)
        )
    return replace(plan, units=tuple(units))


# ---------------------------------------------------------------- activations


class Move(NamedTuple):
    """Saving more of a block."""

    kind: str  # of its unit
    names: tuple[str, ...]  # saved after it
    nbytes: int  # more, for the tokens of a micro-batch
    seconds: float  # of recomputation spared


Point = tuple[float, float, int]  # bytes, seconds, index


def moves(geo: Geometry, batch: Batch, rates: Rates) -> list[Move]:
    """From saving nothing to saving everything, most seconds per byte first.

    Of each kind of unit the sets of saved tensors on the lower convex hull of bytes and recomputation (Fuyou, equation
    12; MPress, table III).
    """
    found = []
    for kind in geo.inner_kinds:
        u, nbytes = geo.kinds.index(kind), shapes.saved_bytes(geo.cfg, batch.tokens, ITEMSIZE[geo.dtype], kind)
        sets = [names for count in range(len(nbytes) + 1) for names in combinations(nbytes, count)]
        again = lambda names, u=u: rebuilt_seconds(geo.cfg, u, frozenset(names), rates, batch)
        points = [(sum(map(nbytes.__getitem__, names)), again(names)) for names in sets]
        for (size, before, _), (more, after, i) in pairwise(_chain(sets, _hull(points))):
            found.append(Move(kind, sets[i], int(more - size), before - after))
    return sorted(found, key=lambda move: -float(f"{move.seconds / move.nbytes:.6g}"))  # else roundings break the order


def _hull(points: Sequence[tuple[float, float]]) -> list[Point]:
    """Of the points on the lower convex hull, as far as seconds fall."""
    kept: list[Point] = []
    for point in sorted((*point, i) for i, point in enumerate(points)):
        if kept and point[1] >= kept[-1][1]:
            continue
        while len(kept) > 1 and _turn(kept[-2], kept[-1], point) < 0:
            kept.pop()
        kept.append(point)
    return kept


def _chain(sets: Sequence[tuple[str, ...]], hull: Sequence[Point]) -> list[Point]:
    """The corners of a hull, and of the points between two those that only add to the one before."""
    chain = list(hull[:1])
    for before, here, after in zip(hull, hull[1:], [*hull[2:], None], strict=False):
        corner = after is None or _turn(before, here, after) != 0
        if corner or set(sets[here[2]]).issuperset(sets[chain[-1][2]]):
            chain.append(here)
    return chain


def _turn(a: Point, b: Point, c: Point) -> float:
    """Above zero where the way from a over b to c turns to the left, zero where it is straight but for roundings."""
    left, right = (b[0] - a[0]) * (c[1] - a[1]), (b[1] - a[1]) * (c[0] - a[0])
    return 0.0 if abs(left - right) <= 1e-6 * max(abs(left), abs(right)) else left - right


def swaps(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], drive: bool = False) -> Iterable[Plan]:
    """Plans that save the first of `moves`, in RAM as far as it reaches; with a `drive` the next on the SSD too.

    Of the last blocks as much as fits is kept on the GPU.
    """
    plain = plan.changed(range(geo.n_units), saved=())
    ends = list(accumulate(geo.kinds.count(move.kind) for move in steps))
    room = _room(geo, plain, limits, steps)
    for n in sorted({*(n for n in ends if n <= room), *(int(room * share) for share in SHARES)} - {0}):
        yield most_kept(geo, plain, limits, steps, n, n)
    for n in (n for n in ends if drive and n > room):
        for in_ram in {room, 0}:
            yield most_kept(geo, plain, limits, steps, n, in_ram)


def _room(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move]) -> int:
    """How many moves fit in RAM."""
    total = sum(geo.kinds.count(move.kind) for move in steps)
    return largest(total, lambda n: fits(geo, walked(geo, plan, steps, n, n), limits))


def other_swaps(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move]) -> Iterable[Plan]:
    """More and fewer moves to RAM than a plan has, of one that has none on the SSD."""
    if any(unit.names("ssd") for unit in plan.units):
        return
    plain = plan.changed(range(geo.n_units), saved=())
    room = _room(geo, plain, limits, steps)
    for n in dict.fromkeys(round(room * i / PARTS) for i in range(1, PARTS + 1)):
        yield most_kept(geo, plain, limits, steps, n, n)


def in_peers(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], piece: int) -> Iterable[Plan]:
    """Plans that save more, or all that they swap, in other GPUs' memory: of all units, of the head's GPU, of the
    fullest one. A full GPU has no room for what is in flight to another: so also with weights streamed to it that were
    resident, in few buffers.
    """
    short = replace(plan, piece=min(plan.piece, piece))
    one = {plan.units[geo.head].gpu}, {fullest(each_usage(geo, short)[0], limits)}
    of_gpus = dict.fromkeys(map(frozenset[int], (range(plan.gpus), *one)))
    for only in of_gpus:
        own = [u for u, unit in enumerate(plan.units) if unit.gpu in only]
        streamed = replace(short, window=min(WINDOWS), swap_slots=min(SLOTS)).changed(own, resident=False)
        for roomy in (short, streamed):
            for base in dict.fromkeys((_swapping_only(roomy, own), roomy.changed(own, saved=(), peer=0))):
                lending = lend(geo, base, limits, steps, only) if fits(geo, base, limits) else base
                if lending != base and fits(geo, lending, limits):
                    yield longer_pieces(geo, lending, limits)


def _swapping_only(plan: Plan, units: Sequence[int]) -> Plan:
    """`plan` whose `units` save nothing but what they swap to RAM or the SSD."""
    for saved in dict.fromkeys(plan.units[u].saved for u in units):
        alike = {u for u in units if plan.units[u].saved == saved}
        plan = plan.changed(alike, saved=tuple((n, tier) for n, tier in saved if tier in ("host", "ssd")), peer=0)
    return plan


def fuller(geo: Geometry, plan: Plan, limits: Limits, piece: int, states: bool) -> Iterable[Plan]:
    """Plans that fill each of several GPUs with its units' frozen weights, or with `states` with those: the rule stops
    where one GPU is full.
    """
    short = replace(plan, piece=min(plan.piece, piece))
    frozen = [u for u, unit in enumerate(plan.units) if unit.base != "gpu"]
    trained = [u for u, unit in enumerate(plan.units) if states and unit.state != "gpu"]
    for left, moved in ((frozen, FROZEN), (trained, STATE)):
        filled = short
        for gpu in range(plan.gpus):
            filled = of_first(geo, filled, limits, [u for u in left if plan.units[u].gpu == gpu], **moved)
        if filled != short and fits(geo, filled, limits):
            yield longer_pieces(geo, filled, limits)


def lend(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], only: Collection[int]) -> Plan:
    """`plan` that saves more of the units of GPUs `only`, most seconds per byte first: on their own GPU as far as it
    has room, then on the roomiest other. A GPU lends what it has left in addition to all that it computes with.

    GPUs with less room than the roomiest first leave some for the buffers of copies to a peer: as many bytes as one of
    `steps` saves, or none; that after which the busiest GPU recomputes least.
    """
    spans = (geo.saved_layout(geo.kinds.index(move.kind), move.names, plan.tokens).span for move in steps)
    found = [_lent(geo, plan, limits, steps, only, staged) for staged in dict.fromkeys((0, *spans))]
    return min(found, key=lambda each: each[0])[1]


def _lent(
    geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], only: Collection[int], staged: int
) -> tuple[float, Plan]:
    """Seconds that the busiest GPU recomputes after `lend` with buffers of `staged` bytes, and the plan."""
    rooms = _Rooms(geo, plan, limits, staged)
    units = [u for u in range(geo.head - 1, 0, -1) if plan.units[u].gpu in only]
    changed, left = dict[int, UnitPlan](), [0.0] * plan.gpus
    for move, u in ((move, u) for move in steps for u in units if geo.kinds[u] == move.kind):
        unit = changed.get(u, plan.units[u])
        saved = dict(unit.saved)
        more = [name for name in move.names if name not in saved]
        others = [gpu for gpu in range(plan.gpus) if gpu != unit.gpu]
        peer = unit.peer if unit.lent else max(others, key=lambda gpu: rooms.left[gpu])
        own: SavedTier = "gpu"
        lent: SavedTier = "peer"
        for tier in (own, lent) if more else ():
            saving = replace(unit, saved=(*unit.saved, *((name, tier) for name in more)))
            saving = replace(saving, peer=peer if saving.lent else 0)
            if rooms.take(u, unit, saving):
                changed[u] = saving
                break
        else:
            left[unit.gpu] += move.seconds if more else 0.0
    for unit in dict.fromkeys(changed.values()):
        chosen = {u for u, other in changed.items() if other == unit}
        plan = plan.changed(chosen, saved=unit.saved, peer=unit.peer)
    return max(left), plan


class _Rooms:
    """Bytes that each GPU has left with a plan, and with buffers of `staged` bytes on all but the roomiest."""

    def __init__(self, geo: Geometry, plan: Plan, limits: Limits, staged: int = 0):
        self.geo, self.plan = geo, plan
        self.left = [limits.of(gpu) - used for gpu, used in enumerate(each_usage(geo, plan)[0])]
        self.staged = [0] * plan.gpus  # of a buffer on the way to a peer
        for u, unit in enumerate(plan.units):
            self.staged[unit.gpu] = max(self.staged[unit.gpu], self._span(u, unit, "peer"))
        for gpu in set(range(plan.gpus)) - {max(range(plan.gpus), key=lambda gpu: self.left[gpu])}:
            more = plan.swap_slots * max(0, staged - self.staged[gpu])
            if more <= self.left[gpu]:
                self.left[gpu] -= more
                self.staged[gpu] = max(staged, self.staged[gpu])

    def _span(self, u: int, unit: UnitPlan, tier: SavedTier) -> int:
        names = unit.names(tier)
        return self.geo.saved_layout(u, names, self.plan.tokens).span if names else 0

    def take(self, u: int, before: UnitPlan, after: UnitPlan) -> bool:
        """Takes what unit u needs more after a change of its saved tensors, if all GPUs have that."""
        more = {tier: self._span(u, after, tier) - self._span(u, before, tier) for tier in ("gpu", "peer")}
        pool = max(0, self._span(u, after, "peer") - self.staged[after.gpu])
        own, lent = self.plan.n_micro * more["gpu"] + self.plan.swap_slots * pool, self.plan.n_micro * more["peer"]
        if own > self.left[after.gpu] or lent > self.left[after.peer] * (lent > 0):
            return False
        self.left[after.gpu] -= own
        self.left[after.peer] -= lent
        self.staged[after.gpu] += pool
        return True


def most_kept(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], n: int, in_ram: int) -> Plan:
    """`walked` with the largest `keep`."""
    return furthest(geo, limits, geo.cfg.n_layers, lambda keep: walked(geo, plan, steps, n, in_ram, keep))


def walked(geo: Geometry, plan: Plan, steps: Sequence[Move], n: int, in_ram: int, keep: int = 0) -> Plan:
    """`plan` with everything of the last `keep` blocks on the GPU, and of the others the first n moves.

    A move is counted for each unit of its kind, evenly spread. The first `in_ram` save in RAM, the others on the SSD.
    """
    last = geo.cfg.n_layers - keep
    to_ram: Tier = "host"
    to_drive: Tier = "ssd"
    saved: dict[int, dict[str, Tier]] = {}
    for u in range(1, geo.head):
        on_gpu = shapes.layer(geo.cfg, u) >= last
        saved[u] = dict.fromkeys(geo.saved_names(geo.kinds[u]) if on_gpu else (), "gpu")
    for move in steps:
        units = [u for u in saved if geo.kinds[u] == move.kind]
        done, ram = min(n, len(units)), min(in_ram, n, len(units))
        n, in_ram, near = n - done, in_ram - ram, spread(done, ram)
        for i, place in enumerate(sorted(spread(len(units), done))):
            u, tier = units[place], to_ram if i in near else to_drive
            if shapes.layer(geo.cfg, u) < last:
                saved[u] = {name: saved[u].get(name, tier) for name in move.names}
    for names in dict.fromkeys(tuple(names.items()) for names in saved.values()):
        plan = plan.changed({u for u, each in saved.items() if tuple(each.items()) == names}, saved=names)
    return plan

"""Variants of a plan: other micro-batches, placements, swapped activations, windows, buffers, updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
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
    Strategy,
    Wanted,
    fill_ram,
    largest,
    largest_fitting,
    longer_pieces,
    of_first,
    share_updates,
    simple_plan,
    some,
    spread,
)
from trireme.models.sizes import shapes
from trireme.storage.layout import ITEMSIZE

MICRO_BATCHES = 2  # sizes of a micro-batch that are tried, from the rule's down
SHARES = (1.0, 0.5, 0.2)  # of the moves that fit in RAM, tried for each plan
PARTS = 8  # numbers of moves that are tried around a good plan
DRIVE_STRATEGIES = Strategy("host", 0.0, updates=0.0), Strategy(), Strategy("host")
DRIVE_RAM = 0.85  # share of the RAM that state may take in plans that swap activations through RAM to the SSD
STRATEGIES = (
    *(Strategy(x, states) for states in (None, 1.0, 0.0) for x in ("gpu", "host")),
    *(Strategy(x, states, updates=0.0) for states in (1.0, 0.0) for x in ("gpu", "host")),
    *(Strategy(x, resident=True, updates=0.0) for x in ("gpu", "host")),
)
BASE_RAM = (1.0, 0.7, 0.4, 0.0)  # shares of the frozen units in RAM that stay there; activations get the rest
UPDATES = (0.0, 0.15, 0.3, 0.45, 0.6)  # shares of RAM-stored units updated on the GPU
WINDOWS = (2, 3, 4)
SLOTS = (2, 3, 4)  # buffers for swapped activations; more absorb bursts
FROZEN: dict[str, Any] = {"base": "gpu"}
STATE: dict[str, Any] = {"weights": "gpu", "state": "gpu", "update": "cpu", "resident": False}
LATE: tuple[tuple[Tier, ...], ...] = ((), ("host",), ("host", "ssd"), ("gpu", "host"), ("gpu", "host", "ssd"))


def variants(
    geo: Geometry,
    limits: Limits,
    first: Plan,
    wanted: Wanted,
    steps: Sequence[Move],
    strategies: Sequence[Strategy] = STRATEGIES,
) -> Iterable[Plan]:
    """Plans that fit, for several sizes of a micro-batch and `strategies`, each with its saved tensors recomputed and
    with the first of `steps` swapped to RAM.
    """
    if geo.cfg.lora:
        yield from _with_a_base(geo, limits, first, wanted, steps)
        return
    for plan in _plans(geo, limits, wanted, product(sizes(first, wanted), strategies)):
        yield plan
        yield from swaps(geo, plan, limits, steps)


def _plans(
    geo: Geometry, limits: Limits, wanted: Wanted, ways: Iterable[tuple[tuple[int, int], Strategy]]
) -> Iterable[Plan]:
    """The rule's plan for each (size, strategy) of `ways` that fits, without duplicates."""
    found = dict[Plan, None]()
    for size, strategy in ways:
        with suppress(DoesNotFit):
            found[simple_plan(geo.cfg, limits, replace(wanted, sizes=(size,)), strategy)] = None
    return found


def _with_a_base(geo: Geometry, limits: Limits, first: Plan, wanted: Wanted, steps: Sequence[Move]) -> Iterable[Plan]:
    """`variants` for adapters: RAM is divided between the frozen base and activations."""
    inputs = Strategy("gpu"), Strategy("host")
    for plan, share in product(_plans(geo, limits, wanted, product(sizes(first, wanted), inputs)), BASE_RAM):
        in_ram = [u for u, unit in enumerate(plan.units) if unit.base == "host"]
        kept = some(in_ram, int(share * len(in_ram)))
        low = plan.changed(set(in_ram) - kept, base="ssd") if wanted.free else plan
        for variant in (low, *swaps(geo, low, limits, steps)):
            yield fill_ram(geo, variant, limits) if wanted.free else variant


def through_the_drive(
    geo: Geometry, limits: Limits, first: Plan, wanted: Wanted, steps: Sequence[Move]
) -> Iterable[Plan]:
    """Plans that swap saved tensors first to RAM, then to the SSD, with less state in RAM (Fuyou, section 4.4)."""
    less = replace(limits, host=int(DRIVE_RAM * limits.host))
    for plan in _plans(geo, less, wanted, product(sizes(first, wanted), DRIVE_STRATEGIES)):
        for swapping in swaps(geo, plan, limits, steps, drive=True):
            yield fill_ram(geo, swapping, limits) if wanted.free else swapping


def sizes(first: Plan, wanted: Wanted) -> tuple[tuple[int, int], ...]:
    """(tokens, number) of micro-batches: the rule's, smaller ones, and a larger one, for fewer buffers."""
    at = next(i for i, (tokens, _) in enumerate(wanted.sizes) if tokens <= first.tokens)
    return wanted.sizes[max(0, at - 1) : at + MICRO_BATCHES]


# ---------------------------------------------------------------- one decision changed


def with_short_pieces(
    geo: Geometry, limits: Limits, piece: int, change: Callable[[Plan], Iterable[Plan]], plan: Plan
) -> Iterable[Plan]:
    """Those of `change(plan)` that fit. `plan` is first given gradient pieces of at most `piece` elements, to free
    memory for the change; then the pieces are lengthened as far as they fit.
    """
    for changed in change(replace(plan, piece=min(plan.piece, piece))):
        if fits(geo, changed, limits):
            yield longer_pieces(geo, changed, limits)


def windows(plan: Plan) -> Iterable[Plan]:
    """Other numbers of buffers for weights on the GPU."""
    return (replace(plan, window=window) for window in WINDOWS if window != plan.window)


def swap_slots(geo: Geometry, plan: Plan, limits: Limits) -> Iterable[Plan]:
    """Other numbers of buffers for swapped activations, with fewer blocks saved on the GPU if memory is short."""
    away = any(unit.x != "gpu" or any(tier != "gpu" for _, tier in unit.saved) for unit in plan.units)
    if not away and plan.between != "host":
        return
    kept = [u for u, unit in enumerate(plan.units) if unit.names("gpu")]
    for slots in SLOTS:
        if slots != plan.swap_slots:
            yield _with_less_kept(geo, replace(plan, swap_slots=slots), limits, kept)


def fewer_writes(geo: Geometry, plan: Plan, limits: Limits) -> Iterable[Plan]:
    """One buffer in RAM for weights from the SSD instead of two; inputs of blocks take the freed RAM, so that fewer are
    written to the SSD.
    """
    away = [u for u, unit in enumerate(plan.units) if unit.x == "ssd"]
    if away and plan.host_window > 1:
        yield of_first(geo, replace(plan, host_window=1), limits, away, x="host")


def _with_less_kept(geo: Geometry, plan: Plan, limits: Limits, kept: Sequence[int]) -> Plan:
    """`plan`, without saved tensors of as few of the first of `kept` units as makes it fit."""
    return largest_fitting(geo, limits, len(kept), lambda k: plan.changed(kept[: len(kept) - k], saved=()))


def between(geo: Geometry, plan: Plan) -> Iterable[Plan]:
    """Outputs of layers through RAM instead of peer copies, or the reverse."""
    head = plan.units[geo.head]
    if plan.between == "gpu":
        x: Tier = "host" if head.x == "gpu" else head.x
        yield replace(plan, between="host").changed({geo.head}, x=x)
    else:
        yield replace(plan, between="gpu").changed({geo.head}, x="gpu")


def divided_losses(geo: Geometry, plan: Plan, limits: Limits) -> Iterable[Plan]:
    """The losses of micro-batches are computed in turn by all GPUs; by all but that of the last block, which is ready
    last; by all but the head's, whose memory may be full; or, for a small head, every fourth by another GPU.

    Fewer blocks are saved on the GPU if memory is short.
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
            yield _with_less_kept(geo, replace(plan, losses=losses), limits, kept)


def late_moments(plan: Plan) -> Iterable[Plan]:
    """Other tiers whose moments are written during backward, apart from the weights."""
    tiers: set[Tier] = {unit.state for unit in plan.units if unit.update == "cpu"} - {"gpu"}
    tiers |= {"gpu"} if any(unit.update == "gpu" for unit in plan.units) else set()
    tried = [tiers.intersection(plan.late_moments)]
    for late in LATE if plan.mode == "forward" and plan.adam_bits == 32 else ():
        if tiers.intersection(late) not in tried:
            tried.append(tiers.intersection(late))
            yield replace(plan, late_moments=late)


def updates(geo: Geometry, plan: Plan, limits: Limits) -> Iterable[Plan]:
    """Other shares of units that are updated on the GPU, with their moments written during backward or not.

    If there is no GPU memory to stream their state through, swapped tensors are recomputed, or one unit's state is
    moved from the GPU to RAM.
    """
    if any(unit.update == "cpu" and unit.state == unit.weights == "host" for unit in plan.units):
        others: tuple[Tier, ...] = tuple(tier for tier in plan.late_moments if tier != "gpu")
        both: tuple[Tier, ...] = ("gpu", *others)
        late = [others, both] if others else [others]
        tried = product((replace(plan, late_moments=tiers) for tiers in late), UPDATES)
        yield from dict.fromkeys(_shared(geo, other, limits, share) for other, share in tried)


def _shared(geo: Geometry, plan: Plan, limits: Limits, share: float) -> Plan:
    """`plan` with `share` of the updates on the GPU; `plan` itself if no change of `updates` makes that fit."""
    swapping = [u for u, unit in enumerate(plan.units) if unit.names("host")]
    on_gpu = [u for u, unit in enumerate(plan.units) if unit.state == "gpu"]
    fewer = plan.changed(swapping, saved=()), plan.changed(on_gpu[-1:], weights="host", state="host")
    tried = ((room, share_updates(geo, room, limits, share)) for room in (plan, *fewer))
    return next((shared for room, shared in tried if shared != room), plan)


def updated_alike(plan: Plan, begun: Plan) -> Plan | None:
    """`plan` with each unit's update on the processor of `begun`; None if the placement of `plan` does not allow it."""
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
    """A step towards saving everything of a kind of unit: more tensors are saved, and fewer are recomputed."""

    kind: str  # of unit: block, attention, mlp
    names: tuple[str, ...]  # all tensors that are saved after this move
    nbytes: int  # additional bytes, for the tokens of a micro-batch
    seconds: float  # of recomputation that it avoids, for a micro-batch


Point = tuple[float, float, int]  # bytes, seconds, index


def moves(geo: Geometry, batch: Batch, rates: Rates) -> list[Move]:
    """The moves from saving nothing to saving everything, sorted by seconds per byte, highest first.

    For each kind of unit the sets of saved tensors are those on the lower convex hull of (bytes, seconds of
    recomputation) (Fuyou, equation 12; MPress, table III).
    """
    found = []
    for kind in geo.inner_kinds:
        u, nbytes = geo.kinds.index(kind), shapes.saved_bytes(geo.cfg, batch.tokens, ITEMSIZE[geo.dtype], kind)
        sets = [names for count in range(len(nbytes) + 1) for names in combinations(nbytes, count)]
        again = lambda names, u=u: rebuilt_seconds(geo.cfg, u, frozenset(names), rates, batch)
        points = [(sum(map(nbytes.__getitem__, names)), again(names)) for names in sets]
        for (size, before, _), (more, after, i) in pairwise(_chain(sets, _hull(points))):
            found.append(Move(kind, sets[i], int(more - size), before - after))
    # Rounded: rounding errors would change the order.
    return sorted(found, key=lambda move: -float(f"{move.seconds / move.nbytes:.6g}"))


def _hull(points: Sequence[tuple[float, float]]) -> list[Point]:
    """The points (bytes, seconds) on the lower convex hull, as long as seconds decrease."""
    kept: list[Point] = []
    for point in sorted((*point, i) for i, point in enumerate(points)):
        if kept and point[1] >= kept[-1][1]:
            continue
        while len(kept) > 1 and _cross_product(kept[-2], kept[-1], point) < 0:
            kept.pop()
        kept.append(point)
    return kept


def _chain(sets: Sequence[tuple[str, ...]], hull: Sequence[Point]) -> list[Point]:
    """The corners of a hull, and those points on its edges whose set contains the set of the previous point."""
    chain = list(hull[:1])
    for before, here, after in zip(hull, hull[1:], [*hull[2:], None], strict=False):
        corner = after is None or _cross_product(before, here, after) != 0
        if corner or set(sets[here[2]]).issuperset(sets[chain[-1][2]]):
            chain.append(here)
    return chain


def _cross_product(a: Point, b: Point, c: Point) -> float:
    """Cross product of b - a and c - a: positive for a left turn at b; zero if the points are collinear within 1e-6."""
    left, right = (b[0] - a[0]) * (c[1] - a[1]), (b[1] - a[1]) * (c[0] - a[0])
    return 0.0 if abs(left - right) <= 1e-6 * max(abs(left), abs(right)) else left - right


def swaps(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], drive: bool = False) -> Iterable[Plan]:
    """Plans that save the tensors of the first n `steps`, for several n, in RAM; with a `drive` more of them than fit
    in RAM, the rest on the SSD. As many of the last blocks as fit save all tensors on the GPU.
    """
    plain = plan.changed(range(geo.n_units), saved=())
    ends = list(accumulate(geo.kinds.count(move.kind) for move in steps))
    room = _moves_in_ram(geo, plain, limits, steps)
    for n in sorted({*(n for n in ends if n <= room), *(int(room * share) for share in SHARES)} - {0}):
        yield with_most_on_gpu(geo, plain, limits, steps, n, n)
    for n in (n for n in ends if drive and n > room):
        for in_ram in {room, 0}:
            yield with_most_on_gpu(geo, plain, limits, steps, n, in_ram)


def _moves_in_ram(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move]) -> int:
    """The largest number of moves whose tensors fit in RAM."""
    total = sum(geo.kinds.count(move.kind) for move in steps)
    return largest(total, lambda n: fits(geo, with_moves(geo, plan, steps, n, n), limits))


def other_swaps(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move]) -> Iterable[Plan]:
    """Plans with other numbers of moves to RAM than `plan`; none if it swaps to the SSD."""
    if any(unit.names("ssd") for unit in plan.units):
        return
    plain = plan.changed(range(geo.n_units), saved=())
    room = _moves_in_ram(geo, plain, limits, steps)
    for n in dict.fromkeys(round(room * i / PARTS) for i in range(1, PARTS + 1)):
        yield with_most_on_gpu(geo, plain, limits, steps, n, n)


def in_peers(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move]) -> Iterable[Plan]:
    """Plans that save more tensors, or all that they swap, in other GPUs' memory: those of all GPUs, of the head's GPU,
    or of the GPU with the least free memory. Copies to a peer need buffers on the source, so plans in which that GPU
    keeps no resident weights and has few buffers are tried, too.
    """
    one = {plan.units[geo.head].gpu}, {fullest(each_usage(geo, plan)[0], limits)}
    of_gpus = dict.fromkeys(map(frozenset[int], (range(plan.gpus), *one)))
    for only in of_gpus:
        own = [u for u, unit in enumerate(plan.units) if unit.gpu in only]
        streamed = replace(plan, window=min(WINDOWS), swap_slots=min(SLOTS)).changed(own, resident=False)
        for roomy in (plan, streamed):
            swapped = {u: tuple(s for s in roomy.units[u].saved if s[1] in ("host", "ssd")) for u in own}
            for base in dict.fromkeys(
                (roomy.saving(swapped).changed(own, peer=0), roomy.changed(own, saved=(), peer=0))
            ):
                lending = lend(geo, base, limits, steps, only) if fits(geo, base, limits) else base
                if lending != base:
                    yield lending


def fuller(geo: Geometry, plan: Plan, limits: Limits, states: bool) -> Iterable[Plan]:
    """Plans that fill each of several GPUs with frozen weights of its units, and if `states` with their weights and
    optimizer state. The rule stops when the first GPU is full.
    """
    frozen = [u for u, unit in enumerate(plan.units) if unit.base != "gpu"]
    trained = [u for u, unit in enumerate(plan.units) if states and unit.state != "gpu"]
    for left, moved in ((frozen, FROZEN), (trained, STATE)):
        filled = plan
        for gpu in range(plan.gpus):
            filled = of_first(geo, filled, limits, [u for u in left if plan.units[u].gpu == gpu], **moved)
        if filled != plan:
            yield filled


def lend(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], only: Collection[int]) -> Plan:
    """`plan` with more saved tensors in units of the GPUs `only`, in the order of `steps`: on the unit's own GPU while
    it has memory, then on the other GPU with the most free memory.

    The GPUs with less free memory reserve buffers for copies to a peer. The reserve is the size of one of `steps`, or
    nothing, whichever leaves the least recomputation to the busiest GPU.
    """
    spans = (geo.saved_layout(geo.kinds.index(move.kind), move.names, plan.tokens).span for move in steps)
    found = [_lent(geo, plan, limits, steps, only, staged) for staged in dict.fromkeys((0, *spans))]
    return min(found, key=lambda each: each[0])[1]


def _lent(
    geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], only: Collection[int], staged: int
) -> tuple[float, Plan]:
    """(seconds of recomputation of the busiest GPU, plan) of `lend` with reserved buffers of `staged` bytes."""
    rooms = _FreeMemory(geo, plan, limits, staged)
    units = [u for u in range(geo.head - 1, 0, -1) if plan.units[u].gpu in only]
    changed, left = dict[int, UnitPlan](), [0.0] * plan.gpus
    for move, u in ((move, u) for move in steps for u in units if geo.kinds[u] == move.kind):
        unit = changed.get(u, plan.units[u])
        saved = dict(unit.saved)
        more = [name for name in move.names if name not in saved]
        if not more:
            continue
        others = [gpu for gpu in range(plan.gpus) if gpu != unit.gpu]
        peer = unit.peer if unit.lent else max(others, key=lambda gpu: rooms.left[gpu])
        tiers: tuple[SavedTier, ...] = "gpu", "peer"
        for tier in tiers:
            saving = replace(unit, saved=(*unit.saved, *((name, tier) for name in more)))
            saving = replace(saving, peer=peer if saving.lent else 0)
            if rooms.take(u, unit, saving):
                changed[u] = saving
                break
        else:
            left[unit.gpu] += move.seconds
    for unit in dict.fromkeys(changed.values()):
        chosen = {u for u, other in changed.items() if other == unit}
        plan = plan.changed(chosen, saved=unit.saved, peer=unit.peer)
    return max(left), plan


class _FreeMemory:
    """Free bytes of each GPU with a plan, less buffers of `staged` bytes on all GPUs but the one with the most."""

    def __init__(self, geo: Geometry, plan: Plan, limits: Limits, staged: int):
        self.geo, self.plan = geo, plan
        self.left = [limits.of(gpu) - used for gpu, used in enumerate(each_usage(geo, plan)[0])]
        self.staged = [0] * plan.gpus  # bytes of a buffer for copies to a peer
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
        """Allocates the additional bytes of unit u after a change of its saved tensors; False if they do not fit."""
        more = {tier: self._span(u, after, tier) - self._span(u, before, tier) for tier in ("gpu", "peer")}
        pool = max(0, self._span(u, after, "peer") - self.staged[after.gpu])
        own, lent = self.plan.n_micro * more["gpu"] + self.plan.swap_slots * pool, self.plan.n_micro * more["peer"]
        if own > self.left[after.gpu] or lent > self.left[after.peer] * (lent > 0):
            return False
        self.left[after.gpu] -= own
        self.left[after.peer] -= lent
        self.staged[after.gpu] += pool
        return True


def with_most_on_gpu(geo: Geometry, plan: Plan, limits: Limits, steps: Sequence[Move], n: int, in_ram: int) -> Plan:
    """`with_moves` with the largest `keep` that fits."""
    return largest_fitting(geo, limits, geo.cfg.n_layers, lambda keep: with_moves(geo, plan, steps, n, in_ram, keep))


def with_moves(geo: Geometry, plan: Plan, steps: Sequence[Move], n: int, in_ram: int, keep: int = 0) -> Plan:
    """`plan` in which the last `keep` blocks save all tensors on the GPU, and the others those of the first n moves.

    Each move counts once for each unit of its kind. The last move is applied to units at even distances. The first
    `in_ram` moves save in RAM, the others on the SSD.
    """
    last = geo.cfg.n_layers - keep
    saved: dict[int, dict[str, Tier]] = {}
    for u in range(1, geo.head):
        on_gpu = shapes.layer(geo.cfg, u) >= last
        saved[u] = dict.fromkeys(geo.saved_names(geo.kinds[u]) if on_gpu else (), "gpu")
    for move in steps:
        units = [u for u in saved if geo.kinds[u] == move.kind]
        done, ram = min(n, len(units)), min(in_ram, n, len(units))
        n, in_ram, near = n - done, in_ram - ram, spread(done, ram)
        for i, place in enumerate(sorted(spread(len(units), done))):
            u = units[place]
            tier: Tier = "host" if i in near else "ssd"
            if shapes.layer(geo.cfg, u) < last:
                saved[u] = {name: saved[u].get(name, tier) for name in move.names}
    return plan.saving({u: tuple(names.items()) for u, names in saved.items()})

"""All buffers of a plan: its memory to the byte, before the run. Pure; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from trireme.engine.geometry import Geometry, extent
from trireme.engine.plan import TIERS, Limits, Plan, Tier
from trireme.models.sizes.workspace import workspace_bytes
from trireme.storage.layout import ITEMSIZE, round_up

ENDS = ("embed", "head", "ends")  # size classes with one unit in use at a time
OUT_SLOTS = 2  # for pieces of gradients leaving the GPU: one filled, one emptied
GRADIENT_SLOTS = 2  # host slots for records of gradients from the SSD
SUMS = 2  # accumulators where sums come from other hosts or go there
SUM_SLOTS = 3  # for pieces of sums on their way between hosts, each way
WHOLE_SLOTS = 2  # for gradients whose shares go to other hosts

Alike = Sequence[tuple[int, int]]  # (a unit, the number of units with its kind and plan)


@dataclass(frozen=True)
class Buffer:
    """`count` equal buffers of `nbytes`, asked for by `key`; `gpu`: of the gpu tier."""

    tier: Tier
    key: str
    nbytes: int
    count: int = 1
    gpu: int = 0


def buffers(geo: Geometry, plan: Plan) -> list[Buffer]:
    """All buffers that the engine makes, and no others."""
    return _buffers(geo, plan, [(u, 1) for u in range(geo.n_units)])


def _buffers(geo: Geometry, plan: Plan, units: Alike) -> list[Buffer]:
    """Each GPU's, as if its units were all, and those of RAM."""
    made = _made(geo, plan, units)
    if plan.gpus == 1:
        return made
    made = [b for b in made if b.tier != "gpu"]
    for gpu in range(plan.gpus):
        own = [(u, n) for u, n in units if plan.units[u].gpu == gpu]
        made += [replace(b, gpu=gpu) for b in _made(geo, plan, own) if b.tier == "gpu"]
    return made


def _made(geo: Geometry, plan: Plan, units: Alike) -> list[Buffer]:
    made = [
        *_weight_buffers(geo, plan, units),
        *_base_buffers(geo, plan, units),
        *_sum_buffers(geo, plan, units),
        *_optimizer_buffers(geo, plan, units),
        *_activation_buffers(geo, plan, units),
    ]
    return [b for b in made if b.count and b.nbytes]


def _alike(geo: Geometry, plan: Plan) -> Alike:
    sizes = ((geo.numel[u], geo.base_room[u]) for u in range(geo.n_units))
    keys = list(zip(geo.kinds, map(id, plan.units), sizes, strict=True))
    one = dict(zip(keys, range(geo.n_units), strict=True))
    return [(one[key], count) for key, count in Counter(keys).items()]


def _by_class(geo: Geometry, units: Alike, size: Callable[[int], int]) -> dict[str, tuple[int, int]]:
    """size class -> (largest size, number of units), without units of size 0."""
    found: dict[str, tuple[int, int]] = {}
    for u, alike in units:
        if not size(u):
            continue
        kind = geo.size_class(u)
        biggest, count = found.get(kind, (0, 0))
        found[kind] = (max(biggest, size(u)), count + alike)
    return found


def _weight_buffers(geo: Geometry, plan: Plan, units: Alike) -> Iterable[Buffer]:
    span = lambda u: geo.weights[u].span
    for u, alike in units:
        unit = plan.units[u]
        if unit.weights == "gpu" or unit.resident:
            yield Buffer("gpu", f"weights {geo.names[u]}", span(u), alike)
        if unit.weights == "host":
            yield Buffer("host", f"weights {geo.names[u]}", span(u), alike)
    streamed = [(u, n) for u, n in units if plan.units[u].weights != "gpu" and not plan.units[u].resident]
    for kind, (size, count) in _by_class(geo, streamed, span).items():
        yield Buffer("gpu", f"weight ring {kind}", size, 1 if kind in ENDS else min(plan.window, count))
    from_ssd = [(u, n) for u, n in units if plan.units[u].weights == "ssd"]
    yield Buffer("host", "staging", _staging(geo, plan, units))
    for kind, (size, count) in _by_class(geo, from_ssd, span).items():
        yield Buffer("host", f"weight ring {kind}", size, 1 if kind in ENDS else min(plan.host_window, count))


def _base_buffers(geo: Geometry, plan: Plan, units: Alike) -> Iterable[Buffer]:
    span = lambda u: geo.base[u].span
    for u, alike in units:
        if plan.units[u].base != "ssd":
            yield Buffer(plan.units[u].base, f"base {geo.names[u]}", span(u), alike)
    ways: tuple[tuple[Tier, int, tuple[Tier, ...]], ...]
    ways = ("gpu", plan.window, ("host", "ssd")), ("host", plan.host_window, ("ssd",))  # rings and homes behind them
    for tier, window, homes in ways:
        passing = [(u, n) for u, n in units if plan.units[u].base in homes]
        room = span if tier == "gpu" else geo.base_room.__getitem__
        for kind, (size, count) in _by_class(geo, passing, room).items():
            yield Buffer(tier, f"base ring {kind}", size, 1 if kind in ENDS else min(window, count))
    yield Buffer("gpu", "decoded", max((geo.decoded[u].span for u, _ in units), default=0))


def _staging(geo: Geometry, plan: Plan, units: Alike) -> int:
    """Bytes to load and save what is not at home in RAM."""
    weights = (geo.weights[u].span for u, _ in units if plan.units[u].weights != "host")
    n, _ = _records(geo, plan, [(u, n) for u, n in units if plan.units[u].state != "host"])
    base = (geo.base[u].span for u, _ in units if plan.units[u].base != "host")
    return max(0, geo.state_layout(n).span, *weights, *base)


def _sum_buffers(geo: Geometry, plan: Plan, units: Alike) -> Iterable[Buffer]:
    """Accumulators."""
    wide = geo.gradients if plan.sums_wide else geo.weights
    tied = geo.cfg.tied  # then the head adds to the embedding's gradient too
    slots = 1 if plan.hosts == 1 else SUMS  # sums leave while the next unit's begins
    yield Buffer("gpu", "gradient", max((wide[u].span for u, _ in units if u >= tied), default=0), slots)
    yield Buffer("gpu", "gradient embed", max((wide[u].span for u, _ in units if u < tied), default=0))


def _optimizer_buffers(geo: Geometry, plan: Plan, units: Alike) -> Iterable[Buffer]:
    for u, alike in units:
        if plan.units[u].state == "gpu":
            yield Buffer("gpu", f"gradient out {geo.names[u]}", geo.weights[u].span, alike)
        if plan.units[u].state != "ssd":
            yield Buffer(plan.units[u].state, f"state {geo.names[u]}", geo.state_span(u, plan.record), alike)
    on_cpu = [(u, n) for u, n in units if plan.units[u].state != "gpu" and geo.numel[u]]
    if on_cpu and plan.last_host:
        pieces = {geo.pieces(u, plan.piece) for u, _ in on_cpu}
        largest = max(extent(piece)[1] for unit in pieces for piece in unit)
        count = max(sum(n for _, n in on_cpu), *map(len, pieces))
        yield Buffer("gpu", "gradient out", round_up(largest * ITEMSIZE[plan.dtype]), min(OUT_SLOTS, count))
    for kind, (size, count) in _by_class(geo, on_cpu, lambda u: geo.share_span(u, plan.record)).items():
        spilled = sum(n for u, n in on_cpu if plan.spilled(u) and geo.size_class(u) == kind)
        passing = count if plan.mode == "backward" else spilled
        yield Buffer("host", f"gradient {kind}", size, count - passing + min(plan.host_window, passing))
    if plan.hosts > 1:
        yield from _shared_buffers(geo, plan, on_cpu)
    n, count = _records(geo, plan, [(u, n) for u, n in units if plan.spilled(u)])
    size = round_up(n * ITEMSIZE[plan.dtype]) + 4096  # a record begins and ends within a drive's block
    yield Buffer("host", "gradient ring", size, min(GRADIENT_SLOTS, count))
    n, count = _records(geo, plan, [(u, n) for u, n in units if plan.units[u].update == "gpu"])
    size = geo.state_layout(n).span + round_up(n * ITEMSIZE[plan.dtype])
    yield Buffer("gpu", "stream ring", size, min(plan.stream_slots, count))
    n, count = _records(geo, plan, [(u, n) for u, n in units if plan.units[u].state == "ssd"])
    yield Buffer("host", "state ring", geo.state_layout(n).span, min(plan.state_slots, count))


def _shared_buffers(geo: Geometry, plan: Plan, units: Alike) -> Iterable[Buffer]:
    """For gradients between hosts: pieces of sums; at the last host whole units, until their shares are dealt."""
    pieces = [piece for u, _ in units for piece in geo.pieces(u, plan.sum_piece)]
    largest = max((extent(piece)[1] for piece in pieces), default=0)
    tied = geo.cfg.tied  # then the last host hands a sum to the first
    for way, used in (("in", plan.host > 0 or tied), ("out", not plan.last_host or tied)):
        yield Buffer("host", f"sums {way}", round_up(4 * largest), SUM_SLOTS * used)
    for kind, (size, count) in _by_class(geo, units, lambda u: geo.weights[u].span).items():
        yield Buffer("host", f"whole gradient {kind}", size, min(WHOLE_SLOTS, count) * plan.last_host)


def _records(geo: Geometry, plan: Plan, units: Alike) -> tuple[int, int]:
    """(parameters of the largest, number) of the records."""
    largest = max((geo.numel[u] for u, _ in units), default=0)
    return min(largest, plan.record), sum(n * len(geo.records(u, plan.record)) for u, n in units)


def _activation_buffers(geo: Geometry, plan: Plan, units: Alike) -> Iterable[Buffer]:
    x, n = geo.x_bytes(plan.tokens), plan.n_micro
    away = plan.between == "host"
    inner = [(u, alike) for u, alike in units if u]  # the embedding's input is token ids
    homes: Counter[Tier] = Counter()  # of inputs
    for u, alike in inner:
        homes[plan.units[u].x] += alike * n
    yield Buffer("gpu", "x", x, homes["gpu"])
    if homes["host"] or homes["ssd"] or plan.gpus > 1:
        yield Buffer("gpu", "x ring", x, plan.swap_slots + (plan.swap_slots if away else n))
        yield Buffer("host", "x", x, homes["host"])
    yield Buffer("gpu", "dx ring", x, 2 * plan.swap_slots if away else n + 1)
    yield Buffer("host", "dx", x, n if away else 0)
    spans = {
        tier: [geo.saved_layout(u, plan.units[u].names(tier), plan.tokens).span for u, _ in inner] for tier in TIERS
    }
    for (u, alike), here, host in zip(inner, spans["gpu"], spans["host"], strict=True):
        yield Buffer("gpu", f"saved {geo.names[u]}", here, n * alike)
        yield Buffer("host", f"saved {geo.names[u]}", host, n * alike)
    for tier in ("host", "ssd"):
        yield Buffer("gpu", f"swap ring {tier}", max(spans[tier], default=0), plan.swap_slots)
    if homes["ssd"] or any(spans["ssd"]):
        yield Buffer("host", "swap ring ssd", max(x, *spans["ssd"]), 2 * plan.swap_slots)


def workspace(geo: Geometry, plan: Plan, gpu: int = 0) -> int:
    """A GPU's bytes beside the buffers: largest unit's temporaries, rotary table, inputs, fragmentation."""
    wide = 4 if plan.sums_wide else ITEMSIZE[plan.dtype]
    each = {geo.kinds[u]: u for u in range(geo.n_units) if plan.units[u].gpu == gpu}.values()  # by kind
    needs = [workspace_bytes(geo.cfg, u, plan.tokens, ITEMSIZE[plan.dtype], wide) for u in each]
    temporaries = max(needs, default=0)
    inputs = plan.tokens * plan.n_micro * 48
    return round_up(int(temporaries * 1.02)) + inputs


def usage(geo: Geometry, plan: Plan) -> dict[str, int]:
    """Bytes of the fullest GPU and of host: buffers and workspace."""
    on_gpu, host = [workspace(geo, plan, gpu) for gpu in range(plan.gpus)], 0
    for b in _buffers(geo, plan, _alike(geo, plan)):
        if b.tier == "gpu":
            on_gpu[b.gpu] += b.nbytes * b.count
        else:
            host += b.nbytes * b.count
    return {"gpu": max(on_gpu), "host": host}


def fits(geo: Geometry, plan: Plan, limits: Limits) -> bool:
    return not limits.lacking(usage(geo, plan))

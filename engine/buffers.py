"""All buffers of a plan, and so the memory that it needs, in bytes, before anything is allocated. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from trireme.engine.geometry import Geometry, extent
from trireme.engine.plan import SAVED, Limits, Plan, Tier, UnitPlan
from trireme.storage.layout import ITEMSIZE, Layout, round_up

CACHED = 4096  # answers to whether a plan fits: a search asks again
ENDS = ("embed", "head", "ends")  # size classes with one unit in use at a time
OUT_SLOTS = 2  # buffers for pieces of gradients that leave the GPU: one is filled, one is copied
GRADIENT_SLOTS = 2  # RAM buffers for records of gradients that are read from the SSD
SUMS = 2  # buffers for gradient sums with several hosts: one is sent while the next is received
SUM_SLOTS = 3  # RAM buffers for pieces of sums in transfer between hosts, in each direction
WHOLE_SLOTS = 2  # RAM buffers for gradients whose shares are sent to other hosts

Units = Sequence[tuple[int, int]]  # (a unit, the number of units with its kind and plan)


Group = Literal["weights", "gradients", "optimizer state", "activations", "workspace"]  # rows of the memory table

# What buffers hold, by group. Those of a pool pass from owner to owner.
OfWeights = Literal[
    "weights", "weights pool", "base", "base pool", "decoded",
]  # fmt: skip
OfGradients = Literal[
    "sum", "sum of embedding", "sums", "rounded", "rounded pool", "gradient", "whole gradient", "gradient pool",
]  # fmt: skip
OfState = Literal["state", "state pool"]
OfActivations = Literal["x", "x pool", "dx", "dx pool", "saved", "lent", "saved pool", "passed pool", "staging pool"]
OfWorkspace = Literal["staging", "-"]
Role = OfWeights | OfGradients | OfState | OfActivations | OfWorkspace
GROUPS: dict[Group, tuple[Role, ...]] = dict(zip(get_args(Group), map(get_args, get_args(Role)), strict=True))
GROUP = {role: group for group, roles in GROUPS.items() for role in roles}


@dataclass(frozen=True)
class Buffers:
    """`count` equal buffers of `nbytes` each. `key`: a layer's name, a size class or a tier. `gpu`: counts in the gpu
    tier.
    """

    tier: Tier
    role: Role
    nbytes: int
    count: int = 1
    key: str = ""
    gpu: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.key}".rstrip()


def buffers(geo: Geometry, plan: Plan) -> list[Buffers]:
    """All buffers that the engine allocates."""
    return _buffers(geo, plan, [(u, 1) for u in range(geo.n_units)])


def _buffers(geo: Geometry, plan: Plan, units: Units) -> list[Buffers]:
    """The buffers of each GPU, by the units that it computes with, and those in RAM."""
    result = _unit_buffers(geo, plan, units)
    if plan.gpus == 1:
        return result
    result = [b for b in result if b.tier != "gpu"]
    for gpu in range(plan.gpus):
        of_gpu = [(u, n) for u, n in units if plan.units[u].gpu == gpu]
        result += [replace(b, gpu=gpu) for b in _unit_buffers(geo, plan, of_gpu) if b.tier == "gpu"]
        result += _lent(
            geo, plan, [(u, n) for u, n in units if u and plan.units[u].lent and plan.units[u].peer == gpu], gpu
        )
    return result


def _lent(geo: Geometry, plan: Plan, units: Units, gpu: int) -> Iterable[Buffers]:
    """Buffers on `gpu` for tensors that layers of other GPUs save there."""
    for u, n_units in units:
        nbytes = geo.saved_layout(u, plan.units[u].names("peer"), plan.tokens).span
        yield Buffers("gpu", "lent", nbytes, plan.n_micro * n_units, geo.names[u], gpu)


def read_by_loss(geo: Geometry) -> tuple[int, ...]:
    """The units whose weights the loss reads: the head, and the embedding if it is tied."""
    return (geo.head, 0) if geo.cfg.tied else (geo.head,)


def _unit_buffers(geo: Geometry, plan: Plan, units: Units) -> list[Buffers]:
    """The buffers that these units need."""
    result = [
        *_weight_buffers(geo, plan, units),
        *_base_buffers(geo, plan, units),
        *(_sum_buffers(geo, plan, units) if geo.cfg.trains else ()),
        *(_optimizer_buffers(geo, plan, units) if geo.cfg.trains else ()),
        *_activation_buffers(geo, plan, units),
    ]
    return [b for b in result if b.count and b.nbytes]


def _unit_counts(geo: Geometry, plan: Plan) -> Units:
    """One unit of each set of units with equal sizes and equal plans, with their number."""
    objects = list(zip(geo.sizes, map(id, plan.units), strict=True))  # first, since most equal units are one object
    indices, counts = dict(zip(objects, range(geo.n_units), strict=True)), Counter[tuple[int, UnitPlan]]()
    for (size, unit), count in Counter(objects).items():
        counts[size, plan.units[indices[size, unit]]] += count
    last = {(size, plan.units[u]): u for (size, _), u in indices.items()}
    return [(last[key], count) for key, count in counts.items()]


def _spans(layouts: Sequence[Layout]) -> list[int]:
    return [layout.span for layout in layouts]


def _by_class(geo: Geometry, units: Units, sizes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Size class -> (largest size, number of units). `sizes`: bytes of each unit; units of size 0 are left out."""
    classes: dict[str, tuple[int, int]] = {}
    for u, n_units in units:
        if not sizes[u]:
            continue
        kind = geo.size_class(u)
        biggest, count = classes.get(kind, (0, 0))
        classes[kind] = (max(biggest, sizes[u]), count + n_units)
    return classes


def _pools(geo: Geometry, tier: Tier, role: Role, units: Units, sizes: Sequence[int], window: int) -> Iterable[Buffers]:
    """A pool of at most `window` buffers for each size class of these units."""
    for kind, (size, count) in _by_class(geo, units, sizes).items():
        yield Buffers(tier, role, size, 1 if kind in ENDS else min(window, count), kind)


def _weight_buffers(geo: Geometry, plan: Plan, units: Units) -> Iterable[Buffers]:
    """Buffers of trained weights. Those of one layer have its size; those of a pool have that of the largest layer."""
    spans = _spans(geo.weights)
    for u, n_units in units:
        unit = plan.units[u]
        if unit.weights == "gpu":
            yield Buffers("gpu", "weights", spans[u], n_units, geo.names[u])
        if unit.weights == "ram":
            yield Buffers("ram", "weights", spans[u], n_units, geo.names[u])
    streamed = [(u, n) for u, n in units if plan.units[u].weights != "gpu"]
    yield from _pools(geo, "gpu", "weights pool", streamed, spans, plan.window)
    from_ssd = [(u, n) for u, n in units if plan.units[u].weights == "ssd"]
    yield Buffers("ram", "staging", _staging(geo, plan, units))
    yield from _pools(geo, "ram", "weights pool", from_ssd, spans, plan.ram_window)


def _base_buffers(geo: Geometry, plan: Plan, units: Units) -> Iterable[Buffers]:
    """Buffers of frozen weights, as of trained ones; those in RAM for reads from the SSD hold whole blocks of the
    checkpoint's files.
    """
    spans, decoded = _spans(geo.base), max((geo.decoded[u].span for u, _ in units), default=0)
    units = [(v, n) for u, n in units for v in (u, *geo.slices_of[u])]
    tier = lambda v: plan.units[geo.unit_of(v)].base
    for v, n_units in units:
        if tier(v) != "ssd":
            yield Buffers(tier(v), "base", spans[v], n_units, geo.base_names[v])
    streamed = [(v, n) for v, n in units if tier(v) != "gpu"]
    yield from _pools(geo, "gpu", "base pool", streamed, spans, plan.window)
    from_ssd = [(v, n) for v, n in units if tier(v) == "ssd"]
    yield from _pools(geo, "ram", "base pool", from_ssd, geo.base_room, plan.ram_window)
    yield Buffers("gpu", "decoded", decoded)


def _staging(geo: Geometry, plan: Plan, units: Units) -> int:
    """Bytes of the buffer to load and save what is not stored in RAM: a layer's weights and a record's low halves at
    once.
    """
    low = lambda u: geo.low_span(min(geo.numel[u], plan.record)) if plan.units[u].state != "ram" else 0
    weights = (geo.weights[u].span + low(u) for u, _ in units if plan.units[u].weights != "ram")
    n, _ = _records(geo, plan, [(u, n) for u, n in units if plan.units[u].state != "ram"])
    not_in_ram = (u for u, _ in units if plan.units[u].base != "ram")
    base = (geo.base[v].span for u in not_in_ram for v in (u, *geo.slices_of[u]))
    return max(0, geo.state_layout(n).span, *weights, *base)


def _sum_buffers(geo: Geometry, plan: Plan, units: Units) -> Iterable[Buffers]:
    """Buffers in which gradients are summed over micro-batches."""
    layouts = geo.gradients if plan.sums_wide else geo.weights
    if plan.accumulate:
        yield from (Buffers("gpu", "sum", layouts[u].span, n_units, geo.names[u]) for u, n_units in units)
        return
    tied = geo.cfg.tied  # then the head adds to the embedding's gradient too
    slots = 1 if plan.hosts == 1 else SUMS  # sums leave while the next unit's begins
    yield Buffers("gpu", "sum", max((layouts[u].span for u, _ in units if u >= tied), default=0), slots)
    yield Buffers("gpu", "sum of embedding", max((layouts[u].span for u, _ in units if u < tied), default=0))


def _optimizer_buffers(geo: Geometry, plan: Plan, units: Units) -> Iterable[Buffers]:
    for u, n_units in units:
        if plan.units[u].state == "gpu":
            yield Buffers("gpu", "rounded", geo.weights[u].span, n_units, geo.names[u])
        if plan.units[u].state != "ssd":
            yield Buffers(plan.units[u].state, "state", geo.state_span(u, plan.record), n_units, geo.names[u])
    on_cpu = [(u, n) for u, n in units if plan.units[u].state != "gpu" and geo.numel[u]]
    if on_cpu and plan.last_host:
        pieces = {geo.pieces(u, plan.piece) for u, _ in on_cpu}
        largest = max(extent(piece)[1] for unit in pieces for piece in unit)
        count = max(sum(n for _, n in on_cpu), *map(len, pieces))
        yield Buffers("gpu", "rounded pool", round_up(largest * ITEMSIZE[plan.dtype]), min(OUT_SLOTS, count))
    for kind, (size, count) in _by_class(geo, on_cpu, geo.share_spans(plan.record)).items():
        spilled = sum(n for u, n in on_cpu if plan.spilled(u) and geo.size_class(u) == kind)
        passing = count if plan.mode == "backward" else spilled
        yield Buffers("ram", "gradient", size, count - passing + min(plan.ram_window, passing), kind)
    if plan.hosts > 1:
        yield from _shared_buffers(geo, plan, on_cpu)
    n, count = _records(geo, plan, [(u, n) for u, n in units if plan.spilled(u)])
    size = round_up(n * ITEMSIZE[plan.dtype]) + 4096  # a record begins and ends within a drive's block
    yield Buffers("ram", "gradient pool", size, min(GRADIENT_SLOTS, count))
    n, count = _records(geo, plan, [(u, n) for u, n in units if plan.units[u].update == "gpu"])
    size = geo.state_layout(n).span + round_up(n * ITEMSIZE[plan.dtype])
    yield Buffers("gpu", "state pool", size, min(plan.stream_slots, count))
    n, count = _records(geo, plan, [(u, n) for u, n in units if plan.units[u].state == "ssd"])
    yield Buffers("ram", "state pool", geo.state_layout(n).span, min(plan.state_slots, count))


def _shared_buffers(geo: Geometry, plan: Plan, units: Units) -> Iterable[Buffers]:
    """Buffers for gradients between hosts: pieces of sums and, on the last host, whole gradients until other hosts have
    their shares.
    """
    pieces = [piece for u, _ in units for piece in geo.pieces(u, plan.sum_piece)]
    largest = max((extent(piece)[1] for piece in pieces), default=0)
    tied = geo.cfg.tied  # then the last host hands a sum to the first
    for direction, needed in (("in", plan.host > 0 or tied), ("out", not plan.last_host or tied)):
        yield Buffers("ram", "sums", round_up(4 * largest), SUM_SLOTS * needed, direction)
    for kind, (size, count) in _by_class(geo, units, _spans(geo.weights)).items():
        yield Buffers("ram", "whole gradient", size, min(WHOLE_SLOTS, count) * plan.last_host, kind)


def _records(geo: Geometry, plan: Plan, units: Units) -> tuple[int, int]:
    """(parameters of the largest record, number of records) of these units."""
    largest = max((geo.numel[u] for u, _ in units), default=0)
    return min(largest, plan.record), sum(n * len(geo.records(u, plan.record)) for u, n in units)


def _activation_buffers(geo: Geometry, plan: Plan, units: Units) -> Iterable[Buffers]:
    x, n = geo.x_bytes(plan.tokens), plan.pass_size
    via_ram = plan.between == "ram"
    inner = [(u, n_units) for u, n_units in units if u]  # the embedding's input is token ids
    placement: Counter[Tier] = Counter()  # of inputs
    for u, n_units in inner if geo.cfg.trains else ():
        placement[plan.units[u].x] += n_units * n
    leaving = plan.swap_slots * (plan.gpus > 1 and not via_ram)  # for another GPU, by peer copies
    yield Buffers("gpu", "x", x, placement["gpu"])
    if placement["ram"] or placement["ssd"] or plan.gpus > 1 or not geo.cfg.trains:
        yield Buffers("gpu", "x pool", x, leaving + plan.swap_slots + (plan.swap_slots if via_ram else n))
        yield Buffers("ram", "x", x, placement["ram"])
    if geo.cfg.trains:
        yield Buffers("gpu", "dx pool", x, leaving + (2 * plan.swap_slots if via_ram else n + 1))
    yield Buffers("ram", "dx", x, n if via_ram else 0)
    yield Buffers("gpu", "passed pool", round_up(geo.passed_layout(plan.tokens).nbytes), n * bool(geo.slices))
    spans = {
        tier: [geo.saved_layout(u, plan.units[u].names(tier), plan.tokens).span for u, _ in inner] for tier in SAVED
    }
    for (u, n_units), on_gpu, in_ram in zip(inner, spans["gpu"], spans["ram"], strict=True):
        yield Buffers("gpu", "saved", on_gpu, n * n_units, geo.names[u])
        yield Buffers("ram", "saved", in_ram, n * n_units, geo.names[u])
    for tier in ("peer", "ram", "ssd"):
        yield Buffers("gpu", "saved pool", max(spans[tier], default=0), plan.swap_slots, tier)
    if placement["ssd"] or any(spans["ssd"]):
        yield Buffers("ram", "staging pool", max(x, *spans["ssd"]), 2 * plan.swap_slots)


def workspace(geo: Geometry, plan: Plan, gpu: int = 0) -> int:
    """Bytes that a GPU needs outside the buffers: its largest unit's temporaries with 2 % for fragmentation, and
    inputs. Rotary tables, 4 bytes for each position and rotated feature, are within the reserve (host.GPU_RESERVE).
    """
    itemsize = 4 if plan.sums_wide else ITEMSIZE[plan.dtype]
    first = {geo.kinds[u]: u for u in range(geo.head) if plan.units[u].gpu == gpu}.values()  # by kind
    needs = [geo.workspace_bytes(u, plan.tokens, itemsize) for u in first]
    if gpu == plan.units[geo.head].gpu:
        needs.append(geo.workspace_bytes(geo.head, plan.tokens, itemsize))
    temporaries = max(needs, default=0)
    taught = geo.cfg.teaching.nbytes if geo.cfg.teaching else 0
    inputs = plan.tokens * plan.n_micro * (48 + taught)
    return round_up(int(temporaries * 1.02)) + inputs


def fullest(on_gpu: Sequence[int], limits: Limits) -> int:
    """The GPU with the fewest bytes left. `on_gpu`: bytes that each holds."""
    return max(range(len(on_gpu)), key=lambda gpu: on_gpu[gpu] - limits.gpu_bytes(gpu))


def usage(geo: Geometry, plan: Plan, less: Sequence[int] = ()) -> dict[str, int]:
    """Bytes of buffers and workspace: "gpu" of the fullest GPU, "ram" of RAM. `less`: as of Limits, is added to a
    GPU's bytes.
    """
    on_gpu, ram = each_usage(geo, plan)
    return {"gpu": max(map(sum, zip(on_gpu, less or [0] * len(on_gpu), strict=False))), "ram": ram}


def each_usage(geo: Geometry, plan: Plan) -> tuple[list[int], int]:
    """Bytes of each GPU, and of RAM."""
    on_gpu, ram = [workspace(geo, plan, gpu) for gpu in range(plan.gpus)], 0
    for b in _buffers(geo, plan, _unit_counts(geo, plan)):
        if b.tier == "gpu":
            on_gpu[b.gpu] += b.nbytes * b.count
        else:
            ram += b.nbytes * b.count
    return on_gpu, ram


@lru_cache(CACHED)
def fits(geo: Geometry, plan: Plan, limits: Limits) -> bool:
    """Whether the plan's buffers and workspace are within the limits."""
    return not limits.missing(usage(geo, plan, limits.less))

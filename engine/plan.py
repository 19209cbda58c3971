"""The plan: every decision of a run as frozen data, and every buffer that follows from it. Pure; no torch.

What the engine allocates is exactly what `buffers` lists, so a plan's memory is known to the byte before the run, and
a plan that cannot fit is refused with its numbers before anything is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple

from trireme.models import shapes
from trireme.models.config import InputError, ModelConfig
from trireme.storage.layout import ITEMSIZE, Layout, pack, rank, round_up, sequential

TIERS = ("gpu", "host", "ssd")
MODES = ("forward", "backward", "serial")
STRETCH = 1 << 25  # most elements of a gradient that are rounded, and their squares summed, at once
GRADIENT_SLOTS = 2  # host slots in which gradients come back from the SSD, a record in each
ENDS = ("embed", "head", "ends")  # size classes of which one unit at a time is in use
OUT_SLOTS = 2  # slots through which pieces of rounded gradients leave the GPU: one is filled, one emptied


class DoesNotFit(Exception):
    """The run cannot fit in the given limits; the message has the numbers and the way out. Exit code 3.

    `need`: bytes of gpu and host that the smallest plan takes, where that is what does not fit.
    """

    def __init__(self, message: str, need: dict[str, int] | None = None):
        super().__init__(message)
        self.need = need or {}


@dataclass(frozen=True)
class UnitPlan:
    """Where one unit's pieces live. `state` "gpu" means that its weights and its update are there too."""

    weights: str = "gpu"  # home of the compute copy (hi)
    state: str = "gpu"  # home of lo, m, v
    update: str = "cpu"  # where a state in RAM is updated: "gpu" streams it there and back
    resident: bool = False  # weights from host or ssd stay on the GPU, refreshed once a step
    x: str = "gpu"  # the unit's input, for every micro-batch
    saved: tuple[tuple[str, str], ...] = ()  # (name, tier) of what forward keeps; absent names are recomputed

    def names(self, tier: str) -> tuple[str, ...]:
        return tuple(name for name, t in self.saved if t == tier)


@dataclass(frozen=True)
class Plan:
    """Every decision of a run. `tokens` and `n_micro` are maxima; a step may be smaller."""

    units: tuple[UnitPlan, ...]  # embedding, blocks or, with `halves`, their halves, head
    tokens: int  # most tokens of a micro-batch
    n_micro: int  # most micro-batches of a step
    dtype: str = "BF16"  # compute dtype: BF16 or F32
    mode: str = "forward"  # when a unit on the CPU is updated: see optimizer.py
    adam_bits: int = 32  # of each moment: 32, 16 or 8
    late_moments: tuple[str, ...] = ()  # tiers whose moments are written under backward: see optimizer.py
    window: int = 2  # slots of a weight ring on the GPU: one in use, the others prefetched
    host_window: int = 2  # slots of host rings: of SSD-home weights, and of gradients where updates do not wait
    state_slots: int = 4  # host slots that SSD-home optimizer records pass through
    record: int = 1 << 24  # parameters of one optimizer record
    stream_slots: int = 3  # slots of the GPU ring that records updated there pass through
    piece: int = 1 << 40  # elements of a rounded gradient that leave the GPU at once; a unit has as many or fewer
    swap_slots: int = 2  # slots of each ring that swapped activations pass through
    between: str = "gpu"  # where what a unit leaves for the next waits: "host" in steps of very many micro-batches
    gradients: str = "host"  # where those of units whose state is on the SSD wait for their norm, if need be "ssd"
    halves: bool = False  # units are halves of blocks, attention and MLP: where whole blocks do not fit

    def __post_init__(self):
        for u, unit in enumerate(self.units):
            if (unit.weights == "gpu") != (unit.state == "gpu"):
                raise InputError(
                    f"plan: unit {u} has weights on {unit.weights} and state on {unit.state}; gpu is for both"
                )
            if unit.update == "gpu" and (unit.weights, unit.state, unit.resident) != ("host", "host", False):
                raise InputError(f"plan: unit {u} is to be updated on the gpu, so weights and state must be in host")
            for tier in (unit.weights, unit.state, unit.x, *(t for _, t in unit.saved)):
                if tier not in TIERS:
                    raise InputError(f"plan: unit {u} names the tier {tier!r}; there are {', '.join(TIERS)}")
        if self.mode == "backward" and any(u.update == "gpu" for u in self.units):
            raise InputError("plan: updates streamed through the gpu need mode forward or serial")
        if self.late_moments and (self.mode, self.adam_bits) != ("forward", 32):
            raise InputError("plan: late_moments needs mode forward and adam_bits 32")
        if not {"host", "ssd"} >= set(self.late_moments):
            raise InputError(f"plan: late_moments {', '.join(self.late_moments)}: there are host and ssd")
        if self.between not in ("gpu", "host"):
            raise InputError(f"plan: between {self.between!r} is neither gpu nor host")
        if self.gradients not in ("host", "ssd") or (self.gradients, self.mode) == ("ssd", "backward"):
            raise InputError(f"plan: gradients {self.gradients!r}: there are host and, unless mode is backward, ssd")
        if self.mode not in MODES:
            raise InputError(f"plan: mode {self.mode!r} is not one of {', '.join(MODES)}")

    def cut(self, cfg: ModelConfig) -> ModelConfig:
        """`cfg` with units as this plan's are."""
        return replace(cfg, halves=self.halves)

    @property
    def ahead(self) -> int:
        """Units on their way to the GPU beside the one in use: attention and MLP have a ring each."""
        return self.window * (2 if self.halves else 1) - 1

    def uses(self, tier: str) -> bool:
        """Whether anything has its home in `tier`."""
        return any(tier in (u.weights, u.state, u.x, *(t for _, t in u.saved)) for u in self.units)

    def spilled(self, u: int) -> bool:
        """Whether unit u's gradient waits on the SSD for its update."""
        return self.gradients == "ssd" and self.units[u].state == "ssd"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def of(data: dict) -> Plan:
        """A plan from what `asdict` makes of one."""
        units = [UnitPlan(**{**u, "saved": tuple(tuple(s) for s in u.get("saved", ()))}) for u in data["units"]]
        return Plan(**{**data, "units": tuple(units), "late_moments": tuple(data.get("late_moments", ()))})

    @staticmethod
    def load(path: Path) -> Plan:
        """A plan from a JSON or YAML file as `save` writes it. Raises InputError."""
        import yaml

        try:
            return Plan.of(yaml.safe_load(path.read_text()))
        except (OSError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
            raise InputError(f"{path}: not a plan: {error}") from error


@dataclass(frozen=True)
class Buffer:
    """One line of the memory table: `count` equal buffers of `nbytes`. `key` is how the engine asks for it."""

    tier: str
    key: str
    nbytes: int
    count: int = 1


class Stretch(NamedTuple):
    """Elements [start, stop) of a unit's gradient, and the place of the sum of their squares among the unit's."""

    start: int
    stop: int
    place: int


class Geometry:
    """Sizes that follow from a model, how it is cut and a compute dtype, for every unit: layouts, spans, records."""

    @staticmethod
    def of(cfg: ModelConfig, plan: Plan) -> Geometry:
        return Geometry(plan.cut(cfg), plan.dtype, plan.adam_bits)

    def __init__(self, cfg: ModelConfig, dtype: str, adam_bits: int = 32):
        self.cfg, self.dtype, self.adam_bits = cfg, dtype, adam_bits
        self.names = shapes.unit_names(cfg)
        self.n_units = len(self.names)
        self.kinds = [shapes.kind(cfg, u) for u in range(self.n_units)]
        self.head = self.n_units - 1
        self._saved: dict[tuple[frozenset[str], int], Layout] = {}
        self._state: dict[int, Layout] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._cut: dict[str, tuple[Stretch, ...]] = {}
        self._pieces: dict[tuple[str, int], tuple[tuple[Stretch, ...], ...]] = {}
        self._records: dict[tuple[int, int], list[tuple[int, int]]] = {}

    @cached_property
    def weights(self) -> tuple[Layout, ...]:
        """The layout of each unit's weights, gradients in the compute dtype included."""
        return tuple(pack(shapes.weight_groups(self.cfg, u), self.dtype) for u in range(self.n_units))

    @cached_property
    def gradients(self) -> tuple[Layout, ...]:
        """The layout of each unit's fp32 gradient accumulators: the same tensors in the same order as the weights."""
        return tuple(sequential([(t.name, "F32", t.shape) for t in layout.tensors]) for layout in self.weights)

    @cached_property
    def numel(self) -> tuple[int, ...]:
        return tuple(sum(t.numel for t in layout.tensors) for layout in self.weights)

    @cached_property
    def n_decay(self) -> tuple[int, ...]:
        """Elements of each unit that weight decay applies to: the matrices, which come first."""
        return tuple(sum(t.numel for t in layout.tensors if len(t.shape) > 1) for layout in self.weights)

    def _stretches(self, u: int) -> tuple[Stretch, ...]:
        """A unit's stretches in the order of its weights. Sizes and places, and so the bits of the gradients' norm,
        follow from the model and its dtype alone: matrices and vectors of each half of a block are cut by themselves.
        """
        kind = self.kinds[u]
        if kind not in self._cut:
            size: Counter[tuple[int, int]] = Counter()
            for half, groups in enumerate(shapes.weight_parts(self.cfg, u)):
                for group in groups:
                    size[half, rank(group, self.dtype)] += sum(prod(shape) for _, shape in group)
            in_memory = sorted(size, key=lambda key: key[::-1])
            ends = dict(zip(in_memory, accumulate(size[key] for key in in_memory), strict=True))
            stretches: list[Stretch] = []
            for key in sorted(size):
                for start in range(ends[key] - size[key], ends[key], STRETCH):
                    stretches.append(Stretch(start, min(start + STRETCH, ends[key]), len(stretches)))
            self._cut[kind] = tuple(sorted(stretches))
        return self._cut[kind]

    @cached_property
    def first_stretch(self) -> tuple[int, ...]:
        """How many stretches come before each unit's, and at the end how many there are."""
        return tuple(accumulate((len(self._stretches(u)) for u in range(self.n_units)), initial=0))

    def pieces(self, u: int, most: int) -> tuple[tuple[Stretch, ...], ...]:
        """A unit's stretches, as many neighbours together as have no more than `most` elements; at least one."""
        kind = self.kinds[u]
        if (kind, most) not in self._pieces:
            pieces: list[list[Stretch]] = []
            for stretch in self._stretches(u):
                if pieces and stretch.stop - pieces[-1][0].start <= most:
                    pieces[-1].append(stretch)
                else:
                    pieces.append([stretch])
            self._pieces[kind, most] = tuple(map(tuple, pieces))
        return self._pieces[kind, most]

    def half_piece(self) -> int:
        """Elements of a piece of which the largest unit between the ends has two."""
        u = max(range(1, self.head), key=self.numel.__getitem__)
        return min(max(stretch.stop, self.numel[u] - stretch.stop) for stretch in self._stretches(u))

    def size_class(self, u: int) -> str:
        """Units of one size class share rings. The two ends follow each other, so they share one slot unless tied."""
        if 0 < u < self.head or self.cfg.tied:
            return self.kinds[u]
        return "ends"

    def records(self, u: int, record: int) -> list[tuple[int, int]]:
        """[start, stop) element ranges of a unit's optimizer records."""
        n = self.numel[u]
        if (n, record) not in self._records:
            self._records[n, record] = [(a, min(a + record, n)) for a in range(0, n, record)]
        return self._records[n, record]

    def record_sizes(self, u: int, record: int) -> list[int]:
        return [b - a for a, b in self.records(u, record)]

    def state_layout(self, n: int) -> Layout:
        """Optimizer state of one record of n parameters: its parts, one after another."""
        if n not in self._state:
            parts = self.state_parts(n).values()
            tensors = (replace(t, offset=first + t.offset) for first, layout in parts for t in layout.tensors)
            self._state[n] = Layout(tuple(tensors))
        return self._state[n]

    def state_parts(self, n: int) -> dict[str, tuple[int, Layout]]:
        """part -> (its first byte, its layout): m and v; and lo where the master is split, a shard of its own.

        8-bit moments have a floor for each 256 of them (kernels/moments.py).
        """
        if self.adam_bits == 8:
            floors = [(name, "I16", (-(-n // 256),)) for name in ("m_floor", "v_floor")]
            moments = sequential([*floors, ("m", "U8", (n,)), ("v", "U8", (n,))])
        else:
            dtype = {32: "F32", 16: "BF16"}[self.adam_bits]
            moments = sequential([("m", dtype, (n,)), ("v", dtype, (n,))])
        low = {"low": (moments.span, sequential([("lo", "I16", (n,))]))} if self.dtype == "BF16" else {}
        return {"moments": (0, moments)} | low

    def state_span(self, u: int, record: int) -> int:
        """Bytes of a unit's whole optimizer state, each record rounded up to 4,096."""
        return sum(self.state_layout(n).span for n in self.record_sizes(u, record))

    def saved_names(self, u: int) -> tuple[str, ...]:
        """What unit u, a block or half of one, can save for its backward."""
        kind = self.kinds[u]
        if kind not in self._names:
            self._names[kind] = tuple(shapes.saved_shapes(self.cfg, 1, kind))
        return self._names[kind]

    def saved_layout(self, names: Iterable[str], tokens: int) -> Layout:
        """Layout of some of a block's saved tensors for a micro-batch of `tokens`."""
        wanted = frozenset(names)
        if (wanted, tokens) not in self._saved:
            found = shapes.saved_shapes(self.cfg, tokens)
            specs = [(n, self.dtype if d == "compute" else d, s) for n, (s, d) in found.items() if n in wanted]
            self._saved[wanted, tokens] = sequential(specs, align=256)  # the allocator's: cuBLAS chooses by alignment
        return self._saved[wanted, tokens]

    def x_bytes(self, tokens: int) -> int:
        return round_up(tokens * self.cfg.width * ITEMSIZE[self.dtype])


def buffers(geo: Geometry, plan: Plan) -> list[Buffer]:
    """Every buffer that the engine makes for this plan, by tier and key."""
    return [
        b
        for b in (*_weight_buffers(geo, plan), *_optimizer_buffers(geo, plan), *_activation_buffers(geo, plan))
        if b.count and b.nbytes
    ]


def _by_class(geo: Geometry, units: Iterable[int], size: Callable[[int], int]) -> dict[str, tuple[int, int]]:
    """size class -> (largest size, number of units) over `units`."""
    found: dict[str, tuple[int, int]] = {}
    for u in units:
        kind = geo.size_class(u)
        biggest, count = found.get(kind, (0, 0))
        found[kind] = (max(biggest, size(u)), count + 1)
    return found


def _weight_buffers(geo: Geometry, plan: Plan) -> Iterable[Buffer]:
    span = lambda u: geo.weights[u].span  # noqa: E731
    everyone = range(geo.n_units)
    for u in everyone:
        unit = plan.units[u]
        if unit.weights == "gpu" or unit.resident:
            yield Buffer("gpu", f"weights {geo.names[u]}", span(u))
        if unit.weights == "host":
            yield Buffer("host", f"weights {geo.names[u]}", span(u))
    streamed = [u for u in everyone if plan.units[u].weights != "gpu" and not plan.units[u].resident]
    for kind, (size, count) in _by_class(geo, streamed, span).items():
        yield Buffer("gpu", f"weight ring {kind}", size, 1 if kind in ENDS else min(plan.window, count))
    from_ssd = [u for u in everyone if plan.units[u].weights == "ssd"]
    yield Buffer("host", "staging", _staging(geo, plan))
    for kind, (size, count) in _by_class(geo, from_ssd, span).items():
        yield Buffer("host", f"weight ring {kind}", size, 1 if kind in ENDS else min(plan.host_window, count))


def _staging(geo: Geometry, plan: Plan) -> int:
    """Bytes of the host buffer through which pieces not at home in RAM are loaded and saved between steps."""
    weights = (geo.weights[u].span for u, unit in enumerate(plan.units) if unit.weights != "host")
    largest = max((geo.numel[u] for u, unit in enumerate(plan.units) if unit.state != "host"), default=0)
    return max(0, geo.state_layout(min(largest, plan.record)).span, *weights)


def _optimizer_buffers(geo: Geometry, plan: Plan) -> Iterable[Buffer]:
    everyone = range(geo.n_units)
    wide = geo.gradients if plan.n_micro > 1 else geo.weights
    tied = geo.cfg.tied  # then the embedding's gradient is added to from the head on; all others come one by one
    yield Buffer("gpu", "gradient", max(layout.span for layout in wide[tied:]))
    yield Buffer("gpu", "gradient embed", wide[0].span if tied else 0)
    for u in everyone:
        if plan.units[u].state == "gpu":
            yield Buffer("gpu", f"gradient out {geo.names[u]}", geo.weights[u].span)
        if plan.units[u].state != "ssd":
            yield Buffer(plan.units[u].state, f"state {geo.names[u]}", geo.state_span(u, plan.record))
    on_cpu = [u for u in everyone if plan.units[u].state != "gpu"]
    if on_cpu:
        pieces = {geo.kinds[u]: geo.pieces(u, plan.piece) for u in on_cpu}.values()
        largest = max(piece[-1].stop - piece[0].start for unit in pieces for piece in unit)
        count = max(len(on_cpu), *map(len, pieces))
        yield Buffer("gpu", "gradient out", round_up(largest * ITEMSIZE[plan.dtype]), min(OUT_SLOTS, count))
    for kind, (size, count) in _by_class(geo, on_cpu, lambda u: geo.weights[u].span).items():
        spilled = sum(plan.spilled(u) and geo.size_class(u) == kind for u in on_cpu)
        passing = count if plan.mode == "backward" else spilled
        yield Buffer("host", f"gradient {kind}", size, count - passing + min(plan.host_window, passing))
    spilled = [n for u in everyone if plan.spilled(u) for n in geo.record_sizes(u, plan.record)]
    if spilled:  # a record begins and ends within a block of the drive
        size = round_up(max(spilled) * ITEMSIZE[plan.dtype]) + 4096
        yield Buffer("host", "gradient ring", size, min(GRADIENT_SLOTS, len(spilled)))
    streamed = [n for u in everyone if plan.units[u].update == "gpu" for n in geo.record_sizes(u, plan.record)]
    if streamed:
        span = geo.state_layout(max(streamed)).span + round_up(max(streamed) * ITEMSIZE[plan.dtype])
        yield Buffer("gpu", "stream ring", span, min(plan.stream_slots, len(streamed)))
    from_ssd = [n for u in everyone if plan.units[u].state == "ssd" for n in geo.record_sizes(u, plan.record)]
    if from_ssd:
        yield Buffer("host", "state ring", geo.state_layout(max(from_ssd)).span, min(plan.state_slots, len(from_ssd)))


def _activation_buffers(geo: Geometry, plan: Plan) -> Iterable[Buffer]:
    x, n = geo.x_bytes(plan.tokens), plan.n_micro
    away = plan.between == "host"
    inner = plan.units[1:]  # the embedding's input is the token ids
    yield Buffer("gpu", "x", x, n * sum(u.x == "gpu" for u in inner))
    if any(u.x != "gpu" for u in inner):
        yield Buffer("gpu", "x ring", x, plan.swap_slots + (plan.swap_slots if away else n))
        yield Buffer("host", "x", x, n * sum(u.x == "host" for u in inner))
    yield Buffer("gpu", "dx ring", x, 2 * plan.swap_slots if away else n + 1)
    yield Buffer("host", "dx", x, n if away else 0)
    for tier in TIERS:
        spans = [geo.saved_layout(u.names(tier), plan.tokens).span for u in inner]
        if not any(spans):
            continue
        if tier == "gpu":
            for u, span in enumerate(spans, 1):
                yield Buffer("gpu", f"saved {geo.names[u]}", span, n)
        else:
            yield Buffer("gpu", f"swap ring {tier}", max(spans), plan.swap_slots)
            for u, span in enumerate(spans, 1):
                yield Buffer("host", f"saved {geo.names[u]}", span if tier == "host" else 0, n)
    if any("ssd" in (u.x, *(t for _, t in u.saved)) for u in inner):
        largest = max(x, *(geo.saved_layout(u.names("ssd"), plan.tokens).span for u in inner))
        yield Buffer("host", "swap ring ssd", largest, 2 * plan.swap_slots)


def workspace(geo: Geometry, plan: Plan) -> int:
    """GPU bytes beside the named buffers: the largest unit's temporaries, the rotary table, inputs, fragmentation."""
    wide = 4 if plan.n_micro > 1 else ITEMSIZE[plan.dtype]
    each = {geo.kinds[u]: u for u in range(geo.n_units)}.values()  # a unit of each kind
    temporaries = max(shapes.workspace_bytes(geo.cfg, u, plan.tokens, ITEMSIZE[plan.dtype], wide) for u in each)
    inputs = plan.tokens * plan.n_micro * 48
    return round_up(int(temporaries * 1.02)) + inputs


def usage(geo: Geometry, plan: Plan) -> dict[str, int]:
    """Bytes in each of gpu and host: all buffers, and on the GPU the workspace."""
    total = {"gpu": workspace(geo, plan), "host": 0}
    for b in buffers(geo, plan):
        total[b.tier] += b.nbytes * b.count
    return total


def fits(geo: Geometry, plan: Plan, limits: dict[str, int]) -> bool:
    total = usage(geo, plan)
    return all(total[tier] <= limits[tier] for tier in ("gpu", "host"))

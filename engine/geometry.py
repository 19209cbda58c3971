"""Sizes and offsets of a model's tensors, gradients, optimizer records and activations. Pure functions of model and
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, wraps
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

from trireme.engine.plan import Plan
from trireme.models.config import ModelConfig
from trireme.models.sizes import narrow, shapes
from trireme.models.sizes.measure import rounding, temporaries
from trireme.storage.layout import ALIGN, ITEMSIZE, Layout, pack, rank, round_up, sequential

Part = Literal["all", "weights", "moments"]  # of an update
ADAM_BYTES = 28  # RAM traffic of an fp32 AdamW a parameter: gradient, master, moments, weights
# RAM traffic by part, scaled to times on a Xeon: 9.9 and 9.1 G parameters/s, all 7.1.
PART_BYTES: dict[Part, int] = {"all": ADAM_BYTES, "weights": 20, "moments": 22}
GPU_BYTES = 26  # the same on the GPU
SLICE = "slice"  # size class of slices of experts
STRETCH = 1 << 25  # most elements rounded and squared at once


Value = TypeVar("Value")


class Stretch(NamedTuple):
    """Elements [start, stop) of a unit's gradient whose squares are summed together; `place`: the index of that sum."""

    start: int
    stop: int
    place: int


def extent(piece: Sequence[Stretch]) -> tuple[int, int]:
    """(first element, number of elements) of consecutive stretches."""
    return piece[0].start, piece[-1].stop - piece[0].start


def cached_method(method: Callable[..., Value]) -> Callable[..., Value]:
    """Caches the results of a method, by its arguments, in each object."""

    @wraps(method)
    def call(self: Geometry, *args: Any) -> Value:
        key = method.__name__, args
        if key not in self.cache:
            self.cache[key] = method(self, *args)
        value: Value = self.cache[key]
        return value

    return call


class Geometry:
    """Sizes by unit: 0 the embedding, then blocks or sub-layers, last the head.

    A unit of frozen weights is a unit or, with a number from `n_units` on, a slice of a unit's experts.
    """

    @staticmethod
    def of(cfg: ModelConfig, plan: Plan) -> Geometry:
        """The geometry of a model with a plan's units, dtype, moments and hosts."""
        return geometry(plan.cut(cfg), plan.dtype, plan.adam_bits, plan.host, plan.hosts)

    def __init__(self, cfg: ModelConfig, dtype: str, adam_bits: int = 32, host: int = 0, hosts: int = 1):
        self.cfg, self.dtype, self.adam_bits, self.host, self.hosts = cfg, dtype, adam_bits, host, hosts
        self.names = shapes.unit_names(cfg)
        self.n_units = len(self.names)
        self.kinds = [shapes.kind(cfg, u) for u in range(self.n_units)]
        self.head = self.n_units - 1
        self.inner_kinds = tuple(dict.fromkeys(self.kinds[1:-1]))
        self.cache: dict[tuple[str, tuple[Any, ...]], Any] = {}

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each unit the first unit that is like it."""
        return shapes.representatives(self.cfg)

    @cached_property
    def slices(self) -> tuple[tuple[int, range], ...]:
        """The slices of all units in order: (unit, some of its frozen experts). A slice is a unit of frozen weights,
        numbered after the units of the model.
        """
        return tuple((u, experts) for u in range(self.n_units) for experts in narrow.slices(self.cfg, u))

    @cached_property
    def slices_of(self) -> tuple[range, ...]:
        """For each unit the numbers of its slices."""
        counts = Counter(u for u, _ in self.slices)
        ends = accumulate((counts[u] for u in range(self.n_units)), initial=self.n_units)
        return tuple(range(a, b) for a, b in pairwise(ends))

    def unit_of(self, v: int) -> int:
        """The unit of the model that a unit of frozen weights belongs to."""
        return v if v < self.n_units else self.slices[v - self.n_units][0]

    def experts_of(self, v: int) -> range:
        """The experts of a slice."""
        return self.slices[v - self.n_units][1]

    def share_of_slice(self, v: int) -> float:
        """The share of its layer's experts that a slice has."""
        assert self.cfg.experts is not None
        return len(self.experts_of(v)) / self.cfg.experts.count

    @cached_property
    def base_names(self) -> tuple[str, ...]:
        """Names of the units of frozen weights."""
        names = (f"{name} rest" if slices else name for name, slices in zip(self.names, self.slices_of, strict=True))
        return *names, *(f"{self.names[u]} experts {experts.start}-{experts.stop - 1}" for u, experts in self.slices)

    @cached_property
    def base_bytes(self) -> tuple[int, ...]:
        """Bytes of each unit's frozen weights, its slices included."""
        return tuple(sum(self.base[v].span for v in (u, *slices)) for u, slices in enumerate(self.slices_of))

    @cached_property
    def weights(self) -> tuple[Layout, ...]:
        """Layouts of each unit's trained weights, in the compute dtype; its gradients have the same."""
        parts = (shapes.trained_parts(self.cfg, u) for u in range(self.n_units))
        return tuple(pack([group for part in unit for group in part], self.dtype) for unit in parts)

    @cached_property
    def base(self) -> tuple[Layout, ...]:
        """Layouts of the frozen weights of each unit, then of each slice. Matrices of fp8 matmuls are fp8 codes."""
        groups = [(u, narrow.base_groups(self.cfg, u)) for u in range(self.n_units)]
        groups += [(u, narrow.slice_groups(self.cfg, u, experts)) for u, experts in self.slices]
        return tuple(pack(parts, self.dtype, narrow.own_dtypes(self.cfg, u)) for u, parts in groups)

    @cached_property
    def decoded(self) -> tuple[Layout, ...]:
        """Layouts of what a pass makes from each unit's weights: decoded packed matrices, and fp8 codes."""
        parts = (narrow.derived_groups(self.cfg, u) for u in range(self.n_units))
        return tuple(pack(groups, self.dtype, dtypes) for groups, dtypes in parts)

    @cached_property
    def decode_bytes(self) -> tuple[tuple[int, int], ...]:
        """For each unit the bytes read and written to make them, (in forward, in backward)."""
        return tuple(map(self._decode_bytes, range(self.n_units)))

    def _decode_bytes(self, u: int) -> tuple[int, int]:
        """A trained matrix in fp8 is read twice, and in backward its codes are written in both orders. The codes of a
        frozen matrix are read, and written in the other order.
        """
        parts = narrow.packed_parts(self.cfg, u)
        sliced = tuple(name for ((name, _),) in narrow.sliced_groups(self.cfg, u))
        packed = sum(t.nbytes for t in self.base[u].tensors if t.name in parts and not t.name.startswith(sliced))
        packed += sum(t.nbytes for t in self.decoded[u].tensors if not t.name.endswith(narrow.FP8))
        code_bytes = Counter[str]()  # by their order
        for t in self.decoded[u].tensors:
            code_bytes.update({part: t.nbytes for part in narrow.FP8 if t.name.endswith(part)})
        packed = rounding(self.cfg, self.alike[u], ITEMSIZE[self.dtype]).moved or packed
        read = packed + 2 * ITEMSIZE[self.dtype] * code_bytes[narrow.ROWS]
        turned_bytes = 2 * (code_bytes[narrow.COLUMNS] - code_bytes[narrow.ROWS])  # of frozen ones
        forward = read + code_bytes[narrow.ROWS] + turned_bytes * self.cfg.names.in_out
        return forward, read + 2 * code_bytes[narrow.ROWS] + turned_bytes

    @cached_property
    def quantized(self) -> tuple[bool, ...]:
        """For each unit whether each pass makes something of its trained weights: codes, or sums with packed ones."""
        sums = bool(self.cfg.lora and self.cfg.lora.aware)
        return tuple(any(sums or t.name.endswith(narrow.ROWS) for t in layout.tensors) for layout in self.decoded)

    @cached_property
    def stored(self) -> tuple[Layout, ...]:
        """`weights` by the names that tensors have in a checkpoint; the bytes are the same."""
        return tuple(self._on_disk(layout, {}) for layout in self.weights)

    @cached_property
    def stored_base(self) -> tuple[Layout, ...]:
        """`base` by the names that tensors have in a checkpoint."""
        parts = [narrow.packed_parts(self.cfg, u) for u in range(self.n_units)]
        units = tuple(map(self._on_disk, self.base, parts))
        return units + tuple(
            self._slice_on_disk(v, parts[self.unit_of(v)]) for v in range(self.n_units, len(self.base))
        )

    def _on_disk(self, layout: Layout, parts: Mapping[str, narrow.PartOf]) -> Layout:
        """A layout by a checkpoint's names. `parts`: what packed matrices consist of there."""
        in_files = lambda t: parts[t.name].stored if t.name in parts else shapes.on_disk(self.cfg, t.name, t.shape)
        return sequential([(name, t.dtype, shape) for t in layout.tensors for name, shape in in_files(t)])

    def _slice_on_disk(self, v: int, parts: Mapping[str, narrow.PartOf]) -> Layout:
        """The same for a slice of experts."""
        u, experts = self.slices[v - self.n_units]
        of_all = {name: shape for group in shapes.frozen_groups(self.cfg, u) for name, shape in group}
        specs = list[tuple[str, str, tuple[int, ...]]]()
        for t in self.base[v].tensors:
            spec = parts[t.name].stored if t.name in parts else shapes.on_disk(self.cfg, t.name, of_all[t.name])
            specs += [(name, t.dtype, shape) for name, shape in narrow.slice_on_disk(self.cfg, spec, experts)]
        return sequential(specs)

    @cached_property
    def base_room(self) -> tuple[int, ...]:
        """Bytes to read each unit's frozen weights from a checkpoint's files, tensor by tensor in whole blocks of the
        drive.
        """
        room = dict[int, int]()
        for u in dict.fromkeys(self.alike):  # alike units have the same sizes by other names
            layout = self._on_disk(self.base[u], narrow.packed_parts(self.cfg, u))
            room[u] = layout.span + 2 * ALIGN * len(layout.tensors)
        slice_room = dict[tuple[int, range], int]()
        for v, (u, experts) in enumerate(self.slices, self.n_units):
            if (self.alike[u], experts) not in slice_room:
                layout = self._slice_on_disk(v, narrow.packed_parts(self.cfg, u))
                slice_room[self.alike[u], experts] = layout.span + 2 * ALIGN * len(layout.tensors)
        return *(room[u] for u in self.alike), *(slice_room[self.alike[u], experts] for u, experts in self.slices)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """For each unit the first unit of the same kind with as many trained and frozen bytes."""
        first = dict[tuple[str, int, int, int], int]()
        trained = (layout.nbytes for layout in self.weights)
        described = zip(self.kinds, trained, self.base_room[: self.n_units], self.base_bytes, strict=True)
        return tuple(first.setdefault(size, u) for u, size in enumerate(described))

    @cached_property
    def gradients(self) -> tuple[Layout, ...]:
        """Layouts in which each unit's gradients are summed, in fp32."""
        return tuple(sequential([(t.name, "F32", t.shape) for t in layout.tensors]) for layout in self.weights)

    @cached_property
    def numel(self) -> tuple[int, ...]:
        """Elements of each unit that have a gradient: those of its trained weights, if the model trains."""
        return tuple(self.cfg.trains * sum(t.numel for t in layout.tensors) for layout in self.weights)

    @cached_property
    def n_decay(self) -> tuple[int, ...]:
        """Elements of each unit that have weight decay: those of matrices, which come first."""
        return tuple(sum(t.numel for t in layout.tensors if len(t.shape) > 1) for layout in self.weights)

    @cached_method
    def _stretches(self, u: int) -> tuple[Stretch, ...]:
        """The stretches of a unit and of those like it, in the order of its weights.

        Matrices and vectors of each sub-layer have stretches of their own, so the gradient norm is bitwise the same in
        every plan.
        """
        size: Counter[tuple[int, int]] = Counter()
        for half, groups in enumerate(shapes.trained_parts(self.cfg, u)):
            for group in groups:
                size[half, rank(group, self.dtype)] += sum(prod(shape) for _, shape in group)
        in_memory = sorted(size, key=lambda key: key[::-1])
        ends = dict(zip(in_memory, accumulate(size[key] for key in in_memory), strict=True))
        stretches: list[Stretch] = []
        for key in sorted(size):
            for start in range(ends[key] - size[key], ends[key], STRETCH):
                stretches.append(Stretch(start, min(start + STRETCH, ends[key]), len(stretches)))
        return tuple(sorted(stretches))

    @cached_property
    def first_stretch(self) -> tuple[int, ...]:
        """For each unit the number of stretches before it; last, the number of all."""
        return tuple(accumulate((len(self._stretches(u)) for u in self.alike), initial=0))

    def pieces(self, u: int, limit: int) -> tuple[tuple[Stretch, ...], ...]:
        """A unit's stretches in groups of up to `limit` elements; a longer stretch is a group."""
        return self._pieces(self.alike[u], limit)

    @cached_method
    def _pieces(self, u: int, limit: int) -> tuple[tuple[Stretch, ...], ...]:
        pieces: list[list[Stretch]] = []
        for stretch in self._stretches(u):
            if pieces and stretch.stop - pieces[-1][0].start <= limit:
                pieces[-1].append(stretch)
            else:
                pieces.append([stretch])
        return tuple(map(tuple, pieces))

    @property
    def ties_gradient(self) -> bool:
        """Whether the head and the embedding add to one gradient, that of a matrix which they share."""
        return self.cfg.tied and self.numel[0] > 0

    def half_piece(self) -> int:
        """The piece size that divides the largest block's gradient in two; if no block is trained, that of the largest
        end.
        """
        blocks = range(1, self.head) if any(self.numel[1 : self.head]) else (0, self.head)
        u = max(blocks, key=self.numel.__getitem__)
        stops = (stretch.stop for stretch in self._stretches(self.alike[u]))
        return min((max(stop, self.numel[u] - stop) for stop in stops), default=1)

    def size_class(self, u: int) -> str:
        """Name of the units that share pools of buffers. The ends of an untied model are a class of their own."""
        if u >= self.n_units:
            return SLICE
        if 0 < u < self.head or self.cfg.tied:
            return shapes.bare(self.kinds[u])
        return "ends"

    @cached_method
    def records(self, u: int, record: int) -> list[tuple[int, int]]:
        """Ranges [start, stop) of the elements in each of unit u's records; with several hosts, those of this host."""
        share = self.share(u, record)
        return [(a, b) for a, b in self.all_records(u, record) if share.start <= a < share.stop]

    def all_records(self, u: int, record: int) -> list[tuple[int, int]]:
        """The same of all hosts."""
        n = self.numel[u]
        return [(a, min(a + record, n)) for a in range(0, n, record)]

    def shares(self, u: int, record: int) -> list[slice]:
        """The elements that each host updates: whole records, about equally many."""
        n, hosts = self.numel[u], self.hosts
        ends = [min(n, -(-n // record) * h // hosts * record) for h in range(hosts + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def share(self, u: int, record: int) -> slice:
        """The elements that this host updates."""
        return self.shares(u, record)[self.host]

    def owner(self, u: int, element: int, record: int) -> int:
        """The host that updates an element."""
        return next(h for h, share in enumerate(self.shares(u, record)) if share.start <= element < share.stop)

    @cached_method
    def share_spans(self, record: int) -> tuple[int, ...]:
        """Bytes of this host's share of each unit's gradient; of one host, of the whole unit."""
        shares = (self.share(u, record) for u in range(self.n_units))
        parts = (round_up((s.stop - s.start) * ITEMSIZE[self.dtype]) for s in shares)
        return tuple(parts if self.hosts > 1 else (layout.span for layout in self.weights))

    def workspace_bytes(self, u: int, tokens: int, grad_itemsize: int) -> int:
        """Bytes of unit u's temporaries (measure.temporaries), in the compute dtype."""
        return self._workspace_bytes(self.alike[u], tokens, grad_itemsize)

    @cached_method
    def _workspace_bytes(self, u: int, tokens: int, grad_itemsize: int) -> int:
        return temporaries(self.cfg, u, tokens, ITEMSIZE[self.dtype], grad_itemsize)

    @cached_method
    def state_layout(self, n: int) -> Layout:
        """Layout of a record of n parameters: its parts, one after the other."""
        parts = self.state_parts(n).values()
        return Layout(tuple(replace(t, offset=first + t.offset) for first, layout in parts for t in layout.tensors))

    @cached_method
    def state_parts(self, n: int) -> dict[str, tuple[int, Layout]]:
        """Parts of a record of n parameters, each a shard in the store: name -> (first byte, layout).

        "moments": m and v; with 8 bits also a floor for each 256 of them (moments.py). "low": the low halves of
        the fp32 masters, unless the weights are fp32.
        """
        if self.adam_bits == 8:
            floors = [(name, "I16", (-(-n // 256),)) for name in ("m_floor", "v_floor")]
            moments = sequential([*floors, ("m", "U8", (n,)), ("v", "U8", (n,))])
        else:
            dtype = {32: "F32", 16: "BF16"}[self.adam_bits]
            moments = sequential([("m", dtype, (n,)), ("v", dtype, (n,))])
        low = {"low": (moments.span, sequential([("lo", "I16", (n,))]))} if self.dtype == "BF16" else {}
        return {"moments": (0, moments)} | low

    def low_span(self, n: int) -> int:
        """Bytes of the low halves of a record of n parameters."""
        parts = self.state_parts(n)
        return parts["low"][1].span if "low" in parts else 0

    @cached_method
    def state_span(self, u: int, record: int) -> int:
        """Bytes of unit u's records, each rounded up to 4,096."""
        return sum(self.state_layout(b - a).span for a, b in self.records(u, record))

    @cached_method
    def saved_names(self, kind: str) -> tuple[str, ...]:
        """Names of the tensors that a unit of this kind can save for backward."""
        return tuple(shapes.saved_shapes(self.cfg, 1, kind))

    def saved_layout(self, u: int, names: Iterable[str], tokens: int) -> Layout:
        """Layout of the tensors `names` that unit u saves for backward."""
        return self._saved_layout(self.kinds[u], frozenset(names), tokens)

    @cached_method
    def _saved_layout(self, kind: str, names: frozenset[str], tokens: int) -> Layout:
        saved = shapes.saved_shapes(self.cfg, tokens, kind)
        specs = [(n, self.dtype if d == "compute" else d, s) for n, (s, d) in saved.items() if n in names]
        return sequential(specs, align=256)  # as torch's: cuBLAS chooses by alignment

    @cached_method
    def passed_layout(self, tokens: int) -> Layout:
        """Layout of the sums that a slice of experts passes to the next."""
        passed = shapes.passed_shapes(self.cfg, tokens)
        return sequential([(n, d, s) for n, (s, d) in passed.items()], align=256)

    def x_bytes(self, tokens: int) -> int:
        """Bytes of the input of a unit, (tokens, D) in the compute dtype."""
        return round_up(tokens * self.cfg.width * ITEMSIZE[self.dtype])


@lru_cache(maxsize=4)
def geometry(cfg: ModelConfig, dtype: str, adam_bits: int, host: int = 0, hosts: int = 1) -> Geometry:
    """A Geometry, made once for equal arguments."""
    return Geometry(cfg, dtype, adam_bits, host, hosts)

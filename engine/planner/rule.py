"""The rule that makes the first plan: fill the GPU, then RAM, then the SSD; recompute the rest. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from trireme.engine.amounts import rounded_up
from trireme.engine.buffers import each_usage, fits, fullest, usage
from trireme.engine.geometry import STRETCH, Geometry, geometry
from trireme.engine.plan import TIERS, DoesNotFit, Limits, Mode, Plan, Shares, Tier, UnitPlan
from trireme.models.config import ModelConfig
from trireme.models.sizes import narrow, shapes
from trireme.storage.layout import ITEMSIZE

UPDATE_TOKENS = 50_000  # a step with a forward as long as the CPU's updates
GPU_UPDATES = 0.3  # of RAM-stored units: 14 B a parameter over PCIe against 19 B of DRAM
MARGIN = {"gpu": 1.0, "host": 1.25}  # of lacking memory: more RAM, larger records
LATE_TOKENS = 12_000  # a step from which moments are written apart from weights

SLICES = 2, 4, 8, 16, 32  # that are tried

Between = Literal["gpu", "host"]  # of x and dx
Waiting = Literal["host", "ssd"]  # of gradients, for the norm
Placement = Literal["auto", "gpu", "host", "ssd", "state-ssd"]
LOWEST: dict[Placement, tuple[Tier, Tier]] = {  # of weights, of state
    "auto": ("ssd", "ssd"),
    "gpu": ("gpu", "gpu"),
    "host": ("host", "host"),
    "ssd": ("ssd", "ssd"),
    "state-ssd": ("host", "ssd"),
}


class Cut(NamedTuple):
    """How finely a model is cut."""

    halves: bool = False  # half blocks as units
    at_once: int = 0  # packed experts that are decoded at a time; 0: all
    slices: int = 1  # units of weights that a layer's frozen experts come in

    @classmethod
    def of(cls, plan: Plan) -> Cut:
        return cls(plan.halves, plan.at_once, plan.slices)


@dataclass(frozen=True)
class Wanted:
    sizes: tuple[tuple[int, int], ...]  # (tokens of a micro-batch, micro-batches a step), largest first
    dtype: str = "BF16"
    mode: Mode = "forward"
    record: int = 1 << 24
    adam_bits: int = 32
    placement: Placement = "auto"  # or the tier of weights and state; "state-ssd": weights in RAM
    cuts: Sequence[Cut] = ()  # of which the first that fits is taken; none: all of the model
    on_cuda: bool = True
    document: int = 1024  # tokens of a usual document
    trained: float = 1.0  # share of tokens with a label
    compared: bool = False  # as Batch
    gpus: int = 1
    peers: bool = False  # GPUs copy to each other
    lending: bool = True  # and save in each other's memory
    shares: Shares | None = None
    hosts: int = 1  # plans are of the last, which needs most

    @classmethod
    def like(cls, plan: Plan, document: int, trained: float, compared: bool = False) -> Wanted:
        """The same step and records, for a GPU."""
        sizes = ((plan.tokens, plan.n_micro),)
        same = plan.dtype, plan.mode, plan.record, plan.adam_bits
        found = cls(sizes, *same, document=document, trained=trained, gpus=plan.gpus, hosts=plan.hosts)
        return replace(found, compared=compared)

    @property
    def free(self) -> bool:
        return self.placement == "auto"

    @property
    def lends(self) -> bool:
        return self.peers and self.lending

    @property
    def gpu_updates(self) -> bool:
        """Whether the device can update: CUDA has no kernel for narrow moments. Shares of hosts lie in RAM."""
        return self.hosts == 1 and (not self.on_cuda or self.adam_bits == 32)


@dataclass(frozen=True)
class Strategy:
    """Preferences where only time tells what is better. The default is the plain rule."""

    x: Tier = "gpu"  # first tier tried for blocks' inputs
    states: float | None = None  # share of units with state on the GPU before activations; None: by tokens a step
    resident: bool = False  # keep weights from RAM on the GPU before activations
    updates: float = GPU_UPDATES


def spread(n: int, k: int) -> frozenset[int]:
    """k of range(n), evenly spread."""
    return frozenset(i * n // k for i in range(k)) if k else frozenset()


def some(units: Sequence[int], k: int) -> frozenset[int]:
    """k of `units`, evenly spread."""
    return frozenset(units[i] for i in spread(len(units), k))


def largest(n: int, good: Callable[[int], bool]) -> int:
    """The largest k in 0..n with good(k), which is monotone; good(0) is taken as true."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def largest_fitting(geo: Geometry, limits: Limits, n: int, plan: Callable[[int], Plan]) -> Plan:
    """plan(k) of the largest k in 0..n that fits; plan(0) is taken to fit."""
    return plan(largest(n, lambda k: fits(geo, plan(k), limits)))


def all_cuts(cfg: ModelConfig, alone: bool = True, halves: Sequence[bool] = (False, True)) -> list[Cut]:
    """The coarsest first: whole blocks before half blocks, where the model has any, then packed experts decoded in
    slices, then frozen experts that come in slices, if one GPU is `alone`.
    """
    halves = halves[:1] if cfg.whole else halves
    found = [Cut(half) for half in halves]
    if at_once := narrow.slice_of(cfg):
        found.append(Cut(halves[-1], at_once))
    if alone and halves[-1] and narrow.may_be_sliced(cfg):
        found += [sliced(cfg, slices) for slices in SLICES]
    return found


def sliced(cfg: ModelConfig, slices: int) -> Cut:
    """Frozen experts in `slices`. A slice of packed ones is decoded as before, or whole."""
    assert cfg.experts is not None
    slices = min(slices, cfg.experts.count)
    return Cut(True, min(narrow.slice_of(cfg), -(-cfg.experts.count // slices)), slices)


def cuts(cfg: ModelConfig, wanted: Wanted) -> Sequence[Cut]:
    """That are tried, in this order."""
    return wanted.cuts or all_cuts(cfg, wanted.gpus == wanted.hosts == 1)


def simple_plan(cfg: ModelConfig, limits: Limits, wanted: Wanted, strategy: Strategy = Strategy()) -> Plan:
    """The rule's plan, with the first of `wanted.sizes` that fits. Raises DoesNotFit with numbers and ways out."""
    refused = []
    for cut in cuts(cfg, wanted):
        last = wanted.hosts - 1, wanted.hosts
        geo = geometry(replace(cfg, **cut._asdict()), wanted.dtype, wanted.adam_bits, *last)
        plan = _smallest(geo, limits, wanted, strategy)
        if fits(geo, plan, limits):
            return _fill(geo, plan, limits, wanted, strategy)
        refused.append((geo, plan))
    geo, plan = min(refused, key=lambda r: _excess(r[0], r[1], limits))
    raise DoesNotFit(_why_not(geo, plan, limits), usage(geo, plan, limits.less))


# ---------------------------------------------------------------- the smallest plan


def _smallest(geo: Geometry, limits: Limits, wanted: Wanted, strategy: Strategy) -> Plan:
    refused = []
    for plan in _lowest_plans(geo, wanted, strategy):
        if fits(geo, plan, limits):
            return plan
        refused.append(plan)
    return min(refused, key=lambda plan: _excess(geo, plan, limits))


def _lowest_plans(geo: Geometry, wanted: Wanted, strategy: Strategy) -> Iterable[Plan]:
    """Plans with everything as low as `placement` allows, the roomiest first."""
    weights, state = LOWEST[wanted.placement]
    frozen = any(layout.tensors for layout in geo.base)
    small = geo.cfg.lora is not None and weights != "gpu"
    inputs = TIERS[TIERS.index(strategy.x) : 3 if "ssd" in (weights, state) else 2]
    # (weight slots on the GPU, gradient piece, weight slots in RAM)
    half = geo.half_piece()
    slots = ((2, half, 2), (2, half // 8, 2), (1, half // 8, 2), (1, 1, 1))
    may_spill = state == "ssd" and wanted.mode != "backward" and wanted.hosts == 1
    gradients: tuple[Waiting, ...] = ("host", "ssd") if may_spill else ("host",)
    betweens: tuple[Between, ...] = ("gpu", "host") if wanted.gpus == 1 or wanted.peers else ("host",)
    betweens = ("gpu",) if geo.slices else betweens
    for waiting, between, rings, (tokens, n_micro) in product(gradients, betweens, slots, wanted.sizes):
        apart = wanted.on_cuda and wanted.mode == "forward" and geo.adam_bits == 32 and tokens * n_micro >= LATE_TOKENS
        for x in inputs if between == "gpu" or wanted.gpus > 1 else inputs[inputs.index("host") :]:
            base = weights if frozen else "gpu"
            # Adapters and their state are small; their base is not.
            low = UnitPlan("host", "host", x=x, base=base) if small else UnitPlan(weights, state, x=x, base=base)
            needed_at_once: Tier = "gpu" if between == "gpu" else "host" if x == "gpu" else x
            plan = Plan(
                units=(low,) * (geo.n_units - 1) + (replace(low, x=needed_at_once),),
                tokens=tokens,
                n_micro=n_micro,
                dtype=geo.dtype,
                mode=wanted.mode,
                adam_bits=geo.adam_bits,
                late_moments=("gpu", "host") if apart else (),
                window=rings[0],
                piece=rings[1],
                host_window=rings[2],
                record=wanted.record,
                between=between,
                gradients=waiting,
                halves=geo.cfg.halves,
                at_once=geo.cfg.at_once,
                slices=geo.cfg.slices,
                hosts=wanted.hosts,
                host=wanted.hosts - 1,
            )
            yield plan if wanted.gpus == 1 else plan.dealt(wanted.gpus, geo.cfg.tied, wanted.peers, wanted.shares)


def _excess(geo: Geometry, plan: Plan, limits: Limits) -> int:
    return sum(limits.lacking(usage(geo, plan, limits.less)).values())


# ---------------------------------------------------------------- moved up


def _fill(geo: Geometry, plan: Plan, limits: Limits, wanted: Wanted, strategy: Strategy) -> Plan:
    """Moves parts of a plan up, most useful first."""
    n, to_gpu = geo.n_units, wanted.free and wanted.gpu_updates
    if to_gpu and fits(geo, everything := plan.changed(range(n), weights="gpu", state="gpu", base="gpu"), limits):
        return _keep_activations(geo, everything, limits)
    if geo.cfg.lora:
        return _fill_adapted(geo, plan, limits, wanted)
    if wanted.free:
        plan = _base_to_ram(geo, _to_ram(geo, plan, limits), limits)
    if wanted.on_cuda and wanted.gpu_updates and plan.mode == "forward":
        plan = share_updates(geo, plan, limits, strategy.updates)
    if strategy.resident:
        plan = _keep_resident(geo, plan, limits)
    if to_gpu:
        plan = _states_to_gpu(
            geo, plan, limits, _useful_states(geo, plan) if strategy.states is None else round(strategy.states * n)
        )
    plan = _more_state_buffers(geo, plan, limits)
    plan = _keep_activations(geo, plan, limits)
    if to_gpu:
        plan = _states_to_gpu(geo, plan, limits, n)
    if wanted.free:  # states that went to the GPU left room
        plan = fill_ram(geo, _base_to_gpu(geo, plan, limits), limits)
    return largest_fitting(geo, limits, 2, lambda k: replace(plan, window=plan.window + k))


def _fill_adapted(geo: Geometry, plan: Plan, limits: Limits, wanted: Wanted) -> Plan:
    """As _fill, of adapters: first they, then activations, then their base."""
    if wanted.free:
        trained = plan.changed(range(geo.n_units), weights="gpu", state="gpu") if wanted.gpu_updates else plan
        plan = trained if fits(geo, trained, limits) else plan
        plan = fill_ram(geo, _inputs_to_ram(geo, plan, limits), limits)
    plan = _keep_activations(geo, plan, limits)
    if wanted.free:
        plan = fill_ram(geo, _base_to_gpu(geo, plan, limits), limits)
    return largest_fitting(geo, limits, 2, lambda k: replace(plan, window=plan.window + k))


def of_first(geo: Geometry, plan: Plan, limits: Limits, units: Sequence[int], **change: Any) -> Plan:
    """`plan` with `change` of the first of `units`, of as many as fit."""
    return largest_fitting(geo, limits, len(units), lambda k: plan.changed(units[:k], **change))


def of_spread(geo: Geometry, plan: Plan, limits: Limits, units: Sequence[int], **change: Any) -> Plan:
    """As `of_first`, of units that are evenly spread among these."""
    return largest_fitting(geo, limits, len(units), lambda k: plan.changed(some(units, k), **change))


def _base_to_gpu(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    left = [u for u, unit in enumerate(plan.units) if unit.base != "gpu"]
    return of_first(geo, plan, limits, left, base="gpu")


def _to_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    plan = of_spread(geo, plan, limits, range(geo.n_units), weights="host")
    if any(unit.weights != "host" for unit in plan.units):
        return plan
    return of_spread(geo, _inputs_to_ram(geo, plan, limits), limits, range(geo.n_units), state="host")


def _inputs_to_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Brings inputs of blocks from the SSD to RAM: they are written and read in every step."""
    return of_spread(geo, plan, limits, [u for u, unit in enumerate(plan.units) if unit.x == "ssd"], x="host")


def _states_to_gpu(geo: Geometry, plan: Plan, limits: Limits, most: int) -> Plan:
    return of_first(geo, plan, limits, range(most), weights="gpu", state="gpu", update="cpu", resident=False)


def _keep_resident(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    units = [u for u, unit in enumerate(plan.units) if unit.update == "cpu" and unit.weights == "host"]
    return of_first(geo, plan, limits, units, resident=True)


def _more_state_buffers(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Adds RAM slots for records from the SSD."""
    records = sum(len(geo.records(u, plan.record)) for u, unit in enumerate(plan.units) if unit.state == "ssd")
    more = max(0, records - plan.state_slots)
    return largest_fitting(geo, limits, more, lambda k: replace(plan, state_slots=plan.state_slots + k))


def fill_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Brings state from the SSD to RAM, then frozen weights, as far as they fit."""
    left = [u for u, unit in enumerate(plan.units) if unit.state == "ssd"]
    return _base_to_ram(geo, of_spread(geo, plan, limits, left, weights="host", state="host"), limits)


def _base_to_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Brings frozen weights from the SSD to RAM."""
    return of_spread(geo, plan, limits, [u for u, unit in enumerate(plan.units) if unit.base == "ssd"], base="host")


def longer_pieces(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Lengthens the pieces of gradients, as far as they fit."""
    most = max((n for unit, n in zip(plan.units, geo.numel, strict=True) if unit.state != "gpu"), default=0)
    return largest_fitting(
        geo, limits, -(-most // STRETCH), lambda k: replace(plan, piece=max(plan.piece, k * STRETCH))
    )


def _useful_states(geo: Geometry, plan: Plan) -> int:
    """How many first units should have state on the GPU, for the other updates to hide under forward.

    The CPU cannot run ahead of the first. With few tokens a step GPU memory is worth more for state than activations.
    """
    if plan.mode == "backward":
        return 0
    excess, units = sum(geo.numel) * (1 - plan.tokens * plan.n_micro / UPDATE_TOKENS), 0
    while excess > 0:
        excess -= geo.numel[units]
        units += 1
    return units


def share_updates(geo: Geometry, plan: Plan, limits: Limits, share: float = GPU_UPDATES) -> Plan:
    """Has the GPU update `share` of the RAM-stored units: forward is too short for either processor's updates alone."""
    in_ram = [u for u, unit in enumerate(plan.units) if unit.state == unit.weights == "host" and not unit.resident]
    chosen = some(in_ram, round(share * len(in_ram)))
    shared = plan.changed(set(in_ram) - chosen, update="cpu").changed(chosen, update="gpu")
    shared = replace(shared, window=max(plan.window, 3))
    return shared if fits(geo, shared, limits) else plan


def _keep_activations(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Keeps all saved tensors of the last blocks on the GPU: they live shortest."""

    def kept(k: int) -> Plan:
        base = plan
        for kind in geo.inner_kinds:
            chosen = {u for u in range(geo.head - k, geo.head) if geo.kinds[u] == kind}
            base = base.changed(chosen, saved=tuple((name, "gpu") for name in geo.saved_names(kind)))
        return base

    return largest_fitting(geo, limits, geo.n_units - 2, kept)


# ---------------------------------------------------------------- a refusal

FLAGS = {"gpu": "--gpu-memory", "host": "--ram"}


def _why_not(geo: Geometry, plan: Plan, limits: Limits) -> str:
    lacks = limits.lacking(usage(geo, plan, limits.less))
    assert lacks, "a plan that fits was refused"
    more = {tier: rounded_up(MARGIN[tier] * lacks[tier]) for tier in lacks}  # not the sum: options include a reserve
    other = f"use a GPU with {more.pop('gpu')} more free memory" if "gpu" in more and limits.all_free else ""
    raises = " and ".join(f"{flag} by {more[tier]}" for tier, flag in FLAGS.items() if tier in more)
    first = " and ".join(way for way in (other, f"raise {raises}" * bool(raises)) if way)
    out = [first[0].upper() + first[1:]]
    shorter = lambda k: usage(geo, replace(plan, tokens=k), limits.less)["gpu"] <= limits.gpu
    if "gpu" in lacks and (tokens := _most(plan.tokens, shorter)):
        out.append(f"lower --seq-len (of {plan.tokens:,} tokens a micro-batch {tokens:,} fit)")
    if n_micro := _most(plan.n_micro, lambda k: fits(geo, replace(plan, n_micro=k), limits)):
        out.append(f"lower --batch-size (of {plan.n_micro:,} micro-batches a step {n_micro:,} fit)")
    if list(lacks) == ["host"] and plan.mode != "backward" and plan.gradients == "host":
        out.append("--max-grad-norm 0, which does not store all gradients")
    needs = shortage(geo, plan, limits) + _experts_at_once(geo, lacks)
    return f"even the smallest plan needs {needs}. {', or '.join(out)}."


def _experts_at_once(geo: Geometry, lacks: Mapping[str, int]) -> str:
    """Of a mixture that a GPU is too small for: its experts, of which a layer's are on the GPU at once."""
    own, packing = geo.cfg.experts, geo.cfg.packing
    if own is None or "gpu" not in lacks or geo.slices:
        return ""
    if geo.cfg.at_once and packing:
        nbytes = max(geo.base_bytes[1:-1])
        return f"; the {own.count} experts of one layer take {rounded_up(nbytes)} of it in {packing.word}"
    nbytes = own.count * shapes.of_an_expert(geo.cfg) * ITEMSIZE[geo.dtype]
    return f"; the {own.count} experts of one layer take {rounded_up(nbytes)} of it and are computed together"


def shortage(geo: Geometry, plan: Plan, limits: Limits) -> str:
    """The need and the limit of each tier that is too small, of GPUs the fullest."""
    on_gpu, host = each_usage(geo, plan)
    gpu = fullest(on_gpu, limits)
    memory = f"memory of GPU {gpu}" if limits.less else "GPU memory"
    return " and ".join(
        f"{rounded_up(need)} of {name}, the limit is {rounded_up(limit)}"
        for need, name, limit in ((on_gpu[gpu], memory, limits.of(gpu)), (host, "RAM", limits.host))
        if need > limit
    )


def _most(most: int, good: Callable[[int], bool]) -> int:
    """The largest k in 1..most with good(k), or 0."""
    return 1 + largest(most - 1, lambda k: good(1 + k)) if good(1) else 0


def sizes_of(rows: Sequence[int], sequences: int, seq_len: int) -> tuple[tuple[int, int], ...]:
    """`Wanted.sizes` for micro-batches of `rows` sequences, in a step of `sequences`."""
    return tuple((r * seq_len, -(-sequences // r)) for r in rows)

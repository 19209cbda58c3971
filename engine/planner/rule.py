"""The plain rule that makes a plan: fill the GPU, then RAM, then the SSD; recompute the rest. Pure; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from trireme.engine.amounts import rounded_up
from trireme.engine.buffers import fits, usage
from trireme.engine.geometry import STRETCH, Geometry, geometry
from trireme.engine.plan import TIERS, DoesNotFit, Limits, Mode, Plan, Tier, UnitPlan
from trireme.models import shapes
from trireme.models.config import ModelConfig

UPDATE_TOKENS = 50_000  # tokens whose forward takes as long as the CPU's update of the same parameters
GPU_UPDATES = 0.3  # share of RAM-home units updated on the GPU: 14 B a parameter over PCIe against 19 B of DRAM
MARGIN = {"gpu": 1.0, "host": 1.25}  # of memory to ask for: the more RAM, the larger records of state are
LATE_TOKENS = 12_000  # from here on a step has time to write the moments apart from the weights

Between = Literal["gpu", "host"]  # tier of x and dx, of a plan
Waiting = Literal["host", "ssd"]  # tier of gradients that wait for their norm
Homes = Literal["auto", "gpu", "host", "ssd", "state-ssd"]
LOWEST: dict[Homes, tuple[Tier, Tier]] = {  # the lowest tiers of weights and of state
    "auto": ("ssd", "ssd"),
    "gpu": ("gpu", "gpu"),
    "host": ("host", "host"),
    "ssd": ("ssd", "ssd"),
    "state-ssd": ("host", "ssd"),
}


@dataclass(frozen=True)
class Wanted:
    """What a plan is asked for."""

    sizes: tuple[tuple[int, int], ...]  # candidates (tokens of a micro-batch, micro-batches a step), the largest first
    dtype: str = "BF16"
    mode: Mode = "forward"
    record: int = 1 << 24
    adam_bits: int = 32
    homes: Homes = "auto"  # or the tier of all weights and state, or "state-ssd": weights in RAM, the rest on the SSD
    halves: bool | None = None  # whether units are half blocks; None: if no plan of whole blocks fits
    on_cuda: bool = True
    document: int = 1024  # tokens of a usual document
    trained: float = 1.0  # share of the tokens whose label counts

    @classmethod
    def like(cls, plan: Plan, document: int, trained: float) -> Wanted:
        """Another plan for a GPU that computes the same step and stores state in the same records."""
        sizes = ((plan.tokens, plan.n_micro),)
        return cls(sizes, plan.dtype, plan.mode, plan.record, plan.adam_bits, document=document, trained=trained)

    @property
    def free(self) -> bool:
        """Whether the plan chooses the homes."""
        return self.homes == "auto"

    @property
    def gpu_updates(self) -> bool:
        """Whether the device can update units: there is no CUDA kernel for narrow moments."""
        return not self.on_cuda or self.adam_bits == 32


@dataclass(frozen=True)
class Lean:
    """Preferences of the rule where only time can tell what is better. The default is the plain rule."""

    x: Tier = "gpu"  # the first tier tried as the home of blocks' inputs
    states: float | None = None  # share of units whose state the GPU holds before activations; None: by tokens a step
    resident: bool = False  # weights whose home is RAM stay on the GPU before activations do
    updates: float = GPU_UPDATES


def spread(n: int, k: int) -> frozenset[int]:
    """k of range(n), evenly spread."""
    return frozenset(i * n // k for i in range(k)) if k else frozenset()


def largest(n: int, good: Callable[[int], bool]) -> int:
    """The largest k in 0..n with good(k), where good is true up to some k and false after. good(0) is taken as true."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def furthest(geo: Geometry, limits: Limits, n: int, plan: Callable[[int], Plan]) -> Plan:
    """plan(k) for the largest k in 0..n that fits; plan(0) is taken to fit."""
    return plan(largest(n, lambda k: fits(geo, plan(k), limits)))


def simple_plan(cfg: ModelConfig, limits: Limits, wanted: Wanted, lean: Lean = Lean()) -> Plan:
    """A plan by a plain rule: fill the GPU, then RAM, then the SSD; recompute what does not fit.

    The first of `wanted.sizes` that fits is taken. Raises DoesNotFit with the numbers and the way out.
    """
    refused = []
    for halves in (False, True) if wanted.halves is None else (wanted.halves,):
        geo = geometry(replace(cfg, halves=halves), wanted.dtype, wanted.adam_bits)
        plan = _smallest(geo, limits, wanted, lean)
        if fits(geo, plan, limits):
            return _fill(geo, plan, limits, wanted, lean)
        refused.append((geo, plan))
    geo, plan = min(refused, key=lambda r: _excess(r[0], r[1], limits))
    raise DoesNotFit(_why_not(geo, plan, limits), usage(geo, plan))


# ---------------------------------------------------------------- the smallest plan


def _smallest(geo: Geometry, limits: Limits, wanted: Wanted, lean: Lean) -> Plan:
    """The first plan that fits with everything as low as `homes` lets it be; if none does, the one that lacks least."""
    refused = []
    for plan in _low_plans(geo, wanted, lean):
        if fits(geo, plan, limits):
            return plan
        refused.append(plan)
    return min(refused, key=lambda plan: _excess(geo, plan, limits))


def _low_plans(geo: Geometry, wanted: Wanted, lean: Lean) -> Iterable[Plan]:
    """Plans with everything in the lowest tier, from the roomiest to the smallest."""
    weights, state = LOWEST[wanted.homes]
    frozen = any(layout.tensors for layout in geo.base) and weights != "gpu"
    inputs = TIERS[TIERS.index(lean.x) : 3 if "ssd" in (weights, state) else 2]
    # (weight slots on the GPU, gradient piece, weight slots in RAM): fewer slots overlap less, but fit.
    half = geo.half_piece()
    slots = ((2, half, 2), (2, half // 8, 2), (1, half // 8, 2), (1, 1, 1))
    gradients: tuple[Waiting, ...] = ("host", "ssd") if state == "ssd" and wanted.mode != "backward" else ("host",)
    betweens: tuple[Between, ...] = ("gpu", "host")
    for waiting, between, rings, (tokens, n_micro) in product(gradients, betweens, slots, wanted.sizes):
        apart = wanted.on_cuda and wanted.mode == "forward" and geo.adam_bits == 32 and tokens * n_micro >= LATE_TOKENS
        for x in inputs if between == "gpu" else inputs[inputs.index("host") :]:
            # Of adapters the weights and states are small; what is frozen takes the place of weights.
            low = UnitPlan("host", "host", x=x, base=weights) if frozen else UnitPlan(weights, state, x=x)
            yield Plan(
                units=(low,) * (geo.n_units - 1) + (replace(low, x="gpu" if between == "gpu" else x),),
                tokens=tokens,
                n_micro=n_micro,
                dtype=geo.dtype,
                mode=wanted.mode,
                adam_bits=geo.adam_bits,
                late_moments=("host",) if apart else (),
                window=rings[0],
                piece=rings[1],
                host_window=rings[2],
                record=wanted.record,
                between=between,
                gradients=waiting,
                halves=geo.cfg.halves,
            )


def _excess(geo: Geometry, plan: Plan, limits: Limits) -> int:
    """Bytes that a plan needs above its limits, of both tiers together."""
    return sum(limits.lacking(usage(geo, plan)).values())


# ---------------------------------------------------------------- moved up, as far as there is room


def _fill(geo: Geometry, plan: Plan, limits: Limits, wanted: Wanted, lean: Lean) -> Plan:
    """Moves pieces of a plan that fits up the tiers, most useful first, while it still fits."""
    n, to_gpu = geo.n_units, wanted.free and wanted.gpu_updates
    if any(layout.tensors for layout in geo.base):
        return _fill_frozen(geo, plan, limits, wanted)
    everything = plan.changed(range(n), weights="gpu", state="gpu")
    if to_gpu and fits(geo, everything, limits):
        return _keep_activations(geo, everything, limits)
    if wanted.free:
        plan = _to_ram(geo, plan, limits)
    if wanted.on_cuda and wanted.gpu_updates and plan.mode == "forward":
        plan = share_updates(geo, plan, limits, lean.updates)
    if lean.resident:
        plan = _stay(geo, plan, limits)
    if to_gpu:
        plan = _states_to_gpu(geo, plan, limits, _useful(geo, plan) if lean.states is None else round(lean.states * n))
    plan = _deeper(geo, plan, limits)
    plan = _keep_activations(geo, plan, limits)
    if to_gpu:
        plan = _states_to_gpu(geo, plan, limits, n)
    if wanted.free:  # what went to the GPU has left room in RAM
        plan = fill_ram(geo, plan, limits)
    return furthest(geo, limits, 2, lambda k: replace(plan, window=plan.window + k))


def _fill_frozen(geo: Geometry, plan: Plan, limits: Limits, wanted: Wanted) -> Plan:
    """As _fill, where some weights are frozen: first what is trained, then activations, then what is only read."""
    units = range(geo.n_units)
    if wanted.free:
        everything = plan.changed(units, weights="gpu", state="gpu", base="gpu")
        if wanted.gpu_updates and fits(geo, everything, limits):
            return _keep_activations(geo, everything, limits)
        trained = plan.changed(units, weights="gpu", state="gpu")
        plan = trained if wanted.gpu_updates and fits(geo, trained, limits) else plan
        plan = furthest(geo, limits, geo.n_units, lambda k: plan.changed(spread(geo.n_units, k), base="host"))
    plan = _keep_activations(geo, plan, limits)
    if wanted.free:
        low = plan
        plan = furthest(geo, limits, geo.n_units, lambda k: low.changed(units[:k], base="gpu"))
    rings = plan
    return furthest(geo, limits, 2, lambda k: replace(rings, window=rings.window + k))


def _to_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Brings weights and, if all of them have room, state to RAM."""
    n = geo.n_units
    plan = furthest(geo, limits, n, lambda k: plan.changed(spread(n, k), weights="host"))
    if any(unit.weights != "host" for unit in plan.units):
        return plan
    return furthest(geo, limits, n, lambda k: plan.changed(spread(n, k), state="host"))


def _states_to_gpu(geo: Geometry, plan: Plan, limits: Limits, most: int) -> Plan:
    """Makes the GPU the home of the first units, `most` at most."""

    def raised(k: int) -> Plan:
        return plan.changed(range(k), weights="gpu", state="gpu", update="cpu", resident=False)

    return furthest(geo, limits, most, raised)


def _stay(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Lets weights from RAM stay on the GPU, of units that the CPU updates."""
    units = [u for u, unit in enumerate(plan.units) if unit.update == "cpu" and unit.weights == "host"]
    return furthest(geo, limits, len(units), lambda k: plan.changed(units[:k], resident=True))


def _deeper(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Adds host slots for records of state from the SSD, up to one for each."""
    records = sum(len(geo.records(u, plan.record)) for u, unit in enumerate(plan.units) if unit.state == "ssd")
    more = max(0, records - plan.state_slots)
    return furthest(geo, limits, more, lambda k: replace(plan, state_slots=plan.state_slots + k))


def fill_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Brings state from the SSD to RAM, of as many units as there is room for."""
    left = [u for u, unit in enumerate(plan.units) if unit.state == "ssd"]

    def raised(k: int) -> Plan:
        return plan.changed({left[i] for i in spread(len(left), k)}, weights="host", state="host")

    return furthest(geo, limits, len(left), raised)


def longer_pieces(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Lengthens the pieces of gradients, of which two are on their way, as far as there is room."""
    most = max((n for unit, n in zip(plan.units, geo.numel, strict=True) if unit.state != "gpu"), default=0)
    return furthest(geo, limits, -(-most // STRETCH), lambda k: replace(plan, piece=max(plan.piece, k * STRETCH)))


def _useful(geo: Geometry, plan: Plan) -> int:
    """How many units, from the first, should have their state on the GPU so that updates hide under forward.

    The first are needed first, when the CPU has had no time to run ahead. With few tokens a step forward is short and
    an update hides nothing; then GPU memory is worth more as a home of state than for saved activations.
    """
    if plan.mode == "backward":
        return 0
    excess, units = sum(geo.numel) * (1 - plan.tokens * plan.n_micro / UPDATE_TOKENS), 0
    while excess > 0:
        excess -= geo.numel[units]
        units += 1
    return units


def share_updates(geo: Geometry, plan: Plan, limits: Limits, share: float = GPU_UPDATES) -> Plan:
    """Lets GPU and CPU share the updates of RAM-home units, where they would else make forward wait.

    Under `forward` all updates run under the forward pass alone, which is shorter than what one of them needs.
    """
    in_ram = [u for u, unit in enumerate(plan.units) if unit.state == unit.weights == "host" and not unit.resident]
    chosen = {in_ram[i] for i in spread(len(in_ram), round(share * len(in_ram)))}
    shared = plan.changed(set(in_ram) - chosen, update="cpu").changed(chosen, update="gpu")
    shared = replace(shared, window=max(plan.window, 3))
    return shared if fits(geo, shared, limits) else plan


def _keep_activations(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Keeps every saved tensor of the last blocks on the GPU, as many blocks as fit: they live shortest."""

    def kept(k: int) -> Plan:
        base = plan
        for kind in shapes.inner_kinds(geo.cfg):
            chosen = {u for u in range(geo.head - k, geo.head) if geo.kinds[u] == kind}
            base = base.changed(chosen, saved=tuple((name, "gpu") for name in geo.saved_names(kind)))
        return base

    return furthest(geo, limits, geo.n_units - 2, kept)


# ---------------------------------------------------------------- a refusal


def _why_not(geo: Geometry, plan: Plan, limits: Limits) -> str:
    """What the smallest plan needs, and each way out that leads out."""
    need, lacks = usage(geo, plan), limits.lacking(usage(geo, plan))
    assert lacks, "a plan that fits was refused"
    raises = [
        f"{flag} by {rounded_up(MARGIN[tier] * lacks[tier])}"  # the limit is what a reserve leaves
        for tier, flag in (("gpu", "--gpu-memory"), ("host", "--ram"))
        if tier in lacks
    ]
    out = [f"Raise {' and '.join(raises)}"]
    shorter = lambda k: usage(geo, replace(plan, tokens=k))["gpu"] <= limits.gpu
    if "gpu" in lacks and (tokens := _most(plan.tokens, shorter)):
        out.append(f"lower --seq-len (of {plan.tokens:,} tokens a micro-batch {tokens:,} fit)")
    if n_micro := _most(plan.n_micro, lambda k: fits(geo, replace(plan, n_micro=k), limits)):
        out.append(f"lower --batch-size (of {plan.n_micro:,} micro-batches a step {n_micro:,} fit)")
    if list(lacks) == ["host"] and plan.mode != "backward" and plan.gradients == "host":
        out.append("--max-grad-norm 0, which needs no room for all gradients")
    return f"even the smallest plan needs {shortage(need, limits)}. {', or '.join(out)}."


def shortage(need: dict[str, int], limits: Limits) -> str:
    """What is needed of each tier that is too small, beside its limit."""
    tiers = ("gpu", "GPU memory", limits.gpu), ("host", "RAM", limits.host)
    return " and ".join(
        f"{rounded_up(need[tier])} of {name}, the limit is {rounded_up(limit)}"
        for tier, name, limit in tiers
        if need[tier] > limit
    )


def _most(most: int, good: Callable[[int], bool]) -> int:
    """The largest k in 1..most with good(k); 0 if there is none."""
    return 1 + largest(most - 1, lambda k: good(1 + k)) if good(1) else 0


def sizes_of(rows: Sequence[int], sequences: int, seq_len: int) -> tuple[tuple[int, int], ...]:
    """Micro-batches of so many sequences: (tokens of each, how many a step of `sequences` has), as Wanted has them."""
    return tuple((r * seq_len, -(-sequences // r)) for r in rows)

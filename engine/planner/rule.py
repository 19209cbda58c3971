"""The rule that makes the first plan: fills the GPU, then RAM, then the SSD, and recomputes what is not saved.

It starts from the plan that needs the least memory and moves parts of it up to faster tiers. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trireme.engine.amounts import rounded_up
from trireme.engine.buffers import each_usage, fits, fullest, usage
from trireme.engine.geometry import STRETCH, Geometry, geometry
from trireme.engine.plan import TIERS, DoesNotFit, Limits, Mode, Plan, Saved, Tier, UnitPlan
from trireme.models.config import ModelConfig
from trireme.models.sizes import narrow

if TYPE_CHECKING:
    from trireme.engine.planner.forecast import RunWork  # imports torch

GPU_UPDATES = 0.3  # share of units in RAM that the GPU updates: 14 bytes/parameter over PCIe, 19 of RAM on the CPU
MARGIN = {"gpu": 1.0, "ram": 1.5}  # advised of the missing bytes: more RAM has larger records, and a plan takes 0.85
LATE_TOKENS = 12_000  # tokens of a step from which moments are written apart from weights
SLICES = 2, 4, 8, 16, 32  # numbers of slices of a layer's frozen experts that are tried

BetweenTier = Literal["gpu", "ram"]  # of x and dx
Waiting = Literal["ram", "ssd"]  # of gradients, for the norm
TierChoice = Literal["auto", "gpu", "ram", "ssd", "state-ssd"]
LOWEST: dict[TierChoice, tuple[Tier, Tier]] = {  # of weights, of state
    "auto": ("ssd", "ssd"),
    "gpu": ("gpu", "gpu"),
    "ram": ("ram", "ram"),
    "ssd": ("ssd", "ssd"),
    "state-ssd": ("ram", "ssd"),
}


class Cut(NamedTuple):
    """How a model is divided into units; see the plan's keys of these names."""

    halves: bool = False  # units are sub-layers, not blocks
    at_once: int = 0  # packed experts that are decoded at a time; 0: all
    slices: int = 1  # units of weights of a layer's frozen experts

    @classmethod
    def of(cls, plan: Plan) -> Cut:
        return cls(plan.halves, plan.at_once, plan.slices)


@dataclass(frozen=True)
class Wanted:
    """The requirements of a plan: the step, and limits on the decisions."""

    sizes: tuple[tuple[int, int], ...]  # (tokens of a micro-batch, micro-batches a step), largest first
    dtype: str = "BF16"
    mode: Mode = "forward"
    record: int = 1 << 24
    adam_bits: int = 32
    placement: TierChoice = "auto"  # or the tier of weights and state; "state-ssd": weights in RAM
    cuts: Sequence[Cut] = ()  # divisions that are tried in this order; none: all that the model allows
    on_cuda: bool = True
    document: int = 1024  # tokens of a usual document
    trained: float = 1.0  # share of tokens with a label
    compared: bool = False  # as in Batch
    gpus: int = 1
    peers: bool = False  # GPUs have access to each other's memory
    shares: tuple[float, ...] = ()  # in which blocks are divided among GPUs; none: in turn
    hosts: int = 1  # the plan is that of the last host, which needs the most memory
    accumulate: bool = True  # micro-batches may pass through the layers one after the other

    @classmethod
    def like(cls, plan: Plan, work: RunWork) -> Wanted:
        """A request for the step, dtype and records of `plan`, on CUDA, for what the run computes."""
        same, step = (plan.dtype, plan.mode, plan.record, plan.adam_bits), ((plan.tokens, plan.n_micro),)
        wanted = cls(step, *same, gpus=plan.gpus, hosts=plan.hosts, accumulate=work.accumulate)
        return replace(wanted, document=work.batch(plan).seq_len, trained=work.trained, compared=work.compared)

    @property
    def free(self) -> bool:
        return self.placement == "auto"

    @property
    def gpu_updates(self) -> bool:
        """Whether updates can run on the device. Not on CUDA with 8- or 16-bit moments, which have no kernel there, nor
        with several hosts, whose shares of the state are in RAM.
        """
        return self.hosts == 1 and (not self.on_cuda or self.adam_bits == 32)


@dataclass(frozen=True)
class Strategy:
    """Decisions of the rule of which only a simulation tells which is faster. The default is the plain rule."""

    x: Tier = "gpu"  # first tier tried for blocks' inputs
    states: float = 0.0  # share of units with state on the GPU before activations
    updates: float = GPU_UPDATES  # share of the units in RAM that the GPU updates


def spread(n: int, k: int) -> frozenset[int]:
    """k indices of range(n), evenly spaced."""
    return frozenset(i * n // k for i in range(k)) if k else frozenset()


def evenly(units: Sequence[int], k: int) -> frozenset[int]:
    """k of `units`, evenly spaced."""
    return frozenset(units[i] for i in spread(len(units), k))


def largest(n: int, good: Callable[[int], bool]) -> int:
    """The largest k in 0..n with good(k), by bisection. good is monotone; good(0) is assumed to be true."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def largest_fitting(geo: Geometry, limits: Limits, n: int, plan: Callable[[int], Plan]) -> Plan:
    """plan(k) with the largest k in 0..n that fits, by bisection; plan(0) is assumed to fit."""
    return plan(largest(n, lambda k: fits(geo, plan(k), limits)))


def all_cuts(cfg: ModelConfig, alone: bool = True, halves: Sequence[bool] = (False, True)) -> list[Cut]:
    """All divisions of a model, the coarsest first: whole blocks, sub-layers if the model has any, packed experts that
    are decoded in parts, and, if one GPU is `alone`, frozen experts in slices.
    """
    halves = halves[:1] if cfg.indivisible else halves
    divisions = [Cut(half) for half in halves]
    if at_once := narrow.slice_of(cfg):
        divisions.append(Cut(halves[-1], at_once))
    if alone and halves[-1] and narrow.may_be_sliced(cfg):
        divisions += [sliced(cfg, slices) for slices in SLICES]
    return divisions


def sliced(cfg: ModelConfig, slices: int) -> Cut:
    """Sub-layers with frozen experts in `slices`; packed experts are decoded in parts of at most a slice."""
    assert cfg.experts is not None
    slices = min(slices, cfg.experts.count)
    return Cut(True, min(narrow.slice_of(cfg), -(-cfg.experts.count // slices)), slices)


def cuts(cfg: ModelConfig, wanted: Wanted) -> Sequence[Cut]:
    """The divisions that are tried, in this order."""
    return wanted.cuts or all_cuts(cfg, wanted.gpus == wanted.hosts == 1)


def simple_plan(cfg: ModelConfig, limits: Limits, wanted: Wanted, strategy: Strategy = Strategy()) -> Plan:
    """The rule's plan, with the first of `wanted.sizes` that fits. Raises DoesNotFit, whose message has the missing
    bytes and the options that help.
    """
    refused = list[tuple[Geometry, Plan]]()
    for cut in cuts(cfg, wanted):
        last = wanted.hosts - 1, wanted.hosts
        geo = geometry(replace(cfg, **cut._asdict()), wanted.dtype, wanted.adam_bits, *last)
        for plan in _lowest_plans(geo, wanted, strategy):
            if fits(geo, plan, limits):
                filled = _fill(geo, plan, limits, wanted, strategy)
                alone = next(one_by_one(geo, limits, wanted, plan), None) if filled.uses_ssd else None
                return _keep_activations(geo, alone, limits) if alone else filled
            refused.append((geo, plan))
        if alone := next(one_by_one(geo, limits, wanted, plan), None):
            return _keep_activations(geo, alone, limits)
    raise refusal(refused, limits)


# ---------------------------------------------------------------- the smallest plan


def _lowest_plans(geo: Geometry, wanted: Wanted, strategy: Strategy) -> Iterable[Plan]:
    """Plans with everything in the lowest tier that `placement` allows, with the largest buffers first."""
    weights, state = LOWEST[wanted.placement]
    base = weights if any(layout.tensors for layout in geo.base) else "gpu"
    adapters = geo.cfg.lora is not None and weights != "gpu"
    inputs = TIERS[TIERS.index(strategy.x) : 3 if "ssd" in (weights, state) else 2]
    half = geo.half_piece()
    slots = ((2, half, 2), (2, half // 8, 2), (1, half // 8, 2), (1, 1, 1))
    may_spill = state == "ssd" and wanted.mode != "backward" and wanted.hosts == 1
    gradients: tuple[Waiting, ...] = ("ram", "ssd") if may_spill else ("ram",)
    betweens: tuple[BetweenTier, ...] = ("gpu", "ram") if wanted.gpus == 1 or wanted.peers else ("ram",)
    betweens = ("gpu",) if geo.slices else betweens
    for waiting, between, (window, piece, ram), (tokens, n_micro) in product(gradients, betweens, slots, wanted.sizes):
        late = wanted.on_cuda and wanted.mode == "forward" and geo.adam_bits == 32 and tokens * n_micro >= LATE_TOKENS
        for x in inputs if between == "gpu" or wanted.gpus > 1 else inputs[inputs.index("ram") :]:
            # Adapters and their state are small, so they are in RAM; their base is not.
            low = UnitPlan("ram", "ram", x=x, base=base) if adapters else UnitPlan(weights, state, x=x, base=base)
            needed_at_once: Tier = "gpu" if between == "gpu" else "ram" if x == "gpu" else x
            plan = Plan(
                units=(low,) * (geo.n_units - 1) + (replace(low, x=needed_at_once),),
                tokens=tokens,
                n_micro=n_micro,
                dtype=geo.dtype,
                mode=wanted.mode,
                adam_bits=geo.adam_bits,
                late_moments=("gpu", "ram") if late else (),
                window=window,
                piece=piece,
                ram_window=ram,
                record=wanted.record,
                between=between,
                gradients=waiting,
                halves=geo.cfg.halves,
                at_once=geo.cfg.at_once,
                slices=geo.cfg.slices,
                hosts=wanted.hosts,
                host=wanted.hosts - 1,
            )
            yield plan.on_gpus(wanted.gpus, geo.cfg.tied, wanted.peers, wanted.shares)


# ---------------------------------------------------------------- moved up


def _fill(geo: Geometry, plan: Plan, limits: Limits, wanted: Wanted, strategy: Strategy) -> Plan:
    """Moves parts of a plan to faster tiers as far as they fit, the most useful ones first."""
    n, to_gpu = geo.n_units, wanted.free and wanted.gpu_updates
    if to_gpu and fits(geo, everything := plan.changed(range(n), weights="gpu", state="gpu", base="gpu"), limits):
        return _keep_activations(geo, everything, limits)
    if geo.cfg.lora:
        return _fill_adapted(geo, plan, limits, wanted)
    if wanted.free:
        plan = _base_to_ram(geo, _to_ram(geo, plan, limits), limits)
    if wanted.on_cuda and wanted.gpu_updates and plan.mode == "forward":
        plan = share_updates(geo, plan, limits, strategy.updates)
    if to_gpu:
        plan = _states_to_gpu(geo, plan, limits, round(strategy.states * n))
    plan = _more_state_buffers(geo, plan, limits)
    plan = _keep_activations(geo, plan, limits)
    if to_gpu:
        plan = _states_to_gpu(geo, plan, limits, n)
    if wanted.free:  # states that were moved to the GPU have freed RAM
        plan = fill_ram(geo, base_to_gpu(geo, plan, limits), limits)
    return wider_window(geo, plan, limits)


def _fill_adapted(geo: Geometry, plan: Plan, limits: Limits, wanted: Wanted) -> Plan:
    """`_fill` for adapters: first the adapters, then activations, then their base."""
    if wanted.free:
        trained = plan.changed(range(geo.n_units), weights="gpu", state="gpu") if wanted.gpu_updates else plan
        plan = trained if fits(geo, trained, limits) else plan
        plan = fill_ram(geo, _inputs_to_ram(geo, plan, limits), limits)
    plan = _keep_activations(geo, plan, limits)
    if wanted.free:
        plan = fill_ram(geo, base_to_gpu(geo, plan, limits), limits)
    return wider_window(geo, plan, limits)


def of_first(geo: Geometry, plan: Plan, limits: Limits, units: Sequence[int], **change: Any) -> Plan:
    """`plan` with `change` in the first k of `units`, with the largest k that fits."""
    return largest_fitting(geo, limits, len(units), lambda k: plan.changed(units[:k], **change))


def of_spread(geo: Geometry, plan: Plan, limits: Limits, units: Sequence[int], **change: Any) -> Plan:
    """As `of_first`, with k of `units` that are evenly spaced."""
    return largest_fitting(geo, limits, len(units), lambda k: plan.changed(evenly(units, k), **change))


def wider_window(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Adds up to two GPU buffers for weights."""
    return largest_fitting(geo, limits, 2, lambda k: replace(plan, window=plan.window + k))


def base_to_gpu(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Moves frozen weights to the GPU, as far as they fit."""
    left = [u for u, unit in enumerate(plan.units) if unit.base != "gpu"]
    return of_first(geo, plan, limits, left, base="gpu")


def _to_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    plan = of_spread(geo, plan, limits, range(geo.n_units), weights="ram")
    if any(unit.weights != "ram" for unit in plan.units):
        return plan
    return of_spread(geo, _inputs_to_ram(geo, plan, limits), limits, range(geo.n_units), state="ram")


def _inputs_to_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Moves inputs of blocks from the SSD to RAM, since they are written and read in every step."""
    return of_spread(geo, plan, limits, [u for u, unit in enumerate(plan.units) if unit.x == "ssd"], x="ram")


def _states_to_gpu(geo: Geometry, plan: Plan, limits: Limits, count: int) -> Plan:
    return of_first(geo, plan, limits, range(count), weights="gpu", state="gpu", update="cpu")


def _more_state_buffers(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Adds buffers in RAM for records from the SSD."""
    records = sum(len(geo.records(u, plan.record)) for u, unit in enumerate(plan.units) if unit.state == "ssd")
    slots = max(0, records - plan.state_slots)
    return largest_fitting(geo, limits, slots, lambda k: replace(plan, state_slots=plan.state_slots + k))


def fill_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Moves state from the SSD to RAM, then frozen weights, as far as they fit."""
    left = [u for u, unit in enumerate(plan.units) if unit.state == "ssd"]
    return _base_to_ram(geo, of_spread(geo, plan, limits, left, weights="ram", state="ram"), limits)


def _base_to_ram(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Moves frozen weights from the SSD to RAM, as far as they fit."""
    return of_spread(geo, plan, limits, [u for u, unit in enumerate(plan.units) if unit.base == "ssd"], base="ram")


def longer_pieces(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Lengthens the pieces of gradients, as far as they fit."""
    longest = max((n for unit, n in zip(plan.units, geo.numel, strict=True) if unit.state != "gpu"), default=0)
    return largest_fitting(
        geo, limits, -(-longest // STRETCH), lambda k: replace(plan, piece=max(plan.piece, k * STRETCH))
    )


def share_updates(geo: Geometry, plan: Plan, limits: Limits, share: float) -> Plan:
    """`plan` in which the GPU updates `share` of the units in RAM, if that fits; otherwise `plan`. Forward is too short
    for all updates on one of the two processors.
    """
    in_ram = [u for u, unit in enumerate(plan.units) if unit.state == unit.weights == "ram"]
    chosen = evenly(in_ram, round(share * len(in_ram)))
    shared = plan.changed(set(in_ram) - chosen, update="cpu").changed(chosen, update="gpu")
    shared = replace(shared, window=max(plan.window, 3))
    return shared if fits(geo, shared, limits) else plan


def _keep_activations(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Saves all tensors of as many of the last blocks as fit on the GPU."""
    return largest_fitting(geo, limits, geo.n_units - 2, lambda k: saving_last(geo, plan, k))


def one_by_one(geo: Geometry, limits: Limits, wanted: Wanted, plan: Plan) -> Iterator[Plan]:
    """`plan` with all weights and state on the GPU and nothing saved, and micro-batches one after the other: of each
    size with which that fits, the smallest first.
    """
    alone = wanted.gpus == wanted.hosts == 1 and not geo.ties_gradient
    if not (alone and wanted.accumulate and wanted.free and wanted.gpu_updates):
        return
    everything = dict(weights="gpu", state="gpu", base="gpu", update="cpu", x="gpu", saved=())
    whole = replace(plan.changed(range(geo.n_units), **everything), accumulate=True, between="gpu", gradients="ram")
    for tokens, n_micro in reversed(wanted.sizes):
        sized = replace(whole, tokens=tokens, n_micro=n_micro)
        if n_micro > 1 and fits(geo, sized, limits):
            yield sized


def saving_last(geo: Geometry, plan: Plan, k: int) -> Plan:
    """`plan` that saves all tensors of the last k blocks on the GPU."""
    all_of: dict[str, Saved] = {k: tuple((name, "gpu") for name in geo.saved_names(k)) for k in geo.inner_kinds}
    return plan.saving({u: all_of[geo.kinds[u]] for u in range(geo.head - k, geo.head)})


# ---------------------------------------------------------------- a refusal


def refusal(tried: Sequence[tuple[Geometry, Plan]], limits: Limits) -> DoesNotFit:
    """The error for the plan that lacks the fewest bytes."""
    need = lambda candidate: usage(candidate[0], candidate[1], limits.less)
    best = min(tried, key=lambda candidate: sum(limits.missing(need(candidate)).values()))
    return DoesNotFit(_why_not(*best, limits), need(best))


FLAGS = {"gpu": "--gpu-memory", "ram": "--ram"}


def _why_not(geo: Geometry, plan: Plan, limits: Limits) -> str:
    """The message for a plan that does not fit: what is needed, the limit, and what to change."""
    lacks = limits.missing(usage(geo, plan, limits.less))
    assert lacks, "a plan that fits was refused"
    missing = {tier: rounded_up(MARGIN[tier] * lacks[tier]) for tier in lacks}  # not the sum: options include a reserve
    larger_gpu = f"use a GPU with {missing.pop('gpu')} more free memory" if "gpu" in missing and limits.all_free else ""
    frees = f"free {missing.pop('ram')} of RAM" if "ram" in missing and limits.free_ram else ""
    raises = " and ".join(f"{flag} by {missing[tier]}" for tier, flag in FLAGS.items() if tier in missing)
    first = " and ".join(change for change in (larger_gpu, f"raise {raises}" * bool(raises), frees) if change)
    out = [first[0].upper() + first[1:]]
    shorter = lambda k: usage(geo, replace(plan, tokens=k), limits.less)["gpu"] <= limits.gpu
    if "gpu" in lacks and (tokens := _largest_positive(plan.tokens, shorter)):
        out.append(f"lower --seq-len (of {plan.tokens:,} tokens a micro-batch {tokens:,} fit)")
    if n_micro := _largest_positive(plan.n_micro, lambda k: fits(geo, replace(plan, n_micro=k), limits)):
        out.append(f"lower --batch-size (of {plan.n_micro:,} micro-batches a step {n_micro:,} fit)")
    backward = replace(plan, mode="backward", late_moments=(), gradients="ram")
    if plan.mode != "backward" and plan.hosts == 1 and fits(geo, backward, limits):
        out.append("--max-grad-norm 0, which does not store all gradients")
    drive = ", and uses an SSD" * plan.uses_ssd
    return f"even the smallest plan needs {shortage(geo, plan, limits)}{drive}. {', or '.join(out)}."


def shortage(geo: Geometry, plan: Plan, limits: Limits) -> str:
    """The need and the limit of each tier that is too small; of several GPUs the one with the least free memory."""
    on_gpu, ram = each_usage(geo, plan)
    gpu = fullest(on_gpu, limits)
    memory = f"memory of GPU {gpu}" if limits.less else "GPU memory"
    return " and ".join(
        f"{rounded_up(need)} of {name}, the limit is {rounded_up(limit)}"
        for need, name, limit in ((on_gpu[gpu], memory, limits.gpu_bytes(gpu)), (ram, "RAM", limits.ram))
        if need > limit
    )


def _largest_positive(n: int, good: Callable[[int], bool]) -> int:
    """The largest k in 1..n with good(k), or 0."""
    return 1 + largest(n - 1, lambda k: good(1 + k)) if good(1) else 0


def sizes_of(rows: Sequence[int], sequences: int, seq_len: int) -> tuple[tuple[int, int], ...]:
    """`Wanted.sizes` for micro-batches of each of `rows` sequences, in a step of `sequences`."""
    return tuple((r * seq_len, -(-sequences // r)) for r in rows)


def record_size(parameters: int, ram: int) -> int:
    """Parameters of a record: many, so that drives are fast, but few compared with RAM."""
    return max(min(1 << 24, ram // 1024), min(parameters // 256, ram // 256), 1 << 12) // 4096 * 4096

"""The plain rule that makes a plan: fill the GPU, then RAM, then the SSD; recompute the rest. Pure; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

from trireme.engine.amounts import rounded_up
from trireme.engine.buffers import fits, usage
from trireme.engine.geometry import STRETCH, Geometry, geometry
from trireme.engine.plan import TIERS, DoesNotFit, Plan, UnitPlan
from trireme.models import shapes
from trireme.models.config import ModelConfig

UPDATE_TOKENS = 50_000  # tokens whose forward takes as long as the CPU's update of the same parameters
GPU_UPDATES = 0.3  # share of RAM-home units updated on the GPU: 14 B a parameter over PCIe against 19 B of DRAM
MARGIN = {"gpu": 1.0, "host": 1.25}  # of memory to ask for: the more RAM, the larger records of state are
LATE_TOKENS = 12_000  # from here on a step has time to write the moments apart from the weights


@dataclass(frozen=True)
class Lean:
    """Which way the rule leans where only time can tell what is better. The default is the plain rule."""

    x: str = "gpu"  # the first tier tried as the home of blocks' inputs
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


def simple_plan(
    cfg: ModelConfig,
    limits: dict[str, int],
    *,
    batch_tokens: tuple[int, ...] | list[int],
    dtype: str,
    mode: str = "forward",
    homes: str = "auto",
    record: int = 1 << 24,
    adam_bits: int = 32,
    on_cuda: bool = True,
    halves: bool | None = None,
    lean: Lean = Lean(),
) -> Plan:
    """A plan by a plain rule: fill the GPU, then RAM, then the SSD; recompute what does not fit.

    `limits`: bytes of gpu and host. `batch_tokens`: candidates (tokens of a micro-batch, number of them), largest
    first; the first that fits is taken. `homes`: "auto", or the tier that all weights and states are to live in, or
    "state-ssd": weights in RAM, the rest on the SSD. `halves`: whether units are halves of blocks; None: where no plan
    of whole blocks fits. `lean`: where the rule has a choice. Raises DoesNotFit with the numbers and the way out.
    """
    refused = []
    for cut in (False, True) if halves is None else (halves,):
        geo = geometry(replace(cfg, halves=cut), dtype, adam_bits)
        plan, found = _smallest(geo, limits, batch_tokens, mode, homes, record, on_cuda, lean)
        if found:
            gpu_updates = not on_cuda or adam_bits == 32  # there is no GPU kernel for narrow moments
            return _fill(geo, plan, limits, homes == "auto", gpu_updates, on_cuda and gpu_updates, lean)
        refused.append((geo, plan))
    geo, plan = min(refused, key=lambda r: _excess(*r, limits))
    raise DoesNotFit(_why_not(geo, plan, limits), usage(geo, plan))


def _smallest(
    geo: Geometry,
    limits: dict[str, int],
    batch_tokens: Iterable[tuple[int, int]],
    mode: str,
    homes: str,
    record: int,
    on_cuda: bool,
    lean: Lean,
) -> tuple[Plan, bool]:
    """The first plan that fits with everything as low as `homes` lets it be, or what lacks least; if it fits."""
    weights, state = {"auto": ("ssd", "ssd"), "state-ssd": ("host", "ssd")}.get(homes, (homes, homes))
    inputs = TIERS[TIERS.index(lean.x) : 3 if "ssd" in (weights, state) else 2]
    # Slots for weights, what leaves of a gradient at once, and slots in RAM: where units are large one waits, but fits.
    half = geo.half_piece()
    slots = ((2, half, 2), (2, half // 8, 2), (1, half // 8, 2), (1, 1, 1))
    refused = []
    waiting = ("host", "ssd") if state == "ssd" and mode != "backward" else ("host",)
    for gradients, between, (window, piece, host_window), (tokens, n_micro) in product(
        waiting, ("gpu", "host"), slots, batch_tokens
    ):
        apart = on_cuda and mode == "forward" and geo.adam_bits == 32 and tokens * n_micro >= LATE_TOKENS
        late = ("host",) if apart else ()
        for x in inputs if between == "gpu" else inputs[inputs.index("host") :]:
            low = UnitPlan(weights, state, x=x)
            units = (low,) * (geo.n_units - 1) + (replace(low, x="gpu" if between == "gpu" else x),)
            rings = dict(window=window, host_window=host_window, record=record, piece=piece)
            more = dict(rings, between=between, gradients=gradients, halves=geo.cfg.halves)
            plan = Plan(units, tokens, n_micro, geo.dtype, mode, geo.adam_bits, late, **more)
            if fits(geo, plan, limits):
                return plan, True
            refused.append(plan)
    return min(refused, key=lambda plan: _excess(geo, plan, limits)), False


def _excess(geo: Geometry, plan: Plan, limits: dict[str, int]) -> int:
    """Bytes that a plan needs above its limits, of both tiers together."""
    return sum(max(0, need - limits[tier]) for tier, need in usage(geo, plan).items())


def _fill(
    geo: Geometry, plan: Plan, limits: dict[str, int], move: bool, gpu_updates: bool, stream: bool, lean: Lean
) -> Plan:
    """Moves pieces of a plan that fits up the tiers, most useful first, while it still fits; homes only if `move`."""
    n = geo.n_units
    everything = plan.changed(range(n), weights="gpu", state="gpu")
    if move and gpu_updates and fits(geo, everything, limits):
        return _keep_activations(geo, everything, limits)

    def upgrade(base: Plan, pick: Callable[[int], Iterable[int]], most: int = n, **change) -> Plan:
        raised = lambda k: base.changed(frozenset(pick(k)), **change)
        return raised(largest(most, lambda k: fits(geo, raised(k), limits)))

    if move:
        plan = upgrade(plan, lambda k: spread(n, k), weights="host")
        if all(u.weights == "host" for u in plan.units):
            plan = upgrade(plan, lambda k: spread(n, k), state="host")
    on_gpu = dict(weights="gpu", state="gpu", update="cpu", resident=False)
    if stream and plan.mode == "forward":
        plan = share_updates(geo, plan, limits, lean.updates)
    if lean.resident:
        stay = [u for u, unit in enumerate(plan.units) if unit.update == "cpu" and unit.weights == "host"]
        plan = upgrade(plan, lambda k: stay[:k], len(stay), resident=True)
    if move and gpu_updates:
        wanted = _wanted_on_gpu(geo, plan) if lean.states is None else round(lean.states * n)
        plan = upgrade(plan, range, wanted, **on_gpu)
    slots = sum(len(geo.records(u, plan.record)) for u in range(n) if plan.units[u].state == "ssd")
    deeper = lambda k: replace(plan, state_slots=plan.state_slots + k)
    plan = deeper(largest(max(0, slots - plan.state_slots), lambda k: fits(geo, deeper(k), limits)))
    plan = _keep_activations(geo, plan, limits)
    if move and gpu_updates:
        plan = upgrade(plan, range, **on_gpu)
    if move:  # what went to the GPU has left room in RAM
        plan = fill_ram(geo, plan, limits)
    wider = lambda k: replace(plan, window=plan.window + k)
    return wider(largest(2, lambda k: fits(geo, wider(k), limits)))


def fill_ram(geo: Geometry, plan: Plan, limits: dict[str, int]) -> Plan:
    """Brings state from the SSD to RAM, of as many units as there is room for."""
    left = [u for u, unit in enumerate(plan.units) if unit.state == "ssd"]
    some = lambda k: plan.changed({left[i] for i in spread(len(left), k)}, weights="host", state="host")
    return some(largest(len(left), lambda k: fits(geo, some(k), limits)))


def longer_pieces(geo: Geometry, plan: Plan, limits: dict[str, int]) -> Plan:
    """Lets gradients leave in pieces as long as there is room for: the next waits for the last but one to be gone."""
    most = max((n for unit, n in zip(plan.units, geo.numel, strict=True) if unit.state != "gpu"), default=0)
    longer = lambda k: replace(plan, piece=max(plan.piece, k * STRETCH))
    return longer(largest(-(-most // STRETCH), lambda k: fits(geo, longer(k), limits)))


def _wanted_on_gpu(geo: Geometry, plan: Plan) -> int:
    """How many units, from the first, should have their state on the GPU so that updates hide under forward.

    The first are needed first, when the CPU has had no time to run ahead. With few tokens a step forward is short and
    an update hides nothing; then GPU memory is worth more as a home of state than for saved activations.
    """
    if plan.mode == "backward":
        return 0
    excess, count = sum(geo.numel) * (1 - plan.tokens * plan.n_micro / UPDATE_TOKENS), 0
    while excess > 0:
        excess -= geo.numel[count]
        count += 1
    return count


def share_updates(geo: Geometry, plan: Plan, limits: dict[str, int], share: float = GPU_UPDATES) -> Plan:
    """Lets GPU and CPU share the updates of RAM-home units, where they would else make forward wait.

    Under `forward` all updates run under the forward pass alone, which is shorter than what one of them needs.
    """
    in_ram = [u for u, unit in enumerate(plan.units) if unit.state == unit.weights == "host" and not unit.resident]
    chosen = {in_ram[i] for i in spread(len(in_ram), round(share * len(in_ram)))}
    shared = plan.changed(set(in_ram) - chosen, update="cpu").changed(chosen, update="gpu")
    shared = replace(shared, window=max(plan.window, 3))
    return shared if fits(geo, shared, limits) else plan


def _keep_activations(geo: Geometry, plan: Plan, limits: dict[str, int]) -> Plan:
    """Keeps every saved tensor of the last blocks on the GPU, as many blocks as fit: they live shortest."""

    def kept(k: int) -> Plan:
        base = plan
        for kind in shapes.inner_kinds(geo.cfg):
            chosen = {u for u in range(geo.head - k, geo.head) if geo.kinds[u] == kind}
            base = base.changed(chosen, saved=tuple((name, "gpu") for name in geo.saved_names(kind)))
        return base

    return kept(largest(geo.n_units - 2, lambda k: fits(geo, kept(k), limits)))


def _why_not(geo: Geometry, plan: Plan, limits: dict[str, int]) -> str:
    need, named = usage(geo, plan), {"gpu": ("GPU memory", "--gpu-memory"), "host": ("RAM", "--ram")}
    short = [tier for tier in named if need[tier] > limits[tier]]
    assert short, "a plan that fits was refused"
    numbers = [f"{rounded_up(need[t])} of {named[t][0]}, the limit is {rounded_up(limits[t])}" for t in short]
    lacks = {t: MARGIN[t] * (need[t] - limits[t]) for t in short}  # the limit is what a reserve leaves
    raises = [f"{named[t][1]} by {rounded_up(lacks[t])}" for t in short]
    out = [f"Raise {' and '.join(raises)}"]
    if "gpu" in short:
        shorter = lambda k: usage(geo, replace(plan, tokens=1 + k))["gpu"] <= limits["gpu"]
        if shorter(0):
            most = 1 + largest(plan.tokens - 1, shorter)
            out.append(f"lower --seq-len (of {plan.tokens:,} tokens a micro-batch {most:,} fit)")
    with_ = lambda k: replace(plan, n_micro=1 + k)
    if fits(geo, with_(0), limits):
        most = 1 + largest(plan.n_micro - 1, lambda k: fits(geo, with_(k), limits))
        out.append(f"lower --batch-size (of {plan.n_micro:,} micro-batches a step {most:,} fit)")
    if short == ["host"] and plan.mode != "backward" and plan.gradients == "host":
        out.append("--max-grad-norm 0, which needs no room for all gradients")
    return f"even the smallest plan needs {' and '.join(numbers)}. {', or '.join(out)}."

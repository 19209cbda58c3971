"""The fastest plan that a short search around the plain rule finds, and why.

The rule (rule.py) fills the GPU, then RAM, then the SSD, and recomputes what it does not keep. What it cannot weigh is
time: whether activations should rather travel to RAM and back than be computed again, and how large a micro-batch
should be. Here a few such variants that fit are ranked by a floor in closed form, and what could still be faster than
the best so far is simulated. The rule's plan is the first of them, so the choice is never predicted to be slower; and
the variants do not depend on the rates. Where updates run is left to the rule: of all that a plan decides, only that
and the size of a micro-batch can change a rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from trireme.engine.plan import DoesNotFit, Geometry, Plan, UnitPlan, fits
from trireme.engine.predict import Batch, Prediction, predict, unit_seconds
from trireme.engine.rates import Rates
from trireme.engine.rule import largest, simple_plan, spread
from trireme.models import shapes
from trireme.models.config import ModelConfig

MICRO_BATCHES = 2  # sizes tried, from the largest that fits
SHARES = (1.0, 0.5)  # of the blocks whose activations RAM has room for


@dataclass(frozen=True)
class Choice:
    """A plan, its predicted step, and a sentence for each decision, with its numbers."""

    plan: Plan
    found: Prediction
    because: tuple[str, ...]


def choose(cfg: ModelConfig, limits: dict[str, int], rates: Rates, seq_len: int, **rule) -> Choice:
    """The fastest of the variants of simple_plan(cfg, limits, **rule). Deterministic. Raises DoesNotFit."""
    first = simple_plan(cfg, limits, **rule)
    if first.uses("ssd") and not (rates.ssd_read and rates.ssd_write):
        raise DoesNotFit(
            f"RAM of {_gib(limits['host'])} and GPU memory of {_gib(limits['gpu'])} do not hold everything, and there "
            "is no drive for the rest."
        )
    geo = Geometry(cfg, first.dtype, first.adam_bits)
    judge = lambda plan: predict(cfg, plan, rates, Batch(plan.tokens, seq_len, plan.n_micro))  # noqa: E731
    per_token = lambda plan, seconds: seconds / (plan.tokens * plan.n_micro)  # noqa: E731
    before = judge(first)
    best, found = first, before
    ranked = []
    for base in _sizes(cfg, limits, first, rule):
        for plan in (base, *_swapping(geo, base, limits, seq_len)):
            floor = per_token(plan, max(floors(geo, plan, rates, seq_len).values()))
            ranked.append((floor, len(ranked), plan))
    for floor, _, plan in sorted(ranked):
        if plan == first or floor >= per_token(best, found.step_s):
            continue
        then = judge(plan)
        if per_token(plan, then.step_s) < per_token(best, found.step_s):
            best, found = plan, then
    return Choice(best, found, _because(geo, first, before, best, found))


def _sizes(cfg: ModelConfig, limits: dict[str, int], first: Plan, rule: dict) -> Iterable[Plan]:
    """The rule's plan for its micro-batch and for the next smaller ones."""
    yield first
    smaller = [(tokens, n) for tokens, n in rule["batch_tokens"] if tokens < first.tokens]
    for size in smaller[: MICRO_BATCHES - 1]:
        try:
            yield simple_plan(cfg, limits, **{**rule, "batch_tokens": [size]})
        except DoesNotFit:
            continue


# ---------------------------------------------------------------- activations


def front(cfg: ModelConfig, seq_len: int) -> list[tuple[str, ...]]:
    """Sets of a block's saved tensors that no other set beats in both bytes and recomputation, thinned to two."""
    pairs = shapes.attended_pairs([seq_len], cfg.window)
    nbytes = shapes.saved_bytes(cfg, seq_len, 2)
    found = []
    for size in range(1, len(nbytes) + 1):
        for names in combinations(nbytes, size):
            again = shapes.recompute_flops(cfg, frozenset(names), seq_len, pairs)
            found.append((sum(nbytes[n] for n in names), again, names))
    kept, least = [], shapes.recompute_flops(cfg, frozenset(), seq_len, pairs)
    for _, again, names in sorted(found):
        if again < least:
            kept.append(names)
            least = again
    return [kept[len(kept) // 2], kept[-1]] if len(kept) > 2 else kept


def _swapping(geo: Geometry, plan: Plan, limits: dict[str, int], seq_len: int) -> Iterable[Plan]:
    """Variants that send saved tensors of some blocks to RAM, and keep as many of the last blocks on the GPU as fit."""
    n = geo.cfg.n_layers
    plain = replace(plan, units=tuple(replace(u, saved=()) for u in plan.units))
    everything = tuple(shapes.saved_shapes(geo.cfg, 1))
    for names in front(geo.cfg, seq_len):
        with_ = lambda k, j, names=names: _saved(plain, n, names, k, everything, j)  # noqa: E731
        room = largest(n, lambda k: fits(geo, with_(k, 0), limits))  # noqa: B023
        for k in dict.fromkeys(int(room * share) for share in SHARES):
            if k:
                yield with_(k, largest(n, lambda j: fits(geo, with_(k, j), limits)))  # noqa: B023


def _saved(plan: Plan, n: int, names: Sequence[str], k: int, everything: Sequence[str], keep: int) -> Plan:
    """`plan` with `names` of k evenly spread blocks in RAM, everything of the last `keep` of n blocks on the GPU."""
    away = spread(max(n - keep, 0), min(k, n - keep))

    def unit(u: int, old: UnitPlan) -> UnitPlan:
        if n - keep < u <= n:
            return replace(old, saved=tuple((name, "gpu") for name in everything))
        return replace(old, saved=tuple((name, "host") for name in names)) if u - 1 in away else old

    return replace(plan, units=tuple(unit(u, old) for u, old in enumerate(plan.units)))


# ---------------------------------------------------------------- a floor in closed form


def floors(geo: Geometry, plan: Plan, rates: Rates, seq_len: int) -> dict[str, float]:
    """Seconds that each resource needs at least for a step of this plan, if it were never kept waiting."""
    seconds = unit_seconds(geo.cfg, plan, rates, Batch(plan.tokens, seq_len, plan.n_micro))
    up = down = read = written = 0
    on_cpu = 0
    for u, unit in enumerate(plan.units):
        weights, state = geo.weights[u].span, geo.state_span(u, plan.record)
        swapped = geo.saved_layout(unit.names("host") + unit.names("ssd"), plan.tokens).span
        swapped = plan.n_micro * (swapped + (geo.x_bytes(plan.tokens) if u and unit.x != "gpu" else 0))
        streamed = unit.update == "gpu"
        up += swapped + (weights if unit.weights != "gpu" else 0) + (state if streamed else 0)
        down += swapped + (weights if unit.state != "gpu" else 0) + (state if streamed else 0)
        on_cpu += geo.numel[u] if unit.state != "gpu" and not streamed else 0
        moved = (state if unit.state == "ssd" else 0) + (weights if unit.weights == "ssd" else 0)
        read, written = read + moved, written + moved
    ssd = read / rates.ssd_read + written / rates.ssd_write if read else 0.0
    return {"compute": plan.n_micro * sum(seconds.values()), "h2d": up / rates.h2d, "d2h": down / rates.d2h,
            "cpu": on_cpu / rates.adam, "ssd": ssd}  # fmt: skip


# ---------------------------------------------------------------- why


def _because(geo: Geometry, first: Plan, before: Prediction, plan: Plan, found: Prediction) -> tuple[str, ...]:
    n, said = len(plan.units), []
    on_ssd = [u for u, unit in enumerate(plan.units) if unit.state == "ssd"]
    if on_ssd:
        nbytes = sum(geo.state_span(u, plan.record) for u in on_ssd)
        said.append(
            f"optimizer state of {len(on_ssd)} of {n} units ({_gib(nbytes)}) lies on the SSD: RAM holds no more"
        )
    if plan.tokens != first.tokens:
        said.append(f"micro-batches of {plan.tokens:,} tokens rather than {first.tokens:,} leave room on the GPU")
    away = [u for u in range(1, n - 1) if plan.units[u].names("host")]
    if away:
        nbytes = plan.n_micro * sum(geo.saved_layout(plan.units[u].names("host"), plan.tokens).span for u in away)
        names = ", ".join(plan.units[away[0]].names("host"))
        said.append(f"{names} of {len(away)} of {n - 2} blocks wait in RAM ({_gib(nbytes)}): computation takes "
                    f"{found.busy['compute']:.3g} s of a step rather than {before.busy['compute']:.3g} s")  # fmt: skip
    if plan != first:
        per = plan.tokens * plan.n_micro / (first.tokens * first.n_micro)
        said.append(
            f"a step of the plain rule's plan would take {per * before.step_s:.3g} s, this one {found.step_s:.3g} s"
        )
    return tuple(said)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"

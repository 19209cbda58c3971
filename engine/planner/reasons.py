"""The decisions of a plan, as sentences with figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from trireme.engine.amounts import gib, seconds
from trireme.engine.geometry import Geometry
from trireme.engine.plan import TIERS, Plan, SavedTier
from trireme.engine.planner.predict import Batch, Prediction
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.swaps import moves

NOTICED = 1.005  # times as long
PLACES: dict[SavedTier, str] = {"peer": "memory of other GPUs", "host": "RAM", "ssd": "the SSD"}


def reasons(
    geo: Geometry, first: Plan, before: Prediction, plan: Plan, found: Prediction, peers: bool = True
) -> tuple[str, ...]:
    """One sentence for each decision of `plan`. `first`: the plan of the simple rule; `before`: its step.

    `peers`: GPUs have access to each other's memory.
    """
    said = []
    if plan.halves:
        said.append("blocks are divided into sub-layers, attention and MLP: whole blocks do not fit on the GPU")
    if plan.slices > 1:
        said.append(
            f"frozen experts of a layer are transferred in {plan.slices} slices: two at a time take less GPU memory"
        )
    if plan.at_once:
        said.append(f"experts are decoded {plan.at_once} at a time: those of a layer do not fit on the GPU together")
    of = lambda units, nbytes: f"{len(units)} of {len(plan.units)} layers ({gib(sum(map(nbytes, units)), 1)})"
    if on_ssd := [u for u, unit in enumerate(plan.units) if unit.state == "ssd"]:
        states = of(on_ssd, lambda u: geo.state_span(u, plan.record))
        said.append(f"optimizer state of {states} is on the SSD: it does not fit in RAM")
    if away := [u for u, unit in enumerate(plan.units) if unit.base == "ssd" and geo.base_bytes[u]]:
        said.append(f"frozen weights of {of(away, geo.base_bytes.__getitem__)} are read from the SSD")
    if plan.tokens != first.tokens:
        gain = "leave room on the GPU" if plan.tokens < first.tokens else "add to the gradients less often"
        said.append(f"micro-batches of {plan.tokens:,} tokens rather than {first.tokens:,} {gain}")
    said += _activations(geo, plan, found.busy["compute"], before.busy["compute"])
    said += _outputs(plan, peers)
    if spilled := [u for u in range(geo.n_units) if plan.spilled(u)]:
        gradients = of(spilled, lambda u: geo.weights[u].span)
        said.append(f"gradients of {gradients} wait on the SSD for the global norm: they do not fit in RAM")
    tiers = {"host" if t == "gpu" else t for t in plan.late_moments}
    late = [t for t in TIERS if t in tiers and any(u.state == t for u in plan.units)]
    if late:
        where = " and ".join(f"{'on' if tier == 'ssd' else 'in'} {PLACES[tier]}" for tier in late)
        said.append(f"moments of the state {where} are written during backward, which is longer than forward")
    times = plan.tokens * plan.n_micro / (first.tokens * first.n_micro) * before.step_s / found.step_s
    if times > NOTICED:
        said.append(f"a plan that only fills GPU, RAM and SSD in turn would take {times:.3g} times as long")
    return tuple(said)


def _activations(geo: Geometry, plan: Plan, compute: float, before: float) -> Iterable[str]:
    """Which tensors are swapped. `compute`, `before`: seconds of computation in a step, and by the simple rule."""
    n, blocks = len(plan.units), "sub-layers" if plan.halves else "blocks"
    for tier, where in PLACES.items():
        away = [u for u in range(1, n - 1) if plan.units[u].names(tier)]
        if away:
            nbytes = plan.n_micro * sum(geo.saved_layout(u, plan.units[u].names(tier), plan.tokens).span for u in away)
            now, then = f"{compute:.3g}", f"{before:.3g}"
            gain = f": computation takes {now} s of a step rather than {then} s" * (float(now) < float(then))
            yield (
                f"{_counted([plan.units[u].names(tier) for u in away])} of {n - 2} {blocks} are swapped to {where} "
                f"({gib(nbytes, 1)}){gain}"
            )
    inputs = sum(unit.x != "gpu" for unit in plan.units[1:-1])
    if inputs:
        nbytes = plan.n_micro * inputs * geo.x_bytes(plan.tokens)
        on_gpu = sum(unit.state == "gpu" for unit in plan.units)
        instead = f", which holds the state of {on_gpu} of {n} layers" * (0 < on_gpu < n)
        yield f"the inputs of {inputs} {blocks} are stored outside the GPU ({gib(nbytes, 1)}){instead}"


def _outputs(plan: Plan, peers: bool) -> Iterable[str]:
    """Where the outputs of layers are stored until the next layer, and where losses are computed."""
    if plan.gpus > 1 and plan.between == "gpu":
        yield "outputs of layers go to the next GPU by peer copies, not through RAM"
    if plan.between == "host" and plan.gpus > 1 and not peers:
        yield "outputs of layers go to the next GPU through RAM: the GPUs have no access to each other's memory"
    elif plan.between == "host":
        yield f"outputs of layers are stored outside the GPU, where those of {plan.n_micro} micro-batches do not fit"


def benefits(geo: Geometry, batch: Batch, rates: Rates) -> list[str]:
    """A line for each of `moves`: which tensors are saved next, and the recomputation that this saves."""
    found, before = [], dict[str, tuple[str, ...]]()
    for move in moves(geo, batch, rates):
        more = ", ".join(name for name in move.names if name not in before.get(move.kind, ()))
        before[move.kind] = move.names
        where = "a block" if move.kind == "block" else f"a block's {move.kind}"
        spared = f"{seconds(move.seconds)} of recomputation, and takes {gib(move.nbytes, 1)}"
        found.append(f"saving {more} of {where} avoids {spared}: {1e12 * move.seconds / move.nbytes:,.0f} ms per GB")
    return found


def _counted(saved: Sequence[tuple[str, ...]]) -> str:
    """Names of saved tensors, with the number of units that save them."""
    units = Counter(name for names in saved for name in names)
    alike = {count: [name for name in units if units[name] == count] for count in units.values()}
    return " and ".join(f"{', '.join(names)} of {count}" for count, names in alike.items())

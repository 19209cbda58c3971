"""Why a plan is what it is: its decisions in sentences, with their numbers."""

from __future__ import annotations

from trireme.engine.amounts import gib
from trireme.engine.geometry import Geometry
from trireme.engine.plan import Plan
from trireme.engine.planner.predict import Prediction

WORTH = 0.995  # of what the plain rule's plan would take: a gain that is worth a sentence


def reasons(geo: Geometry, first: Plan, before: Prediction, plan: Plan, found: Prediction) -> tuple[str, ...]:
    """A sentence for each decision of `plan`, which is predicted to take the step `found`.

    `first` is the plain rule's plan, and `before` its step.
    """
    n, said = len(plan.units), []
    blocks = "half blocks" if plan.halves else "blocks"
    if plan.halves:
        said.append("units are halves of blocks, attention and MLP: whole blocks do not fit the GPU")
    on_ssd = [u for u, unit in enumerate(plan.units) if unit.state == "ssd"]
    if on_ssd:
        nbytes = sum(geo.state_span(u, plan.record) for u in on_ssd)
        said.append(
            f"optimizer state of {len(on_ssd)} of {n} units ({gib(nbytes, 1)}) lies on the SSD: RAM holds no more"
        )
    if plan.tokens != first.tokens:
        gain = "leave room on the GPU" if plan.tokens < first.tokens else "add to the gradients less often"
        said.append(f"micro-batches of {plan.tokens:,} tokens rather than {first.tokens:,} {gain}")
    for tier, where in (("host", "in RAM"), ("ssd", "on the SSD")):
        away = [u for u in range(1, n - 1) if plan.units[u].names(tier)]
        if away:
            nbytes = plan.n_micro * sum(geo.saved_layout(plan.units[u].names(tier), plan.tokens).span for u in away)
            names, seconds = ", ".join(plan.units[away[0]].names(tier)), found.busy["compute"]
            said.append(f"{names} of {len(away)} of {n - 2} {blocks} wait {where} ({gib(nbytes, 1)}): computation "
                        f"takes {seconds:.3g} s of a step rather than {before.busy['compute']:.3g} s")  # fmt: skip
    inputs = sum(unit.x != "gpu" for unit in plan.units[1:-1])
    if inputs:
        nbytes = plan.n_micro * inputs * geo.x_bytes(plan.tokens)
        on_gpu = sum(unit.state == "gpu" for unit in plan.units)
        instead = f", which holds the state of {on_gpu} of {n} units" * (on_gpu > 0)
        said.append(f"the inputs of {inputs} {blocks} wait outside the GPU ({gib(nbytes, 1)}){instead}")
    if plan.between == "host":
        said.append(f"the GPU has no room for what a unit leaves for the next in all {plan.n_micro} micro-batches: it "
                    "waits outside")  # fmt: skip
    spilled = [u for u in range(n) if plan.spilled(u)]
    if spilled:
        nbytes = sum(geo.weights[u].span for u in spilled)
        where = f"gradients of {len(spilled)} of {n} units ({gib(nbytes, 1)}) wait on the SSD for their norm"
        said.append(f"{where}: RAM has no room for them")
    late = [t for t in plan.late_moments if any((u.state, u.update) == (t, "cpu") for u in plan.units)]
    if late:
        where = " and ".join({"host": "in RAM", "ssd": "on the SSD"}[tier] for tier in late)
        said.append(f"of state {where} the moments are written under backward, which is longer than forward")
    per = plan.tokens * plan.n_micro / (first.tokens * first.n_micro)
    if per * before.step_s > found.step_s / WORTH:
        said.append(f"the plain rule's plan would take {per * before.step_s / found.step_s:.3g} times as long")
    return tuple(said)

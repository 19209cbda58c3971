"""After its first steps a run knows its machine better than any benchmark: rates corrected by measured task times.

What a probe measures in seconds, one thing at a time, differs from what a run meets: other shapes, other neighbours,
a drive past its fast cache. A traced step tells how long each lane's tasks really took; where they took twice as long
as predicted, the lane's rates are halved. The step that is measured trains, as PatrickStar's warm-up iteration does.
"""

from __future__ import annotations

from collections.abc import Sequence

from trireme.engine.choose import Choice, choose, pinned
from trireme.engine.job import Job
from trireme.engine.lanes import Span, busy
from trireme.engine.predict import Batch, Prediction, predict
from trireme.engine.rates import COMPUTATION, Rates

BY_LANE = {  # what a lane's tasks are timed by
    "compute": COMPUTATION,
    "h2d": ("h2d",),
    "d2h": ("d2h",),
    "cpu": ("adam", "dram"),
    "ssd": ("ssd_read", "ssd_write"),
}
SHARE = 0.05  # of a step: lanes that work less than that say nothing
WORTH = 0.9  # of a step: what another plan must come down to


def measured(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds that each of BY_LANE was at work. The drive is, while any request to it is in flight."""
    found, end = busy(spans), 0.0
    found["ssd"] = 0.0
    for span in sorted((s for s in spans if s.lane in ("ssd_read", "ssd_write")), key=lambda s: s.start):
        found["ssd"] += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
    return {lane: found.get(lane, 0.0) for lane in BY_LANE}


def corrected(rates: Rates, found: Prediction, spans: Sequence[Span], seconds: float) -> Rates:
    """The rates by which `found`, the prediction of a step of `seconds`, would have had each lane's measured time."""
    for lane, took in measured(spans).items():
        if min(took, found.busy[lane]) > SHARE * seconds:
            rates = rates.times(found.busy[lane] / took, BY_LANE[lane])
    return rates


def better(job: Job, steps: int) -> Choice | None:
    """A plan that promises to be worth a move for `steps` steps, with updates where they are; None where none does.

    A move takes all that is in memory through the drive and back.
    """
    if job.device.type != "cuda" or job.options.plan:
        return None
    p, rates = job.plan, job.machine.rates
    rule = dict(dtype=p.dtype, mode=p.mode, record=p.record, adam_bits=p.adam_bits)
    choice = choose(job.cfg, job.limits, rates, job.seq_len, p, batch_tokens=[(p.tokens, p.n_micro)], **rule)
    now = predict(job.cfg, p, rates, Batch(p.tokens, job.seq_len, p.n_micro)).step_s
    move = 14 * job.parameters * (1 / rates.ssd_read + 1 / rates.ssd_write)
    worth = choice.found.step_s < WORTH * now and steps * (now - choice.found.step_s) > 2 * move
    needs_room = choice.plan.uses("ssd") and not p.uses("ssd")  # which nobody has set aside
    return choice if worth and not needs_room and pinned(choice.plan, p) == choice.plan else None

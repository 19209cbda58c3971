"""Whether another plan is worth moving to, by rates that the first steps corrected."""

from __future__ import annotations

from trireme.engine.planner.choose import Choice, choose, pinned
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.run.job import Job

WORTH = 0.9  # of a step: what another plan must come down to


def better(job: Job, steps: int) -> Choice | None:
    """A plan that promises to be worth a move for `steps` steps, with updates where they are; None where none does.

    A move takes all that is in memory through the drive and back.
    """
    if job.device.type != "cuda" or job.options.plan:
        return None
    p, rates = job.plan, job.machine.rates
    rule = dict(dtype=p.dtype, mode=p.mode, record=p.record, adam_bits=p.adam_bits, halves=p.halves)
    document, trained = job.data.document, job.data.trained
    rule |= dict(batch_tokens=[(p.tokens, p.n_micro)], trained=trained)
    choice = choose(job.cfg, job.limits, rates, document, p, **rule)
    now = predict(job.cfg, p, rates, Batch(p.tokens, document, p.n_micro, trained), roughly=True).step_s
    move = 14 * job.parameters * (1 / rates.ssd_read + 1 / rates.ssd_write)
    worth = choice.found.step_s < WORTH * now and steps * (now - choice.found.step_s) > 2 * move
    needs_room = choice.plan.uses("ssd") and not p.uses("ssd")  # which nobody has set aside
    return choice if worth and not needs_room and pinned(choice.plan, p) == choice.plan else None

"""Whether another plan is worth a move, by corrected rates."""

from __future__ import annotations

from dataclasses import replace

from trireme.engine.planner.choose import Choice, choose
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rule import Wanted
from trireme.engine.planner.variants import updated_alike
from trireme.engine.run.job import Job

WORTH_A_MOVE = 0.9  # of a step's time, at most


def better(job: Job, steps: int) -> Choice | None:
    """A plan worth a move through the drive and back for `steps` steps, updates where they are; else None."""
    if job.device.type != "cuda" or job.options.plan:
        return None
    p, rates, document, trained = job.plan, job.machine.rates, job.data.document, job.data.trained
    wanted = replace(Wanted.like(p, document, trained), halves=p.halves)
    choice = choose(job.cfg, job.limits, rates, wanted, begun=p)
    now = predict(job.cfg, p, rates, Batch(p.tokens, document, p.n_micro, trained), roughly=True).step_s
    move = 14 * job.parameters * (1 / rates.ssd_read + 1 / rates.ssd_write)
    worth = choice.found.step_s < WORTH_A_MOVE * now and steps * (now - choice.found.step_s) > 2 * move
    needs_room = choice.plan.uses("ssd") and not p.uses("ssd")  # not reserved
    return choice if worth and not needs_room and updated_alike(choice.plan, p) == choice.plan else None

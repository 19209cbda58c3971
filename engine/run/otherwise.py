"""What else would train: another plan by corrected rates, adapters where everything does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trireme.engine.amounts import compact, seconds
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.choose import Choice, choose
from trireme.engine.planner.forecast import Files, Forecast, Work
from trireme.engine.planner.machine import this_machine
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rule import Wanted
from trireme.engine.planner.variants import updated_alike
from trireme.engine.run.begin.job import Job
from trireme.engine.run.begin.limits import place
from trireme.engine.run.begin.model import length, what_is_trained
from trireme.engine.run.begin.settle import Planner
from trireme.engine.run.options import Options
from trireme.models.config import InputError

WORTH_A_MOVE = 0.9  # of a step's time, at most
RANK = 16  # of adapters that are offered


def better(job: Job, steps: int) -> Choice | None:
    """A plan worth a move through the drive and back for `steps` steps, updates where they are; else None."""
    if job.device.type != "cuda" or job.options.plan or job.plan.hosts > 1:
        return None
    p, rates, document, trained = job.plan, job.machine.rates, job.data.document, job.data.trained
    wanted = replace(Wanted.like(p, document, trained), halves=p.halves)
    choice = choose(job.cfg, job.limits, rates, wanted, begun=p)
    now = predict(job.cfg, p, rates, Batch(p.tokens, document, p.n_micro, trained), roughly=True).step_s
    move = 14 * job.trained_parameters * (1 / rates.ssd_read + 1 / rates.ssd_write)
    move += job.forecast.frozen_read / rates.ssd_read
    worth = choice.found.step_s < WORTH_A_MOVE * now and steps * (now - choice.found.step_s) > 2 * move
    needs_room = choice.plan.uses("ssd") and not p.uses("ssd")  # not reserved
    return choice if worth and not needs_room and updated_alike(choice.plan, p) == choice.plan else None


def adapters_instead(options: Options) -> str:
    """A sentence that offers adapters, with their step as predicted; "" where they fit no better. Reads no data."""
    if options.lora is not None or any((options.adapter, options.freeze, options.train, options.resume, options.plan)):
        return ""
    lighter = replace(options, lora=RANK)
    try:
        cfg = what_is_trained(lighter)
        device, limits, assumed = place(lighter)
        on_cuda, n, seq_len = device.type == "cuda", options.batch_size, length(lighter, cfg)
        planner, work = Planner(lighter, cfg, seq_len, on_cuda, limits, None), Work(seq_len, n, 1, document=seq_len)
        limits, stores = planner.limits_for(n), [Path(d) for d in options.store] or [Path(options.out)]
        if not on_cuda:
            planner.refuse_early()
            return f"Or train adapters, which fit: --lora {RANK}."
        machine = assumed or this_machine(device, planner.dtype, limits, stores, cfg.fp8)
        settled = planner.find(work, Files(export=1), limits, machine, stores)
    except (DoesNotFit, InputError):
        return ""
    step = Forecast(cfg, settled.plan, settled.machine, limits, work).step.step_s
    said = f"{seconds(step)} a step of {compact(work.tokens)} tokens, {compact(work.tokens / step)} tok/s"
    return f"Or train adapters, which fit: --lora {RANK}, {said}."

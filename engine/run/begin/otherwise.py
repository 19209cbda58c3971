"""Alternatives that would fit: adapters, suggested where full fine-tuning does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trireme.engine.amounts import compact, seconds
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.forecast import Files, Forecast, Work
from trireme.engine.planner.machine import this_machine
from trireme.engine.run.begin.limits import place
from trireme.engine.run.begin.model import length, what_is_trained
from trireme.engine.run.begin.settle import Planner
from trireme.engine.run.options import Options
from trireme.models.config import InputError

RANK = 16  # of adapters that are offered


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

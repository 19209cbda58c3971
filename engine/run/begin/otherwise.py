"""What else would train: adapters or 8-bit moments, offered where everything does not fit."""

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


def instead(options: Options) -> str:
    """Sentences that offer adapters, and 8-bit moments, with their steps as predicted; "" where they fit no better.

    Reads no data.
    """
    if options.lora is not None or any((options.adapter, options.freeze, options.train, options.resume, options.plan)):
        return ""
    adapters = _tried(replace(options, lora=RANK), Files(export=1))
    said = [f"Or train adapters, which fit: --lora {RANK}{adapters}."] if adapters is not None else []
    if options.adam_bits in (None, 32) and (fewer := _tried(replace(options, adam_bits=8), Files())):
        said.append(f"Or train all weights with --adam-bits 8{fewer}.")
    return " ".join(said)


def _tried(lighter: Options, files: Files) -> str | None:
    """What is said of a step; "" on a CPU, where none is predicted; None where it does not fit."""
    try:
        cfg = what_is_trained(lighter)
        device, limits, assumed = place(lighter)
        on_cuda, n, seq_len = device.type == "cuda", lighter.batch_size, length(lighter, cfg)
        planner, work = Planner(lighter, cfg, seq_len, on_cuda, limits, None), Work(seq_len, n, 1, document=seq_len)
        limits, stores = planner.limits_for(n), [Path(d) for d in lighter.store] or [Path(lighter.out)]
        if not on_cuda:
            planner.refuse_early()
            return ""
        machine = assumed or this_machine(device, planner.dtype, limits, stores, cfg.fp8)
        settled = planner.find(work, files, limits, machine, stores)
    except (DoesNotFit, InputError):
        return None
    step = Forecast(cfg, settled.plan, settled.machine, limits, work).step.step_s
    return f", {seconds(step)} a step of {compact(work.tokens)} tokens, {compact(work.tokens / step)} tok/s"

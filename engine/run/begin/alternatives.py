"""What else would train, offered if a run does not fit: adapters, with a quantized base, or 8-bit moments."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trireme.engine.amounts import compact, seconds
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.forecast import Files, Forecast, Work
from trireme.engine.planner.machine import this_machine
from trireme.engine.run.begin.limits import device_and_limits
from trireme.engine.run.begin.model import sequence_length, what_is_trained
from trireme.engine.run.job import check_room, prepare
from trireme.engine.run.options import Options
from trireme.engine.run.plan import Planner
from trireme.models.config import InputError
from trireme.storage.headers import CheckpointError

RANK = 16  # of adapters that are offered
BASES = "fp8", "nf4"  # of what is frozen, the more exact first


def alternatives(options: Options) -> str:
    """Sentences that offer adapters, adapters with a packed base, and 8-bit moments, each with its predicted step; ""
    if none fits.

    Reads no data.
    """
    if options.resume or options.plan:
        return ""
    if options.lora is not None or any((options.adapter, options.freeze, options.train)):
        based = _base_that_fits(options)
        return f"Or quantize what is frozen, which then fits: {based}." if based else ""
    lighter = replace(options, lora=RANK)
    adapters = _step_if_it_fits(lighter, Files(export=1))
    if adapters is None and (based := _base_that_fits(lighter)):
        adapters = f" {based}"
    said = [f"Or train adapters, which fit: --lora {RANK}{adapters}."] if adapters is not None else []
    if options.adam_bits in (None, 32) and (fewer := _step_if_it_fits(replace(options, adam_bits=8), Files())):
        said.append(f"Or train all weights with --adam-bits 8{fewer}.")
    return " ".join(said)


def _base_that_fits(options: Options) -> str | None:
    """`--base` with the first of BASES that fits, and its step; None if none fits, or one is given already."""
    for base in BASES if options.base is None else ():
        with suppress(DoesNotFit, InputError, CheckpointError):
            job = prepare(replace(options, base=base, data=()), say=lambda _: None)
            if not options.assume:
                check_room(job)
            return f"--base {base}{_step_line(job.forecast) if job.device.type == 'cuda' else ''}"
    return None


def _step_if_it_fits(lighter: Options, files: Files) -> str | None:
    """Words on the predicted step; "" on a CPU, where none is predicted; None if it does not fit."""
    try:
        cfg = what_is_trained(lighter)
        device, limits, assumed = device_and_limits(lighter)
        on_cuda, n, seq_len = device.type == "cuda", lighter.batch_size, sequence_length(lighter, cfg)
        planner, work = Planner(lighter, cfg, seq_len, on_cuda, limits, None), Work(seq_len, n, 1, document=seq_len)
        limits, stores = planner.limits_for(n), [Path(d) for d in lighter.store] or [Path(lighter.out)]
        if not on_cuda:
            planner.refuse_early()
            return ""
        machine = assumed or this_machine(device, planner.dtype, limits, stores, cfg.fp8, cfg.scan)
        found = planner.find(work, files, limits, machine, stores)
    except (DoesNotFit, InputError):
        return None
    return _step_line(Forecast(cfg, found.plan, found.machine, limits, work))


def _step_line(f: Forecast) -> str:
    tokens, step_s = f.work.tokens, f.step.step_s
    return f", {seconds(step_s)} a step of {compact(tokens)} tokens, {compact(tokens / step_s)} tok/s"

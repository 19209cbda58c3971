"""What else would train, offered if a run does not fit: adapters, with a quantized base, or 8-bit moments."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from trireme.engine.amounts import compact, seconds
from trireme.engine.plan import DoesNotFit
from trireme.engine.run.job import check_room, prepare
from trireme.engine.run.options import Options
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
    adapters = _step_if_it_fits(lighter)
    if adapters is None and (based := _base_that_fits(lighter)):
        adapters = f" {based}"
    said = [f"Or train adapters, which fit: --lora {RANK}{adapters}."] if adapters is not None else []
    if options.adam_bits in (None, 32) and (fewer := _step_if_it_fits(replace(options, adam_bits=8))):
        said.append(f"Or train all weights with --adam-bits 8{fewer}.")
    return " ".join(said)


def _base_that_fits(options: Options) -> str | None:
    """`--base` with the first of BASES that fits, and its step; None if none fits, or one is given already."""
    steps = ((base, _step_if_it_fits(replace(options, base=base))) for base in BASES if options.base is None)
    return next((f"--base {base}{step}" for base, step in steps if step is not None), None)


def _step_if_it_fits(options: Options) -> str | None:
    """Words on the predicted step; "" on a CPU, where none is predicted; None if it does not fit."""
    with suppress(DoesNotFit, InputError, CheckpointError):
        job = prepare(replace(options, data=()), say=lambda _: None)
        if not options.assume:
            check_room(job)
        if job.device.type == "cpu":
            return ""
        tokens, step_s = job.work.tokens, job.forecast.step.step_s
        return f", {seconds(step_s)} a step of {compact(tokens)} tokens, {compact(tokens / step_s)} tok/s"
    return None

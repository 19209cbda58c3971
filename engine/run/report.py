"""A job as lines, before the first step, and as figures for Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trireme.engine.amounts import compact, count, duration, gb, gib, seconds
from trireme.engine.geometry import Geometry
from trireme.engine.optimizer import learning_rate
from trireme.engine.planner.advice import ENDLESS, faster
from trireme.engine.planner.clock import Part
from trireme.engine.planner.host import available_ram
from trireme.engine.planner.lines import (
    disk_line,
    gpu_lines,
    memory_lines,
    ready_line,
    unmeasured_line,
    wear_line,
    wear_warning,
)
from trireme.engine.planner.whole import Events, compile_s, estimated_parts, evaluation_s, written
from trireme.engine.run import screen
from trireme.engine.run.evaluate import LONGEST, MAX_NEW
from trireme.engine.run.job import BYTES, Job, bytes_of
from trireme.engine.run.opening import of_head, parameters
from trireme.engine.run.options import Every, Options
from trireme.engine.run.screen import labelled
from trireme.engine.tuning.cached import Cached
from trireme.engine.tuning.chosen import trained_lines
from trireme.engine.tuning.packed_source import Packed
from trireme.engine.tuning.quantized import quantized
from trireme.engine.tuning.rewritten import Rewritten
from trireme.models import hf
from trireme.models.config import ModelConfig
from trireme.models.sizes import narrow, shapes

COMPLETE: tuple[Part, ...] = ("evaluations", "samples", "snapshots", "export")  # whose last time predicts the next
UNUSUAL = 30  # times the default learning rate


def lines(job: Job) -> Iterator[str]:
    """The report, in full with --verbose and of a dry run, whose search for what is faster comes last."""
    f, o, full = job.forecast, job.options, job.options.verbose or job.options.dry_run
    steps_s = job.total_steps * f.step.step_s if job.on_gpu else None
    writes = written(f, job.total_steps, events(job, 0, steps_s))
    yield from filter(None, [wear_warning(f, writes, steps_s)])
    wear = wear_line(f, writes)
    for label, texts in {
        "model": _model(job),
        "experts": _experts(job),
        "base": _base(job),
        "data": job.data.report.lines() if job.read else [_no_data(job)],
        "val": job.data.describe_held_out() if job.read else [],
        "example": _examples(job),
        "method": [_method(job)],
        "trained": trained_lines(job.cfg, {"--train": o.train, "--freeze": o.freeze}) if o.train or o.freeze else [],
        "machine": _machine(job) if full or job.on_gpu else [],
        "steps": [_steps(job)],
        "eval": _evaluations(job),
        "ssd": [wear] if wear and (full or job.plan.uses("ssd")) else [],
        "disk": [disk_line(f) if full else _disk(job)],
        "memory": [] if full else [_memory(job)],
    }.items():
        yield from labelled(label, texts)
    yield from memory_lines(f, job.on_gpu) if full else []
    on_cpu = ["time     known after the second step: on a CPU it is measured"]
    yield from [*gpu_lines(f), f"ready    {ready_line(estimate(job))}"] if job.on_gpu else on_cpu
    yield from _notes(job)
    if o.dry_run and job.on_gpu:  # planning each takes seconds
        sequences = job.data.n_sequences if job.read else ENDLESS
        for change in faster(f, _lighter(job), sequences, bits_open=o.resume is None):
            yield f"faster   {change.what}: {change.gain:.1f} times the tokens/s ({seconds(change.step_s)} a step)"


# ---------------------------------------------------------------- under each label


def _model(job: Job) -> list[str]:
    cfg, source = job.cfg, job.source
    dtypes = "/".join(
        dict.fromkeys(t.dtype for n in job.opened.stored.values() if (t := source.tensors.get(n)))
    ).lower()
    dtypes += f" and {cfg.packing.word}" if cfg.packing else ""
    head = f", score head ({of_head(cfg)})" if cfg.scores else ", tied head" if cfg.tied else ""
    where = f"of the shape {job.options.shape}" if job.options.shape else "by config.json alone"
    where = count(len(source.files), "file") if source.files else where
    size = f"{compact(job.parameters)} parameters, {dtypes}, {where}, {gib(source.nbytes)}"
    texts = [f"{cfg.model_type}, {size}; {cfg.n_layers} layers{head}"]
    if (others := hf.carried(cfg, source.tensors)) and not cfg.lora:
        what = "the vision part" if cfg.wrapper else "what is not of the language model"
        nbytes = gib(sum(source.tensors[name].nbytes for name in others))
        texts.append(f"{what} is copied unchanged: {len(others):,} tensors, {nbytes}")
    return texts


def _experts(job: Job) -> list[str]:
    experts, cfg, aux = job.cfg.experts, job.cfg, job.options.router_aux
    if experts is None:
        return []
    having = [layer for layer in cfg.layers if layer.experts]
    idle = len(having) * (experts.count - experts.chosen) * shapes.of_an_expert(having[0])
    balance = f"{aux:g}" if aux else f"off (config.json has {experts.aux:g}: --router-aux)"
    active = f"{compact(job.parameters - idle)} parameters a token"
    return [f"{experts.count} in a layer, {experts.chosen} for each token: {active}; load-balancing loss {balance}"]


def _base(job: Job) -> list[str]:
    """What happens to packed matrices."""
    packing, source = job.cfg.packing, job.source
    if packing is None:
        return []
    if isinstance(source, Cached):
        how = f"{'read from' if source.is_made() else 'quantized into'} {source.file}, {gib(source.file_bytes)}"
        return [f"{packing.word}, {how}; merges use the checkpoint's own values"]
    if isinstance(source, Packed):
        return [f"frozen matrices stay in {packing.word} until the GPU decodes them, layer by layer"]
    left = source.inner.auxiliary.keys() - source.auxiliary.keys() if isinstance(source, Rewritten) else set()
    without = f", without {', '.join(sorted(left))}" if left else ""
    return [f"{packing.word} is decoded as it is read; the output is bf16, as its config.json says{without}"]


def _no_data(job: Job) -> str:
    work, o = job.work, job.options
    if o.data:
        nbytes = bytes_of(o)
        return f"{gb(nbytes)}, about {compact(nbytes / BYTES)} tokens ({BYTES} bytes each: there is no tokenizer)"
    full = f"{work.sequences:,} x {work.seq_len:,} = {compact(work.tokens)} tokens (--batch-size, --seq-len)"
    assumed = "" if o.max_steps else f"; {work.steps:,} steps are assumed (--max-steps)"
    return f"none given; a step is {full}{assumed}"


def _examples(job: Job) -> list[str]:
    shown = range(min(job.options.show_example, len(job.data.pieces))) if job.read else ()
    return [line.strip() for k in shown for line in job.data.example(k).split("\n")]


def _method(job: Job) -> str:
    o, cfg, lora, teaching = job.options, job.cfg, job.cfg.lora, job.cfg.teaching
    what = "some tensors" if cfg.frozen else "all weights"
    what = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}" if lora else what
    trained = compact(sum(Geometry.of(cfg, job.plan).numel))
    what += f"; {trained} parameters trained" if cfg.frozen else ""
    if job.preference:
        what = f"{o.method} ({', '.join(f'{name} {getattr(o, name):g}' for name in parameters(o.method))}), {what}"
    what = f"classify ({', '.join(o.labels)[:80]}), {what}" if o.labels else what
    if teaching:
        mix = f"cross-entropy x {1 - teaching.weight:g} + divergence from {o.teacher} x {teaching.weight:g}"
        what = f"{mix} (top {teaching.k}, temperature {teaching.temperature:g}), {what}"
    experts = next((layer for layer in cfg.layers if layer.experts), None)
    narrowed = experts is None or narrow.experts_in_fp8(cfg, experts, job.plan.tokens)
    fp8 = f", linear layers{'' if narrowed else ', not experts,'} in fp8" if cfg.fp8 else ""
    bits = f" ({job.plan.adam_bits}-bit moments)" if job.plan.adam_bits != 32 else ""
    rate = f"peak lr {o.lr:g}, {o.schedule}, clip {o.max_grad_norm or 'off'}"
    return f"{what}, AdamW{bits}, {rate}; compute in {job.plan.dtype.lower()}{fp8}"


def _machine(job: Job) -> list[str]:
    limit, texts = job.limits.ram if job.on_gpu else job.limits.both, [job.machine.describe(job.on_gpu)]
    if not job.options.assume and limit > (free := available_ram()):
        texts.append(f"warning: the limit of {gib(limit)} is more than the {gib(free)} of RAM that are free")
    texts += filter(None, [unmeasured_line(job.forecast, bool(job.options.assume))] if job.on_gpu else [])
    return texts + ([f"{count(len(job.launches), 'kernel')} as tuned by check --tune"] if job.launches else [])


def _steps(job: Job) -> str:
    work, n, o = job.work, job.plan.n_micro, job.options
    fewer = f" (all there are, fewer than --batch-size {o.batch_size:,})" if work.sequences < o.batch_size else ""
    epochs = "" if o.max_steps or not o.epochs else f", {o.epochs:g} epoch{'s' * (o.epochs != 1)}"
    each = f"{count(work.sequences, 'sequence')}{fewer} of up to {work.seq_len:,} tokens"
    micro = f"{n} micro-batch{'es' * (n > 1)} of {job.rows}{' on each host' * (job.plan.hosts > 1)}"
    return f"{work.steps:,} of {each}{epochs}; {micro}"


def _evaluations(job: Job) -> list[str]:
    f, held = job.forecast, job.read and job.read.held_out
    if not held:
        return []
    n, tokens, each = f.work.evaluations, f.work.held_out, f"{compact(f.work.held_out)} tokens"
    if job.on_gpu:
        s = evaluation_s(f, job.eval_rows or held.n_sequences)
        each = f"{seconds(s)} = {duration(n * s)}"
    of = f"all {compact(tokens)}" if tokens == held.tokens else f"{compact(tokens)} of {compact(held.tokens)}"
    return [f"{n:,} x {each}, on {of} held-out tokens (--eval-every, --eval-tokens)"]


def _held(job: Job) -> tuple[int, int, int]:
    """Bytes on the fullest GPU (on a CPU what stands for one), in RAM and on the SSD."""
    rows = job.forecast.memory(all_gpus=not job.on_gpu).values()
    gpu, ram, ssd = (sum(row[tier] for row in rows) for tier in ("gpu", "ram", "ssd"))
    return gpu, ram, ssd


def _memory(job: Job) -> str:
    (gpu, ram, ssd), limits = _held(job), job.limits
    used = f"{gib(gpu)} of {gib(limits.gpu)} GPU, {gib(ram)} of {gib(limits.ram)} RAM"
    used = used if job.on_gpu else f"{gib(gpu + ram)} of {gib(limits.both)} RAM"
    return f"{used}{f', {gb(ssd)} on the SSD' * bool(ssd)} (--verbose shows the parts)"


def _disk(job: Job) -> str:
    need, room, places = job.forecast.disk(), job.forecast.room, [str(job.out), *job.options.store]
    verdict = f": short by {gb(need - room)} of {gb(room)}; free some" if room and need > room else f", {gb(room)} free"
    return f"up to {gb(need)} in {', '.join(dict.fromkeys(places))}{verdict}"


def _notes(job: Job) -> Iterator[str]:
    """What is likely wrong, and options that have no effect or an unexpected one."""
    o, total = job.options, job.total_steps
    rate, warmup, usual = o.lr or 0.0, o.warmup_steps(total), 1e-3 if job.cfg.lora else 1e-4
    if rate > UNUSUAL * usual:
        yield f"warning: --lr {rate:g} is far above what is usual for {'adapters' if job.cfg.lora else 'all weights'}"
    if warmup >= total > 1:
        last = learning_rate(total, total, rate, o.schedule, warmup)
        within = f"within its warm-up of {warmup:,} steps, at lr {last:.1e} of {rate:.1e}"
        yield f"warning: the run ends {within}. Lower --warmup"
    if (o.eval_every not in (Options.eval_every, Every()) or o.eval_tokens) and job.read and not job.data.held_out:
        yield "note: nothing is evaluated, there is no held-out data. Give --val"
    if o.chat_template and job.read and not any(file.meta["counts"]["chats"] for file in job.data.files):
        yield "note: --chat-template is for conversations, and no row is one"
    yield from (f"note: {note}" for note in job.opened.notes)


def _lighter(job: Job) -> dict[str, ModelConfig]:
    """The model with a quantized base, by the option, if what is frozen can be."""
    cfg = job.cfg
    if not cfg.frozen or cfg.packing or cfg.fp8 or job.options.resume:
        return {}
    return {"--base nf4": quantized(cfg, job.source, "nf4", job.opened.stored)[0]}


def dry_line(job: Job) -> str:
    """What a dry run leaves behind."""
    return f"Dry run: nothing written{' but tokens, in the cache for later runs' * bool(job.read)}."


# ---------------------------------------------------------------- the whole run


def estimate(job: Job, done: int = 0, measured: bool = False, step_s: float | None = None) -> dict[Part, float]:
    """Seconds of each part of the run after `done` steps. `measured`: parts that have happened take their measured
    time, a step `step_s`.
    """
    clock, total = screen.clock(), job.total_steps
    steps_s = (total - done) * (step_s or job.forecast.step.step_s)
    # A first event is left out if kernels were compiled in it.
    known = {part: clock.last[part] for part in COMPLETE if measured and clock.times[part] > job.on_gpu}
    parts = estimated_parts(job.forecast, total - done, events(job, done, steps_s), known) | {"steps": steps_s}
    return parts | ({"load": 0.0} if measured else {"compile": compile_s(None if job.options.assume else job.device)})


def events(job: Job, done: int, steps_s: float | None) -> Events:
    """The parts of a run besides steps, after `done` steps, which take `steps_s`."""
    o, total, held, evaluations = job.options, job.total_steps, job.read and job.read.held_out, 0
    if held:
        evaluations = o.eval_every.times(done, total, steps_s) + (done == 0)
        evaluations += total > done and not o.eval_every.due(total, total, 0)  # the last
    compares = job.read and job.preference and job.preference.compares and not done
    snapshots, bests = o.save_every.times(done, total, steps_s), max(0, evaluations - (done == 0) - 1)
    exports = min(bests, snapshots) if job.forecast.kept else bests
    return Events(
        evaluations=evaluations,
        held_out=job.eval_rows or (held.n_sequences if held else 0),
        reference=job.data.n_sequences + (held.n_sequences if held else 0) if compares else 0,
        exports=1 + exports + o.export_every.times(done, total, steps_s),
        snapshots=snapshots,
        samples=evaluations + 1 if job.opened.codec and not job.cfg.scores else 0,
        tokens=MAX_NEW,
        longest=LONGEST,
    )


def figures(job: Job) -> dict[str, Any]:
    """The figures of the report, for `plan` in Python."""
    f, (gpu, ram, ssd) = job.forecast, _held(job)
    step_s = f.step.step_s if job.on_gpu else None
    writes = written(f, job.total_steps, events(job, 0, job.total_steps * step_s if step_s else None))
    return {
        "steps": job.total_steps,
        "tokens_per_step": f.work.tokens,
        "step_s": step_s,
        "tokens_per_second": f.work.tokens / step_s if step_s else None,
        "run_s": sum(estimate(job).values()) if step_s else None,
        "limited_by": f.step.bound if step_s else None,
        "gpu_bytes": gpu if job.on_gpu else 0,
        "ram_bytes": ram if job.on_gpu else gpu + ram,
        "ssd_bytes": ssd,
        "disk_bytes": f.disk(),
        "written_bytes": sum(writes.values()) if step_s else None,
    }

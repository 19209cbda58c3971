"""What a run prints before its first step and after its last, and the figures of its job for Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trireme.engine.amounts import compact, count, duration, gb, gib, percent
from trireme.engine.geometry import Geometry
from trireme.engine.hosts.group import world
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner import lines as forecasts
from trireme.engine.planner.advice import ENDLESS, faster, fits_drives
from trireme.engine.planner.clock import RunPart
from trireme.engine.planner.host import available_ram, computed_by
from trireme.engine.planner.whole import Events, compile_s, estimated_parts, evaluation_s, written_bytes
from trireme.engine.run import config_file, page, screen
from trireme.engine.run.after import hub
from trireme.engine.run.evaluate import LONGEST, MAX_NEW
from trireme.engine.run.job import BYTES, Job, check_room, make
from trireme.engine.run.log import Log
from trireme.engine.run.opening import bytes_of
from trireme.engine.run.options import Method, Options, flag, table
from trireme.engine.run.record import RunProgress, RunSnapshot
from trireme.engine.tuning.cached import Cached
from trireme.engine.tuning.chosen import trained_lines
from trireme.engine.tuning.packed_source import Packed
from trireme.engine.tuning.quantized import quantized
from trireme.models.config import InputError, ModelConfig
from trireme.models.sizes import shapes
from trireme.storage.auxiliary import TEMPLATE
from trireme.storage.untrusted import quoted

COMPLETE: tuple[RunPart, ...] = ("evaluations", "samples", "snapshots", "export")  # whose last time predicts the next
UNUSUAL = 30  # times the default learning rate
EXAMPLES = 8  # in report.html
PLACES = 4  # decimals to which figures are compared, as lines show them
CHANCE = 0.5  # accuracy on pairs by a model for which they are ties: 0 in the log
PAIRS = "accuracy of pairs"


def lines(job: Job) -> Iterator[str]:
    """The report, in full with --verbose and of a dry run, whose search for what is faster comes last."""
    f, o, held_out, full = job.forecast, job.options, job.held_out, job.options.verbose or job.options.dry_run
    steps_s = job.work.steps * f.step.step_s if job.on_gpu else None
    writes = written_bytes(f, job.work.steps, events(job, 0, steps_s))
    rates = forecasts.rates_line(f) if job.on_gpu else ""
    wear = forecasts.wear_line(f, writes, steps_s) if full or job.plan.uses_ssd else ""
    for label, texts in {
        "model": _model(job),
        "data": job.data.report.lines() if job.read else [_no_data(job)],
        "val": held_out.report.lines() if held_out and not job.data.report.held_out else [],
        "example": map(str.strip, job.data.example(0).split("\n")) if job.read else [],
        "method": [_method(job)],
        "trained": trained_lines(job.cfg, {"--train": o.train, "--freeze": o.freeze}) if o.train or o.freeze else [],
        "machine": [job.machine.describe(job.on_gpu), rates] if full or job.on_gpu else [],
        "steps": [_steps(job)],
        "eval": _evaluations(job),
        "ssd": [wear],
        "disk": [f"{', '.join(dict.fromkeys([o.out, *o.store]))}: {forecasts.disk_line(f)}"],
    }.items():
        yield from screen.labelled(label, list(filter(None, texts)))
    memory = forecasts.memory_lines(f, job.on_gpu)
    yield from memory if full else [memory[0], *memory[-2:]]  # total and limit
    if job.on_gpu:
        yield f"time     {forecasts.time_line(f)}"
        yield f"ready    {forecasts.ready_line(estimate(job))}"
    else:
        yield "time     known after the second step: on a CPU it is measured"
    yield from _notes(job)
    yield from _faster(job) if o.dry_run and job.on_gpu else []
    if o.dry_run:
        yield f"Dry run: nothing written{' but tokens, in the cache for later runs' * bool(job.read)}."


def _model(job: Job) -> Iterator[str]:
    """The model, its experts, what happens to packed matrices."""
    cfg, source, packing, experts = job.cfg, job.source, job.cfg.packing, job.cfg.experts
    dtypes = {t.dtype.lower(): 0 for name in job.opened.stored.values() if (t := source.tensors.get(name))}
    dtypes |= {packing.word: 0} if packing else {}
    head = f", score head of {cfg.scores}" if cfg.scores else ", tied head" if cfg.tied else ""
    files = count(len(source.files), "file") if source.files else "without its weights"
    size = f"{compact(shapes.parameters(cfg))} parameters, {'/'.join(dtypes)}, {files}, {gib(source.nbytes)}"
    yield f"{cfg.model_type}, {size}; {cfg.n_layers} layers{head}"
    if experts:
        balance = f"{job.options.router_aux:g} (config.json has {experts.aux:g}: --router-aux)"
        yield f"{experts.count} experts in a layer, {experts.chosen} for each token; load-balancing loss x {balance}"
    if isinstance(source, Cached):
        yield f"the base is {'read from' if source.is_made() else 'quantized into'} {source.file}"
    elif packing and isinstance(source, Packed):
        yield f"frozen matrices stay in {packing.word} until the GPU decodes them, layer by layer"
    elif packing:
        yield f"{packing.word} is decoded as it is read; the output is bf16, as its config.json says"


def _no_data(job: Job) -> str:
    work, o = job.work, job.options
    if o.data:
        return f"{gb(bytes_of(o))}, about {compact(bytes_of(o) / BYTES)} tokens ({BYTES} bytes each: no tokenizer)"
    assumed = "" if o.max_steps else f"; {work.steps:,} steps are assumed (--max-steps)"
    return f"none; a step is {work.sequences:,} x {work.seq_len:,} tokens (--batch-size, --seq-len){assumed}"


def _method(job: Job) -> str:
    o, cfg, lora, teaching = job.options, job.cfg, job.cfg.lora, job.cfg.teaching
    subject = "some tensors" if cfg.frozen else "all weights"
    subject = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}" if lora else subject
    trained = compact(sum(Geometry.of(cfg, job.plan).numel))
    subject += ", computed as they will be merged" if lora and lora.aware else ""
    subject += f"; {trained} parameters trained" if cfg.frozen else ""
    if job.preference:
        of_method = [name for name, f in table(Method).items() if o.method in f.metadata["methods"]]
        values = ", ".join(f"{name} {getattr(o, name):g}" for name in of_method)
        subject = f"{o.method} ({values}), {subject}"
    subject = f"classify ({', '.join(o.labels)[:80]}), {subject}" if o.labels else subject
    if teaching:
        mix = f"cross-entropy x {1 - teaching.weight:g} + divergence from {o.teacher} x {teaching.weight:g}"
        subject = f"{mix} (top {teaching.k}, temperature {teaching.temperature:g}), {subject}"
    fp8 = ", linear layers in fp8" if cfg.fp8 else ""
    bits = f" ({job.plan.adam_bits}-bit moments)" if job.plan.adam_bits != 32 else ""
    rate = f"peak lr {o.lr:g}, {o.schedule}, clip {o.max_grad_norm or 'off'}"
    return f"{subject}, AdamW{bits}, {rate}; compute in {job.plan.dtype.lower()}{fp8}"


def _steps(job: Job) -> str:
    work, n, o = job.work, job.plan.n_micro, job.options
    fewer = " (all there are)" if work.sequences < o.batch_size else ""
    epochs = "" if o.max_steps or not o.epochs else f", {o.epochs:g} epoch{'s' * (o.epochs != 1)}"
    micro = f"{n} micro-batch{'es' * (n > 1)} of {job.rows}{' on each host' * (job.plan.hosts > 1)}"
    micro += ", one after the other" * (n > 1 and job.plan.accumulate)
    sequences = f"{count(work.sequences, 'sequence')}{fewer} of up to {work.seq_len:,} tokens"
    return f"{work.steps:,} of {sequences}{epochs}; {micro}"


def _evaluations(job: Job) -> Iterator[str]:
    f = job.forecast
    if held_out := job.held_out:
        n, tokens = f.work.evaluations, f"{compact(f.work.held_out)} of {compact(held_out.tokens)} held-out tokens"
        s = evaluation_s(f, job.eval_rows or held_out.n_sequences)
        yield f"{n:,} on {tokens}{f', {duration(n * s)} in all' if job.on_gpu else ''} (--eval-every, --eval-tokens)"
    if general := job.read and job.read.general:
        yield f"{job.options.general}: {compact(general.tokens)} tokens, before the first step and after the last"


def _notes(job: Job) -> Iterator[str]:
    """What is likely wrong, and what one may not expect."""
    o, total = job.options, job.work.steps
    rate, warmup, usual = o.lr or 0.0, o.warmup_steps(total), 1e-3 if job.cfg.lora else 1e-4
    if rate > UNUSUAL * usual:
        yield f"warning: --lr {rate:g} is far above what is usual for {'adapters' if job.cfg.lora else 'all weights'}"
    if warmup >= total > 1:
        yield f"warning: the run ends within its warm-up of {warmup:,} steps. Lower --warmup"
    limit = job.limits.ram if job.on_gpu else job.limits.total
    if not o.assume and limit > (free := available_ram()):
        yield f"warning: the limit of {gib(limit)} is more than the {gib(free)} of RAM that are free"
    yield from (f"note: {note}" for note in job.opened.notes)


def _faster(job: Job) -> Iterator[str]:
    """What would give more tokens/s; planning each takes seconds."""
    sequences, resumes = job.data.n_sequences if job.read else ENDLESS, job.options.resume is not None
    lighter = dict[str, ModelConfig]()  # the model with a quantized base, if what is frozen can be
    if job.cfg.frozen and not (job.cfg.packing or job.cfg.fp8 or resumes):
        lighter["--base nf4"] = quantized(job.cfg, job.source, "nf4", job.opened.stored)[0]
    for change in faster(job.forecast, lighter, sequences, resumes=resumes):
        yield f"faster   {change.line()}"


# ---------------------------------------------------------------- the whole run


def estimate(job: Job, done: int = 0, measured: bool = False) -> dict[RunPart, float]:
    """Seconds of each part of the run after `done` steps. `measured`: parts that have happened take their own time."""
    clock, total = screen.clock(), job.work.steps
    steps_s = (total - done) * job.forecast.step.step_s
    # A first event is left out if kernels were compiled in it.
    measured_s = {part: clock.last[part] for part in COMPLETE if measured and clock.times[part] > job.on_gpu}
    parts = estimated_parts(job.forecast, total - done, events(job, done, steps_s), measured_s)
    return parts | ({"load": 0.0} if measured else {"compile": compile_s(None if job.options.assume else job.device)})


def events(job: Job, done: int, steps_s: float | None) -> Events:
    """The parts of a run besides steps, after `done` steps, which take `steps_s`."""
    o, total, held_out = job.options, job.work.steps, job.held_out
    evaluations = o.evaluations(done, total, steps_s) if held_out else 0
    compares = job.read and job.preference and job.preference.compares and not done
    snapshots, bests = o.save_every.times(done, total, steps_s), max(0, evaluations - (done == 0) - 1) * job.files.best
    n, exports = held_out.n_sequences if held_out else 0, 1 + o.export_every.times(done, total, steps_s)
    reference = job.data.n_sequences + n if compares else 0
    samples = evaluations + 1 if job.opened.codec and not job.cfg.scores else 0
    return Events(
        evaluations, held_out=job.eval_rows or n, reference=reference, exports=exports + bests, snapshots=snapshots,
        samples=samples, tokens=MAX_NEW, longest=LONGEST,
    )  # fmt: skip


def figures(job: Job) -> dict[str, Any]:
    """The figures of the report, for `plan` in Python."""
    f, step_s, rows = job.forecast, job.forecast.step.step_s, job.forecast.memory(all_gpus=not job.on_gpu).values()
    gpu, ram, ssd = (sum(row[tier] for row in rows) for tier in ("gpu", "ram", "ssd"))
    fields = {"steps": job.work.steps, "tokens_per_step": f.work.tokens, "ssd_bytes": ssd, "disk_bytes": f.disk()}
    fields |= {"gpu_bytes": gpu * job.on_gpu, "ram_bytes": ram + gpu * (not job.on_gpu)}
    writes = written_bytes(f, job.work.steps, events(job, 0, job.work.steps * step_s))
    timed = {"step_s": step_s, "tokens_per_second": f.work.tokens / step_s, "limited_by": f.step.bound}
    timed |= {"run_s": sum(estimate(job).values()), "written_bytes": sum(writes.values())}
    return fields | (timed if job.on_gpu else dict.fromkeys(timed))


def prepare_job(o: Options, snapshot: RunSnapshot | None) -> tuple[Job, list[str]]:
    """The job, and the lines of its report, which it prints. If it does not fit, the error offers what would."""
    try:
        job = make(o, snapshot)
        if snapshot:
            for line in config_file.changed(job.options, snapshot.options):
                screen.say(f"changed  {line} at step {snapshot.progress.step:,}")
            if snapshot.computed_by != (now := computed_by(job.device)):
                screen.say(f"changed  {now}, was {snapshot.computed_by}: it may round differently")
        with screen.clock().at("plan"):
            report = list(lines(job))
        for line in report:
            screen.say(line)
        if not (snapshot or o.assume or o.dry_run):
            check_room(job)
        return job, report
    except DoesNotFit as error:
        raise DoesNotFit(f"{error}{alternatives(o)}", error.need) from None


def alternatives(o: Options) -> str:
    """A sentence that offers the most exact of what would fit, with its step: 8-bit moments, adapters, a quantized
    base, a smaller step.
    """
    frozen = bool(o.lora or o.adapter or o.freeze or o.train)
    lora: dict[str, Any] = {} if frozen else {"lora": 16}
    tries: list[dict[str, Any]] = [] if frozen else [{"adam_bits": 8}, lora]
    tries += [] if o.base else [lora | {"base": "nf4"}]
    tries += [(tries or [{}])[-1] | {"batch_size": max(1, o.batch_size // k)} for k in (2, 4, 16)]
    for change in [] if o.resume or o.plan or world().hosts > 1 else tries:  # of hosts one alone may lack room
        with suppress(DoesNotFit, InputError, OSError):
            job = make(replace(o, data=(), val=None, dry_run=True, **change), by_rule=True)
            if not o.assume:
                check_room(job)
            elif not fits_drives(job.forecast):
                continue
            speed = f", at most {job.forecast.step.step_s:.3g} s a step" if job.on_gpu else ""
            return f" This fits: {' '.join(f'{flag(name)} {value}' for name, value in change.items())}{speed}."
    return ""


# ---------------------------------------------------------------- after the last step


def comparisons(
    before: Mapping[str, float], after: Mapping[str, float], of: str, on: str, counted: str
) -> Iterator[tuple[bool, str]]:
    """Yields whether a figure is better, and its line, for those that both evaluations have. `of`: eval or general,
    `on`: its data in words, `counted`: of what the accuracy is.
    """
    for name, noun in (("loss", "loss"), ("accuracy", f"accuracy of {counted}"), ("rewards/accuracies", PAIRS)):
        key = f"{of}_{name}"
        if key not in before or key not in after:
            continue
        was, now = before[key] or CHANCE * (noun == PAIRS), after[key]
        gain = (round(now, PLACES) - round(was, PLACES)) * (-1 if name == "loss" else 1)
        verdict = "the same" if not gain else "better" if gain > 0 else "worse"  # NaN: worse
        share = f"{percent(abs(gain / was))} " if gain and was else ""
        values = f"{100 * was:.2f} % -> {100 * now:.2f} %: "
        line = f"{noun} {was:.4f} -> {now:.4f} on {on}: {share}" if name == "loss" else f"{noun} {values}"
        yield gain > 0, f"{line}{verdict}"


def against_start(job: Job, done: RunProgress, log: Log) -> tuple[bool, list[str]]:
    """Whether nothing is better than before training on held-out rows; those and --general as lines."""
    o, val, general = job.options, log.evals[-1:], log.general[-1:]
    if not done.step:
        return False, []
    if o.export == "best" and done.best is not None:
        val = [r for r in log.evals if r["step"] == done.best_step] or [{"eval_loss": done.best}]
    counted = "pairs" if job.preference else "rows" if job.cfg.scores else "tokens"
    held_out = [change for r in val for change in comparisons(done.first, r, "eval", "held-out rows", counted)]
    file_name = Path(o.general or "").name
    forgotten = [change for r in general for change in comparisons(done.first, r, "general", file_name, counted)]
    lines = screen.labelled("val", [line for _, line in held_out])
    lines += screen.labelled("general", [line for _, line in forgotten])
    return bool(held_out) and not any(is_better for is_better, _ in held_out), lines


def facts(job: Job, done: RunProgress, log: Log, report: Sequence[str], busy: Sequence[str]) -> page.PageFacts:
    """What report.html says besides the log. `report`: the lines before the first step, `busy`: on the queues."""
    o, data = job.options, job.data
    title = f"{Path(o.out).resolve().name}: a run of {hub.model_title(o.model)}"
    axis = f"loss of {o.method}" if o.method != "sft" else "loss (nats per token)"
    examples = dict.fromkeys(data.example(k, page.MARKS) for k in range(min(EXAMPLES, len(data.pieces))))
    took = [f"time     {forecasts.took_line(screen.clock())}", *busy]
    result, settings = against_start(job, done, log)[1], config_file.content(o).decode()
    return page.PageFacts(title, axis, report, list(examples), result, took, settings)


def about_output(job: Job, done: RunProgress) -> list[str]:
    """What the run has made, and what to do with it."""
    o, out = job.options, quoted(job.out)
    names = sorted(path.name + "/" * path.is_dir() for path in job.out.iterdir() if not path.name.startswith("."))
    lines = [f"output   {out}: {', '.join(names)}; written, read back, compared"]
    if o.export != "best" and done.best_step not in (None, done.step):
        which = f"eval_loss was {done.best:.4f} at step {done.best_step:,}"
        lines.append(f"best     {which}: with --export best such weights are the output")
    codec = job.opened.codec
    chats = TEMPLATE in job.source.auxiliary or (codec is not None and codec.facts.template is not None)
    command = f"sample {out} --chat" if chats else f"sample {out} --prompt TEXT"
    lines.append(f"try it   trireme {f'score {out} --data FILE --out DIR' if job.cfg.scores else command}")
    use = f"trireme merge {out} --out DIR; or as an adapter of peft for {hub.name_and_commit(o.model)[0]}"
    if o.merge or not job.cfg.lora:
        model = f"{out}/merged" if job.cfg.lora else out
        use = f'{job.cfg.opener}.from_pretrained("{model}")'
        use += f"; llama.cpp: convert_hf_to_gguf.py {model}" if not job.cfg.scores else ""
    return [*lines, f"use it   {use}", f"again    trireme --config {out}/config.yaml"]

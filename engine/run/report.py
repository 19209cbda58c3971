"""A job as lines, before the first step, as figures for Python, and its run as a page: report.html."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
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
from trireme.engine.run.screen import labelled
from trireme.engine.tuning.cached import Cached
from trireme.engine.tuning.chosen import trained_lines
from trireme.engine.tuning.packed_source import Packed
from trireme.engine.tuning.quantized import quantized
from trireme.models import hf
from trireme.models.config import ModelConfig
from trireme.models.sizes import narrow, shapes

COMPLETE: tuple[Part, ...] = ("evaluations", "samples", "snapshots", "export")  # whose last time predicts the next
UNUSUAL = 30  # times the default learning rate
WIDTH, HEIGHT, LEFT, BELOW = 820, 360, 60, 40  # of the curve; margins for its numbers
MOST, LARGEST = 1000, 1e100  # points of a line; what is drawn of a loss
DRAWN = ("step", "loss", "eval_loss", "eval_accuracy", "eval_rewards/accuracies", "sample", "learning_rate")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2em auto;padding:0 1em;color:#222}
h2{font-size:1.1em;margin-top:2em}pre{white-space:pre-wrap;background:#f6f6f4;padding:.7em}
mark{background:#ffe08a}td{padding:.15em .9em .15em 0;vertical-align:top}
"""
Point = tuple[float, float]


def lines(job: Job) -> Iterator[str]:
    """The report, in full with --verbose and of a dry run, whose search for what is faster comes last."""
    f, o, full = job.forecast, job.options, job.options.verbose or job.options.dry_run
    steps_s = job.total_steps * f.step.step_s if job.on_gpu else None
    writes = written(f, job.total_steps, events(job, 0, steps_s))
    yield from filter(None, [wear_warning(f, writes, steps_s)])
    wear, examples = wear_line(f, writes), range(min(o.show_example, len(job.data.pieces))) if job.read else ()
    for label, texts in {
        "model": _model(job),
        "experts": _experts(job),
        "base": _base(job),
        "data": job.data.report.lines() if job.read else [_no_data(job)],
        "val": job.data.describe_held_out() if job.read else [],
        "example": [line.strip() for k in examples for line in job.data.example(k).split("\n")],
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
        lighter = dict[str, ModelConfig]()  # the model with a quantized base, if what is frozen can be
        if job.cfg.frozen and not (job.cfg.packing or job.cfg.fp8 or o.resume):
            lighter["--base nf4"] = quantized(job.cfg, job.source, "nf4", job.opened.stored)[0]
        for change in faster(f, lighter, sequences, bits_open=o.resume is None):
            yield f"faster   {change.what}: {change.gain:.1f} times the tokens/s ({seconds(change.step_s)} a step)"
    if o.dry_run:
        yield f"Dry run: nothing written{' but tokens, in the cache for later runs' * bool(job.read)}."


# ---------------------------------------------------------------- under each label


def _model(job: Job) -> list[str]:
    cfg, source = job.cfg, job.source
    dtypes = {t.dtype.lower(): 0 for name in job.opened.stored.values() if (t := source.tensors.get(name))}
    dtypes |= {cfg.packing.word: 0} if cfg.packing else {}
    head = f", score head ({of_head(cfg)})" if cfg.scores else ", tied head" if cfg.tied else ""
    where = f"of the shape {job.options.shape}" if job.options.shape else "by config.json alone"
    where = count(len(source.files), "file") if source.files else where
    size = f"{compact(shapes.parameters(job.cfg))} parameters, {'/'.join(dtypes)}, {where}, {gib(source.nbytes)}"
    others = 0 if cfg.lora else len(hf.carried(cfg, source.tensors))
    texts = [f"what is not of the language model is copied unchanged: {count(others, 'tensor')}"] if others else []
    return [f"{cfg.model_type}, {size}; {cfg.n_layers} layers{head}", *texts]


def _experts(job: Job) -> list[str]:
    experts, aux = job.cfg.experts, job.options.router_aux
    if experts is None:
        return []
    having = [layer for layer in job.cfg.layers if layer.experts]
    idle = len(having) * (experts.count - experts.chosen) * shapes.of_an_expert(having[0])
    active = f"{compact(shapes.parameters(job.cfg) - idle)} parameters a token"
    balance = f"{aux:g}" if aux else f"off (config.json has {experts.aux:g}: --router-aux)"
    return [f"{experts.count} in a layer, {experts.chosen} for each token: {active}; load-balancing loss {balance}"]


def _base(job: Job) -> list[str]:
    """What happens to packed matrices."""
    packing, source = job.cfg.packing, job.source
    if packing is None:
        return []
    if isinstance(source, Cached):
        return [f"{packing.word}, {'read from' if source.is_made() else 'quantized into'} {source.file}"]
    if isinstance(source, Packed):
        return [f"frozen matrices stay in {packing.word} until the GPU decodes them, layer by layer"]
    return [f"{packing.word} is decoded as it is read; the output is bf16, as its config.json says"]


def _no_data(job: Job) -> str:
    work, o = job.work, job.options
    if o.data:
        return f"{gb(bytes_of(o))}, about {compact(bytes_of(o) / BYTES)} tokens ({BYTES} bytes each: no tokenizer)"
    assumed = "" if o.max_steps else f"; {work.steps:,} steps are assumed (--max-steps)"
    return f"none; a step is {work.sequences:,} x {work.seq_len:,} tokens (--batch-size, --seq-len){assumed}"


def _method(job: Job) -> str:
    o, cfg, lora, teaching = job.options, job.cfg, job.cfg.lora, job.cfg.teaching
    what = "some tensors" if cfg.frozen else "all weights"
    what = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}" if lora else what
    trained = compact(sum(Geometry.of(cfg, job.plan).numel))
    what += f"; {trained} parameters trained" if cfg.frozen else ""
    if job.preference:
        values = ", ".join(f"{name} {getattr(o, name):g}" for name in parameters(o.method))
        what = f"{o.method} ({values}), {what}"
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
    limit, o = job.limits.ram if job.on_gpu else job.limits.both, job.options
    texts = [job.machine.describe(job.on_gpu)]
    if not o.assume and limit > (free := available_ram()):
        texts.append(f"warning: the limit of {gib(limit)} is more than the {gib(free)} of RAM that are free")
    texts += [unmeasured_line(job.forecast, bool(o.assume))] if job.on_gpu else []
    texts += [f"{count(len(job.launches), 'kernel')} as tuned by check --tune"] if job.launches else []
    return list(filter(None, texts))


def _steps(job: Job) -> str:
    work, n, o = job.work, job.plan.n_micro, job.options
    fewer = " (all there are)" if work.sequences < o.batch_size else ""
    epochs = "" if o.max_steps or not o.epochs else f", {o.epochs:g} epoch{'s' * (o.epochs != 1)}"
    micro = f"{n} micro-batch{'es' * (n > 1)} of {job.rows}{' on each host' * (job.plan.hosts > 1)}"
    sequences = f"{count(work.sequences, 'sequence')}{fewer} of up to {work.seq_len:,} tokens"
    return f"{work.steps:,} of {sequences}{epochs}; {micro}"


def _evaluations(job: Job) -> list[str]:
    f, held_out = job.forecast, job.read and job.read.held_out
    if not held_out:
        return []
    n, tokens = f.work.evaluations, f"{compact(f.work.held_out)} of {compact(held_out.tokens)} held-out tokens"
    s = evaluation_s(f, job.eval_rows or held_out.n_sequences)
    return [f"{n:,} on {tokens}{f', {duration(n * s)} in all' if job.on_gpu else ''} (--eval-every, --eval-tokens)"]


def _used(job: Job) -> tuple[int, int, int]:
    """Bytes on the fullest GPU (on a CPU what stands for one), in RAM and on the SSD."""
    rows = job.forecast.memory(all_gpus=not job.on_gpu).values()
    gpu, ram, ssd = (sum(row[tier] for row in rows) for tier in ("gpu", "ram", "ssd"))
    return gpu, ram, ssd


def _memory(job: Job) -> str:
    (gpu, ram, ssd), limits = _used(job), job.limits
    used = f"{gib(gpu + ram)} of {gib(limits.both)} RAM"
    used = f"{gib(gpu)} of {gib(limits.gpu)} GPU, {gib(ram)} of {gib(limits.ram)} RAM" if job.on_gpu else used
    return f"{used}{f', {gb(ssd)} on the SSD' * bool(ssd)} (--verbose shows the parts)"


def _disk(job: Job) -> str:
    places = dict.fromkeys([job.options.out, *job.options.store])
    return f"up to {gb(job.forecast.disk())} in {', '.join(places)}, {gb(job.forecast.room)} free"


def _notes(job: Job) -> Iterator[str]:
    """What is likely wrong, and what one may not expect."""
    o, total = job.options, job.total_steps
    rate, warmup, usual = o.lr or 0.0, o.warmup_steps(total), 1e-3 if job.cfg.lora else 1e-4
    if rate > UNUSUAL * usual:
        yield f"warning: --lr {rate:g} is far above what is usual for {'adapters' if job.cfg.lora else 'all weights'}"
    if warmup >= total > 1:
        last = learning_rate(total, total, rate, o.schedule, warmup)
        within = f"within its warm-up of {warmup:,} steps, at lr {last:.1e} of {rate:.1e}"
        yield f"warning: the run ends {within}. Lower --warmup"
    yield from (f"note: {note}" for note in job.opened.notes)


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
    o, total, evaluations = job.options, job.total_steps, 0
    if held_out := job.read and job.read.held_out:
        evaluations = o.eval_every.times(done, total, steps_s) + (done == 0)
        evaluations += total > done and not o.eval_every.due(total, total, 0)  # the last
    compares = job.read and job.preference and job.preference.compares and not done
    snapshots, bests = o.save_every.times(done, total, steps_s), max(0, evaluations - (done == 0) - 1)
    exports = min(bests, snapshots) if job.forecast.kept else bests
    n = held_out.n_sequences if held_out else 0
    return Events(
        evaluations=evaluations,
        held_out=job.eval_rows or n,
        reference=job.data.n_sequences + n if compares else 0,
        exports=1 + exports + o.export_every.times(done, total, steps_s),
        snapshots=snapshots,
        samples=evaluations + 1 if job.opened.codec and not job.cfg.scores else 0,
        tokens=MAX_NEW,
        longest=LONGEST,
    )


def figures(job: Job) -> dict[str, Any]:
    """The figures of the report, for `plan` in Python."""
    f, (gpu, ram, ssd) = job.forecast, _used(job)
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


# ---------------------------------------------------------------- report.html


@dataclass(frozen=True)
class Facts:
    """What a page says besides the log."""

    title: str
    axis: str = "loss (nats per token)"
    report: Sequence[str] = ()  # the lines before the first step
    examples: Sequence[str] = ()  # with the trained part in [ ]


def page(records: Sequence[dict[str, Any]], facts: Facts) -> str:
    """The page of a run in one file: curve, evaluations with samples, examples with the trained part marked, report."""
    evals = [record for record in records if "eval_loss" in record]
    train, held_out = ([(r["step"], r[name]) for r in records if name in r] for name in ("loss", "eval_loss"))
    cells = ([f"{r['step']:,}", f"{r['eval_loss']:.4f}", escape(r.get("sample", ""))] for r in thinned(evals))
    rows = "".join(f"<tr><td>{'<td>'.join(row)}</tr>" for row in cells)
    marked = (escape(text).replace("[", "<mark>").replace("]", "</mark>") for text in facts.examples)
    title, report = escape(facts.title), escape("\n".join(facts.report))
    body = f"<h2>{title}</h2>{curve(train, held_out, facts.axis)}"
    body += f"<h2>Evaluations</h2><table><tr><td>step<td>loss<td>sample</tr>{rows}</table>" if rows else ""
    body += f"<h2>What is learned: the marked part</h2>{''.join(f'<pre>{text}</pre>' for text in marked)}"
    body += f"<h2>Before the first step</h2><pre>{report}</pre>"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>\n"


def curve(train: Sequence[Point], evals: Sequence[Point], axis: str) -> str:
    """Raw and smoothed training loss, and evaluations, as SVG."""
    train, evals = ([(x, y) for x, y in points if abs(y) < LARGEST] for points in (train, evals))
    smooth = smoothed(train)
    steps, losses = zip(*([*smooth, *evals] or [(0.0, 0.0)]), strict=True)
    first, last, low, high = min(steps), max(steps), min(losses), max(losses)
    to_x = lambda x: LEFT + (x - first) / max(1, last - first) * (WIDTH - LEFT - 10)
    to_y = lambda y: HEIGHT - BELOW - (y - low) / (high - low or 1.0) * (HEIGHT - BELOW - 20)
    parts = list[str]()
    for y in (low + k / 4 * (high - low) for k in range(5)):
        parts.append(f'<path d="M{LEFT} {to_y(y):.1f}H{WIDTH}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{to_y(y):.1f}" text-anchor="end">{y:.4g}</text>')
    legend = f"steps {first:,} to {last:,}; {escape(axis)}"
    for name, points, colour in (
        ("", train, "#b9cde4"),
        ("training", smooth, "#1f5fa8"),
        ("held out", evals, "#d8572a"),
    ):
        line = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in thinned(points) if low <= y <= high)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if name and points:
            values = f"{name} {points[0][1]:.4g} → {points[-1][1]:.4g}"
            legend += f'; <tspan fill="{colour}">{values}</tspan>'
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 10}">{legend}</text>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over a centred window of a twenty-fifth of the run, which do not lag behind falling losses."""
    half, sums = len(points) // 50, [0.0, *accumulate(y for _, y in points)]
    ends = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, ends, strict=True)]


def thinned(points: Sequence[Any]) -> list[Any]:
    """At most about MOST of the points, with the last."""
    stride = -(-len(points) // MOST) or 1
    return [*points[::stride], *points[-1:]] if stride > 1 else list(points)

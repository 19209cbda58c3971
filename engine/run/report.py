"""The report before the first step: model, data, method, machine, plan, memory, disk, time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trireme.engine.amounts import compact, count, duration, gb, gib, seconds
from trireme.engine.optimizer import learning_rate
from trireme.engine.planner.advice import ENDLESS, faster
from trireme.engine.planner.clock import Clock, Part, Times
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
from trireme.engine.planner.whole import Events, compile_s, estimated_parts, evaluation_s, export_s, written
from trireme.engine.queues.names import NET
from trireme.engine.run.begin.method import described, of_head, preference_of
from trireme.engine.run.evaluation import LONGEST, MAX_NEW
from trireme.engine.run.job import Job, shared_tokens
from trireme.engine.run.options import Every, Options
from trireme.engine.tuning.cached import Cached
from trireme.engine.tuning.chosen import trained_lines
from trireme.engine.tuning.packed import Packed
from trireme.models import hf
from trireme.models.sizes import narrow, shapes
from trireme.storage.checkpoint import Source

ON_A_CPU = "known after the second step: on a CPU it is measured, not predicted"


def report(job: Job) -> Iterator[str]:
    """The lines to print. What a dry run searches for comes when the plan is printed already."""
    forecast, on_gpu = job.forecast, job.device.type == "cuda"
    lines = [
        model_line(job),
        *_expert_lines(job),
        *_labelled("", [*_packing_notes(job), *_carried_notes(job)]),
        *data_lines(job),
        method_line(job),
        *_labelled("trained", _trained_lines(job)),
        f"machine  {job.machine.describe(on_gpu)}",
        *_labelled("", [*_memory_notes(job), *_unmeasured(job), *_tuned(job)]),
        steps_line(job),
        *hosts_lines(job, on_gpu),
        *_labelled("", _length_notes(job)),
        *memory_lines(forecast, on_gpu),
    ]
    lines += gpu_lines(forecast) if on_gpu else [f"time     {ON_A_CPU}"]
    if forecast.work.evaluations:
        lines.append(f"eval     {eval_line(job)}")
    seconds_of_steps = job.total_steps * forecast.step.step_s if on_gpu else None
    writes = written(forecast, job.total_steps, events(job, 0, seconds_of_steps))
    if wear := wear_line(forecast, writes):
        lines.append(f"ssd      {wear}")
    if warning := wear_warning(forecast, writes, seconds_of_steps):
        lines.insert(0, warning)
    lines.append(f"disk     {disk_line(forecast)}")
    if on_gpu:
        lines.append(f"ready    {ready_line(estimate(job))}")
    yield from lines
    if on_gpu and job.options.dry_run:  # planning each takes seconds
        sequences = job.data.n_sequences if job.read else ENDLESS
        for c in faster(forecast, sequences=sequences, bits_open=job.options.resume is None):
            yield f"faster   {c.what}: {c.gain:.1f} times the tokens/s ({seconds(c.step_s)} a step)"


def planned(job: Job) -> dict[str, Any]:
    """The figures of the report, for `plan` in Python."""
    f, on_gpu = job.forecast, job.device.type == "cuda"
    held = f.memory(all_gpus=not on_gpu)
    tier = lambda name: sum(row[name] for row in held.values())
    step_s = f.step.step_s if on_gpu else None
    gpu, ram = tier("gpu"), tier("host")
    happening = events(job, 0, job.total_steps * step_s if step_s else None)
    return {
        "steps": job.total_steps,
        "tokens_per_step": f.work.tokens,
        "step_s": step_s,
        "tokens_per_second": f.work.tokens / step_s if step_s else None,
        "run_s": sum(estimate(job).values()) if on_gpu else None,
        "limited_by": f.step.bound if on_gpu else None,
        "gpu_bytes": gpu if on_gpu else 0,
        "ram_bytes": ram if on_gpu else gpu + ram,
        "ssd_bytes": tier("ssd"),
        "disk_bytes": f.disk(),
        "written_bytes": sum(written(f, job.total_steps, happening).values()) if step_s else None,
    }


def _labelled(label: str, lines: list[str]) -> list[str]:
    return [f"{label if i == 0 else '':8} {line}" for i, line in enumerate(lines)]


# ---------------------------------------------------------------- model, method, length


def model_line(job: Job) -> str:
    cfg = job.cfg
    dtypes = "/".join(dict.fromkeys(t.dtype for n in job.stored.values() if (t := job.source.tensors.get(n))))
    dtypes += f" and {cfg.packing.word}" if cfg.packing else ""
    head = f"score head, {of_head(cfg)}" if cfg.scores else "tied head" if cfg.tied else "untied head"
    vocabulary = f"tokenizer {job.codec.facts.vocab_size:,}" if job.codec else "no tokenizer"
    files, given = count(len(job.source.files), "shard"), f"; {vocabulary}"
    if not job.source.files:
        files = f"of the shape {job.options.shape}" if job.options.shape else "by config.json alone"
    return (
        f"model    {cfg.model_type}, {compact(job.parameters)} parameters, {dtypes}, "
        f"{files}, {gib(job.source.nbytes)}; {cfg.n_layers} layers; {head}{given if job.read else ''}"
    )


def _expert_lines(job: Job) -> list[str]:
    own, cfg = job.cfg.experts, job.cfg
    if own is None:
        return []
    having = [layer for layer in cfg.layers if layer.experts]
    idle = len(having) * (own.count - own.chosen) * shapes.of_an_expert(having[0])
    frozen = shapes.is_frozen(cfg, [(f"{cfg.names.prefix(cfg.n_layers - 1)}{cfg.names.router}.weight", ())])
    how, given = "frozen" if frozen else "trained", f"{job.options.router_aux:g}" if job.options.router_aux else "off"
    return [
        f"experts  {own.count} in a layer, {own.chosen} for each token: {compact(job.parameters - idle)} parameters a "
        f"token; router {how}, load-balancing loss {given} (config.json has {own.aux:g}; set it with --router-aux)"
    ]


def _carried_notes(job: Job) -> list[str]:
    """Notes on tensors that the language model does not use."""
    names = hf.carried(job.cfg, job.source.tensors)
    nbytes = sum(job.source.tensors[name].nbytes for name in names)
    copied = "" if not names or job.cfg.lora else f"{len(names):,} tensors, {gib(nbytes)}"
    if job.cfg.wrapper:
        return [f"text only; the vision part is copied unchanged{copied and ': '}{copied}"]
    return [f"copied unchanged, as not of the language model: {copied}"] if copied else []


def _packing_notes(job: Job) -> list[str]:
    """Notes on what happens to packed matrices."""
    packing, geo = job.cfg.packing, job.forecast.geo
    if packing is None:
        return []
    kept = sum(t.nbytes for layout in geo.base for t in layout.tensors if packing.part_of(t.name))
    notes = []
    if kept:
        notes.append(f"frozen matrices stay in {packing.word}, {gib(kept)}, until the GPU decodes them, layer by layer")
    if not isinstance(job.source, Packed):
        notes.append(f"{packing.word} is decoded while it is read; the output is in bf16, also in its config.json")
    if job.options.base:
        notes.append(f"--base: they are {_quantized(job.source)}; merges and exports use the checkpoint's own values")
    elif job.options.merge:
        notes.append("--merge: the merged model is in bf16 if the adapters change a packed matrix")
    if job.cfg.fp8:
        notes.append("--dtype fp8: matrices of linear layers are quantized again, with one scale each")
    return notes


def _quantized(source: Source) -> str:
    """When the matrices of --base are quantized."""
    if not isinstance(source, Cached):
        return "quantized while they are loaded"
    if source.is_made():
        return f"read from {source.file}, where an earlier run has quantized them"
    return f"quantized into {source.file}, {gib(source.file_bytes)}, which later runs read"


def data_lines(job: Job) -> list[str]:
    """The lines on the data: what was read, and examples."""
    data, work = job.read, job.work
    if data is None:
        steps = "" if job.options.max_steps else f"; {work.steps:,} steps are assumed (--max-steps)"
        full = f"{work.sequences:,} x {work.seq_len:,} = {compact(work.tokens)} tokens (--batch-size, --seq-len)"
        return [f"data     none given; a step is {full}{steps}"]
    examples = [f"example  {data.example(k)}" for k in range(min(job.options.show_example, len(data.pieces)))]
    return [
        *_labelled("data", data.report.lines()),
        *_labelled("val", data.describe_held_out()),
        *(line for example in examples for line in example.split("\n")),  # of a pair two
    ]


def _experts(job: Job) -> str:
    """What --dtype fp8 does with experts."""
    if job.cfg.experts is None:
        return ""
    return " and experts" if narrow.experts_in_fp8(job.cfg, next(o for o in job.cfg.layers if o.experts), job.plan.tokens) else ", not experts,"


def method_line(job: Job) -> str:
    o, master = job.options, "split fp32 master" if job.plan.dtype == "BF16" else "fp32"
    lora = job.cfg.lora
    what = "fine-tuning of some tensors" if job.cfg.frozen else "full fine-tuning"
    of, teaching = preference_of(o), job.cfg.teaching
    what = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}" if lora else what
    what += f"; {compact(job.trained_parameters)} parameters trained" if job.cfg.frozen else ""
    fp8 = f", linear layers{_experts(job)} of blocks in fp8 (mfu is relative to its rate)" if job.cfg.fp8 else ""
    what = f"{described(of)}, {what}" if of else f"classify ({', '.join(o.labels)[:80]}), {what}" if o.labels else what
    if teaching:
        parts = f"cross-entropy x {1 - teaching.weight:g} + divergence from the teacher x {teaching.weight:g}"
        what = f"{parts} (top {teaching.k}, temperature {teaching.temperature:g}), {what}"
    return (
        f"method   {what}, AdamW ({master}, {job.plan.adam_bits}-bit moments), peak lr {job.lr:g}, "
        f"{o.schedule}, clip {o.max_grad_norm or 'off'}; compute in {job.plan.dtype.lower()}{fp8}"
    )


def _trained_lines(job: Job) -> list[str]:
    o = job.options
    return trained_lines(job.cfg, {"--train": o.train, "--freeze": o.freeze}) if o.train or o.freeze else []


def _memory_notes(job: Job) -> list[str]:
    o, one_memory = job.options, job.device.type == "cpu"  # on a CPU both tiers are RAM
    given, notes = job.limits.both if one_memory else job.limits.host, []
    if o.assume:
        return []
    if o.ram and not (one_memory and o.gpu_memory):
        notes.append(f"of --ram {gib(o.ram)}, {gib(o.ram - given)} are for Python, its libraries and the data")
    if given > (free := available_ram()):
        notes.append(f"warning: the limit of {gib(given)} is more than the {gib(free)} of RAM that are free")
    return notes


def _tuned(job: Job) -> list[str]:
    """A note if kernels have other settings than the usual ones."""
    return [f"{count(len(job.launches), 'kernel')} as tuned by check --tune"] if job.launches else []


def _unmeasured(job: Job) -> list[str]:
    said = unmeasured_line(job.forecast, bool(job.options.assume)) if job.device.type == "cuda" else ""
    return [said] if said else []


def steps_line(job: Job) -> str:
    work, n_micro, asked = job.work, job.plan.n_micro, job.options.batch_size
    fewer = f" (all there are, fewer than --batch-size {asked:,})" if work.sequences < asked else ""
    return (
        f"steps    {work.steps:,} of {count(work.sequences, 'sequence')}{fewer} of up to {work.seq_len:,} tokens, "
        f"{n_micro} micro-batch{'es' * (n_micro > 1)} of {job.micro_rows}{' on each host' * (job.plan.hosts > 1)}"
    )


def hosts_lines(job: Job, on_gpu: bool) -> list[str]:
    """What several hosts share, and how much of a step the network takes: on the last host, which sends most."""
    hosts, step, rate = job.plan.hosts, job.forecast.step, job.machine.rates.net
    if hosts == 1:
        return []
    moved = sum(span.nbytes for span in step.spans if span.queue in NET)
    share = f": {seconds(step.busy['net'])} of a step of {seconds(step.step_s)}" if on_gpu else ""
    return [
        f"hosts    {hosts}, each with a share of micro-batches and optimizer state, and all weights; "
        f"{gb(int(moved))} a step through the network at {rate / 1e9:.2g} GB/s{share}"
    ]


def _length_notes(job: Job) -> list[str]:
    """Notes on options of length that have no effect, or an unexpected one."""
    o, notes, rope = job.options, [], job.cfg.rope
    if rope and rope.kind == "longrope" and job.seq_len > rope.original_positions:
        notes.append(
            f"note: --seq-len {job.seq_len:,} is beyond the {rope.original_positions:,} positions of the short factors "
            "of longrope: all rows take the long ones, where transformers takes the short ones for short rows"
        )
    if o.max_steps and o.epochs:
        notes.append(f"note: --max-steps {o.max_steps:,} decides, not --epochs {o.epochs:g}")
    evaluating = [f"--eval-every {o.eval_every}"] if o.eval_every not in (Options.eval_every, Every()) else []
    evaluating += [f"--eval-tokens {o.eval_tokens:,}"] if o.eval_tokens else []
    if evaluating and job.read and not job.data.held_out:
        notes.append(f"note: {' and '.join(evaluating)}: nothing is evaluated, there is no held-out data. Give --val")
    if o.chat_template and job.read and not any(file.meta["counts"]["chats"] for file in job.data.files):
        notes.append("note: --chat-template is for conversations, and no row is one")
    warmup = o.warmup_steps(job.total_steps)
    if warmup >= job.total_steps and o.warmup >= 1:
        rate = learning_rate(job.total_steps, job.total_steps, job.lr, o.schedule, warmup)
        notes.append(f"note: --warmup {warmup:,} takes the whole run; its last step has lr {rate:.1e}")
    return notes


# ---------------------------------------------------------------- the whole run


def estimate(job: Job, done: int = 0, clock: Clock | None = None, step_s: float | None = None) -> dict[Part, float]:
    """Seconds of each part of the run after `done` steps. Without a clock, those of the whole run.

    `clock`: parts that have happened take their measured time. `step_s`: measured seconds of a step.
    """
    total = job.total_steps
    steps_s = (total - done) * (step_s or job.forecast.step.step_s)
    before = {} if job.options.assume else export_s(job.forecast, job.out)
    times = {**before, **known(clock, job.device.type == "cuda")}
    found = estimated_parts(job.forecast, total - done, events(job, done, steps_s), times)
    found["steps"] = steps_s
    if clock is not None:
        return found | {"load": 0.0}
    return found | {"compile": compile_s(job.cfg, job.plan, None if job.options.assume else job.device)}


def events(job: Job, done: int, steps_s: float | None) -> Events:
    """The parts of a run besides steps, after `done` steps. `steps_s`: seconds of those steps; None if not known."""
    o, total = job.options, job.total_steps
    evaluations, held_out = 0, job.read and job.read.held_out
    if held_out:
        evaluations = often(o.eval_every, done, total, steps_s) + (done == 0)
        evaluations += total > done and not o.eval_every.due(total, total, 0)  # the last
    of = preference_of(o)
    compared = (
        job.data.n_sequences + (held_out.n_sequences if held_out else 0) if job.read and of and of.compares else 0
    )
    snapshots, bests = often(o.save_every, done, total, steps_s), max(0, evaluations - (done == 0) - 1)
    return Events(
        evaluations=evaluations,
        held_out=job.eval_rows or (held_out.n_sequences if held_out else 0),
        reference=compared if done == 0 else 0,
        exports=1  # the result, which is the last best where each is better
        + (min(bests, snapshots) if job.forecast.kept else bests)
        + often(o.export_every, done, total, steps_s),
        snapshots=snapshots,
        samples=evaluations + 1 if job.codec and not job.cfg.scores else 0,
        tokens=MAX_NEW,
        longest=LONGEST,
    )


def known(clock: Clock | None, compiles: bool) -> Times:
    """Seconds of each part's last event. A first event is left out if kernels were compiled in it."""
    parts: tuple[Part, ...] = ("evaluations", "samples", "snapshots", "export")
    return {part: clock.last[part] for part in parts if clock.times[part] > compiles} if clock else {}


def often(every: Every, done: int, total: int, seconds: float | None) -> int:
    """How often something is due in the rest of the run, which takes `seconds`; None: as Every.count."""
    if every.seconds:
        return every.count(total - done) if seconds is None else int(seconds / every.seconds)
    return sum(every.due(step, total, 0.0) for step in range(done + 1, total + 1))


def eval_line(job: Job) -> str:
    """Number, size and time of evaluations."""
    f, held_out = job.forecast, job.data.held_out
    assert held_out is not None
    n, tokens, each = f.work.evaluations, f.work.held_out, f"{compact(f.work.held_out)} tokens"
    if job.device.type == "cuda":
        s = evaluation_s(f, job.eval_rows or held_out.n_sequences)
        each = f"{seconds(s)} = {duration(n * s)}"
    if tokens == held_out.tokens:
        return f"{n:,} x {each}, on all {compact(tokens)} held-out tokens"
    why = "" if job.options.eval_tokens else ": about a tenth of the run in all; --eval-tokens for more or fewer"
    return f"{n:,} x {each}, on {compact(tokens)} of {compact(held_out.tokens)} held-out tokens{why}"


def dry_line(job: Job) -> str:
    """What a dry run leaves behind."""
    kept = shared_tokens() if job.read else None
    if kept and job.data.nbytes(kept) < job.data.nbytes():
        return f"Dry run: nothing written but tokens, kept for later runs in {kept}."
    return "Dry run: nothing written."

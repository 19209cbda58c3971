"""The report before the first step: model, data, method, machine, plan, memory, disk, time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trireme.engine.amounts import compact, count, duration, gb, gib, seconds
from trireme.engine.buffers import usage
from trireme.engine.plan import Plan, Tier
from trireme.engine.planner.forecast import ENDLESS, Forecast
from trireme.engine.planner.host import available_ram
from trireme.engine.planner.rates import ENDURANCE, TB
from trireme.engine.planner.whole import PARTS, Clock, Events, Part, Times, evaluation_s, foretold
from trireme.engine.run.job import Job
from trireme.engine.run.options import Every
from trireme.engine.run.sample import MAX_NEW
from trireme.engine.schedule import learning_rate
from trireme.engine.tuning.chosen import trained_lines
from trireme.models import hf

BINDS = {
    "compute": "computation",
    "update": "updates on the GPU",
    "h2d": "the bus to the GPU",
    "d2h": "the bus from the GPU",
    "cpu": "updates on the CPU",
    "ssd": "the SSD",
}
MEMORIES: dict[Tier, str] = {"gpu": "GPU", "host": "RAM", "ssd": "SSD"}
LONG = 5  # seconds of a start worth a line
ON_A_CPU = "known after the second step: on a CPU it is measured, not predicted"


def report(job: Job) -> list[str]:
    forecast, on_gpu = job.forecast, job.device.type == "cuda"
    lines = [
        model_line(job),
        *_labelled("", _carried_notes(job)),
        *data_lines(job),
        method_line(job),
        *_labelled("trained", _trained_lines(job)),
        f"machine  {job.machine.describe(on_gpu)}",
        *_labelled("", _memory_notes(job)),
        steps_line(job),
        *_labelled("", _length_notes(job)),
        *memory_lines(forecast, on_gpu),
    ]
    lines += gpu_lines(forecast) if on_gpu else [f"time     {ON_A_CPU}"]
    if forecast.work.evaluations:
        lines.append(f"eval     {eval_line(job)}")
    if forecast.plan.uses("ssd"):
        lines.append(f"ssd      {wear_line(forecast)}")
    lines.append(f"disk     {disk_line(forecast)}")
    if on_gpu:
        lines.append(f"ready    {ready_line(promise(job, start=True))}")
    if on_gpu and job.options.dry_run:  # planning each takes seconds
        changes = forecast.faster(job.data.n_sequences if job.read else ENDLESS, bits_open=job.options.resume is None)
        lines += [f"faster   {c.what}: {c.gain:.1f} times the tokens/s ({seconds(c.step_s)} a step)" for c in changes]
    return [*lines, *_labelled("because", list(job.because))]


def gpu_lines(f: Forecast) -> list[str]:
    start = [f"start    {start_line(f)}"] if f.pinning_s() >= LONG else []
    return [f"time     {time_line(f)}", *start]


def _labelled(label: str, lines: list[str]) -> list[str]:
    return [f"{label if i == 0 else '':8} {line}" for i, line in enumerate(lines)]


# ---------------------------------------------------------------- model, method, length


def model_line(job: Job) -> str:
    cfg = job.cfg
    dtypes = "/".join(dict.fromkeys(job.source.tensors[n].dtype for n in job.stored.values()))
    head = "tied head" if cfg.tied else "untied head"
    vocabulary = f"tokenizer {job.codec.facts.vocab_size:,}" if job.codec else "no tokenizer"
    files, given = count(len(job.source.files), "shard"), f"; {vocabulary}"
    if not job.source.files:
        files = f"of the shape {job.options.shape}" if job.options.shape else "by config.json alone"
    return (
        f"model    {cfg.model_type}, {compact(job.parameters)} parameters, {dtypes}, "
        f"{files}, {gib(job.source.nbytes)}; {cfg.n_layers} layers; {head}{given if job.read else ''}"
    )


def _carried_notes(job: Job) -> list[str]:
    """What the language model does not use."""
    names = hf.carried(job.cfg, job.source.tensors)
    if not names or job.cfg.lora:
        return []
    nbytes = sum(job.source.tensors[name].nbytes for name in names)
    return [f"carried through as they are: {len(names):,} tensors beside the language model, {gib(nbytes)}"]


def data_lines(job: Job) -> list[str]:
    """What was read, and examples of it."""
    data, work = job.read, job.work
    if data is None:
        steps = (
            "" if job.options.max_steps else f"; {work.steps:,} steps for an example: --max-steps for another number"
        )
        full = f"{work.sequences:,} x {work.seq_len:,} = {compact(work.tokens)} tokens (--batch-size, --seq-len)"
        return [f"data     not read, as no --data is given: a step is {full}{steps}"]
    return [
        *_labelled("data", data.report.lines()),
        *_labelled("val", data.describe_held_out()),
        *(f"example  {data.example(k)}" for k in range(min(job.options.show_example, len(data.pieces)))),
    ]


def method_line(job: Job) -> str:
    o, master = job.options, "split fp32 master" if job.plan.dtype == "BF16" else "fp32"
    lora = job.cfg.lora
    what = "fine-tuning of some tensors" if job.cfg.frozen else "full fine-tuning"
    what = f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}" if lora else what
    what += f"; {compact(job.trained_parameters)} parameters trained" if job.cfg.frozen else ""
    return (
        f"method   {what}, AdamW ({master}, {job.plan.adam_bits}-bit moments), peak lr {job.lr:g}, "
        f"{o.schedule}, clip {o.max_grad_norm or 'off'}; compute in {job.plan.dtype.lower()}"
    )


def _trained_lines(job: Job) -> list[str]:
    o = job.options
    return trained_lines(job.cfg, {"--train": o.train, "--freeze": o.freeze}) if o.train or o.freeze else []


def _memory_notes(job: Job) -> list[str]:
    given = job.limits.both if job.device.type == "cpu" else job.limits.host  # on a CPU both tiers are RAM
    if job.options.assume or given <= (free := available_ram()):
        return []
    return [f"warning: the limit of {gib(given)} is more than the {gib(free)} of RAM that are free"]


def steps_line(job: Job) -> str:
    work, n_micro, asked = job.work, job.plan.n_micro, job.options.batch_size
    fewer = f" (all there are, fewer than --batch-size {asked:,})" if work.sequences < asked else ""
    return (
        f"steps    {work.steps:,} of {count(work.sequences, 'sequence')}{fewer} of up to {work.seq_len:,} tokens, "
        f"{n_micro} micro-batch{'es' * (n_micro > 1)} of {job.micro_rows}"
    )


def _length_notes(job: Job) -> list[str]:
    """Options of length without effect."""
    o, notes = job.options, []
    if o.max_steps and o.epochs:
        notes.append(f"note: --max-steps {o.max_steps:,} decides, not --epochs {o.epochs:g}")
    warmup = o.warmup_steps(job.total_steps)
    if warmup >= job.total_steps and o.warmup >= 1:
        rate = learning_rate(job.total_steps, job.total_steps, job.lr, o.schedule, warmup)
        notes.append(f"note: --warmup {warmup:,} takes the whole run; its last step has lr {rate:.1e}")
    return notes


# ---------------------------------------------------------------- memory and disk


def memory_lines(f: Forecast, on_gpu: bool = True) -> list[str]:
    """The table of what each memory holds, and its limit. On a CPU the gpu tier is RAM."""
    names = MEMORIES if on_gpu else {**MEMORIES, "gpu": "RAM"}
    held, need = f.memory(), usage(f.geo, f.plan)

    def row(name: str, tiers: Mapping[Tier, int]) -> str:
        columns = dict.fromkeys((names[tier] for tier in tiers), 0)
        for tier, nbytes in tiers.items():
            columns[names[tier]] += nbytes
        return f"           {name:16}{''.join(map(cell, columns.values()))}"

    lines = [f"plan     {'':18}{''.join(f'{name:>10}' for name in dict.fromkeys(names.values()))}"]
    lines += [row(name, tiers) + _decisions(f.plan, name, names) for name, tiers in held.items()]
    on_ssd = sum(tiers["ssd"] for tiers in held.values())
    lines.append(row("total", {"gpu": need["gpu"], "host": need["host"], "ssd": on_ssd}))
    return [*lines, row("limit", {"gpu": f.limits.gpu, "host": f.limits.host})]


def cell(nbytes: int) -> str:
    """Bytes in ten characters."""
    if not nbytes:
        return f"{'–':>10}"
    if nbytes >= 1000 << 30:
        return f"{nbytes / 2**30:>6.0f} GiB"
    return f"{nbytes / 2**30:>6.1f} GiB" if nbytes >= 1000 << 20 else f"{nbytes / 2**20:>6.1f} MiB"


def _decisions(plan: Plan, row: str, names: Mapping[Tier, str]) -> str:
    n, units = len(plan.units), "half blocks" if plan.halves else "blocks"
    if row == "weights":
        homes = _counted((u.weights for u in plan.units), names)
        way = f"{plan.ahead + 1} {units} on their way" if plan.ahead else f"1 {units[:-1]} on its way"
        return f"   homes of {n} units: {homes}; {way}"
    if row == "optimizer state":
        updated = sum(u.update == "gpu" or u.state == "gpu" for u in plan.units)
        where = f"; {updated} updated on the GPU" if 0 < updated < n else ""
        return f"   homes: {_counted((u.state for u in plan.units), names)}; {plan.adam_bits}-bit moments{where}"
    if row == "gradients":
        return f"   consumed under {'the next forward' if plan.mode == 'forward' else 'backward'}"
    if row == "activations":
        kept = sum(bool(u.saved) for u in plan.units)
        return f"   kept of {kept} of {n - 2} {units}, recomputed in the others"
    return ""


def _counted(tiers: Iterable[Tier], names: Mapping[Tier, str]) -> str:
    found = [names[tier] for tier in tiers]
    return ", ".join(f"{found.count(name)} {name}" for name in dict.fromkeys(names.values()) if name in found)


def disk_line(f: Forecast) -> str:
    """Bytes on the drives by part, against the room."""
    part, keep = f.disk_parts(), f.files.keep
    parts = f"store {gb(part['store'])}, as much again for {count(keep, 'snapshot')}"
    parts += f", spare files {gb(part['spares'])}" if part["spares"] else ""
    parts += f", export {gb(part['export'])}"
    parts += ", as much again for the best" if f.files.best else ""
    parts += f", tokens {gb(part['tokens'])}" if part["tokens"] else ""
    parts += f", activations and gradients {gb(part['scratch'])}" if part["scratch"] else ""
    need, room = f.disk(), f.room
    if not room:
        return f"{parts}: {gb(need)}"
    verdict = "fits" if need <= room else f"short by {gb(need - room)}"
    return f"{parts}: {gb(need)} of {gb(room)}: {verdict}"


# ---------------------------------------------------------------- time


def time_line(f: Forecast) -> str:
    """A step, the run, their limit."""
    found, step, work = f.step, f.step.step_s, f.work
    return (
        f"{seconds(step)} a step ({count(work.sequences, 'sequence')}, {compact(work.tokens)} tokens: "
        f"{compact(work.tokens / step)} tok/s, {f.tflops:.3g} TFLOP/s); "
        f"{count(work.steps, 'step')} = {duration(work.steps * step)}; "
        f"limited by {BINDS[found.bound]} ({seconds(found.busy[found.bound])} of {seconds(step)})"
    )


def promise(job: Job, done: int = 0, start: bool = False) -> dict[Part, float]:
    """Seconds by part of the run after `done` steps; of `start`, 0 unless asked."""
    o, total = job.options, job.total_steps
    steps_s = (total - done) * job.forecast.step.step_s
    evaluations, held_out = 0, job.read and job.read.held_out
    if held_out:
        evaluations = often(o.eval_every, done, total, steps_s) + (done == 0)
        evaluations += total > done and not o.eval_every.due(total, total, 0)  # the last
    events = Events(
        evaluations=evaluations,
        held_out=job.eval_rows or (held_out.n_sequences if held_out else 0),
        exports=1 + max(0, evaluations - (done == 0)),  # the result, and the best if each is better
        snapshots=often(o.save_every, done, total, steps_s),
        tokens=MAX_NEW * (evaluations + 1) if job.codec else 0,
    )
    found = foretold(job.forecast, total - done, events)
    return found if start else found | {"start": 0.0}


def often(every: Every, done: int, total: int, seconds: float) -> int:
    """How often it is due in the rest of the run, of `seconds`."""
    if every.seconds:
        return int(seconds / every.seconds)
    return sum(every.due(step, total, 0.0) for step in range(done + 1, total + 1))


def ready_line(parts: Times) -> str:
    """Time until the checkpoint, by part."""
    listed = ", ".join(f"{part} {duration(s)}" for part, s in parts.items() if s >= 0.5)
    return f"in about {duration(sum(parts.values()))}{f': {listed}' if listed else ''}"


def took_line(clock: Clock, promised: Times) -> str:
    """Time taken and promised, by part."""
    other = clock.whole - sum(clock.spent.values())
    parts = [
        f"{part} {duration(clock.spent[part])}" + (f" of {duration(promised[part])}" if promised else "")
        for part in PARTS
        if max(clock.spent[part], promised.get(part, 0.0)) >= 0.5
    ]
    parts += [f"other {duration(other)}"] if other >= 0.5 else []
    whole = f"{duration(clock.whole)}" + (f" of {duration(sum(promised.values()))} promised" if promised else "")
    return f"{whole}{': ' * bool(parts)}{', '.join(parts)}"


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


def start_line(f: Forecast) -> str:
    """The start's longest part."""
    held = usage(f.geo, f.plan)["host"] / 2**30
    return f"{duration(f.pinning_s())} before the first step, to pin {held:.1f} GiB of RAM for the bus"


def wear_line(f: Forecast) -> str:
    """Bytes read and written; the drives' endurance."""
    rated = f.machine.endurance or ENDURANCE * (f.machine.ssd or 2 * TB)
    return (
        f"{gb(f.step.ssd_read)} read and {gb(f.step.ssd_written)} written a step, {gb(f.written)} written "
        f"in all: {f.written / rated:.1%} of the {gb(rated)} that drives of this size are often rated for"
    )

"""Estimates as lines of text: memory, disk space, time, endurance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from trireme.engine.amounts import compact, count, duration, gb, percent, seconds
from trireme.engine.plan import DoesNotFit, Tier
from trireme.engine.planner.clock import PARTS, Clock, Times
from trireme.engine.planner.forecast import Forecast
from trireme.engine.planner.gpus import MEASURED
from trireme.engine.planner.rates import ENDURANCE, SHEETS, TB

BINDS = {
    "compute": "computation",
    "update": "updates on the GPU",
    "h2d": "PCIe to the GPU",
    "d2h": "PCIe from the GPU",
    "peer": "copies between GPUs",
    "cpu": "updates on the CPU",
    "ssd": "the SSD",
    "net": "the network",
    "dram": "the bandwidth of RAM",
}
MEMORIES: dict[Tier, str] = {"gpu": "GPU", "ram": "RAM", "ssd": "SSD"}
WORN = 0.2  # share of what drives are rated for that is worth a warning
LITTLE, PART = 0.001, 0.01  # of what drives are rated for, of what is written: not worth telling


def memory_lines(f: Forecast, on_gpu: bool = True) -> list[str]:
    """The table of what each memory holds, and its limit; of several GPUs the fullest. On a CPU the tier "gpu" is
    RAM.
    """
    gpus, rows = f.plan.gpus, f.memory(all_gpus=not on_gpu)
    several = f"GPU {f.fullest}" if f.limits.less else "each GPU"
    names: dict[Tier, str] = {**MEMORIES, "gpu": (several if gpus > 1 else "GPU") if on_gpu else "RAM"}

    def row(name: str, tiers: Mapping[Tier, int]) -> str:
        columns = dict.fromkeys((names[tier] for tier in tiers), 0)
        for tier, nbytes in tiers.items():
            columns[names[tier]] += nbytes
        return f"           {name:16}{''.join(map(cell, columns.values()))}"

    lines = [f"plan     {'':18}{''.join(f'{name:>10}' for name in dict.fromkeys(names.values()))}"]
    lines += [row(name, tiers) + _decisions(f, name, MEMORIES if on_gpu else names) for name, tiers in rows.items()]
    lines.append(row("total", {tier: sum(tiers[tier] for tiers in rows.values()) for tier in MEMORIES}))
    limit = f.limits.gpu_bytes(f.fullest) if on_gpu else gpus * f.limits.gpu - sum(f.limits.less)
    return [*lines, row("limit", {"gpu": limit, "ram": f.limits.ram})]


def cell(nbytes: int) -> str:
    """Bytes as ten characters."""
    if not nbytes:
        return f"{'–':>10}"
    if nbytes >= 1000 << 30:
        return f"{nbytes / 2**30:>6.0f} GiB"
    return f"{nbytes / 2**30:>6.1f} GiB" if nbytes >= 1000 << 20 else f"{nbytes / 2**20:>6.1f} MiB"


def _decisions(f: Forecast, row: str, names: Mapping[Tier, str]) -> str:
    """What the plan decides, behind a row of the table."""
    plan = f.plan
    n, units = len(plan.units), "sub-layers" if plan.halves else "blocks"
    if row == "weights":
        frozen = f.geo.base_bytes  # of a layer with adapters nearly all
        stored = _counted((u.base if frozen[k] else u.weights for k, u in enumerate(plan.units)), names)
        buffers = count(plan.window * (1 + plan.halves), units.removesuffix("s"))  # halves have `window` each
        where = "in RAM" if names is not MEMORIES else "on each GPU" if plan.gpus > 1 else "on the GPU"
        return f"   {n - 2} {units}, embedding and head: {stored}; buffers for {buffers} {where}"
    if row == "optimizer state":
        updated = sum(u.update == "gpu" or u.state == "gpu" for u in plan.units)
        where = f"; {updated} updated on the GPU" if 0 < updated < n and names is MEMORIES else ""
        return f"   stored: {_counted((u.state for u in plan.units), names)}; {plan.adam_bits}-bit moments{where}"
    if row == "gradients":
        return f"   updates overlap {'the next forward' if plan.mode == 'forward' else 'backward'}"
    if row == "activations":
        saving = sum(bool(u.saved) for u in plan.units)
        if saving == 0:
            return f"   recomputed for all {n - 2} {units}"
        others = ", recomputed in the others" if saving < n - 2 else ""
        return f"   saved for {saving} of {n - 2} {units}{others}"
    return ""


def _counted(tiers: Iterable[Tier], names: Mapping[Tier, str]) -> str:
    """How many layers are in each tier."""
    places = [names[tier] for tier in tiers]
    return ", ".join(f"{places.count(name)} {name}" for name in dict.fromkeys(names.values()) if name in places)


def rates_line(f: Forecast) -> str:
    """Which rates are measured, on what, and which are from data sheets; "" if all were measured on such a GPU."""
    name, sheets = f.machine.name, f.machine.how == SHEETS
    if MEASURED.search(name) and not sheets:
        return ""
    parts = ["PCIe"] * sheets + ["attention", "the loss", "kernel launches"]
    parts += ["experts"] * (f.cfg.experts is not None) + ["fp8"] * f.cfg.fp8
    rates = "data sheet or --assume, not measured" if sheets else "measured here"
    return (
        f"rates of {name}: {rates}; {', '.join(parts[:-1])} and {parts[-1]}: as measured on H100 and H200; the "
        "second step of a run corrects that"
    )


def disk_line(f: Forecast) -> str:
    """Bytes on the drives by what takes them, and whether they fit."""
    part, keep = f.disk_parts(), f.files.keep
    parts = f"store {gb(part['store'])}, as much again for {count(keep, 'snapshot')}"
    parts += f", spare files {gb(part['spares'])}" if part["spares"] else ""
    parts += f", export {gb(part['export'])}"
    parts += ", twice that for the best and the one before it" if f.files.best else ""
    parts += f", {count(f.files.step_exports, 'step')} kept {gb(part['step_exports'])}" if part["step_exports"] else ""
    parts += f", frozen weights {gb(part['frozen'])} ({f.files.copied})" if part["frozen"] else ""
    parts += f", activations and gradients {gb(part['scratch'])}" if part["scratch"] else ""
    need, room = sum(part.values()), f.room
    if not room:
        return f"{parts}: {gb(need)}"
    verdict = "fits" if need <= room else f"short by {gb(need - room)}: free some space, or the run will stop"
    return f"{parts}: {gb(need)} of {gb(room)}: {verdict}"


def time_line(f: Forecast) -> str:
    """The time of a step and of all steps, and what limits them."""
    prediction, step, work = f.step, f.step.step_s, f.work
    return (
        f"{seconds(step)} a step{f' {SHEETS}' * (f.machine.how == SHEETS)} "
        f"({count(work.sequences, 'sequence')}, {compact(work.tokens)} tokens: "
        f"{compact(work.tokens / step)} tok/s, {f.tflops:.3g} TFLOP/s); "
        f"{count(work.steps, 'step')} = {duration(work.steps * step)}; "
        f"limited by {BINDS[prediction.bound]} ({seconds(prediction.busy[prediction.bound])} of {seconds(step)})"
    )


def ready_line(parts: Times) -> str:
    """Time until the checkpoint is written, by part."""
    listed = ", ".join(f"{part} {duration(s)}" for part, s in parts.items() if s >= 0.5)
    return f"in about {duration(sum(parts.values()))}{f': {listed}' if listed else ''}"


def took_line(clock: Clock) -> str:
    """The time that the run took, by part."""
    times = {part: clock.spent[part] for part in PARTS} | {"other": clock.other}
    listed = ", ".join(f"{part} {duration(s)}" for part, s in times.items() if s >= 0.5)
    return f"{duration(clock.whole)}{f': {listed}' if listed else ''}"


def wear_line(f: Forecast, written: Mapping[str, int], run_s: float | None = None) -> str:
    """Bytes read and written in a step, and written in all, compared with what drives are rated for, and what would
    write less if that is much of it; "" if it is little.
    """
    rated, total = f.machine.endurance or ENDURANCE * (f.machine.ssd or 2 * TB), sum(written.values())
    if total < LITTLE * rated and not f.plan.uses_ssd:
        return ""
    large = {part: nbytes for part, nbytes in written.items() if nbytes > PART * total}
    parts = ", ".join(f"{part} {gb(nbytes)}" for part, nbytes in large.items())
    read, wrote = (gb(nbytes) if nbytes else "nothing" for nbytes in (f.step.ssd_read, f.step.ssd_written))
    within = f" in {run_s / 86400:.1f} days" if run_s and run_s > 86400 else ""
    line = (
        f"{read} read and {wrote} written a step, {gb(total)} written in all{within} ({parts}): "
        f"{percent(total / rated)} of the {gb(rated)} that drives of this size are often rated for"
    )
    if total <= WORN * rated:
        return line
    less = [] if f.cfg.lora else ["--lora 16"]
    if f.plan.adam_bits == 32 and f.step.ssd_written:
        with suppress(DoesNotFit):
            other = total - written["steps"] * (1 - f.in_8_bits.roughly.ssd_written / f.roughly.ssd_written)
            less.insert(0, f"--adam-bits 8 ({gb(other)})")
    return f"{line}. Less is written with {', '.join(less)}, fewer and larger steps (--batch-size), or more RAM"

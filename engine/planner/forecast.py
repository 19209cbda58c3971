"""What a run will take, before it starts: memory by tier, time, wear of the drives, disk, and what would be faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from trireme.engine.amounts import compact, count, duration, gb, seconds, whole_gib
from trireme.engine.buffers import buffers, usage, workspace
from trireme.engine.geometry import Geometry
from trireme.engine.plan import TIERS, DoesNotFit, Plan
from trireme.engine.planner.choose import LEANS, choose
from trireme.engine.planner.predict import Batch, Prediction, predict
from trireme.engine.planner.rates import ENDURANCE, RESERVE, TB, Machine
from trireme.engine.planner.rule import simple_plan
from trireme.models import shapes
from trireme.models.config import ModelConfig
from trireme.storage.layout import ITEMSIZE
from trireme.storage.shards import IN_FLIGHT

ROWS = {  # line of the memory table -> how the keys of its buffers begin
    "weights": ("weights", "weight ring"),
    "gradients": ("gradient",),
    "optimizer state": ("state", "stream ring"),
    "activations": ("x", "dx", "saved", "swap ring"),
    "workspace": ("workspace", "staging"),
}
BINDS = {
    "compute": "computation",
    "update": "updates on the GPU",
    "h2d": "the bus to the GPU",
    "d2h": "the bus from the GPU",
    "cpu": "updates on the CPU",
    "ssd": "the SSD",
}
SHORT = 4  # ways to lean of a search for what would be faster
LONG = 5  # seconds of a start that are worth a line
WORTH = 1.1  # times more tokens a second, from which a change is worth mentioning


@dataclass(frozen=True)
class Forecast:
    """A plan on a machine, for so many steps of so many sequences."""

    cfg: ModelConfig
    plan: Plan
    machine: Machine
    limits: dict[str, int]
    seq_len: int
    sequences: int  # of a step
    steps: int
    keep: int = 1  # snapshots kept beside the best
    most: int = 1 << 40  # sequences that there are for a step
    used: float = 1.0  # share of a sequence's room that holds tokens
    document: int = 0  # tokens of a usual document in a sequence; 0: it fills the sequence
    trained: float = 1.0  # share of the tokens whose label counts
    cuda: bool = True  # else both tiers are RAM
    bits_open: bool = True  # whether --adam-bits may still be chosen
    data: int = 0  # bytes of the tokenized data, kept beside the result
    held: int = 0  # bytes of the drives that the run has taken already
    export: int = 0  # bytes of the checkpoint that is written; 0: of weights as they are computed with
    best: bool = False  # whether the best so far is kept, which stands beside the next best, or the last, for a while

    @property
    def geo(self) -> Geometry:
        return Geometry.of(self.cfg, self.plan)

    @property
    def _blocks(self) -> str:
        return "half blocks" if self.plan.halves else "blocks"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return max(1, round(self.sequences * self.seq_len * self.used))

    def lines(self, faster: bool = True) -> list[str]:
        """The report's lines from `plan` on. `faster`: also what would be faster, each planned anew: takes seconds."""
        found = self.predict()
        return [
            *self.memory_lines(),
            f"time     {self.time_line(found)}",
            *([f"start    {self.start_line()}"] if self.start_s() >= LONG else []),
            *([f"ssd      {self.wear_line(found)}"] if found.ssd_written else []),
            f"disk     {self.disk_line()}",
            *(f"faster   {line}" for line in (self.faster_lines(found) if faster else ())),
        ]

    @property
    def batch(self) -> Batch:
        """What a usual step computes on."""
        n_micro = min(self.plan.n_micro, math.ceil(self.sequences * self.seq_len / self.plan.tokens))
        return Batch(math.ceil(self.tokens / n_micro), self.document or self.seq_len, n_micro, self.trained)

    def predict(self, roughly: bool = False) -> Prediction:
        """The steady state of this plan on this machine."""
        return predict(self.cfg, self.plan, self.machine.rates, self.batch, roughly)

    # ------------------------------------------------ memory and disk

    def memory_lines(self) -> list[str]:
        """The table of what each tier holds, against its limit."""
        geo, plan = self.geo, self.plan
        held = {row: dict.fromkeys(TIERS, 0) for row in ROWS}
        held["workspace"]["gpu"] = workspace(geo, plan)
        for b in buffers(geo, plan):
            held[_row(b.key)][b.tier] += b.nbytes * b.count
        for u, unit in enumerate(plan.units):
            held["weights"]["ssd"] += geo.weights[u].span * (unit.weights == "ssd")
            held["optimizer state"]["ssd"] += geo.state_span(u, plan.record) * (unit.state == "ssd")
        held["activations"]["ssd"] = self._scratch()
        held["gradients"]["ssd"] = self._spilled()
        total = usage(geo, plan)
        lines = [f"plan     {'':18}{'GPU' if self.cuda else 'gpu tier':>10}{'RAM':>10}{'SSD':>10}"]
        for row, tiers in held.items():
            lines.append(
                f"           {row:16}{_cell(tiers['gpu'])}{_cell(tiers['host'])}{_cell(tiers['ssd'])}{self._how(row)}"
            )
        ssd = sum(tiers["ssd"] for tiers in held.values())
        lines.append(f"           {'total':16}{_cell(total['gpu'])}{_cell(total['host'])}{_cell(ssd)}")
        lines.append(f"           {'limit':16}{_cell(self.limits['gpu'])}{_cell(self.limits['host'])}")
        return lines

    def _swapped(self, geo: Geometry, u: int) -> int:
        """Bytes of unit u's activations that one micro-batch sends to the SSD."""
        unit = self.plan.units[u]
        saved = geo.saved_layout(unit.names("ssd"), self.plan.tokens).span
        return saved + (geo.x_bytes(self.plan.tokens) if u and unit.x == "ssd" else 0)

    def _how(self, row: str) -> str:
        """A row's decisions in words."""
        plan, n = self.plan, len(self.plan.units)
        if row == "weights":
            homes = _counted(u.weights for u in plan.units)
            way = f"{plan.ahead + 1} {self._blocks} on their way" if plan.ahead else f"1 {self._blocks[:-1]} on its way"
            return f"   homes of {n} units: {homes}; {way}"
        if row == "optimizer state":
            updated = sum(u.update == "gpu" or u.state == "gpu" for u in plan.units)
            where = f"; {updated} updated on the GPU" if 0 < updated < n else ""
            return f"   homes: {_counted(u.state for u in plan.units)}; {plan.adam_bits}-bit moments{where}"
        if row == "gradients":
            when = {"forward": "under the next forward", "backward": "under backward"}
            return f"   consumed {when[plan.mode]}"
        if row == "activations":
            kept = sum(bool(u.saved) for u in plan.units)
            return f"   kept of {kept} of {n - 2} {self._blocks}, recomputed in the others"
        return ""

    def stored(self) -> int:
        """Bytes of everything that a snapshot holds: weights and optimizer state."""
        geo = self.geo
        return sum(geo.weights[u].span + geo.state_span(u, self.plan.record) for u in range(geo.n_units))

    def disk_parts(self) -> dict[str, int]:
        """Bytes that the drive needs at most: what is current, each snapshot's copy, the export, what waits on it."""
        stored = self.stored()
        export = self.export or shapes.parameters(self.cfg) * ITEMSIZE[self.plan.dtype]
        return {
            "store": stored,
            "snapshots": self.keep * stored,
            "spares": self._spares(),
            "export": export,
            "best": export * self.best,
            "tokens": self.data,
            "waiting": self._scratch() + self._spilled(),
        }

    def disk(self) -> int:
        """Bytes that the drive needs at most."""
        return sum(self.disk_parts().values())

    @property
    def room(self) -> int:
        """Bytes of the drives for all that, with what the run has of it already; 0 where there is no drive."""
        return self.machine.ssd + self.held

    def _spares(self) -> int:
        """Bytes of files of each size, to be written while the last version of what they hold can still be read."""
        if not self.plan.homes_on_ssd:
            return 0
        geo, record = self.geo, self.plan.record
        sizes = {layout.span for layout in geo.weights}
        sizes |= {geo.state_layout(n).span for u in range(geo.n_units) for n in geo.record_sizes(u, record)}
        return IN_FLIGHT * sum(sizes)

    def _scratch(self) -> int:
        """Bytes of the activations that wait on the SSD."""
        geo = self.geo
        return self.plan.n_micro * sum(self._swapped(geo, u) for u in range(geo.n_units))

    def _spilled(self) -> int:
        """Bytes of the gradients that wait on the SSD."""
        return sum(self.geo.weights[u].span for u in range(self.geo.n_units) if self.plan.spilled(u))

    def disk_line(self) -> str:
        """What goes to the drive, part by part, and whether there is room."""
        copies = f"as much again for {self.keep} snapshot{'s' * (self.keep > 1)}"
        part = self.disk_parts()
        parts = f"store {gb(part['store'])}, {copies}"
        parts += f", spare files {gb(part['spares'])}" if part["spares"] else ""
        parts += f", export {gb(part['export'])}"
        parts += ", as much again for the best" if self.best else ""
        parts += f", tokens {gb(part['tokens'])}" if part["tokens"] else ""
        parts += f", activations and gradients {gb(part['waiting'])}" if part["waiting"] else ""
        need, room = self.disk(), self.room
        if not room:
            return f"{parts}: {gb(need)}"
        verdict = "fits" if need <= room else f"short by {gb(need - room)}"
        return f"{parts}: {gb(need)} of {gb(room)}: {verdict}"

    # ------------------------------------------------ time

    def time_line(self, found: Prediction) -> str:
        """A step, the run, and what limits both."""
        step, about = found.step_s, "" if self.cuda else "about "  # others may be using the CPU too
        return (
            f"{about}{seconds(step)} a step ({count(self.sequences, 'sequence')}, {compact(self.tokens)} tokens: "
            f"{compact(self.tokens / step)} tok/s, {self.tflops(found):.3g} TFLOP/s); "
            f"{count(self.steps, 'step')} = {about}{duration(self.steps * step)}; "
            f"limited by {BINDS[found.bound]} ({seconds(found.busy[found.bound])} of {seconds(step)})"
        )

    def start_s(self) -> float:
        """Seconds before the first step in which RAM is made ready for copies to and from the GPU."""
        return usage(self.geo, self.plan)["host"] / self.machine.rates.pin if self.cuda else 0.0

    def start_line(self) -> str:
        """What the first step waits for."""
        held = usage(self.geo, self.plan)["host"]
        return f"{duration(self.start_s())} before the first step, to pin {held / 2**30:.1f} GiB of RAM for the bus"

    def tflops(self, found: Prediction) -> float:
        """10^12 model FLOPs a second: three times forward's, recomputation not counted."""
        whole, rest = divmod(self.tokens, self.document or self.seq_len)
        pairs = shapes.attended_pairs([self.document or self.seq_len] * whole + [rest], self.cfg.window)
        return shapes.model_flops(self.cfg, self.tokens, pairs) / found.step_s / 1e12

    def wear_line(self, found: Prediction) -> str:
        """What is read and written, beside what the drives are rated for."""
        written = found.ssd_written * self.steps
        rated = self.machine.endurance or ENDURANCE * (self.machine.ssd or 2 * TB)
        return (
            f"{gb(found.ssd_read)} read and {gb(found.ssd_written)} written a step, {gb(written)} written "
            f"in all: {written / rated:.1%} of the {gb(rated)} that drives of this size are often rated for"
        )

    # ------------------------------------------------ what would be faster

    def faster_lines(self, found: Prediction) -> list[str]:
        """Up to three changes that would train more tokens a second, the best first, each planned and predicted."""
        now, better = self.tokens / self.predict(roughly=True).step_s, []
        for name, change in self._changes() if self.cuda else ():
            try:
                changed = change()
                check_drive(changed)
            except DoesNotFit:
                continue
            gain = changed.tokens / changed.predict(roughly=True).step_s / now
            if gain >= WORTH:
                step = seconds(changed.tokens / self.tokens * found.step_s / gain)
                better.append((gain, f"{name}: {gain:.1f} times the tokens/s ({step} a step)"))
        return [line for _, line in sorted(better, key=lambda b: -b[0])[:3]]

    def _changes(self) -> Iterable[tuple[str, Callable[[], Forecast]]]:
        m, r, p = self.machine, self.machine.rates, self.plan
        if p.adam_bits == 32 and self.bits_open:
            yield "--adam-bits 8", lambda: self.again(adam_bits=8)
        doubled = 2 * self.sequences
        if doubled <= self.most:
            yield f"--batch-size {doubled}", lambda: replace(self.again(n_micro=2 * p.n_micro), sequences=doubled)
        yield "twice the RAM", lambda: self.again(limits=self.limits | {"host": 2 * self.limits["host"]})
        if any(u.state == "ssd" for u in p.units):
            drives = replace(m, ssd=2 * m.ssd, rates=replace(r, ssd_read=2 * r.ssd_read, ssd_write=2 * r.ssd_write))
            yield "twice the drives", lambda: replace(self, machine=drives).again()
        yield "a GPU with twice the memory", lambda: self.again(limits=self.limits | {"gpu": 2 * self.limits["gpu"]})
        quick = replace(m, rates=replace(r, matmul=2 * r.matmul, copy=2 * r.copy))
        yield "a GPU twice as fast", lambda: replace(self, machine=quick).again()

    def again(self, limits: dict[str, int] | None = None, adam_bits: int = 0, n_micro: int = 0) -> Forecast:
        """Planned anew, by a short search, with something changed. Raises DoesNotFit."""
        p, limits = self.plan, limits or self.limits
        rule = dict(
            batch_tokens=[(p.tokens, n_micro or p.n_micro)], dtype=p.dtype, mode=p.mode, record=p.record,
            adam_bits=adam_bits or p.adam_bits,
        )  # fmt: skip
        usual = dict(seq_len=self.batch.seq_len, trained=self.trained)
        choice = choose(self.cfg, limits, self.machine.rates, leans=LEANS[:SHORT], **usual, **rule)
        return replace(self, plan=choice.plan, limits=limits)


def check_drive(f: Forecast) -> None:
    """Raises DoesNotFit where the plan wants a drive that the machine lacks, or more than it holds."""
    plan, room, need = f.plan, f.room, f.disk()
    if plan.uses("ssd") and not room:
        alone = simple_plan(f.cfg, f.limits | {"host": 1 << 60}, batch_tokens=[(plan.tokens, plan.n_micro)],
                            dtype=plan.dtype, mode=plan.mode, homes="host", record=plan.record,
                            adam_bits=plan.adam_bits)  # fmt: skip
        ram = usage(Geometry.of(f.cfg, alone), alone)["host"]
        raise DoesNotFit(
            f"weights and optimizer state need {whole_gib(ram)} of RAM, the limit is {whole_gib(f.limits['host'])} and "
            f"there is no SSD. Add ssd={math.ceil(need / TB)}TB, or raise ram to "
            f"{whole_gib(math.ceil(ram / RESERVE['host']))} (--ram {whole_gib(ram)} of it)."
        )
    if room and need > room:
        raise DoesNotFit(f"the store and the export need {gb(need)}, {gb(need - room)} more than the drives "
                         f"hold. Raise ssd to {math.ceil(need / TB)}TB.")  # fmt: skip


def _row(key: str) -> str:
    return next(row for row, starts in ROWS.items() if any(key == s or key.startswith(s + " ") for s in starts))


def _counted(tiers: Iterable[str]) -> str:
    tiers, names = list(tiers), {"gpu": "GPU", "host": "RAM", "ssd": "SSD"}
    return ", ".join(f"{tiers.count(t)} {names[t]}" for t in TIERS if t in tiers)


def _cell(nbytes: int) -> str:
    if not nbytes:
        return f"{'–':>10}"
    if nbytes >= 1000 << 30:
        return f"{nbytes / 2**30:>6.0f} GiB"
    return f"{nbytes / 2**30:>6.1f} GiB" if nbytes >= 1000 << 20 else f"{nbytes / 2**20:>6.1f} MiB"

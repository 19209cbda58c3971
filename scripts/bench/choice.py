"""Is the planner's choice the best? python scripts/bench/choice.py brute --keep DIR, or sweep

- `brute`: many other plans are simulated, the best of each kind measured beside the planner's choice.
- `sweep`: step time over the share of swapped activations and of the choice (Fuyou, figure 9), as table, JSON and
  picture.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import step as bench_step
from plan import leave, results_folder, run_arguments

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.choose import choose
from trireme.engine.planner.host import choose_device, memory_limits
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rates import Rates, assume
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.sizes import MODELS
from trireme.engine.planner.variants import LEANS, front, most_kept, swapped
from trireme.engine.run.begin.settle import record_size
from trireme.models.config import ModelConfig
from trireme.models.sizes import shapes

BRUTE = (
    "llama-1.3b --gpu-memory 12GiB --ram 40GiB",
    "llama-1.3b --gpu-memory 16GiB --ram 60GiB --tokens 8192",
    "llama-3b --gpu-memory 12GiB --ram 60GiB --clip 0",
    "llama-3b --gpu-memory 24GiB --ram 60GiB",
)


# ---------------------------------------------------------------- brute


def swaps(geo: Geometry, base: Plan, limits: Limits, names: tuple[str, ...], steps: int) -> Iterator[Plan]:
    """Plans with `names` of 0 to `steps` parts of the blocks in RAM, if they fit."""
    n = geo.cfg.n_layers
    plain = replace(base, units=tuple(replace(u, saved=()) for u in base.units))
    for k in dict.fromkeys(round(n * step / steps) for step in range(steps + 1)):
        if fits(geo, swapped(geo, plain, names, k, 0), limits):
            yield most_kept(geo, plain, limits, names, k)


def alternatives(cfg: ModelConfig, limits: Limits, wanted: Wanted) -> Iterator[tuple[str, Plan]]:
    """(kind, plan) over micro-batches, leans, tensors in RAM, shares of blocks."""
    for size in wanted.sizes[:3]:
        for lean in LEANS:
            try:
                base = simple_plan(cfg, limits, replace(wanted, sizes=(size,)), lean)
            except DoesNotFit:
                continue
            kind = f"x {lean.x}, states {lean.states}, resident {lean.resident}, updates {lean.updates}"
            yield kind, base
            geo = Geometry.of(cfg, base)
            for names in front(geo.cfg, wanted.document):
                for plan in swaps(geo, base, limits, names, 4):
                    yield f"{kind}, {'+'.join(names) if away(geo, plan) else 'nothing'} away", plan


class Box:
    """This machine: its ceilings and steps of plans."""

    def __init__(self):
        self.device = choose_device("auto")
        self.rates = bench_step.measure_rates(self.device, "BF16", None)

    def limits(self, given: argparse.Namespace) -> Limits:
        """Limits by the arguments of step.py."""
        bench_step.forget_peaks(self.device)
        return memory_limits(self.device, given.gpu_memory, given.ram)

    def seconds(self, given: argparse.Namespace, plan: Plan, limits: Limits, log: Path) -> float:
        """A step's median time; step.py prints to `log`."""
        bench_step.forget_peaks(self.device)
        with log.open("w") as out, redirect_stdout(out):
            return bench_step.measure(given, MODELS[given.model], plan, limits, self.rates, self.device, 0.0)["step_s"]


def brute(a: argparse.Namespace, keep: Path) -> list[dict]:
    """For each line, the choice over the best measured."""
    rows, ends, box = [], time.monotonic() + 60 * a.minutes, Box()
    for i, line in enumerate(BRUTE):
        if a.only and i not in a.only:
            continue
        given = bench_step.arguments(line.split())
        cfg, limits = MODELS[given.model], box.limits(given)
        wanted = bench_step.wanted_of(given, cfg, "BF16", limits)
        choice = choose(cfg, limits, box.rates, wanted)
        plans = [(choice.found.step_s, "the choice", choice.plan)]
        plans += _best_of_each_kind(cfg, wanted, limits, box.rates, choice.plan)[: a.best_of]
        print(line, flush=True)
        measured = []
        for predicted, kind, plan in plans:
            if time.monotonic() + 10 > ends:
                break
            measured.append(box.seconds(given, plan, limits, keep / f"brute-{i}-{len(measured)}.log"))
            print(f"  {kind}: predicted {predicted:.3f} s, measured {measured[-1]:.3f} s", flush=True)
        if len(measured) > 1:
            rows.append({"name": line, "measured": measured, "choice_over_best": measured[0] / min(measured)})
            print(f"  the choice takes {rows[-1]['choice_over_best']:.3f} of the best measured", flush=True)
    return rows


def _best_of_each_kind(
    cfg: ModelConfig, wanted: Wanted, limits: Limits, rates: Rates, chosen: Plan
) -> list[tuple[float, str, Plan]]:
    """(predicted seconds, kind, plan) of each kind's best, the best first."""
    best: dict[str, tuple[float, str, Plan]] = {}
    for kind, plan in alternatives(cfg, limits, wanted):
        seconds = predict(cfg, plan, rates, Batch(plan.tokens, wanted.document, plan.n_micro)).step_s
        if plan != chosen and seconds < best.get(kind, (math.inf,))[0]:
            best[kind] = (seconds, kind, plan)
    different = {plan: (seconds, kind, plan) for seconds, kind, plan in best.values()}
    return sorted(different.values(), key=lambda found: found[0])


# ---------------------------------------------------------------- sweep


def sweep(a: argparse.Namespace, keep: Path) -> list[dict]:
    """Step times of swapped shares and of the choice, for each of --sequences."""
    cfg, rows = MODELS[a.model], []
    box = Box() if a.measure else None
    for sequences in a.sequences:
        line = [a.model, "--tokens", str(sequences * a.seq), "--seq", str(a.seq), "--clip", "0", *a.box.split()]
        given = bench_step.arguments(line)
        m = assume(a.assume)
        rates, limits = (box.rates, box.limits(given)) if box else (m.rates, m.limits)
        tokens = min(sequences, 16384 // a.seq or 1) * a.seq
        record = record_size(shapes.parameters(cfg), limits.host)
        sizes = tuple((tokens >> k, math.ceil(sequences * a.seq / (tokens >> k))) for k in range(3))
        wanted = Wanted(sizes, mode="backward", record=record, document=a.seq)
        try:
            for i, point in enumerate(_points(a, cfg, rates, limits, sequences, wanted)):
                plan = point.pop("plan")
                if box:
                    point["measured_s"] = box.seconds(given, plan, limits, keep / f"sweep-{sequences}-{i}.log")
                rows.append(point)
                print(f"{sequences:4} sequences, {point['share']:6.1%} away: " + ", ".join(
                    f"{k.removesuffix('_s')} {point[k]:.3f} s" for k in ("predicted_s", "measured_s") if k in point
                ) + f" ({point['bound']}){' <- the choice' if point['choice'] else ''}", flush=True)  # fmt: skip
        except DoesNotFit as error:
            print(f"{sequences} sequences: {error}", flush=True)
    return rows


def _points(a, cfg: ModelConfig, rates: Rates, limits: Limits, sequences: int, wanted: Wanted):
    """The curve of a step's size, and the choice."""
    choice = choose(cfg, limits, rates, wanted).plan
    alike = replace(wanted, sizes=((choice.tokens, choice.n_micro),))
    base = simple_plan(cfg, limits, alike, LEANS[a.lean])
    geo = Geometry.of(cfg, base)
    points = list(
        {away(geo, p): p for p in swaps(geo, base, limits, tuple(shapes.saved_shapes(cfg, 1)), a.points)}.items()
    )
    for i, (share, plan) in enumerate([*points, (away(geo, choice), choice)]):
        found = predict(cfg, plan, rates, Batch(plan.tokens, a.seq, plan.n_micro))
        yield {"sequences": sequences, "share": share, "predicted_s": found.step_s, "bound": found.bound,
               "choice": i == len(points), "plan": plan}  # fmt: skip


def away(geo: Geometry, plan: Plan) -> float:
    """Swapped share of all blocks' saved bytes: Fuyou's swap coefficient (section 5.6)."""
    units = range(1, geo.head)
    total = sum(geo.saved_layout(u, geo.saved_names(geo.kinds[u]), plan.tokens).span for u in units)
    names = {u: plan.units[u].names("host") + plan.units[u].names("ssd") for u in units}
    return sum(geo.saved_layout(u, names[u], plan.tokens).span for u in units) / total


# ---------------------------------------------------------------- a picture

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 24, 40, 48
COLOURS, INK, GRID_INK = ("#1f5fa8", "#d8572a", "#3a8f5c", "#8a5fb0"), "#333", "#e3e3e3"


def picture(rows: list[dict], title: str) -> str:
    """SVG: lines are predicted, dots measured, rings chosen."""
    top = 1.05 * max(r.get(k, 0.0) for r in rows for k in ("predicted_s", "measured_s"))
    to_x = lambda share: LEFT + share * (WIDTH - LEFT - RIGHT)
    to_y = lambda s: HEIGHT - BOTTOM - s / top * (HEIGHT - TOP - BOTTOM)
    parts = [f'<text x="{LEFT}" y="22" font-size="14">{title}</text>']
    for i in range(6):
        y, x = to_y(top * i / 5), to_x(i / 5)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID_INK if i else INK}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * i / 5:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{i * 20} %</text>')
    label = "share of the blocks' activations that travel to RAM; seconds a step; ring: the planner's choice"
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>')
    for k, sequences in enumerate(dict.fromkeys(r["sequences"] for r in rows)):
        colour, mine = COLOURS[k % len(COLOURS)], [r for r in rows if r["sequences"] == sequences]
        curve = " ".join(f"{to_x(r['share']):.1f},{to_y(r['predicted_s']):.1f}" for r in mine if not r["choice"])
        parts.append(f'<polyline points="{curve}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for r in mine:
            x = to_x(r["share"])
            if "measured_s" in r:
                parts.append(f'<circle cx="{x:.1f}" cy="{to_y(r["measured_s"]):.1f}" r="3.5" fill="{colour}"/>')
            if r["choice"]:
                ring = f'cx="{x:.1f}" cy="{to_y(r["predicted_s"]):.1f}" r="8" fill="none"'
                parts.append(f'<circle {ring} stroke="{colour}" stroke-width="2"/>')
        y = to_y(mine[0]["predicted_s"]) - 8
        parts.append(f'<text x="{LEFT + 8}" y="{y:.1f}" fill="{colour}">{sequences} sequences</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main(argv: list[str]) -> int:
    a = arguments(argv)
    keep = results_folder(a)
    rows = brute(a, keep) if a.what == "brute" else sweep(a, keep)
    if not rows:
        sys.exit("error: nothing fits, or nothing could be run")
    if a.what == "sweep":
        (keep / "sweep.svg").write_text(picture(rows, f"{a.model}, {a.box if a.measure else a.assume}"))
    leave(rows, a.what, keep)
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    p = run_arguments(("brute", "sweep"))
    p.description = __doc__.splitlines()[0]
    p.add_argument("--best-of", type=int, default=5, help="for brute: plans that are measured beside the choice")
    p.add_argument("--model", choices=MODELS, default="gpt3-13b")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--sequences", type=lambda t: [int(i) for i in t.split(",")], default=[32, 64, 80])
    p.add_argument("--points", type=int, default=8, help="shares, beside none")
    p.add_argument("--lean", type=int, default=0, help="the way to lean of the curve's plans, by its number in LEANS")
    p.add_argument("--assume", default="gpu=a100-80g,ram=700GiB,ssd=12x3840GB@6.5/3.4,dram=150", help="a machine")
    p.add_argument("--measure", action="store_true", help="on this machine rather than for --assume")
    p.add_argument("--box", default="--gpu-memory 24GiB --ram 100GiB", help="limits of the measured sweep")
    return p.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Simulated step time over the share of swapped activations (Fuyou, figure 9): python scripts/papers/swap_share.py

The planner's choice is ringed in the picture. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Plan
from trireme.engine.planner.choose import choose
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rates import Machine, assume
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.sizes import MODELS
from trireme.engine.planner.variants import STRATEGIES, moves, with_most_on_gpu, with_moves
from trireme.engine.run.plan import record_size
from trireme.models.config import ModelConfig
from trireme.models.sizes import shapes


def points(a: argparse.Namespace, cfg: ModelConfig, m: Machine, sequences: int) -> Iterator[dict]:
    """The curve of a step of `sequences`, and the choice. Raises DoesNotFit."""
    tokens = min(sequences, 16384 // a.seq or 1) * a.seq
    sizes = tuple((tokens >> k, math.ceil(sequences * a.seq / (tokens >> k))) for k in range(3))
    record = record_size(shapes.parameters(cfg), m.limits.host)
    wanted = Wanted(sizes, mode="backward", record=record, document=a.seq)
    choice = choose(cfg, m.limits, m.rates, wanted).plan
    base = simple_plan(cfg, m.limits, replace(wanted, sizes=((choice.tokens, choice.n_micro),)), STRATEGIES[0])
    geo = Geometry.of(cfg, base)
    plain, steps = (
        base.changed(range(geo.n_units), saved=()),
        moves(geo, Batch(base.tokens, a.seq, base.n_micro), m.rates),
    )
    total = sum(geo.kinds.count(move.kind) for move in steps)
    plans = [
        with_most_on_gpu(geo, plain, m.limits, steps, n, n)
        for n in dict.fromkeys(round(total * i / a.points) for i in range(a.points + 1))
        if fits(geo, with_moves(geo, plain, steps, n, n), m.limits)
    ]
    curve = {swapped_share(geo, plan): plan for plan in plans}
    for chosen, (share, plan) in [*((False, p) for p in curve.items()), (True, (swapped_share(geo, choice), choice))]:
        found = predict(cfg, plan, m.rates, Batch(plan.tokens, a.seq, plan.n_micro))
        yield {"sequences": sequences, "share": share, "step_s": found.step_s, "bound": found.bound, "choice": chosen}


def swapped_share(geo: Geometry, plan: Plan) -> float:
    """Swapped share of all blocks' saved bytes: Fuyou's swap coefficient (section 5.6)."""
    units = range(1, geo.head)
    total = sum(geo.saved_layout(u, geo.saved_names(geo.kinds[u]), plan.tokens).span for u in units)
    names = {u: plan.units[u].names("host") + plan.units[u].names("ssd") for u in units}
    return sum(geo.saved_layout(u, names[u], plan.tokens).span for u in units) / total


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 24, 40, 48
COLOURS, INK, GRID_INK = ("#1f5fa8", "#d8572a", "#3a8f5c", "#8a5fb0"), "#333", "#e3e3e3"
AXIS = "share of the blocks' activations that are swapped to RAM; seconds a step; ring: the planner's choice"


def picture(rows: list[dict], title: str) -> str:
    """SVG: a line for each number of sequences, the choices ringed."""
    top = 1.05 * max(r["step_s"] for r in rows)
    to_x = lambda share: LEFT + share * (WIDTH - LEFT - RIGHT)
    to_y = lambda s: HEIGHT - BOTTOM - s / top * (HEIGHT - TOP - BOTTOM)
    parts = [f'<text x="{LEFT}" y="22" font-size="14">{title}</text>']
    for i in range(6):
        y, x = to_y(top * i / 5), to_x(i / 5)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID_INK if i else INK}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * i / 5:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{i * 20} %</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{AXIS}</text>')
    for k, sequences in enumerate(dict.fromkeys(r["sequences"] for r in rows)):
        colour, mine = COLOURS[k % len(COLOURS)], [r for r in rows if r["sequences"] == sequences]
        curve = " ".join(f"{to_x(r['share']):.1f},{to_y(r['step_s']):.1f}" for r in mine if not r["choice"])
        parts.append(f'<polyline points="{curve}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for r in (r for r in mine if r["choice"]):
            ring = f'cx="{to_x(r["share"]):.1f}" cy="{to_y(r["step_s"]):.1f}" r="8" fill="none"'
            parts.append(f'<circle {ring} stroke="{colour}" stroke-width="2"/>')
        y = to_y(mine[0]["step_s"]) - 8
        parts.append(f'<text x="{LEFT + 8}" y="{y:.1f}" fill="{colour}">{sequences} sequences</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=MODELS, default="gpt3-13b")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--sequences", type=lambda t: [int(i) for i in t.split(",")], default=[32, 64, 80])
    p.add_argument("--points", type=int, default=8, help="shares besides none")
    p.add_argument("--assume", default="gpu=a100-80g,ram=700GiB,ssd=12x3840GB@6.5/3.4,dram=150", help="a machine")
    p.add_argument("--json", help="write the figures to this file")
    p.add_argument("--svg", help="write the picture to this file")
    a = p.parse_args(argv)
    cfg, m, rows = MODELS[a.model], assume(a.assume), list[dict]()
    for sequences in a.sequences:
        try:
            for r in points(a, cfg, m, sequences):
                rows.append(r)
                mark = " <- the choice" if r["choice"] else ""
                print(f"{sequences:4} sequences, {r['share']:6.1%} swapped: {r['step_s']:.3f} s ({r['bound']}){mark}")
        except DoesNotFit as error:
            print(f"{sequences} sequences: {error}")
    if not rows:
        sys.exit("error: nothing fits")
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))
    if a.svg:
        Path(a.svg).write_text(picture(rows, f"{a.model}, {a.assume}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A run as a page, report.html: one file without scripts, with curve, evaluations, examples and the report."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

WIDTH, HEIGHT, LEFT, BELOW = 820, 340, 60, 20  # of the curve; margins for its numbers
MOST, LARGEST = 1000, 1e100  # points of a line; what is drawn of a loss
USED = ("learning_rate", "gpu_mem_gib", "ram_gib", "ssd_written_tb")
PAIRS = "eval_rewards/accuracies"  # before training they are ties
ENERGY, KWH = "gpu_joules", 3.6e6  # of a step and what came before it; joules
DRAWN = ("step", "loss", "eval_loss", "eval_accuracy", PAIRS, "sample", ENERGY, *USED)
COLUMNS = {"step": ("step", ","), "eval_loss": ("loss", ".4f"), "eval_accuracy": ("accuracy", ".4f"),
           PAIRS: ("accuracy", ".4f"), "sample": ("sample", "")}  # fmt: skip
MARKS = "\x02\x03"  # around the trained part of an example: rows have brackets of their own
STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#222;--box:#f6f6f4;--mark:#ffe08a;--train:#1f5fa8;--val:#d8572a}
@media(prefers-color-scheme:dark){:root{--back:#1c1c1b;--text:#ddd;--box:#292927;--mark:#6b5410;--train:#7db4f0}}
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2em auto;padding:0 1em;overflow-wrap:anywhere}
body{background:var(--back);color:var(--text)}h2{font-size:1.1em;margin-top:2em}
pre{white-space:pre-wrap;background:var(--box);padding:.7em}mark{background:var(--mark);color:inherit}
th,td{padding:.15em .9em .15em 0;vertical-align:top;text-align:left}th,td:not(:last-child){overflow-wrap:normal}
svg{overflow:visible}svg text{font-size:12px;fill:var(--text)}path{stroke:var(--text);opacity:.15}
polyline{fill:none;stroke:currentColor;stroke-width:2}.training,.raw{color:var(--train)}.held-out{color:var(--val)}
.raw{opacity:.3}@media(max-width:600px){svg text{font-size:22px}}
"""
Point = tuple[float, float]


@dataclass(frozen=True)
class PageFacts:
    """What a page says besides the log."""

    title: str
    axis: str = "loss (nats per token)"
    report: Sequence[str] = ()  # the lines before the first step
    examples: Sequence[str] = ()  # with the trained part between MARKS
    result: Sequence[str] = ()  # next to the model before training
    took: Sequence[str] = ()  # the time by part
    settings: str = ""  # config.yaml


def page(records: Sequence[dict[str, Any]], facts: PageFacts) -> str:
    """The page of a run in one file: curve, evaluations with samples, examples with the trained part marked, report."""
    evals = [{k: v for k, v in r.items() if r["step"] or k != PAIRS} for r in records if "eval_loss" in r]
    train, held_out = ([(r["step"], r[name]) for r in records if name in r] for name in ("loss", "eval_loss"))
    columns = {key: column for key, column in COLUMNS.items() if any(key in record for record in evals)}
    cells = [[escape(format(r[k], spec)) if k in r else "" for k, (_, spec) in columns.items()] for r in thinned(evals)]
    rows = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)
    mark = re.compile(f"{MARKS[0]}([^{MARKS}]*){MARKS[1]}?")
    marked = (mark.sub(r"<mark>\1</mark>", escape(text)) for text in facts.examples)
    title, result, report = escape(facts.title), escape("\n".join(facts.result)), escape("\n".join(facts.report))
    took = escape("\n".join([*facts.took, *used(records)]))
    body = f"<h2>{title}</h2>{curve(train, held_out, facts.axis)}"
    body += f"<h2>Before training and now</h2><pre>{result}</pre>" if result else ""
    names = "".join(f"<th>{name}</th>" for name, _ in columns.values())
    body += f"<h2>Evaluations</h2><table><tr>{names}</tr>{rows}</table>" if rows else ""
    body += f"<h2>What is learned: the marked part</h2>{''.join(f'<pre>{text}</pre>' for text in marked)}"
    body += f"<h2>What it took</h2><pre>{took}</pre>" if took else ""
    body += f"<h2>Before the first step</h2><pre>{report}</pre>"
    body += f"<h2>Settings</h2><pre>{escape(facts.settings)}</pre>" if facts.settings else ""
    narrow = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    head = f'<meta charset="utf-8">{narrow}<title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def used(records: Sequence[dict[str, Any]]) -> list[str]:
    """Lines on the largest memory in use, what was written to drives, energy, and the learning rate."""
    peak = {key: max(values) for key in USED if (values := [r[key] for r in records if key in r])}
    memory = [f"{of} {peak[key]:.3g} GiB" for of, key in (("GPU", "gpu_mem_gib"), ("RAM", "ram_gib")) if key in peak]
    lines = [f"memory   {', '.join(memory)} at most"] if memory else []
    lines += [f"written  {peak['ssd_written_tb'] * 1e3:.3g} GB to drives"] if peak.get("ssd_written_tb") else []
    kwh = sum(r.get(ENERGY, math.nan) for r in records if "loss" in r) / KWH
    lines += [f"energy   {kwh:.3g} kWh by the counters of the GPUs"] if math.isfinite(kwh) and kwh else []
    return lines + ([f"rate     {peak['learning_rate']:.3g} at most"] if "learning_rate" in peak else [])


def curve(train: Sequence[Point], evals: Sequence[Point], axis: str) -> str:
    """Raw and smoothed training loss, and evaluations, as SVG with a legend below."""
    train, evals = ([(x, y) for x, y in points if abs(y) < LARGEST] for points in (train, evals))
    smooth = smoothed(train)
    steps, losses = zip(*([*smooth, *evals] or [(0.0, 0.0)]), strict=True)
    first, last, low, high = min(steps), max(steps), min(losses), max(losses)
    to_x = lambda x: LEFT + (x - first) / max(1, last - first) * (WIDTH - LEFT - 10)
    places = 3 - math.floor(math.log10(high - low or 1.0))
    to_y = lambda y: HEIGHT - BELOW - (min(max(y, low), high) - low) / (high - low or 1.0) * (HEIGHT - BELOW - 20)
    parts = list[str]()
    for y in (low + k / 4 * (high - low) for k in range(5)):
        parts.append(f'<path d="M{LEFT} {to_y(y):.1f}H{WIDTH}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{to_y(y) + 4:.1f}" text-anchor="end">{round(y, places):.4g}</text>')
    legend = f"steps {first:,} to {last:,}; {escape(axis)}"
    for name, points in (("raw", train), ("training", smooth), ("held-out", evals)):
        line = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in thinned(points))
        parts.append(f'<polyline class="{name}" points="{line}"/>')
        if points and name != "raw":
            legend += f'; <span class="{name}">{name} {points[0][1]:.4g} to {points[-1][1]:.4g}</span>'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="100%"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg><p>{legend}</p>'


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over a centred window of a twenty-fifth of the run, which do not lag behind falling losses."""
    half, sums = len(points) // 50, [0.0, *accumulate(y for _, y in points)]
    ends = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, ends, strict=True)]


def thinned(points: Sequence[Any]) -> list[Any]:
    """At most about MOST of the points, with the last."""
    stride = -(-len(points) // MOST) or 1
    return [*points[::stride], *points[-1:]] if stride > 1 else list(points)

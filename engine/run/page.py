"""report.html: one page of a run in one file. Curve, evaluations with samples, examples with the trained part marked,
the report, settings, timing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 380, 56, 16, 16, 40
MOST, LARGEST = 1000, 1e100  # points of a line; what is drawn of a loss
DRAWN = ("step", "loss", "eval_loss", "eval_accuracy", "eval_rewards/accuracies", "sample", "learning_rate")
TRAIN, FAINT, EVAL = "#1f5fa8", "#b9cde4", "#d8572a"
Point = tuple[float, float]
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2em auto;padding:0 1em;color:#222}
h2{font-size:1.1em;margin-top:2em}pre{white-space:pre-wrap;background:#f6f6f4;padding:.7em}
mark{background:#ffe08a}td,th{padding:.15em .9em .15em 0;text-align:left;vertical-align:top}
th{color:#666;font-weight:400}
"""


@dataclass(frozen=True)
class Facts:
    """What a page says besides the log."""

    title: str
    axis: str = "loss (nats per token)"
    report: Sequence[str] = ()  # the lines before the first step
    examples: Sequence[str] = ()  # with the trained part in [ ]
    settings: dict[str, Any] = field(default_factory=dict)
    timing: str = ""


def page(records: Sequence[dict[str, Any]], facts: Facts) -> str:
    """The page as HTML."""
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    evals = [r for r in records if "eval_loss" in r]
    rows = [(f"{r['step']:,}", f"{r['eval_loss']:.4f}", r.get("sample", "")) for r in thinned(evals)]
    sections = {
        facts.title: curve(train, [(r["step"], r["eval_loss"]) for r in evals], facts.axis),
        "Evaluations": table([("step", "loss", "sample"), *rows]) if rows else "",
        "What is learned: the marked part": "".join(f"<pre>{marked(text)}</pre>" for text in facts.examples),
        "Before the first step": f"<pre>{escape(chr(10).join(facts.report))}</pre>" * bool(facts.report),
        "Settings": table([(key, str(value)) for key, value in facts.settings.items()]),
        "Time": escape(facts.timing),
    }
    body = "".join(f"<h2>{escape(title)}</h2>{content}" for title, content in sections.items() if content)
    head = f'<meta charset="utf-8"><title>{escape(facts.title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>\n"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells; the first of each row is its heading."""
    lines = (
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(v)}</td>' for v in cells)}</tr>" for name, *cells in rows
    )
    return f"<table>{''.join(lines)}</table>"


def marked(text: str) -> str:
    return escape(text).replace("[", "<mark>").replace("]", "</mark>")


# ---------------------------------------------------------------- the curve


def curve(train: Sequence[Point], evals: Sequence[Point], axis: str) -> str:
    """Raw and smoothed training loss, and evaluations, as SVG."""
    finite = lambda points: [(x, y) for x, y in points if abs(y) < LARGEST]
    train, evals = finite(train), finite(evals)
    smooth = smoothed(train)
    points = [*smooth, *evals] or [(0.0, 0.0)]
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last, pad = min(x for x, _ in points), max(x for x, _ in points), 0.08 * (high - low) or 0.5
    low, high, last = low - pad, high + pad, max(last, first + 1)
    to_x = lambda v: f"{LEFT + (v - first) / (last - first) * (WIDTH - LEFT - RIGHT):.1f}"
    to_y = lambda v: f"{HEIGHT - BOTTOM - (v - low) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"
    parts = list[str]()
    for v in ticks(low, high, 6):
        parts.append(f'<path d="M{LEFT} {to_y(v)}H{WIDTH - RIGHT}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{to_y(v)}" dy="4" text-anchor="end">{v:.4g}</text>')
    for v in ticks(first, last, 8):
        if v == int(v):
            parts.append(f'<text x="{to_x(v)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{v:,.0f}</text>')
    for line, colour, width in ((train, FAINT, 1), (smooth, TRAIN, 2), (evals, EVAL, 2)):
        path = " ".join(f"{to_x(x)},{to_y(y)}" for x, y in thinned(line) if low <= y <= high)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    parts += [f'<circle cx="{to_x(x)}" cy="{to_y(y)}" r="3" fill="{EVAL}"/>' for x, y in evals]
    legend = [
        f'<tspan fill="{colour}">{name} {line[0][1]:.4g} → {line[-1][1]:.4g}</tspan>'
        for name, line, colour in (("training, smoothed", smooth, TRAIN), ("held out", evals, EVAL))
        if line
    ]
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">optimizer step; {escape(axis)}: {"; ".join(legend)}</text>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over a centred window of a twenty-fifth of the run, which do not lag behind falling losses."""
    half, sums = len(points) // 50, [0.0, *accumulate(y for _, y in points)]
    ends = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, ends, strict=True)]


def thinned(points: Sequence[Any]) -> list[Any]:
    stride = -(-len(points) // MOST) or 1
    return [*points[::stride], *points[-1:]] if stride > 1 else list(points)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Numbers in [low, high], at distances of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10((high - low) / about))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= (high - low) / about * 0.999)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]

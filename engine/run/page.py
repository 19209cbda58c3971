"""A run as a page, report.html: one file without scripts, with curve, evaluations, examples and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

WIDTH, HEIGHT, LEFT, BELOW = 820, 360, 60, 40  # of the curve; margins for its numbers
MOST, LARGEST = 1000, 1e100  # points of a line; what is drawn of a loss
DRAWN = ("step", "loss", "eval_loss", "eval_accuracy", "eval_rewards/accuracies", "sample", "learning_rate")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2em auto;padding:0 1em;color:#222}
h2{font-size:1.1em;margin-top:2em}pre{white-space:pre-wrap;background:#f6f6f4;padding:.7em}
mark{background:#ffe08a}td{padding:.15em .9em .15em 0;vertical-align:top}
"""
Point = tuple[float, float]


@dataclass(frozen=True)
class Facts:
    """What a page says besides the log."""

    title: str
    axis: str = "loss (nats per token)"
    report: Sequence[str] = ()  # the lines before the first step
    examples: Sequence[str] = ()  # with the trained part in [ ]
    result: Sequence[str] = ()  # next to the model before training


def page(records: Sequence[dict[str, Any]], facts: Facts) -> str:
    """The page of a run in one file: curve, evaluations with samples, examples with the trained part marked, report."""
    evals = [record for record in records if "eval_loss" in record]
    train, held_out = ([(r["step"], r[name]) for r in records if name in r] for name in ("loss", "eval_loss"))
    cells = ([f"{r['step']:,}", f"{r['eval_loss']:.4f}", escape(r.get("sample", ""))] for r in thinned(evals))
    rows = "".join(f"<tr><td>{'<td>'.join(row)}</tr>" for row in cells)
    marked = (escape(text).replace("[", "<mark>").replace("]", "</mark>") for text in facts.examples)
    title, report = escape(facts.title), escape("\n".join(facts.report))
    body = f"<h2>{title}</h2>{curve(train, held_out, facts.axis)}"
    body += "<h2>Before training and now</h2><ul>" if facts.result else ""
    body += "".join(f"<li>{escape(line)}" for line in facts.result) + "</ul>" * bool(facts.result)
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

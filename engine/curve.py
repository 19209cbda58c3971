"""loss.svg: training and evaluation loss over steps, as a picture that any browser opens. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

WIDTH, HEIGHT = 820, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 34, 46  # margins around the plot
TRAIN, TRAIN_FAINT, EVAL, INK, GRID = "#1f5fa8", "#b9cde4", "#d8572a", "#333", "#e3e3e3"

Point = tuple[float, float]  # step, loss


def draw(records: Sequence[Mapping[str, Any]]) -> str:
    """The picture as SVG text, from the records of log.jsonl. Losses that are not finite are left out."""
    train, evals = _points(records, "loss"), _points(records, "eval_loss")
    smooth = _smoothed(train)
    shape = smooth + evals or [(0.0, 0.0)]
    first, last = min(x for x, _ in shape), max(x for x, _ in shape)
    low, high = min(y for _, y in shape), max(y for _, y in shape)
    pad = 0.08 * (high - low) or 0.5
    low, high, last = low - pad, high + pad, max(last, first + 1)
    to_x = lambda v: LEFT + (v - first) / (last - first) * (WIDTH - LEFT - RIGHT)  # noqa: E731
    to_y = lambda v: HEIGHT - BOTTOM - (v - low) / (high - low) * (HEIGHT - TOP - BOTTOM)  # noqa: E731

    parts = [*_axes(first, last, low, high, to_x, to_y)]
    line = lambda points: " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)  # noqa: E731
    parts.append('<g clip-path="url(#plot)" fill="none" stroke-linejoin="round">')
    parts.append(f'<polyline points="{line(_thinned(train))}" stroke="{TRAIN_FAINT}"/>')
    parts.append(f'<polyline points="{line(_thinned(smooth))}" stroke="{TRAIN}" stroke-width="2"/>')
    parts.append(f'<polyline points="{line(evals)}" stroke="{EVAL}" stroke-width="2"/></g>')
    parts += [f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3.5" fill="{EVAL}"/>' for x, y in evals]
    parts += _legend(smooth, evals)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">\n'
        f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    values = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
    return [(float(x), float(y)) for x, y in values if math.isfinite(y)]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """The mean over a centred window of about a twenty-fifth of the run, which does not lag behind a falling loss."""
    half = len(points) // 50
    sums = [0.0, *accumulate(y for _, y in points)]
    ends = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, ends, strict=True)]


def _thinned(points: Sequence[Point], most: int = 1000) -> list[Point]:
    """At most about `most` points, so that the file stays small; the last one is always there."""
    stride = -(-len(points) // most) or 1
    return [*points[::stride], *points[-1:]]


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers in [low, high], 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _axes(first: float, last: float, low: float, high: float, to_x, to_y) -> list[str]:
    base = HEIGHT - BOTTOM
    parts = []
    for v in _ticks(low, high, 6):
        y = to_y(v)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{v:.4g}</text>')
    for v in _ticks(first, last, 8):
        if v == int(v):
            parts.append(f'<text x="{to_x(v):.1f}" y="{base + 18}" text-anchor="middle">{int(v):,}</text>')
    parts.append(f'<path d="M{LEFT} {base}H{WIDTH - RIGHT}" stroke="{INK}"/>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    parts.append(f'<text transform="rotate(-90)" x="{-(TOP + base) / 2}" y="16" text-anchor="middle">loss</text>')
    return parts


def _legend(train: Sequence[Point], evals: Sequence[Point]) -> list[str]:
    parts, x = [], LEFT
    for name, points, colour in (("train (smoothed)", train, TRAIN), ("eval", evals, EVAL)):
        if points:
            text = f"{name}: {points[0][1]:.4g} to {points[-1][1]:.4g}"
            parts.append(f'<path d="M{x} 18h22" stroke="{colour}" stroke-width="3"/>')
            parts.append(f'<text x="{x + 28}" y="22">{text}</text>')
            x += 28 + 7 * len(text) + 24
    return parts

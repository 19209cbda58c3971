"""loss.svg: training and evaluation loss over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from xml.sax.saxutils import escape

from trireme.storage.untrusted import shown

WIDTH, HEIGHT = 820, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 58, 46  # margins
LEGEND = 44  # its base line
MOST_TITLE = 100  # characters
LOSS = "loss (nats per token)"
TRAIN, TRAIN_FAINT, EVAL, INK, GRID = "#1f5fa8", "#b9cde4", "#d8572a", "#333", "#e3e3e3"

MOST = 4096  # points kept, even
DRAWN = 1000  # points of a line, about
ABSURD = 1e30  # loss beyond any scale

Point = tuple[float, float]  # step, loss
Scale = Callable[[float], float]  # value -> coordinate


class Curve:
    """Points of a curve; beyond MOST of them, neighbours are replaced by their means."""

    def __init__(self) -> None:
        self._points: list[Point] = []  # means of `_each` added ones
        self._each = 1
        self._steps = self._losses = 0.0  # over `_waiting` points not in `_points` yet
        self._waiting = 0

    def add(self, step: float, loss: float) -> None:
        """Adds a loss. One that is not finite is left out."""
        if not abs(loss) < ABSURD:
            return
        self._steps, self._losses, self._waiting = self._steps + step, self._losses + loss, self._waiting + 1
        if self._waiting == self._each:
            self._points.append(self._mean())
            self._steps = self._losses = self._waiting = 0
        if len(self._points) == MOST:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs]
            self._each *= 2

    def _mean(self) -> Point:
        return self._steps / self._waiting, self._losses / self._waiting

    @property
    def points(self) -> list[Point]:
        """The points, by step."""
        return [*self._points, self._mean()] if self._waiting else list(self._points)


def draw(train: Sequence[Point], evals: Sequence[Point], title: str = "", what: str = LOSS) -> str:
    """The figure as SVG. `what`: label of the vertical axis."""
    smooth = _smoothed(train)
    shape = [*smooth, *evals] or [(0.0, 0.0)]
    first, last = min(x for x, _ in shape), max(x for x, _ in shape)
    low, high = min(y for _, y in shape), max(y for _, y in shape)
    pad = 0.08 * (high - low) or 0.5
    low, high, last = low - pad, high + pad, max(last, first + 1)
    to_x = lambda v: LEFT + (v - first) / (last - first) * (WIDTH - LEFT - RIGHT)
    to_y = lambda v: HEIGHT - BOTTOM - (v - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [*_axes(first, last, low, high, to_x, to_y, what)]
    line = lambda points: " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)
    parts.append('<g clip-path="url(#plot)" fill="none" stroke-linejoin="round">')
    parts.append(f'<polyline points="{line(_thinned(train))}" stroke="{TRAIN_FAINT}"/>')
    parts.append(f'<polyline points="{line(_thinned(smooth))}" stroke="{TRAIN}" stroke-width="2"/>')
    parts.append(f'<polyline points="{line(evals)}" stroke="{EVAL}" stroke-width="2"/></g>')
    parts += [f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3.5" fill="{EVAL}"/>' for x, y in evals]
    if trained := [point for point in evals if point[0] > 0]:
        x, y = min(trained, key=lambda point: point[1])
        ring = f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="7" fill="none" stroke="{EVAL}" stroke-width="1.5">'
        parts.append(f"{ring}<title>best: {y:.4g} at step {x:,.0f}</title></circle>")
    parts += _legend(smooth, evals)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">\n'
        f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
        f'<text x="{LEFT}" y="22" font-size="15">{escape(shown(title, MOST_TITLE))}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over a centred window of a twenty-fifth of the run, which do not lag behind falling losses."""
    half = len(points) // 50
    sums = [0.0, *accumulate(y for _, y in points)]
    ends = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, ends, strict=True)]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """About DRAWN of the points, the last one included."""
    stride = -(-len(points) // DRAWN) or 1
    return [*points[::stride], *points[-1:]]


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Numbers in [low, high], at distances of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _axes(first: float, last: float, low: float, high: float, to_x: Scale, to_y: Scale, what: str) -> list[str]:
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
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">optimizer step</text>')
    parts.append(f'<text transform="rotate(-90)" x="{-(TOP + base) / 2}" y="16" text-anchor="middle">{what}</text>')
    return parts


def _legend(train: Sequence[Point], evals: Sequence[Point]) -> list[str]:
    parts, x = [], LEFT
    for name, points, colour in (("train (smoothed)", train, TRAIN), ("eval", evals, EVAL)):
        if points:
            text = f"{name}: {points[0][1]:.4g} to {points[-1][1]:.4g}"
            best = min(((y, x) for x, y in points if x > 0), default=None)
            text += ", best {:.4g} at step {:,.0f}".format(*best) if name == "eval" and best else ""
            parts.append(f'<path d="M{x} {LEGEND - 4}h22" stroke="{colour}" stroke-width="3"/>')
            parts.append(f'<text x="{x + 28}" y="{LEGEND}">{text}</text>')
            x += 28 + 7 * len(text) + 24
    return parts

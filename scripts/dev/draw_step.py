"""A training step, queue by queue, as a picture: python scripts/dev/draw_step.py > docs/one-step.svg

The times are those of a simulation.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.planner.predict import Batch, Prediction, predict
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import spread
from trireme.engine.planner.sizes import MODELS
from trireme.engine.queues.names import TITLES
from trireme.engine.queues.task import Kind
from trireme.engine.queues.trace import Span

# Of an RTX 4090 and fast drives.
MODEL = replace(MODELS["llama-7b"], n_layers=12)
RATES = Rates(1.65e14, 8.7e11, h2d=2.5e10, d2h=2.5e10, adam=2.5e9, dram=7e10, ssd_read=2.4e10, ssd_write=8e9)
BATCH = Batch(8192, 1024, 3)
ON_SSD, IN_RAM = 5, 4  # blocks with state on the SSD, with saved tensors in RAM

ROWS = ("compute", "h2d", "d2h", "cpu", "ssd_read", "state_read", "ssd_write", "state_write")
KINDS: dict[str, tuple[str, tuple[Kind, ...]]] = {  # label: colour, kinds of visible tasks
    "forward": ("#4f8fcf", ("forward",)), "loss": ("#12365f", ("loss",)), "backward": ("#1f5fa8", ("backward",)),
    "weights": ("#79b98a", ("weights",)), "activations": ("#e3a33b", ("activations",)),
    "gradients": ("#c4563f", ("gradient",)), "update": ("#8a63b0", ("adamw", "adamw weights", "adamw moments")),
    "optimizer state": ("#b49bd0", ("state",)),
}  # fmt: skip
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 980, 118, 16, 50, 30, 20


def plan() -> Plan:
    """Weights and states in RAM, some on the SSD, some activations swapped."""
    n, away = MODEL.n_layers, {u + 1 for u in spread(MODEL.n_layers, IN_RAM)}
    on_ssd = {1 + n - 1 - u for u in spread(n, ON_SSD)}
    units = [
        UnitPlan(
            "ssd" if u in on_ssd and u % 2 else "host",
            "ssd" if u in on_ssd else "host",
            saved=(("gate_up", "host"),) if u in away else (),
        )
        for u in range(MODEL.n_units)
    ]
    late = ("host", "ssd")
    return Plan(tuple(units), BATCH.tokens, BATCH.n_micro, late_moments=late, window=3, state_slots=8, record=1 << 25)


def picture(found: Prediction) -> str:
    """The last simulated step as SVG."""
    begin = min(s.start for s in found.spans if s.queue == "compute")
    end = max(s.end for s in found.spans if s.kind == "statistics")
    colour = {kind: colour for colour, kinds in KINDS.values() for kind in kinds}
    to_x = lambda seconds: LEFT + (seconds - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)
    height = TOP + len(ROWS) * ROW + 26
    parts = [_legend()]
    for i, queue in enumerate(ROWS):
        label = TITLES[queue]
        y = TOP + i * ROW
        parts.append(f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{label}</text>')
        parts.append(f'<path d="M{LEFT} {y + BAR}H{WIDTH - RIGHT}" stroke="#e3e3e3"/>')
        for s in _joined([s for s in found.spans if s.queue == queue and s.kind in colour]):
            a, b = to_x(max(s.start, begin)), to_x(min(s.end, end))
            if b - a < 0.4:
                continue
            parts.append(
                f'<rect x="{a:.1f}" y="{y}" width="{b - a - 0.3:.1f}" height="{BAR}" fill="{colour[s.kind]}"/>'
            )
            if s.kind in ("forward", "backward") and s.of.startswith("block") and b - a > 12:
                parts.append(
                    f'<text x="{(a + b) / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="white" font-size="10">'
                    f"{int(s.of[len('block') :])}</text>"
                )
    head = to_x(next(s.start for s in found.spans if s.kind == "loss"))
    for x, anchor, text in ((LEFT, "start", "a step begins"), (head, "middle", "the head"),
                            (WIDTH - RIGHT, "end", "the next begins")):  # fmt: skip
        parts.append(f'<text x="{x:.0f}" y="{height - 8}" text-anchor="{anchor}">{text}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="#333">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _joined(spans: list[Span]) -> list[Span]:
    """Adjacent tasks of one name, a block's micro-batches, as one."""
    joined: list[Span] = []
    for s in sorted(spans, key=lambda s: s.start):
        if joined and (joined[-1].kind, joined[-1].of) == (s.kind, s.of) and s.start - joined[-1].end < 1e-3:
            joined[-1] = replace(joined[-1], end=s.end)
        else:
            joined.append(s)
    return joined


def _legend() -> str:
    parts, x = [], LEFT
    for name, (colour, _) in KINDS.items():
        parts.append(f'<rect x="{x}" y="15" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="26">{name}</text>')
        x += 34 + 7 * len(name)
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(picture(predict(MODEL, plan(), RATES, BATCH)))

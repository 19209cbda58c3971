"""Whether a model learns in fp8 as in bf16: three runs from the same random weights and data.

    python scripts/dev/learning.py --json learning.json --svg learning.svg

The text is the bytes of Python's standard library, a twentieth of its files held out. Weights, batches and learning
rates are the same; gradients are summed over two micro-batches. The third run is in bf16 too, its step one micro-batch:
nothing but the rounding of sums is another, so its distance from the first is that of noise.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from trireme.engine.build import build, inputs
from trireme.engine.exchange import fill
from trireme.engine.lanes.real import RealLanes
from trireme.engine.plan import Limits, Plan, UnitPlan
from trireme.engine.planner.host import choose_device
from trireme.engine.planner.sizes import llama
from trireme.engine.step import Engine, Inputs, evaluate, train_step
from trireme.models.config import ModelConfig
from trireme.models.rows import rope_tables
from trireme.models.sizes import shapes

RUNS = {"bf16": (False, 2), "fp8": (True, 2), "bf16 rounded otherwise": (False, 1)}  # in fp8, micro-batches
HELD_OUT = 4  # micro-batches
HEAD = 64  # width of attention's heads
COLOURS = dict(zip(RUNS, ("#1f5fa8", "#d8572a", "#999999"), strict=True))


@dataclass(frozen=True)
class Rows:
    """A micro-batch (MicroBatch of engine/build.py)."""

    ids: np.ndarray
    labels: np.ndarray
    lengths: tuple[int, ...]


def texts(most: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("*.py")
    )
    order = np.random.default_rng(0).permutation(len(files))
    read = lambda part: np.frombuffer(b"\n".join(files[i].read_bytes() for i in part)[:most], np.uint8)
    held = max(1, len(files) // 20)
    return read(order[held:]), read(order[:held])


def rows_of(text: np.ndarray, tokens: int, seq: int, seed: int) -> Rows:
    starts = np.random.default_rng(seed).integers(0, len(text) - seq, tokens // seq)
    pieces = np.stack([text[s : s + seq + 1] for s in starts])
    labels = pieces[:, 1:].astype(np.int32)
    return Rows(pieces[:, :-1].astype(np.int32).ravel(), labels.ravel(), (seq,) * len(starts))


def engine_of(cfg: ModelConfig, tokens: int, n_micro: int, device: torch.device) -> Engine:
    """All on the GPU, nothing recomputed; weights normal with deviation 0.02, drawn by name."""
    kept = UnitPlan(saved=tuple((name, "gpu") for name in shapes.saved_shapes(cfg, 1)))
    plan = Plan((UnitPlan(), *(kept,) * cfg.n_layers, UnitPlan()), tokens, n_micro)
    e = build(cfg, plan, Limits(1 << 40, 1 << 40), RealLanes(device))
    sizes = {t.name: t.numel for layout in e.geo.stored for t in layout.tensors}

    def values(name: str, a: int, b: int) -> list[np.ndarray]:
        if "norm" in name:
            return [np.ones(b - a, np.float32)]
        drawn = np.random.default_rng(crc32(name.encode())).standard_normal(sizes[name], np.float32)
        return [0.02 * drawn[a:b]]

    fill(e.homes, values)
    return e


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warmed up over a twentieth, then a cosine to a tenth."""
    warm = max(1, steps // 20)
    done = max(0.0, (step - warm) / max(1, steps - warm))
    return peak * min(1.0, step / warm) * (0.55 + 0.45 * math.cos(math.pi * done))


def run(a: argparse.Namespace, cfg: ModelConfig, n_micro: int, device: torch.device) -> dict[str, Any]:
    """Losses by step, and on the held-out text every `--every` steps."""
    text, held_out = texts(a.bytes)
    tokens = a.tokens // n_micro
    e, tables = engine_of(cfg, tokens, n_micro, device), rope_tables(cfg, a.seq, device)

    def ready(text: np.ndarray, seed: int) -> list[Inputs]:
        whole = rows_of(text, a.tokens, a.seq, seed)
        parts = [slice(i, i + tokens) for i in range(0, a.tokens, tokens)]
        lengths = (a.seq,) * (tokens // a.seq)
        return [inputs(cfg, Rows(whole.ids[p], whole.labels[p], lengths), tables, device) for p in parts]

    losses, evals, start = [], [], time.perf_counter()
    for step in range(1, a.steps + 1):
        stats = train_step(e, ready(text, step), step, learning_rate(step, a.steps, a.lr))
        losses.append(stats.loss)
        if step % a.every == 0 or step == a.steps:
            found = torch.cat([part for i in range(HELD_OUT) for part in evaluate(e, ready(held_out, i))])
            evals.append((step, float(found.double().mean())))
            print(f"step {step}: {losses[-1]:.4f}, held out {evals[-1][1]:.4f}", flush=True)
    seconds = time.perf_counter() - start
    e.optimizer.flush()
    e.lanes.drain()
    e.lanes.close()
    e.close()
    return {"losses": losses, "evals": evals, "seconds": seconds}


def picture(found: dict[str, dict[str, Any]]) -> str:
    """SVG: training losses, means of 10 steps, and those on the held-out text as dots."""
    w, h, left, base = 820, 440, 60, 400
    steps = len(found["bf16"]["losses"])
    smooth = lambda ys: [(i + 5, sum(ys[i : i + 10]) / len(ys[i : i + 10])) for i in range(0, len(ys), 10)]
    lines = {d: smooth(found[d]["losses"]) for d in RUNS}
    ys = [y for d in RUNS for _, y in (*lines[d], *found[d]["evals"])]
    low, high = min(ys) * 0.98, max(ys) * 1.02
    x, y = lambda s: left + s / steps * (w - left - 20), lambda v: base - (v - low) / (high - low) * (base - 30)
    parts = [f'<path d="M{left} 30V{base}H{w - 20}" fill="none" stroke="#333"/>']
    for i in range(6):
        v, s = low + i * (high - low) / 5, i * steps / 5
        parts.append(f'<text x="{left - 6}" y="{y(v):.1f}" text-anchor="end">{v:.2f}</text>')
        parts.append(f'<text x="{x(s):.1f}" y="{base + 20}" text-anchor="middle">{s:.0f}</text>')
    for i, d in enumerate(RUNS):
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in lines[d])
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[d]}"/>')
        parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="3" fill="{COLOURS[d]}"/>' for s, v in found[d]["evals"]]
        last = found[d]["evals"][-1][1]
        parts.append(f'<text x="{w - 300}" y="{50 + 18 * i}" fill="{COLOURS[d]}">{d}, held out: {last:.4f}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{w}" height="{h}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--layers", type=int, default=14)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--tokens", type=int, default=32768, help="of a step")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--lr", type=float, default=6e-4)
    p.add_argument("--every", type=int, default=50, help="steps between evaluations")
    p.add_argument("--bytes", type=int, default=1 << 25, help="of text, at most")
    p.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    p.add_argument("--json")
    p.add_argument("--svg")
    a = p.parse_args(argv)
    device = choose_device(a.device)
    ffn = -(-a.width * 8 // 3 // 64) * 64
    cfg = llama(a.width, a.layers, max(1, a.width // HEAD), ffn, vocab=256)
    print(f"{shapes.parameters(cfg) / 1e6:.1f}M parameters, {a.steps} steps of {a.tokens} tokens, {device}", flush=True)
    found = {}
    for name, (fp8, n_micro) in RUNS.items():
        print(name, flush=True)
        found[name] = run(a, replace(cfg, fp8=fp8), n_micro, device)
    print(f"held out\n{'step':>6} {'bf16':>9} {'fp8':>9} {'of bf16':>9} {'noise':>9}")
    for (step, old), (_, new), (_, other) in zip(*(r["evals"] for r in found.values()), strict=True):
        print(f"{step:6d} {old:9.4f} {new:9.4f} {new / old - 1:+9.2%} {other / old - 1:+9.2%}")
    print(", ".join(f"{dtype} {r['seconds']:.1f} s" for dtype, r in found.items()))
    if a.json:
        Path(a.json).write_text(json.dumps(vars(a) | found, indent=1))
    if a.svg:
        Path(a.svg).write_text(picture(found))
    return found


if __name__ == "__main__":
    main()

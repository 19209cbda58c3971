"""How long steps wait for weights from a drive, with classes of requests and without: python
scripts/dev/request_classes.py --dir /nvme/tmp

Steps of one engine alternate between the classes of storage/aio.py and equal turns of all requests. Weights and
optimizer state are on the drive, or where --plan has them; updates run with the next forward. A CPU will do, since the
drive limits the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.engine.build import inputs_on
from trireme.engine.check.steps import make_batch, random_engine
from trireme.engine.plan import Limits, Plan
from trireme.engine.planner.host import choose_device
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.sizes import MODELS
from trireme.engine.queues.names import kind_of
from trireme.engine.queues.real import RealQueues
from trireme.engine.queues.trace import Span
from trireme.engine.step import train_step
from trireme.models.rows import rope_tables
from trireme.storage import aio

PASSES = "forward", "loss", "backward"
WAYS = "classes", "equal turns"


def in_turn() -> Callable[[aio.IO], int | None]:
    """aio.IO._next without priority: the class behind the last one that has a piece waiting."""
    last = dict[int, int]()

    def following(io: aio.IO) -> int | None:
        n, before = len(aio.CLASSES), last.get(id(io), 0)
        for rank in ((before + 1 + k) % n for k in range(n)):
            if io._waiting[rank] and io._may_start(rank):
                last[id(io)] = rank
                return rank
        return None

    return following


def waited(spans: Sequence[Span]) -> float:
    """Seconds in which computation had nothing to do before its layer's weights were there."""
    arrived, before, total = dict[str, list[float]](), None, 0.0
    for span in spans:
        if kind_of(span.queue) == "h2d" and span.kind == "weights":
            arrived.setdefault(span.of.removesuffix(" base"), []).append(span.end)
    for span in sorted((s for s in spans if kind_of(s.queue) == "compute"), key=lambda s: s.start):
        come = [end for end in arrived.get(span.of, []) if end <= span.start]
        if before is not None and span.kind in PASSES and come:
            total += max(0.0, max(come) - before)
        before = span.end
    return total


def measure(a: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """(seconds of steps, of waits) by way."""
    cfg, device, usual = MODELS[a.model], choose_device(a.device), aio.IO._next
    limits = Limits(1 << 60, 1 << 60)
    wanted = Wanted(
        ((a.tokens, 1),), placement="ssd", record=a.record, document=a.tokens, on_cuda=device.type == "cuda"
    )
    plan = Plan.load(Path(a.plan)) if a.plan else simple_plan(cfg, limits, wanted)
    ways = dict(zip(WAYS, (usual, in_turn()), strict=True))
    tokens, rows = plan.tokens * plan.n_micro, plan.tokens // a.seq if a.plan else 1
    seq = a.seq if a.plan else a.tokens
    found = {way: {"step_s": list[float](), "waited_s": list[float]()} for way in WAYS}
    with random_engine(cfg, plan, limits, RealQueues(device), Path(a.dir)) as e:
        places = [(rope_tables(cfg, seq, device), device)]
        for step in range(1, 2 + 2 * a.rounds):
            way = WAYS[step % 2]
            aio.IO._next = ways[way]
            micro = [inputs_on(e.cfg, mb, places) for mb in make_batch(cfg, tokens, seq, rows, step)]
            e.queues.drain()
            e.queues.trace()
            e.queues.tracing, began = True, time.perf_counter()
            train_step(e, micro, step, 1e-5)
            seconds = time.perf_counter() - began
            e.queues.drain()
            wait = waited(e.queues.trace())
            print(f"step {step}, {way}: {seconds:.3f} s, {wait:.3f} s of them waiting for weights", flush=True)
            if step > 1:  # the first has no updates
                found[way]["step_s"].append(seconds)
                found[way]["waited_s"].append(wait)
        aio.IO._next = usual
        e.optimizer.flush()
        e.queues.drain()
    return found


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--dir", required=True, help="a folder on the drive; what is written there is removed")
    p.add_argument("--model", choices=MODELS, default="llama-0.15b")
    p.add_argument("--tokens", type=int, default=64, help="of a step, one document; not with --plan")
    p.add_argument("--plan", help="a plan as JSON or YAML, for documents of --seq tokens")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--record", type=int, default=1 << 21, help="parameters of an optimizer record")
    p.add_argument("--rounds", type=int, default=6, help="steps of each way")
    p.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    p.add_argument("--json")
    a = p.parse_args(argv)
    found = measure(a)
    for way, values in found.items():
        step, wait = (statistics.median(values[name]) for name in ("step_s", "waited_s"))
        print(f"{way:12} median of {len(values['step_s'])}: step {step:.3f} s, waiting for weights {wait:.3f} s")
    if a.json:
        Path(a.json).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

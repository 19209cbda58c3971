"""The order of a step's tasks: a checksum of the trace of each of forty plans, so that a change of order is seen.

`PYTHONPATH=.:tests/helpers python tests/engine/test_traces.py` writes them again; the commit that does so says why the
order changed.
"""

import json
import zlib
from pathlib import Path
from random import Random

import pytest
from engines import LIMITS, MODELS, random_plan

from trireme.engine.build import Inputs, build
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.step import train_step

FILE = Path(__file__).with_name("traces.json")
NAMES = ("untied", "tied", "gpt", "lora", "mixture", "packed", "hybrid", "frozen")
PLANS = 5  # of each model


def spans(name: str, seed: int) -> list[tuple]:
    """(queue, kind, of, start, end, bytes) of the tasks of two steps; a task starts when its queue is free and what it
    waits for has ended.
    """
    plan = random_plan(MODELS[name], Random(f"{name} {seed}"))
    queues = SimulatedQueues(lambda task: 0.0, Rates(*[1.0] * 6), plan.gpus)
    e, batch = build(MODELS[name], plan, LIMITS, queues), [Inputs(24, 20, 300)] * plan.n_micro
    for step in (1, 2):
        train_step(e, batch, step, 1e-3)
    free = dict[str, float]()
    for task in queues.tasks:
        task.start = max([free.get(task.queue, 0.0), *(other.end for other in task.after)])
        task.end = free[task.queue] = task.start + 100 + task.nbytes
    return [(task.queue, task.kind, task.label, task.start, task.end, task.nbytes) for task in queues.tasks]


def checksums(name: str) -> list[str]:
    found = (spans(name, seed) for seed in range(PLANS))
    return [f"{len(of)} tasks, {zlib.crc32(repr(of).encode()):08x}" for of in found]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_tasks_have_the_order_that_they_had(name):
    assert checksums(name) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: checksums(name) for name in NAMES}, indent=1) + "\n")

"""What the host takes to start work: seconds of the interpreter for a task, and for the launch of a kernel."""

from __future__ import annotations

import time
from functools import partial

import torch

from trireme.engine.memory import views
from trireme.engine.planner.predict import WITHIN
from trireme.engine.planner.probe.compute import TURNS, timed
from trireme.engine.queues.real import RealQueues
from trireme.engine.queues.task import Task
from trireme.kernels import ops
from trireme.models import model
from trireme.models.config import Rope, uniform
from trireme.models.rows import make_rows, rope_tables
from trireme.models.sizes import measure, shapes
from trireme.storage.layout import pack

BLOCK = uniform("llama", 32000, 128, 1, 2, 2, 64, 256, 1 << 17, 1e-5, False, rope=Rope(1e4))  # a small one
STARTS, BLOCKS = 200, 10  # of a kernel or task in a turn; of a small block
BOOKS = 6  # times that of a task's hand-over: all of the engine's bookkeeping, and events (5 without)


def start_seconds(device: torch.device) -> float:
    """Seconds that the host needs to launch one kernel."""
    x = torch.ones(8, 1, 128, dtype=torch.bfloat16, device=device)
    w = torch.ones(128, dtype=torch.bfloat16, device=device)
    calls = lambda: [ops.norm_fwd(x, w, 1e-5) for _ in range(STARTS)]
    return min(timed(calls, device) for _ in range(TURNS)) / STARTS


def block_seconds(device: torch.device) -> float:
    """Seconds of forward and backward of a block so small that its GPU waits for the host's launches."""
    cfg = BLOCK
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layout = pack(shapes.weight_groups(cfg, 1), "BF16" if dtype == torch.bfloat16 else "F32")
    buffers = (views(layout, torch.zeros(layout.span, dtype=torch.uint8, device=device)) for _ in range(2))
    w, g = model.weights(cfg, 1, next(buffers)), model.gradients(cfg, 1, next(buffers))
    rows = make_rows([64], rope_tables(cfg, 64, device), device)
    x, dy, out, dx = torch.ones(4, 64, cfg.width, dtype=dtype, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            model.forward(cfg, 1, w, x, rows, {}, out)
            model.backward(cfg, 1, w, g, x, {}, dy, rows, dx)

    compute(1)
    return min(timed(partial(compute, BLOCKS), device) for _ in range(TURNS)) / BLOCKS


def launch_seconds(block: float, task: float) -> float:
    """`Rates.launch_overhead`, from the seconds of `block_seconds` and the interpreter's for a task."""
    within = task * (WITHIN["forward"] + WITHIN["backward"])
    return (block - within) / sum(work.launches for work in measure.work(BLOCK, 1, 64, 64))


def task_seconds() -> float:
    """Seconds that the interpreter needs for a task without work; a quarter of the tasks are on another queue."""
    queues, took = RealQueues(), []
    try:
        for _ in range(TURNS):
            start, after = time.process_time(), tuple[Task, ...]()
            for i in range(STARTS):
                task = queues.run("compute", "other", "probe", lambda: None, after)
                after = (task if i % 3 else queues.run("update", "other", "probe", lambda: None, (task,)),)
            queues.drain()
            took.append((time.process_time() - start) / (STARTS + len(range(0, STARTS, 3))))
    finally:
        queues.close()
    return min(took)

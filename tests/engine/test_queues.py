"""Queues: order, errors, the trace, and the same step on simulated queues."""

import gc
import json
import queue
import sys
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from engines import LIMITS, LLAMA, batches, gpu_plan, lent, make, relayed, train

from trireme.engine.build import Inputs, build, inputs_on
from trireme.engine.plan import UnitPlan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.queues import real
from trireme.engine.queues.names import PEERS, QUEUES, STREAMED, TITLES, kind_of, queues_of
from trireme.engine.queues.real import InlineQueues, RealQueues
from trireme.engine.queues.trace import busy, perfetto
from trireme.engine.step import train_step
from trireme.models.rows import rope_tables
from trireme.models.sizes import shapes

ALONE = Rates(1.0, 1.0, 1.0, 1.0, 1.0, 1e30, ssd_read=1.0, ssd_write=1.0, mixed=1.0, duplex=1.0, reading=1.0)
ALL_SSD = UnitPlan("ssd", "ssd", x="ssd", saved=tuple((n, "ssd") for n in shapes.saved_shapes(LLAMA, 1)))


@pytest.fixture
def queues():
    queues = RealQueues()
    yield queues
    queues.close()


def test_a_task_runs_after_what_it_waits_for(queues):
    gate, seen = threading.Event(), []
    first = queues.run("ssd_read", "other", "first", lambda: gate.wait() and seen.append(1))
    second = queues.run("cpu", "other", "second", lambda: seen.append(2), after=(first,))
    assert seen == []
    gate.set()
    second.wait()
    assert seen == [1, 2]


def test_a_queue_is_first_in_first_out(queues):
    seen = []
    for i in range(100):
        queues.run("cpu", "other", str(i), lambda i=i: seen.append(i))
    queues.drain()
    assert seen == list(range(100))


def test_threads_multiply_as_the_caller_does():
    """MKL divides some sums by its number of threads, which torch sets in a new thread only when it is asked."""
    a, b = torch.randn(4, 130), torch.randn(650, 130)
    queues = RealQueues(gpus=2)
    found = queues.run("compute1", "other", "product", lambda: torch.mm(a, b.T)).wait()
    queues.close()
    assert torch.equal(found, torch.mm(a, b.T))


def test_an_error_reaches_whoever_waits_and_stops_the_queues(queues):
    gate = threading.Event()

    def fail():
        gate.wait()
        raise OSError(28, "No space left on device", "shard")

    bad = queues.run("ssd_write", "other", "bad", fail)
    after = queues.run("cpu", "other", "after", lambda: pytest.fail("ran after an error"), after=(bad,))
    gate.set()
    for task in (bad, after):
        with pytest.raises(OSError, match="No space left"):
            task.wait()
    with pytest.raises(OSError, match="No space left"):
        queues.drain()
    queues.tracing = True
    with pytest.raises(OSError, match="No space left"):
        queues.run("cpu", "other", "later", lambda: None, nbytes=7)
    assert (queues.moved["cpu"], queues.tasks) == (0, [])  # what was not handed over is not counted


def test_a_queue_whose_stream_is_refused_fails_its_tasks(queues, monkeypatch):
    """CUDA may fail as a queue's thread starts: who waits for a task of that queue is told."""

    def refuse(device):
        raise RuntimeError("no such device")

    monkeypatch.setattr("torch.cuda.set_device", refuse)
    queues.streams["late"], queues.queues["late"] = object(), queue.SimpleQueue()
    task = queues.run("late", "other", "copy", lambda: None)
    queues.queues["late"].put(None)
    queues._serve("late")
    with pytest.raises(RuntimeError, match="no such device"):
        task.wait()


def test_the_interpreter_is_as_before_once_all_queues_are_closed(monkeypatch):
    monkeypatch.setattr(real, "USUAL", [])
    said, collected, before, thresholds = [], [], sys.getswitchinterval(), gc.get_threshold()
    monkeypatch.setattr(sys, "setswitchinterval", said.append)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(real.gc, name, partial(collected.append, name))
    first, second = RealQueues(), RealQueues(gpus=2)
    first.close()
    first.close()
    assert said == [real.SWITCH, real.SWITCH / 2]
    assert gc.get_threshold() == (*thresholds[:2], real.OLD)
    assert collected == ["freeze", "freeze"]
    second.close()
    assert said[2:] == [before]
    assert gc.get_threshold() == thresholds
    assert collected == ["freeze", "freeze", "unfreeze"]


def test_queues_that_cannot_be_opened_leave_the_interpreter_as_it_was(monkeypatch):
    monkeypatch.setattr(real, "USUAL", [])
    before = sys.getswitchinterval()
    with pytest.raises((RuntimeError, AssertionError)):  # of torch: there is no such GPU
        RealQueues("cuda:99")
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("queue", [queue for queue in queues_of(2) if kind_of(queue) not in STREAMED])
def test_an_error_in_any_queue_ends_the_step_with_that_error(queue):
    class Failing(RealQueues):
        count = 0

        def run(self, where, kind, of, fn, after=(), nbytes=0, flops=0):
            self.count += where == queue
            fn = self.broken if where == queue and self.count == 5 else fn
            return super().run(where, kind, of, fn, after, nbytes, flops)

        def broken(self):
            raise OSError(5, "Input/output error", queue)

    plan = gpu_plan(LLAMA, units=(ALL_SSD,) * 5, record=768)
    if queue not in QUEUES:
        plan = relayed(plan, (0, 1), between="gpu" if kind_of(queue) in PEERS else "host")
    plan = lent(plan, "ssd") if kind_of(queue) in PEERS[1:] else plan
    failing = Failing(extra=("poison",), gpus=plan.gpus)
    e = make(LLAMA, plan, failing)
    tables = rope_tables(LLAMA, 64, "cpu")
    with pytest.raises(OSError, match="Input/output error"):
        for i, step in enumerate(batches(LLAMA, 3, 2, 24), 1):
            train_step(e, [inputs_on(LLAMA, mb, [(tables, "cpu")] * plan.gpus) for mb in step], i, 1e-3)
        e.optimizer.flush()
        failing.drain()
    failing.close()


def simulate(plan, rates):
    """Seconds of the second of two simulated steps, and its spans."""
    queues = SimulatedQueues(lambda task: task.nbytes / rates.get(task.queue, 1e12), ALONE)
    e = build(LLAMA, plan, LIMITS, queues)
    batch = [Inputs(24, 20, 300) for _ in range(plan.n_micro)]
    for step in (1, 2):
        queues.begin()
        train_step(e, batch, step, 0.0)
        seconds = queues.time()
    spans = queues.trace()
    e.optimizer.flush()
    assert e.memory.owned() == len(e.optimizer.on_cpu.records.ahead)
    return seconds, spans


class Noting(InlineQueues):
    """Notes which tasks are over before a task begins: those that it waits for, and those before it in its queue."""

    def __init__(self):
        super().__init__()
        self.before, self.last = {}, {}

    def run(self, queue, kind, of, fn, after=(), nbytes=0, flops=0):
        task = super().run(queue, kind, of, fn, after, nbytes, flops)
        ordered = {*after, *([self.last[queue]] if queue in self.last else ())}
        self.before[task], self.last[queue] = ordered.union(*(self.before[other] for other in ordered)), task
        return task


def test_a_streamed_update_comes_after_the_copy_of_the_last_ones_weights():
    """The head's buffer on the GPU keeps its weights from step to step: the update writes what the copy reads."""
    units = (UnitPlan(), *(UnitPlan("host", "host"),) * 3, UnitPlan("host", "host", "gpu"))
    queues = Noting()
    train(make(LLAMA, gpu_plan(LLAMA, units=units), queues, poison=False), batches(LLAMA, 2, 1, 24))
    updates = [task for task in queues.before if task.queue == "update"]
    copies = [task for task in queues.before if (task.queue, task.kind) == ("update_out", "weights")]
    assert len(updates) == len(copies) == 2
    assert sum(task.queue == "h2d" and task.of == "head" for task in queues.before) == 1
    assert copies[0] in queues.before[updates[1]]


def test_a_second_flush_copies_nothing():
    queues = InlineQueues()
    e = make(LLAMA, gpu_plan(LLAMA, units=(UnitPlan("host", "host", "gpu"),) * 5), queues)
    train(e, batches(LLAMA, 1, 1, 24))
    before = queues.moved.copy()
    e.optimizer.flush()
    assert queues.moved == before


def test_a_profiler_sees_each_task_by_its_name(monkeypatch):
    seen = []
    monkeypatch.setattr(real, "PROFILED", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: seen.append(name) or nullcontext())
    queues = InlineQueues()
    assert queues.run("compute", "forward", "block 3", lambda: 7).wait() == 7
    assert seen == ["forward block 3"]


def test_a_simulated_step_is_as_long_as_its_slowest_queue():
    plan = gpu_plan(LLAMA, units=(ALL_SSD,) * 5, record=768, state_slots=20)
    seconds, spans = simulate(plan, {"state_read": 1e3, "ssd_read": 1e9, "state_write": 1e9, "ssd_write": 1e9})
    assert seconds == pytest.approx(busy(spans)["state_read"], rel=0.3)
    faster, _ = simulate(plan, {"state_read": 2e3, "ssd_read": 1e9, "state_write": 1e9, "ssd_write": 1e9})
    assert faster < 0.6 * seconds


def test_the_trace_opens_as_json(queues):
    queues.tracing = True
    queues.run("cpu", "other", "work", lambda: None, nbytes=1e6)
    queues.drain()
    events = json.loads(perfetto(queues.trace()))["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["work"]
    rows = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert {"GPU computes (compute)", "RAM to GPU (h2d)", "state to RAM (state_read)"} <= set(rows)


def test_every_queue_has_a_title():
    assert {kind_of(queue) for queue in queues_of(gpus=2, hosts=2)} == TITLES.keys()

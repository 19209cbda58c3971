"""Lanes: order, errors, the trace, and the same step on simulated lanes."""

import json
import queue
import sys
import threading

import pytest
from engines import LIMITS, LLAMA, batches, gpu_plan, make, relayed

from trireme.engine.build import build, inputs_on
from trireme.engine.lanes import real
from trireme.engine.lanes.names import LANES, kind_of, lanes_of
from trireme.engine.lanes.real import RealLanes
from trireme.engine.lanes.trace import busy, perfetto
from trireme.engine.plan import UnitPlan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import SimulatedLanes
from trireme.engine.step import Inputs, train_step
from trireme.models.rows import rope_tables
from trireme.models.sizes import shapes

ALONE = Rates(1.0, 1.0, 1.0, 1.0, 1.0, 1e30, ssd_read=1.0, ssd_write=1.0, mixed=1.0, duplex=1.0, reading=1.0)
ALL_SSD = UnitPlan("ssd", "ssd", x="ssd", saved=tuple((n, "ssd") for n in shapes.saved_shapes(LLAMA, 1)))


@pytest.fixture
def lanes():
    lanes = RealLanes()
    yield lanes
    lanes.close()


def test_a_task_runs_after_what_it_waits_for(lanes):
    gate, seen = threading.Event(), []
    first = lanes.run("ssd_read", "other", "first", lambda: gate.wait() and seen.append(1))
    second = lanes.run("cpu", "other", "second", lambda: seen.append(2), after=(first,))
    assert seen == []
    gate.set()
    second.wait()
    assert seen == [1, 2]


def test_a_lane_is_first_in_first_out(lanes):
    seen = []
    for i in range(100):
        lanes.run("cpu", "other", str(i), lambda i=i: seen.append(i))
    lanes.drain()
    assert seen == list(range(100))


def test_an_error_reaches_whoever_waits_and_stops_the_lanes(lanes):
    def fail():
        raise OSError(28, "No space left on device", "shard")

    bad = lanes.run("ssd_write", "other", "bad", fail)
    after = lanes.run("cpu", "other", "after", lambda: pytest.fail("ran after an error"), after=(bad,))
    for task in (bad, after):
        with pytest.raises(OSError, match="No space left"):
            task.wait()
    with pytest.raises(OSError, match="No space left"):
        lanes.drain()
    with pytest.raises(OSError, match="No space left"):
        lanes.run("cpu", "other", "later", lambda: None)


def test_a_lane_whose_stream_is_refused_fails_its_tasks(lanes, monkeypatch):
    """CUDA may fail as a lane's thread starts: who waits for a task of that lane is told."""

    def refuse(device):
        raise RuntimeError("no such device")

    monkeypatch.setattr("torch.cuda.set_device", refuse)
    lanes.streams["late"], lanes.queues["late"] = object(), queue.SimpleQueue()
    task = lanes.run("late", "other", "copy", lambda: None)
    lanes.queues["late"].put(None)
    lanes._serve("late")
    with pytest.raises(RuntimeError, match="no such device"):
        task.wait()


def test_the_interpreter_switches_threads_as_before_once_all_lanes_are_closed(monkeypatch):
    monkeypatch.setattr(real, "USUAL", [])
    said, before = [], sys.getswitchinterval()
    monkeypatch.setattr(sys, "setswitchinterval", said.append)
    first, second = RealLanes(), RealLanes()
    first.close()
    first.close()
    assert said == [real.SWITCH] * 2
    second.close()
    assert said == [real.SWITCH] * 2 + [before]


@pytest.mark.parametrize("lane", [lane for lane in lanes_of(2) if kind_of(lane) != "update"])
def test_an_error_in_any_lane_ends_the_step_with_that_error(lane):
    class Failing(RealLanes):
        count = 0

        def run(self, where, kind, of, fn, after=(), nbytes=0, flops=0):
            self.count += where == lane
            fn = self.broken if where == lane and self.count == 5 else fn
            return super().run(where, kind, of, fn, after, nbytes, flops)

        def broken(self):
            raise OSError(5, "Input/output error", lane)

    plan = gpu_plan(LLAMA, units=(ALL_SSD,) * 5, record=768)
    plan = plan if lane in LANES else relayed(plan, (0, 1))
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
    lanes = SimulatedLanes(lambda task: task.nbytes / rates.get(task.lane, 1e12), ALONE)
    e = build(LLAMA, plan, LIMITS, lanes)
    batch = [Inputs(24, 20, 300) for _ in range(plan.n_micro)]
    for step in (1, 2):
        lanes.begin()
        train_step(e, batch, step, 0.0)
        seconds = lanes.time()
    spans = lanes.trace()
    e.optimizer.flush()
    assert e.memory.owned() == len(e.optimizer.on_cpu.records.ahead)
    return seconds, spans


def test_a_simulated_step_is_as_long_as_its_slowest_lane():
    plan = gpu_plan(LLAMA, units=(ALL_SSD,) * 5, record=768, state_slots=20)
    seconds, spans = simulate(plan, {"state_read": 1e3, "ssd_read": 1e9, "state_write": 1e9, "ssd_write": 1e9})
    assert seconds == pytest.approx(busy(spans)["state_read"], rel=0.3)
    faster, _ = simulate(plan, {"state_read": 2e3, "ssd_read": 1e9, "state_write": 1e9, "ssd_write": 1e9})
    assert faster < 0.6 * seconds


def test_the_trace_opens_as_json(lanes):
    lanes.tracing = True
    lanes.run("cpu", "other", "work", lambda: None, nbytes=1e6)
    lanes.drain()
    events = json.loads(perfetto(lanes.trace()))["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["work"]

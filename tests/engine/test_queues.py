"""Queues: order, errors, the trace; inputs made ahead; the watchdog names what hangs."""

import gc
import json
import os
import sys
import threading

import pytest
import torch
from engines import LLAMA, batches, fork, gpu_plan, lent, make, relayed, train

from trireme.engine.build import make_inputs, prefetch
from trireme.engine.plan import UnitPlan
from trireme.engine.queues.names import PEERS, QUEUES, STREAMED, TITLES, kind_of, queues_of
from trireme.engine.queues.real import RealQueues
from trireme.engine.queues.trace import perfetto
from trireme.engine.queues.watchdog import HALVES, HUNG, leave, watch
from trireme.engine.step import train_step
from trireme.models.rows import rope_tables
from trireme.models.sizes import shapes

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


def test_the_interpreter_is_as_before_once_all_queues_are_closed():
    before = sys.getswitchinterval(), gc.get_threshold()
    first, second = RealQueues(), RealQueues(gpus=2)
    assert sys.getswitchinterval() < before[0]
    first.close()
    first.close()
    assert sys.getswitchinterval() < before[0]
    second.close()
    assert (sys.getswitchinterval(), gc.get_threshold()) == before


def test_queues_of_which_a_thread_cannot_start_leave_none(monkeypatch):
    before, start = threading.active_count(), threading.Thread.start
    full = lambda thread: threading.active_count() > before + 2 and pytest.fail("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", lambda thread: full(thread) or start(thread))
    with pytest.raises(pytest.fail.Exception):
        RealQueues()
    assert threading.active_count() == before


@pytest.mark.grid("compute", "ssd_read", "d2h", "cpu", "hop_in", "peer_in", "compute1")
@pytest.mark.parametrize("queue", [queue for queue in queues_of(2) if kind_of(queue) not in STREAMED])
def test_an_error_in_any_queue_ends_the_step_with_that_error(queue):
    class Failing(RealQueues):
        count = 0

        def run(self, where, kind, name, fn, after=(), nbytes=0, flops=0):
            self.count += where == queue
            fn = self.broken if where == queue and self.count == 5 else fn
            return super().run(where, kind, name, fn, after, nbytes, flops)

        def broken(self):
            raise OSError(5, "Input/output error", queue)

    plan = gpu_plan(LLAMA, units=(ALL_SSD,) * 5, record=768)
    if queue not in QUEUES:
        plan = relayed(plan, (0, 1), between="gpu" if kind_of(queue) in PEERS else "ram")
    plan = lent(plan, "ssd") if kind_of(queue) in PEERS[1:] else plan
    failing = Failing(extra=("poison",), gpus=plan.gpus)
    e = make(LLAMA, plan, failing)
    tables = rope_tables(LLAMA, 64, "cpu")
    with pytest.raises(OSError, match="Input/output error"):
        for i, step in enumerate(batches(LLAMA, 3, 2, 24), 1):
            train_step(e, [make_inputs(LLAMA, mb, [(tables, "cpu")] * plan.gpus) for mb in step], i, 1e-3)
        e.optimizer.flush()
        failing.drain()
    failing.close()


class Noting(RealQueues):
    """Notes which tasks are over before a task begins: those that it waits for, and those before it in its queue."""

    def __init__(self):
        super().__init__(threads=False)
        self.before, self.last = {}, {}

    def run(self, queue, kind, name, fn, after=(), nbytes=0, flops=0):
        task = super().run(queue, kind, name, fn, after, nbytes, flops)
        ordered = {*after, *([self.last[queue]] if queue in self.last else ())}
        self.before[task], self.last[queue] = ordered.union(*(self.before[other] for other in ordered)), task
        return task


def test_a_streamed_update_comes_after_the_copy_of_the_last_ones_weights():
    """The head's buffer on the GPU keeps its weights from step to step: the update writes what the copy reads."""
    units = (UnitPlan(), *(UnitPlan("ram", "ram"),) * 3, UnitPlan("ram", "ram", "gpu"))
    queues = Noting()
    train(make(LLAMA, gpu_plan(LLAMA, units=units), queues, poison=False), batches(LLAMA, 2, 1, 24))
    updates = [task for task in queues.before if task.queue == "update"]
    copies = [task for task in queues.before if (task.queue, task.kind) == ("update_out", "weights")]
    assert len(updates) == len(copies) == 2
    assert sum(task.queue == "h2d" and task.label == "head" for task in queues.before) == 1
    assert copies[0] in queues.before[updates[1]]


def test_a_second_flush_copies_nothing():
    queues = RealQueues(threads=False)
    e = make(LLAMA, gpu_plan(LLAMA, units=(UnitPlan("ram", "ram", "gpu"),) * 5), queues)
    train(e, batches(LLAMA, 1, 1, 24))
    before = queues.moved.copy()
    e.optimizer.flush()
    assert queues.moved == before


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


# ---------------------------------------------------------------- inputs of the next step


def test_the_following_value_is_made_once_by_another_thread():
    made = []

    def make(key):
        made.append((key, threading.current_thread()))
        return 10 // key

    values = prefetch(make, [1, 2, 5, 0, 10])
    assert [next(values), next(values)] == [10, 5]
    assert next(values) == 2
    assert [key for key, _ in made][:3] == [1, 2, 5]
    assert threading.current_thread() not in {thread for _, thread in made}
    with pytest.raises(ZeroDivisionError):
        next(values)


# ---------------------------------------------------------------- the watchdog


class Script:
    """An event as `watch` waits for it; before each time-out one action is done."""

    def __init__(self, *actions):
        self.actions = list(actions)

    def wait(self, seconds):
        if not self.actions:
            return True
        self.actions.pop(0)()
        return False


def test_tasks_that_end_are_progress_and_silence_is_told_once(queues):
    def go_on():
        queues.run("cpu", "other", "work", lambda: None)
        queues.drain()

    nothing, told = lambda: None, []
    watch(Script(nothing, *(go_on, nothing) * 5, go_on), queues, 8.0, told.append)
    assert told == []
    watch(Script(go_on, *(nothing,) * 5), queues, 8.0, told.append)
    assert told == ["no queue has a task"]


def test_progress_outside_the_queues_counts(queues):
    """Bytes told of, or any value that is another each time."""
    told, counts, nothing = [], iter([0, 1, 1, 2, 2, 3, 3, 3, 3, 3]), (lambda: None,)
    watch(Script(*nothing * 6), queues, 8.0, told.append, lambda: next(counts))
    watch(Script(*nothing * 6), queues, 8.0, told.append, object)
    assert told == []
    watch(Script(*nothing * 2), queues, 8.0, told.append, lambda: next(counts))
    assert told == ["no queue has a task"]


class Late(RealQueues):
    """The third task of the queue `late` ends once the watchdog has spoken."""

    def __init__(self, late):
        super().__init__(extra=("poison",))
        self.late, self.count, self.name = late, 0, ""
        self.begun, self.spoken = threading.Event(), threading.Event()

    def run(self, queue, kind, name, fn, after=(), nbytes=0, flops=0):
        self.count += queue == self.late
        if queue == self.late and self.count == 3:
            self.name, go = f"{kind} {name}".rstrip(), lambda: self.begun.set() or self.spoken.wait() and fn()
        return super().run(queue, kind, name, go if (queue, self.count) == (self.late, 3) else fn, after, nbytes, flops)

    def wait(self, seconds):
        """As the watchdog's event: time begins with the late task."""
        return not self.begun.wait(60) or self.spoken.wait(seconds)


@pytest.mark.full
@pytest.mark.parametrize("late", ["cpu", "ssd_read", "state_write", "h2d", "compute"])
def test_the_queue_that_others_wait_for_is_named(late):
    queues, told = Late(late), []

    def tell(how):
        told.append(how)
        queues.spoken.set()

    far = UnitPlan("ssd", "ssd", x="ram")
    e = make(LLAMA, gpu_plan(LLAMA, units=(far,) * 5, record=768), queues)
    watchdog = threading.Thread(target=watch, args=(queues, queues, HALVES * 0.3, tell))
    watchdog.start()
    seen = train(e, batches(LLAMA, 2, 2, 24))
    watchdog.join()
    assert told == [f"queue {late} hangs in {queues.name}"]
    assert len(seen) == 2  # and goes on, where `late` does not end the process
    queues.close()
    e.close()


@pytest.mark.parametrize("terminal", ["reads", "hangs"])
def test_the_process_ends_whatever_hangs(terminal):
    read, write = os.pipe()
    pid = fork()
    if not pid:
        try:
            say = threading.Event().wait if terminal == "hangs" else lambda: os.write(write, b"late")
            leave(say, 0.2)
        finally:
            os._exit(1)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == HUNG == 4
    assert os.read(read, 9) == (b"late" if terminal == "reads" else b"")
    os.close(read)

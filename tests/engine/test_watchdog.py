"""The watchdog: who goes on is left alone, who hangs is named, and the process ends whatever hangs."""

import os
import threading

import pytest
from engines import LLAMA, batches, fork, gpu_plan, make, train

from trireme.engine.plan import UnitPlan
from trireme.engine.queues.real import RealQueues, RealTask
from trireme.engine.queues.watchdog import HALVES, HUNG, LEAST, leave, patience, watch, watched


@pytest.fixture
def queues():
    queues = RealQueues()
    yield queues
    queues.close()


class Script:
    """An event as `watch` waits for it; before each time-out one action is done."""

    def __init__(self, *actions):
        self.actions = list(actions)

    def wait(self, seconds):
        if not self.actions:
            return True
        self.actions.pop(0)()
        return False


def test_patience_grows_with_the_step():
    assert patience(1.0) == LEAST == 600
    assert patience(60.0) == 1200


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


def test_where_all_queues_wait_it_is_the_gpu(queues, monkeypatch):
    told, silence = [], (lambda: None,) * HALVES
    monkeypatch.setattr(queues, "streams", {"h2d": None})  # as on a GPU
    queues.at["cpu"] = RealTask("cpu", "adamw", "block000")  # not begun
    watch(Script(*silence), queues, 8.0, told.append)
    queues.at["ssd_read"] = reading = RealTask("ssd_read", "weights", "block001")
    reading.start = 1.0
    watch(Script(*silence), queues, 8.0, told.append)
    assert told == ["the GPU does not end what was issued to it", "queue ssd_read hangs in weights block001"]


class Late(RealQueues):
    """The third task of the queue `late` ends once the watchdog has spoken."""

    def __init__(self, late):
        super().__init__(extra=("poison",))
        self.late, self.count, self.name = late, 0, ""
        self.begun, self.spoken = threading.Event(), threading.Event()

    def run(self, queue, kind, of, fn, after=(), nbytes=0, flops=0):
        self.count += queue == self.late
        if queue == self.late and self.count == 3:
            self.name, late = f"{kind} {of}".rstrip(), lambda: self.begun.set() or self.spoken.wait() and fn()
        return super().run(queue, kind, of, late if (queue, self.count) == (self.late, 3) else fn, after, nbytes, flops)

    def wait(self, seconds):
        """As the watchdog's event: time begins with the late task."""
        return not self.begun.wait(60) or self.spoken.wait(seconds)


@pytest.mark.parametrize("late", ["cpu", "ssd_read", "state_write", "h2d", "compute"])
def test_the_queue_that_others_wait_for_is_named(late):
    queues, told = Late(late), []

    def tell(how):
        told.append(how)
        queues.spoken.set()

    far = UnitPlan("ssd", "ssd", x="host")
    e = make(LLAMA, gpu_plan(LLAMA, units=(far,) * 5, record=768), queues)
    watchdog = threading.Thread(target=watch, args=(queues, queues, HALVES * 0.3, tell))
    watchdog.start()
    seen = train(e, batches(LLAMA, 2, 2, 24))
    watchdog.join()
    assert told == [f"queue {late} hangs in {queues.name}"]
    assert len(seen) == 2  # and goes on, where `late` does not end the process
    queues.close()
    e.close()


def test_only_what_is_within_is_watched(queues):
    told, spoken = [], threading.Event()
    with watched(queues, 0.01, lambda how: told.append(how) or spoken.set()):
        assert spoken.wait(60)
    with watched(queues, 60.0, told.append):
        (watchdog,) = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    watchdog.join(60)
    assert not watchdog.is_alive()
    assert len(told) == 1


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

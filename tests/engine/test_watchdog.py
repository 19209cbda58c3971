"""The watchdog: who goes on is left alone, who hangs is named, and the process ends whatever hangs."""

import os
import threading

import pytest
from engines import LLAMA, batches, fork, gpu_plan, make, train

from trireme.engine.lanes.real import RealLanes, RealTask
from trireme.engine.lanes.watchdog import HALVES, HUNG, LEAST, leave, patience, watch, watched
from trireme.engine.plan import UnitPlan


@pytest.fixture
def lanes():
    lanes = RealLanes()
    yield lanes
    lanes.close()


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


def test_tasks_that_end_are_progress_and_silence_is_told_once(lanes):
    def go_on():
        lanes.run("cpu", "other", "work", lambda: None)
        lanes.drain()

    nothing, told = lambda: None, []
    watch(Script(nothing, *(go_on, nothing) * 5, go_on), lanes, 8.0, told.append)
    assert told == []
    watch(Script(go_on, *(nothing,) * 5), lanes, 8.0, told.append)
    assert told == ["no lane has a task"]


def test_progress_outside_the_lanes_counts(lanes):
    """Bytes told of, or any value that is another each time."""
    told, counts, nothing = [], iter([0, 1, 1, 2, 2, 3, 3, 3, 3, 3]), (lambda: None,)
    watch(Script(*nothing * 6), lanes, 8.0, told.append, lambda: next(counts))
    watch(Script(*nothing * 6), lanes, 8.0, told.append, object)
    assert told == []
    watch(Script(*nothing * 2), lanes, 8.0, told.append, lambda: next(counts))
    assert told == ["no lane has a task"]


def test_where_all_lanes_wait_it_is_the_gpu(lanes, monkeypatch):
    told, silence = [], (lambda: None,) * HALVES
    monkeypatch.setattr(lanes, "streams", {"h2d": None})  # as on a GPU
    lanes.at["cpu"] = RealTask("cpu", "adamw", "block000")  # not begun
    watch(Script(*silence), lanes, 8.0, told.append)
    lanes.at["ssd_read"] = reading = RealTask("ssd_read", "weights", "block001")
    reading.start = 1.0
    watch(Script(*silence), lanes, 8.0, told.append)
    assert told == ["the GPU does not end what was issued to it", "lane ssd_read hangs in weights block001"]


class Late(RealLanes):
    """The third task of the lane `late` ends once the watchdog has spoken."""

    def __init__(self, late):
        super().__init__(extra=("poison",))
        self.late, self.count, self.name = late, 0, ""
        self.begun, self.spoken = threading.Event(), threading.Event()

    def run(self, lane, kind, of, fn, after=(), nbytes=0, flops=0):
        self.count += lane == self.late
        if lane == self.late and self.count == 3:
            self.name, late = f"{kind} {of}".rstrip(), lambda: self.begun.set() or self.spoken.wait() and fn()
        return super().run(lane, kind, of, late if (lane, self.count) == (self.late, 3) else fn, after, nbytes, flops)

    def wait(self, seconds):
        """As the watchdog's event: time begins with the late task."""
        return not self.begun.wait(60) or self.spoken.wait(seconds)


@pytest.mark.parametrize("late", ["cpu", "ssd_read", "state_write", "h2d", "compute"])
def test_the_lane_that_others_wait_for_is_named(late):
    lanes, told = Late(late), []

    def tell(how):
        told.append(how)
        lanes.spoken.set()

    far = UnitPlan("ssd", "ssd", x="host")
    e = make(LLAMA, gpu_plan(LLAMA, units=(far,) * 5, record=768), lanes)
    watchdog = threading.Thread(target=watch, args=(lanes, lanes, HALVES * 0.3, tell))
    watchdog.start()
    seen = train(e, batches(LLAMA, 2, 2, 24))
    watchdog.join()
    assert told == [f"lane {late} hangs in {lanes.name}"]
    assert len(seen) == 2  # and goes on, where `late` does not end the process
    lanes.close()
    e.close()


def test_only_what_is_within_is_watched(lanes):
    told, spoken = [], threading.Event()
    with watched(lanes, 0.01, lambda how: told.append(how) or spoken.set()):
        assert spoken.wait(60)
    with watched(lanes, 60.0, told.append):
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

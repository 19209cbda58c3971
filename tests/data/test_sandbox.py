"""A process of its own: its results, its limits, and every bad end as one exception."""

import os
import resource
import select
import signal
import subprocess
import sys
import threading

import pytest
from sandboxed import Thing, abort, compute, interrupt_the_parent, pid, raise_it, remember, take, time_left

from trireme.engine.data import sandbox
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.sandbox import Died, Sandbox
from trireme.engine.run.signals import STOPS
from trireme.models.config import InputError


@pytest.fixture(autouse=True, scope="module")
def quick_sandboxes():
    """None: here they are as a user has them."""


@pytest.fixture
def box():
    made = Sandbox(Thing, "thing", memory=1 << 30)
    yield made
    made.close()


def gone(process: int) -> bool:
    """Whether a process has ended, or does so within a minute."""
    try:
        fd = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 60)[0])
    finally:
        os.close(fd)


def test_calls_work_on_one_object_in_another_process(box):
    assert box.call(remember, "a") == ["thing", "a"]
    assert box.call(remember, "b") == ["thing", "a", "b"]
    child = box.call(pid)
    assert child == box.call(pid) != os.getpid()
    box.close()
    assert gone(child)
    assert box.call(remember, "c") == ["thing", "c"], "another one"


def test_the_process_ends_with_its_owner():
    other = Sandbox(Thing, "other")
    child = other.call(pid)
    del other
    assert gone(child)


def test_what_is_raised_there_is_raised_here(box):
    for kind, error in ("input", InputError), ("row", BadRow):
        with pytest.raises(error, match="so it is"):
            box.call(raise_it, kind)
    with pytest.raises(RuntimeError, match="(?s)raise_it.*KeyError: 'so it is'"):  # a bug of ours, with where it is
        box.call(raise_it, "bug")
    assert box.call(remember, "a") == ["thing", "a"], "it is still there"
    wrong = Sandbox(Thing, "wrong")
    for _ in range(2):
        with pytest.raises(InputError, match="wrong"):
            wrong.call(pid)


def test_time_is_limited_within_c_code_too(box):
    with pytest.raises(Died, match="counting takes longer than 0 s of processor time"):
        box.call(compute, 0.2)
    assert box.call(remember, "a") == ["thing", "a"]


def test_what_a_call_had_left_does_not_end_the_next_one(box):
    assert box.call(take, 1) == 1
    assert box.call(time_left) == 0


def test_memory_is_limited(box):
    assert box.call(take, 1 << 29) == 1 << 29
    child = box.call(pid)
    with pytest.raises(MemoryError, match="taking takes more than 1 GiB of memory"):
        box.call(take, 1 << 31)
    assert box.call(pid) == child


def test_limits_of_the_process_are_named(monkeypatch):
    """They may be what is too small."""
    monkeypatch.setattr(sandbox.resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    said = "1 GiB of memory (or what `ulimit -v` and `-d` allow)"
    assert sandbox._how(-signal.SIGABRT, 1, 1 << 30) == f"crashes (SIGABRT); it may take {said}"


def test_memory_is_limited_where_proc_is_hidden(tmp_path, monkeypatch):
    """What the process has at the start is not known there."""
    found = {}
    monkeypatch.setattr(sandbox, "STATM", tmp_path / "statm")
    monkeypatch.setattr(sandbox.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(sandbox.resource, "setrlimit", found.__setitem__)
    monkeypatch.setattr(sandbox.Path, "write_text", lambda *_: 4)
    sandbox._limit_memory(1 << 30)
    assert found[resource.RLIMIT_AS] == (sandbox.STARTED + (1 << 30), resource.RLIM_INFINITY)
    assert found[resource.RLIMIT_CORE] == (0, 0)


def test_an_abort_is_one_exception_and_nothing_is_printed(box, capfd):
    with pytest.raises(Died, match=r"quoting crashes \(SIGABRT\); it may take 1 GiB of memory"):
        box.call(abort)
    assert capfd.readouterr() == ("", "")
    assert box.call(remember, "a") == ["thing", "a"]


def test_a_process_that_was_ended_between_two_calls_is_replaced(box):
    child = box.call(pid)
    os.kill(child, signal.SIGKILL)
    assert gone(child)
    assert box.call(pid) != child


def test_ctrl_c_is_immediate(box):
    child = box.call(pid)
    with pytest.raises(KeyboardInterrupt):
        box.call(interrupt_the_parent)
    assert gone(child)
    assert box.call(remember, "a") == ["thing", "a"]


def test_another_thread_ends_a_call_for_good(box):
    """Until `close` no other process is started: the thread that calls may try again."""
    box.call(pid)
    seen = []

    def work():
        for _ in range(2):
            try:
                box.call(compute, 600)
            except Died as error:
                seen.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    box.kill()
    thread.join()
    assert len(seen) == 2
    assert "not wanted" in seen[1]
    box.close()
    assert box.call(remember, "a") == ["thing", "a"]


def test_arguments_that_are_nested_too_deeply(box):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        box.call(remember, deep)
    assert box.call(remember, "a") == ["thing", "a"]


ORPHAN = """
import sys
from sandboxed import Thing, compute, pid
from trireme.engine.data.sandbox import Sandbox
box = Sandbox(Thing, "thing")
print(box.call(pid), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", STOPS)
def test_what_the_whole_group_is_told_is_the_parents_affair(box, number):
    """A session that ends tells every process of it, in any order."""
    child = box.call(pid)
    os.kill(child, number)
    assert box.call(pid) == child


def test_the_process_ends_when_its_parent_is_killed():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    assert gone(child)


def test_nothing_is_imported_from_the_folder_that_one_is_in(box, tmp_path, monkeypatch):
    """A stranger's folder may hold a pickle.py."""
    for name in ("pickle", "signal", "trireme", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert box.call(remember, "a") == ["thing", "a"]

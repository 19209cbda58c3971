"""Whatever fails wherever in a run, it ends with that error at once, and resumed it ends with the same bits.

A run in which everything happens: swapped activations, gradients and states on the SSD, updates here and there, late
moments, evaluations with samples, the best checkpoint, snapshots, the export.
"""

import errno
import io
import json
import os
import random
import re
import signal
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import fork, write_plan
from runs import child as resumed
from runs import ended, losses, options

from trireme.engine.plan import UnitPlan
from trireme.engine.queues import watchdog
from trireme.engine.queues.real import RealQueues
from trireme.engine.run import loop, state
from trireme.engine.run.job import make
from trireme.engine.run.options import Options, every
from trireme.storage.aio import IO
from trireme.storage.store import Store

pytestmark = pytest.mark.full

CALLS = ("fsync", "rename", "ftruncate", "posix_fallocate")
OTHERS = ("open", "unlink", "pwrite", "preadv")
PLACES = ("compute", "d2h", "ssd_read", "update", "cpu", "read", "write", *CALLS)  # each queue: test_queues.py
UNWATCHED = "unwatched"
WATCH = 120  # seconds after which a run counts as one that hangs
FAILED, OTHER = 3, 4


class Injected(OSError):
    pass


class Faults:
    """Counts what happens in a place, and lets the one of number `fatal` there fail."""

    def __init__(self, out: Path, place: str = "", fatal: int = 0):
        self.out, self.place, self.fatal, self.lock, self.count = out, place, fatal, threading.Lock(), Counter()
        self.begun, self.watches = False, 0  # Training.watched that are entered

    def due(self, place: str) -> bool:
        with self.lock:
            self.count[place] += 1
            return (place, self.count[place]) == (self.place, self.fatal)

    def install(self) -> None:
        run, finish = RealQueues.run, IO._finish

        def run_or_fail(queues, queue, kind, of, fn, after=(), nbytes=0, flops=0):
            return run(queues, queue, kind, of, self.fail if self.due(queue) else fn, after, nbytes, flops)

        def finish_or_fail(io, piece, result):
            finish(io, piece, -errno.EIO if self.due("write" if piece.write else "read") else result)

        RealQueues.run, IO._finish = run_or_fail, finish_or_fail
        for name in (*CALLS, *OTHERS):
            setattr(os, name, self.wrapped(name, getattr(os, name)))
        self.look_for_waits()

    def look_for_waits(self) -> None:
        """Counts what the run's own thread waits for that no watchdog looks at, from its loading on."""
        watched, load, result = state.Training.watched, loop.Loop.load, Future.result

        @contextmanager
        def counted(run, what):
            with watched(run, what):
                self.watches += 1
                try:
                    yield
                finally:
                    self.watches -= 1

        def loaded(run, *args):
            self.begun = True
            load(run, *args)

        def waited(future, timeout=None):
            self.waits("result")
            return result(future, timeout)

        state.Training.watched, loop.Loop.load, Future.result = counted, loaded, waited

    def waits(self, what: str) -> None:
        if self.begun and not self.watches and threading.current_thread() is threading.main_thread():
            callers = [frame.name for frame in traceback.extract_stack()]
            if "claim_space" not in callers:  # may write zeros without a sign of progress
                self.count[f"{UNWATCHED} {what} by {callers[-4]}"] += 1

    def wrapped(self, name: str, call):
        def called(what, *args, **kwargs):
            path = Path(os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else what)
            if path.is_relative_to(self.out):
                self.waits(name)
                if name in CALLS and self.due(name):
                    self.fail()
            return call(what, *args, **kwargs)

        return called

    def fail(self) -> None:
        raise Injected(errno.EIO, "Input/output error", self.place)


def child(given: Options, faults: Faults) -> int:
    """Runs in a process of its own; its exit code. What it counted is left in a file beside its folder."""
    pid = fork()
    if pid:
        return ended(pid)
    code = OTHER
    try:
        signal.alarm(WATCH)
        faults.install()
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            loop.train(given)
        code = 0
    except BaseException as error:
        if getattr(error, "errno", None) == errno.EIO and not any("queue" in t.name for t in threading.enumerate()):
            code = FAILED
        else:
            os.write(2, f"child: {error!r} {threading.enumerate()}\n".encode())
    finally:
        Path(f"{faults.out}.json").write_text(json.dumps(faults.count))
        os._exit(code)


@pytest.fixture(scope="module")
def whole(narrow):
    """(options by folder, the undisturbed run's folder, how often what happened in it)"""
    first = make(options(narrow, narrow / "planned", "gpu", micro_batch=2)).plan
    far = UnitPlan("ssd", "ssd", x="ssd", saved=(("resid", "ssd"), ("lse", "ram")))
    inner = [far, UnitPlan("ram", "ram", update="gpu", x="ram"), UnitPlan("ram", "ssd", saved=(("resid", "gpu"),))]
    n = len(first.units)
    units = (UnitPlan("ram", "ram"), *(inner[u % 3] for u in range(n - 2)), UnitPlan("ssd", "ssd"))
    more = dict(gradients="ssd", late_moments=("ram", "ssd"), window=2, state_slots=3, record=1 << 13)
    plan = replace(first, units=units, **more)
    write_plan(plan, narrow / "everything.json")

    def given(out: Path, **how) -> Options:
        run = options(narrow, out, "gpu", plan=str(narrow / "everything.json"), val="0.1", export="best", **how)
        return replace(run, max_steps=4, eval_every=every("2"), save_every=every("2"), micro_batch=2, ram=1 << 30)

    out = narrow / "undisturbed"
    assert child(given(out), Faults(out)) == 0
    return given, out, json.loads(Path(f"{out}.json").read_text())


def test_what_a_run_waits_for_is_watched(whole):
    *_, count = whole
    assert not [what for what in count if what.startswith(UNWATCHED)]


@pytest.mark.parametrize("place", PLACES)
def test_whatever_fails_the_run_ends_with_it_and_goes_on(narrow, whole, place):
    given, before, count = whole
    out, fatal = narrow / f"fails-{place}", random.Random(place).randint(1, count[place])
    assert child(given(out), Faults(out, place, fatal)) == FAILED, fatal
    if not (out / "model.safetensors").exists() or (out / ".run").exists():
        resume = str(out) if (out / "config.yaml").exists() else None
        assert child(given(out, resume=resume), Faults(out)) == 0, fatal
    assert losses(out) == losses(before)
    assert (out / "model.safetensors").read_bytes() == (before / "model.safetensors").read_bytes()


HANGS = {"cpu": lambda: threading.Event().wait(), "compute": lambda: time.sleep(1000)}  # Python's wait, or the driver's


def hangs(opts, queue: str, errors: str) -> None:
    """In a forked child: the run, in which a queue hangs in its first task of step 6."""
    real, run, at = loop.train_step, RealQueues.run, [0]

    def train_step(e, micro, number, rate, *more, **named):
        at[0] = number
        return real(e, micro, number, rate, *more, **named)

    def run_or_hang(queues, where, kind, of, fn, after=(), nbytes=0, flops=0):
        return run(queues, where, kind, of, HANGS[queue] if (where, at[0]) == (queue, 6) else fn, after, nbytes, flops)

    loop.train_step, RealQueues.run = train_step, run_or_hang
    state.patience = lambda step_s: 1.0 if at[0] == 5 else 600.0
    with open(errors, "w") as said, open(os.devnull, "w") as nowhere, redirect_stderr(said), redirect_stdout(nowhere):
        loop.train(opts)


def snapshot_hangs() -> None:
    """The first write of a snapshot never ends; time begins for the watchdog once it has begun."""
    stuck = threading.Event()

    class Left(threading.Event):
        def wait(self, seconds):
            return not stuck.wait(WATCH) or super().wait(seconds)

    watchdog.threading = SimpleNamespace(Event=Left, Thread=threading.Thread)
    state.patience = lambda step_s: 0.2
    Store.write = lambda store, name, buffer, later=False: stuck.set() or Future()


def test_a_snapshot_that_hangs_ends_the_run(narrow):
    out, errors = narrow / "hangs-snapshot", narrow / "hangs-snapshot.txt"
    pid = fork()
    if not pid:
        try:
            snapshot_hangs()
            with open(errors, "w") as said, redirect_stderr(said), redirect_stdout(io.StringIO()):
                loop.train(options(narrow, out, "ram"))
        finally:
            os._exit(1)
    assert ended(pid) == 4
    (line,) = errors.read_text().splitlines()
    assert re.search("state_write|ssd_write", line), "at once"
    assert line.endswith(f"--resume {out}")


@pytest.mark.parametrize("queue", HANGS)
def test_a_queue_that_hangs_ends_the_run_which_goes_on(checkpoint, queue):
    out, errors = checkpoint / f"hangs-{queue}", checkpoint / f"hangs-{queue}.txt"
    pid = fork()
    if not pid:
        try:
            hangs(options(checkpoint, out, "ram"), queue, str(errors))
        finally:
            os._exit(1)
    assert ended(pid) == 4
    (line,) = errors.read_text().splitlines()
    for part in ("step 6", f"queue {queue}", "step 4", f"--resume {out}"):
        assert part in line
    assert ended(resumed(options(checkpoint, out, "ram", resume=str(out)))) == 0
    assert (out / "model.safetensors").exists()
    assert not (out / ".run").exists()

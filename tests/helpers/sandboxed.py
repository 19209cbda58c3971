"""Functions for the tests of sandboxes, which the child imports by name, and sandboxes that start in less time."""

import gc
import os
import signal
import warnings
import weakref
from multiprocessing.connection import Pipe
from typing import NoReturn

from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.sandbox import ALONE, Died, Sandbox, _end, serve
from trireme.models.config import InputError


class Thing:
    """What is made in the child."""

    def __init__(self, begin, name):
        if name == "wrong":
            raise InputError("wrong")
        self.begin, self.calls = begin, [name]


def remember(thing, word):
    thing.calls.append(word)
    return thing.calls


def pid(thing):
    return os.getpid()


def raise_it(thing, kind):
    raise {"input": InputError, "row": BadRow, "bug": KeyError}[kind]("so it is")


def compute(thing, seconds):
    """A single call of C code, which holds Python's lock for hours."""
    thing.begin("counting", seconds)
    return 10 ** (10**10)


def time_left(thing):
    return signal.getitimer(signal.ITIMER_PROF)[0]


def take(thing, nbytes):
    thing.begin("taking", 60)
    return len(bytearray(nbytes))


def abort(thing):
    thing.begin("quoting", 60)
    os.write(2, b"\x1b[2J a stranger's words")
    os.abort()


def interrupt_the_parent(thing):
    """As Ctrl-C does: it reaches both."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getppid(), signal.SIGINT)
    compute(thing, 600)


# ---------------------------------------------------------------- forked sandboxes


class Forked:
    """A forked process as subprocess.Popen has it; nothing is done to it by another process than its parent."""

    def __init__(self, pid: int):
        self.pid, self.parent, self.code = pid, os.getpid(), None

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        if self.code is None and self.parent == os.getpid():
            pid, status = os.waitpid(self.pid, flags)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int | None:
        return self.poll(0)

    def kill(self) -> None:
        if self.code is None and self.parent == os.getpid():
            os.kill(self.pid, signal.SIGKILL)


def forked(box: Sandbox) -> None:
    """Sandbox._start without a new interpreter: a test's process has imported all that the child needs."""
    here, there = Pipe()
    with there, box._lock:
        if box._killed:
            raise Died("the process", "is not wanted any more")
        with warnings.catch_warnings():  # Python 3.12 and later warn of threads
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _serve(there.fileno(), box._memory)
        box._process = Forked(pid)
    box._connection, box._end = here, weakref.finalize(box, _end, box._process, here)


def _serve(fd: int, memory: int) -> NoReturn:
    """The child, with no file of the parent's but `fd`: locks of a run would be kept."""
    try:
        gc.freeze()  # of the parent's objects none is freed: memory of some is not inherited
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        os.dup2(fd, 3, inheritable=False)
        os.closerange(4, 1 << 16)
        os.environ.update(ALONE)
        serve(3, memory)
    finally:
        os._exit(0)

"""A process of its own for strangers' programs (tokenizers, chat templates), with limits of memory and processor time.

The kernel enforces them: an allocation beyond them fails, and a timer ends the process even within C code that holds
Python's lock. They guard the machine, not secrets: the process has its user's rights. Its end is one exception here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from trireme.engine.data.rows import BadRow
from trireme.models.config import InputError

MEMORY = 4 << 30  # bytes of address space that the process may take beside what it begins with

ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # one thread

Begin = Callable[[str, float], None]  # (what is begun, seconds of processor time that it may take)


class Died(Exception):
    """The process has ended in the middle of a call. `doing`: what it had begun last; the message says how it ended."""

    def __init__(self, doing: str, how: str):
        super().__init__(f"{doing} {how}")
        self.doing, self.how = doing, how


class Sandbox:
    """Calls functions in a child process, one at a time, on an object that is made there.

    The child is started by the first call, and by the first one after it has ended. It ends with `close`, with this
    object, and with this process. One thread at a time.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, memory: int = MEMORY):
        """`make(begin, *args)`, called in the child, gives the object; what it and the calls do they `begin` there."""
        self._make, self._memory = (make, *args), memory
        self._process: subprocess.Popen[bytes] | None = None
        self._killed, self._lock = False, threading.Lock()

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work(object, *args)`, a function that pickle finds by name.

        Raises InputError, BadRow, MemoryError as `work` does, RuntimeError for everything else that it raises; Died.
        RecursionError where `args` are nested too deeply to be handed over.
        """
        request = pickle.dumps((work, *args))
        if self._process is not None and self._process.poll() is not None:  # ended between two calls
            self._stop()
        if self._process is None:
            self._start()
            try:
                self._exchange(pickle.dumps(self._make))
            except BaseException:
                self._stop()
                raise
        return self._exchange(request)

    def _start(self) -> None:
        here, there = Pipe()
        with there:
            fd, null = there.fileno(), subprocess.DEVNULL
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({fd}, {self._memory})"
            command = [sys.executable, "-c", code]
            with self._lock:
                if self._killed:
                    raise Died("the process", "is not wanted any more")
                self._process = subprocess.Popen(
                    command, pass_fds=[fd], env=os.environ | ALONE, stdin=null, stdout=null, stderr=null
                )
        self._connection, self._end = here, weakref.finalize(self, _end, self._process, here)

    def _exchange(self, request: bytes) -> Any:
        doing, seconds = "the process", 0.0
        try:
            self._connection.send_bytes(request)
            kind, value = self._connection.recv()
            while kind == "begun":
                doing, seconds = value
                kind, value = self._connection.recv()
        except (EOFError, OSError):
            assert self._process
            code = self._process.wait()
            self._stop()
            raise Died(doing, _how(code, seconds, self._memory)) from None
        except BaseException:  # Ctrl-C: the child is in the middle of something
            self._stop()
            raise
        if kind == "raised":
            raise value
        return value

    def kill(self) -> None:
        """Ends the child wherever it is, and every other one until `close`: a call in another thread raises Died."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Ends the child; the next call starts another."""
        self._stop()
        self._killed = False

    def _stop(self) -> None:
        if self._process is not None:
            self._end()
            self._process = None


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


def _how(code: int, seconds: float, memory: int) -> str:
    """How a process ended, in words, by its exit code."""
    if code == -signal.SIGPROF:
        return f"takes longer than {seconds:,.0f} s of processor time"
    allowed = f"it may take {memory / (1 << 30):.3g} GiB of memory"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"was killed ({name}); {allowed}" if code == -signal.SIGKILL else f"breaks down ({name}); {allowed}"


# ---------------------------------------------------------------- in the child


def serve(fd: int, memory: int) -> None:
    """Makes the object and answers calls, until the other end of the connection is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent hears them too, and ends this process
        signal.signal(number, signal.SIG_IGN)
    _limit_memory(memory)
    connection, doing = Connection(fd), ""

    def begin(what: str, seconds: float) -> None:
        nonlocal doing
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles its signal, so that it ends the process
        if what != doing:
            connection.send(("begun", (what, seconds)))
            doing = what

    held: list[Any] = [begin]  # what a call is given first: at the beginning this, then the object
    with contextlib.suppress(EOFError, OSError):
        while True:
            doing = ""
            kind, value = _answer(connection.recv_bytes(), held[-1])
            signal.setitimer(signal.ITIMER_PROF, 0)
            if kind == "done" and len(held) == 1:
                held.append(value)
                value = None
            if isinstance(value, MemoryError):
                value = MemoryError(f"{doing or 'it'} takes more than {memory / (1 << 30):.3g} GiB of memory")
            connection.send((kind, value))
            del value


def _answer(request: bytes, first: Any) -> tuple[str, Any]:
    try:
        work, *args = pickle.loads(request)
        del request  # it may be large
        return "done", work(first, *args)
    except (InputError, BadRow, MemoryError) as error:
        return "raised", error
    except Exception:
        return "raised", RuntimeError(traceback.format_exc())


def _limit_memory(nbytes: int) -> None:
    """Lets this process take `nbytes` more, leave no core file, and be the first to go where memory runs out."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # no Linux
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + nbytes
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
        Path("/proc/self/oom_score_adj").write_text("1000")

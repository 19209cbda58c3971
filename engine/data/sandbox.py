"""A process for programs that are not trusted (tokenizers, chat templates), with limits of memory and processor time.

The kernel enforces them: allocations fail, and a timer ends even C code that holds the GIL. They protect the machine,
not secrets: the process has its user's rights.
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

from trireme.engine.data.files.rows import BadRow
from trireme.models.config import InputError

MEMORY = 4 << 30  # bytes of address space more than at the start
STARTED = 4 << 30  # bytes of address space at the start where /proc, which has them, is hidden
STATM = Path("/proc/self/statm")

ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Begin = Callable[[str, float], None]  # (what, seconds of processor time it may take)


class Died(Exception):
    """The process ended during a call. `doing`: the last call that was started. The message says how it ended."""

    def __init__(self, doing: str, how: str):
        super().__init__(f"{doing} {how}")


class Sandbox:
    """Calls functions in a child process, on an object made there. Used by one thread at a time.

    A call starts the child if none is running. The child ends with `close`, with this object, or with this process.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, memory: int = MEMORY):
        """`make(begin, *args)` makes the object in the child. It calls `begin` before work that takes time."""
        self._make, self._memory = (make, *args), memory
        self._process: subprocess.Popen[bytes] | None = None
        self._killed, self._lock = False, threading.Lock()

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work(object, *args)`, pickled by name.

        Raises InputError, BadRow and MemoryError of `work`, other exceptions as RuntimeError; Died; RecursionError if
        `args` are nested too deeply.
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
        except BaseException:  # Ctrl-C: the child is busy
            self._stop()
            raise
        if kind == "raised":
            raise value
        return value

    def kill(self) -> None:
        """Ends the child until `close`: calls in other threads raise Died."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
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
    if code == -signal.SIGPROF:
        return f"takes longer than {seconds:,.0f} s of processor time"
    allowed = f"it may take {_amount(memory)}"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"was killed ({name}); {allowed}" if code == -signal.SIGKILL else f"crashes ({name}); {allowed}"


def _amount(memory: int) -> str:
    """The memory that a child may take. It has the limits of this process, too."""
    limits = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    less = any(soft != resource.RLIM_INFINITY for soft in limits)
    return f"{memory / (1 << 30):.3g} GiB of memory" + " (or what `ulimit -v` and `-d` allow)" * less


# ---------------------------------------------------------------- in the child


def serve(fd: int, memory: int) -> None:
    """The child's loop: answers calls until the connection closes."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in stops:  # the parent acts on them
        signal.signal(number, signal.SIG_IGN)
    amount = _amount(memory)
    _limit_memory(memory)
    connection, doing = Connection(fd), ""

    def begin(what: str, seconds: float) -> None:
        nonlocal doing
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        if what != doing:
            connection.send(("begun", (what, seconds)))
            doing = what

    held: list[Any] = [begin]  # first argument: `begin`, then the object
    with contextlib.suppress(EOFError, OSError):
        while True:
            doing = ""
            kind, value = _answer(connection.recv_bytes(), held[-1])
            signal.setitimer(signal.ITIMER_PROF, 0)
            if kind == "done" and len(held) == 1:
                held.append(value)
                value = None
            if isinstance(value, MemoryError):
                value = MemoryError(f"{doing or 'it'} takes more than {amount}")
            connection.send((kind, value))
            del value


def _answer(request: bytes, first: Any) -> tuple[str, Any]:
    try:
        work, *args = pickle.loads(request)
        del request  # may be large
        return "done", work(first, *args)
    except (InputError, BadRow, MemoryError) as error:
        return "raised", error
    except Exception:
        return "raised", RuntimeError(traceback.format_exc())


def _limit_memory(nbytes: int) -> None:
    """Allows `nbytes` more memory and no core file, and makes this process the first to be killed if memory runs
    out.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        most = int(STATM.read_text().split()[0]) * resource.getpagesize() + nbytes
    except OSError:
        most = STARTED + nbytes
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")

"""AdamW on the CPU: one pass over memory in C++ (host_adamw.cpp), compiled at first use, called without the GIL.

Arguments are those of moments.py, which is used instead where there is no compiler; results are bitwise identical. An
update runs on the calling thread, or on the threads of a `Workers`.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import POINTER, byref, c_float, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trireme.kernels.optimizer import moments, reference
from trireme.kernels.private import cache_folder, is_private

MESSAGE_LIMIT = 200  # characters shown of a compiler's message
RECORD = 1 << 18  # elements that a thread takes at a time

# ---------------------------------------------------------------- building

SOURCE = Path(__file__).with_name("host_adamw.cpp")
BUILD = "trireme-build-"  # prefix of the compiler's temporary folders
PATIENCE = 120.0  # seconds for a compiler, which takes a few
FUNCTIONS = ("adamw", "list", "team_open", "team_run", "team_close")
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fopenmp-simd", "-pthread", "-shared", "-fPIC")


def _cpu() -> str:
    """What -march=native depends on. Machines that share a home folder may differ in it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    words = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), platform.processor(), *sorted({x for x in lines if x.startswith(words)})])


def _output(command: list[str], env: Mapping[str, str] | None = None) -> bytes:
    """Standard output. A compiler that does not end in time is killed with the processes that it has started.

    Raises as subprocess.run.
    """
    started, pipe = list[subprocess.Popen[bytes]](), subprocess.PIPE
    start = lambda: started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env, start_new_session=True))
    try:
        with ThreadPoolExecutor(1) as pool:  # a signal that comes between its start and its name would lose a process
            pool.submit(int).result()  # from here on the end of the pool waits for its thread
            pool.submit(start).result()
        out, err = started[0].communicate(timeout=PATIENCE)
    except BaseException:
        for process in started:
            with process, contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise
    if started[0].returncode:
        raise subprocess.CalledProcessError(started[0].returncode, command, out, err)
    return out


@contextmanager
def _compiled(compiler: str, parent: Path) -> Iterator[Path]:
    """Path of the compiled library, in a temporary folder in `parent` that is removed at the end of the context.

    The compiler's own temporary files are there, too. The folder is locked while it is in use. A process that is killed
    leaves it unlocked, and the next one that compiles in `parent` removes it. Raises as subprocess.run;
    CalledProcessError also where the compiler has written nothing.
    """
    for left in parent.glob(f"{BUILD}*"):
        with contextlib.suppress(OSError), _locked(left):
            if left.lstat().st_uid == os.geteuid():
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=BUILD, dir=parent, ignore_cleanup_errors=True) as folder:  # mode 0700
        target, lock = Path(folder) / "host_adamw.so", contextlib.ExitStack()
        command, env = [compiler, *FLAGS, str(SOURCE), "-o", str(target)], dict(os.environ, TMPDIR=folder)
        with lock:
            with contextlib.suppress(OSError):  # without locks nobody removes it
                lock.enter_context(_locked(Path(folder)))
            try:
                _output([*command, "-march=native"], env)
            except subprocess.CalledProcessError:
                _output(command, env)
            if not target.exists():
                raise subprocess.CalledProcessError(0, command, stderr=b"no library is written")
            target.chmod(0o700)  # is_private, whatever the umask
            yield target


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder. Raises OSError where another process has locked it, or it is not a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _load(path: Path) -> ctypes.CDLL:
    """Loads a compiled library. Raises OSError where it cannot be loaded or lacks one of FUNCTIONS."""
    lib = ctypes.CDLL(str(path))
    if not all(hasattr(lib, f"trireme_{name}") for name in FUNCTIONS):
        _ctypes.dlclose(lib._handle)  # else found again by name
        raise OSError(f"{path} lacks functions")
    return lib


def _build(compiler: str) -> ctypes.CDLL:
    """The library for this source, compiler and CPU, from the cache folder, or compiled now.

    Raises as `_compiled` and `_load`.
    """
    version = _output([compiler, "--version"])
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version, _cpu().encode())
    name = f"host_adamw-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.so"
    folder = cache_folder()
    try:
        if folder is not None:
            with contextlib.suppress(OSError):  # absent or damaged
                if is_private(folder / name):
                    return _load(folder / name)
            with _compiled(compiler, folder) as target:
                target.replace(folder / name)  # other processes see a whole object or none
            return _load(folder / name)
    except (OSError, subprocess.CalledProcessError):  # cache full, or noexec
        pass
    with _compiled(compiler, Path(tempfile.gettempdir())) as target:
        return _load(target)  # stays mapped


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be built."""
    return _built()[0]


def why_slow() -> str:
    """Why AdamW runs in torch, several times slower, or ""."""
    return _built()[1]


def _reason(compiler: str, error: Exception) -> str:
    """Why there is no library, in one line, and what to do."""
    advice = "Repair it, or set CXX to another C++ compiler"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{compiler} has not ended in {error.timeout:.0f} s. {advice}"
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").split("\n")
        reason = next((line.strip() for line in lines if "error" in line), lines[0].strip())
        return f"{compiler} fails: {reason[:MESSAGE_LIMIT] or f'exit code {error.returncode}'}. {advice}"
    return f"{error}. Set TMPDIR to a folder with space whose files can be executed"


@cache
def _built() -> tuple[ctypes.CDLL | None, str]:
    """(library or None, why there is none or "")."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        return None, "no C++ compiler (c++, g++, clang++) on the PATH. Install g++"
    try:
        lib = _build(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return None, _reason(compiler, error)
    for work in (lib.trireme_adamw, lib.trireme_list):
        work.argtypes, work.restype = [c_void_p, POINTER(c_int64)], None
    lib.trireme_team_open.argtypes, lib.trireme_team_open.restype = [c_int64], c_void_p
    lib.trireme_team_run.argtypes, lib.trireme_team_run.restype = [c_void_p, c_void_p, c_void_p], None
    lib.trireme_team_close.argtypes, lib.trireme_team_close.restype = [c_void_p], None
    return lib, ""


# ---------------------------------------------------------------- calling


class _Job(ctypes.Structure):
    """Job of host_adamw.cpp."""

    _fields_ = (
        [(name, c_void_p) for name in ("w", "lo", "m", "v", "m_floor", "v_floor", "grad")]
        + [(name, c_int64) for name in ("moment_bytes", "grad_is_bf16", "n", "n_decay", "record", "part")]
        + [(name, c_float) for name in ("clip", "decay", "beta1", "rest1", "beta2", "rest2")]
        + [(name, c_float) for name in ("step_size", "inv_sqrt_bias2", "eps")]
        + [("noise", c_uint32)]
    )


class _List(ctypes.Structure):
    """List of host_adamw.cpp."""

    _fields_ = (("work", c_void_p), ("job", c_void_p), ("next", c_void_p), ("count", c_int64))


def _alone(work: _ctypes.CFuncPtr, job: ctypes.Structure) -> None:
    work(byref(job), byref(c_int64(0)))


def _check(n: int, dtypes: tuple[torch.dtype, ...], *tensors: Tensor | None) -> None:
    for t in (t for t in tensors if t is not None):
        assert t.shape == (n,), f"{tuple(t.shape)}, not ({n},)"
        assert t.dtype in dtypes, f"{t.dtype}, not one of {dtypes}"
        assert t.device.type == "cpu", f"on {t.device}, not the CPU"
        assert t.is_contiguous()


def _job(
    w, lo, m, v, floors, grad, clip, *, lr, beta1, beta2, eps, weight_decay, n_decay, step, noise=0, part="all"
) -> _Job:
    n = len(w)
    return _Job(
        *(None if t is None else t.data_ptr() for t in (w, lo, m, v, *floors, grad)),
        *(m.itemsize, grad.dtype == torch.bfloat16, n, n_decay, RECORD, reference.PARTS.index(part)),
        *(float(clip), 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2),
        *(lr / (1 - beta1**step), 1 / (1 - beta2**step) ** 0.5, eps, noise),
    )


def adamw_(w_, lo_, *tensors, n_decay: int, seed: int = 0, first: int = 0, spread=_alone, **hyper) -> None:
    """moments.adamw_ of contiguous CPU tensors, bitwise identical where finite, on the threads of `spread`."""
    *stored, grad, clip = tensors
    n, kind = len(w_), stored[0].dtype
    m, m_floor, v, v_floor = stored if len(stored) == 4 else (stored[0], None, stored[1], None)
    _check(n, (torch.float32,) if lo_ is None else (torch.bfloat16,), w_)
    _check(n, (torch.int16,), lo_)
    _check(n, (torch.float32, torch.bfloat16), grad)
    _check(n, (torch.float32, torch.bfloat16) if m_floor is None else (torch.uint8,), m)
    _check(n, (kind,), v)
    _check(-(-n // moments.BLOCK), (torch.int16,), m_floor, v_floor)
    if (lib := library()) is not None:
        noise = 0 if kind == torch.float32 else moments.noise_key(seed, hyper["step"]) + first
        floors = m_floor, v_floor
        spread(lib.trireme_adamw, _job(w_, lo_, m, v, floors, grad, clip, n_decay=n_decay, noise=noise, **hyper))
        return
    for a in range(0, n, RECORD):  # in parts: torch's temporaries are small
        cut, blocks = slice(a, a + RECORD), slice(a // moments.BLOCK, (a + RECORD) // moments.BLOCK)
        lo, decays = None if lo_ is None else lo_[cut], min(max(n_decay - a, 0), RECORD)
        parts = (t[blocks if t.dtype == torch.int16 else cut] for t in stored)
        moments.adamw_(w_[cut], lo, *parts, grad[cut], clip, n_decay=decays, seed=seed, first=first + a, **hyper)


class Workers:
    """C++ threads that update one unit together.

    The caller is one of them, and releases the GIL for the call. Threads take chunks of a fixed size, so their number
    never changes a result. One call runs at a time.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._lib = library()  # built before the first step
        self._team = None if self._lib is None else self._lib.trireme_team_open(self.threads - 1)
        self._listed: list[tuple[_ctypes.CFuncPtr, ctypes.Structure]] | None = None  # inside `together`
        self._turn = threading.RLock()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        team, self._team = self._team, None
        if self._lib is not None and team is not None:
            self._lib.trireme_team_close(team)

    def spread(self, work: _ctypes.CFuncPtr, job: ctypes.Structure) -> None:
        """Runs `work` of the library on `job` on every thread, waits for all."""
        assert self._lib is not None
        assert self._team is not None, "these workers are closed"
        with self._turn:
            if self._listed is not None:
                self._listed.append((work, job))
            else:
                self._lib.trireme_team_run(self._team, ctypes.cast(work, c_void_p), byref(job))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Updates called inside run at its end, in one call without the GIL.

        Their tensors must live until then; none may need another's result.
        """
        with self._turn:
            self._listed = []
            try:
                yield
                calls = self._listed
            finally:
                self._listed = None
            if calls:
                self._run_list(*zip(*calls, strict=True))

    def _run_list(self, works: Sequence[_ctypes.CFuncPtr], jobs: Sequence[ctypes.Structure]) -> None:
        assert self._lib is not None
        n = len(jobs)
        functions = (c_void_p * n)(*(ctypes.cast(work, c_void_p).value for work in works))
        addresses, counters = (c_void_p * n)(*map(ctypes.addressof, jobs)), (c_int64 * n)()
        arrays = (ctypes.addressof(array) for array in (functions, addresses, counters))
        self.spread(self._lib.trireme_list, _List(*arrays, n))

    def adamw_(self, *tensors: Tensor | None, **hyper) -> None:
        adamw_(*tensors, spread=self.spread, **hyper)

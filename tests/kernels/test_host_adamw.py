"""The compiled CPU AdamW against the torch reference: equal bits, whatever the shape, alignment or thread count."""

import fcntl
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.kernels.optimizer import host_adamw, moments, reference

BF16, F32 = torch.bfloat16, torch.float32
HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)


def anew(source=host_adamw.__file__):
    """The module as another process has it, without a library yet."""
    spec = importlib.util.spec_from_file_location("anew", source)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.fixture
def uncompiled(monkeypatch, tmp_path):
    """The module where there is no compiler."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    module = anew()
    assert module.library() is None
    return module


def bits(t):
    return None if t is None else t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def assert_same_bits(got, want):
    for g, w in zip(got, want, strict=True):
        assert (g is None and w is None) or torch.equal(bits(g), bits(w))


def state(n, split, grad_dtype, seed=0, grad_scale=1.0, shift=0):
    """(w, lo, m, v, grad), each of n elements that begin `shift` elements into their memory."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(n + shift, generator=random)
    spread = torch.exp2(torch.randint(-30, 6, (n + shift,), generator=random))
    w, lo = reference.split_master(draw()) if split else (draw(), None)
    m, v, grad = draw() * spread, draw().square() * spread, (draw() * spread * grad_scale).to(grad_dtype)
    return tuple(None if t is None else t[shift:] for t in (w, lo, m, v, grad))


def copies(tensors):
    """Clones that keep the offset from the start of the memory, with the memory around poisoned."""
    out = []
    for t in tensors:
        if t is not None:
            shift = t.storage_offset()
            whole = torch.full((shift + len(t) + 3,), 77, dtype=t.dtype)
            whole[shift : shift + len(t)] = t
            out.append(whole[shift : shift + len(t)])
        else:
            out.append(None)
    return out


def both(run, tensors, clip=0.7, oracle=reference.adamw_, **hyper):
    """Runs run and the oracle on copies of the same state and compares all bits."""
    hyper = {**HYPER, "n_decay": len(tensors[0]) // 3, "step": 3, **hyper}
    got, want, clip = copies(tensors), copies(tensors), torch.tensor([clip])
    run(*got, clip, **hyper)
    oracle(*want, clip, **hyper)
    assert_same_bits(got, want)
    for t in got:
        if t is not None:
            whole = t.as_strided((t.storage_offset() + len(t) + 3,), (1,), 0)
            around = torch.cat((whole[: t.storage_offset()], whole[-3:]))
            assert (around == 77).all(), "wrote outside its range"


# ---------------------------------------------------------------- the update


@settings(max_examples=60, deadline=None)
@given(
    n=st.sampled_from([0, 1, 2, 7, 15, 16, 17, 31, 33, 255, 1000, 4099]),
    split=st.booleans(),
    grad_dtype=st.sampled_from([BF16, F32]),
    decay=st.floats(0, 1),
    shift=st.integers(0, 5),
    step=st.sampled_from([1, 2, 10, 1_000_000]),
    clip=st.sampled_from([1.0, 0.3, 1e-20]),
    grad_scale=st.sampled_from([1.0, 1e-38, 1e-44, 1e18]),
    seed=st.integers(0, 1000),
)
def test_bits_equal_reference(n, split, grad_dtype, decay, shift, step, clip, grad_scale, seed):
    tensors = state(n, split, grad_dtype, seed, grad_scale, shift)
    both(host_adamw.adamw_, tensors, clip, n_decay=round(decay * n), step=step)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("grad_dtype", [BF16, F32])
def test_weights_then_moments_leave_the_same_bits(split, grad_dtype, uncompiled):
    tensors = state(4099, split, grad_dtype)
    for module in (host_adamw, uncompiled):

        def in_parts(*tensors, module=module, **hyper):
            module.adamw_(*tensors, part="weights", **hyper)
            module.adamw_(*tensors, part="moments", **hyper)

        both(in_parts, tensors)
    for part in ("weights", "moments"):
        both(host_adamw.adamw_, tensors, part=part)


def test_every_gradient_bit_pattern():
    """All finite bf16 gradients, against states from zero to huge."""
    grad = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16)
    grad = grad[grad.isfinite()]
    w, lo = reference.split_master(torch.linspace(-3, 3, len(grad)))
    for v in (0.0, 1e-45, 1e-20, 1.0, 1e30):
        both(host_adamw.adamw_, (w, lo, torch.zeros(len(grad)), torch.full((len(grad),), v), grad), clip=1.0)


@pytest.mark.parametrize("width", [4, 2, 1])
def test_an_update_that_is_not_finite_has_the_bits_of_the_reference(width):
    """NaN does not become zero, neither in weights nor in moments of 16 and 8 bits."""
    grad = torch.ones(260)
    for at in (0, 256):
        grad[at : at + 2].view(torch.int32)[:] = torch.tensor(
            [0x7FFFFFFF, -1]
        )  # NaN, as GPUs make it, and its negative
        grad[at + 2 : at + 4] = torch.tensor([float("inf"), 3.4e38])
    w, lo = reference.split_master(torch.ones(260))
    w[-1], lo[-1] = reference.split_master(torch.tensor([3.4e38]))  # infinite in bf16
    moment = {4: lambda: torch.zeros(260), 2: lambda: torch.zeros(260, dtype=BF16)}.get(width)
    codes = lambda: (torch.zeros(260, dtype=torch.uint8), torch.zeros(2, dtype=torch.int16))
    made = (moment(), moment()) if moment else (*codes(), *codes())
    given = dict(HYPER, n_decay=0, step=2) | ({} if width == 4 else dict(seed=3))
    runs = []
    for update in (host_adamw.adamw_, moments.adamw_):
        tensors = copies((w, lo, *made))
        update(*tensors, grad, torch.ones(1), **given)
        assert tensors[0][grad.isnan()].isnan().all()
        m = moments.decode8(*tensors[2:4], True) if width == 1 else tensors[2]
        assert m[grad.isnan()].isnan().all()
        runs.append(tensors[:2] if width == 4 else tensors)
    assert_same_bits(*runs)


def test_against_torch_adamw():
    """Its trajectory in fp64, to fp32 rounding; hi and lo joined are the master, bit for bit."""
    w = torch.randn(3001)
    param = torch.nn.Parameter(w.double())
    oracle = torch.optim.AdamW([param], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    whole, split = ([*parts, torch.zeros(3001), torch.zeros(3001)] for parts in ((w, None), reference.split_master(w)))
    for step in range(1, 101):
        grad = torch.randn(3001).to(BF16)
        param.grad = grad.double()
        oracle.step()
        for tensors in (whole, split):
            host_adamw.adamw_(*tensors, grad, torch.ones(1), **HYPER, n_decay=3001, step=step)
    torch.testing.assert_close(w.double(), param.detach(), rtol=0, atol=1e-5)
    assert_same_bits((reference.join_master(*split[:2]), *split[2:]), (w, *whole[2:]))


# ---------------------------------------------------------------- narrow moments


def narrow(tensors, width):
    """The same state with moments of `width` bytes."""
    w, lo, m, v, grad = tensors
    nearest = torch.full((len(w),), 1 << 15, dtype=torch.int32)
    if width == 2:
        return w, lo, m.to(BF16), v.to(BF16), grad
    m8, v8 = (moments.encode8(x.contiguous(), nearest, signed) for x, signed in ((m, True), (v, False)))
    return w, lo, *m8, *v8, grad


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from([1, 2]),
    n=st.sampled_from([0, 1, 7, 255, 256, 257, 512, 1000, 4099]),
    split=st.booleans(),
    grad_dtype=st.sampled_from([BF16, F32]),
    decay=st.floats(0, 1),
    shift=st.integers(0, 5),
    step=st.sampled_from([1, 2, 1_000_000]),
    grad_scale=st.sampled_from([0.0, 1.0, 1e-20, 1e-44, 1e15]),
    first=st.sampled_from([0, 256, (1 << 32) - 512, 5 << 32]),
    seed=st.integers(0, 1 << 40),
)
def test_narrow_bits_equal_reference(width, n, split, grad_dtype, decay, shift, step, grad_scale, first, seed):
    tensors = narrow(state(n, split, grad_dtype, seed, grad_scale, shift), width)
    both(host_adamw.adamw_, tensors, oracle=moments.adamw_, n_decay=round(decay * n), step=step, seed=seed, first=first)


# ---------------------------------------------------------------- threads


@pytest.mark.grid("2-4", "5-2", "5-1")
@pytest.mark.parametrize(("threads", "width"), [(1, 4), (2, 4), (5, 4), (5, 2), (5, 1)])
def test_thread_count_changes_nothing(threads, width):
    """Nor where decay ends within a record, or between two."""
    tensors, others = state(3 * host_adamw.RECORD + 1001, True, BF16), {}
    if width < 4:
        tensors, others = narrow(tensors, width), dict(oracle=moments.adamw_, seed=1)
    with host_adamw.Workers(threads) as workers:
        for n_decay in (host_adamw.RECORD - 1, host_adamw.RECORD, host_adamw.RECORD + 7):
            both(workers.adamw_, tensors, n_decay=n_decay, **others)


@needs_compiler
def test_a_team_works_off_many_short_jobs_and_then_ends():
    """No thread is left behind in an earlier job, and none is missing in a later one."""
    tensors = state(host_adamw.RECORD + 9, True, BF16)
    want, got = copies(tensors), copies(tensors)
    tasks = lambda: set(os.listdir("/proc/self/task"))
    before = tasks()
    with host_adamw.Workers(4) as workers:
        team = tasks() - before
        assert len(team) == 3
        for step in range(1, 300):
            workers.adamw_(*got, torch.ones(1), **HYPER, n_decay=7, step=step)
            host_adamw.adamw_(*want, torch.ones(1), **HYPER, n_decay=7, step=step)
        assert team <= tasks()
    assert_same_bits(got, want)
    patience = time.monotonic() + 60
    while team & tasks():  # the system lists a thread for a moment after it was joined
        assert time.monotonic() < patience, "a thread was left behind"
    with pytest.raises(AssertionError, match="closed"):
        workers.adamw_(*got, torch.ones(1), **HYPER, n_decay=7, step=1)


def test_calls_from_several_threads_take_turns():
    units = [state(2 * host_adamw.RECORD + 5, True, BF16, seed=k) for k in range(3)]
    got = [copies(t) for t in units]

    def train(tensors):
        for step in range(1, 12):
            with workers.together():
                workers.adamw_(*tensors, torch.ones(1), **HYPER, n_decay=3, step=step)

    with host_adamw.Workers(3) as workers:
        threads = [threading.Thread(target=train, args=(tensors,)) for tensors in got]
        for action in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                action(thread)
    for tensors, after in zip(units, got, strict=True):
        want = copies(tensors)
        for step in range(1, 12):
            host_adamw.adamw_(*want, torch.ones(1), **HYPER, n_decay=3, step=step)
        assert_same_bits(after, want)


@pytest.mark.parametrize("compiled", [True, False])
def test_updates_of_several_units_have_the_bits_of_each_alone(compiled, uncompiled):
    units = [state(n, True, BF16, seed=n) for n in (host_adamw.RECORD + 5, 0, 17, 3 * host_adamw.RECORD)]
    want, got = [copies(t) for t in units], [copies(t) for t in units]
    with (host_adamw if compiled else uncompiled).Workers(3) as workers:
        with workers.together():
            for tensors in got:
                workers.adamw_(*tensors, torch.ones(1), **HYPER, n_decay=3, step=2)
        with workers.together():
            pass
        with pytest.raises(KeyError), workers.together():
            raise KeyError
    for tensors in want:
        reference.adamw_(*tensors, torch.ones(1), **HYPER, n_decay=3, step=2)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


# ---------------------------------------------------------------- building


def compiler(folder, body):
    """A pretend c++ in folder."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    """A copy of the library that all tests use."""
    path, library = tmp_path_factory.mktemp("compiled") / "object.so", host_adamw.library()
    if library is not None:
        if not Path(library._name).exists():
            pytest.skip("no cache of compiled code here")
        shutil.copy(library._name, path)
    return path


@pytest.fixture
def fresh(monkeypatch, tmp_path, built_once):
    """An empty cache folder, for a library that a compiler makes which copies `built_once`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copies = f'while [ $# -gt 0 ]; do [ "$1" = -o ] && cp {built_once} "$2"; shift; done'
    (tmp_path / "copies").mkdir()
    monkeypatch.setenv("CXX", str(compiler(tmp_path / "copies", copies)))
    return tmp_path / "cache" / "trireme"


@pytest.mark.full
@needs_compiler
def test_a_build_is_cached_by_its_source_and_leaves_no_part(fresh, tmp_path):
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)  # becomes private
    umask = os.umask(0)
    try:
        assert anew().library() is not None
    finally:
        os.umask(umask)
    (built,) = fresh.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (fresh, built)] == [0o700, 0o700]
    made = built.stat().st_mtime_ns
    assert anew().library() is not None
    assert built.stat().st_mtime_ns == made, "compiled again"
    for path in (Path(host_adamw.__file__), host_adamw.SOURCE):
        shutil.copy(path, tmp_path)
    with (tmp_path / host_adamw.SOURCE.name).open("a") as later:
        later.write("// a later version\n")
    assert anew(tmp_path / "host_adamw.py").library() is not None
    assert len(list(fresh.iterdir())) == 2


def an_object(path, body):
    """A shared object that can be loaded, and is none of ours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", path], input=body.encode(), check=True, timeout=300
    )


RUNS = """
#include <fstream>
static int ran = (std::ofstream("%s") << "ran", 0);
"""


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("planted", ["damaged", "without functions", "of another owner", "writable", "link"])
def test_only_this_users_sound_library_is_loaded(fresh, monkeypatch, tmp_path, planted):
    """Anything else in its place is built anew, and is not run."""
    anew().library()
    (built,) = fresh.iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # what is loaded by its name is not opened again
    place = tmp_path / "other" / "trireme" / built.name
    place.parent.mkdir(parents=True)
    if planted == "damaged":
        place.write_bytes(b"not an object")
    else:
        body = "int x;" if planted == "without functions" else RUNS % (tmp_path / "ran")
        an_object(tmp_path / "planted.so" if planted == "link" else place, body)
    if planted == "of another owner":
        monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    elif planted == "writable":
        place.chmod(0o777)
    elif planted == "link":
        place.symlink_to(tmp_path / "planted.so")
    module = anew()
    assert module.library() is not None
    assert not (tmp_path / "ran").exists()
    assert planted not in ("damaged", "without functions") or place.stat().st_size == built.stat().st_size
    both(module.adamw_, state(100, True, BF16))


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("folder", ["of another owner", "no folder"])
def test_without_a_cache_the_library_is_built_and_not_kept(fresh, monkeypatch, tmp_path, folder):
    if folder == "no folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # holds for root too
    else:
        fresh.mkdir(parents=True)
        monkeypatch.setattr(os, "geteuid", lambda: fresh.stat().st_uid + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (module := anew()).library() is not None
    assert not fresh.exists() or not list(fresh.iterdir())
    both(module.adamw_, state(100, True, BF16))


@pytest.mark.full
@needs_compiler
def test_without_march_native(fresh, monkeypatch, tmp_path):
    real = shutil.which("c++") or shutil.which("g++")
    picky = compiler(tmp_path, f'for a in "$@"; do [ "$a" = -march=native ] && exit 1; done; exec {real} "$@"')
    monkeypatch.setenv("CXX", str(picky))
    assert (module := anew()).library() is not None
    both(module.adamw_, state(1001, True, BF16))


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("cache", [True, False])
def test_what_a_killed_compiler_leaves_is_removed_by_the_next(fresh, monkeypatch, tmp_path, cache):
    """A compiler that is killed with its run; a folder in use, a file and a link of that name stay."""
    parent = fresh if cache else tmp_path / "tmp"
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    if not cache:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    sound = os.environ["CXX"]
    killer = compiler(tmp_path, '[ "$1" = --version ] || { echo > "$TMPDIR/cc.s"; kill -9 $PPID; exit 1; }')
    monkeypatch.setenv("CXX", str(killer))
    child = os.fork()
    if not child:
        try:
            anew().library()
        finally:
            os._exit(0)  # it was not killed
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = parent.iterdir()
    assert [path.name for path in left.iterdir()] == ["cc.s"]

    used, file, link = (parent / f"{host_adamw.BUILD}{name}" for name in ("used", "file", "link"))
    used.mkdir()
    file.touch()
    link.symlink_to(tmp_path)
    monkeypatch.setenv("CXX", sound)
    fd = os.open(used, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert anew().library() is not None
    os.close(fd)
    assert {path for path in parent.iterdir() if path.suffix != ".so"} == {used, file, link}
    assert not list((tmp_path / "tmp").glob("cc*"))


@pytest.mark.full
@pytest.mark.parametrize("wait", ["sleep 0.5", ":"])
def test_what_a_compiler_has_started_ends_with_it(fresh, monkeypatch, tmp_path, wait):
    """When a compilation is given up, as by Ctrl-C, also in the moment in which it starts."""
    script = f"sleep 60 & echo $! > {tmp_path}/pid; {wait}; kill -2 $PPID; wait"
    monkeypatch.setenv("CXX", str(compiler(tmp_path, script)))
    with pytest.raises(KeyboardInterrupt):
        anew().library()
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    with suppress(OSError):
        for _ in range(100):  # it ends a moment after it is killed
            if status.read_text().rpartition(") ")[2][0] == "Z":
                return
            time.sleep(0.05)
        pytest.fail("it goes on")


@pytest.mark.parametrize("broken", [False, True])
def test_without_a_compiler_the_bits_are_the_same_and_the_reason_is_known(fresh, monkeypatch, tmp_path, broken):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if broken:
        compiler(tmp_path, "echo cannot >&2; exit 1")
    module, RECORD = anew(), host_adamw.RECORD
    assert module.library() is None
    for part in ("c++", "cannot", "CXX") if broken else ("c++", "g++"):
        assert part in module.why_slow()
    both(module.adamw_, state(RECORD + 5, True, BF16), n_decay=RECORD + 2)
    for width in (1, 2):
        tensors = narrow(state(RECORD + 300, True, BF16), width)
        both(module.adamw_, tensors, oracle=moments.adamw_, n_decay=RECORD + 2, seed=4, first=256)
    with module.Workers(2) as workers:
        tensors = state(70_000, False, F32)
        both(workers.adamw_, tensors)

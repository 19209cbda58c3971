"""Shared test set-up. Kernels run in Triton's CPU interpreter where there is no GPU."""

import fcntl
import gc
import os
import signal
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before a kernel is decorated

import engines  # noqa: F401, for what a forked process does first
import pytest
from hypothesis import settings

from trireme.engine.data import codec
from trireme.engine.planner.probe import compute, processor
from trireme.engine.queues import real as real_queues
from trireme.engine.run import evaluate, opening
from trireme.models.sizes import narrow

torch.set_num_threads(1)
gc.disable()  # while modules are imported and tests collected; see few_to_collect
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has started this in the background
settings.register_profile("same", derandomize=True)  # the same examples each time
settings.load_profile("same")

KEPT = 1 << 29  # bytes
RATES = {"copy": 6.5e9, "task": 8e-5, "h2d": 3.3e9, "d2h": 3.3e9, "dram": 1.2e10, "adam": 4e8}  # of one core


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of real checkpoints and data: TRIREME_REAL, or shared/real beside the repository."""
    folder = Path(os.environ.get("TRIREME_REAL", Path(__file__).parents[3] / "shared" / "real"))
    if not folder.is_dir():
        pytest.skip(f"no real checkpoints at {folder}; set TRIREME_REAL")
    return folder


@pytest.fixture(scope="module")
def few_rows_in_fp8():
    """Experts' products are in fp8, however few rows each expert has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow, "LEAST_ROWS", 0)
        yield


@pytest.fixture
def large():
    """Of tests that take gigabytes of GPU memory, one at a time: several processes test on one GPU."""
    with open(Path(tempfile.gettempdir()) / f"trireme-large-tests-{os.getuid()}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def released(request):
    """Gives GPU memory beyond KEPT back after a test: many processes test on one GPU."""
    if "large" in request.fixturenames:
        request.getfixturevalue("large")  # set up before this fixture, so its lock opens after the memory is given back
    yield
    if torch.cuda.is_initialized() and sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count()))) > KEPT:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="session")
def server():
    """Starts tokenizers' processes for all tests and the runs that they fork: each would take half a second for its
    own. Begun where the program can be imported.
    """
    forkserver.set_forkserver_preload([codec.__name__])
    forkserver.ensure_running()


@pytest.fixture(autouse=True, scope="session")
def few_to_collect():
    """Leaves the objects that exist before the first test, those of imported modules, out of all garbage collections:
    runs and forked children are faster. Objects of tests are collected as usual. The engine's queues, which freeze and
    unfreeze objects while they are open, would undo this, so they do neither (tests/engine/test_queues.py tests them).
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    with pytest.MonkeyPatch.context() as patch:
        kept = dict(get_threshold=gc.get_threshold, set_threshold=gc.set_threshold)
        patch.setattr(real_queues, "gc", SimpleNamespace(**kept, freeze=lambda: None, unfreeze=lambda: None))
        yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def short_runs():
    """Tokens of one test are not for the next, nor for the user of this machine; a sample is one token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "cache_folder", lambda: None)
        patch.setattr(evaluate, "LONGEST", 0.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def usual_rates():
    """A CPU's rates are not measured, except in modules with a fixture of this name."""
    measured = processor.processor_rates
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(compute, "matmul_rate", lambda device, dtype: 6e10)
            patch.setattr(compute, "fp8_rate", lambda device: 3e10)
        patch.setattr(
            processor,
            "processor_rates",
            lambda device, *more: RATES if device.type == "cpu" else measured(device, *more),
        )
        yield

"""Shared test set-up. Kernels run in Triton's CPU interpreter where there is no GPU."""

import os
import signal
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before a kernel is decorated

import pytest

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has started this in the background


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # not of a parameter of that name
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of real checkpoints and data: TRIREME_REAL, or shared/real beside the repository."""
    folder = Path(os.environ.get("TRIREME_REAL", Path(__file__).parents[2] / "shared" / "real"))
    if not folder.is_dir():
        pytest.skip(f"no real checkpoints at {folder}; set TRIREME_REAL")
    return folder


@pytest.fixture(autouse=True, scope="session")
def no_shelf():
    """Tokens of one test are not for the next, nor for the user of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trireme.engine.run.begin.job.shelf", lambda: None)
        yield

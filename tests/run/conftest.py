"""Checkpoints to run with."""

import shutil
from pathlib import Path

import pytest
from runs import NARROW, child, ended, losses, make_small, options

from trireme.engine.planner import host


@pytest.fixture(scope="module", autouse=True)
def _a_small_process():
    """--ram counts the process, and this one holds what earlier tests left; tests/planner/test_ram.py has real ones."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(host, "resident", lambda: 0)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkpoint and a text that nothing is wrong with."""
    return make_small(tmp_path_factory.mktemp("made"), "model")


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    """A folder to be in, with `model` and `stories.txt`, which a test may spoil."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_small(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Path:
    """As `checkpoint`, of a narrower model."""
    return make_small(tmp_path_factory.mktemp("narrow"), **NARROW)


@pytest.fixture(scope="module")
def uninterrupted(checkpoint):
    """(weights file, losses) of the run that nothing disturbs."""
    out = checkpoint / "whole"
    assert ended(child(options(checkpoint, out, "gpu", batch_size=2, micro_batch=1))) == 0
    return (out / "model.safetensors").read_bytes(), losses(out)

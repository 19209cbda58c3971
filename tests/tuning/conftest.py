"""Checkpoints to run with."""

from functools import cache
from pathlib import Path

import pytest
from packed_files import write_packed
from runs import make_small


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A folder with `checkpoint` and `stories.txt`."""
    return make_small(tmp_path_factory.mktemp("tuning"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Format -> (a checkpoint in it, the same in bf16, decoded matrices in fp32)."""

    @cache
    def make(form):
        folder = tmp_path_factory.mktemp("form")
        decoded = write_packed(folder, form)
        return folder / "packed", folder / "plain", decoded

    return make

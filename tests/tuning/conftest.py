"""A checkpoint to run with."""

from pathlib import Path

import pytest
from runs import make_small


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A folder with `checkpoint` and `stories.txt`."""
    return make_small(tmp_path_factory.mktemp("tuning"))

"""A checkpoint to run with."""

from pathlib import Path

import pytest

from trireme.engine.run import demo


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A folder with `checkpoint` and `stories.txt`."""
    folder = tmp_path_factory.mktemp("tuning")
    demo.make_text(folder / "stories.txt", 40, seed=1)
    demo.make_checkpoint(folder / "checkpoint", folder / "stories.txt", seed=1)
    return folder

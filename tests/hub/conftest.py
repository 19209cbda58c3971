"""A hub on this machine with a model and a data set, and the folder of a user of it."""

import shutil
from pathlib import Path

import pytest
from hub_server import Repo, serving
from runs import make_small

from trireme.engine.planner import host

pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_small(tmp_path_factory.mktemp("made"), "model")


@pytest.fixture
def hub(made, tmp_path, monkeypatch):
    """models/some/model, datasets/some/stories; the present folder is empty, so is the client's cache."""
    monkeypatch.setattr(host, "resident", lambda: 0)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    files = {path.name: path.read_bytes() for path in (made / "model").iterdir()}
    files |= {"README.md": b"card", "pytorch_model.bin": b"no", "model.py": b"no", "onnx/model.onnx": b"no"}
    rows = (made / "stories.txt").read_bytes()
    stories = {"train.txt": rows, "README.md": b"card", "load.py": b"no"}
    with serving() as found:
        found.repos = {"models/some/model": Repo(files), "datasets/some/stories": Repo(stories)}
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


@pytest.fixture
def local(made) -> Path:
    """The same model and data as files: `model` and `stories.txt` in the present folder."""
    shutil.copytree(made, ".", dirs_exist_ok=True)
    return Path()

"""Trackers of --log: begun before the data is read, gone on with when a run is resumed."""

import io
import sys
import types

import pytest
from command import TRAIN, fails

from trireme.engine.data import dataset
from trireme.engine.run import log, train
from trireme.engine.run import main as finetune
from trireme.engine.run.options import Options
from trireme.engine.run.screen import Screen


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_there_is_refused_before_the_data_is_read(here, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    monkeypatch.setattr(dataset, "tokenize", None)
    said = fails(capsys, here, *TRAIN, "--log", name)
    assert f"--log {name}: it is not installed. pip install {name}" in said


class Wandb(types.ModuleType):
    """The part of W&B's client that a run uses."""

    def __init__(self, key: bool = True):
        super().__init__("wandb")
        self.key, self.begun, self.got = key, [], []

    def init(self, **given):
        if not self.key:
            raise RuntimeError("api_key not configured (no-tty). call wandb.login(key=[your_api_key])\nmore of it")
        self.begun.append((given.get("id"), given.get("resume")))
        log = lambda record, step: self.got.append(step)
        return types.SimpleNamespace(id=given.get("id") or "made-up", log=log, finish=lambda: self.got.append("end"))


def test_without_a_key_nothing_is_read_and_what_to_do_is_said(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb(key=False))
    monkeypatch.setattr(dataset, "tokenize", None)
    said = fails(capsys, here, *TRAIN, "--log", "wandb")
    assert "--log wandb: api_key not configured" in said
    assert "Log in with `wandb login`, or set WANDB_MODE=offline, or leave it out." in said


def test_a_resumed_run_goes_on_in_its_own_run_there(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := Wandb())
    step = train.Run._step

    def once(self):
        step(self)
        raise KeyboardInterrupt

    argv = [*TRAIN[:-1], "4", "--save-every", "1", "--log", "wandb"]
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "_step", once)
        assert finetune.main(argv) == 130
    assert finetune.main(["--resume", "out"]) == 0
    assert fake.begun == [(None, None), ("made-up", "allow")]
    assert fake.got == [1, "end", 2, 3, 4, "end"]


def test_a_tracker_that_cannot_end_is_told(tmp_path, monkeypatch):
    def broken():
        raise ConnectionError("no route")

    monkeypatch.setattr(log, "_wandb", lambda out, options: (None, broken))
    stream = io.StringIO()
    with log.trackers(Options(log=("wandb",)), Screen(stream)):
        pass
    assert stream.getvalue().count("no route") == 1

"""Killed at any instant a run goes on, by the commands that it names, to the same bits; no flipped bit is silent."""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from kills import KINDS, Bench, flip, make_bench, trial
from runs import child, ended, hold, losses, options

from trireme.engine.run.output import exports
from trireme.engine.run.output.exports import (
    Best,
    bring_back,
    forget_old,
    replace_best,
    replace_folder,
    restore_best,
    set_aside,
)
from trireme.engine.run.output.folder import tidy
from trireme.storage import files
from trireme.storage.untrusted import checksum

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("seed", range(12))
def test_whenever_it_is_killed_it_ends_the_same(bench, seed):
    made = trial(bench, seed)
    assert not made.wrong, made


OF_A_STORE = {"weights", "state", "manifest", "index", "auxiliary", "store.id"}  # in test_flips.py


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OF_A_STORE])
def test_a_flipped_bit_is_noticed_or_changes_nothing(bench, kind):
    found, what = flip(bench, kind, 0)
    assert found in ("noticed", "harmless"), what


def test_killed_with_two_gpus_a_run_goes_on_with_any_number(checkpoint, monkeypatch):
    """GPUs, pretended on a CPU, deal units otherwise; sums are over the same micro-batches in the same order."""

    def start(out, gpus, **more):
        return child(replace(options(checkpoint, out, "host", **more), micro_batch=1, gpus=gpus))

    whole, out = checkpoint / "with-one", checkpoint / "with-several"
    assert ended(start(whole, 1)) == 0
    for gpus, step in ((2, 2), (1, 3), (3, 5)):
        with monkeypatch.context() as m:
            hold(step + 1, m.setattr)
            pid = start(out, gpus, resume=str(out) if step > 2 else None)
        while not (out / "log.jsonl").exists() or max(losses(out), default=0) < step:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
    assert ended(start(out, 2, resume=str(out))) == 0
    assert losses(out) == losses(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


# ---------------------------------------------------------------- OUT/best, killed before any change of the drive

CALLS = ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir")


class Killed(BaseException):
    """Before a change of the drive."""


left = [0]  # changes until the next kill; 0: none


def _audited(name: str, args: tuple) -> None:
    writes = name == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if left[0] and (name in CALLS or writes):
        left[0] -= 1
        if not left[0]:
            raise Killed


sys.addaudithook(_audited)  # never to be removed; without a kill to come it does nothing


def save(step: int):
    """Of a checkpoint in two files."""
    texts = {name: f"{name} of step {step}" for name in ("config.json", "model.safetensors")}

    def write(folder: Path) -> dict[str, str]:
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text)
        return {name: checksum([text.encode()]) for name, text in texts.items()}

    return write


def step_of(folder: Path) -> int:
    texts = {path.read_text().split()[-1] for path in folder.iterdir() if path.name != exports.NOTE}
    assert len(texts) == 1, texts
    assert len(list(folder.iterdir())) == 3, folder
    return int(texts.pop())


class Run:
    """What a run does to OUT: 3, 5: a better evaluation of that step; "snapshot"; "end"."""

    def __init__(self, out: Path):
        self.out, self.best, self.named, self.finished = out, None, None, False

    def does(self, what) -> None:
        if isinstance(what, int):
            replace_best(self.out, save(what), Best(what, 1 / what))
            self.best = Best(what, 1 / what)
        elif what == "snapshot":
            self.named = self.best  # one rename
            forget_old(self.out)
        else:
            exports.take_over(self.out / "best", self.out)
            set_aside(self.out)
            self.finished = True  # one rename
            tidy(self.out)


RUNS = [
    [3, "snapshot", 5, 7, "snapshot", 9, "end"],  # the last evaluation after the last snapshot
    [3, "snapshot", "snapshot", 5, "snapshot", "end"],  # before it
    [3, 5, "end"],
]


@pytest.mark.parametrize("course", RUNS)
def test_whenever_it_is_killed_the_best_is_the_one_that_the_snapshot_names(tmp_path, course, monkeypatch):
    """And again where it is killed while that is made so; what the undisturbed run leaves is what is left."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(files, "BLOCK", 1 << 13)
    for first in range(1, 200):
        for second in (1, 3, 6):
            out = tmp_path / "out"
            out.mkdir()
            run = Run(out)
            left[0] = first
            with suppress(Killed):
                for what in course:
                    run.does(what)
            killed, left[0] = not left[0], second
            with suppress(Killed):
                tidy(out) if run.finished else restore_best(out, run.named)
            again, left[0] = not left[0], 0
            if run.finished:
                tidy(out)
            else:
                assert restore_best(out, run.named) == (run.named is not None), (first, second)
                assert run.named is None or step_of(out / "best") == run.named.step
                assert [p.name for p in out.iterdir() if p.is_dir()] == ["best"] * (run.named is not None)
                run.best = run.named
                for what in [5, "snapshot", 9, "end"]:  # goes on
                    run.does(what)
            assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"], (first, second)
            shutil.rmtree(out)
            if not again:
                break
        if not killed:
            break
    assert first > 20


def test_of_two_snapshots_the_older_ones_best_is_told_to_be_lost(tmp_path):
    for step in (3, 5):
        replace_best(tmp_path, save(step), Best(step, 0.5))
        forget_old(tmp_path)
    assert restore_best(tmp_path, Best(5, 0.5))
    for other in (Best(3, 0.5), Best(5, 0.25)):
        assert not restore_best(tmp_path, other)
        assert not list(tmp_path.iterdir())
        replace_best(tmp_path, save(5), Best(5, 0.5))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", exports.NOTE])
def test_a_best_that_was_changed_is_none(tmp_path, name):
    replace_best(tmp_path, save(5), Best(5, 0.5))
    path = tmp_path / "best" / name
    path.write_text(path.read_text().replace("5", "4"))
    assert not restore_best(tmp_path, Best(5, 0.5))


@pytest.mark.parametrize(
    "note", ["", "[]", "{}", '{"step": 5, "eval_loss": 0.5, "files": {"../x": "y"}}', "[" * 100_000]
)
def test_a_best_without_its_note_is_none(tmp_path, note):
    save(5)(tmp_path / "best")
    (tmp_path / "best" / exports.NOTE).write_text(note)
    assert not restore_best(tmp_path, Best(5, 0.5))


def test_the_output_takes_the_best_over_once_or_twice(tmp_path):
    """Killed between a link and its name, too: two links of one file are not renamed into one."""
    save(5)(tmp_path / "best")
    for _ in range(2):
        exports.take_over(tmp_path / "best", tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "config.json", "model.safetensors"]
        (tmp_path / ".config.json.partial").hardlink_to(tmp_path / "best" / "config.json")
    assert (tmp_path / "model.safetensors").samefile(tmp_path / "best" / "model.safetensors")


@pytest.mark.parametrize("name", ["best", "best.new", "best.old", "step-4.new", "step-4.old"])
def test_where_a_link_leads_nothing_is_written_or_removed(tmp_path, name):
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    out.mkdir()
    replace_best(theirs.parent, save(5), Best(5, 0.5))
    (tmp_path / "best").rename(theirs)
    (out / name).symlink_to(theirs)
    restore_best(out, None)
    replace_best(out, save(7), Best(7, 0.25))
    replace_folder(out / "step-4", save(7))
    tidy(out)
    assert step_of(theirs) == 5
    assert (theirs / exports.NOTE).exists()
    assert sorted(p.name for p in out.iterdir() if not p.is_symlink()) == ["best", "step-4"]


def test_replace_leaves_only_the_new_checkpoint(tmp_path, monkeypatch):
    """The older one goes when the name of the new one is on the drive."""
    (tmp_path / "step-4.new").mkdir()  # of a run that was killed
    replace_folder(tmp_path / "step-4", save(4))
    done, rename, rmtree = [], Path.rename, shutil.rmtree
    with monkeypatch.context() as m:
        m.setattr(Path, "rename", lambda old, new: (rename(old, new), done.append(new.name)))
        m.setattr(shutil, "rmtree", lambda folder, **how: (rmtree(folder, **how), done.append(f"no {folder.name}")))
        m.setattr(exports, "sync_folder", lambda folder: done.append("sync"))
        replace_folder(tmp_path / "step-4", save(5))
    assert done[-4:] == ["step-4.old", "step-4", "sync", "no step-4.old"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-4"]
    (tmp_path / "step-4").rename(tmp_path / "step-4.old")  # killed between two renames
    for _ in range(2):
        bring_back(tmp_path / "step-4")
        assert [p.name for p in tmp_path.iterdir()] == ["step-4"]

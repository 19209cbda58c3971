"""The output folder: refused before the run where it must not be written, compared with its source after it."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trireme.engine import demo
from trireme.engine import job as jobs
from trireme.engine.options import Options
from trireme.engine.plan import DoesNotFit
from trireme.engine.verify import check_free, new_run, reopen
from trireme.models.config import InputError
from trireme.storage.checkpoint import export, open_source
from trireme.storage.files import StoreError


@pytest.fixture
def source(tmp_path):
    demo.make_text(tmp_path / "text", 20, seed=1)
    demo.make_checkpoint(tmp_path / "source", tmp_path / "text", seed=1)
    return open_source(tmp_path / "source")


def refused(out, source) -> str:
    with pytest.raises(InputError) as error:
        check_free(out, source)
    return str(error.value)


def test_where_a_run_may_write(tmp_path):
    before = sorted(tmp_path.rglob("*"))
    check_free(tmp_path / "new" / "deep", tmp_path / "source")
    assert sorted(tmp_path.rglob("*")) == before, "looking makes nothing"
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", tmp_path / "source")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_that_failed_without_a_log_keeps_its_snapshot(tmp_path, elsewhere):
    """The disk was full from the first line of the log on. A snapshot of another run is none of this one."""
    out, drive = tmp_path / "out", tmp_path / "drive"
    kept = (drive if elsewhere else out / "store") / "snapshot-000001-step-7"
    for saved in (True, False):
        with pytest.raises(OSError, match="full"), new_run(out, tmp_path, [drive] * elsewhere, KeyboardInterrupt):
            if saved:
                kept.mkdir(parents=True)
            raise OSError("full")
        assert out.exists() == saved and kept.exists() == (saved or elsewhere)
        shutil.rmtree(out, ignore_errors=True)


def test_a_run_that_comes_second_sweeps_nothing_away(tmp_path):
    out = tmp_path / "out"
    with new_run(out, tmp_path / "source", [], KeyboardInterrupt):
        with pytest.raises(InputError, match="another run has just begun"):
            with new_run(out, tmp_path / "source", [], KeyboardInterrupt):
                raise AssertionError("it may not come this far")
        (out / "config.yaml").write_text("the first one's")
    assert [p.name for p in out.iterdir()] == ["config.yaml"]
    with pytest.raises(InputError, match="holds a run"), new_run(out, tmp_path / "source", [], KeyboardInterrupt):
        pass
    with pytest.raises(ZeroDivisionError), new_run(tmp_path / "b", tmp_path / "source", [tmp_path / "s"], SystemExit):
        (tmp_path / "s").mkdir()
        (tmp_path / "b" / "config.yaml").write_text("gone")
        1 / 0  # noqa: B018
    assert not (tmp_path / "b").exists() and not (tmp_path / "s").exists()


def test_where_it_may_not(tmp_path, monkeypatch):
    full, run, file = tmp_path / "full", tmp_path / "run", tmp_path / "file"
    for folder, name in ((full, "x"), (run, "config.yaml")):
        folder.mkdir()
        (folder / name).write_text("")
    file.write_text("")
    assert "is the checkpoint itself" in refused(full, full)
    assert "is not empty (1 entries). Name another folder" in refused(full, tmp_path)
    assert f"holds a run. Go on with it: --resume {run}" in refused(run, tmp_path)
    assert "is a file" in refused(file, tmp_path)
    assert f"{file} is a file" in refused(file / "below", tmp_path)
    assert "no folder can be made in /proc (" in refused(Path("/proc/x"), tmp_path)  # root may, and cannot
    before = sorted(tmp_path.iterdir())
    check_free(tmp_path / "new", tmp_path)
    assert sorted(tmp_path.iterdir()) == before

    def full_drive(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full_drive)
    with pytest.raises(OSError, match="No space"):  # no wrong input
        check_free(tmp_path / "new", tmp_path)


def test_a_faithful_export_passes(source, tmp_path):
    export(source, tmp_path / "out", lambda name: [np.zeros(source.tensors[name].numel, np.float32)])
    output, check, _ = reopen(source, tmp_path / "out")
    assert "model.safetensors, config.json, tokenizer.json, tokenizer_config.json" in output
    assert "38 tensors" in check and "3 other files byte-identical" in check


@pytest.mark.parametrize(
    "spoil, says",
    [
        (
            lambda t: t.pop("model.norm.weight"),
            "model.norm.weight is missing here and F32 [128] in model.safetensors in",
        ),
        (lambda t: t.update(lm_head=t["model.norm.weight"]), "lm_head is F32 [128]"),
        (lambda t: t.update({"model.norm.weight": np.ones(128, np.float16)}), "model.norm.weight is F16 [128]"),
        (lambda t: t.update({"model.norm.weight": np.ones((2, 64), np.float32)}), "model.norm.weight is F32 [2, 64]"),
    ],
)
def test_a_difference_is_named(source, tmp_path, spoil, says):
    out = tmp_path / "out"
    export(source, out, lambda name: None)
    tensors = load_file(out / "model.safetensors")
    spoil(tensors)
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(StoreError, match="read back, it is not what was written") as error:
        reopen(source, out)
    assert says in str(error.value)


def test_a_companion_that_differs_is_named(source, tmp_path):
    export(source, tmp_path / "out", lambda name: None)
    with open(tmp_path / "out" / "tokenizer.json", "a") as file:
        file.write(" ")
    with pytest.raises(StoreError, match="tokenizer.json is not the one of"):
        reopen(source, tmp_path / "out")


@pytest.mark.parametrize(
    "free, ram, option", [(1 << 30, 1 << 30, ""), (9, 1 << 30, "--out"), (4 << 20, 7 << 20, "--store")]
)
def test_a_drive_without_room_is_refused_before_the_start(tmp_path, monkeypatch, free, ram, option):
    """The export always, and the state where it lives there."""
    demo.make_text(tmp_path / "text.txt", 20, seed=1)
    demo.make_checkpoint(tmp_path / "checkpoint", tmp_path / "text.txt", seed=1)
    job = jobs.prepare(Options(
        model=str(tmp_path / "checkpoint"), data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), seq_len=64,
        batch_size=4, gpu_memory=14 << 20 if ram < 1 << 30 else 1 << 30, ram=ram, device="cpu",
    ))  # fmt: skip
    assert job.plan.uses("ssd") == (option == "--store")
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    if not option:
        return jobs.check_room(job)
    with pytest.raises(DoesNotFit, match=f"name another drive with .*{option}"):
        jobs.check_room(job)

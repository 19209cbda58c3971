"""A run that is stopped, killed, extended or moved ends bit for bit as the run that nothing disturbed."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from engines import fork
from runs import child, ended, go, hold, losses, options, records, stopped, wait_for, weights

from trireme.engine.run import cli, folder, job, loop
from trireme.engine.run.loop import train
from trireme.engine.run.options import every
from trireme.engine.run.record import State
from trireme.models.config import InputError


@pytest.mark.grid
@pytest.mark.parametrize("where", ["ram", "ssd", "halves"])
def test_a_killed_run_resumes_bitwise(checkpoint, uninterrupted, where):
    """Killed in step 4, after the snapshot of step 2; placement does not matter."""
    out = checkpoint / f"killed-{where}"
    run = options(checkpoint, out, where, batch_size=2, micro_batch=1)  # as many as fit would be other bits
    pid = fork()
    if not pid:
        hold(4)
        go(run)
    wait_for(out, 3)
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    assert folder.read_record(out / ".run/state.json", State).started
    train(replace(run, resume=str(out)))
    assert (weights(out), losses(out)) == uninterrupted
    assert not (out / ".run").exists()


@pytest.mark.full
@pytest.mark.grid
@pytest.mark.parametrize("more", [
    dict(val="0.2", eval_every=every("2"), export="best", lr=0.03),
    dict(lora=4, lora_dropout=0.1, merge=True),
    dict(freeze=("*embed*",), neftune=5.0),
    dict(gpus=2, keep=2),
])  # fmt: skip
def test_a_stopped_run_resumes_bitwise(narrow, tmp_path, monkeypatch, more):
    whole = replace(options(narrow, tmp_path / "whole", "ram"), **more)
    parts = replace(whole, out=str(tmp_path / "parts"))
    train(whole)
    stopped(parts, 2, monkeypatch)
    train(replace(parts, resume=parts.out))
    files = lambda out: {path.relative_to(out): path.read_bytes() for path in Path(out).rglob("*.safetensors")}
    assert files(whole.out) == files(parts.out) != {}
    untimed = lambda out: [(r["step"], r.get("loss"), r.get("grad_norm"), r.get("eval_loss")) for r in records(out)]
    assert untimed(whole.out) == untimed(parts.out)


@pytest.mark.full
def test_a_run_that_stops_before_its_first_snapshot_leaves_nothing_or_begins_again(narrow, tmp_path, monkeypatch):
    run = options(narrow, tmp_path / "out", "gpu")
    with monkeypatch.context() as m:
        m.setattr(loop.Loop, "load", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(run)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as m:
        m.setattr(loop.Loop, "step", lambda *_: os._exit(9))
        assert ended(child(run)) == 9
    assert (tmp_path / "out/.run").is_dir()
    with pytest.raises(InputError, match="--resume"):
        train(run)
    train(replace(run, resume=run.out))
    assert len(losses(tmp_path / "out")) == 6


def test_the_best_is_of_the_lowest_evaluation(narrow, tmp_path):
    """At this rate the loss rises after a few steps."""
    more = dict(val="0.2", export="best", schedule="constant", batch_size=2, lr=0.1, max_steps=4)
    run = options(narrow, tmp_path / "out", "gpu", **more)
    train(replace(run, warmup=0.0, eval_every=every("1"), export_every=every("1")))
    evals = {r["step"]: r["eval_loss"] for r in records(run.out, "eval_loss") if r["step"]}
    best = min(evals, key=evals.get)
    assert best < max(evals) > 1
    assert weights(run.out) == weights(Path(run.out, f"step-{best}"))


@pytest.mark.full
def test_the_best_of_a_run_that_saved_none_are_those_from_there_on(narrow, tmp_path):
    more = dict(val="0.2", schedule="constant", batch_size=2, lr=0.1, keep_state=True, eval_every=every("1"))
    run = options(narrow, tmp_path / "out", "gpu", warmup=0.0, **more)
    train(replace(run, max_steps=2))
    train(replace(run, resume=run.out, export="best", export_every=every("1")))
    evals = {r["step"]: r["eval_loss"] for r in records(run.out, "eval_loss") if r["step"] > 2}
    assert weights(run.out) == weights(Path(run.out, f"step-{min(evals, key=evals.get)}"))


# ---------------------------------------------------------------- longer runs


@pytest.mark.full
def test_a_finished_run_goes_on_where_its_state_was_kept(narrow, tmp_path, capsys, monkeypatch):
    """Two and four steps more are six steps, while the rate is constant. One that is stopped then is resumed."""
    whole = options(narrow, tmp_path / "whole", "ram", schedule="constant", warmup=0.0, val="0.2", export="best")
    parts = replace(whole, out=str(tmp_path / "parts"), max_steps=2, keep_state=True)
    train(replace(whole, eval_every=every("2")))
    train(replace(parts, eval_every=every("2")))
    assert folder.resumable(parts.out)
    with pytest.raises(InputError, match="step 2.* --max-steps N"):
        train(cli.of_a_run({"resume": parts.out}))
    stopped(cli.of_a_run({"resume": parts.out, "max_steps": 6}), 4, monkeypatch)
    assert folder.latest(tmp_path) == Path(parts.out)
    train(cli.of_a_run({"resume": parts.out}))
    assert weights(parts.out) == weights(whole.out)
    assert losses(Path(parts.out)) == losses(Path(whole.out))
    assert "--max-steps 6" in capsys.readouterr().out


@pytest.mark.full
def test_a_finished_run_says_how_its_result_is_trained_further(narrow, tmp_path, monkeypatch):
    run = options(narrow, tmp_path / "out", "ram")
    train(replace(run, max_steps=1))
    for argv in (["--resume", run.out], [run.model, "--data", run.data[0], "--out", run.out]):
        with pytest.raises(InputError, match="To train its result further: (trireme .*) --keep-state") as refused:
            options_of = cli.parse(argv)[1]
            train(options_of)
    words = str(refused.value).partition("further: trireme ")[2].partition(". --keep-state")[0].split()
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "--max-steps", "1", "--seq-len", "64", "--out", "further"]) == 0


# ---------------------------------------------------------------- what must agree


@pytest.mark.parametrize(("change", "culprit"), [
    (dict(batch_size=8), "--batch-size"), (dict(seq_len=32), "--seq-len"), (dict(dtype="bf16"), "--dtype"),
    (dict(lora=4), "--lora"), (dict(val="0.2"), "--val"), (dict(seed=7), "--seed"),
    (dict(max_steps=1), "step 2"), (dict(micro_batch=2), "--micro-batch"),
    (dict(adam_bits=8), "--adam-bits"), (dict(method="classify"), "classify|score|label"),
])  # fmt: skip
def test_a_resumed_run_keeps_what_decides_its_bits(stopped_run, change, culprit):
    with pytest.raises(InputError, match=f"(?i){culprit}"):
        train(replace(stopped_run, resume=stopped_run.out, **change))


@pytest.fixture(scope="module")
def stopped_run(checkpoint):
    run = options(checkpoint, checkpoint / "stopped", "ram", batch_size=2, micro_batch=1)
    with pytest.MonkeyPatch.context() as m:
        stopped(run, 2, m)
    return run


def test_other_data_and_another_model_are_refused(stopped_run, checkpoint, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(Path(stopped_run.data[0]).read_text() + "More.\n")
    with pytest.raises(InputError, match="--data.* Restore it"):
        train(replace(stopped_run, resume=stopped_run.out, data=(str(other),)))
    model = tmp_path / "model"
    shutil.copytree(stopped_run.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(InputError, match=str(model)):
        train(replace(stopped_run, resume=stopped_run.out, model=str(model)))


@pytest.mark.full
def test_another_teacher_is_refused(checkpoint, tmp_path, monkeypatch):
    run = options(checkpoint, tmp_path / "out", "ram", teacher=str(checkpoint / "checkpoint"), top_k=4)
    stopped(run, 2, monkeypatch)
    other = shutil.copytree(run.teacher, tmp_path / "other")
    with pytest.raises(InputError, match=f"--teacher {other}"):
        train(replace(run, resume=run.out, teacher=str(other)))
    train(replace(run, resume=run.out))


@pytest.mark.full
def test_a_moved_run_goes_on(stopped_run, uninterrupted, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(stopped_run.out, moved)
    train(cli.of_a_run({"resume": str(moved)}))
    assert (weights(moved), losses(moved)) == uninterrupted


@pytest.mark.parametrize("name", ["step-3", "log.jsonl", ".run/best-2", ".run/store/files/a.safetensors"])
def test_a_link_in_a_run_is_refused_and_not_followed(stopped_run, tmp_path, name):
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    shutil.copytree(stopped_run.out, run)
    theirs.mkdir()
    (theirs / "model.safetensors").write_text("theirs")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(theirs)
    with pytest.raises(InputError, match=rf"{re.escape(name)} .*Remove it"):
        train(cli.of_a_run({"resume": str(run)}))
    assert (theirs / "model.safetensors").read_text() == "theirs"


def test_what_is_left_when_the_removal_of_a_run_is_killed_is_removed(stopped_run, tmp_path):
    """Its state.json is the last file."""
    run = tmp_path / "run"
    (run / ".run").mkdir(parents=True)
    shutil.copy(Path(stopped_run.out, "config.yaml"), run)
    with pytest.raises(InputError, match=str(run)):
        train(cli.of_a_run({"resume": str(run)}))
    assert not (run / ".run").exists()


def test_a_moved_input_is_named(stopped_run, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(stopped_run.out, copy)
    path = copy / "config.yaml"
    path.write_text(path.read_text().replace(stopped_run.data[0], "/nowhere/rows.txt"))
    with pytest.raises(InputError, match="/nowhere/rows.txt"):
        train(cli.of_a_run({"resume": str(copy)}))
    assert cli.of_a_run({"resume": str(copy), "data": [stopped_run.data[0]]}).data == stopped_run.data


def test_a_run_plans_as_its_dry_run(checkpoint, tmp_path):
    run = options(checkpoint, tmp_path / "out", "ssd")
    assert job.make(replace(run, dry_run=True)).plan == job.make(run).plan

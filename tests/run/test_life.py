"""The life of a run: what was killed is begun again, what is resumed is what it was, what is over leaves a checkpoint.

Nothing that a run has made is lost, nothing of another one is touched, and nothing that has changed goes unsaid.
"""

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import fork
from runs import ended, go, losses, options, stopped
from safetensors.numpy import load_file, save_file

from trireme.engine.data.tokens import Writer
from trireme.engine.data.dataset import Dataset
from trireme.engine.run import demo, job, live, loop, train
from trireme.engine.run.command import parse
from trireme.engine.run.options import Options, every
from trireme.engine.run.output import folder
from trireme.engine.run.train import finetune
from trireme.kernels import launch
from trireme.models.config import InputError
from trireme.storage import folders, snapshots, store
from trireme.storage.snapshots import FORMAT
from trireme.storage.untrusted import seal, unseal

pytestmark = pytest.mark.full


def killed(run: Options, of, name: str, call: int = 1, before: bool = True) -> None:
    """Starts a run in a process of its own that is killed before, or after, a call of `of.name`."""
    real, calls = getattr(of, name), []

    def fatal(*args, **kwargs):
        calls.append(name)
        if before and len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    pid = fork()
    if not pid:
        setattr(of, name, fatal)
        go(run)
    assert ended(pid) == -signal.SIGKILL


@pytest.fixture(scope="module")
def short(checkpoint) -> tuple[dict, bytes]:
    """Two steps that nothing disturbs: losses, weights."""
    run = two_steps(checkpoint, "two-steps")
    finetune(run)
    return result(run)


def two_steps(checkpoint: Path, name: str, elsewhere: bool = False) -> Options:
    """Options of a run into the folder `name`, perhaps with its store on another drive."""
    drive = (str(checkpoint / f"drive of {name}"),) * elsewhere
    return replace(options(checkpoint, checkpoint / name, "ssd", store=drive), max_steps=2)


def result(run: Options) -> tuple[dict, bytes]:
    return losses(Path(run.out)), (Path(run.out) / "model.safetensors").read_bytes()


RESULT = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json",
          "config.yaml", "log.jsonl", "log.csv", "loss.svg"}  # fmt: skip


def leaves_nothing_else(run: Options, drives: bool = False) -> bool:
    """`drives`: but the folders of its store, empty."""
    stay = all(os.path.exists(drive) and not os.listdir(drive) for drive in run.store)
    gone = not any(map(os.path.exists, run.store))
    return {path.name for path in Path(run.out).iterdir()} == RESULT and (stay if drives else gone)


BEFORE_A_STEP = {
    "its folder": (folder, "replace_synced", True),
    "config.yaml": (folder, "replace_synced", False),
    "half of its tokens": (Writer, "finish", True),
    "its tokens": (job, "load_dataset", False),
    "half of its store": (store.Store, "_copy_auxiliary", True),
    "its store": (train, "new_store", False),
    "its log": (live, "RunLog", False),
    "its engine": (live.Loader, "begin", False),
}


HOW = ("--resume", "the same command")  # in turn, and both of the first


@pytest.mark.parametrize(
    ("where", "how"), [("its folder", HOW[1]), *((where, HOW[i % 2]) for i, where in enumerate(BEFORE_A_STEP))]
)
def test_killed_before_its_first_step_it_is_begun_again(checkpoint, short, where, how, monkeypatch):
    """Killed as soon as it has what is named; tokens that are whole are used."""
    run = two_steps(checkpoint, f"{where} and {how}", elsewhere="half" in where)
    of, name, before = BEFORE_A_STEP[where]
    killed(run, of, name, before=before)
    if where not in list(BEFORE_A_STEP)[:3]:
        monkeypatch.setattr(Writer, "add", lambda *args: pytest.fail("made tokens again"))
    if how == "the same command":
        finetune(run)
    elif where == "its folder":
        with pytest.raises(InputError, match="no run in that folder .no config.yaml.. Begin one there: .* --out"):
            parse(["--resume", run.out])
        return
    else:
        finetune(parse(["--resume", run.out]))
    assert result(run) == short
    assert leaves_nothing_else(run)


IN_ITS_NEW_STORE = {
    "the old one is half removed": (folders, "version_files", True),
    "the old one is removed": (folders, "_refuse_others", True),
    "it has no name yet": (folders, "write_identity", True),
    "half of it has a name": (folders, "write_identity", False),
    "it is there": (train, "new_store", False),
}


@pytest.mark.parametrize("where", IN_ITS_NEW_STORE)
def test_killed_without_a_snapshot_it_is_begun_again_however_often(checkpoint, short, where):
    """It has said something of a step. Resumed, it makes its store anew, and is killed there."""
    drives = tuple(str(checkpoint / f"{half} drive when {where}") for half in ("one", "other"))
    run = replace(two_steps(checkpoint, f"often when {where}"), save_every=every("never"), store=drives)
    killed(run, loop, "train_step", call=2)
    assert folder.has_started(Path(run.out))
    of, name, before = IN_ITS_NEW_STORE[where]
    killed(replace(run, resume=run.out), of, name, before=before)
    finetune(replace(run, resume=run.out))
    assert result(run) == short
    assert leaves_nothing_else(run)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("where", ["before its store", "in its store", "after"])
def test_killed_in_its_last_clean_up_it_leaves_a_checkpoint_and_nothing_else(checkpoint, short, where, elsewhere):
    """After --resume; and the drive can be used again before it."""
    run = two_steps(checkpoint, f"over {where} {elsewhere}", elsewhere)
    of, name = {"before its store": (folders, "_erase"), "in its store": (folders, "let_go")}.get(where, (loop, "tidy"))
    killed(run, of, name)
    if elsewhere:
        again = replace(run, out=run.out + " again")
        finetune(again)
        assert result(again) == short
    with pytest.raises(InputError, match="that run is finished"):
        finetune(replace(run, resume=run.out))
    assert result(run) == short
    assert leaves_nothing_else(run, drives=elsewhere and where == "in its store")  # killed before it removed them


@pytest.mark.parametrize("fails", ["its store is in use", "Ctrl-C"])
def test_a_run_that_fails_takes_nothing_from_one_that_trains(checkpoint, uninterrupted, fails, monkeypatch):
    """Both are given the same --store. The second one begins first, and fails when the other one trains."""
    weights, seen = uninterrupted
    drive = checkpoint / f"of both {fails}"
    first = options(checkpoint, checkpoint / f"trains {fails}", "ssd", store=(str(drive),))
    second = replace(first, out=str(checkpoint / f"fails {fails}"))
    trains, failed = os.pipe(), os.pipe()
    load, step, pids = job.load_dataset, loop.train_step, []

    def step_by_step(e, micro, number, rate, *more, **named):
        if number == 2:  # there is no snapshot yet
            os.write(trains[1], b"!")
            os.read(failed[0], 1)
        return step(e, micro, number, rate, *more, **named)

    def meanwhile(*args):
        assert not drive.exists()
        pids.append(fork())
        if not pids[0]:
            job.load_dataset, loop.train_step = load, step_by_step
            go(first)
        os.read(trains[0], 1)
        if fails == "Ctrl-C":
            raise KeyboardInterrupt
        return load(*args)

    monkeypatch.setattr(job, "load_dataset", meanwhile)
    with pytest.raises((InputError, KeyboardInterrupt), match="in use by the run in|^$"):
        finetune(second)
    os.write(failed[1], b"!")
    assert ended(pids[0]) == 0
    assert not Path(second.out).exists()
    assert result(first) == (seen, weights)


def test_two_processes_are_not_at_one_run(checkpoint, monkeypatch):
    run = options(checkpoint, checkpoint / "once", "gpu")
    stopped(run, 3, monkeypatch)
    again, real = replace(run, resume=run.out), train.open_run

    def twice(*given):
        with pytest.raises(InputError, match="another process is at that run"):
            finetune(again)
        return real(*given)

    monkeypatch.setattr(train, "open_run", twice)
    stopped(again, 5, monkeypatch)


@pytest.fixture(scope="module")
def paused(checkpoint) -> Options:
    """A run that is stopped after its first step, to be copied and resumed."""
    run = options(checkpoint, checkpoint / "paused", "gpu")
    with pytest.MonkeyPatch.context() as m:
        stopped(run, 1, m)
    return run


def resumed(paused: Options, folder: Path, **more) -> Options:
    """The options with which a copy of that run in `folder` goes on."""
    out = folder / "run"
    shutil.copytree(paused.out, out)
    return replace(paused, out=str(out), resume=str(out), max_steps=2, **more)


LLAMA = 'the run began with "llama"'
MODELS = {
    "its rope_theta": (dict(rope_theta=5e4), "rope.theta of .* is 50000.0, the run began with 10000.0"),
    "its rms_norm_eps": (dict(rms_norm_eps=1e-6), "eps of .* is 1e-06, the run began with 1e-05"),
    "its rope_scaling": (
        dict(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        'rope.kind of .* is "linear", the run began with "default"',
    ),
    "its architecture": (dict(model_type="qwen2"), f'model_type of .* is "qwen2", {LLAMA}'),
    "its window": (dict(model_type="mistral", sliding_window=8), f'model_type of .* is "mistral", {LLAMA}'),
}


@pytest.mark.parametrize("change", MODELS)
def test_a_resumed_run_knows_its_model(paused, checkpoint, tmp_path, change):
    """Another model's mathematics go unnoticed by names and shapes; one line says what is different."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint / "checkpoint", model)
    config = json.loads((model / "config.json").read_text())
    changed, says = MODELS[change]
    (model / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(InputError, match=f"--resume .*{says}. Name the checkpoint that it began with"):
        finetune(resumed(paused, tmp_path, model=str(model)))


@pytest.mark.parametrize("change", ["width", "dtype", "tensor"])
def test_a_resumed_run_knows_its_checkpoints_tensors(paused, checkpoint, tmp_path, monkeypatch, change):
    model = tmp_path / "model"
    if change == "width":  # a model like any other, but not this one
        monkeypatch.setattr(demo, "WIDTH", 64)
        demo.make_checkpoint(model, checkpoint / "stories.txt", seed=1)
    else:
        shutil.copytree(checkpoint / "checkpoint", model)
        tensors = load_file(model / "model.safetensors")
        norm = tensors.pop("model.norm.weight")
        tensors |= {"model.norm.weight": norm.astype("float16")} if change == "dtype" else {}
        tensors |= {"model.norm.weight": norm, "model.rotary_emb.inv_freq": norm} if change == "tensor" else {}
        save_file(tensors, model / "model.safetensors")
    says = {
        "width": "width of .* is 64, the run began with 128",
        "dtype": r'model.norm.weight of .* is \["F16", 128\], the run began with \["F32", 128\]',
        "tensor": r'model.rotary_emb.inv_freq of .* is \["F32", 128\], the run began with missing',
    }[change]
    with pytest.raises(InputError, match=says):
        finetune(resumed(paused, tmp_path, model=str(model)))


def test_a_checkpoint_that_has_moved_is_the_same_model(paused, checkpoint, tmp_path, capsys):
    shutil.copytree(checkpoint / "checkpoint", tmp_path / "moved")
    finetune(resumed(paused, tmp_path, model=str(tmp_path / "moved")))
    assert f"changed  --model '{tmp_path}/moved', was '{checkpoint}/checkpoint' at step 1" in capsys.readouterr().out


FORGED = {
    "no step": (lambda said: said.pop("step"), " lacks 'step'"),
    "a step before the first": (lambda said: said.update(step=-1), ".step is -1, expected a whole number"),
    "options that are none": (lambda said: said.update(options=[]), ".options is a list, expected an object"),
    "a best of text": (lambda said: said.update(best=["1", 1]), r".best\[0\] is a string, expected a number or null"),
    "half a mark": (lambda said: said.update(log=[1]), ".log has 1 entries, expected 4"),
    "a day that is none": (lambda said: said.update(date="2026-02-30"), ".date is not a date"),
    "bytes without end": (lambda said: said.update(written=10**400), r".written is 1000+….*…0+, expected a whole"),
    "something more": (lambda said: said.update({"\x1b": 1}), r" has '\\\\x1b'"),
    "no batch size": (lambda said: said["cut"].pop("batch_size"), ".cut lacks 'batch_size'"),
    "no rows": (lambda said: said["cut"].update(rows=0), ".cut is not the one of its plan"),
    "rows that part no step": (lambda said: said["cut"].update(rows=1 << 40), ".cut is not the one of its plan"),
    "another record": (lambda said: said["cut"].update(record=1), ".cut is not the one of its plan"),
    "another dtype": (lambda said: said["cut"].update(dtype="F64"), ".cut is not the one of its plan"),
    "a plan that is none": (lambda said: said["cut"].update(plan={}), ".cut: not a plan: lacks 'units'"),
    "a plan of numbers": (lambda said: said["cut"]["plan"].update(window="2"), ".cut: plan: window is of type str"),
    "a plan of no unit": (lambda said: said["cut"]["plan"].update(units=[]), " was changed: the plan is for another"),
    "a tensor that no unit has": (
        lambda said: said["cut"]["plan"]["units"][1].update(saved=[["x", "gpu"]]), " was changed: unit 1 saves 'x'"
    ),
    "no config": (lambda said: said["cut"]["model"].pop("config"), ".cut.model lacks 'config'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_snapshot_is_one_line(paused, tmp_path, name):
    """Its checksum is right, what it says is not."""
    run, (forge, says) = resumed(paused, tmp_path), FORGED[name]
    (path,) = Path(run.out).glob("store/snapshot-*/manifest.json")
    content = unseal(path.read_bytes(), FORMAT, "manifest")
    forge(content["extra"])
    path.write_bytes(seal(FORMAT, content))
    with pytest.raises(InputError, match=f"--resume {run.out}: its snapshot{says}"):
        finetune(run)


CHANGES = {
    "--betas [0.8, 0.9], was [0.9, 0.95]": dict(betas=(0.8, 0.9)),
    "--weight-decay 0.5, was 0.01": dict(weight_decay=0.5),
    "--schedule 'linear', was 'cosine'": dict(schedule="linear"),
    "--max-grad-norm 3.0, was 1.0": dict(max_grad_norm=3.0),
    "--lr 2e-05, was 0.003": dict(lr=None),
    "--epochs 2.0, was not given": dict(epochs=2.0),
    "--gpu-memory '1073741823B', was '1073741824B'": dict(gpu_memory=(1 << 30) - 1),
}


def test_what_a_run_is_resumed_with_otherwise_is_said(paused, tmp_path, capsys):
    """Of what may change at all; what its config.yaml says and what the command line says alike."""
    more = {name: value for change in CHANGES.values() for name, value in change.items()}
    finetune(resumed(paused, tmp_path, **more))
    said = capsys.readouterr().out
    assert [change for change in CHANGES if f"changed  {change} at step 1\n" not in said] == []
    assert said.count("changed  --") == len(CHANGES) + 1
    assert "changed  --max-steps 2, was 6 at step 1\n" in said


def test_nothing_is_said_of_a_run_that_goes_on_as_it_was(paused, tmp_path, capsys):
    finetune(replace(resumed(paused, tmp_path), max_steps=paused.max_steps))
    assert "changed" not in capsys.readouterr().out


def test_other_libraries_than_those_of_the_snapshot_are_said(paused, tmp_path, capsys):
    """With them a run may take steps of other bits."""
    run = replace(resumed(paused, tmp_path), max_steps=paused.max_steps)
    (path,) = Path(run.out).glob("store/snapshot-*/manifest.json")
    content = unseal(path.read_bytes(), FORMAT, "manifest")
    now = f"torch {torch.__version__}, the CPU"
    assert content["extra"]["computed_by"] == now
    content["extra"]["computed_by"] = "torch 1.0.0, triton 2.0.0, NVIDIA Zero\x1b"
    path.write_bytes(seal(FORMAT, content))
    finetune(run)
    was = "torch 1.0.0, triton 2.0.0, NVIDIA Zero\\x1b"
    assert f"changed  {now}, was {was} at step 1: it may round differently\n" in capsys.readouterr().out


def test_launch_settings_are_part_of_a_snapshot(paused, tmp_path, monkeypatch, capsys):
    """A resumed run has those of its snapshot, while it trains."""
    run, used = replace(resumed(paused, tmp_path), max_steps=paused.max_steps), []
    (path,) = Path(run.out).glob("store/snapshot-*/manifest.json")
    content = unseal(path.read_bytes(), FORMAT, "manifest")
    assert content["extra"]["launches"] == {}
    begun = content["extra"]["launches"] = {"quantize": [64, 64, 4]}
    path.write_bytes(seal(FORMAT, content))
    monkeypatch.setattr(job, "common_launches", lambda group, device, launches, say: launches)
    monkeypatch.setattr(launch, "use", lambda settings: used.append(dict(settings)))
    finetune(run)
    assert used == [begun, {}]
    assert "1 kernel as tuned by check --tune\n" in capsys.readouterr().out


def test_a_digit_of_config_yaml_that_changed_is_said(paused, tmp_path, capsys):
    run = resumed(paused, tmp_path)
    path = Path(run.out) / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("lr: 0.003\n", "lr: 0.007\n").replace("max_steps: 6", "max_steps: 2"))
    finetune(parse(["--resume", run.out]))
    assert "changed  --lr 0.007, was 0.003 at step 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("damage", [b"\xb0", b""])
def test_a_run_whose_log_was_damaged_goes_on(paused, tmp_path, capsys, damage):
    """By one byte, which is no UTF-8, or all of it: with the same bits, and not without a word."""
    run, whole = resumed(paused, tmp_path / "damaged"), resumed(paused, tmp_path / "whole")
    finetune(whole)
    assert "log.jsonl is not as it was" not in capsys.readouterr().out
    path = Path(run.out) / "log.jsonl"
    path.write_bytes(damage and path.read_bytes().replace(b"loss", damage + b"oss", 1))
    finetune(run)
    assert "log.jsonl is not as it was at step 1: lines were lost or changed" in capsys.readouterr().out
    assert result(run)[1] == result(whole)[1]
    assert result(run)[0] == {2: result(whole)[0][2]}


def test_the_next_steps_rows_are_read_while_a_step_runs(checkpoint, tmp_path, monkeypatch):
    """By another thread, each once."""
    read, take = [], Dataset.step

    def step(data, i, *sizes):
        read.append((i, threading.current_thread().name))
        return take(data, i, *sizes)

    monkeypatch.setattr(Dataset, "step", step)
    finetune(replace(options(checkpoint, tmp_path / "out", "gpu"), max_steps=3))
    assert read == [(i, "ahead_0") for i in range(3)]


def test_the_log_is_on_the_drive_before_the_snapshot_that_counts_on_it(checkpoint, monkeypatch):
    """In a power failure the log goes back no further than the weights; nor after the store's end."""
    calls, log = [], str(checkpoint / "durable" / "log.jsonl")

    def noted(real, what, *args):
        of_log = isinstance(what, int) and os.readlink(f"/proc/self/fd/{what}") == log
        calls.extend([real.__name__] * (of_log or not isinstance(what, int)))
        return real(what, *args)

    for of, name in ((os, "fdatasync"), (snapshots, "write"), (folders, "remove")):
        monkeypatch.setattr(of, name, partial(noted, getattr(of, name)))
    finetune(replace(options(checkpoint, checkpoint / "durable", "gpu"), max_steps=4))
    assert calls.count("write") == 2
    for k, name in enumerate(calls):
        assert name == "fdatasync" or calls[k - 1] == "fdatasync", calls

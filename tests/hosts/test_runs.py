"""Whole runs on several hosts, processes of this machine: the files of one, killed, stopped, refused and resumed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import NARROW, alone, free_port, hold, losses, make_small
from runs import HostRun as Run
from script_files import ROOT

from trireme.engine.gradients import SharedGradients
from trireme.engine.queues import watchdog
from trireme.engine.run import cli, job, planning, state
from trireme.engine.run.evaluate import Evaluator
from trireme.engine.run.folder import Folder
from trireme.storage.files import StoreError
from trireme.storage.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a checkpoint and its text. Planned here first, so that hosts, which are forked, know what a block takes."""
    where = make_small(tmp_path_factory.mktemp("hosts"), **NARROW)
    job.make(cli.parse(command(where, where / "planned"))[1])
    return where


def command(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        *(str(folder / "checkpoint"), "--data", str(folder / "stories.txt"), "--out", str(out), "--seq-len", "64"),
        *("--batch-size", "4", "--micro-batch", "1", "--max-steps", "5", "--lr", "3e-3", "--save-every", "2"),
        *("--val", "0.1", "--eval-every", "2", "--device", "cpu", "--ram", "1GiB", "--gpu-memory", "64MiB", *more),
    ]


@pytest.fixture(scope="module")
def whole(folder):
    """The folder of a run on one host."""
    assert alone(command(folder, folder / "whole")) == [0]
    return folder / "whole"


def same(out: Path, whole: Path) -> bool:
    assert losses(out) == losses(whole)
    assert evals(out) == evals(whole)
    assert not [path for path in out.iterdir() if path.is_dir()]
    return (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def evals(out: Path) -> list[str]:
    return re.findall(r'"eval_loss": [\d.e-]+', (out / "log.jsonl").read_text())


@pytest.mark.full
def test_torchrun_begins_hosts(folder, whole):
    """The program itself: processes of this machine, of which one speaks for all."""
    out, drive = folder / "by-torchrun", folder / "drive"
    begin = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    begin += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", str(ROOT / "scripts" / "finetune.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [*begin, *command(folder, out, "--store", str(drive))]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("on each host") == done.stdout.count("\noutput ") == 1
    assert same(out, whole)
    assert not drive.exists() or not any(drive.iterdir())  # one host made it, and may end before another


@pytest.mark.full
@pytest.mark.parametrize("what", [(), ("--lora", "4", "--merge")], ids=["checkpoint", "adapters"])
def test_fp32_masters_that_hosts_share_are_written_as_by_one(folder, what, monkeypatch):
    """Where steps compute in bf16; the best weights, too, which are in RAM while steps go on."""
    real, of_steps = Evaluator.loss, cycle([9.0, 5.0, 3.0, 4.0])
    monkeypatch.setattr(Evaluator, "loss", lambda *args: (next(of_steps), real(*args)[1]))
    outs = [folder / f"masters-{hosts}-{len(what)}" for hosts in (1, 2)]
    more = "--dtype", "bf16", "--max-steps", "3", "--export-every", "2", "--eval-every", "1", "--export", "best", *what
    argvs = [command(folder, out, *more) for out in outs]
    assert alone(argvs[0]) == [0]
    run = Run(outs[1], 2, argvs[1])
    assert run.ended() == [0, 0], run.errors()
    written = {path.relative_to(outs[0]) for path in outs[0].rglob("*.safetensors")}
    assert {path.parent.name for path in written} >= {"", "step-2", *["merged"] * bool(what)}
    for path in written:
        assert (outs[0] / path).read_bytes() == (outs[1] / path).read_bytes(), path


@pytest.mark.full
def test_a_host_that_is_lost_ends_all_within_a_minute_and_nothing_is_lost(folder, whole):
    """One that hangs is noticed later (test_group.py), and ends all in the same way."""
    out = folder / "lost"
    run = Run(out, 2, command(folder, out), lambda host: host < 1 or hold(4))
    run.reach(3)
    begun = time.monotonic()
    run.kill(1, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(run.processes.pids[0], 0)[1])
    assert code == 4
    assert time.monotonic() - begun < 60
    os.waitpid(run.processes.pids[1], 0)
    assert "host 1" in run.errors()[0]
    assert run.errors()[0].endswith(f"--resume {out}")
    again = Run(out, 2, ["--resume", str(out)])
    assert again.ended() == [0, 0], again.errors()
    assert same(out, whole)


def full_disk(host: int) -> None:
    """Host 1 cannot save step 4."""
    real = Store.commit

    def commit(store, step, *args):
        if host == 1 and step == 4:
            raise StoreError(28, "No space left on device", "/there")
        return real(store, step, *args)

    Store.commit = commit


@pytest.mark.full
def test_where_one_host_cannot_save_no_hosts_snapshot_advances(folder, whole):
    out = folder / "full"
    run = Run(out, 2, command(folder, out), full_disk)
    assert run.ended() == [4, 4]
    assert all("host 1: /there" in line for line in run.errors())
    assert all(line.endswith(f"--resume {out}") for line in run.errors())
    assert [len(snapshots(at)) for at in (out / ".run", out / ".run" / "host-1")] == [2, 1]  # host 0 kept step 2
    again = Run(out, 2, ["--resume", str(out)])
    assert again.ended() == [0, 0], again.errors()
    assert "resumed at step 2" in again.said[0].read_text()
    assert same(out, whole)


def hanging_drive(host: int) -> None:
    """Host 1's drive hangs in the snapshot of step 4, while host 0 waits for its answer."""
    stuck, real = threading.Event(), Store.commit

    class Left(threading.Event):
        def wait(self, seconds):
            return not stuck.wait(120) or super().wait(seconds)

    def commit(store, step, *args):
        if host == 1 and step == 4:
            stuck.set()
            threading.Event().wait()
        return real(store, step, *args)

    Store.commit = commit
    watchdog.threading = SimpleNamespace(Event=Left, Thread=threading.Thread)
    state.patience = lambda step_s: 0.5


def failing_queue(host: int) -> None:
    """Host 0 fails where its last sum leaves, when it waits already for the norm, which host 1 has by all sums."""
    real = SharedGradients.finish

    def fail() -> None:
        time.sleep(1)
        raise StoreError(5, "Input/output error", "/there")

    def finish(self, u):
        if host == 0 and u == 0:
            self.queues.run("sum_out", "other", "sum", fail)
        real(self, u)

    SharedGradients.finish = finish


def small_drive(host: int) -> None:
    """Host 1's drive has no room for the output."""
    if host == 1:
        usage = shutil.disk_usage("/")._replace(free=0)
        shutil.disk_usage = lambda path: usage


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "reason", "codes"),
    [(hanging_drive, "host 1: ", [4, 4]), (failing_queue, "host 0: /there", [4, 4]), (small_drive, "host 1: ", [4, 3])],
)
def test_what_fails_while_a_host_waits_for_another_ends_all(folder, fault, reason, codes):
    out = folder / fault.__name__
    run = Run(out, 2, command(folder, out), fault)
    assert run.ended() == codes
    assert any(reason in line for line in run.errors())
    shutil.rmtree(out, ignore_errors=True)


@pytest.fixture(scope="module")
def stopped(folder):
    """The folder of a run of two hosts, asked to stop in its third step, and saved by both."""
    out = folder / "stopped"
    run = Run(out, 2, command(folder, out), lambda host: host < 1 or hold(3))
    run.reach(2)
    run.kill(1, signal.SIGTERM)
    assert run.ended() == [130, 130], run.errors()
    return out


@pytest.mark.full
def test_asked_to_stop_all_save_the_same_step_and_as_many_go_on(stopped, whole):
    out = stopped
    assert snapshots(out / ".run")[0] == snapshots(out / ".run" / "host-1")[0]
    resume = ["--resume", str(out)]
    part, aside = out / ".run" / "host-1", out.with_name("aside")
    part.rename(aside)
    assert "host 1" in refused(out, 2, resume)
    for hosts in (1, 3):
        assert "2 hosts" in refused(out, hosts, resume)
    shutil.rmtree(part, ignore_errors=True)
    aside.rename(part)
    again = Run(out, 2, resume)
    assert again.ended() == [0, 0], again.errors()
    assert same(out, whole)


def snapshots(at: Path) -> list[str]:
    return sorted(path.name for path in at.glob("store/snapshot-*"))


def killed_at_its_end(host: int) -> None:
    """Host 1, once the checkpoint is written, before it has removed its store."""
    if host == 1:
        Folder.finish = lambda *args: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_what_a_host_leaves_that_was_killed_at_its_end_is_removed(folder):
    out, drive = folder / "end", folder / "end-drive"
    run = Run(out, 2, command(folder, out, "--store", str(drive), "--max-steps", "2"), killed_at_its_end)
    assert run.ended() == [4, -signal.SIGKILL], run.errors()
    assert str(out) in refused(out, 2, ["--resume", str(out)])
    assert not drive.exists() or not any(drive.iterdir())  # one host made it, and may end before another
    assert not [path for path in out.iterdir() if path.is_dir() or path.name.startswith(".")]


def other_gpu(host: int) -> None:
    """One host's driver is broken, say."""
    if host == 1:
        planning.model_of = lambda device: "another"


def refused(out: Path, hosts: int, argv, changed=lambda host: None) -> str:
    """The error of the host that has one of its own."""
    run = Run(out, hosts, argv, changed)
    codes = run.ended()
    assert 2 in codes, run.errors()
    assert set(codes) <= {2, 4}
    assert all(path.read_text().count("error: ") == 1 for path in run.said), run.errors()
    return run.errors()[codes.index(2)]


@pytest.mark.full
def test_what_hosts_have_is_compared_before_anything_is_written(folder):
    out, argv = folder / "refused", command(folder, folder / "refused")
    rate = lambda host: ["4e-3" if host and word == "3e-3" else word for word in argv]
    trials = {"lr": (rate, lambda host: None), "GPUs": (argv, other_gpu)}
    for culprit, (given, changed) in trials.items():
        said = refused(out, 2, given, changed)
        assert "host 1" in said
        assert culprit in said
    assert not [path for path in out.rglob("*") if path.is_file()]

"""The end of a run: the last weights or the best, early or asked for, once or twice."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command import TRAIN, fails
from runs import records
from safetensors.numpy import load_file, save_file

from trireme import __main__ as entry
from trireme.engine.exchange import Exchange
from trireme.engine.planner.forecast import Forecast
from trireme.engine.run import evaluation, live, loop, signals, train
from trireme.engine.run import main as finetune
from trireme.engine.run.options import Options
from trireme.engine.run.output.folder import reopen
from trireme.engine.run.screen import Screen
from trireme.engine.run.signals import NOTICES, STOPS, Stop, stop_signals
from trireme.storage.checkpoint import open_source
from trireme.storage.files import StoreError

pytestmark = pytest.mark.grid

EVALUATED = [*TRAIN[:-1], "6", "--val", "0.2", "--eval-every", "1", "--save-every", "2"]


@pytest.fixture
def losses(monkeypatch):
    """Evaluations find these losses, by step."""
    found = {0: 9.0, 1: 5.0, 2: 3.0, 3: 4.0, 4: 5.0, 5: 6.0, 6: 7.0}
    loss = lambda self, _: (found[self.live.progress.step], {})
    monkeypatch.setattr(evaluation.Evaluation, "_loss", loss)
    return found


def said(capsys, *argv: str, code: int = 0) -> str:
    assert finetune.main([*argv]) == code
    return capsys.readouterr().out


def weights(folder: str) -> dict:
    return {name: value.tobytes() for name, value in load_file(Path(folder, "model.safetensors")).items()}


def at_step_two(capsys) -> dict:
    """The weights that a run of the same schedule had after step 2."""
    said(capsys, *EVALUATED, "--out", "two", "--export-every", "2")
    return weights("two/step-2")


def test_a_best_that_cannot_be_written_comes_after_the_snapshot(here, losses, capsys, monkeypatch):
    """--out is full, --store has room: the steps are kept, and the best is made again of them."""
    said(capsys, *EVALUATED, "--export", "best", "--out", "whole")
    real = live.replace_best

    def full(out, save, best):
        raise StoreError(errno.ENOSPC, "No space left on device", str(out))

    monkeypatch.setattr(live, "replace_best", full)
    argv = [*EVALUATED, "--export", "best", "--store", "other", "--out", "out"]
    said(capsys, *argv, code=4)
    assert [path.name[-6:] for path in Path("other").glob("snapshot-*")] == ["step-2"]
    assert not Path("out/best").exists()
    monkeypatch.setattr(live, "replace_best", real)
    out = said(capsys, "--resume", "out")
    assert "resumed at step 2" in out
    assert "at step 2: it is written again from the snapshot" in out
    assert weights("out") == weights("whole")


def test_the_best_is_exported(here, losses, capsys):
    two = at_step_two(capsys)
    report = said(capsys, *EVALUATED, "--export", "best")
    assert weights("out") == two != weights("two")
    assert "best     the output: eval_loss 3.0000, perplexity 20.09, at step 2\n" in report
    assert "warning" not in report
    assert "\nsample " not in report
    assert not Path("out/best").exists()
    reopen(open_source("model"), Path("out"))


@pytest.mark.full
def test_without_hard_links_the_best_is_copied_and_synced(here, losses, capsys, monkeypatch):
    def refuse(self, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    two, synced, real = at_step_two(capsys), [], os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(Path, "hardlink_to", refuse)
        patch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name) or real(fd))
        said(capsys, *EVALUATED, "--export", "best")
    assert weights("out") == two
    assert synced.count(".model.safetensors.partial") == 2  # in out/best, and in out


@pytest.mark.full
def test_the_last_is_exported_and_the_best_kept(here, losses, capsys):
    report = said(capsys, *EVALUATED, "--export-every", "2")
    best = "best     out/best, to be the output by --export best: eval_loss 3.0000, perplexity 20.09, at step 2"
    assert f"{best}; the output: eval_loss 7.0000, perplexity 1097, at step 6\n" in report
    assert weights("out/best") == weights("out/step-2") != weights("out") == weights("out/step-6")
    assert sorted(p.name for p in Path("out").glob("step-*")) == ["step-2", "step-4", "step-6"]
    for folder in ("out", "out/step-4", "out/best"):
        reopen(open_source("model"), Path(folder))


@pytest.fixture
def written(monkeypatch):
    """(step, folder) of checkpoints as they are written."""
    found, save = [], Exchange.save

    def saved(self, folder, progress):
        found.append((len(records("out", "loss")), folder.name))
        return save(self, folder, progress)

    monkeypatch.setattr(Exchange, "save", saved)
    return found


BEST = "best.new"


@pytest.mark.full
@pytest.mark.parametrize(("last", "export", "save", "when"), [
    (7.0, "last", "never", [(6, "out"), (6, BEST)]),
    (7.0, "best", "never", [(6, "out")]),
    (2.0, "last", "never", [(6, "out")]),
    (7.0, "last", "2", [(2, BEST), (6, "out")]),
    (7.0, "best", "2", [(2, BEST)]),
    (2.0, "last", "2", [(2, BEST), (6, BEST)]),
])  # fmt: skip
def test_the_best_is_written_with_snapshots_and_at_the_end(here, losses, capsys, written, last, export, save, when):
    """Not with each evaluation, of which that of step 1 is better too; and nothing twice."""
    losses[6] = last
    said(capsys, *EVALUATED[:-1], save, "--export", export)
    assert written == when
    assert Path("out/best").exists() == (last == 7.0 and export == "last")
    assert Path("out/model.safetensors").exists()


@pytest.mark.full
def test_without_room_for_it_the_best_is_written_at_once(here, losses, capsys, written, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Forecast, "kept", 0)
        said(capsys, *EVALUATED)
    assert written == [(1, BEST), (2, BEST), (6, "out")]
    assert weights("out/best") == at_step_two(capsys)


@pytest.mark.full
def test_a_run_that_diverges_leaves_its_best(here, losses, capsys, monkeypatch):
    """Again it would diverge again."""
    step = loop.train_step
    bad = lambda e, micro, n, *more: replace(step(e, micro, n, *more), **({"loss": float("nan")} if n == 4 else {}))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", bad)
        said(capsys, *EVALUATED[:-1], "never", code=2)
    assert weights("out/best") == at_step_two(capsys)


@pytest.mark.full
def test_the_last_is_written_once_where_it_is_the_best(here, losses, capsys):
    losses[6] = 2.0
    said(capsys, *EVALUATED)
    assert not Path("out/best").exists()
    last = weights("out")
    losses[6] = 7.0
    said(capsys, *EVALUATED[:-2], "--out", "again")
    assert last == weights("again")


@pytest.mark.full
def test_adapters_too(here, losses, capsys):
    said(capsys, *EVALUATED, "--lora", "2", "--export-every", "2", "--out", "two")
    said(capsys, *EVALUATED, "--lora", "2", "--export", "best", "--merge")
    adapter = lambda folder: Path(folder, "adapter_model.safetensors").read_bytes()
    assert adapter("out") == adapter("two/step-2") != adapter("two")
    assert Path("out/merged/model.safetensors").exists()


def in_f16() -> None:
    weights = {name: value.astype("float16") for name, value in load_file("model/model.safetensors").items()}
    save_file(weights, "model/model.safetensors")


ONE_STEP = [*TRAIN[:-1], "1", "--warmup", "0", "--schedule", "constant"]


@pytest.mark.full
def test_what_f16_cannot_hold_is_said(here, capsys):
    in_f16()
    report = said(capsys, *ONE_STEP, "--lr", "1e5", "--max-grad-norm", "0")
    assert re.search(r"warning: out: [\d,]+ values of \d+ tensors, as \S+, beyond 65,504, the largest of F16", report)
    assert all(np.isfinite(value).all() for value in load_file("out/model.safetensors").values())


@pytest.mark.full
def test_adapters_that_cannot_be_added_are_the_output_all_the_same(here, capsys):
    in_f16()
    report = said(capsys, *ONE_STEP, "--lr", "100", "--lora", "2", "--merge", "--lora-alpha", "1e6")
    assert re.search("warning: not merged: model.layers.0.* values are beyond F16", report)
    assert "; PeftModel.from_pretrained(" in report
    assert not Path("out/merged").exists()
    assert not Path("out/store").exists()


@pytest.mark.full
@pytest.mark.parametrize("export", ["best", "last"])
def test_where_nothing_got_better_the_best_of_what_was_trained_is_exported_with_a_warning(here, losses, capsys, export):
    """Of `--export last` the warning is of the last."""
    losses[0] = 1.0
    report = said(capsys, *EVALUATED, "--export", export, "--export-every", "2")
    step, output = (2, "3.0000, perplexity 20.09") if export == "best" else (6, "7.0000, perplexity 1097")
    warned = f"warning: on --val the output, eval_loss {output}, at step {step}, is not better than the model before"
    assert report.index(warned) < report.index("\ndone     ")
    assert "\nstep 2  eval_loss 3.0000  perplexity 20.09 (best, not better than 1.0000 before training)" in report
    assert weights("out") == weights(f"out/step-{step}")


@pytest.mark.full
def test_a_loss_that_is_no_number_is_no_best(here, losses, capsys):
    losses.update({1: float("nan"), 2: float("nan"), 3: float("nan")})
    assert "best     the output: eval_loss 5.0000, perplexity 148.4, at step 4" in said(
        capsys, *EVALUATED, "--export", "best"
    )


@pytest.mark.full
@pytest.mark.parametrize(("patience", "step"), [("1", 3), ("2", 4), ("9", 6)])
def test_patience_ends_the_run(here, losses, capsys, patience, step):
    report = said(capsys, *EVALUATED, "--patience", patience, "--export", "best")
    assert (f"stopped  at step {step} of 6: {patience} evaluation" in report) == (step < 6)
    assert f"done     {step} steps" in report
    assert "eval_loss 3.0000, perplexity 20.09, at step 2" in report


@pytest.mark.full
def test_patience_counts_from_the_start(here, losses, capsys):
    losses[0] = 1.0
    report = said(capsys, *EVALUATED, "--patience", "2")
    assert "stopped  at step 2 of 6: 2 evaluations without a lower eval_loss" in report


@pytest.mark.full
def test_patience_goes_on_counting_where_a_run_is_resumed(here, losses, capsys, monkeypatch):
    ask, evaluate = signal.raise_signal, evaluation.Evaluation.run_if_due

    def stop(self, final=False):
        evaluate(self, final)
        if self.live.progress.step == 3:
            ask(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.Evaluation, "run_if_due", stop)
        said(capsys, *EVALUATED, "--patience", "2", code=130)
    assert "stopped  at step 4 of 6: 2 evaluations" in said(capsys, "--resume", "out")


@pytest.mark.parametrize("option", [["--export", "best"], ["--patience", "3"]])
def test_without_held_out_data_there_is_no_best(here, capsys, option):
    assert f"{' '.join(option)} needs the loss on held-out data. Give --val." in fails(capsys, here, *TRAIN, *option)


def test_the_log_has_the_time_the_sample_and_the_seconds(here, losses, capsys):
    began = time.time()
    said(capsys, *EVALUATED)
    found = records("out")
    assert all(began - 1 <= r["wall_time"] <= time.time() for r in found)
    evals = [r for r in found if "eval_loss" in r]
    assert all(r["eval_time_s"] >= 0 and r["sample"] for r in evals)
    assert "wall_time" in Path("out/log.csv").read_text().splitlines()[0]


@pytest.mark.full
def test_the_picture_marks_the_best(here, losses, capsys):
    said(capsys, *EVALUATED)
    picture = Path("out/loss.svg").read_text()
    assert "<title>best: 3 at step 2</title>" in picture
    assert "best 3 at step 2</text>" in picture


# ---------------------------------------------------------------- asked to stop

PROGRAM = """
import os, signal, sys
from trireme.engine.run.screen import Screen
from trireme.engine.run.signals import Stop, stop_signals
numbers, together = eval(sys.argv[1]), sys.argv[2] == "together"
for n in numbers:
    signal.signal(n, signal.SIG_DFL)  # the tests may have been started without a terminal
tell = lambda line: print(line, file=sys.stderr)
with stop_signals(lambda n: tell(f"first {n}"), lambda: tell("second")):
    if together:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for n in numbers:
        os.kill(os.getpid(), n)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    print("goes on")
"""
INT, TERM, HUP, USR1, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize("how", ["apart", "together"])
@pytest.mark.parametrize(
    ("numbers", "ends"),
    [
        ([INT], False),
        ([HUP], False),
        ([TERM, HUP], False),
        ([HUP, TERM], False),
        ([INT, TERM], True),
        ([HUP, INT, TERM], True),
        ([TERM, HUP, INT], True),
        ([USR1], False),
        ([USR2, USR2, TERM], False),
        ([USR1, TERM, INT], True),
    ],
)
def test_who_insists(numbers, ends, how):
    command = [sys.executable, "-c", PROGRAM, str([int(n) for n in numbers]), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "goes on" in done.stdout) == ((130, False) if ends else (0, True)), done.stderr
    assert done.stderr.count("first") == 1
    assert ("second" in done.stderr) == ends
    order = sorted(numbers) if how == "together" else numbers
    heard = order[0] in NOTICES and any(n not in NOTICES for n in order)  # a request after a notice is answered
    assert ("\n  already stopping; again: exit immediately\n" in done.stderr) == heard


@pytest.mark.parametrize(
    ("number", "again"), [(INT, "; again: exit immediately"), (TERM, "; again: exit immediately"), (USR1, "")]
)
def test_what_a_second_signal_does_is_said(number, again, capsys):
    stop = Stop(9, Screen(io.StringIO()), lambda: "")
    stop.begins(3)
    stop.ask(number)
    assert capsys.readouterr().err == f"\n  finishing step 3 and saving{again}\n"


@pytest.mark.parametrize(("number", "again"), [(INT, "; again: exit immediately"), (USR1, "")])
def test_what_a_second_signal_does_while_loading_is_said(number, again, capsys):
    loading = SimpleNamespace(screen=Screen(io.StringIO()), load=lambda _: signal.raise_signal(number))
    with pytest.raises(KeyboardInterrupt):
        train._load(loading)
    assert capsys.readouterr().err == f"\n  leaving{again}\n"


@pytest.mark.parametrize("number", [INT, TERM])
def test_after_a_notice_a_signal_is_answered(number, capsys, monkeypatch):
    """In the last step too, which goes on to the end; the next one leaves. What is saved stays the same step."""
    monkeypatch.setattr(signals.os, "_exit", lambda code: print(code, file=sys.stderr))
    for last in (9, 3):
        stop = Stop(last, Screen(io.StringIO()), lambda: "all lost")
        stop.begins(3)
        with stop_signals(stop.ask, stop.insist):
            signal.raise_signal(USR1)
            stop.begins(4)
            signal.raise_signal(USR2)
            assert capsys.readouterr().err == "\n  finishing step 3 and saving\n"
            signal.raise_signal(number)
            assert capsys.readouterr().err == "\n  already stopping; again: exit immediately\n"
            signal.raise_signal(HUP)
            assert not capsys.readouterr().err
            signal.raise_signal(number)
            assert capsys.readouterr().err.startswith("\nexited immediately. all lost\n")
        assert stop.last == 3


def test_afterwards_all_is_as_before():
    before = signal.getsignal(INT)
    with stop_signals(str, str):
        assert signal.getsignal(INT) is not before
    assert signal.getsignal(INT) is before


@pytest.mark.parametrize(("numbers", "ends"), [([INT, INT], True), ([USR1, TERM], False), ([TERM, HUP], False)])
def test_a_signal_while_the_first_unwinds_is_the_second(numbers, ends, monkeypatch):
    said = []
    monkeypatch.setattr(signals.os, "_exit", said.append)
    with stop_signals(lambda _: said.append("outer"), lambda: said.append("second")):
        with stop_signals(lambda _: said.append("first"), str):
            signal.raise_signal(numbers[0])
        signal.raise_signal(numbers[1])
    assert said == (["first", "second", 130] if ends else ["first"])


def test_at_its_end_the_command_shows_no_traceback(monkeypatch):
    """Nor does it begin to save: what is left to do is the interpreter's."""
    ended, later, before = [], [], {n: signal.getsignal(n) for n in STOPS}
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    monkeypatch.setattr(signals.atexit, "register", later.append)
    monkeypatch.setattr(finetune, "main", lambda *_: 3)
    monkeypatch.setattr(sys, "argv", ["trireme", "--demo"])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    try:
        assert finetune.command() == 3
        for n in (INT, TERM):
            signal.raise_signal(n)
        later[0]()
        signal.raise_signal(TERM)
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert ended == [3, 3]


def test_ctrl_c_while_modules_are_imported_is_no_traceback():
    """Before the command has handlers of its own, the process is ended."""
    before = signal.getsignal(INT)
    try:
        for given, now in (
            (signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)
        ):  # fmt: skip
            signal.signal(INT, given)
            assert entry.loaded() is finetune.command
            assert signal.getsignal(INT) == now
    finally:
        signal.signal(INT, before)


def test_an_interrupt_within_a_callback_is_not_lost(capsys, monkeypatch):
    class Thing:
        def __del__(self):
            raise KeyboardInterrupt

    left = []
    monkeypatch.setattr(finetune.os, "_exit", left.append)
    monkeypatch.setattr(sys, "__unraisablehook__", lambda _: None)
    monkeypatch.setattr(sys, "unraisablehook", finetune.unraisable)
    Thing()
    assert left == [130]
    assert capsys.readouterr().err == "exited immediately\n"


def test_from_python_in_any_thread(here):
    """Signals belong to the main thread; the run is what is returned."""
    given = Options(model="model", data="stories.txt", out="out", seq_len=64, max_steps=2)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(train.finetune, given).result()
    assert (run.progress.step, run.log.totals.steps) == (2, 2)
    assert (here / "out" / "model.safetensors").exists()


def test_output_that_is_given_up_keeps_no_descriptor(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=lambda: os.write(-1, b""), fileno=stream.fileno))
        before = os.listdir("/proc/self/fd")
        finetune.give_up_output()
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
        assert os.listdir("/proc/self/fd") == before

"""Resume: what a run goes on with, what it refuses, and what is on the drive by then. Killed runs: test_kills.py."""

import json
import os
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import write_plan
from runs import STEPS, child, ended, hold, losses, make_small, options, records, stopped

from trireme.engine import exchange
from trireme.engine.between import READ_AHEAD
from trireme.engine.placement import Placement
from trireme.engine.plan import DoesNotFit, Plan, UnitPlan
from trireme.engine.planner.clock import Clock
from trireme.engine.planner.forecast import Forecast
from trireme.engine.run import engine as run_engine
from trireme.engine.run import evaluation, job, live, loop, train
from trireme.engine.run.begin.snapshot import LATER
from trireme.engine.run.job import prepare
from trireme.engine.run.live import Progress
from trireme.engine.run.loop import Interrupted
from trireme.engine.run.options import Options, every
from trireme.engine.run.signals import stop_signals
from trireme.engine.run.train import finetune
from trireme.models.config import InputError
from trireme.storage.files import StoreError

pytestmark = pytest.mark.full


@pytest.mark.parametrize("where", ["in a step", "in an evaluation", "in the first evaluation"])
def test_what_is_finished_is_what_was_said(checkpoint, where, monkeypatch, capsys):
    """Asked to stop in step 3, or in the evaluation after it."""
    run = options(checkpoint, checkpoint / where.replace(" ", "-"), "gpu", val="0.1", eval_every=every("3"))
    at = {"in a step": (loop, "train_step", 3), "in an evaluation": (evaluation.Evaluation, "_run", 2)}
    of, name, due = at.get(where, (evaluation.Evaluation, "_run", 1))
    real, made = getattr(of, name), []

    def asked(*args):
        made.append(name)
        if len(made) == due:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(of, name, asked)
    with pytest.raises(Interrupted):
        finetune(run)
    said, step = capsys.readouterr(), 0 if "first" in where else 3
    assert f"finishing step {step} and saving" in said.err
    assert f"at step {step}. Resume" in said.out


def evaluations(out: Path) -> dict[int, float]:
    return {r["step"]: r["eval_loss"] for r in records(out, "eval_loss")}


@pytest.mark.parametrize("stop", ["before an evaluation", "in an evaluation", "after a snapshot"])
def test_the_best_of_a_resumed_run_is_the_best(checkpoint, stop, monkeypatch):
    """The model gets worse after step 4, where a snapshot and an evaluation fall together."""
    run = options(checkpoint, checkpoint / "never-stopped", "gpu", val="0.1", eval_every=every("2"))
    worse = lambda step, *_: 3e-3 if step <= 4 else 0.5
    monkeypatch.setattr(loop, "learning_rate", worse)
    if not (checkpoint / "never-stopped").exists():
        finetune(run)
    before = checkpoint / "never-stopped"
    assert min(evaluations(before), key=evaluations(before).get) == 4

    out, made = checkpoint / f"best-{stop}", []
    of, name = {
        "before an evaluation": (evaluation.Evaluation, "run_if_due"),
        "in an evaluation": (evaluation.Evaluation, "_run"),
    }.get(stop, (train.Live, "save"))
    real = getattr(of, name)

    def asked(self, *args):
        made.append(getattr(self, "live", self).progress.step)
        if stop == "after a snapshot":
            real(self, *args)
        if made[-1] == 4 and made.count(4) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args)

    monkeypatch.setattr(of, name, asked)
    with pytest.raises(Interrupted):
        finetune(replace(run, out=str(out)))
    monkeypatch.setattr(of, name, real)
    finetune(replace(run, out=str(out), resume=str(out)))
    assert evaluations(out) == evaluations(before)
    assert losses(out) == losses(before)
    assert (out / "best" / "model.safetensors").read_bytes() == (before / "best" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("room", [True, False], ids=["in RAM", "on the drive"])
def test_a_best_that_no_snapshot_has_is_lost_and_found_again(checkpoint, room, monkeypatch, capsys):
    """Killed once step 5 was the best: a run goes on with the best of step 4, as the snapshot says."""
    often = dict(eval_every=every("1"), export_every=every("4"), export="best")
    run = replace(options(checkpoint, checkpoint / f"kept-{room}", "gpu", val="0.1", **often), save_every=every("4"))
    if not room:
        monkeypatch.setattr(Forecast, "kept", 0)
    loss = {step: abs(step - 5.0) for step in range(STEPS + 1)}
    monkeypatch.setattr(evaluation.Evaluation, "_loss", lambda self, _: (loss[self.live.progress.step], {}))
    finetune(run)
    killed, keep = replace(run, out=f"{run.out}-killed"), live.Live.keep_best

    def kept(self):
        keep(self)
        if self.progress.step == 5:
            os._exit(9)

    with monkeypatch.context() as m:
        m.setattr(live.Live, "keep_best", kept)
        assert ended(child(killed)) == 9
    read = lambda out, folder: Path(out, folder, "model.safetensors").read_bytes()
    assert read(killed.out, "best" if room else "best.old") == read(run.out, "step-4")
    other = f"{killed.out}-otherwise"
    shutil.copytree(killed.out, other)
    finetune(replace(killed, resume=killed.out))
    assert read(killed.out, ".") == read(run.out, ".") != read(run.out, "step-4")
    assert not list(Path(killed.out).glob("best*"))
    capsys.readouterr()
    finetune(replace(killed, out=other, resume=other, eval_every=every("never"), max_steps=6, lr=0.5))
    assert "the output: eval_loss 1.0000, perplexity 2.718, at step 4" in capsys.readouterr().out
    assert read(other, ".") == read(run.out, "step-4")


def check_randomness(checkpoint, monkeypatch, option, more, weights, step, off) -> Path:
    """The same wherever weights are, however a step is cut and after a resume; evaluations have none.

    `option` makes a run random, as losses of `step` show; of micro-batches of another size they are off by rounding.
    """
    more = more | dict(val="0.1", eval_every=every("never"))
    run = lambda name, where="gpu", **change: options(
        checkpoint, checkpoint / f"{option}-{name}", where, **more | change
    )
    whole, from_ssd, apart, plain = (
        run("whole"),
        run("ssd", "ssd"),
        run("apart", micro_batch=1),
        run("no", **{option: None}),
    )
    finetune(whole)
    stopped(from_ssd, 3, monkeypatch)
    finetune(replace(from_ssd, resume=from_ssd.out))
    assert losses(Path(whole.out)) == losses(Path(from_ssd.out))
    first, second = (Path(run.out, weights).read_bytes() for run in (whole, from_ssd))
    assert first == second
    finetune(apart)
    assert losses(Path(apart.out))[step][0] == pytest.approx(losses(Path(whole.out))[step][0], rel=off)
    finetune(plain)
    assert losses(Path(plain.out))[step][0] != losses(Path(whole.out))[step][0]
    assert evaluations(Path(plain.out))[0] == evaluations(Path(whole.out))[0]
    return Path(whole.out)


def test_noise_on_embeddings_is_that_of_the_step(checkpoint, monkeypatch):
    check_randomness(checkpoint, monkeypatch, "neftune", dict(neftune=5.0), "model.safetensors", 1, 1e-6)


def test_dropout_of_adapters_is_that_of_the_step(checkpoint, monkeypatch):
    more = dict(lora=4, lora_dropout=0.2)
    out = check_randomness(checkpoint, monkeypatch, "lora_dropout", more, "adapter_model.safetensors", 2, 1e-5)
    assert json.loads((out / "adapter_config.json").read_text())["lora_dropout"] == 0.2


def test_a_best_that_is_not_the_snapshots_is_told_and_not_exported(checkpoint, monkeypatch, capsys):
    run = options(checkpoint, checkpoint / "foreign", "gpu", val="0.1", eval_every=every("2"), export="best")
    loss = lambda self, _: (float(self.live.progress.step != 2), {})
    monkeypatch.setattr(evaluation.Evaluation, "_loss", loss)
    stopped(run, 3, monkeypatch)
    note = Path(run.out, "best", "best.json")
    assert json.loads(note.read_text()).items() >= {"step": 2, "eval_loss": 0.0}.items()
    note.write_text(note.read_text().replace('"step": 2', '"step": 1'))
    finetune(replace(run, resume=run.out, max_steps=4))
    said = capsys.readouterr()
    assert "best is not as the best of the snapshot was written, eval_loss 0.0000 at step 2: those weights" in said.out
    assert (
        "best     lost: eval_loss 0.0000, perplexity 1, at step 2; the output: eval_loss 1.0000, perplexity" in said.out
    )
    assert Path(run.out, "model.safetensors").exists()


@pytest.mark.parametrize("damage", [False, True])
def test_killed_in_its_export_a_run_evaluates_again_and_says_so_once(checkpoint, damage, monkeypatch):
    """The last evaluation comes after the last snapshot. A line lost meanwhile does not hide where that was."""
    out = checkpoint / f"export-{damage}"
    run = options(checkpoint, out, "gpu", val="0.1", eval_every=every("4"))
    real = exchange.Exchange.save
    killed = lambda self, folder, *more: os._exit(9) if folder == out else real(self, folder, *more)
    with monkeypatch.context() as m:
        m.setattr(exchange.Exchange, "save", killed)
        m.setattr(live.Live, "export_best", lambda self: os._exit(9))  # where the last weights are the best
        assert ended(child(run)) == 9
        assert max(evaluations(out)) == STEPS
    log = out / "log.jsonl"
    if damage:
        log.write_bytes(log.read_bytes().split(b"\n", 1)[1])
    assert ended(child(replace(run, resume=str(out)))) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["step"] for r in records if "eval_loss" in r] == [0, 4, STEPS][damage:]


def test_a_resumed_run_evaluates_on_what_it_has_evaluated_on(checkpoint, monkeypatch):
    """Also where more steps would allow for more of it; a run of before there was a share, on everything."""
    run = options(checkpoint, checkpoint / "evaluates", "gpu", val="0.2", eval_every=every("0.2"))
    stopped(run, 2, monkeypatch)
    made = prepare(replace(run, max_steps=50))
    assert made.eval_rows is None
    read, real = [], evaluation.evaluate
    seen = lambda e, micro, *parts: read.append(sum(m.tokens for m in micro)) or real(e, micro, *parts)
    monkeypatch.setattr(evaluation, "evaluate", seen)
    stopped(replace(run, resume=run.out, max_steps=50), 11, monkeypatch)
    assert 0 < sum(read) <= prepare(run).work.held_out + run.seq_len < made.work.held_out
    before = {"step": 4, "best": [1.0, 2], "log": [4, 4, 99, 7], "written": 0}
    assert Progress.of(LATER | before).eval_rows is None


def test_a_tenth_of_a_run_is_evaluation(checkpoint):
    """By tokens, of which those of an evaluation count a third; and a step's tokens at least."""
    for steps in (2, 20, 200):
        run = options(checkpoint, checkpoint / "planned", "gpu", val="0.5", eval_every=every("0.1"))
        work = prepare(replace(run, max_steps=steps)).work
        evaluated, trained = work.evaluations * work.held_out / 3, steps * work.tokens
        assert evaluated <= 0.1 * (trained + evaluated) * 1.01 or work.held_out == work.tokens


def test_more_steps_asked_for_on_resuming_are_kept(checkpoint, monkeypatch, capsys):
    run = options(checkpoint, checkpoint / "longer", "gpu")
    stopped(run, 3, monkeypatch)
    stopped(replace(run, resume=run.out, max_steps=10), 8, monkeypatch)
    assert "max_steps: 10" in (checkpoint / "longer" / "config.yaml").read_text()
    capsys.readouterr()
    with pytest.raises(InputError, match="is at step 8, and 6 were given"):
        finetune(replace(run, resume=run.out))
    assert capsys.readouterr().out == "changed  --max-steps 6, was 10 at step 8\n"


def test_a_run_keeps_the_date_that_its_chat_template_writes(tmp_path, monkeypatch):
    """Also where its tokens are made again on another day."""
    folder = make_small(tmp_path)
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}.{% endfor %}"
    (folder / "checkpoint" / "chat_template.jinja").write_text(template)
    talk = {"messages": [{"role": "user", "content": "Once"}, {"role": "assistant", "content": "there was"}]}
    (folder / "stories.txt").rename(folder / "chats.jsonl")
    (folder / "chats.jsonl").write_text((json.dumps(talk) + "\n") * 40)
    run = replace(options(folder, folder / "out", "gpu"), data=(str(folder / "chats.jsonl"),))
    days = iter([date(2026, 1, 31), date(2026, 2, 1), date(2026, 2, 2)])
    monkeypatch.setattr(train, "date", SimpleNamespace(today=lambda: next(days)))
    stopped(run, 3, monkeypatch)
    shutil.rmtree(folder / "out" / "tokens")
    finetune(replace(run, resume=run.out))
    finetune(replace(run, out=str(folder / "later")))
    found = [losses(folder / name) for name in ("out", "later")]
    assert found[0].keys() == found[1].keys()
    assert found[0] != found[1], "the date is learned from"
    monkeypatch.setattr(train, "date", SimpleNamespace(today=lambda: date(2026, 1, 31)))
    finetune(replace(run, out=str(folder / "same")))
    assert found[0] == losses(folder / "same")


def test_a_store_that_is_not_there_is_not_begun_anew(checkpoint, monkeypatch):
    drive = checkpoint / "drive"
    run = options(checkpoint, checkpoint / "on-a-drive", "ssd", store=(str(drive / "store"),))
    stopped(run, 3, monkeypatch)
    drive.rename(checkpoint / "elsewhere")
    for where in (drive, checkpoint / "never"):
        with pytest.raises(InputError, match="Is its drive mounted"):
            finetune(replace(run, resume=run.out, store=(str(where / "store"),)))
        assert len(losses(Path(run.out))) == 3
        assert not where.exists()
    (checkpoint / "elsewhere").rename(drive)
    finetune(replace(run, resume=run.out))
    assert not drive.exists()  # a run that is over leaves no folder that it made
    with pytest.raises(InputError, match="that run is finished"):
        finetune(replace(run, resume=run.out))
    finetune(replace(run, out=str(checkpoint / "again")))


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_asked_to_stop_while_it_loads_it_leaves_nothing_in_flight(checkpoint, resumed, number, monkeypatch):
    """Heard in the middle of a request to the drive, which ends first."""
    run, begun = options(checkpoint, checkpoint / f"loads-{resumed}-{number}", "ssd"), []
    if resumed:
        stopped(run, 3, monkeypatch)
        run = replace(run, resume=run.out)
    start = Placement.start

    def asked(*args):
        begun.append(start(*args))
        if len(begun) == 3:
            os.kill(os.getpid(), number)
        return begun[-1]

    monkeypatch.setattr(Placement, "start", asked)
    with pytest.raises(KeyboardInterrupt):
        finetune(run)
    assert all(future.done() for moving in begun for future in moving)
    assert len(begun) <= 3 + READ_AHEAD * resumed  # of two hundred
    assert Path(run.out).exists() == resumed


@pytest.mark.parametrize("units", [3, 50])
def test_ctrl_c_while_loading_ends_the_warm_up(units, monkeypatch):
    """As on a GPU: loading, in another thread, ends after the piece at which it was asked to stop."""
    as_on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), plan=SimpleNamespace(gpus=1, hosts=1))
    asked, heard, warmed_up = [], threading.Event(), []

    def load(more, loaded):
        assert threading.current_thread() is not threading.main_thread()
        for u in range(units):
            if u == 5:
                os.kill(os.getpid(), signal.SIGINT)
                assert heard.wait(60)
            more(1)
            loaded(u)

    def more(_):
        if asked:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_engine, "_first", lambda _: "the first step's")
    monkeypatch.setattr(run_engine, "warm_up", lambda e, mb, loaded: warmed_up.extend((e, mb, u) for u in loaded))
    left = nullcontext() if units <= 5 else pytest.raises(KeyboardInterrupt)
    with stop_signals(lambda number: asked.append(number) or heard.set(), lambda: None), left:
        run_engine._load_and_warm_up("the engine", as_on_gpu, SimpleNamespace(load=load), more, Clock())
    assert warmed_up == [("the engine", "the first step's", u) for u in range(min(units, 5))]


def test_a_snapshot_that_has_lost_a_file_is_no_beginning(checkpoint, monkeypatch):
    run = options(checkpoint, checkpoint / "lost-a-file", "gpu")
    stopped(run, 3, monkeypatch)
    lost = next((Path(run.out) / "store").glob("snapshot-*/weights-00001.safetensors"))
    lost.unlink()
    with pytest.raises(StoreError, match=f"No such file or directory: '{lost}'"):
        finetune(replace(run, resume=run.out))


def test_what_a_run_needs_to_go_on_is_on_the_drive(checkpoint, monkeypatch):
    """config.yaml and the folders are synced when a step begins, or the drive may have lost them in a power failure."""
    synced, real, run = set(), os.fsync, options(checkpoint, checkpoint / "new" / "synced", "gpu")

    def fsync(fd):
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    stopped(run, 1, monkeypatch)
    out = Path(run.out)
    assert {out / ".config.yaml.partial", checkpoint, out.parent, out, out / "store", out / "store" / "files"} <= synced


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_asked_to_stop_it_saves_and_goes_on(checkpoint, uninterrupted, number, monkeypatch):
    weights, seen = uninterrupted
    out = checkpoint / f"stopped-{number}"
    with monkeypatch.context() as m:
        hold(3, m.setattr)
        pid = child(options(checkpoint, out, "ssd"))
    while not (out / "log.jsonl").exists() or not losses(out):
        time.sleep(0.01)
    os.kill(pid, number)
    assert ended(pid) == 130
    assert 0 < len(losses(out)) < STEPS
    assert ended(child(options(checkpoint, out, "host", resume=str(out)))) == 0  # placed otherwise than before
    assert losses(out) == seen
    assert (out / "model.safetensors").read_bytes() == weights


def test_a_run_keeps_its_half_blocks(checkpoint, monkeypatch):
    """Resumed with room for whole blocks it goes on to the bit; whole blocks that no longer fit are refused."""
    small, large = (options(checkpoint, checkpoint / "of-halves", where) for where in ("halves", "gpu"))
    assert ended(child(small)) == 0
    seen, weights = losses(checkpoint / "of-halves"), (checkpoint / "of-halves" / "model.safetensors").read_bytes()
    out = checkpoint / "resumed-halves"
    with monkeypatch.context() as m:
        hold(3, m.setattr)
        pid = child(replace(small, out=str(out)))
    while not (out / "log.jsonl").exists() or not losses(out):
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 130
    assert ended(child(replace(large, out=str(out), resume=str(out)))) == 0
    assert losses(out) == seen
    assert (out / "model.safetensors").read_bytes() == weights

    kept = prepare(replace(small, out=str(checkpoint / "planned"))).pinned.json()
    assert kept["halves"]
    assert prepare(replace(large, out=str(checkpoint / "planned")), kept).plan.halves
    kept = prepare(replace(large, out=str(checkpoint / "planned"), micro_batch=1)).pinned.json()
    assert not kept.pop("halves")
    with pytest.raises(InputError, match="older version"):
        prepare(replace(small, out=str(checkpoint / "planned")), kept)
    with pytest.raises(DoesNotFit, match="--gpu-memory"):
        prepare(replace(small, out=str(checkpoint / "planned")), kept | {"halves": False})


@pytest.fixture(scope="module")
def begun(checkpoint) -> tuple[Options, dict]:
    """A run's options, and what it keeps."""
    given = options(checkpoint, checkpoint / "planned", "gpu")
    return given, prepare(given).pinned.json()


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"batch_size": 8}, "--batch-size 8: the run began with 4"),
        ({"batch_size": 2}, "--batch-size 2: the run began with 4"),
        ({"micro_batch": 1}, "--micro-batch 1: the run began with 4"),
        ({"adam_bits": 8}, "--adam-bits 8: the run began with 32"),
        ({"dtype": "bf16"}, "--dtype bf16: the run began with fp32"),
        ({"seq_len": 32}, "--seq-len 32: the run began with 64"),
    ],
)
def test_what_a_run_keeps_cannot_be_asked_for_otherwise(begun, now, says):
    given, kept = begun
    with pytest.raises(InputError, match=says):
        prepare(replace(given, **now), kept)


def test_what_a_run_keeps_may_be_said_again(begun, monkeypatch):
    given, kept = begun
    made, measured = prepare(given).machine, []
    monkeypatch.setattr(job, "this_machine", lambda device, dtype, *_: measured.append(dtype) or made)
    in_bf16 = kept | {"dtype": "BF16", "plan": kept["plan"] | {"dtype": "BF16"}}
    prepare(replace(given, micro_batch=4, dtype="bf16"), in_bf16)
    prepare(given, in_bf16)
    assert measured == ["BF16", "BF16"], "the machine is measured in what the run computes in"


def test_a_given_plan_has_to_be_of_the_run(checkpoint, begun):
    given, kept = begun
    write_plan(prepare(given).plan, checkpoint / "same.json")
    given = replace(given, plan=str(checkpoint / "same.json"))
    plan = Plan.load(checkpoint / "same.json")
    assert prepare(given, kept).plan.tokens == kept["tokens"]
    with pytest.raises(InputError, match="same.json: the run began with record 4096, the plan has"):
        prepare(given, kept | {"plan": kept["plan"] | {"record": 4096}})
    with pytest.raises(InputError, match="same.json: the plan computes in F32. Leave --dtype out"):
        prepare(replace(given, dtype="bf16"))
    write_plan(replace(plan, n_micro=1 << 40), checkpoint / "same.json")
    with pytest.raises(DoesNotFit, match=r"same.json: the plan needs .* of GPU memory, the limit is 1.00 GiB"):
        prepare(given)
    write_plan(replace(plan, units=(UnitPlan(saved=(("foo", "gpu"),)),) * len(plan.units)), checkpoint / "same.json")
    with pytest.raises(InputError, match="same.json: unit 0 saves 'foo'"):
        prepare(given)


ASSUMED = dict(assume="gpu=rtx4090,ram=64GiB", dry_run=True, gpu_memory=None, ram=None)  # a CUDA device


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("unit", [UnitPlan(), UnitPlan("host", "host", update="gpu")], ids=["state", "update"])
def test_a_given_plan_with_narrow_moments_keeps_its_updates_off_the_gpu(checkpoint, begun, bits, unit):
    given, _ = begun
    given = replace(given, plan=str(checkpoint / "narrow.json"))
    units = (UnitPlan("host", "host"),) * len(prepare(replace(given, plan=None)).plan.units)
    for change in (units, (*units[:-1], unit)):
        plan = replace(prepare(replace(given, plan=None)).plan, adam_bits=bits, units=change)
        write_plan(plan, checkpoint / "narrow.json")
        assert prepare(given).plan == plan, "a CPU updates moments of any width"
        if change is units:
            assert prepare(replace(given, **ASSUMED)).plan == plan
    with pytest.raises(InputError, match=f"narrow.json: no CUDA kernel updates {bits}-bit moments. Give every unit"):
        prepare(replace(given, **ASSUMED))


def test_a_run_with_narrow_moments_begun_on_a_cpu_goes_on_with_a_gpu(begun):
    given, _ = begun
    kept = prepare(replace(given, adam_bits=8)).pinned.json()
    assert not Plan.of(kept["plan"]).runs_on_cuda
    assert prepare(replace(given, adam_bits=8, **ASSUMED), kept).plan.runs_on_cuda


def test_a_plan_with_room_for_fewer_micro_batches_is_refused(checkpoint):
    given = options(checkpoint, checkpoint / "planned", "gpu", micro_batch=2)
    write_plan(prepare(given).plan, checkpoint / "two.json")
    with pytest.raises(InputError, match="two.json: a step of 6 sequences is 3 micro-batches of 2, .*room for 2"):
        prepare(replace(given, plan=str(checkpoint / "two.json"), batch_size=6))


@pytest.mark.parametrize(
    ("plan", "given", "says"),
    [
        ({}, {"micro_batch": 2}, "--micro-batch is 2, the plan has 4. Give --micro-batch 4, or change the plan"),
        ({}, {"micro_batch": 16}, ""),  # a step has 4 sequences
        ({}, {"adam_bits": 8}, "--adam-bits is 8, the plan has 32"),
        ({"adam_bits": 8}, {"adam_bits": 32}, "--adam-bits is 32, the plan has 8"),
        ({"adam_bits": 8}, {"adam_bits": 8}, ""),
        ({}, {"optimizer_mode": "backward", "max_grad_norm": 0.0}, "--optimizer-mode is backward, the plan"),
        ({"mode": "backward"}, {}, "its mode backward updates before the norm is known. Add --max-grad-norm 0, or"),
        ({"mode": "backward"}, {"max_grad_norm": 0.0, "optimizer_mode": "forward"}, "--optimizer-mode is forward"),
        ({"mode": "backward"}, {"max_grad_norm": 0.0}, ""),
        ({}, {"gpus": 2}, "the plan is for 1 GPU. Give --gpus 1"),
    ],
)  # fmt: skip
def test_no_option_is_silently_overruled_by_a_given_plan(checkpoint, begun, plan, given, says):
    """Whether a run begins or goes on."""
    options, _ = begun
    options = replace(options, plan=str(checkpoint / "other.json"))
    made = replace(prepare(replace(options, plan=None)).plan, **plan)
    write_plan(made, checkpoint / "other.json")
    kept = prepare(replace(options, max_grad_norm=0.0)).pinned.json()
    for pinned in (None, kept):
        if says:
            with pytest.raises(InputError, match=f"other.json: {says}"):
                prepare(replace(options, **given), pinned)
        else:
            assert prepare(replace(options, **given), pinned).plan == made


def test_a_given_plan_copies_between_gpus_only_where_they_can(checkpoint, begun):
    given = replace(begun[0], plan=str(checkpoint / "two.json"), gpus=2, dry_run=True, gpu_memory=None, ram=None)
    on = lambda more: prepare(replace(given, assume=f"gpu=2xrtx4090,ram=8GiB{more}")).plan
    direct = prepare(replace(begun[0], plan=None)).plan.dealt(2, tied=True, peers=True)
    in_ram = replace(direct, between="host")
    lends = in_ram.changed({1}, saved=(("qkv", "peer"),), peer=1 - direct.units[1].gpu)
    for plan, says in ((direct, "host, or"), (in_ram, ""), (lends, "host, saved of unit 1 to gpu, host or ssd, or")):
        write_plan(plan, checkpoint / "two.json")
        assert on(",peer=20") == plan
        if says:
            with pytest.raises(InputError, match=f"two.json: the plan copies .* to {says} leave --plan out"):
                on("")
        else:
            assert on("") == plan

"""After two steps: rates that explain what was measured, and a move to another plan that changes no bit."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import write_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import RATES, SMALL, plan
from runs import losses, options

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.planner.choose import Choice
from trireme.engine.planner.clock import Watch
from trireme.engine.planner.correct import TIMED_BY, corrected, measured
from trireme.engine.planner.forecast import Forecast, Work
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.probe import cache
from trireme.engine.planner.rates import assume
from trireme.engine.queues.trace import Span
from trireme.engine.run import pace, train
from trireme.engine.run.live import Live
from trireme.engine.run.options import Options
from trireme.models.config import read_config
from trireme.storage.versions import Versions

BATCH = Batch(16384, 256, 2)


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(TIMED_BY)), st.floats(0.3, 3), min_size=1),
    st.sampled_from((("host", "host"), ("host", "ssd"), ("ssd", "ssd"))),
)
def test_corrected_rates_predict_what_was_measured(changes, placement):
    p = plan(SMALL, UnitPlan(*placement), keep=2, tokens=16384, record=1 << 22)
    times = {name: getattr(RATES, name) * times for queue, times in changes.items() for name in TIMED_BY[queue]}
    true = replace(RATES, **times)
    real, found = predict(SMALL, p, true, BATCH), predict(SMALL, p, RATES, BATCH)
    known = corrected(RATES, found, real.spans, real.step_s)
    assert predict(SMALL, p, known, BATCH).step_s == pytest.approx(real.step_s, rel=0.05)


def test_a_queue_that_hardly_works_says_nothing():
    p = plan(SMALL, UnitPlan("host", "host"), tokens=16384)
    found = predict(SMALL, p, RATES, BATCH)
    assert corrected(RATES, found, [Span("h2d", "weights", "x", 0.0, 1e-9, 1e9, 0)], 1.0) == RATES


@given(st.floats(0.4, 2.0), st.sampled_from(("backward", "forward")))
@settings(max_examples=10, deadline=None)
def test_what_a_drained_queue_does_after_a_step_says_nothing(slower, mode):
    """The second step of a run reads its own records and, while it is drained, the next one's.

    Of a record that is under way as the step ends, the share that was done is a guess: many blocks make it small.
    """
    cfg = replace(SMALL, n_layers=12)
    p = replace(plan(cfg, UnitPlan("host", "ssd"), keep=2, tokens=16384, record=1 << 22), mode=mode)
    true = replace(RATES, ssd_read=RATES.ssd_read / slower, ssd_write=RATES.ssd_write / slower)
    real, found = predict(cfg, p, true, BATCH), predict(cfg, p, RATES, BATCH)
    end = max(s.end for s in real.spans)
    later = [Span("state_read", "state", f"unit {i}", end + i, end + i + 1, 1e9, 0) for i in range(20)]
    known = corrected(RATES, found, [*real.spans, *later], real.step_s)
    assert predict(cfg, p, known, BATCH).step_s == pytest.approx(real.step_s, rel=0.02)


def test_a_drive_is_at_work_while_anything_is_in_flight():
    times = (("ssd_read", 0, 4), ("ssd_write", 2, 3), ("ssd_write", 6, 9))
    assert measured([Span(queue, "weights", "x", start, end, 1, 0) for queue, start, end in times])["ssd"] == 7


def another(now: Plan) -> Plan:
    """Everything elsewhere than in `now`: state on the SSD, inputs in RAM, something kept, a wider window."""
    kept = tuple((name, "host") for name in ("resid", "lse"))
    units = [UnitPlan("ssd" if u % 2 else "host", "ssd", x="host" if 0 < u < len(now.units) - 1 else "gpu")
             for u in range(len(now.units))]  # fmt: skip
    units[1] = replace(units[1], saved=kept)
    return replace(now, units=tuple(units), window=3)


def moved(stay: Options, monkeypatch, capsys) -> None:
    """Runs as it is and with a move after two steps, and compares the bits."""
    before, after, moves, files = Path(stay.out), Path(stay.out + "-moved"), [], []
    train.finetune(stay)
    allocate = Versions._allocate
    monkeypatch.setattr(Versions, "_allocate", lambda *args: files.append(len(moves)) or allocate(*args))
    move = Live.move

    def and_then(live, job):
        move(live, job)
        moves.append(job.plan)

    monkeypatch.setattr(Live, "move", and_then)

    def better(job, steps):
        to = another(job.plan)
        if not fits(Geometry.of(job.cfg, to), to, job.limits):
            to = replace(job.plan, window=1, state_slots=2)
        moves.append(to)
        return Choice(to, predict(job.cfg, to, job.machine.rates, Batch(to.tokens, job.seq_len, to.n_micro)), ())

    monkeypatch.setattr(pace, "better", better)
    train.finetune(replace(stay, out=str(after)))
    assert len(moves) == 2
    assert 2 not in files or not moves[1].stored_on_ssd, "steps and snapshots behind the move take what it reserved"
    assert moves[0].units != ()
    assert "plan     changed" in capsys.readouterr().out
    assert losses(before) == losses(after)
    assert (before / "model.safetensors").read_bytes() == (after / "model.safetensors").read_bytes()


def test_a_move_needs_room_on_drives_that_are_measured():
    there = replace(plan(SMALL, UnitPlan("host", "host")), units=(UnitPlan("ssd", "ssd"),) * SMALL.n_units)
    machine = assume("gpu=rtx4090,ram=128GiB,ssd=2TB")
    now = Forecast(SMALL, plan(SMALL, UnitPlan("host", "host")), machine, machine.limits, Work(64, 4, 9))
    assert not pace.has_room(now, there)
    now = replace(now, plan=now.plan.changed({1}, saved=(("resid", "ssd"),)))  # a drive is used, but not for state
    assert pace.has_room(now, there)
    need = replace(now, plan=there).disk()
    assert need > now.disk()
    assert not pace.has_room(replace(now, machine=replace(machine, ssd=need - 1)), there)
    assert pace.has_room(replace(now, machine=replace(machine, ssd=0)), now.plan), "as it is"


@pytest.mark.full
@pytest.mark.parametrize("where", ["gpu", "host", "ssd"], ids="stored on {}".format)
def test_a_move_to_another_plan_changes_no_bit(checkpoint, where, monkeypatch, capsys):
    moved(options(checkpoint, checkpoint / f"from-{where}", where), monkeypatch, capsys)


@pytest.mark.gpu
def test_a_move_on_a_gpu_changes_no_bit(checkpoint, monkeypatch, capsys):
    n_units = read_config(checkpoint / "checkpoint").n_units
    plan = Plan((UnitPlan("host", "host"),) * n_units, 256, 1, record=1 << 16)
    write_plan(plan, checkpoint / "plan.json")
    monkeypatch.setattr(cache, "remember", lambda *_: None)  # beside other tests
    room = dict(device="cuda", gpu_memory=4 << 30, ram=4 << 30, plan=str(checkpoint / "plan.json"))
    moved(replace(options(checkpoint, checkpoint / "on-gpu", "host"), **room), monkeypatch, capsys)


def test_a_step_faster_than_its_machine_has_the_next_run_measure_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu, said = torch.device("cpu"), list[str]()
    machine, in_fp8 = cache.chips_now(cpu, "F32"), cache.chips_now(cpu, "FP8")
    cache.remember(machine, {"matmul": 1e12})
    cache.remember(in_fp8, {"fp8": 2e12})
    job = SimpleNamespace(device=cpu, plan=SimpleNamespace(dtype="F32"), cfg=SimpleNamespace(scan=None))
    live = SimpleNamespace(progress=SimpleNamespace(step=0), job=job, screen=SimpleNamespace(say=said.append))
    run = pace.Pace(live)
    run._question(1.0, 0.95)
    run._question(1.0, 2.0)
    assert (cache.remembered(machine), said) == ({"matmul": 1e12}, [])
    run._question(1.0, 0.8)
    assert cache.remembered(machine) is None
    assert cache.remembered(in_fp8) is None, "measured beside the same programs"
    assert len(said) == 1
    run._question(1.0, 0.8)  # gone already, as another run may have it


@pytest.mark.parametrize(("busy", "noted"), [(0.9, 1), (0.2, 0)])
def test_what_a_drive_keeps_up_for_minutes_is_for_the_next_run(busy, noted, monkeypatch):
    step, found = SimpleNamespace(step_s=1.0, busy={"ssd": busy}), list[tuple[object, object]]()
    machine, work = SimpleNamespace(rates="rates"), SimpleNamespace(tokens=8)
    job = SimpleNamespace(forecast=SimpleNamespace(step=step), machine=machine, store_dirs=["store"], work=work,
                          device=torch.device("cpu"))  # fmt: skip
    live = SimpleNamespace(progress=SimpleNamespace(step=9), job=job, group=SimpleNamespace(hosts=1))
    monkeypatch.setattr(pace, "note_drives", lambda *what: found.append(what))
    run, time = pace.Pace(live), iter(range(0, 10**6, 10))
    run.watch, live.progress.step = Watch(1.0, lambda: next(time)), 20
    for _ in range(20):
        run.compare([], [SimpleNamespace(tokens=8)], 1.0)
    assert found == [("rates", ["store"])] * noted


@pytest.mark.parametrize(("device", "step_s", "warm"), [("cuda", 0.03, 5), ("cuda", 2.0, 2), ("cpu", 0.03, 2)])
def test_short_steps_on_a_gpu_are_compared_later(device, step_s, warm, monkeypatch):
    """The first ones load kernels for as long as they compute."""
    forecast, progress = SimpleNamespace(step=SimpleNamespace(step_s=step_s)), SimpleNamespace(step=7)
    job = SimpleNamespace(device=torch.device(device), forecast=forecast, work=SimpleNamespace(tokens=8))
    live = SimpleNamespace(progress=progress, job=job, group=SimpleNamespace(hosts=1))
    run, compared, traced = pace.Pace(live), list[tuple[int, float]](), list[int]()
    monkeypatch.setattr(run, "_warmed_up", lambda *_: compared.append((progress.step, run.first_s)) or False)
    for seconds in (3.0, 2.0, 1.0, 1.0, 1.0):
        if run.needs_trace:
            traced.append(progress.step + 1)
        progress.step += 1
        if not compared:
            run.compare([], [SimpleNamespace(tokens=8)], seconds)
    assert compared == [(7 + warm, 3.0)]
    assert traced == [7 + warm]


class Unsteady(pace.Watch):
    def differs(self, seconds: float) -> bool:
        first, self.before, self.step_s = not self.before, self.step_s, 2 * self.step_s
        return first


def test_a_run_tells_its_promise_again_once_its_steps_differ(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(pace, "Watch", Unsteady)
    asked, real = [], pace.better
    monkeypatch.setattr(pace, "better", lambda job, left: asked.append(left) or real(job, left))
    train.finetune(replace(options(checkpoint, checkpoint / "said", "gpu"), max_steps=5))
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("warm-up")]
    assert "measured" in line
    assert "3 more steps " in line
    assert "predicted" not in line, "on a CPU"
    kinds = [line.split()[0] for line in lines]
    assert [kind for kind in kinds if kind in ("warm-up", "ready", "speed")] == ["warm-up", "ready", "speed", "ready"]
    assert asked == [3, 1], "another plan is looked for each time"
    assert json.loads((checkpoint / "said" / "config.json").read_text())

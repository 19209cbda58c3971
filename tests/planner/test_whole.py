"""The whole run: its parts are estimated by the bytes that they move, and reported at the end as they were."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import ONE_B, plan

from trireme.engine.buffers import usage
from trireme.engine.plan import UnitPlan
from trireme.engine.planner.forecast import BEST, Files, Forecast, Work
from trireme.engine.planner.lines import ready_line, took_line
from trireme.engine.planner.rates import assume
from trireme.engine.planner.whole import (
    CLOSING,
    COPIED,
    FIXED,
    LARGE,
    LOADING,
    OPENED,
    Events,
    estimated_parts,
    evaluation_s,
    export_s,
    note_export,
    snapshot,
    token_s,
    written,
)
from trireme.engine.run import demo, loop, train
from trireme.engine.run.job import prepare
from trireme.engine.run.options import Every, Options
from trireme.engine.run.report import estimate, often

EXPORT = 10**9


def forecast(unit: UnitPlan, keep: int = 0) -> Forecast:
    m = assume("gpu=rtx4090,ram=128GiB,ssd=2TB@7/5")
    work = Work(1024, 32, 1000)
    return Forecast(ONE_B, plan(ONE_B, unit, keep), m, m.limits, work, Files(export=EXPORT))


GPU, RAM, SSD = forecast(UnitPlan(), 12), forecast(UnitPlan("host", "host")), forecast(UnitPlan("ssd", "ssd"))


def faster(f: Forecast, **times: float) -> Forecast:
    rates = replace(f.machine.rates, **{name: getattr(f.machine.rates, name) * by for name, by in times.items()})
    return replace(f, machine=replace(f.machine, rates=rates))


def test_the_best_is_kept_in_ram_beside_the_plan():
    """Also its low halves, if the checkpoint needs them; without room it costs an export each time."""
    f = replace(RAM, files=Files(export=EXPORT, best=True))
    weights, n = sum(layout.span for layout in RAM.geo.weights), sum(RAM.geo.numel)
    assert (RAM.kept, f.kept, replace(f, files=replace(f.files, exact=True)).kept) == (0, weights, weights + 2 * n)
    assert f.memory()[BEST] == {"gpu": 0, "host": weights, "ssd": 0}
    assert BEST not in RAM.memory()
    need = usage(f.geo, f.plan)
    tight = replace(f, limits=replace(f.limits, host=need["host"] + weights - 1))
    assert tight.kept == 0
    cpu = faster(tight, host=0)
    assert cpu.kept == weights, "of one memory, the other tier's room is room too"
    assert replace(cpu, limits=replace(cpu.limits, gpu=need["gpu"])).kept == 0
    three = Events(evaluations=3, held_out=32)
    assert estimated_parts(f, 1, three)["evaluations"] == pytest.approx(
        estimated_parts(RAM, 1, three)["evaluations"] + 3 * weights / COPIED
    )


@pytest.mark.parametrize(("room", "exports"), [(True, 1 + 1), (False, 1 + 4)])
def test_exports_are_estimated_by_snapshots_or_by_evaluations(tmp_path, monkeypatch, room, exports):
    """Five evaluations after steps; the last one's weights are the result."""
    demo.make_text(tmp_path / "stories.txt", 40, seed=1)
    demo.make_checkpoint(tmp_path / "model", tmp_path / "stories.txt", seed=1)
    model, text, out = (str(tmp_path / name) for name in ("model", "stories.txt", "out"))
    when = dict(eval_every=Every(steps=2), save_every=Every(steps=6), max_steps=10)
    job = prepare(Options(model=model, data=(text,), out=out, val="0.1", seq_len=64, device="cpu", **when))
    found = []
    monkeypatch.setattr(
        "trireme.engine.run.report.estimated_parts",
        lambda f, steps, events, known: found.append(events) or {"load": 0.0},
    )
    if not room:
        monkeypatch.setattr(Forecast, "kept", 0)
    estimate(job)
    assert (found[0].exports, found[0].evaluations, found[0].snapshots) == (exports, 6, 1)


def test_what_an_event_took_is_believed():
    events = Events(evaluations=3, held_out=32, samples=4, tokens=48, snapshots=2, exports=2)
    found = estimated_parts(RAM, 10, events, {"evaluations": 5.0, "samples": 7.0, "snapshots": 11.0})
    assert (found["evaluations"], found["samples"], found["snapshots"]) == (15.0, 28.0, 22.0)
    assert found["export"] == estimated_parts(RAM, 10, events)["export"]


def test_an_export_takes_what_the_last_to_that_drive_took(tmp_path, monkeypatch):
    """Of a large checkpoint: the time of a small one is not of the drive."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out, small = tmp_path / "not" / "yet", replace(RAM, files=Files(export=LARGE - 1))
    assert export_s(RAM, out) == {}
    note_export(small, out, 3.0)
    assert export_s(RAM, out) == {}
    note_export(RAM, out, 20.0)
    assert export_s(RAM, out) == {"export": pytest.approx(FIXED + 20.0)}
    assert export_s(small, out)["export"] == pytest.approx(FIXED + 20.0 * (LARGE - 1) / EXPORT)
    assert export_s(SSD, out) == {}, "weights are read from the drive meanwhile"
    found = estimated_parts(RAM, 1, Events(samples=1, exports=2), export_s(RAM, out))
    assert found["export"] == pytest.approx(2 * (FIXED + 20.0))
    assert found["samples"] == estimated_parts(RAM, 1, Events(samples=1))["samples"], "its first time is still to come"


def test_a_snapshot_writes_only_what_is_on_no_drive():
    saved = lambda f: snapshot(f).ssd_written
    assert saved(SSD) == 0
    assert saved(forecast(UnitPlan("host", "ssd"))) == sum(layout.span for layout in RAM.geo.weights)
    assert saved(GPU) == saved(RAM) == GPU.stored()


def test_a_snapshot_and_an_export_wait_for_copies_from_a_gpu_and_reads():
    f, written = RAM, EXPORT * (1 / 7e9 + 1 / 5e9 + 1 / COPIED)
    rates, stored, weights = f.machine.rates, f.stored(), sum(layout.span for layout in f.geo.weights)
    seconds = lambda f, part: estimated_parts(f, 1, Events(snapshots=1))[part] - FIXED
    assert seconds(RAM, "snapshots") == pytest.approx(stored / 5e9, rel=0.01)
    assert seconds(GPU, "snapshots") == pytest.approx(stored / 5e9 + stored / rates.d2h, rel=0.01), "through one buffer"
    assert seconds(SSD, "snapshots") == 0
    assert seconds(RAM, "export") == pytest.approx(written)
    assert seconds(GPU, "export") == pytest.approx(written + weights / rates.d2h, rel=0.01)
    assert seconds(SSD, "export") == pytest.approx(written + weights / 7e9, rel=0.01)
    masters = replace(SSD, files=replace(f.files, exact=True))
    low = 2 * sum(f.geo.numel)
    assert seconds(masters, "export") == pytest.approx(written + (weights + low) / 7e9, rel=0.01), "each once"


def test_without_a_drive_a_snapshot_goes_to_a_usual_one():
    m = assume("gpu=rtx4090,ram=128GiB")
    f = replace(RAM, machine=m)
    assert snapshot(f).step_s == pytest.approx(f.stored() / 1.4e9, rel=0.01)
    assert estimated_parts(f, 1, Events(snapshots=1, evaluations=1, held_out=32))["export"] > 0


def test_what_a_drive_takes_to_remove_the_store_is_the_end():
    """Placement on it and, once there is one, the last snapshot's files."""
    closing = lambda f, **rates: estimated_parts(
        replace(f, machine=replace(f.machine, rates=replace(f.machine.rates, **rates))), 10, Events(snapshots=3)
    )["close"]
    assert closing(SSD) == CLOSING, "at once"
    assert closing(SSD, ssd_free=4e9) == pytest.approx(CLOSING + 2 * SSD.stored() / 4e9)
    assert closing(RAM, ssd_free=4e9) == pytest.approx(CLOSING + RAM.stored() / 4e9)
    assert estimated_parts(RAM, 10, Events())["close"] == CLOSING


def test_what_an_evaluation_writes_is_what_its_tasks_write():
    """Inputs of blocks that wait on the SSD; the head's is read at once, as are all where they stay on the GPU."""
    n = SSD.plan.units
    units = (n[0], *(replace(unit, x="ssd") for unit in n[1:-1]), n[-1])
    away = replace(SSD, plan=replace(SSD.plan, units=units, between="host"))
    events = Events(evaluations=2, held_out=2 * away.work.sequences)
    groups = 2 * events.evaluations
    x = away.geo.x_bytes(away.plan.tokens) * away.plan.n_micro
    assert written(away, 1, events)["evaluations"] == groups * x * sum(u.x == "ssd" for u in units[1:])
    assert written(replace(away, plan=replace(away.plan, between="gpu")), 1, events)["evaluations"] == 0


def test_an_evaluation_is_a_forward_pass_or_waits_for_the_weights():
    step = evaluation_s(GPU, 32)
    assert 0.15 * GPU.step.step_s < step < 0.4 * GPU.step.step_s
    assert evaluation_s(GPU, 320) == pytest.approx(10 * step)
    weights = sum(layout.span for layout in SSD.geo.weights)
    quick = faster(SSD, matmul=1e3, copy=1e3)
    assert evaluation_s(quick, 32) == pytest.approx(weights / 7e9, rel=0.05)
    assert evaluation_s(faster(quick, ssd_read=1e3), 32) == pytest.approx(weights / quick.machine.rates.h2d, rel=0.05)


def test_what_is_frozen_is_read_too():
    cfg = replace(ONE_B, frozen=("*",))
    frozen = lambda tier: replace(forecast(UnitPlan(base=tier)), cfg=cfg)
    rates, weights = RAM.machine.rates, sum(layout.span for layout in RAM.geo.weights)
    assert token_s(frozen("host")) == pytest.approx(weights / rates.h2d, rel=0.05)
    assert token_s(frozen("ssd")) == pytest.approx(weights / rates.ssd_read, rel=0.1), "while layers go to the GPU"
    assert evaluation_s(faster(frozen("ssd"), matmul=1e3, copy=1e3), 32) == pytest.approx(weights / 7e9, rel=0.05)
    few = replace(frozen("ssd"), files=Files(export=10**6, merged=EXPORT))  # adapters, and the model with them
    found = estimated_parts(few, 1, Events(exports=3))
    assert found["load"] == pytest.approx(OPENED + weights / LOADING + few.pinning_s())
    assert found["export"] == pytest.approx(3 * FIXED + (EXPORT + 3e6) * (1 / 7e9 + 1 / 5e9 + 1 / COPIED))
    assert few.disk_parts()["export"] == EXPORT + 10**6


def test_a_sampled_token_reads_every_weight_once():
    assert token_s(SSD) > token_s(RAM) > token_s(GPU)
    stay = replace(RAM, plan=RAM.plan.changed(range(RAM.geo.n_units), resident=True))
    assert token_s(stay) == pytest.approx(token_s(GPU))


@given(
    st.sampled_from((Every(), Every(steps=7), Every(share=0.1), Every(share=0.3))),
    st.integers(0, 40),
    st.integers(1, 60),
)
def test_how_often_is_as_often_as_it_will_be_due(every, done, more):
    total = done + more
    assert often(every, done, total, 9.0) == sum(every.due(step, total, 0.0) for step in range(done + 1, total + 1))


def test_how_often_by_the_clock():
    assert often(Every(seconds=60.0), 0, 100, 200.0) == 3


def test_the_wait_names_its_parts():
    assert ready_line({"load": 0.2, "steps": 7200.0, "export": 61.0}) == "in about 2h01m: steps 2h00m, export 1m01s"


@pytest.mark.full
def test_a_run_says_when_it_will_be_ready_and_what_it_took(tmp_path, capsys, monkeypatch):
    """On a CPU after its second step: of what is left then."""
    demo.make_text(tmp_path / "stories.txt", 40, seed=1)
    demo.make_checkpoint(tmp_path / "model", tmp_path / "stories.txt", seed=1)
    model, text, out = (str(tmp_path / name) for name in ("model", "stories.txt", "out"))
    estimated, spent, whole = [], [], []

    def look(clock, said):
        estimated.append(said)
        spent.append(clock.spent)
        whole.append(clock.whole)
        return took_line(clock, said)

    monkeypatch.setattr(loop, "took_line", look)
    train.finetune(Options(model=model, data=(text,), out=out, val="0.1", seq_len=64, max_steps=3, device="cpu"))
    lines = capsys.readouterr().out.splitlines()
    kinds = [line.split()[0] for line in lines]
    assert kinds.index("time") < kinds.index("warm-up") < kinds.index("ready") < kinds.index("took")
    parts = (
        "headers",
        "tokens",
        "probe",
        "plan",
        "load",
        "steps",
        "evaluations",
        "samples",
        "export",
        "check",
        "close",
    )
    assert all(spent[0][part] > 0 for part in parts)
    assert spent[0]["snapshots"] == estimated[0]["snapshots"] == 0
    assert estimated[0]["load"] == spent[0]["load"], "what has happened is not estimated"
    assert sum(spent[0].values()) < 1.001 * whole[0], "no second is in two parts"

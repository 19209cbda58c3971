"""Estimates of a run: they add up, each part has the time of its bytes, and the disk is what the engine claims."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from engines import FROZEN, GPT, HYBRID, LLAMA, LORA, MIXTURE, batches, gpu_plan, make
from hypothesis import given
from hypothesis import strategies as st
from plans import ONE_B, SEVEN_B, plan

from trireme.engine.between import save_to_store
from trireme.engine.buffers import usage
from trireme.engine.build import collate, to_devices
from trireme.engine.plan import UnitPlan
from trireme.engine.planner.choose import first_plan
from trireme.engine.planner.forecast import Files, Forecast, RunWork
from trireme.engine.planner.lines import cell, disk_line, memory_lines, ready_line, time_line, wear_line
from trireme.engine.planner.predict import Batch, predict_evaluation
from trireme.engine.planner.rates import SHEETS, assume
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.whole import (
    CLOSING,
    COPIED,
    FIXED,
    LOADING,
    OPENED,
    Events,
    estimated_parts,
    evaluation_s,
    token_s,
    written_bytes,
)
from trireme.engine.step import evaluate
from trireme.models.rows import rope_tables

EXPORT = 10**9
ALL = {"steps": 10**13}


def forecast(machine: str, sequences: int = 16, **more) -> Forecast:
    """Of a 7B."""
    m = assume(machine)
    made = first_plan(SEVEN_B, m.limits, Wanted(((8192, 4), (1024, 32)), record=1 << 25), drive=bool(m.ssd))
    return Forecast(SEVEN_B, made, m, m.limits, RunWork(2048, sequences, 1000, **more))


def on(unit: UnitPlan, keep: int = 0, **files) -> Forecast:
    """Of a 1B, every unit alike."""
    m = assume("gpu=rtx4090,ram=128GiB,ssd=2TB@7/5")
    return Forecast(ONE_B, plan(ONE_B, unit, keep), m, m.limits, RunWork(1024, 32, 1000), Files(export=EXPORT, **files))


GPU, RAM, SSD = on(UnitPlan(), 12), on(UnitPlan("ram", "ram")), on(UnitPlan("ssd", "ssd"))
WEIGHTS, PARAMETERS = sum(layout.span for layout in RAM.geo.weights), sum(RAM.geo.numel)


# ---------------------------------------------------------------- memory and disk


@pytest.mark.parametrize(
    "machine", ["gpu=rtx4090,ram=128GiB", "gpu=rtx4090,ram=48GiB,ssd=2TB@7/5", "gpu=h200,ram=64GiB"]
)
def test_the_memory_table_adds_up(machine):
    f = forecast(machine)
    rows = [line for line in memory_lines(f) if re.match(r" {11}\w", line)]
    cells = [[float(x) * 1024 ** (unit == "GiB") for x, unit in re.findall(r"([\d.]+) (GiB|MiB)", r)] for r in rows]
    total = usage(f.geo, f.plan)
    assert cells[-2][:2] == pytest.approx([total["gpu"] / 2**20, total["ram"] / 2**20], rel=0.01)


@pytest.mark.parametrize("nbytes", [1, 999 << 20, 1001 << 20, 1023 << 20, 1 << 30, 999 << 30, 1001 << 30, 9999 << 30])
def test_cells_of_the_memory_table_keep_apart(nbytes):
    assert len(cell(nbytes)) == 10
    assert cell(nbytes)[0] == " "


def test_inputs_that_no_memory_holds_are_counted_on_the_drive():
    m = assume("gpu=rtx4090,ram=24GiB,ssd=2TB@7/5")
    made = simple_plan(SEVEN_B, m.limits, Wanted(((8192, 16),), mode="backward", record=1 << 25))
    f = Forecast(SEVEN_B, made, m, m.limits, RunWork(2048, 64, 1000))
    inputs, part = 16 * 8192 * 4096 * 2 * sum(unit.x == "ssd" for unit in made.units[1:]), f.disk_parts()
    assert inputs > 30e9
    assert (part["scratch"], f.memory()["activations"]["ssd"]) == (inputs, inputs)
    assert f.disk() == 2 * f.stored() + part["spares"] + part["export"] + inputs
    assert f.step.ssd_written > inputs == f.step.swapped
    tight = replace(f, machine=replace(f.machine, ssd=f.disk() - f.stored(), reserve=0))
    assert "short by" in disk_line(tight)
    assert "fits" in disk_line(replace(tight, files=Files(existing=tight.stored()))), "a resumed run has its store"


def test_wear_is_of_the_drive_not_of_its_free_room():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    assert wear_line(f, ALL) == wear_line(replace(f, machine=replace(f.machine, ssd=10**11)), ALL)
    assert "1.2 PB" in wear_line(f, ALL)
    collate = forecast("gpu=rtx4090,ram=256GiB,ssd=2TB@7/5")
    assert wear_line(collate, {"steps": 0, "snapshots": 10**12}) == "", "less than a thousandth"
    assert "snapshots 3 TB, checkpoints 1 TB)" in wear_line(collate, {"snapshots": 3 * 10**12, "checkpoints": 10**12})


@pytest.mark.full
def test_a_run_that_wears_out_the_drives_is_warned_of():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    assert "--adam-bits" not in wear_line(f, {"steps": 239 * 10**12}, 1e6)
    line = wear_line(f, {"steps": 720 * 10**12}, 10 * 86400.0)
    less = float(re.search(r"--adam-bits 8 \((\d+) TB\), --lora 16", line)[1])
    assert less == pytest.approx(720 * f.in_8_bits.step.ssd_written / f.step.ssd_written, rel=0.01)


# ---------------------------------------------------------------- time


def test_a_figure_from_data_sheets_is_marked():
    f = forecast("gpu=rtx4090,ram=128GiB")
    measured = replace(f, machine=replace(f.machine, how="measured"))
    for line in (time_line(f), f.machine.describe()):
        assert SHEETS in line
    assert SHEETS not in time_line(measured) + measured.machine.describe()


def test_parts_have_the_time_of_their_bytes():
    """Of a drive that reads 7 GB/s and writes 5: (forecast, events, part, seconds)."""
    files, d2h = EXPORT * (1 / 7e9 + 1 / 5e9 + 1 / COPIED), RAM.machine.rates.d2h
    exact, adapters = on(UnitPlan("ssd", "ssd"), exact=True), replace(RAM, files=Files(export=10**6, merged=EXPORT))
    none = replace(RAM, machine=assume("gpu=rtx4090,ram=128GiB"))
    for f, events, part, seconds in [
        (RAM, Events(snapshots=1), "snapshots", FIXED + RAM.stored() / 5e9),
        (on(UnitPlan("ram", "ssd")), Events(snapshots=2), "snapshots", 2 * (FIXED + WEIGHTS / 5e9)),
        (SSD, Events(snapshots=1), "snapshots", FIXED),
        (none, Events(snapshots=1), "snapshots", FIXED + RAM.stored() / 1.4e9),
        (RAM, Events(), "export", FIXED + files),
        (GPU, Events(), "export", FIXED + files + WEIGHTS / d2h),
        (SSD, Events(), "export", FIXED + files + WEIGHTS / 7e9),
        (exact, Events(), "export", FIXED + files + (WEIGHTS + 2 * PARAMETERS) / 7e9),
        (adapters, Events(exports=3), "export", 3 * FIXED + (EXPORT + 3e6) * files / EXPORT),
        (
            RAM,
            Events(),
            "load",
            OPENED + WEIGHTS / LOADING * EXPORT / WEIGHTS + usage(RAM.geo, RAM.plan)["ram"] / RAM.machine.rates.pin,
        ),
        (SSD, Events(snapshots=3), "close", CLOSING),
    ]:
        assert estimated_parts(f, 1, events)[part] == pytest.approx(seconds, rel=0.01), part


def test_what_an_event_took_is_believed():
    events = Events(evaluations=3, held_out=32, samples=4, tokens=48, snapshots=2, exports=2)
    known = estimated_parts(RAM, 10, events, {"evaluations": 5.0, "samples": 7.0, "snapshots": 11.0})
    assert (known["evaluations"], known["samples"], known["snapshots"]) == (15.0, 28.0, 22.0)
    assert known["export"] == estimated_parts(RAM, 10, events)["export"]


def test_evaluations_and_samples_read_every_weight_once_a_pass():
    assert evaluation_s(RAM, 0) == 0
    assert evaluation_s(RAM, 64) == pytest.approx(2 * evaluation_s(RAM, 32))
    assert evaluation_s(GPU, 32) < GPU.step.step_s / 2
    assert token_s(SSD) > token_s(RAM) > token_s(GPU)
    assert token_s(SSD) == pytest.approx(WEIGHTS / 7e9, rel=0.05)


def test_bytes_are_counted_by_what_writes_them():
    units = SSD.plan.units
    units = (units[0], *(replace(unit, x="ssd") for unit in units[1:-1]), units[-1])
    away = replace(SSD, plan=replace(SSD.plan, units=units, between="ram"))
    events = Events(evaluations=2, held_out=64, snapshots=3, exports=2)
    counts, stored = written_bytes(away, 10, events), away.stored()
    inputs = 2 * 2 * 32 * 1024 * 2048 * 2 * ONE_B.n_layers  # twice two groups, of 32 rows
    assert counts == {"steps": 10 * away.step.ssd_written, "evaluations": pytest.approx(inputs, rel=0.01),
                      "snapshots": 0, "checkpoints": 2 * EXPORT, "start": stored}  # fmt: skip
    counts = written_bytes(RAM, 10, events)
    assert (counts["steps"], counts["evaluations"], counts["snapshots"], counts["start"]) == (0, 0, 3 * stored, 0)


def test_the_wait_names_its_parts():
    assert ready_line({"load": 0.2, "steps": 7200.0, "export": 61.0}) == "in about 2h01m: steps 2h00m, export 1m01s"


# ---------------------------------------------------------------- against the engine

TIERS = UnitPlan(x="ram"), UnitPlan("ram", "ram", base="ram"), UnitPlan("ssd", "ssd", base="ssd", x="ssd")
MIXED = UnitPlan("ram", "ssd", base="ssd"), UnitPlan("ssd", "ram", x="ssd"), UnitPlan("ram", "ram")


@pytest.mark.full
@pytest.mark.parametrize("cfg", [LLAMA, replace(GPT, halves=True), MIXTURE, HYBRID, LORA, FROZEN])
def test_an_evaluation_moves_and_a_snapshot_writes_what_is_estimated(cfg):
    """From RAM and drives: on a CPU what a GPU has is in RAM. The second time, as what is there already stays."""
    units = tuple((*TIERS, *MIXED)[u % 6] for u in range(cfg.n_units))
    made = gpu_plan(cfg, halves=cfg.halves, units=units, dtype="BF16", record=700, between="ram")
    e, f = make(cfg, made, poison=False), Forecast(cfg, made, RAM.machine, RAM.limits, RunWork(24, 2, 1))
    tables = rope_tables(e.cfg, 64, "cpu")
    inputs = [to_devices(collate(e.cfg, mb), [(tables, "cpu")]) for mb in batches(cfg, 1, 2, 24)[0]]
    for _ in range(2):
        e.queues.moved.clear()
        evaluate(e, inputs)
    moved, simulated = Counter(e.queues.moved), Counter[str]()
    for span in predict_evaluation(cfg, made, RAM.machine.rates, Batch(24, 24, 2)).spans:
        simulated[span.queue] += int(span.nbytes)
    for queue in ("d2h", "compute"):
        del moved[queue], simulated[queue]
    assert +simulated == +moved
    e.queues.moved.clear()
    save_to_store(e.placement)
    assert sum(e.queues.moved[queue] for queue in ("ssd_write", "state_write")) == f.unsaved()
    assert f.scratch + f.frozen_on_ssd <= e.placement.scratch.nbytes <= f.scratch + f.frozen_on_ssd + (1 << 20)
    e.close()


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3))
def test_a_step_has_all_its_tokens(sequences, rows, hosts):
    made = replace(RAM.plan, tokens=rows * 1024, n_micro=-(-sequences // rows // hosts) + 1)
    batch = RunWork(1024, sequences, 1).batch(replace(made, hosts=hosts))
    assert sequences * 1024 <= hosts * batch.n_micro * batch.tokens
    assert batch.n_micro <= made.n_micro

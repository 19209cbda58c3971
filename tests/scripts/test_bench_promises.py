"""The benchmark of whole runs: its lines are commands, its checkpoints are whole, its table says how far off."""

import json

import pytest
from script_files import script

from trireme.engine.lanes.trace import Span
from trireme.engine.planner.sizes import MODELS
from trireme.engine.run.command import parse
from trireme.models.config import read_config
from trireme.models.hf import sources
from trireme.storage.checkpoint import open_source

promises, ceilings = script("bench/promises"), script("bench/ceilings")
RESULT = {
    "promised_s": 90.0, "took_s": 100.0, "promised_step_s": 1.1, "step_s": 1.0,
    "gpu_gib": 20.0, "ram_gib": 9.0, "planned_gpu_gib": 20.5, "planned_ram_gib": 8.9,
}  # fmt: skip


@pytest.mark.parametrize("line", [*promises.GRID, *promises.ON_A_CPU])
def test_every_line_is_a_command(line, tmp_path, monkeypatch):
    monkeypatch.setattr(promises, "make_model", lambda folder, name, text: folder / name)
    monkeypatch.setattr(promises.demo, "make_text", lambda *given, seed: None)
    monkeypatch.setattr(promises, "make_data", lambda folder, kind: folder / f"{kind}.jsonl")
    options = parse(promises.arguments_of(line, tmp_path, tmp_path / "out"))
    assert options.max_steps
    assert options.seq_len
    assert line.split()[0] in MODELS
    assert line.split()[1] in promises.DATA


def test_the_grid_is_as_wide_as_it_is_meant_to_be():
    assert len(promises.GRID) >= 10
    assert {line.split()[1] for line in promises.GRID} == set(promises.DATA)
    assert len({line.split()[0] for line in promises.GRID}) == 5


def test_a_made_checkpoint_is_one(tmp_path):
    promises.demo.make_text(tmp_path / "stories.txt", 40, seed=1)
    made = promises.make_model(tmp_path, "llama-tiny", tmp_path / "stories.txt")
    source, cfg = open_source(made), read_config(made)
    assert cfg == MODELS["llama-tiny"]
    assert sources(cfg, {name: t.shape for name, t in source.tensors.items()})
    assert set(source.read("model.norm.weight").view("<u2")) == {0x3F80}, "1.0 in bf16"
    assert promises.make_model(tmp_path, "llama-tiny", tmp_path / "stories.txt") == made


@pytest.mark.parametrize("kind", promises.DATA)
def test_made_data_are_rows(kind, tmp_path):
    rows = [json.loads(line) for line in promises.make_data(tmp_path, kind).read_text().splitlines()]
    assert {frozenset(row) for row in rows} == {frozenset(("prompt", "completion") if kind == "chats" else ("text",))}
    assert all(map(str.strip, rows[0].values()))


def test_a_run_becomes_a_line_and_a_verdict():
    line = promises.row("a run", RESULT)
    assert line.count("|") == promises.HEAD[0].count("|")
    assert "| 1.100 |" in line
    assert "| 0.900 |" in line
    said = promises.verdict([RESULT, RESULT | {"promised_s": 100.0}])
    assert (
        said == "steps off by 10.0% in the median, 10.0% at most; whole runs off by 5.0% in the median, 10.0% at most."
    )


def test_idle_time_is_laid_to_what_a_task_waited_for():
    times = [("compute", 0, 1), ("h2d", 0, 3), ("compute", 3.0001, 4), ("compute", 5, 6), ("h2d", 4.5, 5.5)]
    spans = [Span(lane, "other", "", start, end, 0, 0) for lane, start, end in times]
    found = ceilings.idle(spans)
    assert found["compute"] == pytest.approx({"h2d": 2.0001, "host": 1.0})
    assert found["h2d"] == pytest.approx({"host": 1.5}), "compute was over half a second before"

"""The benchmark of whole runs: its lines are commands, its checkpoints are whole, its table says how far off."""

import json

import pytest
from script_files import script

from trireme.engine.run.command import parse
from trireme.models.config import read_config
from trireme.models.hf import sources
from trireme.storage.checkpoint import open_source

runs = script("bench/promises")
RESULT = {
    "promised_s": 90.0, "took_s": 100.0, "promised_step_s": 1.1, "step_s": 1.0,
    "gpu_gib": 20.0, "ram_gib": 9.0, "planned_gpu_gib": 20.5, "planned_ram_gib": 8.9,
}  # fmt: skip


@pytest.mark.parametrize("line", [*runs.GRID, *runs.ON_A_CPU])
def test_every_line_is_a_command(line, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "make_model", lambda folder, name, text: folder / name)
    monkeypatch.setattr(runs.demo, "make_text", lambda *given, seed: None)
    monkeypatch.setattr(runs, "make_data", lambda folder, kind: folder / f"{kind}.jsonl")
    options = parse(runs.arguments_of(line, tmp_path, tmp_path / "out"))
    assert options.max_steps
    assert options.seq_len
    assert line.split()[0] in runs.MODELS
    assert line.split()[1] in runs.DATA


def test_the_grid_is_as_wide_as_it_is_meant_to_be():
    assert len(runs.GRID) >= 10
    assert {line.split()[1] for line in runs.GRID} == set(runs.DATA)
    assert len({line.split()[0] for line in runs.GRID}) == 5


def test_a_made_checkpoint_is_one(tmp_path):
    runs.demo.make_text(tmp_path / "stories.txt", 40, seed=1)
    made = runs.make_model(tmp_path, "llama-tiny", tmp_path / "stories.txt")
    source, cfg = open_source(made), read_config(made)
    assert cfg == runs.MODELS["llama-tiny"]
    assert sources(cfg, {name: t.shape for name, t in source.tensors.items()})
    assert set(source.read("model.norm.weight").view("<u2")) == {0x3F80}, "1.0 in bf16"
    assert runs.make_model(tmp_path, "llama-tiny", tmp_path / "stories.txt") == made


@pytest.mark.parametrize("kind", runs.DATA)
def test_made_data_are_rows(kind, tmp_path):
    rows = [json.loads(line) for line in runs.make_data(tmp_path, kind).read_text().splitlines()]
    assert {frozenset(row) for row in rows} == {frozenset(("prompt", "completion") if kind == "chats" else ("text",))}
    assert all(map(str.strip, rows[0].values()))


def test_a_run_becomes_a_line_and_a_verdict():
    line = runs.row("a run", RESULT)
    assert line.count("|") == runs.HEAD[0].count("|")
    assert "| 1.100 |" in line
    assert "| 0.900 |" in line
    said = runs.verdict([RESULT, RESULT | {"promised_s": 100.0}])
    assert (
        said == "steps off by 10.0% in the median, 10.0% at most; whole runs off by 5.0% in the median, 10.0% at most."
    )

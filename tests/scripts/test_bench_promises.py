"""The benchmark of whole runs: its lines are commands."""

import pytest
from script_files import script

from trireme.engine.planner.sizes import MODELS
from trireme.engine.run.command import parse

promises = script("bench/promises")


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

"""The table of what ordinary machines train."""

from pathlib import Path

import pytest
from script_files import script

from trireme.engine.planner import variants

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_table_has_what_dry_runs_say():
    """A box with adapters, a box with all weights; a large model, where its experts are decoded in slices."""
    boxes, page = script("bench/boxes"), (ROOT / "docs" / "machines.md").read_text()
    assert all(f"| {box} | " in page for box in boxes.BOXES)
    first, *_, last = boxes.BOXES.items()
    for (name, machine), job in ((first, "8B, LoRA"), (last, "8B, full")):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        cells = dict(zip(boxes.JOBS, row.split(" | ")[1:], strict=True))
        assert boxes.dry_run(machine, boxes.JOBS[job]) == cells[job]
    assert all(f"| {model} | " in page for model in (*boxes.LARGE, *boxes.HYBRIDS))
    (row,) = [line for line in page.splitlines() if line.startswith("| GLM-4.7-Flash (30B) |")]
    assert row.split(" | ")[2] == boxes.large("glm-4.7-flash", boxes.DRIVES["two drives"])[0]


@pytest.mark.full
def test_more_decisions_leave_time_for_other_sizes(monkeypatch):
    """Where losses may be divided over GPUs, micro-batches of the second best size are refined, too."""
    boxes = script("bench/boxes")
    machine, job = next(m for m in boxes.BOXES.values() if "2x" in m), boxes.JOBS["70B, LoRA"]
    seconds = lambda: boxes.simulated(f"{job} {boxes.STEP} 16 --assume {machine}").step.step_s
    free = seconds()
    monkeypatch.setattr(variants, "divided_losses", lambda *given: ())
    assert free <= seconds()

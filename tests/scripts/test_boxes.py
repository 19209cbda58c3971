"""The table of what ordinary machines train."""

from pathlib import Path

import pytest
from script_files import script

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_table_has_what_dry_runs_say():
    """Two cells; a refusal is shortened in the page."""
    boxes, page = script("bench/boxes"), (ROOT / "docs" / "machines.md").read_text()
    assert all(f"| {box} | " in page for box in boxes.BOXES)
    name, machine = next(iter(boxes.BOXES.items()))
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    cells = dict(zip(boxes.JOBS, row.split(" | ")[1:], strict=True))
    assert boxes.dry_run(machine, boxes.JOBS["8B, LoRA"]) == cells["8B, LoRA"]
    assert boxes.dry_run(machine, boxes.JOBS["gpt-oss-120b, LoRA"]).startswith("no: needs 9.58 GiB of GPU memory")

"""The comparison of bf16 and fp8 in training: both runs see the same, and a picture is left."""

import json
from xml.etree import ElementTree

from script_files import script


def test_runs_that_differ_in_their_rounding_alone(tmp_path):
    learning = script("dev/learning")
    left, picture = tmp_path / "learning.json", tmp_path / "learning.svg"
    shape = ["--width", "64", "--layers", "1", "--steps", "6", "--tokens", "256", "--seq", "64", "--bytes", "100000"]
    found = learning.main(
        [*shape, "--every", "3", "--lr", "1e-2", "--device", "cpu", "--json", str(left), "--svg", str(picture)]
    )
    old, new, other = found.values()
    assert all(abs(a - b) < 1e-3 * a for a, b in zip(old["losses"], other["losses"], strict=True))
    assert len(old["losses"]) == len(new["losses"]) == 6
    assert [step for step, _ in old["evals"]] == [3, 6]
    assert old["losses"] != new["losses"]
    assert all(abs(a - b) < 0.02 * a for a, b in zip(old["losses"], new["losses"], strict=True))
    assert old["evals"][1][1] < old["losses"][0] - 0.5
    assert json.loads(left.read_text())["fp8"]["losses"] == new["losses"]
    assert len(ElementTree.parse(picture).findall("{*}polyline")) == 3

"""Machines without Triton count what a pass takes, as others do."""

import subprocess
import sys

import pytest

COUNTED = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(name)
sys.meta_path[:0] = [Without()] * {blocked}
from trireme.engine.planner.sizes import find_model
from trireme.models.sizes import measure
cfg = find_model("qwen3-30b")
print(measure.work(cfg, 1, 3000, 10**6), measure.temporaries(cfg, 1, 3000, 2), measure.temporaries(cfg, 0, 3000, 2))
"""


@pytest.mark.full
def test_counts_without_triton_are_those_with_it():
    command = lambda blocked: [sys.executable, "-c", COUNTED.format(blocked=blocked)]
    run = lambda blocked: subprocess.run(command(blocked), capture_output=True, text=True, check=True, timeout=600)
    assert run(1).stdout == run(0).stdout != ""

"""Machines without Triton count what a pass takes, as others do."""

import subprocess
import sys

import pytest

from trireme.engine.planner.sizes import find_model
from trireme.models.sizes import measure

WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(name)
sys.meta_path.insert(0, Without())
from trireme.engine.planner.sizes import find_model
from trireme.models.sizes import measure
cfg = find_model("qwen3-30b")
print(measure.work(cfg, 1, 3000, 10**6), measure.temporaries(cfg, 1, 3000, 2), measure.temporaries(cfg, 0, 3000, 2))
"""


@pytest.mark.full
def test_counts_without_triton_are_those_with_it():
    cfg = find_model("qwen3-30b")
    counts = measure.work(cfg, 1, 3000, 10**6), *(measure.temporaries(cfg, u, 3000, 2) for u in (1, 0))
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True, timeout=600)
    assert run.stdout == " ".join(map(str, counts)) + "\n"

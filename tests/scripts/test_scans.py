"""The benchmark of recurrences: its calls run on small ones, and its bounds are those counted by hand."""

import pytest
import torch
from script_files import script

from trireme.engine.planner.sizes import find_model
from trireme.kernels import ops
from trireme.models.families.scans import Scan

scans = script("bench/scans")


@pytest.mark.parametrize("delta", [False, True])
def test_both_passes_run(delta):
    own, device = Scan((0,), 2, 4, 6, 5, 4, delta=delta), torch.device("cpu")
    docs = ops.make_docs([70, 10], device)
    calls = scans.ours(own, scans.inputs(own, 80, device, torch.float32), docs)
    assert calls["forward"]().shape == (80, 4, 5)
    assert [None if t is None else t.shape for t in calls["backward"]()] == [(80, 4), (80, 4), None if delta else (4,)]


def test_bounds_of_a_mamba2_layer():
    found = scans.bounds(find_model("nemotron-3-nano").scan, 1000)
    keys, values, numbers = 1000 * 8 * 128 * 2, 1000 * 64 * 64 * 2, 1000 * 64 * 8
    flops = 2 * 1000 * 64 * (64 * (128 + 64) + 2 * 128 * 64)
    assert found["forward"] == (2 * keys + 2 * values + numbers, flops)
    assert found["backward"] == (4 * keys + 3 * values + 2 * numbers, flops * 5 // 2)


def test_the_named_models_have_recurrences():
    assert all(find_model(name).scan for name in scans.NAMES)

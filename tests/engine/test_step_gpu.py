"""On a GPU: a dozen plans leave the same bits as the run that holds everything there."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from engines import LLAMA, RealLanes, batches, final_weights, gpu_plan, make, train

from trireme.engine.plan import UnitPlan
from trireme.engine.updates import AdamW
from trireme.models import shapes

pytestmark = pytest.mark.gpu
CFG = replace(LLAMA, width=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn=96, vocab=128)
NAMES = tuple(shapes.saved_shapes(CFG, 1))
ALL_HOST = UnitPlan("host", "host", saved=tuple((n, "host") for n in NAMES), x="host")
ALL_SSD = UnitPlan("ssd", "ssd", saved=tuple((n, "ssd") for n in NAMES), x="ssd")
UNITS = {
    "host": (UnitPlan("host", "host"),) * 6,
    "ssd": (UnitPlan("ssd", "ssd"),) * 6,
    "streamed": (UnitPlan("host", "host", update="gpu"),) * 6,
    "resident": (UnitPlan("host", "host", resident=True),) * 6,
    "swap to host": (ALL_HOST,) * 6,
    "swap to ssd": (ALL_SSD,) * 6,
    "mixed": (UnitPlan(), ALL_HOST, UnitPlan("host", "ssd"), ALL_SSD, UnitPlan(), UnitPlan("ssd", "host")),
}


@cache
def on_the_gpu(n_micro: int, clip: float):
    e = make(
        CFG,
        gpu_plan(CFG, dtype="BF16", n_micro=n_micro, tokens=48),
        RealLanes("cuda", extra=("poison",)),
        AdamW(max_grad_norm=clip),
    )
    return train(e, batches(CFG, 4, n_micro, 48)), final_weights(e)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(
    ("n_micro", "mode", "between"),
    [
        (1, "forward", "gpu"),
        (3, "forward", "gpu"),
        (3, "forward", "host"),
        (2, "backward", "gpu"),
    ],
)
def test_placement_never_changes_the_numbers(units, n_micro, mode, between):
    if units == "streamed" and mode == "backward":
        pytest.skip("updates on the GPU wait for the norm")
    clip = 0.0 if mode == "backward" else 1.0
    plan = gpu_plan(
        CFG, dtype="BF16", n_micro=n_micro, tokens=48, units=UNITS[units], mode=mode, record=5000, piece=1000
    )
    plan = replace(plan, between=between, late_moments=("host", "ssd") if mode == "forward" and n_micro == 3 else ())
    plan = replace(plan, gradients="ssd" if between == "host" else "host")
    e = make(CFG, plan, RealLanes("cuda", extra=("poison",)), AdamW(max_grad_norm=clip))
    losses, weights = on_the_gpu(n_micro, clip)
    assert train(e, batches(CFG, 4, n_micro, 48)) == losses
    for name, value in final_weights(e).items():
        assert torch.equal(value, weights[name]), name
    e.lanes.close()
    e.close()


@pytest.mark.parametrize("n_micro", [1, 3])
@pytest.mark.parametrize("tier", ["gpu", "host", "ssd"])
def test_half_blocks_are_the_same_to_the_bit(tier, n_micro):
    plan = gpu_plan(CFG, dtype="BF16", n_micro=n_micro, tokens=48, halves=True, window=1, piece=1)
    e = make(CFG, replace(plan, units=(UnitPlan(tier, tier, x=tier),) * 10), RealLanes("cuda", extra=("poison",)))
    losses, weights = on_the_gpu(n_micro, 1.0)
    assert train(e, batches(CFG, 4, n_micro, 48)) == losses
    for name, value in final_weights(e).items():
        assert torch.equal(value, weights[name]), name
    e.lanes.close()
    e.close()

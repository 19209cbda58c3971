"""Constants that were fitted on one kind of machine: the plan is good where they are off by a fifth."""

import random
from dataclasses import replace

import pytest
from plans import ADAPTED, SMALL

from trireme.engine.plan import Limits
from trireme.engine.planner import predict, rule, simulate
from trireme.engine.planner.choose import Choice, choose
from trireme.engine.planner.predict import Batch
from trireme.engine.planner.rates import Rates, assume
from trireme.engine.planner.rule import Wanted

OFF = 0.2
# Numbers, and dictionaries or tuples of numbers.
CONSTANTS = {
    predict: ("PASSES", "KERNELS", "RECURRENCE", "LOSS_KERNELS", "EMBED_KERNELS", "WITHIN", "HALF"),
    rule: ("UPDATE_TOKENS", "LATE_TOKENS"),
    simulate: ("ADAM_BYTES",),
}
SHARES = (
    *("gemm", "gemm_fp8", "grouped", "grouped_add", "attention", "attention_backward", "scan", "scan_backward"),
    *("duplex", "reading", "concurrent", "launch", "host", "task", "latency", "pin", "mixed"),
)
CFG = replace(SMALL, n_layers=8)
WANTED = Wanted(((8192, 4), (4096, 8), (2048, 16)), record=1 << 20, document=2048)
# What one GPU and its RAM leave open: state in RAM, on the drive, adapters.
MACHINES = {
    "state in RAM": (CFG, "gpu=rtx4090,ram=64GiB,ssd=2TB", Limits(2 << 30, 6 << 30)),
    "state on the drive": (CFG, "gpu=rtx3060,ram=32GiB,ssd=2TB,cores=4", Limits(3 << 29, 3 << 29)),
    "adapters": (replace(ADAPTED, n_layers=8), "gpu=rtx4060laptop,ram=16GiB,ssd=1TB", Limits(3 << 29, 1 << 29)),
}


def scaled(value: object, by: random.Random) -> object:
    """A number off by OFF either way, or each of a dictionary's or tuple's numbers."""
    if isinstance(value, dict):
        return {name: scaled(number, by) for name, number in value.items()}
    if isinstance(value, tuple):
        return tuple(scaled(number, by) for number in value)
    return value * by.choice((1 - OFF, 1 + OFF))


def chosen(case: str, rates: Rates) -> Choice:
    cfg, _, limits = MACHINES[case]
    return choose(cfg, limits, rates, WANTED)


@pytest.mark.full
@pytest.mark.parametrize("case", MACHINES)
def test_a_plan_by_wrong_constants_is_nearly_the_best(case, monkeypatch):
    cfg, text, _ = MACHINES[case]
    true, by = assume(text).rates, random.Random(0)

    def seconds(plan) -> float:
        """Of a step by the true constants; steps have the same tokens."""
        batch = Batch(plan.tokens, WANTED.document, plan.n_micro)
        return predict.predict(cfg, plan, true, batch, roughly=True).step_s

    best, found = seconds(chosen(case, true).plan), []
    for _ in range(4):
        with monkeypatch.context() as patch:
            for module, names in CONSTANTS.items():
                for name in names:
                    patch.setattr(module, name, scaled(vars(module)[name], by))
            found.append(chosen(case, replace(true, **{name: scaled(getattr(true, name), by) for name in SHARES})))
    assert max(seconds(choice.plan) for choice in found) < 1.05 * best
    assert any(choice.found.step_s != pytest.approx(best, rel=0.02) for choice in found), "nothing was off"

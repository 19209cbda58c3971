"""The lower bound of a step with clipping, and how near the planned step is to it."""

import pytest
from script_files import script

from trireme.engine.plan import Limits
from trireme.engine.planner.gpus import GPUS
from trireme.engine.planner.rates import machine

GIB = 1 << 30


@pytest.mark.full
def test_a_step_of_8b_in_fp8_is_near_its_bound():
    """H100, 24 and 110 GiB: 3.06 s with updates by the CPU alone. The bound itself is 1.14 times the GPU's work."""
    clipping = script("bench/clipping")
    where = Limits(23 * GIB, 104 * GIB), machine(GPUS["h100"], 110 * GIB, dram=150e9).rates
    bound, step, computing, without = clipping.case("llama-8b", True, *where)
    assert bound.forward < bound.divided < bound.alone
    assert computing < bound.step < step < 1.1 * bound.step
    plans, least = clipping.least("llama-8b", True, *where, parts=2)
    assert plans > 1
    assert 1.08 * without < least < step

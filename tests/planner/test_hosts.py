"""Plans for several hosts: state shared out, updates on the CPU, the network's share of a step."""

from dataclasses import replace

import pytest
from plans import RATES, SEVEN_B, SMALL

from trireme.engine.buffers import usage
from trireme.engine.geometry import Geometry
from trireme.engine.plan import Limits, Plan, UnitPlan
from trireme.engine.planner.choose import choose
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.queues.names import NET
from trireme.models.config import InputError

LIMITS = Limits(24 << 30, 200 << 30)


def planned(hosts: int) -> Plan:
    return simple_plan(SEVEN_B, LIMITS, Wanted(((16384, 2),), hosts=hosts))


def test_a_host_has_its_share_of_the_state_in_ram():
    alone, last = usage(Geometry.of(SEVEN_B, planned(1)), planned(1)), planned(4)
    assert last.hosts == 4
    assert last.last_host
    assert {unit.state for unit in last.units} == {"ram"}
    state = sum(Geometry.of(SEVEN_B, last).state_span(u, last.record) for u in range(34))
    whole = sum(Geometry.of(SEVEN_B, planned(1)).state_span(u, 1 << 24) for u in range(34))
    assert state == pytest.approx(whole / 4, rel=0.15)  # whole records
    assert usage(Geometry.of(SEVEN_B, last), last)["ram"] < alone["ram"]


def test_shares_are_all_of_a_unit_once():
    for hosts in (2, 3, 4, 7):
        each = [Geometry(SMALL, "BF16", 32, host, hosts) for host in range(hosts)]
        for u in range(SMALL.n_units):
            records = [record for geo in each for record in geo.records(u, 1 << 16)]
            assert records == Geometry(SMALL, "BF16").records(u, 1 << 16)


def test_a_choice_for_hosts_is_one_that_hosts_can_run():
    """Of all variants none has state or updates on the GPU; what the network takes is in the prediction."""
    limits, wanted = Limits(8 << 30, 16 << 30), Wanted(((16384, 2), (8192, 4)), hosts=2)
    choice = choose(SMALL, limits, RATES, wanted)
    assert choice.plan.hosts == 2
    assert not any(unit.state == "gpu" or unit.update == "gpu" for unit in choice.plan.units)


def test_a_slow_network_takes_its_time():
    """The last host's queues: a sum of 4 bytes a parameter in, shares out, weights both ways."""
    plan = planned(2)
    batch, geo = Batch(plan.tokens, 2048, plan.n_micro), Geometry.of(SEVEN_B, plan)
    fast, slow = (predict(SEVEN_B, plan, replace(RATES, net=net), batch) for net in (1e11, 1e9))
    assert slow.bound == "net"
    assert slow.step_s > fast.step_s
    n = sum(geo.numel)
    sums = sum(span.nbytes for span in fast.spans if span.queue == "sum_in")
    assert sums == 4 * n
    assert slow.busy["net"] == pytest.approx(4 * n / 1e9, rel=0.05)
    assert not any(span.queue in NET for span in predict(SEVEN_B, planned(1), RATES, batch).spans)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(units=(UnitPlan(),) * 3), "state is in ram or ssd"),
        (dict(units=(UnitPlan("ram", "ram", "gpu"),) * 3), "state is in ram or ssd"),
        (dict(mode="backward"), "the mode is forward"),
        (dict(gradients="ssd"), "gradients wait in ram"),
        (dict(host=2), "host 2 of 2"),
    ],
)
def test_what_hosts_cannot_do_is_refused(change, why):
    with pytest.raises(InputError, match=why):
        replace(Plan((UnitPlan("ram", "ram"),) * 3, 64, 1), hosts=2, **change)

"""Advice is planned: what it promises, a plan for it reaches; options come before hardware; what it names fits."""

import re
from dataclasses import replace

import pytest
from plans import ONE_B, SEVEN_B

from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.advice import check_drive, faster
from trireme.engine.planner.choose import first_plan
from trireme.engine.planner.forecast import Files, Forecast, RunWork
from trireme.engine.planner.lines import rates_line
from trireme.engine.planner.rates import assume
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.sizes import find_model
from trireme.engine.tuning.chosen import adapted, targets
from trireme.models.config import Lora, ModelConfig
from trireme.models.families.packing import NF4
from trireme.models.sizes import shapes


def forecast(machine: str, cfg: ModelConfig = SEVEN_B, sequences: int = 16, **more) -> Forecast:
    m = assume(machine)
    sizes = tuple((rows * 2048, -(-sequences // rows)) for rows in (4, 2, 1) if rows <= sequences)
    made = first_plan(cfg, m.limits, Wanted(sizes, record=1 << 25), drive=bool(m.ssd))
    return Forecast(cfg, made, m, m.limits, RunWork(2048, sequences, 1000), **more)


def adapters(name: str) -> tuple[ModelConfig, ModelConfig]:
    """(a model with adapters, the same with its base in NF4)."""
    cfg = find_model(name)
    cfg = adapted(cfg, Lora(16, 32.0, targets(cfg, ())))
    return cfg, replace(cfg, packing=NF4, packed=("*layers.*proj.weight",))


@pytest.mark.full
def test_a_quantized_base_is_advised_before_hardware():
    cfg, packed = adapters("llama-3.3-70b")
    f = forecast("gpu=rtx4090,ram=64GiB,ssd=2TB", cfg, 1)
    f = f.again()
    changes = faster(f, {"--base nf4": packed})
    assert changes[0].what == "--base nf4"
    assert changes[0].gain > 3
    hardware = [not change.what.startswith("--") for change in changes]
    assert hardware == sorted(hardware)
    other = replace(f, cfg=packed).again()
    assert changes[0].step_s == pytest.approx(other.step.step_s, rel=0.02)


@pytest.mark.full
def test_what_a_change_promises_is_what_a_plan_for_it_reaches():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    changes = {change.what: change.step_s for change in faster(f)}
    assert {"--adam-bits 8", "--batch-size 32"} & changes.keys()
    assert "--batch-size 32" not in {change.what for change in faster(f, sequences=31)}
    assert "--adam-bits 8" not in {change.what for change in faster(f, resumes=True)}
    assert f.in_8_bits.step.ssd_written < 0.6 * f.step.ssd_written
    slow = forecast("gpu=rtx4090,ram=32GiB,ssd=2TB@3/2")
    twice = replace(slow, machine=assume("gpu=rtx4090,ram=32GiB,ssd=2x2TB@3/2")).again()
    promised = next(change for change in faster(slow, sequences=31) if change.what == "twice the drives")
    assert promised.step_s == pytest.approx(twice.step.step_s, rel=0.02)


@pytest.mark.full
def test_a_change_for_which_the_drives_have_no_room_is_not_advised():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5", files=Files(merged=10**12))
    full = replace(f, machine=replace(f.machine, ssd=f.disk() + f.machine.reserve - 1))
    with pytest.raises(DoesNotFit, match="Raise ssd to"):
        check_drive(full)
    check_drive(replace(full, machine=replace(full.machine, ssd=full.machine.ssd + 1)))
    check_drive(replace(full, files=replace(full.files, existing=10**9)))


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["24GiB", "64GiB"])
def test_the_ram_that_is_named_is_enough_and_not_more(gpu):
    f = forecast(f"gpu={gpu},ram=24GiB,ssd=2TB@7/5")
    with pytest.raises(DoesNotFit, match="Add ssd=") as refusal:
        check_drive(replace(f, machine=replace(f.machine, ssd=0)))
    ram = int(re.search(r"raise ram to (\d+)GiB", str(refusal.value))[1])
    check_drive(forecast(f"gpu={gpu},ram={ram}GiB"))
    with pytest.raises(DoesNotFit):
        check_drive(forecast(f"gpu={gpu},ram={ram - 4}GiB"))


@pytest.mark.full
def test_as_much_more_ram_is_enough_for_the_larger_records_that_it_brings():
    big = find_model("llama-405b")
    size = lambda ram: max(min(1 << 24, ram // 1024), min(shapes.parameters(big) // 256, ram // 256)) // 4096 * 4096

    def planned(ram: int) -> Plan:
        return simple_plan(big, Limits(22 << 30, ram), Wanted(((2048, 1),), record=size(ram)))

    with pytest.raises(DoesNotFit, match="Raise --ram by") as refusal:
        planned(4 << 30)
    more = float(re.search(r"--ram by ([\d.]+) GiB", str(refusal.value))[1])
    assert planned(int((4 + more) * 2**30)).record > size(4 << 30)


def test_what_is_planned_again_passes_micro_batches_as_the_run_may():
    f = forecast("gpu=rtx4090,ram=64GiB,ssd=2TB")
    assert [Wanted.like(f.plan, replace(f.work, accumulate=may)).accumulate for may in (True, False)] == [True, False]


@pytest.mark.full
def test_fp8_is_advised_where_computing_binds_and_the_gpu_has_it():
    cfg = find_model("llama-8b")
    cfg = replace(cfg, layers=cfg.layers[:10])
    slow_drive = "gpu=rtx4090,ram=16GiB,ssd=2TB@1/0.5"
    for machine, advised in (("gpu=rtx5090,ram=60GiB", True), ("gpu=rtx3090,ram=60GiB", False), (slow_drive, False)):
        f = forecast(machine, cfg)
        changes = {change.what: change for change in faster(f)}
        assert ("--dtype fp8" in changes) == advised
        assert all("loss" in change.line() for what, change in changes.items() if what == "--dtype fp8")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ("gpu=rtx4090,ram=64GiB", ("RTX 4090", "data sheet", "not measured", "H200")),
        ("gpu=h200,ram=64GiB", ("H200", "data sheet")),
    ],
)
def test_it_is_said_which_rates_are_from_a_data_sheet(machine, words):
    f = forecast(machine, ONE_B)
    assert all(word in rates_line(f) for word in words)
    here = replace(f.machine, how="measured before")
    assert ("measured here" in rates_line(replace(f, machine=here))) == ("4090" in machine)

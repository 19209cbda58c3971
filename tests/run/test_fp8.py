"""Runs with --dtype fp8: resumed to the bit, refused where the GPU has none, planned by its rate."""

from dataclasses import replace

import pytest
import torch
from engines import write_plan
from runs import losses, options, stopped
from safetensors.torch import load_file

from trireme.engine.plan import Limits, UnitPlan
from trireme.engine.planner.machine import this_machine
from trireme.engine.planner.rates import assume
from trireme.engine.run.begin.limits import check_fp8
from trireme.engine.run.job import prepare
from trireme.engine.run.report import method_line
from trireme.engine.run.train import finetune
from trireme.models.config import InputError
from trireme.models.families.experts import Experts
from trireme.models.sizes import narrow, shapes


@pytest.mark.full
def test_a_resumed_run_is_the_run_to_the_bit(checkpoint, monkeypatch):
    whole, cut = checkpoint / "fp8", checkpoint / "fp8-cut"
    run = replace(options(checkpoint, whole, "gpu", dtype="fp8"), max_steps=4)
    finetune(run)
    stopped(replace(run, out=str(cut)), 2, monkeypatch)
    finetune(replace(run, out=str(cut), resume=str(cut)))
    weights = [(out / "model.safetensors").read_bytes() for out in (whole, cut)]
    assert weights[0] == weights[1]
    assert len(losses(whole)) == 4
    assert losses(whole) == losses(cut)


@pytest.mark.full
def test_a_base_in_fp8_lies_anywhere_and_a_stopped_run_goes_on(checkpoint, monkeypatch):
    """Beside adapters; on the SSD it is a copy, not the user's files."""
    near, far = checkpoint / "fp8-near", checkpoint / "fp8-far"
    run = replace(options(checkpoint, near, "gpu", dtype="fp8", lora=4), max_steps=4)
    plan = prepare(replace(run, out=str(checkpoint / "fp8-planned"))).plan
    finetune(run)
    units = (UnitPlan("host", "host", x="host", base="ssd"),) * len(plan.units)
    write_plan(replace(plan, units=units, window=1), checkpoint / "fp8-far.json")
    there = replace(run, out=str(far), plan=str(checkpoint / "fp8-far.json"))
    made = prepare(replace(there, out=str(checkpoint / "fp8-planned-too")))
    assert made.files.copied == "copied: they are kept in fp8"
    whole = sum(shapes.parameters(made.cfg, u) for u in range(1, made.cfg.n_units - 1))
    assert 0.5 < sum(made.forecast.geo.base[u].nbytes for u in range(1, made.cfg.n_units - 1)) / (2 * whole) < 0.51
    stopped(there, 2, monkeypatch)
    finetune(replace(there, resume=str(far)))
    adapters = [load_file(out / "adapter_model.safetensors") for out in (near, far)]
    assert all(torch.equal(t, adapters[1][name]) for name, t in adapters[0].items())
    assert losses(near) == losses(far)
    assert len(losses(near)) == 4


@pytest.mark.parametrize(("before", "now"), [("fp8", "bf16"), ("fp8", "auto"), ("bf16", "fp8"), ("auto", "fp8")])
def test_a_run_keeps_its_products(checkpoint, before, now):
    given = options(checkpoint, checkpoint / "kept", "gpu")
    kept = prepare(replace(given, dtype=before)).pinned.json()
    began = {"auto": "fp32"}.get(before, before)
    with pytest.raises(InputError, match=f"--dtype {now}: the run began with {began}, which cannot change"):
        prepare(replace(given, dtype=now), kept)
    assert prepare(replace(given, dtype=before), kept).cfg.fp8 == (before == "fp8")


def test_runs_from_before_fp8_were_in_bf16(checkpoint):
    given = options(checkpoint, checkpoint / "old", "gpu", dtype="bf16")
    kept = prepare(given).pinned.json()
    del kept["model"]["config"]["fp8"]
    assert not prepare(given, kept).cfg.fp8


def test_it_is_said(checkpoint):
    given = options(checkpoint, checkpoint / "said", "gpu", dtype="fp8")
    assert method_line(prepare(given)).endswith(
        "compute in bf16, linear layers of blocks in fp8 (mfu is relative to its rate)"
    )


def test_whether_experts_are_is_said(checkpoint, monkeypatch):
    """By the rows that each has in a micro-batch."""
    given = options(checkpoint, checkpoint / "said too", "gpu", dtype="fp8")
    job = prepare(given)
    job = replace(job, cfg=replace(job.cfg, experts=Experts(4, 2, 32, True)))
    assert "linear layers, not experts, of blocks in fp8" in method_line(job)
    monkeypatch.setattr(narrow, "LEAST_ROWS", 0)
    assert "linear layers and experts of blocks in fp8" in method_line(job)


def test_a_gpu_without_fp8_is_refused_by_name(checkpoint, monkeypatch):
    given = options(checkpoint, checkpoint / "refused", "gpu", dtype="fp8", dry_run=True)
    given = replace(given, gpu_memory=None, ram=None)
    for gpu in ("rtx3090", "a100", "rtxa6000"):
        with pytest.raises(InputError, match=r"--dtype fp8: .*(3090|A100|A6000).* multiplies no fp8"):
            prepare(replace(given, assume=f"gpu={gpu},ram=64GiB"))
    cfg, cuda = prepare(replace(given, assume="gpu=rtx4090,ram=64GiB")).cfg, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Orin")
    for capability, has in (((8, 0), False), ((8, 7), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        if has:
            check_fp8(cfg, cuda, None)
        else:
            with pytest.raises(InputError, match="--dtype fp8: NVIDIA Orin multiplies no fp8"):
                check_fp8(cfg, cuda, None)
        check_fp8(replace(cfg, fp8=False), cuda, None)
    check_fp8(cfg, torch.device("cpu"), None)


def test_known_gpus_have_both_rates():
    reached = {"rtx4090": 330e12, "rtx5090": 419e12, "h200": 1437e12, "l40s": 526e12, "rtx6000ada": 529e12}
    for gpu, rate in reached.items():
        assert assume(f"gpu={gpu},ram=64GiB").rates.fp8 == pytest.approx(rate, rel=3e-3), gpu
    for gpu in ("rtx3090", "a100", "rtxa4000", "rtxa6000"):
        assert assume(f"gpu={gpu},ram=64GiB").rates.fp8 == 0, gpu


def test_this_machine_is_measured_in_fp8(tmp_path):
    found = [this_machine(torch.device("cpu"), "BF16", Limits(1 << 30, 1 << 30), [tmp_path], fp8) for fp8 in (0, 1)]
    assert found[0].rates.fp8 == 0 < found[1].rates.fp8

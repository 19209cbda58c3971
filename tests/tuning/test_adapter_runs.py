"""Runs that train adapters or some tensors: where the base lies changes nothing, stopped runs go on, peft opens it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapters_of_peft import set_keys, tensors_of
from engines import write_plan
from runs import losses, options, stopped
from safetensors.torch import load_file
from tiny import CASES, oracle

from trireme.engine.plan import DoesNotFit, Plan, UnitPlan
from trireme.engine.run import cli, loop, opening
from trireme.engine.run.job import make
from trireme.engine.run.loop import train
from trireme.engine.run.options import Options
from trireme.models.config import InputError, Lora, parse_config
from trireme.storage.files import StoreError

pytestmark = pytest.mark.grid
TENSORS = "adapter_model.safetensors"


def adapters(checkpoint, out, where="gpu", **others):
    return options(checkpoint, checkpoint / out, where, lora=4, lora_targets=("q_proj", "down_proj"), **others)


@pytest.fixture(scope="module")
def whole(checkpoint):
    """(tensors, losses) of the run with everything on the device."""
    train(adapters(checkpoint, "whole", merge=True))
    return load_file(checkpoint / "whole" / TENSORS), losses(checkpoint / "whole")


@pytest.fixture(scope="module")
def far(checkpoint):
    """A plan file: the base on the SSD, what is trained in RAM."""
    plan = make(adapters(checkpoint, "planned")).plan
    path = checkpoint / "far.json"
    unit = UnitPlan("ram", "ram", x="ssd", base="ssd")
    write_plan(replace(plan, units=(unit,) * len(plan.units), window=1), path)
    return str(path)


def same(out, whole) -> None:
    tensors = load_file(out / TENSORS)
    assert tensors.keys() == whole[0].keys()
    assert all(torch.equal(t, whole[0][name]) for name, t in tensors.items())
    assert losses(out) == whole[1]


@pytest.mark.full
@pytest.mark.parametrize("place", ["near", "far"])
def test_a_stopped_run_goes_on(checkpoint, whole, far, place, monkeypatch):
    """Its store has what is trained, not the base."""
    run = adapters(checkpoint, f"stopped-{place}", **({"plan": far} if place == "far" else {}))
    stopped(run, 5, monkeypatch)
    base = (checkpoint / "checkpoint/model.safetensors").stat().st_size
    store = Path(run.out) / ".run"
    assert sum(f.stat().st_size for f in store.rglob("*.safetensors")) < base
    train(replace(run, resume=run.out))
    same(Path(run.out), whole)


@pytest.mark.full
def test_a_run_moves_its_base_when_resumed(checkpoint, whole, far, monkeypatch):
    run = adapters(checkpoint, "moved")
    stopped(run, 5, monkeypatch)
    there = replace(Plan.load(Path(far)), record=make(run).plan.record)
    write_plan(there, checkpoint / "there.json")
    train(replace(run, resume=run.out, plan=str(checkpoint / "there.json")))
    same(checkpoint / "moved", whole)


def changed(checkpoint: Path) -> None:
    """Another value in a frozen tensor, the header as it was."""
    path = checkpoint / "checkpoint/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)


@pytest.mark.full
def test_a_base_that_changed_is_refused(checkpoint, whole, far, monkeypatch):
    """Between two runs, and while one reads it in each step."""
    run = adapters(checkpoint, "changed", plan=far)
    stopped(run, 3, monkeypatch)
    changed(checkpoint)
    with pytest.raises(InputError, match="Restore"):
        train(replace(run, resume=run.out))
    changed(checkpoint)
    real = loop.train_step

    def meanwhile(e, micro, number, *others):
        if number == 5:
            changed(checkpoint)
        return real(e, micro, number, *others)

    with monkeypatch.context() as m, pytest.raises(StoreError, match="was changed"):
        m.setattr(loop, "train_step", meanwhile)
        train(replace(run, resume=run.out))
    changed(checkpoint)
    train(replace(run, resume=run.out))
    same(checkpoint / "changed", whole)


@pytest.mark.full
def test_a_part_of_the_layers_is_trained_further_with_its_dropout(checkpoint, whole):
    part = Path(shutil.copytree(checkpoint / "whole", checkpoint / "part"))
    with tensors_of(part) as tensors:
        for name in [name for name in tensors if "layers.0.self_attn" in name]:
            del tensors[name]
    set_keys(part, lora_dropout=0.1)
    runs = {name: options(checkpoint, checkpoint / name, "gpu", adapter=str(part)) for name in ("on", "off")}
    runs["off"] = replace(runs["off"], lora_dropout=0.0)
    for run in runs.values():
        train(replace(run, max_steps=2))
    assert json.loads((checkpoint / "on/adapter_config.json").read_text())["lora_dropout"] == 0.1
    assert losses(checkpoint / "on")[1] != losses(checkpoint / "off")[1]
    after = load_file(checkpoint / "on" / TENSORS)
    assert after.keys() == whole[0].keys()
    assert {name for name, t in after.items() if not t.any()} == whole[0].keys() - tensors.keys()
    assert not any(torch.equal(t, after[name]) for name, t in tensors.items())


@pytest.mark.full
def test_frozen_tensors_come_out_as_they_went_in(checkpoint, monkeypatch):
    run = options(checkpoint, checkpoint / "some", "ssd", train=("*.mlp.*", "*embed*"), freeze=("*layers.0.*",))
    run = replace(run, max_steps=4)
    stopped(run, 2, monkeypatch)
    with pytest.raises(InputError, match="--freeze"):
        train(replace(run, resume=run.out, freeze=("*norm*",)))
    train(replace(run, resume=run.out))
    before, after = (load_file(checkpoint / name / "model.safetensors") for name in ("checkpoint", "some"))
    trained = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert trained == {name for name in before if (".mlp." in name and "layers.0." not in name) or "embed" in name}


@pytest.mark.full
def test_a_refusal_offers_what_fits(checkpoint):
    small = replace(options(checkpoint, checkpoint / "small", "gpu"), dry_run=True, gpu_memory=4 << 20)
    for change, offers in (
        (dict(ram=6 << 20), "--lora 16"), (dict(lora=16, ram=4 << 20), "--base nf4"), (dict(lora=16, ram=3 << 20), ""),
    ):  # fmt: skip
        with pytest.raises(DoesNotFit) as refused:
            train(replace(small, **change))
        assert offers in str(refused.value)


# ---------------------------------------------------------------- scales


def test_adapters_of_experts_have_no_dropout():
    """peft refuses it as well."""
    mixture = parse_config(CASES["mixtral"][1] | dict(model_type="mixtral"))
    with pytest.raises(InputError, match="--lora-dropout"):
        opening.lora_of(Options(lora=4, lora_dropout=0.1, lora_targets=("q_proj", "experts")), mixture, None)
    assert opening.lora_of(Options(lora=4, lora_dropout=0.1), mixture, None).dropout == 0.1
    assert isinstance(opening.lora_of(Options(lora=4, lora_targets=("experts",)), mixture, None), Lora)


def test_an_alpha_that_is_larger_by_a_ratio_trains_b_faster_by_it():
    """LoRA+ as published, with two learning rates, beside one rate and a larger scale: the same sum of W and B A."""
    ratio, x, y = 8.0, torch.randn(32, 6, dtype=torch.float64), torch.randn(32, 5, dtype=torch.float64)
    first = torch.randn(3, 6, dtype=torch.float64)

    def trained(scale, rates):
        a, b = first.clone().requires_grad_(), torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
        groups = [dict(params=[p], lr=lr) for p, lr in zip((a, b), rates, strict=True)]
        optimizer = torch.optim.AdamW(groups, eps=1e-30, weight_decay=0.0)
        for _ in range(10):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(x @ a.T @ b.T * scale, y).backward()
            optimizer.step()
        return (scale * b @ a).detach()

    assert torch.allclose(trained(2.0, (1e-2, ratio * 1e-2)), trained(2.0 * ratio, (1e-2, 1e-2)), rtol=1e-3)


@pytest.mark.full
def test_adapters_of_experts_in_both_forms(checkpoint, tmp_path):
    """They are the same numbers: written, converted, trained further."""
    sizes = dict(vocab_size=json.loads((checkpoint / "checkpoint/config.json").read_text())["vocab_size"])
    model, arguments = CASES["qwen3 moe"]
    oracle(model, arguments | sizes)[0].save_pretrained(tmp_path / "checkpoint")
    for path in (*(checkpoint / "checkpoint").glob("token*"), checkpoint / "stories.txt"):
        shutil.copy(path, tmp_path / "checkpoint" if path.name != "stories.txt" else tmp_path)
    run = options(tmp_path, tmp_path / "stacked", "gpu", lora=2, lora_targets=("q_proj", "experts"), log=())
    train(run)
    train(replace(run, out=str(tmp_path / "separate"), expert_adapters="separate"))
    words = ("merge", str(tmp_path / "separate"), "--expert-adapters", "stacked", "--out", str(tmp_path / "back"))
    assert cli.main(words) == 0
    stacked, separate, back = (load_file(tmp_path / name / TENSORS) for name in ("stacked", "separate", "back"))
    assert back.keys() == stacked.keys() != separate.keys()
    assert all(torch.equal(t, back[name]) for name, t in stacked.items())
    further = replace(run, lora=None, lora_targets=())
    for name in ("stacked", "separate"):
        train(replace(further, adapter=str(tmp_path / name), out=str(tmp_path / f"further-{name}")))
    one, other = (load_file(tmp_path / f"further-{name}" / TENSORS) for name in ("stacked", "separate"))
    assert all(torch.equal(t, other[name]) for name, t in one.items())

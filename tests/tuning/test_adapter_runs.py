"""Runs that train adapters: where the base lies changes nothing, stopped runs go on, the output is peft's."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import write_plan
from runs import losses, options, stopped
from safetensors.torch import load_file, save_file
from tiny import CASES

from trireme.engine.amounts import gb
from trireme.engine.plan import DoesNotFit, Plan, UnitPlan
from trireme.engine.planner.lines import disk_line
from trireme.engine.queues.names import WRITES
from trireme.engine.run import job, loop
from trireme.engine.run.begin.model import lora_with_dropout
from trireme.engine.run.cli import main
from trireme.engine.run.job import make
from trireme.engine.run.loop import train as finetune
from trireme.models.config import InputError, Lora, parse_config
from trireme.storage.files import StoreError

pytestmark = pytest.mark.grid

TENSORS = "adapter_model.safetensors"


def adapters(checkpoint, out, where="gpu", **more):
    return options(checkpoint, checkpoint / out, where, lora=4, lora_targets=("q_proj", "down_proj"), **more)


@pytest.fixture(scope="module")
def whole(checkpoint):
    """(tensors, losses) of the run with everything on the device."""
    finetune(adapters(checkpoint, "whole", merge=True))
    return load_file(checkpoint / "whole" / TENSORS), losses(checkpoint / "whole")


def same(out, whole) -> None:
    found = load_file(out / TENSORS)
    assert found.keys() == whole[0].keys()
    assert all(torch.equal(t, whole[0][name]) for name, t in found.items())
    assert losses(out) == whole[1]


@pytest.fixture(scope="module")
def far(checkpoint):
    """A plan file: the base on the SSD, what is trained in RAM."""
    plan = make(adapters(checkpoint, "planned")).plan
    path = checkpoint / "far.json"
    write_plan(replace(plan, units=(UnitPlan("ram", "ram", x="ssd", base="ssd"),) * len(plan.units), window=1), path)
    return str(path)


@pytest.mark.full
def test_the_base_may_lie_on_the_ssd_and_nothing_is_written_there(checkpoint, whole, far, monkeypatch):
    moved, real = [], loop.train_step

    def counted(e, micro, number, *more):
        assert e.placement.files is not None, "the base is copied"
        before = [e.queues.moved[queue] for queue in WRITES]
        stats = real(e, micro, number, *more)
        weights = sum(e.geo.x_bytes(mb.tokens) for mb in micro) * (e.geo.n_units - 2)  # x of blocks is swapped there
        moved.append(sum(e.queues.moved[queue] for queue in WRITES) - sum(before) - weights)
        return stats

    monkeypatch.setattr(loop, "train_step", counted)
    finetune(adapters(checkpoint, "far", plan=far))
    same(checkpoint / "far", whole)
    assert moved == [0] * len(whole[1])


@pytest.mark.full
@pytest.mark.parametrize("place", ["near", "far"])
def test_a_stopped_run_goes_on(checkpoint, whole, far, place, monkeypatch):
    run = adapters(checkpoint, f"stopped-{place}", **({"plan": far} if place == "far" else {}))
    stopped(run, 5, monkeypatch)
    store = checkpoint / f"stopped-{place}" / "store"
    base = (checkpoint / "checkpoint/model.safetensors").stat().st_size
    assert sum(f.stat().st_size for f in store.rglob("*") if f.suffix == ".safetensors") < base
    finetune(replace(run, resume=run.out))
    same(checkpoint / f"stopped-{place}", whole)


@pytest.mark.full
def test_a_run_moves_its_base_when_resumed(checkpoint, whole, far, monkeypatch):
    run = adapters(checkpoint, "moved")
    stopped(run, 5, monkeypatch)
    there = replace(Plan.load(Path(far)), record=make(run).plan.record)
    write_plan(there, checkpoint / "there.json")
    finetune(replace(run, resume=run.out, plan=str(checkpoint / "there.json")))
    same(checkpoint / "moved", whole)


def changed(checkpoint: Path) -> None:
    """Another value in a frozen tensor, the header as it was."""
    path = checkpoint / "checkpoint/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)


@pytest.mark.full
def test_a_base_that_changed_is_refused(checkpoint, whole, far, monkeypatch):
    run = adapters(checkpoint, "changed", plan=far)
    stopped(run, 3, monkeypatch)
    changed(checkpoint)
    with pytest.raises(InputError, match="the frozen weights of .* are not those that the run began with. Restore"):
        finetune(replace(run, resume=run.out))
    changed(checkpoint)
    real = loop.train_step

    def meanwhile(e, micro, number, *more):
        if number == 5:
            changed(checkpoint)
        return real(e, micro, number, *more)

    with monkeypatch.context() as m, pytest.raises(StoreError, match="was changed while the run trained"):
        m.setattr(loop, "train_step", meanwhile)
        finetune(replace(run, resume=run.out))
    changed(checkpoint)
    finetune(replace(run, resume=run.out))
    same(checkpoint / "changed", whole)


def test_peft_opens_it_and_merged_it_computes_the_same(checkpoint, whole):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint / "checkpoint", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        plain = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, checkpoint / "whole")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(checkpoint / "whole/merged", dtype=torch.float32)(ids).logits
    assert not torch.allclose(plain, adapted, atol=1e-2)
    assert torch.allclose(merged, adapted, atol=1e-2)  # the checkpoint is bf16 or fp32
    said = json.loads((checkpoint / "whole/adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(checkpoint / "checkpoint")


@pytest.mark.full
def test_an_adapter_is_trained_further(checkpoint, whole):
    more = options(checkpoint, checkpoint / "further", "gpu", adapter=str(checkpoint / "whole"))
    finetune(replace(more, lr=1e-9, max_steps=1))
    with pytest.raises(
        InputError, match="finished. To train its result further, give --adapter .*further, and another"
    ):
        finetune(replace(more, resume=more.out))
    found = load_file(checkpoint / "further" / TENSORS)
    assert all(torch.allclose(t, whole[0][name], atol=1e-6) for name, t in found.items())


@pytest.mark.full
def test_a_part_of_the_layers_is_trained_further_with_its_dropout(checkpoint, whole, capsys):
    shutil.copytree(checkpoint / "whole", checkpoint / "part")
    tensors = {name: t for name, t in whole[0].items() if "layers.0.self_attn" not in name}
    save_file(tensors, checkpoint / "part" / TENSORS)
    path = checkpoint / "part/adapter_config.json"
    config = json.loads(path.read_text()) | {"lora_dropout": 0.1, "target_modules": ".*q_proj|.*down_proj"}
    path.write_text(json.dumps(config))
    more = options(checkpoint, checkpoint / "part-out", "gpu", adapter=str(checkpoint / "part"))
    finetune(replace(more, max_steps=2))
    report = capsys.readouterr().out
    assert json.loads((checkpoint / "part-out/adapter_config.json").read_text())["lora_dropout"] == 0.1
    off = options(checkpoint, checkpoint / "part-off", "gpu", adapter=str(checkpoint / "part"), lora_dropout=0.0)
    finetune(replace(off, max_steps=2))
    assert "part was trained with lora_dropout 0.1; here it is trained with 0" in capsys.readouterr().out
    assert losses(checkpoint / "part-off")[1] != losses(checkpoint / "part-out")[1]
    assert "part has nothing for model.layers.0.self_attn.q_proj: these stay without an adapter" in report
    found = load_file(checkpoint / "part-out" / TENSORS)
    assert found.keys() == whole[0].keys()
    assert {name for name, t in found.items() if not t.any()} == whole[0].keys() - tensors.keys()
    assert not any(torch.equal(t, found[name]) for name, t in tensors.items())


@pytest.mark.full
def test_frozen_tensors_come_out_as_they_went_in(checkpoint, monkeypatch, capsys):
    run = options(checkpoint, checkpoint / "some", "ssd", train=("*.mlp.*", "*embed*"), freeze=("*layers.0.*",))
    run = replace(run, max_steps=4)
    stopped(run, 2, monkeypatch)
    finetune(replace(run, resume=run.out))
    assert "--freeze *layers.0.*: model.layers.0." in capsys.readouterr().out
    before, after = (load_file(checkpoint / name / "model.safetensors") for name in ("checkpoint", "some"))
    changed = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert changed == {name for name in before if (".mlp." in name and "layers.0." not in name) or "embed" in name}
    with pytest.raises(InputError, match="is finished"):
        finetune(replace(run, resume=run.out))


@pytest.mark.full
def test_blocks_may_all_be_frozen(checkpoint):
    """The largest gradient is then that of the embedding."""
    found = []
    for where in ("gpu", "ssd"):
        finetune(replace(options(checkpoint, checkpoint / f"ends-{where}", where, freeze=("*layers*",)), max_steps=2))
        found.append(losses(checkpoint / f"ends-{where}"))
    assert found[0] == found[1]


def test_what_is_trained_cannot_change(checkpoint, monkeypatch):
    run = options(checkpoint, checkpoint / "other", "gpu", freeze=("*embed*",))
    stopped(run, 2, monkeypatch)
    with pytest.raises(InputError, match="what is trained cannot change. Leave --lora"):
        finetune(replace(run, resume=run.out, freeze=("*norm*",)))


@pytest.mark.full
def test_a_refusal_offers_adapters_that_fit(checkpoint, capsys):
    small = replace(options(checkpoint, checkpoint / "small", "gpu"), dry_run=True, gpu_memory=4 << 20)
    with pytest.raises(DoesNotFit, match=r"--gpu-memory by .* Or train adapters, which fit: --lora 16\.$"):
        finetune(replace(small, ram=6 << 20))
    with pytest.raises(DoesNotFit) as refused:
        finetune(replace(small, ram=1 << 20))
    assert "--lora" not in str(refused.value)
    based = r"smallest plan needs .* Or quantize what is frozen, which then fits: --base fp8\.$"
    with pytest.raises(DoesNotFit, match=based):
        finetune(replace(small, lora=16, ram=4 << 20))
    finetune(replace(small, lora=16, ram=4 << 20, base="fp8"))
    with pytest.raises(DoesNotFit, match=r" Or train adapters, which fit: --lora 16 --base fp8\.$"):
        finetune(replace(small, ram=4 << 20))
    with pytest.raises(DoesNotFit, match=r"smallest plan needs [^:]*$"):
        finetune(replace(small, lora=16, ram=3 << 20))
    box = replace(small, assume="gpu=rtx4090,ram=750MiB", gpu_memory=(1280 + 4) << 20, ram=8 << 20, device="auto")
    with pytest.raises(DoesNotFit, match=r" Or train adapters, .* --lora 16, .*s a step of 256 tokens, .* tok/s\.$"):
        finetune(box)
    finetune(replace(box, lora=16))
    assert "LoRA, rank 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "said"), [("fp32", ""), ("bf16", "(copied: they are F32, and computed with in BF16)")]
)
def test_a_copy_of_the_base_is_said_with_its_size(checkpoint, dtype, said):
    made = make(adapters(checkpoint, "copied", dtype=dtype))
    there = replace(made.forecast, plan=made.plan.changed(range(len(made.plan.units)), base="ssd"))
    assert there.frozen_on_ssd > 1 << 20
    line = f"frozen weights {gb(there.frozen_on_ssd)} {said}"
    assert (line in disk_line(there)) == bool(said)
    assert there.disk_parts()["frozen"] == there.frozen_on_ssd * bool(said)


def test_merged_later_it_is_the_same(checkpoint, whole, capsys):
    out = checkpoint / "later"
    assert main(["merge", str(checkpoint / "whole"), "--out", str(out)]) == 0
    merged = checkpoint / "whole/merged"
    assert {p.name for p in out.iterdir()} == {p.name for p in merged.iterdir()}
    assert all(p.read_bytes() == (merged / p.name).read_bytes() for p in out.iterdir())
    assert "the model with its adapter" in capsys.readouterr().out


MERGES = {
    "no adapter": (["nowhere", "--out", "x"], "nowhere: no such folder. Name the folder of an adapter"),
    "no folder to write": (["whole"], "--out is missing. Name the folder to write: "),
    "no adapter named": (["--out", "x"], "no adapter is named. Name its folder: "),
    "a folder with files": (["whole", "--out", "whole"], "--out whole is there already. Name another"),
    "no such model": (["whole", "--out", "x", "--model", "y"], "--model y is not a folder. Name the checkpoint"),
    "a base that is elsewhere": (
        ["hub", "--out", "x"],
        "someone/model: not found: http://127.0.0.1:9 cannot be reached",
    ),
    "another base": (["whole", "--out", "x", "--model", "other"], "for this model it would be"),
    "an unknown option": (
        ["whole", "--out", "x", "--rank", "3"],
        "unknown option --rank. See trireme merge --help.",
    ),
}


@pytest.mark.parametrize("case", MERGES)
def test_what_cannot_be_merged_is_said_in_one_line(checkpoint, whole, case, monkeypatch, capsys):
    monkeypatch.chdir(checkpoint)
    for name, source in (("hub", "whole"), ("other", "checkpoint")):
        shutil.copytree(source, name, dirs_exist_ok=True)
    config = Path("hub/adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "someone/model"}))
    config = Path("other/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 99}))
    argv, words = MERGES[case]
    before = sorted(Path().rglob("*"))
    assert main(["merge", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


@pytest.mark.full
def test_merging_without_room_is_refused_before_the_first_step(checkpoint, monkeypatch):
    run = adapters(checkpoint, "full", merge=True)
    nbytes = (checkpoint / "checkpoint/model.safetensors").stat().st_size
    usage = lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 39, nbytes)
    monkeypatch.setattr(job.shutil, "disk_usage", usage)
    with pytest.raises(DoesNotFit, match="what the run writes there takes"):
        finetune(run)
    assert not Path(run.out).exists()
    finetune(replace(run, merge=False, max_steps=1))


def test_an_adapter_of_another_model_is_said(checkpoint, whole, capsys):
    shutil.copytree(checkpoint / "checkpoint", checkpoint / "sibling", dirs_exist_ok=True)
    more = options(checkpoint, checkpoint / "sibling-out", "gpu", adapter=str(checkpoint / "whole"))
    make(replace(more, model=str(checkpoint / "sibling")))
    assert re.search("--adapter .* was made for .*checkpoint, not for .*sibling", capsys.readouterr().err)


BAD = {
    "a pattern without a match": (dict(freeze=("*q_porj*",)), r"no tensor of the model has such a name. Near it: "),
    "the output matrix of a tied model": (dict(train=("lm_head*",)), "The output matrix is the embedding: model.embed"),
    "patterns and adapters": (dict(freeze=("*norm*",), lora=4), "--freeze and --train: with adapters"),
    "a rank above the width": (dict(lora=100_000), "a LoRA rank of 100000"),
    "no such target": (dict(lora=4, lora_targets=("query",)), "is called query; there are"),
    "alpha without a rank": (dict(lora_alpha=3.0), "Give their rank"),
    "more than read_adapter takes": (
        dict(lora=4, lora_alpha=1e9),
        r"--lora-alpha 1e[+]09: expected at most 1,000,000\.",
    ),
    "merge without adapters": (dict(merge=True), "Give their rank"),
    "an adapter and a rank": (dict(adapter="x", lora=4), "has its own rank"),
    "no adapter": (dict(adapter="nowhere"), "nowhere: no such folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_fits_nothing_is_said_in_one_line(checkpoint, case):
    change, words = BAD[case]
    with pytest.raises(InputError, match=words) as refused:
        make(options(checkpoint, checkpoint / "bad", "gpu", **change))
    assert "\n" not in str(refused.value)


def test_the_plain_rule_puts_the_base_where_there_is_room(checkpoint):
    run = adapters(checkpoint, "ruled")
    limits = ((14, 7), (8, 7), (6, 3))  # MiB of GPU and RAM
    plans = [make(replace(run, gpu_memory=gpu << 20, ram=ram << 20)).plan for gpu, ram in limits]
    assert [{unit.base for unit in plan.units} for plan in plans] == [{"gpu"}, {"gpu", "ram"}, {"gpu", "ssd"}]
    assert not any("ssd" in (unit.weights, unit.state) for plan in plans for unit in plan.units)


def test_adapters_of_experts_have_no_dropout():
    """peft refuses it as well."""
    mixture = parse_config(CASES["mixtral"][1] | dict(model_type="mixtral"))
    with pytest.raises(InputError, match="--lora-dropout 0.1: adapters of experts have none, as in peft"):
        lora_with_dropout(mixture, Lora(4, 8.0, ("q_proj", "experts")), 0.1)
    assert lora_with_dropout(mixture, Lora(4, 8.0, ("q_proj",)), 0.1).dropout == 0.1
    assert lora_with_dropout(mixture, Lora(4, 8.0, ("experts",)), None).dropout == 0.0

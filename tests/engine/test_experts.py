"""A mixture of experts in the engine: one span for a layer's experts, one by one in every file."""

import json
import shutil
from dataclasses import replace

import pytest
import stories
import torch
from engines import LIMITS, MemoryStore, gpu_plan
from runs import make_small, options, stopped
from tiny import CASES, oracle, relative
from transformers import AutoModelForCausalLM

from trireme.engine.build import build
from trireme.engine.exchange import Exchange
from trireme.engine.plan import UnitPlan
from trireme.engine.queues.real import InlineQueues
from trireme.engine.run.job import make
from trireme.engine.run.loop import train as finetune
from trireme.engine.tuning.chosen import adapted, chosen, targets
from trireme.models import hf
from trireme.models.config import InputError, Lora, read_config, with_experts
from trireme.storage.checkpoint import open_source

pytestmark = pytest.mark.grid

CASE = "qwen3 moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as transformers writes it."""
    path = tmp_path_factory.mktemp("mixture")
    oracle(*CASES[CASE])[0].save_pretrained(path)
    return path


def exchange(cfg, source, tier="gpu", dtype="BF16"):
    plan = gpu_plan(cfg, units=(UnitPlan(tier, tier, base=tier),) * cfg.n_units, dtype=dtype, record=700)
    return Exchange(cfg, source, build(cfg, plan, LIMITS, InlineQueues(), store=MemoryStore()).placement)


@pytest.mark.parametrize(("tier", "dtype"), [("gpu", "F32"), ("ssd", "BF16")])
def test_in_and_out_again_is_the_same_bytes(folder, tmp_path, tier, dtype):
    x = exchange(read_config(folder), open_source(folder), tier, dtype)
    x.load()
    x.save(tmp_path / "out")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(20)[None]
    assert relative(reopened(ids).logits, oracle(*CASES[CASE])[0](ids).logits) < 1e-5


def test_files_name_each_expert_and_the_engine_all(folder):
    x = exchange(read_config(folder), open_source(folder))
    shard = next(s for s in x.placement.shards() if s.entry.kind == "weights" and s.entry.u == 1)
    stored = {t.name: t for t in shard.layout.tensors}
    fused = x.placement.geo.weights[1]["model.layers.0.mlp.experts.gate_up_proj"]
    up = stored["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert fused.shape == (6, 48, 40)
    assert up.shape == (24, 40)
    assert up.offset == fused.offset + 3 * up.nbytes  # behind both of expert 0, and this one's gate
    assert stored.keys() == {name for name in open_source(folder).tensors if ".layers.0." in name}


def test_experts_may_be_frozen_and_adapters_stand_beside_attention(folder, tmp_path):
    cfg, source = read_config(folder), open_source(folder)
    frozen = chosen(cfg, ("*.experts.*", "*.mlp.gate.*"), ())
    x = exchange(frozen, source, "host")
    assert not [t.name for layout in x.placement.geo.stored for t in layout.tensors if ".mlp." in t.name]
    assert [name.rpartition(".")[2] for name in targets(cfg, ())] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    with pytest.raises(InputError, match="no linear layer of the blocks is called gate_proj"):
        adapted(cfg, Lora(2, 4.0, ("gate_proj",)))
    beside = adapted(cfg, Lora(2, 4.0, targets(cfg, ())))
    exchange(beside, source, "host").load()


@pytest.mark.full
def test_a_run_on_two_gpus_is_that_of_one_to_the_byte(tmp_path, monkeypatch):
    """With a loss of balance, stopped with 2 and resumed with 1: weights, losses and what is told of the load."""
    make_small(tmp_path, "demo")
    model_type, keys = CASES[CASE]
    oracle(model_type, keys | dict(vocab_size=stories.VOCAB))[0].save_pretrained(tmp_path / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "demo" / name, tmp_path / "checkpoint" / name)
    one, two = (tmp_path / name for name in ("one", "two"))
    run = replace(options(tmp_path, one, "gpu", router_aux=0.1, micro_batch=1), max_steps=3, lr=1e-2)
    finetune(run)
    on_two = replace(run, out=str(two), gpus=2)
    assert make(replace(on_two, out=str(tmp_path / "planned"))).plan.gpus == 2
    stopped(on_two, 2, monkeypatch)
    finetune(replace(run, out=str(two), resume=str(two)))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    told = ("step", "loss", "grad_norm", "expert_share", "experts_idle", "router_aux")
    logs = [[json.loads(line) for line in (out / "log.jsonl").open()] for out in (one, two)]
    steps = [[[r[name] for name in told] for r in log if "loss" in r] for log in logs]
    assert len(steps[0]) == 3
    assert steps[0] == steps[1]


def test_a_missing_expert_is_named(folder):
    cfg, found = read_config(folder), open_source(folder).shapes
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    with pytest.raises(InputError, match=f"lacks {name}, which"):
        hf.canonical_names(cfg, {n: s for n, s in found.items() if n != name})
    with pytest.raises(InputError, match=r"mlp.gate.weight has shape \[5, 40\], config.json says \[6, 40\]"):
        hf.canonical_names(cfg, found | {"model.layers.0.mlp.gate.weight": (5, 40)})
    with pytest.raises(InputError, match="calls for 2 layers of 2,000,000,000 experts"):
        hf.canonical_names(with_experts(cfg, count=2_000_000_000), found)

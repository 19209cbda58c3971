"""Adapters out and in: peft opens ours, we open peft's, and merged they are an ordinary checkpoint."""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import LIMITS, MemoryScratch, MemoryStore, batches, final_weights, gpu_plan, train
from safetensors.numpy import load_file
from tiny import CASES, oracle
from transformers import AutoModelForCausalLM

from trireme.engine.between import Reader
from trireme.engine.build import build, inputs_on
from trireme.engine.exchange import Exchange
from trireme.engine.plan import UnitPlan
from trireme.engine.queues.real import InlineQueues
from trireme.engine.step import evaluate
from trireme.engine.tuning.adapters import WEIGHTS, adapter_shapes, save_adapter
from trireme.engine.tuning.chosen import adapted, targets
from trireme.engine.tuning.merge import merge_adapter
from trireme.engine.tuning.opened import read_adapter
from trireme.engine.tuning.packed import as_stored
from trireme.engine.tuning.peft_config import CONFIG
from trireme.models.config import InputError, Lora
from trireme.models.families.table import FAMILIES
from trireme.models.lora import initial
from trireme.models.rows import rope_tables
from trireme.storage.checkpoint import open_source

TARGETS = {"gpt2": ("c_attn", "c_fc"), "llama": ("q_proj", "v_proj", "down_proj"), "qwen3": ("k_proj", "gate_proj"),
           "qwen3 moe": ("q_proj", "experts"), "gpt oss": ("experts",), "mixtral": ("o_proj", "experts"),
           "glm4 moe": ("mlp.experts", "o_proj")}  # fmt: skip
CASE = pytest.mark.parametrize("case", TARGETS)


def based(case, folder):
    """(cfg, the checkpoint of a random model in `folder`)"""
    reference, cfg = oracle(*CASES[case])
    reference.save_pretrained(folder)
    return adapted(cfg, Lora(2, 6.0, TARGETS[case])), open_source(folder)


def engine(cfg, source, adapters=None, tier="ssd"):
    plan = gpu_plan(cfg, units=(UnitPlan("host", "host", base=tier),) * cfg.n_units, record=700)
    e = build(cfg, plan, LIMITS, InlineQueues(), store=MemoryStore(), scratch=MemoryScratch())
    Exchange(cfg, source, e.placement, adapters).load()
    return e


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """case -> (cfg, source, engine, folder) of an adapter after three steps, in `folder` with its base; for reading."""

    @cache
    def made(case):
        folder = tmp_path_factory.mktemp("adapter")
        cfg, source = based(case, folder / "base")
        e = engine(cfg, source)
        train(e, batches(cfg, 3, 2, 24), lr=0.05)
        save_adapter(folder / "adapter", cfg, Reader(e.placement), str(folder / "base"))
        return cfg, source, e, folder

    return made


@pytest.fixture
def adapter(trained, tmp_path):
    """(the model of an adapter, that adapter's folder, to be spoiled)"""
    cfg, *_, folder = trained("llama")
    return replace(cfg, lora=None, frozen=()), Path(shutil.copytree(folder / "adapter", tmp_path / "adapter"))


def logits(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits[0]


@CASE
def test_peft_and_a_merged_checkpoint_compute_what_we_compute(case, trained, tmp_path):
    peft = pytest.importorskip("peft")
    cfg, source, e, folder = trained(case)
    merge_adapter(folder / "adapter", cfg, source, tmp_path / "merged")
    base, merged = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder / "base", tmp_path / "merged")
    )
    batch = batches(cfg, 1, 1, 24)[0][0]
    mine = evaluate(e, [inputs_on(cfg, batch, [(rope_tables(cfg, 64, "cpu"), "cpu")])])[0]
    ids, labels = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.labels).long()
    losses = lambda model: torch.nn.functional.cross_entropy(
        logits(model, ids), labels, reduction="none", ignore_index=-100
    )
    assert torch.allclose(mine, losses(merged), atol=2e-5)
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapter")
    assert torch.allclose(mine, losses(theirs), atol=2e-5)
    with theirs.disable_adapter():  # it has learned something
        assert not torch.allclose(mine, losses(theirs), atol=1e-2)


MIXTURES = ("qwen3 moe among dense layers", "qwen2 moe among dense layers", "mixtral", "gpt oss", "olmoe", "glm4 moe",
            "solar open", "dots1", "minimax m2", "exaone moe", "hy v3", "mellum, dense layers, no window",
            "granite moe", "ernie moe", "deepseek v2", "deepseek v3", "deepseek v32", "glm moe dsa, a shared index",
            "glm4 moe lite", "granite 4 hybrid with experts", "nemotron 3", "qwen3 next",
            "qwen3.5 moe", "hunyuan moe")  # fmt: skip


def test_each_family_of_mixtures_is_compared_with_peft():
    families = {name for name, family in FAMILIES.items() if family.experts and not family.inner}
    assert {CASES[case][0] for case in MIXTURES} == families


@pytest.mark.grid
@pytest.mark.parametrize("case", MIXTURES)
def test_peft_opens_all_linear_layers_of_a_mixture(case, tmp_path):
    """Without experts and with them: it takes a target called gate_proj for that of all experts."""
    peft = pytest.importorskip("peft")
    reference, cfg = oracle(*CASES[case])
    reference.save_pretrained(tmp_path / "base")
    source, ids = open_source(tmp_path / "base"), torch.arange(3, 30)
    plain, as_read = logits(reference, ids), as_stored(cfg, source)
    off = 4e-4 if cfg.scan else 1e-4  # rounding grows in recurrences of random weights
    for experts in ((), ("experts",)):
        adapter, merged = (tmp_path / f"{name} {len(experts)}" for name in ("adapter", "merged"))
        cfg = adapted(as_read, Lora(2, 8.0, (*targets(as_read, ("all-linear",)), *experts)))
        values = {name: initial(f"{name}.lora_A.weight", shape) for name, shape in adapter_shapes(cfg).items()}
        e = engine(cfg, source, lambda name, a, b, values=values: [values[name].flatten()[a:b].numpy()], "gpu")
        save_adapter(adapter, cfg, Reader(e.placement), str(tmp_path / "base"))
        merge_adapter(adapter, cfg, source, merged)
        wanted = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), ids)
        theirs = peft.PeftModel.from_pretrained(deepcopy(reference), adapter)
        assert torch.allclose(logits(theirs, ids), wanted, atol=off)
        assert torch.allclose(logits(theirs.merge_and_unload(), ids), wanted, atol=off)
        assert not torch.allclose(plain, wanted, atol=1e-2)


@CASE
def test_an_adapter_comes_back_as_it_went(case, trained):
    cfg, source, e, folder = trained(case)
    found = read_adapter(folder / "adapter", replace(cfg, lora=None, frozen=()))
    assert (found.lora.rank, found.lora.scale) == (2, 3.0)
    again = engine(adapted(replace(cfg, frozen=()), found.lora), source, found.values, tier="gpu")
    before, after = final_weights(e), final_weights(again)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_frozen_tensors_are_exported_as_they_were(trained, tmp_path):
    _, source, e, folder = trained("llama")
    Exchange(e.cfg, source, e.placement).save(tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (folder / "base/model.safetensors").read_bytes()


def test_a_fresh_adapter_changes_nothing(tmp_path):
    cfg, source = based("llama", tmp_path / "base")
    tensors = final_weights(engine(cfg, source))
    assert all(bool(t.any()) == ("lora_A" in name) for name, t in tensors.items())
    bound = cfg.width**-0.5
    widest = max(float(t.abs().max()) for name, t in tensors.items() if "q_proj.lora_A" in name)
    assert 0.8 * bound < widest <= bound


def _config(**change):
    def damage(folder):
        config = json.loads((folder / CONFIG).read_text()) | change
        (folder / CONFIG).write_text(json.dumps(config))

    return damage


BAD = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "has no adapter_config.json"),
    "a whole model": (
        lambda folder: (folder / CONFIG).rename(folder / "config.json"),
        "has no adapter_config.json: it is a whole model. Take it as the checkpoint.",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "cannot be read"),
    "a pickle": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        "is a pickle, which is not read",
    ),
    "mlx-lm's": (
        lambda folder: (folder / CONFIG).write_text('{"fine_tune_type": "lora", "num_layers": 16}'),
        "adapter_config.json is of mlx-lm, not of peft. Fuse the adapter there",
    ),
    "another kind": (_config(peft_type="IA3"), "peft_type is 'IA3'"),
    "DoRA": (_config(use_dora=True), "use_dora is True"),
    "whole modules": (_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "another rank": (_config(r=3), r"is \[2, 40\], for this model it would be \[3, 40\]"),
    "no number": (_config(r="2"), "r is '2'"),
    "not JSON": (lambda folder: (folder / CONFIG).write_text("{"), "adapter_config.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_adapter_of_this_model_is_refused_in_one_line(case, adapter):
    (cfg, folder), (damage, words) = adapter, BAD[case]
    damage(folder)
    with pytest.raises(InputError, match=words) as refused:
        read_adapter(folder, cfg)
    assert "\n" not in str(refused.value)


def test_an_adapter_of_another_base_is_refused(adapter):
    cfg, folder = adapter
    with pytest.raises(InputError, match=r"down_proj.lora_A.weight is \[2, 56\], for this model it would be \[2, 64\]"):
        read_adapter(folder, replace(cfg, ffn=64))


@pytest.mark.parametrize(("lora", "words"), [
    (Lora(0, 1.0, ("q_proj",)), "a LoRA rank of 0"),
    (Lora(41, 1.0, ("q_proj",)), "expected 1 to 40"),
    (Lora(2, 1.0, ("q_proj", "query")), "is called query"),
])  # fmt: skip
def test_ranks_and_targets_that_fit_nothing(lora, words):
    with pytest.raises(InputError, match=words):
        adapted(oracle(*CASES["llama"])[1], lora)


def test_the_scale_of_a_rank_stabilised_adapter(adapter):
    cfg, folder = adapter
    _config(use_rslora=True)(folder)
    found = read_adapter(folder, cfg)
    assert found.lora.scale == pytest.approx(6.0 / np.sqrt(2))
    assert load_file(folder / WEIGHTS).keys() == found.source.tensors.keys()

"""Adapters of strangers: how their tensors are named, which layers they have, what else they hold."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CASES, oracle
from transformers import AutoModelForCausalLM

from trireme.engine.tuning.adapters import PREFIX, WEIGHTS
from trireme.engine.tuning.merge import merge_adapter
from trireme.engine.tuning.opened import read_adapter
from trireme.engine.tuning.peft_config import CONFIG
from trireme.models.config import InputError
from trireme.storage.checkpoint import open_source

peft = pytest.importorskip("peft")


def make(folder, case="llama", **asked):
    """(an adapter of peft in `folder`, its base in `folder`/base; ModelConfig)"""
    model, cfg = oracle(*CASES[case])
    model.save_pretrained(folder / "base")
    keys = dict(r=2, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM") | asked
    peft.get_peft_model(model, peft.LoraConfig(**keys)).save_pretrained(folder / "adapter")
    return folder / "adapter", cfg


def peft_logits(folder):
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    with torch.no_grad():
        plain = base(IDS).logits
        found = peft.PeftModel.from_pretrained(base, folder / "adapter")(IDS).logits
    assert not torch.allclose(plain, found, atol=1e-2)
    return found


def merged_logits(folder, cfg):
    merge_adapter(folder / "adapter", cfg, open_source(folder / "base"), folder / "merged")
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)(IDS).logits


IDS = torch.arange(3, 30)[None]
MODULES = ["q_proj", "down_proj"]


@pytest.mark.parametrize("renamed", [
    lambda name: name.removeprefix(PREFIX),
    lambda name: name.replace(".weight", ".default.weight"),
])  # fmt: skip
def test_names_of_other_tools_are_read(tmp_path, renamed):
    folder, cfg = make(tmp_path, target_modules=MODULES)
    expected = peft_logits(tmp_path)
    save_file({renamed(name): t for name, t in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    found = read_adapter(folder, cfg)
    name = "model.layers.1.mlp.down_proj.lora_B.weight"
    assert torch.equal(found.tensor(name), torch.from_numpy(next(found.values(name, 0, 80)).copy()).view(40, 2))
    assert torch.allclose(merged_logits(tmp_path, cfg), expected, atol=1e-5)


PARTS = {
    "one layer": dict(target_modules=MODULES, layers_to_transform=[1]),
    "a layer by its number": dict(target_modules=MODULES, layers_to_transform=1, layers_pattern="layers"),
    "a regular expression": dict(target_modules=r".*layers\.(1\.self_attn\.q_proj|[01]\.mlp\.down_proj)"),
    "full names": dict(target_modules=["model.layers.1.self_attn.q_proj", "layers.0.mlp.down_proj"]),
    "excluded by name": dict(target_modules="all-linear", exclude_modules=["layers.0.self_attn.q_proj", "v_proj"]),
}


@pytest.mark.parametrize("case", PARTS)
def test_layers_without_an_adapter_stay_as_they_are(tmp_path, case):
    folder, cfg = make(tmp_path, **PARTS[case])
    found = read_adapter(folder, cfg)
    assert "model.layers.0.self_attn.q_proj" in found.absent
    assert "model.layers.1.self_attn.q_proj" not in found.absent
    assert not next(found.values("model.layers.0.self_attn.q_proj.lora_A.weight", 3, 9)).any()
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-5)


def test_experts_of_some_layers(tmp_path):
    parameters = [f"1.mlp.experts.{matrix}" for matrix in ("gate_up_proj", "down_proj")]
    folder, cfg = make(tmp_path, "gpt oss", target_modules=["q_proj"], target_parameters=parameters)
    assert read_adapter(folder, cfg).absent == tuple(f"model.layers.0.{p[2:]}" for p in parameters)
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)


SINGLE = {
    "qwen3 moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}


@pytest.mark.parametrize("case", SINGLE)
def test_adapters_of_single_experts_are_merged(tmp_path, case):
    """As transformers 4 has them."""
    mlp, modules = SINGLE[case]
    folder, cfg = make(tmp_path, case, target_modules=["q_proj"])
    generator, tensors = torch.Generator().manual_seed(1), load_file(folder / WEIGHTS)
    for layer in range(cfg.n_layers):
        for expert in range(6):
            for module in modules:
                inner, outer = (cfg.width, cfg.experts.width)[:: -1 if module == modules[2] else 1]
                name = f"{PREFIX}model.layers.{layer}.{mlp}.experts.{expert}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(2, inner, generator=generator) * 0.2
                tensors[f"{name}.lora_B.weight"] = torch.randn(outer, 2, generator=generator) * 0.2
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(
        json.dumps(config | {"target_modules": ["q_proj", *modules], "target_parameters": None})
    )
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)
    with pytest.raises(InputError, match=rf"single experts \(model.layers.0.{mlp}.experts.0.\w+\) cannot be trained; "):
        read_adapter(folder, cfg)


def drop(*ends):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(ends)]


def add(name, *shape):
    return lambda tensors: tensors.update({name: torch.ones(shape)})


HELD = {
    "lm_head": (dict(target_modules=["q_proj", "lm_head"]), None, "adapters of lm_head are not supported. Those"),
    "embedding": (dict(target_modules=["embed_tokens"]), None, "adapters of model.embed_tokens are not supported"),
    "half of one": ({}, drop("1.mlp.down_proj.lora_B.weight"), r"lacks model.layers.1.mlp.down_proj.lora_B.weight, wh"),
    "one of them": ({}, drop("1.mlp.down_proj.lora_B.weight", "1.mlp.down_proj.lora_A.weight"), "is not whole"),
    "a deeper model": ({}, add("model.layers.2.mlp.down_proj.lora_A.weight", 2, 56), "adapters of model.layers.2.mlp."),
    "two of one name": ({}, add("model.layers.1.mlp.down_proj.lora_A.weight", 2, 56), "has a tensor twice"),
    "a bias": ({}, add("model.layers.1.mlp.down_proj.lora_B.bias", 40), "lora_B.bias is not of a plain LoRA adapter"),
    "another name": ({}, add("x\x1b" + "y" * 500, 1), r"adapters of x\\x1by"),
    "nothing": (dict(target_modules="none.*|.*q_proj"), drop("weight"), "holds no adapters"),
}  # fmt: skip


@pytest.mark.parametrize("case", HELD)
def test_what_has_no_place_is_named(tmp_path, case):
    asked, change, words = HELD[case]
    folder, cfg = make(tmp_path, **(asked or dict(target_modules=MODULES)))
    if change:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)
    with pytest.raises(InputError, match=words) as refused:
        read_adapter(folder, replace(cfg, frozen=("*",)))
    assert "\n" not in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_one_of_two_matrices_of_experts_is_refused(tmp_path):
    folder, cfg = make(tmp_path, "gpt oss", target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(InputError, match="target_parameters names one of mlp.experts.gate_up_proj and mlp.exp.*both"):
        read_adapter(folder, cfg)

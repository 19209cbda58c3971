"""Adapters of strangers: how their tensors are named, which layers they have, what else they hold."""

import json
from dataclasses import replace

import engines
import pytest
import torch
from engines import LIMITS, batches, gpu_plan, train
from safetensors.torch import load_file, save_file
from tiny import CASES, oracle
from transformers import AutoModelForCausalLM

from trireme.engine.between import Reader
from trireme.engine.build import build
from trireme.engine.exchange import Exchange
from trireme.engine.queues.real import InlineQueues
from trireme.engine.run.begin.model import about_adapter
from trireme.engine.run.options import Options
from trireme.engine.tuning.adapters import WEIGHTS, save_adapter
from trireme.engine.tuning.chosen import adapted
from trireme.engine.tuning.merge import merge_adapter
from trireme.engine.tuning.opened import read_adapter
from trireme.engine.tuning.peft_config import CONFIG
from trireme.engine.tuning.spellings import PREFIX
from trireme.engine.updates import AdamW
from trireme.models.config import InputError, Lora, numbers
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
    "excluded by a regular expression": dict(target_modules=MODULES, exclude_modules=r".*layers\.0\.self_attn.*"),
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


def make_single(folder, case):
    """As `make`, with an adapter for each expert, as transformers 4 has them: the last expert of layer 1 has none."""
    mlp, modules = SINGLE[case]
    adapter, cfg = make(folder, case, target_modules=["q_proj"])
    generator, tensors = torch.Generator().manual_seed(1), load_file(adapter / WEIGHTS)
    for layer in range(cfg.n_layers):
        for expert in range(6):
            for module in modules:
                inner, outer = (cfg.width, cfg.experts.width)[:: -1 if module == modules[2] else 1]
                name = f"{PREFIX}model.layers.{layer}.{mlp}.experts.{expert}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(2, inner, generator=generator) * 0.2
                tensors[f"{name}.lora_B.weight"] = torch.randn(outer, 2, generator=generator) * 0.2
    save_file(tensors, adapter / WEIGHTS)
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(
        json.dumps(config | {"target_modules": ["q_proj", *modules], "target_parameters": None})
    )
    return adapter, cfg


@pytest.mark.parametrize("case", SINGLE)
def test_adapters_of_single_experts_are_merged(tmp_path, case):
    _, cfg = make_single(tmp_path, case)
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)


def test_single_experts_without_an_adapter_stay_as_they_are(tmp_path):
    folder, cfg = make_single(tmp_path, "qwen3 moe")
    tensors = load_file(folder / WEIGHTS)
    drop("layers.1.mlp.experts.5.gate_proj.lora_A.weight", "layers.1.mlp.experts.5.gate_proj.lora_B.weight")(tensors)
    with pytest.raises(InputError, match="experts.5.gate_proj.lora_A.weight, which adapter_config.json calls for"):
        save_file(tensors, folder / WEIGHTS)
        read_adapter(folder, cfg)
    targets = r".*\.(q_proj|experts\.[0-4]\.\w+|layers\.0\.mlp\.experts\.5\.\w+|experts\.5\.(up|down)_proj)"
    config = json.loads((folder / CONFIG).read_text()) | {"target_modules": targets}
    (folder / CONFIG).write_text(json.dumps(config))
    found = read_adapter(folder, cfg)
    a, b = (found.tensor(f"model.layers.1.mlp.experts.gate_up_proj.lora_{x}.weight").view(6, 4, -1) for x in "AB")
    assert [bool(t.any()) for t in (a[4, :2], a[5, :2], a[5, 2:], b[5, :2], b[5, 2:])] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert merged_logits(tmp_path, cfg).isfinite().all()


OUTER = {
    "head": (dict(target_modules=["q_proj", "lm_head"]), "adapters of lm_head cannot be trained; `merge` adds"),
    "embedding": (dict(target_modules=["embed_tokens"]), "adapters of model.embed_tokens cannot be trained"),
    "both, of their own ranks": (
        dict(target_modules=["embed_tokens", "lm_head", "q_proj"], rank_pattern={"lm_head": 5, "embed_tokens": 1}),
        "adapters of model.embed_tokens and lm_head cannot be trained; `merge` adds them to their model",
    ),
    "whole modules": (
        dict(target_modules=MODULES, modules_to_save=["norm", "lm_head"]),
        r"whole weights in an adapter .lm_head.weight and 5 more. cannot be trained; `merge` adds them to their model",
    ),
}


@pytest.mark.parametrize("case", OUTER)
def test_embedding_head_and_whole_modules_are_merged(tmp_path, case):
    asked, words = OUTER[case]
    folder, cfg = make(tmp_path, **asked)
    tensors = load_file(folder / WEIGHTS)
    changed = {name: t + 0.1 for name, t in tensors.items() if ".lora_" not in name}  # as if trained
    save_file(tensors | changed, folder / WEIGHTS)
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)
    with pytest.raises(InputError, match=words):
        read_adapter(folder, cfg)


def test_an_embedding_that_transformers_calls_otherwise_is_merged(tmp_path):
    _, cfg = make(
        tmp_path, "nemotron 3", target_modules=["q_proj", "embeddings", "lm_head"], rank_pattern={"embeddings": 3}
    )
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=2e-4)


def test_the_head_of_gpt2_is_merged(tmp_path):
    """Its linear layers within blocks are stored (in, out), the head is not."""
    _, cfg = make(tmp_path, "gpt2 untied", target_modules=["c_attn", "wte", "lm_head"])
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)


def test_the_gate_of_a_shared_expert_is_merged(tmp_path):
    folder, cfg = make(tmp_path, "qwen2 moe", target_modules=["o_proj", "shared_expert_gate"])
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)
    with pytest.raises(
        InputError, match=r"layers.0.mlp.shared_expert_gate and .*1.mlp.shared_expert_gate cannot be tr"
    ):
        read_adapter(folder, cfg)


@pytest.mark.parametrize("asked", [
    dict(target_modules=["embed_tokens"]), dict(target_modules=["q_proj", "lm_head"]),
    dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
])  # fmt: skip
def test_embedding_and_head_that_are_one_matrix_are_refused(tmp_path, asked):
    folder, cfg = make(tmp_path, "llama tied", **asked)
    with pytest.raises(InputError, match="changes model.embed_tokens or lm_head, which are one matrix in this model"):
        read_adapter(folder, cfg, merging=True)


RANKS = {
    "of one scale": dict(
        rank_pattern={"down_proj": 4, r"layers\.0\..*q_proj": 1},
        alpha_pattern={"down_proj": 12, r"layers\.0\..*q_proj": 3},
    ),
    "of several scales": dict(rank_pattern={"model.layers.1.mlp.down_proj": 5}),
    "stabilised": dict(rank_pattern={"q_proj": 3}, use_rslora=True),
}


@pytest.mark.parametrize("case", RANKS)
def test_ranks_and_alphas_by_module_are_merged(tmp_path, case):
    folder, cfg = make(tmp_path, target_modules=MODULES, **RANKS[case])
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-5)


def test_scales_are_of_a_run_s_model_where_there_are_several(tmp_path):
    """A resumed run compares them; without, records are those of older versions."""
    folder, cfg = make(tmp_path, target_modules=MODULES, alpha_pattern={"1.mlp.down_proj": 1.5})
    found = adapted(cfg, read_adapter(folder, cfg).lora)
    assert numbers(found)["lora"]["scales"] == [["model.layers.1.mlp.down_proj", 0.75]]
    assert numbers(adapted(cfg, Lora(2, 6.0, ("q_proj",))))["lora"] == {"rank": 2, "alpha": 6.0, "targets": ["q_proj"]}


def trained_logits(folder, cfg, steps):
    """(ours, peft's) after as many steps on IDS."""
    found, source = read_adapter(folder / "adapter", cfg), open_source(folder / "base")
    cfg, adamw = adapted(cfg, found.lora), AdamW(weight_decay=0.0, max_grad_norm=0.0)
    e = build(cfg, gpu_plan(cfg, n_micro=1), LIMITS, InlineQueues(), adamw=adamw)
    Exchange(cfg, source, e.placement, found.values).load()
    batch = batches(cfg, 1, 1, 24)[0]
    train(e, [batch] * steps, lr=0.01)
    save_adapter(folder / "further", cfg, Reader(e.placement), str(folder / "base"))
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    optimizer = torch.optim.AdamW(theirs.parameters(), 0.01, (adamw.beta1, adamw.beta2), adamw.eps, weight_decay=0.0)
    ids, labels = (torch.from_numpy(values).long() for values in (batch[0].ids, batch[0].labels))
    for _ in range(steps):
        torch.nn.functional.cross_entropy(theirs(ids[None]).logits[0], labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(base, folder / "further")(IDS).logits, theirs(IDS).logits


FURTHER = {
    "ranks of one scale": (
        lambda folder: make(folder, target_modules=MODULES, **RANKS["of one scale"]),
        "has adapters of ranks from 1 to 4: they are written in rank 4, with zeros behind",
    ),
    "several scales": (
        lambda folder: make(folder, target_modules=MODULES, **RANKS["of several scales"]),
        "zeros behind",
    ),
    "stabilised": (lambda folder: make(folder, target_modules=MODULES, **RANKS["stabilised"]), "zeros behind"),
    "scales within one matmul": (
        lambda folder: make(
            folder, target_modules=["q_proj", "k_proj", "v_proj"], alpha_pattern={"q_proj": 1, "1.self_attn.v_proj": 9}
        ),
        "",
    ),
    "packed in one matrix": (
        lambda folder: make(
            folder, "gpt2", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, alpha_pattern={"h.0.attn.c_attn": 3}
        ),
        "",
    ),
    "scales of experts": (
        lambda folder: make(
            folder,
            "gpt oss",
            target_modules=["o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            alpha_pattern={"0.mlp.experts.down_proj": 1, "o_proj": 3},
        ),
        "",
    ),
    "some layers": (lambda folder: make(folder, **PARTS["full names"]), "these stay without an adapter"),
    "single experts": (
        lambda folder: make_single(folder, "qwen3 moe"),
        "has an adapter for each expert: gate and up are trained as one of twice the rank, as peft does",
    ),
}


@pytest.mark.parametrize("case", FURTHER)
def test_training_goes_on_as_in_peft(tmp_path, case, monkeypatch):
    monkeypatch.setattr(engines, "BALANCE", 0.0)
    made, said = FURTHER[case]
    adapter, cfg = made(tmp_path)
    options = Options(model=str(tmp_path / "base"), adapter=str(adapter))
    assert not said or any(line.endswith(said) for line in about_adapter(options, cfg))
    before = peft_logits(tmp_path)
    ours, theirs = trained_logits(tmp_path, cfg, 3)
    assert not torch.allclose(before, theirs, atol=1e-2)
    assert torch.allclose(ours, theirs, atol=1e-4)


def drop(*ends):
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(ends)]


def add(name, *shape):
    return lambda tensors: tensors.update({name: torch.ones(shape)})


HELD = {
    "positions": ({}, add("transformer.wpe.lora_embedding_A", 2, 9), "adapters of transformer.wpe are not supported"),
    "a larger head": (dict(target_modules=MODULES, modules_to_save=["lm_head"]), add(f"{PREFIX}lm_head.weight", 99, 40),
                      r"lm_head.weight is \[99, 40\], for this model it would be \[97, 40\]"),
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


@pytest.mark.parametrize("case", ["gpt oss", "mixtral"])
@pytest.mark.parametrize("parameters", [["experts.gate_up_proj"], ["experts.down_proj", "0.mlp.experts.gate_up_proj"]])
def test_one_of_two_matrices_of_experts(tmp_path, case, parameters):
    folder, cfg = make(tmp_path, case, target_modules=[], target_parameters=parameters)
    other = "down_proj" if "down_proj" not in parameters[0] else "gate_up_proj"
    assert any(module.endswith(f"1.{cfg.names.experts}.{other}") for module in read_adapter(folder, cfg).absent)
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)


@pytest.mark.parametrize("asked", [
    dict(target_modules=["model.layers.1.self_attn.q_proj", "lm_head", "down_proj"], layers_to_transform=[0]),
    dict(target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head", "down_proj", "score"]),
    dict(target_modules=["q_proj", "lm_head"], modules_to_save=["lm_head"]),
])  # fmt: skip
def test_what_peft_leaves_out_is_not_called_for(tmp_path, asked):
    """Full names go before layers, whole modules before adapters; a module that the model lacks is no matter."""
    _, cfg = make(tmp_path, **asked)
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)

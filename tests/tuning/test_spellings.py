"""Adapters made with other classes and versions of transformers: one module has several names."""

import json

import pytest
import torch
import wrapped
from safetensors.torch import load_file, save_file
from tiny import CASES, oracle
from transformers import AutoModelForImageTextToText

from trireme.engine.tuning.adapters import WEIGHTS, adapter_shapes, peft_names
from trireme.engine.tuning.chosen import adapted
from trireme.engine.tuning.merge import merge_adapter
from trireme.engine.tuning.opened import read_adapter
from trireme.engine.tuning.peft_config import CONFIG
from trireme.engine.tuning.spellings import PREFIX
from trireme.models import hf
from trireme.models.config import InputError, Lora, ModelConfig, parse_config
from trireme.storage.checkpoint import open_source

peft = pytest.importorskip("peft")

MODULES = ("q_proj", "down_proj")
INSIDE, BEFORE, ALONE, HEADLESS = "model.language_model.", "language_model.model.", "model.", ""


def of(case: str) -> ModelConfig:
    if case not in wrapped.CASES:
        model_type, keys = CASES[case]
        return parse_config({"model_type": model_type, "hidden_act": "silu"} | keys)
    model_type, keys, vision, more = wrapped.CASES[case]
    return parse_config({"model_type": model_type, "text_config": keys, "vision_config": vision} | more)


def make(folder, cfg: ModelConfig, renamed=str, **keys):
    """An adapter of q_proj and down_proj, its tensors named by `renamed`."""
    every = adapted(cfg, Lora(2, 6.0, MODULES))
    shapes, names = adapter_shapes(every), peft_names(every)
    folder.mkdir()
    save_file({renamed(names[name]): torch.ones(shape) for name, shape in shapes.items()}, folder / WEIGHTS)
    config = dict(peft_type="LORA", r=2, lora_alpha=6, target_modules=list(MODULES)) | keys
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def replaced(here: str, there: str):
    return lambda name: name.replace(here, there, 1)


@pytest.mark.parametrize(("case", "here", "there"), [
    ("gemma3", INSIDE, BEFORE), ("gemma3", INSIDE, ALONE), ("qwen2.5 vl", INSIDE, ALONE), ("qwen3.5", INSIDE, ALONE),
    ("mistral3", INSIDE, BEFORE), ("llama", ALONE, INSIDE), ("llama", ALONE, BEFORE), ("llama", ALONE, HEADLESS),
    ("qwen3.5", INSIDE, HEADLESS),
])  # fmt: skip
def test_a_language_model_alone_or_within_another(case, here, there, tmp_path):
    """Lists and patterns of adapter_config.json are of the adapter's own names."""
    cfg, behind = of(case), PREFIX + there
    keys = lambda base: dict(
        target_modules=rf"^{base}(?!.*(lm_head|emb|visual)).*(q_proj|down_proj)$",
        alpha_pattern={f"{base}layers.1.mlp.down_proj": 3},
    )
    plain = read_adapter(make(tmp_path / "plain", cfg, **keys(here)), cfg)
    found = read_adapter(make(tmp_path / "other", cfg, replaced(PREFIX + here, behind), **keys(there)), cfg)
    assert found.names == {name: replaced(PREFIX + here, behind)(stored) for name, stored in plain.names.items()}
    assert (found.lora, found.ranks, found.scales, found.absent) == (
        plain.lora, plain.ranks, plain.scales, plain.absent,
    )  # fmt: skip
    assert sorted(set(plain.scales.values())) == [1.5, 3.0]


def test_a_module_that_is_saved_whole_has_the_adapters_own_name(tmp_path):
    cfg, name = of("gemma3"), f"{ALONE}norm"
    folder = make(tmp_path / "adapter", cfg, replaced(PREFIX + INSIDE, PREFIX + ALONE), modules_to_save=[name])
    save_file(load_file(folder / WEIGHTS) | {f"{PREFIX}{name}.weight": torch.ones(cfg.width)}, folder / WEIGHTS)
    assert read_adapter(folder, cfg, merging=True).whole == {cfg.names.final_norm + ".weight": f"{PREFIX}{name}.weight"}


def test_both_spellings_of_one_tensor_are_refused(tmp_path):
    cfg = of("gemma3")
    folder = make(tmp_path / "adapter", cfg)
    tensors = load_file(folder / WEIGHTS)
    name = f"{PREFIX}{INSIDE}layers.1.mlp.down_proj.lora_A.weight"
    save_file(tensors | {name.replace(INSIDE, ALONE): tensors[name].clone()}, folder / WEIGHTS)
    with pytest.raises(InputError, match="in two ways, model.layers and model.language_model.layers. Save"):
        read_adapter(folder, cfg)


def test_modules_of_two_spellings_are_refused(tmp_path):
    """Patterns and lists of adapter_config.json would be read in one of them."""
    cfg = of("gemma3")
    rename = lambda name: name.replace(INSIDE, BEFORE) if "layers.1." in name else name
    with pytest.raises(InputError, match=f"in two ways, {BEFORE}layers and {INSIDE}layers. Save"):
        read_adapter(make(tmp_path / "adapter", cfg, rename), cfg)


@pytest.mark.parametrize("case", ["nemotron 3", "hy v3"])
def test_names_of_released_files(case, tmp_path):
    """Code of the release calls its modules as its files do."""
    cfg = of(case)
    every = adapted(cfg, Lora(2, 6.0, MODULES))
    released = {theirs: PREFIX + ours for ours, theirs in peft_names(every).items()}
    assert any(stored not in released for stored in released.values())
    found = read_adapter(make(tmp_path / "adapter", cfg, released.__getitem__), cfg)
    assert found.names == {name: PREFIX + name for name in adapter_shapes(every)}


@pytest.mark.parametrize(("case", "each"), [
    ("qwen3 moe", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")),
    ("mixtral", ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2")),
])  # fmt: skip
def test_single_experts_where_the_base_has_all_in_one(case, each, tmp_path):
    """An adapter of transformers 4, a base that transformers 5 has written by its modules."""
    cfg = of(case)
    own = cfg.experts
    tensors = {}
    for layer in range(cfg.n_layers):
        for expert in range(own.count):
            for i, module in enumerate(each):
                inner, outer = (cfg.width, own.width)[:: -1 if i == 2 else 1]
                name = f"{PREFIX}model.layers.{layer}.{module.format(expert)}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(2, inner)
                tensors[f"{name}.lora_B.weight"] = torch.randn(outer, 2)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    targets = sorted({module.rpartition(".")[2] for module in each})
    (folder / CONFIG).write_text(json.dumps(dict(peft_type="LORA", r=2, lora_alpha=6, target_modules=targets)))
    in_one = {"model.layers.0.mlp.experts.gate_up_proj": (own.count, 2 * own.width, cfg.width)}
    turned, apart = (read_adapter(folder, found) for found in (hf.as_found(cfg, in_one), cfg))
    assert turned.singles == apart.singles
    assert len(turned.singles) == 4 * cfg.n_layers
    name = next(iter(turned.singles))
    assert torch.equal(turned.tensor(name), apart.tensor(name))


@pytest.mark.parametrize(("case", "router"), [("qwen3 moe", "mlp.gate"), ("mixtral", "block_sparse_moe.gate")])
def test_routers_that_were_linear_layers_are_merged(case, router, tmp_path):
    """As `all-linear` of transformers 4 has them."""
    oracle(*CASES[case])[0].save_pretrained(tmp_path / "base")
    modules, tensors = [f"model.layers.{layer}.{router}" for layer in range(2)], {}
    for module in modules:
        tensors |= {f"{PREFIX}{module}.lora_A.weight": torch.randn(2, 40)}
        tensors |= {f"{PREFIX}{module}.lora_B.weight": torch.randn(6, 2)}
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(dict(peft_type="LORA", r=2, lora_alpha=6, target_modules="all-linear")))
    merge_adapter(folder, of(case), open_source(tmp_path / "base"), tmp_path / "merged")
    base, found = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    for module in modules:
        a, b = (tensors[f"{PREFIX}{module}.lora_{part}.weight"] for part in "AB")
        assert torch.allclose(found[f"{module}.weight"], base[f"{module}.weight"] + 3 * b @ a, atol=1e-5)
    with pytest.raises(InputError, match=f"adapters of {modules[0]} and {modules[1]} cannot be trained; `merge` adds"):
        read_adapter(folder, of(case))


def test_single_experts_of_a_model_that_never_had_them_are_refused(tmp_path):
    name = "model.layers.0.mlp.experts.0.up_proj"
    save_file({f"{PREFIX}{name}.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(dict(peft_type="LORA", r=2, lora_alpha=6, target_modules=["up_proj"])))
    with pytest.raises(InputError, match=f"adapters of {name} are not supported"):
        read_adapter(tmp_path, of("gpt oss"))


def test_patterns_of_a_router_that_is_a_parameter(tmp_path):
    """As target_parameters of transformers 5 has it: peft looks for the parameter's name."""
    cfg = of("qwen3 moe")
    router, (outer, inner) = "model.layers.0.mlp.gate", (cfg.experts.count, cfg.width)
    tensors = {"A": torch.ones(3, inner), "B": torch.ones(outer, 3)}
    save_file({f"{PREFIX}{router}.lora_{part}.weight": t for part, t in tensors.items()}, tmp_path / WEIGHTS)
    parameter = f"{router}.weight"
    config = dict(peft_type="LORA", r=2, lora_alpha=6, target_modules=[], target_parameters=[parameter])
    config |= dict(rank_pattern={parameter: 3}, alpha_pattern={parameter: 12})
    (tmp_path / CONFIG).write_text(json.dumps(config))
    found = read_adapter(tmp_path, cfg, merging=True)
    assert (found.ranks, found.scales) == ({router: 3}, {router: 4.0})


@pytest.mark.parametrize("wrapper", hf.WRAPPERS)
def test_a_wrapped_model_is_named(wrapper, tmp_path):
    cfg = of("llama")
    folder = make(tmp_path / "adapter", cfg, replaced(PREFIX, f"{PREFIX}{wrapper}"))
    with pytest.raises(InputError, match=f"'{wrapper}' is of a wrapped model. Save the adapter of the model inside"):
        read_adapter(folder, cfg)


@pytest.mark.full
def test_an_adapter_of_transformers_4_51_is_merged_as_in_peft(tmp_path):
    model, raw = wrapped.oracle("gemma3")
    model.save_pretrained(tmp_path / "base")
    targets = r".*language_model.*\.(q_proj|down_proj)"
    asked = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, target_modules=targets)
    peft.get_peft_model(model, asked).save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    save_file({name.replace(INSIDE, BEFORE): t for name, t in tensors.items()}, tmp_path / "adapter" / WEIGHTS)
    merge_adapter(tmp_path / "adapter", parse_config(raw), open_source(tmp_path / "base"), tmp_path / "merged")
    ids = torch.arange(3, 30)[None]
    base, ours = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("base", "merged")
    )
    with torch.no_grad():
        plain, found = base(ids).logits, ours(ids).logits
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    assert not torch.allclose(plain, theirs, atol=1e-2)
    assert torch.allclose(found, theirs, atol=1e-5)

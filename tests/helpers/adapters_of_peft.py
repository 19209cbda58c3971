"""Adapters made by peft, the model that they make, and the same merged by us."""

import json
from contextlib import contextmanager

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import CASES, oracle

from trireme.engine.tuning.adapters import WEIGHTS
from trireme.engine.tuning.merging import merge_adapter
from trireme.engine.tuning.peft_config import CONFIG
from trireme.engine.tuning.spellings import PREFIX
from trireme.storage.checkpoint import open_source

IDS = torch.arange(3, 30)[None]


def make(folder, case="llama", resized=0, **asked):
    """(the folder of an adapter of peft, ModelConfig); its base is beside it. All that it trains has other values."""
    import peft

    model, cfg = oracle(*CASES[case])
    model.save_pretrained(folder / "base")
    if resized:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        model.resize_token_embeddings(resized)
    keys = dict(r=2, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj"]) | asked
    model = peft.get_peft_model(model, peft.LoraConfig(**keys))
    with torch.no_grad():
        for name, t in model.named_parameters():
            t.add_(0.1 * (t.requires_grad and "lora_" not in name))
    model.save_pretrained(folder / "adapter")
    return folder / "adapter", cfg


@contextmanager
def tensors_of(adapter):
    """The tensors of an adapter, which are written with their changes."""
    tensors = load_file(adapter / WEIGHTS)
    yield tensors
    save_file(tensors, adapter / WEIGHTS)


def set_keys(adapter, **keys):
    """Other values of keys in adapter_config.json."""
    config = json.loads((adapter / CONFIG).read_text()) | keys
    (adapter / CONFIG).write_text(json.dumps(config))


def single_experts(adapter, cfg, mlp, modules):
    """An adapter for each expert is added to that of q_proj, as transformers 4 has modules of them."""
    generator = torch.Generator().manual_seed(1)
    with tensors_of(adapter) as tensors:
        for layer, expert, module in ((i, e, m) for i in range(cfg.n_layers) for e in range(6) for m in modules):
            inner, outer = (cfg.width, cfg.experts.width)[:: -1 if module == modules[2] else 1]
            name = f"{PREFIX}model.layers.{layer}.{mlp}.experts.{expert}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(2, inner, generator=generator) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(outer, 2, generator=generator) * 0.2
    set_keys(adapter, target_modules=["q_proj", *modules], target_parameters=None)


def loaded(folder):
    inner = "text_config" in json.loads((folder / "config.json").read_text())
    auto = transformers.AutoModelForImageTextToText if inner else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def peft_logits(folder, resized=0):
    """What peft computes with `folder`/adapter on `folder`/base."""
    import peft

    base = loaded(folder / "base")
    plain = logits(base)
    if resized:
        base.resize_token_embeddings(resized)
    adapted = logits(peft.PeftModel.from_pretrained(base, folder / "adapter"))
    assert resized or not torch.allclose(plain, adapted, atol=1e-2)
    return adapted


def merged_logits(folder, cfg):
    """What transformers computes with the merged model, which is in `folder`/merged then."""
    merge_adapter(folder / "adapter", cfg, open_source(folder / "base"), folder / "merged")
    return logits(loaded(folder / "merged"))

"""adapter_config.json: each key, at a value other than its default, is read, changes nothing, or is refused by name."""

import dataclasses
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tiny import CASES, oracle
from transformers import AutoModelForCausalLM

from trireme.engine.tuning.merge import merge_adapter
from trireme.engine.tuning.opened import read_adapter
from trireme.engine.tuning.peft_config import CONFIG, NUMBERS, READ, _matching
from trireme.models.config import InputError
from trireme.storage.checkpoint import open_source

peft = pytest.importorskip("peft")

FIELDS = {f.name: f for f in dataclasses.fields(peft.LoraConfig)}
# Keys that may be other than by default, and such values.
ACCEPTED = {
    "alpha_pattern": [{"q_proj": 3, "down_proj": 1.5}, {r"layers\.1\..*_proj": 1}, {"layers.[01].mlp.*": 2}],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}],
    "base_model_name_or_path": ["someone/model"],
    "corda_config": [{"corda_method": "kpm"}],
    "ensure_weight_tying": [True],
    "eva_config": [{"rho": 1.0}],
    "exclude_modules": [["v_proj", "vision_tower"]],
    "fan_in_fan_out": [True],
    "inference_mode": [False],
    "init_lora_weights": [False, "gaussian", "eva", "orthogonal", "mica"],
    "layers_to_transform": [[0, 1]],
    "loftq_config": [{"loftq_bits": 4}],
    "lora_alpha": [-3, 2.5],
    "lora_dropout": [0.1],
    "lora_ga_config": [{"direction": "ArBr"}],
    "megatron_core": ["mine.core"],
    "peft_version": ["0.1.0"],
    "qalora_group_size": [32],
    "revision": ["main"],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "target_modules": [["self_attn.q_proj", "mlp.down_proj", "k_none"], r".*\.(q_proj|down_proj)"],
    "target_parameters": [["nowhere.weight"]],
    "task_type": [None, "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"],
    "use_rslora": [True],
}
ELSEWHERE = {"layers_pattern", "modules_to_save", "peft_type", "r", "rank_pattern"}  # below, and test_opened.py
ANY = (True, 7, 0.5, "x", ["x"], [1], {"x": 1})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder with `base` and `adapter` of peft, ModelConfig)"""
    folder = tmp_path_factory.mktemp("peft")
    model, cfg = oracle(*CASES["llama"])
    model.save_pretrained(folder / "base")
    asked = dict(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, peft.LoraConfig(**asked, task_type="CAUSAL_LM")).save_pretrained(folder / "adapter")
    return folder, cfg


def changed(folder, out, **keys):
    """The adapter with other keys."""
    shutil.copytree(folder / "adapter", out / "adapter")
    path = out / "adapter" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return out / "adapter"


def check_merged(folder, cfg, adapter, out):
    """Ours plus the adapter, and peft's."""
    merge_adapter(adapter, cfg, open_source(folder / "base"), out)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    plain = {name: t.clone() for name, t in base.state_dict().items()}
    theirs = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    ours = load_file(out / "model.safetensors")
    assert all(torch.allclose(t, theirs[name], atol=1e-5) for name, t in ours.items())
    assert any(not torch.allclose(t, plain[name], atol=1e-3) for name, t in ours.items())


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ACCEPTED.items() for value in values])
def test_what_is_taken_computes_as_in_peft(made, key, value, tmp_path):
    folder, cfg = made
    check_merged(folder, cfg, changed(folder, tmp_path, **{key: value}), tmp_path / "out")


@pytest.mark.parametrize("value", [True, False])
def test_peft_corrects_fan_in_fan_out(value, tmp_path):
    model, cfg = oracle(*CASES["gpt2"])
    model.save_pretrained(tmp_path / "base")
    asked = dict(r=2, target_modules=["c_fc"], init_lora_weights=False, fan_in_fan_out=True)
    peft.get_peft_model(model, peft.LoraConfig(**asked)).save_pretrained(tmp_path / "adapter")
    adapter = changed(tmp_path, tmp_path / "changed", fan_in_fan_out=value)
    check_merged(tmp_path, cfg, adapter, tmp_path / "out")


@pytest.mark.parametrize("key", sorted(FIELDS.keys() - ACCEPTED.keys() - ELSEWHERE | {"a_key_of_a_later_peft"}))
def test_every_other_key_is_refused_by_name(made, key, tmp_path):
    folder, cfg = made
    default = FIELDS[key].default if key in FIELDS else None
    for i, value in enumerate(value for value in ANY if value != default):
        adapter = changed(folder, tmp_path / str(i), **{key: value})
        with pytest.raises(InputError, match=rf"{CONFIG}: {key} ") as refused:
            read_adapter(adapter, cfg)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [None, False, 0, [], {}, ""])
def test_keys_that_ask_for_nothing_are_taken(made, value, tmp_path):
    folder, cfg = made
    keys = FIELDS.keys() - READ.keys() - {"peft_type", *NUMBERS} | {"a_key_of_a_later_peft"}
    read_adapter(changed(folder, tmp_path, **dict.fromkeys(keys, value)), cfg)


def initial_values() -> list[str]:
    """Those of peft's init_lora_weights that are words."""
    words = re.findall(r"'([\w\[\] ]+)'", str(FIELDS["init_lora_weights"].type))
    return sorted({word.replace("[number of iters]", "4") for word in words} | {"lora_ga", "PiSSA", "later"})


@pytest.mark.parametrize("value", sorted(set(initial_values()) - set(ACCEPTED["init_lora_weights"])))
def test_initial_values_that_change_the_base_are_refused(made, value, tmp_path):
    folder, cfg = made
    converts = "path_initial_model_for_weight_conversion" if value not in ("loftq", "later") else "without it"
    with pytest.raises(InputError, match=f"init_lora_weights is '{value}', which is not supported.*{converts}"):
        read_adapter(changed(folder, tmp_path, init_lora_weights=value), cfg)


def test_an_adapter_made_by_pissa_is_right_once_converted(made, tmp_path):
    folder, cfg = made
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    asked = dict(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights="pissa", **asked))
    model.peft_config["default"].init_lora_weights = True  # as peft's documentation says
    model.save_pretrained(tmp_path / "begun")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, t in model.named_parameters():
            t.add_(0.1 * ("lora_" in name))
    ways = dict(path_initial_model_for_weight_conversion=str(tmp_path / "begun"))
    model.save_pretrained(tmp_path / "adapter", **ways)
    merge_adapter(tmp_path / "adapter", cfg, open_source(folder / "base"), tmp_path / "out")
    theirs = model.merge_and_unload().state_dict()
    for name, t in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.allclose(t, theirs[name], atol=1e-5), name


@pytest.mark.parametrize(("keys", "words"), [
    (dict(task_type="SEQ_CLS"), "task_type is 'SEQ_CLS', which is not supported. Train the adapter without it, or add"),
    (dict(bias="lora_only"), "bias is 'lora_only', which is not supported"),
    (dict(peft_type="IA3"), "peft_type is 'IA3'; LORA is supported"),
    (dict(lora_alpha=10**400), r"lora_alpha is 1000.*; expected numbers up to 1,000,000"),
    (dict(lora_alpha=1e308), "lora_alpha is 1e[+]308; expected numbers"),
    (dict(lora_alpha=float("nan")), "lora_alpha is nan; expected"),
    (dict(lora_alpha=float("inf")), "lora_alpha is inf; expected"),
    (dict(lora_alpha=True), "lora_alpha is True; expected"),
    (dict(lora_alpha=None), "lora_alpha is None; expected"),
    (dict(lora_alpha=1e6, use_rslora=True), "lora_alpha is 1000000.0; expected"),
    (dict(r=10**400, use_rslora=True), "r is 1000.*; expected"),
    (dict(r=True), "r is True"),
    (dict(r=0), "r is 0"),
    (dict(use_rslora="false"), "use_rslora is a string"),
    (dict(lora_dropout="0.1"), "lora_dropout is a string"),
    (dict(lora_dropout=1.0), "lora_dropout is 1.0, expected a number from 0 to below 1"),
    (dict(lora_dropout=float("nan")), "lora_dropout is nan, expected"),
    (dict(target_modules=None), "target_modules is null, for which peft chooses by the model. List the modules"),
    (dict(target_modules=r".*layers\.0.*(q|down)_proj"), "target_modules leaves out model.layers.1.self_attn.q_proj"),
    (dict(target_modules=r"q_proj|down_proj"), "target_modules leaves out model.layers.0.self_attn.q_proj"),
    (dict(target_modules={"q_proj": 1}), "target_modules is an object, expected a list"),
    (dict(target_modules=[1]), r"target_modules\[0\] is 1, expected a string"),
    (dict(exclude_modules="(a+)+$"), "exclude_modules is a regular expression, .* List the modules instead"),
    (dict(exclude_modules=["q_proj"]), r"exclude_modules leaves out model.layers.0.self_attn.q_proj, which has an"),
    (dict(target_modules=["q_proj"]), "target_modules leaves out model.layers.0.mlp.down_proj, which has"),
    (dict(target_modules=None, target_parameters=["x"]), "target_modules leaves out model.layers.0.self_attn.q_proj"),
    (dict(target_modules=["q_proj", "down_proj", "v_proj"]), "lacks model.layers.0.self_attn.v_proj.lora_A.weight"),
    (dict(layers_to_transform=1), "layers_to_transform leaves out model.layers.0."),
    (dict(layers_to_transform=[0]), "layers_to_transform leaves out model.layers.1."),
    (dict(layers_to_transform=[0, 1], layers_pattern="h"), "layers_pattern leaves out model.layers.0."),
    (dict(rank_pattern={"q_proj": 3}), r"q_proj.lora_A.weight is \[2, 40\], for this model it would be \[3, 40\]"),
    (dict(rank_pattern={"q_proj": 0}), "rank_pattern has 0 for 'q_proj', expected a number up to 1,000,000"),
    (dict(rank_pattern={"q_proj": 1.5}), "rank_pattern.q_proj is 1.5, expected a whole number"),
    (dict(alpha_pattern={"q_proj": 1e9}), "alpha_pattern has 1000000000.0 for 'q_proj', expected a number up to"),
    (dict(alpha_pattern=["q_proj"]), "alpha_pattern is a list, expected an object"),
    (dict(alpha_pattern={"(a+)+$": 3}), r"alpha_pattern has the regular expression '\(a\+\)\+\$', which is not"),
    (dict(alpha_pattern={"(a|b)(a|b)(a|b)x": 3}), "alpha_pattern has the regular expression"),
    (dict(alpha_pattern={"*": 3}), "alpha_pattern has the regular expression"),
    (dict(modules_to_save=["norm"]), "modules_to_save names norm, of which adapter_model.safetensors has nothing"),
    (dict(modules_to_save=[1]), r"modules_to_save\[0\] is 1, expected a string"),
    (dict(kasa_config={"x": "\x1b[31m" + "y" * 500}), r"kasa_config is {'x': '\\x1b\[31m.*more characters"),
])  # fmt: skip
def test_values_that_cannot_be_meant(made, keys, words, tmp_path):
    folder, cfg = made
    with pytest.raises(InputError, match=words) as refused:
        read_adapter(changed(folder, tmp_path, **keys), replace(cfg, frozen=("*",)))
    assert len(str(refused.value).replace(str(tmp_path), "")) < 250


@pytest.mark.parametrize("text", ["(a+)+$", r"(.*)*x", r"(\d+)+x", ".*" * 5 + "x", r"(q)\1*", "(", "ALL-linear"])
def test_a_pattern_that_might_not_end_is_not_tried(made, text, tmp_path):
    """The files decide alone."""
    folder, cfg = made
    assert len(read_adapter(changed(folder, tmp_path, target_modules=text), cfg).names) == 8


def test_a_pattern_as_unsloth_writes_it_is_read():
    text = (
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))"
    )
    found = _matching(text)
    assert found
    assert found.fullmatch("model.layers.10.mlp.down_proj")
    assert not found.fullmatch("model.layers.10.mlp.up_proj")

"""Multimodal models and others with tensors beside the language model: it is trained, they go through untouched."""

import json
import shutil

import numpy as np
import pytest
import stories
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import CASES as TEXT_CASES
from tiny import LLAMA, YARN, Tiny, apart, relative, shifted_labels
from tiny import oracle as text_oracle
from wrapped import CASES, oracle, spelled, turned

from trireme.engine.run.loop import train as finetune
from trireme.engine.run.options import Options
from trireme.models.config import InputError, parse_config, read_config
from trireme.models.hf import as_stored, canonical_names, carried
from trireme.storage.checkpoint import open_source

pytestmark = pytest.mark.grid


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("gemma3", dict(rope_theta=5e5, rope_local_base_freq=77.0, rope_scaling=dict(rope_type="linear", factor=8.0))),
        ("mistral3", dict(rope_theta=1e9, head_dim=None, rope_scaling=dict(type="linear", factor=2.0))),
        ("ministral3 in mistral3", dict(rope_parameters=None, rope_scaling=YARN | dict(llama_4_scaling_beta=0.0))),
        ("qwen2.5 vl", dict(rope_parameters=None, rope_theta=1e5, rope_scaling=dict(type="mrope", mrope_section=[4]))),
        ("glm4v moe", dict(rope_parameters=None, rope_theta=1e5, partial_rotary_factor=1.0, router_aux_loss_coef=0.01)),
    ],
)
def test_the_spelling_of_transformers_4(case, text):
    """Flat keys of text_config are what transformers makes of them, in its newer spelling."""
    model_type, keys, vision, more = CASES[case]
    made = transformers.AutoConfig.for_model(model_type, text_config=keys | text, vision_config=vision, **more)
    newer = json.loads(made.to_json_string(use_diff=False)) | dict(model_type=model_type)
    assert "rope_scaling" not in newer["text_config"]
    assert parse_config(dict(model_type=model_type, text_config=keys | text) | more) == parse_config(newer)


@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case):
    """Logits and every gradient of the language model, by the names of files and, but for experts, of modules."""
    reference, raw = oracle(case)
    cfg = parse_config(raw)
    released = lambda tensors: turned(cfg, spelled(reference, tensors))
    lengths = [13, 1, 20]
    ids = torch.randint(1, 96, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    labels = shifted_labels(ids, lengths)
    logits = torch.cat([reference(input_ids=doc[None]).logits[0] for doc in ids.split(lengths)])
    torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100).backward()
    state = {name: p for name, p in reference.state_dict().items() if not (cfg.tied and name.startswith("lm_head"))}
    cfg = as_stored(cfg, {name: tuple(t.shape) for name, t in released(state).items()})
    for tensors in [released(state), *([] if cfg.experts else [state])]:
        tiny = Tiny(cfg, tensors)
        assert relative(tiny.logits(ids, lengths), logits.detach()) < 1e-5
    tiny = Tiny(cfg, released(state))
    tiny.train(ids, labels, lengths)
    beside, grads = carried(cfg, state), dict(reference.named_parameters())
    assert all((p.grad is None) == (name in beside) for name, p in grads.items())
    theirs = released({name: p.grad for name, p in grads.items() if p.grad is not None})
    names = canonical_names(cfg, {name: tuple(t.shape) for name, t in released(state).items()})
    most = 1e-4 if cfg.family.layers else 3e-5  # of scores without a scale rounding grows: test_blocks_hf.py has fp64
    ours = dict(part for name, grad in tiny.grads.items() for part in apart(cfg, name, grad))
    for name, grad in theirs.items():
        error = relative(ours.pop(names[name]), grad)
        assert error < most or name.endswith("k_proj.bias") and float(grad.norm()) < 1e-6, (name, error)
    assert not ours


def mtp_layer(reference):
    """GLM's layer behind the last, which transformers ignores: one in fp32."""
    last, new = (f"model.layers.{reference.config.num_hidden_layers - 1 + i}." for i in (0, 1))
    found = {n.replace(last, new): t.clone() for n, t in reference.state_dict().items() if n.startswith(last)}
    return found | {f"{new}enorm.weight": torch.randn(40), f"{new}shared_head.head.weight": torch.randn(96, 40)}


@pytest.fixture(
    scope="module",
    params=["gemma3", "mistral3", "glm4 moe", "lara mini", "qwen3 vl moe", "qwen2 vl tied, window above"],
)
def trained(request, tmp_path_factory):
    """(folder of a small model with tensors beside it, that of a run that trained it)."""
    here = tmp_path_factory.mktemp("wrapped")
    stories.make_text(here / "stories.txt", 20, seed=1)
    stories.make_checkpoint(here / "demo", here / "stories.txt", seed=1)
    if request.param in CASES:
        reference, _ = oracle(request.param, vocab_size=stories.VOCAB)
    else:
        model_type, keys = TEXT_CASES[request.param]
        reference, _ = text_oracle(model_type, keys | dict(vocab_size=stories.VOCAB))
    reference.save_pretrained(here / "model")
    cfg, whole = read_config(here / "model"), load_file(here / "model/model.safetensors")
    whole |= mtp_layer(reference) if cfg.mtp_layers else {}
    save_file(turned(cfg, whole), here / "model/model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(here / "demo" / name, here / "model" / name)
    options = Options(
        model=str(here / "model"), data=(str(here / "stories.txt"),), out=str(here / "out"), seq_len=48, batch_size=2,
        max_steps=2, lr=1e-2, device="cpu",
    )  # fmt: skip
    finetune(options)
    return here / "model", here / "out"


@pytest.mark.full
def test_the_tower_goes_through_untouched(trained):
    model, out = trained
    before, after = (load_file(folder / "model.safetensors") for folder in (model, out))
    beside = [
        name for name in before if any(word in name for word in ("vision_tower", "projector", "visual", "layers.3."))
    ]
    assert before.keys() == after.keys()
    assert carried(read_config(model), before) == beside
    for name, tensor in before.items():
        frozen = name in beside or name.endswith("correction_bias")
        assert torch.equal(tensor, after[name]) == frozen, name
        assert tensor.dtype == after[name].dtype


@pytest.mark.full
def test_transformers_opens_the_result(trained):
    """With the logits that our blocks give for its weights."""
    _, out = trained
    cfg, state = read_config(out), load_file(out / "model.safetensors")
    cfg = as_stored(cfg, {name: tuple(t.shape) for name, t in state.items()})
    state = {name: t for name, t in state.items() if ".layers.3." not in name}
    reopened = getattr(transformers, cfg.opener).from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(1, cfg.vocab, (30,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reopened(ids[None]).logits[0]
    assert relative(Tiny(cfg, state).logits(ids, [30]), expected) < 1e-5


@pytest.mark.full
def test_peft_opens_an_adapter_of_the_language_model(trained, tmp_path):
    """It adapts nothing else, and computes what the merged checkpoint does."""
    peft = pytest.importorskip("peft")
    model, _ = trained
    cfg = read_config(model)
    data = (str(model.parent / "stories.txt"),)
    out = tmp_path / "out"
    targets = ("experts", "o_proj") if cfg.experts and cfg.wrapper else ()
    options = Options(model=str(model), data=data, out=str(out), seq_len=48, batch_size=2, max_steps=2, lr=1e-2,
                      device="cpu", lora=4, lora_targets=targets, merge=True)  # fmt: skip
    finetune(options)
    opened = lambda folder: getattr(transformers, cfg.opener).from_pretrained(folder, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(opened(model), out)
    inside = "language_model" if cfg.wrapper else ""
    assert not [name for name, _ in adapted.named_parameters() if "lora" in name and inside not in name]
    ids = torch.arange(1, 31)[None]
    with torch.no_grad():
        expected, plain = opened(out / "merged")(input_ids=ids).logits, opened(model)(input_ids=ids).logits
        assert relative(adapted(input_ids=ids).logits, expected) < 1e-5 < relative(expected, plain)


def test_files_may_leave_out_what_their_class_says():
    """As those of Gemma 3 4B do."""
    text = dict(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024, model_type="gemma3_text",
        rope_scaling=dict(factor=8.0, rope_type="linear"),
    )  # fmt: skip
    cfg = parse_config(dict(model_type="gemma3", text_config=text))
    assert (cfg.vocab, cfg.attentions[0].kv_heads, cfg.widest_head, cfg.tied) == (262208, 4, 256, True)
    del text["model_type"]
    assert parse_config(dict(model_type="gemma3", text_config=text)) == cfg


def test_logits_of_a_multimodal_model_have_no_cap():
    """transformers' class around a language model does not read it."""
    raw = dict(LLAMA, model_type="gemma3_text", hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=2.0)
    assert parse_config(raw).logit_cap == 2.0
    with pytest.raises(InputError, match="text_config.*final_logit_softcapping"):
        parse_config(dict(model_type="gemma3", text_config=raw))


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.0.self_attn.sinks",
        "model.language_model.layers.9.input_layernorm.weight",
        "language_model.score.weight",
        "audio_tower.weight",
    ],
)
def test_a_tensor_that_nobody_knows_is_refused(tmp_path, name):
    reference, raw = oracle("gemma3")
    cfg, state = parse_config(raw), dict(reference.state_dict())
    state.pop("lm_head.weight")
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    assert canonical_names(cfg, shapes)
    with pytest.raises(InputError, match=name):
        canonical_names(cfg, shapes | {name: (1,)})


def test_kimi_as_transformers_saves_it(tmp_path):
    """save_pretrained renames layers to blocks, as those of the vision tower; releases have layers."""
    reference, raw = oracle("kimi k2.5")
    reference.save_pretrained(tmp_path)
    saved = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    released = {name: tuple(t.shape) for name, t in spelled(reference, reference.state_dict()).items()}
    assert any(name.startswith("language_model.model.blocks.") for name in saved.keys() - released.keys())
    targets = lambda found: set(canonical_names(parse_config(raw), found).values())
    assert targets(saved) == targets(released)


def test_what_is_carried_may_be_of_any_dtype(tmp_path):
    """Even one that no weight may have: it is only copied."""
    reference, raw = oracle("gemma3")
    state = {name: t.contiguous() for name, t in reference.state_dict().items() if name != "lm_head.weight"}
    state["vision_tower.position_ids"] = torch.arange(4)
    save_file(state, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    names = carried(parse_config(raw), source.tensors)
    assert "vision_tower.position_ids" in names
    assert np.array_equal(source.read("vision_tower.position_ids").view(np.int64), np.arange(4))

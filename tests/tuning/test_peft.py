"""Adapters of peft, one matrix: merged and trained further they compute what peft computes; others are refused."""

import dataclasses
import json
import re
from copy import deepcopy

import pytest
import torch
import transformers
import wrapped
from adapters_of_peft import loaded, logits, make, merged_logits, peft_logits, set_keys, single_experts, tensors_of
from engines import LIMITS, MemoryScratch, MemoryStore, batches, final_weights, gpu_plan, train
from safetensors.torch import save_file
from tiny import CASES, oracle

from trireme.engine.between import Reader
from trireme.engine.build import build
from trireme.engine.exchange import Exchange
from trireme.engine.plan import UnitPlan
from trireme.engine.queues.real import RealQueues
from trireme.engine.tuning.adapters import WEIGHTS, adapter_shapes, peft_names, trained_values, write_adapter
from trireme.engine.tuning.chosen import adapted, targets
from trireme.engine.tuning.merging import merge_adapter
from trireme.engine.tuning.parts import as_stored
from trireme.engine.tuning.peft import convert_adapter, read_adapter
from trireme.engine.tuning.peft_config import CONFIG, ONLY, READ, UNUSED
from trireme.engine.tuning.spellings import PREFIX
from trireme.engine.updates import AdamW
from trireme.models import hf
from trireme.models.config import InputError, Lora, parse_config
from trireme.models.families.table import FAMILIES
from trireme.models.lora import initial
from trireme.storage.checkpoint import open_source

BOTH = ["q_proj", "down_proj"]
EXPERTS = [f"mlp.experts.{matrix}" for matrix in ("gate_up_proj", "down_proj")]
TRAINED = {  # case -> (model, options of LoraConfig): what can be trained further
    "alpha and dropout": ("llama", dict(target_modules=BOTH, lora_alpha=2.5, lora_dropout=0.1)),
    "negative alpha": ("llama", dict(target_modules=BOTH, lora_alpha=-3, alpha_pattern={"q_proj": -2})),
    "one layer": ("llama", dict(target_modules=BOTH, layers_to_transform=[1])),
    "a layer by its number": ("llama", dict(target_modules=BOTH, layers_to_transform=1, layers_pattern="layers")),
    "an expression": ("llama", dict(target_modules=r".*layers\.(1\.self_attn\.q_proj|[01]\.mlp\.down_proj)")),
    "full names": ("llama", dict(target_modules=["model.layers.1.self_attn.q_proj", "layers.0.mlp.down_proj"])),
    "excluded": ("llama", dict(target_modules="all-linear", exclude_modules=["layers.0.self_attn.q_proj", "v_proj"])),
    "ranks of one scale": ("llama", dict(
        target_modules=BOTH, rank_pattern={"down_proj": 4, r"layers\.0\..*q_proj": 1},
        alpha_pattern={"down_proj": 12, r"layers\.0\..*q_proj": 3})),
    "ranks of several scales": ("llama", dict(target_modules=BOTH, rank_pattern={"model.layers.1.mlp.down_proj": 5})),
    "patterns that overlap": ("llama", dict(
        target_modules=BOTH, alpha_pattern={"^q_proj": 1, "mlp.*": 2, "1.mlp.down_proj": 3, "nothing": 4})),
    "stabilised": ("llama", dict(target_modules=BOTH, rank_pattern={"q_proj": 3}, use_rslora=True)),
    "scales within a matmul": ("llama", dict(
        target_modules=["q_proj", "k_proj", "v_proj"], alpha_pattern={"q_proj": 1, "1.self_attn.v_proj": 9})),
    "packed in one matrix": ("gpt2", dict(
        target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, alpha_pattern={"h.0.attn.c_attn": 3})),
    "scales of experts": ("gpt oss", dict(
        target_modules=["o_proj"], target_parameters=EXPERTS,
        alpha_pattern={"0.mlp.experts.down_proj": 1, "o_proj": 3})),
    "experts of a layer": ("gpt oss", dict(target_parameters=[f"1.{name}" for name in EXPERTS])),
    "gate and up of experts": ("gpt oss", dict(target_modules=[], target_parameters=EXPERTS[:1])),
    "experts of flint": ("flint", dict(target_modules=["q_proj", "shared_expert.up_proj"], target_parameters=EXPERTS)),
    "down of experts, up of a layer": ("mixtral", dict(
        target_modules=[], target_parameters=["experts.down_proj", "0.mlp.experts.gate_up_proj"])),
}  # fmt: skip
MERGED = {  # what can only be merged
    "head": ("llama", dict(target_modules=["q_proj", "lm_head"])),
    "embedding": ("llama", dict(target_modules=["embed_tokens"])),
    "both, of their own ranks": ("llama", dict(
        target_modules=["embed_tokens", "lm_head", "q_proj"], rank_pattern={"lm_head": 5, "embed_tokens": 1})),
    "whole modules": ("llama", dict(modules_to_save=["norm", "lm_head", "score"])),
    "an embedding of another name": ("nemotron 3", dict(target_modules=["embeddings", "lm_head"])),
    "a head beside turned matrices": ("gpt2 untied", dict(target_modules=["c_attn", "wte", "lm_head"])),
    "the gate of a shared expert": ("qwen2 moe", dict(target_modules=["o_proj", "shared_expert_gate"])),
    "one matrix, embedding whole": ("llama tied", dict(modules_to_save=["embed_tokens"])),
    "one matrix, output whole": ("llama tied", dict(modules_to_save=["lm_head"])),
    "one matrix, both": ("llama tied", dict(modules_to_save=["embed_tokens", "lm_head"])),
    "one matrix, tied in peft": ("llama tied", dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "one matrix, adapters tied": ("llama tied", dict(target_modules=["embed_tokens"], ensure_weight_tying=True)),
    "one matrix, an adapter": ("llama tied", dict(target_modules=["embed_tokens"])),
    "one matrix, the other adapter": ("llama tied", dict(target_modules=["q_proj", "lm_head"])),
    "resized": ("llama", dict(resized=104)),
    "resized, whole": ("llama", dict(resized=104, modules_to_save=["embed_tokens", "lm_head"])),
    "resized, one whole": ("llama", dict(resized=104, modules_to_save=["lm_head"])),
    "resized, adapters": ("llama", dict(resized=104, target_modules=["embed_tokens", "lm_head"])),
    "resized, one matrix": ("llama tied", dict(resized=104)),
    "resized, one matrix, whole": ("llama tied", dict(resized=104, modules_to_save=["embed_tokens"])),
    "resized, one matrix, an adapter": ("llama tied", dict(resized=104, target_modules=["embed_tokens"])),
    "smaller": ("llama", dict(resized=88, modules_to_save=["embed_tokens", "lm_head"])),
}  # fmt: skip
ROWS = TRAINED | MERGED
SINGLE = {
    "qwen3 moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}


@pytest.mark.grid
@pytest.mark.parametrize("row", ROWS)
def test_merged_as_peft_computes(row, tmp_path):
    case, asked = ROWS[row]
    adapter, cfg = make(tmp_path, case, **asked)
    ids = merged_logits(tmp_path, cfg)
    assert torch.allclose(ids, peft_logits(tmp_path, asked.get("resized", 0)), atol=2e-4)
    if row in MERGED:
        with pytest.raises(InputError, match="trireme merge"):
            read_adapter(adapter, cfg)


@pytest.mark.grid
@pytest.mark.parametrize("case", SINGLE)
def test_single_experts_are_merged_as_peft_computes(case, tmp_path):
    adapter, cfg = make(tmp_path, case)
    single_experts(adapter, cfg, *SINGLE[case])
    assert torch.allclose(merged_logits(tmp_path, cfg), peft_logits(tmp_path), atol=1e-4)
    in_one = {"model.layers.0.mlp.experts.gate_up_proj": (6, 2 * cfg.experts.width, cfg.width)}
    apart, stacked = (read_adapter(adapter, one) for one in (cfg, hf.as_stored(cfg, in_one)))  # as of transformers 5
    for name in apart.singles:
        assert torch.equal(apart.tensor(name), stacked.tensor(name))
    with tensors_of(adapter) as tensors:  # one without an adapter stays as it is
        for part in "AB":
            tensors.pop(f"{PREFIX}model.layers.1.{SINGLE[case][0]}.experts.5.{SINGLE[case][1][0]}.lora_{part}.weight")
    a = read_adapter(adapter, cfg).tensor(next(n for n in apart.singles if ".1." in n and "gate_up_proj.lora_A" in n))
    assert [bool(t.any()) for t in a.view(6, 4, -1)[5].split(2)] == [False, True]


def trained_logits(folder, cfg, steps):
    """(ours, peft's) after as many steps."""
    import peft

    adapter, source = read_adapter(folder / "adapter", cfg), open_source(folder / "base")
    cfg, adamw = adapted(cfg, adapter.lora), AdamW(weight_decay=0.0, max_grad_norm=0.0)
    e = build(cfg, gpu_plan(cfg, n_micro=1), LIMITS, RealQueues(threads=False), adamw=adamw)
    Exchange(cfg, source, e.placement, adapter.values).load()
    batch = batches(cfg, 1, 1, 24)[0]
    train(e, [batch] * steps, lr=0.01, balance=0.0)
    write_adapter(folder / "further", cfg, trained_values(Reader(e.placement)), str(folder / "base"))
    set_keys(folder / "adapter", lora_dropout=0.0)
    theirs = peft.PeftModel.from_pretrained(loaded(folder / "base"), folder / "adapter", is_trainable=True)
    optimizer = torch.optim.AdamW(theirs.parameters(), 0.01, (adamw.beta1, adamw.beta2), adamw.eps, weight_decay=0.0)
    ids, labels = (torch.from_numpy(values).long() for values in (batch[0].ids, batch[0].labels))
    for _ in range(steps):
        torch.nn.functional.cross_entropy(theirs(ids[None]).logits[0], labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return logits(peft.PeftModel.from_pretrained(loaded(folder / "base"), folder / "further")), logits(theirs)


@pytest.mark.grid
@pytest.mark.parametrize("row", [*TRAINED, "single experts"])
def test_training_goes_on_as_in_peft(row, tmp_path):
    case, asked = TRAINED.get(row, ("qwen3 moe", {}))
    adapter, cfg = make(tmp_path, case, **asked)
    if row == "single experts":
        single_experts(adapter, cfg, *SINGLE[case])
    before = peft_logits(tmp_path)
    ours, theirs = trained_logits(tmp_path, cfg, 3)
    assert not torch.allclose(before, theirs, atol=1e-2)
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_large_tensor_is_read_as_it_is(tmp_path):
    """A file is read by blocks, whose memory is used again."""
    cfg = of("llama")
    a, b = torch.randn(100_000, cfg.width), torch.randn(cfg.width, 100_000)
    names = [f"model.layers.0.self_attn.o_proj.lora_{part}.weight" for part in "AB"]
    save_file(dict(zip((PREFIX + name for name in names), (a, b), strict=True)), tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(dict(peft_type="LORA", r=100_000, lora_alpha=6)))
    adapter = read_adapter(tmp_path, cfg)
    assert all(torch.equal(adapter.tensor(name), t) for name, t in zip(names, (a, b), strict=True))


# ---------------------------------------------------------------- our own

OURS = {"gpt2": ("c_attn", "c_fc"), "llama": ("q_proj", "v_proj", "down_proj"), "qwen3": ("k_proj", "gate_proj"),
        "qwen3 moe": ("q_proj", "experts"), "gpt oss": ("experts",), "mixtral": ("o_proj", "experts"),
        "glm4 moe": ("mlp.experts", "o_proj"), "gemma4 keys that are values": ("k_proj", "down_proj")}  # fmt: skip


def engine(cfg, source, adapters=None, tier="ssd"):
    plan = gpu_plan(cfg, units=(UnitPlan("ram", "ram", base=tier),) * cfg.n_units, record=700)
    e = build(cfg, plan, LIMITS, RealQueues(threads=False), store=MemoryStore(), scratch=MemoryScratch())
    Exchange(cfg, source, e.placement, adapters).load()
    return e


@pytest.mark.full
@pytest.mark.parametrize("case", OURS)
def test_our_own_is_opened_by_peft_and_comes_back_as_it_went(case, tmp_path):
    reference, cfg = oracle(*CASES[case])
    reference.save_pretrained(tmp_path / "base")
    plain, source = cfg, open_source(tmp_path / "base")
    cfg = adapted(cfg, Lora(2, 6.0, OURS[case]))
    e = engine(cfg, source)
    fresh = final_weights(e)
    assert all(bool(t.any()) == ("lora_A" in name) for name, t in fresh.items())
    train(e, batches(cfg, 3, 2, 24), lr=0.05)
    write_adapter(tmp_path / "adapter", cfg, trained_values(Reader(e.placement)), str(tmp_path / "base"))
    again = read_adapter(tmp_path / "adapter", plain)
    assert (again.lora.rank, again.lora.scale) == (2, 3.0)
    before, after = final_weights(e), final_weights(engine(adapted(plain, again.lora), source, again.values, "gpu"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.allclose(merged_logits(tmp_path, plain), peft_logits(tmp_path), atol=2e-5)
    Exchange(e.cfg, source, e.placement).save(tmp_path / "out")  # frozen tensors are as they were
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "base/model.safetensors").read_bytes()


MIXTURES = ("qwen3 moe among dense layers", "qwen2 moe among dense layers", "mixtral", "gpt oss", "olmoe", "glm4 moe",
            "solar open", "dots1", "minimax m2", "exaone moe", "hy v3", "mellum, dense layers, no window",
            "granite moe", "ernie moe", "deepseek v2", "deepseek v3", "deepseek v32", "glm moe dsa, a shared index",
            "glm4 moe lite", "granite 4 hybrid with experts", "nemotron 3", "qwen3 next",
            "qwen3.5 moe", "hunyuan moe", "gemma4, experts", "flint", "afmoe", "kolibri1",
            "laguna", "mimo v2 flash", "lara mini")  # fmt: skip


# What peft 0.21 has no fused names for, and refuses where a dense or shared layer has the same names.
ONLY_STACKED = ("qwen2 moe among dense layers", "hy v3", "nemotron 3", "qwen3.5 moe", "flint", "kolibri1", "laguna",
                "mimo v2 flash")  # fmt: skip


@pytest.mark.full
@pytest.mark.grid
@pytest.mark.parametrize("case", MIXTURES)
def test_peft_opens_all_linear_layers_of_a_mixture(case, tmp_path):
    """Without experts and with them: it takes a target called gate_proj for that of all experts."""
    import peft

    reference, cfg = oracle(*CASES[case])
    reference.save_pretrained(tmp_path / "base")
    source, plain = open_source(tmp_path / "base"), logits(reference)
    # rounding grows in recurrences of random weights, and with scores that are not scaled
    as_read, off = as_stored(cfg, source), 4e-4 if cfg.scan or cfg.family.layers else 1e-4
    for experts in ((), ("experts",)):
        adapter, merged = (tmp_path / f"{name} {len(experts)}" for name in ("adapter", "merged"))
        cfg = adapted(as_read, Lora(2, 8.0, (*targets(as_read, ("all-linear",)), *experts)))
        values = {name: initial(f"{name}.lora_A.weight", shape) for name, shape in adapter_shapes(cfg).items()}
        e = engine(cfg, source, lambda name, a, b, values=values: [values[name].flatten()[a:b].numpy()], "gpu")
        write_adapter(adapter, cfg, trained_values(Reader(e.placement)), str(tmp_path / "base"))
        merge_adapter(adapter, cfg, source, merged)
        ours, theirs = logits(loaded(merged)), peft.PeftModel.from_pretrained(deepcopy(reference), adapter)
        assert torch.allclose(logits(theirs), ours, atol=off)
        assert torch.allclose(logits(theirs.merge_and_unload()), ours, atol=off)
        assert not torch.allclose(plain, ours, atol=1e-2)
    other, back = tmp_path / "separate", tmp_path / "back"
    if not as_read.names.mlp.single:
        with pytest.raises(InputError, match="--expert-adapters"):
            write_adapter(other, cfg, trained_values(Reader(e.placement)), str(tmp_path / "base"), separate=True)
        return
    write_adapter(other, cfg, trained_values(Reader(e.placement)), str(tmp_path / "base"), separate=True)
    convert_adapter(other, as_read, back, separate=False)
    assert (back / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    convert_adapter(back, as_read, tmp_path / "again", separate=True)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()
    if case not in ONLY_STACKED:
        assert torch.allclose(logits(peft.PeftModel.from_pretrained(deepcopy(reference), other)), ours, atol=off)


def test_each_family_of_mixtures_is_compared():
    families = {name for name, family in FAMILIES.items() if (family.experts or family.layers) and not family.inner}
    assert {CASES[case][0] for case in MIXTURES} == families


# ---------------------------------------------------------------- names

INSIDE, BEFORE, ALONE, HEADLESS = "model.language_model.", "language_model.model.", "model.", ""


def of(case):
    """The ModelConfig of a case, also of a multimodal model."""
    if case not in wrapped.CASES:
        return oracle(*CASES[case])[1]
    model_type, keys, vision, others = wrapped.CASES[case]
    return parse_config({"model_type": model_type, "text_config": keys, "vision_config": vision} | others)


def written(folder, cfg, renamed, **keys):
    """An adapter of q_proj and down_proj, its tensors named by `renamed`."""
    every = adapted(cfg, Lora(2, 6.0, tuple(BOTH)))
    names = peft_names(every)
    folder.mkdir()
    save_file({renamed(names[n]): torch.ones(shape) for n, shape in adapter_shapes(every).items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text("{}")
    set_keys(folder, peft_type="LORA", r=2, lora_alpha=6, **keys)
    return folder


@pytest.mark.parametrize(("case", "here", "there"), [
    ("gemma3", INSIDE, BEFORE), ("gemma3", INSIDE, ALONE), ("qwen2.5 vl", INSIDE, ALONE), ("qwen3.5", INSIDE, ALONE),
    ("mistral3", INSIDE, BEFORE), ("llama", ALONE, INSIDE), ("llama", ALONE, BEFORE), ("llama", ALONE, HEADLESS),
    ("qwen3.5", INSIDE, HEADLESS),
])  # fmt: skip
def test_a_language_model_alone_or_within_another(case, here, there, tmp_path):
    """Patterns of adapter_config.json are of the adapter's own names."""
    cfg, rename = of(case), lambda name: name.replace(PREFIX + here, PREFIX + there, 1)
    keys = lambda base: dict(alpha_pattern={f"{base}layers.1.mlp.down_proj": 3})
    plain = read_adapter(written(tmp_path / "plain", cfg, str, **keys(here)), cfg)
    other = read_adapter(written(tmp_path / "other", cfg, rename, **keys(there)), cfg)
    assert other.names == {name: rename(stored) for name, stored in plain.names.items()}
    assert (other.lora, other.scales, other.absent) == (plain.lora, plain.scales, plain.absent)
    assert sorted(set(plain.scales.values())) == [1.5, 3.0]
    if cfg.wrapper:
        mixed = lambda name: rename(name) if "layers.1." in name else name
        with pytest.raises(InputError, match="in two ways"):
            read_adapter(written(tmp_path / "mixed", cfg, mixed), cfg)


@pytest.mark.parametrize("renamed", [
    lambda name: name.removeprefix(PREFIX), lambda name: name.replace(".weight", ".default.weight"),
])  # fmt: skip
def test_names_of_other_tools(renamed, tmp_path):
    cfg = of("llama")
    plain, other = (read_adapter(written(tmp_path / str(r), cfg, r), cfg) for r in (str, renamed))
    assert other.names == {name: renamed(stored) for name, stored in plain.names.items()}


@pytest.mark.parametrize("case", ["nemotron 3", "hy v3"])
def test_names_of_released_files(case, tmp_path):
    """Code of the release calls its modules as its files do."""
    cfg = of(case)
    released = {theirs: PREFIX + ours for ours, theirs in peft_names(adapted(cfg, Lora(2, 6.0, tuple(BOTH)))).items()}
    read = read_adapter(written(tmp_path / "adapter", cfg, released.__getitem__), cfg)
    assert read.names == {name: PREFIX + name for name in read.names}


@pytest.mark.parametrize(("case", "router"), [("qwen3 moe", "mlp.gate"), ("mixtral", "block_sparse_moe.gate")])
def test_routers_of_transformers_4_and_5(case, router, tmp_path):
    """A linear layer, or a parameter: peft looks for patterns by the parameter's name then."""
    cfg = of(case)
    name = cfg.names.module(f"model.layers.0.{router}")
    tensors = {f"{PREFIX}{name}.lora_A.weight": torch.ones(3, cfg.width)}
    tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.ones(cfg.experts.count, 3)
    save_file(tensors, tmp_path / WEIGHTS)
    for key, keys in (name, {}), (f"{name}.weight", dict(target_parameters=[f"{name}.weight"])):
        (tmp_path / CONFIG).write_text("{}")
        set_keys(tmp_path, peft_type="LORA", r=2, lora_alpha=6, rank_pattern={key: 3}, alpha_pattern={key: 12}, **keys)
        assert list(read_adapter(tmp_path, cfg, merging=True).scales.values()) == [4.0]


@pytest.mark.full
def test_an_adapter_of_transformers_4_51_is_merged_as_in_peft(tmp_path):
    import peft

    model, raw = wrapped.oracle("gemma3")
    model.save_pretrained(tmp_path / "base")
    asked = dict(r=2, lora_alpha=6, init_lora_weights=False, target_modules=r".*language_model.*\.(q_proj|down_proj)")
    peft.get_peft_model(model, peft.LoraConfig(**asked)).save_pretrained(tmp_path / "adapter")
    with tensors_of(tmp_path / "adapter") as tensors:
        for name in list(tensors):
            tensors[name.replace(INSIDE, BEFORE)] = tensors.pop(name)
    merge_adapter(tmp_path / "adapter", parse_config(raw), open_source(tmp_path / "base"), tmp_path / "merged")
    opened = transformers.AutoModelForImageTextToText.from_pretrained
    base, ours = (opened(tmp_path / name, dtype=torch.float32) for name in ("base", "merged"))
    assert torch.allclose(logits(ours), logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter")), atol=5e-5)


# ---------------------------------------------------------------- refusals

ANY = (True, 7, 0.5, "x", ["x"], [1], {"x": 1})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("peft"), target_modules=BOTH)


def test_keys_that_are_not_known_are_refused_where_they_have_a_value(made):
    import peft

    adapter, cfg = made
    fields = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
    initial = re.findall(r"'([\w]+)[^']*'", str(fields["init_lora_weights"].type))
    plain = (adapter / CONFIG).read_text()
    read = {*READ, "lora_alpha", "peft_type", "r"}
    for key in {*fields, "a_key_of_a_later_peft"} - UNUSED - read:
        for value in (None, False, 0, [], {}, ""):
            set_keys(adapter, **{key: value})
            read_adapter(adapter, cfg)
        for value in [value for value in ANY if value not in ONLY.get(key, ())]:
            set_keys(adapter, **{key: value})
            with pytest.raises(InputError, match=rf"{CONFIG}: {key} ") as refused:
                read_adapter(adapter, cfg)
            assert "\n" not in str(refused.value)
        (adapter / CONFIG).write_text(plain)
    for value in {*initial, "lora_ga", "PiSSA", "pissa_niter_4", "later"} - {*ONLY["init_lora_weights"]}:
        set_keys(adapter, init_lora_weights=value)
        with pytest.raises(InputError, match="init_lora_weights"):
            read_adapter(adapter, cfg)
    (adapter / CONFIG).write_text(plain)


def keys(**values):
    return lambda adapter: set_keys(adapter, **values)


def tensors(change):
    def changed(adapter):
        with tensors_of(adapter) as found:
            change(found)

    return changed


DOWN = f"{PREFIX}model.layers.1.mlp.down_proj.lora_"
REFUSED = {  # case -> (damage, what the message names)
    "no config": (lambda a: (a / CONFIG).unlink(), "adapter_config.json"),
    "a whole model": (lambda a: (a / CONFIG).rename(a / "config.json"), "Take it as the checkpoint"),
    "of another depth": (lambda a: (a / "x").mkdir() or (a / CONFIG).rename(a / "x" / CONFIG), "adapter/x"),
    "not JSON": (lambda a: (a / CONFIG).write_text("{"), CONFIG),
    "mlx-lm's": (lambda a: (a / CONFIG).write_text('{"fine_tune_type": "lora"}'), "peft_type"),
    "no weights": (lambda a: (a / WEIGHTS).unlink(), WEIGHTS),
    "a pickle": (lambda a: (a / WEIGHTS).rename(a / "adapter_model.bin"), "save_pretrained"),
    "another kind": (keys(peft_type="IA3"), "peft_type"),
    "another rank": (keys(r=3), "rank 3"),
    "another rank of one": (keys(rank_pattern={"q_proj": 3}), "rank 3"),
    "huge": (keys(r=10**400, use_rslora=True), "r 1000"),
    "no alpha": (keys(lora_alpha=None), "lora_alpha"),
    "infinite": (keys(lora_alpha=float("inf")), "lora_alpha"),
    "NaN": (keys(lora_alpha=float("nan")), "lora_alpha"),
    "true": (keys(r=True), "r True"),
    "a word": (keys(use_rslora="false"), "use_rslora"),
    "all dropped": (keys(lora_dropout=1.0), "lora_dropout"),
    "a list": (keys(alpha_pattern=["q_proj"]), "alpha_pattern"),
    "a large alpha": (keys(alpha_pattern={"q_proj": 1e9}), "alpha_pattern"),
    "an endless pattern": (keys(alpha_pattern={"(a+)+$": 3}), "Name the modules"),
    "a slow pattern": (keys(rank_pattern={"(a|b)(a|b)(a|b)x": 2}), "Name the modules"),
    "no pattern": (keys(alpha_pattern={"*": 3}), "Name the modules"),
    "half of one": (tensors(lambda t: t.pop(f"{DOWN}B.weight")), "down_proj.lora_B.weight is missing"),
    "another width": (tensors(lambda t: t.update({f"{DOWN}A.weight": torch.ones(2, 57)})), r"\[2, 57\]"),
    "a deeper model": (tensors(lambda t: t.update({"model.layers.2.x.lora_A.weight": torch.ones(2, 5)})), "layers.2"),
    "two of one name": (tensors(lambda t: t.update({f"{DOWN}A.weight"[len(PREFIX):]: torch.ones(2, 56)})), "twice"),
    "a bias": (tensors(lambda t: t.update({f"{DOWN}B.bias": torch.ones(40)})), "lora_B.bias"),
    "odd names": (tensors(lambda t: t.update({"x\x1b" + "y" * 500: torch.ones(1)})), r"x\\x1by"),
    "nothing": (tensors(lambda t: t.clear() or t.update(x=torch.ones(1))), "x is not of"),
    "half of a resize": (tensors(lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(99, 40)})), "resize_token"),
    "two sizes": (tensors(lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(99, 40),
                                              f"{PREFIX}model.embed_tokens.weight": torch.ones(98, 40)})), "98, 99"),
}  # fmt: skip
for inner in hf.WRAPPERS:
    REFUSED[inner] = tensors(lambda t, inner=inner: t.update({f"{PREFIX}{inner}x": torch.ones(1)})), "without it"


@pytest.mark.full
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_adapter_of_this_model_is_one_line(case, tmp_path):
    adapter, cfg = make(tmp_path, target_modules=BOTH)
    damage, culprit = REFUSED[case]
    damage(adapter)
    with pytest.raises(InputError, match=culprit) as refused:
        read_adapter(adapter, cfg, merging=True)
    assert "\n" not in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value).replace(str(tmp_path), "")) < 260


def test_what_the_advice_after_a_half_resize_leads_to(tmp_path):
    """The model enlarged and saved as the message says, the adapter is merged."""
    import peft

    adapter, cfg = make(tmp_path, resized=104, modules_to_save=["lm_head"])
    with tensors_of(adapter) as found:
        found.pop(f"{PREFIX}model.embed_tokens.weight")
    with pytest.raises(InputError, match=r"resize_token_embeddings\(104\)"):
        read_adapter(adapter, cfg, merging=True)
    base = loaded(tmp_path / "base")
    base.resize_token_embeddings(104)
    base.save_pretrained(tmp_path / "base")
    wanted = logits(peft.PeftModel.from_pretrained(base, adapter))
    assert torch.allclose(merged_logits(tmp_path, dataclasses.replace(cfg, vocab=104)), wanted, atol=1e-4)

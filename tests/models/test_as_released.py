"""config.json as released: read as transformers reads the same file, or refused in one line."""

import json
import re
import zlib
from pathlib import Path

import pytest
import torch
import transformers
from tiny import CASES, Tiny, relative
from wrapped import CASES as WRAPPED
from wrapped import spelled

from trireme.models import hf
from trireme.models.config import InputError, parse_config
from trireme.models.families.extend import extended
from trireme.models.families.table import FAMILIES, WRAPPERS

LOCAL, GLOBAL, SCAN = "sliding_attention", "full_attention", "linear_attention"
MIXED, LAYERS = [LOCAL, GLOBAL, LOCAL, LOCAL], 4
IDS = torch.randint(90, (19,), generator=torch.Generator().manual_seed(1))
LINEAR = {"type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.3] * 8, "long_factor": [2.0] * 8}
PLAIN = {"rope_type": "default"}


def released(model_type: str, **keys) -> dict:
    """A small config.json of a model_type, of four layers, in the spelling of transformers 4."""
    found, family = dict(keys_of(model_type)), FAMILIES[model_type]
    found |= {"model_type": model_type, family.spelled["n_layers"]: LAYERS}
    found |= {"layer_types": [SCAN, GLOBAL] * 2} if family.scan and "layer_types" in found else {}
    if family.single:
        del found["hybrid_override_pattern"]
        found["layers_block_type"] = [SCAN, "moe", GLOBAL, "mlp"]
    found |= {"sliding_window": 5} if family.windows in ("all", "above", "pattern") else {}
    if family.windows == "pattern":
        for name in ("layer_types", "layer_rope_theta", "num_attention_heads_per_layer"):
            found.pop(name, None)
    scaling = None if family.nested else found.pop("rope_parameters", None)
    return found | ({"rope_scaling": scaling} if scaling else {}) | keys


def keys_of(model_type: str) -> dict:
    """Those of the first case of a model_type."""
    said = lambda wrapper, keys: keys.get("model_type", WRAPPERS[wrapper].texts[0])
    inner = [keys for wrapper, keys, *_ in WRAPPED.values() if said(wrapper, keys) == model_type]
    return next((own for kind, own in CASES.values() if kind == model_type), *inner[:1])


def whole(raw: dict) -> dict:
    """config.json around what is only said of a language model inside another."""
    for wrapper, _, vision, more in WRAPPED.values():
        if FAMILIES[raw["model_type"]].inner and raw["model_type"] in WRAPPERS[wrapper].texts:
            return {"model_type": wrapper, "text_config": raw, "vision_config": vision} | more
    return raw


def opened(raw: dict, folder: Path):
    """The model that transformers makes of config.json, with weights by name."""
    from transformers import initialization

    (folder / "config.json").write_text(json.dumps(raw))
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = (
        transformers.AutoModelForImageTextToText if raw["model_type"] in WRAPPERS else transformers.AutoModelForCausalLM
    )
    with initialization.no_init_weights():
        model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.tie_weights()
    with torch.no_grad():
        corrections = [pair for pair in model.named_buffers() if pair[0].endswith("correction_bias")]
        for name, p in [*model.named_parameters(), *corrections]:
            seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.copy_(torch.randn(p.shape, generator=seeded) * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5))
            if "norm" in name or ".ln_" in name:
                p.add_(1.0 if name.endswith("weight") else 0.0)
    return model


def difference(raw: dict, folder: Path) -> float:
    """Of our logits from those of transformers, both by config.json alone; 1 where the tensors do not fit."""
    raw = whole(raw)
    model = opened(raw, folder)
    with torch.no_grad():
        expected = model(input_ids=IDS[None], use_cache=False).logits[0]
        try:
            state = spelled(model, model.state_dict())
            cfg = hf.as_stored(parse_config(raw), {name: tuple(t.shape) for name, t in state.items()})
            return relative(Tiny(cfg, state).logits(IDS, [len(IDS)]), expected)
        except InputError:
            return 1.0


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


# ---------------------------------------------------------------- every key that transformers reads

SIZES = {"vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "num_hidden_layers", "n_layer",
         "shared_intermediate_size", "max_position_embeddings", "n_positions"}  # fmt: skip
IN_TRAINING = re.compile("dropout|_pdrop|router_aux|output_router|router_jitter|initializer")
NOT_IN_LOGITS = re.compile("use_cache|_token_id|num_labels|summary_|problem_type|mm_tokens|_config$|^_|^get_")
BASIC = ("is_causal", "per_layer_config", "layer_types", "sliding_window", "use_sliding_window", "head_dim",
         "num_key_value_heads", "partial_rotary_factor", "rope_theta", "original_max_position_embeddings",
         "tie_word_embeddings", "sliding_window_pattern", "max_window_layers", "mlp_only_layers", "mlp_layer_types",
         "decoder_sparse_step", "rope_local_base_freq", "first_k_dense_replace", "rotary_dim")  # fmt: skip
VALUES = {
    "layer_types": (MIXED, [GLOBAL] * LAYERS, [LOCAL] * LAYERS, None),
    "mlp_layer_types": (["dense", "sparse"] * 2, ["sparse"] * LAYERS, None),
    "rotary_dim": (4, None),
    "layer_rope_theta": ([0, 50.0, 50, 50.0], [9.0, 50.0, 50.0, 50.0], [50.0, 0, 9.0, 9.0], None),
    "moe_layer_start_index": (0, 3, None),
    "moe_layer_end_index": (2, -2, 9, None),
    "layers_block_type": (["mamba"] * LAYERS, None),
    "hidden_act": ("gelu", "gelu_new", "silu"),
    "per_layer_config": ({"0": {"sliding_window": 3}}, None),
    "mlp_only_layers": ([0], None),
    "no_rope_layers": ([0, 1, 1, 0], None),
    "position_embedding_type": ("nope", None),
    "sliding_window": (3, None),
    "head_dim": (12,),
    "rope_theta": (50.0, None),
    "partial_rotary_factor": (0.5, 1.0, None),
    "rope_parameters": (YARN, {GLOBAL: YARN | {"truncate": False}, LOCAL: PLAIN}, {GLOBAL: LINEAR, LOCAL: None}, None),
    "rope_scaling": (YARN | {"truncate": None}, YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": None},
                     LINEAR, LONG, {GLOBAL: LINEAR, LOCAL: PLAIN}, None),
}  # fmt: skip
VALUES |= dict.fromkeys(("activation_function", "hidden_activation"), VALUES["hidden_act"])


def read_by_transformers(model_type: str) -> dict:
    """Keys that its modelling file reads of a config, and other names of them -> the default."""
    made = transformers.CONFIG_MAPPING[model_type]
    name = made.__module__.split(".")[-2]
    files = (Path(transformers.__file__).parent / f"models/{own}/modeling_{own}.py" for own in (name, "llama"))
    source = next(file for file in files if file.exists()).read_text()
    found = {*re.findall(r"config\.(\w+)", source), *re.findall(r'getattr\(\w*\.?config, *"(\w+)"', source)}
    found |= {*made.attribute_map, *BASIC, "rope_scaling", "rope_parameters"}
    return {
        key: getattr(made, key, None)
        for key in sorted(found - SIZES)
        if not IN_TRAINING.search(key) and not NOT_IN_LOGITS.search(key) and not key.endswith("_implementation")
    }


def others(key: str, value) -> tuple:
    """Other values of a key."""
    if key in VALUES:
        return VALUES[key]
    if isinstance(value, bool):
        return (not value, None)
    if isinstance(value, (int, float)):
        return (2 * value or 1, None)
    return (2, None)


def accepted(raw: dict) -> tuple[list[dict], list[dict]]:
    """Other values of single keys that we accept, those that make the same model first."""
    base, same, other = parse_config(whole(raw)), [], []
    for key, default in read_by_transformers(raw["model_type"]).items():
        for value in others(key, raw.get(key, default)):
            try:
                made = parse_config(whole(raw | {key: value}))
                if value is None:
                    transformers.AutoConfig.for_model(**whole(raw | {key: value}))  # refuses most nulls
            except Exception:
                continue
            (same if made == base else other).append({key: value})
    return same, other


def gathered(raw: dict, changes: list[dict], most: int) -> list[dict]:
    """Changes of different keys in one, as many as `most`, for fewer models: where one adds as much to the others."""
    groups: list[dict] = []
    for change in changes:
        moves = parse_config(whole(raw | change)) != parse_config(whole(raw))
        for group in groups:
            try:
                alike = (parse_config(whole(raw | group | change)) != parse_config(whole(raw | group))) == moves
            except InputError:
                continue
            if alike and len(group) < most and not group.keys() & change.keys():
                group.update(change)
                break
        else:
            groups.append(dict(change))
    return groups


def misread(raw: dict, group: dict, folder: Path) -> list[dict]:
    """Those changes of a group that transformers accepts and reads otherwise."""
    try:
        if difference(raw | group, folder) < 1e-5:
            return []
        refused = False
    except Exception:  # by transformers
        refused = True
    if len(group) == 1:
        return [] if refused else [group]
    items = list(group.items())
    half = len(items) // 2
    return misread(raw, dict(items[:half]), folder) + misread(raw, dict(items[half:]), folder)


@pytest.mark.full
@pytest.mark.grid
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_is_read_or_refused(model_type, folder):
    """A key that transformers reads has its value there, or is refused; alone it is not passed over."""
    raw = released(model_type)
    assert difference(raw, folder) < 1e-5
    same, other = accepted(raw)
    groups = gathered(raw, same, 100) + gathered(raw, other, 12)
    assert not [change for group in groups for change in misread(raw, group, folder)]


# ---------------------------------------------------------------- what files have


@pytest.mark.grid
@pytest.mark.parametrize("model_type", [name for name, own in FAMILIES.items() if own.rotary and not own.nested])
def test_rope_in_the_spelling_of_transformers_4(model_type, folder):
    """Flat keys: theta, and what scales it; all ways of scaling are in `test_every_key_is_read_or_refused`."""
    family = FAMILIES[model_type]
    scaled = [YARN | {"attention_factor": 1.2}]
    if family.longrope:
        scaled = [LONG, LONG | {"type": "su", "original_max_position_embeddings": 8}]
    elif family.query_beta:
        scaled = [YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}]
    elif family.local_theta:
        scaled = [LINEAR | {"rope_type": "linear"}]
    outside = {"original_max_position_embeddings": 8} if family.original else {}
    usual = keys_of(model_type).get("rope_parameters", {})
    sections = {name: usual[name] for name in usual if name in ("mrope_section", "partial_rotary_factor")}
    for scaling in scaled:
        raw = released(model_type, **{family.spelled["theta"]: 500.0}, rope_scaling=scaling | sections, **outside)
        assert difference(raw, folder) < 1e-5, scaling


OLMO3 = {"layer_types": MIXED, "rope_theta": 5e5, "rope_scaling": YARN | {"attention_factor": 1.2}}
FAST = {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.0, "mscale": 1.0, "mscale_all_dim": 0.0}}
READ = [
    ("olmo3", OLMO3),
    ("olmo3", OLMO3 | {"rope_theta": 1e4}),
    ("olmo3", OLMO3 | {"rope_scaling": None, "rope_parameters": None}),
    ("olmo3", {"rope_scaling": YARN, "rope_parameters": {GLOBAL: PLAIN | {"rope_theta": 50.0}, LOCAL: None}}),
    ("olmo3", {"original_max_position_embeddings": 4, "rope_scaling": YARN}),
    ("gemma3_text", {"rope_local_base_freq": 77.0, "rope_theta": 99.0, "rope_scaling": YARN}),
    ("gemma3_text", {"sliding_window_pattern": 2}),
    ("mistral", {"layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL], "sliding_window": 3, "head_dim": 8}),
    ("mistral", {"layer_types": None, "sliding_window": 3, "head_dim": 8}),
    ("ministral3", FAST),
    ("smollm3", {"sliding_window": 3, "use_sliding_window": False}),
    ("smollm3", {"sliding_window": 3, "use_sliding_window": True, "no_rope_layer_interval": 2}),
    ("smollm3", {"sliding_window": 3, "use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1]}),
    ("smollm3", {"sliding_window": 3, "layer_types": MIXED}),
    ("exaone4", {"layer_types": [GLOBAL] * LAYERS, "sliding_window": None, "sliding_window_pattern": None}),
    ("exaone4", {"layer_types": MIXED, "sliding_window_pattern": "LLLG"}),
    ("seed_oss", {"num_key_value_heads": None, "head_dim": None}),
    ("llama", {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None}),
    ("qwen3", {"num_key_value_heads": None, "sliding_window": None, "rope_scaling": {}}),
    ("mistral", {"head_dim": None, "sliding_window": None}),
    ("phi3", {"rope_scaling": LONG | {"original_max_position_embeddings": 8}}),
    ("phi3", {"rope_scaling": LONG | {"type": "yarn", "factor": None}, "original_max_position_embeddings": 8}),
    ("llama", {"rope_scaling": YARN | {"truncate": None, "beta_fast": None, "attention_factor": None}}),
    ("llama", {"rope_scaling": YARN | {"short_factor": [3.0] * 5, "long_factor": [9.0] * 5}}),
    ("gpt_neox", {"hidden_act": "gelu_new", "rotary_pct": 1.0}),
    ("gpt_neox", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1}),
    ("gpt_oss", {"sliding_window_pattern": 1, "mlp_only_layers": [0]}),
    ("minimax_m2", {"rotary_dim": 4, "partial_rotary_factor": 1.0}),
    ("minimax_m2", {"rotary_dim": 4, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),
    ("dots1", {"sliding_window": 3, "max_window_layers": 2, "use_sliding_window": None}),
    ("exaone_moe", {"mlp_layer_types": ["sparse", "dense"] * 2, "first_k_dense_replace": 3}),
    ("olmo_hybrid", {"rope_scaling": None, "rope_parameters": None, "rope_theta": None}),
    ("olmo_hybrid", {"rope_scaling": None, "rope_theta": 5e3}),
    ("falcon_h1", {"mamba_d_ssm": None, "mamba_n_heads": 8}),
    ("falcon_h1", {"mamba_d_head": 6, "ssm_multipliers": None, "mlp_multipliers": None}),
    ("nemotron_h", {"time_step_limit": [0.0, 0.1], "mamba_dt_min": 0.5}),
    ("granitemoehybrid", {"mamba_d_head": "auto", "time_step_limit": [0.0, {"__float__": "Infinity"}]}),
    ("granite_swa", {"layer_types": MIXED, "layer_rope_theta": [9.0, 50, 9.0, 0]}),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 1.0}}),
    ("deepseek_v2", {"rope_scaling": LINEAR | {"mscale_all_dim": 0.7}}),
    ("glm4_moe_lite", {"rope_scaling": LLAMA3 | {"mscale_all_dim": 0.7}}),
    ("deepseek_v3", {"rope_scaling": {"type": "longrope", "short_factor": [2.0] * 4, "long_factor": [3.0] * 4,
                                      "factor": 4.0, "mscale_all_dim": 0.7}}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 2}),
    ("deepseek_v3", {"first_k_dense_replace": 9}),
    ("qwen3_moe", {"decoder_sparse_step": 5}),
    ("exaone_moe", {"mlp_layer_types": ["dense"] * LAYERS}),
    *(("nemotron_h", {"layers_block_type": kinds * 2}) for kinds in (["mamba", "attention"], ["mlp", "moe"])),
    *((name, {FAMILIES[name].spelled["act"]: act}) for name in ("phi3", "gemma4_text") for act in ("gelu", "relu2")),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "layer_types": MIXED}),
    ("glm", {"rope_scaling": {"type": "proportional", "factor": 2.0}}),
    *(("gemma4_text", {"attention_k_eq_v": shared, "per_layer_config": by_layer}) for shared in (True, False)
      for by_layer in ({}, *({"1": own, "3": own} for own in ({"head_dim": 24}, {"num_key_value_heads": 1})))),
    ("gemma4_text", {"rope_parameters": {
        GLOBAL: {"type": "proportional", "factor": 2.0, "rope_theta": 50.0}, LOCAL: LINEAR | {"rope_theta": 9.0}}}),
]  # fmt: skip


def test_heads_of_keys_that_gemma4_leaves_out(folder):
    raw = released("gemma4_text", num_attention_heads=8, attention_k_eq_v=False)
    assert difference({key: raw[key] for key in raw if key != "num_key_value_heads"}, folder) < 1e-5


@pytest.mark.grid
@pytest.mark.parametrize(("model_type", "keys"), READ)
def test_read_as_transformers_reads_it(model_type, keys, folder):
    assert difference(released(model_type, **keys), folder) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("olmo3", {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None}),
        ("llama", {"rope_scaling": PLAIN | {"rope_theta": 50.0}, "rope_parameters": PLAIN}),
    ],
)
def test_a_longer_context_is_read_as_it_is_written(model_type, keys, folder):
    """By transformers, too: next to other spellings, and for full attention alone where that has its own rope."""
    raw = extended(released(model_type, **keys), 4.0, "config.json")
    cfg = parse_config(raw)
    ropes = {bool(spec.window): spec.rope for spec in cfg.attentions}
    assert (ropes[False].kind, ropes[False].theta) == ("yarn", keys.get("rope_theta", 50.0))
    assert True not in ropes or ropes[True].kind == "default"
    assert difference(raw, folder) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "key"), [(name, key) for name in ("gpt2", "olmoe", "mixtral") for key in FAMILIES[name].aliases]
)
def test_other_names_of_keys(model_type, key, folder):
    """Read, and refused next to another value of the same."""
    raw = released(model_type)
    own = FAMILIES[model_type].aliases[key]
    assert parse_config({name: v for name, v in raw.items() if name != own} | {key: raw[own]}) == parse_config(raw)
    assert parse_config(raw | {key: raw[own]}) == parse_config(raw)
    with pytest.raises(InputError, match=f'"{key}" and "{own}"'):
        parse_config(raw | {key: 2 * raw[own]})


REFUSED = [
    ("olmo3", {"rope_parameters": YARN}, "rope_parameters.*outside"),
    ("olmo3", {"rope_scaling": LINEAR}, 'rope_scaling: "type".*"rope_type"'),
    ("olmo3", {"rope_scaling": {GLOBAL: LINEAR, LOCAL: PLAIN}}, "rope_scaling"),
    ("olmo3", {"rope_scaling": YARN | {"truncate": False}}, "truncate"),
    ("gemma3_text", {"rope_parameters": {GLOBAL: PLAIN, LOCAL: GLOBAL}}, f'"{LOCAL}" is "{GLOBAL}", expected an obj'),
    ("gemma3_text", {"rope_parameters": {GLOBAL: PLAIN, LOCAL: PLAIN | {"partial_rotary_factor": 0.5}}}, "partial"),
    ("smollm3", {"rope_parameters": {GLOBAL: LINEAR, LOCAL: PLAIN}}, GLOBAL),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, '"sliding_window_pattern" is "LLLG", expected a positive integer'),
    ("exaone4", {"sliding_window": None}, '"layer_types" is null, expected a list of 4 names, as "sliding_window"'),
    ("ministral3", {"layer_types": MIXED}, f'"layer_types" must be {LOCAL} in all 4 layers'),
    ("starcoder2", {"layer_types": MIXED, "sliding_window": None}, f'"layer_types" must be {GLOBAL} in all 4 layers'),
    ("mistral", {"layer_types": ["linear_attention"] * LAYERS}, "layer_types"),
    ("llama", {"is_causal": None}, "is_causal"),
    ("llama", {"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
    ("llama", {"rms_norm_eps": None}, '"rms_norm_eps" is null'),
    ("llama", {"rope_scaling": LONG | {"type": "su"}}, 'rope type "su"'),
    ("phi3", {"original_max_position_embeddings": 1, "rope_scaling": LONG}, "original_max_position_embeddings"),
    ("llama", {"rope_theta": 1, "rope_scaling": YARN}, "rope_scaling: yarn.*rope_theta"),
    ("gpt_neox", {"hidden_act": "quick_gelu"}, "hidden_act"),
    ("gpt_neox", {"head_dim": 8}, "head_dim"),
    ("glm4_moe", {"topk_group": 2}, "topk_group"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("deepseek_v3", {"n_group": 4}, "n_group"),
    ("deepseek_v3", {"qk_nope_head_dim": 7}, "qk_nope_head_dim"),
    ("deepseek_v3", {"rope_scaling": YARN | {"partial_rotary_factor": 0.25}}, '"partial_rotary_factor" is not supp'),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}, "attention_bias.*q_lora_rank"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v32", {"layer_types": [GLOBAL] * LAYERS}, "indexed_attention in all 4"),
    ("granite_swa", {"layer_rope_theta": [-1.0] * LAYERS}, "layer_rope_theta"),
    ("hy_v3", {"mlp_layer_types": ["sparse"]}, "a list of 4 names, each dense or sparse"),
    ("hy_v3", {"mlp_bias": True}, '"mlp_bias": true is not supported'),
    ("mimo_v2_flash", {"num_key_value_heads": 4}, "a divisor of num_attention_heads . 2 = 2"),
    ("laguna", {"num_attention_heads_per_layer": [4, 3, 4, 4]}, "a list of 4 multiples of num_key_value_heads = 2"),
    ("laguna", {"gating": False}, "gating.*not supported"),
    ("lara_mini", {"layer_types": ["conv"] * LAYERS}, "layer_types"),
    ("cwm", {"rope_scaling": None}, '"rope_parameters" is null, expected an object'),
    ("mellum", {"rope_scaling": YARN}, '"rope_scaling".*is not supported'),
    ("hunyuan_v1_dense", {"rope_scaling": LINEAR | {"type": "dynamic"}}, 'rope type "dynamic" is not supported'),
    ("dots1", {"n_shared_experts": None}, '"n_shared_experts" is null, expected a positive integer'),
    ("gpt_oss", {"rope_scaling": None}, "rope_parameters"),  # transformers would take YaRN
    ("qwen3_moe", {"num_experts_per_tok": 7}, '"num_experts_per_tok" is 7, more than the 6 of "num_experts"'),
    ("qwen3_moe", {"mlp_only_layers": 0.5}, "mlp_only_layers"),
    ("qwen3_moe", {"router_aux_loss_coef": -1}, "router_aux_loss_coef"),
    ("minimax_m2", {"rotary_dim": 5}, "rotary_dim. is 5, expected a share"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "keys", "words"), REFUSED)
def test_refused_in_one_line(model_type, keys, words):
    with pytest.raises(InputError, match=words) as e:
        parse_config(released(model_type, **keys))
    assert "\n" not in str(e.value)


def test_inside_a_wrapper_a_list_changes_no_windows():
    """transformers makes it no other model there: the list has to say what the model does."""
    wrapped = lambda **keys: parse_config({"model_type": "mistral3", "text_config": released("mistral", **keys)})
    assert wrapped(layer_types=[LOCAL] * LAYERS) == wrapped()
    with pytest.raises(InputError, match='text_config: "layer_types" must be'):
        wrapped(layer_types=MIXED)


@pytest.mark.parametrize(("wrapper", "text"), [("gemma3", "gemma3_text"), ("qwen3_vl", "qwen3_vl_text")])
def test_whether_matrices_are_tied_is_not_null(wrapper, text):
    raw = {"model_type": wrapper, "text_config": released(text), "tie_word_embeddings": None}
    with pytest.raises(InputError, match='config.json: "tie_word_embeddings" is null, expected true or false'):
        parse_config(raw)


@pytest.mark.parametrize("outside", [True, False])
def test_qwen35_says_outside_whether_matrices_are_tied(outside):
    """As transformers reads it: what text_config says does not count."""
    raw = {"model_type": "qwen3_5", "text_config": released("qwen3_5_text", tie_word_embeddings=not outside)}
    assert parse_config(raw | {"tie_word_embeddings": outside}).tied == outside
    assert not parse_config(raw).tied

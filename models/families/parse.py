"""What config.json says of a model: the fields of ModelConfig that do not come from a run or a plan. No torch."""

from __future__ import annotations

from typing import Any

from trireme.models.families.family import OF_LOGITS, Family, Wrapper
from trireme.models.families.fields import layers_of, scales_of
from trireme.models.families.keys import InputError, Keys
from trireme.models.families.known import unsupported_reason
from trireme.models.families.quantization import packing_of, settings_of
from trireme.models.families.scans import block_types
from trireme.models.families.scores import std_of
from trireme.models.families.table import FAMILIES, OTHER_NAMES, WRAPPERS, text_of
from trireme.storage.untrusted import shown

MOST_LAYERS = 1 << 12  # work grows with them before the files are read
# Keys that change the mathematics -> values with which they do not, which are accepted.
INERT = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "no_rope_layers": (None,),
    "per_layer_config": (None,),
}
# Keys by which transformers would read other files -> accepted values.
ELSEWHERE = {"configuration_files": (None,), "transformers_weights": (None, "model.safetensors")}
SUPPORTED = (*(name for name, family in FAMILIES.items() if not family.inner), *OTHER_NAMES, *WRAPPERS)


def fields(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of a decoded config.json, which `source` names in errors. Raises InputError if it is not supported."""
    model_type = raw.get("model_type")
    Keys(raw, source).only(ELSEWHERE)
    if model_type not in SUPPORTED:
        reason = unsupported_reason(model_type, SUPPORTED)
        raise InputError(f'{source}: model_type "{shown(str(model_type))}" is not supported: {reason}')
    if model_type in WRAPPERS:
        return _wrapped(raw, source, model_type) | dict(score_std=std_of(raw))
    model_type = OTHER_NAMES.get(model_type, model_type)
    listed = FAMILIES[model_type].listed_type if "layer_types" in raw else ""
    return _of_text(raw, source, listed or model_type) | dict(score_std=std_of(raw))


def _of_text(raw: dict[str, Any], source: str, model_type: str) -> dict[str, Any]:
    """As `fields`, for a model_type in FAMILIES."""
    family = FAMILIES[model_type]
    raw = _renamed(raw, family, source)
    keys = Keys(block_types(raw, source) if family.single else raw, source)
    keys.refuse_unless("is_causal", (True,), True)
    keys.only({name: accepted for name, accepted in INERT.items() if name not in family.accepts} | family.only)
    packing, packed = packing_of(keys, family.packings, family.names, family.carried)
    spelled = family.spelled
    width, layers = keys.count(spelled["width"]), keys.count(spelled["n_layers"], limit=MOST_LAYERS)
    heads = keys.count(spelled["n_heads"], family.n_heads)
    positions = keys.count(spelled["max_positions"], family.max_positions)
    if family.mlp_bias is True:
        keys.refuse_unless("use_bias", (None, True))  # MLPs of these families always have one
    if family.layers:
        records = family.layers(keys, family, width, layers, heads)
    else:
        records = layers_of(keys, family, width, layers, heads, positions)
    scales = scales_of(keys, family, width, records[0].attention.dim if records[0].attention else 1)
    return dict(
        model_type=model_type,
        vocab=keys.count(spelled["vocab"], family.vocab),
        width=width,
        max_positions=min(positions, keys.count("index_topk", 2048)) if family.indexed else positions,
        eps=keys.number(spelled["eps"], family.eps),
        tied=keys.flag("tie_word_embeddings", family.tied),
        layers=records,
        learned=not family.rotary,
        embed_scale=scales.embed,
        logit_scale=scales.logits,
        logit_cap=scales.logits_cap,
        indexed=family.indexed,
        mtp_layers=_mtp_layers(keys) if family.mtp else 0,
        packing=packing,
        packed=packed,
    )


def _renamed(raw: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """`raw` with aliases of keys renamed to the keys that are read. Raises InputError where the two differ."""
    for alias, name in family.aliases.items():
        if alias not in raw:
            continue
        if name in raw and raw[name] != raw[alias]:
            raise InputError(f'{source}: "{alias}" and "{name}" are two names of one key, but differ. Remove one.')
        raw = {name: raw[alias]} | {key: value for key, value in raw.items() if key != alias}
    return raw


def _mtp_layers(keys: Keys) -> int:
    name = "num_nextn_predict_layers"
    return 0 if keys.raw.get(name, 1) in (0, None) else keys.count(name, 1, MOST_LAYERS)


def _wrapped(raw: dict[str, Any], source: str, model_type: str) -> dict[str, Any]:
    """As `fields`, for a multimodal model: those of its language model, described by its text_config."""
    keys, wrapper = Keys(raw, source), WRAPPERS[model_type]
    inner, name = text_of(raw)
    if not isinstance(inner, dict):
        raise keys.error(name, "an object")
    source = f"{source}: {name}" if name else source
    if isinstance(listed := inner.get("model_type", wrapper.texts[0]), str):
        inner = inner | {"model_type": (OTHER_NAMES | wrapper.older).get(listed, listed)}
    Keys(inner, source).refuse_unless("model_type", wrapper.texts)
    inner = inner | _tied(keys, Keys(inner, source), wrapper)
    if OF_LOGITS in FAMILIES[inner["model_type"]].caps and not wrapper.caps:
        Keys(inner, source).refuse_unless(OF_LOGITS, (None,))  # transformers' multimodal class has no cap of logits
    if (listed := settings_of(raw, keys.source)) is not None:
        inner["quantization_config"] = listed
    media = tuple((keys.count(key, default), key) for key, default in wrapper.media.items())
    return _of_text(inner, source, inner["model_type"]) | dict(wrapper=model_type, media=media)


def _tied(keys: Keys, inner: Keys, wrapper: Wrapper) -> dict[str, bool]:
    """tie_word_embeddings of a multimodal model, from where its family has it."""
    name = "tie_word_embeddings"
    if wrapper.tied == "text":
        return {name: keys.flag(name, False)} if name in keys.raw else {}
    return {name: keys.flag(name, wrapper.tied_default) or (wrapper.tied == "either" and inner.flag(name, False))}

"""Gemma 4 (12B, 26B-A4B, 31B): its layers, whose attention is of two kinds. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trireme.models.families.experts import Experts
from trireme.models.families.family import Family
from trireme.models.families.fields import act_of
from trireme.models.families.keys import InputError, Keys
from trireme.models.families.names import GEMMA4, GEMMA4_EXPERTS
from trireme.models.families.rope import GLOBAL, LOCAL, parse_ropes
from trireme.models.layers import Attention, Layer, Mlp

USUAL = {GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}, LOCAL: {}}  # rope_parameters
RENAMES = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}  # in per_layer_config


def layers(keys: Keys, family: Family, width: int, n: int, heads: int) -> tuple[Layer, ...]:
    """Windows and full attention in turn, each with heads of its own. Raises InputError."""
    if keys.raw.get("hidden_size_per_layer_input", 256) or keys.raw.get("num_kv_shared_layers"):
        raise InputError(
            f'{keys.source}: "hidden_size_per_layer_input" and "num_kv_shared_layers" are those of Gemma 4 E2B and '
            "E4B, which are not supported. Take 12B, 26B-A4B or 31B."
        )
    types, shared, act = _types(keys, n), keys.flag("attention_k_eq_v", False), act_of(keys, family)
    kinds = _attentions(keys, family, heads, types, shared)
    mlps: tuple[Mlp | Experts, ...] = (Mlp(keys.count("intermediate_size"), act),)
    names = GEMMA4
    if keys.flag("enable_moe_block", False):
        names = GEMMA4_EXPERTS
        mlps += (Experts(
            keys.count("num_experts"), keys.count("top_k_experts"), keys.count("moe_intermediate_size"), True,
            act=act, score_scale=width**-0.5,
        ),)  # fmt: skip
    eps = keys.number("rms_norm_eps", family.eps)
    qk_names = replace(names.mixer, qkv=names.mixer.qkv[:2])
    records = {
        kind: Layer(width, eps, (attention,), mlps, qk_names if attention.values == "keys" else names.mixer, names.mlp)
        for kind, attention in kinds.items()
    }
    return tuple(records[kind] for kind in types)


def _types(keys: Keys, n: int) -> list[str]:
    """The kind of each layer: the last has full attention, whatever is said of it; by default every sixth, too."""
    default = [LOCAL if (i + 1) % 6 else GLOBAL for i in range(n)]
    types: Any = keys.raw.get("layer_types") or default
    if not isinstance(types, list) or len(types) != n or not all(t in (GLOBAL, LOCAL) for t in types):
        raise keys.error("layer_types", f"a list of {n} names, each {GLOBAL} or {LOCAL}")
    return [*types[:-1], GLOBAL]


def _attentions(keys: Keys, family: Family, heads: int, types: list[str], shared: bool) -> dict[str, Attention]:
    """Attention with a window, and without one: then heads are fewer and wider.

    The keys of the second are in `per_layer_config` where transformers has written the file; what is not there is as in
    the first. shared: values are keys.
    """
    local = keys.count("head_dim", family.head_dim)
    n_kv = _kv_heads(keys, "num_key_value_heads", heads, family.kv_heads or heads)
    by_layer, double = "per_layer_config" in keys.raw, 2 * (family.head_dim or 1)
    if by_layer:
        layer_keys = keys.raw["per_layer_config"]
        differing = layer_keys.get(str(types.index(GLOBAL))) if isinstance(layer_keys, dict) else None
        values = {"head_dim": local, "num_key_value_heads": n_kv} | (differing if isinstance(differing, dict) else {})
        keys = Keys(keys.raw | {RENAMES[key]: values[key] for key in RENAMES}, keys.source)
    if keys.raw.get("rope_parameters") is None:
        keys = Keys(keys.raw | {"rope_parameters": USUAL}, keys.source)
    dim = keys.count("global_head_dim", double, null=double)
    ropes = parse_ropes(keys, family, (dim, local), keys.count(family.spelled["max_positions"], family.max_positions))
    rope, local_rope = (replace(rope, width=n) for rope, n in zip(ropes, (dim, local), strict=True))
    kv_heads = _kv_heads(keys, "num_global_key_value_heads", heads, n_kv) if shared or by_layer else n_kv
    window = keys.count("sliding_window", 512)
    return {
        LOCAL: Attention(heads, n_kv, local, 1.0, local_rope, window, norm="head", values="normed"),
        GLOBAL: Attention(heads, kv_heads, dim, 1.0, rope, norm="head", values="keys" if shared else "normed"),
    }


def _kv_heads(keys: Keys, name: str, heads: int, default: int) -> int:
    count = keys.count(name, default, null=default)
    if heads % count:
        raise keys.error(name, f"a divisor of num_attention_heads = {heads}")
    return count

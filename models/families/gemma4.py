"""Gemma 4 (12B, 26B-A4B, 31B): its layers, whose attention is of two kinds. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trireme.models.families.experts import Experts
from trireme.models.families.family import Family
from trireme.models.families.fields import act_of
from trireme.models.families.keys import InputError, Keys
from trireme.models.families.names import GEMMA4, GEMMA4_EXPERTS
from trireme.models.families.rope import GLOBAL, LOCAL, Rope
from trireme.models.layers import Attention, Layer, Mlp


def layers(keys: Keys, family: Family, width: int, n: int, heads: int) -> tuple[Layer, ...]:
    """Windows and full attention in turn, each with heads of its own. Raises InputError."""
    if keys.raw.get("hidden_size_per_layer_input", 256) or keys.raw.get("num_kv_shared_layers"):
        raise InputError(
            f'{keys.where}: "hidden_size_per_layer_input" and "num_kv_shared_layers" are those of Gemma 4 E2B and E4B, '
            "which are not supported. Take 12B, 26B-A4B or 31B."
        )
    types, same, act = _types(keys, n), keys.flag("attention_k_eq_v", False), act_of(keys, family)
    kinds = {LOCAL: _local(keys, family, heads), GLOBAL: _whole(keys, family, heads, types, same)}
    mlps: tuple[Mlp | Experts, ...] = (Mlp(keys.count("intermediate_size"), act),)
    names = GEMMA4
    if keys.flag("enable_moe_block", False):
        names = GEMMA4_EXPERTS
        mlps += (Experts(
            keys.count("num_experts"), keys.count("top_k_experts"), keys.count("moe_intermediate_size"), True,
            act=act, score_scale=width**-0.5,
        ),)  # fmt: skip
    eps = keys.number("rms_norm_eps", family.eps)
    of_keys = replace(names.mixer, qkv=names.mixer.qkv[:2])
    made = {
        kind: Layer(width, eps, (own,), mlps, of_keys if own.values == "keys" else names.mixer, names.mlp)
        for kind, own in kinds.items()
    }
    return tuple(made[kind] for kind in types)


def _types(keys: Keys, n: int) -> list[str]:
    """The kind of each layer: the last has full attention, whatever is said of it; by default every sixth, too."""
    usual = [LOCAL if (i + 1) % 6 else GLOBAL for i in range(n)]
    types: Any = keys.raw.get("layer_types") or usual
    if not isinstance(types, list) or len(types) != n or not all(t in (GLOBAL, LOCAL) for t in types):
        raise keys.error("layer_types", f"a list of {n} names, each {GLOBAL} or {LOCAL}")
    return [*types[:-1], GLOBAL]


def _local(keys: Keys, family: Family, heads: int) -> Attention:
    """Attention with a window."""
    dim, rope = keys.count("head_dim", family.head_dim), _rope(keys, LOCAL)
    rope.refuse_unless("rope_type", (None, "default"))
    return Attention(
        heads, _kv_heads(keys, "num_key_value_heads", heads, heads), dim, 1.0,
        Rope(rope.number("rope_theta", 1e4), width=dim), keys.count("sliding_window", 512), norm="head",
        values="normed",
    )  # fmt: skip


def _whole(keys: Keys, family: Family, heads: int, types: list[str], same: bool) -> Attention:
    """Attention without one: fewer, wider heads, of which a part of the pairs of features is rotated.

    Its keys are in `per_layer_config` where transformers has written the file. same: values are keys.
    """
    listed = keys.raw.get("per_layer_config") or {}
    found = listed.get(str(types.index(GLOBAL))) if isinstance(listed, dict) and GLOBAL in types else None
    found = found if isinstance(found, dict) else {}
    said = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    keys = Keys(keys.raw | {said[key]: value for key, value in found.items() if key in said}, keys.where)
    dim, rope = (
        keys.count("global_head_dim", 2 * (family.head_dim or 1), null=2 * (family.head_dim or 1)),
        _rope(keys, GLOBAL),
    )
    usual = keys.count("num_key_value_heads", heads)
    kv_heads = _kv_heads(keys, "num_global_key_value_heads", heads, usual) if same else usual
    rope.refuse_unless("rope_type", (None, "proportional"))
    share = rope.number("partial_rotary_factor", 0.25)
    if share > 1:
        raise rope.error("partial_rotary_factor", "at most 1")
    turned = Rope(rope.number("rope_theta", 1e6), "proportional", share, width=dim)
    return Attention(heads, kv_heads, dim, 1.0, turned, norm="head", values="keys" if same else "normed")


def _rope(keys: Keys, kind: str) -> Keys:
    """The parameters of rope in layers of this kind."""
    found = keys.raw.get("rope_parameters") or {}
    own = found.get(kind) or {} if isinstance(found, dict) else found
    if not isinstance(own, dict):
        raise keys.error("rope_parameters", f"an object with {LOCAL} and {GLOBAL}")
    return Keys(own, f"{keys.where}: rope_parameters: {kind}")


def _kv_heads(keys: Keys, name: str, heads: int, usual: int) -> int:
    count = keys.count(name, usual, null=usual)
    if heads % count:
        raise keys.error(name, f"a divisor of num_attention_heads = {heads}")
    return count

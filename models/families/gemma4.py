"""Gemma 4 (12B, 26B-A4B, 31B): its layers, whose attention is of two kinds. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trireme.models.families.experts import Experts
from trireme.models.families.family import Family
from trireme.models.families.keys import Keys
from trireme.models.families.names import GEMMA4, GEMMA4_EXPERTS
from trireme.models.families.rope import GLOBAL, LOCAL, Rope
from trireme.models.layers import Attention, Layer, Mlp


def layers(keys: Keys, family: Family, width: int, n: int, heads: int) -> tuple[Layer, ...]:
    """Windows and full attention in turn, each with heads of its own. Raises InputError."""
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        keys.refuse_unless(name, (0,), 256 if "input" in name else 0)
    types: Any = keys.raw.get("layer_types") or [GLOBAL if (i + 1) % 6 == 0 or i == n - 1 else LOCAL for i in range(n)]
    if not isinstance(types, list) or len(types) != n or not all(t in (GLOBAL, LOCAL) for t in types):
        raise keys.error("layer_types", f"a list of {n} names, each {GLOBAL} or {LOCAL}")
    ropes = keys.raw.get("rope_parameters") or {}
    of = lambda kind, theta: Keys(ropes.get(kind) or {}, f"{keys.where}: rope_parameters: {kind}").number(
        "rope_theta", theta
    )
    dim, kv = keys.count("head_dim", 256), keys.count("num_key_value_heads", heads)
    local = Attention(
        heads, kv, dim, 1.0, Rope(of(LOCAL, 1e4), width=dim), window=keys.count("sliding_window", 512), norm="head",
        values="normed",
    )  # fmt: skip
    apart = (keys.raw.get("per_layer_config") or {}).get(str(types.index(GLOBAL)) if GLOBAL in types else "", {})
    keys = Keys(
        keys.raw
        | {"global_" + key if key == "head_dim" else "num_global_key_value_heads": v for key, v in apart.items()},
        keys.where,
    )
    dim, same = keys.count("global_head_dim", 512, null=dim), keys.flag("attention_k_eq_v", False)
    kv = keys.count("num_global_key_value_heads", kv, null=kv) if same else kv
    share = (ropes.get(GLOBAL) or {}).get("partial_rotary_factor", 0.25)
    rope = Rope(of(GLOBAL, 1e6), "proportional", width=dim, factor=share)
    whole = replace(local, kv_heads=kv, dim=dim, rope=rope, window=0, values="keys" if same else "normed")
    mlps: tuple[Mlp | Experts, ...] = (Mlp(keys.count("intermediate_size"), "gelu"),)
    names = GEMMA4
    if keys.flag("enable_moe_block", False):
        own = Experts(
            keys.count("num_experts"), keys.count("top_k_experts"), keys.count("moe_intermediate_size"), True,
            act="gelu", score_scale=width**-0.5,
        )  # fmt: skip
        mlps, names = (*mlps, own), GEMMA4_EXPERTS
    of_keys = replace(names, qkv=names.qkv[:2])
    eps = keys.number("rms_norm_eps", 1e-6)
    made = {
        LOCAL: Layer(width, eps, names, (local,), mlps, scaled=True),
        GLOBAL: Layer(width, eps, of_keys if same else names, (whole,), mlps, scaled=True),
    }
    return tuple(made[kind] for kind in types)

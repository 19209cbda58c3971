"""Fields of ModelConfig that are more than a key: heads, positions, scales. No torch."""

from __future__ import annotations

from typing import Any

from trireme.models.families.family import Family
from trireme.models.families.keys import InputError, Keys
from trireme.models.families.rope import parse_ropes
from trireme.models.families.windows import sliding_window, unrotated_layers


def heads_of(keys: Keys, family: Family, width: int, heads: int) -> tuple[int, int]:
    """(key/value heads, head width)."""
    if not family.grouped:
        if width % heads:
            raise keys.error(family.spelled["n_heads"], f"a divisor of {family.spelled['width']} = {width}")
        keys.refuse_unless("head_dim", (None, width // heads))
        return heads, width // heads
    kv_heads = keys.count("num_key_value_heads", family.kv_heads or heads, null=heads)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = keys.count("head_dim", family.head_dim or width // heads, null=width // heads)
    if head_dim % 2:
        raise InputError(f"{keys.where}: heads of {head_dim} cannot be rotated; head_dim must be even.")
    return kv_heads, head_dim


def positions_of(keys: Keys, family: Family, head_dim: int, positions: int, layers: int) -> dict[str, Any]:
    """Fields of ModelConfig."""
    window, first, full = sliding_window(keys, family, layers)
    if not family.rotary:
        return {}
    if family.rope_said and not (keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters")):
        raise keys.error("rope_parameters", "an object")
    rope, local = parse_ropes(keys, family, head_dim, positions)
    if (rope.width or local.width) and not family.partial:
        raise InputError(f'{keys.where}: "partial_rotary_factor" is not supported for {keys.raw["model_type"]}.')
    found: dict[str, Any] = dict(rope=rope, window=window, window_from=first, full_layers=full)
    if local != rope and window:
        found["local_rope"] = local
    if family.unrotated == "listed":
        found["unrotated"] = unrotated_layers(keys, layers)
    elif family.unrotated == "typed":
        keys.refuse_unless("position_embedding_type", (None, "rope", "nope"))
        rotated = keys.raw.get("position_embedding_type") == "rope"
        found["unrotated"] = () if rotated else tuple(range(layers))
    elif family.unrotated and keys.raw.get("sliding_window", family.window) is not None:
        found["unrotated"] = full if window else tuple(range(layers))
    return found


def scales_of(keys: Keys, family: Family, width: int) -> dict[str, Any]:
    """Fields of ModelConfig."""
    if family.by_layer:
        return dict(
            scale_attn=keys.flag("scale_attn_weights", True),
            scale_attn_by_layer=keys.flag("scale_attn_by_inverse_layer_idx", False),
        )
    if family.scaled:
        return dict(
            attention_scale=keys.number("attention_multiplier", 1.0),
            embed_scale=keys.number("embedding_multiplier", 1.0),
            branch_scale=keys.number("residual_multiplier", 1.0),
            logit_scale=1.0 / keys.number("logits_scaling", 1.0),
        )
    found = dict(embed_scale=width**0.5) if family.embed_root else {}
    if family.query_scale:
        found["attention_scale"] = keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    return found

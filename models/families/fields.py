"""Fields of ModelConfig that depend on several keys of config.json: heads, positions, scales. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trireme.models.families.family import OF_LOGITS, OF_SCORES, Family
from trireme.models.families.keys import InputError, Keys, is_number
from trireme.models.families.latent import Latent
from trireme.models.families.rope import Rope, parse_ropes
from trireme.models.families.windows import sliding_window, unrotated_layers


def heads_of(keys: Keys, family: Family, width: int, heads: int) -> tuple[int, int]:
    """(number of key/value heads, head width). Raises InputError."""
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


def positions_of(
    keys: Keys, family: Family, head_dim: int, positions: int, layers: int, latent: Latent | None
) -> dict[str, Any]:
    """The fields of ModelConfig for rope, windows and layers without rope. Raises InputError."""
    window, first, full = sliding_window(keys, family, layers)
    if not family.rotary:
        return {}
    if family.rope_said and not (keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters")):
        raise keys.error("rope_parameters", "an object")
    rope, local = parse_ropes(keys, family, latent.rope if latent and not family.partial else head_dim, positions)
    if (rope.width or local.width) and not family.partial:
        raise InputError(f'{keys.where}: "partial_rotary_factor" is not supported for {keys.raw["model_type"]}.')
    if latent is not None:
        if (rope.width or head_dim) != latent.rope and family.partial:
            raise keys.error("partial_rotary_factor", f"{latent.rope} of {head_dim} features, by qk_rope_head_dim")
        pairs = keys.flag("rope_interleave", True) if family.pairs_key else family.pairs
        rope = replace(rope, width=latent.rope, pairs=pairs)
        return dict(rope=rope, attention_scale=head_dim**-0.5 * rope.sharpness)
    found: dict[str, Any] = dict(rope=rope, window=window, window_from=first, full_layers=full)
    if local != rope and window:
        found["local_rope"] = local
    if family.thetas and keys.raw.get("layer_rope_theta") is not None:
        return found | _by_theta(keys, rope, [bool(window) and i not in full for i in range(layers)])
    return found | dict(unrotated=_unrotated(keys, family, layers, full if window else tuple(range(layers))))


def _unrotated(keys: Keys, family: Family, layers: int, full: tuple[int, ...]) -> tuple[int, ...]:
    """The layers without rope, by Family.unrotated. `full`: those without a window."""
    if family.unrotated == "listed":
        return unrotated_layers(keys, layers)
    if family.unrotated == "full":
        return full if keys.raw.get("sliding_window", family.window) is not None else ()
    none = family.unrotated == "all" or (family.unrotated == "null" and _without_theta(keys))
    if family.unrotated == "typed":
        keys.refuse_unless("position_embedding_type", (None, "rope", "nope"))
        none = keys.raw.get("position_embedding_type") != "rope"
    return tuple(range(layers)) if none else ()


def _without_theta(keys: Keys) -> bool:
    """Whether rope's theta is null, in its parameters or next to them: then transformers leaves rope out."""
    found = keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters")
    holder = found if isinstance(found, dict) and "rope_theta" in found else keys.raw
    return holder.get("rope_theta", 0) is None


def _by_theta(keys: Keys, rope: Rope, windowed: list[bool]) -> dict[str, Any]:
    """Fields of ModelConfig by layer_rope_theta: a theta of layers with a window, one of the others, 0 for no rope."""
    name, layers = "layer_rope_theta", len(windowed)
    thetas = keys.raw[name]
    if not isinstance(thetas, list) or len(thetas) != layers or not all(is_number(t) or t == 0 for t in thetas):
        raise keys.error(name, f"a list of {layers} numbers, none of them negative")
    rotated = [{float(t) for t, own in zip(thetas, windowed, strict=True) if t and own == local} for local in (0, 1)]
    if max(map(len, rotated)) > 1:
        raise keys.error(name, "one theta of the layers with a window, and one of the others")
    whole, local = (replace(rope, theta=theta) for own in rotated for theta in own or [rope.theta])
    found: dict[str, Any] = dict(rope=whole, unrotated=tuple(i for i, theta in enumerate(thetas) if not theta))
    return found | (dict(local_rope=local) if local != whole and any(windowed) else {})


def scales_of(keys: Keys, family: Family, width: int, head_dim: int) -> dict[str, Any]:
    """The fields of ModelConfig for factors of embedding, scores, branches and logits. Raises InputError."""
    if family.multiplied:
        return _multiplied(keys, head_dim)
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
    for field, name in (("attention_cap", OF_SCORES), ("logit_cap", OF_LOGITS)):
        if name in family.caps:
            default = family.caps[name]
            found[field] = 0.0 if keys.raw.get(name, default) is None else keys.number(name, default)  # null: none
    if family.query_scale:
        found["attention_scale"] = keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    return found


def _multiplied(keys: Keys, head_dim: int) -> dict[str, Any]:
    """Falcon-H1's factors: as there are no biases, those of queries and keys become factors of scores, and so on."""
    into, (gate, down) = keys.number("attention_in_multiplier", 1.0), keys.factors("mlp_multipliers", 2)
    return dict(
        embed_scale=keys.number("embedding_multiplier", 1.0),
        attention_scale=head_dim**-0.5 * into**2 * keys.number("key_multiplier", 1.0),
        branch_scale=into * keys.number("attention_out_multiplier", 1.0),
        gate_scale=gate,
        mlp_scale=down,
        logit_scale=keys.number("lm_head_multiplier", 1.0),
    )

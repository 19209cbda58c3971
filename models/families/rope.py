"""Rotary positions as config.json describes them, in the spellings of transformers 4 and 5. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trireme.models.families.family import Family
from trireme.models.families.keys import InputError, Keys

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
LOCAL, GLOBAL = "sliding_attention", "full_attention"  # in layer_types
MAY_BE_NULL = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}  # yarn, longrope


@dataclass(frozen=True)
class Rope:
    """The angles of rotary positions. Comments name the kinds that use a field."""

    theta: float
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn, proportional
    share: float = 1.0  # proportional: of the pairs of features that are turned
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_positions: int = 0  # llama3, yarn, longrope
    width: int = 0  # first features of a head that are rotated; 0: all
    attention_factor: float = 1.0  # of cos and sin: yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: frequencies' divisors up to original_positions
    long_factors: tuple[float, ...] = ()  # longrope: beyond
    pairs: bool = False  # neighbouring features are turned, not halves
    sharpness: float = 1.0  # all but default: latent attention's scores times this
    query_beta: float = 0.0  # yarn: queries times 1 + this * log(1 + position // original_positions)


def parse_ropes(keys: Keys, family: Family, head_dims: tuple[int, int], positions: int) -> tuple[Rope, Rope]:
    """(Rope of layers with full attention, of layers with a window), given the width of heads of each.

    They are equal unless the family has a local theta. Raises InputError.
    """
    if odd_dims := [n for n in head_dims if n % 2]:
        raise InputError(f"{keys.source}: heads of {odd_dims[0]} cannot be rotated; head_dim must be even.")
    inner, thetas = _parameters(keys, family), (family.theta, family.local_theta or family.theta)
    null, names = family.unrotated == "null", (family.spelled["theta"], family.local_theta_key)
    names = names if family.local_theta is not None else names[:1] * 2
    rope, local = (
        _parse(keys, params, family, _theta(keys, params, name, theta, null), head_dim, positions)
        for params, name, theta, head_dim in zip(inner, names, thetas, head_dims, strict=True)
    )
    if (rope.width or local.width) and not family.partial:
        raise InputError(f'{keys.source}: "partial_rotary_factor" is not supported for {keys.raw["model_type"]}.')
    return rope, local


def _parameters(keys: Keys, family: Family) -> tuple[Keys, Keys]:
    """What config.json says of each of the two, from the keys where transformers reads it. Raises InputError."""
    scaling, params = (_object(keys, keys.raw, name) for name in ("rope_scaling", "rope_parameters"))
    section = lambda name, raw: Keys(raw, f"{keys.source}: {name}")
    flat = section("rope_scaling", scaling) if scaling or family.local_theta else section("rope_parameters", params)
    if nested := [kind for kind, value in flat.raw.items() if isinstance(value, dict)]:
        raise InputError(f'{flat.source}: parameters for "{nested[0]}" are not supported for this model_type.')
    if family.local_theta is None:
        return flat, flat
    full, local = (_object(section("rope_parameters", params), params, kind) for kind in (GLOBAL, LOCAL))
    if unknown := params.keys() - {GLOBAL, LOCAL}:
        raise InputError(
            f'{keys.source}: rope_parameters: "{min(unknown)}" is not supported outside "{GLOBAL}" and "{LOCAL}".'
        )
    if family.nested:
        keys.refuse_unless("rope_scaling", (None,))
        keys.refuse_unless("rope_theta", (None, family.theta))  # transformers does not read it
    if "rope_type" not in scaling and "type" in scaling:  # transformers would leave it out
        raise InputError(
            f'{keys.source}: rope_scaling: "type" is not supported for this model_type: name it "rope_type".'
        )
    name = "rope_scaling" if scaling else f"rope_parameters: {GLOBAL}"
    return section(name, full | scaling), section(f"rope_parameters: {LOCAL}", local)


def _object(keys: Keys, raw: dict[str, Any], name: str) -> dict[str, Any]:
    """The object under a key of `raw`, empty where it is null or absent. Raises InputError if it is no object."""
    values = raw.get(name) or {}
    if not isinstance(values, dict):
        raise keys.error(name, "an object or null")
    return values


def _theta(keys: Keys, inner: Keys, key: str, default: float, null: bool = False) -> float:
    """theta in rope's parameters `inner`, else by `key` in `keys`, else the default. `null`: null is as absent."""
    if "rope_theta" in inner.raw and not (null and inner.raw["rope_theta"] is None):
        return inner.number("rope_theta")
    return keys.number(key, default, default if null else None) if key else default


def _parse(keys: Keys, inner: Keys, family: Family, theta: float, head_dim: int, positions: int) -> Rope:
    kind = inner.raw.get("rope_type", inner.raw.get("type", "default"))
    kind = family.rope_types.get(kind, kind) if isinstance(kind, str) else kind
    if family.alpha and kind == "dynamic" and inner.raw.get("alpha"):
        kind, theta = "default", theta * inner.number("alpha") ** (head_dim / (head_dim - 2))
    kinds = ("yarn",) if family.query_beta else ("default", "longrope") if family.longrope else KINDS
    if kind not in kinds:
        raise InputError(f'{inner.source}: rope type "{kind}" is not supported. Supported: {", ".join(kinds)}.')
    if not family.query_beta:
        inner.refuse_unless("llama_4_scaling_beta", (None, 0))
    share = _share(keys, inner, family, head_dim, even=kind != "proportional")
    sharp = lambda factor: _sharpness(inner, factor) if family.latent else 1.0
    if kind == "proportional":
        factor = inner.number("factor", 1.0)
        return Rope(theta, kind, factor, share, pairs=family.pairs, sharpness=sharp(factor))
    width = int(head_dim * share) % head_dim  # 0: all
    common: dict[str, Any] = dict(width=width, pairs=family.pairs)
    if kind == "default":
        return Rope(theta, **common)
    if kind == "linear":
        factor = inner.number("factor")
        return Rope(theta, kind, factor, sharpness=sharp(factor), **common)
    common["original_positions"] = original = _original(keys, inner, family, positions)
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if not low < high:
            raise inner.error("high_freq_factor", f"a number above low_freq_factor = {low}")
        factor = inner.number("factor")
        return Rope(theta, kind, factor, low_freq_factor=low, high_freq_factor=high, sharpness=sharp(factor), **common)
    inner = Keys({k: v for k, v in inner.raw.items() if v is not None or k not in MAY_BE_NULL}, inner.source)
    if kind == "yarn":
        if theta == 1:
            raise InputError(f'{inner.source}: yarn is not possible with a "rope_theta" of 1.')
        factor = inner.number("factor", positions / original)
        fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
        attention = inner.number("attention_factor", _yarn_attention(inner, factor))
        return Rope(theta, kind, factor, attention_factor=attention, beta_fast=fast, beta_slow=slow,
                    truncate=_truncate(inner, family), query_beta=_query_beta(inner, family), sharpness=sharp(factor),
                    **common)  # fmt: skip
    factor = inner.number("factor", positions / original)
    if factor > 1 and original == 1:
        raise InputError(f'{inner.source}: "original_max_position_embeddings" is 1, expected more.')
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    half = (width or head_dim) // 2
    short, long = (inner.numbers(name, half) for name in ("short_factor", "long_factor"))
    attention = inner.number("attention_factor", default)
    return Rope(theta, kind, attention_factor=attention, short_factors=short, long_factors=long,
                sharpness=sharp(factor), **common)  # fmt: skip


def _original(keys: Keys, inner: Keys, family: Family, positions: int) -> int:
    """original_max_position_embeddings, if possible from outside rope's parameters, unless kinds of layers have own."""
    name = "original_max_position_embeddings"
    if family.local_theta is None and (family.original or name in keys.raw):
        return keys.count(name, family.original)
    return inner.count(name, positions)


def _truncate(inner: Keys, family: Family) -> bool:
    """yarn's `truncate`. transformers takes null for false, and ignores it in the parameters of a kind of layers."""
    if family.local_theta is not None:
        inner.refuse_unless("truncate", (True,), True)
        return True
    return inner.raw.get("truncate", True) is not None and inner.flag("truncate", True)


def _query_beta(inner: Keys, family: Family) -> float:
    name = "llama_4_scaling_beta"
    return inner.number(name) if family.query_beta and inner.raw.get(name) != 0 else 0.0


def _share(keys: Keys, inner: Keys, family: Family, head_dim: int, even: bool) -> float:
    """The share of a head's features that are rotated. `even`: it must be an even number of them."""
    name, holder = family.spelled["share"], keys
    null = None if family.longrope or name != "partial_rotary_factor" else 1.0  # what null stands for
    null = family.partial if name in family.only else null
    if "partial_rotary_factor" in inner.raw:
        name, holder, share = "partial_rotary_factor", inner, inner.number("partial_rotary_factor")
    elif family.rotary_dim and keys.raw.get("rotary_dim") is not None and name not in keys.raw:
        name, share = "rotary_dim", keys.count("rotary_dim") / head_dim
    else:
        share = keys.number(name, family.partial or 1.0, null=null)
    width = int(head_dim * share)
    if share > 1 or (even and (width % 2 or not width)):
        raise holder.error(name, f"a share of {head_dim} features that is an even number")
    return share


def _sharpness(inner: Keys, factor: float) -> float:
    """The factor of latent attention's scores by mscale_all_dim, as in DeepSeek-V2."""
    if not inner.raw.get("mscale_all_dim") or factor <= 1:
        return 1.0
    return (0.1 * inner.number("mscale_all_dim") * math.log(factor) + 1.0) ** 2


def _yarn_attention(inner: Keys, factor: float) -> float:
    """transformers' default of yarn's attention_factor."""
    mscale = lambda scale: 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
    if inner.raw.get("mscale") and inner.raw.get("mscale_all_dim"):
        return mscale(inner.number("mscale")) / mscale(inner.number("mscale_all_dim"))
    return mscale(1.0)

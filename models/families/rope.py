"""Rotary positions as config.json describes them, in the spellings of transformers 4 and 5. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trireme.models.families.keys import InputError, Keys
from trireme.models.families.table import Family

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
LOCAL, GLOBAL = "sliding_attention", "full_attention"  # in layer_types


@dataclass(frozen=True)
class Rope:
    """A table of angles; comments name the kinds that use a field."""

    theta: float
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn
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
    query_beta: float = 0.0  # yarn: queries times 1 + this * log(1 + position // original_positions)


def parse_ropes(keys: Keys, family: Family, head_dim: int, positions: int) -> tuple[Rope, Rope]:
    """(Rope of layers with full attention, of layers with a window).

    They differ where the family has a local theta, or parameters per layer type.
    """
    name = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
    params = keys.raw.get(name) or {}
    if not isinstance(params, dict):
        raise keys.error(name, "an object or null")
    nested = {key for key, value in params.items() if isinstance(value, dict)}
    if strange := nested - ({LOCAL, GLOBAL} if family.windows == "pattern" else set()):
        raise InputError(
            f'{keys.where}: {name}: parameters for "{min(strange)}" are not supported for this model_type.'
        )
    where = lambda kind: f"{keys.where}: {name}" + (f": {kind}" if nested else "")
    of = lambda kind: Keys(params.get(kind, {}) if nested else params, where(kind))
    theta, local = keys.number(family.spelled["theta"], family.theta), family.local_theta
    rope = _parse(keys, of(GLOBAL), family, theta, head_dim, positions)
    if nested:
        return rope, _parse(keys, of(LOCAL), family, local or family.theta, head_dim, positions)
    if local is None:
        return rope, rope
    return rope, Rope(keys.number("rope_local_base_freq", local), width=rope.width)


def _parse(keys: Keys, inner: Keys, family: Family, theta: float, head_dim: int, positions: int) -> Rope:
    kind = inner.raw.get("rope_type", inner.raw.get("type", "default"))
    if kind == "su" or kind == "yarn" and "short_factor" in inner.raw:
        kind = "longrope"  # its first names
    kinds = ("yarn",) if family.query_beta else ("default", "longrope") if family.longrope else KINDS
    if kind not in kinds:
        raise InputError(f'{inner.where}: rope type "{kind}" is not supported. Supported: {", ".join(kinds)}.')
    if not family.query_beta:
        inner.refuse_unless("llama_4_scaling_beta", (None,))
    theta = inner.number("rope_theta", theta)
    width = _width(keys, inner, family, head_dim)
    common: dict[str, Any] = dict(width=width, pairs=family.pairs)
    if kind == "default":
        return Rope(theta, **common)
    if kind == "linear":
        return Rope(theta, kind, inner.number("factor"), **common)
    common["original_positions"] = original = keys.count(
        "original_max_position_embeddings", inner.count("original_max_position_embeddings", positions)
    )
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if not low < high:
            raise inner.error("high_freq_factor", f"a number above low_freq_factor = {low}")
        return Rope(theta, kind, inner.number("factor"), low, high, **common)
    if kind == "yarn":
        factor = inner.number("factor", positions / original)
        fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
        attention = inner.number("attention_factor", _yarn_attention(inner, factor))
        beta = inner.number("llama_4_scaling_beta") if family.query_beta else 0.0
        return Rope(theta, kind, factor, attention_factor=attention, beta_fast=fast, beta_slow=slow,
                    truncate=inner.flag("truncate", True), query_beta=beta, **common)  # fmt: skip
    factor = inner.number("factor", positions / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    half = (width or head_dim) // 2
    short, long = (inner.numbers(name, half) for name in ("short_factor", "long_factor"))
    attention = inner.number("attention_factor", usual)
    return Rope(theta, kind, attention_factor=attention, short_factors=short, long_factors=long, **common)


def _width(keys: Keys, inner: Keys, family: Family, head_dim: int) -> int:
    name = family.spelled["share"]
    share = inner.number("partial_rotary_factor", keys.number(name, family.partial or 1.0))
    width = int(head_dim * share)
    if share > 1 or width % 2 or not width:
        holder, name = (inner, "partial_rotary_factor") if "partial_rotary_factor" in inner.raw else (keys, name)
        raise holder.error(name, f"a share of {head_dim} features that is an even number")
    return 0 if width == head_dim else width


def _yarn_attention(inner: Keys, factor: float) -> float:
    """transformers' default."""
    mscale = lambda by: 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0
    if inner.raw.get("mscale") and inner.raw.get("mscale_all_dim"):
        return mscale(inner.number("mscale")) / mscale(inner.number("mscale_all_dim"))
    return mscale(1.0)

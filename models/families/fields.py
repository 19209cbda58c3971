"""Fields of ModelConfig that depend on several keys of config.json: heads, positions, scales. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from trireme.models.families.experts import Act, parse_experts
from trireme.models.families.family import ACTS, EXACT_GELU, OF_LOGITS, OF_SCORES, Family
from trireme.models.families.keys import Keys, is_number
from trireme.models.families.latent import Latent, parse_latent
from trireme.models.families.names import direct
from trireme.models.families.rope import Rope, parse_ropes
from trireme.models.families.scans import BLOCK_TYPES, KINDS_OF_MLP, Scan, parse_scan
from trireme.models.families.windows import unrotated_layers, windows
from trireme.models.layers import Attention, Layer, Mlp


def heads_of(keys: Keys, family: Family, width: int, heads: int) -> tuple[int, int]:
    """(number of key/value heads, head width). Raises InputError."""
    if not family.grouped:
        if width % heads:
            raise keys.error(family.spelled["n_heads"], f"a divisor of {family.spelled['width']} = {width}")
        keys.refuse_unless("head_dim", (None, width // heads))
        return heads, width // heads
    kv_heads = keys.count("num_key_value_heads", family.kv_heads or heads, null=heads)
    if heads % (kv_heads * family.local_kv):
        ratio = f" / {family.local_kv}" if family.local_kv > 1 else ""
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads{ratio} = {heads // family.local_kv}")
    head_dim = keys.count("head_dim", family.head_dim or width // heads, null=width // heads)
    return kv_heads, head_dim


def ropes_of(
    keys: Keys, family: Family, head_dim: int, positions: int, windows: list[int], latent: Latent | None
) -> list[Rope | None]:
    """The rope of each layer, given their windows; None for one without. Raises InputError."""
    layers = len(windows)
    if not family.rotary:
        return [None] * layers
    if family.rope_said and not (keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters")):
        raise keys.error("rope_parameters", "an object")
    rope, local = parse_ropes(
        keys, family, (latent.rope if latent and not family.partial else head_dim,) * 2, positions
    )
    if latent is not None:
        if (rope.width or head_dim) != latent.rope and family.partial:
            raise keys.error("partial_rotary_factor", f"{latent.rope} of {head_dim} features, by qk_rope_head_dim")
        pairs = keys.flag("rope_interleave", True) if family.pairs_key else family.pairs
        return [replace(rope, width=latent.rope, pairs=pairs)] * layers
    rope, local = (replace(spec, width=spec.width or head_dim) for spec in (rope, local))
    if family.thetas and keys.raw.get("layer_rope_theta") is not None:
        return _by_theta(keys, family, rope, layers)
    bare = _unrotated(keys, family, windows)
    return [None if i in bare else local if window else rope for i, window in enumerate(windows)]


def _unrotated(keys: Keys, family: Family, windows: list[int]) -> tuple[int, ...]:
    """The layers without rope, by Family.unrotated."""
    layers = len(windows)
    if family.unrotated == "listed":
        return unrotated_layers(keys, layers)
    if family.unrotated == "last":
        return tuple(i for i in range(layers) if (layers - 1 - i) % family.period == 0)
    if family.unrotated == "global":
        return tuple(i for i, window in enumerate(windows) if not window)
    if family.unrotated == "full":
        windowed = keys.raw.get("sliding_window", family.window) is not None
        return tuple(i for i, window in enumerate(windows) if not window) if windowed else ()
    none = family.unrotated == "all" or (family.unrotated == "null" and _without_theta(keys))
    if family.unrotated == "typed":
        keys.refuse_unless("position_embedding_type", (None, "rope", "nope"))
        none = keys.raw.get("position_embedding_type") != "rope"
    return tuple(range(layers)) if none else ()


def _without_theta(keys: Keys) -> bool:
    """Whether rope's theta is null, in its parameters or next to them: then transformers leaves rope out."""
    scaling = keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters")
    holder = scaling if isinstance(scaling, dict) and "rope_theta" in scaling else keys.raw
    return holder.get("rope_theta", 0) is None


def _by_theta(keys: Keys, family: Family, rope: Rope, layers: int) -> list[Rope | None]:
    """Ropes by layer_rope_theta, a number for each layer; 0 for no rope."""
    name = "layer_rope_theta"
    thetas = keys.raw[name]
    if not isinstance(thetas, list) or len(thetas) != layers or not all(is_number(t) or t == 0 for t in thetas):
        raise keys.error(name, f"a list of {layers} numbers, none of them negative")
    rope_of = lambda theta: rope if family.one_theta else replace(rope, theta=float(theta))
    return [rope_of(theta) if theta else None for theta in thetas]


class Scales(NamedTuple):
    """Factors of embedding, scores, branches and logits, and caps."""

    embed: float = 1.0
    scores: float = 0.0  # 0: by the width of heads
    attention: float = 1.0  # of what attention adds
    mlp: float = 1.0
    gate: float = 1.0
    logits: float = 1.0
    scores_cap: float = 0.0
    logits_cap: float = 0.0


def scales_of(keys: Keys, family: Family, width: int, head_dim: int) -> Scales:
    """Raises InputError."""
    if family.multiplied:
        return _multiplied(keys, head_dim)
    if family.by_layer:
        return Scales(scores=0.0 if keys.flag("scale_attn_weights", True) else 1.0)
    if family.scaled:
        branch = keys.number("residual_multiplier", 1.0)
        return Scales(
            scores=keys.number("attention_multiplier", 1.0),
            embed=keys.number("embedding_multiplier", 1.0),
            attention=branch,
            mlp=branch,
            logits=1.0 / keys.number("logits_scaling", 1.0),
        )
    cap = lambda name: (
        0.0
        if name not in family.caps or keys.raw.get(name, family.caps[name]) is None  # null: none
        else keys.number(name, family.caps[name])
    )
    scores_key, logits_key = family.factors
    scores = keys.number("query_pre_attn_scalar", 256.0) ** -0.5 if family.query_scale else 0.0
    return Scales(
        attention=keys.number(family.value_scale_key, 0.707, 1.0) if family.value_scale_key else 1.0,
        embed=width**0.5 if family.embed_root or _flagged(keys, family.embed_root_key) else 1.0,
        scores=head_dim**-0.5 * keys.number(scores_key, 3.87) if scores_key else scores,
        logits=keys.number(logits_key, 26**-0.5) if logits_key else 1.0,
        scores_cap=cap(OF_SCORES),
        logits_cap=cap(OF_LOGITS),
    )


def _flagged(keys: Keys, name: str) -> bool:
    """A flag that is false where it is absent; without a name false."""
    return bool(name) and keys.flag(name, False)


def _multiplied(keys: Keys, head_dim: int) -> Scales:
    """Falcon-H1's factors: as there are no biases, those of queries and keys become factors of scores, and so on."""
    in_factor, (gate, down) = keys.number("attention_in_multiplier", 1.0), keys.factors("mlp_multipliers", 2)
    return Scales(
        embed=keys.number("embedding_multiplier", 1.0),
        scores=head_dim**-0.5 * in_factor**2 * keys.number("key_multiplier", 1.0),
        attention=in_factor * keys.number("attention_out_multiplier", 1.0),
        gate=gate,
        mlp=down,
        logits=keys.number("lm_head_multiplier", 1.0),
    )


def _attentions(
    keys: Keys, family: Family, width: int, layers: int, heads: int, positions: int
) -> tuple[list[Attention], Scales]:
    """The attention of each layer, also where another mixer takes its place."""
    flag = lambda bias: bias if isinstance(bias, bool) else keys.flag(*bias)
    latent = parse_latent(keys, family.latent, heads)
    kv_heads, head_dim = (heads, latent.head_dim) if latent else heads_of(keys, family, width, heads)
    window_sizes, scales = windows(keys, family, layers), scales_of(keys, family, width, head_dim)
    ropes = ropes_of(keys, family, head_dim, positions, window_sizes, latent)
    score = scales.scores or head_dim**-0.5
    if latent and ropes[0]:
        score *= ropes[0].sharpness
    by_layer = family.by_layer and keys.flag("scale_attn_by_inverse_layer_idx", False)
    normed = not family.qk_norm_key or _flagged(keys, family.qk_norm_key)
    first = Attention(
        heads, kv_heads, head_dim, score, cap=scales.scores_cap, norm=family.qk_norm if normed else "",
        rope_first=family.rope_first, bias=flag(family.qkv_bias), o_bias=flag(family.o_bias),
        gate=_gate_of(keys, family), gate_act=family.gate_act, latent=latent, factor=scales.attention,
        value=keys.count(family.value_key, 128) if family.value_key else 0,
    )  # fmt: skip
    counts = _heads_by_layer(keys, family, layers, heads, kv_heads)
    return [
        replace(
            first, heads=count, kv_heads=kv_heads * (family.local_kv if window else 1), window=window, rope=rope,
            scale=score / (i + 1) if by_layer else score,
        )
        for i, (count, window, rope) in enumerate(zip(counts, window_sizes, ropes, strict=True))
    ], scales  # fmt: skip


def _gate_of(keys: Keys, family: Family) -> Literal["", "queries", "values", "heads"]:
    """layers.Attention.gate, by the family's key if it has one."""
    if not family.gate_key:
        return family.attention_gate
    keys.refuse_unless(family.gate_key, (True, "per-head", "per-element"), True)
    return "values" if keys.raw.get(family.gate_key) == "per-element" else "heads"


def _heads_by_layer(keys: Keys, family: Family, layers: int, heads: int, kv_heads: int) -> list[int]:
    """The query heads of each layer."""
    heads_of = keys.raw.get(family.heads_key)
    if heads_of is None:
        return [heads] * layers
    valid = isinstance(heads_of, list) and len(heads_of) == layers
    if not valid or not all(type(n) is int and n > 0 and n % kv_heads == 0 for n in heads_of):
        raise keys.error(family.heads_key, f"a list of {layers} multiples of num_key_value_heads = {kv_heads}")
    return list(heads_of)


def layers_of(keys: Keys, family: Family, width: int, layers: int, heads: int, positions: int) -> tuple[Layer, ...]:
    """What each layer computes. Raises InputError."""
    attentions, scales = _attentions(keys, family, width, layers, heads, positions)
    default = family.ffn if family.rotary else 4 * width
    ffn, act = keys.count(family.spelled["ffn"], default, null=default), act_of(keys, family)
    bias = family.mlp_bias if isinstance(family.mlp_bias, bool) else keys.flag(*family.mlp_bias)
    plain = Mlp(ffn, act, family.gated, bias, scales.gate, scales.mlp)
    experts = parse_experts(keys, family.experts, layers)
    scans = parse_scan(keys, family.scan, layers, width, heads)
    kinds = keys.raw[BLOCK_TYPES] if family.single else [""] * layers
    eps, norm = keys.number(family.spelled["eps"], family.eps), _norm_of(family)
    parallel = family.parallel and keys.flag("use_parallel_residual", True)
    post_eps = keys.number(family.post_eps_key, 1e-8) if family.post_eps_key else 0.0
    records: list[Layer] = []
    for attention, mixture, scan, kind in zip(attentions, experts, scans, kinds, strict=True):
        mixers: tuple[Attention | Scan, ...] = (attention,)
        if scan:
            mixers = (attention, scan) if family.multiplied else (replace(scan, factor=scales.attention),)
        mlp = replace(mixture, act=act, gated=family.gated, factor=scales.mlp) if mixture else plain
        names = family.scan_names if scan and family.scan_names else family.names
        mixer_names = direct(names.mixer) if attention.latent and not attention.latent.q_rank else names.mixer
        if family.local_sinks and not attention.window:
            mixer_names = replace(mixer_names, sinks="")
        mlp_names = names.mlp if mixture or not family.experts else family.dense
        layer = Layer(
            width, eps, mixers, (mlp,), mixer_names, mlp_names, norm, parallel, family.entry_norm and not records,
            post_eps, family.names.in_out,
        )  # fmt: skip
        records.append(layer if not kind else layer.feeding if kind in KINDS_OF_MLP else layer.mixing)
    return tuple(records)


def _norm_of(family: Family) -> Literal["rms", "rms + 1", "layer"]:
    return "layer" if family.layer_norm else "rms + 1" if family.add_one else "rms"


def act_of(keys: Keys, family: Family) -> Act:
    """The activation that config.json names. Raises InputError."""
    key, default = family.spelled["act"], ACTS[family.act]
    synonyms = (name for name, act in ACTS.items() if act == default)  # where a recurrence has it, too
    keys.refuse_unless(key, tuple(synonyms if family.scan else ACTS), family.act)
    name = keys.raw.get(key, family.act)
    return "gelu" if name == EXACT_GELU and family.tanh_meant else ACTS[name]

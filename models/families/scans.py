"""Layers whose mixer is a linear recurrence (gated delta networks, Mamba2), as config.json describes them. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from trireme.models.families.keys import Keys, is_number

FULL, LINEAR = "full_attention", "linear_attention"  # in layer_types
OLDER = {"attention": FULL, "mamba": LINEAR}  # other names of these
BLOCK_TYPES, PATTERN = "layers_block_type", "hybrid_override_pattern"  # where a layer is a mixer or an MLP
MLP, EXPERTS = KINDS_OF_MLP = "mlp", "moe"
LETTERS = {"M": LINEAR, "E": EXPERTS, "*": FULL, "-": MLP}  # of PATTERN


@dataclass(frozen=True)
class Scan:
    """A layer's recurrence: a state (key_dim, value_dim) for each of `heads`.

    Head j has the queries and keys of key head j // (heads / key_heads).
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution
    delta: bool = True  # the delta rule; otherwise Mamba2, whose B are keys, C queries, groups heads of these
    most: float = 1.0  # of what the delta rule corrects; 2: a state's eigenvalues may be negative
    eps: float = 0.0  # of the gated norm; 0: the model's
    conv_bias: bool = False
    low: float = 0.0  # of Mamba2's steps
    high: float = 0.0  # 0: none
    parts: tuple[int, ...] = ()  # channels of each convolution in files; (): they are one
    normed: bool = True  # there is a norm with the gate; otherwise the gate alone
    factor: float = 1.0  # of what is added to the residual
    factors: tuple[float, ...] = ()  # of what is projected: gate, values, keys, queries, steps; (): 1

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def mixed_width(self) -> int:
        """Features of the first projection: channels, gate, a number of each head, with the delta rule two."""
        return self.channels + self.value_width + (1 + self.delta) * self.heads


@dataclass(frozen=True)
class DeltaKeys:
    """A family's gated delta networks, with transformers' defaults."""

    interval: int = 4  # every so many layers one has attention
    interval_key: str = "full_attention_interval"  # "": not read
    pattern: tuple[str, ...] = ()  # in place of the interval: kinds of layers, repeated, some with a window
    heads: tuple[int, int] = (16, 32)  # of keys, of values
    by_width: bool = False  # defaults are by the attention's heads and the model's width
    negative_key: str = ""  # corrections of up to 2; "": never
    eps: float = 0.0
    separate_convs: bool = False  # queries, keys and values have convolutions of their own in files


@dataclass(frozen=True)
class MambaKeys:
    """A family's Mamba2 layers: keys of config.json, with transformers' defaults."""

    heads: tuple[str, int] = ("mamba_n_heads", 128)
    head_dim: tuple[str, int | None] = ("mamba_d_head", None)  # None: that of `expand`
    state: tuple[str, int] = ("mamba_d_state", 256)
    groups: tuple[str, int] = ("mamba_n_groups", 1)
    taps: tuple[str, int] = ("mamba_d_conv", 4)
    expand: str = "mamba_expand"  # heads are as wide as so many times the model; "": not read
    conv_bias: str = "mamba_conv_bias"
    low_key: str = ""  # key of the least step, 0.001 by default; "": both limits are time_step_limit
    biases: tuple[str, ...] = ("mamba_proj_bias",)  # keys of those that are not supported
    layers: str = "layer_types"
    attending: str = ""  # key of the layers with attention; "": by `layers`
    with_attention: bool = False  # every layer has both, with factors (Falcon-H1)


D_SSM = "mamba_d_ssm"  # width of all heads, where it is not `expand` times the model's
WIDEST = 256  # of a head: a state is in registers
ACCEPTED = {  # keys that change the mathematics -> accepted values
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "silu", "swish"),
    "mamba_ssm_dtype": (None, "float32"),
    "mamba_hidden_act": (None, "silu", "swish"),
}


def parse_scan(
    keys: Keys, family: DeltaKeys | MambaKeys | None, layers: int, width: int, heads: int
) -> list[Scan | None]:
    """The Scan of each layer; None for one without a recurrence. Raises InputError.

    `width` is the model's, `heads` are attention's.
    """
    if family is None:
        return [None] * layers
    keys.only(ACCEPTED)
    if isinstance(family, MambaKeys):
        return _mamba(keys, family, layers, width)
    return _delta(keys, family, layers, width, heads)


def _delta(keys: Keys, family: DeltaKeys, layers: int, width: int, heads: int) -> list[Scan | None]:
    by_width = family.by_width
    count = lambda name, default: keys.count(name, default, null=default if by_width else None)
    key_heads = count("linear_num_key_heads", heads if by_width else family.heads[0])
    heads = count("linear_num_value_heads", heads if by_width else family.heads[1])
    key_dim = count("linear_key_head_dim", int(0.75 * width / key_heads) if by_width else 128)
    value_dim = count("linear_value_head_dim", 2 * key_dim if by_width else 128)
    taps = keys.count("linear_conv_kernel_dim", 4)
    if heads % key_heads:
        raise keys.error("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    for name, d in (("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)):
        _check(keys, name, d, taps, "linear_conv_kernel_dim")
    negative = bool(family.negative_key) and keys.flag(family.negative_key, True)
    step = family.interval
    if family.interval_key:
        step = keys.count(family.interval_key, family.interval, null=family.interval)
    types = [LINEAR if (i + 1) % step else FULL for i in range(layers)]
    kinds = tuple(dict.fromkeys((FULL, LINEAR, *family.pattern)))
    if family.pattern:
        types = [family.pattern[i % len(family.pattern)] for i in range(layers)]
    scan = Scan(
        key_heads, heads, key_dim, value_dim, taps, most=2.0 if negative else 1.0, eps=family.eps,
        parts=(key_heads * key_dim, key_heads * key_dim, heads * value_dim) if family.separate_convs else (),
    )  # fmt: skip
    return [scan if scans else None for scans in _layers(keys, "layer_types", layers, types, kinds=kinds)]


def _mamba(keys: Keys, family: MambaKeys, layers: int, width: int) -> list[Scan | None]:
    types = [LINEAR] * layers
    for i in _attending(keys, family, layers):
        types[i] = FULL
    scanned = [True] * layers
    if not family.with_attention:
        scanned = _layers(keys, family.layers, layers, types, family.attending)
    if not any(scanned):
        return [None] * layers
    heads, state, groups, taps = (keys.count(*key) for key in (family.heads, family.state, family.groups, family.taps))
    name, default = family.head_dim
    inner = keys.count(family.expand, 2) * width if family.expand else 0
    inner = keys.count(D_SSM, 1024, null=inner) if family.with_attention else inner
    per_head = inner // heads
    auto = keys.raw.get(name) == "auto" or default is None and keys.raw.get(name) is None
    head_dim = per_head if auto else keys.count(name, default)
    if inner and head_dim * heads != inner:
        expected = D_SSM if family.with_attention else f"{family.expand} * hidden_size"
        raise keys.error(family.heads[0], f"a divisor of {expected} = {inner}, in heads of {name}")
    if heads % groups:
        raise keys.error(family.groups[0], f"a divisor of {family.heads[0]} = {heads}")
    for key, d in ((name, head_dim), (family.state[0], state)):
        _check(keys, key, d, taps, family.taps[0])
    keys.only(dict.fromkeys(family.biases, (None, False)))
    low, high = (keys.number(family.low_key, 0.001), 0.0) if family.low_key else _limits(keys)
    bias = keys.flag(family.conv_bias, True)
    scan = Scan(groups, heads, state, head_dim, taps, delta=False, conv_bias=bias, low=low, high=high)
    scan = _with_attention(keys, scan) if family.with_attention else scan
    return [scan if scans else None for scans in scanned]


def _with_attention(keys: Keys, scan: Scan) -> Scan:
    """`scan` with the factors of Falcon-H1, whose norm is optional."""
    normed = keys.flag("mamba_rms_norm", False)
    if normed:  # transformers' kernels have the gate first, whatever is said
        keys.refuse_unless("mamba_norm_before_gate", (False,), True)
    in_factor, multipliers = keys.number("ssm_in_multiplier", 1.0), keys.factors("ssm_multipliers", 5)
    factors = tuple(in_factor * factor for factor in multipliers)
    return replace(
        scan, normed=normed, factor=keys.number("ssm_out_multiplier", 1.0),
        factors=factors if set(factors) != {1.0} else (),
    )  # fmt: skip


def _attending(keys: Keys, family: MambaKeys, layers: int) -> list[int]:
    attending: Any = (keys.raw.get(family.attending) or []) if family.attending else []
    if not isinstance(attending, list) or not all(type(i) is int and 0 <= i < layers for i in attending):
        raise keys.error(family.attending, f"a list of layers, from 0 to {layers - 1}")
    return attending


def _check(keys: Keys, name: str, d: int, taps: int, taps_key: str) -> None:
    if d > WIDEST:
        raise keys.error(name, f"at most {WIDEST}")
    if taps & (taps - 1):
        raise keys.error(taps_key, "a power of two")


def _limits(keys: Keys) -> tuple[float, float]:
    """time_step_limit: (least, most step), 0 where there is none. transformers writes infinity as an object."""
    name = "time_step_limit"
    limits = keys.raw.get(name, [0.0, math.inf])
    unbounded = lambda value: value in ("Infinity", math.inf, {"__float__": "Infinity"})
    if not isinstance(limits, list) or len(limits) != 2 or limits[0] != 0 and not is_number(limits[0]):
        raise keys.error(name, "[least, most]")
    low, high = float(limits[0]), 0.0 if unbounded(limits[1]) else limits[1]
    if not unbounded(limits[1]) and not (is_number(high) and high > low):
        raise keys.error(name, "[least, most]")
    return low, float(high)


def _layers(
    keys: Keys, name: str, layers: int, default: list[str], override: str = "", kinds: tuple[str, ...] = (FULL, LINEAR)
) -> list[bool]:
    """Whether each layer has a recurrence, by the key `name`; by `default` if null or absent, or with `override`."""
    types: Any = None if override else keys.raw.get(name)
    kinds = tuple(LETTERS.values()) if name == BLOCK_TYPES else kinds
    if types is None:
        types = default
    elif isinstance(types, list):
        types = [OLDER.get(t, t) if isinstance(t, str) else t for t in types]
    if not isinstance(types, list) or len(types) != layers or not all(t in kinds for t in types):
        raise keys.error(name, f"a list of {layers} names, each {' or '.join(kinds)}")
    return [kind == LINEAR for kind in types]


def block_types(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """config.json with BLOCK_TYPES in today's names, and their number, where layers are a mixer or an MLP.

    Raises InputError.
    """
    keys, count_key = Keys(raw, source), "num_hidden_layers"
    types: Any = raw.get(BLOCK_TYPES)
    if types is None and isinstance(pattern := raw.get(PATTERN), str):
        if unknown := set(pattern) - set(LETTERS):
            raise keys.error(PATTERN, f"letters of {''.join(LETTERS)}, not {min(unknown)}")
        types = [LETTERS[letter] for letter in pattern]
    if not isinstance(types, list) or not types or not all(isinstance(t, str) for t in types):
        raise keys.error(BLOCK_TYPES if PATTERN not in raw else PATTERN, "the kind of each layer")
    if raw.get(count_key) not in (None, len(types)):
        raise keys.error(count_key, f"{len(types)}, as {BLOCK_TYPES} or {PATTERN} has them")
    types, kinds = [OLDER.get(t, t) for t in types], tuple(LETTERS.values())
    if not all(t in kinds for t in types):
        raise keys.error(BLOCK_TYPES, f"a list of names, each {' or '.join(kinds)}")
    return raw | {BLOCK_TYPES: types, count_key: len(types)}

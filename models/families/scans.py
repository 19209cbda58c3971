"""Layers whose mixer is a linear recurrence (gated delta networks, Mamba2), as config.json describes them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme.models.families.keys import InputError, Keys

FULL, LINEAR = "full_attention", "linear_attention"  # in layer_types


@dataclass(frozen=True)
class Scan:
    """A layer's recurrence: states (key_dim, value_dim) of `heads`; head j has keys of j // (heads / key_heads)."""

    layers: tuple[int, ...]
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def mixed_width(self) -> int:
        """Of what the layer's input is projected to: channels, gate, two numbers a head."""
        return self.channels + self.value_width + 2 * self.heads


@dataclass(frozen=True)
class ScanKeys:
    """A family's layers with a recurrence, with transformers' defaults."""

    interval: int = 4  # default of full_attention_interval: every so many layers one with attention
    defaults: dict[str, int] = field(
        default_factory=lambda: dict(
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
        )
    )


WIDEST = 256  # of a head: a state is in registers
MEANT = {  # keys that change the mathematics -> accepted values
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "silu", "swish"),
    "mamba_ssm_dtype": (None, "float32"),
}


def parse_scan(keys: Keys, family: ScanKeys | None, layers: int) -> Scan | None:
    """Raises InputError. None where no layer has a recurrence."""
    if family is None:
        return None
    for name, accepted in MEANT.items():
        keys.refuse_unless(name, accepted)
    found = {name: keys.count(name, default) for name, default in family.defaults.items()}
    key_heads, heads, key_dim, value_dim, taps = found.values()
    if heads % key_heads:
        raise keys.error("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if found[name] > WIDEST:
            raise keys.error(name, f"at most {WIDEST}")
    if taps & (taps - 1):
        raise keys.error("linear_conv_kernel_dim", "a power of two")
    return Scan(_layers(keys, family, layers), key_heads, heads, key_dim, value_dim, taps)


def _layers(keys: Keys, family: ScanKeys, layers: int) -> tuple[int, ...]:
    types = keys.raw.get("layer_types")
    if types is None:
        step = keys.count("full_attention_interval", family.interval, null=family.interval)
        types = [LINEAR if (i + 1) % step else FULL for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(t in (FULL, LINEAR) for t in types):
        raise keys.error("layer_types", f"a list of {layers} names, each {FULL} or {LINEAR}")
    if all(t == LINEAR for t in types):
        raise InputError(f'{keys.where}: "layer_types" has no layer of {FULL}: there must be one.')
    return tuple(i for i, kind in enumerate(types) if kind == LINEAR)

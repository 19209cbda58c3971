"""What a Hugging Face config.json says, checked and reduced to the numbers that the blocks need. No torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.models import names
from trireme.models.names import Names
from trireme.storage.untrusted import read_small

LARGEST = 1 << 20  # bytes of a config.json
SUPPORTED = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # three names for one formula

# Keys of other architectures that change the mathematics; a value outside the tuple is refused by name.
INERT = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "quantization_config": (None,),
    "add_cross_attention": (None, False),
}


class InputError(ValueError):
    """The user's input is wrong: one line that says what, where, and what to do. Exit code 2."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. The factors are used by `linear` (factor) and `llama3` (all four)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only Transformer. Dropout is not part of it: fine-tuning here runs without."""

    model_type: str
    vocab: int
    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int
    eps: float
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: Rope | None = None  # None: learned positions
    window: int = 0  # sliding attention window in tokens, the token itself included; 0: none
    window_from: int = 0  # the first layer that has the window
    scale_attn: bool = True  # scores times head_dim ** -0.5
    scale_attn_by_layer: bool = False  # scores also divided by the layer's number, counted from 1
    halves: bool = False  # units are halves of blocks, attention and MLP: said by a plan, never by config.json

    @property
    def names(self) -> Names:
        """Names of the tensors in a checkpoint."""
        return names.GPT2 if self.model_type == "gpt2" else names.LLAMA

    @property
    def layer_norm(self) -> bool:
        """Norms are LayerNorms with a bias, not RMSNorms."""
        return self.model_type == "gpt2"

    @property
    def gated(self) -> bool:
        """The MLP is a gated linear unit; otherwise a GELU between two products."""
        return self.model_type != "gpt2"

    @property
    def n_units(self) -> int:
        return self.n_layers * (2 if self.halves else 1) + 2

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width

    def layer_window(self, layer: int) -> int:
        """The attention window of a layer, 0 for full attention."""
        return self.window if layer >= self.window_from else 0

    def layer_scale(self, layer: int) -> float:
        """What attention scores of a layer are multiplied by."""
        scale = self.head_dim**-0.5 if self.scale_attn else 1.0
        return scale / (layer + 1) if self.scale_attn_by_layer else scale


def read_config(folder: str | Path) -> ModelConfig:
    """ModelConfig of the checkpoint in `folder`. InputError where config.json is missing, malformed or unsupported."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(read_small(path, LARGEST, links=True).decode())
    except FileNotFoundError:
        raise InputError(f"{path} is missing. Give the folder of a Hugging Face checkpoint.") from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is not JSON ({e}). Download it again.") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds a {type(raw).__name__}, expected an object.")
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """ModelConfig of a decoded config.json; `where` names it in errors."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise InputError(f'model_type "{model_type}" is not supported ({where}). Supported: {", ".join(SUPPORTED)}.')
    keys = _Keys(raw, where)
    for name, accepted in INERT.items():
        keys.refuse_unless(name, accepted)
    return _gpt2(keys) if model_type == "gpt2" else _llama(keys, model_type)


class _Keys:
    """Typed look-ups in a config; every complaint names the key, its value and the file."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where = raw, where

    def error(self, name: str, expected: str) -> InputError:
        return InputError(f'{self.where}: "{name}" is {json.dumps(self.raw.get(name))}, expected {expected}.')

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer. An absent or null key takes the default, and is an error where there is none."""
        value = self.raw.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.error(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.raw.get(name)
        value = default if value is None else value
        if (
            not isinstance(value, (int, float)) or type(value) is bool or not 0 < value <= sys.float_info.max
        ):  # an integer may be larger
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def refuse_unless(self, name: str, accepted: tuple[Any, ...], default: Any = None) -> None:
        value = self.raw.get(name, default)
        if value not in accepted:
            shown = json.dumps(value)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise InputError(f'{self.where}: "{name}": {shown} is not supported. Supported: {_listing(accepted)}.')


def _listing(values: tuple[Any, ...]) -> str:
    return ", ".join("absent" if v is None else json.dumps(v) for v in dict.fromkeys(values))


def _gpt2(keys: _Keys) -> ModelConfig:
    keys.refuse_unless("activation_function", GELU_TANH, "gelu_new")
    width, heads = keys.count("n_embd"), keys.count("n_head")
    if width % heads:
        raise keys.error("n_head", f"a divisor of n_embd = {width}")
    return ModelConfig(
        model_type="gpt2",
        vocab=keys.count("vocab_size"),
        width=width,
        n_layers=keys.count("n_layer"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=width // heads,
        ffn=keys.count("n_inner", 4 * width),
        max_positions=keys.count("n_positions", 1024),
        eps=keys.number("layer_norm_epsilon", 1e-5),
        tied=keys.flag("tie_word_embeddings", True),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        scale_attn=keys.flag("scale_attn_weights", True),
        scale_attn_by_layer=keys.flag("scale_attn_by_inverse_layer_idx", False),
    )


def _llama(keys: _Keys, model_type: str) -> ModelConfig:
    """The LLaMA family. Where a key is absent, the default is that of the architecture's class in transformers."""
    keys.refuse_unless("hidden_act", ("silu", "swish"), "silu")
    width, heads, layers = keys.count("hidden_size"), keys.count("num_attention_heads"), keys.count("num_hidden_layers")
    kv_heads = keys.count("num_key_value_heads", {"llama": heads, "mistral": 8}.get(model_type, 32))
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = keys.count("head_dim", 128 if model_type == "qwen3" else width // heads)
    if head_dim % 2:
        raise InputError(f"{keys.where}: heads of {head_dim} cannot be rotated; head_dim must be even.")
    max_positions = keys.count("max_position_embeddings", {"llama": 2048, "mistral": 131072}.get(model_type, 32768))
    attention_bias = model_type in ("llama", "qwen3") and keys.flag("attention_bias", False)
    window, window_from = _window(keys, model_type, layers)
    return ModelConfig(
        model_type=model_type,
        vocab=keys.count("vocab_size"),
        width=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=keys.count("intermediate_size"),
        max_positions=max_positions,
        eps=keys.number("rms_norm_eps", 1e-6),
        tied=keys.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=model_type == "llama" and keys.flag("mlp_bias", False),
        qk_norm=model_type == "qwen3",
        rope=_rope(keys, max_positions),
        window=window,
        window_from=window_from,
    )


def _window(keys: _Keys, model_type: str, layers: int) -> tuple[int, int]:
    """(tokens, first layer that has it) of the sliding window, (0, 0) where there is none."""
    window = 0 if keys.raw.get("sliding_window", 4096) is None else keys.count("sliding_window", 4096)
    if model_type == "mistral":
        return window, 0
    if model_type == "llama" or not keys.flag("use_sliding_window", False):
        window = 0
    first = keys.raw.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise keys.error("max_window_layers", "an integer >= 0")
    first = min(first, layers) if window else layers
    types = keys.raw.get("layer_types")
    wanted = lambda: ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    if types is not None and not (isinstance(types, list) and len(types) == layers and types == wanted()):
        raise InputError(
            f'{keys.where}: "layer_types" must be full_attention in the first {first} layers and sliding_attention in '
            "the others, as use_sliding_window and max_window_layers say; other patterns are not supported."
        )
    return (window, first) if first < layers else (0, 0)


def _rope(keys: _Keys, max_positions: int) -> Rope:
    """Rope from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    name = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
    params = keys.raw.get(name) or {}
    if not isinstance(params, dict):
        raise keys.error(name, "an object or null")
    inner = _Keys(params, f"{keys.where}: {name}")
    kind = inner.raw.get("rope_type", inner.raw.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise InputError(f'{inner.where}: rope type "{kind}" is not supported. Supported: {", ".join(ROPE_TYPES)}.')
    inner.refuse_unless("partial_rotary_factor", INERT["partial_rotary_factor"])
    nested = [key for key, value in inner.raw.items() if isinstance(value, dict)]
    if nested:
        raise InputError(f'{inner.where}: one set of parameters per layer type ("{nested[0]}") is not supported.')
    theta = inner.number("rope_theta", keys.number("rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, inner.number("factor"))
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if not low < high:
        raise inner.error("high_freq_factor", f"a number above low_freq_factor = {low}")
    inner_original = inner.count("original_max_position_embeddings", max_positions)
    original = keys.count("original_max_position_embeddings", inner_original)
    return Rope(theta, kind, inner.number("factor"), low, high, original)

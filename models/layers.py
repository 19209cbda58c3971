"""What each layer computes, as records made once by its family (families/fields.py). No torch.

A layer is some mixers of one input, whose results are added, then some MLPs, whose results are added. A unit of the
engine is a layer, or one half of it: a Layer without MLPs, or without mixers. No other code asks which layer is what.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from trireme.models.families.experts import Act, Experts
from trireme.models.families.latent import Latent
from trireme.models.families.names import MixerNames, MlpNames
from trireme.models.families.rope import Rope
from trireme.models.families.scans import Scan


def hash_once(record: Any) -> int:
    """The hash of a frozen dataclass, computed once: of what is a key of caches."""
    values = vars(record)
    if "_hash" not in values:
        values["_hash"] = hash(tuple(getattr(record, field.name) for field in fields(record)))
    return int(values["_hash"])


@dataclass(frozen=True)
class Attention:
    """A mixer: causal attention of query heads over key/value heads."""

    heads: int
    kv_heads: int
    dim: int  # of a head's query and key
    scale: float  # of scores
    rope: Rope | None = None  # None: queries and keys are not rotated
    window: int = 0  # tokens attended to, itself included; 0: all
    cap: float = 0.0  # scores s are cap * tanh(s / cap); 0: s
    norm: Literal["", "head", "width", "bare"] = ""  # of queries and keys: per head, over all, per head without weights
    rope_first: bool = False  # they are rotated before their norms
    bias: bool = False
    o_bias: bool = False
    gate: Literal["", "queries", "values", "heads"] = ""  # of the result: after each query, or by a matrix of its own
    gate_act: Literal["sigmoid", "softplus"] = "sigmoid"  # by which the result is multiplied
    latent: Latent | None = None  # heads are computed from latents
    factor: float = 1.0  # of what is added to the residual
    values: Literal["own", "normed", "keys"] = "own"  # normed: by a norm without weights; keys: raw keys, so normed
    value: int = 0  # of a head's value; 0: dim

    @property
    def value_dim(self) -> int:
        return self.latent.value if self.latent else self.value or self.dim

    @property
    def q_width(self) -> int:
        return self.heads * self.dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.dim

    @property
    def out_width(self) -> int:
        """Features of the result, before the output projection."""
        return self.heads * self.value_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """Features of each matrix of the first matmul: queries, keys, values, gate; or of latents."""
        if self.latent:
            return self.latent.q_rank or self.q_width, self.latent.kv_rank + self.latent.rope
        queries = self.q_width * (1 + (self.gate == "queries"))
        values = () if self.values == "keys" else (self.kv_heads * self.value_dim,)
        gate = {"values": (self.out_width,), "heads": (self.heads,)}.get(self.gate, ())
        return queries, self.kv_width, *values, *gate

    @property
    def qkv_width(self) -> int:
        """Features of the result of the first matmul."""
        return sum(self.parts)

    @property
    def rotated_first(self) -> bool:
        """Whether q and k are rotated right after their projection: they have no norms, or norms after the rotation."""
        return not self.norm or self.rope_first


@dataclass(frozen=True)
class Mlp:
    """Two linear layers with an activation between."""

    width: int
    act: Act = "silu"
    gated: bool = True  # act(gate) * up
    bias: bool = False
    gate_scale: float = 1.0  # of the gate, before its activation
    factor: float = 1.0  # of what is added to the residual
    shared: bool = False  # it is the expert of a mixture that processes every token

    @property
    def first_bias(self) -> bool:
        """Whether the bias of the first linear layer is added by its matmul, not by the activation's kernel."""
        return self.bias and (self.gated or self.act == "relu2")


def shared_of(spec: Experts) -> Mlp | None:
    """The expert of a mixture that processes every token; None if there is none."""
    return Mlp(spec.shared, spec.act, spec.gated, factor=spec.factor, shared=True) if spec.shared else None


@dataclass(frozen=True)
class Layer:
    """One layer, or half of one."""

    width: int
    eps: float
    mixers: tuple[Attention | Scan, ...] = ()
    mlps: tuple[Mlp | Experts, ...] = ()
    mixer_names: MixerNames = MixerNames()
    mlp_names: MlpNames = MlpNames()
    norm: Literal["rms", "rms + 1", "layer"] = "rms"
    parallel: bool = False  # mixers and MLPs read one input
    entry: bool = False  # its input, also the residual, is that of the model, by a norm without weights
    own_post_eps: float = 0.0  # of norms behind mixers and MLPs; 0: eps
    in_out: bool = False  # matrices are stored (in, out), not (out, in)

    __hash__ = hash_once  # counts and layouts are kept by layer

    @cached_property
    def attention(self) -> Attention | None:
        return next((m for m in self.mixers if isinstance(m, Attention)), None)

    @cached_property
    def scan(self) -> Scan | None:
        return next((m for m in self.mixers if isinstance(m, Scan)), None)

    @cached_property
    def mlp(self) -> Mlp | None:
        return next((m for m in self.mlps if isinstance(m, Mlp)), None)

    @cached_property
    def experts(self) -> Experts | None:
        return next((m for m in self.mlps if isinstance(m, Experts)), None)

    @property
    def post_eps(self) -> float:
        """Of norms behind mixers and MLPs."""
        return self.own_post_eps or self.eps

    @property
    def indivisible(self) -> bool:
        """Whether it cannot be divided into two sub-layers."""
        return self.parallel or not (self.mixers and self.mlps)

    @property
    def role(self) -> Literal["block", "attention", "mlp"]:
        """Its part of a block; "attention" is any mixer."""
        return "block" if self.mixers and self.mlps else "attention" if self.mixers else "mlp"

    @cached_property
    def mixing(self) -> Layer:
        """Its first half."""
        return replace(self, mlps=(), mlp_names=MlpNames())

    @cached_property
    def feeding(self) -> Layer:
        """Its second half."""
        return replace(self, mixers=(), mixer_names=MixerNames(), entry=False)

    @cached_property
    def form(self) -> Layer:
        """It without what changes no shape: layers of one form have the same layout, sizes and saved tensors."""
        plain = lambda m: replace(m, rope=None, window=0, scale=1.0) if isinstance(m, Attention) else m
        return replace(self, mixers=tuple(map(plain, self.mixers)))

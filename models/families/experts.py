"""Mixtures of experts, as config.json describes them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.models.families.keys import InputError, Keys


@dataclass(frozen=True)
class Experts:
    """In place of each MLP."""

    count: int
    chosen: int  # for each token
    width: int  # hidden width of each
    renormalise: bool  # weights divided by their sum
    shared: int = 0  # hidden width of one that every token takes; 0: none
    shared_gate: bool = False  # times a sigmoid of the token
    limit: float = 0.0  # of a clamped SwiGLU over interleaved gate and up; 0: a plain one
    bias: bool = False  # of router and experts
    aux: float = 0.0  # router_aux_loss_coef, in force only where a run asks for it


@dataclass(frozen=True)
class ExpertKeys:
    """Where a family's config.json says it; defaults are those of transformers."""

    count: int
    chosen: int
    width: int | None
    width_key: str = "moe_intermediate_size"
    renormalise: bool | None = None  # None: norm_topk_prob
    shared: int = 0  # shared_expert_intermediate_size, with a gate; 0: none
    limit: float = 0.0  # swiglu_limit; 0: none
    bias: bool = False


REFUSED = {  # key -> accepted values
    "decoder_sparse_step": (None, 1),
    "router_jitter_noise": (None, 0, 0.0),
    "use_sliding_window": (None, False),
    "moe_latent_size": (None,),
    "swiglu_alpha": (None, 1.702),
}


def parse_experts(keys: Keys, family: ExpertKeys | None) -> Experts | None:
    """Raises InputError."""
    if family is None:
        return None
    for name, accepted in REFUSED.items():
        keys.refuse_unless(name, accepted)
    if keys.raw.get("mlp_only_layers"):
        raise keys.error("mlp_only_layers", "none: a dense layer among those of experts is not supported")
    counted = "num_experts" if "num_experts" in keys.raw else "num_local_experts"
    count, chosen = keys.count(counted, family.count), keys.count("num_experts_per_tok", family.chosen)
    if chosen > count:
        raise InputError(f'{keys.where}: "num_experts_per_tok" is {chosen}, more than the {count} of "{counted}".')
    renormalise = keys.flag("norm_topk_prob", False) if family.renormalise is None else family.renormalise
    width = keys.count(family.width_key, family.width)
    shared = keys.count("shared_expert_intermediate_size", family.shared) if family.shared else 0
    aux = 0.0 if keys.raw.get("router_aux_loss_coef") in (None, 0) else keys.number("router_aux_loss_coef")
    limit = keys.number("swiglu_limit", family.limit) if family.limit else 0.0
    return Experts(count, chosen, width, renormalise, shared, bool(shared), limit, family.bias, aux)

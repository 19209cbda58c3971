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
    sigmoid: bool = False  # scores: chosen by their sum with a frozen correction, in fp32
    scale: float = 1.0  # of the weights
    dense: tuple[int, ...] = ()  # layers with an MLP of their own instead
    packed: bool = False  # matrices are MXFP4 in files; frozen ones stay so up to the GPU


@dataclass(frozen=True)
class ExpertKeys:
    """Where a family's config.json says it; defaults are those of transformers."""

    count: int
    chosen: int
    width: int | None
    count_key: str = "num_experts"
    width_key: str = "moe_intermediate_size"
    renormalise: bool | None = None  # None: norm_topk_prob
    normalised: bool = False  # default of norm_topk_prob
    shared: int = 0  # shared_expert_intermediate_size, with a gate; 0: none
    beside: int = 0  # n_shared_experts, of the width of the others, without a gate; 0: none
    sigmoid: bool = False
    leading: int = 0  # first_k_dense_replace; 0: not read
    among: bool = False  # dense layers by decoder_sparse_step and mlp_only_layers
    limit: float = 0.0  # swiglu_limit; 0: none
    bias: bool = False


REFUSED = {  # key -> accepted values
    "router_jitter_noise": (None, 0, 0.0),
    "use_sliding_window": (None, False),
    "moe_latent_size": (None,),
    "swiglu_alpha": (None, 1.702),
    "n_group": (None, 1),
    "topk_group": (None, 1),
}
MOST = 1 << 18  # experts of all layers


def parse_experts(keys: Keys, family: ExpertKeys | None, layers: int, packed: bool = False) -> Experts | None:
    """Raises InputError."""
    if family is None:
        return None
    for name, accepted in REFUSED.items():
        keys.refuse_unless(name, accepted)
    counted = family.count_key
    count, chosen = keys.count(counted, family.count), keys.count("num_experts_per_tok", family.chosen)
    if layers * count > MOST:
        raise keys.error(counted, f"at most {MOST // layers:,} in each of {layers:,} layers")
    if chosen > count:
        raise InputError(f'{keys.where}: "num_experts_per_tok" is {chosen}, more than the {count} of "{counted}".')
    renormalise = family.renormalise
    if renormalise is None:
        renormalise = keys.flag("norm_topk_prob", family.normalised)
    width = keys.count(family.width_key, family.width)
    gated = keys.count("shared_expert_intermediate_size", family.shared) if family.shared else 0
    shared = width * keys.count("n_shared_experts", family.beside) if family.beside else gated
    aux = 0.0 if keys.raw.get("router_aux_loss_coef") in (None, 0) else keys.number("router_aux_loss_coef")
    limit = keys.number("swiglu_limit", family.limit) if family.limit else 0.0
    scale = keys.number("routed_scaling_factor", 1.0) if family.sigmoid else 1.0
    dense = _dense_layers(keys, family, layers)
    bias, sigmoid = family.bias, family.sigmoid
    return Experts(
        count, chosen, width, renormalise, shared, bool(gated), limit, bias, aux, sigmoid, scale, dense, packed
    )


def _dense_layers(keys: Keys, family: ExpertKeys, layers: int) -> tuple[int, ...]:
    if family.leading:
        first = keys.raw.get("first_k_dense_replace", family.leading)
        if type(first) is not int or not 0 <= first < layers:
            raise keys.error("first_k_dense_replace", f"an integer from 0 to {layers - 1}")
        return tuple(range(first))
    if not family.among:
        return ()
    step, listed = keys.count("decoder_sparse_step", 1), keys.raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        raise keys.error("mlp_only_layers", "a list of layers")
    dense = tuple(i for i in range(layers) if (i + 1) % step or i in set(listed))
    if len(dense) == layers:
        raise InputError(f'{keys.where}: "decoder_sparse_step" and "mlp_only_layers" leave no layer with experts.')
    return dense

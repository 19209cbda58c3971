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


@dataclass(frozen=True)
class ExpertKeys:
    """Where a family's config.json says it; defaults are those of transformers."""

    count: int
    chosen: int
    width: int | None
    width_key: str = "moe_intermediate_size"
    renormalise: bool | None = None  # None: norm_topk_prob


REFUSED = {  # key -> accepted values
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "router_jitter_noise": (None, 0, 0.0),
    "use_sliding_window": (None, False),
    "moe_latent_size": (None,),
}


def parse_experts(keys: Keys, family: ExpertKeys | None) -> Experts | None:
    """Raises InputError."""
    if family is None:
        return None
    for name, accepted in REFUSED.items():
        keys.refuse_unless(name, accepted)
    counted = "num_experts" if "num_experts" in keys.raw else "num_local_experts"
    count, chosen = keys.count(counted, family.count), keys.count("num_experts_per_tok", family.chosen)
    if chosen > count:
        raise InputError(f'{keys.where}: "num_experts_per_tok" is {chosen}, more than the {count} of "{counted}".')
    renormalise = keys.flag("norm_topk_prob", False) if family.renormalise is None else family.renormalise
    return Experts(count, chosen, keys.count(family.width_key, family.width), renormalise)

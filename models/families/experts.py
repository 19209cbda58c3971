"""Mixtures of experts, as config.json describes them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trireme.models.families.keys import InputError, Keys
from trireme.models.families.scans import BLOCK_TYPES, EXPERTS

Act = Literal["silu", "gelu", "exact gelu", "relu2"]  # gelu: by tanh


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, in place of an MLP."""

    count: int
    chosen: int  # experts of a token
    width: int  # hidden width of an expert
    renormalise: bool  # the weights of a token's experts are divided by their sum
    shared: int = 0  # hidden width of an expert that processes every token; 0: none
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a gate
    limit: float = 0.0  # limit of a clamped SwiGLU over interleaved gate and up; 0: plain SwiGLU
    bias: bool = False  # router and experts have biases
    aux: float = 0.0  # router_aux_loss_coef, used only if a run asks for it
    sigmoid: bool = False  # scores are sigmoids in fp32; experts are selected by score plus a frozen correction
    scale: float = 1.0  # factor of the weights
    fp32: bool = False  # the router's matrix multiplication is in fp32, as always with a correction
    groups: int = 1  # number of groups of experts
    kept: int = 1  # number of groups, the best of a token, from which its experts are selected
    two: bool = True  # a group's score is the sum of its two best experts' scores, not the best score
    raw: bool = False  # the correction is added to logits, not to scores
    latent: int = 0  # width of the experts' input and output; 0: the model's
    score_scale: float = 1.0  # of the router's logits
    act: Act = "silu"
    gated: bool = True  # act(gate) * up
    factor: float = 1.0  # of what is added to the residual


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of a family's config.json, and defaults of transformers; None: config.json must have the value."""

    count: int | None
    chosen: int | None
    width: int | None
    count_key: str = "num_experts"
    width_key: str = "moe_intermediate_size"
    chosen_key: str = "num_experts_per_tok"
    renormalise: bool | None = None  # None: norm_topk_prob
    normalised: bool = False  # default of norm_topk_prob
    shared: int = 0  # shared_expert_intermediate_size: a shared expert with a gate; 0: none
    shared_count: int | None = None  # shared experts without a gate, each as wide as the others
    shared_count_key: str = ""  # "": none
    shared_width: int | None = None  # width of one shared expert without a gate
    shared_width_key: str = ""  # "": none
    sigmoid: bool = False
    scale: float = 1.0
    scale_key: str = ""  # "": 1
    scale_null: bool = False  # null is the default
    leading: int | None = None  # layers at the beginning that are dense; None: not read
    leading_key: str = "first_k_dense_replace"  # "": none
    by_layer_types: bool = False  # mlp_layer_types comes first
    among: bool = False  # dense layers by decoder_sparse_step and mlp_only_layers
    dense: tuple[int, ...] = ()  # default of mlp_only_layers
    spaced: bool = False  # by moe_layer_start_index, moe_layer_end_index and moe_layer_interval
    limit: float = 0.0  # swiglu_limit; 0: none
    bias: bool = False
    fp32: bool = False
    groups: tuple[int, int] | None = None  # n_group, topk_group; None: not read
    raw: bool = False  # the correction is added to logits, not to scores
    method: bool = False  # topk_method is read: greedy, or by a group's best score
    optional: bool = False  # with a count of 0 every layer has an MLP
    latent_key: str = ""  # width of the experts' input and output; null: the model's
    typed: bool = False  # layers with experts by layers_block_type
    layered: tuple[tuple[str, int | None], ...] = ()  # keys, and their only value in all layers; None: the width


REFUSED = {  # key -> accepted values
    "router_jitter_noise": (None, 0, 0.0),
    "use_sliding_window": (None, False),
    "swiglu_alpha": (None, 1.702),
}
UNGROUPED = {"n_group": (None, False, 1), "topk_group": (None, False, 1)}
MOST = 1 << 18  # experts of all layers


def parse_experts(keys: Keys, family: ExpertKeys | None, layers: int) -> list[Experts | None]:
    """The Experts of each layer; None for one with a plain MLP. Raises InputError."""
    none: list[Experts | None] = [None] * layers
    if family is None or family.optional and keys.raw.get(family.count_key) == 0:
        return none
    if family.typed and EXPERTS not in keys.raw[BLOCK_TYPES]:
        return none
    if not family.latent_key:
        keys.refuse_unless("moe_latent_size", (None,))
    keys.only(REFUSED if family.groups else REFUSED | UNGROUPED)
    count_key = family.count_key
    for name in (count_key, family.chosen_key):
        keys = _uniform(keys, name, layers)
    count, chosen = keys.count(count_key, family.count), keys.count(family.chosen_key, family.chosen)
    if layers * count > MOST:
        raise keys.error(count_key, f"at most {MOST // layers:,} in each of {layers:,} layers")
    if chosen > count:
        raise InputError(f'{keys.source}: "{family.chosen_key}" is {chosen}, more than the {count} of "{count_key}".')
    renormalise = family.renormalise
    if renormalise is None:
        renormalise = keys.flag("norm_topk_prob", family.normalised)
    width = keys.count(family.width_key, family.width)
    for name, number in family.layered:
        expected = width if number is None else number
        if _uniform(keys, name, layers).raw.get(name) not in (None, expected):
            raise keys.error(name, f"{expected} in all layers")
    gated = keys.count("shared_expert_intermediate_size", family.shared) if family.shared else 0
    shared = gated
    if family.shared_count_key:
        shared = width * keys.count(family.shared_count_key, family.shared_count)
    if family.shared_width_key:
        shared = keys.count(family.shared_width_key, family.shared_width)
    aux = 0.0 if keys.raw.get("router_aux_loss_coef") in (None, 0) else keys.number("router_aux_loss_coef")
    limit = keys.number("swiglu_limit", family.limit) if family.limit else 0.0
    null = family.scale if family.scale_null else None
    scale = keys.number(family.scale_key, family.scale, null) if family.scale_key else 1.0
    dense = _dense_layers(keys, family, layers)
    latent = keys.count(family.latent_key) if keys.raw.get(family.latent_key) is not None else 0
    experts = Experts(
        count, chosen, width, renormalise, shared, bool(gated), limit, family.bias, aux, family.sigmoid, scale,
        family.fp32, *_groups(keys, family, count, chosen), raw=family.raw, latent=latent,
    )  # fmt: skip
    return [None if i in dense else experts for i in range(layers)]


def _uniform(keys: Keys, name: str, layers: int) -> Keys:
    """`keys` with one number instead of a list of equal numbers, one for each layer."""
    values = keys.raw.get(name)
    if not isinstance(values, list):
        return keys
    if len(values) != layers or any(n != values[0] for n in values):
        raise keys.error(name, f"a number, or {layers} times the same")
    return Keys(keys.raw | {name: values[0]}, keys.source)


def _groups(keys: Keys, family: ExpertKeys, count: int, chosen: int) -> tuple[int, int, bool]:
    """(groups, how many are kept, whether a group is rated by its two best experts)."""
    if family.groups is None:
        return 1, 1, True
    if family.method:
        keys.refuse_unless("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        if keys.raw.get("topk_method", "greedy") == "greedy":
            return 1, 1, True
    groups, selected = keys.count("n_group", family.groups[0]), keys.count("topk_group", family.groups[1])
    minimum = 1 if family.method or groups == 1 else 2
    if count % groups or count // groups < minimum:
        raise keys.error("n_group", f"a divisor of {count}, with {minimum} experts or more in each group")
    if selected > groups or selected * (count // groups) < chosen:
        raise keys.error("topk_group", f"at most {groups}, with at least {chosen} experts in the groups")
    return (groups, selected, not family.method) if groups > 1 else (1, 1, True)


def _dense_layers(keys: Keys, family: ExpertKeys, layers: int) -> tuple[int, ...]:
    """The layers with a plain MLP instead of experts."""
    if family.typed:
        return tuple(i for i, kind in enumerate(keys.raw[BLOCK_TYPES]) if kind != EXPERTS)
    if family.by_layer_types and keys.raw.get("mlp_layer_types") is not None:
        return _listed(keys, layers)
    if family.leading is not None:
        first = keys.raw.get(family.leading_key, family.leading)
        if type(first) is not int or first < 0:
            raise keys.error(family.leading_key, "an integer of 0 or more")
        return tuple(range(first))
    if family.among:
        return _among(keys, family, layers)
    return _spaced(keys, layers) if family.spaced else ()


def _listed(keys: Keys, layers: int) -> tuple[int, ...]:
    types = keys.raw["mlp_layer_types"]
    if not isinstance(types, list) or len(types) != layers or any(t not in ("dense", "sparse") for t in types):
        raise keys.error("mlp_layer_types", f"a list of {layers} names, each dense or sparse")
    return tuple(i for i, kind in enumerate(types) if kind == "dense")


def _among(keys: Keys, family: ExpertKeys, layers: int) -> tuple[int, ...]:
    step, layer_list = keys.count("decoder_sparse_step", 1), keys.raw.get("mlp_only_layers")
    layer_list = [*family.dense] if layer_list is None else layer_list
    if not isinstance(layer_list, list) or any(type(i) is not int for i in layer_list):
        raise keys.error("mlp_only_layers", "a list of layers")
    return tuple(i for i in range(layers) if (i + 1) % step or i in set(layer_list))


def _spaced(keys: Keys, layers: int) -> tuple[int, ...]:
    first, last = keys.raw.get("moe_layer_start_index", 1), keys.raw.get("moe_layer_end_index", -1)
    for name, value in (("moe_layer_start_index", first), ("moe_layer_end_index", last)):
        if type(value) is not int:
            raise keys.error(name, "an integer")
    step, last = keys.count("moe_layer_interval", 1), layers - 1 if last == -1 else last
    return tuple(i for i in range(layers) if (i + 1) % step or not first <= i <= last)

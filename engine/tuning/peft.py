"""Reads an adapter in peft's format. The tensors of the file say which modules have adapters, and their ranks;
adapter_config.json is read for what changes numbers alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trireme.engine.tuning import adapters, peft_config
from trireme.engine.tuning.adapters import WEIGHTS, Adapter, Halves
from trireme.engine.tuning.chosen import adaptable, adapted
from trireme.engine.tuning.peft_config import CONFIG
from trireme.engine.tuning.spellings import PREFIX, SINGLE, Spelling, by_expert, short, spelled
from trireme.models.config import InputError, Lora, ModelConfig, scored
from trireme.models.hf import WRAPPERS
from trireme.models.sizes import shapes
from trireme.models.sizes.shapes import DOWN, GATE_UP
from trireme.storage.checkpoint import Source, SourceTensor
from trireme.storage.headers import read_header
from trireme.storage.untrusted import quoted, shown

HEAD = "score.weight"
Shape = tuple[int, ...]
COPIES = (".modules_to_save.", ".original_module.")  # parts of names of copies that peft writes after a resize


class AdapterPlace(NamedTuple):
    """A matrix that may have an adapter, or the same matrix of all experts of a layer."""

    module: str
    target: str  # of Lora; "": can only be merged
    stored: Mapping[str, Shape]  # peft's names of A and B, without prefix -> shapes for a rank of 1


class Pair(NamedTuple):
    """The adapter of a place."""

    place: AdapterPlace
    rank: int
    alpha: float  # the adapter is scaled by alpha / rank


def read_adapter(folder: Path, cfg: ModelConfig, merging: bool = False) -> Adapter:
    """Opens the adapter in `folder`. What `cfg` trains does not matter. `merging`: accept also what cannot be trained.

    Raises InputError for another format, kind or base.
    """
    config, source = peft_config.read_adapter_config(folder), open_adapter(folder)
    peft_config.check_config(folder / CONFIG, config)
    names, spelling = spelled(cfg, source.tensors, str(folder / WEIGHTS))
    stored = dict(names)  # name by transformers' modules without prefix -> name in the file
    if len(stored) < len(names):
        raise InputError(f"{folder / WEIGHTS} has a tensor twice, such as with {PREFIX} before its name, and without.")
    copies = {name for name in stored for copy in COPIES if copy in name and name.replace(copy, ".") in stored}
    sizes = {name: source.tensors[inside].shape for name, inside in stored.items() if name not in copies}
    base, cfg = cfg, _resized(folder, _untied(cfg, source, stored, sizes), sizes)
    whole, pairs = _replaced(folder, base, cfg, sizes), dict[str, Pair]()
    left = sizes.keys() - set(whole.values())
    for place in adapter_places(cfg, config, any(map(SINGLE.search, sizes))):
        if place.stored.keys() & sizes.keys():
            pairs[place.module] = _pair(folder, cfg, config, spelling, place, sizes)
            left -= place.stored.keys()
    if left or not (pairs or whole):
        raise InputError(f"{folder / WEIGHTS}: {_unknown(cfg, min(left)) if left else 'it holds no adapters.'}")
    fixed = [*(m for m, pair in pairs.items() if not pair.place.target), *(name for name in whole if name != HEAD)]
    if fixed and not merging:
        way = f"This adds it to its model: trireme merge {quoted(folder)} --out DIR"
        raise InputError(f"{folder}: {fixed[0]} cannot be trained as an adapter, or read with one. {way}.")
    files = {
        name: stored[inside]
        for pair in pairs.values()
        for name, inside in zip(shapes.adapter_names(pair.place.module), pair.place.stored, strict=True)
    }
    singles, pairs = _gathered(source, by_expert(cfg), files, pairs)
    lora = _lora(pairs)
    targeted = (place.module for place in adapter_places(cfg, config, False) if place.target in lora.targets)
    return Adapter(
        cfg,
        lora,
        source,
        peft_config.base_of(config),
        names=files,
        singles=singles,
        whole={name: stored[inside] for name, inside in whole.items()},
        ranks={module: pair.rank for module, pair in pairs.items()},
        scales={module: pair.alpha / pair.rank for module, pair in pairs.items()},
        absent=tuple(module for module in targeted if module not in pairs),
        dropout=float(config.get("lora_dropout") or 0.0),
    )


def convert_adapter(folder: Path, cfg: ModelConfig, out: Path, separate: bool) -> None:
    """Writes the adapter in `folder` to `out` with those of experts in the form of `write_adapter`, of one rank.

    Raises InputError, StoreError.
    """
    adapter, config = read_adapter(folder, cfg), peft_config.read_adapter_config(folder)
    cfg = adapted(adapter.cfg, replace(adapter.lora, dropout=adapter.dropout))
    numel = {name: math.prod(shape) for name, shape in adapters.adapter_shapes(cfg).items()}
    values = lambda name: adapter.values(name, 0, numel[name])
    adapters.write_adapter(out, cfg, values, adapter.base, str(config.get("revision") or ""), separate)


def scored_by(folder: Path, cfg: ModelConfig) -> ModelConfig:
    """`cfg` with the score head of an adapter, for a model that has none. Raises InputError as read_adapter."""
    if cfg.scores:
        return cfg
    shape = next((t.shape for name, t in open_adapter(folder).tensors.items() if short(name) == HEAD), None)
    return scored(cfg, shape[0], str(folder)) if shape and len(shape) == 2 else cfg


# ---------------------------------------------------------------- tensors


def open_adapter(folder: Path) -> Source:
    """The adapter's tensors. Raises InputError."""
    if not (folder / WEIGHTS).exists() and (pickle := folder / "adapter_model.bin").exists():
        rewrite = "PeftModel.from_pretrained(model, DIR).save_pretrained(OTHER)"
        raise InputError(f"{pickle} is a pickle, which is not read. Write safetensors with peft: {rewrite}.")
    try:
        header = read_header(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None
    place = lambda t: SourceTensor(t.dtype, t.shape, WEIGHTS, header.data + t.offset)
    return Source(folder, (WEIGHTS,), {t.name: place(t) for t in header.layout.tensors}, {})


def adapter_places(cfg: ModelConfig, config: Mapping[str, Any], singles: bool) -> Iterator[AdapterPlace]:
    """All matrices that may have an adapter; of `singles`, also those of each expert."""
    every = adapted(cfg, Lora(1, 1.0, adaptable(cfg)))
    names, sizes = adapters.peft_names(every), adapters.adapter_shapes(every)
    layered = re.compile(re.escape(cfg.names.block).replace(r"\{\}", r"\d+") + r"(.+)\.lora_A\.weight")
    for match in filter(None, map(layered.fullmatch, names)):
        module = match[0].removesuffix(".lora_A.weight")
        stored = {
            _outermost(config, names[name]): sizes[name][::-1] if adapters.is_transposed(name) else sizes[name]
            for name in shapes.adapter_names(module)
        }
        yield AdapterPlace(module, cfg.names.mlp.experts if shapes.adapts_experts(match[0]) else match[1], stored)
    gates = tuple(f".{name}.weight" for name in (cfg.names.mlp.router, cfg.names.mlp.shared_gate) if name)
    for name, shape in shapes.stored_tensors(cfg).items():
        module, theirs = name.removesuffix(".weight"), cfg.names.module(name).removesuffix(".weight")
        a, b = shapes.adapter_names(theirs)
        is_gate = bool(gates) and name.endswith(gates) and len(shape) == 2
        if is_gate or (not cfg.tied and module == cfg.names.output):
            yield AdapterPlace(module, "", {a: (1, shape[1]), b: (shape[0], 1)})
        elif not cfg.tied and module == cfg.names.embed:
            a, b = f"{theirs}.lora_embedding_A", f"{theirs}.lora_embedding_B"
            yield AdapterPlace(module, "", {a: (1, shape[0]), b: (shape[1], 1)})
    alone = by_expert(cfg)
    if singles and alone.names.mlp.single:
        groups = (group for u in range(1, alone.n_units - 1) for group in shapes.weight_groups(alone, u))
        for name, shape in (tensor for group in groups for tensor in group if len(tensor[1]) == 3):
            for one, (rows, columns) in shapes.on_disk(alone, name, shape):
                module = one.removesuffix(".weight")
                a, b = shapes.adapter_names(module)
                yield AdapterPlace(module, alone.names.mlp.experts, {a: (1, columns), b: (rows, 1)})


def _outermost(config: Mapping[str, Any], name: str) -> str:
    """The name of an adapter's tensor without prefix. peft wraps the experts' module once for each parameter, the last
    one outermost; where only the first of the two has an adapter, its name is that of the outer one.
    """
    name, inner = name.removeprefix(PREFIX), ".experts.base_layer.lora_"
    layer = name.partition(".experts.")[0]
    if ".experts." not in name or not peft_config.is_parameter(config, f"{layer}.experts.{GATE_UP}"):
        return name
    if peft_config.is_parameter(config, f"{layer}.experts.{DOWN}"):
        return name
    return name.replace(inner, ".experts.lora_") if inner in name else name.replace(".experts.lora_", inner)


def _pair(
    folder: Path, cfg: ModelConfig, config: Mapping[str, Any], spelling: Spelling, place: AdapterPlace,
    sizes: Mapping[str, Shape],
) -> Pair:  # fmt: skip
    """The adapter of a place that has tensors. Raises InputError if their shapes or the rank do not fit."""
    (a, (experts, columns)), (b, (rows, _)) = place.stored.items()
    rank = sizes.get(a, (0,))[0] // experts
    for name, wanted in ((a, (experts * rank, columns)), (b, (rows, experts * rank))):
        if sizes.get(name) != wanted or not rank:
            raise InputError(_unlike(folder, name, sizes, wanted))
    module = spelling.theirs(cfg.names.module(place.module))
    module = f"{module}.weight" if peft_config.is_parameter(config, f"{module}.weight") else module
    wanted_rank = peft_config.by_pattern(config.get("rank_pattern"), module, config["r"])
    if wanted_rank != rank:
        raise InputError(f"{folder}: {CONFIG} says that {module} has rank {wanted_rank}, in {WEIGHTS} it has {rank}.")
    alpha = float(peft_config.by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return Pair(place, rank, alpha * math.sqrt(rank) if config.get("use_rslora") else alpha)


# ---------------------------------------------------------------- embedding and output


def _untied(cfg: ModelConfig, source: Source, stored: Mapping[str, str], sizes_: dict[str, Shape]) -> ModelConfig:
    """`cfg` with two matrices if the adapter changes one of embedding and output of a model that has one for both.

    peft stores both after a resize; if they are equal, that of the output is taken out of `sizes_`.
    """
    embed, output = (f"{cfg.names.module(name)}." for name in (cfg.names.embed, cfg.names.output))
    changed = {name for name in sizes_ if name.startswith((embed, output))}
    if not cfg.tied or not changed:
        return cfg
    first, second = f"{embed}weight", f"{output}weight"
    if changed == {first, second} and np.array_equal(source.read(stored[first]), source.read(stored[second])):
        del sizes_[second]
        return cfg
    return replace(cfg, tied=False)


def _ends(cfg: ModelConfig) -> list[str]:
    """The matrices that have a row for each token: the embedding, and the output of a language model."""
    return [f"{cfg.names.embed}.weight", *(() if cfg.scores or cfg.tied else (shapes.output_name(cfg),))]


def _resized(folder: Path, cfg: ModelConfig, sizes: Mapping[str, Shape]) -> ModelConfig:
    """`cfg` with the vocabulary of an adapter whose model was resized. Raises InputError."""
    names = {inside for name in _ends(cfg) for inside in _inside(cfg, name)}
    new = {sizes[name][0] for name in names & sizes.keys()} - {cfg.vocab}
    if len(new) > 1:
        raise InputError(f"{folder / WEIGHTS}: embedding and output are of vocabularies of {sorted(new)}.")
    return replace(cfg, vocab=new.pop()) if new else cfg


def _inside(cfg: ModelConfig, name: str) -> tuple[str, str]:
    """peft's names without prefix of a weight that takes the place of the model's, below an adapter or alone."""
    module, _, what = cfg.names.module(name).rpartition(".")
    return f"{module}.base_layer.{what}", f"{module}.{what}"


def _replaced(folder: Path, base: ModelConfig, cfg: ModelConfig, sizes: Mapping[str, Shape]) -> dict[str, str]:
    """Weights that the adapter has in place of the model's: name in a checkpoint -> peft's name without prefix.

    `base`: the model without the adapter. Raises InputError.
    """
    whole = dict[str, str]()
    for name, shape in shapes.stored_tensors(cfg).items():
        for inside in _inside(cfg, name):
            if sizes.get(inside, shape) != shape:
                raise InputError(_unlike(folder, inside, sizes, shape))
            whole |= {name: inside} if inside in sizes else {}
    ends = _ends(cfg)
    for name, other in zip(ends, ends[::-1], strict=True):
        if name not in whole and base.tied and ".base_layer." in whole.get(other, ""):
            whole[name] = whole[other]  # what is below the adapter of one is the other
    if cfg.vocab != base.vocab and not whole.keys() >= set(ends):
        how = f"Resize the model first: resize_token_embeddings({cfg.vocab}), save_pretrained(DIR); then --model DIR"
        raise InputError(f"{folder} is of a vocabulary of {cfg.vocab}, the model has {base.vocab}. {how}.")
    return whole


def _unlike(folder: Path, name: str, sizes: Mapping[str, Shape], wanted: Shape) -> str:
    """The message about a tensor that is missing or has another shape."""
    what = f"is {list(sizes[name])}, for this model it would be {list(wanted)}" if name in sizes else "is missing"
    return f"{folder / WEIGHTS}: {name} {what}."


# ---------------------------------------------------------------- several as one


def _gathered(
    source: Source, cfg: ModelConfig, files: dict[str, str], pairs: Mapping[str, Pair]
) -> tuple[dict[str, list[Halves]], dict[str, Pair]]:
    """(Adapter.singles, `pairs` with a layer's experts as one). Removes the names of single experts from `files`.

    Gate and up have twice the rank together, unless they have the same A. Raises InputError.
    """
    gathered = {module: pair for module, pair in pairs.items() if not SINGLE.search(module)}
    singles: dict[str, list[Halves]] = {}
    for module, pair in pairs.items():
        if module in gathered or cfg.experts is None:
            continue
        matrix, expert, half = shapes.within_experts(cfg, f"{module}.weight")
        assert expert is not None
        halves = 1 if half is None else 2
        one = Pair(AdapterPlace(matrix, pair.place.target, {}), halves * pair.rank, halves * pair.alpha)
        if gathered.setdefault(matrix, one) != one:
            raise InputError(f"{source.folder}: adapters of the experts of {matrix} have several ranks or scales.")
        for ours, theirs in zip(shapes.adapter_names(matrix), shapes.adapter_names(module), strict=True):
            every = singles.setdefault(ours, [(None,) * halves] * cfg.experts.count)
            parts = list(every[expert])
            parts[half or 0] = files.pop(theirs)
            every[expert] = tuple(parts)
    same = lambda one, other: one and other and np.array_equal(source.read(one), source.read(other))
    for name, experts in singles.items():
        module, a = name.removesuffix(".lora_A.weight"), name.endswith(".lora_A.weight")
        if a and len(experts[0]) == 2 and all(same(*halves) for halves in experts):
            pair = gathered[module]
            gathered[module] = pair._replace(rank=pair.rank // 2, alpha=pair.alpha / 2)
    return singles, gathered


def _lora(pairs: Mapping[str, Pair]) -> Lora:
    """The adapters in the largest rank of all."""
    rank, alpha = max((pair.rank, pair.alpha) for pair in pairs.values()) if pairs else (1, 1.0)
    scales = {module: pair.alpha / pair.rank for module, pair in pairs.items()}
    other = [(module, scale) for module, scale in scales.items() if not math.isclose(scale, alpha / rank)]
    targets = {pair.place.target for pair in pairs.values() if pair.place.target}
    return Lora(rank, alpha, tuple(sorted(targets)), tuple(other))


def _unknown(cfg: ModelConfig, name: str) -> str:
    """The message about a tensor that fits no place."""
    if wrapper := next((inner for inner in WRAPPERS if inner in name), ""):
        return f"{shown(name)}: {wrapper!r} is of a wrapped model. Save the adapter of the model inside, without it."
    return f"{shown(name)} is not of a plain LoRA of this {cfg.model_type} with its {cfg.n_layers:,} layers."

"""Opens an adapter in peft's format, and checks that its tensors fit the model and its two files agree."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import NamedTuple

from trireme.engine.tuning.adapters import (
    WEIGHTS,
    Adapter,
    Halves,
    adapter_shapes,
    excluded,
    peft_names,
    turned,
)
from trireme.engine.tuning.chosen import adaptable, adapted
from trireme.engine.tuning.peft_config import CONFIG, Said, read_adapter_config, read_said
from trireme.engine.tuning.spellings import PREFIX, SINGLE, by_expert, short, spelled
from trireme.models.config import InputError, Lora, ModelConfig, scored
from trireme.models.hf import WRAPPERS
from trireme.models.sizes import shapes
from trireme.models.sizes.shapes import DOWN, GATE_UP
from trireme.storage.checkpoint import Source, SourceTensor
from trireme.storage.headers import read_header
from trireme.storage.untrusted import shown

PICKLE = "adapter_model.bin"
HEAD = "score.weight"


class Place(NamedTuple):
    """A matrix that may have an adapter, or the same matrix of all experts of a layer."""

    module: str
    layer: int  # -1: of none
    target: str  # of Lora; "": can only be merged
    rank: int
    alpha: float
    stored: Mapping[str, tuple[int, ...]]  # peft's names of A and B, without prefix -> shapes

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def read_adapter(folder: Path, cfg: ModelConfig, merging: bool = False) -> Adapter:
    """Opens the adapter in `folder`. What `cfg` trains does not matter. `merging`: accept also what cannot be trained.

    Raises InputError for another format, kind or base.
    """
    said, source = read_said(folder, excluded(cfg), cfg.scores > 0), _opened(folder)
    pairs, spelling = spelled(cfg, source.tensors, str(folder / WEIGHTS))
    stored, said = dict(pairs), replace(said, spelling=spelling)
    if len(stored) < len(source.tensors):
        raise InputError(f"{folder / WEIGHTS} has a tensor twice, such as with {PREFIX} before its name, and without.")
    found = {short: source.tensors[name].shape for short, name in stored.items()}
    places = [*_places(cfg, said), *_outer_places(cfg, said), *_gates(cfg, said)]
    if by_expert(cfg).names.each and any(map(SINGLE.search, found)):
        places += _single_places(by_expert(cfg), said)
    whole = _whole(folder, cfg, said, found)
    for name in sorted(found.keys() - whole.keys() - {name for place in places for name in place.stored}):
        raise InputError(f"{folder / WEIGHTS}: {_unsupported(cfg, name, {place.module for place in places})}")
    there = {place.module: place for place in places if _is_there(folder, cfg, said, place, found)}
    if not (there or whole):
        raise InputError(f"{folder / WEIGHTS} holds no adapters.")
    if not merging:
        _check_trainable(folder, there, whole)
    names = {
        name: stored[short]
        for place in there.values()
        for name, short in zip(shapes.adapter_names(place.module), place.stored, strict=True)
    }
    singles, there = _gathered(folder, by_expert(cfg), names, there)
    lora = _lora(there)
    return Adapter(
        lora,
        source,
        said.base,
        names,
        singles,
        {name: stored[short] for short, name in whole.items()},
        {module: place.rank for module, place in there.items()},
        {module: place.scale for module, place in there.items()},
        tuple(place.module for place in places if place.target in lora.targets and place.module not in there),
        said.dropout,
    )


def scored_by(folder: Path, cfg: ModelConfig) -> ModelConfig:
    """`cfg` with the score head of an adapter, for a model that has none. Raises InputError as read_adapter."""
    if cfg.scores or read_adapter_config(folder).get("task_type") != "SEQ_CLS":
        return cfg
    found = next((t.shape for name, t in _opened(folder).tensors.items() if short(name) == HEAD), None)
    if found is None or len(found) != 2:
        raise InputError(f"{folder / CONFIG}: task_type is SEQ_CLS, and {WEIGHTS} has no {HEAD}.")
    return scored(cfg, found[0], str(folder))


def _lora(there: Mapping[str, Place]) -> Lora:
    """The adapters in the largest rank of all."""
    rank, alpha = max((place.rank, place.alpha) for place in there.values()) if there else (1, 1.0)
    other = [(name, place.scale) for name, place in there.items() if not isclose(place.scale, alpha / rank)]
    targets = {place.target for place in there.values() if place.target}
    return Lora(rank, alpha, tuple(sorted(targets)), tuple(other))


def _opened(folder: Path) -> Source:
    """The adapter's tensors. Raises InputError."""
    if not (folder / WEIGHTS).exists() and (folder / PICKLE).exists():
        rewrite = "PeftModel.from_pretrained(model, DIR).save_pretrained(OTHER)"
        raise InputError(f"{folder / PICKLE} is a pickle, which is not read. Write safetensors with peft: {rewrite}.")
    try:
        header = read_header(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None
    found = header.layout.tensors
    tensors = {t.name: SourceTensor(t.dtype, t.shape, WEIGHTS, header.data + t.offset) for t in found}
    return Source(folder, (WEIGHTS,), tensors, {})


def _place(
    module: str, layer: int, target: str, size: tuple[int, float], stored: Mapping[str, tuple[int, ...]]
) -> Place:
    """`stored`: the shapes of A and of B for a rank of 1."""
    (a, (e, inner)), (b, (outer, _)) = stored.items()
    return Place(module, layer, target, *size, {a: (e * size[0], inner), b: (outer, e * size[0])})


def _places(cfg: ModelConfig, said: Said) -> Iterator[Place]:
    """All matrices whose adapters can be trained."""
    every = adapted(cfg, Lora(1, 1.0, adaptable(cfg)))
    names, sizes = peft_names(every), adapter_shapes(every)
    layered = re.compile(re.escape(cfg.names.block).replace(r"\{\}", r"(\d+)") + r"(.+)\.lora_A\.weight")
    for match in filter(None, map(layered.fullmatch, names)):
        module = match[0].removesuffix(".lora_A.weight")
        stored = {
            _of_one(said, names[name]): sizes[name][::-1] if turned(name) else sizes[name]
            for name in shapes.adapter_names(module)
        }
        target = cfg.names.experts if shapes.adapts_experts(match[0]) else match[2]
        theirs = cfg.names.module(module)
        yield _place(module, int(match[1]), target, _size(said, theirs), stored)


def _size(said: Said, module: str) -> tuple[int, float]:
    """As Said.sized, by the name under which peft adapts a module: its own, or that of its weight."""
    weight = f"{module}.weight"
    return said.sized(weight if said.adapts(weight) else module)


def _of_one(said: Said, name: str) -> str:
    """The name of a tensor without its prefix. If only the first of experts' two matrices has an adapter, its name is
    that of the outer one.
    """
    name, inner = name.removeprefix(PREFIX), ".experts.base_layer.lora_"
    layer = name.partition(".experts.")[0]
    if ".experts." not in name or [said.adapts(f"{layer}.experts.{m}") for m in (GATE_UP, DOWN)] != [True, False]:
        return name
    return name.replace(inner, ".experts.lora_") if inner in name else name.replace(".experts.lora_", inner)


def _outer_places(cfg: ModelConfig, said: Said) -> Iterator[Place]:
    """Embedding and output matrix; none in a tied model, which has one matrix for both."""
    if cfg.tied:
        return
    for module, names, inner, outer in (
        (cfg.names.embed, ("lora_embedding_A", "lora_embedding_B"), cfg.vocab, cfg.width),
        (cfg.names.output, ("lora_A.weight", "lora_B.weight"), cfg.width, cfg.outputs),
    ):
        theirs = cfg.names.module(module)
        a, b = (f"{theirs}.{name}" for name in names)
        yield _place(module, -1, "", said.sized(theirs), {a: (1, inner), b: (outer, 1)})


def _gates(cfg: ModelConfig, said: Said) -> Iterator[Place]:
    """Routers and the gates of shared experts, which transformers 4 has as linear layers."""
    ends = tuple(f".{name}.weight" for name in (cfg.names.router, cfg.names.shared_gate) if name)
    layered = re.compile(re.escape(cfg.names.block).replace(r"\{\}", r"(\d+)") + ".+")
    for name, shape in shapes.stored_tensors(cfg).items() if ends else ():
        if name.endswith(ends) and len(shape) == 2 and (match := layered.fullmatch(name)):
            theirs = cfg.names.module(name).removesuffix(".weight")
            a, b = shapes.adapter_names(theirs)
            stored = {a: (1, shape[1]), b: (shape[0], 1)}
            yield _place(name.removesuffix(".weight"), int(match[1]), "", _size(said, theirs), stored)


def _single_places(cfg: ModelConfig, said: Said) -> Iterator[Place]:
    """The matrices of each expert. `cfg`: as `by_expert` has it."""
    for u in range(1, cfg.n_units - 1):
        for name, shape in (
            tensor for group in shapes.weight_groups(cfg, u) for tensor in group if len(tensor[1]) == 3
        ):
            for one, (rows, columns) in shapes.on_disk(cfg, name, shape):
                module = one.removesuffix(".weight")
                a, b = shapes.adapter_names(module)
                size, layer = said.sized(module), shapes.layer(cfg, u)
                yield _place(module, layer, cfg.names.experts, size, {a: (1, columns), b: (rows, 1)})


def _whole(folder: Path, cfg: ModelConfig, said: Said, found: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Weights that the adapter has in place of the model's: peft's name without prefix -> name in a checkpoint.

    These are of modules_to_save, and embedding and output matrix, which peft stores with their adapters. Raises
    InputError.
    """
    outer = {cfg.names.module(name) for name in (cfg.names.embed, cfg.names.output)}
    named, whole = set[str](), dict[str, str]()
    there = {end for end in said.saved if any(said.spelling.theirs(module).endswith(end) for module in outer)}
    for name, shape in shapes.stored_tensors(cfg).items():
        theirs = cfg.names.module(name)
        module, _, what = theirs.rpartition(".")
        ends = {end for end in said.saved if said.spelling.theirs(module).endswith(end)}  # as peft, without a dot
        there |= ends
        for stored in (theirs, f"{module}.base_layer.{what}") if ends or module in outer else ():
            if stored in found:
                if found[stored] != shape:
                    wanted = f"for this model it would be {list(shape)}"
                    raise InputError(f"{folder / WEIGHTS}: {stored} is {list(found[stored])}, {wanted}.")
                whole[stored] = name
                named |= ends
    if cfg.tied and any(name.startswith(tuple(f"{module}." for module in outer)) for name in found):
        raise InputError(
            f"{folder / WEIGHTS} changes {cfg.names.embed} or {cfg.names.output}, which are one matrix in this model. "
            "That is not supported: train the adapter without it."
        )
    for end in sorted(there - named):
        raise InputError(f"{folder / CONFIG}: modules_to_save names {shown(end)}, of which {WEIGHTS} has nothing.")
    return whole


def _check_trainable(folder: Path, there: Mapping[str, Place], whole: Mapping[str, str]) -> None:
    """Raises InputError if the adapter can only be merged."""
    outer = [module for module, place in there.items() if not place.target]
    held = sorted(name for name in whole.values() if name != HEAD)
    if outer:
        more = f" and {len(outer) - 2:,} more" if len(outer) > 2 else ""
        wrong = f"adapters of {' and '.join(outer[:2])}{more}"
    elif held:
        wrong = f"whole weights in an adapter ({held[0]}{f' and {len(held) - 1} more' if len(held) > 1 else ''})"
    else:
        return
    raise InputError(f"{folder}: {wrong} cannot be trained; `merge` adds them to their model.")


def _gathered(
    folder: Path, cfg: ModelConfig, names: dict[str, str], there: Mapping[str, Place]
) -> tuple[dict[str, list[Halves]], dict[str, Place]]:
    """(Adapter.singles, `there` with a layer's experts as one place). Removes the names of single experts from `names`.

    Raises InputError.
    """
    gathered = {module: place for module, place in there.items() if not SINGLE.search(module)}
    singles: dict[str, list[Halves]] = {}
    for module, place in there.items():
        if module in gathered or cfg.experts is None:
            continue
        matrix, expert, half = shapes.within_experts(cfg, f"{module}.weight")
        assert expert is not None
        halves = 1 if half is None else 2
        one = Place(matrix, place.layer, place.target, halves * place.rank, halves * place.alpha, {})
        if gathered.setdefault(matrix, one) != one:
            raise InputError(
                f"{folder}: adapters of the experts of {matrix} have several ranks or scales, or are there twice."
            )
        for mine, theirs in zip(shapes.adapter_names(matrix), shapes.adapter_names(module), strict=True):
            every = singles.setdefault(mine, [(None,) * halves] * cfg.experts.count)
            found = list(every[expert])
            found[half or 0] = names.pop(theirs)
            every[expert] = tuple(found)
    return singles, gathered


def _is_there(folder: Path, cfg: ModelConfig, said: Said, place: Place, found: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a place has an adapter. Raises InputError if the two files disagree, or a shape is wrong."""
    key = _left_out(cfg, said, place)
    if key != "" and not place.stored.keys() & found.keys():
        return False
    for name, shape in place.stored.items():
        if name not in found:
            raise InputError(f"{folder / WEIGHTS} lacks {name}, which {CONFIG} calls for. The file is not whole.")
        if found[name] != shape:
            wanted = f"for this model it would be {list(shape)}"
            raise InputError(f"{folder / WEIGHTS}: {name} is {list(found[name])}, {wanted}.")
    if key:
        raise InputError(f"{folder / CONFIG}: {key} leaves out {place.module}, which has an adapter in {WEIGHTS}.")
    return True


def _left_out(cfg: ModelConfig, said: Said, place: Place) -> str | None:
    """As Said.left_out, for a place."""
    module = cfg.names.module(place.module)
    if shapes.adapts_experts(f"{place.module}.lora_A.weight"):
        return "" if said.adapts(module) else "target_parameters"
    return said.left_out(module, place.layer, cfg.names.block.split(".{}")[0].rpartition(".")[2])


def _unsupported(cfg: ModelConfig, name: str, modules: Container[str]) -> str:
    """The message about a tensor that fits no place."""
    module = name.partition(".lora_")[0].partition(".base_layer")[0].removesuffix(".weight")
    if module in modules:
        return f"{shown(name)} is not of a plain LoRA adapter, which has lora_A.weight and lora_B.weight of a layer."
    if wrapper := next((inner for inner in WRAPPERS if inner in name), ""):
        return f"{shown(name)}: {wrapper!r} is of a wrapped model. Save the adapter of the model inside, without it."
    can = ", ".join(adaptable(cfg))
    return f"adapters of {shown(module)} are not supported. Those of {can} in the {cfg.n_layers:,} layers are."

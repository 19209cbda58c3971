"""Opens an adapter in peft's format: its tensors fit the model, and its two files agree."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from trireme.engine.tuning.adapters import (
    PREFIX,
    WEIGHTS,
    Adapter,
    adapter_shapes,
    excluded,
    parameters,
    peft_names,
    turned,
)
from trireme.engine.tuning.chosen import adaptable, adapted
from trireme.engine.tuning.peft_config import CONFIG, Said, read_said
from trireme.models.config import InputError, Lora, ModelConfig
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source, SourceTensor
from trireme.storage.headers import read_header
from trireme.storage.untrusted import shown

SINGLE = re.compile(r"\.experts\.\d+\.")  # one of a layer's experts, as transformers 4 has them


class Place(NamedTuple):
    """A matrix that may be adapted, or that of all experts of a layer."""

    module: str
    layer: int
    target: str  # of Lora
    stored: Mapping[str, tuple[int, ...]]  # peft's names of A and B, without prefix -> shapes


def read_adapter(folder: Path, cfg: ModelConfig, single: bool = False) -> Adapter:
    """What of `cfg` is trained does not count; `single`: also adapters of single experts, which cannot be trained.

    Raises InputError on another format, kind or base.
    """
    said = read_said(folder, excluded(cfg))
    try:
        header = read_header(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None
    found = {_short(t.name): t for t in header.layout.tensors}
    if len(found) < len(header.layout.tensors):
        raise InputError(f"{folder / WEIGHTS} has a tensor twice: with {PREFIX} before its name, and without.")
    places = list(_places(cfg, said.rank))
    if single and any(map(SINGLE.search, found)):
        places += _single_places(cfg, said.rank)
    for name in sorted(found.keys() - {name for place in places for name in place.stored}):
        raise InputError(f"{folder / WEIGHTS}: {_unsupported(cfg, name, {place.module for place in places})}")
    sizes = {name: t.shape for name, t in found.items()}
    there = {place.module: place for place in places if _is_there(folder, cfg, said, place, sizes)}
    if not there:
        raise InputError(f"{folder / WEIGHTS} holds no adapters.")
    targets = {place.target for place in there.values()}
    tensors = {t.name: SourceTensor(t.dtype, t.shape, WEIGHTS, header.data + t.offset) for t in found.values()}
    return Adapter(
        Lora(said.rank, said.alpha, tuple(sorted(targets))),
        Source(folder, (WEIGHTS,), tensors, {}),
        said.base,
        {
            name: found[stored].name
            for place in there.values()
            for name, stored in zip(shapes.adapter_names(place.module), place.stored, strict=True)
        },
        tuple(place.module for place in places if place.target in targets and place.module not in there),
        said.dropout,
    )


def _short(name: str) -> str:
    """A tensor's name without peft's prefix, and without the adapter's own name, which some tools keep."""
    return name.removeprefix(PREFIX).replace(".default.weight", ".weight")


def _places(cfg: ModelConfig, rank: int) -> Iterator[Place]:
    """All that training can adapt."""
    every = adapted(cfg, Lora(rank, 1.0, adaptable(cfg)))
    names, sizes = peft_names(every), adapter_shapes(every)
    layered = re.compile(re.escape(cfg.names.block).replace(r"\{\}", r"(\d+)") + r"(.+)\.lora_A\.weight")
    for match in filter(None, map(layered.fullmatch, names)):
        module = match[0].removesuffix(".lora_A.weight")
        stored = {
            names[name].removeprefix(PREFIX): sizes[name][::-1] if turned(name) else sizes[name]
            for name in shapes.adapter_names(module)
        }
        target = cfg.names.experts if shapes.adapts_experts(match[0]) else match[2]
        yield Place(module, int(match[1]), target, stored)


def _single_places(cfg: ModelConfig, rank: int) -> Iterator[Place]:
    """Each expert's matrices."""
    for u in range(1, cfg.n_units - 1):
        for name, shape in (
            tensor for group in shapes.weight_groups(cfg, u) for tensor in group if len(tensor[1]) == 3
        ):
            for one, (rows, columns) in shapes.on_disk(cfg, name, shape):
                a, b = shapes.adapter_names(one.removesuffix(".weight"))
                stored = {a: (rank, columns), b: (rows, rank)}
                yield Place(one.removesuffix(".weight"), shapes.layer(cfg, u), cfg.names.experts, stored)


def _is_there(folder: Path, cfg: ModelConfig, said: Said, place: Place, found: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a place is adapted. Raises InputError where the two files disagree, or a shape is another."""
    key = _left_out(folder, cfg, said, place)
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


def _left_out(folder: Path, cfg: ModelConfig, said: Said, place: Place) -> str | None:
    """See Said.left_out."""
    if place.target != cfg.names.experts or SINGLE.search(place.module):
        return said.left_out(
            cfg.names.module(place.module), place.layer, cfg.names.block.split(".{}")[0].rpartition(".")[2]
        )
    prefix, both = cfg.names.prefix(place.layer), parameters(cfg)
    adapts = [said.adapts(f"{prefix}{parameter}") for parameter in both]
    if any(adapts) and not all(adapts):
        raise InputError(f"{folder / CONFIG}: target_parameters names one of {' and '.join(both)}; name both.")
    return "" if all(adapts) else "target_parameters"


def _unsupported(cfg: ModelConfig, name: str, modules: Container[str]) -> str:
    """Of a tensor without a place."""
    module = name.partition(".lora_")[0].partition(".base_layer")[0].removesuffix(".weight")
    if module in modules:
        return f"{shown(name)} is not of a plain LoRA adapter, which has lora_A.weight and lora_B.weight of a layer."
    if SINGLE.search(name):
        return f"adapters of single experts ({shown(module)}) cannot be trained; `merge` adds them to their model."
    can = ", ".join(adaptable(cfg))
    return f"adapters of {shown(module)} are not supported. Those of {can} in the {cfg.n_layers:,} layers are."

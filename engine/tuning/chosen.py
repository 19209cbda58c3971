"""Which tensors are trained: those that patterns select, or adapters of frozen ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from math import prod

from trireme.engine.amounts import percent
from trireme.models.config import InputError, Lora, ModelConfig
from trireme.models.sizes import shapes
from trireme.models.sizes.narrow import packed_groups

NEAREST = 3  # names offered where a pattern matches none
ALL = ("all", "all-linear")  # words of other trainers for every target


def train_only(cfg: ModelConfig, freeze: Sequence[str], train: Sequence[str]) -> ModelConfig:
    """`cfg` that trains tensors which match `train` (all if empty) and not `freeze`: globs over Hugging Face names.

    Raises InputError if a pattern matches nothing or only a part of a matmul, or nothing is left to train.
    """
    for flag, pattern in [*(("--train", text) for text in train), *(("--freeze", text) for text in freeze)]:
        if not matching(cfg, pattern):
            raise InputError(f"{flag} {pattern}: no tensor of the model has such a name. {_instead(cfg, pattern)}.")
    picked = replace(cfg, frozen=(*(("*",) if train else ()), *(f"!{pattern}" for pattern in train), *freeze))
    if not any(_trained(picked).values()):
        raise InputError("--freeze and --train leave nothing to train.")
    return picked


def matching(cfg: ModelConfig, pattern: str) -> list[str]:
    """Names of the model's tensors that a glob matches."""
    return [name for name in _trained(cfg) if fnmatchcase(name, pattern)]


def _trained(cfg: ModelConfig) -> dict[str, bool]:
    """For the name of every tensor whether it is trained."""
    groups = shapes.all_groups(cfg)
    return {name: not frozen for group in groups for frozen in [shapes.is_frozen(cfg, group)] for name, _ in group}


def _instead(cfg: ModelConfig, pattern: str) -> str:
    """Names similar to a pattern, one for all layers."""
    if cfg.tied and fnmatchcase(f"{cfg.names.output}.weight", pattern):
        return f"The output matrix is the embedding: {shapes.embedding_name(cfg)}"
    names = folded(cfg, _trained(cfg))
    return f"Near it: {', '.join(difflib.get_close_matches(pattern.strip('*'), names, NEAREST, cutoff=0.0))}"


def folded(cfg: ModelConfig, names: Iterable[str]) -> list[str]:
    """Names with ranges of layers instead of their numbers, such as model.layers.0-31.mlp.down_proj.weight."""
    before, after = cfg.names.block.split("{}")
    layers: dict[str, list[int]] = {}
    for name in names:
        number, _, suffix = name.removeprefix(before).partition(after)
        inner = name.startswith(before) and number.isdigit()
        layers.setdefault(f"{before}{{}}{after}{suffix}" if inner else name, []).extend([int(number)] if inner else [])
    span = lambda run: f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
    runs = lambda numbers: groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])  # of consecutive ones
    spans = lambda numbers: ",".join(span([n for _, n in run]) for _, run in runs(numbers))
    return [name.replace("{}", spans(numbers)) for name, numbers in layers.items()]


def trained_lines(cfg: ModelConfig, options: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines on how much is trained, and what each pattern matches. `options`: flag -> its patterns."""
    trained = _trained(cfg)
    sizes = {name: prod(s) for group in shapes.all_groups(cfg) for name, s in group}
    share = sum(sizes[name] for name, yes in trained.items() if yes) / sum(sizes.values())
    lines = [f"{sum(trained.values()):,} of {len(trained):,} tensors, {percent(share)} of the parameters"]
    for flag, patterns in options.items():
        lines += [f"{flag} {pattern}: {', '.join(folded(cfg, matching(cfg, pattern)))}" for pattern in patterns]
    return lines


def adapted(cfg: ModelConfig, lora: Lora) -> ModelConfig:
    """`cfg` with adapters, which alone are trained. Raises InputError if the rank or a target does not fit."""
    if not 1 <= lora.rank <= cfg.width:
        raise InputError(f"a LoRA rank of {lora.rank}: expected 1 to {cfg.width}, the width of the model.")
    modules = adaptable(cfg)
    for target in lora.targets:
        if not any(replace(lora, targets=(target,)).adapts(module) for module in modules):
            raise InputError(f"no linear layer of the blocks is called {target}; there are {', '.join(modules)}.")
    return replace(cfg, lora=lora, frozen=("*",))


def aware(cfg: ModelConfig, base: str | None) -> ModelConfig:
    """`cfg`, with its matrices as they are packed in the checkpoint, that computes with what `merge --format same` will
    make of them. `base`: of --base. Raises InputError.
    """
    assert cfg.lora is not None
    reason = ""
    if cfg.fp8 or cfg.lora.dropout:
        reason = "--dtype fp8 has other codes" if cfg.fp8 else "--lora-dropout drops inputs of adapters alone"
    elif base or not any(map(cfg.lora.adapts, _packed(cfg))):
        reason = "--base packs in memory only" if base else "no packed matrix has an adapter"
    if reason:
        raise InputError(f"--merge-aware: {reason}. Leave one of them out.")
    return replace(cfg, lora=replace(cfg.lora, aware=True))


def _packed(cfg: ModelConfig) -> Iterator[str]:
    """Modules that are packed."""
    for name, _ in (tensor for u in range(cfg.n_units) for group in packed_groups(cfg, u) for tensor in group):
        yield cfg.names.mlp.experts if ".experts." in name else name.removesuffix(".weight")


def adaptable(cfg: ModelConfig) -> tuple[str, ...]:
    """Names of the layers within a block that can have adapters."""
    return (*linear_layers(cfg), *((cfg.names.mlp.experts,) if cfg.experts else ()))


def linear_layers(cfg: ModelConfig) -> tuple[str, ...]:
    """Names of the linear layers within a block."""
    with_mlp = (layer for layer in cfg.layers if layer.mlp or layer.experts and layer.experts.shared)
    mlps = dict.fromkeys(layer.mlp_names for layer in with_mlp)
    latents = (cfg.names.mlp.latent_in, cfg.names.mlp.latent_out) if cfg.experts and cfg.experts.latent else ()
    linears = (*_mixers(cfg), *(name for names in mlps for name in (*names.up, names.down)), *latents)
    return tuple(name for name in linears if name not in cfg.family.unadapted)


def _mixers(cfg: ModelConfig) -> tuple[str, ...]:
    """Names of the linear layers of attention and recurrences."""
    names = (*cfg.names.mixer.attention, *(cfg.names.mixer.recurrence if cfg.scan else ()))
    return tuple(name for name in names if name not in cfg.family.unadapted)


def targets(cfg: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The layers that get adapters: those named, else every linear layer of the blocks, or of a mixture of experts
    those of attention.
    """
    everything = len(names) == 1 and names[0] in ALL
    if names and not everything:
        return tuple(names)
    words = 1 if cfg.experts is None else 2
    layers = linear_layers(cfg) if everything or cfg.experts is None else _mixers(cfg)
    return tuple(dict.fromkeys(".".join(name.split(".")[-words:]) for name in layers))

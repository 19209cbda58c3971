"""Names of an adapter's tensors: several versions and classes of transformers call one module in several ways."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from trireme.models.config import InputError, ModelConfig, renamed
from trireme.models.families.names import single_names

PREFIX = "base_model.model."  # peft's
SINGLE = re.compile(r"\.experts\.\d+\.")  # one of a layer's experts, as transformers 4 has them
# What names of a language model begin with: within a multimodal model, there before transformers 4.52, alone, and
# without a head.
_BASES = ("model.language_model.", "language_model.model.", "model.", "")
_PARTS = ("layers.", "embed_tokens.", "norm.")  # what comes behind it
_OUTER_HEAD = "language_model.lm_head."


class Spelling(NamedTuple):
    """What names of the language model's modules begin with: in transformers' class, and in the adapter."""

    here: str = ""
    there: str = ""

    def theirs(self, module: str) -> str:
        """The adapter's name of a module of transformers."""
        return self.there + module.removeprefix(self.here) if module.startswith(self.here) else module


def short(name: str) -> str:
    """The name of a tensor without peft's prefix, and without the adapter's own name, which some programs keep."""
    return name.removeprefix(PREFIX).replace(".default.weight", ".weight")


def spelled(cfg: ModelConfig, stored: Iterable[str], file: str) -> tuple[list[tuple[str, str]], Spelling]:
    """((name by transformers' modules without peft's prefix, name in the file) of each tensor, the adapter's spelling).

    An adapter may have been made with the class of the language model alone, that of the multimodal model around it, or
    an older one. All of them compute the same. Raises InputError about `file` if it mixes them.
    """
    stem, names, bases = cfg.names.module(cfg.names.block).partition("layers.")[0], list[tuple[str, str]](), set[str]()
    for inside in stored:
        name = short(inside)
        name = name if SINGLE.search(name) else cfg.names.module(name)  # which may be as in released files
        for base in _BASES if stem in _BASES else ():
            if name.startswith(tuple(base + part for part in _PARTS)):
                bases.add(base)
                name = stem + name.removeprefix(base)
                break
        if stem in _BASES and name.startswith(_OUTER_HEAD):
            name = name.removeprefix("language_model.")
        names.append((name, inside))
    if len(bases) > 1:
        first, second = (f"{base}layers" for base in sorted(bases)[:2])
        raise InputError(f"{file} names modules in two ways, {first} and {second}. Save it again with peft.")
    return names, Spelling(stem, next(iter(bases), stem))


def by_expert(cfg: ModelConfig) -> ModelConfig:
    """`cfg` with the experts one by one in files, as transformers 4 has modules of them; `cfg` if it never had."""
    if cfg.experts is None or cfg.names.mlp.experts_in_out:
        return cfg
    original = cfg.family.names.mlp
    released = renamed(cfg, lambda names: replace(names, single=original.single, stacked=original.stacked))
    return released if released.names.mlp.single else renamed(released, single_names)

"""Names of an adapter's tensors: several versions and classes of transformers call one module in several ways."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from trireme.models.config import InputError, ModelConfig, renamed
from trireme.models.families.names import one_by_one

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


def spelled(cfg: ModelConfig, stored: Iterable[str], where: str) -> tuple[list[tuple[str, str]], Spelling]:
    """((name by transformers' modules without peft's prefix, name in the file) of each tensor, the adapter's spelling).

    An adapter may have been made with the class of the language model alone, that of the multimodal model around it, or
    an older one. All of them compute the same. Raises InputError about the file `where` if it mixes them.
    """
    names = [(_in_modules(cfg, short(name)), name) for name in stored]
    here = cfg.names.module(cfg.names.block).partition("layers.")[0]
    if here not in _BASES:
        return names, Spelling()
    bases = {base for name, _ in names for base in [_base(name)] if base is not None}
    if len(bases) > 1:
        first, second = (f"{base}layers" for base in sorted(bases)[:2])
        raise InputError(f"{where} names modules in two ways, {first} and {second}. Save it again with peft.")
    there = next(iter(bases), here)
    return [(_moved(name, here), inside) for name, inside in names], Spelling(here, there)


def _base(name: str) -> str | None:
    """What a name within the language model begins with; None if it is not within it."""
    return next((base for base in _BASES if name.startswith(tuple(base + part for part in _PARTS))), None)


def _moved(name: str, here: str) -> str:
    """A name that begins with `here` if it is within the language model."""
    base = _base(name)
    if name.startswith(_OUTER_HEAD):
        return name.removeprefix("language_model.")
    return name if base is None else here + name.removeprefix(base)


def _in_modules(cfg: ModelConfig, name: str) -> str:
    """A name that may be as in released files, by transformers' modules; single experts are called as in files."""
    return name if SINGLE.search(name) else cfg.names.module(name)


def by_expert(cfg: ModelConfig) -> ModelConfig:
    """`cfg` with the experts one by one in files, as transformers 4 has modules of them; `cfg` if it never had."""
    if cfg.experts is None or cfg.names.mlp.experts_in_out:
        return cfg
    own = cfg.family.names.mlp
    released = renamed(cfg, lambda names: replace(names, single=own.single, stacked=own.stacked))
    return released if released.names.mlp.single else renamed(released, one_by_one)

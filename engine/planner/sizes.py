"""Models by their published names: shapes to plan for and to measure, without a checkpoint. Imports no torch."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from trireme.models.config import InputError, ModelConfig, parse_config

# sizes.json: the keys of a config.json by our name of a model, and other names of it.
# Of a published name: its organisation, and what does not change the shape.
_UNSHAPED = re.compile(r"^.*/|-(instruct|it|pt|base|chat|hf|thinking|v\d\.\d|\d{4})(?=-|$)")


@cache
def find_model(name: str) -> ModelConfig:
    """The shape of a model by its published name or the name here, in any case. Raises InputError, which lists near
    names.
    """
    plain, (models, also) = _UNSHAPED.sub("", name.lower().replace("_", "-")), _tables()
    if config := models.get(also.get(plain, plain)):
        return parse_config(dict(config))
    near = get_close_matches(plain, [*models, *also], 1, 0.8)
    perhaps = f"Did you mean {near[0]}? " if near else ""
    raise InputError(
        f"--shape {name} is not known. {perhaps}There are {_listed(also.get(near[0], near[0]) if near else '')}; "
        "or name a folder with a config.json."
    )


@cache
def _tables() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(configs by name, names by other names)."""
    tables = json.loads(Path(__file__).with_name("sizes.json").read_text())
    return tables["models"], tables["also"]


def names() -> list[str]:
    """The names of all models here."""
    return list(_tables()[0])


def _listed(near: str) -> str:
    """The names that begin as `near` does, or all for "", written as llama-{7b,8b}."""
    families: dict[str, list[str]] = {}
    for name in (name for name in names() if name.partition("-")[0].startswith(near.partition("-")[0])):
        family, _, size = name.rpartition("-")
        families.setdefault(family, []).append(size)
    braced = lambda sizes: sizes[0] if len(sizes) == 1 else f"{{{','.join(sizes)}}}"
    return " ".join(f"{family}-{braced(sizes)}" for family, sizes in families.items())

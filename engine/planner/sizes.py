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
    """The shape of a model by its published name or the name here, in any case. Raises InputError with near names."""
    return parse_config(find_config(name))


def find_config(name: str) -> dict[str, Any]:
    """config.json of a model of that name. Raises InputError."""
    plain, (models, also) = _UNSHAPED.sub("", name.lower().replace("_", "-")), _tables()
    if config := models.get(also.get(plain, plain)):
        return dict(config)
    similar = get_close_matches(plain, [*models, *also], 5)
    there_are = f"Near are {', '.join(similar)}" if similar else f"There are {', '.join(models)}"
    raise InputError(f"--shape {name} is not known. {there_are}; or name a folder with a config.json.")


@cache
def _tables() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(configs by name, names by other names)."""
    tables = json.loads(Path(__file__).with_name("sizes.json").read_text())
    return tables["models"], tables["also"]


def names() -> list[str]:
    """The names of all models here."""
    return list(_tables()[0])

"""A run's config.yaml: `read(write(options))` gives the same options, from any folder; and flat YAML of other trainers.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from trireme.engine.run import aliases
from trireme.engine.run.after import hub
from trireme.engine.run.options import Every, Options, flag, gib_size, table
from trireme.models.config import InputError
from trireme.storage.untrusted import read_text, why

FIRST = "# options of a run of trireme\n"
REST = "# chosen, or defaults of this version\n"
FIELDS = table(Options)


def saved(options: Options) -> dict[str, Any]:
    """The options as YAML and JSON have them: plain values, absolute paths; without those of one call."""
    names = [name for name, option in FIELDS.items() if "call" not in option.metadata["kind"]]
    return {name: _plain(FIELDS[name].metadata, getattr(options, name)) for name in names}


def _plain(option: Mapping[str, Any], value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(option, part) for part in value]
    if value is None or value == "":
        return None
    if "path" in option["kind"] and not re.fullmatch(option["words"], value):  # a path, a pattern or PATH:WEIGHT
        is_on_hub = hub.name_of(value) or hub.name_of(value, of_data=True)
        return value if is_on_hub else hub.written(os.path.abspath(value))  # noqa: PTH100 (keeps links)
    return str(value) if isinstance(value, Every) else f"{value}B" if option["parse"] is gib_size else value


def write(options: Options) -> bytes:
    """The config.yaml: first what the user chose, then the rest."""
    values = {name: value for name, value in saved(options).items() if value not in (None, [])}
    parts = [{n: v for n, v in values.items() if (n in options.chosen) is first} for first in (True, False)]
    texts = [yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=1000) * bool(part) for part in parts]
    return (FIRST + REST.join(texts)).encode()


def text_of(path: Path) -> str:
    """The text of a file of options. Raises InputError."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no file of options: {why(error)}.") from None


def read(path: Path, text: str) -> tuple[dict[str, Any], frozenset[str]]:
    """The values in the text of a file, for Options.of, and the names that a user chose. Raises InputError."""
    try:
        values, wrong = yaml.safe_load(text), "no lines such as `batch-size: 16`"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        values, wrong = None, " ".join(str(error).split())[:300]
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{path} is not YAML with options: {wrong}. Correct or restore it.")
    if not text.startswith(FIRST):
        values = aliases.translated(values, where=f"{path}: ")
        return values, frozenset(values)
    return values, frozenset(line.partition(":")[0] for line in text.partition(REST)[0].splitlines()) & FIELDS.keys()


def of_run(path: Path) -> Options | None:
    """The options of the run that wrote a model into `path`: its OUT, OUT/step-N or OUT/merged."""
    for file in (path / "config.yaml", path.absolute().parent / "config.yaml"):
        if is_own(file):
            return Options.of(read(file, text_of(file))[0], f"{file}: ")
    return None


def is_own(path: Path) -> bool:
    """Whether a file is the config.yaml of a run."""
    with suppress(InputError):
        return text_of(path).startswith(FIRST)
    return False


def changes(now: Options, before: Mapping[str, Any]) -> list[str]:
    """A line for each option that differs from `before`, which `saved` gave."""
    plain = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    words = lambda value: "not set" if value in (None, "", []) else plain(value)[:500]
    both = [(name, value, before.get(name)) for name, value in saved(now).items()]
    return [f"{flag(name)} {words(value)}, was {words(was)}" for name, value, was in both if value != was]

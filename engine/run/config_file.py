"""A run's config.yaml: `read(write(options))` gives the same options, from any folder; and flat YAML of other trainers.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

import yaml

from trireme.engine.run import aliases
from trireme.engine.run.after import hub
from trireme.engine.run.options import Every, Options, flag, gib_size, table
from trireme.models.config import InputError

FIRST = "# options of a run of trireme\n"
CHOSEN = "# chosen, or defaults of this version\n"
FIELDS = table(Options)
LARGEST = 1 << 20  # bytes of a file of options
HUB = re.compile(r"(hf://.*|[\w.-]+/[\w.-]+(@[\w.-]+)?)")


def saved(options: Options) -> dict[str, Any]:
    """The options as YAML and JSON have them: plain values, absolute paths; without those of one call."""
    kept = ((name, f) for name, f in FIELDS.items() if "call" not in f.metadata["kind"])
    return {name: _plain(f, getattr(options, name)) for name, f in kept}


def _plain(f: Field[Any], value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(f, each) for each in value]
    if isinstance(value, Every):
        return str(value)
    if value is None or value == "":
        return None
    if "path" in f.metadata["kind"]:
        return absolute(value, f.metadata["words"])
    return f"{value}B" if f.metadata["parse"] is gib_size else value


def absolute(path: str, words: str) -> str:
    """A path, a pattern or PATH:WEIGHT as absolute path; `words`, and names on the hub, as they are."""
    if re.fullmatch(words, path) or (HUB.fullmatch(path) and not Path(path.partition("/")[0]).exists()):
        return path
    return hub.written(os.path.abspath(path))  # noqa: PTH100 (keeps links)


def write(options: Options) -> bytes:
    """The config.yaml: first what was given, then the rest."""
    values = {name: value for name, value in saved(options).items() if value not in (None, [])}
    content = FIRST
    for first in (True, False):
        part = {name: value for name, value in values.items() if (name in options.given) == first}
        content += CHOSEN * (not first)
        content += yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=1000) if part else ""
    return content.encode()


def read(path: Path, text: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The values of a file, for Options.of, and lines on how another trainer's was read. `text`: its content, if it has
    been read. Raises InputError.
    """
    content = text_of(path) if text is None else text
    try:
        values = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not YAML ({' '.join(str(error).split())[:300]}). Correct or restore it.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{path} has no lines such as `batch-size: 16`.")
    return (values, []) if content.startswith(FIRST) else aliases.translated(values, f"{path}: ")


def given_in(text: str) -> frozenset[str]:
    """The names that the user chose, in the text of a run's own config.yaml."""
    lines = text.partition(CHOSEN)[0].splitlines()
    return frozenset(line.partition(":")[0] for line in lines) & FIELDS.keys()


def of_run(path: Path) -> Options | None:
    """The options of the run that wrote a model into `path`: its OUT, or OUT/best, OUT/step-N, OUT/merged."""
    for folder in (path, path.absolute().parent):
        if is_own(folder / "config.yaml"):
            values, _ = read(folder / "config.yaml")
            return Options.of(values, f"{folder / 'config.yaml'}: ")
    return None


def is_own(path: Path) -> bool:
    """Whether a file is the config.yaml of a run."""
    try:
        with path.open(errors="replace") as file:
            return file.readline() == FIRST
    except OSError:
        return False


def changes(now: Options, before: Mapping[str, Any]) -> list[str]:
    """A line for each option that differs from `before`, which `saved` gave."""
    both = [(name, value, before.get(name)) for name, value in saved(now).items()]
    return [f"{flag(name)} {_shown(value)}, was {_shown(was)}" for name, value, was in both if value != was]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return "not given" if value in (None, "") else str(value)[:500]


def text_of(path: Path) -> str:
    """The text of a file of options. Raises InputError."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise InputError(f"{path} has more than 1 MiB: it is no file of options.")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text.") from None

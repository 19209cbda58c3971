"""The card of a data set of the hub: its README.md says which files are of which split."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from trireme.models.config import InputError
from trireme.storage.untrusted import quoted, read_small, shown

CARD = "README.md"
_LARGEST = 1 << 20  # bytes
_NAMED = 4  # configurations named in a line
Splits = dict[str, list[Path]]


def splits_of(folder: Path, names: Sequence[Path]) -> Splits | None:
    """The files `names`, which are relative to `folder`, by split; None if the card does not say.

    Raises InputError if it has several configurations of which files are there, and none is the default.
    """
    found = {name: splits for name, given in _configurations(folder) if (splits := _splits(given, names))}
    usual = [name for name in found if name == "default"] or [*found]
    if len(usual) > 1:
        said = ", ".join(shown(name, 60) for name in usual[:_NAMED]) + ("" if len(usual) <= _NAMED else ", …")
        one = next(iter(found[usual[0]].values()))[0]
        way_out = f"Name the files of one: --data {quoted(folder / one)}"
        raise InputError(f"{folder / CARD} describes {len(usual)} configurations of the data: {said}. {way_out}.")
    return found[usual[0]] if usual else None


def fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the parts of a path are those of a pattern, as in glob: hidden names only where the pattern says so."""
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return fits(names, parts[1:]) or (names[0][0] != "." and fits(names[1:], parts))
    seen = names[0][0] != "." or parts[0][0] == "."
    return seen and fnmatchcase(names[0], parts[0]) and fits(names[1:], parts[1:])


def _configurations(folder: Path) -> list[tuple[str, Any]]:
    """(name, data_files) of each configuration, or of the one that is marked as the default."""
    try:
        text = read_small(folder / CARD, _LARGEST, links=True).decode()
        card = yaml.safe_load(text.split("\n---", 1)[0]) if text.startswith("---") else None
    except (OSError, ValueError, yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    configs = card.get("configs") if isinstance(card, dict) else None
    found = [each for each in configs if isinstance(each, dict)] if isinstance(configs, list) else []
    found = [each for each in found if each.get("data_files")]
    chosen = [each for each in found if each.get("default") is True] or found
    return [(str(each.get("config_name", "default")), each["data_files"]) for each in chosen]


def _splits(given: Any, names: Sequence[Path]) -> Splits:
    """data_files: patterns, which are of the split train, or objects with `split` and `path`."""
    found: Splits = {}
    for each in given if isinstance(given, list) else [given]:
        split, path = (each.get("split"), each.get("path")) if isinstance(each, dict) else ("train", each)
        for pattern in path if isinstance(path, list) else [path]:
            if isinstance(split, str) and isinstance(pattern, str):
                parts = Path(pattern).parts
                files = [name for name in names if fits(name.parts, parts) or fits(name.parts[:-1], parts)]
                found.setdefault(split, []).extend(files)
    return {split: sorted(set(files)) for split, files in found.items() if files}

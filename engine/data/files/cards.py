"""The card of a data set of the hub: its README.md says which files are of which split."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from trireme.models.config import InputError
from trireme.storage.untrusted import quoted, read_small, shown

CARD = "README.md"
_LARGEST = 1 << 19  # bytes
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first is ten times as fast
_NAMED = 4  # configurations named in a line
_MOST = 10_000_000  # comparisons of a pattern with a name
_DEEP = 2  # of `**` in a pattern: the work grows with them
_SPLIT = re.compile(r"\w[\w.-]*")  # as the library asks for
_OTHER = "others"  # a split of files whose names say nothing
Splits = dict[str, list[Path]]


def splits_of(folder: Path, names: Sequence[Path], use: Callable[[Path], str]) -> Splits | None:
    """The files `names`, which are relative to `folder`, by split; None if the card does not say.

    `use(name)`: the split that a file's name says, or "". Raises InputError if it has several configurations of which
    files are there, and none is the default; or more of them than can be looked for.
    """
    configs = _configurations(folder)
    if sum(len(_patterns(config)) for _, config in configs) * len(names) > _MOST:
        raise InputError(f"{folder / CARD} names too many patterns of files. Name the files with --data.")
    found = {name: own for name, config in configs if (own := _splits(config, names, use))}
    usual = [name for name in found if name == "default"] or [*found]
    if len(usual) > 1:
        said = ", ".join(shown(name, 60) for name in usual[:_NAMED]) + ("" if len(usual) <= _NAMED else ", …")
        splits = found[usual[0]]
        one = next((splits[split] for split in splits if use(Path(split)) == "train"), next(iter(splits.values())))[0]
        way_out = f"Name the files of one: --data {quoted(folder / one)}"
        raise InputError(f"{folder / CARD} describes {len(usual)} configurations of the data: {said}. {way_out}.")
    return found[usual[0]] if usual else None


def fits_pattern(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the parts of a path are those of a pattern, as in glob: hidden names only where the pattern says so."""
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return fits_pattern(names, parts[1:]) or (names[0][0] != "." and fits_pattern(names[1:], parts))
    seen = names[0][0] != "." or parts[0][0] == "."
    return seen and fnmatchcase(names[0], parts[0]) and fits_pattern(names[1:], parts[1:])


def _configurations(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(name, what is said of its files) of each configuration, or of the one that is marked as the default."""
    try:
        text = read_small(folder / CARD, _LARGEST, links=True).decode()
        card = yaml.load(text.split("\n---", 1)[0], _LOADER) if text.startswith("---") else None
    except (OSError, ValueError, yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError):
        return []
    configs = card.get("configs") if isinstance(card, dict) else None
    found = [each for each in configs if isinstance(each, dict)] if isinstance(configs, list) else []
    found = [each for each in found if each.get("data_files") or each.get("data_dir")]
    chosen = [each for each in found if each.get("default") is True] or found
    return [(str(each.get("config_name", "default")), each) for each in chosen]


def _patterns(config: dict[str, Any]) -> list[tuple[str, Path]]:
    """(split, pattern) of data_files: patterns, which are of the split train, or objects with `split` and `path`."""
    given, found = config.get("data_files"), list[tuple[str, Path]]()
    place: Any = config.get("data_dir") or ""
    split: Any
    pattern: Any
    for each in given if isinstance(given, list) else [given]:
        split, path = (each.get("split"), each.get("path")) if isinstance(each, dict) else ("train", each)
        for pattern in path if isinstance(path, list) else [path]:
            strings = all(isinstance(text, str) for text in (split, pattern, place))
            if strings and _SPLIT.fullmatch(split) and pattern.count("**") <= _DEEP:
                found.append((split, Path(place, pattern)))
    return found


def _splits(config: dict[str, Any], names: Sequence[Path], use: Callable[[Path], str]) -> Splits:
    """The files of a configuration: those of data_files, else all in data_dir."""
    found: Splits = {}
    place = config.get("data_dir")
    if not config.get("data_files") and isinstance(place, str):
        for name in [name for name in names if name.is_relative_to(place)]:
            found.setdefault(use(name) or _OTHER, []).append(name)
        return found
    for split, pattern in _patterns(config):
        files = [n for n in names if fits_pattern(n.parts, pattern.parts) or fits_pattern(n.parts[:-1], pattern.parts)]
        found.setdefault(split, []).extend(files)
    return {split: sorted(set(files)) for split, files in found.items() if files}

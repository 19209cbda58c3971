"""What --data names: a file, a folder of files, a pattern, a data set saved by the datasets library."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from trireme.engine.data.files.cards import CARD, Splits, fits_pattern, splits_of
from trireme.engine.data.files.sources import KINDS, TEXTS, DataFile, check_file, weighed
from trireme.engine.data.files.unpack import PACKINGS
from trireme.models.config import InputError
from trireme.storage.untrusted import parse_json, quoted, read_small, shown, why

MOST_FILES = 500  # each is held open
MOST_THERE = 500_000  # names in a folder
_ENDINGS = (*KINDS, *(f"{kind}{packing}" for kind in KINDS for packing in PACKINGS))
_NAMED = 4  # files named in a line
_WHAT = {"train": "train", "training": "train", "test": "test"}
_WHAT |= dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "valid")
_ABOUT = {"dataset_info", "dataset_infos", "dataset_dict", "state", "data_config", "metadata"}  # .json next to data


class Found(NamedTuple):
    files: list[DataFile]
    held: list[DataFile]  # that are named as validation data
    notes: list[str]


def find_data(text: str) -> Found:
    """`path` or `path:weight`; the path is a file, a folder or a pattern. Raises InputError where there is no data."""
    if not text:
        raise InputError("--data is empty. Name a file.")
    name, weight = weighed(text)
    path = Path(name)
    if path.is_dir():
        return _folder(path, weight)
    if "://" in name:
        raise InputError(f"{name} is not a file here. Download it first: curl -LO {name}.")
    if glob.has_magic(name) and not path.exists():
        return _matching(path, weight)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and DataFile(path).kind not in KINDS and not path.parent.exists():
        raise InputError(
            f"{name} is not a file here. If it is a dataset of the Hugging Face hub, download it, and name its files: "
            f"hf download {name} --repo-type dataset --local-dir {path.name}"
        )
    return Found(_sources([path], name, weight), [], [])


def _matching(pattern: Path, weight: float) -> Found:
    """The files of a pattern. Raises InputError where there are none, or `**` finds too many."""
    unread, what = list[str](), "matches no file"
    if "**" in pattern.parts:
        what += f" of {', '.join(KINDS)}"
        before = pattern.parts.index("**")
        parts, roots = pattern.parts[before:], sorted(glob.glob(str(Path(*pattern.parts[:before]))))  # noqa: PTH207
        hidden = any(part.startswith(".") for part in parts)
        there, linked, closed = _walked([root for root in roots if Path(root).is_dir()], pattern, hidden)
        fits = lambda path: any(
            fits_pattern(path.relative_to(root).parts, parts) for root in roots if path.is_relative_to(root)
        )
        files = sorted((path for path in there if path.is_file() and fits(path)), key=str)  # as glob's below
        unread = _not_walked(linked, closed)
    else:
        matches = sorted(glob.glob(str(pattern)))  # noqa: PTH207
        files = [Path(found) for found in matches if Path(found).is_file()]
    if not files:
        raise InputError(f"{'; '.join([f'{pattern} {what}', *unread])}. Correct the path.")
    lacks = missing_parts(files)
    notes = [f"{pattern} lacks {_list(lacks)}: parts of a set"] if lacks else []
    return Found(_sources(files, str(pattern), weight), [], notes + [f"{pattern}: {what}" for what in unread])


def _not_walked(linked: Sequence[Path], closed: Sequence[Path], folder: Path | None = None) -> list[str]:
    found = [f"not read, as they are links to folders: {_list(linked, folder)}"] if linked else []
    return found + ([f"not read, as they may not be opened: {_list(closed, folder)}"] if closed else [])


def _sources(files: Sequence[Path], name: str, weight: float) -> list[DataFile]:
    """Texts are one source, other files one each. Raises InputError."""
    for path in files:
        check_file(path)
    texts = tuple(path for path in files if DataFile(path).kind in TEXTS)
    others = [path for path in files if DataFile(path).kind not in TEXTS]
    if len(others) > MOST_FILES:
        raise InputError(f"{name}: {len(others):,} files, the most is {MOST_FILES}. Join them into fewer.")
    found = [DataFile(path, weight) for path in others]
    if len(texts) > 1:
        found.append(DataFile(Path(name), weight, texts, f"{name} ({len(texts):,} texts)"))
    return found + [DataFile(path, weight) for path in texts[:1] if len(texts) == 1]


# ---------------------------------------------------------------- folders


def _folder(folder: Path, weight: float) -> Found:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _saved(folder, weight)
    if (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file():
        raise InputError(f"{folder} is a checkpoint, not data. Name a file or folder of rows with --data.")
    there, linked, closed = _walked([str(folder)], folder)  # links are not followed: they may lead anywhere
    sizes = {path: _size(path) for path in there}
    empty = [path for path in there if not sizes[path]]
    there = [path for path in there if sizes[path]]
    by_use, inside = by_uses([path.relative_to(folder) for path in there])
    unread = [f"empty: {_list(empty, folder)}"] if empty else []
    unread += _not_walked(linked, closed, folder)
    if not inside:
        said = "; ".join([f"{folder} is a folder without data", *unread])
        raise InputError(f"{said}. Expected files of {', '.join(KINDS)}.")
    splits = splits_of(folder, inside, _use)
    by_use = _by_splits(folder, splits) if splits else by_use
    by_use = {use: [folder / path for path in paths] for use, paths in by_use.items()}
    train = by_use["train"] or by_use[""]
    if not train:
        only = sorted(path for paths in by_use.values() for path in paths)
        raise InputError(f"{folder} holds no training data, only {_list(only)}. Name one with --data.")
    _check_twice(train)
    if not splits:
        _check_splits(by_use["train"])
    left = sorted({folder / path for path in inside} - {*train, *by_use["valid"]})
    notes = [f"{folder}: not read: {_list(left, folder)}"] if left else []
    notes += [f"{folder}: {each}" for each in unread]
    if parts := missing_parts([*train, *by_use["valid"]]):
        raise InputError(f"{folder} lacks {_list(parts, folder)}. Download it again, or name the files that are there.")
    held = _sources(by_use["valid"], str(folder), 1.0) if by_use["valid"] else []
    return Found(_sources(train, str(folder), weight), held, notes)


def _walked(folders: Sequence[str], shown: Path, hidden: bool = False) -> tuple[list[Path], list[Path], list[Path]]:
    """Below `folders`: files of data, links to folders, folders that cannot be opened. `hidden`: in hidden ones, too.

    Raises InputError, about `shown`, where there are more than MOST_THERE names.
    """
    found, linked, closed, seen = list[str](), list[str](), list[str](), 0
    waiting = [*folders]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                inside = [(entry.path, entry.name, _is_folder(entry), entry.is_symlink()) for entry in entries]
        except OSError:
            closed.append(place)
            continue
        seen += len(inside)
        if seen > MOST_THERE:
            many = f"holds more than {MOST_THERE:,} files and folders, some of them in {place}"
            raise InputError(f"{shown} {many}. Name the folder of the data, or join texts into fewer files.")
        waiting += [
            path for path, name, is_folder, link in inside if is_folder and not link and (hidden or name[0] != ".")
        ]
        linked += [path for path, _, is_folder, link in inside if is_folder and link]
        found += [path for path, name, is_folder, _ in inside if not is_folder and name.lower().endswith(_ENDINGS)]
    data, links, shut = (sorted(map(Path, paths)) for paths in (found, linked, closed))
    return data, links, shut


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """False of a link that cannot be followed."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _size(path: Path) -> int:
    """1 of what cannot be opened, which check_file says."""
    try:
        return path.stat().st_size
    except OSError:
        return 1


def by_uses(names: Sequence[Path]) -> tuple[dict[str, list[Path]], list[Path]]:
    """Data files by use (train, valid, test, or "": not said), texts only without tables; and all of any kind of data.

    `names`: relative to their folder.
    """
    inside = [path for path in names if DataFile(path).kind in KINDS]
    inside = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    inside = [path for path in inside if not (path.suffix == ".json" and path.stem in _ABOUT)]
    by_use: dict[str, list[Path]] = {"train": [], "valid": [], "test": [], "": []}
    for path in [path for path in inside if DataFile(path).kind not in TEXTS] or inside:
        by_use[_use(path)].append(path)
    return by_use, inside


def _by_splits(folder: Path, splits: Splits) -> dict[str, list[Path]]:
    """As by_uses, by what the card of a data set says. Raises InputError where several splits are for training."""
    by_use: dict[str, list[Path]] = {"train": [], "valid": [], "test": [], "": []}
    uses = {split: _use(Path(split)) for split in splits} if len(splits) > 1 else dict.fromkeys(splits, "train")
    train = [split for split, use in uses.items() if use == "train"] or [s for s, use in uses.items() if not use]
    if len(train) > 1:
        one = quoted(folder / splits[train[0]][0])
        said = ", ".join(shown(split, 60) for split in train[:_NAMED])
        raise InputError(f"{folder} holds {len(train)} splits to train on, by {CARD}: {said}. Name one: --data {one}.")
    for split, paths in splits.items():
        by_use["train" if split in train else uses[split]] += paths
    return by_use


def _use(path: Path) -> str:
    """What a file in a folder is for, by a word of its name, or by the name of its folder: train, valid, test or ""."""
    stem = Path(set_of(path)).name.lower()
    words = re.split(r"[-_ ]", stem)
    names = [words[0], words[-1], *(part.lower() for part in reversed(path.parts[:-1]))]
    return next((_WHAT[name] for name in names if name in _WHAT), "")


def set_of(path: Path) -> str:
    """What the parts of a set, NAME-00000-of-00002.parquet, have in common: folder and name."""
    return str(path.with_name(re.sub(r"-\d+-of-\d+(-[0-9a-f]{16})?$", "", path.name.partition(".")[0])))


def missing_parts(files: Sequence[Path]) -> list[Path]:
    """Parts that are missing from sets of numbered files, NAME-00000-of-00002.parquet."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for path in files:
        if match := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\..*)", path.name):
            before, number, of, total, after = match.groups()
            sets.setdefault((str(path.with_name(before)), of + total, after), set()).add(int(number))
    missing = []
    for (before, of, after), numbers in sets.items():
        width, total = len(of) - len("-of-"), int(of[len("-of-") :])
        first = 0 if 0 in numbers or total not in numbers else 1  # some count from 1
        places = range(first, min(total, MOST_FILES) + first)
        missing += [Path(f"{before}{i:0{width}}{of}{after}") for i in places if i not in numbers]
    return missing


def _check_twice(files: Sequence[Path]) -> None:
    """Raises InputError where the same data may be there in two formats."""
    stem = lambda path: path.with_name(path.name.partition(".")[0])
    for _, group in groupby(sorted(files, key=stem), key=stem):
        same = list(group)
        if len({DataFile(path).kind for path in same}) > 1:
            raise InputError(
                f"{same[0].parent} holds {_list(same)}: the same rows twice? Name files, each with --data."
            )


def _check_splits(files: Sequence[Path]) -> None:
    """Raises InputError where files for training are of several splits of a data set, which may hold the same rows.

    They are called as the hub has them: train_sft-00000-of-00001.parquet next to train_gen-00000-of-00001.parquet.
    """
    parts = [path for path in files if set_of(path) != str(path.with_name(path.name.partition(".")[0]))]
    place = lambda path: path.parent
    for folder, group in groupby(sorted(parts, key=place), key=place):
        if len(splits := sorted({set_of(path) for path in group})) > 1:
            said = ", ".join(shown(Path(split).name, 60) for split in splits[:_NAMED])
            one = quoted(Path(f"{splits[0]}-*"))
            raise InputError(f"{folder} holds {len(splits)} splits to train on: {said}. Name one: --data {one}.")


def _list(files: Sequence[Path], folder: Path | None = None) -> str:
    names = [str(path.relative_to(folder)) if folder else path.name for path in files[:_NAMED]]
    return ", ".join(names) + (f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else "")


# ---------------------------------------------------------------- datasets.save_to_disk


def _saved(folder: Path, weight: float) -> Found:
    if not (folder / "dataset_dict.json").is_file():
        return Found(_shards(folder, weight), [], [])
    splits = _json(folder / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not all(isinstance(s, str) and Path(s).name == s for s in splits) or not splits:
        raise InputError(f"{folder / 'dataset_dict.json'} names no splits. Name a folder of {folder} with --data.")
    uses = {split: _use(Path(split)) for split in splits}
    train = [split for split in splits if uses[split] == "train"] or [split for split in splits if not uses[split]]
    if len(train) != 1:
        raise InputError(f"{folder} holds {', '.join(splits)}. Name one: --data {quoted(folder / splits[0])}.")
    held = [file for split in splits if uses[split] == "valid" for file in _shards(folder / split, 1.0)]
    left = [split for split in splits if split not in train and uses[split] != "valid"]
    notes = [f"{folder}: not read: {', '.join(left)}"] if left else []
    return Found(_shards(folder / train[0], weight), held, notes)


def _shards(folder: Path, weight: float) -> list[DataFile]:
    """The Arrow files of a saved data set. Raises InputError."""
    state = _json(folder / "state.json")
    chosen = state.get("_indices_files") or state.get("_indices_data_files")
    given = state.get("_data_files")
    files = [file.get("filename") for file in given if isinstance(file, dict)] if isinstance(given, list) else []
    names = [name for name in files if isinstance(name, str) and Path(name).name == name]
    if chosen or not names or len(names) != len(files):
        raise InputError(
            f"{folder}: a data set saved in a form that is not read. Write it as Parquet: "
            f"datasets.load_from_disk('{folder}').to_parquet('data.parquet')"
        )
    for name in names:
        check_file(folder / name)
    return [DataFile(folder / name, weight) for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        return parse_json(read_small(path, links=True), path.name)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {why(error)}. Save the data set again.") from None

"""What --data names: a file, a folder, a pattern, a data set saved by the datasets library, standard input."""

from __future__ import annotations

import glob
import os
import re
import select
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import yaml

from trireme.engine.data.read import (
    COLUMNS,
    DAMAGES,
    KINDS,
    LINES,
    PACKINGS,
    SEPARATOR,
    STDIN,
    TEXTS,
    Row,
    check_file,
    documents,
    file_kind,
    holds_lines,
    json_lines,
    json_values,
    unpacked,
)
from trireme.engine.data.tables import column_rows, csv_rows
from trireme.models.config import InputError
from trireme.storage.untrusted import parse_json, quoted, read_small, shown, why

MOST_FILES = 500  # each is held open
MOST_NAMES = 500_000  # in a folder
MOST_WEIGHT = 1000  # each repeat takes memory
_NAMED = 4  # names in a line
_USES = {"train": "train", "training": "train", "test": "test"}
_USES |= dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "valid")
_ABOUT = {"dataset_info", "dataset_infos", "dataset_dict", "state", "data_config", "metadata"}  # .json next to data
_PAGES = {"readme", "license", "licence", "changelog", "contributing", "notice", "code_of_conduct", "requirements"}
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first is ten times as fast
_CARD, _LARGEST = "README.md", 1 << 19  # bytes


@dataclass(frozen=True)
class DataFile:
    """Files that are read as one. With a weight of 2 an epoch has each row twice, with 0.5 half of the rows."""

    path: Path  # a file, or what names `parts`
    weight: float = 1.0
    parts: tuple[Path, ...] = ()  # texts
    shown: str = ""  # instead of the path

    @property
    def files(self) -> tuple[Path, ...]:
        return self.parts or (self.path,)

    @property
    def kind(self) -> str:
        return file_kind(self.files[0])

    @property
    def is_table(self) -> bool:
        """Whether texts may hold JSON, since cells have no lists."""
        return self.kind in (".csv", ".tsv", *COLUMNS)

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def __str__(self) -> str:
        return self.shown or str(self.path)


class Found(NamedTuple):
    files: list[DataFile]
    held: list[DataFile]  # that are named as validation data
    notes: list[str]


def find(text: str) -> Found:
    """The files of `path` or `path:weight`; the path is a file, a folder or a pattern. Reads no rows. Raises InputError
    where there is no data.
    """
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
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and file_kind(path) not in KINDS and not path.parent.exists():
        raise InputError(
            f"{name} is not a file here. If it is a dataset of the Hugging Face hub, download it, and name its files: "
            f"hf download {name} --repo-type dataset --local-dir {path.name}"
        )
    return Found(_sources([path], name, weight), [], [])


def weighed(text: str) -> tuple[str, float]:
    """(path, weight) of `path` or `path:weight`. Raises InputError."""
    match = re.fullmatch(r"(.+):(\d*\.?\d+)", text)
    path, weight = (match[1], float(match[2])) if match and not Path(text).exists() else (text, 1.0)
    if weight <= 0:
        raise InputError(f"{text}: the weight is 0, so no row would be used. Leave the file out.")
    if weight > MOST_WEIGHT:
        raise InputError(f"{text}: the weight is more than {MOST_WEIGHT:,}. Lower it; --epochs sees all files again.")
    return path, weight


def spool(stream: BinaryIO, folder: Path) -> DataFile:
    """Standard input as a file in `folder`; a file that is there already is used. Raises InputError."""
    path = next(iter(sorted(folder.glob("stdin.*"))), None)
    if path is None:
        if stream.isatty():
            raise InputError("--data -: nothing is piped into standard input.")
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / "stdin"
        with scratch.open("wb") as file:
            for part in _parts(stream.fileno()):
                file.write(part)
        if not scratch.stat().st_size:
            raise InputError("--data -: standard input is empty. Pipe the data into it, or name a file.")
        with scratch.open("rb") as file:
            start = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        path = folder / ("stdin.jsonl" if start in (b"{", b"[") else "stdin.txt")
        scratch.rename(path)
    check_file(path, piped=True)
    return DataFile(path, shown=STDIN)


def _parts(pipe: int) -> Iterator[bytes]:
    """Yields bytes until the end. No wait is longer than a second, since a signal that arrives just before a read is
    handled only after it.
    """
    while True:
        if select.select([pipe], [], [], 1.0)[0]:
            part = os.read(pipe, 1 << 20)
            if not part:
                return
            yield part


def _sources(files: Sequence[Path], name: str, weight: float) -> list[DataFile]:
    """Texts are one source, other files one each. Raises InputError."""
    for path in files:
        check_file(path)
    texts = tuple(path for path in files if file_kind(path) in TEXTS)
    others = [DataFile(path, weight) for path in files if file_kind(path) not in TEXTS]
    if len(others) > MOST_FILES:
        raise InputError(f"{name}: {len(others):,} files, the most is {MOST_FILES}. Join them into fewer.")
    if len(texts) > 1:
        return [*others, DataFile(Path(name), weight, texts, f"{name} ({len(texts):,} texts)")]
    return others + [DataFile(path, weight) for path in texts]


# ---------------------------------------------------------------- folders and patterns


def _matching(pattern: Path, weight: float) -> Found:
    """The files of a pattern; `**` stands for any folders. Raises InputError where there are none."""
    if "**" in pattern.parts:
        at = pattern.parts.index("**")
        roots = [root for root in map(Path, glob.glob(str(Path(*pattern.parts[:at])))) if root.is_dir()]  # noqa: PTH207
        there = [(path, path.relative_to(root).parts) for root in roots for path in _walked(root)[0]]
        files = sorted({path for path, parts in there if fits_pattern(parts, pattern.parts[at:])})
    else:
        files = [Path(path) for path in sorted(glob.glob(str(pattern))) if Path(path).is_file()]  # noqa: PTH207
    if not files:
        raise InputError(f"{pattern} matches no file of {', '.join(KINDS)}. Correct the path.")
    notes = [f"{pattern} lacks {_list(lacks)}: parts of a set" for lacks in [missing_parts(files)] if lacks]
    return Found(_sources(files, str(pattern), weight), [], notes)


def fits_pattern(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the parts of a path are those of a pattern, as in glob."""
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return fits_pattern(names, parts[1:]) or fits_pattern(names[1:], parts)
    return fnmatchcase(names[0], parts[0]) and fits_pattern(names[1:], parts[1:])


def _folder(folder: Path, weight: float) -> Found:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _saved(folder, weight)
    if (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file():
        raise InputError(f"{folder} is a checkpoint, not data. Name a file or folder of rows with --data.")
    there, others = _walked(folder)
    names = [path.relative_to(folder) for path in there]
    by_use, inside = by_uses(names, _uses_of_card(folder, names))
    train, held = by_use["train"] or by_use[""], by_use["valid"]
    others.update(file_kind(path) for path in {*names} - {*inside})
    unread = sorted({*inside} - {*train, *held})
    skipped = [*([_list(unread)] if unread else []), *(f"{n:,} {kind}" for kind, n in others.most_common())]
    listed = ", ".join(skipped[:_NAMED]) + (", …" if len(skipped) > _NAMED else "")
    if not train:
        what = f"no training data, only {listed}" if skipped else "no data"
        raise InputError(f"{folder} holds {what}. Expected files of {', '.join(KINDS)}: name one with --data.")
    _check_once(folder, train, by_use["train"])
    if parts := missing_parts([*train, *held]):
        raise InputError(f"{folder} lacks {_list(parts)}. Download it again, or name the files that are there.")
    sources = [_sources([folder / path for path in paths], str(folder), weight) for paths in (train, held) if paths]
    return Found(sources[0], sources[1] if held else [], [f"{folder}: not read: {listed}"] if skipped else [])


def _walked(folder: Path) -> tuple[list[Path], Counter[str]]:
    """(files of data below a folder, how many others there are of each kind). Links to folders may lead anywhere and
    are not followed, hidden folders are not entered. Raises InputError where there are too many names.
    """
    data, others, waiting, names = list[Path](), Counter[str](), [str(folder)], 0
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                inside = [(Path(e.path), e.is_dir(follow_symlinks=False)) for e in entries if e.name[0] != "."]
        except OSError:
            others["folders that cannot be opened"] += 1
            continue
        names += len(inside)
        if names > MOST_NAMES:
            raise InputError(
                f"{folder} holds more than {MOST_NAMES:,} files and folders, some of them in {place}. Name the folder "
                "of the data, or join texts into fewer files."
            )
        for path, is_folder in inside:
            kind = file_kind(path) or "files without a suffix"
            if is_folder:
                waiting.append(str(path))
            elif path.is_dir():
                others["links to folders"] += 1
            elif kind not in KINDS or _is_empty(path):
                others[kind if kind not in KINDS else f"empty {kind}"] += 1
            else:
                data.append(path)
    return sorted(data), others


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False  # opening it says what is wrong


Uses = dict[str, list[Path]]


def by_uses(names: Sequence[Path], said: Mapping[Path, str] | None = None) -> tuple[Uses, list[Path]]:
    """Data files by use (train, valid, test, or "": not known), texts only without tables; and all files of data, which
    pages such as a README are not. `names`: relative to their folder. `said`: uses of files, of others there is none.
    """
    inside = [path for path in names if file_kind(path) in KINDS and not any(part[0] == "." for part in path.parts)]
    inside = [path for path in inside if not (path.suffix == ".json" and path.stem in _ABOUT)]
    inside = [path for path in inside if not (file_kind(path) in TEXTS and path.stem.lower() in _PAGES)]
    by_use: Uses = {"train": [], "valid": [], "test": [], "": []}
    for path in [path for path in inside if file_kind(path) not in TEXTS] or inside:
        by_use[said.get(path, "test") if said else _use(path)].append(path)
    return by_use, inside


def _use(path: Path) -> str:
    """What a file in a folder is for, by a word of its name, or by the name of its folder: train, valid, test or ""."""
    words = re.split(r"[-_ ]", Path(set_of(path)).name.lower())
    names = [words[0], words[-1], *(part.lower() for part in reversed(path.parts[:-1]))]
    return next((_USES[name] for name in names if name in _USES), "")


def set_of(path: Path) -> str:
    """What the parts of a set, NAME-00000-of-00002.parquet, have in common: folder and name."""
    return str(path.with_name(re.sub(r"-\d+-of-\d+(-[0-9a-f]{16})?$", "", path.name.partition(".")[0])))


def missing_parts(files: Sequence[Path]) -> list[Path]:
    """Parts that are missing from sets of numbered files, NAME-00000-of-00002.parquet."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for path in files:
        if match := re.fullmatch(r"(.*-)(\d+)(-of-\d+)(\..*)", path.name):
            before, number, of, after = match.groups()
            sets.setdefault((str(path.with_name(before)), of, after), set()).add(int(number))
    missing = []
    for (before, of, after), numbers in sets.items():
        total = int(of[len("-of-") :])
        first = 0 if 0 in numbers or total not in numbers else 1  # some count from 1
        absent = (i for i in range(first, min(total, MOST_FILES) + first) if i not in numbers)
        missing += [Path(f"{before}{i:0{len(of) - len('-of-')}}{of}{after}") for i in absent]
    return missing


def _check_once(folder: Path, files: Sequence[Path], train: Sequence[Path]) -> None:
    """Raises InputError where the same rows may be there twice: in two formats, or in several splits for training,
    which the hub calls train_sft-00000-of-00001.parquet and train_gen-00000-of-00001.parquet.
    """
    whole = lambda path: str(path.with_name(path.name.partition(".")[0]))
    twice = sorted({(whole(path), file_kind(path)) for path in files})
    for (name, kind), (other, again) in pairwise(twice):
        if name == other:
            raise InputError(f"{folder} holds {name}{kind} and {again}: the same rows twice? Name files with --data.")
    sets = sorted({(str(path.parent), set_of(path)) for path in train if set_of(path) != whole(path)})
    for (place, name), (other, again) in pairwise(sets):
        if place == other:
            one = quoted(folder / f"{name}-*")
            raise InputError(f"{folder} holds several splits to train on: {name}, {again}. Name one: {one}.")


def _list(files: Sequence[Path]) -> str:
    names = [shown(str(path)) for path in files[:_NAMED]]
    return ", ".join(names) + (f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else "")


# ---------------------------------------------------------------- data sets with a card, or saved by the library


def _uses_of_card(folder: Path, names: Sequence[Path]) -> dict[Path, str]:
    """The use of each file, as the card of a data set says; {} if it says nothing. Raises InputError if it describes
    several configurations, of which none is the default, or several splits for training.
    """
    try:
        text = read_small(folder / _CARD, _LARGEST, links=True).decode()
        card = yaml.load(text.split("\n---", 1)[0], _YAML) if text.startswith("---") else None
    except (OSError, ValueError, yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError):
        return {}
    configs = card.get("configs") if isinstance(card, dict) else None
    every = [each for each in configs if isinstance(each, dict)] if isinstance(configs, list) else []
    every = [each for each in every if each.get("default") is True] or every
    result = {str(each.get("config_name", "default")): _splits_of(each, names) for each in every[:1000]}
    result = {name: splits for name, splits in result.items() if splits}
    splits = result.get("default") or next(iter(result.values()), {})
    uses = {split: _use(Path(split)) if len(splits) > 1 else "train" for split in splits}
    train = [split for split in uses if uses[split] == "train"] or [split for split in uses if not uses[split]]
    configurations = [] if "default" in result else [*result]
    for what, several in (("configurations", configurations), ("splits to train on", train)):
        if len(several) > 1:
            listed = ", ".join(map(shown, several[:_NAMED]))
            way_out = f"Name the files of one: --data {quoted(folder / next(iter(splits.values()))[0])}"
            raise InputError(f"{folder / _CARD} has {len(several)} {what}: {listed}. {way_out}.")
    return {path: "train" if split in train else uses[split] for split in splits for path in splits[split]}


def _splits_of(config: dict[str, Any], names: Sequence[Path]) -> dict[str, list[Path]]:
    """The files of a configuration by split: of data_files, patterns, or objects with `split` and `path`."""
    entries, result = config.get("data_files"), dict[str, list[Path]]()
    for each in entries if isinstance(entries, list) else [entries]:
        split, path = (each.get("split"), each.get("path")) if isinstance(each, dict) else ("train", each)
        for pattern in path if isinstance(path, list) else [path]:
            if isinstance(pattern, str) and isinstance(split, str) and pattern.count("**") < 3:
                parts = Path(str(config.get("data_dir") or ""), pattern).parts
                fits = lambda name, parts=parts: fits_pattern(name.parts, parts) or fits_pattern(name.parts[:-1], parts)
                result[split] = sorted({*result.get(split, []), *filter(fits, names)})
    return {split: files for split, files in result.items() if files}


def _saved(folder: Path, weight: float) -> Found:
    """A data set of datasets.save_to_disk."""
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
    return Found(_shards(folder / train[0], weight), held, [f"{folder}: not read: {', '.join(left)}"] if left else [])


def _shards(folder: Path, weight: float) -> list[DataFile]:
    """The Arrow files of a saved data set. Raises InputError."""
    state = _json(folder / "state.json")
    entries: Any = state.get("_data_files")
    files = [file for file in entries if isinstance(file, dict)] if isinstance(entries, list) else []
    names = [str(file.get("filename")) for file in files]
    plain = names and all(Path(name).name == name for name in names)
    if state.get("_indices_files") or state.get("_indices_data_files") or not plain:
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


# ---------------------------------------------------------------- rows


class Rows:
    """The rows of files that are read one after another. `most`: rows of each file, the first ones.

    `position` of `size` bytes are read; `unit` is what Row.number counts, "line" or "row". Reading raises InputError.
    """

    def __init__(self, paths: Sequence[Path], most: int | None = None, separators: Sequence[str] = ()):
        self.size, self.unit = sum(path.stat().st_size for path in paths), "line"
        self._paths, self._most, self._separators = paths, most, {SEPARATOR, *separators}
        self._done = 0
        self._raw: BinaryIO | None = None

    @property
    def position(self) -> int:
        return self._done + (self._raw.tell() if self._raw and not self._raw.closed else 0)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for path in self._paths:
            for row in self._rows(path):
                number += row.starts
                if self._most is not None and number > self._most:
                    return
                yield row
            self._done += path.stat().st_size

    def _rows(self, path: Path) -> Iterator[Row]:
        try:
            lines = holds_lines(path)
            with path.open("rb") as raw:
                self._raw = raw
                yield from self._parsed(path, unpacked(path, raw), lines)
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 ({error.reason}). Convert it with iconv.") from None
        except DAMAGES as error:
            if getattr(error, "errno", None) or path.suffix.lower() not in PACKINGS:
                raise
            what = " ".join(str(error).split())
            raise InputError(f"{path} is a damaged {path.suffix} ({what}). Download it again.") from None

    def _parsed(self, path: Path, file: BinaryIO, lines: bool) -> Iterator[Row]:
        kind = file_kind(path)
        if kind in COLUMNS or (kind in (*LINES, ".json") and not lines):
            self.unit = "row"
        if kind in COLUMNS:
            return column_rows(path, file, kind == ".arrow")
        if kind in (".csv", ".tsv"):
            return csv_rows(path, file, kind == ".tsv")
        if kind in TEXTS:
            return documents(path, file, self._separators)
        return json_lines(file) if lines else json_values(path, file)

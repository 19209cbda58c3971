"""What --data names: a file, a folder, a pattern, standard input."""

from __future__ import annotations

import glob
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trireme.engine.data import read
from trireme.engine.data.read import COLUMNS, KINDS, OBJECTS, TEXTS, Row, check_file, file_kind
from trireme.engine.data.tables import column_rows, csv_rows
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

MOST_FILES = 500  # each is held open
MOST_WEIGHT = 1000  # each repeat takes memory
_NAMED = 6  # names in a line
_PART = r"-\d+-of-(\d+)"  # in the name of a part of a set
_USES = {"train": "train", "training": "train", "test": "test"}
_USES |= dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "valid")
_BESIDE = re.compile(  # pages, and what the datasets library writes next to its data
    r"(readme|licen[sc]e|changelog|contributing|notice|code_of_conduct|requirements)\.(md|txt)"
    r"|(dataset_infos?|dataset_dict|state|data_config|metadata)\.json|cache-.*\.arrow",
    re.IGNORECASE,
)


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


class Sources(NamedTuple):
    """What a value of --data names. `notes`: sentences on what was not read."""

    files: list[DataFile]
    held_out: list[DataFile]  # that are named as validation data
    notes: list[str]


def find(text: str) -> Sources:
    """The files of `path` or `path:weight`; the path is a file, a folder or a pattern. Reads no rows. Raises InputError
    where there is no data.
    """
    name, weight = weighed(text)
    path = Path(name)
    if path.is_dir():
        return _folder(path, weight)
    magic = glob.has_magic(name) and not path.exists()
    files, unread = _sift(Path(path.anchor), str(path.relative_to(path.anchor))) if magic else ([path], Counter())
    return Sources(_sources(files, name, weight), [], _unread(name, [], unread))


def weighed(text: str) -> tuple[str, float]:
    """(path, weight) of `path` or `path:weight`. Raises InputError."""
    match = re.fullmatch(r"(.+):(\d*\.?\d+)", text)
    path, weight = (match[1], float(match[2])) if match and not Path(text).exists() else (text, 1.0)
    if not text or not 0 < weight <= MOST_WEIGHT:
        raise InputError(
            f"--data {text!r}: expected FILE, or FILE:WEIGHT, with a weight above 0 and at most {MOST_WEIGHT:,}."
        )
    return path, weight


def spool(stream: BinaryIO, folder: Path) -> DataFile:
    """Standard input as a file in `folder`; a file that is there already is used. Raises InputError."""
    path = next(iter(sorted(folder.glob("stdin.*"))), None)
    if path is None:
        if stream.isatty():
            raise InputError("--data -: nothing is piped into standard input.")
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / "stdin"
        with scratch.open("w+b") as file:
            shutil.copyfileobj(stream, file)
            file.seek(0)
            is_json = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")
        check_file(scratch, piped=True)
        path = scratch.rename(folder / f"stdin.{'jsonl' if is_json else 'txt'}")
    return DataFile(path, shown=read.STDIN)


def _sources(files: Sequence[Path], name: str, weight: float) -> list[DataFile]:
    """Texts are one source, other files one each. Raises InputError, also if there are none or too many."""
    if "://" in name:
        raise InputError(f"{name} is not a file here. Download it first: curl -LO {name}.")
    for path in files:
        check_file(path)
    texts = tuple(path for path in files if file_kind(path) in TEXTS)
    sources = [DataFile(path, weight) for path in files if len(texts) < 2 or file_kind(path) not in TEXTS]
    if len(texts) > 1:
        sources.append(DataFile(Path(name), weight, texts, f"{name} ({len(texts):,} texts)"))
    if not 0 < len(sources) <= MOST_FILES:
        problem = f"{len(sources):,} files to train on, expected 1 to {MOST_FILES} of {', '.join(KINDS)}"
        raise InputError(f"{name}: {problem}. Name one file, or join them into fewer.")
    return sources


# ---------------------------------------------------------------- folders and patterns


def _folder(folder: Path, weight: float) -> Sources:
    paths, unread = _sift(folder, "**/*")
    by_use, data = by_uses([path.relative_to(folder) for path in paths])
    train, held_out = by_use["train"] or by_use[""], by_use["valid"]
    unread.update(file_kind(path) for path in paths if path.relative_to(folder) not in data)
    files = _sources([folder / name for name in train], str(folder), weight)
    valid = _sources([folder / name for name in held_out], str(folder), weight) if held_out else []
    _check_sets(folder, train)
    left = [path for path in data if path not in train and path not in held_out]
    return Sources(files, valid, _unread(str(folder), left, unread))


def _sift(root: Path, pattern: str) -> tuple[list[Path], Counter[str]]:
    """(files of data that match, how many others there are of each kind). Names that begin with a dot are left out
    unless the pattern has them. `**` does not follow links to folders, which may lead anywhere.
    """
    data, unread, named = list[Path](), Counter[str](), Path(pattern).parts
    for path in sorted(root.glob(pattern)):
        hidden = any(part[0] == "." and part not in named for part in path.relative_to(root).parts)
        if hidden or path.is_dir():
            continue
        kind = file_kind(path) or "files without a suffix"
        if kind in KINDS and not (path.exists() and path.stat().st_size == 0):
            data.append(path)
        else:
            unread[f"empty {kind}" if kind in KINDS else kind] += 1
    return data, unread


def by_uses(names: Sequence[Path]) -> tuple[dict[str, list[Path]], list[Path]]:
    """Data files by use (train, valid, test, or "": not known), texts only without tables; and all files of data.
    `names`: relative to their folder.
    """
    data = [path for path in names if file_kind(path) in KINDS and not _BESIDE.fullmatch(path.name)]
    by_use: dict[str, list[Path]] = {"train": [], "valid": [], "test": [], "": []}
    for path in [path for path in data if file_kind(path) not in TEXTS] or data:
        by_use[_use(path)].append(path)
    return by_use, data


def _use(path: Path) -> str:
    """What a file in a folder is for, train, valid, test or "", by the first or last word of its name, else of one of
    its folders'.
    """
    for name in (Path(set_of(path)).name, *reversed(path.parts[:-1])):
        words = re.split(r"[-_ ]", name.lower())
        if use := _USES.get(words[0]) or _USES.get(words[-1]):
            return use
    return ""


def set_of(path: Path) -> str:
    """What the parts of a set, NAME-00000-of-00002.parquet, have in common: folder and name."""
    return str(path.with_name(re.sub(_PART + r"(-[0-9a-f]{16})?$", "", path.name.partition(".")[0])))


def _check_sets(folder: Path, files: Sequence[Path]) -> None:
    """Raises InputError where rows would be missing or trained twice: part 1 of 2 alone, a set in two formats, or
    several splits to train on, such as train_sft-00000-of-00001.parquet and train_gen-00000-of-00001.parquet.
    """
    sets, splits, fault = defaultdict[str, list[Path]](list), set[str](), ""
    for path in files:
        sets[set_of(path)].append(path)
    for name, paths in sets.items():
        part = re.search(_PART, paths[0].name)
        splits |= {Path(name).name} if part and _use(paths[0]) == "train" else set()
        lacks, twice = part and len(paths) < int(part[1]), len({file_kind(path) for path in paths}) > 1
        if lacks or twice:
            fault = f"{'a part is missing of' if lacks else 'there are two formats of'} {shown(name)}"
    if len(splits) > 1:
        fault = f"several splits to train on: {', '.join(sorted(splits))}"
    if fault:
        raise InputError(f"{folder}: {fault}. Name the files to read with --data.")


def _unread(name: str, files: Sequence[Path], unread: Mapping[str, int]) -> list[str]:
    """A note on what is not read: counts of other files by kind, and these files."""
    left = [*(f"{n:,} {kind}" for kind, n in sorted(unread.items())), *(shown(str(path)) for path in files)]
    return [f"{name}: not read: {', '.join(left[:_NAMED])}{', …' if len(left) > _NAMED else ''}"] if left else []


# ---------------------------------------------------------------- rows


class FileRows:
    """The rows of files that are read one after another. `most`: rows of each file, the first ones.

    `position` of `size` bytes are read; `unit` is what Row.number counts, "line" or "row". Reading raises InputError.
    """

    def __init__(self, paths: Sequence[Path], most: int | None = None):
        self.size, self.unit = sum(path.stat().st_size for path in paths), "line"
        self._paths, self._most, self._done = paths, most, 0
        self._raw: BinaryIO | None = None

    @property
    def position(self) -> int:
        return self._done + (self._raw.tell() if self._raw and not self._raw.closed else 0)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for path in self._paths:
            last = 0
            try:
                for row in self._rows(path):
                    number, last = number + row.starts, row.number
                    if self._most is not None and number > self._most:
                        return
                    yield row
            except read.ERRORS as error:
                if isinstance(error, InputError) or getattr(error, "errno", None):  # which a failing disk has
                    raise
                way_out = "" if isinstance(error, read.BadRow) else " Is the file complete, and what its name says?"
                raise InputError(f"{path} {self.unit} {last + 1}: {read.fault_of(error)}.{way_out}") from None
            self._done += path.stat().st_size

    def _rows(self, path: Path) -> Iterator[Row]:
        kind = file_kind(path)
        lines = kind in OBJECTS and read.holds_lines(path)
        self.unit = "row" if kind in (*COLUMNS, *OBJECTS) and not lines else self.unit
        with path.open("rb") as raw:
            self._raw, file = raw, read.decompressed(path, raw)
            if kind in COLUMNS:
                yield from column_rows(path, file, kind == ".arrow")
            elif kind in (".csv", ".tsv"):
                yield from csv_rows(file, kind == ".tsv")
            elif kind in TEXTS:
                yield from read.text_rows(file)
            else:
                yield from read.json_lines(file) if lines else read.json_values(file)

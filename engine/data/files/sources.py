"""Data files: named, checked, and read row by row."""

from __future__ import annotations

import codecs
import os
import re
import select
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trireme.engine.data.files.json_rows import LINES, holds_lines, json_lines, json_values
from trireme.engine.data.files.rows import Row
from trireme.engine.data.files.tables import read_columns, read_csv
from trireme.engine.data.files.text import SEPARATOR, read_text
from trireme.engine.data.files.unpack import DAMAGES, PACKINGS, misnamed, rows_by_name, unpacked
from trireme.models.config import InputError
from trireme.storage.untrusted import quoted

TEXTS, COLUMNS = (".txt", ".md"), (".parquet", ".arrow")
KINDS = (*LINES, ".json", ".csv", ".tsv", *TEXTS, *COLUMNS)
MOST = 1000  # weight: each repeat takes memory


@dataclass(frozen=True)
class DataFile:
    """A data file with its weight: with 2 an epoch has each row twice, with 0.5 half of the rows."""

    path: Path  # a file, or what names `parts`
    weight: float = 1.0
    parts: tuple[Path, ...] = ()  # texts, each a file, that are read one after another
    shown: str = ""  # instead of the path

    @property
    def kind(self) -> str:
        path = self.parts[0] if self.parts else self.path
        return path.with_suffix("").suffix.lower() if path.suffix.lower() in PACKINGS else path.suffix.lower()

    @property
    def files(self) -> tuple[Path, ...]:
        return self.parts or (self.path,)

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def __str__(self) -> str:
        return self.shown or str(self.path)


def weighed(text: str) -> tuple[str, float]:
    """(path, weight) of `path` or `path:weight`. Raises InputError."""
    match = re.fullmatch(r"(.+):(\d*\.?\d+)", text)
    path, weight = (match[1], float(match[2])) if match and not Path(text).exists() else (text, 1.0)
    if weight <= 0:
        raise InputError(f"{text}: the weight is 0, so no row would be used. Leave the file out.")
    if weight > MOST:
        raise InputError(f"{text}: the weight is more than {MOST:,}. Lower it; --epochs sees all files again.")
    return path, weight


def check_file(path: Path) -> None:
    """Raises InputError if a file cannot be opened, or is no kind of data."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file. Pipe it into standard input: --data -.")
    kind = DataFile(path).kind
    if kind not in KINDS and path.exists():  # opening says that it does not
        raise InputError(f"{path}: unknown kind of data. Expected {', '.join(KINDS)}, or {', '.join(PACKINGS)} of one.")
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. Correct the path.") from None
    if not head:
        raise InputError(f"{path} is empty. Name another file with --data.")
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a Git LFS pointer, not the data. Run git lfs pull, or download it again.")
    wide = "UTF-32" if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") else "UTF-16"
    if wide == "UTF-32" or head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{path} is {wide}. Convert it: iconv -f {wide} -t UTF-8 {quoted(path)} > NEW.")
    what = misnamed(path, head) or ("" if kind not in TEXTS else rows_by_name(path))
    if what:
        raise InputError(f"{path} {what}.")


def spool(stream: BinaryIO, folder: Path) -> DataFile:
    """Standard input as a file in `folder`; a file that is there already is used."""
    kept = next(iter(sorted(folder.glob("stdin.*"))), None)
    if kept is None:
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
        kept = folder / ("stdin.jsonl" if start in (b"{", b"[") else "stdin.txt")
        scratch.rename(kept)
    check_file(kept)
    return DataFile(kept, shown="standard input")


def _parts(pipe: int) -> Iterator[bytes]:
    """Yields bytes from a file descriptor until its end.

    No wait is longer than a second: a signal that arrives just before a read is handled only after it.
    """
    while True:
        if select.select([pipe], [], [], 1.0)[0]:
            part = os.read(pipe, 1 << 20)
            if not part:
                return
            yield part


class Reader:
    """Reads the rows of a file. `position` of its `size` bytes have been read."""

    def __init__(self, source: DataFile, eos_token: str | None = None):
        self.source, self.size = source, source.size
        self.unit = "line"  # of Row.number: "line" or "row"
        self._separators = {SEPARATOR, eos_token or SEPARATOR}
        self._done = 0  # bytes of files before
        self._raw: BinaryIO | None = None

    @property
    def position(self) -> int:
        return self._done + (self._raw.tell() if self._raw and not self._raw.closed else 0)

    def rows(self) -> Iterator[Row]:
        """Yields the rows. Raises InputError."""
        for path in self.source.files:
            try:
                lines = self._holds_lines(path)
                with path.open("rb") as raw:
                    self._raw = raw
                    yield from self._rows(path, unpacked(path, raw), lines)
            except UnicodeDecodeError as error:
                where = f" line {line}" if (line := self._first_bad_line(path)) else ""
                raise InputError(f"{path}{where} is not UTF-8 ({error.reason}). Convert it with iconv.") from None
            except DAMAGES as error:
                if getattr(error, "errno", None) or path.suffix.lower() not in PACKINGS:
                    raise
                what = " ".join(str(error).split())
                raise InputError(f"{path} is a damaged {path.suffix} ({what}). Download it again.") from None
            self._done += path.stat().st_size

    @staticmethod
    def _first_bad_line(path: Path) -> int:
        """The first line that is not UTF-8, or 0. A decoder that reads blocks does not tell."""
        decoder, number = codecs.getincrementaldecoder("utf-8")(), 1
        with path.open("rb") as raw:
            file = unpacked(path, raw)
            while part := file.readline(1 << 20):
                try:
                    decoder.decode(part)
                except UnicodeDecodeError:
                    return number
                number += part.endswith(b"\n")
        return 0

    def _holds_lines(self, path: Path) -> bool:
        if self.source.kind not in (*LINES, ".json"):
            return False
        with path.open("rb") as raw:
            return holds_lines(unpacked(path, raw), self.source.kind)

    def _rows(self, path: Path, file: BinaryIO, lines: bool) -> Iterator[Row]:
        kind = self.source.kind
        if kind in COLUMNS or (kind in (*LINES, ".json") and not lines):
            self.unit = "row"
        if kind in COLUMNS:
            return read_columns(path, file, kind == ".arrow")
        if kind in (".csv", ".tsv"):
            return read_csv(path, file, kind == ".tsv")
        if kind in TEXTS:
            return read_text(path, file, self._separators)
        return json_lines(file) if lines else json_values(path, file)

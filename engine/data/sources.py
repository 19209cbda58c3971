"""Data files: named, opened, read row by row."""

from __future__ import annotations

import gzip
import os
import re
import select
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trireme.engine.data.rows import Bytes, Row, holds_lines, json_lines, json_values, read_csv, read_parquet, read_text
from trireme.models.config import InputError

KINDS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
MOST = 1000  # weight: each repeat takes memory
SEPARATOR = "<|endoftext|>"  # a line that ends a document, whatever the tokenizer


@dataclass(frozen=True)
class DataFile:
    """A data file and its weight: 2 sees each row twice an epoch, 0.5 half of them."""

    path: Path
    weight: float = 1.0

    @property
    def kind(self) -> str:
        suffixes = [s.lower() for s in self.path.suffixes]
        return suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]

    @property
    def gzipped(self) -> bool:
        return self.path.suffix.lower() == ".gz"


def parse_data_file(text: str) -> DataFile:
    """`path` or `path:weight`. Raises InputError where it cannot be opened."""
    if not text:
        raise InputError("--data is empty. Name a file.")
    match = re.fullmatch(r"(.+):(\d*\.?\d+)", text)
    path, weight = (match[1], float(match[2])) if match and not Path(text).exists() else (text, 1.0)
    source = DataFile(Path(path), weight)
    if weight <= 0:
        raise InputError(f"{text}: the weight is 0, so no row would be used. Leave the file out.")
    if weight > MOST:
        raise InputError(f"{text}: the weight is more than {MOST:,}. Lower it; --epochs sees all files again.")
    if source.path.is_dir():
        inside = [p.name for p in sorted(source.path.iterdir()) if DataFile(p).kind in KINDS and "info" not in p.stem]
        hint = f"such as {source.path / inside[0]}" if inside else f"of {', '.join(KINDS)}"
        raise InputError(f"{path} is a folder. Name files, {hint}; repeat --data for more.")
    if source.path.exists() and not source.path.is_file():
        raise InputError(f"{path} is not a regular file. Pipe it into standard input: --data -.")
    if "://" in path:
        raise InputError(f"{path} is not a file here. Download it first: curl -LO {path}.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and source.kind not in KINDS and not source.path.parent.exists():
        raise InputError(
            f"{path} is no file here. If it is a dataset of the Hugging Face hub, download it, and name its files: "
            f"hf download {path} --repo-type dataset --local-dir {source.path.name}"
        )
    if source.kind not in KINDS:
        raise InputError(f"{path}: unknown kind of data. Expected {', '.join(KINDS)}, or .gz of one.")
    try:
        with source.path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. Correct --data.") from None
    if not head:
        raise InputError(f"{path} is empty. Name another file with --data.")
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a Git LFS pointer, not the data. Run git lfs pull, or download it again.")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{path} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8 {path}.")
    return source


def spool(stream: BinaryIO, folder: Path) -> DataFile:
    """Standard input as a file in `folder`, or the one already there."""
    kept = next(iter(sorted(folder.glob("stdin.*"))), None)
    if kept is None:
        if stream.isatty():
            raise InputError("--data -: nothing is piped into standard input.")
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / "stdin"
        with scratch.open("wb") as file:
            for part in _parts(stream.fileno()):
                file.write(part)
        with scratch.open("rb") as file:
            start = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        kept = folder / ("stdin.jsonl" if start in (b"{", b"[") else "stdin.txt")
        scratch.rename(kept)
    return parse_data_file(str(kept))


def _parts(pipe: int) -> Iterator[bytes]:
    """Bytes from a file descriptor, up to its end.

    A signal that arrives just before a read would be handled after it, however long it waits. So no wait is longer than
    a second.
    """
    while True:
        if select.select([pipe], [], [], 1.0)[0]:
            part = os.read(pipe, 1 << 20)
            if not part:
                return
            yield part


class Reader:
    """`position` of `size` bytes are read."""

    def __init__(self, source: DataFile, eos_token: str | None = None):
        self.source, self.size = source, source.path.stat().st_size
        self.unit = "line"  # of Row.number: "line" or "row"
        self._separators = {SEPARATOR, eos_token or SEPARATOR}
        self._raw: BinaryIO | None = None

    @property
    def position(self) -> int:
        return self._raw.tell() if self._raw and not self._raw.closed else 0

    def rows(self) -> Iterator[Row]:
        """Raises InputError."""
        path = self.source.path
        with path.open("rb") as self._raw:
            try:
                if self.source.gzipped:
                    with gzip.open(self._raw) as file:
                        yield from self._reader(file)
                else:
                    yield from self._reader(self._raw)
            except UnicodeDecodeError as error:
                raise InputError(f"{path} is not UTF-8 ({error.reason}). Convert it with iconv.") from None
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InputError(f"{path} is a damaged .gz ({error}). Download it again.") from None

    def _reader(self, file: Bytes) -> Iterator[Row]:
        kind = self.source.kind
        if kind == ".parquet":
            self.unit = "row"
            return read_parquet(self.source.path, file)
        if kind in (".jsonl", ".json"):
            lines = holds_lines(file, kind)
            file.seek(0)
            if lines:
                return json_lines(file)
            self.unit = "row"
            return json_values(self.source.path, file)
        if kind in (".csv", ".tsv"):
            return read_csv(self.source.path, file)
        return read_text(self.source.path, file, self._separators)

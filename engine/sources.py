"""Data files: rows out of .jsonl .json .csv .txt .parquet, gzipped or not, one at a time whatever the file's size.

A reader yields Row(number, value): the line or row number as an editor counts it, and a dict, or a BadRow that says
what is wrong with it. What makes the rest of a file unreadable is an InputError.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trireme.models.config import InputError

KINDS = (".jsonl", ".json", ".csv", ".txt", ".parquet")
_CHUNK = 1 << 20  # characters read at once from a .json
_PIECE = 1 << 18  # characters of a long text that are handled at once
SEPARATOR = "<|endoftext|>"  # a line of a .txt that ends a document, whatever the tokenizer


class BadRow(ValueError):
    """One row is wrong; the rest of the file can still be read."""


class Row(NamedTuple):
    number: int
    value: dict | BadRow


@dataclass(frozen=True)
class Source:
    """One data file and how often its rows count: 2 sees every row twice an epoch, 0.5 half of them."""

    path: Path
    weight: float = 1.0

    @property
    def kind(self) -> str:
        suffixes = [s.lower() for s in self.path.suffixes]
        return suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]

    @property
    def gzipped(self) -> bool:
        return self.path.suffix.lower() == ".gz"


def parse_source(text: str) -> Source:
    """`path` or `path:weight` as a Source that can be opened."""
    match = re.fullmatch(r"(.+):(\d*\.?\d+)", text)
    path, weight = (match[1], float(match[2])) if match and not Path(text).exists() else (text, 1.0)
    source = Source(Path(path), weight)
    if weight <= 0:
        raise InputError(f"{text}: the weight is 0, so no row would be used. Leave the file out.")
    if source.path.is_dir():
        inside = [p.name for p in sorted(source.path.iterdir()) if Source(p).kind in KINDS]
        hint = f"such as {source.path / inside[0]}" if inside else f"of {', '.join(KINDS)}"
        raise InputError(f"{path} is a folder. Name files, {hint}; repeat --data for more.")
    if source.kind not in KINDS:
        raise InputError(f"{path}: unknown kind of data. Expected {', '.join(KINDS)}, or .gz of one.")
    try:
        with source.path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}.") from None
    if not head:
        raise InputError(f"{path} is empty.")
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a Git LFS pointer, not the data. Run git lfs pull, or download it again.")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{path} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8 {path}.")
    return source


def spool(stream: BinaryIO, folder: Path) -> Source:
    """Standard input kept as a file in `folder`, so that it can be read as one; what is kept already is used."""
    kept = next(iter(sorted(folder.glob("stdin.*"))), None)
    if kept is None:
        if stream.isatty():
            raise InputError("--data -: nothing is piped into standard input.")
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / "stdin"
        with scratch.open("wb") as file:
            shutil.copyfileobj(stream, file)
        with scratch.open("rb") as file:
            start = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        kept = folder / ("stdin.jsonl" if start in (b"{", b"[") else "stdin.txt")
        scratch.rename(kept)
    return parse_source(str(kept))


class Reader:
    """Reads one Source. `position` of `size` bytes are read, for a progress bar."""

    def __init__(self, source: Source, eos_token: str | None = None):
        self.source, self.size = source, source.path.stat().st_size
        self.unit = "line"  # what Row.number counts: "line" or "row"
        self._separators = {SEPARATOR, eos_token or SEPARATOR}
        self._raw: BinaryIO | None = None

    @property
    def position(self) -> int:
        return self._raw.tell() if self._raw and not self._raw.closed else 0

    def rows(self) -> Iterator[Row]:
        """Every row of the file, in order."""
        path = self.source.path
        with path.open("rb") as self._raw:
            file = gzip.open(self._raw) if self.source.gzipped else self._raw
            try:
                yield from self._reader(file)
            except UnicodeDecodeError as error:
                raise InputError(f"{path} is not UTF-8 ({error.reason}). Convert it with iconv.") from None
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InputError(f"{path} is a damaged .gz ({error}). Download it again.") from None

    def _reader(self, file: BinaryIO) -> Iterator[Row]:
        kind = self.source.kind
        if kind == ".parquet":
            self.unit = "row"
            return _parquet(self.source.path, file)
        if kind in (".jsonl", ".json"):
            lines = _holds_lines(file, kind)
            file.seek(0)
            if lines:
                return _json_lines(file)
            self.unit = "row"
            return _json_values(self.source.path, file)
        if kind == ".csv":
            return _csv(self.source.path, file)
        return _text(self.source.path, file, self._separators)


# ---------------------------------------------------------------- JSON


def _no_duplicates(pairs: list[tuple]) -> dict:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates)


def _object(value: object) -> dict | BadRow:
    return value if isinstance(value, dict) else BadRow(f"holds a {_name(value)}, expected an object")


def _name(value: object) -> str:
    """The type of a value in the words of the people who write data."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _holds_lines(file: BinaryIO, kind: str) -> bool:
    """Whether JSON lies one object a line, whatever the file is called."""
    head = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head[:1] != b"{":
        return head[:1] != b"[" and kind == ".jsonl"
    file.seek(0)
    first = next(line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n"))
    try:
        json.loads(first.removeprefix(b"\xef\xbb\xbf"))
        return True
    except (ValueError, RecursionError):
        return kind == ".jsonl"


def _json_lines(file: BinaryIO) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.strip()
        if line:
            yield Row(number, _json_line(line))


def _json_line(line: bytes) -> dict | BadRow:
    if b"\0" in line:
        return BadRow("holds NUL bytes: damaged, or not UTF-8")
    try:
        return _object(_DECODER.decode(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return BadRow(f"is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start})")
    except json.JSONDecodeError as error:
        return BadRow(f"is not JSON ({error.msg} at character {error.pos + 1})")
    except RecursionError:
        return BadRow("is nested too deeply")
    except BadRow as error:
        return error


def _json_values(path: Path, file: BinaryIO) -> Iterator[Row]:
    """The objects of one JSON array, or of several values one after another, without holding the file in memory."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    buffer, pos, line, number, inside = "", 0, 1, 0, False
    more = True
    while True:
        pos = re.compile(r"[\s,]*" if inside else r"\s*").match(buffer, pos).end()
        if pos < len(buffer) and not inside and number == 0 and buffer[pos] == "[":
            inside, pos = True, pos + 1
            continue
        if pos < len(buffer) and inside and buffer[pos] == "]":
            return
        try:
            value, end = _DECODER.raw_decode(buffer, pos)
        except BadRow as error:
            raise InputError(f"{path} row {number + 1}: {error}.") from None
        except RecursionError:
            raise InputError(f"{path} row {number + 1} is nested too deeply.") from None
        except json.JSONDecodeError as error:
            broken = error.pos < len(buffer) - 16 and not error.msg.startswith("Unterminated string")
            if more and not broken:  # the value may go on beyond the buffer; double it, so that a huge one stays cheap
                line += buffer.count("\n", 0, pos)
                read = text.read(max(_CHUNK, len(buffer) - pos))
                buffer, pos, more = buffer[pos:] + read, 0, bool(read)
                continue
            if pos == len(buffer) and not inside:
                return
            where = line + buffer.count("\n", 0, min(error.pos, len(buffer)))
            what = "the file ends inside the list" if pos == len(buffer) else error.msg
            raise InputError(f"{path} line {where} is not JSON: {what}. Is the file complete?") from None
        number, pos = number + 1, end
        yield Row(number, _object(value))


# ---------------------------------------------------------------- tables and text


def _csv(path: Path, file: BinaryIO) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 1 << 31 - 1))
    reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
    try:
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise InputError(f"{path}: the header names a column twice: {', '.join(header)}.")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                yield Row(reader.line_num, BadRow(f"has {len(cells)} cells, the header {len(header)}"))
            else:
                yield Row(reader.line_num, {key: _cell(key, cell) for key, cell in zip(header, cells, strict=True)})
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num} is not CSV: {error}.") from None


def _cell(key: str, cell: str) -> object:
    """A cell; in the columns that hold lists, as JSON."""
    if key in ("messages", "conversations", "tools", "history", "input_ids", "labels") and cell[:1] in "[{":
        try:
            return json.loads(cell)
        except ValueError:
            return cell
    return cell


def _parquet(path: Path, file: BinaryIO) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: .parquet needs pyarrow. Install it: pip install pyarrow.") from None
    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(256):
            for value in batch.to_pylist():
                number += 1
                yield Row(number, value)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} is not Parquet that can be read: {error}.") from None


def _text(path: Path, file: BinaryIO, separators: set[str]) -> Iterator[Row]:
    """Documents of plain text, parted by lines that hold a separator alone; a long one in pieces.

    A row is {"text", "starts", "ends"}: whether the piece begins and whether it ends a document. Pieces part after a
    line, before a character that is not a space, where tokenizers part too.
    """
    stream = io.TextIOWrapper(file, encoding="utf-8-sig")  # also turns CRLF into LF
    piece: list[str] = []
    first, size, starts = 1, 0, True
    for number, line in enumerate(stream, 1):
        if "\0" in line:
            raise InputError(f"{path} line {number} holds NUL bytes: is it text?")
        stop = line.strip() in separators
        if piece and (stop or (size >= _PIECE and not line[:1].isspace())):
            yield from _piece(first, piece, starts, stop)
            starts, piece, size = stop, [], 0
        elif stop:
            starts = True
        if stop:
            continue
        if not piece:
            first = number
        piece.append(line)
        size += len(line)
    if piece:
        yield from _piece(first, piece, starts, True)


def _piece(number: int, lines: list[str], starts: bool, ends: bool) -> Iterator[Row]:
    """The row of a piece; none for one that is blank."""
    text = "".join(lines)
    text = text.lstrip("\n") if starts else text
    text = text.rstrip("\n") if ends else text
    if text.strip() or not (starts and ends):
        yield Row(number, {"text": text, "starts": starts, "ends": ends})

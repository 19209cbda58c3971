"""Rows of a file, one at a time: JSON, CSV, Parquet, plain text.

Readers raise InputError where the rest cannot be read; sources.Reader turns UnicodeDecodeError and gzip's errors into
it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trireme.models.config import InputError

Bytes = BinaryIO | gzip.GzipFile
Fields = dict[str, Any]  # a JSON object: row, message, tool
ROW = 1 << 28  # bytes or characters, at most: beyond any model, within memory
_TOO_LARGE = f"is longer than {ROW >> 20} MiB"
_CHUNK = 1 << 20  # characters of a .json read at once
_PIECE = 1 << 18  # characters of a piece of text


class BadRow(ValueError):
    """A row's fault; later rows can be read."""


class Row(NamedTuple):
    """`number`: line or row as an editor counts. A long text has several, from `starts` to `ends`."""

    number: int
    value: Fields | BadRow
    starts: bool = True
    ends: bool = True


def kind_of(value: object) -> str:
    """A value's type in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value)) or ("a number" if isinstance(value, (int, float)) else type(value).__name__)


# ---------------------------------------------------------------- JSON


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Fields:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRow(f"the key {key!r} occurs twice")
            seen.add(key)
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates)
_TOO_LONG = "holds a number of thousands of digits"  # Python refuses it


def _object(value: object) -> Fields | BadRow:
    return value if isinstance(value, dict) else BadRow(f"holds {kind_of(value)}, expected an object")


def holds_lines(file: Bytes, kind: str) -> bool:
    """Whether JSON is an object a line, whatever its name."""
    head = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head[:1] != b"{":
        return head[:1] != b"[" and kind == ".jsonl"
    file.seek(0)
    first = next(line for line in iter(lambda: file.readline(ROW), b"") if line.strip(b"\xef\xbb\xbf \t\r\n"))
    try:
        json.loads(first.removeprefix(b"\xef\xbb\xbf"))
        return True
    except (ValueError, RecursionError):
        return kind == ".jsonl"


def json_lines(file: Bytes) -> Iterator[Row]:
    number = 0
    while line := file.readline(ROW):
        number += 1
        if len(line) == ROW and not line.endswith(b"\n"):
            while (more := file.readline(_CHUNK)) and not more.endswith(b"\n"):
                pass
            yield Row(number, BadRow(_TOO_LARGE))
            continue
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.strip()
        if line:
            yield Row(number, _json_line(line))


def _json_line(line: bytes) -> Fields | BadRow:
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
    except ValueError:
        return BadRow(_TOO_LONG)


def json_values(path: Path, file: Bytes) -> Iterator[Row]:
    """Objects of JSON arrays or in sequence."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    buffer, pos, line, number, inside = "", 0, 1, 0, False
    more = True
    while True:
        space = re.compile(r"[\s,]*" if inside else r"\s*").match(buffer, pos)
        assert space, "an empty match is one"
        pos = space.end()
        if pos < len(buffer) and buffer[pos] == "[]"[inside]:
            inside, pos = not inside, pos + 1
            continue
        try:
            value, end = _DECODER.raw_decode(buffer, pos)
        except BadRow as error:
            raise InputError(f"{path} row {number + 1}: {error}.") from None
        except RecursionError:
            raise InputError(f"{path} row {number + 1} is nested too deeply.") from None
        except json.JSONDecodeError as error:
            broken = error.pos < len(buffer) - 16 and not error.msg.startswith("Unterminated string")
            if more and not broken:  # the value may go on; doubling keeps a huge one cheap
                if len(buffer) - pos > ROW:
                    raise InputError(f"{path} row {number + 1} {_TOO_LARGE}.") from None
                line += buffer.count("\n", 0, pos)
                read = text.read(max(_CHUNK, min(len(buffer) - pos, ROW - len(buffer) + pos)))
                buffer, pos, more = buffer[pos:] + read, 0, bool(read)
                continue
            if pos == len(buffer) and not inside:
                return
            where = line + buffer.count("\n", 0, min(error.pos, len(buffer)))
            what = "the file ends inside the list" if pos == len(buffer) else error.msg
            raise InputError(f"{path} line {where} is not JSON: {what}. Is the file complete?") from None
        except ValueError:
            raise InputError(f"{path} row {number + 1} {_TOO_LONG}.") from None
        number, pos = number + 1, end
        yield Row(number, _object(value))


# ---------------------------------------------------------------- tables and text


class _Lines:
    """Checked lines. `number`: of the last. `taken`: characters of the row so far, reset by its reader."""

    def __init__(self, path: Path, stream: io.TextIOWrapper):
        self._path, self._stream, self.number, self.taken = path, stream, 0, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(ROW)
        if not line:
            raise StopIteration
        self.number += 1
        self.taken += len(line)
        if "\0" in line:
            raise InputError(f"{self._path} line {self.number} holds NUL bytes: is it text?")
        if self.taken >= ROW:
            raise InputError(f"{self._path}: the row that ends with line {self.number} {_TOO_LARGE}.")
        return line


def read_csv(path: Path, file: Bytes) -> Iterator[Row]:
    csv.field_size_limit(ROW)
    """Cells end with a comma, a semicolon or a tab, whichever the first line has most of."""
    lines = _Lines(path, io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
    first = next(lines, "")
    reader = csv.reader(chain([first] if first else [], lines), delimiter=max(",;\t", key=first.count), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise InputError(f"{path}: the header names a column twice: {', '.join(header)}.")
        begins = reader.line_num + 1
        for cells in reader:
            lines.taken, number, begins = 0, begins, reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                yield Row(number, BadRow(f"has {len(cells)} cells, the header {len(header)}"))
            else:
                yield Row(number, {key: _cell(key, cell) for key, cell in zip(header, cells, strict=True)})
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num} is not CSV: {error}. Is a quote amiss?") from None


def _cell(key: str, cell: str) -> object:
    """Columns of lists are JSON."""
    if key in ("messages", "conversations", "tools", "history", "input_ids", "labels") and cell[:1] in "[{":
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell
    return cell


def read_parquet(path: Path, file: Bytes) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: .parquet needs pyarrow. Install it: pip install pyarrow.") from None
    try:
        made, number = pyarrow.parquet.ParquetFile(file), 0
        names = made.schema_arrow.names
        if len(set(names)) == len(names):
            # no format uses times, and Python has no nanoseconds
            timed = {field.name for field in made.schema_arrow if pyarrow.types.is_temporal(field.type)}
            for batch in made.iter_batches(256, columns=[name for name in names if name not in timed]):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, value)
            return
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        if getattr(error, "errno", None):  # a failing disk; pyarrow's own have none
            raise
        what = " ".join(str(error).split()).rstrip(".")
        raise InputError(f"{path} is not Parquet that can be read: {what}.") from None
    raise InputError(f"{path} names a column twice: {', '.join(names)}.")


def read_text(path: Path, file: Bytes, separators: set[str]) -> Iterator[Row]:
    """Documents between separator lines, long ones in pieces, parted where tokenizers part: before no space."""
    stream = io.TextIOWrapper(file, encoding="utf-8-sig")  # CRLF becomes LF
    piece: list[str] = []
    first, size, starts = 1, 0, True
    lines = _Lines(path, stream)
    for line in lines:
        stop = line.strip() in separators
        if piece and (stop or (size >= _PIECE and not line[:1].isspace())):
            yield from _piece(first, piece, starts, stop)
            starts, piece, size = stop, [], 0
        elif stop:
            starts = True
        if stop:
            continue
        if not piece:
            first, lines.taken = lines.number, 0
        piece.append(line)
        size += len(line)
    if piece:
        yield from _piece(first, piece, starts, True)


def _piece(number: int, lines: list[str], starts: bool, ends: bool) -> Iterator[Row]:
    """No row if blank."""
    text = "".join(lines)
    text = text.lstrip("\n") if starts else text
    text = text.rstrip("\n") if ends else text
    if text.strip() or not (starts and ends):
        yield Row(number, {"text": text}, starts, ends)

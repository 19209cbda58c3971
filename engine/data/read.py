"""Rows of JSON and of running text, one at a time.

A fault of a row is a BadRow in its place, and later rows can still be read; a fault of the file is an InputError.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trireme.engine.data.unpack import LINES, file_kind, unpacked
from trireme.models.config import InputError

SEPARATOR = "<|endoftext|>"  # ends a document of running text, whatever the tokenizer
EMPTY: tuple[Any, ...] = (None, "", [], {})  # says as much as a key that is not there
ROW = 1 << 28  # bytes or characters, at most: beyond any model, within memory
TOO_LARGE = f"is longer than {ROW >> 20} MiB. Part it into several rows, or give running text as a .txt file"
CONTEXT = 64  # characters on each side of a piece of a long text, which decide its tokens at the borders
_PIECE = 1 << 18  # characters of a piece, at least; and of a line that are read at once
_CHUNK = 1 << 20  # characters of a .json that are read at once
_BOM, _SPACE = b"\xef\xbb\xbf", b" \t\r\n"

Fields = dict[str, Any]  # a JSON object: row, message, tool


class BadRow(ValueError):
    """What is wrong with a row."""


class Row(NamedTuple):
    """A row. `number`: of its line or row, from 1. A long text has several, from `starts` to `ends`."""

    number: int
    value: Fields | BadRow
    starts: bool = True
    ends: bool = True
    before: str = ""  # the text on both sides of a piece, up to CONTEXT characters
    after: str = ""


def unread_keys(fields: Mapping[str, Any], read: Container[str]) -> list[str]:
    """The keys that have a value and are not among those that are read."""
    return [key for key, value in fields.items() if key not in read and value not in EMPTY]


def kind_of(value: object) -> str:
    """The type of a value, by JSON's names."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value)) or ("a number" if isinstance(value, (int, float)) else type(value).__name__)


# ---------------------------------------------------------------- JSON


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Fields:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates)
_TOO_LONG = "holds a number of thousands of digits"  # Python refuses it


def json_of(text: str) -> Any:
    """The value of JSON in a string. Raises ValueError (BadRow if a key occurs twice), RecursionError."""
    return _DECODER.decode(text)


def _object(value: object) -> Fields | BadRow:
    return value if isinstance(value, dict) else BadRow(f"holds {kind_of(value)}, expected an object")


def holds_lines(path: Path) -> bool:
    """Whether a file has one JSON object a line, whatever its name is: not an array, nor objects of several lines."""
    kind = file_kind(path)
    if kind not in (*LINES, ".json"):
        return False
    with path.open("rb") as raw:
        file = unpacked(path, raw)
        filled = (line.strip(_BOM + _SPACE) for line in iter(lambda: file.readline(ROW), b""))
        first = next(filter(None, filled), b"")
        if first[:1] != b"{":
            return first[:1] != b"[" and kind in LINES
        try:
            json.loads(first)
            return True
        except json.JSONDecodeError as error:
            ends_inside = error.pos >= len(error.doc) - 1 or error.msg.startswith("Unterminated")
            second = next(filter(None, filled), b"") if ends_inside else b"{"
            return kind in LINES and second[:1] in (b"{", b"")
        except (ValueError, RecursionError):
            return kind in LINES


def json_lines(file: BinaryIO) -> Iterator[Row]:
    number = 0
    while line := file.readline(ROW):
        number += 1
        if len(line) == ROW and not line.endswith(b"\n"):
            while (part := file.readline(_CHUNK)) and not part.endswith(b"\n"):
                pass
            yield Row(number, BadRow(TOO_LARGE))
            continue
        line = line.rstrip().lstrip(_BOM + _SPACE)  # files with a mark may have been joined
        if line:
            yield Row(number, _json_line(line))


def _json_line(line: bytes) -> Fields | BadRow:
    if b"\0" in line:
        return BadRow("holds NUL bytes: damaged, or not UTF-8")
    try:
        return _object(_DECODER.decode(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at {error.start}"
        return BadRow(f"is not UTF-8 ({byte}); if all of the file is in one encoding, iconv converts it")
    except json.JSONDecodeError as error:
        return BadRow(f"is not JSON ({error.msg} at character {error.pos + 1})")
    except RecursionError:
        return BadRow("is nested too deeply")
    except BadRow as error:
        return error
    except ValueError:
        return BadRow(_TOO_LONG)


def json_values(path: Path, file: BinaryIO) -> Iterator[Row]:
    """Yields the objects of JSON arrays, or objects one after the other."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    buffer, pos, line, number, inside, unread = "", 0, 1, 0, False, True
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
            if unread and not broken:  # the value may go on; doubling keeps a huge one cheap
                if len(buffer) - pos > ROW:
                    raise InputError(f"{path} row {number + 1} {TOO_LARGE}.") from None
                line += buffer.count("\n", 0, pos)
                block = text.read(max(_CHUNK, min(len(buffer) - pos, ROW - len(buffer) + pos)))
                buffer, pos, unread = buffer[pos:] + block, 0, bool(block)
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


# ---------------------------------------------------------------- running text


def documents(path: Path, file: BinaryIO, separators: set[str]) -> Iterator[Row]:
    """Yields pieces of documents, which end at lines in `separators`, and at SEPARATOR within a line. Lines may have
    any length. A piece begins with a line that does not begin with a space, if there is one.
    """
    stream = io.TextIOWrapper(file, encoding="utf-8-sig")  # CRLF becomes LF
    document, number, begins, carried = _Document(), 0, True, ""
    while part := carried + stream.readline(_PIECE):
        number, carried = number + begins, ""
        if "\0" in part:
            raise InputError(f"{path} line {number} holds NUL bytes: is it text?")
        if len(part) >= _PIECE and "<" in part[1 - len(SEPARATOR) :]:  # perhaps the beginning of a separator
            at = part.rindex("<")
            part, carried = part[:at], part[at:]
        texts = ["", ""] if begins and part.strip() in separators else part.split(SEPARATOR)
        for i, text in enumerate(texts):
            if i:
                yield from document.end()
                document = _Document()
            yield from document.add(number, text, begins or i > 0)
        begins = part.endswith("\n")
    yield from document.end()


class _Document:
    """Cuts a document into pieces. Each piece waits for the text after it."""

    def __init__(self) -> None:
        self._parts: list[str] = []  # of the next piece
        self._size = self._number = 0
        self._held: Row | None = None  # the piece before
        self._before = ""

    def add(self, number: int, part: str, begins: bool) -> Iterator[Row]:
        """Takes a line, or a part of a long one. `begins`: it is the first part."""
        apart = begins and not part[:1].isspace()
        if self._size >= _PIECE and (apart or not begins) or self._size >= 2 * _PIECE:
            yield from self._hold("".join(self._parts))
            self._parts, self._size = [], 0
        if not self._held and not self._parts:
            part = part.lstrip("\n")
        if part:
            self._number = self._number if self._parts else number
            self._parts.append(part)
            self._size += len(part)

    def _hold(self, text: str, ends: bool = False) -> Iterator[Row]:
        if self._held:
            yield self._held._replace(after=text[:CONTEXT])
        self._held = Row(self._number, {"text": text}, not self._held, ends, self._before)
        self._before = (self._before + text)[-CONTEXT:]

    def end(self) -> Iterator[Row]:
        """Yields the rest; nothing if all of it is blank."""
        text = "".join(self._parts).rstrip("\n")
        if text.strip() or self._held:
            yield from self._hold(text, ends=True)
        if self._held:
            yield self._held

"""Rows in JSON: one object a line, arrays of objects, or objects one after the other."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trireme.engine.data.files.rows import ROW, TOO_LARGE, BadRow, Bytes, Fields, Row, kind_of
from trireme.models.config import InputError

_CHUNK = 1 << 20  # characters of a .json read at once
_BOM, _SPACE = b"\xef\xbb\xbf", b" \t\r\n"


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


def json_of(text: str) -> Any:
    """The value of JSON in a string. Raises ValueError (BadRow if a key occurs twice), RecursionError."""
    return _DECODER.decode(text)


def _object(value: object) -> Fields | BadRow:
    return value if isinstance(value, dict) else BadRow(f"holds {kind_of(value)}, expected an object")


LINES = (".jsonl", ".ndjson")


def holds_lines(file: Bytes, kind: str) -> bool:
    """Whether a file has one JSON object a line, whatever its name is."""
    first = next((line for line in iter(lambda: file.readline(ROW), b"") if line.strip(_BOM + _SPACE)), b"")
    first = first.lstrip(_BOM + _SPACE)
    if first[:1] != b"{":
        return first[:1] != b"[" and kind in LINES
    try:
        json.loads(first)
        return True
    except (ValueError, RecursionError):
        return kind in LINES


def json_lines(file: Bytes) -> Iterator[Row]:
    number = 0
    while line := file.readline(ROW):
        number += 1
        if len(line) == ROW and not line.endswith(b"\n"):
            while (more := file.readline(_CHUNK)) and not more.endswith(b"\n"):
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


def json_values(path: Path, file: Bytes) -> Iterator[Row]:
    """Yields the objects of JSON arrays, or objects one after the other."""
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
                    raise InputError(f"{path} row {number + 1} {TOO_LARGE}.") from None
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

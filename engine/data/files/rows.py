"""What readers of files yield: rows, and faults of single rows."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, BinaryIO, NamedTuple

Bytes = BinaryIO  # of a file, unpacked
Fields = dict[str, Any]  # a JSON object: row, message, tool
EMPTY: tuple[Any, ...] = (None, "", [], {})  # says as much as a key that is not there
ROW = 1 << 28  # bytes or characters, at most: beyond any model, within memory
TOO_LARGE = f"is longer than {ROW >> 20} MiB. Part it into several rows, or give running text as a .txt file"


class BadRow(ValueError):
    """What is wrong with a row. Later rows can still be read."""


class Row(NamedTuple):
    """A row. `number`: of the line or row, as an editor counts. A long text has several rows, from `starts` to
    `ends`.
    """

    number: int
    value: Fields | BadRow
    starts: bool = True
    ends: bool = True
    before: str = ""  # the text before a piece, and after it: CONTEXT characters, less where it begins or ends
    after: str = ""


def unread_keys(fields: Mapping[str, Any], read: Container[str]) -> list[str]:
    """The keys that have a value and are not among those that are read."""
    return [key for key, value in fields.items() if key not in read and value not in EMPTY]


def kind_of(value: object) -> str:
    """The type of a value, by JSON's names."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value)) or ("a number" if isinstance(value, (int, float)) else type(value).__name__)

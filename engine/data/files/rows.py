"""What a reader of files hands on: rows, and the faults of single ones."""

from __future__ import annotations

from typing import Any, BinaryIO, NamedTuple

Bytes = BinaryIO  # of a file, unpacked
Fields = dict[str, Any]  # a JSON object: row, message, tool
ROW = 1 << 28  # bytes or characters, at most: beyond any model, within memory
TOO_LARGE = f"is longer than {ROW >> 20} MiB. Part it into several rows, or give running text as a .txt file"


class BadRow(ValueError):
    """A row's fault; later rows can be read."""


class Row(NamedTuple):
    """`number`: line or row as an editor counts. A long text has several, from `starts` to `ends`."""

    number: int
    value: Fields | BadRow
    starts: bool = True
    ends: bool = True
    before: str = ""  # the text before a piece, and after it: CONTEXT characters, less where it begins or ends
    after: str = ""


def kind_of(value: object) -> str:
    """A value's type in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value)) or ("a number" if isinstance(value, (int, float)) else type(value).__name__)

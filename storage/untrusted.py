"""Small files that nobody vouches for: read within bounds, parsed, and held against the shape that they should have."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from itertools import repeat
from pathlib import Path

from trireme.storage.files import StoreError

SMALL = 256 << 20  # bytes; tokenizers have up to 60 million
NAME = 60  # characters of somebody else's name that an error shows
LINE = 20_000  # characters of a line on the terminal
# Controls of C0 and C1, halves of surrogate pairs, and what turns the direction of writing, ends lines or is invisible.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff"
    "\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def read_small(path: Path, limit: int = SMALL, links: bool = False) -> bytes:
    """The content of a regular file of at most `limit` bytes; with `links` also where the name is a symbolic link.

    Raises StoreError where it is something else (a pipe would be waited for, a device read, for ever), or OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreError(errno.EINVAL, "is not a regular file", str(path))
        content = file.read(limit + 1)
    if len(content) > limit:
        raise StoreError(errno.EFBIG, f"has more than {limit} bytes", str(path))
    return content


def parse_json(text: bytes, what: str) -> dict:
    """The JSON object in `text`, no key twice. Raises ValueError whatever the bytes are."""

    def unique(pairs):
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ValueError(f"the {what} names something twice")
        return fields

    try:
        fields = json.loads(text.decode(), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"the {what} is nested too deeply") from None
    except ValueError as e:  # also UnicodeDecodeError and JSONDecodeError
        raise ValueError(f"the {what} is not valid JSON ({str(e)[:100]})") from None
    if type(fields) is not dict:
        raise ValueError(f"the {what} is not a JSON object")
    return fields


def complaint(value: object, shape: object) -> str:
    """What is wrong with a JSON value, "" where it has the shape.

    A shape is a type, where int means 0 to 2^63; `[shape]`, a list of such; `(shape, shape)`, a list of just these;
    `{str: shape}`, an object of such; `{"name": shape}`, an object with just these names.
    """
    if isinstance(shape, type):
        good = type(value) is shape and (shape is not int or 0 <= value < 1 << 63)
        return "" if good else _is_not(value, "a whole number" if shape is int else KINDS[shape])
    kind = dict if isinstance(shape, dict) else list
    if type(value) is not kind:
        return _is_not(value, KINDS[kind])
    if isinstance(shape, list):
        parts = zip(range(len(value)), value, repeat(shape[0]))
    elif isinstance(shape, tuple):
        if len(value) != len(shape):
            return f" has {len(value)} entries, expected {len(shape)}"
        parts = zip(range(len(value)), value, shape, strict=True)
    elif str in shape:
        parts = zip(value, value.values(), repeat(shape[str]))
    else:
        for odd in value.keys() ^ shape.keys():
            return f"{' has' if odd in value else ' lacks'} {shown(odd)!r}"
        parts = ((key, value[key], inner) for key, inner in shape.items())
    for key, item, inner in parts:
        if wrong := complaint(item, inner):
            return (f"[{key}]" if kind is list else f".{shown(key)}") + wrong
    return ""


def _is_not(value: object, expected: str) -> str:
    return f" is {KINDS.get(type(value)) or shown(repr(value))}, expected {expected}"


def shown(text: str, most: int = NAME) -> str:
    """Text that a stranger may have written, as part of one line: control characters are escaped as Python does it, and
    what is longer than `most` characters loses its middle.
    """
    half = most // 2
    if len(text) > most:
        text = f"{text[:half]}…({len(text) - 2 * half:,} more characters)…{text[-half:]}"
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def is_plain(name: str) -> bool:
    """Whether a file name, or a path with `/`, stays in its folder and can be shown as it is."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not any(part in ("", ".", "..") for part in parts)

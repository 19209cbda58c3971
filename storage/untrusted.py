"""Checks of what is read back: checksums, JSON with a checksum, limits on the size of small files.

Checksums are XXH3 with 64 bits (25 GB/s a thread): they find errors that drives do not report.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from trireme.storage.files import StoreError

if TYPE_CHECKING:
    from typing_extensions import Buffer

SMALL = 256 << 20  # tokenizers: up to 60 million
TEXT = 64 << 20  # a template, options, prompts
PART = 1 << 20  # bytes of a read
NAME = 60  # characters shown of a foreign name
FILE_NAME = 260  # characters of a file's name, at most 255, with the punctuation around it
LINE = 20_000  # characters on the terminal
# C0 and C1 controls, surrogates, characters that turn direction, end lines or are invisible.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff"
    "\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
SEAL = re.compile(rb'\{"format": (\d{1,9}), "xxh3_64": "([0-9a-f]{16})", (?=")')
KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
NUMBERS = {int: "a whole number", float: "a number"}
REMEDIES = {
    errno.EACCES: "Change its permissions.",
    errno.EPERM: "Change its permissions.",
    errno.EIO: "Is its drive failing? See dmesg.",
}
Shape = Any  # type, set, [Shape], (Shape, ...), {key: Shape}


def read_small(path: Path, limit: int = SMALL, links: bool = False) -> bytes:
    """A regular file's content. Raises OSError; StoreError beyond `limit` or for pipes and devices, which never end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreError(errno.EINVAL, "is not a regular file", str(path))
        content = _up_to(limit + 1, file)
    if len(content) > limit:
        raise StoreError(errno.EFBIG, f"has more than {limit} bytes", str(path))
    return content


def _up_to(limit: int, file: BinaryIO) -> bytes:
    """The first `limit` bytes at most. file.read(limit) would allocate all of them, beyond some limits of memory."""
    parts = []
    while part := file.read(min(limit, PART)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def why(error: OSError | ValueError) -> str:
    """The reason of an error, for a line that names the file itself."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def unreadable(path: Path, error: OSError) -> str:
    """The message that a file of a checkpoint cannot be read, and what to do."""
    how = REMEDIES.get(error.errno or 0, "Put the file itself there, or download it again.")
    return f"{path} cannot be read: {why(error)}. {how}"


def read_text(path: Path) -> str:
    """The UTF-8 text of a file that the user names, or of a pipe. Raises OSError, UnicodeDecodeError."""
    with path.open("rb") as file:
        content = _up_to(TEXT + 1, file)
    if len(content) > TEXT:
        raise StoreError(errno.EFBIG, f"has more than {TEXT >> 20} MiB", str(path))
    return content.decode()


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError for anything else, also if a key occurs twice."""
    repeated: list[str] = []

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            repeated.append(next(key for key, after in pairwise(sorted(key for key, _ in pairs)) if key == after))
        return fields

    try:
        fields = json.loads(text.decode(), object_pairs_hook=as_object)
    except RecursionError:
        raise ValueError(f"the {what} is nested too deeply") from None
    except ValueError as e:  # also UnicodeDecodeError and JSONDecodeError
        raise ValueError(f"the {what} is not valid JSON ({str(e)[:100]})") from None
    if repeated:
        raise ValueError(f"the {what} names {repeated[0]!r} twice")
    if type(fields) is not dict:
        raise ValueError(f"the {what} is not a JSON object")
    return fields


def complaint(value: object, shape: Shape) -> str:
    """What is wrong with a JSON value, "" if nothing.

    Shapes: a type (int: 0 to 2^63) or set of types; `[shape]`, a list; `(shape, shape)`, a list of that length; `{str:
    shape}`, an object; `{"name": shape}`, one of just these names.
    """
    if isinstance(shape, (type, set)):
        kinds = shape if isinstance(shape, set) else {shape}
        good = type(value) in kinds and (isinstance(value, bool) or not isinstance(value, int) or 0 <= value < 1 << 63)
        return "" if good else _is_not(value, " or ".join(sorted((KINDS | NUMBERS)[kind] for kind in kinds)))
    parts: Iterable[tuple[str, Any, Shape]]
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return _is_not(value, KINDS[dict])
        if str in shape:
            parts = ((f".{key}", item, shape[str]) for key, item in value.items())
        else:
            for odd in value.keys() ^ shape.keys():
                return f"{' has' if odd in value else ' lacks'} {odd!r}"
            parts = ((f".{key}", value[key], inner) for key, inner in shape.items())
    elif not isinstance(value, list):
        return _is_not(value, KINDS[list])
    elif isinstance(shape, tuple) and len(value) != len(shape):
        return f" has {len(value)} entries, expected {len(shape)}"
    else:
        inners = shape if isinstance(shape, tuple) else repeat(shape[0])
        parts = ((f"[{i}]", item, inner) for i, (item, inner) in enumerate(zip(value, inners, strict=False)))
    for place, item, inner in parts:
        if wrong := complaint(item, inner):
            return place + wrong
    return ""


def _is_not(value: object, expected: str) -> str:
    return f" is {KINDS.get(type(value)) or repr(value)[:NAME]}, expected {expected}"


def shown(text: str, most: int = NAME) -> str:
    """Foreign text in one line: controls escaped, the middle cut where it is longer than `most` characters.

    The last name of a path is never cut.
    """
    half = most // 2
    _, slash, last = text[-FILE_NAME:].rpartition("/")
    end = max(half, len(slash + last)) if slash else half
    if len(text) > max(most, half + end):
        text = f"{text[:half]}…({len(text) - half - end:,} more characters)…{text[-end:]}"
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def quoted(path: str | Path) -> str:
    """A path as a word of a command that can be copied into a shell: bash or zsh, if it has control characters."""
    text = f"./{path}" if str(path).startswith("-") else str(path)
    if not (_CONTROLS.search(text) or re.search(r"\s\s|[^\S ]", text)):  # which are not shown as they are
        return shlex.quote(text)
    plain = (chr(b) if 32 < b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(text))
    return f"$'{''.join(plain)}'"


def is_plain(name: str) -> bool:
    """Whether `name` is a printable path within its folder."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not any(part in ("", ".", "..") for part in parts)


def checksum(buffers: Iterable[Buffer]) -> str:
    """The checksum of concatenated buffers, 16 hexadecimal digits. Releases the GIL."""
    sums = xxhash.xxh3_64()
    for buffer in buffers:
        sums.update(buffer)
    return sums.hexdigest()


def summed(buffers: Iterable[Any], take: Callable[[str], None]) -> Iterator[Any]:
    """The same buffers; after the last one calls take(checksum)."""
    sums = xxhash.xxh3_64()
    for buffer in buffers:
        sums.update(buffer)
        yield buffer
    take(sums.hexdigest())


def seal(version: int, fields: dict[str, Any]) -> bytes:
    """`fields` as JSON that begins with the format's version and a checksum."""
    rest = json.dumps(fields).encode().removeprefix(b"{")
    return b'{"format": %d, "xxh3_64": "%s", ' % (version, checksum([rest]).encode()) + rest


def unseal(text: bytes, version: int, what: str) -> dict[str, Any]:
    """The fields of a sealed text. Raises ValueError if it was changed, StoreError if it has another version."""
    match = re.match(rb'\{"format": (\d{1,9})[,}]', text)
    if match and int(match[1]) != version:
        message = f"is of format {int(match[1])}, this version reads {version}. Use the version that wrote it"
        raise StoreError(errno.EINVAL, message)
    sealed = SEAL.match(text)
    if not sealed or checksum([text[sealed.end() :]]) != sealed[2].decode():
        raise ValueError("it is not what was written")
    return parse_json(b"{" + text[sealed.end() :], what)

"""Checksums, against drives and cables that change a bit and say nothing: XXH3, 64 bits, some 25 GB/s a thread."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator

import xxhash

from trireme.storage.files import StoreError
from trireme.storage.untrusted import parse_json

SUM = re.compile(r"[0-9a-f]{16}")
SEAL = re.compile(rb'\{"format": (\d{1,9}), "xxh3_64": "([0-9a-f]{16})", (?=")')


def checksum(buffers: Iterable) -> str:
    """The checksum of buffers one after another, as 16 hexadecimal digits. Does not hold the interpreter's lock."""
    sums = xxhash.xxh3_64()
    for buffer in buffers:
        sums.update(buffer)
    return sums.hexdigest()


def summed(buffers: Iterable, found: Callable[[str], None]) -> Iterator:
    """The buffers one after another, and after the last of them found(their checksum)."""
    sums = xxhash.xxh3_64()
    for buffer in buffers:
        sums.update(buffer)
        yield buffer
    found(sums.hexdigest())


def seal(version: int, fields: dict) -> bytes:
    """`fields` as a JSON object that begins with the version of its format and the checksum of all that follows."""
    rest = json.dumps(fields).encode().removeprefix(b"{")
    return b'{"format": %d, "xxh3_64": "%s", ' % (version, checksum([rest]).encode()) + rest


def unseal(text: bytes, version: int, what: str) -> dict:
    """The fields that `seal` put into `text`. Raises ValueError where a bit is another one; StoreError where all is
    of another version.
    """
    found = re.match(rb'\{"format": (\d{1,9})[,}]', text)
    if found and int(found[1]) != version:
        message = f"is of format {int(found[1])}, this version reads {version}. Go on with the version that wrote it"
        raise StoreError(errno.EINVAL, message)
    sealed = SEAL.match(text)
    if not sealed or checksum([text[sealed.end() :]]) != sealed[2].decode():
        raise ValueError("it is not what was written")
    return parse_json(b"{" + text[sealed.end() :], what)

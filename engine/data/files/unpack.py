"""Files as bytes: compressed ones are unpacked while they are read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from trireme.engine.data.files.rows import Bytes
from trireme.models.config import InputError
from trireme.storage.untrusted import quoted

PACKINGS = (".gz", ".bz2", ".xz", ".zst")
DAMAGES = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, OSError)  # OSError with an errno is none
_MAGIC = (
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"BZh", "bzip2", ".bz2"),
    (b"\xfd7zXZ", "xz", ".xz"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", ".zst"),
    (b"PAR1", "Parquet", ".parquet"),
    (b"ARROW1", "Arrow", ".arrow"),
)
_OTHERS = (
    (b"PK\x03\x04", "a zip archive", "Unpack it: unzip"),
    (b"\x80\x04\x95", "a pickle of Python", "Write its rows as JSON lines, from"),
    (b"SQLite format 3", "a SQLite database", "Write its rows as CSV, from"),
    (b"\x89PNG", "an image", "Name a file of text, not"),
    (b"%PDF", "a PDF", "Write its text into a .txt file, from"),
)

_PART = 1 << 16  # bytes read at once
_COLUMNS = {"messages", "conversations", "text", "prompt", "instruction", "input_ids"}


def unpacked(path: Path, raw: BinaryIO) -> Bytes:
    """The bytes of a file. Raises InputError if a package for it is not installed; reading raises DAMAGES."""
    packing = path.suffix.lower()
    if packing == ".gz":
        return cast(BinaryIO, gzip.open(raw))
    if packing == ".bz2":
        return io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor), 1 << 16)
    if packing == ".xz":
        return io.BufferedReader(_Streams(raw, lzma.LZMADecompressor), 1 << 16)
    if packing != ".zst":
        return raw
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            f"{path}: .zst needs pyarrow. Install it: pip install pyarrow. Or unpack it: zstd -d."
        ) from None
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), 1 << 16)


class _Streams(io.RawIOBase):
    """All compressed streams of a file, with zeros between them: Python's readers silently ignore what follows the
    zeros.
    """

    def __init__(self, raw: BinaryIO, make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]):
        self._raw, self._make, self._decoder = raw, make, make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises OSError, EOFError or lzma.LZMAError if the file is damaged."""
        while True:
            if self._decoder.eof:
                rest = self._decoder.unused_data.lstrip(b"\0")
                while not rest and (more := self._raw.read(_PART)):
                    rest = more.lstrip(b"\0")
                if not rest:
                    return 0
                self._decoder, given = self._make(), rest
            else:
                given = self._raw.read(_PART) if self._decoder.needs_input else b""
                if self._decoder.needs_input and not given:
                    raise EOFError("it ends within a stream")
            if part := self._decoder.decompress(given, len(buffer)):
                buffer[: len(part)] = part
                return len(part)


def misnamed(path: Path, head: bytes) -> str:
    """What a file with these first bytes is, and what to do, if its name says otherwise; else ""."""
    for magic, what, suffix in _MAGIC:
        if head.startswith(magic) and path.suffix.lower() != suffix:
            name = path.name.removesuffix(path.suffix) if suffix in (".parquet", ".arrow") else path.name
            renamed = path.with_name(name + suffix)
            return f"is {what} with another extension. Rename it: mv {quoted(path)} {quoted(renamed)}"
    for magic, what, advice in _OTHERS:
        if head.startswith(magic):
            return f"is {what}. {advice} {quoted(path)}"
    name, kind = path.name.removesuffix(path.suffix), path.suffix.lower()
    if kind in (".csv", ".tsv") and head.removeprefix(b"\xef\xbb\xbf").lstrip()[:2] in (b'{"', b"[{"):
        return f"is JSON with another extension. Rename it: mv {quoted(path)} {quoted(path.with_name(name + '.jsonl'))}"
    page = head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html"))
    if page and path.suffix.lower() not in (".txt", ".md"):
        return "is a web page, not data. Download the file itself: its address has /resolve/ in it, not /blob/"
    return ""


def rows_by_name(path: Path) -> str:
    """What a text is whose first line is a row in JSON, and what to do; else ""."""
    with path.open("rb") as raw:
        first = raw.readline(1 << 20).removeprefix(b"\xef\xbb\xbf")
    if not first.startswith(b"{"):
        return ""
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(row, dict) or not _COLUMNS & row.keys():
        return ""
    return f"holds rows of JSON, not running text. Rename it: mv {quoted(path)} {quoted(path.with_suffix('.jsonl'))}"

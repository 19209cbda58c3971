"""What a data file is, by its name and its first bytes, and its bytes, which are unpacked while they are read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from trireme.models.config import InputError
from trireme.storage.untrusted import quoted

LINES, TEXTS, COLUMNS = (".jsonl", ".ndjson"), (".txt", ".md"), (".parquet", ".arrow")
KINDS = (*LINES, ".json", ".csv", ".tsv", *TEXTS, *COLUMNS)
PACKINGS = (".gz", ".bz2", ".xz", ".zst")
DAMAGES = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, OSError)  # OSError with an errno is none
STDIN = "standard input"
_SIGNS = (  # first bytes, what it is, the suffix that it should have, else what to do with it
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"BZh", "bzip2", ".bz2"),
    (b"\xfd7zXZ", "xz", ".xz"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", ".zst"),
    (b"PAR1", "Parquet", ".parquet"),
    (b"ARROW1", "Arrow", ".arrow"),
    (b"PK\x03\x04", "a zip archive", "Unpack it: unzip"),
    (b"\x04\x22\x4d\x18", "LZ4", "Unpack it: lz4 -d"),
    (b"\x1f\x9d", "packed by compress", "Unpack it: uncompress"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "Unpack it: 7z x"),
    (b"Rar!", "a RAR archive", "Unpack it: unrar x"),
    (b"GGUF", "a model in GGUF, not data", "Name a file of rows, not"),
    (b"\x80\x04\x95", "a pickle of Python", "Write its rows as JSON lines, from"),
    (b"\x93NUMPY", "an array of numpy", "Write its rows as JSON lines, from"),
    (b"\x89HDF", "HDF5", "Write its rows as JSON lines, from"),
    (b"Obj\x01", "Avro", "Write its rows as JSON lines, from"),
    (b"SQLite format 3", "a SQLite database", "Write its rows as CSV, from"),
    (b"\x89PNG", "an image", "Name a file of text, not"),
    (b"\xff\xd8\xff", "an image", "Name a file of text, not"),
    (b"%PDF", "a PDF", "Write its text into a .txt file, from"),
)
_UNPACK = {".gz": "zcat", ".bz2": "bzcat", ".xz": "xzcat", ".zst": "zstdcat"}
_PART = 1 << 16  # bytes read at once
NAMES = {"messages", "conversations", "text", "prompt", "completion", "instruction", "output", "input_ids", "chosen"}


def file_kind(path: Path) -> str:
    """The kind of a file, one of KINDS or another suffix, without its packing."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in PACKINGS else suffix


def check_file(path: Path, piped: bool = False) -> None:
    """Raises InputError if a file cannot be opened, is empty, or is not what its name says. `piped`: what standard
    input held is there.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file. Pipe it into standard input: --data -.")
    kind = file_kind(path)
    if kind not in KINDS and path.exists():  # opening says that it does not
        raise InputError(f"{path}: unknown kind of data. Expected {', '.join(KINDS)}, or {', '.join(PACKINGS)} of one.")
    try:
        with path.open("rb") as file:
            head = file.read(64)
            line = head + file.readline(1 << 20) if b"\n" not in head else head.partition(b"\n")[0]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. Correct the path.") from None
    if not head:
        raise InputError(f"{path} is empty. Name another file with --data.")
    if what := _piped(head, line) if piped else _misnamed(path, head) or _no_text(path, head, line):
        raise InputError(f"{STDIN if piped else path} {what}.")


def _misnamed(path: Path, head: bytes) -> str:
    """What a file with these first bytes is, and what to do, if its name says otherwise; else ""."""
    for sign, what, advice in _SIGNS:
        if head.startswith(sign) and advice[:1] != ".":
            return f"is {what}. {advice} {quoted(path)}"
        if head.startswith(sign) and path.suffix.lower() != advice:
            name = path.name.removesuffix(path.suffix) if advice in COLUMNS else path.name
            return f"is {what} with another extension. Rename it: mv {quoted(path)} {quoted(path.with_name(name + advice))}"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the data. Run git lfs pull, or download it again"
    wide = "UTF-32" if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") else "UTF-16"
    if wide == "UTF-32" or head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"is {wide}. Convert it: iconv -f {wide} -t UTF-8 {quoted(path)} > NEW"
    return ""


def _no_text(path: Path, head: bytes, line: bytes) -> str:
    """What a table or a text is that holds something else, and what to do; else ""."""
    kind, bare = path.suffix.lower(), head.removeprefix(b"\xef\xbb\xbf").lstrip()
    renamed = f"Rename it: mv {quoted(path)} {quoted(path.with_suffix('.jsonl'))}"
    if kind in (".csv", ".tsv") and bare[:2] in (b'{"', b"[{"):
        return f"is JSON with another extension. {renamed}"
    if kind not in TEXTS and bare[:15].lower().startswith((b"<!doctype html", b"<html")):
        return "is a web page, not data. Download the file itself: its address has /resolve/ in it, not /blob/"
    if kind in TEXTS and line.removeprefix(b"\xef\xbb\xbf").startswith(b"{"):
        try:
            row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except (ValueError, RecursionError):
            return ""
        return f"holds rows of JSON, not running text. {renamed}" if NAMES & row.keys() else ""
    return ""


def _piped(head: bytes, line: bytes) -> str:
    """What standard input holds that is neither rows of JSON nor text, and what to do; else ""."""
    for sign, what, advice in _SIGNS:
        if head.startswith(sign):
            way = f"Unpack it on the way: {_UNPACK[advice]} FILE | trireme …" if advice in _UNPACK else "Name a file"
            return f"is {what}. {way}"
    if re.search(r"\x00", head.decode("latin-1")):
        return "holds NUL bytes, so it is no UTF-8 text. Name a file"
    cells = re.split(r"[,;\t]", line.decode("utf-8", "replace").strip().lstrip("\ufeff"))
    if len(cells) > 1 and NAMES & {cell.strip('"') for cell in cells}:
        return "looks like a table, and is read as JSON lines or running text. Name the file, which has to end in .csv"
    return ""


def unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    """The bytes of a file. Raises InputError if a package for it is not installed; reading raises DAMAGES."""
    packing = path.suffix.lower()
    if packing == ".gz":
        return cast(BinaryIO, gzip.open(raw))
    if packing == ".bz2":
        return io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor), _PART)
    if packing == ".xz":
        return io.BufferedReader(_Streams(raw, lzma.LZMADecompressor), _PART)
    if packing != ".zst":
        return raw
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            f"{path}: .zst needs pyarrow. Install it: pip install pyarrow. Or unpack it: zstd -d."
        ) from None
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), _PART)


class _Streams(io.RawIOBase):
    """All compressed streams of a file, with zeros between them, after which Python's own readers end in silence."""

    def __init__(self, raw: BinaryIO, make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]):
        self._raw, self._make, self._decoder = raw, make, make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises OSError, EOFError or lzma.LZMAError if the file is damaged."""
        while True:
            if self._decoder.eof:
                block = self._decoder.unused_data.lstrip(b"\0")
                while not block and (part := self._raw.read(_PART)):
                    block = part.lstrip(b"\0")
                if not block:
                    return 0
                self._decoder = self._make()
            else:
                block = self._raw.read(_PART) if self._decoder.needs_input else b""
                if self._decoder.needs_input and not block:
                    raise EOFError("it ends within a stream")
            if part := self._decoder.decompress(block, len(buffer)):
                buffer[: len(part)] = part
                return len(part)

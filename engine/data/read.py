"""Files of data: what they are, their bytes, and their rows of JSON or of running text, one at a time.

A fault of a row is a BadRow in its place, and later rows can still be read; a fault of the file is an InputError.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

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


# ---------------------------------------------------------------- bytes


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
            renamed = quoted(path.with_name(name + advice))
            return f"is {what} with another extension. Rename it: mv {quoted(path)} {renamed}"
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

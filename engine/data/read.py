"""Files of data: what they are, their bytes, and their rows of JSON or of running text, one at a time.

A fault of a row is a BadRow in its place, and later rows can still be read; a fault of the file is an InputError.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from trireme.models.config import InputError
from trireme.storage.untrusted import quoted

OBJECTS, TEXTS, COLUMNS = (".jsonl", ".ndjson", ".json"), (".txt", ".md"), (".parquet", ".arrow")
KINDS = (*OBJECTS, ".csv", ".tsv", *TEXTS, *COLUMNS)
PACKINGS = (".gz", ".zst")
ERRORS = (ValueError, LookupError, ArithmeticError, RuntimeError, OSError, EOFError, zlib.error, csv.Error)  # of files
STDIN = "standard input"
_SIGNS = {  # first bytes: what the file is, and what makes a file of it that can be read
    b"\x1f\x8b": ("gzip", ".gz", "zcat"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", ".zst", "zstdcat"),
    b"PAR1": ("Parquet", ".parquet", ""),
    b"ARROW1": ("Arrow", ".arrow", ""),
    b"BZh": ("bzip2", "", "bzcat"),
    b"\xfd7zXZ": ("xz", "", "xzcat"),
    b"GGUF": ("a model in GGUF", "", ""),
    b"version https://git-lfs": ("a pointer of Git LFS", "", "git lfs pull -I"),
}
_PART = 1 << 16  # bytes read at once
_ROW = re.compile(r'\[?\s*\{\s*"')  # how JSON of rows begins
_NAMES = {"messages", "conversations", "text", "prompt", "completion", "instruction", "output", "input_ids", "chosen"}
SEPARATOR = "<|endoftext|>"  # ends a document of running text, whatever the tokenizer
_MEDIA = re.compile(r"(image|video|audio|pixel_value|input_feature)(_path)?(_url)?s?", re.IGNORECASE)  # keys
EMPTY: tuple[Any, ...] = (None, "", [], {})  # says as much as a key that is not there
ROW = 1 << 24  # bytes or characters, at most: beyond any model, within the time and memory of a process for a text
TOO_LARGE = f"is longer than {ROW >> 20} MiB. Part it into several rows, or give running text as a .txt file"
CONTEXT = 64  # characters on each side of a piece of a long text, which decide its tokens at the borders
_PIECE = 1 << 18  # characters that are read at once, and of a piece, if a line ends behind them
_MOST = 2 * _PIECE + CONTEXT + len(SEPARATOR)  # characters of a text that is not divided
_LINE = re.compile(r"\n(?=\S)")  # before a line that a piece may begin with
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


def json_type(value: object) -> str:
    """The type of a value, by JSON's names."""
    names = {dict: "an object", str: "a string", bool: "a boolean", type(None): "null", int: "a number"}
    names |= {float: "a number", list: f"a list of {len(value)}" if isinstance(value, list) else ""}
    return names.get(type(value), type(value).__name__)


def typed(value: Any, kind: type | tuple[type, ...], name: str, expected: str) -> Any:
    """The value. Raises BadRow if it is not of that type."""
    if not isinstance(value, kind):
        raise BadRow(f"{name} is {json_type(value)}, expected {expected}")
    return value


# ---------------------------------------------------------------- bytes


def refuse_media(fields: Mapping[str, Any], location: str = "") -> None:
    """Raises BadRow if a column, or a key at `location`, has images, videos or audio."""
    for key, value in fields.items():
        if _MEDIA.fullmatch(key) and value not in (*EMPTY, "[]", "{}", "null"):
            way_out = "" if location else f". Where its text stands alone, leave the column out: --map unused={key}"
            raise BadRow(f"{location}{key!r} holds content that is not text; only text can be trained on{way_out}")


def file_kind(path: Path) -> str:
    """The kind of a file, one of KINDS or another suffix, without its packing."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in PACKINGS else suffix


def check_file(path: Path, piped: bool = False) -> None:
    """Raises InputError if a file cannot be opened, is empty, or is not what its name says. `piped`: what standard
    input held is there.
    """
    name, fault = STDIN if piped else str(path), ""
    try:
        if path.exists() and not path.is_file():
            fault = "is not a regular file. Pipe it into standard input: --data -"
        else:
            with path.open("rb") as file:
                fault = _foreign(file.readline(1 << 20), name, "" if piped else path.suffix.lower())
    except OSError as error:
        fault = f"cannot be read: {error.strerror}. Correct the path"
    if not (fault or piped or file_kind(path) in KINDS):
        fault = f"is an unknown kind of data. Expected {', '.join(KINDS)}, or {', '.join(PACKINGS)} of one"
    if fault:
        raise InputError(f"{name} {fault}.")


def _foreign(line: bytes, name: str, suffix: str) -> str:
    """What is wrong with a file by its first line and its name's suffix ("": standard input), and what to do."""
    if not line:
        return "is empty. Name another file with --data"
    content, ending, command = next((entry for sign, entry in _SIGNS.items() if line.startswith(sign)), ("", "", ""))
    if content and ending and suffix:
        return f"is {content}. Rename it, so that it ends in {ending}" if suffix != ending else ""
    if content:
        convert = f"Convert it first: {command} {quoted(name) if suffix else 'FILE | trireme …'}"
        return f"is {content}. {convert if command else 'Name a file of rows'}"
    text = line.decode("utf-8", "replace").strip("\ufeff \t\r\n")
    if suffix in (*TEXTS, ".csv", ".tsv") and _ROW.match(text) and _NAMES & {*re.findall(r'"(\w+)"\s*:', text)}:
        return "holds rows of JSON. Rename it, so that it ends in .jsonl"
    cells = [cell.strip('"') for cell in re.split(r"[,;\t]", text)]
    if not suffix and len(cells) > 1 and not _NAMES.isdisjoint(cells):
        return "looks like a table, and is read as JSON lines or as text. Name the file"
    return ""


def decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    """The bytes of a file. Raises InputError if a package for it is not installed; reading raises ERRORS."""
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(import_pyarrow(path).CompressedInputStream(raw, "zstd"), _PART)
    return cast(BinaryIO, gzip.open(raw)) if path.suffix.lower() == ".gz" else raw


def import_pyarrow(path: Path) -> Any:
    """The package that reads a file. Raises InputError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: {path.suffix} needs pyarrow. Install it: pip install pyarrow.") from None
    return pyarrow


# ---------------------------------------------------------------- JSON


def object_of(pairs: Sequence[tuple[str, Any]]) -> Fields:
    """An object of these keys and values, or a row of these columns. Raises BadRow if a key occurs twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=lambda _: None)  # NaN, Infinity: null


def json_of(text: str) -> Any:
    """The value of JSON in a string. Raises ValueError (BadRow if a key occurs twice), RecursionError."""
    return _DECODER.decode(text)


def fault_of(error: Exception) -> str:
    """What is wrong with a row or a file, by what reading it raised, one of ERRORS."""
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start : error.end]
        return f"is not UTF-8 ({byte!r}); if all of the file is in one encoding, iconv converts it"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error.msg} at character {error.pos + 1})"
    if isinstance(error, csv.Error):
        return f"is not CSV ({error}): a quotation mark may be missing"
    if isinstance(error, BadRow):
        return str(error)
    message = " ".join(str(error).partition(";")[0].split()).rstrip(".")
    return "is nested too deeply" if isinstance(error, RecursionError) else f"cannot be read ({message})"


def _object(value: object) -> Fields | BadRow:
    return value if isinstance(value, dict) else BadRow(f"holds {json_type(value)}, expected an object")


def holds_lines(path: Path) -> bool:
    """Whether a file of OBJECTS has one a line: not an array, nor objects of several lines."""
    with path.open("rb") as raw:
        file = decompressed(path, raw)
        lines = filter(None, (line.strip(_BOM + _SPACE) for line in iter(lambda: file.readline(ROW), b"")))
        first = next(lines, b"")
        if first[:1] != b"{":
            return first[:1] != b"["
        with suppress(ValueError, RecursionError):
            json.loads(first)
            return True
        # a bad row, or the first line of an object, which is short
        return len(first) > ROW // 2 or next(lines, b"")[:1] == b"{"


def json_lines(file: BinaryIO) -> Iterator[Row]:
    for number, line in enumerate(iter(lambda: file.readline(ROW), b""), 1):
        if len(line) == ROW and not line.endswith(b"\n"):
            while (part := file.readline(ROW)) and not part.endswith(b"\n"):
                pass
            yield Row(number, BadRow(TOO_LARGE))
        elif row := line.rstrip().lstrip(_BOM + _SPACE):  # files with a mark may have been joined
            yield Row(number, _read_object(row))


def _read_object(text: bytes) -> Fields | BadRow:
    try:
        return _object(json_of(text.decode()))
    except (ValueError, RecursionError) as error:
        return BadRow(fault_of(error))


def json_values(file: BinaryIO) -> Iterator[Row]:
    """Yields the objects of JSON arrays, or objects one after the other."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    buffer, pos, number, inside, unread = "", 0, 0, False, True
    while True:
        space = re.compile(r"[\s,]*" if inside else r"\s*").match(buffer, pos)
        assert space, "an empty match is one"
        pos = space.end()
        if pos < len(buffer) and buffer[pos] == "[]"[inside]:
            inside, pos = not inside, pos + 1
            continue
        try:
            _, end = json.JSONDecoder().raw_decode(buffer, pos)
        except json.JSONDecodeError as error:
            broken = error.pos < len(buffer) - 16 and not error.msg.startswith("Unterminated string")
            if not unread and pos == len(buffer) and not inside:
                return
            if broken or not unread or len(buffer) - pos > ROW:
                part = f"is not JSON ({error.msg}): the file may be incomplete"
                raise BadRow(part if broken or not unread else TOO_LARGE) from None
            # the value may go on; doubling keeps a huge one cheap
            block = text.read(max(_CHUNK, min(len(buffer) - pos, ROW - len(buffer) + pos)))
            buffer, pos, unread = buffer[pos:] + block, 0, bool(block)
        else:
            value, number, pos = _read_object(buffer[pos:end].encode()), number + 1, end
            yield Row(number, value)


# ---------------------------------------------------------------- running text


def text_rows(file: BinaryIO) -> Iterator[Row]:
    """Yields pieces of documents, which end at SEPARATOR. A piece begins with a line that does not begin with a space,
    if there is one where it may begin.
    """
    stream = io.TextIOWrapper(file, encoding="utf-8-sig")  # CRLF becomes LF
    number, text, before, starts, block = 1, "", "", True, " "
    while block:
        block = stream.read(_PIECE)
        if "\0" in block:
            raise BadRow("holds NUL bytes, so it is not text")
        parts = (text + block).split(SEPARATOR)
        for i, part in enumerate(parts):
            text = part.lstrip("\n") if starts else part
            number += len(part) - len(text)
            if block and i + 1 == len(parts):
                break  # the document may go on
            if text.strip() or not starts:
                yield Row(number, {"text": text.rstrip("\n")}, starts, True, before)
            number, before, starts = number + text.count("\n"), "", True
        if block and len(text) > _MOST:  # so what is behind a piece holds no beginning of a separator
            line = _LINE.search(text, _PIECE, 2 * _PIECE)
            stop = line.end() if line else 2 * _PIECE
            piece, text = text[:stop], text[stop:]
            yield Row(number, {"text": piece}, starts, False, before, text[:CONTEXT])
            number, before, starts = number + piece.count("\n"), (before + piece)[-CONTEXT:], False

"""Rows of tables: CSV, Parquet, Arrow."""

from __future__ import annotations

import csv
import io
import shutil
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from trireme.engine.data.files.json_rows import json_of
from trireme.engine.data.files.rows import ROW, TOO_LARGE, BadRow, Bytes, Fields, Row
from trireme.models.config import InputError

_BATCH = 256  # rows made at once
_ABSENT = ("nan", "NaN", "<NA>")
_TIME = 0.5  # stands for a time, which is named as not used
_JSON = "arrow.json"
_Form = str | dict[str, Any] | list[Any]  # _JSON, or the forms of an object's keys, or of a list's values


class _Lines:
    """Checked lines. `number`: of the last one. `taken`: characters of the row so far, which its reader sets to 0."""

    def __init__(self, path: Path, stream: io.TextIOWrapper):
        self._path, self._stream, self.number, self.taken = path, stream, 0, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._stream.readline(ROW)
        if not line:
            raise StopIteration
        self.number += 1
        self.taken += len(line)
        if "\0" in line:
            raise InputError(f"{self._path} line {self.number} holds NUL bytes: is it text?")
        if self.taken >= ROW:
            raise InputError(f"{self._path}: the row that ends with line {self.number} {TOO_LARGE}.")
        return line


def read_csv(path: Path, file: Bytes, tabs: bool) -> Iterator[Row]:
    """Yields rows of CSV. Cells end with the comma, semicolon or tab that the first line has most of. `tabs`: with a
    tab, if it has one.

    A cell with nan, which pandas writes for absent values, is null.
    """
    csv.field_size_limit(ROW)
    lines = _Lines(path, io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
    first = next(lines, "")
    comma = "\t" if tabs and "\t" in first else max(",;\t", key=first.count)
    reader = csv.reader(chain([first] if first else [], lines), delimiter=comma, strict=True)
    begins = 1
    try:
        header = next(reader, [])
        if len(set(header)) != len(header):
            raise InputError(f"{path}: the header names a column twice: {', '.join(header)}.")
        begins = reader.line_num + 1
        for cells in reader:
            lines.taken, number, begins = 0, begins, reader.line_num + 1
            if not cells:
                continue
            if cells == header or [cell.removeprefix("\ufeff") for cell in cells] == header:
                yield Row(number, BadRow("is the header again. Were files joined? Give each with its own --data"))
            elif len(cells) != len(header):
                yield Row(number, BadRow(f"has {len(cells)} cells, the header {len(header)}"))
            else:
                values = [None if cell in _ABSENT else cell for cell in cells]
                yield Row(number, dict(zip(header, values, strict=True)))
    except csv.Error as error:
        where = f"line {begins}" + (f" to {reader.line_num}" if reader.line_num > begins else "")
        raise InputError(f"{path} {where} is not CSV: {error}. Is a quotation mark missing?") from None


def read_columns(path: Path, file: Bytes, arrow: bool) -> Iterator[Row]:
    """Yields rows of Parquet or, with `arrow`, of Arrow's files and streams. Both are read in any order, so a packed
    file is unpacked first, into a temporary one.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: {path.suffix} needs pyarrow. Install it: pip install pyarrow.") from None
    if not file.seekable():
        packed, file = file, cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115, closed with the generator
        try:
            shutil.copyfileobj(packed, file)
        except OSError as error:
            where = f"{path}: it cannot be unpacked into a file in {tempfile.gettempdir()}"
            raise InputError(
                f"{where}: {error.strerror}. Unpack it, or set TMPDIR to a folder with more space."
            ) from None
        file.seek(0)
    number, batches = 0, _arrow if arrow else _parquet
    try:
        for batch, timed in batches(pyarrow, path, file):
            times = dict.fromkeys(timed, _TIME)
            inside = {field.name: form for field in batch.schema if (form := _json_in(pyarrow, field))}
            for value in batch.to_pylist():
                number += 1
                yield Row(number, _fields(value, inside, times))
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        if getattr(error, "errno", None) or isinstance(error, InputError):  # a failing disk; pyarrow's own have none
            raise
        what = " ".join(str(error).split()).rstrip(".")
        kind = "Arrow" if arrow else "Parquet"
        raise InputError(f"{path} is not {kind} that can be read: {what}.") from None


def _parquet(pyarrow: Any, path: Path, file: Bytes) -> Iterator[tuple[Any, list[str]]]:
    made = pyarrow.parquet.ParquetFile(file)
    names, timed = _columns(pyarrow, path, made.schema_arrow)
    yield from ((batch, timed) for batch in made.iter_batches(_BATCH, columns=names))


def _arrow(pyarrow: Any, path: Path, file: Bytes) -> Iterator[tuple[Any, list[str]]]:
    """Batches of a stream, as the datasets library writes it, or of an Arrow file."""
    if file.read(6) == b"ARROW1":
        made = pyarrow.ipc.open_file(file)
        batches = (made.get_batch(i) for i in range(made.num_record_batches))
    else:
        file.seek(0)
        batches = made = pyarrow.ipc.open_stream(file)
    names, timed = _columns(pyarrow, path, made.schema)
    for batch in batches:
        kept = batch.select(names)
        yield from ((kept.slice(at, _BATCH), timed) for at in range(0, kept.num_rows, _BATCH))


def _columns(pyarrow: Any, path: Path, schema: Any) -> tuple[list[str], list[str]]:
    """(columns to read, columns of times: no format uses them, and Python has no nanoseconds). Raises InputError."""
    if len(set(schema.names)) != len(schema.names):
        raise InputError(f"{path} names a column twice: {', '.join(schema.names)}.")
    timed = [field.name for field in schema if pyarrow.types.is_temporal(field.type)]
    return [name for name in schema.names if name not in timed], timed


def _fields(row: Fields, inside: dict[str, _Form], times: Fields) -> Fields | BadRow:
    """`inside`: where columns have JSON."""
    try:
        found = {k: _decoded(v, inside[k]) if k in inside else _without_nulls(v) for k, v in row.items()}
    except BadRow as error:
        return error
    return found | times


def _json_in(pyarrow: Any, field: Any) -> _Form | None:
    """Where a field has JSON in strings, Arrow's type `arrow.json`: the datasets library stores values so that are of
    several types, such as a content that is a text or a list.
    """
    known = getattr(field.type, "extension_name", "")  # older versions of pyarrow only keep what is said of it
    if _JSON in (known, (field.metadata or {}).get(b"ARROW:extension:name", b"").decode(errors="replace")):
        return _JSON
    types = pyarrow.types
    if types.is_struct(field.type):
        return {inner.name: form for inner in field.type if (form := _json_in(pyarrow, inner))} or None
    if types.is_list(field.type) or types.is_large_list(field.type) or types.is_fixed_size_list(field.type):
        form = _json_in(pyarrow, field.type.value_field)
        return [form] if form else None
    return None


def _decoded(value: Any, form: _Form | None) -> Any:
    """As _without_nulls, with JSON in place of its strings. Raises BadRow."""
    if value is None or form is None:
        return _without_nulls(value)
    if isinstance(form, dict):
        return {key: _decoded(inside, form.get(key)) for key, inside in value.items() if inside is not None}
    if isinstance(form, list):
        return [_decoded(inside, form[0]) for inside in value]
    try:
        return json_of(value)
    except BadRow:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRow(f"holds {value[:40]!r}, which its column says is JSON ({error})") from None


def _without_nulls(value: Any) -> Any:
    """A value without keys that are null: Arrow gives each object of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    return [_without_nulls(inside) for inside in value] if isinstance(value, list) else value

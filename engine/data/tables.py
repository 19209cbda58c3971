"""Rows of tables: CSV, Parquet, Arrow."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from trireme.engine.data.read import COLUMNS, PACKINGS, ROW, TOO_LARGE, BadRow, Fields, Row, file_kind, json_of
from trireme.models.config import InputError

_BATCH = 256  # rows that are made at once
_TIME = 0.5  # stands for a time, which is listed as not used
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


def csv_rows(path: Path, file: BinaryIO, tabs: bool) -> Iterator[Row]:
    """Yields rows of CSV, whose cells end with the comma, semicolon or tab that the first line has most of, or that
    Excel's line sep=; names. With `tabs` a cell ends at any tab, and is quoted only if it ends with a quotation mark.

    A cell with nan, which pandas writes for absent values, is null.
    """
    csv.field_size_limit(ROW)
    lines = _Lines(path, io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
    first, comma = next(lines, ""), ""
    if named := re.fullmatch(r"\"?sep=(.)\"?\r?\n", first):
        first, comma = next(lines, ""), named[1]
    comma = comma or ("\t" if tabs and "\t" in first else max(",;\t", key=first.count))
    source = chain([first] if first else [], lines)
    rows = map(_tabbed, source) if tabs and comma == "\t" else csv.reader(source, delimiter=comma, strict=True)
    begins = lines.number
    try:
        header = next(rows, [])
        if len(set(header)) != len(header):
            raise InputError(f"{path}: the header names a column twice: {', '.join(header)}.")
        begins = lines.number + 1
        for cells in rows:
            lines.taken, number, begins = 0, begins, lines.number + 1
            if not cells:
                continue
            if cells == header or [cell.removeprefix("\ufeff") for cell in cells] == header:
                yield Row(number, BadRow("is the header again. Were files joined? Give each with its own --data"))
            elif len(cells) != len(header):
                yield Row(number, BadRow(f"has {len(cells)} cells, the header {len(header)}"))
            else:
                values = [None if cell in ("nan", "NaN", "<NA>") else cell for cell in cells]
                yield Row(number, dict(zip(header, values, strict=True)))
    except csv.Error as error:
        where = f"line {begins}" + (f" to {lines.number}" if lines.number > begins else "")
        raise InputError(f"{path} {where} is not CSV: {error}. Is a quotation mark missing?") from None


def _tabbed(line: str) -> list[str]:
    line = line.rstrip("\r\n")
    whole = re.compile(r'"((?:[^"]|"")*)"')
    quoted = [whole.fullmatch(cell) for cell in line.split("\t")] if line else []
    return [
        match[1].replace('""', '"') if match else cell for match, cell in zip(quoted, line.split("\t"), strict=False)
    ]


# ---------------------------------------------------------------- columns


def column_rows(path: Path, file: BinaryIO, arrow: bool) -> Iterator[Row]:
    """Yields rows of Parquet or, with `arrow`, of Arrow's files and streams. Both are read in any order, so a packed
    file is unpacked first, into a temporary one.
    """
    pyarrow = _pyarrow(path)
    if not file.seekable():
        packed, file = file, cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115, closed with the generator
        try:
            shutil.copyfileobj(packed, file)
        except OSError as error:
            where = f"{path}: it cannot be unpacked into a file in {tempfile.gettempdir()}"
            raise InputError(
                f"{where}: {error.strerror or error}. Unpack it, or set TMPDIR to a folder with more space."
            ) from None
        file.seek(0)
    number = 0
    try:
        schema, batches = _opened(pyarrow, file, arrow)
        if len(set(schema.names)) != len(schema.names):
            raise InputError(f"{path} names a column twice: {', '.join(schema.names)}.")
        timed = [field.name for field in schema if pyarrow.types.is_temporal(field.type)]  # Python has no nanoseconds
        inside = {field.name: form for field in schema if (form := _json_in(pyarrow, field))}
        for batch in batches([name for name in schema.names if name not in timed]):
            for value in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield Row(number, _fields(value, inside, dict.fromkeys(timed, _TIME)))
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError, KeyError) as error:
        if getattr(error, "errno", None) or isinstance(error, InputError):  # a failing disk; pyarrow's own have none
            raise
        kind, what = "Arrow" if arrow else "Parquet", " ".join(str(error).split()).rstrip(".")
        raise InputError(f"{path} is not {kind} that can be read: {what}.") from None


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: {path.suffix} needs pyarrow. Install it: pip install pyarrow.") from None
    return pyarrow


def _opened(pyarrow: Any, file: BinaryIO, arrow: bool) -> tuple[Any, Any]:
    """(schema, function from the columns to read to batches) of a Parquet file, an Arrow file, or a stream, as the
    datasets library writes it.
    """
    if not arrow:
        made = pyarrow.parquet.ParquetFile(file)
        return made.schema_arrow, lambda names: made.iter_batches(_BATCH, columns=names)
    if file.read(6) == b"ARROW1":
        made = pyarrow.ipc.open_file(file)
        blocks = (made.get_batch(i) for i in range(made.num_record_batches))
    else:
        file.seek(0)
        blocks = made = pyarrow.ipc.open_stream(file)
    parts = lambda block: (block.slice(at, _BATCH) for at in range(0, block.num_rows, _BATCH))
    return made.schema, lambda names: chain.from_iterable(parts(block.select(names)) for block in blocks)


def class_names(path: Path, column: str) -> tuple[str, ...]:
    """The names of a column's classes, if the datasets library has written them (its ClassLabel); else ()."""
    if file_kind(path) not in COLUMNS or path.suffix.lower() in PACKINGS:
        return ()
    pyarrow = _pyarrow(path)
    with suppress(pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        with path.open("rb") as file:
            schema, _ = _opened(pyarrow, file, file_kind(path) == ".arrow")
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        if feature["_type"] == "ClassLabel" and all(isinstance(name, str) for name in feature["names"]):
            return tuple(feature["names"])
    return ()


def _fields(row: Fields, inside: dict[str, _Form], times: Fields) -> Fields | BadRow:
    """`inside`: where columns have JSON."""
    try:
        return {key: _decoded(value, inside.get(key)) for key, value in row.items()} | times
    except BadRow as error:
        return error


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
    """A value without keys that are null, since Arrow gives each object of a column the keys of all, and with JSON in
    place of its strings where `form` says so. Raises BadRow.
    """
    if isinstance(value, dict):
        forms = form if isinstance(form, dict) else {}
        return {key: _decoded(held, forms.get(key)) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [_decoded(held, form[0] if isinstance(form, list) else None) for held in value]
    if value is None or form != _JSON:
        return value
    try:
        return json_of(value)
    except BadRow:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRow(f"holds {value[:40]!r}, which its column says is JSON ({error})") from None

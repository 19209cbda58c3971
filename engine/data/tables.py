"""Rows of tables: CSV, Parquet, Arrow."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from trireme.engine.data.read import COLUMNS, PACKINGS, ROW, BadRow, Row, file_kind, import_pyarrow, object_of

_BATCH = 256  # rows that are made at once
_TIME = 0.5  # stands for a time, which is listed as not used


def csv_rows(file: BinaryIO, tabs: bool) -> Iterator[Row]:
    """Yields rows of CSV, whose cells end with the comma, semicolon or tab that the first line has most of, or that
    Excel's line sep=; names. With `tabs` a cell ends at any tab, and is quoted only if it ends with a quotation mark.

    A cell with nan, which pandas writes for absent values, is null.
    """
    csv.field_size_limit(ROW)
    stream = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    lines = iter(lambda: stream.readline(ROW), "")
    first = next(lines, "")
    named = re.fullmatch(r"\"?sep=(.)\"?\r?\n", first)
    first = next(lines, "") if named else first
    comma = named[1] if named else "\t" if tabs and "\t" in first else max(",;\t", key=first.count)
    bare = tabs and comma == "\t"
    reader = csv.reader(chain([first], lines), delimiter=comma, strict=True, quoting=csv.QUOTE_NONE if bare else 0)
    number = lambda: reader.line_num + bool(named)  # of a row's last line
    header = [name.strip() for name in (_unquoted(next(reader, [])) if bare else next(reader, []))]
    object_of([(name, None) for name in header])
    for cells in map(_unquoted, reader) if bare else reader:
        if cells and [cell.strip("\ufeff ") for cell in cells] == header:
            yield Row(number(), BadRow("is the header again. Were files joined? Give each with its own --data"))
        elif cells and len(cells) != len(header):
            yield Row(number(), BadRow(f"has {len(cells)} cells, the header {len(header)}"))
        elif cells:
            values = [None if cell in ("nan", "NaN", "<NA>") else cell for cell in cells]
            yield Row(number(), dict(zip(header, values, strict=True)))


def _unquoted(cells: list[str]) -> list[str]:
    quoted = [re.fullmatch(r'"((?:[^"]|"")*)"', cell) for cell in cells]
    return [match[1].replace('""', '"') if match else cell for match, cell in zip(quoted, cells, strict=True)]


# ---------------------------------------------------------------- columns


def column_rows(path: Path, file: BinaryIO, arrow: bool) -> Iterator[Row]:
    """Yields rows of Parquet or, with `arrow`, of Arrow's files and streams."""
    pyarrow, number = import_pyarrow(path), 0
    file = file if file.seekable() else cast(BinaryIO, io.BytesIO(file.read()))
    schema, batches = _opened(pyarrow, file, arrow)
    object_of([(name, None) for name in schema.names])
    times = {field.name: _TIME for field in schema if pyarrow.types.is_temporal(field.type)}  # may be nanoseconds
    for batch in batches([name for name in schema.names if name not in times]):
        for cells in batch.to_pylist(maps_as_pydicts="strict"):
            number += 1
            yield Row(number, {key: _without_nulls(value) for key, value in cells.items()} | times)


def _opened(pyarrow: Any, file: BinaryIO, arrow: bool) -> tuple[Any, Any]:
    """(schema, function from the columns to read to batches) of a Parquet file, an Arrow file, or a stream, as the
    datasets library writes it.
    """
    if not arrow:
        table = pyarrow.parquet.ParquetFile(file)
        return table.schema_arrow, lambda names: table.iter_batches(_BATCH, columns=names)
    if file.read(6) == b"ARROW1":
        table = pyarrow.ipc.open_file(file)
        blocks = (table.get_batch(i) for i in range(table.num_record_batches))
    else:
        file.seek(0)
        blocks = table = pyarrow.ipc.open_stream(file)

    def parts(names: Sequence[str]) -> Iterator[Any]:
        for block in blocks:
            block.validate(full=True)  # offsets of a damaged file point anywhere
            yield from (block.select(names).slice(start, _BATCH) for start in range(0, block.num_rows, _BATCH))

    return table.schema, parts


def class_names(path: Path, column: str) -> tuple[str, ...]:
    """The names of a column's classes, if the datasets library has written them (its ClassLabel); else ()."""
    if file_kind(path) not in COLUMNS or path.suffix.lower() in PACKINGS:
        return ()
    pyarrow = import_pyarrow(path)
    with suppress(pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, RecursionError):
        with path.open("rb") as file:
            schema, _ = _opened(pyarrow, file, file_kind(path) == ".arrow")
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        if feature["_type"] == "ClassLabel" and all(isinstance(name, str) for name in feature["names"]):
            return tuple(feature["names"])
    return ()


def _without_nulls(value: Any) -> Any:
    """A value without keys that are null, since Arrow gives each object of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value

"""The safetensors format: 8 bytes with the header's length, the header in JSON, then the tensors without gaps.

Tensors have to cover the data. Headers are written with spaces up to a multiple of 4,096 bytes.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.storage.layout import ITEMSIZE, Layout, TensorSpec, round_up
from trireme.storage.untrusted import parse_json, unreadable

AGAIN = "Download or copy it again"
MAX_HEADER = 32 << 20
MAX_TENSORS = 100_000  # of one file; the largest models have as many in all
MARKS = {b"{": 1, b"[": 2, b",": 16}  # most for each tensor, before parsing: objects outgrow text
LFS_POINTER = b"version https://git-lfs"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the file and says what is wrong and what to do."""


@dataclass(frozen=True)
class Header:
    """The header of a file. Offsets of tensors count from `data`, which is an offset in the file."""

    layout: Layout
    metadata: dict[str, str]
    data: int


def read_header(path: Path) -> Header:
    """Reads a file's header. Raises CheckpointError unless it is complete and consistent."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
            raise CheckpointError(f"{path} is not a regular file. Put the file itself there.")
        with path.open("rb") as f:
            start = f.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise CheckpointError(f"{path} is a {status.st_size}-byte Git LFS pointer. Run `git lfs pull`.")
            length = int.from_bytes(start[:8], "little")
            if status.st_size < 8 or length > status.st_size - 8:
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: it has {status.st_size} bytes, its header would "
                    f"end at byte {8 + length}. {AGAIN}."
                )
            if length > MAX_HEADER:
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes; {MAX_HEADER} is the most accepted. {AGAIN}."
                )
            f.seek(8)
            text = f.read(length)
    except OSError as e:
        raise CheckpointError(unreadable(path, e)) from e
    try:
        layout, metadata = parse_header(text, status.st_size - 8 - length)
    except ValueError as e:
        raise CheckpointError(f"{path}: {e}. {AGAIN}.") from e
    return Header(layout, metadata, 8 + length)


def parse_header(text: bytes, data_bytes: int) -> tuple[Layout, dict[str, str]]:
    """(tensors by offset, metadata) of a header with `data_bytes` after it. Raises ValueError."""
    if any(text.count(mark) > most * MAX_TENSORS for mark, most in MARKS.items()):
        raise ValueError(f"the header lists more than {MAX_TENSORS} tensors, the most accepted")
    fields = parse_json(text, "header")
    metadata = fields.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
        raise ValueError("__metadata__ is not a map of strings")
    layout = parse_tensors(fields)
    if layout.nbytes > data_bytes:
        raise ValueError(
            f"the file is truncated: its tensors take {_short(layout.nbytes)} bytes, {data_bytes} are there"
        )
    if layout.nbytes < data_bytes:
        raise ValueError(f"{data_bytes - layout.nbytes} bytes follow the last tensor")
    return layout, metadata


def parse_tensors(fields: dict[str, Any]) -> Layout:
    """The layout of a header's tensors. Raises ValueError if there is a gap or an overlap."""
    tensors = [_tensor(name, *_entry(name, entry)) for name, entry in fields.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    end = 0
    for t in tensors:
        if t.offset != end:
            place = f"begins at byte {_short(t.offset)} of the data, expected {end}"
            raise ValueError(f"{t.name!r} {place}: a gap or an overlap")
        end += t.nbytes
    return Layout(tuple(tensors))


def _entry(name: str, entry: object) -> tuple[str, list[int], list[int]]:
    """(dtype, shape, data_offsets) of a tensor, with the right types. Raises ValueError."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} lacks dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in ITEMSIZE:
        raise ValueError(f"{name!r} has dtype {str(dtype)[:20]!r}; known are {', '.join(ITEMSIZE)}")
    for numbers in (shape, offsets):
        if type(numbers) is not list or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{name!r}: shape and data_offsets must be lists of whole numbers")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r}: data_offsets must be [begin, end]")
    return dtype, shape, offsets


def _tensor(name: str, dtype: str, shape: list[int], offsets: list[int]) -> TensorSpec:
    """A tensor whose size is that of its shape. Raises ValueError."""
    nbytes = 0 if 0 in shape else ITEMSIZE[dtype]
    for n in shape:  # stops early: a shape of a million numbers is an attack
        nbytes *= n
        if nbytes > offsets[1]:
            break
    if nbytes != offsets[1] - offsets[0]:
        taken = _short(offsets[1] - offsets[0])
        raise ValueError(f"{name!r} takes {taken} bytes, its shape and dtype say otherwise")
    return TensorSpec(name, dtype, tuple(shape), offsets[0])


def _short(n: int) -> str:
    return str(n) if n < 1 << 64 else "2^64 or more"


def encode_header(layout: Layout, metadata: dict[str, str] | None = None) -> bytes:
    """A file's first bytes: length and header, padded to a multiple of 4,096."""
    fields = ({"__metadata__": metadata} if metadata else {}) | list_tensors(layout)
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = round_up(8 + len(text)) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def list_tensors(layout: Layout) -> dict[str, dict[str, Any]]:
    """The inverse of parse_tensors."""
    return {
        t.name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": [t.offset, t.offset + t.nbytes]}
        for t in layout.tensors
    }

"""Tokenized documents on disk: written once, and used only if complete.

A cache is a folder tokens-<key>/, which gets this name when it is complete. The key is a hash of all that decides the
content:

  tokens       ids, the top bit: trained
  offsets.npy  (documents + 1,) int64
  trained.npy  (documents,) int64, trained tokens
  weights.npy  (documents,) float64, as int64, of data with weights other than 1
  values.npy   (documents,) float64, as int64, of data with values other than 0: classes, margins of pairs
  meta.json    what was read, size of `tokens`, checksums, its own too

Files are read, not mapped: if a mapped file is truncated, the process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import time
import weakref
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jinja2
import numpy as np
import tokenizers

from trireme.storage.files import StoreError
from trireme.storage.untrusted import read_small, seal, unseal

_VERSION = 1
_BLOCK = 1 << 22
_HEADER = 128  # bytes of a .npy
KEPT = 20  # a shelf takes at most a twentieth of its drive
UNUSED = 24 * 3600.0  # seconds after which an empty folder of another version is removed
SMALL, OFTEN = 1000, 32  # for a cache below 1/SMALL of that, room is made only if it is one in OFTEN


def digest(path: Path, told: Callable[[int], object] = lambda _: None) -> str:
    """SHA-256 of a file. `told` is called with the number of bytes read so far."""
    value = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value.update(block)
            told(file.tell())
    return value.hexdigest()


def cache_key(*parts: Any) -> str:
    """A hash of `parts`, which are values of JSON."""
    return hashlib.sha256(json.dumps([_VERSION, *parts], sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class TokenFile:
    """A cache that was opened."""

    path: Path  # of `tokens`
    fd: int  # closed with this object
    dtype: np.dtype  # uint16 or uint32
    offsets: np.ndarray  # (documents + 1,) int64
    trained: np.ndarray  # (documents,) int64
    meta: dict[str, Any]
    own_weights: np.ndarray | None = None  # (documents,) float64
    own_values: np.ndarray | None = None  # (documents,) float64

    @property
    def n_documents(self) -> int:
        return len(self.trained)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def weights(self) -> np.ndarray | float:
        return 1.0 if self.own_weights is None else self.own_weights

    def values_at(self, starts: np.ndarray) -> np.ndarray:
        """Values of the documents that begin with these tokens, float64."""
        if self.own_values is None:
            return np.zeros(len(starts))
        return self.own_values[np.searchsorted(self.offsets, starts, side="right") - 1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as stored, for `decode`. Raises StoreError."""
        size = self.dtype.itemsize
        try:
            block = os.pread(self.fd, (stop - start) * size, start * size)
        except OSError as error:
            raise StoreError(error.errno, error.strerror, str(self.path)) from error
        if len(block) < (stop - start) * size:
            raise StoreError(errno.EIO, "was cut while the run was reading it", str(self.path))
        return np.frombuffer(block, self.dtype)


def decode(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, trained bool) of tokens as stored."""
    top = _top_bit(stored.dtype)
    return (stored & (top - 1)).astype(np.int32), stored >= top


def _top_bit(dtype: np.dtype) -> int:
    return 1 << (8 * dtype.itemsize - 1)


class TokenWriter:
    """Writes a cache: `add` documents, then `finish` or `abandon`."""

    def __init__(self, folder: Path, key: str, vocabulary: int):
        """`vocabulary`: larger than all ids, at most 1 << 31."""
        self.final = folder / f"tokens-{key}"
        self.scratch = folder / f"tokens-{key}.partial"
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self._dtype = np.dtype("<u2" if vocabulary <= 1 << 15 else "<u4")
        self._file = (self.scratch / "tokens").open("wb")
        self._lengths = array("q")  # there may be many millions
        self._trained = array("q")
        self._weights, self._values = array("d"), array("d")
        self._crc = 0
        self.max_id = -1
        self._before = (0, 0, -1)  # bytes, checksum and largest id before the last document

    def add(
        self, ids: np.ndarray, trained: np.ndarray, starts: bool = True, weight: float = 1.0, value: float = 0.0
    ) -> None:
        """Adds tokens: ids (n,) int32, trained (n,) bool. Without `starts` they continue the last document. `weight`,
        `value`: of the document.
        """
        if starts:
            self._before = (self._file.tell(), self._crc, self.max_id)
        if len(ids):
            self.max_id = max(self.max_id, int(ids.max()))
        top = _top_bit(self._dtype)
        assert self.max_id < top
        block = (ids.astype(self._dtype) | trained.astype(self._dtype) * self._dtype.type(top)).tobytes()
        self._crc = zlib.crc32(block, self._crc)
        self._file.write(block)
        if starts:
            self._lengths.append(0)
            self._trained.append(0)
            self._weights.append(weight)
            self._values.append(value)
        self._lengths[-1] += len(ids)
        self._trained[-1] += int(trained.sum())

    def drop(self) -> None:
        """Removes the last document, which was not complete."""
        end, self._crc, self.max_id = self._before
        self._file.seek(end)
        self._file.truncate()
        for table in (self._lengths, self._trained, self._weights, self._values):
            table.pop()

    def finish(self, meta: dict[str, Any]) -> TokenFile:
        """Gives the cache its name and opens it."""
        with self._file as file:
            size = file.tell()
            _sync(file)
        offsets = np.concatenate([[0], np.cumsum(np.array(self._lengths, np.int64))]).astype(np.int64)
        trained = np.array(self._trained, np.int64)
        tables = {"offsets": offsets, "trained": trained}
        if any(weight != 1.0 for weight in self._weights):
            tables["weights"] = np.array(self._weights, np.float64).view(np.int64)
        if any(self._values):
            tables["values"] = np.array(self._values, np.float64).view(np.int64)
        for name, table in tables.items():
            with (self.scratch / f"{name}.npy").open("wb") as file:
                np.save(file, table)
                _sync(file)
        sums = [self._crc, *(zlib.crc32(table.tobytes()) for table in tables.values())]
        meta = (
            meta
            | {"weighted": "weights" in tables, "valued": "values" in tables}
            | {"dtype": self._dtype.str, "bytes": size, "max_id": self.max_id, "crc32": sums}
        )
        with (self.scratch / "meta.json").open("wb") as file:
            file.write(seal(_VERSION, meta))
            _sync(file)
        shutil.rmtree(self.final, ignore_errors=True)
        self.scratch.rename(self.final)
        made = open_tokens(self.final)
        if made is None:
            raise OSError(errno.EIO, "what was written cannot be read back", str(self.final))
        return made

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # the buffer may not fit on the disk either
            self._file.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


@dataclass(frozen=True)
class Shelf:
    """Caches of tokens kept for later runs, by key. Those not used for longest are removed for new ones."""

    folder: Path  # of this version: another may make other tokens of the same data

    @classmethod
    def under(cls, folder: Path) -> Shelf:
        """Raises OSError."""
        value = hashlib.sha256(f"{tokenizers.__version__} {jinja2.__version__}".encode())
        for path in sorted(Path(__file__).parent.rglob("*.py")):
            value.update(path.read_bytes())
        (folder / value.hexdigest()[:12]).mkdir(parents=True, exist_ok=True)
        return cls(folder / value.hexdigest()[:12])

    def find(self, key: str) -> TokenFile | None:
        place = self.folder / f"tokens-{key}"
        if made := open_tokens(place):
            with contextlib.suppress(OSError):
                os.utime(place)
        else:
            shutil.rmtree(place, ignore_errors=True)
        return made

    def has_room(self, nbytes: int) -> bool:
        disk = shutil.disk_usage(self.folder)
        return nbytes <= min(disk.total // KEPT, disk.free // 2)

    def put(self, made: TokenFile) -> None:
        """Moves a cache of the same drive here. It can still be read, also if it is removed meanwhile."""
        place = self.folder / made.path.parent.name
        with contextlib.suppress(OSError):  # another process was faster
            made.path.parent.rename(place)
            os.utime(place)
        room = shutil.disk_usage(self.folder).total // KEPT
        small = SMALL * _used(place)[1] < room
        if small and len(list(self.folder.glob("tokens-*"))) % OFTEN:
            return  # else each of hundreds of files would look at all caches
        for _, size, old in sorted(map(_used, self.folder.parent.glob("*/tokens-*")), reverse=True):
            room -= size
            if room < 0 and old != place:
                shutil.rmtree(old, ignore_errors=True)
        for other in {*self.folder.parent.iterdir()} - {self.folder}:  # of other versions, which may be running
            with contextlib.suppress(OSError):
                if other.stat().st_mtime < time.time() - UNUSED:
                    other.rmdir()  # if it is empty


def _used(place: Path) -> tuple[float, int, Path]:
    """(time of the last use, bytes, path)."""
    try:
        return place.stat().st_mtime, sum(file.stat().st_size for file in place.iterdir()), place
    except OSError:  # removed meanwhile
        return 0.0, 0, place


_META = dict(key=str, name=str, format=str, rows=int, bad=int, first_bad=str, max_id=int, bytes=int)
_COUNTS = dict(
    unused=list,
    absent=list,
    characters=int,
    unknown=int,
    said=int,
    unwritten=int,
    chats=int,
    early=int,
    weighted=bool,
    valued=bool,
)  # in later versions


def open_tokens(folder: Path) -> TokenFile | None:
    """Opens a cache; None if it is not intact. Raises MemoryError."""
    if not all((folder / name).is_file() for name in ("tokens", "offsets.npy", "trained.npy", "meta.json")):
        return None
    try:
        fd = os.open(folder / "tokens", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    found = None
    try:
        found = _checked(folder, fd)
        return found
    finally:
        if found is None:
            os.close(fd)
        else:
            weakref.finalize(found, os.close, fd)


def _checked(folder: Path, fd: int) -> TokenFile | None:
    """The cache; None if it is not intact. `fd`: of `tokens`. Raises MemoryError: the cache may be intact."""
    try:
        meta = unseal(read_small(folder / "meta.json"), _VERSION, "meta.json")
        more = [name for name, there in (("weights", "weighted"), ("values", "valued")) if meta.get(there)]
        read = {name: _table(folder / f"{name}.npy") for name in ("offsets", "trained", *more)}
        offsets, trained, tables = read["offsets"], read["trained"], list(read.values())
        dtype = np.dtype({"<u2": "<u2", "<u4": "<u4"}[meta["dtype"]])
        lengths = np.diff(offsets)
        if not all(type(meta[name]) is kind for name, kind in _META.items()) or folder.name != f"tokens-{meta['key']}":
            return None
        meta = {name: kind() for name, kind in _COUNTS.items()} | meta
        if not all(type(meta[name]) is kind for name, kind in _COUNTS.items()):
            return None
        if not all(isinstance(key, str) for key in (*meta["unused"], *meta["absent"])):
            return None
        if len(offsets) != len(trained) + 1 or offsets[0] != 0 or ((trained < 0) | (trained > lengths)).any():
            return None
        if os.fstat(fd).st_size != meta["bytes"] or int(offsets[-1]) * dtype.itemsize != meta["bytes"]:
            return None
        crc, max_id = _read_through(fd, dtype)
        if [crc, *(zlib.crc32(table.tobytes()) for table in tables)] != meta["crc32"]:
            return None
        if max_id != meta["max_id"]:
            return None
        own = {name: read[name].view(np.float64) for name in more}
        if any(len(table) != len(trained) or not np.isfinite(table).all() for table in own.values()):
            return None
        return TokenFile(folder / "tokens", fd, dtype, offsets, trained, meta, own.get("weights"), own.get("values"))
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, OverflowError, RecursionError):
        return None


def _table(path: Path) -> np.ndarray:
    """(n,) int64 of a file. Its header is compared, not parsed. Raises ValueError."""
    with path.open("rb") as file:
        head = file.read(_HEADER)
        table = np.fromfile(file, np.int64)
    expected = io.BytesIO()
    np.lib.format.write_array_header_1_0(expected, np.lib.format.header_data_from_array_1_0(table))
    if head != expected.getvalue() or path.stat().st_size != _HEADER + table.nbytes:
        raise ValueError(f"{path} is not a table")
    return table


def _read_through(fd: int, dtype: np.dtype) -> tuple[int, int]:
    """(CRC-32, largest id or -1) of the tokens."""
    crc, max_id, at, below = 0, -1, 0, _top_bit(dtype) - 1
    while block := os.pread(fd, _BLOCK, at):
        crc, at = zlib.crc32(block, crc), at + len(block)
        max_id = max(max_id, int((np.frombuffer(block, dtype) & below).max()))
    return crc, max_id

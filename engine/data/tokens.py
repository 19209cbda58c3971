"""Tokenized documents on disk: written once, and used only if complete.

A key is a hash of all that decides the content, so that runs can share a folder. KEY.tokens holds uint32: an id, and
in the top bit whether it is trained. KEY.npz, which is written last, holds tables of the documents, the report, and the
checksum of the tokens.

Files are read, not mapped: if a mapped file is truncated, the process is killed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import weakref
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from trireme.storage.files import StoreError, sync_folder
from trireme.storage.temporary import Temporary

VERSION = 3  # raise it when equal rows get other tokens or masks, or files another form
SHARE = 20  # of a drive, tokens of other runs take at most a twentieth
_BLOCK = 1 << 22
_NAME = re.compile(r"[0-9a-f]{24}\.(npz|tokens)")
_TRAINED, _SIZE = np.uint32(1 << 31), 4  # the bit, and bytes of a token
_TABLES = ("offsets", "trained", "weights", "values")


def digest_of(paths: Iterable[Path], tell: Callable[[int], object]) -> str:
    """SHA-256 of files. `tell` is called with the number of bytes read so far."""
    value, nbytes = hashlib.sha256(), 0
    for path in paths:
        value.update(f"{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                value.update(block)
                nbytes += len(block)
                tell(nbytes)
    return value.hexdigest()


def key_of(*parts: Any) -> str:
    """A hash of values of JSON, and of the versions of what makes tokens."""
    versions = [VERSION, tokenizers.__version__, jinja2.__version__]
    return hashlib.sha256(json.dumps([*versions, *parts], sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class TokenFile:
    """Tokens of a data file. `fd` is closed with this object."""

    path: Path
    fd: int
    meta: dict[str, Any]
    offsets: np.ndarray  # (documents + 1,) int64
    trained: np.ndarray  # (documents,) int64: trained tokens
    weights: np.ndarray  # (documents,) float64
    values: np.ndarray  # (documents,) float64: classes, margins

    @property
    def n_documents(self) -> int:
        return len(self.trained)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def documents_at(self, tokens: np.ndarray) -> np.ndarray:
        """The index of the document that each token, by its number in the file, is of."""
        return np.searchsorted(self.offsets, tokens, side="right") - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as stored, for `unpack_tokens`. Raises OSError; StoreError if the file was cut."""
        block = os.pread(self.fd, (stop - start) * _SIZE, start * _SIZE)
        if len(block) < (stop - start) * _SIZE:
            raise StoreError(errno.EIO, "was cut while the run was reading it", str(self.path))
        return np.frombuffer(block, "<u4")


def unpack_tokens(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, trained bool) of tokens as stored."""
    return (stored & ~_TRAINED).astype(np.int32), stored >= _TRAINED


class Writer:
    """Writes a file of tokens: `add` documents, then `finish`; `close` in the end."""

    def __init__(self, folder: Path, key: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._key, self._max_id = folder, key, -1
        self._scratch = Temporary(".making-", folder)  # of this process: two may make one key
        self._file = (self._scratch.path / "tokens").open("w+b")
        self._lengths, self._trained = array("q"), array("q")  # there may be many millions
        self._weights, self._values = array("d"), array("d")

    def add(
        self, ids: np.ndarray, trained: np.ndarray, starts: bool = True, weight: float = 1.0, value: float = 0.0
    ) -> None:
        """Adds a document: ids (n,) int32, trained (n,) bool. Without `starts` they continue the last document."""
        if starts:
            self._lengths.append(0)
            self._trained.append(0)
            self._weights.append(weight)
            self._values.append(value)
        self._file.write((ids.astype("<u4") | trained * _TRAINED).tobytes())
        self._lengths[-1] += len(ids)
        self._trained[-1] += int(np.count_nonzero(trained))
        self._max_id = max(self._max_id, int(ids.max(initial=-1)))

    def written(self) -> TokenFile:
        """The documents so far."""
        self._file.flush()
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        tables = dict(zip(_TABLES, map(np.array, (offsets, self._trained, self._weights, self._values)), strict=True))
        return _open(self._scratch.path / "tokens", {"key": self._key, "max_id": self._max_id}, tables)

    def finish(self, meta: dict[str, Any]) -> TokenFile:
        """The documents, under their final name, with `meta`. Raises OSError."""
        file, path = self.written(), self._folder / f"{self._key}.tokens"
        file.meta.update(meta | {"crc32": _crc_of(file.fd)})
        os.fsync(file.fd)
        tables = {name: getattr(file, name) for name in _TABLES}
        with (self._scratch.path / "npz").open("wb") as npz:
            np.savez(npz, meta=np.frombuffer(json.dumps(file.meta).encode(), np.uint8), **tables)
            npz.flush()
            os.fsync(npz.fileno())
        for kind in ("tokens", "npz"):  # the same bytes, if another process makes them meanwhile
            (self._scratch.path / kind).rename(path.with_suffix(f".{kind}"))
        sync_folder(self._folder)
        return _open(path, file.meta, tables)

    def close(self) -> None:
        """Removes what is not finished."""
        with suppress(OSError):  # the buffer may not fit on the disk either
            self._file.close()
        self._scratch.close()


def open_tokens(folder: Path, key: str) -> TokenFile | None:
    """Opens a file of tokens; None if it is not there or not intact."""
    path = folder / f"{key}.tokens"
    try:
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:  # it compares a checksum of each table
            meta = json.loads(file["meta"].tobytes())
            tables = {name: file[name] for name in _TABLES}
        tokens = _open(path, meta, tables)
        nbytes = int(tokens.offsets[-1]) * _SIZE
        if meta["key"] != key or os.fstat(tokens.fd).st_size != nbytes or _crc_of(tokens.fd) != meta["crc32"]:
            return None
    except Exception:  # whatever a damaged archive raises
        return None
    for used in (path, path.with_suffix(".npz")):
        with suppress(OSError):
            os.utime(used)
    return tokens


def _open(path: Path, meta: dict[str, Any], tables: dict[str, np.ndarray]) -> TokenFile:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    file = TokenFile(path, fd, meta, **tables)
    weakref.finalize(file, os.close, fd)
    return file


def _crc_of(fd: int) -> int:
    crc = offset = 0
    while block := os.pread(fd, _BLOCK, offset):
        crc, offset = zlib.crc32(block, crc), offset + len(block)
    return crc


def tidy(folder: Path, used: Collection[str]) -> None:
    """Removes the files that were not used for longest, where those of other keys than `used` exceed their share of
    the drive. A run that has one open can read it still.
    """
    with suppress(OSError):  # other runs remove some, too
        room = shutil.disk_usage(folder).total // SHARE
        unused = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.stem not in used]
        for path in sorted(unused, key=lambda path: path.stat().st_mtime, reverse=True):
            room -= path.stat().st_size
            if room < 0:
                path.unlink()

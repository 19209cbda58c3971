"""A Hugging Face checkpoint folder: checked, read tensor by tensor, and written in the same form.

Only safetensors files are read. Memory holds one chunk at a time; pages read are dropped from the page cache.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple

import numpy as np

from trireme.storage.auxiliary import CONTENT, auxiliary_files, content_of, left_behind
from trireme.storage.files import (
    AnyPath,
    Say,
    StoreError,
    check_space,
    partial_of,
    read_into,
    store_errors,
    stream,
    sync_folder,
    to_stderr,
    write_synced,
)
from trireme.storage.headers import AGAIN, MAX_HEADER, CheckpointError, read_header
from trireme.storage.layout import ITEMSIZE
from trireme.storage.untrusted import checksum, is_plain, parse_json, read_small, summed, unreadable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE = 1 << 20  # fits in a core's cache
CHUNK = 16 << 20
NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # bf16 as bits


class SourceTensor(NamedTuple):
    """Where a tensor is. `dtype` as safetensors writes it; `offset` in bytes from the start of `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Source:
    """A checkpoint whose headers were checked. `files`: its safetensors files."""

    folder: Path
    files: tuple[str, ...]
    tensors: dict[str, SourceTensor]
    auxiliary: dict[str, CONTENT]  # other files, by name

    @property
    def others(self) -> dict[str, CONTENT]:
        """All files but weights. Next to a model.safetensors the index is left out, since libraries ignore it there."""
        index = SINGLE not in self.files and (self.folder / INDEX).exists()
        return self.auxiliary | ({INDEX: self.folder / INDEX} if index else {})

    @property
    def nbytes(self) -> int:
        """Bytes of its safetensors files; without files, of its tensors."""
        files = sum((self.folder / f).stat().st_size for f in self.files)
        return files or sum(t.nbytes for t in self.tensors.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name."""
        return {name: t.shape for name, t in self.tensors.items()}

    def named(self, name: str) -> str:
        """A tensor with its file, for messages; with the folder if there is no such tensor."""
        with suppress(KeyError):
            return f"{self.folder / self.place(name).file}: {name}"
        return f"{self.folder}: {name}"

    def computed_in(self, dtype: str) -> Source:  # noqa: ARG002 (values are given as they are stored)
        """The same for a computation in F32 or BF16, to which its values are not rounded by way of the other."""
        return self

    def read(self, name: str) -> np.ndarray:
        """A tensor's bytes, (nbytes,) uint8. Raises StoreError."""
        t = self.place(name)
        return self.bytes_of(t.file, t.offset, t.nbytes) if t.file else concat(self.values(name), None).view(np.uint8)

    def place(self, name: str) -> SourceTensor:
        """Where a tensor is stored."""
        return self.tensors[name]

    def bytes_of(self, file: str, offset: int, nbytes: int) -> np.ndarray:
        """Bytes of a file, (nbytes,) uint8. Raises StoreError."""
        out, filled = np.empty(nbytes, np.uint8), 0
        if nbytes <= CHUNK:  # without threads and buffers
            read_into(out.data, self.folder / file, offset)
            return out
        for chunk in _chunks(self.folder / file, offset, nbytes):
            out[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return out

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        """Yields elements [first, last) in their dtype (bf16 as uint16 bits); each array is valid until the next.

        Raises CheckpointError for a dtype that is not one of weights.
        """
        t = self.place(name)
        if t.dtype not in NUMPY:
            raise CheckpointError(unread(self.folder / t.file, name, t.dtype))
        size, last = ITEMSIZE[t.dtype], t.numel if last is None else last
        for chunk in _chunks(self.folder / t.file, t.offset + first * size, (last - first) * size):
            for a in range(0, len(chunk), PIECE):
                yield chunk[a : a + PIECE].view(NUMPY[t.dtype])

    def size_of(self, file: str) -> int:
        """Bytes that a weight file has when it is written again."""
        return (self.folder / file).stat().st_size

    @cached_property
    def names_in(self) -> dict[str, list[str]]:
        """The names of each file's tensors."""
        names: dict[str, list[str]] = {file: [] for file in self.files}
        for name, t in self.tensors.items():
            names.setdefault(t.file, []).append(name)
        return names

    def rewritten(self, file: str, fetch: Callable[[str], Iterable[np.ndarray] | None]) -> Iterator[np.ndarray]:
        """Yields a weight file's bytes with new values; the header stays. `fetch`: as of `export`."""
        tensors = sorted((t.offset, name) for name in self.names_in[file] if (t := self.tensors[name]).nbytes)
        path, position = self.folder / file, 0
        for offset, name in tensors:
            yield from _chunks(path, position, offset - position)
            t, new = self.tensors[name], fetch(name)
            yield from _chunks(path, offset, t.nbytes) if new is None else stored_values(name, t, new)
            position = offset + t.nbytes
        yield from _chunks(path, position, path.stat().st_size - position)


def unread(path: Path, name: str, dtype: str) -> str:
    """The message that a weight has a dtype that is not read."""
    return f"{path}: {name} is {dtype}; a weight must be {', '.join(NUMPY)}. Take the BF16 original."


def stored_values(name: str, t: SourceTensor, values: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """All values of a tensor as its bytes; uint8 are bytes already."""
    filled = 0
    for piece in values:
        raw = piece if piece.dtype == np.uint8 else convert(piece, dtype_of(piece), t.dtype).view(np.uint8)
        yield raw
        filled += len(raw)
    assert filled == t.nbytes, (name, filled, t.shape)


def open_source(folder: AnyPath, say: Say = to_stderr) -> Source:
    """Opens a checkpoint and checks all headers. `say` is called with files that are not copied. Raises
    CheckpointError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give the folder of a Hugging Face checkpoint.")
    if left := left_behind(folder):
        say(left)
    if (folder / SINGLE).exists():
        return _collect(folder, (SINGLE,), None)
    if (folder / INDEX).exists():
        weight_map = _read_index(folder)
        return _collect(folder, tuple(sorted(set(weight_map.values()))), weight_map)
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(files) == 1:
        return _collect(folder, (files[0],), None)
    if files:
        raise CheckpointError(f"{folder} has {len(files)} safetensors files but no {INDEX}. Download it too.")
    if any(p.suffix in {".bin", ".pt", ".pth", ".ckpt"} for p in folder.iterdir()):
        raise CheckpointError(
            f"{folder} holds only pickled weights (.bin, .pt), which can run code when opened and are never read. "
            "Use the model's safetensors version, or convert it with transformers' save_pretrained."
        )
    raise CheckpointError(
        f"{folder} has neither {SINGLE} nor {INDEX}. Download them; from config.json alone a --dry-run plans."
    )


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor, by the index. Raises CheckpointError."""
    path = folder / INDEX
    try:
        weight_map = parse_json(read_small(path, MAX_HEADER, links=True), "index").get("weight_map")
    except OSError as e:
        raise CheckpointError(unreadable(path, e)) from e
    except ValueError as e:
        raise CheckpointError(f"{path}: {e}. {AGAIN}.") from e
    if type(weight_map) is not dict or not weight_map or any(type(f) is not str for f in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map from tensor names to file names. {AGAIN}.")
    for file in set(weight_map.values()):
        if not is_plain(file):
            raise CheckpointError(
                f"{path} points outside its folder ({file!r}). Take the checkpoint from a source that you trust."
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {file!r}; only safetensors is read. Take that version.")
        try:
            missing = not (folder / file).exists()
        except OSError:  # name too long
            missing = True
        if missing:
            raise CheckpointError(f"{path} names {file}, which is missing. Download it again.")
    return weight_map


def _collect(folder: Path, files: tuple[str, ...], weight_map: dict[str, str] | None) -> Source:
    """The checkpoint of these files, with tensors that the index lacks, too: libraries read whole files, in this
    order.
    """
    tensors = {}
    for file in files:
        header = read_header(folder / file)
        for t in header.layout.tensors:
            if (weight_map or {}).get(t.name, file) == file:
                tensors[t.name] = SourceTensor(t.dtype, t.shape, file, header.data + t.offset)
            elif t.name in tensors:
                raise CheckpointError(
                    f"{folder / file}: {t.name} is there, too, but {INDEX} says that it is in "
                    f"{tensors[t.name].file}: programs differ in which they read. Remove one of the two."
                )
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            where = f"{name!r} is in {file}"
            raise CheckpointError(f"{folder / INDEX} says that {where}; it is not there. Download both again.")
    if not tensors:
        raise CheckpointError(f"{folder} holds no tensors. Download it again.")
    return Source(folder, files, tensors, auxiliary_files(folder))


def _chunks(path: Path, offset: int, nbytes: int) -> Iterator[np.ndarray]:
    """Yields bytes of a file, a few pieces at a time; each array is valid until the next."""
    return (np.frombuffer(chunk, np.uint8) for chunk in stream(path, offset, nbytes, 4 * PIECE))


def dtype_of(values: np.ndarray) -> str:
    """The dtype of weights in numpy, as safetensors writes it: uint16 is BF16."""
    return next(word for word, kind in NUMPY.items() if kind == values.dtype)


def convert(values: np.ndarray, dtype: str, to: str) -> np.ndarray:
    """Converts `values` from `dtype` to `to` (keys of NUMPY; bf16 as bits), rounding to nearest even. NaN stays NaN."""
    if dtype == to:
        return values
    if dtype == "BF16":
        shifted = values.astype(np.uint32)
        shifted <<= 16  # in place: another array would take longer than the work
        values = shifted.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if to != "BF16":
            return values.astype(NUMPY[to], copy=False)
        values = values.astype(np.float32, copy=False)
    bits = np.ascontiguousarray(values).view(np.uint32)
    wide = bits >> 16
    wide &= 1
    wide += 0x7FFF
    wide += bits
    wide >>= 16
    rounded = wide.astype(np.uint16)
    if (nan := np.isnan(values)).any():
        rounded[nan] = 0x7FC0
    return rounded


def concat(pieces: Iterable[np.ndarray], dtype: str | None = "F32") -> np.ndarray:
    """Elements in pieces, each of which is valid until the next, as a new array in `dtype`; None: in theirs."""
    return np.concatenate([np.array(convert(p, dtype_of(p), dtype) if dtype else p) for p in pieces])


def is_finite(values: np.ndarray) -> bool:
    """Whether all values are finite as bf16 or fp32; bf16 as bits."""
    values = values if dtype_of(values) == "BF16" else convert(values, dtype_of(values), "F32")
    exponent = np.uint16(0x7F80) if values.dtype == np.uint16 else np.uint32(0x7F800000)
    return (values.view(exponent.dtype) & exponent).max(initial=0) != exponent


def export(
    source: Source,
    out: AnyPath,
    fetch: Callable[[str], Iterable[np.ndarray] | None],
    progress: Callable[[int], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    writers: int = 1,
) -> dict[str, str]:
    """Writes a checkpoint to `out` with the source's files, names, shapes, dtypes, metadata and auxiliary files. A
    single file is called model.safetensors, the name that readers look for.

    fetch(name) yields new values, flat, as float32 or bf16 bits in uint16, which are rounded to the source's dtype, or
    bytes as uint8. It returns None for a tensor to copy. `progress(nbytes)` is called for bytes written and read back.
    `writers`: files written at once; if several, each by a thread, which calls fetch. Files get their names when all
    of them are synced and were compared, and check() has raised nothing. Returns their checksums. Raises StoreError,
    leaving no files.
    """
    out, others = Path(out), source.others
    named = (
        {SINGLE: source.files[0]} if len(source.files) == 1 and INDEX not in others else {f: f for f in source.files}
    )
    files = [*others, *named]
    done, ended, turn = dict[str, str](), Event(), Lock()  # file -> checksum

    def count(nbytes: int) -> None:
        if ended.is_set():
            raise StoreError(errno.ECANCELED, "is not written, as another file failed", str(out))
        with turn:
            progress(nbytes)

    def write(file: str) -> None:
        (out / file).parent.mkdir(exist_ok=True)
        done[file] = ""
        content = _copied(others[file]) if file in others else source.rewritten(named[file], fetch)
        write_synced(partial_of(out / file), summed(counted(content, count), partial(done.__setitem__, file)))

    def read_back(file: str) -> None:
        if checksum(counted(stream(partial_of(out / file)), count)) != done[file]:
            raise StoreError(errno.EIO, "read back, it is not what was written", str(out / file))

    try:
        with store_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            if out.samefile(source.folder):
                raise StoreError(errno.EEXIST, "is the source checkpoint itself; choose another folder", str(out))
            nbytes = sum(map(_size, others.values())) + sum(map(source.size_of, source.files))
            check_space(out, nbytes, "the exported checkpoint")
            _for_all(write, files, writers, ended)
            _for_all(read_back, files, writers, ended)
            check()
            for file in files:
                partial_of(out / file).replace(out / file)
            for folder in {(out / f).parent for f in files} | {out}:
                sync_folder(folder)
        return done
    finally:
        for file in done:
            partial_of(out / file).unlink(missing_ok=True)


def _for_all(act: Callable[[str], None], files: Iterable[str], writers: int, ended: Event) -> None:
    """Calls act(file), by several writers in as many threads. Raises the first error, and sets `ended` for the rest."""
    if writers == 1:
        for file in files:
            act(file)
        return
    with ThreadPoolExecutor(writers) as threads:
        try:
            for future in as_completed([threads.submit(act, file) for file in files]):
                future.result()
        except BaseException:
            ended.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _size(auxiliary: CONTENT) -> int:
    return len(auxiliary) if isinstance(auxiliary, bytes) else auxiliary.stat().st_size


def _copied(auxiliary: CONTENT) -> Iterator[np.ndarray]:
    yield np.frombuffer(content_of(auxiliary), np.uint8)


def counted(content: Iterable[np.ndarray | memoryview], progress: Callable[[int], object]) -> Iterator[memoryview]:
    """The same pieces; calls progress(nbytes) for each when the next one is requested."""
    for piece in content:
        yield piece if isinstance(piece, memoryview) else piece.data
        progress(len(piece))

"""Durable files: written and synced before they get their final names."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.storage.layout import ALIGN, round_up

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK = 16 << 20  # bytes of a write
DEPTH = 2  # blocks in flight, while another is made or used
LOCK = "store.lock"
AnyPath = str | os.PathLike[str]
Say = Callable[[str], None]  # called with lines for the user


class StoreError(OSError):
    """A drive failed, is full, or holds something wrong. The message names the file and says what to do."""


class NoSnapshot(StoreError):
    """There is no store, or it has no snapshot."""


def as_store_error(error: OSError, path: AnyPath, during: str = "") -> StoreError:
    """`error` itself if it is a StoreError that names its file; else its message, then `during`, about `path`."""
    if isinstance(error, StoreError) and error.filename:
        return error
    return StoreError(error.errno, f"{error.strerror or error}{during}", str(path))


@contextmanager
def store_errors(path: AnyPath, during: str = "") -> Iterator[None]:
    """A context whose OSErrors become StoreErrors about their own file or, without one, about `path`."""
    try:
        yield
    except OSError as error:
        raise as_store_error(error, error.filename or path, during) from error


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raises StoreError if fewer than `needed` bytes are free. `what`: for the message."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        message = f"has {_amount(free)} free, {what} needs {_amount(needed)}: {_amount(needed - free)} more"
        raise StoreError(errno.ENOSPC, message, str(folder))


def _amount(nbytes: int) -> str:
    """`1.24 GB`, `850.00 kB`, `9 B`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} B"


def write_synced(path: Path, content: Iterable[Buffer]) -> None:
    """Writes a new file and syncs it; large ones bypass the page cache. Raises StoreError.

    DEPTH blocks are written while the next is made. A file with this name is removed, not written to: it may be a link
    to another file.
    """
    written: deque[Future[None]] = deque()
    with store_errors(path):
        path.unlink(missing_ok=True)
        fd, end = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), 0
        with os.fdopen(fd, "wb", buffering=0), ThreadPoolExecutor(DEPTH) as writing:
            for block in _blocks(content):
                whole = len(block) == BLOCK  # else the last
                while len(written) > (DEPTH - 1) * whole:
                    written.popleft().result()
                if not (end and whole):
                    go_direct(fd, whole)
                written.append(writing.submit(_write, fd, block, end))
                end += len(block)
            while written:
                written.popleft().result()
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _blocks(content: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yields the content in page-aligned blocks of BLOCK bytes, the last one shorter. Each is valid while the next
    DEPTH are made.
    """
    made: list[memoryview] = []
    room, filled, blocks = memoryview(b""), 0, 0
    for chunk in content:
        view = memoryview(chunk).cast("B")
        while view:
            if filled == len(room):
                if filled:
                    yield room
                    filled, blocks = 0, blocks + 1
                if len(made) <= DEPTH:
                    made.append(memoryview(mmap.mmap(-1, BLOCK)))
                room = made[blocks % (DEPTH + 1)]
            taken = view[: len(room) - filled]
            room[filled : filled + len(taken)] = taken
            view, filled = view[len(taken) :], filled + len(taken)
    if filled:
        yield room[:filled]


def go_direct(fd: int, direct: bool) -> None:
    """Makes a file bypass the page cache, or not, if the filesystem can."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def _write(fd: int, block: memoryview, offset: int) -> None:
    """Writes all of a block. What goes through the page cache is flushed and dropped, so that it never fills memory."""
    start = offset
    while block:
        direct = _is_direct(fd)
        try:
            wrote = os.pwrite(fd, block, offset)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            wrote = 0
        block, offset = block[wrote:], offset + wrote
        if block:  # a short write is not aligned
            go_direct(fd, False)
    if offset - start == BLOCK and not _is_direct(fd):
        os.fdatasync(fd)
        os.posix_fadvise(fd, start, offset - start, os.POSIX_FADV_DONTNEED)


def stream(path: AnyPath, offset: int = 0, nbytes: int | None = None, block: int = BLOCK) -> Iterator[memoryview]:
    """Yields bytes [offset, offset + nbytes) of a file in blocks; each is valid until the next. A whole file (nbytes
    None) bypasses the page cache if the filesystem can, others leave nothing there. DEPTH blocks are read ahead.

    Raises StoreError.
    """
    with store_errors(path), Path(path).open("rb", buffering=0) as file, ExitStack() as stack:
        fd = file.fileno()
        stack.callback(os.posix_fadvise, fd, offset, nbytes or 0, os.POSIX_FADV_DONTNEED)
        reading = stack.enter_context(ThreadPoolExecutor(DEPTH))  # threads start at the first block
        end = os.fstat(fd).st_size if nbytes is None else offset + nbytes
        go_direct(fd, nbytes is None)
        starts = range(offset, end, block)
        buffers = [memoryview(mmap.mmap(-1, round_up(min(block, end - offset)))) for _ in starts[: DEPTH + 1]]
        read = lambda k: reading.submit(_read, fd, buffers[k % len(buffers)], starts[k])
        coming = deque(map(read, range(len(buffers))))
        for k, start in enumerate(starts):
            content = coming.popleft().result()[: min(block, end - start)]
            if len(content) < min(block, end - start):
                raise StoreError(errno.EIO, f"ends at byte {start + len(content)}; it was longer before", str(path))
            yield content
            if k + len(buffers) < len(starts):
                coming.append(read(k + len(buffers)))


def read_into(buffer: memoryview, path: AnyPath, offset: int) -> None:
    """Fills the buffer with bytes of a file from `offset` on, and leaves none in the page cache. Raises StoreError."""
    with store_errors(path), Path(path).open("rb", buffering=0) as file:
        filled = len(_read(file.fileno(), buffer, offset))
        os.posix_fadvise(file.fileno(), offset, len(buffer), os.POSIX_FADV_DONTNEED)
    if filled < len(buffer):
        raise StoreError(errno.EIO, f"ends at byte {offset + filled}; it was longer before", str(path))


def _read(fd: int, buffer: memoryview, offset: int) -> memoryview:
    """Fills the buffer from the file; returns the part that was filled."""
    filled = 0
    while filled < len(buffer):
        direct = _is_direct(fd)
        if direct and filled % ALIGN:
            go_direct(fd, False)
        try:
            got = os.preadv(fd, [buffer[filled:]], offset + filled)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            go_direct(fd, False)  # the filesystem reads through the page cache alone
            continue
        filled += got
        if not got:
            break
    return buffer[:filled]


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def partial_of(path: Path) -> Path:
    """The name that a file has while it is written."""
    return path.with_name(f".{path.name}.partial")


def replace_synced(path: Path, text: bytes) -> None:
    """Replaces a file: after a crash it has the old content or the new. Raises StoreError."""
    partial = partial_of(path)
    try:
        write_synced(partial, [text])
        partial.replace(path)
    except OSError as e:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise as_store_error(e, path) from e
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable. Raises StoreError."""
    with store_errors(folder, ", making names durable"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_folder(path: Path) -> list[Path]:
    """Makes a folder and its missing parents, durably. Returns those made, innermost first. Raises OSError, leaving
    none.
    """
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_folder(made.parent)
    except BaseException:
        remove_folders(missing)
        raise
    return missing


def remove_folders(folders: Iterable[Path]) -> None:
    """Removes those folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def lock(fd: int) -> bool:
    """Locks an open file or folder until it is closed. False if another process has the lock; True on filesystems
    without locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def lock_folder(path: Path, stack: ExitStack) -> list[Path]:
    """Makes a folder and locks it until `stack` closes or the process ends.

    Returns the folders that were made, innermost first. Raises StoreError, leaving none.
    """
    with store_errors(path):
        made = make_folder(path)
        try:
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            remove_folders(made)
            raise
    stack.callback(os.close, fd)
    if not lock(fd):
        owner = os.pread(fd, 20, 0).decode(errors="replace")
        raise StoreError(errno.EBUSY, f"is in use by process {owner} until it ends", str(path))
    if os.fstat(fd).st_nlink == 0:  # deleted: the next process would lock another file
        raise StoreError(
            errno.ECANCELED, "was in use until this moment, by a run that has ended. Start again", str(path)
        )
    with suppress(OSError):  # full disk: only the owner's id is lost
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    return made


def existing(folder: str | Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(p for p in (Path(folder), *Path(folder).absolute().parents) if p.exists())

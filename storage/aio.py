"""Asynchronous reads and writes of large aligned buffers: many in flight, their results as futures.

A request is cut into pieces of `block` bytes, and belongs to a class (reads and writes that a task waits for, or not
yet). Pieces of the highest class start first, but after BOUND pieces of higher classes a waiting class has its turn, so
none starves. Requests of one class take turns. At most `depth` pieces are in flight, of each direction at most `mixed`
while there are more of the other. A future ends, also with an error, when none of its pieces is in flight: its buffer
can be used again.

Each piece is moved by a thread, without the GIL. Pieces are large, since a thread needs the GIL after each, and a busy
interpreter has it for 5 ms at a time.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import resource
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trireme.storage.files import AnyPath, StoreError, store_errors
from trireme.storage.layout import ALIGN, round_up

if TYPE_CHECKING:
    from typing_extensions import Buffer

HUGE_PAGE = 2 << 20
# Classes of requests, highest first: reads that the caller waits for, reads ahead, writes, write-back.
READ, READ_AHEAD, WRITE, WRITE_BACK = CLASSES = range(4)
BOUND = 8  # pieces of higher classes that pass a waiting class before one of its own starts


def arena(nbytes: int) -> memoryview:
    """Zeroed memory of round_up(nbytes), on 2 MiB pages if possible, since a command to a drive holds a limited number
    of pages.

    Forked children do not get it: copy on write would break transfers.
    """
    size = round_up(nbytes, HUGE_PAGE)
    area = mmap.mmap(
        -1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # shared memory has no huge pages
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):  # without huge pages, slower
            area.madvise(advice)
    start = -address_of(area) % HUGE_PAGE
    return memoryview(area)[start : start + round_up(nbytes)]


def address_of(buffer: Buffer) -> int:
    """The address of a buffer's first byte."""
    return np.frombuffer(memoryview(buffer), np.uint8, count=1).ctypes.data


class File:
    """A file and its descriptor. `direct`: with O_DIRECT, which needs offset, size and address in multiples of
    4,096.
    """

    def __init__(self, path: AnyPath, direct: bool, size: int | None = None, write: bool = True):
        """`size`: creates the file and allocates its blocks; None: opens it. Raises StoreError."""
        self.path, self.direct = os.fspath(path), direct
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        with store_errors(self.path):
            self.fd = _open(self.path, flags | (os.O_CREAT | os.O_EXCL if size is not None else 0))
        if size:
            try:
                self.allocate(size)
            except StoreError:
                self.close()
                Path(self.path).unlink()  # grown by the failed allocation
                raise

    def allocate(self, size: int) -> None:
        """Allocates blocks for `size` bytes, which may be 0. Raises StoreError."""
        if size:
            with store_errors(self.path, f", allocating {size} bytes"):
                os.posix_fallocate(self.fd, 0, size)

    def close(self) -> None:
        os.close(self.fd)


def _open(path: str, flags: int) -> int:
    """os.open; raises the soft limit of descriptors to the hard one if it is reached."""
    try:
        return os.open(path, flags, 0o666)
    except OSError as e:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if e.errno != errno.EMFILE or soft == hard:
            raise
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, flags, 0o666)


class _Request:
    """A read or write as its caller asked for it. `rank`: its class. `end`: the byte that has to be reached."""

    __slots__ = ("file", "rank", "end", "future", "waiting", "left", "error")

    def __init__(self, file: File, rank: int, offset: int, view: memoryview, block: int, need: int):
        self.file, self.rank, self.end = file, rank, offset + need
        starts = range(0, len(view), block)
        self.waiting = deque(Piece(self, offset + i, view[i : i + block]) for i in starts)  # not started
        self.left = len(starts)  # not over
        self.error: StoreError | None = None
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # a read or write cannot be cancelled

    @property
    def write(self) -> bool:
        return self.rank >= WRITE


class Piece:
    """A part of a request: the bytes `view` at `offset` of the file."""

    __slots__ = ("request", "file", "write", "offset", "view")

    def __init__(self, request: _Request, offset: int, view: memoryview):
        self.request, self.file, self.write = request, request.file, request.write
        self.offset, self.view = offset, view


class IO:
    """Requests, and the threads that move their pieces."""

    def __init__(self, block: int = 64 << 20, depth: int = 4, mixed: int = 2):
        assert block % ALIGN == 0
        assert depth >= mixed >= 1
        self.block, self.depth, self.mixed = block, depth, mixed
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._waiting: tuple[deque[_Request], ...] = tuple(deque() for _ in CLASSES)  # whose turn is next
        self._passed = [0 for _ in CLASSES]  # pieces of higher classes started while a class waited
        self._flying = [0, 0]  # reads, writes
        self._closed = False
        self.written = 0  # bytes asked to be
        self._queue: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(max(depth + 1, 2 * mixed))]
        for thread in self._threads:
            thread.start()

    def __str__(self) -> str:
        return f"{self.block >> 10} KiB x {self.depth} ({self.mixed} + {self.mixed} mixed)"

    def read(
        self, file: File, offset: int, buffer: Buffer, need: int | None = None, later: bool = False
    ) -> Future[None]:
        """Fills `buffer`. The file may end after `need` bytes (None: all). `later`: no task waits for it yet."""
        return self._request(file, READ_AHEAD if later else READ, offset, buffer, need)

    def write(self, file: File, offset: int, buffer: Buffer, later: bool = False) -> Future[None]:
        """Writes `buffer` at `offset`. It is durable only after fsync. `later`: as of `read`."""
        return self._request(file, WRITE_BACK if later else WRITE, offset, buffer, None)

    def close(self) -> None:
        """Waits for the pieces in flight; requests with others fail."""
        with self._lock:
            already, self._closed = self._closed, True
            dropped = [request for waiting in self._waiting for request in waiting]
            for waiting in self._waiting:
                waiting.clear()
        for request in dropped:
            self._end(request, StoreError(errno.ECANCELED, "the store was closed", request.file.path), 0)
        with self._lock:
            self._idle.wait_for(lambda: not any(self._flying))
        if not already:
            for _ in self._threads:
                self._queue.put(None)
            for thread in self._threads:
                thread.join()

    def _request(self, file: File, rank: int, offset: int, buffer: Buffer, need: int | None) -> Future[None]:
        view = memoryview(buffer).cast("B")
        assert view
        assert not (file.direct and (address_of(view) | offset | len(view)) % ALIGN), (file.path, offset)
        request = _Request(file, rank, offset, view, self.block, len(view) if need is None else need)
        with self._lock:
            closed = self._closed
            if not closed:
                self._waiting[rank].append(request)
                self.written += len(view) * request.write
        if closed:
            request.future.set_exception(StoreError(errno.EBADF, "the store is closed", file.path))
        self._pump()
        return request.future

    def _pump(self) -> None:
        """Starts waiting pieces up to the limits."""
        with self._lock:
            while (rank := self._next()) is not None:
                request = self._waiting[rank].popleft()
                piece = request.waiting.popleft()
                self._flying[piece.write] += 1
                if request.waiting:
                    self._waiting[rank].append(request)
                self._count(rank)
                self._start(piece)

    def _next(self) -> int | None:
        """The class whose piece starts next; None if none is waiting, or the limits are reached."""
        waiting = [rank for rank in CLASSES if self._waiting[rank]]
        due = [rank for rank in waiting if self._passed[rank] >= BOUND and self._may_start(rank)]
        if due or not waiting:
            return due[0] if due else None
        return waiting[0] if self._may_start(waiting[0]) else None

    def _may_start(self, rank: int) -> bool:
        """Whether the limits allow one more piece of a class."""
        write = rank >= WRITE
        return self._flying[write] < max(self.mixed, self.depth - self._flying[not write])

    def _count(self, rank: int) -> None:
        """Notes that a piece of class `rank` has started."""
        self._passed[rank] = 0
        for lower in range(rank + 1, len(CLASSES)):
            self._passed[lower] = self._passed[lower] + 1 if self._waiting[lower] else 0

    def _start(self, piece: Piece) -> None:
        self._queue.put(piece)

    def _work(self) -> None:
        while piece := self._queue.get():
            try:
                result = self._move(piece)
            except OSError as e:
                result = -(e.errno or errno.EIO)
            self._finish(piece, result)
            self._pump()

    def _move(self, piece: Piece) -> int:
        """Reads or writes a piece; returns bytes moved. Raises OSError."""
        fd = piece.file.fd
        moved = (os.pwritev if piece.write else os.preadv)(fd, [piece.view], piece.offset)
        if not piece.file.direct:  # free the page cache
            if piece.write:
                os.fdatasync(fd)
            os.posix_fadvise(fd, piece.offset, moved, os.POSIX_FADV_DONTNEED)
        return moved

    def _finish(self, piece: Piece, result: int) -> None:
        """Ends a piece. `result`: bytes moved, or -errno."""
        request, path, error, again = piece.request, piece.file.path, None, False
        reached, verb = piece.offset + result, "writing" if piece.write else "reading"
        if result < 0:
            text = f"{os.strerror(-result)}, {verb} {len(piece.view)} bytes at {piece.offset}"
            error = StoreError(-result, text, path)
        elif result < len(piece.view) and reached < request.end:
            if result == 0 or (piece.file.direct and result % ALIGN):
                text = f"{verb} stops at byte {reached}, expected {request.end}: was the file cut?"
                error = StoreError(errno.EIO, text, path)
            else:
                again = True
                piece.offset, piece.view = reached, piece.view[result:]
        if again and not self._put_back(piece):
            again, error = False, StoreError(errno.ECANCELED, "the store was closed", path)
        if not again:
            self._end(request, error, 1)
        with self._lock:
            self._flying[piece.write] -= 1
            self._idle.notify_all()

    def _put_back(self, piece: Piece) -> bool:
        """Queues the rest of a piece again; False if its request has failed."""
        with self._lock:
            request = piece.request
            if self._closed or request.error:
                return False
            if not request.waiting:
                self._waiting[request.rank].append(request)
            request.waiting.appendleft(piece)
            return True

    def _end(self, request: _Request, error: StoreError | None, pieces: int) -> None:
        """Notes that pieces of a request have ended. After an error no further ones start. The last one ends the
        future.
        """
        with self._lock:
            before, request.left = request.left, request.left - pieces
            if error and not request.error:
                request.error = error
                if request in self._waiting[request.rank]:
                    self._waiting[request.rank].remove(request)
                request.left -= len(request.waiting)
                request.waiting.clear()
            over = before > request.left == 0  # once: close() may have dropped it already
        if over and request.error:
            request.future.set_exception(request.error)
        elif over:
            request.future.set_result(None)


def together(
    parts: Sequence[Future[None]], finish: Callable[[BaseException | None], None] | None = None
) -> Future[None]:
    """A future that ends after all parts, with their first error. `finish(error)` is called before it ends."""
    joint: Future[None] = Future()
    joint.set_running_or_notify_cancel()
    lock, left = threading.Lock(), [len(parts)]
    errors: list[BaseException] = []

    def end(error: BaseException | None) -> None:
        if finish:
            finish(error)
        if error:
            joint.set_exception(error)
        else:
            joint.set_result(None)

    def ended(part: Future[None]) -> None:
        with lock:
            left[0] -= 1
            if error := part.exception():
                errors.append(error)
            if left[0]:
                return
        end(errors[0] if errors else None)

    for part in parts:
        part.add_done_callback(ended)
    if not parts:
        end(None)
    return joint


def then(first: Future[None], work: Callable[[], None], pool: Executor) -> Future[None]:
    """A future of `work()`, which runs in `pool` after `first`, unless that failed."""
    joint: Future[None] = Future()
    joint.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            joint.set_exception(error)
        else:
            joint.set_result(None)

    def ended(first: Future[None]) -> None:
        if error := first.exception():
            joint.set_exception(error)
        else:
            pool.submit(run)

    first.add_done_callback(ended)
    return joint

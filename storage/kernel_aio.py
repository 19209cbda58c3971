"""The kernel's asynchronous I/O (io_submit) through ctypes: many requests in flight without a thread for each.

One call starts a batch of pieces, and one thread waits for them, both without the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
import time
from typing import Any

from trireme.storage.aio import IO, Piece, address_of
from trireme.storage.files import StoreError

# io_setup, io_destroy, io_getevents, io_submit
CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
PREAD, PWRITE = 0, 1
ATTEMPTS = 10_000  # to submit, a millisecond apart, while nothing is in flight that could free a slot


class _Iocb(ctypes.Structure):
    """struct iocb of linux/aio_abi.h."""

    _fields_ = [
        *[("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_uint32)],
        *[("opcode", ctypes.c_uint16), ("reqprio", ctypes.c_int16), ("fildes", ctypes.c_uint32)],
        *[("buf", ctypes.c_uint64), ("nbytes", ctypes.c_uint64), ("offset", ctypes.c_int64)],
        *[("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("resfd", ctypes.c_uint32)],
    ]


class _Event(ctypes.Structure):
    """struct io_event; `res` is bytes moved or -errno."""

    _fields_ = [("data", ctypes.c_uint64), ("obj", ctypes.c_uint64), ("res", ctypes.c_int64), ("res2", ctypes.c_int64)]


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *args: Any) -> int:
    """Result or -errno. Bare ints would pass as 32 bits."""
    result = _libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *args)))
    return result if result >= 0 else -ctypes.get_errno()


class KernelIO(IO):
    """A back end with the kernel's AIO. Raises StoreError if there is none, or no free slots (fs.aio-max-nr)."""

    name = "kernel aio"

    def __init__(self, block: int = 16 << 20, depth: int = 4, mixed: int = 2):
        super().__init__(block, depth, mixed)
        if platform.machine() not in CALLS:
            raise StoreError(errno.ENOSYS, f"kernel aio is not known on {platform.machine()}")
        self._setup, self._destroy, self._getevents, self._submit = CALLS[platform.machine()]
        self._slots = max(depth + mixed, 2 * mixed)
        self._context = ctypes.c_ulong(0)
        error = _call(self._setup, self._slots, ctypes.byref(self._context))
        if error:
            raise StoreError(-error, f"io_setup: {os.strerror(-error)}; see /proc/sys/fs/aio-max-nr")
        self._pieces: dict[int, Piece] = {}  # in flight, by id; keeps buffers alive
        self._submitted = 0  # of them
        self._error = 0  # of _give_up
        self._work = threading.Condition()
        self._stopping = False
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()

    def _start(self, pieces: list[Piece]) -> None:
        blocks = (_Iocb * len(pieces))()
        pointers = (ctypes.c_void_p * len(pieces))()
        for i, (iocb, piece) in enumerate(zip(blocks, pieces, strict=True)):
            iocb.data, iocb.fildes, iocb.opcode = id(piece), piece.file.fd, PWRITE if piece.write else PREAD
            iocb.buf, iocb.nbytes, iocb.offset = address_of(piece.view), len(piece.view), piece.offset
            pointers[i] = ctypes.addressof(iocb)
        with self._work:
            self._pieces.update((id(piece), piece) for piece in pieces)
            self._work.notify()
        done = idle = 0
        while done < len(pieces):
            place = ctypes.c_void_p(ctypes.addressof(pointers) + done * ctypes.sizeof(ctypes.c_void_p))
            result = _call(self._submit, self._context, len(pieces) - done, place)
            if result > 0:
                with self._work:
                    self._submitted += result
                done, idle = done + result, 0
            elif result in (0, -errno.EAGAIN) and idle < ATTEMPTS:
                idle = 0 if self._submitted else idle + 1
                time.sleep(0.001)  # no slot until something ends
            elif result != -errno.EINTR:  # of the first: a bad descriptor, say
                with self._work:
                    known = self._pieces.pop(id(pieces[done]), None)
                if known:  # _give_up has not ended it
                    self._finish(known, self._error or result or -errno.EAGAIN)
                done += 1

    def _reap(self) -> None:
        """The thread that waits for pieces."""
        events = (_Event * self._slots)()
        patience = _Timespec(0, 100_000_000)  # a failed submission gives no event
        while True:
            with self._work:
                self._work.wait_for(lambda: self._pieces or self._stopping)
                if self._stopping and not self._pieces:
                    return
            count = _call(self._getevents, self._context, 1, self._slots, events, ctypes.byref(patience))
            if count < 0 and count != -errno.EINTR:
                self._give_up(count)
                return
            for event in events[: max(count, 0)]:
                with self._work:
                    piece = self._pieces.pop(event.data)
                    self._submitted -= 1
                self._finish(piece, event.res)
            self._pump()

    def _give_up(self, error: int) -> None:
        """No more events can be read: pieces in flight fail with -error, and later ones when they are submitted."""
        self._error = error
        _call(self._destroy, self._context)  # waits until the kernel no longer uses the buffers
        with self._work:
            lost, self._pieces = list(self._pieces.values()), {}
        for piece in lost:
            self._finish(piece, error)
        self._pump()

    def _stop(self) -> None:
        with self._work:
            self._stopping = True
            self._work.notify()
        self._reaper.join()
        _call(self._destroy, self._context)

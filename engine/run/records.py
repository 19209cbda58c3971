"""log.jsonl and log.csv: they grow by whole lines, reach the drive with each snapshot, and are read without trust."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from trireme.storage.files import partial_of, sync_folder, write_synced

COLUMNS = [
    "step",
    "epoch",
    "loss",
    "eval_loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "trained_tokens_per_second",
    "mfu",
    "step_time_s",
    "gpu_mem_gib",
    "ram_gib",
    "ssd_read_gbs",
    "ssd_written_tb",
    "bound",
]
DIVERGING = ("loss", "eval_loss", "grad_norm")  # may be anything, also no number
HUGE = 1e15  # more than any of the others
Record = dict[str, Any]  # of a step or an evaluation, by column


class Mark(NamedTuple):
    """Where the log of a run stood when its snapshot was made."""

    step: int
    nbytes: int
    crc32: int


class Appender:
    """A text file that grows by whole lines only, even when the disk is full: what does not fit waits in memory.

    `nbytes` and `crc32` are those of all lines, also of those that wait.
    """

    def __init__(self, path: Path, lines: Iterable[bytes]):
        """Replaces the file, in one step, by `lines`, each with its end, and opens it for more. Raises StoreError."""
        self.path, self.nbytes, self.crc32 = path, 0, 0
        write_synced(partial_of(path), map(self._counted, lines))
        partial_of(path).replace(path)
        sync_folder(path.parent)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = os.fstat(self._fd).st_size
        self._waiting = b""

    def _counted(self, line: bytes) -> bytes:
        self.nbytes, self.crc32 = self.nbytes + len(line), zlib.crc32(line, self.crc32)
        return line

    def append(self, line: bytes) -> OSError | None:
        """Adds a line, after those that could not be written before. Returns the error when they have to wait again."""
        self._waiting += self._counted(line)
        return self._flush()

    def _flush(self) -> OSError | None:
        try:
            while self._waiting:
                written = os.write(self._fd, self._waiting)
                end = self._waiting.rfind(b"\n", 0, written) + 1
                if end < written:
                    os.ftruncate(self._fd, self._size + end)  # no torn line stays behind
                self._size += end
                self._waiting = self._waiting[end:]
                if not end:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError as error:
            return error
        return None

    def sync(self) -> OSError | None:
        """Brings what was appended to the drive. Returns the error when it is not there."""
        error = self._flush()
        try:
            os.fdatasync(self._fd)
        except OSError as e:
            return e
        return error

    def close(self) -> None:
        self.sync()
        os.close(self._fd)


def read_log(path: Path, last: float = math.inf, nbytes: float = math.inf) -> Iterator[tuple[bytes, Record]]:
    """The lines of a log.jsonl and what they say: of steps up to `last`, and within the first `nbytes`.

    What is no record is passed over: a line torn by a crash, or damaged.
    """
    at = 0
    with path.open("rb") if path.exists() else nullcontext(()) as lines:
        for line in lines:
            at += len(line)
            record = _record(line)
            if at <= nbytes and record and record["step"] <= last:
                yield line.rstrip(b"\n") + b"\n", record


def is_whole(path: Path, mark: Mark) -> bool:
    """Whether a log.jsonl begins with what it held when the snapshot was made."""
    value, left = 0, mark.nbytes
    with path.open("rb") if path.exists() else nullcontext(io.BytesIO()) as file:
        while left and (block := file.read(min(left, 1 << 20))):
            value, left = zlib.crc32(block, value), left - len(block)
    return (left, value) == (0, mark.crc32)


def _record(line: bytes) -> Record | None:
    """What a line of log.jsonl says; None where that is no record of a step."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or type(content.get("step")) is not int:
        return None
    record = {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in content.items() if v is not None}
    return record if all(_is_sound(key, record[key]) for key in COLUMNS if key in record) else None


def _is_sound(column: str, value: Any) -> bool:
    """Whether it may be calculated with."""
    if column == "bound" or (column in DIVERGING and type(value) is float):
        return True
    return type(value) in (int, float) and abs(value) <= HUGE


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinity; they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def as_json(record: Record) -> bytes:
    ordered = {key: record[key] for key in COLUMNS if key in record} | record
    return json.dumps({key: _finite(value) for key, value in ordered.items()}, allow_nan=False).encode() + b"\n"


def as_csv(record: Record) -> bytes:
    return ",".join("" if record.get(key) is None else str(record[key]) for key in COLUMNS).encode() + b"\n"

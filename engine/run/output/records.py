"""log.jsonl and log.csv: complete lines, synced with each snapshot, and checked when they are read."""

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

from trireme.engine.queues.names import NET, ON_GPU, QUEUES, kind_of
from trireme.storage.files import partial_of, sync_folder, write_synced

COLUMNS = [
    "step",
    "epoch",
    "loss",
    "eval_loss",
    "accuracy",
    "eval_accuracy",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "trained_tokens_per_second",
    "rows_per_second",
    "tokens",
    "trained_tokens",
    "mfu",
    "step_time_s",
    "eval_time_s",
    "wall_time",  # seconds since 1970
    "gpu_mem_gib",
    "ram_gib",
    "ssd_read_gbs",
    "ssd_written_tb",
    "bound",
    "expert_share",
    "experts_idle",
    "router_aux",
    "ce",
    "kl",
    "eval_ce",
    "eval_kl",
    "eval_rows",
]
DIVERGING = ("loss", "eval_loss", "grad_norm")  # may be NaN or infinite
HUGE = 1e15  # the largest of the others
BOUNDS, LONGEST = {*QUEUES, *ON_GPU, *NET, "ssd"}, 16  # "bound": a queue, of at most so many characters
Record = dict[str, Any]  # of a step or evaluation, by column


class Mark(NamedTuple):
    """How far log.jsonl went at a snapshot."""

    step: int
    evaluated: int | None  # last evaluated step
    nbytes: int
    crc32: int


class Appender:
    """Appends lines to a file. If the disk is full they wait in memory; `nbytes` and `crc32` count them, too."""

    def __init__(self, path: Path, lines: Iterable[bytes]):
        """Replaces the file atomically by these lines, with line ends. Raises StoreError."""
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
        """Appends a line. Returns the error if it could not be written."""
        self._waiting += self._counted(line)
        return self._flush()

    def _flush(self) -> OSError | None:
        try:
            while self._waiting:
                written = os.write(self._fd, self._waiting)
                end = self._waiting.rfind(b"\n", 0, written) + 1
                if end < written:
                    os.ftruncate(self._fd, self._size + end)  # a torn line
                self._size += end
                self._waiting = self._waiting[end:]
                if not end:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError as error:
            return error
        return None

    def sync(self) -> OSError | None:
        """Makes the file durable. Returns the error if it cannot."""
        error = self._flush()
        try:
            os.fdatasync(self._fd)
        except OSError as e:
            return e
        return error

    def close(self) -> None:
        self.sync()
        os.close(self._fd)


def read_log(path: Path, nbytes: float = math.inf) -> Iterator[tuple[bytes, Record]]:
    """The valid lines in the first `nbytes`, with their records."""
    at = 0
    with path.open("rb") if path.exists() else nullcontext(()) as lines:
        for line in lines:
            at += len(line)
            if at <= nbytes and (record := _record(line)):
                yield line.rstrip(b"\n") + b"\n", record


def read_until(path: Path, mark: Mark) -> Iterator[bytes]:
    """The lines as of a snapshot; of a damaged file, the lines of steps up to it."""
    evaluated = -1 if mark.evaluated is None else mark.evaluated
    for line, record in read_log(path, mark.nbytes if is_whole(path, mark) else math.inf):
        if record["step"] <= (evaluated if "eval_loss" in record else mark.step):
            yield line


def is_whole(path: Path, mark: Mark) -> bool:
    """Whether the file's content up to a snapshot is unchanged."""
    value, left = 0, mark.nbytes
    with path.open("rb") if path.exists() else nullcontext(io.BytesIO()) as file:
        while left and (block := file.read(min(left, 1 << 20))):
            value, left = zlib.crc32(block, value), left - len(block)
    return (left, value) == (0, mark.crc32)


def _record(line: bytes) -> Record | None:
    """The record of a line; None if the line is damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or type(content.get("step")) is not int:
        return None
    record = {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in content.items() if v is not None}
    return record if all(_is_sound(key, record[key]) for key in COLUMNS if key in record) else None


def _is_sound(column: str, value: Any) -> bool:
    if column == "bound":
        return type(value) is str and len(value) <= LONGEST and kind_of(value) in BOUNDS
    if column in DIVERGING and type(value) is float:
        return True
    return type(value) in (int, float) and abs(value) <= HUGE


def _finite(value: Any) -> Any:
    """A value for JSON: NaN and infinity become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def as_json(record: Record) -> bytes:
    ordered = {key: record[key] for key in COLUMNS if key in record} | record
    return json.dumps({key: _finite(value) for key, value in ordered.items()}, allow_nan=False).encode() + b"\n"


def as_csv(record: Record) -> bytes:
    return ",".join("" if record.get(key) is None else str(record[key]) for key in COLUMNS).encode() + b"\n"

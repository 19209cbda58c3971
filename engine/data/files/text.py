"""Running text: documents between separator lines; long ones come in pieces."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from trireme.engine.data.files.rows import Bytes, Row
from trireme.models.config import InputError

CONTEXT = 1 << 12  # characters around a piece, for its tokens at the borders
_PIECE = 1 << 18  # characters of a piece, at least
_LINE = 1 << 18  # of a line read at once
SEPARATOR = "<|endoftext|>"  # a line that ends a document, whatever the tokenizer


def read_text(path: Path, file: Bytes, separators: set[str]) -> Iterator[Row]:
    """Yields pieces of documents. A piece begins with a line that does not begin with a space, if there is one. Lines
    may have any length.
    """
    stream = io.TextIOWrapper(file, encoding="utf-8-sig")  # CRLF becomes LF
    document, number, begins = _Document(), 0, True
    while part := stream.readline(_LINE):
        number += begins
        if "\0" in part:
            raise InputError(f"{path} line {number} holds NUL bytes: is it text?")
        if begins and part.strip() in separators:
            yield from document.end()
            document = _Document()
        else:
            yield from document.add(number, part, begins)
        begins = part.endswith("\n")
    yield from document.end()


class _Document:
    """Cuts a document into pieces. Each piece waits for the text after it."""

    def __init__(self) -> None:
        self._parts: list[str] = []  # of the next piece
        self._size = self._number = 0
        self._held: Row | None = None  # the piece before
        self._before = ""

    def add(self, number: int, part: str, begins: bool) -> Iterator[Row]:
        """Takes a line, or a part of a long one. `begins`: it is the first part."""
        apart = begins and not part[:1].isspace()
        if self._size >= _PIECE and (apart or not begins) or self._size >= 2 * _PIECE:
            yield from self._hold("".join(self._parts))
            self._parts, self._size = [], 0
        if not self._held and not self._parts:
            part = part.lstrip("\n")
        if part:
            self._number = self._number if self._parts else number
            self._parts.append(part)
            self._size += len(part)

    def _hold(self, text: str, ends: bool = False) -> Iterator[Row]:
        if self._held:
            yield self._held._replace(after=text[:CONTEXT])
        self._held = Row(self._number, {"text": text}, not self._held, ends, self._before)
        self._before = (self._before + text)[-CONTEXT:]

    def end(self) -> Iterator[Row]:
        """Yields the rest; nothing if all of it is blank."""
        text = "".join(self._parts).rstrip("\n")
        if text.strip() or self._held:
            yield from self._hold(text, ends=True)
        if self._held:
            yield self._held

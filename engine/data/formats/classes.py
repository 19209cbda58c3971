"""Rows with a class: any row that can be read, with a `label`, which is the name or the number of a class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from trireme.engine.data.files.rows import BadRow, Fields, kind_of
from trireme.engine.data.formats.conversations import read_messages, read_sharegpt
from trireme.engine.data.formats.examples import Completion, Example, Text
from trireme.engine.data.formats.formats import parsed, read_row, rename
from trireme.engine.data.formats.messages import refuse_masked, refuse_media
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

KEY, MOST = "label", 1000  # classes that are found in data
LISTED = 12
DIGITS = 1000  # of a number, at most: int() refuses more than 4,300
_TALKS = {"messages": read_messages, "conversations": read_sharegpt}


def read_class(given: Fields, renames: Mapping[str, str], labels: Sequence[str]) -> tuple[str, Example, list[str], int]:
    """(format, what is classified, keys that are not read, the class). Raises BadRow.

    A text has the tokens of its tokenizer, without an end token. A conversation may end with any message.
    """
    row = parsed(rename(given, renames))
    if row.get(KEY) is None:
        raise BadRow(f"has no {KEY!r}, the class of the row; --map {KEY}=YOURS names your column")
    value = class_of(row[KEY], labels)
    talk = next((key for key in _TALKS if row.get(key) is not None), None)
    if talk:
        refuse_masked(row)
        refuse_media(row)
        chat = _TALKS[talk](row, answered=False)
        return f"{talk},{KEY}", as_read(chat), [key for key in chat.unused if key != KEY], value
    rest = {key: value for key, value in given.items() if renames.get(key, key) != KEY}
    form, example, unused = read_row(rest, renames)
    return f"{form.name},{KEY}", as_read(example), unused, value


def as_read(example: Example) -> Example:
    """A prompt and its completion become one text, without an end token."""
    if isinstance(example, Completion):
        return Text(example.prompt + example.completion, ends=False)
    return example._replace(ends=False) if isinstance(example, Text) else example


def class_of(value: Any, labels: Sequence[str]) -> int:
    """The number of a label. Raises BadRow if it is not a label, or is ambiguous."""
    word = _word(value)
    if word in labels:
        found = labels.index(word)
        if isinstance(value, str) or not _is_number(word) or int(word) == found:
            return found
        raise BadRow(f"{KEY!r} is {word}, the name of class {found} and the number of another. Write names as strings")
    if _is_number(word) and int(word) < len(labels):
        return int(word)
    more = f" and {len(labels) - LISTED} more" if len(labels) > LISTED else ""
    raise BadRow(f"{KEY!r} is {shown(repr(value))}, which is none of {', '.join(labels[:LISTED])}{more}")


def _word(value: Any) -> str:
    """A label as text. Raises BadRow if it is not one class."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (float, Decimal)) and math.isfinite(value) and value == int(value):
        return str(int(value))
    if isinstance(value, (float, Decimal)):
        raise BadRow(f"{KEY!r} is {value:g}, no class: regression is not supported")
    if not isinstance(value, (str, int)):
        raise BadRow(f"{KEY!r} is {kind_of(value)}, expected one class: several labels of a row are not supported")
    return str(value)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < DIGITS


def labels_in(rows: Iterable[Any], renames: Mapping[str, str]) -> tuple[str, ...]:
    """The classes that rows name, sorted. If they are numbers, as many as the largest says, named LABEL_0 and so on.
    Raises InputError.
    """
    found, fault = set[str](), ""
    for row in rows:
        value = rename(row, renames).get(KEY) if isinstance(row, dict) else None
        try:
            found |= set() if value is None else {_word(value)}
        except BadRow as error:
            fault = fault or str(error)  # told when it is read, if there are others
        if len(found) > MOST:
            raise InputError(
                f"{KEY!r} has more than {MOST:,} different values. Is it the right column? --map {KEY}=YOURS"
            )
    if found and all(map(_is_number, found)):
        most = max(map(int, found)) + 1
        if most > MOST:
            raise InputError(f"{KEY!r} is a number up to {most - 1:,}: give as many classes, --labels {most}.")
        return tuple(f"LABEL_{i}" for i in range(max(2, most)))
    if fault and not found:
        raise InputError(f"--data: {fault}.")
    if len(found) < 2:
        what = f"one class alone, {shown(next(iter(found)))}" if found else f"no row with a {KEY!r}"
        raise InputError(f"--data has {what}. Name your column: --map {KEY}=YOURS; or the classes: --labels A,B.")
    for name in sorted(found):
        if "," in name or not name.strip() or name != name.strip():
            raise InputError(f"{KEY!r} is {shown(repr(name))}: write names without commas or spaces around them.")
    return tuple(sorted(found))

"""What a row comes to: one of four kinds of example, and the checks that every format makes on its way there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trireme.engine.data.rows import BadRow, Fields, kind_of


class Text(NamedTuple):
    """Running text, all of it trained on. A long document may come in pieces."""

    text: str
    starts: bool = True
    ends: bool = True


class Completion(NamedTuple):
    """A completion to be trained on after a prompt, both exactly as they are written."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """A conversation for the chat template; a message with "train": False is context."""

    messages: list[Fields]
    tools: list[Fields] | None = None
    plain: Completion | None = None  # how to say it where there is no chat template


class Ids(NamedTuple):
    """Tokens, and which of them are trained on (None: all)."""

    ids: list[int]
    trained: list[bool] | None = None


Example = Text | Completion | Chat | Ids


# ---------------------------------------------------------------- checks that name the fault


def string(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """row[key], a string; `default` where it is absent or null."""
    value = row.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise BadRow(f"{key!r} is {kind_of(value)}, expected a string")
    return value


def filled_list(row: Mapping[str, Any], key: str, of: str) -> list[Any]:
    """row[key], a list that is not empty; `of` says what it holds."""
    value = row[key]
    if not isinstance(value, list):
        raise BadRow(f"{key!r} is {kind_of(value)}, expected a list of {of}")
    if not value:
        raise BadRow(f"{key!r} is empty")
    return value

"""The four kinds of example, and checks of rows that all formats use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trireme.engine.data.files.rows import BadRow, Fields, kind_of


class Text(NamedTuple):
    """Running text; all of it is trained. A long document may come in pieces."""

    text: str
    starts: bool = True
    ends: bool = True
    before: str = ""  # of a piece: the text around it
    after: str = ""


class Completion(NamedTuple):
    """A prompt and a completion, which is trained, exactly as they are written."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """A conversation. A message with "train": False is not trained. Its content is a string, or a list of its parts'
    texts.
    """

    messages: list[Fields]
    tools: list[Fields] | None = None
    plain: Completion | None = None  # for no chat template
    variables: dict[str, Any] | None = None  # for the chat template
    unused: tuple[str, ...] = ()  # keys inside the row that are not read


class Ids(NamedTuple):
    """Token ids, and which are trained (None: all)."""

    ids: list[int]
    trained: list[bool] | None = None


Example = Text | Completion | Chat | Ids


# ---------------------------------------------------------------- checks


def string(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A string of a row; `default` if it is absent or null. Raises BadRow."""
    value = row.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise BadRow(f"{key!r} is {kind_of(value)}, expected a string")
    return value


def filled_list(row: Mapping[str, Any], key: str, of: str) -> list[Any]:
    """A list with at least one of these things. Raises BadRow."""
    value = row[key]
    if not isinstance(value, list):
        python = isinstance(value, str) and value.lstrip().startswith("[") and "'" in value
        hint = " (it looks like Python's; write it with json.dumps)" if python else ""
        raise BadRow(f"{key!r} is {kind_of(value)}, expected a list of {of}{hint}")
    if not value:
        raise BadRow(f"{key!r} is empty")
    return value


def by_case(row: Mapping[str, Any], keys: Sequence[str], more: Sequence[str]) -> str:
    """A hint if the columns are those of a format, `keys` and perhaps `more`, but for case and spaces; else ""."""
    names = {str(key).strip().lower(): str(key) for key in row}
    if not all(key in names for key in keys):
        return ""
    pairs = [(key, names[key]) for key in (*keys, *more) if key in names and names[key] != key]
    if any(theirs != theirs.strip() for _, theirs in pairs):
        return " Remove the spaces around the names of its columns."
    return f" Perhaps --map {','.join(f'{ours}={theirs}' for ours, theirs in pairs)}." if pairs else ""

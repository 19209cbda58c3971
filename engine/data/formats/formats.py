"""Formats of rows, found from their keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trireme.engine.data.files.json_rows import json_of
from trireme.engine.data.files.rows import EMPTY, BadRow, Fields, unread_keys
from trireme.engine.data.formats import conversations
from trireme.engine.data.formats.conversations import (
    read_alpaca,
    read_messages,
    read_sharegpt,
    read_talk,
    talks_in,
)
from trireme.engine.data.formats.examples import Chat, Completion, Example, Text, by_case, string
from trireme.engine.data.formats.ids import SAYS_MORE, read_ids
from trireme.engine.data.formats.messages import refuse_masked, refuse_media
from trireme.engine.data.formats.pairs import COLUMNS
from trireme.engine.data.formats.preferences import refuse_preferences
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

_SEGMENTS = "segments"  # of texts, each learned or not
UNUSED = "unused"  # --map unused=THEIRS leaves a column out
LISTS = ("messages", "conversations", "tools", "functions", "history", "chat_template_kwargs", "input_ids", *SAYS_MORE)


@dataclass(frozen=True)
class Format:
    """`read` makes an example of `keys`, which name the format, and of `more`, if present."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Fields], Example]
    more: tuple[str, ...] = ()

    def unused(self, row: Fields, example: Example) -> list[str]:
        """Keys with values that are not read."""
        more = () if isinstance(example, Completion) else self.more
        known = {*self.keys, *more, UNUSED}
        return [*unread_keys(row, known), *(example.unused if isinstance(example, Chat) else ())]


def find_format(row: Mapping[str, Any], hint: str = "", given: Mapping[str, Any] | None = None) -> Format:
    """Raises BadRow where none fits, with `hint` or a likelier one. `given`: the row before --map."""
    if form := _fitting(row):
        return form
    given = row if given is None else given
    keys = set(given)
    cased = next(filter(None, (by_case(given, form.keys, form.more) for form in FORMATS)), "")
    hint = cased or hint
    likely = [(ours, theirs) for ours, theirs in _LIKELY if set(theirs) <= keys] + _by_value(given)
    for ours, theirs in likely[: 0 if cased else 1]:
        chat = ours == ("prompt", "completion") and any(given.get(key) for key in ("system", "history", "tools"))
        named = ("instruction", "output") if chat else ours  # joined texts have none of these
        pairs = [f"{o}={t}" for o, t in zip(named, theirs, strict=True) if o != t]
        hint += f" Perhaps --map {','.join(pairs)}."
    found = ", ".join(f"'{shown(key, KEY)}'" for key in list(given)[:8]) or "none"
    objects = {k: v for k, v in given.items() if isinstance(v, list) and v and all(isinstance(o, dict) for o in v)}
    if objects and not likely and not cased:
        name, inside = next(iter(objects.items()))
        names = ", ".join(f"'{shown(key, KEY)}'" for key in list(inside[0])[:4]) or "none"
        rows = f"If '{shown(name, KEY)}' is the list of rows, write that list alone."
        turns = f"'{shown(name, KEY)}' holds objects with the keys {names}; a conversation has {{role, content}}."
        hint += f" {rows if _fitting(inside[0]) else turns}"
    if len(tokens := _of_tokens(given)) > 1:
        hint += f" Join {' and '.join(tokens)} as input_ids, with completion_mask: 1 for each token to learn, else 0."
    if _SEGMENTS in keys:
        hint = " Of axolotl's segments write what is learned as completion, and what is before it as prompt."
    if keys == {"role", "content"}:
        hint = ' A conversation is a row: {"messages": [{"role": …, "content": …}, …]}.'
    if lists := [key for key, value in given.items() if key != _SEGMENTS and isinstance(value, list) and _rows(value)]:
        hint = f" Are the rows in its list '{shown(lists[0], KEY)}'? Write that list alone into a file."
    if given and not hint:
        hint = " --map names your columns, as instruction=question,output=answer."
    raise BadRow(f"no known format has its keys ({found}); expected {_EXPECTED}.{hint}")


def _rows(values: list[Any]) -> bool:
    """Whether each of them would be a separate row."""
    return len(values) > 1 and all(isinstance(value, dict) and _fitting(value) for value in values[:8])


def read_row(given: Fields, renames: Mapping[str, str] | None = None) -> tuple[Format, Example, list[str]]:
    """(its format, what it says, keys that are not read). `renames`: those of --map. Raises BadRow."""
    renames = renames or {}
    hint, row = not_there(given, renames), parsed(rename(given, renames))
    check_row(row, renames)
    form = find_format(row, hint, given)
    example = form.read(row)
    return form, example, [*form.unused(row, example), *replaced(given, renames)]


def _fitting(row: Mapping[str, Any]) -> Format | None:
    """Keys with null count where no other format fits: tables of mixed rows have them."""
    filled = (form for form in FORMATS if all(row.get(key) is not None for key in form.keys))
    return next(filled, None) or next((form for form in FORMATS if all(key in row for key in form.keys)), None)


def _by_value(row: Mapping[str, Any]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Columns that hold a conversation or tokens, whatever they are called."""
    tokens = _of_tokens(row)
    for key, value in row.items():
        if tokens == [key]:  # of several, one alone would be a part of the row, such as a prompt
            return [(("input_ids",), (key,))]
        if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
            if all({"role", "content"} <= turn.keys() for turn in value):
                return [(("messages",), (key,))]
            if all({"from", "value"} <= turn.keys() for turn in value):
                return [(("conversations",), (key,))]
    return []


def _of_tokens(row: Mapping[str, Any]) -> list[str]:
    """Columns that hold ids of tokens, by their names and values."""
    numbers = lambda value: isinstance(value, list) and value and all(type(token) is int for token in value)
    named = lambda key: re.search("token|ids?$", key, re.IGNORECASE) and key not in ("token_type_ids", "position_ids")
    return [key for key, value in row.items() if named(key) and numbers(value)]


def check_row(row: Mapping[str, Any], renames: Mapping[str, str] | None) -> None:
    """Raises BadRow where it holds preferences, or more than text. `renames`: those of --map."""

    def format_of(more: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
        renamed = parsed(rename(dict(row), more))
        form = _fitting(renamed)
        try:
            if form:
                form.read(renamed)
        except BadRow:
            return None
        return (form.name, form.keys) if form else None

    refuse_masked(row)
    refuse_preferences(row, renames or {}, format_of)
    refuse_media(row)


def parsed(row: Fields) -> Fields:
    """With lists and objects that are written as JSON in a string."""
    for key in LISTS:
        value = row.get(key)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                row = row | {key: json_of(value)}
            except BadRow as error:
                raise BadRow(f"{key!r}: {error}") from None
            except (ValueError, RecursionError):
                continue
    return row


def parse_map(text: str | None) -> dict[str, str]:
    """`ours=theirs,...` as {their name: our name}. Raises InputError."""
    renames: dict[str, str] = {}
    for part in (text or "").split(","):
        ours, equals, theirs = part.partition("=")
        if part and not (ours.strip() and equals and theirs.strip()):
            raise InputError(f"--map {text}: expected OURS=YOURS, such as prompt=question,completion=answer.")
        if part:
            _check_once(text or "", renames, ours.strip(), theirs.strip())
            renames[theirs.strip()] = ours.strip()
    known = {UNUSED, *COLUMNS, *(key for form in FORMATS for key in (*form.keys, *form.more))}
    for ours in renames.values():
        if ours not in known:
            turned = ",".join(f"{theirs}={ours}" for theirs, ours in renames.items())
            way_out = f"perhaps --map {turned}" if renames.keys() <= known else f"there are {', '.join(sorted(known))}"
            raise InputError(f"--map {text}: no format has a column {shown(ours, KEY)!r}; {way_out}.")
    return renames


def _check_once(text: str, renames: Mapping[str, str], ours: str, theirs: str) -> None:
    """Raises InputError where a column would take the place of another."""
    if theirs in renames:
        raise InputError(f"--map {text}: {theirs!r} is named twice. Leave one out.")
    if ours != UNUSED and ours in renames.values():
        raise InputError(f"--map {text}: there are two columns for {ours!r}. Leave one out.")


def not_there(row: Mapping[str, Any], renames: Mapping[str, str]) -> str:
    """A hint on columns of --map that `row` lacks."""
    absent = ", ".join(repr(theirs) for theirs in renames if theirs not in row)
    return f" --map names {absent}: there is no such column." if absent else ""


def rename(row: Fields, renames: Mapping[str, str]) -> Fields:
    """row under our names. The format complains of absent columns."""
    if not renames:
        return row
    ours = set(renames.values())
    # A mapped column wins.
    kept = {key: value for key, value in row.items() if key in renames or key not in ours}
    return {renames.get(key, key): value for key, value in kept.items()}


def replaced(row: Mapping[str, Any], renames: Mapping[str, str]) -> list[str]:
    """Columns that have a value, and whose place another takes by --map."""
    ours = {name for theirs, name in renames.items() if theirs in row} - {UNUSED}
    return [f"{key} (of the file)" for key in ours if key not in renames and row.get(key) not in EMPTY]


# ---------------------------------------------------------------- no conversations


def _text(row: Fields) -> Text:
    text = string(row, "text")
    if not text:
        raise BadRow("'text' is empty")
    return Text(text)


def _prompt_completion(row: Fields) -> Example:
    asked, answer = talks_in(row, "prompt", "completion")
    if asked or answer:
        if not asked and row["prompt"] != [] and (prompt := string(row, "prompt")).strip():
            asked = [{"role": "user", "content": prompt}]
        answer = answer or [{"role": "assistant", "content": string(row, "completion")}]
        return read_talk(row | {"prompt": asked, "completion": answer})
    completion = string(row, "completion")
    if not completion:
        raise BadRow("'completion' is empty")
    return Completion(string(row, "prompt"), completion)


FORMATS = (
    Format("messages", ("messages",), read_messages, conversations.SAYS_MORE),
    Format("sharegpt", ("conversations",), read_sharegpt, conversations.SAYS_MORE),
    Format("input_ids", ("input_ids",), read_ids, SAYS_MORE),
    Format("prompt,completion", ("prompt", "completion"), _prompt_completion, conversations.SAYS_MORE),
    Format("alpaca", ("instruction", "output"), read_alpaca, ("input", "history", *conversations.SAYS_MORE)),
    Format("text", ("text",), _text),
)
KEY = 60  # characters of a key that are named

_EXPECTED = "messages; conversations; instruction, output; prompt, completion; text; or input_ids"
_LIKELY = (
    (("system", "instruction", "output"), ("system_prompt", "question", "response")),
    (("instruction", "input", "output"), ("question", "context", "answer")),
    (("prompt", "completion"), ("question", "answer")),
    (("prompt", "completion"), ("prompt", "response")),
    (("prompt", "completion"), ("prompt", "output")),
    (("prompt", "completion"), ("input", "output")),
    (("prompt", "completion"), ("query", "response")),
    (("prompt", "completion"), ("problem", "solution")),
    (("prompt", "completion"), ("input_text", "output_text")),
    (("instruction", "input", "output"), ("instruction", "context", "response")),
    (("instruction", "output"), ("instruction", "response")),
    (("text",), ("content",)),
)

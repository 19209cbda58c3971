"""Preference data in the formats of popular trainers: recognised, and refused if no --method needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from trireme.engine.data.files.rows import EMPTY, BadRow
from trireme.engine.data.formats.conversations import role_of

_BAD, _GOOD = ("rejected", "non_preferred", "dispreferred"), ("chosen", "accepted", "preferred")  # also in longer keys
_SHORT = {"reject": False, "bad": False, "loser": False, "y_l": False, "good": True, "winner": True, "y_w": True}
_TAGS = ("label", "kto_tag", "desirable", "is_desirable")
_WORDS = {"true", "false", "desirable", "undesirable", "chosen", "rejected", "good", "bad", "yes", "no"}
_NUMBERS = {"0", "1", "-1", "0.0", "1.0", "-1.0"}
_WHAT = (
    "is preference data, good answers and bad ones: training and `eval` with --method dpo (kto, if labelled) read both."
)

FormatOf = Callable[[Mapping[str, str]], tuple[str, tuple[str, ...]] | None]


def refuse_preferences(row: Mapping[str, Any], renames: Mapping[str, str], format_of: FormatOf) -> None:
    """Raises BadRow with a way out. `renames`: those of --map, by which the row was renamed.

    `format_of`: name and columns of the format that further renames make of the row, None where it cannot be read.
    """
    sides = {key: side_of(key) for key, value in row.items() if value not in EMPTY}
    good, bad = ([key for key, side in sides.items() if side is which] for which in (True, False))
    tags = [key for key in _TAGS if key in row]
    before = [f"{ours}={theirs}" for theirs, ours in renames.items()]
    if bad and (pairs := _without(row, good, bad, format_of)):
        which = "the other columns alone" if all(pair.startswith("unused=") for pair in pairs) else "the good answers"
        raise BadRow(f"{_WHAT} To read {which} as rows: --map {','.join([*before, *pairs])}")
    if bad and good:
        raise BadRow(f"{_WHAT} Write the good answers to a file of rows that are read: messages, or prompt, completion")
    form = format_of({}) if tags else None
    for key in tags if form else ():
        if form and key not in form[1] and _is_tag(row[key], form[0] in ("text", "input_ids")):
            way_out = f"--map {','.join([*before, f'unused={key}'])}"
            raise BadRow(f"{_WHAT} Keep the rows that {key!r} says are good, and leave the column out: {way_out}")


@lru_cache(256)  # rows have the same columns
def side_of(key: str) -> bool | None:
    """Whether a column holds good answers (True), bad ones (False) or something else."""
    key = key.lower()
    for words, side in ((_BAD, False), (_GOOD, True)):
        if any(key == word or key.startswith(f"{word}_") or key.endswith(f"_{word}") for word in words):
            return side
    return _SHORT.get(key)


def _is_tag(value: Any, other_classes: bool) -> bool:
    """Whether it says good or bad. `other_classes`: a number may be a class of something else."""
    word = str(value).strip().lower()
    return isinstance(value, bool) or word in _WORDS or (not other_classes and word in _NUMBERS)


def _without(row: Mapping[str, Any], good: list[str], bad: list[str], format_of: FormatOf) -> list[str]:
    """The pairs of a --map that works: with a column of good answers, else without any; empty where none does."""
    leave = [f"unused={key}" for key in bad]
    for key in good:
        asked = [f"prompt={name}" for name in ("question", "query", "input") if name in row and "prompt" not in row]
        others = [f"unused={other}" for other in good if other != key]
        asks = [("completion", []), ("completion", asked), ("output", []), ("messages", []), ("text", [])]
        for ours, more in sorted(asks, key=lambda way: way[0] != "output") if row.get("instruction") else asks:
            pairs = [f"{ours}={key}", *more, *others, *leave]
            form = format_of({theirs: ours for ours, _, theirs in (pair.partition("=") for pair in pairs)})
            answers_alone = ours == "messages" and _answers_alone(row[key])
            if form and ours in form[1] and not answers_alone:
                return pairs
    alone = [*(f"unused={key}" for key in good), *leave]
    return alone if format_of(dict.fromkeys((*good, *bad), "unused")) else []


def _answers_alone(talk: Any) -> bool:
    """Whether messages are the assistant's alone, as in OpenAI's `preferred_output`: the question is elsewhere."""
    return isinstance(talk, list) and all(role_of(message) == "assistant" for message in talk)

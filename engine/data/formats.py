"""Formats of rows, found from their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trireme.engine.data.conversations import read_alpaca, read_messages, read_sharegpt, read_talk
from trireme.engine.data.examples import Completion, Example, Ids, Text, filled_list, string
from trireme.engine.data.rows import BadRow, Fields
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

UNUSED = "unused"  # --map unused=THEIRS leaves a column out


@dataclass(frozen=True)
class Format:
    """`read` makes an example of `keys`, which name the format, and of `more`, if present."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Fields], Example]
    more: tuple[str, ...] = ()

    def unused(self, row: Fields) -> list[str]:
        """Keys with values that are not read."""
        known = {*self.keys, *self.more, UNUSED}
        return [key for key, value in row.items() if key not in known and value not in (None, "", [], {})]


def find_format(row: Mapping[str, Any], hint: str = "", given: Mapping[str, Any] | None = None) -> Format:
    """Raises BadRow where none fits, with `hint` or a likelier one. `given`: the row before --map."""
    if way_out := _preferences(row):
        raise BadRow(f"is preference data, good answers and bad ones, which is not supported. {way_out}")
    for form in FORMATS:
        if all(key in row for key in form.keys):
            return form
    given = row if given is None else given
    keys = set(given)
    for ours, theirs in _LIKELY:
        if set(theirs) <= keys:
            pairs = ",".join(f"{o}={t}" for o, t in zip(ours, theirs, strict=True))
            hint += f" Perhaps --map {pairs}."
            break
    found = ", ".join(repr(shown(key, KEY)) for key in list(given)[:8]) or "none"
    if keys == {"role", "content"}:
        hint = ' A conversation is a row: {"messages": [{"role": …, "content": …}, …]}.'
    raise BadRow(f"no known format has its keys ({found}); expected {_EXPECTED}.{hint}")


def _preferences(row: Mapping[str, Any]) -> str:
    """Advice on preference data, "" where it is none."""
    if {"chosen", "rejected"} <= row.keys():
        prompt, chosen = row.get("prompt"), row["chosen"]
        if isinstance(chosen, str) and ("prompt" in row or "instruction" in row):
            ours = "completion" if "prompt" in row else "output"
        elif isinstance(chosen, list):
            ours = "completion" if isinstance(prompt, list) else "messages"
        else:
            return "To train on the other columns alone: --map unused=chosen,unused=rejected"
        return f"To train on the good answers: --map {ours}=chosen,unused=rejected"
    if isinstance(row.get("label"), bool) and any(all(key in row for key in form.keys) for form in FORMATS):
        return "Keep the rows whose label is true, and leave the column out: --map unused=label"
    return ""


def parse_map(text: str | None) -> dict[str, str]:
    """`ours=theirs,...` as {their name: our name}. Raises InputError."""
    renames = {}
    for part in (text or "").split(","):
        ours, equals, theirs = part.partition("=")
        if part and not (ours.strip() and equals and theirs.strip()):
            raise InputError(f"--map {text}: expected OURS=YOURS, such as prompt=question,completion=answer.")
        if part:
            renames[theirs.strip()] = ours.strip()
    known = {UNUSED, *(key for form in FORMATS for key in (*form.keys, *form.more))}
    for ours in renames.values():
        if ours not in known:
            turned = ",".join(f"{theirs}={ours}" for theirs, ours in renames.items())
            way_out = f"perhaps --map {turned}" if renames.keys() <= known else f"there are {', '.join(sorted(known))}"
            raise InputError(f"--map {text}: no format has a column {shown(ours, KEY)!r}; {way_out}.")
    return renames


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


# ---------------------------------------------------------------- no conversations


def _text(row: Fields) -> Text:
    text = string(row, "text")
    if not text:
        raise BadRow("'text' is empty")
    return Text(text)


def _prompt_completion(row: Fields) -> Example:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        return read_talk(row)
    completion = string(row, "completion")
    if not completion:
        raise BadRow("'completion' is empty")
    return Completion(string(row, "prompt"), completion)


def _ids(row: Fields) -> Ids:
    ids = _integers(row, "input_ids")
    if row.get("labels") is None:
        return Ids(ids)
    labels = _integers(row, "labels")
    if len(labels) != len(ids):
        raise BadRow(f"'labels' has {len(labels)} entries, 'input_ids' {len(ids)}")
    for i, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, -100):
            raise BadRow(f"labels[{i}] is {label}, expected -100 or input_ids[{i}] = {token} (labels are not shifted)")
    return Ids(ids, [label != -100 for label in labels])


def _integers(row: Fields, key: str) -> list[int]:
    values = filled_list(row, key, "token ids")
    if not all(type(value) is int for value in values):
        raise BadRow(f"{key!r} holds something that is not a whole number")
    return values


FORMATS = (
    Format("messages", ("messages",), read_messages, ("tools",)),
    Format("sharegpt", ("conversations",), read_sharegpt, ("system", "tools")),
    Format("input_ids", ("input_ids",), _ids, ("labels",)),
    Format("prompt,completion", ("prompt", "completion"), _prompt_completion, ("tools",)),
    Format("alpaca", ("instruction", "output"), read_alpaca, ("input", "system", "history", "tools")),
    Format("text", ("text",), _text),
)
KEY = 60  # characters of a key that are named
CHATS = ("messages", "sharegpt", "alpaca")  # for a chat template
_EXPECTED = "messages; conversations; instruction, output; prompt, completion; text; or input_ids"
_LIKELY = (
    (("prompt", "completion"), ("question", "answer")),
    (("prompt", "completion"), ("prompt", "response")),
    (("prompt", "completion"), ("prompt", "output")),
    (("prompt", "completion"), ("input", "output")),
    (("prompt", "completion"), ("query", "response")),
    (("instruction", "input", "output"), ("instruction", "context", "response")),
    (("instruction", "output"), ("instruction", "response")),
    (("text",), ("content",)),
)

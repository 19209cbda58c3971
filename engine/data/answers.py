"""What the rows of a run say, by its method: rows of their own, pairs of answers, labelled answers, classes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypeGuard

from trireme.engine.data.forms import (
    FORMS,
    HISTORY,
    TALK,
    Chat,
    Example,
    Form,
    Text,
    alpaca,
    chat_of,
    check_row,
    completion,
    find_form,
    messages_of,
    normal,
    part_of,
    refuse_media,
    role_of,
    string,
    talk,
    tried,
    unknown,
    unused_of,
)
from trireme.engine.data.forms import parse_map as _parse_map
from trireme.engine.data.read import EMPTY, BadRow, Fields, kind_of, unread_keys
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

# Of data: rows of their own, pairs, labelled answers; pairs and rows that are scored, at their last token
Kind = Literal["", "pairs", "labels", "rewards", "classes"]
PAIRED, SCORED = ("pairs", "labels", "rewards"), ("rewards", "classes")
LABELS = ("label", "kto_tag")
GOOD = ("true", "1", "1.0", "yes", "good", "desirable", "chosen")
BAD = ("false", "0", "0.0", "-1", "-1.0", "no", "bad", "undesirable", "rejected")
MOST = 1000  # classes that are looked for
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # of Anthropic's hh-rlhf
_ASKED = ("question", "query", "instruction", "input", "problem", "context", "user")  # other names of a prompt
_METHODS = "training and `eval` with --method dpo (kto, if labelled) read both"
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*")


class Read(NamedTuple):
    """What a row says. `examples`: one, or of a pair the good and the bad answer. `weight`: below 0 of a bad labelled
    answer. `value`: the number of the class, or the margin by which a good answer is better.
    """

    form: str
    examples: list[Example]
    unused: list[str]  # keys
    weight: float = 1.0
    value: float = 0.0


def parse_map(text: str | None) -> dict[str, str]:
    """--map as {their name: our name}. Raises InputError."""
    keys = {key for form in (*FORMS, *PAIRS) for key in (*form.keys, *form.others)}
    return _parse_map(text, {*keys, *HISTORY, "label", "weight", "margin"})


class _NoForm(BadRow):
    """A row of none of these forms."""

    def __init__(self, row: Fields, forms: Sequence[Form]):
        super().__init__("no known form")
        self.row, self.forms = row, forms


def read(
    raw: Fields, renames: Mapping[str, str], kind: Kind, classes: Mapping[str, int] | None = None, table: bool = False
) -> Read:
    """What a row of a file says. `renames`: those of --map. `classes`: number by word. `table`: as of normal. Raises
    BadRow.
    """
    try:
        return _read(raw, renames, kind, classes or {}, table)
    except RecursionError:
        raise BadRow("is nested too deeply") from None
    except _NoForm as error:
        works = lambda pairs: tried(
            raw, pairs, lambda row, names: _read(row, names, kind, classes or {}, table), renames
        )
        labelled = kind in ("pairs", "rewards") and any(key in raw for key in LABELS)
        near = " Labelled answers are for --method kto." if labelled else ""
        raise BadRow(unknown(error.row, error.forms, works) + near) from None


def _read(raw: Fields, renames: Mapping[str, str], kind: Kind, classes: Mapping[str, int], table: bool) -> Read:
    row = normal(raw, renames, table)
    check_row(row)
    if row.get("label") is None and row.get(LABELS[1]) is not None:
        row = {**{key: value for key, value in row.items() if key != LABELS[1]}, "label": row[LABELS[1]]}
    weight, known = _weight(row), ["weight"] if _is_number(row.get("weight")) else []
    mapped = renames.values()
    if kind in ("pairs", "rewards") or (
        kind == "labels" and find_form(row, PAIRS, mapped) and row.get("label") in EMPTY
    ):
        form = find_form(row, PAIRS, mapped)
        if form is None:
            raise _NoForm(row, PAIRS)
        examples = form.read(row)
        value, known = (_margin(row), [*known, "margin"]) if kind == "rewards" else (0.0, known)
        return Read(form.name, examples, unused_of(row, form, examples, known), weight, value)
    if kind == "":
        _refuse_preferences(row, raw, renames, table)
    form = find_form({k: v for k, v in row.items() if k != "label"} if kind else row, FORMS, mapped)
    if form is None:
        raise _NoForm(row, FORMS)
    if kind == "":
        example = form.read(row)
        return Read(form.name, [example], unused_of(row, form, [example], known), weight)
    if row.get("label") is None:
        raise BadRow("has no 'label'; --map label=YOURS names your column")
    if kind == "classes":
        talks = form.keys[0] in ("messages", "conversations")
        example = chat_of(row, form.keys[0], answered=False) if talks else form.read(row)
        example = example._replace(ends=False) if isinstance(example, Text) else example
        value = float(_class(row["label"], classes))
    else:
        if form.keys[0] in ("text", "input_ids"):
            raise BadRow(f"is a row of {form.keys[0]!r} with a label; expected prompt, completion, or messages")
        example, value = _last(form.read(row)), 0.0
        weight *= _sign(row["label"])
    return Read(f"{form.name},label", [example], unused_of(row, form, [example], [*known, "label"]), weight, value)


def _is_number(value: Any) -> TypeGuard[str | float | Decimal]:
    if isinstance(value, str):
        return _NUMBER.fullmatch(value) is not None
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def _weight(row: Mapping[str, Any]) -> float:
    """The column "weight" where it is a number, else 1. Raises BadRow."""
    if not _is_number(row.get("weight")):
        return 1.0
    weight = float(row["weight"])
    if not 0 < weight < math.inf:
        raise BadRow(f"'weight' is {weight:g}, expected a number above 0; leave out a row that is not to count")
    return weight


def _margin(row: Mapping[str, Any]) -> float:
    value = row.get("margin")
    if value in EMPTY:
        return 0.0
    if not _is_number(value) or not math.isfinite(float(value)):
        raise BadRow(f"'margin' is {str(value)[:40]!r}, expected a number")
    return float(value)


def _refuse_preferences(row: Fields, raw: Fields, renames: Mapping[str, str], table: bool) -> None:
    """Raises BadRow with a --map that trains on the good answers, if there is one."""
    before = [f"{ours}={theirs}" for theirs, ours in renames.items()]
    if not _SIDES.isdisjoint(row) and (form := find_form(row, PAIRS)):
        good, bad = ("preferred_output", "non_preferred_output") if "input" in form.keys else form.keys[-2:]
        leave = [
            f"unused={key}" for key in dict.fromkeys((bad, *(key for key in form.keys if key.startswith("rejected"))))
        ]
        ways = [[f"{ours}={good}"] for ours in ("output", "completion", "messages", "text") if good != ours]
        for pairs in ([*way, *leave] for way in [*ways, []]):
            names = ",".join([*before, *pairs])
            if tried(raw, names, lambda row, names: _read(row, names, "", {}, table)):
                raise BadRow(f"is preference data, good answers and bad ones: {_METHODS}. To read the good answers "
                             f"as rows: --map {names}")  # fmt: skip
        raise BadRow(f"is preference data, good answers and bad ones: {_METHODS}. To train on the good answers, write "
                     "them to a file of messages, or of prompt, completion")  # fmt: skip
    if row.get("label") is None:
        return
    form = find_form(row, FORMS)
    is_tag = str(row["label"]).strip().lower() in (*GOOD, *BAD)
    if is_tag and form and form.keys[0] not in ("text", "input_ids"):
        key = next(
            theirs
            for theirs, ours in [*renames.items(), *((key, key) for key in LABELS)]
            if ours in LABELS and theirs in raw
        )
        names = ",".join([*(pair for pair in before if not pair.endswith(f"={key}")), f"unused={key}"])
        raise BadRow(f"is preference data, labelled answers: {_METHODS}. Keep the rows that {key!r} says are good, and "
                     f"leave the column out: --map {names}")  # fmt: skip


# ---------------------------------------------------------------- pairs


def _pair(row: Fields, context: Any, good: Any, bad: Any) -> list[Example]:
    """The examples of a good and a bad answer to a context, each a text or messages; without a context, what both begin
    with.
    """
    for name, answer in (("chosen", good), ("rejected", bad)):
        if not (answer.strip() if isinstance(answer, str) else answer):
            raise BadRow(f"{name!r} is empty")
    if isinstance(good, str) != isinstance(bad, str):
        raise BadRow("'chosen' and 'rejected' are of different kinds, a text and messages")
    if isinstance(good, str) and not isinstance(context, list):
        return [_joined_texts(row, context, mine, other) for mine, other in ((good, bad), (bad, good))]
    context = [{"role": "user", "content": context}] if isinstance(context, str) and context.strip() else context or []
    if isinstance(good, str):
        return [talk(row, context, answer, side) for side, answer in (("chosen", good), ("rejected", bad))]
    sides = (("chosen", good, bad), ("rejected", bad, good))
    return [talk(row, *_apart(context, mine, other), side) for side, mine, other in sides]


def _joined_texts(row: Fields, context: str | None, mine: str, other: str) -> Example:
    """The prompt is taken off where both answers begin with it."""
    if context is None or not context.strip() and mine.startswith(_HUMAN):
        return _of_dialogue(row, mine, other)
    for asked in (context, context.strip()):
        if asked.strip() and mine.startswith(asked) and other.startswith(asked):
            return completion(asked, mine[len(asked) :], "an answer behind its prompt")
    return completion(context, mine, "an answer")


def _of_dialogue(row: Fields, mine: str, other: str) -> Example:
    """A whole dialogue as text; the prompt is what both begin with, of hh-rlhf in whole turns."""
    same = len(os.path.commonprefix([mine, other]))
    if not mine.startswith(_HUMAN):
        if asked := [key for key in _ASKED if isinstance(row.get(key), str) and row[key].strip()]:
            ways = f"--map instruction={asked[0]}, or prompt={asked[0]} without the chat template"
            raise BadRow(f"has no 'prompt'. Is it {asked[0]!r}? {ways}; else unused={asked[0]}")
        while same and not mine[same - 1].isspace():
            same -= 1
        start = len(mine[:same].rstrip())
        if not start:
            raise BadRow("'chosen' and 'rejected' begin with nothing in common, and there is no 'prompt'")
        return completion(mine[:start], mine[start:], "an answer")
    start = mine.rfind(_ASSISTANT, 0, same)
    if start < 0 or other[start : start + len(_ASSISTANT)] != _ASSISTANT:
        raise BadRow("'chosen' and 'rejected' do not share a turn of the human")
    start += len(_ASSISTANT)
    turns = re.split(r"\n\n(Human|Assistant):", mine)[1:]
    before = len(re.findall(r"\n\n(?:Human|Assistant):", mine[:start])) - 1
    messages = [
        {"role": "user" if who == "Human" else "assistant", "content": what.strip()}
        for who, what in zip(turns[::2], turns[1::2], strict=True)
    ]
    plain = completion(mine[:start], mine[start:], "an answer")
    return talk({}, messages[:before], messages[before:], "the dialogue")._replace(plain=plain)


def _apart(context: list[Any], mine: list[Any], other: list[Any]) -> tuple[list[Any], list[Any]]:
    """(messages before the answer, the answer's). What both sides begin with is before; it may hold the context, or go
    on from its end.
    """
    same = 0
    while same < min(len(mine), len(other)) - 1 and mine[same] == other[same]:
        same += 1
    shared, answer = mine[:same], mine[same:]
    asked, begun = ([(role_of(m), _content(m)) for m in messages] for messages in (context, shared))
    if not (asked and begun) or asked == begun[-len(asked) :]:
        before = shared or context
    elif n := next((n for n in range(min(len(asked), len(begun)), 0, -1) if asked[-n:] == begun[:n]), 0):
        before = [*context[:-n], *shared]
    elif len(asked) == 1 and asked == [turn for turn in begun if turn[0] == "user"][:1]:
        before = shared
    else:
        raise BadRow("'prompt' is not what 'chosen' and 'rejected' begin with; leave it out: --map unused=prompt")
    if not before:
        raise BadRow("'chosen' and 'rejected' have no message in common, and there is no 'prompt'")
    if not shared and (role := role_of(answer[0])) not in ("", "assistant", "call"):
        raise BadRow(f"after the prompt there is a message of role {role!r}, expected 'assistant'")
    return before, answer


def _content(message: Any) -> Any:
    return (message.get("content") or message.get("value")) if isinstance(message, dict) else None


def _prompted(row: Fields) -> list[Example]:
    asked = row.get("prompt")
    context = None if asked is None else part_of(row, "prompt")
    return _pair(row, context, part_of(row, "chosen"), part_of(row, "rejected"))


def _after(column: str) -> Callable[[Fields], list[Example]]:
    """A conversation, and a turn of either side, or whole dialogues that begin with it."""

    def pair(row: Fields) -> list[Example]:
        context, good, bad = messages_of(row, column), part_of(row, "chosen"), part_of(row, "rejected")
        whole = [isinstance(side, list) and len(side) > 1 and side[: len(context)] == context for side in (good, bad)]
        return _pair(row, [] if any(whole) else context, good, bad)

    return pair


def _alpaca_pair(row: Fields) -> list[Example]:
    return [_last(alpaca({**row, "output": string(row, side)})) for side in ("chosen", "rejected")]


def _openai(row: Fields) -> list[Example]:
    asked = row["input"]
    if not isinstance(asked, dict) or "messages" not in asked:
        raise BadRow("'input' is not an object with 'messages'")
    refuse_media(asked, "'input': ")
    inner = {**{key: asked[key] for key in TALK if key in asked}, "messages": asked["messages"]}
    pair = _pair(
        inner, messages_of(inner, "messages"), part_of(row, "preferred_output"), part_of(row, "non_preferred_output")
    )
    others = tuple(f"input.{key}" for key in unread_keys(asked, ("messages", *TALK)))
    return [example._replace(unused=(*example.unused, *others)) for example in pair if isinstance(example, Chat)]


def _swift(row: Fields) -> list[Example]:
    good = messages_of(row, "messages")
    if role_of(good[-1]) != "assistant":
        raise BadRow("'messages' does not end with the assistant's message, the good answer")
    if row.get("rejected_messages") not in EMPTY:
        return _pair(row, [], good, messages_of(row, "rejected_messages"))
    return _pair(row, good[:-1], good[-1:], [{"role": "assistant", "content": string(row, "rejected_response")}])


PAIRS = (
    Form("prompt,chosen,rejected", ("prompt", "chosen", "rejected"), _prompted),
    Form("instruction,chosen,rejected", ("instruction", "chosen", "rejected"), _alpaca_pair, (*HISTORY, *TALK)),
    Form("conversations,chosen,rejected", ("conversations", "chosen", "rejected"), _after("conversations")),
    Form("messages,chosen,rejected", ("messages", "chosen", "rejected"), _after("messages")),
    Form("chosen,rejected", ("chosen", "rejected"), _prompted),
    Form("input,preferred_output", ("input", "preferred_output", "non_preferred_output"), _openai, ()),
    Form("messages,rejected_messages", ("messages", "rejected_messages"), _swift),
    Form("messages,rejected_response", ("messages", "rejected_response"), _swift),
)
_SIDES = {form.keys[-1] for form in PAIRS}


# ---------------------------------------------------------------- labels and classes


def _last(example: Example) -> Example:
    """With the last message alone to learn."""
    if not isinstance(example, Chat):
        return example
    if example.messages[-1]["role"] != "assistant":
        raise BadRow("the conversation does not end with the assistant's message, which the label is about")
    before = [{**message, "train": False} for message in example.messages[:-1]]
    return example._replace(messages=[*before, example.messages[-1]])


def _sign(label: Any) -> float:
    """1 of a good answer, -1 of a bad one. Raises BadRow."""
    word = str(label).strip().lower()
    if word in (*GOOD, *BAD):
        return 1.0 if word in GOOD else -1.0
    raise BadRow(f"'label' is {word[:40]!r}, expected true or false")


def classes_of(names: Sequence[str]) -> dict[str, int]:
    """The number of each class by its name, and by its number if no name is one."""
    numbers = {} if any(_WHOLE.fullmatch(name) for name in names) else {str(i): i for i in range(len(names))}
    return numbers | {name: i for i, name in enumerate(names)}


_WHOLE = re.compile(r"-?\d{1,18}")


def _class(value: Any, classes: Mapping[str, int]) -> int:
    word = _word(value)
    if word in classes:
        return classes[word]
    names = list({number: name for name, number in classes.items()}.values())
    others = f" and {len(names) - 12} more" if len(names) > 12 else ""
    raise BadRow(f"'label' is {shown(repr(value))}, which is none of {', '.join(names[:12])}{others}")


def _word(value: Any) -> str:
    """A label as text. Raises BadRow if it is not one class."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (float, Decimal)) and math.isfinite(value) and value == int(value):
        return str(int(value))
    if isinstance(value, (float, Decimal)):
        raise BadRow(f"'label' is {value:g}, no class: regression is not supported")
    if not isinstance(value, (str, int)):
        raise BadRow(f"'label' is {kind_of(value)}, expected one class: several labels of a row are not supported")
    return str(value)


def labels_in(rows: Iterable[Any], renames: Mapping[str, str], named: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the classes of rows: those that the file has for them, else the labels that occur, numbers by size,
    others by the alphabet; 0, 1, … are called LABEL_0, LABEL_1, … Raises InputError.
    """
    words, fault = set[str](), ""
    for row in rows:
        value = normal(row, renames, False).get("label") if isinstance(row, dict) else None
        try:
            words |= set() if value in EMPTY else {_word(value)}
        except BadRow as error:
            fault = fault or str(error)  # said when it is read, if there are others
        if len(words) > MOST:
            raise InputError(
                f"'label' has more than {MOST:,} different values. Is it the right column? --map label=YOURS"
            )
    if named and words <= classes_of(named).keys() | {"-1"}:
        return tuple(named)
    if fault and not words:
        raise InputError(f"--data: {fault}.")
    if len(words) < 2:
        what = f"one class alone, {shown(next(iter(words)))}" if words else "no row with a 'label'"
        raise InputError(f"--data has {what}. Name your column: --map label=YOURS; or the classes: --labels A,B.")
    if all(map(_WHOLE.fullmatch, words)):
        numbers = sorted(words, key=int)
        return (
            tuple(f"LABEL_{i}" for i in range(len(words)))
            if numbers == [*map(str, range(len(words)))]
            else tuple(numbers)
        )
    for name in sorted(words):
        if "," in name or not name.strip() or name != name.strip():
            raise InputError(f"'label' is {shown(repr(name))}: write names without commas or spaces around them.")
    return tuple(sorted(words))

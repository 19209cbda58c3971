"""What the rows of a run say, by its method: rows of their own, pairs of answers, labelled answers, classes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from trireme.engine.data import forms
from trireme.engine.data.forms import (
    FORMS,
    HISTORY,
    TALK,
    Chat,
    Example,
    Form,
    Text,
    messages_of,
    part_of,
    string,
    talk,
)
from trireme.engine.data.messages import refuse_media, role_of
from trireme.engine.data.read import EMPTY, BadRow, Fields, unread_keys
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

# Of data: rows of their own, pairs, labelled answers; pairs and rows that are scored, at their last token
Kind = Literal["", "pairs", "labels", "rewards", "classes"]
PAIRED, SCORED = ("pairs", "labels", "rewards"), ("rewards", "classes")
GOOD = ("true", "1", "1.0", "yes", "good", "desirable", "chosen")
BAD = ("false", "0", "0.0", "-1", "-1.0", "no", "bad", "undesirable", "rejected")
MOST = 1000  # classes that are looked for
_LABELS = ("label", "kto_tag")
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # of Anthropic's hh-rlhf
_PROMPTS = ("question", "query", "instruction", "input", "problem", "context", "user")  # other names of a prompt
_LIKELY = {  # columns that --map is advised for, if it then reads the row
    "instruction": ("question", "query", "problem", "prompt", "input", "user"),
    "output": ("answer", "response", "reply", "solution", "completion", "assistant"),
    "text": ("content", "body", "document", "article"),
    "prompt": ("sentence1", "premise", "question1", "text1"),
    "completion": ("sentence2", "hypothesis", "question2", "text2"),
}
_WHOLE = re.compile(r"-?\d{1,18}")


class Read(NamedTuple):
    """What a row says. `examples`: one, or of a pair the good and the bad answer. `weight`: below 0 of a bad labelled
    answer. `value`: the number of the class, or the margin by which a good answer is better.
    """

    form: str
    examples: list[Example]
    unused: list[str]  # keys
    weight: float = 1.0
    value: float = 0.0


class _How(NamedTuple):
    """How rows are read: as of `read`."""

    renames: Mapping[str, str]
    kind: Kind
    classes: Mapping[str, int]
    table: bool


def parse_map(text: str | None) -> dict[str, str]:
    """--map `ours=theirs,...` as {their name: our name}. Raises InputError."""
    known = {*HISTORY, "label", "weight", "margin", "unused"}
    known |= {key for form in (*FORMS, *PAIRS) for key in (*form.keys, *form.others)}
    renames = dict[str, str]()
    for part in filter(None, (text or "").split(",")):
        ours, _, theirs = (name.strip() for name in part.partition("="))
        if not (ours and theirs):
            raise InputError(f"--map {text}: expected OURS=YOURS, such as prompt=question,completion=answer.")
        if theirs in renames or (ours != "unused" and ours in renames.values()):
            raise InputError(f"--map {text}: {theirs if theirs in renames else ours!r} is named twice. Leave one out.")
        renames[theirs] = ours
    if wrong := [ours for ours in renames.values() if ours not in known]:
        there = ", ".join(sorted(known))
        raise InputError(f"--map {text}: no form of rows has a column {shown(wrong[0])!r}; there are {there}.")
    return renames


def read(
    raw: Fields, renames: Mapping[str, str], kind: Kind, classes: Mapping[str, int] | None = None, table: bool = False
) -> Read:
    """What a row of a file says. `renames`: those of --map. `classes`: number by word. `table`: as of normal. Raises
    BadRow.
    """
    try:
        return _read(raw, _How(renames, kind, classes or {}, table))
    except RecursionError:
        raise BadRow("is nested too deeply") from None


def _read(raw: Fields, how: _How) -> Read:
    row, kind = forms.normal(raw, how.renames, how.table), how.kind
    forms.check_row(row)
    if row.get("label") is None and row.get("kto_tag") is not None:
        row = {**{key: value for key, value in row.items() if key != "kto_tag"}, "label": row["kto_tag"]}
    number, known = _number(row.get("weight")), list[str]()
    weight = 1.0 if number is None else number
    known += [] if number is None else ["weight"]
    if not 0 < weight < math.inf:
        raise BadRow(f"'weight' is {weight:g}, expected a number above 0; leave out a row that is not to count")
    mapped = how.renames.values()
    pair = None if _SIDES.isdisjoint(row) else forms.find_form(row, PAIRS, mapped)
    if kind in ("pairs", "rewards") or (kind == "labels" and pair and row.get("label") in EMPTY):
        if pair is None:
            raise BadRow(_unknown(raw, row, PAIRS, how))
        examples, value = pair.read(row), _margin(row) if kind == "rewards" else 0.0
        known += ["margin"] if kind == "rewards" else []
        return Read(pair.name, examples, forms.unused_of(row, pair, examples, known), weight, value)
    form = forms.find_form({key: value for key, value in row.items() if key != "label"} if kind else row, FORMS, mapped)
    if kind == "" and (pair or row.get("label") is not None):
        _refuse_preferences(raw, row, pair, form, how)
    if form is None:
        raise BadRow(_unknown(raw, row, FORMS, how))
    if kind == "":
        example = form.read(row)
        return Read(form.name, [example], forms.unused_of(row, form, [example], known), weight)
    if row.get("label") is None:
        raise BadRow("has no 'label'; --map label=YOURS names your column")
    if kind == "classes":
        talks = form.keys[0] in ("messages", "conversations")
        example = forms.chat_of(row, form.keys[0], answered=False) if talks else form.read(row)
        example = example._replace(ends=False) if isinstance(example, Text) else example
        value = float(_class(row["label"], how.classes))
    elif form.keys[0] in ("text", "input_ids"):
        raise BadRow(f"is a row of {form.keys[0]!r} with a label; expected prompt, completion, or messages")
    else:
        example, value = _last(form.read(row)), 0.0
        weight *= _sign(row["label"])
    return Read(
        f"{form.name},label", [example], forms.unused_of(row, form, [example], [*known, "label"]), weight, value
    )


def _number(value: Any) -> float | None:
    """A number, also in a string; None of another value."""
    if value is None or isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _margin(row: Mapping[str, Any]) -> float:
    margin = _number(row.get("margin") or 0)
    if margin is None or not math.isfinite(margin):
        raise BadRow(f"'margin' is {str(row['margin'])[:40]!r}, expected a number")
    return margin


# ---------------------------------------------------------------- rows of another form


def _unknown(raw: Fields, row: Fields, among: Sequence[Form], how: _How) -> str:
    """What is wrong with a row of no form: the row, what is expected, and what its shape or a --map that works says."""
    seen = shown(json.dumps(row, ensure_ascii=False, default=str), 200)
    known = "; ".join(", ".join(form.keys) for form in among[: len(FORMS)])
    way_out = forms.shape_of(row)
    if not way_out:
        advice = _map_that_reads(raw, how, _likely(raw, among, how))
        names = "chosen=better,rejected=worse" if among is PAIRS else "instruction=question,output=answer"
        way_out = f" Perhaps {advice}." if advice else f" Rename columns, as in --map {names}."
    near = " Labelled answers are for --method kto." if among is PAIRS and row.get("label") is not None else ""
    return f"no known form of a row: {seen}. Expected the keys {known}.{way_out}{near}"


def _likely(raw: Fields, among: Sequence[Form], how: _How) -> Iterator[dict[str, str]]:
    """Yields renames that give a row the keys of a form."""
    names = {how.renames.get(key, key).lower(): key for key in raw if key == key.strip()}
    for form in among:
        likely = {ours: (ours,) if ours in names else _LIKELY.get(ours, ()) for ours in form.keys}
        columns = {ours: [names[name] for name in likely[ours] if name in names] for ours in likely}
        columns |= {ours: [names[ours]] for ours in form.others if ours in names}
        if all(len(theirs) == 1 for theirs in columns.values()):
            yield {theirs[0]: ours for ours, theirs in columns.items() if theirs[0] != ours}


def _map_that_reads(raw: Fields, how: _How, ways: Iterable[Mapping[str, str]]) -> str:
    """The first of these renames with which a row of a file is read, with those of --map, as this option; else ""."""
    for way in ways:
        renames = {**how.renames, **way}
        with suppress(BadRow):
            if renames != how.renames:
                _read(raw, how._replace(renames=renames))
                return "--map " + ",".join(f"{ours}={theirs}" for theirs, ours in renames.items())
    return ""


def _refuse_preferences(raw: Fields, row: Fields, pair: Form | None, form: Form | None, how: _How) -> None:
    """Raises BadRow if a row is a pair or a labelled answer, with a --map that trains on the good answers."""
    if pair:
        good, *bad = pair.keys[1:] if "input" in pair.keys else pair.keys[-2:]
        leave = dict.fromkeys(bad, "unused")
        ways = [{good: ours, **leave} for ours in ("output", "completion", "messages", "text") if good != ours]
        what, which = "good answers and bad ones", "the good answers"
    elif str(row.get("label")).strip().lower() in (*GOOD, *BAD) and form and form.keys[0] not in ("text", "input_ids"):
        ways, leave = [], {key: "unused" for key in raw if how.renames.get(key, key) in ("label", "kto_tag")}
        what, which = "labelled answers", "the good ones alone, take out the others, and"
    else:
        return
    way_out = _map_that_reads(raw, how, [*ways, leave]) or "write a file of messages, or of prompt, completion"
    raise BadRow(
        f"is preference data, {what}: --method dpo (kto, if labelled) reads both. To train on {which}: {way_out}"
    )


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
    """The prompt is taken off where both answers begin with it; without one it is the words that both begin with."""
    if not (context or "").strip() and mine.startswith(_HUMAN):
        return _of_dialogue(mine, other)
    if context is None:
        if names := [key for key in _PROMPTS if isinstance(row.get(key), str) and row[key].strip()]:
            ways = f"--map instruction={names[0]}, or prompt={names[0]} without the chat template"
            raise BadRow(f"has no 'prompt'. Is it {names[0]!r}? {ways}; else unused={names[0]}")
        context = re.sub(r"\s*\S*\Z", "", os.path.commonprefix([mine, other]))
        if not context:
            raise BadRow("'chosen' and 'rejected' begin with nothing in common, and there is no 'prompt'")
    for prompt in (context, context.strip()):
        if prompt.strip() and mine.startswith(prompt) and other.startswith(prompt):
            return forms.completion(prompt, mine[len(prompt) :], "an answer behind its prompt")
    return forms.completion(context, mine, "an answer")


def _of_dialogue(mine: str, other: str) -> Example:
    """A dialogue of hh-rlhf; the prompt is the turns that both sides begin with."""
    start = os.path.commonprefix([mine, other]).rfind(_ASSISTANT)
    if start < 0:
        raise BadRow("'chosen' and 'rejected' do not share a turn of the human")
    start += len(_ASSISTANT)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = re.split(r"\n\n(Human|Assistant):", mine)[1:]
    pairs = zip(turns[::2], turns[1::2], strict=True)
    messages = [{"role": roles[who], "content": words.strip()} for who, words in pairs]
    before = len(re.findall(r"\n\n(?:Human|Assistant):", mine[:start])) - 1
    plain = forms.completion(mine[:start], mine[start:], "an answer")
    return talk({}, messages[:before], messages[before:], "the dialogue")._replace(plain=plain)


def _apart(context: list[Any], mine: list[Any], other: list[Any]) -> tuple[list[Any], list[Any]]:
    """(messages before the answer, the answer's). What both sides begin with is before; it may hold the context, or go
    on from its end.
    """
    same = 0
    while same < min(len(mine), len(other)) - 1 and mine[same] == other[same]:
        same += 1
    shared, answer = mine[:same], mine[same:]
    prompt, start = ([(role_of(m), _content(m)) for m in messages] for messages in (context, shared))
    if not (prompt and start) or prompt == start[-len(prompt) :]:
        before = shared or context
    elif n := next((n for n in range(min(len(prompt), len(start)), 0, -1) if prompt[-n:] == start[:n]), 0):
        before = [*context[:-n], *shared]
    elif len(prompt) == 1 and prompt == [turn for turn in start if turn[0] == "user"][:1]:
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
    context = None if row.get("prompt") is None else part_of(row, "prompt")
    return _pair(row, context, part_of(row, "chosen"), part_of(row, "rejected"))


def _after(column: str) -> Callable[[Fields], list[Example]]:
    """A conversation, and a turn of either side, or whole dialogues that begin with it."""

    def pair(row: Fields) -> list[Example]:
        context, good, bad = messages_of(row, column), part_of(row, "chosen"), part_of(row, "rejected")
        whole = [isinstance(side, list) and len(side) > 1 and side[: len(context)] == context for side in (good, bad)]
        return _pair(row, [] if any(whole) else context, good, bad)

    return pair


def _alpaca_pair(row: Fields) -> list[Example]:
    return [_last(forms.alpaca({**row, "output": string(row, side)})) for side in ("chosen", "rejected")]


def _openai(row: Fields) -> list[Example]:
    source = row["input"]
    if not isinstance(source, dict) or "messages" not in source:
        raise BadRow("'input' is not an object with 'messages'")
    refuse_media(source, "'input': ")
    sides = (part_of(row, key) for key in ("preferred_output", "non_preferred_output"))
    pair = _pair({key: source[key] for key in TALK if key in source}, messages_of(source, "messages"), *sides)
    others = tuple(f"input.{key}" for key in unread_keys(source, ("messages", *TALK)))
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
    if not isinstance(value, (str, int)):
        raise BadRow(f"'label' is {str(value)[:40]}, expected one class: no fractions, no lists of several")
    return str(value)


def labels_in(rows: Iterable[Any], renames: Mapping[str, str], named: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the classes of rows: those that the file has for them, else the labels that occur, numbers by size,
    others by the alphabet; 0, 1, … are called LABEL_0, LABEL_1, … Raises InputError.
    """
    words = set[str]()
    for row in rows:
        value = forms.normal(row, renames, False).get("label") if isinstance(row, dict) else None
        with suppress(BadRow):  # said when it is read, if there are others
            words |= set() if value in EMPTY else {_word(value)}
        if len(words) > MOST:
            raise InputError(f"'label' has more than {MOST:,} values. Is it the right column? --map label=YOURS")
    if named and words <= classes_of(named).keys() | {"-1"}:
        return tuple(named)
    if len(words) < 2:
        what = f"one class alone, {shown(next(iter(words)))}" if words else "no row with one class as its 'label'"
        raise InputError(f"--data has {what}. Name your column: --map label=YOURS; or the classes: --labels A,B.")
    if all(map(_WHOLE.fullmatch, words)):
        numbers = sorted(words, key=int)
        counted = numbers == [*map(str, range(len(words)))]
        return tuple(f"LABEL_{number}" for number in numbers) if counted else tuple(numbers)
    for name in sorted(words):
        if "," in name or name != name.strip():
            raise InputError(f"'label' is {shown(repr(name))}: write names without commas or spaces around them.")
    return tuple(sorted(words))

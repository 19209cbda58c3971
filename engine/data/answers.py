"""What the rows of a run say, by its method: rows of their own, pairs of answers, labelled answers, classes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from trireme.engine.data import forms
from trireme.engine.data.forms import FORMS, HISTORY, TALK, Chat, Example, Form, Text, filled, string, talk
from trireme.engine.data.messages import is_message, role_of
from trireme.engine.data.read import EMPTY, BadRow, Fields
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

# Of data: rows of their own, pairs, labelled answers; pairs and rows that are scored, at their last token
Kind = Literal["", "pairs", "labels", "rewards", "classes"]
PAIRED, SCORED = ("pairs", "labels", "rewards"), ("rewards", "classes")
SIGNS = {  # of labelled answers: good, bad
    **dict.fromkeys(("true", "1", "1.0", "yes", "good", "desirable", "chosen"), 1.0),
    **dict.fromkeys(("false", "0", "0.0", "-1", "-1.0", "no", "bad", "undesirable", "rejected"), -1.0),
}
MOST = 1000  # classes that are looked for
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # of Anthropic's hh-rlhf
_LIKELY = {  # columns that --map is advised for, if it then reads the row
    "instruction": ("question", "query", "problem", "prompt", "input", "user"),
    "output": ("answer", "response", "reply", "solution", "completion", "assistant"),
    "text": ("content", "body", "document", "article"),
    "prompt": ("sentence1", "premise", "question1", "text1", "question", "query", "instruction", "input", "problem"),
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


class _Misnamed(BadRow):
    """A row that other names of its columns may make one that is read."""

    def __init__(self, fault: str, ways: Iterable[dict[str, str]], advice: str = ""):
        """`ways`: renames as of --map; `advice`: where none of them helps."""
        super().__init__(fault)
        self.ways, self.advice = ways, advice


def parse_map(text: str | None) -> dict[str, str]:
    """--map `ours=theirs,...` as {their name: our name}. Raises InputError."""
    known = {*HISTORY, "label", "weight", "margin", "unused"}
    known |= {key for form in (*FORMS, *PAIRS) for key in (*form.keys, *form.others)}
    renames, pairs = dict[str, str](), [part.partition("=") for part in filter(None, (text or "").split(","))]
    for ours, theirs in ((ours.strip(), theirs.strip()) for ours, _, theirs in pairs):
        again = theirs in renames or (ours != "unused" and ours in renames.values())
        if ours not in known or not theirs or again:
            which = f"{theirs} or {ours} is named twice" if again else f"OURS is one of {', '.join(sorted(known))}"
            raise InputError(f"--map {text}: expected OURS=YOURS, such as prompt=question,completion=answer; {which}.")
        renames[theirs] = ours
    return renames


def read(
    raw: Fields, renames: Mapping[str, str], kind: Kind, classes: Mapping[str, int] | None = None, table: bool = False
) -> Read:
    """What a row of a file says. `renames`: those of --map. `classes`: number by word. `table`: as of normal. Raises
    BadRow.
    """
    try:
        row, numbers = forms.normal(raw, renames, table), classes or {}
        try:
            return _read(row, renames.values(), kind, numbers)
        except _Misnamed as error:
            advice = error.advice
            for way in error.ways:
                with suppress(BadRow):
                    _read(forms.normal(row, way, table), {*renames.values(), *way.values()}, kind, numbers)
                    names = {theirs: way.get(ours, ours) for theirs, ours in renames.items()}
                    names |= {theirs: ours for theirs, ours in way.items() if theirs in raw.keys() - renames.keys()}
                    advice = f" Perhaps --map {','.join(f'{ours}={theirs}' for theirs, ours in names.items())}."
                    break
            raise BadRow(f"{error}{advice}") from None
    except RecursionError:
        raise BadRow("is nested too deeply") from None


def _read(row: Fields, mapped: Collection[str], kind: Kind, classes: Mapping[str, int]) -> Read:
    """`row`: normal; `mapped`: our names that --map gives. Raises BadRow."""
    forms.check_row(row)
    if row.get("label") is None and row.get("kto_tag") is not None:
        row = {**row, "label": row["kto_tag"], "kto_tag": None}
    weight, value = _number(row, "weight", 1.0), 0.0
    known = ["weight"] if weight is not None else []  # else a column of something else
    weight = 1.0 if weight is None else weight
    if weight <= 0:
        raise BadRow(f"'weight' is {weight:g}, expected a number above 0; leave out a row that is not to count")
    pair = None if _SIDES.isdisjoint(row) else forms.find_form(row, PAIRS, mapped)
    if kind in ("pairs", "rewards") or (kind == "labels" and pair and row.get("label") in EMPTY):
        if pair is None:
            raise _unknown(row, PAIRS)
        margin = _number(row, "margin", 0.0) if kind == "rewards" else 0.0
        if margin is None:
            raise BadRow("'margin' is not a number")
        examples, known = pair.read(row), [*known, *(["margin"] if kind == "rewards" else [])]
        return Read(pair.name, examples, forms.unused_of(row, pair, examples[0], known), weight, margin)
    form = forms.find_form(row, FORMS, mapped)
    if kind == "":
        _refuse_preferences(row, pair, form)
    if form is None:
        raise _unknown(row, FORMS)
    if kind and row.get("label") is None:
        raise BadRow("has no 'label'; --map label=YOURS names your column")
    if kind == "classes" and form.keys[0] in ("messages", "conversations"):
        example: Example = forms.chat_of(row, form.keys[0], answered=False)
    else:
        example = form.read(row)
    if kind == "":
        return Read(form.name, [example], forms.unused_of(row, form, example, known), weight)
    if kind == "classes":
        example = example._replace(ends=False) if isinstance(example, Text) else example
        value = float(_labelled(_word(row["label"]), classes))
    else:
        example = _last(example)
        weight *= _labelled(str(row["label"]).strip().lower(), SIGNS)
    return Read(f"{form.name},label", [example], forms.unused_of(row, form, example, [*known, "label"]), weight, value)


def _number(row: Mapping[str, Any], key: str, default: float) -> float | None:
    """A finite number, also in a string; None of another value."""
    value = default if row.get(key) is None else row[key]
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        return None
    with suppress(ValueError, OverflowError):
        return float(value) if math.isfinite(float(value)) else None
    return None


# ---------------------------------------------------------------- rows of another form


def _unknown(row: Fields, among: Sequence[Form]) -> BadRow:
    """A row of no form: as read, what is expected, and what its shape says, or the names that make it one."""
    seen = shown(json.dumps(row, ensure_ascii=False, default=str), 200)
    known = "; ".join(", ".join(form.keys) for form in among)
    near = " Labelled answers are for --method kto." if among is PAIRS and row.get("label") is not None else ""
    fault = f"no known form of a row: {seen}. Expected the keys {known}.{near}"
    if shape := forms.shape_of(row):
        return BadRow(fault + shape)
    names = "chosen=better,rejected=worse" if among is PAIRS else "instruction=question,output=answer"
    return _Misnamed(fault, [_likely(row, form) for form in among], f" Rename columns, as in --map {names}.")


def _likely(row: Fields, form: Form) -> dict[str, str]:
    """Renames that give a row the keys of a form; none if a key has no or several columns."""
    names = {key.lower(): key for key in row if key == key.strip()}
    turns = [key for key, value in row.items() if isinstance(value, list) and value and all(map(is_message, value))]
    likely = {ours: (ours,) if ours in names else _LIKELY.get(ours, ()) for ours in form.keys}
    columns = {ours: [names[name] for name in likely[ours] if name in names] for ours in form.keys}
    columns |= {ours: [names[ours]] for ours in form.others if ours in names}
    columns |= {"messages": turns} if form.keys == ("messages",) else {}
    clear = all(len(theirs) == 1 for theirs in columns.values())
    return {theirs[0]: ours for ours, theirs in columns.items() if theirs[0] != ours} if clear else {}


def _refuse_preferences(row: Fields, pair: Form | None, form: Form | None) -> None:
    """Raises BadRow if a row is a pair or a labelled answer, with a --map that trains on the good answers."""
    if pair:
        good, bad = pair.keys[-2:]
        ways = [{good: ours, bad: "unused"} for ours in ("output", "completion", "messages", "text")]
    elif form and form.keys[0] not in ("text", "input_ids") and str(row.get("label")).strip().lower() in SIGNS:
        ways = [dict.fromkeys(("label", "kto_tag"), "unused")]
    else:
        return
    what = "is preference data, for --method dpo (pairs) or kto (labelled answers); the good answers alone can be text."
    raise _Misnamed(what, ways, " Write them as messages, or as prompt and completion.")


# ---------------------------------------------------------------- pairs


def _pair(row: Fields) -> list[Example]:
    """The examples of a good and a bad answer, each a text or messages, to a prompt or a conversation; without one, to
    what both begin with. Raises BadRow.
    """
    column = next((key for key in ("prompt", "conversations", "messages") if row.get(key) is not None), "")
    reader = forms.part_of if column == "prompt" else forms.messages_of
    context = reader(row, column) if column else None
    good: Any = forms.part_of(row, "chosen") or ""
    bad: Any = forms.part_of(row, "rejected") or ""
    sides = (("chosen", good, bad), ("rejected", bad, good))
    for name, answer, other in sides:
        if isinstance(answer, str):
            filled(answer, repr(name))
        if isinstance(answer, str) != isinstance(other, str):
            raise BadRow("'chosen' and 'rejected' are of different kinds, a text and messages")
    if isinstance(good, str) and not isinstance(context, list):
        return [_joined_texts(row, context, mine, other) for _, mine, other in sides]
    if isinstance(context, str):
        context = [{"role": "user", "content": context}] if context.strip() else []
    if isinstance(good, str):
        return [talk(row, context, answer, side) for side, answer, _ in sides]
    return [talk(row, *_apart(context or [], mine, other), side) for side, mine, other in sides]


def _joined_texts(row: Fields, context: str | None, mine: str, other: str) -> Example:
    """The prompt is taken off where both answers begin with it; without one it is the words that both begin with."""
    if not (context or "").strip() and mine.startswith(_HUMAN):
        return _of_dialogue(mine, other)
    if context is None:
        context = re.sub(r"\s*\S*\Z", "", os.path.commonprefix([mine, other]))
        ways = [{name: "prompt"} for name in _LIKELY["prompt"] if isinstance(row.get(name), str) and row[name].strip()]
        if ways or not context:
            fault = "has no 'prompt', and 'chosen' and 'rejected' are not whole dialogues: --map prompt=YOURS names it"
            raise _Misnamed(f"{fault}, unused=YOURS leaves a column out.", ways)
    for prompt in (context, context.strip()):
        if prompt.strip() and mine.startswith(prompt) and other.startswith(prompt):
            return forms.completion(prompt, mine[len(prompt) :], "an answer behind its prompt")
    return forms.completion(context, mine, "an answer")


def _of_dialogue(mine: str, other: str) -> Example:
    """A dialogue of hh-rlhf; the prompt is the turns that both sides begin with."""
    start = os.path.commonprefix([mine, other]).rfind(_ASSISTANT) + len(_ASSISTANT)
    if start < len(_ASSISTANT):
        raise BadRow("'chosen' and 'rejected' do not share a turn of the human")
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = re.split(r"\n\n(Human|Assistant):", mine)[1:]
    pairs = zip(turns[::2], turns[1::2], strict=True)
    messages = [{"role": roles[who], "content": words.strip()} for who, words in pairs]
    before = len(re.findall(r"\n\n(?:Human|Assistant):", mine[:start])) - 1
    plain = forms.completion(mine[:start], mine[start:], "an answer")
    return talk({}, messages[:before], messages[before:], "the dialogue")._replace(plain=plain)


def _apart(context: list[Any], mine: list[Any], other: list[Any]) -> tuple[list[Any], list[Any]]:
    """(messages before the answer, the answer's). What both sides begin with is before; it may hold the context."""
    same = 0
    while same < min(len(mine), len(other)) - 1 and mine[same] == other[same]:
        same += 1
    shared, answer = mine[:same], mine[same:]
    prompt, start = ([(role_of(m), _content(m)) for m in messages] for messages in (context, shared))
    before = shared if all(turn in start for turn in prompt) else [] if shared else context
    if not before or not (shared or role_of(answer[0]) in (*forms.ANSWERING, "")):
        raise BadRow("'chosen' and 'rejected' do not begin with the prompt, or with one message that both have")
    return before, answer


def _content(message: Any) -> Any:
    return (message.get("content") or message.get("value")) if isinstance(message, dict) else None


def _alpaca_pair(row: Fields) -> list[Example]:
    return [_last(forms.alpaca({**row, "output": string(row, side)})) for side in ("chosen", "rejected")]


PAIRS = (
    Form("prompt,chosen,rejected", ("prompt", "chosen", "rejected"), _pair),
    Form("instruction,chosen,rejected", ("instruction", "chosen", "rejected"), _alpaca_pair, (*HISTORY, *TALK)),
    Form("conversations,chosen,rejected", ("conversations", "chosen", "rejected"), _pair),
    Form("messages,chosen,rejected", ("messages", "chosen", "rejected"), _pair),
    Form("chosen,rejected", ("chosen", "rejected"), _pair),
)
_SIDES = {form.keys[-1] for form in PAIRS}


# ---------------------------------------------------------------- labels and classes


def _last(example: Example) -> Chat | Text:
    """With the last message alone to learn. Raises BadRow."""
    if isinstance(example, Text) and example.begins:
        return example
    if not isinstance(example, Chat) or example.messages[-1]["role"] != "assistant":
        raise BadRow("a label of a text: expected prompt, completion, or messages that end with the assistant's")
    before = [{**message, "train": False} for message in example.messages[:-1]]
    return example._replace(messages=[*before, example.messages[-1]])


def classes_of(names: Sequence[str]) -> dict[str, int]:
    """The number of each class by its name, and by its number if no name is one."""
    numbers = {} if any(_WHOLE.fullmatch(name) for name in names) else {str(i): i for i in range(len(names))}
    return numbers | {name: i for i, name in enumerate(names)}


def _labelled(word: str, values: Mapping[str, float]) -> float:
    """The value of a label. Raises BadRow."""
    if word in values:
        return values[word]
    names = [*dict.fromkeys({value: name for name, value in values.items()}.values())]
    others = f" and {len(names) - 12} more" if len(names) > 12 else ""
    raise BadRow(f"'label' is {shown(repr(word))}, expected one of {', '.join(names[:12])}{others}")


def _word(value: Any) -> str:
    """A label as text. Raises BadRow if it is not one class."""
    if isinstance(value, (float, Decimal)) and math.isfinite(value) and value == int(value):
        return str(int(value))
    if not isinstance(value, (str, int)):
        raise BadRow(f"'label' is {str(value)[:40]}, expected one class: no fractions, no lists of several")
    return str(value).lower() if isinstance(value, bool) else str(value)


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
            break
    if named and words <= classes_of(named).keys() | {"-1"}:
        return tuple(named)
    names = sorted(words, key=int) if all(map(_WHOLE.fullmatch, words)) else sorted(words)
    counted = names == [*map(str, range(len(words)))]
    odd = [name for name in names if "," in name or name != name.strip()]
    if odd or not 2 <= len(words) <= MOST:
        count = f"more than {MOST:,}" if len(words) > MOST else str(len(words))
        few = ", ".join(map(shown, (odd or names)[:4])) or "none"
        raise InputError(
            f"the column 'label' has {count} classes ({few}); expected several names without commas or spaces around. "
            "Name your column: --map label=YOURS; or the classes: --labels A,B."
        )
    return tuple(f"LABEL_{name}" if counted else name for name in names)

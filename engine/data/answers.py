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
from trireme.engine.data.forms import FORMS, HISTORY, TALK, Chat, Example, Form, Text, string, talk
from trireme.engine.data.messages import role_of
from trireme.engine.data.read import EMPTY, BadRow, Fields, typed
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

# Of data: rows of their own, pairs, labelled answers; pairs and rows that are scored, at their last token
Kind = Literal["", "pairs", "labels", "rewards", "classes"]
PAIRED, SCORED = ("pairs", "labels", "rewards"), ("rewards", "classes")
SIGNS = {  # of labelled answers: good, bad
    **dict.fromkeys(("true", "1", "1.0", "yes", "good", "desirable", "chosen"), 1.0),
    **dict.fromkeys(("false", "0", "0.0", "-1", "-1.0", "no", "bad", "undesirable", "rejected"), -1.0),
}
MOST = 1000  # classes
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # of Anthropic's hh-rlhf
_LIKELY = {  # columns that --map is advised for, if it then reads the row
    "instruction": ("question", "query", "problem", "prompt", "input", "user"),
    "output": ("answer", "response", "reply", "solution", "completion", "assistant"),
    "text": ("content", "body", "document", "article"),
    "prompt": ("sentence1", "premise", "question1", "text1", "question", "query", "instruction", "input", "problem"),
    "messages": ("conversation", "conversations", "dialogue", "chat", "turns"),
    "completion": ("sentence2", "hypothesis", "question2", "text2"),
    "input": ("context", "passage"),
    "system": ("system_prompt", "system_message"),
}
_WHOLE = re.compile(r"-?\d{1,18}")


class RowContent(NamedTuple):
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
    keys = {"label", "weight", "margin", "unused"}
    keys |= {key for form in (*FORMS, *PAIRS) for key in (*form.keys, *form.others)}
    renames = dict[str, str]()
    for pair in filter(None, (text or "").split(",")):
        ours, theirs = (name.strip() for name in pair.partition("=")[::2])
        if ours not in keys or not theirs or theirs in renames or (ours != "unused" and ours in renames.values()):
            expected = "expected OURS=YOURS, each once, such as prompt=question,completion=answer; OURS is one of"
            raise InputError(f"--map {text}: {expected} {', '.join(sorted(keys))}.")
        renames[theirs] = ours
    return renames


def read_row(
    raw: Fields, renames: Mapping[str, str], kind: Kind, classes: Mapping[str, int] | None = None, table: bool = False
) -> RowContent:
    """What a row of a file says. `renames`: those of --map. `classes`: number by word, none of unlabelled rows.
    `table`: as of normal. Raises BadRow, RecursionError.
    """
    try:
        return _read(forms.normal(raw, renames, table), renames.values(), kind, classes or {})
    except _Misnamed as error:
        fault, ways, advice = str(error), error.ways, error.advice
    fewest = len(raw) + 1  # columns that a way does not use
    for way in ways:
        names = {theirs: way.get(ours, ours) for theirs, ours in renames.items()}
        names |= {theirs: ours for theirs, ours in way.items() if theirs in raw.keys() - renames.keys()}
        with suppress(BadRow):
            unused = len(_read(forms.normal(raw, names, table), names.values(), kind, classes or {}).unused)
            if unused < fewest:
                fewest, advice = unused, f" Perhaps --map {','.join(f'{a}={b}' for b, a in names.items())}."
    raise BadRow(fault + advice)


def _read(row: Fields, mapped: Collection[str], kind: Kind, classes: Mapping[str, int]) -> RowContent:
    """`row`: normal; `mapped`: our names that --map gives. Raises BadRow."""
    forms.check_row(row)
    weight, margin = _number(row, "weight", 1e-6), _number(row, "margin", -1e6) if kind == "rewards" else None
    used_keys = [key for key, number in (("weight", weight), ("margin", margin)) if number is not None]
    weight, value = 1.0 if weight is None else weight, margin or 0.0
    if row.get("label") is None and row.get("kto_tag") is not None:
        row, used_keys = row | {"label": row["kto_tag"]}, [*used_keys, "kto_tag"]
    pair = None if _SIDES.isdisjoint(row) else forms.find_form(row, PAIRS, mapped)
    if kind in ("pairs", "rewards") or (kind == "labels" and pair and row.get("label") in EMPTY):
        if pair is None:
            raise _unknown(row, PAIRS)
        examples = pair.read(row)
        return RowContent(pair.name, examples, forms.unused_of(row, pair, examples[0], used_keys), weight, value)
    form = forms.find_form(row, FORMS, mapped)
    if kind == "" or form is None:
        _refuse_preferences(row, pair, form)
    if form is None:
        raise _unknown(row, FORMS)
    if (classes or kind == "labels") and row.get("label") is None:
        raise BadRow("has no 'label'; --map label=YOURS names your column")
    if kind == "classes" and form.keys[0] in ("messages", "conversations"):
        example: Example = forms.chat_of(row, form.keys[0], answered=False)
    else:
        example = form.read(row)
    if kind == "classes":
        example = example._replace(ends=False) if isinstance(example, Text) else example
        value = _labelled(_word(row["label"]), classes) if classes else 0.0
    elif kind == "labels":
        example = _last(example)
        weight *= _labelled(_word(row["label"]).strip().lower(), SIGNS)
    unused = forms.unused_of(row, form, example, [*used_keys, "label"] if kind else used_keys)
    return RowContent(f"{form.name},label" if kind else form.name, [example], unused, weight, value)


def _number(row: Mapping[str, Any], key: str, minimum: float) -> float | None:
    """A finite number, also in a string; None of another value, which is a column of something else. Raises BadRow if
    it is less than `minimum` or so large that losses, in fp32, would be lost.
    """
    number = math.nan
    with suppress(ValueError, OverflowError, TypeError):
        number = float(row[key]) if key in row and not isinstance(row[key], bool) else math.nan
    if math.isfinite(number) and not minimum <= number <= 1e6:
        raise BadRow(f"{key!r} is {number:g}, expected {minimum:g} to 1e+06; leave out a row that is not to count")
    return number if math.isfinite(number) else None


# ---------------------------------------------------------------- rows of another form


def _unknown(row: Fields, among: Sequence[Form]) -> BadRow:
    """A row of no form: as read, what is expected, and what its shape says, or the names that make it one."""
    text = shown(json.dumps(row, ensure_ascii=False, default=str), 200)
    examples = "; ".join(", ".join(form.keys) for form in among)
    fault = f"no known form of a row: {text}. Expected the keys {examples}."
    names = "chosen=better,rejected=worse" if among is PAIRS else "instruction=question,output=answer"
    advice = forms.shape_of(row) or f" Rename columns, as in --map {names}."
    return _Misnamed(fault, [_likely(row, form) for form in among], advice)


def _likely(row: Fields, form: Form) -> dict[str, str]:
    """Renames that give a row the keys of a form, and others that it may have; none if a key of the form has no or
    several columns.
    """
    names = {key.lower(): key for key in row}
    likely = {ours: (ours,) if ours in names else _LIKELY.get(ours, ()) for ours in (*form.keys, *form.others)}
    columns = {ours: [names[name] for name in words if name in names] for ours, words in likely.items()}
    clear = all(len(columns[ours]) == 1 for ours in form.keys)
    return {theirs[0]: ours for ours, theirs in columns.items() if theirs[:1] not in ([], [ours])} if clear else {}


def _refuse_preferences(row: Fields, pair: Form | None, form: Form | None) -> None:
    """Raises BadRow if a row is a pair or a labelled answer, with a --map that trains on the good answers."""
    if pair:
        good, bad = pair.keys[-2:]
        ways = [{good: ours, bad: "unused"} for ours in ("messages", "output", "completion")]
        ways += [{name: "instruction"} | ways[1] for name in _LIKELY["instruction"] if name in row]
        ways += [{good: "text", bad: "unused"}] if len(row) == 2 else []  # else a prompt would be lost
        ways = ways if "input" not in pair.keys else []  # which holds the prompt
    elif form and form.keys[0] not in ("text", "input_ids") and str(row.get("label")).strip().lower() in SIGNS:
        ways = [dict.fromkeys(("label", "kto_tag"), "unused")]
    else:
        return
    problem = "is preference data, for --method dpo (pairs) or kto (labelled answers), or for its good answers alone."
    raise _Misnamed(problem, ways, " Write them as messages, or as prompt and completion.")


# ---------------------------------------------------------------- pairs


def _pair(row: Fields) -> list[Example]:
    """The examples of a good and a bad answer, each a text or messages, to a prompt or a conversation; without one, to
    what both begin with. Raises BadRow.
    """
    column = next((key for key in ("prompt", "conversations", "messages") if row.get(key) is not None), "")
    context = forms.part_of(row, column) if column == "prompt" else forms.messages_of(row, column) if column else None
    good, bad = forms.part_of(row, "chosen") or "", forms.part_of(row, "rejected") or ""
    if isinstance(good, str) and isinstance(bad, str):
        if not isinstance(context, list):
            return _texts(row, context, good, bad)
        return [talk(row, context, good, "chosen"), talk(row, context, bad, "rejected")]
    if isinstance(good, str) or isinstance(bad, str):
        raise BadRow("'chosen' and 'rejected' are of different kinds, a text and messages")
    if isinstance(context, str):
        context = [{"role": "user", "content": context}] if context.strip() else []
    sides = (("chosen", good, bad), ("rejected", bad, good))
    return [talk(row, *_split_answer(context or [], turns, other_turns), side) for side, turns, other_turns in sides]


def _texts(row: Fields, prompt: str | None, good: str, bad: str) -> list[Example]:
    """The prompt is taken off where both answers begin with it; without one it is the words that both begin with."""
    shared = os.path.commonprefix([good, bad])
    if not (prompt or "").strip() and shared.startswith(_HUMAN):
        return [_dialogue(answer, shared.rfind(_ASSISTANT)) for answer in (good, bad)]
    if prompt is None:
        prompt = "".join(f"{shared}|".rsplit(maxsplit=1)[:-1])  # without its last word
        named = [name for name in _LIKELY["prompt"] if isinstance(row.get(name), str) and row[name].strip()]
        ways = [{name: ours} for name in named for ours in ("instruction", "prompt")]  # that a chat template writes
        if ways or not prompt:
            fault = "has no 'prompt', and 'chosen' and 'rejected' are not whole dialogues: --map prompt=YOURS names it"
            raise _Misnamed(f"{fault}, unused=YOURS leaves a column out.", ways)
    repeated = next((text for text in (prompt, prompt.strip()) if text.strip() and shared.startswith(text)), "")
    return [forms.completion(repeated or prompt, text[len(repeated) :], "an answer") for text in (good, bad)]


def _dialogue(text: str, start: int) -> Example:
    """A dialogue of hh-rlhf, of which the turns before `start` are the prompt."""
    if start < 0:
        raise BadRow("'chosen' and 'rejected' do not share a turn of the human")
    sides = (re.split(r"\n\n(Human|Assistant):", part)[1:] for part in (text[:start], text[start:]))
    prompt, answer = (
        [{"from": role, "value": words.strip()} for role, words in zip(side[::2], side[1::2], strict=True)]
        for side in sides
    )
    start += len(_ASSISTANT)
    plain = forms.completion(text[:start], text[start:], "an answer")
    return talk({}, prompt, answer, "the dialogue")._replace(plain=plain)


def _split_answer(context: list[Any], turns: list[Any], other_turns: list[Any]) -> tuple[list[Any], list[Any]]:
    """(messages before the answer, the answer's). What both sides begin with is before; it may hold the context."""
    same = 0
    while same < min(len(turns), len(other_turns)) - 1 and turns[same] == other_turns[same]:
        same += 1
    shared, answer = turns[:same], turns[same:]
    words = lambda message: (role_of(message), message.get("content") or message.get("value"))
    prompt, start = map(words, context), [*map(words, shared)]
    before = shared if all(turn in start for turn in prompt) else [] if shared else context
    if not before or not (shared or role_of(answer[0]) in (*forms.ANSWERING, "")):
        raise BadRow("'chosen' and 'rejected' do not begin with the prompt, or with one message that both have")
    return before, answer


def _openai_pair(row: Fields) -> list[Example]:
    asked = typed(row["input"], dict, "'input'", "an object with 'messages'")
    return _pair({**asked, "chosen": row["preferred_output"], "rejected": row["non_preferred_output"]})


def _alpaca_pair(row: Fields) -> list[Example]:
    return [_last(forms.alpaca({**row, "output": string(row, side)})) for side in ("chosen", "rejected")]


PAIRS = (
    Form("prompt,chosen,rejected", ("prompt", "chosen", "rejected"), _pair),
    Form("instruction,chosen,rejected", ("instruction", "chosen", "rejected"), _alpaca_pair, (*HISTORY, *TALK)),
    Form("conversations,chosen,rejected", ("conversations", "chosen", "rejected"), _pair),
    Form("messages,chosen,rejected", ("messages", "chosen", "rejected"), _pair),
    Form("chosen,rejected", ("chosen", "rejected"), _pair),
    Form("input,preferred_output", ("input", "preferred_output", "non_preferred_output"), _openai_pair),
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
        return float(values[word])
    names = [*{value: name for name, value in values.items()}.values()]
    expected = ", ".join([*names[:12], *(["…"] if len(names) > 12 else [])])
    raise BadRow(f"'label' is {shown(repr(word))}, expected one of {expected}")


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
        with suppress(BadRow):  # said when it is read, if there are others
            value = forms.normal(row, renames, False).get("label") if isinstance(row, dict) else None
            words |= set() if value in EMPTY else {_word(value)}
    if named and words <= classes_of(named).keys() | {"-1"}:
        return tuple(named)
    names = sorted(words, key=int) if all(map(_WHOLE.fullmatch, words)) else sorted(words)
    counted = names == [*map(str, range(len(words)))]
    odd = [name for name in names if "," in name or name != name.strip()]
    if odd or not 2 <= len(words) <= MOST:
        few = ", ".join(map(shown, (odd or names)[:4])) or "none"
        problem = f"the column 'label' has {len(words):,} classes ({few}), expected 2 to {MOST:,} without commas"
        raise InputError(f"{problem}. Name your column: --map label=YOURS; or the classes: --labels A,B.")
    return tuple(f"LABEL_{name}" if counted else name for name in names)

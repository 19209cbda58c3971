"""Answers that are compared: a good and a bad one for each row, or one that is labelled, in the popular spellings."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from trireme.engine.data.files.rows import BadRow, Fields, kind_of, unread_keys
from trireme.engine.data.formats.conversations import (
    SAYS_MORE,
    read_alpaca,
    read_messages,
    read_sharegpt,
    read_talk,
    role_of,
    talks_in,
)
from trireme.engine.data.formats.examples import Chat, Completion, Example, by_case, string
from trireme.engine.data.formats.messages import CALL, ROLES, refuse_masked, refuse_media
from trireme.engine.data.formats.preferences import side_of
from trireme.engine.data.formats.spellings import of_openai, of_swift

# Of data: rows of their own, pairs, labelled answers; pairs and rows that are scored, at their last token
Kind = Literal["", "pairs", "labels", "rewards", "classes"]
PAIRED, SCORED = ("pairs", "labels", "rewards"), ("rewards", "classes")
MARGIN = "margin"  # that the reward of a pair's chosen answer is to have above the other
Answer = tuple[Example, float]  # its weight; of a labelled one that is bad below 0
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # of Anthropic's hh-rlhf
LABELS = ("label", "kto_tag")
_GOOD, _BAD = ("true", "1", "1.0", "yes", "good", "desirable"), ("false", "0", "0.0", "-1", "no", "bad", "undesirable")
_ASKED = ("question", "query", "instruction", "input", "problem", "context", "user")  # other names of a prompt
_TALKS = ("messages", "conversations")
_OF_SWIFT = ("rejected_messages", "rejected_response")  # of both the first counts, as in ms-swift
_TELLING = 32  # characters that two answers do not begin with by chance


@dataclass(frozen=True)
class AnswerFormat:
    """`read` makes the answers of a row with these keys."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Fields], list[Answer]]
    more: tuple[str, ...] = SAYS_MORE
    labelled: bool = False

    def unused(self, row: Fields, answers: list[Answer]) -> list[str]:
        """Keys with values that are not read."""
        known = {*self.keys, "weight", "unused"}
        known |= set(self.more) if any(isinstance(example, Chat) for example, _ in answers) else set()
        inside = [key for example, _ in answers if isinstance(example, Chat) for key in example.unused]
        return [*unread_keys(row, known), *dict.fromkeys(inside)]


def read_answers(row: Fields, kind: Kind) -> tuple[AnswerFormat, list[Answer], list[str]]:
    """(its format, its answers, keys that are not read). `row`: renamed by --map. Raises BadRow."""
    if row.get("label") is None and row.get(LABELS[1]) is not None:
        row = {key: value for key, value in row.items() if key != LABELS[1]} | {"label": row[LABELS[1]]}
    refuse_masked(row)
    refuse_media(row)
    form = _found(row, kind)
    weight, answers = weight_of(row), form.read(row)
    if kind == "labels" and not form.labelled:
        answers = [(good, w) for good, w in answers[:1]] + [(bad, -w) for bad, w in answers[1:]]
    return form, [(example, weight * sign) for example, sign in answers], form.unused(row, answers)


def is_weighted(row: Mapping[str, Any]) -> bool:
    """Whether its column "weight" is a number."""
    value = row.get("weight")
    if isinstance(value, str):
        return re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", value) is not None
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def weight_of(row: Mapping[str, Any]) -> float:
    """Of a row: its column "weight" where that is a number, else 1. Raises BadRow."""
    if not is_weighted(row):
        return 1.0
    weight = float(row["weight"])
    if not 0 < weight < math.inf:
        raise BadRow(f"'weight' is {weight:g}, expected a number above 0; leave out a row that is not to count")
    return weight


def margin_of(row: Mapping[str, Any]) -> float:
    """Of a pair, by its column "margin"; 0 without. Raises BadRow."""
    value = row.get(MARGIN)
    if value is None:
        return 0.0
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise BadRow(f"{MARGIN!r} is {str(value)[:40]!r}, expected a number")
    return found


def _found(row: Fields, kind: Kind) -> AnswerFormat:
    readable = [form for form in FORMATS if kind == "labels" or not form.labelled]
    for form in readable:
        if all(row.get(key) is not None for key in form.keys):
            return form
    for form in readable:
        if all(key in row for key in form.keys):
            absent = " and ".join(repr(key) for key in form.keys if row[key] is None)
            raise BadRow(f"has null for {absent}; the format {form.name!r} needs a value")
    hint = next(filter(None, (by_case(row, form.keys, form.more) for form in readable)), "") or _by_side(row)
    expected = (
        "prompt, chosen, rejected" if kind != "labels" else "prompt, completion, label; or prompt, chosen, rejected"
    )
    keys = ", ".join(repr(key[:60]) for key in list(row)[:8]) or "none"
    near = (
        "" if kind == "labels" or not any(key in row for key in LABELS) else " Labelled answers are for --method kto."
    )
    hint = hint or " --map names your columns"
    raise BadRow(f"no format of preferences has its keys ({keys}); expected {expected}.{near}{hint}")


def _by_side(row: Mapping[str, Any]) -> str:
    """A hint where two columns are called as good and bad answers are."""
    found = [[key for key in row if side_of(key) is which] for which in (True, False)]
    if any(len(keys) != 1 for keys in found):
        return ""
    (good,), (bad,) = found
    pairs = [f"{ours}={theirs}" for ours, theirs in (("chosen", good), ("rejected", bad)) if ours != theirs]
    return f" Perhaps --map {','.join(pairs)}" if pairs else ""


# ---------------------------------------------------------------- pairs


def _pair(row: Fields) -> list[Answer]:
    """`chosen` and `rejected`: texts, or messages, with or without those of the prompt."""
    context, chosen, rejected = talks_in(row, "prompt", "chosen", "rejected")
    if bool(chosen) != bool(rejected):
        raise BadRow("'chosen' and 'rejected' are of different kinds, a text and messages")
    prompt = row.get("prompt")
    if chosen and rejected:
        if not context and isinstance(prompt, str) and prompt.strip():
            context = [{"role": "user", "content": prompt}]
        sides = zip(("chosen", "rejected"), _both_ways(chosen, rejected), strict=True)
        return [(_talk(row, *_apart(context, *both), side), 1.0) for side, both in sides]
    texts = string(row, "chosen"), string(row, "rejected")
    if context:
        return [(_talk(row, context, [{"role": "assistant", "content": text}]), 1.0) for text in texts]
    if prompt is not None:
        asked = string(row, "prompt")
        if len(asked.strip()) >= _TELLING and all(text.lstrip().startswith(asked.strip()) for text in texts):
            raise BadRow("'chosen' and 'rejected' begin with the prompt; leave it out: --map unused=prompt")
        return [(_completion(asked, text), 1.0) for text in texts]
    _check_prompt(row)
    return [(_of_dialogue(mine, other), 1.0) for mine, other in _both_ways(*texts)]


def _check_prompt(row: Fields) -> None:
    """Raises BadRow where the prompt of two texts is in a column of another name, or null."""
    if "prompt" in row and not row["chosen"].startswith(HUMAN):
        raise BadRow("'prompt' is null, expected a string; --map unused=prompt takes what both texts begin with for it")
    if asked := [key for key in _ASKED if isinstance(row.get(key), str) and row[key].strip()]:
        ways = f"--map instruction={asked[0]}, or prompt={asked[0]} without the chat template"
        raise BadRow(f"has no 'prompt'. Is it {asked[0]!r}? {ways}; else unused={asked[0]}")


def _both_ways(chosen: Any, rejected: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (chosen, rejected), (rejected, chosen)


def _content(message: Any) -> Any:
    return (message.get("content") or message.get("value")) if isinstance(message, dict) else None


def _apart(context: list[Any], mine: list[Any], other: list[Any]) -> tuple[list[Any], list[Any]]:
    """(messages before the answer, the answer's). What both sides begin with is before. Raises BadRow."""
    same = 0
    while same < min(len(mine), len(other)) - 1 and mine[same] == other[same]:
        same += 1
    shared, answer = mine[:same], mine[same:]
    before = _joined(context, shared)
    if not before:
        raise BadRow("'chosen' and 'rejected' have no message in common, and there is no 'prompt'")
    if not shared and (role := role_of(answer[0])) not in ("", "assistant", CALL):
        raise BadRow(f"after the prompt there is a message of role {role!r}, expected 'assistant'")
    return before, answer


def _joined(context: list[Any], shared: list[Any]) -> list[Any]:
    """What is before the answer: a prompt, and what both sides begin with, which may hold it, or go on from its end."""
    asked, begun = ([(role_of(m), _content(m)) for m in messages] for messages in (context, shared))
    if not (asked and begun) or asked == begun[-len(asked) :]:
        return shared or context
    for n in range(min(len(asked), len(begun)), 0, -1):
        if asked[-n:] == begun[:n]:
            return [*context[:-n], *shared]
    if len(asked) == 1 and asked == [turn for turn in begun if turn[0] == "user"][:1]:
        return shared
    raise BadRow("'prompt' is not what 'chosen' and 'rejected' begin with; leave it out: --map unused=prompt")


def _talk(row: Fields, context: list[Any], answer: list[Any], side: str = "completion") -> Chat:
    """`side`: the column of the answer."""
    more = {key: row[key] for key in SAYS_MORE if key in row}
    chat = read_talk({**more, "prompt": context, "completion": answer}, f"the answer in {side!r}: message ")
    if chat.messages[-1]["role"] != "assistant":
        raise BadRow(f"its last message has the role {chat.messages[-1]['role']!r}, expected 'assistant'")
    return chat


def _completion(prompt: str, text: str) -> Completion:
    if not text.strip():
        raise BadRow("an answer is empty")
    return Completion(prompt, text)


def _of_dialogue(mine: str, other: str) -> Example:
    """A whole dialogue as text; the prompt is what both begin with, of hh-rlhf in whole turns."""
    same = len(os.path.commonprefix([mine, other]))
    if not mine.startswith(HUMAN):
        while same and not mine[same - 1].isspace():
            same -= 1
        if not mine[:same].strip():
            raise BadRow("'chosen' and 'rejected' begin with nothing in common, and there is no 'prompt'")
        return _completion(mine[:same].rstrip(), mine[len(mine[:same].rstrip()) :])
    start = mine.rfind(ASSISTANT, 0, same)
    if start < 0 or other[start : start + len(ASSISTANT)] != ASSISTANT:
        raise BadRow("'chosen' and 'rejected' do not share a turn of the human")
    start += len(ASSISTANT)
    turns = re.split(r"\n\n(Human|Assistant):", mine)[1:]
    messages = [
        {"role": ROLES[who.lower()], "content": what.strip()} for who, what in zip(turns[::2], turns[1::2], strict=True)
    ]
    before = len(re.findall(r"\n\n(?:Human|Assistant):", mine[:start])) - 1
    for message in messages[:before]:
        message["train"] = False
    plain = _completion(mine[:start], mine[start:])
    if messages[-1]["role"] != "assistant":
        raise BadRow("its last turn is the human's")
    return Chat(messages, None, plain)


def _alpaca_pair(row: Fields) -> list[Answer]:
    """LLaMA-Factory's: `instruction`, `input`, `chosen`, `rejected`."""
    return [(_last(read_alpaca(row | {"output": string(row, key)})), 1.0) for key in ("chosen", "rejected")]


def _talk_pair(row: Fields) -> list[Answer]:
    """LLaMA-Factory's: `conversations` or `messages`, and a turn `chosen` and one `rejected`."""
    context = next(row[key] for key in _TALKS if row.get(key) is not None)
    if not isinstance(context, list):
        raise BadRow(f"the conversation is {kind_of(context)}, expected a list of messages")
    both = talks_in({**row, "": context}, "", "chosen", "rejected")[1:]
    answers = [
        talk or [{"role": "assistant", "content": row[key]}]
        for key, talk in zip(("chosen", "rejected"), both, strict=True)
    ]
    if any(len(answer) > 1 and answer[: len(context)] == context for answer in answers):
        return _pair(row)  # UltraFeedback's has both
    sides = zip(("chosen", "rejected"), answers, strict=True)
    return [(_talk(row, context, answer, side), 1.0) for side, answer in sides]


def _openai_pair(row: Fields) -> list[Answer]:
    """OpenAI's; other keys of `input` than it reads are named."""
    answers = _pair(of_openai(row))
    others = tuple(f"input.{key}" for key in unread_keys(row["input"], ("messages", *SAYS_MORE)))
    return [
        (chat._replace(unused=(*chat.unused, *others)), weight) for chat, weight in answers if isinstance(chat, Chat)
    ]


def _last(chat: Chat) -> Chat:
    """With the last message alone to learn."""
    before = [{**message, "train": False} for message in chat.messages[:-1]]
    return chat._replace(messages=[*before, chat.messages[-1]])


# ---------------------------------------------------------------- labelled answers


def _labelled(row: Fields) -> list[Answer]:
    context, answer = talks_in(row, "prompt", "completion")
    if context or answer:
        context = context or [{"role": "user", "content": string(row, "prompt")}]
        answer = answer or [{"role": "assistant", "content": string(row, "completion")}]
        return [(_talk(row, context, answer), _sign(row))]
    return [(_completion(string(row, "prompt"), string(row, "completion")), _sign(row))]


def _labelled_talk(row: Fields) -> list[Answer]:
    read = read_messages if row.get("messages") is not None else read_sharegpt
    chat = read(row)
    if chat.messages[-1]["role"] != "assistant":
        raise BadRow("the conversation does not end with the assistant's message, which the label is about")
    return [(_last(chat), _sign(row))]


def _labelled_alpaca(row: Fields) -> list[Answer]:
    return [(_last(read_alpaca(row)), _sign(row))]


def _sign(row: Fields) -> float:
    """1 of a good answer, -1 of a bad one. Raises BadRow."""
    word = str(row["label"]).strip().lower()
    if word in _GOOD or word in _BAD:
        return 1.0 if word in _GOOD else -1.0
    raise BadRow(f"'label' is {word[:40]!r}, expected true or false")


FORMATS = (
    AnswerFormat("prompt,chosen,rejected", ("prompt", "chosen", "rejected"), _pair),
    AnswerFormat(
        "instruction,chosen,rejected", ("instruction", "chosen", "rejected"), _alpaca_pair,
        ("input", "history", *SAYS_MORE)),
    AnswerFormat("conversations,chosen,rejected", ("conversations", "chosen", "rejected"), _talk_pair),
    AnswerFormat("messages,chosen,rejected", ("messages", "chosen", "rejected"), _talk_pair),
    AnswerFormat("chosen,rejected", ("chosen", "rejected"), _pair),
    AnswerFormat(
        "input,preferred_output", ("input", "preferred_output", "non_preferred_output"), _openai_pair, ()),
    *(AnswerFormat(f"messages,{bad}", ("messages", bad), lambda row: _pair(of_swift(row))) for bad in _OF_SWIFT),
    AnswerFormat("prompt,completion,label", ("prompt", "completion", "label"), _labelled, SAYS_MORE, True),
    AnswerFormat("messages,label", ("messages", "label"), _labelled_talk, SAYS_MORE, True),
    AnswerFormat("conversations,label", ("conversations", "label"), _labelled_talk, SAYS_MORE, True),
    AnswerFormat(
        "instruction,output,label", ("instruction", "output", "label"), _labelled_alpaca,
        ("input", "history", *SAYS_MORE), True),
)  # fmt: skip
COLUMNS = ("chosen", "rejected", "label", "weight", MARGIN)  # that --map may name besides those of examples

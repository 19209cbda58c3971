"""Rows of each format, each word of them once: what becomes of every word after keys were dropped, renamed, nested.

A row is refused, or: each of its words is among the tokens, or below a key that is named as not used; and the words
that are trained are those of the oracle, a few lines that know nothing of the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from chats import make_tokenizer
from mutations import Target, as_json

from trireme.engine.data import answers
from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.encode import encode_examples
from trireme.engine.data.read import BadRow
from trireme.engine.data.template import BUILT_IN

CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "w1w"}}}
TALK = [
    {"role": "system", "content": "w2w"},
    {"role": "user", "content": "w3w"},
    {"role": "assistant", "content": "w4w", "tool_calls": [CALL]},
    {"role": "tool", "content": "w5w", "tool_call_id": "call00000"},
    {"role": "assistant", "content": [{"type": "text", "text": "w6w"}, {"type": "text", "text": "w7w"}], "loss": True},
    {"role": "user", "content": "w8w"},
    {"role": "assistant", "content": "w9w", "weight": 1},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "w10w", "parameters": {"type": "object"}}}]
TURNS = [
    {"from": "human", "value": "w3w"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": "w1w"}}'},
    {"from": "observation", "value": "w5w"},
    {"from": "gpt", "value": "w4w"},
    {"from": "human", "value": "w8w"},
    {"from": "gpt", "value": "w9w", "train": True},
]
ASSISTANTS = {"assistant", "gpt", "chatgpt", "chatbot", "bot", "model", "ai", "function_call", "tool_call"}
ROWS = {
    "messages": [
        {"messages": TALK, "tools": TOOLS, "id": "w11w", "chat_template_kwargs": {"x": "w19w"}},
        {"messages": json.dumps(TALK[1:])},
    ],
    "sharegpt": [
        {"conversations": TURNS, "system": "w2w", "tools": "[]"},
        {"conversations": TALK[1:], "system": "w2w"},
    ],
    "alpaca": [{"instruction": "w3w", "input": "w12w", "output": "w4w", "history": [["w8w", "w9w"]], "system": "w2w"}],
    "prompt": [
        {"prompt": "w3w ", "completion": "w4w", "meta": {"a": "w13w"}},
        {"prompt": TALK[:2], "completion": TALK[6:]},
    ],
    "text": [{"text": "w3w and w4w", "source": ["w13w"]}],
    "ids": [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1]},
        {"input_ids": [5, 6, 7, 8, 0, 0], "attention_mask": [1, 1, 1, 1, 0, 0], "completion_mask": [0, 0, 1, 1, 0, 0]},
    ],
}  # fmt: skip
KEYS = """
    role from content value messages conversations system tools functions function_call tool_calls arguments parameters
    name thinking reasoning_content loss train training weight mask masked label chosen rejected images loss_mask
    assistant_masks labels attention_mask position_ids chat_template_kwargs text prompt completion instruction output
    user assistant human gpt tool function observation developer true w14w
"""
SHAPES = ({"type": "text", "text": "w15w"}, {"role": "user", "content": "w16w"}, {"a": "w17w"}, ["w18w"], [0, 1, 0, 1])
JUNK = (*KEYS.split(), *SHAPES)
NESTED = {"tool_calls", "function_call", "content", "value"}
READ = {"name", "arguments", "text", "thinking", "reasoning"}
LINKS = ("id", "tool_call_id")  # say what belongs together, and are no words


def _words(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(word, its path) of all strings, also of those inside JSON in a string."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            if value[:1] in ("{", "["):
                value = json.loads(value)
    if isinstance(value, str):
        yield from ((word, path) for word in re.findall(r"(?=(w\d+w))", value))  # of "w4w2w" both
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield from _words(inside, (*path, key))


def _named(path: tuple[Any, ...], unused: set[str]) -> bool:
    """Whether a key of the path is named, as the column or in messages, or is inside calls and parts, and not read."""
    inside = [key for key in path[1:] if isinstance(key, str) and key != "function"]
    if not {key for above, key in pairwise(inside) if above in NESTED} <= READ:
        return True
    inside += ["reasoning_content"] if "content" in inside else []  # a part of type thinking
    return path[0] in unused or any(re.search(rf"\.{re.escape(key)}( |$)", name) for name in unused for key in inside)


def _learned(row: dict[str, Any]) -> set[str]:
    """Words that are to be trained, by the oracle."""
    told: set[str] = set()
    for column in ("messages", "conversations", "completion"):
        turns = row.get(column)
        with suppress(ValueError):
            turns = json.loads(turns) if isinstance(turns, str) and turns.startswith("[{") else turns
        turns = [turns] if isinstance(turns, dict) else turns
        for turn in [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else ():
            off = [turn.get(key) in (0, False) for key in ("train", "training", "loss", "loss_mask", "weight")]
            off += [turn.get(key) is True for key in ("mask", "masked")]
            role = turn.get("role") if turn.get("role") is not None else turn.get("from")
            if str(role).lower() in ASSISTANTS and not any(off):
                told |= {word for word, _ in _words(turn)}
    for column in ("completion", "output"):
        told |= {word for word, _ in _words(row[column])} if isinstance(row.get(column), str) else set()
    history = row.get("history")
    for pair in history if isinstance(history, list) else ():
        told |= {word for word, _ in _words(pair[1:])}
    return told


def _made(folder: Path, format: str) -> Target:
    tokenizer = make_tokenizer(folder, bos="")
    tagged = BUILT_IN["chatml"]
    tagless = tagged.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    templates = [ChatTemplate({"default": text}, {"bos_token": ""}) for text in (tagged, tagless)]

    def read(content: bytes) -> None:
        try:
            row = json.loads(content)
        except (ValueError, RecursionError):
            return
        if not isinstance(row, dict):
            return
        said = answers.read_row(row, {}, "")
        made = encode_examples(said.examples, tokenizer, templates[len(content) % 2])
        if made.faults:
            raise BadRow(made.faults[0])
        if said.form == "input_ids":
            _check_ids(row, made)
        else:
            texts = [tokenizer.decode(ids) for ids in (made.ids, made.ids[made.trained])]
            _check_words(row, said.form, {*said.unused, *made.unread}, *texts)

    return Target(ROWS[format], as_json, read, (BadRow,), JUNK)


def _check_words(row: dict[str, Any], form: str, unused: set[str], text: str, trained: str) -> None:
    found = list(_words(row))
    once = {word for word, _ in found if sum(word == other for other, _ in found) == 1}
    learned = _learned(row)
    for word, path in found:
        assert word in text or _named(path, unused) or path[-1] in LINKS, f"{word} at {path} is lost, unused: {unused}"
        if word in once and word in text[1:] and form != "text":  # the first token is never learned
            assert (word in trained) == (word in learned), f"{word} at {path}: trained {word in trained}"


def _check_ids(row: dict[str, Any], made: Any) -> None:
    kept = lambda key: [v for v, a in zip(row[key], attended, strict=True) if a]
    attended = row.get("attention_mask") or [1] * len(row["input_ids"])
    attended = json.loads(attended) if isinstance(attended, str) else attended
    if any(isinstance(row.get(key), str) for key in row):
        return
    trained = [True] * sum(map(bool, attended))
    for key in ("completion_mask", "assistant_masks", "loss_mask"):
        trained = [a and bool(b) for a, b in zip(trained, kept(key), strict=True)] if row.get(key) else trained
    if row.get("labels"):
        trained = [a and b != -100 for a, b in zip(trained, kept("labels"), strict=True)]
    assert made.ids.tolist() == kept("input_ids")
    assert made.trained.tolist() == [False, *trained[1:]]


ROW_TARGETS = {f"rows {name}": lambda folder, name=name: _made(folder, name) for name in ROWS}

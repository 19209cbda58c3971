"""One message of a conversation: its role, its content, and whether it is trained.

A key is used here, or is left to the chat template (the report names what no template reads), or the row is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trireme.engine.data.files.rows import BadRow, Fields, kind_of, unread_keys
from trireme.engine.data.formats.calls import read_calls

CALL = "call"  # a turn that is a call, in ShareGPT's way
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "chatbot", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("bard", "bing", "claude"), "assistant"),  # in ShareGPT's files
    "system": "system",
    **dict.fromkeys(("function_call", "tool_call"), CALL),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
}
SAID = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # in addition to `content`
_TRAINED = (
    *("train", "training", "trainable", "is_trainable", "is_train", "do_train", "learn"),
    *("loss", "loss_mask", "step_loss_mask", "loss_scale", "loss_weight", "weight"),
)  # true or 1: learned
_MASKED = ("mask", "masked", "is_masked")  # true: not learned
_FLAGS = (*_TRAINED, *_MASKED)
_NUMBERS = ("loss_scale", "loss_weight", "weight")
_MAY_MASK = re.compile("train|learn|loss|mask|weight|supervise", re.IGNORECASE)  # within a key that is not known
_MEDIA = ("image", "video", "audio", "pixel_value", "input_feature")  # less an s
_TEXTS, _THOUGHTS = ("text", "input_text", "output_text"), ("thinking", "reasoning")


def refuse_media(keys: Mapping[str, Any], where: str = "") -> None:
    """Raises BadRow if a column, or a key at `where`, has images, videos or audio."""
    for key, value in keys.items():
        stem = key.lower().removesuffix("s").removesuffix("_url").removesuffix("_path")
        if stem in _MEDIA and value not in (None, "", [], {}, "[]", "{}", "null"):
            way_out = "" if where else f". Where its text stands alone, leave the column out: --map unused={key}"
            raise BadRow(f"{where}{key!r} holds content that is not text; only text can be trained on{way_out}")


def refuse_masked(row: Mapping[str, Any]) -> None:
    """Raises BadRow if a column says that the row, or some of its messages, are not to be trained."""
    for key in [key for key in _FLAGS if key in row]:  # few rows have any
        value, off = row[key], key in _MASKED
        if _flag(value, key not in _NUMBERS and key != "loss") is off:
            raise BadRow(f"{key!r} is {str(value).lower()}: leave the row out, or the column: --map unused={key}")
        flags = [_flag(one, True) for one in value] if isinstance(value, list) and "input_ids" not in row else []
        if flags and None not in flags and off in flags:
            way_out = f'write "train" of true or false into the messages; to learn all: --map unused={key}'
            raise BadRow(f"{key!r} is a list, whose entries are not known to be about messages: {way_out}")


def _flag(value: Any, numbers: bool) -> bool | None:
    """Yes or no in a column, also as text, as tables have it; None for other values. `numbers`: 0 and 1 count, too."""
    word = str(value).strip().lower() if isinstance(value, (bool, str)) or (numbers and value in (0, 1)) else ""
    words = {"true": True, "false": False} | ({"1": True, "1.0": True, "0": False, "0.0": False} if numbers else {})
    return words.get(word)


def read_message(turn: Any, where: str, unused: dict[str, None]) -> Fields:
    """The message of `{role, content}` or ShareGPT's `{from, value}`, in the first form. Null values count as absent.

    "train": False marks what is not trained. Raises BadRow.
    """
    if not isinstance(turn, dict):
        raise BadRow(f"{where} is {kind_of(turn)}, expected {{role, content}}")
    message = {key: value for key, value in turn.items() if value is not None}
    for ours, theirs in (("role", "from"), ("content", "value")):
        if ours not in message and theirs in message:
            message[ours] = message.pop(theirs)
    if not message.get("role", "x") or not isinstance(message.get("role", ""), str):
        what = "an empty string" if message["role"] == "" else kind_of(message["role"])
        raise BadRow(f"{where}: 'role' is {what}, expected 'user', 'assistant' or another")
    if "role" not in message:
        raise BadRow(f"{where} has no 'role'; its keys are {', '.join(map(repr, message)) or 'none'}")
    message["role"] = ROLES.get(message["role"].strip().lower(), message["role"])
    refuse_media(message, f"{where}: ")
    if message["role"] == CALL and (message.get("tool_calls") or message.get("function_call")):
        raise BadRow(f"{where} is a call, and has a list of calls too")
    if message["role"] != CALL:
        _read_thoughts(message, where)
        _read_content(message, where, unused)
        calls = read_calls(message, where, unused)
        for key in ("tool_calls", "function_call"):
            message.pop(key, None)
        if calls and message["role"] != "assistant":
            raise BadRow(f"{where} has calls, and the role {message['role']!r}; only an assistant calls")
        if calls:
            message["tool_calls"] = calls
    trained = _trained(message, where, unused)
    if message["role"] != CALL and "content" not in message and not any(message.get(key) for key in SAID):
        absent = "has content null" if "content" in turn else "has no 'content'"
        raise BadRow(f"{where} {absent}; its keys are {', '.join(map(repr, turn))}")
    return message if trained else {**message, "train": False}


def _read_thoughts(message: Fields, where: str) -> None:
    """Raises BadRow if thoughts are not a string, or are given twice and differ."""
    for key in SAID[1:]:
        if message.get(key, "") in ([], {}, False):
            message.pop(key)
        elif not isinstance(message.get(key, ""), str):
            raise BadRow(f"{where}: {key!r} is {kind_of(message[key])}, expected a string")
    found = [key for key in SAID[1:] if message.get(key)]
    if len({message[key] for key in found}) > 1:
        raise BadRow(f"{where}: {found[0]!r} and {found[1]!r} are not the same. Leave one out")


def _read_content(message: Fields, where: str, unused: dict[str, None]) -> None:
    """A list of parts becomes a text if it has one, else a list of texts. Thoughts among the parts get a key of their
    own.
    """
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise BadRow(f"{where}: 'content' is {kind_of(content)}, expected a string")
        return
    texts, thoughts = [], []
    for part in [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]:
        kind = part.get("type", "text") if isinstance(part, dict) else kind_of(part)
        if kind in _TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in _TEXTS and part.get("text") is not None:
            raise BadRow(f"{where} holds a part whose 'text' is {kind_of(part['text'])}, expected a string")
        elif kind in _TEXTS:
            raise BadRow(f"{where} holds a part without 'text'; its keys are {', '.join(map(repr, part))}")
        elif kind in _THOUGHTS and isinstance(part, dict):
            thoughts.append(_thought(part, where))
        else:
            raise BadRow(f"{where} holds a part of type {kind!r}; only text can be trained on")
        known = ("type", "text", *_THOUGHTS, "closed")
        unused |= dict.fromkeys(f"messages[].content[].{key}" for key in unread_keys(part, known))
    message["content"] = texts if len(texts) > 1 else "".join(texts)
    if thoughts:
        if any(message.get(key) for key in SAID[1:]):
            raise BadRow(f"{where} has reasoning in its content and in a separate field")
        message["reasoning_content"] = "\n".join(thoughts)


def _thought(part: Fields, where: str) -> str:
    held = next((part[key] for key in (*_THOUGHTS, "text") if part.get(key) is not None), None)
    texts = held if isinstance(held, list) else [held]
    texts = [text.get("text") if isinstance(text, dict) else text for text in texts]
    found = [text for text in texts if isinstance(text, str)]
    if not found or len(found) < len(texts):
        raise BadRow(f"{where} holds a part of type {part['type']!r} without text")
    return "\n".join(found)


def _trained(message: Fields, where: str, unused: dict[str, None]) -> bool:
    """Removes the keys that say whether the message is trained; returns what they say."""
    trained = True
    for key in [key for key in _FLAGS if key in message]:
        value = message.pop(key)
        if key in _MASKED and not isinstance(value, bool):
            raise BadRow(f"{where}: {key!r} is {value!r}, expected true (not learned) or false")
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            expected = "0 or 1" if key in _NUMBERS else "true or false"
            raise BadRow(f"{where}: {key!r} is {value!r}, expected {expected}")
        learn = bool(value) != (key in _MASKED)
        trained = trained and learn
        if learn and key not in _NUMBERS and message["role"] not in ("assistant", CALL):
            unused[f"messages[].{key} (role {message['role']})"] = None
    for key, value in message.items():
        if _MAY_MASK.search(key) and isinstance(value, (bool, int, float)) and value in (0, 1):
            names = "'train' (true: learned) or 'mask' (true: context)"
            raise BadRow(f"{where}: {key!r} is not a known mask; name it {names}")
    if message.get("train_detail"):
        raise BadRow(f"{where}: 'train_detail' marks parts of a message; only whole ones can be left out")
    return trained

"""What a row says: the format is found from its keys, and every format becomes one of four kinds of example."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trireme.engine.sources import BadRow
from trireme.models.config import InputError


class Text(NamedTuple):
    """Running text, all of it trained on. A long document may come in pieces."""

    text: str
    starts: bool = True
    ends: bool = True


class Completion(NamedTuple):
    """A completion to be trained on after a prompt, both exactly as they are written."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """A conversation for the chat template; a message with "train": False is context."""

    messages: list[dict]
    tools: list[dict] | None = None
    plain: Completion | None = None  # how to say it where there is no chat template


class Ids(NamedTuple):
    """Tokens, and which of them are trained on (None: all)."""

    ids: list[int]
    trained: list[bool] | None = None


Example = Text | Completion | Chat | Ids


@dataclass(frozen=True)
class Format:
    """One way to write a row: `keys` name it, `read` makes the example."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[dict], Example]


def find_format(row: Mapping[str, Any]) -> Format:
    """The format of a row, from its keys. BadRow where none fits."""
    for form in FORMATS:
        if all(key in row for key in form.keys):
            return form
    keys = set(row)
    hint = ""
    if {"chosen", "rejected"} <= keys:
        hint = " It looks like preference data, which is not supported."
    for ours, theirs in _LIKELY:
        if set(theirs) <= keys:
            pairs = ",".join(f"{o}={t}" for o, t in zip(ours, theirs, strict=True))
            hint = f" Perhaps --map {pairs}."
            break
    found = ", ".join(map(repr, list(row)[:8])) or "none"
    raise BadRow(f"no known format has its keys ({found}); expected {_EXPECTED}.{hint}")


def parse_map(text: str | None) -> dict[str, str]:
    """`prompt=question,completion=answer` as {their name: our name}."""
    renames = {}
    for part in (text or "").split(","):
        ours, equals, theirs = part.partition("=")
        if part and not (ours.strip() and equals and theirs.strip()):
            raise InputError(f"--map {text}: expected OURS=YOURS, such as prompt=question,completion=answer.")
        if part:
            renames[theirs.strip()] = ours.strip()
    return renames


def rename(row: dict, renames: Mapping[str, str]) -> dict:
    """row under our names. A column that is absent is not an error here: the format says what it misses."""
    if not renames:
        return row
    ours = set(renames.values())
    kept = {key: value for key, value in row.items() if key not in ours}  # the named column wins over one of our name
    return {renames.get(key, key): value for key, value in kept.items()}


# ---------------------------------------------------------------- checks that name the fault


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null", int: "a number"}
    return names.get(type(value), "a number")


def _string(row: Mapping, key: str, default: str | None = None) -> str:
    value = row.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise BadRow(f"{key!r} is {_kind(value)}, expected a string")
    return value


def _list(row: Mapping, key: str, of: str) -> list:
    value = row[key]
    if not isinstance(value, list):
        raise BadRow(f"{key!r} is {_kind(value)}, expected a list of {of}")
    if not value:
        raise BadRow(f"{key!r} is empty")
    return value


# ---------------------------------------------------------------- the formats


def _text(row: dict) -> Text:
    return Text(_string(row, "text"), row.get("starts", True), row.get("ends", True))


def _prompt_completion(row: dict) -> Example:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        context = [{**m, "train": False} for m in _messages(row["prompt"], "prompt")]
        return Chat(_spoken(context + _messages(row["completion"], "completion")), _tools(row))
    completion = _string(row, "completion")
    if not completion:
        raise BadRow("'completion' is empty")
    return Completion(_string(row, "prompt"), completion)


def _chat(row: dict) -> Chat:
    _list(row, "messages", "{role, content}")
    return Chat(_spoken(_messages(row["messages"], "messages")), _tools(row))


_SAID = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # what a message may say beside its content


def _messages(messages: list, key: str) -> list[dict]:
    return [_message(message, f"{key}[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict:
    """One message as a chat template expects it; null values are as good as absent."""
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {_kind(message)}, expected {{role, content}}")
    message = {key: value for key, value in message.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{where} has no 'role'; its keys are {', '.join(map(repr, message)) or 'none'}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p for p in content if not (isinstance(p, dict) and isinstance(p.get("text"), str))]
        if parts:
            kind = parts[0].get("type") if isinstance(parts[0], dict) else _kind(parts[0])
            raise BadRow(f"{where} holds a part of type {kind!r}; only text can be trained on")
        message["content"] = "".join(part["text"] for part in content)
    elif content is None and not any(message.get(key) for key in _SAID):
        raise BadRow(f"{where} has no 'content'")
    elif content is not None and not isinstance(content, str):
        raise BadRow(f"{where}: 'content' is {_kind(content)}, expected a string")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise BadRow(f"{where}: 'tool_calls' is not a list of {{function: {{name, arguments}}}}")
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise BadRow(f"{where}: 'weight' is {weight!r}, expected 0 or 1")
    return message if weight and message.get("train", True) else {**message, "train": False}


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _spoken(messages: list[dict]) -> list[dict]:
    """The messages, once it is sure that there is something in them to learn."""
    answers = [m for m in messages if m["role"] == "assistant"]
    if not answers:
        raise BadRow("no message has the role 'assistant', so there is nothing to train on")
    if not any((m.get("content") or "").strip() or any(m.get(key) for key in _SAID) for m in answers):
        raise BadRow("every assistant message is empty")
    return messages


def _tools(row: dict) -> list[dict] | None:
    """The row's tools as JSON schemas of functions; a string of JSON and bare functions are understood."""
    tools = row.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRow(f"'tools' is a string that is not JSON ({error})") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("'tools' is not a list of objects")
    return [{"type": "function", "function": t} if "name" in t and "function" not in t else t for t in tools]


_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}


def _sharegpt(row: dict) -> Chat:
    turns = _list(row, "conversations", "{from, value}")
    if all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return Chat(_spoken(_messages(turns, "conversations")), _tools(row))
    system = _string(row, "system", "")
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(turns):
        where = f"conversations[{i}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise BadRow(f"{where} has no 'from'; expected {{from, value}}")
        if not isinstance(turn.get("value"), str):
            raise BadRow(f"{where}: 'value' is {_kind(turn.get('value'))}, expected a string")
        speaker = _SPEAKERS.get(turn["from"].lower())
        if speaker is None:
            raise BadRow(f"{where}: 'from' is {turn['from']!r}, expected one of {', '.join(_SPEAKERS)}")
        if speaker == "call":
            _add_call(messages, turn["value"], where)
        else:
            message = {"role": speaker, "content": turn["value"]}
            if speaker == "tool":
                message |= _answers(messages)
            messages.append(_message(message | {k: turn[k] for k in ("weight", "train") if k in turn}, where))
    return Chat(_spoken(messages), _tools(row))


def _add_call(messages: list[dict], value: str, where: str) -> None:
    """Adds a function call: to the assistant message before it, else as a message of its own."""
    try:
        calls = json.loads(value)
    except ValueError as error:
        raise BadRow(f"{where}: the function call is not JSON ({error})") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow(f"{where}: a function call has no 'name'")
    calls = [
        {
            "id": f"call{len(messages):03d}{i:02d}",  # nine characters, which is what Mistral's templates insist on
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", {})},
        }
        for i, call in enumerate(calls)
    ]
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).extend(calls)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})


def _answers(messages: list[dict]) -> dict:
    """{"tool_call_id": the call that the next tool message answers}; empty where every call has its answer."""
    calls = [call["id"] for m in messages for call in m.get("tool_calls", [])]
    answers = sum(m["role"] == "tool" for m in messages)
    return {"tool_call_id": calls[answers]} if answers < len(calls) else {}


def _alpaca(row: dict) -> Chat:
    asked = _string(row, "instruction")
    given = _string(row, "input", "")
    answer = _string(row, "output")
    if not answer.strip():
        raise BadRow("'output' is empty")
    system = _string(row, "system", "")
    messages = [{"role": "system", "content": system}] if system else []
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow("'history' is not a list of [question, answer] pairs")
    for question, reply in [*history, [f"{asked}\n{given}" if given else asked, answer]]:
        if not isinstance(question, str) or not isinstance(reply, str):
            raise BadRow("'history' holds something that is not a string")
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    plain = Completion(_alpaca_prompt(asked, given), answer)
    return Chat(messages, _tools(row), None if history or system else plain)


def _alpaca_prompt(asked: str, given: str) -> str:
    """The prompt of Stanford Alpaca, for models without a chat template. The answer follows it."""
    more = ", paired with an input that provides further context" if given else ""
    block = f"### Input:\n{given}\n\n" if given else ""
    return (
        f"Below is an instruction that describes a task{more}. "
        f"Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{asked}\n\n{block}### Response:\n"
    )


def _ids(row: dict) -> Ids:
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


def _integers(row: dict, key: str) -> list[int]:
    values = _list(row, key, "token ids")
    if not all(type(value) is int for value in values):
        raise BadRow(f"{key!r} holds something that is not a whole number")
    return values


FORMATS = (
    Format("messages", ("messages",), _chat),
    Format("sharegpt", ("conversations",), _sharegpt),
    Format("input_ids", ("input_ids",), _ids),
    Format("prompt,completion", ("prompt", "completion"), _prompt_completion),
    Format("alpaca", ("instruction", "output"), _alpaca),
    Format("text", ("text",), _text),
)
CHATS = ("messages", "sharegpt", "alpaca")  # the formats that a chat template writes
_EXPECTED = "messages; conversations; instruction, output; prompt, completion; text; or input_ids"
_LIKELY = (
    (("prompt", "completion"), ("question", "answer")),
    (("prompt", "completion"), ("prompt", "response")),
    (("prompt", "completion"), ("prompt", "output")),
    (("prompt", "completion"), ("input", "output")),
    (("prompt", "completion"), ("query", "response")),
    (("instruction", "output"), ("instruction", "response")),
    (("text",), ("content",)),
)

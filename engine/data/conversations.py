"""Conversations (messages, sharegpt, alpaca) as messages for chat templates."""

from __future__ import annotations

import json
from typing import Any

from trireme.engine.data.examples import Chat, Completion, filled_list, string
from trireme.engine.data.rows import BadRow, Fields, kind_of


def read_messages(row: Fields) -> Chat:
    """`messages: [{role, content}]`, and `tools`."""
    filled_list(row, "messages", "{role, content}")
    return Chat(_spoken(_messages(row["messages"], "messages")), _tools(row))


_SAID = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # beside `content`


def read_talk(row: Fields) -> Chat:
    """`prompt` (context) and `completion`, lists of messages."""
    context = [{**m, "train": False} for m in _messages(row["prompt"], "prompt")]
    return Chat(_spoken(context + _messages(row["completion"], "completion")), _tools(row))


def _messages(messages: list[Any], key: str) -> list[Fields]:
    return [_message(message, f"{key}[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> Fields:
    """Null values count as absent."""
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {kind_of(message)}, expected {{role, content}}")
    message = {key: value for key, value in message.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{where} has no 'role'; its keys are {', '.join(map(repr, message)) or 'none'}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p for p in content if not (isinstance(p, dict) and isinstance(p.get("text"), str))]
        if parts:
            part = parts[0]
            if isinstance(part, dict) and part.get("type") == "text":
                raise BadRow(f"{where} holds a part without 'text'; its keys are {', '.join(map(repr, part))}")
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise BadRow(f"{where} holds a part of type {kind!r}; only text can be trained on")
        message["content"] = "".join(part["text"] for part in content)
    elif content is None and not any(message.get(key) for key in _SAID):
        raise BadRow(f"{where} has no 'content'")
    elif content is not None and not isinstance(content, str):
        raise BadRow(f"{where}: 'content' is {kind_of(content)}, expected a string")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise BadRow(f"{where}: 'tool_calls' is not a list of {{function: {{name, arguments}}}}")
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise BadRow(f"{where}: 'weight' is {weight!r}, expected 0 or 1")
    train = message.get("train", True)
    if not isinstance(train, bool):
        raise BadRow(f"{where}: 'train' is {train!r}, expected true or false")
    return message if weight and train else {**message, "train": False}


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _spoken(messages: list[Fields]) -> list[Fields]:
    """Raises BadRow where there is nothing to learn."""
    answers = [m for m in messages if m["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(repr(m["role"]) for m in messages)) or "none"
        raise BadRow(f"no message has the role 'assistant', so there is nothing to train on (its roles: {roles})")
    if not any((m.get("content") or "").strip() or any(m.get(key) for key in _SAID) for m in answers):
        raise BadRow("every assistant message is empty")
    return messages


def _tools(row: Fields) -> list[Fields] | None:
    """JSON schemas of functions, from these, bare functions, or a string of JSON."""
    tools = row.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"'tools' is a string that is not JSON ({error})") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function", {}), dict) for tool in tools
    ):
        raise BadRow("'tools' is not a list of objects, each with an object as its 'function'")
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


def read_sharegpt(row: Fields) -> Chat:
    """`conversations: [{from, value}]`, `system`, `tools`."""
    turns = filled_list(row, "conversations", "{from, value}")
    if all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return Chat(_spoken(_messages(turns, "conversations")), _tools(row))
    system = string(row, "system", "")
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(turns):
        where = f"conversations[{i}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise BadRow(f"{where} has no 'from'; expected {{from, value}}")
        if not isinstance(turn.get("value"), str):
            raise BadRow(f"{where}: 'value' is {kind_of(turn.get('value'))}, expected a string")
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


def _add_call(messages: list[Fields], value: str, where: str) -> None:
    """To the assistant message before, else alone."""
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where}: the function call is not JSON ({error})") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow(f"{where}: a function call has no 'name'")
    calls = [
        {
            "id": f"call{len(messages):03d}{i:02d}",  # Mistral's templates insist on nine characters
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", {})},
        }
        for i, call in enumerate(calls)
    ]
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).extend(calls)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})


def _answers(messages: list[Fields]) -> Fields:
    """{"tool_call_id": the first unanswered call}; empty where there is none."""
    calls = [call["id"] for m in messages for call in m.get("tool_calls", [])]
    answers = sum(m["role"] == "tool" for m in messages)
    return {"tool_call_id": calls[answers]} if answers < len(calls) else {}


def read_alpaca(row: Fields) -> Chat:
    """`instruction`, `input`, `output`, `system`, `history: [[question, answer]]`."""
    asked = string(row, "instruction")
    given = string(row, "input", "")
    answer = string(row, "output")
    if not answer.strip():
        raise BadRow("'output' is empty")
    system = string(row, "system", "")
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
    """Stanford Alpaca's prompt, for models without a chat template."""
    more = ", paired with an input that provides further context" if given else ""
    block = f"### Input:\n{given}\n\n" if given else ""
    return (
        f"Below is an instruction that describes a task{more}. "
        f"Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{asked}\n\n{block}### Response:\n"
    )

"""Conversations (messages, sharegpt, alpaca) as messages for chat templates."""

from __future__ import annotations

import json
import re
from typing import Any

from trireme.engine.data.files.json_rows import json_of
from trireme.engine.data.files.rows import BadRow, Fields, kind_of
from trireme.engine.data.formats.blocks import turns_of
from trireme.engine.data.formats.calls import drop_strange_nulls, number_calls, read_tools, told_calls
from trireme.engine.data.formats.examples import Chat, Completion, filled_list, string
from trireme.engine.data.formats.messages import CALL, ROLES, SAID, read_message

SAYS_MORE = ("system", "tools", "functions", "chat_template_kwargs")  # in addition to the messages
SYSTEM = ("system", "developer")


def read_messages(row: Fields, answered: bool = True) -> Chat:
    """`messages: [{role, content}]`, and SAYS_MORE. `answered`: the assistant must say something."""
    return _chat(row, "messages", answered)


def read_sharegpt(row: Fields, answered: bool = True) -> Chat:
    """`conversations: [{from, value}]` or of messages, and SAYS_MORE. `answered` as of read_messages."""
    for i, turn in enumerate(filled_list(row, "conversations", "{from, value}")):
        speaker = turn.get("from") if isinstance(turn, dict) and "role" not in turn else ""
        if speaker is None or not isinstance(speaker, str):
            raise BadRow(f"conversations[{i}] has no 'from'; expected {{from, value}}")
        if speaker and speaker.strip().lower() not in ROLES:
            raise BadRow(f"conversations[{i}]: 'from' is {speaker!r}, expected one of {', '.join(ROLES)}")
        if speaker and "value" in turn and not isinstance(turn["value"], (str, list, dict)):
            raise BadRow(f"conversations[{i}]: 'value' is {kind_of(turn['value'])}, expected a string")
    return _chat(row, "conversations", answered)


def read_talk(row: Fields, answer: str = "completion") -> Chat:
    """`prompt` (context) and `completion`, lists of messages. `answer`: the column of the second, for messages."""
    unused: dict[str, None] = {}
    messages = _turns(row["prompt"], "prompt", unused)
    for message in messages:
        message["train"] = False
    messages = _turns(row["completion"], answer, unused, messages)
    return _finished(row, messages, unused)


def messages_in(value: Any, answer: bool = False) -> list[Any]:
    """A list of messages, also one alone, and as JSON in a string; empty where it is a text. Raises BadRow.

    `answer`: JSON that does not end with a message of the assistant is a text, too.
    """
    if not isinstance(value, str):
        return [value] if _is_message(value) else value if isinstance(value, list) else []
    if not re.match(r"\s*(\[\s*)?\{\s*\"", value):
        return []
    try:
        said = json.loads(value)
    except (ValueError, RecursionError):
        return []
    said = said if isinstance(said, list) else [said]
    if not all(map(_is_message, said)) or (answer and role_of(said[-1]) not in ("assistant", CALL)):
        return []
    found = json_of(value)  # no key twice
    return found if isinstance(found, list) else [found]


def talks_in(row: Fields, asked: str, *answers: str) -> list[list[Any]]:
    """As messages_in of a prompt and its answers: columns of a row, of which answers are alike. Raises BadRow."""
    keys = (asked, *answers)
    if any(isinstance(row.get(key), (list, dict)) for key in keys):  # so strings are texts
        return [[] if isinstance(row.get(key), str) else messages_in(row.get(key)) for key in keys]
    said = [messages_in(row.get(key), answer=True) for key in answers]
    return [messages_in(row.get(asked)), *(said if all(said) else ([] for _ in said))]


def role_of(message: Any) -> str:
    """The role under its name in ROLES; "" if the value is not a message."""
    said = (message.get("role") or message.get("from") or "") if isinstance(message, dict) else ""
    return ROLES.get(said.strip().lower(), said) if isinstance(said, str) else ""


def _is_message(value: Any) -> bool:
    keys = value.keys() if isinstance(value, dict) else set[str]()
    return {"from", "value"} <= keys or ("role" in keys and bool({"content", *SAID} & keys))


def _chat(row: Fields, column: str, answered: bool) -> Chat:
    unused: dict[str, None] = {}
    return _finished(row, _turns(filled_list(row, column, "{role, content}"), column, unused), unused, answered)


def _turns(turns: list[Any], column: str, unused: dict[str, None], before: list[Fields] | None = None) -> list[Fields]:
    """The messages, after those `before`. A call is added to the assistant message before it, if any."""
    messages = before or []
    spoken = [(i, part) for i, turn in enumerate(turns) for part in turns_of(turn, f"{column}[{i}]")]
    for i, turn in spoken:
        message = read_message(turn, f"{column}[{i}]", unused)
        if message["role"] == CALL:
            message["tool_calls"] = told_calls(message.pop("content", None), f"{column}[{i}]", unused)
            last = messages[-1] if messages else {}
            rest = [key for key in ("train", *message) if key not in ("role", "tool_calls")]
            if last.get("role") == "assistant" and all(last.get(key) == message.get(key) for key in rest):
                last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
                continue
            message |= {"role": "assistant", "content": ""}
        messages.append(message)
    return messages


def _finished(row: Fields, messages: list[Fields], unused: dict[str, None], answered: bool = True) -> Chat:
    """Raises BadRow where, if it is to be `answered`, there is nothing to learn; else nothing is."""
    if isinstance(row.get("system"), list):  # of Anthropic's parts
        system = read_message({"role": "system", "content": row["system"]}, "'system'", unused)["content"]
    else:
        system = string(row, "system", "")
    if system:
        if not messages or messages[0]["role"] not in SYSTEM:
            messages = [{"role": "system", "content": system}, *messages]
        elif messages[0].get("content") != system:
            raise BadRow("has a 'system' column and a system message. Leave the column out: --map unused=system")
    answers = [m for m in messages if m["role"] == "assistant"]
    if not answered:
        messages = [{**m, "train": False} for m in messages]
    elif not answers:
        roles = ", ".join(dict.fromkeys(repr(m["role"]) for m in messages)) or "none"
        raise BadRow(f"no message has the role 'assistant', so there is nothing to train on (its roles: {roles})")
    elif not any(_says(m.get("content")) or any(m.get(key) for key in SAID) for m in answers):
        raise BadRow("every assistant message is empty")
    number_calls(messages)
    tools = read_tools(row)
    drop_strange_nulls(messages, tools)
    return Chat(messages, tools, None, _variables(row), tuple(unused))


def _says(content: Any) -> bool:
    return any(text.strip() for text in content) if isinstance(content, list) else bool((content or "").strip())


def _variables(row: Fields) -> Fields | None:
    given = row.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise BadRow(f"'chat_template_kwargs' is {kind_of(given)}, expected an object")
    return {key: value for key, value in (given or {}).items() if value is not None} or None


def with_system(chat: Chat, system: str) -> Chat:
    """With that system message where it has none."""
    if chat.messages[0]["role"] in SYSTEM:
        return chat
    return chat._replace(messages=[{"role": "system", "content": system}, *chat.messages], plain=None)


def read_alpaca(row: Fields) -> Chat:
    """`instruction`, `input`, `output`, `system`, `history: [[question, answer]]`, `tools`."""
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
    for question, reply in [*history, ["\n".join(part for part in (asked, given) if part), answer]]:
        if not isinstance(question, str) or not isinstance(reply, str):
            raise BadRow("'history' holds something that is not a string")
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    tools, variables = read_tools(row), _variables(row)
    plain = Completion(_alpaca_prompt(asked, given), answer)
    return Chat(messages, tools, None if history or system or tools or variables else plain, variables)


def _alpaca_prompt(asked: str, given: str) -> str:
    """Stanford Alpaca's prompt, for models without a chat template."""
    more = ", paired with an input that provides further context" if given else ""
    block = f"### Input:\n{given}\n\n" if given else ""
    return (
        f"Below is an instruction that describes a task{more}. "
        f"Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{asked}\n\n{block}### Response:\n"
    )

"""Messages, tools and calls of tools, as trainers and servers write them, in one form.

To read another spelling, add it to a table.
"""

from __future__ import annotations

import json
import re
from typing import Any

from trireme.engine.data.read import EMPTY, BadRow, Fields, json_of, refuse_media, typed

ROLES = {  # ours, and its names in files, in any case; others are left to the template
    name: role
    for role, names in {
        "user": "user human",
        "assistant": "assistant gpt chatgpt chatbot model bot ai bard bing claude",
        "system": "system",
        "tool": "tool function observation function_response tool_response",
        "call": "function_call tool_call",  # joins the assistant's message before it
    }.items()
    for name in names.split()
}
KEYS = {  # of a message: ours, and its names in files
    "role": ("role", "from"),
    "content": ("content", "value"),
    "reasoning_content": ("reasoning_content", "reasoning", "thinking"),
    "tool_calls": ("tool_calls", "function_call"),
}
LEARNED = (  # of a message, or a row: 1 or true is trained
    *("train", "training", "trainable", "is_trainable", "is_train", "do_train", "learn"),
    *("loss", "loss_mask", "step_loss_mask", "loss_scale", "loss_weight", "weight"),
)
NUMBERS = ("loss", "loss_scale", "loss_weight", "weight")  # of these, that may mean something else in a row
MASKED = ("mask", "masked", "is_masked")  # true: not trained
_THOUGHTS = ("thinking", "reasoning")  # types of parts of a content
_PARTS = {  # types of parts, and the keys of what they say
    **dict.fromkeys(("text", "input_text", "output_text"), ("text",)),
    **dict.fromkeys(_THOUGHTS, (*_THOUGHTS, "text")),
}
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # Mistral's templates insist on nine characters


def role_of(turn: Any) -> str:
    """The role of a message under our name; "" if it has none."""
    role = next((turn[key] for key in KEYS["role"] if turn.get(key)), "") if isinstance(turn, dict) else ""
    return ROLES.get(role.strip().lower(), role) if isinstance(role, str) else ""


def is_message(value: Any) -> bool:
    keys = value.keys() if isinstance(value, dict) else set[str]()
    return any(key in keys for key in KEYS["role"]) and bool({*KEYS["content"], "tool_calls"} & keys)


def read_message(turn: Any, location: str) -> tuple[Fields, bool]:
    """(a message under our names, whether it is a call that is a turn of its own). Null values count as absent;
    "train": False marks what is not trained; keys that are not ours are left to the template. Raises BadRow.
    """
    message = {key: value for key, value in typed(turn, dict, location, "{role, content}").items() if value is not None}
    for ours in ("role", "content"):
        theirs = next((key for key in KEYS[ours] if key in message), ours)
        if theirs != ours:
            message[ours] = message.pop(theirs)
    refuse_media(message, f"{location}: ")
    role = message["role"] = role_of(message)
    calls = [value for key in KEYS["tool_calls"] if (value := message.pop(key, None)) not in EMPTY]
    if role == "call":
        calls.append(message.pop("content", None))
        message |= {"role": "assistant", "content": ""}
    _read_content(message, location)
    has_content = calls or "content" in message or "reasoning_content" in message
    fault = "has calls, and only an assistant calls" if calls and message["role"] != "assistant" else ""
    fault = fault if role and has_content else f"has no {'content' if role else 'role'!r}"
    if fault:
        raise BadRow(f"{location} {fault}; its keys: {', '.join(map(repr, turn))}")
    if calls:
        values = [parsed(value, f"{location}: the call") for value in calls]
        flat = [call for value in values for call in (value if isinstance(value, list) else [value])]
        message["tool_calls"] = [_read_call(parsed(call, f"{location}: a call"), location) for call in flat]
    return message if _is_trained(message, location) else {**message, "train": False}, role == "call"


def _read_content(message: Fields, location: str) -> None:
    """A list of parts becomes a text if it has one, else a list of texts. Thoughts, also among the parts, get our name.
    Raises BadRow, also if there are several thoughts that differ.
    """
    thoughts = [message.pop(key) for key in KEYS["reasoning_content"] if key in message]
    content = message.get("content", "")
    if isinstance(content, list):
        parts = [_read_part(part, location) for part in content]
        texts = [text for text, is_thought in parts if not is_thought]
        message["content"] = texts if len(texts) > 1 else "".join(texts)
        thoughts.append("\n".join(text for text, is_thought in parts if is_thought))
    else:
        typed(content, str, f"{location}: 'content'", "a string")
    if thoughts := [thought for thought in thoughts if thought not in (*EMPTY, False)]:
        if any(thought != thoughts[0] for thought in thoughts):
            raise BadRow(f"{location} has its reasoning_content, the reasoning, twice, and they differ")
        message["reasoning_content"] = typed(thoughts[0], str, f"{location}: its reasoning_content", "a string")


def _read_part(part: Any, location: str) -> tuple[str, bool]:
    """(what a part of a content says, whether it is a thought). Raises BadRow."""
    item = {"text": part} if isinstance(part, str) else typed(part, dict, f"{location}: a part of its content", "text")
    kind = item.get("type", "text")
    values = next((item[key] for key in _PARTS.get(str(kind), ()) if item.get(key) is not None), None)
    values = values if isinstance(values, list) and kind in _THOUGHTS else [values]
    texts = [text.get("text") if isinstance(text, dict) and kind in _THOUGHTS else text for text in values]
    if not texts or not all(isinstance(text, str) for text in texts):
        keys = ", ".join(map(repr, item))
        raise BadRow(f"{location} holds a part of type {kind!r} ({keys}); only text can be trained on")
    return "\n".join(map(str, texts)), kind in _THOUGHTS


def _is_trained(message: Fields, location: str) -> bool:
    """Removes the keys that say whether the message is trained; returns what they say. Raises BadRow."""
    trained = True
    for key in [key for key in (*LEARNED, *MASKED) if key in message]:
        value, masks = message.pop(key), key in MASKED
        if not isinstance(value, bool if masks else (bool, int, float)) or value not in (0, 1):
            raise BadRow(f"{location}: {key!r} is {value!r}, expected {'true or false' if masks else '0 or 1'}")
        trained = trained and bool(value) != masks
    return trained


# ---------------------------------------------------------------- tools and calls


def parsed(value: Any, name: str) -> Any:
    """A value, or what it holds as JSON in a string. Raises BadRow, also if JSON has no such value, as no date."""
    try:
        return json_of(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"{name} is not JSON ({error})") from None


def read_tools(row: Fields) -> list[Fields] | None:
    """The tools of `tools`, or of OpenAI's older `functions`: JSON schemas or bare functions. Raises BadRow."""
    keys = [key for key in ("tools", "functions") if str(row.get(key) or "").strip()]
    tools = parsed(row[keys[0]], repr(keys[0])) if keys else None
    if tools in EMPTY:
        return None
    tools = [parsed(tool, f"{keys[0]}[{i}]") for i, tool in enumerate(tools)] if isinstance(tools, list) else [None]
    right = all(isinstance(tool, dict) and isinstance(tool.get("function", {}), dict) for tool in tools)
    if len(keys) > 1 or not right:
        columns = " and ".join(map(repr, keys))
        raise BadRow(f"{columns}: expected one list of objects, each with an object as its 'function'")
    bare = lambda tool: {key: value for key, value in tool.items() if key != "type"}  # of OpenAI's responses
    return [{"type": "function", "function": bare(t)} if "name" in t and "function" not in t else t for t in tools]


def _read_call(call: Any, location: str) -> Fields:
    """A call with arguments that are JSON, of {function: {name, arguments}} or what is in it. Raises BadRow."""
    function: Any = call.get("function", call) if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    name, keys = function.get("name"), function.keys()
    standard = bool(keys & {*_ARGUMENTS}) or keys <= {"name", "id", "type", "index"}  # else arguments may be lost
    if not standard or not name or not isinstance(name, str) or not isinstance(call.get("id") or "", (str, int)):
        raise BadRow(f"{location}: a call is {json.dumps(call, default=str)[:80]}, expected {{id, name, arguments}}")
    arguments: Any = next((function[key] for key in _ARGUMENTS if function.get(key) is not None), {})
    arguments = {} if isinstance(arguments, str) and not arguments.strip() else arguments
    subject = f"{location}: the arguments of a call of {name!r}"
    values = typed(parsed(arguments, subject), dict, subject, "an object")
    about = {key: value for key, value in call.items() if key in ("id", "type", "index")}  # an index says its order
    called = {"name": name, "arguments": arguments if values else {}}  # as they are: a text, or an object
    return {"id": "", "type": "function", **about, "function": called}


def number_calls(messages: list[Fields], anew: bool = False) -> list[Fields]:
    """Messages whose calls have an id, and whose answers that of the call that they answer, by it, by the tool's name
    or in order. `anew`: also in place of ids that are not nine letters and digits.
    """
    waiting, numbered = dict[str, tuple[str, str]](), list[Fields]()  # calls to answer, by old or new id: id, name
    for i, message in enumerate(messages):
        changed, answered = Fields(), message.get("tool_call_id")
        for k, call in enumerate(message.get("tool_calls", [])):
            old, new = call.get("id") or "", f"call{i % 1000:03d}{k % 100:02d}"
            id = old if old and (not anew or _SHORT_ID.fullmatch(str(old))) else new
            waiting[old or new] = id, call["function"]["name"]
            changed.setdefault("tool_calls", []).append({**call, "id": id})
        typed(answered, (str, int, type(None)), f"the 'tool_call_id' of message {i}", "a string")
        if message["role"] == "tool" and (answered in waiting or (answered is None and waiting)):
            of_name = [key for key, (_, name) in waiting.items() if name == message.get("name")]
            changed["tool_call_id"], _ = waiting.pop([*of_name, *waiting][0] if answered is None else answered)
        numbered.append({**message, **changed})
    return numbered

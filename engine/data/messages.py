"""Messages, tools and calls of tools, as trainers and servers write them, in one form.

To read another spelling, add it to a table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trireme.engine.data.read import EMPTY, BadRow, Fields, json_of, kind_of, unread_keys

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
_PARTS = {"text": ("text", "input_text", "output_text"), "thinking": ("thinking", "reasoning")}  # types in a content
_MEDIA = ("image", "video", "audio", "pixel_value", "input_feature")  # less an s
_CALL, _ANSWER = "tool_use", "tool_result"  # Anthropic's parts of a content
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_OF_CALL = ("id", "type", "index", "function")  # an index says its order
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # Mistral's templates insist on nine characters


def role_of(turn: Any) -> str:
    """The role of a message under our name; "" if it has none."""
    role = next((turn[key] for key in KEYS["role"] if turn.get(key)), "") if isinstance(turn, dict) else ""
    return ROLES.get(role.strip().lower(), role) if isinstance(role, str) else ""


def is_message(value: Any) -> bool:
    keys = value.keys() if isinstance(value, dict) else set[str]()
    return any(key in keys for key in KEYS["role"]) and bool({*KEYS["content"], "tool_calls"} & keys)


def refuse_media(fields: Mapping[str, Any], where: str = "") -> None:
    """Raises BadRow if a column, or a key at `where`, has images, videos or audio."""
    for key, value in fields.items():
        stem = key.lower().removesuffix("s").removesuffix("_url").removesuffix("_path")
        if stem in _MEDIA and value not in (*EMPTY, "[]", "{}", "null"):
            way_out = "" if where else f". Where its text stands alone, leave the column out: --map unused={key}"
            raise BadRow(f"{where}{key!r} holds content that is not text; only text can be trained on{way_out}")


def read_message(turn: Any, where: str, unused: dict[str, None]) -> tuple[Fields, bool]:
    """(a message under our names, whether it is a call that is a turn of its own). Null values count as absent;
    "train": False marks what is not trained; keys that are not ours are left to the template. Raises BadRow.
    """
    if not isinstance(turn, dict):
        raise BadRow(f"{where} is {kind_of(turn)}, expected {{role, content}}")
    message = {key: value for key, value in turn.items() if value is not None}
    for ours in ("role", "content"):
        theirs = next((key for key in KEYS[ours] if key in message), ours)
        if theirs != ours:
            message[ours] = message.pop(theirs)
    role = role_of(message)
    if not role:
        raise BadRow(f"{where} has no 'role', such as 'user'; its keys: {', '.join(map(repr, turn))}")
    refuse_media(message, f"{where}: ")
    calls = [value for key in KEYS["tool_calls"] if (value := message.pop(key, None)) not in EMPTY]
    message["role"] = role
    if role == "call":
        calls.append(message.pop("content", None))
        message |= {"role": "assistant", "content": ""}
    elif calls and role != "assistant":
        raise BadRow(f"{where} has calls, and the role {role!r}; only an assistant calls")
    _read_thoughts(message, where)
    _read_content(message, where, unused)
    if calls:
        message["tool_calls"] = [call for value in calls for call in _read_calls(value, where, unused)]
    trained = _read_flags(message, where, unused)
    if "content" not in message and not any(message.get(key) for key in ("reasoning_content", "tool_calls")):
        raise BadRow(f"{where} has no 'content'; its keys: {', '.join(map(repr, turn))}")
    return message if trained else {**message, "train": False}, role == "call"


def _read_thoughts(message: Fields, where: str) -> None:
    """Thoughts under our name. Raises BadRow if they are not a string, or are there twice and differ."""
    thoughts = {key: message.pop(key) for key in KEYS["reasoning_content"] if key in message}
    thoughts = {key: value for key, value in thoughts.items() if value not in ("", [], {}, False)}
    for key, value in thoughts.items():
        if not isinstance(value, str):
            raise BadRow(f"{where}: {key!r} is {kind_of(value)}, expected a string")
        if message.setdefault("reasoning_content", value) != value:
            raise BadRow(f"{where}: {' and '.join(map(repr, thoughts))}, the reasoning, are not the same")


def _read_content(message: Fields, where: str, unused: dict[str, None]) -> None:
    """A list of parts becomes a text if it has one, else a list of texts. Thoughts among the parts get a key of their
    own.
    """
    content = message.get("content", "")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise BadRow(f"{where}: 'content' is {kind_of(content)}, expected a string")
    words: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in [{"text": part} if isinstance(part, str) else part for part in content]:
        kind = part.get("type", "text") if isinstance(part, dict) else kind_of(part)
        name = next((name for name, kinds in _PARTS.items() if isinstance(part, dict) and kind in kinds), None)
        if not name:
            raise BadRow(f"{where} holds a part of type {kind!r}; only text can be trained on")
        keys = (*_PARTS["thinking"], "text") if name == "thinking" else ("text",)
        value = next((part[key] for key in keys if part.get(key) is not None), None)
        values = value if isinstance(value, list) and name == "thinking" else [value]
        texts = [text.get("text") if isinstance(text, dict) else text for text in values]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise BadRow(f"{where} holds a part of type {kind!r} without text; its keys: {', '.join(map(repr, part))}")
        words[name].append("\n".join(map(str, texts)))
        others = unread_keys(part, ("type", "text", *_PARTS["thinking"], "closed"))
        unused |= dict.fromkeys(f"messages[].content[].{key}" for key in others)
    message["content"] = words["text"] if len(words["text"]) > 1 else "".join(words["text"])
    if words["thinking"] and message.get("reasoning_content"):
        raise BadRow(f"{where} has reasoning in its content and in a separate field")
    message |= {"reasoning_content": "\n".join(words["thinking"])} if words["thinking"] else {}


def _read_flags(message: Fields, where: str, unused: dict[str, None]) -> bool:
    """Removes the keys that say whether the message is trained; returns what they say. Raises BadRow."""
    trained = True
    for key in [key for key in (*LEARNED, *MASKED) if key in message]:
        value, masks = message.pop(key), key in MASKED
        if not isinstance(value, bool if masks else (bool, int, float)) or value not in (0, 1):
            expected = "0 or 1" if key in NUMBERS else "true (not learned) or false" if masks else "true or false"
            raise BadRow(f"{where}: {key!r} is {value!r}, expected {expected}")
        trained = trained and bool(value) != masks
        if bool(value) != masks and key not in NUMBERS and message["role"] != "assistant":
            unused[f"messages[].{key} (role {message['role']})"] = None
    return trained


# ---------------------------------------------------------------- tools and calls


def _parsed(value: Any, what: str) -> Any:
    """A value, or what it holds as JSON in a string. Raises BadRow."""
    try:
        return json_of(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} is a string that is not JSON ({error})") from None


def read_tools(row: Fields) -> list[Fields] | None:
    """The tools of `tools`, or of OpenAI's older `functions`: JSON schemas or bare functions. Raises BadRow."""
    keys = [key for key in ("tools", "functions") if str(row.get(key) or "").strip()]
    if len(keys) > 1:
        raise BadRow("has 'tools' and 'functions': leave one out, --map unused=functions")
    tools = _parsed(row[keys[0]], repr(keys[0])) if keys else []
    tools = [_parsed(tool, f"{keys[0]}[{i}]") for i, tool in enumerate(tools)] if isinstance(tools, list) else tools
    if tools in EMPTY:
        return None
    function = lambda tool: tool.get("function", {}) if isinstance(tool, dict) else None
    if not isinstance(tools, list) or not all(isinstance(function(tool), dict) for tool in tools):
        raise BadRow(f"{keys[0]!r} is not a list of objects, each with an object as its 'function'")
    return [{"type": "function", "function": _bare(t)} if "name" in t and "function" not in t else t for t in tools]


def _bare(tool: Fields) -> Fields:
    """A bare function, with Anthropic's `input_schema` as its parameters."""
    name = "input_schema" if "parameters" in tool else "parameters"
    return {(name if key == "input_schema" else key): value for key, value in tool.items()}


def _read_calls(calls: Any, where: str, unused: dict[str, None]) -> list[Fields]:
    """Calls with arguments that are JSON, from one call or a list, each {function: {name, arguments}} or what is in it,
    also in strings. Raises BadRow.
    """
    calls = _parsed(calls, f"{where}: the call")
    calls = calls if isinstance(calls, list) else [calls]
    return [_read_call(_parsed(call, f"{where}: a call"), where, unused) for call in calls]


def _read_call(call: Any, where: str, unused: dict[str, None]) -> Fields:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(f"{where}: a call is {json.dumps(call, default=str)[:80]}, expected {{name, arguments}}")
    key = next((key for key in _ARGUMENTS if function.get(key) is not None), "arguments")
    arguments = function.get(key)
    arguments = {} if arguments is None or (isinstance(arguments, str) and not arguments.strip()) else arguments
    what, inside = f"{where}: the arguments of a call of {function['name']!r}", function is not call
    values = _parsed(arguments, what)
    if not isinstance(values, dict):
        raise BadRow(f"{what} are {kind_of(values)}, expected an object")
    if not isinstance(call.get("id") or "", (str, int)):
        raise BadRow(f"{where}: the 'id' of a call is {kind_of(call['id'])}, expected a string")
    outer = unread_keys(call, _OF_CALL) if inside else []
    inner = unread_keys(function, ("name", key, *(() if inside else _OF_CALL)))
    unused |= dict.fromkeys(f"messages[].tool_calls[].{key}" for key in outer)
    unused |= dict.fromkeys(f"messages[].tool_calls[].function.{key}" for key in inner)
    about = {key: value for key, value in call.items() if key in _OF_CALL[:3]}
    named = {"name": function["name"], "arguments": arguments if values else {}}  # as they are: a text, or an object
    return {"id": "", "type": "function", **about, "function": named}


def number_calls(messages: list[Fields], anew: bool = False) -> list[Fields]:
    """Messages whose calls have an id, and whose answers that of the call that they answer, by it or in order. `anew`:
    also in place of ids that are not nine letters and digits.
    """
    waiting: dict[str, str] = {}  # old or new id -> id
    numbered = []
    for i, message in enumerate(messages):
        changed: Fields = {}
        for k, call in enumerate(message.get("tool_calls", [])):
            old, new = call.get("id") or "", f"call{i % 1000:03d}{k % 100:02d}"
            known = old and not (anew and not _SHORT_ID.fullmatch(str(old)))
            waiting[old or new] = old if known else new
            changed.setdefault("tool_calls", []).append({**call, "id": waiting[old or new]})
        answered = message.get("tool_call_id")
        if not isinstance(answered, (str, int, type(None))):
            raise BadRow(f"the 'tool_call_id' of message {i} is {kind_of(answered)}, expected a string")
        if message["role"] == "tool" and (answered in waiting or (answered is None and waiting)):
            changed["tool_call_id"] = waiting.pop(next(iter(waiting)) if answered is None else answered)
        numbered.append({**message, **changed})
    return numbered


def turns_of(turn: Any, where: str) -> list[Any]:
    """A turn, or what Anthropic's parts `tool_use` and `tool_result` make of it. Raises BadRow where order would be
    lost.
    """
    parts = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(parts, list):
        return [turn]
    kinds = [part.get("type") if isinstance(part, dict) else "" for part in parts]
    calls = [part for part, kind in zip(parts, kinds, strict=True) if kind == _CALL]
    answers = [part for part, kind in zip(parts, kinds, strict=True) if kind == _ANSWER]
    others = [part for part, kind in zip(parts, kinds, strict=True) if kind not in (_CALL, _ANSWER)]
    if not calls and not answers:
        return [turn]
    if parts != ([*others, *calls] if calls else [*answers, *others]) or (calls and turn.get("tool_calls")):
        raise BadRow(f"{where}: {_CALL} comes after all other parts, {_ANSWER} before them, and not both in a message")
    if calls:
        return [{**turn, "content": others, "tool_calls": [{**call, "type": "function"} for call in calls]}]
    read = ("type", "tool_use_id", "content")
    results = [
        {"role": "tool", "content": part.get("content") or "", "tool_call_id": part.get("tool_use_id") or None}
        | {key: value for key, value in part.items() if key not in read and value}
        for part in answers
    ]
    return [*results, {**turn, "content": others}] if others else [*results[:-1], {**turn, **results[-1]}]

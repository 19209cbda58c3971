"""Tools, and calls and answers of tools, as trainers and servers write them, in one form."""

from __future__ import annotations

import json
import re
from typing import Any

from trireme.engine.data.read import EMPTY, BadRow, Fields, json_of, kind_of, unread_keys

_CALL, _ANSWER = "tool_use", "tool_result"  # Anthropic's parts of a content
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_PARTS = ("id", "type", "index", "function")  # of a call; an index says its order
_VALUES = ("default", "const", "enum", "examples")  # of a schema, which may be null
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # Mistral's templates insist on nine characters


def parsed(value: Any, what: str) -> Any:
    """A value, or what it holds as JSON in a string. Raises BadRow."""
    try:
        return json_of(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} is a string that is not JSON ({error})") from None


def read_tools(row: Fields) -> list[Fields] | None:
    """The tools of `tools`, or of OpenAI's older `functions`: JSON schemas or bare functions. Raises BadRow."""
    keys = [key for key in ("tools", "functions") if row.get(key) not in EMPTY]
    if len(keys) > 1:
        raise BadRow("has 'tools' and 'functions': leave one out, --map unused=functions")
    tools = row[keys[0]] if keys else None
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return None
    tools = parsed(tools, repr(keys[0]))
    tools = [parsed(tool, f"{keys[0]}[{i}]") for i, tool in enumerate(tools)] if isinstance(tools, list) else tools
    if tools in EMPTY:
        return None
    function = lambda tool: tool.get("function", {}) if isinstance(tool, dict) else None
    if not isinstance(tools, list) or not all(isinstance(function(tool), dict) for tool in tools):
        raise BadRow(f"{keys[0]!r} is not a list of objects, each with an object as its 'function'")
    try:
        tools = [_without_nulls(tool) for tool in tools]
    except RecursionError:
        raise BadRow(f"{keys[0]!r} is nested too deeply") from None
    _check_numbers(tools, repr(keys[0]))
    return [{"type": "function", "function": _bare(t)} if "name" in t and "function" not in t else t for t in tools]


def _bare(tool: Fields) -> Fields:
    """A bare function, with Anthropic's `input_schema` as its parameters."""
    if "input_schema" not in tool or "parameters" in tool:
        return tool
    return {("parameters" if key == "input_schema" else key): value for key, value in tool.items()}


def _without_nulls(schema: Any) -> Any:
    """A schema without keys that are null, which are absent ones."""
    if isinstance(schema, list):
        return [_without_nulls(inside) for inside in schema]
    if not isinstance(schema, dict):
        return schema
    held = {key: inside for key, inside in schema.items() if inside is not None or key in _VALUES}
    return {key: inside if key in _VALUES else _without_nulls(inside) for key, inside in held.items()}


def read_calls(calls: Any, where: str, unused: dict[str, None]) -> list[Fields]:
    """Calls with arguments that are JSON, from one call or a list, each {function: {name, arguments}} or what is in it,
    also in strings. Raises BadRow.
    """
    calls = parsed(calls, f"{where}: the call")
    calls = [parsed(call, f"{where}: a call") for call in (calls if isinstance(calls, list) else [calls])]
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f"{where}: a call is {json.dumps(call, default=str)[:80]}, expected {{name, arguments}}")
    return [_call(call, where, unused) for call in calls]


def _call(call: Fields, where: str, unused: dict[str, None]) -> Fields:
    bare = "function" not in call
    function = dict(call.get("function", call))
    key = next((key for key in _ARGUMENTS if function.get(key) is not None), "arguments")
    arguments = function.pop(key, None)
    arguments = {} if arguments is None or (isinstance(arguments, str) and not arguments.strip()) else arguments
    of = f"{where}: the arguments of a call of {function['name']!r}"
    held = parsed(arguments, of)
    if not isinstance(held, dict):
        raise BadRow(f"{of} are {kind_of(held)}, expected an object")
    _check_numbers(held, of)
    if not bare and call.get("type") not in (None, "", "function"):
        raise BadRow(f"{where}: the type of a call is {call['type']!r}, expected 'function'")
    if not isinstance(call.get("id") or "", (str, int)):
        raise BadRow(f"{where}: the 'id' of a call is {kind_of(call['id'])}, expected a string")
    outside = {} if bare else call
    unused |= dict.fromkeys(f"messages[].tool_calls[].{key}" for key in unread_keys(outside, _PARTS))
    inside = unread_keys(function, ("name", *(_PARTS if bare else ())))
    unused |= dict.fromkeys(f"messages[].tool_calls[].function.{key}" for key in inside)
    own = {key: value for key, value in call.items() if key in _PARTS[:3]}  # given arguments may be a text or an object
    named = {"name": function["name"], "arguments": arguments if held else {}}
    return {"id": "", "type": "function", **own, "function": named}


def _check_numbers(value: Any, what: str) -> None:
    """Raises BadRow if a value has NaN or infinity: Python reads and writes them, but no server takes them."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise BadRow(f"{what} hold NaN or Infinity, which is not JSON; null says that there is no value") from None
    except (RecursionError, TypeError):  # too deep, or a time of Arrow's: the template says so
        return


def number_calls(messages: list[Fields], anew: bool = False) -> list[Fields]:
    """Messages whose calls have an id, and whose answers that of the call that they answer, by it or in order. `anew`:
    also in place of ids that are not nine letters and digits.
    """
    waiting: dict[str, str] = {}  # given or new id -> id
    numbered = []
    for i, message in enumerate(messages):
        calls = []
        for k, call in enumerate(message.get("tool_calls", [])):
            old, new = call.get("id") or "", f"call{i % 1000:03d}{k % 100:02d}"
            known = old and not (anew and not _SHORT_ID.fullmatch(str(old)))
            waiting[old or new] = old if known else new
            calls.append({**call, "id": waiting[old or new]})
        changed: Fields = {"tool_calls": calls} if calls else {}
        answered = message.get("tool_call_id")
        if not isinstance(answered, (str, int, type(None))):
            raise BadRow(f"the 'tool_call_id' of message {i} is {kind_of(answered)}, expected a string")
        if message["role"] == "tool" and (answered in waiting or (answered is None and waiting)):
            first = answered if answered in waiting else next(iter(waiting))
            changed["tool_call_id"] = waiting.pop(first)
        numbered.append({**message, **changed})
    return numbered


def turns_of(turn: Any, where: str) -> list[Any]:
    """A turn, or what Anthropic's parts `tool_use` and `tool_result` make of it. Raises BadRow where order would be
    lost.
    """
    parts = turn.get("content") if isinstance(turn, dict) else None
    kinds = (
        [str(part.get("type")) if isinstance(part, dict) else "" for part in parts] if isinstance(parts, list) else []
    )
    if not isinstance(parts, list) or not {_CALL, _ANSWER} & {*kinds}:
        return [turn]
    calls = [part for part, kind in zip(parts, kinds, strict=True) if kind == _CALL]
    answers = [part for part, kind in zip(parts, kinds, strict=True) if kind == _ANSWER]
    others = [part for part, kind in zip(parts, kinds, strict=True) if kind not in (_CALL, _ANSWER)]
    if calls and answers:
        raise BadRow(f"{where} holds {_CALL} and {_ANSWER}: a call, and an answer to one")
    if calls and (_CALL in kinds[: len(others)] or turn.get("tool_calls")):
        raise BadRow(f"{where} has a part after {_CALL}, or 'tool_calls' too; calls come last")
    if calls:
        return [{**turn, "content": others, "tool_calls": [{**call, "type": "function"} for call in calls]}]
    if _ANSWER in kinds[len(answers) :]:
        raise BadRow(f"{where} has a part before {_ANSWER}; answers come first")
    said = [{"role": "tool", "content": part.get("content") or "", **_about(part)} for part in answers]
    return [*said, {**turn, "content": others}] if others else [*said[:-1], {**turn, **said[-1]}]


def _about(part: Fields) -> Fields:
    about = {key: value for key, value in part.items() if key not in ("type", "tool_use_id", "content") and value}
    return {**({"tool_call_id": part["tool_use_id"]} if part.get("tool_use_id") else {}), **about}

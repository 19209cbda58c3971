"""Tools, and calls of tools, as the popular trainers and servers write them."""

from __future__ import annotations

import json
from typing import Any

from trireme.engine.data.files.json_rows import json_of
from trireme.engine.data.files.rows import EMPTY, BadRow, Fields, kind_of, unread_keys


def read_tools(row: Fields) -> list[Fields] | None:
    """The tools of `tools`, or of OpenAI's older `functions`: JSON schemas, bare functions, or either as JSON in a
    string.
    """
    given = [key for key in ("tools", "functions") if row.get(key) not in EMPTY]
    if not given:
        return None
    if len(given) > 1:
        raise BadRow("has 'tools' and 'functions': leave one out, --map unused=functions")
    tools = row[given[0]]
    if isinstance(tools, str):
        if not tools.strip():
            return None
        tools = _parsed(tools, f"{given[0]!r} is a string that is not JSON")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function", {}), dict) for tool in tools
    ):
        raise BadRow(f"{given[0]!r} is not a list of objects, each with an object as its 'function'")
    try:
        tools = [_without_nulls(tool) for tool in tools]
    except RecursionError:
        raise BadRow(f"{given[0]!r} is nested too deeply") from None
    _check_numbers(tools, repr(given[0]))
    return [{"type": "function", "function": _bare(t)} if "name" in t and "function" not in t else t for t in tools]


def _bare(tool: Fields) -> Fields:
    """A bare function, with Anthropic's `input_schema` as its parameters."""
    if "input_schema" not in tool or "parameters" in tool:
        return tool
    return {("parameters" if key == "input_schema" else key): value for key, value in tool.items()}


def _without_nulls(schema: Any) -> Any:
    """A schema without keys that are null, which Arrow or others have made of absent ones. A value may be null."""
    if isinstance(schema, list):
        return [_without_nulls(inside) for inside in schema]
    if not isinstance(schema, dict):
        return schema
    values = ("default", "const", "enum", "examples")
    kept = {key: inside for key, inside in schema.items() if inside is not None or key in values}
    return {key: inside if key in values else _without_nulls(inside) for key, inside in kept.items()}


def drop_strange_nulls(messages: list[Fields], tools: list[Fields] | None) -> None:
    """Removes null arguments that the called tool does not have: Arrow gives each call the arguments of all tools."""
    known = {}
    for tool in tools or []:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(function.get("name"), str) and isinstance(properties, dict):
            known[function["name"]] = properties
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        function = call.get("function", call)
        given, has = function["arguments"], known.get(function["name"])
        if has is not None and isinstance(given, dict):
            function["arguments"] = {key: value for key, value in given.items() if value is not None or key in has}


def read_calls(message: Fields, where: str, unused: dict[str, None]) -> list[Fields]:
    """The calls of a message, `tool_calls` or the older `function_call`, with arguments that are JSON. Raises
    BadRow.
    """
    calls, single = message.get("tool_calls") or [], message.get("function_call") or None
    if isinstance(calls, str):
        calls = _parsed(calls, f"{where}: 'tool_calls' is a string that is not JSON")
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise BadRow(f"{where}: 'tool_calls' is not a list of {{function: {{name, arguments}}}}")
    if isinstance(single, str):
        single = _parsed(single, f"{where}: 'function_call' is a string that is not JSON")
    if single is not None and not _is_call(single):
        raise BadRow(f"{where}: 'function_call' is not {{name, arguments}}")
    return [_call(call, where, unused) for call in [*calls, *([new_call(single)] if single else [])]]


def told_calls(value: Any, where: str, unused: dict[str, None]) -> list[Fields]:
    """Calls that are a turn of their own: `{name, arguments}` or a list of them, as objects or JSON. Raises BadRow."""
    calls = _parsed(value, f"{where}: the function call is not JSON") if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(_is_call(call) for call in calls):
        raise BadRow(f"{where}: a function call has no 'name'")
    return [_call({**new_call({}), **call} if "function" in call else new_call(call), where, unused) for call in calls]


def new_call(function: Fields) -> Fields:
    """A call that number_calls gives an id."""
    return {"id": "", "type": "function", "function": function}


def number_calls(messages: list[Fields]) -> None:
    """Gives new calls an id, and answers without an id that of the call that they answer, in order."""
    waiting: list[str] = []
    for i, message in enumerate(messages):
        for k, call in enumerate(message.get("tool_calls", [])):
            if call.get("id") == "":
                call["id"] = f"call{i % 1000:03d}{k % 100:02d}"  # Mistral's templates insist on nine characters
            waiting.append(call.get("id") or "")
        if not isinstance(message.get("tool_call_id", ""), (str, int)):
            raise BadRow(f"the 'tool_call_id' of message {i} is {kind_of(message['tool_call_id'])}, expected a string")
        if message["role"] == "tool":
            answered = message.get("tool_call_id")
            if answered in waiting:
                waiting.remove(answered)
            elif answered is None and waiting and (first := waiting.pop(0)):
                message["tool_call_id"] = first


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


_PARTS = ("id", "type", "index", "function")  # of a call; an index says its order


def _call(call: Fields, where: str, unused: dict[str, None]) -> Fields:
    """A call with `arguments`, {} if it has none. Llama's key is `parameters`."""
    function = dict(call.get("function", call))
    key = next((key for key in ("arguments", "parameters", "args") if function.get(key) is not None), "arguments")
    given = function.pop(key, None)
    given = {} if given is None or (isinstance(given, str) and not given.strip()) else given
    of = f"{where}: the arguments of a call of {function['name']!r}"
    held = _parsed(given, f"{of} are not JSON") if isinstance(given, str) else given
    if not isinstance(held, dict):
        raise BadRow(f"{of} are {kind_of(held)}, expected an object")
    _check_numbers(held, of)
    bare = "function" not in call
    if not bare and call.get("type") not in (None, "", "function"):
        raise BadRow(f"{where}: the type of a call is {call['type']!r}, expected 'function'")
    if not isinstance(call.get("id", ""), (str, int)):
        raise BadRow(f"{where}: the 'id' of a call is {kind_of(call['id'])}, expected a string")
    parts = (*(_PARTS if bare else ()), "name")
    unused |= dict.fromkeys(f"messages[].tool_calls[].function.{key}" for key in unread_keys(function, parts))
    function = {key: value for key, value in function.items() if key in parts} | {"arguments": given if held else {}}
    if bare:
        return function
    unused |= dict.fromkeys(f"messages[].tool_calls[].{key}" for key in unread_keys(call, _PARTS))
    return {key: value for key, value in call.items() if key in _PARTS} | {"function": function}


def _check_numbers(value: Any, what: str) -> None:
    """Raises BadRow if a value has NaN or infinity: Python reads and writes them, but no server takes them."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise BadRow(f"{what} hold NaN or Infinity, which is not JSON; null says that there is no value") from None
    except (RecursionError, TypeError):  # too deep, or a time of Arrow's: the template says so
        return


def _parsed(text: str, what: str) -> Any:
    try:
        return json_of(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} ({error})") from None

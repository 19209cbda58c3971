"""Anthropic's messages: calls and answers of tools as parts of the content, as turns with calls and turns of tools."""

from __future__ import annotations

from typing import Any

from trireme.engine.data.files.rows import BadRow, Fields

_CALL, _ANSWER = "tool_use", "tool_result"


def turns_of(turn: Any, where: str) -> list[Any]:
    """The turn, or what its parts `tool_use` and `tool_result` make of it. Raises BadRow where order would be lost."""
    parts = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(parts, list):
        return [turn]
    kinds = [str(part.get("type")) if isinstance(part, dict) else "" for part in parts]
    if not {_CALL, _ANSWER} & set(kinds):
        return [turn]
    rest = [part for part, kind in zip(parts, kinds, strict=True) if kind not in (_CALL, _ANSWER)]
    calls, answers = (
        [part for part, kind in zip(parts, kinds, strict=True) if kind == one] for one in (_CALL, _ANSWER)
    )
    if calls and answers:
        raise BadRow(f"{where} holds {_CALL} and {_ANSWER}: a call, and an answer to one")
    if calls:
        if _CALL in kinds[: len(rest)]:
            raise BadRow(f"{where} has a part after {_CALL}; calls come last")
        if turn.get("tool_calls"):
            raise BadRow(f"{where} holds {_CALL}, and has 'tool_calls' too")
        return [{**turn, "content": rest, "tool_calls": [_call(part) for part in calls]}]
    if _ANSWER in kinds[len(answers) :]:
        raise BadRow(f"{where} has a part before {_ANSWER}; answers come first")
    told = [_answer(part) for part in answers]
    return [*told, {**turn, "content": rest}] if rest else [*told[:-1], {**turn, **told[-1]}]


def _call(part: Fields) -> Fields:
    function = {"name": part.get("name"), "arguments": part.get("input")}
    told = {key: value for key, value in part.items() if key not in ("id", "type", "name", "input", "function")}
    return {"id": part.get("id") or "", "type": "function", "function": function, **told}


def _answer(part: Fields) -> Fields:
    told = {key: value for key, value in part.items() if key not in ("type", "tool_use_id", "content") and value}
    answered = {"tool_call_id": part["tool_use_id"]} if part.get("tool_use_id") else {}
    return {"role": "tool", "content": part.get("content") or "", **answered, **told}

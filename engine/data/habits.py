"""How a chat template writes turns, found by rendering test messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import NamedTuple

from trireme.engine.data.files.rows import BadRow, Fields
from trireme.engine.data.template import PROBE, THOUGHTS, Template

_FOLLOWS = 64  # characters
_ARGUMENT = "Qz8"
_ID = "abc123XYZ"  # Mistral's templates insist on nine characters
PROBE_TOOLS: list[Fields] = [
    {
        "type": "function",
        "function": {
            "name": PROBE,
            "description": PROBE,
            "parameters": {
                "type": "object",
                "properties": {PROBE: {"type": "string", "description": PROBE}},
                "required": [PROBE],
            },
        },
    }
]


class Habits(NamedTuple):
    """How a template writes the assistant's turns."""

    prompt: str | None  # opening after a user's message, or ""; None: refused
    lead: str | None  # beginning of turns; None: none could be written
    end: str  # after the words of the last turn
    inner: str  # after those of an earlier one
    arguments: type | None  # that a tool call writes as JSON: dict, str; None: either
    answers: bool  # of tools stand in the assistant's turns
    parts: bool  # content may be a list of parts
    follows: str  # behind a turn that is not the last


def habits(template: Template, tools: list[Fields] | None) -> Habits:
    """Finds how a template writes turns, without tools or with them."""
    asked: list[Fields] = [{"role": "user", "content": "?"}]
    before, end, inner, follows = [], "", "", ""
    for content in (PROBE, f"<think>\n{PROBE}\n</think>\n\n{PROBE}"):
        # twice: many templates write the last turn, with its thoughts, differently
        talk = [*asked, {"role": "assistant", "content": content}] * 2
        with suppress(BadRow):
            rendering = template.render(talk, tools)
            for turn, (start, stop) in rendering.turns:
                written = rendering.text[start:stop]
                if turn % 2 and PROBE in written:
                    before.append(written[: written.index(PROBE)])
                    end = written[written.rindex(PROBE) + len(PROBE) :]
                    inner = inner or end
                    follows = follows or rendering.text[stop : stop + _FOLLOWS]
    with suppress(BadRow):  # a prompt may close a thought that turns have, as in Hy3
        rendering = template.render([*asked, {"role": "assistant", "content": PROBE, THOUGHTS[0]: PROBE}], tools)
        openings = [rendering.text[start:stop].partition(PROBE) for turn, (start, stop) in rendering.turns if turn]
        before += [opening for opening, said, _ in openings if said]
    found = prompts(template, asked, tools)
    bare = [prompt.lstrip() for prompt in found]  # space between turns may be the last turn's
    begun = [prompt for prompt in (*found, *bare) if before and all(lead.startswith(prompt) for lead in before)]
    prompt = next(iter([*begun, *found]), None)
    lead = commonprefix([*before, prompt] if prompt else before) if before else None
    lead = lead and whole_marks(lead)
    arguments, answers = _arguments(template, asked, tools), _has_answers(template, asked, tools)
    return Habits(prompt, lead, end, inner, arguments, answers, _takes_parts(template, tools), follows)


def whole_marks(shared: str, of: str = "") -> str:
    """`shared` without a partial mark at its end, since <think> and <tool> share a <; unchanged if it is all of the
    text `of`.
    """
    return shared if shared == of else re.sub(r"</?[^<>]*$", "", shared)


def prompts(template: Template, messages: Sequence[Fields], tools: list[Fields] | None) -> list[str]:
    """Possible openings of the next message: what the prompt adds, or all after the last turn. Empty if the template
    refuses.

    Some templates always write something after the last turn, others change what is there.
    """
    try:
        asking = template.render(messages, tools, prompt=True)
        without = template.text(messages, tools)
    except BadRow:
        return []
    last = max((stop for _, (_, stop) in asking.turns), default=len(asking.text))
    found = [asking.text[last:]]
    if asking.text.startswith(without) and last < len(without) < len(asking.text):
        found.insert(0, asking.text[len(without) :])
    return found


def _has_answers(template: Template, asked: list[Fields], tools: list[Fields] | None) -> bool:
    """Whether a turn of the assistant contains the answer of the tool that it called."""
    for arguments in ({PROBE: 1}, json.dumps({PROBE: 1})):
        call = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
        called: Fields = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer: Fields = {"role": "tool", "name": "f", "tool_call_id": _ID, "content": f"{PROBE}a"}
        with suppress(BadRow):
            found = template.render([*asked, called, answer, {"role": "assistant", "content": "!"}], tools)
            return any(f"{PROBE}a" in found.text[a:b] for turn, (a, b) in found.turns if turn in (1, 3))
    return False


def _arguments(template: Template, asked: list[Fields], tools: list[Fields] | None) -> type | None:
    """The form of arguments, dict or str, that a tool call writes as plain JSON; None if both give the same text, or
    neither does.
    """
    texts = {}
    for arguments in ({_ARGUMENT: 1}, json.dumps({_ARGUMENT: 1})):
        call = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
        with suppress(BadRow):
            text = template.text([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], tools)
            if _ARGUMENT in text and f"'{_ARGUMENT}'" not in text and f'\\"{_ARGUMENT}' not in text:
                texts[type(arguments)] = text
    if len(set(texts.values())) == 1 and len(texts) == 2:
        return None
    return next((form for form in (dict, str) if form in texts), None)


def _takes_parts(template: Template, tools: list[Fields] | None) -> bool:
    """Whether the template writes the texts of a list of parts, and not the list itself."""
    parts = [{"type": "text", "text": f"{PROBE}{i}"} for i in (1, 2)]
    with suppress(BadRow):
        found = template.text([{"role": "user", "content": parts}], tools)
        for between in ("", "\n", " ", "\n\n"):
            joined = between.join(part["text"] for part in parts)
            if found == template.text([{"role": "user", "content": joined}], tools):
                return True
    return False

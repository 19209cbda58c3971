"""Conversations to text by the checkpoint's chat template, and the characters to train on.

These are the characters in {% generation %} blocks. If the template has none, they are the turns of the assistant,
without the opening that the prompt gives ("<|im_start|>assistant\\n") and white space at the end. An opening depends on
the role of the message before alone, so that time is linear in the number of turns.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from os.path import commonprefix
from typing import Any, NamedTuple

from trireme.engine.data.forms import Chat
from trireme.engine.data.messages import number_calls
from trireme.engine.data.read import BadRow, Fields, unread_keys
from trireme.engine.data.template import ALPACA, PROBE, THOUGHTS, Rendering, Span, Template, thoughts_of
from trireme.storage.untrusted import NAME

_LINES = re.compile(r"</?think>|\n")
_NO_THOUGHT = re.compile(r"\s*<think>\s*</think>")
_LINKS = ("role", "content", "tool_calls", "tool_call_id", "train")  # checked elsewhere, or order says the same
_TAKEN = ("messages", "tools", "documents", "add_generation_prompt")
_SETS = 64  # of variables
_TELLING = 64  # characters that are not in a text by chance
_FOLLOWS = 64  # characters
_ID = "abc123XYZ"  # Mistral's templates insist on nine characters
_TAGS = "give a template with {% generation %} tags: --chat-template FILE"
_FUNCTION = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}
_PROBE_TOOLS: list[Fields] = [{"type": "function", "function": _FUNCTION}]
_ASKED: Fields = {"role": "user", "content": "?"}
_SAID: Fields = {"role": "assistant", "content": "!"}


class Marked(NamedTuple):
    """The text of a conversation, and the spans of characters to train on."""

    text: str
    spans: list[Span]
    said: int = 0  # characters of messages to learn
    unwritten: int = 0  # of these, not in `text`: earlier thoughts, for instance
    beside: int = 0  # of the unwritten, those of messages with calls
    thoughtless: int = 0  # turns that learn to begin with an empty thought
    unread: tuple[str, ...] = ()  # keys that say something which the template does not read


class Habits(NamedTuple):
    """How a template writes the assistant's turns."""

    end: str  # after the words of the last turn
    inner: str  # after those of an earlier one
    follows: str  # behind a turn that is not the last
    arguments: type | None  # that a tool call writes as JSON: dict, str; None: either
    answers: bool  # of tools stand in the assistant's turns
    parts: bool  # content may be a list of parts


class ChatTemplate:
    """The default template, and one for tools if there is one."""

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str],
        date: str | None = None,
        stops: Sequence[str] = (),
        eos: str | None = None,
    ):
        """`sources`: templates by name, with "default". `date`: as of Template. `stops`: tokens at which the model's
        generation stops, `eos` among them. Raises as Template.
        """
        self._templates = {name: Template(source, variables, date) for name, source in sources.items()}
        self._habits: dict[bool, Habits] = {}
        self._openings: dict[tuple[bool, str], list[str]] = {}
        self._given: dict[str, ChatTemplate] = {}
        self._stops, self._eos = tuple(stops), eos or ""
        self.date = date if any("strftime_now" in source for source in sources.values()) else None  # that is written
        self._parts: list[Any] = [sources, variables, *([self.date] if self.date else [])]

    @property
    def speaks_alpaca(self) -> bool:
        """Whether rows of alpaca keep their own wording, with their input apart: the template's is that of Alpaca."""
        return any(ALPACA in source for source in self._parts[0].values())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides its texts."""
        stops = [[*self._stops, self._eos]] if self._last_end(None) else []
        return hashlib.sha256(json.dumps([*self._parts, *stops], sort_keys=True).encode()).hexdigest()

    def text(self, messages: Sequence[Fields], tools: list[Fields] | None = None, prompt: bool = False) -> str:
        """As Template.text."""
        return self._template(tools).text(messages, tools, prompt)

    def prompt(self, chat: Chat) -> str:
        """Messages to answer as `mark` writes them, with the opening of the answer. Raises BadRow."""
        if chat.variables:
            return self.given(chat.variables).prompt(chat._replace(variables=None))
        text, _ = self._written(chat, lambda messages: self.text(messages, chat.tools, prompt=True))
        _check_tools(chat.tools, text)
        return text

    def unread(self, variables: Mapping[str, Any], tools: list[Fields] | None) -> list[str]:
        """Variables that the template does not read, as chat_template_kwargs.NAME."""
        reads = self._template(tools).reads
        return [f"chat_template_kwargs.{name}" for name in variables if name not in reads]

    def given(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The same template with more variables. Raises BadRow if it may not have them."""
        if taken := [name for name in variables if name in _TAKEN or not name.isidentifier()]:
            what = "which is set by other means" if taken[0] in _TAKEN else "which is not a variable name"
            raise BadRow(f"'chat_template_kwargs' sets {taken[0]!r}, {what}; leave it out")
        try:
            key = json.dumps(variables, sort_keys=True)
        except RecursionError:
            raise BadRow("'chat_template_kwargs' is nested too deeply") from None
        if key not in self._given:
            if len(self._given) >= _SETS:
                self._given.clear()
            other = copy(self)
            other._templates = {name: template.given(variables) for name, template in self._templates.items()}
            other._habits, other._openings = {}, {}
            self._given[key] = other
        return self._given[key]

    # ------------------------------------------------ spans

    def mark(self, chat: Chat) -> Marked:
        """The text with the characters to train on. Raises BadRow if they are unclear."""
        if chat.variables:
            marked = self.given(chat.variables).mark(chat._replace(variables=None))
            return marked._replace(unread=(*marked.unread, *self.unread(chat.variables, chat.tools)))
        tools, template, habits = chat.tools, self._template(chat.tools), self._of(chat.tools)
        wanted = [m["role"] == "assistant" and m.get("train", True) for m in chat.messages]
        rendering, messages = self._written(chat, lambda messages: template.render(messages, tools))
        _check_tools(tools, rendering.text)
        turns = dict[int, list[Span]]()
        for turn, span in rendering.turns:
            turns.setdefault(turn, []).append(span)
        _check_written(template, messages, tools, rendering, turns)
        text = rendering.text
        if template.tags:
            context = [span for i, spans in turns.items() if not wanted[i] for span in spans]
            spans = [span for span in rendering.generated if not any(_within(span, other) for other in context)]
        else:
            if habits.answers and any(message["role"] == "tool" for message in messages):
                raise BadRow(
                    "the chat template writes answers of tools into the assistant's turns, so the assistant's text "
                    f"cannot be located; {_TAGS}"
                )
            result = [self._turn(i, messages, turns, text, tools) for i, yes in enumerate(wanted) if yes]
            spans = [span for span in result if span]
            if len(spans) < len(result):
                spans = self._places(messages, wanted, text, tools)
        _check_calls(messages, wanted, rendering, turns, template.tags)
        ending = self._last_end(tools)
        if ending and wanted[-1:] == [True] and spans[-1][1] == len(text) and not text.endswith(ending):
            text += ending  # no next turn: the model stops there, too
            spans[-1] = (spans[-1][0], len(text))
        counts = [_unwritten(messages[i], _cut(text, turns.get(i)) or text) for i, yes in enumerate(wanted) if yes]
        said, unwritten, beside = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
        thoughtless = sum(bool(_NO_THOUGHT.match(text, start, stop)) for start, stop in spans)
        return Marked(text, spans, said, unwritten, beside, thoughtless, _unread(messages, rendering))

    def _written(self, chat: Chat, render: Any) -> tuple[Any, list[Fields]]:
        """(what `render` makes of the messages, these): with lists of parts if the template takes them in all roles,
        with arguments of calls in its form, and with other ids of calls if it refuses those that are there.
        """
        habits = self._of(chat.tools)
        bare = [{k: v for k, v in m.items() if k != "train"} for m in chat.messages]
        written = [_with_calls(message, habits.arguments) for message in bare]
        messages = [_with_parts(message, False) for message in written]
        if habits.parts and any(isinstance(message.get("content"), list) for message in written):
            with suppress(BadRow):
                return render([_with_parts(message, True) for message in written]), messages
        try:
            return render(messages), messages
        except BadRow as error:
            renumbered, roles = number_calls(messages, anew=True), [message["role"] for message in messages]
            if renumbered == messages:
                twice = next((i for i in range(1, len(roles)) if roles[i] == roles[i - 1] in ("user", "assistant")), 0)
                joined = (
                    f"; messages {twice - 1} and {twice} are both of the {roles[twice]}: join them" if twice else ""
                )
                raise BadRow(f"{error}{joined}") from None
        return render(renumbered), renumbered

    def _turn(
        self, i: int, messages: list[Fields], turns: dict[int, list[Span]], text: str, tools: list[Fields] | None
    ) -> Span | None:
        """The characters of message i to train on; None if they are not found."""
        result = turns.get(i, [])
        if len(result) > 1:  # what is written within another message's turn, a call's name for instance, is that one's
            near = [span for j in (i - 1, i + 1) for span in turns.get(j, [])]
            result = [span for span in result if not any(_within(span, other) for other in near)] or result
        if len(result) != 1:
            return None
        (start, stop), habits = result[0], self._of(tools)
        written = text[start:stop]
        before = messages[i - 1]["role"] if i else "user"
        begun = next((opening for opening in self._opening(before, tools) if written.startswith(opening)), None)
        if begun is None and i == 0:
            words = written.find((messages[0].get("content") or "").strip() or "\0")
            ends = [written.find(o) + len(o) for o in self._opening(before, tools) if o and o in written]
            begun = written[: max((end for end in ends if end <= words), default=0)] or None
        if begun is None and not (before == "tool" and messages[i].get("tool_calls")):
            return None
        end = start + len(written.rstrip() if habits.end.strip() else written)
        if self._stopped_by_next(tools):
            end += next((len(stop) for stop in self._stops if text.startswith(stop, end)), 0)
        return start + len(begun or ""), end

    def _places(self, messages: list[Fields], wanted: list[bool], text: str, tools: list[Fields] | None) -> list[Span]:
        """The spans of all messages to train on, found by other words in their place. Raises BadRow."""
        i = next(i for i, yes in enumerate(wanted) if yes)
        unclear = BadRow(
            f"the chat template writes message {i} (assistant) so that its text cannot be located; {_TAGS}"
        )
        words = {i: (messages[i].get("content") or "").strip() for i, yes in enumerate(wanted) if yes}
        marks = {i: f"{PROBE}{i}{PROBE}" for i in words}
        if any(not said or messages[i].get("tool_calls") or thoughts_of(messages[i]) for i, said in words.items()):
            raise unclear
        with suppress(BadRow):
            other = self.text([{**m, "content": marks[i]} if i in marks else m for i, m in enumerate(messages)], tools)
            spans, end = list[Span](), self._of(tools).end.rstrip() or self._of(tools).inner.rstrip()
            for i, mark in marks.items():
                before, result, after = other.partition(mark)
                if not result:
                    raise unclear
                stop = len(before) + len(words[i]) + (len(end) if after.startswith(end) else 0)
                spans.append((len(before), stop))
                other = before + words[i] + after
            if other == text:
                return spans
        raise unclear

    # ------------------------------------------------ what a template does

    def _template(self, tools: list[Fields] | None) -> Template:
        return self._templates["tool_use" if tools is not None and "tool_use" in self._templates else "default"]

    def _of(self, tools: list[Fields] | None) -> Habits:
        key = tools is not None
        if key not in self._habits:
            self._habits[key] = _habits(self._template(tools), _PROBE_TOOLS if key else None)
        return self._habits[key]

    def _opening(self, role: str, tools: list[Fields] | None) -> list[str]:
        """Possible openings of an answer behind a message of that role, the likeliest first."""
        key = tools is not None, role
        if key not in self._openings:
            result = _openings(self._template(tools), role, _PROBE_TOOLS if key[0] else None)
            self._openings[key] = result if result or role == "user" else self._opening("user", tools)
        return self._openings[key]

    def _stopped_by_next(self, tools: list[Fields] | None) -> bool:
        """Whether the assistant's turns end with the opening of the next turn, as in GLM."""
        if not self._stops or self._template(tools).tags or self._of(tools).end.strip():
            return False
        return self._of(tools).follows.startswith(self._stops)

    def _last_end(self, tools: list[Fields] | None) -> str:
        """The token that the last turn lacks: the end token if others end with the next opening, or the end of the
        earlier turns; else "".
        """
        if self._template(tools).tags or self._of(tools).end.strip():
            return ""
        if self._stopped_by_next(tools):
            return self._eos
        return next((stop for stop in self._stops if self._of(tools).inner.strip() == stop), "")

    def notes(self, tools: bool) -> list[str]:
        """Notes for the user on conversations, all of which have `tools` or none."""
        probe_tools = _PROBE_TOOLS if tools else None
        notes, template = [], self._template(probe_tools)
        if self.date:
            notes.append(f"the chat template writes the date into conversations: {self.date} in the whole run")
        end, left = self._end(probe_tools)
        if not end and template.tags:
            what = f"leave out the end of the turn{f' ({left})' if left else ''}"
            notes.append(f"the chat template's {{% generation %}} tags {what}, so stopping is not learned")
        elif not end and not self._last_end(probe_tools):
            notes.append("the chat template ends the assistant's last message with no mark, so stopping is not learned")
        elif end and self._stops and not end.startswith(self._stops):
            stops = ", ".join(self._stops[:3])
            notes.append(
                f"the chat template ends answers with {end}, but generation stops at {stops}: add it to eos_token_id"
            )
        talk = [{"role": "system", "content": PROBE}, _ASKED, _SAID]
        with suppress(BadRow):  # system messages refused: not silent
            if PROBE not in template.text(talk, probe_tools).replace(str(probe_tools), ""):
                notes.append("the chat template leaves system messages out of conversations that are answered")
        return notes

    def _end(self, tools: list[Fields] | None) -> tuple[str, str]:
        """(what is trained after the words of a turn, what follows in the same line)."""
        if not self._template(tools).tags:
            return self._of(tools).end.strip().partition("\n")[0][:NAME], ""
        with suppress(BadRow):
            result = self._template(tools).render([_ASKED, {"role": "assistant", "content": PROBE}], tools)
            for start, stop in result.generated:
                end = result.text[start:stop].rpartition(PROBE)[2].strip()
                return end[:NAME], result.text[stop:].strip().partition("\n")[0][:NAME]
        return "?", ""


# ---------------------------------------------------------------- probes


def _call(arguments: Any) -> Fields:
    call = {"id": _ID, "type": "function", "function": {"name": PROBE, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _spoken() -> list[Fields]:
    """Turns of the assistant: plain, with thoughts inside and apart, a call."""
    inside = f"<think>\n{PROBE}\n</think>\n\n{PROBE}"
    plain = {"role": "assistant", "content": PROBE}
    return [plain, {**plain, "content": inside}, {**plain, THOUGHTS[0]: PROBE}]


def _openings(template: Template, role: str, tools: list[Fields] | None) -> list[str]:
    """Openings behind a message of that role: what the prompt adds, and what all turns begin with. Empty if the
    template takes no message of the role there.
    """
    answer = {"role": "tool", "name": PROBE, "tool_call_id": _ID, "content": "?"}
    befores = {
        "tool": [[_ASKED, _call(arguments), answer] for arguments in ({PROBE: 1}, json.dumps({PROBE: 1}))],
        "assistant": [[_ASKED, _SAID]],
    }.get(role, [[{**_ASKED, "role": role}]])
    for before in befores:
        written = list[str]()
        for said in _spoken():
            for after in ([], [_ASKED, _SAID]):
                with suppress(BadRow):
                    rendering = template.render([*before, said, *after], tools)
                    turns = [rendering.text[a:b] for turn, (a, b) in rendering.turns if turn == len(before)]
                    written += [turn[: turn.index(PROBE)] for turn in turns if PROBE in turn]
        prompts = _prompts(template, before, tools)
        if written or prompts:
            lead = commonprefix([*written, *(prompts[:1] if any(prompts) else [])]) if written else ""
            usual = [p for p in (*prompts, *(prompt.lstrip() for prompt in prompts)) if p]
            sure = [prompt for prompt in usual if all(turn.startswith(prompt) for turn in written)]
            lead = re.sub(r"</?[^<>]*$", "", lead) if lead not in prompts else lead  # <think> and <tool> share a <
            none = [""] if "" in prompts or (written and not commonprefix(written)) else []
            return [*dict.fromkeys([*sure, *usual, *([lead] if lead else []), *none])]
    return []


def _prompts(template: Template, messages: Sequence[Fields], tools: list[Fields] | None) -> list[str]:
    """Possible openings of the next message: what the prompt adds, or all after the last turn, since some templates
    always write something there. Empty if the template refuses.
    """
    try:
        asking = template.render(messages, tools, prompt=True)
        without = template.text(messages, tools)
    except BadRow:
        return []
    last = max((stop for _, (_, stop) in asking.turns), default=len(asking.text))
    result = [asking.text[last:]]
    if asking.text.startswith(without) and last < len(without) < len(asking.text):
        result.insert(0, asking.text[len(without) :])
    return result


def _habits(template: Template, tools: list[Fields] | None) -> Habits:
    """How a template writes turns, without tools or with them."""
    end, inner, follows = "", "", ""
    for said in _spoken()[:2]:
        with suppress(BadRow):  # twice: many templates write the last turn, with its thoughts, differently
            rendering = template.render([_ASKED, said, _ASKED, said], tools)
            for turn, (start, stop) in rendering.turns:
                written = rendering.text[start:stop]
                if turn % 2 and PROBE in written:
                    end = written[written.rindex(PROBE) + len(PROBE) :]
                    inner = inner or end
                    follows = follows or rendering.text[stop : stop + _FOLLOWS]
    return Habits(
        end, inner, follows, _arguments(template, tools), _has_answers(template, tools), _takes_parts(template, tools)
    )


def _arguments(template: Template, tools: list[Fields] | None) -> type | None:
    """The form of arguments, dict or str, that a tool call writes as plain JSON; None if both give the same text, or
    neither does.
    """
    texts, name = {}, "Qz8"
    for arguments in ({name: 1}, json.dumps({name: 1})):
        with suppress(BadRow):
            text = template.text([_ASKED, _call(arguments)], tools)
            if name in text and f"'{name}'" not in text and f'\\"{name}' not in text:
                texts[type(arguments)] = text
    if len(set(texts.values())) == 1 and len(texts) == 2:
        return None
    return next((form for form in (dict, str) if form in texts), None)


def _has_answers(template: Template, tools: list[Fields] | None) -> bool:
    """Whether a turn of the assistant contains the answer of the tool that it called."""
    answer = {"role": "tool", "name": PROBE, "tool_call_id": _ID, "content": "Qz9"}
    for arguments in ({PROBE: 1}, json.dumps({PROBE: 1})):
        with suppress(BadRow):
            result = template.render([_ASKED, _call(arguments), answer, _SAID], tools)
            return any("Qz9" in result.text[a:b] for turn, (a, b) in result.turns if turn in (1, 3))
    return False


def _takes_parts(template: Template, tools: list[Fields] | None) -> bool:
    """Whether the template writes the texts of a list of parts, and not the list itself."""
    texts = [f"{PROBE}{i}" for i in (1, 2)]
    with suppress(BadRow):
        result = template.text([_with_parts({**_ASKED, "content": texts}, True)], tools)
        joined = (between.join(texts) for between in ("", "\n", " ", "\n\n"))
        return any(result == template.text([{**_ASKED, "content": text}], tools) for text in joined)
    return False


# ---------------------------------------------------------------- messages as templates take them


def _with_calls(message: Fields, form: type | None) -> Fields:
    """A message whose calls have arguments as `form`, dict or str; None: as they are."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and form is dict:
            arguments = json.loads(arguments)
        elif not isinstance(arguments, str) and form is str:
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _with_parts(message: Fields, parts: bool) -> Fields:
    """A message whose texts are lists of parts, or joined as servers join them."""
    texts = message.get("content")
    if not isinstance(texts, list):
        return message
    return {**message, "content": [{"type": "text", "text": t} for t in texts] if parts else "\n".join(texts)}


# ---------------------------------------------------------------- checks


def _within(span: Span, other: Span) -> bool:
    return other[0] <= span[0] and span[1] <= other[1]


def _cut(text: str, spans: Sequence[Span] | None) -> str:
    return "".join(text[start:stop] for start, stop in spans or ())


def _check_calls(
    messages: list[Fields], wanted: list[bool], rendering: Rendering, turns: dict[int, list[Span]], tags: bool
) -> None:
    """Raises BadRow if a call is not written, or is to be trained and not in {% generation %}."""
    for i, message in enumerate(messages):
        if not message.get("tool_calls"):
            continue
        spans = turns.get(i) or [(0, len(rendering.text))]
        if wanted[i] and tags:
            spans = [block for block in rendering.generated if any(_within(block, span) for span in spans)]
        written = _cut(rendering.text, spans)
        if any(call["function"]["name"] not in written for call in message["tool_calls"]):
            raise BadRow(
                f"the chat template does not write the tool calls of message {i}; "
                "give one that does: --chat-template FILE"
            )


def _check_tools(tools: list[Fields] | None, text: str) -> None:
    for tool in tools or []:
        name = tool.get("function", tool).get("name")
        if isinstance(name, str) and name not in text:
            raise BadRow(
                f"the chat template does not write the tool {name!r}; give one that does: --chat-template FILE, "
                "or leave them out: --map unused=tools"
            )


def _check_written(
    template: Template,
    messages: list[Fields],
    tools: list[Fields] | None,
    rendering: Rendering,
    turns: dict[int, list[Span]],
) -> None:
    """Raises BadRow if a message is missing in the text. A message whose words are not in its turn, or that has none,
    is looked for once more, with words in its place that are nowhere else. Of a leading system message a note says so.
    """
    said = [(message.get("content") or "").strip() for message in messages]
    others = [i for i, m in enumerate(messages) if m["role"] != "assistant" and (i or m["role"] != "system")]
    absent = {i for i in others if i not in turns and said[i] and said[i] not in rendering.text}
    short = [i for i in others if i not in turns and said[i] and (len(said[i]) < _TELLING or said.count(said[i]) > 1)]
    doubtful = [*absent, *short, *(i for i in others if i in turns and said[i] not in _cut(rendering.text, turns[i]))]
    if doubtful:
        marks = {i: f"{PROBE}{i}{PROBE}" for i in doubtful}
        with suppress(BadRow):
            other = template.render(
                [{**m, "content": marks[i]} if i in marks else m for i, m in enumerate(messages)], tools
            )
            again = dict[int, str]()  # a turn may also have the words in another form, in capitals for instance
            for turn, (start, stop) in other.turns:
                again[turn] = again.get(turn, "") + other.text[start:stop]
            unsaid = (i for i in doubtful if marks[i] not in other.text)
            absent |= {i for i in unsaid if again.get(i, "") == _cut(rendering.text, turns.get(i))}
    for i in sorted(absent):
        role, ways = messages[i]["role"], "give one that does: --chat-template FILE"
        ways = f"call it 'system' in the data, or {ways}" if role == "developer" else ways
        raise BadRow(f"the chat template writes nothing for message {i} (role {role!r}); {ways}")


def _unread(messages: list[Fields], rendering: Rendering) -> tuple[str, ...]:
    """Keys of messages that the template does not read, as messages[].KEY."""
    result: dict[str, None] = {}
    for message, read in zip(messages, rendering.read, strict=True):
        thought = any(name in read for name in THOUGHTS)
        unread = (key for key in unread_keys(message, read) if key not in _LINKS)
        result |= dict.fromkeys(f"messages[].{key}" for key in unread if not (thought and key in THOUGHTS))
    return tuple(result)


def _unwritten(message: Fields, turn: str) -> tuple[int, int, int]:
    """(characters of a message, those that its turn lacks, of these the ones beside calls), compared by line."""
    texts = [message.get("content"), thoughts_of(message)]
    lines = [line.strip() for text in texts if isinstance(text, str) for line in _LINES.split(text)]
    lost = sum(len(line) for line in lines if line not in turn)
    return sum(map(len, lines)), lost, lost if message.get("tool_calls") else 0

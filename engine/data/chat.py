"""Conversations to text by the checkpoint's chat template, and the characters to train on.

These are the characters in {% generation %} blocks. If the template has none, they are the turns of the assistant,
without the opening that the prompt gives ("<|im_start|>assistant\\n") and white space at the end.
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

from trireme.engine.data.files.rows import BadRow, Fields, unread_keys
from trireme.engine.data.habits import PROBE_TOOLS, Habits, habits, prompts, whole_marks
from trireme.engine.data.template import PROBE, THOUGHTS, Rendering, Span, Template, thoughts_of
from trireme.storage.untrusted import NAME

_LINES = re.compile(r"</?think>|\n")
_LINKS = ("role", "content", "tool_calls", "tool_call_id")  # checked elsewhere, or order says the same
_TAKEN = ("messages", "tools", "documents", "add_generation_prompt")
_SETS = 64  # of variables
_NAMED = 3  # tokens
_TELLING = 64  # characters that are not in a text by chance


class Marked(NamedTuple):
    """The text of a conversation, and the spans of characters to train on."""

    text: str
    spans: list[Span]  # to train on
    said: int  # characters of messages to learn
    unwritten: int  # of these, not in `text`: earlier thoughts, for instance
    unread: tuple[str, ...] = ()  # keys that say something which the template does not read


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
        self._given: dict[str, ChatTemplate] = {}
        self._stops, self._eos = tuple(stops), eos or ""
        self.date = date if any("strftime_now" in source for source in sources.values()) else None  # that is written
        self._parts: list[Any] = [sources, variables, *([self.date] if self.date else [])]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides its texts."""
        stops = [[*self._stops, self._eos]] if self._stopped_by_next(None) or self._left_off(None) else []
        return hashlib.sha256(json.dumps([*self._parts, *stops], sort_keys=True).encode()).hexdigest()

    def text(self, messages: Sequence[Fields], tools: list[Fields] | None = None, prompt: bool = False) -> str:
        """As Template.text."""
        return self._template(tools).text(messages, tools, prompt)

    def asked(
        self, messages: list[Fields], tools: list[Fields] | None, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Messages to answer as `mark` writes them, with the opening of the answer. Raises BadRow."""
        if variables:
            return self.given(variables).asked(messages, tools)
        usual = [{k: v for k, v in m.items() if k != "train"} for m in messages]
        if all(isinstance(m.get("content"), str) and "tool_calls" not in m for m in usual):
            joined = parts = usual
        else:
            written = [_with_calls(m, self._of(tools).arguments) for m in usual]
            joined, parts = ([_with_parts(m, how) for m in written] for how in (False, self._of(tools).parts))
        text = ""
        if parts != joined:
            with suppress(BadRow):
                text = self.text(parts, tools, prompt=True)
        text = text or self.text(joined, tools, prompt=True)
        _check_tools(tools, text)
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
            other._habits = {}
            self._given[key] = other
        return self._given[key]

    def mark(
        self, messages: list[Fields], tools: list[Fields] | None, variables: Mapping[str, Any] | None = None
    ) -> Marked:
        """The text with the characters to train on; messages with "train": False have none. Raises BadRow if they are
        unclear.
        """
        if variables:
            marked = self.given(variables).mark(messages, tools)
            return marked._replace(unread=(*marked.unread, *self.unread(variables, tools)))
        wanted = [m["role"] == "assistant" and m.get("train", True) for m in messages]
        usual, template = self._of(tools), self._template(tools)
        written = [_with_calls({k: v for k, v in m.items() if k != "train"}, usual.arguments) for m in messages]
        messages = [_with_parts(m, False) for m in written]
        rendering = _rendered(template, [_with_parts(m, usual.parts) for m in written], messages, tools)
        _check_tools(tools, rendering.text)
        _check_written(template, messages, tools, rendering)
        if template.tags:
            others = [span for i, span in rendering.turns if not wanted[i]]
            spans = [(a, b) for a, b in rendering.generated if not any(x <= a and b <= y for x, y in others)]
        else:
            self._check_answers(messages, tools)
            spans = [self._turn(i, messages, tools, rendering) for i, yes in enumerate(wanted) if yes]
        _check_calls(messages, wanted, rendering, template.tags)
        text = rendering.text
        ending = self._eos if self._stopped_by_next(tools) else self._left_off(tools)
        if ending and wanted[-1:] == [True] and spans[-1][1] == len(text) and not text.endswith(ending):
            text += ending  # no next turn: the model stops there, too
            spans[-1] = (spans[-1][0], len(text))
        counts = [_unwritten(i, message, rendering) for i, message in enumerate(messages) if wanted[i]]
        said, lost = sum(said for said, _ in counts), sum(lost for _, lost in counts)
        return Marked(text, spans, said, lost, _unread(messages, rendering))

    def notes(self) -> list[str]:
        """Notes for the user."""
        found, template = [], self._template(None)
        if self.date:
            found.append(f"the chat template writes the date into conversations: {self.date} in the whole run")
        end, left = self._end()
        if not end and template.tags:
            what = f"leave out the end of the turn{f' ({left})' if left else ''}"
            found.append(f"the chat template's {{% generation %}} tags {what}, so stopping is not learned")
        elif not end and not self._stopped_by_next(None) and not self._left_off(None):
            found.append("the chat template ends the assistant's last message with no mark, so stopping is not learned")
        elif end and self._stops and not end.startswith(self._stops):
            stops = ", ".join(self._stops[:_NAMED])
            found.append(f"answers end in {end}, at which the model's generation does not stop ({stops}): stop there")
        talk = [("system", PROBE), ("user", "?"), ("assistant", "!")]
        with suppress(BadRow):  # system messages refused: not silent
            if PROBE not in template.text([{"role": role, "content": said} for role, said in talk], None):
                found.append("the chat template leaves system messages out of conversations that are answered")
        return found

    def _end(self) -> tuple[str, str]:
        """(what is trained after the words of a turn, what follows in the same line)."""
        if not self._template(None).tags:
            return self._of(None).end.strip().partition("\n")[0][:NAME], ""
        with suppress(BadRow):
            talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
            found = self._template(None).render(talk, None)
            for start, stop in found.generated:
                end = found.text[start:stop].rpartition(PROBE)[2].strip()
                return end[:NAME], found.text[stop:].strip().partition("\n")[0][:NAME]
        return "?", ""

    def _stopped_by_next(self, tools: list[Fields] | None) -> bool:
        """Whether the assistant's turns end with the opening of the next turn, as in GLM."""
        if not self._stops or self._template(tools).tags or self._of(tools).end.strip():
            return False
        return self._of(tools).follows.startswith(self._stops)

    def _left_off(self, tools: list[Fields] | None) -> str:
        """The token that ends the assistant's earlier turns, if the template does not write it after the last one."""
        if self._template(tools).tags or self._of(tools).end.strip():
            return ""
        return next((stop for stop in self._stops if self._of(tools).inner.strip() == stop), "")

    def _template(self, tools: list[Fields] | None) -> Template:
        return self._templates["tool_use" if tools is not None and "tool_use" in self._templates else "default"]

    def _of(self, tools: list[Fields] | None) -> Habits:
        given = tools is not None
        if given not in self._habits:
            self._habits[given] = habits(self._template(tools), PROBE_TOOLS if given else None)
        return self._habits[given]

    def _check_answers(self, messages: list[Fields], tools: list[Fields] | None) -> None:
        """Raises BadRow if answers of tools would be trained."""
        if any(message["role"] == "tool" for message in messages) and self._of(tools).answers:
            raise BadRow(
                "the chat template writes answers of tools into the assistant's turns, so the assistant's text "
                "cannot be located; give a template with {% generation %} tags: --chat-template FILE"
            )

    def _turn(self, i: int, messages: list[Fields], tools: list[Fields] | None, rendering: Rendering) -> Span:
        """The characters of message i to train on."""
        found = [span for turn, span in rendering.turns if turn == i]
        if len(found) > 1:  # what is written within another message's turn, a call's name for instance, is that one's
            others = [span for turn, span in rendering.turns if turn != i]
            found = [own for own in found if not any(a <= own[0] and own[1] <= b for a, b in others)] or found
        if not found and i == len(messages) - 1 and (span := self._last(messages, tools, rendering.text)):
            return span
        if len(found) != 1:
            what = "nothing" if not found else "several parts"
            raise BadRow(
                f"the chat template writes {what} for message {i} (assistant), so the assistant's text "
                "cannot be located; give a template with {% generation %} tags: --chat-template FILE"
            )
        start, stop = found[0]
        written = rendering.text[start:stop]
        end = start + len(written.rstrip() if self._of(tools).end.strip() else written)
        if self._stopped_by_next(tools):
            end += next((len(stop) for stop in self._stops if rendering.text.startswith(stop, end)), 0)
        return start + self._opening(i, messages, tools, written), end

    def _last(self, messages: list[Fields], tools: list[Fields] | None, text: str) -> Span | None:
        """The characters of the last message to train on, if it is written after the loop by what asks for an
        answer.
        """
        end = self._of(tools).end.strip()
        words = (messages[-1].get("content") or "").strip()
        with suppress(BadRow):
            before = self._template(tools).text(messages[:-1], tools)
            asking = self._template(tools).text(messages[:-1], tools, prompt=True)
            start = len(whole_marks(commonprefix([asking, text]), asking))
            stop = len(text.rstrip()) if end else len(text)
            learned = text[start:stop]
            if len(before) < start and text.startswith(before) and words in learned and end not in learned[: -len(end)]:
                return start, stop
        return None

    def _opening(self, i: int, messages: list[Fields], tools: list[Fields] | None, written: str) -> int:
        """Length of the opening of turn `written`."""
        usual = self._of(tools)
        if usual.prompt and written.startswith(usual.prompt):
            return len(usual.prompt)
        # It may depend on the message before, a tool's answer for instance.
        here = prompts(self._template(tools), messages[:i], tools) if i and usual.prompt != "" else []
        for prompt in here:
            if prompt and written.startswith(prompt):
                return len(prompt)
        heads = [prompt.removesuffix(usual.prompt or "") for prompt in here]  # before the usual opening
        for head in ("", *heads):
            if usual.lead and written.startswith(head + usual.lead):
                return len(head + usual.lead)
        if not i and (found := self._after_preface(usual.prompt or usual.lead or "", tools, written)):
            return found
        if "" in here or (usual.prompt == "" and usual.lead is not None and not usual.lead.strip()):
            return 0
        what = f"does not begin with {usual.lead!r}" if usual.lead else "does not begin with a recognizable header"
        raise BadRow(
            f"message {i} (assistant) {what} in the chat template's rendering; give a template with "
            "{% generation %} tags: --chat-template FILE"
        )

    def _after_preface(self, opening: str, tools: list[Fields] | None, written: str) -> int:
        """The end of the opening in the first turn, which may begin with what any first turn has: BOS, a system
        message. 0 if it is not there.
        """
        before = written[: written.find(opening)] if opening and opening in written else ""
        if before:
            with suppress(BadRow):
                other = self._template(tools).render([{"role": "user", "content": PROBE}], tools)
                start = next((a for turn, (a, _) in other.turns if turn == 0), len(other.text))
                return len(before + opening) if other.text[start:].startswith(before) else 0
        return 0


def _check_calls(messages: list[Fields], wanted: list[bool], rendering: Rendering, tags: bool) -> None:
    """Raises BadRow if a call is not written, or is to be trained and not in {% generation %}."""
    for i, message in enumerate(messages):
        turns = [span for turn, span in rendering.turns if turn == i] or [(0, len(rendering.text))]
        if wanted[i] and tags:
            turns = [g for g in rendering.generated if any(a <= g[0] and g[1] <= b for a, b in turns)]
        written = "".join(rendering.text[a:b] for a, b in turns)
        if any(_function(call)["name"] not in written for call in message.get("tool_calls", [])):
            raise BadRow(
                f"the chat template does not write the tool calls of message {i}; "
                "give one that does: --chat-template FILE"
            )


def _unread(messages: list[Fields], rendering: Rendering) -> tuple[str, ...]:
    """Keys of messages that the template does not read, as messages[].KEY."""
    found: dict[str, None] = {}
    for message, read in zip(messages, rendering.read, strict=True):
        thought = any(name in read for name in THOUGHTS)
        found |= dict.fromkeys(
            key for key in unread_keys(message, read) if key not in _LINKS and not (thought and key in THOUGHTS)
        )
    return tuple(f"messages[].{key}" for key in found)


def _unwritten(i: int, message: Fields, rendering: Rendering) -> tuple[int, int]:
    """(characters of message i, characters that its turn lacks), compared by line."""
    turn = "".join(rendering.text[a:b] for j, (a, b) in rendering.turns if j == i) or rendering.text
    texts = [message.get("content"), thoughts_of(message)]
    lines = [line.strip() for text in texts if isinstance(text, str) for line in _LINES.split(text)]
    return sum(map(len, lines)), sum(len(line) for line in lines if line not in turn)


def _with_calls(message: Fields, form: type | None) -> Fields:
    """A message whose tool calls have arguments as `form`, dict or str; None: as they are. They are JSON (calls.py)."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(_function(call))
        arguments = function["arguments"]
        if isinstance(arguments, str) and form is dict:
            function["arguments"] = json.loads(arguments)
        elif not isinstance(arguments, str) and form is str:
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _rendered(template: Template, parts: list[Fields], joined: list[Fields], tools: list[Fields] | None) -> Rendering:
    """The rendering of messages with lists of parts if the template takes them in all roles, else of joined ones."""
    if parts != joined:
        with suppress(BadRow):
            return template.render(parts, tools)
    return template.render(joined, tools)


def _with_parts(message: Fields, parts: bool) -> Fields:
    """A message whose texts are lists of parts, or joined as servers join them."""
    texts = message.get("content")
    if not isinstance(texts, list):
        return message
    return {**message, "content": [{"type": "text", "text": t} for t in texts] if parts else "\n".join(texts)}


def _check_tools(tools: list[Fields] | None, text: str) -> None:
    for tool in tools or []:
        name = tool.get("function", tool).get("name")
        if isinstance(name, str) and name not in text:
            raise BadRow(
                f"the chat template does not write the tool {name!r}; give one that does: --chat-template FILE, "
                "or leave them out: --map unused=tools"
            )


def _by_turn(rendering: Rendering) -> dict[int, str]:
    """What is written in the turn of each message that has one."""
    found = dict[int, str]()
    for turn, (start, stop) in rendering.turns:
        found[turn] = found.get(turn, "") + rendering.text[start:stop]
    return found


def _check_written(
    template: Template, messages: list[Fields], tools: list[Fields] | None, rendering: Rendering
) -> None:
    """Raises BadRow if a message is missing in the text; a leading system message that is missing gives a note."""
    written = _by_turn(rendering)
    said = [(message.get("content") or "").strip() for message in messages]
    apart = [
        i
        for i, message in enumerate(messages)
        if i not in written and said[i] and message["role"] != "assistant" and (i or message["role"] != "system")
    ]
    lost = [i for i in apart if said[i] not in rendering.text]
    doubtful = [i for i in apart if len(said[i]) < _TELLING or sum(said[i] in text for text in said) > 1]
    others = [i for i in written if messages[i]["role"] != "assistant" and (i or messages[i]["role"] != "system")]
    doubtful += [i for i in others if said[i] not in written[i]]  # changed, elsewhere, or not there
    if doubtful:
        marks = {i: f"{PROBE}{i}{PROBE}" for i in doubtful}  # words that are nowhere else
        marked = [{**m, "content": marks[i]} if i in marks else m for i, m in enumerate(messages)]
        with suppress(BadRow):
            other = template.render(marked, tools)
            turns = _by_turn(other)  # a turn may also have the words in another form, in capitals for instance
            unsaid = [i for i in doubtful if marks[i] not in other.text and turns.get(i) == written.get(i)]
            lost = sorted({*lost, *unsaid})
    if lost:
        role = messages[lost[0]]["role"]
        ways = "give one that does: --chat-template FILE"
        ways = f"call it 'system' in the data, or {ways}" if role == "developer" else ways
        raise BadRow(f"the chat template writes nothing for message {lost[0]} (role {role!r}); {ways}")


def _function(call: Fields) -> Fields:
    """Name and arguments of a tool call."""
    return call.get("function", call)

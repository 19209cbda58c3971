"""Conversations to text by the checkpoint's chat template, and the characters to train on.

These are the characters in {% generation %} blocks. If the template has none, they are the turns of the assistant,
without the opening that the prompt gives ("<|im_start|>assistant\\n") and white space at the end. An opening depends on
the role of the message before alone, so that time is linear in the number of turns.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from os.path import commonprefix
from typing import Any, NamedTuple

from trireme.engine.data.forms import Chat
from trireme.engine.data.messages import number_calls
from trireme.engine.data.read import BadRow, Fields, unread_keys
from trireme.engine.data.template import PROBE, THOUGHTS, Rendering, Span, Template, thoughts_of
from trireme.storage.untrusted import NAME

_PIECE = re.compile(r"<[^<>]*>|\[[^][]*\]|\w+|.", re.DOTALL)  # an opening ends with a mark or a word, not in it
_LINES = re.compile(r"</?think>|\n")
_NO_THOUGHT = re.compile(r"\s*<think>\s*</think>")
_LINKS = ("role", "content", "tool_calls", "tool_call_id", "train")  # checked elsewhere, or order says the same
_STYLES = 64  # of them; each has variables of its own
_ID = "abc123XYZ"  # Mistral's templates insist on nine characters
_FILE = "give one that does: --chat-template FILE"
_TAGS = "give a template with {% generation %} tags: --chat-template FILE"
_FUNCTION = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}
_TOOLS: list[Fields] = [{"type": "function", "function": _FUNCTION}]
_QUESTION: Fields = {"role": "user", "content": "?"}
_REPLY: Fields = {"role": "assistant", "content": "!"}
_PROBES = [  # turns of the assistant: plain, and with thoughts
    {"role": "assistant", "content": text} for text in (PROBE, f"<think>\n{PROBE}\n</think>\n\n{PROBE}")
]


class Marked(NamedTuple):
    """The text of a conversation, and the spans of characters to train on."""

    text: str
    spans: list[Span]
    # said: characters of messages to learn; unwritten: of these, not in `text`, as earlier thoughts; thoughtless: turns
    # that learn to begin with an empty thought
    counts: Mapping[str, int] = {}
    unread: tuple[str, ...] = ()  # keys that say something which the template does not write


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
        self.sources, self._stops, self._eos = sources, tuple(stops), eos or ""
        self._templates = {name: Template(source, variables, date) for name, source in sources.items()}
        self._styles: dict[tuple[bool, str], _Style] = {}
        self.reads = frozenset[str]().union(*(template.reads for template in self._templates.values()))
        self.date = date if any("strftime_now" in source for source in sources.values()) else None  # that is written
        parts = [sources, variables, self.date, stops, eos]  # all that decides the texts
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def prompt(self, chat: Chat) -> str:
        """Messages to answer as `mark` writes them, with the opening of the answer. Raises BadRow."""
        if chat.messages and chat.messages[-1]["role"] == "assistant":
            raise BadRow("the last message is the assistant's: leave it out, as it is to be written")
        rendering, _ = self._style(chat.tools, chat.variables).written(chat, prompt=True)
        return rendering.text

    def mark(self, chat: Chat) -> Marked:
        """The text with the characters to train on. Raises BadRow if they are unclear."""
        return self._style(chat.tools, chat.variables).mark(chat)

    def notes(self, tools: bool) -> list[str]:
        """Notes for the user on conversations, all of which have `tools` or none."""
        date = f"the chat template writes the date into conversations: {self.date} in the whole run"
        return [*([date] if self.date else []), *self._style(_TOOLS if tools else None).notes()]

    def _style(self, tools: list[Fields] | None, variables: Mapping[str, Any] | None = None) -> _Style:
        """The template for conversations with tools or none, with variables of a row."""
        key = tools is not None, json.dumps(variables or {}, sort_keys=True)
        if key not in self._styles:
            if len(self._styles) >= _STYLES:
                self._styles.clear()
            template = self._templates["tool_use" if key[0] and "tool_use" in self._templates else "default"]
            probes = _TOOLS if key[0] else None
            self._styles[key] = _Style(template.with_variables(variables or {}), probes, self._stops, self._eos)
        return self._styles[key]


class _Style:
    """How a template writes turns, without tools or with them, found by probes."""

    def __init__(self, template: Template, tools: list[Fields] | None, stops: tuple[str, ...], eos: str):
        """`tools`: those of probes."""
        self.template, self._tools, self._stops, self._eos = template, tools, stops, eos
        self._opening: dict[str, list[str]] = {}

    # ------------------------------------------------ spans

    def mark(self, chat: Chat) -> Marked:
        """As ChatTemplate.mark; the variables are known."""
        wanted = [m["role"] == "assistant" and m.get("train", True) for m in chat.messages]
        learned = [i for i, yes in enumerate(wanted) if yes]
        rendering, messages = self.written(chat)
        text, generated, tags = rendering.text, rendering.generated, self.template.tags
        self._check_written(messages, chat.tools, rendering, learned)
        astray = {i for i in generated if i < 0 or messages[i]["role"] != "assistant"}
        context = len(learned) < sum(m["role"] == "assistant" for m in messages)  # which a block of no turn may be of
        unclear = not generated.keys() >= {*learned} and (context if astray == {-1} else astray)
        if learned and (unclear or not (rendering.turns or generated)):
            raise _not_located(learned[0])
        if tags:
            spans = sorted(span for i in (-1, *learned) for span in generated.get(i, ()))
        else:
            spans = [span for i in learned for span in self._turn(i, messages, rendering)]
        for i, message in enumerate(messages):
            blocks = generated.get(i, generated.get(-1, ()))
            turn = rendering.joined(blocks) if tags and wanted[i] else rendering.written(i) or text
            if any(call["function"]["name"] not in turn for call in message.get("tool_calls", ())):
                raise _not_written(f"the tool calls of message {i}")
        if self.last_end and wanted[-1:] == [True] and spans[-1][1] == len(text) and not text.endswith(self.last_end):
            text += self.last_end  # no next turn: the model stops there, too
            spans[-1] = (spans[-1][0], len(text))
        counts = Counter(thoughtless=sum(bool(_NO_THOUGHT.match(text, start, stop)) for start, stop in spans))
        for i in learned:
            lines, turn = _lines(messages[i]), rendering.written(i) or text
            counts["said"] += sum(map(len, lines))
            counts["unwritten"] += sum(len(line) for line in lines if line not in turn)
        unread = [f"chat_template_kwargs.{name}" for name in chat.variables or () if name not in self.template.reads]
        return Marked(text, spans, counts, (*self._unread(messages, text), *unread))

    def written(self, chat: Chat, prompt: bool = False) -> tuple[Rendering, list[Fields]]:
        """(the rendering of the messages, these): with lists of parts if the template takes them in all roles, with
        arguments of calls in its form, and with other ids of calls if it refuses those that are there. Raises BadRow,
        also for tools that are not written.
        """
        bare = [{k: v for k, v in message.items() if k != "train"} for message in chat.messages]
        converted = [_with_calls(message, self._arguments) for message in bare]
        messages = [_with_parts(message, False) for message in converted]
        render, rendering = lambda messages: self._render(messages, chat.tools, prompt), None
        if self.template.takes_parts and messages != converted:
            with suppress(BadRow):
                rendering = render([_with_parts(message, True) for message in converted])
        try:
            rendering = rendering or render(messages)
        except BadRow as error:
            refused, roles = messages, [message["role"] for message in messages]
            messages = number_calls(refused, anew=True)
            if messages == refused:
                twice = next((i for i in range(1, len(roles)) if roles[i] == roles[i - 1] in ("user", "assistant")), 0)
                joined = f"; messages {twice - 1} and {twice} are both of the {roles[twice]}: join them"
                raise BadRow(f"{error}{joined if twice else ''}") from None
            rendering = render(messages)
        for tool in chat.tools or []:
            name = tool.get("function", tool).get("name")
            if isinstance(name, str) and name not in rendering.text:
                raise _not_written(f"the tool {name!r}", f"{_FILE}, or leave them out: --map unused=tools")
        return rendering, messages

    def _render(self, messages: list[Fields], tools: list[Fields] | None, prompt: bool = False) -> Rendering:
        """As Template.render; a last answer behind the loop, as in Nemotron Nano 2, is what follows the prompt."""
        rendering, last = self.template.render(messages, tools, prompt), len(messages) - 1
        if rendering.turns and last not in rendering.turns and messages[last]["role"] == "assistant":
            with suppress(BadRow):
                lead = self.template.text(messages[:-1], tools, prompt=True)
                if rendering.text.startswith(lead) and rendering.text != lead:
                    rendering.turns[last] = [(len(lead), len(rendering.text))]
        return rendering

    def _turn(self, i: int, messages: list[Fields], rendering: Rendering) -> list[Span]:
        """The characters of message i to train on; several spans where tools answer inside of its turn. Raises BadRow
        if they cannot be located.
        """
        parts, opening, before = rendering.parts(i), None, messages[i - 1]["role"] if i else "user"
        if parts and len(rendering.turns[i]) == 1 and (len(parts) == 1 or self._divides):
            text, (start, stop) = rendering.text, parts[0]
            written = text[start:stop]
            opening = next((opening for opening in self._openings(before) if written.startswith(opening)), None)
            if opening is None:  # behind a preface, or without any opening
                words = written.find((messages[i].get("content") or "").strip() or "\0")
                ends = [written.find(o) + len(o) for o in self._openings(before) if o and o in written]
                end = max((end for end in ends if end <= words), default=0)
                opening = written[:end] if end or words == 0 else None
            if opening is None and before == "tool" and messages[i].get("tool_calls"):
                opening = ""
        if opening is None:
            raise _not_located(i)
        parts[0] = start + len(opening), stop
        spans = [(a, b + next((len(s) for s in self._stops if text.startswith(s, b)), 0)) for a, b in parts]
        start, stop = parts[-1]
        if self._ends[0].strip() and stop == rendering.turns[i][0][1]:
            spans[-1] = start, start + len(text[start:stop].rstrip())
        return [*spans[:1], *(span for span in spans[1:] if span[0] < span[1])]

    # ------------------------------------------------ checks

    def _check_written(
        self, messages: list[Fields], tools: list[Fields] | None, rendering: Rendering, learned: list[int]
    ) -> None:
        """Raises BadRow if a message is missing in the text, or is in a turn to learn, as a tool's answer in its call.
        A message whose words are not in its turn is looked for once more, with words in its place that are nowhere
        else. Of a leading system message a note says so.
        """
        marks, changed = dict[int, str](), rendering
        for i, message in enumerate(messages):
            words = (message.get("content") or "").strip()
            leads = i == 0 and message["role"] == "system"
            if message["role"] != "assistant" and not leads and words not in rendering.written(i):
                marks[i] = f"{PROBE}{i}{PROBE}"
        if not marks:
            return
        absent = [i for i in marks if (messages[i].get("content") or "").strip() not in rendering.text]
        with suppress(BadRow):
            replaced = [m | ({"content": marks[i]} if i in marks else {}) for i, m in enumerate(messages)]
            changed = self.template.render(replaced, tools)
            # A turn may also have the words in another form, in capitals for instance.
            absent = [i for i in marks if marks[i] not in changed.text and changed.written(i) == rendering.written(i)]
        for i in learned if not self.template.tags else ():
            if any(mark in changed.written(i) for mark in marks.values()):
                raise _not_located(i)
        for i in absent[:1]:
            role = messages[i]["role"]
            ways = f"call it 'system' in the data, or {_FILE}" if role == "developer" else _FILE
            raise _not_written(f"message {i} (role {role!r})", ways)

    def _unread(self, messages: list[Fields], text: str) -> tuple[str, ...]:
        """Keys of messages that the template does not name, or whose words it does not write, as messages[].KEY."""
        names, result, first = self.template.names, dict[str, None](), messages[0]
        if first["role"] == "system" and (first.get("content") or "").strip() not in text:
            result["messages[0] (system)"] = None
        for message in messages:
            for key in unread_keys(message, _LINKS):
                value = message[key]
                if key in THOUGHTS:  # `mark` counts what is left out of them
                    read = not names.isdisjoint(THOUGHTS)
                else:
                    read = value.strip() in text if isinstance(value, str) else key in names
                if not read and f'"{key}"' not in text:  # of a message that is written as JSON
                    result[f"messages[].{key}"] = None
        return tuple(result)

    # ------------------------------------------------ notes

    def notes(self) -> list[str]:
        """Notes for the user, but for the date."""
        end, stops = self._ends[0].strip().partition("\n")[0][:NAME], ", ".join(self._stops[:3])
        if not end and not self.last_end:
            place = "inside its {% generation %} tags" if self.template.tags else "behind the assistant's last message"
            return [f"the chat template writes no end mark {place}, so stopping is not learned"]
        if end and self._stops and not end.startswith(self._stops):
            problem = f"the chat template ends answers with {end}, but generation stops at {stops}"
            return [f"{problem}: add it to eos_token_id"]
        return []

    # ------------------------------------------------ probes

    @cached_property
    def _ends(self) -> tuple[str, str]:
        """What the template writes behind the words of the assistant: in the last turn, inside {% generation %} if it
        has tags; and in an earlier one, or what follows it.
        """
        last = earlier = ""
        with suppress(BadRow):
            rendering = self._render([_QUESTION, _PROBES[0], _QUESTION, _PROBES[0]], self._tools)
            spans = rendering.generated if self.template.tags else rendering.turns
            for start, stop in (span for i in (-1, 1, 3) for span in spans.get(i, ())):
                _, probe, after = rendering.text[start:stop].rpartition(PROBE)
                if probe:
                    last = after
                    earlier = earlier or after.strip() or rendering.text[stop:]
        return last, earlier

    @cached_property
    def last_end(self) -> str:
        """The token that the last turn lacks: the end token if the opening of the next one ends others, as in GLM, or
        the end of the earlier turns; else "".
        """
        last, earlier = self._ends
        if self.template.tags or last.strip() or not earlier.startswith(self._stops):
            return ""
        return earlier if earlier in self._stops else self._eos

    @cached_property
    def _divides(self) -> bool:
        """Whether the answer of a tool that stands inside of its call's turn only comes between its parts."""
        for call, tool in _calls():
            with suppress(BadRow):
                whole = self.template.render([_QUESTION, call, tool, _REPLY], self._tools)
                alone = self.template.render([_QUESTION, call], self._tools).written(1)
                parts = [whole.text[start:stop] for start, stop in whole.parts(1)]
                if alone.startswith(parts[0]) and not "".join(parts[1:]).strip():
                    return True
        return False

    def _openings(self, role: str) -> list[str]:
        """Possible openings of an answer behind a message of that role, the likeliest first: what the prompt adds, and
        what all turns begin with. If the template takes no message of the role there, those behind the user.
        """
        if role not in self._opening:
            befores = {
                "tool": [[_QUESTION, *talk] for talk in _calls()],
                "assistant": [[_QUESTION, _REPLY]],
            }.get(role, [[{**_QUESTION, "role": role}]])
            openings = next(filter(None, map(self._openings_behind, befores)), [])
            self._opening[role] = openings if openings or role == "user" else self._openings("user")
        return self._opening[role]

    def _openings_behind(self, before: list[Fields]) -> list[str]:
        leads, openings, prompt, asked = list[str](), list[str](), None, ""
        with suppress(BadRow):
            asking = self.template.render(before, self._tools, prompt=True)
            without, asked = self.template.text(before, self._tools), asking.text
            last = max((stop for spans in asking.turns.values() for _, stop in spans), default=len(asked))
            adds = asked.startswith(without) and last < len(without) < len(asked)
            prompt = asked[len(without) if adds else last :]  # some templates always write something there
        for reply in _PROBES:
            for after in ([], [_QUESTION, _REPLY]):
                with suppress(BadRow):
                    rendering = self.template.render([*before, reply, *after], self._tools)
                    for start, stop in rendering.turns.get(len(before), ()):
                        lead, probe, _ = rendering.text[start:stop].partition(PROBE)
                        leads += [lead] if probe else []
                        openings += [asked[start:]] if probe and rendering.text.startswith(asked) else []
        pieces = commonprefix([_PIECE.findall(lead) for lead in ([*leads, prompt] if prompt else leads)])
        none = prompt == "" or (leads and not commonprefix(leads))
        return [*filter(None, [*openings, prompt, "".join(pieces)]), *([""] if none else [])]

    @cached_property
    def _arguments(self) -> type | None:
        """The form of arguments, dict or str, that a tool call writes as plain JSON; None if both give the same text,
        or neither does.
        """
        texts = list[str]()
        for call, _ in _calls():
            text = ""
            with suppress(BadRow):
                text = self.template.text([_QUESTION, call], self._tools)
            plain = _ARGUMENT in text and f"'{_ARGUMENT}'" not in text and f'\\"{_ARGUMENT}' not in text
            texts.append(text if plain else "")
        return None if texts[0] == texts[1] else dict if texts[0] else str


# ---------------------------------------------------------------- probes

_ARGUMENT = "Qz8"


def _calls() -> list[list[Fields]]:
    """A call and its answer, with arguments as an object and as JSON."""
    talks = list[list[Fields]]()
    for arguments in ({_ARGUMENT: 1}, json.dumps({_ARGUMENT: 1})):
        call = {"id": _ID, "type": "function", "function": {"name": PROBE, "arguments": arguments}}
        tool = {"role": "tool", "name": PROBE, "tool_call_id": _ID, "content": "?"}
        talks.append([{"role": "assistant", "content": "", "tool_calls": [call]}, tool])
    return talks


# ---------------------------------------------------------------- messages as templates take them


def _with_calls(message: Fields, form: type | None) -> Fields:
    """A message whose calls have arguments as `form`, dict or str; None: as they are."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and form is dict:
            arguments = json.loads(arguments)
        elif not isinstance(arguments, str) and form is str:
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _with_parts(message: Fields, parts: bool) -> Fields:
    """A message whose texts are lists of parts, or joined as servers join them."""
    texts = message.get("content")
    if not isinstance(texts, list):
        return message
    return {**message, "content": [{"type": "text", "text": t} for t in texts] if parts else "\n".join(texts)}


# ---------------------------------------------------------------- checks


def _not_written(what: str, ways: str = _FILE) -> BadRow:
    return BadRow(f"the chat template does not write {what}; {ways}")


def _not_located(i: int) -> BadRow:
    return BadRow(f"the chat template writes message {i} (assistant) so that its text cannot be located; {_TAGS}")


def _lines(message: Fields) -> list[str]:
    """What a message says, by line."""
    texts = [message.get("content"), thoughts_of(message)]
    return [line.strip() for text in texts if isinstance(text, str) for line in _LINES.split(text)]

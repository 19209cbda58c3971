"""Jinja chat templates as Hugging Face runs them, with the characters of each message.

The template is compiled so that it can write marks (Unicode noncharacters) around each turn of a loop over messages and
around {% generation %}. Without the marks it must give the plain rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from trireme.engine.data.messages import KEYS
from trireme.engine.data.read import BadRow, Fields
from trireme.storage.untrusted import shown

Span = tuple[int, int]  # characters [start, stop)

BUILT_IN = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
ALPACA = "Below is an instruction that describes a task"
PROBE = "Qz7"  # in no template
THOUGHTS = KEYS["reasoning_content"]  # `thinking` in gpt-oss, `reasoning` in Solar

_FIXED = ("messages", "tools", "documents", "add_generation_prompt")  # variables

# Turn N of a loop over messages: _TURN N _OF … _END; a generation block: _GENERATION … _DONE.
_TURN, _OF, _END, _GENERATION, _DONE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_MARK = re.compile(f"{_TURN}(\\d{{1,20}}){_OF}|{_END}|{_GENERATION}|{_DONE}")


class Rendering(NamedTuple):
    """A rendered conversation, with the characters of each message."""

    text: str
    turns: dict[int, list[Span]]  # of a message, what its turns of loops wrote, none empty
    generated: dict[int, list[Span]]  # the same inside {% generation %}; -1: of no message
    inside: Mapping[int, list[Span]] = {}  # turns of others in those of a message: Gemma 4's answers of tools

    def parts(self, message: int) -> list[Span]:
        """The turns of a message without those of others inside."""
        spans = (*self.turns.get(message, ()), *self.inside.get(message, ()))
        edges = sorted(edge for span in spans for edge in span)
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    def written(self, message: int) -> str:
        """What the turns of a message wrote, without those of others inside."""
        return self.joined(self.parts(message))

    def joined(self, spans: Iterable[Span]) -> str:
        return "".join(self.text[start:stop] for start, stop in spans)


class _Message(dict[str, Any]):
    """A message that loops recognize through any filter."""

    __slots__ = ("_number",)

    def __init__(self, message: Fields, number: int):
        super().__init__(message)
        self._number = number


class _Generation(jinja2.ext.Extension):
    """The {% generation %} tag. Its scope is its own, as a macro's."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marked = nodes.Name("__marked", "load")
        return nodes.CallBlock(self.call_method("_body", [marked]), [], [], body).set_lineno(line)

    def _body(self, marked: bool, caller: Callable[[], str]) -> str:
        return f"{_GENERATION}{caller()}{_DONE}" if marked else caller()


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _environment(date: str | None) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.globals["__turn_mark"] = _turn_mark
    # Of transformers: Jinja's own would escape <, > and & for HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    now = lambda: datetime.fromisoformat(date) if date else datetime.now()
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _turn_mark(value: Any, begins: bool) -> str:
    """The mark before or behind a turn of a loop over messages; "" of another loop."""
    return "" if not isinstance(value, _Message) else f"{_TURN}{value._number}{_OF}" if begins else _END


def _has_mark(value: Any) -> bool:
    """Whether a value may hold a mark that is none: the characters, or their escapes."""
    return r"\ufdd" in repr(value)


def _is_tag(block: nodes.Node) -> bool:
    """Whether a node is a {% generation %} block."""
    return isinstance(block, nodes.CallBlock) and isinstance(block.call.node, nodes.ExtensionAttribute)


def _takes_output(tree: nodes.Template) -> bool:
    """Whether a template may process what its loops or {% generation %} blocks write, as the filter of a block does."""
    for block in tree.find_all((nodes.Block, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)):
        if not _is_tag(block) and next(block.find_all((nodes.For, nodes.CallBlock)), None):
            return True
    return any(loop.recursive for loop in tree.find_all(nodes.For))


def _mark_loops(tree: nodes.Template) -> None:
    """Puts marks around the turns of loops over single values, or over their numbers in a list."""
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            value, mark = _value_of(loop, loop.target.name), nodes.Name("__turn_mark", "load")
            begin, end = (
                nodes.Output([nodes.Call(mark, [value, nodes.Const(begins)], [], None, None)]).set_lineno(loop.lineno)
                for begins in (True, False)
            )
            loop.body = [begin, *_with_ends(loop.body, end), end]


def _with_ends(body: Sequence[nodes.Node], end: nodes.Node) -> list[nodes.Node]:
    """The body of a loop with `end` before each {% break %} and {% continue %} of it, not of loops inside."""
    result = list[nodes.Node]()
    for node in body:
        for name in ("else_",) if isinstance(node, nodes.For) else ("body", "elif_", "else_"):
            if isinstance(inside := getattr(node, name, None), list):
                setattr(node, name, _with_ends(inside, end))
        result += [end, node] if isinstance(node, (nodes.Break, nodes.Continue)) else [node]
    return result


def _value_of(loop: nodes.For, name: str) -> nodes.Expr:
    """What a turn of a loop is about: the loop's variable `name`; of `for i in range(...)` the first X[i] of a list X
    outside.
    """
    calls = loop.iter.find_all(nodes.Call) if not isinstance(loop.iter, nodes.Call) else (loop.iter,)
    if any(isinstance(call.node, nodes.Name) and call.node.name == "range" for call in calls):
        inner = {result.name for part in loop.body for result in part.find_all(nodes.Name) if result.ctx == "store"}
        for item in (item for part in loop.body for item in part.find_all(nodes.Getitem)):
            by_number = isinstance(item.arg, nodes.Name) and item.arg.name == name
            if by_number and isinstance(item.node, nodes.Name) and item.node.name not in inner:
                return nodes.Getitem(nodes.Name(item.node.name, "load"), nodes.Name(name, "load"), "load")
    return nodes.Name(name, "load")


class Template:
    """A compiled template. Compiling raises jinja2.TemplateSyntaxError or any other Exception, rendering only BadRow.
    Limits: codec.py.
    """

    def __init__(self, source: str, variables: Mapping[str, str], date: str | None = None):
        """`variables`: bos_token, eos_token, ...; `date`: that of strftime_now, as 2026-03-31; None: today's."""
        self._variables, environment = dict[str, Any](variables), _environment(date)
        tree = environment.parse(source)
        self.tags = any(map(_is_tag, tree.find_all(nodes.CallBlock)))
        self.reads = jinja2.meta.find_undeclared_variables(tree)
        self.names = {node.attr for node in tree.find_all(nodes.Getattr)}  # of keys, wherever they are
        self.names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self._writes_marks = not _has_mark(tree) and not _takes_output(tree)  # as they are, so that they can be read
        _mark_loops(tree)
        self._compiled = jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)
        self.takes_parts, self._parts = self._probe_parts()

    def with_variables(self, variables: Mapping[str, Any]) -> Template:
        """The same template with more variables. Raises BadRow for those that are not a user's."""
        if fixed := [name for name in variables if name in _FIXED]:
            raise BadRow(f"'chat_template_kwargs' sets {fixed[0]!r}, which is not a variable: leave it out")
        template = copy(self)
        template._variables = self._variables | dict(variables)
        return template

    def render(self, messages: Sequence[Fields], tools: list[Fields] | None, prompt: bool = False) -> Rendering:
        """As `text`, with turns, of which none are located if the template processes its own output, or a message has a
        mark. Raises BadRow if the template refuses.
        """
        rendering = _read_marks(self.text(messages, tools, prompt, marked=True))
        if self._writes_marks and not _has_mark((messages, tools, self._variables)):
            return rendering
        text = self.text(messages, tools, prompt)
        return rendering if rendering.text == text else Rendering(text, {}, {})

    def _probe_parts(self) -> tuple[bool, tuple[bool, bool, bool]]:
        """Whether a user's text may be a list of parts; whether texts have to be, (of others, of the assistant); and
        whether thoughts have to be a part.
        """

        def writes(*messages: Fields) -> bool:
            with suppress(BadRow):
                text = self._rendered(messages)
                return PROBE in text and not re.search("['\"]type['\"]: ", text)
            return False

        say = lambda role, content, **thoughts: {"role": role, "content": content, **thoughts}
        takes = writes(say("user", [_part(PROBE)]))
        user = takes and not writes(say("user", PROBE))
        before = say("user", [_part("?")] if user else "?")
        assistant = not writes(before, say("assistant", PROBE)) and writes(before, say("assistant", [_part(PROBE)]))
        thought = say("assistant", [_part("!")] if assistant else "!", **dict.fromkeys(THOUGHTS, PROBE))
        parts = say("assistant", [_part(PROBE, "thinking"), _part("!")])
        return takes, (user, assistant, not writes(before, thought) and writes(before, parts))

    def _as_taken(self, message: Fields) -> Fields:
        """A message with its thoughts under all names that templates read, and with a list of parts as its text if the
        template takes no other form.
        """
        user, assistant, as_part = self._parts
        content, thoughts = message.get("content"), thoughts_of(message)
        message = message if thoughts is None else message | dict.fromkeys(THOUGHTS, thoughts)
        as_list = assistant if message.get("role") == "assistant" else user
        if not (thoughts and as_part) and not (as_list and isinstance(content, str)):
            return message
        parts = [_part(content)] if isinstance(content, str) and content else content or []
        return message | {"content": [*([_part(thoughts, "thinking")] if thoughts and as_part else []), *parts]}

    def text(
        self, messages: Sequence[Fields], tools: list[Fields] | None, prompt: bool = False, marked: bool = False
    ) -> str:
        """The text of messages. `prompt`: with the opening of the next one; `marked`: with marks around turns. Raises
        BadRow if the template refuses.
        """
        taken = [self._as_taken(message) for message in messages]
        for filled in ({}, {"content": None}):  # of calls alone: some templates ask for null, or for a text
            with suppress(BadRow):
                return self._rendered([filled | message for message in taken], tools, prompt, marked)
        return self._rendered([{"content": ""} | message for message in taken], tools, prompt, marked)

    def _rendered(
        self, taken: Sequence[Fields], tools: list[Fields] | None = None, prompt: bool = False, marked: bool = False
    ) -> str:
        messages = [_Message(message, i) for i, message in enumerate(taken)] if marked else taken
        fixed = dict(zip(_FIXED, (messages, tools, None, prompt), strict=True))
        try:
            return self._compiled.render(self._variables | fixed | {"__marked": marked})
        except Exception as error:  # the template may have written it, at any length
            reason = shown(" ".join(str(error)[:10_000].split()), 500) or type(error).__name__
            verb = "refuses" if isinstance(error, jinja2.exceptions.TemplateError) else "fails on"
            raise BadRow(f"the chat template {verb} it: {reason}") from None


def _part(text: str, kind: str = "text") -> Fields:
    return {"type": kind, kind: text}


def thoughts_of(message: Fields) -> Any:
    """Thoughts of a message apart from its content, or None."""
    return next((message[name] for name in THOUGHTS if message.get(name) is not None), None)


def _read_marks(marked: str) -> Rendering:
    parts = list[str]()
    turns, generated, inside = dict[int, list[Span]](), dict[int, list[Span]](), dict[int, list[Span]]()
    open_turns, open_blocks = list[tuple[int, int]](), list[tuple[int, int]]()  # (message, start)
    position = end = 0
    for mark in _MARK.finditer(marked):
        parts.append(marked[end : mark.start()])
        position, end = position + mark.start() - end, mark.end()
        if mark[1]:
            open_turns.append((int(mark[1]), position))
        elif mark[0] == _GENERATION:
            open_blocks.append((open_turns[-1][0] if open_turns else -1, position))
        else:
            written, unclosed = (generated, open_blocks) if mark[0] == _DONE else (turns, open_turns)
            message, start = unclosed.pop() if unclosed else (0, position)
            if start < position:
                written.setdefault(message, []).append((start, position))
                if written is turns and open_turns and open_turns[-1][0] != message:
                    inside.setdefault(open_turns[-1][0], []).append((start, position))
    parts.append(marked[end:])
    nested = {span for spans in inside.values() for span in spans}  # no turns where there are others: a tool's name
    turns = {i: [span for span in spans if span not in nested] or spans for i, spans in turns.items()}
    return Rendering("".join(parts), turns, generated, inside)

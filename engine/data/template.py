"""Jinja chat templates as Hugging Face runs them, and marked renderings that say which message wrote which characters.

A marked rendering is the plain one with marks in it: characters that Unicode keeps for internal use. They are put in by
the compiled template itself, where a loop over messages begins and ends a turn and around {% generation %}; so they
travel with the text, and without them the text must be the plain rendering again, or it is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from trireme.engine.data.rows import BadRow
from trireme.storage.untrusted import shown

Span = tuple[int, int]  # characters [start, stop)

# Noncharacters: turn N is _TURN N _OF … _END, a generation block _GENERATION … _DONE.
_TURN, _OF, _END, _GENERATION, _DONE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_MARK = re.compile(f"{_TURN}(\\d+){_OF}|{_END}|{_GENERATION}|{_DONE}")


class Rendering(NamedTuple):
    """A conversation as text, and where in it things are."""

    text: str
    turns: list[tuple[int, Span]]  # (message, characters that its turn of the loop wrote), none of them empty
    generated: list[Span]  # inside {% generation %}


class _Message(dict):
    """A message that a loop can recognise, whatever list or filter it came through."""

    __slots__ = ("_turn",)


class _Generation(jinja2.ext.Extension):
    """The {% generation %} tag: its body, between marks when they are wanted. Its scope is its own, as a macro's is."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller) -> str:
        return caller()


class _MarkedGeneration(_Generation):
    @staticmethod
    def _body(caller) -> str:
        return f"{_GENERATION}{caller()}{_DONE}"


def _raise(message: str):
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """json.dumps: Jinja's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(generation: type) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _begin_turn(value: Any) -> str:
    return f"{_TURN}{value._turn}{_OF}" if isinstance(value, _Message) else ""


def _end_turn(value: Any) -> str:
    return _END if isinstance(value, _Message) else ""


def _mark_loops(tree: nodes.Template) -> None:
    """Has every loop over single values begin and end its turns with marks."""
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            begin, end = (
                nodes.Output(
                    [nodes.Call(nodes.Name(f, "load"), [nodes.Name(loop.target.name, "load")], [], None, None)]
                )
                for f in ("__begin_turn", "__end_turn")
            )
            loop.body = [begin.set_lineno(loop.lineno), *loop.body, end.set_lineno(loop.lineno)]


class Template:
    """One compiled chat template. Raises jinja2.TemplateSyntaxError where it does not compile, and what else a program
    of a stranger may raise while it is folded and compiled: any Exception.

    Whatever it does when it runs is a BadRow. Time and memory have no limit here: see sandbox.py.
    """

    def __init__(self, source: str, variables: Mapping[str, str]):
        """`variables`: bos_token, eos_token and their like."""
        self.source, self._variables = source, dict(variables)
        self.tags = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._plain = _environment(_Generation).from_string(source)
        environment = _environment(_MarkedGeneration)
        environment.globals.update(__begin_turn=_begin_turn, __end_turn=_end_turn)
        tree = environment.parse(source)
        _mark_loops(tree)
        self._marked = jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)

    def text(self, messages: Sequence[dict], tools: list[dict] | None, prompt: bool = False) -> str:
        """The rendering; `prompt` adds what asks for the assistant's next message."""
        return self._run(self._plain, messages, tools, prompt)

    def render(self, messages: Sequence[dict], tools: list[dict] | None, prompt: bool = False) -> Rendering:
        """The rendering, and where its turns are. BadRow where the template refuses the messages."""
        text = self.text(messages, tools, prompt)
        if any(mark in text for mark in (_TURN, _OF, _END, _GENERATION, _DONE)):
            raise BadRow("holds one of the characters U+FDD0 to U+FDD4, which no text may use")
        marked = []
        for i, message in enumerate(messages):
            marked.append(_Message(message))
            marked[-1]._turn = i
        rendering = _read_marks(self._run(self._marked, marked, tools, prompt))
        if rendering.text != text:
            raise BadRow("the chat template works on its own output, so it cannot be told who wrote what")
        return rendering

    def _run(self, template, messages: Sequence[dict], tools: list[dict] | None, prompt: bool) -> str:
        try:
            return template.render(
                messages=[_with_reasoning(m) for m in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except jinja2.exceptions.TemplateError as error:
            raise BadRow(f"the chat template refuses it: {_one_line(error)}") from None
        except MemoryError:
            raise BadRow("the chat template takes more memory on it than it may") from None
        except Exception as error:
            raise BadRow(f"the chat template fails on it: {_one_line(error)}") from None


def _with_reasoning(message: dict) -> dict:
    """The message, its thoughts under every name that templates read (reasoning_content; thinking, in gpt-oss)."""
    names = ("reasoning_content", "thinking", "reasoning")
    thoughts = next((message[name] for name in names if message.get(name) is not None), None)
    if thoughts is None:
        return message
    copy = type(message)({"thinking": thoughts, **message, "reasoning_content": thoughts})
    if isinstance(message, _Message):
        copy._turn = message._turn
    return copy


def _read_marks(marked: str) -> Rendering:
    """Takes the marks out of a marked rendering."""
    parts: list[str] = []
    turns: list[tuple[int, Span]] = []
    generated: list[Span] = []
    open_turns: list[tuple[int, int]] = []
    open_blocks: list[int] = []
    at = done = 0
    for mark in _MARK.finditer(marked):
        parts.append(marked[done : mark.start()])
        at, done = at + mark.start() - done, mark.end()
        if mark[1] is not None:
            open_turns.append((int(mark[1]), at))
        elif mark[0] == _END and open_turns:
            message, start = open_turns.pop()
            turns.append((message, (start, at)))
        elif mark[0] == _GENERATION:
            open_blocks.append(at)
        elif open_blocks:
            generated.append((open_blocks.pop(), at))
    parts.append(marked[done:])
    # What is left in open_turns was ended early, by {% continue %}: how far it goes is not known, so it is no turn.
    return Rendering("".join(parts), [turn for turn in sorted(turns) if turn[1][0] < turn[1][1]], sorted(generated))


def _one_line(error: Exception) -> str:
    """What the error says; the template may have written it, at any length."""
    return shown(" ".join(str(error)[:10_000].split()), 500) or type(error).__name__

"""Jinja chat templates as Hugging Face runs them, with the characters of each message.

The template is compiled a second time to write marks (Unicode noncharacters) around each turn of a loop over messages
and around {% generation %}. Without the marks it must give the plain rendering.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from trireme.engine.data.read import BadRow, Fields
from trireme.storage.untrusted import shown

Span = tuple[int, int]  # characters [start, stop)

# Turn N: _TURN N _OF … _END; a generation block: _GENERATION … _DONE.
_TURN, _OF, _END, _GENERATION, _DONE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_MARK = re.compile(f"{_TURN}(\\d+){_OF}|{_END}|{_GENERATION}|{_DONE}")
PROBE = "Qz7"  # in no template


class Rendering(NamedTuple):
    """A rendered conversation, with the characters of each turn."""

    text: str
    turns: list[tuple[int, Span]]  # (message, what its turn of the loop wrote), none empty
    generated: list[Span]  # inside {% generation %}
    read: tuple[set[str], ...] = ()  # keys of each message that were looked at


class _Message(dict[str, Any]):
    """A message that loops recognize through any filter, and that notes which of its keys are read."""

    __slots__ = ("read", "turn")

    def __init__(self, message: Fields, turn: int, read: set[str]):
        super().__init__(message)
        self.turn, self.read = turn, read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        self.read.update(self)
        return super().values()

    def __repr__(self) -> str:
        self.read.update(self)
        return super().__repr__()

    def __iter__(self) -> Any:  # so that a copy reads by key
        return super().__iter__()


class _Generation(jinja2.ext.Extension):
    """The {% generation %} tag. Its scope is its own, as a macro's."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


class _MarkedGeneration(_Generation):
    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return f"{_GENERATION}{caller()}{_DONE}"


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers' filter: Jinja's own would escape <, > and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_no_json
    )


def _no_json(value: Any) -> NoReturn:
    if isinstance(value, jinja2.Undefined):
        raise jinja2.exceptions.TemplateError(f"it writes {value._undefined_name!r}, which is undefined")
    raise TypeError(f"{type(value).__name__} is not JSON")


def _environment(generation: type[_Generation], date: str | None) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    now = lambda: datetime.fromisoformat(date) if date else datetime.now()
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _begin_turn(value: Any) -> str:
    return f"{_TURN}{value.turn}{_OF}" if isinstance(value, _Message) else ""


def _end_turn(value: Any) -> str:
    return _END if isinstance(value, _Message) else ""


def _mark_loops(tree: nodes.Template) -> None:
    """Puts marks around the turns of loops over single values, or over their numbers in a list."""
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            value = _value_of(loop, loop.target.name)
            begin, end = (
                nodes.Output([nodes.Call(nodes.Name(f, "load"), [value], [], None, None)]).set_lineno(loop.lineno)
                for f in ("__begin_turn", "__end_turn")
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
        own = {result.name for part in loop.body for result in part.find_all(nodes.Name) if result.ctx == "store"}
        for item in (item for part in loop.body for item in part.find_all(nodes.Getitem)):
            by_number = isinstance(item.arg, nodes.Name) and item.arg.name == name
            if by_number and isinstance(item.node, nodes.Name) and item.node.name not in own:
                return nodes.Getitem(nodes.Name(item.node.name, "load"), nodes.Name(name, "load"), "load")
    return nodes.Name(name, "load")


class Template:
    """A compiled template. Compiling raises jinja2.TemplateSyntaxError or any other Exception, rendering only BadRow.
    Limits: sandbox.py.
    """

    def __init__(self, source: str, variables: Mapping[str, str], date: str | None = None):
        """`variables`: bos_token, eos_token, ...; `date`: that of strftime_now, as 2026-03-31; None: today's."""
        self.source, self._variables = source, dict[str, Any](variables)
        self._random = "random" in source or "lipsum" in source
        self.tags = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._plain = _environment(_Generation, date).from_string(source)
        environment = _environment(_MarkedGeneration, date)
        environment.globals.update(__begin_turn=_begin_turn, __end_turn=_end_turn)
        tree = environment.parse(source)
        self.reads = jinja2.meta.find_undeclared_variables(tree)
        _mark_loops(tree)
        self._marked = jinja2.Template.from_code(environment, environment.compile(tree), environment.globals)

    def given(self, variables: Mapping[str, Any]) -> Template:
        """The same template with more variables."""
        other = copy(self)
        other._variables = self._variables | dict(variables)
        return other

    def text(self, messages: Sequence[Fields], tools: list[Fields] | None, prompt: bool = False) -> str:
        """`prompt`: adds the opening of the next message. Raises BadRow if the template refuses."""
        return self._run(self._plain, messages, tools, prompt)

    def render(self, messages: Sequence[Fields], tools: list[Fields] | None, prompt: bool = False) -> Rendering:
        """Raises BadRow if the template refuses, or turns are unclear."""
        text = self.text(messages, tools, prompt)
        if any(mark in text for mark in (_TURN, _OF, _END, _GENERATION, _DONE)):
            raise BadRow("holds one of the characters U+FDD0 to U+FDD4, which no text may use")
        marked = [_Message(message, i, set()) for i, message in enumerate(messages)]
        rendering = _read_marks(self._run(self._marked, marked, tools, prompt))
        if rendering.text != text:
            raise BadRow("the chat template processes its own output, so the text of each role cannot be located")
        return rendering._replace(read=tuple(message.read for message in marked))

    @cached_property
    def _lists(self) -> tuple[bool, bool, bool]:
        """Whether texts have to be lists of parts, (of the assistant, of others), and whether thoughts have to be a
        part.
        """

        def holds(role: str, content: Any, **more: str) -> bool:
            talk = [{"role": "user", "content": [_part("?")] if others else "?"}] if role == "assistant" else []
            values = {"tools": None, "documents": None, "add_generation_prompt": False} | self._variables
            with suppress(Exception):
                text = self._plain.render(messages=[*talk, {"role": role, "content": content, **more}], **values)
                return PROBE in text and not re.search("['\"]type['\"]: ", text)
            return False

        others = False
        others = not holds("user", PROBE) and holds("user", [_part(PROBE)])
        mine = not holds("assistant", PROBE) and holds("assistant", [_part(PROBE)])
        apart = holds("assistant", [_part("!")] if mine else "!", **dict.fromkeys(THOUGHTS, PROBE))
        return mine, others, not apart and holds("assistant", [_part(PROBE, "thinking"), _part("!")])

    def _as_taken(self, message: Fields) -> Fields:
        """A message with a list of parts as its text, if the template takes no other form."""
        mine, others, thoughts = self._lists
        listed = mine if dict.get(message, "role") == "assistant" else others
        content, held = dict.get(message, "content"), thoughts_of(message) if thoughts else None
        if not (held or (listed and isinstance(content, str))):
            return message
        parts = [_part(content)] if isinstance(content, str) and content else content or []
        parts = [*([_part(held, "thinking")] if held else []), *parts]
        if isinstance(message, _Message):
            message.read.update(THOUGHTS if held else ())
            return _Message({**dict(dict.items(message)), "content": parts}, message.turn, message.read)
        return message | {"content": parts}

    def _run(
        self, template: jinja2.Template, messages: Sequence[Fields], tools: list[Fields] | None, prompt: bool
    ) -> str:
        taken = [self._as_taken(_with_reasoning(message)) for message in messages]
        try:
            return self._rendered(template, taken, tools, prompt)
        except BadRow:
            if all("content" in message for message in taken):
                raise
            for content in (None, ""):  # of calls alone: many templates ask for null, others for a text
                with suppress(BadRow):
                    return self._rendered(template, [_with_content(m, content) for m in taken], tools, prompt)
            raise

    def _rendered(
        self, template: jinja2.Template, taken: Sequence[Fields], tools: list[Fields] | None, prompt: bool
    ) -> str:
        if self._random:
            random.seed(repr(taken))  # equal each time; the template has this process to itself
        try:
            return template.render(
                messages=taken, tools=tools, documents=None, add_generation_prompt=prompt, **self._variables
            )
        except jinja2.exceptions.TemplateError as error:
            raise BadRow(f"the chat template refuses it: {_one_line(error)}") from None
        except MemoryError:
            raise BadRow("the chat template takes more memory on it than it may") from None
        except Exception as error:
            raise BadRow(f"the chat template fails on it: {_one_line(error)}") from None


THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def _part(text: str, kind: str = "text") -> Fields:
    return {"type": kind, kind: text}


def thoughts_of(message: Fields) -> Any:
    """Thoughts of a message apart from its content, or None."""
    return next((dict.get(message, name) for name in THOUGHTS if dict.get(message, name) is not None), None)


def _with_content(message: Fields, content: str | None) -> Fields:
    """A message with that content if it has none."""
    if "content" in message:
        return message
    made = {**dict(dict.items(message)), "content": content}
    return _Message(made, message.turn, message.read) if isinstance(message, _Message) else made


def _with_reasoning(message: Fields) -> Fields:
    """A message with its thoughts under all names that templates read: `thinking` in gpt-oss, `reasoning` in Solar."""
    thoughts = thoughts_of(message)
    if thoughts is None:
        return message
    named = dict(dict.items(message)) | dict.fromkeys(THOUGHTS, thoughts)
    return _Message(named, message.turn, message.read) if isinstance(message, _Message) else named


def _read_marks(marked: str) -> Rendering:
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
    return Rendering("".join(parts), [turn for turn in sorted(turns) if turn[1][0] < turn[1][1]], sorted(generated))


def _one_line(error: Exception) -> str:
    """An error as one line. The template may have written it, at any length."""
    return shown(" ".join(str(error)[:10_000].split()), 500) or type(error).__name__


# ---------------------------------------------------------------- built in

_BUILT_IN = """\
{{- bos_token }}
{%- if tools %}{{ BEGIN('tools') + tools | tojson + END + '\\n' }}{% endif %}
{%- for message in messages %}
    {{- BEGIN(message.role) }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>' + (call.function or call) | tojson + '</tool_call>' }}
            {%- endfor %}
            {{- END }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + END }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ BEGIN('assistant') }}{% endif %}
"""


def _built_in(begin: tuple[str, str], end: str) -> str:
    return re.sub(r"BEGIN\(([^)]*)\)", rf"'{begin[0]}' + \1 + '{begin[1]}'", _BUILT_IN).replace("END", end)


_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
# The others have no system role: it stands before the first question.
_TURNS = """\
{{- bos_token }}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set before = first + '\\n\\n' if first and loop.index0 == 1 else '' %}
        {{- ASKED(before + message.content | trim) }}
    {%- elif message.role == 'assistant' %}
        {{- 'BEGIN' }}
        {%- generation %}{{- message.content | trim + END }}{%- endgeneration %}
        {{- 'AFTER' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'BEGIN' }}{% endif %}
"""
ALPACA = "Below is an instruction that describes a task"
_ALPACA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content }}
{%- else %}
    {{- 'WORDS. Write a response that appropriately completes the request.' }}
{%- endif %}
{{- '\\n\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '### Instruction:\\n' + message.content + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '### Response:\\n' }}
        {%- generation %}{{- message.content + eos_token }}{%- endgeneration %}
        {{- '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}
""".replace("WORDS", ALPACA)


def _turns(asked: tuple[str, str], begin: str, end: str, after: str) -> str:
    text = re.sub(r"ASKED\((.*)\) }}", rf"'{asked[0]}' + \1 + '{asked[1]}' }}}}", _TURNS)
    return text.replace("BEGIN", begin).replace("END", end).replace("AFTER", after)


BUILT_IN = {  # plain: the tokenizer's end token follows every message
    "plain": _built_in(("<|", r"|>\\n"), "eos_token"),
    "chatml": _built_in(("<|im_start|>", r"\\n"), "'<|im_end|>'"),
    "llama3": _LLAMA3,
    "gemma": _turns(
        (r"<start_of_turn>user\\n", r"<end_of_turn>\\n"), r"<start_of_turn>model\n", "'<end_of_turn>'", r"\n"
    ),
    "mistral": _turns(("[INST] ", " [/INST]"), " ", "eos_token", ""),
    "alpaca": _ALPACA,
}

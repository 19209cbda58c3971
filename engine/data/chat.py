"""Conversations to text through the checkpoint's chat template, and the characters to train on.

They are those in {% generation %} blocks; in a template without, assistant turns, less the opening that the prompt
gives ("<|im_start|>assistant\\n") and white space at the end.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jinja2

from trireme.engine.data.rows import BadRow, Fields
from trireme.engine.data.template import (
    PROBE,
    PROBE_TOOLS,
    Habits,
    Rendering,
    Span,
    Template,
    habits,
    prompts,
    thoughts_of,
)
from trireme.engine.data.tokens import Tokenizer
from trireme.models.config import InputError
from trireme.storage.companions import TEMPLATES

# For models without a template; the tokenizer's end token follows every message.
PLAIN = """\
{{- bos_token }}
{%- if tools %}{{ '<|tools|>\\n' + tools | tojson + eos_token + '\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>' + (call.function or call) | tojson + '</tool_call>' }}
            {%- endfor %}
            {{- eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

# Each message ends with <|im_end|>; the assistant's is learned.
CHATML = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>' + (call.function or call) | tojson + '</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_LINES = re.compile(r"</?think>|\n")
BUILT_IN = {"plain": PLAIN, "chatml": CHATML}


class Marked(NamedTuple):
    text: str
    spans: list[Span]  # to train on
    said: int  # characters of messages to learn
    unwritten: int  # of these, not in `text`: earlier thoughts, for instance


class ChatTemplate:
    """The default template, and one for tools, if any."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], date: str | None = None):
        """`sources`: templates by name, with "default". `date`: as of Template. Raises as Template."""
        self._templates = {name: Template(source, variables, date) for name, source in sources.items()}
        self._habits: dict[bool, Habits] = {}
        self.date = date if any("strftime_now" in source for source in sources.values()) else None  # that is written
        parts = [sources, variables, *([self.date] if self.date else [])]
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def text(self, messages: Sequence[Fields], tools: list[Fields] | None = None, prompt: bool = False) -> str:
        """As Template.text."""
        return self._template(tools).text(messages, tools, prompt)

    def mark(self, messages: list[Fields], tools: list[Fields] | None) -> Marked:
        """Learns no message with "train": False. Raises BadRow where the characters to learn are unclear."""
        wanted = [m["role"] == "assistant" and m.get("train", True) for m in messages]
        form = self._of(tools).arguments
        messages = [_with_calls({k: v for k, v in m.items() if k != "train"}, form) for m in messages]
        template = self._template(tools)
        rendering = template.render(messages, tools)
        _check_tools(tools, rendering.text)
        _check_written(messages, rendering)
        if template.tags:
            spans = _tagged(rendering, wanted)
        else:
            self._check_answers(messages, tools)
            spans = [self._turn(i, messages, tools, rendering) for i, yes in enumerate(wanted) if yes]
        counts = [_unwritten(i, message, rendering) for i, message in enumerate(messages) if wanted[i]]
        return Marked(rendering.text, spans, sum(said for said, _ in counts), sum(lost for _, lost in counts))

    def notes(self) -> list[str]:
        """Warnings for the user."""
        found, template = [], self._template(None)
        if self.date:
            found.append(f"the chat template writes the date into conversations: {self.date} in the whole run")
        if not template.tags and not self._of(None).end.strip():
            found.append("the chat template ends the assistant's last message with no mark, so stopping is not learned")
        talk = [("system", PROBE), ("user", "?"), ("assistant", "!")]
        with suppress(BadRow):  # system messages refused: not silent
            if PROBE not in template.text([{"role": role, "content": said} for role, said in talk], None):
                found.append("the chat template leaves system messages out of conversations that are answered")
        return found

    def _template(self, tools: list[Fields] | None) -> Template:
        return self._templates["tool_use" if tools is not None and "tool_use" in self._templates else "default"]

    def _of(self, tools: list[Fields] | None) -> Habits:
        given = tools is not None
        if given not in self._habits:
            self._habits[given] = habits(self._template(tools), PROBE_TOOLS if given else None)
        return self._habits[given]

    def _check_answers(self, messages: list[Fields], tools: list[Fields] | None) -> None:
        """Raises BadRow where answers of tools would be learned."""
        if any(message["role"] == "tool" for message in messages) and self._of(tools).answers:
            raise BadRow(
                "the chat template writes what tools answer into the assistant's turns, so what to train on cannot be "
                "told; a template with {% generation %} tags says it (--chat-template FILE)"
            )

    def _turn(self, i: int, messages: list[Fields], tools: list[Fields] | None, rendering: Rendering) -> Span:
        """Characters of message i to learn."""
        found = [span for turn, span in rendering.turns if turn == i]
        if len(found) != 1:
            what = "nothing" if not found else "several parts"
            raise BadRow(
                f"the chat template writes {what} for message {i} (assistant), so what to train on cannot be told; "
                "a template with {% generation %} tags says it (--chat-template FILE)"
            )
        start, stop = found[0]
        written = rendering.text[start:stop]
        if any(_function(call)["name"] not in written for call in messages[i].get("tool_calls", [])):
            raise BadRow(
                f"the chat template does not write the tool calls of message {i}; one that does: --chat-template FILE"
            )
        end = start + len(written.rstrip() if self._of(tools).end.strip() else written)
        return start + self._opening(i, messages, tools, written), end

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
        if usual.lead and written.startswith(usual.lead):
            return len(usual.lead)
        if "" in here or (usual.prompt == "" and usual.lead is not None and not usual.lead.strip()):
            return 0
        what = f"does not begin with {usual.lead!r}" if usual.lead else "begins with no opening that can be told"
        raise BadRow(
            f"message {i} (assistant) {what} in the chat template's rendering; a template with {{% generation %}} tags "
            "says what to train on (--chat-template FILE)"
        )


def _tagged(rendering: Rendering, wanted: list[bool]) -> list[Span]:
    """{% generation %} blocks in wanted turns."""
    unwanted = [span for i, span in rendering.turns if not wanted[i]]
    return [(a, b) for a, b in rendering.generated if not any(start <= a and b <= stop for start, stop in unwanted)]


def _unwritten(i: int, message: Fields, rendering: Rendering) -> tuple[int, int]:
    """(characters of message i, those missing in its turn), by line."""
    turn = "".join(rendering.text[a:b] for j, (a, b) in rendering.turns if j == i) or rendering.text
    texts = [message.get("content"), thoughts_of(message)]
    lines = [line.strip() for text in texts if isinstance(text, str) for line in _LINES.split(text)]
    return sum(map(len, lines)), sum(len(line) for line in lines if line not in turn)


def _with_calls(message: Fields, form: type | None) -> Fields:
    """Arguments of tool calls as `form`, dict or str; None: as given."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(_function(call))
        arguments = function.get("arguments", {})
        try:
            if isinstance(arguments, str) and form is dict:
                function["arguments"] = json.loads(arguments)
            elif not isinstance(arguments, str) and form is str:
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"the arguments of a call of {function['name']!r} are not JSON ({error})") from None
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _check_tools(tools: list[Fields] | None, text: str) -> None:
    for tool in tools or []:
        name = tool.get("function", tool).get("name")
        if isinstance(name, str) and name not in text:
            raise BadRow(
                f"the chat template does not write the tool {name!r}; one that does: --chat-template FILE, "
                "or leave them out: --map unused=tools"
            )


def _check_written(messages: list[Fields], rendering: Rendering) -> None:
    """Raises BadRow where a message is missing; for a leading system message there is a note."""
    written = {turn for turn, _ in rendering.turns}
    for i, message in enumerate(messages if written else ()):
        role, said = message["role"], (message.get("content") or "").strip()
        if i not in written and said not in rendering.text and role != "assistant" and (i or role != "system"):
            raise BadRow(
                f"the chat template writes nothing for message {i} (role {role!r}); one that does: --chat-template FILE"
            )


def _function(call: Fields) -> Fields:
    """A tool call's name and arguments."""
    return call.get("function", call)


def read_choice(choice: str) -> tuple[str, str]:
    """--chat-template, a file or name of BUILT_IN, as (name, template). Raises InputError."""
    return choice, BUILT_IN.get(choice) or _read(Path(choice), "--chat-template ")


def load_template(
    tokenizer: Tokenizer, choice: tuple[str, str] | None = None, date: str | None = None
) -> ChatTemplate | None:
    """`choice`, of read_choice, or the checkpoint's template, if any. Raises InputError, MemoryError."""
    variables = tokenizer.specials
    if choice:
        where, source = choice
        sources = {"default": source}
        if where in BUILT_IN:
            variables = variables | _ends(tokenizer)
    else:
        sources, where = _own_templates(tokenizer)
    if not sources:
        return None
    if "default" not in sources:
        raise InputError(
            f"{where} has chat templates {', '.join(sources)}, but no default. Name a file: --chat-template FILE."
        )
    try:
        return ChatTemplate(sources, variables, date)
    except jinja2.TemplateSyntaxError as error:
        what = f"line {error.lineno}: {error.message}"
    except MemoryError:
        raise
    except Exception as error:  # compiling runs constant code
        what = f"{type(error).__name__}: {error}"
    raise InputError(f"{where}: the chat template does not compile, {what}.")


def standalone(tokenizer: Tokenizer, choice: tuple[str, str]) -> str:
    """The template for other programs: a built-in one sets its tokens."""
    where, source = choice
    ends = _ends(tokenizer) if where in BUILT_IN else {}
    return "".join(f"{{%- set {name} = {json.dumps(token)} %}}\n" for name, token in ends.items()) + source


def _ends(tokenizer: Tokenizer) -> dict[str, str]:
    """Built-in templates' variables: tokens that the tokenizer puts around texts."""
    bos = "".join(tokenizer.core.id_to_token(i) or "" for i in tokenizer.bos)
    return {"bos_token": bos, "eos_token": tokenizer.eos_token or ""}


def _own_templates(tokenizer: Tokenizer) -> tuple[dict[str, str], str]:
    """(templates by name, their file)."""
    path = tokenizer.folder / "chat_template.jinja"
    if path.is_file():
        more = sorted(p for p in (tokenizer.folder / TEMPLATES).glob("*.jinja") if p.is_file())
        return {"default": _read(path), **{p.stem: _read(p) for p in more}}, str(path)
    where = str(tokenizer.folder / "tokenizer_config.json")
    written = tokenizer.config.get("chat_template")
    if isinstance(written, str):
        written = {"default": written}
    elif isinstance(written, list):
        named = [(t.get("name"), t.get("template")) for t in written if isinstance(t, dict)]
        written = dict(named) if all(isinstance(name, str) for name, _ in named) else named
    written = written or {}
    if not isinstance(written, dict) or not all(isinstance(source, str) for source in written.values()):
        raise InputError(f"{where}: 'chat_template' is neither a string nor a list of named templates.")
    return written, where


def _read(path: Path, what: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InputError(f"{what}{path}: {reason}.") from None

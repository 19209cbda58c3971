"""Conversations to text through the checkpoint's chat template, and which characters of it are trained on.

There is one rendering of a conversation. Its template says what is the assistant's, with {% generation %}; where it
does not, a turn of the assistant is what the template wrote for that message, without the opening that the prompt
gives ("<|im_start|>assistant\\n") and without white space after the mark that ends it ("<|im_end|>").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path

import jinja2

from trireme.engine.data.rows import BadRow
from trireme.engine.data.template import Rendering, Span, Template
from trireme.engine.data.tokens import Tokenizer
from trireme.models.config import InputError
from trireme.storage.companions import TEMPLATES

# For models that have no template: roles on lines of their own, the tokenizer's end token after every message.
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


class ChatTemplate:
    """The chat template of a tokenizer: one, or a default and one for conversations with tools."""

    def __init__(self, sources: dict[str, str], variables: dict[str, str]):
        """sources: template by name, "default" among them. Raises what Template raises."""
        self._parts = {name: _Marker(Template(source, variables)) for name, source in sources.items()}
        self.fingerprint = hashlib.sha256(json.dumps([sources, variables], sort_keys=True).encode()).hexdigest()

    def text(self, messages: Sequence[dict], tools: list[dict] | None = None, prompt: bool = False) -> str:
        """The rendering; `prompt` adds what asks for the assistant's next message. BadRow where it is refused."""
        return self._part(tools).template.text(messages, tools, prompt)

    def spans(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[Span]]:
        """(rendering, its characters to train on). Messages with "train": False are left out. BadRow where unclear."""
        return self._part(tools).spans(messages, tools)

    def notes(self) -> list[str]:
        """What the user should know about this template."""
        return self._parts["default"].notes()

    def _part(self, tools: list[dict] | None) -> _Marker:
        return self._parts["tool_use" if tools is not None and "tool_use" in self._parts else "default"]


_PROBE = "Qz7"  # stands for what somebody says; no template contains it


class _Marker:
    """Finds the assistant's characters in the renderings of one template."""

    def __init__(self, template: Template):
        self.template = template

    def spans(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[Span]]:
        wanted = [m["role"] == "assistant" and m.get("train", True) for m in messages]
        messages = [self._adapted({k: v for k, v in m.items() if k != "train"}) for m in messages]
        rendering = self.template.render(messages, tools)
        self._check_tools(tools, rendering.text)
        self._check_written(messages, rendering)
        if self.template.tags:
            return rendering.text, self._tagged(rendering, wanted)
        spans = []
        for i, is_wanted in enumerate(wanted):
            if is_wanted:
                spans.append(self._turn(i, messages, tools, rendering))
        return rendering.text, spans

    def notes(self) -> list[str]:
        found = []
        if not self.template.tags and not self._end.strip():
            found.append("the chat template ends the assistant's last message with no mark, so stopping is not learned")
        talk = [("system", _PROBE), ("user", "?"), ("assistant", "!")]
        try:
            if _PROBE not in self.template.text([{"role": role, "content": said} for role, said in talk], None):
                found.append("the chat template leaves system messages out of conversations that are answered")
        except BadRow:
            pass  # it refuses them, which is not silent
        return found

    def _tagged(self, rendering: Rendering, wanted: list[bool]) -> list[Span]:
        """The {% generation %} blocks, but those in turns that are not wanted."""
        unwanted = [span for i, span in rendering.turns if not wanted[i]]
        inside = lambda span, other: other[0] <= span[0] and span[1] <= other[1]
        return [span for span in rendering.generated if not any(inside(span, turn) for turn in unwanted)]

    def _turn(self, i: int, messages: list[dict], tools: list[dict] | None, rendering: Rendering) -> Span:
        """The characters that the assistant says in message i."""
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
        end = start + len(written.rstrip() if self._end.strip() else written)
        return start + self._opening(i, messages, tools, written), end

    def _opening(self, i: int, messages: list[dict], tools: list[dict] | None, written: str) -> int:
        """How many characters of the turn `written` are given to the model rather than written by it."""
        if self._prompt and written.startswith(self._prompt):
            return len(self._prompt)
        # What the prompt is may depend on what came before, a tool's answer for instance.
        here = self._prompt_after(messages[:i], tools) if self._prompt and i else None
        if here and written.startswith(here):
            return len(here)
        if written.startswith(self._lead):
            return len(self._lead)
        if here == "" or not self._lead.strip():
            return 0
        raise BadRow(f"message {i} (assistant) does not begin with {self._lead!r} in the chat template's rendering")

    def _prompt_after(self, messages: list[dict], tools: list[dict] | None) -> str | None:
        """What asks for the next message: all that the template writes after the last turn. None where it refuses."""
        try:
            rendering = self.template.render(messages, tools, prompt=True)
        except BadRow:
            return None
        return rendering.text[max((stop for _, (_, stop) in rendering.turns), default=len(rendering.text)) :]

    # ------------------------------------------------ what the template does, found with a conversation of our own

    @cached_property
    def _prompt(self) -> str:
        """The prompt for the assistant after a user's message; empty where the template has none."""
        return self._prompt_after([{"role": "user", "content": "?"}], None) or ""

    @cached_property
    def _probed(self) -> tuple[list[str], str]:
        """(what stands before the assistant's words in its turn, said in several ways; what stands after them)."""
        before, after = [], ""
        for content in (_PROBE, f"<think>\n{_PROBE}\n</think>\n\n{_PROBE}"):
            # Twice, because many templates write the last turn, with its thoughts, in another way than those before it.
            talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}] * 2
            try:
                rendering = self.template.render(talk, None)
            except BadRow:
                continue
            for turn, (start, stop) in rendering.turns:
                written = rendering.text[start:stop]
                if turn % 2 and _PROBE in written:
                    before.append(written[: written.index(_PROBE)])
                    after = written[written.rindex(_PROBE) + len(_PROBE) :]
        return before, after

    @property
    def _lead(self) -> str:
        """What every turn of the assistant begins with."""
        before = self._probed[0]
        return commonprefix([*before, self._prompt] if self._prompt else before)

    @property
    def _end(self) -> str:
        return self._probed[1]

    # ------------------------------------------------ tools

    @cached_property
    def _arguments(self) -> type | None:
        """What a call's arguments must be for the template to write them as JSON: dict, str, or None for either."""
        works = {}
        for arguments in ({_PROBE: 1}, json.dumps({_PROBE: 1})):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                text = self.template.text(messages, None)
            except BadRow:
                text = ""
            works[type(arguments)] = f'"{_PROBE}"' in text
        return None if works[dict] == works[str] else dict if works[dict] else str

    def _adapted(self, message: dict) -> dict:
        """The message with its tool calls in the form that the template writes properly."""
        if not message.get("tool_calls"):
            return message
        calls = []
        for call in message["tool_calls"]:
            function = dict(_function(call))
            arguments = function.get("arguments", {})
            try:
                if isinstance(arguments, str) and self._arguments is dict:
                    function["arguments"] = json.loads(arguments)
                elif not isinstance(arguments, str) and self._arguments is str:
                    function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            except (ValueError, RecursionError) as error:
                raise BadRow(f"the arguments of a call of {function['name']!r} are not JSON ({error})") from None
            calls.append({**call, "function": function} if "function" in call else function)
        return {**message, "tool_calls": calls}

    def _check_tools(self, tools: list[dict] | None, text: str) -> None:
        for tool in tools or []:
            name = tool.get("function", tool).get("name")
            if isinstance(name, str) and name not in text:
                raise BadRow(
                    f"the chat template does not write the tool {name!r}; one that does: --chat-template FILE, "
                    "or leave them out: --map unused=tools"
                )

    def _check_written(self, messages: list[dict], rendering: Rendering) -> None:
        """Raises BadRow where a message is passed over; of a system message that comes first a note tells."""
        written = {turn for turn, _ in rendering.turns}
        for i, message in enumerate(messages if written else ()):
            role, said = message["role"], (message.get("content") or "").strip()
            if i not in written and said not in rendering.text and role != "assistant" and (i or role != "system"):
                raise BadRow(
                    f"the chat template writes nothing for message {i} (role {role!r}); one that does: "
                    "--chat-template FILE"
                )


def _function(call: dict) -> dict:
    """The part of a tool call that has its name and arguments."""
    return call.get("function", call)


def read_choice(choice: str) -> tuple[str, str]:
    """What --chat-template says, a file or "plain", as (where it stands, template). InputError."""
    return (choice, PLAIN) if choice == "plain" else (choice, _read(Path(choice), "--chat-template "))


def load_template(tokenizer: Tokenizer, choice: tuple[str, str] | None = None) -> ChatTemplate | None:
    """The chat template to use: `choice` (see read_choice), or the checkpoint's own; None where it has none.

    InputError where it cannot be used; MemoryError.
    """
    variables = tokenizer.specials
    if choice:
        where, source = choice
        sources = {"default": source}
        if where == "plain":
            bos = "".join(tokenizer.core.id_to_token(i) for i in tokenizer.bos)
            variables = variables | {"bos_token": bos, "eos_token": tokenizer.eos_token or ""}
    else:
        sources, where = _own_templates(tokenizer)
    if not sources:
        return None
    if "default" not in sources:
        raise InputError(
            f"{where} has chat templates {', '.join(sources)}, but no default. Name a file: --chat-template FILE."
        )
    try:
        return ChatTemplate(sources, variables)
    except jinja2.TemplateSyntaxError as error:
        what = f"line {error.lineno}: {error.message}"
    except MemoryError:
        raise
    except Exception as error:  # compiling runs what is constant in it
        what = f"{type(error).__name__}: {error}"
    raise InputError(f"{where}: the chat template does not compile, {what}.")


def _own_templates(tokenizer: Tokenizer) -> tuple[dict[str, str], str]:
    """(templates by name, where they stand)."""
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

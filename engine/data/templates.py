"""Chat templates: the two that are built in, a given file, and those of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.tokens import Tokenizer
from trireme.models.config import InputError
from trireme.storage.auxiliary import TEMPLATES
from trireme.storage.untrusted import parse_json, read_text

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
BUILT_IN = {"plain": PLAIN, "chatml": CHATML}


def read_choice(choice: str) -> tuple[str, str]:
    """--chat-template, which is a file or a name of BUILT_IN, as (name, template). Raises InputError."""
    if choice not in BUILT_IN and not Path(choice).exists():
        raise InputError(f"--chat-template {choice}: no such file, and none of {', '.join(sorted(BUILT_IN))}.")
    return choice, BUILT_IN.get(choice) or _read(Path(choice), "--chat-template ")


def load_template(
    tokenizer: Tokenizer, choice: tuple[str, str] | None = None, date: str | None = None
) -> ChatTemplate | None:
    """The template of `choice`, from read_choice, or the checkpoint's, if it has one. Raises InputError,
    MemoryError.
    """
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
        return ChatTemplate(sources, variables, date, tokenizer.stops, tokenizer.eos_token)
    except jinja2.TemplateSyntaxError as error:
        what = f"line {error.lineno}: {error.message}"
    except MemoryError:
        raise
    except Exception as error:  # compiling runs constant code
        what = f"{type(error).__name__}: {error}"
    raise InputError(f"{where}: the chat template does not compile, {what}.")


def standalone(tokenizer: Tokenizer, choice: tuple[str, str]) -> str:
    """The template for other programs: a built-in one sets the tokens that it needs."""
    where, source = choice
    ends = _ends(tokenizer) if where in BUILT_IN else {}
    return "".join(f"{{%- set {name} = {json.dumps(token)} %}}\n" for name, token in ends.items()) + source


def _ends(tokenizer: Tokenizer) -> dict[str, str]:
    """Variables of the built-in templates: tokens that the tokenizer puts around texts."""
    bos = "".join(tokenizer.core.id_to_token(i) or "" for i in tokenizer.bos)
    return {"bos_token": bos, "eos_token": tokenizer.eos_token or ""}


def _own_templates(tokenizer: Tokenizer) -> tuple[dict[str, str], str]:
    """(the checkpoint's templates by name, their file)."""
    path = tokenizer.folder / "chat_template.jinja"
    more = {p.stem: _read(p) for p in sorted((tokenizer.folder / TEMPLATES).glob("*.jinja")) if p.is_file()}
    if path.is_file():
        return {"default": _read(path), **more}, str(path)
    where = str(tokenizer.folder / "tokenizer_config.json")
    written = tokenizer.config.get("chat_template")
    if not written and (older := tokenizer.folder / "chat_template.json").is_file():  # of processors
        where = str(older)
        try:
            written = parse_json(_read(older).encode(), older.name).get("chat_template")
        except ValueError as error:
            raise InputError(f"{where}: {error}. Download it again.") from None
    if isinstance(written, str):
        written = {"default": written}
    elif isinstance(written, list):
        named = [(t.get("name"), t.get("template")) for t in written if isinstance(t, dict)]
        written = dict(named) if all(isinstance(name, str) for name, _ in named) else named
    written = written or {}
    if not isinstance(written, dict) or not all(isinstance(source, str) for source in written.values()):
        raise InputError(f"{where}: 'chat_template' is neither a string nor a list of named templates.")
    return written | more, where


def _read(path: Path, what: str = "") -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InputError(f"{what}{path}: {reason}.") from None

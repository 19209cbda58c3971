"""The parsers of tokenizers, chat templates and rows, each as a Target made in an empty folder."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chats import make_tokenizer
from mutations import Target, as_json, as_lines, as_text

from trireme.engine.data import dataset as data
from trireme.engine.data.codec import load_codec
from trireme.engine.data.forms import Chat
from trireme.engine.data.read import BadRow
from trireme.engine.data.tokenizer import load_template, load_tokenizer
from trireme.models.config import InputError

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"

CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "call00000"},
    {"role": "assistant", "content": [{"type": "text", "text": "Two."}], "weight": 1},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def chat_template(folder: Path) -> Target:
    """Mutated tag by tag. What would take for ever is not among the junk: no thousand files of that in a minute."""
    tokenizer, path = make_tokenizer(folder), folder / "chat_template.jinja"
    texts = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja")) if path.stat().st_size < 1000]
    junk = ("{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "{{ " + "[" * 300 + "]" * 300 + " }}",
            "{% for x in [1] %}" * 30 + "{% endfor %}" * 30, "{% if 1 %}" * 300 + "{% endif %}" * 300,
            "{{ 'a' * 10**10 }}", "{{ [0] * 10**10 }}", "{{ 9**(9**5) }}", "{{ 'a' | center(10**10) }}", "{{ x.y.z }}",
            "{{ ''.__class__.__mro__ }}", "{% include 'x' %}", "{% extends 'x' %}", "{{ messages | tojson(9) }}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ raise_exception(1) }}", "{{ strftime_now('%') }}",
            "{{ '%d' % 'x' }}", "{% generation %}", "{% endgeneration %}", "{{ messages[99].content }}", "{{ loop }}",
            "{{ namespace() }}", "{% set messages = 1 %}", "{% break %}", "{{ caller() }}", "{{ 1/0 }}", "{{ -'a' }}",
            "{% for m in messages %}", "{% endfor %}", "{{", "{%", "{{ messages.append(1) }}", "{{ [].pop() }}",
            "{{ messages | groupby('role') }}", "{{ '\\ud800' }}", "{{ messages | map('upper') }}")  # fmt: skip

    def read(content: bytes) -> None:
        path.write_bytes(content)
        template = load_template(tokenizer)
        template.notes(False)
        talk = [m | {"content": "Two."} if isinstance(m["content"], list) else m for m in TALK]
        for tools in (None, TOOLS):
            with suppress(BadRow):
                template.mark(Chat(talk, tools))

    pieces = [re.split(r"(\{[{%#].*?[}%#]\})", text, flags=re.DOTALL) for text in texts]
    return Target(pieces, as_text, read, (InputError,), junk)


def tokenizer_config(folder: Path) -> Target:
    """And the two files beside it, parted by a character that JSON has no use for."""
    make_tokenizer(folder)
    names = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    chatml = (TEMPLATES / "chatml.jinja").read_text()
    added = {"content": "<s>", "lstrip": False, "normalized": True, "__type": "AddedToken"}
    own = {"bos_token": added, "eos_token": "</s>", "add_bos_token": True, "model_max_length": 64,
           "chat_template": chatml, "added_tokens_decoder": {"0": added}, "pad_token": None}  # fmt: skip
    named = own | {"chat_template": [{"name": "default", "template": chatml}, {"name": "rag", "template": "x"}]}
    ids = {"eos_token_id": [1, 2], "bos_token_id": 0, "pad_token_id": 1 << 70}

    def read(content: bytes) -> None:
        parts = [*content.split(b"\x1e"), b"{}", b"{}"]
        for name, part in zip(names, parts, strict=False):
            (folder / name).write_bytes(part)
        tokenizer = load_tokenizer(folder)
        tokenizer.decode(tokenizer.wrap(tokenizer.encode(["Hello"])[0][0])[0])
        if template := load_template(tokenizer):
            template.notes(True)

    write = lambda files: b"\x1e".join(map(as_json, files)) if isinstance(files, list) else as_json(files)
    return Target([[own, {}, {}], [named, {"eos_token": added}, {}], [{}, {}, ids]], write, read, (InputError,))


ASKED, SAID = {"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}
CALLED = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
ROWS = [
    [{"messages": TALK, "tools": TOOLS}, {"messages": TALK[1:], "tools": json.dumps(TOOLS)}],
    [{"conversations": [ASKED, CALLED, {"from": "observation", "value": "2"}, SAID], "system": "s", "tools": "[]"}],
    [{"instruction": "a", "input": "b", "output": "c", "history": [["q", "r"]], "system": ""}],
    [{"prompt": "a", "completion": "b"}, {"prompt": TALK[:2], "completion": TALK[4:]}],
    [{"text": "a story of sailors"}, {"text": "another\n\nof fishers", "id": 7}],
    [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5, 6]}],
]


def _cells(rows: Any) -> bytes:
    """As CSV: the keys of the first row, and each value as text, lists and objects as JSON."""
    out = io.StringIO(newline="")
    table = [row if isinstance(row, dict) else {"text": row} for row in (rows if isinstance(rows, list) else [rows])]
    cells = [[v if isinstance(v, str) else json.dumps(v) for v in row.values()] for row in table]
    csv.writer(out).writerows([*table[:1], *cells])
    return as_text(out.getvalue())


def _prose(rows: Any) -> bytes:
    """As running text: every word of the rows, parted now and then."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(rows, ensure_ascii=False))
    return as_text("\n".join([*words[:2], "<|endoftext|>", *words[2:]]))


def _rows(kind: str, write: Callable[[Any], bytes]) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        path, cache = folder / f"rows{kind}", folder / "tokens"
        make_tokenizer(folder)
        codec = load_codec(folder, "plain")

        def read(content: bytes) -> None:
            path.write_bytes(content)
            options = data.DataOptions(seq_len=32, skip_bad=len(content) % 2 == 0, vocab_size=260, cache=cache)
            try:
                loaded = data.load_dataset([str(path)], codec, options)
                loaded.report.lines(), loaded.example()
            finally:
                shutil.rmtree(cache, ignore_errors=True)

        return Target(ROWS, write, read, (InputError,))

    return make


DATA = {made.__name__: made for made in (chat_template, tokenizer_config)} | {
    f"rows{kind}": _rows(kind, write)
    for kind, write in ((".json", as_json), (".jsonl", as_lines), (".csv", _cells), (".txt", _prose))
}

"""Files of strangers: whatever a tokenizer, a template or a row does, it ends in one line, or is left off and said.

By themselves they would take the machine's memory or days of its time, abort the process, end in a traceback, or speak
to the terminal.
"""

import errno
import gzip
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from chats import CHATML, TALK, make_tokenizer
from command import TRAIN, fails, finetune, set_config, write
from hypothesis import given, settings
from hypothesis import strategies as st
from script_files import ROOT

from trireme.engine.data import encode as encoding
from trireme.engine.data import prepare, tokens
from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.files import json_rows, tables, text
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.files.sources import DataFile, Reader
from trireme.engine.data.formats.examples import Chat, Text
from trireme.engine.data.tokens import load_tokenizer
from trireme.engine.run.screen import one_line
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

pytestmark = pytest.mark.grid

CHATS = json.dumps({"messages": TALK}) + "\n"


@pytest.fixture(autouse=True, scope="module")
def quick_sandboxes():
    """None: here they are as a user has them."""


def run(*argv: str) -> subprocess.CompletedProcess:
    """The command in a process of its own: an abort is the end of it."""
    command = [sys.executable, str(ROOT / "scripts" / "finetune.py"), *argv]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )


def set_tokenizer(**change) -> None:
    spec = json.loads(Path("model/tokenizer.json").read_text())
    write("model/tokenizer.json", json.dumps(spec | change))


def set_tokenizer_config(**change) -> None:
    config = json.loads(Path("model/tokenizer_config.json").read_text())
    write("model/tokenizer_config.json", json.dumps(config | change))


# ---------------------------------------------------------------- the terminal

CONTROLS = "\x1b[2J\x1b]0;title\x07\x1b]52;c;Zm9v\x07 \x9b31m \x7f\r\b\u202e\u2066\u2028\u2029\x85\x0b\x0c\t\ud800"
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")


def test_controls_are_shown_and_long_text_is_cut():
    assert shown(CONTROLS) == repr(CONTROLS)[1:-1]
    assert shown("naïve 日本語 👩‍👩‍👧 ⏎ \\n") == "naïve 日本語 👩‍👩‍👧 ⏎ \\n"
    assert shown("a" * 50 + "b" * 50, 10) == "aaaaa…(90 more characters)…bbbbb"
    assert shown("/" + "a" * 50 + "/" + "b" * 20, 10) == f"/aaaa…(46 more characters)…/{'b' * 20}"
    assert shown(f"/aaaa/{'b' * 20}", 10) == f"/aaaa/{'b' * 20}"
    assert shown("/" + "b" * 1000, 10) == f"/{'b' * 4}…(991 more characters)…bbbbb"  # no file has that name
    assert one_line({"what": "reading x\x1b[2J", "eta": "eta 3s"}) == "reading x\\x1b[2J  eta 3s"


PLACES = {
    "model_type": lambda: set_config(model_type=CONTROLS),
    "rope type": lambda: set_config(rope_scaling={"rope_type": CONTROLS}),
    "tensor": lambda: rename_tensor(CONTROLS.replace("\ud800", "")),
    "a very long model_type": lambda: set_config(model_type="x" * 10_000_000),
    "a very long tensor": lambda: rename_tensor("y" * 1_000_000),
    "role": lambda: write("stories.txt", "") or write("x.jsonl", json.dumps({"messages": [{"role": CONTROLS}]})),
    "column": lambda: write("x.jsonl", json.dumps({CONTROLS: 1})),
    "csv header": lambda: write("x.csv", "é\x1b[2J,é\x1b[2J\n1,2\n"),
    "tokenizer": lambda: set_tokenizer(model={"type": "BPE", "vocab": {}, "merges": [CONTROLS]}),
    "template": lambda: set_tokenizer_config(chat_template="{% " + CONTROLS.replace("\ud800", "") + " %}"),
    "refusal": lambda: (
        set_tokenizer_config(chat_template="{{ raise_exception('\x1b[2J') }}"),
        write("x.jsonl", CHATS),
    ),
    "file name": lambda: write("x\x1b[2J.jsonl", "{\n"),
}


def rename_tensor(name: str) -> None:
    path = Path("model/model.safetensors")
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[name] = header.pop("model.norm.weight")
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


@pytest.mark.parametrize("place", PLACES)
def test_errors_show_controls(here, capsys, place):
    PLACES[place]()
    data = next((str(p) for p in sorted(Path().glob("x*.*"))), "stories.txt")
    assert finetune.main(["model", "--data", data, "--out", "out"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err[:3000]
    assert not FORBIDDEN.search(err), err[:3000]
    assert len(err) < 2200


def test_an_error_about_a_long_path_shows_the_files_name(here, capsys):
    file = "d" * 200 + "/" + "f" * 200 + ".jsonl"
    assert finetune.main(["model", "--data", file, "--out", "out"]) == 2
    assert f"/{'f' * 200}.jsonl" in capsys.readouterr().err


def test_the_report_and_samples_show_controls(here, capsys):
    text = CONTROLS.replace("\ud800", "") + " and a word\n"
    write("x\x1b[2J.jsonl", "".join(json.dumps({"text": text * 9}) + "\n" for _ in range(8)) + '{"\\u001b[2J": 1}\n')
    argv = ["model", "--data", "x\x1b[2J.jsonl", "--out", "out", "--seq-len", "64", "--max-steps", "1", "--val", "0.2"]
    assert finetune.main([*argv, "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert not FORBIDDEN.search(out), FORBIDDEN.search(out)
    assert "x\\x1b[2J.jsonl: 9 rows" in out
    assert "first: line 9: no known format has its keys ('\\x1b[2J')" in out
    example = next(line for line in out.splitlines() if line.startswith("example"))
    assert "\\x1b]0;title\\x07\\x1b]52;c;" in example
    assert " and a word⏎" in example


# ---------------------------------------------------------------- chat templates

DOES_NOT_COMPILE = {
    "brackets": "{{ " + "(" * 150 + "1" + ")" * 150 + " }}",
    "nested if": "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "nested for": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "nested lists": "{{ " + "[" * 500 + "]" * 500 + " }}",
    "not not": "{{ " + "not " * 5000 + "1 }}",
    "a large power": "{{ 9**(9**6) }}",
    "no such filter": "{{ 1|nothing }}",
}


@pytest.mark.parametrize("name", DOES_NOT_COMPILE)
def test_a_template_that_does_not_compile(here, capsys, name):
    set_tokenizer_config(chat_template=DOES_NOT_COMPILE[name])
    write("x.jsonl", CHATS)
    err = fails(capsys, here, "model", "--data", "x.jsonl", "--out", "out")
    assert "tokenizer_config.json: the chat template does not compile, " in err


TAKES_MEMORY = {
    "product": "{{ 'a' * 10**10 }}",
    "center": "{{ 'a'.center(10**10) }}",
    "format": "{{ '%010000000000d' % 1 }}",
    "list": "{{ [0] * 10**10 }}",
    "doubling": "{% set s = namespace(s='a' * 10**8) %}{% for i in range(9) %}{% set s.s = s.s ~ s.s %}{% endfor %}",
}


@pytest.mark.parametrize("name", TAKES_MEMORY)
def test_a_template_that_takes_memory(here, capsys, name):
    set_tokenizer_config(chat_template=TAKES_MEMORY[name] + CHATML)
    write("x.jsonl", CHATS)
    assert "the chat template" in fails(capsys, here, "model", "--data", "x.jsonl", "--out", "out")


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10**9) }}",  # while it is compiled, in one instruction
    "strftime": "{{ strftime_now('%c' * 10**8) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end(tmp_path, name):
    make_tokenizer(tmp_path, chat_template=ENDLESS[name] + CHATML)
    with pytest.raises(InputError, match=r"the chat template takes longer than \d+ s of processor time. Name another"):
        Codec(tmp_path, None, patience=0.3)


def test_a_template_without_end_is_one_line(here, capsys, monkeypatch):
    monkeypatch.setattr(Codec.__init__, "__defaults__", (0.3, None))
    set_tokenizer_config(chat_template=ENDLESS["loops"])
    err = fails(capsys, here, *TRAIN)
    assert "model: the chat template takes longer than 0 s of processor time" in err
    assert "--chat-template" in err


def test_the_row_that_a_template_does_not_end_on_is_named(tmp_path):
    """Whatever batch it is in: the rows before it may have ended, too."""
    loop = "{% if messages[0].content == 'boom' %}" + ENDLESS["loops"] + "{% endif %}"
    make_tokenizer(tmp_path, chat_template=loop + CHATML)
    codec = Codec(tmp_path, None, patience=0.3)
    path = tmp_path / "a.jsonl"
    boom = CHATS.replace("a b", "boom")
    path.write_text(CHATS * 40 + boom + CHATS * 40)
    with pytest.raises(
        InputError, match="a.jsonl line 41: the chat template takes longer than 0 s .* Leave that row out"
    ):
        load_dataset([str(path)], codec, DataOptions())
    path.write_text(CHATS * 2)
    assert load_dataset([str(path)], codec, DataOptions()).n_sequences == 1, "another process goes on"


def test_ctrl_c_does_not_wait_for_a_row_without_end(tmp_path, monkeypatch):
    loop = "{% if messages[0].content == 'boom' %}" + ENDLESS["loops"] + "{% endif %}"
    make_tokenizer(tmp_path, chat_template=loop + CHATML)
    codec = Codec(tmp_path, None, patience=10_000)
    (tmp_path / "a.jsonl").write_text(CHATS.replace("a b", "boom") + CHATS * 40)
    monkeypatch.setattr(prepare, "_BATCH_ROWS", 1)
    monkeypatch.setattr(prepare, "_SHARE", 100)
    monkeypatch.setattr(prepare.os, "sched_getaffinity", lambda _: {0, 1, 2})

    def leave(*progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_dataset([str(tmp_path / "a.jsonl")], codec, DataOptions(), leave)
    (tmp_path / "b.jsonl").write_text(CHATS * 4)
    assert load_dataset([str(tmp_path / "b.jsonl")], codec, DataOptions()).n_sequences == 1


def test_a_process_that_is_killed_once_costs_nothing(tmp_path, monkeypatch):
    """By somebody, or because memory ran out: what it was at is done again."""
    make_tokenizer(tmp_path, chat_template=CHATML)
    codec = load_codec(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(CHATS.replace("a b", f"a {i}") for i in range(400)))
    monkeypatch.setattr(prepare, "_BATCH_ROWS", 8)
    expected, calls = load_dataset([str(path)], codec, DataOptions()), []
    first = codec.sandbox._process

    def kill(*progress):
        calls.append(1)
        if len(calls) == 10:
            first.kill()

    found = load_dataset([str(path)], codec, DataOptions(), kill)
    assert codec.sandbox._process is not first
    assert found.fingerprint == expected.fingerprint
    ids, same = (file.read(0, int(file.offsets[-1]))[0] for file in (*found.files, *expected.files))
    assert np.array_equal(ids, same)


def test_what_a_template_raises_is_a_bad_row():
    for source in ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages|sum }}", "{{ 'a' * (8 * 10**18) }}"):
        with pytest.raises(BadRow, match="the chat template (fails|takes more memory)"):
            ChatTemplate({"default": source}, {}).text(TALK)


def test_a_refusal_of_any_length_is_short():
    with pytest.raises(BadRow) as error:
        ChatTemplate({"default": "{{ raise_exception('x' * 10**7) }}"}, {}).text(TALK)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("written", ['[{"name": [], "template": "x"}]', '[{"template": "x"}]', '{"default": 5}'])
def test_templates_without_names_or_text(tmp_path, written):
    make_tokenizer(tmp_path, chat_template=json.loads(written))
    with pytest.raises(InputError, match="'chat_template' is neither a string nor a list of named templates"):
        load_codec(tmp_path)


# ---------------------------------------------------------------- tokenizers


def replace(pattern: str | dict, content: str) -> dict:
    return {
        "type": "Replace",
        "pattern": {"Regex": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }


PANICS = {
    "post-processor": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {},
        }
    },
    "a huge id": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[X]": {"id": "[X]", "ids": [1 << 31], "tokens": ["[X]"]}},
        }
    },
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "every row": {"normalizer": replace("(a+)+$", "b")},
    "no [UNK]": {
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"a": 0},
        }
    },
}


@pytest.mark.parametrize("name", PANICS)
def test_a_tokenizer_that_panics(here, capsys, name):
    set_tokenizer(**PANICS[name])
    write("x.jsonl", json.dumps({"text": "a" * 5000 + "!"}) + "\n")
    err = fails(capsys, here, "model", "--data", "x.jsonl", "--out", "out")
    assert "model/tokenizer.json is not a tokenizer" in err or "x.jsonl line 1: the tokenizer fails on it: " in err


def test_the_row_that_a_tokenizer_panics_on_can_be_skipped(tmp_path):
    make_tokenizer(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"normalizer": replace("(a+)+$", "b")}))
    texts = ["one", "a" * 5000 + "!", "three"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = load_dataset([str(tmp_path / "a.jsonl")], load_codec(tmp_path), DataOptions(skip_bad=True))
    assert data.report.files[0].bad == 1
    assert "line 2: the tokenizer fails on it" in data.report.files[0].first_bad
    assert [data.example(k) for k in (0, 1)] == ["<s>[one</s>]", "<s>[three</s>]"]


def test_only_the_librarys_panic_is_taken_for_an_error():
    def leave(*args, **more):
        raise KeyboardInterrupt

    tokenizer = tokens.Tokenizer(type("Core", (), {"encode_batch_fast": leave}), Path(), {}, (), None, {}, "")
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode(["a"])


@pytest.mark.full
def test_a_tokenizer_that_aborts_names_the_row(here):
    """The library ends the process where it gets no memory."""
    set_tokenizer(normalizer=replace({"String": "a"}, "b" * 10**6))
    write("x.jsonl", '{"text": "b"}\n{"text": "c"}\n' + json.dumps({"text": "a" * 2000}) + '\n{"text": "d"}\n')
    done = run("model", "--data", "x.jsonl", "--out", "out")
    assert done.returncode == 2, done.stderr[-2000:]
    assert re.fullmatch(
        r"error: x.jsonl line 3: the tokenizer .*; it may take 4 GiB of memory. Leave .*\n", done.stderr
    )


@pytest.mark.full
def test_a_tokenizer_that_aborts_as_it_is_loaded(here):
    spec = json.loads(Path("model/tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
    added = [*spec["added_tokens"], {"id": len(spec["model"]["vocab"]), "content": "a" * 2000, **flags}]
    set_tokenizer(normalizer=replace({"String": "a"}, "b" * 10**6), added_tokens=added)
    done = run(*TRAIN)
    assert done.returncode == 2, done.stderr[-2000:]
    assert re.fullmatch(r"error: model: tokenizer.json crashes \(SIG[A-Z]+\); .*--tokenizer.*\n", done.stderr)


@pytest.mark.full
def test_a_decoder_that_fails_ends_no_run(here, capsys):
    """What cannot be shown is said; examples and samples are only to be looked at."""
    own = json.loads(Path("model/tokenizer.json").read_text())["decoder"]
    set_tokenizer(decoder={"type": "Sequence", "decoders": [own, {"type": "Fuse"}, replace(r"(\w+ ?)+\d$", "x")]})
    assert finetune.main([*TRAIN, "--val", "0.2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^example  \(the tokenizer fails on it: .*\)$", out, re.MULTILINE)
    assert "check    reopened" in out


def test_what_would_cut_fill_or_multiply_is_left_off(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    expected = tokenizer.encode(["hello there"])[0][0].tolist()
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["truncation"] = {"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}
    spec["padding"] = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    spec["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(tmp_path).encode(["hello there"])[0][0].tolist() == expected


def test_dropout_is_left_off_and_said(here, capsys):
    spec = json.loads(Path("model/tokenizer.json").read_text())
    plain = load_tokenizer("model")
    set_tokenizer(model=spec["model"] | {"dropout": 0.5})
    dropping, text = load_tokenizer("model"), "once there was a poor rower " * 20
    assert plain.encode([text])[0][0].tolist() == dropping.encode([text])[0][0].tolist()
    assert finetune.main([*TRAIN, "--dry-run"]) == 0
    assert "note: the tokenizer's BPE dropout (0.5) is left off" in capsys.readouterr().out


@pytest.mark.parametrize("value", [-1, 1 << 32, 1 << 70, [-1], [1 << 70], "1", True])
def test_an_end_token_that_is_none(tmp_path, value):
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_tokenizer(tmp_path).eos is None


@pytest.mark.parametrize("name", ["eos_token", "bos_token"])
def test_a_token_that_is_half_a_surrogate_pair(tmp_path, name):
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "\ud800", "add_bos_token": True}))
    with pytest.raises(InputError, match=rf"{name} '\\ud800' holds half of a surrogate pair"):
        load_codec(tmp_path)


def test_a_tokenizer_that_changes_while_data_is_read(tmp_path):
    """A process that is started later must not have other tokens."""
    make_tokenizer(tmp_path)
    codec = load_codec(tmp_path)
    codec.sandbox.close()
    make_tokenizer(tmp_path, eos="<|im_end|>")
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(InputError, match="was changed while data was read"):
        load_dataset([str(tmp_path / "a.txt")], codec, DataOptions())


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread")]
)
def test_a_command_without_memory_is_one_line(here, capsys, monkeypatch, error):
    def run(*given):
        raise error

    monkeypatch.setattr(finetune, "run", run)
    assert "not enough memory" in fails(capsys, here, *TRAIN, code=3)


def test_a_file_in_the_place_of_a_folder_is_named(here, capsys):
    for argv in (["model/model.safetensors", *TRAIN[1:]], ["eval", "model/config.json", "--data", "stories.txt"]):
        assert "is a file. Give the folder" in fails(capsys, here, *argv)
    assert "no such folder" in fails(capsys, here, "merge", "nowhere", "--out", "merged")


# ---------------------------------------------------------------- rows


BAD_TOOLS = [
    [{"function": "f"}],
    [{"function": None}],
    [{"function": []}],
    ["f"],
    "[" * 100_000,
]


@pytest.mark.parametrize("tools", BAD_TOOLS, ids=lambda tools: str(tools)[:20])
def test_tools_that_are_none(here, capsys, tools):
    write("x.jsonl", json.dumps({"messages": TALK, "tools": tools}) + "\n")
    err = fails(capsys, here, "model", "--data", "x.jsonl", "--out", "out", "--chat-template", "plain")
    assert "x.jsonl line 1: 'tools' is" in err


def test_values_in_values(tmp_path):
    """JSON may be nested as deep as Python reads it, which is deeper than it can be handed over or written again."""
    make_tokenizer(tmp_path)
    codec = load_codec(tmp_path, "plain")
    talk = lambda deep: f'{{"messages": [{{"role": "user", "content": "a", "more": {deep}}}, {json.dumps(TALK[1])}]}}'
    depths = [*range(100, 1000, 20), *range(1000, 100_000, 9000)]
    (tmp_path / "a.jsonl").write_text("".join(talk("[" * n + "]" * n) + "\n" for n in depths))
    data = load_dataset([str(tmp_path / "a.jsonl")], codec, DataOptions(skip_bad=True))
    assert 0 < data.report.files[0].bad < len(depths)
    assert "nested too deeply" in data.report.files[0].first_bad


@pytest.mark.parametrize("kind", ["call", "arguments"])
def test_calls_in_calls(tmp_path, kind):
    deep = "[" * 100_000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    said = {"messages": [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": deep}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row if kind == "call" else said) + "\n")
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    make_tokenizer(tmp_path, chat_template="{% for m in messages %}" + calls + "{{ m.content }}{% endfor %}")
    with pytest.raises(InputError, match="line 1: .* not JSON"):
        load_dataset([str(tmp_path / "a.jsonl")], load_codec(tmp_path), DataOptions())


def test_many_keys_of_which_one_occurs_twice(tmp_path):
    """Counting each of 60,000 took forty seconds. Here counting is counted: a key is compared with no list of keys."""
    pairs = [*((f"k{i}", 0) for i in range(60_000)), ("k59999", 1)]
    compared = 0

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    with pytest.raises(BadRow, match="the key 'k59999' occurs twice"):
        json_rows._no_duplicates([(Key(key), value) for key, value in pairs])
    assert compared < 200_000


def read(path: Path) -> list:
    return [row.value for row in Reader(DataFile(path)).rows()]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_are_too_long(tmp_path, monkeypatch, packed):
    """One row of a .gz may be as long as it likes. No more is held than a row may have."""
    monkeypatch.setattr(json_rows, "ROW", 5000)
    monkeypatch.setattr(tables, "ROW", 5000)
    monkeypatch.setattr(json_rows, "_CHUNK", 100)
    monkeypatch.setattr(text, "_PIECE", 2000)
    monkeypatch.setattr(text, "_LINE", 2000)

    def file(name: str, content: str) -> Path:
        path = tmp_path / (name + ".gz" * packed)
        path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
        return path

    long = "x" * 20_000
    first, second, third = read(file("a.jsonl", f'{{"text": "a"}}\n{{"text": "{long}"}}\n{{"text": "b"}}\n'))
    assert (first, third) == ({"text": "a"}, {"text": "b"})
    assert "is longer than" in str(second)
    for name, content in (
        ("a.json", f'[{{"text": "a"}}, {{"text": "{long}"}}]'),
        ("a.json", '[{"a": [' + '"x", ' * 5000 + '"x"]}]'),
        ("a.csv", f"text\na\n{long}\n"),
        ("a.csv", "text\na\n" + '"' + "line\n" * 5000 + '"\n'),
        ("a.csv", "a,b\n" + ("," + '"' + "x\n" * 1000 + '"') * 20),
    ):
        with pytest.raises(InputError, match="longer than|larger than"):
            read(file(name, content))
    assert read(file("b.jsonl", '{"text": "%s"}\n' % ("x" * 4000))) == [{"text": "x" * 4000}]
    assert read(file("b.json", '[{"text": "%s"}]' % ("x" * 4000))) == [{"text": "x" * 4000}]
    assert read(file("b.csv", "text\n" + ("x" * 900 + "\n") * 20)) == [{"text": "x" * 900}] * 20
    for content in ("line\n" * 5000, "a\n" + long, "a\n" + " b\n" * 5000):  # running text has no limit
        pieces = [row["text"] for row in read(file("b.txt", content))]
        assert "".join(pieces) == content.rstrip("\n")
        assert max(map(len, pieces)) <= 6000


def test_batches_are_bounded_by_all_that_a_row_says():
    """A row may say it anywhere: in what is called, in tools, in keys that only the template reads."""
    call = {"function": {"name": "f", "arguments": {"x": ["y" * 1000]}}}
    talk = [{**TALK[0], "thinking": "z" * 1000}, {**TALK[1], "tool_calls": [call]}]
    assert encoding.size(Chat(talk, [{"name": "w" * 1000}])) > 3000
    assert encoding.size(Chat([{**TALK[0], "numbers": [1] * 1000}])) > 1000


def test_a_rendering_that_is_too_long(tmp_path, monkeypatch):
    tokenizer = make_tokenizer(tmp_path)
    monkeypatch.setattr(encoding, "ROW", 100)
    template = ChatTemplate({"default": "{{ 'x' * 200 }}" + CHATML}, {})
    found = encoding.encode([Chat(TALK), Text("x" * 100)], tokenizer, template)
    assert "comes to a text of" in str(found[0])
    assert len(found[1].ids) == 102


PEAK = """
import os, subprocess, sys
_, status, usage = os.wait4(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid, 0)
print(status, usage.ru_maxrss)  # of what it waited for, too; and of whoever started it
"""


@pytest.mark.full
def test_a_long_row_takes_little_memory(here):
    """Eight million characters in one row: the library alone takes a hundred bytes and more for each of them."""
    text = " ".join(
        random.Random(1).choices(
            ["once", "upon", "a", "time", "there", "was", "no", "wind", "and", "they", "had", "to", "row"], k=2 << 20
        )
    )
    write("x.jsonl", json.dumps({"text": text[: 8 << 20]}) + "\n")
    argv = ["model", "--data", "x.jsonl", "--dry-run", "--seq-len", "64"]
    command = [sys.executable, "-c", PEAK, sys.executable, str(ROOT / "scripts" / "finetune.py"), *argv]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )
    status, peak = map(int, done.stdout.split())
    assert status == 0, done.stderr
    assert peak < 700 << 10


# ---------------------------------------------------------------- long texts are tokenized in windows

LETTERS = st.text(st.sampled_from("ab eé日🦜\n_1"), max_size=40)


@pytest.fixture(scope="module")
def learned(made):
    return load_tokenizer(made / "model")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(LETTERS, st.integers(1, 12)), min_size=1, max_size=20), st.sampled_from(["bytes", "words"]))
def test_windows_give_the_tokens_of_the_whole_text(learned, parts, kind):
    """And their offsets, with words no longer than the overlap; of any other text no character is lost."""
    from unittest import mock

    text = "".join(part * n for part, n in parts)
    words = " ".join(re.findall(r"[^ \n]{1,20}|\n", text))
    text = words if kind == "words" else text
    (whole,) = learned.encode([text], offsets=True)
    with mock.patch.object(tokens, "WINDOW", 128), mock.patch.object(tokens, "OVERLAP", 64):
        (ids, offsets), (without, none) = (learned.encode([text], offsets=wanted)[0] for wanted in (True, False))
    assert none is None
    assert without.tolist() == ids.tolist()
    assert learned.decode(ids) == learned.decode(whole[0])
    if kind == "words":
        assert ids.tolist() == whole[0].tolist()
        assert offsets.tolist() == whole[1].tolist()


def test_of_a_word_without_end_no_character_is_lost(monkeypatch):
    """Digits by threes: windows may begin at another one of the three, and have no token's beginning in common."""
    numbers = [f"{i:0{n}}" for n in (1, 2, 3) for i in range(10**n)]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate([*numbers, "[UNK]"])}, unk_token="[UNK]")
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\d{1,3}"), "isolated")
    tokenizer = tokens.Tokenizer(core, Path(), {}, (), None, {}, "")
    monkeypatch.setattr(tokens, "WINDOW", 100)
    monkeypatch.setattr(tokens, "OVERLAP", 30)
    text = "".join(random.Random(1).choices("0123456789", k=1000))
    ids, offsets = tokenizer.encode([text], offsets=True)[0]
    assert [core.id_to_token(i) for i in ids] == [text[a:b] for a, b in offsets]
    assert offsets[0, 0] == 0
    assert offsets[-1, 1] == 1000
    assert np.array_equal(offsets[1:, 0], offsets[:-1, 1])
    unknown = tokenizer.encode(["x" * 1000])[0][0]  # one token, of which the windows know no beginning
    assert 1 <= len(unknown) < 20


@pytest.mark.parametrize("name", ["stories260k", "tokenizers/gpt2", "tokenizers/minimind"])
def test_windows_of_real_tokenizers(real, name, monkeypatch):
    tokenizer = load_tokenizer(real / name)
    text = (real / "data" / "tinyshakespeare.txt").read_text()[:200_000]
    (whole,) = tokenizer.encode([text], offsets=True)
    monkeypatch.setattr(tokens, "WINDOW", 3000)
    monkeypatch.setattr(tokens, "OVERLAP", 200)
    ids, offsets = tokenizer.encode([text], offsets=True)[0]
    assert np.array_equal(ids, whole[0])
    assert np.array_equal(offsets, whole[1])


@pytest.mark.parametrize("name", ["stories260k", "tokenizers/gpt2", "tokenizers/minimind"])
def test_a_part_without_offsets_has_the_same_tokens(real, name, monkeypatch):
    """Only the tokens around its borders are located: the offsets of all take time."""
    tokenizer, located = load_tokenizer(real / name), []
    batch = tokens.Tokenizer._batch

    def noted(self, texts, offsets):
        located.extend(len(text) for text in texts if offsets)
        return batch(self, texts, offsets)

    monkeypatch.setattr(tokens, "OVERLAP", 200)
    text = (real / "data" / "tinyshakespeare.txt").read_text()[:20_000]
    borders = [*range(0, 20_000, 2999), 20_000]
    expected = [tokenizer.part(text, a, b)[0].tolist() for a, b in itertools.pairwise(borders)]
    monkeypatch.setattr(tokens.Tokenizer, "_batch", noted)
    found = [tokenizer.part(text, a, b, offsets=False)[0].tolist() for a, b in itertools.pairwise(borders)]
    assert found == expected
    assert max(located) == 400


def test_a_part_with_unknown_words_at_its_borders_has_the_same_tokens(monkeypatch):
    """An unknown token has any length, so it does not tell where the tokens are."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = tokens.Tokenizer(core, Path(), {}, (), None, {}, "", unknown=0)
    monkeypatch.setattr(tokens, "OVERLAP", 40)
    text = " ".join(random.Random(1).choices(["a", "bc", "defg"], k=400))
    for start, stop in itertools.pairwise([*range(0, len(text), 101), len(text)]):
        made = [tokenizer.part(text, start, stop, offsets=wanted)[0].tolist() for wanted in (True, False)]
        assert made[0] == made[1]

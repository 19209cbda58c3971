"""Files of strangers: whatever a tokenizer, a template or a row does, it ends in one line, or is left off and said.

By themselves they would take the machine's memory or days of its time, abort the process, end in a traceback, or speak
to the terminal.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chats import CHATML, TALK
from command import TRAIN, fails, finetune, set_config, write
from hypothesis import strategies as st
from script_files import ROOT

from trireme.engine.run.screen import one_line
from trireme.storage.untrusted import shown

pytestmark = pytest.mark.grid

CHATS = json.dumps({"messages": TALK}) + "\n"


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


def test_dropout_is_left_off_and_said(here, capsys):
    spec = json.loads(Path("model/tokenizer.json").read_text())
    plain = load_tokenizer("model")
    set_tokenizer(model=spec["model"] | {"dropout": 0.5})
    dropping, text = load_tokenizer("model"), "once there was a poor rower " * 20
    assert plain.encode([text])[0][0].tolist() == dropping.encode([text])[0][0].tolist()
    assert finetune.main([*TRAIN, "--dry-run"]) == 0
    assert "note: the tokenizer's BPE dropout (0.5) is left off" in capsys.readouterr().out


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

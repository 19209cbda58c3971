"""Files and formats: every kind of file, every format, and what is said about bad ones."""

import gzip
import json
import os
import re
import sys
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.data.files import sources
from trireme.engine.data.files.folders import find_data
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.files.sources import DataFile, Reader, spool
from trireme.engine.data.formats.examples import Chat, Completion, Ids, Text
from trireme.engine.data.formats.formats import _LIKELY, find_format, parse_map, parsed, read_row, rename
from trireme.models.config import InputError

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def rows(path, **more):
    return [row for file in find_data(str(path)).files for row in Reader(file, **more).rows()]


def values(path, **more):
    return [row.value for row in rows(path, **more)]


def example(row):
    return read_row(row)[1]


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": "y"}\n'),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "x"}\r\n\r\n  \n{"text": "y"}'),  # BOM, CRLF, blank lines, no last line end
        ("a.json", b'[{"text": "x"}, {"text": "y"}]'),
        ("a.json", b'\xef\xbb\xbf [\r\n {"text":\r\n "x"}\r\n,\r\n{"text": "y"}\r\n]\r\n'),
        ("a.json", b'{"text": "x"}\n{"text": "y"}\n'),  # JSONL by another name
        ("a.json", b'{\n"text": "x"\n}\n{\n"text": "y"}\n'),  # objects one after another
        ("a.jsonl", b'[{"text": "x"},\n{"text": "y"}]'),  # an array by another name
        ("a.json", b'[{"text": "x"}]\n[]\n[{"text": "y"}]'),  # arrays one after another
        ("a.jsonl", b'[{"text": "x"}]\n[{"text": "y"}]\n'),
        ("a.csv", b'text\nx\n"y"\n'),
        ("a.csv", b"\xef\xbb\xbftext\r\nx\r\ny\r\n"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n{"text": "y"}\n', mtime=0)),
        ("a.JSON.GZ", gzip.compress(b'[{"text": "x"}, {"text": "y"}]', mtime=0)),
    ],
)
def test_the_same_rows_from_every_kind_of_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert values(tmp_path / name) == [{"text": "x"}, {"text": "y"}]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"messages": [TALK, TALK]}), path)
    assert values(path) == [{"messages": TALK}] * 2
    times = pyarrow.array([1234567890123456789], pyarrow.timestamp("ns"))  # of which Python has none
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"], "when": times}), path)
    assert values(path) == [{"text": "x", "when": 0.5}]
    assert read_row(values(path)[0])[2] == ["when"]
    nested = pyarrow.StructArray.from_arrays([times], ["when"])
    twice = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["text", "text"])
    for table, what in (pyarrow.table({"text": nested}), "can be read: Nanosecond"), (twice, "names a column twice"):
        pyarrow.parquet.write_table(table, path)
        with pytest.raises(InputError, match=what):
            values(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 999}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + bytes(byte ^ 255 for byte in whole[40:60]) + whole[60:])
    with pytest.raises(InputError, match="not Parquet"):
        values(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not Parquet"):
        values(path)


def test_without_pyarrow_what_to_install_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="needs pyarrow. Install it: pip install pyarrow"):
        values(tmp_path / "a.parquet")


def text_rows(path, content, **more):
    path.write_bytes(content)
    return [(row.value["text"], row.starts, row.ends) for row in rows(path, **more)]


def test_text_is_parted_by_separator_lines(tmp_path):
    path = tmp_path / "a.txt"
    content = b"\n one\ntwo\n<|endoftext|>\n\n<|endoftext|>\nthree </s> four\n</s>\r\nfive\r\n"
    assert text_rows(path, content) == [(" one\ntwo", True, True), ("three </s> four\n</s>\nfive", True, True)]
    assert [t for t, *_ in text_rows(path, content, eos_token="</s>")] == [" one\ntwo", "three </s> four", "five"]
    assert text_rows(path, b"<|endoftext|>\n\n<|endoftext|>\n") == []


def test_a_long_text_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.engine.data.files.text._PIECE", 10)
    pieces = text_rows(tmp_path / "a.txt", b"0123456789\n 01234\nabc\n\nde\n<|endoftext|>\nx\n")
    assert pieces == [("0123456789\n 01234\n", True, False), ("abc\n\nde", False, True), ("x", True, True)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=20), min_size=1), min_size=1), st.integers(1, 30))
def test_json_is_read_in_chunks_of_any_size(tmp_path_factory, data, chunk):
    from unittest import mock

    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8", newline="")
    with mock.patch("trireme.engine.data.files.json_rows._CHUNK", chunk):
        assert values(path) == data


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"text": "x"', "is not JSON (Expecting ',' delimiter at character 13)"),
        (b"[1, 2]", "holds a list, expected an object"),
        (b'"text"', "holds a string, expected an object"),
        (b'{"text": "a", "text": "b"}', "the key 'text' occurs twice"),
        (b'{"text": "a\0b"}', "holds NUL bytes: damaged, or not UTF-8"),
        (
            b'{"text": "\xe9"}',
            "is not UTF-8 (byte 0xe9 at 10); if all of the file is in one encoding, iconv converts it",
        ),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"input_ids": [' + b"9" * 5000 + b"]}", "holds a number of thousands of digits"),
    ],
)
def test_a_bad_line_does_not_stop_the_file(tmp_path, line, what):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' + line + b'\n{"text": "y"}\n')
    found = rows(tmp_path / "a.jsonl")
    assert [r.number for r in found] == [1, 2, 3]
    assert found[2].value == {"text": "y"}
    assert isinstance(found[1].value, BadRow)
    assert str(found[1].value) == what


def test_a_file_that_is_not_there(tmp_path):
    for name in ("a", "a.jsonl", "a.xml"):
        with pytest.raises(InputError, match="No such file or directory. Correct the path"):
            values(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.xml", b"<x/>", "unknown kind of data. Expected .jsonl"),
        ("a", b"x", "unknown kind of data"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        ("a.txt", "text".encode("utf-16"), "is UTF-16. Convert it: iconv"),
        ("a.txt", b"caf\xe9\n", "is not UTF-8 (invalid continuation byte)"),
        ("a.txt", b"ok\nno\0pe\n", "line 2 holds NUL bytes"),
        ("a.json", b'[{"text": "x"}, {"text": ]', "line 1 is not JSON: Expecting value"),
        ("a.json", b'[{"text": "x"},\n{"text": "y"}', "line 2 is not JSON: the file ends inside the list"),
        ("a.json", b'[{"text": "x"},\n{"text": "y', "line 2 is not JSON: Unterminated string"),
        ("a.json", b'[{"text": "x", "text": "y"}]', "row 1: the key 'text' occurs twice"),
        ("a.json", b'[{"text": "x"}]\nand more', "line 2 is not JSON: Expecting value"),
        ("a.json", b'[{"input_ids": [' + b"9" * 5000 + b"]}]", "row 1 holds a number of thousands of digits"),
        ("a.csv", b"text,text\nx,y\n", "the header names a column twice"),
        ("a.csv", b"text\nx\0y\n", "line 2 holds NUL bytes"),
        ("a.csv", b'text\n"x\ny\n', "line 2 to 3 is not CSV: unexpected end of data. Is a quotation mark missing?"),
        ("a.jsonl.gz", b"not gzip", "is a damaged .gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-20], "is a damaged .gz"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        values(tmp_path / name)
    assert what in str(error.value)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_paths_and_weights(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}')
    assert find_data(f"{path}:0.5").files == [DataFile(path, 0.5)]
    os.mkfifo(tmp_path / "pipe.jsonl")
    for text, what in [
        (str(tmp_path / "pipe.jsonl"), "is not a regular file. Pipe it into standard input: --data -"),
        (f"{path}:0", "the weight is 0"),
        (f"{path}:1001", "the weight is more than 1,000"),
        (str(tmp_path / "b.jsonl"), "No such file"),
        (f"{path}:x", "No such file|unknown kind"),
    ]:
        with pytest.raises(InputError, match=what):
            find_data(text)


def test_csv_cells(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('messages,n\n"[{""role"": ""user""}]",1\n"a\nb",2\nx\n', newline="")
    found = rows(path)
    assert parsed(found[0].value) == {"messages": [{"role": "user"}], "n": "1"}
    assert found[1].value == {"messages": "a\nb", "n": "2"}
    assert str(found[2].value) == "has 1 cells, the header 2"
    assert found[2].number == 5
    deep = "[" * 100_000
    path.write_text(f"messages\n{deep}\n")
    assert parsed(rows(path)[0].value) == {"messages": deep}


@contextmanager
def piped(content: bytes):
    """A pipe that holds `content`, and then ends."""
    given, give = os.pipe()
    os.write(give, content)
    os.close(give)
    with os.fdopen(given, "rb") as stream:
        yield stream


def test_standard_input(tmp_path):
    for content, name in ((b' \n{"text": "x"}', "stdin.jsonl"), (b"Once upon", "stdin.txt")):
        folder = tmp_path / name
        for later in (content, b"later"):  # resuming reads what was kept
            with piped(later) as stream:
                assert spool(stream, folder).path == folder / name
                assert (folder / name).read_bytes() == content
    with open(os.openpty()[1], "rb") as terminal, pytest.raises(InputError, match="nothing is piped"):
        spool(terminal, tmp_path / "none")
    with piped(b"") as stream, pytest.raises(InputError, match="standard input is empty"):
        spool(stream, tmp_path / "none")


def test_no_signal_waits_for_standard_input(tmp_path, monkeypatch):
    """One that arrives before a read is handled when a wait ends, though nothing more is ever written."""
    given, give = os.pipe()
    waits = iter([([], [], []), KeyboardInterrupt])

    def waited(files, _, __, seconds):
        assert files == [given]
        assert 0 < seconds <= 1
        if (outcome := next(waits)) is KeyboardInterrupt:
            raise KeyboardInterrupt
        return outcome

    monkeypatch.setattr(sources.select, "select", waited)
    with os.fdopen(given, "rb") as stream, os.fdopen(give, "wb"), pytest.raises(KeyboardInterrupt):
        spool(stream, tmp_path)


# ---------------------------------------------------------------- formats


def test_every_format():
    assert example({"text": "x", "id": 1}) == Text("x")
    assert example({"prompt": "p", "completion": "c"}) == Completion("p", "c")
    assert example({"messages": TALK, "text": "not this"}) == Chat(TALK)
    assert example({"input_ids": [1, 2], "attention_mask": [1, 1]}) == Ids([1, 2])
    assert example({"input_ids": [1, 2], "labels": [-100, 2]}) == Ids([1, 2], [False, True])
    made = example({"prompt": TALK[:1], "completion": TALK[1:]})
    assert made.messages == [{**TALK[0], "train": False}, TALK[1]]


def test_alpaca():
    made = example({"instruction": "Add.", "input": "1 2", "output": "3", "history": [["hi", "ho"]], "system": "S"})
    assert [(m["role"], m["content"]) for m in made.messages] == [
        *(("system", "S"), ("user", "hi"), ("assistant", "ho"), ("user", "Add.\n1 2"), ("assistant", "3"))
    ]
    assert made.plain is None  # the plain prompt has no place for a history
    plain = example({"instruction": "Add.", "input": "", "output": "3"}).plain
    assert plain.prompt.endswith("the request.\n\n### Instruction:\nAdd.\n\n### Response:\n")
    assert plain.completion == "3"
    assert (
        "### Input:\n1 2\n\n### Response:\n"
        in example({"instruction": "a", "input": "1 2", "output": "3"}).plain.prompt
    )


def test_sharegpt_with_tools():
    turns = [
        ("human", "Q"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "O"),
        ("gpt", "A"),
    ]
    made = example(
        {"conversations": [{"from": f, "value": v} for f, v in turns], "tools": '[{"name": "f"}]', "system": "S"}
    )
    call = {"id": "call00200", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert made.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "O", "tool_call_id": "call00200"},
        {"role": "assistant", "content": "A"},
    ]
    assert made.tools == [{"type": "function", "function": {"name": "f"}}]


def test_real_conversations_with_tools(real):
    data = json.loads((real / "data" / "glaive_toolcall_en_demo.json").read_text())
    calls = sum(len(m.get("tool_calls", [])) for row in data for m in example(row).messages)
    assert calls >= 211


def test_messages_of_openai():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    made = example(
        {
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "assistant", "content": "c", "weight": 0, "name": None},
            ]
        }
    )
    assert made.messages[0] == {"role": "user", "content": ["a", "b"]}
    assert made.messages[1] == {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert made.messages[2] == {"role": "assistant", "content": "c", "train": False}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": "hello"}, "'messages' is a string, expected a list of {role, content}"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["hi"]}, "messages[0] is a string, expected {role, content}"),
        ({"messages": [{"content": "x"}]}, "messages[0] has no 'role'; its keys are 'content'"),
        ({"messages": [{"role": "assistant"}]}, "messages[0] has no 'content'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0] has content null"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]: 'content' is a number, expected a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0] holds a part of type 'image'"),
        ({"messages": TALK[:1]}, "no message has the role 'assistant'"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "every assistant message is empty"),
        ({"messages": [{**TALK[1], "weight": 2}]}, "'weight' is 2, expected 0 or 1"),
        ({"messages": [{**TALK[1], "train": "false"}]}, "'train' is 'false', expected true or false"),
        (
            {"messages": [{**TALK[1], "tool_calls": "f()"}]},
            "'tool_calls' is a string that is not JSON",
        ),
        ({"messages": TALK, "tools": "{"}, "'tools' is a string that is not JSON"),
        ({"messages": TALK, "tools": {"a": 1}}, "'tools' is not a list of objects"),
        ({"conversations": [{"from": "dog", "value": "x"}]}, "'from' is 'dog', expected one of human, user, gpt"),
        ({"conversations": [{"value": "x"}]}, "conversations[0] has no 'from'"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "'value' is null, expected a string"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "the function call is not JSON"),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "a function call has no 'name'"),
        ({"prompt": "p", "completion": ""}, "'completion' is empty"),
        ({"prompt": None, "completion": "c"}, "'prompt' is null, expected a string"),
        ({"instruction": "i", "output": " "}, "'output' is empty"),
        (
            {"instruction": "i", "output": "o", "history": [["a"]]},
            "'history' is not a list of [question, answer] pairs",
        ),
        ({"text": ""}, "'text' is empty"),
        ({"text": 3.5}, "'text' is a number, expected a string"),
        ({"text": b"x"}, "'text' is bytes, expected a string"),
        ({"input_ids": []}, "'input_ids' is empty"),
        ({"input_ids": [1, "2"]}, "'input_ids' holds something that is not a whole number"),
        ({"input_ids": [1, True]}, "'input_ids' holds something that is not a whole number"),
        ({"input_ids": [1, 2], "labels": [2]}, "'labels' has 1 entries, 'input_ids' 2"),
        (
            {"input_ids": [1, 2], "labels": [2, -100]},
            "labels[0] is 2, expected -100 or input_ids[0] = 1 (labels are not",
        ),
        ({"question": "q", "answer": "a"}, "('question', 'answer'); expected messages; conversations;"),
        ({"question": "q", "answer": "a"}, "Perhaps --map prompt=question,completion=answer."),
        ({"context": "c", "question": "q", "answer": "a"}, "--map instruction=question,input=context,output=answer."),
        ({"prompt_ids": [1, 2], "completion_ids": [3]}, "Join prompt_ids and completion_ids as input_ids, with comple"),
        ({"tokens": [1, 2], "token_type_ids": [0, 0]}, "Perhaps --map input_ids=tokens."),
        (
            {"prompt": "p", "chosen": "c", "rejected": "r"},
            "is preference data, good answers and bad ones",
        ),
        ({"messages": TALK, "label": False}, "is preference data"),
        ({"prompt": "p", "completion": "c", "label": True}, "is preference data"),
        ({}, "no known format has its keys (none)"),
        ({"Messages": TALK}, "or input_ids. Perhaps --map messages=Messages."),
        ({"q": 1, "a": 2}, "or input_ids. --map names your columns, as instruction=question,output=answer."),
    ],
)
def test_bad_rows_say_what_is_wrong(row, what):
    with pytest.raises(BadRow) as error:
        example(row)
    assert what in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("ours", "theirs"), _LIKELY)
def test_a_hint_for_columns_works(ours, theirs):
    """The --map that an error proposes makes a row that is read, with every column that it names."""
    row = {name: f"the {name}" for name in theirs}
    with pytest.raises(BadRow) as error:
        find_format(row)
    (hint,) = re.findall(r"Perhaps --map (\S+)[.]", str(error.value))
    assert not any(pair.partition("=")[0] == pair.partition("=")[2] for pair in hint.split(","))
    renamed = rename(row, parse_map(hint))
    assert renamed == {o: f"the {t}" for o, t in zip(ours, theirs, strict=True)}
    assert "the" in str(find_format(renamed).read(renamed))


def test_columns_may_be_swapped_and_mapped_to_themselves():
    swap = parse_map("prompt=completion,completion=prompt")
    assert rename({"prompt": "a", "completion": "b"}, swap) == {"completion": "a", "prompt": "b"}
    itself = parse_map("prompt=prompt,completion=response")
    assert rename({"prompt": "a", "response": "b"}, itself) == {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tatsu-lab/alpaca", "hf download tatsu-lab/alpaca --repo-type dataset --local-dir alpaca"),
        ("https://example.org/a.jsonl", "Download it first: curl -LO https://example.org/a.jsonl"),
        ("data/a.jsonl", "No such file or directory. Correct the path."),
    ],
)
def test_data_that_is_elsewhere_is_answered_with_how_to_get_it(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        find_data(name)
    assert says in str(error.value)


def hinted(row):
    """The row as the --map of its refusal makes it."""
    with pytest.raises(BadRow) as refusal:
        read_row(row)
    text = str(refusal.value).rstrip(".").rpartition("--map ")[2]
    return rename(row, parse_map(text))


GOOD, BAD = [{"role": "assistant", "content": "good"}], [{"role": "assistant", "content": "bad"}]
ASK = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "chosen": "good", "rejected": "bad"},
        {"instruction": "?", "input": "", "chosen": "good", "rejected": "bad"},
        {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
        {"chosen": ASK + GOOD, "rejected": ASK + BAD},
        {"prompt": "?", "messages": ASK + GOOD, "chosen": ASK + GOOD, "rejected": ASK + BAD, "score": 0.0},
        {"conversations": ASK + GOOD, "chosen": {"from": "gpt", "value": "x"}, "rejected": {"from": "gpt"}},
        {"messages": ASK + GOOD, "label": True},
        {"prompt": "?", "completion": "good", "label": True},
    ],
)
def test_preference_data_is_refused_with_a_way_that_trains_on_the_good_answers(row):
    made = hinted(row)
    read = repr(example(made))
    assert "good" in read
    assert "bad" not in read


def test_a_number_as_label_is_no_preference():
    form, _, unused = read_row({"text": "x", "label": 3, "a": None, "b": ""})
    assert (form.name, unused) == ("text", ["label"])


def test_map():
    assert parse_map("prompt=question, completion=answer") == {"question": "prompt", "answer": "completion"}
    assert parse_map(None) == {}
    assert rename({"q": 1, "prompt": 2, "x": 3}, {"q": "prompt"}) == {"prompt": 1, "x": 3}
    for text in ("prompt", "prompt=", "=x"):
        with pytest.raises(InputError, match="expected OURS=YOURS"):
            parse_map(text)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "value": "x"}]}]},
         "messages[0] holds a part without 'text'; its keys are 'type', 'value'"),
        ({"messages": [{"role": "human", "content": "x"}, {"role": "dog", "content": "y"}]},
         "no message has the role 'assistant', so there is nothing to train on (its roles: 'user', 'dog')"),
        ({"role": "user", "content": "x"}, 'A conversation is a row: {"messages": [{"role"'),
        ({"word " * 400: "x"}, "more characters)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(row, says):
    with pytest.raises(BadRow) as error:
        find_format(row).read(row)
    assert says in str(error.value)
    assert len(str(error.value)) < 500


def test_a_map_the_wrong_way_round_is_answered_with_the_right_one():
    with pytest.raises(InputError, match="no .* column 'question'; perhaps --map prompt=question,completion=answer"):
        parse_map("question=prompt,answer=completion")


def test_a_map_names_columns_of_a_format():
    """One letter less, and a system prompt would be left out in silence."""
    with pytest.raises(InputError, match="no format has a column 'sytem'; there are .*prompt, .*system, text"):
        parse_map("instruction=ask,output=reply,sytem=persona")
    assert parse_map("system=persona,unused=a,unused=b") == {"persona": "system", "a": "unused", "b": "unused"}


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_cells_end_as_the_first_line_says(tmp_path, separator):
    path = tmp_path / ("a.tsv" if separator == "\t" else "a.csv")
    path.write_text(f'prompt{separator}completion\n"two\nlines"{separator}b\nc{separator}"d,;\te"\nf\n')
    rows = list(Reader(DataFile(path)).rows())
    assert [row.number for row in rows] == [2, 4, 5], "where each begins"
    assert [row.value for row in rows[:2]] == [{"prompt": "two\nlines", "completion": "b"},
                                               {"prompt": "c", "completion": "d,;\te"}]  # fmt: skip

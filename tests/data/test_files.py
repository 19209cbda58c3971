"""Files: what they hold, or the word of their fault; folders: which files are trained on."""

import gzip
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.data.find import FileRows as FileRows
from trireme.engine.data.find import find, spool
from trireme.engine.data.read import BadRow
from trireme.engine.data.tables import class_names
from trireme.models.config import InputError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.json")

LINES = b'{"text": "a"}\n{"text": "b"}\n'
AB = [{"text": "a"}, {"text": "b"}]


def zst(content):
    half = len(content) // 2  # two frames, as parallel tools write them
    return b"".join(bytes(pyarrow.compress(part, "zstd", asbytes=True)) for part in (content[:half], content[half:]))


def in_arrow():
    table, content = pyarrow.json.read_json(pyarrow.BufferReader(LINES)), pyarrow.BufferOutputStream()  # without pandas
    with pyarrow.ipc.new_stream(content, table.schema) as stream:
        stream.write_table(table)
    return content.getvalue().to_pybytes()


PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zst}
TABLE = [  # name, bytes, rows (None: a bad one) or a word of the fault
    ("a.jsonl", LINES, AB),
    ("a.ndjson", b"\xef\xbb\xbf" + LINES + b"\n\n\xef\xbb\xbf" + LINES, AB * 2),
    ("a.jsonl", b'[{"text": "a"},\n{"text": "b"}]', AB),
    ("a.jsonl", b'{\n  "text": "a"\n}\n{\n  "text": "b"\n}\n', AB),
    ("a.jsonl", b'{"text": "a"\n{"text": "b"}\n', [None, AB[1]]),
    ("a.jsonl", LINES + b'[1]\n{"text": "b", "text": "c"}\n\xff\n' + LINES, [*AB, None, None, None, *AB]),
    ("a.jsonl", b'{"text": "' + b"a" * (1 << 24) + b'"}\n' + LINES, [None, *AB]),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b'}\n{"text": ' + b"9" * 5000 + b"}\n" + LINES, [None, None, *AB]),
    ("a.jsonl", b'{"text": "a", "n": NaN}\n', [{"text": "a", "n": None}]),
    ("a.json", LINES, AB),
    ("a.json", b'[{"text": "a"}, {"text": "b"}]', AB),
    ("a.json", b'{"text": "a"} {"text": "b"}', AB),
    ("a.json", b'[{"text": "a", "text": "c"}, {"text": "b"}]', [None, AB[1]]),
    ("a.json", b'[{"text": "a"}, {"text": "b"', "complete"),
    ("a.json", b'[{"text": "a"}, {"text": b}]', "row 2"),
    ("a.csv", b"text\na\nb\n", AB),
    ("a.csv", b"text;n\r\na;1\r\nb;nan\r\n", [{"text": "a", "n": "1"}, {"text": "b", "n": None}]),
    ("a.csv", b"sep=;\ntext;n\na;1,5\n", [{"text": "a", "n": "1,5"}]),
    ("a.csv", b'text,n\n"a\n""q""",1\n', [{"text": 'a\n"q"', "n": "1"}]),
    ("a.csv", b"text,n\na,1\na,1,2\ntext,n\n", [{"text": "a", "n": "1"}, None, None]),
    ("a.csv", b'text\n"a\nb\n', "quotation"),
    ("a.csv", b"text, n \na, 1\ntext, n \n", [{"text": "a", "n": " 1"}, None]),
    ("a.csv", b"text,text\na,b\n", "twice"),
    ("a.csv", b"text\na\0b\n", [{"text": "a\0b"}]),
    ("a.tsv", b'text\tn\n"a, b\t1\nc"\t2\n', [{"text": '"a, b', "n": "1"}, {"text": 'c"', "n": "2"}]),
    ("a.tsv", b'text\tn\n"a ""q"""\t1\n', [{"text": 'a "q"', "n": "1"}]),
    ("a.tsv", b"text,n\na,1\n", [{"text": "a", "n": "1"}]),
    ("a.txt", b"a\n<|endoftext|>\n\nb\n", AB),
    ("a.md", b"a<|endoftext|>b</s>c", [{"text": "a"}, {"text": "b</s>c"}]),
    ("a.txt", b"  a\n\n  b\n\n", [{"text": "  a\n\n  b"}]),
    ("a.txt", b"\n \n", []),
    ("a.txt", b"a\xe4", "UTF-8"),
    ("a.txt", b"a\0b", "NUL"),
    ("a.txt", LINES, ".jsonl"),
    ("a.csv", LINES, ".jsonl"),
    ("a.txt", "a".encode("utf-16"), "iconv"),
    ("a.jsonl", gzip.compress(LINES, mtime=0), ".gz"),
    ("a.jsonl.gz", LINES, "complete"),
    ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "line 3"),
    ("a.jsonl.xz", b"\xfd7zXZ", "xzcat"),
    ("a.jsonl", b"GGUF\3\0\0\0", "GGUF"),
    ("a.parquet", b"PAR1PAR1", "Parquet"),
    ("a.arrow", b"ARROW1\0\0", "complete"),
    ("a.arrow", in_arrow().replace(bytes([1, 0, 0, 0, 2, 0, 0, 0]), b"\1\0\0\0\0\0\0\x7f"), "a.arrow"),
    ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "lfs"),
    ("a.jsonl", b"", "empty"),
    ("a.docx", b"x", "unknown kind"),
    ("absent.jsonl", None, "Correct"),
]


def rows_of(path):
    values = [row.value for file in find(str(path)).files for row in FileRows(file.files)]
    return [None if isinstance(value, BadRow) else value for value in values]


@pytest.mark.parametrize(("name", "content", "rows"), TABLE, ids=lambda value: str(value)[:40])
def test_what_a_file_holds(tmp_path, name, content, rows):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    if not isinstance(rows, str):
        assert rows_of(path) == rows
        return
    with pytest.raises(InputError) as error:
        rows_of(path)
    assert rows in str(error.value)


@pytest.mark.grid
@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow"])
def test_the_same_rows_from_every_kind_of_file(tmp_path, kind, packing):
    path, whole = tmp_path / f"a{kind}{packing}", tmp_path / "whole"
    table = pyarrow.Table.from_pylist(AB)
    if kind == ".parquet":
        parquet.write_table(table, whole)
    elif kind == ".arrow":
        whole.write_bytes(in_arrow())
    else:
        text = {".csv": "text\na\nb\n", ".tsv": "text\na\nb\n", ".txt": "a\n<|endoftext|>\nb"}.get(kind)
        whole.write_bytes(text.encode() if text else json.dumps(AB).encode() if kind == ".json" else LINES)
    path.write_bytes(PACKED[packing](whole.read_bytes()))
    assert rows_of(path) == AB


@pytest.mark.full
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), st.none() | st.text() | st.lists(st.integers()), min_size=1)),
    indent=st.sampled_from([None, 0, 2]),
    form=st.sampled_from(["array", "sequence"]),
)
@settings(max_examples=60, deadline=None)
def test_objects_of_json_in_any_layout(tmp_path_factory, rows, indent, form):
    path = tmp_path_factory.mktemp("json") / "a.json"
    each = [json.dumps(row, indent=indent) for row in rows]
    path.write_text("[" + ",\n".join(each) + "]" if form == "array" else "\n".join(each) or " ")
    assert rows_of(path) == rows


@pytest.mark.parametrize("separator", [" ", "\n", "\n\n", "<|endoftext|>"])
def test_pieces_of_a_long_text_are_the_text(tmp_path, separator):
    text, path = separator.join(f"word {i} of it" for i in range(60_000)), tmp_path / "a.txt"
    path.write_text(text)
    pieces = list(FileRows([path]))
    documents = [""]
    for before, row in zip([None, *pieces], pieces, strict=False):
        documents += [] if not row.starts else [""]
        documents[-1] += row.value["text"]
        if not row.starts:
            assert before.value["text"].endswith(row.before)
            assert row.value["text"].startswith(before.after)
    assert documents[1:] == (text.split(separator) if "<" in separator else [text])
    assert all(len(row.value["text"]) < 1 << 20 for row in pieces)
    assert separator != "\n" or len(pieces) > 1
    assert [row.value["text"] for row in FileRows([path], most=1)][0] == pieces[0].value["text"]


def test_values_of_arrow(tmp_path):
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]
    row = {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}], "label": 1}
    names = json.dumps({"info": {"features": {"label": {"_type": "ClassLabel", "names": ["neg", "pos"]}}}})
    table = pyarrow.Table.from_pylist([row]).replace_schema_metadata({b"huggingface": names.encode()})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [row]  # without the keys that Arrow gives each object
    assert class_names(tmp_path / "a.parquet", "label") == ("neg", "pos")
    when = pyarrow.table({"text": ["a"], "at": pyarrow.array([0], pyarrow.timestamp("ns"))})
    parquet.write_table(when, tmp_path / "b.parquet")
    assert rows_of(tmp_path / "b.parquet")[0].keys() == {"text", "at"}


FOLDERS = [  # names, trained on, held out, a word of the note or of the fault
    ("train.jsonl valid.jsonl test.jsonl", "train.jsonl", "valid.jsonl", "test.jsonl"),
    ("a.jsonl b.jsonl", "a.jsonl b.jsonl", "", ""),
    ("a.jsonl README.md LICENSE.txt x.png y.png z.py", "a.jsonl", "", "2 .png"),
    ("README.md a.png", "", "", "expected"),
    ("a.md b.md README.md", "a.md", "", "1 .md"),
    ("d/train-0-of-2.jsonl d/train-1-of-2.jsonl", "train-0-of-2.jsonl train-1-of-2.jsonl", "", ""),
    ("train/a-0-of-1.jsonl train/cache-1.arrow dev/state.json dev/b.jsonl", "a-0-of-1.jsonl", "b.jsonl", "1 .arrow"),
    ("a.jsonl dataset_info.json .hidden/b.jsonl .c.jsonl", "a.jsonl", "", "1 .json"),
    ("train.jsonl/x", "", "", "expected"),
    ("a.jsonl a.json", "", "", ""),  # rows would be read twice
    ("a-0-of-2.jsonl", "", "", ""),  # or be missing
    ("train_x-0-of-1.jsonl train_y-0-of-1.jsonl", "", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("names", "train", "held", "word"), FOLDERS, ids=lambda value: value[:40])
def test_which_files_of_a_folder_are_read(tmp_path, names, train, held, word):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"words" if name.endswith(".md") else LINES)
    if not train:
        with pytest.raises(InputError, match=re.escape(str(tmp_path))) as error:
            find(str(tmp_path))
        assert word in str(error.value)
        return
    sources = find(str(tmp_path))
    named = lambda files: " ".join(path.name for file in files for path in file.files)
    assert named(sources.files).startswith(train)
    assert named(sources.held_out) == held
    assert word in " ".join(sources.notes)


def test_patterns_weights_and_what_is_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "sub/b.jsonl", "sub/deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    named = lambda text: [str(file) for file in find(text).files]
    assert named("*.jsonl") == ["a.jsonl"]
    assert named("**/*.jsonl") == ["a.jsonl", "sub/b.jsonl", "sub/deep/c.jsonl"]
    assert named("sub/*.jsonl:0.5") == ["sub/b.jsonl"]
    assert find("a.jsonl:2").files[0].weight == 2
    for text, word in {
        "": "FILE", "a.jsonl:0": "weight", "a.jsonl:9999": "weight", "none*.jsonl": "none",
        "https://x/y.jsonl": "curl",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=word):
            find(text)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (LINES, ""),
        (b"Once upon a time, there was.\n", ""),
        (b"prompt,completion\na,b\n", "table"),
        (gzip.compress(LINES, mtime=0), "zcat"),
        (b"PAR1", "Name a file"),
        (b"", "empty"),
    ],
)
def test_standard_input(tmp_path, content, word):
    path = tmp_path / "piped"
    path.write_bytes(content)
    with path.open("rb") as pipe:
        if not word:
            file = spool(pipe, tmp_path / "spool")
            assert list(FileRows(file.files))
            return
        with pytest.raises(InputError, match=word) as error:
            spool(pipe, tmp_path / "spool")
        assert "spool" not in str(error.value)

"""Files and folders of strangers: read, or refused in words that name the cause and a way that works."""

import bz2
import errno
import glob
import gzip
import json
import lzma
import os
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from chats import CHATML, TALK, make_tokenizer

from trireme.engine.data import cache
from trireme.engine.data.codec import load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.files import cards, folders, json_rows, text
from trireme.engine.data.files.folders import MOST_FILES, find_data
from trireme.engine.data.files.sources import KINDS, Reader
from trireme.models.config import InputError

ROWS = [{"text": f"row {i}"} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def put(folder, **files):
    """Files of a folder, with __ for each /; a name's last _ is the dot."""
    for name, content in files.items():
        path = folder / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def values(name):
    return [row.value for file in find_data(str(name)).files for row in Reader(file).rows()]


def names(found):
    return [[file.path.name for file in files] for files in (found.files, found.held)]


def fails(name):
    with pytest.raises(InputError) as error:
        values(name)
    return str(error.value)


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return load_codec(make_tokenizer(tmp_path_factory.mktemp("model")).folder)


def load(codec, *sources, **options):
    return load_dataset([str(source) for source in sources], codec, DataOptions(**{"seq_len": 64} | options))


# ---------------------------------------------------------------- kinds


def zst(content):
    pyarrow = pytest.importorskip("pyarrow")
    half = len(content) // 2  # two frames, as parallel tools write them
    return b"".join(bytes(pyarrow.compress(part, "zstd", asbytes=True)) for part in (content[:half], content[half:]))


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


@pytest.mark.parametrize("suffix", ["", *PACKED])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.csv", "a.txt", "a.md"])
def test_packed_files_of_every_kind(tmp_path, name, suffix):
    content = {"a.csv": b"text\nrow 0\nrow 1\nrow 2\n", "a.json": json.dumps(ROWS).encode()}.get(name, LINES)
    content = b"row 0\n<|endoftext|>\nrow 1\n<|endoftext|>\nrow 2\n" if name[2:] in ("txt", "md") else content
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(PACKED[suffix](content) if suffix else content)
    assert values(path) == ROWS


@pytest.mark.parametrize("suffix", PACKED)
def test_damaged_packed_files(tmp_path, suffix):
    whole = PACKED[suffix](LINES * 500)
    for content in (whole[: len(whole) * 2 // 3], whole[:30] + b"\xff" * 9 + whole[39:]):
        (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
        says = fails(tmp_path / f"a.jsonl{suffix}")
        assert f"is a damaged {suffix} (" in says
        assert "\n" not in says


def test_a_packed_table_without_space_to_unpack_it(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").table({"text": ["a"]}), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet.xz"
    path.write_bytes(lzma.compress((tmp_path / "a.parquet").read_bytes()))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    assert "a.parquet.xz: it cannot be unpacked into a file in" in (says := fails(path))
    assert "No space left on device. Unpack it, or set TMPDIR" in says


@pytest.mark.parametrize("suffix", PACKED)
def test_all_streams_of_a_packed_file_are_read(tmp_path, suffix):
    """Of files that were joined, some tools put zeros between them; other bytes behind the end are damage."""
    path, part = tmp_path / f"a.jsonl{suffix}", PACKED[suffix](LINES)
    for between in (b"", *([b"\0" * 8] if suffix != ".zst" else [])):
        path.write_bytes(part + between + part)
        assert values(path) == 2 * ROWS
    path.write_bytes(part + b"more")
    assert f"is a damaged {suffix} (" in fails(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", gzip.compress(LINES, mtime=0), "is gzip with another extension. Rename it: mv {0} {0}.gz"),
        ("a.json", lzma.compress(LINES), "is xz with another extension. Rename it: mv {0} {0}.xz"),
        ("a.txt", bz2.compress(LINES), "is bzip2 with another extension"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd" + LINES, "is Zstandard with another extension"),
        ("a.json", b"PAR1" + LINES, "is Parquet with another extension. Rename it: mv {0} {1}/a.parquet"),
        ("a.csv", b"ARROW1" + LINES, "is Arrow with another extension. Rename it: mv {0} {1}/a.arrow"),
        ("a.jsonl", b"PK\x03\x04" + LINES, "is a zip archive. Unpack it: unzip {0}"),
        ("a.jsonl", b"<!DOCTYPE html><html>", "is a web page, not data"),
        ("a.json", b"\x80\x04\x95abc", "is a pickle of Python"),
        ("a.txt", b"%PDF-1.7", "is a PDF"),
    ],
)
def test_files_by_another_name(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    assert says.format(tmp_path / name, tmp_path) in fails(tmp_path / name)


def test_a_web_page_may_be_a_text(tmp_path):
    (tmp_path / "a.txt").write_text("<html>words</html>")
    assert values(tmp_path / "a.txt") == [{"text": "<html>words</html>"}]


def test_byte_order_marks_wherever_files_were_joined(tmp_path):
    """`cat` of two files with one: no row may be lost."""
    bom = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(bom + LINES + bom + LINES)
    assert values(tmp_path / "a.jsonl") == ROWS * 2
    (tmp_path / "a.jsonl").write_bytes(bom + bom + LINES)
    assert values(tmp_path / "a.jsonl") == ROWS


def test_a_header_within_a_joined_table_is_no_row(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext,n\nx,1\n\xef\xbb\xbftext,n\ny,2\n")
    first, fault, second = values(tmp_path / "a.csv")
    assert (first["text"], second["text"]) == ("x", "y")
    assert "is the header again" in str(fault)


# ---------------------------------------------------------------- Arrow


@pytest.fixture
def arrow():
    pytest.importorskip("pyarrow.parquet")
    return pytest.importorskip("pyarrow")


STRING = {"type": "string"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {key: STRING}}}}
    for name, key in (("weather", "town"), ("add", "a"))
]  # fmt: skip
CALLS = [
    {"messages": [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": tool["function"]["name"], "arguments": {key: "Oslo"}}}]},
    ], "tools": [tool]}
    for tool, key in zip(TOOLS, ("town", "a"), strict=True)
]  # fmt: skip


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow"])
def test_nulls_that_arrow_put_in_are_no_arguments(tmp_path, arrow, name):
    """Its columns have one type: every object gets the keys of all. The rows are as they would be as JSON lines."""
    import pyarrow.feather
    import pyarrow.parquet

    table, path = arrow.Table.from_pylist(CALLS), tmp_path / name
    assert table.to_pylist() != CALLS
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, path)
    elif name == "a.arrow":
        pyarrow.feather.write_feather(table, str(path))
    else:
        with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    assert values(path) == CALLS
    for suffix, pack in PACKED.items():
        packed = tmp_path / f"{name}{suffix}"
        packed.write_bytes(pack(path.read_bytes()))
        assert values(packed) == CALLS
    path.write_bytes(path.read_bytes()[:-40])
    assert "that can be read" in fails(path)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
@pytest.mark.parametrize("known", [True, False])
def test_values_that_arrow_holds_as_json_are_values(tmp_path, arrow, name, known, monkeypatch):
    """The datasets library writes those of several types so: a text would have quotation marks and escapes."""
    import pyarrow.parquet

    if not hasattr(arrow, "json_"):
        pytest.skip("this pyarrow does not write the type")
    text, call, tool = 'Say "hi".\nNow', {"function": {"name": "f", "arguments": {"a": None, "b": [1]}}}, TOOLS[0]
    rows = [{"messages": [{"role": "user", "content": [{"type": "text", "text": text}]},
                          {"role": "assistant", "content": text, "tool_calls": [call]}], "tools": [tool]}]  # fmt: skip
    held = [{"messages": [{k: v if k == "role" else [json.dumps(c) for c in v] if k == "tool_calls" else json.dumps(v)
                           for k, v in m.items()} for m in row["messages"]],
             "tools": [json.dumps(tool) for tool in row["tools"]]} for row in rows]  # fmt: skip
    message = [("role", arrow.string()), ("content", arrow.json_()), ("tool_calls", arrow.list_(arrow.json_()))]
    typed = {"messages": arrow.list_(arrow.struct(message)), "tools": arrow.list_(arrow.json_())}
    table, path = arrow.Table.from_pylist(held).cast(arrow.schema(typed.items())), tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    if not known:  # pyarrow before 19: the field says what its strings are
        arrow.unregister_extension_type("arrow.json")
    try:
        assert values(path) == rows
    finally:
        if not known:
            arrow.register_extension_type(arrow.json_())


def test_a_value_that_is_not_the_json_of_its_column_is_refused(arrow, tmp_path):
    column = arrow.field("text", arrow.string(), metadata={"ARROW:extension:name": "arrow.json"})
    with arrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        schema = arrow.schema([column])
        with arrow.ipc.new_stream(sink, schema) as writer:
            writer.write_table(arrow.table({"text": ['"a"', "a", '{"b": 1, "b": 2}']}, schema=schema))
    good, *bad = values(tmp_path / "a.arrow")
    assert good == {"text": "a"}
    assert [str(row)[:30] for row in bad] == ["holds 'a', which its column sa", "the key 'b' occurs twice"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda pa: {"text": pa.array(["x", "y"]).dictionary_encode()}, None),
        (lambda pa: {"text": pa.array(["x", "y"], pa.large_string()), "id": pa.array([1, 2])}, None),
        (lambda pa: {"text": pa.array([b"x", b"y"])}, "'text' is bytes, expected a string"),
        (lambda pa: {"prompt": pa.array([None, None], pa.string()), "completion": ["x", "y"]}, "'prompt' is null"),
        (lambda pa: {"input_ids": pa.array([[1.0, 2.0]] * 2)}, "'input_ids' holds something that is not a whole"),
        (lambda pa: {"messages": pa.array([[("role", "user")]] * 2, pa.map_(pa.string(), pa.string()))},
         "messages[0] is tuple, expected {role, content}"),
        (lambda pa: {"text": pa.array([], pa.string())}, "holds no rows"),
    ],
)  # fmt: skip
def test_types_of_parquet_are_read_or_refused(tmp_path, arrow, codec, make, says):
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table(make(arrow)), tmp_path / "a.parquet")
    if says is None:
        assert load(codec, tmp_path / "a.parquet").report.counts.rows == 2
    else:
        with pytest.raises(InputError, match=re.escape(says)):
            load(codec, tmp_path / "a.parquet")


def saved(arrow, folder, rows, shards=1, **state):
    """As save_to_disk writes it."""
    folder.mkdir(parents=True)
    table, files = arrow.Table.from_pylist(rows), []
    for i in range(shards):
        files.append({"filename": f"data-{i:05d}-of-{shards:05d}.arrow"})
        part = table.slice(i * len(rows) // shards, len(rows) // shards)
        path = str(folder / files[-1]["filename"])
        with arrow.OSFile(path, "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None} | state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_data_set(tmp_path, arrow, codec):
    saved(arrow, tmp_path / "one", ROWS, 3)
    assert values(tmp_path / "one") == ROWS
    for split in ("train", "validation", "test"):
        saved(arrow, tmp_path / "all" / split, ROWS[: 1 + (split == "train")])
    (tmp_path / "all" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation", "test"]}))
    data = load(codec, tmp_path / "all")
    assert (data.report.counts.rows, data.held_out.report.counts.rows) == (2, 1)
    assert any("not read: test" in line for line in data.report.lines())
    saved(arrow, tmp_path / "chosen", ROWS, _indices_files=[{"filename": "indices.arrow"}])
    assert "load_from_disk('" in fails(tmp_path / "chosen")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    assert f"holds a, b. Name one: --data {tmp_path / 'all' / 'a'}" in fails(tmp_path / "all")


# ---------------------------------------------------------------- folders and patterns


def test_a_folder_with_files_for_training_and_for_validation(tmp_path, codec):
    """As mlx-lm wants it; nothing of it is trained on that is not for training."""
    put(tmp_path, train_jsonl=LINES, valid_jsonl=b'{"text": "held"}\n', test_jsonl=b'{"text": "test"}\n')
    assert names(find_data(str(tmp_path))) == [["train.jsonl"], ["valid.jsonl"]]
    data = load(codec, tmp_path)
    assert data.report.counts.rows == 3
    assert data.held_out.report.counts.rows == 1
    said = data.report.lines()
    assert any("held out, by its name" in line and "valid.jsonl" in line for line in said)
    assert any("not read: test.jsonl" in line for line in said)
    put(tmp_path / "other", mine_jsonl=LINES)
    data = load(codec, tmp_path, val=str(tmp_path / "other" / "mine.jsonl"))
    assert data.held_out.report.counts.rows == 3
    assert any("valid.jsonl: not read, as --val is given" in line for line in data.report.lines())
    data = load(codec, tmp_path / "other", val=str(tmp_path))  # of a folder, the part that is for validation
    assert data.held_out.report.counts.rows == 1


@pytest.mark.parametrize(
    ("files", "train", "held"),
    [
        ({"data__train-00000-of-00002_parquet": b"x", "data__train-00001-of-00002_parquet": b"x",
          "data__test-00000-of-00001_parquet": b"x", "README_md": b"x"}, 2, 0),
        ({"gsm8k_train_jsonl": b"x", "gsm8k_test_jsonl": b"x"}, 1, 0),
        ({"en__train-00000-of-00001_csv": b"x", "de__train-00000-of-00001_csv": b"x", "train_more_csv": b"x"}, 3, 0),
        ({"train__a_jsonl": b"x", "train__b_jsonl": b"x", "dev__a_jsonl": b"x"}, 2, 1),
        ({"a_jsonl": b"x", "b_json": b"x", "sub__c_csv": b"x", "dataset_info_json": b"{}", "LICENSE_txt": b"x"}, 3, 0),
        ({"a_txt": b"x", "b_md": b"x", ".cache__c_txt": b"x", "empty_txt": b""}, 1, 0),  # texts are one source
        ({"a_jsonl": b"x", "validation_jsonl": b"x"}, 1, 1),
    ],
)  # fmt: skip
def test_which_files_of_a_folder_are_trained_on(tmp_path, files, train, held):
    found = find_data(put(tmp_path, **files))
    assert [len(part) for part in names(found)] == [train, held]


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: ["a/*.jsonl", "b.jsonl"]
  - split: test
    path: held.jsonl
- config_name: other
  data_files: more/*
---
# Data
"""


def test_the_card_of_a_data_set_says_which_files_are_trained_on(tmp_path, monkeypatch):
    """Names of files say nothing here: without the card all of them are."""
    mine = dict(a__1_jsonl=LINES, b_jsonl=LINES, held_jsonl=LINES)
    folder = put(tmp_path / "a", README_md=CARD.encode(), **mine)
    assert names(find_data(folder)) == [["1.jsonl", "b.jsonl"], []]
    assert find_data(folder).notes == [f"{folder}: not read: README.md, held.jsonl"]
    valid = CARD.replace("split: test", "split: validation").replace("- config_name: other", "- config_name: default")
    assert names(find_data(put(tmp_path / "a", README_md=valid.encode()))) == [["1.jsonl", "b.jsonl"], ["held.jsonl"]]
    more = put(tmp_path / "a", README_md=CARD.encode(), more__c_jsonl=LINES)
    one = f"Name the files of one: --data {tmp_path}/a/a/1.jsonl."
    assert fails(more) == f"{tmp_path}/a/README.md describes 2 configurations of the data: main, other. {one}"
    marked = CARD.replace("config_name: other", "config_name: other\n  default: true")
    for card in (marked, CARD.replace("other", "default")):
        assert names(find_data(put(tmp_path / "a", README_md=card.encode()))) == [["c.jsonl"], []]
    splits = put(tmp_path / "b", README_md=CARD.replace("split: test", "split: train_2").encode(), **mine)
    assert "b holds 2 splits to train on, by README.md: train, train_2. Name one: --data" in fails(splits)
    en = dict(en__train_jsonl=LINES, en__dev_jsonl=LINES)
    by_folder = b"---\nconfigs:\n- {config_name: en, data_dir: en}\n- {config_name: de, data_dir: de}\n---\n"
    assert names(find_data(put(tmp_path / "d", README_md=by_folder, **en))) == [["train.jsonl"], ["dev.jsonl"]]
    assert "2 configurations of the data: en, de." in fails(put(tmp_path / "d", de__a_jsonl=LINES))
    monkeypatch.setattr(cards, "_MOST", 11)
    assert "README.md names too many patterns of files" in fails(tmp_path / "b")


@pytest.mark.parametrize(
    "card",
    [
        "---\n",
        "---\n{{",
        "a",
        "---\nconfigs: [{data_dir: 1}]\n---",
        "---\nconfigs: [{data_files: [[{split: 1}]]}]\n---",
        f"---\nconfigs: [{{data_files: '{'**/' * 300}*'}}]\n---",
        "---\nconfigs: [{data_files: [{split: ., path: a.jsonl}, {split: /, path: b.jsonl}]}]\n---",
        "---\nconfigs: &c [*c, {data_files: &f [*f]}]\n---",
    ],
)
def test_a_card_that_says_nothing(tmp_path, card):
    folder = put(tmp_path, README_md=card.encode(), a_jsonl=LINES, b_jsonl=LINES)
    assert names(find_data(folder)) == [["a.jsonl", "b.jsonl"], []]


def test_folders_without_data_say_why(tmp_path):
    assert "is a folder without data. Expected files of .jsonl" in fails(put(tmp_path / "a", image_png=b"x"))
    assert "holds no training data, only test.jsonl" in fails(put(tmp_path / "b", test_jsonl=LINES))
    splits = {f"data__{split}-00000-of-00001_jsonl": LINES for split in ("train_sft", "train_gen", "test_sft")}
    said = fails(put(tmp_path / "f", **splits))
    assert f"data holds 2 splits to train on: train_gen, train_sft. Name one: --data '{tmp_path}/f/data/tr" in said
    assert len(values(said.rpartition("--data '")[2].rstrip("'."))) == len(LINES.splitlines())
    both = put(tmp_path / "c", train_jsonl=LINES, train_csv=b"text\nx\n")
    assert "train.csv, train.jsonl: the same rows twice?" in fails(both)
    assert "is a checkpoint, not data" in fails(put(tmp_path / "d", tokenizer_json=b"{}", config_json=b"{}"))
    many = put(tmp_path / "e", **{f"f{i}_csv": b"text\nx\n" for i in range(MOST_FILES + 1)})
    assert "501 files, the most is 500" in fails(many)


def test_texts_of_a_folder_are_a_document_each(tmp_path, codec):
    """In order, in one set of tokens; a change of any file is another set."""
    folder = put(tmp_path / "t", b_txt=b"two\n<|endoftext|>\nthree", a_md=b"one\n", c__d_txt=b"four")
    data = load(codec, folder, cache=tmp_path / "cache")
    (file,) = data.files
    assert [data.example(k).strip("[]") for k in range(4)] == [
        f"<s>[{word}</s>" for word in ("one", "two", "three", "four")
    ]
    assert data.report.lines()[0] == f'{folder} (3 texts): 4 rows, format "text"'
    (tmp_path / "t" / "b.txt").write_bytes(b"2\n<|endoftext|>\nthree")
    assert load(codec, folder, cache=tmp_path / "cache").files[0].meta["key"] != file.meta["key"]
    (tmp_path / "t" / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"b.txt is not UTF-8"):
        load(codec, folder)


def test_several_formats_in_one_folder(tmp_path, codec):
    """Each file has its own; of many that are alike the report lists a few."""
    rows = {"p_jsonl": b'{"prompt": "a", "completion": "b"}', "q_csv": b"text\nx\n", "r_jsonl": LINES}
    data = load(codec, put(tmp_path, **rows))
    assert [file.format for file in data.report.files] == ["prompt,completion", "text", "text"]
    put(tmp_path, **{f"s{i:02}_jsonl": LINES for i in range(20)})
    said = load(codec, tmp_path).report.lines()
    assert said[12] == "11 more files: 33 rows"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return load_codec(make_tokenizer(tmp_path_factory.mktemp("chats"), chat_template=CHATML).folder)


MIXED = [
    {"messages": TALK},
    {"prompt": "the", "completion": " fox"},
    {"text": "the fox"},
    {"instruction": "the", "output": "fox"},
    {"conversations": [{"from": "human", "value": "the"}, {"from": "gpt", "value": "fox"}]},
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
]


def test_several_formats_in_one_file(tmp_path, chats):
    """Each row is read as it would be in a file of its own."""
    alone = []
    for i, row in enumerate(MIXED):
        put(tmp_path, **{f"{i}_json": json.dumps(row).encode()})
        (part,) = load(chats, tmp_path / f"{i}.json").files
        alone.append((part.read(0, int(part.offsets[-1])).tolist(), part.trained.tolist()))
    lines = "".join(json.dumps(row) + "\n" for row in [*MIXED, MIXED[0]])
    (tmp_path / "mixed.jsonl").write_text(lines)
    data = load(chats, tmp_path / "mixed.jsonl", long="cut")
    (made,) = data.files
    bounds = zip(made.offsets[:-1].tolist(), made.offsets[1:].tolist(), strict=True)
    found = [made.read(start, stop).tolist() for start, stop in bounds]
    assert (found, made.trained.tolist()) == (
        [ids for ids, _ in [*alone, alone[0]]],
        [n for _, (n,) in [*alone, alone[0]]],
    )
    each = "prompt,completion: 1 row; text: 1 row; alpaca: 1 row; sharegpt: 1 row; input_ids: 1 row"
    assert f"mixed.jsonl: 7 rows, in several formats (messages: 2 rows; {each})" in data.report.lines()[0]
    (tmp_path / "mixed.jsonl").write_text(lines + '{"words": "the"}\n')
    with pytest.raises(InputError, match=r"line 8: no known format has its keys \('words'\).* 1 of 8 rows is bad"):
        load(chats, tmp_path / "mixed.jsonl")


def test_a_table_of_mixed_rows_has_nulls(tmp_path, chats, arrow):
    """As concatenate_datasets writes it: every row has all columns."""
    import pyarrow.parquet

    columns = dict.fromkeys(key for row in MIXED[:4] for key in row)
    rows = [{key: row.get(key) for key in columns} for row in MIXED[:4]]
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    (said, *_) = load(chats, tmp_path / "mixed.parquet").report.lines()
    each = "messages: 1 row; prompt,completion: 1 row; text: 1 row; alpaca: 1 row"
    assert said.endswith(f"4 rows, in several formats ({each})")
    (tmp_path / "bad.jsonl").write_text(json.dumps(dict.fromkeys(columns)))
    with pytest.raises(InputError, match="'messages' is null"):
        load(chats, tmp_path / "bad.jsonl")


def test_a_quoted_pattern(tmp_path):
    put(tmp_path, **{f"shards__{i}_jsonl": LINES for i in range(3)}, shards__deep__4_jsonl=LINES)
    assert values(tmp_path / "shards" / "*.jsonl") == ROWS * 3
    assert values(f"{tmp_path}/shards/**/*.jsonl") == ROWS * 4
    assert [file.weight for file in find_data(f"{tmp_path}/shards/[01].jsonl:2").files] == [2, 2]
    assert "matches no file" in fails(tmp_path / "shards" / "*.csv")


def test_a_pattern_finds_what_glob_finds(tmp_path, monkeypatch):
    """In its order; but for links to folders, which are named."""
    names = (
        "a-b__8_jsonl",
        "a__1_jsonl",
        "a__deep__2_jsonl",
        "a__deep__er__3_jsonl",
        "b__4_jsonl",
        "a__5_ndjson",
        ".hidden__6_jsonl",
    )
    put(tmp_path, **dict.fromkeys((*names, "a__.7_jsonl"), LINES))
    monkeypatch.chdir(tmp_path)
    patterns = (
        "**/*.jsonl",
        "*/**/*.jsonl",
        "**/deep/**/*.jsonl",
        "a/**",
        "[ab]/**/[1-3]*",
        "**/**/4.jsonl",
        "**/.*",
        "**/.h*/*",
    )
    for given in [f"{start}{pattern}" for pattern in patterns for start in ("", f"{tmp_path}/")]:
        expected = sorted({path for path in glob.glob(given, recursive=True) if Path(path).is_file()})
        assert [str(file.path) for file in find_data(given).files] == expected, given
    Path("linked").symlink_to("a")
    noted = "not read, as they are links to folders: linked"
    assert find_data("**/*.jsonl").notes == [f"**/*.jsonl: {noted}"]
    assert fails("**/*.tsv") == f"**/*.tsv matches no file of {', '.join(KINDS)}; {noted}. Correct the path."
    monkeypatch.setattr(folders, "MOST_THERE", 4)
    with pytest.raises(InputError, match=r"\*\*/\*.jsonl holds more than 4 files and folders, some of them in "):
        find_data("**/*.jsonl")


# ---------------------------------------------------------------- long texts


def told_while(path, codec):
    """(the data, shares of the file that were read, by what is said of it)."""
    told = defaultdict(list)
    far = lambda name, at, size: told[name].append(at / size)
    data = load_dataset([str(path)], codec, DataOptions(seq_len=1 << 17), far)
    assert all(shares == sorted(shares) and 0 < shares[0] <= shares[-1] <= 1 for shares in told.values())
    return data, told


def test_progress_is_told_while_a_template_is_slow(tmp_path, codec):
    """A small file is read at once, and its rows may take seconds each."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "once upon a time"}) + "\n" for _ in range(100)))
    _, told = told_while(tmp_path / "a.jsonl", codec)
    assert len({share for share in told["a.jsonl"] if share < 1}) > 9


def test_progress_is_told_within_one_array_and_of_its_checksum(tmp_path, codec, monkeypatch):
    """A .json that is one list, or a list on one line, however large."""
    monkeypatch.setattr(json_rows, "_CHUNK", 1 << 12)
    monkeypatch.setattr(cache, "_BLOCK", 1 << 14)
    monkeypatch.setattr("trireme.engine.data.prepare._BATCH_CHARACTERS", 1 << 13)
    rows = [{"text": "once upon a time " * 20}] * 200
    (tmp_path / "a.json").write_text(json.dumps(rows))
    data, told = told_while(tmp_path / "a.json", codec)
    assert data.report.counts.rows == 200
    assert len(told["a.json"]) > 5
    assert len(told["a.json (checksum)"]) > 3
    assert told["a.json"][0] < 0.5


def test_rows_within_an_object_are_found_and_named(tmp_path, codec):
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "rows": [{"text": "a"}, {"text": "b"}]}))
    with pytest.raises(InputError, match="Are the rows in its list 'rows'\\? Write that list alone into a file"):
        load(codec, tmp_path / "a.json")


def test_progress_is_told_within_one_line(tmp_path, codec, monkeypatch):
    """A text of one line, as text8 is: it comes in pieces of bounded size."""
    monkeypatch.setattr(text, "_PIECE", 1 << 12)
    monkeypatch.setattr(text, "_LINE", 1 << 12)
    monkeypatch.setattr("trireme.engine.data.prepare._BATCH_CHARACTERS", 1 << 13)
    said = " ".join(["once upon a time"] * 5000)
    (tmp_path / "a.txt").write_text(said)
    data, told = told_while(tmp_path / "a.txt", codec)
    assert len(told["a.txt"]) > 5
    (batch,) = data.batches(1)
    whole = np.frombuffer(said.encode(), np.uint8)
    assert len(batch.ids) == len(whole) + 2


def test_a_tokenizer_that_the_model_was_not_grown_for(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "".join(map(chr, range(32, 1000)))}))
    with pytest.raises(InputError, match=r"has 61 tokens that the model was not given.*resize_token_embeddings\(261\)"):
        load(load_codec(tokenizer.folder), tmp_path / "a.jsonl", vocab_size=200)
    with pytest.raises(InputError, match="does not belong to this model"):
        load(load_codec(tokenizer.folder), tmp_path / "a.jsonl", vocab_size=100)


def test_without_a_tokenizer_json_it_is_said_how_to_make_one(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    assert load_codec(tmp_path) is None
    with pytest.raises(InputError, match=r"AutoTokenizer.from_pretrained\(DIR\).save_pretrained\(FOLDER\)"):
        load(None, tmp_path / "a.jsonl")


def test_a_row_that_is_too_long_says_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.engine.data.files.json_rows.ROW", 100)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 200}))
    (fault,) = values(tmp_path / "a.jsonl")
    assert "Part it into several rows, or give running text as a .txt file" in str(fault)


# ---------------------------------------------------------------- what is missing


def test_a_part_of_a_set_that_is_missing(tmp_path):
    part = lambda name, i, n: {f"{name}__train-{i:05}-of-{n:05}_jsonl": LINES}
    whole = put(tmp_path, **part("whole", 1, 2), **part("whole", 2, 2))
    assert [file.path.name for file in find_data(f"{whole}/whole").files] == [
        f"train-0000{i}-of-00002.jsonl" for i in (1, 2)
    ]
    put(tmp_path, **part("torn", 0, 4), **part("torn", 2, 4))
    said = "train-00001-of-00004.jsonl, train-00003-of-00004.jsonl"
    assert f"torn lacks {said}. Download it again" in fails(tmp_path / "torn")
    assert find_data(f"{tmp_path}/torn/*.jsonl").notes == [f"{tmp_path}/torn/*.jsonl lacks {said}: parts of a set"]
    assert not find_data(f"{tmp_path}/torn/train-00000-of-00004.jsonl").notes


def test_what_a_folder_holds_and_is_not_read_is_named(tmp_path):
    folder = tmp_path / "data"
    put(folder, a_jsonl=LINES, void_jsonl=b"")
    (folder / "more").symlink_to(tmp_path)
    assert names(find_data(str(folder))) == [["a.jsonl"], []]
    told = [note.removeprefix(f"{folder}: ") for note in find_data(str(folder)).notes]
    assert told == ["empty: void.jsonl", "not read, as they are links to folders: more"]
    (folder / "c").symlink_to("c")
    assert names(find_data(str(folder))) == [["a.jsonl"], []]
    (folder / "b.jsonl").symlink_to(tmp_path / "nowhere")
    assert f"{folder}/b.jsonl: No such file or directory" in fails(folder)


def test_a_folder_without_data_names_what_is_not_read(tmp_path):
    put(tmp_path, void_jsonl=b"")
    assert f"{tmp_path} is a folder without data; empty: void.jsonl. Expected files of .jsonl" in fails(tmp_path)


def test_data_that_is_trained_on_and_held_out(tmp_path, codec):
    put(tmp_path, a_jsonl=LINES, b_jsonl=LINES + LINES)
    notes = lambda val: load(codec, tmp_path / "a.jsonl", val=str(tmp_path / val)).report.notes
    assert any(f"{tmp_path}/a.jsonl is trained on and held out" in note for note in notes("a.jsonl"))
    assert not any("held out" in note for note in notes("b.jsonl"))


def test_a_folder_of_all_there_is_is_not_walked_to_its_end(tmp_path, monkeypatch):
    """As `--data /`; what cannot be opened is named."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text('{"text": "x"}\n')
    real = os.scandir
    monkeypatch.setattr(folders.os, "scandir", lambda place: real(place if place[-1] != "b" else "/nowhere"))
    assert find_data(str(tmp_path)).notes == [f"{tmp_path}: not read, as they may not be opened: b"]
    monkeypatch.setattr(folders, "MOST_THERE", 4)
    with pytest.raises(InputError, match=r"holds more than 4 files and folders, some of them in .*Name the folder of"):
        find_data(str(tmp_path))

"""The safetensors header: what we write the library reads; what is damaged or hostile ends in one clear error."""

import json
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.storage.checkpoint import INDEX, open_source
from trireme.storage.headers import MAX_TENSORS, CheckpointError, encode_header, read_header
from trireme.storage.layout import sequential

GOOD = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def test_what_we_write_the_library_reads(tmp_path):
    layout = sequential([("a", "F32", (3, 4)), ("b", "BF16", (5,)), ("empty", "I8", (0, 7)), ("scalar", "F32", ())])
    header = encode_header(layout, {"format": "pt"})
    assert len(header) % 4096 == 0
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + np.arange(layout.nbytes, dtype=np.uint8).tobytes())
    with safetensors.safe_open(path, "np") as f:
        assert set(f.keys()) == {"a", "b", "empty", "scalar"}
        assert f.metadata() == {"format": "pt"}
        assert f.get_tensor("a").tobytes() == bytes(range(48))
    read = read_header(path)
    assert {t.name: t for t in read.layout.tensors} == {t.name: t for t in layout.tensors}
    assert read.data == len(header)
    assert read.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\x00" * 7, "truncated"),
        (file_bytes(GOOD, b"", 1 << 40), "truncated"),
        (file_bytes(GOOD, bytes(20)), "tensors take 24 bytes, 20 are there. Download or copy it again"),
        (file_bytes(GOOD, bytes(25)), "follow the last tensor"),
        (file_bytes(b"not json"), "not valid JSON"),
        (file_bytes(b"\xff\xfe{}"), "not valid JSON"),
        (file_bytes(b'{"a":1,"a":2}'), "twice"),
        (file_bytes(b"[" * 100_000), "nested too deeply"),
        (file_bytes(b"[]"), "not a JSON object"),
        (file_bytes(b'{"__metadata__":{"a":1}}'), "map of strings"),
        (file_bytes({"a": 3}), "lacks"),
        (file_bytes({"a": {**GOOD["a"], "dtype": "F4"}}, bytes(24)), "dtype"),
        (file_bytes({"a": {**GOOD["a"], "dtype": ["F32"]}}, bytes(24)), "dtype"),
        (file_bytes({"a": {**GOOD["a"], "shape": [2, -3]}}, bytes(24)), "whole numbers"),
        (file_bytes({"a": {**GOOD["a"], "shape": [True, 6]}}, bytes(24)), "whole numbers"),
        (file_bytes({"a": {**GOOD["a"], "shape": [2.0, 3]}}, bytes(24)), "whole numbers"),
        (file_bytes({"a": {**GOOD["a"], "shape": [1 << 64] * 50}}, bytes(24)), "say otherwise"),
        (file_bytes({"a": {**GOOD["a"], "data_offsets": [24, 0]}}, bytes(24)), "begin, end"),
        (file_bytes({"a": {**GOOD["a"], "data_offsets": [8, 32]}}, bytes(32)), "gap or an overlap"),
        (file_bytes({**GOOD, "b": GOOD["a"]}, bytes(24)), "gap or an overlap"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ],
)
def test_damage_is_named(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as e:
        read_header(path)
    assert "\n" not in str(e.value)
    assert str(e.value).endswith((". Download or copy it again.", ". Run `git lfs pull`."))
    assert str(path) in str(e.value)


BOMBS = {
    "tensors": lambda: ",".join(f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(300_000)),
    "lists": lambda: '"a":[' + "[]," * 3_000_000 + "0]",
    "pairs": lambda: '"":0,' * 3_000_000 + '"a":0',
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_header_of_far_too_much_is_refused_before_it_is_parsed(tmp_path, bomb):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(b"{%s}" % BOMBS[bomb]().encode()))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"more than {MAX_TENSORS} tensors"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 2 * path.stat().st_size
    tracemalloc.stop()


@pytest.mark.full
def test_a_header_of_many_tensors_is_read(tmp_path):
    text = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(50_000)}
    )
    (tmp_path / "x.safetensors").write_bytes(file_bytes(text.encode(), bytes(200_000)))
    assert len(read_header(tmp_path / "x.safetensors").layout.tensors) == 50_000


def accepted_by_library(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
        return True
    except Exception:
        return False


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_mutated_file_is_read_as_the_library_reads_it_or_refused(tmp_path_factory, data):
    layout = sequential([("a", "F32", (2, 3)), ("b", "BF16", (4,))])
    good = bytearray(file_bytes(encode_header(layout)[8:].rstrip(), bytes(layout.nbytes)))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(good[: data.draw(st.integers(0, len(good)) | st.just(len(good)))])
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert header.data + header.layout.nbytes == len(content)
    assert accepted_by_library(content)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "./x.safetensors", "a//x.safetensors", ""]
    + ["..\\x.safetensors", "x\0.safetensors", "x\n.safetensors", "\ud800.safetensors"],
)
def test_an_index_that_points_outside_is_refused(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_source(tmp_path)

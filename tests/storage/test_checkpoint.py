"""Hugging Face folders: read exactly, written back in the same form, refused in one clear line when they are bad."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trireme.storage import checkpoint
from trireme.storage.auxiliary import auxiliary, auxiliary_files
from trireme.storage.checkpoint import INDEX, CheckpointError, convert, export, open_source
from trireme.storage.files import StoreError

RNG = np.random.default_rng(0)
TENSORS = {
    "embed.weight": RNG.standard_normal((50, 8)).astype(np.float32),
    "a.weight": RNG.standard_normal((8, 8)).astype(np.float16),
    "a.bias": RNG.standard_normal(8).astype(ml_dtypes.bfloat16),
    "mask": np.tril(np.ones((4, 4), bool)),
    "scalar": np.array(2.5, np.float64),
    "nothing": np.zeros((0, 8), np.float32),
}


def words(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def save(folder: Path, shards: int = 1) -> Path:
    """A checkpoint with a config and a tokenizer, in one file or several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "tokenizer.json").write_bytes(bytes(range(256)))
    (folder / "README.md").write_text("not copied")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")  # never opened
    if shards == 1:
        safetensors.numpy.save_file(TENSORS, folder / "model.safetensors", {"format": "pt", "note": "kept"})
        return folder
    weight_map = {}
    for k in range(shards):
        part = {n: t for i, (n, t) in enumerate(TENSORS.items()) if i % shards == k}
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        safetensors.numpy.save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_read_as_it_lies_and_as_fp32_and_bf16(tmp_path, shards):
    source = open_source(save(tmp_path / "in", shards))
    assert source.tensors.keys() == TENSORS.keys()
    assert len(source.files) == shards
    for name, array in TENSORS.items():
        assert source.tensors[name].shape == array.shape
        assert source.read(name).tobytes() == array.tobytes()
        if name == "mask":
            continue
        for first, last in ((0, None), (array.size // 3, array.size // 2), (array.size // 2, array.size)):
            pieces = [piece.copy() for piece in source.values(name, first, last)]
            assert b"".join(piece.tobytes() for piece in pieces) == array.reshape(-1)[first:last].tobytes()
    with pytest.raises(CheckpointError, match="mask is BOOL"):
        next(source.values("mask"))


@example(np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x00008000, 0x7F7F8000], np.uint32).view(np.float32))  # ties
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=1), elements=st.floats(width=32)))
def test_conversion_agrees_with_ml_dtypes(values):
    with np.errstate(all="ignore"):
        expected = {"BF16": values.astype(ml_dtypes.bfloat16), "F16": values.astype(np.float16)}
    for word, want in expected.items():
        got = convert(values, "F32", word)
        nan = np.isnan(want.astype(np.float32))
        assert np.array_equal(got[~nan], words(want)[~nan])
        assert np.isnan(got.view(ml_dtypes.bfloat16 if word == "BF16" else np.float16)[nan].astype(np.float32)).all()
    bits = convert(values, "F32", "BF16")
    assert np.array_equal(
        convert(bits, "BF16", "F32"), bits.view(ml_dtypes.bfloat16).astype(np.float32), equal_nan=True
    )


@pytest.mark.parametrize("shards", [1, len(TENSORS)])  # or one for each: of the last there is only a header
def test_export_without_changes_is_a_copy(tmp_path, shards):
    folder = save(tmp_path / "in", shards)
    source = open_source(folder)
    export(source, tmp_path / "new" / "out", lambda name: None)
    expected = {*source.files, "config.json", "tokenizer.json"} | ({INDEX} if shards > 1 else set())
    out = tmp_path / "new" / "out"
    assert {p.name for p in out.iterdir()} == expected
    for name in expected:
        assert (out / name).read_bytes() == (folder / name).read_bytes()


def test_export_changes_what_is_given_and_keeps_dtypes(tmp_path):
    source = open_source(save(tmp_path / "in", 2))
    new = {
        "embed.weight": RNG.standard_normal(400).astype(np.float32),  # F32 stays F32
        "a.weight": RNG.standard_normal(64).astype(np.float32),  # F32 -> F16
        "a.bias": RNG.standard_normal(8).astype(np.float32),  # F32 -> BF16
    }
    export(source, tmp_path / "out", lambda name: [new[name]] if name in new else None)
    again = open_source(tmp_path / "out")
    for name, array in TENSORS.items():
        want = new[name].reshape(array.shape).astype(array.dtype) if name in new else array
        assert again.tensors[name][:3] == source.tensors[name][:3]
        assert again.read(name).tobytes() == want.tobytes()
    bits = np.arange(400, dtype=np.uint16)  # bf16 bits into a float32 tensor, exactly
    export(source, tmp_path / "out", lambda name: [bits] if name == "embed.weight" else None)
    got = open_source(tmp_path / "out").read("embed.weight").view(np.float32)
    assert np.array_equal(got, bits.view(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_is_not_read_back_as_it_was_written_gets_no_name(tmp_path, monkeypatch, name):
    source, write = open_source(save(tmp_path / "in")), checkpoint.write_synced

    def write_and_flip(path, content):
        write(path, content)
        if name in path.name:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    export(source, tmp_path / "out", lambda name: None)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(checkpoint, "write_synced", write_and_flip)
    new = np.zeros(64, np.float32)
    with pytest.raises(StoreError, match=name):
        export(source, tmp_path / "out", lambda name: [new] if name == "a.weight" else None)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("writers", [1, 3])
def test_a_failed_export_leaves_nothing_and_an_older_one_untouched(tmp_path, monkeypatch, writers):
    source = open_source(save(tmp_path / "in", 2))
    out = tmp_path / "out"
    export(source, out, lambda name: None)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    calls = [0]
    real = os.pwrite

    def full(fd, data, offset):
        calls[0] += 1
        if calls[0] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left on device"):
        export(source, out, lambda name: None, writers=writers)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    source = open_source(save(tmp_path / "in"))
    monkeypatch.setattr(
        checkpoint.check_space.__globals__["shutil"], "disk_usage", lambda p: type("U", (), {"free": 9})()
    )
    with pytest.raises(StoreError, match="9 B"):
        export(source, tmp_path / "out", lambda name: None)
    assert not list((tmp_path / "out").iterdir())


def test_export_refuses_the_source_itself(tmp_path):
    source = open_source(save(tmp_path / "in"))
    with pytest.raises(StoreError, match="is the source checkpoint itself"):
        export(source, tmp_path / "in", lambda name: None)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    source = open_source(save(tmp_path / "in"))
    os.truncate(tmp_path / "in" / "model.safetensors", 1000)
    name = max(source.tensors, key=lambda n: source.tensors[n].offset * bool(source.tensors[n].nbytes))
    with pytest.raises(StoreError, match="model.safetensors"):
        source.read(name)
    os.unlink(tmp_path / "in" / "model.safetensors")
    with pytest.raises(StoreError, match="model.safetensors"):
        source.read(name)


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


BAD = {
    "is missing. Download": lambda d: (d / "model-00002-of-00003.safetensors").unlink(),
    "is truncated": lambda d: os.truncate(d / "model-00002-of-00003.safetensors", 5),
    "the file is truncated": lambda d: os.truncate(d / "model-00001-of-00003.safetensors", 400),
    "Git LFS pointer": lambda d: (d / "model-00002-of-00003.safetensors").write_text("version https://git-lfs.x\n"),
    "it is not there. Download": lambda d: edit_index(d, lambda m: m.update(ghost=next(iter(m.values())))),
    "outside its folder.* Take": lambda d: edit_index(d, lambda m: m.update(x="../../etc/x.safetensors")),
    "only safetensors is read. Take": lambda d: edit_index(d, lambda m: m.update(x="pytorch_model.bin")),
    "no weight_map.* Download": lambda d: (d / INDEX).write_text("{}"),
    "not valid JSON.* Download": lambda d: (d / INDEX).write_text("{"),
    "not a regular file. Put the file": lambda d: os.mkfifo(d / "model.safetensors"),
    "but no model.safetensors.index.json": lambda d: (d / INDEX).unlink(),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_checkpoints_are_refused_in_one_line(tmp_path, message):
    folder = save(tmp_path / "in", 3)
    BAD[message](folder)
    with pytest.raises(CheckpointError, match=message) as e:
        open_source(folder)
    assert "\n" not in str(e.value)
    assert str(folder) in str(e.value)


@pytest.mark.parametrize("later", [True, False])
def test_a_tensor_in_two_files_is_that_of_the_last(tmp_path, later):
    """As libraries read them, in order, the last one counts; an index that says otherwise is refused."""
    folder = save(tmp_path / "in", 2)
    files = [f"model-{k:05d}-of-00002.safetensors" for k in (1, 2)]
    name = next(n for i, n in enumerate(TENSORS) if i % 2 == (0 if later else 1))
    other = safetensors.numpy.load_file(folder / files[later])
    safetensors.numpy.save_file(other | {name: np.zeros((1, 1), np.float32)}, folder / files[later])
    if later:
        with pytest.raises(CheckpointError, match=f"{files[1]}: {name} .*{INDEX}.*{files[0]}"):
            open_source(folder)
    else:
        assert open_source(folder).tensors[name].shape == TENSORS[name].shape


def test_pickles_are_never_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match="never read"):
        open_source(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        open_source(tmp_path / "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        open_source(tmp_path)


@pytest.mark.parametrize("writers", [1, 3])
def test_tensors_that_the_index_does_not_name_are_read(tmp_path, writers):
    """As by libraries: one may be an output matrix that is not tied."""
    folder = save(tmp_path / "in", 2)
    edit_index(folder, lambda m: m.pop("scalar"))
    source = open_source(folder)
    assert source.tensors["scalar"].dtype == "F64"
    export(source, tmp_path / "out", lambda name: None, writers=writers)
    for file in source.files:
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()


def test_links_into_a_download_cache_are_followed(tmp_path):
    files, cache = save(tmp_path / "files"), tmp_path / "models--a--b"
    folder = cache / "snapshots" / "0123abc"
    for name in ("config.json", "model.safetensors", "additional_chat_templates/tool.jinja"):
        link, up = folder / name, Path(*[".."] * (2 + name.count("/")))
        link.parent.mkdir(parents=True, exist_ok=True)
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).touch()
        blob = up / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        link.symlink_to(blob)
        (cache / "blobs").mkdir(exist_ok=True)
        (files / name).rename(link.parent / blob)
    export(open_source(folder), tmp_path / "out", lambda name: None)
    for name in ("config.json", "model.safetensors", "additional_chat_templates/tool.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
        assert not (tmp_path / "out" / name).is_symlink()


@pytest.mark.parametrize("through", ["", "blobs/", "cache", "beside"])
def test_links_out_of_the_folder_are_not_followed_and_that_is_said(tmp_path, through):
    """A key that a stranger's checkpoint links would be published with the weights; also through a cache of his."""
    (tmp_path / "secret").mkdir()
    key = tmp_path / "secret" / ("0123456789" * 4 if through != "beside" else "id_rsa")
    key.write_text("PRIVATE")
    folder = tmp_path / "stranger" / "snapshots" / "x" if through else tmp_path / "stranger"
    folder.mkdir(parents=True)
    save(folder)
    blobs = tmp_path / "stranger" / "blobs"
    if through == "blobs/":  # the folder is a link
        blobs.symlink_to(key.parent)
    elif through:  # the file is one; or it only lies where a cache would be
        blobs.mkdir()
        (blobs / key.name).symlink_to(key) if through == "cache" else shutil.copy(key, blobs)
    target = Path("../../blobs", key.name) if through else key
    for name in ("notes.txt", "additional_chat_templates/x.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(Path("..", target) if through and "/" in name else target)
        assert (folder / name).read_text() == "PRIVATE"
    (folder / "inside.txt").symlink_to("tokenizer.json")
    (folder / "folder.json").mkdir()
    said = []
    source = open_source(folder, said.append)
    export(source, tmp_path / "out", lambda name: None)
    assert not any(b"PRIVATE" in p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert (tmp_path / "out" / "inside.txt").read_bytes() == (folder / "tokenizer.json").read_bytes()
    (line,) = said
    for part in ("notes.txt is a link out of", "x.jinja is a link out of", "folder.json is not a regular file"):
        assert part in line


def test_a_config_that_leaves_the_folder_or_is_no_file_is_refused(tmp_path):
    folder = save(tmp_path / "in")
    (folder / "config.json").rename(tmp_path / "config.json")
    for make in (lambda path: path.symlink_to("../config.json"), os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(folder / "config.json")
        with pytest.raises(CheckpointError, match="config.json"):
            open_source(folder)
        (folder / "config.json").unlink()


def test_a_companion_of_gigabytes_is_left(tmp_path):
    folder = save(tmp_path / "in")
    (folder / "rows.json").touch()
    os.truncate(folder / "rows.json", 1 << 33)
    assert "rows.json" not in auxiliary(folder)
    said = []
    open_source(folder, said.append)
    assert "rows.json has more than 256 MiB" in said[0]


def test_another_tokenizer_takes_the_place_of_the_first_one_whole(tmp_path):
    folder, other = save(tmp_path / "in"), tmp_path / "other"
    for name in ("vocab.json", "merges.txt", "generation_config.json", "spiece.model", "LICENSE.txt"):
        (folder / name).write_text("{}")
    other.mkdir()
    for name in ("tokenizer.json", "vocab.txt", "config.json", "notes.txt"):
        (other / name).write_text("{}")
    found = auxiliary_files(folder, other)
    theirs = {name for name, path in found.items() if path == other / name}
    ours = {name for name, path in found.items() if path == folder / name}
    assert theirs == {"tokenizer.json", "vocab.txt"}
    assert ours == {"config.json", "generation_config.json", "LICENSE.txt"}
    assert auxiliary_files(folder) == {name: folder / name for name in auxiliary(folder)}
    ended = auxiliary_files(folder, other, end=7)
    for name in ("config.json", "generation_config.json"):
        before = json.loads((folder / name).read_text())
        assert json.loads(ended[name]) == before | {"eos_token_id": 7}, "else a reader would not stop"
    assert {name: path for name, path in ended.items() if isinstance(path, Path)}.keys() == theirs | {"LICENSE.txt"}
    (other / "tokenizer.json").unlink()
    (other / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match="other/tokenizer.json"):
        auxiliary_files(folder, other)


def test_another_template_is_in_both_places_and_alone(tmp_path):
    folder = save(tmp_path / "in")
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("old")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": "old"}')
    found = auxiliary_files(folder, template="new ß")
    assert found["chat_template.jinja"] == "new ß".encode()
    assert json.loads(found["tokenizer_config.json"]) == {"eos_token": "</s>", "chat_template": "new ß"}
    assert not [name for name in found if name.startswith("additional")]
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="tokenizer_config.json"):
        auxiliary_files(folder, template="new")

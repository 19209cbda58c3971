"""Frozen weights read from the user's checkpoint: the same bytes wherever they lie; changes are noticed."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import adapters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import CASES, oracle

from trireme.engine.queues.real import RealQueues
from trireme.engine.tuning.base import CheckpointBase, check_unchanged, extents_of, stamps, why_copied
from trireme.engine.tuning.chosen import train_only
from trireme.models import hf
from trireme.storage.aio import arena
from trireme.storage.checkpoint import Source, SourceTensor, open_source
from trireme.storage.devices import open_device
from trireme.storage.files import StoreError
from trireme.storage.layout import ALIGN, pack
from trireme.storage.temporary import Temporary


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    found = open_device(tmp_path_factory.mktemp("drive"))
    yield found
    found.io.close()


SIZES = st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 5000), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SIZES, st.randoms())
def test_every_tensor_comes_from_its_place(device, drawn, random):
    """Any gaps, any order, two files: whole blocks are read, no more than there is room for."""
    folder, ends, tensors, content = device.path, {"a": 0, "b": 0}, {}, {}
    for i, (numel, gap, second) in enumerate(drawn):
        file = "b" if second else "a"
        tensors[f"t{i}"] = SourceTensor("F32", (numel,), file, ends[file] + gap)
        ends[file] += gap + 4 * numel
    for file, nbytes in ends.items():
        content[file] = np.random.default_rng(random.getrandbits(30)).bytes(nbytes)
        (folder / file).write_bytes(content[file])
    names = random.sample(sorted(tensors), len(tensors))
    stored = {name: name for name in names}
    layout = pack([[(name, tensors[name].shape)] for name in names], "F32")
    source = Source(folder, tuple(f for f in ends if ends[f]), tensors, {})
    extents, pieces = extents_of(layout, source, stored)
    room = layout.span + 2 * ALIGN * len(names)
    assert all((e.offset | e.nbytes | e.first) % ALIGN == 0 and e.first + e.nbytes <= room for e in extents)
    buffer, out = arena(room), bytearray(layout.span)
    base = CheckpointBase({0: layout}, source, stored, [device])
    base.read(0, buffer).result()
    base.close()
    for first, offset, nbytes in base.pieces(0):
        out[offset : offset + nbytes] = buffer[first : first + nbytes]
    for t in layout.tensors:
        there = tensors[t.name]
        assert out[t.offset : t.offset + t.nbytes] == content[there.file][there.offset : there.offset + t.nbytes]


def test_a_base_of_which_a_file_is_missing(device, tmp_path):
    _, source, stored = model(tmp_path)
    name, found = next(iter(source.tensors.items()))
    layout = pack([[(name, found.shape)]], "F32")
    (tmp_path / found.file).unlink()
    with pytest.raises(StoreError, match=found.file):
        CheckpointBase({0: layout}, source, {name: name}, [device])


def test_each_file_is_read_through_its_drive(device, tmp_path):
    """A link to another drive, as in Hugging Face's cache. A drive whose requests are closed reads nothing."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one file system")
    with Temporary("trireme-test-", memory) as folder:
        other = open_device(folder)
        for name, place in (("a", tmp_path), ("b", folder)):
            (place / name).write_bytes(bytes(ALIGN))
        (tmp_path / "b").symlink_to(folder / "b")
        tensors = {name: SourceTensor("F32", (8,), name, 0) for name in "ab"}
        layouts = {u: pack([[(name, (8,))]], "F32") for u, name in enumerate("ab")}
        source = Source(tmp_path, ("a", "b"), tensors, {})
        base = CheckpointBase(layouts, source, {name: name for name in "ab"}, [device, other])
        other.io.close()
        base.read(0, arena(ALIGN)).result()
        with pytest.raises(StoreError):
            base.read(1, arena(ALIGN)).result()
        base.close()


@pytest.mark.full
@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3 moe"])
def test_a_base_read_in_place_trains_the_same(case, device, tmp_path):
    """Slots that are let go of are poisoned: only what was read and copied is there."""
    oracle(*CASES[case])[0].save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(open_source(tmp_path).files) > 2
    targets = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_fc",), "qwen3 moe": ("q_proj",)}[case]
    found = []
    for tier, in_place in (("gpu", False), ("ssd", False), ("ssd", True)):
        queues = RealQueues("cpu", extra=("poison",))
        seen, weights, _ = adapters(tmp_path, targets, device, tier, in_place, dtype="F32", window=1, queues=queues)
        found.append((seen, {name: t.tolist() for name, t in weights.items()}))
    assert found[0] == found[1] == found[2]


def model(folder: Path):
    reference, cfg = oracle(*CASES["llama"])
    reference.save_pretrained(folder)
    source = open_source(folder)
    return cfg, source, hf.sources(cfg, source.shapes)


def test_where_it_has_to_be_copied(tmp_path):
    cfg, source, stored = model(tmp_path)
    some = train_only(cfg, ("*embed*",), ())
    why = lambda cfg=some, dtype="F32", stores=(tmp_path / "store",): why_copied(cfg, dtype, source, stored, stores)
    assert why() == ""
    assert why(dtype="BF16") == "they are F32, and computed with in BF16"
    assert why(stores=(tmp_path / "a", tmp_path / "b")) == ""
    assert why(cfg=replace(cfg, frozen=())) == ""
    if os.stat("/dev/shm").st_dev != tmp_path.stat().st_dev:
        assert why(stores=(Path("/dev/shm"),)) == f"{tmp_path} is on another drive than /dev/shm"


def test_a_file_that_changes_is_noticed(tmp_path):
    _, source, _ = model(tmp_path)
    before, path = stamps(source), tmp_path / "model.safetensors"
    check_unchanged(before)
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    with pytest.raises(StoreError, match="was changed while the run trained on top of it"):
        check_unchanged(before)
    path.unlink()
    with pytest.raises(StoreError, match="was changed while the run trained on top of it"):
        check_unchanged(before)

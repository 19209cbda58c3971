"""Tokens on the shelf: shared by runs and dry runs, bounded, made again where anything is wrong."""

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from chats import make_tokenizer

from trireme.engine.data import cache, prepare
from trireme.engine.data.cache import KEPT, Shelf
from trireme.engine.data.codec import load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset

Disk = namedtuple("Disk", "total used free")


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_codec(folder)


@pytest.fixture
def builds(monkeypatch) -> list:
    made, build = [], prepare._build
    monkeypatch.setattr(prepare, "_build", lambda *args: made.append(args[0]) or build(*args))
    return made


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    return Shelf.under(tmp_path / "shelf")


def rows(path: Path, text: str, n: int = 5) -> str:
    path.write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(n)))
    return str(path)


def ids(codec, path: str, shelf: Shelf | None, folder: Path | None = None) -> list:
    data = load_dataset([path], codec, DataOptions(seq_len=64, cache=folder, shelf=shelf))
    return [batch.ids.tolist() for batch in data.batches(1)]


def test_a_dry_run_and_runs_tokenize_once(codec, builds, shelf, tmp_path):
    path = rows(tmp_path / "a.jsonl", "some text")
    alone = ids(codec, path, None)
    runs = [ids(codec, path, shelf), *(ids(codec, path, shelf, tmp_path / out) for out in ("one", "two"))]
    assert runs == [alone] * 3
    assert len(builds) == 2
    assert not list(tmp_path.glob("one/*"))
    assert [p.name[:7] for p in shelf.folder.iterdir()] == ["tokens-"]
    rows(tmp_path / "a.jsonl", "other text")
    assert ids(codec, path, shelf) != alone


def test_another_version_makes_its_own(codec, builds, tmp_path, monkeypatch):
    path = rows(tmp_path / "a.jsonl", "some text")
    ids(codec, path, Shelf.under(tmp_path))
    monkeypatch.setattr("jinja2.__version__", "0")
    ids(codec, path, Shelf.under(tmp_path))
    assert len(builds) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_what_is_damaged_is_made_again(codec, builds, shelf, tmp_path, damage):
    path = rows(tmp_path / "a.jsonl", "some text")
    whole = ids(codec, path, shelf)
    (tokens,) = shelf.folder.glob("*/tokens")
    content = tokens.read_bytes()
    if damage == "remove":
        tokens.unlink()
    else:
        tokens.write_bytes(content[:-2] if damage == "cut" else bytes([content[0] ^ 255]) + content[1:])
    assert [ids(codec, path, shelf) for _ in range(2)] == [whole] * 2
    assert len(builds) == 2


def test_without_memory_tokens_are_not_taken_for_damaged(codec, shelf, tmp_path, monkeypatch):
    path = rows(tmp_path / "a.jsonl", "some text")
    ids(codec, path, shelf)
    (tokens,) = shelf.folder.glob("*/tokens")

    def short(*_):
        raise MemoryError

    monkeypatch.setattr(cache, "_read_through", short)
    opened = len(os.listdir("/proc/self/fd"))
    for place in (None, shelf):
        with pytest.raises(MemoryError):
            ids(codec, path, place, tmp_path / "out")
    assert tokens.exists()
    assert len(os.listdir("/proc/self/fd")) == opened


def test_the_longest_unused_makes_room(codec, builds, shelf, tmp_path, monkeypatch):
    paths = [rows(tmp_path / f"{name}.jsonl", name * 50) for name in "abc"]
    size = lambda: sum(file.stat().st_size for file in shelf.folder.rglob("*") if file.is_file())
    ids(codec, paths[0], shelf)
    disk = Disk(int(KEPT * 2.5 * size()), 0, 1 << 40)
    ids(codec, paths[1], shelf)
    for i, place in enumerate(sorted(shelf.folder.iterdir(), key=lambda p: p.stat().st_mtime)):
        os.utime(place, (1000 + i, 1000 + i))
    ids(codec, paths[0], shelf)  # used: now b is the oldest
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    ids(codec, paths[2], shelf)
    assert size() <= disk.total // KEPT
    assert len(builds) == 3
    ids(codec, paths[0], shelf)
    ids(codec, paths[2], shelf)
    assert len(builds) == 3
    ids(codec, paths[1], shelf)
    assert len(builds) == 4


def test_empty_folders_of_other_versions_are_removed(codec, shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "OFTEN", 1)
    old, new, used = (shelf.folder.parent / name for name in ("old", "new", "used"))
    for folder in (old, new, used / "tokens-1"):
        folder.mkdir(parents=True)
    for folder in (old, used):
        os.utime(folder, (1000, 1000))
    ids(codec, rows(tmp_path / "a.jsonl", "some text"), shelf)
    assert {*shelf.folder.parent.iterdir()} == {new, used, shelf.folder}


def test_small_files_do_not_each_look_at_all_others(codec, shelf, tmp_path, monkeypatch):
    looks, used = [], cache._used
    monkeypatch.setattr(cache, "_used", lambda place: looks.append(place) or used(place))
    monkeypatch.setattr(cache, "OFTEN", 4)
    for i in range(9):
        rows(tmp_path / f"{i}.jsonl", f"{i}", 1)
    ids(codec, str(tmp_path / "*.jsonl"), shelf)
    assert len(list(shelf.folder.iterdir())) == 9
    assert len(looks) == 9 + 4 + 8


@pytest.mark.parametrize("disk", [Disk(1 << 40, 0, 100), Disk(1000, 0, 1 << 40)])
def test_without_room_tokens_stay_with_the_run(codec, shelf, tmp_path, monkeypatch, disk):
    path = rows(tmp_path / "a.jsonl", "some text")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    assert ids(codec, path, shelf, tmp_path / "out")
    assert not list(shelf.folder.iterdir())
    assert len(list((tmp_path / "out").glob("tokens-*"))) == 1


def test_of_two_at_once_both_have_their_tokens(codec, shelf, tmp_path, monkeypatch):
    path = rows(tmp_path / "a.jsonl", "some text")
    put, others = Shelf.put, []

    def late(self, made) -> None:
        """Meanwhile another process has put its own there."""
        if not others:
            others.append(1)
            ids(codec, path, shelf)
        put(self, made)

    monkeypatch.setattr(Shelf, "put", late)
    assert ids(codec, path, shelf) == ids(codec, path, None)
    assert len(list(shelf.folder.iterdir())) == 1


def test_removed_under_a_run_they_are_still_read(codec, shelf, tmp_path):
    path = rows(tmp_path / "a.jsonl", "some text")
    data = load_dataset([path], codec, DataOptions(seq_len=64, shelf=shelf))
    before = [batch.ids.tolist() for batch in data.batches(1)]
    shutil.rmtree(shelf.folder)
    assert [batch.ids.tolist() for batch in data.batches(1)] == before


def test_rows_that_are_bad_leave_nothing(codec, shelf, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(Exception, match="bad.jsonl"):
        ids(codec, str(tmp_path / "bad.jsonl"), shelf)
    assert not list(shelf.folder.iterdir())

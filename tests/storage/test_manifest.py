"""Manifest and store.id: what was changed is refused; names lead nowhere else; nothing of others is removed."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from stores import STATE, WEIGHTS, create, devices, holds, write_all

from trireme.storage import folders, snapshots
from trireme.storage.auxiliary import TEMPLATES
from trireme.storage.files import StoreError
from trireme.storage.snapshots import FORMAT, MANIFEST
from trireme.storage.store import Store
from trireme.storage.untrusted import quoted, seal, unseal

SNAPSHOT = "snapshot-000001-step-1"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A store of two folders with one snapshot."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "source" / TEMPLATES).mkdir(parents=True)
    (folder / "source" / "config.json").write_text("{}")
    (folder / "source" / TEMPLATES / "tool.jinja").write_text("{{ tools }}")
    with create(folder, 2, auxiliary=folder / "source") as store:
        write_all(store, 1)
        store.commit(1, {"step": 1, "rng": [1, 2.5, None]})
    return folder


@pytest.fixture
def ours(made, tmp_path) -> Path:
    """A copy of it, under other names of the same files."""
    for k in range(2):
        shutil.copytree(made / f"d{k}", tmp_path / f"d{k}", copy_function=os.link)
    return tmp_path


def fields(folder: Path) -> dict:
    return unseal((folder / "d0" / SNAPSHOT / MANIFEST).read_bytes(), FORMAT, "manifest")


def put(path: Path, content: bytes) -> None:
    """New content under a name that parts from the others of its file."""
    path.unlink()
    path.write_bytes(content)


def refused(folder: Path, says: str | None = None) -> StoreError:
    with pytest.raises(StoreError, match=says) as e:
        Store.open(devices(folder, 2)).close()
    assert "\n" not in e.value.strerror
    return e.value


def first(content: dict) -> dict:
    return content["shards"]["block-0"]


NAMES = [
    "../../victim.json",
    "/etc/victim.json",
    "x/y.json",
    "store.id",
    MANIFEST,
    "",
    f"{TEMPLATES}/../../victim.jinja",
]
BAD = {
    "not the name of an auxiliary file": [
        lambda m, name=name: m["auxiliary"].update({name: "0" * 16}) for name in NAMES
    ],
    "not the name of a shard": [
        lambda m, name=name: m["shards"].update({name: m["shards"].pop("block-0")})
        for name in ["../block", "/block", ".block", "", "a/b", "a b", "a\0"]
    ],
    "names more than 2 folders": [lambda m: first(m)["stripes"][1].update(device=2)],
    "it is the one of": [lambda m: m.update(step=2), lambda m: m.update(sequence=7)],
}


@pytest.mark.parametrize(("says", "change"), [(says, change) for says, changes in BAD.items() for change in changes])
def test_a_manifest_is_refused_in_words(ours, says, change):
    content = fields(ours)
    change(content)
    put(ours / "d0" / SNAPSHOT / MANIFEST, seal(FORMAT, content))
    error = refused(ours, says)
    assert error.filename == str(ours / "d0" / SNAPSHOT / MANIFEST)
    assert "is damaged" in error.strerror


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"1" * 9999]
)
def test_text_that_is_no_manifest_is_refused_in_words(ours, text):
    for path in (ours / "d0" / SNAPSHOT / MANIFEST, ours / "d1" / "store.id"):
        put(path, text)
        assert refused(ours, "is damaged").filename == str(path)


def test_what_another_version_wrote_is_said_to_be_so(ours):
    put(ours / "d0" / SNAPSHOT / MANIFEST, b'{"format": 1, "sequence": 1}')
    refused(ours, f"is of format 1, this version reads {FORMAT}. Use the version that wrote it")


def test_the_folders_of_a_store_may_be_links_themselves(tmp_path):
    (tmp_path / "source" / TEMPLATES).mkdir(parents=True)
    for name in ("config.json", f"{TEMPLATES}/tool.jinja"):
        (tmp_path / "source" / name).write_text("{}")
    for k in range(2):
        (tmp_path / f"drive{k}").mkdir()
        (tmp_path / f"d{k}").symlink_to(tmp_path / f"drive{k}")
    with create(tmp_path, 2, auxiliary=tmp_path / "source") as store:
        write_all(store, 1)
        store.commit(1, {})
    with Store.open(devices(tmp_path, 2)) as store:
        assert holds(store, 1)
        store.remove()
    assert all((tmp_path / f"d{k}").is_symlink() and not any((tmp_path / f"drive{k}").iterdir()) for k in range(2))


def test_a_store_whose_hard_links_were_split_by_a_copy_is_removed_whole(ours, tmp_path):
    shutil.copytree(ours, tmp_path / "copy")
    with Store.open(devices(tmp_path / "copy", 2)):
        pass
    shutil.copytree(tmp_path / "copy", tmp_path / "again")
    folders.discard([tmp_path / "again" / f"d{k}" for k in range(2)])
    assert not [path for path in (tmp_path / "again").rglob("*") if path.name not in ("d0", "d1")]


@pytest.mark.parametrize("end", ["commit", "remove", "clean"])
def test_what_others_put_into_a_snapshot_is_renamed_and_not_removed(tmp_path, end):
    """A snapshot that is removed, a store that is, what a kill has left."""
    with create(tmp_path, 2) as store:
        write_all(store, 1)
        store.commit(1, {})
        folder = tmp_path / "d0" / SNAPSHOT
        (folder / "notes").mkdir()
        (folder / "notes" / "mine.txt").write_text("mine")
        if end == "remove":
            store.remove()
        elif end == "commit":
            store.commit(2, {})
    if end == "clean":
        folder.rename(folder.with_name(f"{SNAPSHOT}.dropped"))
        with pytest.raises(StoreError, match="no complete snapshot"):
            Store.open(devices(tmp_path, 2))
        Store.create(devices(tmp_path, 2)).remove()
    left = [path for path in (tmp_path / "d0").rglob("*") if path.is_file()]
    assert [path.read_text() for path in left if path.parent.name == "notes"] == ["mine"]
    assert not list((tmp_path / "d0").glob("*.left/*.safetensors"))


def test_a_checkpoint_with_a_manifest_of_its_own_keeps_out_of_ours(tmp_path):
    """It would be the same file in every snapshot, and each new one would write over those before."""
    (tmp_path / "source").mkdir()
    for name in (MANIFEST, "config.json"):
        (tmp_path / "source" / name).write_text("{}")
    with create(tmp_path, keep=2, auxiliary=tmp_path / "source") as store:
        for seed in (1, 2):
            write_all(store, seed)
            store.commit(seed, {})
    with Store.open(devices(tmp_path), keep=2) as store:
        assert [s.step for s in store.snapshots] == [1, 2]
        assert holds(store, 2)


# ---------------------------------------------------------------- there and back


def test_the_way_back_from_a_damaged_manifest(tmp_path):
    with create(tmp_path, keep=3) as store:
        for seed in range(3):
            write_all(store, seed)
            store.commit(seed, {})
    folders = sorted((tmp_path / "d0").glob("snapshot-*"))
    newer, older, alone = (
        "Remove .*snapshot-000002-step-1: there is a newer snapshot",
        "To go back to step 0, remove .*snapshot-000003-step-2",
        r"There is no older snapshot \(--keep 1 keeps one\): restore the file from a copy",
    )
    for damaged, says in [(1, newer), (2, older), (0, alone)]:
        text = (folders[damaged] / MANIFEST).read_bytes()
        (folders[damaged] / MANIFEST).write_bytes(text[:-1])
        with pytest.raises(StoreError, match=says):
            Store.open(devices(tmp_path))
        shutil.rmtree(folders[damaged])
        if damaged:
            with Store.open(devices(tmp_path), keep=3) as store:
                assert holds(store, 2 if damaged == 1 else 0)


def test_a_manifest_says_what_was_written(ours):
    """The way to disk and back."""
    text = (ours / "d0" / SNAPSHOT / MANIFEST).read_bytes()
    snapshot = snapshots.parse_manifest(text)
    assert {name: r.layout for name, r in snapshot.shards.items()}["block-0"] == WEIGHTS
    assert snapshot.shards["block-0.adam"].layout == STATE
    assert snapshot.extra == {"step": 1, "rng": [1, 2.5, None]}
    assert json.loads(text)["format"] == FORMAT


@pytest.mark.parametrize("path", ["runs/a", "two words", "it's", "$HOME/`x`", "-dash", "*", "ü;#"])
def test_a_path_that_is_shown_in_a_command_can_be_copied(path):
    word = quoted(path)
    assert [word.removeprefix("./") for word in shlex.split(word)] == [path]
    assert not word.startswith("-")
    assert quoted("runs/a") == "runs/a"


def test_a_path_with_control_characters_can_be_copied_too():
    for path in ("line\nend", "two  blanks", "a\u3000wide\xa0blank", os.fsdecode(b"\xff'\\a"), "ü\t漢", "-\x1b[31m"):
        word = quoted(path)
        assert word.isascii()
        assert " " not in word
        done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, timeout=60)
        assert os.fsdecode(done.stdout).removeprefix("./") == path

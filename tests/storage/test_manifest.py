"""Manifest and store.id in the hands of a stranger, who can seal what he writes: refused in a line, or harmless."""

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
from trireme.storage.untrusted import checksum, quoted, seal, unseal

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
    assert len(e.value.strerror) < 400
    assert e.value.strerror.isprintable()
    return e.value


def first(content: dict) -> dict:
    return content["shards"]["block-0"]


BAD = {
    "not the name of an auxiliary file": [
        lambda m, name=name: m["auxiliary"].update({name: "0" * 16})
        for name in [
            "../../victim.json",
            "/etc/victim.json",
            "x/y.json",
            "store.id",
            MANIFEST,
            "a\nb.json",
            "",
            "\\x.json",
        ]
        + [f"{TEMPLATES}/../../victim.jinja", "\ud800.json", "x" * 99999 + "\0.json"]
    ],
    "not the name of a shard": [
        lambda m, name=name: m["shards"].update({name: m["shards"].pop("block-0")})
        for name in ["../block", "/block", ".block", "", "a/b", "a b", "a\0", "\x1b[2J" * 100]
    ],
    "expected": [
        *(lambda m, x=x: first(m)["stripes"][0].update(device=x) for x in [-1, 1.0, "0", True, None, [], 10**400]),
        *(lambda m, x=x: first(m)["stripes"][0].update(file=x) for x in [-1, "../x", 1 << 63, {}]),
        *(lambda m, x=x: first(m)["stripes"][0].update(segments=x) for x in [0, [[0, 0]], [[0, 0, -1]], [5], {"a": 1}]),
        *(lambda m, x=x: first(m).update(tensors=x) for x in [[], None, {"q": []}, {"q": 3}]),
        *(lambda m, x=x: m.update(sequence=x) for x in [-1, "1", 1.0, None, 1 << 63]),
        *(lambda m, x=x: m.update(auxiliary=x) for x in [[], ["config.json"], {"config.json": 1}]),
        *(lambda m, x=x: m.update(extra=x) for x in [[], None, "x"]),
        lambda m: first(m).update(weights=1),
    ],
    "lacks|has": [
        *(lambda m, key=key: m.pop(key) for key in ("sequence", "step", "extra", "auxiliary", "shards")),
        *(lambda m, key=key: first(m).pop(key) for key in ("tensors", "weights", "stripes")),
        lambda m: m.update(more=1),
        lambda m: m.update({"\x1b]0;x\x07": 1}),
    ],
    "dtype": [lambda m: first(m)["tensors"]["q"].update(dtype="F22")],
    "says otherwise|say otherwise": [
        lambda m, x=x: first(m)["tensors"]["q"].update(shape=x) for x in [[1], [1 << 62] * 1000, [0], []]
    ],
    "gap or an overlap": [lambda m: first(m)["tensors"].pop("q")],
    "not the whole of a shard": [
        lambda m: first(m)["stripes"].pop(),
        lambda m: first(m).update(tensors={}),
    ],
    "segments of a stripe": [
        lambda m: first(m)["stripes"][0].update(segments=[]),
        lambda m: first(m)["stripes"][0]["segments"][0].__setitem__(2, 4096),
        lambda m: first(m)["stripes"][0]["tensors"].clear(),
    ],
    "two stripes are on one device": [lambda m: first(m)["stripes"][1].update(device=0)],
    "two shards are in one file": [
        lambda m: first(m)["stripes"][0].update(file=m["shards"]["block-0.adam"]["stripes"][0]["file"])
    ],
    "names more than 2 folders": [lambda m: first(m)["stripes"][1].update(device=2)],
    "a checksum of": [lambda m, x=x: first(m)["stripes"][0].update(sum=x) for x in ("", "0" * 15, "G" * 16, "0" * 17)],
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
@pytest.mark.parametrize("sealed", [False, True])
def test_text_that_is_no_manifest_is_refused_in_words(ours, text, sealed):
    for path, version in ((ours / "d0" / SNAPSHOT / MANIFEST, FORMAT), (ours / "d1" / "store.id", folders.FORMAT)):
        rest = b'"x": ' + text
        seal = b'{"format": %d, "xxh3_64": "%s", ' % (version, checksum([rest]).encode())
        put(path, seal + rest if sealed else text)
        assert refused(ours, "is damaged|has more than 4096 bytes").filename == str(path)


@pytest.mark.parametrize(
    "change", [{"device": 10**18}, {"devices": 10**18}, {"device": -1}, {"store": 1}, {"device": "x"}]
)
def test_an_identity_is_refused_in_words(ours, change):
    path = ours / "d1" / "store.id"
    put(path, seal(folders.FORMAT, unseal(path.read_bytes(), folders.FORMAT, "identity") | change))
    refused(ours, "is damaged|give all of them and no others")


def test_what_an_older_version_wrote_is_said_to_be_so(ours):
    put(ours / "d0" / SNAPSHOT / MANIFEST, b'{"format": 1, "sequence": 1}')
    refused(ours, "is of format 1, this version reads 2. Use the version that wrote it")
    put(ours / "d0" / "store.id", b'{"store": "0123", "device": 0, "devices": 2}')
    refused(ours, "is of format 1. Use the version that wrote it")


# ---------------------------------------------------------------- nothing outside the store


def outside(folder: Path) -> dict[Path, tuple]:
    return {p: (p.read_bytes(), p.stat().st_nlink, p.stat().st_ino) for p in folder.rglob("*") if p.is_file()}


def link_shard(ours: Path, victim: Path) -> None:
    """A span's file is a link to one that has all its bytes."""
    path = ours / "d1" / SNAPSHOT / "block-0.adam.1.safetensors"
    shutil.copy(path, victim / "x.safetensors")
    path.unlink()
    path.symlink_to(victim / "x.safetensors")


def link_folder(name: str):
    def link(ours: Path, victim: Path) -> None:
        shutil.copytree(ours / name, victim / "folder")
        for number in ("900000", "900001"):
            (victim / "folder" / f"{number}.safetensors").write_text("theirs")
        shutil.rmtree(ours / name)
        (ours / name).symlink_to(victim / "folder")

    return link


def link_file(name: str):
    def link(ours: Path, victim: Path) -> None:
        (victim / "file").write_bytes((ours / name).read_bytes() if (ours / name).exists() else b"theirs")
        (ours / name).unlink(missing_ok=True)
        (ours / name).symlink_to(victim / "file")

    return link


LINKS = {
    "span": link_shard,
    **{name: link_folder(name) for name in ("d0/files", "d1/files", f"d1/{SNAPSHOT}", f"d0/{TEMPLATES}")},
    f"d0/{SNAPSHOT}/{TEMPLATES}": link_folder(f"d0/{SNAPSHOT}/{TEMPLATES}"),
    **{name: link_file(name) for name in ("d0/store.lock", "d1/store.id", f"d0/{SNAPSHOT}/config.json")},
    f"d0/{SNAPSHOT}/{MANIFEST}": link_file(f"d0/{SNAPSHOT}/{MANIFEST}"),
}


@pytest.mark.parametrize("what", LINKS)
def test_a_link_out_of_the_store_is_refused_and_what_it_leads_to_is_untouched(ours, tmp_path, what):
    victim = tmp_path / "victim"
    victim.mkdir()
    LINKS[what](ours, victim)
    before = outside(victim)
    refused(ours)
    assert outside(victim) == before


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


@pytest.mark.parametrize("name", ["d0/files", "d1/files", f"d0/{TEMPLATES}"])
def test_a_new_store_in_place_of_one_without_a_snapshot_leaves_what_links_lead_to(ours, made, tmp_path, name):
    """As a run makes that is resumed before its first snapshot."""
    victim = tmp_path / "victim"
    victim.mkdir()
    link_folder(name)(ours, victim)
    for k in range(2):
        shutil.rmtree(ours / f"d{k}" / SNAPSHOT)
    before = outside(victim)
    with pytest.raises(StoreError, match="has to be a folder, and no link|which is not a file of a store"):
        Store.create(devices(ours, 2), auxiliary=made / "source")
    assert outside(victim) == before


def test_links_that_a_copy_has_split_are_made_again_without_other_names(ours, tmp_path, monkeypatch):
    """A kill meanwhile leaves nothing that nobody removes."""
    shutil.copytree(ours, tmp_path / "copy")
    made, real = [], os.link
    monkeypatch.setattr(os, "link", lambda path, name: made.append(Path(name).name) or real(path, name))
    before = {path.name for path in (tmp_path / "copy").rglob("*")}
    with Store.open(devices(tmp_path / "copy", 2)) as store:
        assert holds(store, 1)
    assert made
    assert set(made) <= before


def test_a_link_with_the_name_of_a_file_that_is_being_written_is_replaced(ours, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    link_file("d0/.model.safetensors.index.json.partial")(ours, victim)
    before = outside(victim)
    with Store.open(devices(ours, 2)) as store:
        assert holds(store, 1)
    assert outside(victim) == before
    assert not list((ours / "d0").glob(".*"))


@pytest.mark.parametrize("to", ["victim", f"d0/{SNAPSHOT}/block-0.safetensors"])
def test_a_name_in_files_that_is_a_link_is_replaced(ours, tmp_path, to):
    """What is in use is called so in the snapshot's folder; another file by its name is not ours."""
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    name = ours / "d0" / "files" / f"{first(fields(ours))['stripes'][0]['file']:06d}.safetensors"
    name.unlink()
    name.symlink_to(ours / to)
    with Store.open(devices(ours, 2)) as store:
        assert holds(store, 1)
        write_all(store, 2)
        store.commit(2, {})
        assert holds(store, 2)
    assert victim.read_text() == "theirs"
    assert not name.is_symlink()


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
        "Remove snapshot-000002-step-1: there is a newer snapshot",
        "To go back to step 0, remove snapshot-000003-step-2",
        r"There is no older snapshot \(--keep 1 keeps one\): restore the file from a copy",
    )
    for damaged, says in [(1, newer), (2, older), (0, alone)]:
        text = (folders[damaged] / MANIFEST).read_bytes()
        (folders[damaged] / MANIFEST).write_bytes(text[:-1])
        with pytest.raises(StoreError, match=says):
            Store.open(devices(tmp_path))
        shutil.rmtree(folders[damaged])


def test_a_manifest_says_what_was_written(ours):
    """The way to disk and back."""
    text = (ours / "d0" / SNAPSHOT / MANIFEST).read_bytes()
    snapshot = snapshots.parse(text)
    assert {name: r.layout for name, r in snapshot.shards.items()}["block-0"] == WEIGHTS
    assert snapshot.shards["block-0.adam"].layout == STATE
    assert snapshot.extra == {"step": 1, "rng": [1, 2.5, None]}
    assert json.loads(text)["format"] == FORMAT
    assert seal(FORMAT, snapshots._to_json(snapshot)) == text


def test_a_store_of_the_first_version_opens(ours):
    """Its auxiliary files were under another key."""
    identities = [ours / f"d{k}" / folders.IDENTITY for k in range(2)]
    for path, version in [(ours / "d0" / SNAPSHOT / MANIFEST, FORMAT), *((p, folders.FORMAT) for p in identities)]:
        found = unseal(path.read_bytes(), version, "file")
        put(path, seal(version, found | {"companions": found.pop("auxiliary")}))
    with Store.open(devices(ours, 2)) as store:
        assert store.snapshots[-1].step == 1
        assert store.snapshots[-1].auxiliary


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

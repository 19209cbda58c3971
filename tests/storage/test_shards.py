"""The store: versions never disturb each other, faults leave the old one, and the files are what they claim to be."""

import errno
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
from stores import LAYOUTS, STATE, WEIGHTS, K, content, create, devices, flip, holds, write_all

from trireme.storage import folders, snapshots
from trireme.storage import store as store_module
from trireme.storage.aio import arena
from trireme.storage.checkpoint import open_source
from trireme.storage.files import StoreError
from trireme.storage.layout import ALIGN, pack, sequential
from trireme.storage.shards import Damaged
from trireme.storage.store import Store
from trireme.storage.stripes import stripe_tensors, stripe_turns
from trireme.storage.untrusted import seal


@pytest.mark.grid("2")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_write_commit_reopen(tmp_path, count):
    with create(tmp_path, count) as store:
        store.reserve()
        for seed in range(5):
            write_all(store, seed)
            assert holds(store, seed)
            store.commit(seed, {"step": seed, "rng": [1, 2.5, "x"]})
        write_all(store, 99)  # never committed
        assert holds(store, 99)
    with Store.open(devices(tmp_path, count)[::-1]) as store:  # in any order
        assert store.restore() == {"step": 4, "rng": [1, 2.5, "x"]}
        assert holds(store, 4)
        assert {n: s.layout for n, s in store.shards.items()} == LAYOUTS
        write_all(store, 5)
        store.commit(5, {})
    shutil.rmtree(tmp_path / "d0" / "files")  # the snapshot has all of it
    with Store.open(devices(tmp_path, count)) as store:
        assert holds(store, 5)
        assert store.snapshots[-1].step == 5


def test_the_steady_state_makes_no_file_and_changes_no_size(tmp_path):
    with create(tmp_path, keep=2) as store:
        store.reserve()
        folder = tmp_path / "d0" / "files"
        before = {p.name for p in folder.iterdir()}
        allocated = sum(p.stat().st_blocks for p in folder.iterdir())
        for seed in range(8):
            for _ in range(2):
                write_all(store, seed)
            store.commit(seed, {})
        assert {p.name for p in folder.iterdir()} == before
        assert sum(p.stat().st_blocks for p in folder.iterdir()) == allocated
    for seed in range(4):  # spares are found again
        with Store.open(devices(tmp_path), keep=2) as store:
            for _ in range(2):
                write_all(store, seed)
            store.commit(seed, {})
        assert len(list(folder.iterdir())) <= len(before)


def test_keep_rollback_and_recycling(tmp_path):
    with create(tmp_path, keep=3) as store:
        for seed in range(6):
            write_all(store, seed)
            store.commit(seed, {"seed": seed})
        assert [s.step for s in store.snapshots] == [3, 4, 5]
        write_all(store, 30)
        assert holds(store, 30)
        files = len(list(tmp_path.glob("d0/files/*")))
        for _ in range(3):  # what was written since is a spare each time
            assert store.restore() == {"seed": 5}
            assert holds(store, 5)
            write_all(store, 31)
        assert len(list(tmp_path.glob("d0/files/*"))) == files
        assert store.go_back(store.snapshots[1].sequence) == {"seed": 4}
        assert holds(store, 4)
    with Store.open(devices(tmp_path), keep=1) as store:
        assert holds(store, 4)
        write_all(store, 6)
        store.commit(6, {})
        assert [s.step for s in store.snapshots] == [6]
    assert len(list((tmp_path / "d0").glob("snapshot-*"))) == 1


def test_older_snapshots_stay_until_other_stores_have_the_new_one(tmp_path):
    """Where they never do, the store goes back to the step that all have, and on from there."""

    def lost():
        raise InterruptedError("another store is gone")

    with create(tmp_path, count=2) as store:
        write_all(store, 1)
        store.commit(1, {"step": 1})
        write_all(store, 2)
        with pytest.raises(InterruptedError):
            store.commit(2, {"step": 2}, lost)
    with Store.open(devices(tmp_path, 2)) as store:
        assert [snapshot.step for snapshot in store.snapshots] == [1, 2]
        assert holds(store, 2)
        assert store.go_back(1) == {"step": 1}
        assert holds(store, 1)
        assert [path.name for path in (tmp_path / "d0").glob("snapshot-*")] == [store.snapshots[-1].folder]
        write_all(store, 3)
        store.commit(2, {"step": 2})
    with Store.open(devices(tmp_path, 2)) as store:
        assert [snapshot.step for snapshot in store.snapshots] == [2]
        assert holds(store, 3)


def test_a_read_under_way_keeps_its_version(tmp_path):
    """Write twice while a slow read of the old version is under way: its file must not be recycled under it."""
    gate = threading.Event()

    def fault(piece):
        if not piece.write:
            gate.wait(60)

    with create(tmp_path, fault=fault, depth=32) as store:
        write_all(store, 0)
        got = arena(STATE.span)
        read = store.read("block-0.adam", got)
        for seed in (1, 2, 3):
            store.write("block-0.adam", content(STATE, seed)).result(60)
        assert not read.done()
        gate.set()
        read.result(60)
        assert got[: STATE.nbytes] == content(STATE, 0)[: STATE.nbytes]


def test_snapshots_are_checkpoints_for_every_reader(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "x"}')
    (source / "tokenizer.json").write_bytes(b"\x00\x01")
    with create(tmp_path, 2, auxiliary=source) as store:
        write_all(store, 1)
        store.commit(1, {})
        write_all(store, 2)  # what is under way does not show
        for folder in (tmp_path / "d0", tmp_path / "d0" / "snapshot-000001-step-1"):
            for name in ("config.json", "tokenizer.json"):
                assert (folder / name).read_bytes() == (source / name).read_bytes()
            found = open_source(folder)
            assert set(found.tensors) == {t.name for n in ("block-0", "block-1") for t in LAYOUTS[n].tensors}
            for t in WEIGHTS.tensors:
                assert found.read(t.name).tobytes() == content(WEIGHTS, 1)[t.offset : t.offset + t.nbytes]
        for path in (tmp_path / "d0").glob("snapshot-*/*.safetensors"):
            with safetensors.safe_open(path, "np") as f:
                assert list(f.keys())
                assert f.metadata() == {"format": "pt"}


# ---------------------------------------------------------------- who may open what


def test_two_runs_never_share_a_store(tmp_path):
    with create(tmp_path) as store:
        write_all(store, 0)
        store.commit(0, {})
        with pytest.raises(StoreError, match=f"process {os.getpid()}"):
            Store.open(devices(tmp_path))
        program = f"from trireme.storage.store import Store; Store.open([{str(tmp_path / 'd0')!r}])"
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        assert str(os.getpid()) in result.stderr
    Store.open(devices(tmp_path)).close()


def test_a_lock_that_its_owner_has_just_removed_locks_nothing(tmp_path, monkeypatch):
    """Opened before a finished store removes it, locked after that."""
    flock = fcntl.flock

    def late(fd, how):
        os.unlink(tmp_path / "d0" / "store.lock")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(StoreError, match=str(tmp_path)):
        create(tmp_path)
    monkeypatch.undo()
    create(tmp_path).close()


def test_a_folder_with_another_runs_second_part_is_not_taken(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    with create(theirs, 2) as store:
        write_all(store, 0)
        store.commit(0, {})
    Store.create(devices(ours, 2)).close()  # which came to no snapshot, and may be made anew
    for dirs in ([ours / "d0", theirs / "d1"], [theirs / "d1", ours / "d1"]):
        with pytest.raises(StoreError, match="theirs/d1"):
            Store.create(dirs)
    with Store.open(devices(theirs, 2)) as store:
        assert holds(store, 0)


@pytest.mark.parametrize("name", ["files/000000.safetensors", "snapshot-000001-step-1.partial/a", "scratch"])
def test_a_new_store_takes_no_name_of_others(tmp_path, name):
    path = tmp_path / "d1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=name.removesuffix("/a")):
        Store.create([tmp_path / "d0", tmp_path / "d1"])
    assert sorted(tmp_path.rglob("*")) == before
    assert path.read_text() == "x"


@pytest.mark.parametrize("call", ["fsync", "replace", "write", "probe"])
def test_a_store_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch, call):
    """Whatever fails, in the second of two folders; what was there before stays, with what it holds."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (tmp_path / "d0").mkdir()
    (tmp_path / "d0" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    of, name = {"probe": (store_module, "open_device"), "write": (os, "pwrite")}.get(call, (os, call))
    real = getattr(of, name)

    def fail(what, *args):
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
        if "d1" in path or ("config.json" in path and call in ("fsync", "write")):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return real(what, *args)

    monkeypatch.setattr(of, name, fail)
    with pytest.raises(OSError, match="No space|in use"):
        Store.create([tmp_path / "d0", tmp_path / "deep" / "d1"], auxiliary=source)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    Store.create([tmp_path / "d0", tmp_path / "deep" / "d1"], auxiliary=source).remove()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_drive_without_hard_links_is_refused_before_the_first_step(tmp_path, monkeypatch, code):
    """As exFAT, SMB and many FUSE file systems are."""

    def link(path, to):
        raise OSError(code, os.strerror(code), path, None, to)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreError, match="ext4") as error:
        Store.create([tmp_path / "drive"])
    assert error.value.filename == str(tmp_path / "drive")
    assert not list(tmp_path.iterdir())


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    with create(tmp_path, 2) as store:
        write_all(store, 0)
        store.commit(0, {})
    foreign = ["notes.txt", "snapshot-mine/x", "files/other.safetensors", "files/000001.txt", "x.partial"]
    leftovers = ["snapshot-000002-step-1.partial/a.safetensors", "snapshot-000001-step-1.dropped/manifest.json"]
    leftovers += ["files/900000.safetensors"]
    for name in [*foreign, *leftovers]:
        path = tmp_path / "d0" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    orphan = tmp_path / "d1" / "snapshot-000009-step-9"  # made on the second device only
    orphan.mkdir()
    with Store.open(devices(tmp_path, 2)) as store:
        assert holds(store, 0)
        write_all(store, 1)
        store.commit(1, {})
    for name in foreign:
        assert (tmp_path / "d0" / name).read_text() == "x"
    assert not any((tmp_path / "d0" / name).exists() for name in leftovers)
    assert not orphan.exists()


def test_a_store_that_is_finished_leaves_only_what_is_not_its_own(tmp_path):
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "additional_chat_templates/tool.jinja"):
        (source / name).write_text("{}")
    with create(tmp_path, 2, auxiliary=source) as store:
        for seed in range(2):
            write_all(store, seed)
            store.commit(seed, {})
        for mine in ("d0/notes.txt", "d1/config.json"):  # auxiliary files are on the first drive
            (tmp_path / mine).write_text("mine")
        store.remove()
    assert [p.name for d in ("d0", "d1") for p in (tmp_path / d).iterdir()] == ["notes.txt", "config.json"]


@pytest.mark.full
@pytest.mark.parametrize("then", ["remove_finished", "a new store"])
def test_killed_at_any_moment_of_its_removal_the_folders_can_be_used_again(tmp_path, monkeypatch, then):
    """Before each call that removes something; what a new store of another checkpoint does not have goes as well."""
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "merges.txt", "additional_chat_templates/tool.jinja"):
        (source / name).write_text("{}")
    calls, left = ("unlink", "rmdir", "rename"), 1000
    for fatal in range(1000):
        folder = tmp_path / f"{fatal}"
        folder.mkdir()
        store = create(folder, 2, auxiliary=source)
        write_all(store, 0)
        store.commit(0, {})
        with monkeypatch.context() as m:
            left = fatal

            def counted(*args, real, **kwargs):
                nonlocal left
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                return real(*args, **kwargs)

            for name in calls:
                m.setattr(os, name, functools.partial(counted, real=getattr(os, name)))
            try:
                store.remove()
            except KeyboardInterrupt:
                store.close()
        if (folder / "d0" / "store.id").exists():
            Store.open(devices(folder, 2)).remove()  # not yet begun: it is a store like any other
        paths = [folder / "d0", folder / "d1"]
        if then == "a new store":
            with Store.create(paths) as new:
                assert not (folder / "d0" / "merges.txt").exists()
                new.remove()
        folders.remove_finished(paths)
        assert [list(path.iterdir()) for path in paths] == [[], []], fatal
        if left > 0:
            break
    assert fatal > 20


def test_what_a_finished_store_removes_are_auxiliary_files(tmp_path):
    for name in ("victim.json", "d0/x.so", "d0/a/b.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name in ("../victim.json", str(tmp_path / "victim.json"), "a/b.json", "x.so"):
        facts = {"store": "x", "device": 0, "devices": 1, "auxiliary": [name], "run": "", "made": []}
        (tmp_path / "d0" / "store.finished").write_bytes(seal(folders.FORMAT, facts))
        folders.remove_finished([tmp_path / "d0"])
        assert sorted(tmp_path.rglob("*")) == before


def test_a_copy_of_a_store_that_lost_its_hard_links_goes_on(tmp_path):
    (tmp_path / "run").mkdir()
    with create(tmp_path / "run", 2, keep=2) as store:
        for seed in range(2):
            write_all(store, seed)
            store.commit(seed, {})
    for k in range(2):
        shutil.copytree(tmp_path / "run" / f"d{k}", tmp_path / f"d{k}", symlinks=True)
    (tmp_path / "d0" / "files" / "000000.safetensors").unlink()
    for step in (1, 2, 3):
        with Store.open(devices(tmp_path, 2), keep=2) as store:
            assert holds(store, step)
            write_all(store, step + 1)
            store.commit(step + 1, {})


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ENODEV, errno.EROFS])
def test_a_failed_write_leaves_the_old_version_and_a_retry_succeeds(tmp_path, number):
    sick = [False]

    def fault(piece):
        if sick[0] and piece.write and piece.offset > 32 * K:
            raise OSError(number, os.strerror(number))

    with create(tmp_path, 2, fault=fault) as store:
        store.reserve()
        write_all(store, 0)
        store.commit(0, {})
        files = len(list(tmp_path.glob("d*/files/*")))
        for _ in range(5):  # spares are given back each time
            sick[0] = True
            with pytest.raises(StoreError, match="files/") as e:
                store.write("block-0.adam", content(STATE, 1)).result(60)
            assert e.value.errno == number
            sick[0] = False
            assert holds(store, 0)
        assert len(list(tmp_path.glob("d*/files/*"))) == files
        write_all(store, 1)
        store.commit(1, {})
        assert holds(store, 1)


def test_a_file_cut_by_somebody_else_is_noticed(tmp_path):
    with create(tmp_path) as store:
        write_all(store, 0)
        store.commit(0, {})
        path = tmp_path / "d0" / "snapshot-000001-step-0" / "block-0.adam.safetensors"
        size = path.stat().st_size
        os.truncate(path, size - 5000)
        with pytest.raises(StoreError, match=str(tmp_path)):
            store.read("block-0.adam", arena(STATE.span)).result(60)
    with pytest.raises(StoreError, match=f"{size - 5000} bytes of {size}"):
        Store.open(devices(tmp_path))


def test_a_file_that_does_not_begin_with_its_header_is_noticed(tmp_path):
    with create(tmp_path) as store:
        write_all(store, 0)
        store.commit(0, {})
    with open(tmp_path / "d0" / "snapshot-000001-step-0" / "block-0.adam.safetensors", "r+b") as file:
        file.write(bytes(4096))  # as a filesystem leaves a block that it has lost
    with pytest.raises(StoreError, match="block-0.adam.safetensors"):
        Store.open(devices(tmp_path))


def damaged(store: Store) -> dict[str, Damaged]:
    """The spans whose bytes are not those that were written."""
    found = {}
    for name, shard in store.shards.items():
        try:
            store.verify(name, arena(shard.layout.span)).result(60)
        except Damaged as error:
            found[name] = error
    return found


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("reopened", [True, False])
def test_a_changed_bit_of_any_stripe_is_noticed_by_whoever_asks(tmp_path, count, reopened):
    with create(tmp_path, count, keep=2) as store:
        for seed in range(2):
            write_all(store, seed)
            store.commit(seed, {})
    with Store.open(devices(tmp_path, count), keep=2) as store:
        if not reopened:
            write_all(store, 2)  # in no snapshot
        assert damaged(store) == {}
        for name, shard in store.shards.items():
            for k, (stripe, version) in enumerate(zip(shard.stripes, shard.current, strict=True)):
                path = Path(version.file.path)
                flip(path, stripe.nbytes - 1)
                (found,) = damaged(store).items()
                assert found[0] == name
                assert f"without this file is of step {0 if reopened else 1}" in found[1].strerror
                assert Path(found[1].filename).name == (snapshots.file_name(name, k) if reopened else path.name)
                store.read(name, arena(shard.layout.span)).result(60)  # who does not ask is not told
                flip(path, stripe.nbytes - 1)
        assert damaged(store) == {}


def test_what_an_fsync_lost_must_be_written_again(tmp_path, monkeypatch):
    real_fsync, sick = os.fsync, [True]

    def fsync(fd):
        if sick[0] and os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            sick[0] = False  # the kernel reports a lost write once
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(fd)

    with create(tmp_path) as store:
        sick[0] = False
        write_all(store, 0)
        monkeypatch.setattr(os, "fsync", fsync)
        store.commit(0, {})
        write_all(store, 1)
        sick[0] = True
        with pytest.raises(StoreError, match="safetensors"):
            store.commit(1, {})
        with pytest.raises(StoreError, match="again"):
            store.commit(1, {})
        for _ in range(2):  # so often that the file is written again; it is as good as any then
            write_all(store, 1)
        store.commit(1, {})
        synced = []
        store.commit(2, {}, progress=synced.append)
        assert not synced  # its files are durable already
    with Store.open(devices(tmp_path)) as store:
        assert holds(store, 1)
        assert store.snapshots[-1].step == 2


@pytest.mark.parametrize("call", ["link", "rename", "mkdir"])
def test_a_snapshot_that_fails_leaves_nothing(tmp_path, monkeypatch, call):
    with create(tmp_path, 2) as store:
        write_all(store, 0)
        store.commit(0, {})
        write_all(store, 1)

        def fail(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StoreError, match="No space left on device"):
                store.commit(1, {})
        assert [p.name for p in tmp_path.glob("d*/snapshot-*")] == ["snapshot-000001-step-0"] * 2
        assert holds(store, 1)
        store.commit(1, {})
    with Store.open(devices(tmp_path, 2)) as store:
        assert holds(store, 1)


def test_a_store_that_a_drive_has_no_room_for_is_refused_before_it_is_written(tmp_path, monkeypatch):
    with create(tmp_path) as store:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000))
        with pytest.raises(StoreError, match="20.00 kB") as e:
            store.reserve()
        assert e.value.errno == errno.ENOSPC


# ---------------------------------------------------------------- several devices


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.0), (1.0, 3.0), (1.0, 0.3, 2.0, 0.7)])
@pytest.mark.parametrize("deal", ["cut", "whole"])
def test_stripes_cover_the_span_once(speeds, deal):
    load = [0.0] * len(speeds)
    for layout in (WEIGHTS, STATE, sequential([("a", "U8", (5,))]), sequential([])):
        stripes = stripe_turns(layout, speeds) if deal == "cut" else stripe_tensors(layout, speeds, load)
        covered = []
        for stripe in stripes:
            assert len(stripe.header) % ALIGN == 0
            assert sum(n for _, _, n in stripe.segments) == stripe.layout.nbytes
            end = 0
            for at, offset, n in stripe.segments:
                assert at % ALIGN == 0
                assert offset == end
                end += n
                covered.append((at, n))
        at = 0
        for start, n in sorted(covered):
            assert start == at
            at += n
        assert at == layout.nbytes
        if deal == "whole":
            assert sorted(t.name for s in stripes for t in s.layout.tensors) == sorted(t.name for t in layout.tensors)


def test_whole_tensors_even_out_over_the_units():
    """LLaMA-7B blocks on four drives of different speed: over the stack the work ends everywhere at about one time."""
    wide, narrow = (11008, 4096), (4096, 4096)
    layout = pack([[(f"w{i}", wide)] for i in range(3)] + [[(f"n{i}", narrow)] for i in range(4)], "BF16")
    speeds, load = (7e9, 7e9, 3.5e9, 5e9), [0.0] * 4
    for _ in range(32):
        stripe_tensors(layout, speeds, load)
    ideal = 32 * layout.nbytes / sum(speeds)
    assert max(load) < ideal / 0.95


@pytest.mark.parametrize("speeds", [(60e6, 60e6), (90e6, 30e6), (60e6, 30e6, 15e6, 45e6)])
def test_state_is_cut_by_the_speeds_of_the_drives(speeds):
    layout = sequential([("m", "F32", (1 << 20,)), ("v", "F32", (1 << 20,))])
    seconds = [stripe.layout.nbytes / speeds[stripe.device] for stripe in stripe_turns(layout, speeds)]
    assert len(seconds) == len(speeds)
    assert max(seconds) < layout.nbytes / sum(speeds) / 0.99


def test_all_drives_work_at_once(tmp_path):
    """The first piece on each of three waits for that on the others."""
    all_there, lock, begun = threading.Barrier(3), threading.Lock(), set()

    def fault(piece):
        begins = (Path(piece.file.path).parts[-3], piece.write)
        with lock:
            first = begins not in begun
            begun.add(begins)
        if first:
            all_there.wait(60)

    with create(tmp_path, 3, fault=fault) as store:
        store.write("block-0.adam", content(STATE, 0)).result(60)
        store.read("block-0.adam", arena(STATE.span)).result(60)
    assert len(begun) == 6

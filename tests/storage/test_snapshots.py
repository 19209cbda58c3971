"""Crash safety: power failures, replayed from a log of a store's calls. Killed runs: tests/run/test_kills.py."""

import os
import pathlib
import random
import stat
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trireme.storage import auxiliary, snapshots
from trireme.storage.aio import IO, arena
from trireme.storage.devices import Device, is_direct
from trireme.storage.folders import FINISHED, IDENTITY
from trireme.storage.layout import pack, sequential
from trireme.storage.store import Store

# ---------------------------------------------------------------- power failure


@dataclass
class Inode:
    """What the drive is sure to hold, and what it may hold: any subset of `pending` in order."""

    sure: dict | bytes
    pending: list = field(default_factory=list)

    def outcome(self, keep):
        """The content after a power failure in which the pending operations of `keep` arrived."""
        state = dict(self.sure) if isinstance(self.sure, dict) else bytearray(self.sure)
        for i, operation in enumerate(self.pending):
            if keep(i, len(self.pending)):
                operation(state)
        return state if isinstance(state, dict) else bytes(state)


class Drive:
    """A model of a filesystem that keeps no estimate but fsync's: without it, writes and names arrive in any order.

    It follows the real calls of a store and asks `judge` after each what every power failure would leave.
    """

    def __init__(self, monkeypatch, root: Path, judge):
        self.root, self.judge = root, judge
        self.inodes: dict[int, Inode] = {}
        self.verdicts: list[Exception] = []
        self.real = {name: getattr(os, name) for name in ("fsync", "link", "rename", "replace", "mkdir", "unlink")}
        self.real |= {name: getattr(os, name) for name in ("open", "symlink", "rmdir", "pwrite", "ftruncate")}
        self.real["pwritev"] = os.pwritev
        for path in [root, *root.rglob("*")]:
            names = {p.name: p.stat().st_ino for p in path.iterdir()} if path.is_dir() else path.read_bytes()
            self.inodes[path.stat().st_ino] = Inode(names)
        for name in self.real:
            monkeypatch.setattr(os, name, getattr(self, name))
            if hasattr(getattr(pathlib, "_normal_accessor", None), name) and name != "open":  # Python 3.10's pathlib
                monkeypatch.setattr(pathlib._normal_accessor, name, getattr(self, name))
        monkeypatch.setattr(os, "fdatasync", self.fsync)

    def ours(self, path) -> bool:
        return Path(path).is_relative_to(self.root)

    def change(self, inode: int, operation) -> None:
        self.inodes[inode].pending.append(operation)
        try:
            self.judge(self)
        except Exception as e:  # the store must not take it for an error of the disk
            self.verdicts.append(e)

    def name(self, path, inode: int | None) -> None:
        """`path` becomes a name of the inode, or of nothing."""
        path = Path(path)
        self.change(path.parent.stat().st_ino, lambda names: names.update({path.name: inode}))

    def open(self, path, flags, mode=0o777, **kwargs):
        fresh = flags & os.O_CREAT and self.ours(path) and not os.path.exists(path)
        fd = self.real["open"](path, flags, mode, **kwargs)
        inode = os.fstat(fd).st_ino
        if fresh:
            self.inodes[inode] = Inode(b"")
            self.name(path, inode)
        elif flags & os.O_TRUNC and inode in self.inodes:
            self.change(inode, lambda data: data.clear())
        return fd

    def fsync(self, fd):
        self.real["fsync"](fd)
        status = os.fstat(fd)
        inode = self.inodes[status.st_ino]
        inode.sure, inode.pending = inode.outcome(lambda i, n: True), []
        assert stat.S_ISDIR(status.st_mode) or len(inode.sure) == status.st_size

    def pwrite(self, fd, data, offset):
        wrote = self.real["pwrite"](fd, data, offset)
        self.written(fd, bytes(data[:wrote]), offset)
        return wrote

    def pwritev(self, fd, buffers, offset):
        wrote = self.real["pwritev"](fd, buffers, offset)
        self.written(fd, bytes(buffers[0][:wrote]), offset)
        return wrote

    def written(self, fd, data, offset):
        def operation(content):
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data

        if os.fstat(fd).st_ino in self.inodes:
            self.change(os.fstat(fd).st_ino, operation)

    def ftruncate(self, fd, size):
        self.real["ftruncate"](fd, size)

        def operation(content):
            content.extend(bytes(max(0, size - len(content))))
            del content[size:]

        if os.fstat(fd).st_ino in self.inodes:
            self.change(os.fstat(fd).st_ino, operation)

    def link(self, old, new, **kwargs):
        self.real["link"](old, new, **kwargs)
        self.name(new, os.stat(new).st_ino)

    def symlink(self, old, new, *args, **kwargs):
        self.real["symlink"](old, new, *args, **kwargs)
        self.name(new, os.stat(new).st_ino)

    def mkdir(self, path, *args, **kwargs):
        self.real["mkdir"](path, *args, **kwargs)
        self.inodes[os.stat(path).st_ino] = Inode({})
        self.name(path, os.stat(path).st_ino)

    def rename(self, old, new, **kwargs):
        self.real["rename"](old, new, **kwargs)
        old, new, inode = Path(old), Path(new), os.stat(new).st_ino
        assert old.parent == new.parent
        self.change(old.parent.stat().st_ino, lambda names: names.update({old.name: None, new.name: inode}))

    replace = rename

    def unlink(self, path, **kwargs):
        self.real["unlink"](path, **kwargs)
        self.name(path, None)

    def rmdir(self, path, **kwargs):
        self.real["rmdir"](path, **kwargs)
        self.name(path, None)

    def after_power_failure(self, keep) -> dict:
        """The tree that a power failure leaves: folders as dicts, files as bytes. `keep` decides about each change."""

        def tree(inode: int):
            content = self.inodes[inode].outcome(keep)
            if isinstance(content, bytes):
                return content
            return {name: tree(child) for name, child in content.items() if child is not None}

        return tree(self.root.stat().st_ino)


LAYOUTS = {
    "w": pack([[("a", (32, 64))], [("b", (5, 3))]], "BF16"),
    "s": sequential([("lo", "I16", (2001,)), ("m", "F32", (2001,))]),
}


def content(name: str, step: int) -> bytes:
    return random.Random(f"{name} {step}").randbytes(LAYOUTS[name].nbytes).ljust(LAYOUTS[name].span, b"\0")


@pytest.mark.grid
@pytest.mark.parametrize("weights", [True, False])
def test_after_a_power_failure_at_any_moment_what_a_manifest_names_is_there(tmp_path, monkeypatch, weights):
    """Two devices. After each call: nothing unsynced arrived, all of it, and random subsets, in this model drive.

    From the folders' first moment to their last, when the store is removed; while anything is left, so is its name.
    """
    generator, durable, looked, finished = random.Random(0), [0], defaultdict(int), []

    def judge(drive: Drive) -> None:
        keeps = [lambda i, n: False, lambda i, n: True, lambda i, n: i == n - 1, lambda i, n: i < n - 1]
        keeps += [lambda i, n, p=p: generator.random() < p for p in (0.02, 0.1, 0.5, 0.5, 0.9, 0.98)]
        for keep in keeps:
            trees = drive.after_power_failure(keep)
            kept = [trees.get(f"d{k}", {}) for k in range(2)]
            if finished and not all(IDENTITY in tree for tree in kept):
                for tree in kept:
                    assert {IDENTITY, FINISHED} & tree.keys() or not ours(tree), tree.keys()
                looked[FINISHED] += 1
                continue
            steps = [check(trees, name) for name in kept[0] if snapshots.NAME.fullmatch(name)]
            assert max(steps, default=0) >= durable[0], (steps, durable)
            looked[len(steps)] += 1

    def ours(tree: dict) -> list[str]:
        """What only a store that knows itself may remove."""
        return [name for name in (*tree, *tree.get("files", ())) if name.endswith(".safetensors") or "snapshot" in name]

    def check(trees: dict, name: str) -> int:
        folder = trees["d0"][name]
        snapshot = snapshots.parse_manifest(folder[snapshots.MANIFEST])
        for record_name, record in snapshot.shards.items():
            span = bytearray(record.layout.span)
            links = [link for link in snapshot.links() if link[1].split(".")[0] == record_name]
            for (device, file, id), stripe in zip(links, record.stripes, strict=True):
                data = trees[f"d{device}"][name][file]
                assert data == trees[f"d{device}"]["files"][f"{id:06d}.safetensors"]
                assert len(data) == stripe.nbytes
                assert data.startswith(stripe.header)
                for at, offset, n in stripe.segments:
                    span[at : at + n] = data[len(stripe.header) + offset :][:n]
            assert zlib.crc32(span) == snapshot.extra["crc"][record_name], (name, record_name)
        assert folder["model.safetensors.index.json"] == snapshot.index()
        assert folder["config.json"] == b"{}"
        assert folder[auxiliary.TEMPLATES] == {"tool.jinja": b"{{ tools }}"}
        return snapshot.step

    source = tmp_path / "source"
    (source / auxiliary.TEMPLATES).mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / auxiliary.TEMPLATES / "tool.jinja").write_text("{{ tools }}")
    root = tmp_path / "root"
    root.mkdir()
    direct = is_direct(root)
    made = [Device(root / f"d{k}", IO(8192, 1, 1), direct, 1.0 + k) for k in range(2)]
    drive = Drive(monkeypatch, root, judge)
    with Store.create(made, auxiliary=source) as store:
        for name, layout in LAYOUTS.items():
            store.add(name, layout, weights=weights and name == "w")
        buffers = {name: arena(layout.span) for name, layout in LAYOUTS.items()}
        for step in range(1, 5):
            for name, buffer in buffers.items():
                buffer[:] = content(name, step)
                store.write(name, buffer).result(60)
            store.commit(step, {"crc": {n: zlib.crc32(content(n, step)) for n in LAYOUTS}})
            durable[0] = step
        finished.append(True)
        store.remove()
        monkeypatch.undo()
    if drive.verdicts:
        raise drive.verdicts[0]
    assert looked[1] > 500, looked
    assert looked[2] > 20, looked
    assert looked[FINISHED] > 100, looked

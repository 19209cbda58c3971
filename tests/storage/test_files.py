"""Durable files of any size, past the page cache or through it, are what was given, byte by byte."""

import errno
import fcntl
import os
import threading

import numpy as np
import pytest

from trireme.storage.files import BLOCK, DEPTH, StoreError, replace_synced, stream, write_synced
from trireme.storage.untrusted import PART, read_small

SMALL = 8192  # a block that is read


def pieces(nbytes: int, each: int) -> list[np.ndarray]:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return [data[a : a + each] for a in range(0, nbytes, each)]


def check(path, data: list[np.ndarray], block: int = BLOCK) -> None:
    """The file has these bytes, as it is read by blocks or at once."""
    expected = b"".join(map(bytes, data))
    assert path.read_bytes() == expected
    assert b"".join(map(bytes, stream(path, block=block))) == expected


@pytest.mark.parametrize(
    ("nbytes", "each"), [(0, 1), (1, 1), (BLOCK - 1, 5000), (BLOCK, BLOCK), (BLOCK + 1, BLOCK + 1)]
)
def test_a_file_is_its_pieces(tmp_path, nbytes, each):
    given = pieces(nbytes, each)
    write_synced(tmp_path / "file", given)
    check(tmp_path / "file", given)


@pytest.mark.parametrize("nbytes", [0, 1, SMALL - 1, SMALL, SMALL + 1, 5 * SMALL, 7 * SMALL + 4097])
def test_a_file_is_read_by_blocks_of_any_size(tmp_path, nbytes):
    (tmp_path / "file").write_bytes(b"".join(map(bytes, pieces(nbytes, 1000))))
    for block in (SMALL, 3 * SMALL):
        check(tmp_path / "file", pieces(nbytes, 1000), block)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (1, 1), (5, SMALL), (SMALL - 1, 2 * SMALL + 2), (4096, 3 * SMALL)]
)
def test_a_part_of_a_file_is_its_bytes(tmp_path, offset, nbytes):
    (data,) = pieces(5 * SMALL, 5 * SMALL)
    data.tofile(tmp_path / "file")
    assert b"".join(map(bytes, stream(tmp_path / "file", offset, nbytes, SMALL))) == data[offset:][:nbytes].tobytes()
    with pytest.raises(StoreError, match="file"):
        list(stream(tmp_path / "file", 4 * SMALL, SMALL + 1))


@pytest.mark.parametrize(("size", "fits"), [(PART, True), (2 * PART + 1, True), (2 * PART + 2, False)])
def test_a_small_file_is_read_up_to_its_limit(tmp_path, size, fits):
    (tmp_path / "file").write_bytes(bytes(size))
    if fits:
        assert len(read_small(tmp_path / "file", 2 * PART + 1)) == size
    else:
        with pytest.raises(StoreError, match=str(2 * PART + 1)):
            read_small(tmp_path / "file", 2 * PART + 1)


def test_a_piece_may_change_once_the_next_is_asked_for(tmp_path):
    def content():
        buffer = np.empty(BLOCK // 2, np.uint8)
        for k in range(3):
            buffer[:] = k
            yield buffer

    write_synced(tmp_path / "file", content())
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([k]) * (BLOCK // 2) for k in range(3))


@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
def test_a_link_to_another_file_is_replaced_and_not_written_to(tmp_path, make):
    """As one that a killed process has left, or a stranger."""
    (tmp_path / "other").write_text("mine")
    getattr(tmp_path / ".name.partial", make)(tmp_path / "other")
    replace_synced(tmp_path / "name", b"new")
    assert (tmp_path / "other").read_text() == "mine"
    assert (tmp_path / "name").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["name", "other"]


@pytest.mark.parametrize("how", ["short", "refused"])
def test_writes_that_the_filesystem_takes_otherwise(tmp_path, monkeypatch, how):
    """A part of a block, as near a full drive; or none past the page cache."""
    PIECE, real = BLOCK // 5, os.pwrite

    def pwrite(fd, data, offset):
        if how == "refused" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data[:PIECE] if how == "short" and len(data) > PIECE else data, offset)

    def preadv(fd, buffers, offset, real=os.preadv):
        if how == "refused" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, [buffers[0][:PIECE]] if how == "short" else buffers, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "preadv", preadv)
    given = pieces(BLOCK + 17, 2 * PIECE)
    write_synced(tmp_path / "file", given)
    check(tmp_path / "file", given, 3 * PIECE // 4096 * 4096)


@pytest.mark.full
@pytest.mark.parametrize("how", ["written", "read"])
def test_blocks_are_under_way_together(tmp_path, monkeypatch, how):
    """None of the first DEPTH is over before all of them have begun."""
    met, begun = threading.Barrier(DEPTH, timeout=60), set()

    def wait_for_others(real):
        def moved(fd, data, offset):
            if offset < DEPTH * BLOCK and offset not in begun:
                begun.add(offset)
                met.wait()
            return real(fd, data, offset)

        return moved

    given, name = pieces((DEPTH + 2) * BLOCK + 4097, BLOCK // 3), "pwrite" if how == "written" else "preadv"
    monkeypatch.setattr(os, name, wait_for_others(getattr(os, name)))
    write_synced(tmp_path / "file", given)
    check(tmp_path / "file", given)


def test_an_error_while_the_next_block_is_made_is_told(tmp_path, monkeypatch):
    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="file"):
        write_synced(tmp_path / "file", pieces(BLOCK + 1, BLOCK))

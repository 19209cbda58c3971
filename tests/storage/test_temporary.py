"""Temporary folders: gone with their process, however it ends; what others have is left alone."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from engines import fork

from trireme.storage import temporary
from trireme.storage.temporary import Temporary


def left_by_a_killed_process(parent: Path) -> Path:
    """The folder of a process that was killed when it had written something there."""
    pid = fork()
    if not pid:
        try:
            made = Temporary("t-", parent)
            (made.path / "deep").mkdir()
            (made.path / "deep" / "file").write_text("x" * 1000)
            (made.path / "link").symlink_to(parent.parent)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (folder,) = parent.iterdir()
    return folder


def test_it_lives_as_long_as_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Temporary("t-") as path:
        assert path.parent == tmp_path
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "file").write_text("x")
        made = Temporary("t-")
        assert path.exists(), "it belongs to a process that lives"
        made.close()
        made.close()
        assert list(tmp_path.iterdir()) == [path]
    gone = Temporary("t-")
    del gone
    assert list(tmp_path.iterdir()) == []


def test_the_next_one_removes_what_a_killed_process_has_left(tmp_path):
    parent, mine = tmp_path / "parent", tmp_path / "mine"
    parent.mkdir()
    mine.write_text("mine")
    left = left_by_a_killed_process(parent)
    with Temporary("other-", parent):
        assert left.exists()
    with Temporary("t-", parent) as path:
        assert list(parent.iterdir()) == [path]
        assert mine.exists()


@pytest.mark.parametrize("what", ["no lock", "a file", "a link to a folder", "a link for a lock", "another user's"])
def test_what_is_no_ones_leftover_stays(tmp_path, monkeypatch, what):
    theirs = tmp_path / "parent" / "t-theirs"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / temporary.LOCK).write_text("")
    theirs.parent.mkdir()
    if what == "a file":
        theirs.write_text("")
    elif what == "a link to a folder":
        theirs.symlink_to(tmp_path / "elsewhere")
    else:
        theirs.mkdir()
    if what == "a link for a lock":
        (theirs / temporary.LOCK).symlink_to(tmp_path / "elsewhere" / temporary.LOCK)
    if what == "another user's":
        (theirs / temporary.LOCK).write_text("")
        monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    before = sorted(tmp_path.rglob("*"))
    Temporary("t-", theirs.parent).close()
    assert sorted(tmp_path.rglob("*")) == before

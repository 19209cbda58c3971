"""Tokens on disk: read back as written, never half, never damaged; what was not used for longest goes first."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.data import tokens
from trireme.engine.data.tokens import Writer, key_of, open_tokens, tidy, unpack_tokens

KEY = key_of("a")


def write(folder, rows, key=KEY):
    writer = Writer(folder, key)
    for ids in rows:
        writer.add(np.array(ids, np.int32), np.array(ids, np.int32) % 2 == 1, weight=2.0, value=len(ids))
    made = writer.finish({"rows": len(rows)})
    writer.close()
    return made


@given(rows=st.lists(st.lists(st.integers(0, (1 << 31) - 1), max_size=5), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("tokens")
    made = write(folder, rows)
    for file in (made, open_tokens(folder, KEY)):
        assert file.lengths.tolist() == [len(row) for row in rows]
        assert file.meta["rows"] == len(rows)
        assert file.weights.tolist() == [2.0] * len(rows)
        assert file.values.tolist() == [len(row) for row in rows]
        assert file.meta["max_id"] == max((i for row in rows for i in row), default=-1)
        for i, row in enumerate(rows):
            ids, trained = unpack_tokens(file.read(int(file.offsets[i]), int(file.offsets[i + 1])))
            assert ids.tolist() == row
            assert trained.tolist() == [i % 2 == 1 for i in row]
    assert sorted(path.name for path in folder.iterdir()) == [f"{KEY}.npz", f"{KEY}.tokens"]


@pytest.mark.full
@pytest.mark.parametrize("part", ["npz", "tokens"])
@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "empty", "longer"])
def test_damaged_files_are_made_again(tmp_path, part, how):
    write(tmp_path, [[1, 2, 3], [4, 5]])
    path = tmp_path / f"{KEY}.{part}"
    content = bytearray(path.read_bytes())
    places = range(len(content)) if how == "flipped" else [0]
    for at in places:
        changed = bytearray(content)
        if how == "flipped":
            changed[at] ^= 8
        path.write_bytes({"cut": changed[:-1], "empty": b"", "longer": changed + b"\0"}.get(how, changed))
        if how == "gone":
            path.unlink()
        found = open_tokens(tmp_path, KEY)
        if found is not None:  # names and times of a zip may change, what it holds may not
            assert part == "npz"
            assert unpack_tokens(found.read(0, 5))[0].tolist() == [1, 2, 3, 4, 5]
            assert found.offsets.tolist() == [0, 3, 5]
    assert write(tmp_path, [[1, 2, 3], [4, 5]]).n_documents == 2


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    made = write(tmp_path, [[1, 2, 3]])
    os.truncate(made.path, 4)
    with pytest.raises(OSError, match="cut"):
        made.read(0, 3)


def test_two_writers_of_one_key(tmp_path):
    first, second = Writer(tmp_path, KEY), Writer(tmp_path, KEY)
    for writer in (first, second):
        writer.add(np.array([1, 2], np.int32), np.ones(2, bool))
    made = [writer.finish({}) for writer in (first, second)]
    assert [file.read(0, 2).tolist() for file in made] == [made[0].read(0, 2).tolist()] * 2
    for writer in (first, second):
        writer.close()
    assert open_tokens(tmp_path, KEY)


def test_what_was_not_used_for_longest_is_removed(tmp_path, monkeypatch):
    keys = [key_of(i) for i in range(4)]
    for i, key in enumerate(keys):
        write(tmp_path, [[1] * 1000], key)
        for part in ("npz", "tokens"):
            os.utime(tmp_path / f"{key}.{part}", (i, i))
    (tmp_path / "not ours.npz").write_bytes(b"x")
    size = sum((tmp_path / f"{keys[0]}.{part}").stat().st_size for part in ("npz", "tokens"))
    usage = type("Usage", (), {"total": tokens.SHARE * (2 * size + 10)})
    monkeypatch.setattr(tokens.shutil, "disk_usage", lambda _: usage)
    file = open_tokens(tmp_path, keys[1])
    tidy(tmp_path, {keys[0]})  # of this run, however old
    assert {path.stem for path in tmp_path.iterdir()} == {keys[0], keys[1], keys[3], "not ours"}
    usage.total = 0
    tidy(tmp_path, {keys[0]})
    assert open_tokens(tmp_path, keys[0])
    assert open_tokens(tmp_path, keys[1]) is None
    assert file.read(0, 3).tolist() == [1 << 31 | 1] * 3  # a run that has it open

"""Runs that are killed anywhere, and run folders of which a file is lost or spoiled: equal in the end, or refused with
a way on; never other weights, never a user's file less.
"""

import re
import shutil

import pytest
from kills import KINDS, copied, make_bench, merge_trial, run, trial

# What a stopped run reads: its kind, a pattern below the folder of its output, its store, and the user's cache.
FILES = {
    "state.json": ("host 32", "out/.run/state.json"),
    "store.id": ("host 32", "store/store.id"),
    "manifest": ("host 32", "store/snapshot-*/manifest.json"),
    "weights": ("ssd 32", "store/snapshot-*/weights-*.safetensors"),
    "state": ("ssd 32", "store/snapshot-*/*-?????-????.safetensors"),
    "tokenizer of a snapshot": ("host 32", "store/snapshot-*/tokenizer.json"),
    "tokens": ("host 8", "*/tokens/*.tokens"),
    "best": ("host 32", "out/.run/best-*/model.safetensors"),
    "best.json": ("host 32", "out/.run/best-*/best.json"),
    "adapter of the best": ("adapters", "out/.run/best-*/adapter_model.safetensors"),
    "reference": ("compared", "out/.run/reference.json"),
    "scores": ("taught", "out/.run/teacher/000/part-*.safetensors"),
    "base in nf4": ("packed", "store/bases/*"),
    "log.jsonl": ("host 8", "out/log.jsonl"),
    "config.yaml": ("host 8", "out/config.yaml"),
    "checkpoint": ("adapters", "../model/model.safetensors"),
    "tokenizer": ("host 32", "../model/tokenizer.json"),
    "data": ("host 32", "../text.txt"),
}
WAYS = ("gone", "cut", "flipped", "touched", "neighbour")  # a file meets one, and one of the commands
COMMANDS = ("--resume", "the same command")
ROWS = [(name, WAYS[i % 5], COMMANDS[i % 2]) for i, name in enumerate(FILES)]
pytestmark = pytest.mark.full
NEIGHBOUR = "mine: not of the run"
WAY = r"[Rr]estore|[Rr]emove|--\w+|copy|older|start again|mounted|is not there|Download|expected|Correct"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return make_bench(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_anywhere_ends_as_the_undisturbed_one(bench, seed):
    made = trial(bench, seed)
    assert not made.wrong, made


@pytest.mark.parametrize("seed", range(2))
def test_a_merge_killed_anywhere_can_be_given_again(bench, seed):
    made = merge_trial(bench, seed)
    assert not made.wrong, made


@pytest.mark.parametrize(("name", "how", "first"), ROWS)
def test_a_spoiled_file_is_made_again_or_refused_with_the_way_on(bench, name, how, first):
    """Whatever is spoiled, the same command names --resume or another way, and touches nothing."""
    kind, pattern = FILES[name]
    folder = copied(bench, kind, f"{name} {how} {first}")
    path = sorted(path for path in folder.glob(pattern) if path.is_file())[0]
    shared, aside = ".." in pattern, folder / "aside"
    shutil.copy2(path, aside)
    try:
        spoil(path, how)
        ended = continued(bench, kind, folder, first)
    finally:
        if shared:  # by all runs of the bench
            path.with_name("notes.bak").unlink(missing_ok=True)
            shutil.copy2(aside, path)
    aside.unlink()
    last = ended.said.strip().splitlines()[-1] if ended.said.strip() else ""
    assert "Traceback" not in ended.said, ended.said
    if how == "neighbour" and not shared:
        notes = [p for p in folder.rglob("notes.bak") if p.read_text() == NEIGHBOUR]
        assert notes, "a user's file is gone"
        for note in notes:
            note.unlink()
        for left in folder.rglob("*.left*"):
            shutil.rmtree(left)
    if ended.code == 0:
        wrong = bench.differs(kind, folder / "out")
        said = (wrong == "another log" and "warning: " in ended.said) or (
            name == "config.yaml" and "changed  --" in ended.said
        )
        assert not wrong or said, (wrong, ended.said)
    else:
        assert ended.code in (2, 4), ended.said
        assert last.startswith("error: ")
        assert re.search(WAY, last), last
        if way := re.search("--export last", last):
            assert continued(bench, kind, folder, "--resume", *way[0].split()).code == 0


def continued(bench, kind: str, folder, first: str, *words: str):
    """The end of the run by --resume, or by the same command and the one that its answer names."""
    out, place, more = folder / "out", KINDS[kind], dict(cache=folder / "cache")
    if first == "the same command":
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        ended = run(bench.command(kind, out, folder / "store"), folder, place, **more)
        if ended.code == 0 or "Continue it: --resume" not in ended.said:
            return ended
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return run(["--resume", str(out), "--store", str(folder / "store"), *words], folder, place, **more)


def spoil(path, how: str) -> None:
    if how == "gone":
        path.unlink()
    elif how == "touched":
        path.touch()
    elif how == "neighbour":
        (path.parent / "notes.bak").write_text(NEIGHBOUR)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.unlink()  # a hard link stays as it is
        path.write_bytes(content if how == "flipped" else content[: len(content) // 2])

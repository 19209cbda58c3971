"""Runs that are killed anywhere, and run folders of which a file is lost or spoiled: equal in the end, or refused with
a way on; never other weights, never a user's file less.
"""

import re
import shutil

import pytest
from kills import EVERYWHERE, copied, make_bench, merge_trial, run, trial

FILES = {  # what a stopped run reads: its place, a pattern below its folder
    "state.json": ("host 32", ".run/state.json"),
    "store.id": ("host 32", ".run/store/store.id"),
    "manifest": ("host 32", ".run/store/snapshot-*/manifest.json"),
    "weights": ("ssd 32", ".run/store/snapshot-*/weights-*.safetensors"),
    "state": ("ssd 32", ".run/store/snapshot-*/*-?????-????.safetensors"),
    "tokens": ("host 8", ".run/tokens/*"),
    "best": ("host 32", ".run/best-*/model.safetensors"),
    "best.json": ("host 32", ".run/best-*/best.json"),
    "tokenizer of the best": ("host 32", ".run/best-*/tokenizer.json"),
    "adapter of the best": ("adapters", ".run/best-*/adapter_model.safetensors"),
    "reference": ("compared", ".run/reference.npz"),
    "log.jsonl": ("host 8", "log.jsonl"),
    "config.yaml": ("host 8", "config.yaml"),
}
OTHERS = ("touched", "cut", "neighbour")  # ways to spoil a file, beside those for each of them
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return make_bench(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("seed", range(24))
def test_a_run_killed_anywhere_ends_as_the_undisturbed_one(bench, seed):
    made = trial(bench, seed)
    assert not made.wrong, made


@pytest.mark.parametrize("seed", range(4))
def test_a_merge_killed_anywhere_can_be_given_again(bench, seed):
    made = merge_trial(bench, seed)
    assert not made.wrong, made


@pytest.mark.parametrize(
    ("name", "how"), [(name, how) for i, name in enumerate(FILES) for how in ("gone", "flipped", OTHERS[i % 3])]
)
def test_a_spoiled_file_is_made_again_or_refused_with_the_way_on(bench, name, how):
    place, pattern = FILES[name]
    out = copied(bench, place, f"{name} {how}")
    paths = sorted(out.glob(pattern))
    assert paths, sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    path = paths[0]
    spoil(path, how)
    neighbour = "mine: not of the run"
    ended = run(["--resume", str(out)], out.parent, EVERYWHERE[place])
    last = ended.said.strip().splitlines()[-1] if ended.said.strip() else ""
    assert "Traceback" not in ended.said, ended.said
    if how == "neighbour":
        assert any(p.read_text(errors="replace") == neighbour for p in out.rglob("notes.txt")), "a user's file is gone"
        left = {str(p.relative_to(out)): p for p in out.rglob("*") if p.name == "notes.txt"}
        for p in left.values():
            p.unlink()
        for folder in {p.parent for p in left.values()} - {out}:
            shutil.rmtree(folder) if re.search(r"\.left(-\d+)?$", str(folder)) or ".left" in str(folder) else None
        for folder in out.glob("*.left*"):
            shutil.rmtree(folder)
    if ended.code == 0:
        wrong = bench.differs(place, out)
        told = "warning: " in ended.said or "changed  --" in ended.said
        assert not wrong or told, (wrong, ended.said)
    else:
        assert ended.code in (2, 4), ended.said
        assert last.startswith("error: ")
        assert re.search(r"[Rr]estore|[Rr]emove|--\w+|copy|older|start again|mounted", last), last


def spoil(path, how: str) -> None:
    if path.is_dir():
        path = next(p for p in sorted(path.rglob("*")) if p.is_file())
    if how == "gone":
        path.unlink()
    elif how == "touched":
        path.touch()
    elif how == "neighbour":
        (path.parent / "notes.txt").write_text("mine: not of the run")
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.unlink()  # a hard link stays as it is
        path.write_bytes(content if how == "flipped" else content[: len(content) // 2])

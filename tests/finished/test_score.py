"""`trireme score`: log-probabilities of transformers, for each document and each label, killed and gone on."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import make_small
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.engine.run.finished import evaluate, options, score
from trireme.engine.run.output.folder import locked
from trireme.models.config import InputError
from trireme.storage.headers import CheckpointError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = make_small(tmp_path_factory.mktemp("score"))
    rows = [dict(prompt="Once", completion=f" there was a {'big ' * i}cat.") for i in range(9)]
    (where / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def command(folder, out, *more):
    data = ["--data", str(folder / "rows.jsonl"), "--data", str(folder / "stories.txt")]
    return [str(folder / "checkpoint"), *data, "--seq-len", "48", "--out", str(out), *more]


def parts(out, source="000"):
    found = [load_file(path) for path in sorted((out / source).glob("part-*.safetensors"))]
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


@pytest.mark.full
def test_scores_are_those_of_transformers(folder, tmp_path, capsys):
    assert score.score(options.score_options(command(folder, tmp_path / "out", "--top-k", "7"))) == 0
    lines = capsys.readouterr().out.splitlines()
    found = parts(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert sorted(found["document"]) == list(range(9))
    ends, total = np.cumsum(found["trained"]), 0.0
    for i, number in enumerate(found["document"]):
        ids = tokenizer(rows[number]["prompt"] + rows[number]["completion"], add_special_tokens=False)["input_ids"]
        length, trained = int(found["length"][i]), int(found["trained"][i])
        whole = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id][-length:]
        with torch.no_grad():
            logps = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
        mine = slice(ends[i] - trained, ends[i])
        labels, before = np.array(whole[-trained:]), logps[length - trained - 1 : length - 1]
        assert found["label"][mine].tolist() == labels.tolist()
        logp = float(before[np.arange(trained), labels].sum())
        assert found["logp"][i] == pytest.approx(logp, rel=1e-5)
        total -= logp
        top, ids = before.topk(7)
        np.testing.assert_array_equal(found["ids"][mine], ids)
        np.testing.assert_allclose(found["logps"][mine], top, rtol=1e-3)
        rest = before.exp().scatter(1, ids, 0.0).sum(1).log()
        np.testing.assert_allclose(found["rest"][mine], rest, rtol=1e-4)
    assert f"loss {total / found['trained'].sum():.4f}" in lines[0]
    evaluate.evaluate(options.eval_options(command(folder, tmp_path, "--top-k", "7")[:-4]))
    for mine, theirs in zip(lines, capsys.readouterr().out.splitlines(), strict=False):
        assert mine.replace("score ", "eval  ") == re.sub(r" accuracy [\d.]+,", "", theirs)
    assert (found["start"] == 0).all()
    text = parts(tmp_path / "out", "001")
    assert (text["start"] > 0).any()


@pytest.mark.full
def test_a_killed_command_goes_on_behind_its_parts(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(score.score_source, "__defaults__", (1,))  # bytes of a part
    score.score(options.score_options(command(folder, tmp_path / "whole", "--top-k", "3")))
    line, passes, real = capsys.readouterr().out, [], evaluate.forward

    def dies(*given):
        passes.append(given)
        if len(passes) == 3:
            raise KeyboardInterrupt
        real(*given)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(evaluate, "forward", dies)
        score.score(options.score_options(command(folder, tmp_path / "killed", "--top-k", "3")))
    there = sorted((tmp_path / "killed").glob("*/part-*"))
    assert len(there) == 2
    times = [path.stat().st_mtime_ns for path in there]
    score.score(options.score_options(command(folder, tmp_path / "killed", "--top-k", "3")))
    assert [path.stat().st_mtime_ns for path in there] == times
    assert capsys.readouterr().out.splitlines()[:-1] == line.splitlines()[:-1]
    for path in (tmp_path / "whole").glob("*/part-*"):
        other = tmp_path / "killed" / path.relative_to(tmp_path / "whole")
        ours, theirs = load_file(other), load_file(path)
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())
    with safe_open(path, "numpy") as file:
        assert file.metadata()["format"] == score.FORMAT


def test_what_cannot_be_written_is_refused_before_the_model_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "load_for_data", None)
    given = options.score_options(command(folder, tmp_path / "out"))
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out", ""), pytest.raises(InputError, match="another process writes scores there"):
        score.score(given)
    assert not any((tmp_path / "out").iterdir())
    given.out = str(tmp_path / "file")
    Path(given.out).touch()
    with pytest.raises(InputError, match=r"file cannot be written to \(File exists\)\. Name another folder"):
        score.score(given)


def test_a_model_that_cannot_be_loaded_leaves_no_folder(folder, tmp_path, monkeypatch):
    def fails(*_):
        raise CheckpointError("damaged")

    monkeypatch.setattr(evaluate, "load_for_data", fails)
    with pytest.raises(CheckpointError):
        score.score(options.score_options(command(folder, tmp_path / "a" / "out")))
    assert not (tmp_path / "a").exists()


def test_a_folder_of_something_else_is_refused(folder, tmp_path):
    given, other = (options.score_options(command(folder, tmp_path / "out", *k)) for k in ((), ("--top-k", "2")))
    source = SimpleNamespace(codec=SimpleNamespace(vocabulary=lambda: "words"), files=())
    opened = SimpleNamespace(cfg=SimpleNamespace(vocab=512))
    names = lambda of, given: score._names(tmp_path / of, given, opened, [source, source])
    for name in ("out", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / ".scores.json.partial").touch()  # of a process that was killed
    kept = json.dumps(names("out", given))
    (tmp_path / "out" / "scores.json").write_text(kept)
    assert names("out", given) == json.loads(kept)
    with pytest.raises(InputError, match="holds scores of another model"):
        names("out", other)
    (tmp_path / "out" / "scores.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="holds scores of another model"):
        names("out", given)
    (tmp_path / "other" / "a").write_text("")
    with pytest.raises(InputError, match="is not empty"):
        names("other", given)
    with pytest.raises(InputError, match="--out is missing"):
        options.score_options([str(folder / "checkpoint"), "--data", "a"])


def test_parts_of_others_are_refused(tmp_path):
    path = tmp_path / "part-00000.safetensors"
    for tensor, key, words in (
        (torch.zeros(2), "key", "is of an older version, without a checksum"),
        (torch.zeros(2).bfloat16(), "other", "is of another model"),
        (torch.zeros(2).bfloat16(), "key", "cannot be read|is of an older version"),  # without and with ml_dtypes
    ):
        save_file({"logp": tensor}, path, {"key": key, "batches": "1"})
        with pytest.raises(InputError, match=words):
            score._written_parts(tmp_path, "key", 9)


def test_parts_that_are_not_as_they_were_written_are_refused(tmp_path):
    """A flipped bit anywhere, a part twice or under another's name: their losses would be another's."""
    part, paths = score.Part(0), [tmp_path / f"part-{i:05}.safetensors" for i in (0, 1, 2)]
    for path in paths[:2]:
        part.add(dict(length=np.array([4, 3]), trained=np.array([3, 2]), logp=np.array([-1.5, -2.0]),
                      label=np.arange(5), ids=np.zeros((5, 2), np.int32)))  # fmt: skip
        part.write(path, "key")
    whole = [path.read_bytes() for path in paths[:2]]
    assert score._written_parts(tmp_path, "key", 9)[:2] == (2, 2)
    for at in [*range(len(whole[0]) - 40, len(whole[0])), *range(8, len(whole[0]), 23)]:
        paths[0].write_bytes(whole[0][:at] + bytes([whole[0][at] ^ 1]) + whole[0][at + 1 :])
        with pytest.raises(
            InputError, match="00000.safetensors (is damaged|cannot be read|is of another model|is of an older)"
        ):
            score._written_parts(tmp_path, "key", 9)
    for found in ((whole[0], whole[0]), (whole[1],), (*whole, whole[1])):
        for path in paths:
            path.unlink(missing_ok=True)
        for path, content in zip(paths, found, strict=False):
            path.write_bytes(content)
        with pytest.raises(InputError, match="is damaged, or has another's name. Remove it and those behind it"):
            score._written_parts(tmp_path, "key", 9)


@pytest.mark.full
def test_parts_of_another_model_are_refused(folder, tmp_path):
    score.score(options.score_options(command(folder, tmp_path / "out")))
    path = folder / "checkpoint" / "model.safetensors"
    path.touch()
    with pytest.raises(InputError, match="is of another model"):
        score.score(options.score_options(command(folder, tmp_path / "out")))

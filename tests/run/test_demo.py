"""What --demo makes is a checkpoint like any other, and the same every time."""

import os
import random
import re
import tempfile
from pathlib import Path

import pytest
import torch
from engines import fork
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.engine.run import demo
from trireme.engine.run.main import main
from trireme.engine.run.options import Options, every
from trireme.engine.run.screen import Screen
from trireme.models.config import read_config
from trireme.models.hf import canonical_names
from trireme.storage.checkpoint import open_source


def test_transformers_opens_it(tmp_path):
    demo.make_text(tmp_path / "text", 200, seed=1)
    demo.make_checkpoint(tmp_path / "model", tmp_path / "text", seed=1)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("Once there was a poor rower. \u00e9\U0001f41f", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "Once there was a poor rower. \u00e9\U0001f41f"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    loss = model(ids, labels=ids).loss.item()
    assert abs(loss - torch.tensor(float(demo.VOCAB)).log().item()) < 0.3, "random weights guess evenly"


def test_our_reader_opens_it(tmp_path):
    demo.make_text(tmp_path / "text", 50, seed=1)
    demo.make_checkpoint(tmp_path / "model", tmp_path / "text", seed=1)
    cfg, source = read_config(tmp_path / "model"), open_source(tmp_path / "model")
    assert cfg.tied
    assert cfg.n_layers == demo.LAYERS
    assert canonical_names(cfg, source.shapes)


def test_it_is_the_same_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = []
    for _ in range(2):
        with demo.prepared(Options(demo=True, lr=0.5, eval_every=every("5")), Screen()) as options:
            folder = Path(options.out).parent
            assert options.lr == 0.5
            assert options.eval_every == every("5")
            assert folder.parent == tmp_path
            made.append({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"})
    assert made[0] == made[1]
    assert "model.safetensors" in made[0]
    assert "stories.txt" in made[0]


@pytest.mark.parametrize("own_out", [False, True])
@pytest.mark.parametrize("left", ["nothing", "a run", "killed"])
def test_what_it_makes_stays_as_long_as_a_run_needs_it(tmp_path, monkeypatch, own_out, left):
    """Killed, it is removed by the next demo, unless there may be a run elsewhere that needs it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "STORIES", 20)
    given = Options(demo=True, out=str(tmp_path / "out") if own_out else None)
    if left == "killed":
        if not (pid := fork()):
            try:
                with demo.prepared(given, Screen()):
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
    else:
        with pytest.raises(ZeroDivisionError), demo.prepared(given, Screen()) as options:
            if left == "a run":
                Path(options.out).mkdir()
                (Path(options.out) / "config.yaml").write_text("")
            1 / 0  # noqa: B018
    before = set(tmp_path.glob("trireme-demo-*"))
    assert len(before) == (left != "nothing")
    with demo.prepared(Options(demo=True), Screen()):
        assert before <= set(tmp_path.iterdir()) or (left == "killed" and not own_out)
        assert len(list(tmp_path.glob("trireme-demo-*"))) == 1 + (left == "a run" or (left == "killed" and own_out))


def test_a_story_is_english_enough():
    told = {demo.story(random.Random(seed)) for seed in range(300)}
    assert len(told) == 300
    for story in told:
        assert " a a" not in story
        assert " a o" not in story
        assert "  " not in story
        assert story.startswith("Once there was a ")
        assert story.endswith(".")


@pytest.mark.parametrize(
    ("step_s", "batch", "steps"),
    [(0.01, 16, demo.STEPS), (0.4, 16, 87), (0.9, 8, 77), (3.0, 2, 93), (9.6, 1, 58), (200.0, 1, demo.FEWEST)],
)
def test_its_length_is_a_minutes(step_s, batch, steps):
    assert demo.length(step_s, 16) == (batch, steps)
    assert batch / 16 * step_s * steps <= 1.05 * demo.TRAINING_S or steps == demo.FEWEST


@pytest.mark.full
def test_it_measures_its_first_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "STORIES", 50)
    monkeypatch.setattr(demo, "TRAINING_S", 1e-9)
    with demo.prepared(Options(demo=True, seq_len=32), Screen()) as options:
        found = demo.sized(options, Screen())
        assert (found.batch_size, found.max_steps) == (1, demo.FEWEST)
        assert demo.sized(found, Screen()) == found, "a length that is given stays"
        assert not Path(options.model).with_name("measured").exists()
    assert re.search(r"demo     a step takes .* so 12 steps of 1 sequence are made", capsys.readouterr().out)


def test_it_learns(tmp_path, capsys, monkeypatch):
    """The command from end to end, of few steps: the loss falls, and the folder opens."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    short = ["--seq-len", "128", "--batch-size", "8", "--max-steps", "25", "--lr", "8e-3", "--device", "cpu"]
    assert main(["--demo", *short, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"eval_loss (\d+\.\d+)", said)]
    assert losses[0] > 6
    assert losses[-1] < 4.6
    assert "check    reopened: 38 tensors" in said
    before, after = re.search(r"\nbefore   '(.*)'\nafter    '(.*)'\nnext ", said).groups()
    assert before != after
    assert re.search(
        r"\nnext .* sample \S+out --prompt .*\n .* eval \S+out --data .*\n .* CHECKPOINT --data FILE", said
    )
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert model.config.tie_word_embeddings

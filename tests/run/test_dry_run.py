"""Plans without weights, without data, without a model: what a dry run says of what is not here."""

import re
from pathlib import Path

import pytest
from command import TRAIN, fails

from trireme.engine.data import prepare
from trireme.engine.data.cache import Shelf
from trireme.engine.run import main as finetune

BOX = ["--dry-run", "--assume", "gpu=24GiB,ram=64GiB"]


def said(capsys, *argv: str) -> str:
    assert finetune.main([*argv]) == 0
    return capsys.readouterr().out


@pytest.fixture
def config_alone(here) -> Path:
    (here / "model" / "model.safetensors").unlink()
    return here / "model"


def step_line(report: str) -> str:
    return re.search(r"^time     .*? tokens", report, re.MULTILINE)[0]


def test_config_alone_and_the_whole_checkpoint_get_the_same_plan(here, capsys):
    argv = ["model", "--data", "stories.txt", *BOX]
    plan = lambda report: re.findall(r"^ {11}.*|^time .*|^steps .*", report, re.MULTILINE)
    whole = said(capsys, *argv)
    (here / "model" / "model.safetensors").unlink()
    alone = said(capsys, *argv)
    assert plan(whole) == plan(alone)
    assert "1 shard" in whole
    assert "by config.json alone" in alone


def test_neither_data_nor_tokenizer_is_needed(here, config_alone, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (config_alone / name).unlink(missing_ok=True)
    report = said(capsys, "model", *BOX, "--seq-len", "64", "--batch-size", "8")
    assert "data     not read, as no --data is given: a step is 8 x 64 = 512 tokens" in report
    assert "1,000 steps for an example: --max-steps" in report
    assert "steps    1,000 of 8 sequences of up to 64 tokens" in report
    report = said(capsys, "model", *BOX, "--seq-len", "64", "--max-steps", "70")
    assert "steps    70 of 16 sequences" in report
    assert "for an example" not in report


def test_this_machine_too(config_alone, capsys):
    assert "\nDry run: nothing written." in said(capsys, "model", "--dry-run")


def test_a_shape_needs_nothing_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report = said(capsys, "--shape", "Llama-0.4b", *BOX, "--seq-len", "1024", "--batch-size", "2")
    assert "of the shape Llama-0.4b" in report
    assert re.search(r"a step \(2 sequences, 2.05k tokens", report)
    assert not list(tmp_path.iterdir())


def test_without_weights_nothing_is_trained(here, config_alone, capsys):
    err = fails(capsys, here, "model", "--data", "stories.txt", "--out", "out")
    assert "from config.json alone a --dry-run plans" in err


def test_pickled_weights_are_refused_before_the_run_is(here, config_alone, capsys):
    (config_alone / "pytorch_model.bin").write_bytes(b"x")
    assert "never read" in fails(capsys, here, "model", "--data", "stories.txt", "--dry-run")


REFUSED = {
    "a shape that is not known": (["--shape", "llama-71b", "--dry-run"], "llama-70b, llama-405b, gpt3-13b, gpt3-175b"),
    "a shape to train": (["--shape", "llama-7b", "--data", "stories.txt"], "add --dry-run"),
    "a shape and a checkpoint": (["model", "--shape", "llama-7b", "--dry-run"], "leave model out"),
    "no data": (["model"], "no data given"),
    "held-out data of none": (["model", "--dry-run", "--val", "0.1"], "leave --val out"),
    "epochs of none": (["model", "--dry-run", "--epochs", "2"], "leave --epochs out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(here, capsys, name):
    argv, says = REFUSED[name]
    assert says in fails(capsys, here, *argv)


def test_on_a_cpu_there_is_one_memory(here, capsys):
    report = said(capsys, "model", "--data", "stories.txt", "--dry-run")
    assert re.search(r"^plan +RAM +SSD$", report, re.MULTILINE)
    assert re.search(r"homes of \d+ units: \d+ RAM;", report)
    assert "bus" not in re.search("^machine .*", report, re.MULTILINE)[0]


def test_a_folder_in_which_the_run_would_be_refused_is_named(here, capsys):
    (here / "out").mkdir()
    (here / "out" / "notes").write_text("mine")
    assert finetune.main(["model", "--data", "stories.txt", "--out", "out", "--dry-run"]) == 0
    assert "warning: the run itself would be refused: --out out is not empty (1 entry)" in capsys.readouterr().out


def test_a_dry_run_leaves_its_tokens_to_the_run(here, capsys, monkeypatch, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("cache"), []
    build = prepare._build
    monkeypatch.setattr(prepare, "_build", lambda *args: made.append(args[0]) or build(*args))
    for name in ("job", "report"):
        monkeypatch.setattr(f"trireme.engine.run.{name}.shelf", lambda: Shelf.under(folder))
    assert f"Dry run: nothing written but tokens, kept for later runs in {folder}." in said(capsys, *TRAIN, "--dry-run")
    assert not Path("out").exists()
    assert ", tokens" not in re.search("^disk .*", said(capsys, *TRAIN), re.MULTILINE)[0]
    assert len(made) == 1

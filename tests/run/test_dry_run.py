"""Dry runs: of models and data that are not here, and as each message tells to fix what is wrong."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import TRAIN, fails

from trireme.engine.data import prepare
from trireme.engine.planner.rates import RAM_SHARE
from trireme.engine.run import main as finetune
from trireme.engine.run.begin.limits import check_compiler, check_heads, device_and_limits
from trireme.engine.run.command import parse
from trireme.models.config import InputError

BOX = ["--dry-run", "--assume", "gpu=24GiB,ram=64GiB"]


def said(capsys, *argv: str) -> str:
    assert finetune.main([*argv]) == 0
    return capsys.readouterr().out


@pytest.fixture
def config_alone(here) -> Path:
    (here / "model" / "model.safetensors").unlink()
    return here / "model"


@pytest.mark.full
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
    assert "data     none given; a step is 8 x 64 = 512 tokens" in report
    assert "1,000 steps are assumed (--max-steps)" in report
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


@pytest.mark.full
def test_adapters_on_a_packed_shape_are_planned(tmp_path, monkeypatch, capsys):
    """The rows of the memory table know all buffers."""
    monkeypatch.chdir(tmp_path)
    report = said(capsys, "--shape", "gpt-oss-20b", *BOX, "--lora", "4", "--seq-len", "512", "--batch-size", "2")
    assert "BF16 and MXFP4" in report
    assert re.search("frozen matrices stay in MXFP4, 9.4[0-9] GiB, until the GPU", report)


@pytest.mark.full
def test_a_release_in_fp8_is_planned_by_its_config_alone(config_alone, capsys):
    """Half the bytes of matrices; all of them in bf16 again where they are trained."""
    path = config_alone / "config.json"
    plain = json.loads(path.read_text())
    quantized = dict(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["lm_head"])
    args = ["model", *BOX, "--seq-len", "64", "--batch-size", "2"]
    wide = said(capsys, *args, "--lora", "4")
    path.write_text(json.dumps(plain | {"quantization_config": quantized}))
    report = said(capsys, *args, "--lora", "4")
    assert "BF16 and fp8" in report
    assert "frozen matrices stay in fp8" in report
    assert "by config.json alone, 1.63 MiB" in wide
    assert "by config.json alone, 898.45 KiB" in report
    everything = said(capsys, *args)
    assert "fp8 is decoded while it is read; the output is in bf16" in everything
    assert "stay in fp8" not in everything


@pytest.mark.parametrize(
    ("gpu", "asked", "gpus"),
    [("2xrtx4090", [], 2), ("rtx4090", ["2"], 2), ("3x24GiB", ["2"], 2), ("3x24GiB", ["all"], 3)],
)
def test_assumed_gpus_are_counted(gpu, asked, gpus):
    more = ["--gpus", *asked] if asked else []
    _, limits, made = device_and_limits(parse(["model", "--dry-run", "--assume", f"gpu={gpu},ram=64GiB", *more]))
    assert made.gpus == limits.gpus == gpus
    assert made.describe().startswith(f"{gpus} x ")
    assert (made.gpu, limits.host) == (24 << 30, int(RAM_SHARE * (64 << 30)))


def test_a_gpu_without_a_c_compiler_is_one_line(monkeypatch):
    launcher = SimpleNamespace(why_none=lambda: "Failed to find C compiler.")
    monkeypatch.setitem(sys.modules, "trireme.kernels.launcher", launcher)  # which imports Triton
    with pytest.raises(
        InputError, match=r"C compiler .*\(Failed to find C compiler\)\. Install them: gcc and python3-dev"
    ):
        check_compiler()
    launcher.why_none = lambda: ""
    check_compiler()


def test_heads_that_no_kernel_computes_are_refused(here, config_alone, capsys):
    content = json.loads((config_alone / "config.json").read_text())
    (config_alone / "config.json").write_text(json.dumps(content | {"head_dim": 512}))
    assert "the model has heads of 512, and a GPU computes heads of 256 at most" in fails(capsys, here, "model", *BOX)
    for width, device in ((512, "cpu"), (256, "cuda")):
        check_heads(SimpleNamespace(head_dim=width), torch.device(device))


def test_without_weights_nothing_is_trained(here, config_alone, capsys):
    err = fails(capsys, here, "model", "--data", "stories.txt", "--out", "out")
    assert "from config.json alone a --dry-run plans" in err


def test_pickled_weights_are_refused_before_the_run_is(here, config_alone, capsys):
    (config_alone / "pytorch_model.bin").write_bytes(b"x")
    assert "never read" in fails(capsys, here, "model", "--data", "stories.txt", "--dry-run")


REFUSED = {
    "a shape that is not known": (
        ["--shape", "llama-71b", "--dry-run"],
        "33b,70b,405b} llama-3.2-{1b,3b} llama-3.3-70b",
    ),
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


@pytest.mark.full
def test_a_plan_of_adapters_counts_the_layers_that_are_frozen(here, capsys):
    """Which are on the SSD, where what is trained is on the GPU."""
    box = ("--dry-run", "--assume", "gpu=rtx3090,ram=32GiB,ssd=2TB", "--lora", "4", "--max-steps", "1")
    report = said(capsys, "--shape", "llama-70b", *box, "--seq-len", "512", "--batch-size", "1")
    assert re.search(r"80 blocks, embedding and head: (\d+ GPU, )?(\d+ RAM, )?\d\d SSD;", report)


def test_on_a_cpu_there_is_one_memory(here, capsys):
    report = said(capsys, "model", "--data", "stories.txt", "--dry-run")
    assert re.search(r"^plan +RAM +SSD$", report, re.MULTILINE)
    assert re.search(r"\d+ blocks, embedding and head: \d+ RAM;", report)
    assert "bus" not in re.search("^machine .*", report, re.MULTILINE)[0]


def test_a_folder_in_which_the_run_would_be_refused_is_named(here, capsys):
    (here / "out").mkdir()
    (here / "out" / "notes").write_text("mine")
    assert finetune.main(["model", "--data", "stories.txt", "--out", "out", "--dry-run"]) == 0
    assert "warning: the run itself would be refused: --out out is not empty (1 entry)" in capsys.readouterr().out


@pytest.mark.full
def test_a_dry_run_leaves_its_tokens_to_the_run(here, capsys, monkeypatch, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("cache"), []
    write = prepare._File.write
    monkeypatch.setattr(prepare._File, "write", lambda *args: made.append(args[0]) or write(*args))
    for name in ("job", "report"):
        monkeypatch.setattr(f"trireme.engine.run.{name}.shared_tokens", lambda: folder)
    assert f"Dry run: nothing written but tokens, kept for later runs in {folder}." in said(capsys, *TRAIN, "--dry-run")
    assert not Path("out").exists()
    assert ", tokens" not in re.search("^disk .*", said(capsys, *TRAIN), re.MULTILINE)[0]
    assert len(made) == 1


# ---------------------------------------------------------------- ways out that lead out

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
GOOD = {"prompt": "a b c", "completion": "d e f"}
FILES = {
    "talk.jsonl": [{"messages": TALK}],
    "qa.jsonl": [{"question": "a", "answer": "b"}],
    "dolly.jsonl": [{"instruction": "a", "context": "b", "response": "c"}],
    "chosen.jsonl": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "label.jsonl": [GOOD | {"label": True}],
    "bad.jsonl": [GOOD, {"prompt": 1, "completion": "x"}],
    "rows.jsonl": [GOOD] * 4,
    "long.jsonl": [{"prompt": "a b c", "completion": "d e f " * 60}],
    "lists.jsonl": TALK,
    "wrapped.jsonl": [{"messages": TALK}],
    "folder/train.jsonl": [GOOD],
}
ASSUMED = ["--assume", "gpu=24GiB,ram=64GiB"]

# what is wrong: (its options; what the message tells; the options that do so)
HINTS = {
    "a typing error": (["--learnign-rate", "1e-3"], "--learning-rate (= --lr)", ["--learning-rate", "1e-3"]),
    "a shape": (["--shape", "llama-0.4"], "Did you mean llama-0.4b?", ["--shape", "llama-0.4b", *ASSUMED]),
    "a shape beside a model": (["model", "--shape", "llama-0.4b"], "leave model out",
                               ["--shape", "llama-0.4b", *ASSUMED]),
    "a GPU": (["model", "--assume", "gpu=4091,ram=8GiB"], "Perhaps RTX 4090",
              ["model", "--assume", "gpu=RTX 4090,ram=64GiB"]),
    "a GPU that is none": (["model", "--assume", "gpu=x,ram=8GiB"], "write a size like 24GiB",
                           ["model", "--assume", "gpu=24GiB,ram=64GiB"]),
    "a machine": (["model", "--assume", "rtx4090"], "gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5",
                  ["model", "--assume", "gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5"]),
    "more positions than there are": (["--seq-len", "4096"], "the model has 512 positions. Lower it",
                                      ["--seq-len", "512"]),
    "no template": (["--data", "talk.jsonl"], "--chat-template plain",
                    ["--data", "talk.jsonl", "--chat-template", "chatml"]),
    "no tokenizer": (["bare", "--data", "rows.jsonl"], "Give --tokenizer FOLDER",
                     ["bare", "--data", "rows.jsonl", "--tokenizer", "model"]),
    "other columns": (["--data", "qa.jsonl"], "Perhaps --map prompt=question,completion=answer",
                      ["--data", "qa.jsonl", "--map", "prompt=question,completion=answer"]),
    "columns the wrong way round": (
        ["--data", "qa.jsonl", "--map", "question=prompt,answer=completion"], "--map prompt=question,completion=answer",
        ["--data", "qa.jsonl", "--map", "prompt=question,completion=answer"]),
    "three other columns": (["--data", "dolly.jsonl"], "Perhaps --map input=context,output=response",
                            ["--data", "dolly.jsonl", "--map", "input=context,output=response"]),
    "preferences": (["--data", "chosen.jsonl"], "--map completion=chosen,unused=rejected",
                    ["--data", "chosen.jsonl", "--map", "completion=chosen,unused=rejected"]),
    "labels": (["--data", "label.jsonl"], "--map unused=label", ["--data", "label.jsonl", "--map", "unused=label"]),
    "a bad row": (["--data", "bad.jsonl"], "--skip-bad drops and counts them", ["--data", "bad.jsonl", "--skip-bad"]),
    "bare messages": (["--data", "lists.jsonl"], 'A conversation is a row: {"messages": [{"role"',
                      ["--data", "wrapped.jsonl", "--chat-template", "chatml"]),
    "a folder": (["--data", "folder"], "", ["--data", "folder"]),
    "no weight": (["--data", "rows.jsonl:0"], "Leave the file out", []),
    "hardly a weight": (["--data", "rows.jsonl:0.01"], "Raise it", ["--data", "rows.jsonl:0.5"]),
    "all held out": (["--data", "rows.jsonl", "--val", "0.99"], "Give a smaller share, or a file",
                     ["--data", "rows.jsonl", "--val", "rows.jsonl"]),
    "rows too long": (["--data", "long.jsonl", "--seq-len", "32", "--long", "error"], "or --long cut, drop or split",
                      ["--data", "long.jsonl", "--seq-len", "32", "--long", "split"]),
    "updates before the norm": (["--optimizer-mode", "backward"], "Add --max-grad-norm 0",
                                ["--optimizer-mode", "backward", "--max-grad-norm", "0"]),
    "adapters without a rank": (["--lora-alpha", "4"], "--lora 16", ["--lora-alpha", "4", "--lora", "16"]),
    "a rank by another name": (["--lora_r", "8"], "", ["--lora_r", "8"]),
    "the best of nothing": (["--export", "best"], "Give --val", ["--export", "best", "--val", "0.2"]),
    "patience with nothing": (["--patience", "3"], "Give --val", ["--patience", "3", "--val", "0.2"]),
    "held-out data of none": (["model", "--val", "0.1", "no data"], "leave --val out", ["model", "no data"]),
    "a drive twice": (["--store", "a,a"], "Name one on each drive", ["--store", "a,b"]),
    "an interval": (["--save-every", "often"], "write 500 (steps), 0.1 (of the run), 30min or never",
                    ["--save-every", "30min"]),
    "no such run": (["--resume", "none"], "Begin one there", ["--out", "none"]),
    "the checkpoint itself": (["--tokenizer", "model/tokenizer.json"], "is a file; name its folder",
                              ["--tokenizer", "model"]),
}  # fmt: skip


def completed(argv: list[str]) -> list[str]:
    """With a model, data and a dry run where they are not given."""
    argv = argv if argv[:1] in (["model"], ["bare"]) or "--shape" in argv else ["model", *argv]
    without = "no data" in argv or "--shape" in argv
    argv = [word for word in argv if word != "no data"]
    data = [] if without or "--data" in argv else ["--data", "stories.txt"]
    return [*argv, *data, "--dry-run"]


@pytest.mark.grid
@pytest.mark.parametrize("name", HINTS)
def test_what_a_message_tells_works(here, capsys, name):
    for file, rows in FILES.items():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree("model", "bare")
    for path in Path("bare").glob("tokenizer*"):
        path.unlink()
    wrong, tells, right = HINTS[name]
    if tells:
        assert finetune.main(completed(wrong)) == 2
        assert tells in capsys.readouterr().err
    assert finetune.main(completed(right)) == 0, capsys.readouterr().err


@pytest.mark.full
def test_what_fits_instead_is_offered_with_its_speed(capsys):
    argv = ["--shape", "llama-70b", "--dry-run", "--assume", "gpu=rtx4090,ram=64GiB,ssd=2TB"]
    assert finetune.main(argv) == 3
    said = capsys.readouterr().err
    assert re.search(r"Or train adapters, which fit: --lora 16, [\d.]+ s a step of 32.8k tokens, \d+ tok/s\.", said)
    assert re.search(r"Or train all weights with --adam-bits 8, [\d.]+ s a step of 32.8k tokens, \d+ tok/s\.\n", said)

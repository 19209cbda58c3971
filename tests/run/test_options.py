"""The command line and the configuration file: names, types, what is refused and how."""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mutations import LAUGHS
from runs import make_small
from script_files import script

from trireme.engine.amounts import size
from trireme.engine.run.begin.resume import check_continues
from trireme.engine.run.command import checked, latest_run, parse
from trireme.engine.run.config.config_file import changes, config_yaml, repeats, saved_options, to_agree
from trireme.engine.run.config.option_names import ELSEWHERE
from trireme.engine.run.job import prepare
from trireme.engine.run.main import main
from trireme.engine.run.options import Every, Options, every
from trireme.engine.run.output.folder import signed
from trireme.models.config import InputError


@pytest.fixture
def here(tmp_path) -> Path:
    return make_small(tmp_path)


BASE = ["ckpt", "--data", "a.jsonl"]


def made(folder: Path) -> None:
    """What BASE names: a run that goes on looks for it."""
    (folder / "ckpt").mkdir()
    (folder / "a.jsonl").touch()


def refused(*argv: str) -> str:
    with pytest.raises(InputError) as error:
        parse(argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults():
    options = parse(BASE)
    assert (options.model, options.data, options.out) == ("ckpt", ("a.jsonl",), "runs/ckpt")
    assert options == dataclasses.replace(Options(), model="ckpt", data=("a.jsonl",), out="runs/ckpt")
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.lr = 1.0


def test_the_installed_command_and_the_script_are_one(monkeypatch):
    root = Path(__file__).parents[2]
    entry = re.search(r'^trireme = "(.*):(.*)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    monkeypatch.setattr("trireme.engine.run.main.command", lambda: 7)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert getattr(importlib.import_module(entry[1]), entry[2])() == script("finetune").command() == 7
    finally:
        signal.signal(signal.SIGINT, before)


def test_help_is_one_page_of_few_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert 20 < len([line for line in said.splitlines() if line.startswith("  --")]) < 80
    assert len(said.splitlines()) < 108
    for f in dataclasses.fields(Options):
        assert "--" + f.name.replace("_", "-") in said


@pytest.mark.parametrize(
    "argv",
    [
        ["--learning-rate", "0.1"],
        ["--learning_rate=0.1"],
        ["--lr=.1"],
    ],
)
def test_names_of_others_and_underscores(argv):
    assert parse([*BASE, *argv]).lr == 0.1
    assert parse([*argv, "--model_name_or_path", "ckpt", "--dataset", "a.jsonl"]).lr == 0.1


def test_positional_may_stand_anywhere_and_data_may_repeat():
    options = parse(["--data", "a:2", "--dry-run", "ckpt", "--data", "b"])
    assert options.model == "ckpt"
    assert options.data == ("a:2", "b")
    assert options.dry_run


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--learnign-rate", "1"], "unknown option --learnign-rate. Did you mean --learning-rate (= --lr)?"),
        (["--batchsize", "1"], "unknown option --batchsize. Did you mean --batch-size?"),
        (["--qqqq"], "unknown option --qqqq. See --help."),
        (["-x"], "unknown option -x. See --help."),
        (["--lr", "fast"], "--lr: 'fast' is not a number of at least 0."),
        (["--lr", "0"], "--lr: it must be greater than 0."),
        (["--lr", "nan"], "--lr: 'nan' is not a number of at least 0."),
        (["--lr", "inf"], "--lr: 'inf' is not a number from 0 to 1e+12."),
        (["--lr"], "--lr: expected a value; one that begins with -: --lr=VALUE."),
        (["--epochs", "-1"], "--epochs: '-1' is not a number of at least 0."),
        (["--batch-size", "2.5"], "--batch-size: '2.5' is not a whole number of at least 1."),
        (["--betas", "0.9,1"], "--betas: '1' is not a number from 0 to 0.999999."),
        (["--betas", "0.9"], "--betas: '0.9' does not have the form 0.9,0.95."),
        (["--max-steps", "9" * 400], f"--max-steps: '{'9' * 400}' is not a whole number from 1 to 1e+12."),
        (["--ram", "9" * 400 + "GiB"], f"--ram: '{'9' * 400}GiB' is more than any machine has."),
        (["--save-every", "9" * 400], f"--save-every: '{'9' * 400}' is not an interval; write 500 (steps)"),
        (["--eval-every", "9" * 400 + "h"], f"--eval-every: '{'9' * 400}h' is not an interval; write 500 (steps)"),
        (["--save-every", "1e11h"], "--save-every: '1e11h' is not an interval; write 500 (steps)"),
        (["--adam_beta2", "0.999"], "--adam-beta2 is not an option here: --betas 0.9,0.95 sets both."),
        (["--warmup", "1.5"], "--warmup: '1.5' is not a share (below 1) or a number of steps."),
        (["--ram", "0B"], "--ram: it must be greater than 0."),
        (["--gpu-memory", "0.0GiB"], "--gpu-memory: it must be greater than 0."),
        (["--store", ""], "--store: it is empty; leave the option out."),
        (["--store", "a,,b"], "--store: it is empty; leave the option out."),
        (["--store", "/"], "--store / names the root folder. Name a folder of its own on each drive."),
        (["--train", ""], "--train: it is empty; leave the option out."),
        (["--val", ""], "--val: it is empty; leave the option out."),
        (["--val", "a", "--val=b"], "--val b: --val is a already. Name a folder or a pattern."),
        (["--ram", "24"], "--ram: '24' is not a size; write it like 24GiB, 2TB or 512MiB."),
        (["--save-every", "x"], "--save-every: 'x' is not an interval; write 500 (steps), 0.1 (of the run), 30min"),
        (["--log", "aim"], "--log aim: expected tensorboard, wandb, mlflow, comet or trace; leave it out for none."),
        (["--store", "a,b,./a"], "--store a,b,./a: a folder is named twice. Name one on each drive."),
        (
            ["--out", "a/b", "--store", "a/./b,c"],
            "--store a/./b,c is --out itself. Name another folder, or leave it out.",
        ),
        (["other"], "other: the checkpoint is ckpt already. Give data with --data."),
        (
            ["--data", "a.jsonl", "b.jsonl"],
            "b.jsonl: the checkpoint is ckpt already. Did the shell expand a pattern? Quote it",
        ),
        (["--gradient_checkpointing", "true"], "--gradient-checkpointing is not an option here: what is kept"),
        (["--use_dora", "1"], "--use-dora is not an option here: DoRA is not supported"),
        (["--dtype", "fp16"], "--dtype: 'fp16' is not one of auto, bf16, fp32, fp8."),
        (["--optim", "adamw_8bit"], "--optim is not an option here: the optimizer is AdamW, and --adam-bits 8 keeps"),
        (
            ["--lora_model_dir", "x"],
            "--lora-model-dir is not an option here: --adapter DIR trains peft's",
        ),
        (["--rank", "8"], "--rank is not an option here: --lora 16 trains adapters, and without it everything is"),
        (
            ["--num_layers", "9"],
            "--num-layers is not an option here: adapters are in all layers, and without them",
        ),
        (["--eval_table_size", "9"], "--eval-table-size is not an option here: an evaluation is the loss on --val"),
        (["--use_peft"], "--use-peft is not an option here: --lora 16 trains adapters"),
        (
            ["--modules_to_save", "x"],
            "--modules-to-save is not an option here: adapters alone are trained; without",
        ),
        (["--mask_prompt"], "--mask-prompt is not an option here: of conversations, and of prompts with completions"),
        (["--rope_scaling", "x"], "--rope-scaling is not an option here: --rope-factor X extends the context"),
        (["--max_sampels", "9"], "unknown option --max_sampels. Did you mean --max-samples?"),
        (["--sequence_length", "9"], "unknown option --sequence_length. Did you mean --sequence-len (= --seq-len)?"),
        (["--temp", "9"], "unknown option --temp. Did you mean --temperature?"),
        (["--load_in_4bit"], "--load-in-4bit is not an option here: --base nf4 stores the frozen base in 4 bits, of"),
        (["--max_train_samples", "9"], "--max-train-samples is not an option here: --max-samples N takes the first"),
        (["--max_eval_samples", "9"], "--max-eval-samples is not an option here: --eval-tokens N limits"),
        (["--lora_aplha", "9"], "unknown option --lora_aplha. Did you mean --lora-alpha?"),
    ],
)
def test_refusals_say_what_and_what_to_do(argv, says):
    assert refused(*BASE, *argv).startswith(says)


@pytest.mark.parametrize(("word", "command"), [
    ("chat", "sample OUT --chat"), ("samples", "sample OUT --chat"), ("evaluate", "eval OUT --data FILE"),
    ("finetune", "CHECKPOINT --data FILE"), ("fuse", "merge ADAPTER --out DIR"), ("psuh", "push OUT OWNER/NAME"),
    ("help", "--help"),
])  # fmt: skip
def test_a_word_that_is_no_command_names_the_one_that_is_meant(word, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["trireme"])
    assert refused(word, "m") == f"{word} is not a folder here, nor a command. Did you mean trireme {command}?"
    (tmp_path / word).mkdir()
    assert parse([word, "--data", "a"]).model == word, "a folder of that name is one"
    assert refused("info", word) == "info is not a folder here, nor a command. See trireme --help."


def test_no_tracker_may_be_said():
    assert parse([*BASE, "--report_to", "none"]).log == ()


COMMANDS = [(), ("merge",), ("check",), ("push",), ("sample",), ("eval",), ("score",)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_no_words_and_fits_the_terminal(command, capsys, monkeypatch):
    helps = {}
    for width in (60, 80, 120, 10_000):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        helps[width] = capsys.readouterr().out
        assert all(len(line) < width for line in helps[width].splitlines())
        assert helps[width].split() == helps[60].split()


def test_help_and_wrong_options_need_no_torch_and_no_numpy(tmp_path):
    """They answer in a fraction of a second."""
    code = "import sys\nfrom trireme.engine.run.main import main\n"
    for command in COMMANDS:
        words = [*command, "--help"]
        code += f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        code += f"assert main({[*command, '--lerning-rate', '1']!r}) == 2\n"
    code += "found = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not found, found\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("unknown option --lerning-rate.") == len(COMMANDS)


def test_the_essentials_are_asked_for():
    assert refused().startswith("no checkpoint given")
    assert refused("ckpt").startswith("no data given")
    assert parse(["--demo"]).demo


def test_what_would_be_ignored_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(tmp_path)
    assert refused(*BASE, "--demo") == (
        "--demo trains a generated model on generated stories. Leave out --model, --data."
    )
    assert "Leave out --val" in refused("--demo", "--val", "0.1")
    (tmp_path / "config.yaml").write_bytes(config_yaml(parse(BASE)))
    assert "a run continues in its own folder" in refused("--resume", str(tmp_path), "--out", "elsewhere")
    assert parse(["--resume", str(tmp_path), "--out", f"{tmp_path}/"]).out == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 << 30), ("2TB", 2 * 10**12), ("512 MiB", 512 << 20), ("1.5GB", 1500000000), ("7B", 7)],
)
def test_sizes(text, nbytes):
    assert size(text) == nbytes


def test_every():
    assert [s for s in range(1, 13) if every("5").due(s, 12, 0)] == [5, 10]
    assert [s for s in range(1, 11) if every("0.25").due(s, 10, 0)] == [3, 5, 8, 10]
    assert len([s for s in range(1, 2293) if every("0.1").due(s, 2292, 0)]) == 10
    assert all(every("0.1").due(n, n, 0) for n in range(1, 200))  # the last step, whatever is lost in rounding
    assert every("30min") == Every(seconds=1800)
    assert every("30min").due(1, 10, 1800)
    assert not every("30min").due(1, 9, 5)
    assert every("90s") == Every(seconds=90)
    assert every("1.5h") == Every(seconds=5400)
    with pytest.raises(ValueError, match="is not an interval"):
        every("1e-320")
    assert not any(every("never").due(s, 10, 1e9) for s in range(1, 11))
    assert all(every(str(every(text))) == every(text) for text in ("5", "0.25", "30min", "45s", "2h", "never"))


def test_warmup_is_a_share_or_steps():
    assert parse([*BASE, "--warmup", "0.1"]).warmup_steps(200) == 20
    assert parse([*BASE, "--warmup_steps", "7"]).warmup_steps(200) == 7
    assert parse([*BASE, "--warmup", "0"]).warmup_steps(200) == 0


def test_blanks_after_commas_are_no_part_of_values(tmp_path):
    given = parse([*BASE, "--log", "trace, wandb", "--lora-targets", "q_proj, v_proj", "--store", f"a, {tmp_path}/b"])
    assert (given.log, given.lora_targets) == (("trace", "wandb"), ("q_proj", "v_proj"))
    assert given.store == ("a", f"{tmp_path}/b")
    assert refused(*BASE, "--log", "trace, ").startswith("--log: it is empty")


def test_config_file_and_flags_that_win(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        "model_name_or_path: ckpt\ndata: [a, 'b:2']\nlearning-rate: 1e-5\nno_pack: true\nram: 2GiB\nval: 0.1\n"
    )
    options = parse(["--config", str(config), "--lr", "3e-5"])
    assert (options.model, options.data, options.lr, options.no_pack) == ("ckpt", ("a", "b:2"), 3e-5, True)
    assert (options.ram, options.val) == (2 << 30, "0.1")
    assert parse(["--config", str(config)]).lr == 1e-5
    config.write_text("store: x,y\nlog: [trace, wandb]")
    options = parse([*BASE, "--config", str(config)])
    assert (options.store, options.log) == (("x", "y"), ("trace", "wandb"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr: [1, 2]", "lr: '1,2' is not a number"),
        ("lr: {a: 1}", "lr: a dict is not a plain value."),
        ("lr: [[1]]", "lr: a list is not a plain value."),
        ("lr: !!set {a}", "lr: a set is not a plain value."),
        ("seed: 0x" + "f" * 5000, "seed is a number of thousands of digits."),
        ("max_steps: " + "1:" * 5000 + "1", "max_steps is a number of thousands of digits."),
        ("? 0x" + "f" * 5000 + "\n: 1", "a key is a number of thousands of digits."),
        ("lr: " + LAUGHS, "is not a plain value."),
        ("data: [a, " + LAUGHS + "]", "is not a plain value."),
        ("no_pack: {a: " + LAUGHS + "}", "is not a plain value."),
        ("lr: true", "lr: True is not a plain value."),
        ("no_pack: 3", "no_pack: 3 is not true or false."),
        ("lrr: 1", "unknown option --lrr. Did you mean --lr?"),
        (
            "schedule: square",
            "schedule: 'square' is not one of cosine, linear, constant, constant_with_warmup, polynomial, wsd.",
        ),
        ("- lr", "holds a list, expected lines like 'batch-size: 16'."),
        ("a: [", "is not YAML: "),
        ("\x00", "is not YAML: "),
        ("a: " + "[" * 3000, "is not YAML: "),
        ("seed: 2020-13-45", "is not YAML: "),
        ("seed: !!timestamp 7", "is not YAML: "),
        ("seed: !!int ''", "is not YAML: "),
        ('out: "a\\0b"', "out holds a NUL character"),
        ('{"system": "\\ud83d\\ude00"}', r"system holds '\ud83d', half a character. Write the character itself"),
        ("resume_from_checkpoint: runs/a", "resume_from_checkpoint belongs on the command line"),
        ("config: c.yaml", "config belongs on the command line"),
    ],
)
def test_bad_config_files(tmp_path, text, says):
    config = tmp_path / "c.yaml"
    config.write_text(text)
    message = refused(*BASE, "--config", str(config))
    assert message.startswith(str(config))
    assert says in message
    assert "No such file" in refused("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr: 1e-5\nlr: 2e-5\n", "lr is --lr, which is given already. Leave one out."),
        ("lr: 1e-5\nlearning_rate: 1e-5\n", "learning_rate is --lr, which is given already. Leave one out."),
        ("lrr: 1\nbatchsize: 2\n", "2 keys cannot be taken. Change them, or leave them out:"),
    ],
)
def test_what_is_given_twice_and_all_that_is_unknown_is_said(tmp_path, text, says):
    (tmp_path / "c.yaml").write_text(text)
    assert refused(*BASE, "--config", str(tmp_path / "c.yaml")).startswith(f"{tmp_path}/c.yaml: {says}")


def test_every_name_in_an_answer_is_an_option():
    for theirs in ELSEWHERE:
        for flag in re.findall(r"--([\w-]+)", theirs.answer):
            assert flag.replace("-", "_") in {f.name for f in dataclasses.fields(Options)}


def test_written_config_reads_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("")
    options = parse(
        ["ckpt", "--data", "a.jsonl:2", "--data", "a.jsonl", "--val", "0.02", "--ram", "3GiB", "--lr", "1e-5"]
        + ["--save-every", "45s", "--betas", "0.8,0.999", "--store", "x,y", "--no-pack", "--log", "trace"]
    )
    (tmp_path / "config.yaml").write_bytes(config_yaml(options))
    again = parse(["--config", str(tmp_path / "config.yaml"), "--out", "runs/ckpt"])
    here = str(tmp_path)
    assert again == dataclasses.replace(
        options,
        model=f"{here}/ckpt",
        data=(f"{here}/a.jsonl:2", f"{here}/a.jsonl"),
        store=(f"{here}/x", f"{here}/y"),
        config=str(tmp_path / "config.yaml"),
    )


def test_patterns_and_system_messages_are_kept(tmp_path, monkeypatch):
    """A pattern names no file, and yet is meant from where the run was started."""
    monkeypatch.chdir(tmp_path)
    options = parse(["ckpt", "--data", "shards/*.jsonl:2", "--data", "gone.jsonl", "--system", "Be: brief."])
    (tmp_path / "config.yaml").write_bytes(config_yaml(options))
    again = parse(["--config", str(tmp_path / "config.yaml")])
    assert again.data == (f"{tmp_path}/shards/*.jsonl:2", "gone.jsonl")
    assert again.system == "Be: brief."


def test_a_runs_options_are_all_there(here, monkeypatch):
    """Also those that it has chosen: other defaults repeat it all the same."""
    monkeypatch.chdir(here)
    given = parse(["checkpoint", "--data", "stories.txt", "--lora", "4", "--out", "out"])
    job = prepare(given)
    content = yaml.safe_load(config_yaml(job.options))
    chosen = dict(seq_len=512, epochs=1.0, lr=2e-4, weight_decay=0.0, adam_bits=32, lora_alpha=8.0)
    assert chosen.items() <= content.items()
    assert {"q_proj", "down_proj"} < set(content["lora_targets"])
    assert {f.name for f in dataclasses.fields(Options) if f.default not in (None, "", ())} - set(content) == {
        "dry_run",
        "demo",
    }
    (here / "config.yaml").write_bytes(config_yaml(job.options))
    again = parse(["--config", "config.yaml", "--out", "out"])
    assert config_yaml(again) == config_yaml(job.options)
    assert prepare(again).lr == job.lr
    assert parse(["--config", "config.yaml", "--max-steps", "5"]).epochs is None
    assert repeats(config_yaml(job.options), given)
    assert repeats(config_yaml(given), given)
    assert not repeats(config_yaml(job.options), dataclasses.replace(given, lr=1e-3))
    assert not repeats(config_yaml(job.options), dataclasses.replace(given, seed=1))
    assert not repeats(b"- 1", given)
    assert not repeats(b"[", given)


def test_words_that_are_also_files_stay_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "0.02", "-"):
        (tmp_path / name).write_text("")
    options = parse(["ckpt", "--data", "-", "--val", "0.02", "--chat-template", "plain"])
    (tmp_path / "config.yaml").write_bytes(config_yaml(options))
    again = parse(["--config", str(tmp_path / "config.yaml")])
    assert (again.data, again.val, again.chat_template) == (("-",), "0.02", "plain")


@pytest.mark.parametrize("when", ["0.00001", "1234567s", "1e12s", "1000000min", "0.5s", "100h", "never", "7", "1e-3"])
def test_intervals_read_back_exactly(when):
    assert every(str(every(when))) == every(when)


def test_resume_finds_the_run_and_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(tmp_path)
    assert refused("--resume").startswith("--resume: no run in runs/.")
    assert refused("--resume", "nowhere").startswith("--resume nowhere: there is no run in that folder")
    for name, lr in (("old", "1e-3"), ("new", "2e-3")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_bytes(config_yaml(parse([*BASE, "--lr", lr])))
    log = tmp_path / "runs" / "old" / "log.jsonl"
    log.write_text("")
    assert parse(["--resume", "runs/new"]).lr == 2e-3
    os.utime(log, (2**31, 2**31))
    assert latest_run(tmp_path / "runs").name == "old"
    options = parse(["--resume", "--max-steps", "9"])
    assert (options.lr, options.max_steps, options.out, options.resume) == (1e-3, 9, "runs/old", "runs/old")


def test_the_latest_run_is_found_beside_one_that_is_active(tmp_path, monkeypatch):
    """A file that it lists and renames at once is not there any more."""
    monkeypatch.chdir(tmp_path)
    resumable(tmp_path)
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: [*real(path), path / ".loss.svg.partial"])
    assert latest_run(tmp_path / "runs").name == "a"


def test_a_resumed_host_takes_from_host_0_all_but_its_own_paths_and_limits(tmp_path, monkeypatch):
    """Of two config.yaml one may have been written without the other when the run was killed."""
    monkeypatch.chdir(tmp_path)
    resumable(tmp_path, "--lr", "1e-3", "--max-steps", "9")
    host = tmp_path / "runs/a/host-1"
    host.mkdir()
    there = parse([*BASE, "--lr", "2e-3", "--seq-len", "64", "--ram", "5GiB", "--store", "there/host-1"])
    (host / "config.yaml").write_bytes(config_yaml(there))
    first = (tmp_path / "runs/a/config.yaml").read_text()
    found = parse(["--resume", "runs/a"], 1, 2, lambda _: first)
    assert (found.lr, found.max_steps, found.seq_len) == (1e-3, 9, None)
    assert (found.ram, found.store) == (5 << 30, (str(tmp_path / "there/host-1"),))
    assert to_agree(found) == to_agree(parse(["--resume", "runs/a"], 0, 2))


def resumable(folder: Path, *given: str) -> None:
    """A run in runs/a."""
    made(folder)
    (folder / "runs/a/best").mkdir(parents=True)
    (folder / "runs/a/config.yaml").write_bytes(signed("0" * 32, config_yaml(parse([*BASE, *given]))))


def test_the_latest_run_is_none_of_another_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resumable(tmp_path)
    (tmp_path / "runs/hydra").mkdir()
    (tmp_path / "runs/hydra/config.yaml").write_text("trainer: {gpus: 1}\n")
    (tmp_path / "runs/a/gone").symlink_to("nowhere")
    os.utime(tmp_path / "runs/hydra/config.yaml", (2**31, 2**31))
    assert latest_run(tmp_path / "runs").name == "a"


def test_the_length_of_a_resumed_run_is_the_one_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resumable(tmp_path, "--max-steps", "6")
    found = parse(["--resume", "runs/a", "--epochs", "2"])
    assert (found.epochs, found.max_steps) == (2, None)
    found = parse(["--resume", "runs/a", "--epochs", "2", "--max-steps", "9"])
    assert (found.epochs, found.max_steps) == (2, 9)


@pytest.mark.parametrize("given", [("--config", "other.yaml"), ("--shape", "llama-7b"), ("--demo",)])
def test_a_resumed_run_takes_no_other_options_or_model(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    resumable(tmp_path)
    assert refused("--resume", "runs/a", *given).startswith(f"{given[0]}: a resumed run has options and a model of its")


def test_a_part_of_a_run_names_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resumable(tmp_path)
    (tmp_path / "runs/b").mkdir()
    assert f"It is a part of the run in {tmp_path}/runs/a: --resume" in refused("--resume", "runs/a/best")
    assert "Begin one there" in refused("--resume", "runs/b")
    assert "Name the folder that --out named" in refused("--resume", "ckpt/..")


def test_options_that_change_the_data_of_a_resumed_run_are_named(tmp_path):
    began = Options(model="m", data=("a",), no_pack=True, val="0.1")
    job = SimpleNamespace(out=Path("o"), options=began, data=SimpleNamespace(fingerprint="a", left_out=0))
    snapshot = {"data": "b", "options": json.loads(json.dumps(saved_options(began))), "step": 1}
    with pytest.raises(InputError, match=r"not what the run was started with\. Restore it\."):
        check_continues(job, snapshot)
    job.options = dataclasses.replace(began, no_pack=False, map="text=body", data=("b",))
    with pytest.raises(InputError, match=r"Leave out --map, --no-pack, as the run began\."):
        check_continues(job, snapshot)


def test_what_has_changed_is_named_with_what_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = json.loads(json.dumps(saved_options(parse([*BASE, "--ram", "3GiB", "--store", "x"]))))
    assert changes(parse([*BASE, "--store", str(tmp_path / "x"), "--ram", "3072MiB", "--out", "y"]), began) == []
    now = parse([*BASE, "--lr", "2e-4", "--no-pack", "--eval-every", "7", "--store", "x,z", "--val", "\x1b[2J"])
    assert changes(now, began) == [
        "--val '\\x1b[2J', was not given",
        "--no-pack True, was False",
        f"--store ['{tmp_path}/x', '{tmp_path}/z'], was ['{tmp_path}/x']",
        "--eval-every '7', was '0.1'",
        "--lr 0.0002, was not given",
        "--ram not given, was '3221225472B'",
    ]
    assert changes(now, {"lr": 0.1}) == ["--lr 0.0002, was 0.1"], "an option that there was not yet has not changed"


@pytest.mark.parametrize(
    ("name", "program", "module"),
    [
        ("trireme", "/usr/bin/trireme", None),
        ("python scripts/finetune.py", "scripts/finetune.py", None),
        ("python -m trireme", "/a/trireme/__main__.py", "trireme.__main__"),
        ("trireme", "/usr/lib/python3/ipykernel_launcher.py", "ipykernel_launcher"),
        ("trireme", "", None),
    ],
)
def test_the_command_calls_itself_as_it_was_called(name, program, module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program])
    spec = module and SimpleNamespace(name=module)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    with pytest.raises(InputError, match=f"Try: {name} CHECKPOINT --data FILE"):
        parse([])
    with pytest.raises(SystemExit):
        parse(["--version"])
    assert re.fullmatch(r"trireme \d+\.\d+\S*\n", capsys.readouterr().out)


def test_from_python_paths_one_file_and_no_folder_are_understood(tmp_path):
    given = checked(Options(model=tmp_path / "model", data=tmp_path / "a.txt", store=[tmp_path], log="trace"))
    assert (given.model, given.data) == (str(tmp_path / "model"), (str(tmp_path / "a.txt"),))
    assert (given.store, given.log, given.out) == ((str(tmp_path),), ("trace",), "runs/model")
    assert checked(given) == given
    with pytest.raises(InputError, match="no data given"):
        checked(Options(model="model"))

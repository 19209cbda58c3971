"""The command as a user meets it: every wrong input is one line, the right exit code, and nothing left behind."""

import errno
import fcntl
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from command import TRAIN, fails, finetune, on_screen, set_config, tree, write
from engines import fork
from runs import ended
from safetensors.numpy import load_file, save_file
from script_files import ROOT

from trireme.engine.hosts.group import Place
from trireme.engine.planner import host
from trireme.engine.run import evaluation, job, main
from trireme.engine.run.command import parse
from trireme.engine.run.options import Options
from trireme.engine.run.screen import Screen
from trireme.engine.run.signals import STOPS
from trireme.models import config


def set_weight(name: str, value: np.ndarray | None) -> None:
    tensors = load_file("model/model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if value is None else tensors | {name: value}, "model/model.safetensors")


CHECKPOINTS = {
    "not there": (lambda: shutil.rmtree("model"), ["model"]),
    "shapes of another config": (lambda: set_config(intermediate_size=400), ["400", "config.json"]),
    "a layer too few": (lambda: set_config(num_hidden_layers=5), ["lacks", "layers.4"]),
    "a tensor too many": (lambda: set_weight("lora_A", np.ones(1, np.float32)), ["lora_A"]),
    "a tensor is missing": (lambda: set_weight("model.norm.weight", None), ["model.norm.weight"]),
    "integer weights": (lambda: set_weight("model.norm.weight", np.ones(128, np.int32)), ["model.norm.weight", "I32"]),
    "truncated": (
        lambda: write("model/model.safetensors", Path("model/model.safetensors").read_bytes()[:-9]),
        ["model.safetensors", "truncated", "again"],
    ),
    "no tokenizer": (lambda: Path("model/tokenizer.json").unlink(), ["tokenizer"]),
    "vocabulary too small": (
        lambda: (set_config(vocab_size=300), set_weight("model.embed_tokens.weight", np.ones((300, 128), np.float32))),
        ["300"],
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_bad_checkpoint(here, capsys, name):
    spoil, says = CHECKPOINTS[name]
    spoil()
    err = fails(capsys, here, *TRAIN)
    assert all(word in err for word in says), err


def test_weights_that_are_not_numbers(here, capsys):
    set_weight("model.norm.weight", np.full(128, np.nan, np.float32))
    assert finetune.main(list(TRAIN)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "nan" in err.lower()


DATA = {
    "not JSON": ("x.jsonl", '{"text": "a"}\n{"text": \n', ["line 2", "--skip-bad"]),
    "ids beyond the vocabulary": ("x.jsonl", '{"input_ids": [1, 9999], "labels": [1, 9999]}\n', ["9999"]),
    "not UTF-8": ("x.txt", b"abc \xff\xfe def", ["x.txt"]),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data(here, capsys, name):
    path, text, says = DATA[name]
    write(path, text)
    err = fails(capsys, here, "model", "--data", path, "--out", "out")
    assert all(word in err for word in says), err


REQUESTS = {
    "sequence of one token": (["--seq-len", "1"], 2, ["--seq-len"]),
    "held-out file that is not there": (["--val", "none.jsonl"], 2, ["none.jsonl"]),
    "held-out share of nothing": (["--val", "0.00001"], 2, ["--val"]),
    "no GPU": (["--device", "cuda"], 2, ["--device cuda"]),
    "a plan that is not there": (["--plan", "none.json"], 2, ["none.json"]),
    "a tokenizer that is not there": (["--tokenizer", "none"], 2, ["none holds no tokenizer.json"]),
    "a tokenizer's file": (["--tokenizer", "model/tokenizer.json"], 2, ["tokenizer.json is a file; name its folder"]),
    "a template that is not there": (["--chat-template", "none.jinja"], 2, ["none.jinja"]),
    "output where nothing can be made": (["--out", "/proc/x"], 2, ["--out /proc/x", "/proc", "another folder"]),
    "no run to resume": (["--resume", "none"], 2, ["--resume none"]),
    "too little memory": (["--ram", "1MiB", "--gpu-memory", "1MiB"], 3, ["--gpu-memory by", "and --ram by"]),
    "more GPUs than blocks": (["--gpus", "5"], 2, ["--gpus 5", "4 blocks"]),
    "GPUs of none": (["--gpus", "0"], 2, ["--gpus", "all, or a whole number of at least 1"]),
    "all GPUs of no machine": (
        ["--dry-run", "--assume", "gpu=rtx4090,ram=64GiB", "--gpus", "all"],
        2,
        ["--gpus all", "Give --gpus N"],
    ),
    "more GPUs than are assumed": (
        ["--dry-run", "--assume", "gpu=2xrtx4090,ram=64GiB", "--gpus", "3"],
        2,
        ["--gpus 3", "the assumed machine has 2"],
    ),
    "GPUs by name": (["--gpus", "h200"], 2, ["--gpus", "all, or a whole number"]),
    "too little RAM": (["--ram", "1MiB"], 3, ["--ram 1.00 MiB: Python and its libraries alone take", "Raise it"]),
    "a template without end": (["--chat-template", "/dev/zero"], 2, ["--chat-template /dev/zero", "more than 64 MiB"]),
    "options without end": (["--config", "/dev/zero"], 2, ["/dev/zero", "more than 64 MiB"]),
    "a plan without end": (["--plan", "/dev/zero"], 2, ["/dev/zero", "more than 64 MiB"]),
    "a store that is a file": (["--store", "stories.txt"], 2, ["--store stories.txt is a file"]),
    "a store that is the checkpoint": (["--store", "model"], 2, ["--store model: holds config.json, which is no"]),
    "a name that is too long": (["--out", "L" * 256], 2, ["LLL: File name too long"]),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_cannot_be_met(here, capsys, name):
    argv, code, says = REQUESTS[name]
    if "cuda" in argv and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    err = fails(capsys, here, *TRAIN, *argv, code=code)
    assert all(word in err for word in says), err


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "option"), [(["--ram", "8MiB"], "--ram"), (["--ram", "8MiB", "--max-grad-norm", "0"], "--ram"),
                      (["--ram", "1GiB", "--gpu-memory", "2MiB"], "--gpu-memory"),
                      (["--ram", "1MiB", "--gpu-memory", "40MiB"], "--ram")]
)  # fmt: skip
def test_what_is_short_is_named_and_as_much_more_is_enough(here, capsys, monkeypatch, given, option):
    """On a CPU both tiers are RAM: the option to raise is the one that was given too little."""
    monkeypatch.setattr(host, "_left_by_the_process", lambda ram, later: ram)  # tests hold more than a limit here
    said = fails(capsys, here, *TRAIN, *given, "--dry-run", code=3)
    ((named, more),) = re.findall(r"Raise (--\S+) by ([\d.]+) MiB", said)
    assert named == option
    assert "and --" not in said
    at = given.index(option) + 1
    now = re.fullmatch(r"(\d+)MiB", given[at])[1]
    enough = [*given[:at], f"{float(now) + float(more)}MiB", *given[at + 1 :]]
    assert finetune.main([*TRAIN, *enough, "--dry-run"]) == 0
    total, limit = re.findall(r"(?:total|limit) .*", capsys.readouterr().out)[:2]
    assert "MiB" in total
    assert re.search(r" [MG]iB", limit)


def test_a_folder_that_was_removed_is_no_place_to_be(here, capsys, monkeypatch):
    gone = Path("gone").absolute()
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the current folder has been removed" in fails(capsys, here, str(here / "model"), "--dry-run")


def test_what_a_resumed_run_misses_can_be_named(here, capsys):
    """Nothing is read before that is known, so a config.yaml is all that it takes."""
    Path("out").mkdir()
    kept = {"model": here / "model", "data": [f"{here}/moved.txt:0.5"], "val": "0.1", "teacher": "OWNER/NAME"}
    write("out/config.yaml", "".join(f"{key}: {json.dumps(value, default=str)}\n" for key, value in kept.items()))
    err = fails(capsys, here, "--resume", "out")
    assert f"--resume out: {here}/moved.txt (--data) is not there. Put it back, or say where it is: --data PATH" in err
    assert parse(["--resume", "out", "--data", "stories.txt"]).data == ("stories.txt",)
    Path("model").rename("other")
    assert "(--model) is not there" in fails(capsys, here, "--resume", "out", "--data", "stories.txt")


def test_limits_beyond_the_machine_are_warned_of(here, capsys):
    for limit, warned in (["--ram", "100TB"], True), (["--gpu-memory", "100TB"], True), ([], False):
        assert finetune.main([*TRAIN, *limit, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert (
            bool(re.search(r"warning: the limit of [\d.]+ GiB is more than the [\d.]+ GiB of RAM that", said)) == warned
        )


@pytest.mark.parametrize("name", ["eval", "score", "merge"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_with_a_line(tmp_path, capsys, monkeypatch, name, number):
    monkeypatch.setitem(finetune.COMMANDS, name, lambda _: os.kill(os.getpid(), number))
    monkeypatch.chdir(tmp_path)
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # nohup has SIGHUP ignored
    try:
        assert finetune.main([name, "x"]) == 130
    finally:
        signal.signal(number, before)
    more = "; the same command continues" if name == "score" else ""
    assert capsys.readouterr().err == f"error: interrupted{more}\n"


def test_hosts_that_wait_for_each_other_say_so(capsys, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no.such.host")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(finetune, "WAIT", 0.01)
    with finetune.said_later(Screen(), Place(1, 2)):
        time.sleep(0.1)
    said = "host 1 waits for the others, 300 s at most: host 0 is no.such.host, port 29500\n"
    assert capsys.readouterr().err == said
    with finetune.said_later(Screen(), Place()):
        time.sleep(0.02)
    assert not capsys.readouterr().err


def test_lengths_that_contradict_each_other_are_noted(here, capsys):
    assert finetune.main([*TRAIN, "--epochs", "2", "--warmup", "1000", "--lr", "1e-3", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "note: --max-steps 2 decides, not --epochs 2" in said
    assert "note: --warmup 1,000 takes the whole run; its last step has lr 2.0e-06" in said
    more = ["--eval-every", "5", "--eval-tokens", "9", "--chat-template", "chatml"]
    assert finetune.main([*TRAIN, *more, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert (
        "note: --eval-every 5 and --eval-tokens 9: nothing is evaluated, there is no held-out data. Give --val" in said
    )
    assert "note: --chat-template is for conversations, and no row is one" in said
    assert finetune.main([*TRAIN, "--eval-every", "never", "--dry-run"]) == 0
    assert "note: --" not in capsys.readouterr().out


def test_a_context_beyond_the_short_factors_is_noted(here, capsys):
    config = json.loads(Path("model/config.json").read_text())
    factors = [1.0] * (config["hidden_size"] // config["num_attention_heads"] // 2)
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    for original, noted in ((32, False), (16, True)):
        set_config(rope_parameters=None, rope_scaling=rope | {"original_max_position_embeddings": original})
        assert finetune.main([*TRAIN, "--seq-len", "32", "--dry-run"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("note: --seq-len 32 is beyond the 16 positions of the short factors" in said) == noted


def test_a_class_that_is_not_followed_is_noted(here, capsys):
    code = {"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    for keys, noted in (
        ({"auto_map": code}, "refers to custom code, modeling_x.Model, which is never run: the model is read as"),
        ({"architectures": ["Qwen2Model"]}, 'says "architectures": Qwen2Model, which is not a language model'),
        ({"auto_map": {"AutoConfig": "configuration_x.Config"}, "architectures": ["GPT2LMHeadModel"]}, ""),
    ):
        set_config(**{"auto_map": None} | keys)
        assert finetune.main([*TRAIN, "--dry-run"]) == 0
        said = " ".join("".join(capsys.readouterr()).split())
        assert noted in said
        assert ("note: config.json" in said) == bool(noted)


def test_without_installation_what_to_do_is_said():
    bare = [sys.executable, "-I", "-S", str(ROOT / "scripts" / "finetune.py"), "--help"]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("error: trireme is not installed")
    assert f"pip install -e {ROOT}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_examples_are_shown_once_however_many_are_asked_for(here, capsys):
    write("two.jsonl", '{"text": "one story"}\n{"text": "another story"}\n')
    argv = ["model", "--data", "two.jsonl", "--out", "out", "--show-example", "1000000000", "--dry-run"]
    assert finetune.main(argv) == 0
    assert len(re.findall("^example ", capsys.readouterr().out, re.MULTILINE)) == 2


def test_held_out_files_are_in_the_report(here, capsys):
    assert finetune.main([*TRAIN, "--val", "stories.txt", "--dry-run"]) == 0
    assert re.search(r"^val      stories.txt: \d+ rows", capsys.readouterr().out, re.MULTILINE)


def test_a_step_has_no_more_sequences_than_the_data(here, capsys):
    """However large --batch-size is, what is planned and refused is what the data come to."""
    step, lines = ["--seq-len", "64", "--ram", "64MiB", "--gpu-memory", "64MiB", "--micro-batch", "1", "--dry-run"], []
    for batch_size in ("47", "4096", "1000000"):
        data = ["--data", "stories.txt:0.3", "--batch-size", batch_size]
        assert finetune.main(["model", *data, "--out", "out", *step]) == 0
        out = capsys.readouterr().out
        (count,) = re.findall(r"packed into (\d+) sequences", out)
        assert f" of {count} sequences" in out
        assert f", {count} micro-batches of 1\n" in out
        assert (f"fewer than --batch-size {int(batch_size):,}" in out) == (int(batch_size) > int(count))
        lines.append(re.findall(r"^ +(?:activations|total) .*", out, re.MULTILINE))
    assert lines[1] == lines[2]
    assert int(count) < 47


@pytest.mark.full
@pytest.mark.grid
@pytest.mark.parametrize("limits", [["--ram", "12MiB"], ["--ram", "1GiB", "--gpu-memory", "12MiB"]])
def test_where_fewer_sequences_a_step_would_do_that_is_said(here, capsys, limits, monkeypatch):
    monkeypatch.setattr(host, "_left_by_the_process", lambda ram, later: ram)
    write("many.jsonl", '{"text": "a story of sailors"}\n' * 20_000)
    argv = ["model", "--data", "many.jsonl", "--out", "out", "--seq-len", "64", "--no-pack", "--dry-run", *limits]
    assert "--batch-size" in fails(capsys, here, *argv, "--batch-size", "20000", code=3)
    assert finetune.main([*argv, "--batch-size", "4"]) == 0


@pytest.mark.grid
@pytest.mark.parametrize("given", [(), ("--eval-tokens", "70")])
def test_an_evaluation_reads_a_share_of_the_held_out_data_and_says_so(here, capsys, monkeypatch, given):
    """The same whole rows each time."""
    read, real = [], evaluation.evaluate

    def evaluate(e, micro, parts):
        read.append([(mb.tokens, mb.trained, mb.pairs) for mb in micro])
        return real(e, micro)

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    argv = ["--batch-size", "2", "--val", "0.5", "--eval-every", "2", "--schedule", "constant", *given]
    assert finetune.main([*TRAIN[:-1], "4", *argv]) == 0
    said = capsys.readouterr().out
    (n, each) = re.search(r"^eval     (\d+) x (\d+) tokens, on \2 of \S+ held-out tokens", said, re.M).groups()
    assert n == "3"
    assert len(read) % 3 == 0
    assert read == read[: len(read) // 3] * 3
    assert int(each) == 70 or not given
    assert abs(sum(tokens for group in read for tokens, _, _ in group) / 3 - int(each)) < 64
    assert ("about a tenth of the run in all; --eval-tokens for more or fewer" in said) == (not given)
    assert re.search(r"^done     4 steps, \S+, 3 evaluations with samples \S+, loss", said, re.M)


BEFORE_TORCH = """
import sys
from trireme.engine.run.main import main
for line in ("nowhere --data x", "model --data x.jsonl", "model --data stories.txt --out .",
             "model --data stories.txt --lr fast", "--demo --lr 0", "model --data stories.txt --val none.jsonl"):
    assert main(argv := line.split()) == 2
    assert "torch" not in sys.modules, argv
"""


def test_a_wrong_path_or_option_is_answered_before_torch_is_imported(here):
    done = subprocess.run([sys.executable, "-c", BEFORE_TORCH], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == 6


def test_a_model_of_the_hub_is_answered_with_how_to_get_it(here, capsys, monkeypatch):
    """Without the hub's client: by a command that there is, after which the folder that it names is the checkpoint."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    err = fails(capsys, here, "some/model-1B", *TRAIN[1:])
    (words,) = re.findall(r": (hf download some/model-1B --local-dir model-1B)\n", err)
    command = Path(sys.executable).parent / "hf"
    if command.exists():
        subprocess.run([command, *words.split()[1:], "--help"], check=True, capture_output=True, timeout=300)
    assert "Give the folder of a Hugging Face checkpoint" in fails(capsys, here, "nowhere", *TRAIN[1:])


@pytest.mark.grid
@pytest.mark.parametrize("limit", [100, 5_000, 100_000, 3_000_000])
def test_a_disk_that_is_full(here, capsys, limit):
    """However early the disk is full: exit code 4, one line, no checkpoint that looks whole and is not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code = finetune.main(list(TRAIN))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    err = capsys.readouterr().err
    assert code == 4
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert ("--resume out" if Path("out/config.yaml").exists() else "Free some space there, or name another") in err
    assert not (here / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EDQUOT, " Free some space there, or name another folder."),
        (errno.EROFS, " Change its permissions, or name another."),
        (errno.EIO, " Is its drive failing? See dmesg."),
        (errno.ELOOP, " Name another path."),
        (errno.ENAMETOOLONG, " Name another path."),
        (errno.EBADF, ""),
    ],
)
def test_a_disk_error_before_a_run_says_what_to_do(number, advice):
    error = OSError(number, "is wrong", "there")
    assert finetune.about_disk(error, Options()) == f"there: is wrong.{advice}"


def test_a_checkpoint_on_a_failing_drive_is_no_wrong_input(here, capsys, monkeypatch):
    def fails_to_read(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(config, "read_small", fails_to_read)
    assert "model/config.json cannot be read: Input/output error" in fails(capsys, here, *TRAIN, code=4)


NEAREST = {
    "sample": (["sample", "model", "--temprature", "1"], "unknown option --temprature. Did you mean --temperature?"),
    "eval": (["eval", "model", "--dta=x"], "unknown option --dta. Did you mean --data?"),
    "merge": (["merge", "model", "--oot", "x"], "unknown option --oot. Did you mean --out?"),
    "check": (["check", "--sotre", "x"], "unknown option --sotre. Did you mean --store?"),
    "cut short": (["check", "--rep", "x"], "unknown option --rep. Did you mean --report?"),
    "push": (
        ["push", "model", "a/b", "--private"],
        "unknown option --private. See trireme push --help.",
    ),
    "a word too many": (["merge", "model", "other", "--out", "x"], "other: unknown here. See"),
    "training": (
        [*TRAIN, "--lerning-rate", "1"],
        "unknown option --lerning-rate. Did you mean --learning-rate (= --lr)?",
    ),
}


@pytest.mark.parametrize(("argv", "says"), NEAREST.values(), ids=NEAREST)
def test_a_refused_option_names_the_nearest(here, capsys, argv, says):
    assert says in fails(capsys, here, *argv)


def test_dry_run_writes_nothing(here, capsys):
    before = tree(here)
    assert finetune.main([*TRAIN, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("Dry run: nothing written.\n")
    assert tree(here) == before


def heard() -> None:
    """In a child: stops are not ignored, as under nohup."""
    for number in STOPS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# ---------------------------------------------------------------- in a real terminal


def in_terminal(argv: list[str], when: str, key: bytes | None) -> tuple[int, str]:
    """Runs the command in a pseudo-terminal until its output matches `when`, then presses `key` (None: closes the
    terminal); (exit code, output)."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "finetune.py"), *argv],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: [fcntl.ioctl(0, termios.TIOCSCTTY, 0), heard()],  # noqa: PLW1509, no threads here
        env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"OMP_NUM_THREADS": "1"},
    )
    os.close(slave)
    seen, pressed, deadline = "", False, time.monotonic() + 120
    while True:
        if not select.select([master], [], [], max(0, deadline - time.monotonic()))[0] or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"still running after two minutes; it has said {seen[-500:]!r}")
        try:
            seen += os.read(master, 4096).decode(errors="replace")
        except OSError:  # the other side has closed
            break
        if re.search(when, seen) and not pressed:
            if key is None:
                break
            os.write(master, key)
            pressed = True
    os.close(master)
    try:
        return process.wait(timeout=60), seen
    finally:
        process.kill()


@pytest.mark.full
def test_ctrl_c_saves_and_resume_goes_on(here, capsys):
    argv = [*TRAIN[:4], "runs/first", "--seq-len", "32", "--batch-size", "2", "--val", "0.1", "--schedule", "constant"]
    code, output = in_terminal([*argv, "--max-steps", "100000"], r"step +[5-9]\d*/|step +\d[\d,]+/", b"\x03")
    lines = on_screen(output)
    assert code == 130
    assert "step 0  eval_loss 6." in output
    said = " ".join(" ".join(lines).split())
    assert "(before training)" in said
    assert len([line for line in lines if re.match(r"step +[\d,]+/100,000  loss", line)]) <= 2, "one live line"
    assert [line for line in lines if line.strip() == "python scripts/finetune.py --resume runs/first"], "to be copied"
    step = int(re.search(r"at step ([\d,]+)\. Resume: python", said)[1].replace(",", ""))

    assert finetune.main(["--resume", "--max-steps", str(step + 3)]) == 0, "the latest run, found by itself"
    said = capsys.readouterr().out
    assert f"resumed at step {step:,}" in said
    assert "check    reopened: 38 tensors" in said
    records = [json.loads(line) for line in Path("runs/first/log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, step + 4))
    assert Path("runs/first/loss.svg").exists()
    assert Path("runs/first/model.safetensors").exists()


COMMAND = [sys.executable, str(ROOT / "scripts" / "finetune.py")]
PIPED = ("model", "--data", "-", "--out", "out", "--seq-len", "64", "--batch-size", "2", "--max-steps", "2")


def reading(*argv: str) -> tuple[int, int]:
    """(the command's process, its standard error) when it reads more than a pipe holds from its standard input."""
    (given, give), (err, told) = os.pipe(), os.pipe()
    pid = fork()
    if not pid:
        code = 1
        try:
            for fd, at in ((given, 0), (os.open(os.devnull, os.O_WRONLY), 1), (told, 2)):
                os.dup2(fd, at)
            os.close(give)
            sys.stdin, sys.stdout, sys.stderr = (
                os.fdopen(fd, "r" if fd == 0 else "w", closefd=False) for fd in range(3)
            )
            heard()
            code = finetune.main(list(argv))
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(given)
    os.close(told)
    with os.fdopen(give, "wb", closefd=False) as pipe:
        pipe.write(b"a story of sailors\n" * 20_000)
    return pid, err


@pytest.mark.grid
@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("again", [False, True])
def test_asked_to_stop_while_it_reads_it_leaves_all_as_it_was(here, number, again):
    """From the first file on; also where the same command had been killed there before."""
    if again:
        killed, _ = reading(*PIPED)
        os.kill(killed, signal.SIGKILL)
        assert ended(killed) == -signal.SIGKILL
        assert Path("out/config.yaml").exists()
    before = tree(here)
    process, err = reading(*PIPED)
    assert Path("out/tokens").is_dir()
    os.kill(process, number)
    code = ended(process)
    kept = "interrupted. To continue: --resume out" if again else "interrupted before there was anything to save"
    assert (code, os.read(err, 1000).decode()) == (130, f"error: {kept}\n")
    assert {p for p in tree(here) if "stdin" not in p.name} == {p for p in before if "stdin" not in p.name}


def test_streams_that_are_closed_are_empty(monkeypatch):
    """As under `<&- >&-`; --data - and --chat read standard input."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    main.open_streams()
    with sys.stdin, sys.stdout, sys.stderr:
        assert (sys.stdin.isatty(), sys.stdin.buffer.read()) == (False, b"")
        assert sys.stdout.write("text") == 4


@pytest.mark.full
@pytest.mark.parametrize("how", ["the same command", "--resume"])
def test_what_was_killed_while_it_read_can_be_begun_again(here, capsys, monkeypatch, how):
    """What was in the pipe is lost; it is not taken for all of it."""
    process, _ = reading(*PIPED)
    os.kill(process, signal.SIGKILL)
    ended(process)
    with open("stories.txt") as redirected:
        monkeypatch.setattr(sys, "stdin", redirected)
        assert "holds a run. Continue it: --resume out" in said(capsys, [*PIPED, "--lr", "1e-3"], 2)
        assert finetune.main(list(PIPED) if how == "the same command" else ["--resume", "out"]) == 0
    assert Path("out/model.safetensors").exists()
    assert not Path("out/tokens").exists()


def said(capsys, argv: list[str], code: int) -> str:
    capsys.readouterr()
    assert finetune.main(argv) == code
    return capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.parametrize("argv", [["--resume", "out"], TRAIN])
@pytest.mark.parametrize("kept", [False, True])
def test_interrupted_before_the_first_step(here, argv, kept, capsys, monkeypatch):
    def interrupt(*given):
        if not kept:
            Path("out/config.yaml").unlink()
        raise KeyboardInterrupt

    (here / "out").mkdir()
    (here / "out" / "config.yaml").write_text("model: model\ndata: stories.txt\nout: out\n")
    monkeypatch.setattr(finetune, "run", interrupt)
    what = ". To continue: --resume out" if kept else " before there was anything to save"
    assert said(capsys, list(argv), 130) == f"error: interrupted{what}\n"


@pytest.mark.full
@pytest.mark.grid
@pytest.mark.parametrize(
    ("argv", "code"), [(TRAIN, 4), ((*TRAIN, "--dry-run"), 4), (("--demo",), 4), (("--help",), 0), (("--data", "x"), 2)]
)
def test_output_that_cannot_be_written(here, argv, code):
    """It is said of the output, not of a folder, and nothing is begun that nobody would hear of."""
    before = tree(here)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"TMPDIR": str(here)}
    streams = ([], subprocess.PIPE), (["-u"], subprocess.PIPE), ([], subprocess.STDOUT)
    for unbuffered, err in streams[: 3 if argv == TRAIN else 1]:
        with open("/dev/full", "w") as full:
            command = [COMMAND[0], *unbuffered, *COMMAND[1:], *argv]
            done = subprocess.run(command, stdout=full, stderr=err, env=environment, timeout=300)
        assert done.returncode == code
        if code == 4 and done.stderr is not None:
            assert done.stderr == b"error: standard output: No space left on device.\n"
        assert b"Exception ignored" not in (done.stderr or b"")
    assert tree(here) == before


def test_where_nobody_reads_on_the_exit_code_is_141(here, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert finetune.main([*TRAIN, "--dry-run"]) == 141


@pytest.mark.full
def test_a_finished_run_is_not_begun_again(here, capsys):
    assert finetune.main(list(TRAIN)) == 0
    capsys.readouterr()
    assert "that run is finished" in fails(capsys, here, "--resume", "out")


@pytest.mark.full
def test_a_hang_up_saves_too(here):
    """The terminal goes away in the middle of a run."""
    code, _ = in_terminal([*TRAIN[:-1], "100000"], r"step +[\d,]+/", None)
    assert code == 130
    assert list(Path("out/store").glob("snapshot-*"))


@pytest.mark.full
def test_where_one_block_at_a_time_fits_evaluations_and_samples_fit_too(here, capsys):
    """The planner's own plan with a single slot for weights; what it says and leaves is as with room for everything."""
    argv = ["model", "--data", "stories.txt", "--val", "0.1", "--seq-len", "64", "--batch-size", "2", "--lr", "3e-3"]
    argv += ["--max-steps", "4", "--eval-every", "2", "--save-every", "2", "--micro-batch", "1", "--ram", "1GiB"]
    small = [*argv, "--out", "small", "--gpu-memory", "5400KiB"]
    plan = job.prepare(parse([*small, "--dry-run"])).plan
    assert plan.window == 1
    assert not plan.halves
    assert {u.weights for u in plan.units[1:-1]} == {"host"}
    assert finetune.main(small) == 0
    assert finetune.main([*argv, "--out", "large"]) == 0
    kept = lambda r: {key: r.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")}
    logs = [[kept(json.loads(line)) for line in (here / out / "log.jsonl").open()] for out in ("small", "large")]
    assert logs[0] == logs[1]
    assert sum(r["eval_loss"] is not None for r in logs[0]) == 3
    assert (here / "small" / "model.safetensors").read_bytes() == (here / "large" / "model.safetensors").read_bytes()

"""Mistakes of users: each ends in one line that names the culprit, with its exit code; what the line advises works."""

import fcntl
import json
import re
import shlex
import shutil
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command import fails, write

from trireme.engine.plan import Limits, Plan, UnitPlan
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.run import cli
from trireme.models.config import read_config

RUN, SMALL = "model --data stories.txt", "--seq-len 64 --max-steps 1 --batch-size 2"
# Words of the command, exit code, what the line must name, and words that go on; None: those without the option that a
# line says to leave out, "": none. What is wrong here is seen before OWNER/NAME is looked for on the hub.
REFUSED = [
    ("", 2, "no checkpoint", None),
    ("model", 2, "--data", f"{RUN} {SMALL}"),
    ("modle --data stories.txt", 2, "modle.*model", f"{RUN} {SMALL}"),
    (f"{RUN} --tokenizer full", 2, "--tokenizer full.*tokenizer.json", None),
    ("--config nowhere.yaml", 2, "nowhere.yaml", None),
    ("--config again.yaml", 2, "again.yaml: resume.*trireme --resume", None),
    ("OWNER/NAME --data storis.txt", 2, "storis.txt", None),
    ("OWNER/NAME --data stories.txt --val nowhere.txt", 2, "nowhere.txt", None),
    ("OWNER/NAME --data stories.txt --out full", 2, "--out full", ""),
    ("OWNER/NAME --data stories.txt --adapter nowhere", 2, "--adapter nowhere", None),
    ("OWNER/NAME --data stories.txt --chat-template nowhere", 2, "--chat-template nowhere", None),
    ("OWNER/NAME --data stories.txt --beta 0.1", 2, "--beta is for --method", ""),
    (f"{RUN} --out stories.txt", 2, "stories.txt is not an empty folder", None),
    (f"{RUN} --out full", 2, "--out full is not an empty folder", f"{RUN} {SMALL}"),
    ("stories.txt --data stories.txt", 2, "stories.txt is a file", None),
    (f"{RUN} --store busy {SMALL}", 2, "busy.*in use by.*another", f"{RUN} {SMALL}"),
    (f"{RUN} --store stories.txt {SMALL}", 2, "stories.txt.*another", f"{RUN} {SMALL}"),
    ("gguf --data stories.txt", 2, "gguf holds GGUF", None),
    (f"{RUN} --lora", 2, "--lora 16 is usual", f"{RUN} --lora 16 {SMALL}"),
    (f"{RUN} --loar 8", 2, "loar.*--lora", f"{RUN} --lora 8 {SMALL}"),
    (f"{RUN} --batch-size 0", 2, "--batch-size", None),
    (f"{RUN} --warmup 1.5", 2, "--warmup", None),
    (f"{RUN} --schedule cosin", 2, "--schedule.*cosine", None),
    (f"{RUN} --save-every 30 minutes", 2, "minutes.*30min", None),
    (f"{RUN} --seq-len 4096", 2, "--seq-len 4096.*--rope-factor 8", None),
    ("--demo --data stories.txt", 2, "--demo.*--data", f"model --data stories.txt {SMALL}"),
    (f"{RUN} --lora-alpha 16", 2, "--lora-alpha.*--lora 16", f"{RUN} --lora-alpha 16 --lora 16 {SMALL}"),
    (f"{RUN} --top-k 8", 2, "--top-k.*--teacher", None),
    (f"{RUN} --lora 4 --freeze *embed*", 2, "--lora does not go with --freeze", None),
    (f"{RUN} --lora 100000", 2, "rank", None),
    (f"{RUN} --lora 4 --lora-targets query", 2, "query", None),
    (f"{RUN} --lora 4 --adapter model", 2, "--adapter.*--lora|--lora.*--adapter", None),
    (f"{RUN} --merge", 2, "--merge.*--lora 16", f"{RUN} --merge --lora 16 {SMALL}"),
    (f"{RUN} --freeze *q_porj*", 2, "q_porj.*q_proj", None),
    (f"{RUN} --train lm_head*", 2, "lm_head.*model.embed", None),
    (f"{RUN} --merge-aware", 2, "--merge-aware.*--lora 16", None),
    (f"{RUN} --lora 4 --merge-aware", 2, "--merge-aware.*packed", f"{RUN} --lora 4 {SMALL}"),
    ("broken --data stories.txt", 2, "broken/model.safetensors", None),
    (f"{RUN} --router-aux 0.1", 2, "--router-aux.*no experts", None),
    (f"{RUN} --export best", 2, "--export.*--val", f"{RUN} --export best --val 0.2 {SMALL}"),
    (f"{RUN} --eval-every 1", 2, "--eval-every.*--val", None),
    (f"{RUN} --method classify", 2, "label|class", None),
    (f"{RUN} --method classify --labels A", 2, "--labels A,B", None),
    (f"{RUN} --method dpo --long split", 2, "--long split", None),
    (f"{RUN} --store a,a", 2, "--store a,a", None),
    (f"{RUN} --store out --out out", 2, "--store out", None),
    (f"{RUN} --rope-factor 2 --lora 4", 2, "--rope-factor.*--merge", f"{RUN} --rope-factor 2 --lora 4 --merge {SMALL}"),
    (f"{RUN} --gpus 9", 2, "--gpus 9", None),
    (f"{RUN} --device cuda", 2, "cuda|CUDA", None),
    (f"{RUN} --assume gpu=rtx4090,ram=64GiB", 2, "--assume.*--dry-run", f"{RUN} --dry-run"),
    ("--shape qwen3-8b", 2, "--shape.*--dry-run", "--shape qwen3-8b --dry-run --assume gpu=h200,ram=500GiB"),
    ("--resume nowhere", 2, "nowhere", None),
    ("--resume", 2, "no unfinished run in runs/", None),
    (f"{RUN} --resume x --out y", 2, "--out: a resumed run has its own", ""),
    ("model other --data stories.txt", 2, "other was not expected", None),
    ("chat model", 2, "model was not expected.*sample", None),
    (f"{RUN} --log mlflow", 2, "--log.*mlflow", None),
    (f"{RUN} --plan stories.txt", 2, "stories.txt.*plan", None),
    (f"{RUN} --chat-template-kwargs thinking", 2, "--chat-template-kwargs.*JSON", None),
    (f"{RUN} --optimizer lion", 2, "optimizer", None),
    (f"{RUN} --ram 1MiB", 3, "--ram|RAM", None),
    ("model --data pairs.jsonl", 2, "--method dpo|--method", f"model --data pairs.jsonl --method dpo {SMALL}"),
    ("eval model", 2, "--data", f"eval {RUN} --seq-len 64"),
]  # fmt: skip


@pytest.fixture
def place(here):
    """A folder with things that are mistaken for others."""
    Path("full").mkdir()
    write("full/thing", "x")
    Path("gguf").mkdir()
    shutil.copy("model/config.json", "gguf")
    write("gguf/model-q4.gguf", b"GGUF")
    shutil.copytree("model", "broken")
    write("broken/model.safetensors", b"x" * 100)
    write("again.yaml", "model: model\ndata: stories.txt\nresume_from_checkpoint: out\n")
    rows = [dict(prompt=f"{i} is", chosen=f" {i}", rejected=f" {i + 1}") for i in range(20)]
    write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    Path("busy").mkdir()
    with Path("busy/store.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield here


def without(words: list[str], said: str) -> list[str] | None:
    """The words without the option that a line begins with, if its advice is to leave that out."""
    named = re.match(r"error: (--[a-z-]+)", said)
    if not named or not re.search(r"[Ll]eave (it|--out|one of them) out", said):
        return None
    at = next(n for n, word in enumerate(words) if word.partition("=")[0] == named[1])
    takes = "=" not in words[at] and at + 1 < len(words) and not words[at + 1].startswith("--")
    return [*words[:at], *words[at + 1 + takes :], *SMALL.split()]


@pytest.mark.parametrize(("words", "code", "culprit", "way"), REFUSED, ids=[words or "-" for words, *_ in REFUSED])
def test_a_mistake_is_one_line_that_names_it(place, capsys, words, code, culprit, way):
    said = fails(capsys, place, *shlex.split(words), code=code)
    assert re.search(culprit, said), said


@pytest.mark.full
@pytest.mark.parametrize(("words", "code", "culprit", "way"), REFUSED, ids=[words or "-" for words, *_ in REFUSED])
def test_what_a_mistakes_line_advises_works(place, capsys, words, code, culprit, way):
    said = fails(capsys, place, *shlex.split(words), code=code)
    corrected = without(shlex.split(words), said) if way is None else shlex.split(way)
    if corrected:
        assert cli.main(corrected) == 0, capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "machine", "advice"),
    [
        ("", "gpu=4GiB,ram=64GiB,ssd=4TB", r"(gpu)=4GiB.*GPU with ([\d.]+) GiB more"),
        ("--lora 16", "gpu=rtx4090,ram=8GiB,ssd=1TB", r"(ram)=8GiB.*--ram by ([\d.]+) GiB"),
        ("", "gpu=rtx4090,ram=64GiB", r"(ram)=64GiB.*ram to ([\d.]+)GiB"),
    ],
)
def test_a_machine_of_the_advised_size_is_enough(capsys, options, machine, advice):
    words = ["--shape", "llama-3.3-70b", "--dry-run", *options.split(), "--assume"]
    assert cli.main([*words, machine]) == 3
    part, amount = re.search(advice, f"{machine} {capsys.readouterr().err}", re.DOTALL).groups()
    now = float(re.search(rf"{part}=(\d+)", machine)[1])
    enough = float(amount) + now * ("ram to" not in advice)
    larger = machine.replace(f"{part}={now:.0f}GiB", f"{part}={enough:.2f}GiB")
    assert cli.main([*words, larger]) == 0, capsys.readouterr().err


REPORTS = yaml.safe_load((Path(__file__).parent / "reports.yaml").read_text())


@pytest.mark.full
@pytest.mark.parametrize("report", REPORTS, ids=[report["command"] for report in REPORTS])
def test_a_report_has_its_labels_in_order(capsys, report):
    assert cli.main(report["command"].split()) == report["code"]
    lines = "".join(capsys.readouterr()).splitlines()
    below = lambda line: "row" if re.match(r" {11}\w", line) else "+"
    labels = [below(line) if line.startswith(" ") else re.split(r"[\s:]", line)[0] for line in lines]
    assert [label for label, _ in groupby(labels)] == report["labels"].split()


@pytest.mark.full
def test_a_plan_that_does_not_suit_the_run_is_refused(here, capsys):
    plan = simple_plan(read_config(Path("model")), Limits(1 << 30, 1 << 30), Wanted(((128, 1),), dtype="F32"))
    words = f"{RUN} {SMALL} --plan plan.json".split()
    for change, more, culprit in (
        ({"tokens": 32}, "", "--seq-len"), ({"tokens": 64}, "", "--batch-size"), ({}, "--gpu-memory 5MiB", "needs"),
    ):  # fmt: skip
        write("plan.json", json.dumps(asdict(plan) | change))
        assert culprit in fails(capsys, here, *words, *more.split(), code=2)
    write("plan.json", json.dumps(asdict(plan)))
    assert cli.main(words) == 0, capsys.readouterr().err


@pytest.mark.full
def test_a_run_that_improves_nothing_ends_early(here):
    words = f"{RUN} {SMALL} --max-steps 9 --lr 1e-30 --val 0.2 --eval-every 1 --patience 2 --out out"
    assert cli.main(words.split()) == 0
    records = [json.loads(line) for line in Path("out/log.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in records if "loss" in record) == 2


@pytest.mark.full
def test_what_does_not_fit_is_offered_otherwise(here, capsys):
    """The options that the line offers fit."""
    words = "--shape llama-3.1-8b --dry-run --assume gpu=rtx4090,ram=16GiB"
    assert cli.main(words.split()) == 3
    said = capsys.readouterr().err
    offer = re.search(r"This fits: ([^,]*)", said)
    assert offer, said
    assert cli.main([*words.split(), *offer[1].split()]) == 0


@pytest.mark.full
def test_the_balance_loss_needs_all_micro_batches_together(here, capsys):
    words = "--shape qwen3-30b --lora 16 --base nf4 --batch-size 256 --seq-len 2048 --assume gpu=rtx5090,ram=24GiB"
    balanced = [*words.split(), "--dry-run", "--router-aux", "0.01"]
    assert cli.main([*words.split(), "--dry-run"]) == 0
    assert "one after the other" in capsys.readouterr().out
    assert cli.main(balanced) == 3
    capsys.readouterr()
    write("plan.json", json.dumps(asdict(Plan((UnitPlan(),) * 50, 16384, 32, accumulate=True))))
    assert "--router-aux" in fails(capsys, here, *balanced, "--plan", "plan.json", code=2)


@pytest.mark.full
def test_a_batch_larger_than_the_data_is_no_reason_to_refuse(here, capsys):
    """A step has no more sequences than there are."""
    Path("few.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 3)
    words = "model --data few.jsonl --seq-len 64 --max-steps 1 --batch-size 8192 --gpu-memory 20MiB --ram 24MiB"
    assert cli.main(words.split()) == 0, capsys.readouterr().err


@pytest.mark.full
def test_data_without_a_tokenizer_is_counted_by_its_bytes(here, capsys):
    words = "--shape qwen3-8b --data stories.txt --dry-run --assume gpu=h200,ram=500GiB"
    assert cli.main(words.split()) == 0
    tokens = Path("stories.txt").stat().st_size / 4
    assert f"about {tokens / 1000:.3g}k tokens" in capsys.readouterr().out


@pytest.mark.full
def test_without_out_each_run_has_its_number(here, capsys):
    for name in ("model", "model-2", "model-3"):
        assert cli.main(["model", "--data", "stories.txt", *SMALL.split()]) == 0
        assert f"runs/{name}" in capsys.readouterr().out
        assert Path("runs", name, "model.safetensors").exists()
    assert cli.main(["--config", "runs/model-2/config.yaml"]) == 0
    assert Path("runs/model-4/model.safetensors").read_bytes() == Path("runs/model-2/model.safetensors").read_bytes()


@pytest.mark.full
def test_trackers_get_the_numbers_of_the_log(here, capsys, monkeypatch):
    """Stand-ins for writers of packages that the tests do not need."""
    board, runs = [], []
    writer = SimpleNamespace(add_scalar=lambda *at: board.append(at), close=lambda: board.append("closed"))
    run = SimpleNamespace(log=lambda record, step: runs.append(record), finish=lambda: runs.append("finished"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda _: writer))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    words = f"{RUN} --seq-len 64 --max-steps 2 --batch-size 2 --log tensorboard,wandb --out out"
    assert cli.main(words.split()) == 0, capsys.readouterr().err
    records = [json.loads(line) for line in Path("out/log.jsonl").read_text().splitlines()]
    steps = [record["loss"] for record in records if "loss" in record]
    assert (board.pop(), runs.pop()) == ("closed", "finished")
    assert [value for name, value, _ in board if name == "loss"] == steps
    assert [record["loss"] for record in runs if "loss" in record] == steps
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    assert "wandb" in fails(capsys, here, *words.replace("--out out", "").split(), code=2)


@pytest.mark.full
def test_a_step_that_diverges_ends_the_run_and_is_not_saved(here, capsys):
    """The snapshot before it is resumed, also from a store that has moved, and without its log."""
    words = f"{RUN} --seq-len 64 --max-steps 9 --batch-size 2 --warmup 0 --schedule constant --save-every 1 --store s"
    assert cli.main([*words.split(), "--out", "out", "--lr", "1e9"]) == 2
    step = re.search(r"error: step (\d+): .*snapshot.* --lr", capsys.readouterr().err)
    assert step is not None
    Path("s").rename("moved")
    resume = ["--resume", "out", "--max-steps", str(int(step[1]) - 1)]
    assert "--store DIR" in fails(capsys, here, *resume, code=2)
    Path("out/log.jsonl").write_text("")
    assert cli.main([*resume, "--store", "moved"]) == 0
    assert "log.jsonl is shorter" in capsys.readouterr().out

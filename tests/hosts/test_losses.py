"""Runs with preferences and with weighted rows on several hosts: the files of one."""

import re
from pathlib import Path

import numpy as np
import pytest
from runs import NARROW, HostRun, alone, hold, losses, make_small, text, write_rows

from trireme.engine.run import cli, job

DATA = {"sft": "weighted", "kto": "labels"}  # pairs otherwise


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a checkpoint and rows of each kind."""
    where, random = make_small(tmp_path_factory.mktemp("losses"), **NARROW), np.random.default_rng(0)
    words = lambda: text(random, 2, 9)
    weight = lambda: float(random.choice([1.0, 0.5, 2.0]))
    rows = {
        "weighted": lambda: dict(prompt=words(), completion=" " + words(), weight=weight()),
        "pairs": lambda: dict(prompt=words(), chosen=" " + words(), rejected=" " + words(), weight=weight()),
        "labels": lambda: dict(prompt=words(), completion=" " + words(), label=bool(random.integers(2))),
    }
    for name, make in rows.items():
        write_rows(where / f"{name}.jsonl", (make() for _ in range(40)))
    for method in ("sft", "dpo"):  # so that hosts, which are forked, know what a block takes
        job.make(cli.parse(command(where, where / "planned", method))[1])
    return where


def command(folder: Path, out: Path, method: str, *more: str) -> list[str]:
    data = folder / f"{DATA.get(method, 'pairs')}.jsonl"
    return [
        *(str(folder / "checkpoint"), "--data", str(data), "--out", str(out), "--method", method, "--seq-len", "64"),
        *("--batch-size", "3", "--micro-batch", "1", "--max-steps", "4", "--lr", "3e-3", "--save-every", "2"),
        *("--val", "0.25", "--eval-every", "2", "--device", "cpu", "--ram", "1GiB", "--gpu-memory", "64MiB", *more),
    ]


def same(out: Path, whole: Path) -> None:
    """The weights, and all that the log says of losses and rewards."""
    assert losses(out) == losses(whole)
    said = r'"(?:eval_)?(?:loss|rewards/\w+|logps/\w+|kl|accuracy|margin|\w+_reward)": [^,}]+'
    assert re.findall(said, (out / "log.jsonl").read_text()) == re.findall(said, (whole / "log.jsonl").read_text())
    files = lambda where: {path.name: path.read_bytes() for path in where.glob("*.safetensors")}
    assert files(out) == files(whole) != {}


@pytest.mark.full
@pytest.mark.parametrize(("method", "hosts"), [("kto", 4)])
def test_hosts_have_the_losses_of_one(folder, method, hosts):
    """Four hosts: of three micro-batches, so one has none."""
    whole, out = folder / f"{method}-whole", folder / f"{method}-{hosts}"
    assert alone(command(folder, whole, method)) == [0]
    run = HostRun(out, hosts, command(folder, out, method))
    assert run.ended() == [0] * hosts, run.errors()
    same(out, whole)
    there = [{path.name for path in each.iterdir()} for each in (out, whole)]
    assert there[0] == there[1]


@pytest.mark.full
@pytest.mark.parametrize(("method", "hosts", "options"), [("dpo", 3, ("--lora", "4")), ("sft", 2, ())])
def test_a_run_with_a_best_goes_on(folder, method, hosts, options):
    """Host 0 alone has the best weights and the reference's numbers."""
    name = f"on-{method}-{hosts}"
    whole, out = folder / f"{name}-whole", folder / name
    assert alone(command(folder, whole, method, *options)) == [0]
    run = HostRun(out, hosts, command(folder, out, method, *options), lambda host: host < hosts - 1 or hold(3))
    run.reach(2)
    run.kill(hosts - 1, 15)
    assert run.ended() == [130] * hosts, run.errors()
    again = HostRun(out, hosts, ["--resume", str(out)])
    assert again.ended() == [0] * hosts, again.errors()
    same(out, whole)


@pytest.mark.full
def test_commands_of_one_host_say_so(tmp_path):
    run = HostRun(tmp_path / "out", 2, ["eval", str(tmp_path), "--data", "y"])
    assert run.ended() == [2, 2]
    assert "eval runs on one host" in run.errors()[0]

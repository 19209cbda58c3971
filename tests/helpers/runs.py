"""Runs of a small checkpoint in processes of their own, to be stopped and resumed."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import stories
from engines import fork

from trireme.engine.run import cli, loop
from trireme.engine.run.loop import Interrupted, train
from trireme.engine.run.options import Options, every
from trireme.engine.run.signals import Stop

LIMITS = {"ssd": (14 << 20, 7 << 20), "ram": (14 << 20, 1 << 30), "gpu": (1 << 30, 1 << 30)}
LIMITS["halves"] = 5 << 20, 7 << 20  # on the GPU no room for whole blocks
STEPS = 6
WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "old", "red", "house", "by", "sea"]


def text(random: np.random.Generator, few: int, many: int) -> str:
    """Of `few` words or more, fewer than `many`."""
    return " ".join(random.choice(WORDS, random.integers(few, many)))


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


NARROW = dict(width=32, ffn=48, layers=3, heads=2, kv_heads=1)  # sizes of a checkpoint whose steps are fast


def make_small(folder: Path, name: str = "checkpoint", **sizes: int) -> Path:
    """The folder, with a checkpoint `name` and its text, stories.txt."""
    stories.make_text(folder / "stories.txt", 40, seed=1)
    stories.make_checkpoint(folder / name, folder / "stories.txt", seed=1, **sizes)
    return folder


def options(folder: Path, out: Path, where: str, **more) -> Options:
    gpu, ram = LIMITS[where]
    usual = dict(
        model=str(folder / "checkpoint"), data=(str(folder / "stories.txt"),), out=str(out), seq_len=64, batch_size=4,
        max_steps=STEPS, lr=3e-3, save_every=every("2"), gpu_memory=gpu, ram=ram, device="cpu",
    )  # fmt: skip
    return Options(**usual | more)


def tuned(folder: Path, out: Path | str, rows: str, **more) -> Options:
    """Three steps of two rows, all in GPU memory, an evaluation before and after each."""
    given = dict(
        data=(str(folder / rows),), val="0.25", max_steps=3, eval_every=every("1"), warmup=0.0, schedule="constant",
        batch_size=2, lr=5e-4,
    )  # fmt: skip
    return replace(options(folder, folder / out, "gpu"), **given | more)


def child(opts: Options) -> int:
    """Starts a run in a process of its own; exit code 0 when done, 130 when interrupted and saved."""
    pid = fork()
    if not pid:
        go(opts)
    return pid


def go(opts: Options) -> NoReturn:
    """The run, and the end of the process."""
    code = 1
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            train(opts)
        code = 0
    except Interrupted:
        code = 130
    except BaseException as error:
        os.write(2, f"child: {error!r}\n".encode())
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def records(out: Path | str, key: str = "") -> list[dict]:
    """What a run's log has, or those records with a key."""
    found = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    return [record for record in found if not key or key in record]


def losses(out: Path) -> dict[int, tuple[float, float]]:
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records(out, "loss")}


def weights(out: Path | str) -> bytes:
    return Path(out, "model.safetensors").read_bytes()


def stopped(run: Options, step: int, monkeypatch) -> None:
    """Starts a run that is asked to stop in a step, and saves."""
    real = loop.train_step

    def asked(e, micro, number, *more):
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(e, micro, number, *more)

    with monkeypatch.context() as m, pytest.raises(Interrupted):
        m.setattr(loop, "train_step", asked)
        train(run)


def hold(step: int, change: Callable[[object, str, object], None] = setattr) -> None:
    """Runs begun from now on wait in a step to be killed, or asked to stop: however late that comes.

    `change`: monkeypatch.setattr, where this process goes on.
    """
    real, ask, asked = loop.train_step, Stop.ask, threading.Event()

    def waits(e, micro, number, *more):
        if number == step:
            asked.wait(120)
        return real(e, micro, number, *more)

    def heard(stop, number):
        ask(stop, number)
        asked.set()

    change(loop, "train_step", waits)
    change(Stop, "ask", heard)


def wait_for(out: Path | str, step: int, why: Callable[[], object] = str) -> None:
    """Waits until a run has logged a step; `why`: what is said if it never does."""
    end = time.monotonic() + 120
    while not Path(out, "log.jsonl").exists() or max(losses(Path(out)), default=0) < step:
        assert time.monotonic() < end, why()
        time.sleep(0.01)


def free_port() -> int:
    """Of this machine, free a moment ago."""
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        return first.getsockname()[1]


class Hosts:
    """`hosts` children with the environment of hosts: `body(host)` is the exit code."""

    def __init__(self, hosts: int, body: Callable[[int], int]):
        self.port = free_port()
        self.pids = [self.start(host, hosts, body) for host in range(hosts)]

    def start(self, host: int, hosts: int, body: Callable[[int], int]) -> int:
        pid = fork()
        if pid:
            return pid
        code = 1
        try:
            os.environ |= {
                "RANK": str(host),
                "WORLD_SIZE": str(hosts),
                "LOCAL_RANK": str(host),
                "LOCAL_WORLD_SIZE": str(hosts),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
            }
            code = body(host)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def codes(self) -> list[int]:
        """Exit codes, of killed ones minus the signal."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


class HostRun:
    """A run's hosts, as the command of `argv`, or argv(host); `changed(host)` is called in each before it begins."""

    def __init__(self, out: Path, hosts: int, argv, changed=lambda host: None):
        self.out, self.said = out, [Path(f"{out}.said-{host}") for host in range(hosts)]
        argvs = argv if callable(argv) else lambda host: argv

        def body(host: int) -> int:
            fd = os.open(self.said[host], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for at in (1, 2):
                os.dup2(fd, at)
            sys.stdout, sys.stderr = (os.fdopen(at, "w", buffering=1, closefd=False) for at in (1, 2))
            changed(host)
            return cli.main(argvs(host))

        self.processes = Hosts(hosts, body)

    def ended(self) -> list[int]:
        """Exit codes."""
        return self.processes.codes()

    def reach(self, step: int) -> None:
        """Waits for a step in host 0's log."""
        wait_for(self.out, step, self.errors)

    def kill(self, host: int, how: int) -> None:
        os.kill(self.processes.pids[host], how)

    def errors(self) -> list[str]:
        """The last line of each host that begins so."""
        found = [re.findall(r"^error: .*$", path.read_text(), re.MULTILINE) for path in self.said]
        return [lines[-1] if lines else "" for lines in found]


def alone(argv: list[str]) -> list[int]:
    """The exit code of the command on one host. In a process of its own: forked ones do not like what it leaves."""
    return HostRun(Path(argv[argv.index("--out") + 1]), 1, argv).ended()


# ---------------------------------------------------------------- finished runs, of tests/finished

PAIRS = [dict(prompt=f"the cat {i}", chosen=" sat on the mat", rejected=" ran to the sea") for i in range(8)]
CLASSES = [dict(text=f"the {word} {i}", label=word) for i in range(6) for word in ("cat", "dog")]
ALPACA = [
    dict(instruction=f"Name the {word}", input=f"{i}" * (i % 2), output=f"the {word} ran")
    for i, word in enumerate(("cat", "dog", "sea", "mat"))
] * 2
FINISHED = {  # options of each run
    "full": dict(rows="stories.txt"),
    "alpaca": dict(rows="alpaca.jsonl", seq_len=256),
    "alpaca lora": dict(rows="alpaca.jsonl", seq_len=256, lora=4, merge=True),
    "lora": dict(rows="stories.txt", lora=4, merge=True),
    "dpo": dict(rows="pairs.jsonl", method="dpo", beta=0.3),
    "classify": dict(rows="classes.jsonl", method="classify"),
    "classify lora": dict(rows="classes.jsonl", method="classify", lora=4),
    "reward": dict(rows="pairs.jsonl", method="reward", center_rewards_coefficient=0.2),
}

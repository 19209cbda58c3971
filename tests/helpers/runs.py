"""Runs of a small checkpoint in processes of their own, to be stopped and resumed."""

import atexit
import json
import os
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest
from engines import fork

from trireme.engine.run import demo, loop
from trireme.engine.run.loop import Interrupted
from trireme.engine.run.options import Options, every
from trireme.engine.run.signals import Stop
from trireme.engine.run.train import finetune

LIMITS = {"ssd": (14 << 20, 7 << 20), "host": (14 << 20, 1 << 30), "gpu": (1 << 30, 1 << 30)}
LIMITS["halves"] = 5 << 20, 7 << 20  # on the GPU no room for whole blocks
STEPS = 6


def make_small(folder: Path, name: str = "checkpoint") -> Path:
    """The folder, with a checkpoint `name` and its text, stories.txt."""
    demo.make_text(folder / "stories.txt", 40, seed=1)
    demo.make_checkpoint(folder / name, folder / "stories.txt", seed=1)
    return folder


def options(folder: Path, out: Path, where: str, **more) -> Options:
    gpu, ram = LIMITS[where]
    return Options(
        model=str(folder / "checkpoint"), data=(str(folder / "stories.txt"),), out=str(out), seq_len=64, batch_size=4,
        max_steps=STEPS, lr=3e-3, save_every=every("2"), gpu_memory=gpu, ram=ram, device="cpu", **more,
    )  # fmt: skip


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
            finetune(opts)
        code = 0
    except Interrupted:
        code = 130
    except BaseException as error:
        os.write(2, f"child: {error!r}\n".encode())
    finally:
        os._exit(code)


def finished(out: Path) -> bool:
    """Whether the run was killed when all that was left to do was to remove its store."""
    return (out / "model.safetensors").exists() and not (out / "store" / "store.id").exists()


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def losses(out: Path) -> dict[int, tuple[float, float]]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if "loss" in r}


def stopped(run: Options, step: int, monkeypatch) -> None:
    """Starts a run that is asked to stop in a step, and saves."""
    real = loop.train_step

    def asked(e, micro, number, *more):
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(e, micro, number, *more)

    with monkeypatch.context() as m, pytest.raises(Interrupted):
        m.setattr(loop, "train_step", asked)
        finetune(run)


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


def free_port() -> int:
    """Of this machine, free a moment ago, and the next as well."""
    while True:
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            return first.getsockname()[1]


@cache
def config_home() -> str:
    """A folder for the secret of hosts, as ~/.config, of this process."""
    made = tempfile.TemporaryDirectory(prefix="trireme-config-")
    atexit.register(made.cleanup)
    return made.name


class Hosts:
    """`hosts` children with the environment of hosts: `body(host)` is the exit code."""

    def __init__(self, hosts: int, body: Callable[[int], int]):
        self.port, self.home = free_port(), os.environ.get("XDG_CONFIG_HOME") or config_home()
        self.pids = [self._start(host, hosts, body) for host in range(hosts)]

    def _start(self, host: int, hosts: int, body: Callable[[int], int]) -> int:
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
                "XDG_CONFIG_HOME": self.home,
            }
            code = body(host)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def codes(self) -> list[int]:
        """Exit codes, of killed ones minus the signal."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

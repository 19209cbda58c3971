"""Kills runs before any of their file events or at any instant, carries on as their messages say, and compares the end.

A run is a child forked from this process, which has everything imported: a trial takes about two seconds. The same
bench flips single bits in the files of a stopped run.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import stories
from engines import fork, write_plan
from runs import NARROW

from trireme.engine.plan import UnitPlan
from trireme.engine.run import cli, evaluate, job, loop, opening
from trireme.storage.folders import FINISHED

FAR = UnitPlan("ssd", "ssd", x="ssd", saved=(("resid", "ssd"),))


class Place(NamedTuple):
    """Where all units are at home, how wide their moments are, and what becomes of the best weights."""

    unit: UnitPlan
    plan: dict[str, Any]  # what else the run's plan says
    options: tuple[str, ...] = ()
    best: int = 8  # the evaluated step that is the best
    data: str = "text.txt"


# Evaluations are of steps 0, 3, 6 and 8, the last one after the snapshot of step 8; otherwise where options say so.
PLACES = {
    "ssd 32": Place(FAR, dict(adam_bits=32, dtype="BF16", late_moments=("ram", "ssd"), gradients="ssd")),
    "ssd 8": Place(FAR, dict(adam_bits=8, gradients="ssd"), ("--export", "best", "--keep", "2"), best=6),
    "host 32": Place(UnitPlan("ram", "ram"), dict(adam_bits=32), ("--export", "best", "--eval-every", "2")),
    "host 8": Place(UnitPlan("ram", "ram"), dict(adam_bits=8), ("--export-every", "3"), best=3),
    "gpu 16": Place(UnitPlan(), dict(adam_bits=16), ("--export", "best"), best=3),
}
# Runs that train a part of the model, its frozen rest on the SSD, or compare with what it was.
PARTS = {
    "adapters": Place(
        UnitPlan("ram", "ram", x="ssd", base="ssd"), {}, ("--lora", "4", "--merge", "--export", "best"), best=6
    ),
    "frozen": Place(replace(FAR, base="ssd"), dict(gradients="ssd"), ("--freeze", "*embed*,*layers.0.*"), best=6),
    "compared": Place(UnitPlan("ram", "ram"), {}, ("--method", "dpo", "--export", "best"), best=6, data="pairs.jsonl"),
    "packed": Place(UnitPlan("ram", "ram", base="ssd"), {}, ("--lora", "4", "--base", "nf4")),
    "rewards": Place(
        UnitPlan("ram", "ram"), {}, ("--method", "reward", "--export", "best"), best=6, data="pairs.jsonl"
    ),
    "classes": Place(FAR, dict(gradients="ssd"), ("--method", "classify"), data="classes.jsonl"),
}
EVERYWHERE = PLACES | PARTS
KINDS = EVERYWHERE | {"taught": Place(UnitPlan("ram", "ram"), {}, ("--teacher", "MODEL", "--top-k", "8"))}
TIMED = ("config.yaml", "log.jsonl", "report.html")  # files that hold times or paths
STOP = 5  # the step that a stopped run ends with: after a snapshot and the best checkpoint
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly however many there are
COMMANDS = 12  # more than any trial takes

# ---------------------------------------------------------------- one command in a process of its own


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (minus the signal that ended it), what it said, and its file events."""

    code: int
    said: str
    events: int
    last: str  # the name of the last event
    ending: int  # of the events those since its last step
    finished: int  # of these those before the store is said to be finished


def run(
    argv: list[str],
    inside: Path,
    place: Place,
    before: int = 0,
    late: int = 0,
    after: float | None = None,
    stop: int = 0,
    cache: Path | None = None,
) -> Ended:
    """Runs the command, killed before file event `before` under the folder `inside` (counted from 1), or event `late`
    since its last step, or after some seconds, or asked to stop in step `stop`. `cache`: the user's, if there is one.
    """
    note, said = mmap.mmap(-1, 64), tempfile.TemporaryFile()  # noqa: SIM115, gone with the process
    pid = fork()
    if not pid:
        _command(argv, place, stop, said.fileno(), lambda: watch_files(str(inside), before, late, note), cache)
    over = os.pidfd_open(pid)
    try:
        if after is not None and not select.select([over], [], [], after)[0]:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(over)
    said.seek(0)
    events, first, over, last = struct.unpack("iii52s", note[:])
    name, text = last.rstrip(b"\0").decode(), said.read().decode(errors="replace")
    return Ended(code, text, events, name, events - first if first else 0, over - first if over else 0)


def _command(
    argv: list[str], place: Place, stop: int, said: int, watch: Callable[[], None], cache: Path | None
) -> None:
    code = 1
    try:
        for fd in (1, 2):
            os.dup2(said, fd)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        opening.cache_folder = lambda: cache
        set_best(place.best)
        watch()
        if stop:
            _stop_in_step(stop)
        code = cli.main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def set_best(step: int) -> None:
    """Runs of this process evaluate best in a step, and sample one token."""
    evaluate.LONGEST = 0.0
    real, evaluates, steps = evaluate.Evaluator.loss, loop.Loop.evaluate, [0]

    def worse(*args):
        loss, metrics = real(*args)
        return loss + abs(steps[-1] - step), metrics

    loop.Loop.evaluate = lambda run: (steps.append(run.done.step), evaluates(run))[1]
    evaluate.Evaluator.loss = worse


def _stop_in_step(stop: int) -> None:
    real = loop.train_step

    def asked(e, micro, number, *more, **named):
        if number == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(e, micro, number, *more, **named)

    loop.train_step = asked


def watch_files(inside: str, fatal: int, late: int, note: mmap.mmap) -> None:
    """Counts what this process does to files under `inside`, and kills it before event `fatal`, or `late`."""
    numbers, ends, finish = itertools.count(1), [0, 0], loop.Loop.end

    def event(name: str, path, folder: int = -1) -> None:
        fd, path = (path, "") if isinstance(path, int) else (folder, os.fsdecode(path))
        try:
            place = os.path.join(os.readlink(f"/proc/self/fd/{fd}") if fd >= 0 else os.getcwd(), path)
        except OSError:  # a closed one: the call will say so
            return
        if place.startswith(inside):
            n = next(numbers)
            if path.endswith(FINISHED) and ends[0] and not ends[1]:
                ends[1] = n
            note[:] = struct.pack("iii52s", n, *ends, name.encode())
            if n == fatal or (late and ends[0] and n == ends[0] + late):
                os.kill(os.getpid(), signal.SIGKILL)

    def ending(run: loop.Loop) -> None:
        ends[0] = struct.unpack_from("i", note)[0]
        finish(run)

    def audited(name: str, args: tuple) -> None:
        if name == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) and not isinstance(args[0], int):
            event("open", args[0])
        elif name in ("os.rename", "os.link", "os.symlink"):
            event(name[3:], args[1])
        elif name in ("os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
            event(name[3:], args[0], args[-1] if name != "os.truncate" else -1)

    def told(name: str, call):
        def called(fd, *args):
            event(name, fd)
            return call(fd, *args)

        return called

    loop.Loop.end = ending
    sys.addaudithook(audited)  # the kernel's calls that no hook hears of:
    for name in ("fsync", "fdatasync", "posix_fallocate", "pwrite", "pwritev", "write"):
        setattr(os, name, told(name, getattr(os, name)))


# ---------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Whole:
    """What a run comes to that nobody disturbs: its files, its log, its file events, its seconds."""

    files: dict[str, bytes | None]
    records: list[tuple]
    events: int
    ending: int
    finished: int
    seconds: float


class Wholes(dict[str, Whole]):
    """What undisturbed runs come to, by kind: each is done when it is needed first."""

    def __init__(self, bench: Bench):
        super().__init__()
        self.bench = bench

    def __missing__(self, kind: str) -> Whole:
        out, began = self.bench.folder / f"whole {kind}", time.monotonic()
        ended = run(self.bench.command(kind, out), self.bench.folder, KINDS[kind])
        assert ended.code == 0, ended.said
        counts, seconds = (ended.events, ended.ending, ended.finished), time.monotonic() - began
        self[kind] = Whole(files_of(out), records_of(out), *counts, seconds)
        return self[kind]


class Bench:
    """A folder with a small model, its data, and a plan for each of KINDS."""

    def __init__(self, folder: Path):
        self.folder, self.whole = folder, Wholes(self)

    def command(self, place: str | None, out: Path, store: Path | None = None) -> list[str]:
        plan = ["--plan", str(self.folder / f"{place}.json")] if place else []
        of, model = KINDS[place] if place else None, str(self.folder / "model")
        data = of.data if of else "text.txt"
        return [
            *(model, "--data", str(self.folder / data), "--out", str(out), *plan),
            *("--seq-len", "16" if data == "pairs.jsonl" else "32", "--batch-size", "4", "--micro-batch", "2"),
            *("--max-steps", "8", "--lr", "0.03"),
            *("--schedule", "constant", "--val", "0.1", "--eval-every", "3", "--save-every", "2", "--device", "cpu"),
            *("--gpu-memory", "64MiB", "--ram", "64MiB"),
            *(("--store", str(store)) if store else ()),
            *(model if word == "MODEL" else word for word in (of.options if of else ())),
        ]

    def differs(self, place: str, out: Path) -> str:
        return difference(self.whole[place].files, self.whole[place].records, out)


def make_bench(folder: Path) -> Bench:
    """Makes model, data and plans."""
    bench = Bench(folder)
    stories.make_text(folder / "text.txt", 40, seed=1)
    pair = lambda i: dict(prompt=f"{i} is", chosen=f" {i}", rejected=f" {i + 1}")
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair(i))}\n" for i in range(60)))
    row = lambda i: dict(text=f"{i} is {i + i % 3}", label="abc"[i % 3])
    (folder / "classes.jsonl").write_text("".join(f"{json.dumps(row(i))}\n" for i in range(60)))
    sizes = NARROW | dict(layers=2, vocab=300)
    stories.make_checkpoint(folder / "model", folder / "text.txt", seed=1, **sizes)
    first = job.make(cli.parse(bench.command(None, folder / "planned"))[1]).plan
    for name, place in KINDS.items():
        end = replace(place.unit, saved=())
        units = (end, *(place.unit,) * (len(first.units) - 2), end)
        write_plan(replace(first, units=units, record=1 << 12, piece=1 << 12, **place.plan), folder / f"{name}.json")
    return bench


def files_of(folder: Path) -> dict[str, bytes | None]:
    """Every file below with its bytes, but for those of TIMED, and every folder."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() and p.name not in TIMED else None for p in paths}


def difference(expected: dict[str, bytes | None], records: list[tuple], out: Path) -> str:
    """What a run has left that the undisturbed one has not, or the other way round; empty where all is equal."""
    files = files_of(out)
    if names := expected.keys() ^ files.keys():
        return "left or lacking: " + ", ".join(sorted(names)[:4])
    if other := [name for name, content in expected.items() if files[name] != content]:
        return "other bytes in " + ", ".join(other)
    return "" if records_of(out) == records else "another log"


def records_of(out: Path) -> list[tuple]:
    """The numbers in a run's log that do not depend on time; none where it cannot be read."""
    try:
        records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        return [
            tuple(r.get(key) for key in ("step", "loss", "learning_rate", "grad_norm", "eval_loss")) for r in records
        ]
    except (OSError, ValueError, AttributeError):
        return []


@dataclass
class Trial:
    """A run that was killed: (the event before which, or an instant; how many had been), and what was wrong then."""

    seed: int
    place: str
    kills: list[tuple[str, int]] = field(default_factory=list)
    wrong: str = ""


def trial(bench: Bench, seed: int) -> Trial:
    """A run killed once, and up to two times more when it goes on. Seeds in a row spread the first kill evenly.

    After each kill the same command is given again, and then the one that the answer names.
    """
    dice, places = random.Random(seed), [*EVERYWHERE]
    made, own_store = Trial(seed, places[seed % len(places)]), dice.random() < 0.5
    shares = [seed * GOLDEN % 1, *(dice.random() for _ in range(dice.randint(0, 2)))]
    whole, folder = bench.whole[made.place], bench.folder / f"trial-{seed}"
    out, store = folder / "out", folder / "store" if own_store else None
    folder.mkdir()
    command = begin = bench.command(made.place, out, store)
    for _ in range(COMMANDS):
        how, share = {}, shares.pop(0) if shares else None
        if share is not None:
            how = dice.choice([
                dict(before=1 + int(share * whole.events)),
                dict(late=1 + int(share * whole.finished)),  # while it exports
                dict(late=1 + whole.finished + int(share * (whole.ending - whole.finished))),  # while it cleans up
                dict(after=share * whole.seconds),
            ])  # fmt: skip
        ended = run(command, folder, EVERYWHERE[made.place], **how)
        named = re.search(r"Continue it: --resume ([^\s;]+)", ended.said)
        if ended.code == -signal.SIGKILL:
            when = "instant" if "after" in how else f"late {ended.last}" if "late" in how else ended.last
            made.kills.append((when, ended.events))
            command = begin
        elif named and command is begin:
            command = ["--resume", named[1]]
        else:
            break
    if ended.code == 0 or re.search("is finished|holds a finished run", ended.said):
        made.wrong = bench.differs(made.place, out)
        if store and (left := [name for name in files_of(store) if not name.startswith("bases")]):  # for later runs
            made.wrong = made.wrong or "left in the store: " + ", ".join(sorted(left)[:4])
    else:
        made.wrong = f"{command[0]}: exit {ended.code}: {ended.said.strip().splitlines()[-1]}"
    if not made.wrong:
        shutil.rmtree(folder)
    return made


def merge_trial(bench: Bench, seed: int) -> Trial:
    """`merge` of a finished run's adapters, killed up to three times and given again until it has an end."""
    dice, made, place = random.Random(seed), Trial(seed, "merge"), EVERYWHERE["adapters"]
    folder, whole = bench.folder / f"merge-{seed}", bench.folder / "merged"
    assert bench.whole["adapters"].files
    command = lambda out: ["merge", str(bench.folder / "whole adapters"), "--out", str(out)]
    if "merge" not in bench.whole:
        begun = time.monotonic()
        ended = run(command(whole), whole, place)
        assert ended.code == 0, ended.said
        bench.whole["merge"] = Whole(files_of(whole), [], ended.events, 0, 0, time.monotonic() - begun)
    same, folder = bench.whole["merge"], folder / "out"
    folder.parent.mkdir()
    for share in (seed * GOLDEN % 1, *(dice.random() for _ in range(dice.randint(0, 2))), None):
        how: dict[str, Any] = {}
        if share is not None:
            instant = dice.random() < 0.3
            how = dict(after=share * same.seconds) if instant else dict(before=1 + int(share * same.events))
        ended = run(command(folder), folder, place, **how)
        if ended.code == -signal.SIGKILL:
            made.kills.append(("instant" if "after" in how else ended.last, ended.events))
    if ended.code and not (ended.code == 2 and "is there already" in ended.said):
        made.wrong = f"exit {ended.code}: {ended.said.strip().splitlines()[-1]}"
    elif files_of(folder) != same.files:
        made.wrong = "other files"
    else:
        shutil.rmtree(folder.parent)
    return made


def stopped(bench: Bench, place: str) -> Path:
    """The folder of a run that was asked to stop in step STOP: out, store, cache."""
    folder = bench.folder / f"stopped {place}"
    if not folder.exists():
        folder.mkdir()
        command, where = bench.command(place, folder / "out", folder / "store"), KINDS[place]
        ended = run(command, folder, where, stop=STOP, cache=folder / "cache")
        assert ended.code == 130, ended.said
    return folder


def copied(bench: Bench, place: str, name: str) -> Path:
    """A copy of that folder; hard links stay links."""
    folder = bench.folder / name
    subprocess.run(["cp", "-a", str(stopped(bench, place)), str(folder)], check=True, timeout=300)
    return folder

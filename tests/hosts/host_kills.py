"""Kills one of two hosts before any of its file events, in snapshots and exports too, and compares the end with a run
on one host.
"""

from __future__ import annotations

import mmap
import random
import re
import shutil
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

from kills import COMMANDS, GOLDEN, Bench, Trial, difference, files_of, records_of, set_best, watch_files
from runs import HostRun

KINDS = {
    "whole": (),
    "best": ("--export", "best", "--eval-every", "2"),
    "steps": ("--export-every", "3"),
    "adapter": ("--lora", "4", "--merge", "--export", "best"),
}
BEST = 3  # the step that evaluates best


@dataclass(frozen=True)
class Whole:
    """What a run comes to that nobody disturbs, and for each of two hosts (file events, those since its last step)."""

    files: dict[str, bytes | None]
    records: list[tuple]
    events: list[tuple[int, int]]


def command(bench: Bench, kind: str, out: Path, store: Path | None = None) -> list[str]:
    begun = bench.command(None, out, store)
    for option, value in (("--micro-batch", "1"), ("--ram", "1GiB")):  # each host has a share, and all weights
        begun[begun.index(option) + 1] = value
    return [*begun, *KINDS[kind]]


def go(
    argv: list[str], hosts: int, inside: Path, victim: int = -1, before: int = 0, late: int = 0
) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """Runs the command on `hosts`; host `victim` is killed before its file event `before` in the folder `inside`, or
    its event `late` since its last step. Returns (exit codes, what they said, as Whole.events).
    """
    notes = [mmap.mmap(-1, 64) for _ in range(hosts)]

    def changed(host: int) -> None:
        set_best(BEST)
        watch_files(str(inside), before * (host == victim), late * (host == victim), notes[host])

    run = HostRun(inside / "said", hosts, argv, changed)
    codes, said = run.ended(), [path.read_text() for path in run.said]
    for path in run.said:
        path.unlink()
    counts = [struct.unpack_from("ii", note) for note in notes]
    return codes, said, [(events, events - first) for events, first in counts]


def whole(bench: Bench, kind: str) -> Whole:
    """Raises AssertionError if two hosts write other files than one."""
    found = []
    for hosts in (1, 2):
        out = bench.folder / f"{kind} on {hosts}"
        codes, said, events = go(command(bench, kind, out), hosts, bench.folder)
        assert not any(codes), said
        found.append((files_of(out), records_of(out)))
    assert found[0] == found[1], f"two hosts differ from one: {kind}"
    return Whole(*found[0], events)


def trial(bench: Bench, wholes: dict[str, Whole], seed: int) -> Trial:
    """A run of two hosts of which one is killed, then continued as the messages say."""
    dice, kind, victim = random.Random(seed), [*wholes][seed % len(wholes)], seed // len(wholes) % 2
    made, known = Trial(seed, f"hosts {kind}"), wholes[kind]
    folder = bench.folder / f"hosts-{seed}"
    folder.mkdir()
    out, store = folder / "out", folder / "store" if dice.random() < 0.3 else None
    events, ending = known.events[victim]
    share, early = seed * GOLDEN % 1, dice.random() < 0.4
    how = dict(before=1 + int(share * events)) if early else dict(late=1 + int(share * ending))
    argv, hosts = command(bench, kind, out, store), 2
    codes, said, _ = go(argv, hosts, folder, victim, **how)
    made.kills.append((f"{'event' if early else 'late event'} of host {victim}", how.popitem()[1]))
    for _ in range(COMMANDS):
        ended = not any(codes) or any("that run is finished" in text for text in said)
        if ended or (argv[0] == "--resume" and -signal.SIGKILL not in codes):
            break
        if -signal.SIGKILL not in codes and any(re.search(r"--resume ", text) for text in said):
            argv = ["--resume", str(out)]
        codes, said, _ = go(argv, hosts, folder)
    if not ended:
        made.wrong = f"{argv[0]} on {hosts}: exit {codes}: {[text.strip().splitlines()[-1:] for text in said]}"
    else:
        made.wrong = difference(known.files, known.records, out)
    if not made.wrong and store and any(path.is_file() for path in store.rglob("*")):
        made.wrong = "left in the store"
    if not made.wrong:
        shutil.rmtree(folder)
    return made

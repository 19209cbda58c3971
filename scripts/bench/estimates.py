"""python scripts/bench/estimates.py --keep DIR: estimated next to measured times and memory of steps.

Each line is a call of step.py in a process of its own, for at most --limit seconds; its result is printed when it ends.
Lines 0 to 6 are one of each kind, 300 s together on an H100: --only 0,1,2,3,4,5,6.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

STEPS = (  # arguments of step.py; --store is given a folder
    "llama-0.15b --gpu-memory 24GiB --ram 60GiB",
    "llama-0.4b --gpu-memory 24GiB --ram 60GiB",
    "llama-1.3b --gpu-memory 24GiB --ram 60GiB",
    "llama-7b --gpu-memory 24GiB --ram 110GiB",
    "qwen3-30b --layers 24 --gpu-memory 24GiB --ram 110GiB --clip 0 --adam-bits 8",  # all 48 need 175 GiB
    "llama-8b --lora 16 --gpu-memory 24GiB --ram 60GiB",
    "llama-1.3b --gpu-memory 12GiB --ram 10GiB --steps 2 --store",
    "llama-1.3b --gpu-memory 24GiB --ram 60GiB --tokens 8192",
    "llama-1.3b --gpu-memory 80GiB --ram 60GiB --seq 8192",
    "llama-1.3b --gpu-memory 24GiB --ram 16GiB --placement state-ssd --adam-bits 8 --store",
    "llama-1.3b --gpu-memory 24GiB --ram 16GiB --placement state-ssd --tokens 65536 --store",
    "llama-3b --gpu-memory 24GiB --ram 100GiB",
    "llama-3b --gpu-memory 16GiB --ram 30GiB --clip 0 --store",
    "llama-7b --gpu-memory 80GiB --ram 60GiB --seq 4096",
    "llama-13b --gpu-memory 80GiB --ram 110GiB --clip 0 --store",
)
ON_A_CPU = (
    "llama-tiny --device cpu --gpu-memory 1GiB --ram 1GiB --tokens 1024 --seq 256",
    "llama-tiny --device cpu --lora 4 --gpu-memory 1GiB --ram 1GiB --tokens 1024 --seq 256",
    "llama-tiny --device cpu --gpu-memory 60MiB --ram 60MiB --tokens 1024 --seq 256 --placement ssd --store",
)
Pairs = dict[str, tuple[float, float]]  # what -> (estimated, measured)


def pairs_of(result: dict) -> Pairs:
    """Of a result of step.py."""
    estimated, peaks, took = result["estimated_gib"], result["peaks"], result["step_s"]
    return {
        "step s": (result["predicted_s"], took),
        "step s, corrected": (result["corrected_s"], took),
        "GPU GiB": (estimated["gpu"], peaks["gpu_gib"]),
        "RAM GiB": (estimated["ram"], peaks["ram_gib"] - peaks["rss_start_gib"]),
    }


def measured(line: str, path: Path, limit_s: float, store: str | None, more: str) -> Pairs | str:
    """The figures of a line, or the reason why there are none."""
    words = line.split()
    if words[-1] == "--store":
        if not store:
            return "needs --store"
        words.append(tempfile.mkdtemp(dir=store))
    command = [sys.executable, str(Path(__file__).with_name("step.py")), *words, *more.split(), "--json", str(path)]
    log = path.with_suffix(".log")
    try:
        with log.open("w") as out:
            subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=True)
    except subprocess.SubprocessError as error:
        return [type(error).__name__, *log.read_text().strip().splitlines()][-1]
    finally:
        if "--store" in words:  # a stopped run leaves it
            shutil.rmtree(words[-1], ignore_errors=True)
    return pairs_of(json.loads(path.read_text()))


def row(line: str, pairs: Pairs) -> str:
    ratio = lambda estimated, took: f"{estimated:.3g}, {took:.3g} | {estimated / took:.3f}" if took else "– | –"
    return f"| {line} | {' | '.join(ratio(*pair) for pair in pairs.values())} |"


def summary(rows: list[Pairs]) -> Iterator[str]:
    for what in rows[0]:
        off = [abs(a / b - 1) for a, b in (pairs[what] for pairs in rows) if b]
        if off:
            yield f"{what}: off by {statistics.median(off):.1%} in the median, {max(off):.1%} at most of {len(off)}"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--keep", help="a folder for the results; default: a temporary one")
    p.add_argument("--only", type=lambda t: {int(i) for i in t.split(",")}, help="numbers of lines, from 0: 0,3,5")
    p.add_argument("--minutes", type=float, default=9, help="limit of time for all lines")
    p.add_argument("--limit", type=float, default=240, help="seconds of one line")
    p.add_argument("--cpu", action="store_true", help="small models on the CPU")
    p.add_argument("--store", help="a folder on the SSD, for the lines that need one")
    p.add_argument("--more", default="", help="further arguments of each line")
    a = p.parse_args(argv)
    keep, rows, ends = Path(a.keep or tempfile.mkdtemp()), list[Pairs](), time.monotonic() + 60 * a.minutes
    keep.mkdir(parents=True, exist_ok=True)
    for i, line in enumerate(ON_A_CPU if a.cpu else STEPS):
        if (a.only and i not in a.only) or (left := ends - time.monotonic()) < 20:
            continue
        pairs = measured(line, keep / f"steps-{i:02d}.json", min(left, a.limit), a.store, a.more)
        if isinstance(pairs, str):
            print(f"| {line} | {pairs} |", flush=True)
            continue
        if not rows:
            columns = " | ".join(f"{what}: estimated, measured | ratio" for what in pairs)
            print(f"| run | {columns} |\n|{'---|' * (1 + 2 * len(pairs))}")
        rows.append(pairs)
        print(row(line, pairs), flush=True)
    print("", *(summary(rows) if rows else ["nothing could be run"]), f"written to {keep}", sep="\n")
    return not rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

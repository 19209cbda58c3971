"""Estimated and measured times and memory of many runs: python scripts/bench/estimates.py steps --keep DIR, or runs

- `steps`: lines of step.py, each with a model, limits and tokens; also the time corrected by a warm-up step. Lines 0 to
  6 are one of each kind, 300 s together on an H100: --only 0,1,2,3,4,5,6.
- `runs`: whole runs on random weights, as the command trains them: load, steps, evaluations, export. With --cpu their
  times are estimated after the second step.

Each line runs in a process of its own, for at most --limit seconds. Its result is printed and written when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from model_inputs import make_data, make_model

from trireme.engine.buffers import usage
from trireme.engine.planner.clock import Clock, process_began
from trireme.engine.planner.host import memory_in_use, resident
from trireme.engine.planner.rates import CODE
from trireme.engine.run import demo
from trireme.engine.run.cli import ENVIRONMENT, parse
from trireme.engine.run.log import read_log
from trireme.engine.run.loop import train

GIB = 1 << 30
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
    "llama-1.3b --gpu-memory 12GiB --ram 40GiB --seq 512",
    "llama-1.3b --gpu-memory 16GiB --ram 60GiB --placement host --tokens 4096",
    "llama-1.3b --gpu-memory 24GiB --ram 16GiB --placement state-ssd --adam-bits 8 --store",
    "llama-1.3b --gpu-memory 24GiB --ram 16GiB --placement state-ssd --tokens 65536 --store",
    "llama-3b --gpu-memory 24GiB --ram 100GiB",
    "llama-3b --gpu-memory 12GiB --ram 60GiB --clip 0 --seq 2048 --tokens 8192",
    "llama-3b --gpu-memory 16GiB --ram 30GiB --clip 0 --store",
    "llama-7b --gpu-memory 80GiB --ram 60GiB --seq 4096",
    "llama-13b --gpu-memory 80GiB --ram 110GiB --clip 0 --store",
)
DATA = ("text", "chats", "long")
USUAL = "--gpu-memory 24GiB --ram 60GiB"
RUNS = (  # model, data, options; about 440 s together. Repeated lines run with cold, then with warm caches
    f"llama-1.3b text {USUAL} --max-steps 24",
    f"llama-1.3b text {USUAL} --max-steps 24",
    f"llama-1.3b chats {USUAL} --val 0.02 --eval-every 10",
    "llama-0.15b text --max-steps 200",
    "llama-0.15b text --gpu-memory 2GiB --ram 4GiB --max-steps 100",
    "llama-0.4b text --val 0.02 --eval-every 30 --max-steps 60",
    f"llama-0.4b long {USUAL} --batch-size 4 --max-steps 30",
    "llama-0.15b chats --val 0.02 --eval-every 100 --max-steps 200",
    "llama-0.4b chats --gpu-memory 3GiB --ram 5GiB --max-steps 12",
    "llama-7b text --ram 60GiB --max-steps 10",
    "llama-7b text --ram 60GiB --max-steps 10",
    f"llama-3b text {USUAL} --max-steps 12",
    "llama-1.3b text --gpu-memory 12GiB --ram 10GiB --save-every 4 --max-steps 8",
    "llama-3b chats --gpu-memory 16GiB --ram 40GiB --max-grad-norm 0 --max-steps 12",
)
SMALL = "--device cpu --seq-len 256 --batch-size 4"
STEPS_ON_A_CPU = (
    "llama-tiny --device cpu --gpu-memory 1GiB --ram 1GiB --tokens 1024 --seq 256",
    "llama-tiny --device cpu --lora 4 --gpu-memory 1GiB --ram 1GiB --tokens 1024 --seq 256",
    "llama-tiny --device cpu --gpu-memory 60MiB --ram 60MiB --tokens 1024 --seq 256 --placement ssd --store",
)
RUNS_ON_A_CPU = (
    f"llama-tiny text {SMALL}",
    f"llama-tiny chats --val 0.02 {SMALL}",
    f"llama-tiny long --val 0.002 {SMALL}",
    f"llama-tiny text --gpu-memory 60MiB --ram 60MiB {SMALL}",
    f"llama-tiny text --gpu-memory 60MiB --ram 60MiB --save-every 5 {SMALL}",
)
LINES = {("steps", False): STEPS, ("steps", True): STEPS_ON_A_CPU, ("runs", False): RUNS, ("runs", True): RUNS_ON_A_CPU}
WITHIN = {"step s": 0.08, "step s, corrected": 0.08, "whole s": 0.12}  # that estimates should be; memory:
WITHIN_GIB = 0.03
Pairs = dict[str, tuple[float, float]]  # what -> (estimated, measured)


# ---------------------------------------------------------------- a line


def step_pairs(result: dict) -> Pairs:
    """Of a result of step.py."""
    estimated, peaks, took = result["estimated_gib"], result["peaks"], result["step_s"]
    return {
        "step s": (result["predicted_s"], took),
        "step s, corrected": (result["corrected_s"], took),
        "GPU GiB": (estimated["gpu"], peaks["gpu_gib"]),
        "RAM GiB": (estimated["ram"], peaks["ram_gib"] - peaks["rss_start_gib"]),
    }


def run_words(line: str, work: Path) -> list[str]:
    """The command line of a whole run; makes its checkpoint and data in `work`."""
    model, kind, *more = line.split()
    text = work / "stories.txt"
    if not text.exists():
        demo.make_text(text, 400, seed=1)
    words = [str(make_model(work, model, text)), "--data", str(make_data(work, kind)), "--out", str(work / "out")]
    usual = {"--seq-len": "8192" if kind == "long" else "1024", "--max-steps": "20", "--show-example": "0"}
    return words + [word for flag, value in usual.items() if flag not in more for word in (flag, value)] + more


def one_run(words: list[str], path: Path) -> None:
    """Trains in this process; writes estimated and measured figures to `path`."""
    options, at_start, clock = parse(words)[1], resident(), Clock(began=process_began())
    clock.spent["imports"] += clock.whole
    live = train(options, clock=clock)
    assert live is not None
    estimated, took = live.estimated, live.clock.spent
    need = usage(live.job.forecast.geo, live.job.plan)
    gpu, ram = memory_in_use(live.job.device)
    code = CODE if live.job.device.type == "cuda" else need["gpu"]
    steps = [record["step_time_s"] for _, record in read_log(live.job.out / "log.jsonl") if "step_time_s" in record]
    pairs = {
        "step s": (estimated["steps"] / live.job.total_steps, statistics.median(steps[2:])),
        "whole s": (sum(estimated.values()), live.clock.whole),
        "GPU GiB": (need["gpu"] / GIB, gpu),
        "RAM GiB": ((at_start + need["ram"] + live.job.forecast.kept + code) / GIB, ram),
    }
    path.write_text(
        json.dumps({"pairs": pairs, "parts": {part: (estimated.get(part, 0.0), took[part]) for part in took}})
    )


def execute(command: list[str], path: Path, limit_s: float) -> str:
    """Runs `command`, which writes `path`; its output goes to a .log. Returns the error, or ""."""
    log = path.with_suffix(".log")
    try:
        with log.open("w") as out:
            environment = ENVIRONMENT | os.environ  # as the command sets it
            subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, env=environment, check=True)
    except subprocess.SubprocessError as error:
        return [type(error).__name__, *log.read_text().strip().splitlines()][-1]
    return ""


def measured(a: argparse.Namespace, line: str, path: Path, limit_s: float) -> dict | str:
    """The figures of a line, or the reason why there are none."""
    if a.what == "runs":
        work = Path(a.work)
        shutil.rmtree(work / "out", ignore_errors=True)
        failed = execute([sys.executable, __file__, "one", str(path), *run_words(line, work)], path, limit_s)
        return failed or json.loads(path.read_text())
    words = line.split()
    if words[-1] == "--store" and not a.store:
        return "needs --store"
    folder = tempfile.mkdtemp(dir=a.store) if words[-1] == "--store" else None
    command = [sys.executable, str(Path(__file__).with_name("step.py")), *words, *filter(None, [folder])]
    try:
        failed = execute([*command, *a.more.split(), "--json", str(path)], path, limit_s)
    finally:
        if folder:  # a stopped run leaves it
            shutil.rmtree(folder, ignore_errors=True)
    return failed or {"pairs": step_pairs(json.loads(path.read_text()))}


# ---------------------------------------------------------------- the table


def row(line: str, pairs: Pairs) -> str:
    cells = [
        f"{estimated:.3g}, {took:.3g} | {estimated / took:.3f}" if took else "– | –"
        for estimated, took in pairs.values()
    ]
    return f"| {line} | {' | '.join(cells)} |"


def head(pairs: Pairs) -> str:
    columns = [f"{what}: estimated, measured | ratio" for what in pairs]
    return f"| run | {' | '.join(columns)} |\n|{'---|' * (1 + 2 * len(columns))}"


def parts(found: dict) -> str:
    """Seconds of each part of a run, as estimated -> measured."""
    seconds = {part: pair for part, pair in found["parts"].items() if max(pair) >= 0.05}
    other = found["pairs"]["whole s"][1] - sum(took for _, took in found["parts"].values())
    return ", ".join([*(f"{part} {a:.2f} -> {b:.2f}" for part, (a, b) in seconds.items()), f"other {other:.2f}"])


def summary(rows: list[dict]) -> Iterator[str]:
    for what in rows[0]["pairs"]:
        off = [abs(a / b - 1) for a, b in (r["pairs"][what] for r in rows) if b]
        if off:
            limit = WITHIN.get(what, WITHIN_GIB)
            within = f"{sum(x <= limit for x in off)} of {len(off)} within {100 * limit:.0f} %"
            yield f"{what}: off by {statistics.median(off):.1%} in the median, {max(off):.1%} at most; {within}"


def grid(a: argparse.Namespace, keep: Path) -> list[dict]:
    """Runs the lines; prints a row for each and writes all rows so far. A line that fails leaves the others."""
    ends, rows = time.monotonic() + 60 * a.minutes, list[dict]()
    for i, line in enumerate(LINES[a.what, a.cpu]):
        if a.only and i not in a.only:
            continue
        left = ends - time.monotonic()
        found = measured(a, line, keep / f"{a.what}-{i:02d}.json", min(left, a.limit)) if left >= 20 else "no time left"
        if isinstance(found, str):
            print(f"| {line} | {found} |", flush=True)
            continue
        if not rows:
            print(head(found["pairs"]))
        rows.append({"line": line, **found})
        print(row(line, found["pairs"]), flush=True)
        (keep / f"{a.what}.json").write_text(json.dumps(rows, indent=1))
    return rows


# ---------------------------------------------------------------- command


def results_folder(a: argparse.Namespace) -> Path:
    keep = Path(a.keep or tempfile.mkdtemp())
    keep.mkdir(parents=True, exist_ok=True)
    return keep


def write_results(rows: list[dict], what: str, keep: Path) -> None:
    if not rows:
        sys.exit("error: nothing fits, or nothing could be run")
    (keep / f"{what}.json").write_text(json.dumps(rows, indent=1))
    print(f"written to {keep}")


def run_arguments(described: str) -> argparse.ArgumentParser:
    """The arguments of benchmarks of many runs."""
    p = argparse.ArgumentParser(description=described)
    p.add_argument("--keep", help="a folder for the results; default: a temporary one")
    p.add_argument("--only", type=lambda t: {int(i) for i in t.split(",")}, help="numbers of lines, from 0: 0,3,5")
    p.add_argument("--minutes", type=float, default=9, help="limit of time for all runs")
    return p


def main(argv: list[str]) -> int:
    if argv[:1] == ["one"]:
        one_run(argv[2:], Path(argv[1]))
        return 0
    p = run_arguments(__doc__.splitlines()[0])
    p.add_argument("what", choices=("steps", "runs"))
    p.add_argument("--work", help="runs: a folder for checkpoints, data and output; 30 GB for all lines")
    p.add_argument("--cpu", action="store_true", help="small models on the CPU")
    p.add_argument("--limit", type=float, default=240, help="seconds of one line")
    p.add_argument("--store", help="steps: a folder on the SSD, for the lines that need one")
    p.add_argument("--more", default="", help="steps: further arguments of each line")
    a = p.parse_args(argv)
    keep = results_folder(a)
    a.work = a.work or str(keep / "work")
    for folder in [a.work] if a.what == "runs" else filter(None, [a.store]):
        Path(folder).mkdir(parents=True, exist_ok=True)
    rows = grid(a, keep)
    for r in rows:
        if "parts" in r:
            print(f"\n{r['line']}: {parts(r)}")
    print("", *(summary(rows) if rows else ()), sep="\n")
    write_results(rows, a.what, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

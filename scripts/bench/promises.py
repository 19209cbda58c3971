"""Whole runs and their estimates: python scripts/bench/promises.py --work DIR --keep DIR

One run beside the benchmark of a step: python scripts/bench/promises.py --beside "llama-1.3b text" DIR

GRID is run by finetune.py on random weights: median step and whole time beside the promise (on a CPU of the second
step), peaks of memory beside the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import step as bench
from ceilings import print_lanes
from model_inputs import make_data, make_model

from trireme.engine.buffers import usage
from trireme.engine.lanes.real import RealLanes
from trireme.engine.lanes.trace import Span
from trireme.engine.planner.clock import Clock, process_began
from trireme.engine.planner.host import memory_in_use, resident
from trireme.engine.planner.rates import CODE
from trireme.engine.run import demo, loop
from trireme.engine.run.command import parse
from trireme.engine.run.main import ENVIRONMENT
from trireme.engine.run.records import read_log
from trireme.engine.run.train import finetune

GIB = 1 << 30
AS_RUN = ENVIRONMENT | os.environ  # as the command sets it
STEPS = 20
TRACED = 9  # steps from one traced step to the next, beside a benchmark
DATA = ("text", "chats", "long")
USUAL = "--gpu-memory 24GiB --ram 60GiB"
GRID = (  # model, data, options; in two halves of about 220 s, each begun by a large model cold and warm
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
HALVES = {"first": range(9), "second": range(9, 14)}
SMALL = "--seq-len 256 --batch-size 4"
ON_A_CPU = (
    f"llama-tiny text {SMALL}",
    f"llama-tiny chats --val 0.02 {SMALL}",
    f"llama-tiny long --val 0.002 {SMALL}",
    f"llama-tiny text --gpu-memory 60MiB --ram 60MiB {SMALL}",
    f"llama-tiny text --gpu-memory 60MiB --ram 60MiB --save-every 5 {SMALL}",
)


# ---------------------------------------------------------------- one run


def arguments_of(line: str, work: Path, out: Path) -> list[str]:
    model, kind, *more = line.split()
    text = work / "stories.txt"
    if not text.exists():
        demo.make_text(text, 400, seed=1)
    words = [str(make_model(work, model, text)), "--data", str(make_data(work, kind)), "--out", str(out)]
    usual = {"--seq-len": "8192" if kind == "long" else "1024", "--max-steps": str(STEPS), "--show-example": "0"}
    return words + [word for flag, value in usual.items() if flag not in more for word in (flag, value)] + more


def run(words: list[str], path: Path) -> None:
    """Trains; writes promised and measured figures to `path`."""
    options, beside, clock = parse(words), resident(), Clock(began=process_began())
    clock.spent["imports"] += clock.whole
    live = finetune(options, clock=clock)
    assert live is not None
    need = usage(live.job.forecast.geo, live.job.plan)
    gpu, ram = memory_in_use(live.job.device)
    steps = [record["step_time_s"] for _, record in read_log(live.job.out / "log.jsonl") if "step_time_s" in record]
    cuda = live.job.device.type == "cuda"
    result = {
        "promised_s": sum(live.promised.values()),
        "took_s": live.clock.whole,
        "promised": live.promised,
        "took": live.clock.spent,
        "promised_step_s": live.promised["steps"] / live.job.total_steps,
        "step_s": statistics.median(steps[2:]),
        "gpu_gib": gpu,
        "ram_gib": ram,
        "planned_gpu_gib": need["gpu"] / GIB,
        "planned_ram_gib": (beside + need["host"] + live.job.forecast.kept + (CODE if cuda else need["gpu"])) / GIB,
    }
    path.write_text(json.dumps(result, indent=1))


# ---------------------------------------------------------------- a run beside a benchmark


def beside(line: str, work: Path) -> None:
    """A run, then the benchmark's steps by its plan in the same process: of the run's rows, and of whole documents.

    Prints median steps, their ratios, and what the lanes of a traced step of each do.
    """
    out, traced = work / "out", list[list[Span]]()
    shutil.rmtree(out, ignore_errors=True)
    options, take = parse([*arguments_of(line, work, out)]), RealLanes.trace
    loop.BOUND_EVERY = TRACED
    RealLanes.trace = lambda lanes: (traced.append(take(lanes)), traced[-1])[1]  # type: ignore[method-assign]
    live = finetune(options)
    RealLanes.trace = take  # type: ignore[method-assign]
    assert live is not None
    job, records = live.job, [r for _, r in read_log(out / "log.jsonl") if "step_time_s" in r]
    took = [r["step_time_s"] for r in records[2:]]
    apart = [b["wall_time"] - a["wall_time"] for a, b in pairwise(records[2:])]  # one step and what is before it
    said = {"promised": job.forecast.step.step_s, "run": statistics.median(took), "apart": statistics.median(apart)}
    print(f"run: steps {[round(s, 4) for s in took]}\n     from log line to log line {[round(s, 4) for s in apart]}")
    print_lanes("run", traced[-1])
    print("because", *job.because, sep="\n  ")
    tokens, rows, warmup = options.batch_size * job.seq_len, job.micro_rows, 3
    words = f"{line.split()[0]} --tokens {tokens} --seq {job.seq_len} --steps 9 --warmup {warmup}"
    a = bench.arguments(f"{words} --clip {options.max_grad_norm}".split())
    whole = partial(bench.make_batch, job.cfg, tokens, job.seq_len, rows)
    ours = lambda step: job.data.step(step - 1, options.batch_size, rows)  # as the run's, which differ in size
    with bench.engine_of(a, job.cfg, job.plan, job.limits, job.device) as e:
        for name, batch_of in (("whole", whole), ("rows", ours)):
            found = bench.run_steps(a, e, batch_of)
            said[name] = statistics.median(found.times)
            print_lanes(f"benchmark, {name}", found.last)
    print("median steps: " + ", ".join(f"{name} {seconds:.4f} s" for name, seconds in said.items()))
    same, n = [r["step_time_s"] for r in records][warmup : warmup + len(found.times)], len(found.times)
    each = [s / t for s, t in zip(same, found.times, strict=True)]
    ratio, between = sum(same) / sum(found.times), said["apart"] - said["run"]
    print(f"the same {n} steps: run over benchmark {ratio:.3f}, {statistics.median(each):.3f} in the median of steps")
    print(f"between two steps {1e3 * between:.1f} ms, {between / said['run']:.2%} of one")


# ---------------------------------------------------------------- the table

HEAD = ("| run | step promised s | took s | ratio | whole promised s | took s | ratio | GPU GiB planned, peak "
        "| RAM GiB planned, peak |", f"|{'---|' * 9}")  # fmt: skip


def row(line: str, r: dict) -> str:
    """A line of the table; ratios are promised over taken."""
    return (
        f"| {line} | {r['promised_step_s']:.3g} | {r['step_s']:.3g} | {r['promised_step_s'] / r['step_s']:.3f} "
        f"| {r['promised_s']:.3g} | {r['took_s']:.3g} | {r['promised_s'] / r['took_s']:.3f} "
        f"| {r['planned_gpu_gib']:.2f} {r['gpu_gib']:.2f} | {r['planned_ram_gib']:.2f} {r['ram_gib']:.2f} |"
    )


def parts(r: dict) -> str:
    """Seconds of each part, as promised -> as it took."""
    held = {part: (r["promised"].get(part, 0.0), took) for part, took in r["took"].items()}
    said = [f"{part} {told:.2f} -> {took:.2f}" for part, (told, took) in held.items() if max(told, took) >= 0.05]
    return ", ".join([*said, f"other {r['took_s'] - sum(r['took'].values()):.2f}"])


def verdict(rows: list[dict]) -> str:
    said = []
    for what, promised, took in (("steps", "promised_step_s", "step_s"), ("whole runs", "promised_s", "took_s")):
        off = [abs(r[promised] / r[took] - 1) for r in rows]
        said.append(f"{what} off by {statistics.median(off):.1%} in the median, {max(off):.1%} at most")
    return "; ".join(said) + "."


def grid(a: argparse.Namespace) -> list[dict]:
    keep, work, ends = Path(a.keep), Path(a.work), time.monotonic() + 60 * a.minutes
    for folder in (keep, work):
        folder.mkdir(parents=True, exist_ok=True)
    rows = []
    print("\n".join(HEAD), flush=True)
    for i, line in enumerate(ON_A_CPU if a.cpu else GRID):
        if a.only and i not in a.only:
            continue
        begun = time.monotonic()
        path, out, left = keep / f"run-{i:02d}.json", work / "out", ends - time.monotonic()
        shutil.rmtree(out, ignore_errors=True)
        if left < 20:
            print(f"| {line} | no time left |", flush=True)
            continue
        words = [*arguments_of(line, work, out), *(["--device", "cpu"] if a.cpu else [])]
        made = time.monotonic() - begun
        log, command = path.with_suffix(".log"), [sys.executable, __file__, "--one", str(path), *words]
        try:
            with log.open("w") as said:
                subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, timeout=left, env=AS_RUN, check=True)
        except subprocess.SubprocessError as error:
            print(f"| {line} | {[type(error).__name__, *log.read_text().strip().splitlines()][-1]} |", flush=True)
            continue
        beside = {"line": line, "made_s": made, "shell_s": time.monotonic() - begun - made}
        rows.append(json.loads(path.read_text()) | beside)
        print(row(line, rows[-1]), flush=True)
    for r in rows:
        print(f"\n{r['line']}: {parts(r)}; from the shell {r['shell_s']:.1f} s, its files {r['made_s']:.1f} s")
    (keep / "grid.json").write_text(json.dumps(rows, indent=1))
    return rows


def chosen(text: str) -> set[int]:
    return {i for word in text.split(",") for i in (HALVES[word] if word in HALVES else [int(word)])}


def main(argv: list[str]) -> int:
    if argv[:1] == ["--one"]:
        run(argv[2:], Path(argv[1]))
        return 0
    if argv[:1] == ["--beside"]:  # LINE FOLDER
        Path(argv[2]).mkdir(parents=True, exist_ok=True)
        beside(argv[1], Path(argv[2]))
        return 0
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--work", required=True, help="a folder for checkpoints, data and output; 30 GB for all of the grid")
    p.add_argument("--keep", required=True, help="a folder for the results")
    p.add_argument("--only", type=chosen, help="numbers of lines, from 0, or first, second: 0,3,5")
    p.add_argument("--minutes", type=float, default=9, help="no run goes on for longer than this in all")
    p.add_argument("--cpu", action="store_true", help="the smaller grid, on the CPU")
    rows = grid(p.parse_args(argv))
    if not rows:
        sys.exit("error: nothing could be run")
    print("\n" + verdict(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

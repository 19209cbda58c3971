"""Estimated and measured steps: python scripts/bench/plan.py grid --store DIR --keep DIR, or compare FILE...

- `grid`: runs lines of models and limits by step.py; predicted and measured step times and peaks.
- `compare`: the same from results of step.py --json.

A prediction uses only the plan and the ceilings of its run; the corrected one also a step of warm-up, as in a run.
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

from trireme.engine.buffers import usage
from trireme.engine.geometry import Geometry
from trireme.engine.plan import Plan
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rates import CODE, rates_of
from trireme.engine.planner.sizes import MODELS

GIB = 1 << 30
GRID = (
    "llama-1.3b --gpu-memory 24GiB --ram 60GiB --tokens 8192",
    "llama-1.3b --gpu-memory 80GiB --ram 60GiB --seq 8192",
    "llama-1.3b --gpu-memory 12GiB --ram 40GiB --seq 512",
    "llama-1.3b --gpu-memory 16GiB --ram 60GiB --homes host --tokens 4096",
    "llama-1.3b --gpu-memory 12GiB --ram 10GiB --store",
    "llama-1.3b --gpu-memory 24GiB --ram 16GiB --homes state-ssd --adam-bits 8 --store",
    "llama-1.3b --gpu-memory 24GiB --ram 16GiB --homes state-ssd --tokens 65536 --store",
    "llama-3b --gpu-memory 24GiB --ram 100GiB",
    "llama-3b --gpu-memory 12GiB --ram 60GiB --clip 0 --seq 2048 --tokens 8192",
    "llama-3b --gpu-memory 16GiB --ram 30GiB --clip 0 --store",
    "llama-7b --gpu-memory 24GiB --ram 110GiB",
    "llama-7b --gpu-memory 80GiB --ram 60GiB --seq 4096",
    "llama-13b --gpu-memory 80GiB --ram 110GiB --clip 0 --store",
)


# ---------------------------------------------------------------- one run


def run(line: str, path: Path, store: str | None, limit_s: float, more: tuple[str, ...] = ()) -> str:
    """Runs step.py, its JSON to `path`. Returns what went wrong, or ""."""
    words, folder = line.split(), None
    if words[-1] == "--store":
        if store is None:
            return "left out for want of --store"
        folder = tempfile.mkdtemp(dir=store)
        words.append(folder)
    command = [sys.executable, str(Path(__file__).with_name("step.py")), *words, *more, "--json", str(path)]
    try:
        with path.with_suffix(".log").open("w") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s)
        said = path.with_suffix(".log").read_text().strip().splitlines()
        return "" if done.returncode == 0 else f"exit code {done.returncode}: {said[-1] if said else ''}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        if folder:  # a stopped run leaves it
            shutil.rmtree(folder, ignore_errors=True)


def compare(name: str, result: dict) -> dict:
    """A line of the table, from a result of step.py."""
    cfg, plan, rates = MODELS[result["model"]], Plan.of(result["plan"]), rates_of(result["ceilings"])
    found = predict(cfg, plan, rates, Batch(plan.tokens, result["seq"], plan.n_micro))
    promised, peaks = usage(Geometry.of(cfg, plan), plan), result["peaks"]
    return {
        "name": name, "model": result["model"], "tokens": result["tokens"], "seq": result["seq"],
        "bound": found.bound, "predicted_s": found.step_s, "measured_s": result["step_s"],
        "ratio": found.step_s / result["step_s"],
        "corrected_ratio": result["corrected_s"] / result["step_s"] if "corrected_s" in result else None,
        "gpu_predicted_gib": promised["gpu"] / GIB, "gpu_measured_gib": peaks["gpu_gib"],
        "ram_predicted_gib": (promised["host"] + (CODE if peaks["gpu_gib"] else 0)) / GIB,
        "ram_measured_gib": peaks["ram_gib"] - peaks["rss_start_gib"] if "rss_start_gib" in peaks else None,
        "busy_s": found.busy, "ssd_read": found.ssd_read, "ssd_written": found.ssd_written,
    }  # fmt: skip


HEAD = (
    "| run | tokens a step | bound by | predicted s | measured s | ratio | corrected "
    "| GPU GiB, predicted and measured | RAM GiB |",
    f"|{'---|' * 9}",
)


def row(r: dict) -> str:
    gpu = f"{r['gpu_predicted_gib']:.2f} {r['gpu_measured_gib']:.2f}"
    ram = f"{r['ram_predicted_gib']:.2f} {r['ram_measured_gib']:.2f}" if r["ram_measured_gib"] is not None else "–"
    corrected = f"{r['corrected_ratio']:.3f}" if r["corrected_ratio"] is not None else "–"
    return (
        f"| {r['name']} | {r['tokens']:,} | {r['bound']} | {r['predicted_s']:.3f} | {r['measured_s']:.3f} "
        f"| {r['ratio']:.3f} | {corrected} | {gpu} | {ram} |"
    )


def verdict(rows: list[dict]) -> str:
    """How far off predictions are."""
    say = _off([r["ratio"] for r in rows])
    if again := [r["corrected_ratio"] for r in rows if r["corrected_ratio"] is not None]:
        say += f"; corrected {_off(again)}"
    for tier in ("gpu", "ram"):
        pairs = [(r[f"{tier}_predicted_gib"], r[f"{tier}_measured_gib"]) for r in rows]
        ratios = [p / m - 1 for p, m in pairs if m and m > 1]
        if ratios:
            say += f"; {tier} peaks predicted from {min(ratios):+.1%} to {max(ratios):+.1%}"
    return say + "."


def _off(ratios: list[float]) -> str:
    off = [abs(ratio - 1) for ratio in ratios]
    return f"{sum(x <= 0.1 for x in off)} of {len(off)} within 10 %, off by {statistics.median(off):.1%} in the median"


def results(paths: list[str]) -> Iterator[tuple[str, dict]]:
    """(name, result) of each file of step.py with a plan."""
    files = [f for p in map(Path, paths) for f in (sorted(p.rglob("*.json")) if p.is_dir() else [p])]
    for file in files:
        found = {} if file.name.endswith(".trace.json") else json.loads(file.read_text())
        if "plan" in found and "step_s" in found:
            yield file.stem, found


def grid(a: argparse.Namespace, keep: Path) -> list[dict]:
    """Runs and prints the grid, or lines of --only."""
    began, rows = time.monotonic(), []
    print("\n".join(HEAD), flush=True)
    for i, line in enumerate(GRID):
        if a.only and i not in a.only:
            continue
        path, left = keep / f"grid-{i:02d}.json", 60 * a.minutes - (time.monotonic() - began)
        failed = "no time left" if left < 20 else run(line, path, a.store, min(a.limit, left), tuple(a.more.split()))
        if failed:
            print(f"| {line} | {failed} |", flush=True)
            continue
        rows.append(compare(line.removesuffix(" --store"), json.loads(path.read_text())))
        print(row(rows[-1]), flush=True)
    return rows


def results_folder(a: argparse.Namespace) -> Path:
    keep = Path(a.keep or tempfile.mkdtemp())
    keep.mkdir(parents=True, exist_ok=True)
    return keep


def leave(rows: list[dict], what: str, keep: Path) -> None:
    """Writes the results as JSON."""
    (keep / f"{what}.json").write_text(json.dumps(rows, indent=1))
    print(f"written to {keep}")


def run_arguments(kinds: tuple[str, ...]) -> argparse.ArgumentParser:
    """The arguments of all benchmarks of many runs."""
    p = argparse.ArgumentParser()
    p.add_argument("what", choices=kinds)
    p.add_argument("--keep", help="a folder for the results; default: a temporary one")
    p.add_argument("--only", type=lambda t: {int(i) for i in t.split(",")}, help="numbers of lines, from 0: 0,3,5")
    p.add_argument("--minutes", type=float, default=9, help="no run goes on for longer than this in all")
    return p


def main(argv: list[str]) -> int:
    a = arguments(argv)
    keep = results_folder(a)
    if a.store:
        Path(a.store).mkdir(parents=True, exist_ok=True)
    if a.what == "grid":
        rows = grid(a, keep)
    else:
        rows = [compare(name, result) for name, result in results(a.files)]
        print("\n".join([*HEAD, *map(row, rows)]))
    if not rows:
        sys.exit("error: nothing to compare. Results need the plan that step.py --json writes.")
    print("\n" + verdict(rows))
    leave(rows, a.what, keep)
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    p = run_arguments(("grid", "compare"))
    p.description = __doc__.splitlines()[0]
    p.add_argument("--store", help="a folder on the SSD, for the runs that need one")
    p.add_argument("--limit", type=float, default=150, help="seconds that a run may take")
    p.add_argument("files", nargs="*", help="for compare: results of step.py --json, or folders of them")
    p.add_argument("--more", default="", help="further words for each run")
    return p.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

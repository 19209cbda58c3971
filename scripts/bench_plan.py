"""Predicted steps beside measured ones: python scripts/bench_plan.py --measured runs/*.json

`--measured` names results of bench_step.py --json (or folders of them); each holds its plan and the ceilings of its own
run, and from those alone its step is predicted. Without it, a small grid of models, limits and homes is measured first,
on a GPU: --store names a folder on the drive for those that need one, --keep one for the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import bench_step
from bench_step import MODELS

from trireme.engine.plan import DoesNotFit, Geometry, Plan, usage
from trireme.engine.predict import Batch, predict
from trireme.engine.rates import rates_of

GRID = (
    "llama-1.3b --gpu-memory 24GiB --ram 60GiB",
    "llama-1.3b --gpu-memory 24GiB --ram 60GiB --tokens 8192",
    "llama-1.3b --gpu-memory 80GiB --ram 60GiB --seq 8192",
    "llama-1.3b --gpu-memory 24GiB --ram 60GiB --homes host --seq 512",
    "llama-1.3b --gpu-memory 12GiB --ram 16GiB --homes state-ssd",
    "llama-1.3b --gpu-memory 24GiB --ram 16GiB --homes state-ssd --adam-bits 8",
    "llama-1.3b --gpu-memory 24GiB --ram 24GiB --homes ssd --tokens 131072",
    "llama-3b --gpu-memory 24GiB --ram 100GiB",
    "llama-3b --gpu-memory 12GiB --ram 60GiB --clip 0",
    "llama-7b --gpu-memory 24GiB --ram 105GiB",
    "llama-7b --gpu-memory 24GiB --ram 105GiB --clip 0",
    "llama-7b --gpu-memory 80GiB --ram 60GiB --tokens 65536",
)


def compare(name: str, result: dict) -> dict:
    """One line of the table from one result of bench_step.py."""
    cfg, plan, rates = MODELS[result["model"]], Plan.of(result["plan"]), rates_of(result["ceilings"])
    found = predict(cfg, plan, rates, Batch(plan.tokens, result["seq"], plan.n_micro))
    promised = usage(Geometry(cfg, plan.dtype, plan.adam_bits), plan)["gpu"] / 2**30
    return {
        "name": name, "model": result["model"], "tokens": result["tokens"], "bound": found.bound,
        "predicted_s": found.step_s, "measured_s": result["step_s"], "ratio": found.step_s / result["step_s"],
        "gpu_predicted_gib": promised, "gpu_measured_gib": result["peaks"]["gpu_gib"], "busy_s": found.busy,
        "ssd_read": found.ssd_read, "ssd_written": found.ssd_written,
    }  # fmt: skip


def table(rows: list[dict]) -> list[str]:
    """The comparison as a Markdown table, and a line about all of it."""
    lines = [
        "| run | model | tokens a step | bound by | predicted s | measured s | predicted / measured | GPU GiB, same |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['name']} | {r['model']} | {r['tokens']:,} | {r['bound']} | {r['predicted_s']:.3f} "
            f"| {r['measured_s']:.3f} | {r['ratio']:.3f} | {r['gpu_predicted_gib'] / r['gpu_measured_gib']:.3f} |"
        )
    off = [abs(r["ratio"] - 1) for r in rows]
    within = sum(x <= 0.1 for x in off)
    return [*lines, "", f"{within} of {len(rows)} within 10 %; off by {statistics.median(off):.1%} in the median."]


def results(paths: list[str]) -> list[tuple[str, dict]]:
    """(name, result) of every file of bench_step.py that holds its plan, in order."""
    files = [f for p in map(Path, paths) for f in (sorted(p.rglob("*.json")) if p.is_dir() else [p])]
    read = [(f.stem, json.loads(f.read_text())) for f in files if not f.name.endswith(".trace.json")]
    found = [(name, r) for name, r in read if "plan" in r and "step_s" in r]
    print(f"{len(found)} results with a plan in {len(files)} files", file=sys.stderr)
    return found


def measure(store: str | None, keep: str | None) -> list[str]:
    """Runs the grid; the files of its results."""
    folder = Path(keep or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    for i, line in enumerate(GRID):
        words = line.split()
        if "ssd" in line and not store:
            print(f"left out for want of --store: {line}", file=sys.stderr)
            continue
        path = folder / f"{i:02d}-{words[0]}.json"
        try:
            bench_step.main([*words, *(["--store", store] if "ssd" in line else []), "--json", str(path)])
            done.append(str(path))
        except DoesNotFit as error:
            print(f"left out: {line}: {error}", file=sys.stderr)
    return done


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--measured", nargs="+", metavar="DIR_OR_JSON")
    p.add_argument("--store", help="a folder on the SSD, for the grid")
    p.add_argument("--keep", help="a folder for the grid's results")
    p.add_argument("--json", help="write the comparison to this file")
    a = p.parse_args(argv)
    rows = [compare(name, result) for name, result in results(a.measured or measure(a.store, a.keep))]
    if not rows:
        sys.exit("error: nothing to compare. Results need the plan that bench_step.py --json writes.")
    print("\n".join(table(rows)))
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

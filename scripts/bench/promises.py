"""Whole runs beside their promise: python scripts/bench/promises.py --work DIR --keep DIR

GRID is run by finetune.py on random weights: median step and whole time beside the promise (on a CPU of the second
step), peaks of memory beside the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from trireme.engine.buffers import usage
from trireme.engine.planner.host import memory_in_use, resident
from trireme.engine.planner.rates import CODE
from trireme.engine.planner.sizes import MODELS
from trireme.engine.run import demo
from trireme.engine.run.command import parse
from trireme.engine.run.records import read_log
from trireme.engine.run.train import finetune
from trireme.models import shapes
from trireme.models.config import ModelConfig

GIB = 1 << 30
STEPS = 20
DATA = ("text", "chats", "long")
GRID = (  # model, data, options
    "llama-0.15b text",
    "llama-0.15b chats --val 0.02",
    "llama-0.15b text --gpu-memory 3GiB --ram 3GiB",
    "llama-0.4b text --val 0.02",
    "llama-0.4b long --gpu-memory 24GiB --ram 60GiB",
    "llama-1.3b text --gpu-memory 24GiB --ram 60GiB",
    "llama-1.3b chats --gpu-memory 24GiB --ram 60GiB --val 0.02",
    "llama-1.3b text --gpu-memory 12GiB --ram 10GiB --save-every 10",
    "llama-3b text --gpu-memory 24GiB --ram 100GiB",
    "llama-3b chats --gpu-memory 16GiB --ram 30GiB --max-grad-norm 0",
    "llama-7b text --gpu-memory 80GiB --ram 100GiB",
    "llama-7b text --gpu-memory 24GiB --ram 60GiB --max-grad-norm 0 --max-steps 6",
)
SMALL = "--seq-len 256 --batch-size 4"
ON_A_CPU = (
    f"llama-tiny text {SMALL}",
    f"llama-tiny chats --val 0.02 {SMALL}",
    f"llama-tiny long --val 0.002 {SMALL}",
    f"llama-tiny text --gpu-memory 60MiB --ram 60MiB {SMALL}",
    f"llama-tiny text --gpu-memory 60MiB --ram 60MiB --save-every 5 {SMALL}",
)


# ---------------------------------------------------------------- models and data


def make_model(folder: Path, name: str, text: Path) -> Path:
    """A random LLaMA checkpoint in bf16."""
    cfg, made = MODELS[name], folder / name
    if made.exists():
        return made
    part = folder / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    demo.make_checkpoint(part, text, seed=1)
    config = {
        "model_type": "llama",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "intermediate_size": cfg.ffn,
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": cfg.eps,
        "tie_word_embeddings": cfg.tied,
    }
    (part / "config.json").write_text(json.dumps(config))
    _write_weights(part / "model.safetensors", cfg)
    part.rename(made)
    return made


def _write_weights(path: Path, cfg: ModelConfig) -> None:
    """Matrices repeat one random tile; norms are ones."""
    tensors, header, end = list(shapes.stored_tensors(cfg).items()), {}, 0
    for name, shape in tensors:
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    numbers = np.random.default_rng(1).standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)
    tile = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    one = np.full(1, 0x3F80, np.uint16)  # 1.0
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in tensors:
            left, values = int(np.prod(shape)), tile if len(shape) > 1 else one.repeat(shape[0])
            while left:
                file.write(values[:left].tobytes())
                left -= min(left, len(values))


def make_data(folder: Path, kind: str) -> Path:
    """Stories: `text`, one a row; `chats`, prompt and completion; `long`, a hundred a row."""
    dice, stories = random.Random(1), 20_000
    each = [demo.story(dice) for _ in range(stories)]
    if kind == "text":
        rows = [{"text": story} for story in each]
    elif kind == "chats":
        rows = [{"prompt": story[: len(story) // 3], "completion": story[len(story) // 3 :]} for story in each]
    else:
        rows = [{"text": " ".join(each[k : k + 100])} for k in range(0, stories, 100)]
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
    options, began, beside = parse(words), time.monotonic(), resident()
    live = finetune(options)
    assert live is not None
    whole, need = time.monotonic() - began, usage(live.job.forecast.geo, live.job.plan)
    gpu, ram = memory_in_use(live.job.device)
    steps = [record["step_time_s"] for _, record in read_log(live.job.out / "log.jsonl") if "step_time_s" in record]
    cuda = live.job.device.type == "cuda"
    result = {
        "promised_s": sum(live.promised.values()),
        "took_s": live.clock.whole,
        "with_preparation_s": whole,
        "promised": live.promised,
        "took": live.clock.spent,
        "promised_step_s": live.promised["steps"] / live.job.total_steps,
        "step_s": statistics.median(steps[2:]),
        "gpu_gib": gpu,
        "ram_gib": ram,
        "planned_gpu_gib": need["gpu"] / GIB,
        "planned_ram_gib": (beside + need["host"] + (CODE if cuda else need["gpu"])) / GIB,
    }
    path.write_text(json.dumps(result, indent=1))


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
        path, out, left = keep / f"run-{i:02d}.json", work / "out", ends - time.monotonic()
        shutil.rmtree(out, ignore_errors=True)
        if left < 20:
            print(f"| {line} | no time left |", flush=True)
            continue
        words = [*arguments_of(line, work, out), *(["--device", "cpu"] if a.cpu else [])]
        with path.with_suffix(".log").open("w") as log:
            command = [sys.executable, __file__, "--one", str(path), *words]
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=left, env=os.environ)
        if done.returncode:
            print(f"| {line} | {path.with_suffix('.log').read_text().strip().splitlines()[-1]} |", flush=True)
            continue
        rows.append(json.loads(path.read_text()))
        print(row(line, rows[-1]), flush=True)
    return rows


def main(argv: list[str]) -> int:
    if argv[:1] == ["--one"]:
        run(argv[2:], Path(argv[1]))
        return 0
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--work", required=True, help="a folder for checkpoints, data and output; 30 GB for all of the grid")
    p.add_argument("--keep", required=True, help="a folder for the results")
    p.add_argument("--only", type=lambda t: {int(i) for i in t.split(",")}, help="numbers of lines, from 0: 0,3,5")
    p.add_argument("--minutes", type=float, default=9, help="no run goes on for longer than this in all")
    p.add_argument("--cpu", action="store_true", help="the smaller grid, on the CPU")
    rows = grid(p.parse_args(argv))
    if not rows:
        sys.exit("error: nothing could be run")
    print("\n" + verdict(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

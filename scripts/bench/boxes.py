"""What ordinary machines train, simulated: boxes x jobs as dry runs, the tables of docs/machines.md.

python scripts/bench/boxes.py [--only TEXT] [--large | --several | --hybrids]
"""

from __future__ import annotations

import argparse

from trireme.engine.amounts import gb, seconds
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.forecast import Forecast
from trireme.engine.run.command import parse
from trireme.engine.run.job import prepare

BOXES = {
    "RTX 4060 laptop, 8 GB; 32 GiB; 1 TB": "gpu=rtx4060laptop,ram=32GiB,ssd=1TB",
    "RTX 3060, 12 GB; 32 GiB; 1 TB": "gpu=rtx3060,ram=32GiB,ssd=1TB",
    "RTX 3090, 24 GB; 64 GiB; 2 TB": "gpu=rtx3090,ram=64GiB,ssd=2TB",
    "2 x RTX 3090 on x8; 128 GiB; 2 TB": "gpu=2xrtx3090,bus=x8,ram=128GiB,ssd=2TB",
    "RTX 4090, 24 GB; 128 GiB; 2 x 2 TB": "gpu=rtx4090,ram=128GiB,ssd=2x2TB",
    "RTX 5090, 32 GB; 192 GiB; 2 x 2 TB": "gpu=rtx5090,ram=192GiB,ssd=2x2TB",
}
# NVLink bridges of RTX 3090s have 56 GB/s each way on paper; four GPUs are on a workstation board.
SEVERAL = {
    "RTX 3090": "gpu=rtx3090,ram=128GiB,ssd=2TB",
    "2 x RTX 3090 on x8": "gpu=2xrtx3090,bus=x8,ram=128GiB,ssd=2TB",
    "2 x RTX 3090 on x8, NVLink bridge": "gpu=2xrtx3090,bus=x8,peer=50,ram=128GiB,ssd=2TB",
    "RTX 4090": "gpu=rtx4090,ram=128GiB,ssd=2TB",
    "RTX 3090 + RTX 4090 on x8": "gpu=rtx3090+rtx4090,bus=x8,ram=128GiB,ssd=2TB",
    "4 x RTX 4090 on x8; 256 GiB at 150 GB/s": "gpu=4xrtx4090,bus=x8,ram=256GiB,dram=150,ssd=2TB",
}
JOBS = {
    "8B, full": "--shape llama-3.1-8b",
    "8B, LoRA": "--shape llama-3.1-8b --lora 16",
    "30B-A3B, LoRA": "--shape qwen3-30b-a3b --lora 16",
    "70B, LoRA": "--shape llama-3.3-70b --lora 16",
    "gpt-oss-120b, LoRA": "--shape gpt-oss-120b --lora 16",
}
DRIVES = {"one drive": "1x4TB@7/5", "two drives": "2x4TB@7/5"}  # of an RTX 4090 with 128 GiB
LARGE = {
    "DeepSeek-V3, R1 (671B)": "deepseek-v3",
    "Kimi K2 (1,026B)": "kimi-k2",
    "Qwen3-Coder-480B": "qwen3-coder-480b-a35b",
    "Mistral Small 4 (118B)": "mistral-small-4",
    "GLM-4.7-Flash (30B)": "glm-4.7-flash",
}
HYBRIDS = {
    "Qwen3.5-9B, LoRA": "--shape qwen3.5-9b --lora 16",
    "Qwen3.5-9B, full": "--shape qwen3.5-9b",
    "Qwen3.5-35B-A3B, LoRA": "--shape qwen3.5-35b-a3b --lora 16",
    "Nemotron-3-Nano-30B-A3B, LoRA": "--shape nemotron-3-nano-30b-a3b --lora 16",
}
RAMS = ("64GiB", "128GiB")  # of an RTX 4090 with a drive
STEP = "--seq-len 2048 --dry-run --out OUT --batch-size"  # sequences


def simulated(command: str) -> Forecast | str:
    """The forecast of a command, or why it does not fit, in a line."""
    try:
        return prepare(parse(command.split())).forecast
    except DoesNotFit as error:
        return f"no: {str(error).removeprefix('even the smallest plan ').split('. ')[0]}"


def dry_run(machine: str, job: str, sequences: int = 16) -> str:
    """Tokens/s and seconds of a step, and what it writes to drives; or why it does not fit, in a line."""
    f = simulated(f"{job} {STEP} {sequences} --assume {machine}")
    if isinstance(f, str):
        return f
    written = f", {gb(f.step.ssd_written)} written" if f.step.ssd_written else ""
    return f"{f.work.tokens / f.step.step_s:,.0f} ({seconds(f.step.step_s)}{written})"


def large(model: str, drives: str) -> list[str]:
    """Cells of adapters on a frozen base in fp8, in steps of 65,536 tokens."""
    f = simulated(f"--shape {model} --lora 16 --base fp8 {STEP} 32 --assume gpu=rtx4090,ram=128GiB,ssd={drives}")
    if isinstance(f, str):
        return [f] * 2
    read, written = gb(f.step.ssd_read), f", {gb(f.step.ssd_written)} written" if f.step.ssd_written else ""
    return [f"{f.work.tokens / f.step.step_s:,.0f} ({seconds(f.step.step_s)})", f"{read} read{written}"]


def large_table() -> None:
    print(f"| tokens/s (a step) | {' | '.join(DRIVES)} | a step |")
    print(f"|---|{'---|' * (len(DRIVES) + 1)}")
    for name, model in LARGE.items():
        found = [large(model, drives) for drives in DRIVES.values()]
        print(f"| {name} | {' | '.join(first for first, _ in found)} | {found[-1][1]} |", flush=True)


def hybrids_table() -> None:
    print(f"| tokens/s (a step) | {' | '.join(RAMS)} |")
    print(f"|---|{'---|' * len(RAMS)}")
    for name, job in HYBRIDS.items():
        found = (dry_run(f"gpu=rtx4090,ram={ram},ssd=2TB", job) for ram in RAMS)
        print(f"| {name} | {' | '.join(found)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only boxes whose name contains this")
    parser.add_argument("--large", action="store_true", help="models much larger than the machine, instead")
    parser.add_argument("--several", action="store_true", help="several GPUs, instead: steps of 65,536 tokens")
    parser.add_argument("--hybrids", action="store_true", help="models with linear recurrences, instead")
    given = parser.parse_args()
    if given.large or given.hybrids:
        (large_table if given.large else hybrids_table)()
        return
    jobs = dict(list(JOBS.items())[:2]) if given.several else JOBS
    print(f"| tokens/s (a step) | {' | '.join(jobs)} |")
    print(f"|---|{'---|' * len(jobs)}")
    boxes, sequences = (SEVERAL, 32) if given.several else (BOXES, 16)
    for box, machine in boxes.items():
        if given.only in box:
            print(f"| {box} | {' | '.join(dry_run(machine, job, sequences) for job in jobs.values())} |", flush=True)


if __name__ == "__main__":
    main()

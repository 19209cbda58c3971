"""Published figures compared with simulated ones, and what a machine with an RTX 4090 trains.

python scripts/bench/paper_tables.py --write

Published systems are simulated by their papers' equations, Trireme by its step code, on the papers' machines
(paper_figures.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import paper_figures
from paper_figures import DRIVE, SEQ, WHY, WINDOWS

from trireme.engine.planner.gpus import GPUS
from trireme.engine.planner.rates import GB

PAGE = Path(__file__).parents[2] / "docs" / "paper-tables.md"


def page(made: dict[str, list[dict]]) -> str:
    lines = [
        "# Published figures and simulated ones",
        "",
        "Made by `python scripts/bench/paper_tables.py --write`; nothing here was run on these machines. *Simulated*",
        "is the published system by its paper's own equations on the paper's machine; *Trireme* is the prediction of",
        "this project's step code for the plan that it would make there. Rates: `engine/planner/rates.py`.",
        "Nothing is fitted.",
        "",
        "## Throughput, TFLOP/s of the model (recomputation not counted), sequences of 1,024",
        "",
        "| published in | model | GPU | drives | sequences | published | simulated | ratio "
        "| Trireme | state on SSD | its step |",
        f"|{'---|' * 11}",
    ]
    for r in made["throughput"]:
        mark = f" ({r['why']})" if r["why"] else ""
        alike = f"{r['trireme_ssd']:.0f}" if r["trireme_ssd"] else "–"
        lines.append(
            f"| {r['system']} | {r['model']} | {GPUS[r['gpu']].name} | {r['drives']} | {r['sequences']} "
            f"| {r['published']:g} | {r['simulated']:.0f} | {r['ratio']:.2f}{mark} | {r['trireme']:.0f} "
            f"| {alike} | {r['trireme_sequences']} sequences, {r['bound']} |"
        )
    lines += ["", "Where simulated and published differ by more than 15 %:", ""]
    lines += [f"- *{name}*: {text}" for name, text in WHY.items()]
    lines += [
        "",
        *OURS,
        "",
        "## Largest models",
        "",
        "| published in | machine | published | Trireme |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['system']} | {r['machine']} | {r['published']} | {r['trireme']} |" for r in made["sizes"]]
    lines += ["", *SIZES, "", *WINDOW, "", f"| model, sequences | {' | '.join(f'{n} slots' for n in WINDOWS)} |"]
    lines.append(f"|{'---|' * (1 + len(WINDOWS))}")
    for r in made["windows"]:
        shares = [f"{share:.0%}" for share in r["share"]] + ["does not fit"] * (len(WINDOWS) - len(r["share"]))
        lines.append(f"| {r['model']}, {r['sequences']} | {' | '.join(shares)} |")
    lines += [
        "",
        *buyers_table(made["buyers"]),
        "",
        *adapters_table(made["adapters"]),
        "",
        *mixtures_table(made["mixtures"]),
    ]
    return "\n".join(lines) + "\n"


OURS = (
    "Trireme's columns are without clipping, as in the papers: first as it would place things, then with all",
    "optimizer state on the SSD and weights in RAM (–: RAM is too small for them). Where it is below a published",
    "figure, with 13B, nothing is computed again and the GPU is never idle; its rate is lower: 0.885 of a large",
    "product's for GEMMs, 0.53 for attention, as measured on an H200, in place of the paper's benchmarked block.",
    "Where it is above one, state moves 10 + 10 bytes a parameter, not 16 + 14, and stays in RAM while there is",
    "room, which leaves the drives to activations.",
)

SIZES = (
    "Of the models of each paper's own table, with one sequence of 1,024 tokens and no clipping, in 85 % of the RAM.",
    "Trireme needs room for a block on the GPU, or for its larger half: for its weights and the sum of its gradients.",
    "A V100 has no bf16: its rows are sizes, nothing more.",
)


WINDOW = (
    "## The window of weights on the GPU",
    "",
    "STRONGHOLD's figure 9: throughput of a 1.7B and a 39.5B model on a V100 grows with the window and is level from 8",
    "layers on. In its window weights and gradients of each layer live, and every hand-over costs a call of a hook.",
    "Trireme's holds weights alone, and is level from 2 slots on, one in use and one on its way; more serve steps that",
    "are uneven. Share of the best throughput, simulated, all state in RAM, no activations kept:",
)


def buyers_table(rows: list[dict]) -> list[str]:
    lines = [
        "## An RTX 4090, RAM and consumer drives",
        "",
        f"Full fine-tuning with fp32 AdamW, sequences of {SEQ:,}, as many as fit up to 128 a step. A drive holds 4 TB,",
        f"reads {DRIVE.read / GB:g} and writes {DRIVE.write / GB:g} GB/s for hours, and may be written "
        f"{DRIVE.endurance / 1e12:,.0f} TB; memory is two channels of DDR5.",
        "*no clip*: only `--max-grad-norm 0` fits. With the SSD bound, a larger step is proportionally cheaper.",
        "",
        "| model | RAM GiB | drives | sequences | s a step | tokens/s | TFLOP/s | bound by | TB written / M tokens |",
        f"|{'---|' * 9}",
    ]
    for r in rows:
        start = f"| {r['model']} | {r['ram_gib']} | {r['drives']} |"
        if "step_s" not in r:
            lines.append(f"{start} does not fit: {r['short']} | | | | | |")
            continue
        clip = "" if r["clipping"] else ", no clip"
        lines.append(
            f"{start} {r['sequences']}{clip} | {r['step_s']:.3g} | {r['tokens_per_s']:,.0f} | {r['tflops']:.0f} "
            f"| {r['bound']} | {_short_number(r['written_tb_per_mtoken'])} |"
        )
    return lines


def adapters_table(rows: list[dict]) -> list[str]:
    lines = [
        "## Adapters on the same box",
        "",
        "LoRA, rank 16, on every linear layer of the blocks, on bf16 weights as they were released; sequences of",
        f"{SEQ:,}. What RAM does not hold of the base is read from the drives; nothing is written to them in a step.",
        "",
        "| model | tokens a step | RAM GiB | drives | base on the SSD GiB | s a step | tokens/s | TFLOP/s | bound by |",
        f"|{'---|' * 9}",
    ]
    for r in rows:
        assert not r["written"]
        lines.append(
            f"| {r['model']} | {r['tokens']:,} | {r['ram_gib']} | {r['drives']} | {r['base_gib']:.0f} "
            f"| {r['step_s']:.3g} | {r['tokens_per_s']:,.0f} | {r['tflops']:.0f} | {r['bound']} |"
        )
    return lines


def mixtures_table(rows: list[dict]) -> list[str]:
    lines = [
        "## Mixtures of experts on the same box",
        "",
        "One RTX 4090 or two, two drives; in full with 8-bit moments, 128 sequences a step, or LoRA of attention,",
        "rank 16, 32 sequences; gpt-oss as it is released, in MXFP4 where it is frozen. All experts' state crosses the",
        "drives in a step, whatever share of them its tokens take: what is written wears out a drive sooner than of a",
        "dense model.",
        "",
        "| model | trained | tokens a step | GPUs | RAM GiB | s a step | tokens/s | bound by | TB written / M tokens |",
        f"|{'---|' * 9}",
    ]
    for r in rows:
        how = f"LoRA {r['rank']}" if r["rank"] else "all"
        start = f"| {r['model']} | {how} | {r['tokens']:,} | {r['gpus']} | {r['ram_gib']} |"
        if "step_s" not in r:
            lines.append(f"{start} does not fit: {r['short']} | | | |")
            continue
        written = _short_number(r["written_tb_per_mtoken"]) if r["written_tb_per_mtoken"] else "0"
        lines.append(f"{start} {r['step_s']:.3g} | {r['tokens'] / r['step_s']:,.0f} | {r['bound']} | {written} |")
    return lines


def _short_number(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--write", action="store_true", help=f"renew {PAGE.name}")
    p.add_argument("--json", help="write the figures to this file")
    a = p.parse_args(argv)
    made = {
        "throughput": paper_figures.throughput(),
        "sizes": paper_figures.sizes(),
        "windows": paper_figures.windows(),
        "buyers": paper_figures.buyers(),
        "adapters": paper_figures.adapters(),
        "mixtures": paper_figures.mixtures(),
    }
    text = page(made)
    PAGE.write_text(text) if a.write else print(text, end="")
    if a.json:
        Path(a.json).write_text(json.dumps(made, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The card of a model on the hub: what it was made of, by its run's config.yaml and log; nothing of this machine."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from trireme.engine.amounts import count
from trireme.engine.run.config.config_file import from_yaml
from trireme.engine.run.config.option_names import flag_of
from trireme.engine.run.hub.names import data_name, model_name, parted
from trireme.engine.run.options import Options
from trireme.engine.run.output.log import Totals, perplexity
from trireme.engine.run.output.records import read_log

# Told elsewhere in the card, or about this machine.
_LEFT_OUT = frozenset({
    "model", "data", "val", "out", "store", "tokenizer", "chat_template", "adapter", "teacher", "plan", "config",
    "resume", "push", "log", "keep", "device", "gpus", "gpu_memory", "ram", "optimizer_mode", "show_example",
    "save_every", "merge", "export_every", "system",
})  # fmt: skip


def card_of(out: Path, name: str, base: str, adapter: bool) -> str:
    """Markdown of the run whose output is in `out`. `base`: on the hub, "" where it is not known.

    Raises InputError where config.yaml is not one.
    """
    given = from_yaml(out / "config.yaml") if (out / "config.yaml").is_file() else {}
    data = [data_name(parted(text)[0]) for text in given.get("data", ())]
    known = sorted({found.repo for found in data if found})
    head = [f"base_model: {json.dumps(base)}"] * bool(base)
    task = "classification" if given.get("method") in ("reward", "classify") else "generation"
    head += [f"library_name: {'peft' if adapter else 'transformers'}", f"pipeline_tag: text-{task}"]
    head += ["tags:", "- trireme", *["- lora"] * adapter]
    head += ["datasets:", *(f"- {json.dumps(repo)}" for repo in known)] if known else []
    kind = "A LoRA adapter of" if adapter else "A fine-tuned copy of"
    body = [
        f"# {name}",
        "",
        f"{kind} {base or shown_model(given)}, trained with Trireme. The base's licence applies.",
        "",
    ]
    body += ["## Data", "", *(f"- {text}" for text in _data(given)), ""] if given else []
    body += _training(out, given)
    return "\n".join(["---", *head, "---", "", *body])


def shown_model(given: dict[str, Any]) -> str:
    """The model by its name, without its folder."""
    model = str(given.get("model") or "")
    found = model_name(model)
    return found.repo if found else Path(model).name or "a model"


def _data(given: dict[str, Any]) -> list[str]:
    """Files by name, without their folders; those of the hub as they are called there."""

    def shown(text: str) -> str:
        plain, weight = parted(text)
        name = data_name(plain)
        found = str(name) if name else Path(plain).name
        return f"`{found}`" + (f", weight {weight[1:]}" if weight else "")

    val = given.get("val")
    held = "" if not val else f"{float(val):.3g} of the rows" if _is_number(val) else shown(val)
    return [shown(text) for text in given.get("data", ())] + ([f"held out: {held}"] if held else [])


def _training(out: Path, given: dict[str, Any]) -> list[str]:
    totals = Totals()
    for _, record in read_log(out / "log.jsonl") if (out / "log.jsonl").is_file() else ():
        totals.add(record)
    lines = list[str]()
    if totals.steps:
        lines += ["## Training", "", f"{count(totals.steps, 'step')}, {round(totals.trained):,} trained tokens.", ""]
    if totals.losses:
        lines += ["| | before | after |", "|---|---|---|"]
        lines += ["| training loss, first and last step | {:.4f} | {:.4f} |".format(*totals.losses)]
    if totals.evals:
        first, last = totals.evals
        lines += [f"| held-out loss | {first:.4f} | {last:.4f} |"]
        lines += [f"| held-out perplexity | {perplexity(first)} | {perplexity(last)} |"]
    options = [f"{flag_of(f.name)} {_text(given[f.name])}" for f in fields(Options) if _is_told(f.name, given)]
    return [*lines, "", "## Options", "", "```", *options, "```", ""] if options else [*lines, ""]


def _is_told(name: str, given: dict[str, Any]) -> bool:
    return name in given and name not in _LEFT_OUT and given[name] not in (None, False, (), "")


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else "" if value is True else str(value)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()

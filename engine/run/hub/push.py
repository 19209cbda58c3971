"""Uploads the output of a run to the Hugging Face hub, with a model card, as one commit. A new repository is
private.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from trireme.engine.amounts import count, gib
from trireme.engine.run.config.config_file import options_of
from trireme.engine.run.config.option_names import flag_of
from trireme.engine.run.hub.client import asking, client, endpoint
from trireme.engine.run.hub.names import Named, base_of, data_name, model_name, parted
from trireme.engine.run.options import Options
from trireme.engine.run.output.folder import LOGS
from trireme.engine.run.output.log import Totals, perplexity
from trireme.engine.run.output.records import read_log
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.peft_config import CONFIG, read_adapter_config
from trireme.engine.tuning.peft_config import base_of as base_in
from trireme.models.config import InputError
from trireme.storage.auxiliary import auxiliary
from trireme.storage.untrusted import parse_json, read_small, why

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
MODEL = "config.json"


def check_push(options: Options) -> None:
    """Raises InputError before training if it is known already that the output cannot be uploaded."""
    if not options.push:
        return
    if (options.lora or options.adapter) and not base_of(options.model)[1]:
        raise InputError(
            f"--push {options.push}: adapters name their base, and {options.model} is a folder of this machine. Name "
            "the base by its name on the hub, or merge the adapter and upload the result: push DIR OWNER/NAME."
        )
    hub = _client(options.push)
    with asking(hub, Named("model", options.push), "uploaded"):
        hub.HfApi(endpoint=endpoint()).whoami()
    _check_free(hub, options.push)


def push(out: Path, name: str, screen: Screen) -> None:
    """Uploads. Raises InputError, OSError."""
    hub = _client(name)
    content = _content(out, name)
    _check_free(hub, name)
    size = sum(found.stat().st_size if isinstance(found, Path) else len(found) for found in content.values())
    screen.say(f"upload   {count(len(content), 'file')}, {gib(size)}, to {endpoint()}/{name}")
    api = hub.HfApi(endpoint=endpoint())
    add = [hub.CommitOperationAdd(file, str(v) if isinstance(v, Path) else v) for file, v in sorted(content.items())]
    with asking(hub, Named("model", name), "uploaded"):
        api.create_repo(name, private=True, exist_ok=True)
        api.create_commit(name, add, commit_message="Upload a model trained with Trireme")
    screen.say(f"uploaded {endpoint()}/{name}: private if it is new; its settings there make it public")


def _client(name: str) -> Any:
    """Raises InputError."""
    if not NAME.fullmatch(name):
        raise InputError(f"--push {name}: expected OWNER/NAME, the model's name on the hub.")
    hub = client()
    if hub is None:
        raise InputError(f"--push {name}: uploads need the hub's client: pip install huggingface_hub.")
    return hub


def _check_free(hub: Any, name: str) -> None:
    """Raises InputError if a model is there already: its files and the new ones would be mixed."""
    with asking(hub, Named("model", name), "uploaded"):
        api = hub.HfApi(endpoint=endpoint())
        there = api.repo_info(name).siblings or () if api.repo_exists(name) else ()
    if any(file.rfilename.endswith((".safetensors", ".bin", ".gguf")) for file in there):
        raise InputError(f"--push {name}: there is a model of that name on the hub already. Name another.")


def _content(out: Path, name: str) -> dict[str, Path | bytes]:
    """What is uploaded, by name: weights, configuration, tokenizer, and the card. It has no paths of this machine.

    Raises InputError if there is no model, or an adapter's base is not on the hub.
    """
    weights = sorted(path for path in out.glob("*.safetensors") if path.is_file())
    adapter = (out / CONFIG).is_file()
    if not weights or not (adapter or (out / MODEL).is_file()):
        raise InputError(f"{out} holds no model to upload. Name the output of a finished run.")
    names = [*auxiliary(out), *(path.name for path in out.glob("*.safetensors.index.json"))]
    found: dict[str, Path | bytes] = {path.name: path for path in weights}
    found |= {file: out / file for file in names if file not in LOGS and (out / file).is_file()}
    base = _base(out, adapter)
    if (out / MODEL).is_file() and (clean := _without_path(out / MODEL)):
        found[MODEL] = clean
    if (out / "loss.svg").is_file():
        found["loss.svg"] = out / "loss.svg"
    return found | {"README.md": card_of(out, name, base, adapter).encode()}


def _base(out: Path, adapter: bool) -> str:
    """The base's name on the hub; "" for a whole model if it is not known. Raises InputError."""
    if adapter:
        base = base_in(read_adapter_config(out))
        if not NAME.fullmatch(base) or base.startswith(".") or Path(base).exists():
            raise InputError(
                f"{out}: its base_model_name_or_path is {base!r}, a folder of this machine. Write its name on the hub "
                f"there, in {out / CONFIG}, or merge the adapter and upload the result."
            )
        return base
    given = options_of(out)
    found = model_name(str(given.get("model") or ""))
    return found.repo if found else ""


def _without_path(config: Path) -> bytes | None:
    """config.json without the folder that it was read from; None if it names none. Raises InputError."""
    try:
        found = parse_json(read_small(config, links=True), "file")
    except (OSError, ValueError) as error:
        raise InputError(f"{config}: {why(error)}. Restore it.") from None
    where = found.get("_name_or_path")
    if not isinstance(where, str) or not (where.startswith((".", "~")) or Path(where).is_absolute()):
        return None
    return json.dumps({key: value for key, value in found.items() if key != "_name_or_path"}, indent=2).encode()


# ---------------------------------------------------------------- the card


# Told elsewhere in the card, or about this machine.
_LEFT_OUT = frozenset({
    "model", "data", "val", "out", "store", "tokenizer", "chat_template", "adapter", "teacher", "plan", "config",
    "resume", "push", "log", "keep", "device", "gpus", "gpu_memory", "ram", "optimizer_mode", "show_example",
    "save_every", "merge", "export_every", "system",
})  # fmt: skip


def card_of(out: Path, name: str, base: str, adapter: bool) -> str:
    """The model card, in Markdown, of the run in `out`. `base`: name on the hub, "" if it is not known.

    Raises InputError if config.yaml cannot be read.
    """
    given = options_of(out)
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
    """The model's name without its folder."""
    model = str(given.get("model") or "")
    found = model_name(model)
    return found.repo if found else Path(model).name or "a model"


def _data(given: dict[str, Any]) -> list[str]:
    """Names of data files without their folders; those of the hub by their names there."""

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
    for _, record in read_log(out / "log.jsonl"):
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
    told = {
        name: value for name, value in given.items() if name not in _LEFT_OUT and value not in (None, False, (), "")
    }
    options = [f"{flag_of(f.name)} {_text(told[f.name])}" for f in fields(Options) if f.name in told]
    return [*lines, "", "## Options", "", "```", *options, "```", ""] if options else [*lines, ""]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else "" if value is True else str(value)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()

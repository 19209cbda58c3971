"""`trireme push FOLDER OWNER/NAME`: uploads a finished model or adapter, with a card of its run, as one commit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trireme.engine.amounts import count, gib
from trireme.engine.run import config_file, screen
from trireme.engine.run.after.hub import Name, asking, base_of, data_name, endpoint, model_name
from trireme.engine.run.log import read_log
from trireme.engine.run.options import Options, Push, flag
from trireme.engine.tuning import peft_config
from trireme.models.config import InputError
from trireme.storage.auxiliary import auxiliary
from trireme.storage.untrusted import parse_json, read_small, why

# Options that are told elsewhere in the card, or are about this machine.
LEFT_OUT = {"model", "data", "val", "out", "log", "push", "save_every", "export_every", "keep", "keep_state", "system"}


def run(options: Push) -> None:
    """`trireme push FOLDER OWNER/NAME`."""
    if not options.folder or not options.name:
        raise InputError("push: a folder and a name are needed: trireme push OUT OWNER/NAME.")
    upload(Path(options.folder), options.name)


def check(options: Options) -> None:
    """Raises InputError before training if it is known already that the output cannot be uploaded."""
    if not options.push:
        return
    if (options.lora or options.adapter) and not (model_name(options.model) or base_of(options.model)[1]):
        raise InputError(
            f"--push {options.push}: adapters name their base, and {options.model} is a folder of this machine. Name "
            "the base by its name on the hub, or merge the adapter and upload that: trireme push DIR OWNER/NAME."
        )
    _free(options.push)


def upload(out: Path, name: str) -> None:
    """Uploads a folder as one commit; a new repository is private. Raises InputError, OSError."""
    from huggingface_hub import CommitOperationAdd

    content = _content(out, name)
    api = _free(name)
    size = sum(file.stat().st_size if isinstance(file, Path) else len(file) for file in content.values())
    screen.say(f"upload   {count(len(content), 'file')}, {gib(size)}, to {endpoint()}/{name}")
    add = [CommitOperationAdd(file, str(v) if isinstance(v, Path) else v) for file, v in sorted(content.items())]
    with asking(Name(name), "not uploaded"):
        api.create_repo(name, private=True, exist_ok=True)
        api.create_commit(name, add, commit_message="Upload a model trained with Trireme")
    screen.say(f"uploaded {endpoint()}/{name}: private if it is new; its settings there make it public")


def _free(name: str) -> Any:
    """The client of a user who may write there. Raises InputError if there is a model: files would be mixed."""
    from huggingface_hub import HfApi

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise InputError(f"--push {name}: expected OWNER/NAME, the model's name on the hub.")
    api = HfApi(endpoint=endpoint())
    with asking(Name(name), "not uploaded"):
        api.whoami()
        files = api.model_info(name).siblings or () if api.repo_exists(name) else ()
    if any(file.rfilename.endswith((".safetensors", ".bin", ".gguf")) for file in files):
        raise InputError(f"--push {name}: there is a model of that name on the hub already. Name another.")
    return api


def _content(out: Path, name: str) -> dict[str, Path | bytes]:
    """What is uploaded: weights, configuration, tokenizer, report and the card, without paths of this machine.

    Raises InputError if there is no model, or an adapter's base is not on the hub.
    """
    weights, config, base = sorted(out.glob("*.safetensors")), out / "config.json", ""
    is_adapter = (out / peft_config.CONFIG).is_file()
    if not weights or not (is_adapter or config.is_file()):
        raise InputError(f"{out} holds no model to upload. Name the output of a finished run.")
    if is_adapter:
        base = peft_config.base_of(peft_config.read_adapter_config(out))
        if not model_name(base):
            raise InputError(f"{out / peft_config.CONFIG}: base_model_name_or_path is {base!r}, a folder here. "
                             "Write its name on the hub there, or merge the adapter and upload that.")  # fmt: skip
    files = [*weights, *(out / file for file in auxiliary(out)), *out.glob("*.index.json"), *out.glob("report.html")]
    content: dict[str, Path | bytes] = {str(file.relative_to(out)): file for file in files}
    if config.is_file():
        try:
            raw = parse_json(read_small(config, links=True), "file")
        except (OSError, ValueError) as error:
            raise InputError(f"{config}: {why(error)}. Restore it.") from None
        plain = {key: value for key, value in raw.items() if key != "_name_or_path"}
        content["config.json"] = json.dumps(plain, indent=2).encode()
    return content | {"README.md": card_of(out, name, base).encode()}


def card_of(out: Path, name: str, base: str = "") -> str:
    """The model card, in Markdown, of the run in `out`. `base`: of an adapter."""
    from huggingface_hub import ModelCardData

    o = config_file.of_run(out) or Options()
    found = model_name(o.model) if o.model else None
    model = base or (found.repo if found else "")
    repos = sorted({data.repo for data in map(data_name, o.data) if data})
    task = "text-classification" if o.method in ("reward", "classify") else "text-generation"
    library, tags = ("peft", ["trireme", "lora"]) if base else ("transformers", ["trireme"])
    head = ModelCardData(
        base_model=model or None, datasets=repos or None, library_name=library, pipeline_tag=task, tags=tags
    )
    kind = "A LoRA adapter of" if base else "A fine-tuned copy of"
    of = model or Path(o.model).name or "a model"
    lines = [f"# {name}", "", f"{kind} {of}, trained with Trireme. The base's licence applies.", ""]
    lines += ["## Data", "", *(f"- `{_shown(text)}`" for text in o.data), ""] if o.data else []
    losses = [record["eval_loss"] for record in read_log(out / "log.jsonl") if "eval_loss" in record]
    if losses:
        lines += [
            "| | before | after |",
            "|---|---|---|",
            f"| held-out loss | {losses[0]:.4f} | {losses[-1]:.4f} |",
            "",
        ]
    local = {name for name, f in config_file.FIELDS.items() if f.metadata["kind"] & {"path", "host"}}
    values = {f: value for f, value in config_file.saved(o).items() if f in o.given - local - LEFT_OUT}
    if values:
        text = lambda v: ",".join(map(str, v)) if isinstance(v, list) else "" if v is True else str(v)
        lines += ["## Options", "", "```", *(f"{flag(f)} {text(value)}" for f, value in values.items()), "```", ""]
    return "\n".join(["---", head.to_yaml(), "---", "", *lines])


def _shown(text: str) -> str:
    """Data as it is named on the hub, or without its folder."""
    return text if data_name(text) else Path(text).name

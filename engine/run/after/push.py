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
from trireme.models.config import InputError, read_raw
from trireme.storage.auxiliary import auxiliary

WEIGHTS = (".safetensors", ".bin", ".gguf")
# Options that are in other parts of the card, or are about this machine.
LEFT_OUT = {"model", "data", "val", "out", "log", "push", "save_every", "export_every", "keep", "keep_state", "system"}


def run(o: Push) -> None:
    """The command. Raises InputError, OSError."""
    if not o.folder or not o.name:
        raise InputError("push: a folder and a name are needed: trireme push OUT OWNER/NAME.")
    upload(Path(o.folder), o.name)


def check(o: Options) -> None:
    """Raises InputError before training if it is known already that the output cannot be uploaded."""
    if o.push and (o.lora or o.adapter) and not (model_name(o.model) or base_of(o.model)[1]):
        raise InputError(
            f"--push {o.push}: adapters name their base, and {o.model} is a folder of this machine. Name the base by "
            "its name on the hub, or merge the adapter and upload that: trireme push DIR OWNER/NAME."
        )
    if o.push:
        _client(o.push)


def upload(out: Path, name: str) -> None:
    """Uploads a folder as one commit; a new repository is private. Raises InputError, OSError."""
    from huggingface_hub import CommitOperationAdd

    content = _content(out, name)
    api = _client(name)
    size = sum(file.stat().st_size if isinstance(file, Path) else len(file) for file in content.values())
    screen.say(f"upload   {count(len(content), 'file')}, {gib(size)}, to {endpoint()}/{name}")
    add = [CommitOperationAdd(file, str(v) if isinstance(v, Path) else v) for file, v in sorted(content.items())]
    with asking(Name(name)):
        api.create_repo(name, private=True, exist_ok=True)
        api.create_commit(name, add, commit_message="Upload a model trained with Trireme")
    screen.say(f"uploaded {endpoint()}/{name}: private if it is new; its settings there make it public")


def _client(name: str) -> Any:
    """The client of a user who may write there. Raises InputError if there is a model: files would be mixed."""
    from huggingface_hub import HfApi

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise InputError(f"--push {name}: expected OWNER/NAME, the model's name on the hub.")
    api = HfApi(endpoint=endpoint())
    with asking(Name(name)):
        api.whoami()
        files = api.model_info(name).siblings or () if api.repo_exists(name) else ()
    if any(file.rfilename.endswith(WEIGHTS) for file in files):
        raise InputError(f"--push {name}: there is a model of that name on the hub already. Name another.")
    return api


def _content(out: Path, name: str) -> dict[str, Path | bytes]:
    """What is uploaded: weights, configuration, tokenizer and the card, without paths of this machine.

    Raises InputError if there is no model, or an adapter's base is not on the hub.
    """
    weights, base = sorted(out.glob("*.safetensors")), ""
    is_adapter, has_config = (out / peft_config.CONFIG).is_file(), (out / "config.json").is_file()
    if not weights or not (is_adapter or has_config):
        raise InputError(f"{out} holds no model to upload. Name the output of a finished run.")
    if is_adapter and not model_name(base := peft_config.base_of(peft_config.read_adapter_config(out))):
        where, way = out / peft_config.CONFIG, "Write its name on the hub there, or merge the adapter and upload that"
        raise InputError(f"{where}: base_model_name_or_path is {base!r}, a folder here. {way}.")
    files = [*weights, *(out / file for file in auxiliary(out)), *out.glob("*.index.json")]
    content: dict[str, Path | bytes] = {str(file.relative_to(out)): file for file in files}
    if has_config:
        config = {key: value for key, value in read_raw(out).items() if key != "_name_or_path"}
        content["config.json"] = json.dumps(config, indent=2).encode()
    return content | {"README.md": card_of(out, name, base).encode()}


def card_of(out: Path, name: str, base: str = "") -> str:
    """The model card, in Markdown, of the run in `out`. `base`: of an adapter."""
    from huggingface_hub import ModelCardData

    o = config_file.of_run(out) or Options()
    source = model_name(o.model) if o.model else None
    model = base or (source.repo if source else "")
    head = ModelCardData(
        base_model=model or None,
        datasets=sorted({data.repo for data in map(data_name, o.data) if data}) or None,
        library_name="peft" if base else "transformers",
        pipeline_tag="text-classification" if o.method in ("reward", "classify") else "text-generation",
        tags=["trireme", "lora"] if base else ["trireme"],
    )
    what = f"{'A LoRA adapter' if base else 'A fine-tuned copy'} of {model or Path(o.model).name or 'a model'}"
    lines = ["---", head.to_yaml(), "---", "", f"# {name}", ""]
    lines += [f"{what}, trained with Trireme. The base's licence applies.", ""]
    data = [text if data_name(text) else Path(text).name for text in o.data]  # without a folder of this machine
    lines += ["## Data", "", *(f"- `{text}`" for text in data), ""] if data else []
    if losses := [record["eval_loss"] for record in read_log(out / "log.jsonl") if "eval_loss" in record]:
        lines += [f"Held-out loss: {losses[0]:.4f} before, {losses[-1]:.4f} after training.", ""]
    local = {name for name, f in config_file.FIELDS.items() if f.metadata["kind"] & {"path", "host"}}
    values = {name: v for name, v in config_file.saved(o).items() if name in o.chosen - local - LEFT_OUT}
    text = lambda v: ",".join(map(str, v)) if isinstance(v, list) else "" if v is True else str(v)
    options = [f"{flag(name)} {text(v)}" for name, v in values.items()]
    return "\n".join([*lines, *(["## Options", "", "```", *options, "```", ""] if options else [])])

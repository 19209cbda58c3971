"""`trireme push FOLDER OWNER/NAME`: uploads a finished model or adapter, with a card of its run, as one commit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trireme.engine.amounts import count, gib
from trireme.engine.run import config_file, screen
from trireme.engine.run.after.hub import Name, asking, base_of, data_name, endpoint, model_name
from trireme.engine.run.options import Options, Push, flag
from trireme.engine.tuning import peft_config
from trireme.models.config import InputError, read_raw
from trireme.storage.auxiliary import auxiliary

WEIGHTS = (".safetensors", ".bin", ".gguf")
ON_THE_CARD = ("method", "lora", "lr", "epochs", "max_steps", "batch_size", "seq_len", "schedule", "warmup", "base")


def run(o: Push) -> None:
    """The command. Raises InputError, OSError."""
    if not o.folder or not o.name:
        raise InputError("push: a folder and a name are needed: trireme push OUT OWNER/NAME.")
    upload(Path(o.folder), o.name)


def check(o: Options) -> None:
    """Raises InputError before training if it is known already that the output cannot be uploaded."""
    if o.push and (o.lora or o.adapter) and not (model_name(o.model) or base_of(o.model)[1]):
        raise _local_base(f"--push {o.push}", o.model)
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
    base = peft_config.base_of(peft_config.read_adapter_config(out)) if (out / peft_config.CONFIG).is_file() else None
    if base is not None and not model_name(base):
        raise _local_base(str(out), base)
    if not any(out.glob("*.safetensors")):
        raise InputError(f"{out} holds no model to upload. Name the output of a finished run.")
    files = [*out.glob("*.safetensors"), *(out / file for file in auxiliary(out)), *out.glob("*.index.json")]
    content: dict[str, Path | bytes] = {str(file.relative_to(out)): file for file in files}
    if base is None:
        config = {key: value for key, value in read_raw(out).items() if key != "_name_or_path"}
        content["config.json"] = json.dumps(config, indent=2).encode()
    return content | {"README.md": card_of(out, name, base or "").encode()}


def _local_base(subject: str, base: str) -> InputError:
    way = "Name it as on the hub, or merge the adapter and upload that: trireme push DIR OWNER/NAME"
    return InputError(f"{subject}: adapters name their base, and {base} is a folder of this machine. {way}.")


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
    lines += [f"- `{text if data_name(text) else Path(text).name}`" for text in o.data]  # no folder of this machine
    lines += [f"- `{flag(option)} {getattr(o, option)}`" for option in ON_THE_CARD if option in o.chosen]
    return "\n".join([*lines, ""])

"""`trireme push FOLDER OWNER/NAME`: uploads a finished model or adapter, with a short card, as one commit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trireme.engine.amounts import count
from trireme.engine.run import config_file, screen
from trireme.engine.run.after.hub import Name, asking, base_of, endpoint, name_of
from trireme.engine.run.options import Options, Push
from trireme.engine.tuning import peft_config
from trireme.models.config import InputError, read_raw
from trireme.storage.auxiliary import auxiliary

WEIGHTS = (".safetensors", ".bin", ".gguf")


def run(o: Push) -> None:
    """The command. Raises InputError, OSError."""
    if not o.folder or not o.name:
        raise InputError("push: a folder and a name are needed: trireme push OUT OWNER/NAME.")
    upload(Path(o.folder), o.name)


def check(o: Options) -> None:
    """Raises InputError before training if it is known already that the output cannot be uploaded."""
    if o.push and (o.lora or o.adapter) and not (name_of(o.model) or base_of(o.model)[1]):
        raise _local_base(f"--push {o.push}", o.model)
    if o.push:
        _client(o.push)


def upload(out: Path, name: str) -> None:
    """Uploads weights, configuration, tokenizer and a card as one commit, without paths of this machine; a new
    repository is private.

    Raises InputError if there is no model, or an adapter's base is not on the hub; OSError.
    """
    from huggingface_hub import CommitOperationAdd  # late: most runs need none of it

    base = peft_config.base_of(peft_config.read_adapter_config(out)) if (out / peft_config.CONFIG).is_file() else None
    if base is not None and not name_of(base):
        raise _local_base(str(out), base)
    if not any(out.glob("*.safetensors")):
        raise InputError(f"{out} holds no model to upload. Name the output of a finished run.")
    files = [*out.glob("*.safetensors"), *out.glob("*.index.json"), *(out / file for file in auxiliary(out))]
    content: dict[str, str | bytes] = {str(file.relative_to(out)): str(file) for file in files}
    if base is None:
        config = {key: value for key, value in read_raw(out).items() if key != "_name_or_path"}
        content["config.json"] = json.dumps(config, indent=2).encode()
    content["README.md"] = _card(out, name, base).encode()
    api = _client(name)
    screen.say(f"upload   {count(len(content), 'file')} to {endpoint()}/{name}")
    with asking(Name(name)):
        api.create_repo(name, private=True, exist_ok=True)
        add = [CommitOperationAdd(*pair) for pair in sorted(content.items())]
        api.create_commit(name, add, commit_message="Upload a model trained with Trireme")
    screen.say(f"uploaded {endpoint()}/{name}: private if it is new; its settings there make it public")


def _card(out: Path, name: str, adapters: str | None) -> str:
    """The model card, in Markdown. `adapters`: the base of an adapter on the hub; None: of a whole model."""
    run = config_file.of_run(out)
    source = name_of(adapters or (run.model if run else ""))
    base = [f"base_model: {source.repo}"] if source else []
    head = ["library_name: transformers" if adapters is None else "library_name: peft", "tags: [trireme]", *base]
    what = f"{'A fine-tuned copy' if adapters is None else 'A LoRA adapter'} of {source.repo if source else 'a model'}"
    words = f"{what}, trained with Trireme. The base's licence applies."
    return "\n".join(["---", *head, "---", "", f"# {name}", "", words, ""])


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


def _local_base(subject: str, base: str) -> InputError:
    way = "Name it as on the hub, or merge the adapter and upload that: trireme push DIR OWNER/NAME"
    return InputError(f"{subject}: adapters name their base, and {base} is a folder of this machine. {way}.")

"""`trireme push FOLDER OWNER/NAME`: uploads a finished model or adapter, with a short card, as one commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

from trireme.engine.amounts import count
from trireme.engine.run import config_file, screen
from trireme.engine.run.after.hub import Name, asking, endpoint, name_of
from trireme.engine.run.options import Options, Push
from trireme.engine.tuning import peft_config
from trireme.models.config import InputError, read_raw
from trireme.storage.auxiliary import auxiliary

WEIGHTS = (".safetensors", ".bin", ".gguf")


def run(o: Push) -> None:
    """Uploads weights, configuration, tokenizer and a card as one commit, without paths of this machine; a new
    repository is private.

    Raises OSError; InputError if there is no model, one of that name already, or an adapter's base is not on the hub.
    """
    from huggingface_hub import CommitOperationAdd, HfApi  # late: most runs need none of it

    out, is_adapter = Path(o.folder), (Path(o.folder) / peft_config.CONFIG).is_file()
    if not o.folder or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", o.name):
        raise InputError("push needs a folder, and a name on the hub: trireme push OUT OWNER/NAME.")
    base = (config_file.of_run(out) or Options()).model
    if is_adapter:
        base = peft_config.base_of(peft_config.read_adapter_config(out))
        if not name_of(base):
            way = "Merge it and upload that: trireme merge OUT --out DIR"
            raise InputError(f"{out}: an adapter names its base, and {base} is a folder of this machine. {way}.")
    if not any(out.glob("*.safetensors")):
        raise InputError(f"{out} holds no model to upload. Name the output of a finished run.")
    files = [*out.glob("*.safetensors"), *out.glob("*.index.json"), *(out / file for file in auxiliary(out))]
    content: dict[str, str | bytes] = {str(file.relative_to(out)): str(file) for file in files}
    if not is_adapter:
        config = {key: value for key, value in read_raw(out).items() if key != "_name_or_path"}
        content["config.json"] = json.dumps(config, indent=2).encode()
    content["README.md"] = _card(o.name, is_adapter, name_of(base)).encode()
    api = HfApi(endpoint=endpoint())
    with asking(Name(o.name)):
        there = api.model_info(o.name).siblings or () if api.repo_exists(o.name) else ()
        if any(file.rfilename.endswith(WEIGHTS) for file in there):  # files would be mixed
            raise InputError(f"push {o.name}: there is a model of that name on the hub already. Name another.")
        screen.say(f"upload   {count(len(content), 'file')} to {endpoint()}/{o.name}")
        api.create_repo(o.name, private=True, exist_ok=True)
        add = [CommitOperationAdd(*pair) for pair in sorted(content.items())]
        api.create_commit(o.name, add, commit_message="Upload a model trained with Trireme")
    screen.say(f"uploaded {endpoint()}/{o.name}: private if it is new; its settings there make it public")


def _card(name: str, is_adapter: bool, base: Name | None) -> str:
    """The model card, in Markdown."""
    head = [f"library_name: {'peft' if is_adapter else 'transformers'}", "tags: [trireme]"]
    head += [f"base_model: {base.repo}"] if base else []
    what = f"{'A LoRA adapter' if is_adapter else 'A fine-tuned copy'} of {base.repo if base else 'a model'}"
    words = f"{what}, trained with Trireme. The base's licence applies."
    return "\n".join(["---", *head, "---", "", f"# {name}", "", words, ""])

"""Models and data sets of the Hugging Face hub by huggingface_hub: names, downloads into its cache, `trireme push`.

A model is OWNER/NAME or OWNER/NAME@REVISION, a data set also hf://datasets/OWNER/NAME@REVISION/FILE. Only files that
are read, or that the output needs, are downloaded; no code is run and no pickle is opened.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from trireme.engine.amounts import count
from trireme.engine.data.find import DataFile, by_uses, set_of, weighed
from trireme.engine.data.read import KINDS
from trireme.engine.run import screen
from trireme.engine.run.options import Options, Push
from trireme.engine.tuning import peft_config
from trireme.models.config import InputError, read_raw
from trireme.storage.auxiliary import CODE, SUFFIXES, auxiliary
from trireme.storage.untrusted import shown

_NAME = re.compile(
    r"(?P<scheme>hf://datasets/)?(?P<repo>[\w.-]*\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+?))?"
    r"(?(scheme)(?:/(?P<file>.+))?)"
)
_STORED = re.compile(r"(model|dataset)s--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/(.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
WEIGHTS = (".safetensors", ".bin", ".gguf")
_DRIVES = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)  # failures of this machine's


@dataclass(frozen=True)
class Name:
    """A name on the hub."""

    repo: str  # OWNER/NAME
    revision: str = ""  # a branch, tag or commit; "": the newest
    file: str | None = None  # of a data set: a path or a pattern in it, "" for all; None: a model

    def __str__(self) -> str:
        plain = f"{self.repo}@{self.revision}" if self.revision else self.repo
        return f"hf://datasets/{plain}/{self.file}" if self.file else plain

    @property
    def kind(self) -> str:
        return "model" if self.file is None else "dataset"


def cache() -> Path:
    """Where the client stores downloads, by its own environment variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expandvars(Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()))


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


# ---------------------------------------------------------------- names


def name_of(text: str, of_data: bool = False) -> Name | None:
    """The name of a model or, `of_data` with or without its weight, of a data set; None for a path, and for what looks
    like one because its first part exists.
    """
    plain = weighed(text)[0] if of_data else text
    match = _NAME.fullmatch(plain)
    if not match or (match["scheme"] and not of_data):
        return None
    local = Path(plain).exists() or Path(plain.partition("/")[0]).exists()
    if not match["scheme"] and (local or (of_data and DataFile(Path(plain)).kind in KINDS)):
        return None
    return Name(match["repo"], match["revision"] or "", (match["file"] or "") if of_data else None)


def stored_name(path: str | Path) -> Name | None:
    """The name of a downloaded model's folder, or of a file of data; None for any other path."""
    match = _STORED.fullmatch(os.path.relpath(path, cache()))
    if not match or (match[1] == "dataset") != bool(match[5]):
        return None
    return Name(f"{match[2]}/{match[3]}", match[4], match[5])


def as_saved(path: str) -> str:
    """A path as config.yaml has it: by its name on the hub if it has one; a data file with its weight."""
    plain, _ = weighed(path)
    name = stored_name(plain)
    return f"{name}{path[len(plain) :]}" if name else path


def model_title(model: str) -> str:
    """A model's name for people."""
    name = stored_name(model) or name_of(model)
    return name.repo.partition("/")[2] if name else Path(model).resolve().name


def name_and_commit(model: str) -> tuple[str, str]:
    """The base of adapters: (name on the hub, commit), or (absolute path, "")."""
    name = stored_name(model)
    return (name.repo, name.revision) if name else (str(Path(model).resolve()), "")


# ---------------------------------------------------------------- downloads


def fetched(options: Options) -> Options:
    """The options with paths in place of names on the hub. Raises InputError, OSError."""
    data, files = [path for text in options.data for path in _data(text)], dict[str, Any]()
    for name in ("val", "general"):
        if text := getattr(options, name):
            files[name], *others = _data(text)
            if others:
                raise InputError(f"--{name} {text}: several files. Name one: --{name} {as_saved(files[name])}.")
    folder = lambda name: name and folder_of(name, options.dry_run)  # the largest last
    return replace(options, data=tuple(data), model=folder(options.model), teacher=folder(options.teacher), **files)


def folder_of(model: str, outline: bool = False) -> str:
    """The folder of a model; `model` itself if it is one. `outline`: without weights. Raises InputError, OSError."""
    name = name_of(model)
    if name is None:
        return model
    weights = [] if outline else ["*.safetensors"]
    patterns = [f"*{suffix}" for suffix in sorted({*SUFFIXES, CODE})]
    return str(_download(name, patterns + weights, ["*/*.safetensors", "consolidated*"]))


def base_for(folder: Path, model: str | None) -> str:
    """The base of the adapter in `folder`: `model` if it is a name, else what the adapter names. Raises InputError,
    OSError.
    """
    config = peft_config.read_adapter_config(folder)
    if model:
        return folder_of(model)
    base, commit = peft_config.base_of(config), str(config.get("revision"))
    path = folder_of(f"{base}@{commit}" if _COMMIT.fullmatch(commit) and name_of(base) else base)
    if not base or not Path(path).is_dir():
        raise InputError(f"{folder}: its base, {base or 'without a name'}, is not here. Name its folder: --model DIR.")
    return path


def _data(text: str) -> list[str]:
    """Paths of data, with weights. Raises InputError, OSError."""
    name, weight = name_of(text, of_data=True), text[len(weighed(text)[0]) :]
    if name is None:
        return [text]
    stored = cache() / f"datasets--{name.repo.replace('/', '--')}/snapshots" / name.revision / (name.file or "")
    if _COMMIT.fullmatch(name.revision) and stored.is_file():
        return [f"{stored}{weight}"]
    from huggingface_hub import HfApi  # late: most runs need none of it

    with asking(name):
        info = HfApi(endpoint=endpoint()).dataset_info(name.repo, revision=name.revision or None)
    files = chosen_files(name, sorted(file.rfilename for file in info.siblings or ()))
    folder = _download(replace(name, revision=str(info.sha)), [escape(file) for file in files])
    return [f"{folder / file}{weight}" for file in files]


def chosen_files(name: Name, files: list[str]) -> list[str]:
    """The files of a data set to read. Raises InputError if it is not clear which."""
    inside = (name.file or "").rstrip("/") + "/"
    wanted = [Path(f) for f in files if not name.file or Path(f).match(name.file) or f.startswith(inside)]
    by_use, data = by_uses(wanted)
    train = data if name.file else by_use["train"] or by_use[""]
    sets = {set_of(path) for path in train}
    if not train or (len(sets) > 1 and not name.file):
        listed = ", ".join((sorted(sets) or files)[:4])
        raise InputError(f"{name}: which of {listed}? Name files: hf://datasets/{replace(name, file='')}/PATTERN.")
    return [path.as_posix() for path in train]


def _download(name: Name, patterns: list[str], without: list[str] | None = None) -> Path:
    """The folder with the files of these patterns. Raises InputError, OSError."""
    from huggingface_hub import snapshot_download, utils

    utils.logging.set_verbosity_error()
    if not (sys.stderr and sys.stderr.isatty()):
        utils.disable_progress_bars()
    screen.say(f"download {name}, into {cache()}")
    with asking(name):
        return Path(snapshot_download(
            name.repo, repo_type=name.kind, revision=name.revision or None, cache_dir=cache(), endpoint=endpoint(),
            allow_patterns=patterns, ignore_patterns=without,
        ))  # fmt: skip


@contextmanager
def asking(name: Name) -> Iterator[None]:
    """A context in which the client's failures become InputErrors in its words; those of this machine's drives stay."""
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:  # of its transport, another package in each version
        if isinstance(error, OSError) and error.errno in _DRIVES:
            raise
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
        words = shown(" ".join(str(cause).split()), 400).rstrip(".")
        page = f"{endpoint()}/{'datasets/' * (name.kind == 'dataset')}{name.repo}"
        raise InputError(f"{name}: {words}. See {page}; it may need a token: hf auth login, or set HF_TOKEN.") from None


# ---------------------------------------------------------------- an upload


def run(o: Push) -> None:
    """`trireme push FOLDER OWNER/NAME`: uploads weights, configuration, tokenizer and a card as one commit, without
    paths of this machine; a new repository is private.

    Raises OSError; InputError if there is no model, one of that name already, or an adapter's base is not on the hub.
    """
    from huggingface_hub import CommitOperationAdd, HfApi  # late: most runs need none of it

    from trireme.engine.run import config_file  # late: it imports this module

    out, is_adapter = Path(o.folder), (Path(o.folder) / peft_config.CONFIG).is_file()
    if not o.folder or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", o.name):
        raise InputError("push needs a folder, and a name on the hub: trireme push OUT OWNER/NAME.")
    base = (config_file.of_run(out) or Options()).model
    if is_adapter:
        base = peft_config.base_of(peft_config.read_adapter_config(out))
        if not name_of(base):
            advice = "Merge it and upload that: trireme merge OUT --out DIR"
            raise InputError(f"{out}: an adapter names its base, and {base} is a folder of this machine. {advice}.")
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
        siblings = api.model_info(o.name).siblings or () if api.repo_exists(o.name) else ()
        if any(file.rfilename.endswith(WEIGHTS) for file in siblings):  # files would be mixed
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
    kind = f"{'A LoRA adapter' if is_adapter else 'A fine-tuned copy'} of {base.repo if base else 'a model'}"
    words = f"{kind}, trained with Trireme. The base's licence applies."
    return "\n".join(["---", *head, "---", "", f"# {name}", "", words, ""])

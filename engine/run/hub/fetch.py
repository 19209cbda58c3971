"""Models and data sets of the Hugging Face hub: one commit is downloaded into the client's cache, and named by path.

Files that are there are not downloaded again; if a connection breaks, the client continues the file. Only files that
are read are downloaded: of a model safetensors, configuration, tokenizer and templates, of a data set its tables or
texts. No code and no pickles.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trireme.engine.amounts import count, gib
from trireme.engine.data.find import MOST_FILES, by_uses, set_of
from trireme.engine.run.hub.client import asking, client, endpoint
from trireme.engine.run.hub.names import COMMIT, Files, Named, cache, data_name, model_name, parted
from trireme.engine.run.options import Options
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.peft_config import base_of, read_adapter_config
from trireme.models.config import InputError
from trireme.storage.auxiliary import is_auxiliary
from trireme.storage.files import existing
from trireme.storage.untrusted import is_plain

NAMES = 4  # named in a line


def fetched(options: Options, screen: Screen) -> Options:
    """The options with paths in place of names on the hub; unchanged without the client.

    Raises InputError, OSError.
    """
    model = folder_of(options.model, screen, options.dry_run)
    teacher = options.teacher and folder_of(options.teacher, screen, options.dry_run)
    data, held = list[str](), list[str]()
    for text in options.data:
        more, apart = _data(text, screen)
        data += more
        held += apart
    val = options.val
    if val and (name := data_name(val)):
        found = _data(val, screen)[0]
        if len(found) > 1:
            raise InputError(f"--val {name}: {len(found)} files, and it takes one. Name it: --val {found[0]}.")
        val = found[0]
    elif held and not val:
        screen.say(f"download not used: {held[0]}. For evaluations: --val {held[0]}")
    return replace(options, model=model, teacher=teacher, data=tuple(data), val=val)


def folder_of(model: str, screen: Screen, outline: bool = False) -> str:
    """The folder of a model on the hub; `model` itself if it is a folder or there is no client.

    `outline`: without its weights. Raises InputError, OSError.
    """
    name = model_name(model)
    if name is None:
        return model
    if COMMIT.fullmatch(name.revision) and name.is_whole:
        return str(name.folder)
    hub = client()
    if hub is None:
        return model
    name, there = _listed(hub, name)
    files = model_files(name, there)
    if name.is_whole:
        return str(name.folder)
    if outline:
        files = {file: size for file, size in files.items() if not file.endswith(".safetensors")}
    _download(hub, name, files, screen)
    if not outline:
        name.set_whole(files)
    return str(name.folder)


def base_for(folder: Path, model: str, screen: Screen) -> str:
    """The base of the adapter in `folder`: `model` if given, else the one that it names; a folder if there is one.

    Raises InputError, OSError.
    """
    if model:
        return folder_of(model, screen)
    config = read_adapter_config(folder)
    base, commit = base_of(config), config.get("revision")
    pinned = isinstance(commit, str) and COMMIT.fullmatch(commit) and model_name(f"{base}@{commit}")
    found = folder_of(f"{base}@{commit}" if pinned else base, screen)
    return found if Path(found).is_dir() else ""


def model_files(name: Named, there: Files) -> Files:
    """The files to download. Raises InputError if the model has no safetensors."""
    weights = {file for file in there if is_plain(file) and "/" not in file and file.endswith(".safetensors")}
    files = {file: size for file, size in there.items() if file in weights or is_auxiliary(file)}
    whole = {file for file in files if file.endswith(".safetensors") and not file.startswith("consolidated")}
    if whole:  # Mistral's own form of the same weights
        files = {file: size for file, size in files.items() if not file.startswith("consolidated")}
    if "adapter_config.json" in files:
        raise InputError(f"{name} is an adapter. Download it (hf download {name.repo}), and name it with --adapter.")
    if "config.json" not in files or not any(file.endswith(".safetensors") for file in files):
        others = [file for file in there if file.endswith((".bin", ".gguf", ".pth", ".pt"))]
        have = f"only {', '.join(others[:NAMES])}" if others else f"none of {count(len(there), 'file')}"
        lacks = "config.json" if "config.json" not in files else "safetensors"
        raise InputError(f"{name} has no {lacks}, {have}. Name a model in safetensors, not GGUF or PyTorch's format.")
    return files


# ---------------------------------------------------------------- data


def _data(text: str, screen: Screen) -> tuple[list[str], list[str]]:
    """Paths to train on, with weights, and names of files for evaluation. Raises InputError, OSError."""
    plain, weight = parted(text)
    name = data_name(plain)
    if name is None:
        return [text], []
    if COMMIT.fullmatch(name.revision) and name.file and (name.folder / name.file).is_file():
        return [f"{name.folder / name.file}{weight}"], []
    hub = client()
    if hub is None and name.file:
        raise InputError(f"{name} is on the Hugging Face hub. To have it downloaded: pip install huggingface_hub.")
    if hub is None:
        return [text], []
    name, there = _listed(hub, name)
    train, held = data_files(name, there)
    _download(hub, name, {file: there[file] for file in train}, screen)
    return [f"{name.folder / file}{weight}" for file in train], [str(replace(name, file=file)) for file in held]


def data_files(name: Named, there: Files) -> tuple[list[str], list[str]]:
    """Files to train on, and files for evaluation. Raises InputError if it is not clear which."""
    within = name.file.rstrip("/") + "/"
    chosen = [file for file in there if not name.file or fnmatch(file, name.file) or file.startswith(within)]
    if not chosen:
        raise InputError(f"{name}: {name.repo} has no such file. It has {_some(sorted(there))}.")
    by_use, inside = by_uses([Path(file) for file in sorted(chosen) if there[file]])
    if not inside:
        raise InputError(f"{name} has no data in a form that is read: {_some(sorted(chosen))}.")
    train = inside if name.file else by_use["train"] or by_use[""]
    if not train:
        raise InputError(f"{name} has no training data by name: {_some(sorted(map(str, inside)))}. Name a file: "
                         f"hf://datasets/{replace(name, file='')}/FILE.")  # fmt: skip
    sets = sorted({set_of(path) for path in train})
    if len(sets) > 1 and not name.file:
        one = replace(name, file=f"{sets[0]}*")
        raise InputError(f"{name} has {len(sets)} sets to train on: {_some(sets)}. Name one: --data '{one}'.")
    if len(train) > MOST_FILES:
        raise InputError(
            f"{name}: {len(train):,} files, the most is {MOST_FILES}. Name some: "
            f"hf://datasets/{replace(name, file='')}/FILE."
        )
    return [path.as_posix() for path in train], [] if name.file else [path.as_posix() for path in by_use["valid"]]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES:,} more" if len(names) > NAMES else "")


# ---------------------------------------------------------------- the client


def _listed(hub: Any, name: Named) -> tuple[Named, Files]:
    """All files of the commit. Raises InputError."""
    with asking(hub, name, "found"):
        found = hub.HfApi(endpoint=endpoint()).repo_info(
            name.repo, repo_type=name.kind, revision=name.revision or None, files_metadata=True
        )
    if not isinstance(found.sha, str) or not COMMIT.fullmatch(found.sha):
        raise InputError(f"{name}: {endpoint()} names no commit of it.")
    files = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    sound = {file: size for file, size in files.items() if ".." not in file.split("/") and not file.startswith("/")}
    return replace(name, revision=found.sha), sound


def _download(hub: Any, name: Named, files: Files, screen: Screen) -> None:
    """Raises InputError, also if there is no space; OSError."""
    missing = {file: size for file, size in files.items() if not (name.folder / file).is_file()}
    if not missing:
        return
    total, free = sum(missing.values()), shutil.disk_usage(existing(cache())).free
    if total > free:
        raise InputError(
            f"{name}: {gib(total)} to download, {gib(free)} are free in {cache()}. Free some, or set HF_HOME."
        )
    screen.say(f"download {name}: {count(len(missing), 'file')}, {gib(total)}, into {cache()}")
    if not (sys.stderr and sys.stderr.isatty()):  # the client's own bars are within a file
        hub.utils.disable_progress_bars()
    hub.utils.logging.set_verbosity_error()
    with screen.working(f"downloading {name.repo}", total) as more:
        for file, size in sorted(missing.items(), key=lambda item: item[0].endswith(".safetensors")):
            with asking(hub, name, "downloaded"):
                hub.hf_hub_download(
                    name.repo, file, repo_type=name.kind, revision=name.revision, cache_dir=cache(), endpoint=endpoint()
                )
            more(size)

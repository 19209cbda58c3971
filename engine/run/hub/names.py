"""Names on the Hugging Face hub, and the client's cache, where it stores files; other programs use it, too.

A model is OWNER/NAME or OWNER/NAME@REVISION, a data set also hf://datasets/OWNER/NAME@REVISION/FILE. The cache has
(models|datasets)--OWNER--NAME/snapshots/COMMIT/FILE; a file is there only when it is complete. Whether a model has all
its files is noted in an auxiliary file of this program next to `snapshots`.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trireme.engine.data.find import DataFile, weighed
from trireme.engine.data.read import KINDS
from trireme.models.config import InputError
from trireme.storage.files import replace_synced
from trireme.storage.untrusted import parse_json, read_small

_REPO = r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[\w.-]+))?"
_MODEL = re.compile(_REPO)
_DATA = re.compile(rf"(?P<scheme>hf://datasets/)?{_REPO}(?(scheme)(?:/(?P<file>.+))?)")
_KEPT = re.compile(
    r"(?P<kind>model|dataset)s--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<revision>[0-9a-f]{40})(?:/(?P<file>.+))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
Files = dict[str, int]  # name -> bytes


@dataclass(frozen=True)
class Named:
    """What a name means: owner, name, revision, file."""

    kind: str  # model, dataset
    repo: str  # OWNER/NAME
    revision: str = ""  # a branch, tag or commit; "": the newest
    file: str = ""  # in it: a path, or a pattern; "": all

    def __str__(self) -> str:
        if not self.file:
            return f"{self.repo}@{self.revision}" if self.revision else self.repo
        return f"hf://datasets/{replace(self, file='')}/{self.file}"

    @property
    def folder(self) -> Path:
        """The folder of a commit in the cache."""
        return self._cache / "snapshots" / self.revision

    @property
    def _cache(self) -> Path:
        return cache() / f"{self.kind}s--{self.repo.replace('/', '--')}"

    @property
    def mark(self) -> Path:
        """The file that lists what a complete model has: {name: bytes}."""
        return self._cache / "trireme" / f"{self.revision}.json"

    @property
    def is_whole(self) -> bool:
        """Whether a commit of a model is complete, each file with its size."""
        with suppress(OSError, ValueError):
            files = parse_json(read_small(self.mark), self.mark.name)
            return all((self.folder / name).stat().st_size == size for name, size in files.items())
        return False

    def set_whole(self, files: Files) -> None:
        """Notes that a model is complete. Raises OSError."""
        self.mark.parent.mkdir(exist_ok=True)
        replace_synced(self.mark, json.dumps(files).encode())


def cache() -> Path:
    """Where the client stores downloads, by its own environment variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expandvars(Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()))


def model_name(text: str) -> Named | None:
    """The name of a model; None for a folder, and for what looks like one because the first part of the path exists."""
    found = _MODEL.fullmatch(text)
    if not found or found["owner"].strip(".") == "" or Path(text).exists() or Path(found["owner"]).exists():
        return None
    return Named("model", f"{found['owner']}/{found['name']}", found["revision"] or "")


def data_name(text: str) -> Named | None:
    """As model_name, for data. `text`: without its weight."""
    found = _DATA.fullmatch(text)
    if not found:
        return None
    if not found["scheme"]:
        here = Path(text).exists() or Path(found["owner"]).exists() or found["owner"].strip(".") == ""
        if here or DataFile(Path(text)).kind in KINDS:
            return None
    file = found["file"] or ""
    if ".." in file.split("/"):
        raise InputError(f"{text}: '..' is not part of a name on the hub. Leave it out.")
    return Named("dataset", f"{found['owner']}/{found['name']}", found["revision"] or "", file)


def named(path: str | Path) -> Named | None:
    """The name on the hub of a downloaded model's folder or data file; None for any other path."""
    with suppress(ValueError):
        found = _KEPT.fullmatch(Path(path).relative_to(cache().absolute()).as_posix())
        if found and (found["kind"] == "dataset") == bool(found["file"]):
            name = Named(found["kind"], f"{found['owner']}/{found['name']}", found["revision"], found["file"] or "")
            return name if name.file or name.is_whole else None
    return None


def written(path: str) -> str:
    """A path as config.yaml has it: by its name on the hub if it has one; a data file with its weight."""
    weight = re.search(r"(:\d*\.?\d+)?$", path)
    plain = path[: weight.start()] if weight else path
    name = named(plain)
    return f"{name}{path[len(plain) :]}" if name else path


def title(model: str) -> str:
    """A model's name for people."""
    name = named(Path(model).absolute()) or model_name(model)
    return name.repo.partition("/")[2] if name else Path(model).resolve().name


def base_of(model: str) -> tuple[str, str]:
    """The base of adapters: (name on the hub, commit), or (absolute path, "")."""
    name = named(Path(model).absolute())
    return (name.repo, name.revision) if name else (str(Path(model).resolve()), "")


def opens(model: str) -> str:
    """The name by which transformers opens a model."""
    name = named(Path(model).absolute())
    return name.repo if name else model


def parted(text: str) -> tuple[str, str]:
    """(data as it is named, its weight as text). Raises InputError."""
    plain, _ = weighed(text)
    return plain, text[len(plain) :]

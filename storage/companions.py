"""The files that travel with a checkpoint's weights: config, tokenizer, chat templates, licence."""

from __future__ import annotations

import re
from pathlib import Path

from trireme.storage.headers import CheckpointError
from trireme.storage.untrusted import SMALL, is_plain, shown

SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
TEMPLATES = "additional_chat_templates"
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # what a download cache calls a file: its hash
NAMED = 3  # files that are named where some stay behind


def companions(folder: Path) -> list[str]:
    """The names of the files that travel with the weights, relative to `folder`."""
    return sorted(name for name, why in _beside(folder).items() if not why)


def left_behind(folder: Path) -> str:
    """A line about the files that do not travel although they look like it, "" where there are none.

    Raises CheckpointError where the weights are of no use without one of them.
    """
    left = sorted((name, why) for name, why in _beside(folder).items() if why)
    for name, why in left:
        if name == "config.json":
            raise CheckpointError(f"{folder / name} {why}. Put the file itself there.")
    names = ", ".join(f"{shown(name)} {why}" for name, why in left[:NAMED])
    more = f", and {len(left) - NAMED} more" if len(left) > NAMED else ""
    return f"{folder}: not copied with the weights: {names}{more}" if left else ""


def is_companion(name: str) -> bool:
    """Whether such a file may be called so: nothing that leaves its folder."""
    folder, _, file = name.rpartition("/")
    return is_plain(name) and folder in ("", TEMPLATES) and Path(file).suffix in SUFFIXES


def _beside(folder: Path) -> dict[str, str]:
    """Every file that looks like a companion, and why it does not travel."""
    found = [p for p in folder.iterdir() if p.suffix in SUFFIXES and not p.name.endswith(".index.json")]
    found += (folder / TEMPLATES).glob("*.jinja")
    return {str(p.relative_to(folder)): _unfit(folder, p) for p in found if not p.name.startswith(".")}


def _unfit(folder: Path, path: Path) -> str:
    """Why a file is not to be copied, or "".

    A link out of the folder may lead to anything, a key for example, which would then be published with the weights.
    But a download cache of Hugging Face consists of links: snapshots/<revision>/<file> -> ../../blobs/<hash>.
    """
    if not is_companion(str(path.relative_to(folder))):
        return "has no plain name"
    if not path.is_file():
        return "is not a regular file"
    root, target = folder.resolve(), path.resolve()
    cache = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if not (target.is_relative_to(root) or (target.parent == cache and BLOB.fullmatch(target.name))):
        return "is a link out of the folder"
    return f"has more than {SMALL >> 20} MiB" if path.stat().st_size > SMALL else ""

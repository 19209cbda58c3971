"""Checkpoints in a run's folder that are replaced as a whole: OUT/step-N, and OUT/best, which notes its step.

OUT/best has the best weights so far. The one that the last snapshot names is kept as OUT/best.old until a newer
snapshot names another: a killed run continues with the best of its snapshot's moment.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from trireme.storage.checkpoint import counted
from trireme.storage.files import partial_of, stream, sync_folder, write_synced
from trireme.storage.untrusted import checksum, complaint, parse_json, read_small

BEST, NOTE = "best", "best.json"
SHAPE = {"step": int, "eval_loss": float, "files": {str: str}}
Save = Callable[[Path], Mapping[str, str]]  # writes a new folder, and returns its files' checksums by name


class Best(NamedTuple):
    """The content of NOTE: which weights OUT/best has."""

    step: int
    eval_loss: float


def replace_folder(folder: Path, save: Save) -> None:
    """Saves to a new folder, which then replaces `folder`."""
    new, old = (folder.with_name(folder.name + ending) for ending in (".new", ".old"))
    bring_back(folder)
    for left in (new, old):
        remove(left)
    save(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    remove(old)


def half_made(out: Path) -> list[Path]:
    """Folders of OUT/step-N that are not complete."""
    return [path for path in out.glob("step-*") if re.fullmatch(r"step-\d+\.(new|old)", path.name)]


def bring_back(folder: Path) -> None:
    """Undoes a replacement that was killed between its two renames."""
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def remove(folder: Path) -> None:
    """Removes a folder; of a link, only the link."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def take_over(folder: Path, out: Path, progress: Callable[[int], object] = lambda _: None) -> None:
    """Gives `out` the files of `folder`, one by one: by hard links if the drive has them."""
    for path in _files(folder):
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        part = partial_of(target)
        part.unlink(missing_ok=True)
        if target.exists() and target.samefile(path):
            continue  # killed after this file: a rename to another link of the same file leaves both names
        try:
            part.hardlink_to(path)
        except OSError:
            write_synced(part, counted(stream(path), progress))
        part.replace(target)
        sync_folder(target.parent)


# ---------------------------------------------------------------- OUT/best


def replace_best(out: Path, save: Save, best: Best) -> None:
    """Saves OUT/best."""
    new = out / f"{BEST}.new"
    if (out / f"{BEST}.old").exists():
        remove(out / BEST)  # room for the new one
    remove(new)
    files = save(new)
    write_synced(new / NOTE, [json.dumps({**best._asdict(), "files": dict(files)}).encode()])
    sync_folder(new)
    set_aside(out)
    new.rename(out / BEST)
    sync_folder(out)


def set_aside(out: Path) -> None:
    """Removes OUT/best: at once if no snapshot names it, else it becomes OUT/best.old, to be removed later."""
    best, old = out / BEST, out / f"{BEST}.old"
    if old.exists():
        remove(best)
    elif best.exists():
        best.rename(old)


def forget_old(out: Path) -> None:
    """Removes OUT/best.old, when a snapshot names OUT/best or there is no snapshot."""
    remove(out / f"{BEST}.old")


def restore_best(out: Path, best: Best | None, progress: Callable[[int], object] = lambda _: None) -> bool:
    """Undoes what a kill has left incomplete, and makes OUT/best the one that a snapshot names.

    Returns whether it is there and complete. `progress` is called with bytes read.
    """
    for left in half_made(out):
        if left.suffix == ".old":
            bring_back(left.with_suffix(""))
    places = [out / f"{BEST}{ending}" for ending in ("", ".old", ".new")]
    found = next((place for place in places if best and _holds(best, place, progress)), None)
    for place in places:
        if place != found:
            remove(place)
    if found not in (None, places[0]):
        found.rename(places[0])
        sync_folder(out)
    return found is not None


def _holds(best: Best, folder: Path, progress: Callable[[int], object]) -> bool:
    """Whether a folder has these weights, compared byte by byte."""
    try:
        said = parse_json(read_small(folder / NOTE), NOTE)
        if complaint(said, SHAPE) or (said["step"], said["eval_loss"]) != best:
            return False
        there = {str(path.relative_to(folder)): path for path in _files(folder)}
        return there.keys() == said["files"].keys() and all(
            checksum(counted(stream(there[name]), progress)) == sum for name, sum in said["files"].items()
        )
    except (OSError, ValueError):
        return False


def _files(folder: Path) -> list[Path]:
    """The files of a folder but the note."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path for path in found if path != folder / NOTE]

"""Checkpoints in a run's folder, replaced as a whole: OUT/step-N, and OUT/best, which says what step it is of.

OUT/best is the best so far. The one that the last snapshot names is kept as OUT/best.old until a newer snapshot names
another: a run that is killed goes on with the best of its snapshot's moment.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trireme.storage.checkpoint import counted
from trireme.storage.files import partial_of, read_back, sync_folder, write_synced
from trireme.storage.untrusted import complaint, parse_json, read_small

BEST, NOTE = "best", "best.json"
Save = Callable[[Path], None]


class Best(NamedTuple):
    """What NOTE says."""

    step: int
    eval_loss: float


def replace_folder(folder: Path, save: Save) -> None:
    """Saves over `folder`, which stays until the new one is whole."""
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
    """Of OUT/step-N."""
    return [path for path in out.glob("step-*") if re.fullmatch(r"step-\d+\.(new|old)", path.name)]


def bring_back(folder: Path) -> None:
    """Undoes a replacement that was killed between its renames."""
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def remove(folder: Path) -> None:
    """Its note first: what is left of it by a kill is never taken for a whole one. Of a link the link alone."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        (folder / NOTE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def take_over(folder: Path, out: Path, progress: Callable[[int], object] = lambda _: None) -> None:
    """Gives `out` the files of `folder`, one by one: by links where the drive has them."""
    for path in (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != NOTE):
        target = out / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = partial_of(target)
        part.unlink(missing_ok=True)
        if target.exists() and target.samefile(path):
            continue  # killed after this file: a rename to another link of the same file leaves both names
        try:
            part.hardlink_to(path)
        except OSError:
            write_synced(part, counted(read_back(path), progress))
        part.replace(target)
        sync_folder(target.parent)


# ---------------------------------------------------------------- OUT/best


def replace_best(out: Path, save: Save, best: Best) -> None:
    """Saves OUT/best."""
    new = out / f"{BEST}.new"
    if (out / f"{BEST}.old").exists():
        remove(out / BEST)  # room for the new one
    remove(new)
    save(new)
    write_synced(new / NOTE, [json.dumps(best._asdict()).encode()])
    sync_folder(new)
    set_aside(out)
    new.rename(out / BEST)
    sync_folder(out)


def set_aside(out: Path) -> None:
    """Removes OUT/best, if the last snapshot names it by `forget_old` or `tidy`."""
    best, old = out / BEST, out / f"{BEST}.old"
    if old.exists():
        remove(best)
    elif best.exists():
        best.rename(old)


def forget_old(out: Path) -> None:
    """A snapshot names OUT/best, or there is none."""
    remove(out / f"{BEST}.old")


def settle(out: Path, best: Best | None) -> bool:
    """Undoes what a kill has left half done, and makes OUT/best the one that a snapshot names.

    Returns whether it is there.
    """
    for left in half_made(out):
        if left.suffix == ".old":
            bring_back(left.with_suffix(""))
    places = [out / f"{BEST}{ending}" for ending in ("", ".old", ".new")]
    found = next((place for place in places if best and _note(place) == best), None)
    for place in places:
        if place != found:
            remove(place)
    if found not in (None, places[0]):
        found.rename(places[0])
        sync_folder(out)
    return found is not None


def _note(folder: Path) -> Best | None:
    try:
        said = parse_json(read_small(folder / NOTE), NOTE)
    except (OSError, ValueError):
        return None
    return None if complaint(said, {"step": int, "eval_loss": float}) else Best(**said)

"""The folders of a store: which store and run they belong to, which process has locked them, what is removed.

`store.id` is written first. It is removed last, after it was renamed `store.finished`: so after a kill a store's files
can be told from other files. Only the process that holds `store.lock` makes or removes files.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trireme.storage import scratch, snapshots
from trireme.storage.auxiliary import TEMPLATES
from trireme.storage.checkpoint import INDEX
from trireme.storage.devices import LINKED, PROBE
from trireme.storage.files import (
    LOCK,
    NoSnapshot,
    StoreError,
    as_store_error,
    lock_folder,
    remove_folders,
    replace_synced,
    sync_folder,
)
from trireme.storage.untrusted import read_small, seal, unseal
from trireme.storage.versions import FOLDER, version_files

IDENTITY, FINISHED = "store.id", "store.finished"
FORMAT = 4


@dataclass(frozen=True)
class Identity:
    """The content of `store.id`: number of this folder, auxiliary files in the first folder, id of the run, folders
    made for the store.
    """

    store: str
    device: int
    devices: int
    auxiliary: tuple[str, ...] = ()
    run: str = ""
    made: tuple[str, ...] = ()  # absolute, innermost first: they are removed with the store, if empty


def write_identity(folder: Path, identity: Identity) -> None:
    replace_synced(folder / IDENTITY, seal(FORMAT, asdict(identity)))


def read_identity(folder: Path, name: str = IDENTITY) -> Identity:
    """Reads `store.id`. Raises NoSnapshot if there is no store, StoreError if it cannot be read."""
    path = folder / name
    try:
        fields = unseal(read_small(path), FORMAT, "identity")
        return Identity(**fields | {name: tuple(fields[name]) for name in ("auxiliary", "made")})
    except FileNotFoundError as e:
        raise NoSnapshot(errno.ENOENT, "holds no store", str(folder)) from e
    except OSError as e:
        raise as_store_error(e, path) from e
    except ValueError as e:
        message = f"is damaged: {e}. Restore it from a copy; each snapshot's folder holds its weights as a checkpoint"
        raise StoreError(errno.EIO, message, str(path)) from e


def is_taken(folder: Path, first: Path) -> bool:
    """Whether a new store would destroy a snapshot in `folder`. `first`: the first folder of that store.

    Snapshots in folders other than the first may be remains of a commit that was killed.
    """
    if not snapshots.folders(folder):
        return False
    if folder == first:
        return True
    ours = read_identity(folder)
    return ours.device == 0 or ours.store != read_identity(first).store


def run_of(folder: Path) -> str:
    """The id of the run of the store in a folder; "" if it cannot be read."""
    known = _read(folder, IDENTITY)
    return known.run if known else ""


def in_order(folders: Sequence[Path], run: str = "") -> list[int]:
    """The order of the folders of a run's store, as indices of `folders`.

    Raises StoreError if one is missing or belongs to another store, NoSnapshot if none has a snapshot.
    """
    identities = [replace(read_identity(folder), made=()) for folder in folders]
    if any(known.run != run for known in identities):
        raise StoreError(errno.EINVAL, "is the store of another run", str(folders[0]))
    order = sorted(range(len(folders)), key=lambda i: identities[i].device)
    expected = [replace(identities[0], device=k, devices=len(folders)) for k in range(len(folders))]
    if [identities[i] for i in order] != expected:
        if not any(map(snapshots.folders, folders)):  # killed while being replaced
            raise NoSnapshot(errno.ENOENT, "holds no snapshot", str(folders[0]))
        message = f"belongs to a store of {identities[0].devices} folders; give all of them and no others"
        raise StoreError(errno.EINVAL, message, str(folders[0]))
    return order


def take(paths: Sequence[Path], auxiliary: Sequence[str], stack: ExitStack, undo: ExitStack) -> list[tuple[str, ...]]:
    """Locks the folders for a new store until `stack` closes, and clears stores without a snapshot.

    Returns for each folder what was made for it (Identity.made), also by a store that is cleared; `undo` reverts.
    Raises StoreError if a folder is in use, holds a snapshot, or holds another's file with a name that stores use.
    """
    made: list[tuple[str, ...]] = []
    for path in paths:
        new = lock_folder(path, stack)
        undo.callback(remove_folders, new)
        undo.callback(let_go, path)
        before = _read(path, IDENTITY) or _read(path, FINISHED)
        made.append(tuple(str(folder.absolute()) for folder in new) or (before.made if before else ()))
    for path in _finished(paths):
        remove_part(path)
    for path in paths:
        if is_taken(path, paths[0]):
            raise StoreError(errno.EEXIST, "holds a run already; resume it or choose another", str(path))
    for path in paths:
        if (path / IDENTITY).exists():
            _empty(path, _read(path, IDENTITY))
    _refuse_others(paths, auxiliary)
    return made


def sign(
    paths: Sequence[Path], auxiliary: Sequence[str], run: str, made: Sequence[tuple[str, ...]], undo: ExitStack
) -> None:
    """Writes the identities of a new store. `made`: from `take`. `undo` removes the store again."""
    name = uuid.uuid4().hex
    for k, path in enumerate(paths):
        undo.callback(remove_folders, [path / FOLDER])
        undo.callback(remove_part, path)
        (path / FOLDER).mkdir(exist_ok=True)
        write_identity(path, Identity(name, k, len(paths), tuple(auxiliary), run, made[k]))


def remove_store(paths: Sequence[Path], progress: Callable[[int], object] = lambda _: None) -> None:
    """Removes a store whose locks are held, with its locks and the folders made for it.

    If it is killed, the store is marked finished, and `remove_finished` completes it.
    """
    for path in paths:
        _mark_finished(path)
    made = set[Path]()
    for path in paths:
        made_by = _erase(path, progress)
        let_go(path)
        made |= {folder for folder in (path.absolute(), *path.absolute().parents) if str(folder) in made_by}
    remove_folders(sorted(made, key=lambda folder: len(folder.parts), reverse=True))


def is_half_removed(path: Path, run: str) -> bool:
    """Whether the removal of this run's store was started and not completed. True also if the mark cannot be read."""
    return (path / FINISHED).exists() and (not (known := _read(path, FINISHED)) or known.run == run)


def remove_finished(paths: Sequence[Path], run: str = "") -> None:
    """Completes the removal of a run's store. Raises StoreError if it is in use."""
    parts = [path for path in paths if is_half_removed(path, run) or not (path / FINISHED).exists()]
    discard(_finished(parts))
    for path in (path for path in parts if (path / LOCK).exists() and not _holds_store(path)):
        with suppress(StoreError):  # another run begins one there
            discard([path])


def discard(paths: Sequence[Path], progress: Callable[[int], object] = lambda _: None) -> None:
    """Locks a store and removes it. Raises StoreError if it is in use."""
    with ExitStack() as stack:
        for path in paths:
            lock_folder(path, stack)
        remove_store(paths, progress)


def remove_part(path: Path) -> None:
    """Removes a folder's part of a store. Its lock stays held."""
    _mark_finished(path)
    _erase(path)


def let_go(path: Path) -> None:
    """Removes the lock unless the folder holds a store."""
    if not _holds_store(path):
        (path / LOCK).unlink(missing_ok=True)


def _holds_store(path: Path) -> bool:
    return any((path / name).exists() for name in (IDENTITY, FINISHED))


def _finished(paths: Sequence[Path]) -> list[Path]:
    """The folders of stores of which one is marked finished."""
    over = [path for path in paths if (path / FINISHED).exists()]
    names = {known.store for path in over if (known := _read(path, FINISHED))}
    rest = [path for path in paths if (known := _read(path, IDENTITY)) and known.store in names]
    return [*over, *(path for path in rest if path not in over)]


def _mark_finished(path: Path) -> None:
    if (path / IDENTITY).exists():
        (path / IDENTITY).rename(path / FINISHED)
        sync_folder(path)


def _erase(path: Path, progress: Callable[[int], object] = lambda _: None) -> tuple[str, ...]:
    """Removes the files of a finished store; returns its Identity.made."""
    known = _read(path, FINISHED)
    if (path / FINISHED).exists():
        _empty(path, known, progress)
        (path / FINISHED).unlink()
    return known.made if known else ()


def _empty(path: Path, identity: Identity | None, progress: Callable[[int], object] = lambda _: None) -> None:
    """Removes all but identity and lock. Auxiliary files are removed only if the identity tells which they are."""
    for snapshot in (*snapshots.folders(path), *(left.name for left in snapshots.leftovers(path))):
        snapshots.erase(path / snapshot)
    named = (*identity.auxiliary, INDEX) if identity and identity.device == 0 else ()
    others = (name for name in named if name == INDEX or snapshots.may_be_auxiliary(name))
    for name in (*others, scratch.NAME, PROBE, LINKED):
        (path / name).unlink(missing_ok=True)
    for version in version_files(path):
        version.unlink()
        progress(0)
    for name in (TEMPLATES, FOLDER):
        with suppress(OSError):  # absent, or keeping foreign files
            (path / name).rmdir()
    for folder in filter(Path.exists, (path / FOLDER, path)):
        sync_folder(folder)


def _read(path: Path, name: str) -> Identity | None:
    """None where unreadable."""
    try:
        return read_identity(path, name)
    except StoreError:
        return None


def _refuse_others(paths: Sequence[Path], auxiliary: Sequence[str]) -> None:
    """Raises StoreError for foreign files of a store's names."""
    names = [(paths[0], name) for name in (*auxiliary, INDEX)] + [(path, scratch.NAME) for path in paths]
    there = [(path, path / name) for path, name in names if os.path.lexists(path / name)]
    for path in paths:
        there += [(path, theirs) for theirs in (*version_files(path), *snapshots.leftovers(path))]
    for path, theirs in there[:1]:
        message = f"holds {theirs.relative_to(path)}, which is not a file of a store; choose another folder"
        raise StoreError(errno.EEXIST, message, str(path))

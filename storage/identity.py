"""`store.id`: which store a folder belongs to, as which of its folders, and which companions the first one holds."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trireme.storage import snapshots
from trireme.storage.files import NoSnapshot, StoreError, replace_synced
from trireme.storage.sums import seal, unseal
from trireme.storage.untrusted import complaint, read_small, shown

IDENTITY, FINISHED = "store.id", "store.finished"
FORMAT = 2
LARGEST = 1 << 20  # bytes
SHAPE = {"store": str, "device": int, "devices": int, "companions": [str]}


@dataclass(frozen=True)
class Identity:
    """A folder's place in a store: the `device` of that number of so many `devices`. `companions`: names of files that
    the store has made in its first folder, beside its own.
    """

    store: str
    device: int
    devices: int
    companions: tuple[str, ...] = ()


def write_identity(folder: Path, identity: Identity) -> None:
    replace_synced(folder / IDENTITY, seal(FORMAT, asdict(identity)))


def read_identity(folder: Path, name: str = IDENTITY) -> Identity:
    """Raises NoSnapshot where no store is in the folder, StoreError where nobody can say which."""
    path = folder / name
    try:
        text = read_small(path, LARGEST)
        if text.startswith(b'{"store"'):
            raise StoreError(errno.EINVAL, "is of format 1. Go on with the version that wrote it")
        fields = unseal(text, FORMAT, "identity")
        if wrong := complaint(fields, SHAPE):
            raise ValueError(f"it{wrong}")
        for beside in fields["companions"]:
            if not snapshots.may_lie_beside(beside):
                raise ValueError(f"{shown(beside)!r} is not the name of a companion")
        return Identity(**fields | {"companions": tuple(fields["companions"])})
    except FileNotFoundError as e:
        raise NoSnapshot(errno.ENOENT, "holds no store", str(folder)) from e
    except OSError as e:
        raise StoreError(e.errno, e.strerror, str(path)) from e
    except ValueError as e:
        message = f"is damaged: {e}. Restore it from a copy; each snapshot's folder holds its weights as a checkpoint"
        raise StoreError(errno.EIO, message, str(path)) from e


def is_taken(folder: Path, first: Path) -> bool:
    """Whether a new store that begins with folder `first` would destroy a snapshot in `folder`.

    A snapshot counts where its first device has it: on the others it may be what a crash left of a commit.
    """
    if not snapshots.folders(folder):
        return False
    if folder == first:
        return True
    ours = read_identity(folder)
    return ours.device == 0 or ours.store != read_identity(first).store


def in_order(folders: Sequence[Path]) -> list[int]:
    """The folders' places in the order of the store's devices. Raises StoreError where one is missing or foreign, and
    NoSnapshot where that does not matter.
    """
    found = [read_identity(folder) for folder in folders]
    order = sorted(range(len(folders)), key=lambda i: found[i].device)
    expected = [replace(found[0], device=k, devices=len(folders)) for k in range(len(folders))]
    if [found[i] for i in order] != expected:
        if not any(map(snapshots.folders, folders)):  # killed when it was made anew in some of them
            raise NoSnapshot(errno.ENOENT, "holds no snapshot", str(folders[0]))
        message = f"belongs to a store of {found[0].devices} folders; give all of them and no others"
        raise StoreError(errno.EINVAL, message, str(folders[0]))
    return order

"""Who owns a folder: a run's id, a random number, in the first line of its config.yaml and in its store's store.id.

Nobody else knows the number, so a folder of a stranger cannot name another run's store as its own. A copy of a run's
folder can: a store also says which folder its run is in, and that one keeps it as long as it names the store, too.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trireme.engine.hosts.group import Alone, refuse_text
from trireme.engine.run.config.config_file import full, stores_of
from trireme.models.config import InputError
from trireme.storage import folders, snapshots
from trireme.storage.folders import Owner
from trireme.storage.untrusted import read_small, shown

ID = re.compile(r"[0-9a-f]{32}")
LINE = re.compile(rb"# run ([0-9a-f]{32}) [^\n]*\n")
LARGEST = 1 << 20  # bytes of a config.yaml
LINKED = (
    "merged",
    "tokens",
    "tensorboard",
    "wandb",
    "mlflow",
    "comet",
)  # where a link would have a run write elsewhere


def signed(run: str, config: bytes) -> bytes:
    """A config.yaml with the run's id."""
    return f"# run {run} (its store says the same: keep this line)\n".encode() + config


def unsigned(config: bytes) -> bytes:
    return LINE.sub(b"", config, count=1) if LINE.match(config) else config


def run_of(folder: Path) -> str:
    """The id of the run in a folder; "" where there is none."""
    with suppress(OSError):
        found = LINE.match(read_small(folder / "config.yaml", LARGEST, links=True))
        return found[1].decode() if found else ""
    return ""


def common_id(out: Path, resumed: bool, group: Alone) -> str:
    """Host 0's: of the run in `out`, else a new one; "" where a resumed run has lost it. Raises InputError."""
    own = run_of(out) or ("" if resumed else uuid.uuid4().hex)
    first = group.texts(own)[0]
    if first and not ID.fullmatch(first):
        refuse_text(0, f": the id of a run is {shown(first)!r}")
    return first


def owner(out: Path, run: str) -> Owner:
    """What the store of a run in `out` says."""
    return Owner(run, full(out))


def check_own(dirs: Sequence[Path], run: str, out: Path) -> None:
    """Raises InputError where a folder holds the store of another run, or is still that of the folder's original."""
    for path in dirs:
        of = folders.owner_of(path)
        if of is None:
            continue
        if of.run != run:
            lost = "" if run else f" {out / 'config.yaml'} has lost its first line, '# run ...': restore it."
            raise InputError(
                f"--resume {out}: the store in {path} is another run's, that of {shown(of.folder, 500)}.{lost} Name "
                "this run's with --store."
            )
        if original := _claimant(of, path, out):
            raise InputError(
                f"--resume {out}: the store in {path} is that of the run in {original}, of which this folder is a "
                f"copy. Go on with --resume {original}, or copy the store too, and name the copy with --store."
            )


def check_not_taken(dirs: Sequence[Path], run: str, out: Path) -> None:
    """Raises InputError where a new store would replace that of another run, which has no snapshot yet."""
    for path in dirs:
        of = folders.owner_of(path)
        if of and of.run != run and not snapshots.folders(path) and (other := _claimant(of, path, out)):
            raise InputError(
                f"--store {path} is in use by the run in {other}. Name another folder, or finish that run first."
            )


def owned(dirs: Sequence[Path], run: str, out: Path) -> list[Path]:
    """The folders that hold the store of this run, in its folder `out`, and of no other."""
    found = [(path, folders.owner_of(path)) for path in dirs]
    return [path for path, of in found if of and of.run == run and not _claimant(of, path, out)]


def _claimant(of: Owner, store: Path, out: Path) -> Path | None:
    """The folder that a store says to belong to, where it is another than `out` and says so, too."""
    folder = Path(of.folder)
    try:
        if folder.samefile(out) or run_of(folder) != of.run:
            return None
        return folder if any(path.exists() and path.samefile(store) for path in stores_of(folder)) else None
    except (OSError, ValueError, InputError):
        return None


def refuse_links(out: Path) -> None:
    """Raises InputError where a link in a run's folder would have it write elsewhere."""
    for name in LINKED:
        if (out / name).is_symlink():
            raise InputError(f"{out / name} is a link, and a run would write where it leads. Remove it.")

"""The output folder, before the run and after it: may it be written, and is it what was promised? No torch."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trireme.models.config import InputError
from trireme.storage.checkpoint import INDEX, Source, companions, open_source
from trireme.storage.files import StoreError, existing, make_folder
from trireme.storage.snapshots import folders

LOGS = ("log.jsonl", "log.csv", "loss.svg", "config.yaml", "trace.json")


def check_free(out: Path, source: Path) -> None:
    """Raises InputError unless a new run may write to `out`: empty or not there, and not the source. Leaves nothing."""
    if out.exists() and source.exists() and out.samefile(source):
        raise InputError(f"--out {out} is the checkpoint itself. Name another folder.")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file. Name a folder.")
    place = existing(out)
    if not place.is_dir():
        raise InputError(f"--out {out}: {place} is a file. Name a folder.")
    try:  # permission alone does not tell: root may do anything in /proc, and can make no folder there
        trial = place / f".trireme-{os.getpid()}"
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"--out {out}: no folder can be made in {place} ({error.strerror}). Name another folder."
        ) from error
    held = len(list(out.iterdir())) if out.exists() else 0
    if held and (out / "config.yaml").is_file():
        raise InputError(f"--out {out} holds a run. Go on with it: --resume {out}; or name another folder.")
    if held:
        raise InputError(f"--out {out} is not empty ({held} entries). Name another folder, or empty it.")


@contextmanager
def new_run(out: Path, source: Path, store: Sequence[Path], saved: type[BaseException]) -> Iterator[None]:
    """Takes `out` for a new run of this process; removes what it made when it fails before its first step is done: when
    nothing of one is in its log, which a full disk may have delayed, nor in a snapshot.

    `store`: the folders of its store. `saved`: the exception of a run that has stopped and saved itself, which keeps
    everything. Raises InputError where the folder is not free, or another process has taken it.
    """
    check_free(out, source)
    made = [folder for folder in (out, *store) if not folder.exists()]
    stores = (out / "store", *store)
    others = _with_snapshots(stores)
    with _taken(out):
        check_free(out, source)  # nobody was faster
        try:
            yield
        except saved:
            raise
        except BaseException:
            if not has_begun(out) and _with_snapshots(stores) <= others:
                for path in (*made, *(out.iterdir() if out.exists() else ())):
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            raise


def _with_snapshots(stores: Sequence[Path]) -> set[Path]:
    return {store for store in stores if store.is_dir() and folders(store)}


def has_begun(out: Path) -> bool:
    """Whether a run in the folder has said anything of a step."""
    log = out / "log.jsonl"
    return log.exists() and log.stat().st_size > 0


@contextmanager
def _taken(out: Path) -> Iterator[None]:
    """Makes the folder and holds it by a lock that leaves no file behind."""
    make_folder(out)
    fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--out {out}: another run has just begun there. Name another folder.") from None
        except OSError:
            pass  # a filesystem without locks
        yield
    finally:
        os.close(fd)


def reopen(source: Source, out: Path) -> list[str]:
    """Opens the exported checkpoint in `out` as a stranger would and compares it with its source.

    Returns the lines to print. Raises StoreError where anything but the values differs.
    """
    written = open_source(out)
    ours, theirs = _signature(written), _signature(source)
    if ours != theirs:
        name = sorted(set(ours.items()) ^ set(theirs.items()))[0][0]
        _differs(out, f"{name} is {_show(ours.get(name))} here and {_show(theirs.get(name))} in {source.folder}")
    others = [*companions(source.folder), *(n for n in (INDEX,) if (source.folder / n).exists())]
    for name in others:
        if not (out / name).is_file() or (out / name).read_bytes() != (source.folder / name).read_bytes():
            _differs(out, f"{name} is not the one of {source.folder}")
    files = written.files[0] if len(written.files) == 1 else f"{len(written.files)} model shards"
    logs = [name for name in LOGS if (out / name).exists()]
    return [
        f"output   {out}/: {', '.join([files, *others, *logs])}",
        f"check    reopened: {len(ours):,} tensors, names, shapes and dtypes equal to the source; "
        f"{len(others)} other files byte-identical",
        f"next     AutoModelForCausalLM.from_pretrained({str(out)!r}); the same run again: --config {out}/config.yaml",
    ]


def _signature(source: Source) -> dict[str, tuple]:
    """Name -> (dtype, shape, file): a tied weight that is stored once, or twice, must be stored so again."""
    return {name: (t.dtype, t.shape, t.file) for name, t in source.tensors.items()}


def _show(entry: tuple | None) -> str:
    return "missing" if entry is None else f"{entry[0]} {list(entry[1])} in {entry[2]}"


def _differs(out: Path, what: str) -> None:
    raise StoreError(errno.EIO, f"read back, it is not what was written: {what}. The snapshots are intact", str(out))

"""The output folder: checked to be free before a run, and to be complete after it."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trireme.engine.run.begin.owned import refuse_links, signed, unsigned
from trireme.engine.run.command import program
from trireme.engine.run.config.config_file import config_yaml, repeats
from trireme.engine.run.options import Options, store_folders
from trireme.engine.run.output.exports import BEST, half_made, remove
from trireme.engine.tuning.packed import Packed
from trireme.engine.tuning.parts import open_checkpoint
from trireme.models.config import InputError
from trireme.storage import snapshots, temporary
from trireme.storage.auxiliary import content_of
from trireme.storage.checkpoint import Source
from trireme.storage.files import StoreError, existing, lock, make_folder, partial_of, remove_folders, replace_synced
from trireme.storage.store import Store

ADAPTER = "adapter_model.safetensors"
REFERENCE = "reference"  # begin/reference.py
TEACHER = "teacher"  # begin/teacher.py
PASSES = (REFERENCE, TEACHER)  # hours of work: the same command goes on behind it
LOGS = ("log.jsonl", "log.csv", "loss.svg", "trace.json", "config.yaml")
# Before the first step. config.yaml marks a killed run's folder: made first, removed last.
OURS = (
    "tokens",
    REFERENCE,
    TEACHER,
    "tensorboard",
    "wandb",
    "mlflow",
    "comet",
    *(partial_of(Path(name)).name for name in LOGS),
    *LOGS,
)
UNFIT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL)


def check_checkpoint(model: str) -> None:
    """Raises InputError where `model` is a Hugging Face hub name and no folder."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).parent.exists():
        folder = model.rpartition("/")[2]
        raise InputError(
            f"{model} is no folder here. If it is a model of the Hugging Face hub, download it, and name the folder: "
            f"hf download {model} --local-dir {folder}"
        )


@dataclass
class NewRun:
    store: Store | None = None


@contextmanager
def new_run(options: Options, saved: type[BaseException], id: str) -> Iterator[NewRun]:
    """Locks a new run's folder, writes config.yaml, closes the store at the end. `id`: of the run.

    Removes the files of a run that fails before a step is logged or saved; not after `saved`, its exception once it has
    saved itself, nor where the same command was killed before. Raises StoreError, InputError where the folder is taken.
    """
    out, run = Path(options.out), NewRun()
    with _writable(out):
        check_free(options)
    with taken(out, f"--out {out}: another run has just begun there. Name another folder.") as made:
        again = check_free(options)  # another may have begun
        refuse_links(out)
        try:
            for stale in (out / "tokens").glob("stdin*"):
                stale.unlink()  # read anew
            with _writable(out):
                replace_synced(out / "config.yaml", signed(id, config_yaml(options)))
            yield run
        except saved:
            raise
        except BaseException:
            if not has_begun(out) and not (run.store and run.store.snapshots):
                kept = again or any((out / name).exists() for name in PASSES)
                with suppress(OSError):  # report the first error
                    _undo(run, made, () if kept else [out / name for name in OURS])
            raise
        finally:
            if run.store:
                run.store.close()


def _undo(run: NewRun, folders: Sequence[Path], own: Sequence[Path]) -> None:
    if run.store:
        run.store.remove()
    for path in own:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    remove_folders(folders)


def tidy(out: Path) -> None:
    """Removes a finished run's leftovers, after its store."""
    for folder in (
        out / "tokens",
        out / REFERENCE,
        out / TEACHER,
        out / f"{BEST}.new",
        out / f"{BEST}.old",
        *half_made(out),
    ):
        remove(folder)
    temporary.sweep(temporary.HIDDEN, out)
    for name in LOGS:
        partial_of(out / name).unlink(missing_ok=True)
    remove_folders([out / "store"])


@contextmanager
def taken(out: Path, otherwise: str) -> Iterator[list[Path]]:
    """Makes and locks the folder, without a lock file; gives the folders made.

    Raises InputError, `otherwise` where another process holds it.
    """
    with _writable(out):
        made = make_folder(out)
        fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock(fd):
            raise InputError(otherwise)
        yield made
    finally:
        os.close(fd)


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    """Errors of an unusable folder, not of a failing drive, become InputErrors."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNFIT:
            raise
        raise InputError(f"--out {out} cannot be written to ({error.strerror}). Name another folder.") from error


def check_free(options: Options) -> bool:
    """True where the same command was killed before its first step. Else raises InputError unless free."""
    out, source = Path(options.out), Path(options.model)
    if out.is_symlink() and not out.exists():
        raise InputError(f"--out {out} is a link to {out.readlink()}, which is not there. Name another folder.")
    if out.exists() and source.exists() and out.samefile(source):
        raise InputError(f"--out {out} is the checkpoint itself. Name another folder.")
    if not existing(out).is_dir():
        raise InputError(f"--out {out}: {existing(out)} is a file. Name a folder.")
    held = {path.name for path in out.iterdir()} if out.exists() else set()
    if not held or _is_same(options, held):
        return "config.yaml" in held
    if (out / "config.yaml").is_file():
        if any(name.endswith(".safetensors") for name in held):
            result = f"it is --adapter {out}" if ADAPTER in held else "it is the checkpoint"
            further = f"if it is finished, name another folder; to train its result further, {result}"
            raise InputError(f"--out {out} holds a run and its checkpoint. Go on with it: --resume {out}; {further}.")
        raise InputError(f"--out {out} holds a run. Go on with it: --resume {out}; or name another folder.")
    entries = "1 entry" if len(held) == 1 else f"{len(held):,} entries"
    raise InputError(f"--out {out} is not empty ({entries}). Name another folder.")


def _is_same(options: Options, held: set[str]) -> bool:
    """See check_free. `held`: names in OUT."""
    out = Path(options.out)
    if not (out / "config.yaml").is_file():
        return held == {partial_of(out / "config.yaml").name}
    stores = store_folders(options.store, out)
    begun = has_begun(out) or any(d.is_dir() and snapshots.folders(d) for d in stores)
    ours = all(
        name in (*OURS, "store") or name.startswith(temporary.HIDDEN) or re.fullmatch(r"host-\d+", name)
        for name in held
    )
    return ours and not begun and repeats(unsigned((out / "config.yaml").read_bytes()), options)


def has_begun(out: Path) -> bool:
    log = out / "log.jsonl"
    return log.exists() and log.stat().st_size > 0


def reopen(source: Source, out: Path, opener: str = "AutoModelForCausalLM", scored: bool = False) -> list[str]:
    """Returns the lines to print. Raises StoreError where export and source differ in more than values."""
    packing = source.packing if isinstance(source, Packed) else None
    written = open_checkpoint(out, packing)
    ours, theirs = _signature(written), _signature(source)
    if ours != theirs:
        name = sorted(set(ours.items()) ^ set(theirs.items()))[0][0]
        _differs(out, f"{name} is {_show(ours.get(name))} here and {_show(theirs.get(name))} in {source.folder}")
    others = source.others
    given = [name for name, auxiliary in others.items() if auxiliary != source.folder / name]
    for name, auxiliary in others.items():
        if not (out / name).is_file() or (out / name).read_bytes() != content_of(auxiliary):
            whose = "the one that was trained with" if name in given else f"the one of {source.folder}"
            _differs(out, f"{name} is not {whose}")
    files = written.files[0] if len(written.files) == 1 else f"{len(written.files)} model shards"
    logs = [name for name in LOGS if (out / name).exists()]
    return [
        f"output   {out}/: {', '.join([files, *others, *logs])}",
        f"check    reopened: {len(ours):,} tensors, names, shapes and dtypes equal to the source; "
        f"{len(others) - len(given)} other files byte-identical"
        + (f"; as trained with: {', '.join(given)}" if given else ""),
        f"next     {afterwards(out, scored)}; {opener}.from_pretrained({str(out)!r}); the same run again: "
        f"--config {out}/config.yaml",
    ]


def afterwards(out: Path, scored: bool = False) -> str:
    """What to type next."""
    if scored:
        return f"{program()} eval {out} --data FILE"
    return f"{program()} sample {out} --prompt TEXT, or {program()} eval {out} --data FILE"


Entry = tuple[str, tuple[int, ...], str]  # dtype, shape, file


def _signature(source: Source) -> dict[str, Entry]:
    """By name: a tied weight stored once, or twice, stays so."""
    return {name: (t.dtype, t.shape, t.file) for name, t in source.tensors.items()}


def _show(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{entry[0]} {list(entry[1])} in {entry[2]}"


def _differs(out: Path, what: str) -> NoReturn:
    raise StoreError(errno.EIO, f"read back, it is not what was written: {what}. The snapshots are intact", str(out))

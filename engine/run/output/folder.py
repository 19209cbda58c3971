"""A run's folder: which run it belongs to, free before the run, complete after it.

A run has an id, a random number, in the first line of its config.yaml and in its store's store.id. Since nobody else
knows the number, another's folder cannot name this run's store as its own. A copy of the run's folder can; so the store
also says which folder its run is in, and that folder keeps the store as long as it names it, too.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trireme.engine.hosts.group import Alone, place
from trireme.engine.run.command import program
from trireme.engine.run.config.config_file import SIGNED, config_yaml, repeats
from trireme.engine.run.options import Options, store_folders
from trireme.engine.run.output.exports import BEST, half_made, remove
from trireme.engine.tuning.packed import Packed
from trireme.engine.tuning.parts import open_checkpoint
from trireme.models.config import InputError
from trireme.storage import folders, snapshots, temporary
from trireme.storage.auxiliary import content_of
from trireme.storage.checkpoint import Source
from trireme.storage.files import StoreError, existing, lock, make_folder, partial_of, remove_folders, replace_synced
from trireme.storage.store import Store
from trireme.storage.untrusted import quoted, read_small

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
UNFIT = {errno.EACCES, errno.EPERM, errno.EROFS}  # not allowed
UNFIT |= {errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL}  # not a folder


def check_checkpoint(model: str) -> None:
    """Raises InputError if `model` is a file, or a Hugging Face hub name and no folder."""
    if model and Path(model).is_file():
        raise InputError(f"{model} is a file. Give the folder of a checkpoint: config.json, .safetensors.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).parent.exists():
        folder = model.rpartition("/")[2]
        raise InputError(
            f"{model} is not a folder here. If it is a model of the Hugging Face hub, download it, and name the "
            f"folder: hf download {model} --local-dir {folder}"
        )


@dataclass
class NewRun:
    """What `new_run` gives."""

    store: Store | None = None


@contextmanager
def new_run(options: Options, saved: type[BaseException], id: str) -> Iterator[NewRun]:
    """A context with a new run's folder, locked, with its config.yaml; at the end the store is closed. `id`: of the
    run.

    If the run fails before a step is logged or saved, its files are removed; not after `saved`, not if the exception
    says that it was saved, nor if the same command was killed there before. Raises StoreError; InputError if the folder
    is in use.
    """
    out, run = Path(options.out), NewRun()
    with _writable(out):
        check_free(options)
    with locked(out, f"--out {out}: another run has just started there. Name another folder."):
        again = check_free(options)  # another may have started
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
            if not has_started(out) and not (run.store and run.store.snapshots):
                kept = again or any((out / name).exists() for name in PASSES)
                with suppress(OSError):  # report the first error
                    _undo(run, () if kept else [out / name for name in OURS])
            raise
        finally:
            if run.store:
                run.store.close()


def _undo(run: NewRun, own: Sequence[Path]) -> None:
    if run.store:
        run.store.remove()
    for path in own:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def tidy(out: Path) -> None:
    """Removes what a finished run has left, after its store."""
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
def locked(out: Path, otherwise: str) -> Iterator[None]:
    """A context that makes and locks the folder, without a lock file. Folders that it made are removed at its end, if
    they are empty.

    Raises InputError with `otherwise` if another process has the lock.
    """
    with _writable(out):
        made = make_folder(out)
        fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock(fd):
            raise InputError(otherwise)
        try:
            yield
        finally:
            remove_folders(made)
    finally:
        os.close(fd)


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    """A context in which errors about an unusable folder, not about a failing drive, become InputErrors."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNFIT:
            raise
        raise InputError(f"--out {out} cannot be written to ({error.strerror}). Name another folder.") from error


def check_free(options: Options) -> bool:
    """Raises InputError unless the folder is free. Returns True if the same command was killed there before its first
    step.
    """
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
        run = quoted(out.parent if place().host else out)
        if any(name.endswith(".safetensors") for name in held):
            result = f"give --adapter {quoted(out)}" if ADAPTER in held else f"name {out} as the checkpoint"
            further = (
                f"if it is finished, name another folder; to train its result further, {result}, and another --out"
            )
            raise InputError(f"--out {out} holds a run and its checkpoint. Continue it: --resume {run}; {further}.")
        raise InputError(f"--out {out} holds a run. Continue it: --resume {run}; or name another folder.")
    entries = "1 entry" if len(held) == 1 else f"{len(held):,} entries"
    raise InputError(f"--out {out} is not empty ({entries}). Name another folder.")


def _is_same(options: Options, held: set[str]) -> bool:
    """Whether the same command was killed there before its first step. `held`: names in OUT."""
    out = Path(options.out)
    if not (out / "config.yaml").is_file():
        left = {name for name in held if place().hosts > 1 and re.fullmatch(r"host-\d+", name)}  # by other hosts
        begun = any(has_started(out / name) or any((out / name).glob("store/snapshot-*")) for name in left)
        return held - left <= {partial_of(out / "config.yaml").name} and not begun
    stores = store_folders(options.store, out)
    started = has_started(out) or any(d.is_dir() and snapshots.folders(d) for d in stores)
    ours = all(
        name in (*OURS, "store") or name.startswith(temporary.HIDDEN) or re.fullmatch(r"host-\d+", name)
        for name in held
    )
    return ours and not started and repeats(unsigned((out / "config.yaml").read_bytes()), options)


def has_started(out: Path) -> bool:
    log = out / "log.jsonl"
    return log.exists() and log.stat().st_size > 0


def reopen(source: Source, out: Path, opener: str = "AutoModelForCausalLM", scored: bool = False) -> list[str]:
    """Opens the output; returns the lines to print. Raises StoreError if it differs from the source in more than
    values.
    """
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
        f"{program()} --config {quoted(out / 'config.yaml')} --out DIR",
    ]


def afterwards(out: Path, scored: bool) -> str:
    """What to type next."""
    if scored:
        return f"{program()} eval {quoted(out)} --data FILE"
    return f"{program()} sample {quoted(out)} --prompt TEXT, or {program()} eval {quoted(out)} --data FILE"


Entry = tuple[str, tuple[int, ...], str]  # dtype, shape, file


def _signature(source: Source) -> dict[str, Entry]:
    """Names, dtypes and shapes of tensors. A tied weight that is stored once, or twice, stays so."""
    return {name: (t.dtype, t.shape, t.file) for name, t in source.tensors.items()}


def _show(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{entry[0]} {list(entry[1])} in {entry[2]}"


def _differs(out: Path, what: str) -> NoReturn:
    raise StoreError(errno.EIO, f"read back, it is not what was written: {what}. The snapshots are intact", str(out))


# ---------------------------------------------------------------- whose it is


ID = re.compile(r"[0-9a-f]{32}")
LINE = re.compile(SIGNED.encode() + rb"([0-9a-f]{32}) [^\n]*\n")
LARGEST = 1 << 20  # bytes of a config.yaml
# where a link would make a run write elsewhere
LINKED = ("merged", "tokens", "tensorboard", "wandb", "mlflow", "comet")


def signed(run: str, config: bytes) -> bytes:
    """A config.yaml with the run's id."""
    return f"{SIGNED}{run} (its store says the same: keep this line)\n".encode() + config


def unsigned(config: bytes) -> bytes:
    return LINE.sub(b"", config, count=1) if LINE.match(config) else config


def run_of(folder: Path) -> str:
    """The id of the run in a folder; "" if there is none."""
    with suppress(OSError):
        found = LINE.match(read_small(folder / "config.yaml", LARGEST, links=True))
        return found[1].decode() if found else ""
    return ""


def common_id(out: Path, resumed: bool, group: Alone) -> str:
    """The id of host 0: that of the run in `out`, else a new one; "" if a resumed run has lost it. Raises
    InputError.
    """
    own = run_of(out) or ("" if resumed else uuid.uuid4().hex)
    return group.texts(own)[0]


def check_own(dirs: Sequence[Path], run: str, out: Path) -> None:
    """Raises InputError if a folder has the store of another run."""
    for path in dirs:
        of = folders.run_of(path)
        if of and of != run:
            lost = "" if run else f" {out / 'config.yaml'} has lost its first line, '# run ...': restore it."
            others = f"the store in {path} is another run's"
            raise InputError(f"--resume {out}: {others}.{lost} Name this run's with --store.")


def own_stores(dirs: Sequence[Path], run: str) -> list[Path]:
    """The folders that have the store of this run."""
    return [path for path in dirs if run and folders.run_of(path) == run]


def refuse_links(out: Path) -> None:
    """Raises InputError if a link in the run's folder would lead writes elsewhere."""
    for name in LINKED:
        if (out / name).is_symlink():
            raise InputError(f"{out / name} is a link, and a run would write where it leads. Remove it.")

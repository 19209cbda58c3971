"""A run's folder. What is output lies in OUT; all that the run needs until its end in OUT/.run, which is removed then.

    OUT/config.yaml log.jsonl report.html   from the beginning
    OUT/step-N best merged, the checkpoint  complete under these names, or not there
    OUT/.run/state.json                     the run's id; `ended` once the output is complete
    OUT/.run/store tokens teacher reference.npz best-N host-N

A folder with .run can be resumed; one with config.yaml and no .run is finished. The lock is on .run itself, ends with
the process, and needs no file. Only files that are known by name are removed: a folder with others is renamed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from trireme.engine.hosts.group import here
from trireme.engine.run import config_file, record, screen
from trireme.engine.run.after import hub
from trireme.engine.run.options import Options
from trireme.engine.run.record import Best, Progress, State
from trireme.models.config import InputError
from trireme.storage import folders, snapshots
from trireme.storage.auxiliary import CONTENT, content_of
from trireme.storage.checkpoint import counted
from trireme.storage.files import (
    existing,
    lock,
    make_folder,
    partial_of,
    remove_folders,
    replace_synced,
    stream,
    sync_folder,
    write_synced,
)
from trireme.storage.store import Store
from trireme.storage.untrusted import checksum, quoted

RUN, STATE, NOTE, REFERENCE = ".run", "state.json", "best.json", "reference.npz"
LOGS = ("config.yaml", "log.jsonl", "report.html", "trace.json")
PARTS = (".*.partial", "tokens/*.tokens", "tokens/*.npz", "tokens/.*.partial", "tokens/stdin*", "teacher/scores.json")
KNOWN = (
    STATE,
    REFERENCE,
    "log.jsonl",
    *PARTS,
    "teacher/*/part-*.safetensors",
    "teacher/**/.*.partial",
    *(f"host-*/{name}" for name in (STATE, "log.jsonl", *PARTS)),
)
ADAPTER = "adapter_model.safetensors"
UNFIT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EINVAL}
Save = Callable[[Path], Mapping[str, str]]  # writes a new folder, and returns its files' checksums by name


class Folder:
    """The locked folder of a run."""

    def __init__(self, out: Path, run: Path, stores: list[Path], made: list[Path]):
        """`made`: folders that did not exist, innermost first."""
        self.out, self.run, self.stores, self.made = out, run, stores, made
        self.state = State("")
        self.store: Store | None = None

    def write_config(self, options: Options) -> None:
        if not here().host:
            replace_synced(self.out / "config.yaml", config_file.write(options))

    def note(self, state: State) -> None:
        """Writes how far the run has come."""
        if state != self.state or not (self.run / STATE).exists():
            self.state = state
            record.write(self.run / STATE, state)

    # ------------------------------------------------------------ weights besides the store's

    def replace(self, name: str, save: Save) -> None:
        """Saves a folder of OUT under another name, then gives it its own, in the place of an older one."""
        new, old, target = self.run / f"{name}.new", self.run / f"{name}.old", self.out / name
        shutil.rmtree(new, ignore_errors=True)
        names = list(save(new))
        if target.exists():
            target.rename(old)
        new.rename(target)
        sync_folder(self.out)
        discard(old, *names, aside=self.out / f"{name}.left")

    def bring_back(self) -> None:
        """Undoes a replacement that was killed between its two renames."""
        for old in self.run.glob("*.old"):
            if not (self.out / old.stem).exists():
                old.rename(self.out / old.stem)

    def write_best(self, progress: Progress, saved: int | None, save: Save) -> None:
        """Writes the best weights. `saved`: the step of those that the last snapshot names, which stay."""
        self.drop_best(saved)
        new = self.run / "best.new"
        shutil.rmtree(new, ignore_errors=True)
        best = Best(progress.best_step or 0, progress.best or 0.0, dict(save(new)))
        record.write(new / NOTE, best)
        new.rename(self.best(best.step))
        sync_folder(self.run)

    def best(self, step: int | None) -> Path:
        return self.run / f"best-{step}"

    def drop_best(self, *keep: int | None) -> None:
        for path in self.run.glob("best-*"):
            if path not in map(self.best, keep) and (note := record.read(path / NOTE, Best)):
                discard(path, *note.files, NOTE, aside=self.out / f"{path.name}.left")

    def holds_best(self, progress: Progress, again: Mapping[str, CONTENT]) -> bool:
        """Whether the best weights that a snapshot names are there, byte by byte. `again`: files that can be made
        again, which are not compared.
        """
        folder = self.best(progress.best_step)
        note = record.read(folder / NOTE, Best)
        if note is None or note.step != progress.best_step:
            return progress.best_step is None
        names = [name for name in note.files if name not in again]
        with suppress(OSError):
            nbytes = sum((folder / name).stat().st_size for name in names)
            with screen.working("checking the best", nbytes) as more:
                return all(checksum(counted(stream(folder / name), more)) == note.files[name] for name in names)
        return False

    def take_over(self, step: int | None, out: Path, again: Mapping[str, CONTENT]) -> None:
        """Gives `out` the files of the best, by hard links if the drive has them; those of `again` are made again. May
        be killed and repeated.
        """
        folder = self.best(step)
        note = record.read(folder / NOTE, Best)
        assert note is not None
        for name in note.files:
            path, target = folder / name, out / name
            target.parent.mkdir(exist_ok=True)
            part = partial_of(target)
            part.unlink(missing_ok=True)
            if name in again:
                write_synced(part, [content_of(again[name])])
            elif target.exists() and target.samefile(path):
                continue  # a rename to another link of the same file would leave both names
            else:
                try:
                    part.hardlink_to(path)
                except OSError:
                    write_synced(part, stream(path))
            part.replace(target)
            sync_folder(target.parent)

    # ------------------------------------------------------------ the end

    def finish(self, keep_state: bool, best_step: int | None, again: Mapping[str, CONTENT]) -> None:
        """Makes OUT/best of the best weights of `best_step`, and removes all but the output, which is complete. If
        killed, `reopened` repeats it.
        """
        note = None if best_step is None else record.read(self.best(best_step) / NOTE, Best)
        if note is not None:
            new = self.run / "best.new"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            self.take_over(best_step, new, again)
            target = self.out / "best"
            if target.exists():
                target.rename(self.run / "best.old")
            new.rename(target)
            discard(self.run / "best.old", *note.files, aside=self.out / "best.left")
        self.note(State(self.state.id, started=True, ended=True, kept=keep_state))
        if not keep_state:
            if not here().host:
                here().meet()  # other hosts' folders are in that of host 0
            if self.store:
                with screen.working("removing the store", 0) as more:
                    self.store.remove(more)
            self.remove()
            if here().host:
                here().meet()

    def remove(self) -> None:
        """Removes OUT/.run."""
        self.drop_best()
        if left := discard(self.run, *KNOWN, "*.new/**/*", aside=self.out / "run.left"):
            screen.warn(f"{left} has files that are not of the run")

    def undo(self) -> None:
        """Removes what a run that failed before its first step has made."""
        if self.store:
            self.store.remove()
        self.remove()
        for name in LOGS if not here().host else ():
            (self.out / name).unlink(missing_ok=True)
            partial_of(self.out / name).unlink(missing_ok=True)
        remove_folders(self.made)


def discard(folder: Path, *known: str, aside: Path) -> Path | None:
    """Removes the files of a folder that match the patterns `known`, and the folder. If it has others it gets the name
    `aside` or one like it, which is returned.
    """
    if not folder.is_dir():
        return None
    for pattern in known:
        for path in folder.glob(pattern):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
    inside = [path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()]
    remove_folders([*sorted(inside, reverse=True), folder])
    if not folder.exists():
        return None
    names = (aside.with_name(f"{aside.name}-{n}") for n in range(1, 1000))
    return folder.rename(next(path for path in (aside, *names) if not path.exists()))


# ---------------------------------------------------------------- a new one, or one that is continued


def default(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, -3 ... behind those that exist."""
    numbers = (re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name) for path in Path("runs").glob("*"))
    taken = [int(match[1] or 1) for match in numbers if match]
    return Path("runs") / (f"{name}-{max(taken) + 1}" if taken else name)


def named(o: Options) -> Options:
    """The options with an output folder; without --out the next free one."""
    title = "demo" if o.demo else o.shape or (hub.title(o.model) if o.model else "run")
    return o if o.out else replace(o, out=str(default(title)))


def check_free(out: Path, model: str) -> None:
    """Raises InputError unless a new run may write to `out`."""
    other = "Name another folder, or leave --out out."
    if out.is_symlink() and not out.exists():
        raise InputError(f"--out {out} is a link to {out.readlink()}, which is not there. {other}")
    if out.exists() and model and Path(model).exists() and out.samefile(model):
        raise InputError(f"--out {out} is the checkpoint itself. {other}")
    if not existing(out).is_dir():
        raise InputError(f"--out {out}: {existing(out)} is a file. {other}")
    if is_finished(out):
        raise InputError(f"--out {out} holds a finished run. {further(out)}")
    if (out / RUN).exists() and (out / "config.yaml").exists():  # else killed before there was anything of it
        raise InputError(f"--out {out} holds a run. Continue it: --resume {quoted(out)}; or leave --out out.")
    if out.exists() and any(path.name not in (RUN, ".config.yaml.partial") for path in out.iterdir()):
        raise InputError(f"--out {out} is not empty. {other}")


@contextmanager
def new(options: Options) -> Iterator[Folder]:
    """A context with a new run's folder. If the run fails before its first step, all of it is removed. Raises
    InputError, StoreError.
    """
    out, group = Path(options.out), here()
    if group.host:
        group.meet()  # host 0's folder has to be free first
    else:
        check_free(out, options.model)
    run = run_folder(out)
    try:
        made = make_folder(run)
    except OSError as error:
        if error.errno in UNFIT:
            raise InputError(f"--out {out} cannot be made ({error.strerror}). Name another folder.") from error
        raise
    with _locked(out, run, made) as folder:
        if not group.host:
            group.meet()
        folder.stores = stores(options)
        folder.note(State(group.texts(uuid.uuid4().hex)[0]))
        folder.write_config(options)
        try:
            yield folder
        except BaseException:
            log = out / "log.jsonl"
            if not (log.exists() and log.stat().st_size) and not (folder.store and folder.store.snapshots):
                with suppress(OSError):  # report the first error
                    folder.undo()
            raise


@contextmanager
def reopened(options: Options) -> Iterator[Folder]:
    """A context with the folder of --resume. Raises InputError if it is in use, or finished."""
    out = Path(options.out)
    run = run_folder(out)
    made = make_folder(run) if here().host else []
    with _locked(out, run, made) as folder:
        for path in (*run.rglob("*"), *(out / name for name in (*LOGS, "best", "merged", "tensorboard", "wandb"))):
            if path.is_symlink():
                raise InputError(f"{path} is a link, and a run would write where it leads. Remove it.")
        folder.stores = stores(options)
        state = record.read(run / STATE, State) or (State("") if made else _state_again(folder))
        folder.state = replace(state, id=here().texts(state.id)[0])
        if here().first(folder.state.ended and not folder.state.kept):
            every = [d for dirs in stores_by_host(options).values() for d in dirs]
            mine = every if here().hosts == 1 else folder.stores
            if not here().host:
                here().meet()  # other hosts' folders are in that of host 0
            folders.remove_finished(mine, folder.state.id)  # whose removal had begun
            folders.discard([d for d in mine if folders.run_of(d) == folder.state.id])
            folder.remove()
            if here().host:
                here().meet()
            raise InputError(f"--resume {out}: that run is finished. {further(out)}")
        folder.bring_back()
        yield folder


def _state_again(folder: Folder) -> State:
    """The state of a run whose file is lost or damaged, from its store and its log."""
    ids = [id for path in folder.stores if (id := folders.run_of(path))]
    log = folder.out / "log.jsonl"
    started = any(snapshots.folders(path) for path in folder.stores if path.is_dir()) or (
        log.exists() and log.stat().st_size > 0
    )
    return State(ids[0] if ids else uuid.uuid4().hex, started=started)


@contextmanager
def _locked(out: Path, run: Path, made: list[Path]) -> Iterator[Folder]:
    fd = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    folder = Folder(out, run, [], made)
    try:
        if not lock(fd):
            raise InputError(f"another process is at the run in {out}. Wait for its end, or name another --out.")
        yield folder
    finally:
        if folder.store:
            folder.store.close()
        os.close(fd)
        remove_folders(made)  # those without files


def run_folder(out: Path) -> Path:
    """The folder with what this host's part of the run needs until its end."""
    return out / RUN / f"host-{here().host}" if here().host else out / RUN


def stores(options: Options, host: int | None = None) -> list[Path]:
    """The folders of a host's store; None: of this host."""
    number = here().host if host is None else host
    part = f"host-{number}" if number else "."
    return [Path(each) / part for each in options.store] or [Path(options.out) / RUN / part / "store"]


def stores_by_host(options: Options) -> dict[int, list[Path]]:
    """The folders of the stores of all hosts that can be reached from here."""
    roots = (Path(options.out) / RUN, *map(Path, options.store))
    numbers = {int(path.name[5:]) for root in roots for path in root.glob("host-*") if path.name[5:].isdecimal()}
    return {host: stores(options, host) for host in sorted({0, *numbers})}


def latest(runs: Path) -> Path:
    """The unfinished run in a folder that was written last. Raises InputError."""
    states = {path.parent.parent: record.read(path, State) for path in runs.glob(f"*/{RUN}/{STATE}")}
    unfinished = [run for run, state in states.items() if not (state and state.ended)]
    if not unfinished:
        raise InputError(f"--resume: no unfinished run in {runs}/. Name the run: --resume RUN.")
    return max(unfinished, key=lambda run: max(path.lstat().st_mtime for path in [run, *run.iterdir()]))


def check_resumable(out: Path) -> None:
    """Raises InputError unless a folder has a run that can go on."""
    if (out / RUN).is_dir() and (out / "config.yaml").is_file():
        return
    if is_finished(out):
        raise InputError(f"--resume {out}: that run is finished, and its state is removed. {further(out)}")
    above = next((path for path in out.absolute().parents[:2] if (path / RUN).is_dir()), None)
    way = f"It is part of a run: --resume {quoted(above)}." if above else "Name the folder that --out named."
    if (out / "config.yaml").is_file():
        way = "Its config.yaml is of an older version: start again." if not above else way
    raise InputError(f"--resume {out}: there is no run that can go on. {way}")


def is_finished(out: Path) -> bool:
    """Whether a folder has the output of a run."""
    return config_file.is_own(out / "config.yaml") and not (out / RUN).is_dir()


def further(out: Path) -> str:
    """How a finished run's result is trained further, to be pasted."""
    kept = "--keep-state keeps the state of the next."
    if not config_file.is_own(out / "config.yaml"):
        return kept
    options = config_file.of_run(out) or Options()
    model = f"{quoted(options.model)} --adapter {quoted(out)}" if (out / ADAPTER).exists() else quoted(out)
    data = " ".join(f"--data {quoted(each)}" for each in options.data)
    method = f" --method {options.method}" * (options.method != "sft")
    return f"To train its result further: trireme {model} {data}{method} --warmup 0. {kept}"


def resumable(out: str) -> str:
    """The folder that --resume takes; "" if no run has begun there."""
    with suppress(OSError):
        return out if out and (Path(out) / RUN / STATE).exists() else ""
    return ""

"""A run's folder. What is output lies in OUT; all that the run needs until its end in OUT/.run, which is removed then.

    OUT/config.yaml log.jsonl report.html   from the beginning
    OUT/step-N best merged, the checkpoint  complete under these names, or not there
    OUT/.run/state.json                     the run's id; `ended` once the output is complete
    OUT/.run/store tokens teacher reference.npz best-N host-N

A folder with .run can be resumed; one with config.yaml and no .run is finished. The lock is on .run itself, ends with
the process, and needs no file. Only files that are known by name are removed: a folder with others is renamed.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from trireme.engine.hosts.host_snapshots import RunSnapshot

RUN, STATE, NOTE, REFERENCE = ".run", "state.json", "best.json", "reference.npz"
LOGS = ("config.yaml", "log.jsonl", "report.html", "trace.json", "plan.json")
ADAPTER = "adapter_model.safetensors"
OF_HOST = (STATE, "log.jsonl", ".*.partial", "*/.*.partial", "tokens/*.tokens", "tokens/*.npz", "tokens/stdin*")
OF_RUN = (REFERENCE, "*.new/*", "teacher/scores.json", "teacher/*/part-*.safetensors")
KNOWN = (*OF_HOST, *OF_RUN, *(f"host-*/{name}" for name in OF_HOST))  # files in .run, besides the best and the store
Save = Callable[[Path], Mapping[str, str]]  # writes a new folder, and returns its files' checksums by name


class Folder:
    """The locked folder of a run."""

    def __init__(self, out: Path, run: Path, stores: list[Path], made: list[Path]):
        """`made`: folders that did not exist, innermost first."""
        self.out, self.run, self.stores, self.made = out, run, stores, made
        self.state = State("")
        self.store: Store | None = None
        self.common: RunSnapshot | None = None  # of another number of hosts, from which the run goes on

    def write_config(self, options: Options) -> None:
        if not here().host:
            replace_synced(self.out / "config.yaml", config_file.write(options))

    def note(self, state: State) -> None:
        """Writes how far the run has come."""
        self.state = state
        record.write(self.run / STATE, state)

    # ------------------------------------------------------------ weights besides the store's

    def replace(self, target: Path, save: Callable[[Path], Iterable[str]]) -> None:
        """Saves a folder under another name, then gives it its own, in the place of an older one. `save` returns the
        names of its files. A run that is killed between the two goes on before, and saves it again.
        """
        new = self.run / f"{target.name}.new"
        shutil.rmtree(new, ignore_errors=True)
        names = save(new)
        discard(target, names, aside=self.out / f"{target.name}.left")
        new.rename(target)
        sync_folder(target.parent)

    def best(self, step: int | None) -> Path:
        return self.run / f"best-{step}"

    def write_best(self, progress: Progress, saved: int | None, save: Save) -> None:
        """Writes the best weights. `saved`: the step of those that the last snapshot names, which stay."""

        def save_with_note(folder: Path) -> list[str]:
            files = dict(save(folder))
            record.write(folder / NOTE, Best(progress.best_step or 0, progress.best or 0.0, files))
            return [*files, NOTE]

        self.drop_best(saved)
        self.replace(self.best(progress.best_step), save_with_note)

    def drop_best(self, *keep: int | None) -> None:
        for path in self.run.glob("best-*"):
            if path not in map(self.best, keep) and (note := record.read(path / NOTE, Best)):
                discard(path, [*note.files, NOTE], aside=self.out / f"{path.name}.left")

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
            with screen.working("checking the best", nbytes) as progressed:
                sums = (checksum(counted(stream(folder / name), progressed)) for name in names)
                return all(sum == note.files[name] for name, sum in zip(names, sums, strict=True))
        return False

    def take_over(self, step: int | None, out: Path, again: Mapping[str, CONTENT]) -> list[str]:
        """Gives `out` the files of the best, by hard links if the drive has them; those of `again` are made again. May
        be killed and repeated. Returns the names.
        """
        folder = self.best(step)
        note = record.read(folder / NOTE, Best)
        assert note is not None
        for name in note.files:
            path, target = folder / name, out / name
            target.parent.mkdir(exist_ok=True, parents=True)
            part = partial_of(target)
            part.unlink(missing_ok=True)
            if name in again:
                write_synced(part, [content_of(again[name])])
            else:
                try:
                    part.hardlink_to(path)
                except OSError:
                    write_synced(part, stream(path))
            part.replace(target)
            part.unlink(missing_ok=True)  # a rename to another link of the same file leaves both
            sync_folder(target.parent)
        return list(note.files)

    # ------------------------------------------------------------ the end

    def finish(self, keep_state: bool, best_step: int | None, again: Mapping[str, CONTENT]) -> None:
        """Makes OUT/best of the best weights of `best_step`, and removes all but the output, which is complete. If
        killed, `reopened` repeats it.
        """
        if best_step is not None and self.best(best_step).is_dir():
            self.replace(self.out / "best", lambda folder: self.take_over(best_step, folder, again))
        self.note(State(self.state.id, started=True, ended=True, kept=keep_state))
        if not keep_state:
            with others_first():
                self.remove(self.stores)

    def remove(self, stores: list[Path]) -> None:
        """Removes `stores` if they are of this run, and OUT/.run."""
        if self.store:
            self.store.close()
            self.store = None
        with screen.working("removing the store", 0) as progressed:
            folders.remove_finished(stores, self.state.id)  # whose removal had begun
            folders.discard([path for path in stores if folders.run_of(path) == self.state.id], progressed)
        self.drop_best()
        if left := discard(self.run, KNOWN, aside=self.out / "run.left"):
            screen.warn(f"{left} has files that are not of the run")

    def undo(self) -> None:
        """Removes what a run that failed before its first step has made."""
        for name in LOGS if not here().host else ():
            (self.out / name).unlink(missing_ok=True)
            partial_of(self.out / name).unlink(missing_ok=True)
        self.remove(self.stores)
        remove_folders(self.made)


def discard(folder: Path, known: Iterable[str], aside: Path) -> Path | None:
    """Removes the files of a folder that match the patterns `known`, its state.json last, and the folder. If it has
    others it gets the name `aside` or one like it, which is returned.
    """
    patterns, last = list(known), folder / STATE
    for path in sorted(folder.rglob("*"), key=lambda path: (path != last, path), reverse=True):  # folders after files
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            remove_folders([path])
        elif any(fnmatchcase(name, pattern) for pattern in patterns):
            path.unlink(missing_ok=True)
    remove_folders([folder])
    if not folder.exists():
        return None
    names = (aside.with_name(f"{aside.name}-{n}") for n in range(1, 1000))
    return folder.rename(next(path for path in (aside, *names) if not path.exists()))


@contextmanager
def others_first() -> Iterator[None]:
    """A context that host 0 enters after all others: their folders are in its own."""
    if not here().host:
        here().meet()
    yield
    if here().host:
        here().meet()


# ---------------------------------------------------------------- a new one, or one that is continued


def named(o: Options) -> Options:
    """The options with an output folder: without --out runs/NAME, or the next of runs/NAME-2, -3 ..."""
    if o.out:
        return o
    name = "demo" if o.demo else o.shape or (hub.title(o.model) if o.model else "run")
    numbers = (re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name) for path in Path("runs").glob("*"))
    taken = [int(match[1] or 1) for match in numbers if match]
    return replace(o, out=f"runs/{name}-{max(taken) + 1}" if taken else f"runs/{name}")


def check_free(out: Path, model: str) -> None:
    """Raises InputError unless a new run may write to `out`."""
    way, there = "Name another folder, or leave --out out", existing(out)
    if model and Path(model).exists() and there.samefile(model):
        what = "is the checkpoint itself"
    elif not there.is_dir():
        what = f"cannot be made: {there} is a file"
    elif is_finished(out):
        what, way = "holds a finished run", further(out)
    elif (out / RUN).exists() and (out / "config.yaml").exists():  # else killed before there was anything of it
        what, way = "holds a run", f"Continue it: --resume {quoted(out)}; or leave --out out"
    elif out.is_dir() and any(path.name not in (RUN, ".config.yaml.partial") for path in out.iterdir()):
        what = "is not empty"
    else:
        return
    raise InputError(f"--out {out} {what}. {way}.")


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
    with _locked(out, run, make_folder(run)) as folder:
        if not group.host:
            group.meet()
        folder.stores = stores(options)
        folder.note(State(group.texts(uuid.uuid4().hex)[0]))
        folder.write_config(options)
        try:
            yield folder
        except BaseException:
            if not (_has_log(out) or (folder.store and folder.store.snapshots)):
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
        for path in (*out.iterdir(), *run.rglob("*")):
            if path.is_symlink():
                raise InputError(f"{path} is a link, and a run would write where it leads. Remove it.")
        folder.stores = stores(options)
        state = record.read(run / STATE, State) or (State("") if made else _state_again(folder))
        folder.state = replace(state, id=here().texts(state.id)[0])
        if here().first(folder.state.ended and not folder.state.kept):
            every = [path for paths in stores_by_host(options).values() for path in paths]
            with others_first():
                folder.remove(every if here().hosts == 1 else folder.stores)
            raise InputError(f"--resume {out}: that run is finished. {further(out)}.")
        yield folder


def _state_again(folder: Folder) -> State:
    """The state of a run whose file is lost or damaged, from its store and its log; without any file it has ended."""
    if not any(folder.run.iterdir()):
        return State(uuid.uuid4().hex, started=True, ended=True)
    ids = [id for path in folder.stores if (id := folders.run_of(path))]
    saved = any(snapshots.folders(path) for path in folder.stores if path.is_dir())
    return State(ids[0] if ids else uuid.uuid4().hex, started=saved or _has_log(folder.out))


def _has_log(out: Path) -> bool:
    return (out / "log.jsonl").exists() and (out / "log.jsonl").stat().st_size > 0


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


# ---------------------------------------------------------------- what a folder is


def is_finished(out: Path) -> bool:
    """Whether a folder has the output of a run."""
    return config_file.is_own(out / "config.yaml") and not (out / RUN).is_dir()


def resumable(out: str) -> str:
    """The folder that --resume takes; "" if no run has begun there."""
    with suppress(OSError):
        return out if out and (Path(out) / RUN / STATE).exists() else ""
    return ""


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
    what, way = "there is no run that can go on", "Name the folder that --out named"
    if is_finished(out):
        what, way = "that run is finished, and its state is removed", further(out)
    elif above := next((path for path in out.absolute().parents[:2] if (path / RUN).is_dir()), None):
        way = f"It is part of a run: --resume {quoted(above)}"
    raise InputError(f"--resume {out}: {what}. {way}.")


def further(out: Path) -> str:
    """How a finished run's result is trained further, to be pasted."""
    options = config_file.of_run(out) or Options()
    model = f"{quoted(options.model)} --adapter {quoted(out)}" if (out / ADAPTER).exists() else quoted(out)
    data = " ".join(f"--data {quoted(each)}" for each in options.data)
    method = f" --method {options.method}" * (options.method != "sft")
    command = f"trireme {model} {data}{method} --warmup 0"
    return f"To train its result further: {command}. --keep-state keeps the state of the next"

"""A run's folder. What is output lies in OUT; all that the run needs until its end in OUT/.run, which is removed then.

    OUT/config.yaml log.jsonl report.html   from the beginning
    OUT/step-N merged, the checkpoint       complete under these names, or not there
    OUT/.run/state.json                     the run's id; `ended` once the output is complete
    OUT/.run/store tokens teacher reference.json best-N host-N

A folder with .run can be resumed; one with config.yaml and no .run is finished. The lock is on .run itself, ends with
the process, and needs no file. Only files that are known by name are removed: a folder with others is renamed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from trireme.engine.amounts import count
from trireme.engine.hosts.group import world
from trireme.engine.run import config_file, screen
from trireme.engine.run.after import hub
from trireme.engine.run.options import Options
from trireme.engine.run.record import Best, State
from trireme.models.config import InputError
from trireme.storage import files, folders
from trireme.storage.checkpoint import counted
from trireme.storage.store import Store
from trireme.storage.untrusted import checksum, quoted, seal, unseal

RUN, STATE, NOTE, REFERENCE = ".run", "state.json", "best.json", "reference.json"
LOGS = ("config.yaml", "log.jsonl", "report.html")
ADAPTER = "adapter_model.safetensors"
BEGUN = {RUN, ".config.yaml.partial"}  # what a run has made that was killed at once
OF_HOST = (STATE, "log.jsonl", ".*.partial", "tokens/*.tokens", "tokens/*.npz", "tokens/stdin*")
OF_RUN = (REFERENCE, "*/.*.partial", "*.new/*", "teacher/scores.json", "teacher/*/part-*.safetensors")
KNOWN = (*OF_HOST, *OF_RUN, *(f"host-*/{name}" for name in OF_HOST))  # files in .run, besides the best and the store
FORMAT = 1  # of records
T = TypeVar("T")
Save = Callable[[Path], Mapping[str, str]]  # writes a new folder, and returns its files' checksums by name


class Folder:
    """The locked folder of a run."""

    def __init__(self, out: Path, run: Path, stores: list[Path]):
        self.out, self.run, self.stores = out, run, stores
        self.state = State("")
        self.store: Store | None = None

    def begin(self, options: Options) -> None:
        """Makes the records of a new run."""
        if not world().host:
            world().barrier()
        self.note(State(world().texts(uuid.uuid4().hex)[0], world().hosts))
        self.write_config(options)

    def reopen(self) -> None:
        """Reads the state of a run. Raises InputError if it is lost, of another number of hosts, or of a finished run,
        which is removed then.
        """
        for path in (*self.out.iterdir(), *self.run.rglob("*")):
            if path.is_symlink():
                raise InputError(f"{path} is a link, and a run would write where it leads. Remove it.")
        state = read_record(self.run / STATE, State) or (State("") if world().host else None)
        if state is None:
            advice = f"restore it from a copy, or remove {quoted(self.out)} and start again"
            raise InputError(f"--resume {self.out}: {self.run / STATE} is lost or damaged: {advice}.")
        id, hosts = world().texts(f"{state.id} {state.hosts}")[0].split()
        self.state = replace(state, id=id, hosts=int(hosts))
        if world().hosts != self.state.hosts:
            advice = "Resume it with as many, or begin another from its OUT/step-N"
            raise InputError(f"--resume {self.out}: the run is of {count(self.state.hosts, 'host')}. {advice}.")
        if world().first(self.state.ended and not self.state.keep_state):
            self.end()
            raise InputError(f"--resume {self.out}: that run is finished. {further(self.out)}.")

    def write_config(self, options: Options) -> None:
        if not world().host:
            files.replace_synced(self.out / "config.yaml", config_file.content(options))

    def note(self, state: State) -> None:
        """Writes how far the run has come."""
        self.state = state
        write_record(self.run / STATE, state)

    # ------------------------------------------------------------ weights besides the store's

    def replace(self, target: Path, save: Save, note: bool = False) -> None:
        """Saves a folder under another name, then gives it its own, in the place of an older one. A run that is killed
        between the two goes on before, and saves it again. `note`: with best.json.
        """
        new = self.run / f"{target.name}.new"
        shutil.rmtree(new, ignore_errors=True)
        sums = dict(save(new))
        if note:
            write_record(new / NOTE, Best(sums))
        self.discard(target, [*sums, NOTE])
        new.rename(target)
        files.sync_folder(target.parent)

    def best(self, step: int | None) -> Path:
        return self.run / f"best-{step}"

    def drop_best(self, keep: int | None = None) -> None:
        """Removes the best weights, but those of the step `keep`."""
        for path in self.run.glob("best-*"):
            if path != self.best(keep) and (note := read_record(path / NOTE, Best)):
                self.discard(path, [*note.files, NOTE])

    def holds_best(self, step: int | None) -> bool:
        """Whether the best weights, of an evaluated step, are there, byte by byte."""
        folder, note = self.best(step), read_record(self.best(step) / NOTE, Best)
        if note is None or step is None:
            return step is None
        with suppress(OSError):
            nbytes = sum((folder / name).stat().st_size for name in note.files)
            with screen.working("checking the best", nbytes) as progressed:
                sums = (checksum(counted(files.stream(folder / name), progressed)) for name in note.files)
                return all(sum == before for sum, before in zip(sums, note.files.values(), strict=True))
        return False

    def take_over(self, step: int | None) -> None:
        """Gives OUT the files of the best, by hard links if the drive has them. May be killed and repeated."""
        folder, note = self.best(step), read_record(self.best(step) / NOTE, Best)
        assert note is not None
        for name in note.files:
            target = self.out / name
            target.parent.mkdir(exist_ok=True, parents=True)
            part = files.partial_of(target)
            part.unlink(missing_ok=True)
            try:
                part.hardlink_to(folder / name)
            except OSError:
                files.write_synced(part, files.stream(folder / name))
            part.replace(target)
            part.unlink(missing_ok=True)  # a rename to another link of the same file leaves both
            files.sync_folder(target.parent)

    # ------------------------------------------------------------ the end

    def finish(self, keep_state: bool) -> None:
        """Removes all but the output, which is complete. If killed, `reopen` repeats it."""
        self.note(replace(self.state, started=True, ended=True, keep_state=keep_state))
        if not keep_state:
            self.end()

    def end(self) -> None:
        """As `remove`, by host 0 after the others, whose folders are in its own."""
        if not world().host:
            world().barrier()
        self.remove()
        if world().host:
            world().barrier()

    def remove(self) -> None:
        """Removes the stores if they are of this run, and OUT/.run."""
        self.close()
        with screen.working("removing the store", 0) as progressed:
            folders.remove_finished(self.stores, self.state.id)  # whose removal had begun
            folders.discard([path for path in self.stores if folders.run_of(path) == self.state.id], progressed)
        self.drop_best()
        self.discard(self.run, KNOWN)

    def discard(self, folder: Path, known: Iterable[str]) -> None:
        """Removes the files of a folder that match the patterns `known`, its state.json last, and the folder. If it
        has others, it becomes OUT/NAME.left or one like it.
        """
        patterns, last = list(known), folder / STATE
        for path in sorted(folder.rglob("*"), key=lambda path: (path != last, path), reverse=True):  # files first
            if path.is_dir() and not path.is_symlink():
                files.remove_folders([path])
            elif any(fnmatchcase(path.relative_to(folder).as_posix(), pattern) for pattern in patterns):
                path.unlink(missing_ok=True)
        files.remove_folders([folder])
        if folder.exists():
            names = (f"{folder.name.lstrip('.')}.left" + f"-{n}" * bool(n) for n in range(1000))
            left = folder.rename(next(path for path in map(self.out.joinpath, names) if not path.exists()))
            screen.warn(f"{left} has files that are not of the run")

    def close(self) -> None:
        if self.store:
            self.store.close()
            self.store = None


# ---------------------------------------------------------------- a new one, or one that is continued


def named(o: Options) -> Options:
    """The options with an output folder: without --out runs/NAME, or the first free one of runs/NAME-2, -3 ..."""
    name = "demo" if o.demo else o.shape or (hub.model_title(o.model) if o.model else "run")
    names = (f"runs/{name}" + f"-{n}" * (n > 1) for n in range(1, 1 << 20))
    return o if o.out else replace(o, out=next(name for name in names if not Path(name).exists()))


def check_free(out: Path) -> None:
    """Raises InputError unless a new run may write to `out`."""
    problem, advice = "is not an empty folder", "Name another folder, or leave --out out"
    if is_finished(out):
        problem, advice = "holds a finished run", further(out)
    elif (out / RUN).exists() and (out / "config.yaml").exists():  # else killed before there was anything of it
        problem, advice = "holds a run", f"Continue it: --resume {quoted(out)}; or leave --out out"
    elif files.existing(out).is_dir() and not (out.exists() and {path.name for path in out.iterdir()} - BEGUN):
        return
    raise InputError(f"--out {out} {problem}. {advice}.")


@contextmanager
def open_folder(options: Options) -> Iterator[Folder]:
    """A context with the locked folder of a run: of --resume, or a new one, of which all is removed if the run fails
    before its first step. Raises InputError, StoreError.
    """
    out, host, resumes = Path(options.out), world().host, bool(options.resume)
    run = out / RUN / f"host-{host}" if host else out / RUN
    if host and not resumes:
        world().barrier()  # host 0's folder has to be free first
    elif not resumes:
        check_free(out)
    parents = files.make_folder(run) if host or not resumes else []
    with ExitStack() as stack:
        stack.callback(files.remove_folders, parents)  # those without files
        fd = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        if not files.lock(fd):
            raise InputError(f"another process is at the run in {out}. Wait for its end, or name another --out.")
        folder = stack.enter_context(closing(Folder(out, run, stores(options))))
        try:
            folder.reopen() if resumes else folder.begin(options)
            yield folder
        except BaseException:
            log = out / "log.jsonl"
            if not (resumes or (log.exists() and log.stat().st_size) or (folder.store and folder.store.snapshots)):
                with suppress(OSError):  # report the first error
                    for name in LOGS if not host else ():
                        (out / name).unlink(missing_ok=True)
                        files.partial_of(out / name).unlink(missing_ok=True)
                    folder.remove()
                    files.remove_folders(parents)
            raise


def stores(options: Options) -> list[Path]:
    """The folders of this host's store."""
    part = f"host-{world().host}" if world().host else "."
    return [Path(path) / part for path in options.store] or [Path(options.out) / RUN / part / "store"]


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
    """The unfinished run in a folder whose state was written last. Raises InputError."""
    states = [path for path in runs.glob(f"*/{RUN}/{STATE}") if not (read_record(path, State) or State("")).ended]
    if not states:
        raise InputError(f"--resume: no unfinished run in {runs}/. Name the run: --resume RUN.")
    return max(states, key=lambda path: path.lstat().st_mtime).parents[1]


def check_resumable(out: Path) -> None:
    """Raises InputError unless a folder has a run that can go on."""
    if has_run := config_file.is_own(out / "config.yaml"):
        files.remove_folders([out / RUN])  # empty where the removal of a finished run was killed
    if not has_run or is_finished(out):
        hint = f"that run is finished. {further(out)}" if has_run else "there is no run. Name the folder of its --out"
        raise InputError(f"--resume {out}: {hint}.")


def further(out: Path) -> str:
    """How a finished run's result is trained further, to be pasted."""
    options = config_file.of_run(out) or Options()
    model = f"{quoted(options.model)} --adapter {quoted(out)}" if (out / ADAPTER).exists() else quoted(out)
    data = " ".join(f"--data {quoted(path)}" for path in options.data)
    method = f" --method {options.method}" * (options.method != "sft")
    command = f"trireme {model} {data}{method} --warmup 0"
    return f"To train its result further: {command}. --keep-state keeps the state of the next"


# ---------------------------------------------------------------- records


def write_record(path: Path, record: Any) -> None:
    """Writes a record durably, with its checksum. Raises StoreError."""
    files.replace_synced(path, seal(FORMAT, asdict(record)))


def read_record(path: Path, cls: type[T]) -> T | None:
    """The record in a file; None if there is none, it is damaged, or not one of this version."""
    try:
        return cls(**unseal(path.read_bytes(), FORMAT, path.name))
    except (OSError, ValueError, TypeError):
        return None

"""What a resumed run continues: its store, and the last snapshot that all of its hosts have."""

from __future__ import annotations

import errno
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trireme.engine.hosts.group import Alone
from trireme.engine.hosts.host_snapshots import HostSnapshot, RunSnapshot, last_common, readable
from trireme.engine.placement import Progress, silent
from trireme.engine.run.begin.snapshot import check_snapshot
from trireme.engine.run.command import program
from trireme.engine.run.config.config_file import saved_options, stores_of
from trireme.engine.run.config.option_names import flag_of
from trireme.engine.run.job import Job
from trireme.engine.run.options import Options, store_folders
from trireme.engine.run.output.folder import (
    ADAPTER,
    OURS,
    check_own,
    has_started,
    own_stores,
    run_of,
    tidy,
)
from trireme.engine.run.screen import Screen
from trireme.models.config import InputError
from trireme.storage import folders
from trireme.storage.checkpoint import open_source
from trireme.storage.files import NoSnapshot, StoreError, remove_folders
from trireme.storage.folders import IDENTITY
from trireme.storage.headers import CheckpointError
from trireme.storage.store import Store
from trireme.storage.untrusted import quoted

Snapshot = dict[str, Any]  # of the form snapshot.SNAPSHOT
OF_DATA = (  # options that decide what the rows are; --data may be elsewhere now
    *("val", "map", "long", "no_pack", "skip_bad", "max_samples", "seed", "system", "chat_template"),
    *("chat_template_kwargs", "tokenizer"),
)


def new_store(job: Job, screen: Screen, run: str) -> Store:
    """A new store. `run`: the id. Raises StoreError, InputError."""
    try:
        return Store.create(job.store_dirs, job.options.keep, job.source.auxiliary, say=screen.warn, run=run)
    except StoreError as error:
        if error.errno != errno.EEXIST:
            raise
        raise InputError(f"--store {error.filename}: {error.strerror}.") from None


def is_finished(options: Options, run: str) -> bool:
    """Whether only the store is left to be removed."""
    out = Path(options.out)
    dirs = store_folders(options.store, out)
    exported = any(out.glob("*.safetensors"))
    if any(folders.is_finished(d, run) for d in dirs):
        return exported or has_started(out)
    lost = [d for d in dirs if not (d / IDENTITY).exists() or (folders.run_of(d) not in ("", run))]
    there = not options.store or all(d.is_dir() for d in dirs)  # else removed with the store, or not mounted
    return bool(lost and exported and (there or _has_result(out)))


def _has_result(out: Path) -> bool:
    """Whether all files of the run's result are there."""
    with suppress(CheckpointError):
        return (out / ADAPTER).exists() or bool(open_source(out).files)
    return False


def _clean(options: Options, run: str, group: Alone) -> None:
    """Completes the end of a finished run. Each host removes its own: host 0 may not reach their stores."""
    out = Path(options.out)
    if group.host:
        _give_up(out, run)
    else:
        folders.remove_finished(store_folders(options.store, out), run)
        tidy(out)
    group.meet()
    if not group.host:
        remove_given_up(out, 1)


def open_store(options: Options, screen: Screen, run: str) -> Store | None:
    """The store; None before the first snapshot. Raises StoreError; InputError if it is missing or another run's."""
    out = Path(options.out)
    dirs = store_folders(options.store, out)
    check_own(dirs, run, out)
    lost = [d for d in dirs if not (d / IDENTITY).exists()]
    if lost and has_started(out):
        raise InputError(f"--resume {out}: the run's store is not in {lost[0]}. Is its drive mounted?")
    try:
        return Store.open(dirs, options.keep, say=screen.warn, run=run)
    except NoSnapshot:
        screen.say("no snapshot yet: starts from the beginning")
        return None


class Start(NamedTuple):
    """What a run continues: its store and snapshots."""

    store: Store | None = None
    snapshot: Snapshot | None = None
    common: RunSnapshot | None = None  # of another number of hosts


def open_run(options: Options, screen: Screen, group: Alone, run: str) -> Start:
    """The last snapshot that all hosts of the run have; newer ones are removed. Nothing if a host has none yet.

    `run`: its id. Raises as open_store, and InputError if the run is finished or a host's store cannot be reached.
    """
    begun, folder = (Path(options.out) / "config.yaml").is_file(), run_folder(Path(options.out), group.host)
    if group.first(is_finished(options, run)):
        _clean(options, run, group)
        adapter = (folder / ADAPTER).exists()
        result = f"give --adapter {quoted(folder)}" if adapter else "name the folder as the checkpoint"
        upload = f" To upload it: {program()} push {quoted(folder)} {options.push}." if options.push else ""
        raise InputError(
            f"--resume {folder}: that run is finished. To train its result further, {result}, and another --out."
            f"{upload}"
        )
    store = open_store(options, screen, run)
    try:
        here = [*_own(folder, store, group.host), *_others(folder, group.host, run)]
        common = last_common(group, here, begun, folder)
        own = common.by_host.get(group.host) if common else None
        if store is not None and own is None:  # of a moment that not all had
            store.remove()
            store = None
        if common is None:
            return Start()
        snapshot = None
        if store is not None and own is not None:
            snapshot = check_snapshot(options, store.go_back(own.snapshot.sequence))
        if common.key.hosts == group.hosts:
            return Start(store, snapshot)
        return Start(store, _common(options, group, snapshot, common.key.step), common)
    except BaseException:
        if store is not None:
            store.close()
        raise


def _common(options: Options, group: Alone, snapshot: Snapshot | None, step: int) -> Snapshot:
    """This host's snapshot; if it has none, another host's, with a new log. Raises InputError."""
    said = [json.loads(text) for text in group.texts(json.dumps(snapshot))]
    if snapshot is not None:
        return snapshot
    first = check_snapshot(options, next(filter(None, said)))
    return {**first, "written": 0, "log": [step, first["log"][1], 0, 0]}


def run_folder(out: Path, host: int) -> Path:
    """The folder of host 0."""
    return out.parent if host else out


def _own(run: Path, store: Store | None, host: int) -> list[HostSnapshot]:
    """The snapshots in this host's store. Raises InputError if it is another host's."""
    found = [HostSnapshot(host, store.paths, snapshot) for snapshot in store.snapshots] if store is not None else []
    for each in found:
        if each.number != host:
            raise InputError(f"--resume {run}: that state is host {each.number}'s, and this is host {host}.")
    return found


def _others(folder: Path, host: int, run: str) -> list[HostSnapshot]:
    """Snapshots of other hosts whose folders can be reached."""
    there = {0: folder} | hosts_in(folder)
    places = {k: place for k, place in there.items() if k != host and run_of(place) == run}
    return [each for k, place in places.items() for each in readable(k, stores_of(place), run)]


def hosts_in(folder: Path) -> dict[int, Path]:
    """The folders of hosts other than the first."""
    return {int(p.name[5:]): p for p in folder.glob("host-*") if re.fullmatch(r"host-[1-9]\d{0,3}", p.name)}


def remove_given_up(out: Path, hosts: int, progress: Progress = silent) -> None:
    """Removes what hosts beyond the first `hosts` have stored: the run does not need it any more."""
    run = run_of(out)
    for place in (place for host, place in hosts_in(out).items() if host >= hosts):
        _give_up(place, run, progress)


def _give_up(place: Path, run: str, progress: Progress = silent) -> None:
    """As remove_host, if the folder is one of this run or has no run."""
    with suppress(OSError):
        held = {path.name for path in place.iterdir()}
        killed_early = "config.yaml" not in held and held <= {*OURS, "store"}
        if killed_early or (run and run_of(place) == run and not any(place.glob("*.safetensors"))):
            remove_host(place, run, progress)


def remove_host(place: Path, run: str, progress: Progress) -> None:
    """Removes all that a host of this run has stored."""
    with suppress(InputError, StoreError):
        named = stores_of(place)
        folders.discard(own_stores(named, run), progress)
        folders.remove_finished(named, run)  # what a kill has left of it
        remove_folders(named)
    shutil.rmtree(place, ignore_errors=True)


def check_continues(job: Job, snapshot: Snapshot) -> None:
    """Raises InputError if the job has other data, or fewer steps than the run has done."""
    if snapshot["data"] != job.data.fingerprint:
        now, was = saved_options(job.options), snapshot["options"]
        other = [flag_of(name) for name in OF_DATA if name in was and now[name] != was[name]]
        way = f"Leave out {', '.join(other)}, as the run began" if other else "Restore it"
        if job.data.left_out:
            way += ", or, if an older version started the run, start anew: it kept rows in which nothing is trained"
        raise InputError(f"--resume {job.out}: the data is not what the run was started with. {way}.")
    if job.total_steps < snapshot["step"]:
        raise InputError(
            f"--resume {job.out}: the run is at step {snapshot['step']:,}, and {job.total_steps:,} were given. "
            "Give more: --max-steps or --epochs."
        )

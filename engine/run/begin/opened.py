"""What a run goes on with: its store and the last snapshot that all of its hosts have."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trireme.engine.hosts.group import Alone, told
from trireme.engine.hosts.held import Held, Whole, held_in, last_whole
from trireme.engine.run.begin.job import Job
from trireme.engine.run.begin.kept import is_same_run, stores_of
from trireme.engine.run.begin.pinned import check_snapshot
from trireme.engine.run.options import Options, store_folders
from trireme.engine.run.screen import Screen
from trireme.engine.run.verify import has_begun, tidy
from trireme.models.config import InputError
from trireme.storage.files import NoSnapshot, StoreError, remove_folders
from trireme.storage.folders import FINISHED, IDENTITY, remove_finished
from trireme.storage.store import Store

TRIAL = 256 << 20  # bytes written to measure a drive, at most

Snapshot = dict[str, Any]  # pinned.SNAPSHOT


def new_store(job: Job, screen: Screen) -> Store:
    """Its drives are measured where steps use them. Raises StoreError."""
    trial = min(TRIAL, 4 * job.parameters) * job.plan.uses("ssd")
    return Store.create(job.store_dirs, job.options.keep, job.source.companions, trial, screen.warn)


def open_snapshot(options: Options, screen: Screen) -> tuple[Store | None, Snapshot | None]:
    """The store and last snapshot; (None, None) before the first.

    Raises StoreError, and InputError where the run is finished or its store missing.
    """
    out = Path(options.out)
    dirs = store_folders(options.store, out)
    finished = any((d / FINISHED).exists() for d in dirs)
    lost = [d for d in dirs if not (d / IDENTITY).exists()]
    ours = not options.store or all(d.is_dir() for d in dirs)  # else a drive may not be mounted
    exported = any(out.glob("*.safetensors"))
    if (finished and (exported or has_begun(out))) or (lost and ours and exported):
        remove_finished(dirs)
        tidy(out)
        raise InputError(
            f"--resume {out}: that run is finished. To train its result further, name the folder as the checkpoint, "
            "and another --out."
        )
    if lost and has_begun(out):
        raise InputError(f"--resume {out}: the run's store is not in {lost[0]}. Is its drive mounted?")
    try:
        store = Store.open(dirs, options.keep, trial=0, say=screen.warn)
    except NoSnapshot:
        screen.say("no snapshot yet: starts from the beginning")
        return None, None
    return store, store.restore()


class Begun(NamedTuple):
    """What a run goes on with."""

    store: Store | None = None
    snapshot: Snapshot | None = None
    whole: Whole | None = None  # of another number of hosts, to be dealt anew


def open_run(options: Options, screen: Screen, group: Alone) -> Begun:
    """The last snapshot that all of the run's hosts have, newer ones dropped; nothing where one has none.

    Raises as open_snapshot, and InputError where a host's store is not in sight.
    """
    begun, run = (Path(options.out) / "config.yaml").is_file(), run_folder(Path(options.out), group.host)
    store, _ = open_snapshot(options, screen)
    try:
        whole = last_whole(group, [*_own(run, store, group.host), *_others(run, group.host)], begun, run)
    except BaseException:
        if store is not None:
            store.close()
        raise
    own = whole.mine.get(group.host) if whole else None
    if store is not None and own is None:  # of a moment that not all had
        store.remove()
        store = None
    if whole is None:
        return Begun()
    snapshot = store.go_back(own.snapshot.sequence) if store is not None and own is not None else None
    if whole.key.hosts == group.hosts:
        return Begun(store, snapshot)
    return Begun(store, _common(options, group, snapshot, whole.key.step), whole)


def _common(options: Options, group: Alone, snapshot: Snapshot | None, step: int) -> Snapshot:
    """This host's snapshot, else another's with a log that is to begin. Raises InputError."""
    said = [told(text, {"snapshot": {dict, type(None)}}, host)["snapshot"]
            for host, text in enumerate(group.texts(json.dumps({"snapshot": snapshot})))]  # fmt: skip
    if snapshot is not None:
        return snapshot
    first = next(filter(None, said))
    check_snapshot(options, first)
    return {**first, "written": 0, "log": [step, first["log"][1], 0, 0]}


def run_folder(out: Path, host: int) -> Path:
    """Host 0's."""
    return out.parent if host else out


def _own(run: Path, store: Store | None, host: int) -> list[Held]:
    """Raises InputError where the store is another host's."""
    found = [Held(host, store.paths, snapshot) for snapshot in store.snapshots] if store is not None else []
    for each in found:
        if each.of != host:
            raise InputError(f"--resume {run}: that state is host {each.of}'s, and this is host {host}.")
    return found


def _others(run: Path, host: int) -> list[Held]:
    """Snapshots of other hosts with folders in sight."""
    there = {0: run} | hosts_in(run)
    places = {k: place for k, place in there.items() if k != host and (place / "config.yaml").is_file()}
    return [each for k, place in places.items() for each in held_in(k, stores_of(place))]


def hosts_in(run: Path) -> dict[int, Path]:
    """The folders of other hosts than the first."""
    return {int(p.name[5:]): p for p in run.glob("host-*") if re.fullmatch(r"host-[1-9]\d{0,3}", p.name)}


def remove_given_up(out: Path, hosts: int) -> None:
    """Removes what more than `hosts` had begun to keep, and gave up: no run needs it."""
    for place in (place for host, place in hosts_in(out).items() if host >= hosts):
        with suppress(InputError, OSError):
            if not {path.name for path in place.iterdir()} - {"tokens"}:  # killed early
                shutil.rmtree(place)
            elif is_same_run(out, place) and not any(place.glob("*.safetensors")):
                remove_host(place)


def remove_host(place: Path) -> None:
    """Removes all that a host has kept."""
    dirs = stores_of(place)
    with suppress(StoreError):
        Store.open(dirs, trial=0).remove()
    remove_folders(dirs)
    shutil.rmtree(place, ignore_errors=True)


def check_continues(job: Job, snapshot: Snapshot) -> None:
    """Raises InputError where the job has other data or fewer steps."""
    if snapshot["data"] != job.data.fingerprint:
        seed = snapshot["options"].get("seed")
        way = f"Leave out --seed {job.options.seed}" if seed not in (None, job.options.seed) else "Restore it"
        if job.data.left_out:
            way += ", or, if an older version started the run, start anew: it kept rows in which nothing is trained"
        raise InputError(f"--resume {job.out}: the data is not what the run was started with. {way}.")
    if job.total_steps < snapshot["step"]:
        raise InputError(
            f"--resume {job.out}: the run is at step {snapshot['step']}, and {job.total_steps} are asked for. "
            "Ask for more: --max-steps or --epochs."
        )

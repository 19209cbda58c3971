"""A run from its options to its end: started or resumed, planned, loaded, trained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import date
from pathlib import Path

from trireme.engine.check.tuned import in_use
from trireme.engine.hosts.group import Alone, refuse_text
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.clock import Clock
from trireme.engine.planner.host import computed_by
from trireme.engine.planner.whole import AGAIN
from trireme.engine.run.begin.alternatives import instead
from trireme.engine.run.begin.resume import Begun, Snapshot, check_continues, new_store, open_run
from trireme.engine.run.begin.snapshot import check_snapshot, is_date
from trireme.engine.run.begin.teacher import about_teacher, with_teacher
from trireme.engine.run.command import checked, program
from trireme.engine.run.config.config_file import changes, config_yaml, to_agree
from trireme.engine.run.hub.fetch import fetched
from trireme.engine.run.hub.push import check_push, push
from trireme.engine.run.job import Job, check_room, prepare
from trireme.engine.run.live import Live
from trireme.engine.run.loop import Interrupted, Run
from trireme.engine.run.options import Options
from trireme.engine.run.output.exports import BEST, Best, settle
from trireme.engine.run.output.folder import (
    check_checkpoint,
    check_free,
    common_id,
    new_run,
    refuse_links,
    signed,
    taken,
)
from trireme.engine.run.output.log import Tracker, trackers
from trireme.engine.run.report import dry_line, estimate, report
from trireme.engine.run.screen import Screen
from trireme.engine.run.signals import stop_signals
from trireme.models.config import InputError
from trireme.storage.files import remove_folders, replace_synced
from trireme.storage.untrusted import shown


def finetune(
    options: Options,
    screen: Screen | None = None,
    clock: Clock | None = None,
    group: Alone | None = None,
    told: Sequence[Tracker] = (),
) -> Live | None:
    """Returns the run, its engine closed; None of a dry run. `clock`: that of the command; `group`: the hosts; `told`:
    trackers besides those of --log.

    Raises InputError, CheckpointError, DoesNotFit, StoreError, LostHost, Interrupted.
    """
    screen, clock, group, options = screen or Screen(), clock or Clock(), group or Alone(), checked(options)
    options = fetched(options, screen)
    check_checkpoint(options.model)
    if not group.host:
        check_push(options)
    live = _finetune(options, screen, clock, group, told)
    if options.push and live and not group.host:
        try:
            push(live.job.out, options.push, screen)
        except (InputError, OSError) as error:
            again = f"{program()} push {live.job.out} {options.push}"
            raise InputError(f"{str(error).rstrip('.')}. The run is done; to upload it: {again}") from None
    return live


def _finetune(options: Options, screen: Screen, clock: Clock, group: Alone, told: Sequence[Tracker]) -> Live | None:
    group.agree("options", to_agree(options), "Start all with the same command")
    id = common_id(Path(options.out), bool(options.resume), group)
    if options.resume:
        busy = f"--resume {options.out}: another process is at that run. Wait for its end."
        with taken(Path(options.out), busy) as made:
            try:
                return _resume(options, screen, clock, group, id, told)
            finally:
                remove_folders(made)
    if options.dry_run:
        _prepared(options, screen, clock, group)
        _warn_of_folder(options, screen)
        return None
    if group.host:
        group.meet()  # host 0's folder may hold the others': it has to be free first
    with new_run(options, Interrupted, id) as run, trackers(options, screen) as asked:
        if not group.host:
            group.meet()
        job = _prepared(options, screen, clock, group)
        _keep_options(job, id)
        with clock.at("load"):
            run.store = new_store(job, screen, id)
        return _train(job, Begun(run.store), screen, clock, [*told, *asked], group)


def _warn_of_folder(options: Options, screen: Screen) -> None:
    """A dry run writes nothing; the run will."""
    try:
        check_free(options)
    except InputError as error:
        screen.warn(f"the run itself would be refused: {error}")


def _resume(
    options: Options, screen: Screen, clock: Clock, group: Alone, id: str, told: Sequence[Tracker]
) -> Live | None:
    """`id`: of the run."""
    refuse_links(Path(options.out))
    with clock.at("headers"):
        begun = open_run(options, screen, group, id)
    store, snapshot = begun.store, begun.snapshot
    try:
        if snapshot:
            check_snapshot(options, snapshot)
        if options.dry_run:
            _prepared(options, screen, clock, group, snapshot)
            return None
        with trackers(options, screen) as asked:
            job = _prepared(options, screen, clock, group, snapshot)
            if snapshot:
                _say_computed_by(snapshot, computed_by(job.device), screen)
            _keep_options(job, id)
            store = store or new_store(job, screen, id)
            return _train(job, begun._replace(store=store), screen, clock, [*told, *asked], group)
    finally:
        if store is not None:
            store.close()


def _keep_options(job: Job, id: str) -> None:
    """config.yaml has all that is in force: changed ones, and those that were chosen."""
    replace_synced(job.out / "config.yaml", signed(id, config_yaml(job.options)))


def _say_computed_by(snapshot: Snapshot, now: str, screen: Screen) -> None:
    """Says so where libraries or GPU are not those of the snapshot."""
    before = snapshot.get("computed_by") or now
    if before != now:
        screen.say(f"changed  {now}, was {shown(before, 200)} at step {snapshot['step']:,}: it may round differently")


def _prepared(options: Options, screen: Screen, clock: Clock, group: Alone, snapshot: Snapshot | None = None) -> Job:
    try:
        return _fitting(options, screen, clock, group, snapshot)
    except DoesNotFit as error:
        out = instead(options)
        raise DoesNotFit(f"{error} {out}" if out else str(error), error.need) from None


def _fitting(options: Options, screen: Screen, clock: Clock, group: Alone, snapshot: Snapshot | None) -> Job:
    begun = time.monotonic()
    far = lambda name, position, size: screen.far(f"reading {name}", position, size, begun)
    try:
        today = date.today().isoformat()
        day = snapshot.get("date") if snapshot else group.texts(today)[0]
        if day and not is_date(day):
            refuse_text(0, f": today is {shown(day)!r}")
        launches = snapshot.get("launches", {}) if snapshot else None
        job = prepare(options, snapshot and snapshot["cut"], far, screen.warn, clock, group, day, launches)
    finally:
        screen.clear()
    if job.read:
        group.agree("data", {"--data": job.data.fingerprint}, "Copy host 0's")
    group.agree("checkpoints", job.pinned.model, "Copy host 0's")
    if snapshot:
        for line in changes(job.options, snapshot["options"]):
            screen.say(f"changed  {line} at step {snapshot['step']:,}")
        check_continues(job, snapshot)
    with clock.at("plan"):
        lines = report(job)
    for line in lines:
        screen.say(line)
    if not (snapshot or options.assume):
        check_room(job)
    for line in about_teacher(job, screen):
        screen.say(line)
    if options.dry_run:
        screen.say(dry_line(job))
    return job


def _train(job: Job, begun: Begun, screen: Screen, clock: Clock, told: Sequence[Tracker], group: Alone) -> Live:
    with clock.at("reference"):
        job = with_teacher(job, begun.snapshot, screen)
    screen.forgive()
    live = Live(job, begun, screen, clock, told, group)
    _settle_exports(live)
    if job.device.type == "cuda":
        with clock.at("plan"):
            left = estimate(job, live.progress.step)
        live.estimated = clock.with_spent(left | {"plan": AGAIN * clock.spent["plan"]})
    with ExitStack() as stack:
        stack.enter_context(in_use(job.launches))
        stack.callback(live.close_log)
        stack.enter_context(closing(live))
        stack.enter_context(_telling(group))
        _load(live)
        Run(live).go()
    return live


def _settle_exports(live: Live) -> None:
    """The best of the snapshot's moment."""
    out, done = live.job.out, live.progress
    best = Best(done.best_step, done.best) if done.best_step and done.best is not None else None
    nbytes = sum(path.stat().st_size for path in out.glob(f"{BEST}*/*.safetensors"))
    with live.screen.working("checking the best", nbytes) as more:
        there = settle(out, best, more)
    if best and not there and not live.group.host:
        live.screen.warn(
            f"{out / BEST} is not as the best of the snapshot was written, eval_loss {best.eval_loss:.4f} at step "
            f"{best.step}: those weights are lost"
        )


@contextmanager
def _telling(group: Alone) -> Iterator[None]:
    """Tells the other hosts of an exception before it unwinds what waits for them."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        group.failed(error)
        raise


def _load(live: Live) -> None:
    """A signal acts between two pieces, with no drive request in flight."""
    asked: list[int] = []

    def ask(number: int) -> None:
        asked.append(number)
        live.screen.urgent("\n  leaving; again: leave at once")

    with stop_signals(ask, lambda: live.screen.urgent("\nleft at once")):
        live.load(asked)
    if asked:
        raise KeyboardInterrupt
    if live.resumed:
        live.screen.say(f"resumed at step {live.progress.step}")

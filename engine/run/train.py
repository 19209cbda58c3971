"""A run from its options to its end.

The run's folder is locked (output/folder.py), or its snapshot is opened (begin/resume.py). The options become a job
(job.py: model, data, machine and plan), the job an engine with weights (live.py, engine.py), and loop.py trains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import date
from pathlib import Path

from trireme.engine.check.tuned import in_use
from trireme.engine.hosts.group import Alone
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.clock import Clock
from trireme.engine.planner.host import computed_by
from trireme.engine.planner.whole import AGAIN
from trireme.engine.run.begin.alternatives import alternatives
from trireme.engine.run.begin.resume import Snapshot, Start, check_continues, new_store, open_run
from trireme.engine.run.begin.teacher import about_teacher, with_teacher
from trireme.engine.run.command import checked, program
from trireme.engine.run.config.config_file import changes, config_yaml, to_agree
from trireme.engine.run.hub.fetch import fetched
from trireme.engine.run.hub.push import check_push, push
from trireme.engine.run.job import Job, check_room, prepare
from trireme.engine.run.live import Live
from trireme.engine.run.loop import Interrupted, Run
from trireme.engine.run.options import Options
from trireme.engine.run.output.exports import BEST, Best, restore_best
from trireme.engine.run.output.folder import (
    check_checkpoint,
    check_free,
    common_id,
    locked,
    new_run,
    refuse_links,
    signed,
)
from trireme.engine.run.output.log import Tracker, open_trackers
from trireme.engine.run.report import dry_line, estimate, report
from trireme.engine.run.screen import Screen
from trireme.engine.run.signals import if_again, stop_signals
from trireme.models.config import InputError
from trireme.storage.files import replace_synced
from trireme.storage.untrusted import quoted, shown


def finetune(
    options: Options,
    screen: Screen | None = None,
    clock: Clock | None = None,
    group: Alone | None = None,
    trackers: Sequence[Tracker] = (),
) -> Live | None:
    """Trains. Returns the run, whose engine is closed; None for a dry run.

    `clock`: of the command. `group`: the hosts. `trackers`: in addition to those of --log. Raises InputError,
    CheckpointError, DoesNotFit, StoreError, LostHost, Interrupted.
    """
    screen, clock, group, options = screen or Screen(), clock or Clock(), group or Alone(), checked(options)
    options = fetched(options, screen)
    check_checkpoint(options.model)
    if not group.host:
        check_push(options)
    group.agree("options", to_agree(options), "Start all with the same command")
    id = common_id(Path(options.out), bool(options.resume), group)
    if options.resume:
        live = _resume(options, screen, clock, group, id, trackers)
    elif options.dry_run:
        _prepare(options, screen, clock, group)
        _warn_of_folder(options, screen)
        live = None
    else:
        live = _start(options, screen, clock, group, id, trackers)
    if options.push and live and not group.host:
        again = f"The run is done; to upload it: {program()} push {quoted(live.job.out)} {options.push}"
        try:
            push(live.job.out, options.push, screen)
        except (InputError, OSError) as error:
            raise InputError(f"{str(error).rstrip('.')}. {again}") from None
        except KeyboardInterrupt:
            screen.urgent(f"interrupted. {again}")
            raise Interrupted from None
    return live


def _warn_of_folder(options: Options, screen: Screen) -> None:
    """Warns in a dry run if the folder could not be used."""
    try:
        check_free(options)
    except InputError as error:
        screen.warn(f"the run itself would be refused: {error}")


def _start(
    options: Options, screen: Screen, clock: Clock, group: Alone, id: str, trackers: Sequence[Tracker]
) -> Live | None:
    """A new run. `id`: its id."""
    if group.host:
        group.meet()  # host 0's folder may hold the others': it has to be free first
    with new_run(options, Interrupted, id) as run, open_trackers(options, screen) as more:
        if not group.host:
            group.meet()
        job = _prepare(options, screen, clock, group)
        _write_options(job, id)
        with clock.at("load"):
            run.store = new_store(job, screen, id)
        return _train(job, Start(run.store), screen, clock, [*trackers, *more], group)


def _resume(
    options: Options, screen: Screen, clock: Clock, group: Alone, id: str, trackers: Sequence[Tracker]
) -> Live | None:
    """Continues a run from its last snapshot. `id`: its id."""
    busy = f"--resume {options.out}: another process is at that run. Wait for its end."
    with ExitStack() as stack:
        stack.enter_context(locked(Path(options.out), busy))
        refuse_links(Path(options.out))
        with clock.at("headers"):
            start = open_run(options, screen, group, id)
        if start.store is not None:
            stack.callback(start.store.close)
        if options.dry_run:
            _prepare(options, screen, clock, group, start.snapshot)
            return None
        with open_trackers(options, screen) as more:
            job = _prepare(options, screen, clock, group, start.snapshot)
            if start.snapshot:
                _say_computed_by(start.snapshot, computed_by(job.device), screen)
            _write_options(job, id)
            if start.store is None:
                store = new_store(job, screen, id)
                stack.callback(store.close)
                start = start._replace(store=store)
            return _train(job, start, screen, clock, [*trackers, *more], group)


def _write_options(job: Job, id: str) -> None:
    """Writes config.yaml with all options in force, also changed and chosen ones."""
    replace_synced(job.out / "config.yaml", signed(id, config_yaml(job.options)))


def _say_computed_by(snapshot: Snapshot, now: str, screen: Screen) -> None:
    """Prints a line if libraries or GPU are not those of the snapshot."""
    before = snapshot["computed_by"] or now
    if before != now:
        screen.say(f"changed  {now}, was {shown(before, 200)} at step {snapshot['step']:,}: it may round differently")


def _prepare(options: Options, screen: Screen, clock: Clock, group: Alone, snapshot: Snapshot | None = None) -> Job:
    """Makes the job, on which all hosts agree, and prints its report. If it does not fit, the error offers what
    would.
    """
    try:
        job = _job(options, screen, clock, group, snapshot)
        if snapshot:
            for line in changes(job.options, snapshot["options"]):
                screen.say(f"changed  {line} at step {snapshot['step']:,}")
            check_continues(job, snapshot)
        with clock.at("plan"):
            for line in report(job):
                screen.say(line)
        if not (snapshot or options.assume):
            check_room(job)
        for line in about_teacher(job, screen):
            screen.say(line)
        if options.dry_run:
            screen.say(dry_line(job))
        return job
    except DoesNotFit as error:
        others = alternatives(options)
        raise DoesNotFit(f"{error} {others}" if others else str(error), error.need) from None


def _job(options: Options, screen: Screen, clock: Clock, group: Alone, snapshot: Snapshot | None) -> Job:
    began = time.monotonic()
    far = lambda name, position, size: screen.far(f"reading {name}", position, size, began)
    try:
        today = date.today().isoformat()
        day = snapshot["date"] if snapshot else group.texts(today)[0]
        launches = snapshot["launches"] if snapshot else None
        job = prepare(options, snapshot and snapshot["cut"], far, screen.warn, clock, group, day, launches)
    finally:
        screen.clear()
    if job.read:
        held = job.data.held_out
        group.agree("data", {"--data": job.data.fingerprint, "--val": held and held.fingerprint}, "Copy host 0's")
    group.agree("checkpoints", job.pinned.model, "Copy host 0's")
    return job


def _train(job: Job, start: Start, screen: Screen, clock: Clock, trackers: Sequence[Tracker], group: Alone) -> Live:
    with clock.at("reference"):
        job = with_teacher(job, start.snapshot, screen)
    screen.forgive()
    live = Live(job, start, screen, clock, trackers, group)
    lost = _restore_best(live)
    if job.device.type == "cuda":
        with clock.at("plan"):
            left = estimate(job, live.progress.step)
        live.estimated = clock.with_spent(left | {"plan": AGAIN * clock.spent["plan"]})
    with ExitStack() as stack:
        stack.enter_context(in_use(job.launches))
        stack.callback(live.close_log)
        stack.enter_context(closing(live))
        stack.enter_context(_failure_told(group))
        _load(live)
        if lost:
            live.keep_best()  # the snapshot's own weights
        Run(live).go()
    return live


def _restore_best(live: Live) -> bool:
    """Restores the best weights of the snapshot's moment. Returns whether they have to be written again from the
    snapshot.
    """
    out, done = live.job.out, live.progress
    best = Best(done.best_step, done.best) if done.best_step and done.best is not None else None
    nbytes = sum(path.stat().st_size for path in out.glob(f"{BEST}*/*.safetensors"))
    with live.screen.working("checking the best", nbytes) as more:
        there = restore_best(out, best, more)
    again = best is not None and not there and best.step == done.step and live.group.hosts == 1
    if best and not there and not live.group.host:
        how = "it is written again from the snapshot" if again else "those weights are lost"
        live.screen.warn(
            f"{out / BEST} is not as the best of the snapshot was written, eval_loss {best.eval_loss:.4f} at step "
            f"{best.step:,}: {how}"
        )
    return again


@contextmanager
def _failure_told(group: Alone) -> Iterator[None]:
    """Tells the other hosts of an exception, before cleanup that waits for them."""
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        group.failed(error)
        raise


def _load(live: Live) -> None:
    """Loads the engine. A signal takes effect between two pieces, when no request to a drive is in flight."""
    asked: list[int] = []

    def ask(number: int) -> None:
        asked.append(number)
        live.screen.urgent(f"\n  leaving{if_again(number)}")

    with stop_signals(ask, lambda: live.screen.urgent("\nexited immediately")):
        live.load(asked)
    if asked:
        raise KeyboardInterrupt
    if live.resumed:
        live.screen.say(f"resumed at step {live.progress.step:,}")

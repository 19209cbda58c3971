"""Training: the loop around the step, evaluations, a change of plan, the finished checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from trireme.engine.amounts import count, duration
from trireme.engine.exchange import bring_back
from trireme.engine.lanes import READS, Span, write_perfetto
from trireme.engine.optimizer import StepStats
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.clock import DIFFERENT, Clock, Watch
from trireme.engine.planner.correct import at_work, batch_of, corrected, until_its_end
from trireme.engine.planner.host import memory_in_use
from trireme.engine.planner.lines import ready_line, took_line
from trireme.engine.planner.predict import Prediction, predict
from trireme.engine.planner.whole import note_compilation
from trireme.engine.run.command import changes, checked, config_yaml, program
from trireme.engine.run.evaluation import Evaluation, epoch, load_record
from trireme.engine.run.job import Job, check_room, prepare
from trireme.engine.run.live import Live, Snapshot, check_continues, new_store, open_snapshot, reopen_adapter
from trireme.engine.run.log import Tracker, trackers
from trireme.engine.run.options import Options
from trireme.engine.run.otherwise import adapters_instead, better
from trireme.engine.run.records import Record
from trireme.engine.run.report import dry_line, promise, report
from trireme.engine.run.screen import Screen
from trireme.engine.run.settle import check_snapshot
from trireme.engine.run.signals import Stop, stop_signals
from trireme.engine.run.verify import check_checkpoint, check_free, new_run, reopen, taken, tidy
from trireme.engine.schedule import learning_rate
from trireme.engine.step import Inputs, train_step
from trireme.models import costs
from trireme.models.config import InputError
from trireme.models.rows import make_load
from trireme.storage.files import replace_synced
from trireme.storage.store import Store

BOUND_EVERY = 50  # steps between timings of lanes


class Interrupted(Exception):
    """Asked to stop, and saved."""


class Diverged(InputError):
    """Loss or gradient norm is not finite."""


def finetune(options: Options, screen: Screen | None = None, clock: Clock | None = None) -> Live | None:
    """Returns the run, its engine closed; None of a dry run. `clock`: that of the command.

    Raises InputError, CheckpointError, DoesNotFit, StoreError, Interrupted.
    """
    screen, clock, options = screen or Screen(), clock or Clock(), checked(options)
    check_checkpoint(options.model)
    if options.resume:
        with taken(Path(options.out), f"--resume {options.out}: another process is at that run. Wait for its end."):
            return _resume(options, screen, clock)
    if options.dry_run:
        _prepared(options, screen, clock)
        _warn_of_folder(options, screen)
        return None
    with new_run(options, Interrupted) as run, trackers(options, screen) as told:
        job = _prepared(options, screen, clock)
        with clock.at("load"):
            run.store = new_store(job, screen)
        return _train(job, run.store, None, screen, clock, told)


def _warn_of_folder(options: Options, screen: Screen) -> None:
    """A dry run writes nothing; the run will."""
    try:
        check_free(options)
    except InputError as error:
        screen.warn(f"the run itself would be refused: {error}")


def _resume(options: Options, screen: Screen, clock: Clock) -> Live | None:
    with clock.at("headers"):
        store, snapshot = open_snapshot(options, screen)
    try:
        if snapshot:
            check_snapshot(options, snapshot)
            for line in changes(options, snapshot["options"]):
                screen.say(f"changed  {line} at step {snapshot['step']:,}")
        if options.dry_run:
            _prepared(options, screen, clock, snapshot)
            return None
        with trackers(options, screen) as told:
            job = _prepared(options, screen, clock, snapshot)
            replace_synced(job.out / "config.yaml", config_yaml(options))  # keeps changed options
            store = store or new_store(job, screen)
            return _train(job, store, snapshot, screen, clock, told)
    finally:
        if store is not None:
            store.close()


def _prepared(options: Options, screen: Screen, clock: Clock, snapshot: Snapshot | None = None) -> Job:
    try:
        return _fitting(options, screen, clock, snapshot)
    except DoesNotFit as error:
        out = adapters_instead(options)
        raise DoesNotFit(f"{error} {out}" if out else str(error), error.need) from None


def _fitting(options: Options, screen: Screen, clock: Clock, snapshot: Snapshot | None) -> Job:
    begun = time.monotonic()
    far = lambda name, position, size: screen.far(f"reading {name}", position, size, begun)
    try:
        job = prepare(options, snapshot and snapshot["cut"], far, screen.warn, clock)
    finally:
        screen.clear()
    with clock.at("plan"):
        lines = report(job)
    for line in lines:
        screen.say(line)
    if snapshot:
        check_continues(job, snapshot)
    elif not options.assume:
        check_room(job)
    if options.dry_run:
        screen.say(dry_line(job))
    return job


def _train(
    job: Job, store: Store, snapshot: Snapshot | None, screen: Screen, clock: Clock, told: Sequence[Tracker]
) -> Live:
    screen.forgive()
    bring_back(job.out / "best")
    live = Live(job, store, snapshot, screen, clock, told)
    if job.device.type == "cuda":
        live.promised = clock.with_spent(promise(job, live.progress.step))
    with closing(live.log), closing(live):
        _load(live)
        Run(live).go()
    return live


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


class Run:
    """The loop."""

    def __init__(self, live: Live):
        self.live = live
        self.stop = Stop(live.job.total_steps, live.screen, live.last_snapshot)
        self.evaluation = Evaluation(live, self.stop)
        self.first = live.progress.step  # this process's first step
        self.stop.begins(self.first)
        self.saved = self.exported = time.monotonic()
        gpus = live.job.plan.gpus if live.job.device.type == "cuda" else 1
        self.peak = gpus * live.job.machine.rates.matmul  # FLOPs a second, for mfu
        self.bound: str | None = None  # busiest lane of the last traced step
        self.moved = live.lanes.moved.copy()  # bytes by lane at the last step's end
        self.first_s = 0.0  # seconds of the first step
        self.watch: Watch | None = None  # after the second step
        self.differs = False  # steps, for minutes

    def go(self) -> None:
        """Raises Interrupted, Diverged, StoreError."""
        live, done = self.live, self.live.progress
        with stop_signals(self.stop.ask, self.stop.insist):
            self.evaluation.run_if_due()
            self.stop.begins(done.step + 1)
            while done.step < self.stop.last and not self.evaluation.is_enough:
                self._step()
                self.stop.begins(done.step + 1)
            if self.stop.leaving:
                live.save()
                out = live.job.out
                live.screen.say(f"{self.stop.how} saved {out} at step {done.step}. Resume: {program()} --resume {out}")
                raise Interrupted
            self._finish()

    def _step(self) -> None:
        live, job, o = self.live, self.live.job, self.live.job.options
        done, total = live.progress, job.total_steps
        began = time.perf_counter()
        warm = done.step == self.first + 1
        live.lanes.tracing = o.trace or warm or self.differs or done.step % BOUND_EVERY == 0
        rate = learning_rate(done.step + 1, total, job.lr, o.schedule, o.warmup_steps(total))
        with live.clock.at("steps"), live.watched(f"step {done.step + 1}"):
            batch = job.data.step(done.step, o.batch_size, job.micro_rows)
            load = make_load(job.cfg, sum(len(mb.ids) for mb in batch), o.router_aux, job.device)
            micro = [self.evaluation.inputs(mb, load) for mb in batch]
            stats = train_step(live.engine, micro, done.step + 1, rate)
        if not np.isfinite([stats.loss, stats.grad_norm]).all():
            self._diverged(stats)
        done.step += 1
        seconds = time.perf_counter() - began
        spans = self._trace() if live.lanes.tracing else []
        live.log.step(self._record(stats, rate, micro, seconds) | (load_record(load) if load else {}))
        self._compare(spans, micro, seconds)
        self.evaluation.run_if_due()  # before a snapshot, which records the best so far
        if o.export_every.due(done.step, total, time.monotonic() - self.exported):
            live.settle()
            live.export(job.out / f"step-{done.step}")
            self.exported = time.monotonic()
        if o.save_every.due(done.step, total, time.monotonic() - self.saved):
            live.save()
            self.saved = time.monotonic()

    def _record(self, stats: StepStats, rate: float, micro: Sequence[Inputs], seconds: float) -> Record:
        live, job = self.live, self.live.job
        tokens, trained = sum(mb.tokens for mb in micro), sum(mb.trained for mb in micro)
        flops = sum(costs.model_flops(job.cfg, mb.tokens, mb.pairs) for mb in micro)
        gpu, ram = memory_in_use(job.device, job.limits.gpus)
        read = sum(live.lanes.moved[lane] - self.moved[lane] for lane in READS)
        self.moved = live.lanes.moved.copy()
        record = {
            "step": live.progress.step,
            "epoch": epoch(live),
            "loss": stats.loss,
            "learning_rate": rate,
            "grad_norm": stats.grad_norm,
            "tokens_per_second": round(tokens / seconds, 1),
            "trained_tokens_per_second": round(trained / seconds, 1),
            "mfu": round(flops / seconds / self.peak, 4),
            "step_time_s": round(seconds, 4),
            "wall_time": round(time.time(), 3),
            "ram_gib": round(ram, 3),
            "ssd_read_gbs": round(read / seconds / 1e9, 3),
            "ssd_written_tb": round(live.written / 1e12, 6),
            "bound": self.bound,
        }
        return record | ({"gpu_mem_gib": round(gpu, 3)} if job.device.type == "cuda" else {})

    def _diverged(self, stats: StepStats) -> None:
        """Drops the gradients. Only a snapshot undoes updates made under backward."""
        self.live.engine.gradients.discard()
        raise Diverged(
            f"step {self.live.progress.step + 1}: loss {stats.loss:g}, gradient norm {stats.grad_norm:g}. Nothing of "
            f"this step was saved. {self.live.last_snapshot()}. Lower --lr, or look at the data of this step."
        )

    def _trace(self) -> list[Span]:
        """The last step's tasks; notes the busiest lane."""
        live = self.live
        with live.watched(f"step {live.progress.step}"):
            live.lanes.drain()
        spans = live.lanes.trace()
        found = at_work(until_its_end(spans))
        self.bound = max(found, key=lambda lane: found[lane])
        if live.job.options.trace:
            write_perfetto(live.job.out / "trace.json", spans)
            live.screen.say("lanes    " + ", ".join(f"{lane} {seconds:.3f} s" for lane, seconds in found.items()))
        return spans

    def _compare(self, spans: Sequence[Span], micro: Sequence[Inputs], seconds: float) -> None:
        """Tells the promise again after the second step, and after steps that differed for minutes."""
        usual = seconds * self.live.job.work.tokens / sum(mb.tokens for mb in micro)  # steps differ in size
        if self.live.progress.step == self.first + 1:
            self.first_s = seconds
        elif self.watch is None:
            self._warmed_up(spans, micro, seconds)
        elif self.differs:
            self.differs = False
            self._changed(spans, micro, seconds)
        else:
            self.differs = self.watch.differs(usual)

    def _warmed_up(self, spans: Sequence[Span], micro: Sequence[Inputs], seconds: float) -> None:
        live, job, cuda = self.live, self.live.job, self.live.job.device.type == "cuda"
        left = job.total_steps - live.progress.step
        found = self._correct(spans, micro, seconds)
        then = live.job.forecast.step.step_s  # steps differ in size
        self.watch = Watch(then)
        said = f"predicted {found.step_s:.3g} s a step, " if cuda else ""
        live.screen.say(
            f"warm-up  {said}measured {seconds:.3g} s; by the times of its tasks "
            f"{then:.3g} s, and {count(left, 'more step')} {duration(left * then)}"
        )
        if cuda:
            beyond = max(0.0, self.first_s - seconds)
            live.clock.move(beyond, "steps", "compile")
            note_compilation(job.cfg, job.plan, job.device, beyond)
        self._tell(left)

    def _changed(self, spans: Sequence[Span], micro: Sequence[Inputs], seconds: float) -> None:
        """Drives slow down and recover."""
        live, before = self.live, self.live.job.machine.rates
        assert self.watch is not None
        self._correct(spans, micro, seconds)
        drives = live.job.machine.rates.ssd_read / before.ssd_read if before.ssd_read else 1.0
        live.screen.say(
            f"speed    {self.watch.step_s:.3g} s a step for minutes, {self.watch.before:.3g} s before"
            + (f"; the SSD has {drives:.2g} times the speed" if not 1 / DIFFERENT < drives < DIFFERENT else "")
        )
        self._tell(live.job.total_steps - live.progress.step, self.watch.step_s)

    def _correct(self, spans: Sequence[Span], micro: Sequence[Inputs], seconds: float) -> Prediction:
        """Corrects rates by a traced step; returns what they had predicted."""
        live, job = self.live, self.live.job
        found = predict(job.cfg, job.plan, job.machine.rates, batch_of(micro))
        rates = corrected(job.machine.rates, found, spans, seconds)
        live.job = replace(job, machine=replace(job.machine, rates=rates))
        return found

    def _tell(self, left: int, step_s: float | None = None) -> None:
        """The promise of `left` steps; moves to another plan if that pays."""
        live = self.live
        after = promise(live.job, live.progress.step, live.clock, step_s)
        if not live.promised:  # on a CPU
            live.promised = live.clock.with_spent(after)
        live.screen.say(f"ready    {ready_line(after)}")
        if left and (choice := better(live.job, left)):
            live.screen.say(f"plan     changed: {choice.found.step_s:.3g} s a step; " + "; ".join(choice.because))
            live.move(replace(live.job, plan=choice.plan))
            self.saved = time.monotonic()
            if self.watch:
                self.watch.begin(choice.found.step_s)

    def _finish(self) -> None:
        live, job, done = self.live, self.live.job, self.live.progress
        if done.step < job.total_steps:
            worse = count(done.worse, "evaluation")
            live.screen.say(f"stopped  at step {done.step:,} of {job.total_steps:,}: {worse} no better than the best")
        live.settle()
        self.evaluation.run_if_due(final=True)
        best = job.options.export == "best" and done.best_step not in (None, done.step)
        if best:
            live.export_best()
        else:
            live.export()
        adapter = job.cfg.lora is not None
        base = job.options.model or ""
        with live.clock.at("check"):
            written = reopen_adapter(job.cfg, base, job.out) if adapter else reopen(job.source, job.out, job.cfg.opener)
        for line in (live.log.summary(), *written):
            live.screen.say(line)
        for prompt, text, ended in self.evaluation.samples(0 if best else 3):  # the engine has the last weights
            live.screen.say(f"sample   {prompt!r} -> {text!r}{'' if ended else ' ...'}")
        for line in self._about_best(best):
            live.screen.say(line)
        with live.clock.at("close"):
            live.close()
            live.log.sync(done.step, done.evaluated)
            live.store.remove()
            if best or done.best_step == done.step:
                shutil.rmtree(job.out / "best", ignore_errors=True)  # equals the output
            tidy(job.out)
        live.screen.say(f"took     {took_line(live.clock, live.promised)}")

    def _about_best(self, exported: bool) -> list[str]:
        """Where the best weights are, if they are not the last."""
        done, o = self.live.progress, self.live.job.options
        if done.best is None or done.best_step == done.step:
            return []
        if done.best_step is None:
            what = "no evaluation was better than before training; the output is the last weights"
            return [f"best     {what}"] if o.export == "best" or o.patience else []
        which = "the output" if exported else f"{self.live.job.out / 'best'}, to be the output by --export best"
        return [f"best     {which}: eval_loss {done.best:.4f} at step {done.best_step}"]

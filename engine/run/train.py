"""Training: the loop around the step, evaluations, a change of plan, the finished checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from trireme.engine.amounts import count, duration
from trireme.engine.build import Ahead, InRam, in_ram
from trireme.engine.exchange import bring_back
from trireme.engine.hosts.group import Alone
from trireme.engine.lanes.names import READS
from trireme.engine.lanes.trace import Span, write_perfetto
from trireme.engine.optimizer import StepStats, learning_rate
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.clock import DIFFERENT, Clock, Watch
from trireme.engine.planner.correct import at_work, batch_of, corrected, until_its_end
from trireme.engine.planner.host import memory_in_use
from trireme.engine.planner.lines import ready_line, took_line
from trireme.engine.planner.predict import Prediction, predict
from trireme.engine.planner.whole import note_compilation
from trireme.engine.run.begin.job import Job, check_room, prepare
from trireme.engine.run.begin.kept import changes, config_yaml, to_agree
from trireme.engine.run.begin.opened import Begun, Snapshot, check_continues, new_store, open_run, remove_given_up
from trireme.engine.run.begin.pinned import check_snapshot
from trireme.engine.run.command import checked, program
from trireme.engine.run.evaluation import Evaluation, epoch, load_record
from trireme.engine.run.live import Live, reopen_adapter
from trireme.engine.run.log import Tracker, trackers
from trireme.engine.run.options import Options
from trireme.engine.run.otherwise import adapters_instead, better
from trireme.engine.run.records import Record
from trireme.engine.run.report import dry_line, promise, report
from trireme.engine.run.screen import Screen
from trireme.engine.run.signals import Stop, stop_signals
from trireme.engine.run.verify import check_checkpoint, check_free, new_run, reopen, taken, tidy
from trireme.engine.step import Inputs, train_step
from trireme.models.config import InputError
from trireme.models.rows import Load, make_load
from trireme.models.sizes import costs
from trireme.storage.files import remove_folders, replace_synced

BOUND_EVERY = 50  # steps between timings of lanes


class Interrupted(Exception):
    """Asked to stop, and saved."""


class Diverged(InputError):
    """Loss or gradient norm is not finite."""


def finetune(
    options: Options, screen: Screen | None = None, clock: Clock | None = None, group: Alone | None = None
) -> Live | None:
    """Returns the run, its engine closed; None of a dry run. `clock`: that of the command; `group`: the hosts.

    Raises InputError, CheckpointError, DoesNotFit, StoreError, LostHost, Interrupted.
    """
    screen, clock, group, options = screen or Screen(), clock or Clock(), group or Alone(), checked(options)
    group.agree("options", to_agree(options), "Start all with the same command")
    check_checkpoint(options.model)
    if options.resume:
        busy = f"--resume {options.out}: another process is at that run. Wait for its end."
        with taken(Path(options.out), busy) as made:
            try:
                return _resume(options, screen, clock, group)
            finally:
                remove_folders(made)
    if options.dry_run:
        _prepared(options, screen, clock, group)
        _warn_of_folder(options, screen)
        return None
    if group.host:
        group.meet()  # host 0's folder may hold the others': it has to be free first
    with new_run(options, Interrupted) as run, trackers(options, screen) as told:
        if not group.host:
            group.meet()
        job = _prepared(options, screen, clock, group)
        with clock.at("load"):
            run.store = new_store(job, screen)
        return _train(job, Begun(run.store), screen, clock, told, group)


def _warn_of_folder(options: Options, screen: Screen) -> None:
    """A dry run writes nothing; the run will."""
    try:
        check_free(options)
    except InputError as error:
        screen.warn(f"the run itself would be refused: {error}")


def _resume(options: Options, screen: Screen, clock: Clock, group: Alone) -> Live | None:
    with clock.at("headers"):
        begun = open_run(options, screen, group)
    store, snapshot = begun.store, begun.snapshot
    try:
        if snapshot:
            check_snapshot(options, snapshot)
            for line in changes(options, snapshot["options"]):
                screen.say(f"changed  {line} at step {snapshot['step']:,}")
        if options.dry_run:
            _prepared(options, screen, clock, group, snapshot)
            return None
        with trackers(options, screen) as told:
            job = _prepared(options, screen, clock, group, snapshot)
            replace_synced(job.out / "config.yaml", config_yaml(options))  # keeps changed options
            store = store or new_store(job, screen)
            return _train(job, begun._replace(store=store), screen, clock, told, group)
    finally:
        if store is not None:
            store.close()


def _prepared(options: Options, screen: Screen, clock: Clock, group: Alone, snapshot: Snapshot | None = None) -> Job:
    try:
        return _fitting(options, screen, clock, group, snapshot)
    except DoesNotFit as error:
        out = adapters_instead(options)
        raise DoesNotFit(f"{error} {out}" if out else str(error), error.need) from None


def _fitting(options: Options, screen: Screen, clock: Clock, group: Alone, snapshot: Snapshot | None) -> Job:
    begun = time.monotonic()
    far = lambda name, position, size: screen.far(f"reading {name}", position, size, begun)
    try:
        job = prepare(options, snapshot and snapshot["cut"], far, screen.warn, clock, group)
    finally:
        screen.clear()
    if job.read:
        group.agree("data", {"--data": job.data.fingerprint}, "Copy host 0's")
    group.agree("checkpoints", job.pinned.model, "Copy host 0's")
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


def _train(job: Job, begun: Begun, screen: Screen, clock: Clock, told: Sequence[Tracker], group: Alone) -> Live:
    screen.forgive()
    bring_back(job.out / "best")
    live = Live(job, begun, screen, clock, told, group)
    if job.device.type == "cuda":
        with clock.at("plan"):
            left = promise(job, live.progress.step)
        live.promised = clock.with_spent(left)
    with closing(live.log), closing(live), _telling(group):
        _load(live)
        Run(live).go()
    return live


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


class Run:
    """The loop."""

    def __init__(self, live: Live):
        self.live = live
        self.stop = Stop(live.job.total_steps, live.screen, live.last_snapshot, live.group.hosts == 1)
        self.evaluation = Evaluation(live, self.stop)
        self.batches = Ahead(self._batch)
        self.first = live.progress.step  # this process's first step
        self.stop.begins(self.first)
        self.saved = self.exported = time.monotonic()
        gpus = live.job.plan.gpus if live.job.device.type == "cuda" else 1
        rates, hosts = live.job.machine.rates, live.group.hosts
        self.peak = hosts * gpus * (rates.fp8 if live.job.cfg.fp8 else rates.matmul)  # FLOPs a second, for mfu
        self.bound: str | None = None  # busiest lane of the last traced step
        self.moved = live.lanes.moved.copy()  # bytes by lane at the last step's end
        self.first_s = 0.0  # seconds of the first step
        self.watch: Watch | None = None  # after the second step
        self.differs = False  # steps, for minutes

    def go(self) -> None:
        """Raises Interrupted, Diverged, StoreError."""
        live, done = self.live, self.live.progress
        with stop_signals(self.stop.ask, self.stop.insist), closing(self.batches):
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
        live, job, o, group = self.live, self.live.job, self.live.job.options, self.live.group
        done, total = live.progress, job.total_steps
        began = time.perf_counter()
        warm = done.step == self.first + 1
        live.lanes.tracing = o.trace or warm or self.differs or done.step % BOUND_EVERY == 0
        rate = learning_rate(done.step + 1, total, job.lr, o.schedule, o.warmup_steps(total))
        with live.clock.at("steps"), live.watched(f"step {done.step + 1}"):
            batch = self.batches.take(*self._due())
            tokens, places = sum(mb.tokens for mb in batch), live.lanes.devices
            loads = [make_load(job.cfg, tokens, o.router_aux, device) for device in places]
            micro = [self.evaluation.inputs(mb, loads) for mb in live.dealt(batch)]
            stats = train_step(live.engine, micro, done.step + 1, rate, sum(mb.trained for mb in batch))
        if not np.isfinite([stats.loss, stats.grad_norm]).all():
            self._diverged(stats)
        done.step += 1
        self.stop.hear(group.any(self.stop.asked and not self.stop.alone))
        seconds = time.perf_counter() - began
        spans = self._trace() if live.lanes.tracing else []
        live.log.step(self._record(stats, rate, batch, seconds) | self._load_record(loads[0]))
        self._compare(spans, micro, seconds)
        self.evaluation.run_if_due()  # before a snapshot, which records the best so far
        if group.first(o.export_every.due(done.step, total, time.monotonic() - self.exported)):
            live.settle()
            live.export(job.out / f"step-{done.step}")
            self.exported = time.monotonic()
        if group.first(o.save_every.due(done.step, total, time.monotonic() - self.saved)):
            live.save()
            self.saved = time.monotonic()

    def _load_record(self, load: Load | None) -> Record:
        group = self.live.group
        if load is None:
            return {}
        if group.hosts > 1 and not load.weight:  # else the step has asked the others
            counts = group.numbers(load.counts.flatten().tolist(), load.counts.numel())
            load.counts.copy_(torch.tensor(counts).view(group.hosts, *load.counts.shape).sum(0))
        return load_record(load)

    def _due(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """(step from 0, rows of a micro-batch) of the step to come and, unless it is the last, of that after it."""
        now, rows, job = self.live.progress.step, self.live.job.micro_rows, self.live.job
        return (now, rows), ((now + 1, rows) if now + 1 < job.total_steps else None)

    def _batch(self, due: tuple[int, int]) -> list[InRam]:
        """A step's micro-batches, in another thread."""
        job, (step, rows) = self.live.job, due
        on_gpu = job.device.type == "cuda"
        return [in_ram(job.cfg, mb, on_gpu) for mb in job.data.step(step, job.options.batch_size, rows)]

    def _record(self, stats: StepStats, rate: float, batch: Sequence[InRam], seconds: float) -> Record:
        live, job = self.live, self.live.job
        tokens, trained = sum(mb.tokens for mb in batch), sum(mb.trained for mb in batch)
        flops = sum(costs.model_flops(job.cfg, mb.tokens, mb.pairs) for mb in batch)
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
        self.live.write_best()
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
        tokens = self.live.group.hosts * sum(mb.tokens for mb in micro)
        usual = seconds * self.live.job.work.tokens / tokens  # steps differ in size
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
            beyond = max(0.0, self.first_s - then) + max(0.0, seconds - then)  # the second step has the first updates
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
        with live.clock.at("plan"):
            found = predict(job.cfg, job.plan, job.machine.rates, batch_of(micro))
        rates = corrected(job.machine.rates, found, spans, seconds)
        live.job = replace(job, machine=replace(job.machine, rates=rates))
        return found

    def _tell(self, left: int, step_s: float | None = None) -> None:
        """The promise of `left` steps; moves to another plan if that pays."""
        live = self.live
        with live.clock.at("plan"):
            after = promise(live.job, live.progress.step, live.clock, step_s)
            choice = better(live.job, left) if left else None
        if not live.promised:  # on a CPU
            live.promised = live.clock.with_spent(after)
        live.screen.say(f"ready    {ready_line(after)}")
        if choice:
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
        last_is_best = done.best_step == done.step
        there = last_is_best and not live.best_kept and (job.out / "best").is_dir()  # just written
        if live.group.first(best or there):
            live.export_best()
        else:
            live.export()
            if not last_is_best:
                live.write_best()
        if live.group.host:
            self._leave()
            return
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
            if best or last_is_best:
                shutil.rmtree(job.out / "best", ignore_errors=True)  # equals the output
            tidy(job.out)
        live.group.meet()
        remove_given_up(job.out, live.group.hosts)
        live.screen.say(f"took     {took_line(live.clock, live.promised)}")

    def _leave(self) -> None:
        """On other hosts than the first: removes all once the checkpoint is written."""
        live = self.live
        live.close()
        live.group.meet()
        live.store.remove()
        shutil.rmtree(live.job.out, ignore_errors=True)
        remove_folders([*live.job.store_dirs, live.job.out.parent])

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

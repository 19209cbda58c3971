"""The loop around the step: evaluations, snapshots, a change of plan, and the folder that is left at the end."""

from __future__ import annotations

import gc
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from trireme.engine.amounts import duration
from trireme.engine.build import inputs
from trireme.engine.exchange import Exchange, bring_back
from trireme.engine.lanes import READS, WRITES, RealLanes, Span, write_perfetto
from trireme.engine.optimizer import StepStats
from trireme.engine.plan import Plan
from trireme.engine.planner.correct import at_work, batch_of, corrected, until_its_end
from trireme.engine.planner.machine import memory_in_use
from trireme.engine.planner.predict import predict
from trireme.engine.run import job as jobs
from trireme.engine.run.command import changes, config_yaml, kept
from trireme.engine.run.job import Job
from trireme.engine.run.log import RunLog
from trireme.engine.run.options import Options
from trireme.engine.run.records import Mark
from trireme.engine.run.replan import better
from trireme.engine.run.sample import Sample, prompts, sample
from trireme.engine.run.screen import Screen, tell
from trireme.engine.run.signals import stop_signals
from trireme.engine.run.start import check_continues, fill_engine, make_engine, new_store, open_snapshot
from trireme.engine.run.verify import new_run, reopen, taken, tidy
from trireme.engine.schedule import learning_rate
from trireme.engine.step import Engine, Inputs, evaluate, train_step
from trireme.models import shapes
from trireme.models.config import InputError
from trireme.models.rows import rope_tables
from trireme.storage.files import replace_synced
from trireme.storage.store import Store

BOUND_EVERY = 50  # steps between those whose lanes are timed
SAMPLING = 60.0  # seconds after which a sample ends: a token takes a whole pass over the weights


class Interrupted(Exception):
    """The run was asked to stop and has saved itself. Exit code 130."""


class Diverged(InputError):
    """The loss or the gradient is no longer a number."""


def finetune(options: Options) -> None:
    """Trains as the options say. Raises InputError, CheckpointError, DoesNotFit, StoreError, Interrupted."""
    if options.resume:
        with taken(Path(options.out), f"--resume {options.out}: another process is at that run. Wait for its end."):
            _resume(options)
    elif options.dry_run:
        _prepared(options)
    else:
        with new_run(options, Interrupted) as run:
            job = _prepared(options)
            run.store = new_store(job)
            Run(job, run.store, None).go()


def _resume(options: Options) -> None:
    store, snapshot = open_snapshot(options)
    try:
        for line in changes(options, snapshot.get("options", {})) if snapshot else ():
            tell(f"changed  {line} at step {snapshot['step']:,}")
        job = _prepared(options, snapshot)
        if options.dry_run:
            return
        replace_synced(job.out / "config.yaml", config_yaml(options))  # what was changed holds from now on
        store = store or new_store(job)
        Run(job, store, snapshot).go()
    finally:
        if store is not None:
            store.close()


def _prepared(options: Options, snapshot: dict | None = None) -> Job:
    """What is trained, reported to the user. `snapshot`: what the last one of a run that is resumed says."""
    screen, begun = Screen(sys.stdout), time.monotonic()
    far = lambda name, position, size: screen.far(f"reading {name}", position, size, begun)
    try:
        job = jobs.prepare(options, like=snapshot and snapshot["cut"], progress=far)
    finally:
        screen.clear()
    for line in jobs.report(job):
        tell(line)
    if snapshot:
        check_continues(job, snapshot)
    elif not options.assume:
        jobs.check_room(job)
    if options.dry_run:
        tell("Dry run: nothing written.")
    return job


class Run:
    """One run from its first or resumed step to its last. `snapshot`: what its last one said (see `_save`), if any."""

    def __init__(self, job: Job, store: Store, snapshot: dict | None):
        self.job, self.store, self.options = job, store, job.options
        self.step = self.begun = snapshot["step"] if snapshot else 0  # steps done, and those before this process
        self.best, self.best_step = snapshot["best"] if snapshot else (None, None)  # the least eval_loss
        self.log = RunLog(job.out, job.options, job.total_steps, Mark(*snapshot["log"]) if snapshot else None)
        self.lanes = RealLanes(job.device)
        self.tables = rope_tables(job.cfg, job.seq_len, job.device)
        self.peak = job.machine.rates.matmul
        self.stop: str | None = None
        self.doing = self.step  # the step that is begun or, between two, the last: what a run asked to stop finishes
        self.last = job.total_steps  # the last step that is done
        self.bound: str | None = None  # the lane, or the drive, that was busiest when last traced
        self.moved = self.lanes.moved.copy()
        self.written = snapshot["written"] if snapshot else 0  # bytes written to SSD before this process
        self.e: Engine | None = None
        self.resumed = snapshot is not None
        self.saved_at = self.evaluated_at = time.monotonic()
        self.saved_step, self.evaluated_step = self.step, snapshot["evaluated"] if snapshot else -1
        bring_back(job.out / "best")

    def _set_up(self) -> None:
        """Who asks to stop meanwhile is heard between two pieces: within one, requests to the drive would be left."""
        asked: list[int] = []

        def ask(number: int) -> str:
            asked.append(number)
            return "\n  leaving; again: leave at once"

        with stop_signals(ask, lambda: "\nleft at once"):
            self._start(self.resumed, asked)
        if asked:
            raise KeyboardInterrupt
        if self.resumed:
            self.log.say(f"resumed at step {self.step}")
        self.saved_at = self.evaluated_at = time.monotonic()  # loading took its time

    def _start(self, resumed: bool, asked: Sequence[int] = (), moved: bool = False) -> None:
        """Makes the engine and fills it; `close` gives it back wherever that ends."""
        self.e = make_engine(self.job, self.lanes, self.store, self.log)
        fill_engine(self.e, self.job, self.store, self.log, resumed, asked, moved)

    # ------------------------------------------------ the loop

    def go(self) -> None:
        """Trains to the end. Raises Interrupted where the run was asked to stop and is saved, Diverged, StoreError."""
        job = self.job
        with closing(self.log), closing(self):
            self._set_up()
            with stop_signals(self._asked, lambda: f"\nleft at once. {self._last_snapshot()}"):
                self._evaluate_if_due()
                while self._goes_on():
                    self._one_step()
                if self.stop and self.step < job.total_steps:
                    self._save()
                    self.log.say(
                        f"{self.stop} saved {job.out} at step {self.step}. "
                        f"Resume: python scripts/finetune.py --resume {job.out}"
                    )
                    raise Interrupted
                self._finish()

    def _goes_on(self) -> bool:
        """Whether another step is to be done; it has begun then, for whoever asks to stop from now on."""
        self.doing = min(self.step + 1, self.job.total_steps)
        return self.step < self.last

    def _one_step(self) -> None:
        job, o = self.job, self.options
        began = time.perf_counter()
        warm = self.step == self.begun + 1  # the second step of this process
        self.lanes.tracing = o.trace or warm or self.step % BOUND_EVERY == 0
        batch = job.data.step(self.step, o.batch_size, job.micro_rows)
        rate = learning_rate(self.step + 1, job.total_steps, job.lr, o.schedule, o.warmup_steps(job.total_steps))
        micro = [inputs(job.cfg, mb, self.tables, job.device) for mb in batch]
        stats = train_step(self.e, micro, self.step + 1, rate)
        if not np.isfinite([stats.loss, stats.grad_norm]).all():
            self._diverged(stats)
        self.step += 1
        seconds = time.perf_counter() - began
        spans = self._trace() if self.lanes.tracing else []
        self._log_step(stats, rate, micro, seconds)
        if warm:
            self._correct(spans, micro, seconds)
        self._evaluate_if_due()  # before a snapshot, which knows the best so far then
        if o.save_every.due(self.step, job.total_steps, time.monotonic() - self.saved_at):
            self._save()

    def _log_step(self, stats: StepStats, rate: float, micro, seconds: float) -> None:
        job = self.job
        tokens, trained = sum(mb.tokens for mb in micro), sum(mb.trained for mb in micro)
        flops = sum(shapes.model_flops(job.cfg, mb.tokens, mb.pairs) for mb in micro)
        gpu, ram = memory_in_use(job.device)
        read = sum(self.lanes.moved[lane] - self.moved[lane] for lane in READS)
        self.moved = self.lanes.moved.copy()
        record = {
            "step": self.step,
            "epoch": self._epoch(),
            "loss": stats.loss,
            "learning_rate": rate,
            "grad_norm": stats.grad_norm,
            "tokens_per_second": round(tokens / seconds, 1),
            "trained_tokens_per_second": round(trained / seconds, 1),
            "mfu": round(flops / seconds / self.peak, 4),
            "step_time_s": round(seconds, 4),
            "ram_gib": round(ram, 3),
            "ssd_read_gbs": round(read / seconds / 1e9, 3),
            "ssd_written_tb": round(self._written() / 1e12, 6),
            "bound": self.bound,
        }
        self.log.step(record | ({"gpu_mem_gib": round(gpu, 3)} if job.device.type == "cuda" else {}))

    def _epoch(self) -> float:
        return round(self.step / self.job.data.steps_per_epoch(self.options.batch_size), 4)

    def _written(self) -> int:
        """Bytes written to the SSD since the run's first step."""
        return self.written + sum(self.lanes.moved[lane] for lane in WRITES)

    def _diverged(self, stats: StepStats) -> None:
        """A step that is not a number is not applied; with updates that run under backward only a snapshot helps."""
        self.e.gradients.discard()
        raise Diverged(
            f"step {self.step + 1}: loss {stats.loss:g}, gradient norm {stats.grad_norm:g}. Nothing of this step was "
            f"saved. {self._last_snapshot()}. Lower --lr, or look at the data of this step."
        )

    # ------------------------------------------------ evaluation

    def _evaluate_if_due(self) -> None:
        """Evaluates before training, and as often as asked for; a run that is to stop, when it is resumed."""
        job, seconds = self.job, time.monotonic() - self.evaluated_at
        due = self.step == 0 or self.options.eval_every.due(self.step, job.total_steps, seconds)
        if due and job.data.held_out and self.evaluated_step != self.step and not self._is_leaving():
            self._evaluate()

    def _is_leaving(self) -> bool:
        """Whether the run was asked to stop before its last step."""
        return self.stop is not None and self.step < self.job.total_steps

    def _evaluate(self) -> None:
        """The loss on the held-out data and a sample; the best checkpoint so far is kept in OUT/best.

        Nothing of it counts where the run is asked to stop meanwhile: it is made when the run is resumed.
        """
        loss, samples = self._held_out_loss(), self._samples(1)
        if self._is_leaving():
            return
        record = {"step": self.step, "epoch": self._epoch(), "eval_loss": loss}
        self.log.eval(record | ({"sample": samples[0].text} if samples else {}))
        if self.best is None or loss < self.best:
            self.best, self.best_step = loss, self.step or None
            if self.step:
                self._settle()
                with self._exporting() as more:
                    Exchange(self.job.cfg, self.job.source, self.e.homes).replace(self.job.out / "best", more)
        self.evaluated_at, self.evaluated_step = time.monotonic(), self.step

    def _held_out_loss(self) -> float:
        """Mean loss of a label of the held-out data, or of those before the run was asked to stop."""
        job, total, count = self.job, 0.0, 0
        batches = iter(job.data.held_out.batches(job.micro_rows))
        while (group := list(islice(batches, job.plan.n_micro))) and not self._is_leaving():
            micro = [inputs(job.cfg, mb, self.tables, job.device) for mb in group]
            total += float(sum(losses.double().sum() for losses in evaluate(self.e, micro)))
            count += sum(mb.trained for mb in micro)
        return total / max(1, count)

    def _samples(self, count: int) -> list[Sample]:
        """What the model says after the beginnings of documents of the held-out data."""
        job = self.job
        if job.codec is None or self._is_leaving():
            return []
        end = time.monotonic() + SAMPLING
        enough = lambda: time.monotonic() > end or self._is_leaving()
        return sample(self.e, job.codec, prompts(job.data.held_out or job.data, count), enough=enough)

    # ------------------------------------------------ saving

    def _settle(self) -> None:
        """All updates applied, all lanes idle."""
        self.e.optimizer.flush()
        self.lanes.drain()

    def _save(self) -> None:
        """A snapshot of this step. What lives on the SSD is linked, not copied."""
        if self.saved_step == self.step and self.store.snapshots:
            return
        self._settle()
        with self.log.screen.working("saving", self.e.homes.nbytes(everything=False)) as more:
            self.e.homes.save_to_store(more)
        snapshot = {
            "step": self.step,
            "options": kept(self.options),
            "cut": jobs.cut(self.job),
            "data": self.job.data.fingerprint,
            "best": [self.best, self.best_step],
            "evaluated": self.evaluated_step,
            "written": self._written(),
            "log": self.log.sync(self.step),
        }
        self.store.commit(self.step, snapshot)
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def _exporting(self) -> AbstractContextManager[Callable[[int], None]]:
        return self.log.screen.working("writing the checkpoint", 2 * self.job.source.nbytes)  # and reading it back

    def _finish(self) -> None:
        """The last evaluation, the checkpoint folder, and the end of the training state."""
        job = self.job
        self._settle()
        if job.data.held_out and self.evaluated_step != self.step:
            self._evaluate()
        with self._exporting() as more:
            Exchange(job.cfg, job.source, self.e.homes).save(job.out, more)
        for line in (self.log.summary(), *reopen(job.source, job.out)):
            self.log.say(line)
        for prompt, text, ended in self._samples(3):
            self.log.say(f"sample   {prompt!r} -> {text!r}{'' if ended else ' ...'}")
        if self.best_step == self.step:
            shutil.rmtree(job.out / "best", ignore_errors=True)  # it is the output itself
        elif self.best_step is not None:
            self.log.say(f"best     {job.out / 'best'}: eval_loss {self.best:.4f} at step {self.best_step}")
        self.close()
        self.log.sync(self.step)
        self.store.remove()  # a run that is over goes on no more
        tidy(job.out)

    # ------------------------------------------------ what a traced step tells about the machine

    def _trace(self) -> list[Span]:
        """Finds out which lane was busiest in this step, and writes the step's timeline where asked for."""
        self.lanes.drain()
        spans = self.lanes.trace()
        found = at_work(until_its_end(spans))
        self.bound = max(found, key=found.get)
        if self.options.trace:
            write_perfetto(self.job.out / "trace.json", spans)
            self.log.say("lanes    " + ", ".join(f"{lane} {seconds:.3f} s" for lane, seconds in found.items()))
        return spans

    def _correct(self, spans: list[Span], micro: list[Inputs], seconds: float) -> None:
        """Says how a traced step compares with its prediction; goes on by another plan where that is worth a move."""
        job, left = self.job, self.job.total_steps - self.step
        found = predict(job.cfg, job.plan, job.machine.rates, batch_of(micro))
        rates = corrected(job.machine.rates, found, spans, seconds)
        self.job = replace(job, machine=replace(job.machine, rates=rates))
        then = jobs.forecast(self.job).predict().step_s  # not every step is as large as this one
        self.log.say(
            f"warm-up  predicted {found.step_s:.3g} s a step, measured {seconds:.3g} s; by the times of its tasks "
            f"{then:.3g} s, and {left:,} more steps {duration(left * then)}"
        )
        if left and (choice := better(self.job, left)):
            self.log.say(f"plan     changed: {choice.found.step_s:.3g} s a step; " + "; ".join(choice.because))
            self._move(choice.plan)

    def _move(self, plan: Plan) -> None:
        """Goes on by `plan`, through a snapshot: memory does not hold everything twice, and nothing can be lost."""
        self._save()
        self._let_go()
        self.job = replace(self.job, plan=plan)
        self._start(resumed=True, moved=True)

    # ------------------------------------------------ the end

    def _asked(self, number: int) -> str:
        """Makes the step that is begun the last one; returns what to tell whoever asked."""
        self.stop = "^C " if number == signal.SIGINT else "asked to stop:"
        self.last = self.doing
        return f"\n  finishing step {self.doing} and saving; again: leave at once"

    def _last_snapshot(self) -> str:
        return f"Last snapshot: step {self.saved_step}" if self.store.snapshots else "There is no snapshot yet"

    def close(self) -> None:
        """Ends the lanes and gives back the engine's memory; once more it does nothing."""
        self.lanes.close()
        if self.e is not None:
            self._let_go()

    def _let_go(self) -> None:
        """Gives back the engine's memory."""
        e, self.e = self.e, None
        e.close()
        del e
        gc.collect()
        if self.job.device.type == "cuda":
            torch.cuda.empty_cache()

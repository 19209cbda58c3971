"""A run from its options to its end: the steps, and when to evaluate, save, export and stop."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from trireme.engine.amounts import count, duration
from trireme.engine.build import Inputs, InRam, collate, prefetch, with_dropout
from trireme.engine.check.tuned import in_use
from trireme.engine.data.dataset import Dataset
from trireme.engine.hosts.group import world
from trireme.engine.optimizer import StepStats, learning_rate
from trireme.engine.planner.correct import at_work, batch_of, corrected, until_its_end
from trireme.engine.planner.host import counters, memory_in_use
from trireme.engine.planner.lines import ready_line, took_line
from trireme.engine.planner.machine import note_drives
from trireme.engine.planner.predict import predict
from trireme.engine.queues.names import READS
from trireme.engine.queues.task import Task
from trireme.engine.run import config_file, folder, report, screen
from trireme.engine.run.after import hub
from trireme.engine.run.evaluate import documents_by_host
from trireme.engine.run.job import Job, check_paths
from trireme.engine.run.log import Log, Record, Tracker, eval_line, label_of, load_record, trackers
from trireme.engine.run.options import Options
from trireme.engine.run.record import RunSnapshot
from trireme.engine.run.signals import Stop, stop_signals
from trireme.engine.run.state import Training, snapshot_of, with_teacher
from trireme.engine.step import train_step
from trireme.models.config import InputError
from trireme.models.rows import make_load, neftune
from trireme.models.sizes import costs
from trireme.storage.untrusted import quoted

BOUND_EVERY = 50  # steps between timings of queues
SHORT, SETTLED, WARM = 0.5, 5, 2  # seconds of a short step on a GPU; the step that is traced, of short ones and others
BUSY = 0.5  # share of a step from which a drive's rate is known


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and is saved."""


def run(options: Options) -> int:
    """The command. Returns the exit code."""
    from trireme.engine.run.after import demo  # late: it imports this folder's modules

    prepared = demo.with_demo(options) if options.demo else options
    try:
        train(prepared)
        if options.demo and not options.dry_run:
            demo.say_after(prepared)
    except Interrupted:
        return 130
    return 0


def train(options: Options, others: Sequence[Tracker] = ()) -> Path:
    """Trains, or plans if it is a dry run; returns the output folder. `others`: trackers besides those of --log.

    Raises InputError, CheckpointError, DoesNotFit, StoreError, LostHost, Interrupted.
    """
    check_paths(options)
    options = hub.fetched(folder.named(options))
    out = Path(options.out)
    world().agree("options", config_file.saved(replace(options, store=())), "Start all with the same command")
    if options.dry_run and not options.resume:
        report.prepare_job(options, None)
        return out
    with folder.open_folder(options) as place:
        with screen.clock().at("headers"):
            snapshot = snapshot_of(place, options) if options.resume else None
        if options.dry_run:
            report.prepare_job(options, snapshot)
            return out
        of_log = trackers(options, place.state.id)  # before anything takes time
        job, lines = report.prepare_job(options, snapshot)
        if snapshot and job.work.steps < snapshot.progress.step + place.state.ended:
            progress = f"the run is at step {snapshot.progress.step:,}"
            raise InputError(f"--resume {out}: {progress}. To go on, give more: --epochs N or --max-steps N.")
        place.note(replace(place.state, ended=False, keep_state=False))
        place.write_config(job.options)
        job = with_teacher(job, place, snapshot)
        screen.forgive()
        with closing(Training(job, place, snapshot)) as training:
            Loop(training, [*others, *of_log], lines).go()
    return out


class Loop:
    """The loop over the steps of a run."""

    def __init__(self, training: Training, others: Sequence[Tracker], lines: Sequence[str]):
        """`others`: trackers. `lines`: the report, for report.html."""
        job, self.training, self.place, self.lines = training.job, training, training.folder, lines
        self.done = training.progress
        out = self.place.run if world().host else job.out
        self.log = Log(out, job.work.steps, job.work.evaluations, self.done.log, others)
        self.stop = Stop(self.done.step, job.work.steps)
        self.saved = self.exported = self.evaluated = time.monotonic()
        self.counters, self.joules = counters(job.device, job.plan.gpus), math.nan
        self.bound = ""  # busiest queue of the last traced step
        self.busy = list[str]()  # a line on its queues
        is_short = job.on_gpu and job.forecast.step.step_s < SHORT
        self.warm = self.done.step + (SETTLED if is_short else WARM)

    @property
    def job(self) -> Job:
        return self.training.job

    def go(self) -> None:
        """Raises Interrupted, InputError, StoreError, LostHost."""
        with ExitStack() as stack:
            stack.enter_context(in_use(self.job.launches))
            stack.callback(self.log.close)
            try:
                left = range(self.done.step, self.job.work.steps)
                ending = lambda: screen.urgent(f"\nexited immediately. {self.training.last_snapshot}")
                with stop_signals(self.stop.ask, ending), closing(prefetch(self.batch, left)) as batches:
                    self.load()
                    self.steps(batches)
                    self.end()
            except BaseException as error:
                if not isinstance(error, Interrupted):
                    world().fail(error)  # before cleanup that waits for other hosts
                raise

    def load(self) -> None:
        """Loads the engine. A signal takes effect between two pieces, when no request to a drive is in flight."""
        training, snapshot, stopped = self.training, self.training.snapshot, lambda: self.stop.requested
        if snapshot and self.job.options.export == "best":
            self.check_best(snapshot)
        with screen.clock().at("load"), training.watched("loading"):
            training.build(stopped)
            training.load_snapshot(stopped) if snapshot else training.load_checkpoint(stopped)
            training.load_reference(stopped)
        if stopped():
            raise KeyboardInterrupt
        self.stop.loading = False
        if snapshot:
            screen.say(f"resumed at step {self.done.step:,}")

    def check_best(self, snapshot: RunSnapshot) -> None:
        """Raises InputError if the best weights of a resumed run are damaged. One that saved none goes on without."""
        done = self.done
        if snapshot.options["export"] != "best":
            done.best = done.best_step = None
            screen.say(f"note: the best weights are those after step {done.step:,}: none were saved before")
        elif world().first(not self.place.holds_best(done.best_step)):
            advice = "Restore them from a copy, or let the last weights be the output: --export last"
            folder = self.place.best(done.best_step)
            raise InputError(f"--resume {self.place.out}: the best weights are not whole in {folder}. {advice}.")

    def steps(self, batches: Iterator[list[InRam]]) -> None:
        done, o, total, training = self.done, self.job.options, self.job.work.steps, self.training
        is_due = lambda every, moment: world().first(every.due(done.step, total, time.monotonic() - moment))
        if done.step == 0 or is_due(o.eval_every, self.evaluated):  # also one that a signal broke off
            self.evaluate()
        if done.step == 0:
            self.evaluate_general()
        self.energy()  # from here
        while done.step < self.stop.last and not (o.patience and done.worse >= o.patience):
            self.step(batches)
            if is_due(o.eval_every, self.evaluated):
                self.evaluate()  # before a snapshot, which records the best so far
            if is_due(o.export_every, self.exported):
                training.apply_updates()
                training.export(done.step)
                self.exported = time.monotonic()
            if is_due(o.save_every, self.saved):
                training.save(self.log.sync)
                self.saved = time.monotonic()
        if self.stop.leaving():
            training.save(self.log.sync)
            screen.say(f"stopped  {o.out} is saved at step {done.step:,}. Resume: trireme --resume {quoted(o.out)}")
            raise Interrupted

    # ------------------------------------------------------------ a step

    def step(self, batches: Iterator[list[InRam]]) -> None:
        job, done, training, group = self.job, self.done, self.training, world()
        queues, number, began = training.queues, done.step + 1, time.perf_counter()
        self.stop.step, moved = number, queues.moved.copy()
        queues.tracing = number == self.warm or done.step % BOUND_EVERY == 0
        o, total = job.options, job.work.steps
        rate = learning_rate(number, total, o.lr or 0.0, o.schedule, o.warmup_steps(total))
        with screen.clock().at("steps"), training.watched(f"step {number:,}"):
            batch = next(batches)
            tokens = sum(mb.tokens for mb in batch)
            loads = [make_load(job.cfg, tokens, job.options.router_aux, device) for device in queues.devices]
            weight, correct = sum(mb.weight for mb in batch), training.evaluator.counter(job.preference)
            micro = training.evaluator.inputs(batch, loads, correct)
            stats = train_step(training.engine, micro, number, rate, weight, job.preference, documents_by_host(batch))
        if not np.isfinite([stats.loss, stats.grad_norm]).all():
            training.engine.gradients.discard()  # updates made during backward stay; only a snapshot undoes them
            figures = f"loss {stats.loss:g}, gradient norm {stats.grad_norm:g}. Nothing of this step was saved"
            advice = "Lower --lr, or look at the data of this step"
            raise InputError(f"step {number:,}: {figures}. {training.last_snapshot}. {advice}.")
        done.step = number
        self.stop.agree()
        seconds = time.perf_counter() - began
        spans = self.trace() if queues.tracing else []
        queues.tracing = False  # what happens between steps is of none
        read = sum(queues.moved[queue] - moved[queue] for queue in READS) / seconds / 1e9
        record = self.record(stats, rate, batch, seconds, read) | load_record(loads[0])
        if correct is not None:
            record["accuracy"] = round(sum(group.values(float(correct))) / weight, 6)
        with training.watched("log"):
            self.log.step(record)
        if number == self.warm or (number > self.warm and spans and job.on_gpu and job.plan.uses_ssd):
            self.correct(spans, micro, seconds * job.work.tokens / max(1, tokens))

    def batch(self, step: int) -> list[InRam]:
        """The micro-batches of a step, from 0. Runs in another thread."""
        job, o, first, batch, noise = self.job, self.job.options, 0, list[InRam](), None
        apart, key = o.method == "kto", zlib.crc32(f"neftune {o.seed} {step}".encode()) >> 1
        for mb in job.data.step(step, o.batch_size, job.rows):
            lengths = (mb.halves()[0] if apart else mb).lengths
            if o.neftune:  # a function of the seed, the step and the place in the step
                noise = neftune(job.cfg, lengths, o.neftune, key, first)
            batch.append(collate(job.cfg, mb, job.on_gpu, noise, apart))
            first += sum(lengths)
        return with_dropout(job.cfg, batch, o.seed, step)

    def record(self, stats: StepStats, rate: float, batch: Sequence[InRam], seconds: float, read: float) -> Record:
        job, tokens, trained = self.job, sum(mb.tokens for mb in batch), sum(mb.trained for mb in batch)
        gpu, ram = memory_in_use(job.device, job.limits.gpus)
        record: Record = {"step": self.done.step, "epoch": self.epoch, "loss": stats.loss, "learning_rate": rate}
        record |= {"grad_norm": stats.grad_norm, "rows" if job.cfg.scores else "trained_tokens": trained}
        record |= {"tokens": tokens, "tokens_per_second": round(tokens / seconds, 1), "step_time_s": round(seconds, 4)}
        record |= {"wall_time": round(time.time(), 3), "ram_gib": round(ram, 3), "ssd_read_gbs": round(read, 3)}
        record |= {"ssd_written_tb": round(self.training.written / 1e12, 6), "bound": self.bound} | self.energy()
        if job.on_gpu:  # the peak of a CPU is known by no data sheet
            rates, flops = job.machine.rates, sum(costs.model_flops(job.cfg, mb.tokens, mb.pairs) for mb in batch)
            peak = job.plan.hosts * job.plan.gpus * (rates.fp8 if job.cfg.fp8 else rates.matmul)
            record |= {"mfu": round(flops / seconds / peak, 4), "gpu_mem_gib": round(gpu, 3)}
        return record | {name: round(value, 6) for name, value in stats.metrics.items()}

    def energy(self) -> Record:
        """Joules that the GPUs of all hosts have used since the last call; nothing if one does not count them."""
        before, self.joules = self.joules, sum(world().values(self.counters.joules()))
        joules = self.joules - before
        return {"gpu_joules": round(joules, 3)} if math.isfinite(joules) else {}

    @property
    def epoch(self) -> float:
        return round(self.done.step / self.job.data.steps_per_epoch(self.job.options.batch_size), 4)

    def trace(self) -> list[Task]:
        """The tasks of the last step. Also notes the busiest queue."""
        training = self.training
        with screen.clock().at("steps"), training.watched(f"step {self.done.step:,}"):
            training.queues.drain()
        spans = training.queues.trace()
        busy = at_work(until_its_end(spans))
        self.bound = max(busy, key=lambda queue: busy[queue])
        self.busy = [f"a step   {', '.join(f'{queue} {s:.3g} s' for queue, s in busy.items() if s)} at work"]
        return spans

    def correct(self, spans: Sequence[Task], micro: Sequence[Inputs], seconds: float) -> None:
        """Corrects the rates by a traced step, which took `seconds` for usual tokens: those of drives for later runs,
        and, after the warm step, the estimate of this one.
        """
        job, clock, left = self.job, screen.clock(), self.job.work.steps - self.done.step
        with clock.at("plan"):
            predicted = predict(job.cfg, job.plan, job.machine.rates, batch_of(micro))
            rates = corrected(job.machine.rates, predicted, spans, seconds)
            if self.done.step != self.warm:
                if predicted.busy["ssd"] > BUSY * predicted.step_s:
                    note_drives(rates, folder.stores(job.options))
                return
            job = self.training.job = replace(job, machine=replace(job.machine, rates=rates))
            after = report.estimate(job, self.done.step, measured=True)
        if left:
            speed = f"predicted {predicted.step_s:.3g} s a step, measured {seconds:.3g} s; " if job.on_gpu else ""
            screen.say(f"ready    {speed}{count(left, 'more step')} in {duration(after['steps'])}; {ready_line(after)}")

    # ------------------------------------------------------------ evaluations

    def evaluate(self) -> None:
        """Evaluates. If the run is asked to stop meanwhile, the result is dropped: the resumed run evaluates again."""
        job, done, held, training = self.job, self.done, self.job.data.held_out, self.training
        if held is None or done.evaluated == done.step or self.stop.leaving():
            return
        record = self.figures("eval", held, done.eval_rows)
        loss, start = record["eval_loss"], done.first.get("eval_loss")
        with screen.clock().at("evaluations"), training.watched("evaluation"):
            samples = training.evaluator.samples(held, job.opened.codec, 1, self.stop.leaving)
        is_best = done.step > 0 and loss < (math.inf if done.best is None else done.best)
        if is_best and job.options.export == "best":
            self.evaluate_general()
        if self.stop.leaving():
            return
        record |= {"sample": samples[0][1]} if samples else {}
        with training.watched("log"):
            self.log.add(record)
        note, above = "", start is not None and not loss < start
        if done.step:
            done.worse = 0 if is_best and not above else done.worse + 1
            if is_best:
                done.best, done.best_step = loss, done.step
                if job.options.export == "best":
                    training.save_best()
            note = f" (before training {start:.4f})" if above else f" (best {done.best:.4f})"
            note = " (best)" if is_best and not above else note
        self.evaluated, done.evaluated = time.monotonic(), done.step
        shown = record if done.step or not job.preference else {"eval_loss": loss}  # pairs are ties before training
        text = f"  {record['sample']!r}" if samples else ""
        screen.say(f"{label_of(done.step, job.work.steps)}  {eval_line(shown, note)}{text}")
        self.draw()

    def figures(self, name: str, data: Dataset, rows: int | None) -> Record:
        """The record of an evaluation, eval or general; those before training are kept for the end."""
        began, done = time.monotonic(), self.done
        with screen.clock().at("evaluations"), self.training.watched("evaluation"):
            loss, metrics = self.training.evaluator.loss(data, self.job.preference, rows, self.stop.leaving)
        figures = {f"{name}_loss": loss} | {f"{name}_{key}": round(value, 6) for key, value in metrics.items()}
        if not (done.step or self.stop.leaving()):
            done.first |= figures
        took = {f"{name}_time_s": round(time.monotonic() - began, 3), "wall_time": round(time.time(), 3)}
        return {"step": done.step, "epoch": self.epoch} | figures | took

    def evaluate_general(self) -> None:
        """Evaluates --general, unless this step's is logged."""
        data, log, step = self.job.data.general, self.log, self.done.step
        if data is None or self.stop.leaving() or (log.general and log.general[-1]["step"] == step):
            return
        record = self.figures("general", data, None)
        if not self.stop.leaving():
            with self.training.watched("log"):
                log.add(record)
            screen.say(f"{label_of(step, self.job.work.steps)}  general_loss {record['general_loss']:.4f}")

    def draw(self) -> None:
        """Writes report.html."""
        if not world().host:
            with self.training.watched("report"):
                self.log.draw(report.facts(self.job, self.done, self.log, self.lines, self.busy))

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        job, o, done, training = self.job, self.job.options, self.done, self.training
        if done.step < job.work.steps:
            worse = count(done.worse, "evaluation")
            screen.say(f"stopped  at step {done.step:,} of {job.work.steps:,}: {worse} without a lower eval_loss")
        training.apply_updates()
        self.evaluate()
        best = o.export == "best" and done.best_step is not None
        if not best:
            self.evaluate_general()
        if o.keep_state:
            training.save(self.log.sync)
        training.export_best() if best else training.export()
        nothing_better, result = report.against_start(job, done, self.log)
        if nothing_better:
            screen.warn("on held-out rows nothing is better than before training. Lower --lr, or look at the data")
        for line in [*result, self.log.line()]:
            screen.say(line)
        data, n = job.data.held_out or job.data, 0 if best and done.best_step != done.step else 3
        with training.watched("samples"):
            samples = training.evaluator.samples(data, job.opened.codec, n, self.stop.leaving)
        for prompt, text, ended in samples:
            shortened = prompt if len(prompt) <= 80 else f"...{prompt[-80:]}"
            screen.say(f"sample   {shortened!r} -> {text!r}{'' if ended else ' ...'}")
        training.close()
        training.merge()
        with screen.clock().at("close"), training.watched("close"):
            self.log.sync()
            self.draw()  # the last file that a kill could leave half written
            world().barrier()  # hosts besides the first have nothing that is output
            self.place.finish(o.keep_state)
        for line in report.about_output(self.job, self.done) if not world().host else ():
            screen.say(line)
        screen.say(f"took     {took_line(screen.clock())}")

"""The loop around the step: batches, evaluations, snapshots, the finished checkpoint."""

from __future__ import annotations

import math
import shutil
import time
import zlib
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import torch

from trireme.engine.amounts import count
from trireme.engine.build import Ahead, InRam, in_ram, with_dropout
from trireme.engine.data.dataset import MicroBatch
from trireme.engine.optimizer import StepStats, learning_rate
from trireme.engine.planner.correct import at_work, until_its_end
from trireme.engine.planner.host import memory_in_use
from trireme.engine.planner.lines import took_line
from trireme.engine.queues.names import READS
from trireme.engine.queues.trace import Span, perfetto
from trireme.engine.run.begin.resume import remove_given_up
from trireme.engine.run.command import program
from trireme.engine.run.evaluation import Evaluation, epoch, load_record
from trireme.engine.run.hub.names import opens
from trireme.engine.run.job import Job
from trireme.engine.run.live import Live, reopen_adapter
from trireme.engine.run.output.exports import BEST, set_aside
from trireme.engine.run.output.folder import reopen, tidy
from trireme.engine.run.output.log import perplexity
from trireme.engine.run.output.records import Record
from trireme.engine.run.pace import Pace
from trireme.engine.run.signals import Stop, stop_signals
from trireme.engine.step import train_step
from trireme.models.config import InputError
from trireme.models.rows import Load, Noise, make_load, neftune
from trireme.models.sizes import costs
from trireme.storage.files import remove_folders, replace_synced
from trireme.storage.untrusted import quoted

BOUND_EVERY = 50  # steps between timings of queues


class Interrupted(Exception):
    """The run was asked to stop, and is saved."""


class Diverged(InputError):
    """The loss or the gradient norm is not finite."""


class Run:
    """The loop over the steps of a run."""

    def __init__(self, live: Live):
        self.live = live
        self.stop = Stop(live.job.total_steps, live.screen, live.last_snapshot, live.group.hosts == 1)
        self.evaluation = Evaluation(live, self.stop)
        self.batches = Ahead(self._batch)
        self.stop.begins(live.progress.step)
        self.saved = self.exported = time.monotonic()
        gpus = live.job.plan.gpus if live.job.device.type == "cuda" else 1
        rates, hosts = live.job.machine.rates, live.group.hosts
        self.peak = hosts * gpus * (rates.fp8 if live.job.cfg.fp8 else rates.matmul)  # FLOPs a second, for mfu
        self.bound: str | None = None  # busiest queue of the last traced step
        self.moved = live.queues.moved.copy()  # bytes by queue at the step's beginning
        self.pace = Pace(live)
        predicted = live.job.forecast.step.step_s if live.job.device.type == "cuda" else None
        self.step_s: float | None = predicted  # of the last step

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
                saved = f"{self.stop.how} saved {out} at step {done.step:,}"
                live.screen.say(f"{saved}. Resume: {program()} --resume {quoted(out)}")
                raise Interrupted
            self._finish()

    def _step(self) -> None:
        live, job, o, group = self.live, self.live.job, self.live.job.options, self.live.group
        done, total = live.progress, job.total_steps
        began, self.moved = time.perf_counter(), live.queues.moved.copy()
        live.queues.tracing = o.trace or self.pace.needs_trace or done.step % BOUND_EVERY == 0
        rate = learning_rate(done.step + 1, total, job.lr, o.schedule, o.warmup_steps(total))
        passing = live.screen.passing(f"step {done.step + 1:,}/{total:,}", self.step_s)
        with live.clock.at("steps"), live.watched(f"step {done.step + 1:,}"), passing:
            batch = self.batches.take(*self._due())
            tokens, places = sum(mb.tokens for mb in batch), live.queues.devices
            loads = [make_load(job.cfg, tokens, o.router_aux, device) for device in places]
            weight, docs, correct = sum(mb.weight for mb in batch), live.documents(batch), self.evaluation.counter()
            micro = [self.evaluation.inputs(mb, loads, correct) for mb in live.dealt(batch)]
            stats = train_step(live.engine, micro, done.step + 1, rate, weight, live.preference, docs)
        if not np.isfinite([stats.loss, stats.grad_norm]).all():
            self._diverged(stats)
        done.step += 1
        self.stop.hear(group.any(self.stop.asked and not self.stop.alone))
        seconds = self.step_s = time.perf_counter() - began
        spans = self._trace() if live.queues.tracing else []
        live.queues.tracing = False  # what happens between steps is of none
        record = self._record(stats, rate, batch, seconds) | self._load_record(loads[0])
        if correct is not None:
            record["accuracy"] = round(sum(group.values(float(correct))) / weight, 6)
        with live.watched("log"):
            live.log.step(record)
        if self.pace.compare(spans, micro, seconds):
            self.saved = time.monotonic()
        self.evaluation.run_if_due()  # before a snapshot, which records the best so far
        if group.first(o.export_every.due(done.step, total, time.monotonic() - self.exported)):
            live.apply_updates()
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
        """(step from 0, rows of a micro-batch) of the next step and of the one after it, None if there is none."""
        now, rows, job = self.live.progress.step, self.live.job.micro_rows, self.live.job
        return (now, rows), ((now + 1, rows) if now + 1 < job.total_steps else None)

    def _batch(self, due: tuple[int, int]) -> list[InRam]:
        """The micro-batches of a step. Runs in another thread."""
        job, (step, rows) = self.live.job, due
        on_gpu = job.device.type == "cuda"
        batch = job.data.step(step, job.options.batch_size, rows)
        found = [in_ram(job.cfg, mb, on_gpu, noise) for mb, noise in zip(batch, _noise(job, step, batch), strict=True)]
        return with_dropout(job.cfg, found, job.options.seed, step)

    def _record(self, stats: StepStats, rate: float, batch: Sequence[InRam], seconds: float) -> Record:
        live, job = self.live, self.live.job
        tokens, trained = sum(mb.tokens for mb in batch), sum(mb.trained for mb in batch)
        flops = sum(costs.model_flops(job.cfg, mb.tokens, mb.pairs) for mb in batch)
        gpu, ram = memory_in_use(job.device, job.limits.gpus)
        read = sum(live.queues.moved[queue] - self.moved[queue] for queue in READS)
        record = {
            "step": live.progress.step,
            "epoch": epoch(live),
            "loss": stats.loss,
            "learning_rate": rate,
            "grad_norm": stats.grad_norm,
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            ("rows_per_second" if job.cfg.scores else "trained_tokens_per_second"): round(trained / seconds, 1),
            "step_time_s": round(seconds, 4),
            "wall_time": round(time.time(), 3),
            "ram_gib": round(ram, 3),
            "ssd_read_gbs": round(read / seconds / 1e9, 3),
            "ssd_written_tb": round(live.written / 1e12, 6),
            "bound": self.bound,
        } | {name: round(value, 6) for name, value in stats.metrics.items()}
        record |= {} if job.cfg.scores else {"trained_tokens": trained}
        if job.device.type == "cuda":  # the peak of a CPU is known by no data sheet, and varies with its other load
            record |= {"mfu": round(flops / seconds / self.peak, 4), "gpu_mem_gib": round(gpu, 3)}
        return record

    def _diverged(self, stats: StepStats) -> None:
        """Drops the gradients and raises Diverged. Updates made during backward stay; only a snapshot undoes them."""
        self.live.engine.gradients.discard()
        self.live.write_best()
        raise Diverged(
            f"step {self.live.progress.step + 1:,}: loss {stats.loss:g}, gradient norm {stats.grad_norm:g}. Nothing of "
            f"this step was saved. {self.live.last_snapshot()}. Lower --lr, or look at the data of this step."
        )

    def _trace(self) -> list[Span]:
        """The tasks of the last step. Also notes the busiest queue."""
        live = self.live
        with live.clock.at("steps"), live.watched(f"step {live.progress.step:,}"):
            live.queues.drain()
        spans = live.queues.trace()
        found = at_work(until_its_end(spans))
        self.bound = max(found, key=lambda queue: found[queue])
        if live.job.options.trace:
            replace_synced(live.job.out / "trace.json", perfetto(spans).encode())
            live.screen.say("queues    " + ", ".join(f"{queue} {seconds:.3f} s" for queue, seconds in found.items()))
        return spans

    def _finish(self) -> None:
        live, job, done = self.live, self.live.job, self.live.progress
        if done.step < job.total_steps:
            worse = count(done.worse, "evaluation")
            live.screen.say(f"stopped  at step {done.step:,} of {job.total_steps:,}: {worse} without a lower eval_loss")
        live.apply_updates()
        self.evaluation.run_if_due(final=True)
        last_is_best = done.best_step == done.step
        there = live.group.first(live.best_kept or (job.out / BEST).is_dir())  # else lost
        best = there and job.options.export == "best" and done.best_step not in (None, done.step)
        if best or (there and last_is_best and not live.best_kept):  # just written
            live.export_best()
        else:
            live.export()
            if not last_is_best:
                live.write_best()
        if live.group.host:
            self._leave()
            return
        adapter = job.cfg.lora is not None
        with live.clock.at("check"), live.watched("check"):
            summary = live.log.summary()
            written = (
                reopen_adapter(job.cfg, opens(job.options.model), job.out)
                if adapter
                else reopen(job.source, job.out, job.cfg.opener, job.cfg.scores > 0)
            )
        self._warn_of_worse(best)
        for line in (summary, *written):
            live.screen.say(line)
        for prompt, text, ended in self.evaluation.samples(0 if best else 3):  # the engine has the last weights
            live.screen.say(f"sample   {prompt!r} -> {text!r}{'' if ended else ' ...'}")
        for line in self._about_best(best, there):
            live.screen.say(line)
        with live.clock.at("close"), live.watched("close"), live.screen.working("removing the store", 0) as more:
            live.close()
            live.log.sync(done.step, done.evaluated)
            if best or last_is_best:
                set_aside(job.out)  # equals the output; `tidy` removes it once the store is
            live.store.remove(more)
            tidy(job.out)
        live.group.meet()
        with live.watched("close"), live.screen.working("removing what other hosts left", 0) as more:
            remove_given_up(job.out, live.group.hosts, more)
        live.screen.say(f"took     {took_line(live.clock, live.estimated)}")

    def _leave(self) -> None:
        """On hosts other than the first: removes all files when the checkpoint is written."""
        live = self.live
        live.close()
        live.group.meet()
        with live.watched("close"), live.screen.working("removing the store", 0) as more:
            live.store.remove(more)
            shutil.rmtree(live.job.out, ignore_errors=True)
            remove_folders([*live.job.store_dirs, live.job.out.parent])

    def _about_best(self, exported: bool, there: bool) -> list[str]:
        """A line on where the best weights are, and the loss of what was exported."""
        done, evals = self.live.progress, self.live.log.totals.evals
        if done.best is None or evals is None:
            return []
        which, last = "the output", ""
        if not exported and done.best_step != done.step:
            which = f"{self.live.job.out / BEST}, to be the output by --export best" if there else "lost"
            last = f"; the output: {self._evaluated(evals[1], done.step)}"
        return [f"best     {which}: {self._evaluated(done.best, done.best_step)}{last}"]

    def _warn_of_worse(self, exported: bool) -> None:
        """Warns if the output is no better than the model before training."""
        done, evals = self.live.progress, self.live.log.totals.evals
        if done.start is None or evals is None:
            return
        loss, step = (done.best, done.best_step) if exported else (evals[1], done.step)
        if loss is None or not loss < done.start:
            self.live.screen.warn(
                f"on --val the output, {self._evaluated(loss, step)}, is not better than the model before training, "
                f"{self._evaluated(done.start, 0)}. Lower --lr, or train on other data"
            )

    def _evaluated(self, loss: float | None, step: int | None) -> str:
        loss = math.nan if loss is None else loss
        cfg = self.live.job.cfg
        other = self.live.preference or cfg.teaching or cfg.scores
        more = "" if other else f", perplexity {perplexity(loss)}"
        return f"eval_loss {loss:.4f}{more}, at step {step or 0:,}"


def _noise(job: Job, step: int, batch: Sequence[MicroBatch]) -> list[Noise | None]:
    """The noise of --neftune for each micro-batch of a step, from 0.

    It is a function of the seed, the step and the place in the step.
    """
    alpha, first, found = job.options.neftune, 0, list[Noise | None]()
    key = zlib.crc32(f"neftune {job.options.seed} {step}".encode()) >> 1
    for mb in batch:
        found.append(neftune(job.cfg, mb.lengths, alpha, key, first) if alpha else None)
        first += sum(mb.lengths)
    return found

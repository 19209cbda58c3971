"""How fast steps are: corrects the estimate by measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trireme.engine.amounts import count, duration
from trireme.engine.build import Inputs
from trireme.engine.planner.advice import elsewhere
from trireme.engine.planner.clock import DIFFERENT, Watch
from trireme.engine.planner.correct import batch_of, corrected
from trireme.engine.planner.lines import ready_line
from trireme.engine.planner.machine import doubt, note_drives
from trireme.engine.planner.predict import Prediction, predict
from trireme.engine.planner.whole import note_compilation
from trireme.engine.queues.trace import Span
from trireme.engine.run.live import Live
from trireme.engine.run.report import estimate

BUSY = 0.5  # share of a step from which a drive's rate is known
SHORT, SETTLED = 0.5, 5  # seconds of a step on a GPU; that step of a run whose first ones load kernels for as long


class Pace:
    """The speed of this process's steps."""

    def __init__(self, live: Live):
        self.live = live
        short = live.job.device.type == "cuda" and live.job.forecast.step.step_s < SHORT
        self.warm = live.progress.step + (SETTLED if short else 2)  # the step that is compared
        self.first_s = 0.0  # seconds of the first step
        self.watch: Watch | None = None  # once warm
        self.differs = False  # steps, for minutes

    @property
    def needs_trace(self) -> bool:
        """Whether the next step is to be traced."""
        return self.differs or self.live.progress.step + 1 == self.warm

    def compare(self, spans: Sequence[Span], micro: Sequence[Inputs], seconds: float) -> bool:
        """Called after each step. Prints the estimate again after the second step (of short steps the fifth), and after
        steps whose time differed for minutes.

        Returns whether the run changed to another plan, through a snapshot.
        """
        tokens = self.live.group.hosts * sum(mb.tokens for mb in micro)
        usual = seconds * self.live.job.work.tokens / tokens  # steps differ in size
        if self.live.progress.step < self.warm:
            self.first_s = self.first_s or seconds
        elif self.watch is None:
            return self._warmed_up(spans, micro, seconds)
        elif self.differs:
            self.differs = False
            return self._changed(spans, micro, seconds)
        else:
            self.differs = self.watch.differs(usual)
            if self.watch.held:
                self._note_drives()
        return False

    def _warmed_up(self, spans: Sequence[Span], micro: Sequence[Inputs], seconds: float) -> bool:
        live, job, cuda = self.live, self.live.job, self.live.job.device.type == "cuda"
        left = job.total_steps - live.progress.step
        found = self._correct(spans, micro, seconds)
        then = live.job.forecast.step.step_s  # steps differ in size
        self.watch = Watch(then)
        said = f"predicted {found.step_s:.3g} s a step, " if cuda else ""
        if left:
            live.screen.say(
                f"warm-up  {said}measured {seconds:.3g} s; expected from now on "
                f"{then:.3g} s, {count(left, 'more step')} in {duration(left * then)}"
            )
        if cuda:
            beyond = max(0.0, self.first_s - then) + max(0.0, seconds - then)  # the second step has the first updates
            live.clock.move(beyond, "steps", "compile")
            note_compilation(job.cfg, job.plan, job.device, live.clock.spent["compile"])
            self._question(found.step_s, then)
        return self._tell(left)

    def _question(self, predicted: float, by_tasks: float) -> None:
        """No step is faster than its machine: if one seems so, other programs ran while the rates were measured.

        Takes the times of its tasks, since the first steps do not wait for all that they write.
        """
        job = self.live.job
        if by_tasks * DIFFERENT < predicted:
            doubt(job.device, job.plan.dtype, job.cfg.scan)
            self.live.screen.say(
                "probe    measured too low, perhaps because other programs ran: the next run measures again"
            )

    def _note_drives(self) -> None:
        """Stores the rates of drives that limited steps for minutes, for the next run's plan."""
        job, step = self.live.job, self.live.job.forecast.step
        if step.busy["ssd"] > BUSY * step.step_s:
            note_drives(job.machine.rates, job.store_dirs)

    def _changed(self, spans: Sequence[Span], micro: Sequence[Inputs], seconds: float) -> bool:
        """Steps take another time for minutes, since drives slow down and recover: corrects the rates."""
        live, before = self.live, self.live.job.machine.rates
        assert self.watch is not None
        self._correct(spans, micro, seconds)
        self._note_drives()
        drives = live.job.machine.rates.ssd_read / before.ssd_read if before.ssd_read else 1.0
        live.screen.say(
            f"speed    {self.watch.step_s:.3g} s a step for minutes, {self.watch.before:.3g} s before"
            + (f"; the SSD has {drives:.2g} times the speed" if not 1 / DIFFERENT < drives < DIFFERENT else "")
        )
        return self._tell(live.job.total_steps - live.progress.step, self.watch.step_s)

    def _correct(self, spans: Sequence[Span], micro: Sequence[Inputs], seconds: float) -> Prediction:
        """Corrects the rates by a traced step; returns what they had predicted."""
        live, job = self.live, self.live.job
        with live.clock.at("plan"):
            found = predict(job.cfg, job.plan, job.machine.rates, batch_of(micro))
        rates = corrected(job.machine.rates, found, spans, seconds)
        live.job = replace(job, machine=replace(job.machine, rates=rates))
        return found

    def _tell(self, left: int, step_s: float | None = None) -> bool:
        """Prints the estimate for `left` steps, and whether a resumed run would be faster with another placement."""
        live, job = self.live, self.live.job
        with live.clock.at("plan"):
            after = estimate(live.job, live.progress.step, live.clock, step_s)
            movable = job.device.type == "cuda" and not job.options.plan and job.plan.hosts == 1
            choice = elsewhere(job.forecast, left) if left and movable else None
        if not live.estimated:  # on a CPU
            live.estimated = live.clock.with_spent(after)
        if left:
            live.screen.say(f"ready    {ready_line(after)}")
        if choice:
            live.screen.say(
                f"plan     another placement would take {choice.step.step_s:.3g} s a step: interrupt the run, then "
                f"trireme --resume {job.out}"
            )
        return False

"""What a terminal and a pipe show: lines that stay, the live line, widths of characters, colours, signals."""

import io
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import on_screen
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import check_page

from trireme.engine.run import screen
from trireme.engine.run.log import Log, read_log
from trireme.engine.run.page import MARKS, PageFacts, page
from trireme.engine.run.signals import NOTICES

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds that time.monotonic says."""
    seconds = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def test_a_terminal_redraws_one_line_and_keeps_the_others(clock):
    terminal = Terminal()
    with screen.to(terminal):
        screen.say("model    a")
        screen.show("step 1/9  loss 2.0")
        screen.say("warning: b")
        clock[0] += 1  # second
        screen.show("step 2/9  loss 1.9")
        screen.show("step 9/9  loss 1.0", final=True)
    assert on_screen(plain(terminal.getvalue())) == ["model    a", "warning: b", "step 9/9  loss 1.0", ""]
    assert "\x1b[1mmodel\x1b[0m" in terminal.getvalue()
    assert "\x1b[1;33mwarning\x1b[0m" in terminal.getvalue()


def test_a_pipe_gets_no_control_characters():
    stream = io.StringIO()
    with screen.to(stream):
        screen.say("a\x1b[31mb\rc\u202e")
        screen.show("step 1/9")
        screen.show("step 2/9")  # within ten seconds
        screen.show("step 9/9", final=True)
    assert stream.getvalue() == "a\\x1b[31mb\\rc\\u202e\nstep 1/9\nstep 9/9\n"


def test_output_that_is_gone_does_not_stop_a_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    with screen.to(Closed()):
        with pytest.raises(OSError, match="No space"):
            screen.say("a")
        screen.forgive()
        screen.say("b")


# ---------------------------------------------------------------- the log


def record(step: int, loss: float) -> dict:
    same = dict(learning_rate=1e-3, grad_norm=1.0, tokens=10, trained_tokens=5, tokens_per_second=100.0, bound="cpu")
    return dict(step=step, loss=loss, step_time_s=0.1, **same)


def test_a_line_stays_for_each_tenth_but_not_within_ten_seconds(tmp_path, clock):
    terminal = Terminal()
    with screen.to(terminal):
        log = Log(tmp_path, 100, 0, 0, [])
        for step in range(1, 101):
            clock[0] += 0.4
            log.step(record(step, 2.0))
        log.close()
    kept = [int(n) for n in re.findall(r"^step +(\d+)/", "\n".join(on_screen(plain(terminal.getvalue()))), re.M)]
    assert kept == [10, 40, 70, 100]


@pytest.mark.parametrize(("losses", "diverges"), [
    ([2.0, 2.1, 1.9, 2.2, 1.8], False), ([0.2, 1.5, 2.4, 0.1, 3.0], False), ([-1.0, -1.2, -0.8], False),
    ([3.3, 900.0, 2400.0], True), ([3.3, 3.0, 2.9, 4.0, 7.0, 9.0, 30.0], True), ([3.0, -3.0, 40.0], True),
])  # fmt: skip
def test_a_run_that_diverges_is_told_while_it_does(tmp_path, losses, diverges):
    stream = io.StringIO()
    with screen.to(stream):
        log = Log(tmp_path, len(losses), 0, 0, [])
        for step, loss in enumerate(losses, 1):
            log.step(record(step, loss))
        log.close()
    assert ("the run diverges" in stream.getvalue()) == log.diverges == diverges


def test_the_summary_is_of_smoothed_losses_and_a_rising_loss_is_told_once(tmp_path):
    stream = io.StringIO()
    with screen.to(stream):
        log = Log(tmp_path, 40, 0, 0, [])
        for step in range(1, 41):
            log.step(record(step, 2.0 + 0.1 * (step % 2) + (step > 20) * step))
        assert "loss 2.05 -> 40" in log.line()
        log.close()
    assert stream.getvalue().count("warning: the loss rises") == 1


def test_a_log_is_cut_to_its_snapshot_and_damaged_lines_are_left_out(tmp_path):
    log = Log(tmp_path, 3, 0, 0, [])
    log.step(record(1, float("nan")))
    length = log.sync()
    log.step(record(2, 1.0))
    log.close()
    path = tmp_path / "log.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    again = Log(tmp_path, 3, 0, length, [])
    again.step(record(2, 0.5))
    again.close()
    path.write_bytes(b"\x00garbage\n" + path.read_bytes())
    assert [(r["step"], str(r["loss"])) for r in read_log(path)] == [(1, "nan"), (2, "0.5")]


def test_a_tracker_that_fails_is_left_out(tmp_path):
    seen, stream = [], io.StringIO()
    with screen.to(stream):
        bad = (lambda _: 1 / 0, lambda: None)
        log = Log(tmp_path, 3, 0, 0, [bad, (seen.append, lambda: None)])
        for step in (1, 2):
            log.step(record(step, 1.0))
        log.close()
    assert len(seen) == 2
    assert stream.getvalue().count("a tracker of --log has failed") == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 999), st.floats(allow_nan=True, allow_infinity=True)), max_size=30))
def test_a_page_is_made_of_any_losses(points):
    records = [dict(step=step, loss=loss) for step, loss in sorted(points, key=lambda point: point[0])]
    begins, ends = MARKS
    examples = [f"[INST] a {begins}b{ends} <c>", f"a {begins}cut off", f"a{ends}"]
    html = page([*records, dict(step=1, eval_loss=2.0, sample="<b>")], PageFacts("<t>", examples=examples))
    check_page(html)
    assert html.count("<svg") == 1
    assert "<b>" not in html
    assert "[INST] a <mark>b</mark> &lt;c&gt;" in html
    assert html.count("<mark>") == 2


# ---------------------------------------------------------------- signals, exit codes, streams


def command(here: Path, *words: str, **more) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "trireme", *words]
    return subprocess.Popen(argv, cwd=here, env=environment, text=True, **more)


LONG = ["model", "--data", "stories.txt", "--seq-len", "64", "--batch-size", "2", "--max-steps", "9999", "--out", "out"]


@pytest.mark.full
def test_a_signal_saves_and_the_next_command_resumes(here):
    words, log = LONG, here / "out/log.jsonl"
    for number in (signal.SIGUSR1, signal.SIGTERM):
        size = log.stat().st_size if log.exists() else 0
        run = command(here, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not log.exists() or log.stat().st_size <= size:
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        run.send_signal(number)
        out, err = run.communicate(timeout=100)
        assert run.returncode == 130
        assert ("again: exit immediately" in err) == (number not in NOTICES)
        words = re.search(r"Resume: trireme (--resume out)", out)[1].split()


def test_help_and_version_come_without_torch(here):
    code = "import sys\nfrom trireme.engine.run.cli import parse\ntry:\n parse(['--help'])\n"
    code += "except SystemExit as end:\n print(end.code, 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("0 False\n"), done
    assert "--keep-state" in done.stdout


@pytest.mark.full
def test_a_closed_pipe(here):
    run = command(here, "--help", stdout=subprocess.PIPE)
    run.stdout.close()
    assert run.wait(60) in (0, 141)


LIMITED = [  # what a process does not have, and the exit code
    (lambda: os.closerange(0, 3), 0),
    (lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)), 3),
]


@pytest.mark.full
@pytest.mark.parametrize(("limit", "code"), LIMITED)
def test_what_a_process_lacks_is_no_traceback(here, limit, code):
    run = command(here, *LONG[:-4], "--max-steps", "1", stderr=subprocess.PIPE, preexec_fn=limit)
    assert (run.communicate(timeout=100)[1].count("error: "), run.returncode) == (code > 0, code)


@pytest.mark.full
def test_on_a_terminal_the_report_is_short(here):
    """About 22 lines before the first step at 120 columns, with the example in brackets."""
    master, terminal = pty.openpty()
    run = command(here, *LONG[:-4], "--max-steps", "2", stdout=terminal, stderr=terminal)
    os.close(terminal)
    text = ""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        text += part.decode(errors="replace")
    assert run.wait(60) == 0
    before = plain(text).split("step")[0].splitlines()
    lines = [line for line in plain(text).splitlines() if line.strip()]
    first = next(n for n, line in enumerate(lines) if line.lstrip("\r\x1b[K").startswith("step "))
    assert first <= 24, "\n".join(lines[:first])
    assert any(line.startswith("example") and "[" in line for line in lines), before
    assert "runs/model" in text

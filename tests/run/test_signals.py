"""Asked once a run ends well, twice at once; a hang-up that comes with another signal is no second one."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from trireme.engine.run.options import Options
from trireme.engine.run.signals import stop_signals
from trireme.engine.run.train import finetune

PROGRAM = """
import os, signal, sys
from trireme.engine.run.signals import stop_signals
numbers, together = eval(sys.argv[1]), sys.argv[2] == "together"
for n in numbers:
    signal.signal(n, signal.SIG_DFL)  # the tests may have been started without a terminal
tell = lambda line: print(line, file=sys.stderr)
with stop_signals(lambda n: tell(f"first {n}"), lambda: tell("second")):
    if together:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for n in numbers:
        os.kill(os.getpid(), n)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    print("goes on")
"""
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize("how", ["apart", "together"])
@pytest.mark.parametrize(
    ("numbers", "ends"),
    [
        ([INT], False),
        ([HUP], False),
        ([TERM, HUP], False),
        ([HUP, TERM], False),
        ([INT, TERM], True),
        ([HUP, INT, TERM], True),
        ([TERM, HUP, INT], True),
    ],
)
def test_who_insists(numbers, ends, how):
    command = [sys.executable, "-c", PROGRAM, str([int(n) for n in numbers]), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "goes on" in done.stdout) == ((130, False) if ends else (0, True)), done.stderr
    assert done.stderr.count("first") == 1
    assert ("second" in done.stderr) == ends


def test_afterwards_all_is_as_before():
    before = signal.getsignal(INT)
    with stop_signals(str, str):
        assert signal.getsignal(INT) is not before
    assert signal.getsignal(INT) is before


def test_from_python_in_any_thread(here):
    """Signals belong to the main thread; the run is what is returned."""
    given = Options(model="model", data="stories.txt", out="out", seq_len=64, max_steps=2)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(finetune, given).result()
    assert (run.progress.step, run.log.totals.steps) == (2, 2)
    assert (here / "out" / "model.safetensors").exists()

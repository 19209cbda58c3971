"""The run's log: files survive a resume and a full disk, the line fits the terminal, the picture shows the losses."""

import ast
import csv
import errno
import functools
import io
import json
import math
import os
import re
import shutil
import sys
import time
import tracemalloc
import types
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from command import TRAIN, fails, on_screen

from trireme.engine.amounts import compact, duration, gb, percent, seconds
from trireme.engine.data import dataset
from trireme.engine.queues.names import title
from trireme.engine.run import loop, main
from trireme.engine.run import screen as screen_module
from trireme.engine.run.options import Options
from trireme.engine.run.output import log as log_module
from trireme.engine.run.output import records
from trireme.engine.run.output.curve import MOST, Curve, draw
from trireme.engine.run.output.log import RunLog
from trireme.engine.run.output.records import COLUMNS
from trireme.engine.run.screen import Screen, one_line, progress, wrapped
from trireme.engine.run.train import finetune
from trireme.kernels import host_adamw
from trireme.storage import devices

ROOT = Path(__file__).parents[3]

FULL = dict(
    step=7, epoch=0.5, loss=2.18712, learning_rate=1.4e-7, grad_norm=3.14, tokens_per_second=11700.0,
    trained_tokens_per_second=115.0, step_time_s=48.13, mfu=0.291, gpu_mem_gib=21.1, ram_gib=115.2,
    ssd_read_gbs=3.1, ssd_written_tb=0.2, bound="ssd_write",
)  # fmt: skip


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path) -> list[dict]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def screen(stream) -> Screen:
    """As a run has it after its report."""
    made = Screen(stream)
    made.forgive()
    return made


def run(out, steps, total=10, since=None, stream=None, told=()):
    log = RunLog(out, total, screen(stream or io.StringIO()), since, trackers=told)
    for step in steps:
        log.step({"step": step, "loss": 5.0 / step, "learning_rate": 0.1})
    return log


def test_both_files_hold_every_step_at_once(tmp_path):
    log = run(tmp_path, [1, 2])
    log.step(FULL)
    assert [r["step"] for r in lines(tmp_path / "log.jsonl")] == [1, 2, 7]  # before close: line by line
    assert lines(tmp_path / "log.jsonl")[-1] == FULL
    rows = table(tmp_path / "log.csv")
    assert list(rows[0]) == COLUMNS
    assert rows[-1] == {k: str(FULL.get(k, "")) for k in COLUMNS}
    log.close()


def test_resume_drops_what_came_after_and_a_torn_line(tmp_path):
    log, stream = run(tmp_path, range(1, 6)), io.StringIO()
    mark = log.sync(5, None)
    log.eval({"step": 5, "eval_loss": 1.0})  # after the snapshot: it is made again
    log.step({"step": 6, "loss": 9.0})
    log.close()
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    run(tmp_path, [6, 7], since=mark, stream=stream).close()
    assert [r.get("loss") for r in lines(tmp_path / "log.jsonl")] == [5.0 / step for step in range(1, 8)]
    assert [r["step"] for r in table(tmp_path / "log.csv")] == ["1", "2", "3", "4", "5", "6", "7"]
    assert "warning" not in stream.getvalue()


@pytest.mark.parametrize(("damage", "left"), [
    (lambda text: text.replace(b"0.1", b"0.2", 1), [1, 2, 3, 4, 5]),  # a line changed
    (lambda text: text.replace(b"0.1", b"\xb0.1", 1), [2, 3, 4, 5]),  # no UTF-8
    (lambda text: text[text.index(b"\n") + 1 :], [2, 3, 4, 5]),
    (lambda text: text.replace(b"\n", b"", 1), [3, 4, 5]),
    (lambda text: text[: text.index(b'"step": 4')], [1, 2, 3]),
    (lambda text: text.replace(b'"step": 1', b'"step": true', 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b'"loss": 5.0', b'"loss": []', 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b"9" * 400, 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b"9" * 5000, 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b"[" * 100_000, 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b"null", 1), [1, 2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b'0.1, "bound": "\\ud800"', 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b'0.1, "bound": "\\u001b[2J"', 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b'0.1, "bound": "=HYPERLINK(1),,"', 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b'0.1, "bound": "compute%s"' % (b"9" * 99), 1), [2, 3, 4, 5]),
    (lambda text: text.replace(b"0.1", b'0.1, "bound": "compute1"', 1), [1, 2, 3, 4, 5]),
    (lambda text: bytes(len(text)), []),
    (lambda text: b"", []),
    (lambda text: None, []),
])  # fmt: skip
def test_a_log_that_was_damaged_is_said_and_the_run_goes_on(tmp_path, damage, left):
    log, stream, path = run(tmp_path, range(1, 6)), io.StringIO(), tmp_path / "log.jsonl"
    mark = log.sync(5, None)
    log.step({"step": 6, "loss": 9.0})
    log.close()
    text = damage(path.read_bytes())
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    again = run(tmp_path, [6], since=mark, stream=stream)
    assert "log.jsonl is not as it was at step 5: lines were lost or changed" in stream.getvalue()
    assert again.summary().startswith(f"done     {len(left) + 1} step")
    again.close()
    assert [r["step"] for r in lines(path)] == [*left, 6]
    assert [r["step"] for r in table(tmp_path / "log.csv")] == [str(step) for step in (*left, 6)]


@pytest.mark.parametrize("evaluated", [None, 0, 5])
@pytest.mark.parametrize("lost", [False, True])
def test_evaluations_after_the_snapshot_are_dropped(tmp_path, evaluated, lost):
    """They are made again; also where a line was lost, and the length of the log no longer says which they are."""
    log, path = run(tmp_path, range(1, 6)), tmp_path / "log.jsonl"
    made = [step for step in (0, 5) if evaluated is not None and step <= evaluated]
    for step in made:
        log.eval({"step": step, "eval_loss": 1.0})
    mark = log.sync(5, evaluated)
    for step in {0, 5}.difference(made):
        log.eval({"step": step, "eval_loss": 1.0})
    log.close()
    if lost:
        path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    run(tmp_path, [6], since=mark).close()
    assert [r["step"] for r in lines(path) if "eval_loss" in r] == made
    assert [r["step"] for r in lines(path) if "loss" in r] == list(range(1 + lost, 7))


def test_the_log_is_on_the_drive_before_its_name_and_with_every_snapshot(tmp_path, monkeypatch):
    """A power failure leaves the log as it was at the last snapshot at least; one in a resume, the old or the new."""
    calls, names = [], {"fsync": os.fsync, "fdatasync": os.fdatasync, "replace": os.replace}

    def noted(name, what, *to):
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(to[0])
        calls.append((name, os.path.relpath(path, tmp_path)))
        return names[name](what, *to)

    for name in names:
        monkeypatch.setattr(os, name, functools.partial(noted, name))
    log = run(tmp_path, [1])
    made = [[("fsync", f".{n}.partial"), ("replace", n), ("fsync", ".")] for n in ("log.jsonl", "log.csv")]
    assert calls == made[0] + made[1]
    calls.clear()
    mark = log.sync(1, None)
    assert {("fdatasync", "log.jsonl"), ("fdatasync", "log.csv")} <= set(calls)
    log.step({"step": 2, "loss": 1.0})
    calls.clear()
    log.close()
    assert ("fdatasync", "log.jsonl") in calls
    calls.clear()
    run(tmp_path, [2], since=mark).close()
    assert calls[:6] == made[0] + made[1]


@pytest.mark.full
def test_memory_does_not_grow_with_the_steps(tmp_path):
    with open(os.devnull, "w") as nowhere:
        log, sizes = run(tmp_path, [], total=10**6, stream=nowhere), []
        tracemalloc.start()
        for step in range(1, 20_001):
            log.step(FULL | {"step": step})
            if step in (5_000, 20_000):
                sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert sizes[1] - sizes[0] < 100_000, sizes  # seven bytes a step
        mark, summary = log.sync(20_000, None), log.summary()
        log.close()
        tracemalloc.start()
        log = run(tmp_path, [], since=mark, stream=nowhere)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000, "nor when it is read again"
        tracemalloc.stop()
        assert log.summary() == summary
        assert log.sync(20_000, None) == mark
        log.close()


def test_a_full_disk_delays_lines_and_tears_none(tmp_path, monkeypatch):
    stream = io.StringIO()
    log = run(tmp_path, [1], stream=stream)
    room, real_write = [20], os.write

    def write(fd, data):
        data = data[: room[0]]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(data)
        return real_write(fd, data)

    monkeypatch.setattr(records.os, "write", write)
    for step in (2, 3):
        log.step({"step": step, "loss": 1.0})
        assert [r["step"] for r in lines(tmp_path / "log.jsonl")] == [1]
        assert (tmp_path / "log.jsonl").read_text().endswith("\n")
    room[0] = 10**6
    log.step({"step": 4, "loss": 1.0})
    assert [r["step"] for r in lines(tmp_path / "log.jsonl")] == [1, 2, 3, 4]
    assert [r["step"] for r in table(tmp_path / "log.csv")] == ["1", "2", "3", "4"]
    assert stream.getvalue().count("No space left on device") == 1
    log.close()


def test_nan_stays_json(tmp_path):
    log = run(tmp_path, [])
    log.step({"step": 1, "loss": float("nan")})
    mark = log.sync(1, None)
    log.close()
    assert lines(tmp_path / "log.jsonl") == [{"step": 1, "loss": "nan"}]
    again = run(tmp_path, [2], since=mark)
    assert "loss nan -> 2.5" in again.summary()
    again.close()


def test_a_reader_that_has_gone_does_not_stop_the_run(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    run(tmp_path, [1, 2], stream=Gone()).close()
    assert len(lines(tmp_path / "log.jsonl")) == 2


def test_the_line():
    parts = progress(FULL, 2292, 110040.0)
    assert one_line(parts) == (
        "step     7/2,292  loss 2.1871  lr 1.4e-07  grad_norm 3.1  11.7k tok/s (115 trained)  48.1 s  mfu 29 %  "
        "gpu 21.1 GiB ram 115 GiB  bound: ssd_write  eta 30h34m"
    )
    assert one_line(parts, 100) == (
        "step     7/2,292  loss 2.1871  lr 1.4e-07  11.7k tok/s (115 trained)  bound: ssd_write  eta 30h34m"
    )
    assert one_line(parts, 45) == "step     7/2,292  loss 2.1871  eta 30h34m"
    assert one_line(parts, 20) == "step     7/2,292  l"
    assert one_line(progress({"step": 10, "loss": 1.0, "mfu": None}, 10, None)) == "step 10/10  loss 1.0000"


def test_figures():
    assert [duration(s) for s in (0.4, 41, 200, 110040)] == ["0s", "41s", "3m20s", "30h34m"]
    assert [compact(n) for n in (0, 243, 999.6, 11700, 123456, 1.24e6, 5e9)] == [
        "0", "243", "1k", "11.7k", "123k", "1.24M", "5B",
    ]  # fmt: skip
    sizes = (500, 999_400, 999_600, 3.2e9, 999.7e9, 1.2e18)
    assert [gb(n) for n in sizes] == ["0.5 kB", "999 kB", "1 MB", "3.2 GB", "1 TB", "1,200 PB"]
    assert [seconds(s) for s in (0.5994, 999.4, 999.6)] == ["0.599 s", "999 s", "16m40s"]
    shares = (0, 0.0004, 0.004, 0.0096, 0.042, 0.0996, 0.42, 1, 10)
    assert [percent(share) for share in shares] == [
        "0 %", "0.04 %", "0.4 %", "1 %", "4.2 %", "10 %", "42 %", "100 %", "1000 %",
    ]  # fmt: skip


def test_a_pipe_gets_plain_lines_now_and_then(tmp_path, monkeypatch):
    stream, clock = io.StringIO(), iter(range(0, 1000, 4))
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: next(clock))
    log = run(tmp_path, range(1, 11), stream=stream)
    log.eval({"step": 10, "eval_loss": 0.5, "sample": 'a "b"\n'})
    log.close()
    said = stream.getvalue()
    assert "\r" not in said
    assert "\x1b" not in said
    steps = [int(n) for n in re.findall(r"^step +(\d+)/10 ", said, re.M)]
    assert steps[0] == 1
    assert steps[-1] == 10
    assert 2 < len(steps) < 10
    assert 'step 10  eval_loss 0.5000  perplexity 1.649 (best)  sample: "a \\"b\\"\\n"' in said


class Terminal(io.StringIO):
    def isatty(self):
        return True


CONTROLS = "\x1b]52;c;Zm9v\x07\r\x9b31m"


def test_a_models_text_has_no_controls_for_a_terminal():
    text = "a\tb\n\u200f日本語 👩 "
    for stream, shown in ((Terminal(), "\\x1b]52;c;Zm9v\\x07\\r\\x9b31m"), (io.StringIO(), CONTROLS)):
        Screen(stream).text(text + CONTROLS)
        assert stream.getvalue() == text + shown


def test_a_terminal_has_one_live_line_and_lines_that_stay(tmp_path, monkeypatch):
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(screen_module, "LIVE_SECONDS", 0.0)
    log = run(tmp_path, [1, 2], stream=stream)
    log._screen.say("saved")
    assert [line[:25] for line in on_screen(stream.getvalue())] == ["saved", "step  2/10  loss 2.5000  "]
    assert max(len(line) for line in on_screen(stream.getvalue())) < 30
    log.step({"step": 10, "loss": 0.5, "learning_rate": 0.1})
    log._screen.say("done")
    log.close()
    assert on_screen(stream.getvalue()) == ["saved", "step 10/10  loss 0.5000", "done", ""], "the last step stays"


def test_a_run_that_stops_takes_its_live_line_away(tmp_path, monkeypatch):
    stream = Terminal()
    log = run(tmp_path, [1], stream=stream)
    log._screen.say("saved")
    log.close()
    assert on_screen(stream.getvalue()) == ["saved", ""]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), BrokenPipeError()])
def test_an_output_that_cannot_be_written_counts_until_the_run_has_its_log(error):
    class Bad(io.StringIO):
        def write(self, text):
            raise error

    bad = Screen(Bad())
    with pytest.raises(type(error)):
        bad.say("the plan")
    bad.forgive()
    bad.say("a step")
    bad.warn("a step")


def test_only_the_screen_speaks():
    """One channel: nothing else in the package prints, warns or logs, but storage where nobody listens."""
    may = {ROOT / "engine" / "run" / "screen.py", ROOT / "storage" / "files.py"}
    voices = re.compile(r"print|warnings\.warn|logging\.\w+|log\.(info|warning|error)|sys\.std(out|err)\.write")
    for room in ("kernels", "models", "storage", "engine"):
        for path in {*(ROOT / room).rglob("*.py")} - may:
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            spoken = [node.lineno for node in calls if voices.fullmatch(ast.unparse(node.func))]
            assert not spoken, f"{path} speaks for itself"


@pytest.mark.full
def test_what_is_slow_here_is_said_at_the_start(made, tmp_path, monkeypatch, capsys):
    """A drive without O_DIRECT, no compiler, files that do not travel: each is a line of the run."""
    shutil.copytree(made / "model", tmp_path / "model")
    (tmp_path / "model" / "more.json").symlink_to("/proc/version")
    monkeypatch.setattr(devices, "is_direct", lambda folder: False)
    monkeypatch.setattr(host_adamw, "_built", lambda: (None, "no C++ compiler"))
    data = (str(made / "stories.txt"),)
    finetune(Options(model=str(tmp_path / "model"), data=data, out=str(tmp_path / "out"), seq_len=64, max_steps=1))
    said = capsys.readouterr()
    assert said.err == ""
    warnings = [line.removeprefix("warning: ") for line in said.out.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        f"{tmp_path}/model: not copied with the weights: more.json is a link out of the folder",
        f"{tmp_path}/out/store: no O_DIRECT; slower, and through the page cache",
        "AdamW runs in torch on the CPU, several times slower: no C++ compiler",
    ]


def test_evaluations_are_in_the_time_to_go_and_in_the_last_line(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    log = RunLog(tmp_path, 10, screen(io.StringIO()), None, evaluations=3)
    log.eval({"step": 0, "eval_loss": 4.0, "eval_time_s": 60.0})
    record = {"step": 1, "loss": 4.0, "step_time_s": 2.0}
    log.step(record)
    assert log._eta(record) == 9 * 2.0 + 2 * 60.0
    now[0] = 33.0
    log.eval({"step": 1, "eval_loss": 3.0, "eval_time_s": 30.0})
    log.step(record | {"step": 2})
    assert log._eta(record | {"step": 2}) == 8 * 3.0 + 45.0, "a step takes 3 s and what is between"
    assert "done     2 steps, 4s, 2 evaluations 1m30s, loss" in log.summary()
    log.close()
    assert [r.get("eval_time_s") for r in lines(tmp_path / "log.jsonl")] == [60.0, None, 30.0, None]


def test_tokens_are_counted_and_not_computed_from_rounded_rates(tmp_path):
    """The same in a run and in one that was resumed; older logs have rates alone."""
    totals = log_module.Totals()
    totals.add({"step": 0, "eval_loss": 4.0, "eval_time_s": 2.0, "sample": "a"})
    for took in (0.0331, 0.0007):
        record = {"step": 1, "loss": 4.0, "step_time_s": took, "tokens_per_second": round(64 / took * 1.01, 1)}
        totals.add(record | {"tokens": 64, "trained_tokens": 60})
    totals.add({"step": 3, "loss": 4.0, "step_time_s": 2.0, "tokens_per_second": 5.0, "trained_tokens_per_second": 4.0})
    assert (totals.tokens, totals.trained) == (138, 128)
    assert "1 evaluation with samples 2s" in totals.line()
    totals.add({"step": 3, "eval_loss": math.nan})
    assert totals.best is None
    assert "best" not in totals.line()


def test_an_evaluation_shows_how_far_it_is(tmp_path, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(screen_module, "LIVE_SECONDS", 0.0)
    monkeypatch.setattr(screen_module, "PATIENCE", 0.0)
    with screen(stream).working("evaluating", 245_000, "tokens") as more:
        more(12_300)
        assert re.match(r"evaluating  12.3 of 245 k tokens  \S+ k tokens/s  eta ", on_screen(stream.getvalue())[-1])
    with screen(stream).working("evaluating", 900, "tokens") as more:
        more(300)
        assert "evaluating  300 of 900 tokens" in on_screen(stream.getvalue())[-1]
    with screen(stream).working("merging", 10**12) as more:
        more(10**8)
        assert "eta" not in on_screen(stream.getvalue())[-1], "so far only small files are written"
        more(10**9)
        assert "eta" in on_screen(stream.getvalue())[-1]


def test_long_work_says_how_far_it_is_and_leaves_the_step_line_as_it_was(tmp_path, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(screen_module, "LIVE_SECONDS", 0.0)
    log = run(tmp_path, [1], stream=stream)
    before = on_screen(stream.getvalue())
    with log._screen.working("saving", 4 * 10**9) as more:
        more(10**9)
        assert on_screen(stream.getvalue()) == before, "what is done in a moment is not worth a line"
        monkeypatch.setattr(screen_module, "PATIENCE", 0.0)
        more(10**9)
        last = on_screen(stream.getvalue())[-1]
        assert last.startswith("saving  2 of 4 GB  ")
        assert " eta 0s" in last
    with log._screen.working("reading stories.txt", 1_090_000) as more:
        more(287_000)
        assert re.match(r"reading stories.txt  0.287 of 1.09 MB  \S+ MB/s", on_screen(stream.getvalue())[-1])
    assert on_screen(stream.getvalue()) == before


def test_the_picture(tmp_path):
    log = RunLog(tmp_path, 3000, screen(io.StringIO()), title="<out> & more")
    log.eval({"step": 0, "eval_loss": 4.0})
    for step in range(1, 3001):
        log.step({"step": step, "loss": 4.0 / step if step != 5 else float("nan")})
    log.eval({"step": 3000, "eval_loss": 0.5})
    log.close()
    text = (tmp_path / "loss.svg").read_text()
    svg = ET.fromstring(text)
    ns = "{http://www.w3.org/2000/svg}"
    raw, smooth, evals = (e.get("points").split() for e in svg.iter(ns + "polyline"))
    assert 500 < len(raw) <= 1001
    assert len(smooth) == len(raw)
    assert len(evals) == 2
    heights = [float(p.split(",")[1]) for p in smooth]
    assert heights[0] < heights[-1], "y grows downwards: a falling loss falls"
    assert "eval: 4 to 0.5" in text
    assert len(text) < 60_000
    assert len(list(svg.iter(ns + "circle"))) == 3, "two evaluations, and the best"
    words = [e.text for e in svg.iter(ns + "text")]
    assert words[0] == "<out> & more"
    assert {"optimizer step", "loss (nats per token)"} < set(words)


@pytest.mark.parametrize("width", [40, 60, 120])
def test_a_terminal_breaks_no_words(width):
    """A table's spaces stay; a path longer than a line is whole."""
    line = "data     stories.txt: 12,480 rows, format   messages   " + "/a" * 70 + " fits and is embedded " * 5
    parts = wrapped(line, width).split("\n")
    assert [word for part in parts for word in part.split()] == line.split()
    assert all(len(part) < width or len(part.split()) == 1 for part in parts)
    assert all(part.startswith(" " * 9) and part[9] != " " for part in parts[1:])
    assert wrapped("  short   line", width) == "  short   line"
    command = "trireme --resume runs/" + "x" * 20
    assert command in wrapped("asked to stop: saved. Resume: " + command + "; or " + "leave it. " * 12, width)


def test_a_long_step_shows_its_seconds(monkeypatch):
    monkeypatch.setattr(screen_module, "PATIENCE", 0.0)
    monkeypatch.setattr(screen_module, "TICK", 0.001)
    stream = Terminal()
    shown = screen(stream)
    shown.show({"step": "step 1/9", "loss": "loss 2.0"}, False)
    with shown.passing("step 2/9", 52.0):
        for _ in range(10_000):
            if "step 2/9  0s of about 52s  loss 2.0" in stream.getvalue():
                break
            time.sleep(0.001)
    assert "step 2/9  0s of about 52s  loss 2.0" in stream.getvalue()
    shown.show({"step": "step 2/9", "loss": "loss 1.5"}, False)
    assert on_screen(stream.getvalue())[-1] == "step 2/9  loss 1.5"


def test_a_long_step_has_a_line_now_and_then_in_a_pipe_and_a_notebook(monkeypatch):
    monkeypatch.setattr(screen_module, "PLAIN_STEP", 0.0)
    monkeypatch.setattr(screen_module, "TICK", 0.001)
    stream = io.StringIO()
    shown = screen(stream)
    with shown.passing("step 2/9", 520.0):
        for _ in range(10_000):
            if stream.getvalue():
                break
            time.sleep(0.001)
    assert stream.getvalue() == "step 2/9  0s of about 8m40s\n", "and no more of them within ten seconds"


@pytest.mark.parametrize(("losses", "evals"), [([], []), ([(1.0, 2.0)], []), ([], [(3.0, 0.0)])])
def test_the_picture_of_hardly_anything(losses, evals):
    assert "nats" in draw(losses, evals)
    ET.fromstring(draw(losses, evals))


@pytest.mark.parametrize("steps", [MOST - 1, MOST, 3 * MOST + 5, 50_001])
def test_a_curve_keeps_its_shape_in_bounded_memory(steps):
    """Below MOST every point as it is; beyond, each is the mean of as many neighbours, and together they are all."""
    curve, added = Curve(), [(float(x), 5.0 / x) for x in range(1, steps + 1)]
    for k, (x, y) in enumerate(added):
        curve.add(x, y)
        if k % 7 == 0:
            curve.add(x, float("nan"))
            curve.add(x, float("inf"))
            curve.add(x, 1e300)
    points = curve.points
    if steps < MOST:
        assert points == added
        return
    each = round(points[1][0] - points[0][0])
    assert MOST / 2 <= len(points) < MOST
    assert len(points) == -(-steps // each)
    for k, (x, y) in enumerate(points):
        merged = added[k * each : (k + 1) * each]
        assert np.allclose((x, y), np.mean(merged, axis=0), rtol=1e-12)


def test_a_tracker_gets_every_record(tmp_path):
    got = []
    run(tmp_path, [1, 2], told=[(got.append, None)]).close()
    assert [r["step"] for r in got] == [1, 2]


def test_a_tracker_that_fails_is_left_out(tmp_path):
    def broken(*record):
        raise ConnectionError("no route")

    stream = io.StringIO()
    run(tmp_path, [1, 2], stream=stream, told=[(broken, broken)]).close()
    assert len(lines(tmp_path / "log.jsonl")) == 2
    assert stream.getvalue().count("no route") == 1


# ---------------------------------------------------------------- trackers


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "comet"])
def test_a_tracker_that_is_not_there_is_refused_before_the_data_is_read(here, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    monkeypatch.setattr(dataset, "tokenize", None)
    said = fails(capsys, here, *TRAIN, "--log", name)
    assert f"--log {name}: it is not installed. pip install {log_module.PACKAGES.get(name, name)}" in said


@pytest.mark.full
def test_tensorboard_and_a_trace_are_left_with_the_run(here, monkeypatch):
    """TensorBoard's writer is played: it is not among the dependencies."""
    got, module = [], types.ModuleType("torch.utils.tensorboard")
    add, close = (lambda _, key, value, step: got.append((key, step))), (lambda _: got.append("end"))
    module.SummaryWriter = type(
        "Writer", (), {"__init__": lambda _, folder: got.append(folder), "add_scalar": add, "close": close}
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main.main([*TRAIN, "--log", "tensorboard,trace", "--val", "0.2", "--eval-every", "1"]) == 0
    assert (got[0], got[-1]) == ("out/tensorboard", "end")
    assert {("loss", 1), ("loss", 2), ("learning_rate", 2), ("grad_norm", 2)} <= set(got)
    events = json.loads(Path("out/trace.json").read_text())["traceEvents"]
    queues = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    computed = Counter(event["name"].split()[0] for event in spans if event["tid"] == queues[title("compute")])
    assert computed["forward"] == computed["backward"] > 0, "of a step, and no evaluation"
    assert all(event["dur"] >= 0 for event in spans)


class Wandb(types.ModuleType):
    """The part of W&B's client that a run uses."""

    def __init__(self, key: bool = True):
        super().__init__("wandb")
        self.key, self.begun, self.got = key, [], []

    def init(self, **given):
        if not self.key:
            raise RuntimeError("api_key not configured (no-tty). call wandb.login(key=[your_api_key])\nmore of it")
        self.begun.append((given.get("id"), given.get("resume")))
        log = lambda record, step: self.got.append(step)
        return types.SimpleNamespace(id=given.get("id") or "made-up", log=log, finish=lambda: self.got.append("end"))


def test_without_a_key_nothing_is_read_and_what_to_do_is_said(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb(key=False))
    monkeypatch.setattr(dataset, "tokenize", None)
    said = fails(capsys, here, *TRAIN, "--log", "wandb")
    assert "--log wandb: api_key not configured" in said
    assert "Log in with `wandb login`, or set WANDB_MODE=offline, or leave it out." in said


@pytest.mark.full
def test_a_resumed_run_goes_on_in_its_own_run_there(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := Wandb())
    step = loop.Run._step

    def once(self):
        step(self)
        raise KeyboardInterrupt

    argv = [*TRAIN[:-1], "4", "--save-every", "1", "--log", "wandb"]
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_step", once)
        assert main.main(argv) == 130
    assert main.main(["--resume", "out"]) == 0
    assert fake.begun == [(None, None), ("made-up", "allow")]
    assert fake.got == [1, "end", 2, 3, 4, "end"]


def played(name: str, got: list) -> types.ModuleType:
    """The part of MLflow's or Comet's client that a run uses: what it hears, into `got`."""
    hears = lambda call: lambda *given, **named: got.append((call, *given, *named.values()))
    found = types.ModuleType(name)
    if name == "mlflow":
        start = lambda **given: (
            got.append(("start", given)) or types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
        )
        calls = dict(set_experiment=hears("experiment"), log_params=hears("options"), log_metrics=hears("metrics"))
        vars(found).update(calls, start_run=start, end_run=hears("end"))
        return found
    experiment = types.SimpleNamespace(
        set_name=hears("name"), log_parameters=hears("options"), log_metrics=hears("metrics"), end=hears("end"),
        get_key=lambda: "r1",
    )  # fmt: skip
    found.start = lambda **given: got.append(("start", given)) or experiment
    return found


@pytest.mark.parametrize(
    ("name", "module", "first", "again"),
    [
        ("mlflow", "mlflow", {"run_name": "out"}, {"run_id": "r1"}),
        ("comet", "comet_ml", {"project_name": "trireme", "mode": "create"},
         {"project_name": "trireme", "experiment_key": "r1", "mode": "get"}),
    ],
)  # fmt: skip
def test_other_trackers_hear_numbers_and_go_on_in_their_own_run(tmp_path, monkeypatch, name, module, first, again):
    monkeypatch.setitem(sys.modules, module, played(module, got := []))
    (tmp_path / "out").mkdir()
    for resume in (None, "out"):
        given = Options(log=(name,), out=str(tmp_path / "out"), resume=resume, lora=4)
        with log_module.open_trackers(given, Screen(io.StringIO())) as told:
            run(tmp_path, [1 if resume is None else 2], told=told)
    assert [call[1] for call in got if call[0] == "start"] == [first, again]
    metrics = [call[1:] for call in got if call[0] == "metrics"]
    assert metrics == [({"loss": 5.0, "learning_rate": 0.1}, 1), ({"loss": 2.5, "learning_rate": 0.1}, 2)]
    assert sum(call[0] == "options" for call in got) == 1
    assert got[-1] == ("end",)


def test_a_tracker_that_cannot_end_is_told(tmp_path, monkeypatch):
    def broken():
        raise ConnectionError("no route")

    monkeypatch.setitem(log_module.TRACKERS, "wandb", lambda out, options, known: ("", (None, broken)))
    stream = io.StringIO()
    with log_module.open_trackers(Options(log=("wandb",)), Screen(stream)):
        pass
    assert stream.getvalue().count("no route") == 1

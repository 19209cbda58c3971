"""The benchmarks of many runs: their lines are arguments that step.py and the command accept."""

from types import SimpleNamespace

import pytest
from script_files import script

from trireme.engine.plan import DoesNotFit, Limits
from trireme.engine.planner.sizes import find_model, names
from trireme.engine.run.cli import parse

estimates, choice = script("bench/estimates"), script("bench/choice")
bench_step = choice.bench_step


@pytest.mark.parametrize("line", [*estimates.STEPS, *estimates.STEPS_ON_A_CPU, *choice.LINES])
def test_every_line_of_steps_is_one_that_step_takes(line):
    given = bench_step.arguments(line.removesuffix("--store").split())
    wanted = bench_step.wanted_of(given, find_model(given.model), "BF16", Limits(15 << 30, 60 << 30))
    assert wanted.sizes


@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-30b", "nemotron-3-nano"])
def test_slices_are_refused_where_no_experts_can_have_them(model):
    given = bench_step.arguments([model, "--slices", "2"])
    with pytest.raises(DoesNotFit, match="no frozen experts"):
        bench_step.wanted_of(given, find_model(model), "BF16", Limits(15 << 30, 60 << 30))


@pytest.mark.parametrize("warmup", [0, 1, 2, 3])
def test_a_step_is_timed_after_any_number_of_others(warmup, monkeypatch):
    queues = SimpleNamespace(devices=(), drain=lambda: None, trace=lambda: ["span"])
    engine = SimpleNamespace(cfg=None, queues=queues, optimizer=SimpleNamespace(flush=lambda: None))
    monkeypatch.setattr(bench_step, "_step", lambda *given: SimpleNamespace(loss=1.0, grad_norm=1.0))
    given = bench_step.arguments(["llama-tiny", "--warmup", str(warmup), "--steps", "1"])
    run = bench_step.run_steps(given, engine, lambda step: [])
    assert (len(run.times), len(run.losses)) == (1, warmup + 1)
    assert bool(run.warm) == (warmup > 2)


@pytest.mark.parametrize("line", [*estimates.RUNS, *estimates.RUNS_ON_A_CPU])
def test_every_line_of_runs_is_a_command(line, tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "make_model", lambda folder, name, text: folder / name)
    monkeypatch.setattr(estimates.demo, "make_text", lambda *given, seed: None)
    monkeypatch.setattr(estimates, "make_data", lambda folder, kind: folder / f"{kind}.jsonl")
    options = parse(estimates.run_words(line, tmp_path))[1]
    assert options.max_steps
    assert options.seq_len
    assert line.split()[0] in names()
    assert line.split()[1] in estimates.DATA


def test_the_summary_says_how_far_estimates_are_off():
    rows = [{"pairs": {"step s": (1.05, 1.0)}}, {"pairs": {"step s": (0.7, 1.0)}}]
    assert estimates.row("line", rows[0]["pairs"]) == "| line | 1.05, 1 | 1.050 |"
    assert list(estimates.summary(rows)) == ["step s: off by 17.5% in the median, 30.0% at most; 1 of 2 within 8 %"]


def test_a_line_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    """Each has a limit of its own, is printed as it ends, and is written before the next begins."""
    limits, written = [], tmp_path / "steps.json"

    def measured(a, line, path, limit_s):
        limits.append(limit_s)
        assert len(limits) != 2 or f"| {estimates.STEPS[0]} | 1.1, 1 |" in capsys.readouterr().out
        assert written.exists() == (len(limits) > 1)
        return "TimeoutExpired" if len(limits) == 2 else {"pairs": {"step s": (1.1, 1.0)}}

    monkeypatch.setattr(estimates, "measured", measured)
    assert estimates.main(["steps", "--keep", str(tmp_path), "--only", "0,1,2", "--limit", "30"]) == 0
    assert limits == [30, 30, 30]
    assert [r["line"] for r in estimates.json.loads(written.read_text())] == [estimates.STEPS[0], estimates.STEPS[2]]
    assert "0 of 2 within 8 %" in capsys.readouterr().out


def test_every_line_of_rivals_is_one_that_both_sides_take():
    rivals = script("bench/rivals")
    for rival, model, tokens, theirs, ours in (*rivals.LINES, *rivals.SMALL):
        assert rivals.arguments([rival, model, "--tokens", str(tokens), *theirs.split()]).tokens == tokens
        assert bench_step.arguments([model, "--tokens", str(tokens), *ours.split()]).tokens == tokens
    zero, _ = rivals.infinity_config("store", 1 << 20)
    assert zero["offload_optimizer"]["buffer_count"] == 3 * 4  # groups in flight, their tensors: else it has too few

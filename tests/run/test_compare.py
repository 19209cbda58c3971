"""Is it better? Base and output on held-out rows, and on text that may be forgotten."""

import html
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from engines import fork
from pages import check_page
from runs import ended, go, hold, records, wait_for

import trireme
from trireme.engine.run.loop import train
from trireme.engine.run.options import Options, every
from trireme.engine.run.report import comparisons

NAN = float("nan")


@pytest.mark.parametrize(("before", "after", "verdicts", "share"), [
    ({"loss": 2.0}, {"loss": 1.5}, ["better"], "25 %"),
    ({"loss": 2.0}, {"loss": 2.05}, ["worse"], "2.5 %"),
    ({"loss": 2.0}, {"loss": 2.00001}, ["the same"], "2.0000 -> 2.0000"),
    ({"loss": 2.0}, {"loss": NAN}, ["worse"], "nan"),
    ({"loss": 2.0, "accuracy": 0.5}, {"loss": 2.5, "accuracy": 0.75}, ["worse", "better"], "50.00 % -> 75.00 %"),
    ({"loss": 0.0}, {"loss": 0.1}, ["worse"], ""),
    ({"loss": 0.7, "rewards/accuracies": 0.0}, {"loss": 0.6, "rewards/accuracies": 0.4}, ["better", "worse"],
     "50.00 % -> 40.00 %"),
    ({}, {"loss": 1.0}, [], ""), ({"loss": 1.0}, {}, [], ""),
])  # fmt: skip
def test_each_figure_has_a_verdict(before, after, verdicts, share):
    named = ({f"eval_{name}": value for name, value in figures.items()} for figures in (before, after))
    made = list(comparisons(*named, "eval", "rows", "tokens"))
    assert [is_better for is_better, _ in made] == [verdict == "better" for verdict in verdicts]
    assert all(line.endswith(verdict) for (_, line), verdict in zip(made, verdicts, strict=True))
    assert share in "".join(line for _, line in made)


@pytest.fixture(scope="module")
def plays(real, tmp_path_factory) -> Options:
    """A run after which a model of stories knows plays better and stories worse."""
    folder, data = tmp_path_factory.mktemp("plays"), real / "data"
    lines = (data / "tinyshakespeare.txt").read_text().splitlines(keepends=True)
    for name, part in (("plays.txt", lines[:400]), ("held.txt", lines[4000:4050])):
        (folder / name).write_text("".join(part))
    shutil.copy(data / "tinystories_sample_cs336.txt", folder / "stories.txt")
    return Options(
        model=str(real / "stories260k"), data=(str(folder / "plays.txt"),), val=str(folder / "held.txt"),
        general=str(folder / "stories.txt"), out=str(folder / "out"), seq_len=64, batch_size=4, max_steps=4, lr=2e-3,
        eval_tokens=10**6, eval_every=every("2"), save_every=every("1"), warmup=0.0, device="cpu",
    )  # fmt: skip


@pytest.mark.full
def test_the_end_says_what_is_better_and_what_was_forgotten(plays, tmp_path, capsys):
    """As eval says it of base and output; after a kill and --resume as without them."""
    train(plays)
    said = capsys.readouterr().out
    for name, file in (("eval", plays.val), ("general", plays.general)):
        first, *_, last = records(plays.out, f"{name}_loss")
        for record, model in ((first, plays.model), (last, plays.out)):
            figures = trireme.evaluate(model, file, seq_len=64)
            assert record[f"{name}_loss"] == pytest.approx(figures["loss"], abs=1e-6)
            assert record[f"{name}_accuracy"] == pytest.approx(figures["accuracy"], abs=1e-6)
        assert f"{first[f'{name}_loss']:.4f} -> {last[f'{name}_loss']:.4f}" in said
    result = [line for line in said.splitlines() if "->" in line and ("better" in line or "worse" in line)]
    assert ["better" in line for line in result] == [True, True, False, False]
    assert "warning" not in said
    page = Path(plays.out, "report.html").read_text()
    check_page(page)
    assert all(line in html.unescape(page) for line in result)
    parts = replace(plays, out=str(tmp_path / "parts"))
    if not (pid := fork()):
        hold(3)
        go(parts)
    wait_for(parts.out, 2)
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    train(replace(parts, resume=parts.out))
    again = capsys.readouterr().out
    assert "nothing" not in again
    assert all(line in again for line in result)
    assert len(records(parts.out, "general_loss")) == 2


@pytest.mark.full
def test_with_export_best_both_figures_are_those_of_the_output(plays, tmp_path, capsys):
    """At this rate the loss rises soon."""
    run = replace(plays, out=str(tmp_path / "out"), export="best", eval_every=every("1"), lr=0.02, max_steps=5)
    train(run)
    general = records(run.out, "general_loss")[-1]
    evals = records(run.out, "eval_loss")[1:]
    best = min(evals, key=lambda record: record["eval_loss"])
    assert best["step"] == general["step"]
    assert general["general_loss"] == pytest.approx(
        trireme.evaluate(run.out, run.general, seq_len=64)["loss"], abs=1e-6
    )
    assert f"-> {best['eval_loss']:.4f}" in capsys.readouterr().out


@pytest.mark.full
def test_a_run_that_makes_nothing_better_says_so_first(plays, tmp_path, capsys):
    train(replace(plays, out=str(tmp_path / "out"), lr=2.0, max_steps=2, general=None))
    last = capsys.readouterr().out.split("step 2", 2)[-1].splitlines()[1:]
    assert last[0].startswith("warning")
    assert "better" in last[0]

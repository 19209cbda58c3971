"""The benchmarks: their lines are arguments that both sides accept, and their tables say what was measured."""

from importlib.util import find_spec

import pytest
import torch
from script_files import script

from trireme.engine.plan import Limits
from trireme.engine.planner.sizes import find_model
from trireme.models.sizes.shapes import parameters

estimates, step, rivals = script("bench/estimates"), script("bench/step"), script("bench/rivals")


@pytest.mark.parametrize("line", [*estimates.STEPS, *estimates.ON_A_CPU])
def test_a_line_of_estimates_is_one_that_step_takes(line):
    given = step.arguments(line.removesuffix("--store").split())
    assert step.wanted_of(given, find_model(given.model), "BF16", Limits(15 << 30, 60 << 30)).sizes


def test_the_summary_says_how_far_estimates_are_off():
    rows = [{"step s": (1.05, 1.0)}, {"step s": (0.7, 1.0)}]
    assert estimates.row("line", rows[0]) == "| line | 1.05, 1 | 1.050 |"
    assert list(estimates.summary(rows)) == ["step s: off by 17.5% in the median, 30.0% at most of 2"]


def test_a_line_of_rivals_is_one_that_both_sides_take():
    for rival, model, tokens, theirs, ours in (line for lines in rivals.TABLES.values() for line in lines):
        assert rivals.arguments([rival, model, "--tokens", str(tokens), *theirs.split()]).tokens == tokens
        assert step.arguments([model, "--tokens", str(tokens), *ours.split()]).tokens == tokens


def test_the_model_of_rivals_has_the_parameters_of_ours():
    cfg = find_model("llama-8b")
    model = rivals.transformers_model(cfg, torch.device("meta"), liger=False)
    assert sum(weight.numel() for weight in model.parameters()) == parameters(cfg)


@pytest.mark.parametrize(("rival", "needed"), [(name, needed) for name, (_, needed) in rivals.RIVALS.items()])
def test_a_rival_that_is_not_installed_is_named_with_its_packages(rival, needed, capsys):
    missing = [name for name in needed if not find_spec(name)]
    if not missing:
        pytest.skip(f"{rival} is installed")
    assert rivals.main([rival, "llama-8b", *["--lora", "16"] * (rival == "unsloth")]) == 2
    said = capsys.readouterr().err
    assert said.endswith(f"pip install {' '.join(missing)}\n")
    assert said.count("\n") == 1
    assert rival in said

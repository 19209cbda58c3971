"""The benchmarks of the planner: their lines are what step.py takes."""

from script_files import script

from trireme.engine.plan import Limits

bench_plan, bench_choice = script("bench/plan"), script("bench/choice")
bench_step = bench_choice.bench_step
LIMITS = Limits(15 << 30, 60 << 30)


def wanted_of(line: str):
    """(model, arguments, what a plan is asked for) of a line of step.py on a GPU."""
    given = bench_step.arguments(line.removesuffix("--store").split())
    cfg = bench_step.MODELS[given.model]
    return cfg, given, bench_step.wanted_of(given, cfg, "BF16", LIMITS)


def test_every_line_of_the_grid_is_one_that_bench_step_takes():
    for line in (*bench_plan.GRID, *bench_choice.BRUTE):
        wanted_of(line)
    assert len(bench_plan.GRID) >= 12
    assert len(bench_choice.BRUTE) >= 4

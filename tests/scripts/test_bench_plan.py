"""The benchmarks of the planner, without a GPU: tables and pictures from what runs leave, plans that differ and fit."""

from dataclasses import asdict, replace
from xml.etree import ElementTree

import pytest
from script_files import script

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import Limits
from trireme.engine.planner.predict import predict
from trireme.engine.planner.rule import simple_plan

bench_plan, bench_choice, draw_step = (script(name) for name in ("bench/plan", "bench/choice", "dev/draw_step"))
bench_step = bench_choice.bench_step
LINE = "llama-1.3b --gpu-memory 16GiB --ram 60GiB"
LIMITS = Limits(15 << 30, 60 << 30)


def wanted_of(line: str):
    """(model, arguments, what a plan is asked for) of a line of step.py on a GPU."""
    given = bench_step.arguments(line.removesuffix("--store").split())
    cfg = bench_step.MODELS[given.model]
    return cfg, given, bench_step.wanted_of(given, cfg, "BF16", LIMITS)


@pytest.fixture(scope="module")
def result() -> dict:
    """What step.py leaves of a run that takes 0.7 s."""
    cfg, given, wanted = wanted_of(LINE)
    ceilings = dict(matmul=7.8e14, h2d=5.5e10, d2h=5.5e10, adam=5.5e9, ssd_read=float("inf"), ssd_write=float("inf"))
    return {
        "model": given.model, "tokens": given.tokens, "seq": given.seq, "step_s": 0.7, "ceilings": ceilings,
        "plan": asdict(simple_plan(cfg, LIMITS, wanted)), "peaks": {"gpu_gib": 14.5, "ram_gib": 20.0},
    }  # fmt: skip


def test_a_result_becomes_a_line_and_a_verdict(result):
    row = bench_plan.compare("a run", result)
    assert row["ratio"] == pytest.approx(row["predicted_s"] / 0.7)
    assert row["ram_measured_gib"] is None
    known = result | {"peaks": {"gpu_gib": 14.5, "ram_gib": 20.0, "rss_start_gib": 1.5}}
    assert bench_plan.compare("a run", known)["ram_measured_gib"] == 18.5
    assert bench_plan.row(row).count("|") == bench_plan.HEAD[0].count("|")
    assert "1 of 1 within 10 %" in bench_plan.verdict([row | {"ratio": 1.04}])
    after = bench_plan.compare("a run", result | {"corrected_s": 0.56})
    assert after["corrected_ratio"] == pytest.approx(0.8)
    assert "0.800" in bench_plan.row(after)
    assert "corrected 0 of 1 within 10 %, off by 20.0%" in bench_plan.verdict([after])


def test_every_line_of_the_grid_is_one_that_bench_step_takes():
    for line in (*bench_plan.GRID, *bench_choice.BRUTE):
        wanted_of(line)
    assert len(bench_plan.GRID) >= 12
    assert len(bench_choice.BRUTE) >= 4


def test_a_run_that_fails_says_why(tmp_path):
    said = bench_plan.run("llama-tiny --device cpu --gpu-memory 1MiB --ram 1GiB", tmp_path / "x.json", None, 60)
    assert "exit code 1: error: even the smallest plan needs" in said
    assert "for want of --store" in bench_plan.run("llama-tiny --store", tmp_path / "x.json", None, 60)


def test_other_plans_differ_and_fit():
    cfg, given, wanted = wanted_of(LINE)
    plans = [plan for _, plan in bench_choice.alternatives(cfg, LIMITS, wanted)]
    assert len(set(plans)) > 20
    assert all(fits(Geometry(cfg, "BF16"), plan, LIMITS) for plan in set(plans))


def test_the_share_that_travels_is_of_all_that_blocks_save():
    cfg, given, wanted = wanted_of(LINE)
    geo, plan = Geometry(cfg, "BF16"), simple_plan(cfg, LIMITS, wanted)
    everything = tuple((name, "host") for name in ("qkv", "attn_out", "lse", "resid", "gate_up"))
    inner = range(1, cfg.n_units - 1)
    units = tuple(replace(u, saved=everything if i in inner and i % 2 else ()) for i, u in enumerate(plan.units))
    assert bench_choice.away(geo, replace(plan, units=units)) == pytest.approx(0.5)


def test_the_picture_shows_every_point():
    rows = [{"sequences": n, "share": s, "predicted_s": 2 - s, "measured_s": 2.1 - s, "choice": s == 0.7}
            for n in (32, 64) for s in (0, 0.5, 1, 0.7)]  # fmt: skip
    tree = ElementTree.fromstring(bench_choice.picture(rows, "a model"))
    assert len([e for e in tree.iter() if e.tag.endswith("circle")]) == 8 + 2
    assert len([e for e in tree.iter() if e.tag.endswith("polyline")]) == 2


def test_the_picture_of_a_step_shows_every_kind_of_task():
    found = predict(draw_step.MODEL, draw_step.plan(), draw_step.RATES, draw_step.BATCH)
    tree = ElementTree.fromstring(draw_step.picture(found))
    boxes = [e for e in tree.iter() if e.tag.endswith("rect") and float(e.get("y", 0)) >= draw_step.TOP]
    drawn = {kind for _, kinds in draw_step.KINDS.values() for kind in kinds}
    assert {e.get("fill") for e in boxes} == {colour for colour, _ in draw_step.KINDS.values()}
    assert all(draw_step.LEFT <= float(e.get("x")) <= draw_step.WIDTH for e in boxes)
    assert all(drawn & {s.kind for s in found.spans if s.lane == lane} for lane in draw_step.ROWS)

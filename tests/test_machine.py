"""What is measured of a machine is kept while it is the same; a drive is tried and left as it was."""

import json
import os

import pytest
import torch
from engines import LLAMA
from test_predict import SMALL

from trireme.engine import probe
from trireme.engine.machine import at_shape, this_machine, with_drives
from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.predict import Batch, unit_seconds
from trireme.engine.rates import Machine, rates_of
from trireme.models.config import ModelConfig

GPT = ModelConfig("gpt2", 61, 16, 3, 4, 4, 4, 64, 64, 1e-5, True, qkv_bias=True, o_bias=True, mlp_bias=True)
CPU = torch.device("cpu")
RATES = {"ssd_read": 3e9, "ssd_write": 2e9, "mixed": 0.8}


def known() -> Machine:
    return Machine("x", 1 << 30, 1 << 30, rates_of(dict(matmul=1e12, adam=1e9, ssd_read=1e9)), ssd=10**9)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_measured_is_kept_while_the_machine_is_the_same(cache):
    calls = []
    measure = lambda: calls.append(1) or {"h2d": 5e10}  # noqa: E731
    assert probe.kept({"gpu": "A"}, measure) == ({"h2d": 5e10}, "measured, 0 s")
    assert probe.kept({"gpu": "A"}, measure) == ({"h2d": 5e10}, "measured before")
    assert probe.kept({"gpu": "B"}, measure)[1] == "measured, 0 s" and len(calls) == 2
    for file in (cache / "trireme").iterdir():
        file.unlink()
    assert probe.kept({"gpu": "A"}, measure)[1] == "measured, 0 s"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"identity": {"gpu": "A", "version": 1}, "rates": {"h2d": "fast"}}'])
def test_a_damaged_file_is_measured_anew(cache, text):
    probe.kept({"gpu": "A"}, lambda: {"h2d": 1.0})
    (file,) = (cache / "trireme").iterdir()
    file.write_text(text)
    assert probe.kept({"gpu": "A"}, lambda: {"h2d": 2.0})[0] == {"h2d": 2.0}
    assert json.loads(file.read_text())["rates"] == {"h2d": 2.0}


def test_a_cache_that_cannot_be_written_costs_only_time(cache):
    cache.write_text("a file where the folder should be")
    assert probe.kept({"gpu": "A"}, lambda: {"h2d": 1.0})[0] == {"h2d": 1.0}


def test_a_drive_is_measured_and_nothing_is_left(tmp_path):
    before = sorted(os.listdir(tmp_path))
    found = probe.drive_rates(tmp_path, seconds=0.0, most=2 * probe.CHUNK)
    assert found.keys() == RATES.keys() and all(value > 0 for value in found.values())
    assert sorted(os.listdir(tmp_path)) == before


def test_a_drive_that_fails_leaves_nothing_either(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the drive is gone")

    monkeypatch.setattr(probe, "_flow", fail)
    with pytest.raises(OSError):
        probe.drive_rates(tmp_path)
    assert os.listdir(tmp_path) == []


def test_this_machine_and_its_drives(tmp_path, monkeypatch):
    made = this_machine(CPU, "F32", {"gpu": 1 << 30, "host": 1 << 30}, [str(tmp_path / "not" / "yet")])
    assert min(made.rates.matmul, made.rates.copy, made.rates.adam, made.rates.ssd_read) > 0 and made.ssd > 0
    assert "assumed" in made.drives and "(measured)" in made.describe()
    monkeypatch.setattr(probe, "drive_rates", lambda folder: RATES)
    known = with_drives(made, [str(tmp_path), str(tmp_path / "same drive")])
    assert (known.rates.ssd_read, known.rates.ssd_write, known.rates.mixed) == (3e9, 2e9, 0.8)
    assert "assumed" not in known.drives and "(measured, 0 s)" in known.drives
    assert "(measured before)" in with_drives(made, [str(tmp_path)]).drives


def test_computations_are_as_fast_as_a_block_was(monkeypatch):
    rates = known().rates
    seconds = unit_seconds(SMALL, Plan((UnitPlan(),) * SMALL.n_units, 1, 1), rates, Batch(512, 128, 1))
    took = 2 * (seconds["forward block000"] + seconds["backward block000"])
    monkeypatch.setattr(probe, "block_seconds", lambda *_: took)
    timed = at_shape(known(), SMALL, 128, "BF16", CPU).rates
    assert (timed.gemm, timed.attention, timed.copy) == pytest.approx(
        (rates.gemm / 2, rates.attention / 2, rates.copy / 2)
    )
    assert at_shape(known(), SMALL, 128, "BF16", torch.device("cuda")) == known()


@pytest.mark.parametrize("cfg", [LLAMA, GPT])
def test_a_block_is_timed(cfg):
    assert probe.block_seconds(cfg, "F32", CPU, [32, 32]) > 0
    timed = at_shape(known(), cfg, 32, "F32", CPU).rates
    assert min(timed.gemm, timed.attention, timed.copy) > 0 and timed.matmul == known().rates.matmul


def test_a_drive_that_cannot_be_tried_stays_a_usual_one(tmp_path, monkeypatch):
    def fail(folder):
        raise PermissionError(folder)

    monkeypatch.setattr(probe, "drive_rates", fail)
    assert with_drives(known(), [str(tmp_path)]) == known()

"""What is measured of a machine is kept while it is the same; a drive is tried and left as it was."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from engines import LLAMA
from plans import SMALL

from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.lanes import Task
from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.planner import machine, probe
from trireme.engine.planner.machine import as_planned, this_machine, with_drives
from trireme.engine.planner.predict import Batch, durations, unit_seconds
from trireme.engine.planner.rates import COMPUTATION, ENDURANCE, Machine, rates_of
from trireme.models import shapes
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
    measure = lambda: calls.append(1) or {"h2d": 5e10}
    assert probe.kept({"gpu": "A"}, measure) == ({"h2d": 5e10}, "measured, 0 s")
    assert probe.kept({"gpu": "A"}, measure) == ({"h2d": 5e10}, "measured before")
    assert probe.kept({"gpu": "B"}, measure)[1] == "measured, 0 s"
    assert len(calls) == 2
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


def test_rates_are_not_kept_where_others_may_write(cache, monkeypatch):
    probe.kept({"gpu": "A"}, lambda: {"h2d": 1.0})
    (file,) = (cache / "trireme").iterdir()
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)  # the folder is somebody else's
    assert probe.kept({"gpu": "A"}, lambda: {"h2d": 2.0})[0] == {"h2d": 2.0}
    assert json.loads(file.read_text())["rates"] == {"h2d": 1.0}
    assert list((cache / "trireme").iterdir()) == [file]


@pytest.mark.gpu
def test_what_bus_and_updates_keep_beside_each_other():
    found = probe.processor_rates(torch.device("cuda"), "BF16")
    assert 0 < found["reading"] <= 1
    assert 0 < found["duplex"] <= 1
    assert found["beside"] == 1
    assert found["dram"] >= ADAM_BYTES * found["adam"]
    assert min(found["h2d"], found["d2h"]) > 1e9


def test_a_drive_is_measured_and_nothing_is_left(tmp_path):
    before = sorted(os.listdir(tmp_path))
    found = probe.drive_rates(tmp_path, seconds=0.0, most=2 * probe.CHUNK)
    assert found.keys() == RATES.keys()
    assert all(value > 0 for value in found.values())
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
    assert min(made.rates.matmul, made.rates.copy, made.rates.adam, made.rates.ssd_read) > 0
    assert made.ssd > 0
    assert "assumed" in made.drives
    assert "(measured)" in made.describe()
    assert made.endurance == ENDURANCE * shutil.disk_usage(tmp_path).total, "what is full of other files wears too"
    monkeypatch.setattr(probe, "drive_rates", lambda folder: RATES)
    known = with_drives(made, [str(tmp_path), str(tmp_path / "same drive")])
    assert (known.rates.ssd_read, known.rates.ssd_write, known.rates.mixed) == (3e9, 2e9, 0.8)
    assert "assumed" not in known.drives
    assert "(measured, 0 s)" in known.drives
    assert "(measured before)" in with_drives(made, [str(tmp_path)]).drives


def group(folder, limit: str, used: int, cache: int, names=("memory.max", "memory.current"), key="inactive_file"):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, used, f"anon 5\n{key} {cache}\n"), strict=True):
        (folder / name).write_text(f"{text}\n" if name != "memory.stat" else text)


@pytest.mark.parametrize(
    ("own", "least"),
    [
        ("0::/job/step\n", 300),  # the middle group binds: 1000 - 900 + 200 of page cache
        ("0::/job\n", 300),
        ("0::/elsewhere\n", 5000),  # not to be seen from here: the root's
        ("4:cpu:/job\n9:cpuset,memory:/batch\n0::/\n", 40),
        (None, 5000),
    ],
)
def test_every_cgroup_above_counts(tmp_path, monkeypatch, own, least):
    """Limits of a batch system or of systemd are set above the process, in either version; use is the same group's."""
    root, names = tmp_path / "cgroup", ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group(root, "6000", 1000, 0)
    group(root / "job", "1000", 900, 200)
    group(root / "job" / "step", "max", 800, 100)
    group(root / "memory", str(2**63 - 4096), 1000, 0, names)
    group(root / "memory" / "batch", "100", 90, 30, names, key="total_inactive_file")
    if own:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "_CGROUP", root)
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "own")
    assert machine.available_ram() == least


def like(cfg: ModelConfig, *kept: int) -> Plan:
    """A plan in memory in which the blocks `kept` save everything, in fp32."""
    saved = tuple((name, "gpu") for name in shapes.saved_shapes(cfg, 1))
    units = tuple(UnitPlan(saved=saved if u in kept else ()) for u in range(cfg.n_units))
    return Plan(units, 512, 2, "F32")


def test_what_is_timed_is_what_is_predicted(monkeypatch):
    """Usual documents, the labels that count, and as many blocks that save something as the plan has."""
    p, batch, asked = like(SMALL, 1, 2), Batch(512, 100, 2, trained=0.25), []
    seconds = {(): (1.0, 5.0), tuple(shapes.saved_shapes(SMALL, 1)): (2.0, 3.0)}

    def block_seconds(cfg, dtype, device, lengths, kept, u):
        asked.append((dtype, lengths))
        return seconds[kept]

    def loss_seconds(cfg, dtype, device, tokens, learned):
        assert (tokens, learned) == (512, 128)
        return 7.0

    monkeypatch.setattr(probe, "block_seconds", block_seconds)
    monkeypatch.setattr(probe, "loss_seconds", loss_seconds)
    monkeypatch.setattr(probe, "finish_seconds", lambda device, n: 0.5)
    rates = as_planned(known(), SMALL, p, batch, CPU).rates
    assert asked == [("F32", [100] * 5 + [12])] * 2
    found = unit_seconds(SMALL, p, rates, batch)
    blocks = [(kind, s) for (kind, unit), s in found.items() if unit.startswith("block")]
    sums = {kind: sum(s for k, s in blocks if k == kind) for kind in ("forward", "backward")}
    assert sums == pytest.approx({"forward": 2 * 2.0 + 4 * 1.0, "backward": 2 * 3.0 + 4 * 5.0})
    assert found["loss", "head"] == 7.0
    n = max(shapes.parameters(SMALL, u) for u in range(SMALL.n_units))
    finish = durations(SMALL, p, rates, batch)(Task("compute", "finish", "x", 3 * 4 * n))
    assert finish == pytest.approx(0.5, rel=1e-3)
    assert as_planned(known(), SMALL, p, batch, torch.device("cuda")) == known()


def test_long_micro_batches_are_timed_in_part(monkeypatch):
    slow, asked = replace(known(), rates=replace(known().rates, matmul=1e10)), []
    monkeypatch.setattr(probe, "block_seconds", lambda *given: asked.append(sum(given[3])) or (1.0, 2.0))
    monkeypatch.setattr(probe, "loss_seconds", lambda *_: 1.0)
    p, batch = like(SMALL), Batch(4096, 2048, 1)
    whole = unit_seconds(SMALL, p, as_planned(known(), SMALL, p, batch, CPU).rates, batch)
    part = unit_seconds(SMALL, p, as_planned(slow, SMALL, p, batch, CPU).rates, batch)
    assert asked[0] == 4096
    assert 512 <= asked[1] < 2048
    assert part["forward", "block000"] > 2 * whole["forward", "block000"] == pytest.approx(2.0)


@pytest.mark.parametrize("cfg", [LLAMA, GPT])
def test_computations_are_timed(cfg):
    timed = as_planned(known(), cfg, like(cfg, 1), Batch(64, 30, 1, trained=0.5), CPU).rates
    assert min(getattr(timed, kind) for kind in COMPUTATION) > 0
    assert timed.matmul == known().rates.matmul
    assert timed.forward != timed.backward != timed.loss


def test_a_drive_that_cannot_be_tried_stays_a_usual_one(tmp_path, monkeypatch):
    def fail(folder):
        raise PermissionError(folder)

    monkeypatch.setattr(probe, "drive_rates", fail)
    assert with_drives(known(), [str(tmp_path)]) == known()

"""`trireme check --tune`: which settings are taken, where they are kept, and which runs use them."""

import os

import pytest
import torch

from trireme.engine.check import cases, check, gpu, tune, tuned
from trireme.engine.planner.probe import drive
from trireme.engine.run.cli import main
from trireme.kernels import launch, ops
from trireme.kernels.tiles import Chip, tried

RTX_4090, GPU, CPU = Chip(89, 128, 72 << 20), torch.device("cuda", 0), torch.device("cpu")
TINY = cases.Shapes(
    device="cpu", N=16, widths=(32,), F=48, plain=48, heads=(2, 4, 16), heads_of=((32, 96),), chunks=(32,), block=4096,
    attention=(([64], 4, 2, 16),), matmuls=((16, 32, 48),), quantized=(32,),
    mixtures={"small": (4, 2, 32, 16)}, mixed=16, tuned=(8, 3),
)  # fmt: skip
FASTER = {"attention_dq 128": (64, 32, 4, 3), "grouped_mm": (64, 64, 128, 4, 3), "quantize": (64, 64, 4)}


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An RTX 4090 with a cache folder of its own, as far as settings go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "chip", lambda device: RTX_4090)
    monkeypatch.setattr(tuned, "chip", lambda device: RTX_4090)
    said = {"gpu": "NVIDIA GeForce RTX 4090", "driver": "NVRM 580.65"}
    monkeypatch.setattr(tuned, "chips", lambda *_: said)
    monkeypatch.setattr(tuned, "model_of", lambda device: said["gpu"])
    yield said
    launch.use({})


@pytest.fixture
def used(monkeypatch):
    """The settings that launches have now."""
    now, real = {}, launch.use

    def use(settings):
        now.clear()
        now.update({name: tuple(setting) for name, setting in settings.items()})
        real(settings)

    monkeypatch.setattr(launch, "use", use)
    return now


@pytest.mark.full
def test_the_faster_settings_are_kept_for_this_gpu_and_this_software(here, used):
    fast = lambda: any(used.get(name) == setting for name, setting in FASTER.items())
    said = {row.name: row for row in tune.rows(GPU, TINY, lambda case: 1 / 1.5 if fast() else 1.0)}
    assert said.keys() == {*tried(RTX_4090), "settings"}
    assert said["grouped_mm"].result == "64, 64, 128, 4, 3: 1.50 times as fast; bitwise identical"
    assert said["attention_fwd 64"].result == "as it is: 4 of 4 settings tried"
    expected = {name: list(setting) for name, setting in FASTER.items()}
    assert tuned.stored(GPU) == expected
    (file,) = (path for path in tuned.cache_folder().iterdir() if path.name.startswith("launches-"))
    assert said["settings"].result == (f"3 launches, kept in {file}. Runs use them from now on")
    assert used == {}, "the process itself is as before"
    for changed in ("gpu", "driver"):
        before = here[changed]
        here[changed] = "another"
        assert tuned.stored(GPU) == {}
        here[changed] = before
    assert tuned.stored(CPU) == {}
    assert tuned.stored(GPU) == expected


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"grouped_mm": [64, 64, 128, 4, 9], "earlier": [1]}'])
def test_settings_that_are_damaged_or_of_another_version_are_not_used(here, content):
    tuned.store(GPU, {"grouped_mm": [64, 64, 128, 4, 3]}).write_bytes(content)
    assert tuned.stored(GPU) == {}


def test_a_resumed_run_can_tell_that_settings_differ(here):
    assert tuned.digest({}) == ""
    assert tuned.digest({"quantize": [64, 64, 4]}) == tuned.digest({"quantize": (64, 64, 4)})
    assert tuned.digest({"quantize": [64, 64, 4]}) != tuned.digest({"quantize": [128, 128, 8]})


def test_a_setting_that_fails_or_is_wrong_is_not_taken_and_other_roundings_are_named(here, used, monkeypatch):
    right = ops.grouped_mm

    def grouped_mm(*args, **more):
        setting = used.get("grouped_mm")
        if setting == (128, 64, 128, 8, 3):
            raise RuntimeError("out of resource: shared memory")
        factor = {(64, 32, 128, 4, 4): 1.1, (64, 64, 128, 4, 3): 1.003}.get(setting, 1.0)
        return right(*args, **more) * factor

    grouped_mm.__wrapped__ = right.__wrapped__
    monkeypatch.setattr(ops, "grouped_mm", grouped_mm)
    monkeypatch.setattr(tune, "tried", lambda chip: {"grouped_mm": tried(chip)["grouped_mm"]})
    fastest = {(128, 64, 128, 8, 3): 4.0, (64, 32, 128, 4, 4): 3.0, (64, 64, 128, 4, 3): 2.0}
    rows = list(tune.rows(GPU, TINY, lambda case: 1 / fastest.get(used.get("grouped_mm"), 1.0)))
    assert [row.result for row in rows[:1]] == ["64, 64, 128, 4, 3: 2.00 times as fast; rounds differently"]
    assert "with other roundings" in rows[-1].result


def test_hopper_is_tuned_by_calls_that_its_own_kernels_do_not_take(here):
    hopper = Chip(90, 132)
    a, b = tune.case_of("attention_fwd 64", hopper, TINY), tune.case_of("attention_dq 64", RTX_4090, TINY)
    assert (a.args[-1], b.args[-1]) == (11, 0)  # windows
    assert "grouped_add" not in tried(hopper)


def test_without_a_gpu_nothing_is_tuned(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drive, "drive_rates", lambda *_, **__: pytest.fail("drives are no part of it"))
    assert main(["check", "--tune"]) == 0
    assert "kernels" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


@pytest.mark.gpu
def test_every_setting_of_this_gpu_runs_and_is_right(monkeypatch, tmp_path):
    """Each within the bound of its reference; where none is faster nothing changes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", torch.cuda.current_device())
    shapes, chip, failed = gpu.CHECKED, launch.chip(device), []
    for name, settings in tried(chip).items():
        case = tune.case_of(name, chip, shapes)
        for setting in settings:
            with tuned.in_use({name: setting}):
                try:
                    off = cases.error(case)
                except Exception as error:
                    failed.append((name, setting, str(error)[:100]))
                    continue
                assert off <= case.bound, (name, setting, off)
                assert cases.repeats(case, 3), (name, setting)
    assert not failed, failed


@pytest.mark.gpu
def test_tuning_this_gpu_keeps_settings_that_a_run_can_use(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "CALLS", 3)
    monkeypatch.setattr(tune, "ROUNDS", 3)
    monkeypatch.chdir(tmp_path)
    device = torch.device("cuda", torch.cuda.current_device())
    said = []
    rows = check.check({}, said.append, tuning=True)
    assert [row.name for row in rows if row.part == "tune"] == [*tried(launch.chip(device)), "settings"]
    found = {row.name for row in rows if row.part == "tune" and row.numbers.get("gain", 1.0) > 1.0}
    assert tuned.stored(device).keys() == found

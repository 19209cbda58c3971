"""What is measured of a machine is kept while it is the same; a drive is tried and left as it was."""

import json
import math
import os
import resource
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.plan import Limits
from trireme.engine.planner import host
from trireme.engine.planner.machine import drive_speeds, note_drives, note_pinned, pinnable, this_machine, with_drives
from trireme.engine.planner.predict import WITHIN
from trireme.engine.planner.probe import cache, compute, copies, drive, processor, starts
from trireme.engine.planner.rates import ENDURANCE, Machine, rates_of
from trireme.engine.planner.sizes import find_model
from trireme.engine.queues import cgroups
from trireme.models.config import InputError
from trireme.models.sizes import measure

CPU = torch.device("cpu")
RATES = {"ssd_read": 3e9, "ssd_write": 2e9, "mixed": 0.8}


def launches() -> int:
    """Of a small block."""
    return sum(work.launches for work in measure.work(starts.BLOCK, 1, 64, 64))


def known() -> Machine:
    return Machine("x", 1 << 30, 1 << 30, rates_of(dict(matmul=1e12, adam=1e9, ssd_read=1e9)), ssd=10**9)


@pytest.fixture(autouse=True, scope="module")
def usual_rates():
    """None: here they are measured."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_measured_is_kept_while_the_machine_is_the_same(folder):
    calls = []
    measure = lambda: calls.append(1) or {"h2d": 5e10}
    assert cache.look_up({"gpu": "A"}, measure) == ({"h2d": 5e10}, "measured, 0 s")
    assert cache.look_up({"gpu": "A"}, measure) == ({"h2d": 5e10}, "measured before")
    assert cache.look_up({"gpu": "B"}, measure)[1] == "measured, 0 s"
    assert len(calls) == 2
    for file in (folder / "trireme").iterdir():
        file.unlink()
    assert cache.look_up({"gpu": "A"}, measure)[1] == "measured, 0 s"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"identity": {"gpu": "A", "version": 1}, "rates": {"h2d": "fast"}}'])
def test_a_damaged_file_is_measured_anew(folder, text):
    cache.look_up({"gpu": "A"}, lambda: {"h2d": 1.0})
    (file,) = (folder / "trireme").iterdir()
    file.write_text(text)
    assert cache.look_up({"gpu": "A"}, lambda: {"h2d": 2.0})[0] == {"h2d": 2.0}
    assert json.loads(file.read_text())["rates"] == {"h2d": 2.0}


def test_a_cache_that_cannot_be_written_costs_only_time(folder):
    folder.write_text("a file where the folder should be")
    assert cache.look_up({"gpu": "A"}, lambda: {"h2d": 1.0})[0] == {"h2d": 1.0}


def test_a_file_that_cannot_be_replaced_leaves_no_other(folder):
    cache.remember({"gpu": "A"}, {"h2d": 1.0})
    (file,) = (folder / "trireme").iterdir()
    file.unlink()
    file.mkdir()
    cache.remember({"gpu": "A"}, {"h2d": 1.0})
    assert list((folder / "trireme").iterdir()) == [file]


def test_rates_are_not_kept_where_others_may_write(folder, monkeypatch):
    cache.look_up({"gpu": "A"}, lambda: {"h2d": 1.0})
    (file,) = (folder / "trireme").iterdir()
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)  # the folder is somebody else's
    assert cache.look_up({"gpu": "A"}, lambda: {"h2d": 2.0})[0] == {"h2d": 2.0}
    assert json.loads(file.read_text())["rates"] == {"h2d": 1.0}
    assert list((folder / "trireme").iterdir()) == [file]


@pytest.mark.gpu
def test_what_bus_and_updates_keep_beside_each_other():
    found = processor.processor_rates(torch.device("cuda"), "BF16")
    assert 0 < found["reading"] <= 1
    assert 0 < found["duplex"] <= 1
    assert found["concurrent"] == 1
    assert found["dram"] >= ADAM_BYTES * found["adam"]
    assert min(found["h2d"], found["d2h"]) > 1e9


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_peer_copies_are_faster_than_the_bus_where_there_is_a_link():
    gpus = [torch.device("cuda", gpu) for gpu in range(2)]
    access = torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)
    found = copies.several_rates(gpus, 1 << 33)
    assert (found["peer"] > 1e9) == access
    assert min(found["up_all"], found["down_all"]) > 1e9


@pytest.mark.gpu
def test_the_launches_of_a_small_block_are_measured():
    """By them a block's estimate is at least what it takes of the host."""
    device, task = torch.device("cuda"), starts.BOOKS * starts.task_seconds()
    block = starts.block_seconds(device)
    assert 1e-4 < block < 2e-2
    host = max(starts.start_seconds(device), starts.launch_seconds(block, task))
    said = host * launches() + task * (WITHIN["forward"] + WITHIN["backward"])
    assert said > 0.9 * block


def test_a_probe_takes_half_of_the_ram_at_most():
    assert copies.trial_sizes(1 << 40) == (1 << 25, copies.COPY)
    for ram in (*(1 << k for k in range(24, 40)), 3 * 10**9, 10**10):
        n, nbytes = copies.trial_sizes(ram)
        assert copies.LOTS * n * copies.UPDATED + 2 * nbytes <= ram / 2
        assert n <= 1 << 25
        assert nbytes <= copies.COPY
        assert ram > 4 << 30 or n > ram >> 10, "no less than need be"


@pytest.mark.parametrize(
    ("rates", "believed", "found"),
    [
        ([9.0, 5.0, 3.0, 2.9, 1.0], False, 2.9),  # a burst ends
        ([1.0, 3.0, 3.2], False, 3.2),
        ([9.0, 5.0], True, 9.0),
        ([float(2**k) for k in range(compute.TURNS + 1)], False, float(2 ** (compute.TURNS - 1))),  # never the same
    ],
)
def test_a_virtual_drives_first_seconds_are_not_believed(rates, believed, found):
    turns = iter(rates)
    assert drive.settled(lambda: next(turns), believed) == found


def test_a_resumed_run_measures_its_drives_anew(tmp_path, monkeypatch):
    found = iter((RATES, RATES | {"ssd_read": 1e9}))
    monkeypatch.setattr(drive, "drive_rates", lambda place: next(found))
    assert with_drives(known(), [tmp_path]).rates.ssd_read == 3e9
    assert with_drives(known(), [tmp_path]).rates.ssd_read == 3e9
    assert with_drives(known(), [tmp_path], anew=True).rates.ssd_read == 1e9
    assert with_drives(known(), [tmp_path]).rates.ssd_read == 1e9, "and keeps that"


def test_ram_that_cannot_be_pinned_is_remembered(monkeypatch):
    """As on WSL2."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(cache, "chips", lambda device, dtype: {"gpu": "RTX 4090"})
    assert pinnable(cuda) == math.inf
    note_pinned(cuda, 7 << 30)
    assert pinnable(cuda) == 7 << 30


def test_a_drive_is_as_fast_as_it_was_for_minutes(tmp_path, monkeypatch):
    """The next run's plan begins with it; a run in which the drive is faster again is believed too."""
    monkeypatch.setattr(drive, "drive_rates", lambda place: RATES)
    note_drives(rates_of(dict(matmul=1e12, adam=1e9, ssd_read=1e9)), [tmp_path])  # nothing was measured
    assert with_drives(known(), [tmp_path]).rates.ssd_read == 3e9
    for share, used in ((0.2, 0.2), (0.5, 0.5), (1.3, 1.0)):
        rates = replace(known().rates, ssd_read=share * 3e9, ssd_write=share * 2e9)
        note_drives(rates, [tmp_path / "out"])
        found = with_drives(known(), [tmp_path])
        assert (found.rates.ssd_read, found.rates.ssd_write) == pytest.approx((used * 3e9, used * 2e9))
        assert (f"a run kept up {100 * used:.0f} % of that" in found.drives) == (used < 1)
        assert with_drives(known(), [tmp_path], anew=True).rates.ssd_read == pytest.approx(used * 3e9)


@pytest.mark.full
def test_a_drive_is_measured_and_nothing_is_left(tmp_path):
    before = sorted(os.listdir(tmp_path))
    found = drive.drive_rates(tmp_path, seconds=0.0, most=2 * drive.CHUNK)
    assert found.keys() == RATES.keys()
    assert all(value > 0 for value in found.values())
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.full
def test_a_drive_that_fails_leaves_nothing_either(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=str(tmp_path)):
            drive.drive_rates(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("second", "speeds"), [(0.9, (1, 1)), (0.5, (1, 0.5)), (None, (1, 1))])
def test_drives_are_striped_by_what_was_measured_for_plans(tmp_path, monkeypatch, second, speeds):
    """Equally, where they hardly differ or one was not measured."""
    monkeypatch.setattr(drive, "identity", lambda place: {"device": place.name})
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, share in zip(folders, (1.0, second), strict=True):
        folder.mkdir()
        if share:
            cache.remember({"device": folder.name}, {"ssd_read": 3e9 * share, "ssd_write": 2e9 * share})
    one, two = drive_speeds(folders)
    assert two / one == pytest.approx(speeds[1] / speeds[0])


def test_this_machine_and_its_drives(tmp_path, monkeypatch):
    made = this_machine(CPU, "F32", Limits(1 << 30, 1 << 30), [str(tmp_path / "not" / "yet")])
    assert min(made.rates.matmul, made.rates.copy, made.rates.adam, made.rates.ssd_read) > 0
    assert made.ssd > 0
    assert "assumed" in made.drives
    assert "(measured)" in made.describe()
    assert made.endurance == ENDURANCE * shutil.disk_usage(tmp_path).total, "what is full of other files wears too"
    monkeypatch.setattr(drive, "drive_rates", lambda folder: RATES)
    known = with_drives(made, [str(tmp_path), str(tmp_path / "same drive")])
    assert {name: getattr(known.rates, name) for name in RATES} == RATES
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
    monkeypatch.setattr(cgroups, "ROOT", root)
    monkeypatch.setattr(cgroups, "SELF_CGROUP", tmp_path / "own")
    assert host.available_ram() == least


def test_memory_is_not_planned_beyond_where_a_cgroup_throttles(tmp_path, monkeypatch):
    group(tmp_path, "6000", 1000, 0)
    (tmp_path / "memory.high").write_text("1300\n")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "SELF_CGROUP", tmp_path / "none")
    assert host.available_ram() == 300


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),  # docker --cpus=4
        ("0::/job/step\n", {"job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000"}, 2.5),
        ("0::/\n", {"cpu.max": "6400000 100000"}, 8),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 8),
        ("0::/\n", {"cpu.max": "50000 100000"}, 0.5),
    ],
)
def test_cores_are_those_of_affinity_and_quota(tmp_path, monkeypatch, own, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "SELF_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cgroups.cores() == cores
    assert cgroups.update_threads() == max(1, int(cores) - 1)
    assert cgroups.update_threads(4) == max(1, int(cores) - 9, int(cores) // 2)
    assert cache.chips_now(CPU, "F32")["cores"] == cores


NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, char **gpu) { *gpu = strdup(uuid); return strncmp(uuid, "GPU-", 4); }
int nvmlDeviceGetTotalEnergyConsumption(char *gpu, unsigned long long *millijoules) {
  *millijoules = 6000000000ull;  // beyond 32 bits
  return strcmp(gpu, "GPU-old") ? 0 : 3;
}
int nvmlDeviceGetCurrPcieLinkWidth(char *gpu, unsigned *lanes) { *lanes = 16; return 0; }
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory) -> str:
    """A library that knows every GPU; those named old do not count energy, and none its power limit."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    made = folder / "libnvml.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, folder / "nvml.c"], check=True, timeout=60)
    return str(made)


@pytest.mark.parametrize(("uuids", "joules"), [
    (["ab"], 6e6), (["ab", "cd"], 12e6), (["ab", "old"], math.nan), ([], math.nan),
])  # fmt: skip
def test_energy_is_the_sum_of_the_counters(nvml, uuids, joules):
    assert host.Counters(uuids, nvml).joules() == pytest.approx(joules, nan_ok=True)


def test_counters_that_are_missing_say_nothing(nvml):
    known = host.Counters(["ab", "cd"], nvml)
    assert known.read("nvmlDeviceGetCurrPcieLinkWidth") == [16, 16]
    assert known.read("nvmlDeviceGetEnforcedPowerLimit") == []
    for none in (host.Counters(["ab"], "/no/library.so"), host.counters(CPU)):
        assert math.isnan(none.joules())
        assert none.read("nvmlDeviceGetCurrPcieLinkWidth") == []


def test_a_gpu_in_another_slot_or_at_another_power_limit_is_another(monkeypatch):
    now = {"lanes": 16, "generation": 4, "generation now": 1, "milliwatts": 450_000}
    monkeypatch.setattr(cache, "gpu_now", lambda device: dict(now))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-cd"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 4090")
    cuda = torch.device("cuda", 0)
    before = cache.chips_now(cuda, "BF16")
    now["generation now"] = 4  # an idle link slows down
    assert cache.chips_now(cuda, "BF16") == before
    for change in ({"lanes": 4}, {"generation": 3}, {"milliwatts": 300_000}):
        kept, _ = dict(now), now.update(change)
        assert cache.chips_now(cuda, "BF16") != before
        now.update(kept)


@pytest.fixture
def cards(monkeypatch):
    """Three GPUs, the last another one."""
    names = ("A100", "A100", "H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    found = lambda device: SimpleNamespace(name=names[device.index], multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found)
    return torch.device("cuda", 0)


def test_unequal_gpus_have_limits_and_rates_of_their_own(cards, monkeypatch, tmp_path, folder):
    assert host.choose_gpus("all", cards) == 3
    assert [host.are_equal(cards, gpus) for gpus in (1, 2, 3)] == [True, True, False]
    assert host.choose_gpus("all", torch.device("cuda", 2)) == 1
    gib = 1 << 30
    free = [40, 38, 80]
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # makes a context
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index] * gib, 96 * gib))
    two = host.memory_limits(cards, None, 64 * gib, 2)
    assert [two.gpu_bytes(gpu) + host.GPU_RESERVE for gpu in range(2)] == [40 * gib, 38 * gib], "a process has some"
    limits = host.memory_limits(cards, None, 64 * gib, 3)
    assert [limits.gpu_bytes(gpu) + host.GPU_RESERVE for gpu in range(3)] == [40 * gib, 38 * gib, 80 * gib]
    rates = lambda device: {"copy": 1e12, "h2d": 2e10, "d2h": 2e10, "duplex": 0.9, "adam": 2e9, "dram": 7e10}
    monkeypatch.setattr(cache, "chips_now", lambda device, dtype: {"gpu": device.index, "dtype": dtype})
    monkeypatch.setattr(processor, "processor_rates", lambda device, dtype, ram: rates(device))
    monkeypatch.setattr(compute, "matmul_rate", lambda device, dtype: (3e14, 3e14, 8e14)[device.index])
    monkeypatch.setattr(copies, "several_rates", lambda devices, ram: {"peer": 0.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ("A100", "A100", "H100")[device.index])
    made = this_machine(cards, "BF16", limits, [tmp_path])
    assert made.rates.matmul == 3e14, "all are taken to be as fast as the slowest"
    assert made.name == "A100 + A100 + H100"
    assert made.limits.less == limits.less
    alike = this_machine(cards, "BF16", two, [tmp_path])
    assert (alike.mixed, alike.limits.less) == (False, two.less)
    assert alike.describe().startswith("2 x A100, 40 GiB and 38 GiB | "), alike.describe()
    free[1] = 39.5
    nearly = host.memory_limits(cards, None, 64 * gib, 2)
    assert (nearly.gpu, nearly.less) == (39.5 * gib - host.GPU_RESERVE, ()), "as much as each has"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3.5-27b", "falcon-h1-7b"])
def test_shares_of_a_recurrence_on_a_gpu(name):
    cuda = torch.device("cuda")
    found = compute.scan_shares(cuda, torch.bfloat16, find_model(name).scan, compute.matmul_rate(cuda, torch.bfloat16))
    assert all(0.01 < share < 0.6 for share in found.values()), found


def test_more_gpus_than_there_are_are_refused(cards):
    with pytest.raises(InputError, match="--gpus 4: torch sees 3"):
        host.choose_gpus(4, cards)


def test_a_cpu_pretends_any_number_of_gpus():
    assert [host.choose_gpus(wanted, CPU) for wanted in (1, 3, "all")] == [1, 3, 1]
    with pytest.raises(InputError, match="at most 64"):
        host.choose_gpus(65, CPU)
    one, four = (host.memory_limits(CPU, None, 8 << 30, gpus) for gpus in (1, 4))
    assert four.total == pytest.approx(one.total, abs=128 << 20)
    assert four.gpu == pytest.approx(one.gpu / 4, abs=128 << 20)

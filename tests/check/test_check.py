"""`trireme check`: what it looks at, what it says to change, what it leaves behind."""

import os
import time
import weakref
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from trireme.engine.amounts import percent
from trireme.engine.check import check, gpu, host
from trireme.engine.check import steps as module
from trireme.engine.check.cases import GROUPS, Shapes, error
from trireme.engine.check.drives import drives
from trireme.engine.check.row import Row, changes, for_issue
from trireme.engine.check.steps import compared, steps
from trireme.engine.plan import Limits
from trireme.engine.planner.gpus import find_gpu
from trireme.engine.planner.probe import compute, drive, processor
from trireme.engine.planner.rates import rates_of
from trireme.engine.run.cli import main
from trireme.kernels import ops
from trireme.storage import devices

RATES = {"matmul": 6e10, "copy": 6.5e9, "task": 8e-5, "h2d": 3.3e9, "d2h": 3.3e9, "dram": 3e10, "adam": 1e9}
DRIVE = {"ssd_read": 3e9, "ssd_write": 2e9, "mixed": 0.8}
SMALL = Shapes(
    device="cpu", N=64, widths=(32,), F=48, plain=48, heads=(2, 4, 16), heads_of=((32, 96),), chunks=(32,), block=4096,
    attention=(([64], 4, 2, 16), ([40, 24], 4, 2, 16)), latent=(([64], 2, 2, 24, 16),),
    matmuls=((64, 32, 48),), quantized=(32,),
    mixtures={"small": (4, 2, 32, 16)}, mixed=64, scan=(1, 2, 16), mamba=(1, 2, 16, 8),
)  # fmt: skip


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A machine without a GPU whose drive is not measured; the folder that commands run in."""
    monkeypatch.setattr(drive, "drive_rates", lambda folder, seconds, patient: DRIVE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def by_part(lines: list[str]) -> dict[str, list[str]]:
    parts = [line[2:].split()[0] if line[0] in " !" else line.split()[0] for line in lines]
    return {part: [line for line, of in zip(lines, parts, strict=True) if of == part] for part in parts}


def test_without_a_gpu_it_says_so_and_checks_the_rest(quick, capsys, monkeypatch):
    monkeypatch.setattr(check, "steps", lambda *_: iter([compared("in RAM", 1.0, 0.5, cuda=False)]))
    (quick / "nvme").mkdir()
    assert main(["check", "--store", "nvme,."]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = by_part(lines)
    assert rows.keys() == {"software", "host", "gpu", "drive", "step", "change"}
    (missing,) = rows["gpu"]
    assert missing.startswith("!")
    assert all(word in missing for word in ("kernels", "GPU memory", "PCIe"))
    assert len(rows["drive"]) == 8
    assert "read 3.00, write 2.00 GB/s" in rows["drive"][3]
    assert "1.000 s, estimated 0.500 s" in rows["step"][0]
    assert sorted(os.listdir(quick)) == ["nvme"], "nothing is written"
    assert os.listdir(quick / "nvme") == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--store", "nowhere"], "--store nowhere: "),
        (["--store", "file"], "--store file: "),
        (["--store", "/proc"], "--store /proc "),
        (["--fast"], "fast"),
        (["--store"], "--store"),
    ],
)
def test_wrong_input_is_one_line(quick, capsys, argv, says):
    (quick / "file").write_text("")
    assert main(["check", *argv]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert os.listdir(quick) == ["file"]


def test_a_drive_that_fails_is_named(quick, monkeypatch, capsys):
    def gone(*_, **__):
        raise OSError(5, "Input/output error", "nvme")

    monkeypatch.setattr(drive, "drive_rates", gone)
    assert main(["check"]) == 4
    assert "nvme: Input/output error" in capsys.readouterr().err
    assert os.listdir(quick) == []


def test_what_a_drive_lacks_is_said(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(devices.os, "link", no_links)
    monkeypatch.setattr("trireme.engine.check.drives.is_direct", lambda folder: False)
    monkeypatch.setattr(drive, "drive_rates", lambda *_, **__: DRIVE | {"ssd_read": 0.5e9})
    space = SimpleNamespace(free=20 << 30, total=1 << 40)
    monkeypatch.setattr("trireme.engine.check.drives.shutil.disk_usage", lambda folder: space)
    said = changes(drives({"disk": tmp_path}, {}))
    assert said == [
        "disk: free 33.5 GB: nearly full drives write slowly",
        "disk, hard links: cannot hold snapshots: it has no hard links. Name a folder on ext4, xfs or btrfs with "
        "--store",
        "disk, O_DIRECT: put the store on ext4, xfs or btrfs of a drive of this machine",
        "disk, rates: use an NVMe drive in a slot of its own, and look at its temperature",
    ]
    space.free = 1 << 20
    tried = {}
    assert len(list(drives({"disk": tmp_path}, tried))) == 4
    assert tried == {}, "too full to be tried"
    assert os.listdir(tmp_path) == []


def test_what_the_host_lacks_is_said(monkeypatch):
    assert not any(row.change for row in host.host(RATES) if "AdamW" in row.name)
    monkeypatch.setattr(host, "cores", lambda: 8.0)
    monkeypatch.setattr(host, "update_threads", lambda: 7)
    monkeypatch.setattr(host.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(host, "available_ram", lambda: 8 << 30)
    monkeypatch.setattr(host, "is_wsl", lambda: True)
    said = "\n".join(changes(host.host(RATES | {"dram": 1.2e10, "adam": 1e8})))
    for words in ("CPU limit", "RAM has no room", ".wslconfig", "Fill all channels", "power mode"):
        assert words in said


# ---------------------------------------------------------------- the GPU's part, as far as a CPU can tell


@pytest.mark.parametrize(
    ("busy", "says", "change"),
    [
        ({}, "the driver does not say", ""),
        ({"lanes": 16, "lanes of the card": 16, "generation": 4, "generation now": 4, "milliwatts": 450_000},
         "x16 of x16, generation 4 under load of 4; power limit 450 W", ""),
        ({"lanes": 4, "lanes of the card": 16, "generation": 4, "generation now": 4}, "x4 of x16", "another slot"),
        ({"lanes": 16, "lanes of the card": 16, "generation": 4, "generation now": 1},
         "generation 1 under", "firmware"),
    ],
)  # fmt: skip
def test_a_slow_link_is_said(busy, says, change):
    row = gpu.link(busy)
    assert says in row.result
    assert change in row.change
    assert bool(row.change) == bool(change)


def test_rates_are_compared_with_those_of_such_a_gpu():
    sheet = find_gpu("NVIDIA GeForce RTX 4090")
    usual = {"matmul": sheet.matmul, "copy": sheet.copy, "h2d": sheet.bus, "d2h": sheet.bus}
    assert [row.change for row in gpu.compared_rates(sheet, usual)] == [""] * 4
    assert "100 % of what is usual" in next(gpu.compared_rates(sheet, usual)).result
    slow = [row.name for row in gpu.compared_rates(sheet, usual | {"matmul": 6e13, "h2d": 6e9}) if row.change]
    assert slow == ["bf16 matrix multiplication", "copies to the GPU"]
    assert [row.change for row in gpu.compared_rates(None, usual)] == [""] * 4


@pytest.mark.parametrize("group", GROUPS)
def test_every_kernel_has_cases_at_any_size(group):
    """On a CPU each is its own reference."""
    cases = list(GROUPS[group](SMALL))
    assert all(error(case) == 0 and case.work > 0 for case in cases)
    assert len(cases) >= 2


def test_all_ops_are_compared():
    checked = {case.op for cases in GROUPS.values() for case in cases(SMALL)}
    others = {name for name, op in vars(ops).items() if hasattr(op, "__wrapped__") and not name.startswith("_")}
    assert others == checked


def test_a_wrong_kernel_is_named(monkeypatch):
    right = ops.conv_fwd
    wrong = lambda *args: right(*args) * 1.1
    wrong.__wrapped__ = right.__wrapped__
    monkeypatch.setattr(ops, "conv_fwd", wrong)
    rows = list(gpu.kernels(SMALL, lambda case: 1e-3, RATES, fp8=False))
    (bad,) = [row for row in rows if row.change]
    assert bad.name.startswith("conv_fwd ")
    assert "WRONG: differs by 1.0e-01 from its reference" in bad.result
    assert rows[-1].result == "this GPU has none"
    calls = count()
    monkeypatch.setattr(ops, "conv_fwd", lambda *args: right(*args) + (next(calls) == 3))
    ops.conv_fwd.__wrapped__ = right.__wrapped__
    (bad,) = [row for row in gpu.kernels(SMALL, lambda case: 1e-3, RATES, fp8=False) if row.change]
    assert bad.result == "WRONG: 5 calls give different bits"
    took = [row.result for row in rows if row.name.startswith("act_fwd 64x48 silu")]
    assert took == [f"1 ms, {percent(3 * 2 * 64 * 48 / RATES['copy'] / 1e-3)} of the bound, error 0e+00"]
    monkeypatch.setattr(time, "monotonic", count(step=1000).__next__)  # seconds
    late = list(gpu.kernels(SMALL, lambda case: 1e-3, RATES, fp8=True))
    assert sum("out of time" in row.result for row in late) == len(gpu.ORDER) == len(GROUPS)


def test_a_kernel_that_cannot_run_is_named(monkeypatch):
    def fails(*_):
        raise RuntimeError("out of resource: shared memory,\n required: 131072, limit: 101376")

    fails.__wrapped__ = ops.rope_.__wrapped__
    monkeypatch.setattr(ops, "rope_", fails)
    rows = list(gpu.kernels(SMALL, lambda case: 1e-3, RATES, fp8=True))
    (bad,) = [row for row in rows if row.change]
    assert bad.result == "FAILED: RuntimeError: out of resource: shared memory, required: 131072, limit: 101376"
    assert rows.index(bad) < len(rows) - 1, "the others are compared"


@pytest.mark.full
def test_steps_are_run_next_to_their_estimates(tmp_path, monkeypatch):
    """One engine after the other: the buffers of one are free before the next is made."""
    made, usual = [], module.random_engine

    @contextmanager
    def watched(*args, **more):
        assert all(engine() is None for engine in made)
        with usual(*args, **more) as e:
            made.append(weakref.ref(e))
            yield e

    monkeypatch.setattr(module, "random_engine", watched)
    rates, end = rates_of(RATES | DRIVE), time.monotonic() + 60
    cpu, room = torch.device("cpu"), Limits(1 << 30, 1 << 30)
    in_ram, on_ssd = steps(cpu, room, rates, tmp_path, end)
    assert min(*in_ram.numbers.values(), *on_ssd.numbers.values()) > 0
    assert os.listdir(tmp_path) == []
    assert len(made) == 2
    small, none = steps(cpu, Limits(1 << 20, 1 << 30), rates, None, end)
    assert small.result.startswith("not tried: even the smallest plan needs ")
    assert none.result == "not tried: no drive was tried"
    assert [row.result for row in steps(cpu, room, rates, tmp_path, 0.0)] == ["not tried: out of time"] * 2


def test_an_unmeasured_gpu_ends_with_a_block_for_an_issue():
    def checked(measured: bool) -> list[str]:
        kernels = [
            Row("kernels", "dropout 64", "0.1 ms", numbers={"seconds": 1e-4}),
            Row("kernels", "dropout 640", "1 ms", numbers={"seconds": 1e-3}),
            Row("kernels", "rope_ 64", "FAILED", "do not train"),
        ]
        rows = [Row("gpu", "GPU", "a card", numbers={"measured": measured}), *kernels, compared("a step", 1, 1, True)]
        return for_issue([Row("software", "versions", "torch"), *rows])

    assert checked(True) == []
    ask, start, *block, end = checked(False)
    assert "issue" in ask
    assert start == end == "```"
    assert [line[2:].split()[:2] for line in block] == [
        ["software", "versions"], ["gpu", "GPU"], ["kernels", "dropout"], ["kernels", "rope_"], ["step", "a"],
    ]  # fmt: skip
    assert "dropout 640" in block[2]


def test_an_estimate_that_is_far_off_is_told_on_a_gpu():
    for cuda, told in ((True, [True, False]), (False, [False, False])):
        assert [bool(compared("step", seconds, 1.0, cuda).change) for seconds in (1.3, 1.1)] == told


@pytest.mark.gpu
@pytest.mark.parametrize("group", gpu.ORDER)
def test_kernels_are_right_on_this_gpu_while_they_are_timed(group):
    fp8 = torch.cuda.get_device_capability() >= (8, 9)
    rates = {"matmul": compute.matmul_rate(torch.device("cuda"), torch.bfloat16), "copy": 1e12}
    rows = list(gpu.kernels(gpu.CHECKED, gpu.call_seconds, rates, fp8, [group]))
    assert rows
    assert [row.result for row in rows if row.change] == []


@pytest.mark.gpu
def test_this_gpu_is_described():
    device = torch.device("cuda")
    rates = {"matmul": compute.matmul_rate(device, torch.bfloat16)} | processor.processor_rates(device, "BF16", 1 << 33)
    rows = list(gpu.gpu(device, rates))
    assert [row.name for row in rows][:2] == ["GPU", "Triton's compiler"]
    assert all(row.line() for row in rows)

"""GPUs and drives by the names and figures that people write."""

import pytest

from trireme.engine.planner.gpus import GPUS, find_gpu
from trireme.engine.planner.host import choose_device
from trireme.engine.planner.rates import GB, GPU_OVERHEAD, assume
from trireme.models.config import InputError

NAMES = {
    "RTX 4090": "4090 rtx4090 RTX_4090 rtx-4090 NVIDIA-GeForce-RTX-4090",
    "RTX 4060 Ti-16G": "4060ti-16g RTX_4060_Ti_16GB 4060Ti16GiB",
    "RTX A6000": "a6000 A6000 rtx_a6000",
    "RTX 6000 Ada": "6000ada RTX-6000-Ada",
    "A100-80G": "a100 A100-80GB",
    "H100": "h100 H100-80GB NVIDIA-H100-80GB-HBM3",
    "RTX 4090 Laptop": "4090laptop rtx-4090-mobile NVIDIA_GeForce_RTX_4090_Laptop_GPU",
    "RTX Pro 6000": "rtxpro6000 NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition",
    "GB10": "gb10 NVIDIA_GB10 dgx-spark",
    "L40S": "l40s",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_has_the_names_that_people_write(name):
    assert {find_gpu(text).name for text in NAMES[name].split()} == {name}


def test_forty_gpus_are_known_and_every_name_that_is_told_is_one():
    assert len(GPUS) >= 40
    for name, gpu in GPUS.items():
        if name == "v100-32g":  # for the tables of other systems' papers
            continue
        assert find_gpu(name) == find_gpu(gpu.name) == gpu
        assert gpu.name.count(" ") <= 4
        assert gpu.unified or gpu.bus == gpu.lanes * 25e9 / 16 or gpu.bus > 25e9, name
        assert 2 << 30 < gpu.memory < 1 << 39
        assert 1e13 < gpu.matmul < gpu.copy * 3000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu=T4,ram=64GiB", "with bf16: A100, RTX 30 or newer"),
        ("gpu=v100,ram=64GiB", "with bf16"),
        ("gpu=QuadroRTX8000,ram=64GiB", "with bf16"),
        ("gpu=mi300x,ram=64GiB", "an NVIDIA GPU"),
        ("gpu=4090x,ram=64GiB", "(RTX 4090"),
        ("gpu=rtx6000,ram=64GiB", "RTX A6000"),
        ("gpu=65x4090,ram=64GiB", "65 GPUs are too many; a run has at most 64."),
        ("gpu=gtx8800,ram=64GiB", "a size like 24GiB"),
        ("gpu=4060,ram=64GiB,bus=x16", "bus=x16 is not some of the 8 lanes of the RTX 4060"),
        ("gpu=gh200,ram=64GiB,bus=x16", "the GH200 has none"),
        ("gpu=4060,ram=64GiB,bus=fast", "write x8 or GB/s"),
        ("gpu=gb10,ram=128GiB", "the GB10 has one memory of 119 GiB; ram= is the CPU's part of it."),
        ("gpu=4090,ram=64GiB,cores=0", "cores=0: it must be greater than 0."),
        ("gpu=4090,ram=0GiB", "ram=0GiB: it must be greater than 0."),
        ("gpu=4090,ram=64GiB,ssd=0TB", "ssd=0TB: it must be greater than 0."),
        ("gpu=4090,ram=64GiB,ssd=2TB@0/5", "ssd=2TB@0/5: it must be greater than 0."),
        ("gpu=2x4090,ram=64GiB,peer=0", "peer=0: it must be greater than 0."),
        ("gpu=4090,ram=64GiB,tflops=x", "tflops=x: 'x' is not a number"),
        ("gpu=4090,ram=64GiB,color=blue", "write it like gpu=rtx4090"),
    ],
)
def test_other_gpus_are_refused_with_what_to_write(text, says):
    with pytest.raises(InputError) as error:
        assume(text)
    assert says in str(error.value)


def test_the_rates_are_those_of_sums_in_fp32():
    """GeForce boards halve them: RTX 3090 and 4090 by their white papers; a laptop at the middle of its clocks."""
    rates = {"rtx3090": 71, "rtx4090": 165.2, "rtx5090": 209.5, "rtx4090laptop": 4 * 9728 * (1.455 + 2.040) / 2 / 1e3}
    for name, tflops in rates.items():
        assert find_gpu(name).matmul == pytest.approx(tflops * 1e12, rel=3e-3), name


@pytest.mark.parametrize(
    ("parts", "rates"),
    [
        ("gpu=2xrtx3090,bus=x8", dict(h2d=12.5e9, d2h=12.5e9)),
        ("gpu=rtx5090,bus=x4", dict(h2d=13.75e9)),
        ("gpu=rtx4060", dict(h2d=12.5e9)),
        ("gpu=rtx4090,bus=6.5", dict(h2d=6.5e9, d2h=6.5e9)),
        ("gpu=rtx4090,tflops=120", dict(matmul=120e12, fp8=240e12, copy=find_gpu("rtx4090").copy)),
        ("gpu=8GiB,tflops=41.3", dict(matmul=41.3e12, copy=find_gpu("rtx4090").copy / 4)),
        ("gpu=2xrtx3090,peer=50", dict(peer=50e9)),
        ("gpu=rtx4090,cores=2", dict(adam=1.2e9, dram=70e9)),
        ("gpu=rtx4090,cores=64,dram=280", dict(adam=1e10, dram=280e9)),
        ("gpu=gb10", dict(dram=find_gpu("gb10").copy, h2d=100e9)),
    ],
)
def test_any_machine_can_be_said(parts, rates):
    made = assume(f"{parts},ram=32GiB")
    assert {name: getattr(made.rates, name) for name in rates} == pytest.approx(rates)
    assert made.gpu == (87 << 30 if "gb10" in parts else find_gpu(parts.split(",")[0][4:].removeprefix("2x")).memory)


def test_unequal_gpus_have_memory_of_their_own_and_the_rates_of_the_slowest():
    made = assume("gpu=2xrtx3060+rtx4090,ram=64GiB,bus=x8,peer=20")
    assert (made.gpus, made.name) == (3, "RTX 3060 + RTX 3060 + RTX 4090")
    assert [made.limits.gpu_bytes(gpu) + GPU_OVERHEAD >> 30 for gpu in range(3)] == [12, 12, 24]
    assert (made.rates.matmul, made.rates.h2d, made.rates.peer) == pytest.approx((25.5e12, 12.5e9, 20e9))
    assert "RTX 3060 + RTX 3060 + RTX 4090, 12 GiB and 12 GiB and 24 GiB | RAM 64 GiB" in made.describe()
    less = made.first(2, 10 << 30)
    assert [less.limits.gpu_bytes(gpu) + GPU_OVERHEAD >> 30 for gpu in range(2)] == [10, 10]
    with pytest.raises(InputError, match="cannot be one of several"):
        assume("gpu=rtx4090+gb10,ram=64GiB")


def test_speeds_of_drives_may_be_those_on_their_box():
    mine, box = assume("gpu=4090,ram=64GiB,ssd=4x2TB@7/5"), assume("gpu=4090,ram=64GiB,ssd=4x2TB@7000/5000")
    assert mine == box
    assert (mine.rates.ssd_read, mine.rates.ssd_write) == (28 * GB, 20 * GB)


@pytest.mark.parametrize(("hip", "capability", "culprit"), [("6.4.1", (9, 0), "AMD"), (None, (7, 5), "Tesla T4")])
def test_a_gpu_that_cannot_train_is_refused(monkeypatch, hip, capability, culprit):
    """A gfx90a of AMD has capability 9.0, as Hopper has."""
    device = dict(is_available=True, current_device=0, get_device_name="Tesla T4", get_device_capability=capability)
    for name, value in device.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr("torch.version.hip", hip)
    for wanted in ("auto", "cuda"):
        with pytest.raises(InputError, match=f"{culprit}.* --device cpu"):
            choose_device(wanted)
    assert choose_device("cpu").type == "cpu"


def test_a_gpu_that_torch_does_not_see_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.warns(UserWarning, match="GPU"):
        assert choose_device("auto", [tmp_path]).type == "cpu"

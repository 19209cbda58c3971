"""GPUs and drives by the names and figures that people write."""

import pytest

from trireme.engine.planner.gpus import GPUS, find_gpu
from trireme.engine.planner.host import choose_device
from trireme.engine.planner.rates import GB, assume
from trireme.models.config import InputError

NAMES = {
    "RTX 4090": "4090 rtx4090 RTX_4090 rtx-4090 NVIDIA-GeForce-RTX-4090",
    "RTX 4060 Ti-16G": "4060ti-16g RTX_4060_Ti_16GB 4060Ti16GiB",
    "RTX A6000": "a6000 A6000 rtx_a6000",
    "RTX 6000 Ada": "6000ada RTX-6000-Ada",
    "A100-80G": "a100 A100-80GB",
    "H100": "h100 H100-80GB",
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
        assert 2 << 30 < gpu.memory < 1 << 38
        assert 1e13 < gpu.matmul < gpu.copy * 3000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu=T4,ram=64GiB", "'T4' has no bf16; an A100, an RTX 30 or anything newer has."),
        ("gpu=RTX_2080_Ti,ram=64GiB", "'RTX_2080_Ti' has no bf16"),
        ("gpu=v100,ram=64GiB", "'v100' has no bf16"),
        ("gpu=4090x,ram=64GiB", "Perhaps RTX 4090, or write a size like 24GiB."),
        ("gpu=24,ram=64GiB", "'24' is not a GPU known here, nor a size. Name a GPU like rtx4090, a6000 or l40s"),
    ],
)
def test_other_gpus_are_refused_with_what_to_write(text, says):
    with pytest.raises(InputError) as error:
        assume(text)
    assert says in str(error.value)


def test_gpus_that_an_error_names_are_known():
    assert [find_gpu(name).memory >> 30 for name in ("rtx4090", "a6000", "l40s", "24GiB")] == [24, 48, 48, 24]


def test_speeds_of_drives_may_be_those_on_their_box():
    mine, box = assume("gpu=4090,ram=64GiB,ssd=4x2TB@7/5"), assume("gpu=4090,ram=64GiB,ssd=4x2TB@7000/5000")
    assert mine == box
    assert (mine.rates.ssd_read, mine.rates.ssd_write) == (28 * GB, 20 * GB)


def test_amds_gpus_are_refused(monkeypatch):
    """A gfx90a has capability 9.0, as Hopper has."""
    for name, found in dict(is_available=True, get_device_capability=(9, 0), current_device=0).items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda found=found: found)
    monkeypatch.setattr("torch.version.hip", "6.4.1")
    for wanted in ("auto", "cuda"):
        with pytest.raises(InputError, match="AMD's GPUs .ROCm.* --device cpu"):
            choose_device(wanted)
    assert choose_device("cpu").type == "cpu"
    monkeypatch.setattr("torch.version.hip", None)
    assert choose_device("auto").type == "cuda"


def test_a_gpu_without_bf16_is_refused_by_name(monkeypatch):
    for name, found in dict(is_available=True, get_device_capability=(7, 5), get_device_name="Tesla T4").items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda found=found: found)
    with pytest.raises(InputError, match="Tesla T4 has no bf16.* Add --device cpu"):
        choose_device("auto")
    assert choose_device("cpu").type == "cpu"

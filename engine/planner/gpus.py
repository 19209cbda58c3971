"""Known GPUs: names, memory, rates. Imports no torch."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from trireme.engine.amounts import positive, size

MEASURED = re.compile(r"\b(H100|H200)\b")  # names of GPUs on which constants of estimates were fitted


@dataclass(frozen=True)
class Gpu:
    """What the data sheet of a GPU says, or what was measured."""

    name: str
    memory: int  # bytes
    matmul: float  # FLOP/s of a bf16 matrix multiplication, sums in fp32 (fp16 on a V100)
    copy: float  # bytes/s
    bus: float  # bytes/s each way
    fp8: float  # FLOP/s of an fp8 matrix multiplication, sums in fp32; 0: none
    lanes: int = 16  # of PCIe; 0: another link
    unified: bool = False  # its memory is the CPU's too


# gpus.csv has NVIDIA's data sheets: GiB, dense tensor-core TFLOP/s with fp32 accumulation (on GeForce boards half of
# the fp16 rate), GB/s of memory (an H200 reaches 0.86). A laptop's power sets a clock between two: 4 FLOPs a core at
# the middle. The share of TFLOP/s is that of a large multiplication: 0.79 measured on an H200, for data-centre and
# workstation boards; GeForce boards clock above their sheet and reach 1 (a block at 164 TFLOP/s on an RTX 4090), an
# A100 on PCIe 0.72 (at 200): Fuyou, section 1, footnote 3. The bus: PCIe generation x lanes, or GB/s of another link.
_LANE = {"3": 12.5e9 / 16, "4": 25e9 / 16, "5": 55e9 / 16}  # bytes/s of a lane; x16 measured
_UNIFIED = ("GB10",)
# fp8 at twice bf16's rate by the sheets (RTX 4090: 330 TFLOP/s, H200: 1979). Of its own an H200 reaches 0.73 (1437
# TFLOP/s); a GeForce board is taken to reach all of it, as of bf16's.
_WITHOUT_FP8 = re.compile(r"RTX 30|RTX A|A\d|V100")
_ALSO = {
    "a100": "a10080g", "a100pcie40g": "a10040g", "a100pcie80g": "a10080g", "a80080g": "a800", "h10080g": "h100",
    "h80080g": "h800", "4060ti8g": "4060ti", "5060ti8g": "5060ti", "306012g": "3060", "30508g": "3050",
    "pro500048g": "pro5000", "dgxspark": "gb10", "spark": "gb10", "gh200480g": "gh200",
}  # fmt: skip
_WORDS = re.compile(
    r"nvidia|geforce|tesla|rtx|gtx|generation|workstation|server|edition|blackwell|sxm\d?|hbm\w*|gpu|[^a-z0-9]"
)


def _key(name: str) -> str:
    """A name without what varies: `NVIDIA GeForce RTX_4090` is `4090`, `16 GB` is `16g`, `Mobile` is `laptop`."""
    plain = _WORDS.sub("", name.lower().replace("mobile", "laptop"))
    return re.sub(r"(\d)gi?b$", r"\1g", plain)


def _read(row: Sequence[str]) -> Gpu:
    name, gib, peak, bandwidth, share, bus = row
    matmul, copy = float(f"{peak}e12") * float(share), float(f"{bandwidth}e9") * 0.86
    fp8 = 0.0 if _WITHOUT_FP8.match(name) else 2 * matmul * (1 if share == "1" else 0.92)
    generation, _, lanes = bus.rpartition("x")
    rate = _LANE[generation] * int(lanes) if generation else float(f"{bus}e9")
    return Gpu(name, int(gib) << 30, matmul, copy, rate, fp8, int(lanes) if generation else 0, name in _UNIFIED)


with Path(__file__).with_name("gpus.csv").open(newline="") as file:
    _BY_KEY = {_key(gpu.name): gpu for gpu in map(_read, list(csv.reader(file))[1:])}
GPUS = {gpu.name.lower().replace(" ", ""): gpu for gpu in _BY_KEY.values()}


def find_gpu(text: str, tflops: float = 0.0) -> Gpu:
    """The GPU of that name, or an RTX 4090 of that memory size. Raises ValueError.

    `tflops`: TFLOP/s of a bf16 matmul, instead of the known rate.
    """
    key, like = _key(text), GPUS["rtx4090"]
    if (gpu := _BY_KEY.get(_ALSO.get(key, key))) and not gpu.name.startswith("V100"):
        return at_rate(gpu, tflops) if tflops else gpu
    try:
        sized = replace(like, name="a GPU as fast as an RTX 4090", memory=size(text))
    except ValueError:
        close = ", ".join(_BY_KEY[k].name for k in get_close_matches(key, _BY_KEY, 3)) or "rtx4090, a6000, l40s"
        raise ValueError(
            f"{text!r} is not a GPU known here, nor a size. Write a name ({close}) or a size like 24GiB; kernels need "
            "an NVIDIA GPU with bf16: A100, RTX 30 or newer"
        ) from None
    if not tflops:
        return sized
    custom = at_rate(replace(sized, name=f"a GPU of {tflops:g} TFLOP/s"), tflops)
    return replace(custom, copy=like.copy * custom.matmul / like.matmul)


def at_rate(gpu: Gpu, tflops: float) -> Gpu:
    """`gpu` with this rate of a matmul in TFLOP/s, as with a power limit, or as it was measured."""
    share = tflops * 1e12 / gpu.matmul
    return replace(gpu, matmul=tflops * 1e12, fp8=gpu.fp8 * share)


def sheet_fp8_rate(name: str, matmul: float) -> float:
    """FLOP/s of an fp8 matmul of the GPU of that name, by its sheet next to `matmul` in bf16; 0: none, or unknown."""
    with suppress(ValueError):
        return at_rate(find_gpu(name), matmul / 1e12).fp8
    return 0.0


def bus_of(gpu: Gpu, text: str) -> float:
    """Bytes/s in each direction of `x8` (lanes of the GPU's own PCIe generation), or of a number in GB/s. Raises
    ValueError.
    """
    match = re.fullmatch(r"x(1|2|4|8|16)", text)
    if match and int(match[1]) <= gpu.lanes:
        return gpu.bus / gpu.lanes * int(match[1])
    try:
        return positive(text) * 1e9
    except ValueError:
        lanes = f"of the {gpu.lanes} lanes of the {gpu.name}" if gpu.lanes else f"lanes: the {gpu.name} has none"
        raise ValueError(f"bus={text} is not some {lanes}; leave it out, or write x8 or GB/s like 12.5") from None

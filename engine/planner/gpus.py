"""Known GPUs: names, memory, rates. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from trireme.engine.amounts import positive, size


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


# NVIDIA's data sheets: GiB, dense tensor-core TFLOP/s with fp32 accumulation (on GeForce boards half of the fp16 rate),
# GB/s of memory (an H200 reaches 0.86). A laptop's power sets a clock between two: 4 FLOPs a core at the middle.
# Then the share of the peak in a large multiplication: 0.79 measured on an H200, for data-centre and workstation
# boards; GeForce boards clock above their sheet and reach 1 (a block at 164 TFLOP/s on an RTX 4090), an A100 on PCIe
# 0.72 (at 200): Fuyou, section 1, footnote 3. Then the bus: PCIe generation x lanes, or GB/s of another link.
_SHEETS = """
RTX 3050 8 18.2 224 1 4x8
RTX 3050-6G 6 13.5 168 1 4x8
RTX 3060 12 25.5 360 1 4x16
RTX 3060-8G 8 25.5 240 1 4x16
RTX 3060 Ti 8 32.4 448 1 4x16
RTX 3070 8 40.6 448 1 4x16
RTX 3070 Ti 8 43.5 608 1 4x16
RTX 3080 10 59.5 760 1 4x16
RTX 3080-12G 12 61.3 912 1 4x16
RTX 3080 Ti 12 68.2 912 1 4x16
RTX 3090 24 71 936 1 4x16
RTX 3090 Ti 24 80 1008 1 4x16
RTX 4060 8 30.2 272 1 4x8
RTX 4060 Ti 8 44.1 288 1 4x8
RTX 4060 Ti-16G 16 44.1 288 1 4x8
RTX 4070 12 58.3 504 1 4x16
RTX 4070 Super 12 71 504 1 4x16
RTX 4070 Ti 12 80.2 504 1 4x16
RTX 4070 Ti Super 16 88.2 672 1 4x16
RTX 4080 16 97.5 717 1 4x16
RTX 4080 Super 16 104.4 736 1 4x16
RTX 4090 24 165.2 1008 1 4x16
RTX 4090 D 24 147.1 1008 1 4x16
RTX 5050 8 26.3 320 1 5x8
RTX 5060 8 38.4 448 1 5x8
RTX 5060 Ti 8 47.4 448 1 5x8
RTX 5060 Ti-16G 16 47.4 448 1 5x8
RTX 5070 12 61.7 672 1 5x16
RTX 5070 Ti 16 87.9 896 1 5x16
RTX 5080 16 112.6 960 1 5x16
RTX 5090 32 209.5 1792 1 5x16
RTX 3050 Laptop 4 11.5 192 1 4x8
RTX 3050 Ti Laptop 4 14 192 1 4x8
RTX 3060 Laptop 6 22.9 336 1 4x16
RTX 3070 Laptop 8 29.8 448 1 4x16
RTX 3070 Ti Laptop 8 29.7 448 1 4x16
RTX 3080 Laptop 8 36.3 448 1 4x16
RTX 3080 Laptop-16G 16 36.3 448 1 4x16
RTX 3080 Ti Laptop 16 40.3 512 1 4x16
RTX 4050 Laptop 6 20.4 192 1 4x8
RTX 4060 Laptop 8 23.6 256 1 4x8
RTX 4070 Laptop 8 31.4 256 1 4x8
RTX 4080 Laptop 12 53.9 432 1 4x16
RTX 4090 Laptop 16 68 576 1 4x16
RTX 5050 Laptop 8 21.3 384 1 5x8
RTX 5060 Laptop 8 23 384 1 5x8
RTX 5070 Laptop 8 30 384 1 5x8
RTX 5070 Ti Laptop 12 36.1 672 1 5x16
RTX 5080 Laptop 16 50.1 896 1 5x16
RTX 5090 Laptop 24 66.1 896 1 5x16
RTX A2000 12 31.9 288 0.79 4x16
RTX A4000 16 76.7 448 0.79 4x16
RTX A4500 20 94.6 640 0.79 4x16
RTX A5000 24 111.1 768 0.79 4x16
RTX A5500 24 136.4 768 0.79 4x16
RTX A6000 48 154.8 768 0.79 4x16
RTX 2000 Ada 16 48 224 0.79 4x8
RTX 4000 Ada 20 106.9 360 0.79 4x16
RTX 4500 Ada 24 158.5 432 0.79 4x16
RTX 5000 Ada 32 261.1 576 0.79 4x16
RTX 5880 Ada 48 277.2 960 0.79 4x16
RTX 6000 Ada 48 364.2 960 0.79 4x16
RTX Pro 2000 16 67.9 288 0.79 5x8
RTX Pro 4000 24 187.6 672 0.79 5x16
RTX Pro 4500 32 219.8 896 0.79 5x16
RTX Pro 5000 48 267.8 1344 0.79 5x16
RTX Pro 5000-72G 72 267.8 1344 0.79 5x16
RTX Pro 6000 96 503.8 1792 0.79 5x16
RTX Pro 6000 Max-Q 96 438.9 1792 0.79 5x16
A2 16 18 200 0.79 4x8
A10 24 125 600 0.79 4x16
A10G 24 70 600 0.79 4x16
A30 24 165 933 0.79 4x16
A40 48 149.7 696 0.79 4x16
L4 24 121 300 0.79 4x16
L40 48 181 864 0.79 4x16
L40S 48 362 864 0.79 4x16
V100-32G 32 125 900 0.79 3x16
A100-40G 40 312 1555 0.79 4x16
A100-80G 80 312 1935 0.72 4x16
A800 80 312 1935 0.72 4x16
H20 96 148 4000 0.79 5x16
H800 80 989 3350 0.79 5x16
H100 80 989 3350 0.79 5x16
H100 PCIe 80 756 2000 0.79 5x16
H100 NVL 94 835 3900 0.79 5x16
H200 141 989 4800 0.79 5x16
GH200 96 989 4000 0.79 300
GH200-144G 144 989 4900 0.79 300
B200 180 2250 8000 0.79 5x16
B300 270 2250 8000 0.79 5x16
GB10 119 125 273 0.79 100
"""
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
_WITHOUT_BF16 = re.compile(
    r"(t4|p4|[kmp]\d{2,4}|titan(v|x|xp)?|8000|v100(16g|32g)?|quadro\w*|t\d{3,4}|(9[5-8]|10[3-8]|16[356]|20[678])0\w*)"
)
_OTHERS = re.compile(
    r"amd|radeon|instinct|mi\d|rx\d|\d{4}xtx?$|intel|arc|a(3[18]|58|7[57])0$|b5[78]0$|apple|m[1-9]|tpu"
)
_WORDS = re.compile(
    r"nvidia|geforce|tesla|rtx|gtx|generation|workstation|server|edition|blackwell|sxm\d?|hbm\w*|gpu|[^a-z0-9]"
)


def _key(name: str) -> str:
    """A name without what varies: `NVIDIA GeForce RTX_4090` is `4090`, `16 GB` is `16g`, `Mobile` is `laptop`."""
    plain = _WORDS.sub("", name.lower().replace("mobile", "laptop"))
    return re.sub(r"(\d)gi?b$", r"\1g", plain)


def _read(line: str) -> Gpu:
    name, gib, peak, bandwidth, share, bus = line.rsplit(" ", 5)
    matmul, copy = float(f"{peak}e12") * float(share), float(f"{bandwidth}e9") * 0.86
    fp8 = 0.0 if _WITHOUT_FP8.match(name) else 2 * matmul * (1 if share == "1" else 0.92)
    generation, _, lanes = bus.rpartition("x")
    rate = _LANE[generation] * int(lanes) if generation else float(f"{bus}e9")
    return Gpu(name, int(gib) << 30, matmul, copy, rate, fp8, int(lanes) if generation else 0, name in _UNIFIED)


_BY_KEY = {_key(gpu.name): gpu for gpu in map(_read, _SHEETS.strip().splitlines())}
GPUS = {gpu.name.lower().replace(" ", ""): gpu for gpu in _BY_KEY.values()}


def find_gpu(text: str, tflops: float = 0.0) -> Gpu:
    """The GPU of that name, or an RTX 4090 of that memory size. Raises ValueError.

    `tflops`: TFLOP/s of a bf16 matmul, instead of the known rate.
    """
    key = _key(text)
    if found := _BY_KEY.get(_ALSO.get(key, key)):
        if found.name.startswith("V100"):
            raise ValueError(_no_bf16(text))
        return at_rate(found, tflops) if tflops else found
    if _WITHOUT_BF16.fullmatch(key):
        raise ValueError(_no_bf16(text))
    if _OTHERS.match(key):
        raise ValueError(f"{text!r} is not an NVIDIA GPU, and the kernels are for NVIDIA GPUs")
    like = GPUS["rtx4090"]
    try:
        sized = replace(like, name="a GPU as fast as an RTX 4090", memory=size(text))
    except ValueError:
        raise ValueError(
            f"{text!r} is not a GPU known here, nor a size. {_perhaps(key)}, or write a size like 24GiB"
        ) from None
    if not tflops:
        return sized
    made = at_rate(replace(sized, name=f"a GPU of {tflops:g} TFLOP/s"), tflops)
    return replace(made, copy=like.copy * made.matmul / like.matmul)


def at_rate(gpu: Gpu, tflops: float) -> Gpu:
    """`gpu` with this rate of a matmul in TFLOP/s, as with a power limit, or as it was measured."""
    share = tflops * 1e12 / gpu.matmul
    return replace(gpu, matmul=tflops * 1e12, fp8=gpu.fp8 * share)


def bus_of(gpu: Gpu, text: str) -> float:
    """Bytes/s in each direction of `x8` (lanes of the GPU's own PCIe generation), or of a number in GB/s. Raises
    ValueError.
    """
    match = re.fullmatch(r"x(1|2|4|8|16)", text)
    if not match:
        try:
            return positive(text) * 1e9
        except ValueError:
            raise ValueError(f"bus={text} is not lanes, nor a rate; write x4, x8, x16 or GB/s as 12.5") from None
    lanes = int(match[1])
    if not gpu.lanes:
        raise ValueError(f"bus={text}: the {gpu.name} is not on PCIe; write GB/s, or leave bus out")
    if lanes > gpu.lanes:
        raise ValueError(f"bus={text}: the {gpu.name} has {gpu.lanes} lanes; leave bus out")
    return gpu.bus / gpu.lanes * lanes


def _no_bf16(text: str) -> str:
    return f"{text!r} has no bf16; an A100, an RTX 30 or anything newer has"


def _perhaps(key: str) -> str:
    """Names of known GPUs that the unknown `key` may mean: with the same number, or spelled nearly the same."""
    number = re.search(r"\d\d+", key)
    known = {k: gpu.name for k, gpu in _BY_KEY.items() if not gpu.name.startswith("V100")}
    alike = [k for k, name in known.items() if number and re.findall(r"\d\d+", name)[:1] == [number[0]]]
    begin = [k for k in alike if key.startswith(k)]
    near = [max(begin, key=len)] if begin else get_close_matches(key, alike, 3, 0.0)
    letters = lambda text: re.sub(r"\d", "", text)
    near = near or get_close_matches(key, [k for k in known if letters(k) == letters(key)], 1, 0.75)
    names = [known[k] for k in near]
    listed = " or ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])
    return f"Perhaps {listed}" if names else "Name a GPU like rtx4090, a6000 or l40s"

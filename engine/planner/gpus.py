"""Known GPUs: names, memory, speed. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from trireme.engine.amounts import size


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes
    matmul: float  # FLOP/s of a bf16 product (fp16 on a V100)
    copy: float  # bytes/s
    bus: float
    fp8: float  # FLOP/s of an fp8 product, summed in fp32; 0: none


# NVIDIA's data sheets: GiB, dense tensor-core TFLOP/s with fp32 accumulation, GB/s of memory (an H200 reaches 0.86).
# Then the share of the peak in a large product: 0.79 measured on an H200, for data-centre and workstation boards;
# GeForce boards clock above their sheet and reach 1 (a block at 164 TFLOP/s on an RTX 4090), an A100 on PCIe 0.72 (at
# 200): Fuyou, section 1, footnote 3. Then GB/s of the bus: PCIe 3, 4, 5 x16 12.5, 25, 55 (measured), x8 half.
_SHEETS = """
RTX 3050 8 18.2 224 1 12.5
RTX 3060 12 25.5 360 1 25
RTX 3060 Ti 8 32.4 448 1 25
RTX 3070 8 40.6 448 1 25
RTX 3070 Ti 8 43.5 608 1 25
RTX 3080 10 59.5 760 1 25
RTX 3080-12G 12 61.3 912 1 25
RTX 3080 Ti 12 68.2 912 1 25
RTX 3090 24 71 936 1 25
RTX 3090 Ti 24 80 1008 1 25
RTX 4060 8 30.2 272 1 12.5
RTX 4060 Ti 8 44.1 288 1 12.5
RTX 4060 Ti-16G 16 44.1 288 1 12.5
RTX 4070 12 58.3 504 1 25
RTX 4070 Super 12 71 504 1 25
RTX 4070 Ti 12 80.2 504 1 25
RTX 4070 Ti Super 16 88.2 672 1 25
RTX 4080 16 97.5 717 1 25
RTX 4080 Super 16 104.4 736 1 25
RTX 4090 24 165.2 1008 1 25
RTX 5060 8 38.4 448 1 27.5
RTX 5060 Ti 8 47.4 448 1 27.5
RTX 5060 Ti-16G 16 47.4 448 1 27.5
RTX 5070 12 61.7 672 1 55
RTX 5070 Ti 16 87.9 896 1 55
RTX 5080 16 112.6 960 1 55
RTX 5090 32 209.5 1792 1 55
RTX A2000 12 31.9 288 0.79 25
RTX A4000 16 76.7 448 0.79 25
RTX A4500 20 94.6 640 0.79 25
RTX A5000 24 111.1 768 0.79 25
RTX A6000 48 154.8 768 0.79 25
RTX 4000 Ada 20 106.9 360 0.79 25
RTX 4500 Ada 24 158.5 432 0.79 25
RTX 5000 Ada 32 261.1 576 0.79 25
RTX 6000 Ada 48 364.2 960 0.79 25
RTX Pro 6000 96 503.8 1792 0.79 55
A10 24 125 600 0.79 25
A10G 24 70 600 0.79 25
A30 24 165 933 0.79 25
A40 48 149.7 696 0.79 25
L4 24 121 300 0.79 25
L40 48 181 864 0.79 25
L40S 48 362 864 0.79 25
V100-32G 32 125 900 0.79 12.5
A100-40G 40 312 1555 0.79 25
A100-80G 80 312 1935 0.72 25
H100 80 989 3350 0.79 55
H200 141 989 4800 0.79 55
B200 180 2250 8000 0.79 55
"""
# Ada, Hopper and Blackwell; twice bf16's rate by their sheets (RTX 4090: 330 TFLOP/s, H200: 1979). Of its own an H200
# reaches 0.73 (1437 TFLOP/s); a GeForce board is taken to reach all of it, as of bf16's.
_WITH_FP8 = re.compile(r"RTX [45]0\d\d|.* Ada|RTX Pro|L4|H[12]00|B200")
_ALSO = {"a100": "a10080g", "h10080g": "h100", "4060ti8g": "4060ti", "5060ti8g": "5060ti"}
_WITHOUT_BF16 = "T4 P4 P40 P100 TitanV TitanRTX V100 V100-16G V100-32G 1070 1080 1080Ti 1660 2060 2070 2080 2080Ti"


def _key(name: str) -> str:
    """`NVIDIA GeForce RTX_4090` as `4090`, `16 GB` as `16g`."""
    plain = re.sub(r"nvidia|geforce|tesla|rtx|gtx|[^a-z0-9]", "", name.lower())
    return re.sub(r"(\d)gi?b$", r"\1g", plain)


def _read(line: str) -> Gpu:
    name, gib, peak, bandwidth, share, bus = line.rsplit(" ", 5)
    matmul, copy = float(f"{peak}e12") * float(share), float(f"{bandwidth}e9") * 0.86
    fp8 = 2 * matmul * (1 if share == "1" else 0.92) if _WITH_FP8.match(name) else 0.0
    return Gpu(name, int(gib) << 30, matmul, copy, float(f"{bus}e9"), fp8)


_BY_KEY = {_key(gpu.name): gpu for gpu in map(_read, _SHEETS.strip().splitlines())}
GPUS = {gpu.name.lower().replace(" ", ""): gpu for gpu in _BY_KEY.values()}


def find_gpu(text: str) -> Gpu:
    """The GPU of that name, or an RTX 4090 of that memory size. Raises ValueError."""
    key = _key(text)
    if key in map(_key, _WITHOUT_BF16.split()):
        raise ValueError(f"{text!r} has no bf16; an A100, an RTX 30 or anything newer has")
    if found := _BY_KEY.get(_ALSO.get(key, key)):
        return found
    try:
        return replace(GPUS["rtx4090"], name="a GPU as fast as an RTX 4090", memory=size(text))
    except ValueError:
        near = get_close_matches(key, _BY_KEY, 1)
        names = f"Perhaps {_BY_KEY[near[0]].name}" if near else "Name a GPU like rtx4090, a6000 or l40s"
        raise ValueError(f"{text!r} is not a GPU known here, nor a size. {names}, or write a size like 24GiB") from None

"""Every kernel gives the same bits in every call, at the shapes of common models, while another stream is busy too."""

from dataclasses import replace

import pytest
import torch

from trireme.engine.check.cases import GROUPS, repeats
from trireme.engine.check.gpu import CHECKED

CALLS = 40  # a race between threads of a program shows in one of ten calls, or more seldom
# smaller where only the number of programs depends on it: others use the GPU at the same time
MIXTURES = {"Qwen3-30B": (32, 8, 2048, 768), "gpt-oss-20b": (6, 4, 2880, 2880)}
SMALLER = dict(heads_of=((2048, 32000),), block=1 << 22, mixtures=MIXTURES)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_every_kernel_repeats(group, large):
    device = torch.device("cuda")
    if group == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    other, a = torch.cuda.Stream(), torch.randn(1 << 22, device=device)
    for case in GROUPS[group](replace(CHECKED, **SMALLER)):
        with torch.cuda.stream(other):
            for _ in range(CALLS):
                a.mul_(1.0)
        assert repeats(case, CALLS), f"{case.op} {case.label}"

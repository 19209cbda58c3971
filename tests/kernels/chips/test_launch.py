"""Launch settings: the model of a chip, settings in use, and what check --tune may try."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trireme.kernels import launch
from trireme.kernels.attention.docs import TILES
from trireme.kernels.chips.chip import Chip
from trireme.kernels.chips.tiles import KNOWN, best
from trireme.kernels.chips.tried import misfit, tried

GPU = torch.device("cuda", 0)
RTX_3090, RTX_4090, H100 = Chip(86, 82, 6 << 20), Chip(89, 128, 72 << 20), Chip(90, 132)
CHIPS = [Chip(arch, 128) for arch in (80, 86, 89, 90, 100, 120, 121)]


@pytest.fixture
def on(monkeypatch):
    """Pretends that the GPU has a chip."""
    yield lambda chip: monkeypatch.setattr(launch, "chip", lambda device: chip)
    launch.use({})


def test_programs_at_once_are_bounded_by_registers_shared_memory_and_warps():
    assert RTX_4090.programs(4, 128, 20 << 10) == 4  # by registers and by shared memory
    assert RTX_4090.programs(4, 121, 49 << 10) == 2  # 121 registers are allocated as 128; 1 KiB each is the driver's
    assert RTX_4090.programs(4, 121, 50 << 10) == 1
    assert H100.programs(4, 121, 50 << 10) == 4
    assert (RTX_4090.programs(16, 32, 0), H100.programs(16, 32, 0)) == (3, 4)
    assert RTX_4090.programs(8, 255, 0) == 1


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"sm_{chip.arch}")
def test_the_model_takes_tiles_that_fit(chip):
    for name, known in KNOWN.items():
        found = best(chip, known)
        assert found.shared <= chip.shared, name
        assert chip.programs(found.tile.warps, found.registers, found.shared) >= 1, name


def test_an_rtx_3090_and_an_a100_get_tiles_of_their_own(on):
    """By their shared memory: two programs at once where both fit."""
    found = {}
    for chip in (RTX_3090, Chip(80, 108, 40 << 20)):
        on(chip)
        found[chip.arch] = launch.attention(GPU, torch.bfloat16, 128)
    assert found[86].fwd == (64, 32, 4, 2)
    assert found[80].fwd == (64, 32, 4, 3)
    assert found[86].dq == found[80].dq == (128, 32, 8, 2)


def test_rows_of_logits_are_wide_where_they_stay_in_l2(on):
    rows = {}
    for chip in (RTX_3090, RTX_4090, H100):
        on(chip)
        rows[chip.arch] = launch.cross_entropy(GPU, 128256), launch.cross_entropy(GPU, 32000)
    wide, narrow = (8192, 32, 2), (4096, 8, 8)
    assert rows == {86: (narrow, narrow), 89: (wide, narrow), 90: (wide, narrow)}


def test_products_of_experts_have_a_wide_tile_on_hopper(on):
    """In bf16 alone, where columns fill it, with the depth of the usual tile: the order of the sums stays."""
    usual, wide = (128, 64, 128, 8, 3), (128, 64, 256, 8, 3)
    on(H100)
    for B, tile in ((16, usual), (128, usual), (256, wide), (640, usual), (1408, wide), (2880, wide), (28672, wide)):
        assert launch.grouped_mm(GPU, torch.bfloat16, B) == tile
    assert launch.grouped_mm(GPU, torch.float8_e4m3fn, 1024) == (128, 128, 128, 8, 3)
    on(Chip(100, 148))
    assert launch.grouped_mm(GPU, torch.bfloat16, 1024) == usual


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"sm_{chip.arch}")
def test_what_is_tried_has_the_usual_setting_and_rows_that_documents_are_cut_into(on, chip):
    on(chip)
    settings = tried(chip)
    tiles = {w: launch.attention(GPU, torch.bfloat16, w)._asdict() for w in (64, 128, 256)}
    usual = {f"attention_{kind} {w}": tile for w, each in tiles.items() for kind, tile in each.items()}
    usual |= {
        "grouped_mm": launch.grouped_mm(GPU, torch.bfloat16, 2880),
        "grouped_add": launch.grouped_add(GPU, torch.bfloat16),
    }
    usual |= {"quantize": launch.quantize(GPU, False), "quantize both": launch.quantize(GPU, True)}
    usual |= {"gated_codes": launch.gated_codes(GPU), "block_scaled": launch.block_scaled(GPU)}
    usual |= {
        "cross_entropy": launch.cross_entropy(GPU, 32000),
        "cross_entropy wide": launch.cross_entropy(GPU, 1 << 17),
    }
    assert settings.keys() - usual.keys() == {"rows_bwd"}
    assert all(usual[name] in settings[name] for name in settings.keys() & usual.keys())
    for name, each in settings.items():
        assert len(set(each)) == len(each) > 1, name
        if name.startswith("attention_"):
            assert {s[name.startswith("attention_dkv")] for s in each} <= {*TILES}, name
    assert ("block_scaled" in settings, "quantize" in settings) == (chip.arch >= 120, chip.arch >= 89)
    assert ("grouped_mm" in settings) == ("grouped_add" in settings) == (chip.arch != 90)


def test_settings_in_use_are_for_bf16_and_leave_other_launches(on):
    on(RTX_4090)
    usual, fp32 = launch.attention(GPU, torch.bfloat16, 128), launch.attention(GPU, torch.float32, 128)
    codes = launch.quantize(GPU, True)
    settings = {"attention_dq 128": [64, 32, 4, 3], "quantize both": [64, 64, 4], "rows_bwd": [16, 1]}
    rows = launch.rows_bwd(GPU, 4096, 2048, 2)
    launch.use(settings)
    assert launch.attention(GPU, torch.bfloat16, 128) == usual._replace(dq=(64, 32, 4, 3))
    assert launch.attention(GPU, torch.float32, 128) == fp32
    assert (launch.quantize(GPU, True), launch.quantize(GPU, False)) == ((64, 64, 4), (64, 128, 8))
    assert (rows.rows, rows.programs) == (2, 256)
    assert launch.rows_bwd(GPU, 4096, 2048, 2)[::4] == (4, 128)
    launch.use({})
    assert launch.attention(GPU, torch.bfloat16, 128) == usual
    assert launch.quantize(GPU, True) == codes
    assert launch.rows_bwd(GPU, 4096, 2048, 2) == rows


def test_other_settings_than_those_tried_are_refused():
    assert misfit(RTX_4090, {"grouped_mm": [64, 64, 128, 4, 3]}) == ""
    assert (
        misfit(RTX_4090, {"grouped_mm": [64, 64, 128, 4, 5]}) == "'grouped_mm' is not launched with [64, 64, 128, 4, 5]"
    )
    assert misfit(RTX_4090, {"block_scaled": [1]}) == "'block_scaled' is not a launch of this GPU"
    assert misfit(RTX_3090, {"attention_fwd 128": [64, 64, 4, 2]}) == ""
    assert misfit(H100, {"attention_fwd 128": [64, 64, 4, 2]}).startswith("'attention_fwd 128' is not launched with")


@pytest.mark.full
def test_the_compiler_says_what_the_model_takes_of_it():
    """Of the tiles that an RTX 3090 and 4090 get: registers, shared memory, no spills."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parents[2] / "helpers" / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, script, "89", "--tiles"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    chosen = {name: best(RTX_4090, known) for name, known in KNOWN.items()}
    assert {kernel["launch"] for kernel in kernels} == chosen.keys()
    for kernel in kernels:
        known = chosen[kernel["launch"]]
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= known.shared, kernel
        assert kernel["registers"] <= known.registers + 8, kernel  # of another version of the compiler

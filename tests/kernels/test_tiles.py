"""Launch settings: the table of a chip, settings in use, and what check --tune may try."""

import pytest
import torch

from trireme.kernels import launch
from trireme.kernels.attention.docs import TILES
from trireme.kernels.tiles import TABLE, Chip, misfit, settings, tried

GPU = torch.device("cuda", 0)
RTX_3090, RTX_4090, RTX_5090 = Chip(86, 82, 6 << 20), Chip(89, 128, 72 << 20), Chip(120, 170, 96 << 20)
H100 = Chip(90, 132)
CHIPS = [Chip(arch, 128) for arch in (80, 86, 89, 90, 100, 120, 121)]


@pytest.fixture
def on(monkeypatch):
    """Pretends that the GPU has a chip."""
    yield lambda chip: monkeypatch.setattr(launch, "chip", lambda device: chip)
    launch.use({})


def test_rows_of_logits_are_wide_where_they_stay_in_l2(on):
    wide, narrow = (8192, 32, 2), (4096, 8, 8)
    rows = {
        RTX_3090: (narrow, narrow, narrow, narrow),
        RTX_4090: (narrow, wide, wide, wide),
        RTX_5090: (narrow, wide, wide, wide),
        H100: (narrow, wide, wide, wide),
    }
    for chip, expected in rows.items():
        on(chip)
        assert tuple(launch.cross_entropy(GPU, V) for V in (32000, 128256, 151936, 262208)) == expected


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"sm_{chip.arch}")
def test_the_first_setting_is_used_and_all_keep_the_rows_that_documents_are_cut_into(on, chip):
    on(chip)
    for kind, width in (name.removeprefix("attention_").split() for name in TABLE if name.startswith("attention_")):
        each = settings(chip, f"attention_{kind} {width}")
        for D in (int(width), int(width) - 8):
            assert getattr(launch.attention(GPU, torch.bfloat16, D), kind) == each[0]
        assert {s[kind == "dkv"] for s in each} <= {*TILES}
    assert launch.grouped_add(GPU, torch.bfloat16) == settings(chip, "grouped_add")[0]
    assert launch.quantize(GPU, True) == settings(chip, "quantize both")[0]
    known = tried(chip)
    assert all(len(set(each)) == len(each) for each in known.values())
    assert ("block_scaled" in known, "quantize" in known) == (chip.arch >= 120, chip.arch >= 89)
    assert ("grouped_mm" in known) == ("grouped_add" in known) == (chip.arch != 90)


def test_settings_in_use_are_for_bf16_and_leave_other_launches(on):
    on(RTX_4090)
    usual, fp32 = launch.attention(GPU, torch.bfloat16, 128), launch.attention(GPU, torch.float32, 128)
    codes = launch.quantize(GPU, True)
    rows = launch.rows_bwd(GPU, 4096, 2048, 2)
    launch.use({"attention_dq 128": [64, 32, 4, 3], "quantize both": [64, 64, 4], "rows_bwd": [16, 1]})
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
    assert misfit(RTX_3090, {"attention_fwd 128": [64, 64, 4, 2]}) == ""
    for chip, name, setting in (
        (RTX_4090, "grouped_mm", [64, 64, 128, 4, 5]),
        (RTX_4090, "block_scaled", [1]),
        (H100, "attention_fwd 128", [64, 64, 4, 2]),
    ):
        assert name in misfit(chip, {name: setting})
    assert all(misfit(RTX_5090, {name: TABLE[name][1][0]}) == "" for name in TABLE)

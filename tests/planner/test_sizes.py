"""Shapes by the names that models are published under."""

import pytest

from trireme.engine.planner.sizes import find_model
from trireme.models.config import InputError
from trireme.models.sizes import shapes

TOWER = 416_866_032  # parameters of Gemma 3's vision part, without the projection to the model's width
PUBLISHED = {  # as the hub counts them
    "Qwen/Qwen3-0.6B": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "Qwen3-4B-Instruct-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b-base": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "qwen2.5-7b-instruct": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "Llama-2-7b-hf": 6_738_415_616,
    "gemma-3-1b-it": 999_885_952,
    "gemma-3-4b-it": 4_300_079_472 - TOWER - 1152 * 2561,
    "gemma-3-12b-pt": 12_187_325_040 - TOWER - 1152 * 3841,
    "gemma-3-27b-it": 27_432_406_640 - TOWER - 1152 * 5377,
    "mistral-7b-v0.3": 7_248_023_552,
    "Mistral-Small-24B-Base-2501": 23_572_403_200,
    "phi-4": 14_659_507_200,
    "mixtral-8x7b-v0.1": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_419_200,
    "Qwen/Qwen3.5-9B": 8_953_803_264,
    "Qwen/Qwen3.5-27B": 26_895_998_464,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen/Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen/Qwen3.5-397B-A17B": 396_346_350_336,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "allenai/Olmo-Hybrid-7B": 7_430_870_688,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
    "ibm-granite/granite-4.0-h-micro": 3_191_396_096,
    "ibm-granite/granite-4.0-h-tiny": 6_939_037_248,
    "ibm-granite/granite-4.0-h-small": 32_207_337_984,
    "tiiuae/Falcon-H1-0.5B-Instruct": 521_411_104,
    "tiiuae/Falcon-H1-1.5B-Deep-Base": 1_554_874_768,
    "tiiuae/Falcon-H1-7B-Instruct": 7_585_654_880,
    "tiiuae/Falcon-H1-34B-Base": 33_642_516_224,
}
ABOUT = {  # as names and cards say, in 1e9
    "Qwen/Qwen3.8-2.4T-A95B": 2400, "RecursiveSI/Flint-40B-A3B": 39.8, "arcee-ai/Trinity-Nano-Preview": 6.1,
    "arcee-ai/Trinity-Mini": 26.1, "arcee-ai/Trinity-Large-Preview": 400, "Aleph-Alpha/Kolibri-1": 78.1,
    "poolside/Laguna-XS.2": 33.2, "XiaomiMiMo/MiMo-V2-Flash": 308.8, "translated/Lara-4-Mini-Base": 7.3,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED | ABOUT)
def test_a_published_name_has_that_models_size(name):
    expected = pytest.approx(ABOUT[name] * 1e9, rel=0.02) if name in ABOUT else PUBLISHED[name]
    assert shapes.parameters(find_model(name)) == expected


@pytest.mark.parametrize(("name", "near"), [("qwen3-9b", "qwen3.5-9b"), ("gpt-oss-20", "gpt-oss-20b")])
def test_another_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(InputError, match=f"--shape {name} .*{near}"):
        find_model(name)

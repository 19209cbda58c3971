"""What passes take, measured without memory: FLOPs against parameters, sums over tensors, bytes of temporaries."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import chain, combinations
from math import prod

import pytest
import transformers
from tiny import CASES

from trireme.engine.planner.sizes import find_model
from trireme.models.config import Lora, ModelConfig, Teaching, parse_config
from trireme.models.families.packing import FP8
from trireme.models.head import LOSS_CHUNK
from trireme.models.sizes import costs, measure, narrow, shapes

SMALL = dict(vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
LLAMA = parse_config(SMALL | dict(model_type="llama", num_key_value_heads=2, head_dim=32))
MIXTURE = parse_config(SMALL | dict(
    model_type="qwen3_moe", num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=48,
))  # fmt: skip
FALCON_H1 = parse_config(SMALL | dict(
    model_type="falcon_h1", num_key_value_heads=2, head_dim=24, mamba_d_ssm=80, mamba_n_heads=4, mamba_d_state=16,
))  # fmt: skip
FIRST = {model_type: case for case, (model_type, _) in reversed(CASES.items())}
TOKENS, PAIRS = 512, 40000


def config(case: str) -> ModelConfig:
    model_type, keys = CASES[case]
    raw = json.loads(transformers.AutoConfig.for_model(model_type, **keys).to_json_string(use_diff=False))
    return parse_config(raw | {"model_type": model_type})


@pytest.mark.full
@pytest.mark.parametrize("case", FIRST.values())
def test_flops_are_those_of_the_parameters(case):
    """Two a token and element of a matrix in forward, twice that in backward; of experts those of a token."""
    cfg = config(case)
    for u in {shapes.kind(cfg, u): u for u in range(1, cfg.n_units - 1)}.values():
        layer = shapes.unit(cfg, u)
        conv, spec = f"{layer.mixer_names.conv}.weight", layer.experts
        share = lambda shape, spec=spec: spec.chosen / spec.count if spec and len(shape) > 2 else 1.0
        matrices = sum(
            prod(shape) * share(shape)
            for group in shapes.weight_groups(cfg, u) for name, shape in group
            if len(shape) > 1 and not (layer.scan and name.endswith(conv))
        )  # fmt: skip
        forward, backward = measure.work(cfg, u, TOKENS, PAIRS, names=frozenset(shapes.saved_of(cfg, layer, 1)))
        linear = lambda work: sum(
            n for kind, n in work.flops.items() if kind in ("gemm", "grouped", "grouped gradients")
        )
        assert linear(forward) == pytest.approx(2 * TOKENS * matrices, rel=1e-6)
        assert linear(backward) >= 2 * linear(forward) * (1 - 1e-6)  # routers, latents are computed again
        mixed = sum(n for kind, n in forward.flops.items() if kind.startswith(("attention", "scan")))
        assert mixed == pytest.approx(costs.mixer_flops(layer, TOKENS, PAIRS))


@pytest.mark.full
@pytest.mark.parametrize("case", FIRST.values())
def test_bytes_are_a_line_in_tokens_and_less_where_more_is_saved(case):
    cfg = config(case)
    for u in {shapes.kind(cfg, u): u for u in range(1, cfg.n_units - 1)}.values():
        measured = max(taken.peak for taken in measure._inner(cfg, u, 3072, "BF16", "F32", frozenset()))
        assert 0 <= measure.temporaries(cfg, u, 3072, 2, 4) - measured <= 2 * measure.SLACK
        every = frozenset(shapes.saved_of(cfg, shapes.unit(cfg, u), 1))
        nothing, all_ = (measure.work(cfg, u, TOKENS, PAIRS, names=kept)[1] for kept in (frozenset(), every))
        assert sum(all_.flops.values()) < sum(nothing.flops.values())
        assert all_.moved < nothing.moved


@pytest.mark.full
@pytest.mark.parametrize("cfg", [LLAMA, MIXTURE, FALCON_H1, replace(LLAMA, fp8=True)])
def test_what_is_computed_again_is_a_sum_over_tensors(cfg):
    """So the planner may ask for every subset."""
    names, flops = shapes.saved_shapes(cfg, 1), lambda work: sum(work.flops.values())
    least = flops(measure.work(cfg, 1, TOKENS, PAIRS, names=frozenset(names))[1])
    for kept in map(frozenset, chain.from_iterable(combinations(names, k) for k in (0, 1, 2))):
        again = flops(measure.work(cfg, 1, TOKENS, PAIRS, names=kept)[1]) - least
        assert flops(measure.rebuilt(cfg, 1, TOKENS, PAIRS, kept, 2)) == pytest.approx(again, rel=1e-6, abs=1)


def test_experts_of_few_rows_stay_in_bf16():
    """There quantizing the matrices would take longer than fp8 saves."""
    cfg, enough = replace(MIXTURE, fp8=True), -(-narrow.LEAST_ROWS * 8 // 3)
    for tokens in (enough - 1, enough):
        assert ("grouped fp8" in measure.work(cfg, 1, tokens, 0)[0].flops) == (tokens == enough)


@pytest.mark.usefixtures("few_rows_in_fp8")
@pytest.mark.parametrize("fp8", [False, True])
def test_slices_take_what_all_experts_take(fp8):
    cfg = replace(MIXTURE, halves=True, frozen=("*",), lora=Lora(4, 8.0, ("experts",)), fp8=fp8)
    flops = lambda cfg: [sum(work.flops.values()) for work in measure.work(cfg, 2, TOKENS, 0)]
    assert flops(replace(cfg, slices=4)) == pytest.approx(flops(cfg), rel=0.05)  # the last routes again


def test_experts_that_are_decoded_some_at_a_time_take_less():
    raw = SMALL | dict(
        model_type="qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=480,
        quantization_config=dict(quant_method="fp8", weight_block_size=[16, 16]),
    )  # fmt: skip
    cfg = replace(parse_config(raw), lora=Lora(2, 4.0, ("q_proj",)), frozen=("*",), halves=True)
    assert cfg.packing == replace(FP8, block=(16, 16), shaped=cfg.packing.shaped)
    some, more = (measure.temporaries(replace(cfg, at_once=n), 2, TOKENS, 2) for n in (2, 8))
    assert 960 * 64 * 2 < more - some <= 6 * 960 * 64 * 2
    assert measure.forward_flops(replace(cfg, at_once=2), 2, TOKENS, 0) == measure.forward_flops(cfg, 2, TOKENS, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_several_chunks_sums_in_fp32(tied):
    cfg = parse_config(SMALL | dict(model_type="llama", vocab_size=40000, tie_word_embeddings=tied))
    head, matrix = cfg.n_units - 1, 40000 * 64
    one, many = (measure.temporaries(cfg, head, n, 2, 2) for n in (LOSS_CHUNK + 2 * 64, LOSS_CHUNK + 2 * 64 + 1))
    logits = 2 * 40000
    assert one == pytest.approx(logits * (LOSS_CHUNK + 2 * 64), rel=0.05)
    assert many == pytest.approx(logits * LOSS_CHUNK + 4 * matrix, rel=0.05)
    taught = measure.temporaries(replace(cfg, teaching=Teaching(8, 0.5, 1.0)), head, LOSS_CHUNK, 2, 2)
    assert taught >= logits * LOSS_CHUNK


def test_heads_without_a_kernel_are_counted():
    """A CPU computes them; only where a GPU is planned for are they refused."""
    for dim in (6, 512):
        cfg = parse_config(SMALL | dict(model_type="llama", head_dim=dim))
        assert measure.temporaries(cfg, 1, TOKENS, 4) > 4 * TOKENS * 4 * dim


COMPILED = """
import sys
sys.modules["torch._dynamo"] = None
from dataclasses import replace
from trireme.engine.planner.sizes import find_model
from trireme.engine.tuning.chosen import adapted, aware, targets
from trireme.models.config import Lora
from trireme.models.sizes import measure, narrow, shapes
for name in sys.argv[1:]:
    base = find_model(name)
    modules = targets(base, ())
    cfg = adapted(base, Lora(4, 8.0, modules))
    ways = [cfg, replace(cfg, fp8=True)]
    ways += [replace(cfg, halves=True, slices=4, at_once=2)] if narrow.may_be_sliced(cfg) else []
    ways += [aware(adapted(base, Lora(4, 8.0, (*modules, base.names.mlp.experts))), None)] if cfg.packing else []
    for way in ways:
        for u in set(shapes.representatives(way)):
            measure.temporaries(way, u, 4096, 2, 4)
"""


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from trireme.engine.planner.sizes import find_model
from trireme.models.sizes import measure
cfg = find_model("qwen3-30b")
print(measure.work(cfg, 1, 3000, 10**6), measure.temporaries(cfg, 1, 3000, 2), measure.temporaries(cfg, 0, 3000, 2))
"""


@pytest.mark.full
def test_counts_without_triton_are_those_with_it():
    cfg = find_model("qwen3-30b")
    counts = measure.work(cfg, 1, 3000, 10**6), *(measure.temporaries(cfg, u, 3000, 2) for u in (1, 0))
    words = [sys.executable, "-c", WITHOUT_TRITON]
    run = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
    assert run.stdout == " ".join(map(str, counts)) + "\n"


@pytest.mark.full
def test_measuring_imports_no_compiler():
    """That of torch takes seconds, and its frames hold the tensors of a pass, which then seems to need more."""
    models = ["kimi-k2.5", "qwen3.5-35b", "nemotron-3-nano", "deepseek-v3", "gpt-oss-20b", "falcon-h1-0.5b"]
    subprocess.run([sys.executable, "-c", COMPILED, *models], check=True, timeout=300)

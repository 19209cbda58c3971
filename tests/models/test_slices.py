"""Experts in slices: bitwise all of them at once, decoded or streamed; a layer of DeepSeek-V3 on a GPU."""

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from engines import batches, final_weights, gpu_plan, train

from trireme.engine.buffers import usage
from trireme.engine.build import build
from trireme.engine.exchange import fill, fill_base
from trireme.engine.geometry import Geometry
from trireme.engine.memory import views
from trireme.engine.plan import Limits, UnitPlan
from trireme.engine.planner.sizes import find_model
from trireme.engine.queues.real import RealQueues
from trireme.engine.tuning.chosen import adapted, targets
from trireme.kernels import ops
from trireme.models import model
from trireme.models.config import Lora, ModelConfig
from trireme.models.families.packing import FP8, INT4_ZEROS, MXFP4, NF4, NVFP4
from trireme.models.mlps.grouped import Grouped, Sliced, grouped_backward, grouped_linear
from trireme.models.packed import DTYPE, decode
from trireme.models.rows import make_rows, rope_tables
from trireme.models.sizes import measure
from trireme.models.sizes.narrow import may_be_sliced

PACKINGS = {"mxfp4": MXFP4, "fp8": replace(FP8, block=(24, 20)), "nf4": NF4, "nvfp4": NVFP4,
            "int4": INT4_ZEROS}  # fmt: skip
BIASED = pytest.mark.parametrize("biased", [False, True])


def test_only_blocks_that_can_be_divided_have_slices():
    """Nor have experts with a norm behind their sum."""
    for name, divided in (
        ("Qwen3-30B-A3B", True), ("Nemotron-3-Nano", False), ("Gemma-4-26B-A4B", False), ("Trinity-Mini", False),
    ):  # fmt: skip
        cfg = find_model(name)
        assert may_be_sliced(adapted(cfg, Lora(4, 8.0, targets(cfg, ())))) == divided


def packed(name, experts, rows, columns, device="cpu"):
    """(packing, random parts, all decoded) of matrices (experts, rows, columns) in memory."""
    packing, found = PACKINGS[name], []
    for part, shape in zip(packing.parts, packing.shapes((experts, rows, columns)), strict=True):
        dtype = DTYPE.get(part.dtypes[0], torch.uint8)
        if dtype == torch.int32:
            found.append(torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(dtype))
        else:
            found.append(
                torch.rand(shape).to(dtype) + 1 if dtype.is_floating_point else torch.randint(96, 126, shape).to(dtype)
            )
    found = [part.to(device) for part in found]
    out = torch.empty((experts, rows, columns), dtype=torch.bfloat16, device=device)
    return packing, tuple(found), decode(packing, found, out)


def check(name, back, biased, sizes, device="cpu"):
    """Every cut, from one expert at a time to more than there are."""
    torch.manual_seed(0)
    N, E, k, D, F = sizes
    packing, parts, whole = packed(name, E, F, D, device)
    chosen = torch.rand(N, E, device=device).topk(k).indices.sort(1).values.int()
    chosen[chosen == 1] = 0  # one expert without rows
    order = ops.sort_pairs(chosen, E)
    x = torch.randn(N if not back else N * k, F if back else D, device=device).bfloat16()
    bias = torch.randn(E, F, device=device).bfloat16() if biased and not back else None
    expected = ops.grouped_mm(x, whole if back else whole.mT, order, 0 if back else k, None, bias)
    for at_once in (1, 2, E - 1, E, E + 3):
        w = Grouped(Sliced(packing, parts, (F, D), True, at_once), bias, None)
        found = grouped_backward(x, w, order)[0] if back else grouped_linear(x, w, order, k)
        assert torch.equal(found, expected), at_once


@BIASED
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", PACKINGS)
def test_any_cut_gives_the_same_bits(name, back, biased):
    check(name, back, biased, (19, 6, 2, 64, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(300, 6, 2, 64, 96), (700, 40, 6, 512, 1024)], ids=str)
@BIASED
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", PACKINGS)
def test_any_cut_gives_the_same_bits_on_a_gpu(name, back, biased, sizes):
    check(name, back, biased, sizes, "cuda")


# ---------------------------------------------------------------- a layer


LORA = Lora(16, 32.0, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))


def config(**sizes) -> ModelConfig:
    """Two layers of DeepSeek-V3 in fp8 blocks, the first dense, in sub-layers."""
    cfg = find_model("deepseek-v3")
    assert cfg.experts is not None
    layers = (cfg.layers[0], cfg.layers[-1])
    return replace(cfg, layers=layers, lora=LORA, frozen=("*",), halves=True, packing=FP8,
                   packed=("*layers.*", "!*.mlp.gate.weight"), **sizes)  # fmt: skip


def small() -> ModelConfig:
    cfg = config(width=32, vocab=97)
    latent = replace(cfg.attentions[0].latent, q_rank=12, kv_rank=16, nope=16, rope=8, value=16)
    rope = replace(cfg.attentions[0].rope, width=8)
    own = replace(cfg.attentions[0], heads=4, kv_heads=4, dim=24, latent=latent, rope=rope)
    experts = replace(cfg.experts, count=16, chosen=4, width=16, shared=16, groups=4, kept=2)
    mlps = (replace(cfg.layers[0].mlp, width=48),), (experts,)
    layers = (replace(at, width=32, mixers=(own,), mlps=mlp) for at, mlp in zip(cfg.layers, mlps, strict=True))
    return replace(cfg, layers=tuple(layers))


def filled(cfg: ModelConfig, u: int, device: str):
    """Weights and gradients of unit u, seeded by it; codes and scales whose products are about 1 / sqrt(width)."""
    geo, generator = Geometry(cfg, "BF16"), torch.Generator(device).manual_seed(u)
    found = {}
    for layouts in (geo.base, geo.weights):
        buffer = torch.zeros(layouts[u].span, dtype=torch.uint8, device=device)
        for name, t in views(layouts[u], buffer).items():
            if name.endswith("_codes"):  # finite, of both signs
                t.view(torch.uint8).random_(0, 96, generator=generator).add_(128 * (t.view(torch.uint8) % 2))
            elif name.endswith("_scale_inv"):
                t.fill_(0.3 * cfg.width**-0.5)
            else:
                t.normal_(1.0 if "norm" in name else 0.0, 0.02, generator=generator)
            found[name] = t
    made = views(geo.decoded[u], torch.zeros(geo.decoded[u].span, dtype=torch.uint8, device=device))
    model.make_codes(cfg, u, found, made, True)
    room = torch.zeros(geo.weights[u].span, dtype=torch.uint8, device=device)
    return model.weights(cfg, u, found | made), model.gradients(cfg, u, views(geo.weights[u], room)), room


def passed(cfg: ModelConfig, tokens: int, device: str):
    """(outputs, gradients) of a layer's sub-layers; on a GPU, within the workspace that a plan counts on."""
    rows = make_rows([tokens // 2, tokens - tokens // 2], rope_tables(cfg, tokens, device), device)
    generator = torch.Generator(device).manual_seed(9)
    x, dy = (torch.randn(tokens, cfg.width, device=device, generator=generator).bfloat16() for _ in range(2))
    found = []
    for u in (3, 4):
        w, g, room = filled(cfg, u, device)
        out, dx = torch.empty_like(x), torch.empty_like(x)
        bound = measure.temporaries(cfg, u, tokens, 2)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        model.forward(cfg, u, w, x, rows, {}, out)
        model.backward(cfg, u, w, g, x, {}, dy, rows, dx)
        if device == "cuda":
            assert torch.cuda.max_memory_allocated() - before <= 1.02 * bound
        assert out.isfinite().all()
        assert dx.isfinite().all()
        found += [out, dx, room]
        del w, g
    return found


def check_layer(cfg: ModelConfig, tokens: int, device: str, cuts: tuple[int, ...]) -> None:
    first, *others = [passed(replace(cfg, at_once=at_once), tokens, device) for at_once in cuts]
    assert all(torch.equal(a, b) for found in others for a, b in zip(first, found, strict=True))


def test_a_small_layer_in_any_slices():
    check_layer(small(), 24, "cpu", (0, 1, 5, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_a_layer_of_deepseek_v3_in_any_slices(tokens, large):
    """256 experts of 7168 x 2048: 11.4 GB in fp8, never decoded at once."""
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("other processes have the GPU's memory: run it alone")
    check_layer(config(), tokens, "cuda", (16, 24))


# ---------------------------------------------------------------- streamed through an engine

TILE = 1 << 20  # values that names and places choose from
RANDOM = np.random.default_rng(0)
CODES = (RANDOM.integers(0, 96, TILE) + 128 * RANDOM.integers(0, 2, TILE)).astype(np.uint8)
NORMAL = RANDOM.standard_normal(TILE, np.float32) * np.float32(0.02)


def values(cfg: ModelConfig):
    """As Exchange reads them: by name and place alone, and fast."""

    def read(name: str, first: int, last: int):
        tile = CODES if name.endswith("_codes") else NORMAL
        at = first + crc32(name.encode())
        while first < last:
            part = tile[at % TILE :][: last - first]
            first, at = first + len(part), at + len(part)
            if name.endswith("_scale_inv"):
                part = np.full_like(part, 0.3 * cfg.width**-0.5)
            yield part + 1 if "norm" in name else part

    return read


def trained(cfg: ModelConfig, tokens: int, device: str, slices: int, limits: Limits):
    """(losses and norms of two steps, adapters, GPU bytes planned) of the layers, frozen weights from RAM."""
    units = (UnitPlan("ram", "ram", base="ram", x="ram"),) * cfg.n_units
    cut = dict(halves=True, at_once=16, slices=slices, window=1 if slices == 1 else 2, dtype="BF16")
    plan = gpu_plan(cfg, units=units, tokens=tokens, n_micro=2, **cut)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    e = build(cfg, plan, limits, RealQueues(device), pinned=False)
    fill(e.placement, values(cfg))
    fill_base(e.placement, values(cfg))
    found = train(e, batches(cfg, 2, 2, tokens)), final_weights(e), usage(e.geo, plan)["gpu"]
    if device == "cuda":
        assert torch.cuda.max_memory_allocated() - before <= found[2] + (64 << 20)  # cuBLAS's
    e.queues.close()
    e.close()
    return found


def check_streamed(cfg: ModelConfig, tokens: int, device: str, limits: Limits, cuts: tuple[int, ...]) -> list[int]:
    """GPU bytes of each cut."""
    first, *others = [trained(cfg, tokens, device, slices, limits) for slices in cuts]
    for losses, weights, _ in others:
        assert losses == first[0]
        assert all(torch.equal(value, first[1][name]) for name, value in weights.items())
    assert all(np.isfinite(loss) for step in first[0] for loss in step)
    return [nbytes for *_, nbytes in (first, *others)]


@pytest.mark.full
def test_a_small_layer_is_streamed_in_any_slices():
    cfg = replace(small(), max_positions=64)
    whole, *others = check_streamed(cfg, 24, "cpu", Limits(1 << 28, 1 << 28), (1, 3, 16))
    assert max(others) < whole + (1 << 20)


@pytest.mark.gpu
def test_a_layer_of_deepseek_v3_is_streamed_on_24_gib(large):
    """256 experts in 4 or 8 slices, two of which are on the GPU at a time, beside all of them in one: the same bits."""
    if torch.cuda.mem_get_info()[0] < 26 << 30:
        pytest.skip("other processes have the GPU's memory: run it alone")
    cfg = config(vocab=2048)
    whole, *others = check_streamed(cfg, 48, "cuda", Limits(24 << 30, 48 << 30), (1, 4, 8))
    assert max(others) < 0.7 * whole  # 12.4 GiB

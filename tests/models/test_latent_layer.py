"""A layer of latent attention and of packed experts in slices, as a step has it: on a GPU one of DeepSeek-V3."""

from dataclasses import replace

import pytest
import torch

from trireme.engine.geometry import Geometry
from trireme.engine.memory import views
from trireme.engine.planner.sizes import find_model
from trireme.models import model
from trireme.models.config import FP8, Lora, ModelConfig
from trireme.models.rows import make_rows, rope_tables
from trireme.models.sizes import workspace

LORA = Lora(16, 32.0, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))


def config(**sizes) -> ModelConfig:
    """Two layers of DeepSeek-V3 in fp8 blocks, the first dense, in sub-layers."""
    cfg = find_model("deepseek-v3")
    assert cfg.experts is not None
    experts = replace(cfg.experts, dense=(0,))
    return replace(cfg, n_layers=2, experts=experts, lora=LORA, frozen=("*",), halves=True, packing=FP8,
                   packed=("*layers.*", "!*.mlp.gate.weight"), **sizes)  # fmt: skip


def small() -> ModelConfig:
    cfg = config(width=32, n_heads=4, n_kv_heads=4, head_dim=24, ffn=48, vocab=97)
    latent = replace(cfg.latent, q_rank=12, kv_rank=16, nope=16, rope=8, value=16)
    rope, experts = (
        replace(cfg.rope, width=8),
        replace(cfg.experts, count=16, chosen=4, width=16, shared=16, groups=4, kept=2),
    )
    return replace(cfg, latent=latent, rope=rope, experts=experts)


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
        bound = workspace.workspace_bytes(cfg, u, tokens, 2)
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


def check(cfg: ModelConfig, tokens: int, device: str, cuts: tuple[int, ...]) -> None:
    first, *others = [passed(replace(cfg, at_once=at_once), tokens, device) for at_once in cuts]
    assert all(torch.equal(a, b) for found in others for a, b in zip(first, found, strict=True))


def test_a_small_layer_in_any_slices():
    check(small(), 24, "cpu", (0, 1, 5, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_a_layer_of_deepseek_v3_in_any_slices(tokens):
    """256 experts of 7168 x 2048: 11.4 GB in fp8, never decoded at once."""
    check(config(), tokens, "cuda", (16, 24))

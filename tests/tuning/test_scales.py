"""rsLoRA and LoRA+, which are scales of ordinary adapters."""

import pytest
import torch
from runs import make_small

from trireme.engine.run.begin.model import what_is_trained
from trireme.engine.run.options import Options
from trireme.models.config import InputError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_small(tmp_path_factory.mktemp("scales")) / "checkpoint")


@pytest.mark.parametrize("given", [dict(lora_alpha=12.0), {}])
def test_rslora_scales_as_peft(model, given):
    """Without an alpha, peft's own, 8."""
    peft = pytest.importorskip("peft")
    ours = what_is_trained(Options(model=model, lora=16, rslora=True, **given)).lora.scale
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    theirs = peft.get_peft_model(layer, peft.LoraConfig(r=16, target_modules=["0"], use_rslora=True, **given))
    assert ours == pytest.approx(theirs.base_model.model[0].scaling["default"])


def test_loraplus_is_a_larger_alpha(model):
    plain = what_is_trained(Options(model=model, lora=4)).lora.scale
    assert what_is_trained(Options(model=model, lora=4, loraplus=16.0)).lora.scale == 16 * plain
    with pytest.raises(InputError, match="Give their rank: --lora 16"):
        what_is_trained(Options(model=model, loraplus=16.0))


def test_an_alpha_that_is_larger_by_a_ratio_trains_b_faster_by_it():
    """LoRA+ as published, with two learning rates, beside one rate and a larger scale: the same sum of W and B A."""
    ratio, x, y = 8.0, torch.randn(32, 6, dtype=torch.float64), torch.randn(32, 5, dtype=torch.float64)
    first = torch.randn(3, 6, dtype=torch.float64)

    def trained(scale, rates):
        a, b = first.clone().requires_grad_(), torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
        groups = [dict(params=[p], lr=lr) for p, lr in zip((a, b), rates, strict=True)]
        optimizer = torch.optim.AdamW(groups, eps=1e-30, weight_decay=0.0)
        for _ in range(10):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(x @ a.T @ b.T * scale, y).backward()
            optimizer.step()
        return (scale * b @ a).detach()

    assert torch.allclose(trained(2.0, (1e-2, ratio * 1e-2)), trained(2.0 * ratio, (1e-2, 1e-2)), rtol=1e-3)

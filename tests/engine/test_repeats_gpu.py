"""On a GPU: a step of layers at real widths gives the same bits each time."""

from dataclasses import replace

import pytest
import torch
from engines import deep

from trireme.engine.build import inputs_on
from trireme.engine.check.steps import make_batch, random_engine
from trireme.engine.plan import Limits
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.sizes import find_model
from trireme.engine.queues.real import RealQueues
from trireme.engine.step import train_step
from trireme.engine.tuning.chosen import adapted, targets
from trireme.models.config import Lora
from trireme.models.rows import rope_tables

TIMES = 8


def steps(cfg, device, dtype, tokens, seq):
    """(loss, norm of gradients) of the same step again and again, which changes no weight."""
    limits = Limits(48 << 30, 16 << 30)
    plan = simple_plan(
        cfg, limits, Wanted(((tokens, 1),), dtype, placement="gpu", on_cuda=device == "cuda", document=seq)
    )
    torch.manual_seed(0)
    with random_engine(cfg, plan, limits, RealQueues(device), None) as e:
        places = [(rope_tables(e.cfg, seq, gpu), gpu) for gpu in e.queues.devices]
        (batch,) = make_batch(e.cfg, tokens, seq, tokens // seq, 1)
        for step in range(TIMES):
            stats = train_step(e, [inputs_on(e.cfg, batch, places)], step + 1, 0.0)
            e.optimizer.flush()
            yield stats.loss, stats.grad_norm


def test_a_small_step_repeats():
    assert len(set(steps(find_model("llama-tiny"), "cpu", "F32", 64, 32))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("seq", [8192, 1024])
@pytest.mark.parametrize(
    ("name", "rank", "fp8"),
    [
        ("llama-8b", 0, False),
        ("llama-8b", 0, True),
        ("gemma-3-4b", 0, False),
        ("qwen3-30b", 0, False),
        ("gpt-oss-20b", 0, True),
        ("qwen3-30b", 16, False),
        ("gpt-oss-20b", 16, False),
        ("deepseek-lite", 0, False),
    ],
)
def test_a_step_of_real_layers_repeats(name, rank, fp8, seq, large):
    cfg = replace(deep(find_model(name), 1 if "qwen" in name else 2), vocab=4096, fp8=fp8)
    cfg = adapted(cfg, Lora(rank, 2.0 * rank, targets(cfg, ()))) if rank else cfg
    found = list(steps(cfg, "cuda", "BF16", 8192, seq))
    assert len(set(found)) == 1, found

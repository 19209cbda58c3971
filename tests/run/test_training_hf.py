"""Steps of training beside transformers and torch's AdamW: the same losses, at the same clipped norms."""

from dataclasses import replace

import pytest
import torch
import transformers
from engines import LIMITS, Batch, MemoryStore
from tiny import YARN, apart, oracle

from trireme.engine.build import build, collate, to_devices
from trireme.engine.exchange import fill, fill_base
from trireme.engine.optimizer import DECAYED, learning_rate
from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.queues.real import RealQueues
from trireme.engine.step import train_step
from trireme.engine.updates import AdamW
from trireme.kernels import reference
from trireme.models import hf
from trireme.models.rows import neftune, rope_tables

pytestmark = pytest.mark.grid

STEPS, LR = 12, 5e-3
SMALL = dict(  # without a padding token, whose row would get no gradient
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None,
)  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]
FAMILIES = {  # that differ in what is updated; steps of all are in tests/engine/test_oracle_steps.py
    "gpt2": dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    "llama": SMALL | dict(tie_word_embeddings=False),
    "qwen2": SMALL | dict(tie_word_embeddings=True),
    "phi3": SMALL | dict(sliding_window=8),
    "granite": SMALL | dict(
        embedding_multiplier=6.0, attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=2.0),
    "gemma3_text": SMALL | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=8, layer_types=TYPES),
    "gpt_oss": SMALL | dict(
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=16, head_dim=8, sliding_window=8,
        rope_parameters=YARN | dict(rope_theta=10000.0)),
    "glm4_moe": SMALL | dict(
        n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, routed_scaling_factor=1.5),
}  # fmt: skip


def rates():
    return [learning_rate(i, STEPS, LR, "cosine", 5) for i in range(1, STEPS + 1)]


def with_transformers(model, steps, device, smoothing=0.0):
    """(losses, gradient norms) of a plain loop: per-document rows, AdamW without decay on vectors, clipping at 1."""
    model.to(device).eval()  # no dropout
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if p.dim() > 1 and not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() == 1 or n.endswith("bias")], "weight_decay": 0.0},
    ]
    adamw, seen = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8), []
    for batch, rate in zip(steps, rates(), strict=True):
        trained, total = sum((mb.labels >= 0).sum() for mb in batch), 0.0
        for mb in batch:
            ids = torch.from_numpy(mb.ids).long().to(device).split(mb.lengths)
            labels = torch.from_numpy(mb.labels).long().to(device).split(mb.lengths)
            for document, targets in zip(ids, labels, strict=True):
                logits = model(input_ids=document[None]).logits[0].float()
                loss = torch.nn.functional.cross_entropy(
                    logits, targets, ignore_index=-100, reduction="sum", label_smoothing=smoothing
                )
                loss = loss / trained
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        adamw.zero_grad()
        seen.append((total, norm.item()))
    return seen


def with_trireme(cfg, state, steps, queues, dtype, noise=lambda i, batch: (None, None)):
    plan = Plan((UnitPlan(),) * cfg.n_units, tokens=48, n_micro=2, dtype=dtype)
    e = build(cfg, plan, LIMITS, queues, adamw=AdamW(weight_decay=0.1), store=MemoryStore())
    state = dict(part for name, t in state.items() for part in apart(cfg, name, t))
    names = hf.sources(cfg, {n: tuple(t.shape) for n, t in state.items()})
    read = lambda name, a, b: [state[names[name]].float().flatten()[a:b].numpy()]
    fill(e.placement, read)
    fill_base(e.placement, read)
    tables, seen = rope_tables(cfg, 64, queues.device), []
    for i, (batch, rate) in enumerate(zip(steps, rates(), strict=True), 1):
        sent = [collate(cfg, mb, noise=n) for mb, n in zip(batch, noise(i - 1, batch), strict=True)]
        stats = train_step(e, [to_devices(mb, [(tables, queues.device)]) for mb in sent], i, rate)
        seen.append((stats.loss, stats.grad_norm))
    queues.close()
    e.close()
    return seen


def made(family):
    """(model of transformers, our config of it, its weights, the steps)."""
    model, cfg = oracle(family, FAMILIES[family])
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    return model, cfg, state, [[Batch(cfg.vocab, (20, 28), 0), Batch(cfg.vocab, (1, 11, 30), 1)] for _ in range(STEPS)]


def compare(ours, theirs):
    """Losses and norms of gradients in fp32."""
    for (loss, norm), (expected, expected_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(expected, rel=1e-4, abs=2e-5)  # small at the end
        assert norm == pytest.approx(expected_norm, rel=5e-3)  # 1.01e-3 without vector instructions


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "granite", "gpt_oss", "glm4_moe"])
def test_losses_and_norms_in_fp32_are_those_of_torch(family):
    model, cfg, state, steps = made(family)
    ours = with_trireme(cfg, state, steps, RealQueues(threads=False), "F32")
    assert ours[-1][0] < 0.8 * ours[0][0]  # the batch is the same every step: it is learnt
    compare(ours, with_transformers(model, steps, "cpu"))


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_neftune(family):
    """Noise on what the module of embeddings gives, as transformers adds it; the same noise in both."""
    model, cfg, state, steps = made(family)
    alpha, width, told = 5.0, cfg.width, []
    for i in range(STEPS):
        u = torch.zeros(90, width)
        reference.add_noise_(u, torch.ones(90), i, 0)
        told += u.split((20, 28, 1, 11, 30))

    def hook(module, args, out):
        u = told.pop(0)
        return out + u * alpha / (len(u) * width) ** 0.5

    def noise(i, batch):
        return [neftune(cfg, mb.lengths, alpha, i, first) for mb, first in zip(batch, (0, 48), strict=True)]

    model.get_input_embeddings().register_forward_hook(hook)
    theirs = with_transformers(model, steps, "cpu")
    compare(with_trireme(cfg, state, steps, RealQueues(threads=False), "F32", noise), theirs)
    assert not told


@pytest.mark.full
def test_label_smoothing():
    """As torch's cross_entropy, which transformers' LabelSmoother equals."""
    model, cfg, state, steps = made("llama")
    ours = with_trireme(replace(cfg, smoothing=0.1), state, steps, RealQueues(threads=False), "F32")
    compare(ours, with_transformers(model, steps, "cpu", 0.1))


IN_BF16 = ["gpt2", "qwen2", "phi3", "granite"]  # Gemma's doubled norms make more of every rounding, and so do experts
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", IN_BF16)
def test_losses_in_bf16_stay_near_those_in_fp32(family, device):
    """bf16 computes with three digits and the masters are fp32: the losses stay beside those of fp32 training."""
    model, cfg, state, steps = made(family)
    ours, theirs = with_trireme(cfg, state, steps, RealQueues(device), "BF16"), with_transformers(model, steps, device)
    for (loss, _), (expected, _) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(expected, rel=0.03, abs=0.03)


SCHEDULES = {
    "linear": transformers.get_linear_schedule_with_warmup,
    "polynomial": transformers.get_polynomial_decay_schedule_with_warmup,
    "wsd": lambda optimizer, warmup, total: transformers.get_wsd_schedule(
        optimizer, warmup, round(DECAYED * total), num_training_steps=total
    ),
    "constant": lambda optimizer, warmup, total: transformers.get_constant_schedule_with_warmup(optimizer, warmup),
    "constant_with_warmup": lambda optimizer, warmup, _: transformers.get_constant_schedule_with_warmup(
        optimizer, warmup
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (10, 0), (10, 3), (7, 6), (40, 3), (103, 10)])
def test_schedules_as_transformers(schedule, total, warmup):
    """From the end of warm-up on. Its first step has rate 0 in transformers, and so does nothing; not here."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    theirs, scheduler = [], SCHEDULES[schedule](optimizer, warmup, total)
    for _ in range(total):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ours = [learning_rate(i, total, LR, schedule, warmup) for i in range(1, total + 1)]
    assert ours[warmup:] == pytest.approx(theirs[warmup:], abs=1e-12)
    assert ours[:warmup] == pytest.approx([LR * i / warmup for i in range(1, warmup + 1)])
    assert min(ours) > 0
    assert max(ours) == LR == learning_rate(1, 1, LR, schedule, 1)


def test_cosine_ends_at_a_tenth():
    rates = [learning_rate(i, 103, LR, "cosine", 3) for i in range(1, 104)]
    assert [rates[i] / LR for i in (0, 2, 52, 102)] == pytest.approx([1 / 3, 1.0, 0.55, 0.1])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert [learning_rate(1, 1, LR, "cosine", warmup) for warmup in (0, 1)] == [LR, LR], "of one step"

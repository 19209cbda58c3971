"""On a GPU: whatever the model and the limits, a run is refused beforehand or stays within them."""

import random
from dataclasses import replace

import pytest
import torch
from engines import Batch

from trireme.engine.build import build, inputs_on
from trireme.engine.exchange import fill, fill_base
from trireme.engine.plan import DoesNotFit, Limits
from trireme.engine.planner.choose import choose
from trireme.engine.planner.host import GPU_RESERVE
from trireme.engine.planner.rates import DRIVES, GPUS, machine
from trireme.engine.planner.rule import Wanted
from trireme.engine.queues.real import RealQueues
from trireme.engine.step import train_step
from trireme.models.config import Lora, Rope, uniform
from trireme.models.families.experts import Experts
from trireme.models.families.table import FAMILIES
from trireme.models.rows import rope_tables
from trireme.storage.devices import open_device
from trireme.storage.store import Store

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def draw(seed: int):
    """(model, limits, tokens of a row, rows of a step, bits of a moment, clip) of a random run.

    From 24 on models have experts, from 32 on adapters.
    """
    r = random.Random(seed)
    d = r.choice((64, 80, 128))
    heads = r.choice((4, 8, 12))
    kv = r.choice([k for k in (1, 2, 4, heads) if heads % k == 0])
    cfg = uniform("llama", r.randrange(500, 60_000), d * heads, r.randrange(2, 14), heads, kv, d,
                      8 * r.randrange(40, 500), 4096, 1e-5, r.random() < 0.3, rope=Rope(1e4))  # fmt: skip
    limits = Limits(int(MIB * 2 ** r.uniform(7.5, 12)), int(MIB * 2 ** r.uniform(6, 12)))
    if 24 <= seed < 32:
        shared = r.choice((0, 8 * r.randrange(8, 200)))
        own = Experts(r.choice((5, 16, 60)), r.choice((1, 2, 5)), 8 * r.randrange(4, 40), True, shared, shared > 0)
        family = "qwen2_moe" if shared else "qwen3_moe"
        layer = replace(cfg.layers[0], names=FAMILIES[family].names, mlps=(own,))
        cfg = replace(cfg, model_type=family, layers=(layer,) * r.randrange(1, 5))
    elif seed >= 32:
        targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        cfg = replace(cfg, lora=Lora(r.choice((4, 16, 128)), 16.0, targets), frozen=("*",))
    return cfg, limits, 64 * r.randrange(1, 33), r.randrange(1, 13), r.choice((32, 32, 16, 8)), r.choice((0.0, 1.0))


@pytest.mark.parametrize("seed", range(40))
def test_refused_or_within_the_limits(seed, tmp_path):
    cfg, limits, seq, rows, bits, clip = draw(seed)
    rates = machine(GPUS["rtx4090"], 64 << 30, DRIVES["gen4"]).rates
    sizes = tuple((k * seq, -(-rows // k)) for k in (8, 4, 2, 1) if k <= rows)
    mode = "forward" if clip else "backward"
    wanted = Wanted(sizes, mode=mode, record=1 << 18, adam_bits=bits, document=seq)
    with Store.create([open_device(tmp_path)]) as store:
        try:
            plan = choose(cfg, limits, rates, wanted).plan
        except DoesNotFit as error:
            assert "limit" in str(error)  # noqa: PT017 one of two right ends
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        e = build(cfg, plan, limits, RealQueues("cuda"), store=store)
        for shard in e.placement.shards():
            store.add(shard.name, shard.layout)
        e.claim_scratch(store.devices)
        values = lambda name, a, b: [0.02 * torch.randn(b - a).numpy()]
        fill(e.placement, values)
        fill_base(e.placement, values)
        tables = rope_tables(cfg, seq, "cuda")
        per = plan.tokens // seq
        for step in (1, 2):
            rows_left, batch = rows, []
            while rows_left:
                k = min(per, rows_left)
                batch.append(inputs_on(cfg, Batch(cfg.vocab, (seq,) * k, step), [(tables, e.queues.device)]))
                rows_left -= k
            train_step(e, batch, step, 1e-4)
        e.optimizer.flush()
        e.queues.close()
        e.optimizer.close()
        peak, in_ram = torch.cuda.max_memory_reserved() - before, e.memory.used("host")
        e.memory.close()
    assert peak <= limits.gpu + GPU_RESERVE
    assert in_ram <= limits.host

"""Small engines for tests: a model with random weights, plans drawn or made, a store in memory."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from math import prod
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from trireme.engine import geometry
from trireme.engine.between import Reader
from trireme.engine.build import Engine, InRam, build, collate, to_devices, with_dropout
from trireme.engine.exchange import Exchange, fetch, fill, fill_base
from trireme.engine.memory import Buffer, Pool
from trireme.engine.plan import TIERS, Limits, Plan, UnitPlan
from trireme.engine.queues.names import QUEUES, queues_of
from trireme.engine.queues.real import RealQueues, RealTask, execute
from trireme.engine.run.log import load_record
from trireme.engine.step import train_step
from trireme.engine.tuning.base import CheckpointBase, why_copied
from trireme.engine.tuning.chosen import adapted
from trireme.engine.tuning.packed_source import Packed, as_trained
from trireme.engine.tuning.parts import as_stored, open_checkpoint
from trireme.engine.updates import AdamW
from trireme.models import hf
from trireme.models.config import Lora, ModelConfig, parse_config, read_config
from trireme.models.families.experts import Experts
from trireme.models.families.packing import FP8 as FP8_BLOCKS
from trireme.models.families.packing import MODELOPT, MXFP4
from trireme.models.losses.micro_batch import MicroBatch
from trireme.models.rows import make_load, rope_tables
from trireme.models.sizes import narrow, shapes
from trireme.models.sizes.shapes import stored_tensors
from trireme.storage.scratch import Scratch

LIMITS = Limits(1 << 30, 1 << 30)
TINY = dict(
    vocab_size=61, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=24, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True)
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=4, mamba_d_state=6, mamba_n_groups=2, mamba_d_conv=4, mamba_expand=1)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=4,
    linear_conv_kernel_dim=4,
)  # fmt: skip
SCAN, FULL = "linear_attention", "full_attention"


def with_experts(cfg, **changes):
    """`cfg` with other fields of experts in all layers that have them."""
    changed = lambda mlps: tuple(replace(m, **changes) if isinstance(m, Experts) else m for m in mlps)
    return replace(cfg, layers=tuple(replace(layer, mlps=changed(layer.mlps)) for layer in cfg.layers))


def of(model_type: str, **keys) -> ModelConfig:
    return parse_config(TINY | dict(model_type=model_type) | keys)


def deep(cfg: ModelConfig, n: int) -> ModelConfig:
    """`cfg` with its first layer n times."""
    return replace(cfg, layers=cfg.layers[:1] * n)


LLAMA = of("llama")
GPT = parse_config(dict(
    model_type="gpt2", vocab_size=61, n_embd=16, n_layer=3, n_head=4, n_inner=24, n_positions=64
))  # fmt: skip
MIXTURE = of("qwen3_moe", **EXPERTS)
HYBRID = of(
    "qwen3_5_text", **DELTA, layer_types=[SCAN, FULL, SCAN],
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
)  # fmt: skip
MAMBA = of(  # with experts beside a shared one; the last layer has attention
    "granitemoehybrid", **MAMBA2, layer_types=[SCAN, SCAN, FULL], residual_multiplier=0.5,
    num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=12, time_step_limit=[0.1, float("inf")],
    intermediate_size=8,
)  # fmt: skip
OLMO_HYBRID = of("olmo_hybrid", **DELTA, layer_types=[FULL, SCAN, FULL])  # layers of two kinds have norms of their own
FALCON_H1 = of(  # layers with two mixers, and factors
    "falcon_h1", **MAMBA2 | dict(mamba_d_ssm=16), embedding_multiplier=2.5, attention_out_multiplier=0.9,
    mlp_multipliers=[0.8, 0.7], lm_head_multiplier=0.4, ssm_out_multiplier=0.7,
    ssm_multipliers=[0.5, 0.8, 1.2, 0.9, 0.7],
)  # fmt: skip
NEMOTRON = of(  # a layer is a mixer or an MLP; experts read latents
    "nemotron_h", layers_block_type=["linear_attention", "full_attention", "moe"], mamba_num_heads=4,
    mamba_head_dim=4, ssm_state_size=6, n_groups=2, conv_kernel=4, n_routed_experts=5, num_experts_per_tok=2,
    moe_intermediate_size=8, moe_shared_expert_intermediate_size=12, routed_scaling_factor=1.5, moe_latent_size=6,
    norm_topk_prob=True, layer_norm_epsilon=1e-5,
)  # fmt: skip
FP8 = replace(of("llama", intermediate_size=32), fp8=True)
LORA = replace(LLAMA, lora=Lora(2, 4.0, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")), frozen=("*",))
PACKED = replace(  # adapters of experts in MXFP4, and beside them
    of("gpt_oss", hidden_size=32, intermediate_size=32, num_local_experts=3, num_experts_per_tok=2, swiglu_limit=1.5,
       sliding_window=None, attention_bias=False, tie_word_embeddings=True, layer_types=[FULL] * 3,
       rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    lora=Lora(2, 4.0, ("q_proj", "experts")), frozen=("*",), packing=MXFP4, packed=MXFP4.globs,
)  # fmt: skip
BLOCKS = replace(  # adapters of matrices and experts in fp8 blocks, the last ones short, but one layer's k
    MIXTURE, lora=Lora(2, 4.0, ("q_proj", "experts")), frozen=("*",), packing=replace(FP8_BLOCKS, block=(6, 10)),
    packed=("*layers.*", "!*.mlp.gate.weight", "!*.1.self_attn.k_proj.weight"),
)  # fmt: skip
LATENT = replace(  # latent attention in fp8 blocks, groups of experts beside a shared one, a dense layer
    of("deepseek_v3", num_key_value_heads=4, q_lora_rank=10, kv_lora_rank=6, qk_nope_head_dim=8, qk_rope_head_dim=4,
       v_head_dim=6, head_dim=12, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
       n_shared_experts=1, routed_scaling_factor=1.5, first_k_dense_replace=1, n_group=3, topk_group=2,
       norm_topk_prob=True),
    lora=Lora(2, 4.0, ("q_a_proj", "kv_b_proj", "o_proj")), frozen=("*",),
    packing=replace(FP8_BLOCKS, block=(6, 10)), packed=("*layers.*", "!*.mlp.gate.weight"),
)  # fmt: skip
NVFP4 = replace(  # of three parts
    with_experts(BLOCKS, width=16), packing=MODELOPT.with_dtypes(("U8", "F8_E4M3", "F32")),
)  # fmt: skip
GPT_LORA = replace(GPT, lora=Lora(3, 3.0, ("c_attn", "c_proj")), frozen=("*",))
# Wholly trained and wholly frozen units, and a mixture: tensors of blocks, the embedding, a layer, the last norm.
FROZEN = replace(LLAMA, tied=True, frozen=("*embed*", "*layers.1.*", "*norm*", "*layers.2.mlp*"))


def wide(cfg):
    """`cfg` with MLPs whose products may be in fp8."""
    of = lambda layer: replace(layer, mlps=tuple(replace(m, width=32) for m in layer.mlps))
    return replace(cfg, layers=tuple(map(of, cfg.layers)))


WIDE = with_experts(MIXTURE, width=16)  # whose experts' products may be in fp8
MODELS = {"untied": LLAMA, "tied": replace(LLAMA, tied=True), "gpt": GPT}
MODELS |= {
    "lora": LORA,
    "gpt lora": GPT_LORA,
    "lora with dropout": replace(LORA, lora=replace(LORA.lora, dropout=0.3)),
    "frozen": FROZEN,
    "mixture": MIXTURE,
    "hybrid": HYBRID,
    "mamba": MAMBA,
    "olmo hybrid": OLMO_HYBRID,
    "nemotron": NEMOTRON,
    "falcon h1": FALCON_H1,
    "packed": PACKED,
    "packed in blocks": BLOCKS,
    "latent": LATENT,
    "frozen experts": replace(MIXTURE, frozen=("*experts*",)),
    "packed in blocks, in fp8": replace(BLOCKS, fp8=True),
    "frozen experts in fp8": replace(WIDE, fp8=True, frozen=("*experts*",)),
    "packed in nvfp4": NVFP4,
}
IN_FP8 = {
    "fp8": FP8,
    "gpt in fp8": replace(wide(GPT), fp8=True),
    "some frozen, in fp8": replace(wide(FROZEN), fp8=True),
    "packed in fp8": replace(PACKED, fp8=True),
    "mixture in fp8": replace(WIDE, fp8=True),
    "fp8 lora": replace(LORA, fp8=True),
    "gpt lora in fp8": replace(wide(GPT_LORA), fp8=True),
}
MODELS |= IN_FP8


class MemoryStore:
    """The store's read and write over a dict; what was written is what is read."""

    def __init__(self):
        self.shards: dict[str, bytes] = {}

    def write(self, name: str, buffer: memoryview, later: bool = False) -> Future:
        self.shards[name] = bytes(buffer)
        return _done()

    def read(self, name: str, buffer: memoryview, later: bool = False) -> Future:
        buffer[:] = self.shards[name]
        return _done()

    verify = read


class MemoryScratch(Scratch):
    """The scratch file of swapped activations and waiting gradients, in memory."""

    def __init__(self):
        super().__init__()
        self.bytes = bytearray(1 << 22)

    def write(self, offset: int, buffer: memoryview, later: bool = False) -> Future:
        assert offset % 4096 == len(buffer) % 4096 == 0
        assert offset + len(buffer) <= len(self.bytes)
        self.bytes[offset : offset + len(buffer)] = buffer
        return _done()

    def read(self, offset: int, buffer: memoryview, later: bool = False) -> Future:
        assert offset % 4096 == len(buffer) % 4096 == 0
        buffer[:] = self.bytes[offset : offset + len(buffer)]
        return _done()

    def close(self) -> None:
        self.bytes = bytearray()


def _done() -> Future:
    future: Future = Future()
    future.set_result(None)
    return future


BESIDE = (*QUEUES[1:], "poison")  # all queues but compute
BALANCE = 0.3  # weight of the loss of balance


def relayed(plan: Plan, gpus: Sequence[int], tied: bool = False, between: str = "ram") -> Plan:
    """The plan with its units dealt: `gpus`, in turn, of the embedding, each block and the head."""
    step = 2 if plan.halves else 1  # units of a block
    n = len(plan.units)
    blocks = [0, *(1 + (u - 1) // step for u in range(1, n - 1)), 1 + (n - 2) // step]
    dealt = [gpus[b % len(gpus)] for b in blocks]
    dealt[-1] = dealt[0] if tied else dealt[-1]
    if not any(dealt):
        return plan
    units = (replace(unit, gpu=gpu) for unit, gpu in zip(plan.units, dealt, strict=True))
    return replace(plan, units=tuple(units), between=between)


def lent(plan: Plan, tier: str, peer=lambda unit, gpus: (unit.gpu + 1) % gpus) -> Plan:
    """The plan with what units save in `tier` saved by another GPU, of peer(unit, GPUs)."""
    units = [
        replace(unit, saved=tuple((n, "peer" if t == tier else t) for n, t in unit.saved), peer=peer(unit, plan.gpus))
        for unit in plan.units
    ]
    return replace(plan, units=tuple(units))


class JitterQueues(RealQueues):
    """Real queues that start every task after a random delay; slots of each ring are poisoned on a queue of their own.

    On one queue what waits for another host would hold up the slots that this one needs.
    """

    def __init__(self, seed: int, most: float = 0.002, gpus: int = 1, hosts: int = 1):
        super().__init__("cpu", gpus=gpus, hosts=hosts)
        self.random, self.most = np.random.default_rng(seed), most

    def run(self, queue, kind, name, fn, after=(), nbytes=0, flops=0):
        delay = float(self.random.random()) * self.most
        queue = name if queue == "poison" else queue
        if queue not in self.queues and queue != "compute":
            self._start(queue)

        def late():
            time.sleep(delay)
            return fn()

        return super().run(queue, kind, name, late, after, nbytes, flops)


class LateTask(RealTask):
    """A task of LateQueues, which runs at the latest when it is waited for."""

    __slots__ = ("queues",)

    def wait(self):
        self.queues.reach(self)
        return super().wait()


class LateQueues(RealQueues):
    """Queues in one thread, some of them as late and the others as early as what tasks wait for allows.

    A task of a `late` queue runs when something that is not late, or the caller, cannot go on without it; of others,
    as soon as those that it waits for are over. What was not waited for is found whatever the machine's timing. The
    compute queue is the caller's thread as on a CPU, or where it is late, what a GPU does that has much in its queue.
    """

    def __init__(self, late: Collection[str], gpus: int = 1):
        super().__init__("cpu", gpus=gpus, threads=False)
        self.late, self.lines = late, {queue: deque() for queue in (*queues_of(gpus), "poison")}

    def run(self, queue, kind, name, fn, after=(), nbytes=0, flops=0):
        task = LateTask(queue, kind, name, nbytes, flops)
        task.queues = self
        self.lines[queue].append((task, fn, tuple(after)))
        if queue == "compute" and queue not in self.late and len(self.devices) == 1:
            self.reach(task)
        self._go_on()
        return task

    def drain(self):
        for tasks in self.lines.values():
            while tasks:
                self.reach(tasks[0][0])

    def reach(self, task):
        """Runs a task, after those of its queue before it, and each after those that it waits for."""
        tasks = self.lines[task.queue]
        while not task._issued.is_set():
            for other in tasks[0][2]:
                self.reach(other)
            first, fn, _ = tasks.popleft()
            execute(first, fn, (), None, self.zero)
            if first.error is not None:
                raise first.error

    def _go_on(self):
        """Runs all that can run by now on the queues that are not late."""
        early = [tasks for queue, tasks in self.lines.items() if queue not in self.late]
        while ready := [q for q in early if q and all(other._issued.is_set() for other in q[0][2])]:
            for tasks in ready:
                self.reach(tasks[0][0])


class PoisonedPool(Pool):
    """Fills buffers with NaN where they hold nothing any more."""

    def __init__(self, queues, name: str, tensors):
        super().__init__(name, tensors)
        self.queues = queues

    def empty(self, buffer: Buffer) -> None:
        def fill() -> None:
            buffer.tensor.fill_(0xFF)  # NaN in every float format
            if buffer.tensor.is_cuda:  # no stream orders the next user
                torch.cuda.current_stream(buffer.tensor.device).synchronize()

        super().empty(buffer)
        buffer.ready = (self.queues.run("poison", "other", f"poison {self.name}", fill, buffer.ready),)


def poisoned(queues):
    """For build."""
    return {"make_pool": partial(PoisonedPool, queues)}


class Batch:
    """A MicroBatch of random tokens."""

    def __init__(self, vocab: int, lengths: tuple[int, ...], seed: int, weights=None, reference=None):
        self.weights, self.reference, self.taught = weights, reference, None
        random = np.random.default_rng(seed)
        self.lengths = lengths
        self.ids = random.integers(0, vocab, sum(lengths)).astype(np.int32)
        labels = random.integers(0, vocab, sum(lengths)).astype(np.int32)
        labels[random.random(len(labels)) < 0.3] = -100
        labels[np.cumsum(lengths) - 1] = -100
        self.labels = labels

    documents, halves = MicroBatch.documents, MicroBatch.halves


def batches(cfg: ModelConfig, steps: int, n_micro: int, tokens: int) -> list[list[Batch]]:
    third = tokens // 3
    shapes = [(tokens,), (third, tokens - third), (1, tokens - 2), (tokens - 3,)]
    return [[Batch(cfg.vocab, shapes[(s + b) % 4], 100 * s + b) for b in range(n_micro)] for s in range(steps)]


def taught(cfg: ModelConfig, steps: int, n_micro: int, tokens: int) -> list[list[Batch]]:
    """With a teacher's rows, as cfg.teaching has them, and weights of documents."""
    found = batches(cfg, steps, n_micro, tokens)
    for i, mb in enumerate(mb for step in found for mb in step):
        random = np.random.default_rng(i)
        logits = random.normal(0.0, 2.0, (int((mb.labels >= 0).sum()), cfg.vocab))
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        ids = np.argsort(-shares, 1)[:, : cfg.teaching.k].astype(np.int32)
        top = np.take_along_axis(shares, ids, 1)
        rest = np.log(np.maximum(1 - top.sum(1), 1e-30))
        mb.taught = ids, np.log(top).astype(np.float16), rest.astype(np.float32)
        mb.weights = random.uniform(0.5, 1.5, len(mb.lengths)) if i % 2 else None
    return found


def pairs(cfg: ModelConfig, steps: int, n_micro: int, tokens: int, kto: bool = False) -> list[list[Batch]]:
    """Pairs of documents with weights and a reference; of kto good and bad answers."""
    half = tokens // 2
    shapes = [(half, tokens - half), (5, 4, tokens - 12, 3), (half - 2, 6)]

    def batch(s: int, b: int) -> Batch:
        lengths, seed = shapes[(s + b) % 3], 100 * s + b
        random = np.random.default_rng(seed)
        weights = np.repeat(random.uniform(0.5, 1.5, len(lengths) // 2), 2)
        weights *= np.repeat(random.choice([-1, 1], len(lengths) // 2), 2) if kto else 1.0
        made = Batch(cfg.vocab, lengths, seed, weights, random.normal(-3.0 * tokens / 4, 1.0, len(lengths)))
        made.labels[np.cumsum(lengths) - 2] = 1  # one of each at least
        return made

    return [[batch(s, b) for b in range(n_micro)] for s in range(steps)]


def scored(cfg: ModelConfig, steps: int, n_micro: int, tokens: int) -> list[list[Batch]]:
    """Documents with a class at one token, or, of one label, pairs with margins."""
    found = pairs(cfg, steps, n_micro, tokens)
    for i, mb in enumerate(mb for step in found for mb in step):
        random, ends = np.random.default_rng(i), np.cumsum(mb.lengths)
        mb.labels[:] = -100
        mb.labels[ends - 1 - (random.random(len(ends)) < 0.3)] = random.integers(0, cfg.scores, len(ends))
        mb.reference = np.where(np.arange(len(ends)) % 2, 0.0, random.uniform(0.0, 1.0, len(ends)))
        if cfg.scores > 1:
            mb.reference, mb.weights = None, mb.weights if i % 2 else None
    return found


def gpu_plan(cfg: ModelConfig, tokens: int = 24, n_micro: int = 2, halves: bool = False, **change) -> Plan:
    """Everything in the gpu tier, nothing saved but x."""
    units = (UnitPlan(),) * replace(cfg, halves=halves).n_units
    return replace(Plan(units, tokens, n_micro, dtype="F32", halves=halves), **change)


def random_plan(cfg: ModelConfig, dice: Random, tokens: int = 24, gpus: int = 4, **change) -> Plan:
    """Any plan for a model, on up to `gpus` GPUs."""
    flip = lambda share=0.5: dice.random() < share
    mode, halves, near = dice.choice(("forward", "forward", "backward")), flip() and not cfg.indivisible, flip(0.3)
    dealt = dice.choices(range(dice.choice((1, 1, *range(1, gpus + 1)))), k=dice.randint(1, 5))
    alone = not any(dealt)
    slices = dice.choice((1, 2, 3, 5)) if halves and alone and narrow.may_be_sliced(cfg) else 1
    cut = replace(cfg, halves=halves, slices=slices)

    def unit(u: int) -> UnitPlan:
        weights = dice.choice(TIERS[near:])
        state = "gpu" if weights == "gpu" else dice.choice(TIERS[1:])
        names = shapes.saved_shapes(cut, 1, shapes.kind(cut, u)) if 0 < u < cut.n_units - 1 else ()
        saved = tuple((name, dice.choice(TIERS)) for name in names if flip())
        streamed = weights == state == TIERS[1] and mode == "forward" and flip()
        return UnitPlan(weights, state, "gpu" if streamed else "cpu", dice.choice(TIERS), saved, dice.choice(TIERS))

    bits = dice.choice((32, 32, 16, 8))
    plan = Plan(
        tuple(map(unit, range(cut.n_units))), tokens, dice.randint(1, 4), dice.choice(("F32", "BF16")), mode, bits,
        late_moments=tuple(tier for tier in TIERS if flip()) if mode == "forward" and bits == 32 else (),
        window=dice.choice((1, 2, 3, 7)), ram_window=dice.randint(1, 3), state_slots=dice.randint(1, 6),
        record=dice.choice((256, 768, 1 << 20)), stream_slots=dice.randint(1, 3),
        piece=dice.choice((1, 1000, 1 << 20)), swap_slots=dice.randint(2, 4),
        between="gpu" if slices > 1 else dice.choice(("gpu", TIERS[1])), halves=halves, slices=slices,
        gradients=dice.choice(TIERS[1:]) if mode == "forward" else TIERS[1], at_once=dice.choice((0, 1, 2, 4)),
    )  # fmt: skip
    plan = relayed(replace(plan, **change), dealt, cfg.tied, plan.between)
    return lent(plan, dice.choice(TIERS)) if plan.gpus > 1 and flip() else plan


def random_weights():
    """(name, numel) -> values that depend on the name alone."""

    def read(name: str, numel: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, name)) * 7919)
        if part := MXFP4.part_of(name):
            low, high = (0, 256) if part is MXFP4.parts[0] else (122, 126)
            return torch.randint(low, high, (numel,), dtype=torch.uint8, generator=generator)
        if part := FP8_BLOCKS.part_of(name):
            codes = torch.randint(0, 128, (numel,), dtype=torch.uint8, generator=generator)
            signs = torch.randint(0, 2, (numel,), dtype=torch.uint8, generator=generator) << 7
            scales = torch.rand(numel, generator=generator) * 0.001
            return codes.clamp(max=126) | signs if part is FP8_BLOCKS.parts[0] else scales
        values = torch.randn(numel, generator=generator) * (1e-4 if MODELOPT.part_of(name) else 0.1)
        return values + 1 if "norm" in name or "ln_" in name else values

    return read


class OnOneCard(RealQueues):
    """Queues of several GPUs on the first, with own threads and streams; but `compute` queues share a stream."""

    @property
    def devices(self) -> list[torch.device]:
        return self.played

    @devices.setter
    def devices(self, found: list[torch.device]) -> None:
        self.played = found[:1] * len(found)


def cards(gpus: int) -> RealQueues:
    """Queues with a poisoner of as many GPUs, played on one where there are fewer."""
    queues = RealQueues if torch.cuda.device_count() >= gpus else OnOneCard
    return queues("cuda", extra=("poison",), gpus=gpus)


def make(cfg: ModelConfig, plan: Plan, queues=None, adamw: AdamW | None = None, poison: bool = True, **more) -> Engine:
    """A loaded engine on the device of its queues, the CPU by default."""
    queues = queues or RealQueues(threads=False)
    more = {"store": MemoryStore(), "scratch": MemoryScratch()} | (poisoned(queues) if poison else {}) | more
    e = build(cfg, plan, LIMITS, queues, adamw=adamw, **more)
    sizes = {name: prod(shape) for name, shape in stored_tensors(e.cfg).items()}
    whole = geometry.geometry(replace(e.cfg, slices=1), plan.dtype, plan.adam_bits)
    sizes |= {t.name: t.numel for layout in (*whole.stored, *whole.stored_base) for t in layout.tensors}
    read = random_weights()
    values = lambda name, a, b: [read(name, sizes[name])[a:b].numpy()]
    fill(e.placement, values)
    fill_base(e.placement, values)
    return e


def train(
    e: Engine, steps: list[list[Batch]], lr: float = 1e-2, between=lambda i, micro: None, of=None, preference=None,
    balance=BALANCE,
):  # fmt: skip
    """(loss, gradient norm) of each step, of a mixture its load too, with a loss that evens it out; all
    updates applied at the end. `between(i, micro)` is called after i steps with the first step's micro-batches on the
    device. `of`: the steps of all hosts. `balance`: the weight of that loss."""
    places = [(rope_tables(e.cfg, 64, device), device) for device in e.queues.devices]
    kto = bool(preference) and preference.method == "kto"
    made = [[mb if isinstance(mb, InRam) else collate(e.cfg, mb, split_kl=kto) for mb in step] for step in steps]
    made = [with_dropout(e.cfg, step, 0, i) for i, step in enumerate(made)]
    first = [to_devices(mb, places) for mb in made[0]]
    weight = balance if e.cfg.experts and not e.cfg.experts.sigmoid else 0.0
    seen = []
    for i, step in enumerate(made):
        between(i, first)
        whole = (of or made)[i]
        tokens, trained = sum(mb.tokens for mb in whole), sum(mb.weight for mb in whole)
        loads = [make_load(e.cfg, tokens, weight, device) for device in e.queues.devices]
        micro = [to_devices(mb, places, loads) for mb in step]
        stats = train_step(e, micro, i + 1, lr, trained, preference)
        seen.append(
            (stats.loss, stats.grad_norm, *stats.metrics.items(), *(load_record(loads[0]).values() if loads[0] else ()))
        )
    between(len(made), first)
    e.optimizer.flush()
    e.queues.drain()
    return seen


def final_weights(e: Engine) -> dict[str, torch.Tensor]:
    """Every tensor's fp32 master by name."""
    reader = Reader(e.placement)
    return {
        t.name: torch.from_numpy(np.concatenate([piece.copy() for piece in fetch(reader, u, t.name, exact=True)]))
        for u, layout in enumerate(e.geo.stored)
        for t in layout.tensors
    }


def check_same(e: Engine, steps: list[list[Batch]], losses: list, weights: dict[str, torch.Tensor], **more) -> None:
    """Steps have these losses and leave these weights, bit by bit. Closes the engine. `more`: of `train`."""
    assert train(e, steps, **more) == losses
    check_weights(e, weights)


def check_weights(e: Engine, weights: dict[str, torch.Tensor]) -> None:
    """The engine has these weights, bit by bit, and no buffers in use. Closes it."""
    for name, value in final_weights(e).items():
        assert torch.equal(value, weights[name]), name
    assert e.memory.owned() == len(e.optimizer.on_cpu.ahead)  # what is held is only what was read ahead
    e.queues.close()
    e.close()


def opened(folder, change=lambda cfg: cfg):
    """(cfg, source, names in it) of a checkpoint with packed matrices, changed before it is opened."""
    cfg = change(read_config(folder))
    source = open_checkpoint(folder, cfg.packing)
    cfg = as_stored(cfg, source)
    stored = hf.sources(cfg, source.shapes)
    return cfg, as_trained(cfg, source, stored) if isinstance(source, Packed) else source, stored


def exchange(cfg, source, tier="ram", dtype="BF16", files=None, queues=None, **change):
    """An engine with all in one tier, and its Exchange."""
    units = (UnitPlan(tier, tier, base=tier),) * replace(cfg, halves=change.get("halves", False)).n_units
    plan = gpu_plan(cfg, units=units, dtype=dtype, record=700, **change)
    places = dict(store=MemoryStore(), scratch=MemoryScratch(), files=files)
    queues = queues or RealQueues(threads=False)
    e = build(cfg, plan, LIMITS, queues, **places, **poisoned(queues))
    return e, Exchange(cfg, source, e.placement)


def adapters(folder, targets, device, tier, in_place=False, **change):
    """What two steps with adapters give, and the bytes of the base."""
    cfg, source, stored = opened(folder, lambda cfg: adapted(cfg, Lora(2, 4.0, targets)))
    files, dtype = None, change.get("dtype", "BF16")
    if in_place:
        assert why_copied(cfg, dtype, source, stored, [folder]) == ""
        cut = dict(halves=change.get("halves", False), slices=change.get("slices", 1))
        geo = geometry.geometry(replace(cfg, **cut), dtype, 32)
        files = CheckpointBase(dict(enumerate(geo.stored_base)), source, stored, [device])
    e, x = exchange(cfg, source, tier, files=files, **change)
    assert bool(e.placement.base_offset) == (tier == "ssd" and not in_place), "what is read in place is not copied"
    x.load()
    seen = train(e, batches(cfg, 2, 2, 24)), final_weights(e)
    e.queues.close()
    e.close()
    return *seen, sum(layout.nbytes for layout in e.geo.base)


@pytest.fixture(autouse=True, scope="module")
def small_stretches():
    """So that gradients leave in several pieces: in every test of a module that imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "STRETCH", 1024)
        geometry.geometry.cache_clear()  # another module's stretches are longer
        yield
    geometry.geometry.cache_clear()


def _after_fork() -> None:
    """A forked process starts others by its parent's server, and has no lock that a thread of its parent held."""
    forkserver._forkserver.ensure_running = lambda: None
    forkserver._forkserver._lock = threading.Lock()
    resource_tracker._resource_tracker._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def fork() -> int:
    """os.fork, once no engine is left. Its memory is not inherited (MADV_DONTFORK), so a child that let go of a mapping
    of its parent's would unmap what has taken that place since. A child ends after ten minutes.

    torch makes its pool of threads anew when a child first asks for it, which fails where two threads do so at once.
    """
    gc.collect()
    forkserver.ensure_running()
    resource_tracker.ensure_running()  # shared: one of a child's own would complain that it does not clean up
    pid = os.fork()
    if not pid:
        signal.alarm(600)
        torch.set_num_threads(torch.get_num_threads())
    return pid


def write_plan(plan: Plan, path: Path) -> None:
    """A file for --plan."""
    path.write_text(json.dumps(asdict(plan)))

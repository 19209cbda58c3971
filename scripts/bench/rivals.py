"""Other trainers compared with Trireme, in one run: python scripts/bench/rivals.py table

Small models compared with torch.compile: python scripts/bench/rivals.py small
Adapters of an 8B compared with unsloth: python scripts/bench/rivals.py adapters --only 0,1,2
One of them alone: python scripts/bench/rivals.py zero-offload llama-1.3b --tokens 8192 --gpu-memory 24GiB

`torch` is transformers with torch's fused AdamW on bf16; with --lora, peft's adapters; with --compile, the whole model
compiled and nothing recomputed. `zero-offload` is DeepSpeed with fp32 AdamW on the CPU, `zero-infinity` with weights
and optimizer state in files of --store too: their step is one micro-batch, which transfers weights and gradients once.
`roundpipe` is RoundPipe with fp32 AdamW on the CPU, whose weights are one step old unless --updates is sync. These use
Liger where it is installed, unless compiled. `unsloth` is unsloth with its own kernels, loss and checkpoints in RAM,
torch's fused AdamW on adapters in fp32, under autocast as by its trainer, on a base in bf16 or nf4, which it loads from
a checkpoint of random weights in --store, made there once. Nobody clips.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import random_model
import torch
from ceilings import forget_peaks
from model_inputs import shaped
from torch.nn.attention import SDPBackend, sdpa_kernel

from trireme.engine.amounts import size
from trireme.engine.check.steps import make_batch
from trireme.engine.planner.host import choose_device, memory_in_use
from trireme.engine.planner.sizes import names
from trireme.models.sizes import costs

ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
ADAMW = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01)
GPU = "--gpu-memory 24GiB"
HALF = f"{GPU} --layers 16"
# (rival, model, tokens of a step, its options, Trireme's)
LINES = (
    ("zero-offload", "llama-1.3b", 32768, GPU, f"{GPU} --ram 60GiB"),
    ("zero-offload", "llama-3b", 32768, GPU, f"{GPU} --ram 60GiB"),
    ("roundpipe", "llama-8b", 32768, f"{HALF} --micro-batches 2 --updates async", f"{HALF} --ram 95GiB --clip 0"),
    ("roundpipe", "llama-8b", 32768, f"{HALF} --micro-batches 2 --updates sync", f"{HALF} --ram 95GiB --clip 0"),
    ("zero-infinity", "llama-1.3b", 32768, GPU, f"{GPU} --ram 16GiB --placement ssd --clip 0"),
)
ADAPTERS = tuple(
    ("unsloth", "llama-8b", tokens, f"{how} --recompute 1,0.9,0.65,0.3,0 --micro-batches {micro}", f"{how} --ram 60GiB")
    for limit in (GPU, "--gpu-memory 48GiB", "")
    for base in ("", "--base nf4")
    for tokens, micro in ((32768, 4), (8192, 1))
    for how in [f"--lora 16 --seq 2048 {base} {limit}"]
)
MANY = "--warmup 4 --steps 16"
SMALL = tuple(("torch", model, 16384, f"--compile {MANY}", MANY) for model in ("llama-0.15b", "llama-0.4b"))
TABLES = {"table": LINES, "small": SMALL, "adapters": ADAPTERS}
UPDATES = {"async": "weights one step old (is_async, its default)", "sync": "weights up to date (is_async=False)"}

# ---------------------------------------------------------------- rivals


def transformers_model(cfg, device: torch.device, liger: bool):
    """transformers' LLaMA in bf16, random weights, all blocks recomputed; with Liger's kernels, if installed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger and importlib.util.find_spec("liger_kernel") and device.type == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    heads, width = cfg.attentions[0], cfg.layers[0].mlp.width
    keys = dict(vocab_size=cfg.vocab, hidden_size=cfg.width, intermediate_size=width, num_hidden_layers=len(cfg.layers))
    keys |= dict(num_attention_heads=heads.heads, num_key_value_heads=heads.kv_heads, use_cache=False)
    config = LlamaConfig(**keys, max_position_embeddings=cfg.max_positions)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def with_peft(model, rank: int):
    """With peft's adapters, in fp32, on every linear layer of the blocks."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def unsloth_model(cfg, a):
    """unsloth's LLaMA with its adapters on every linear layer of the blocks."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
    from unsloth import FastLanguageModel  # before transformers, which it changes

    folder = Path(a.store) / f"{a.model}-{len(cfg.layers)}"
    if not (folder / "tokenizer.json").exists():
        random_model.write(a.model, folder, len(cfg.layers))
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder), max_seq_length=a.seq, dtype=torch.bfloat16, load_in_4bit=a.base == "nf4"
    )
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options = dict(r=a.lora, lora_alpha=2 * a.lora, lora_dropout=0, bias="none", target_modules=layers)
    model = FastLanguageModel.get_peft_model(model, **options, use_gradient_checkpointing="unsloth", random_state=0)
    FastLanguageModel.for_training(model)  # as its trainer does: loaded for inference, blocks store what they compute
    return model


def torch_rival(model, a):
    """A step: ids [rows, seq] -> loss."""
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True, **ADAMW)

    def step(ids: torch.Tensor) -> float:
        total = 0.0
        for rows in ids.chunk(a.micro_batches):
            with torch.autocast("cuda", torch.bfloat16, enabled=a.rival == "unsloth"):
                loss = model(input_ids=rows, labels=rows).loss / a.micro_batches
            loss.backward()
            total += loss.detach()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(total)

    return step


def zero_infinity(model, a):
    """As torch_rival, with weights and optimizer state on the drive of --store (Rajbhandari et al. 2021)."""
    return deepspeed_rival(model, *infinity_config(a.store, max(p.numel() for p in model.parameters())))


def infinity_config(store: str, largest: int) -> tuple[dict, dict]:
    """(zero_optimization, the rest) of DeepSpeed's configuration; `largest`: elements of a parameter.

    Reads and writes of state overlap with updates, as in the paper: of three groups of parameters one is read, one
    updated, one written, each with buffers for weights, gradient and two moments. `thread_count` is called
    `intra_op_parallelism` in newer versions; each ignores the other.
    """
    on_drive = {"device": "nvme", "nvme_path": store, "pin_memory": True}
    zero = {
        "stage": 3,
        "offload_optimizer": on_drive | {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
        "offload_param": on_drive | {"buffer_count": 5, "buffer_size": largest, "max_in_cpu": 0},
        "sub_group_size": 10**8,
    }
    threads = {"thread_count": 2, "intra_op_parallelism": 2}
    aio = {"block_size": 1 << 20, "queue_depth": 32, **threads, "single_submit": False, "overlap_events": True}
    return zero, {"aio": aio}


def zero_offload(model, a):  # noqa: ARG001 (of others)
    """As torch_rival, with the optimizer in pinned RAM."""
    return deepspeed_rival(model, {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, {})


def deepspeed_rival(model, zero: dict, more: dict):
    """Steps of DeepSpeed's engine, configured by `zero` and `more`."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    deepspeed.init_distributed()
    buckets = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 2 * 10**8)
    zero |= buckets | {"overlap_comm": True, "contiguous_gradients": True}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero} | more
    adamw = DeepSpeedCPUAdam(model.parameters(), **ADAMW)
    engine = deepspeed.initialize(model=model, optimizer=adamw, config=config)[0]

    def step(ids: torch.Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def roundpipe_rival(model, a):
    """A step of RoundPipe 0.1.1, by its preset for LLaMA: ids [rows, seq], is_async -> loss.

    With is_async the CPU updates weights while the GPU computes the next step, whose weights lack this update. Stages
    are planned for --gpu-memory as by RoundPipe for a card of that size: 0.6 of it for weights and gradients.
    """
    from roundpipe import ModelExecutePlan, RoundPipeRunConfig, wrap_model_to_roundpipe
    from roundpipe.models import llama
    from roundpipe.optim import Adam

    # transformers 5.17 names its arguments otherwise; it too returns None, a causal mask, for rows without padding
    llama.create_causal_mask = lambda **_: None
    model.gradient_checkpointing_disable()  # stages are recomputed as wholes
    model.cpu()
    torch.cuda.empty_cache()
    pipe = wrap_model_to_roundpipe(model, True, optim_dtype=torch.float32)
    adamw = Adam(pipe.optim_parameters(), decoupled_weight_decay=True, **ADAMW)
    limit = {"model_memory_limit": 0.6 * a.gpu_memory / 2**30} if a.gpu_memory else {}

    def update() -> None:
        adamw.step()
        adamw.zero_grad()

    def step(ids: torch.Tensor, is_async: bool) -> float:
        ids = ids.cpu()
        pipe.model_timer.update_times()
        stages = ModelExecutePlan.auto("fused", pipe, **limit)
        loss = pipe.forward_backward(
            input_kwargs={"input_ids": ids, "labels": ids, "return_logits": False},
            loss_fn=lambda outputs, _: outputs.loss / a.micro_batches,
            run_config=RoundPipeRunConfig(num_microbatch=a.micro_batches, execute_plan=stages),
        )
        pipe.step(update, is_async)
        return loss.item()

    return step


RIVALS = {  # with packages
    "torch": (torch_rival, ("transformers", "peft")),
    "zero-offload": (zero_offload, ("transformers", "deepspeed")),
    "zero-infinity": (zero_infinity, ("transformers", "deepspeed")),
    "roundpipe": (roundpipe_rival, ("transformers", "roundpipe")),
    "unsloth": (torch_rival, ("transformers", "peft", "unsloth", "bitsandbytes")),
}


# ---------------------------------------------------------------- one rival


def timed(a, step, cfg, device: torch.device) -> tuple[list[float], list[float]]:
    """(seconds of each timed step, every loss)."""
    times, losses = [], []
    for k in range(a.warmup + a.steps):
        (batch,) = make_batch(cfg, a.tokens, a.seq, a.tokens // a.seq, k, None)
        ids = torch.from_numpy(batch.ids).long().view(-1, a.seq)
        start = time.perf_counter()
        losses.append(step(ids.to(device)))
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - start)
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"losses {losses}")
    return times[a.warmup :], losses


def settings(a, step, blocks) -> Iterator[tuple[str, Callable[[torch.Tensor], float]]]:
    """(description, step) of each setting of --recompute, or of --updates, which is in force until the next."""
    if a.rival == "roundpipe":
        yield from ((UPDATES[how], partial(step, is_async=how == "async")) for how in a.updates)
        return
    for share in a.recompute:
        for k, block in enumerate(blocks):
            block.gradient_checkpointing = k < share * len(blocks)
        yield f"{share:.0%} of blocks recomputed", step


def run_rival(a) -> dict:
    """The fastest of --recompute, up to the first out of memory, or of --updates."""
    cfg, device = shaped(a.model, a.layers, a.lora, ""), choose_device("auto")
    if a.gpu_memory:
        torch.cuda.set_per_process_memory_fraction(a.gpu_memory / torch.cuda.get_device_properties(0).total_memory)
    if a.rival == "unsloth":
        model = unsloth_model(cfg, a)
        blocks = model.get_base_model().model.layers
    else:
        # torch 2.11 does not compile Liger 0.8.5's kernels
        model = transformers_model(cfg, device, liger=not a.compile)
        blocks = model.model.layers
        if a.compile:
            model.gradient_checkpointing_disable()
            model.compile()
            a.recompute = [0]
        model = with_peft(model, a.lora) if a.lora else model
    rival, tried = RIVALS[a.rival][0](model, a), []
    for setting, step in settings(a, rival, blocks):
        forget_peaks(device)
        try:
            with sdpa_kernel(ATTENTION, set_priority=True):
                times, losses = timed(a, step, cfg, device)
        except torch.OutOfMemoryError:
            print(f"{setting}: out of GPU memory")
            break
        gpu, step_s = memory_in_use(device)[0], statistics.median(times)
        tried.append({"step_s": step_s, "steps_s": times, "losses": losses, "setting": setting, "gpu_gib": gpu})
        ends = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        print(f"{setting}: step {step_s:.3f} s, {ends}, peak {gpu:.2f} GiB", flush=True)
    if not tried:
        sys.exit(f"error: {a.rival} needs more GPU memory")
    best = min(tried, key=lambda one: one["step_s"])
    flops = costs.model_flops(cfg, a.tokens, costs.attended_pairs([a.seq] * (a.tokens // a.seq)))
    rates = {"tokens_per_s": a.tokens / best["step_s"], "model_tflops": flops / best["step_s"] / 1e12}
    speed = f"{rates['tokens_per_s']:.0f} tokens/s, {rates['model_tflops']:.1f} model TFLOP/s"
    what = f"{a.model}{f', {a.layers} layers' * bool(a.layers)}, {a.tokens} tokens, {best['setting']}"
    print(f"{a.rival}, {what}: step {best['step_s']:.3f} s, {speed}")
    asked = {name: vars(a)[name] for name in ("rival", "model", "lora", "base", "tokens", "seq")}
    return asked | {"layers": len(cfg.layers), **best, **rates, "tried": tried}


# ---------------------------------------------------------------- table


def command(script: str, options: str) -> dict | None:
    """A script's --json; None where it fails."""
    print(f"$ {script} {options}", flush=True)
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [sys.executable, str(Path(__file__).parent / script), *options.split(), "--json", out.name]
        return json.load(out) if subprocess.run(words).returncode == 0 else None


def table(lines: Sequence[tuple[str, str, int, str, str]]) -> list[dict]:
    """Runs all lines, prints ratios, returns results."""
    rows = []
    for rival, model, tokens, theirs, ours in lines:
        other = command("rivals.py", f"{rival} {model} --tokens {tokens} {theirs}")
        own = command("step.py", f"{model} --tokens {tokens} {ours}")
        rows.append({"line": f"{rival}, {model}, {tokens} tokens {theirs}", "theirs": other, "ours": own})
    print("| rival | step | Trireme | times |\n|---|---|---|---|")
    for row in rows:
        step, own = (row[side]["step_s"] if row[side] else math.nan for side in ("theirs", "ours"))
        print(f"| {row['line']} | {step:.3f} s | {own:.3f} s | {step / own:.2f} |")
    return rows


def main(argv: list[str]) -> int:
    a = arguments(argv)
    if missing := [name for name in RIVALS.get(a.rival, (None, ()))[1] if not importlib.util.find_spec(name)]:
        print(f"error: {a.rival} needs packages that are not here: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    lines = TABLES.get(a.rival, ())
    chosen = [line for k, line in enumerate(lines) if not a.only or k in a.only]
    result = table(chosen) if lines else run_rival(a)
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1))
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    packages = "; ".join(f"{rival} needs {', '.join(needed)}" for rival, (_, needed) in RIVALS.items())
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=f"Packages: {packages}.")
    p.add_argument("rival", choices=(*TABLES, *RIVALS))
    p.add_argument("model", nargs="?", choices=[name for name in names() if "llama" in name], default="llama-1.3b")
    p.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    p.add_argument("--layers", type=int, default=0, help="the first so many of the model; 0: all")
    p.add_argument("--lora", type=int, default=0, help="rank of peft's adapters; 0: all is trained")
    p.add_argument("--base", choices=("", "nf4"), default="", help="unsloth's frozen base; without it bf16")
    p.add_argument("--only", type=lambda t: [int(k) for k in t.split(",")], help="lines of a table, from 0: 0,3")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--gpu-memory", type=size)
    p.add_argument(
        "--recompute", type=lambda t: [float(s) for s in t.split(",")], default=[1, 0.75, 0.5, 0], help="shares to try"
    )
    p.add_argument(
        "--updates",
        type=lambda t: t.split(","),
        default=list(UPDATES),
        help="of roundpipe: async (of weights one step old), sync or, the default, both in turn",
    )
    p.add_argument("--micro-batches", type=int, default=1, help="of a step; DeepSpeed's has one")
    p.add_argument("--store", default=".", help="a folder, of zero-infinity and of unsloth's checkpoint")
    p.add_argument("--compile", action="store_true", help="by torch.compile")
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--json")
    a = p.parse_args(argv)
    if not set(a.updates) <= set(UPDATES):
        p.error(f"--updates {','.join(a.updates)} is not of {', '.join(UPDATES)}")
    if a.rival == "roundpipe" and (a.lora or a.compile):
        p.error("roundpipe trains all weights here, not compiled: leave out --lora and --compile")
    if a.base and a.rival != "unsloth":
        p.error("--base is of unsloth: leave it out")
    if a.rival == "unsloth" and (not a.lora or a.compile):
        p.error("unsloth trains adapters here, by its own kernels: add --lora 16, leave out --compile")
    return a


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

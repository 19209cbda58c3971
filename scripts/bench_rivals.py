"""Other trainers beside Trireme, in one run: python scripts/bench_rivals.py table --store DIR

One of them alone: python scripts/bench_rivals.py zero-offload llama-1.3b --tokens 8192,32768 --gpu-memory 24GiB

`torch` is transformers with torch's fused AdamW on bf16, all on the GPU. `zero-offload` and `zero-infinity` are
DeepSpeed, which has to be installed (with libaio for the second); Liger's kernels are used where they are installed.
A rival computes a step as one micro-batch, which moves each weight and gradient the fewest times, without clipping, and
recomputes as few blocks as its memory allows, of the shares in `--recompute`: the fastest counts.
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
from pathlib import Path

import torch
from bench_step import MODELS, make_batch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trireme.engine.machine import choose_device
from trireme.engine.options import size
from trireme.models import shapes

ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
ADAMW = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01)
GPU = "--gpu-memory 24GiB"
# (rival, model, tokens of a step, the rival's options, Trireme's options on each line beside it)
LINES = (
    ("zero-offload", "llama-1.3b", (8192, 32768), GPU, (f"{GPU} --ram 60GiB",)),
    (
        "zero-infinity",
        "llama-1.3b",
        (32768,),
        f"{GPU} --store {{store}} --recompute 1 --warmup 1 --steps 2",
        (
            f"{GPU} --ram 16GiB --homes state-ssd --store {{store}} --warmup 1 --steps 2",
            f"{GPU} --ram 16GiB --homes ssd --store {{store}} --warmup 1 --steps 2",
        ),
    ),
    ("zero-offload", "llama-3b", (32768,), GPU, (f"{GPU} --ram 60GiB",)),
    ("torch", "llama-1.3b", (32768,), "", ("--ram 60GiB",)),
)


# ---------------------------------------------------------------- the rivals


def transformers_model(cfg, device: torch.device):
    """transformers' LLaMA of that shape in bf16 with random weights, every block set to be recomputed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if importlib.util.find_spec("liger_kernel") and device.type == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    keys = dict(vocab_size=cfg.vocab, hidden_size=cfg.width, intermediate_size=cfg.ffn, num_hidden_layers=cfg.n_layers)
    config = LlamaConfig(**keys, num_attention_heads=cfg.n_heads, num_key_value_heads=cfg.n_kv_heads, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def torch_rival(model):
    """A step of plain torch: ids [rows, seq] -> loss."""
    adamw = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.item()

    return step


def zero_config(cfg, store: str | None) -> dict:
    """DeepSpeed's settings: the optimizer in pinned RAM, or with a folder on the SSD all of the model there.

    Sub-groups of about a tenth of the model let reading, updating and writing overlap; a buffer for weights has to
    hold a sub-group, which may exceed its size by one matrix.
    """
    base = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
    common = {"overlap_comm": True, "contiguous_gradients": True}
    if store is None:
        zero = common | {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
        return base | {
            "zero_optimization": zero | {"reduce_bucket_size": 2 * 10**8, "allgather_bucket_size": 2 * 10**8}
        }
    group = shapes.parameters(cfg) // 10
    nvme = {"device": "nvme", "nvme_path": store, "pin_memory": True}
    zero = common | {
        "stage": 3,
        "offload_param": nvme | {"buffer_count": 12, "buffer_size": group + cfg.vocab * cfg.width, "max_in_cpu": 0},
        "offload_optimizer": nvme | {"buffer_count": 10, "pipeline_read": True, "pipeline_write": True},
        "sub_group_size": group,
        "stage3_prefetch_bucket_size": 2 * 10**8,
    }
    aio = {"block_size": 8 << 20, "queue_depth": 16, "intra_op_parallelism": 4, "overlap_events": True}
    return base | {"zero_optimization": zero, "aio": aio}


def zero_rival(model, config: dict):
    """A step of DeepSpeed: ids [rows, seq] -> loss."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    deepspeed.init_distributed()
    adamw = DeepSpeedCPUAdam(model.parameters(), **ADAMW)
    engine = deepspeed.initialize(model=model, optimizer=adamw, config=config)[0]

    def step(ids: torch.Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


# ---------------------------------------------------------------- one rival


def timed(a, step, cfg, tokens: int, device: torch.device) -> tuple[list[float], list[float]]:
    """(seconds of each timed step, every loss)."""
    times, losses = [], []
    for k in range(a.warmup + a.steps):
        (batch,) = make_batch(cfg, tokens, a.seq, tokens // a.seq, k, None)
        ids = torch.from_numpy(batch.ids).long().view(-1, a.seq)
        start = time.perf_counter()
        losses.append(step(ids.to(device)))
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - start)
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"losses {losses}")
    return times[a.warmup :], losses


def run_rival(a) -> list[dict]:
    """What each count of tokens took at its best share of recomputed blocks; a count that does not fit has no step."""
    cfg, device = MODELS[a.model], choose_device("auto")
    if a.gpu_memory:
        torch.cuda.set_per_process_memory_fraction(a.gpu_memory / torch.cuda.get_device_properties(0).total_memory)
    model = transformers_model(cfg, device)
    blocks = list(model.model.layers)
    with tempfile.TemporaryDirectory(dir=a.store) as folder, sdpa_kernel(ATTENTION, set_priority=True):
        if a.rival == "torch":
            step = torch_rival(model)
        else:
            step = zero_rival(model, zero_config(cfg, folder if a.rival == "zero-infinity" else None))
        return [best_share(a, step, cfg, blocks, tokens, device) for tokens in a.tokens]


def best_share(a, step, cfg, blocks, tokens: int, device: torch.device) -> dict:
    """The fastest of the shares of recomputed blocks, from the largest down to the first that runs out of memory."""
    found = {"rival": a.rival, "model": a.model, "tokens": tokens, "seq": a.seq, "step_s": math.inf}
    for share in a.recompute:
        for k, block in enumerate(blocks):
            block.gradient_checkpointing = k < share * len(blocks)
        try:
            times, losses = timed(a, step, cfg, tokens, device)
        except torch.OutOfMemoryError:
            print(f"{a.rival}, {a.model}, {tokens} tokens, {share:.0%} of blocks recomputed: out of GPU memory")
            break
        step_s = statistics.median(times)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        print(f"{a.rival}, {a.model}, {tokens} tokens, {share:.0%} of blocks recomputed: step {step_s:.3f} s of "
              f"{[round(t, 3) for t in times]}, loss {losses[0]:.4f} -> {losses[-1]:.4f}, peak {peak:.2f} GiB",
              flush=True)  # fmt: skip
        if step_s < found["step_s"]:
            flops = shapes.model_flops(cfg, tokens, shapes.attended_pairs([a.seq] * (tokens // a.seq)))
            found |= {"step_s": step_s, "steps_s": times, "losses": losses, "recomputed": share, "gpu_gib": peak}
            found |= {"tokens_per_s": tokens / step_s, "model_tflops": flops / step_s / 1e12}
    return found


# ---------------------------------------------------------------- the table


def command(script: str, options: str) -> list | dict | None:
    """What a script of this folder writes with --json; None where it fails, whose output says why."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [sys.executable, str(Path(__file__).parent / script), *options.split(), "--json", out.name]
        print(f"$ {script} {options}", flush=True)
        failed = subprocess.run(words).returncode
        return None if failed else json.loads(Path(out.name).read_text())


def table(a) -> list[dict]:
    """Runs every line, a rival and then Trireme, prints the ratios and returns what was measured."""
    rows = []
    for rival, model, tokens, theirs, ours in LINES:
        if a.only and rival not in a.only:
            continue
        theirs, counts = theirs.format(store=a.store), ",".join(map(str, tokens))
        found = command("bench_rivals.py", f"{rival} {model} --tokens {counts} {theirs}") or [None] * len(tokens)
        for count, other in zip(tokens, found, strict=True):
            for options in ours:
                options = f"{model} --tokens {count} {options.format(store=a.store)}"
                rows.append({"options": options, "theirs": other, "ours": command("bench_step.py", options)})
                rows[-1]["line"] = f"{rival}, {model}, {count} tokens"
    print("| rival | step | blocks recomputed | Trireme, bench_step.py | step | times |\n|---|---|---|---|---|---|")
    for row in rows:
        step, own = (row[side]["step_s"] if row[side] else math.nan for side in ("theirs", "ours"))
        share = f"{row['theirs']['recomputed']:.0%}" if math.isfinite(step) else ""
        print(f"| {row['line']} | {step:.3f} s | {share} | {row['options']} | {own:.3f} s | {step / own:.2f} |")
    return rows


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("rival", choices=("table", "torch", "zero-offload", "zero-infinity"))
    p.add_argument("model", nargs="?", default="llama-1.3b", choices=[name for name in MODELS if "llama" in name])
    p.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[32768], help="of a step")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--gpu-memory", type=size)
    p.add_argument("--store", help="a folder on the SSD, for zero-infinity and the table")
    p.add_argument(
        "--recompute", type=lambda t: [float(s) for s in t.split(",")], default=[1, 0.75, 0.5, 0], help="shares to try"
    )
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--only", type=lambda t: t.split(","), help="the table's rivals")
    p.add_argument("--json")
    a = p.parse_args(argv)
    if a.store:
        Path(a.store).mkdir(parents=True, exist_ok=True)
    elif a.rival in ("table", "zero-infinity"):
        p.error("--store DIR is needed")
    result = table(a) if a.rival == "table" else run_rival(a)
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The same shape in plain transformers: torch fused AdamW, activation checkpointing, all on the GPU.

python scripts/bench_rivals.py llama-1.3b --tokens 32768 --seq 2048
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from bench_step import MODELS, make_batch

from trireme.engine.machine import choose_device
from trireme.models import shapes


def rival(cfg, device: torch.device):
    """(transformers model in bf16 with random weights, fused AdamW)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = dict(vocab_size=cfg.vocab, hidden_size=cfg.width, intermediate_size=cfg.ffn, num_hidden_layers=cfg.n_layers)
    config = LlamaConfig(
        **keys, num_attention_heads=cfg.n_heads, num_key_value_heads=cfg.n_kv_heads, max_position_embeddings=4096
    )
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", choices=[name for name in MODELS if name.startswith("llama")])
    p.add_argument("--tokens", type=int, default=32768)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--micro", type=int, default=4, help="rows of a micro-batch")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--json")
    a = p.parse_args(argv)
    cfg, device = MODELS[a.model], choose_device("auto")
    model, adamw = rival(cfg, device)
    times = []
    for step in range(a.steps):
        batch = make_batch(cfg, a.tokens, a.seq, a.micro, step, None)
        start = time.perf_counter()
        for mb in batch:
            ids = torch.from_numpy(mb.ids).long().view(-1, a.seq).to(device)
            (model(input_ids=ids, labels=ids).loss / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - start)
    step_s = statistics.median(times[2:])
    flops = shapes.model_flops(cfg, a.tokens, shapes.attended_pairs([a.seq] * (a.tokens // a.seq)))
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"transformers, bf16 AdamW states: step {step_s:.3f} s, {a.tokens / step_s:.0f} tokens/s, "
          f"{flops / step_s / 1e12:.1f} model TFLOP/s, peak {peak:.2f} GiB")  # fmt: skip
    if a.json:
        result = {"step_s": step_s, "tokens_per_s": a.tokens / step_s, "model_tflops": flops / step_s / 1e12}
        Path(a.json).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

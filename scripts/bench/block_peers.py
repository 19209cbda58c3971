"""The layers that blocks.py compares with those of transformers, and how these are run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from op_cases import DEVICE
from torch.nn.attention import SDPBackend

from trireme.engine.check.cases import BF16
from trireme.engine.planner.sizes import find_model
from trireme.models.config import ModelConfig
from trireme.models.sizes import shapes

if TYPE_CHECKING:
    from blocks import Block

LARGE = {"LLaMA-3-8B": find_model("llama-8b"), "LLaMA-2-13B": find_model("llama-13b")}


class Layers(NamedTuple):
    """Layers of a model that are compared with those of transformers."""

    cfg: ModelConfig
    kind: str  # transformers' model_type
    more: dict[str, Any]  # what its defaults are not
    tokens: int
    cases: tuple[tuple[str, int, int], ...]  # (what, unit, documents)


OSS = replace(find_model("gpt-oss-20b"), packing=None, packed=())  # in bf16
OF_GEMMA_4 = dict(global_head_dim=512, attention_k_eq_v=True, hidden_size_per_layer_input=0)
GEMMA_4 = (
    ("Gemma-4-31B", find_model("gemma-4-31b"), OF_GEMMA_4 | dict(num_global_key_value_heads=4)),
    ("Gemma-4-26B-A4B", find_model("gemma-4-26b"), OF_GEMMA_4 | dict(
        num_global_key_value_heads=2, enable_moe_block=True, intermediate_size=2112, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704)),
)  # fmt: skip
LAYERS = {
    **{name: Layers(cfg, "llama", {}, 8192, (("", 1, 1),)) for name, cfg in LARGE.items()},
    "Qwen3-30B": Layers(find_model("qwen3-30b"), "qwen3_moe", dict(norm_topk_prob=True), 32768,
                        (("", 1, 1), ("", 1, 8))),
    "MiniMax-M2": Layers(find_model("minimax-m2"), "minimax_m2", {}, 32768, (("", 1, 1), ("", 1, 8))),
    "Hy3": Layers(find_model("hy3-295b"), "hy_v3", {}, 32768, (("", 2, 1), ("", 2, 8))),
    "gpt-oss-20b": Layers(OSS, "gpt_oss", dict(num_local_experts=32), 32768,
                          ((" with a window of 128", 1, 8), ("", 2, 8))),
    # within documents of 1,024 tokens a window of as many cuts nothing off: transformers needs no mask
    "Gemma-3-27B": Layers(find_model("gemma-3-27b"), "gemma3_text", {}, 8192,
                          ((" with a window of 1,024", 1, 8), ("", 6, 1), ("", 6, 8))),
    **{name: Layers(cfg, "gemma4_text", keys, 8192, ((" with a window of 1,024", 1, 8), ("", 6, 1), ("", 6, 8)))
       for name, cfg, keys in GEMMA_4},
    "Qwen3.5-9B": Layers(find_model("qwen3.5-9b"), "qwen3_5_text", {}, 32768,
                         ((" with linear attention", 1, 1), (" with linear attention", 1, 8), ("", 4, 1), ("", 4, 8))),
}  # fmt: skip


def peer_layer(b: Block, liger: bool):
    """A layer of transformers' in bf16, and its rotation.

    With Liger's kernels if asked; experts by torch._grouped_mm.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.models.llama import modeling_llama as llama

    importlib.reload(llama)  # without Liger's patches
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)
    cfg, spec = b.cfg, b.cfg.attentions[0]
    layers = next(row for row in LAYERS.values() if row.cfg == replace(cfg, fp8=False))
    depth = max(u for _, u, _ in layers.cases)  # Gemma 4's last layer has no window
    keys: dict = dict(hidden_size=cfg.width, num_hidden_layers=depth, vocab_size=8, num_attention_heads=spec.heads)
    keys |= dict(num_key_value_heads=spec.kv_heads, head_dim=spec.dim, max_position_embeddings=cfg.max_positions)
    keys |= dict(attn_implementation="flex_attention" if cfg.names.mixer.sinks else "sdpa")
    with torch.device(DEVICE):
        if cfg.experts:
            keys |= dict(experts_implementation="grouped_mm")
        else:
            keys |= dict(intermediate_size=cfg.layers[0].mlp.width)
        hf = AutoConfig.for_model(layers.kind, **keys, **layers.more)
        whole = AutoModel.from_config(hf)
        layer, rotation = whole.layers[b.u - 1].to(BF16), whole.rotary_emb
        stored = (*layer.parameters(), *layer.buffers())
        assert sum(t.numel() for t in stored) == shapes.parameters(cfg, b.u), hf
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.02) if weight.dim() > 1 else torch.nn.init.ones_(weight)
    return layer.train(), rotation


def seen(tokens: int, window: int):
    """FlexAttention's mask: keys not after their query, of the last `window` if that is not 0."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(_batch, _head, query, key):
        return (query >= key) & (query - key < (window or tokens))

    return create_block_mask(visible, None, None, tokens, tokens, device=DEVICE)


def peer_call(b: Block, liger: bool, compile: bool) -> Callable[[], None]:
    """Forward and backward of transformers' layer, of `b.cfg.fp8` by torchao; gradients accumulate, like ours."""
    layer, rotation = peer_layer(b, liger)
    if b.cfg.fp8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(layer)
    x, dy = (t.view(len(b.rows.docs.lengths), -1, b.cfg.width) for t in (b.x.clone(), b.dy))
    x.requires_grad_()
    position_ids, spec = torch.arange(x.shape[1], device=DEVICE)[None], b.cfg.layers[b.u - 1].attention
    window = spec.window if spec else 0
    kinds = ["sliding_attention" if window else "full_attention"] if hasattr(rotation, "layer_types") else []
    places = position_ids.expand(3, 1, -1) if b.cfg.scan else position_ids  # 3: time, height, width
    rotated = rotation(x, places, *kinds)
    mask = seen(x.shape[1], window) if b.cfg.names.mixer.sinks else None
    call = torch.compile(layer, dynamic=False) if compile else layer
    kv = lambda: {"shared_kv_states": {}} if b.cfg.model_type.startswith("gemma4") else {}  # where a layer leaves them

    def both() -> None:
        y = call(x, attention_mask=mask, position_ids=position_ids, position_embeddings=rotated, **kv())
        y.backward(dy)
        x.grad = None

    return both


# cuDNN has no backward for heads of 512
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PEERS = (("compiled", False, True), ("Liger", True, False), ("Liger, compiled", True, True))  # the first for all


def peers_of_block(b: Block) -> tuple[tuple[str, bool, bool], ...]:
    """(name, whether with Liger's kernels, whether compiled) of each peer."""
    if b.cfg.scan:
        return ("eager", False, False), PEERS[0]
    return PEERS[:1] if b.cfg.fp8 or b.cfg not in LARGE.values() else PEERS


def unguard() -> None:
    """Has flash-linear-attention run its backward on Hopper with Triton 3.4 to 3.7.0, for timing alone.

    It refuses that: results may be wrong.
    """
    try:
        from fla.ops.common import chunk_o
    except ImportError:
        return
    chunk_o.IS_NVIDIA_HOPPER = False

"""Small multimodal models of transformers with random weights, and their tensors as files name and shape them."""

from __future__ import annotations

import json

import tiny
import torch
import transformers
from tiny import DIALECTS, GEMMA4, GLM, HYBRID, HYBRID_EXPERTS, LATENT, LLAMA, MIXTURE, PLAIN, TYPES, YARN

from trireme.models.config import parse_config

SIGLIP = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28,
              patch_size=14)  # fmt: skip
KIMI = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=14,
            pos_emb_height=4, pos_emb_width=4)  # fmt: skip
SIGLIP4 = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
               head_dim=8, patch_size=4)  # fmt: skip
EXPERTS4 = dict(enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24)
PIXTRAL = SIGLIP | dict(head_dim=8)
TOWER = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=40, patch_size=4)
DEEP = TOWER | dict(deepstack_visual_indexes=[0], num_position_embeddings=16)
WIDE = TOWER | dict(out_hidden_size=64)
ROPE = dict(rope_type="default", rope_theta=1e4)
GEMMA = DIALECTS | dict(layer_types=TYPES, sliding_window=4, query_pre_attn_scalar=12)
SECTIONS = ROPE | dict(mrope_section=[2, 3, 3])  # of heads of 16
FIFTHS = ROPE | dict(mrope_section=[1, 2, 2], mrope_interleaved=True)  # of 10
EIGHTS = ROPE | dict(mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25)  # of 16
UNTIED, TIED = dict(tie_word_embeddings=False), dict(tie_word_embeddings=True)
MUSE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=4,
            pos_emb_height=4, pos_emb_width=4)  # fmt: skip
CASES = {  # name -> (model_type, text_config, vision_config, other keys)
    "gemma3": ("gemma3", GEMMA, SIGLIP, dict(mm_tokens_per_image=4)),
    "gemma3 untied": ("gemma3", GEMMA | dict(head_dim=8), SIGLIP, UNTIED | dict(mm_tokens_per_image=4)),
    "gemma4": ("gemma4", GEMMA4 | EXPERTS4 | dict(pad_token_id=0), SIGLIP4, {}),
    "gemma4 unified": ("gemma4_unified", GEMMA4 | dict(model_type="gemma4_unified_text", pad_token_id=0), None, {}),
    "mistral3": ("mistral3", PLAIN | dict(model_type="mistral", sliding_window=None), PIXTRAL, UNTIED),
    "ministral3 in mistral3": ("mistral3", PLAIN | dict(
        model_type="ministral3", head_dim=16, rope_parameters=YARN | dict(llama_4_scaling_beta=0.5)), PIXTRAL, UNTIED),
    "mistral4 in mistral3": ("mistral3", LATENT | dict(
        model_type="mistral4", norm_topk_prob=True, rope_parameters=YARN | dict(
            llama_4_scaling_beta=0.5, original_max_position_embeddings=5, mscale=1.0, mscale_all_dim=1.0,
            partial_rotary_factor=0.4)), PIXTRAL, UNTIED),
    "mistral4 in mistral3, groups, dense layers": ("mistral3", LATENT | dict(
        model_type="mistral4", norm_topk_prob=False, first_k_dense_replace=1, n_group=2, topk_group=1,
        rope_parameters=YARN | dict(llama_4_scaling_beta=0.1, partial_rotary_factor=0.4)), PIXTRAL, UNTIED),
    "kimi k2.5": ("kimi_k25", LATENT | dict(first_k_dense_replace=1, n_group=1, topk_group=1), KIMI, UNTIED),
    "mistral3 tied": ("mistral3", PLAIN | dict(model_type="mistral", sliding_window=5), PIXTRAL, TIED),
    "exaone 4.5": (
        "exaone4_5",
        PLAIN | dict(model_type="exaone4_5_text", num_hidden_layers=3, sliding_window=5, layer_types=TYPES),
        WIDE | dict(fullatt_block_indexes=[0], num_key_value_heads=1),
        {},
    ),
    "qwen3 vl": ("qwen3_vl", LLAMA | dict(rope_parameters=FIFTHS), DEEP, {}),
    "qwen3 vl tied, biases": ("qwen3_vl", LLAMA | dict(
        rope_parameters=YARN | dict(mrope_section=[1, 2, 2]), attention_bias=True), DEEP, TIED),
    "qwen3 vl moe": ("qwen3_vl_moe", MIXTURE | dict(rope_parameters=FIFTHS), DEEP, {}),
    "qwen3 vl moe among dense layers": ("qwen3_vl_moe", MIXTURE | dict(
        num_hidden_layers=3, mlp_only_layers=[1], rope_parameters=FIFTHS), DEEP, TIED),
    "qwen2.5 vl": ("qwen2_5_vl", PLAIN | dict(rope_parameters=SECTIONS), WIDE | dict(fullatt_block_indexes=[0]), {}),
    "qwen2 vl tied, window above": ("qwen2_vl", PLAIN | dict(
        rope_parameters=SECTIONS, use_sliding_window=True, sliding_window=4, max_window_layers=1), dict(
            depth=1, embed_dim=16, hidden_size=64, num_heads=2, patch_size=4), TIED),
    "qwen3.5": ("qwen3_5", HYBRID | dict(rope_parameters=EIGHTS), TOWER | dict(num_position_embeddings=16), {}),
    "qwen3.5 moe tied": ("qwen3_5_moe", HYBRID_EXPERTS | dict(
        num_hidden_layers=2, rope_parameters=EIGHTS), TOWER | dict(num_position_embeddings=16), TIED),
    "muse glimmer": ("muse_glimmer", LLAMA | dict(
        num_hidden_layers=4, head_dim=12, sliding_window=5), MUSE, UNTIED | dict(
            out_hidden_size=64, projector_hidden_size=16)),
    "muse glimmer, rope elsewhere": ("muse_glimmer", LLAMA | dict(
        num_hidden_layers=3, sliding_window=4, layer_types=TYPES, layer_rope_theta=[0, 1.0, 9.0], qk_scale_factor=2.0,
        output_multiplier=0.7, final_logit_softcapping=3.0, post_norm_eps=0.1), MUSE, TIED | dict(
            out_hidden_size=64, projector_hidden_size=16)),
    "glm4v": ("glm4v", PLAIN | dict(
        rope_parameters=ROPE | dict(partial_rotary_factor=0.5, mrope_section=[1, 1, 2])), WIDE | dict(
            image_size=16), {}),
    "glm4v moe": ("glm4v_moe", GLM | dict(
        rope_parameters=ROPE | dict(mrope_section=[1, 1, 1]), first_k_dense_replace=1), TOWER | dict(
            image_size=16), {}),
    "glm46v": ("glm46v", PLAIN | dict(model_type="glm4v_text", rope_parameters=SECTIONS), WIDE | dict(
        image_size=16, model_type="glm4v_vision"), TIED),
}  # fmt: skip


def oracle(case, **text):
    """(transformers' model with random weights, its config.json)."""
    model_type, keys, vision, more = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, text_config=keys | text, vision_config=vision, **more)
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5))
            if "norm" in name:
                p.add_(1.0 if name.endswith("weight") else 0.0)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model, json.loads(config.to_json_string(use_diff=False)) | {"model_type": model_type}


def either(case):
    """(transformers' model, our ModelConfig) of a case here or in tiny.CASES."""
    if case not in CASES:
        return tiny.oracle(*tiny.CASES[case])
    model, raw = oracle(case)
    return model, parse_config(raw)


def spelled(model, tensors):
    """As files of the model name and shape them."""
    from transformers.core_model_loading import revert_weight_conversion  # seconds

    released = lambda name: name.replace("language_model.model.blocks.", "language_model.model.layers.")  # Kimi's
    return {released(name): t.contiguous() for name, t in revert_weight_conversion(model, dict(tensors)).items()}


def turned(cfg, tensors):
    """Experts as releases have them, where transformers writes them otherwise."""
    if not (cfg.experts and cfg.names.mlp.either):
        return tensors
    return {name: t.mT.contiguous() if f".{cfg.names.mlp.experts}." in name else t for name, t in tensors.items()}

"""Configs of released models, shortened to a few layers: every tensor's name and shape is that of transformers."""

import pytest
import torch
from tiny import own_name
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from trireme.models.config import parse_config
from trireme.models.hf import canonical_names, carried
from trireme.models.sizes import shapes

YARN = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0, beta_slow=1.0,
            mscale=1.0, mscale_all_dim=1.0, rope_theta=1e6, llama_4_scaling_beta=0.1)  # fmt: skip
PIXTRAL = dict(model_type="pixtral", hidden_size=64, intermediate_size=64, num_attention_heads=4, num_hidden_layers=1,
               head_dim=16, image_size=28, patch_size=14)  # fmt: skip


def sizes(model_type, vocab, width, ffn, layers, heads, kv_heads=None, **more):
    """A config.json as files of transformers 4 have it, and how many layers it had."""
    own = dict(model_type=model_type, vocab_size=vocab, hidden_size=width, intermediate_size=ffn, num_hidden_layers=2,
               num_attention_heads=heads, num_key_value_heads=kv_heads)  # fmt: skip
    return {key: value for key, value in own.items() if value is not None} | more, layers


RELEASED = {  # name -> ((config.json, layers), parameters as the name or the card says, in 1e9)
    "TinyLlama 1.1B": (sizes("llama", 32000, 2048, 5632, 22, 32, 4), 1.1),
    "Yi 6B": (sizes("llama", 64000, 4096, 11008, 32, 32, 4, rope_theta=5e6), 6.06),
    "Falcon 3 7B": (sizes("llama", 131072, 3072, 23040, 28, 12, 4, head_dim=256, rope_theta=1000042), 7.46),
    "DeepSeek R1 distill of LLaMA 8B": (sizes(
        "llama", 128256, 4096, 14336, 32, 32, 8, rope_theta=5e5, rope_scaling=dict(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
            rope_type="llama3")), 8.03),
    "Mistral Nemo 12B": (sizes("mistral", 131072, 5120, 14336, 40, 32, 8, head_dim=128, sliding_window=None), 12.25),
    "GLM-4 9B 0414": (sizes("glm4", 151552, 4096, 13696, 40, 32, 2, head_dim=128, attention_bias=True,
                            partial_rotary_factor=0.5), 9.4),
    "Pythia 2.8B": (sizes("gpt_neox", 50304, 2560, 10240, 32, 32, hidden_act="gelu", rotary_pct=0.25,
                          rotary_emb_base=10000, use_parallel_residual=True), 2.78),
    "Granite 4.0 1B": (sizes("granitemoehybrid", 100352, 2048, 4096, 40, 16, 4, shared_intermediate_size=4096,
                             num_local_experts=0, layer_types=["attention"] * 2, position_embedding_type="rope",
                             tie_word_embeddings=True, mamba_n_heads=64, mamba_d_head=64, mamba_expand=2,
                             attention_multiplier=0.0078125, embedding_multiplier=12, logits_scaling=8,
                             residual_multiplier=0.22), 1.63),
    "Gemma 3 4B": ((dict(
        model_type="gemma3", mm_tokens_per_image=4, vision_config=PIXTRAL | dict(model_type="siglip_vision_model"),
        text_config=dict(model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=2,
                         sliding_window=1024, rope_scaling=dict(factor=8.0, rope_type="linear"))), 34), 3.88),
    "Mistral Small 3.1 24B": ((dict(
        model_type="mistral3", vision_config=PIXTRAL, tie_word_embeddings=False,
        text_config=sizes("mistral", 131072, 5120, 32768, 40, 32, 8, head_dim=128, sliding_window=None,
                          rope_theta=1e9)[0]), 40), 23.57),
    "Ministral 3 8B": ((dict(
        model_type="mistral3", vision_config=PIXTRAL, tie_word_embeddings=False,
        text_config=sizes("ministral3", 131072, 4096, 14336, 34, 32, 8, head_dim=128, sliding_window=None,
                          rope_parameters=YARN)[0]), 34), 8.49),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_tensors_are_those_of_transformers(name):
    (raw, layers), billions = RELEASED[name]
    cfg = parse_config(raw)
    auto = AutoModelForImageTextToText if cfg.wrapper else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(**raw))
    found = {own_name(cfg, key): tuple(t.shape) for key, t in model.state_dict().items()}
    beside = carried(cfg, found)
    names = canonical_names(cfg, found)
    assert {key for key, canonical in names.items() if canonical is None} == {*beside}
    assert len(set(names.values()) - {None}) == sum(len(g) for u in range(4) for g in shapes.weight_groups(cfg, u))
    whole = shapes.parameters(cfg) + (layers - 2) * shapes.parameters(cfg, 1)
    assert whole == pytest.approx(billions * 1e9, rel=0.01)

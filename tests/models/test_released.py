"""Configs of released models, shortened to two layers: tensors, by name and shape, and parameters of transformers."""

from math import prod

import pytest
import torch
import transformers
from wrapped import spelled

from trireme.models.config import parse_config
from trireme.models.families.table import OTHER_NAMES
from trireme.models.hf import as_stored, canonical_names, carried
from trireme.models.sizes import shapes

YARN = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0, beta_slow=1.0,
            mscale=1.0, mscale_all_dim=1.0, rope_theta=1e6, llama_4_scaling_beta=0.1)  # fmt: skip
YARN_MLA = dict(type="yarn", factor=40.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
                mscale_all_dim=1.0)  # fmt: skip
PIXTRAL = dict(model_type="pixtral", hidden_size=64, intermediate_size=64, num_attention_heads=4, num_hidden_layers=1,
               head_dim=16, image_size=28, patch_size=14)  # fmt: skip


def sizes(model_type, vocab, width, ffn, layers, heads, kv_heads=None, **more):
    """A config.json as files of transformers 4 have it, and how many layers it had."""
    own = dict(model_type=model_type, vocab_size=vocab, hidden_size=width, intermediate_size=ffn, num_hidden_layers=2,
               num_attention_heads=heads, num_key_value_heads=kv_heads)  # fmt: skip
    return {key: value for key, value in own.items() if value is not None} | more, layers


def mixture(model_type, vocab, width, ffn, layers, heads, kv_heads, inner, experts, **more):
    """As sizes, of a mixture with experts of `inner` features, under all names of the keys."""
    keys = dict(moe_intermediate_size=inner, norm_topk_prob=True) | ({} if more.keys() & {"moe_k", "moe_topk"} else TOP)
    keys |= {COUNTS[model_type]: experts} | more
    return sizes(model_type, vocab, width, ffn, layers, heads, kv_heads, **keys)


def latent(model_type, vocab, width, ffn, layers, heads, inner, experts, **more):
    """As mixture, of latent attention; the first layer is dense."""
    keys = dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    if experts:
        keys |= dict(moe_intermediate_size=inner, n_routed_experts=experts, n_shared_experts=1, num_experts_per_tok=8,
                     norm_topk_prob=True, first_k_dense_replace=1)  # fmt: skip
    return sizes(model_type, vocab, width, ffn, layers, heads, heads, **keys | more)


def wrapped(text, vision, **more):
    """A config.json with the text's in it."""
    (keys, layers), outer = text, text[0]["model_type"].removesuffix("_text")
    return dict(model_type=outer, text_config=keys, vision_config=vision) | more, layers


def flat(text, vision):
    """One in which keys of the text are not apart."""
    return text[0] | dict(vision_config=vision), text[1]


def gemma4(width, ffn, layers, heads, kv_heads, kv_heads_of_all, **more):
    """As sizes, with all its layers, which are of two kinds."""
    keys = dict(num_hidden_layers=layers, num_global_key_value_heads=kv_heads_of_all, attention_k_eq_v=True,
                hidden_size_per_layer_input=0, sliding_window=1024, head_dim=256, global_head_dim=512)  # fmt: skip
    return sizes("gemma4_text", 262144, width, ffn, 2, heads, kv_heads, **keys | more)


COUNTS = dict(
    solar_open="n_routed_experts", dots1="n_routed_experts", minimax_m2="num_local_experts", exaone_moe="num_experts",
    hy_v3="num_experts", mellum="num_experts", qwen3_vl_moe_text="num_experts", glm4v_moe_text="n_routed_experts",
    ernie4_5_moe="moe_num_experts", afmoe="num_experts", kolibri1="num_experts",
    laguna="num_experts", mimo_v2_flash="n_routed_experts", lara_mini="num_experts",
    granitemoe="num_local_experts", hunyuan_v1_moe="num_experts",
)  # fmt: skip
TOP = dict(num_experts_per_tok=8)
TOWER = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, image_size=16)
MUSE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
DEEP = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, deepstack_visual_indexes=[0])
WINDOWED = TOWER | dict(fullatt_block_indexes=[0], out_hidden_size=3584)
MROPE = dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default")
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
    "Granite 4.0 H Small": (sizes(
        "granitemoehybrid", 100352, 4096, 768, 40, 32, 8, shared_intermediate_size=1536, num_local_experts=72,
        num_experts_per_tok=10, layer_types=["attention", "mamba"], position_embedding_type="nope", mamba_n_heads=128,
        mamba_d_head=64, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, tie_word_embeddings=True,
        attention_multiplier=0.0078125, embedding_multiplier=12, logits_scaling=16, residual_multiplier=0.22), 32.2),
    "Falcon-H1 7B": (sizes(
        "falcon_h1", 130049, 3072, 12288, 44, 12, 2, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128,
        mamba_rms_norm=True, mamba_norm_before_gate=False, attn_layer_indices=None, rope_theta=1e11,
        embedding_multiplier=5.656854249492381, lm_head_multiplier=0.013020833333333334,
        key_multiplier=0.030690398488999456, attention_out_multiplier=0.10416666666666667,
        ssm_in_multiplier=0.4166666666666667, ssm_out_multiplier=0.11785113019775793,
        mlp_multipliers=[0.2946278254943948, 0.032552083333333336],
        ssm_multipliers=[0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738]), 7.586),
    "OLMo Hybrid 7B": (sizes("olmo_hybrid", 100352, 3840, 11008, 32, 30, 30,
                             layer_types=["full_attention", "linear_attention"]), 7.64),  # with one such layer alone
    "Gemma 7B": (sizes("gemma", 256000, 3072, 24576, 28, 16, 16, head_dim=256, hidden_act="gelu"), 8.54),
    "Gemma 2 9B": (sizes("gemma2", 256000, 3584, 14336, 42, 16, 8, head_dim=256, query_pre_attn_scalar=256,
                         hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", sliding_window=4096,
                         attn_logit_softcapping=50.0, final_logit_softcapping=30.0), 9.24),
    "Gemma 3 4B": ((dict(
        model_type="gemma3", mm_tokens_per_image=4, vision_config=PIXTRAL | dict(model_type="siglip_vision_model"),
        text_config=dict(model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=2,
                         sliding_window=1024, rope_scaling=dict(factor=8.0, rope_type="linear"))), 34), 3.88),
    "Gemma 4 26B-A4B": (gemma4(2816, 2112, 30, 16, 8, 2, enable_moe_block=True, num_experts=128, top_k_experts=8,
                               moe_intermediate_size=704), 25.23),
    "Gemma 4 31B": (gemma4(5376, 21504, 60, 32, 16, 4), 30.7),
    "Mistral Small 3.1 24B": ((dict(
        model_type="mistral3", vision_config=PIXTRAL, tie_word_embeddings=False,
        text_config=sizes("mistral", 131072, 5120, 32768, 40, 32, 8, head_dim=128, sliding_window=None,
                          rope_theta=1e9)[0]), 40), 23.57),
    "Ministral 3 8B": ((dict(
        model_type="mistral3", vision_config=PIXTRAL, tie_word_embeddings=False,
        text_config=sizes("ministral3", 131072, 4096, 14336, 34, 32, 8, head_dim=128, sliding_window=None,
                          rope_parameters=YARN)[0]), 34), 8.49),
    "Solar Open 100B": (mixture("solar_open", 196608, 4096, 10240, 48, 64, 8, 1280, 128, head_dim=128, rope_theta=1e6,
                                partial_rotary_factor=1.0, first_k_dense_replace=0, n_shared_experts=1,
                                rope_scaling=dict(type="yarn", factor=2.0, original_max_position_embeddings=65536)),
                        102.7),
    "dots.llm1": (mixture("dots1", 152064, 4096, 10944, 62, 32, 32, 1408, 128, n_shared_experts=2,
                          num_experts_per_tok=6, first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=None,
                          topk_group=None), 142.8),
    "MiniMax-M2": (mixture("minimax_m2", 200064, 3072, 1536, 62, 48, 8, 1536, 256, head_dim=128, rotary_dim=64,
                           rope_theta=5000000, use_qk_norm=True, use_mtp=True, scoring_func="sigmoid",
                           attn_type_list=[1] * 62), 228.7),
    "K-EXAONE 236B": (mixture("exaone_moe", 153600, 6144, 18432, 48, 64, 8, 2048, 128, head_dim=128, rope_theta=1e6,
                              first_k_dense_replace=1, num_shared_experts=1, sliding_window=128,
                              sliding_window_pattern="LLLG",
                              layer_types=["sliding_attention", "full_attention"]), 236.6),
    "Hy3": (mixture("hy_v3", 120832, 4096, 13312, 80, 64, 8, 1536, 192, head_dim=128, rope_theta=11158840.0,
                    first_k_dense_replace=1, num_shared_experts=1, router_scaling_factor=2.826,
                    num_nextn_predict_layers=1), 295.0),
    "Trinity Mini 26B-A3B": (mixture(
        "afmoe", 200192, 2048, 6144, 31, 32, 4, 1024, 128, head_dim=128, num_dense_layers=1, num_shared_experts=1,
        route_scale=2.826, route_norm=True, score_func="sigmoid", mup_enabled=True, sliding_window=2048,
        global_attn_every_n_layers=4, n_group=1, topk_group=1, rope_theta=10000), 26.1),  # one more layer is dense
    "Kolibri-1 78B-A4B": (mixture("kolibri1", 128000, 2560, None, 50, 48, 4, 512, 384, head_dim=128, sliding_window=513,
                                  shared_expert_intermediate_size=512, num_experts_per_tok=6), 78.1),
    "Laguna XS.2 33B": (mixture("laguna", 100352, 2048, 8192, 40, 48, 8, 512, 256, head_dim=128, sliding_window=512,
                                shared_expert_intermediate_size=512, rope_parameters=dict(
                                    full_attention=dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=0.5),
                                    sliding_attention=dict(rope_type="default", rope_theta=1e4))), 33.2),
    "MiMo-V2-Flash": (mixture("mimo_v2_flash", 152576, 4096, 16384, 48, 64, 4, 2048, 256, head_dim=192, v_head_dim=128,
                              rope_theta=5000000, partial_rotary_factor=0.334, routed_scaling_factor=None, n_group=1,
                              topk_group=1, layernorm_epsilon=1e-5), 308.8),
    "Lara-4-Mini": (mixture("lara_mini", 151936, 1024, None, 34, 16, 4, 512, 128, head_dim=128, sliding_window=512,
                            shared_expert_intermediate_size=512, num_experts_per_tok=4, linear_num_key_heads=8,
                            linear_num_value_heads=16, tie_word_embeddings=True,
                            layer_types=["full_attention", "linear_attention"]), 7.3),
    "Muse Glimmer 30B": (wrapped(sizes(
        "muse_glimmer_text", 202048, 6656, 19968, 52, 32, 2, head_dim=128, sliding_window=2048,
        layer_types=["sliding_attention", "full_attention"]), MUSE), 27.85),  # without the vision tower
    "Mellum 2 12B": (mixture("mellum", 98304, 2304, 7168, 28, 32, 4, 896, 64, head_dim=128,
                             layer_types=["full_attention", "sliding_attention"], sliding_window=1024), 12.15),
    "ERNIE 4.5 0.3B": (sizes("ernie4_5", 103424, 1024, 3072, 18, 16, 2, head_dim=128, use_bias=False,
                             tie_word_embeddings=True, rope_theta=500000), 0.36),
    "CWM 32B": (sizes("cwm", 128256, 6144, 21504, 64, 48, 8, head_dim=128, sliding_window=8192, rope_theta=1e6,
                      rope_scaling=dict(factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, rope_type="llama3",
                                        original_max_position_embeddings=8192)), 32.6),
    "Helium 1 preview": (sizes("helium", 48000, 2560, 7040, 24, 20, 20, head_dim=128, rope_theta=1e5), 2.17),
    "ERNIE 4.5 21B": (mixture("ernie4_5_moe", 103424, 2560, 12288, 28, 20, 4, 1536, 64, moe_k=6, head_dim=128,
                              moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=1,
                              moe_layer_interval=1, use_bias=False, tie_word_embeddings=True, rope_theta=500000),
                      21.83),
    "Granite 3.1 3B-A800M": (mixture("granitemoe", 49155, 1536, 512, 32, 24, 8, 512, 40, attention_multiplier=0.015625,
                                     embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22,
                                     tie_word_embeddings=True), 3.3),
    "Hunyuan 7B": (sizes("hunyuan_v1_dense", 128256, 4096, 14336, 32, 32, 8, head_dim=128, rope_theta=10000.0,
                         tie_word_embeddings=True, use_qk_norm=True, rope_scaling=dict(
                             alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0,
                             type="dynamic")), 7.5),
    "AFM 4.5B": (sizes("arcee", 128004, 2560, 18432, 36, 20, 4, head_dim=128, hidden_act="relu2", rope_theta=10000.0,
                       rope_scaling=dict(rope_type="yarn", factor=20.0, original_max_position_embeddings=4096)), 4.62),
    "Qwen3-VL 2B": (wrapped(sizes("qwen3_vl_text", 151936, 2048, 6144, 28, 16, 8, head_dim=128, rope_theta=5e6,
                                  rope_scaling=MROPE), DEEP, tie_word_embeddings=True), 1.72),
    "Qwen3-VL 235B": (wrapped(mixture("qwen3_vl_moe_text", 151936, 4096, 12288, 94, 64, 4, 1536, 128, head_dim=128,
                                      rope_theta=5e6, decoder_sparse_step=1, mlp_only_layers=[], rope_scaling=MROPE),
                              DEEP, tie_word_embeddings=False), 235.1),
    "Hunyuan A13B": (mixture("hunyuan_v1_moe", 128167, 4096, 3072, 32, 32, 8, [3072] * 2, 64, moe_topk=[8] * 2,
                             num_shared_expert=[1] * 2, moe_layer_num_skipped=0, use_cla=False, use_mixed_mlp_moe=True,
                             n_group=False, topk_group=False, routed_scaling_factor=False, head_dim=128,
                             tie_word_embeddings=True, rope_theta=10000.0, rope_scaling=dict(
                                 alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0,
                                 type="dynamic")), 80.4),
    "IQuest-Coder 40B": (sizes("iquestcoder", 76800, 5120, 27648, 80, 40, 8, head_dim=128, rope_theta=500000.0), 39.8),
    "Jais 2 8B": (sizes("jais2", 150272, 3328, 26624, 32, 26, 26, rope_theta=500000.0), 8.09),
    "EXAONE 4.5 33B": (wrapped(sizes(
        "exaone4_5_text", 153600, 5120, 27392, 64, 40, 8, sliding_window=4096, sliding_window_pattern="LLLG",
        layer_types=["sliding_attention", "full_attention"], num_nextn_predict_layers=1, rope_scaling=dict(
            factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_theta=1000000.0, rope_type="llama3")), WINDOWED | dict(num_key_value_heads=1)), 32.5),
    "DeepSeek-V3": (latent("deepseek_v3", 129280, 7168, 18432, 59, 128, 2048, 256, n_group=8, topk_group=4,
                           routed_scaling_factor=2.5, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1,
                           num_nextn_predict_layers=1, rope_scaling=YARN_MLA), 671.0),  # two more layers are dense
    "Kimi K2": (latent("kimi_k2", 163840, 7168, 18432, 61, 64, 2048, 384, n_group=1, topk_group=1, rope_theta=50000.0,
                       routed_scaling_factor=2.827, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1,
                       num_nextn_predict_layers=0, rope_scaling=YARN_MLA | dict(factor=32.0)), 1026.5),
    "DeepSeek-V2-Lite": (latent("deepseek_v2", 102400, 2048, 10944, 27, 16, 1408, 64, num_experts_per_tok=6,
                                q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1, topk_method="greedy",
                                norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1,
                                rope_scaling=YARN_MLA | dict(mscale=0.707, mscale_all_dim=0.707)), 15.7),
    "GLM-4.7-Flash": (latent("glm4_moe_lite", 154880, 2048, 10240, 47, 20, 1536, 64, num_experts_per_tok=4,
                             q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, routed_scaling_factor=1.8,
                             n_group=1, topk_group=1, topk_method="noaux_tc", rope_theta=1e6, partial_rotary_factor=1.0,
                             num_nextn_predict_layers=1), 29.9),
    "Mistral Small 4 119B": ((dict(
        model_type="mistral3", vision_config=PIXTRAL, tie_word_embeddings=False,
        text_config=latent("mistral4", 131072, 4096, 12288, 36, 32, 2048, 128, num_experts_per_tok=4, q_lora_rank=1024,
                           kv_lora_rank=256, qk_nope_head_dim=64, n_group=1, topk_group=1, first_k_dense_replace=0,
                           rope_parameters=YARN | dict(factor=128.0, partial_rotary_factor=0.5))[0]), 36), 118.0),
    "Youtu-LLM 2B": (latent("youtu", 128256, 2048, 6144, 32, 16, 0, 0, tie_word_embeddings=True, rope_theta=1.6e6,
                            rope_scaling=None), 1.96),
    "GLM-4.1V 9B": (wrapped(sizes("glm4v_text", 151552, 4096, 13696, 40, 32, 2, partial_rotary_factor=0.5,
                                  rope_scaling=dict(type="default", mrope_section=[8, 12, 12])), TOWER), 9.4),
    "GLM-4.5V": (wrapped(mixture("glm4v_moe_text", 151552, 4096, 10944, 46, 96, 8, 1408, 128, head_dim=128,
                                 attention_bias=True, partial_rotary_factor=0.5, n_shared_experts=1, use_qk_norm=False,
                                 rope_scaling=dict(rope_type="default", mrope_section=[8, 12, 12])), TOWER), 106.9),
    "Qwen2.5-VL 7B": (flat(sizes("qwen2_5_vl", 152064, 3584, 18944, 28, 28, 4, sliding_window=32768,
                                 use_sliding_window=False, max_window_layers=28, rope_theta=1e6,
                                 rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24])), WINDOWED), 7.62),
    "Qwen2-VL 2B": (flat(sizes("qwen2_vl", 151936, 1536, 8960, 28, 12, 2, sliding_window=32768,
                               use_sliding_window=False, tie_word_embeddings=True, rope_theta=1e6,
                               rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24])), dict(
                                   depth=1, embed_dim=16, hidden_size=1536, num_heads=2)), 1.54),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", RELEASED)
def test_tensors_are_those_of_transformers(name):
    (raw, layers), billions = RELEASED[name]
    cfg = parse_config(raw)
    auto = transformers.AutoModelForImageTextToText if cfg.wrapper else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        known = raw | dict(model_type=OTHER_NAMES.get(raw["model_type"], raw["model_type"]))
        model = auto.from_config(transformers.AutoConfig.for_model(**known))
        state = spelled(model, {key: t.to("meta") for key, t in model.state_dict().items()})
    found = {key: tuple(t.shape) for key, t in state.items() if not (cfg.tied and key.endswith("lm_head.weight"))}
    cfg = as_stored(cfg, found)
    beside = carried(cfg, found)
    names = canonical_names(cfg, found)
    assert {key for key, canonical in names.items() if canonical is None} == {*beside}
    assert set(names.values()) - {None} == {*shapes.stored_tensors(cfg)}
    theirs = sum(prod(shape) for key, shape in found.items() if key not in beside)
    assert shapes.parameters(cfg) == theirs
    whole = theirs + (layers - 2) * shapes.parameters(cfg, 2)
    assert whole == pytest.approx(billions * 1e9, rel=0.01)

"""Model types that are known and not supported: the reason, and the nearest supported type. No torch."""

from __future__ import annotations

from difflib import get_close_matches

_VISION = "a vision part that is not known here"
KNOWN = {  # (what they have, the nearest that is supported) -> their model types
    ("several residual streams, and sparse attention with an indexer", "qwen3_5_moe"): "qwen4_exp qwen4_exp_text",
    ("layers of linear attention (Kimi delta attention), and latent attention", "glm4_moe"): (
        "kimi_linear glm5_next bailing_hybrid"
    ),
    ("layers of linear attention (lightning attention)", "minimax_m2"): "minimax",
    ("recurrent layers in place of attention", "llama"): "rwkv xlstm recurrent_gemma",
    ("Mamba layers", "llama"): "mamba mamba2 falcon_mamba zamba zamba2 jamba",
    ("images and audio as its input", "nemotron_h"): "nemotron_h_omni",
    ("short convolutions in place of attention", "llama"): "lfm2 lfm3 lfm2_vl lfm3_vl",
    ("short convolutions in place of attention, and experts", "qwen3_moe"): "lfm2_moe",
    ("multi-head latent attention of another kind, and experts", "deepseek_v3"): ("longcat_flash sarvam_mla axk1"),
    ("multi-head latent attention with scaled branches", "youtu"): "minicpm3",
    ("sparse attention with an indexer of its keys", "deepseek_v3"): ("deepseek_v4 hy_v4 hy_v4_vl mistral_large4 axk2"),
    ("sparse attention with an indexer of its keys, and images", "minimax_m2"): "minimax_m3_vl minimax_m3_vl_text",
    ("limits of activations by layer, and experts of which gate and up are two tensors", "laguna"): "step3p7",
    ("embeddings for each layer, and layers that share keys and values", "gemma3"): "gemma3n gemma3n_text",
    ("attention in chunks, and experts with scaled inputs", "qwen3_moe"): "llama4 llama4_text",
    ("norms behind the branches together with experts", "olmoe"): "flex_olmo",
    ("experts that are chosen in another way, or within attention", "mixtral"): "phimoe jetmoe",
    ("a LayerNorm without a bias", "llama"): "cohere cohere2 cohere2_moe cohere2_vision dbrx mpt",
    ("a LayerNorm without weights", "olmo2"): "olmo",
    ("one LayerNorm before attention and MLP", "gpt_neox"): "phi gptj codegen falcon",
    ("a LayerNorm in place of the RMSNorm", "llama"): "stablelm persimmon nemotron",
    ("another activation, without a gate", "llama"): "apertus nanochat",
    ("positions that are biases of the scores (ALiBi)", "gpt_neox"): "bloom",
    ("positions or heads of another kind", "gpt2"): "opt gpt_neo gpt_bigcode xglm biogpt openai-gpt ctrl",
    ("queries, keys and values in one matrix, and experts", "glm4_moe"): "sarvam_moe",
    ("factors of branches that have a norm behind them", "granite"): "hyperclovax",
    ("an MLP next to experts, or windows with them", "granitemoe"): "granitemoeshared granitemoe_swa",
    ("rope that changes with a document's length", "llama"): "internlm3",
    ("other names of tensors", "llama"): "exaone",
    ("bytes that are packed in place of tokens", "llama"): "blt",
    ("weights of three values", "llama"): "bitnet",
    ("cross-attention to images", "llama"): "mllama",
    (_VISION, "qwen3_vl"): (
        "llava llava_next llava_onevision internvl aria idefics2 idefics3 smolvlm paligemma ovis2 molmo2 deepseek_vl "
        "deepseek_vl_hybrid deepseek_ocr2 minicpmv4_6 minicpmv4_7 aya_vision fuyu phi4_multimodal glm_ocr hunyuan_vl"
    ),
    (f"{_VISION}, and experts for images", "ernie4_5_moe"): "ernie4_5_vl_moe",
    ("audio as its input or output", "qwen3_vl"): "qwen2_5_omni qwen3_omni_moe qwen2_audio voxtral moshi",
    ("layers that see tokens behind their own", "qwen3"): (
        "bert roberta distilbert electra albert deberta deberta-v2 modernbert xlm-roberta camembert ernie"
    ),
    ("an encoder next to the decoder", "qwen3"): "t5 mt5 umt5 t5gemma bart mbart marian pegasus m2m_100 whisper",
}
_WHY = {model_type: reason for reason, types in KNOWN.items() for model_type in types.split()}


def unsupported_reason(model_type: object, supported: tuple[str, ...]) -> str:
    """Why a model_type is not supported, and which supported one is nearest, in whole sentences."""
    if isinstance(model_type, str) and model_type in _WHY:
        reason, nearest = _WHY[model_type]
        return f"it has {reason}. The nearest that is: {nearest}; docs/models.md lists all."
    types = get_close_matches(model_type, supported, 1) if isinstance(model_type, str) else []
    return "it is not known." + (f" Did you mean {types[0]}?" if types else "") + " docs/models.md lists all that are."


# Model types of which transformers 5.24 has no class with a score head (scores.py).
WITHOUT_SCORES = frozenset({
    "olmoe", "granite", "granitemoe", "granitemoehybrid", "granite_swa", "bamba", "falcon_h1", "nemotron_h",
    "olmo_hybrid", "gemma4_text", "flint", "afmoe", "kolibri1", "laguna", "mimo_v2_flash", "lara_mini",
    "muse_glimmer_text",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "solar_open", "dots1", "minimax_m2", "exaone_moe", "hy_v3", "mellum",
    "ernie4_5", "ernie4_5_moe", "cwm", "qwen3_5_moe_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_vl_text",
    "qwen2_vl_text", "glm4v_text", "glm4v_moe_text", "deepseek_v32", "youtu", "iquestcoder", "jais2", "vaultgemma",
})  # fmt: skip
IN_CLASSES = {  # of others: how its classes are called, where it is not the capitalized words of the model type
    "gpt2": "GPT2",
    "gpt_neox": "GPTNeoX",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hunyuan_v1_moe": "HunYuanMoEV1",
    "qwen3_5_text": "Qwen3_5Text",
    "smollm3": "SmolLM3",
}

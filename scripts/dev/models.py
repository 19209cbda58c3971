"""python scripts/dev/models.py: writes docs/models.md, the families that can be trained, from their table."""

import re
from importlib.metadata import version
from pathlib import Path

from trireme.models.families.family import EXACT_GELU, GELU, RELU2, SILU, Family
from trireme.models.families.known import KNOWN
from trireme.models.families.rope import KINDS
from trireme.models.families.table import FAMILIES, WRAPPERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
TEXT = """# Models that can be trained

Made by `python scripts/dev/models.py` from `models/families/table.py`: a family is a row there, never a branch in the
code behind it. Each is tested with random weights against transformers {version}: logits and every gradient in fp32
within 1e-5, packed documents against one document at a time, tables of angles bit for bit, each key of `config.json`
that transformers reads, and a saved folder that transformers opens again with equal weights. "Release" means that
names, shapes and number of all tensors are also compared for the `config.json` of the release, "checkpoint" that losses
and gradients of a real one are.

A type in brackets is the `model_type` inside `text_config`. Of a multimodal model the language model is trained, by
text alone: its other tensors are copied into the result byte for byte, and rows with image or video tokens are refused.

| | `model_type` | released models | beside an RMSNorm before each half, SwiGLU and rotary positions | verified |
|---|---|---|---|---|
{rows}

Rope, in the spellings of transformers 4 and 5: {kinds}. With `longrope` the run's `--seq-len` says which factors
are used, the short ones up to `original_max_position_embeddings`. `--rope-factor X` extends a context X times by YaRN,
in training and in the result's `config.json`.

Refused, with one line that names the key: other activations, quantized weights but gpt-oss's MXFP4, heads for other
tasks, routing by groups of experts (`n_group`).

## Known, and not supported

| what they have | model types | the nearest that can be trained |
|---|---|---|
{known}
"""
MAKERS = {
    "LLaMA and alike": "llama seed_oss smollm3 cwm helium arcee",
    "GPT": "gpt2 gpt_neox gpt_oss starcoder2",
    "Qwen": ("qwen2 qwen3 qwen2_moe qwen3_moe qwen2_vl_text qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text"),
    "GLM": "glm glm4 glm4_moe glm4v_text glm4v_moe_text",
    "Mistral": "mistral ministral ministral3 mixtral",
    "MiniMax": "minimax_m2",
    "Tencent": "hunyuan_v1_dense hy_v3",
    "EXAONE": "exaone4 exaone_moe",
    "Upstage": "solar_open",
    "rednote": "dots1",
    "Baidu": "ernie4_5 ernie4_5_moe",
    "JetBrains": "mellum",
    "Google": "gemma gemma2 gemma3_text",
    "Microsoft": "phi3",
    "IBM": "granite granitemoe granite_swa granitemoehybrid",
    "Ai2": "olmo2 olmo3 olmoe",
}


def special(family: Family) -> list[str]:
    """A family's special features."""
    n = family.names
    said = {
        "LayerNorms with bias": family.layer_norm,
        "attention and MLP of one input: no half blocks": family.parallel,
        "norms of the branches, none before": not n.norm1,
        "norms before and behind each half": bool(n.norm1 and n.post1),
        "norms multiply by 1 + weight": family.add_one,
        "GELU between two matrices": not family.gated and family.acts[0] in GELU,
        "GELU, exact or by tanh, between two matrices": EXACT_GELU in family.acts,
        "GeGLU": family.gated and family.acts is not SILU,
        "learned positions": not family.rotary,
        "rope on a share of each head": bool(family.partial),
        "rope of neighbouring features": family.pairs,
        "queries scaled by position": family.query_beta,
        "layers without rope": family.unrotated in ("listed", "full"),
        "perhaps no rope": family.unrotated == "typed",
        "q and k norms of each head": family.qk_norm == "head" and not family.qk_norm_key,
        "perhaps q and k norms of each head": bool(family.qk_norm_key),
        "q and k norms over the whole width": family.qk_norm == "width",
        "packed matrices": family.gated and len(n.up) == 1,
        "matrices stored (in, out)": n.in_out,
        "window in all layers": family.windows == "all",
        "window from a layer on": family.windows == "above",
        "window by `layer_types`": family.windows == "pattern",
        "a second table of angles for layers with the window": family.local_theta is not None,
        "factors of embedding, scores, branches and logits": family.scaled,
        "soft-capped scores and logits": family.capped,
        "scores by `query_pre_attn_scalar`": family.query_scale,
        "embedding times the root of the width": family.embed_root,
        "biases": bool(family.qkv_bias),
        "a mixture of experts in place of the MLP": family.experts is not None,
        "dense layers first": family.experts is not None and bool(family.experts.leading),
        "experts chosen with a frozen correction": bool(n.correction),
        "MTP layers carried through": family.mtp,
        "attention sinks": bool(n.sinks),
        "relu squared between two matrices": family.acts is RELU2,
        "q and k rotated before their norms": family.rope_first,
        "a clamped SwiGLU": family.experts is not None and family.experts.limit > 0,
    }
    return [words for words, holds in said.items() if holds]


def verified(model_type: str) -> str:
    """How, beyond random weights."""
    tests = (ROOT / "tests/models/test_released.py").read_text()
    outer = [name for name, wrapper in WRAPPERS.items() if model_type in wrapper.texts]
    names = "|".join([model_type, *outer])
    found = ["release"] * bool(re.search(rf'"({names})"', tests))
    return ", ".join(found + ["checkpoint"] * (model_type in ("llama", "gpt2"))) or "-"


def row(maker: str, model_type: str) -> str:
    family = FAMILIES[model_type]
    outer = [f"`{name}`" for name, wrapper in WRAPPERS.items() if model_type in wrapper.texts]
    own = [f"`{model_type}`"] if not family.inner else []
    types = ", ".join([*own, *(f"{name} (`{model_type}`)" for name in outer)])
    return f"| {maker} | {types} | {family.known_as} | {', '.join(special(family)) or '-'} | {verified(model_type)} |"


def page() -> str:
    listed = [(maker, name) for maker, types in MAKERS.items() for name in types.split()]
    assert {name for _, name in listed} == {*FAMILIES}, "each family has a maker"
    rows = [row(maker if MAKERS[maker].split()[0] == name else "", name) for maker, name in listed]
    known = [
        f"| {reason} | {', '.join(f'`{name}`' for name in types.split())} | `{nearest}` |"
        for (reason, nearest), types in KNOWN.items()
    ]
    words = dict(rows="\n".join(rows), known="\n".join(known), kinds=", ".join(KINDS))
    return TEXT.format(version=version("transformers"), **words)


if __name__ == "__main__":
    PAGE.write_text(page())

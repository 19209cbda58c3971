"""python scripts/dev/models.py: writes docs/models.md, the families that can be trained, from their table."""

from importlib.metadata import version
from pathlib import Path

from trireme.models.families.rope import KINDS
from trireme.models.families.table import EXACT_GELU, FAMILIES, SILU, WRAPPERS, Family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TEXT = """# Models that can be trained

Made by `python scripts/dev/models.py` from `models/families/table.py`: a family is a row there, never a branch in the
code behind it. Each is tested with random weights against transformers {version}: logits and every gradient in fp32
within 1e-5, tables of angles to the bit, 50 steps of training within 1e-4, every set of saved tensors to the same bits,
and a saved folder that transformers opens again with equal weights.

| `model_type` | known as | beside an RMSNorm before each half, SwiGLU and rotary positions |
|---|---|---|
{rows}

Of a multimodal model the language model is trained, by the same rows; its other tensors are copied into the result byte
for byte, and a line says so:

| `model_type` | known as | `model_type` of its `text_config` |
|---|---|---|
{wrappers}

Rope, in the spellings of transformers 4 and 5: {kinds}. With `longrope` the run's `--seq-len` says which factors
are used, the short ones up to `original_max_position_embeddings`. `--rope-factor X` extends a context X times by YaRN,
in training and in the result's `config.json`.

Refused, with one line that names the key: soft-capped scores and logits (Gemma 2), other activations, quantized
weights but gpt-oss's MXFP4, heads for other tasks, routing by groups of experts (`n_group`).
"""


def special(family: Family) -> list[str]:
    """A family's special features."""
    n = family.names
    said = {
        "LayerNorms with bias": family.layer_norm,
        "attention and MLP of one input: no half blocks": family.parallel,
        "norms of the branches, none before": not n.norm1,
        "norms before and behind each half": bool(n.norm1 and n.post1),
        "norms multiply by 1 + weight": family.add_one,
        "GELU between two matrices": not family.gated and EXACT_GELU not in family.acts,
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
        "scores by `query_pre_attn_scalar`": family.query_scale,
        "embedding times the root of the width": family.embed_root,
        "biases": bool(family.qkv_bias),
        "a mixture of experts in place of the MLP": family.experts is not None,
        "dense layers first": family.experts is not None and family.experts.leading > 0,
        "experts chosen by sigmoids and a frozen correction": bool(n.correction),
        "MTP layers carried through": family.mtp,
        "attention sinks": bool(n.sinks),
        "a clamped SwiGLU": family.experts is not None and family.experts.limit > 0,
    }
    return [words for words, holds in said.items() if holds]


def page() -> str:
    rows = [f"| `{name}` | {f.known_as} | {', '.join(special(f)) or '-'} |" for name, f in FAMILIES.items()]
    wrappers = [f"| `{name}` | {w.known_as} | {', '.join(f'`{t}`' for t in w.texts)} |" for name, w in WRAPPERS.items()]
    words = dict(rows="\n".join(rows), wrappers="\n".join(wrappers), kinds=", ".join(KINDS))
    return TEXT.format(version=version("transformers"), **words)


if __name__ == "__main__":
    PAGE.write_text(page())

"""Names of a model's tensors in Hugging Face checkpoints. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Names:
    """Names of a family's tensors. Those of a block follow `block` with the layer's number in it."""

    base: str  # prefix of the model below its output matrix, which some checkpoints leave out
    embed: str
    final_norm: str
    block: str
    norm1: str  # before attention; "": none
    qkv: tuple[str, ...]  # one packed matrix, or three
    o: str
    norm2: str  # before the MLP; "": none
    up: tuple[str, ...]  # gate and up, or one matrix
    down: str
    positions: str = ""  # learned ones
    post1: str = ""  # the norm of what attention adds, if any
    post2: str = ""  # the norm of what the MLP adds
    q_norm: str = ""
    k_norm: str = ""
    output: str = "lm_head"
    in_out: bool = False  # matrices are stored (in, out), not (out, in)

    def prefix(self, layer: int) -> str:
        """What the names of a block's tensors begin with."""
        return self.block.format(layer)


def adapter_names(module: str) -> tuple[str, str]:
    """Names of the tensors of a module's adapter: A (rank, in) and B (out, rank)."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


SPLIT = Names(
    base="model.",
    embed="model.embed_tokens",
    final_norm="model.norm",
    block="model.layers.{}.",
    norm1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    norm2="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
)
PACKED = replace(SPLIT, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
PLAIN_MLP = replace(SPLIT, up=("mlp.c_fc",), down="mlp.c_proj")
POST = replace(SPLIT, norm1="", norm2="", post1="post_attention_layernorm", post2="post_feedforward_layernorm")
BOTH = replace(POST, norm1="input_layernorm", norm2="pre_feedforward_layernorm")
IN_OUT = Names(
    base="transformer.",
    embed="transformer.wte",
    final_norm="transformer.ln_f",
    block="transformer.h.{}.",
    norm1="ln_1",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    norm2="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    positions="transformer.wpe",
    in_out=True,
)

"""Models by the names that people write: shapes to plan for and to measure, without a checkpoint. No torch."""

from __future__ import annotations

from difflib import get_close_matches

from trireme.models.config import InputError, ModelConfig, Rope


def llama(width: int, layers: int, heads: int, ffn: int, vocab: int = 32000, kv: int | None = None) -> ModelConfig:
    return ModelConfig("llama", vocab, width, layers, heads, kv or heads, width // heads, ffn, 1 << 17, 1e-5, False,
                       rope=Rope(1e4))  # fmt: skip


def gpt3(width: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig("gpt2", 50257, width, layers, heads, heads, width // heads, 4 * width, 8192, 1e-5, True,
                       qkv_bias=True, o_bias=True, mlp_bias=True)  # fmt: skip


MODELS = {
    "llama-tiny": llama(256, 4, 4, 688, vocab=2048),
    "llama-0.15b": llama(768, 12, 12, 2048),
    "llama-0.4b": llama(1024, 24, 16, 2816),
    "llama-1.3b": llama(2048, 24, 16, 5504),
    "llama-3b": llama(3072, 26, 24, 8192),
    "llama-7b": llama(4096, 32, 32, 11008),
    "llama-8b": llama(4096, 32, 32, 14336, vocab=128256, kv=8),
    "llama-13b": llama(5120, 40, 40, 13824),
    "llama-33b": llama(6656, 60, 52, 17920),
    "llama-70b": llama(8192, 80, 64, 28672, kv=8),
    "llama-405b": llama(16384, 126, 128, 53248, vocab=128256, kv=8),
    "gpt3-13b": gpt3(5120, 40, 40),
    "gpt3-175b": gpt3(12288, 96, 96),
}


def find_model(name: str) -> ModelConfig:
    """The shape of that name, in any case. Raises InputError, which lists the names."""
    if found := MODELS.get(name.lower()):
        return found
    near = get_close_matches(name.lower(), MODELS, 1)
    perhaps = f"Did you mean {near[0]}? " if near else ""
    raise InputError(
        f"--shape {name} is not known. {perhaps}There are {', '.join(MODELS)}; for any other model, name a folder "
        "with its config.json as the checkpoint."
    )

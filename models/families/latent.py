"""Multi-head latent attention, as config.json describes it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.models.families.keys import InputError, Keys


@dataclass(frozen=True)
class Latent:
    """Latents from which queries, keys and values are computed (models/mixers/latent.py)."""

    q_rank: int  # of queries; 0: none
    kv_rank: int  # of keys and values
    nope: int  # features of a head's query and key that are not rotated
    rope: int  # those that are; a token's key has one such part for all heads
    value: int  # width of a head's value

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope + self.rope


@dataclass(frozen=True)
class LatentKeys:
    """A family's defaults, those of transformers."""

    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128


def parse_latent(keys: Keys, family: LatentKeys | None, heads: int) -> Latent | None:
    """The Latent that config.json describes; None for families without. Raises InputError."""
    if family is None:
        return None
    keys.refuse_unless("num_key_value_heads", (None, heads), heads)
    q_rank = 0 if keys.raw.get("q_lora_rank", family.q_rank) is None else keys.count("q_lora_rank", family.q_rank)
    latent = Latent(
        q_rank,
        keys.count("kv_lora_rank", family.kv_rank),
        keys.count("qk_nope_head_dim", family.nope),
        keys.count("qk_rope_head_dim", family.rope),
        keys.count("v_head_dim", family.value),
    )
    for name, n in (("qk_rope_head_dim", latent.rope), ("qk_nope_head_dim", latent.nope)):
        if n % 2:
            raise keys.error(name, "an even number")
    keys.refuse_unless("head_dim", (None, latent.rope, latent.head_dim))
    keys.refuse_unless("qk_head_dim", (None, latent.head_dim))
    if not q_rank and keys.raw.get("attention_bias"):
        raise InputError(f'{keys.source}: "attention_bias" is not supported where "q_lora_rank" is null.')
    return latent

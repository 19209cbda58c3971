"""The model by unit number, so that the engine need not know the family: u = 0 embedding, then blocks, then head.

Where a plan cuts blocks in halves (cfg.halves) each of them is a unit.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from trireme.models import gpt, head, llama, shapes
from trireme.models.config import ModelConfig
from trireme.models.head import EmbedWeights, HeadWeights


def block(cfg: ModelConfig) -> ModuleType:
    """The module whose `forward` and `backward` compute a block; both take the layer."""
    return gpt if cfg.is_gpt else llama


def forward(cfg: ModelConfig, u: int, *given) -> None:
    """Forward of unit u, a block or half of one; `given` as the block's forward takes it after the layer."""
    block(cfg).FORWARD[shapes.kind(cfg, u)](cfg, shapes.layer(cfg, u), *given)


def backward(cfg: ModelConfig, u: int, *given) -> None:
    """Backward of unit u, a block or half of one; `given` as the block's backward takes it after the layer."""
    block(cfg).BACKWARD[shapes.kind(cfg, u)](cfg, shapes.layer(cfg, u), *given)


def weights(cfg: ModelConfig, u: int, views: dict[str, Tensor]):
    """Unit u's NamedTuple over `views`: name -> tensor of one flat buffer, of weights or of gradients."""
    if u == 0:
        return head.embed_weights(cfg, views)
    if u == cfg.n_units - 1:
        return head.head_weights(cfg, views)
    return block(cfg).weights(cfg, shapes.layer(cfg, u), views)


def output_matrix(cfg: ModelConfig, embed: EmbedWeights, top: HeadWeights) -> Tensor:
    """The output matrix (V, D), or its gradient: the embedding's where they are tied."""
    return embed.tokens if cfg.tied else top.output

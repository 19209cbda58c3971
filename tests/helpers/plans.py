"""Models, rates of machines and plans that are predicted, not run."""

from dataclasses import replace

from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.planner.rates import Rates
from trireme.models.config import Lora, ModelConfig, Rope, uniform
from trireme.models.sizes import shapes

RATES = Rates(matmul=1e14, copy=1e12, h2d=2e10, d2h=2e10, adam=2e9, dram=6e10, ssd_read=6e9, ssd_write=4e9)
H200 = Rates(7.89e14, 4.1e12, 5.54e10, 5.53e10, 5.8e9, 5.8e9 * 28 * 1.2)


def llama(width: int, layers: int, heads: int, ffn: int, vocab: int = 32000) -> ModelConfig:
    return uniform("llama", vocab, width, layers, heads, heads, width // heads, ffn, 1 << 17, 1e-5, False,
                   rope=Rope(1e4))  # fmt: skip


SMALL = llama(1024, 6, 8, 2816, vocab=4096)
ADAPTED = replace(SMALL, lora=Lora(16, 32.0, ("q_proj", "o_proj", "up_proj", "down_proj")), frozen=("*",))
PARTLY = replace(SMALL, frozen=("*embed*", "*layers.[0-3].*"))
ONE_B, SEVEN_B = llama(2048, 24, 16, 5504), llama(4096, 32, 32, 11008)


def plan(cfg: ModelConfig, unit: UnitPlan, keep: int = 0, tokens: int = 16384, n_micro: int = 2, **more) -> Plan:
    """Every unit alike, and everything kept of the last `keep` blocks."""
    kept = replace(unit, saved=tuple((name, "gpu") for name in shapes.saved_shapes(cfg, 1)))
    units = [kept if cfg.n_layers - keep < u <= cfg.n_layers else unit for u in range(cfg.n_units)]
    return Plan(tuple(units), tokens, n_micro, **more)

"""Costs and sizes that are computed once for units that are alike are those of each unit by itself."""

from dataclasses import replace
from functools import cached_property

import engines
import pytest
from plans import ADAPTED, PARTLY, RATES, SMALL, plan

from trireme.engine import geometry
from trireme.engine.buffers import usage
from trireme.engine.geometry import Geometry
from trireme.engine.plan import Limits, UnitPlan
from trireme.engine.planner.choose import choose
from trireme.engine.planner.predict import Batch, unit_seconds
from trireme.engine.planner.rule import Wanted

MODELS = {
    name: getattr(engines, name) for name in ("LLAMA", "GPT", "MIXTURE", "HYBRID", "LORA", "PACKED", "BLOCKS", "LATENT")
}
MODELS |= {"FROZEN": engines.FROZEN, "PARTLY": PARTLY, "one of them": replace(SMALL, frozen=("*.2.self_attn.o_proj*",))}


@pytest.fixture
def each(monkeypatch):
    """Has every unit computed by itself."""

    def apart():
        for name in ("alike", "sizes"):
            found = cached_property(lambda self: tuple(range(self.n_units)))
            found.__set_name__(Geometry, name)
            monkeypatch.setattr(Geometry, name, found)
        geometry.geometry.cache_clear()

    yield apart
    geometry.geometry.cache_clear()


@pytest.mark.parametrize("name", MODELS)
def test_units_that_are_alike_cost_the_same_and_take_the_same(name, each):
    def found():
        for halves in (False, True):
            cut = replace(cfg, halves=halves)
            for unit in (UnitPlan("host", "host"), UnitPlan("gpu", "gpu")):
                p = plan(cut, unit, tokens=128, halves=halves)
                kept = tuple((name, "host") for name in Geometry.of(cfg, p).saved_names(Geometry.of(cfg, p).kinds[1]))
                p = p.changed({1, 3}, saved=kept[:2])
                yield unit_seconds(cfg, p, RATES, Batch(128, 64, 2)), usage(Geometry.of(cfg, p), p)

    cfg = MODELS[name]
    together = list(found())
    assert len(set(Geometry(cfg, "BF16").alike)) <= cfg.n_units
    each()
    assert together == list(found())


def test_frozen_matrices_of_a_layer_set_it_apart():
    assert Geometry(SMALL, "BF16").alike == (0, 1, 1, 1, 1, 1, 1, 7)
    assert Geometry(MODELS["one of them"], "BF16").alike == (0, 1, 1, 3, 1, 1, 1, 7)
    assert Geometry(PARTLY, "BF16").alike == (0, 1, 1, 1, 1, 5, 5, 7)


@pytest.mark.full
@pytest.mark.parametrize("cfg", [SMALL, ADAPTED], ids=["all", "adapters"])
def test_the_chosen_plan_is_the_same(cfg, each):
    limits, wanted = Limits(600 << 20, 1 << 30), Wanted(((1024, 2),), "BF16", on_cuda=True, document=256)
    together = choose(cfg, limits, RATES, wanted)
    each()
    assert choose(cfg, limits, RATES, wanted) == together

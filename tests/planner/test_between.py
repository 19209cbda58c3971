"""What happens between steps moves the bytes, queue by queue, that its simulation has."""

from collections import Counter, deque
from dataclasses import replace

import pytest
from engines import FROZEN, GPT, HYBRID, LLAMA, LORA, MIXTURE, batches, gpu_plan, make

from trireme.engine.between import Reader, save_to_store
from trireme.engine.build import in_ram, placed
from trireme.engine.exchange import Kept, fetch
from trireme.engine.plan import UnitPlan
from trireme.engine.planner.predict import Batch, predict_between
from trireme.engine.planner.rates import assume
from trireme.engine.step import evaluate, stream_layers
from trireme.models.rows import rope_tables

RATES = assume("gpu=rtx4090,ram=128GiB,ssd=2TB@7/5").rates
TIERS = UnitPlan(x="host"), UnitPlan("host", "host", base="host"), UnitPlan("ssd", "ssd", base="ssd", x="ssd")
MIXED = UnitPlan("host", "ssd", base="ssd"), UnitPlan("ssd", "host", x="ssd"), UnitPlan("host", "host")


def export(e, exact=True):
    reader = Reader(e.placement)
    for u, layout in enumerate(e.geo.stored):
        for t in layout.tensors:
            deque(fetch(reader, u, t.name, exact), 0)


EVENTS = {
    "evaluation": evaluate,
    "token": lambda e, _: deque(stream_layers(e), 0),
    "snapshot": lambda e, _: save_to_store(e.placement),
    "export": lambda e, _: export(e),
    "export of bf16": lambda e, _: export(e, exact=False),
    "the best": lambda e, _: Kept(e.placement, exact=True).take(),
}


@pytest.mark.parametrize("cfg", [LLAMA, replace(GPT, halves=True), MIXTURE, HYBRID, LORA, FROZEN])
def test_a_simulation_moves_what_the_engine_moves(cfg):
    """From RAM and drives: on a CPU what a GPU has is in RAM. The second time, as what is there already stays."""
    units = tuple((*TIERS, *MIXED)[u % 6] for u in range(cfg.n_units))
    plan = gpu_plan(cfg, halves=cfg.halves, units=units, dtype="BF16", record=700, between="host")
    e = make(cfg, plan, poison=False)
    tables, some = rope_tables(e.cfg, 64, "cpu"), Counter[str]()
    inputs = [placed(in_ram(e.cfg, mb), [(tables, "cpu")]) for mb in batches(cfg, 1, 2, 24)[0]]
    for name, event in EVENTS.items():
        for _ in range(2):
            e.queues.moved.clear()
            event(e, inputs)
        moved, simulated = Counter[str](), Counter[str]()
        for span in predict_between(cfg, plan, RATES, Batch(24, 24, 2), event).spans:
            simulated[span.queue] += int(span.nbytes)
        moved.update(e.queues.moved)
        for queue in ("d2h", "compute"):
            del moved[queue], simulated[queue]
        assert +simulated == +moved, name
        some += moved
    assert all(some[queue] for queue in ("h2d", "ssd_read", "state_read", "ssd_write", "state_write"))
    e.close()


def test_a_gpu_gives_what_it_has_by_way_of_ram():
    """The bytes of weights and state, each once; of an export the weights."""
    plan = gpu_plan(LLAMA, dtype="BF16", record=700)
    e = make(LLAMA, plan, poison=False)
    for event, entries in {"snapshot": None, "export of bf16": "weights"}.items():
        found = predict_between(LLAMA, plan, RATES, Batch(24, 24, 2), EVENTS[event])
        spans = [e.placement.layout(x).span for x in e.placement.entries() if entries in (None, x.kind)]
        assert sum(span.nbytes for span in found.spans if span.queue == "d2h") == sum(spans)
    e.close()

"""Several GPUs, on the CPU pretended: units dealt to them, the bits of one."""

import ctypes
import faulthandler
import mmap
import os
import signal
from dataclasses import replace
from functools import cache

import pytest
from engines import (
    LIMITS,
    MIXTURE,
    PACKED,
    LateQueues,
    batches,
    check_same,
    deep,
    final_weights,
    fork,
    gpu_plan,
    lent,
    make,
    of,
    relayed,
    small_stretches,  # noqa: F401 (every test's)
    train,
)

from trireme.engine.buffers import buffers, usage
from trireme.engine.build import Inputs, build
from trireme.engine.geometry import Geometry
from trireme.engine.memory import Memory
from trireme.engine.plan import TIERS, UnitPlan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.queues.names import ON_GPU, PEERS, gpu_of, kind_of, queues_of
from trireme.engine.queues.real import RealQueues
from trireme.engine.step import evaluate, train_step
from trireme.models.config import InputError

pytestmark = pytest.mark.grid

DEEP, STEPS = of("llama", num_hidden_layers=6), 2
DEALS = {"two": (0, 1), "three": (2, 0, 1), "runs": (0, 0, 1, 1), "one of two": (1,), "ends": (1, 0, 0, 0, 0, 0, 0, 1)}


@pytest.fixture(scope="module")
def in_one_memory():
    @cache
    def run(tied):
        e = make(replace(DEEP, tied=tied), gpu_plan(DEEP, dtype="BF16", n_micro=3))
        return train(e, batches(DEEP, STEPS, 3, 24)), final_weights(e)

    return run


def check(plan, queues, expected, tied=False):
    check_same(make(replace(DEEP, tied=tied), plan, queues), batches(DEEP, STEPS, 3, 24), *expected(tied))


@pytest.mark.parametrize(
    ("deal", "tier", "tied", "between"),
    [
        (deal, TIERS[(i + j) % 3], bool((i + j) % 2), ("ram", "gpu")[(i // 2 + j) % 2])
        for i, deal in enumerate(DEALS)
        for j in (0, 1)
    ],
)
def test_units_on_several_gpus_leave_the_bits_of_one(in_one_memory, deal, tied, tier, between):
    unit = UnitPlan(tier, tier, x=tier, saved=(("qkv", tier),))
    plan = gpu_plan(DEEP, units=(unit,) * 8, dtype="BF16", n_micro=3, record=700)
    plan = relayed(plan, DEALS[deal], tied, between)
    if between == "gpu" and plan.gpus > 1:
        plan = lent(plan, tier)
    check(plan, RealQueues("cpu", extra=("poison",), gpus=plan.gpus), in_one_memory, tied)


@pytest.mark.parametrize(
    ("late", "between"),
    [  # each kind of queue, of one GPU
        (queue, "gpu" if queue.startswith("peer") or i % 3 == 0 else "ram")
        for i, queue in enumerate({kind_of(queue): queue for queue in queues_of(2)}.values())
    ],
)
def test_any_queue_of_any_gpu_may_be_late(in_one_memory, late, between):
    units = (
        UnitPlan("ram", "ram", "gpu"),
        UnitPlan(x="ram", saved=(("qkv", "gpu"),)),
        UnitPlan("ssd", "ssd", x="ssd"),
        UnitPlan("ram", "ram"),
    ) * 2
    plan = relayed(gpu_plan(DEEP, units=units, dtype="BF16", n_micro=3, record=700), (0, 1), between=between)
    check(lent(plan, "gpu") if between == "gpu" else plan, LateQueues({late}, 2), in_one_memory)


OF_EXPERTS = {"mixture": deep(MIXTURE, 4), "packed": deep(PACKED, 4)}
BASES = (UnitPlan("ram", "ram", "gpu"), UnitPlan(x="ram", base="ssd"), UnitPlan("ssd", "ssd", base="ram"))


@pytest.fixture(scope="module", params=OF_EXPERTS)
def experts_in_one_memory(request):
    """Losses, norms and loads of steps with a loss of balance, then the weights."""
    cfg = OF_EXPERTS[request.param]
    e = make(cfg, gpu_plan(cfg, dtype="BF16", n_micro=3))
    return cfg, train(e, batches(cfg, STEPS, 3, 24)), final_weights(e)


def check_experts(expected, queues, deal):
    cfg, *expected = expected
    plan = relayed(gpu_plan(cfg, units=BASES * 2, dtype="BF16", n_micro=3, record=700), deal, cfg.tied)
    check_same(make(cfg, plan, queues(plan.gpus)), batches(cfg, STEPS, 3, 24), *expected)


@pytest.mark.full
@pytest.mark.parametrize("deal", [(0, 1), (2, 0, 1, 3)])
def test_the_load_of_experts_is_that_of_all_gpus(experts_in_one_memory, deal):
    check_experts(experts_in_one_memory, lambda gpus: RealQueues("cpu", extra=("poison",), gpus=gpus), deal)


@pytest.mark.full
@pytest.mark.parametrize("late", ["compute", "compute1", "hop_in"])
def test_the_load_of_experts_waits_for_any_queue(experts_in_one_memory, late):
    check_experts(experts_in_one_memory, lambda gpus: LateQueues({late}, gpus), (0, 1))


@pytest.mark.parametrize("tier", ["gpu", "ram"])
def test_by_peer_copies_nothing_between_layers_goes_through_ram(tier):
    """Each output for another GPU is copied once, and the copy waits for the last reader of the one before."""
    plan = relayed(gpu_plan(DEEP, units=(UnitPlan(x=tier),) * 8, dtype="BF16", n_micro=2), (0, 1), between="gpu")
    queues = SimulatedQueues(lambda task: 1.0, Rates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 2)
    e, batch = build(DEEP, plan, LIMITS, queues), [Inputs(24, 20, 300)] * 2
    train_step(e, batch, 1, 1e-3)
    crossed = sum(a.gpu != b.gpu for a, b in zip(plan.units, plan.units[1:], strict=False))
    copies = [task for task in queues.tasks if kind_of(task.queue) == "peer"]
    assert len(copies) == 2 * 2 * crossed
    assert {task.nbytes for task in copies} == {e.geo.x_bytes(24)}
    assert not [task for task in queues.tasks if kind_of(task.queue).startswith("hop")]
    through_ram = [task for task in queues.tasks if kind_of(task.queue) == "d2h" and task.kind == "activations"]
    assert len(through_ram) == (2 * (e.geo.head - 1) if tier == "ram" else 0)  # the head's is needed at once
    assert not [b for b in buffers(e.geo, plan) if (b.tier, b.role) == ("ram", "dx")]


class Guarded(RealQueues):
    """While a task of a GPU runs, the memory of the others gives no access; in a task of RAM that of all."""

    def __init__(self, gpus):
        super().__init__("cpu", gpus=gpus, threads=False)
        self.maps, self.libc = [], ctypes.CDLL(None, use_errno=True)  # (GPU, address, bytes)

    def guard(self, own):
        for gpu, address, nbytes in self.maps:
            access = mmap.PROT_READ | mmap.PROT_WRITE if own in (gpu, "all") else 0
            assert self.libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access) == 0

    def run(self, queue, kind, name, fn, after=(), nbytes=0, flops=0):
        def guarded():
            copies = kind_of(queue) in PEERS
            self.guard("all" if copies else gpu_of(queue) if kind_of(queue) in ON_GPU else None)
            try:
                return fn()
            finally:
                self.guard("all")

        return super().run(queue, kind, name, guarded, after, nbytes, flops)


def guarded_run(monkeypatch, swapped, between="ram") -> int:
    """Exit code of a child that trains with each GPU's memory guarded. `swapped`: a unit of GPU 1 has weights on
    GPU 0.
    """
    queues, alloc = Guarded(2), Memory.alloc

    def noted(memory, tier, name, nbytes, count=1, gpu=0):
        made = alloc(memory, tier, name, nbytes, count, gpu)
        if tier == "gpu" and nbytes:
            queues.maps.append((gpu, made[0].data_ptr(), sum(map(len, made))))
        return made

    monkeypatch.setattr(Memory, "alloc", noted)
    pid = fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        faulthandler.disable()  # silent where it is to be caught
        units = (
            UnitPlan("ram", "ram", "gpu", x="ram"),
            UnitPlan(x="ram", saved=(("qkv", "gpu"),)),
            UnitPlan("ssd", "ssd"),
            UnitPlan("ram", "ram"),
        )
        plan = relayed(gpu_plan(DEEP, units=units * 2, dtype="BF16", record=700), (0, 1), between=between)
        e = make(DEEP, lent(plan, "gpu") if between == "gpu" else plan, queues, poison=False)
        if swapped:
            e.weights.layers[1].trained.buffer.tensor = e.weights.layers[4].trained.pool.buffers[0].tensor
        train(e, batches(DEEP, 2, plan.n_micro, 24), between=lambda i, micro: evaluate(e, micro))
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.full
@pytest.mark.parametrize("between", ["ram", "gpu"])
def test_no_task_touches_another_gpus_memory(monkeypatch, between):
    assert guarded_run(monkeypatch, False, between) == 0


def test_the_guard_finds_a_unit_on_a_wrong_gpu(monkeypatch):
    assert guarded_run(monkeypatch, swapped=True) == -signal.SIGSEGV


def test_what_the_engine_cannot_deal_is_refused():
    plan = relayed(gpu_plan(DEEP), (0, 1))
    with pytest.raises(InputError, match="share a matrix"):
        make(
            replace(DEEP, tied=True),
            replace(plan, units=(replace(plan.units[0], gpu=1), *plan.units[1:-1], replace(plan.units[-1], gpu=0))),
        )


def test_each_gpu_has_the_memory_of_its_units_and_the_fullest_counts():
    kept = UnitPlan(x="ram", saved=(("qkv", "gpu"),))
    plan = gpu_plan(DEEP, units=(kept,) * 8, between="ram", dtype="BF16")
    two, one = relayed(plan, (0, 1)), usage(Geometry.of(DEEP, plan), plan)
    e = make(DEEP, two, RealQueues(gpus=2, threads=False))
    each = [e.memory.used_bytes("gpu", gpu) for gpu in range(2)]
    assert usage(e.geo, two)["gpu"] == max(each) == e.memory.used_bytes("gpu")
    assert max(each) < one["gpu"] < sum(each)  # rings and workspace are on both
    e.close()

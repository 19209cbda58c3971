"""Several hosts, here threads: micro-batches dealt among them, state shared out, the bits of one."""

import queue
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import cache
from random import Random

import engines
import pytest
from engines import (
    LLAMA,
    JitterQueues,
    batches,
    gpu_plan,
    make,
    random_plan,
    small_stretches,  # noqa: F401
    train,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trireme.engine.between import Reader
from trireme.engine.build import collate, host_share
from trireme.engine.exchange import fetch
from trireme.engine.hosts.gather import masters
from trireme.engine.plan import UnitPlan
from trireme.engine.updates import AdamW

pytestmark = pytest.mark.grid

MODELS = {name: engines.MODELS[name] for name in
          ("untied", "tied", "gpt", "lora", "frozen", "fp8", "fp8 lora", "mixture", "packed")}  # fmt: skip
MODELS["frozen but the ends"] = replace(LLAMA, tied=True, frozen=("*layers*", "*norm*"))
PATIENCE = 60.0


class ThreadWire:
    """A wire between threads. A call returns when others have what it sent, as it may on a real one."""

    def __init__(self, host, hosts, mail):
        self.host, self.hosts, self.mail = host, hosts, mail

    def send(self, queue, host, what):
        self.wait(self.put(queue, host, what))

    def put(self, queue, host, what):
        taken = threading.Event()
        self.mail[queue.removesuffix("_in").removesuffix("_out"), self.host, host].put((what, taken))
        return taken

    def wait(self, *sent):
        if not all(taken.wait(PATIENCE) for taken in sent):
            raise queue.Full

    def receive(self, queue, host, what):
        box = self.mail[queue.removesuffix("_in").removesuffix("_out"), host, self.host]
        came, taken = box.get(timeout=PATIENCE)
        assert came.shape == what.shape
        what.copy_(came)
        taken.set()

    def scatter(self, queue, root, parts):
        if self.host == root:
            self.wait(*[self.put(queue, host, parts[host]) for host in range(self.hosts) if host != root])
        else:
            self.receive(queue, root, parts[self.host])

    def all_gather(self, queue, parts):
        others = [host for host in range(self.hosts) if host != self.host]
        sent = [self.put(queue, host, parts[self.host]) for host in others]
        for host in others:
            self.receive(queue, host, parts[host])
        self.wait(*sent)


def on_hosts(cfg, plan, hosts, queues, steps, clip=1.0):
    """(losses and norms, engine, contents, where exports are made the masters) of each host, run side by side."""
    ways = [
        (kind, a, b) for kind in ("net", "control", "sum", "statistics") for a in range(hosts) for b in range(hosts)
    ]
    mail, found = {way: queue.Queue() for way in ways}, [None] * hosts
    steps = [[collate(cfg, mb) for mb in step] for step in steps]

    def run(host):
        own = replace(plan, hosts=hosts, host=host, n_micro=-(-plan.n_micro // hosts))
        wire = ThreadWire(host, hosts, mail)
        with closing(queues(host)) as made:
            try:
                e = make(cfg, own, made, AdamW(max_grad_norm=clip), wire=wire)
                told = train(e, [host_share(step, host, hosts) for step in steps], of=steps)
                with masters(Reader(e.placement), wire) as reader:
                    found[host] = told, e, contents(e), reader and exported(reader)
            except BaseException as error:
                found[host] = error

    threads = [threading.Thread(target=run, args=(host,)) for host in range(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, (queue.Empty, queue.Full))):
        raise error  # that of others: they waited for it
    return found


def exported(reader):
    """The fp32 master of each trained tensor, as it would be written."""
    layouts = enumerate(reader.placement.geo.stored)
    return {t.name: b"".join(piece.tobytes() for piece in fetch(reader, u, t.name, exact=True))
            for u, layout in layouts for t in layout.tensors}  # fmt: skip


@cache
def alone(model, dtype, n_micro, clip, adam_bits, halves, record):
    """(losses and norms, the bytes of every weight and record by name, the masters) of one host, in one memory."""
    cfg = MODELS[model]
    plan = gpu_plan(cfg, dtype=dtype, n_micro=n_micro, adam_bits=adam_bits, halves=halves, record=record)
    e = make(cfg, plan, adamw=AdamW(max_grad_norm=clip))
    return train(e, batches(cfg, 3, n_micro, 24)), contents(e), exported(Reader(e.placement))


def contents(e):
    """The bytes of each shard of a host's snapshot by name."""
    reader, found = Reader(e.placement), {}
    for shard in e.placement.shards():
        held = reader.read(shard.entry)[shard.first :]
        for t in shard.layout.tensors:
            found[shard.name, t.name] = bytes(held[t.offset : t.offset + t.nbytes].numpy())
    return found


def check(model, plan, hosts, queues, clip=1.0):
    """Every host has the losses and weights of one alone, and of its state a share; together all of it.

    The first exports its masters.
    """
    cfg = MODELS[model]
    seen, all_of_it, masters = alone(model, plan.dtype, plan.n_micro, clip, plan.adam_bits, plan.halves, plan.record)
    states = Counter()
    for told, e, held, written in on_hosts(cfg, plan, hosts, queues, batches(cfg, 3, plan.n_micro, 24), clip):
        assert told == seen
        assert written == (None if e.plan.host else masters)
        for name, value in held.items():
            assert value == all_of_it[name], name
        assert {name for name in all_of_it if name[0].startswith("weights")} <= held.keys()
        states.update(name for name in held if not name[0].startswith("weights"))
        assert e.memory.owned() == len(e.optimizer.on_cpu.ahead)
        e.close()
    assert set(states.values()) <= {1}
    assert states.keys() == {name for name in all_of_it if not name[0].startswith("weights")}


def real(host):
    return JitterQueues(host, 0.0, hosts=2)


@pytest.mark.parametrize(
    ("n_micro", "model", "hosts", "dtype"),
    [
        (1, "untied", 2, "F32"),
        (1, "untied", 4, "BF16"),
        (4, "untied", 3, "F32"),
        (4, "tied", 2, "BF16"),
        (4, "tied", 4, "F32"),
        (3, "mixture", 2, "BF16"),
        (3, "mixture", 3, "F32"),
    ],
)
def test_hosts_leave_the_bits_of_one(hosts, dtype, n_micro, model):
    """Where there are fewer micro-batches than hosts too."""
    units = (UnitPlan("ram", "ram"), UnitPlan("ssd", "ssd"), UnitPlan("ram", "ssd"), *(UnitPlan("ssd", "ram"),) * 2)
    check(model, gpu_plan(LLAMA, units=units, n_micro=n_micro, record=700, dtype=dtype, piece=1000), hosts, real)


def model_and_plan(seed):
    """(a model's name, a plan for it on several hosts)"""
    dice = Random(seed)
    model = dice.choice(tuple(MODELS))
    plan = random_plan(
        MODELS[model], dice, gpus=2, mode="forward", gradients="ram", slices=1, n_micro=dice.randint(2, 6)
    )
    near = {"gpu": "ram"}  # the CPU updates all
    unit = lambda u: replace(u, weights=near.get(u.weights, u.weights), state=near.get(u.state, u.state), update="cpu")
    return model, replace(plan, units=tuple(map(unit, plan.units)))


SEEDS = st.integers(0, 1 << 32).map(model_and_plan)
SLOW = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.full
@settings(max_examples=4, **SLOW)
@given(SEEDS, st.integers(2, 4), st.integers(0, 99), st.sampled_from((0.0, 1e-2, 1.0)))
def test_any_plan_with_any_delays(drawn, hosts, seed, clip):
    model, plan = drawn
    queues = lambda host: JitterQueues(seed + host, 0.001, plan.gpus, hosts)
    check(model, plan, hosts, queues, clip)

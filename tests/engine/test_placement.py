"""Traffic between placement and the store: an error comes when nothing of the buffer is in flight any more."""

import errno
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest
from engines import LIMITS, LLAMA, gpu_plan

from trireme.engine.between import READ_AHEAD, load_from_store
from trireme.engine.build import build
from trireme.engine.placement import Entry
from trireme.engine.plan import UnitPlan
from trireme.engine.queues.real import RealQueues
from trireme.storage.aio import address_of
from trireme.storage.files import StoreError

pytestmark = pytest.mark.grid


class SickStore:
    """Requests that end a little later, fail, or cannot be begun, one after another as `how` says."""

    def __init__(self, *how: str):
        self.how, self.slow = list(how), []

    def read(self, name: str, buffer: memoryview, later: bool = False) -> Future:
        future, how, sick = Future(), self.how.pop(0), StoreError(errno.EIO, "Input/output error", name)
        if how == "slow":
            self.slow.append(future)
            threading.Timer(0.1, future.set_result, [None]).start()
        elif how == "fails":
            future.set_exception(sick)
        else:
            raise sick
        return future

    verify = write = read


@pytest.mark.parametrize("how", [("fails", "slow"), ("slow", "fails"), ("slow", "refused")])
@pytest.mark.parametrize("way", ["read", "write"])
def test_after_an_error_nothing_of_the_buffer_is_in_flight(way, how):
    """The parts of a record, moments and low halves, travel as two shards."""
    plan = gpu_plan(LLAMA, units=(UnitPlan("ram", "ram"),) * 5, dtype="BF16")
    store = SickStore(*how)
    placement = build(LLAMA, plan, LIMITS, RealQueues(threads=False), store=store).placement
    with pytest.raises(StoreError, match="Input/output error"):
        placement.move(way, placement.shards_of(Entry("state", 1)), placement.state[1][0])
    assert all(future.done() for future in store.slow)


class SlowStore(SickStore):
    """Every request ends a little later, and none of those under way is for the memory of another."""

    def __init__(self):
        super().__init__()
        self.places: list[tuple[int, Future]] = []

    def verify(self, name: str, buffer: memoryview, later: bool = False) -> Future:
        self.how.append("slow")
        place = address_of(buffer)
        assert all(future.done() for at, future in self.places if at == place)
        self.places.append((place, self.read(name, buffer)))
        return self.places[-1][1]


@pytest.mark.parametrize("last", [1, 3, 7])
def test_who_leaves_while_all_is_read_leaves_nothing_in_flight(last):
    """Of weights and states on the SSD and in RAM several are under way at once."""
    placement = [UnitPlan("ssd", "ssd"), UnitPlan("ram", "ssd"), UnitPlan("ram", "ram")]
    plan = gpu_plan(LLAMA, units=tuple(placement[u % 3] for u in range(5)), dtype="BF16", record=512, state_slots=2)
    store, told = SlowStore(), []
    placement = build(LLAMA, plan, LIMITS, RealQueues(threads=False), store=store).placement

    def progress(nbytes: int) -> None:
        told.append(nbytes)
        if len(told) == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_from_store(placement, progress)
    assert len(told) == last
    assert all(future.done() for future in store.slow)
    assert len(store.slow) <= 2 * (last + READ_AHEAD)
    told.clear()
    load_from_store(placement, told.append)
    assert sum(told) == placement.nbytes()
    assert all(future.done() for future in store.slow)


def test_an_engine_ends_what_is_in_flight_before_its_files():
    queues, order = RealQueues(), []
    e = build(LLAMA, gpu_plan(LLAMA, units=(UnitPlan(),) * 5, dtype="BF16"), LIMITS, queues)
    e.placement.scratch.close = lambda: order.append("files")
    queues.run("ssd_read", "weights", "slow", lambda: (time.sleep(0.2), order.append("read")))
    e.close()
    assert order == ["read", "files"]
    assert not any(thread.is_alive() for thread in queues.threads)


@pytest.mark.full
def test_what_the_store_still_has_stays_in_memory():
    """A request may outlive its engine where a run ends by an error: it must not move bytes of somebody else's."""
    program = """
import gc, torch
from trireme.engine.memory import Memory, memory_of
from trireme.engine.plan import Limits
memory = Memory([torch.device("cpu")], Limits(1 << 30, 1 << 30))
view = memory_of(memory.alloc("ram", "buffer", 8 << 20)[0], 4096)
memory.close()
gc.collect()
view[:] = bytes(4096)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 0

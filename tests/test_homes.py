"""Traffic between homes and the store: an error comes when nothing of the buffer is in flight any more."""

import errno
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest
from engines import LIMITS, LLAMA, gpu_plan

from trireme.engine.build import build
from trireme.engine.lanes import InlineLanes
from trireme.engine.plan import UnitPlan
from trireme.storage.files import StoreError


class SickStore:
    """Requests that end a little later, fail, or cannot be begun, one after another as `how` says."""

    def __init__(self, *how: str):
        self.how, self.slow = list(how), []

    def read(self, name: str, buffer: memoryview) -> Future:
        future, how, sick = Future(), self.how.pop(0), StoreError(errno.EIO, "Input/output error", name)
        if how == "slow":
            self.slow.append(future)
            threading.Timer(0.1, future.set_result, [None]).start()
        elif how == "fails":
            future.set_exception(sick)
        else:
            raise sick
        return future

    write = read


@pytest.mark.parametrize("how", [("fails", "slow"), ("slow", "fails"), ("slow", "refused")])
@pytest.mark.parametrize("way", ["read", "write"])
def test_after_an_error_nothing_of_the_buffer_is_in_flight(way, how):
    """The parts of a record, moments and low halves, travel as two shards."""
    plan = gpu_plan(LLAMA, units=(UnitPlan("host", "host"),) * 5, dtype="BF16")
    store = SickStore(*how)
    homes = build(LLAMA, plan, LIMITS, InlineLanes(), store=store).homes
    with pytest.raises(StoreError, match="Input/output error"):
        homes.move(way, homes.shards_of("state", 1), homes.state[1][0])
    assert all(future.done() for future in store.slow)


def test_what_the_store_still_has_stays_in_memory():
    """A request may outlive its engine where a run ends by an error: it must not move bytes of somebody else's."""
    program = """
import gc, torch
from trireme.engine.memory import Memory, memory_of
memory = Memory(torch.device("cpu"), 1 << 30, 1 << 30)
view = memory_of(memory.alloc("host", "buffer", 8 << 20)[0], 4096)
memory.close()
gc.collect()
view[:] = bytes(4096)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

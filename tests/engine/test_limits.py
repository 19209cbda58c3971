"""The limits hold: what a run adds to the process stays below what it was given, with most of the model on the SSD."""

import json
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import stories
import torch
from engines import LLAMA, batches, fork, of

from trireme.engine import memory
from trireme.engine.build import build, inputs_on
from trireme.engine.exchange import fill
from trireme.engine.plan import DoesNotFit, Limits
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.queues.real import RealQueues
from trireme.engine.run import state as run_engine
from trireme.engine.run.loop import train as finetune
from trireme.engine.run.options import Options
from trireme.engine.step import train_step
from trireme.models.config import ModelConfig
from trireme.models.rows import rope_tables
from trireme.models.sizes import shapes
from trireme.storage.devices import open_device
from trireme.storage.store import Store

MIB = 1 << 20
BIG = of(
    "llama", hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
    intermediate_size=1376, vocab_size=4096,
)  # fmt: skip
LIMITS = Limits(112 * MIB, 176 * MIB)
SLACK = 48 * MIB  # stacks of the queues' threads, allocator arenas, code touched for the first time: 27 to 35 were seen


def resident(kind: str) -> int:
    """Bytes of this process's resident memory: VmRSS now, VmHWM at its highest."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def random_pieces(name: str, first: int, last: int) -> Iterator[np.ndarray]:
    """Random weights as a checkpoint gives them: a piece at a time."""
    dice = np.random.default_rng(first)
    return (dice.standard_normal(min(1 << 18, last - a), np.float32) * 0.1 for a in range(first, last, 1 << 18))


def a_few_steps(folder: Path) -> dict:
    """Trains and returns the memory that it took: before, and at the highest."""
    a_run(LLAMA, Limits(8 * MIB, 8 * MIB), folder / "small")  # libraries load their code at first use
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
    before = resident("VmRSS")
    return {"before": before, "placement": a_run(BIG, LIMITS, folder / "big"), "highest": resident("VmHWM")}


def a_run(cfg: ModelConfig, limits: Limits, folder: Path) -> list[str]:
    """Trains a few steps within the limits, with a store; returns the placement of states."""
    plan = simple_plan(cfg, limits, Wanted(((64, 2),), "F32", record=1 << 18, on_cuda=False))
    with Store.create([open_device(folder)]) as store:
        e = build(cfg, plan, limits, RealQueues(), store=store)
        for shard in e.placement.shards():
            store.add(shard.name, shard.layout)
        fill(e.placement, random_pieces)
        tables = rope_tables(cfg, 64, "cpu")
        for i, step in enumerate(batches(cfg, 3, 2, 64), 1):
            train_step(e, [inputs_on(cfg, mb, [(tables, e.queues.device)]) for mb in step], i, 1e-3)
        e.optimizer.flush()
        e.queues.close()
    return sorted({unit.state for unit in plan.units})


@pytest.mark.full
def test_resident_memory_stays_within_the_limits(tmp_path):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("/proc/self/clear_refs cannot be written here")
    answer = tmp_path / "answer.json"
    pid = fork()  # a process of its own: what other tests left in the allocator does not count
    if pid == 0:
        code = 1
        try:
            answer.write_text(json.dumps(a_few_steps(tmp_path / "store")))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    took = json.loads(answer.read_text())
    assert "ssd" in took["placement"]
    assert shapes.parameters(BIG) * 16 > LIMITS.both  # it would not fit without the SSD
    assert took["highest"] - took["before"] <= LIMITS.both + SLACK


def test_what_cannot_fit_is_refused_with_numbers_and_a_way_out():
    with pytest.raises(DoesNotFit, match=r"needs .* of RAM, the limit is .*--ram"):
        simple_plan(BIG, Limits(1 << 30, 16 * MIB), Wanted(((64, 2),), "F32"))
    with pytest.raises(DoesNotFit, match=r"needs .* of GPU memory, the limit is .*--gpu-memory"):
        simple_plan(BIG, Limits(8 * MIB, 1 << 30), Wanted(((64, 2),), "F32"))


def test_ram_that_cuda_does_not_pin_is_counted(monkeypatch):
    asked, forgotten = [], []
    monkeypatch.setattr(memory, "_register", lambda address, nbytes, device: asked.append(nbytes) or len(asked) < 2)
    monkeypatch.setattr(memory, "_unregister", forgotten.append)
    held = memory.Memory([torch.device("cuda")], Limits(MIB, 64 * MIB))
    for k in (1, 2, 4):
        held.alloc("host", f"buffer {k}", k * MIB)
    assert asked == [MIB, 2 * MIB]
    assert held.refused == 6 * MIB
    held.close()
    assert len(forgotten) == 1
    plain = memory.Memory([torch.device("cuda")], Limits(MIB, 64 * MIB), pinned=False)
    plain.alloc("host", "buffer", MIB)
    assert len(asked) == 2
    assert plain.refused == 0


def test_a_run_says_what_is_not_pinned(tmp_path, monkeypatch, capsys):
    noted = list[int]()

    def build(*given, **more):
        e = real(*given, **more)
        e.memory.refused = e.memory.used("host") // 2
        return e

    stories.make_text(tmp_path / "stories.txt", 40, seed=1)
    stories.make_checkpoint(tmp_path / "model", tmp_path / "stories.txt", seed=1)
    real = run_engine.build
    monkeypatch.setattr(run_engine, "build", build)
    monkeypatch.setattr(run_engine, "note_pinned", lambda _, nbytes: noted.append(nbytes))
    where = dict(model=str(tmp_path / "model"), data=(str(tmp_path / "stories.txt"),), out=str(tmp_path / "out"))
    limits = dict(gpu_memory=16 * MIB, ram=64 * MIB, device="cpu", seq_len=64, batch_size=4, max_steps=1)
    finetune(Options(**where, **limits))
    assert re.search(
        r"warning: CUDA pins [\d.]+ MiB of RAM, the plan uses [\d.]+ MiB: .* The next run plans with [\d.]+ MiB",
        capsys.readouterr().out,
    )
    assert len(noted) == 1

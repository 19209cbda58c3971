"""A limit of RAM holds for the process, libraries and all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from trireme.engine.plan import DoesNotFit
from trireme.engine.planner import host
from trireme.engine.planner.rates import RAM_SHARE
from trireme.engine.run.after import demo
from trireme.models.config import read_config
from trireme.models.sizes import shapes

CPU = torch.device("cpu")
ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
LIMIT = 1 << 30
WIDE = {"vocab_size": 64_000, "hidden_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": False}
RUN = """
import sys
from pathlib import Path
from trireme.engine.run.cli import main
code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text()
print("peak", next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
sys.exit(code)
"""


def make_wide(folder: Path) -> None:
    """Much memory for little computation."""
    (folder / "text.jsonl").write_text('{"text": "Once there was a fox. It ran far away and came back."}\n' * 9)
    demo.make_checkpoint(folder / "model", seed=1)
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | WIDE))
    cfg = read_config(folder / "model")
    named = [item for u in range(cfg.n_units) for group in shapes.weight_groups(cfg, u) for item in group]
    weights = {name: np.full(shape, 0.02 if len(shape) > 1 else 1.0, np.float32) for name, shape in named}
    save_file(weights, folder / "model" / "model.safetensors")


@pytest.mark.full
def test_no_byte_more_than_the_limit(tmp_path):
    """The plan alone would fit into the limit, and not beside Python."""
    make_wide(tmp_path)
    words = ["model", "--data", "text.jsonl", "--ram", "1GiB", "--device", "cpu", "--out", "out"]
    words += ["--seq-len", "64", "--batch-size", "4", "--max-steps", "2", "--verbose"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"^peak (\d+)", done.stdout, re.M)[1]) << 10 <= LIMIT
    assert re.search(r"stored: .* SSD;", done.stdout), "the limit binds"


def test_a_given_limit_is_the_processs_and_a_found_one_is_beside_it(monkeypatch):
    monkeypatch.setattr(host, "resident", lambda: 300 << 20)
    monkeypatch.setattr(host, "available_ram", lambda: 10 << 30)
    assert host.memory_limits(CPU, None, LIMIT).total == LIMIT - (300 << 20) - host.TEMPORARIES
    assert host.memory_limits(CPU, None, None).total == int(RAM_SHARE * (10 << 30)) - host.TEMPORARIES
    assert host.memory_limits(CPU, 5, 7) == host.Limits(5, 7), "tiers themselves"
    with pytest.raises(DoesNotFit, match=r"556.00 MiB of RAM"):
        host.memory_limits(CPU, None, 400 << 20)


def test_what_is_resident_is_rounded():
    assert host.resident() % (64 << 20) == 0
    assert host.resident() > 64 << 20

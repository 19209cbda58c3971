"""The dispatch: launchers and reference have one signature, and CPU tensors never need Triton."""

import inspect
import subprocess
import sys

import pytest
import torch

from trireme.kernels import ops
from trireme.kernels.attention.docs import TILES, make_docs

LAUNCHED = [name for name in dir(ops) if hasattr(getattr(ops, name), "launcher")]


@pytest.mark.parametrize("name", LAUNCHED)
def test_launcher_and_reference_have_one_signature(name):
    op = getattr(ops, name)
    ours, theirs = (inspect.signature(f).parameters.values() for f in (op.launcher(), op.__wrapped__))
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]


@pytest.mark.full
def test_the_cpu_path_does_not_import_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from trireme.kernels import ops\n"
        "ops.act_fwd(torch.randn(2, 8), ops.Act()); ops.make_docs([3], 'cpu')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_docs_list_every_row_once_heaviest_tile_first():
    lengths = [200, 1, 64, 65]
    docs = make_docs(lengths, "cpu")
    starts = [0, 200, 201, 265]
    assert docs.cu_seqlens.tolist() == [*starts, 330]
    assert torch.equal(docs.positions, torch.cat([torch.arange(n) for n in lengths]).int())
    for block in TILES:
        for tiles in (docs.query_tiles[block], docs.key_tiles[block]):
            assert tiles.data_ptr() % 16 == 0
            rows = [s + r for s, o, n in tiles.tolist() for r in range(o, min(o + block, n))]
            assert sorted(rows) == list(range(330))
            assert (tiles[:, 1] < tiles[:, 2]).all()  # none is empty
            assert all((s, n) in zip(starts, lengths, strict=True) for s, _, n in tiles.tolist())
        offsets = docs.query_tiles[block][:, 1]
        assert torch.equal(offsets, offsets.sort(descending=True).values)
        below = docs.key_tiles[block][:, 2] - docs.key_tiles[block][:, 1]
        assert torch.equal(below, below.sort(descending=True).values)

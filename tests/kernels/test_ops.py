"""The dispatch: launchers and reference have one signature, and CPU tensors never need Triton."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from trireme.kernels import ops, reference
from trireme.kernels.attention.docs import TILES, make_docs

MODULES = {
    "rmsnorm": ["rmsnorm_fwd", "rmsnorm_bwd", "head_rmsnorm_fwd", "head_rmsnorm_bwd"],
    "layernorm": ["layernorm_fwd", "layernorm_bwd"],
    "rope": ["rope_"],
    "swiglu": ["swiglu_fwd", "swiglu_bwd", "geglu_fwd", "geglu_bwd"],
    "gelu": ["gelu_bias_fwd", "gelu_bias_bwd", "bias_bwd_"],
    "attention": ["attention_fwd", "attention_bwd"],
    "embedding": ["embedding_fwd", "embedding_bwd_"],
    "cross_entropy": ["linear_cross_entropy"],
    "adamw": ["adamw_", "grad_finish", "sum_squares"],
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in MODULES.items() for n in names])
def test_launcher_and_reference_have_one_signature(module, name):
    launcher = getattr(import_module(f"trireme.kernels.{module}"), name)
    ours, plain = (inspect.signature(f).parameters.values() for f in (launcher, getattr(reference, name)))
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in plain]
    assert hasattr(ops, name)


def test_the_cpu_path_does_not_import_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from trireme.kernels import ops\n"
        "ops.swiglu_fwd(torch.randn(2, 8)); ops.make_docs([3], 'cpu')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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

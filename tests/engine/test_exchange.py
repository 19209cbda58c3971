"""From a checkpoint into the engine and back: exact in every dtype and tier, tied weights checked, the old one safe."""

from dataclasses import replace

import engines
import numpy as np
import pytest
import torch
import transformers
from engines import LLAMA, of, with_experts
from safetensors.numpy import load_file, save_file
from tiny import CASES, oracle, relative

from trireme.engine.between import Reader, writing
from trireme.engine.exchange import PIECE, Exchange
from trireme.engine.memory import views
from trireme.engine.placement import Entry
from trireme.kernels.fp8.reference import quantize
from trireme.kernels.optimizer.reference import split_master
from trireme.models import hf
from trireme.models.config import InputError, read_config
from trireme.models.sizes import narrow, shapes
from trireme.storage.checkpoint import NUMPY, convert, dtype_of, open_source
from trireme.storage.layout import ITEMSIZE

pytestmark = [pytest.mark.grid, pytest.mark.turns]

TIED = replace(LLAMA, tied=True)
CASE = "qwen3 moe"


def checkpoint(folder, cfg, dtype="F32", seed=0, **extra):
    """A safetensors file of random weights; bf16 is written through its bits."""
    dice = np.random.default_rng(seed)
    tensors = {
        name: dice.normal(size=shape).astype(np.float32)
        for u in range(cfg.n_units)
        for group in shapes.weight_groups(cfg, u)
        for name, shape in group
    } | extra
    folder.mkdir()
    if dtype == "BF16":
        import torch
        from safetensors.torch import save_file as save_torch

        save_torch({n: torch.from_numpy(v).bfloat16() for n, v in tensors.items()}, folder / "model.safetensors")
    else:
        save_file({n: v.astype(NUMPY[dtype]) for n, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return open_source(folder)


def exchange(cfg, source, tier="gpu", dtype="BF16"):
    return engines.exchange(cfg, source, tier, dtype)[1]


@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("compute", ["F32", "BF16"])
def test_in_and_out_again_is_the_same_bytes(tmp_path, tier, stored, compute):
    source = checkpoint(tmp_path / "in", LLAMA, stored)
    x = exchange(LLAMA, source, tier, compute)
    x.load()
    x.save(tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "in/model.safetensors").read_bytes()


def test_masters_on_the_ssd_are_written_with_each_layer_read_once(tmp_path):
    x = exchange(LLAMA, checkpoint(tmp_path / "in", LLAMA), "ssd")
    x.load()
    moved, weights = x.placement.queues.moved, [layout.span for layout in x.placement.geo.weights]
    moved.clear()
    x.save(tmp_path / "out")
    assert moved["ssd_read"] == sum(weights) + weights[-1]  # the head's matrix is first in the file, its norm last


@pytest.mark.parametrize("compute", ["F32", "BF16"])
def test_what_f16_cannot_hold_is_limited_and_counted(tmp_path, compute):
    large = np.ones((LLAMA.vocab, LLAMA.width), np.float32)
    large[2, :3] = 7e4, -1e30, 65504
    name = "lm_head.weight"
    trained = exchange(LLAMA, checkpoint(tmp_path / "in", LLAMA, **{name: large}), dtype=compute)
    trained.load()
    x = Exchange(LLAMA, checkpoint(tmp_path / "f16", LLAMA, "F16"), trained.placement)
    for _ in range(2):
        x.save(tmp_path / "out")
        assert x.clipped == {name: 2}
    written = open_source(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")[name][2, :3].tolist() == [65504, -65504, 65504]
    exchange(LLAMA, written).load()


@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
def test_moments_are_zero_however_often_homes_are_filled(tmp_path, tier):
    """The first time, placement in RAM are zero already; a later time they are not."""
    x = exchange(LLAMA, checkpoint(tmp_path / "in", LLAMA), tier)
    x.load()
    states = [Reader(x.placement).read(entry).clone() for entry in x.placement.entries() if entry.kind == "state"]
    for u in range(x.placement.geo.n_units):
        for r in range(len(x.placement.state[u])):
            with writing(x.placement, Entry("state", u, r)) as buffer:
                buffer.fill_(7)
    x.load()
    entries = [entry for entry in x.placement.entries() if entry.kind == "state"]
    assert states
    for entry, first in zip(entries, states, strict=True):
        found, m = Reader(x.placement).read(entry), x.placement.layout(entry)["m"]
        assert torch.equal(first, found), entry
        assert not found[m.offset : m.offset + m.nbytes].any(), entry


def test_a_tied_matrix_stored_twice_must_be_the_same(tmp_path):
    embedding = np.ones((LLAMA.vocab, LLAMA.width), np.float32)
    same = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    exchange(TIED, checkpoint(tmp_path / "same", TIED, **same)).load()
    differ = same | {"lm_head.weight": embedding * 2}
    with pytest.raises(InputError, match="config.json"):
        exchange(TIED, checkpoint(tmp_path / "differ", TIED, **differ)).load()


CODES = replace(of("llama", intermediate_size=32), fp8=True, frozen=("*",))


@pytest.mark.parametrize(("cfg", "name", "value"), [
    (LLAMA, "lm_head.weight", np.nan), (CODES, "model.layers.1.mlp.up_proj.weight", np.inf),
])  # fmt: skip
def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path, cfg, name, value):
    bad = np.ones(shapes.stored_tensors(cfg)[name], np.float32)
    bad[3, 4] = value
    source = checkpoint(tmp_path / "in", cfg, **{name: bad})
    with pytest.raises(InputError, match=f"in/model.safetensors: {name}"):
        exchange(cfg, source).load()


@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
@pytest.mark.parametrize(("stored", "compute"), [("F32", "BF16"), ("BF16", "BF16"), ("F16", "F32")])
def test_frozen_matrices_are_loaded_as_codes(tmp_path, tier, stored, compute):
    """Of what bf16 keeps of them, a matmul's as one matrix, read in pieces: half the bytes, and a scale."""
    cfg = replace(of("llama", num_hidden_layers=1, intermediate_size=1 << 15), fp8=True, frozen=("*",))
    assert cfg.width << 15 > PIECE
    source = checkpoint(tmp_path / "in", cfg, stored)
    x = exchange(cfg, source, tier, compute)
    x.load()
    geo, rounded = x.placement.geo, (lambda w: split_master(w)[0]) if compute == "BF16" else lambda w: w
    for u in range(1, geo.head):
        found = views(geo.base[u], Reader(x.placement).read(Entry("base", u)))
        assert len(narrow.fp8_groups(cfg, u)) == 4
        for group in narrow.fp8_groups(cfg, u):
            name, parts = group[0][0], [np.concatenate([*map(np.copy, source.values(name))]) for name, _ in group]
            whole = torch.cat([torch.from_numpy(convert(part, dtype_of(part), "F32")) for part in parts])
            expected = quantize(rounded(whole).view(narrow.fused(group)))
            assert torch.equal(found[name + narrow.ROWS].view(torch.uint8), expected.rows.view(torch.uint8))
            assert (found[name + narrow.SCALE] == expected.scale).all()
            assert not found.keys() & {name for name, _ in group}
        matrices = sum(t.numel for t in geo.base[u].tensors if len(t.shape) == 2)
        assert geo.base[u].nbytes == matrices + 4 * 16 + 2 * cfg.width * ITEMSIZE[compute]


def test_a_master_is_split_as_the_kernels_split_it(tmp_path):
    tie = np.array([0x3F808000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x00008000, 0x80000001], np.uint32).view(np.float32)
    values = np.ones((LLAMA.vocab, LLAMA.width), np.float32)
    values.reshape(-1)[: len(tie)] = tie
    x = exchange(LLAMA, checkpoint(tmp_path / "in", LLAMA, **{"lm_head.weight": values}), "ram")
    x.load()
    head, layout = LLAMA.n_units - 1, x.placement.geo.weights[-1]["lm_head.weight"]
    hi, lo = split_master(torch.from_numpy(values).flatten())
    bits = x.placement.weights[head][layout.offset : layout.offset + layout.nbytes].view(torch.bfloat16)
    assert torch.equal(bits.view(torch.int16), hi.view(torch.int16))
    records = [
        views(x.placement.layout(Entry("state", head, r)), b)["lo"] for r, b in enumerate(x.placement.state[head])
    ]
    assert torch.equal(torch.cat(records)[: layout.numel], lo)


# ---------------------------------------------------------------- a mixture of experts


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A checkpoint as transformers writes it."""
    path = tmp_path_factory.mktemp("mixture")
    oracle(*CASES[CASE])[0].save_pretrained(path)
    return path


@pytest.mark.full
@pytest.mark.parametrize(("tier", "dtype"), [("gpu", "F32"), ("ssd", "BF16")])
def test_a_mixture_comes_out_as_transformers_wrote_it(mixture, tmp_path, tier, dtype):
    x = exchange(read_config(mixture), open_source(mixture), tier, dtype)
    x.load()
    x.save(tmp_path / "out")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (mixture / name).read_bytes()
    reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(20)[None]
    assert relative(reopened(ids).logits, oracle(*CASES[CASE])[0](ids).logits) < 1e-5


@pytest.mark.full
def test_files_name_each_expert_and_the_engine_all(mixture):
    x = exchange(read_config(mixture), open_source(mixture))
    shard = next(s for s in x.placement.shards() if s.entry.kind == "weights" and s.entry.u == 1)
    stored = {t.name: t for t in shard.layout.tensors}
    fused = x.placement.geo.weights[1]["model.layers.0.mlp.experts.gate_up_proj"]
    up = stored["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert fused.shape == (6, 48, 40)
    assert up.shape == (24, 40)
    assert up.offset == fused.offset + 3 * up.nbytes  # behind both of expert 0, and this one's gate
    assert stored.keys() == {name for name in open_source(mixture).tensors if ".layers.0." in name}


@pytest.mark.full
def test_a_missing_expert_is_named(mixture):
    cfg, found = read_config(mixture), open_source(mixture).shapes
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    with pytest.raises(InputError, match=name):
        hf.canonical_names(cfg, {n: s for n, s in found.items() if n != name})
    with pytest.raises(InputError, match=r"mlp.gate.weight .*\[5, 40\].*\[6, 40\]"):
        hf.canonical_names(cfg, found | {"model.layers.0.mlp.gate.weight": (5, 40)})
    with pytest.raises(InputError, match="2,000,000,000 experts"):
        hf.canonical_names(with_experts(cfg, count=2_000_000_000), found)

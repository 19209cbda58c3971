"""gpt-oss as it is released: experts in MXFP4 are read as transformers reads them, and copied as they are."""

import json
import re

import numpy as np
import pytest
import torch
from engines import JitterQueues, adapters, batches, exchange, opened, train
from packed_files import check_pieces
from safetensors.torch import load_file, save_file
from tiny import CASES, oracle
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from trireme.engine.run.output.folder import reopen
from trireme.engine.tuning.chosen import chosen
from trireme.engine.tuning.packed import as_stored, check_packing
from trireme.engine.tuning.parts import open_checkpoint
from trireme.models.config import InputError, parse_config, read_config
from trireme.models.families.packing import MXFP4
from trireme.models.packed import decode
from trireme.storage.checkpoint import open_source
from trireme.storage.devices import open_device
from trireme.storage.headers import CheckpointError

pytestmark = pytest.mark.grid

KEYS = CASES["gpt oss"][1] | dict(hidden_size=64, intermediate_size=32)
EXPERTS = ("*.experts.gate_up_proj", "*.experts.down_proj")


def drawn(experts, rows, columns, seed):
    """(blocks, scales) of experts with matrices (rows, columns), and with all 16 numbers."""
    dice = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=dice)
    return blocks, torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8, generator=dice)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A release: packed experts, everything else in bf16, and what transformers makes of it."""
    path = tmp_path_factory.mktemp("packed")
    reference, _ = oracle("gpt_oss", KEYS)
    reference.bfloat16().save_pretrained(path)
    state = load_file(path / "model.safetensors")
    exact = {}
    for i, name in enumerate([name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]):
        experts, columns, rows = state.pop(name).shape
        blocks, scales = drawn(experts, rows, columns, i)
        exact[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone())
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    (path / "config.json").write_text(json.dumps(config))
    return path, exact


def test_every_number_and_scale_is_as_transformers_decodes_it():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).repeat(1, 1, 16, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).clamp(1, 252)
    theirs = convert_moe_packed_tensors(blocks.clone(), scales.clone())[0]
    ours = torch.empty_like(theirs)[None]
    decode(MXFP4, [blocks, scales], ours)
    assert torch.equal(ours[0].view(torch.int16), theirs.view(torch.int16))


def test_headers_alone_refuse_a_weight_of_another_dtype(tmp_path):
    """So a dry run does, too. Old buffers and what is copied may be of any."""
    reference, cfg = oracle(*CASES["llama"])
    state = reference.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5, dtype=torch.int8)}
    save_file(state, tmp_path / "model.safetensors")
    assert as_stored(cfg, open_checkpoint(tmp_path)).packing is None
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(state | {name: state[name].to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is F8_E5M2; a weight must be .* Take the BF16 original"):
        as_stored(cfg, open_checkpoint(tmp_path))


def test_parts_of_a_tensor_are_those_of_the_whole(folder):
    source, name = open_checkpoint(folder[0]), "model.layers.1.mlp.experts.down_proj"
    whole = check_pieces(source, name, (0, 5), (2000, 4100), (2048, 4096))
    assert np.array_equal(whole.view(np.int16), folder[1][name].contiguous().view(torch.int16).flatten().numpy())


@pytest.mark.full
def test_adapters_are_trained_on_the_release_as_on_its_copy_in_bf16(folder, tmp_path):
    """Packed in every tier, in place too, whole blocks and halves: the bits of the run on decoded weights."""
    path, exact = folder
    state = {n: t for n, t in load_file(path / "model.safetensors").items() if not n.endswith(("_blocks", "_scales"))}
    save_file(state | {n: t.contiguous() for n, t in exact.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    targets, device = ("q_proj", "experts"), open_device(tmp_path)
    losses, weights, decoded = adapters(tmp_path, targets, device, "gpu")
    late = lambda: JitterQueues(1)
    ways = (("gpu", False, {}), ("host", False, {}), ("ssd", False, dict(queues=late())), ("ssd", True, {}),
            ("host", False, dict(halves=True, slices=2)), ("ssd", True, dict(halves=True, slices=3)),
            ("host", False, dict(halves=True)), ("ssd", True, dict(halves=True, window=1, queues=late())))  # fmt: skip
    for tier, in_place, change in ways:
        found, after, packed = adapters(path, targets, device, tier, in_place, **change)
        assert found == losses, (tier, change)
        assert all(torch.equal(t, weights[name]) for name, t in after.items())
        assert decoded - packed == sum(t.numel() for t in exact.values()) * (16 - 4.25) / 8


def test_a_scale_that_is_not_finite_is_refused(folder, tmp_path):
    state, name = load_file(folder[0] / "model.safetensors"), "model.layers.0.mlp.experts.down_proj_scales"
    state[name][1, 2, 0] = 255
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder[0] / "config.json").read_bytes())
    with pytest.raises(
        InputError, match=f"model.safetensors: {name} scales by more than 2\\^125; the checkpoint is damaged"
    ):
        adapters(tmp_path, ("q_proj",), None, "host")


def test_the_rest_is_trained_and_the_experts_are_copied(folder, tmp_path):
    path, _ = folder
    cfg, source, _ = opened(path, lambda cfg: chosen(cfg, EXPERTS, ()))
    e, x = exchange(cfg, source)
    x.load()
    train(e, batches(cfg, 1, 2, 24))
    x.save(tmp_path / "out")
    before, after = (load_file(p / "model.safetensors") for p in (path, tmp_path / "out"))
    assert before.keys() == after.keys()
    same = {name for name, t in before.items() if torch.equal(t, after[name])}
    assert same == {name for name in before if name.endswith(("_blocks", "_scales"))}
    assert open_checkpoint(tmp_path / "out").tensors == source.tensors


def test_one_layer_is_trained_and_the_experts_of_the_other_stay_packed_in_memory(folder, tmp_path):
    path, exact = folder
    cfg, source, _ = opened(path, lambda cfg: chosen(cfg, ("*layers.0*.experts.*_proj",), ()))
    e, x = exchange(cfg, source)
    packed = {t.name for layout in e.geo.base for t in layout.tensors if t.dtype == "U8"}
    assert packed == {f"{n}{part}" for n in exact if ".layers.0." in n for part in ("_blocks", "_scales")}
    x.load()
    train(e, batches(cfg, 1, 2, 24))
    x.save(tmp_path / "out")
    after = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(after[name], t) == (".layers.0." in name) for name, t in exact.items())


@pytest.mark.parametrize("sharded", [False, True])
def test_where_experts_are_trained_all_is_written_in_bf16(folder, tmp_path, sharded):
    path, exact = folder
    state = load_file(path / "model.safetensors")
    if sharded:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "config.json").write_bytes((path / "config.json").read_bytes())
        names = {f"model-{i}.safetensors": sorted(state)[i::2] for i in range(2)}  # blocks and scales in two files
        for file, mine in names.items():
            save_file({name: state[name] for name in mine}, tmp_path / "in" / file, {"format": "pt"})
        weight_map = {name: file for file, mine in names.items() for name in mine}
        (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        path = tmp_path / "in"
    (cfg, source, _), out = opened(path), tmp_path / "out"
    e, x = exchange(cfg, source)
    x.load()
    x.save(out)
    reopen(source, out)
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert plain.keys() == {n.removesuffix("_blocks") for n in state if not n.endswith("_scales")}
    assert all(torch.equal(t, exact.get(name, state.get(name))) for name, t in plain.items())
    train(e, batches(cfg, 1, 2, 24))
    x.save(tmp_path / "trained")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.bfloat16).state_dict()
    assert not any(torch.equal(t, plain[name]) for name, t in trained.items())


def test_blocks_of_another_shape_are_named(folder, tmp_path):
    state = load_file(folder[0] / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    state[f"{name}_scales"] = state[f"{name}_scales"][:, :-1].contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_blocks is U8 \[6, 64, 1, 16\] and .* U8 \[6, 63, 1\]"):
        open_checkpoint(tmp_path)


def test_config_and_tensors_have_to_agree(folder, tmp_path):
    """Without its word in config.json transformers would draw the experts at random; with it, it reads plain ones."""
    path, exact = folder
    said, cfg, source = [], read_config(path), open_checkpoint(path)
    check_packing(cfg, source, said.append)
    check_packing(parse_config(KEYS | dict(model_type="gpt_oss")), open_source(path), said.append)
    assert not said
    with pytest.raises(InputError, match='tensors in MXFP4, but config.json has no "quantization_config"'):
        check_packing(parse_config(KEYS | dict(model_type="gpt_oss")), source, said.append)
    check_packing(cfg, open_source(path), said.append)
    assert re.match("note: .*no tensor is in MXFP4", said[0])
    name = next(iter(exact))
    save_file(load_file(path / "model.safetensors") | {name: exact[name].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is there twice, also in MXFP4 as {name}_blocks. Remove one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", [dict(quant_method="gptq"), "mxfp4", {}])
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(
        InputError, match='"quantization_config" says that the weights are quantized .*not supported.*BF16 original'
    ):
        parse_config(KEYS | dict(model_type="gpt_oss", quantization_config=method))

"""Packed releases: whole runs, adapters with the merged model, and all weights; groups that are only copied."""

import json
from dataclasses import replace

import pytest
import torch
from four_bits import in_fp4, in_int4
from runs import losses, make_small, options, stopped
from safetensors.torch import load_file, save_file
from tiny import HYBRID, oracle

from trireme.engine.run.train import finetune
from trireme.engine.tuning.packed import as_said, as_stored, check_packing, unpacked
from trireme.engine.tuning.parts import open_checkpoint
from trireme.models.config import InputError, read_config
from trireme.storage.headers import CheckpointError

pytestmark = pytest.mark.full


GPTQ = dict(quant_method="gptq", bits=4, group_size=16, checkpoint_format="gptq")
NVFP4 = dict(quant_method="modelopt", quant_algo="NVFP4")


def in_four_bits(folder, said):
    """As in_fp8, in GPTQ or NVFP4."""
    path = folder / "checkpoint" / "model.safetensors"
    state = load_file(path)
    packed = dict(state)
    for name in [name for name, t in state.items() if t.dim() == 2 and "layers" in name]:
        parts, _ = in_int4(state[name], "gptq", 16) if said is GPTQ else in_fp4(state[name], "modelopt")
        del packed[name]
        packed |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    save_file(packed, path, {"format": "pt"})
    config = json.loads((folder / "checkpoint/config.json").read_text())
    (folder / "checkpoint/config.json").write_text(json.dumps(config | dict(quantization_config=said)))
    return state


def in_fp8(folder):
    """The checkpoint of make_small in fp8, in blocks of 48 x 48; its tensors."""
    path = folder / "checkpoint" / "model.safetensors"
    state = load_file(path)
    for name in [name for name, t in state.items() if t.dim() == 2 and "layers" in name]:
        w = state[name].float()
        rows, columns = w.shape
        padded = torch.nn.functional.pad(w, (0, -columns % 48, 0, -rows % 48)).unfold(0, 48, 48).unfold(1, 48, 48)
        scale = padded.abs().amax((2, 3)) / 448
        wide = scale.repeat_interleave(48, 0).repeat_interleave(48, 1)[:rows, :columns]
        state[name], state[f"{name}_scale_inv"] = (w / wide).to(torch.float8_e4m3fn), scale
    save_file(state, path, {"format": "pt"})
    config = json.loads((folder / "checkpoint/config.json").read_text())
    config["quantization_config"] = dict(quant_method="fp8", weight_block_size=[48, 48])
    (folder / "checkpoint/config.json").write_text(json.dumps(config))
    return state


@pytest.mark.parametrize(("word", "lora"), [("fp8", 4), ("fp8", None), ("GPTQ", 4), ("NVFP4", None)])
def test_a_run_on_packed_weights(tmp_path, capsys, monkeypatch, word, lora):
    folder, out = make_small(tmp_path), tmp_path / "out"
    state = in_fp8(folder) if word == "fp8" else in_four_bits(folder, GPTQ if word == "GPTQ" else NVFP4)
    run = options(tmp_path, out, "ssd" if lora else "gpu", **(dict(lora=lora, merge=True) if lora else {}))
    finetune(run)
    said = capsys.readouterr().out
    found = losses(out)
    assert found[6][0] < found[1][0]
    made = out / "merged" if lora else out
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    written = load_file(made / "model.safetensors")
    assert written.keys() == {name for name in state if not name.endswith("_scale_inv")}
    assert {t.dtype for name, t in written.items() if "layers" in name and t.dim() == 2} == {torch.bfloat16}
    if lora:
        assert f"frozen matrices stay in {word}" in said
        assert "--merge: the merged model is in bf16" in said
    else:
        assert f"{word} is decoded while it is read; the output is in bf16" in said
    cut = tmp_path / "cut"
    stopped(replace(run, out=str(cut)), 3, monkeypatch)
    finetune(replace(run, out=str(cut), resume=str(cut)))
    assert losses(cut) == found


# ---------------------------------------------------------------- groups of tensors that are only copied

GROUP, OF_MTP = 8, 40
MTP = "mtp.layers.0.mlp.down_proj"
LEFT_OUT = ["in_proj_a", "in_proj_b"]
PACKED = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")


def group(size, *targets):
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=size, actorder=None)
    return dict(format="pack-quantized", targets=list(targets), weights=weights, input_activations=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As Qwen3.6 is released in int4: MTP in groups of another size, linear_attn itself among what is left out."""
    folder = tmp_path_factory.mktemp("packed")
    oracle("qwen3_5_text", HYBRID)[0].bfloat16().save_pretrained(folder)
    files = load_file(folder / "model.safetensors") | {f"{MTP}.weight": torch.randn(40, 40).bfloat16()}
    for name in list(files):
        if name.endswith(PACKED):
            parts, _ = in_int4(files.pop(name), "int4", OF_MTP if name.startswith("mtp.") else GROUP)
            files |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    inner = [f"model.layers.{i}.linear_attn{end}" for i in (0, 2) for end in ("", *(f".{n}" for n in LEFT_OUT))]
    said = dict(
        quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head", *inner],
        config_groups=dict(group_0=group(GROUP, "Linear"), group_mtp=group(OF_MTP, r"re:.*mtp\..*proj$")),
    )  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(quantization_config=said)))
    return folder


def test_tensors_that_are_copied_may_be_packed_in_another_way(folder):
    cfg, said = read_config(folder), []
    source = open_checkpoint(folder, cfg.packing, said.append)
    check_packing(cfg, source, said.append)
    assert said == []
    assert source.tensors[f"{MTP}.weight_packed"].dtype == "I32"
    names = {name for name in source.tensors if source.packs(name)}
    assert {name.rpartition(".layers.")[2] for name in names if ".0.linear_attn." in name} == {
        f"0.linear_attn.{n}.weight" for n in ("in_proj_qkv", "in_proj_z", "out_proj")
    }
    assert as_said(cfg).packed == as_stored(cfg, source).packed  # config.json alone says the same


def test_what_is_packed_in_another_way_cannot_be_decoded_with_the_rest(folder):
    cfg = read_config(folder)
    source = open_checkpoint(folder, cfg.packing)
    wrong = rf"{MTP}.weight_\w+ is packed in another way than the layers, so the result cannot be in bf16. Take"
    with pytest.raises(CheckpointError, match=wrong):
        unpacked(as_stored(cfg, source), source)


def changed(folder, to, **said):
    """The config of `folder` with other keys of its quantization_config."""
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= said
    (to / "config.json").write_text(json.dumps(raw))
    return read_config(to)


def test_a_group_of_its_own_that_is_packed_as_the_others_is_decoded_with_them(folder, tmp_path):
    groups = dict(group_0=group(GROUP, "Linear"), group_mtp=group(GROUP, r"re:.*mtp\..*proj$"))
    assert changed(folder, tmp_path, config_groups=groups).packing.left == ()
    assert read_config(folder).packing.left == ("mtp.",)


def test_a_regular_expression_of_what_is_left_out_is_the_beginning_of_names(folder, tmp_path):
    """As compressed-tensors matches it, unless it ends with $."""
    said = lambda *ignore: as_said(changed(folder, tmp_path, ignore=[*ignore])).packed
    packed = lambda *ignore: {name for name in said(*ignore) if "attn" in name}
    every = packed()
    assert packed("re:.*self_attn$") == every
    assert packed("re:.*self_attn") == {name for name in every if "self_attn" not in name} < every


@pytest.mark.parametrize("targets", [
    ["Linear"], [r"re:.*mlp\..*proj$"], [r"re:.*mtp\..*", "Linear"], [r"re:.*mtp\..*|.*layers\.0\..*"], [], None,
])  # fmt: skip
def test_other_groups_of_another_size_are_refused(folder, targets, tmp_path):
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_mtp"]["targets"] = targets
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="its groups have scales of several shapes, which is not supported"):
        read_config(tmp_path)

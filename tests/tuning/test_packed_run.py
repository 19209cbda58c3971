"""Whole runs on packed releases: adapters with the merged model, and all weights."""

import json
from dataclasses import replace

import pytest
import torch
from four_bits import in_fp4, in_int4
from runs import losses, make_small, options, stopped
from safetensors.torch import load_file, save_file

from trireme.engine.run.train import finetune

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

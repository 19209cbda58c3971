"""A merge in the packed format of the base: what is not changed keeps its bytes, what is changed is rounded once."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from packed_files import FORMATS, write_packed
from safetensors.torch import load_file, save_file

import trireme
from trireme.engine.run import cli
from trireme.engine.tuning.adapters import WEIGHTS
from trireme.engine.tuning.merging import merge_adapter
from trireme.engine.tuning.parts import open_checkpoint
from trireme.engine.tuning.peft_config import CONFIG
from trireme.engine.tuning.repacked import repacked
from trireme.engine.tuning.spellings import PREFIX
from trireme.models.config import InputError, read_config
from trireme.storage.checkpoint import concat

pytestmark = pytest.mark.grid
ATTENTION = "q_proj", "o_proj"
# A scale by the largest magnitude, not by the range; and scales of scales, whose offset stays that of the file.
LESS_EXACT = {"int4": 1.1, "int4, experts": 1.1, "nf4, double": 1.01, "nf4, experts": 1.01}


def write_adapter(folder, shapes, scale=1.0):
    """An adapter of rank 2 on matrices of these shapes (out, in), by module; returns what it adds."""
    folder.mkdir()
    dice, tensors, added = torch.Generator().manual_seed(1), {}, {}
    for module, (rows, columns) in shapes.items():
        a, b = torch.randn(2, columns, generator=dice), scale * torch.randn(rows, 2, generator=dice) / columns**0.5
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
        added[f"{module}.weight"] = 3 * b @ a
    keys = dict(peft_type="LORA", r=2, lora_alpha=6, target_modules=list(ATTENTION), task_type="CAUSAL_LM")
    (folder / CONFIG).write_text(json.dumps(keys))
    save_file(tensors, folder / WEIGHTS)
    return added


def bytes_of(state):
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def packed(folder, form):
    """(a checkpoint in folder/packed, decoded matrices by name); the same in bf16 is in folder/plain."""
    decoded = write_packed(folder, form)
    return open_checkpoint(folder / "packed", read_config(folder / "packed").packing), decoded


def merge(folder, form, scale=1.0):
    """Merges into folder/same; returns what the adapter adds, and the decoded base, by name."""
    source, decoded = packed(folder, form)
    state = load_file(folder / "plain/model.safetensors")
    ends = tuple(f"{module}.weight" for module in ATTENTION)
    shapes = {name.removesuffix(".weight"): t.shape for name, t in state.items() if name.endswith(ends)}
    added, cfg = write_adapter(folder / "adapter", shapes, scale), read_config(folder / "packed")
    merge_adapter(folder / "adapter", cfg, source, folder / "same", say=lambda _: None, same=True)
    return added, decoded


@pytest.mark.parametrize("form", FORMATS)
def test_what_an_adapter_changes_is_packed_as_before_and_nothing_else_changes(form, tmp_path):
    added, decoded = merge(tmp_path, form)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "same"))
    assert (tmp_path / "packed/config.json").read_bytes() == (tmp_path / "same/config.json").read_bytes()
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    old, new = bytes_of(before), bytes_of(after)
    modules = {name.removesuffix(".weight") for name in added}
    assert {name.rpartition("_proj")[0] + "_proj" for name in old if old[name] != new[name]} == modules
    source = open_checkpoint(tmp_path / "same", read_config(tmp_path / "same").packing).computed_in("F32")
    for name in added.keys() & decoded.keys():
        exact = decoded[name] + added[name]
        ours = torch.from_numpy(concat(source.values(name))).view(exact.shape)
        theirs = FORMATS[form].pack(name, exact)[1]
        assert (ours - exact).norm() <= LESS_EXACT.get(form, 1.001) * (theirs - exact).norm()


@pytest.mark.grid("fp8, whole blocks")
@pytest.mark.parametrize("form", FORMATS)
def test_how_many_rows_are_encoded_at_a_time_changes_no_bit(form, tmp_path):
    """Also of a matrix with as many rows as a block."""
    source, _ = packed(tmp_path, form)
    names = [name for name in source.tensors if source.packs(name) and ".layers.0." in name]
    few, many = (repacked(source, {name: partial(source.rows, name) for name in names}, n) for n in (300, 1 << 20))
    for part in few.places:
        assert b"".join(map(bytes, few.values(part))) == b"".join(map(bytes, many.values(part)))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fp8, experts", "nf4, double", "int4, zeros", "nvfp4", "mxfp4"])
def test_a_gpu_merges_as_a_cpu(form, tmp_path):
    """But for sums at the edge between two codes."""
    merge(tmp_path, form)
    cfg = read_config(tmp_path / "packed")
    source = open_checkpoint(tmp_path / "packed", cfg.packing)
    others = dict(say=lambda _: None, same=True, device=torch.device("cuda", 0))
    merge_adapter(tmp_path / "adapter", cfg, source, tmp_path / "gpu", **others)
    cpu, gpu = (bytes_of(load_file(tmp_path / name / "model.safetensors")) for name in ("same", "gpu"))
    assert cpu.keys() == gpu.keys()
    different = sum(a != b for name in cpu for a, b in zip(cpu[name], gpu[name], strict=True))
    assert different <= sum(map(len, cpu.values())) / 1000


def test_sums_that_no_scale_of_the_packing_holds_are_refused(tmp_path):
    with pytest.raises(InputError, match="lora_alpha"):
        merge(tmp_path, "int4", 6e37)


def test_an_adapter_with_another_vocabulary_is_refused(tmp_path):
    merge(tmp_path, "fp8")
    cfg = read_config(tmp_path / "packed")
    larger = {f"{PREFIX}{module}.weight": torch.ones(98, 40) for module in ("model.embed_tokens", "lm_head")}
    save_file(load_file(tmp_path / "adapter" / WEIGHTS) | larger, tmp_path / "adapter" / WEIGHTS)
    source = open_checkpoint(tmp_path / "packed", cfg.packing)
    with pytest.raises(InputError, match="--format"):
        merge_adapter(tmp_path / "adapter", cfg, source, tmp_path / "other", say=lambda _: None, same=True)


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_run_merges_as_the_command(device, tmp_path):
    """Once its memory is free."""
    merge(tmp_path, "mxfp4")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": list(range(3, 35))}) + "\n")
    packed, rows, out, again = (str(tmp_path / name) for name in ("packed", "rows.jsonl", "out", "again"))
    words = [packed, "--data", rows, "--out", out, "--lora", "4", "--seq-len", "32", "--max-steps", "2"]
    assert cli.main([*words, "--merge", "--merge-format", "same", "--device", device]) == 0
    assert cli.main(["merge", out, "--out", again, "--format", "same", "--device", device]) == 0
    made = [Path(folder, "model.safetensors").read_bytes() for folder in (packed, f"{out}/merged", again)]
    assert made[0] != made[1] == made[2]


@pytest.mark.full
@pytest.mark.parametrize("form", ["mxfp4", "nf4", "fp8", "fp8, whole blocks", "gpt-oss", "fp8, experts"])
def test_the_losses_of_a_merge_are_those_of_eval(form, tmp_path, capsys):
    """Of the base, with the adapter, merged in bf16 as a merge writes it, and merged as it was."""
    merge(tmp_path, form)
    adapter, packed, rows = (str(tmp_path / name) for name in ("adapter", "packed", "rows.jsonl"))
    Path(rows).write_text(json.dumps({"input_ids": list(range(3, 40))}) + "\n")
    words = ["merge", adapter, "--model", packed, "--data", rows]
    printed = list[list[str]]()
    for to in ("bf16", "same"):
        assert cli.main([*words, "--out", str(tmp_path / f"out-{to}"), "--format", to]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("loss "))
        printed.append(re.findall(r"\d+\.\d{4}", line))
    base, added, wide, same = (
        f"{trireme.evaluate(folder, rows, **others)['loss']:.4f}"
        for folder, others in ((packed, {}), (adapter, {"model": packed}), (tmp_path / "out-bf16", {}),
                               (tmp_path / "out-same", {}))
    )  # fmt: skip
    assert printed == [[base, added, wide], [base, added, wide, same]]
    assert len({base, added, same}) == 3

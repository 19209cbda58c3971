"""--base: what is frozen is quantized as it is read, as bitsandbytes, transformers and MXFP4's specification do."""

import json
from dataclasses import replace
from math import copysign, floor, log2
from os import truncate, utime
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engines import adapters, batches, exchange, final_weights, opened, train
from packed_files import write_packed
from runs import losses, options, stopped
from safetensors.torch import load_file, save_file
from stores import flip
from tiny import LLAMA, MIXTURE, oracle

from trireme.engine.geometry import geometry
from trireme.engine.run.cli import of_a_run
from trireme.engine.run.job import make
from trireme.engine.run.loop import train as finetune
from trireme.engine.tuning.base import CheckpointBase, why_copied
from trireme.engine.tuning.cached import cached
from trireme.engine.tuning.chosen import adapted, train_only
from trireme.engine.tuning.quantized import BASES, STRIP, Encoder, quantized
from trireme.kernels.packed.reference import NF4
from trireme.models import hf
from trireme.models.config import InputError, Lora
from trireme.models.encoding import encode
from trireme.models.packed import decode
from trireme.storage.devices import open_device
from trireme.storage.files import StoreError

pytestmark = [pytest.mark.grid, pytest.mark.turns]


def decoded(base, w):
    """What the GPU makes of a quantized matrix, bf16."""
    packing, out = BASES[base], torch.empty(w.shape, dtype=torch.bfloat16)
    codes, scales = (torch.from_numpy(part) for part in encode(packing, w.float().numpy()))
    of_codes, of_scales = packing.shapes(tuple(w.shape))
    decode(packing, [codes.view(of_codes), scales.view(of_scales)], out)
    return out


def test_nf4_is_that_of_bitsandbytes():
    """The nearest of the table, of 64 by their largest magnitude; a short last group, a group of zeros."""
    w = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    w.view(-1)[64:128] = 0
    codes, scales = encode(BASES["nf4"], w.numpy())
    groups = w.flatten().split(64)
    assert np.array_equal(scales, [group.abs().max() for group in groups])
    nearest = [(group[:, None] / group.abs().max().clamp(min=1e-9) - NF4).abs().argmin(1) for group in groups]
    assert torch.equal(torch.cat(nearest), torch.from_numpy(np.stack((codes >> 4, codes & 15), 1).flatten()).long())
    assert decoded("nf4", w).view(-1)[64:128].eq(0).all()


def test_fp8_is_that_of_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Quantize  # seconds

    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    w[:128, :128] = 0
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("a.weight", w)
    codes, scales = encode(BASES["fp8"], w.numpy())
    assert np.array_equal(codes, theirs["a.weight"].view(torch.uint8).flatten().numpy())
    assert np.array_equal(scales, theirs["a.weight_scale_inv"].flatten().numpy())
    short = encode(BASES["fp8"], w[:200, :130].contiguous().numpy())
    assert [len(part) for part in short] == [200 * 130, 4]


def test_mxfp4_is_that_of_its_specification():
    """The power of two of the largest of 32 over that of 6; the nearest of the numbers, of two the even code; by loops,
    with ties, zeros, subnormal and huge groups.
    """
    w = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    w[0, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0] * 4) * torch.tensor([1.0, -1.0] * 16)
    w[1, :32], w[2, :32], w[3, 32:64] = 0, w[2, :32] * 2.0**-148, w[3, 32:64] * 2.0**125
    codes, scales = encode(BASES["mxfp4"], w.numpy())
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for group, pairs, scale in zip(w.view(-1, 32).tolist(), codes.reshape(-1, 16), scales, strict=True):
        most = max(map(abs, group))
        power = max(floor(log2(most)) - 2, -127) if most else -127
        assert scale == power + 127
        for value, code in zip(group, np.stack((pairs & 15, pairs >> 4), 1).flatten().tolist(), strict=True):
            scaled = abs(value) / 2.0**power
            apart = [(abs(scaled - number), i % 2, i) for i, number in enumerate(numbers)]
            assert code == min(apart)[2] + 8 * (copysign(1, value) < 0)


EVEN = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, head_dim=16)


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "keys"), [("qwen3", LLAMA), ("qwen3_moe", MIXTURE)])
@pytest.mark.parametrize("base", BASES)
def test_adapters_are_trained_as_on_the_quantized_checkpoint(tmp_path, base, model_type, keys):
    """In RAM and on the SSD: bitwise the run on what the quantized matrices decode to."""
    keys = keys | EVEN if base == "mxfp4" else keys
    folder, plain = tmp_path / "model", tmp_path / "decoded"
    for path in (folder, plain):
        oracle(model_type, keys)[0].bfloat16().save_pretrained(path)
    state = load_file(plain / "model.safetensors")
    kept = ("embed", "norm", "lm_head", "mlp.gate.")
    state = {n: t if any(part in n for part in kept) else decoded(base, t) for n, t in state.items()}
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    targets = ("q_proj", "experts" if model_type == "qwen3_moe" else "down_proj")
    seen, weights, wide = adapters(plain, targets, None, "gpu")
    for tier in ("ram", "ssd"):
        cfg, source, stored = opened(folder, lambda cfg: adapted(cfg, Lora(2, 4.0, targets)))
        cfg, source = quantized(cfg, source, base, stored)
        e, x = exchange(cfg, source, tier)
        x.load()
        assert train(e, batches(cfg, 2, 2, 24)) == seen
        assert all(torch.equal(t, weights[name]) for name, t in final_weights(e).items())
        assert sum(layout.nbytes for layout in e.geo.base) < 0.8 * wide


@pytest.mark.parametrize("base", BASES)
def test_matrices_of_several_in_one_tensor_are_quantized_by_rows(base):
    """One expert of a large model has 16 M elements: 0.5 GB at once, for each loader."""
    w = torch.randn(3, 9000, 64, generator=torch.Generator().manual_seed(0)).numpy()
    encoder, sizes = Encoder(BASES[base], w.shape, lambda a, b: sizes.append(b - a) or w.reshape(-1, 64)[a:b]), []
    whole = [np.concatenate(part) for part in zip(*(encoder.strip(*span) for span in encoder.spans()), strict=True)]
    assert sum(sizes) == 3 * 9000
    assert max(sizes) * 64 <= STRIP
    for part, codes in enumerate(whole):
        for i, matrix in enumerate(w):
            assert np.array_equal(codes.reshape(3, -1)[i], encode(BASES[base], matrix)[part])
        for first, last in ((0, 1), (len(codes) // 3 - 1, len(codes) - 5), (0, len(codes))):
            assert np.array_equal(encoder.part(part, first, last), codes[first:last])


@pytest.mark.full
def test_with_a_store_a_base_is_quantized_once(tmp_path):
    """Into a file that is read in place: bitwise the same. A checkpoint of other values makes another."""
    for model_type, keys in (("qwen3", LLAMA), ("qwen3_moe", MIXTURE)):
        folder, store = tmp_path / model_type, tmp_path / "store"
        store.mkdir(exist_ok=True)
        oracle(model_type, keys)[0].bfloat16().save_pretrained(folder)
        cfg, source, stored = opened(folder, lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
        cfg, anew = quantized(cfg, source, "nf4", stored)
        kept = cached(anew, store)
        assert not kept.is_made()
        heard = []
        kept.make(heard.append, print)
        assert sum(heard) == kept.file_bytes - len(kept.header)
        assert kept.is_made()
        assert kept.file.stat().st_size == kept.file_bytes
        for name in kept.parts:
            assert np.array_equal(np.concatenate(list(kept.values(name))), np.concatenate(list(anew.values(name))))
        seen = []
        for of, tier, in_place in ((anew, "ram", False), (kept, "ram", False), (kept, "ssd", True)):
            named = hf.sources(cfg, of.shapes)
            files = None
            if in_place:
                assert why_copied(cfg, "BF16", of, named, [store]) == ""
                stored_base = geometry(cfg, "BF16", 32).stored_base
                files = CheckpointBase(dict(enumerate(stored_base)), of, named, [open_device(store)])
            e, x = exchange(cfg, of, tier, files=files)
            x.load()
            seen.append((train(e, batches(cfg, 2, 2, 24)), x.base))
        assert seen[0] == seen[1] == seen[2]


def test_a_kept_base_is_that_of_the_checkpoint(tmp_path):
    """By the stamps of its files; what is cut short or of another checkpoint is written again."""
    oracle("llama", LLAMA)[0].bfloat16().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"

    def opened_again():
        cfg, source, stored = opened(tmp_path, lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
        return cached(quantized(cfg, source, "fp8", stored)[1], tmp_path)

    kept, said = opened_again(), []
    kept.make(lambda n: None, said.append)
    content = kept.file.read_bytes()
    flip(kept.file, -1)
    kept.make(lambda n: None, said.append)
    assert str(kept.file) in said.pop()
    assert kept.file.read_bytes() == content
    changes = {
        "as it was": (lambda: None, False),
        "touched": (lambda: utime(file, ns=(5, 5)), True),
        "other values": (lambda: flip(file, -1), True),
        "cut short": (lambda: truncate(kept.file, 5000), True),
        "another header": (lambda: flip(kept.file, 500), True),
        "no checksum": (kept.sum.unlink, True),
    }
    for case, (change, anew) in changes.items():
        change()
        kept = opened_again()
        assert kept.is_made() != anew, case
        kept.make(lambda n: None, said.append)
        assert kept.is_made(), case
    assert not said
    assert {path.name for path in kept.file.parent.iterdir()} == {kept.file.name, kept.sum.name}
    kept.file.unlink()

    def stop(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.make(stop, said.append)
    assert not list(kept.file.parent.iterdir())


def test_matrices_whose_rows_end_within_a_group_stay_as_they_are(tmp_path):
    oracle("qwen3", LLAMA | dict(intermediate_size=96))[0].save_pretrained(tmp_path)
    cfg, source, stored = opened(tmp_path, lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
    found, _ = quantized(cfg, source, "mxfp4", stored)
    assert found.packed == ("model.layers.*.mlp.down_proj.weight",)


def test_what_is_not_of_it_is_refused(tmp_path):
    oracle("qwen3", LLAMA)[0].save_pretrained(tmp_path)
    cfg, source, stored = opened(tmp_path)
    with pytest.raises(InputError, match="--base nf4"):
        quantized(cfg, source, "nf4", stored)
    frozen = train_only(cfg, ("*.mlp.*",), ())
    with pytest.raises(InputError, match="--dtype fp8"):
        quantized(replace(frozen, fp8=True), source, "fp8", stored)
    found, _ = quantized(frozen, source, "fp8", stored)
    assert set(found.packed) == {f"model.layers.*.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("form", "base"), [("fp8, latent", "nf4"), ("fp8 by row", "nf4"), ("mxfp4", "fp8"), ("nf4", "nf4")]
)
def test_a_packed_checkpoint_is_quantized_as_what_it_decodes_to(tmp_path, form, base):
    """As one of DeepSeek's in fp8, of which MXFP4 takes half the memory."""
    write_packed(tmp_path, form)
    parts = list[dict[str, bytes]]()
    for name in ("plain", "packed"):
        cfg, source, _ = opened(tmp_path / name, lambda cfg: adapted(cfg, Lora(2, 4.0, ("o_proj",))))
        if name == "packed" and form == base:
            with pytest.raises(InputError, match="--base nf4"):
                quantized(cfg, source, base, hf.sources(cfg, source.shapes))
            return
        _, made = quantized(cfg, source, base, hf.sources(cfg, source.shapes))
        parts.append({part: b"".join(piece.tobytes() for piece in made.values(part)) for part in made.parts})
    assert parts[0] == parts[1]
    assert parts[0]


@pytest.mark.full
def test_a_run_on_a_packed_checkpoint_in_another_base_is_that_on_what_it_decodes_to(tmp_path):
    write_packed(tmp_path, "fp8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"input_ids": [(7 * i + 3 * j) % 90 + 1 for j in range(30)]}) + "\n" for i in range(16))
    )
    out, weights = tmp_path / "out", list[dict[str, torch.Tensor]]()
    keys = dict(data=[rows], lora=4, base="nf4", merge=True, max_steps=2, seq_len=32, batch_size=4)
    for name in ("packed", "plain"):
        finetune(of_a_run({"model": tmp_path / name, "out": out / name, **keys}))
        adapter = load_file(out / name / "adapter_model.safetensors")
        weights.append(adapter | load_file(out / name / "merged/model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(t, weights[1][name]) for name, t in weights[0].items())
    with pytest.raises(InputError, match="--merge-format same"):
        finetune(of_a_run({"model": tmp_path / "packed", "out": out / "same", **keys, "merge_format": "same"}))


@pytest.mark.full
def test_a_run_with_a_quantized_base(checkpoint, monkeypatch):
    """Resumed to the bit, with the same base alone; merged into the checkpoint's own values; kept in a store once."""
    run = options(checkpoint, checkpoint / "out", "ssd", lora=4, lora_targets=("q_proj",), base="nf4", merge=True)
    finetune(run)
    curve = losses(checkpoint / "out")
    assert curve[6][0] < curve[1][0]
    before, merged = (load_file(checkpoint / p / "model.safetensors") for p in ("checkpoint", "out/merged"))
    assert {n for n, t in merged.items() if not torch.equal(t, before[n])} == {n for n in before if "q_proj" in n}
    cut = replace(run, out=str(checkpoint / "cut"), resume=None)
    stopped(cut, 3, monkeypatch)
    with pytest.raises((InputError, StoreError)):
        finetune(replace(cut, resume=cut.out, base="fp8"))
    finetune(replace(cut, resume=cut.out))
    assert losses(checkpoint / "cut") == curve
    made = []
    for out in ("first", "second"):  # from the SSD in place
        finetune(replace(run, out=str(checkpoint / out), store=(str(checkpoint / "drive"),)))
        assert losses(checkpoint / out) == curve
        (file,) = (checkpoint / "drive/bases").glob("nf4-*.safetensors")
        made.append(file.stat().st_mtime_ns)
    assert made[0] == made[1]
    nf4, plain = (sum(make(replace(run, dry_run=True, base=base)).forecast.geo.base_bytes) for base in ("nf4", None))
    assert nf4 < 0.5 * plain

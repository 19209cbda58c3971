"""A finished model's layers, in memory or read from its files: tokens and losses of transformers and peft."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CASES, oracle, oracle_generate
from transformers import AutoModelForCausalLM

from trireme.engine.data.dataset import MicroBatch
from trireme.engine.plan import DoesNotFit, Limits
from trireme.engine.run.finished import evaluate
from trireme.engine.run.finished.layers import Layers
from trireme.engine.run.finished.model import of_run, open_folder
from trireme.engine.run.hub.push import card_of
from trireme.engine.run.screen import Screen
from trireme.models.config import InputError
from trireme.models.families.packing import FP8
from trireme.models.generate import generate
from trireme.models.packed import encode
from trireme.models.rows import rope_tables
from trireme.storage.files import StoreError

pytestmark = pytest.mark.grid

PROMPTS = [[5, 9, 2, 44, 17, 3, 8], [11], [60, 61, 62, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
ROOMY, CPU = Limits(1 << 30, 1 << 30), torch.device("cpu")


def of_four(case):
    """As oracle, with four layers."""
    model_type, keys = CASES[case]
    return oracle(model_type, keys | {"n_layer" if model_type == "gpt2" else "num_hidden_layers": 4})


def loaded(opened, limits=ROOMY, device=CPU):
    layers = Layers(opened, device, "F32", limits, 0)
    layers.load(lambda _: None)
    return layers


def tight(opened, device=CPU):
    """Room for the ends and the buffers: all blocks come from the files."""
    sizes = loaded(opened, device=device).sizes
    room = sizes[0] + sizes[-1] + 2 * max(sizes) + (1 << 12)
    made = max(layout.span for layout in Layers(opened, device, "F32", ROOMY, 0).geo.decoded)
    return Limits(room + made, 0 if device.type == "cpu" else 2 * max(sizes))


def their_losses(model, batch):
    """Of each document."""
    total, at = 0.0, 0
    for n in batch.lengths:
        ids, labels = (torch.from_numpy(a[at : at + n]).long() for a in (batch.ids, batch.labels))
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100))
        at += n
    return total


def their_hits(model, batch):
    """Labels that are the most likely token."""
    total = 0
    ids, labels = (torch.from_numpy(a).long().split(batch.lengths) for a in (batch.ids, batch.labels))
    for own, targets in zip(ids, labels, strict=True):
        with torch.no_grad():
            total += int((model(own[None]).logits[0].argmax(-1) == targets).sum())
    return total


class OneBatch(NamedTuple):
    """As a Dataset."""

    batch: MicroBatch
    n_sequences: int = 3
    kind: str = ""
    tokens: int = 24
    weighted: bool = False

    def batches(self, rows):
        yield self.batch


def batch_of(vocab):
    dice = np.random.default_rng(1)
    lengths = (9, 1, 14)
    ids = dice.integers(0, vocab, sum(lengths)).astype(np.int32)
    labels = np.roll(ids, -1)
    labels[np.cumsum(lengths) - 1] = -100
    labels[2:4] = -100
    return MicroBatch(ids, labels, lengths)


def ready(layers):
    tables = rope_tables(layers.cfg, 64, layers.device)
    return evaluate.Ready(layers, 1, 64, torch.float32, tables, 0, layers.cfg.vocab)


def loss(layers, batches):
    return sum(float(losses.double().sum()) for losses in evaluate._pass(ready(layers), batches))


@pytest.mark.parametrize("where", ["memory", "files"])
@pytest.mark.parametrize("case", ["llama tied", "gpt2", "qwen3 moe", "gpt oss", "gemma2"])
def test_tokens_and_losses_of_transformers(case, where, tmp_path):
    reference, cfg = of_four(case)
    reference.save_pretrained(tmp_path)
    opened = open_folder(str(tmp_path), "", lambda _: None)
    layers = loaded(opened, ROOMY if where == "memory" else tight(opened))
    blocks = list(range(1, cfg.n_units - 1))
    assert layers.streamed == ([] if where == "memory" else blocks)
    assert bool(layers.speed_line("each token")) == (where == "files")
    assert generate(cfg, layers.units, PROMPTS, 12) == oracle_generate(reference, PROMPTS, 12)
    batch = batch_of(cfg.vocab)
    expected = their_losses(reference, batch)
    assert loss(layers, [batch]) == pytest.approx(expected, rel=1e-5)
    assert loss(layers, [batch, batch]) == pytest.approx(2 * expected, rel=1e-5)
    found = evaluate.loss_on(ready(layers), OneBatch(batch), Screen(io.StringIO()))
    assert found.correct == their_hits(reference, batch)
    layers.close()


@pytest.mark.parametrize("where", ["memory", "files"])
def test_an_adapter_as_peft(where, tmp_path):
    peft = pytest.importorskip("peft")
    reference, cfg = of_four("llama")
    reference.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    opened = open_folder(str(tmp_path / "adapter"), "", lambda _: None)
    assert opened.base == tmp_path / "base"
    layers = loaded(opened, ROOMY if where == "memory" else tight(opened))
    assert (
        generate(opened.cfg, layers.units, PROMPTS, 12)
        == oracle_generate(theirs, PROMPTS, 12)
        != oracle_generate(reference, PROMPTS, 12)
    )
    batch = batch_of(cfg.vocab)
    assert loss(layers, [batch]) == pytest.approx(their_losses(theirs, batch), rel=1e-5)


def test_files_that_change_between_passes_are_noticed(tmp_path):
    """Layers would be of two models."""
    reference, cfg = of_four("llama")
    reference.save_pretrained(tmp_path)
    opened = open_folder(str(tmp_path), "", lambda _: None)
    layers = loaded(opened, tight(opened))
    loss(layers, [batch_of(cfg.vocab)])
    os.utime(tmp_path / "model.safetensors", ns=(0, 0))
    with pytest.raises(StoreError, match="was changed while it was read; restore it"):
        loss(layers, [batch_of(cfg.vocab)])


def test_what_is_lacking_is_said(tmp_path):
    reference, _ = of_four("llama")
    reference.save_pretrained(tmp_path)
    opened = open_folder(str(tmp_path), "", lambda _: None)
    for free, way_out in ((False, "Raise --ram"), (True, "Free some memory")):
        with pytest.raises(DoesNotFit, match=f"even layer by layer this takes .* {way_out}, or ask for less"):
            Layers(opened, CPU, "F32", Limits(1 << 14, 0, free_ram=free), 0)


def test_a_folder_that_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails = lambda match, *given: pytest.raises(InputError, match=match)
    with fails("hf download Qwen/Qwen3-0.6B"):
        open_folder("Qwen/Qwen3-0.6B", "", print)
    with fails("nothing: no such folder"):
        open_folder("nothing", "", print)
    Path("run/best").mkdir(parents=True)
    Path("run/config.yaml").write_text("# run 1\nmodel: x\n")
    with fails("that run is not finished.* There is run/best. --resume run continues it"):
        open_folder("run", "", print)
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "gone/x"})
    )
    with fails("its base, 'gone/x', is not a folder here. Name the checkpoint: --model DIR"):
        open_folder("adapter", "", print)


def test_options_in_an_adapter_of_another_program_are_named_and_not_read(tmp_path):
    said = []
    for name, content in (("ours/config.yaml", "# run 1\ntokenizer: /t\n"), ("theirs/config.yaml", "tokenizer: [{]")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    assert of_run(tmp_path / "ours", said.append) == {"tokenizer": "/t"}
    assert of_run(tmp_path / "theirs", said.append) == {}
    assert said == [f"{tmp_path}/theirs/config.yaml is not of a run of this program, and is not read"]
    assert card_of(tmp_path / "theirs", "a/b", "", adapter=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["llama tied", "gpt oss"])
def test_on_a_gpu_all_places_give_the_same_tokens(case, tmp_path):
    """On the GPU, in RAM and in the files."""
    reference, cfg = of_four(case)
    reference.save_pretrained(tmp_path)
    opened, gpu = open_folder(str(tmp_path), "", lambda _: None), torch.device("cuda")
    files = tight(opened, gpu)
    found = []
    for limits in (ROOMY, replace(files, host=1 << 30), files):
        layers = loaded(opened, limits, gpu)
        found.append(generate(cfg, layers.units, PROMPTS, 12, device=gpu))
    assert found[0] == found[1] == found[2]


def test_packed_experts_are_decoded_in_slices_where_all_do_not_fit(tmp_path):
    """The same tokens, in less memory than a layer's experts take decoded."""
    reference, _ = of_four("qwen3 moe")
    reference.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    packing = replace(FP8, block=(16, 16))
    for name in [name for name in state if ".experts." in name]:
        codes, scales = (torch.from_numpy(part) for part in encode(packing, state[name].float().numpy()))
        _, grid = packing.shapes(tuple(state[name].shape))
        state[name] = codes.view(torch.float8_e4m3fn).view(state[name].shape)
        state[f"{name}_scale_inv"] = scales.view(grid)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    said = dict(quant_method="fp8", weight_block_size=[16, 16], modules_to_not_convert=["lm_head", "self_attn"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(quantization_config=said)))
    opened = open_folder(str(tmp_path), "", lambda _: None)
    roomy, limits = loaded(opened), tight(opened)
    made = max(layout.span for layout in roomy.geo.decoded)
    sliced = loaded(opened, replace(limits, gpu=limits.gpu - made // 2))
    assert (roomy.cfg.at_once, sliced.cfg.at_once) == (0, 1)
    assert max((layout.span for layout in sliced.geo.decoded), default=0) < made // 4
    tokens = [generate(layers.cfg, layers.units, PROMPTS, 8) for layers in (roomy, sliced)]
    assert tokens[0] == tokens[1]
    with pytest.raises(DoesNotFit):
        loaded(opened, replace(limits, gpu=limits.gpu - made))

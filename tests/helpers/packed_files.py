"""Checkpoints with packed matrices: written next to the same in bf16; malformed ones, refused in one line."""

import json

import numpy as np
import pytest
import torch
from engines import adapters, batches, exchange, final_weights, opened, train
from safetensors.torch import load_file, save_file
from tiny import oracle

from trireme.engine.run.output.folder import reopen
from trireme.engine.tuning.chosen import adapted
from trireme.kernels.reference import split_master
from trireme.models.config import InputError, Lora
from trireme.storage.headers import CheckpointError

LEFT = ("embed", "norm", "lm_head", "mlp.gate.")  # parts of names of matrices that are not packed


def write_packed(folders, model_type, keys, said, pack):
    """Fills two folders, with packed matrices and with the same in bf16; decoded matrices in fp32 by name.

    `said`: quantization_config; `pack(name, w)`: (tensors that replace it by name, the decoded matrix).
    """
    packed, plain = folders
    oracle(model_type, keys)[0].bfloat16().save_pretrained(plain)
    state = load_file(plain / "model.safetensors")
    files, wide = dict(state), {}
    for name, w in state.items():
        if w.dim() == 2 and not any(part in name for part in LEFT):
            parts, wide[name] = pack(name, w)
            del files[name]
            files |= parts
            state[name] = wide[name].bfloat16()
    save_file(files, packed / "model.safetensors", {"format": "pt"})
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | dict(quantization_config=said)))
    return wide


def check_pieces(source, name, *ranges):
    """Parts of a tensor are those of the whole, which is returned."""
    whole = np.concatenate(list(source.values(name)))
    for first, last in (*ranges, (len(whole) - 3, len(whole))):
        assert np.array_equal(np.concatenate(list(source.values(name, first, last))), whole[first:last])
    return whole


def check_adapters(folder, plain, targets, device, ways, most):
    """Adapters learn as on decoded weights, bit by bit, placed in any of `ways`: (tier, in place, change of the plan).

    The base takes less than `most` of the bytes.
    """
    losses, weights, wide = adapters(plain, targets, device, "gpu")
    for tier, in_place, change in ways:
        found, after, packed = adapters(folder, targets, device, tier, in_place, **change)
        assert found == losses, (tier, change)
        assert all(torch.equal(t, weights[name]) for name, t in after.items())
        assert packed < most * wide


def check_all_trained(folder, plain, wide, out, rounded=False):
    """Training begins with masters of the decoded values, fp32 by name, and writes them in bf16; the new config.json.

    `rounded`: they are decoded in bf16.
    """
    cfg, source, _ = opened(folder)
    for name, values in wide.items():
        whole = check_pieces(source, name, (0, 5), (500, 700), (64, 1024))
        exact = values.bfloat16().view(torch.uint16) if rounded else values
        assert np.array_equal(whole, exact.flatten().numpy())
    e, x = exchange(cfg, source)
    x.load()
    masters = final_weights(e)
    assert all(torch.equal(masters[name], values.flatten()) for name, values in wide.items() if name in masters)
    train(e, batches(cfg, 1, 2, 24))
    e, x = exchange(cfg, source)
    x.load()
    x.save(out)
    reopen(source, out)
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(written[name], split_master(values)[0]) for name, values in wide.items())
    assert written.keys() == load_file(plain / "model.safetensors").keys()
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    return config


def check_malformed(folder, change, words, malformed):
    """A copy in the folder `malformed`, its tensors changed, is refused for adapters and for full fine-tuning."""
    state = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    change(state)
    save_file(state, malformed / "model.safetensors", {"format": "pt"})
    (malformed / "config.json").write_bytes((folder / "config.json").read_bytes())
    for change_of in (lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))), lambda cfg: cfg):
        with pytest.raises((CheckpointError, InputError), match=words) as told:
            cfg, source, _ = opened(malformed, change_of)
            exchange(cfg, source)[1].load()
        assert "\n" not in str(told.value)

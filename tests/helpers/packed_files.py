"""Checkpoints with packed matrices: written next to the same in bf16; malformed ones, refused in one line."""

import json

import pytest
from engines import exchange, opened
from safetensors.torch import load_file, save_file
from tiny import oracle

from trireme.engine.tuning.chosen import adapted
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

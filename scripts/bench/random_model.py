"""python scripts/bench/random_model.py SHAPE FOLDER [LAYERS]: random weights of a published shape, as it is released.

For trying the command on files of real sizes: names, dtypes and packed parts as released, shards of a layer or 4 GiB,
and a tokenizer of bytes. LAYERS: the first so many of the model.
"""

import json
import sys
from itertools import count
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trireme.engine.geometry import Geometry
from trireme.engine.planner.sizes import find_config
from trireme.engine.tuning.chosen import adapted, targets
from trireme.models.config import Lora, Packing, parse_config

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}

LARGEST = 4 << 30  # bytes of a shard, about

CLASS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}


def values(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers of about 0.02, codes without NaN, and scales for them; a million are drawn, and repeated."""
    if dtype == "U8" and name.endswith(".weight"):
        dtype = "F8_E4M3"  # of which memory has the bytes
    if dtype in ("U8", "F8_E4M3"):
        least, most = (118, 122) if name.endswith("scales") else (0, 120 if dtype == "F8_E4M3" else 256)
        some = torch.randint(least, most, (1 << 20,), dtype=torch.uint8)
    else:
        some = 2e-4 if name.endswith("scale_inv") else torch.randn(1 << 20) * 0.02 + ("norm" in name)
        some = torch.as_tensor(some).to(DTYPES[dtype]).view(-1)
    return some.repeat(-(-prod(shape) // len(some)))[: prod(shape)].view(shape).view(DTYPES[dtype])


def released(name: str, packing: Packing | None) -> str:
    """The name in files of a tensor that memory calls `name`."""
    row = packing and packing.of(name)
    for part in row.parts if row else ():
        if name.endswith(f".weight{part.suffix}"):
            return name.removesuffix(part.suffix) + part.stored
    return name


def tokenizer() -> Tokenizer:
    """One token for each byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<eos>"])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


def write(shape: str, folder: Path, layers: int = 0) -> None:
    """Writes the checkpoint; layers: 0 for all."""
    config = find_config(shape)
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    cfg = parse_config(config)
    frozen = Geometry(adapted(cfg, Lora(1, 1.0, targets(cfg, ()))), "BF16")
    folder.mkdir(parents=True)
    shards, number, parts = dict[str, str](), count(1), dict[str, torch.Tensor]()
    for layout in frozen.stored_base:
        for i, t in enumerate(layout.tensors, 1):
            parts[released(t.name, cfg.packing)] = values(t.name, t.dtype, t.shape)
            if i == len(layout.tensors) or sum(part.nbytes for part in parts.values()) > LARGEST:
                file = f"model-{next(number):05d}.safetensors"
                save_file(parts, folder / file, {"format": "pt"})
                shards |= dict.fromkeys(parts, file)
                parts = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 256}, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(CLASS))
    tokenizer().save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))

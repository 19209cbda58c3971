"""The parsers that read what a stranger may have written, each as a Target made in an empty folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import tiny
import transformers
from mutations import Target, as_json, as_text
from targets_data import DATA
from targets_rows import ROW_TARGETS

from trireme.engine.run.cli import parse
from trireme.engine.tuning.adapters import adapter_shapes, peft_names
from trireme.engine.tuning.chosen import adapted
from trireme.engine.tuning.peft import read_adapter
from trireme.models import hf
from trireme.models.config import InputError, Lora, Rope, read_config, uniform
from trireme.models.families.experts import REFUSED
from trireme.models.families.table import FAMILIES
from trireme.models.rows import rope_tables
from trireme.storage.checkpoint import open_source
from trireme.storage.headers import CheckpointError, list_tensors
from trireme.storage.layout import sequential

# ---------------------------------------------------------------- a checkpoint

TENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [32, 38]},
}


def _safetensors(header: Any) -> bytes:
    text = as_json(header)
    return len(text).to_bytes(8, "little") + text + bytes(38)


def header(folder: Path) -> Target:
    def read(content: bytes) -> None:
        (folder / "model.safetensors").write_bytes(content)
        open_source(folder)

    return Target([TENSORS], _safetensors, read, (CheckpointError,))


def index(folder: Path) -> Target:
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (folder / "1.safetensors").write_bytes(_safetensors(TENSORS))
    (folder / "2.safetensors").write_bytes(_safetensors({"c": TENSORS["a"], "b": TENSORS["b"]}))

    def read(content: bytes) -> None:
        (folder / "model.safetensors.index.json").write_bytes(content)
        open_source(folder)

    value = {"metadata": {"total_size": 76}, "weight_map": weight_map}
    return Target([value], as_json, read, (CheckpointError,))


QUANTIZED = dict(
    quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], modules_to_not_convert=["lm_head", "model.layers.0"]
)


def config(folder: Path) -> Target:
    def read(content: bytes) -> None:
        (folder / "config.json").write_bytes(content)
        with suppress(InputError):
            read_config(folder, 2.0)
        cfg = read_config(folder)
        rope_tables(cfg, 24, "cpu")
        hf.sources(cfg, {"a": (4, 2), "b": (3,)})

    values = [transformers.AutoConfig.for_model(name, **keys).to_dict() for name, keys in tiny.CASES.values()]
    values = [value | {"model_type": name} for value, (name, _) in zip(values, tiny.CASES.values(), strict=True)]
    values += [values[0] | {"quantization_config": QUANTIZED}]
    words = {key for value in values for key in value} | {*FAMILIES, *REFUSED}
    return Target(values, as_json, read, (InputError,), junk=(*sorted(words), tiny.YARN, tiny.LONG, tiny.TYPES))


ADAPTER = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none",
           "target_modules": ["q_proj", "v_proj"], "init_lora_weights": True, "use_rslora": False, "use_dora": False,
           "base_model_name_or_path": "m", "fan_in_fan_out": False, "inference_mode": True}  # fmt: skip


def adapter(folder: Path) -> Target:
    """Its config and the header of its weights, parted by a character that JSON has no use for."""
    cfg = uniform("llama", 61, 16, 1, 4, 2, 4, 24, 64, 1e-5, False, rope=Rope(1e4))
    shapes = adapter_shapes(adapted(cfg, Lora(2, 4.0, ("q_proj", "v_proj"))))
    names = peft_names(adapted(cfg, Lora(2, 4.0, ("q_proj", "v_proj"))))
    layout = sequential([(names[name], "F32", shape) for name, shape in shapes.items()])
    header = {"__metadata__": {"format": "pt"}, **list_tensors(layout)}

    def read(content: bytes) -> None:
        said, _, text = content.partition(b"\x1e")
        (folder / "adapter_config.json").write_bytes(said)
        weights = len(text).to_bytes(8, "little") + text + bytes(layout.nbytes)
        (folder / "adapter_model.safetensors").write_bytes(weights)
        read_adapter(folder, cfg, merging=len(content) % 2 == 0)

    write = lambda files: b"\x1e".join(map(as_json, files)) if isinstance(files, list) else as_json(files)
    return Target([[ADAPTER, header], [ADAPTER | {"target_modules": "all-linear"}, header]], write, read, (InputError,))


# ---------------------------------------------------------------- options


def config_yaml(folder: Path) -> Target:
    """As write_config writes it, and as a person does: anchors, tags, blocks."""

    def read(content: bytes) -> None:
        (folder / "config.yaml").write_bytes(content)
        parse(["--config", str(folder / "config.yaml")])

    value = {"model": "m", "data": ["a.jsonl", "b:0.5"], "val": "0.02", "seq_len": 64, "batch-size": 4, "lr": 1e-4,
             "save_every": "30min", "gpu_memory": "24GiB", "betas": [0.9, 0.95], "log": "wandb", "no_pack": True,
             "schedule": "linear", "warmup": 0.1, "adam_bits": 8, "seed": 7, "out": "o", "store": ["s"]}  # fmt: skip
    lines = ["model: m\n", "data:\n", "  - &a a.jsonl\n", "  - *a\n", "val: 0.02\n", "seq-len: 64\n", "lr: 1e-4\n",
             "betas: [0.9, 0.95]\n", "max_steps: 1_000\n", "save_every: >\n", "  30min\n", "# a comment\n"]  # fmt: skip
    junk = ("<<: *a\n", "a: &a [*a]\n", "!!python/object/apply:os.system [x]\n", "? x\n", "--- \n", "%YAML 9.9\n",
            "seed: 0x" + "f" * 5000 + "\n", "max_steps: 1" + ":1" * 300 + "\n", "lr: !!timestamp 2001-99-99\n",
            "model: 2001-02-30\n", "val: !!binary =\n", "data: !!set {a, b}\n", "out: .nan\n", "\t")  # fmt: skip
    write = lambda value: as_text(value) if isinstance(value, list) else as_json(value)
    return Target([value, lines], write, read, (InputError,), junk)


TARGETS = DATA | ROW_TARGETS | {made.__name__: made for made in (header, index, config, adapter, config_yaml)}

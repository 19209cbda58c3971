"""Names of options in axolotl, LLaMA-Factory and TRL, on the command line and in flat YAML: one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.engine.run.options import Options, table
from trireme.models.config import InputError

# fmt: off
NAMES = {
    "adapter": "adapter_name_or_path lora_model_dir", "beta": "pref_beta", "chat_template": "template",
    "batch_size": "per_device_train_batch_size", "data": "dataset", "dtype": "torch_dtype",
    "epochs": "num_train_epochs num_epochs", "eval_every": "eval_steps", "keep": "save_total_limit",
    "labels": "num_labels", "log": "report_to", "lora": "lora_r lora_rank",
    "lora_targets": "lora_target lora_target_modules target_modules", "lr": "learning_rate", "max_steps": "iters",
    "method": "rl", "micro_batch": "micro_batch_size", "model": "model_name_or_path base_model",
    "neftune": "neftune_noise_alpha", "out": "output_dir", "patience": "early_stopping_patience",
    "resume": "resume_from_checkpoint", "router_aux": "moe_aux_loss_coef router_aux_loss_coef",
    "save_every": "save_steps", "schedule": "lr_scheduler_type lr_scheduler", "system": "default_system",
    "seq_len": "max_length cutoff_len max_seq_length sequence_len max_seq_len", "val": "val_size val_set_size",
    "warmup": "warmup_steps warmup_ratio",
}
EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
# Keys -> values that mean something else here -> our options with theirs, which give way to what is set by name.
MEANINGS: dict[str, dict[str, dict[str, Any]]] = {
    "packing sample_packing": {"true": {}, "false": {"no_pack": True}},
    "bf16": {"true": {}, "auto": {}, "false": {"dtype": "fp32"}},
    "optim optimizer": {"adamw": {}, "adamw_torch": {}, "adamw_torch_fused": {}}
                       | dict.fromkeys(EIGHT_BITS, {"adam_bits": 8}),
    "load_in_4bit": {"true": {"base": "nf4"}}, "quantization_bit": {"4": {"base": "nf4"}},
    "finetuning_type adapter": {"full": {}, "lora": {"lora": 8}, "qlora": {"lora": 8, "base": "nf4"}},
    "use_peft": {"true": {"lora": 16}}, "lora_target_linear": {"true": {"lora_targets": ["all-linear"]}},
    "stage": {"sft": {}, "pt": {}, "dpo": {"method": "dpo"}, "kto": {"method": "kto"}, "rm": {"method": "reward"}},
    "torch_dtype": {"bfloat16": {"dtype": "bf16"}, "float32": {"dtype": "fp32"}},
    "report_to": {"none": {}}, "val_set_size val_size": {"0": {}, "0.0": {}},
    "do_train gradient_checkpointing flash_attention": {"true": {}},  # as it is here
}
# fmt: on
FIELD_OF: dict[str, str] = {alias: name for name, names in NAMES.items() for alias in names.split()}


def translated(values: Mapping[str, Any], ours: Mapping[str, Any] | None = None, where: str = "") -> dict[str, Any]:
    """Values by option, of names and values of others; unknown names stay. What is empty, or false and unknown, asks
    for nothing. `ours`: values of our options besides. Raises InputError if an option is named twice.
    """
    left = {key.replace("-", "_"): value for key, value in values.items() if value not in (None, [], {})}
    named, implied = dict[str, Any](ours or {}), dict[str, Any]()
    sizes = [key for key in ("per_device_train_batch_size", "micro_batch_size") if str(left.get(key)).isdecimal()]
    if sizes and str(left.get("gradient_accumulation_steps")).isdecimal():
        left["batch_size"] = int(left.pop(sizes[0])) * int(left.pop("gradient_accumulation_steps"))
    for key, value in left.items():
        name, text = FIELD_OF.get(key, key), str(value).lower()
        meaning = next((of[text] for keys, of in MEANINGS.items() if key in keys.split() and text in of), None)
        if meaning is None and name in named:
            raise InputError(f"{where}{key}: {name} is given twice. Leave one out.")
        if meaning is None and (name in table(Options) or text not in ("false", "")):
            named[name] = value
        implied |= meaning or {}
    return {name: value for name, value in implied.items() if name != "lora" or "adapter" not in named} | named

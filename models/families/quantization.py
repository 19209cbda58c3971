"""config.json's "quantization_config": which matrices are packed, and how; others are refused by name. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from trireme.models.families.keys import InputError, Keys
from trireme.models.families.names import Names
from trireme.models.families.packing import (
    BY_ROW,
    BYTES,
    FP4,
    FP8,
    INT4,
    INT4_ZEROS,
    MODELOPT,
    MX,
    MXFP4,
    NF4,
    NVFP4,
    WHOLE,
    Packing,
)

SETTINGS = ("quantization_config", "compression_config")


def packing_of(
    keys: Keys, accepted: tuple[str, ...], names: Names, carried: tuple[str, ...]
) -> tuple[Packing | None, tuple[str, ...]]:
    """(the packing, globs over names in memory of what is packed), or (None, ()) without a "quantization_config".

    `accepted` are the family's values of quant_method, `carried` what names of tensors begin with that are only copied.
    Raises InputError for other methods, and for settings that would change the numbers.
    """
    settings = settings_of(keys.raw, keys.source)
    if keys.raw.get("quantization"):
        raise _unsupported(keys.source, "MLX", f"for a {keys.raw.get('model_type')}", "quantization")
    if settings is None:
        return None, ()
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method in accepted and isinstance(method, str):
        settings, left = _drop_copied(settings, carried) if method == "compressed-tensors" else (settings, False)
        packing, packed = READ[method](Keys(settings, f"{keys.source}: quantization_config"), names)
        return (replace(packing, left=carried) if left else packing), packed
    raise _unsupported(keys.source, method, f"for a {keys.raw.get('model_type')}")


def settings_of(raw: dict[str, Any], source: str) -> Any:
    """quantization_config of a config.json, or compression_config, as early releases of compressed-tensors call it.

    Raises InputError where both are there and differ.
    """
    values = [raw[name] for name in SETTINGS if raw.get(name) is not None]
    if any(value != values[0] for value in values[1:]):
        raise InputError(
            f"{source}: {' and '.join(map(json.dumps, SETTINGS))} are two names of one key, but differ. Remove one."
        )
    return values[0] if values else None


def _drop_copied(settings: dict[str, Any], carried: tuple[str, ...]) -> tuple[dict[str, Any], bool]:
    """(quantization_config without groups that are only of tensors which are copied, whether there were any).

    A group with the settings of another one stays.
    """
    groups = settings.get("config_groups")
    if not isinstance(groups, dict):
        return settings, False
    selected = {name: group for name, group in groups.items() if not _is_of(group, carried)}
    if {*map(_settings, groups.values())} == {*map(_settings, selected.values())}:
        return settings, False  # all are packed in one way
    return settings | {"config_groups": selected}, True


def _settings(group: Any) -> str:
    """A group without its targets."""
    return json.dumps(group | {"targets": None} if isinstance(group, dict) else group, sort_keys=True)


def _is_of(group: Any, carried: tuple[str, ...]) -> bool:
    """Whether a group's targets are all regular expressions of names that begin so, without alternatives."""
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(targets, list) or not targets or any(type(t) is not str or "|" in t for t in targets):
        return False
    return all(target.startswith("re:") and _glob(target).lstrip(".*").startswith(carried) for target in targets)


def _unsupported(source: str, method: object, scope: str, key: str = "quantization_config") -> InputError:
    printable = isinstance(method, str) and method.isprintable() and len(method) < 60
    description = f"quantized by {method}" if printable else "quantized in a way that it does not name"
    return InputError(
        f'{source}: "{key}" says that the weights are {description}, which is not supported {scope}. '
        "Take the BF16 original, or convert them."
    )


def _fp8(keys: Keys, names: Names) -> tuple[Packing, tuple[str, ...]]:
    keys.only(
        fmt=(None, "e4m3", "float8_e4m3fn"), expert_dtype=(None, "fp8", "fp4"), scale_fmt=(None, "float", "ue8m0")
    )
    block = FP8.block
    if "weight_block_size" in keys.raw:
        block = (WHOLE, WHOLE) if keys.raw["weight_block_size"] is None else _pair(keys, "weight_block_size")
    packing = FP8.scaled(*block)
    if keys.raw.get("scale_fmt") == "ue8m0":  # DeepSeek-V3.1 has such scales in fp32
        codes, scales = packing.parts
        packing = replace(packing, parts=(codes, replace(scales, dtypes=(*BYTES[::-1], "F32", "BF16"))))
    if keys.raw.get("expert_dtype") == "fp4":
        packing = replace(packing, experts=FP4)
    return packing, _blocks(names, _left_out(keys))


def _nf4(keys: Keys, names: Names) -> tuple[Packing, tuple[str, ...]]:
    keys.only(load_in_8bit=(None, False), load_in_4bit=(True,), bnb_4bit_quant_storage=(None, "uint8"))
    keys.refuse_unless("bnb_4bit_quant_type", ("nf4",), "fp4")
    return NF4, _blocks(names, _left_out(keys, "llm_int8_skip_modules"))


def _modelopt(keys: Keys, names: Names) -> tuple[Packing, tuple[str, ...]]:
    keys.refuse_unless("quant_algo", ("NVFP4", "W4A16_NVFP4", "FP8"))
    packing = BY_ROW.scaled(WHOLE, WHOLE) if keys.raw["quant_algo"] == "FP8" else MODELOPT
    keys.refuse_unless("group_size", (None, 16))
    return packing, _blocks(names, _left_out(keys, "ignore", "exclude_modules"))


def _compressed(keys: Keys, names: Names) -> tuple[Packing, tuple[str, ...]]:
    form = keys.raw.get("format")
    if not isinstance(form, str) or form not in FORMATS:
        detail = f"but in the formats {', '.join(FORMATS)}, not {keys.shown('format')}"
        raise _unsupported(keys.source, "compressed-tensors", detail)
    if keys.raw.get("transform_config"):
        raise keys.error("transform_config", "none: rotated weights are not supported")
    sparsity = keys.raw.get("sparsity_config") or {}
    sparsity = sparsity if isinstance(sparsity, dict) else {"format": sparsity}
    Keys(sparsity, f"{keys.source}: sparsity_config").refuse_unless("format", (None, "dense"))
    groups = keys.raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise keys.error("config_groups", "an object of groups")
    packings = {FORMATS[form](_weights(keys, name, group)) for name, group in groups.items() if not _unweighted(group)}
    if not packings:
        raise keys.error("config_groups", 'a group with "weights"')
    if len(packings) > 1:
        raise InputError(f"{keys.source}: its groups have scales of several shapes, which is not supported.")
    start = lambda module: "*" * (module.startswith("re:") and not module.endswith("$"))  # which a name begins with
    left_out = [_glob(name) + start(name) for module in _left_out(keys, "ignore") for name in _alternatives(module)]
    return packings.pop(), _blocks(names, left_out, exact=True)


def _unweighted(group: Any) -> bool:
    """Whether a group is not of weights but, for example, of attention's cache."""
    return isinstance(group, dict) and "weights" in group and group["weights"] is None


def _weights(keys: Keys, name: str, group: Any) -> Keys:
    """The settings for weights in one of "config_groups"."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        source = f"{keys.source}: config_groups: {json.dumps(name)[:40]}"
        raise InputError(f'{source} has no "weights", which say how they are packed.')
    Keys(group, f"{keys.source}: {json.dumps(name)[:40]}").refuse_unless("format", (None, keys.raw["format"]))
    return Keys(weights, f"{keys.source}: weights")


def _float(weights: Keys) -> Packing:
    """fp8 with scales by row, tensor, block, or group of columns."""
    weights.only(num_bits=(8,), type=("float",), strategy=("channel", "tensor", "block", "group"))
    weights.refuse_unless("symmetric", (True,), True)
    if weights.raw["strategy"] == "block":
        return BY_ROW.scaled(*_pair(weights, "block_structure"))
    if weights.raw["strategy"] == "group":
        return BY_ROW.scaled(1, _group(weights))
    return BY_ROW.scaled(1 if weights.raw["strategy"] == "channel" else WHOLE, WHOLE)


def _mxfp8(weights: Keys) -> Packing:
    """fp8 with a power of two by group of columns."""
    weights.only(strategy=("group",), group_size=(MX.block[1],))
    packing = _float(weights)
    codes, scales = packing.parts
    return replace(packing, parts=(codes, replace(scales, dtypes=BYTES)))


def _int4(weights: Keys) -> Packing:
    weights.only(num_bits=(4,), type=("int",), strategy=("group", "channel"))
    weights.refuse_unless("actorder", (None, False, "static", "weight"))  # others have columns in an order of their own
    size = _group(weights) if weights.raw["strategy"] == "group" else WHOLE
    return replace(INT4 if weights.flag("symmetric", True) else INT4_ZEROS, block=(1, size))


def _fp4(packing: Packing, strategy: str, weights: Keys) -> Packing:
    weights.only(num_bits=(4,), type=("float",), strategy=(strategy,), group_size=(packing.block[1],))
    weights.refuse_unless("symmetric", (True,), True)
    return packing


def _group(keys: Keys) -> int:
    """Columns that share a scale; -1 is all."""
    return WHOLE if keys.raw.get("group_size") == -1 else keys.count("group_size", limit=1 << 20)


def _pair(keys: Keys, name: str) -> tuple[int, int]:
    pair = keys.raw.get(name)
    if not isinstance(pair, list) or len(pair) != 2 or any(type(n) is not int or not 0 < n < 1 << 20 for n in pair):
        raise keys.error(name, "two positive integers")
    return pair[0], pair[1]


def _glob(module: str) -> str:
    """A glob for a module name, or roughly for a regular expression (re:...)."""
    return module.removeprefix("re:").strip("^$").replace("\\", "") if module.startswith("re:") else module


def _alternatives(module: str) -> list[str]:
    """A regular expression without a choice (a|b), for each alternative; a name as it is."""
    choice = re.search(r"\(([^()]*\|[^()]*)\)", module) if module.startswith("re:") else None
    if choice is None:
        return [module]
    before, after = module[: choice.start()], module[choice.end() :]
    return [name for branch in choice[1].split("|") for name in _alternatives(before + branch + after)]


def _left_out(keys: Keys, *key_names: str) -> list[str]:
    """The modules that are not quantized, by whichever key names them."""
    candidates = ("modules_to_not_convert", "ignored_layers", *key_names)
    name = next((name for name in candidates if keys.raw.get(name) is not None), candidates[0])
    modules: Any = keys.raw.get(name) or []
    if not isinstance(modules, list) or any(type(module) is not str for module in modules):
        raise keys.error(name, "a list of names of modules")
    return modules


def _blocks(names: Names, left_out: list[str], exact: bool = False) -> tuple[str, ...]:
    """Globs over all matrices of blocks but routers, convolutions and modules in `left_out`; what is packed is then
    seen in files.

    `exact`: modules within those are not left out.
    """
    inner = "*" + names.block.removeprefix(names.base).format("*")  # also within a wrapper
    globs = [
        f"{inner}*",
        *(f"!{inner}{name}.weight" for name in (names.mlp.router, names.mlp.shared_gate, names.mixer.conv) if name),
    ]
    for module in (name.replace(".*", "*") for name in left_out):
        globs += [*(() if exact else (f"!{module}", f"!{module}.*")), f"!*{module}.weight"]
    return tuple(globs)


FORMATS: dict[str, Callable[[Keys], Packing]] = {
    "float-quantized": _float,
    "naive-quantized": _float,  # the same, as older releases call it
    "mxfp8-quantized": _mxfp8,
    "pack-quantized": _int4,
    "nvfp4-pack-quantized": partial(_fp4, NVFP4, "tensor_group"),
    "mxfp4-pack-quantized": partial(_fp4, MX, "group"),
}
READ: dict[str, Callable[[Keys, Names], tuple[Packing, tuple[str, ...]]]] = {
    "mxfp4": lambda *_: (MXFP4, MXFP4.globs),
    "fp8": _fp8,
    "fbgemm_fp8": lambda keys, names: (BY_ROW, _blocks(names, _left_out(keys))),
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "bitsandbytes": _nf4,
}

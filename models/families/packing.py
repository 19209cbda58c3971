"""Packings: matrices in fewer bits, as files have them; a row for each. No torch.

A matrix lies in a file as several parts, its codes and their scales. A frozen one keeps its parts wherever it is stored
and is decoded on the GPU next to its GEMMs (models/packed.py); a trained one is decoded once, as it is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from trireme.models.families.keys import InputError, Keys
from trireme.models.families.names import Names

Shape = tuple[int, ...]
WHOLE = 1 << 30  # rows or columns of a block: all
BYTES = ("U8", "F8_E8M0")  # powers of two with a bias of 127


@dataclass(frozen=True)
class Part:
    """A tensor of a packed matrix."""

    suffix: str  # in memory, behind the matrix's name
    stored: str  # in files, behind the matrix's name
    dtypes: tuple[str, ...]  # that it may have in files; of a matrix that is read, or planned, the first

    @property
    def itemsize(self) -> int:
        return {"F32": 4, "BF16": 2}.get(self.dtypes[0], 1)


@dataclass(frozen=True)
class Packing:
    """How matrices are packed."""

    word: str  # for the user
    method: str  # quant_method in config.json
    code: Literal["e2m1", "e4m3", "nf4"]  # of a number: how models/packed.py decodes them
    parts: tuple[Part, ...]  # codes first, then scales
    block: tuple[int, int]  # rows and columns of codes that share a scale; last ones may be short
    shaped: str  # dtypes and shapes of the parts, for the user
    globs: tuple[str, ...] = ()  # over names in memory: what releases have packed; (): all matrices of blocks

    def scaled(self, rows: int, columns: int) -> Packing:
        """With blocks of that size."""
        block = "[out / {block[0]}, in / {block[1]}], rounded up"
        sizes = {(WHOLE, WHOLE): "[1]", (1, WHOLE): "[out, 1]"}.get((rows, columns), block)
        return replace(self, block=(rows, columns), shaped="F8_E4M3 [out, in] and {dtypes} " + sizes)

    def suits(self, shape: Shape, parts: tuple[Shape, ...]) -> bool:
        """Whether parts have the shapes of a matrix's; a single scale may have fewer dimensions."""
        wanted = self.shapes(shape)
        single = lambda a, b: set(a) == {1} and set(b) <= {1} and len(b) < len(a)
        return all(a == b or single(a, b) for a, b in zip(wanted, parts, strict=True))

    @property
    def wants(self) -> str:
        """`shaped`, of these files."""
        return self.shaped.format(block=self.block, dtypes=" or ".join(self.parts[1].dtypes))

    @property
    def exact(self) -> bool:
        """Whether bf16 holds every value."""
        return self.code == "e2m1"

    def part_of(self, name: str) -> Part | None:
        """Of a tensor in memory."""
        return next((part for part in self.parts if name.endswith(part.suffix)), None)

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Of the parts of a matrix, given its shape as a file would have it decoded."""
        *lead, rows, columns = shape
        if self.code == "e2m1":  # (in, out), of parts (out, in)
            scales = (*lead, columns, rows // self.block[1])
            return (*scales, self.block[1] // 2), scales
        if self.code == "nf4":  # blocks of the flattened matrix
            return (*lead, rows, columns // 2), (*lead, -(-rows * columns // self.block[1]), 1)
        return shape, (*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))

    def step(self, shape: Shape) -> int:
        """Rows of a matrix after which a block ends."""
        if self.code == "nf4":
            return self.block[1] // gcd(self.block[1], shape[-1])
        return self.block[0] if self.block[0] < shape[0] else 1

    def starts(self, shape: Shape, row: int) -> tuple[int, ...]:
        """The rows of parts where a row of a matrix begins that begins a block; or an expert of several."""
        if len(shape) == 3:
            return row, row
        return row, row * shape[-1] // self.block[1] if self.code == "nf4" else row // self.block[0]

    def decoded(self, codes: Shape) -> Shape | None:
        """The inverse of `shapes`, given that of the codes; None where they can have no such shape."""
        if self.code == "e2m1":
            return (codes[0], codes[2] * self.block[1], codes[1]) if len(codes) == 4 else None
        return codes if len(codes) in (2, 3) else None

    def with_dtypes(self, dtypes: tuple[str, ...]) -> Packing:
        """As a checkpoint has it, whose parts are of these."""
        return replace(self, parts=tuple(replace(p, dtypes=(d,)) for p, d in zip(self.parts, dtypes, strict=True)))


MXFP4 = Packing(  # as gpt-oss has its experts: two numbers in a byte, 32 with a power of two
    "MXFP4",
    "mxfp4",
    "e2m1",
    (Part("_blocks", "_blocks", ("U8",)), Part("_scales", "_scales", ("U8",))),
    block=(1, 32),
    shaped="U8 [E, out, in / 32, 16] and U8 [E, out, in / 32]",
    globs=("*.experts.gate_up_proj", "*.experts.down_proj"),
)
CODES, SCALES = Part("_codes", "", ("F8_E4M3",)), ("F32", "BF16", *BYTES)
FP8 = Packing(  # as DeepSeek, Qwen and MiniMax have it: the scale's name lies, it multiplies
    "fp8",
    "fp8",
    "e4m3",
    (CODES, Part("_scale_inv", "_scale_inv", SCALES)),
    block=(128, 128),
    shaped="F8_E4M3 [out, in] and {dtypes} [out / {block[0]}, in / {block[1]}], rounded up",
)
BY_ROW = replace(  # as Meta has it
    FP8,
    method="fbgemm_fp8",
    parts=(CODES, Part("_scales", "_scale", SCALES)),
    block=(1, WHOLE),
    shaped="F8_E4M3 [out, in] and {dtypes} [out, 1]",
)
COMPRESSED = replace(BY_ROW, method="compressed-tensors")  # by row, tensor or block, as config.json says
NF4 = Packing(  # as bitsandbytes writes it; scales that are packed again are decoded as they are read
    "NF4",
    "bitsandbytes",
    "nf4",
    (Part("_codes", "", ("U8",)), Part("_scales", ".absmax", ("F32",))),
    block=(1, 64),
    shaped="U8 [out * in / 2, 1], F32 or U8 [out * in / 64] and the state of the quantizer",
)
PACKINGS = (MXFP4, FP8, BY_ROW, COMPRESSED, NF4)
# Ends of names: of activations and of a cache, which are not quantized here.
UNUSED = (".activation_scale", ".input_scale", ".input_scale_ub", ".output_scale", ".k_scale", ".v_scale", ".q_scale")


def packing_of(keys: Keys, accepted: tuple[str, ...], names: Names) -> tuple[Packing | None, tuple[str, ...]]:
    """(what "quantization_config" says, globs over names in memory: what is packed). `accepted`: methods of the family.

    Raises InputError on other methods, and on what changes the numbers.
    """
    found = keys.raw.get("quantization_config")
    if found is None:
        return None, ()
    method = found.get("quant_method") if isinstance(found, dict) else None
    for packing in PACKINGS:
        if method == packing.method and method in accepted:
            read = READ.get(packing.method)
            inner = Keys(found, f"{keys.where}: quantization_config")
            return read(inner, packing, names) if read else (packing, packing.globs)
    raise _unsupported(keys.where, method, f"for a {keys.raw.get('model_type')}")


def _unsupported(where: str, method: object, what: str) -> InputError:
    named = isinstance(method, str) and method.isprintable() and len(method) < 60
    how = f"quantized by {method}" if named else "quantized in a way that it does not name"
    return InputError(
        f'{where}: "quantization_config" says that the weights are {how}, which is not supported {what}. '
        "Take the BF16 original, or convert them."
    )


def _fp8(keys: Keys, packing: Packing, names: Names) -> tuple[Packing, tuple[str, ...]]:
    keys.refuse_unless("fmt", (None, "e4m3", "float8_e4m3fn"))
    keys.refuse_unless("expert_dtype", (None, "fp8"))
    keys.refuse_unless("scale_fmt", (None, "float", "ue8m0"))
    block = packing.block
    if "weight_block_size" in keys.raw:
        block = (WHOLE, WHOLE) if keys.raw["weight_block_size"] is None else _pair(keys, "weight_block_size")
    packing = packing.scaled(*block)
    if keys.raw.get("scale_fmt") == "ue8m0":
        packing = packing.with_dtypes(("F8_E4M3", "F8_E8M0"))
    return packing, _blocks(names, _left_out(keys))


def _by_row(keys: Keys, packing: Packing, names: Names) -> tuple[Packing, tuple[str, ...]]:
    return packing, _blocks(names, _left_out(keys))


def _nf4(keys: Keys, packing: Packing, names: Names) -> tuple[Packing, tuple[str, ...]]:
    keys.refuse_unless("load_in_8bit", (None, False))
    keys.refuse_unless("load_in_4bit", (True,))
    keys.refuse_unless("bnb_4bit_quant_type", ("nf4",), "fp4")
    keys.refuse_unless("bnb_4bit_quant_storage", (None, "uint8"))
    return packing, _blocks(names, _left_out(keys, "llm_int8_skip_modules"))


def _compressed(keys: Keys, packing: Packing, names: Names) -> tuple[Packing, tuple[str, ...]]:
    """fp8 with scales by row, tensor or block."""
    if keys.raw.get("format") != "float-quantized":
        raise _unsupported(keys.where, packing.method, f"but in the format float-quantized, not {keys.shown('format')}")
    if keys.raw.get("transform_config"):
        raise keys.error("transform_config", "none: rotated weights are not supported")
    sparsity = keys.raw.get("sparsity_config") or {}
    sparsity = sparsity if isinstance(sparsity, dict) else {"format": sparsity}
    Keys(sparsity, f"{keys.where}: sparsity_config").refuse_unless("format", (None, "dense"))
    groups = keys.raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise keys.error("config_groups", "an object of groups")
    found = {_strategy(keys, name, group) for name, group in groups.items()}
    if len(found) > 1:
        raise InputError(f"{keys.where}: its groups have scales of several shapes, which is not supported.")
    (block,) = found
    return packing.scaled(*block), _blocks(names, [_glob(module) for module in _left_out(keys, "ignore")])


def _strategy(keys: Keys, name: str, group: Any) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        where = f"{keys.where}: config_groups: {json.dumps(name)[:40]}"
        raise InputError(f'{where} has no "weights", which say how they are packed.')
    inner = Keys(weights, f"{keys.where}: weights")
    inner.refuse_unless("num_bits", (8,))
    inner.refuse_unless("type", ("float",))
    inner.refuse_unless("symmetric", (True,), True)
    inner.refuse_unless("strategy", ("channel", "tensor", "block"))
    if weights["strategy"] == "block":
        rows, columns = _pair(inner, "block_structure")
        return rows, columns
    return (1 if weights["strategy"] == "channel" else WHOLE), WHOLE


def _pair(keys: Keys, name: str) -> tuple[int, int]:
    found = keys.raw.get(name)
    if not isinstance(found, list) or len(found) != 2 or any(type(n) is not int or not 0 < n < 1 << 20 for n in found):
        raise keys.error(name, "two positive integers")
    return found[0], found[1]


def _glob(module: str) -> str:
    """About what a regular expression (re:...) says."""
    return module.removeprefix("re:").strip("^$").replace("\\", "") if module.startswith("re:") else module


def _left_out(keys: Keys, *others: str) -> list[str]:
    """Modules that are not quantized."""
    spelled = ("modules_to_not_convert", "ignored_layers", *others)
    name = next((name for name in spelled if keys.raw.get(name) is not None), spelled[0])
    found: Any = keys.raw.get(name) or []
    if not isinstance(found, list) or any(type(module) is not str for module in found):
        raise keys.error(name, "a list of names of modules")
    return found


def _blocks(names: Names, left_out: list[str]) -> tuple[str, ...]:
    """Globs over all matrices of blocks but routers and those of modules `left_out`. Files say it exactly."""
    inner = "*" + names.block.removeprefix(names.base).format("*")  # also within a wrapper
    found = [f"{inner}*", *(f"!{inner}{name}.weight" for name in (names.router, names.shared_gate) if name)]
    for module in (name.replace(".*", "*") for name in left_out):
        found += [f"!{module}", f"!{module}.*", f"!*{module}.weight"]
    return tuple(found)


READ = {"fp8": _fp8, "fbgemm_fp8": _by_row, "compressed-tensors": _compressed, "bitsandbytes": _nf4}

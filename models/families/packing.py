"""Packings: matrices in fewer bits, as files have them; a row for each. No torch.

A matrix lies in a file as several parts, its codes and their scales. A frozen one keeps its parts wherever it is stored
and is decoded on the GPU next to its GEMMs (models/packed.py); a trained one is decoded once, as it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from trireme.models.families.keys import InputError, Keys
from trireme.models.families.names import Names

Shape = tuple[int, ...]
BYTES = ("U8", "F8_E8M0")  # powers of two with a bias of 127


@dataclass(frozen=True)
class Part:
    """A tensor of a packed matrix."""

    suffix: str  # in memory, behind the matrix's name
    stored: str  # in files, behind the matrix's name
    dtypes: tuple[str, ...]  # that it may have in files; of a matrix that is read, or planned, the first


@dataclass(frozen=True)
class Packing:
    """How matrices are packed."""

    word: str  # for the user
    method: str  # quant_method in config.json
    code: Literal["e2m1", "e4m3"]  # of a number: how models/packed.py decodes them
    parts: tuple[Part, ...]  # codes first, then scales
    block: tuple[int, int]  # rows and columns of codes that share a scale; last ones may be short
    shaped: str  # dtypes and shapes of the parts, for the user
    globs: tuple[str, ...] = ()  # over names in memory: what releases have packed; (): all matrices of blocks

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
        return shape, (*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))

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
FP8 = Packing(  # as DeepSeek, Qwen and MiniMax have it: the scale's name lies, it multiplies
    "fp8",
    "fp8",
    "e4m3",
    (Part("_codes", "", ("F8_E4M3",)), Part("_scale_inv", "_scale_inv", ("F32", "BF16", *BYTES))),
    block=(128, 128),
    shaped="F8_E4M3 [out, in] and {dtypes} [out / {block[0]}, in / {block[1]}], rounded up",
)
PACKINGS = (MXFP4, FP8)
UNUSED = (".activation_scale", ".input_scale")  # ends of names: of activations, which are not quantized here


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
            if packing.code == "e4m3":
                return _fp8(Keys(found, f"{keys.where}: quantization_config"), packing, names)
            return packing, packing.globs
    named = isinstance(method, str) and method.isprintable() and len(method) < 60
    how = f"quantized by {method}" if named else "quantized in a way that it does not name"
    raise InputError(
        f'{keys.where}: "quantization_config" says that the weights are {how}, which is not supported for a '
        f"{keys.raw.get('model_type')}. Take the BF16 original, or convert them."
    )


def _fp8(keys: Keys, packing: Packing, names: Names) -> tuple[Packing, tuple[str, ...]]:
    keys.refuse_unless("fmt", (None, "e4m3", "float8_e4m3fn"))
    keys.refuse_unless("expert_dtype", (None, "fp8"))
    keys.refuse_unless("scale_fmt", (None, "float", "ue8m0"))
    block = keys.raw.get("weight_block_size", list(packing.block))
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or not 0 < n < 1 << 20 for n in block):
        raise keys.error("weight_block_size", "two positive integers")
    packing = replace(packing, block=(block[0], block[1]))
    if keys.raw.get("scale_fmt") == "ue8m0":
        packing = packing.with_dtypes(("F8_E4M3", "F8_E8M0"))
    return packing, _blocks(names, _left_out(keys))


def _left_out(keys: Keys) -> list[str]:
    """Modules that are not quantized."""
    name = "ignored_layers" if keys.raw.get("modules_to_not_convert") is None else "modules_to_not_convert"
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

"""Packings: how files hold matrices in fewer bits, with a Packing for each format. No torch.

A matrix lies in a file as several parts, its codes and their scales. A frozen one keeps its parts wherever it is stored
and is decoded on the GPU next to its GEMMs (models/packed.py); a trained one is decoded once, as it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

Shape = tuple[int, ...]
WHOLE = 1 << 30  # rows or columns of a block: all
BYTES = ("U8", "F8_E8M0")  # powers of two with a bias of 127


@dataclass(frozen=True)
class Part:
    """One of the tensors that a packed matrix consists of."""

    suffix: str  # in memory, behind the matrix's name
    stored: str  # in files, behind the name of the matrix, or of its module
    dtypes: tuple[str, ...]  # that it may have in files; of a matrix that is read, or planned, the first
    word: str = "scales"  # for the user

    @property
    def itemsize(self) -> int:
        return {"F32": 4, "I32": 4, "BF16": 2, "F16": 2}.get(self.dtypes[0], 1)


@dataclass(frozen=True)
class Packing:
    """One format of packed matrices."""

    word: str  # for the user
    code: Literal["e2m1", "fp4", "e4m3", "nf4", "int4"]  # of a number: how models/packed.py decodes them
    parts: tuple[Part, ...]  # codes, scales, and what some have besides: zero points, groups; a scale of the scales
    block: tuple[int, int]  # rows and columns of codes that share a scale; last ones may be short
    shaped: str  # dtypes and shapes of the parts, for the user
    globs: tuple[str, ...] = ()  # over names in memory: what releases have packed; (): all matrices of blocks
    divides: bool = False  # of fp4: scales are divided by that of the scales
    experts: Packing | None = None  # of experts, in parts of the same names, where theirs is another
    checked: tuple[str, ...] = ()  # ends of names, as `stored`, of what parts.py checks and nothing else needs
    left: tuple[str, ...] = ()  # what names of tensors begin with that are packed in another way: they are copied

    def of(self, name: str) -> Packing:
        """The packing of a tensor by its name: experts may have another one."""
        return self.experts if self.experts and ".experts." in name else self

    def scaled(self, rows: int, columns: int) -> Packing:
        """This fp8 packing with blocks of so many rows and columns."""
        block = "[out / {block[0]}, in / {block[1]}], rounded up"
        sizes = {(WHOLE, WHOLE): "[1]", (1, WHOLE): "[out, 1]"}.get((rows, columns), block)
        return replace(self, block=(rows, columns), shaped="F8_E4M3 [out, in] and {dtypes} " + sizes)

    def suits(self, shape: Shape, parts: tuple[Shape, ...]) -> bool:
        """Whether a matrix of `shape` can have `parts` of these shapes; a single scale may have fewer dimensions."""
        wanted = self.shapes(shape)
        single = lambda a, b: set(a) == {1} and set(b) <= {1} and len(b) < len(a)
        return all(a == b or single(a, b) for a, b in zip(wanted, parts, strict=True))

    @property
    def wants(self) -> str:
        """`shaped` with the block sizes and dtypes of these files."""
        groups = "1" if self.block[1] == WHOLE else f"in / {self.block[1]}"
        return self.shaped.format(block=self.block, groups=groups, dtypes=" or ".join(self.parts[1].dtypes))

    @property
    def exact(self) -> bool:
        """Whether bf16 holds every decoded value exactly."""
        return self.code in ("e2m1", "fp4") and len(self.parts) == 2  # their experts are not others

    def part_of(self, name: str) -> Part | None:
        """The part that a tensor in memory is, by its name; None for other tensors."""
        return next((part for part in self.parts if name.endswith(part.suffix)), None)

    def holds(self, shape: Shape) -> bool:
        """Whether a matrix of this shape, or each of several, can be packed so."""
        rows, columns = shape[-2:]
        if self.code == "int4":
            return columns % min(self.block[1], columns) == 0 and columns % 8 == self.block[1] % 8 == 0
        if self.code == "e2m1":
            return rows % self.block[1] == 0
        return columns % {"nf4": 2, "fp4": self.block[1]}.get(self.code, 1) == 0

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The shapes of the parts of a matrix, given its shape as a file would have it decoded."""
        *lead, rows, columns = shape
        groups = -(-columns // self.block[1])
        if self.code == "e2m1":  # (in, out), of parts (out, in)
            scales = (*lead, columns, rows // self.block[1])
            return (*scales, self.block[1] // 2), scales
        if self.code == "nf4":  # blocks of the flattened matrix
            return (*lead, rows, columns // 2), (*lead, -(-rows * columns // self.block[1]), 1)
        shapes = {
            "e4m3": ((rows, columns), (-(-rows // self.block[0]), groups)),
            "fp4": ((rows, columns // 2), (rows, groups), (1, 1)),
            "int4": ((rows, columns // 8), (rows, groups), (-(-rows // 8), groups)),
        }[self.code]
        return tuple((*lead, *dims) for dims in shapes[: len(self.parts)])

    def step(self, shape: Shape) -> int:
        """The rows of a matrix in a block, or in a word of zero points: parts can be divided there."""
        if self.code == "e2m1":
            return shape[0]
        if self.code == "nf4":
            return self.block[1] // gcd(self.block[1], shape[-1])
        if self.code == "int4":
            return 8
        return 1 if self.block[0] == WHOLE else min(self.block[0], shape[0])

    def starts(self, shape: Shape, row: int) -> tuple[int, ...]:
        """Where in each part the values of row `row` of a matrix begin, which must begin a block; or of expert `row`.

        In rows of the part.
        """
        if len(shape) == 3:
            return (row,) * len(self.parts)
        if self.code == "nf4":
            return row, row * shape[-1] // self.block[1]
        rows = {
            "fp4": (row, row, 0),
            "int4": (row, row, row // 8),
        }.get(self.code, (row, row // self.block[0]))
        return rows[: len(self.parts)]

    def decoded(self, codes: Shape) -> Shape | None:
        """The shape of the decoded matrix, given that of its codes; None where codes cannot have that shape."""
        if self.code == "e2m1":
            return (codes[0], codes[2] * self.block[1], codes[1]) if len(codes) == 4 else None
        if self.code in ("fp4", "int4"):
            if len(codes) != 2:
                return None
            shape = codes[0], (2 if self.code == "fp4" else 8) * codes[1]
            return shape if self.holds(shape) else None
        return codes if len(codes) in (2, 3) else None

    def with_dtypes(self, dtypes: tuple[str, ...]) -> Packing:
        """This packing with the dtypes that the parts have in a checkpoint."""
        return replace(self, parts=tuple(replace(p, dtypes=(d,)) for p, d in zip(self.parts, dtypes, strict=True)))


MXFP4 = Packing(  # as gpt-oss has its experts: two numbers in a byte, 32 with a power of two
    "MXFP4",
    "e2m1",
    (Part("_blocks", "_blocks", ("U8",)), Part("_scales", "_scales", ("U8",))),
    block=(1, 32),
    shaped="U8 [E, out, in / 32, 16] and U8 [E, out, in / 32]",
    globs=("*.experts.gate_up_proj", "*.experts.down_proj"),
)
CODES, SCALES = Part("_codes", "", ("F8_E4M3",)), ("F32", "BF16", "F16", *BYTES)
FP8 = Packing(  # as DeepSeek, Qwen and MiniMax have it: the scale's name lies, it multiplies
    "fp8",
    "e4m3",
    (CODES, Part("_scale_inv", "_scale_inv", SCALES)),
    block=(128, 128),
    shaped="F8_E4M3 [out, in] and {dtypes} [out / {block[0]}, in / {block[1]}], rounded up",
)
BY_ROW = replace(  # as Meta has it; by row, tensor or block as compressed-tensors and modelopt write it
    FP8,
    parts=(CODES, Part("_scales", "_scale", SCALES)),
    block=(1, WHOLE),
    shaped="F8_E4M3 [out, in] and {dtypes} [out, 1]",
)
NF4 = Packing(  # as bitsandbytes writes it; scales that are packed again are decoded as they are read
    "NF4",
    "nf4",
    (Part("_codes", "", ("U8",)), Part("_scales", ".absmax", ("F32",))),
    block=(1, 64),
    shaped="U8 [out * in / 2, 1], F32 or U8 [out * in / 64] and the state of the quantizer",
)
MX = Packing(  # as compressed-tensors writes MXFP4, and as --base does: of any matrix, in its own order
    "MXFP4",
    "fp4",
    (Part("_codes", "_packed", ("U8",)), Part("_scales", "_scale", BYTES)),
    block=(1, 32),
    shaped="U8 [out, in / 2] and {dtypes} [out, in / 32]",
)
NVFP4 = replace(  # the same with scales in E4M3, and one of all of them, by which they are divided
    MX,
    word="NVFP4",
    parts=(
        MX.parts[0],
        Part("_scales", "_scale", ("F8_E4M3",)),
        Part("_divisor", "_global_scale", ("F32",), "global scale"),
    ),
    block=(1, 16),
    shaped="U8 [out, in / 2], {dtypes} [out, in / 16] and F32 [1]",
    divides=True,
)
MODELOPT = replace(  # as NVIDIA's modelopt writes NVFP4: they are multiplied
    NVFP4,
    parts=(Part("_codes", "", ("U8",)), NVFP4.parts[1], Part("_factor", "_scale_2", ("F32",), "global scale")),
    divides=False,
)
WORDS, OF_GROUPS = ("I32",), ("F16", "BF16", "F32")
INT4 = Packing(  # of compressed-tensors: a number is a code less 8, or less a zero point, times its group's scale
    "int4",
    "int4",
    (Part("_codes", "_packed", WORDS), Part("_scales", "_scale", OF_GROUPS)),
    block=(1, 128),
    shaped="I32 [out, in / 8] and {dtypes} [out, {groups}]",
    checked=("_shape", "_g_idx"),
)
INT4_ZEROS = replace(
    INT4,
    parts=(*INT4.parts, Part("_zeros", "_zero_point", WORDS, "zero points")),
    shaped="I32 [out, in / 8], {dtypes} [out, {groups}] and I32 [out / 8, {groups}]",
)
FP4 = replace(  # as DeepSeek-V4 has experts, among matrices in fp8 blocks
    MX,
    word="fp4",
    parts=(Part("_codes", "", ("I8", "U8")), Part("_scale_inv", "_scale_inv", ("F8_E8M0", "U8"))),
    shaped="I8 [out, in / 2] and {dtypes} [out, in / 32]",
)
# In the order in which they are looked for where config.json says nothing: those with more parts first.
PACKINGS = (MXFP4, FP8, BY_ROW, NF4, NVFP4, MODELOPT, MX, INT4_ZEROS, INT4)
# Ends of names: of activations and of a cache, which are not quantized here.
UNUSED = (
    ".activation_scale", ".input_scale", ".input_scale_ub", ".input_global_scale", ".output_scale",
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale",
)  # fmt: skip

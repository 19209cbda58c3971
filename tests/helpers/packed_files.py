"""Checkpoints in each packed format, next to the same in bf16: packed as the formats' definitions say, by loops."""

import json
from dataclasses import dataclass, replace
from math import inf

import torch
from safetensors.torch import load_file, save_file
from tiny import CASES, LATENT, LLAMA, MIXTURE, oracle
from wrapped import oracle as wrapped_oracle
from wrapped import spelled

from trireme.kernels.packed.reference import NF4

LEFT = ("embed", "norm", "lm_head", "mlp.gate.", "block_sparse_moe.gate.")  # parts of names of what is not packed
STATE = ".quant_state.bitsandbytes__nf4"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
EVEN = dict(hidden_size=64, intermediate_size=96, head_dim=16)
MANY = MIXTURE | EVEN | dict(moe_intermediate_size=32)


def in_words(numbers, dim):
    """Eight neighbours of a dimension in an int32, by loops; short last ones are filled with zeros."""
    numbers = numbers.movedim(dim, 0).long()
    words = torch.zeros(-(-len(numbers) // 8), *numbers.shape[1:], dtype=torch.int64)
    for i, row in enumerate(numbers):
        words[i // 8] |= row << (4 * (i % 8))
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32).movedim(0, dim).contiguous()


def in_int4(w, form, group):
    """(ends of names behind the module's -> parts, decoded in fp32) of w (out, in), "int4" or "int4 zeros"."""
    (R, C), group = w.shape, group if group > 0 else w.shape[1]
    low, high = w.float().unflatten(1, (-1, group)).aminmax(dim=2)
    scales = ((high - low).clamp(min=1e-4) / 15).bfloat16()
    zeros = (-low / scales.float()).round().clamp(0, 15).int()
    if form == "int4":
        zeros = torch.full_like(zeros, 8)
    wide = lambda t: t.repeat_interleave(group, 1)
    codes = (w.float() / wide(scales.float()) + wide(zeros)).round().clamp(0, 15).int()
    parts = {".weight_packed": in_words(codes, 1), ".weight_scale": scales}
    parts[".weight_shape"] = torch.tensor([R, C])
    if form == "int4 zeros":
        parts[".weight_zero_point"] = in_words(zeros, 0)
    return parts, (codes - wide(zeros)).float() * wide(scales.float())


NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def in_fp4(w, form):
    """As in_int4, in "mxfp4", "nvfp4" as compressed-tensors writes it, or "modelopt"."""
    group = 32 if form == "mxfp4" else 16
    groups = w.float().unflatten(1, (-1, group))
    most = groups.abs().amax(2)
    if form == "mxfp4":
        powers = (most.log2().floor() - 2).int() + 127
        parts, scales = {".weight_scale": powers.to(torch.uint8)}, torch.exp2(powers - 127.0)
    else:
        of_all = (448 * 6 / w.float().abs().max()).view(1)
        codes = (most / 6 * of_all).to(torch.float8_e4m3fn)
        factor = (1 / of_all).view(())
        parts = {".weight_scale": codes}
        parts |= {".weight_global_scale": of_all} if form == "nvfp4" else {".weight_scale_2": factor}
        scales = codes.float() / of_all if form == "nvfp4" else codes.float() * factor
    scaled = groups / scales[..., None]
    nearest = (scaled.abs()[..., None] - NUMBERS).abs().argmin(-1)
    decoded = (NUMBERS[nearest].copysign(groups) * scales[..., None]).flatten(1)
    nibbles = (nearest + 8 * groups.signbit()).flatten(1)
    packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    return parts | {".weight" if form == "modelopt" else ".weight_packed": packed}, decoded


def in_fp8(w, block, dtype, single=(1,)):
    """(codes, scales, decoded in fp32), each block by its largest value."""
    whole = block == (inf, inf)
    block = min(block[0], w.shape[0]), min(block[1], w.shape[1])
    w, scales = w.float(), torch.empty(-(-w.shape[0] // block[0]), -(-w.shape[1] // block[1]))
    codes, decoded = torch.empty(w.shape, dtype=E4M3), torch.empty(w.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = w[part].abs().max() / 448
            scale = (scale.log2().ceil().exp2() if dtype == E8M0 else scale).to(dtype).float()
            codes[part] = (w[part] / scale).to(E4M3)
            decoded[part] = codes[part].float() * scale
            scales[i, j] = scale
    return codes, scales.to(dtype).view(single) if whole else scales.to(dtype), decoded


def in_nf4(w, double):
    """(parts by what they have behind the matrix's name, decoded in fp32): the arithmetic of bitsandbytes."""
    flat = w.float().flatten()
    groups = [flat[a : a + 64] for a in range(0, len(flat), 64)]
    absmax = torch.stack([group.abs().max() for group in groups])
    nearest = lambda group, most: (group[:, None] / most - NF4).abs().argmin(1)
    codes = torch.cat([nearest(group, most) for group, most in zip(groups, absmax, strict=True)])
    state = dict(quant_type="nf4", blocksize=64, dtype="bfloat16", shape=list(w.shape))
    parts = {
        "": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        ".quant_map": NF4.clone(),
        ".absmax": absmax,
    }
    if double:
        offset, table = absmax.mean(), (torch.arange(256) / 255 * 2 - 1) ** 3
        rest = absmax - offset
        nested = torch.stack([part.abs().max() for part in rest.split(256)])
        scaled = torch.cat([part / most for part, most in zip(rest.split(256), nested, strict=True)])
        bytes_ = (scaled[:, None] - table).abs().argmin(1)
        absmax = table[bytes_] * nested.repeat_interleave(256)[: len(rest)] + offset
        parts |= {".absmax": bytes_.to(torch.uint8), ".nested_absmax": nested, ".nested_quant_map": table}
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=offset.item())
    parts[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts, (NF4[codes] * absmax.repeat_interleave(64)[: len(flat)]).view(w.shape)


def in_gpt_oss(w, name):
    """As in_nf4: experts with all 16 numbers, drawn at random, and what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # seconds

    experts, columns, rows = w.shape
    dice = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=dice)
    scales = torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8, generator=dice)
    decoded = convert_moe_packed_tensors(blocks.clone(), scales.clone()).contiguous().float()
    return {"_blocks": blocks, "_scales": scales}, decoded


def fp4_as_transformers(w):
    """As in_nf4: experts of DeepSeek-V4."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # seconds

    parts, decoded = in_fp4(w, "mxfp4")
    codes, scales = parts[".weight_packed"].view(torch.int8), parts[".weight_scale"].view(E8M0)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert torch.equal(theirs.float(), decoded)
    return {"": codes, "_scale_inv": scales}, decoded


def weights(**settings):
    """quantization_config of compressed-tensors."""
    form = settings.pop("format")
    groups = dict(group_0=dict(targets=["Linear"], weights=dict(dynamic=False) | settings, input_activations=None))
    ignore = ["lm_head", r"re:.*mlp\.gate$"]
    return dict(quant_method="compressed-tensors", format=form, config_groups=groups, ignore=ignore)


@dataclass(frozen=True)
class Format:
    model_type: str
    keys: dict
    said: dict  # quantization_config
    pack: object  # (name, w) -> (parts by what they have behind the matrix's name, decoded in fp32)
    targets: tuple[str, ...] = ("q_proj", "down_proj")  # of adapters
    left: tuple[str, ...] = ()  # further names, or their beginnings, of what is not packed
    exact: bool = False  # bf16 holds every value
    within: str = ""  # a part of all names of what is packed


def fp8(model_type, keys, block, dtype, said=None, end="_scale_inv", single=(1,), left=(), **others):
    """A Format in fp8; said: but of the quant_method "fp8"."""

    def pack(_, w):
        codes, scales, decoded = in_fp8(w, block, dtype, single)
        return {"": codes, end: scales}, decoded

    size = None if block == (inf, inf) else list(block)
    own = dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=size,
        modules_to_not_convert=["lm_head", *left], scale_fmt="ue8m0" if dtype == E8M0 else "float",
    )  # fmt: skip
    return Format(model_type, keys, said or own, pack, left=left, **others)


def by_module(pack):
    """Parts that are named behind the module."""
    return lambda name, w: _renamed(pack(w))


def _renamed(packed):
    return {end.removeprefix(".weight"): part for end, part in packed[0].items()}, packed[1]


def nf4(model_type, keys, double, **others):
    said = dict(
        quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype="bfloat16", llm_int8_skip_modules=["lm_head"],
    )  # fmt: skip
    return Format(model_type, keys, said, lambda _, w: in_nf4(w, double), **others)


def int4(model_type, keys, form, group, **others):
    said = weights(format="pack-quantized", num_bits=4, type="int", symmetric=form == "int4", actorder="static",
                   strategy="group" if group > 0 else "channel", group_size=group if group > 0 else None)  # fmt: skip
    return Format(model_type, keys, said, by_module(lambda w: in_int4(w, form, group)), **others)


def fp4(model_type, keys, form, said, **others):
    return Format(model_type, keys, said, by_module(lambda w: in_fp4(w, form)), **others)


F8 = dict(num_bits=8, type="float", symmetric=True, block_structure=None)
F4 = dict(num_bits=4, type="float", symmetric=True)
MODELOPT = dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head", "model.layers.*.mlp.gate"])
DEEPSEEK = dict(quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0", expert_dtype="fp4")
EXPERTS = ("q_proj", "experts")
KIMI = weights(format="pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=8) | dict(
    kv_cache_scheme=None, quantization_status="compressed", ignore=[
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
)  # fmt: skip
_BLOCKS = fp8("qwen3_moe", MANY, (32, 32), E8M0)
FORMATS = {
    "fp8": fp8("qwen3", LLAMA, (16, 24), torch.float32),  # short last blocks
    "fp8, whole blocks": fp8(
        "qwen3", LLAMA | dict(hidden_size=32, intermediate_size=48, head_dim=8), (16, 16), torch.bfloat16),
    "fp8, powers of two": fp8("llama", LLAMA, (128, 128), E8M0, left=("model.layers.1.mlp",)),
    "fp8, experts": fp8("qwen3_moe", MIXTURE, (16, 24), torch.bfloat16, targets=EXPERTS),
    "fp8, one in bf16": fp8(
        "minimax_m2", MIXTURE | dict(num_local_experts=4, intermediate_size=24, head_dim=12, rotary_dim=6), (16, 16),
        torch.float32, left=("model.layers.0.self_attn.k_proj",), targets=("q_proj", "o_proj")),
    "fp8, latent": fp8("deepseek_v3", LATENT | dict(first_k_dense_replace=1, n_group=3, topk_group=2), (16, 16),
                       torch.float32, targets=("q_a_proj", "kv_b_proj", "o_proj")),
    "fp8 by row": fp8("qwen3", LLAMA, (1, inf), torch.bfloat16,
                      weights(format="float-quantized", strategy="channel", **F8), "_scale"),
    "fp8 by tensor, experts": fp8(
        "qwen3_moe", MIXTURE, (inf, inf), torch.float32,
        weights(format="naive-quantized", strategy="tensor", **F8), "_scale", targets=("experts",)),
    "mxfp8": fp8(
        "llama", LLAMA | dict(hidden_size=32, intermediate_size=64, head_dim=8), (1, 32), E8M0,
        weights(format="mxfp8-quantized", strategy="group", group_size=32, scale_dtype="torch.uint8", **F8), "_scale"),
    "fbgemm": fp8("llama", LLAMA, (1, inf), torch.float32, dict(
        quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"]), "_scale"),
    "fp8 by tensor": fp8("llama", LLAMA, (inf, inf), torch.float32, single=()),
    "nf4": nf4("qwen3", LLAMA, False),
    "nf4, double": nf4("llama", LLAMA, True),
    "nf4, experts": nf4("qwen3_moe", MIXTURE, True, targets=EXPERTS),
    "int4": int4("qwen3", LLAMA, "int4", 8),
    "int4, zeros": int4("llama", LLAMA | EVEN, "int4 zeros", 32),
    "int4 by row": int4("qwen3", LLAMA, "int4 zeros", -1),
    "int4, experts": int4("qwen3_moe", MIXTURE, "int4", 8, targets=EXPERTS),
    "int4, kimi k2.5": replace(int4("kimi_k25", {}, "int4", 8, targets=EXPERTS[1:], within=".mlp.experts."), said=KIMI),
    "nvfp4": fp4("qwen3", LLAMA | EVEN, "nvfp4",
                 weights(format="nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **F4)),
    "modelopt": fp4("llama", LLAMA | EVEN, "modelopt", MODELOPT),
    "modelopt, experts": fp4("qwen3_moe", MANY, "modelopt", MODELOPT, targets=EXPERTS),
    "mxfp4": fp4("qwen3", LLAMA | EVEN, "mxfp4",
                 weights(format="mxfp4-pack-quantized", strategy="group", group_size=32, **F4), exact=True),
    "deepseek": Format("qwen3_moe", MANY, DEEPSEEK, targets=EXPERTS,
                       pack=lambda name, w: fp4_as_transformers(w) if ".experts." in name else _BLOCKS.pack(name, w)),
    "gpt-oss": Format("gpt_oss", CASES["gpt oss"][1] | dict(hidden_size=64, intermediate_size=32), dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"]),
        lambda name, w: in_gpt_oss(w, name), EXPERTS, exact=True),
}  # fmt: skip


def write_packed(folder, name):
    """Makes folder/packed, in a format of FORMATS, and folder/plain, the same in bf16; returns decoded matrices in fp32
    by name.
    """
    form, packed, plain = FORMATS[name], folder / "packed", folder / "plain"
    packed.mkdir(), plain.mkdir()
    if form.model_type == "kimi_k25":  # by the names of releases, which transformers does not write
        model, config = wrapped_oracle("kimi k2.5")
        state = spelled(model, model.bfloat16().state_dict())
        (plain / "config.json").write_text(json.dumps(config))
    else:
        oracle(form.model_type, form.keys)[0].bfloat16().save_pretrained(plain)
        state = load_file(plain / "model.safetensors")
    state = {name: t.float() if name.endswith("correction_bias") else t for name, t in state.items()}
    files, decoded, dims = dict(state), {}, 3 if form.model_type == "gpt_oss" else 2
    for name, w in state.items():
        if (
            w.dim() == dims
            and form.within in name
            and not (any(part in name for part in LEFT) or name.startswith(form.left or "\0"))
        ):
            parts, decoded[name] = form.pack(name, w)
            del files[name]
            module = name.removesuffix(".weight") if any(end.startswith(".weight") for end in parts) else name
            files |= {module + end: part for end, part in parts.items()}
            state[name] = decoded[name].bfloat16()
    save_file(files, packed / "model.safetensors", {"format": "pt"})
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    inner = config.get("text_config", config)  # where Kimi has it, too
    inner["quantization_config"] = form.said
    (packed / "config.json").write_text(json.dumps(config))
    return decoded


def write_shards(folder, files):
    """A checkpoint's tensors by file (name -> tensors by name), and the index of them."""
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rewrite(folder, to, change=lambda state: None, **said):
    """A copy of a checkpoint with changed tensors, and other keys of its quantization_config."""
    state = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    change(state)
    save_file(state, to / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= said
    (to / "config.json").write_text(json.dumps(config))
    return to

"""Matrices in four bits as their formats have them in files, by loops: int4, NVFP4, MXFP4."""

import torch


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

"""GPTQ by the formula of its kernels without fused multiplication, from random words of each part."""

import numpy as np
import pytest
import torch
from engines import opened
from packed_files import check_pieces, write_packed
from tiny import LLAMA

EVEN = LLAMA | dict(hidden_size=64, intermediate_size=96, head_dim=16, num_hidden_layers=1)


def nibble(words, a, b, at):
    """The number with index `at` of eight in a word, lowest bits first."""
    return words[a][b] >> 4 * at & 15


def drawn(shape, one_more, ordered, sym, group, dice):
    """(parts, decoded in fp32) of a matrix (out, in), of which every bit is random.

    W[i, j] = scales[g, j] * (q[i, j] - z[g, j]) with g = g_idx[i], i of inputs, j of outputs. q and z are 4 bits each,
    eight of them along i and along j in an int32. Files of the first format hold z - 1, those of the second z.
    """
    R, C = shape
    group = group if group > 0 else C
    G = C // group
    words = lambda *of: torch.from_numpy(dice.integers(-(1 << 31), 1 << 31, of, np.int64).astype(np.int32))
    zeros = words(G, R // 8) & 0x77777777 if one_more else words(G, R // 8)  # 15 has two meanings in the first format
    if sym:  # the middle, 8
        zeros.fill_(0x77777777 if one_more else 0x88888888 - (1 << 32))
    g_idx = torch.arange(C, dtype=torch.int32) // group
    if ordered:
        g_idx = g_idx[torch.from_numpy(dice.permutation(C))]
    scales = torch.from_numpy(dice.random((G, R), np.float32) / 16 + 1e-3).half()
    parts = {"qweight": words(C // 8, R), "qzeros": zeros, "scales": scales, "g_idx": g_idx}
    decoded, factors = np.empty(shape, np.float32), scales.float().numpy()
    q, z = (parts[name].tolist() for name in ("qweight", "qzeros"))
    for i, g in enumerate(g_idx.tolist()):
        for j in range(R):
            number = nibble(q, i // 8, j, i % 8) - (nibble(z, g, j // 8, j % 8) + one_more)
            decoded[j, i] = factors[g, j] * np.float32(number)
    return parts, torch.from_numpy(decoded)


@pytest.mark.parametrize(
    ("form", "ordered", "sym", "group"),
    [("gptq", False, True, 16), ("gptq", True, False, 16), ("gptq_v2", True, True, 32), ("gptq_v2", False, False, -1)],
)
def test_values_are_those_of_the_formula(form, ordered, sym, group, tmp_path):
    dice, folders = np.random.default_rng(0), (tmp_path / "packed", tmp_path / "plain")
    for folder in folders:
        folder.mkdir()

    def pack(name, w):
        parts, decoded = drawn(w.shape, form == "gptq", ordered, sym, group, dice)
        return {name.removesuffix("weight") + end: part for end, part in parts.items()}, decoded

    said = dict(quant_method="gptq", bits=4, group_size=group, desc_act=ordered, sym=sym, checkpoint_format=form)
    wide = write_packed(folders, "llama", EVEN, said, pack)
    source = opened(folders[0])[1]
    assert len(wide) == 7
    for name, decoded in wide.items():
        assert np.array_equal(check_pieces(source, name, (0, 5), (500, 700)), decoded.flatten().numpy())

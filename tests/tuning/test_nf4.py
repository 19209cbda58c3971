"""NF4 as bitsandbytes writes it, with and without double quantization: decoded as it does, and trained on as it is."""

import json
import math

import pytest
import torch
from engines import opened
from packed_files import check_adapters, check_all_trained, check_malformed, write_packed
from tiny import LLAMA, MIXTURE

from trireme.engine.tuning.base import why_copied
from trireme.engine.tuning.chosen import adapted
from trireme.engine.tuning.packed import check_packing
from trireme.engine.tuning.parts import open_checkpoint
from trireme.kernels.packed.reference import NF4
from trireme.models.config import InputError, Lora, read_config
from trireme.storage.devices import open_device

pytestmark = pytest.mark.grid

STATE = ".quant_state.bitsandbytes__nf4"
CASES = {"plain": ("qwen3", LLAMA, False), "double": ("llama", LLAMA, True), "experts": ("qwen3_moe", MIXTURE, True)}


def in_nf4(w, double):
    """(parts by what they have behind the matrix's name, decoded in fp32): the arithmetic of bitsandbytes, by loops."""
    flat = w.float().flatten()
    groups = [flat[a : a + 64] for a in range(0, len(flat), 64)]
    absmax = torch.stack([group.abs().max() for group in groups])
    nearest = lambda group, most: (group[:, None] / most - NF4).abs().argmin(1)
    codes = torch.cat([nearest(group, most) for group, most in zip(groups, absmax, strict=True)])
    state = dict(quant_type="nf4", blocksize=64, dtype="bfloat16", shape=list(w.shape))
    parts = {"": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], ".quant_map": NF4.clone()}
    if double:
        offset, table = absmax.mean(), (torch.arange(256) / 255 * 2 - 1) ** 3
        rest = absmax - offset
        nested = torch.stack([part.abs().max() for part in rest.split(256)])
        scaled = torch.cat([part / most for part, most in zip(rest.split(256), nested, strict=True)])
        bytes_ = (scaled[:, None] - table).abs().argmin(1)
        of_each = nested.repeat_interleave(256)[: len(rest)]
        absmax = table[bytes_] * of_each + offset
        parts |= {".absmax": bytes_.to(torch.uint8), ".nested_absmax": nested, ".nested_quant_map": table}
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=offset.item())
    else:
        parts[".absmax"] = absmax
    parts[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts, (NF4[codes] * absmax.repeat_interleave(64)[: len(flat)]).view(w.shape)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """case -> (a checkpoint in NF4, the same in bf16, decoded matrices)."""
    found = {}

    def make(case):
        if case not in found:
            model_type, keys, double = CASES[case]
            packed, plain = (tmp_path_factory.mktemp(name) for name in ("nf4", "bf16"))

            def pack(name, w):
                parts, decoded = in_nf4(w, double)
                return {name + part: t for part, t in parts.items()}, decoded

            said = dict(
                quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype="bfloat16", llm_int8_skip_modules=["lm_head"],
            )  # fmt: skip
            wide = write_packed((packed, plain), model_type, keys, said, pack)
            found[case] = packed, plain, wide
        return found[case]

    return make


@pytest.mark.parametrize("case", CASES)
def test_adapters_are_trained_on_nf4_as_on_its_copy_in_bf16(made, case, tmp_path):
    """In RAM, copied to the SSD and, without double quantization, in place."""
    (folder, plain, _), device = made(case), open_device(tmp_path)
    targets = ("q_proj", "experts" if case == "experts" else "down_proj")
    check_adapters(folder, plain, targets, device, (("host", False, {}), ("ssd", case == "plain", {})), 0.6)
    if case == "double":
        cfg, source, stored = opened(folder, lambda cfg: adapted(cfg, Lora(2, 4.0, targets)))
        assert why_copied(cfg, "BF16", source, stored, [folder]) == "they are converted as they are read"


@pytest.mark.parametrize("case", ["plain", "double"])
def test_all_is_trained_from_exact_masters_and_written_in_bf16(made, case, tmp_path):
    check_all_trained(*made(case), tmp_path)


NAME = "model.layers.1.mlp.down_proj.weight"  # (40, 56): 35 groups


def other_state(**change):
    def changed(s):
        state = json.loads(bytes(s[NAME + STATE].tolist())) | change
        s[NAME + STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return changed


HOSTILE = {  # case -> (change of the tensors, words)
    "no state": (lambda s: s.pop(NAME + STATE), rf"{NAME}\.\w+ is there, but {NAME}{STATE} is missing"),
    "no scales": (lambda s: s.pop(f"{NAME}.absmax"), f"{NAME} is in NF4, but {NAME}.absmax is missing"),
    "no codes": (lambda s: s.pop(NAME), f"{NAME} is in NF4, but {NAME} is missing"),
    "no nested": (lambda s: s.pop(f"{NAME}.nested_absmax"), f"{NAME}.nested_absmax is missing"),
    "two forms": (lambda s: s.update({NAME: torch.zeros(40, 56)}), r"is F32 \[40, 56\]; of .*in NF4 it is U8 with"),
    "short": (lambda s: s.update({NAME: s[NAME][:-1].clone()}), r"is U8 \[1119, 1\]; of a matrix of \[40, 56\]"),
    "few scales": (lambda s: s.update({f"{NAME}.absmax": s[f"{NAME}.absmax"][:9].clone()}), r"U8 \[9\];.* 35 elements"),
    "another table": (lambda s: s[f"{NAME}.quant_map"][2].fill_(0), "another table than NF4's"),
    "fp4": (lambda s: s.update({f"{NAME}.quant_state.bitsandbytes__fp4": s.pop(NAME + STATE)}), "quantized to fp4"),
    "8 bits": (lambda s: s.update({f"{NAME[:-7]}.SCB": torch.ones(40)}), "quantized to 8 bits"),
    "no json": (lambda s: s[NAME + STATE][0].fill_(1), "Download the release again"),
    "another size": (other_state(blocksize=128), "blocksize is 128, expected 64"),
    "no shape": (other_state(shape=[40, "a"]), "shape is .*expected two sizes"),
    "huge": (other_state(shape=[1 << 30, 1 << 30]), "of a matrix of"),
    "another shape": (other_state(shape=[56, 40]), r"has shape \[56, 40\], config.json says \[40, 56\]"),
    "no offset": (other_state(nested_offset=None), "nested_offset is null"),
    "infinite offset": (other_state(nested_offset=math.inf), "nested_offset is Infinity"),
    "NaN": (lambda s: s[f"{NAME}.nested_absmax"][0].fill_(float("nan")), r"scales by more than 2\^126|NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_release_is_one_line(made, case, tmp_path):
    check_malformed(made("double")[0], *HOSTILE[case], tmp_path)


def test_config_and_tensors_have_to_agree(made):
    folder, plain, _ = made("plain")
    with pytest.raises(InputError, match='tensors in NF4, but config.json has no "quantization_config"'):
        check_packing(read_config(plain), open_checkpoint(folder), lambda line: None)

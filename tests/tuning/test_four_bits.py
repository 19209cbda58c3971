"""int4 of compressed-tensors, GPTQ, AWQ, NVFP4 and MXFP4 as published: decoded, and trained on as they are."""

import json

import numpy as np
import pytest
import torch
from engines import JitterQueues, exchange, gpu_plan, opened
from four_bits import in_fp4, in_int4
from packed_files import check_adapters, check_all_trained, check_malformed, check_pieces, write_packed
from safetensors.torch import load_file, save_file
from tiny import LLAMA, MIXTURE
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from trireme.engine.geometry import Geometry
from trireme.engine.run.output.folder import reopen
from trireme.engine.tuning.chosen import adapted
from trireme.engine.tuning.packed import as_said, check_packing
from trireme.engine.tuning.parts import open_checkpoint
from trireme.models.config import InputError, Lora, parse_config, read_config
from trireme.storage.devices import open_device
from trireme.storage.headers import CheckpointError

pytestmark = pytest.mark.grid

EVEN = dict(hidden_size=64, intermediate_size=96, head_dim=16)
MANY = MIXTURE | EVEN | dict(moe_intermediate_size=32)
FP4 = ("nvfp4", "modelopt", "mxfp4")
CASES = {  # model_type, keys, form, columns of a group
    "int4": ("qwen3", LLAMA, "int4", 8),
    "int4 zeros": ("llama", LLAMA | EVEN, "int4 zeros", 32),
    "int4 by row": ("qwen3", LLAMA, "int4 zeros", -1),
    "int4 experts": ("qwen3_moe", MIXTURE, "int4", 8),
    "gptq": ("qwen3", LLAMA | EVEN, "gptq", 16),
    "gptq v2": ("llama", LLAMA | EVEN, "gptq_v2", -1),
    "gptq by activation": ("qwen3", LLAMA | EVEN, "gptq by activation", 16),
    "awq": ("qwen3", LLAMA | EVEN, "awq", 32),
    "awq experts": ("qwen3_moe", MANY, "awq", 16),
    "nvfp4": ("qwen3", LLAMA | EVEN, "nvfp4", 16),
    "modelopt": ("llama", LLAMA | EVEN, "modelopt", 16),
    "modelopt experts": ("qwen3_moe", MANY, "modelopt", 16),
    "mxfp4": ("qwen3", LLAMA | EVEN, "mxfp4", 32),
    "deepseek experts": ("qwen3_moe", MANY, "deepseek", 32),
}


def as_deepseek(name, w):
    """(parts, decoded): experts in fp4, others in fp8 blocks of 32 x 32, scales that are powers of two."""
    if ".experts." in name:
        parts, decoded = in_fp4(w, "mxfp4")
        codes, scales = parts[".weight_packed"].view(torch.int8), parts[".weight_scale"].view(torch.float8_e8m0fnu)
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
        assert torch.equal(theirs.float(), decoded)
    else:
        blocks = w.float().unfold(0, 32, 32).unfold(1, 32, 32)
        scales = (blocks.abs().amax((2, 3)) / 448).log2().ceil().exp2().to(torch.float8_e8m0fnu)
        wide = scales.float().repeat_interleave(32, 0).repeat_interleave(32, 1)
        codes = (w.float() / wide).to(torch.float8_e4m3fn)
        decoded = codes.float() * wide
    return {".weight": codes, ".weight_scale_inv": scales}, decoded


def said(form, group):
    """quantization_config."""
    if form == "deepseek":
        return dict(quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0", expert_dtype="fp4")
    if form.startswith("gptq"):
        kind = dict(desc_act="act" in form, sym=False, checkpoint_format=form.split()[0])
        return dict(quant_method="gptq", bits=4, group_size=group) | kind
    if form == "awq":
        return dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm",
                    modules_to_not_convert=["lm_head"])  # fmt: skip
    if form == "modelopt":
        return dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head", "model.layers.*.mlp.gate"])
    weights = dict(num_bits=4, type="float", symmetric=True, dynamic=False)
    weights |= {
        "nvfp4": dict(strategy="tensor_group", group_size=16),
        "mxfp4": dict(strategy="group", group_size=32),
    }.get(form, dict(type="int", symmetric=form == "int4", strategy="group" if group > 0 else "channel",
                     group_size=group if group > 0 else None, actorder="static"))  # fmt: skip
    return dict(
        quant_method="compressed-tensors", format=f"{form}-pack-quantized" if "fp4" in form else "pack-quantized",
        config_groups=dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=None)),
        ignore=["lm_head", r"re:.*mlp\.gate$"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """case -> (a checkpoint in it, the same in bf16, decoded matrices)."""
    found = {}

    def make(case):
        if case not in found:
            model_type, keys, form, group = CASES[case]
            packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "bf16"))

            def pack(name, w):
                if form == "deepseek":
                    parts, decoded = as_deepseek(name, w)
                else:
                    parts, decoded = in_fp4(w, form) if form in FP4 else in_int4(w, form, group)
                return {name.removesuffix(".weight") + end: part for end, part in parts.items()}, decoded

            wide = write_packed((packed, plain), model_type, keys, said(form, group), pack)
            found[case] = packed, plain, wide
        return found[case]

    return make


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_adapters_are_trained_as_on_its_copy_in_bf16(made, case, tmp_path):
    """Packed in every tier, in place too, blocks and sub-layers: bitwise the run on decoded weights."""
    (folder, plain, _), device = made(case), open_device(tmp_path)
    targets = ("q_proj", "experts" if "experts" in case else "down_proj")
    late = lambda: JitterQueues(1)
    ways = (("gpu", False, {}), ("host", False, {}), ("ssd", False, dict(queues=late())), ("ssd", True, {}),
            ("host", False, dict(halves=True)), ("ssd", True, dict(halves=True, window=1, queues=late())))  # fmt: skip
    check_adapters(folder, plain, targets, device, ways if case in ("gptq", "nvfp4") else ways[5:], 0.8)


@pytest.mark.parametrize("case", CASES)
def test_all_is_trained_from_exact_masters_and_written_in_bf16(made, case, tmp_path):
    assert check_all_trained(*made(case), tmp_path, rounded=case == "mxfp4")["dtype"] == "bfloat16"


def test_config_alone_says_what_is_packed(made):
    """A plan without the files has the bytes of one with them."""
    for case in CASES:
        planned = adapted(read_config(made(case)[0]), Lora(2, 4.0, ("q_proj",)))
        cfg, _, _ = opened(made(case)[0], lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
        plan = gpu_plan(cfg, dtype="BF16")
        bytes_of = lambda cfg, plan=plan: [layout.nbytes for layout in Geometry.of(cfg, plan).base]
        if cfg.packing.parts[1].dtypes == planned.packing.parts[1].dtypes[:1]:
            assert bytes_of(as_said(planned)) == bytes_of(planned) == bytes_of(cfg), case


def test_config_and_tensors_have_to_agree(made):
    for case, word in (("int4", "int4"), ("awq", "AWQ"), ("nvfp4", "NVFP4"), ("modelopt", "NVFP4"), ("mxfp4", "MXFP4")):
        folder, plain, _ = made(case)
        said = []
        check_packing(read_config(folder), open_checkpoint(plain, read_config(folder).packing), said.append)
        assert f"no tensor is in {word}: all are read as they are" in said[0]
        if case in ("nvfp4", "modelopt", "mxfp4"):  # whose groups are of one size
            with pytest.raises(InputError, match=f'tensors in {word}, but config.json has no "quantization_config"'):
                check_packing(read_config(plain), open_checkpoint(folder), said.append)


M = "model.layers.1.mlp.down_proj"  # (64, 96), of int4 (40, 56)
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"  # (32, 64)
PACKED_, SCALE, SHAPE, ORDER = (f"{M}.weight_{end}" for end in ("packed", "scale", "shape", "g_idx"))
ZEROS, OF_ALL, FACTOR = (f"{M}.weight_{end}" for end in ("zero_point", "global_scale", "scale_2"))
HOSTILE = {  # case -> (checkpoint, change of the tensors, words)
    "no scales": ("int4", lambda s: s.pop(SCALE), f"{PACKED_} is I32, and its scales, {SCALE}, are missing"),
    "no codes": ("int4", lambda s: s.pop(PACKED_), f"{SCALE} holds scales of int4, but {PACKED_} is missing"),
    "no zeros": ("int4 zeros", lambda s: s.pop(ZEROS), f"and its zero points, {ZEROS}, are missing"),
    "two forms": ("int4", lambda s: s.update({f"{M}.weight": torch.zeros(40, 56)}), f"{M}.weight is there twice, also"),
    "few codes": (
        "int4",
        lambda s: s.update({PACKED_: s[PACKED_][:, :6].contiguous()}),
        r"_packed is I32 \[40, 6\] and .*int4 has I32 \[out, in / 8\] and BF16 \[out, in / 8\]",
    ),
    "another shape": ("int4", lambda s: s[SHAPE].copy_(torch.tensor([56, 40])), r"is \[56, 40\], its codes are of"),
    "columns that fill no integer": ("int4", lambda s: s[SHAPE][1].sub_(3), r"only multiples of 8 columns"),
    "no shape": ("int4", lambda s: s.update({SHAPE: torch.ones(3)}), r"_shape is F32 \[3\], expected I32 or I64 \[2\]"),
    "in bytes": (
        "int4",
        lambda s: s.update({PACKED_: torch.zeros(40, 28).to(torch.uint8)}),
        f"holds scales of int4, but {PACKED_} is U8: one tensor in two forms",
    ),
    "NaN": ("int4", lambda s: s[SCALE][1].fill_(float("nan")), rf"{SCALE} scales by more than 2\^123"),
    "an order": (
        "int4",
        lambda s: s.update({ORDER: torch.arange(56).flip(0) // 8}),
        "by activation order, which is not supported .actor",
    ),
    "act-order": (
        "gptq",
        lambda s: s[f"{M}.g_idx"].copy_(s[f"{M}.g_idx"].flip(0)),
        "by activation order, but config.json has no .desc_act",
    ),
    "no act-order": (
        "gptq",
        lambda s: s.update({f"{M}.g_idx": torch.zeros(5)}),
        r"g_idx is F32 \[5\], expected I32 or",
    ),
    "no groups": (
        "gptq by activation",
        lambda s: s.pop(f"{M}.g_idx"),
        f"its groups of columns, {M}.g_idx, are missing",
    ),
    "a group": ("gptq by activation", lambda s: s[f"{M}.g_idx"][5].fill_(6), f"{M}.g_idx has groups beyond 0 to 5"),
    "few groups": (
        "gptq by activation",
        lambda s: s.update({f"{M}.g_idx": s[f"{M}.g_idx"][:9].clone()}),
        r"g_idx I32 \[9\]; GPTQ has I32 \[in / 8, out\], F16 .* and I32 \[in / 16, out / 8\], and I32 \[in\]",
    ),
    "no qzeros": ("gptq", lambda s: s.pop(f"{M}.qzeros"), f"{M}.qweight is I32, and its zero points, {M}.qzeros, are"),
    "no qweight": ("gptq", lambda s: s.pop(f"{M}.qweight"), f"holds .* of GPTQ, but {M}.qweight is missing"),
    "zero of 15": ("gptq", lambda s: s[f"{M}.qzeros"][0].fill_(15), "has zero points that programs read as 0 or as 16"),
    "huge scale": ("gptq", lambda s: s[f"{M}.scales"][0].fill_(float("inf")), rf"{M}.scales scales by .* 2\^123"),
    "words of 64": (
        "gptq",
        lambda s: s.update({f"{M}.qweight": s[f"{M}.qweight"].long()}),
        rf"{M}.qweight is I64 \[12, 64\]; GPTQ has I32|{M}.qweight is I64: one tensor in two forms",
    ),
    "gemv": (
        "awq",
        lambda s: s.update({f"{M}.qweight": s[f"{M}.qweight"].mT.contiguous()}),
        r"AWQ has I32 \[in, out / 8\], F16 \[in / 32, out\] and I32 \[in / 32, out / 8\]",
    ),
    "not scaled": ("nvfp4", lambda s: s.pop(OF_ALL), f"and its global scale, {OF_ALL}, are missing"),
    "zero": ("nvfp4", lambda s: s[OF_ALL].zero_(), rf"{OF_ALL} scales by more than 2\^116"),
    "in 8": ("nvfp4", lambda s: s[SCALE].view(torch.uint8)[3].fill_(127), f"{SCALE} holds NaN"),
    "infinite": ("modelopt", lambda s: s[FACTOR].fill_(float("inf")), rf"{FACTOR} scales by more than 2\^116"),
    "255": ("mxfp4", lambda s: s[SCALE][3].fill_(255), r"scales by more than 2\^125"),
    "fp4 in floats": (
        "deepseek experts",
        lambda s: s.update({EXPERT: torch.zeros(32, 64)}),
        f"{EXPERT} is F32: one ten",
    ),
    "no fp4 scales": ("deepseek experts", lambda s: s.pop(f"{EXPERT}_scale_inv"), f"{EXPERT} is I8, and its scales, "),
    "fp4 blocks": (
        "deepseek experts",
        lambda s: s.update({f"{EXPERT}_scale_inv": torch.ones(1, 2).to(torch.float8_e8m0fnu)}),
        r"fp4 has I8 \[out, in / 2\] and F8_E8M0 \[out, in / 32\]",
    ),
    "other groups": (
        "mxfp4",
        lambda s: s.update({SCALE: torch.zeros(64, 6).to(torch.uint8)}),
        r"MXFP4 has U8 \[out, in / 2\] and U8 \[out, in / 32\]",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_release_is_one_line(made, case, tmp_path):
    of, change, words = HOSTILE[case]
    check_malformed(made(of)[0], change, words, tmp_path)


@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_biases_of_zeros_that_the_model_has_not(made, tmp_path, case):
    """AutoGPTQ writes one for each matrix: they are not used, and not written; others are refused."""
    folder, plain, wide = made(case)
    state = load_file(folder / "model.safetensors")
    biases = {n.removesuffix("weight") + "bias": torch.zeros(len(w), dtype=torch.float16) for n, w in wide.items()}
    save_file(state | biases, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    check_packing(read_config(tmp_path), open_checkpoint(tmp_path, read_config(tmp_path).packing), print)
    cfg, source, _ = opened(tmp_path)
    e, x = exchange(cfg, source)
    x.load()
    x.save(tmp_path / "out")
    reopen(source, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(plain / "model.safetensors").keys()
    cfg, source, _ = opened(tmp_path, lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
    exchange(cfg, source)[1].load()
    biases[f"{M}.bias"][3] = 1
    save_file(state | biases, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"{M}.bias is not zero, and a {cfg.model_type} as config.json describes it"):
        check_packing(read_config(tmp_path), open_checkpoint(tmp_path, read_config(tmp_path).packing), print)


def test_groups_of_caches_and_no_order_say_nothing_of_weights(made):
    raw = json.loads((made("int4")[0] / "config.json").read_text())
    of_weights = raw["quantization_config"]["config_groups"]["group_0"]
    of_weights["weights"]["actorder"] = False
    of_cache = dict(targets=["Qwen3Attention"], weights=None, input_activations=dict(num_bits=8, type="float"))
    raw["quantization_config"]["config_groups"]["group_1"] = of_cache
    assert parse_config(raw).packing == read_config(made("int4")[0]).packing
    raw["quantization_config"]["config_groups"] = dict(group_0=of_cache)
    with pytest.raises(InputError, match='expected a group with "weights"'):
        parse_config(raw)


@pytest.mark.parametrize(("case", "form"), [
    ("gptq", None), ("gptq", "auto_round:auto_gptq"), ("gptq v2", "auto_round:gptqmodel"),
    ("awq", "auto_round:auto_awq"),
])  # fmt: skip
def test_auto_round_writes_the_layouts_of_others(made, tmp_path, case, form):
    """As its export_to_autoround does, without the groups' numbers, which AutoGPTQ has."""
    folder, _, wide = made(case)
    state = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in state.items() if not n.endswith(".g_idx")}, tmp_path / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    before = parse_config(raw)
    spelled = dict(packing_format=form, iters=200, sym=False, extra_config={".*mlp\\.gate.*": dict(bits=16)})
    raw["quantization_config"] = dict(quant_method="auto-round", bits=4, group_size=CASES[case][3]) | spelled
    assert parse_config(raw).packing == before.packing
    (tmp_path / "config.json").write_text(json.dumps(raw))
    source = opened(tmp_path)[1]
    for name, values in wide.items():
        assert np.array_equal(np.concatenate(list(source.values(name))), values.flatten().numpy())


def test_matrices_that_are_left_out_stay_as_they_are(made, tmp_path):
    """The files decide, whatever the patterns of config.json; one by regular expression is in a plan too."""
    for case in ("int4", "gptq", "awq", "modelopt"):
        folder, plain, wide = made(case)
        state, exact = (load_file(path / "model.safetensors") for path in (folder, plain))
        state = {n: t for n, t in state.items() if not n.startswith(f"{M}.")} | {f"{M}.weight": exact[f"{M}.weight"]}
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        key, value = {
            "int4": ("ignore", [r"re:.*layers\.1\.mlp\.down_proj"]),
            "gptq": ("dynamic", {r"-:.*layers\.1\.mlp\.down_proj": {}}),
            "awq": ("modules_to_not_convert", [M]),
            "modelopt": ("ignore", ["model.layers.1.mlp.down_proj*"]),
        }[case]
        config["quantization_config"][key] = value
        (tmp_path / "config.json").write_text(json.dumps(config))
        cfg, source, _ = opened(tmp_path, lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
        planned = adapted(read_config(tmp_path), Lora(2, 4.0, ("q_proj",)))
        assert {name for name in wide if source.packs(name)} == wide.keys() - {f"{M}.weight"}
        assert f"{M}.weight" not in as_said(planned).packed
        assert as_said(planned).packed == cfg.packed
        exchange(cfg, source)[1].load()


def test_groups_of_another_size_are_not_what_is_wrong_where_config_says_nothing(made):
    with pytest.raises(CheckpointError, match='tensors in GPTQ, but config.json has no "quantization_config". Copy it'):
        open_checkpoint(made("gptq")[0])


# ---------------------------------------------------------------- GPTQ by the formula of its kernels


def nibble(words, a, b, at):
    """The number with index `at` of eight in a word, lowest bits first."""
    return words[a][b] >> 4 * at & 15


def drawn_gptq(shape, one_more, ordered, sym, group, dice):
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
def test_values_of_gptq_are_those_of_its_formula(form, ordered, sym, group, tmp_path):
    dice, folders = np.random.default_rng(0), (tmp_path / "packed", tmp_path / "plain")
    for folder in folders:
        folder.mkdir()

    def pack(name, w):
        parts, decoded = drawn_gptq(w.shape, form == "gptq", ordered, sym, group, dice)
        return {name.removesuffix("weight") + end: part for end, part in parts.items()}, decoded

    said = dict(quant_method="gptq", bits=4, group_size=group, desc_act=ordered, sym=sym, checkpoint_format=form)
    wide = write_packed(folders, "llama", LLAMA | EVEN | dict(num_hidden_layers=1), said, pack)
    source = opened(folders[0])[1]
    assert len(wide) == 7
    for name, decoded in wide.items():
        assert np.array_equal(check_pieces(source, name, (0, 5), (500, 700)), decoded.flatten().numpy())

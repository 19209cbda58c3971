"""fp8 as it is published, in blocks, by row or tensor: read as transformers reads it, and trained on as it is."""

import json
import os
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from engines import JitterQueues, batches, exchange, final_weights, gpu_plan, opened, train
from packed_files import check_adapters, check_malformed, check_pieces
from safetensors.torch import load_file, save_file
from tiny import LATENT, LLAMA, MIXTURE, oracle
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from trireme.engine.geometry import Geometry
from trireme.engine.run.output.folder import reopen
from trireme.engine.tuning.chosen import adapted, chosen
from trireme.engine.tuning.merge import merge_adapter
from trireme.engine.tuning.packed import as_said, check_packing, unpacked
from trireme.engine.tuning.parts import open_checkpoint
from trireme.kernels.reference import split_master
from trireme.models.config import InputError, Lora, read_config
from trireme.storage.devices import open_device

pytestmark = pytest.mark.grid

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
PAIRS = dict(hidden_size=32, intermediate_size=48, head_dim=8)  # in blocks of 16 x 16 without a short one
WHOLE = 1 << 30
CASES = {  # model_type, keys, block, dtype of the scales, modules that stay
    "dense": ("qwen3", LLAMA, (16, 24), torch.float32, ["lm_head"]),  # short last blocks
    "whole blocks": ("qwen3", LLAMA | PAIRS, (16, 16), torch.bfloat16, ["lm_head"]),
    "powers of two": ("llama", LLAMA, (128, 128), E8M0, ["lm_head", "model.layers.1.mlp"]),
    "experts": ("qwen3_moe", MIXTURE, (16, 24), torch.bfloat16, ["lm_head", "model.layers.0.mlp.gate"]),
    "one in bf16": ("minimax_m2", MIXTURE | dict(num_local_experts=4, intermediate_size=24, head_dim=12, rotary_dim=6),
                    (16, 16), torch.float32, ["model.layers.0.self_attn.k_proj", "lm_head"]),
    "latent": ("deepseek_v3", LATENT | dict(first_k_dense_replace=1, n_group=3, topk_group=2), (16, 16),
               torch.float32, ["lm_head"]),
    "by row, compressed-tensors": ("qwen3", LLAMA, (1, WHOLE), torch.bfloat16, ["lm_head"]),
    "by tensor, compressed-tensors": ("qwen3_moe", MIXTURE, (WHOLE, WHOLE), torch.float32, ["lm_head"]),
    "by group, compressed-tensors": ("llama", LLAMA | dict(hidden_size=32, intermediate_size=64, head_dim=8), (1, 32),
                                     E8M0, ["lm_head"]),
    "by row, fbgemm": ("llama", LLAMA, (1, WHOLE), torch.float32, ["lm_head"]),
    "by tensor": ("llama", LLAMA, (WHOLE, WHOLE), torch.float32, ["lm_head"]),
}  # fmt: skip
ADAPTERS = {
    "experts": ("q_proj", "experts"),
    "one in bf16": ("q_proj", "o_proj"),
    "latent": ("q_a_proj", "kv_b_proj", "o_proj"),
    "by tensor, compressed-tensors": ("experts",),
}
LEFT = ("embed", "norm", "lm_head", "mlp.gate.", "block_sparse_moe.gate.")


def quantized(w, block, dtype):
    """(codes, scales, decoded in bf16), each block by its largest value; by loops."""
    block = min(block[0], w.shape[0]), min(block[1], w.shape[1])
    w, scales = w.float(), torch.empty(-(-w.shape[0] // block[0]), -(-w.shape[1] // block[1]))
    codes, decoded = torch.empty(w.shape, dtype=E4M3), torch.empty(w.shape, dtype=torch.bfloat16)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = w[part].abs().max() / 448
            scale = (scale.log2().ceil().exp2() if dtype == E8M0 else scale).to(dtype).float()
            codes[part] = (w[part] / scale).to(E4M3)
            decoded[part] = (codes[part].float() * scale).bfloat16()
            scales[i, j] = scale
    return codes, scales.to(dtype), decoded


def said(case):
    """(what scales have behind a matrix's name, quantization_config)."""
    _, _, block, dtype, left = CASES[case]
    if "compressed" in case:
        strategy, form = {WHOLE: ("channel", "float-quantized"), 32: ("group", "mxfp8-quantized")}[block[1]]
        strategy, form = ("tensor", "naive-quantized") if block[0] == WHOLE else (strategy, form)
        weights = dict(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False, block_structure=None)
        weights |= dict(group_size=32, scale_dtype="torch.uint8") if strategy == "group" else {}
        groups = dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=dict(num_bits=8)))
        ignored = ["lm_head", r"re:.*mlp\.gate$"]
        return "_scale", dict(
            quant_method="compressed-tensors", format=form, config_groups=groups, ignore=ignored,
            sparsity_config={}, transform_config={}, kv_cache_scheme=None,
        )  # fmt: skip
    if "fbgemm" in case:
        return "_scale", dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=left)
    size = None if block[0] == WHOLE else list(block)
    return "_scale_inv", dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=size,
        modules_to_not_convert=left, scale_fmt="ue8m0" if dtype == E8M0 else "float",
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """case -> (a checkpoint in fp8, the same in bf16)."""
    found = {}

    def make(case):
        if case not in found:
            model_type, keys, block, dtype, left = CASES[case]
            suffix, quantization = said(case)
            packed, plain = (tmp_path_factory.mktemp(name) for name in ("fp8", "bf16"))
            reference, _ = oracle(model_type, keys)
            reference.bfloat16().save_pretrained(plain)
            state = load_file(plain / "model.safetensors")
            state = {name: t.float() if name.endswith("correction_bias") else t for name, t in state.items()}
            codes = dict(state)
            for name, w in state.items():
                kept = any(name.startswith(module + ".") for module in left) or any(part in name for part in LEFT)
                if w.dim() == 2 and not kept:
                    codes[name], scales, state[name] = quantized(w, block, dtype)
                    single = () if case == "by tensor" else (1,)
                    codes[f"{name}{suffix}"] = scales.view(single) if block == (WHOLE, WHOLE) else scales
            save_file(codes, packed / "model.safetensors", {"format": "pt"})
            save_file(state, plain / "model.safetensors", {"format": "pt"})
            config = json.loads((plain / "config.json").read_text())
            config["quantization_config"] = quantization
            (packed / "config.json").write_text(json.dumps(config))
            found[case] = packed, plain
        return found[case]

    return make


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_adapters_are_trained_on_fp8_as_on_its_copy_in_bf16(made, case, tmp_path):
    """Packed in every tier, in place too, blocks and sub-layers: bitwise the run on decoded weights."""
    (folder, plain), targets = made(case), ADAPTERS.get(case, ("q_proj", "down_proj"))
    device, late = open_device(tmp_path), lambda: JitterQueues(1)
    ways = (("gpu", False, {}), ("host", False, {}), ("ssd", False, dict(queues=late())), ("ssd", True, {}),
            ("host", False, dict(halves=True)), ("ssd", True, dict(halves=True, window=1, queues=late())))  # fmt: skip
    ways += (("ssd", True, dict(halves=True, slices=2)),) * (case == "experts")
    if case == "one in bf16":  # q, k and v of one layer are decoded as they are read: not in place
        ways = ways[4:5]
    elif case not in ("dense", "experts"):
        ways = ways[3:5]
    check_adapters(folder, plain, targets, device, ways, 0.8)


def test_codes_and_scales_are_what_transformers_decodes(made):
    folder, _ = made("whole blocks")
    source, state = open_checkpoint(folder, read_config(folder).packing), load_file(folder / "model.safetensors")
    for name in (name for name in source.tensors if source.packs(name)):
        parts = {"weight": state[name], "weight_scale_inv": state[f"{name}_scale_inv"]}
        theirs = Fp8Dequantize(None)._dequantize_one(*parts.values(), torch.bfloat16)
        whole = check_pieces(source, name, (0, 5), (500, 700), (512, 1024))
        assert np.array_equal(whole.view(np.int16), theirs.view(torch.int16).flatten().numpy())


@pytest.mark.parametrize("case", ["whole blocks", "experts"])
def test_all_is_trained_from_exact_masters_and_written_in_bf16(made, case, tmp_path):
    """What is written before the first step is what transformers makes of the release, but for ties, which masters
    round up: it decodes on a CPU."""
    folder, plain = made(case)
    cfg, source, _ = opened(folder)
    e, x = exchange(cfg, source)
    x.load()
    state = load_file(folder / "model.safetensors")
    name = next(n for n in state if n.endswith("down_proj.weight") and f"{n}_scale_inv" in state)
    values = np.concatenate(list(source.values(name)))
    grid = state[f"{name}_scale_inv"].float()
    for size, dim in zip(CASES[case][2], (0, 1), strict=True):
        grid = grid.repeat_interleave(size, dim)
    wide = state[name].float() * grid[: state[name].shape[0], : state[name].shape[1]]
    assert np.array_equal(values, wide.flatten().numpy())
    if case == "whole blocks":
        assert torch.equal(final_weights(e)[name], wide.flatten())
    out = tmp_path / "out"
    x.save(out)
    reopen(source, out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    written, exact = (load_file(p / "model.safetensors") for p in (out, plain))
    assert written.keys() == exact.keys()
    assert all(torch.equal(split_master(t.float())[0], t) for t in exact.values())
    assert torch.equal(written[name], split_master(wide)[0])
    for there, t in written.items():
        apart = t.view(torch.int16).int() - exact[there].view(torch.int16).int()
        assert apart.min() >= 0
        assert apart.max() <= 1
        assert not apart.any() or f"{there}_scale_inv" in state
    if case == "whole blocks":
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        assert theirs.keys() == exact.keys()
        assert all(torch.equal(t, exact[name]) for name, t in theirs.items())
        assert AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict().keys() == theirs.keys()
    train(e, batches(cfg, 1, 2, 24))
    x.save(tmp_path / "trained")
    assert not torch.equal(load_file(tmp_path / "trained/model.safetensors")[name], written[name])


def test_what_stays_frozen_is_copied_as_it_is(made, tmp_path):
    folder, _ = made("dense")
    cfg, source, _ = opened(folder, lambda cfg: chosen(cfg, (), ("*norm*",)))
    e, x = exchange(cfg, source)
    x.load()
    train(e, batches(cfg, 1, 2, 24))
    x.save(tmp_path / "out")
    before, after = ({n: t.view(torch.uint8) for n, t in load_file(p / "model.safetensors").items()}
                     for p in (folder, tmp_path / "out"))  # fmt: skip
    assert {n for n, t in before.items() if torch.equal(t, after[n])} == {n for n in before if "norm" not in n}


def test_one_layer_is_trained_and_the_other_stays_packed_in_memory(made, tmp_path):
    """All is written in bf16: the frozen layer as transformers decodes it."""
    folder, plain = made("dense")
    cfg, source, _ = opened(folder, lambda cfg: chosen(cfg, ("*layers.0*",), ()))
    e, x = exchange(cfg, source)
    packed = {t.name for layout in e.geo.base for t in layout.tensors if t.name.endswith("_codes")}
    assert packed
    assert all(".layers.0." in name for name in packed)
    x.load()
    train(e, batches(cfg, 1, 2, 24))
    x.save(tmp_path / "out")
    exact, after = (load_file(p / "model.safetensors") for p in (plain, tmp_path / "out"))
    assert exact.keys() == after.keys()
    assert {name for name, t in exact.items() if torch.equal(t, after[name])} == {n for n in exact if ".layers.0." in n}


def test_in_fp32_nothing_is_rounded_to_bf16(made, tmp_path):
    """Nor what is decoded as it is read: q, k and v of a layer where one of them is not packed."""
    folder, plain = made("one in bf16")
    state, packed = (load_file(path / "model.safetensors") for path in (plain, folder))
    rows, columns = CASES["one in bf16"][2]
    for name in (name for name in state if f"{name}_scale_inv" in packed):
        scales = packed[f"{name}_scale_inv"].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        state[name] = packed[name].float() * scales[: len(state[name]), : state[name].shape[1]]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    found = []
    for path in (folder, tmp_path):
        cfg, source, _ = opened(path, lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
        e, x = exchange(cfg, source, dtype="F32")
        x.load()
        found.append(train(e, batches(cfg, 1, 2, 24)))
    assert found[0] == found[1]


def test_a_merged_model_is_that_of_the_decoded_base(made, tmp_path):
    """Each matrix is rounded once: what the adapter changes is decoded in fp32."""
    folder, plain = made("dense")
    base = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    keys = dict(r=2, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj"])
    peft.get_peft_model(base, peft.LoraConfig(**keys)).save_pretrained(tmp_path / "adapter")
    cfg = read_config(folder)
    merge_adapter(tmp_path / "adapter", cfg, open_checkpoint(folder, cfg.packing), tmp_path / "merged")
    ours, theirs, packed = (load_file(p / "model.safetensors") for p in (tmp_path / "merged", plain, folder))
    factors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        if not name.endswith("q_proj.weight"):
            assert torch.equal(t, theirs[name])
            continue
        rows, columns = CASES["dense"][2]
        scales = packed[f"{name}_scale_inv"].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        a, b = (factors[f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight"].double() for x in "AB")
        exact = packed[name].double() * scales[: len(t), : t.shape[1]].double() + 3 * b @ a
        least = (exact.bfloat16() - exact).abs()
        assert ((t - exact).abs() <= 1.01 * least).all()
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


def test_config_alone_says_what_is_packed(made):
    """A plan without the files has the bytes of one with them."""
    for case in CASES.keys() - {"one in bf16"}:
        lora = Lora(2, 4.0, ("o_proj",))
        planned = adapted(read_config(made(case)[0]), lora)
        cfg, _, _ = opened(made(case)[0], lambda cfg, lora=lora: adapted(cfg, lora))
        plan = gpu_plan(cfg, dtype="BF16")
        dtype = cfg.packing.parts[1].dtypes[0]
        planned = replace(planned, packing=planned.packing.with_dtypes(("F8_E4M3", dtype)))
        bytes_of = lambda cfg, plan=plan: [layout.nbytes for layout in Geometry.of(cfg, plan).base]
        assert bytes_of(as_said(planned)) == bytes_of(planned) == bytes_of(cfg)


@pytest.mark.parametrize(("case", "keys", "end", "dtype"), [
    ("by tensor", {}, "_scale", torch.float32),  # of AutoFP8, without a weight_block_size
    ("by row, compressed-tensors", None, "_scale", torch.float16),
    ("dense", dict(scale_fmt="ue8m0", weight_block_size=[16, 24]), "_scale_inv", torch.float32),  # as DeepSeek-V3.1
])  # fmt: skip
def test_other_spellings_and_dtypes_of_scales(made, tmp_path, case, keys, end, dtype):
    folder, values = made(case)[0], []
    config = json.loads((folder / "config.json").read_text())
    before = said(case)[0]
    state = load_file(folder / "model.safetensors")
    spelled = {n.removesuffix(before) + end if n.endswith(before) else n: t for n, t in state.items()}
    state = {n: t.to(dtype) if n.endswith(end) else t for n, t in spelled.items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    if keys is not None:
        config["quantization_config"] = dict(quant_method="fp8", activation_scheme="static") | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, source, _ = opened(tmp_path)
    for name in (name for name in source.tensors if source.packs(name)):
        scales = state[name + end].float()
        if case == "dense":
            scales = scales.repeat_interleave(16, 0).repeat_interleave(24, 1)[
                : state[name].shape[0], : state[name].shape[1]
            ]
        values = np.concatenate(list(source.values(name)))
        assert np.array_equal(values, (state[name].float() * scales).flatten().numpy())
    assert len(values)


NAME = "model.layers.1.mlp.down_proj.weight"  # (40, 56): scales (3, 3)
HOSTILE = {  # case -> (change of the tensors, words)
    "no scale": (lambda s: s.pop(f"{NAME}_scale_inv"), f"{NAME} is F8_E4M3, and its scales, {NAME}_scale_inv, are"),
    "no codes": (lambda s: s.pop(NAME), f"{NAME}_scale_inv holds scales of fp8, but {NAME} is missing"),
    "two forms": (lambda s: s.update({NAME: torch.zeros(40, 56)}), f"but {NAME} is F32: one tensor in two forms"),
    "another block": (
        lambda s: s.update({f"{NAME}_scale_inv": torch.ones(3, 2)}),
        r"is F8_E4M3 \[40, 56\] and .* F32 \[3, 2\]; fp8 has F8_E4M3 \[out, in\] and F32 .*\[out / 16, in / 24\]",
    ),
    "another dtype": (lambda s: s.update({f"{NAME}_scale_inv": torch.ones(3, 3).half()}), r"_scale_inv F16 \[3, 3\]"),
    "a vector": (
        lambda s: s.update({NAME: torch.zeros(2240).to(E4M3)}), r"is F8_E4M3 \[2240\] and .*fp8 has F8_E4M3 \[out"),
    "NaN in codes": (lambda s: s[NAME].view(torch.uint8)[3].fill_(127), f"safetensors: {NAME} holds NaN;"),
    "NaN in scales": (lambda s: s[f"{NAME}_scale_inv"][1].fill_(float("nan")), r"_scale_inv scales by more than 2\^"),
    "infinite scale": (lambda s: s[f"{NAME}_scale_inv"][1].fill_(-torch.inf), r"_scale_inv scales by more than 2\^"),
    "another shape": (
        lambda s: s.update({NAME: s[NAME][:39].contiguous()}), r"down_proj.weight has shape \[39, 56\], config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_release_is_one_line(made, case, tmp_path):
    check_malformed(made("dense")[0], *HOSTILE[case], tmp_path)


def test_config_and_tensors_have_to_agree(made, tmp_path):
    folder, plain = made("dense")
    cfg, said = read_config(plain), []
    with pytest.raises(InputError, match='tensors in fp8, but config.json has no "quantization_config"'):
        check_packing(cfg, open_checkpoint(folder, replace(read_config(folder).packing)), said.append)
    assert not said
    cfg = read_config(folder)
    check_packing(cfg, open_checkpoint(plain, cfg.packing), said.append)
    assert "no tensor is in fp8: all are read as they are" in said[0]


def test_scales_of_activations_are_named_and_not_used(made, tmp_path):
    folder, _ = made("dense")
    state, said = load_file(folder / "model.safetensors"), []
    state |= {
        f"model.layers.0.{end}": torch.ones(()) for end in ("mlp.down_proj.activation_scale", "self_attn.kv_scale")
    }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    source = open_checkpoint(tmp_path, read_config(folder).packing, said.append)
    assert "2 scales of activations, as model.layers.0.mlp.down_proj.activation_scale, are not used" in said[0]
    assert not any(name.endswith(("activation_scale", "kv_scale")) for name in source.tensors)


def test_the_key_of_early_releases_is_read(made, tmp_path):
    folder, _ = made("by row, compressed-tensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["compression_config"] = raw.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    os.link(folder / "model.safetensors", tmp_path / "model.safetensors")
    cfg = read_config(tmp_path)
    assert cfg == read_config(folder)
    written = unpacked(cfg, open_checkpoint(tmp_path, cfg.packing)).others["config.json"]
    assert json.loads(written).keys() == raw.keys() - {"compression_config"}

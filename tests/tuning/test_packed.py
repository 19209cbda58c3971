"""Packed checkpoints, one matrix: every format is read as published, trained on as it is, and written in bf16."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from adapters_of_peft import loaded
from engines import JitterQueues, adapters, batches, exchange, final_weights, gpu_plan, opened, train
from packed_files import FORMATS, STATE, rewrite, write_shards
from runs import NARROW, losses, make_small, options, stopped
from safetensors.torch import load_file, save_file
from tiny import HYBRID, LLAMA, oracle

from trireme.engine.exchange import Exchange
from trireme.engine.geometry import Geometry
from trireme.engine.run.loop import train as finetune
from trireme.engine.tuning.base import why_copied
from trireme.engine.tuning.chosen import adapted, train_only
from trireme.engine.tuning.merging import merge_adapter
from trireme.engine.tuning.packed_source import as_configured, unpacked
from trireme.engine.tuning.parts import as_stored, open_checkpoint
from trireme.kernels.optimizer.reference import split_master
from trireme.models.config import InputError, Lora, read_config
from trireme.storage.devices import open_device
from trireme.storage.headers import CheckpointError

pytestmark = pytest.mark.grid
EVERY = pytest.mark.parametrize("form", FORMATS)


def pieces(source, name):
    """A tensor's values; parts of it are those of the whole."""
    whole = np.concatenate(list(source.values(name)))
    for first, last in ((0, 5), (500, 700), (64, 1024), (len(whole) - 3, len(whole))):
        assert np.array_equal(np.concatenate(list(source.values(name, first, last))), whole[first:last])
    return whole


def written(e, source, out):
    """(tensors, config.json) of what an engine has."""
    Exchange(e.cfg, source, e.placement).save(out)
    config = json.loads((out / "config.json").read_text())
    return load_file(out / "model.safetensors"), config


@pytest.mark.full
@EVERY
def test_adapters_are_trained_as_on_its_copy_in_bf16(made, form, tmp_path):
    """Packed in every tier, in place too, blocks and sub-layers: bitwise the run on decoded weights."""
    (folder, plain, _), targets, late = made(form), FORMATS[form].targets, lambda: JitterQueues(1)
    last = ("ssd", True, dict(halves=True, window=1, queues=late()))
    ways = [("gpu", False, {}), ("ssd", True, {}), ("ram", False, dict(halves=True)), last]
    if form in ("fp8, experts", "gpt-oss"):
        ways += [("ssd", True, dict(halves=True, slices=2)), ("ram", False, dict(halves=True, slices=3))]
    elif form in ("fp8, one in bf16", "nf4, double", "nf4, experts"):  # some is decoded as it is read: not in place
        ways = [("ram", False, {}), ("ssd", False, dict(halves=True))]
        cfg, source, stored = opened(folder, lambda cfg: adapted(cfg, Lora(2, 4.0, targets)))
        assert why_copied(cfg, "BF16", source, stored, [folder])
    elif form not in ("fp8", "nvfp4"):
        ways = [last]
    seen, weights, wide = adapters(plain, targets, None, "gpu")
    for tier, in_place, change in ways:
        found, after, packed = adapters(folder, targets, open_device(tmp_path), tier, in_place, **change)
        assert found == seen, (tier, change)
        assert all(torch.equal(t, weights[name]) for name, t in after.items())
        assert packed < 0.8 * wide


@pytest.mark.full
@EVERY
def test_all_is_trained_from_exact_masters_and_written_in_bf16(made, form, tmp_path):
    (folder, plain, decoded), exact = made(form), FORMATS[form].exact
    cfg, source, _ = opened(folder)
    for name, values in decoded.items():
        flat = values.bfloat16().view(torch.uint16) if exact else values
        assert np.array_equal(pieces(source, name), flat.flatten().numpy())
    e, x = exchange(cfg, source)
    x.load()
    masters = final_weights(e)
    assert all(torch.equal(masters[n], values.flatten()) for n, values in decoded.items() if n in masters)
    before, config = written(e, source, tmp_path / "before")
    assert "quantization_config" not in config
    assert before.keys() == load_file(plain / "model.safetensors").keys()
    assert all(torch.equal(before[n], split_master(values)[0]) for n, values in decoded.items())
    opener = loaded(tmp_path / "before").state_dict()
    assert all(torch.equal(opener[n], before[n].float()) for n in opener.keys() & before.keys())
    train(e, batches(cfg, 1, 2, 24))
    after, _ = written(e, source, tmp_path / "after")
    assert not all(torch.equal(after[name], before[name]) for name in decoded)


def test_codes_and_scales_are_what_transformers_decodes(made):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # seconds

    folder, plain, _ = made("fp8, whole blocks")
    source, state = open_checkpoint(folder, read_config(folder).packing), load_file(folder / "model.safetensors")
    for name in (name for name in source.tensors if source.packs(name)):
        theirs = Fp8Dequantize(None)._dequantize_one(state[name], state[f"{name}_scale_inv"], torch.bfloat16)
        assert np.array_equal(pieces(source, name).view(np.int16), theirs.view(torch.int16).flatten().numpy())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    exact = load_file(plain / "model.safetensors")
    assert all(torch.equal(t, exact[name]) for name, t in theirs.items())


@EVERY
def test_config_alone_says_what_is_packed(made, form):
    """A plan without the files has the bytes of one with them; config.json and tensors have to agree."""
    folder, plain, _ = made(form)
    lora = Lora(2, 4.0, (FORMATS[form].targets[0],))
    cfg, source, _ = opened(folder, lambda cfg: adapted(cfg, lora))
    planned = adapted(read_config(folder), lora)
    dtypes = tuple(part.dtypes[0] for part in cfg.packing.parts)
    planned = replace(planned, packing=replace(planned.packing.with_dtypes(dtypes), experts=cfg.packing.experts))
    bytes_of = lambda cfg: [layout.nbytes for layout in Geometry.of(cfg, gpu_plan(cfg, dtype="BF16")).base]
    if form != "fp8, one in bf16":
        assert bytes_of(as_configured(planned)) == bytes_of(planned) == bytes_of(cfg)
    said = []
    open_checkpoint(folder, read_config(folder).packing, said.append)
    assert not said
    open_checkpoint(plain, read_config(folder).packing, said.append)
    assert "no tensor" in said[0]
    with pytest.raises(CheckpointError, match="quantization_config"):
        open_checkpoint(folder, read_config(plain).packing)


@pytest.mark.parametrize("form", ["fp8", "gpt-oss"])
@pytest.mark.parametrize("layers", ["", ".layers.0."])
def test_what_stays_frozen_is_copied_as_it_is(made, form, layers, tmp_path):
    """Of one layer, in bf16: the other is decoded as it is read."""
    folder, plain, decoded = made(form)
    freeze = tuple(name for name in decoded if layers in name)
    cfg, source, _ = opened(folder, lambda cfg: train_only(cfg, freeze, ()))
    e, x = exchange(cfg, source)
    parts = {t.name for layout in e.geo.base for t in layout.tensors if cfg.packing.part_of(t.name)}
    assert parts
    assert all(layers in name for name in parts)
    x.load()
    train(e, batches(cfg, 1, 2, 24))
    after, _ = written(e, source, tmp_path)
    before, bf16 = (load_file(p / "model.safetensors") for p in (plain if layers else folder, plain))
    assert before.keys() == after.keys()
    same = {n for n, t in before.items() if torch.equal(t.view(torch.uint8), after[n].view(torch.uint8))}
    assert same == {name for name in before if name in freeze or name not in bf16}


def test_shards_with_parts_in_two_files_are_written_in_bf16(made, tmp_path):
    folder, _, decoded = made("gpt-oss")
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(0).byte()  # where the next matrix begins
    names = sorted(state)
    write_shards(tmp_path, {f"model-{i}.safetensors": {n: state[n] for n in names[i::2]} for i in range(2)})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    x = exchange(*opened(tmp_path)[:2])[1]
    x.load()
    x.save(tmp_path / "out")
    opener = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(opener[name], values.bfloat16()) for name, values in decoded.items())


@pytest.mark.full
def test_in_fp32_nothing_is_rounded_to_bf16(made, tmp_path):
    """Nor what is decoded as it is read: q, k and v of a layer where one of them is not packed."""
    folder, plain, decoded = made("fp8, one in bf16")
    save_file(load_file(plain / "model.safetensors") | decoded, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    seen = []
    for path in (folder, tmp_path):
        cfg, source, _ = opened(path, lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
        e, x = exchange(cfg, source, dtype="F32")
        x.load()
        seen.append(train(e, batches(cfg, 1, 2, 24)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("form", ["fp8", "nvfp4", "nf4, double", "int4"])
def test_a_merged_model_is_that_of_the_decoded_base(made, form, tmp_path):
    """Each matrix is rounded once: what the adapter changes is decoded in fp32."""
    import peft

    folder, plain, decoded = made(form)
    asked = dict(r=2, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj"])
    peft.get_peft_model(loaded(plain), peft.LoraConfig(**asked)).save_pretrained(tmp_path / "adapter")
    cfg = read_config(folder)
    merge_adapter(tmp_path / "adapter", cfg, open_checkpoint(folder, cfg.packing), tmp_path / "merged")
    ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path / "merged", plain))
    factors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        if name.endswith("q_proj.weight"):
            a, b = (factors[f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight"].double() for x in "AB")
            exact = decoded[name].double() + 3 * b @ a
            assert ((t - exact).abs() <= 1.01 * (exact.bfloat16() - exact).abs()).all()
        else:
            assert torch.equal(t, theirs[name])


# ---------------------------------------------------------------- spellings


@pytest.mark.parametrize(("form", "keys", "end", "dtype"), [
    ("fp8 by tensor", {}, "_scale", torch.float32),  # of AutoFP8, without a weight_block_size
    ("fp8 by row", None, "_scale", torch.float16),
    ("fp8", dict(scale_fmt="ue8m0", weight_block_size=[16, 24]), "_scale_inv", torch.float32),  # as DeepSeek-V3.1
])  # fmt: skip
def test_other_spellings_and_dtypes_of_scales(made, tmp_path, form, keys, end, dtype):
    folder, _, decoded = made(form)
    state, before = load_file(folder / "model.safetensors"), "_scale" if form == "fp8 by row" else "_scale_inv"
    state = {n.removesuffix(before) + end if n.endswith(before) else n: t for n, t in state.items()}
    state = {n: t.to(dtype) if n.endswith(end) else t for n, t in state.items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config") if keys is None else None  # of early releases
    if keys is not None:
        config["quantization_config"] = dict(quant_method="fp8", activation_scheme="static") | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, source, _ = opened(tmp_path)
    scale = (lambda t: t.half().float()) if dtype == torch.float16 else (lambda t: t)
    for name, values in decoded.items():
        theirs = state[name].float() * scale(state[name + end].float()) if form == "fp8 by row" else values
        assert np.array_equal(pieces(source, name), theirs.flatten().numpy())
    assert (
        not {"quantization_config", "compression_config"}
        & json.loads(unpacked(open_checkpoint(tmp_path, read_config(tmp_path).packing)).others["config.json"]).keys()
    )


@pytest.mark.parametrize(
    ("form", "key"), [("int4", "ignore"), ("modelopt", "ignore"), ("fp8", "modules_to_not_convert")]
)
def test_matrices_that_are_left_out_stay_as_they_are(made, form, key, tmp_path):
    folder, plain, decoded = made(form)
    name = "model.layers.1.mlp.down_proj.weight"
    plain = load_file(plain / "model.safetensors")[name]

    def change(state):
        for part in [part for part in state if part.startswith(name.removesuffix("weight"))]:
            del state[part]
        state[name] = plain

    rewrite(folder, tmp_path, change, **{key: ["lm_head", "model.layers.1.mlp.down_proj"]})
    cfg, source, _ = opened(tmp_path, lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))))
    assert {n for n in decoded if source.packs(n)} == decoded.keys() - {name}
    assert name not in as_configured(read_config(tmp_path)).packed
    exchange(cfg, source)[1].load()


def test_scales_of_activations_are_named_and_not_used(made, tmp_path):
    names = "model.layers.0.mlp.down_proj.activation_scale", "model.layers.0.self_attn.kv_scale"
    folder = rewrite(made("fp8")[0], tmp_path, lambda s: s.update({name: torch.ones(()) for name in names}))
    said = []
    source = open_checkpoint(folder, read_config(folder).packing, said.append)
    assert names[0] in said[0]
    assert not source.tensors.keys() & set(names)


def test_headers_alone_refuse_a_weight_of_another_dtype(tmp_path):
    """So a dry run does, too. Old buffers and what is copied may be of any."""
    reference, cfg = oracle("llama", LLAMA)
    state = reference.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5, dtype=torch.int8)}
    save_file(state, tmp_path / "model.safetensors")
    assert as_stored(cfg, open_checkpoint(tmp_path)).packing is None
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(state | {name: state[name].to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} is F8_E5M2"):
        as_stored(cfg, open_checkpoint(tmp_path))


# ---------------------------------------------------------------- groups of tensors that are only copied

MTP = "mtp.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """As Qwen3.6 is released in int4: MTP in groups of another size, linear_attn itself among what is left out."""
    from packed_files import in_int4

    folder = tmp_path_factory.mktemp("groups")
    oracle("qwen3_5_text", HYBRID)[0].bfloat16().save_pretrained(folder)
    files = load_file(folder / "model.safetensors") | {f"{MTP}.weight": torch.randn(40, 40).bfloat16()}
    for name in [n for n in files if n.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight"))]:
        parts, _ = in_int4(files.pop(name), "int4", 40 if name.startswith("mtp.") else 8)
        files |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    inner = [f"model.layers.{i}.linear_attn{end}" for i in (0, 2) for end in ("", ".in_proj_a", ".in_proj_b")]
    said = dict(quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head", *inner],
                config_groups=dict(group_0=group(8, "Linear"), group_mtp=group(40, r"re:.*mtp\..*proj$")))  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=said)))
    return folder


def group(size, *targets):
    settings = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=size, actorder=None)
    return dict(format="pack-quantized", targets=list(targets), weights=settings, input_activations=None)


def test_tensors_that_are_copied_may_be_packed_in_another_way(groups):
    cfg, said = read_config(groups), []
    source = open_checkpoint(groups, cfg.packing, said.append)
    assert said == []
    assert source.tensors[f"{MTP}.weight_packed"].dtype == "I32"
    assert as_configured(cfg).packed == as_stored(cfg, source).packed  # config.json alone says the same
    with pytest.raises(CheckpointError, match=rf"{MTP}.weight_\w+ .* Take the BF16"):
        unpacked(source)


@pytest.mark.parametrize(
    "targets", [["Linear"], [r"re:.*mtp\..*", "Linear"], [r"re:.*mtp\..*|.*layers\.0\..*"], [], None]
)
def test_other_groups_of_another_size_are_refused(groups, targets, tmp_path):
    raw = json.loads((groups / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_mtp"]["targets"] = targets
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="scales of several shapes"):
        read_config(tmp_path)


# ---------------------------------------------------------------- malformed

W = "model.layers.1.mlp.down_proj.weight"
E = "model.layers.1.mlp.experts.3.up_proj.weight"
BLOCKS = "model.layers.0.mlp.experts.down_proj"
NAN, INF = float("nan"), float("inf")


def gone(name):
    return lambda s: s.pop(name)


def put(name, value):
    return lambda s: s.update({name: value(s[name]) if callable(value) else value})


def state_of(**change):
    def changed(s):
        state = json.loads(bytes(s[W + STATE].tolist())) | change
        s[W + STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return changed


def byte(name, place, value):
    return lambda s: s[name].view(torch.uint8).view(-1)[place].fill_(value)


MALFORMED = {  # format -> change of the tensors, the culprit
    "fp8": [
        (gone(f"{W}_scale_inv"), W), (gone(W), W),
        (put(W, torch.zeros(40, 56)), W), (put(f"{W}_scale_inv", torch.ones(3, 2)), r"F32 \[3, 2\]"),
        (put(f"{W}_scale_inv", torch.ones(3, 3).half()), "_scale_inv is F16"), (byte(W, 3, 127), f"{W} holds NaN"),
        (put(W, torch.zeros(2240).to(torch.float8_e4m3fn)), r"F8_E4M3 \[2240\]"),
        (put(W, lambda t: t[:39].contiguous()), r"\[39, 56\]"),
        (lambda s: s[f"{W}_scale_inv"][1].fill_(NAN), "_scale_inv scales by more"),
        (lambda s: s[f"{W}_scale_inv"][1].fill_(-INF), "_scale_inv scales by more"),
        (put(W.removeprefix("model."), torch.zeros(40, 56)), "two names of one tensor"),
    ],
    "nf4, double": [
        (gone(W + STATE), W), (gone(f"{W}.absmax"), f"{W}.absmax is missing"), (gone(W), f"{W} is missing"),
        (gone(f"{W}.nested_absmax"), f"{W}.nested_absmax is missing"),
        (put(W, torch.zeros(40, 56)), r"is F32 \[40, 56\]"),
        (put(W, lambda t: t[:-1].clone()), r"U8 \[1119, 1\]"),
        (put(f"{W}.absmax", lambda t: t[:9].clone()), r"U8 \[9\]"),
        (lambda s: s.update({f"{W}.quant_state.bitsandbytes__fp4": s.pop(W + STATE)}), "to fp4"),
        (put(f"{W[:-7]}.SCB", torch.ones(40)), "to 8 bits"), (lambda s: s[W + STATE][0].fill_(1), "JSON"),
        (state_of(blocksize=128), "blocks of 64"), (state_of(shape=[40, "a"]), "two sizes"),
        (state_of(shape=[1 << 30, 1 << 30]), "of a matrix of"), (state_of(shape=[56, 40]), r"shape \[56, 40\]"),
        (state_of(nested_offset=None), "nested_offset"),
        (state_of(nested_offset=INF), "scales by more|NaN or infinite"),
        (lambda s: s[f"{W}.nested_absmax"][0].fill_(NAN), r"scales by more|NaN or infinite"),
    ],
    "int4": [
        (gone(f"{W}_scale"), W), (gone(f"{W}_packed"), W),
        (put(W, torch.zeros(40, 56)), f"{W} is there twice"),
        (put(f"{W}_packed", lambda t: t[:, :6].contiguous()), r"_packed is I32 \[40, 6\]"),
        (put(f"{W}_shape", torch.tensor([56, 40])), r"is \[56, 40\]"),
        (put(f"{W}_shape", torch.tensor([40, 53])), "of 8"),
        (put(f"{W}_shape", torch.ones(3)), r"_shape is F32 \[3\]"),
        (put(f"{W}_packed", torch.zeros(40, 28).to(torch.uint8)), W),
        (lambda s: s[f"{W}_scale"][1].fill_(NAN), f"{W}_scale scales by more"),
        (put(f"{W}_g_idx", torch.arange(56).flip(0) // 8), "by activation order"),
    ],
    "int4, zeros": [(gone(f"{W}_zero_point"), W)],
    "nvfp4": [
        (gone(f"{W}_global_scale"), W), (byte(f"{W}_scale", 3, 127), "_scale holds NaN"),
        (lambda s: s[f"{W}_global_scale"].zero_(), f"{W}_global_scale scales by more"),
    ],
    "modelopt": [(lambda s: s[f"{W}_scale_2"].fill_(INF), f"{W}_scale_2 scales by more")],
    "mxfp4": [
        (byte(f"{W}_scale", 3, 255), "scales by more"),
        (put(f"{W}_scale", torch.zeros(64, 6).to(torch.uint8)), r"U8 \[out, in / 32\]"),
    ],
    "deepseek": [
        (put(E, torch.zeros(32, 64)), E), (gone(f"{E}_scale_inv"), E),
        (put(f"{E}_scale_inv", torch.ones(1, 2).to(torch.float8_e8m0fnu)), r"fp4 has I8"),
    ],
    "gpt-oss": [
        (put(f"{BLOCKS}_scales", lambda t: t[:, :-1].contiguous()), r"U8 \[6, 63, 1\]"),
        (byte(f"{BLOCKS}_scales", 9, 255), f"{BLOCKS}_scales scales by more"),
        (put(BLOCKS, torch.zeros(6, 32, 64)), f"{BLOCKS} is there twice"),
    ],
}  # fmt: skip
CASES = [(form, i) for form, cases in MALFORMED.items() for i in range(len(cases))]


@pytest.mark.parametrize(("form", "case"), CASES)
def test_a_malformed_release_is_one_line(made, form, case, tmp_path):
    """For adapters and for full fine-tuning."""
    change, culprit = MALFORMED[form][case]
    rewrite(made(form)[0], tmp_path, change)
    for change_of in (lambda cfg: adapted(cfg, Lora(2, 4.0, ("q_proj",))), lambda cfg: cfg):
        with pytest.raises((CheckpointError, InputError), match=culprit) as refused:
            cfg, source, _ = opened(tmp_path, change_of)
            exchange(cfg, source)[1].load()
        assert "\n" not in str(refused.value)


# ---------------------------------------------------------------- whole runs


@pytest.mark.full
@pytest.mark.parametrize(("form", "lora"), [("fp8", 4), ("modelopt", None)])
def test_a_run_on_packed_weights_is_stopped_and_goes_on(tmp_path, monkeypatch, form, lora):
    folder = make_small(tmp_path, **NARROW) / "checkpoint"
    state, files = load_file(folder / "model.safetensors"), {}
    for name, t in state.items():
        packed = FORMATS[form].pack(name, t)[0] if t.dim() == 2 and "layers" in name else {"": t}
        module = name.removesuffix(".weight") if any(end.startswith(".weight") for end in packed) else name
        files |= {module + end: part for end, part in packed.items()}
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | dict(quantization_config=FORMATS[form].said)
    (folder / "config.json").write_text(json.dumps(config))
    run = options(tmp_path, tmp_path / "out", "ssd" if lora else "gpu", **(dict(lora=lora, merge=True) if lora else {}))
    finetune(run)
    curve, made = losses(tmp_path / "out"), tmp_path / ("out/merged" if lora else "out")
    assert curve[6][0] < curve[1][0]
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    assert load_file(made / "model.safetensors").keys() == state.keys()
    cut = replace(run, out=str(tmp_path / "cut"))
    stopped(cut, 3, monkeypatch)
    finetune(replace(cut, resume=cut.out))
    assert losses(tmp_path / "cut") == curve

"""The parsers that read what a stranger may have written, each as a Target made in an empty folder."""

from __future__ import annotations

import io
import json
import shutil
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engines import write_plan
from mutations import Target, as_json, as_lines, as_text
from targets_data import DATA
from targets_rows import ROW_TARGETS

from trireme.engine.data import dataset as data
from trireme.engine.plan import DoesNotFit, Limits, Plan, UnitPlan
from trireme.engine.planner.clock import Clock
from trireme.engine.run.begin.snapshot import Pinned, check_model, check_snapshot, identity, pinned_of
from trireme.engine.run.cli import parse
from trireme.engine.run.config.config_file import changes, saved_options
from trireme.engine.run.options import Options
from trireme.engine.run.output import exports
from trireme.engine.run.output.folder import has_started
from trireme.engine.run.output.log import RunLog
from trireme.engine.run.output.records import Mark
from trireme.engine.run.plan import Planner, check_step
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.adapters import adapter_shapes, peft_names
from trireme.engine.tuning.chosen import adapted
from trireme.engine.tuning.peft import read_adapter
from trireme.models import hf
from trireme.models.config import InputError, Lora, Rope, parse_config, read_config, uniform
from trireme.models.families.experts import REFUSED
from trireme.models.families.table import FAMILIES, WRAPPERS, Family
from trireme.models.rows import rope_tables
from trireme.storage.aio import IO, arena
from trireme.storage.checkpoint import open_source
from trireme.storage.devices import Device
from trireme.storage.files import StoreError
from trireme.storage.headers import CheckpointError, list_tensors
from trireme.storage.layout import sequential
from trireme.storage.store import Store
from trireme.storage.untrusted import SEAL, checksum, parse_json

# ---------------------------------------------------------------- a checkpoint

TENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [32, 38]},
}


def _safetensors(header: Any) -> bytes:
    text = as_json(header)
    return len(text).to_bytes(8, "little") + text + bytes(38)


def header(folder: Path) -> Target:
    def read(content: bytes) -> None:
        (folder / "model.safetensors").write_bytes(content)
        open_source(folder)

    return Target([TENSORS], _safetensors, read, (CheckpointError,))


def index(folder: Path) -> Target:
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (folder / "1.safetensors").write_bytes(_safetensors(TENSORS))
    (folder / "2.safetensors").write_bytes(_safetensors({"c": TENSORS["a"], "b": TENSORS["b"]}))

    def read(content: bytes) -> None:
        (folder / "model.safetensors.index.json").write_bytes(content)
        open_source(folder)

    value = {"metadata": {"total_size": 76}, "weight_map": weight_map}
    return Target([value], as_json, read, (CheckpointError,))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": True}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.1}
TYPES = ["full_attention", "sliding_attention"]
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=12)
KINDS = ["linear_attention", "full_attention"]
OWN = {
    "iquestcoder": {"sliding_window": None, "use_sliding_window": False},
    "solar_open": {"first_k_dense_replace": 0},
    "dots1": {"n_shared_experts": 1},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "nemotron_h": dict(
        layers_block_type=[*KINDS, "mlp"],
        num_hidden_layers=3,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=12,
    ),
    "olmo_hybrid": {"layer_types": KINDS},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "ssm_multipliers": [0.5] * 5, "mlp_multipliers": [0.5] * 2},
}
QUANTIZED = dict(fmt="e4m3", weight_block_size=[128, 128], modules_to_not_convert=["lm_head", "model.layers.0"])
SIZES = dict(vocab=97, width=64, n_layers=2, n_heads=4, ffn=56, max_positions=64, eps=1e-5, theta=1e4)


def _config(name: str, family: Family) -> dict[str, Any]:
    """A config.json with most of what a family reads."""
    found = {family.spelled[field]: size for field, size in SIZES.items() if field in family.spelled}
    found |= {"model_type": name, family.spelled["act"]: family.acts[0], "sliding_window": 4}
    found |= {"num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": not family.experts}
    if family.latent:
        found |= {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 10}
        found |= {"head_dim": 8, "q_lora_rank": 12, "kv_lora_rank": 16, "n_group": 2, "topk_group": 1}
    found |= {"max_window_layers": 1, "no_rope_layers": [1, 0]} if family.unrotated == "listed" else {}
    found |= {"num_local_experts": 0, "layer_types": ["attention"] * 2} if family.windows == "dense" else {}
    found |= {"layer_types": TYPES} if family.windows == "pattern" else {}
    if family.scan:
        found |= {"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
        found |= {"sliding_window": None, "use_sliding_window": False}
    if family.experts:
        found |= {family.experts.count_key: 6, "num_experts_per_tok": 2, family.experts.width_key: 24}
        found |= {
            "mlp_only_layers": [0],
            "first_k_dense_replace": 1,
            "quantization_config": QUANTIZED | {"quant_method": family.packings[0]},
        }
    found |= OWN.get(name, {})
    if name == "mellum":  # its rope_parameters alone hold the base
        del found["rope_theta"]
    if family.local_theta:
        return found | {"rope_parameters": {TYPES[0]: YARN, TYPES[1]: {"rope_type": "default", "rope_theta": 1e4}}}
    return found | {"rope_scaling": LONG if family.longrope else YARN | {"llama_4_scaling_beta": 0.0}}


def config(folder: Path) -> Target:
    def read(content: bytes) -> None:
        (folder / "config.json").write_bytes(content)
        with suppress(InputError):
            read_config(folder, 2.0)
        cfg = read_config(folder)
        if cfg.head_dim <= 1 << 12:
            rope_tables(cfg, 24, "cpu")
        hf.sources(cfg, {"a": (4, 2), "b": (3,)})

    values = [_config(name, family) for name, family in FAMILIES.items() if not family.inner]
    texts = {name: wrapper.texts[0] for name, wrapper in WRAPPERS.items()}
    values += [{"model_type": name, "text_config": _config(text, FAMILIES[text])} for name, text in texts.items()]
    for value in values:
        parse_config(value)
    words = {*values[0], *YARN, *LONG, *TYPES, *FAMILIES, *REFUSED, "rope_parameters", "layer_types", "head_dim"}
    return Target(values, as_json, read, (InputError,), junk=(*sorted(words), YARN, LONG, TYPES))


ADAPTER = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none",
           "target_modules": ["q_proj", "v_proj"], "init_lora_weights": True, "use_rslora": False, "use_dora": False,
           "base_model_name_or_path": "m", "fan_in_fan_out": False, "inference_mode": True}  # fmt: skip


def adapter(folder: Path) -> Target:
    """Its config and the header of its weights, parted by a character that JSON has no use for."""
    cfg = uniform("llama", 61, 16, 1, 4, 2, 4, 24, 64, 1e-5, False, rope=Rope(1e4))
    shapes = adapter_shapes(adapted(cfg, Lora(2, 4.0, ("q_proj", "v_proj"))))
    names = peft_names(adapted(cfg, Lora(2, 4.0, ("q_proj", "v_proj"))))
    layout = sequential([(names[name], "F32", shape) for name, shape in shapes.items()])
    header = {"__metadata__": {"format": "pt"}, **list_tensors(layout)}

    def read(content: bytes) -> None:
        said, _, text = content.partition(b"\x1e")
        (folder / "adapter_config.json").write_bytes(said)
        weights = len(text).to_bytes(8, "little") + text + bytes(layout.nbytes)
        (folder / "adapter_model.safetensors").write_bytes(weights)
        read_adapter(folder, cfg, merging=len(content) % 2 == 0)

    write = lambda files: b"\x1e".join(map(as_json, files)) if isinstance(files, list) else as_json(files)
    return Target([[ADAPTER, header], [ADAPTER | {"target_modules": "all-linear"}, header]], write, read, (InputError,))


# ---------------------------------------------------------------- what a run has written


def _sealed(fields: Any) -> bytes:
    """As `seal` writes it, with the checksum that it had before it was changed."""
    return json.dumps(fields).encode()


def _forged(content: bytes) -> bytes:
    """The same with the right checksum."""
    sealed = SEAL.match(content)
    sum = sealed and checksum([content[sealed.end() :]]).encode()
    return content[: sealed.start(2)] + sum + content[sealed.end(2) :] if sealed else content


def _store(folder: Path, name: str) -> Target:
    """A store with a snapshot, of which the file `name` is changed. Nothing outside of it may be touched."""
    good, victim, here, auxiliary = (folder / name for name in ("good", "victim", "store", "auxiliary"))
    span = sequential([("w", "F32", (1024,)), ("n", "F32", (7,))])
    good.mkdir()
    auxiliary.mkdir()
    (auxiliary / "config.json").write_text("{}")
    uuid.uuid4 = lambda: uuid.UUID(int=1)  # the same files every time
    with Store.create([Device(good, IO(), False)], auxiliary=auxiliary) as store:
        for shard in ("weights-00000", "moments-00000-0000"):
            store.add(shard, span, weights=shard.startswith("w"))
            store.write(shard, arena(span.span)).result()
        store.commit(3, {"step": 3, "cut": {"batch_size": 4}})
    path = next(good.rglob(name)).relative_to(good)

    def read(content: bytes) -> None:
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(good, here)
        victim.write_text("untouched")
        (here / path).write_bytes(_forged(content))
        try:
            with Store.open([Device(here, IO(), False)]) as store:  # nothing is read or written
                store.remove()
        finally:
            assert victim.read_text() == "untouched", "wrote to what is not the store's"
            assert victim.stat().st_nlink == 1, "linked what is not the store's"

    return Target([json.loads((good / path).read_text())], _sealed, read, (StoreError,), ("../victim",))


def manifest(folder: Path) -> Target:
    return _store(folder, "manifest.json")


def store_id(folder: Path) -> Target:
    return _store(folder, "store.id")


def snapshot(folder: Path) -> Target:
    """What a snapshot says beside its files."""
    options, cfg = Options(resume="r", batch_size=2), uniform("llama", 61, 16, 1, 4, 2, 4, 24, 64, 1e-5, False)
    plan = Plan((UnitPlan(), UnitPlan("ram", "ssd", saved=(("qkv", "ram"),)), UnitPlan()), 24, 2, "F32")
    source = SimpleNamespace(tensors={"a": SimpleNamespace(dtype="F32", shape=(4, 2))})
    said = {"step": 3, "options": saved_options(options) | {"lr": 1.0}, "data": "00000000", "best": [2.5, 3],
            "computed_by": "torch 2, the CPU", "launches": {"grouped_mm": [64, 64, 128, 4, 3]}, "written": 9,
            "eval_rows": 5, "date": "2026-01-31", "log": [3, 0, 99, 7],
            "cut": Pinned(plan, 2, 2, identity(cfg, source)).json()}  # fmt: skip

    def read(content: bytes) -> None:
        try:
            said = parse_json(content, "manifest")
        except ValueError:
            return
        said = check_snapshot(options, said)
        changes(options, said["options"])
        check_model(options, pinned_of(options, said["cut"]), cfg, source)
        Mark(*said["log"]).step + said["step"]

    return Target([said], as_json, read, (InputError,))


def best(folder: Path) -> Target:
    """The note of OUT/best. Whatever it says, nothing outside is read as a part of it, or touched."""
    (folder / "victim").write_text("untouched")

    def save(new: Path) -> dict[str, str]:
        new.mkdir(parents=True)
        (new / "model.safetensors").write_text("weights")
        return {"model.safetensors": checksum([b"weights"])}

    exports.replace_best(folder / "out", save, exports.Best(3, 2.5))
    good = json.loads((folder / "out" / "best" / exports.NOTE).read_text())

    def read(content: bytes) -> None:
        save(folder / "out" / "best.new")
        (folder / "out" / "best.new" / exports.NOTE).write_bytes(content)
        exports.restore_best(folder / "out", exports.Best(3, 2.5))
        assert (folder / "victim").read_text() == "untouched"

    return Target(
        [good, good | {"files": {"../../victim": checksum([b"untouched"])}}], as_json, read, (), ("../victim",)
    )


def tokens_meta(folder: Path) -> Target:
    rows, cache = folder / "rows.jsonl", folder / "tokens"
    rows.write_text('{"input_ids": [1, 2, 3, 4, 5]}\n' * 9)
    load = lambda: data.load_dataset([str(rows)], None, data.DataOptions(seq_len=8, vocab_size=97, cache=cache))
    expected = load()
    path = next(cache.glob("*/meta.json"))

    def read(content: bytes) -> None:
        path.write_bytes(content)
        loaded = load()
        assert loaded.fingerprint == expected.fingerprint, "other data"
        assert loaded.report.lines() == expected.report.lines(), "another report"
        path.write_bytes(_forged(content))
        loaded = load()
        loaded.report.lines(), loaded.step(0, 1, 1), loaded.is_text

    return Target([json.loads(path.read_text())], _sealed, read, (InputError,))


def log(folder: Path) -> Target:
    step = {"step": 1, "epoch": 0.1, "loss": 2.5, "learning_rate": 1e-5, "grad_norm": 1.0, "tokens_per_second": 10.0,
            "trained_tokens_per_second": 9.0, "step_time_s": 0.1, "bound": "compute"}  # fmt: skip
    value = [{"step": 0, "eval_loss": 3.0}, *(step | {"step": n} for n in (1, 2, 3)), {"step": 3, "eval_loss": 2.75}]

    since = Mark(3, 0, len(as_lines(value[:-1])) + 1, zlib.crc32(as_lines(value[:-1]) + b"\n"))

    def read(content: bytes) -> None:
        (folder / "log.jsonl").write_bytes(content)
        has_started(folder)
        log = RunLog(folder, 9, Screen(io.StringIO()), since)
        log.step(step | {"step": 4})
        log.eval({"step": 4, "eval_loss": 2.5})
        log.summary()
        log.close()

    return Target([value], as_lines, read, (InputError,))


# ---------------------------------------------------------------- options and plans


def config_yaml(folder: Path) -> Target:
    """As write_config writes it, and as a person does: anchors, tags, blocks."""

    def read(content: bytes) -> None:
        (folder / "config.yaml").write_bytes(content)
        parse(["--config", str(folder / "config.yaml")])[1]

    value = {"model": "m", "data": ["a.jsonl", "b:0.5"], "val": "0.02", "seq_len": 64, "batch-size": 4, "lr": 1e-4,
             "save_every": "30min", "gpu_memory": "24GiB", "betas": [0.9, 0.95], "log": "trace", "no_pack": True,
             "schedule": "linear", "warmup": 0.1, "adam_bits": 8, "seed": 7, "out": "o", "store": ["s"]}  # fmt: skip
    lines = ["model: m\n", "data:\n", "  - &a a.jsonl\n", "  - *a\n", "val: 0.02\n", "seq-len: 64\n", "lr: 1e-4\n",
             "betas: [0.9, 0.95]\n", "max_steps: 1_000\n", "save_every: >\n", "  30min\n", "# a comment\n"]  # fmt: skip
    junk = ("<<: *a\n", "a: &a [*a]\n", "!!python/object/apply:os.system [x]\n", "? x\n", "--- \n", "%YAML 9.9\n",
            "seed: 0x" + "f" * 5000 + "\n", "max_steps: 1" + ":1" * 300 + "\n", "lr: !!timestamp 2001-99-99\n",
            "model: 2001-02-30\n", "val: !!binary =\n", "data: !!set {a, b}\n", "out: .nan\n", "\t")  # fmt: skip
    write = lambda value: as_text(value) if isinstance(value, list) else as_json(value)
    return Target([value, lines], write, read, (InputError,), junk)


def plan(folder: Path) -> Target:
    cfg = uniform("llama", 61, 16, 1, 4, 2, 4, 24, 64, 1e-5, False, rope=Rope(1e4))
    block = UnitPlan("ram", "ssd", x="ssd", saved=(("qkv", "ram"),))
    path = folder / "plan.json"
    write_plan(Plan((UnitPlan(), block, UnitPlan("ram", "ram", "gpu")), 24, 2, "F32"), path)
    options = Options(plan=str(path), batch_size=2)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        planner = Planner(options, cfg, 12, True, Limits(1 << 30, 1 << 30), None, Clock(), 1)
        planner.refuse_early()
        check_step(options, planner.given, 2, 12)

    return Target([json.loads(path.read_text())], as_json, read, (InputError, DoesNotFit))


TARGETS = DATA | ROW_TARGETS | {
    made.__name__: made
    for made in (header, index, config, adapter, manifest, store_id, snapshot, best, tokens_meta, log,
                 config_yaml, plan)
}  # fmt: skip

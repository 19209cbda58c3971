"""Model and data of a run: the checkpoint, what of it is trained and with which loss, its tokenizer, rows as tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.dataset import Dataset, find_labels, load_dataset
from trireme.engine.data.find import find
from trireme.engine.data.prepare import DataOptions, Kind
from trireme.engine.data.taught import is_scores, read_index
from trireme.engine.planner.sizes import find_model
from trireme.engine.run import config_file, folder, screen
from trireme.engine.run.after import hub
from trireme.engine.run.options import Method, Options, Reading, table
from trireme.engine.tuning.adapters import Adapter, on_experts, separate_names
from trireme.engine.tuning.cached import cached
from trireme.engine.tuning.chosen import adapted, aware, folded, targets, train_only
from trireme.engine.tuning.headed import check_problem, headed, names_in, pad_in, with_config
from trireme.engine.tuning.packed_source import Packed, as_configured, as_trained, outlined
from trireme.engine.tuning.parts import as_stored, open_checkpoint
from trireme.engine.tuning.peft import read_adapter
from trireme.engine.tuning.quantized import quantized
from trireme.kernels.private import cache_folder
from trireme.models import config, hf
from trireme.models.config import InputError, Lora, ModelConfig, Teaching
from trireme.models.losses.preferences import METHODS, Preference
from trireme.storage.auxiliary import auxiliary_files, content_of
from trireme.storage.checkpoint import Source
from trireme.storage.files import store_errors

KINDS: Mapping[str, Kind] = {"sft": "", "kto": "labels", "reward": "rewards", "classify": "classes"}  # others: pairs
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}


@dataclass(frozen=True)
class Opened:
    """The model, before it is known where its parts are placed."""

    cfg: ModelConfig
    source: Source
    stored: dict[str, str]  # tensor name -> name in the source
    codec: Codec | None  # None where no data is named
    labels: tuple[str, ...]  # of a classifier
    adapter: Adapter | None  # of --adapter
    notes: tuple[str, ...]


def open_model(o: Options, date: str | None) -> Opened:
    """Opens what the options name. `date`: what chat templates take for today. Raises InputError, CheckpointError."""
    raw = {} if o.shape else config.read_raw(o.model)
    cfg = find_model(o.shape) if o.shape else config.read_config(o.model, o.rope_factor)
    names = label_names(o, raw)
    cfg = replace(cfg, fp8=o.dtype == "fp8", smoothing=o.label_smoothing * (o.method == "sft"))
    if o.teacher:  # scores on disk have their own top-k
        k = read_index(o.teacher).k if is_scores(o.teacher) else min(o.top_k, cfg.vocab)
        cfg = replace(cfg, teaching=Teaching(k, o.distill_weight, o.temperature))
    cfg = with_head(o, cfg, len(names))
    if o.router_aux and (cfg.experts is None or cfg.names.mlp.correction):
        raise InputError("--router-aux: the model has no experts, or a bias balances them. Leave it out.")
    source = None if is_absent(o) else open_checkpoint(Path(o.model), cfg.packing, screen.warn)
    cfg = hf.as_stored(cfg, source.shapes) if source else cfg  # adapters are named by what is there
    adapter = read_adapter(Path(o.adapter), cfg) if o.adapter else None
    if adapter or o.lora:
        cfg = adapted(cfg, lora_of(o, cfg, adapter))
    elif o.freeze or o.train:
        cfg = train_only(cfg, o.freeze, o.train)
    cfg = as_stored(cfg, source) if source else as_configured(cfg)
    source = source or outlined(cfg, Path(o.model))
    if o.expert_adapters == "separate" and on_experts(cfg):
        separate_names(cfg)
    shapes = source.shapes
    stored = hf.sources(cfg, shapes, source.named)
    if o.base:
        if cfg.packing and o.merge_format == "same":
            tip = "Leave it out; after the run: trireme merge OUT --format same"
            raise InputError(f"--merge-format same is of {o.model} as it is, --base {o.base} of another format. {tip}.")
        cfg, source = quantized(cfg, source, o.base, stored)
        source = cached(source, Path(o.store[0])) if o.store and source.files else source
        stored = hf.sources(cfg, shapes)
    cfg = aware(cfg, o.base) if o.merge_aware else cfg
    source = as_trained(cfg, source, stored) if isinstance(source, Packed) else source
    codec = load_codec(o.tokenizer or o.model, o.chat_template, date) if o.data and (o.tokenizer or o.model) else None
    source = as_written(replace(o, labels=names), cfg, source, codec)
    source = headed(cfg, source) if cfg.scores and not cfg.lora else source
    return Opened(cfg, source, stored, codec, names, adapter, tuple(_notes(o, raw, cfg, adapter)))


def as_written(o: Options, cfg: ModelConfig, source: Source, codec: Codec | None = None) -> Source:
    """`source` with the other files of the output: tokenizer, template, config.json. Raises InputError."""
    if codec is None and source.files and (o.tokenizer or o.chat_template or cfg.scores):
        codec = load_codec(o.tokenizer or o.model, o.chat_template, None)
    files = dict(source.auxiliary)
    if codec and (o.tokenizer or o.chat_template):
        tokenizer = Path(o.tokenizer) if o.tokenizer and not Path(o.tokenizer).samefile(o.model) else None
        eos = codec.facts.eos if codec.facts.eos is not None and codec.facts.eos < cfg.vocab else None
        files |= auxiliary_files(Path(o.model), tokenizer, codec.facts.chosen, eos)
    if o.rope_factor and source.files:
        end = {k: v for k, v in json.loads(content_of(files["config.json"])).items() if k == "eos_token_id"}
        files["config.json"] = json.dumps(config.read_raw(o.model, o.rope_factor) | end, indent=2).encode()
    source = replace(source, auxiliary=files)
    if cfg.scores and source.files:
        raw = json.loads(content_of(files["config.json"]))
        names = o.labels if len(o.labels) == cfg.scores else names_in(raw, cfg.scores)
        source = with_config(cfg, source, raw, names, pad_of(o, codec))
    return source


def in_wording(o: Options, opened: Opened, data: Dataset | None) -> Opened:
    """`opened` with a chat template for the output if rows of alpaca were read in their own wording: then `sample` and
    other programs ask as the rows do.
    """
    codec, files = opened.codec, data.report.files if data else ()
    if codec is None or codec.facts.template or not any("alpaca" in file.meta["forms"] for file in files):
        return opened
    return replace(opened, source=as_written(replace(o, chat_template="alpaca"), opened.cfg, opened.source))


def is_absent(o: Options) -> bool:
    """Whether to plan for a checkpoint without its weights."""
    return bool(o.shape) or (o.dry_run and all(path.suffix not in WEIGHTS for path in Path(o.model).iterdir()))


# ---------------------------------------------------------------- what is trained


def lora_of(o: Options, cfg: ModelConfig, adapter: Adapter | None) -> Lora:
    """The adapters. Raises InputError."""
    if adapter:
        lora, dropout = adapter.lora, adapter.dropout if o.lora_dropout is None else o.lora_dropout
        if cfg.scores and not adapter.whole:
            raise InputError(f"--adapter {o.adapter} has no score head: it is of another method. Leave it out.")
    else:
        rank = o.lora or 0
        lora = Lora(rank, o.lora_alpha or 2.0 * rank, targets(cfg, o.lora_targets))
        dropout = o.lora_dropout or 0.0
    if cfg.experts is not None and lora.adapts(cfg.names.mlp.experts):
        if o.lora_dropout:
            raise InputError("--lora-dropout: adapters of experts have none, as in peft. Leave it out.")
        dropout = 0.0
    return replace(lora, dropout=dropout)


def sequence_length(o: Reading, cfg: ModelConfig) -> int:
    """Tokens of a sequence. Raises InputError if the model has fewer positions."""
    seq_len, most = o.seq_len or min(2048, cfg.max_positions), cfg.max_positions
    if seq_len > most:
        extends = isinstance(o, Options) and cfg.rotates and not cfg.indexed
        longer = f", or extend them: --rope-factor {-(-seq_len // most)}" if extends else ""
        raise InputError(f"--seq-len {seq_len}: the model has {most} positions. Lower it{longer}.")
    return seq_len


def row_kind(o: Method) -> Kind:
    """The kind of rows that a method reads."""
    return KINDS.get(o.method, "pairs")


def preference_of(o: Method) -> Preference | None:
    """The method of preferences; None for supervised fine-tuning."""
    is_preference = o.method in METHODS
    return Preference(**{name: getattr(o, name) for name in table(Method)}) if is_preference else None


def label_names(o: Options, raw: dict[str, Any]) -> tuple[str, ...]:
    """Labels of a classifier: of config.json, the adapter's run, the options, or the data. Raises InputError."""
    if o.method != "classify":
        return ()
    n_labels = config.labels_of(raw, o.model)
    before = config_file.of_run(Path(o.adapter)) if o.adapter else None
    fixed = names_in(raw, n_labels) if n_labels > 1 else before.labels if before else ()
    if n_labels > 1:
        check_problem(raw, o.model)
    names = fixed or o.labels or (find_labels(o.data, o.map) if o.data else ())
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError("--method classify: which classes? Give two or more different names: --labels A,B.")
    if o.labels and names != o.labels:
        raise InputError(f"--labels: the model is a classifier of {','.join(fixed)[:200]}. Leave it out.")
    return names


def with_head(o: Options, cfg: ModelConfig, classes: int) -> ModelConfig:
    """The config with the head that the method trains. Raises InputError if the checkpoint has another."""
    scores, name = {"reward": 1, "classify": classes}.get(o.method, 0), o.model or o.shape or ""
    if cfg.scores and cfg.scores != scores:
        advice = f"Train it with --method {'reward' if cfg.scores == 1 else 'classify'}."
        raise InputError(f"{name} has a score head of {cfg.scores} and no output matrix. {advice}")
    return config.scored(cfg, scores, name) if scores and not cfg.scores else cfg


def pad_of(o: Options, codec: Codec | None) -> int | None:
    """The padding token, which a score head does not read."""
    return pad_in({} if o.shape else config.read_raw(o.model), codec.facts.pad if codec else None)


def _notes(o: Options, raw: Mapping[str, Any], cfg: ModelConfig, adapter: Adapter | None) -> Iterator[str]:
    """What config.json names and is not used; what one may not expect of --adapter."""
    if raw.get("auto_map"):
        code = "custom code, which is never run"
        yield f"config.json names {code}: it is read as transformers' language model {cfg.model_type}"
    if cfg.lora and on_experts(cfg) and o.expert_adapters == "stacked":
        yield "adapters of experts are written for peft; vLLM, SGLang, llama.cpp read --expert-adapters separate"
    if adapter and Path(adapter.base).name != hub.model_title(o.model):
        yield f"--adapter was made for {adapter.base or 'a model without a name'}, not for {o.model}"
    if adapter and adapter.absent:
        yield f"--adapter has nothing for {', '.join(folded(cfg, adapter.absent))[:200]}: these stay without"


# ---------------------------------------------------------------- data


def read_data(o: Options, opened: Opened) -> Dataset | None:
    """The data, tokenized; None without --data. Raises InputError, OSError."""
    cfg, codec, shared = opened.cfg, opened.codec, cache_folder()  # by all runs of this user
    if not o.data or (codec is None and o.dry_run):
        return None
    return read_rows(
        o, cfg, codec, o.data, seq_len=o.seq_len or 0, val=o.val, general=o.general, pack=not o.no_pack,
        max_samples=o.max_samples, seed=o.seed, shared=shared / "tokens" if shared else None,
        cache=None if o.dry_run else Path(o.out) / folder.RUN / "tokens", kind=row_kind(o), labels=o.labels,
        pad=pad_of(o, codec) if cfg.scores else None,
    )  # fmt: skip


def read_rows(o: Reading, cfg: ModelConfig, codec: Codec | None, names: Sequence[str], **others: Any) -> Dataset:
    """Rows of what `names` name, tokenized. `others`: of DataOptions. Raises InputError, OSError."""
    began, variables = time.monotonic(), json.loads(o.chat_template_kwargs or "{}")
    inherited = not isinstance(o, Options) and "map" not in o.chosen  # by a command after the run
    options = DataOptions(
        map=o.map, inherited=inherited, long=o.long, skip_bad=o.skip_bad, vocab_size=cfg.vocab, media=cfg.media,
        system=o.system, variables=variables, **others,
    )  # fmt: skip
    progress = lambda name, position, size: screen.show_progress(f"reading {name}", position, size, began)
    try:
        with store_errors(options.shared or options.cache or "--data"):  # where tokens are written
            return load_dataset(names, codec, options, progress)
    finally:
        screen.clear()


def bytes_of(o: Options) -> int:
    """Bytes of the files of --data."""
    return sum(file.path.stat().st_size for text in o.data if text != "-" for file in find(text).files)

"""The model of a run: its checkpoint, which tensors are trained, sequence length, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.taught import is_scores
from trireme.engine.planner.sizes import find_model
from trireme.engine.run.begin.method import teaching_of, with_head, with_labels
from trireme.engine.run.begin.snapshot import Pinned, check_model
from trireme.engine.run.config.option_names import flag_of
from trireme.engine.run.hub.names import title
from trireme.engine.run.options import Options
from trireme.engine.tuning.adapters import Adapter
from trireme.engine.tuning.cached import cached
from trireme.engine.tuning.chosen import adapted, chosen, folded, targets
from trireme.engine.tuning.headed import headed, names_in, pad_in, with_config
from trireme.engine.tuning.peft import read_adapter
from trireme.engine.tuning.packed import as_said, as_stored, as_trained, check_packing, outlined
from trireme.engine.tuning.parts import open_checkpoint
from trireme.engine.tuning.peft_config import MOST
from trireme.engine.tuning.quantized import quantized
from trireme.models import hf
from trireme.models.config import CLASS, InputError, Lora, ModelConfig, read_config, read_raw
from trireme.storage.auxiliary import CONTENT, auxiliary_files, content_of
from trireme.storage.checkpoint import Source
from trireme.storage.files import Say
from trireme.storage.untrusted import shown

NAMED = 4  # modules named in a line
ENDS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", CLASS)  # of names of transformers' classes
DETAILS = ("lora_alpha", "lora_targets", "rslora", "loraplus")  # what --adapter has of its own


class OpenedModel(NamedTuple):
    """What `open_model` returns."""

    options: Options  # with the names of a classifier's labels
    cfg: ModelConfig
    source: Source
    stored: dict[str, str]  # tensor name -> name in the source
    codec: Codec | None  # None where no data is named
    seq_len: int


def open_model(options: Options, pinned: Pinned | None, date: str | None, hosts: int, say: Say) -> OpenedModel:
    """Opens the checkpoint that the options name, with what of it is trained, its tokenizer and the sequence length.

    `pinned`: what a resumed run keeps. `date`: what chat templates take for today. Raises InputError, CheckpointError.
    """
    folder = Path(options.model)
    raw = {} if options.shape else read_raw(options.model)
    options = with_labels(options, raw)
    cfg = what_is_trained(options)
    for line in (*about_config(raw, cfg), *about_adapter(options, cfg)):
        say(line)
    if is_absent(options):
        cfg = as_said(cfg)
        source: Source = outlined(cfg, folder)
    else:
        source = open_checkpoint(folder, cfg.packing, say)
        check_packing(cfg, source, say)
        cfg = as_stored(cfg, source)
    if pinned:
        check_model(options, pinned, cfg, source)
    found = source.shapes
    stored = hf.sources(cfg, found, source.named)
    if options.base:
        cfg, made = quantized(cfg, source, options.base, stored)
        kept = options.store and source.files and hosts == 1
        source = cached(made, Path(options.store[0])) if kept else made
        stored = hf.sources(cfg, found)
    source = as_trained(cfg, source, stored)
    codec = named_codec(options, folder, date) if options.data else None
    seq_len = sequence_length(options, cfg)
    source = with_auxiliary(options, cfg, folder, source, codec)
    return OpenedModel(options, cfg, source if cfg.lora else headed(cfg, source), stored, codec, seq_len)


def what_is_trained(options: Options) -> ModelConfig:
    """The model's config with what is trained, whether in fp8, and with a teacher. Raises InputError."""
    if options.rope_factor and options.shape:
        raise InputError("--rope-factor changes a config.json, which --shape has not. Leave it out.")
    cfg = find_model(options.shape) if options.shape else read_config(options.model, options.rope_factor)
    teaching = teaching_of(options)
    if teaching and not is_scores(options.teacher or ""):
        teaching = replace(teaching, k=min(teaching.k, cfg.vocab))
    smoothing = (options.label_smoothing or 0.0) if options.method == "sft" else 0.0
    if teaching and smoothing:
        raise InputError("--label-smoothing: with --teacher labels are not smoothed. Leave one of them out.")
    cfg = with_head(options, replace(cfg, fp8=options.dtype == "fp8", teaching=teaching, smoothing=smoothing))
    if options.router_aux and (cfg.experts is None or cfg.names.correction):
        why = "the model's experts are balanced by a bias" if cfg.experts else "the model has no experts"
        raise InputError(f"--router-aux: {why}. Leave it out.")
    if (options.freeze or options.train) and (options.adapter or options.lora is not None):
        raise InputError("--freeze and --train: with adapters, they alone are trained. Leave one of them out.")
    if options.adapter:
        return adapted(cfg, _given_lora(options, cfg))
    if options.lora is not None:
        return adapted(cfg, _new_lora(options, options.lora, cfg))
    for name in (*DETAILS, "lora_dropout", "merge"):
        if getattr(options, name):
            raise InputError(f"{flag_of(name)} is for adapters. Give their rank: --lora 16.")
    return chosen(cfg, options.freeze, options.train)


def _given_lora(options: Options, cfg: ModelConfig) -> Lora:
    """The adapters of --adapter. Raises InputError."""
    if options.lora is not None or any(getattr(options, name) for name in DETAILS):
        raise InputError("--adapter has its own rank, alpha and targets. Leave --lora and its options out.")
    adapter = read_adapter(Path(options.adapter or ""), cfg)
    if cfg.scores and not adapter.whole:
        raise InputError(f"--adapter {options.adapter} has no score head: it is of another method. Leave it out.")
    dropout = options.lora_dropout
    if dropout is None and not in_experts(cfg, adapter.lora):
        dropout = adapter.dropout
    return lora_with_dropout(cfg, adapter.lora, dropout)


def _new_lora(options: Options, rank: int, cfg: ModelConfig) -> Lora:
    """The adapters of --lora. Raises InputError."""
    alpha = alpha_of(options) * math.sqrt(rank if options.rslora else 1) * (options.loraplus or 1.0)
    if (options.lora_alpha or 0) > MOST:
        raise InputError(f"--lora-alpha {options.lora_alpha:g}: expected at most {MOST:,}.")
    return lora_with_dropout(cfg, Lora(rank, alpha, targets(cfg, options.lora_targets)), options.lora_dropout)


def in_experts(cfg: ModelConfig, lora: Lora) -> bool:
    return cfg.experts is not None and lora.adapts(cfg.names.experts)


def lora_with_dropout(cfg: ModelConfig, lora: Lora, dropout: float | None) -> Lora:
    """Adapters with dropout. Raises InputError for those of experts, which have none in peft either."""
    if dropout and in_experts(cfg, lora):
        raise InputError(
            f"--lora-dropout {dropout:g}: adapters of experts have none, as in peft. Leave it out, or name other "
            "matrices: --lora-targets."
        )
    return replace(lora, dropout=dropout or 0.0)


def alpha_of(options: Options) -> float:
    """peft's lora_alpha; with --rslora, that of adapters scaled by alpha / sqrt(R).

    LoRA+ is an alpha larger by its ratio: B is smaller by the ratio, and since AdamW's steps do not depend on the size
    of gradients, those of B are larger by the ratio.
    """
    assert options.lora is not None
    default = 8.0 if options.rslora else 2.0 * options.lora
    return default if options.lora_alpha is None else options.lora_alpha


def given_adapter(options: Options, cfg: ModelConfig) -> Adapter | None:
    """The adapter of --adapter; None without one. Raises InputError."""
    return read_adapter(Path(options.adapter), cfg) if options.adapter else None


def about_config(raw: Mapping[str, Any], cfg: ModelConfig) -> list[str]:
    """Notes on what config.json names and is not used: code of its own, a class that is not a language model."""
    code, named, lines = raw.get("auto_map"), raw.get("architectures"), list[str]()
    own = [ref for name, ref in code.items() if name.startswith("AutoModel")] if isinstance(code, dict) else []
    if own:
        lines.append(f"refers to custom code, {shown(str(own[0]))}, which is never run")
    if isinstance(named, list) and named and not str(named[0]).endswith(ENDS):
        lines.append(f'says "architectures": {shown(str(named[0]))}, which is not a language model')
    return [f"note: config.json {line}: the model is read as transformers' {cfg.model_type}" for line in lines]


def about_adapter(options: Options, cfg: ModelConfig) -> list[str]:
    """Notes on what one may not expect of the adapter of --adapter. Raises InputError."""
    adapter, lines = given_adapter(options, cfg), list[str]()
    if adapter is None:
        return lines
    if Path(adapter.base).name != title(options.model):
        lines.append(f"was made for {adapter.base or 'a model without a name'}, not for {options.model}")
    now = options.lora_dropout if options.lora_dropout is not None else adapter.dropout
    now = 0.0 if in_experts(cfg, adapter.lora) else now
    if adapter.dropout and now != adapter.dropout:
        lines.append(f"was trained with lora_dropout {adapter.dropout:g}; here it is trained with {now:g}")
    least, most = min(adapter.ranks.values()), adapter.lora.rank
    if least < most:
        lines.append(
            f"has adapters of ranks from {least} to {most}: they are written in rank {most}, with zeros behind"
        )
    if adapter.singles:
        lines.append("has an adapter for each expert: gate and up are trained as one of twice the rank, as peft does")
    if adapter.absent:
        names = folded(cfg, adapter.absent)
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        lines.append(f"has nothing for {', '.join(names[:NAMED])}{more}: these stay without an adapter")
    return [f"--adapter {options.adapter} {line}" for line in lines]


def sequence_length(options: Options, cfg: ModelConfig) -> int:
    seq_len = options.seq_len or min(2048, cfg.max_positions)
    if seq_len > cfg.max_positions:
        if cfg.indexed:
            raise InputError(
                f"--seq-len {seq_len}: in documents of more than {cfg.max_positions:,} tokens an indexer chooses what "
                f"this {cfg.model_type} attends to, which is not supported. Lower it."
            )
        longer = f", or extend them: --rope-factor {-(-seq_len // cfg.max_positions)}" if cfg.rope else ""
        raise InputError(f"--seq-len {seq_len}: the model has {cfg.max_positions} positions. Lower it{longer}.")
    return seq_len


def is_absent(options: Options) -> bool:
    """Whether to plan for a checkpoint without its weights."""
    folder, kinds = Path(options.model), {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}
    return bool(options.shape) or (options.dry_run and all(path.suffix not in kinds for path in folder.iterdir()))


def named_codec(options: Options, folder: Path, date: str | None) -> Codec | None:
    codec = load_codec(options.tokenizer or folder, options.chat_template, date)
    if options.tokenizer and codec is None:
        wrong = "is a file; name its folder" if Path(options.tokenizer).is_file() else "holds no tokenizer.json"
        raise InputError(f"--tokenizer {options.tokenizer} {wrong}.")
    return codec


def with_auxiliary(options: Options, cfg: ModelConfig, folder: Path, source: Source, codec: Codec | None) -> Source:
    """The source with the auxiliary files that the output is to have. Raises InputError."""
    if codec and (options.tokenizer or options.chat_template):
        source = replace(source, auxiliary=_trained_with(options, cfg, folder, codec))
    if options.rope_factor:
        source = replace(source, auxiliary=source.auxiliary | {"config.json": _extended(options, cfg, folder)})
    if cfg.scores and source.files:
        raw = json.loads(content_of(source.auxiliary["config.json"]))
        labels = options.labels or names_in(raw, cfg.scores)
        source = with_config(cfg, source, raw, labels, pad_in(raw, codec.facts.pad if codec else None))
    return source


def _trained_with(options: Options, cfg: ModelConfig, folder: Path, codec: Codec) -> dict[str, CONTENT]:
    """The auxiliary files of the output, with the given tokenizer and chat template."""
    other = Path(options.tokenizer) if options.tokenizer else None
    if other and other.samefile(folder):
        other = None
    facts = codec.facts
    known = facts.eos is not None and facts.eos < cfg.vocab  # a tokenizer may have tokens that the model has not
    return auxiliary_files(folder, other, facts.chosen, facts.eos if known else None)


def pad_of(options: Options, codec: Codec | None) -> int | None:
    """The padding token, which a score head does not read."""
    return pad_in({} if options.shape else read_raw(options.model), codec.facts.pad if codec else None)


def _extended(options: Options, cfg: ModelConfig, folder: Path) -> bytes:
    """The config.json of the output, with --rope-factor."""
    if cfg.lora and not options.merge:
        raise InputError("--rope-factor: an adapter has no config.json to store it. Add --merge, and use OUT/merged.")
    return json.dumps(read_raw(folder, options.rope_factor), indent=2).encode()

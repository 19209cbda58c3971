"""Opens a finished model: a checkpoint, a run's output, its `best` or `step-N`, or an adapter with its base."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.prepare import Kind
from trireme.engine.run.config.config_file import options_of
from trireme.engine.run.config.option_names import flag_of
from trireme.engine.run.hub.fetch import base_for, folder_of
from trireme.engine.run.output.folder import check_checkpoint
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.adapters import Adapter
from trireme.engine.tuning.chosen import adapted
from trireme.engine.tuning.headed import names_in
from trireme.engine.tuning.peft import read_adapter, scored_by
from trireme.engine.tuning.packed import as_stored, check_packing
from trireme.engine.tuning.parts import open_checkpoint
from trireme.engine.tuning.peft_config import CONFIG, base_of, read_adapter_config
from trireme.models.config import InputError, ModelConfig, read_config, read_raw
from trireme.storage.checkpoint import Source
from trireme.storage.untrusted import parse_json, quoted, read_small, why

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Opened:
    """A finished model. All weights are frozen, except those of an adapter."""

    base: Path  # the checkpoint
    cfg: ModelConfig
    source: Source
    adapter: Adapter | None
    tokenizer: Path
    template: str | None  # as --chat-template
    labels: tuple[str, ...] = ()  # names of a score head's
    run: Mapping[str, Any] = field(default_factory=dict)  # options of the run that wrote it

    @property
    def kind(self) -> Kind:
        """The kind of data that it can be evaluated on."""
        return ("rewards" if self.cfg.scores == 1 else "classes") if self.cfg.scores else ""

    def refuse_head(self, why: str) -> None:
        """Raises InputError if the model has a score head, which gives no text."""
        if self.cfg.scores:
            raise InputError(f"{self.base}: the model has a score head, no output matrix: {why}.")

    def codec_if_any(self, tokenizer: str | None = None, template: str | None = None) -> Codec | None:
        """Tokenizer and chat template: those given, else those of the run or the checkpoint, which may have none.

        Raises InputError.
        """
        found = load_codec(tokenizer or self.tokenizer, template or self.template, date.today().isoformat())
        if tokenizer and found is None:
            raise InputError(f"{tokenizer} has no tokenizer.json. Name a folder that has one: --tokenizer DIR.")
        return found

    def codec(self, tokenizer: str | None = None, template: str | None = None) -> Codec:
        """As codec_if_any, where there has to be one. Raises InputError."""
        found = self.codec_if_any(tokenizer, template)
        if found is None:
            raise InputError(f"{self.tokenizer} has no tokenizer.json. Name a folder that has one: --tokenizer DIR.")
        return found

    def generation(self) -> dict[str, Any]:
        """generation_config.json, with the end tokens of config.json if it names none. Raises InputError."""
        found = _json(self.base / GENERATION) if (self.base / GENERATION).is_file() else {}
        if found.get("eos_token_id") is None:
            config = _json(self.base / "config.json")
            text = config.get("text_config")
            inner = text.get("eos_token_id") if isinstance(text, dict) else None
            found["eos_token_id"] = config.get("eos_token_id", inner)
        return found


def open_model(given: argparse.Namespace, screen: Screen) -> Opened:
    """Opens the model that a command is given, of a folder or of the hub. Raises InputError, CheckpointError."""
    folder, model = folder_of(given.folder, screen), given.model or ""
    if (Path(folder) / CONFIG).is_file():
        model = base_for(Path(folder), model, screen)
    found = open_folder(folder, model, screen.warn)
    return found if found.adapter else replace(found, run=of_run(Path(folder), lambda _: None))


def open_folder(folder: str, model: str, say: Callable[[str], None], factor: float | None = None) -> Opened:
    """`model`: the base of an adapter, if not the one that it names. `factor`: as --rope-factor, if no run says it.

    Raises InputError, CheckpointError.
    """
    check_checkpoint(folder)
    path, kept = Path(folder), dict[str, Any]()
    if not path.is_dir():
        raise InputError(f"{folder}: no such folder. Name a checkpoint, an adapter, or a run's output.")
    is_adapter = (path / CONFIG).is_file()
    if is_adapter:
        base, kept = base_of_adapter(path, model), run_of_adapter(path, say)
    elif model:
        raise InputError(f"--model {model}: {folder} is not an adapter. Leave --model out.")
    else:
        _check_finished(path)
        base = path
    cfg = read_config(base, kept.get("rope_factor", factor))
    cfg = scored_by(path, cfg) if is_adapter else cfg
    source = open_checkpoint(base, cfg.packing, lambda _: None)
    check_packing(cfg, source, say)
    cfg = as_stored(cfg, source)
    adapter = read_adapter(path, cfg) if is_adapter else None
    head = f"{cfg.names.output}.weight"
    if cfg.scores and head not in source.tensors and not (adapter and head in adapter.whole):
        raise InputError(f"{folder}: config.json calls for a score head, and no file has {head}. Download it again.")
    cfg = adapted(cfg, adapter.lora) if adapter else replace(cfg, frozen=("*",))
    labels = tuple(kept.get("labels") or names_in(read_raw(base), cfg.scores))
    tokenizer, template = Path(kept.get("tokenizer") or base), kept.get("chat_template")
    return Opened(base, cfg, source, adapter, tokenizer, template, labels, kept)


def base_of_adapter(folder: Path, model: str) -> Path:
    """The base of an adapter: `model` if given, else the one that it names. Raises InputError if it is no folder."""
    named = base_of(read_adapter_config(folder))
    if not Path(model or named or "?").is_dir():
        wrong = f"--model {model} is not a folder" if model else f"{folder}: its base, {named!r}, is not a folder here"
        raise InputError(f"{wrong}. Name the checkpoint: --model DIR.")
    return Path(model or named)


def _check_finished(path: Path) -> None:
    """Raises InputError if a run has not written its output yet."""
    if (path / "config.json").is_file() or not (path / "config.yaml").is_file():
        return
    others = [p for p in (path / "best", *sorted(path.glob("step-*"))) if p.is_dir()]
    others += sorted(p for p in (path / "store").glob("snapshot-*") if (p / "config.json").is_file())
    instead = f" There is {', '.join(map(str, others))}." if others else ""
    raise InputError(
        f"{path}: that run is not finished, or its output is elsewhere.{instead} --resume {quoted(path)} continues it."
    )


def of_run(path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Options of the run that wrote a model into `path`, its OUT/best or OUT/step-N; {} of another's."""
    for folder in (path, path.parent):
        if given := options_of(folder):
            return given
    if (path / "config.yaml").is_file():
        say(f"{path / 'config.yaml'} is not of a run of this program, and is not read")
    return {}


def say_left_out(kept: Mapping[str, Any], given: argparse.Namespace, what: str, say: Callable[[str], None]) -> None:
    """Says which options for the chat template a run had (`kept`), and the command has not. `what`: is read without
    them.
    """
    for name in ("system", "chat_template_kwargs"):
        if kept.get(name) and not getattr(given, name):
            say(f"the run had {flag_of(name)}, and {what} without it here")


def run_of_adapter(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """As of_run. Says where the run trained the adapter on other weights than are read."""
    kept = of_run(folder, say)
    if kept.get("base"):
        say(f"the run quantized the checkpoint (--base {kept['base']}); here it is read as it is, so numbers differ")
    return kept


def _json(path: Path) -> dict[str, Any]:
    """Raises InputError."""
    try:
        return parse_json(read_small(path, links=True), "file")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {why(error)}.") from None

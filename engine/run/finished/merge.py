"""`trireme merge ADAPTER --out DIR`: adds an adapter to its model with the settings of the adapter's run, as --merge
does.
"""

from __future__ import annotations

from pathlib import Path

from trireme.engine.data.templates import BUILT_IN
from trireme.engine.run.begin.model import named_codec, with_auxiliary
from trireme.engine.run.finished.model import of_run, say_base
from trireme.engine.run.options import Options
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.merge import merge_folder
from trireme.models.config import ModelConfig
from trireme.storage.checkpoint import Source


def merge_of_run(folder: Path, base: str, out: Path, screen: Screen) -> None:
    """`base`: the checkpoint, "" where it is not a folder here. Raises InputError, CheckpointError, StoreError.

    --rope-factor, names of labels, tokenizer and chat template are those of the run, by its config.yaml.
    """
    kept = of_run(folder, screen.warn)
    say_base(kept, screen.warn)
    tokenizer, template = kept.get("tokenizer"), kept.get("chat_template")
    if tokenizer and not Path(tokenizer).is_dir():
        screen.warn(f"--tokenizer {tokenizer} of the run is not there: the output has that of the checkpoint")
        tokenizer = None
    if template and template not in BUILT_IN and not Path(template).is_file():
        screen.warn(f"--chat-template {template} of the run is not there: the output has that of the checkpoint")
        template = None
    factor, labels = kept.get("rope_factor"), tuple(kept.get("labels") or ())

    def finished(cfg: ModelConfig, source: Source) -> Source:
        options = Options(
            model=base, tokenizer=tokenizer, chat_template=template, rope_factor=factor, merge=True,
            labels=labels if len(labels) == cfg.scores else (),
        )  # fmt: skip
        codec = named_codec(options, Path(base), None) if tokenizer or template or cfg.scores else None
        return with_auxiliary(options, cfg, Path(base), source, codec)

    merge_folder(folder, base, out, screen.warn, screen.working, factor, finished)

"""`trireme merge ADAPTER --out DIR`: adds an adapter to its model with the settings of the adapter's run, as --merge
does.
"""

from __future__ import annotations

from pathlib import Path

from trireme.engine.data.template import BUILT_IN
from trireme.engine.run.begin.model import named_codec, with_auxiliary
from trireme.engine.run.finished.model import base_of_adapter, run_of_adapter
from trireme.engine.run.options import Options
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.merge import merge_folder
from trireme.engine.tuning.peft import scored_by
from trireme.engine.tuning.packed import check_packing
from trireme.engine.tuning.parts import open_checkpoint
from trireme.models.config import read_config


def merge_of_run(folder: Path, model: str, out: Path, screen: Screen) -> None:
    """`model`: the checkpoint; "": the one that the adapter names. Raises InputError, CheckpointError, StoreError.

    --rope-factor, names of labels, tokenizer and chat template are those of the run, by its config.yaml.
    """
    base, kept = base_of_adapter(folder, model), run_of_adapter(folder, screen.warn)
    tokenizer, template = kept.get("tokenizer"), kept.get("chat_template")
    if tokenizer and not Path(tokenizer).is_dir():
        screen.warn(f"--tokenizer {tokenizer} of the run is not there: the output has that of the checkpoint")
        tokenizer = None
    if template and template not in BUILT_IN and not Path(template).is_file():
        screen.warn(f"--chat-template {template} of the run is not there: the output has that of the checkpoint")
        template = None
    factor, labels = kept.get("rope_factor"), tuple(kept.get("labels") or ())
    cfg = scored_by(folder, read_config(base, factor))
    source = open_checkpoint(base, cfg.packing, screen.warn)
    check_packing(cfg, source, screen.warn)
    options = Options(
        model=str(base), tokenizer=tokenizer, chat_template=template, rope_factor=factor, merge=True,
        labels=labels if len(labels) == cfg.scores else (),
    )  # fmt: skip
    codec = named_codec(options, base, None) if tokenizer or template or cfg.scores else None
    source = with_auxiliary(options, cfg, base, source, codec)
    merge_folder(folder, cfg, source, out, screen.warn, screen.working)

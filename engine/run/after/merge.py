"""`trireme merge ADAPTER --out DIR`: an adapter added to its model, as an ordinary checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trireme.engine.run import config_file, opening, screen
from trireme.engine.run.after import hub
from trireme.engine.run.options import Merge, Options
from trireme.engine.tuning.merging import merge_folder
from trireme.engine.tuning.packed_source import check_packing
from trireme.engine.tuning.parts import open_checkpoint
from trireme.engine.tuning.peft import scored_by
from trireme.models.config import InputError, read_config
from trireme.storage.auxiliary import TEMPLATE
from trireme.storage.untrusted import quoted


def run(o: Merge) -> None:
    """The command. Raises InputError, CheckpointError, StoreError."""
    if not o.folder:
        raise InputError("no adapter is named. Name its folder: trireme merge ADAPTER --out DIR.")
    if not o.out:
        raise InputError(f"--out is missing. Name the folder to write: trireme merge {quoted(o.folder)} --out DIR.")
    folder, out = Path(o.folder), Path(o.out)
    base = hub.base_for(folder, o.model)
    kept = config_file.of_run(folder) or Options()
    cfg = scored_by(folder, read_config(base, kept.rope_factor))
    source = open_checkpoint(base, cfg.packing, screen.warn)
    check_packing(cfg, source, screen.warn)
    template = kept.chat_template or (str(folder / TEMPLATE) if (folder / TEMPLATE).is_file() else None)
    source = opening.as_written(replace(kept, model=base, merge=True, chat_template=template), cfg, source)
    merge_folder(folder, cfg, source, out, screen.say, screen.working)
    screen.say(f"output   {out}/: the model with its adapter, read back")
    screen.say(f"next     trireme sample {quoted(out)} --chat, or open it with transformers")

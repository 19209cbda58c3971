"""`trireme merge ADAPTER --out DIR`: an adapter added to its model, as an ordinary checkpoint; or the adapter itself
with those of experts in another form.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trireme.engine.planner.host import choose_device
from trireme.engine.run import config_file, opening, screen
from trireme.engine.run.after import hub
from trireme.engine.run.after.eval import prepare, results
from trireme.engine.run.after.opened import Finished, open_finished
from trireme.engine.run.options import Eval, Machine, Merge, Options, table
from trireme.engine.tuning.merging import merge_adapter, merged, new_folder
from trireme.engine.tuning.packed_source import Packed
from trireme.engine.tuning.parts import as_stored, open_checkpoint
from trireme.engine.tuning.peft import convert_adapter, read_adapter, scored_by
from trireme.models.config import InputError, read_config
from trireme.storage.auxiliary import auxiliary
from trireme.storage.untrusted import quoted


def run(o: Merge) -> None:
    """The command. Raises InputError, CheckpointError, StoreError."""
    o.check()
    if not o.folder or not o.out:
        raise InputError(f"merge needs an adapter and --out: trireme merge {quoted(o.folder or 'ADAPTER')} --out DIR.")
    folder, out = Path(o.folder), Path(o.out)
    base, run = hub.base_for(folder, o.model), config_file.of_run(folder) or Options()
    cfg = scored_by(folder, read_config(base, run.rope_factor))
    source = open_checkpoint(base, cfg.packing, screen.warn)
    if o.expert_adapters:
        with new_folder(out) as place:
            convert_adapter(folder, as_stored(cfg, source), place, o.expert_adapters == "separate")
            for name in auxiliary(folder):  # a tokenizer and its template
                if not (place / name).exists():
                    (place / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(folder / name, place / name)
        screen.say(f"output   {out}/: the adapter, of experts {o.expert_adapters}")
        return
    if o.data:  # what cannot be read is refused before
        f = open_finished(o.folder, o.model)
        task = prepare(f, Eval(data=(o.data,), **{name: getattr(o, name) for name in table(Machine)}))
    tokenizer, template = config_file.wording_of(folder, run)
    wording = replace(run, model=base, merge=True, tokenizer=tokenizer, chat_template=template)
    vocab = read_adapter(folder, as_stored(cfg, source), merging=True).cfg.vocab  # it may add tokens
    source = opening.as_written(wording, replace(cfg, vocab=vocab), source)
    same = (o.format or ("same" if run.merge_aware else "bf16")) == "same"
    if isinstance(source, Packed) and not same:
        note = f"as the adapter changes matrices in {source.packing.word}, all become bf16; --format same keeps them so"
        screen.say(f"note: {source.folder}: {note}")
    with new_folder(out) as place, screen.working("merging the adapter", 2 * source.nbytes) as progress:
        merge_adapter(folder, cfg, source, place, progress, screen.say, same, choose_device(o.device))
    screen.say(f"output   {out}/: the model with its adapter, read back")
    if o.data:
        losses = {name: list(results(f, *task))[0]["loss"] for name, f in _models(f, o.out, same)}
        screen.say(f"loss     {', '.join(f'{name} {loss:.4f}' for name, loss in losses.items())}; of {o.data}")
    command = "score {} --data FILE --out DIR" if cfg.scores else "sample {} --prompt TEXT"
    screen.say(f"next     trireme {command.format(quoted(out))}, or open it with transformers")


def _models(f: Finished, out: str, same: bool) -> Iterator[tuple[str, Finished]]:
    """The base, with its adapter, and merged, each with its name for the user."""
    plain = replace(f.cfg, lora=None)
    if not f.cfg.scores:  # a head that the base has not
        yield "base", replace(f, cfg=plain, adapter=None)
    yield "with the adapter", f
    if same and f.adapter and isinstance(f.source, Packed):
        plain_weights = merged(plain, f.adapter, f.source)
        yield "merged in bf16", replace(f, cfg=as_stored(plain, plain_weights), source=plain_weights, adapter=None)
    yield "merged", open_finished(out)

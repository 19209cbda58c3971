"""A finished model: a checkpoint, a run's output or step-N, or an adapter with its base.

An engine without gradients computes it; weights that do not fit in RAM are read from the model's own files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch

from trireme.engine.amounts import compact, percent
from trireme.engine.build import build
from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.dataset import Dataset
from trireme.engine.data.find import FileRows, find
from trireme.engine.data.forms import normal
from trireme.engine.data.prepare import Kind
from trireme.engine.data.read import BadRow
from trireme.engine.exchange import Exchange
from trireme.engine.geometry import Geometry
from trireme.engine.memory import DTYPE
from trireme.engine.plan import Plan
from trireme.engine.planner.forward_only import forward_plan
from trireme.engine.planner.host import limit_torch
from trireme.engine.queues.real import RealQueues
from trireme.engine.run import config_file, folder, screen
from trireme.engine.run.after import hub
from trireme.engine.run.evaluate import Evaluator
from trireme.engine.run.opening import read_rows, sequence_length
from trireme.engine.run.options import Machine, Method, Options, Reading, Sample, flag, table
from trireme.engine.run.planning import DTYPES, computer
from trireme.engine.tuning.adapters import Adapter
from trireme.engine.tuning.base import CheckpointBase, read_from_ssd, why_copied
from trireme.engine.tuning.chosen import adapted, aware
from trireme.engine.tuning.headed import names_in, pad_in
from trireme.engine.tuning.parts import as_stored, open_checkpoint
from trireme.engine.tuning.peft import read_adapter, scored_by
from trireme.engine.tuning.peft_config import CONFIG
from trireme.models import hf
from trireme.models.config import InputError, ModelConfig, read_config, read_raw
from trireme.models.generate import needs
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source
from trireme.storage.devices import Device, open_device, open_reader
from trireme.storage.temporary import Temporary

AT_ONCE = 8192  # tokens of a micro-batch on a GPU
PASSES = (16, 4, 1)  # micro-batches that share a pass over weights that are streamed
O = TypeVar("O", bound=Reading)


@dataclass(frozen=True)
class Finished:
    """A finished model. Nothing of it is trained."""

    name: str
    base: Path  # the checkpoint
    cfg: ModelConfig
    source: Source
    adapter: Adapter | None
    run: Options  # of the run that wrote it, else defaults
    labels: tuple[str, ...]  # names of a score head's

    def tokenizer(self, o: Reading | Sample) -> str:
        """The folder of the tokenizer: that of the options, of the model, of its run or of its base."""
        return o.tokenizer or config_file.wording_of(Path(self.name), self.run)[0] or str(self.base)

    def codec(self, o: Reading | Sample) -> Codec | None:
        """Tokenizer and chat template; None without a tokenizer, which rows of `input_ids` do not need."""
        template = o.chat_template or config_file.wording_of(Path(self.name), self.run)[1]
        return load_codec(self.tokenizer(o), template, date.today().isoformat())

    def refuse_scores(self, use: str) -> None:
        """Raises InputError if the model has a score head, which gives no text."""
        if self.cfg.scores:
            raise InputError(f"{self.name} has a score head and writes no text: {use}.")


def open_finished(name: str, model: str | None = None) -> Finished:
    """Opens a folder, or a model of the hub. `model`: the base of an adapter, if it has moved.

    Raises InputError, CheckpointError, OSError.
    """
    path = Path(hub.folder_of(name))
    if not name or not path.is_dir():
        raise InputError(f"{name or 'no model'}: no such folder. Name a checkpoint, an adapter, or a run's output.")
    is_adapter, run = bool(model) or (path / CONFIG).is_file(), config_file.of_run(path) or Options()
    if not is_adapter and (path / folder.RUN).is_dir() and not (path / "config.json").is_file():
        raise InputError(f"{name}: that run is not finished. --resume {name} continues it; OUT/step-N are models.")
    if is_adapter and run.base:
        screen.warn(f"the run quantized the checkpoint (--base {run.base}); here it is read as it is: numbers differ")
    base = Path(hub.base_for(path, model)) if is_adapter else path
    cfg = read_config(base, run.rope_factor if is_adapter else None)
    cfg = scored_by(path, cfg) if is_adapter else cfg
    source = open_checkpoint(base, cfg.packing, lambda _: None)  # of files that are not copied, as nothing is
    cfg = as_stored(cfg, source)
    adapter = read_adapter(path, cfg) if is_adapter else None
    cfg = replace(adapted(cfg, adapter.lora) if adapter else replace(cfg, frozen=("*",)), trains=False)
    if adapter and run.merge_aware:
        cfg = aware(cfg, None)
    hf.sources(cfg, source.shapes, source.named)  # before memory is taken by what config.json says
    labels = (run.labels if is_adapter else ()) or names_in(read_raw(base), cfg.scores)
    return Finished(str(path), base, cfg, source, adapter, run, tuple(labels))


# ---------------------------------------------------------------- data


def with_defaults(f: Finished, o: O) -> O:
    """The command's options. Of Reading, and of the run's method, those of the run are defaults; a line says which."""
    chosen = o.chosen | {"tokenizer", "chat_template"}  # Finished.codec takes these from the run
    same_method = isinstance(o, Method) and o.method == f.run.method != "sft"
    names = [name for name in (*table(Reading), *(table(Method) if same_method else ())) if name not in chosen]
    values = {name: getattr(f.run, name) for name in names if getattr(f.run, name) != getattr(Options, name)}
    if values:
        screen.say(f"as in the run: {', '.join(f'{flag(name)} {value}' for name, value in values.items())}")
    return replace(o, **values)


def read_as_run(f: Finished, o: Reading, codec: Codec | None, name: str, kind: Kind, labelled: bool = True) -> Dataset:
    """Data, read as by the run that wrote the model. `labelled`: rows of classes have labels. Raises InputError."""
    scored = dict[str, Any]()
    if f.cfg.scores:
        pad = pad_in(read_raw(f.base), codec.facts.pad if codec else None)
        scored = {"labels": f.labels if labelled else (), "pad": pad}
    data = read_rows(o, f.cfg, codec, [name], seq_len=sequence_length(o, f.cfg), kind=kind, **scored)
    for line in screen.labelled("data", data.report.lines()):
        screen.say(line)
    return data


def rows_in(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of what `name` names, with their places for messages. Raises InputError."""
    for source in find(name).files:
        rows = FileRows(source.files)
        for row in rows:
            location = f"{source} {rows.unit} {row.number}"
            try:
                if isinstance(row.value, BadRow):
                    raise row.value
                yield location, normal(row.value, {}, source.is_table)
            except BadRow as error:
                raise InputError(f"{location}: {error}.") from None


# ---------------------------------------------------------------- the engine


@contextmanager
def computing(f: Finished, o: Machine, seq_len: int, texts: int = 0, new: int = 0) -> Iterator[Evaluator]:
    """A context with an engine that computes sequences of up to `seq_len` tokens. `texts`: how many are continued
    together by `new` ones: the plan leaves memory for them.

    Raises DoesNotFit, InputError, StoreError.
    """
    device, limits, _ = computer(Options(**{name: getattr(o, name) for name in table(Machine)}), f.cfg)
    dtype = DTYPES.get(o.dtype, "BF16" if device.type == "cuda" else "F32")
    if o.dtype == "fp8":
        raise InputError(f"--dtype {o.dtype} is for training. Give bf16 or fp32, or leave it out.")
    if texts:
        limits = replace(limits, gpu=limits.gpu - needs(f.cfg, texts, seq_len, new, DTYPE[dtype].itemsize))
    rows = 1 if texts or device.type == "cpu" else max(1, AT_ONCE // seq_len)
    plan = forward_plan(f.cfg, limits, [(rows * seq_len, n) for n in PASSES], dtype, limits.gpus)
    queues = RealQueues(device, gpus=plan.gpus)
    with ExitStack() as stack:
        stack.callback(queues.close)
        limit_torch(limits, device)
        files, drives = _streamed(f, plan, dtype, stack)
        e = build(f.cfg, plan, limits, queues, files=files)
        stack.callback(e.close)
        e.placement.scratch.claim(drives)
        exchange = Exchange(f.cfg, f.source, e.placement, f.adapter.values if f.adapter else None)
        with screen.working("loading", e.placement.nbytes() + e.placement.frozen_bytes) as loaded:
            exchange.load(loaded)
        chip = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        model = f"{f.base}{f' with its adapter of rank {f.cfg.lora.rank}' if f.cfg.lora else ''}"
        screen.say(f"model    {model}, {compact(shapes.parameters(f.cfg))} parameters in {dtype.lower()} on the {chip}")
        if streamed := sum(unit.base == "ssd" for unit in plan.units):
            screen.say(f"speed    {percent(streamed / len(plan.units))} of layers are read from the drive in each pass")
        yield Evaluator(e, rows, seq_len)
        e.queues.drain()


def _streamed(f: Finished, plan: Plan, dtype: str, stack: ExitStack) -> tuple[CheckpointBase | None, list[Device]]:
    """(what reads weights from the model's own files, drives for a copy of them): one of both if weights are on the
    SSD. Raises StoreError.
    """
    if not (layouts := read_from_ssd(Geometry.of(f.cfg, plan), plan)):
        return None, []
    stored = hf.sources(f.cfg, f.source.shapes, f.source.named)
    if reason := why_copied(f.cfg, dtype, f.source, stored, [f.source.folder]):
        place = stack.enter_context(Temporary("trireme-weights-", Path.cwd()))
        screen.say(f"note: weights that do not fit in RAM are copied to {place}, since {reason}")
        drive = open_device(place)
    else:
        drive = open_reader(f.source.folder / f.source.files[0])
    stack.callback(drive.io.close)
    return (None, [drive]) if reason else (CheckpointBase(layouts, f.source, stored, [drive]), [])

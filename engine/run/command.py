"""Options from a command line, a YAML file or an interrupted run, and back to YAML.

Accepts dashes or underscores, and names of other trainers.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import Field, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trireme.engine.amounts import size
from trireme.engine.run.options import DATA, INSTEAD, OUTPUT, PLACEMENT, TRAINING, Every, Options, Parser, store_folders
from trireme.engine.run.screen import Screen
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

_FIELDS = {f.name: f for f in fields(Options)}
_ALIASES = {alias: f.name for f in fields(Options) for alias in f.metadata.get("also", "").split()}

# Answer -> options and patterns of other trainers without an equal here.
_ELSEWHERE = {
    "--batch-size is the sequences of a whole step; micro-batches are planned": (
        "per-device-train-batch-size gradient-accumulation-steps"
    ),
    "it is that of training; leave it out": "per-device-eval-batch-size eval-batch-size",
    "what is kept, swapped or recomputed is planned; leave it out": "gradient-checkpointing*",
    "every step is logged; leave it out": "logging-*",
    "--betas 0.9,0.95 sets both": "adam-beta1 adam-beta2",
    "it is 1e-8; leave it out": "adam-epsilon",
    "--dtype bf16, which is the default on a GPU": "bf16 pure-bf16 tf32",
    "fp16 is not supported; --dtype bf16 is the default on a GPU": "fp16",
    "sequences are packed unless --no-pack is given": (
        "packing sample-packing eval-sample-packing pad-to-sequence-len group-by-length"
    ),
    "offloading needs no configuration here; leave it out": "deepspeed*",
    "--gpus N, or torchrun for several hosts; leave it out": "fsdp* ddp-*",
    "the optimizer is AdamW; leave it out": "optim optimizer",
    "an output folder is never overwritten; remove it yourself, or name another --out": "overwrite-output-dir",
    "it is supervised fine-tuning; leave it out": "stage",
    "preference training is not supported": "rl dpo-* pref-* kto-*",
    "adapters have no dropout here; leave it out": "lora-dropout",
    "DoRA is not supported; --lora alone": "*use-dora",
    "write an alpha of so much times the root of the rank: --lora-alpha": "*use-rslora",
    "--train and --freeze take globs over names of tensors": "unfrozen-parameters freeze-*",
    "--lora 16 trains adapters, and without it everything is trained": "finetuning-type lora-* qlora-* peft-*",
    "nothing is quantized; leave it out": "load-in-* quantization-*",
    "the checkpoint's own chat template is used, or a .jinja file of --chat-template": "template",
    "--data takes paths of files; the format is found from the keys": "datasets dataset-dir",
    "--val takes a file": "test-datasets eval-dataset",
    "leave it out": "do-train do-predict dataset-prepared-path overwrite-cache save-only-model",
    "--val is evaluated if given": "do-eval",
    "all cores are used; leave it out": "preprocessing-num-workers dataloader-* dataset-processes",
    "prompts are not trained on, and plain text is as a whole": "train-on-*",
    "attention is always flash attention; leave it out": "flash-att* xformers-attention sdp-attention",
    "--save-every and --eval-every take steps, a share of the run, minutes or never": "*-strategy *-per-epoch",
    "loss.svg is always drawn; leave it out": "plot-loss",
    "--log wandb, which reads its own settings from the environment": "wandb-*",
    "no code of a checkpoint is run; leave it out": "trust-remote-code",
    "the checkpoint's files say it; leave it out": "model-type tokenizer-type special-tokens",
    "--export best does that": "load-best-model-at-end",
    "nothing is uploaded; leave it out": "push-to-hub hub-*",
}

# Raised by PyYAML's constructors where a value belies its tag or is too deep.
_TRUSTING = (ValueError, AttributeError, TypeError, LookupError, ArithmeticError, RecursionError)

# ---------------------------------------------------------------- reading


def program() -> str:
    """The command as it was called."""
    return "trireme" if Path(sys.argv[0]).name == "trireme" else "python scripts/finetune.py"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _resolve(name: str) -> str:
    """The field of an option or alias, without dashes. Raises InputError."""
    key = name.replace("_", "-")
    found = _ALIASES.get(key, key.replace("-", "_"))
    if found in _FIELDS:
        return found
    if answer := next((text for text, names in _ELSEWHERE.items() if any(fnmatch(key, n) for n in names.split())), ""):
        raise InputError(f"--{key} is not an option here: {answer}.")
    near = difflib.get_close_matches(key, [*_ALIASES, *(n.replace("_", "-") for n in _FIELDS)], 1)
    if not near:
        raise InputError(f"unknown option --{name}. See --help.")
    same = f" (= {_flag(_ALIASES[near[0]])})" if near[0] in _ALIASES else ""
    raise InputError(f"unknown option --{name}. Did you mean --{near[0]}{same}?")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # late: slower than all of --help
        from importlib.metadata import version

        Screen().say(f"trireme {version('trireme')}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(re.sub(r"^argument (\S+)(, \S+)*: ", r"\1: ", message) + ".")

    def _print_message(self, message: str, file: Any = None) -> None:
        with suppress(OSError):  # as later Pythons do by themselves
            super()._print_message(message, file)


def _typed(parse: Parser) -> Parser:
    """Errors as argparse shows them."""

    def typed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program(),
        usage=f"{program()} CHECKPOINT --data FILE [--out DIR] [options]",
        description="Fine-tunes CHECKPOINT, a Hugging Face folder (--model DIR means the same), on one machine.",
        epilog="Names from Hugging Face and others work too (--learning_rate, --output_dir, ...). "
        f"{program()} merge ADAPTER --out DIR adds an adapter to its model.",
        allow_abbrev=False,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=112),
    )
    groups = {name: parser.add_argument_group(name) for name in (DATA, OUTPUT, TRAINING, PLACEMENT, INSTEAD)}
    for f in fields(Options):
        groups[f.metadata["group"]].add_argument(_flag(f.name), default=argparse.SUPPRESS, help=_help(f), **_kind(f))
    groups[INSTEAD].add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="which one")
    groups[INSTEAD].add_argument("-h", "--help", action="help", help="this page")
    return parser


def _help(f: Field[Any]) -> str:
    if f.name == "model":
        return argparse.SUPPRESS  # shown as CHECKPOINT
    text = f.metadata["help"].replace("%", "%%")
    plain = "[" in text or f.default is False or f.default in (None, "", ())
    default = ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
    return text if plain else f"{text} [{default}]"


def _kind(f: Field[Any]) -> dict[str, Any]:
    """For add_argument."""
    meta = f.metadata
    if meta["parse"] is bool:
        return {"action": "store_true"}
    more: dict[str, Any] = {"metavar": meta["metavar"], "type": _typed(meta["parse"])}
    if meta.get("repeat"):
        more["action"] = "append"
    if f.name == "resume":
        more |= {"nargs": "?", "const": ""}
    return more


def _spelled(word: str) -> str:
    """Resolves a flag's alias."""
    match = re.match(r"--([\w-]+)(?==|$)", word)
    if not match or match[1] in ("help", "version"):
        return word
    return _flag(_resolve(match[1])) + word[match.end() :]


def _from_flags(argv: Sequence[str]) -> dict[str, Any]:
    space, rest = _parser().parse_known_args([_spelled(word) for word in argv])
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(space).items()}
    for word in rest:
        if word.startswith("-"):
            raise InputError(f"unknown option {word}. See --help.")
        if "model" in given:
            raise InputError(f"{word}: the checkpoint is {given['model']} already. Data goes behind --data.")
        given["model"] = word
    return given


def _from_yaml(path: Path, text: str | None = None) -> dict[str, Any]:
    """`text`: its content, if it is not here. Raises InputError."""
    given, wrong = {}, []
    for key, value in _read_yaml(path, _read(path) if text is None else text):
        try:
            name = _resolve(key)
        except InputError as error:
            wrong.append(str(error))
            continue
        if name in ("resume", "config") and value is not None:
            raise InputError(f"{path}: {key} belongs on the command line. Leave it out here.")
        for part in value if isinstance(value, list) else [value]:
            if "\0" in _written(part, f"{path}: {key}"):
                raise InputError(f"{path}: {key} holds a NUL character.")
        if value is not None and name in given:
            raise InputError(f"{path}: {key} is {_flag(name)}, which is given already. Leave one out.")
        if value is not None:
            given[name] = _convert(_FIELDS[name], value, f"{path}: {key}")
    if wrong:
        raise InputError(f"{path}: {' '.join(wrong)}")
    return given


def _read(path: Path) -> str:
    """Raises InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not YAML: {error}") from None


def _read_yaml(path: Path, text: str) -> list[tuple[str, Any]]:
    """Keys and values, duplicates too."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        content = [(loader.construct_object(k, True), loader.construct_object(v, True)) for k, v in pairs]
        other = None if node is None or pairs else loader.construct_document(node)
    except (yaml.YAMLError, *_TRUSTING) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if other is not None and other != {}:
        raise InputError(f"{path} holds a {type(other).__name__}, expected lines like 'batch-size: 16'.")
    return [(_written(key, f"{path}: a key"), value) for key, value in content]


def _written(value: Any, where: str) -> str:
    """A plain value as text. Refuses nested lists: a few bytes of aliases expand to gigabytes."""
    if isinstance(value, (list, Mapping, Set)):
        raise InputError(f"{where}: a {type(value).__name__} is not a plain value.")
    try:
        return str(value)
    except ValueError:
        raise InputError(f"{where} is a number of thousands of digits.") from None


def _convert(f: Field[Any], value: Any, where: str) -> Any:
    parse = f.metadata["parse"]
    if parse is bool or isinstance(value, bool):
        if not (parse is bool and isinstance(value, bool)):
            raise InputError(f"{where}: {value!r} is not {'true or false' if parse is bool else 'a plain value'}.")
        return value
    try:
        if f.default == ():
            values = tuple(str(v) for v in (value if isinstance(value, list) else [value]))
            return values if f.metadata.get("repeat") else parse(",".join(values))
        return parse(",".join(map(str, value)) if isinstance(value, list) else str(value))
    except ValueError as error:
        raise InputError(f"{where}: {error}.") from None


def latest_run(folder: Path) -> Path:
    """The run written last. Raises InputError."""
    runs = [path.parent for path in folder.glob("*/config.yaml")]
    if not runs:
        raise InputError(f"--resume: no run in {folder}/. Name the run: --resume RUN.")
    return max(runs, key=lambda run: max(path.stat().st_mtime for path in run.iterdir()))


def parse(
    argv: Sequence[str], host: int = 0, hosts: int = 1, of_first: Callable[[str], str] = lambda text: text
) -> Options:
    """`argv` lacks the program's name. Of several `hosts` this is `host`, and `of_first` gives host 0's text.

    Raises InputError; --help exits.
    """
    given = _from_flags(argv)
    if hosts > 1:
        given = _of_host(given, host, hosts)
    run = Path(given["resume"] or latest_run(Path("runs"))) if "resume" in given else None
    begun = run is not None and (run / "config.yaml").is_file()
    text = of_first(_read(run / "config.yaml") if run and begun else "")
    if run:
        if not host and not begun:
            raise InputError(
                f"--resume {run}: there is no run in that folder (no config.yaml). Begin one there: "
                f"{program()} CHECKPOINT --data FILE --out {run}."
            )
        if _full(given.get("out", run)) != _full(run):
            raise InputError(f"--out {given['out']}: a run goes on in its own folder, {run}. Leave it out.")
        kept = _from_yaml(run / "config.yaml") if begun else _as_other(_from_yaml(run / "config.yaml", text), host)
        given = {**kept, **given, "resume": str(run), "out": str(run)}
    elif "config" in given:
        given = {**_from_yaml(Path(given["config"])), **given}
    return checked(Options(**given))


def _of_host(given: dict[str, Any], host: int, hosts: int) -> dict[str, Any]:
    """A host's options: those behind the first keep their state in folders of their own. Raises InputError."""
    if not (given.get("resume") or given.get("out")) or "config" in given or "demo" in given:
        raise InputError(
            f"torchrun began {hosts} hosts: say --out DIR, without --config or --demo. Host 0 writes the checkpoint "
            "there; host N keeps its state in DIR/host-N, on a disk of its own or on one that they share."
        )
    if not host:
        return given
    given |= {name: _place(given[name], host) for name in ("resume", "out") if name in given}
    return _as_other(given, host)


def _as_other(given: dict[str, Any], host: int) -> dict[str, Any]:
    """Host 0's options as another's."""
    if "store" in given:
        given["store"] = tuple(_place(folder, host) for folder in given["store"])
    given.pop("log", None)
    return given


def _place(folder: str, host: int) -> str:
    return str(Path(folder) / f"host-{host}")


def stores_of(run: Path) -> list[Path]:
    """The folders of a run's store. Raises InputError where its config.yaml is not one."""
    return store_folders(_from_yaml(run / "config.yaml").get("store", ()), run)


def checked(options: Options) -> Options:
    """What belongs together; the output's folder by default, and paths as text. Raises InputError."""
    options = replace(options, **{f.name: _as_text(getattr(options, f.name), f.default == ()) for f in fields(Options)})
    if options.demo:
        own = [_flag(name) for name in ("model", "data", "val", "resume") if getattr(options, name)]
        if own:
            raise InputError(f"--demo trains a model of its own on stories of its own. Leave out {', '.join(own)}.")
        return options
    _check_named(options)
    unknown = set(options.log) - {"tensorboard", "wandb", "trace"}
    if unknown:
        raise InputError(f"--log {sorted(unknown)[0]}: expected tensorboard, wandb or trace.")
    if (options.export == "best" or options.patience) and not options.val and options.data:
        flag = f"--patience {options.patience}" if options.patience else "--export best"
        raise InputError(f"{flag} goes by the loss on held-out data. Give --val.")
    stores = {os.path.realpath(folder) for folder in options.store}
    if len(stores) < len(options.store):
        raise InputError(f"--store {','.join(options.store)}: a folder is named twice. Name one on each drive.")
    out = options.out or str(Path("runs") / (options.shape or Path(options.model).resolve().name))
    if os.path.realpath(out) in stores and not options.resume:
        raise InputError(f"--store {','.join(options.store)} is --out itself. Name another folder, or leave it out.")
    return replace(options, out=out)


def _as_text(value: Any, several: bool) -> Any:
    """A value that Python gave: paths as text, one value where several are meant."""
    if several and isinstance(value, (str, os.PathLike)):
        value = (value,)
    if isinstance(value, (list, tuple)):
        return tuple(_as_text(v, False) for v in value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_named(options: Options) -> None:
    """Raises InputError unless a model and data are named, or nothing but a plan is wanted."""
    if options.shape and (options.model or not options.dry_run):
        wrong = f"leave {options.model} out" if options.model else "add --dry-run"
        raise InputError(f"--shape {options.shape} plans for a model that is not here: {wrong}.")
    if not (options.model or options.shape):
        raise InputError(f"no checkpoint given. Try: {program()} CHECKPOINT --data FILE, or --demo, or --help.")
    if options.data:
        return
    if not options.dry_run:
        raise InputError("no data given. Name it: --data FILE (.jsonl .json .csv .txt .parquet).")
    if options.val or options.epochs:
        flag = "--val" if options.val else "--epochs"
        raise InputError(f"{flag} is about data, and no --data is given. Name it, or leave {flag} out.")


def parse_merge(argv: Sequence[str]) -> argparse.Namespace:
    """adapter, out and model of `merge`. Raises InputError; --help exits."""
    parser = _Parser(
        prog=f"{program()} merge",
        description="Adds an adapter to its model, and writes an ordinary checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder of peft's format")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write")
    parser.add_argument("--model", metavar="DIR", default="", help="the checkpoint [the one that ADAPTER names]")
    return parser.parse_args(argv)


# ---------------------------------------------------------------- writing

_NOT_KEPT = ("resume", "config", "dry_run", "assume", "shape", "demo", "out")  # not of the run


def kept(options: Options) -> dict[str, Any]:
    """The run's options as JSON and YAML values; paths absolute."""
    content: dict[str, Any] = {}
    for f in fields(Options):
        value = getattr(options, f.name)
        if f.name in _NOT_KEPT:
            continue
        if value is None:
            pass
        elif f.name in ("model", "tokenizer", "store", "plan"):
            value = [_full(v) for v in value] if isinstance(value, tuple) else _full(value)
        elif f.name in ("data", "val", "chat_template"):
            value = [_absolute(v) for v in value] if isinstance(value, tuple) else _absolute(value)
        elif f.metadata["parse"] is size:
            value = f"{value}B"
        content[f.name] = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Every) else value
    return content


_OWN = ("model", "tokenizer", "chat_template", "data", "val", "adapter", "store", "plan", "gpu_memory", "ram", "log")


def to_agree(options: Options) -> dict[str, str]:
    """What all hosts must be given alike: all but paths, limits of memory and trackers."""
    same = {_flag(name): repr(value) for name, value in kept(options).items() if name not in _OWN}
    return same | {"--resume": str(bool(options.resume)), "--dry-run": str(options.dry_run)}


def is_same_run(run: Path, place: Path) -> bool:
    """Whether two folders are of hosts of one run. Raises InputError."""
    one, other = (_from_yaml(folder / "config.yaml") for folder in (run, place))
    return all(one.get(name) == other.get(name) for name in _FIELDS if name not in _OWN)


def config_yaml(options: Options) -> bytes:
    content = {name: value for name, value in kept(options).items() if value is not None}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()


def changes(options: Options, before: Mapping[str, Any]) -> list[str]:
    """A line per option that differs from `before`, earlier `kept` options."""
    said = lambda value: "not given" if value in (None, []) else shown(repr(value), 500)
    both = [(name, value, before[name]) for name, value in kept(options).items() if name in before]
    return [f"{_flag(name)} {said(value)}, was {said(was)}" for name, value, was in both if value != was]


def _full(path: str | Path) -> str:
    """Absolute, links kept."""
    return os.path.abspath(path)  # noqa: PTH100, follows links


def _absolute(data: str) -> str:
    """FILE or FILE:WEIGHT made absolute; a share (0.02), `-` and `plain` as given."""
    word = data in ("-", "plain") or re.fullmatch(r"[\d.]+", data)
    return _full(data) if Path(re.sub(r":[\d.]+$", "", data)).exists() and not word else data

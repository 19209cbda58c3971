"""Options from a command line, a YAML file or an interrupted run, and checks of their combinations."""

from __future__ import annotations

import argparse
import difflib
import glob
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from trireme.engine.run.config.config_file import OWN, SIGNED, from_yaml, full, text_of
from trireme.engine.run.config.option_names import FIELDS, flag_of, nearest, resolve
from trireme.engine.run.hub.names import title
from trireme.engine.run.options import GROUPS, Options, Parser
from trireme.engine.run.screen import Screen
from trireme.models.config import InputError
from trireme.storage.files import Say
from trireme.storage.untrusted import quoted

WIDEST = 112  # columns of --help
SAMPLE, EVAL, TRAIN = "sample OUT --chat", "eval OUT --data FILE", "CHECKPOINT --data FILE"
MEANT = {  # what others call a command: what it is here
    **dict.fromkeys(("sample", "chat", "generate", "inference", "infer", "predict", "run"), SAMPLE),
    **dict.fromkeys(("eval", "evaluate", "evaluation", "test", "bench", "benchmark"), EVAL),
    **dict.fromkeys(("train", "finetune", "fine-tune", "sft", "dpo", "fit", "tune"), TRAIN),
    **dict.fromkeys(("merge", "fuse", "export", "convert"), "merge ADAPTER --out DIR"),
    **dict.fromkeys(("push", "upload", "publish"), "push OUT OWNER/NAME"),
    "score": "score OUT --data FILE --out DIR",
    "check": "check",
    "help": "--help",
}


def program() -> str:
    """The command as it was called; from Python, in a notebook too, as it is installed."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == "trireme.__main__":
        return "python -m trireme"
    return "python scripts/finetune.py" if Path(sys.argv[0]).name == "finetune.py" else "trireme"


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # late: slower than all of --help
        from importlib.metadata import PackageNotFoundError, version

        try:
            Screen().say(f"trireme {version('trireme')}")
        except PackageNotFoundError:  # run from a clone
            Screen().say("trireme, run from its source folder without an installation")
        parser.exit()


class _Help(argparse.HelpFormatter):
    """Help text in the terminal's width, divided between words."""

    def __init__(self, prog: str):
        width = min(WIDEST, shutil.get_terminal_size((WIDEST + 1, 24)).columns - 1)
        super().__init__(prog, max_help_position=32 if width == WIDEST else width // 4, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def add_usage(self, usage: str | None, *more: Any) -> None:
        text = self._split_lines(f"usage: {usage}", self._width - len("usage: "))
        super().add_usage("\n       ".join(text).removeprefix("usage: "), *more)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class CommandParser(argparse.ArgumentParser):
    def __init__(self, **given: Any):
        super().__init__(allow_abbrev=False, formatter_class=_Help, **given)

    def error(self, message: str) -> NoReturn:
        said = re.sub(r"^argument (\S+)(, \S+)*: ", r"\1: ", message)
        said = re.sub(
            r"^(--\S+): expected one argument$", r"\1: expected a value; one that begins with -: \1=VALUE", said
        )
        raise InputError(f"{said}.")

    def known(self, argv: Sequence[str], name: str) -> argparse.Namespace:
        """Parses the arguments of the command `name`. Raises InputError, for an unknown option with the nearest known
        one.
        """
        given, rest = self.parse_known_args(argv)
        for word in rest:
            option = word.partition("=")[0]
            known = [flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")]
            near = option.startswith("-") and nearest(option.strip("-"), known)
            way = f"Did you mean --{near}?" if near else f"See {program()} {name} --help."
            raise InputError(
                f"unknown option {option}. {way}" if option.startswith("-") else f"{word}: unknown here. {way}"
            )
        return given

    def _print_message(self, message: str, file: Any = None) -> None:
        with suppress(OSError):  # as later Pythons do by themselves
            super()._print_message(message, file)


def typed(parse: Parser) -> Parser:
    """A parser whose ValueErrors become argparse's."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


class _Once(argparse.Action):
    """An option that would lose its first file if it was given twice, like --data."""

    def __call__(self, parser: Any, space: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        if hasattr(space, self.dest):
            parser.error(f"{flag} {value}: {flag} is {getattr(space, self.dest)} already. Name a folder or a pattern")
        setattr(space, self.dest, value)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=program(),
        usage=f"{program()} CHECKPOINT --data FILE [--out DIR] [options]",
        description="Fine-tunes CHECKPOINT, the folder of a Hugging Face model or its name on the hub (also: --model).",
        epilog="Names of other trainers work too (--learning_rate, --output_dir, ...). Other commands, each with "
        f"its own --help: {program()} sample OUT, eval OUT, score OUT, merge ADAPTER, push OUT, check.",
        add_help=False,
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for name, f in FIELDS.items():
        add_option(groups[f.metadata["group"]], name, default=argparse.SUPPRESS)
    version = "print the version"
    groups[GROUPS[-1]].add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=version)
    groups[GROUPS[-1]].add_argument("-h", "--help", action="help", help="print this page")
    return parser


def add_option(group: argparse._ArgumentGroup, name: str, **more: Any) -> None:
    """Adds an option of a run, with its help and its parser. `more`: of add_argument."""
    f = FIELDS[name]
    group.add_argument(flag_of(name), help=_help(f), **_kind(f), **more)


def _help(f: Field[Any]) -> str:
    if f.name == "model":
        return argparse.SUPPRESS  # shown as CHECKPOINT
    text = f.metadata["help"].replace("%", "%%")
    plain = "[" in text or f.default is False or f.default in (None, "", ())
    default = ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
    return text if plain else f"{text} [{default}]"


def _kind(f: Field[Any]) -> dict[str, Any]:
    """The arguments of add_argument for an option."""
    meta = f.metadata
    if meta["parse"] is bool:
        return {"action": "store_true"}
    more: dict[str, Any] = {"metavar": meta["metavar"], "type": typed(meta["parse"])}
    if meta.get("repeat"):
        more["action"] = "append"
    if f.name == "val":
        more["action"] = _Once
    if f.name == "resume":
        more |= {"nargs": "?", "const": ""}
    return more


def _spelled(word: str) -> str:
    """A flag with an alias replaced by the option's name."""
    match = re.match(r"--([\w-]+)(?==|$)", word)
    if not match or match[1] in ("help", "version"):
        return word
    return flag_of(resolve(match[1])) + word[match.end() :]


def refuse_command(word: str) -> None:
    """Raises InputError if the first word is not a folder but another word for one of the commands."""
    meant = MEANT.get(word) or next((MEANT[near] for near in difflib.get_close_matches(word, MEANT, 1, 0.75)), "")
    if meant and not Path(word).exists():
        raise InputError(f"{word} is not a folder here, nor a command. Did you mean {program()} {meant}?")


def _from_flags(argv: Sequence[str]) -> dict[str, Any]:
    if argv and not argv[0].startswith("-"):
        refuse_command(argv[0])
    space, rest = _parser().parse_known_args([_spelled(word) for word in argv])
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(space).items()}
    for word in rest:
        if word.startswith("-"):
            raise InputError(f"unknown option {word}. See --help.")
        if "model" in given:
            model = given["model"]
            if model == argv[0] and "/" not in model and not Path(model).exists() and Path(word).is_dir():
                raise InputError(f"{model} is not a folder here, nor a command. See {program()} --help.")
            what = f"{word}: the checkpoint is {model} already"
            if given.get("data") and Path(word).suffix:
                raise InputError(f"{what}. Did the shell expand a pattern? Quote it.")
            raise InputError(f"{what}. Give data with --data.")
        given["model"] = word
    return given


def latest_run(folder: Path) -> Path:
    """The run in `folder` that was written last. A config.yaml of another program counts only if there is no run.
    Raises InputError.
    """
    configs = [path for path in folder.glob("*/config.yaml") if path.is_file()]
    runs = [path.parent for path in [path for path in configs if text_of(path).startswith(SIGNED)] or configs]
    if not runs:
        raise InputError(f"--resume: no run in {folder}/. Name the run: --resume RUN.")
    return max(runs, key=_last_change)


def _last_change(folder: Path) -> float:
    """When a file in a folder was written last. A run that is active there renames and removes some meanwhile."""
    times = [0.0]
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            times.append(path.lstat().st_mtime)
    return max(times)


def parse(
    argv: Sequence[str],
    host: int = 0,
    hosts: int = 1,
    of_first: Callable[[str], str] = lambda text: text,
    say: Say | None = None,
) -> Options:
    """The options of a command line without the program's name.

    This is host `host` of `hosts`; `of_first` returns host 0's text, given this host's. `say` is called with lines on
    how another trainer's file was read. Raises InputError; exits for --help.
    """
    given = _from_flags(argv)
    if hosts > 1:
        given = _of_host(given, host, hosts)
    run = Path(given["resume"] or latest_run(Path("runs"))) if "resume" in given else None
    begun = run is not None and (run / "config.yaml").is_file()
    text = of_first(text_of(run / "config.yaml") if run and begun else "")
    if run:
        if not host and not begun:
            raise InputError(f"--resume {run}: there is no run in that folder (no config.yaml). {_instead_of(run)}")
        for name in ("config", "shape", "demo"):
            if name in given:
                raise InputError(f"{flag_of(name)}: a resumed run has options and a model of its own. Leave it out.")
        if full(given.get("out", run)) != full(run):
            raise InputError(f"--out {given['out']}: a run continues in its own folder, {run}. Leave it out.")
        kept = _kept(run / "config.yaml", begun, text, host)
        _check_there(run, kept, given)
        given = {**_without_length(kept, given), **given, "resume": str(run), "out": str(run)}
    elif "config" in given:
        kept = from_yaml(Path(given["config"]), typed=given, say=say)
        given = {**_without_length(kept, given), **given}
    return checked(Options(**given))


def _kept(config: Path, begun: bool, text: str, host: int) -> dict[str, Any]:
    """The options of a run from its config.yaml. `begun`: there is one; `text`: that of host 0.

    Another host has its own paths and limits, and all else from host 0: of two files one may be older after a kill.
    """
    if not host:
        return from_yaml(config)
    first = from_yaml(config, text)
    if not begun:
        return _as_other(first, host)
    own = {name: value for name, value in from_yaml(config).items() if name in OWN}
    return {name: value for name, value in first.items() if name not in OWN} | own


def _instead_of(run: Path) -> str:
    """What to resume instead of a folder without a run: the run that it is in, such as OUT for OUT/best; else a new
    run.
    """
    for above in list(Path(full(run)).parents)[:3]:
        if (above / "config.yaml").is_file() and text_of(above / "config.yaml").startswith(SIGNED):
            return f"It is a part of the run in {above}: --resume {quoted(above)}."
    if run.is_dir() and any(not path.name.startswith(".") for path in run.iterdir()):
        return "Name the folder that --out named."
    return f"Begin one there: {program()} CHECKPOINT --data FILE --out {quoted(run)}."


def _check_there(run: Path, kept: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises InputError if a file or folder that `kept` names has been moved away."""
    for name in ("model", "data", "val", "tokenizer", "chat_template", "adapter", "teacher"):
        value = kept.get(name) if name not in given else None
        for text in (value,) if isinstance(value, str) else value if isinstance(value, (list, tuple)) else ():
            path = Path(re.sub(r":\d*\.?\d+$", "", text))
            if path.is_absolute() and not glob.has_magic(text) and not (path.exists() or Path(text).exists()):
                flag = flag_of(name)
                raise InputError(
                    f"--resume {run}: {path} ({flag}) is not there. Put it back, or say where it is: {flag} PATH."
                )


def _without_length(kept: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`kept` without epochs if steps are given now, and without steps if epochs are."""
    other = {"epochs": "max_steps", "max_steps": "epochs"}
    return {name: value for name, value in kept.items() if name in given or other.get(name) not in given}


def _of_host(given: dict[str, Any], host: int, hosts: int) -> dict[str, Any]:
    """A host's options. Hosts other than the first store their state in folders of their own. Raises InputError."""
    if not (given.get("resume") or given.get("out")) or "config" in given or "demo" in given:
        raise InputError(
            f"WORLD_SIZE is {hosts} hosts: give --out DIR, without --config or --demo. Host 0 writes the checkpoint "
            "there; host N keeps its state in DIR/host-N, on a disk of its own or on one that they share."
        )
    if not host:
        return given
    given |= {name: _place(given[name], host) for name in ("resume", "out") if name in given}
    return _as_other(given, host)


def _as_other(given: dict[str, Any], host: int) -> dict[str, Any]:
    """The options of another host, from those of host 0."""
    if "store" in given:
        given["store"] = tuple(_place(folder, host) for folder in given["store"])
    given.pop("log", None)
    return given


def _place(folder: str, host: int) -> str:
    return str(Path(folder) / f"host-{host}")


def checked(options: Options) -> Options:
    """Options that belong together, with the default folder of the output. Raises InputError."""
    options = replace(options, **{f.name: _as_text(getattr(options, f.name), f.default == ()) for f in fields(Options)})
    if options.demo:
        own = [flag_of(name) for name in ("model", "data", "val", "resume") if getattr(options, name)]
        if own:
            raise InputError(f"--demo trains a generated model on generated stories. Leave out {', '.join(own)}.")
        return options
    _check_named(options)
    from trireme.engine.run.begin.method import preference_of, teaching_of  # late: numpy, and --help needs none

    preference_of(options)
    teaching_of(options)
    if options.labels and options.method != "classify":
        raise InputError(f"--labels {','.join(options.labels)[:60]} is for --method classify. Leave it out.")
    if options.long == "split" and options.method != "sft":
        what = "reads whole rows" if options.method == "classify" else "compares whole answers"
        raise InputError(f"--long split: --method {options.method} {what}. Take cut, drop or error.")
    if options.log == ("none",):
        options = replace(options, log=())
    unknown = set(options.log) - {"tensorboard", "wandb", "mlflow", "comet", "trace"}
    if unknown:
        raise InputError(
            f"--log {sorted(unknown)[0]}: expected tensorboard, wandb, mlflow, comet or trace; leave it out for none."
        )
    if (options.export == "best" or options.patience) and not options.val and options.data:
        flag = f"--patience {options.patience}" if options.patience else "--export best"
        raise InputError(f"{flag} needs the loss on held-out data. Give --val.")
    out = options.out or str(Path("runs") / (options.shape or title(options.model)))
    _check_store(options, out)
    return replace(options, out=out)


def _check_store(options: Options, out: str) -> None:
    """Raises InputError unless --store names different folders, none of which is `out`."""
    named = f"--store {','.join(options.store)}"
    stores = {os.path.realpath(folder) for folder in options.store}
    if os.path.realpath("/") in stores or "" in options.store:
        wrong = "names no folder" if "" in options.store else "names the root folder"
        raise InputError(f"{named} {wrong}. Name a folder of its own on each drive.")
    for folder in () if options.resume else options.store:
        if os.path.lexists(folder) and not Path(folder).is_dir():
            raise InputError(f"--store {folder} is a file, or a link to nothing. Name a folder.")
    if len(stores) < len(options.store):
        raise InputError(f"{named}: a folder is named twice. Name one on each drive.")
    if os.path.realpath(out) in stores and not options.resume:
        raise InputError(f"{named} is --out itself. Name another folder, or leave it out.")


def _as_text(value: Any, several: bool) -> Any:
    """A value from Python: paths become text, and one value a list where several are meant."""
    if several and isinstance(value, (str, os.PathLike)):
        value = (value,)
    if isinstance(value, (list, tuple)):
        return tuple(_as_text(v, False) for v in value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_named(options: Options) -> None:
    """Raises InputError unless a model and data are named, or only a plan is wanted."""
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
        raise InputError(f"{flag} is for data, and no --data is given. Name it, or leave {flag} out.")

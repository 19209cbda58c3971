"""The command line: options, a command, and each expected failure as one line and an exit code.

Exit codes: 0 done; 1 bug; 2 input; 3 does not fit; 4 drive failed or full, device hung, host lost; 130 interrupted; 141
output closed. Torch is imported by the command's own module, so that --help is fast.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import glob
import importlib
import io
import os
import platform
import re
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import Field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from trireme.engine.hosts.group import LostHost, Place, here, joined, place
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.clock import process_began
from trireme.engine.run import aliases, config_file, folder, screen
from trireme.engine.run.options import COMMANDS, GROUPS, Base, Options, flag, table
from trireme.engine.run.signals import LEFT, end_at_signals, stop_signals
from trireme.models.config import InputError
from trireme.storage.headers import CheckpointError
from trireme.storage.untrusted import quoted

MODULES = {name: f"trireme.engine.run.after.{name}" for name in COMMANDS} | {"": "trireme.engine.run.loop"}
NO_MEMORY, NO_THREAD = (errno.ENOMEM, errno.EAGAIN), "can't start new thread"  # Python's words
MISNAMED = (errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST)
FAILING = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EUCLEAN)  # a drive, or a server of files
CURES = dict.fromkeys(FAILING, " Is its drive failing? See dmesg.")
CURES |= dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), " Free some space there, or name another folder.")
CURES |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), " Change its permissions, or name another.")
# Spinning threads of torch: steps ten times slower on a busy CPU. Segments that grow: none of a GPU's memory is lost to
# fragments; WSL2's driver may refuse them.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
if "microsoft" not in platform.release().lower():
    ENVIRONMENT["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
WORDS = {"train": "", "finetune": "", "sft": "", "chat": "sample", "generate": "sample", "evaluate": "eval",
         "fuse": "merge", "upload": "push", "infer": "sample", "inference": "sample"}  # fmt: skip


def command() -> int:
    """The console script: returns the exit code."""
    _open_streams()
    argv = sys.argv[1:]
    if argv[:1] == ["sample"]:  # Ctrl-C ends an answer
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        sys.unraisablehook = _unraisable
    with screen.to(None, process_began()):
        code = main(argv)
    end_at_signals(code)
    return code


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    signals = nullcontext() if list(argv[:1]) == ["sample"] else stop_signals(_interrupt, _leave)
    out, at = "", Place()
    try:
        with signals, ExitStack() as stack:
            _check_folder()
            os.environ.update(ENVIRONMENT | os.environ)
            warnings.showwarning = lambda message, *_, **__: screen.warn(str(message))
            stack.enter_context(joined(at := place(), lambda why: _timed_out(why, folder.resumable(out))))
            if at.host:  # host 0 speaks for all
                stack.enter_context(screen.to(stack.enter_context(Path(os.devnull).open("w"))))
            name, options = parse(argv)
            if name and at.hosts > 1:
                raise InputError(f"trireme {name} runs on one host. Start it without torchrun.")
            if isinstance(options, Options):
                named = folder.named(options)
                of_first = here().texts(named.out)[0]
                options = named if options.out else replace(named, out=of_first)
                out = options.out
                _take_gpus(options, at)
            module = importlib.import_module(MODULES[name])
            screen.clock().spent["imports"] += screen.clock().whole
            return int(module.run(options) or 0)
    except BaseException as error:
        message, code = explained(error)
        if code in (3, 4, LEFT) and (run := folder.resumable(out)):
            message += f" {'To continue' if code == LEFT else 'When that is fixed'}: --resume {quoted(run)}"
        if message:
            whose = f"host {at.host}: " if at.host else ""
            screen.urgent(f"error: {whose}{' '.join(message.split())[:2000]}")
        return code
    finally:
        _give_up_output()


def explained(error: BaseException) -> tuple[str, int]:
    """The message and the exit code of an expected error; raises others."""
    number = getattr(error, "errno", None)
    if isinstance(error, (InputError, CheckpointError)):
        behind = getattr(error.__context__, "errno", None)  # a drive that failed to read a user's file
        return str(error), 4 if behind in FAILING else 2
    if isinstance(error, DoesNotFit):
        return str(error), 3
    if isinstance(error, LostHost):
        return f"{str(error).rstrip('.')}.", 4
    if isinstance(error, BrokenPipeError):
        return "", 141
    if isinstance(error, MemoryError) or number in NO_MEMORY or str(error) == NO_THREAD:
        return f"there is not enough memory ({error}). Free some, or raise its limits (ulimit -v, -u).", 3
    if isinstance(error, OSError):
        where, what = error.filename or "a temporary file", str(error.strerror or error).rstrip(".")
        if number in MISNAMED:
            return f"{where}: {what}. Name another path.", 2
        return f"{where}: {what}.{CURES.get(number or 0, '') * (where != screen.OUTPUT)}", 4
    if isinstance(error, KeyboardInterrupt):
        return "interrupted.", LEFT
    raise error


def _timed_out(why: str, run: str) -> None:
    """Ends this process: another host is lost while this one waits for it. `run`: the folder that --resume takes."""
    from trireme.engine.queues.watchdog import leave  # late: torch takes seconds

    way = f"To continue, on all hosts: --resume {quoted(run)}" if run else "There is no snapshot yet"
    leave(lambda: screen.urgent(f"error: {why.rstrip('.')}. {way}"))


def _take_gpus(options: Options, at: Place) -> None:
    """Lets a host see only its own GPUs if several hosts are on one machine. Raises InputError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if at.local_hosts == 1 or options.device == "cpu" or visible == "":
        return
    if options.gpus == "all":
        raise InputError(f"--gpus all: {at.local_hosts} hosts are on this machine. Give --gpus N, the number for each.")
    n = int(options.gpus)
    own = range(at.local * n, (at.local + 1) * n)
    names = visible.split(",") if visible is not None else [str(gpu) for gpu in range(own.stop)]
    if len(names) < own.stop:
        raise InputError(
            f"--gpus {n}: CUDA_VISIBLE_DEVICES shows {len(names)} to {at.local_hosts} hosts of this machine."
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in own)


def _interrupt(_: int) -> None:
    """Handles a signal as Python handles Ctrl-C."""
    raise KeyboardInterrupt


def _leave() -> None:
    screen.urgent("exited immediately")


def _unraisable(what: sys.UnraisableHookArgs) -> None:
    """An interrupt that came within a callback of the garbage collector is dropped by Python: the process ends."""
    if what.exc_type is KeyboardInterrupt:
        _leave()
        os._exit(LEFT)
    sys.__unraisablehook__(what)


def _check_folder() -> None:
    """Raises InputError if the current folder has been removed: torch's libraries would end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError("the current folder has been removed. Go to another: cd.") from None


def _open_streams() -> None:
    """Replaces closed streams by empty ones, and lets characters that cannot be encoded be replaced."""
    nowhere = lambda: io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    sys.stdin = sys.stdin or io.TextIOWrapper(io.BufferedReader(io.FileIO(os.devnull)))
    sys.stdout, sys.stderr = sys.stdout or nowhere(), sys.stderr or nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _give_up_output() -> None:
    """Drops text that cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with Path(os.devnull).open("w") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())


# ---------------------------------------------------------------- arguments


class Parser(argparse.ArgumentParser):
    """argparse for names alone: values are parsed as those of YAML and Python."""

    def error(self, message: str) -> NoReturn:
        said = re.sub(r"^argument (\S+?)(/\S+)?: ", r"\1: ", message)
        if name := re.fullmatch(r"(--\S+): expected one argument", said):
            usual = {"--lora": "a rank: --lora 16 is usual"}.get(
                name[1], f"a value; one that begins with -: {name[1]}=VALUE"
            )
            said = f"{name[1]} needs {usual}"
        raise InputError(f"{said}.")

    def _print_message(self, message: str, file: Any = None) -> None:
        with suppress(OSError):  # as later Pythons do by themselves
            super()._print_message(message, file)


class Help(argparse.HelpFormatter):
    """Help in the terminal's width, divided between words."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=min(112, shutil.get_terminal_size((113, 24)).columns - 1))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


def parse(argv: Sequence[str]) -> tuple[str, Base]:
    """(command, its options); the command "" trains. Raises InputError; exits for --help."""
    word = argv[0] if argv else ""
    if word in COMMANDS:
        return word, COMMANDS[word].of(_values(COMMANDS[word], argv[1:], word))
    meant = WORDS.get(word) or next(iter(difflib.get_close_matches(word, COMMANDS, 1, 0.75)), None)
    if (word in WORDS or meant) and not Path(word).exists():
        way = f"trireme {meant} FOLDER" if meant else "trireme CHECKPOINT --data FILE"
        raise InputError(f"{word} is not a folder here, nor a command. Did you mean {way}?")
    return "", of_a_run(_values(Options, argv, ""))


def _values(cls: type[Base], argv: Sequence[str], command: str) -> dict[str, Any]:
    """What is given on the command line, by field."""
    known = table(cls)
    argv, foreign = _apart(argv, known) if cls is Options else ([_dashed(word) for word in argv], {})
    space, rest = _parser(cls, command).parse_known_args(argv)
    given = {name: value for name, value in vars(space).items() if name in known}
    if foreign:
        theirs, lines = aliases.translated(foreign)
        if twice := theirs.keys() & given.keys():
            raise InputError(f"{flag(twice.pop())} is given twice, once by another name. Leave one out.")
        given |= theirs
        for line in lines:
            screen.say(line)
    positional = [name for name in ("folder", "model", "name") if name in known and name not in given]
    for word in rest:
        if word.startswith("-"):
            _refuse(word, known, command)
        if not positional or (command and positional[0] == "model"):
            way = "Data is given with --data FILE, patterns in quotes; intervals are written 30min."
            raise InputError(f"{word} was not expected. {way if not command else f'See trireme {command} --help.'}")
        given[positional.pop(0)] = word
    return given


def _refuse(word: str, known: Mapping[str, Any], command: str) -> NoReturn:
    """Raises InputError for an unknown option, with the nearest known one."""
    name, names = word.strip("-").partition("=")[0].replace("_", "-"), [name.replace("_", "-") for name in known]
    near: list[str] = difflib.get_close_matches(name, [*names, *(aliases.FIELD_OF if not command else ())], 1)
    ours = flag(aliases.FIELD_OF.get(near[0], near[0])) if near else ""
    begun = [other for other in names if len(name) > 2 and other.startswith(name)]
    ours = ours or (flag(begun[0]) if len(begun) == 1 else "")
    way = f"Did you mean {ours}?" if ours else f"See trireme {command} --help.".replace("  ", " ")
    raise InputError(f"unknown option {word.partition('=')[0]}. {way}")


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _apart(argv: Sequence[str], known: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """(the words of our options, values of other trainers' options by name)."""
    own, foreign, words = list[str](), dict[str, Any](), list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = _dashed(word).removeprefix("--").partition("=")
        if not word.startswith("--") or name.replace("-", "_") in known or not aliases.is_known(name):
            own.append(_dashed(word))
        elif equals:
            foreign[name] = value
        elif words and not words[0].startswith("--") and aliases.takes(name, words[0]):
            foreign[name] = words.pop(0)
        else:
            foreign[name] = True
    return own, foreign


def _parser(cls: type[Base], command: str) -> Parser:
    prog = f"trireme {command}".strip()
    words = " ".join(f.metadata["metavar"] for name, f in table(cls).items() if name in ("folder", "name"))
    others = f"Other commands, each with its own --help: {', '.join(COMMANDS)}. Names of other trainers work too."
    parser = Parser(
        prog=prog,
        usage=f"{prog} {words} [options]" if command else f"{prog} CHECKPOINT --data FILE [--out DIR] [options]",
        description=cls.__doc__
        if command
        else "Fine-tunes CHECKPOINT, a Hugging Face model's folder or its name on the hub.",
        epilog=None if command else others,
        formatter_class=Help,
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for name, f in table(cls).items():
        if name not in ("folder", "name"):
            hidden = cls is Options and name == "model"
            groups[f.metadata["group"]].add_argument(
                flag(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS if hidden else _help(f), **_kind(f)
            )
    if not command:
        groups[GROUPS[-1]].add_argument("--version", action="version", version=_version())
    return parser


def _version() -> str:
    with suppress(metadata.PackageNotFoundError):
        return f"trireme {metadata.version('trireme')}"
    return "trireme, run from its source folder without an installation"


def _help(f: Field[Any]) -> str:
    text, default = f.metadata["help"].replace("%", "%%"), f.default
    plain = "[" in text or default in (None, False, "", ())
    return text if plain else f"{text} [{','.join(map(str, default)) if isinstance(default, tuple) else default}]"


def _kind(f: Field[Any]) -> dict[str, Any]:
    """The arguments of add_argument."""
    if f.metadata["parse"] is bool:
        return {"action": "store_true"}
    if f.name == "resume":
        return {"nargs": "?", "const": "", "metavar": "RUN"}
    return {"metavar": f.metadata["metavar"], "action": "append" if f.metadata["repeat"] else "store"}


# ---------------------------------------------------------------- options of a run


def of_a_run(given: Mapping[str, Any]) -> Options:
    """The options of a run: those given, those of --config or of the run of --resume. Raises InputError."""
    run: Path | None = None
    if "resume" in given:
        run = Path(given["resume"] or folder.latest(Path("runs")))
        for name in ("config", "shape", "demo", "out"):
            if name in given:
                raise InputError(f"{flag(name)}: a resumed run has its own. Leave it out.")
        if not here().host:
            folder.check_resumable(run)
    elif "config" not in given:
        return Options.of(given)
    path = run / "config.yaml" if run else Path(given["config"])
    text = here().texts("" if here().host else config_file.text_of(path))[0]  # of host 0
    kept, lines = config_file.read(path, text)
    for line in lines:
        screen.say(line)
    other = {"epochs": "max_steps", "max_steps": "epochs"}  # the length is given by one of them
    kept = {name: value for name, value in kept.items() if other.get(name) not in given and name not in given}
    chosen = config_file.given_in(text) & kept.keys() if text.startswith(config_file.FIRST) else kept.keys()
    options = replace(Options.of({**kept, **given}, f"{path}: "), given=frozenset(chosen | given.keys()))
    if run is None:
        return options
    if not here().host:
        check_there(run, options, given)
    return replace(options, resume=str(run), out=str(run))


def check_there(run: Path, options: Options, given: Mapping[str, Any]) -> None:
    """Raises InputError if a file of a resumed run has been moved away."""
    for name, f in config_file.FIELDS.items():
        if name in given or "path" not in f.metadata["kind"] or "host" in f.metadata["kind"]:
            continue
        value = getattr(options, name) or ()
        for path in (value,) if isinstance(value, str) else value:
            plain = re.sub(r":\d*\.?\d+$", "", path)
            if path.startswith("/") and not glob.has_magic(path) and not any(map(os.path.exists, (path, plain))):
                raise InputError(
                    f"--resume {run}: {plain} is not there. Put it back, or say where it is: {flag(name)} PATH."
                )

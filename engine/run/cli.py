"""The command line: options, a command, and each expected failure as one line and an exit code.

Exit codes: 0 done; 1 bug; 2 input; 3 does not fit; 4 drive failed or full, device hung, host lost; 130 interrupted; 141
output closed. Torch is imported by the command's own module, so that --help is fast.
"""

from __future__ import annotations

import errno
import gc
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from trireme.engine.hosts.group import LostHost, Place, join, place, world
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.clock import process_began
from trireme.engine.run import config_file, folder, screen
from trireme.engine.run.options import COMMANDS, GROUPS, Base, Options, flag, table
from trireme.engine.run.signals import LEFT, end_at_signals, stop_signals
from trireme.models.config import InputError
from trireme.storage.headers import CheckpointError
from trireme.storage.untrusted import quoted

MODULES = {"": "loop", "push": "after.hub", "check": "after.equipment", "env": "after.equipment"}  # others: after.NAME
EXPECTED = {InputError: 2, CheckpointError: 2, DoesNotFit: 3, LostHost: 4}
SHORT = re.compile("can't (start new thread|allocate memory)")  # Python's words, and torch's
FAILING = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EUCLEAN)  # a drive, or a server of files
CURES = {
    **dict.fromkeys(FAILING, " Is its drive failing? See dmesg."),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), " Raise `ulimit -n`."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), " Free some space there, or name another folder."),
    **dict.fromkeys(TAKEN := (errno.EEXIST, errno.ENOTDIR, errno.EBUSY), " Name another folder."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), " Change its permissions, or name another."),
}
# Spinning threads of torch: steps ten times slower on a busy CPU. Segments that grow: none of a GPU's memory is lost to
# fragments; WSL2's driver may refuse them.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
if "microsoft" not in platform.release().lower():
    ENVIRONMENT["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def command() -> int:
    """The console script: returns the exit code."""
    # None is a closed one, whose number a file of the run would get.
    streams = [stream or Path(os.devnull).open("r+") for stream in (sys.stdin, sys.stdout, sys.stderr)]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    for stream in streams[1:]:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with screen.to(None, process_began()):
        code = main(sys.argv[1:])
    end_at_signals(code)
    return code


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    out, host_place = "", Place()
    try:
        with ExitStack() as stack:
            interrupt = lambda number: signal.default_int_handler(number, None)
            stack.enter_context(stop_signals(interrupt, lambda: screen.urgent("exited immediately")))
            os.environ.update(ENVIRONMENT | os.environ)
            warnings.showwarning = lambda message, *_, **__: screen.warn(str(message))
            stack.enter_context(join(host_place := place(), lambda why: _timed_out(why, folder.resumable(out))))
            if host_place.host:  # host 0 speaks for all
                stack.enter_context(screen.to(stack.enter_context(Path(os.devnull).open("w"))))
            os.environ.update(gpus_of(host_place))
            name, options = parse(argv)
            if name and host_place.hosts > 1:
                raise InputError(f"trireme {name} runs on one host. Start it without torchrun.")
            if isinstance(options, Options):
                out = world().texts(folder.named(options).out)[0]  # of host 0
                options = replace(options, out=out)
            collects = gc.isenabled()
            gc.disable()  # collections are a tenth of the time of imports
            module = importlib.import_module(f"trireme.engine.run.{MODULES.get(name, f'after.{name}')}")
            if collects:
                gc.enable()
            screen.clock().spent["imports"] += screen.clock().whole
            return int(module.run(options) or 0)
    except BaseException as error:
        message, code = explained(error)
        if code in (3, 4, LEFT) and (run := folder.resumable(out)):
            advice = "To continue" if code == LEFT else "When that is fixed"
            message = f"{message.rstrip('.')}. {advice}: --resume {quoted(run)}"
        if message:
            whose = f"host {host_place.host}: " if host_place.host else ""
            screen.urgent(f"error: {whose}{' '.join(message.split())[:2000]}")
        return code
    finally:
        _give_up_output()


def gpus_of(at: Place) -> dict[str, str]:
    """The environment in which a host sees only its own GPUs if several hosts are on one machine."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(at.local_hosts)))).split(",")
    return {} if at.local_hosts == 1 else {"CUDA_VISIBLE_DEVICES": ",".join(names[at.local :: at.local_hosts])}


def explained(error: BaseException) -> tuple[str, int]:
    """The message and the exit code of an expected error; raises others."""
    number, behind = getattr(error, "errno", None), getattr(error.__context__, "errno", None)
    for kind, code in EXPECTED.items():
        if isinstance(error, kind):
            return str(error), 4 if behind in FAILING else code  # a drive failed to read a user's file
    if isinstance(error, BrokenPipeError):
        return "", 141
    if isinstance(error, MemoryError) or number in (errno.ENOMEM, errno.EAGAIN) or SHORT.search(str(error)):
        return f"there is not enough memory ({error}). Free some, or raise its limits (ulimit -v, -u).", 3
    if isinstance(error, OSError):
        name, reason = error.filename or "a temporary file", str(error.strerror or error).rstrip(".")
        return f"{name}: {reason}.{CURES.get(number or 0, '') * (name != screen.OUTPUT)}", 2 if number in TAKEN else 4
    if isinstance(error, KeyboardInterrupt):
        return "interrupted.", LEFT
    raise error


def _timed_out(reason: str, run: str) -> None:
    """Ends this process: another host is lost while this one waits for it. `run`: the folder that --resume takes."""
    from trireme.engine.queues.watchdog import leave  # late: torch takes seconds

    advice = f"To continue, on all hosts: --resume {quoted(run)}" if run else "There is no snapshot yet"
    leave(lambda: screen.urgent(f"error: {reason.rstrip('.')}. {advice}"))


def _give_up_output() -> None:
    """Drops text that cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# ---------------------------------------------------------------- arguments


def parse(argv: Sequence[str]) -> tuple[str, Base]:
    """(command, its options); the command "" trains. Raises InputError; exits for --help."""
    word = argv[0] if argv else ""
    if word in COMMANDS:
        return word, COMMANDS[word].of(_values(word, COMMANDS[word], argv[1:]))
    return "", of_a_run(_values("", Options, argv))


def _values(command: str, cls: type[Base], argv: Sequence[str]) -> dict[str, Any]:
    """The values of a command line as texts, by option; those of other trainers' options too."""
    fields, values, foreign, words = table(cls), dict[str, Any](), dict[str, Any](), list(argv)
    free = [name for name in ("model",) * (not command) + ("folder", "name") if name in fields]
    while words:
        word = words.pop(0)
        if word in ("-h", "--help", "--version"):
            version = next((f"trireme {d.version}" for d in metadata.distributions(name="trireme")), "not installed")
            print(version if word == "--version" else "\n".join(_help(command, cls)))
            raise SystemExit(0)
        if not word.startswith("-"):
            if not free:
                ways = f"Data is given with --data FILE, times as 30min; commands are {', '.join(COMMANDS)}"
                raise InputError(f"{word} was not expected. {f'See trireme {command} --help' if command else ways}.")
            values[free.pop(0)] = word
            continue
        name, equals, text = word.lstrip("-").partition("=")
        name, value = name.replace("-", "_"), text if equals else True
        option = fields[name].metadata if name in fields else {"parse": None, "repeat": False}
        if not equals and option["parse"] is not bool:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif name in fields and name != "resume":
                advice = "a rank: --lora 16 is usual" if name == "lora" else f"a value; one with dashes: {word}=VALUE"
                raise InputError(f"{word} needs {advice}.")
        target = values if name in fields or command else foreign
        target[name] = [*values.get(name, []), value] if option["repeat"] else value
    return config_file.translated(foreign, values) if foreign else values


def _help(command: str, cls: type[Base]) -> Iterator[str]:
    """The lines of --help, in the terminal's width."""
    width, options = min(112, shutil.get_terminal_size((113, 24)).columns - 1), table(cls)
    first = [f for name, f in options.items() if name in (("folder", "name") if command else ("model",))]
    words = " ".join([command, *(f.metadata["metavar"] for f in first)])
    yield f"usage: trireme {words if command else 'CHECKPOINT --data FILE [--out DIR]'} [options]\n"
    yield cls.__doc__ or "" if command else "Fine-tunes CHECKPOINT, a Hugging Face model's folder or name on the hub."
    for group in GROUPS:
        rows = [f for f in options.values() if f.metadata["group"] == group and f not in first]
        yield from [f"\n{group}:"] if rows else []
        for f in rows:
            head, about = f"  {flag(f.name)} {f.metadata['metavar']}", f.metadata["help"]
            shown = ",".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
            about += f" [{shown}]" if "[" not in about and f.default not in (None, False, "", ()) else ""
            lines = textwrap.wrap(about, width - 32, break_long_words=False, break_on_hyphens=False)
            yield from [head] if len(head) > 30 else [f"{head:32}{lines.pop(0)}"]
            yield from (" " * 32 + line for line in lines)
    if not command:
        yield f"\nOther commands, each with its own --help: {', '.join(COMMANDS)}. Names of other trainers work too."


# ---------------------------------------------------------------- options of a run


def of_a_run(values: Mapping[str, Any]) -> Options:
    """The options of a run: those of the command, those of --config or of the run of --resume. Raises InputError."""
    if not (values.get("resume") or values.get("config")):
        return Options.of(values)
    path, resume = Path(str(values.get("config"))), values.get("resume")
    if resume:
        if conflicting := {"config", "shape", "demo", "out"} & values.keys():
            raise InputError(f"{flag(conflicting.pop())}: a resumed run has its own. Leave it out.")
        run = folder.latest(Path("runs")) if resume is True else Path(resume)
        if not world().host:
            folder.check_resumable(run)
        path, values = run / "config.yaml", {**values, "resume": str(run), "out": str(run)}
    text = world().texts("" if world().host else config_file.text_in(path))[0]  # of host 0
    stored, chosen = config_file.parse_options(path, text)
    if stored.get("resume") and not resume:
        raise InputError(f"{path}: resume: a resumed run has its own options. Leave it out: trireme --resume RUN.")
    if {"epochs", "max_steps"} & values.keys():  # the length is given by one of them
        stored = {name: value for name, value in stored.items() if name not in ("epochs", "max_steps")}
    options = Options.of({**stored, **values}, f"{path}: ")
    return replace(options, chosen=frozenset(chosen & stored.keys() | values.keys()))

"""The command: options, a run, and each expected failure as one line and an exit code.

Exit codes: 0 done; 1 bug; 2 input; 3 does not fit; 4 disk failed or full, device hung, host lost; 130 interrupted; 141
output closed.
"""

import errno
import io
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from trireme.engine.hosts.group import Alone, LostHost, Place, joined, place
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.clock import Clock, process_began
from trireme.engine.run.command import parse, program
from trireme.engine.run.config.config_file import Refused
from trireme.engine.run.finished.options import (
    check_options,
    eval_options,
    merge_options,
    push_options,
    sample_options,
    score_options,
)
from trireme.engine.run.hub.fetch import base_for, fetched
from trireme.engine.run.options import Options
from trireme.engine.run.screen import OUTPUT, Screen
from trireme.engine.run.signals import LEFT, end_at_signals, stop_signals
from trireme.models.config import InputError
from trireme.storage.headers import CheckpointError
from trireme.storage.untrusted import quoted, shown

LONGEST, WORD = 2000, 300  # characters of an error, of one word in it
MISNAMED = (errno.ENAMETOOLONG, errno.ELOOP)  # of a path that was given
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
FAILING = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EUCLEAN)  # a drive, or a server of files
NO_MEMORY = (errno.ENOMEM, errno.EAGAIN)  # a limit of memory, of processes
WAIT = 10.0  # seconds of silence while hosts meet
NO_THREAD = "can't start new thread"  # Python's
# Spinning threads of torch: steps ten times slower on a busy CPU. Segments that grow: none of a GPU's memory is lost to
# fragments, 0.7 GiB of 24 otherwise; WSL2's driver may refuse them.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"} | (
    {} if "microsoft" in platform.release().lower() else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
)


def command() -> int:
    """The console script: returns the exit code."""
    open_streams()
    argv, began = sys.argv[1:], process_began()
    chat = argv[:1] == ["sample"]  # Ctrl-C ends an answer
    if chat and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not chat:
        sys.unraisablehook = unraisable
    code = main(argv, began)
    end_at_signals(code)
    return code


def main(argv: Sequence[str], began: float | None = None) -> int:
    """Returns the exit code. `began`: time.monotonic() at the command's start, if not now."""
    chat = list(argv[:1]) == ["sample"]  # Ctrl-C ends an answer, not the conversation
    with nullcontext() if chat else stop_signals(interrupt, left_at_once):  # until train's and loop.Run's
        return _main(argv, began)


def _main(argv: Sequence[str], began: float | None) -> int:
    options, screen, clock, at = Options(), Screen(), Clock(began=began), Place()

    def fail(message: str, code: int) -> int:
        whose = f"host {at.host}: " if at.host else ""
        words = " ".join(shown(word, WORD) for word in message.split())
        screen.urgent(f"error: {whose}{shown(words, LONGEST)}")
        return code

    def timed_out(why: str) -> None:
        from trireme.engine.queues.watchdog import leave  # late: torch takes seconds

        leave(lambda: fail(f"{why.rstrip('.')}. {how_to_go_on(options)}", 4))

    try:
        check_folder()
        if argv and argv[0] in COMMANDS:
            os.environ.update(ENVIRONMENT | os.environ)
            if place().hosts > 1:
                raise InputError(f"trireme {argv[0]} runs on one host. Start it without torchrun, or unset WORLD_SIZE.")
            return COMMANDS[argv[0]](argv[1:])
        at = place()
        if at.host:
            screen = Screen(nowhere())
        with ExitStack() as stack:
            with said_later(screen, at):
                group = stack.enter_context(joined(at, timed_out))
            options = parse(argv, group.host, group.hosts, lambda text: group.texts(text)[0], screen.say)
            take_gpus(options, at)
            return run(options, screen, clock, group)
    except (InputError, CheckpointError) as error:
        code = fail(str(error), 4 if is_of_drive(error) else 2)
        for line in error.lines if isinstance(error, Refused) else ():
            screen.urgent(f"  {shown(line, LONGEST)}")
        return code
    except DoesNotFit as error:
        return fail(str(error), 3)
    except LostHost as error:
        return fail(f"{str(error).rstrip('.')}. {how_to_go_on(options)}", 4)
    except BrokenPipeError:  # the reader has gone
        return 141
    except OSError as error:
        if error.errno in NO_MEMORY:
            return fail(about_memory(error.strerror or str(error), options), 3)
        return fail(about_disk(error, options), 2 if error.errno in MISNAMED else 4)
    except MemoryError as error:
        return fail(about_memory(str(error), options), 3)
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        return fail(about_memory(NO_THREAD, options), 3)
    except KeyboardInterrupt:
        if argv and argv[0] in COMMANDS:
            return fail("interrupted; the same command continues" if argv[0] == "score" else "interrupted", 130)
        if is_resumable(options):
            return fail(f"interrupted. To continue: --resume {run_folder(options)}", 130)
        return fail("interrupted before there was anything to save", 130)
    finally:
        give_up_output()


@contextmanager
def said_later(screen: Screen, at: Place) -> Iterator[None]:
    """A context in which hosts connect. It says so after WAIT seconds, since a wrong name shows only at the end."""
    if at.hosts == 1:
        yield
        return
    line = f"host {at.host} waits for the others"
    timer = threading.Timer(WAIT, screen.urgent, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def interrupt(_: int) -> None:
    """Handles a signal as Python handles Ctrl-C."""
    raise KeyboardInterrupt


def left_at_once() -> None:
    Screen().urgent("exited immediately")


def unraisable(what: "sys.UnraisableHookArgs") -> None:
    """An interrupt that came within a callback of the garbage collector is dropped by Python: the process ends."""
    if what.exc_type is KeyboardInterrupt:
        left_at_once()
        os._exit(LEFT)
    sys.__unraisablehook__(what)


def check_folder() -> None:
    """Raises InputError if the current folder has been removed: torch's libraries would end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError("the current folder has been removed. Go to another: cd.") from None


def is_resumable(options: Options) -> bool:
    """Whether the run has begun, so that --resume can continue it."""
    try:
        return bool(options.out) and Path(options.out, "config.yaml").exists()
    except OSError:  # a name that is too long, a folder that is closed
        return False


def about_disk(error: OSError, options: Options) -> str:
    """The message of an error of a drive or a path, and what to do."""
    where, what = error.filename or options.out or "the temporary folder", error.strerror or str(error)
    if is_resumable(options):
        return f"{where}: {what}. When that is fixed: --resume {run_folder(options)}"
    if error.errno in FULL:
        return f"{where}: {what}." + " Free some space there, or name another folder." * (where != OUTPUT)
    if error.errno in CLOSED:
        return f"{where}: {what}. Change its permissions, or name another."
    if error.errno in MISNAMED:
        return f"{where}: {what}. Name another path."
    return f"{where}: {what}." + " Is its drive failing? See dmesg." * (error.errno in FAILING)


def is_of_drive(error: BaseException) -> bool:
    """Whether a message about a file's content is caused by a drive that failed to read it."""
    behind = error.__context__
    return isinstance(behind, OSError) and behind.errno in FAILING


def about_memory(what: str, options: Options) -> str:
    """The message that memory is short, and what to do."""
    again = f" When that is fixed: --resume {run_folder(options)}" if is_resumable(options) else ""
    said = f": {what}" if what else ""
    return f"there is not enough memory for that{said}. Free some, or raise its limits (ulimit -v, -u).{again}"


def run_folder(options: Options) -> str:
    """The folder that --resume takes, as a word of a command."""
    return quoted(Path(options.out).parent if place().host else options.out)


def how_to_go_on(options: Options) -> str:
    """How to continue a run whose hosts have ended."""
    if is_resumable(options):
        return f"To continue, on all hosts: --resume {run_folder(options)}"
    return "There is no snapshot yet"


def take_gpus(options: Options, at: Place) -> None:
    """Lets a host see only its own GPUs if several hosts are on one machine. Raises InputError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if at.local_hosts == 1 or options.device == "cpu" or visible == "":
        return
    if options.gpus == "all":
        raise InputError(f"--gpus all: {at.local_hosts} hosts are on this machine. Give --gpus N, the number for each.")
    each = int(options.gpus)
    own = range(at.local * each, (at.local + 1) * each)
    every = visible.split(",") if visible is not None else [str(gpu) for gpu in range(own.stop)]
    if len(every) < own.stop:
        raise InputError(
            f"--gpus {each}: CUDA_VISIBLE_DEVICES shows {len(every)} to the {at.local_hosts} hosts of this machine."
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(every[gpu] for gpu in own)


def nowhere() -> io.TextIOWrapper:
    """A stream that drops its text."""
    return io.TextIOWrapper(io.FileIO(os.devnull, "w"))


def open_streams() -> None:
    """Replaces closed streams by an empty one and ones that drop their text, and lets characters that cannot be encoded
    be replaced.
    """
    sys.stdin = sys.stdin or io.TextIOWrapper(io.BufferedReader(io.FileIO(os.devnull)))
    sys.stdout, sys.stderr = sys.stdout or nowhere(), sys.stderr or nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def give_up_output() -> None:
    """Drops text that cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with Path(os.devnull).open("w") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())


def run(options: Options, screen: Screen, clock: Clock, group: Alone) -> int:
    """Trains. Returns the exit code: 0, or 130 if the run was interrupted and saved."""
    os.environ.update(ENVIRONMENT | os.environ)
    warnings.showwarning = lambda message, *_, **__: screen.urgent(f"warning: {message}")

    if not options.demo:
        options = fetched(options, screen)
    if group.hosts == 1 and not (options.demo or options.resume):
        check_paths(options)
    # late: torch takes seconds
    from trireme.engine.run import demo, loop, train

    clock.spent["imports"] += clock.whole
    try:
        with demo.prepared(options, screen) if options.demo else nullcontext(options) as given:
            fitted = demo.sized(given, screen) if options.demo else given
            train.finetune(fitted, screen, clock, group)
            if options.demo and not options.dry_run:
                demo.say_after(fitted, screen)
    except loop.Interrupted:
        return 130
    return 0


def check_paths(options: Options) -> None:
    """Checks the paths that a new run is given, before torch is imported. Raises InputError."""
    from trireme.engine.data.dataset import parse_val  # late: --help needs none of it
    from trireme.engine.data.find import find
    from trireme.engine.run.output.folder import check_checkpoint, check_free
    from trireme.models.config import read_config

    check_checkpoint(options.model)
    if not options.dry_run:
        check_free(options)
    if not options.shape:
        read_config(options.model, options.rope_factor)
    for text in options.data:
        if text != "-":
            find(text)
    parse_val(options.val)


def merge(argv: Sequence[str]) -> int:
    """`trireme merge ADAPTER --out DIR`. Raises InputError, CheckpointError, StoreError."""
    given, screen = merge_options(argv), Screen()
    from trireme.engine.run.finished.merge import merge_of_run  # late, as above, and in all commands

    base = base_for(Path(given.adapter), given.model, screen)
    merge_of_run(Path(given.adapter), base, Path(given.out), screen)
    screen.say(f"output   {given.out}/: the model with its adapter, read back")
    screen.say(f"next     {program()} eval {quoted(given.out)} --data FILE, or open it with transformers")
    return 0


def check(argv: Sequence[str]) -> int:
    """`trireme check`. Raises InputError, StoreError, OSError."""
    given, screen = check_options(argv), Screen()
    from trireme.engine.check import check as checks

    checks.check(checks.folders_of(given.store), Path(given.report), screen.say, given.tune)
    return 0


def sample(argv: Sequence[str]) -> int:
    """`trireme sample FOLDER`. Raises as finished.sample.sample."""
    given = sample_options(argv)
    from trireme.engine.run.finished.sample import sample

    return sample(given)


def evaluate(argv: Sequence[str]) -> int:
    """`trireme eval FOLDER --data FILE`. Raises as finished.evaluate.evaluate."""
    given = eval_options(argv)
    from trireme.engine.run.finished.evaluate import evaluate

    return evaluate(given)


def score(argv: Sequence[str]) -> int:
    """`trireme score FOLDER --data FILE --out DIR`. Raises as finished.score.score."""
    given = score_options(argv)
    from trireme.engine.run.finished.score import score

    return score(given)


def push(argv: Sequence[str]) -> int:
    """`trireme push FOLDER OWNER/NAME`. Raises InputError, OSError."""
    given = push_options(argv)
    from trireme.engine.run.hub.push import push

    push(Path(given.folder), given.name, Screen())
    return 0


COMMANDS = {  # besides training
    "merge": merge,
    "check": check,
    "sample": sample,
    "eval": evaluate,
    "score": score,
    "push": push,
}

"""The command: options, a run, and each foreseen failure as one line and an exit code.

Exit codes: 0 done; 1 a bug; 2 wrong input; 3 the model does not fit; 4 a disk failed or is full; 130 interrupted.
"""

import errno
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from trireme.engine.plan import DoesNotFit
from trireme.engine.run.command import parse
from trireme.engine.run.options import Options
from trireme.engine.run.screen import OUTPUT, Screen
from trireme.engine.run.signals import stop_signals
from trireme.models.config import InputError
from trireme.storage.checkpoint import CheckpointError
from trireme.storage.untrusted import shown

LONGEST = 2000  # characters of an error


def command() -> int:
    """`trireme ...` of a shell."""
    open_streams()
    return main(sys.argv[1:])


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`; returns the exit code. Every foreseen failure is one line on stderr."""
    options, screen = Options(), Screen()

    def fail(message: str, code: int) -> int:
        screen.urgent(f"error: {shown(' '.join(message.split()), LONGEST)}")
        return code

    try:
        options = parse(argv)
        return run(options, screen)
    except (InputError, CheckpointError) as error:
        return fail(str(error), 2)
    except DoesNotFit as error:
        return fail(str(error), 3)
    except BrokenPipeError:  # the reader of our output has gone
        return 141
    except OSError as error:
        return fail(about_disk(error, options), 4)
    except MemoryError as error:
        return fail(f"there is not enough memory for that{f': {error}' if str(error) else ''}. Free some", 3)
    except KeyboardInterrupt:
        if is_resumable(options):
            return fail(f"interrupted. To go on: --resume {options.out}", 130)
        return fail("interrupted before there was anything to save", 130)
    finally:
        give_up_output()


def is_resumable(options: Options) -> bool:
    return bool(options.out) and Path(options.out, "config.yaml").exists()


def about_disk(error: OSError, options: Options) -> str:
    """What failed on the disk, and what to do."""
    where, what = error.filename or options.out or "the temporary folder", error.strerror or str(error)
    if is_resumable(options):
        return f"{where}: {what}. When that is mended: --resume {options.out}"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and where != OUTPUT
    return f"{where}: {what}." + " Make room there, or name another folder." * full


def open_streams() -> None:
    """Sends closed output nowhere; replaces characters that the terminal's encoding lacks."""
    nowhere = io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def give_up_output() -> None:
    """Drops the text waiting for an output that cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(options: Options, screen: Screen) -> int:
    """Trains; 130 when interrupted with everything saved."""
    # Waiting threads of torch should sleep: spinning ones make a step ten times slower on a busy CPU.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.showwarning = lambda message, *_, **__: screen.urgent(f"warning: {message}")

    def leave(_: int) -> None:
        raise KeyboardInterrupt

    with stop_signals(leave, lambda: screen.urgent("left at once")):  # until the steps begin: see train.Run
        # late: torch takes seconds, and a mistyped option or --help should not
        from trireme.engine.run import demo, train

        try:
            with demo.prepared(options, screen) if options.demo else nullcontext(options) as given:
                train.finetune(given, screen)
        except train.Interrupted:
            return 130
    return 0

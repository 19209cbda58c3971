"""python -m trireme, and the command trireme: Ctrl-C ends it without a traceback while modules are imported, too."""

import signal
import sys
from collections.abc import Callable


def loaded() -> Callable[[], int]:
    """The command, which has its own handlers of signals."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from trireme.engine.run.cli import command  # late: it takes a moment

    return command


def main() -> int:
    return loaded()()


if __name__ == "__main__":
    sys.exit(main())

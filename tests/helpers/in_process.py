"""What tests run in a process of a codec: it imports them by name, which it cannot from a test's own file."""

import os
import resource
import signal


def pid(programs):
    return os.getpid()


def spin(programs):
    """Without end; the limit of the processor's time, which `limits` has, comes at once."""
    signal.setitimer(signal.ITIMER_PROF, 0.1)
    while True:
        pass


def limits(programs):
    """Soft limits of memory and core files, seconds of the processor left."""
    limit = lambda which: resource.getrlimit(which)[0]
    return limit(resource.RLIMIT_AS), limit(resource.RLIMIT_CORE), signal.getitimer(signal.ITIMER_PROF)[0]

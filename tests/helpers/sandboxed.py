"""Functions for the tests of sandboxes: the child imports this module by its name."""

import os
import signal

from trireme.engine.data.rows import BadRow
from trireme.models.config import InputError


class Thing:
    """What is made in the child."""

    def __init__(self, begin, name):
        if name == "wrong":
            raise InputError("wrong")
        self.begin, self.calls = begin, [name]


def remember(thing, word):
    thing.calls.append(word)
    return thing.calls


def pid(thing):
    return os.getpid()


def raise_it(thing, kind):
    raise {"input": InputError, "row": BadRow, "bug": KeyError}[kind]("so it is")


def compute(thing, seconds):
    """A single call of C code, which holds Python's lock for hours."""
    thing.begin("counting", seconds)
    return 10 ** (10**10)


def time_left(thing):
    return signal.getitimer(signal.ITIMER_PROF)[0]


def take(thing, nbytes):
    thing.begin("taking", 60)
    return len(bytearray(nbytes))


def abort(thing):
    thing.begin("quoting", 60)
    os.write(2, b"\x1b[2J a stranger's words")
    os.abort()


def interrupt_the_parent(thing):
    """As Ctrl-C does: it reaches both."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getppid(), signal.SIGINT)
    compute(thing, 600)

"""Files that a stranger may have written: mutations by bytes and by structure, fed to a parser in a forked child.

Whatever comes back must be one of the parser's own refusals, within seconds and a few GiB; a child that dies is found
out too. Everything follows from a number, the seed.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import resource
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LAUGHS = "&a [x, x, x, x, x, x, x, x, x, x]"  # a kilobyte of YAML, and written out ten words to the 20th power
for before, after in zip("abcdefghijklmnopqrs", "bcdefghijklmnopqrst", strict=True):
    LAUGHS = f"&{after} [{LAUGHS}, {', '.join([f'*{before}'] * 9)}]"
ROOT = Path(__file__).parents[2]
LIMIT = 10.0  # seconds of CPU that a file may take
ROOM = 3 << 30  # bytes of address space that it may take
SHOWN = 4000  # bytes of a file that a finding holds
SHRINKING = 5.0  # seconds of CPU spent on making a file shorter that still does it

# What a value is replaced by. Two words stand for what no encoder would write, and are replaced when all is text.
DEEP, LONG_NUMBER = "@deep@", "@number@"
NUMBERS = (0, 1, -1, 2, 7.5, -0.0, 1 << 31, 1 << 63, 1 << 64, 10**400, 1e308, float("nan"), float("inf"), LONG_NUMBER)
WORDS = ("", "x", "F22", "\ud800", "\x1b[2J\x07", "\0", "\ufdd0", "\u202e", "a/b", "1e999", "-", "a" * 70_000)
SHAPES = ([], {}, [[]], [None], {"": None}, {"a": [1]}, ["x"] * 3, [0] * 100, DEEP)
JUNK: tuple[Any, ...] = (None, True, False, *NUMBERS, *WORDS, *SHAPES)
NESTED = (50, 50, 50, 20_000)  # levels; a YAML parser takes a second for the most
TOKENS = (
    *b"\" ' \\ { } [ ] , : - 1e999 NaN null \\ud800".split(b" "),
    *(b"\0", b"\n", b"\r", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xed\xa0\x80"),
    *(b"9" * 30, b"[" * 60, b"{" * 60, b'{"a":' * 3_000),
)


@dataclass(frozen=True)
class Target:
    """A parser under attack: `values` of good files, what writes one as bytes, what reads it, what may be raised."""

    values: Sequence[Any]
    write: Callable[[Any], bytes]
    read: Callable[[bytes], None]
    refusals: tuple[type[BaseException], ...] = ()
    junk: tuple[Any, ...] = ()  # of its own kind, beside JUNK


@dataclass(frozen=True)
class Finding:
    """A file that was not refused as it should be: what happened and where, what was said, the seed, the file."""

    what: str
    said: str
    seed: int
    data: bytes
    others: int = 0  # how many more did the same

    def __str__(self) -> str:
        return f"seed {self.seed} and {self.others} more: {self.what}: {self.said}: {self.data[:300]!r}"


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def as_lines(values: Any) -> bytes:
    return b"\n".join(map(as_json, values)) if isinstance(values, list) else as_json(values)


def as_text(pieces: Any) -> bytes:
    """Strings as they are; where a surrogate is among them, that is not UTF-8."""
    return "".join(map(str, pieces if isinstance(pieces, list) else [pieces])).encode(errors="surrogatepass")


def mutated(target: Target, seed: int) -> bytes:
    """The file of a seed: even ones by structure, odd ones by bytes."""
    dice = random.Random(seed)
    value = dice.choice(target.values)
    times = dice.choice((1, 1, 2, 4))
    if seed % 2:
        data = target.write(value)
        for _ in range(times):
            data = _by_bytes(dice, data)
        return data
    whole = [deepcopy(value)]
    for _ in range(times):
        _change(dice, whole, (*JUNK, *target.junk))
    data = target.write(whole[0] if whole else None)
    levels = dice.choice(NESTED)
    data = data.replace(f'"{DEEP}"'.encode(), b"[" * levels + b"]" * levels)
    return data.replace(f'"{LONG_NUMBER}"'.encode(), b"9" * 5_000)


def _by_bytes(dice: random.Random, data: bytes) -> bytes:
    """The bytes with a piece of them removed, repeated, flipped, replaced or moved."""
    a, b = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    if dice.random() < 0.7:
        b = min(b, a + dice.choice((1, 2, 8, 100)))
    head, piece, tail = data[:a], data[a:b], data[b:]
    flipped = bytes([piece[0] ^ 1 << dice.randrange(8)]) + piece[1:] if piece else b""
    others = (b"", piece * 2, flipped, dice.choice(TOKENS), dice.randbytes(len(piece)), tail + piece, piece + head)
    return head + dice.choice(others) + tail


def _change(dice: random.Random, whole: list, junk: Sequence[Any]) -> None:
    """Replaces, removes, repeats, renames, wraps or exchanges one place in a list of values."""
    places = list(_places(whole))
    inside, key = dice.choice(places) if places else (whole.append(None) or whole, 0)
    way = dice.choice(("replace", "replace", "replace", "remove", "repeat", "rename", "wrap", "exchange"))
    if way == "replace":
        inside[key] = deepcopy(dice.choice(junk))
    elif way == "remove":
        del inside[key]
    elif way == "wrap":
        inside[key] = dice.choice(([inside[key]], {"a": inside[key]}, str(inside[key])))
    elif way == "exchange":
        other, there = dice.choice(places or [(inside, key)])
        inside[key], other[there] = deepcopy(other[there]), deepcopy(inside[key])
    elif isinstance(inside, list):
        inside[key:key] = [deepcopy(inside[key])] * dice.choice((1, 1, 50))
    else:
        names = [name for name in junk if isinstance(name, str)]
        inside[dice.choice(names)] = deepcopy(inside[key]) if way == "repeat" else inside.pop(key)


def _places(value: Any) -> Iterable[tuple[Any, Any]]:
    """(container, key or index) of everything in a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


# ---------------------------------------------------------------- the attack


def attack(make: Callable[[Path], Target], seeds: Sequence[int]) -> list[Finding]:
    """Feeds the file of each seed to the target that `make` makes in a folder; the findings, one of each kind."""
    note, found, begun = mmap.mmap(-1, 16 + SHOWN), {}, 0
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    while begun < len(seeds):
        heard, said = os.pipe()
        with tempfile.TemporaryDirectory(prefix="trireme-fuzz-", dir=in_memory) as folder:
            gc.collect()  # an engine's memory is not inherited: a child must not let go of it
            pid = os.fork()
            if not pid:
                _child(make, seeds, begun, Path(folder), note, said)
            os.close(said)
            with os.fdopen(heard, "rb") as pipe:
                for line in pipe:
                    what, words, seed, data = json.loads(line)
                    _count(found, Finding(what, words, seed, bytes.fromhex(data)))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code <= 0, found
        last, size = struct.unpack("qq", note[:16])
        if code < 0:
            what = f"slower than {LIMIT:g} s" if code == -signal.SIGPROF else f"ended by {signal.Signals(-code).name}"
            _count(found, Finding(what, "", seeds[last], note[16 : 16 + size]))
        begun = last + 1
    return list(found.values())


def _count(found: dict[str, Finding], new: Finding) -> None:
    first = found.get(new.what)
    found[new.what] = replace(first, others=first.others + 1) if first else new


def _child(make, seeds: Sequence[int], begun: int, place: Path, note: mmap.mmap, said: int) -> None:
    """Reads the files from number `begun` on, and says what it finds as lines of JSON."""
    tell = lambda *finding: os.write(said, json.dumps(finding).encode() + b"\n")
    code = 1
    try:
        os.chdir(place)
        os.fsync = os.fdatasync = lambda fd: None  # nothing here has to survive
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        quiet = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(quiet, fd)
        target, kinds = make(place), set()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + ROOM, resource.RLIM_INFINITY))
        for number in range(begun, len(seeds)):
            data = mutated(target, seeds[number])
            shown = data[:SHOWN]
            note[: 16 + len(shown)] = struct.pack("qq", number, len(shown)) + shown
            what, words = _outcome(target, data)
            if what and what not in kinds:
                data = _shortest(data, lambda shorter, what=what: _outcome(target, shorter)[0] == what)
            if what:
                tell(what, words, seeds[number], data[:SHOWN].hex())
            kinds.add(what)
        code = 0
    except BaseException:
        tell("the target cannot be made", traceback.format_exc(), -1, "")
    finally:
        os._exit(code)


def _outcome(target: Target, data: bytes) -> tuple[str, str]:
    """(what was raised, and where) that is none of the target's refusals, and its words; both empty if all is well."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is doing
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        target.read(data)
    except target.refusals:
        pass
    except BaseException as error:
        ours = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(ROOT)]
        return f"{type(error).__name__}, {Path(ours[-1].filename).name}:{ours[-1].lineno}", str(error)[:80]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "", ""


def _shortest(data: bytes, still: Callable[[bytes], bool]) -> bytes:
    """A shorter file for which `still` holds, by leaving out ever smaller pieces."""
    size, end = len(data) // 2, time.process_time() + SHRINKING
    while size:
        at = 0
        while at < len(data) and time.process_time() < end:
            shorter = data[:at] + data[at + size :]
            if still(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data
